"""What an operation would do now, in sentences and numbers: shown before a question, and by `--dry-run`. Pure; writes
nothing (PROTOCOL.md M12).

Each function raises what the operation itself would raise before it writes. Moves of positions have tables of their own
(preview.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from marshal_py.admin import overview
from marshal_py.admin.change import (
    base_of,
    changes_mode,
    check_group,
    check_settings,
    check_shrink,
    held_beyond,
    settings_of,
    settle,
)
from marshal_py.admin.errand import Scene
from marshal_py.admin.hold import busy, is_named
from marshal_py.admin.pause import name_of
from marshal_py.admin.preview import drained, owners_of, rehearse, twin
from marshal_py.admin.sessions import find_session
from marshal_py.errors import GroupMissing, SettingsChanged
from marshal_py.protocol.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.lease import EVICT_INTERVALS
from marshal_py.protocol.records import Topology
from marshal_py.protocol.world import Group


class Outlook(NamedTuple):
    """`does`: sentences for people. `releases`: who would let go of what. `settings`: what changes, from and to."""

    does: list[str]
    releases: dict[str, str]
    settings: dict[str, dict[str, Any]]


def of_pause(
    scene: Scene, now: Instant, token: int | None = None, adopt: bool = False, take_over: bool = False
) -> Outlook:
    """Raises AdminBusy."""
    group = _there(scene)
    check_pause(scene, now, token, adopt, take_over)
    again = " It is paused already: this pause would replace that one." if group.paused else ""
    does = (
        f"group {group.name!r} would be paused; {len(group.sessions)} consumers would let go of {_owned(group)} "
        "partitions."
    )
    return Outlook([does + again], _releases(group), {})


def of_resume(scene: Scene, now: Instant, token: int | None = None, take_over: bool = False) -> Outlook:
    """Raises AdminBusy."""
    group = _there(scene)
    if not group.paused:
        return Outlook([f"group {group.name!r} is not paused: nothing would be done."], {}, {})
    check_pause(scene, now, token, True, take_over)
    pause = scene.ledger.running(group)
    by = f" of {pause.by}" if pause is not None and pause.by else ""
    return Outlook([f"the pause{by} would end; {len(group.sessions)} consumers would take partitions again."], {}, {})


def of_eviction(scene: Scene, session: int) -> Outlook:
    """Raises GroupMissing."""
    find_session(scene, session)
    group = _there(scene)
    wait_s = EVICT_INTERVALS * group.sessions[session].join.interval_ms / 1000
    does = [
        f"{name_of(group, session)} would be watched for {wait_s:g} s; without a sign of life it would end and its "
        f"{group.sessions[session].held} partitions would be free, otherwise nothing would be done."
    ]
    return Outlook(does, _releases(group, session), {})


def of_step_down(scene: Scene, session: int) -> Outlook:
    """Raises GroupMissing."""
    find_session(scene, session)
    group = _there(scene)
    does = [
        f"{name_of(group, session)} would become the last candidate for everything; it would stay, and might hand "
        "over what others shall have."
    ]
    return Outlook(does, {}, {})


def of_deletion(scene: Scene, force: bool = False) -> Outlook:
    """Raises GroupMissing."""
    group = _there(scene)
    if group.deleted:
        return Outlook([f"group {group.name!r} is deleted already: nothing would be done."], {}, {})
    positions = overview.positions(group)
    does = [
        f"{len(positions)} positions of group {group.name!r} would be forgotten, and its consumers would end with "
        "GroupDeleted until it is created again."
    ]
    if group.sessions:
        names = ", ".join(name_of(group, session) for session in sorted(group.sessions))
        does.append(
            f"{names} would be paused and ended first, by a change of the group's delivery."
            if force
            else f"{names} must be silent for {EVICT_INTERVALS} intervals first, or nothing would be done."
        )
    settings = {str(tp): {"from": position, "to": None} for tp, position in sorted(positions.items())}
    return Outlook(does, {}, settings)


def of_settings(scene: Scene, wanted: Mapping[str, str], create: bool) -> Outlook:
    """By the fold itself. Raises GroupMissing, GroupExists, GroupDeleted, InvalidOption."""
    check_group(scene, create)
    checked, group = check_settings(wanted), scene.group
    in_pause = changes_mode(group, checked)
    before = settings_of(group)
    observed = NONE if group is None else group.config_offset
    world, token = twin(scene.world, scene.name), NONE
    if in_pause:
        token = drained(scene, world).pause_change
    if world.genesis is not None:  # else nobody used the log yet, and whatever comes first is accepted
        verdict = rehearse(world, scene.name, settle(base_of(group), checked, observed, token, scene.author.by))
        if not verdict.accepted:
            raise SettingsChanged(scene.name, f"something ({verdict.reason})", "somebody")
    after = settings_of(world.groups.get(scene.name))
    changed = {name: {"from": before[name], "to": after[name]} for name in before if before[name] != after[name]}
    words = [f"{name}: {change['from']} -> {change['to']}" for name, change in changed.items()]
    does = [
        f"group {scene.name!r} would be {'created' if create else 'changed'}: "
        f"{'; '.join(words) or 'nothing would change'}."
    ]
    if in_pause and group is not None:
        does.append(
            f"it would be paused for that, and its {len(group.sessions)} consumers would end with "
            f"ModeMismatch: start them again with delivery={checked['delivery']!r}."
        )
    return Outlook(does, _releases(group) if in_pause and group is not None else {}, changed)


def of_shrink(scene: Scene, topic: str, partitions: int) -> Outlook:
    """By the fold itself. Raises GroupMissing, InvalidOption."""
    count, offset = check_shrink(scene, topic, partitions)
    group = _there(scene)
    lost = {
        str(tp): {"from": position, "to": None}
        for tp, position in sorted(overview.positions(group).items())
        if tp.topic == topic and tp.partition >= partitions
    }
    world = twin(scene.world, scene.name)
    verdict = rehearse(world, scene.name, Topology(topic, partitions, offset, drained(scene, world).pause_change))
    if not verdict.accepted:
        raise SettingsChanged(scene.name, f"something ({verdict.reason})", "somebody")
    does = [
        f"{topic!r} would have {partitions} partitions in group {group.name!r} instead of {count}; {len(lost)} "
        "positions would be forgotten; the group would be paused for that."
    ]
    held = held_beyond(group, topic, partitions)
    return Outlook(does, {str(tp): name_of(group, owner) for tp, owner in sorted(held.items())}, lost)


def _there(scene: Scene) -> Group:
    if scene.group is None:
        raise GroupMissing(scene.name, "has never been used: start a consumer once, or mend the name")
    return scene.group


def check_pause(scene: Scene, now: Instant, token: int | None, adopt: bool, take_over: bool) -> None:
    """M2. Raises AdminBusy for a running pause that the operation may not work in, take or end."""
    group = scene.group
    if group is not None and group.paused and not take_over and not is_named(scene, group, token, adopt):
        raise busy(scene, group, now)


def _owned(group: Group) -> int:
    return sum(p.tp.partition >= 0 for p in group.claims.values())


def _releases(group: Group, session: int = NONE) -> dict[str, str]:
    owned: dict[TopicPartition, str] = owners_of(group)
    keep = {p.tp for p in group.claims.values() if session in (NONE, p.owner)}
    return {str(tp): owner for tp, owner in sorted(owned.items()) if tp in keep}
