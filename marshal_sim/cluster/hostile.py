"""A writer that may write to the log and has no admin key, and the keys of those who have one (keys.md, F11).

It knows all that is in the log: the keys, the newest settings, and every signature so far. Whatever it writes must
leave a group with keys as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Final

from msgspec.structs import replace

from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.codec import SigningKey, signed
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import GroupConfig, Move, Record, ReleaseGroup, SetPosition
from marshal_sim.cluster.broker import MISSING

PAUSE_MS: Final = 60_000
COPY: Final = "copy"  # of a record with a signature
ADMINS: Final = (1, 2)  # the seeds of the keys that admins have
STRANGER: Final = 3  # of the hostile writer's own key


@cache
def key_of(seed: int) -> SigningKey:
    """Returns a key, always the same for a seed."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(bytes((seed,)) * 32)
    return SigningKey(private.public_key().public_bytes_raw(), private.sign)


def key_for(world: World, name: str) -> SigningKey | None:
    """Returns the key of an admin that the group takes, or None if it has no keys."""
    group = world.groups.get(name)
    known = group.keys if group is not None else ()
    return next((key for key in map(key_of, ADMINS) if key.public in known), None)


def hostile(rng: Random, log: Sequence[bytes | None], world: World, group: Group) -> tuple[bytes, str]:
    """Draws a record for a group with keys; returns it and the name of its shape. `world`: folded to the log's end."""
    assert world.genesis is not None
    shapes: tuple[tuple[str, Callable[[], bytes | None]], ...] = (
        ("unsigned", lambda: codec.encode(_wanted(rng, group), group.name, incarnation)),
        ("foreign key", lambda: _carrier(rng, world, group, True)),
        ("false signature", lambda: _carrier(rng, world, group, False)),
        (COPY, lambda: _copy(rng, log, group.name)),
    )
    incarnation = world.genesis.incarnation
    shape, make = shapes[int(rng.random() * len(shapes))]
    value = make()
    return (value, shape) if value is not None else (rng.randbytes(40), "noise")


def _wanted(rng: Random, group: Group) -> Record:
    """Returns what would count if a holder of a key had signed it: a pause, a move, other settings, the deletion."""
    token = group.pause_change if group.paused else NONE
    moves = tuple(Move(*tp, p.version, 0) for tp, p in sorted(group.partitions.items()) if tp.partition >= 0)
    settings = group.config or GroupConfig(NONE)
    records = (
        ReleaseGroup(group.pause_change, token, PAUSE_MS),
        SetPosition(max(0, group.pause_change), moves, True),
        replace(settings, observed=group.config_offset, admin_keys=(key_of(STRANGER).public,)),
        GroupConfig(group.config_offset, token, deleted=True),
    )
    return records[int(rng.random() * len(records))]


def _carrier(rng: Random, world: World, group: Group, own: bool) -> bytes:
    """Returns a record that the hostile writer has signed, in its `own` name or in that of a key of the group."""
    assert world.genesis is not None
    incarnation, key = world.genesis.incarnation, key_of(STRANGER)
    record = signed(_wanted(rng, group), group.name, incarnation, group.config_offset, key)
    if not own:
        record = replace(record, key=group.keys[int(rng.random() * len(group.keys))])
    return codec.encode(record, group.name, incarnation)


def _copy(rng: Random, log: Sequence[bytes | None], name: str) -> bytes | None:
    head = 12 + len(name.encode())
    found = [value for value in log if value is not MISSING and value is not None and _is_signed(value, name, head)]
    return found[int(rng.random() * len(found))] if found else None


def _is_signed(value: bytes, name: str, head: int) -> bool:
    return len(value) > head + 1 and value[head + 1] == codec.SIGNED and value[12:head] == name.encode()
