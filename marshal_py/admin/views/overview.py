"""Groups and their members, in the words of `marshal state`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from marshal_py.admin.views.group_info import (
    GroupInfo,
    GroupState,
    GroupSummary,
    MemberInfo,
    MemberState,
    PartitionState,
    PauseInfo,
    PinInfo,
    PositionInfo,
    PriorityGroupState,
    SettingsOrigin,
)
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.admin.views.recreated_topics import RecreatedTopic, partitions_of
from marshal_py.errors import GroupMissing
from marshal_py.protocol.fold.policies import KNOWN, policy_of
from marshal_py.protocol.fold.world import Group, Partition, Session
from marshal_py.protocol.member.group_settings import settings_of
from marshal_py.protocol.member.waiting import Standstill, named
from marshal_py.protocol.policy import candidate_order, listed, names, owner_of
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import NONE, PIN, Token, TopicPartition
from marshal_py.protocol.wire.records import BEYOND_END, LAG_UNKNOWN, MODE_NAMES, RECREATED, GroupConfig
from marshal_py.transport.ports import TopicInfo

SKEW_MS: Final = 2_000  # a smaller difference may be a record's latency


def summary(
    group: Group, extended_ms: Mapping[int, int] | None = None, now_ms: float = 0, not_consumed: Iterable[str] = ()
) -> GroupSummary:
    """Returns a group in one line. A session restored from a snapshot is missing in `extended_ms`."""
    found = members(group, extended_ms, now_ms)
    return GroupSummary(
        group=group.name,
        delivery=MODE_NAMES[group.mode],
        sessions=len(group.sessions),
        topics=tuple(sorted(group.topics)),
        partitions=sum(topic.count for topic in group.topics.values()),
        owned=sum(p.tp.partition >= 0 for p in group.claims.values()),
        parked=len(parked(group)),
        paused=group.paused,
        deleted=group.deleted,
        opaque=group.opaque_at != NONE,
        stale=sum(one.state == "stale" for one in found),
        last_sign_s=min((one.last_sign_s for one in found if one.last_sign_s is not None), default=None),
        not_consumed=tuple(not_consumed),
    )


def parked(group: Group) -> dict[TopicPartition, str]:
    """Returns the partitions that nobody may claim, each with the reason (F6.4)."""
    return {tp: partition.parked for tp, partition in sorted(existing(group).items()) if partition.parked}


def existing(group: Group) -> dict[TopicPartition, Partition]:
    """Returns what the log knows of the partitions that there are. A topic created again with fewer leaves generations
    behind, so that old tokens stay old (F9.2, F9.10)."""
    counts = {name: topic.count for name, topic in group.topics.items()}
    return {
        tp: partition
        for tp, partition in group.partitions.items()
        if partition.owner != NONE or tp.partition < counts.get(tp.topic, tp.partition + 1)
    }


def gone(group: Group, infos: Mapping[str, TopicInfo | None]) -> list[str]:
    """Returns the topics of a group that the cluster does not have. `infos`: None for such a one; without those of
    which nothing is known."""
    return [topic for topic in sorted(topics(group)) if topic in infos and infos[topic] is None]


def abandoned(group: Group, infos: Mapping[str, TopicInfo | None]) -> list[str]:
    """Returns the topics of a group without consumers if the cluster has none of them any more. `infos`: of `gone`."""
    lost = gone(group, infos)
    return lost if len(lost) == len(topics(group)) and not (group.sessions or group.deleted) else []


def stopped(
    group: Group, recreated: Mapping[str, RecreatedTopic], ends: Mapping[TopicPartition, int]
) -> tuple[Standstill, ...]:
    """Returns what nobody consumes until an admin acts, by topic and reason (F6.4, D6, D10): parked, or not yet, but
    the next consumer will write it. `recreated`: topics created again, even if the log does not say so yet. `ends`: as
    far as known."""
    said = parked(group)
    beyond = {tp: position for tp, position in positions(group).items() if position > ends.get(tp, position)}
    gone = partitions_of(group, recreated.values())
    reasons = {**dict.fromkeys(beyond, BEYOND_END), **said, **dict.fromkeys(gone, RECREATED)}
    alike: dict[tuple[str, str], list[TopicPartition]] = {}
    for tp, reason in sorted(reasons.items()):
        alike.setdefault((tp.topic, reason), []).append(tp)
    found = []
    for (topic, reason), tps in sorted(alike.items()):
        first, one = tps[0], recreated.get(topic)
        ids = ("", "") if one is None else (one.known, one.found)
        why = records.beyond_end(beyond[first], ends[first]) if first in beyond else ""
        state = "parked" if all(tp in said for tp in tps) else "not consumed"
        text = f"{len(tps)} partitions of {topic!r} are {state} ({reason})"
        advice = "of the first one, " if len(tps) > 1 else ""
        advice += str(records.parked_error(group.name, first, reason, *ids, why))
        found.append(Standstill("parked", text, advice, topic, tuple(tp.partition for tp in tps)))
    return tuple(found)


def silence(group: Group, extended_ms: Mapping[int, int], now_ms: float) -> dict[int, int]:
    """Returns how long each session without a recent sign of life was silent. `extended_ms`: of the last one. SKEW_MS
    more is tolerated: the writers' clocks differ."""
    found = {}
    for session in group.sessions.values():
        silent_ms = round(now_ms - extended_ms.get(session.id, now_ms))
        if silent_ms > records.EVICT_INTERVALS * session.join.interval_ms + SKEW_MS:
            found[session.id] = silent_ms
    return found


