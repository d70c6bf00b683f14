"""How one consumer ends: stopped, drained, asked to by a signal, or by an error. Waits for what the member does.

The member decides what is released and when; this file tells it, and keeps what the user hears of it afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from marshal_py.client.consumer_driver import ConsumerDriver
from marshal_py.client.context import Context
from marshal_py.client.forks import watch_forks
from marshal_py.errors import ConsumerClosed

LEAVE_TIMEOUT_S: Final = 10.0
LEAVE_SLICE_S: Final = 0.1  # a consumer that waits to have left looks up so often: for signals, and to step its member


class Ending:
    """The end of one consumer, from the wish to the closed source."""

    def __init__(self, context: Context, driver: ConsumerDriver, closed: Callable[[], object]) -> None:
        """`closed` is called once nothing can be fetched any more."""
        self._context = context
        self._driver = driver
        self._closed = closed
        self.reason = ""  # why the consumer is closed; "" while it is not
        self.done = False  # it has left, and its source is closed
        self.draining = False
        self.drain_until = 0.0  # monotonic
        self._stop_at: float | None = None  # monotonic, by a signal handler: ends iteration, touches no lock
        self._forked = False
        watch_forks(self)

    def forked(self) -> None:
        """In a child it is over: loops that ask end, and every verb raises UsedAfterFork."""
        self._forked = True

    @property
    def over(self) -> bool:
        """Whether the consumer has ended, by itself or by the user."""
        return bool(self.reason) or self._driver.ended or self._forked

    def stop(self, timeout_s: float) -> None:
        """Once it has returned it does nothing. If it was interrupted, the next call does what is left."""
        self.reason = self.reason or "it was stopped"
        self._leave("stopped", 0.0, timeout_s)

    def drain(self, wait_s: float) -> None:
        """From now on nothing is fetched; `finish_drain` does the rest."""
        self.drain_until = time.monotonic() + wait_s
        self.draining = True

    def finish_drain(self) -> None:
        wait_s = max(0.0, self.drain_until - time.monotonic())
        self.reason = self.reason or "it was drained"
        self._leave("drained", wait_s, wait_s + LEAVE_TIMEOUT_S)

    def _leave(self, reason: str, wait_s: float, timeout_s: float) -> None:
        """Stops delivery, waits for handlers, releases, leaves, and reads that it has left (T16, T17)."""
        if self.done:
            return
        context, driver = self._context, self._driver
        deadline = time.monotonic() + timeout_s
        with context.outbox, context.lock:
            if not driver.ended:
                driver.member.leave(context.clock.now(), reason, round(wait_s * 1000))
                driver.kick()
            while not driver.ended and time.monotonic() < deadline and driver.log not in context.broken:
                context.changed.wait(min(LEAVE_SLICE_S, max(0.0, deadline - time.monotonic())))
                if not driver.ended:
                    driver.kick()
            if not driver.ended:
                driver.ended = True
        self._close_source()

    def _close_source(self) -> None:
        self._driver.close()
        self._closed()
        self.done = True

    def request_stop(self, hand_over_s: float) -> None:
        """Takes no lock: a signal handler calls it."""
        self._stop_at = 0.0 if self._stop_at is not None else time.monotonic() + hand_over_s

    def must_stop(self) -> bool:
        """Whether a requested stop is due: nobody takes over, everything was taken over, or the time is up."""
        if self._stop_at is None:
            return False
        if time.monotonic() >= self._stop_at:
            return True
        member = self._driver.member
        with self._context.outbox, self._context.lock:
            if not member.stop_prepared:
                member.prepare_stop()
                self._driver.kick()
            return member.ready_to_stop()

    def raise_if_ended(self) -> None:
        """Raises what ended the consumer, once, then ConsumerClosed; before that what a partition suffered from."""
        if self.reason:
            raise ConsumerClosed("Consumer", self.reason)
        if self._driver.troubles:
            raise self._driver.troubles.popleft()
        if self._driver.ended:
            error = self._driver.error
            self.reason = str(error) if error is not None else "it was stopped"
            self._close_source()
            if error is not None:
                raise error
            raise ConsumerClosed("Consumer", self.reason)
