"""Changes a group's settings and a topic's size, by GroupConfig and Topology (PROTOCOL.md rule 9, M2-M4, M9, M13).

A change is one record, which the fold accepts only if nobody has changed the same thing since this run read it. A
change of the delivery mode and a smaller number of partitions are accepted only in a pause. Such an operation pauses
the group, and ends the pause after the change. Settings that are not named stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from marshal_py.admin.plans.operation import GRACE_INTERVALS, INTERVAL_MS, USUAL, GroupContext, Operation, Terms
from marshal_py.admin.plans.pause import Drain, PauseLock, name_of
from marshal_py.admin.plans.sessions import RemovePlan
from marshal_py.client.values.options import (
    Wanted,
    base_of,
    changes_mode,
    check_settings,
    check_wanted,
    differences,
    settle,
)
from marshal_py.errors import (
    AdminGaveUp,
    AlreadyExists,
    GroupDeleted,
    GroupMissing,
    InvalidOption,
    MarshalError,
    MembersAlive,
    SettingsChanged,
)
from marshal_py.protocol.fold.policies import PARTITIONED
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import PARTITION_MAX, GroupConfig, Topology
from marshal_py.transport.option_names import suggestion

# --- Changes of a partitioned group's members, each computed from the settings as they are (PROTOCOL.md M13, A7)


Edit = Callable[[GroupConfig], Wanted]


def with_members(added: Iterable[str]) -> Edit:
    """Adds members to the list, unless they are there. Raises InvalidOption for a group with mappings."""
    names = list(added)

    def edit(config: GroupConfig) -> Wanted:
        _check_list(config, names)
        return {"members": [*config.members, *names]}

    return edit


def without_members(dropped: Iterable[str]) -> Edit:
    """Drops members from the list, if they are in it. Raises InvalidOption for a group with mappings."""
    names = list(dropped)

    def edit(config: GroupConfig) -> Wanted:
        _check_list(config, names)
        return {"members": [name for name in config.members if name not in names]}

    return edit


def with_mappings(mappings: Mapping[str, Iterable[int]]) -> Edit:
    """Sets the mappings, which take the place of the mappings or the list of members that the group has."""
    given = {name: list(partitions) for name, partitions in mappings.items()}

    def edit(config: GroupConfig) -> Wanted:
        _check_partitioned(config, "mappings", given)
        if not given:
            raise InvalidOption("mappings", given, "name every partition; to have none, delete the mappings")
        return {"members": [], "mappings": given}

    return edit


def without_mappings(config: GroupConfig) -> Wanted:
    """Deletes the mappings: nobody consumes until there are members or mappings. Raises InvalidOption without any."""
    _check_partitioned(config, "mappings", {})
    if not config.mappings:
        raise InvalidOption("mappings", {}, "the group has none that could be deleted")
    return {"mappings": {}}


def _check_partitioned(config: GroupConfig, option: str, value: object) -> None:
    if config.policy not in PARTITIONED:
        has = f"the policy {config.policy}" if config.policy else "no policy in its settings"
        raise InvalidOption(
            option,
            value,
            f"the group has {has}; only one with policy {' or '.join(sorted(PARTITIONED))} has members, and it gets "
            "that policy when it is created",
        )


def _check_list(config: GroupConfig, names: list[str]) -> None:
    _check_partitioned(config, "members", names)
    if config.mappings:
        raise InvalidOption("members", names, "the group has mappings: change these, or delete them first")
    if not names:
        raise InvalidOption("members", names, "name at least one member")


class ChangePlan(Operation):
    """Changes the group by one record. Subclasses build the record and say why it may no longer be sent."""

    what = "the settings"

    def __init__(self, context: GroupContext, terms: Terms, in_pause: bool, tps: set[TopicPartition] | None) -> None:
        """`in_pause`: the record is accepted only in a pause, in which nobody may own `tps` (None: any partition)."""
        super().__init__(context, terms)
        self.by: str = context.author.signed(self.reason)
        self.in_pause = in_pause
        self.pause_lock: PauseLock = PauseLock(self, self.reason or self.what)
        self.drain: Drain = Drain(self, tps)
        self.changed_at: int = NONE

    def record(self, group: Group, token: int) -> GroupConfig | Topology:
        raise NotImplementedError

    def refusal(self, group: Group) -> MarshalError | None:
        """Returns why the record may not be sent: somebody else has changed the group, so it would be rejected or mean
        something else."""
        raise NotImplementedError

    def read(self, verdict: Verdict, now: Instant) -> None:
        self.drain.read(verdict)
        record = verdict.record
        if isinstance(record, GroupConfig | Topology) and verdict.accepted and self.context.author.wrote(record.by):
            self.changed_at, self.made = verdict.offset, f"the change of {self.what} was made; "
            self.report("changed", self.what, offset=verdict.offset)

    def waits(self) -> bool:
        return self.in_pause

    def act(self, group: Group, now: Instant) -> None:
        if self.changed_at != NONE:
            if not self.in_pause or self.pause_lock.release(group, now):
                self.end()
            return
        refused = self.refusal(group)
        if refused is not None:
            self.give_up(refused)
            return
        token = NONE
        if self.in_pause:
            if not self.pause_lock.acquire(group, now) or not self.drain.empty(group, now):
                return
            token = group.pause_change
        self.send(self.record(group, token), now)

    def timeout_error(self) -> MarshalError:
        waited_s = self.patience_ms / 1000
        if self.in_pause and self.changed_at == NONE:
            holders = self.drain.names(self.context.group)
            return AdminGaveUp(self.context.name, "the pause", waited_s, held_by=holders)
        return AdminGaveUp(self.context.name, f"the change of {self.what}", waited_s)

    def close(self, group: Group, now: Instant) -> bool:
        """Ends this run's pause, after which the change cannot be accepted (F9.2, F9.6). Outside a pause it may still
        be, as `may_land` says."""
        if self.pause_lock.adopted is not None:
            return not self.may_land(group)  # M14: this run does not end a pause that it adopted
        return not self.in_pause or self.pause_lock.release(group, now)

    def may_land(self, group: Group) -> bool:
        if self.changed_at != NONE or self.refusal(group) is not None:
            return False
        if not self.in_pause:
            return any(True for _ in self.sent(GroupConfig))
        sent: list[GroupConfig | Topology] = [*self.sent(GroupConfig), *self.sent(Topology)]
        return self.pause_lock.adopted is not None and any(record.token == group.pause_change for record in sent)

    def close_error(self, error: MarshalError) -> MarshalError:
        if self.pause_lock.adopted is not None:
            return AdminGaveUp(self.context.name, f"the change of {self.what}", GRACE_INTERVALS * INTERVAL_MS / 1000)
        return AdminGaveUp(self.context.name, "the end of the own pause", GRACE_INTERVALS * INTERVAL_MS / 1000)

    def end(self, error: MarshalError | None = None) -> None:
        """Ends the operation with `error`, or with success if the change was accepted meanwhile."""
        super().end(None if error is self.giving_up and self.changed_at != NONE else error)


class ConfigPlan(ChangePlan):
    """Changes settings of a group, unless somebody has changed them since the plan was made (F9.4, M13)."""

    what = "the settings"
    changed_at: int

    def __init__(
        self, context: GroupContext, wanted: Wanted | Edit, terms: Terms = USUAL, *, create: bool = False
    ) -> None:
        """`wanted`: the new settings, as `check_settings` takes them, or a function of those that there are. `create`:
        create or revive the group; one with these settings is left as it is."""
        group = context.group
        self.creates = create
        if group is None and not create:
            raise GroupMissing(context.name, "has never been used: create it, or correct the name")
        if group is not None and group.deleted and not create:
            raise GroupDeleted(context.name)
        self._edit: Edit | None = wanted if callable(wanted) else None
        self.base: GroupConfig = base_of(group)
        self.wanted: dict[str, Any] = check_settings(wanted(self.base) if callable(wanted) else wanted)
        if create and (refused := other_settings(group, self.wanted)):
            raise refused
        check_wanted(group, self.wanted)
        self.looked_at: int = NONE if group is None else group.config_offset
        self.changes_mode: bool = changes_mode(group, self.wanted)
        super().__init__(context, terms, self.changes_mode, None)

    def record(self, group: Group, token: int) -> GroupConfig:
        return settle(self.base, self.wanted, self.looked_at, token, self.by)

    def act(self, group: Group, now: Instant) -> None:
        """An edit or a creation that finds the settings as it wants them is done, and writes nothing."""
        if self.changed_at == NONE and self.refusal(group) is None and self._as_wanted(group):
            self.changed_at = group.config_offset
            self.end()
        else:
            super().act(group, now)

    def _as_wanted(self, group: Group) -> bool:
        if self.creates:
            return exists(group)  # and `refusal` has found no difference
        same = replace(self.base, observed=self.looked_at, token=NONE, by=self.by)
        return self._edit is not None and self.record(group, NONE) == same

    def refusal(self, group: Group) -> MarshalError | None:
        if group.config_offset != self.looked_at and self._edit is not None and not group.deleted:
            try:  # somebody was faster: the same edit of what there is now (M13)
                wanted = check_settings(self._edit(base_of(group)))
                check_wanted(group, wanted)
            except InvalidOption as error:
                return error
            self.base, self.wanted, self.looked_at = base_of(group), wanted, group.config_offset
        if self.creates and exists(group):
            return other_settings(group, self.wanted)
        if group.config_offset != self.looked_at:
            return SettingsChanged(group.name, "the settings", group.config.by if group.config is not None else "")
        if changes_mode(group, self.wanted) != self.changes_mode:
            return SettingsChanged(group.name, "the delivery", "its first consumer")
        return None


class DeletionPlan(ChangePlan):
    """Deletes the group in a pause without owners (F9.5, M15), with its live sessions if `force`: consumers end with
    GroupDeleted. That somebody else has deleted it is a success, too."""

    what = "the deletion"
    takes_pause = False

    def __init__(self, context: GroupContext, terms: Terms = USUAL, force: bool = True) -> None:
        if context.group is None:
            raise GroupMissing(context.name, "has never been used")
        super().__init__(context, terms, True, None)
        self._force = force

    def record(self, group: Group, token: int) -> GroupConfig:
        return GroupConfig(group.config_offset, token, deleted=True, by=self.by, admin_keys=group.keys)

    def refusal(self, group: Group) -> MarshalError | None:
        if group.sessions and not self._force:
            names = tuple(name_of(group, session) for session in sorted(group.sessions))
            return MembersAlive(group.name, RemovePlan.what, names)
        return None  # whatever the settings are now

    def give_up(self, error: MarshalError) -> None:
        group = self.context.group
        if group is not None and group.deleted:
            self.end()
        else:
            super().give_up(error)


class ShrinkPlan(ChangePlan):
    """Makes a topic smaller that was created again, where the cluster has no topic ids (F9.2). Positions of what is cut
    off are forgotten. With ids, a move accepts the new topic (recreated_topics.py)."""

    topic: str
    partitions: int

    def __init__(self, context: GroupContext, topic: str, partitions: int, terms: Terms = USUAL) -> None:
        """Plans to shrink `topic` to Kafka's number of `partitions`, and forget what is `cut` off. Raises GroupMissing,
        GroupDeleted, or InvalidOption unless it is smaller than the log's."""
        group = context.group
        if group is not None and group.deleted:
            raise GroupDeleted(context.name)
        if group is None or topic not in group.topics:
            near = suggestion(topic, () if group is None else group.topics)
            raise GroupMissing(context.name, f"has never consumed topic {topic!r}{near}")
        known = group.topics[topic]
        if not 1 <= partitions <= PARTITION_MAX or partitions >= known.count:
            raise InvalidOption(
                "partitions",
                partitions,
                f"1 to {known.count - 1}: {topic!r} has {known.count} in this group, and it grows by itself",
            )
        self.topic, self.partitions = topic, partitions
        self.what: str = f"the partitions of {topic}"
        self.looked_at: int = known.offset
        self.cut: set[TopicPartition] = {TopicPartition(topic, number) for number in range(partitions, known.count)}
        super().__init__(context, terms, True, self.cut)

    def record(self, group: Group, token: int) -> Topology:
        return Topology(self.topic, self.partitions, self.looked_at, token, self.by)

    def refusal(self, group: Group) -> MarshalError | None:
        if group.topology_offset(self.topic) != self.looked_at:  # the topic may be gone with the group
            return SettingsChanged(group.name, self.what, "a consumer that saw the topic grow, or another admin")
        return None


def exists(group: Group | None) -> bool:
    """Returns whether the group has begun, by settings or by a first consumer, and is not deleted."""
    return group is not None and not group.deleted and (group.config is not None or group.mode != 0)


def other_settings(group: Group | None, wanted: Wanted) -> AlreadyExists | None:
    """Returns the error if the group exists with other settings than those that it is to be created with."""
    if group is None or not exists(group) or not (found := differences(group, wanted)):
        return None
    return AlreadyExists("group", group.name, found)
