"""The clocks of this machine, read in one place. The heart takes an Instant and reads none."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from marshal_py.protocol.identity import Instant

# Linux counts suspended time on CLOCK_BOOTTIME, macOS on CLOCK_MONOTONIC_RAW's sibling CLOCK_MONOTONIC; where there is
# no such clock the wall clock still shows a suspension (T7 takes the greatest difference).
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


class SystemClock:
    """The real thing."""

    # A C function, not a method around one: it is called before every message.
    boot_ns: Callable[[], int] = staticmethod(
        time.monotonic_ns if _BOOT_CLOCK is None else partial(time.clock_gettime_ns, _BOOT_CLOCK)
    )

    def now(self) -> Instant:
        return Instant(time.monotonic_ns() // 1_000_000, self.boot_ns() // 1_000_000, time.time_ns() // 1_000_000)
