"""Pausing a group until everybody has let go, and ending a pause (PROTOCOL.md M1-M4, M9, M10)."""

from __future__ import annotations

from marshal_py.admin.operation import GRACE_INTERVALS, INTERVAL_MS, GroupContext, Operation, holders
from marshal_py.admin.pause_lock import PauseLock, busy, end_of, is_named
from marshal_py.errors import AdminGaveUp, MarshalError, PauseNotDrained
from marshal_py.protocol.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.records import Evict, ReleaseGroup
from marshal_py.protocol.verdict import Verdict
from marshal_py.protocol.world import Group


class Drain:
    """Who still holds what in our pause: tells of every partition that is let go, and waits the silent owners out."""

    def __init__(self, operation: Operation, tps: set[TopicPartition] | None = None) -> None:
        """`tps`: None means every partition of the group."""
        self.operation = operation
        self.tps = tps
        self.held: dict[TopicPartition, int] = {}
        self.released: list[TopicPartition] = []
        self.evicted: list[int] = []
        self._begun = False

    def _begin(self, group: Group) -> None:
        """Who held what when the pause began; some are quick enough to have let go before the next tick."""
        if not self._begun:
            self._begun = True
            self.held = holders(group, self.tps)
            for tp, session in sorted(self.held.items()):
                self.operation.tell("draining", name_of(group, session), tp, session)

    def empty(self, group: Group, now: Instant) -> bool:
        """Whether nobody holds any of it. Call only in the own pause: nobody can claim there (F4.1)."""
        self._begin(group)
        held = holders(group, self.tps)
        for tp, session in sorted(self.held.items()):
            if tp not in held:
                self.released.append(tp)
                self.operation.tell("released", name_of(group, session), tp, session)
        self.held = held
        self.operation.wait_out(group, set(held.values()), now)
        return not held

    def read(self, verdict: Verdict) -> None:
        group, record = self.operation.context.group, verdict.record
        if group is None or not verdict.accepted:
            return
        if isinstance(record, ReleaseGroup) and record.duration_ms and self.operation.context.author.wrote(record.by):
            self._begin(group)
        elif isinstance(record, Evict) and record.session in self.held.values():
            self.evicted.append(record.session)
            self.operation.tell("evicted", record.by, session=record.session)

    def names(self, group: Group | None) -> tuple[str, ...]:
        if group is None:
            return ()
        return tuple(sorted({name_of(group, session) for session in holders(group, self.tps).values()}))


def name_of(group: Group, session: int) -> str:
    """A session in words."""
    known = group.sessions.get(session)
    return f"{known.join.client_id} (session {session})" if known is not None else f"session {session}"


class PausePlan(Operation):
    """Pauses a group. Ends once every partition is let go; one that keeps it stays and renews until it is stopped."""

    def __init__(
        self,
        context: GroupContext,
        *,
        reason: str = "",
        duration_ms: int | None = None,
        token: int | None = None,
        adopt: bool = False,
        take_over: bool = False,
        keep: bool = False,
        patience_ms: int | None = None,
    ) -> None:
        super().__init__(context, patience_ms, reason)
        self.hold = PauseLock(self, reason, duration_ms, token, adopt, take_over, renews=True)
        self.drain = Drain(self)
        self.keep = keep
        self.drained = False
        self.token = NONE  # of the pause, once everybody has let go

    def read(self, verdict: Verdict, now: Instant) -> None:
        self.drain.read(verdict)

    def waits(self) -> bool:
        """A pause that is kept for hours leaves renewals in the log, no probes."""
        return not self.drained

    def act(self, group: Group, now: Instant) -> None:
        if not self.hold.seize(group, now) or not self.drain.empty(group, now):
            return
        if not self.drained:
            self.drained = True
            self.tell("drained", offset=group.pause_change)
        self.token = group.pause_change
        if self.keep:
            self.began = now  # patience is for waiting; this one stays because it was asked to
        elif self.hold.settled(group):
            self.end()

    def late(self) -> MarshalError:
        return PauseNotDrained(self.context.name, self.drain.names(self.context.group), self.patience_ms / 1000)

    def close(self, group: Group, now: Instant) -> bool:
        return self.hold.finish(group, now)

    def unclosed(self, error: MarshalError) -> MarshalError:
        return AdminGaveUp(self.context.name, "the end of the own pause", GRACE_INTERVALS * INTERVAL_MS / 1000)


class ResumePlan(Operation):
    """Ends a pause: the own one, that of a token, or on demand anybody's."""

    def __init__(
        self,
        context: GroupContext,
        *,
        token: int | None = None,
        take_over: bool = False,
        reason: str = "",
        patience_ms: int | None = None,
    ) -> None:
        super().__init__(context, patience_ms, reason)
        self.token, self.take_over = token, take_over
        self.was_paused = False

    def read(self, verdict: Verdict, now: Instant) -> None:
        record = verdict.record
        if isinstance(record, ReleaseGroup) and verdict.accepted and not record.duration_ms:
            self.was_paused = self.was_paused or self.context.author.wrote(record.by)

    def act(self, group: Group, now: Instant) -> None:
        if not group.paused:
            self.tell("resumed" if self.was_paused else "running", offset=group.pause_change)
            self.end()
        elif self.take_over or is_named(self.context, group, self.token, True):
            self.send(end_of(group, group.pause_change, self.context.author.by, self.reason), now)
        else:
            self.give_up(busy(self.context, group, now))

    def may_land(self, group: Group) -> bool:
        return any(record.observed == group.pause_change for record in self.sent(ReleaseGroup))

    def late(self) -> MarshalError:
        return AdminGaveUp(self.context.name, "the end of the pause", self.patience_ms / 1000)
