"""The three clocks of one simulated machine, in whole ms, computed from the true time that the caller gives.

The monotonic clock runs at its own rate and stops while the machine sleeps; the boot clock does not stop; the wall
clock jumps when it is set (PROTOCOL.md T7).
"""

from __future__ import annotations

from typing import Final

from marshal_py.protocol.wire.identity import Instant

MILLION = 1_000_000
new: Final = tuple.__new__  # half the time of Instant(...), several times per event


class MachineClock:
    """Shows the clocks of one machine.

    Every machine's clocks start at other values, so that code which compares times of two machines fails.
    """

    __slots__ = ("_asleep_ms", "_newest", "_newest_ms", "_rate", "_start_ms", "_wall_shift_ms", "_zero_ms")

    def __init__(self, now_ms: int, rate_ppm: int, zero_ms: int) -> None:
        self._start_ms = now_ms
        self._rate = MILLION + rate_ppm
        self._zero_ms = zero_ms
        self._asleep_ms = 0
        self._wall_shift_ms = 7 * zero_ms
        self._newest_ms, self._newest = -1, Instant(0, 0, 0)  # many events share one time

    def read(self, now_ms: int) -> Instant:
        if now_ms == self._newest_ms:
            return self._newest
        boot_ms = self._zero_ms + (now_ms - self._start_ms) * self._rate // MILLION
        self._newest_ms = now_ms
        self._newest = new(Instant, (boot_ms - self._asleep_ms, boot_ms, boot_ms + self._wall_shift_ms))
        return self._newest

    def true_ms(self, mono_ms: int) -> int:
        """Returns the first ms of true time at which the monotonic clock shows at least `mono_ms`."""
        run_ms = mono_ms - self._zero_ms + self._asleep_ms
        return self._start_ms + -(-run_ms * MILLION // self._rate)

    def sleep(self, duration_ms: int) -> None:
        """Notes that the machine has slept until now. The monotonic clock did not run meanwhile."""
        self._asleep_ms += duration_ms * self._rate // MILLION
        self._newest_ms = -1

    def set_wall(self, by_ms: int) -> None:
        self._wall_shift_ms += by_ms
        self._newest_ms = -1