def paused(pause: PauseInfo) -> str:
    """Returns the pause in words: its author, its reason, the time left, and the token that ends it."""
    by = f" by {pause.by}" if pause.by else ""
    why = f", {pause.reason}" if pause.reason else ""
    left = f", about {pause.left_s:.0f} s left" if pause.left_s is not None else ""
    if pause.left_s == 0:
        left = ", which are over: a consumer ends the pause, once it has waited for so long itself"
    return f"paused for {pause.duration_s:g} s{by}{why}{left}, token {pause.token}"


def pause(group: Group, pause_history: PauseHistory | None, wall_ms: int) -> PauseInfo | None:
    """Returns the running pause with author, reason and time left (M1, M2), or None. `wall_ms`: now, since 1970."""
    if not group.paused:
        return None
    said = pause_history.running(group) if pause_history is not None else None
    left_s = pause_history.left_s(wall_ms) if pause_history is not None and said is not None else -1
    return PauseInfo(
        token=group.pause_change,
        duration_s=group.pause_duration_ms / 1000,
        by=(said.by if said is not None else "") or None,
        reason=(said.reason if said is not None else "") or None,
        left_s=round(left_s, 1) if left_s >= 0 else None,
    )


def info(
    group: Group, pause_history: PauseHistory, wall_ms: int, incarnation: bytes, pinned_ms: int | None
) -> GroupInfo:
    """Returns everything that the log says about a group. `wall_ms`: now, since 1970; the rest as in `pin_entries`."""
    config = group.config if group.config is not None else GroupConfig(NONE)
    counts = {name: topic.count for name, topic in sorted(group.topics.items())}
    settings = {**settings_of(config), **partitioned(group, config), "members": members(group)}
    if policy_of(config).priority:
        settings["priority_groups"] = pin_entries(group, incarnation, pinned_ms)
    line = summary(group)
    alike = ("group", "delivery", "sessions", "partitions", "owned", "parked", "paused", "deleted", "opaque")
    return GroupInfo(
        **settings,
        **{name: getattr(line, name) for name in alike},
        topics=counts,
        policy=config.policy or None,
        pause=pause(group, pause_history, wall_ms),
        on_topic_recreated=config.on_topic_recreated or None,
        topic_ids={name: topic.id or None for name, topic in sorted(group.topics.items())},
        positions=tuple(
            PositionInfo(
                topic=p.tp.topic,
                partition=p.tp.partition,
                position=p.position if p.position != NONE else None,
                generation=p.generation,
                owner=group.sessions[p.owner].join.client_id if p.owner != NONE else None,
                session=p.owner if p.owner != NONE else None,
                parked=p.parked or None,
            )
            for p in sorted(existing(group).values(), key=lambda p: p.tp)
            if p.tp.partition >= 0
        ),
        admin_keys=tuple(key.hex() for key in group.keys),
        settings_from=None if group.config is None else SettingsOrigin(group.config_offset, config.by),
    )


def partitioned(group: Group, config: GroupConfig) -> dict[str, Any]:
    """Returns what GroupInfo says of a partitioned group alone; {} for another group."""
    if not policy_of(config).partitioned:
        return {}
    order = candidate_order(group, ())
    owners = names(group, order)
    listed_names = [each.member for each in config.mappings] or listed(config)
    states = tuple(_member_state(group, name, order, owners) for name in listed_names)
    unparked = (tp for tp in partitions(group) if tp.partition >= 0 and not group.parked(tp))
    return {
        "max_members": config.max_members,
        "member_list": config.members or None,
        "mappings": {each.member: each.partitions for each in config.mappings} or None,
        "member_states": states,
        "active_members": tuple(state.member for state in states if state.claims),
        "missing_members": tuple(state.member for state in states if state.session is None),
        "unassigned": tuple(str(tp) for tp in unparked if tp not in owners),
    }


