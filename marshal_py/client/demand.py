"""What an iteration asks for: every message (Demand), or a limited number (LimitedDemand). consume.py has a third kind.

`Consumer` delivers, and asks its demand at every step: when the iteration is over, how many messages may come next, and
how to wait for more (waits.py). Called without the lock.
"""

from __future__ import annotations

import time

from marshal_py.client.buffers import ENDLESS, Allowance, Reserved, message_bytes
from marshal_py.client.idle_heartbeat import IdleHeartbeat
from marshal_py.client.intake import Intake
from marshal_py.client.requests import Request
from marshal_py.client.waits import Steps


class Demand:
    """Asks for every message, without an end."""

    intake: Intake
    watch: IdleHeartbeat | None

    verb = "iteration"
    looks = True  # whether a slow user's consumer reads the source's queue to its end (prefetch.py)

    def __init__(self, intake: Intake, watch: IdleHeartbeat | None = None) -> None:
        self.intake, self.watch = intake, watch

    def over(self) -> bool:
        """Tells whether the iteration ends now."""
        return False

    def refill(self) -> Steps[None]:
        """Brings messages without waiting, if that is due before the next are delivered."""
        yield from ()

    def allows(self) -> Allowance:
        return ENDLESS

    def ends(self, shut: bool) -> bool:
        """Tells whether the iteration ends because nothing can be delivered now.

        `shut`: messages are buffered, and the gate is shut, or the next one is larger than what was allowed.
        """
        return False

    def delivered(self, reserved: Reserved) -> None:
        """Notes what was delivered of `reserved`."""

    def resume(self) -> None:
        """Notes that the user is in the call again, and waits for messages only from now on."""
        if self.watch is not None:
            self.watch.message()

    def wait(self, timeout_s: float) -> Steps[None]:
        """Waits up to `timeout_s` seconds for messages."""
        yield from self.intake.pull(timeout_s)

    def _watched(self, came: bool) -> None:
        if self.watch is not None:
            self.watch.message() if came else self.watch.check()


class LimitedDemand(Demand):
    """Asks for what a `fetch` asks for, to deliver each message as it comes."""

    verb = "fetch_each"

    def __init__(self, intake: Intake, request: Request, watch: IdleHeartbeat | None) -> None:
        super().__init__(intake, watch)
        self._left, self._left_bytes = request.max_messages, request.max_bytes
        self._deadline = time.monotonic() + request.expires_s
        self._asked = self._some = False

    def over(self) -> bool:
        return self._left <= 0 or (self._some and self._left_bytes is not None and self._left_bytes <= 0)

    def allows(self) -> Allowance:
        return Allowance(self._left, self._left_bytes, not self._some)

    def ends(self, shut: bool) -> bool:
        full = shut and self._some and self._left_bytes is not None
        return full or (self._asked and time.monotonic() >= self._deadline)

    def delivered(self, reserved: Reserved) -> None:
        self._left -= reserved.taken
        self._some = self._some or reserved.taken > 0
        if self._left_bytes is not None:
            self._left_bytes -= sum(map(message_bytes, reserved.raw()))

    def wait(self, timeout_s: float) -> Steps[None]:
        self._asked = True  # once in any case: without time to wait it takes what is there
        left_s = self._deadline - time.monotonic()
        self._watched(bool((yield from self.intake.pull(max(0.0, min(timeout_s, left_s)), self._left))))
