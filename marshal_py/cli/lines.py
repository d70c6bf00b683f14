"""Messages as lines: what `marshal consume` prints and `marshal produce` reads. Nothing is lost between the two.

A line of text is the bytes of the value as they are. A line of JSON has everything: a value that is utf-8 is in
`value`, any other is in `value_base64`, and both are null if there is no value. The key and each header are written in
the same way. What a deserializer returned is in `value` or `key` as JSON; such lines are not for `marshal produce`.
`DecodingOptions` name deserializers and a Schema Registry.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import typer

from marshal_py.cli import output
from marshal_py.cli.options import CommonOptions
from marshal_py.cli.output import CommandFailed
from marshal_py.client.messages.message import Message
from marshal_py.topics.request import StoredMessage
from marshal_py.transport.serialization import Deserializer, registry_deserializer

Headers = list[tuple[str, bytes | None]]


class PrintedHeader(msgspec.Struct, frozen=True):
    """One header, printed or read. Its content is in `value`, or in `value_base64` if it is not utf-8; both are null
    without one. Headers are a list of these and not an object, because a name may occur more than once."""

    name: str
    value: str | None = None
    value_base64: bytes | None = None


class MessageLine(msgspec.Struct):
    """The fields that are read from a line of JSON; the message's old topic and offset are ignored."""

    key: str | None = None
    key_base64: bytes | None = None
    value: str | None = None
    value_base64: bytes | None = None
    headers: Sequence[PrintedHeader] = ()


class PrintedMessage(msgspec.Struct, frozen=True):
    """A message. `key`, `value`: text if they are utf-8, or what a deserializer has made of them; other bytes are in
    `key_base64` and `value_base64`. Without a key or value both are null. `timestamp`: Kafka's, ms since 1970. `token`,
    `delivery_count`: only of a consumer. `num_pending`, `last_offset`: only in a batch (StoredMessage).
    """

    topic: str
    partition: int
    offset: int
    key: Any
    value: Any
    timestamp: int
    token: str | msgspec.UnsetType
    key_base64: bytes | None
    value_base64: bytes | None
    headers: list[PrintedHeader]
    delivery_count: int | msgspec.UnsetType = msgspec.UNSET
    num_pending: int | msgspec.UnsetType | None = msgspec.UNSET
    last_offset: int | msgspec.UnsetType | None = msgspec.UNSET


_decoder = msgspec.json.Decoder(MessageLine)


def as_text(message: Message, separator: str | None) -> bytes:
    """Returns the value and a newline; if `separator` is given, the key and the separator come before them."""
    key = b"" if separator is None else as_bytes(message.key) + separator.encode()
    return key + as_bytes(message.value) + b"\n"


def as_bytes(content: Any) -> bytes:
    """Returns a key or a value as one text: bytes as they are, and what a deserializer returned as text or JSON."""
    if isinstance(content, bytes):
        return content
    if content is None:
        return b""
    plain = _builtins(content)
    return (plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)).encode()


def as_json(message: Message) -> bytes:
    """Returns one line of JSON with everything that the message has."""
    told = content(message, str(message.token), message.delivery_count)
    return msgspec.json.format(msgspec.json.encode(told), indent=0) + b"\n"


def content(
    message: Message | StoredMessage,
    token: str | msgspec.UnsetType = msgspec.UNSET,
    delivery_count: int | msgspec.UnsetType = msgspec.UNSET,
) -> PrintedMessage:
    """Returns a message as it is printed. The other arguments are of a consumer's."""
    key, key_base64 = _split(message.key)
    value, value_base64 = _split(message.value)
    pending = getattr(message, "num_pending", None)  # of a StoredMessage
    return PrintedMessage(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        key=key,
        value=value,
        timestamp=message.timestamp,
        token=token,
        key_base64=key_base64,
        value_base64=value_base64,
        headers=[PrintedHeader(name, *_split(content)) for name, content in message.headers],
        delivery_count=delivery_count,
        num_pending=msgspec.UNSET if pending is None else pending,
        last_offset=msgspec.UNSET if pending is None else getattr(message, "last_offset", None),
    )


