"""What a member does when another one folds the log to another state than it does itself (PROTOCOL.md G5 to G8).

One of the two is broken, and neither can know which by itself. So the member folds the log once more, from bytes that
are read again: another result than it holds means that it is itself the broken one. Asks and judges; reads nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from marshal_py.errors import Diverged
from marshal_py.protocol.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.member_state import MemberState
from marshal_py.protocol.records import Checkpoint
from marshal_py.protocol.world import CHECKPOINT_OFFSETS, CHECKPOINTS_KEPT, FOLD_VERSION, Group, World

OUTVOTED_BY = 2  # G8: so in a group of three one broken client stops nobody but itself
AGREED_KEPT = 3  # client ids whose digests were ours last: two of them, and the accuser's own
NAME_CHARACTERS = 50  # of at most 4 bytes each: a Note's text holds 255 bytes (PROTOCOL.md 4.2)
WHOLE_GROUP = TopicPartition("", NONE)


class Accusation(NamedTuple):
    """Another session's digest that is not ours."""

    client_id: str
    digest: Checkpoint


class DivergenceCheck:
    """Digests of others, and what follows when they differ.

    1. `active` exactly while there is an accusation that is neither settled nor dismissed; then nothing is claimed.
    2. A session that was once found to be the odd one out is not listened to again.
    """

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self.accusations: dict[int, Accusation] = {}  # by session
        self.confirmed = False  # the re-fold gave what is held
        self._since_ms = 0
        self._first: Checkpoint | None = None  # the digest of the first accusation
        self._agrees: dict[str, bool] = {}  # client id -> whether its last digest was ours, since the first accusation
        self._agreed: dict[str, int] = {}  # client id -> checkpoint; those that agreed last
        self._asked_ms: dict[int, int] = {}  # by live session, as of the last accusation
        self._dismissed: set[int] = set()  # the same

    @property
    def active(self) -> bool:
        return bool(self.accusations)

    # --- reading

    def compare(self, session: int, digest: Checkpoint, now: Instant) -> None:
        """G5: a heartbeat of another session was accepted."""
        member = self.member
        held = member.world.digests_at(member.name, digest.at)
        if held is None or digest.fold != FOLD_VERSION:
            return
        group = member.group
        assert group is not None  # its heartbeat was accepted
        client_id = group.sessions[session].join.client_id
        if client_id == member.options.client_id:
            return  # of this process, as a rule, and so of this very world
        if held == (digest.state, digest.chain):
            self._agree(client_id, digest.at)
        elif session not in self._dismissed:
            self._forget_gone(group)
            if self._outvotes(client_id, digest.at):
                self._dismissed.add(session)
            else:
                self._accuse(session, Accusation(client_id, digest), now)

    def _agree(self, client_id: str, at: int) -> None:
        if self.accusations:
            self._agrees[client_id] = True
        self._agreed.pop(client_id, None)
        self._agreed[client_id] = at
        if len(self._agreed) > AGREED_KEPT:
            del self._agreed[next(iter(self._agreed))]

    def _outvotes(self, client_id: str, at: int) -> bool:
        """G6: whether two others came to our state at this checkpoint or later: the accuser is the odd one out."""
        if self.accusations:
            return False  # it is being looked into
        return sum(other != client_id and agreed_at >= at for other, agreed_at in self._agreed.items()) >= OUTVOTED_BY

    def _forget_gone(self, group: Group) -> None:
        self._dismissed &= group.sessions.keys()
        for gone in self._asked_ms.keys() - group.sessions.keys():
            del self._asked_ms[gone]

    def _accuse(self, session: int, accusation: Accusation, now: Instant) -> None:
        member, at = self.member, accusation.digest.at
        if not self.accusations:
            self._since_ms, self._first, self._agrees, self.confirmed = now.mono_ms, accusation.digest, {}, False
        if session not in self.accusations:
            who = accusation.client_id[:NAME_CHARACTERS]
            member.note("diverged", WHOLE_GROUP, at, NONE, f"{who} folds to another state")
        self.accusations[session] = accusation
        self._agrees[accusation.client_id] = False
        asked_ms = self._asked_ms.get(session)
        if asked_ms is None or now.mono_ms - asked_ms >= member.options.interval_ms:
            self._asked_ms[session] = now.mono_ms
            member.out.refold = max(at, member.out.refold)

    # --- judging

    def refolded(self, at: int, again: World | None, now: Instant) -> None:
        """G7: what the re-read log folds to."""
        member = self.member
        if again is None:
            self._asked_ms.clear()  # the next accusation asks anew
            return
        first = first_difference(member.world, again, member.name, at)
        if first == NONE:
            self.confirmed = True
        else:
            self._end(first, again, "folded once more from the same bytes, it comes to another state")
        member.request_tick()

    def _end(self, at: int, again: World, reason: str) -> None:
        member = self.member
        held, found = member.world.digests_at(member.name, at), again.digests_at(member.name, at)
        assert held is not None
        assert found is not None
        which = 0 if held[0] != found[0] else 1  # the state, or only the bytes that led to it
        member.end(Diverged(member.name, member.world.log, at, held[which], found[which], reason))

    def settle(self, group: Group, now: Instant) -> None:
        """G8: who is the odd one out?"""
        for gone in [session for session in self.accusations if session not in group.sessions]:
            del self.accusations[gone]
        if not self.accusations or not self.confirmed:
            return
        if any(self._agrees.values()):
            self._dismissed.update(self.accusations)
            self.accusations.clear()
            return
        against = {accusation.client_id for accusation in self.accusations.values()}
        # After an interval everybody who lives has spoken.
        if len(against) >= OUTVOTED_BY and now.mono_ms - self._since_ms >= self.member.options.interval_ms:
            member, first = self.member, self._first
            assert first is not None
            held = member.world.digests_at(member.name, first.at) or (0, 0)
            names = ", ".join(sorted(against)[:OUTVOTED_BY])
            member.end(
                Diverged(
                    member.name,
                    member.world.log,
                    first.at,
                    held[0],
                    first.state,
                    f"{names} fold to another state, and nobody to its own",
                )
            )


def first_difference(held: World, again: World, group: str, upto: int) -> int:
    """The first checkpoint, as far back as both remember, at which two folds of one log differ; -1 if none does."""
    least = max(CHECKPOINT_OFFSETS, upto - CHECKPOINTS_KEPT * CHECKPOINT_OFFSETS)
    for at in range(least, upto + 1, CHECKPOINT_OFFSETS):
        mine, theirs = held.digests_at(group, at), again.digests_at(group, at)
        if mine is not None and theirs is not None and mine != theirs:
            return at
    return NONE
