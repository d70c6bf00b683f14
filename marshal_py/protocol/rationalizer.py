"""Rule 1 of this house: every transition of the world lives here, and nothing else writes to it (PROTOCOL.md 5).

`apply(world, offset, value)` folds one record and returns its verdict. It reads no clock and no timestamp. A rejected
or ignored record leaves the world as it was, counters and the chain digest apart. The few things that stop a whole log
raise a CoordinationError before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from zlib import crc32

from marshal_py.errors import EnvelopeUnknown, HistoryRestarted, LogGap, ProtocolUnknown, TopicRecreated
from marshal_py.protocol.codec import ENVELOPE_VERSION, RECORD_VERSION, TYPE_MAX, decode_body, open_envelope
from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    GRANT_OFFSETS_MAX,
    ClaimingMessages,
    ClaimingPartition,
    Evict,
    Genesis,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    Note,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    Snapshot,
    StepDown,
    Topology,
)
from marshal_py.protocol.routing import HASH_NAME, route
from marshal_py.protocol.verdict import Outcome, Verdict
from marshal_py.protocol.world import Group, Partition, Session, Topic, World, hash64

PROTOCOL_VERSION: Final = 1

_ACCEPTED: Final = Outcome.ACCEPTED  # an enum looks its members up at every use
_REJECTED: Final = Outcome.REJECTED
_IGNORED: Final = Outcome.IGNORED


def apply(world: World, offset: int, value: bytes | None) -> Verdict:
    """Folds the record at `offset`. Raises a CoordinationError, the world untouched, if the whole log must stop."""
    if offset != world.next_offset:
        raise LogGap(world.log, world.next_offset, offset)
    verdict = _judge(world, offset, value)
    world.next_offset = offset + 1
    world.pending.append(value)
    if offset & 15 == 15:
        world.end_block()
    if verdict.outcome:
        key = verdict.reason
        world.counters[key] = world.counters.get(key, 0) + 1
    return verdict


def _judge(world: World, offset: int, value: bytes | None) -> Verdict:
    """The order of all checks (PROTOCOL.md 5): garbage, stop, misrouted, opaque and version, body, the type's rule."""
    envelope = open_envelope(value, world.crc_seed)
    if envelope is None:
        return Verdict(offset, _IGNORED, "garbage", "", None)
    name, envelope_version, version, kind, body, unowned = envelope
    if unowned is not None:
        return _judge_unowned(world, offset, unowned, envelope_version, version)
    if envelope_version != ENVELOPE_VERSION:
        raise EnvelopeUnknown(world.log, offset, envelope_version)
    group = world.groups.get(name)
    known = group is not None
    if group is None:
        assert world.genesis is not None  # the CRC fitted an incarnation
        if route(name, world.genesis.partitions) != world.log:
            return Verdict(offset, _IGNORED, "misrouted", name, None)
        group = Group(name)  # joins the world only if this record is accepted (F10.3) or makes it opaque (E5)
    if group.opaque_at != NONE:
        return Verdict(offset, _IGNORED, "opaque", name, None)
    if version > RECORD_VERSION or kind > TYPE_MAX:
        world.groups[name] = group
        group.opaque_at = offset
        _reshape(group, group)
        return Verdict(offset, _IGNORED, "opaque", name, None)
    record = decode_body(kind, body) if version else None
    rule = _RULES[kind]
    if record is None or rule is None:
        return Verdict(offset, _REJECTED, "malformed", name, None)
    if group.config is not None and group.config.deleted and not isinstance(record, GroupConfig | Note):
        return Verdict(offset, _REJECTED, "deleted", name, record)
    reason = rule(group, offset, record, body)
    if reason:
        return Verdict(offset, _REJECTED, reason, name, record)
    if not known and not isinstance(record, Note):  # F10.1: a Note does not even create its group
        world.groups[name] = group
    return Verdict(offset, _ACCEPTED, "", name, record)


def _judge_unowned(world: World, offset: int, record: Genesis | Snapshot, envelope_version: int,
                   record_version: int) -> Verdict:  # fmt: skip
    """Genesis and Snapshot (L3-L6, E2, E3, N13)."""
    genesis = record if isinstance(record, Genesis) else record.genesis
    held = world.genesis or world.root
    known = envelope_version == ENVELOPE_VERSION and record_version == RECORD_VERSION
    if not isinstance(record, Genesis):
        if known and held is not None and not record.chain and record.at > world.began_at:
            raise HistoryRestarted(world.log, offset, record.at)
        # The codec compared their CRCs only (E2).
        if world.genesis is None or world.genesis.incarnation != genesis.incarnation:
            return Verdict(offset, _IGNORED, "garbage", "", None)
    if not known and (held is None or held.incarnation == genesis.incarnation):
        raise EnvelopeUnknown(world.log, offset, max(envelope_version, record_version))
    if not isinstance(record, Genesis):
        return Verdict(offset, _ACCEPTED, "", "", record)
    if world.genesis is not None or (world.log > 0 and record != world.root):
        return Verdict(offset, _IGNORED, "genesis", "", record)
    if world.expected is not None and record.incarnation != world.expected:
        raise TopicRecreated(world.log, world.expected.hex(), record.incarnation.hex())
    if record.hash != HASH_NAME:
        raise ProtocolUnknown(world.log, "hash", record.hash)
    if record.protocol > PROTOCOL_VERSION:
        raise ProtocolUnknown(world.log, "protocol version", record.protocol)
    world.genesis = record
    world.crc_seed = crc32(record.incarnation)
    return Verdict(offset, _ACCEPTED, "", "", record)


