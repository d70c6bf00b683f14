"""The API for programs: one live group, and the operations on it.

    with marshal_py.connect("localhost:9092") as marshal:
        token = marshal_py.group(marshal, "billing").pause(60, "deploy")

Each call opens a connection of its own and reads the group's log to its end; none needs a consumer in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from marshal_py.admin import overview
from marshal_py.admin.author import Author
from marshal_py.admin.change import ConfigPlan, ShrinkPlan, origin_of, others_mode
from marshal_py.admin.impact import Impact, check_pause, of_shrink
from marshal_py.admin.operation import GroupContext
from marshal_py.admin.pause import PausePlan, ResumePlan
from marshal_py.admin.position import PositionPlan, check_size
from marshal_py.admin.position_preview import Row, owners_of, parked_of, preview, rows_of
from marshal_py.admin.position_resolver import PositionResolver
from marshal_py.admin.recreated_topics import RecreatedTopic, find_recreated
from marshal_py.admin.runner import OperationRunner, Watcher
from marshal_py.admin.sessions import EvictPlan, RemovePlan, StepDownPlan
from marshal_py.admin.suggestions import suggestion
from marshal_py.admin.targets import Target, parse, shift
from marshal_py.client.marshal import CONNECT_TIMEOUT_S, Marshal
from marshal_py.client.observer import Observer
from marshal_py.errors import AdminBusy, AdminGaveUp, DataTopicRecreated, GroupMissing, InvalidOption, MarshalError
from marshal_py.protocol.advisory import Advisory
from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.world import Group as GroupState
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.ports import Transport

TIMEOUT_S: Final = CONNECT_TIMEOUT_S


class Moved(NamedTuple):
    """What a move did, or with `dry_run` would do. `token`: of a pause that stays. `offset`: of the record. -1: none.

    `recreated`: topics that had been created again and were accepted as they are now. `refused`: in a dry run, why the
    move would be refused now; "" if it would not.
    """

    rows: list[Row]
    offset: int = NONE
    token: int = NONE
    recreated: Sequence[RecreatedTopic] = ()
    refused: str = ""


class Paused(NamedTuple):
    """A pause in which every partition is free. `evicted`: sessions that were silent for twice their interval."""

    token: int
    duration_s: float
    released: list[TopicPartition]
    evicted: list[int]


class Group:
    """One group. Every method may be called from any thread and returns when the operation is complete.

    Ctrl-C while a method waits makes it undo what it began; a second one stops without undoing.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        coordination_topic: str,
        *,
        timeout_s: float = TIMEOUT_S,
        author: Author | None = None,
    ) -> None:
        self.name = name
        self._transport, self._topic, self._timeout_s, self._author = transport, coordination_topic, timeout_s, author

    @contextmanager
    def runner(self, founding: bool = False) -> Iterator[OperationRunner]:
        """A connection to the group's log; unless `founding`, raises GroupMissing if nobody ever used the group."""
        with OperationRunner(self._transport, self._topic, self.name, self._timeout_s, self._author) as runner:
            if runner.context.group is None and not founding:
                raise self._missing()
            yield runner

    def _missing(self) -> GroupMissing:
        """The error for a group that nobody ever used. Reads all logs to suggest the nearest name."""
        known = "; it begins with its first consumer"
        with suppress(MarshalError), Observer(self._transport, self._topic, self._timeout_s) as observer:
            observer.fold()
            known = suggestion(self.name, [group.name for _, group in observer.groups()])
        return GroupMissing(self.name, f"has never been used{known}")

    # --- looking

    def info(self) -> dict[str, Any]:
        """Topics, members, positions, pause, settings, as of now."""
        with self.runner() as runner:
            state, now_ms = _state(runner), SystemClock().now().wall_ms
            return {**overview.info(state, runner.context.pause_history, now_ms), "settings_from": origin_of(state)}

    def members(self) -> list[dict[str, Any]]:
        """Live sessions."""
        with self.runner() as runner:
            return overview.members(_state(runner))

    def advisories(self, follow: bool = False) -> Iterator[Advisory]:
        """What happened to the group since its log begins; with `follow` the iterator waits for more.

        Every reader gets the same advisories. Leaving the iteration ends it. Raises CoordinationError and
        ClusterUnreachable.
        """
        with Observer(self._transport, self._topic, self._timeout_s) as observer:
            for advisory in observer.advisories(self.name, follow):
                if advisory is not None:
                    yield advisory

    def impact(self, judge: Callable[[GroupContext], Impact]) -> Impact:
        """What an operation would do now: one of the functions of marshal_py.admin.impact. Writes nothing."""
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

    def create(
        self,
        *,
        delivery: str | None = None,
        policy: str | None = None,
        on_topic_recreated: str | None = None,
        reason: str = "",
        watcher: Watcher | None = None,
    ) -> int:
        """Creates the group before its first consumer, or revives a deleted one; returns the offset of the record.

        `delivery`: "at_least_once" or "at_most_once"; without it the first consumer decides. `policy`: "balanced",
        "greedy", or "own", so that each consumer follows its own. `on_topic_recreated` says what happens to the
        partitions of a topic that was deleted and created again: with "fail" they are parked until somebody moves them,
        with "earliest" they are consumed from their beginnings; without it each consumer's option counts. Raises
        GroupExists, InvalidOption.
        """
        return self._settle(_named(delivery, policy, on_topic_recreated), True, reason, watcher=watcher)

    def set_config(
        self,
        *,
        delivery: str | None = None,
        policy: str | None = None,
        on_topic_recreated: str | None = None,
        reason: str = "",
        token: int | None = None,
        adopt: bool = False,
        take_over: bool = False,
        watcher: Watcher | None = None,
    ) -> int:
        """Changes settings, those of `create`; what is not named stays. Returns the offset of the record.

        Another `delivery` pauses the group during the change, and its consumers end with ModeMismatch: start them again
        with the new one. Positions stay. `token`, `adopt` and `take_over` as in `set_position`. Raises SettingsChanged
        if somebody else changed them meanwhile, InvalidOption, GroupMissing, GroupDeleted; for a change of the delivery
        also AdminBusy, PauseOver and PauseNotDrained.
        """
        wanted = _named(delivery, policy, on_topic_recreated)
        if not wanted:
            raise InvalidOption("delivery, policy, on_topic_recreated", None, "name what should change")
        return self._settle(wanted, False, reason, token, adopt, take_over, watcher)

    def _settle(
        self,
        wanted: dict[str, str],
        create: bool,
        reason: str,
        token: int | None = None,
        adopt: bool = False,
        take_over: bool = False,
        watcher: Watcher | None = None,
    ) -> int:
        with self.runner(founding=create) as runner:
            plan = ConfigPlan(
                runner.context, wanted, create=create, reason=reason, token=token, adopt=adopt, take_over=take_over
            )
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
        """Makes a topic smaller for the group, after it was created again with fewer partitions; returns the offset.

        The positions of the partitions beyond are forgotten. Pauses the group during the change; `token`, `adopt` and
        `take_over` as in `set_position`. Raises InvalidOption while Kafka's topic is larger, GroupMissing,
        SettingsChanged, AdminBusy, PauseOver, PauseNotDrained; DataTopicRecreated where the topic id shows that it is
        another topic: `set_position` accepts that one.
        """
        with self.runner() as runner:
            plan = ShrinkPlan(
                runner.context, topic, partitions, reason=reason, token=token, adopt=adopt, take_over=take_over
            )
            _check_smaller(runner, topic, partitions)
            runner.run(plan, watcher)
            return plan.changed_at

    def impact_of_shrink(self, topic: str, partitions: int) -> Impact:
        """What `shrink` would do now, and why Kafka's topic forbids it, if it does. Writes nothing.

        Raises GroupMissing, InvalidOption.
        """

        def judge(runner: OperationRunner) -> Impact:
            found = of_shrink(runner.context, topic, partitions)
            try:
                _check_smaller(runner, topic, partitions)
            except (InvalidOption, DataTopicRecreated) as error:
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

        Without `resume` members end the pause when they have waited `duration_s` (default: 60 s and twice the longest
        interval). `keep`: stays and renews until ctrl-C. A group that is paused already raises AdminBusy, unless the
        pause is replaced by this one: that of `token`, with `adopt` one of the same person on the same machine, with
        `take_over` anybody's. Raises PauseNotDrained, GroupMissing, InvalidOption, CoordinationError,
        ClusterUnreachable.
        """
        with self.runner() as runner:
            duration_ms = None if duration_s is None else round(duration_s * 1000)
            plan = PausePlan(
                runner.context,
                reason=reason,
                duration_ms=duration_ms,
                token=token,
                adopt=adopt,
                take_over=take_over,
                keep=keep,
            )
            try:
                runner.run(plan, watcher)
            except AdminGaveUp as error:
                if not keep or not plan.drained or error.waited_s:
                    raise
                # Ctrl-C is how a kept pause ends, so this is no failure.
            return Paused(plan.token, plan.pause_lock.duration_ms / 1000, plan.drain.released, plan.drain.evicted)

    def resume(self, *, token: int | None = None, take_over: bool = False, reason: str = "") -> bool:
        """Ends a pause of the same person on the same machine, that of `token`, or with `take_over` anybody's.

        False if there was none. Raises AdminBusy if it is another's.
        """
        with self.runner() as runner:
            plan = ResumePlan(runner.context, token=token, take_over=take_over, reason=reason)
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
        """Moves positions while the group's consumers stay up: all that are named, or none of them.

        `topics`: "orders" (every partition), "orders:3", or TopicPartitions. `to`: earliest, latest, latest-N, an
        offset, an ISO-8601 time, committed, or a table (targets.parse_table). Raises PositionOutOfRange before anything
        is paused, AdminBusy, PositionNotMoved (nothing moved, and nothing will), PositionUnknown.

        A group that is paused already raises AdminBusy. With `token`, or with `adopt` for a pause of the same person on
        the same machine, the move works in that pause and leaves it in place. `take_over` takes anybody's pause, whose
        operation fails then, and ends it with the move.

        A topic that was deleted and created again is accepted in the same pause, before the move. Then the positions of
        all its partitions are forgotten, also those that are not named.
        """
        target = _target(to, shift_by)
        with self.runner() as runner:
            resolver = PositionResolver(runner, topics, target)
            check_size(runner.context, resolver.tps)
            recreated = list(resolver.recreated.values())
            if dry_run:
                rows = preview(runner.context, resolver.positions(), resolver.recreated)
                return Moved(rows, recreated=recreated, refused=_refused(runner.context, token, adopt, take_over))
            resolver.check()
            owners, parked = owners_of(_state(runner)), parked_of(_state(runner))
            plan = PositionPlan(
                runner.context,
                resolver.tps,
                stay_paused=stay_paused,
                reason=reason,
                token=token,
                adopt=adopt,
                take_over=take_over,
                recreated=resolver.recreated,
            )
            runner.run(plan, watcher, resolver.positions)
            assert plan.moved is not None  # the runner raises an error if it was not moved
            after = {TopicPartition(move.topic, move.partition): move.position for move in plan.moved.moves}
            return Moved(rows_of(owners, plan.before, after, parked), plan.moved_at, plan.token, recreated)

    def positions(self) -> dict[TopicPartition, int]:
        """Every position that the group has: what `targets.print_table` writes down."""
        with self.runner() as runner:
            return overview.positions(_state(runner))

    # --- sessions

    def step_down(self, session: int, reason: str = "") -> int:
        """Makes a session the last candidate for every partition. It stays in the group. Returns the mark."""
        with self.runner() as runner:
            plan = StepDownPlan(runner.context, session, reason)
            runner.run(plan)
            return plan.mark

    def evict(self, session: int, *, reason: str = "", watcher: Watcher | None = None) -> str:
        """Ends a session that is silent for twice its interval, counted from now. Returns who ended it.

        Raises MembersAlive if it gives a sign of life: a live session cannot be ended from outside.
        """
        with self.runner() as runner:
            plan = EvictPlan(runner.context, {session}, reason)
            runner.run(plan, watcher)
            return plan.ended_by.get(session, "")

    def delete(self, *, force: bool = False, reason: str = "", watcher: Watcher | None = None) -> bool:
        """Deletes the group and its positions; False if it was deleted already. Raises MembersAlive.

        `force` first ends live consumers by a change of the group's delivery (M15); they end with ModeMismatch or
        GroupDeleted. Then AdminBusy, PauseNotDrained and SettingsChanged are raised too; the positions are kept.
        """
        with self.runner() as runner:
            others = None if not force else others_mode(runner.context.group)
        if others is not None:
            self._settle({"delivery": others}, False, reason, watcher=watcher)
        with self.runner() as runner:
            plan = RemovePlan(runner.context, reason)
            runner.run(plan, watcher)
            return plan.deleted_at != NONE


def group(marshal: Marshal, name: str) -> Group:
    """The operations on a group, over an existing connection.

    This is not a method of Marshal because the package `client` must not import `admin` (CONTRIBUTING.md).
    """
    return Group(marshal.transport, name, marshal.coordination_topic)


def _state(runner: OperationRunner) -> GroupState:
    state = runner.context.group
    assert state is not None  # Group.runner checked it
    return state


def _check_smaller(runner: OperationRunner, topic: str, partitions: int) -> None:
    there = runner.admin.describe_topic(topic)
    for one in find_recreated(_state(runner), {} if there is None else {topic: there}).values():
        raise DataTopicRecreated(runner.context.name, topic, 0, one.known, one.found)
    if there is not None and there.partitions > partitions:
        raise InvalidOption(
            "partitions",
            partitions,
            f"{topic!r} has {there.partitions} in Kafka, so the next "
            "consumer would make it grow again: recreate the topic first",
        )


def _refused(context: GroupContext, token: int | None, adopt: bool, take_over: bool) -> str:
    try:
        check_pause(context, SystemClock().now(), token, adopt, take_over)
    except AdminBusy as error:
        return str(error)
    return ""


def _named(delivery: str | None, policy: str | None, on_topic_recreated: str | None) -> dict[str, str]:
    """The settings that are named."""
    given = {"delivery": delivery, "policy": policy, "on_topic_recreated": on_topic_recreated}
    return {name: value for name, value in given.items() if value is not None}


def _target(to: str | int | Target | None, shift_by: int | None) -> Target:
    if (to is None) == (shift_by is None):
        raise InvalidOption("to", to, "give either `to` or `shift_by`")
    if shift_by is not None:
        return shift(shift_by)
    if isinstance(to, Target):
        return to
    return parse(str(to))
