"""Snapshots of a log: turns a world into canonical bytes and these into Snapshot records, and back (PROTOCOL.md 15).

A client that came to the same digests vouches for a snapshot: it writes a witness, a Snapshot record without data. The
snapshot is confirmed then. protocol/duties.py decides who writes one and who vouches for it; log/replay.py finds
one to start from.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct as Pack
from typing import Annotated, Final, TypeVar
from zlib import crc32

from msgspec import DecodeError, Meta, Struct
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import astuple

from marshal_py.errors import TopicRecreated
from marshal_py.protocol.fold.rationalizer import check_protocol, reshape
from marshal_py.protocol.fold.world import (
    CHECKPOINT_OFFSETS,
    FOLD_VERSION,
    U64,
    Group,
    Partition,
    Session,
    Topic,
    World,
    hash64,
)
from marshal_py.protocol.wire.codec import READS_VERSION, RECORD_VERSION, SIGNED_VERSION, decode_body
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    RECORD_TYPES,
    Bytes16,
    Count,
    Genesis,
    GroupConfig,
    Id,
    Join,
    Offset,
    OffsetOrNone,
    PartitionOrWhole,
    Partitions,
    Progress,
    Small,
    Snapshot,
    Text,
)

STATE_FORMAT: Final = 3  # a reader skips snapshots of a format that it does not know (N2)
KEYED_FORMAT: Final = 4  # of a log with a group that has keys
CHUNK_BYTES: Final = 500_000  # half of a broker's default limit of 1 MiB, so that envelope and framing fit
STORED_MAX: Final = 32  # snapshots and witnesses remembered at a time: a log has few, and garbage must not cost memory
K = TypeVar("K")
V = TypeVar("V")
_JOIN: Final = RECORD_TYPES.index(Join)
_CONFIG: Final = RECORD_TYPES.index(GroupConfig)
_PART = Pack("<qQQ").pack


class _Topic(Struct, array_like=True, frozen=True):
    name: Id
    count: Partitions
    first_count: Small  # 0 after another id was accepted (F9.10)
    offset: Offset
    id: Text


class _Session(Struct, array_like=True, frozen=True):
    id: Offset
    join: bytes
    extended: Offset
    mark: OffsetOrNone
    ready: tuple[Offset, ...]
    idle_ms: Count
    sequence: Offset


class _Partition(Struct, array_like=True, frozen=True):
    topic: Text
    partition: PartitionOrWhole
    owner: OffsetOrNone
    epoch: OffsetOrNone
    position: OffsetOrNone
    generation: Offset
    version: OffsetOrNone
    last_owner: OffsetOrNone
    successor: OffsetOrNone
    lag: Count
    in_flight: Count
    attempts: Count
    floor: OffsetOrNone
    progress: Progress
    parked: Text


class _Group(Struct, array_like=True, frozen=True):
    name: Id
    mode: Annotated[int, Meta(ge=0, le=2)]
    pause_change: OffsetOrNone
    pause_duration_ms: Count
    config_offset: OffsetOrNone
    config: bytes
    deleted_at: OffsetOrNone
    topics: tuple[_Topic, ...]
    sessions: tuple[_Session, ...]
    partitions: tuple[_Partition, ...]
    keyed: Annotated[int, Meta(ge=0, le=1)] = 0  # in KEYED_FORMAT: whether the settings had the version that has keys


class _State(Struct, array_like=True, frozen=True):
    format: int
    fold: int
    log: int
    groups: tuple[_Group, ...]


_ENCODER: Final = Encoder()  # writes the shortest form of each value, as N2 demands
_DECODER: Final = Decoder(_State)


class Key(Struct, frozen=True, array_like=True):
    """The fields that all chunks of one snapshot share (N1)."""

    instance: Bytes16
    at: int
    chunks: int
    state: int
    chain: int


class Stored(Struct):
    """A snapshot whose chunks were all read."""

    key: Key
    genesis: Genesis
    data: bytes
    witnesses: set[bytes]  # instance ids of the clients that vouch for it (N5)

    @property
    def at(self) -> int:
        return self.key.at

    @property
    def confirmed(self) -> bool:
        """Returns whether any client vouches for it (N5); a writer that is alone vouches for itself (`self_audit`)."""
        return bool(self.witnesses)

    @property
    def self_audit(self) -> bool:
        return self.witnesses == {self.key.instance}


# --- a world as bytes


def part_of(group: Group) -> int:
    """Returns what one group adds to the digest of a log's state (N3)."""
    return hash64(_PART(5, group.name_hash, group.digest()))


def digest_of(world: World) -> int:
    """Returns the digest of a log's whole state (N3)."""
    return sum(part_of(group) for group in world.groups.values()) & U64


