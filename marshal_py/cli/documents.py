"""The JSON of commands, as types: what `--json` prints, and the JSON Schema that `marshal schema` derives from them.

A command names the types of its documents by `@prints`. A document is a Struct, a NamedTuple, a dataclass, or a list or
dict of these. Each is an object with all its fields (`from_` is "from"); only one that may be UNSET can be missing.
None, which JSON shows as null, stands for what nobody knows or what there is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from marshal_py.protocol.wire.identity import NONE

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
F = TypeVar("F", bound=Callable[..., None])

Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]  # ISO 8601 with its zone


class Failure(Struct, frozen=True):
    """What stderr has of a command with --json that fails: the text, the class of the error, its exit code.

    `error`: the class of marshal_py.errors, or Usage for a command line that cannot be read. `retriable`: whether the
    same command may succeed later.
    """

    error: str
    text: str
    retriable: bool
    exit_code: int


def prints(*documents: Any) -> Callable[[F], F]:
    """Says what a command prints with --json: one of these documents, or one on each line."""

    def mark(function: F) -> F:
        function.prints = documents  # type: ignore[attr-defined]  # `schema_of` reads it
        return function

    return mark


def time_of(ms: int | None, timespec: str = "milliseconds") -> str | None:
    """Returns a time (ms since 1970) in ISO 8601; None if there is none."""
    return None if ms is None or ms == NONE else datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec=timespec)


def plain(value: Any) -> Any:
    """Returns a document in JSON's types."""
    if (names := _fields(value)) is not None:
        found = ((name, getattr(value, name)) for name in names)
        return {name.rstrip("_"): plain(each) for name, each in found if each is not UNSET}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return msgspec.to_builtins(value, str_keys=True)


def _fields(value: Any) -> Sequence[str] | None:
    """Returns the names of an object's fields; None if it is no object in JSON."""
    if isinstance(value, Struct):
        return value.__struct_fields__
    return [each.name for each in fields(value)] if is_dataclass(value) else getattr(value, "_fields", None)


def with_fields(name: str, kind: type[Any], /, **more: Any) -> type[Struct]:
    """Returns the type of a document that has the fields of `kind`, and `more`, which may replace some."""
    return _struct(name, kind.__doc__, {**get_type_hints(kind, include_extras=True), **more})


def schema_of(documents: Iterable[Any]) -> dict[str, Any]:
    """Returns the JSON Schema of what is one of these documents."""
    wanted = [_described(one) for one in documents]
    schemas, components = msgspec.json.schema_components(wanted)
    found: dict[str, Any] = {"$schema": DIALECT}
    found |= schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return {**found, "$defs": components} if components else found


@cache
def _object(kind: type[Any]) -> type[Struct]:
    """Returns the Struct whose schema is that of what `plain` makes of a `kind`: an object, also of a NamedTuple."""
    hints = get_type_hints(kind, include_extras=True)
    return _struct(kind.__name__, kind.__doc__, {name: _described(hint) for name, hint in hints.items()})


def _struct(name: str, about: str | None, hints: Mapping[str, Any]) -> type[Struct]:
    pairs = [(key, hint, UNSET) if UnsetType in get_args(hint) else (key, hint) for key, hint in hints.items()]
    return msgspec.defstruct(
        name, pairs, namespace={"__doc__": about}, kw_only=True, rename=lambda key: key.rstrip("_")
    )


def _described(hint: Any) -> Any:
    """Returns the type in which each class that is an object in JSON is a Struct."""
    if isinstance(hint, type) and not get_args(hint):
        is_object = issubclass(hint, Struct) or hasattr(hint, "_fields") or is_dataclass(hint)
        return _object(hint) if is_object else hint
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return reduce(or_, map(_described, inner))
    if origin is Annotated:
        known = [each for each in hint.__metadata__ if isinstance(each, Meta)]
        return Annotated[_described(inner[0]), *known] if known else _described(inner[0])
    if origin in (list, tuple, dict, set, frozenset, Sequence, Mapping):
        origin = {Sequence: list, Mapping: dict}.get(origin, origin)
        return origin[tuple(each if each is Ellipsis else _described(each) for each in inner)]
    return hint
