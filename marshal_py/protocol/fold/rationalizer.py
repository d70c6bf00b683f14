"""The fold applies one record to the world by the rules of PROTOCOL.md 5. Nothing else changes a world.

`apply(world, offset, value)` folds one record and returns its verdict. A rejected or ignored record changes nothing but
counters and the chain digest. A record that must stop the whole log raises a CoordinationError, and changes nothing.
The fold reads no clock and no timestamp.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final
from zlib import crc32

from msgspec import Struct

from marshal_py.errors import HistoryRestarted, LogGap, ProtocolUnknown, TopicRecreated
from marshal_py.protocol.fold.policies import lifelong, misfit
from marshal_py.protocol.fold.world import (
    CHECKPOINT_OFFSETS,
    Change,
    Group,
    Partition,
    Session,
    Span,
    Topic,
    World,
    hash64,
    lag_weight,
)
from marshal_py.protocol.wire.codec import (
    ENVELOPE_VERSION,
    LOG_RECORD_VERSION,
    READS_VERSION,
    SIGNED,
    SIGNED_VERSION,
    TYPE_MAX,
    decode_body,
    decode_signed,
    fits,
    needs_key,
    open_envelope,
)
from marshal_py.protocol.wire.identity import HASH_NAME, NONE, TopicPartition, route
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    COUNT_MAX,
    EVICT_INTERVALS,
    GRANT_OFFSETS_MAX,
    ClaimingMessages,
    ClaimingPartition,
    Evict,
    Genesis,
    GroupConfig,
    Heartbeat,
    Join,
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

# --- Defines the verdict: what the fold decided about one record (PROTOCOL.md F10.2). Holds values only.


class Outcome(IntEnum):
    """Says what the fold did with a record (F10.2). A rejected record breaks a rule; no rule judges an ignored one."""

    ACCEPTED = 0
    REJECTED = 1
    IGNORED = 2


class Verdict(Struct, frozen=True, gc=False):
    """What the fold decided about one record (F10.2). `reason`: "" if accepted. `group`: "" if of none. `granted`: the
    indexes of the ranges granted (F5.2). `unsettled`: on an accepted ClaimingPartition, the last owner's grants of
    which nobody knows what became (F4.5)."""

    offset: int
    outcome: Outcome
    reason: str
    group: str
    record: Record | None
    granted: tuple[int, ...] = ()
    unsettled: Span | None = None

    @property
    def accepted(self) -> bool:
        return self.outcome is Outcome.ACCEPTED


# --- Makes changes that several rules of the fold share: free a claim, end a session, begin a generation.


def reshape(group: Group, entry: Change) -> None:
    """Notes that an entry has changed by more than a position, counts or an extension: adds 1 to `Group.shape`, so
    members compute assignments again, and the next digest includes it."""
    group.shape += 1
    group.changes.append(entry)
    group.dirty.add(entry)


def partition_of(group: Group, tp: TopicPartition) -> Partition:
    """Returns the state of a partition, which is created when a record first names the partition."""
    found = group.partitions.get(tp)
    if found is None:
        found = group.partitions[tp] = Partition(tp, hash64(tp.topic.encode()), generation=group.deleted_at + 1)
    return found


def free(group: Group, partition: Partition, successor: int, floor: int = NONE) -> None:
    """Takes a claim from its owner (F3.3, F6.4). Position, generation, version, counts and progress stay. `successor`:
    who should claim next, or NONE; `floor`: from now on."""
    session = group.sessions[partition.owner]
    session.epochs.discard(partition.epoch)
    if partition.tp.partition >= 0:
        session.held -= 1
    del group.claims[partition.epoch]
    partition.last_owner = partition.owner
    partition.owner = partition.epoch = NONE
    partition.floor = floor
    partition.successor = successor
    reshape(group, partition)


def end_session(group: Group, session: Session) -> None:
    """Frees all claims of a session and removes it (F3.3). In at-most-once mode the floors stay: from there to the
    position is unsettled."""
    for epoch in tuple(session.epochs):
        partition = group.claims[epoch]
        free(group, partition, NONE, partition.floor if group.mode == AT_MOST_ONCE else NONE)
    del group.sessions[session.id]
    reshape(group, session)
    group.forget_entry(session)


def begin_generation(group: Group, partition: Partition) -> None:
    """Begins a new generation of a partition: drops counts, floor and progress of the old one, and unparks it."""
    partition.generation += 1
    partition.floor = NONE
    partition.lag = partition.in_flight = partition.attempts = 0
    partition.progress, partition.parked = b"", ""
    reshape(group, partition)


def forget_position(group: Group, partition: Partition, offset: int) -> None:
    """Removes a position and makes `offset` the version, so records that name the old one are refused (F9.2)."""
    partition.position = NONE
    partition.version = offset
    begin_generation(group, partition)


# --- Rules 7 to 9 of the fold: pauses, positions, topics, settings, step-downs (PROTOCOL.md 5).
#
# `_judge` calls the function of a record's type. It applies the record to the group and returns "", or it
# changes nothing and returns the reason for the rejection.


def release_group(group: Group, offset: int, record: ReleaseGroup, body: bytes) -> str:
    if record.observed != group.pause_change:
        return "observed"
    waited_out = record.duration_ms == 0 and record.waited_ms >= group.pause_duration_ms
    if group.paused and record.token != group.pause_change and not waited_out:
        return "paused"
    group.pause_change = offset
    group.pause_duration_ms = record.duration_ms
    reshape(group, group)
    return ""


def set_position(group: Group, offset: int, record: SetPosition, body: bytes) -> str:
    if not group.paused:
        return "paused"
    if record.token != group.pause_change:
        return "token"
    if not record.moves:
        return "empty"
    targets = [TopicPartition(move.topic, move.partition) for move in record.moves]
    if len(set(targets)) != len(targets):
        return "repeats"
    known = [group.partitions.get(tp) for tp in targets]
    for move, partition in zip(record.moves, known, strict=True):
        if move.observed != (NONE if partition is None else partition.version):
            return "observed"
    if not all(group.partition_exists(tp) for tp in targets):
        return "topology"
    if any(partition is not None and partition.owner != NONE for partition in known):
        return "held"
    for move, tp in zip(record.moves, targets, strict=True):
        partition = partition_of(group, tp)
        partition.position = move.position
        partition.version = offset
        begin_generation(group, partition)
    if record.resume:
        group.pause_duration_ms = 0
        group.pause_change = offset
    reshape(group, group)
    return ""


def topology(group: Group, offset: int, record: Topology, body: bytes) -> str:
    topic = group.topics.get(record.topic)
    if record.observed != group.topology_offset(record.topic):
        return "observed"
    if topic is None:
        topic = Topic(hash64(record.topic.encode()), record.partitions, record.partitions, offset, record.topic_id)
        group.topics[record.topic] = topic
        reshape(group, topic)
        return ""
    new_id = record.topic_id not in ("", topic.id)
    if record.partitions == topic.count and not new_id:
        return "same"
    recreated = new_id and topic.id != ""
    fewer = record.partitions < topic.count and not recreated
    guarded = fewer or (recreated and group.config is not None and group.config.on_topic_recreated == "fail")
    if guarded and not (group.paused and record.token == group.pause_change):
        return "token"
    if fewer or recreated:
        least = NONE if recreated else record.partitions  # NONE: every partition, and the whole topic (F9.10)
        gone = [p for p in group.partitions.values() if p.tp.topic == record.topic and p.tp.partition >= least]
        if any(p.owner != NONE for p in gone):
            return "held"
        for partition in gone:
            if partition.tp.partition >= 0:
                forget_position(group, partition, offset)
    topic.count, topic.offset = record.partitions, offset
    if recreated:
        topic.first_count = 0
    if new_id:
        topic.id = record.topic_id
    reshape(group, topic)
    return ""


def group_config(group: Group, offset: int, record: GroupConfig, body: bytes) -> str:
    if record.observed != group.config_offset:
        return "observed"
    changes_mode = not record.deleted and record.mode != 0 and group.mode not in (0, record.mode)
    in_pause = group.paused and record.token == group.pause_change
    if record.deleted and (group.sessions or group.keys) and not in_pause:
        return "sessions" if group.sessions else "token"  # F9.5, F11.4
    if not record.deleted and lifelong(group.config, group.mode, record):
        return "lifelong"
    if changes_mode and not in_pause:
        return "token"
    if (record.deleted or changes_mode) and _holds_partition(group):
        return "held"
    if record.deleted or changes_mode:
        for session in tuple(group.sessions.values()):
            end_session(group, session)
    if changes_mode:
        for partition in group.partitions.values():
            if partition.tp.partition >= 0:
                begin_generation(group, partition)
    if record.deleted:
        _forget_everything(group, offset)
    elif record.mode:
        group.mode = record.mode
    for session in group.sessions.values():
        if session.mark != NONE:
            session.mark = NONE
            group.dirty.add(session)
    group.config, group.config_body, group.config_hash, group.config_offset = record, body, hash64(body), offset
    reshape(group, group)
    return ""


def _unauthorized(world: World, group: Group, carrier: Signed | None, record: Record) -> str:
    """Returns why a record of a group with keys, or one that is signed, does not count; "" if its rule decides."""
    if carrier is None:
        return unsigned(group, record) if needs_key(record) else ""
    assert world.genesis is not None
    return badly_signed(group, carrier, world.genesis.incarnation)


def unsigned(group: Group, record: Record) -> str:
    """Refuses a record that nobody has signed, unless a member may end a pause with it that is over (F11.2)."""
    if not (isinstance(record, ReleaseGroup) and group.paused and record.duration_ms == 0):
        return "unsigned"
    return "" if record.waited_ms >= group.pause_duration_ms else "unsigned"


def badly_signed(group: Group, record: Signed, incarnation: bytes) -> str:
    """Refuses a record whose signature is none by a key of the group; what is cheap to see comes first (F11.3)."""
    if record.key not in group.keys:
        return "key"
    if record.observed != group.config_offset:
        return "observed"
    return "" if fits(record, incarnation, group.name) else "signature"


def _holds_partition(group: Group) -> bool:
    return any(p.tp.partition >= 0 for p in group.claims.values())


def _forget_everything(group: Group, offset: int) -> None:
    """Empties a deleted group but for name, config and the deletion's `offset`, by which copies of older records are
    rejected (F9.5)."""
    for topic in group.topics.values():
        group.forget_entry(topic)
    for partition in group.partitions.values():
        group.forget_entry(partition)
    group.topics.clear()
    group.partitions.clear()
    group.mode = group.pause_duration_ms = 0
    group.pause_change = group.deleted_at = offset


def step_down(group: Group, offset: int, record: StepDown, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    if record.observed != session.mark:
        return "observed"
    session.mark = offset
    reshape(group, session)
    return ""


PROTOCOL_VERSION: Final = 2

_ACCEPTED: Final = Outcome.ACCEPTED  # an enum looks its members up at every use
_REJECTED: Final = Outcome.REJECTED
_IGNORED: Final = Outcome.IGNORED
_LAST_OF_BLOCK: Final = CHECKPOINT_OFFSETS - 1  # CHECKPOINT_OFFSETS is a power of two


def apply(world: World, offset: int, value: bytes | None) -> Verdict:
    """Folds the record at `offset` and returns the verdict. Raises a CoordinationError, unchanged, if it must stop the
    log."""
    if offset != world.next_offset:
        raise LogGap(world.log, world.next_offset, offset)
    verdict = _judge(world, offset, value)
    world.next_offset = offset + 1
    world.pending.append(value)
    if offset & _LAST_OF_BLOCK == _LAST_OF_BLOCK:
        world.end_block()
    if verdict.outcome:
        key = verdict.reason
        world.counters[key] = world.counters.get(key, 0) + 1
    return verdict


def _judge(world: World, offset: int, value: bytes | None) -> Verdict:
    """Checks in the order of PROTOCOL.md 5: garbage, stop, misrouted, opaque and version, body, the type's rule."""
    envelope = open_envelope(value, world.crc_seed)
    if envelope is None:
        return Verdict(offset, _IGNORED, "garbage", "", None)
    name, envelope_version, version, kind, body, unowned = envelope
    if unowned is not None:
        return _judge_unowned(world, offset, unowned, envelope_version, version)
    if envelope_version != ENVELOPE_VERSION:
        raise ProtocolUnknown(world.log, "envelope version", envelope_version, offset)
    group = world.groups.get(name)
    known = group is not None
    if group is None:
        assert world.genesis is not None  # the CRC matched an incarnation, so there is a Genesis
        if route(name, world.genesis.partitions) != world.log:
            return Verdict(offset, _IGNORED, "misrouted", name, None)
        group = Group(name)  # enters the world only if this record is accepted (F10.3) or makes it opaque (E5)
    if group.opaque_at != NONE:
        return Verdict(offset, _IGNORED, "opaque", name, None)
    if version > READS_VERSION or (kind > TYPE_MAX and (kind, version) != (SIGNED, SIGNED_VERSION)):
        world.groups[name] = group
        group.opaque_at = offset
        reshape(group, group)
        return Verdict(offset, _IGNORED, "opaque", name, None)
    carrier = None
    if kind == SIGNED:
        carrier = decode_signed(body)
        if carrier is None or carrier.kind > TYPE_MAX:
            return Verdict(offset, _REJECTED, "malformed", name, None)
        kind, body = carrier.kind, carrier.body
    record = decode_body(kind, body, version) if version else None
    rule = _RULES[kind]
    if record is None or rule is None or (carrier is not None and not needs_key(record)):
        return Verdict(offset, _REJECTED, "malformed", name, None)
    config = group.config
    if config is not None and config.deleted and not isinstance(record, GroupConfig | Note):
        return Verdict(offset, _REJECTED, "deleted", name, record)
    if carrier is not None or (config is not None and config.admin_keys):
        refused = _unauthorized(world, group, carrier, record)
        if refused:
            return Verdict(offset, _REJECTED, refused, name, record)
    reason = rule(group, offset, record, body)
    if isinstance(reason, Span):
        return Verdict(offset, _ACCEPTED, "", name, record, (), reason)
    if not isinstance(reason, str):  # the ranges of a ClaimingMessages that were granted (F5.2)
        return Verdict(offset, _ACCEPTED, "", name, record, reason)
    if reason:
        return Verdict(offset, _REJECTED, reason, name, record)
    if not known and not isinstance(record, Note):  # a Note does not even create its group (F10.1)
        world.groups[name] = group
    return Verdict(offset, _ACCEPTED, "", name, record)


