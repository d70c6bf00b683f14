"""Reads the clocks of this machine. protocol/ reads no clock: it gets an Instant from here as an argument."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from marshal_py.protocol.wire.identity import Instant

# A clock that counts the time while the machine is suspended: CLOCK_BOOTTIME on Linux, CLOCK_MONOTONIC on macOS. Where
# there is none, the wall clock still shows a suspension (T7 takes the greatest difference of the three clocks).
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def mono_ms() -> int:
    """Returns the ms of the monotonic clock."""
    return time.monotonic_ns() // 1_000_000


class SystemClock:
    """Implements Clock by the clocks of the operating system."""

    # A C function, not a method around one: it is called before every message.
    boot_ns: Callable[[], int] = staticmethod(
        time.monotonic_ns if _BOOT_CLOCK is None else partial(time.clock_gettime_ns, _BOOT_CLOCK)
    )

    def now(self) -> Instant:
        return Instant(mono_ms(), self.boot_ns() // 1_000_000, time.time_ns() // 1_000_000)
