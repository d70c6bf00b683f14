"""Keeps the order of candidates and the target, as one member last computed them (PROTOCOL.md F9.9, A1, A2, T4).

The target says which session should own which partition. A member has waited out a session that was silent for so long
that it may evict it; such a session is no candidate. Order and target follow from the world and the sessions waited
out. In a large group they cost milliseconds, and each record of a burst changes them. There they are computed once in a
tenth of an interval, and in between the last result is used. All of it is guidance: the fold decides who owns what.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from copy import copy
from typing import Final

from marshal_py.protocol import policy
from marshal_py.protocol.fold.policies import DEFAULT_POLICY, KNOWN, Policy, policy_named
from marshal_py.protocol.fold.world import Group, Partition, Session
from marshal_py.protocol.member.member_state import MemberState, Ready, Wanted
from marshal_py.protocol.policy import OPEN, RESTRICTED, Line, Target, candidate_order, has_room
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition, consumed, consumes

# --- Judges whether the conditions of this member are met, in a group with the policy `overflow` (PROTOCOL.md A12).
#
# The log knows how far a partition was consumed, but only its owner says how much is left, and only as of its last
# fetch; nobody says it of a partition without an owner. So a member with conditions has the driver look up the ends
# of all partitions, once per interval. It gives its partitions back when several looks in a row found less than half
# of what it asks for: figures that go up and down with every heartbeat must not move partitions to and fro.

LOOKS_LOW: Final = 5  # in a row, an interval apart: ten seconds at the default interval, longer than most batches
LOW_SHARE: Final = 2  # half of a condition, so that one partition less to consume does not end it


class Overflow:
    """Knows who is given partitions under the policy `overflow`."""

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self.met: bool = False  # whether the own conditions are met, as of the last look
        self.behind: int = 0  # how many like it come earlier, as long as the log does not show that it helps (A2)
        self.found: tuple[int, int] | None = None  # pending and in flight, as of the last look
        self._low = 0  # how many of the last looks, in a row, found less than half
        self._looked_ms: int | None = None  # when the newest look began
        self._awaited: set[TopicPartition] = set()  # partitions whose ends it still waits for
        self._pending: dict[TopicPartition, tuple[int, int]] = {}  # partition -> (where reading begins, end)
        self._alone_ms: int | None = None  # on the wait clock: since when nobody without conditions has asked

    @property
    def conditioned(self) -> bool:
        return bool(self.member.options.min_pending or self.member.options.min_ack_pending)

    def served(self, group: Group, order: list[int]) -> list[int]:
        """Returns the sessions of `order`, which are candidates, that are given partitions."""
        me = self.member.session
        helping = [sid for sid in order if policy.conditioned(group.sessions[sid])]
        met = me in helping and (self._failed_over(group, order) or self.met)
        unseen = sorted(sid for sid in helping if not policy.helps(group.sessions[sid]))
        self.behind = unseen.index(me) if me in unseen else 0
        return policy.served(
            group, order, frozenset(sid for sid in helping if (met if sid == me else policy.helps(group.sessions[sid])))
        )

    def _failed_over(self, group: Group, order: list[int]) -> bool:
        """Returns whether nobody without conditions has asked for the failover time: as those say who live, else by
        this member's own wait (T1 to T3)."""
        clock, failover_ms = self.member.detector.clock, group.config.failover_ms if group.config is not None else 0
        idle = [session.idle_ms for sid in order if not policy.conditioned(session := group.sessions[sid])]
        if idle or self._alone_ms is None:
            self._alone_ms = clock.counted_ms - min(idle, default=0)
        return 0 < failover_ms <= (min(idle) if idle else clock.waited_ms(self._alone_ms))

    def act(self, group: Group, now: Instant, out: Ready) -> None:
        """Begins a look when the last one is an interval old. A look that was not answered is given up."""
        if not self.conditioned:
            return
        if self._looked_ms is not None and now.mono_ms - self._looked_ms < self.member.options.interval_ms:
            return
        self._looked_ms, self._awaited = now.mono_ms, set()
        self._pending.clear()
        for name in consumed(self.member.options.topics, group.topics):
            if (topic := group.topics.get(name)) is None or name in self.member.gone_topics:
                continue
            for number in range(topic.count):
                tp = TopicPartition(name, number)
                known = group.partitions.get(tp)
                if known is None or not known.parked:
                    out.resolve.append(Wanted(tp, number >= topic.first_count, _position(known) != NONE))
                    self._awaited.add(tp)

    def looked_up(self, group: Group, tp: TopicPartition, start: int, end: int) -> None:
        """Takes a partition's end, and where reading begins without a position. The last one completes the look."""
        if tp not in self._awaited:
            return
        self._awaited.remove(tp)
        self._pending[tp] = start, end
        if not self._awaited:
            self._judge(group)

    def _judge(self, group: Group) -> None:
        pending = in_flight = 0
        for tp, (start, end) in self._pending.items():
            known = group.partitions.get(tp)
            delivered = known.in_flight if known is not None and known.owner != NONE else 0
            position = _position(known)
            pending += max(0, end - (start if position == NONE else position) - delivered)
            in_flight += delivered
        asked = self.member.options.min_pending, self.member.options.min_ack_pending
        self.found = found = pending, in_flight
        if any(0 < least <= figure for least, figure in zip(asked, found, strict=True)):
            self.met, self._low = True, 0
        elif any(0 < least <= LOW_SHARE * figure for least, figure in zip(asked, found, strict=True)):
            self._low = 0
        else:
            self._low += 1
            self.met = self.met and self._low < LOOKS_LOW