def _judge_unowned(
    world: World, offset: int, record: Genesis | Snapshot, envelope_version: int, record_version: int
) -> Verdict:
    """Returns the verdict on a Genesis or a Snapshot, which belong to no group (L3-L6, E2, E3, N13)."""
    genesis = record if isinstance(record, Genesis) else record.genesis
    held = world.genesis or world.root
    known = envelope_version == ENVELOPE_VERSION and record_version == LOG_RECORD_VERSION
    if not isinstance(record, Genesis):
        if known and held is not None and not record.chain and world.began_at < record.at <= offset:
            raise HistoryRestarted(world.log, offset, record.at)
        # The codec compared their CRCs only (E2).
        if world.genesis is None or world.genesis.incarnation != genesis.incarnation:
            return Verdict(offset, _IGNORED, "garbage", "", None)
    if not known and (held is None or held.incarnation == genesis.incarnation):
        raise ProtocolUnknown(world.log, "envelope version", max(envelope_version, record_version), offset)
    if not isinstance(record, Genesis):
        return Verdict(offset, _ACCEPTED, "", "", record)
    if world.genesis is not None or (world.log > 0 and record != world.root):
        return Verdict(offset, _IGNORED, "genesis", "", record)
    if world.expected is not None and record.incarnation != world.expected:
        raise TopicRecreated(world.log, world.expected.hex(), record.incarnation.hex())
    if record.hash != HASH_NAME:
        raise ProtocolUnknown(world.log, "hash", record.hash, offset)
    check_protocol(world.log, record)
    world.genesis = record
    world.crc_seed = crc32(record.incarnation)
    return Verdict(offset, _ACCEPTED, "", "", record)


