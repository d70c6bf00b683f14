"""Evicts silent sessions of any group in a log, for groups that have no member left to do it (PROTOCOL.md N14).

The session of a killed process stops the confirmation of snapshots and the truncation of its whole log, and in a group
without other consumers no member waits to evict it (T4). So every process with a session in the log waits on all
sessions of the log. It evicts and does nothing else: partitions are claimed by the group's own members.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from marshal_py.protocol.fold.world import Group, Session, World
from marshal_py.protocol.time.liveness import HEARTBEATS_PER_INTERVAL, WaitClock
from marshal_py.protocol.wire.identity import NONE, Instant
from marshal_py.protocol.wire.records import BY_CHARS_MAX, EVICT_INTERVALS, Evict

EVICTS_MAX: Final = 100  # per tenth of an interval: thousands of dead sessions must not fill the producer's queue


class Presence(NamedTuple):
    """The live sessions that one process has in one log."""

    client_id: str
    sessions: set[int]  # their ids
    interval_ms: int  # the longest interval of the members that have these sessions
    proven: bool  # T2: one of its members has read back a record that it sent at most one interval ago


class _Silent(NamedTuple):
    """Names a session that may be evicted: it has been silent for `waited_ms`, which is at least `need_ms`."""

    group: Group
    session: Session
    waited_ms: int
    need_ms: int


class Orphans:
    """Waits on the sessions of one log and evicts silent ones."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._clock = WaitClock(0)
        self._interval_ms = 0
        # session -> (its `extended`, the clock's value when the wait began)
        self._waits: dict[int, tuple[int, int]] = {}
        self._sent: dict[tuple[int, int], int] = {}  # (session, extended) -> when its Evict was sent, in ms
        self._look_due_ms = 0

    def tick(self, now: Instant, me: Presence) -> list[tuple[str, Evict]]:
        """Counts the time waited (T2) and checks all sessions every tenth of an interval. Returns the Evicts to send
        now, by group."""
        if me.interval_ms != self._interval_ms:  # waits counted with another interval do not compare
            self._interval_ms, self._clock = me.interval_ms, WaitClock(me.interval_ms)
            self._waits.clear()
            self._look_due_ms = now.mono_ms
        self._clock.advance(now, me.proven)
        if now.mono_ms < self._look_due_ms:
            return []
        self._look_due_ms = now.mono_ms + self._clock.step_ms_max
        silent = self._find_silent()
        self._sent = {key: sent_ms for key, sent_ms in self._sent.items() if key[0] in silent}
        return self._evict(silent, now.mono_ms, me) if silent else []

    def _find_silent(self) -> dict[int, _Silent]:
        """Returns the sessions, by id, that may be evicted. A wait begins when this process first reads a session, and
        again with each extension (T1)."""
        clock, waits, live, found = self._clock, self._waits, 0, {}
        counted_ms, least_ms = clock.counted_ms, EVICT_INTERVALS * self._interval_ms
        for group in self.world.groups.values():  # a log may have thousands of groups: no calls here
            for session in group.sessions.values():
                live += 1
                known = waits.get(session.id)
                if known is None or known[0] != session.extended:
                    waits[session.id] = (session.extended, counted_ms)
                elif counted_ms - known[1] > least_ms:
                    waited_ms = clock.waited_ms(known[1])
                    need_ms = max(least_ms, EVICT_INTERVALS * session.join.interval_ms)
                    if waited_ms >= need_ms:
                        found[session.id] = _Silent(group, session, waited_ms, need_ms)
        if len(waits) > live:
            there = {session for group in self.world.groups.values() for session in group.sessions}
            self._waits = {session: wait for session, wait in waits.items() if session in there}
        return found

    def _evict(self, silent: dict[int, _Silent], now_ms: int, me: Presence) -> list[tuple[str, Evict]]:
        """Returns the Evicts that are due, by group. Rank k waits k thirds of an interval longer, so that usually one
        process sends it (T4)."""
        due: list[tuple[str, Evict]] = []
        third_ms = self._interval_ms // HEARTBEATS_PER_INTERVAL
        rank_ms = self._rank(silent, me.sessions) * third_ms
        for number, (group, session, waited_ms, need_ms) in sorted(silent.items()):
            if group.opaque_at != NONE or not me.sessions.isdisjoint(group.sessions):
                continue  # opaque, so nobody can evict there; or this process has a member there, which evicts (T4)
            key = (number, session.extended)
            # never sent, or a third of an interval ago (T17)
            again = key not in self._sent or now_ms - self._sent[key] >= third_ms
            if waited_ms >= need_ms + rank_ms and again and len(due) < EVICTS_MAX:
                self._sent[key] = now_ms
                due.append((group.name, Evict(number, session.extended, waited_ms, me.client_id[:BY_CHARS_MAX])))
        return due

    def _rank(self, silent: dict[int, _Silent], mine: set[int]) -> int:
        """Returns how many clients have a session, not silent, that is older than all of this process's own."""
        first = min(mine)
        sessions = (session for group in self.world.groups.values() for session in group.sessions.values())
        return len({session.join.client_id for session in sessions if session.id < first and session.id not in silent})