def _member_state(group: Group, name: str, order: list[int], owners: Mapping[TopicPartition, str]) -> MemberState:
    """One member name: its partitions, the session that is active for it, and the standbys by rank."""
    line = [group.sessions[sid] for sid in order if group.sessions[sid].join.member == name]
    claims = [group.claims[epoch].tp for session in line for epoch in session.epochs]
    return MemberState(
        member=name,
        partitions=tuple(str(tp) for tp in sorted(tp for tp, owner in owners.items() if owner == name)),
        claims=tuple(str(tp) for tp in sorted(claims)),
        session=line[0].id if line else None,
        client_id=line[0].join.client_id if line else None,
        standbys=tuple(session.join.client_id for session in line[1:]),
    )


def members(group: Group, extended_ms: Mapping[int, int] | None = None, now_ms: float = 0) -> tuple[MemberInfo, ...]:
    """Returns the live sessions in the order of candidates (F9.9). `extended_ms`: of their last sign of life, if
    known."""
    known = extended_ms or {}
    return tuple(_member(group, group.sessions[one], known.get(one), now_ms) for one in candidate_order(group, ()))


def _member(group: Group, session: Session, extended_ms: int | None, now_ms: float) -> MemberInfo:
    age_s = None if extended_ms is None else round(max(0.0, now_ms - extended_ms) / 1000, 1)
    return MemberInfo(
        group=group.name,
        session=session.id,
        client_id=session.join.client_id,
        member=session.join.member or None,
        priority_group=session.join.priority_group or None,
        priority=session.join.priority,
        min_pending=session.join.min_pending or None,
        min_ack_pending=session.join.min_ack_pending or None,
        delivery=MODE_NAMES[session.join.mode],
        topics=session.join.topics,
        library=session.join.library,
        reads_version=session.join.reads_version,
        witness=session.join.witness or None,
        interval_s=session.join.interval_ms / 1000,
        claims=tuple(sorted(str(group.claims[epoch].tp) for epoch in session.epochs)),
        stepped_down=session.mark != NONE,
        state=liveness(age_s, session.join.interval_ms / 1000),
        last_sign_s=age_s,
    )


def positions(group: Group) -> dict[TopicPartition, int]:
    """Returns every position that the group has."""
    return {tp: p.position for tp, p in existing(group).items() if tp.partition >= 0 and p.position != NONE}


def unfinished(group: Group, topic: str, going: Mapping[int, tuple[int, int]]) -> int:
    """Returns how many offsets of a topic, [start, to) by partition, are at or after the group's positions."""
    known = ((tp.partition, at) for tp, at in positions(group).items() if tp.topic == topic and tp.partition in going)
    return sum(max(0, going[number][1] - max(at, going[number][0])) for number, at in known)


def free(
    group: Group,
    ends: Mapping[TopicPartition, int],
    recreated: Collection[str] = (),
    firsts: Mapping[TopicPartition, int] | None = None,
) -> dict[TopicPartition, int]:
    """Returns the lag of each partition without an owner in which messages wait. All from the first one on (`firsts`,
    as far as known) count where it has no position, and in the topics that were `recreated`, because its position is
    of the old one."""
    found = {}
    for tp in partitions(group):
        known = group.partitions.get(tp)
        if tp.partition >= 0 and tp.topic in group.topics and (known is None or known.owner == NONE):
            read = 0 if known is None or tp.topic in recreated else max(0, known.position)
            found[tp] = ends.get(tp, 0) - max(read, (firsts or {}).get(tp, 0))
    return {tp: lag for tp, lag in found.items() if lag > 0}


# --- who is pinned in a group with the policy `pinned` (PROTOCOL.md A11), and since when


def pin_entries(group: Group, incarnation: bytes, pinned_ms: int | None) -> tuple[PriorityGroupState, ...]:
    """Returns the priority groups. `incarnation`: part of the pin's id. `pinned_ms`: of the claim of the pin, or
    None."""
    names = () if group.config is None else group.config.priority_groups
    known = group.partitions.get(PIN)
    if known is None or known.owner == NONE:
        return tuple(map(PriorityGroupState, names))
    began = None if pinned_ms is None else datetime.fromtimestamp(pinned_ms / 1000, UTC)
    pinned_id = str(Token(incarnation, known.epoch))
    pinned_ts = None if began is None else began.isoformat(timespec="milliseconds")
    return tuple(PriorityGroupState(name, pinned_id, pinned_ts) for name in names)


