"""Offers programs the operations on one live group.

    with marshal_py.connect("localhost:9092") as marshal:
        token = marshal.group("billing").pause(60, "deploy").token

Each call reads the group's log to its end, over a connection of its own or of `connected`. None needs a consumer here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, Final, NamedTuple

from marshal_py.admin.plans import change
from marshal_py.admin.plans.change import ConfigPlan, DeletionPlan, Edit, ShrinkPlan
from marshal_py.admin.plans.impact import Impact, Row, check_pause, of_shrink, owners_of, parked_of, preview, rows_of
from marshal_py.admin.plans.operation import Author, GroupContext, OperationRunner, Terms, Watcher, author_here
from marshal_py.admin.plans.pause import PausePlan, ResumePlan
from marshal_py.admin.plans.position import PositionPlan, PositionResolver, Target, check_size, target_of
from marshal_py.admin.plans.sessions import EvictPlan, RemovePlan, StepDownPlan, find_session
from marshal_py.admin.views import overview
from marshal_py.admin.views.group_info import GroupInfo, MemberInfo, PinInfo
from marshal_py.admin.views.recreated_topics import RecreatedTopic, check_smaller
from marshal_py.client.values.options import CONNECT_TIMEOUT_S, Wanted
from marshal_py.errors import (
    AdminBusy,
    AdminFailed,
    AdminGaveUp,
    GroupMissing,
    InvalidOption,
    MarshalError,
    PartitionParked,
)
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold.world import Group as GroupState
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.protocol.wire.codec import SigningKey
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.option_names import suggestion
from marshal_py.transport.ports import Transport

TIMEOUT_S: Final = CONNECT_TIMEOUT_S


class Moved(NamedTuple):
    """What a move of positions did, or in a dry run would do.

    `offset`: of the record, -1 in a dry run. `token`: of the pause that is left in place, or -1. `recreated`: topics
    that were deleted and created again, which the move accepts as they are now. `refused`: in a dry run, why a running
    pause would forbid the move, or "".
    """

    rows: list[Row]
    offset: int = NONE
    token: int = NONE
    recreated: Sequence[RecreatedTopic] = ()
    refused: str = ""


class Paused(NamedTuple):
    """A pause in which every partition is free. `duration_s`: unless somebody ends or renews it.

    `released`: the partitions that had an owner. `evicted`: the sessions that were ended because they were silent for
    twice their heartbeat interval.
    """

    token: int
    duration_s: float
    released: list[TopicPartition]
    evicted: list[int]


def _duration_s(duration_s: object) -> float:
    if not isinstance(duration_s, int | float) or isinstance(duration_s, bool) or not math.isfinite(duration_s):
        raise InvalidOption("duration_s", duration_s, "a number of seconds")
    return duration_s


class Group:
    """The operations on one group. Any thread may call a method, which returns when its operation is complete.

    Ctrl-C makes a method undo what it began; a second one, more than a second later, stops it without undoing. Every
    method raises GroupMissing, CoordinationError and ClusterUnreachable; what changes a group also GroupDeleted and
    AccessDenied.

    In a pause that runs already, a change raises AdminBusy, unless `token` names that pause, or `adopt` is given and
    the same person made it on the same machine: then it works in that pause and leaves it in place. With `take_over` it
    takes anybody's pause over and ends it; the operation that made it fails.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        coordination_topic: str,
        *,
        timeout_s: float = TIMEOUT_S,
        author: Author | None = None,
        key: SigningKey | None = None,
    ) -> None:
        """`key`: signs what you change in a group with admin keys."""
        self.name = name
        self._key = key
        self._transport, self._topic, self._timeout_s, self._author = transport, coordination_topic, timeout_s, author
        self._connections: ExitStack | None = None  # in `connected`
        self._kept: OperationRunner | None = None  # the connection of that context, once there is one

    @contextmanager
    def connected(self) -> Iterator[Group]:
        """Keeps the first call's connection for the next ones in this context, each of which folds only what is new.
        One thread at a time."""
        try:
            with ExitStack() as self._connections:
                yield self
        finally:
            self._connections, self._kept = None, None

    @contextmanager
    def runner(self, founding: bool = False) -> Iterator[OperationRunner]:
        """Opens a connection to the group's log for this context (or `connected`). Raises GroupMissing, but for
        `founding`."""
        author = (self._author or author_here())._replace(key=self._key)
        if self._kept is not None and self._kept.begin_again(author):
            yield self._checked(self._kept, founding)
            return
        opened = OperationRunner(self._transport, self._topic, self.name, self._timeout_s, author)
        if self._connections is not None:
            self._kept = self._connections.enter_context(opened)
            yield self._checked(opened, founding)
            return
        with opened as runner:
            yield self._checked(runner, founding)

    def _checked(self, runner: OperationRunner, founding: bool) -> OperationRunner:
        if runner.context.group is None and not founding:
            raise self._missing()
        return runner

    def _missing(self) -> GroupMissing:
        """Returns the error for a group that nobody ever used. Reads all logs to suggest the nearest name."""
        known = "; it begins with its first consumer"
        with suppress(MarshalError), Observer(self._transport, self._topic, self._timeout_s) as observer:
            observer.fold()
            known = suggestion(self.name, [group.name for _, group in observer.groups()])
        return GroupMissing(self.name, f"has never been used{known}")

    # --- reading

    def info(self) -> GroupInfo:
        """Returns the group's topics, members, positions, pause and settings, as they are now."""
        with self.runner() as runner:
            now_ms, pause_history = SystemClock().now().wall_ms, runner.context.pause_history
            return overview.info(_state(runner), pause_history, now_ms, runner.incarnation, runner.pinned_ms)

    def pin_info(self) -> PinInfo:
        """Returns who is pinned in a group with the policy `pinned`, the pin's id, and the standbys in their order."""
        with self.runner() as runner:
            return overview.pin_info(_state(runner), runner.incarnation, runner.pinned_ms)

    def members(self) -> tuple[MemberInfo, ...]:
        """Returns each live session, in the order in which they are candidates. One that was silent for two of its
        intervals is there until another consumer evicts it."""
        with Observer(self._transport, self._topic, self._timeout_s) as observer:
            observer.fold(self.name)
            found = {group.name: (log, group) for log, group in observer.groups()}
            if self.name not in found:
                raise self._missing()
            log, group = found[self.name]
            return overview.members(group, observer.signs_of(log, group), observer.as_of_ms)

    def advisories(self, follow: bool = False) -> Iterator[Advisory]:
        """Yields what happened to the group since its log begins; with `follow` then what happens next. Every reader
        gets the same. The connection is closed when the caller leaves the loop."""
        with closing(self._advisories(follow)) as told:
            yield from (advisory for advisory in told if advisory is not None)

    def _advisories(self, follow: bool) -> Generator[Advisory | None, None, None]:
        """Yields what `advisories` yields, and with `follow` None after each poll, so that the caller can stop."""
        with Observer(self._transport, self._topic, self._timeout_s) as observer:
            yield from observer.advisories(self.name, follow)

    def impact(self, judge: Callable[[GroupContext], Impact]) -> Impact:
        """Returns what an operation would do now; writes nothing. `judge`: calls a function of
        marshal_py.admin.plans.impact with the group's context."""
        return self._impact(lambda runner: judge(runner.context))

    def _impact(self, judge: Callable[[OperationRunner], Impact]) -> Impact:
        with self.runner(founding=True) as runner:
            try:
                return judge(runner)
            except GroupMissing:
                if runner.context.group is None:
                    raise self._missing() from None
                raise

    # --- settings

    def create(self, *, reason: str = "", watcher: Watcher | None = None, **settings: Any) -> int:
        """Creates the group before its first consumer, or revives a deleted one; returns the offset of the record.

        If the group exists with these settings already, nothing is written, and the offset of its newest settings is
        returned: -1 if it has none.

        The settings are the fields of GroupConfig, which describes them: `delivery`, `policy`, `on_topic_recreated`,
        `max_members`, `members`, `mappings`, `priority_groups`, `priority_timeout_s`, `failover_s`, `lag_weighted`,
        `admin_keys`. Raises AlreadyExists, InvalidOption, KeyNeeded.
        """
        return self._settle(_named(settings), Terms(reason), watcher, create=True)

    def set_config(
        self,
        *,
        reason: str = "",
        token: int | None = None,
        adopt: bool = False,
        take_over: bool = False,
        watcher: Watcher | None = None,
        **settings: Any,
    ) -> int:
        """Changes the settings that are not None, which mean what they mean in `create`; returns the offset of the
        record.

        "balanced", "greedy" and "own" may replace each other; any other policy, `max_members` and `priority_groups` are
        for the group's whole life. Consumers obey at once, and partitions that do not move are not touched.

        Another `delivery` pauses the group, and its consumers end with ModeMismatch: start them again with the new one.
        Positions stay. Raises SettingsChanged if somebody else changed the settings meanwhile, InvalidOption; for
        another delivery also AdminBusy, AdminFailed and AdminGaveUp.
        """
        wanted = _named(settings)
        if not wanted:
            raise InvalidOption("settings", None, "name what should change", given=False)
        return self._settle(wanted, Terms(reason, token, adopt, take_over), watcher)

    def add_members(self, *members: str, reason: str = "") -> int:
        """Adds members to the list of a partitioned group, unless they are there; returns the offset of the record.

        Start a consumer of each first: from then on its partitions belong to it alone. Raises InvalidOption,
        SettingsChanged.
        """
        return self.change_members(change.with_members(members), reason)

    def drop_members(self, *members: str, reason: str = "") -> int:
        """Drops members from the list, if they are there; returns the offset of the record.

        Their consumers hand their partitions over and stay in the group without any. Raises as `add_members`.
        """
        return self.change_members(change.without_members(members), reason)

    def set_mappings(self, mappings: Mapping[str, Iterable[int]], reason: str = "") -> int:
        """Says which member has which partitions, each below `max_members` once, instead of members or mappings that
        there are; returns the offset of the record. Raises as `add_members`."""
        return self.change_members(change.with_mappings(mappings), reason)

    def delete_mappings(self, reason: str = "") -> int:
        """Deletes the mappings: nobody consumes until there are members or mappings again. Returns the offset of the
        record."""
        return self.change_members(change.without_mappings, reason)

    def change_members(self, edit: Edit, reason: str = "", watcher: Watcher | None = None) -> int:
        """Changes settings by a function of admin/plans/change.py; returns the offset of the record, or of the last
        one if nothing changes. `watcher` is told "changed"."""
        return self._settle(edit, Terms(reason), watcher)

    def _settle(self, wanted: Wanted | Edit, terms: Terms, watcher: Watcher | None, *, create: bool = False) -> int:
        with self.runner(founding=create) as runner:
            plan = ConfigPlan(runner.context, wanted, terms, create=create)
            if create:
                runner.begin()
            runner.run(plan, watcher)
            return plan.changed_at

    def shrink(
        self,
        topic: str,
        partitions: int,
        *,
        reason: str = "",
        token: int | None = None,
        adopt: bool = False,
        take_over: bool = False,
        watcher: Watcher | None = None,
    ) -> int:
        """Makes a topic smaller after Kafka's topic was created again with fewer `partitions`; the group forgets the
        positions of the others. Returns the offset of the record.

        For clusters without topic ids: with ids `shrink` raises PartitionParked, and `set_position` accepts the new
        topic. The group is paused during the change. Raises InvalidOption while Kafka's topic has more partitions,
        SettingsChanged, AdminBusy, AdminFailed, AdminGaveUp.
        """
        with self.runner() as runner:
            plan = ShrinkPlan(runner.context, topic, partitions, Terms(reason, token, adopt, take_over))
            check_smaller(_state(runner), topic, runner.admin.describe_topic(topic), partitions)
            runner.run(plan, watcher)
            return plan.changed_at

    def impact_of_shrink(
        self, topic: str, partitions: int, *, token: int | None = None, adopt: bool = False, take_over: bool = False
    ) -> Impact:
        """Returns what `shrink` would do now and, if Kafka's topic does not allow it, why not. Writes nothing. `token`,
        `adopt`, `take_over`: as `shrink` has them. Raises InvalidOption, AdminBusy."""
        terms = Terms("", token, adopt, take_over)

        def judge(runner: OperationRunner) -> Impact:
            found = of_shrink(runner.context, topic, partitions, SystemClock().now(), terms)
            try:
                check_smaller(_state(runner), topic, runner.admin.describe_topic(topic), partitions)
            except (InvalidOption, PartitionParked) as error:
                return found._replace(does=[*found.does, f"As things are it would be refused: {error}"])
            return found

        return self._impact(judge)

    # --- pausing

    def pause(
        self,
        duration_s: float | None = None,
        reason: str = "",
        *,
        token: int | None = None,
        adopt: bool = False,
        take_over: bool = False,
        keep: bool = False,
        watcher: Watcher | None = None,
    ) -> Paused:
        """Pauses the group and waits until every partition is free. Its consumers continue by themselves afterwards.

        Handlers have one heartbeat interval of their consumer, whatever its `hand_over_timeout_s`; what is not acked
        then is delivered again after the pause.

        If nobody calls `resume`, the members end the pause after `duration_s` (default: 60 s plus twice the longest
        heartbeat interval). With `keep` the call renews it until Ctrl-C, which ends it. A running pause that the call
        may use is replaced by this one. Raises AdminBusy, AdminGaveUp, InvalidOption; AdminFailed at the end if a kept
        pause was over for a while.
        """
        with self.runner() as runner:
            duration_ms = None if duration_s is None else round(_duration_s(duration_s) * 1000)
            plan = PausePlan(runner.context, Terms(reason, token, adopt, take_over, duration_ms), keep=keep)
            try:
                runner.run(plan, watcher)
            except AdminGaveUp as error:
                if not keep or not plan.drained or error.waited_s:
                    raise
                # Ctrl-C is how a kept pause ends, so this is no failure.
            if keep and plan.pause_lock.over_at:
                raise AdminFailed(self.name, AdminFailed.PAUSE_BROKEN, ", ".join(plan.pause_lock.over_at))
            return Paused(plan.token, plan.pause_lock.duration_ms / 1000, plan.drain.released, plan.drain.evicted)

    def resume(self, *, token: int | None = None, take_over: bool = False, reason: str = "") -> bool:
        """Ends the running pause; returns False if there was none. By the same person on the same machine, or with
        `token` or `take_over`. Raises AdminBusy."""
        with self.runner() as runner:
            plan = ResumePlan(runner.context, Terms(reason, token, take_over=take_over))
            runner.run(plan)
            return plan.was_paused

    # --- positions

    def set_position(
        self,
        topics: str | Sequence[str | TopicPartition] = (),
        to: str | int | Target | None = None,
        *,
        shift_by: int | None = None,
        stay_paused: bool = False,
        dry_run: bool = False,
        reason: str = "",
        token: int | None = None,
        adopt: bool = False,
        take_over: bool = False,
        watcher: Watcher | None = None,
    ) -> Moved:
        """Moves positions while the group's consumers stay up: either all that are named, or none.

        `topics`: "orders" (every partition), "orders:3", or TopicPartitions. `to`: a place as for the option `start`,
        such as "earliest", "1200", "2h ago" or "positions.csv". A topic that was deleted and created again is accepted
        in the same pause, before the move; then the positions of all its partitions are forgotten, also those that are
        not named.

        Raises PositionOutOfRange before anything is paused, AdminBusy, AdminFailed (its `outcome`: nothing moved and
        nothing will, or it may still move).
        """
        target, terms = target_of(to, shift_by, self.name), Terms(reason, token, adopt, take_over)
        with self.runner() as runner:
            resolver = PositionResolver(runner, topics, target)
            check_size(runner.context, resolver.tps)
            recreated = list(resolver.recreated.values())
            if dry_run:
                rows = preview(runner.context, resolver.positions(), resolver.firsts, resolver.recreated)
                return Moved(rows, recreated=recreated, refused=_refused(runner.context, terms))
            resolver.check()
            group = _state(runner)
            owners, parked = owners_of(group), parked_of(group)
            plan = PositionPlan(
                runner.context, resolver.tps, terms, stay_paused=stay_paused, recreated=resolver.recreated
            )
            runner.run(plan, watcher, resolver.positions)
            assert plan.moved is not None  # the runner raises an error if it was not moved
            after = {TopicPartition(move.topic, move.partition): move.position for move in plan.moved.moves}
            rows = rows_of(owners, plan.before, after, resolver.firsts, parked, plan.finished)
            return Moved(rows, plan.moved_at, plan.token, recreated)

    def positions(self) -> dict[TopicPartition, int]:
        """Returns every position that the group has."""
        with self.runner() as runner:
            return overview.positions(_state(runner))

    # --- sessions

    def step_down(self, session: int | str, reason: str = "") -> int:
        """Makes a session the last candidate for every partition; it stays. Returns the offset of the record.

        `session`: its number, its client id, or the member for which it works. Raises GroupMissing unless exactly one
        fits.
        """
        with self.runner() as runner:
            plan = StepDownPlan(runner.context, session, Terms(reason))
            runner.run(plan)
            return plan.mark

    def unpin(self, reason: str = "") -> int:
        """Ends the pin: another consumer is pinned once the handlers of this one are done. Returns its session.

        It stays in the group, the last in line until the settings change; if it is alone, it gets a new pin. `reason`:
        the text of the advisory `stepped_down`. Raises GroupMissing if nobody is pinned.
        """
        with self.runner() as runner:
            plan = StepDownPlan(runner.context, overview.pinned_session(_state(runner)), Terms(reason))
            runner.run(plan)
            return plan.session

    def evict(self, session: int | str, *, reason: str = "", watcher: Watcher | None = None) -> str:
        """Ends a session (as in `step_down`) that gives no sign of life for twice its heartbeat interval, from now on.

        Returns who evicted it, or "left" or "ended". Raises MembersAlive for a sign of life: a live session cannot be
        ended from outside.
        """
        with self.runner() as runner:
            number = find_session(runner.context, session)
            plan = EvictPlan(runner.context, {number}, Terms(reason))
            runner.run(plan, watcher)
            return plan.ended_by.get(number, "")

    def delete(self, *, force: bool = False, reason: str = "", watcher: Watcher | None = None) -> bool:
        """Deletes the group and its positions. Returns False if it was deleted already. Raises MembersAlive.

        `force` pauses it and deletes it with its live consumers, which end with GroupDeleted when they have released
        what they own. A group with admin keys is paused in any case. If a pause fails, AdminBusy or AdminGaveUp is
        raised, and nothing is deleted.
        """
        with self.runner() as runner:
            if not force:
                plan = RemovePlan(runner.context, Terms(reason))
                runner.run(plan, watcher)
                if not _state(runner).keys:
                    return plan.deleted_at != NONE
            paused = DeletionPlan(runner.context, Terms(reason), force)
            runner.run(paused, watcher)
            return paused.changed_at != NONE


def _state(runner: OperationRunner) -> GroupState:
    state = runner.context.group
    assert state is not None  # Group.runner checked it
    return state


def _refused(context: GroupContext, terms: Terms) -> str:
    try:
        check_pause(context, SystemClock().now(), terms)
    except AdminBusy as error:
        return str(error)
    return ""


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are not None, by name."""
    return {name: value for name, value in settings.items() if value is not None}


def group_names(observer: Observer, topic: str = "") -> tuple[str, ...]:
    """Returns the sorted names of the groups that are not deleted: all, or those that have consumed `topic`."""
    observer.fold()
    return tuple(found.name for _, found in observer.groups() if not found.deleted and topic in {"", *found.topics})
