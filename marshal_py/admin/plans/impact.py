"""Says what an operation would do now, in sentences and numbers, as `--dry-run` and the request to confirm show it
(M12).

Pure; writes nothing.

Each function raises what the operation itself would raise before it writes. What changes a group's settings, topics or
positions is rehearsed: its records are folded onto a clone of the world. Of a move of positions a table says what it
would do, `preview`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from shlex import quote
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec.structs import replace

from marshal_py.admin.plans.change import ConfigPlan, Edit, ShrinkPlan, exists
from marshal_py.admin.plans.operation import USUAL, GroupContext, Terms, holders
from marshal_py.admin.plans.pause import busy, is_named, name_of
from marshal_py.admin.plans.position import finished_of
from marshal_py.admin.plans.sessions import find_session
from marshal_py.admin.views import overview
from marshal_py.admin.views.recreated_topics import RecreatedTopic
from marshal_py.client.values.options import Wanted, settings_named, settings_of
from marshal_py.errors import AdminFailed, GroupDeleted, GroupMissing
from marshal_py.history.explain import describe
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.policies import OWN_POLICY, policy_of
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.policy import candidate_order, names, owner_of
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import (
    EVICT_INTERVALS,
    PAUSE_MS_MAX,
    Move,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
)


class Impact(NamedTuple):
    """What an operation would do: `does`, in sentences; `releases`, partitions with their owners' client ids;
    `settings`, old and new ("from", "to") of each setting that changes, or position that is forgotten."""

    does: list[str]
    releases: dict[str, str]
    settings: dict[str, dict[str, Any]]


def of_pause(context: GroupContext, now: Instant, terms: Terms = USUAL) -> Impact:
    """Returns what a pause of the group would do. Raises AdminBusy if it may not replace a pause that is running,
    GroupDeleted."""
    group = _living(context)
    check_pause(context, now, terms)
    again = " It is paused already: this pause would replace that one." if group.paused else ""
    does = (
        f"group {group.name!r} would be paused; {len(group.sessions)} consumers would release {len(holders(group))} "
        "partitions."
    )
    return Impact([does + again], _releases(group), {})


def of_resume(context: GroupContext, now: Instant, terms: Terms = USUAL) -> Impact:
    """Returns what the end of the running pause would do. Raises AdminBusy if the pause may not be ended,
    GroupDeleted."""
    group = _living(context)
    if not group.paused:
        return Impact([f"group {group.name!r} is not paused: nothing would be done."], {}, {})
    check_pause(context, now, terms._replace(adopt=True))
    pause = context.pause_history.running(group)
    by = f" of {pause.by}" if pause is not None and pause.by else ""
    return Impact([f"the pause{by} would end; {len(group.sessions)} consumers would take partitions again."], {}, {})


def of_eviction(context: GroupContext, given: int | str) -> Impact:
    """Returns what the eviction of a session would do. Raises GroupMissing if no live session fits."""
    session = find_session(context, given)
    group = _there(context)
    wait_s = EVICT_INTERVALS * group.sessions[session].join.interval_ms / 1000
    does = [
        f"{name_of(group, session)} would be watched for {wait_s:g} s; without a sign of life it would end and its "
        f"{group.sessions[session].held} partitions would be free, otherwise nothing would be done."
    ]
    return Impact(does, _releases(group, session), {})


def of_step_down(context: GroupContext, given: int | str) -> Impact:
    """Returns what the step-down of a session would do. Raises GroupMissing if no live session fits."""
    session = find_session(context, given)
    group = _there(context)
    name, pinned = name_of(group, session), owner_of(group, PIN) == session
    does = [f"{name} would finish its handlers and be pinned no longer; another one would be."] if pinned else []
    does += [
        f"{name} would become the last candidate for everything; it would stay in the group, and might hand partitions "
        "over to others.",
        _undo_of_step_down(group),
    ]
    return Impact(does, _releases(group, session) if pinned else {}, {})


def _undo_of_step_down(group: Group) -> str:
    """Returns how a step-down ends (F9.7): any change of the settings, also to what they are, clears all marks."""
    policy = OWN_POLICY if group.config is None else group.config.policy or OWN_POLICY
    return (
        f"This lasts until its process is restarted, or the group's settings are written again, as they are: "
        f"marshal groups update {quote(group.name)} --policy {policy}"
    )


def of_deletion(context: GroupContext, now: Instant, force: bool = False) -> Impact:
    """Returns what the deletion of the group would do, and that it would be refused if it needs a pause and another one
    is running (M15). Raises GroupMissing if nobody ever used the group."""
    group = _there(context)
    if group.deleted:
        return Impact([f"group {group.name!r} is deleted already: nothing would be done."], {}, {})
    positions = overview.positions(group)
    does = [
        f"{len(positions)} positions of group {group.name!r} would be forgotten, and its consumers would end with "
        "GroupDeleted until it is created again."
    ]
    if group.sessions:
        names = ", ".join(name_of(group, session) for session in sorted(group.sessions))
        does.append(
            f"{names} would release what they own in a pause, and end with it."
            if force
            else f"{names} must be silent for {EVICT_INTERVALS} intervals first, or nothing would be done."
        )
    if group.paused and (force or group.keys):
        does.append(f"As things are it would be refused: {busy(context, group, now, takes=False)}")
    settings = {str(tp): {"from": position, "to": None} for tp, position in sorted(positions.items())}
    return Impact(does, {}, settings)


def of_settings(
    context: GroupContext, wanted: Wanted | Edit, create: bool, now: Instant, terms: Terms = USUAL
) -> Impact:
    """Returns what a change to `wanted` (or a function that makes it) or with `create` a creation would do, folded onto
    a clone. Raises as the operation, also AdminBusy, and AdminFailed if the fold rejects the record."""
    plan, group = ConfigPlan(context, wanted, create=create), context.group
    if plan.changes_mode:
        check_pause(context, now, terms)
    if create and exists(group):
        return Impact([f"group {context.name!r} has these settings already: nothing would be done."], {}, {})
    before, in_pause = settings_of(group), plan.changes_mode
    world = clone(context.world, context.name)
    token = drained(context, world).pause_change if in_pause else NONE
    if world.genesis is not None:  # else nobody used the log yet, and whatever comes first is accepted
        rehearse(world, context.name, plan.record(group or Group(context.name), token))
        after = settings_of(world.groups.get(context.name))
    else:
        after = settings_named(plan.base, plan.wanted)
    there = world.groups.get(context.name)
    releases = {} if group is None else _releases(group) if in_pause else _reassigned(there)
    changed = {
        name: {"from": before.get(name), "to": after.get(name)}
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    }
    if create:
        words = [f"{name} {_text(value)}" for name, value in after.items() if value not in (None, False)]
        words += [f"{name} as its consumers choose" for name in ("delivery", "policy") if after.get(name) is None]
    else:
        words = [f"{name}: {_text(change['from'])} -> {_text(change['to'])}" for name, change in changed.items()]
    does = [
        f"group {context.name!r} would be {'created' if create else 'changed'}: "
        f"{'; '.join(words) or 'nothing would change'}."
    ]
    if in_pause and group is not None:
        does.append(
            f"it would be paused for that, and its {len(group.sessions)} consumers would end with "
            f"ModeMismatch: start them again with delivery={plan.wanted['delivery']!r}."
        )
    elif releases and not (after["members"] or after["mappings"]):
        does.append("nobody would consume until the group has members or mappings again (--add-member, --map).")
    return Impact(does, releases, changed)


def _reassigned(there: Group | None) -> dict[str, str]:
    """Returns the partitions that the members or mappings of `there`, a clone, give to others than their owners."""
    if there is None or not policy_of(there.config).partitioned:
        return {}
    member = names(there, candidate_order(there, ()))
    sessions = {p.tp: there.sessions[p.owner].join for p in there.claims.values()}
    return {str(tp): join.client_id for tp, join in sorted(sessions.items()) if member.get(tp) != join.member}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(numbers)}" for name, numbers in value.items())
    return str(value)


def of_shrink(context: GroupContext, topic: str, partitions: int, now: Instant, terms: Terms = USUAL) -> Impact:
    """Returns what a shrink would do, folded onto a clone. Raises as the operation, also AdminBusy, and AdminFailed."""
    plan, group = ShrinkPlan(context, topic, partitions), _there(context)
    check_pause(context, now, terms)
    lost = {
        str(tp): {"from": position, "to": None}
        for tp, position in sorted(overview.positions(group).items())
        if tp in plan.cut
    }
    world = clone(context.world, context.name)
    rehearse(world, context.name, plan.record(group, drained(context, world).pause_change))
    does = [
        f"{topic!r} would have {partitions} partitions in group {group.name!r} instead of {group.topics[topic].count}; "
        f"{len(lost)} positions would be forgotten; the group would be paused for that."
    ]
    return Impact(
        does, {str(tp): name_of(group, owner) for tp, owner in sorted(holders(group, plan.cut).items())}, lost
    )


def _there(context: GroupContext) -> Group:
    if context.group is None:
        raise GroupMissing(context.name, "has never been used: start a consumer once, or correct the name")
    return context.group


def _living(context: GroupContext) -> Group:
    group = _there(context)
    if group.deleted:
        raise GroupDeleted(group.name)
    return group


def check_pause(context: GroupContext, now: Instant, terms: Terms) -> None:
    """Checks that no pause is running, or only one that the operation may work in, take over or end (M2)."""
    group = context.group
    if group is not None and group.paused and not terms.take_over and not is_named(context, group, terms):
        raise busy(context, group, now)


def _releases(group: Group, session: int = NONE) -> dict[str, str]:
    owners = sorted(owners_of(group).items())
    return {str(tp): owner for tp, owner in owners if session in (NONE, group.partitions[tp].owner)}


# --- moves of positions


class Row(NamedTuple):
    """One partition of a move. `skipped`, `repeated`: how many unfinished messages will not be read, and finished ones
    again, those above the position included; of a partition without a position, those between its beginning and the
    target are skipped."""

    topic: str
    partition: int
    owner: str  # client id, "" if nobody owns it
    position: int
    target: int
    skipped: int
    repeated: int


def owners_of(group: Group) -> dict[TopicPartition, str]:
    """Returns the owned partitions, each with its owner's client id."""
    return {p.tp: group.sessions[p.owner].join.client_id for p in group.claims.values()}