def check_protocol(log: int, genesis: Genesis) -> None:
    """Checks the Genesis's protocol version (L6). Raises ProtocolUnknown."""
    if genesis.protocol < PROTOCOL_VERSION:
        raise ProtocolUnknown(log, "protocol version", genesis.protocol, outdated=True)
    if genesis.protocol > PROTOCOL_VERSION:
        raise ProtocolUnknown(log, "protocol version", genesis.protocol)


# --- rules 1 to 6; each returns "" if it accepts the record, else the reason, and then it changes nothing


def _claim_of(group: Group, session_id: int, epoch: int) -> Partition | None:
    """Returns the partition that is claimed under `epoch`; None if this session does not own it."""
    partition = group.claims.get(epoch)
    return partition if partition is not None and partition.owner == session_id else None


def _join(group: Group, offset: int, record: Join, body: bytes) -> str:
    for session in group.sessions.values():
        if session.join.instance_id == record.instance_id:
            return "instance"
    if group.mode and record.mode != group.mode:
        return "mode"
    predecessor = group.sessions.get(record.predecessor)
    if predecessor is not None:
        if predecessor.join.client_id != record.client_id:
            return "predecessor"
    if misfit(group.config, record):
        return "config"
    if predecessor is not None:
        end_session(group, predecessor)
    if not group.mode:
        group.mode = record.mode
        group.dirty.add(group)
    session = Session(offset, record, body, hash64(body), offset)
    group.sessions[offset] = session
    reshape(group, session)
    return ""