def from_json(line: bytes, number: int) -> tuple[bytes | None, bytes | None, Headers]:
    """Returns key, value and headers of a line that `as_json` wrote. Raises CommandFailed for any other line. `number`:
    of the line, for the error."""
    try:
        read = _decoder.decode(line)
        headers = [(one.name, _join("value", one.value, one.value_base64)) for one in read.headers]
        return _join("key", read.key, read.key_base64), _join("value", read.value, read.value_base64), headers
    except (msgspec.DecodeError, ValueError) as error:
        raise output.CommandFailed(
            f"line {number} is no JSON object as `marshal consume --json` prints it ({error}); "
            "the lines before it are written"
        ) from error


def write_out(line: bytes, message: Message) -> None:
    """Writes to stdout and flushes. Raises BrokenPipeError if the reader has gone, CommandFailed if writing fails.
    `message`: the message that the line shows, for the error."""
    try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        output.close_stdout()
        raise output.CommandFailed(
            f"stdout takes no more ({error.strerror}): {message.topic}:{message.partition} at "
            f"offset {message.offset} is not acknowledged and will come again"
        ) from error


def _split(content: Any) -> tuple[Any, bytes | None]:
    if not isinstance(content, bytes):
        return _builtins(content), None
    try:
        return content.decode(), None
    except UnicodeDecodeError:
        return None, content


def _builtins(content: Any) -> Any:
    """Returns what a deserializer returned in JSON's types; what JSON does not have becomes text."""
    return msgspec.to_builtins(content, str_keys=True, enc_hook=str)


def _join(name: str, text: str | None, binary: bytes | None) -> bytes | None:
    if text is not None and binary is not None:
        raise ValueError(f"both {name} and {name}_base64 are given")
    return text.encode() if text is not None else binary


REGISTRY: Final = "registry"  # instead of MODULE:FUNCTION
_METAVAR: Final = f"MODULE:FUNCTION|{REGISTRY}"
KeyDeserializer = Annotated[
    str | None,
    typer.Option(
        "--key-deserializer", metavar=_METAVAR, help="What reads the bytes of keys, as key_deserializer does in Python."
    ),
]
ValueDeserializer = Annotated[
    str | None,
    typer.Option(
        "--value-deserializer", metavar=_METAVAR, help="What reads values; with --schema-registry that is the registry."
    ),
]
SchemaRegistry = Annotated[
    str | None,
    typer.Option(
        "--schema-registry",
        metavar="URL",
        envvar="MARSHAL_SCHEMA_REGISTRY",
        help="Read values by the Avro and JSON schemas of this registry.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(CommonOptions):
    """The options of a command that prints messages."""

    key_deserializer: KeyDeserializer = None
    value_deserializer: ValueDeserializer = None
    schema_registry: SchemaRegistry = None

    def deserializers(self) -> dict[str, Any]:
        """Returns the arguments `key_deserializer` and `value_deserializer`, as consumers and topics take them. For a
        name that cannot be imported or called, and for a registry that is not named, the command ends with exit code
        2."""
        of_values = self.value_deserializer or (REGISTRY if self.schema_registry is not None else None)
        found: dict[str, Any] = {}
        for name, text in (("key_deserializer", self.key_deserializer), ("value_deserializer", of_values)):
            option = f"--{name.replace('_', '-')}"
            if text != REGISTRY:
                found[name] = None if text is None else _loaded(option, text)
            elif self.schema_registry is None:
                raise typer.BadParameter(f"{option} {REGISTRY}: name the registry by --schema-registry URL")
            else:
                found[name] = _registry(self.schema_registry)
        return found


def _loaded(option: str, text: str) -> Deserializer:
    """Returns the function that `text` names. Modules in the working folder are found too, as `python -m` does it."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise typer.BadParameter(f"{option} {text!r}: expected MODULE:FUNCTION or {REGISTRY}")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module does when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise typer.BadParameter(f"{option} {text!r}: {reason}; PYTHONPATH says where else modules are") from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise typer.BadParameter(f"{option} {text!r}: a {type(found).__name__} cannot be called")
    return found  # type: ignore[no-any-return]


def _registry(url: str) -> Deserializer:
    try:
        return registry_deserializer(url)
    except ImportError as error:
        raise CommandFailed(
            f"--schema-registry needs more packages ({error}): pip install 'marshal_py[schema-registry]'"
        ) from error
    except ValueError as error:
        raise typer.BadParameter(f"--schema-registry {url!r}: {error}") from error
