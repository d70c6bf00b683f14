"""Deserializers: their types, and what they get beside the bytes of a message, as confluent-kafka's own expect it.

`K_co` and `V_co` stand for the types of keys and values, in `Message[K, V]` and all that holds such messages. A
`Message` without types in brackets is a message of any keys and values. `K` and `V` are what the deserializers of a
call return; without deserializers they are `bytes | None`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from marshal_py.errors import InvalidOption
from marshal_py.transport.ports import RawMessage

if TYPE_CHECKING:  # Python has defaults of type variables from 3.13 on; type checkers know them in all versions
    from typing_extensions import TypeVar

    K_co = TypeVar("K_co", covariant=True, default=Any)
    V_co = TypeVar("V_co", covariant=True, default=Any)
    K = TypeVar("K", default=bytes | None)
    V = TypeVar("V", default=bytes | None)
    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    K_co = TypeVar("K_co", covariant=True)
    V_co = TypeVar("V_co", covariant=True)
    K = TypeVar("K")
    V = TypeVar("V")
    T = TypeVar("T")

# Called with the bytes of a key or a value (None if there are none) and a SerializationContext.
Deserializer = Callable[[bytes | None, Any], T]

IN_A_LOOP: Final = "to start a coroutine of an event loop in it, call asyncio.run_coroutine_threadsafe(coroutine, loop)"


class SerializationContext:
    """As confluent_kafka.serialization.SerializationContext. `field`: "key" or "value"."""

    __slots__ = ("field", "headers", "topic")

    field: str
    headers: Any
    topic: str

    def __init__(self, topic: str, field: str, headers: Any) -> None:
        self.topic, self.field, self.headers = topic, field, headers


def context_of(raw: RawMessage, field: str) -> SerializationContext:
    """Returns the context of the key or the value of a message."""
    return SerializationContext(raw.topic() or "", field, raw.headers())


def check_plain(option: str, value: object, way_out: str = IN_A_LOOP) -> None:
    """Raises InvalidOption unless `value` is a function that does its work when called. `way_out`: for a coroutine
    function."""
    if not callable(value):
        raise InvalidOption(option, value, "a function, or None")
    for one in (value, type(value).__call__):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            raise InvalidOption(option, value, f"a plain function, because nobody awaits what it returns; {way_out}")


PREFIX_BYTES: Final = 5  # of each value in the registry's wire format: a zero byte, and the number of its schema


def registry_deserializer(url: str) -> Deserializer:
    """Returns a deserializer that looks up the schema of each value in a Schema Registry, once per schema.

    confluent_kafka.schema_registry does the work. It needs packages that are not among the library's own dependencies,
    so it is imported here and not before.

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
