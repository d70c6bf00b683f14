"""A clock that a test moves forward, and the waiting until everybody has done what was due.

The clock runs as usual. `Timekeeper.advance` moves it from one deadline of a consumer to the next, by a tenth of a
heartbeat interval at least, and waits after each step until nobody has anything to do. So nobody's lease ends only
because the clock has jumped. What a thread waits for (`fetch`, `next`, a timeout) takes real time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from marshal_py.client.driver.loop import Loop
from marshal_py.client.marshal import Marshal, open_marshals
from marshal_py.protocol.wire.identity import Instant, TopicPartition
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.memory import MemoryBroker, MemoryTransport

SETTLE_S: Final = 10.0  # a step takes about a millisecond; only something that hangs takes so long
SETTLE_POLL_S: Final = 0.0002
STEPS_PER_INTERVAL: Final = 10  # at most: a wait for a dead consumer counts in such steps, and must not take longer
RUN_FACTOR: Final = 100  # `run_until` moves the clock so many times as fast as real time
RUN_POLL_S: Final = 0.001

T = TypeVar("T")


def marshals_of(servers: str) -> list[Marshal]:
    """Returns the Marshals of this process that are connected to `servers` and not closed."""
    return [marshal for marshal in list(open_marshals) if marshal._context.servers == servers]


class MovableClock:
    """Implements Clock: the clocks of this machine, plus what the test has added."""

    def __init__(self) -> None:
        self._system = SystemClock()
        self._added_ms = 0

    def now(self) -> Instant:
        added_ms = self._added_ms
        return Instant(*(clock_ms + added_ms for clock_ms in self._system.now()))

    def boot_ns(self) -> int:
        return self._system.boot_ns() + self._added_ms * 1_000_000

    def move(self, by_ms: int) -> None:
        self._added_ms += by_ms


class Timekeeper:
    """Moves the clock of one MemoryBroker. `stopped`: Marshals that do nothing any more, so nobody waits for them."""

    def __init__(self, broker: MemoryBroker, clock: MovableClock) -> None:
        self._broker, self._clock = broker, clock
        self.stopped: list[Marshal] = []

    def _running(self) -> Iterator[tuple[Marshal, MemoryTransport, Loop]]:
        for marshal in marshals_of(self._broker.bootstrap_servers):
            if marshal not in self.stopped:
                assert isinstance(marshal.transport, MemoryTransport)
                yield marshal, marshal.transport, marshal._loop

    def settle(self) -> None:
        """Waits until every consumer has done what is due now. Raises TimeoutError after SETTLE_S."""
        deadline, before = time.monotonic() + SETTLE_S, None
        while True:
            busy, state = self._look()
            if not busy and state == before:  # twice the same: nobody has sent anything between the two looks
                return
            before = state
            if time.monotonic() >= deadline:
                raise TimeoutError(f"after {SETTLE_S:g} s there was still something to do: {', '.join(busy)}")
            self._broker.wake()
            time.sleep(SETTLE_POLL_S)

    def _look(self) -> tuple[list[str], list[int]]:
        """Returns the client ids of the Marshals that are busy, and numbers that change with whatever happens."""
        busy, state = [], []
        for marshal, transport, loop in self._running():
            behind = False
            for number, world in list(loop.worlds.items()):
                tp = TopicPartition(marshal.coordination_topic, number)
                with self._broker.lock:
                    end = self._broker.bounds(tp).end if self._broker.has(tp) else world.next_offset
                state.append(end)
                behind |= transport.connection.up and world.next_offset < end
            state.append(loop.turn.folded)
            if behind or loop.busy():
                busy.append(marshal.client_id)
        return busy, state

    def _step_ms(self, most_ms: int) -> int:
        """Returns how far the clock may move at once: to the next deadline, or a tenth of an interval if that is more.

        What consumers do within a tenth of an interval is then one step of the clock, so that time passes faster with
        many of them. It is at most `most_ms`.
        """
        now_ms = self._clock.now().mono_ms
        deadlines = [due for _, _, loop in self._running() if (due := loop.turn.deadline_ms()) is not None]
        thirds = [driver.member.third_ms for _, _, loop in self._running() for driver in loop.drivers]
        least_ms = min(thirds, default=1) * 3 // STEPS_PER_INTERVAL
        return min(max(least_ms, min(deadlines, default=now_ms + most_ms) - now_ms), most_ms)

    def _step(self, most_ms: int) -> int:
        step_ms = self._step_ms(most_ms)
        self._clock.move(step_ms)
        self.settle()
        return step_ms

    def advance(self, seconds: float) -> None:
        """Lets so many seconds pass at once."""
        until_ms = self._clock.now().mono_ms + round(seconds * 1000)
        self.settle()
        while (left_ms := until_ms - self._clock.now().mono_ms) > 0:
            self._step(left_ms)

    def run_until(self, condition: Callable[[], T], timeout_s: float) -> T:
        """Lets time pass RUN_FACTOR times as fast, until `condition()` is true; returns its value. Raises TimeoutError.

        `timeout_s`: of real time.
        """
        deadline, ahead_ms, began = time.monotonic() + timeout_s, 0, time.monotonic()
        self.settle()
        while not (value := condition()):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the condition did not come true within {timeout_s:g} s")
            allowed_ms = round((time.monotonic() - began) * 1000 * RUN_FACTOR) - ahead_ms
            if allowed_ms > 0:
                ahead_ms += self._step(allowed_ms)
            else:
                time.sleep(RUN_POLL_S)
        return value
