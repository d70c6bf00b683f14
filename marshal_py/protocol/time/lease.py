"""The two clocks of the protocol: an owner's lease, and the wait of everybody else (PROTOCOL.md 7).

Both take the time as an argument. A record is sent, then appended, then read. The lease counts from the send and a wait
counts from the read, so an owner is fenced before any wait on it is over, whatever the brokers' clocks say.
"""

from __future__ import annotations

from marshal_py.protocol.wire.identity import Instant

STEPS_PER_INTERVAL = 10  # a step counts as at most a tenth of the interval, however long the process slept (T2)


class Lease:
    """Holds one session's right to deliver, by its owner's own clocks (T6-T8)."""

    __slots__ = ("interval_ms", "started")

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms: int = interval_ms
        self.started: Instant | None = None

    def renew(self, sent: Instant) -> None:
        """Moves the start of the lease to `sent`, unless the lease already starts later than `sent` (T6).

        `sent`: when a record went to the producer. The caller has read this record, and the fold accepted that it
        extends the session.
        """
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
        """Returns the `began_at` of a wait that begins at `now`, between two calls of `advance` (T1).

        That is the value that `counted_ms` would have if the step ended at `now`.
        """
        last = self.last_mono_ms
        return self.counted_ms + (0 if last is None else min(max(0, now.mono_ms - last), self.step_ms_max))

    def waited_ms(self, began_at: int) -> int:
        """Returns for how many ms the wait that began at `began_at` has lasted.

        The result is 1 ms less than the difference of the two values, because both are rounded down.
        """
        return max(0, self.counted_ms - max(began_at, self.floor_ms) - 1)

    def over_at(self, began_at: int, wait_ms: int) -> int:
        """Returns the value of `counted_ms` at which the wait that began at `began_at` will have lasted `wait_ms`.

        The wait lasts longer than that if an unproven step starts it again meanwhile.
        """
        return max(began_at, self.floor_ms) + wait_ms + 1