# --- what rules share


def _reshape(group: Group, *entries: Topic | Session | Partition | Group) -> None:
    """Notes that more than a position moved: policies look again, digests hash these entries anew."""
    group.shape += 1
    group.dirty.update(entries)


def _partition(group: Group, tp: TopicPartition) -> Partition:
    """The state of a partition, made when first named."""
    found = group.partitions.get(tp)
    if found is None:
        found = group.partitions[tp] = Partition(tp, hash64(tp.topic.encode()))
    return found


def _free(group: Group, partition: Partition, successor: int) -> None:
    """Takes a claim from its owner (F3.3, F6.2); position, generation, version and figures stay."""
    session = group.sessions[partition.owner]
    session.epochs.discard(partition.epoch)
    if partition.tp.partition >= 0:
        session.held -= 1
    del group.claims[partition.epoch]
    partition.last_owner = partition.owner
    partition.owner = partition.epoch = NONE
    partition.successor = successor
    _reshape(group, partition)


def _end_session(group: Group, session: Session) -> None:
    """F3.3."""
    for epoch in tuple(session.epochs):
        _free(group, group.claims[epoch], NONE)
    del group.sessions[session.id]
    group.forget_entry(session)
    group.shape += 1


def _forget_position(group: Group, partition: Partition, offset: int) -> None:
    """F9.2: the position is gone, and records that still name the old version are stale."""
    partition.position = NONE
    partition.generation += 1
    partition.version = offset
    partition.lag = partition.in_flight = partition.attempts = 0
    _reshape(group, partition)


def _claim_of(group: Group, session_id: int, epoch: int) -> Partition | None:
    """The live claim `epoch` if it is this session's."""
    partition = group.claims.get(epoch)
    return partition if partition is not None and partition.owner == session_id else None


def _holds_partition(group: Group) -> bool:
    return any(p.tp.partition >= 0 for p in group.claims.values())


# --- the rules; each returns "" if it accepted, else the reason, having changed nothing


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
        _end_session(group, predecessor)
    if not group.mode:
        group.mode = record.mode
        group.dirty.add(group)
    session = Session(offset, record, body, hash64(body), offset)
    group.sessions[offset] = session
    _reshape(group, session)
    return ""


