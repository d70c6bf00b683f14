"""Contains the plans that pause a group until all partitions are free, or end a pause (PROTOCOL.md M1-M4, M9, M10)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

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
from marshal_py.errors import AdminBusy, AdminFailed, AdminGaveUp, InvalidOption, MarshalError
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import EVICT_INTERVALS, PAUSE_MS_MAX, Evict, ReleaseGroup

# --- Acquires, renews and releases the pause in which an operation works (PROTOCOL.md M1-M3, M9, M10)
#
# The log says whose pause it is (`by` of the accepted ReleaseGroup). So a late copy, a lost answer and a second run of
# the same person are no special cases. "Ours" is what this run wrote. An adopted pause stays its author's: this run
# writes nothing for it, and its author renews and ends it.


DEFAULT_MS: Final = 60_000  # plus twice the longest interval: enough to evict a dead owner
RENEWALS_PER_DURATION: Final = 3  # two may be lost before members end the pause


class PauseLock:
    """Makes the pause in which one operation works, or adopts a pause that is running."""

    def __init__(self, operation: Operation, reason: str, *, renews: bool = False) -> None:
        """`reason`: of the pause. `renews`: a running pause that the operation's terms name is replaced by this run's
        own. Nothing is sent before `acquire`."""
        duration_ms = operation.terms.duration_ms
        if duration_ms is not None and not 0 < duration_ms <= PAUSE_MS_MAX:
            raise InvalidOption("duration", f"{duration_ms / 1000:g} s", "more than 0, at most 24 h")
        self.operation = operation
        self.reason: str = reason
        self.renews: bool = renews
        self.duration_ms: int = duration_ms if duration_ms is not None else default_ms(operation.context.group)
        self.adopted: str | None = None  # `by` of the pause that it works in, if that is not its own
        # What our ReleaseGroups observed: a late copy may pause a group whose pause_change is still that.
        self.asked: set[int] = set()
        self.token: int = NONE  # of the pause that it works in, as last read
        self.over_at: list[str] = []  # when our own pause was over, each time that members ended it
        self._was_over = False  # and no new one of ours was read yet
        self._read_ms = 0

    def acquire(self, group: Group, now: Instant) -> bool:
        """At each tick: returns whether the group is in an adopted pause or our own, which it renews. Otherwise asks
        for one, or gives up."""
        if self.operation.context.own_pause is not None:
            if self.token != group.pause_change:
                if self._was_over:
                    self.operation.report("paused_again", self.over_at[-1], offset=group.pause_change)
                else:
                    self.operation.report("paused" if self.token == NONE else "renewed", offset=group.pause_change)
                self._was_over = False
                self.token, self._read_ms = group.pause_change, now.mono_ms
            self._renew(group, now)
            return True
        if self._adopts(group):
            return True
        self._note_end(group)
        refused = self._refusal(group, now)
        if refused is not None:
            self.operation.give_up(refused)
        else:
            self._send(group, group.pause_change if group.paused else NONE, now)
        return False

    def _adopts(self, group: Group) -> bool:
        """Adopts the running pause if the caller named it (M2). It stays adopted when its author renews it, with
        another token."""
        context = self.operation.context
        if not group.paused or self.renews:
            return False
        pause = context.pause_history.running(group)
        by = pause.by if pause is not None else ""
        if self.adopted is None:
            if self.token != NONE or not is_named(context, group, self.operation.terms):
                return False
            self.operation.report("adopted", by, offset=group.pause_change)
        elif by != self.adopted or (not by and self.token != group.pause_change):
            return False
        self.adopted, self.token = by, group.pause_change
        return True

    def _note_end(self, group: Group) -> None:
        """Notes that members have ended our own pause, because its time was over before a renewal reached them."""
        history = self.operation.context.pause_history
        own = self.token != NONE and self.adopted is None and not self._was_over
        if own and not group.paused and history.waited_out and history.pause is not None:
            self._was_over = True
            over = datetime.fromtimestamp(history.pause.expires_ms / 1000, UTC)
            self.over_at.append(over.isoformat(timespec="seconds"))

    def _refusal(self, group: Group, now: Instant) -> MarshalError | None:
        held_before = self.token != NONE
        pause_history = self.operation.context.pause_history
        named = self.operation.terms.adopt or self.operation.terms.token is not None
        if not group.paused and not self.renews and (self.adopted is not None or (named and not held_before)):
            by = pause_history.ended_by
            how = f"the last pause was ended by {by}" if by else "nobody has paused it"
            return AdminFailed(group.name, AdminFailed.NO_PAUSE, how)
        if held_before and not group.paused and not pause_history.waited_out:
            # M2: somebody wants the group to run, so it is not paused again.
            return self.operation.pause_ended(pause_history.ended_by)
        if not group.paused or (not held_before and self._may_take(group)):
            return None
        became = (
            f"it took over from this operation, and {self.operation.undone}" if held_before else self.operation.undone
        )
        return busy(self.operation.context, group, now, takes=self.operation.takes_pause, became=became)

    def _may_take(self, group: Group) -> bool:
        terms = self.operation.terms
        return terms.take_over or (self.renews and is_named(self.operation.context, group, terms))

    def _renew(self, group: Group, now: Instant) -> None:
        """Renews our pause when a third of it has passed since its newest record was read (M3); one not read yet is
        sent again."""
        if group.pause_change in self.asked or (
            now.mono_ms - self._read_ms >= self.duration_ms // RENEWALS_PER_DURATION
        ):
            self._send(group, group.pause_change, now)

    def _send(self, group: Group, token: int, now: Instant) -> None:
        self.asked.add(group.pause_change)
        # Every copy must be the same record, so that `send` recognises it.
        expires_ms = now.wall_ms + self.duration_ms
        last = next(
            (
                r
                for r in self.operation.sent(ReleaseGroup)
                if r.duration_ms and (r.observed, r.token) == (group.pause_change, token)
            ),
            None,
        )
        self.operation.send(
            last
            or ReleaseGroup(
                group.pause_change,
                token,
                self.duration_ms,
                0,
                expires_ms,
                self.reason,
                self.operation.context.author.by,
            ),
            now,
        )

    def settled(self, group: Group) -> bool:
        """Returns whether none of our pause records can be accepted any more, so that the token is final (M10)."""
        return group.pause_change not in self.asked

    def release(self, group: Group, now: Instant) -> bool:
        """At each tick: ends our pause. True once that is read and none of our records can pause the group again
        (M9)."""
        if group.deleted or group.opaque_at != NONE:
            return True  # the fold accepts no ReleaseGroup of such a group
        if self.operation.context.own_pause is None and self.settled(group):
            if not group.paused and self.adopted is None and self.token != NONE:
                self.operation.report("resumed", offset=group.pause_change)
            return True
        token = group.pause_change if group.paused else NONE
        self.operation.send(end_of(group, token, self.operation.context.author.by, self.reason), now)
        return False


def end_of(group: Group, token: int, by: str, reason: str = "") -> ReleaseGroup:
    """Returns the record that ends the running pause, or has the fold reject one on its way (F7.3)."""
    return ReleaseGroup(group.pause_change, token, 0, reason=reason, by=by)


def is_named(context: GroupContext, group: Group, terms: Terms) -> bool:
    """Returns whether the running pause is the one of the terms' token (M2); without a token and with `adopt`, of the
    same person and machine."""
    if terms.token is not None or not terms.adopt:
        return terms.token == group.pause_change
    pause = context.pause_history.running(group)
    return pause is not None and context.author.is_also(pause.by)


def busy(
    context: GroupContext, group: Group, now: Instant, *, takes: bool = True, became: str = Operation.undone
) -> AdminBusy:
    """Returns the error that names the running pause's author, its reason, the time left and the way out, and what
    became of the operation."""
    pause = context.pause_history.running(group)
    by, reason = (pause.by, pause.reason) if pause is not None else ("", "")
    return AdminBusy(
        group.name,
        by,
        reason,
        context.pause_history.left_s(now.wall_ms),
        group.pause_change,
        own=context.author.is_also(by),
        signed=bool(group.keys),
        takes=takes,
        became=became,
    )


def default_ms(group: Group | None) -> int:
    """Returns how long a pause lasts by default, in ms: a minute plus twice the longest heartbeat interval (M3)."""
    longest = max((s.join.interval_ms for s in group.sessions.values()), default=0) if group is not None else 0
    return min(DEFAULT_MS + EVICT_INTERVALS * longest, PAUSE_MS_MAX)


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

    undone = "this operation does not pause it"
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
