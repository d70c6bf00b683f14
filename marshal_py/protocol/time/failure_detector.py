"""Keeps the waits of one client: on silent sessions, on the end of a pause, on partitions that nobody owns.

Every wait is counted on the WaitClock from the moment when this client first read the value that it waits on
(PROTOCOL.md T1-T5, A2). A session is waited out when it may be evicted, after twice its interval. This file decides
nothing: rebalance.py and member.py act when a wait is long enough.
"""

from __future__ import annotations

from collections.abc import Iterable

from marshal_py.protocol.fold.world import Group, Partition, Session, Topic
from marshal_py.protocol.time.liveness import WaitClock
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition
from marshal_py.protocol.wire.records import EVICT_INTERVALS


class FailureDetector:
    """Counts the waits of one client in one group. Of each wait it keeps the clock's value when the wait began."""

    def __init__(self, interval_ms: int) -> None:
        self.clock: WaitClock = WaitClock(interval_ms)
        self._sessions: dict[int, tuple[int, int]] = {}  # session -> (its `extended`, when the wait began)
        # (pause_change, when the wait began, ms that another client waited before)
        self._pause: tuple[int, int, int] = (NONE, 0, 0)
        self._free: dict[TopicPartition, tuple[int, int]] = {}  # partition -> (version, when the wait began)
        self._shape = -1
        self._first = 0  # number of the first partition that is watched; -1: whole topics, too
        self._pin = False  # whether the pin is watched, too
        self._waited_out: set[int] = set()
        self._nearest_ms = self.clock.step_ms_max  # in how many ms the next session is waited out; at most a step

    def refresh(self, group: Group, now: Instant, proven: bool) -> None:
        """At every tick: ends a step of the clock, and begins a wait for each value that changed. `proven`: an own
        record sent at most one interval ago was read back; else all waits start again (T2, T3)."""
        self.clock.advance(now, proven)
        counted = self.clock.counted_ms
        floor, waits = self.clock.floor_ms, self._sessions
        self._waited_out.clear()
        nearest_ms = self.clock.step_ms_max
        for session in group.sessions.values():  # at every tick of every member: no calls here
            known = waits.get(session.id)
            if known is None or known[0] != session.extended:
                known = waits[session.id] = (session.extended, counted)
            began = known[1] if known[1] > floor else floor
            left_ms = EVICT_INTERVALS * session.join.interval_ms - (counted - began - 1)
            if left_ms <= 0:
                self._waited_out.add(session.id)
            elif left_ms < nearest_ms:
                nearest_ms = left_ms
        self._nearest_ms = nearest_ms
        if len(waits) > len(group.sessions):
            for gone in waits.keys() - group.sessions.keys():
                del waits[gone]
        if group.pause_duration_ms and self._pause[0] != group.pause_change:
            self._pause = (group.pause_change, counted, 0)
        if self._shape != group.shape:
            self._refresh_free(group, counted)
            self._shape = group.shape

    def extended(self, session: int, offset: int, now: Instant) -> None:
        """Begins the wait on a session at `now`, when the record at `offset` extended it, not at the next refresh
        (T1)."""
        self._sessions[session] = (offset, self.clock.counted_at(now))

    def watch_covers(self, group: Group, *, topics: bool, pin: bool) -> None:
        """Sets whether `free` names whole topics (partition -1) and the pin. A change counts at once: they become free
        without a change of the group, and HeadStarts looks only at changes."""
        watched = -1 if topics else 0, pin
        if watched != (self._first, self._pin):
            (self._first, self._pin), self._shape = watched, -1
            self._refresh_free(group, self.clock.counted_ms)
            self._shape = group.shape

    def _refresh_free(self, group: Group, counted: int) -> None:
        """Updates which partitions are free: not owned, not parked, no pause. Looks at what changed since the last
        call, or at all if too much did. Waits begin at the end of a pause, else all would claim everything at once
        (A2)."""
        changed = group.changed_since(self._shape)
        if changed is None or any(isinstance(entry, Topic | Group) for entry in changed):
            before, self._free = self._free, {}
            for name, topic in group.topics.items() if not group.paused else ():
                for number in range(self._first, topic.count):
                    self._refresh_one(group, TopicPartition(name, number), before, counted)
            if self._pin and not group.paused:
                self._refresh_one(group, PIN, before, counted)
            return
        for entry in changed if not group.paused else ():
            if isinstance(entry, Partition) and self._watches(group, entry.tp):
                self._refresh_one(group, entry.tp, self._free, counted)

    def _watches(self, group: Group, tp: TopicPartition) -> bool:
        topic = group.topics.get(tp.topic)
        return self._pin and tp == PIN if topic is None else self._first <= tp.partition < topic.count

    def _refresh_one(
        self, group: Group, tp: TopicPartition, before: dict[TopicPartition, tuple[int, int]], counted: int
    ) -> None:
        known = group.partitions.get(tp)
        if known is None or (known.owner == NONE and not known.parked):
            version = NONE if known is None else known.version
            was = before.get(tp)
            self._free[tp] = was if was is not None and was[0] == version else (version, counted)
        else:
            self._free.pop(tp, None)

    def free(self) -> dict[TopicPartition, tuple[int, int]]:
        """Returns the partitions that anybody may claim, each with its version and the clock's value when the wait on
        it began."""
        return self._free

    def session_waited_ms(self, session: int) -> int:
        """Returns for how many ms this client has waited since it read the session's last extension."""
        known = self._sessions.get(session)
        return 0 if known is None else self.clock.waited_ms(known[1])

    def waited_out(self, group: Group) -> set[int]:
        """Returns the live sessions that, as of the last refresh, this client has waited out (T4)."""
        return {session for session in self._waited_out if session in group.sessions}

    def over(self) -> bool:
        """Returns whether a session is waited out or a partition is free, so that a tick may have to act on it."""
        return bool(self._waited_out or self._free)

    def pause_waited_ms(self) -> int:
        """Returns for how long the pause has lasted: by the own wait, or another client's, continued since (T5)."""
        return self.clock.waited_ms(self._pause[1]) + self._pause[2]

    def credit_pause(self, pause_change: int, waited_ms: int) -> None:
        """Continues the own wait on a pause from another client's, if that is longer (T5)."""
        if self._pause[0] == pause_change and waited_ms > self.pause_waited_ms():
            self._pause = (pause_change, self.clock.counted_ms, waited_ms)

    def deadline_ms(self, now: Instant) -> int:
        """Returns when `refresh` must be called at the latest: a session is waited out, or the step must end (T2)."""
        return now.mono_ms + self._nearest_ms


# --- Finds live consumers of a group that use one client_id.
#
# The log accepts that, because it tells consumers apart by session. But a name in an event, a metric or a command
# then means two of them, and `fast_reclaim` would end the wrong one. Two sessions of one client_id alone prove
# nothing: a process that died and was started again leaves its former session until others end it. But who is dead
# extends no session. Two consumers of one Marshal share its client_id by right; the log does not tell, the Marshal
# does. Pure.


def both_live(one: Session, other: Session) -> bool:
    """Returns whether both have one client_id, and both were extended after the younger one had joined."""
    return one.join.client_id == other.join.client_id and min(one.extended, other.extended) > max(one.id, other.id)


def shared(sessions: Iterable[Session]) -> dict[str, list[int]]:
    """Returns the client_ids that several of these sessions of a group use at one time, with these sessions."""
    by_name: dict[str, list[Session]] = {}
    for session in sessions:
        by_name.setdefault(session.join.client_id, []).append(session)
    found: dict[str, list[int]] = {}
    for name, each in by_name.items():
        beside = [one.id for one in each if any(one is not other and both_live(one, other) for other in each)]
        if beside:
            found[name] = sorted(beside)
    return found
