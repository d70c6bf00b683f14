"""Contains the plans that pause a group until all partitions are free, or end a pause (PROTOCOL.md M1-M4, M9, M10)."""

from __future__ import annotations

from marshal_py.admin.plans.operation import (
    GRACE_INTERVALS,
    INTERVAL_MS,
    USUAL,
    GroupContext,
    Operation,
    Step,
    Terms,
    holders,
)
from marshal_py.admin.plans.pause_lock import PauseLock, busy, end_of, is_named
from marshal_py.errors import AdminGaveUp, MarshalError
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import Evict, ReleaseGroup


class Drain:
    """Waits until partitions are free in a pause. Meanwhile it reports each release, and evicts silent owners."""

    def __init__(self, operation: Operation, tps: set[TopicPartition] | None = None) -> None:
        """Prepares to wait for `tps`, the partitions that must become free; None means every partition of the group."""
        self.operation = operation
        self.tps = tps
        self.owners: dict[TopicPartition, int] = {}
        self.released: list[TopicPartition] = []
        self.evicted: list[int] = []
        self._begun = False

    def _begin(self, group: Group) -> None:
        """Notes the owners when the pause begins, because some release their partitions before the next tick."""
        if not self._begun:
            self._begun = True
            self.owners = holders(group, self.tps)
            for tp, session in sorted(self.owners.items()):
                self.operation.report("draining", name_of(group, session), tp, session)

    def empty(self, group: Group, now: Instant) -> bool:
        """Returns whether nobody owns any of the partitions, and evicts owners that are silent. Only in a pause, so
        that nobody can claim (F4.1)."""
        self._begin(group)
        owners = holders(group, self.tps)
        for tp, session in sorted(self.owners.items()):
            if tp not in owners:
                self.released.append(tp)
                self.operation.report("released", name_of(group, session), tp, session)
        self.owners = owners
        self.operation.evict_silent(group, set(owners.values()), now)
        return not owners

    def read(self, verdict: Verdict) -> None:
        group, record = self.operation.context.group, verdict.record
        if group is None or not verdict.accepted:
            return
        if isinstance(record, ReleaseGroup) and record.duration_ms and self.operation.context.author.wrote(record.by):
            self._begin(group)
        elif isinstance(record, Evict) and record.session in self.owners.values():
            self.evicted.append(record.session)
            self.operation.report("evicted", record.by, session=record.session)

    def names(self, group: Group | None) -> tuple[str, ...]:
        if group is None:
            return ()
        return tuple(sorted({name_of(group, session) for session in holders(group, self.tps).values()}))


def name_of(group: Group, session: int) -> str:
    """Returns a session's client id, if it is live, and its number, for people."""
    known = group.sessions.get(session)
    return f"{known.join.client_id} (session {session})" if known is not None else f"session {session}"


class PausePlan(Operation):
    """Pauses a group until every partition is free; with `keep` it renews the pause until the caller stops it."""

    began: Instant | None

    def __init__(self, context: GroupContext, terms: Terms = USUAL, *, keep: bool = False) -> None:
        super().__init__(context, terms)
        self.pause_lock: PauseLock = PauseLock(self, self.reason, renews=True)
        self.drain: Drain = Drain(self)
        self.keep = keep
        self.drained: bool = False
        self.token: int = NONE  # of the pause, once every partition is free

    def tick(self, now: Instant) -> Step:
        if self.keep and self.drained:
            self.began = now  # patience limits the draining, not a pause that is kept
        return super().tick(now)

    def read(self, verdict: Verdict, now: Instant) -> None:
        self.drain.read(verdict)

    def waits(self) -> bool:
        """False once every partition is free: nobody needs to be evicted, so a long pause writes no probes."""
        return not self.drained

    def act(self, group: Group, now: Instant) -> None:
        if not self.pause_lock.acquire(group, now):
            self.drained = False  # the pause may be over, and consumers own partitions again
            return
        if not self.drain.empty(group, now):
            return
        if not self.drained:
            self.drained = True
            self.report("drained", offset=group.pause_change)
        self.token = group.pause_change
        if not self.keep and self.pause_lock.settled(group):
            self.end()

    def timeout_error(self) -> MarshalError:
        holders = self.drain.names(self.context.group)
        return AdminGaveUp(self.context.name, "the pause", self.patience_ms / 1000, held_by=holders)

    def close(self, group: Group, now: Instant) -> bool:
        return self.pause_lock.release(group, now)

    def close_error(self, error: MarshalError) -> MarshalError:
        return AdminGaveUp(self.context.name, "the end of the own pause", GRACE_INTERVALS * INTERVAL_MS / 1000)


class ResumePlan(Operation):
    """Ends the running pause that its terms' token names, or that the same person made on the same machine; with
    `take_over` anybody's."""

    def __init__(self, context: GroupContext, terms: Terms = USUAL) -> None:
        super().__init__(context, terms._replace(adopt=True))
        self.was_paused: bool = False

    def read(self, verdict: Verdict, now: Instant) -> None:
        record = verdict.record
        if isinstance(record, ReleaseGroup) and verdict.accepted and not record.duration_ms:
            self.was_paused = self.was_paused or self.context.author.wrote(record.by)

    def act(self, group: Group, now: Instant) -> None:
        if not group.paused:
            self.report("resumed" if self.was_paused else "running", offset=group.pause_change)
            self.end()
        elif self.terms.take_over or is_named(self.context, group, self.terms):
            self.send(end_of(group, group.pause_change, self.context.author.by, self.reason), now)
        else:
            self.give_up(busy(self.context, group, now))

    def may_land(self, group: Group) -> bool:
        return any(record.observed == group.pause_change for record in self.sent(ReleaseGroup))

    def timeout_error(self) -> MarshalError:
        return AdminGaveUp(self.context.name, "the end of the pause", self.patience_ms / 1000)
