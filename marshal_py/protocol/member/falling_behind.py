"""Decides which partition a member releases because it falls behind there (PROTOCOL.md D16).

The speeds of a partition and of its owner are compared over one window, in offsets: by how much the end has grown, and
by how much the position. Both are looked at together, at the beginning and at the end of the window. A member whose
buffers are full does not fetch, so it learns of a new end only now and then: at such a moment a window ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.candidacy import Candidacy
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition

KEPT = 1  # claims that a member does not release: nothing else takes its owner's time
FASTER = 2  # a taker has less than half of the own lag, so that two members do not pass a partition to and fro


class _Look(NamedTuple):
    """Holds what was seen of a claim when its window began."""

    epoch: int
    mono_ms: int
    position: int
    end: int


class FallingBehind:
    """Is the part of a member that releases partitions whose messages come faster than it handles them."""

    def __init__(
        self, member: MemberState, candidacy: Candidacy, back_off: Callable[[TopicPartition, int], None]
    ) -> None:
        self.member = member
        self.candidacy = candidacy
        self._back_off = back_off
        self._looks: dict[TopicPartition, _Look] = {}
        self._ends: dict[TopicPartition, int] = {}  # of the partitions in `_looks`, at the last look

    @property
    def watches(self) -> bool:
        """Returns whether this member must look at its claims with every tick."""
        return self.member.options.release_behind_ms > 0 and not self.candidacy.moves

    def act(self, group: Group, now: Instant) -> None:
        """Looks at all claims. If it falls behind on some, and somebody can take one, stops the one with most lag."""
        if not self.watches:
            self._looks.clear()
            return
        claims = list(self.member.claims.values())
        behind = [claim for claim in claims if self._behind(claim, now)]
        for gone in self._looks.keys() - {claim.tp for claim in claims}:
            del self._looks[gone]
        self._ends = {claim.tp: claim.end_offset for claim in claims}
        if not behind or len(claims) <= KEPT or any(claim.phase is not ClaimPhase.OPEN for claim in claims):
            return
        worst = max(behind, key=lambda claim: (_lag(claim), -claim.epoch))
        taker = self._taker(group, worst.tp.topic, sum(map(_lag, claims)))
        if taker != NONE:
            until_ms = now.mono_ms + self.member.options.hand_over_timeout_ms
            worst.stop("falls behind", until_ms, taker)
            self._back_off(worst.tp, now.mono_ms + self.member.options.release_behind_ms)
            self._looks.clear()  # one per window

    def _behind(self, claim: Claim, now: Instant) -> bool:
        """Returns whether a window of this claim ends now in which it fell behind; begins a window if none runs."""
        position, end, begun = claim.position(), claim.end_offset, self._looks.get(claim.tp)
        if claim.phase is not ClaimPhase.OPEN or end == NONE:
            self._looks.pop(claim.tp, None)
            return False
        if begun is not None and begun.epoch == claim.epoch and position >= begun.position and end >= begun.end:
            new_end = end != self._ends.get(claim.tp)
            if not new_end or now.mono_ms - begun.mono_ms < self.member.options.release_behind_ms:
                return False
            handled, came = position - begun.position, end - begun.end
            self._looks[claim.tp] = _Look(claim.epoch, now.mono_ms, position, end)
            return 0 < handled < came and _lag(claim) > handled
        self._looks[claim.tp] = _Look(claim.epoch, now.mono_ms, position, end)
        return False

    def _taker(self, group: Group, topic: str, lag: int) -> int:
        """Returns the session with the smallest lag that can take a partition of `topic`; NONE if all have much.

        `lag`: that of this member, over all of its partitions.
        """
        able = [sid for sid in self.candidacy.others(group, topic) if group.sessions[sid].mark == NONE]
        lags = {sid: sum(group.claims[epoch].lag for epoch in group.sessions[sid].epochs) for sid in able}
        best = min(able, key=lambda sid: lags[sid], default=NONE)
        return best if best != NONE and FASTER * lags[best] < lag else NONE


def _lag(claim: Claim) -> int:
    return claim.lag(claim.position())
