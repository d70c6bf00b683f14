"""The clocks of this machine, read in one place. The heart takes an Instant and reads none."""

from __future__ import annotations

import time

from marshal_py.protocol.identity import Instant

# Linux counts suspended time on CLOCK_BOOTTIME, macOS on CLOCK_MONOTONIC_RAW's sibling CLOCK_MONOTONIC; where there is
# no such clock the wall clock still shows a suspension (T7 takes the greatest difference).
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


class SystemClock:
    """The real thing."""

    def boot_ms(self) -> int:
        boot_ns = time.monotonic_ns() if _BOOT_CLOCK is None else time.clock_gettime_ns(_BOOT_CLOCK)
        return boot_ns // 1_000_000

    def now(self) -> Instant:
        mono_ns = time.monotonic_ns()
        boot_ns = mono_ns if _BOOT_CLOCK is None else time.clock_gettime_ns(_BOOT_CLOCK)
        return Instant(mono_ns // 1_000_000, boot_ns // 1_000_000, time.time_ns() // 1_000_000)
