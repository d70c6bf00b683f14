"""The fold applies one record to the world by the rules of PROTOCOL.md 5. Nothing else changes a world.

`apply(world, offset, value)` folds one record and returns its verdict. A rejected or ignored record changes nothing but
counters and the chain digest. A record that must stop the whole log raises a CoordinationError, and changes nothing.
Rules 7 to 9 are in admin_rules.py, what rules share in transitions.py. The fold reads no clock and no timestamp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from zlib import crc32

from marshal_py.errors import HistoryRestarted, LogGap, ProtocolOutdated, ProtocolUnknown, TopicRecreated
from marshal_py.protocol.fold import transitions
from marshal_py.protocol.fold.admin_rules import group_config, release_group, set_position, step_down, topology
from marshal_py.protocol.fold.policies import misfit
from marshal_py.protocol.fold.transitions import free, partition_of, reshape
from marshal_py.protocol.fold.verdict import Outcome, Verdict
from marshal_py.protocol.fold.world import (
    CHECKPOINT_OFFSETS,
    Group,
    Partition,
    Session,
    Span,
    World,
    hash64,
    lag_weight,
)
from marshal_py.protocol.wire.codec import (
    ENVELOPE_VERSION,
    LOG_RECORD_VERSION,
    RECORD_VERSION,
    TYPE_MAX,
    decode_body,
    open_envelope,
)
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    COUNT_MAX,
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
    ReleasingPartition,
    SeekingPartition,
    Snapshot,
)
from marshal_py.protocol.wire.routing import HASH_NAME, route

PROTOCOL_VERSION: Final = 2
EVICT_INTERVALS: Final = 2  # after so many of its intervals without a sign of life a session may be evicted (F3.2)

_ACCEPTED: Final = Outcome.ACCEPTED  # an enum looks its members up at every use
_REJECTED: Final = Outcome.REJECTED
_IGNORED: Final = Outcome.IGNORED
_LAST_OF_BLOCK: Final = CHECKPOINT_OFFSETS - 1  # CHECKPOINT_OFFSETS is a power of two


def apply(world: World, offset: int, value: bytes | None) -> Verdict:
    """Folds the record at `offset` into the world and returns the verdict.

    Raises a CoordinationError and changes nothing if the record must stop the whole log.
    """
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
    """Checks a record in the order of PROTOCOL.md 5, and applies the rule of its type if no check before fails.

    The order is: garbage, stop, misrouted, opaque and version, body, the type's rule.
    """
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
    if version > RECORD_VERSION or kind > TYPE_MAX:
        world.groups[name] = group
        group.opaque_at = offset
        reshape(group, group)
        return Verdict(offset, _IGNORED, "opaque", name, None)
    record = decode_body(kind, body) if version else None
    rule = _RULES[kind]
    if record is None or rule is None:
        return Verdict(offset, _REJECTED, "malformed", name, None)
    if group.config is not None and group.config.deleted and not isinstance(record, GroupConfig | Note):
        return Verdict(offset, _REJECTED, "deleted", name, record)
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
    """Checks that this library has the protocol version that the Genesis names.

    Raises ProtocolOutdated if the log's version is lower, and ProtocolUnknown if it is higher (L6).
    """
    if genesis.protocol < PROTOCOL_VERSION:
        raise ProtocolOutdated(log, genesis.protocol, PROTOCOL_VERSION)
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
        transitions.end_session(group, predecessor)
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
    dirty = group.dirty
    if not (group.pause_duration_ms and session.held):
        session.extended = offset
        dirty.add(session)
    claims, owner, at_least_once = group.claims, record.session, group.mode == AT_LEAST_ONCE
    weighted = group.config is not None and group.config.lag_weighted
    for entry in record.claims:
        partition = claims.get(entry.epoch)
        if partition is None or partition.owner != owner or partition.tp[1] < 0:
            continue
        if at_least_once:
            if entry.position < partition.position:
                continue
            partition.position = entry.position
            partition.attempts, partition.progress = entry.attempts, entry.progress
        elif partition.floor <= entry.position <= partition.position:
            partition.floor = entry.position
        if weighted and lag_weight(entry.lag) != lag_weight(partition.lag):
            reshape(group, partition)  # the target may change (A14)
        partition.lag, partition.in_flight = entry.lag, entry.in_flight
        dirty.add(partition)
    if record.ready != session.ready or record.idle_ms != session.idle_ms:
        session.ready, session.idle_ms = record.ready, record.idle_ms
        dirty.add(session)
    return ""


def _leave(group: Group, offset: int, record: Leave, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    transitions.end_session(group, session)
    return ""


def _evict(group: Group, offset: int, record: Evict, body: bytes) -> str:
    session = group.sessions.get(record.session)
    if session is None:
        return "session"
    if record.observed != session.extended:
        return "observed"
    if record.waited_ms < EVICT_INTERVALS * session.join.interval_ms:
        return "waited"
    transitions.end_session(group, session)
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
    transitions.begin_generation(group, partition)
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