def state_of(world: World) -> bytes | None:
    """Returns the world as canonical bytes (N2); None if this version cannot read a group's records (N7)."""
    groups = sorted(world.groups.values(), key=lambda group: group.name)
    if any(group.opaque_at != NONE for group in groups):
        return None
    form = KEYED_FORMAT if any(group.keys for group in groups) else STATE_FORMAT
    length = len(_Group.__struct_fields__) - (form == STATE_FORMAT)
    return _ENCODER.encode((form, FOLD_VERSION, world.log, [astuple(_packed(group))[:length] for group in groups]))


def _packed(group: Group) -> _Group:
    # Strings sort by code points, which is also the order of their utf-8 bytes.
    topics = tuple(_Topic(name, t.count, t.first_count, t.offset, t.id) for name, t in sorted(group.topics.items()))
    # `extended` to `sequence`, and `owner` to `parked`: in world.py they stand in the same order.
    sessions = tuple(_Session(s.id, s.join_body, *astuple(s)[4:9]) for _, s in sorted(group.sessions.items()))
    partitions = tuple(_Partition(*p.tp, *astuple(p)[2:15]) for _, p in sorted(group.partitions.items()))
    return _Group(
        group.name,
        group.mode,
        group.pause_change,
        group.pause_duration_ms,
        group.config_offset,
        group.config_body,
        group.deleted_at,
        topics,
        sessions,
        partitions,
        int(bool(group.keys)),
    )


# --- bytes as a world


def load(stored: Stored, log: int, root: Genesis | None = None, expected: bytes | None = None) -> World | None:
    """Returns the world at the snapshot's checkpoint, None for invalid bytes (N4). `log`, `root`, `expected`: as of
    `World`. Raises TopicRecreated, ProtocolUnknown (L6)."""
    incarnation = stored.genesis.incarnation
    known = expected if root is None else root.incarnation
    if known is not None and incarnation != known:
        raise TopicRecreated(log, known.hex(), incarnation.hex())
    check_protocol(log, stored.genesis)
    try:
        state = _DECODER.decode(stored.data)
    except (DecodeError, ValueError, RecursionError):  # the last one: of chunks that are nested together
        return None
    if (state.fold, state.log) != (FOLD_VERSION, log) or stored.at % CHECKPOINT_OFFSETS:
        return None
    world = World(log, root, expected)
    world.genesis, world.crc_seed = stored.genesis, crc32(incarnation)
    world.began_at = world.next_offset = world.chain_at = stored.at
    world.chain = stored.key.chain
    for packed in state.groups:
        group = _group(packed, stored.at)
        if group is None:
            return None
        world.groups[group.name] = group
    # The digest proves the state; comparing bytes proves that it is written in the one form that N2 allows.
    if digest_of(world) != stored.key.state or state_of(world) != stored.data:
        return None
    for group in world.groups.values() if READS_VERSION < SIGNED_VERSION else ():
        if group.keys:  # as if the fold had come to its keys (F11.5)
            group.opaque_at = group.config_offset
            reshape(group, group)
    return world


def _group(packed: _Group, at: int) -> Group | None:
    """Returns a group of the snapshot, None if it breaks an invariant of world.py, as no fold's result does."""
    group = Group(packed.name)
    group.mode, group.pause_change, group.pause_duration_ms = packed.mode, packed.pause_change, packed.pause_duration_ms
    group.deleted_at = packed.deleted_at
    if packed.config_offset != NONE:
        config = decode_body(_CONFIG, packed.config, SIGNED_VERSION if packed.keyed else RECORD_VERSION)
        if not isinstance(config, GroupConfig):
            return None
        group.config, group.config_body, group.config_offset = config, packed.config, packed.config_offset
        group.config_hash = hash64(packed.config)
    for topic in packed.topics:
        name_hash = hash64(topic.name.encode())
        group.topics[topic.name] = Topic(name_hash, topic.count, topic.first_count, topic.offset, topic.id)
    for kept in packed.sessions:
        join = decode_body(_JOIN, kept.join)
        if not isinstance(join, Join):
            return None
        group.sessions[kept.id] = Session(kept.id, join, kept.join, hash64(kept.join), *astuple(kept)[2:])
    for place in packed.partitions:
        tp = TopicPartition(place.topic, place.partition)
        group.partitions[tp] = Partition(tp, hash64(place.topic.encode()), *astuple(place)[2:])
    owned = [partition for partition in group.partitions.values() if partition.owner != NONE]
    for partition in sorted(owned, key=lambda partition: partition.epoch):  # the order in which a fold adds them
        session = group.sessions.get(partition.owner)
        if session is None or partition.epoch in group.claims:
            return None
        group.claims[partition.epoch] = partition
        session.epochs.add(partition.epoch)
        session.held += partition.tp.partition >= 0
    group.dirty.update(group.topics.values(), group.sessions.values(), group.partitions.values())
    return group if _coherent(group, at) else None


def _coherent(group: Group, at: int) -> bool:
    try:
        group.check(at)
    except AssertionError:
        return False
    return True


# --- bytes as records, and records joined


