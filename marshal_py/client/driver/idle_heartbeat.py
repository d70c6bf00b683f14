"""Watches whether the cluster still answers while a call waits for messages (ADR-37, section "Idle heartbeats").

JetStream's server sends a heartbeat when it has no message. Kafka's brokers do not, so the client asks: once per
interval without a message it requests the end offsets of its partitions from their leaders, on the consumer's worker
thread. A message or an answer is proof of life. Two intervals without any of them are worth an event, and no more than
that: the wait continues. While the connection is known to be lost, the watch rests.
"""

from __future__ import annotations

from typing import Final

from marshal_py.client.connection.context import Context
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.errors import ClusterError, ClusterUnreachable
from marshal_py.protocol.member.advisory import Advisory

MISSED: Final = 2  # so many intervals without proof of life make an event


class HeartbeatTimer:
    """Counts the time without proof of life. It has no clock: times are ms of the monotonic clock."""

    def __init__(self, interval_ms: int, now_ms: int) -> None:
        self.interval_ms = interval_ms
        self._since_ms: int | None = now_ms  # of the last proof of life; None while the timer is paused
        self._asked_ms = now_ms

    def alive(self, now_ms: int) -> None:
        """Starts the timer again, since there was proof of life at `now_ms`."""
        if self._since_ms is None or now_ms > self._since_ms:
            self._since_ms = now_ms

    def pause(self) -> None:
        """Resets the timer and stops it until `resume`."""
        self._since_ms = None

    def resume(self, now_ms: int) -> None:
        if self._since_ms is None:
            self._since_ms = self._asked_ms = now_ms

    def ask(self, now_ms: int) -> bool:
        """Returns whether to ask the cluster now: once per interval, and only if there was no proof of life in it."""
        if self._since_ms is None or now_ms - max(self._since_ms, self._asked_ms) < self.interval_ms:
            return False
        self._asked_ms = now_ms
        return True

    def missed(self, now_ms: int) -> bool:
        """Returns whether there was no proof of life for MISSED intervals. If so, the timer starts again."""
        if self._since_ms is None or now_ms - self._since_ms < MISSED * self.interval_ms:
            return False
        self._since_ms = now_ms
        return True


class IdleHeartbeat:
    """Watches the cluster for one call, which reports messages by `message` and calls `check` while it waits."""

    def __init__(self, context: Context, driver: ConsumerDriver, interval_s: float) -> None:
        self._context, self._driver, self._interval_s = context, driver, interval_s
        self._answered_ms = 0  # written by the worker thread
        self._timer = HeartbeatTimer(round(interval_s * 1000), self._now_ms())

    def _now_ms(self) -> int:
        return self._context.clock.now().mono_ms

    def message(self) -> None:
        """Notes that messages have come, or that the call waits only from now on."""
        self._timer.alive(self._now_ms())

    def check(self) -> None:
        """Asks the cluster if that is due, and reports the event `heartbeat_missed`. Does not wait."""
        timer, now_ms = self._timer, self._now_ms()
        if self._context.waiting_for():
            timer.pause()
            return
        timer.resume(now_ms)
        timer.alive(self._answered_ms)
        if timer.ask(now_ms):
            self._driver.submit("the idle heartbeat", self._ask)
        if timer.missed(now_ms):
            self._report()

    def _ask(self) -> None:
        with self._context.lock:
            claimed = [claim.tp for claim in self._driver.member.claims.values()]
        try:
            if claimed:  # otherwise no partition is waited for
                self._context.admin.bounds(claimed)
        except ClusterUnreachable:
            return  # the event says it, if it lasts
        except ClusterError:
            pass  # a refusal is an answer
        self._answered_ms = self._now_ms()

    def _report(self) -> None:
        member = self._driver.member
        text = f"no message, and no answer of the cluster, for {MISSED * self._interval_s:g} s"
        with self._context.outbox, self._context.lock:
            self._driver.publish(
                Advisory(
                    "heartbeat_missed",
                    member.name,
                    member.options.client_id,
                    text=text,
                    session=member.session,
                    log=self._driver.log,
                )
            )