def pin_info(group: Group, incarnation: bytes, pinned_ms: int | None) -> PinInfo:
    """Returns who is pinned and who stands by, as `pin_entries`. Raises GroupMissing for another policy."""
    _check_pins(group)
    owner = owner_of(group, PIN)
    (entry,) = pin_entries(group, incarnation, pinned_ms)
    joins = {sid: group.sessions[sid].join for sid in candidate_order(group, ())}
    return PinInfo(
        group=group.name,
        priority_group=entry.name,
        pinned_id=entry.pinned_id,
        pinned_ts=entry.pinned_ts,
        session=owner if owner != NONE else None,
        client_id=joins[owner].client_id if owner != NONE else None,
        standbys=tuple(join.client_id for sid, join in joins.items() if sid != owner),
    )


def _check_pins(group: Group) -> None:
    """Raises GroupMissing if nobody can be pinned in the group, because it has another policy."""
    policy = policy_of(group.config)
    if not policy.pins:
        has = f"its policy is {policy.name}" if policy.name else "it has no policy in its settings"
        pinning = " and ".join(name for name, each in KNOWN.items() if each.pins)
        raise GroupMissing(group.name, f"pins nobody: {has}, and only {pinning} does")


def pinned_session(group: Group) -> int:
    """Returns the session that is pinned. Raises GroupMissing if nobody is pinned, or the group has another policy."""
    _check_pins(group)
    found = owner_of(group, PIN)
    if found == NONE:
        raise GroupMissing(group.name, "has no pinned consumer")
    return found


# --- with what only the cluster and a clock know


def liveness(age_s: float | None, interval_s: float) -> str:
    """Returns "fresh" for one interval after the last sign of life, "unknown" for two or if `age_s` is None, then
    "stale"."""
    if age_s is None:
        return "unknown"
    return "fresh" if age_s < interval_s else "unknown" if age_s <= records.EVICT_INTERVALS * interval_s else "stale"


def partitions(group: Group) -> list[TopicPartition]:
    """Returns every partition that the group could own, and claims on topics or the group (partition -1), even ended
    ones."""
    counted = (TopicPartition(name, number) for name, topic in group.topics.items() for number in range(topic.count))
    return sorted({*existing(group), *counted})


def topics(group: Group) -> set[str]:
    """Returns the topics of a group, and those that its consumers name, which may not be there yet."""
    return {*group.topics, *named(group)}


def state(
    group: Group,
    log: int,
    extended_ms: Mapping[int, int],
    ends: Mapping[TopicPartition, int],
    now_ms: float,
    paused: PauseInfo | None = None,
    recreated: Collection[str] = (),
    notices: tuple[str, ...] = (),
    firsts: Mapping[TopicPartition, int] | None = None,
) -> GroupState:
    """Returns what log, cluster and clock say about a group, as `marshal state` shows it. `extended_ms`: of each
    session's last sign; `ends`, `firsts`: of data partitions; `recreated`: topics with another id."""
    config = group.config
    return GroupState(
        group=group.name,
        log=log,
        delivery=MODE_NAMES[group.mode],
        policy=(config.policy if config is not None else "") or None,
        deleted=group.deleted,
        opaque_at=group.opaque_at if group.opaque_at != NONE else None,
        pause=paused,
        sessions=tuple(sorted(members(group, extended_ms, now_ms), key=lambda member: member.session)),
        partitions=tuple(
            partition_state(group, tp, ends.get(tp), recreated, (firsts or {}).get(tp, 0)) for tp in partitions(group)
        ),
        notices=notices,
    )


def partition_state(
    group: Group, tp: TopicPartition, end: int | None, recreated: Collection[str] = (), first: int = 0
) -> PartitionState:
    """Returns what log and cluster say about a partition. Its lag counts what is there, from `first` on. It is None
    without an end, without a position unless nothing is there, beyond the end, after lost records, for a topic that was
    created again, and in an opaque group, whose positions are old."""
    known = group.partitions.get(tp)
    owned = known is not None and known.owner != NONE
    position = known.position if known is not None and known.position != NONE else None
    why = known.parked if known is not None else ""
    lag = None
    if end is not None and (end <= first if position is None else position <= end):
        lag = max(0, end - max(position or 0, first))
    unknown = why in LAG_UNKNOWN or tp.topic in recreated or group.opaque_at != NONE
    return PartitionState(
        topic=tp.topic,
        partition=tp.partition,
        owner=group.sessions[known.owner].join.client_id if known is not None and owned else None,
        session=known.owner if known is not None and owned else None,
        epoch=known.epoch if known is not None and owned else None,
        position=position,
        generation=known.generation if known is not None else 0,
        version=known.version if known is not None and known.version != NONE else None,
        in_flight=known.in_flight if known is not None else 0,
        end=end,
        lag=None if unknown else lag,
        parked=why or None,
    )