def split(genesis: Genesis, instance: bytes, at: int, state: int, chain: int, data: bytes) -> list[Snapshot]:
    """Cuts a snapshot's bytes into Snapshot records (N1). `instance`: the writer's; `state`, `chain`: the digests at
    checkpoint `at`."""
    count = max(1, -(-len(data) // CHUNK_BYTES))
    return [
        Snapshot(
            genesis, instance, at, number, count, state, chain, data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        )
        for number in range(count)
    ]


def witness(genesis: Genesis, instance: bytes, at: int, state: int, chain: int) -> Snapshot:
    """Returns the record by which a client, `instance`, vouches for the snapshots with these digests at `at` (N5)."""
    return Snapshot(genesis, instance, at, 0, 1, state, chain, b"")


def founding(genesis: Genesis, log: int, instance: bytes, at: int) -> list[Snapshot]:
    """Returns the records that restart a log's history at checkpoint `at` with an empty state (N13)."""
    world = World(log)
    data = state_of(world)
    assert data is not None
    return [*split(genesis, instance, at, digest_of(world), 0, data), witness(genesis, instance, at, 0, 0)]


class SnapshotStore:
    """Joins chunks and witnesses of a log's snapshots in any order (N1). Copies of a record change nothing."""

    def __init__(self, incarnation: bytes | None = None, *, oldest: bool = False) -> None:
        """`incarnation`: the log's, if known; snapshots of another one are then ignored (E2). It keeps those of the
        STORED_MAX highest checkpoints, or of the lowest (`oldest`)."""
        self.incarnation, self._oldest = incarnation, oldest
        self.whole: dict[Key, Stored] = {}
        self._open: dict[Key, dict[int, bytes]] = {}
        self._vouched: dict[tuple[int, int, int], set[bytes]] = {}

    def take(self, record: Snapshot, offset: int) -> Stored | None:
        """Takes the record at `offset`. Returns the snapshot that it completes or vouches for, or None."""
        if self.incarnation is not None and record.genesis.incarnation != self.incarnation:
            return None
        if record.at > offset:
            return None  # invalid, because the log had not reached that checkpoint yet (N1)
        if not record.data:
            return self._take_witness(record)
        key = Key(record.instance, record.at, record.chunks, record.state, record.chain)
        if record.chunk >= record.chunks or key in self.whole:
            return None
        pieces = self._open.setdefault(key, {})
        pieces[record.chunk] = record.data
        if len(pieces) < record.chunks:
            self._bound(self._open, lambda key: key.at)
            return None
        del self._open[key]
        data = b"".join(pieces[number] for number in range(record.chunks))
        vouched = self._vouched.get((key.at, key.state, key.chain), set())
        found = self.whole[key] = Stored(key, record.genesis, data, set(vouched))
        self._bound(self.whole, lambda key: key.at)
        return found

    def _take_witness(self, record: Snapshot) -> Stored | None:
        named = (record.at, record.state, record.chain)
        self._vouched.setdefault(named, set()).add(record.instance)
        self._bound(self._vouched, lambda named: named[0])
        found = None
        for stored in self.whole.values():
            if (stored.key.at, stored.key.state, stored.key.chain) == named:
                stored.witnesses.add(record.instance)
                found = stored
        return found

    def forget_below(self, at: int) -> None:
        """Drops the snapshots and witnesses of checkpoints below `at`."""
        self.whole = {key: stored for key, stored in self.whole.items() if key.at >= at}
        self._open = {key: pieces for key, pieces in self._open.items() if key.at >= at}
        self._vouched = {named: by for named, by in self._vouched.items() if named[0] >= at}

    def forget_above(self, at: int) -> None:
        """Drops the snapshots and witnesses of checkpoints above `at`, for a reader that goes backwards."""
        self.whole = {key: stored for key, stored in self.whole.items() if key.at <= at}
        self._open = {key: pieces for key, pieces in self._open.items() if key.at <= at}
        self._vouched = {named: by for named, by in self._vouched.items() if named[0] <= at}

    def confirmed(self, first: int = 0) -> list[Stored]:
        """Returns, newest first, one confirmed snapshot per checkpoint and digests, from `first` on, the log's first
        offset."""
        found: dict[tuple[int, int, int], Stored] = {}
        for stored in self.whole.values():
            named = (stored.key.at, stored.key.state, stored.key.chain)
            if stored.confirmed and stored.at >= first and (named not in found or found[named].self_audit):
                found[named] = stored  # of two equal ones, prefer the one that another client vouches for
        return sorted(found.values(), key=lambda stored: -stored.at)

    def _bound(self, kept: dict[K, V], at_of: Callable[[K], int]) -> None:
        """Keeps STORED_MAX entries. `at_of`: the checkpoint of a key."""
        while len(kept) > STORED_MAX:
            del kept[max(kept, key=at_of) if self._oldest else min(kept, key=at_of)]
