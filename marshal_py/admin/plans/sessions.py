"""Contains the operations on sessions and on the group as a whole: step down, evict, delete (PROTOCOL.md M4, M11)."""

from __future__ import annotations

from marshal_py.admin.plans.operation import USUAL, GroupContext, Operation, Terms
from marshal_py.admin.plans.pause import name_of
from marshal_py.admin.views.overview import pinned_session
from marshal_py.errors import AdminGaveUp, GroupMissing, MarshalError, MembersAlive
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE, Instant
from marshal_py.protocol.wire.records import Evict, GroupConfig, Leave, StepDown


def find_session(context: GroupContext, given: int | str | None) -> int:
    """Returns the live session of a number, client id or member name; None: the pinned one. Raises GroupMissing unless
    exactly one fits."""
    if given is None and context.group is not None:
        return pinned_session(context.group)
    live = {} if context.group is None else {number: one.join for number, one in sorted(context.group.sessions.items())}
    found = [
        number
        for number, join in live.items()
        if given == number or (isinstance(given, str) and given and given in (str(number), join.client_id, join.member))
    ]
    if len(found) != 1:
        there = ", ".join(f"{number} ({join.client_id})" for number, join in live.items()) or "nobody"
        many = f"{len(found)} live sessions" if found else "no live session"
        raise GroupMissing(context.name, f"has {many} {given!r}; there is {there}")
    return found[0]


class StepDownPlan(Operation):
    """Makes a session the last candidate for every partition (F9.8). The session stays in the group."""

    def __init__(self, context: GroupContext, session: int | str, terms: Terms = USUAL) -> None:
        super().__init__(context, terms)
        self.session: int = find_session(context, session)
        self.mark: int = NONE

    def read(self, verdict: Verdict, now: Instant) -> None:
        record = verdict.record
        if isinstance(record, StepDown) and verdict.accepted and self.context.author.wrote(record.by):
            self.mark = verdict.offset
            self.report("stepped_down", session=record.session, offset=verdict.offset)

    def act(self, group: Group, now: Instant) -> None:
        if self.mark != NONE:
            self.end()
        elif self.session not in group.sessions:
            self.give_up(GroupMissing(group.name, f"has no live session {self.session} any more"))
        else:
            observed = group.sessions[self.session].mark
            self.send(StepDown(self.session, observed, self.reason, self.context.author.by), now)

    def may_land(self, group: Group) -> bool:
        session = group.sessions.get(self.session)
        return session is not None and any(record.observed == session.mark for record in self.sent(StepDown))

    def timeout_error(self) -> MarshalError:
        return AdminGaveUp(self.context.name, f"the step-down of session {self.session}", self.patience_ms / 1000)


class EvictPlan(Operation):
    """Evicts sessions after the wait of a member (M4); gives up if one gives a sign of life (M11)."""

    what = "nobody is evicted"

    def __init__(self, context: GroupContext, sessions: set[int], terms: Terms = USUAL) -> None:
        super().__init__(context, terms)
        for session in sessions:
            find_session(context, session)
        self.left: set[int] = set(sessions)
        self.ended_by: dict[int, str] = {}
        self._extended: dict[int, int] = {}

    def read(self, verdict: Verdict, now: Instant) -> None:
        group = self.context.group
        for session in [s for s in self.left if group is None or s not in group.sessions]:
            self.left.discard(session)
            match verdict.record:
                case Evict() as record:
                    self.ended_by[session] = record.by
                    self.report("evicted", record.by, session=session, offset=verdict.offset)
                case Leave() as record:
                    self.ended_by[session] = "left"
                    self.report("left", record.reason, session=session, offset=verdict.offset)
                case _:
                    self.ended_by[session] = "ended"
                    self.report("ended", session=session, offset=verdict.offset)

    def act(self, group: Group, now: Instant) -> None:
        self.wait(group, now)
        if not self.left:
            self.end()

    def wait(self, group: Group, now: Instant) -> None:
        alive = []
        for session in sorted(self.left):
            extended = group.sessions[session].extended
            if self._extended.setdefault(session, extended) != extended:
                alive.append(name_of(group, session))
        if alive:
            self.give_up(MembersAlive(group.name, self.what, tuple(alive)))
        else:
            self.evict_silent(group, self.left, now)

    def may_land(self, group: Group) -> bool:
        return any(
            group.sessions[record.session].extended == record.observed
            for record in self.sent(Evict)
            if record.session in group.sessions
        )

    def timeout_error(self) -> MarshalError:
        return AdminGaveUp(self.context.name, f"the end of sessions {sorted(self.left)}", self.patience_ms / 1000)


class RemovePlan(EvictPlan):
    """Deletes a group without live sessions (F9.5). Sessions that are silent are evicted first. A group
    with keys it leaves to a DeletionPlan, because that deletion needs a pause (F11.4)."""

    what = "a group with live members is not deleted without force (--force): stop them first"

    def __init__(self, context: GroupContext, terms: Terms = USUAL) -> None:
        if context.group is None:
            raise GroupMissing(context.name, "has never been used")
        super().__init__(context, set(context.group.sessions), terms)
        self.deleted_at: int = NONE

    def read(self, verdict: Verdict, now: Instant) -> None:
        super().read(verdict, now)
        if isinstance(verdict.record, GroupConfig) and verdict.accepted and verdict.record.deleted:
            self.deleted_at = verdict.offset
            self.report("deleted", verdict.record.by, offset=verdict.offset)

    def act(self, group: Group, now: Instant) -> None:
        late = set(group.sessions) - self.left
        if late:  # it joined meanwhile, so it is alive
            names = tuple(name_of(group, session) for session in sorted(late))
            self.give_up(MembersAlive(group.name, self.what, names))
            return
        self.wait(group, now)
        if not self.left and group.keys:
            self.end()
        elif not self.left and self.giving_up is None:
            by = self.context.author.signed(self.reason)
            self.send(GroupConfig(group.config_offset, deleted=True, by=by), now)

    def give_up(self, error: MarshalError) -> None:
        """Gives up, unless the group is deleted by now: a success."""
        group = self.context.group
        if group is not None and group.deleted:
            self.end()
        else:
            super().give_up(error)

    def may_land(self, group: Group) -> bool:
        deletions = self.sent(GroupConfig)
        return super().may_land(group) or any(record.observed == group.config_offset for record in deletions)

    def timeout_error(self) -> MarshalError:
        return AdminGaveUp(self.context.name, "the deletion", self.patience_ms / 1000)