def _heartbeat(group: Group, offset: int, record: Heartbeat, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    dirty = group.dirty
    if not (group.pause_duration_ms and session.held):
        session.extended = offset
        dirty.add(session)
    claims, owner, at_least_once = group.claims, record.session, group.mode == AT_LEAST_ONCE
    for entry in record.claims:
        partition = claims.get(entry.epoch)
        if partition is None or partition.owner != owner or partition.tp[1] < 0:
            continue
        if at_least_once:
            if entry.position < partition.position:
                continue
            partition.position = entry.position
        partition.lag, partition.in_flight, partition.attempts = entry.lag, entry.in_flight, entry.attempts
        dirty.add(partition)
    if record.ready != session.ready:
        session.ready = record.ready
        dirty.add(session)
    return ""


def _leave(group: Group, offset: int, record: Leave, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    _end_session(group, session)
    return ""


def _evict(group: Group, offset: int, record: Evict, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    if record.observed != session.extended:
        return "observed"
    if record.waited_ms < 2 * session.join.interval_ms:
        return "waited"
    _end_session(group, session)
    return ""


def _claim_partition(group: Group, offset: int, record: ClaimingPartition, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    if group.pause_duration_ms:
        return "paused"
    tp = TopicPartition(record.topic, record.partition)
    if not group.partition_exists(tp):
        return "topology"
    known = group.partitions.get(tp)
    if known is not None and known.owner != NONE:
        return "held"
    if record.observed != (NONE if known is None else known.version):
        return "observed"
    needs_start = tp.partition >= 0 and (known is None or known.position == NONE)
    if needs_start and record.start == NONE:
        return "start"
    partition = _partition(group, tp)
    if needs_start:
        partition.position = record.start
    partition.owner = session.id
    partition.epoch = partition.version = offset
    partition.successor = NONE
    group.claims[offset] = partition
    session.epochs.add(offset)
    if tp.partition >= 0:
        session.held += 1
    _reshape(group, partition)
    return ""


def _claim_messages(group: Group, offset: int, record: ClaimingMessages, body: bytes) -> str:
    if record.session not in group.sessions:
        return "session"
    partition = _claim_of(group, record.session, record.epoch)
    if partition is None or partition.tp.partition < 0:
        return "claim"
    if group.mode != AT_MOST_ONCE:
        return "mode"
    if group.pause_duration_ms:
        return "paused"
    if record.from_ != partition.position:
        return "from"
    if not record.from_ <= record.start < record.to or record.to - record.start > GRANT_OFFSETS_MAX:
        return "range"
    partition.position = record.to
    group.dirty.add(partition)
    return ""


def _release_partition(group: Group, offset: int, record: ReleasingPartition, body: bytes) -> str:
    if record.session not in group.sessions:
        return "session"
    partition = _claim_of(group, record.session, record.epoch)
    if partition is None:
        return "claim"
    if group.mode == AT_LEAST_ONCE and partition.tp.partition >= 0:
        partition.position = max(partition.position, record.position)
    _free(group, partition, record.successor)
    partition.version = offset
    return ""


def _release_group(group: Group, offset: int, record: ReleaseGroup, body: bytes) -> str:
    if record.observed != group.pause_change:
        return "observed"
    waited_out = record.duration_ms == 0 and record.waited_ms >= group.pause_duration_ms
    if group.paused and record.token != group.pause_change and not waited_out:
        return "paused"
    group.pause_change = offset
    group.pause_duration_ms = record.duration_ms
    _reshape(group, group)
    return ""


def _set_position(group: Group, offset: int, record: SetPosition, body: bytes) -> str:
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
        partition = _partition(group, tp)
        partition.position = move.position
        partition.generation += 1
        partition.version = offset
        partition.lag = partition.in_flight = partition.attempts = 0
        group.dirty.add(partition)
    if record.resume:
        group.pause_duration_ms = 0
        group.pause_change = offset
    _reshape(group, group)
    return ""


def _topology(group: Group, offset: int, record: Topology, body: bytes) -> str:
    topic = group.topics.get(record.topic)
    if record.observed != (NONE if topic is None else topic.offset):
        return "observed"
    if topic is None:
        topic = Topic(hash64(record.topic.encode()), record.partitions, record.partitions, offset)
        group.topics[record.topic] = topic
        _reshape(group, topic)
        return ""
    if record.partitions == topic.count:
        return "same"
    if record.partitions < topic.count:
        if not group.paused or record.token != group.pause_change:
            return "token"
        cut = [p for p in group.partitions.values() if p.tp.topic == record.topic
               and p.tp.partition >= record.partitions]  # fmt: skip
        if any(p.owner != NONE for p in cut):
            return "held"
        for partition in cut:
            _forget_position(group, partition, offset)
    topic.count = record.partitions
    topic.offset = offset
    _reshape(group, topic)
    return ""


def _group_config(group: Group, offset: int, record: GroupConfig, body: bytes) -> str:
    if record.observed != group.config_offset:
        return "observed"
    changes_mode = not record.deleted and record.mode != 0 and group.mode not in (0, record.mode)
    if record.deleted and group.sessions:
        return "sessions"
    if changes_mode:
        if not group.paused or record.token != group.pause_change:
            return "token"
        if _holds_partition(group):
            return "held"
        for session in tuple(group.sessions.values()):
            _end_session(group, session)
        for partition in group.partitions.values():
            if partition.tp.partition >= 0:
                partition.generation += 1
                group.dirty.add(partition)
    if record.deleted:
        group.mode = 0
        if group.paused:
            group.pause_change, group.pause_duration_ms = offset, 0
        for partition in group.partitions.values():
            if partition.tp.partition >= 0:
                _forget_position(group, partition, offset)
    elif record.mode:
        group.mode = record.mode
    for session in group.sessions.values():
        if session.mark != NONE:
            session.mark = NONE
            group.dirty.add(session)
    group.config, group.config_body, group.config_hash, group.config_offset = record, body, hash64(body), offset
    _reshape(group, group)
    return ""


def _step_down(group: Group, offset: int, record: StepDown, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    if record.observed != session.mark:
        return "observed"
    session.mark = offset
    _reshape(group, session)
    return ""


def _note(group: Group, offset: int, record: Note, body: bytes) -> str:
    return ""


_RULES: Final[tuple[Callable[[Group, int, Any, bytes], str] | None, ...]] = (
    None, _join, _heartbeat, _leave, _evict, _claim_partition, _release_partition, _claim_messages, _release_group,
    _set_position, _topology, _group_config, _step_down, _note, None,
)  # fmt: skip  # by type number; Genesis and Snapshot have no rule under a group id (E2)