def _heartbeat(group: Group, offset: int, record: Heartbeat, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    if not (group.pause_duration_ms and session.held):
        session.extended = offset
    late = record.sequence < session.sequence
    if not late:
        session.sequence, session.ready, session.idle_ms = record.sequence, record.ready, record.idle_ms
    claims, owner, at_least_once = group.claims, record.session, group.mode == AT_LEAST_ONCE
    dirty, weighted = group.dirty, group.config is not None and group.config.lag_weighted
    dirty.add(session)
    for entry in record.claims:
        partition = claims.get(entry.epoch)
        if partition is None or partition.owner != owner or partition.tp[1] < 0:
            continue
        if at_least_once:
            if entry.position < partition.position + late:  # a late one must raise it (F2.6)
                continue
            partition.position = entry.position
            partition.attempts, partition.progress = entry.attempts, entry.progress
        elif partition.floor <= entry.position <= partition.position:
            partition.floor = entry.position
        if weighted and lag_weight(entry.lag) != lag_weight(partition.lag):
            reshape(group, partition)  # the target may change (A14)
        partition.lag, partition.in_flight = entry.lag, entry.in_flight
        dirty.add(partition)
    return ""


def _leave(group: Group, offset: int, record: Leave, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    end_session(group, session)
    return ""


def _evict(group: Group, offset: int, record: Evict, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    if record.observed != session.extended:
        return "observed"
    if record.waited_ms < EVICT_INTERVALS * session.join.interval_ms:
        return "waited"
    end_session(group, session)
    return ""


def _claim_partition(group: Group, offset: int, record: ClaimingPartition, body: bytes) -> str | Span:
    """Returns what it leaves unsettled (F4.5), if it does; "" if it accepts the claim and leaves nothing unsettled."""
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    if group.pause_duration_ms:
        return "paused"
    tp = TopicPartition(record.topic, record.partition)
    if not group.partition_exists(tp):
        return "topology"
    known = group.partitions.get(tp)
    if known is not None and known.parked:
        return "parked"
    if known is not None and known.owner != NONE:
        return "held"
    if record.observed != (NONE if known is None else known.version):
        return "observed"
    needs_start = tp.partition >= 0 and (known is None or known.position == NONE)
    if needs_start and record.start == NONE:
        return "start"
    unsettled = group.unsettled(tp)
    partition = partition_of(group, tp)
    if needs_start:
        partition.position = record.start
    partition.owner = session.id
    partition.epoch = partition.version = offset
    partition.successor = NONE
    group.claims[offset] = partition
    session.epochs.add(offset)
    if tp.partition >= 0:
        session.held += 1
        partition.floor = partition.position
        if group.mode == AT_LEAST_ONCE:
            partition.attempts = min(partition.attempts + 1, COUNT_MAX)
    reshape(group, partition)
    return unsettled or ""


def _claim_messages(group: Group, offset: int, record: ClaimingMessages, body: bytes) -> str | tuple[int, ...]:
    """Returns the indexes of the ranges that it grants, or a text, the reason for the rejection, if it grants none."""
    if record.session not in group.sessions:
        return "session"
    if group.mode != AT_MOST_ONCE:
        return "mode"
    if group.pause_duration_ms:
        return "paused"
    refusals = [_claim_range(group, record.session, wanted) for wanted in record.ranges]
    return tuple([index for index, reason in enumerate(refusals) if not reason]) or refusals[0]


def _claim_range(group: Group, session: int, wanted: MessageRange) -> str:
    partition = _claim_of(group, session, wanted.epoch)
    if partition is None or partition.tp.partition < 0:
        return "claim"
    if wanted.from_ != partition.position:
        return "from"
    if not wanted.from_ <= wanted.start < wanted.to or wanted.to - wanted.start > GRANT_OFFSETS_MAX:
        return "range"
    partition.position = wanted.to
    group.dirty.add(partition)
    return ""


def _release_partition(group: Group, offset: int, record: ReleasingPartition, body: bytes) -> str:
    if record.session not in group.sessions:
        return "session"
    partition = _claim_of(group, record.session, record.epoch)
    if partition is None:
        return "claim"
    if partition.tp.partition >= 0:
        if group.mode == AT_MOST_ONCE:
            if record.observed != NONE:
                if record.observed != partition.position:
                    return "observed"
                if not partition.floor <= record.give <= partition.position:
                    return "range"
                partition.position = record.give
            partition.in_flight = record.in_flight
        elif record.position >= partition.position:
            partition.position = record.position
            partition.attempts, partition.in_flight = record.attempts, record.in_flight
            partition.progress = record.progress
        partition.parked = record.parked
    free(group, partition, record.successor)
    partition.version = offset
    return ""


def _seek_partition(group: Group, offset: int, record: SeekingPartition, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    partition = _claim_of(group, record.session, record.epoch)
    if partition is None or partition.tp.partition < 0:
        return "claim"
    if group.mode != AT_LEAST_ONCE:
        return "mode"
    if group.pause_duration_ms:
        return "paused"
    begin_generation(group, partition)
    partition.position = partition.floor = record.position
    partition.attempts = 1
    del group.claims[partition.epoch]
    session.epochs.discard(partition.epoch)
    partition.epoch = partition.version = offset
    group.claims[offset] = partition
    session.epochs.add(offset)
    return ""


def _note(group: Group, offset: int, record: Note, body: bytes) -> str:
    return ""


_RULES: Final[tuple[Callable[[Group, int, Any, bytes], str | Span | tuple[int, ...]] | None, ...]] = (
    None, _join, _heartbeat, _leave, _evict, _claim_partition, _release_partition, _claim_messages, release_group,
    set_position, topology, group_config, step_down, _note, None, _seek_partition,
)  # fmt: skip  # by type number; Genesis and Snapshot have no rule under a group id (E2)