def rows_of(
    owners: Mapping[TopicPartition, str],
    before: Mapping[TopicPartition, int],
    after: Mapping[TopicPartition, int],
    firsts: Mapping[TopicPartition, int],
    parked: Collection[TopicPartition] = (),
    finished: Mapping[TopicPartition, Sequence[Range]] = MappingProxyType({}),
) -> list[Row]:
    """Returns a row per partition of `after`. `owners`: client ids; `before`: NONE without a position; `firsts`: the
    first offsets; `finished`: above the positions (`finished_of`). Of parked partitions with a position, skipped and
    repeated are unknown: 0."""
    rows = []
    for tp, target in sorted(after.items()):
        position = before.get(tp, NONE)
        moved, above = target - position, finished.get(tp, ())
        if position == NONE:  # nothing was finished, or in a topic that is gone
            moved, above = target - firsts[tp], ()
        elif tp in parked:
            moved, above = 0, ()
        passed = sum(max(0, min(one.to, target) - one.start) for one in above)
        again = sum(one.to - one.start for one in above) - passed
        skipped, repeated = max(0, moved) - passed, max(0, -moved) + again
        rows.append(Row(*tp, owners.get(tp, ""), position, target, skipped, repeated))
    return rows


def parked_of(group: Group) -> set[TopicPartition]:
    """Returns the partitions that nobody may claim before their position is moved (F6.4)."""
    return {tp for tp in group.partitions if group.parked(tp)}


