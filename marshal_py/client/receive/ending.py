"""How one consumer ends: by a stop, a drain, a signal or an error.

This file tells the member to leave, waits until it has left, and keeps the reason for later calls of the user. The
member decides what it releases and when. A drain waits for the handlers of delivered messages; a stop does not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from math import inf
from typing import Final

from marshal_py.client.connection.context import END_S_MIN, Context, watch_forks
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.values.info import in_flight
from marshal_py.client.values.requests import check_timeout
from marshal_py.client.values.waits import Change, Steps
from marshal_py.errors import ConsumerClosed

LEAVE_TIMEOUT_S: Final = 10.0
HAND_OVER_S: Final = 1.0  # a hand-over takes some ms; a deployment must not wait for one that does not come
LETTERS_TIMEOUT_S: Final = 2.0  # many round trips of a cluster; the next owner repeats the letters that are not written
LEAVE_SLICE_S: Final = 0.1  # how often a consumer that waits until it has left wakes up: for signals, and to step


class Ending:
    """Ends one consumer, from the request until its data source is closed."""

    def __init__(self, context: Context, driver: ConsumerDriver, closed: Callable[[], object]) -> None:
        """Of the consumer that `driver` drives. `closed`: called once nothing can be fetched."""
        self._context = context
        self._driver = driver
        self._closed = closed
        self.reason: str = ""  # why the consumer is closed; "" while it is not
        self.done: bool = False  # it has left, and its source is closed
        self.draining: bool = False
        self.drain_until: float = 0.0  # monotonic
        self._why = "stopped"  # what the log says of a stop
        self._stop_at: float | None = None  # monotonic; a signal handler sets it, so without the lock
        self._forked = False
        self._closing = threading.RLock()  # held by `close` alone
        self.fronts: int = 0  # whoever can stop it: a Consumer, a Planner that it has become, a test's cluster
        self.dispose: Callable[[Ending], object] = Ending.close  # how a consumer that has ended by itself is closed
        watch_forks(self)

    def forked(self) -> None:
        """Makes iterations end and every method raise UsedAfterFork, in a forked child process. Called in the child."""
        self._forked = True

    @property
    def over(self) -> bool:
        """Returns whether the consumer has ended, by an error, by the user or by a fork."""
        return bool(self.reason) or self._driver.ended or self._forked

    @property
    def stopping(self) -> bool:
        """Returns whether it has ended, drains, or was asked to; False while an error waits for the user's next
        call."""
        error_waits = self._driver.ended and self._driver.error is not None and not self.reason and not self._forked
        return self.draining or self.must_stop() or (self.over and not error_waits)

    def because(self, error: BaseException | None) -> None:
        """Has the log say that an error of the program stops it: its class alone, for its text may hold anything."""
        if isinstance(error, Exception):
            self._why = f"stopped: {type(error).__name__}"

    def stop(self, timeout_s: float) -> Steps[None]:
        """Stops, and waits until it has left, within `timeout_s`; `close` must follow. A second call completes an
        interrupted one. Raises InvalidOption before anything."""
        check_timeout(timeout_s)
        self.reason = self.reason or "it was stopped"
        deadline = self._context.monotonic() + timeout_s
        yield from self._write_letters(min(timeout_s, LETTERS_TIMEOUT_S))
        yield from self._leave(self._why, 0.0, max(0.0, deadline - self._context.monotonic()))

    def _write_letters(self, timeout_s: float) -> Steps[None]:
        """Waits until dead letters that are on their way are written, for `timeout_s` seconds at most."""
        deadline = self._context.monotonic() + timeout_s
        while True:
            with self._context.lock:
                left_s = deadline - self._context.monotonic()
                if self._driver.ended or left_s <= 0 or not self._driver.claims.writing:
                    return
                seen = self._context.changes
            yield Change(min(LEAVE_SLICE_S, left_s), seen)

    def drain(self, wait_s: float) -> None:
        """Notes that the consumer drains, for at most `wait_s` seconds; `finish_drain` releases its claims later."""
        self.drain_until = self._context.monotonic() + wait_s
        self.draining = True

    def drain_left_s(self) -> float:
        return max(0.0, self.drain_until - self._context.monotonic())

    def finish_drain(self) -> Steps[None]:
        """Waits for the handlers, then releases the claims and leaves the group. `close` must follow."""
        wait_s = self.drain_left_s()
        self.reason = self.reason or "it was drained"
        yield from self._leave("drained", wait_s, min(LEAVE_TIMEOUT_S, max(END_S_MIN, wait_s)))

    def _leave(self, reason: str, wait_s: float, timeout_s: float) -> Steps[None]:
        """Has the member leave: handlers have `wait_s`, then the claims are released. Returns when it read back that it
        left, within `timeout_s` or what the Marshal's ends have left (T16, T17; EndBudget). Logs what was not acked."""
        if self.done:
            return
        context, driver, member = self._context, self._driver, self._driver.member
        handlers_until, deadline = context.monotonic() + wait_s, inf
        with context.outbox, context.lock:
            abandoned = driver.counters.abandoned
            if not driver.ended:
                member.leave(context.clock.now(), reason, round(wait_s * 1000))
                driver.kick()
        while True:
            with context.outbox, context.lock:
                now_s, now_ms = context.monotonic(), context.clock.now().mono_ms
                busy = any(not claim.sealed and not claim.drained(now_ms) for claim in member.claims.values())
                if deadline == inf and (now_s >= handlers_until or not busy):
                    deadline = context.end_budget.deadline(timeout_s)
                left_s = min(deadline, max(handlers_until, now_s + LEAVE_SLICE_S)) - now_s
                if member.ended:
                    context.end_budget.answered()
                if driver.ended or left_s <= 0 or driver.log in context.broken:
                    driver.ended = True
                    unacked = driver.counters.abandoned - abandoned + sum(map(in_flight, member.claims.values()))
                    break
                seen = context.changes
            yield Change(min(LEAVE_SLICE_S, left_s), seen)
            driver.kick()
        if unacked:
            context.logger.info(
                "group %s: %s has left (%s); messages that were delivered and not acked: %d",
                *(member.name, member.options.client_id, reason, unacked),
                extra={"marshal_group": member.name, "marshal_client_id": member.options.client_id},
            )

    def close(self) -> None:
        """Closes the data source, once the consumer has left. Waits for librdkafka, and for another thread's close."""
        with self._closing:
            if not self.done:
                self._driver.close()
                self._closed()
                self.done = True

    def front_gone(self) -> bool:
        """From a finaliser, without a lock: the program dropped an object; returns whether it was the last of a running
        one. Then the background thread drains it and its worker closes it, also after an interrupted stop."""
        self.fronts -= 1
        if self.fronts or self.done or self._forked or sys.is_finalizing():
            return False
        running = not self.over
        self._driver.dropped = self._close_dropped
        self._driver.close_dropped()
        return running

    def _close_dropped(self) -> None:
        self.reason = self.reason or "it was dropped"
        self.dispose(self)

    def request_stop(self, hand_over_s: float = HAND_OVER_S) -> None:
        """Asks for a stop in `hand_over_s` at most, so that others take over before (A6); at once by 0 or a second
        call. Takes no lock: signal handlers call it."""
        self._stop_at = 0.0 if self._stop_at is not None else self._context.monotonic() + hand_over_s

    @property
    def asked(self) -> bool:
        """Returns whether somebody has asked for a stop."""
        return self._stop_at is not None

    def must_stop(self) -> bool:
        """Returns whether a requested stop is due: its time is up, no claim is left, nobody can take one, or nothing
        may be delivered. The first call lets others take over."""
        if self._stop_at is None:
            return False
        if self._context.monotonic() >= self._stop_at:
            return True
        member = self._driver.member
        with self._context.outbox, self._context.lock:
            if not member.stop_prepared:
                member.prepare_stop()
                self._driver.kick()
            return member.ready_to_stop()

    def raise_if_stopping(self) -> None:
        """Raises ConsumerClosed once nothing more is fetched, because the consumer drains or was asked to stop."""
        if self.draining or self.must_stop():
            raise ConsumerClosed("Consumer", "it drains" if self.draining else "it was asked to stop")

    def check_open(self) -> None:
        """Raises ConsumerClosed once the consumer has ended. The call that receives raises the error that ended it."""
        if self.over:
            raise ConsumerClosed("Consumer", self.reason or str(self._driver.error or "it was stopped"))

    def raise_if_ended(self) -> None:
        """Raises what the user must know: partitions' errors, one per call, then what ended it; ConsumerClosed once
        closed."""
        if self.reason:
            raise ConsumerClosed("Consumer", self.reason)
        if self._driver.pending_errors:
            raise self._driver.pending_errors.popleft()
        if self._driver.ended:
            error = self._driver.error
            self.reason = str(error) if error is not None else "it was stopped"
            self.dispose(self)
            if error is not None:
                raise error
            raise ConsumerClosed("Consumer", self.reason)
