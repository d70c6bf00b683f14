"""The canonical form of a process: two that will behave the same have the same 16 bytes, however they came there.

A pickle is no such form, because it distinguishes equal objects from identical ones. Here a graph of plain objects
becomes nested tuples, sets in order, and these become bytes. Dictionaries keep their order, because code that walks
through them acts in it.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from hashlib import blake2b
from typing import Any, Final

from msgspec import Struct

from marshal_py.protocol.fold.world import World
from marshal_sim.exhaustive.deterministic_bytes import DeterministicBytes

MARSHAL_VERSION: Final = 2  # the newest without references: equal values, equal bytes
DIGEST_BYTES: Final = 16
# Fields on which no behaviour depends, or which the rest of the key implies: references to the owner of an object, the
# world (the prefix that was read), constants, what is only for people or for Kafka's committed offsets, what each tick
# computes from the world and the waits, and whether the next tick may be cut short, which changes nothing.
LEFT_OUT: Final = frozenset(
    {
        "world",
        "member",
        "operation",
        "options",
        "advisories",
        "mirror",
        "_mirrored",
        "_mirror_due_ms",
        "grants_dropped",
        "late_acks",
        "_sharers",
        "events",
        "quiescent_until_ms",
        "candidacy",
        "_head_starts",
    }
)
# The parts of a Member that refer to each other: the Member has them all.
PARTS: Final = frozenset({"topics", "rebalancer", "divergence", "refusals"})
ACTORS: Final = "marshal_sim.exhaustive.actors"

_PLAIN: Final = frozenset({int, str, bytes, bool, float, type(None)})
_FIELDS: dict[type, tuple[str, ...]] = {}


def digest(value: object) -> bytes:
    return blake2b(marshal.dumps(canonical(value), MARSHAL_VERSION), digest_size=DIGEST_BYTES).digest()


def canonical(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    maker = _MAKERS.get(kind)
    if maker is not None:
        return maker(value)
    if isinstance(value, tuple):
        return tuple([canonical(element) for element in value])
    if isinstance(value, IntEnum):
        return int(value)
    if isinstance(value, BaseException):
        return (kind.__name__, str(value))
    fields = _FIELDS.get(kind)
    if fields is None:
        fields = _FIELDS[kind] = _fields_of(value)
    return (kind.__name__, *[canonical(getattr(value, name)) for name in fields])


def _fields_of(value: Any) -> tuple[str, ...]:
    kind = type(value)
    names: list[str] = []
    if isinstance(value, Struct):
        names += value.__struct_fields__
    else:
        for owner in reversed(kind.__mro__):
            slots = owner.__dict__.get("__slots__", ())
            names += [slots] if isinstance(slots, str) else slots
        names += sorted(vars(value)) if hasattr(value, "__dict__") else []
    # A process of the search has its Member; the Member's parts only refer back to it.
    kept = {"member"} if kind.__module__ == ACTORS else set()
    left_out = LEFT_OUT | PARTS if hasattr(value, "member") and not kept else LEFT_OUT
    return tuple(name for name in names if name not in left_out or name in kept)


def _sequence(value: Any) -> Any:
    return tuple([canonical(element) for element in value])


def _mapping(value: dict[Any, Any]) -> Any:
    return tuple([(canonical(key), canonical(element)) for key, element in value.items()])


def _set(value: Any) -> Any:
    return tuple(sorted(canonical(element) for element in value))


_MAKERS: Final[dict[type, Callable[[Any], Any]]] = {
    tuple: _sequence,
    list: _sequence,
    deque: _sequence,
    dict: _mapping,
    set: _set,
    frozenset: _set,
    range: lambda value: (value.start, value.stop),
    World: lambda value: None,
    DeterministicBytes: lambda value: (value.number, value.count),
}