def preview(
    context: GroupContext,
    targets: Mapping[TopicPartition, int],
    firsts: Mapping[TopicPartition, int],
    recreated: Mapping[str, RecreatedTopic] | None = None,
) -> list[Row]:
    """Returns a row per partition of `targets`, by folding the move's records. Raises AdminFailed if one is
    rejected."""
    world = clone(context.world, context.name)
    group = context.group
    assert group is not None  # recreated_topics.check_topology raises an error if it is
    there = drained(context, world)
    for one in (recreated or {}).values():
        rehearse(world, context.name, one.accepting(there, there.pause_change, context.author.by))
    before = {tp: p.position for tp, p in there.partitions.items()}
    versions = {tp: p.version for tp, p in there.partitions.items()}
    moves = tuple(Move(*tp, versions.get(tp, NONE), position) for tp, position in sorted(targets.items()))
    rehearse(world, context.name, SetPosition(there.pause_change, moves, True, context.author.by))
    after = {tp: there.partitions[tp].position for tp in targets}
    return rows_of(owners_of(group), before, after, firsts, parked_of(group), finished_of(group))


# --- a rehearsal


def clone(world: World, name: str) -> World:
    """Returns a world at the same offset that contains a copy of the group `name` alone, if that group exists."""
    found = World(world.log, world.root)
    found.genesis, found.crc_seed = world.genesis, world.crc_seed
    if name in world.groups:
        found.groups[name] = copy.deepcopy(world.groups[name])
        there = found.groups[name]
        if there.config is not None:  # a rehearsal needs nobody's signature
            there.config = replace(there.config, admin_keys=())
    found.next_offset = world.next_offset
    found.pending = list(world.pending)
    found.chain, found.chain_at, found.began_at = world.chain, world.chain_at, world.began_at
    return found


def drained(context: GroupContext, world: World) -> Group:
    """Pauses the group in `world`, which must be a clone, releases all its partitions there, and returns the group."""
    there = world.groups[context.name]
    _folded(
        world, context.name, ReleaseGroup(there.pause_change, there.pause_change, PAUSE_MS_MAX, by=context.author.by)
    )
    for partition in list(there.claims.values()):
        _folded(world, context.name, ReleasingPartition(partition.owner, partition.epoch, partition.position))
    return there


def rehearse(world: World, group: str, record: Record) -> None:
    """Folds a record onto `world`, which must be a clone. Raises AdminFailed if the fold does not accept it."""
    verdict = _folded(world, group, record)
    if not verdict.accepted:
        raise AdminFailed(group, AdminFailed.REFUSED, describe(verdict))


def _folded(world: World, group: str, record: Record) -> Verdict:
    assert world.genesis is not None  # a group exists, so its log has begun
    value = codec.encode(record, group, world.genesis.incarnation, world.writes_version(group))
    return rationalizer.apply(world, world.next_offset, value)
