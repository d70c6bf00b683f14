"""The world is the state that one log folds to: plain values, with their digest. Only the fold changes it.

Invariants (checked by `Group.check`):
  W1  a claim's owner is a live session, and `claims` holds exactly the owned partitions, by epoch
  W2  owner and epoch are NONE together; an owned partition >= 0 has a `floor`; no `floor` is above the position
  W3  a session's `held` counts its claims on partitions >= 0
  W4  no two live sessions share an instance_id
  W5  in a live group every owned partition >= 0 has a position
  W6  an owned partition's version is its epoch; every version, epoch and `extended` is below the next offset
  W7  a deleted group has no session, no topic, no partition, no mode, and is not paused
  W8  a parked partition is not owned
  W9  every live session fits the group's settings (F1.7)
"""

from __future__ import annotations

from array import array
from collections import deque
from struct import Struct as Pack
from typing import Final, NamedTuple

import mmh3
from msgspec import Struct

from marshal_py.protocol.fold.policies import misfit
from marshal_py.protocol.wire.codec import RECORD_VERSION
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import AT_MOST_ONCE, Checkpoint, Genesis, GroupConfig, Join

FOLD_VERSION: Final = 4  # digests of other fold versions are not compared (G4)
CHECKPOINT_OFFSETS: Final = 16  # so many offsets apart are the checkpoints, where readers compute digests (G1)
CHANGES_KEPT: Final = 1_024  # changes of a group's shape; a reader that has missed more compares everything
CHECKPOINTS_KEPT: Final = 4_096  # G5: a sender that lags more than 65,536 records is not compared; 32 KB per group
U64: Final = 2**64 - 1
LAG_BITS: Final = 11  # the length of 1,024, the lag that weighs 1 as an idle partition does (A14)
NULL_LENGTH: Final = 2**32 - 1  # stands for the length of a missing value, because no value is so long (G2)

_hash128 = mmh3.mmh3_x64_128_uintdigest
_GROUP = Pack("<qQqqqqQqq").pack
_KEYS = Pack("<qQQ").pack
_TOPIC = Pack("<qQqqqQ").pack
_SESSION = Pack("<qqQqqQqq").pack
_PARTITION = Pack("<qQqqqqqqqqqqqqQQ").pack
_CHAIN = Pack("<Qq16I").pack


def hash64(data: bytes) -> int:
    """Returns the first word of MurmurHash3 x64-128 with seed 0, the hash H of PROTOCOL.md 6."""
    return _hash128(data, 0) & U64


def lag_weight(lag: int) -> int:
    """Returns what a partition counts for with lag weights: 1 up to a lag of 2,047, then a power of two (A14)."""
    return 1 << max(0, lag.bit_length() - LAG_BITS)


def text_hash(text: str) -> int:
    """Returns `hash64` of a text, but 0 for "", which stands for a missing text (G3)."""
    return _hash128(text.encode(), 0) & U64 if text else 0


class Topic(Struct, gc=False, eq=False):
    """What the log says of one topic (F9.1-F9.3, F9.10). `offset`: of the newest accepted Topology. `first_count`: 0
    after the topic was created again. `id`: the cluster's, "" if unknown."""

    name_hash: int
    count: int
    first_count: int
    offset: int
    id: str = ""
    part: int = 0  # what this entry added to the group's digest when it was last computed

    def entry_hash(self) -> int:
        return hash64(_TOPIC(2, self.name_hash, self.count, self.first_count, self.offset, text_hash(self.id)))


class Session(Struct, eq=False):
    """A live session. `join` began it, with the bytes `join_body`. `extended`: offset of the newest record that
    extended it. `mark`: of its last StepDown, or NONE. `sequence`: the greatest of its heartbeats (F2.6)."""

    id: int
    join: Join
    join_body: bytes  # as in the log: with fields that a newer writer may have added (E7)
    join_hash: int
    extended: int
    mark: int = NONE
    ready: tuple[int, ...] = ()
    idle_ms: int = 0
    sequence: int = 0
    held: int = 0  # how many partitions >= 0 it owns (W3)
    epochs: set[int] = set()  # live claims, the pin and topic claims included
    part: int = 0

    def entry_hash(self) -> int:
        ready = hash64(Pack(f"<{len(self.ready)}q").pack(*self.ready)) if self.ready else 0
        packed = _SESSION(3, self.id, self.join_hash, self.extended, self.mark, ready, self.idle_ms, self.sequence)
        return _hash128(packed, 0) & U64


