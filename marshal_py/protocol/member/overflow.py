"""Judges whether the conditions of this member are met, in a group with the policy `overflow` (PROTOCOL.md A12).

The log knows how far a partition was consumed, but only its owner says how much is left, and only as of its last fetch;
nobody says it of a partition without an owner. So a member with conditions has the driver look up the ends of all
partitions, once per interval. It gives its partitions back when several looks in a row found less than half of what it
asks for: figures that go up and down with every heartbeat must not move partitions to and fro.
"""

from __future__ import annotations

from typing import Final

from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.member.ready import Ready, Wanted
from marshal_py.protocol.policy import overflow
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.subscription import consumed

LOOKS_LOW: Final = 5  # in a row, an interval apart: ten seconds at the default interval, longer than most batches
LOW_SHARE: Final = 2  # half of a condition, so that one partition less to consume does not end it


class Overflow:
    """Is the part of a member that knows who is given partitions under the policy `overflow`."""

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
        helping = [sid for sid in order if overflow.conditioned(group.sessions[sid])]
        met = me in helping and (self._failed_over(group, order) or self.met)
        unseen = sorted(sid for sid in helping if not overflow.helps(group.sessions[sid]))
        self.behind = unseen.index(me) if me in unseen else 0
        return overflow.served(
            group,
            order,
            frozenset(sid for sid in helping if (met if sid == me else overflow.helps(group.sessions[sid]))),
        )

    def _failed_over(self, group: Group, order: list[int]) -> bool:
        """Returns whether nobody without conditions has asked for messages for the failover time.

        Those who live say it themselves. If none does, the time is this member's own wait (T1 to T3).
        """
        clock, failover_ms = self.member.detector.clock, group.config.failover_ms if group.config is not None else 0
        idle = [session.idle_ms for sid in order if not overflow.conditioned(session := group.sessions[sid])]
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
        """Takes the end of a partition, and where reading begins if the log has no position of it; the last one that
        a look waits for completes it.
        """
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