def _position(known: Partition | None) -> int:
    return NONE if known is None else known.position


STOPPING: Final = "stopping"  # reason of the StepDown of a member that is about to leave (A6)
REFRESH_AT_ONCE_MAX: Final = 2_000  # partitions and sessions; up to so many, a refresh costs a few ms at most


class Candidacy:
    """Knows this member's rank among the candidates, and the target."""

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self.overflow: Overflow = Overflow(member)
        self.revision: int = 0  # grows with each refresh that computed something
        self.waited_out: frozenset[int] = frozenset()  # as of the last refresh
        self.order: list[int] = []
        self.place: dict[int, int] = {}  # session -> its index in the order
        self.target: Target = {}
        # of a restricted policy: who may claim each partition, in order; None under an open policy
        self.lines: Mapping[TopicPartition, Line] | None = None
        self.policy: Policy = policy_named("")
        self.mine: list[TopicPartition] = []  # what the target gives to this member
        self.taking: list[TopicPartition] = []  # of these, the ones that live sessions own
        self.giving: bool = False  # whether the target gives a partition of this member to another one
        self.stopping: set[int] = set()  # live sessions that are about to leave (A6)
        self.pin_lost: str = ""  # why this member gives its pin back; it stays until the pin is released (A11)
        self._pin = NONE  # epoch of the own pin at the last refresh
        self.outdated: bool = False  # whether the world has changed since order and target were computed
        # what the last refresh saw: shape, sessions waited out, the own session, those idle (A11) or served (A12),
        # topics that are gone (A13)
        self._refreshed: tuple[object, ...] = (-1, frozenset(), NONE, None, frozenset())
        self._refreshed_ms = 0  # when order and target were computed, on the wait clock
        self._before: list[int] = []  # sessions before this one in the order, sorted by id
        self._all: list[int] = []  # all candidates, sorted by id
        self._ahead: dict[str, int] = {}  # topic -> how many candidates before this one can take a partition of it
        self._successors: tuple[tuple[int, ...], Target] = ((), {})

    def _special(self, group: Group) -> frozenset[int] | None:
        """Returns which sessions the policy treats in a special way now, for a reason that changes no shape."""
        if self.policy.pins:
            return frozenset(sid for sid in group.sessions if policy.idle(group, sid))
        if self.policy.conditions:
            order = [sid for sid in group.sessions if sid not in self.waited_out]
            return frozenset(self.overflow.served(group, order))
        return None

    @property
    def looks(self) -> bool:
        """Returns whether conditions must be judged with every tick (A12)."""
        return self.policy.conditions

    def look(self, group: Group, now: Instant, out: Ready) -> None:
        """Has the driver look up what this member needs to judge its own conditions (A12)."""
        if self.looks:
            self.overflow.act(group, now, out)

    @property
    def moves(self) -> bool:
        """Returns whether the policy takes partitions from live owners (A3)."""
        return self.policy.moves or self.lines is not None

    def refresh(self, group: Group) -> None:
        """Computes order and target again if they may have changed; in a large group once in a tenth of an interval."""
        detector, me = self.member.detector, self.member.session
        waited_out = detector.waited_out(group)
        waited_out.discard(me)
        self.waited_out = frozenset(waited_out)
        now = (group.shape, self.waited_out, me, self._special(group), self.member.gone_topics)
        self.outdated = now != self._refreshed
        if not self.outdated:
            return  # nearly always; a change of settings changes the shape too
        counted_ms = detector.clock.counted_ms
        large = sum(topic.count for topic in group.topics.values()) + len(group.sessions) > REFRESH_AT_ONCE_MAX
        if large and me == self._refreshed[2] and counted_ms - self._refreshed_ms < detector.clock.step_ms_max:
            return
        self._refreshed, self._refreshed_ms, self.outdated = now, counted_ms, False
        self.revision += 1
        self.stopping &= group.sessions.keys()
        named = "" if group.config is None else group.config.policy
        self.policy = policy_named(named if named in KNOWN else self.member.options.policy)
        detector.watch_covers(group, topics=self.policy.whole_topics, pin=self.policy.pins)
        self.order = candidate_order(group, self.waited_out)
        self._note_pin(group)
        self.lines = self._lines(group, self.order)
        self.target = self._target(group, self.order, self.lines)
        self.place = {sid: at for at, sid in enumerate(self.order)}
        self._all, self._before = sorted(self.order), sorted(self.order[: self.place[me]])
        self._ahead.clear()
        self.mine = [tp for tp, sid in self.target.items() if sid == me]
        self.taking = [tp for tp in self.mine if tp.partition >= 0 and policy.owner_of(group, tp) not in (NONE, me)]
        self.giving = any(self.goes_to(group.claims[epoch].tp) != me for epoch in group.sessions[me].epochs)

    def wait_ms(self) -> int | None:
        """Returns in how many ms `refresh` may compute a change that it put off; None if it put off none."""
        clock = self.member.detector.clock
        return max(1, self._refreshed_ms + clock.step_ms_max - clock.counted_ms) if self.outdated else None

    def goes_to(self, tp: TopicPartition) -> int:
        """Returns the session that should have a partition of this member: itself if the target says nothing, NONE
        under a restricted policy, which makes it release the partition."""
        return self.target.get(tp, self.member.session if self.lines is None else NONE)

    @property
    def covered(self) -> bool:
        """Returns whether a partition may be owned only by the owner of its cover (A9, A11)."""
        return self.policy.whole_topics or self.policy.pins

    def owns_cover(self, group: Group, tp: TopicPartition) -> bool:
        """Returns whether this member owns what the policy demands of the owner of `tp`."""
        cover = policy.cover_of(self.policy, tp)
        return cover is None or policy.owns(group, cover, self.member.session)

    def in_line(self, tp: TopicPartition) -> bool:
        """Returns whether this member may claim the partition, and keep it if it owns it."""
        return self.lines is None or self.member.session in self.lines.get(tp, ())

    def _lines(self, group: Group, order: list[int]) -> Mapping[TopicPartition, Line] | None:
        lines_of = RESTRICTED.get(self.policy.name)
        if self.pin_lost:
            order = [sid for sid in order if sid != self.member.session]
        if self.policy.conditions:
            order = self.overflow.served(group, order)
        return None if lines_of is None else lines_of(self._present(group), order)

    def _note_pin(self, group: Group) -> None:
        """Decides whether the own pin is lost, and why: once, whatever its user asks for while handlers finish."""
        before, self._pin = self._pin, self.member.pin
        if self._pin != before:
            self.pin_lost = ""
        if self._pin != NONE and not self.pin_lost:
            self.pin_lost = policy.pin_lost_by(group)

    def _target(self, group: Group, order: list[int], lines: Mapping[TopicPartition, Line] | None) -> Target:
        if lines is not None:
            return {tp: line[0] for tp, line in lines.items()}
        return OPEN.get(self.policy.name, OPEN[DEFAULT_POLICY])(self._present(group), order)

    def _present(self, group: Group) -> Group:
        """Returns the group without the topics that are gone, so that no target counts their partitions (A13)."""
        gone = self.member.gone_topics
        if not gone:
            return group
        present = copy(group)
        present.topics = {name: topic for name, topic in group.topics.items() if name not in gone}
        return present

    def rank(self, group: Group) -> int:
        """Returns this member's place in the order of candidates; 0 is the first, which acts at once."""
        self.refresh(group)
        return self.place[self.member.session]

    def awaits_hand_overs(self, group: Group) -> bool:
        """Returns whether the target gives this member partitions that live members still own (A3)."""
        self.refresh(group)
        return bool(self.taking)

    def rank_for(self, group: Group, tp: TopicPartition) -> int | None:
        """Returns how many sessions' turn to claim `tp` is earlier (A2): the successor that the Release named, else the
        target's; the former owner; the others in order. Under a restricted policy by its line (A7); None if this member
        is not in it and may not claim."""
        if self.lines is not None:
            line = self.lines.get(tp, ())
            return line.index(self.member.session) + self.overflow.behind if self.member.session in line else None
        me, known = self.member.session, group.partitions.get(tp)
        first, former = self.target.get(tp, NONE), NONE
        if known is not None:
            if self._takes(group, known.successor, tp.topic):
                first = known.successor
            if self._takes(group, known.last_owner, tp.topic):
                former = known.last_owner
        if first == me:
            return 0
        if former == me:
            return int(first in self.place)
        rank, place = self._ahead_of(group, tp.topic), self.place
        for sid in {first, former} & place.keys():
            # So far `rank` counts those before this member in the order that can take the partition.
            rank += place[sid] > place[me] or not self._takes(group, sid, tp.topic)
        return rank

    def _takes(self, group: Group, sid: int, topic: str) -> bool:
        session = group.sessions.get(sid) if sid in self.place and sid not in self.stopping else None
        return session is not None and consumes(session.join.topics, topic) and has_room(session)

    def others(self, group: Group, topic: str) -> list[int]:
        """Returns the other candidates that can take a partition of `topic`, in order."""
        return [sid for sid in self.order if sid != self.member.session and self._takes(group, sid, topic)]

    def _ahead_of(self, group: Group, topic: str) -> int:
        if not self._ahead:
            staying = (sid for sid in self._before if sid not in self.stopping)
            before = [session for sid in staying if (session := group.sessions.get(sid)) is not None]
            alike = Counter(session.join.topics for session in before if has_room(session))
            self._ahead = dict.fromkeys(consumed(self.member.options.topics, group.topics), 0)
            for topics, count in alike.items():
                for each in self._ahead.keys() & set(consumed(topics, group.topics)):
                    self._ahead[each] += count
        return self._ahead.get(topic, 0)

    def rank_over(self, silent: Session) -> int:
        """Returns how many members' turn to evict `silent` is earlier (T4). Those that joined after its last sign of
        life come last."""
        older = bisect_right(self._before, silent.extended)
        if self.member.session <= silent.extended:
            return older
        return bisect_right(self._all, silent.extended) + len(self._before) - older

    def successors(self, group: Group) -> Target:
        """Returns the target without this member and the others about to leave (A6), so that each partition moves
        once."""
        self.refresh(group)
        leaving = self.stopping | {self.member.session}
        rest = tuple(sid for sid in self.order if sid in group.sessions and sid not in leaving)
        if self._successors[0] != rest:
            self._successors = rest, self._target(group, list(rest), self._lines(group, list(rest)))
        return self._successors[1]

    def can_hand_over(self, group: Group) -> bool:
        """Returns whether members that stay would take over partitions while this member still delivers (A3, A6)."""
        self.refresh(group)
        me, stays = self.member.session, group.sessions.keys() - self.stopping
        if not self.moves:
            return False
        if self.lines is not None and not any(
            self.successors(group).get(claim.tp, me) != me for claim in self.member.claims.values()
        ):
            return False
        if group.sessions[me].mark == NONE:  # it has not read its own StepDown yet
            return any(sid != me and sid in stays and group.sessions[sid].mark == NONE for sid in self.order)
        successors = (self.target.get(claim.tp, me) for claim in self.member.claims.values())
        return any(sid != me and sid in stays for sid in successors)