class Span(NamedTuple):
    """The offsets `start` to `to` - 1 of one partition."""

    start: int
    to: int


class Partition(Struct, gc=False, eq=False):
    """One partition of a group, a whole topic, or the pin: the claim of the whole group (identity.py)."""

    tp: TopicPartition
    name_hash: int
    owner: int = NONE
    epoch: int = NONE
    position: int = NONE
    generation: int = 0
    version: int = NONE
    last_owner: int = NONE
    successor: int = NONE
    lag: int = 0
    in_flight: int = 0
    attempts: int = 0  # deliveries of the message at the position, if the owner dies now (F4.5)
    floor: int = NONE  # below it the last owner has nothing left of its grants to give back (F2.3, F6.3)
    progress: bytes = b""  # finished and delivered messages above the position, in the bytes of progress.py (D1)
    parked: str = ""  # why nobody may claim it (F6.4)
    part: int = 0

    def entry_hash(self) -> int:
        progress = hash64(self.progress) if self.progress else 0
        parked = text_hash(self.parked) if self.parked else 0
        packed = _PARTITION(
            4, self.name_hash, self.tp[1], self.owner, self.epoch, self.position, self.generation, self.version,
            self.last_owner, self.successor, self.lag, self.in_flight, self.attempts, self.floor, progress, parked,
        )  # fmt: skip
        return _hash128(packed, 0) & U64


