"""Acquires, renews and releases the pause in which an operation works (PROTOCOL.md M1-M3, M9, M10).

The log says whose pause it is (`by` of the accepted ReleaseGroup). So a late copy, a lost answer and a second run of
the same person are no special cases. "Ours" is what this run wrote. An adopted pause stays its author's: this run
writes nothing for it, and its author renews and ends it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from marshal_py.admin.plans.operation import GroupContext, Operation, Terms
from marshal_py.errors import AdminBusy, AdminFailed, InvalidOption, MarshalError
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE, Instant
from marshal_py.protocol.wire.intervals import EVICT_INTERVALS
from marshal_py.protocol.wire.records import PAUSE_MS_MAX, ReleaseGroup

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

    def is_ours(self, group: Group) -> bool:
        """Returns whether this run made the running pause (M1)."""
        pause = self.operation.context.pause_history.running(group)
        return pause is not None and self.operation.context.author.wrote(pause.by)

    def acquire(self, group: Group, now: Instant) -> bool:
        """At each tick: returns whether the group is in an adopted pause or our own, which it renews. Otherwise asks
        for one, or gives up."""
        if self.is_ours(group):
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
            self._ask(group, now)
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
        return busy(self.operation.context, group, now)

    def _may_take(self, group: Group) -> bool:
        terms = self.operation.terms
        return terms.take_over or (self.renews and is_named(self.operation.context, group, terms))

    def _ask(self, group: Group, now: Instant) -> None:
        token = group.pause_change if group.paused else NONE
        self._send(group, token, now)

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
        if not self.is_ours(group) and self.settled(group):
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


def busy(context: GroupContext, group: Group, now: Instant) -> AdminBusy:
    """Returns the error that names the running pause's author, its reason and the time left."""
    pause = context.pause_history.running(group)
    by, reason = (pause.by, pause.reason) if pause is not None else ("", "")
    return AdminBusy(
        group.name,
        by,
        reason,
        context.pause_history.left_s(now.wall_ms),
        group.pause_change,
        own=context.author.is_also(by),
    )


def default_ms(group: Group | None) -> int:
    """Returns how long a pause lasts by default, in ms: a minute plus twice the longest heartbeat interval (M3)."""
    longest = max((s.join.interval_ms for s in group.sessions.values()), default=0) if group is not None else 0
    return min(DEFAULT_MS + EVICT_INTERVALS * longest, PAUSE_MS_MAX)
