"""Values that no client wrote, drawn from the seed: noise, cuts, flips, foreign and extreme records; two do harm.

The harmless ones must leave every world as it was (S13). A newer record ends a group (E5), a damaged envelope ends a
log (E3), and neither does more.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final
from zlib import crc32

from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.snapshot import STATE_FORMAT
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, FOLD_VERSION
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.codec import SIGNED_VERSION
from marshal_py.protocol.wire.identity import HASH_NAME, NONE
from marshal_py.protocol.wire.records import (
    OFFSET_MAX,
    ClaimingMessages,
    ClaimingPartition,
    Evict,
    Genesis,
    GroupConfig,
    Heartbeat,
    Leave,
    MessageRange,
    Note,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SeekingPartition,
    SetPosition,
    Signed,
    Snapshot,
    StepDown,
    Topology,
)
from marshal_sim.cluster.broker import MISSING

# Every type at the edge of its bounds, naming what no log has: each is refused.
EXTREME: Final[tuple[Record | Signed, ...]] = (
    Heartbeat(OFFSET_MAX, OFFSET_MAX),
    Leave(OFFSET_MAX),
    Evict(OFFSET_MAX, OFFSET_MAX, 2**53),
    ClaimingPartition(OFFSET_MAX, "orders", 99_999, OFFSET_MAX, OFFSET_MAX),
    ReleasingPartition(OFFSET_MAX, OFFSET_MAX, OFFSET_MAX, OFFSET_MAX),
    ClaimingMessages(OFFSET_MAX, (MessageRange(OFFSET_MAX, 0, 0, OFFSET_MAX),)),
    SeekingPartition(OFFSET_MAX, OFFSET_MAX, OFFSET_MAX),
    ReleaseGroup(OFFSET_MAX, OFFSET_MAX, 86_400_000, 2**53),
    SetPosition(OFFSET_MAX, ()),
    Topology("orders", 100_000, OFFSET_MAX, OFFSET_MAX),
    GroupConfig(OFFSET_MAX, deleted=True),
    StepDown(OFFSET_MAX, OFFSET_MAX),
    Signed(bytes(32), bytes(64), OFFSET_MAX, 8, b"\x94\x08\xff\xff\x01"),
    Note(OFFSET_MAX, "extreme"),
)
HEADER_TO_GROUP: Final = 12  # bytes before the group id
NO_GROUPS: Final = bytes((0x94, STATE_FORMAT, FOLD_VERSION, 0, 0x90))  # N2 of log 0: format 2, fold version 2


def _sealed(value: bytes, incarnation: bytes) -> bytes:
    """Returns `value` with the right length and CRC in its envelope."""
    value = value[:3] + len(value).to_bytes(4, "big") + value[7:]
    crc = crc32(value[11:], crc32(value[:7], crc32(incarnation)))
    return value[:7] + crc.to_bytes(4, "big") + value[11:]


def harmless(rng: Random, log: Sequence[bytes | None], genesis: Genesis, group: str) -> tuple[bytes, str]:
    """Draws a value that must do no harm. Returns it and the name of its shape: what kind of value it is.

    The shape "replay" is a copy of an earlier record of the log. The fold may accept such a copy, as it may accept any
    record that a producer wrote twice.
    """
    value = log[int(rng.random() * len(log))]
    if value is MISSING or value is None:
        return rng.randbytes(20), "noise"
    head = HEADER_TO_GROUP + value[11] + 2 if len(value) > HEADER_TO_GROUP else 0
    shapes = ("noise", "flip", "cut", "replay", "body", "extreme", "incarnation", "genesis", "snapshot")
    shape = shapes[int(rng.random() * len(shapes))]
    if shape == "flip" and value:
        at = int(rng.random() * len(value))
        return value[:at] + bytes((value[at] ^ 1 << int(rng.random() * 8),)) + value[at + 1 :], shape
    if shape == "cut" and value:
        return value[: int(rng.random() * len(value))], shape
    if shape == "replay":
        return value, shape
    # Only of a sound record: a damaged one with a new checksum may read as a newer library's, of an unknown group (E5).
    sound = _sealed(value, genesis.incarnation) == value
    if shape == "body" and sound and 0 < head < len(value) and value[11]:
        return _sealed(value[:head] + rng.randbytes(1 + int(rng.random() * 30)), genesis.incarnation), shape
    if shape == "extreme":
        return codec.encode(EXTREME[int(rng.random() * len(EXTREME))], group, genesis.incarnation), shape
    if shape == "incarnation":
        return codec.encode(Leave(int(rng.random() * len(log))), group, rng.randbytes(16)), shape
    if shape == "snapshot":
        return codec.encode(_unsound(rng, len(log), genesis), "", genesis.incarnation), shape
    if shape == "genesis":
        other = Genesis(rng.randbytes(16), 1 + int(rng.random() * 99), HASH_NAME, rationalizer.PROTOCOL_VERSION)
        return codec.encode(other, "", other.incarnation), shape
    return rng.randbytes(int(rng.random() * 40)), "noise"


def _unsound(rng: Random, end: int, genesis: Genesis) -> Snapshot:
    """Returns a Snapshot record that readers must not begin with (N4, N5): its digests are not those of the log.

    It may look like a stored snapshot, or like a second client's confirmation of one. Its bytes are noise, or a state
    without groups, whose digest is not the one that the record names.
    """
    at = CHECKPOINT_OFFSETS * int(rng.random() * (end // CHECKPOINT_OFFSETS + 2))  # now and then ahead of the log (N1)
    data = (b"", rng.randbytes(20), NO_GROUPS)[int(rng.random() * 3)]
    return Snapshot(genesis, rng.randbytes(16), at, 0, 1, 2 * at + 1, 2 * at + 3, data)


def newer_record(rng: Random, genesis: Genesis, group: str) -> bytes:
    """Returns a record of a version or a type that this library cannot read (E5)."""
    value = bytearray(codec.encode(Note(NONE, "newer"), group, genesis.incarnation))
    at = HEADER_TO_GROUP + value[11]
    if rng.random() < 0.5:
        value[at] = SIGNED_VERSION + 1 + int(rng.random() * 200)
    else:
        value[at + 1] = codec.TYPE_MAX + 1 + int(rng.random() * 200)
    return _sealed(bytes(value), genesis.incarnation)


def damaged_envelope(genesis: Genesis, group: str) -> bytes:
    """Returns a record of this incarnation in an envelope of an unknown version (E3)."""
    value = codec.encode(Note(NONE, "newer"), group, genesis.incarnation)
    return _sealed(value[:2] + b"\x02" + value[3:], genesis.incarnation)
