"""A deserializer that asks a Schema Registry how a key or a value is to be read.

confluent_kafka.schema_registry does the work. It needs packages that are not among the library's own dependencies, so
it is imported when a deserializer is made and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from marshal_py.transport.serialization import Deserializer

PREFIX_BYTES: Final = 5  # of each value in the registry's wire format: a zero byte, and the number of its schema


def registry_deserializer(url: str) -> Deserializer:
    """Returns a deserializer that looks up the schema of each value in the registry, once per schema.

    It raises ValueError for bytes that are not in the registry's wire format, and for a schema that is neither Avro nor
    JSON; other errors are those of confluent_kafka.schema_registry. This function raises ImportError without the
    packages of the extra schema-registry, and ValueError for a text that is no URL.
    """
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroDeserializer
    from confluent_kafka.schema_registry.json_schema import JSONDeserializer

    client = SchemaRegistryClient({"url": url})
    known: dict[str, Callable[..., Any]] = {
        "AVRO": AvroDeserializer(client),
        "JSON": JSONDeserializer(None, schema_registry_client=client),
    }

    def read(content: bytes | None, context: Any) -> Any:
        if content is None:
            return None
        if len(content) < PREFIX_BYTES or content[0] != 0:
            raise ValueError("it does not begin with a zero byte and the number of a schema")
        kind = client.get_schema(int.from_bytes(content[1:PREFIX_BYTES], "big")).schema_type or "AVRO"
        if kind not in known:
            raise ValueError(
                f"its schema is of type {kind}, and {' and '.join(known)} are read: use another deserializer"
            )
        return known[kind](content, context)

    return read
