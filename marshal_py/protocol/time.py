"""Leases, heartbeats and silence: when a client may deliver, and when others take it for dead (PROTOCOL.md 7).

A client's signs of life are the Joins, heartbeats and probes that it sends. A probe is a Note: who reads it back has
read the log to where it ended when the probe was sent. This file holds the lease and decides when a heartbeat or a
probe is due (T6-T10). It remembers what was sent, so that a record which a clone wrote for the same session is
recognised (T18). It decides nothing about partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum

from marshal_py.protocol.fold.world import Group, Partition, Session, Topic, World
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition
from marshal_py.protocol.wire.records import EVICT_INTERVALS, INSTANCE_BYTES

# --- The two clocks of the protocol: an owner's lease, and the wait of everybody else (PROTOCOL.md 7).
#
# Both take the time as an argument. A record is sent, then appended, then read. The lease counts from the send and a
# wait counts from the read, so an owner is fenced before any wait on it is over, whatever the brokers' clocks say.

STEPS_PER_INTERVAL = 10  # a step counts as at most a tenth of the interval, however long the process slept (T2)


class Lease:
    """One session's right to deliver, by its owner's own clocks (T6-T8)."""

    __slots__ = ("interval_ms", "started")

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms: int = interval_ms
        self.started: Instant | None = None

    def renew(self, sent: Instant) -> None:
        """Moves the start to `sent`, when an accepted record that extends the session went to the producer; never back
        (T6)."""
        if self.started is None or sent.mono_ms > self.started.mono_ms:
            self.started = sent

    def end(self) -> None:
        self.started = None

    def valid(self, now: Instant) -> bool:
        """Returns whether a delivery may begin at `now`: at most one interval has passed since the start (T8)."""
        return self.left_ms(now) >= 0

    def left_ms(self, now: Instant) -> int:
        """Returns how many ms of the interval are left; negative when it is over or the lease has no start."""
        return -1 if self.started is None else self.interval_ms - now.since_ms(self.started)


class WaitClock:
    """Counts the time that a client has waited; each call of `advance` ends a step and adds it (T1-T3).

    `counted_ms` is the sum of the steps. Who begins a wait keeps the value of `counted_ms` at that moment; the methods
    call it `began_at`. A step is proven if, at its end, an own record that was sent at most one interval ago has been
    read back (T2).

    Invariants:
      1  `counted_ms` never grows faster than the monotonic clock
      2  a step of the clock counts as at most a tenth of the interval
      3  after an unproven step every wait that began before it counts from the end of that step
    """

    __slots__ = ("counted_ms", "floor_ms", "last_mono_ms", "step_ms_max")

    def __init__(self, interval_ms: int) -> None:
        self.step_ms_max: int = interval_ms // STEPS_PER_INTERVAL
        self.counted_ms: int = 0
        self.floor_ms: int = 0
        self.last_mono_ms: int | None = None

    def advance(self, now: Instant, proven: bool) -> None:
        """Ends a step at `now`. If the step is not `proven`, all waits start again."""
        last = self.last_mono_ms
        self.last_mono_ms = now.mono_ms
        if last is not None:
            self.counted_ms += min(max(0, now.mono_ms - last), self.step_ms_max)
        if not proven:
            self.floor_ms = self.counted_ms

    def counted_at(self, now: Instant) -> int:
        """Returns `counted_ms` as if the step ended now: the `began_at` of a wait between two calls of `advance`
        (T1)."""
        last = self.last_mono_ms
        return self.counted_ms + (0 if last is None else min(max(0, now.mono_ms - last), self.step_ms_max))

    def waited_ms(self, began_at: int) -> int:
        """Returns how long a wait has lasted; 1 ms less than the difference, as both values are rounded down."""
        return max(0, self.counted_ms - max(began_at, self.floor_ms) - 1)

    def over_at(self, began_at: int, wait_ms: int) -> int:
        """Returns the `counted_ms` at which a wait will have lasted `wait_ms`, unless an unproven step restarts it."""
        return max(began_at, self.floor_ms) + wait_ms + 1


HEARTBEATS_PER_INTERVAL = 3  # two may be lost or late before the client is fenced (T9)
QUIET_INTERVALS = 4  # of silence after a revival (T10), so that others can evict: they need 2, and more by rank
SENT_KEPT = 4_096  # heartbeats whose send time is kept: 45 minutes at the default interval
INSTANCES_KEPT = 1_024  # own Joins; if an older one arrives late, others must evict its session
PROBE_BYTES = 8  # random bytes of a probe's text
NONCE_RANDOM_BITS = 32  # low bits of a nonce: a cloned machine continues the same counter, with other bits
RANDOM_BITS = 20  # low bits of a sequence: a cloned machine continues the same counter, with other bits
RANDOM_BYTES = 3  # drawn for RANDOM_BITS


def heartbeats_per_s(world: World) -> float:
    """Returns how many heartbeats all live sessions of a log send in a second."""
    intervals_ms = (session.join.interval_ms for group in world.groups.values() for session in group.sessions.values())
    return sum(1000 * HEARTBEATS_PER_INTERVAL / interval_ms for interval_ms in intervals_ms)


class Due(IntEnum):
    """Names the sign of life that the client should send."""

    NOTHING = 0
    HEARTBEAT = 1
    PROBE = 2


class _Revival(IntEnum):
    """Names the steps by which a client that is not healthy comes back: a probe, then two heartbeats (T10)."""

    NONE = 0
    PROBING = 1
    FIRST = 2
    SECOND = 3


class Liveness:
    """Tracks the signs of life that one client sends and reads back."""

    def __init__(self, interval_ms: int, draw: Callable[[int], bytes]) -> None:
        """Begins without a session. `draw(n)` returns n random bytes; the core makes none itself."""
        self.interval_ms = interval_ms
        self.lease: Lease = Lease(interval_ms)
        self.instances: dict[bytes, Instant] = {}  # the newest Joins of this client, by instance id
        self.newest_instance: bytes = b""
        self.last_accepted: Instant | None = None  # send time of the newest own sign of life that was accepted (T9)
        self.last_proof: Instant | None = None  # send time of the newest own record that was read back (T2)
        self.last_sent: Instant | None = None
        self._draw = draw
        self._sent: dict[int, Instant] = {}
        self._counter = 0
        self._nonces = 0
        self._probes: dict[str, Instant] = {}
        self._probe_sent: Instant | None = None
        self._probe_read = False
        self._probing_since_ms = 0  # when probing began; a probe that was sent before does not count
        self._revival = _Revival.NONE
        self._revival_sent: Instant | None = None
        self._revival_sequence = -1
        self._revival_read = False

    # --- sending; `now` is taken before the record goes to the producer

    def new_instance(self, now: Instant) -> bytes:
        """Returns a fresh instance id for a Join that is about to be sent (T14)."""
        self.newest_instance = self._draw(INSTANCE_BYTES)
        self.instances[self.newest_instance] = now
        if len(self.instances) > INSTANCES_KEPT:
            del self.instances[next(iter(self.instances))]
        return self.newest_instance

    def new_sequence(self, now: Instant) -> int:
        """Returns the sequence number of a Heartbeat that is about to be sent; keeps the send time `now` for it."""
        self._counter += 1
        sequence = (
            self._counter << RANDOM_BITS
            | int.from_bytes(self._draw(RANDOM_BYTES), "big") >> 8 * RANDOM_BYTES - RANDOM_BITS
        )
        self._sent[sequence] = now
        if len(self._sent) > SENT_KEPT:
            del self._sent[next(iter(self._sent))]
        self.last_sent = now
        if self._revival in (_Revival.FIRST, _Revival.SECOND) and self._revival_sequence < 0:
            self._revival_sequence = sequence
        return sequence

    def new_nonce(self) -> int:
        """Returns a number for a ClaimingMessages, greater than earlier ones (D2); random low bits tell a clone's."""
        self._nonces += 1
        return self._nonces << NONCE_RANDOM_BITS | int.from_bytes(self._draw(NONCE_RANDOM_BITS // 8), "big")

    def new_probe(self, now: Instant) -> str:
        """Returns the random text of a probe that is about to be sent; keeps the send time `now` for it."""
        nonce = self._draw(PROBE_BYTES).hex()
        self._probes[nonce] = now
        self._probe_sent = now
        while len(self._probes) > SENT_KEPT:
            del self._probes[next(iter(self._probes))]
        return nonce

    # --- reading back

    def read_join(self, instance: bytes) -> Instant | None:
        """Takes the instance id of a Join that was read; returns when this client sent it, None if it did not."""
        sent = self.instances.get(instance)
        if sent is not None:
            self._prove(sent)
        return sent

    def read_heartbeat(self, sequence: int, accepted: bool, extended: bool) -> bool:
        """Takes an own session's Heartbeat; returns False if this client did not send it (T18). `accepted` by the fold;
        `extended`: the lease is renewed."""
        sent = self._sent.get(sequence)
        if sent is None:
            oldest = next(iter(self._sent), None)
            return oldest is not None and sequence < oldest  # a late copy of a heartbeat that is no longer kept
        self._prove(sent)
        if accepted:
            if self.last_accepted is None or sent.mono_ms > self.last_accepted.mono_ms:
                self.last_accepted = sent
            if extended:
                self.lease.renew(sent)
        if sequence == self._revival_sequence:
            self._revival_read = True
        return True

    def read_probe(self, text: str) -> None:
        """Takes the text of a probe that was read; ignores the probes of other clients."""
        sent = self._probes.pop(text, None)
        if sent is None:
            return
        if self.last_accepted is None:  # T2: without a session; a member's proofs are Joins and heartbeats
            self._prove(sent)
        if self._revival is _Revival.PROBING and sent.mono_ms >= self._probing_since_ms:
            self._probe_read = True

    def _prove(self, sent: Instant) -> None:
        if self.last_proof is None or sent.mono_ms > self.last_proof.mono_ms:
            self.last_proof = sent

    # --- judging

    def proven(self, now: Instant) -> bool:
        """Returns whether an own record sent at most one interval ago was read back (T2)."""
        return self.last_proof is not None and now.since_ms(self.last_proof) <= self.interval_ms

    def healthy(self, now: Instant) -> bool:
        """Returns whether an own Join or Heartbeat sent at most one interval ago was read back as accepted (T9)."""
        return self.last_accepted is not None and now.since_ms(self.last_accepted) <= self.interval_ms

    def awaits_echo(self) -> bool:
        """Returns whether the newest own sign of life was not read back yet. It may also be lost."""
        sent, accepted = self.last_sent, self.last_accepted
        return sent is not None and (accepted is None or sent.mono_ms > accepted.mono_ms)

    def begin_session(self, sent: Instant) -> None:
        """Starts the lease of a new session at `sent`, when its Join was sent."""
        self.lease.end()
        self.lease.renew(sent)
        self.last_accepted = sent
        self.last_sent = sent
        self._revival = _Revival.NONE

    def end_session(self) -> None:
        self.lease.end()
        self.last_accepted = None
        self._sent.clear()

    def due(self, now: Instant) -> Due:
        """Returns the sign of life to send now for the live session (T9, T10)."""
        if self.healthy(now):
            self._revival = _Revival.NONE
            third_ms = self.interval_ms // HEARTBEATS_PER_INTERVAL
            if self.last_sent is None or now.mono_ms - self.last_sent.mono_ms >= third_ms:
                return Due.HEARTBEAT
            return Due.NOTHING
        return self._revive(now)

    def _revive(self, now: Instant) -> Due:
        """Returns what an unhealthy client sends to come back (T10): probes, which extend nothing, until one is read
        back; two heartbeats; then nothing for QUIET_INTERVALS."""
        if self._revival in (_Revival.FIRST, _Revival.SECOND):
            assert self._revival_sent is not None
            if self._revival is _Revival.FIRST and self._revival_read:
                self._send_revival(_Revival.SECOND, now)
                return Due.HEARTBEAT
            if now.mono_ms - self._revival_sent.mono_ms < QUIET_INTERVALS * self.interval_ms:
                return Due.NOTHING
            self._revival = _Revival.NONE
        if self._revival is _Revival.NONE:
            self._revival, self._probe_read, self._probing_since_ms = _Revival.PROBING, False, now.mono_ms
            return Due.PROBE
        if self._probe_read:
            self._send_revival(_Revival.FIRST, now)
            return Due.HEARTBEAT
        assert self._probe_sent is not None
        # As often as a heartbeat: a client that probed less often would see an outage end later than others do (V6).
        third_ms = self.interval_ms // HEARTBEATS_PER_INTERVAL
        return Due.PROBE if now.mono_ms - self._probe_sent.mono_ms >= third_ms else Due.NOTHING

    def _send_revival(self, step: _Revival, now: Instant) -> None:
        self._revival, self._revival_sent = step, now
        self._revival_sequence, self._revival_read = -1, False

    def deadline_ms(self, now: Instant) -> int:
        """Returns the monotonic ms at which `due` should be asked again at the latest."""
        third_ms = self.interval_ms // HEARTBEATS_PER_INTERVAL
        if self.last_sent is None or not self.healthy(now):
            return now.mono_ms + third_ms
        return self.last_sent.mono_ms + third_ms


# --- Keeps the waits of one client: on silent sessions, on the end of a pause, on partitions that nobody owns.
#
# Every wait is counted on the WaitClock from the moment when this client first read the value that it waits on
# (PROTOCOL.md T1-T5, A2). A session is waited out when it may be evicted, after twice its interval. Nothing is
# decided here: rebalance.py and member.py act when a wait is long enough.


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

    def credit_pause(self, pause_change: int, waited_ms: int, now: Instant) -> None:
        """Continues the own wait on a pause from another client's, if that is longer (T5). It counts on from `now`, and
        not from the end of the last step: what lies between is in the other wait already."""
        counted = self.clock.counted_at(now)
        own_ms = self._pause[2] + max(0, counted - max(self._pause[1], self.clock.floor_ms) - 1)
        if self._pause[0] == pause_change and waited_ms > own_ms:
            self._pause = (pause_change, counted, waited_ms)

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
