"""What a member does when another member's digest of the same log differs from its own (PROTOCOL.md G5 to G8).

Such a digest is an accusation: one of the two is broken, and neither knows which. So the member asks its driver to read
the log again and fold it once more. If the result differs from its own state, this member is the broken one and ends.
It asks and judges; the driver reads.
"""

from __future__ import annotations

from typing import NamedTuple

from marshal_py.errors import Diverged
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, CHECKPOINTS_KEPT, FOLD_VERSION, Group, World
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import Checkpoint

OUTVOTED_BY = 2  # clients; in a group of three, one broken client stops itself alone (G8)
AGREED_KEPT = 3  # client ids that agreed last: OUTVOTED_BY of them and the accuser itself
NAME_CHARACTERS = 50  # of at most 4 bytes each: the text of a Note is bounded (records.TEXT_BYTES_MAX)
WHOLE_GROUP = TopicPartition("", NONE)


class Accusation(NamedTuple):
    """A digest of another session that differs from this member's own."""

    client_id: str
    digest: Checkpoint


class DivergenceCheck:
    """Compares the digests of other members with those of this member, and judges who is broken if they differ.

    Invariants:
      1  `active` is true exactly while an accusation is neither settled nor dismissed; meanwhile nothing is claimed
      2  a session that was found to be the broken one is ignored from then on
    """

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self.accusations: dict[int, Accusation] = {}  # session -> its newest accusation
        self.confirmed: bool = False  # folding again gave the same state
        self._since_ms = 0
        self._first: Checkpoint | None = None  # the digest of the first accusation
        self._agrees: dict[str, bool] = {}  # client id -> whether its last digest agreed, since the first accusation
        # client id -> checkpoint of the last digest that agreed, for the clients that agreed last
        self._agreed: dict[str, int] = {}
        self._asked_ms: dict[int, int] = {}  # by live session: when it last made this member ask for a fold
        self._dismissed: set[int] = set()  # live sessions that were found to be broken

    @property
    def active(self) -> bool:
        return bool(self.accusations)

    # --- reading

    def compare(self, session: int, digest: Checkpoint, now: Instant) -> None:
        """Compares the digest of another session's accepted heartbeat with this member's own (G5)."""
        member = self.member
        held = member.world.digests_at(member.name, digest.at)
        if held is None or digest.fold != FOLD_VERSION:
            return
        group = member.group
        assert group is not None  # its heartbeat was accepted, so there is a group
        client_id = group.sessions[session].join.client_id
        if client_id == member.options.client_id:
            return  # usually the same process, which shares this world
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
        """Returns whether two other clients agree with this member as of checkpoint `at`, so that `client_id` is broken
        (G6)."""
        if self.accusations:
            return False  # a check is running
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
        """Ends this member if the second fold, `again` at offset `at` (None if it failed), differs from its state
        (G7)."""
        member = self.member
        if again is None:
            self._asked_ms.clear()  # the next accusation asks again
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
        which = 0 if held[0] != found[0] else 1  # the state differs, or only the bytes that led to it
        member.end(Diverged(member.name, member.world.log, at, held[which], found[which], reason))

    def settle(self, group: Group, now: Instant) -> None:
        """At ticks, after an equal second fold (G8): another client's agreement ends all accusations, an accuser's end
        its own; two accusing clients and none that agrees end the member."""
        for gone in [session for session in self.accusations if session not in group.sessions]:
            del self.accusations[gone]
        if not self.accusations or not self.confirmed:
            return
        if any(self._agrees.values()):
            self._dismissed.update(self.accusations)
            self.accusations.clear()
            return
        against = {accusation.client_id for accusation in self.accusations.values()}
        # After an interval every live member has sent a digest.
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
    """Returns the first checkpoint up to `upto` at which digests that both worlds keep differ, or -1."""
    least = max(CHECKPOINT_OFFSETS, upto - CHECKPOINTS_KEPT * CHECKPOINT_OFFSETS)
    for at in range(least, upto + 1, CHECKPOINT_OFFSETS):
        mine, theirs = held.digests_at(group, at), again.digests_at(group, at)
        if mine is not None and theirs is not None and mine != theirs:
            return at
    return NONE
