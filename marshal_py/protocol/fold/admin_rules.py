"""Rules 7 to 9 of the fold: pauses, positions, topics, settings, step-downs (PROTOCOL.md 5).

rationalizer.py calls the function of a record's type. It applies the record to the group and returns "", or it changes
nothing and returns the reason for the rejection.
"""

from __future__ import annotations

from marshal_py.protocol.fold import transitions
from marshal_py.protocol.fold.policies import lifelong
from marshal_py.protocol.fold.transitions import forget_position, partition_of, reshape
from marshal_py.protocol.fold.world import Group, Topic, hash64
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import GroupConfig, ReleaseGroup, SetPosition, StepDown, Topology


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
        transitions.begin_generation(group, partition)
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
    if record.deleted and group.sessions and not in_pause:
        return "sessions"
    if not record.deleted and lifelong(group.config, group.mode, record):
        return "lifelong"
    if changes_mode and not in_pause:
        return "token"
    if (record.deleted or changes_mode) and _holds_partition(group):
        return "held"
    if record.deleted or changes_mode:
        for session in tuple(group.sessions.values()):
            transitions.end_session(group, session)
    if changes_mode:
        for partition in group.partitions.values():
            if partition.tp.partition >= 0:
                transitions.begin_generation(group, partition)
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


def _holds_partition(group: Group) -> bool:
    return any(p.tp.partition >= 0 for p in group.claims.values())


def _forget_everything(group: Group, offset: int) -> None:
    """Removes the topics, partitions, mode and pause of a deleted group, and keeps its name and config (F9.5).

    `offset`, that of the deletion, is kept as well, so that the fold rejects copies of older records.
    """
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
