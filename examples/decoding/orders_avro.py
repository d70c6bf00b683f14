"""Parses Avro in Confluent's wire format, with Confluent's deserializer: `pip install 'confluent-kafka[avro]'`.

See decoding.py. No test runs this module, because it needs a registry.
"""

from functools import cache

from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError
from confluent_kafka.schema_registry.avro import AvroDeserializer
from decoding import Malformed

WANTED = """{"type": "record", "name": "Order", "fields": [
    {"name": "id", "type": "long"}, {"name": "amount", "type": "double", "default": 0}]}"""


@cache  # one per Python worker, for as long as it lives; the client keeps schemas by id
def tools():
    registry = SchemaRegistryClient({"url": "http://localhost:8081"})
    return registry, AvroDeserializer(registry, WANTED)


def parse(value):
    registry, deserializer = tools()
    if len(value) < 6 or value[0]:
        raise Malformed("not in Confluent's wire format")
    try:
        registry.get_schema(int.from_bytes(value[1:5], "big"))  # what the deserializer then finds in the cache
    except SchemaRegistryError as error:
        if error.http_status_code != 404:
            raise  # the registry is ill, not the message
        raise Malformed(str(error)) from error
    try:
        return deserializer(value)
    except Exception as error:  # fastavro has no error of its own for wrong bytes
        raise Malformed(repr(error)) from error
