"""A log for tests of the fold: the rationalizer and the oracle both fold every value, and must agree.

`DifferentialLog.put` folds one value and asserts in every test: both have the same outcome, reason, group and decoded
record, the same groups with the same digests, and the same chain; a rejected or ignored record left every group as it
was; the digest kept incrementally equals the one computed from scratch; the invariants W1 to W8 hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct

from marshal_py.errors import CoordinationError, HistoryRestarted, LogGap, ProtocolUnknown, TopicRecreated
from marshal_py.history.explain import PARTITION_FIELDS
from marshal_py.protocol.fold.rationalizer import Outcome, Verdict, apply
from marshal_py.protocol.fold.world import U64, Group, Partition, Session, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, TopicPartition
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    ClaimingPartition,
    Genesis,
    GroupConfig,
    Join,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Topology,
)
from marshal_sim.oracle.oracle import Oracle, OracleStop

INCARNATION = bytes(range(16))
OTHER_INCARNATION = bytes(range(16, 32))
GROUP = "billing"
TOPIC = "t"
INTERVAL_MS = 1_000
PAUSE_MS = 5_000
NEVER = 10**9  # an offset that no log of a test reaches


def genesis(partitions: int = 1, incarnation: bytes = INCARNATION, hash: str = HASH_NAME, protocol: int = 2) -> bytes:
    return codec.encode(Genesis(incarnation, partitions, hash, protocol), "", incarnation)


def fields_of(value: object) -> object:
    """A record of the codec in the oracle's form: a dict of fields by their names on the wire."""
    if isinstance(value, Struct):
        return {name.rstrip("_"): fields_of(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return tuple(fields_of(element) for element in value)
    return value


def digest_from_scratch(group: Group) -> int:
    """The digest of a group by G3, computed from all entries without what the group has cached."""
    entries = (group, *group.topics.values(), *group.sessions.values(), *group.partitions.values())
    return sum(entry.entry_hash() for entry in entries) & U64


def stop_reason(error: CoordinationError) -> str:
    """The rationalizer's errors as reasons of OracleStop."""
    match error:
        case LogGap():
            return "gap"
        case TopicRecreated():
            return "recreated"
        case ProtocolUnknown(what="envelope version"):
            return "envelope"
        case ProtocolUnknown(what="hash"):
            return "hash"
        case ProtocolUnknown(what="protocol version"):
            return "protocol"
        case HistoryRestarted():
            return "founding"
    return type(error).__name__


class Opened(NamedTuple):
    """The codec's Envelope with names: the codec itself hands out a plain tuple."""

    group: str
    envelope_version: int
    record_version: int
    type: int
    body: bytes
    record: object


class DifferentialLog:
    """One log under both folds.

    `exhaustive`: compare everything after every record. Bulk runs switch it off: then only the record's own group is
    compared, and the run calls `audit` for the rest.
    """

    def __init__(
        self,
        partitions: int = 1,
        *,
        start: bool = True,
        log: int = 0,
        root: bytes | None = None,
        expected: bytes | None = None,
        exhaustive: bool = True,
    ) -> None:
        root_record = None if root is None else codec.open_envelope(root, -1)
        root_genesis = None if root_record is None else root_record[5]
        assert root_genesis is None or isinstance(root_genesis, Genesis)
        self.world = World(log, root_genesis, expected)
        self.oracle = Oracle(log, root, expected)
        self.values: list[bytes | None] = []
        self.exhaustive = exhaustive
        self.instances = 0
        if start:
            assert self.put(genesis(partitions)).accepted

    # --- writing

    @property
    def last(self) -> int:
        """Offset of the newest record."""
        return self.world.next_offset - 1

    def put(self, value: bytes | None) -> Verdict:
        """Folds a value that must not stop the log."""
        verdict, error = self.fold(value)
        assert error is None, f"the log stopped: {error}"
        assert verdict is not None
        return verdict

    def stops(self, value: bytes | None, offset: int | None = None) -> CoordinationError:
        """Folds a value that must stop the log without changing or consuming anything; returns the error."""
        _, error = self.fold(value, offset)
        assert error is not None, "the log did not stop"
        return error

    def say(self, record: Record, group: str = GROUP) -> str:
        """Writes a record; returns "accepted" or the reason for the rejection."""
        verdict = self.put(codec.encode(record, group, INCARNATION))
        assert verdict.group == group
        return verdict.reason or "accepted"

    def must(self, record: Record, group: str = GROUP) -> int:
        """Writes a record that must be accepted; returns its offset."""
        assert self.say(record, group) == "accepted"
        return self.last

    def refuses(self, record: Record, reason: str, group: str = GROUP) -> None:
        """Writes a record that must be rejected for this reason."""
        assert self.say(record, group) == reason

    def copies(self, start: int = 0) -> list[str]:
        """Writes every value since `start` again; returns the outcome of each."""
        return [self.put(value).reason or "accepted" for value in self.values[start:]]

    # --- both folds

    def fold(self, value: bytes | None, offset: int | None = None) -> tuple[Verdict | None, CoordinationError | None]:
        """Folds a value into both; asserts what the module's docstring says."""
        world, oracle = self.world, self.oracle
        at = world.next_offset if offset is None else offset
        before = {name: digest_from_scratch(group) for name, group in world.groups.items()} if self.exhaustive else {}
        opaque = {name for name, group in world.groups.items() if group.opaque_at >= 0} if self.exhaustive else set()
        chain = (world.chain_at, world.chain, world.next_offset)
        verdict, error, judged, stop = None, None, None, None
        try:
            verdict = apply(world, at, value)
        except CoordinationError as raised:
            error = raised
        try:
            judged = oracle.apply(at, value)
        except OracleStop as raised:
            stop = raised
        assert (stop.reason if stop else None) == (stop_reason(error) if error else None)
        if verdict is None or judged is None:
            assert (world.chain_at, world.chain, world.next_offset) == chain, "a stop consumes nothing"
            assert oracle.next_offset == world.next_offset
            if self.exhaustive:
                self.audit()
                assert {name: digest_from_scratch(group) for name, group in world.groups.items()} == before
            return None, error
        self.values.append(value)
        self._same_verdict(verdict, at, judged)
        if self.exhaustive:
            self.audit()
            turned_opaque = {name for name, group in world.groups.items() if group.opaque_at >= 0} - opaque
            assert turned_opaque <= {verdict.group}
            changed = {verdict.group} if verdict.accepted or turned_opaque else set()
            after = {name: digest_from_scratch(group) for name, group in world.groups.items()}
            assert {n: d for n, d in before.items() if n not in changed} == {
                n: d for n, d in after.items() if n not in changed
            }, f"{verdict.reason or 'accepted'} changed a group that it must not change"
        elif verdict.group in world.groups:
            self._same_group(verdict.group)
        return verdict, None

    def _same_verdict(self, verdict: Verdict, offset: int, judged: Any) -> None:
        assert (verdict.outcome.name.lower(), verdict.reason) == (judged.outcome, judged.reason)
        assert verdict.offset == offset
        assert verdict.group == (judged.group or "")
        assert (verdict.outcome is Outcome.ACCEPTED) == (verdict.reason == "")
        assert verdict.granted == judged.granted, "the ranges that were granted (F5.2)"
        assert verdict.unsettled == judged.unsettled, "what became of the last owner's grants (F4.5)"
        assert (verdict.record is None) == (judged.record is None)
        if verdict.record is not None:
            assert type(verdict.record).__name__ == judged.record.type
            assert fields_of(verdict.record) == judged.record.fields

    def _same_group(self, name: str) -> None:
        assert self.world.groups[name].digest() == self.oracle.state_digest(name), f"digest of {name!r}"

    def audit(self) -> None:
        """Compares the whole of both worlds."""
        world, oracle = self.world, self.oracle
        assert world.next_offset == oracle.next_offset
        assert (world.chain_at, world.chain) == oracle.chain_digest()
        assert world.groups.keys() == oracle.groups.keys()
        for name, group in world.groups.items():
            assert group.digest() == digest_from_scratch(group), f"digest of {name!r}, incrementally and from scratch"
            self._same_group(name)
        world.check()

    # --- state

    @property
    def group(self) -> Group:
        return self.world.groups[GROUP]

    def digest(self, group: str = GROUP) -> int:
        return self.world.groups[group].digest()

    def session(self, session: int) -> Session:
        return self.group.sessions[session]

    def partition(self, number: int = 0, topic: str = TOPIC) -> Partition:
        return self.group.partitions[TopicPartition(topic, number)]

    def state(self, number: int = 0, topic: str = TOPIC) -> dict[str, int | bytes | str]:
        """The fields of a partition that differ from a fresh one."""
        part = self.partition(number, topic)
        fresh = Partition(part.tp, part.name_hash)
        names = (*PARTITION_FIELDS, "progress")
        return {name: getattr(part, name) for name in names if getattr(part, name) != getattr(fresh, name)}

    # --- records that set up a situation

    def new_join(self, client: str = "c", mode: int = AT_LEAST_ONCE, **fields: Any) -> Join:
        """A Join with an instance_id of its own."""
        self.instances += 1
        fields.setdefault("topics", (TOPIC,))
        return Join(client, self.instances.to_bytes(16, "big"), mode, INTERVAL_MS, **fields)

    def join(self, client: str = "c", mode: int = AT_LEAST_ONCE, **fields: Any) -> int:
        return self.must(self.new_join(client, mode, **fields))

    def topology(self, count: int = 4, topic: str = TOPIC) -> int:
        return self.must(Topology(topic, count, -1))

    def claim(self, session: int, number: int = 0, start: int = 100, topic: str = TOPIC) -> int:
        known = self.group.partitions.get(TopicPartition(topic, number))
        return self.must(ClaimingPartition(session, topic, number, -1 if known is None else known.version, start))

    def owner(self, mode: int = AT_LEAST_ONCE, number: int = 0, start: int = 100) -> tuple[int, int]:
        """A session that owns a partition of a topic with four: (session, epoch)."""
        session = self.join(mode=mode)
        self.topology()
        return session, self.claim(session, number, start)

    def release(self, session: int, epoch: int, position: int = -1, successor: int = -1) -> int:
        return self.must(ReleasingPartition(session, epoch, position, successor))

    def pause(self, duration_ms: int = PAUSE_MS) -> int:
        """Begins or renews a pause; returns its token."""
        group = self.world.groups.get(GROUP)
        change = -1 if group is None else group.pause_change
        return self.must(ReleaseGroup(change, change, duration_ms))

    def delete(self) -> int:
        """Deletes the group, which has no live session."""
        group = self.world.groups.get(GROUP)
        return self.must(GroupConfig(-1 if group is None else group.config_offset, deleted=True))