class Group:
    """Everything that the log says about one group (PROTOCOL.md 5)."""

    __slots__ = (
        "changes", "claims", "config", "config_body", "config_hash", "config_offset", "deleted_at", "digest_sum",
        "dirty", "mode", "name", "name_hash", "opaque_at", "part", "partitions", "pause_change", "pause_duration_ms",
        "sessions", "shape", "topics",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.name_hash: int = hash64(name.encode())
        self.config: GroupConfig | None = None
        self.config_body: bytes = b""  # its bytes as they are in the log
        self.config_hash: int = 0
        self.config_offset: int = NONE
        self.deleted_at: int = NONE  # offset of the last deletion (F9.5)
        self.mode: int = 0
        self.pause_change: int = NONE
        self.pause_duration_ms: int = 0
        self.opaque_at: int = NONE
        self.topics: dict[str, Topic] = {}
        self.sessions: dict[int, Session] = {}
        self.partitions: dict[TopicPartition, Partition] = {}
        self.claims: dict[int, Partition] = {}  # by epoch, live ones only (W1)
        # grows with all that targets depend on, but no position, count or extension: policies cache
        self.shape: int = 0
        self.changes: deque[Change] = deque(maxlen=CHANGES_KEPT)  # the changes of the shape, oldest first
        self.dirty: set[Topic | Session | Partition | Group] = {self}  # entries changed since the last digest
        self.digest_sum: int = 0
        self.part: int = 0

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Returns the public keys of whom may administer the group (F11.1); () is whoever may write to it."""
        return self.config.admin_keys if self.config is not None else ()

    @property
    def paused(self) -> bool:
        return self.pause_duration_ms > 0

    @property
    def deleted(self) -> bool:
        return self.config is not None and self.config.deleted

    def changed_since(self, shape: int) -> list[Change] | None:
        """Returns the entries that changed since `shape`, oldest first; None if `Group.changes` keeps too few."""
        missed = self.shape - shape
        if shape < 0 or missed > len(self.changes):
            return None
        return list(self.changes)[-missed:] if missed else []

    def topology_offset(self, topic: str) -> int:
        """Returns what a Topology of this topic must name as `observed` (F9.1): the offset of its last one, else of the
        group's last deletion, else NONE."""
        known = self.topics.get(topic)
        return self.deleted_at if known is None else known.offset

    def writes_version(self, own: int) -> int:
        """Returns the newest record version that the writer (`own`) and all live sessions can read (E8)."""
        return min([own, *(session.join.reads_version for session in self.sessions.values())])

    def parked(self, tp: TopicPartition) -> str:
        """Returns why nobody may claim the partition, that is, why it is parked; "" if it is not (F6.4)."""
        known = self.partitions.get(tp)
        return known.parked if known is not None else ""

    def unsettled(self, tp: TopicPartition) -> Span | None:
        """Returns the offsets that the ended owner of `tp` was granted in at-most-once mode and neither reported nor
        gave back: at most these are lost (F3.3). None without any, or while somebody owns it."""
        known = self.partitions.get(tp) if self.mode == AT_MOST_ONCE else None
        if known is None or known.owner != NONE or not NONE < known.floor < known.position:
            return None
        return Span(known.floor, known.position)

    def partition_exists(self, tp: TopicPartition) -> bool:
        """Returns whether the log knows this partition (F4.1). The pin always exists, a whole topic (partition -1) with
        its topic."""
        topic = self.topics.get(tp.topic)
        if topic is None:
            return tp.partition < 0 and not tp.topic
        return tp.partition < topic.count

    def entry_hash(self) -> int:
        keys = hash64(_KEYS(6, self.name_hash, hash64(b"".join(self.keys)))) if self.keys else 0
        return keys + hash64(
            _GROUP(
                1,
                self.name_hash,
                self.mode,
                self.pause_change,
                self.pause_duration_ms,
                self.config_offset,
                self.config_hash,
                self.opaque_at,
                self.deleted_at,
            )
        )

    def digest(self) -> int:
        """Returns the digest of the group's state (G3). Hashes only what has changed since the last call."""
        total = self.digest_sum
        for entry in self.dirty:
            fresh = entry.entry_hash()  # nearly all of the cost of digests
            total += fresh - entry.part
            entry.part = fresh
        self.dirty.clear()
        self.digest_sum = total & U64
        return self.digest_sum

    def forget_entry(self, entry: Topic | Session | Partition) -> None:
        """Takes an entry out of the digest, because it was removed from the state."""
        self.dirty.discard(entry)
        self.digest_sum = (self.digest_sum - entry.part) & U64

    def check(self, next_offset: int) -> None:
        """Asserts the invariants W1 to W9, for tests and the simulator."""
        owned = {p.epoch: p for p in self.partitions.values() if p.owner != NONE}
        assert owned == self.claims, "W1: claims are exactly the owned partitions"
        instances = [s.join.instance_id for s in self.sessions.values()]
        assert len(set(instances)) == len(instances), "W4: instance ids of live sessions differ"
        for p in self.partitions.values():
            assert (p.owner == NONE) == (p.epoch == NONE), f"W2: owner and epoch of {p.tp}"
            assert p.floor != NONE or p.owner == NONE or p.tp.partition < 0, f"W2: floor of {p.tp}, which is owned"
            assert p.floor == NONE or p.tp.partition >= 0, f"W2: floor of {p.tp}"
            assert p.floor <= p.position, f"W2: floor of {p.tp}"
            assert p.owner == NONE or not p.parked, f"W8: {p.tp} is parked and owned"
            assert p.owner == NONE or p.owner in self.sessions, f"W1: owner of {p.tp} is live"
            assert p.owner == NONE or p.version == p.epoch, f"W6: version of {p.tp}"
            assert p.owner == NONE or p.tp.partition < 0 or p.position >= 0, f"W5: position of {p.tp}"
            assert max(p.version, p.epoch) < next_offset, f"W6: offsets of {p.tp}"
        for session in self.sessions.values():
            held = {p.epoch for p in owned.values() if p.owner == session.id}
            assert held == session.epochs, "W1: a session knows its claims"
            assert session.held == sum(owned[e].tp.partition >= 0 for e in held), "W3: held"
            assert session.extended < next_offset, "W6: extended"
            assert not misfit(self.config, session.join), "W9: a live session fits the settings"
        if self.deleted:
            assert not self.sessions, "W7: no session in a deleted group"
            assert not self.topics, "W7: no topic in a deleted group"
            assert not self.partitions, "W7: no partition in a deleted group"
            assert not self.mode, "W7: a deleted group has no mode"
            assert not self.paused, "W7: a deleted group is not paused"


Change = Topic | Session | Partition | Group  # an entry; Group: a pause, new settings, or that it became opaque


class World:
    """One folded log: its Genesis, groups, next offset, chain digest and counters."""

    __slots__ = (
        "began_at", "chain", "chain_at", "chains", "checkpoints", "counters", "crc_seed", "expected", "genesis",
        "groups", "log", "next_offset", "pending", "root", "states", "watched",
    )  # fmt: skip

    def __init__(self, log: int = 0, root: Genesis | None = None, expected: bytes | None = None) -> None:
        """An empty world of coordination partition `log`. `root`: the Genesis of log 0, needed by the others (L4).
        `expected`: the incarnation that the reader knows, or None (L6)."""
        self.log: int = log
        self.root: Genesis | None = root
        self.expected: bytes | None = expected
        self.genesis: Genesis | None = None
        self.crc_seed: int = -1
        self.groups: dict[str, Group] = {}
        self.began_at: int = 0  # the checkpoint of the snapshot that this world was loaded from (N9), else 0
        self.next_offset: int = 0
        self.chain: int = 0
        self.chain_at: int = 0
        self.pending: list[bytes | None] = []  # values since the last checkpoint
        self.counters: dict[str, int] = {}
        self.watched: set[str] = set()  # groups whose digest is computed at every checkpoint
        self.checkpoints: dict[str, Checkpoint] = {}  # the newest of each watched group (G4)
        # chain digests of the newest checkpoints, by number modulo the length
        self.chains: array[int] = array("Q", bytes(8 * CHECKPOINTS_KEPT))
        self.states: dict[str, array[int]] = {}  # the same for the state digest of each watched group; 0: none

    def writes_version(self, group: str, own: int = RECORD_VERSION) -> int:
        """Returns the record version to write to `group`, for a writer that reads versions up to `own` (E8)."""
        known = self.groups.get(group)
        return own if known is None else known.writes_version(own)

    def digests_at(self, group: str, at: int) -> tuple[int, int] | None:
        """Returns a watched group's digest and the chain's at checkpoint `at`; None if not kept, or 0 by chance."""
        states = self.states.get(group)
        if states is None or at % CHECKPOINT_OFFSETS or not 0 <= self.chain_at - at < len(states) * CHECKPOINT_OFFSETS:
            return None
        slot = at // CHECKPOINT_OFFSETS % CHECKPOINTS_KEPT
        return (states[slot], self.chains[slot]) if states[slot] else None

    def end_block(self) -> None:
        """Adds the 16 values since the last checkpoint to the chain (G2), and keeps the watched groups' digests of
        it."""
        self.chain_at += CHECKPOINT_OFFSETS
        lengths = [NULL_LENGTH if value is None else len(value) for value in self.pending]
        head = _CHAIN(self.chain, self.chain_at, *lengths)
        self.chain = hash64(b"".join([head, *filter(None, self.pending)]))
        self.pending.clear()
        slot = self.chain_at // CHECKPOINT_OFFSETS % CHECKPOINTS_KEPT
        self.chains[slot] = self.chain
        for name in self.watched:
            group = self.groups.get(name)
            if group is not None:
                digest = group.digest()
                self.checkpoints[name] = Checkpoint(self.chain_at, digest, self.chain, FOLD_VERSION)
                states = self.states.get(name)
                if states is None:
                    states = self.states[name] = array("Q", bytes(8 * CHECKPOINTS_KEPT))
                states[slot] = digest

    def check(self) -> None:
        """Asserts the invariants of every group."""
        for group in self.groups.values():
            group.check(self.next_offset)
