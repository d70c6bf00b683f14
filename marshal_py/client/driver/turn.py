"""One turn of a Marshal's loop: fold what was read of the logs, step the consumers that are due, tell their sources.

It has no thread, reads no log and waits for nothing. The background thread (loop.py) takes a turn after each poll, the
simulator whenever records have come or a member is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from marshal_py.client.connection.context import Context
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.errors import ClusterError, CoordinationError
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.identity import Instant
from marshal_py.transport.ports import LogRecord


class Maintenance(Protocol):
    """Keeps coordination logs short (log_maintenance.py). It is called with the lock held."""

    def folded(self, number: int, verdict: Verdict, now_ms: int) -> None:
        """Takes the verdict on a record of log `number` that was just folded, before a member hears of it."""

    def tick(self, now: Instant) -> None: ...


class Turn:
    """Drives all consumers of one Marshal. `worlds`: by coordination partition, the folded state."""

    def __init__(self, context: Context, maintenance: Maintenance) -> None:
        self._context, self._maintenance = context, maintenance
        self.worlds: dict[int, World] = {}
        self._drivers: list[ConsumerDriver] = []
        self.folded: int = 0  # records

    @property
    def drivers(self) -> list[ConsumerDriver]:
        """Returns the drivers of the consumers that have not ended."""
        return [driver for driver in self._drivers if not driver.ended]

    def of(self, log: int) -> list[ConsumerDriver]:
        """Returns the drivers of the consumers whose groups are in this log."""
        return [driver for driver in self.drivers if driver.log == log]

    @property
    def prefetching(self) -> bool:
        """Returns whether a partition is fetched ahead and nothing of it has come: its driver looks at each turn."""
        return any([driver.prefetching for driver in self._drivers])

    def deadline_ms(self) -> int | None:
        """Returns the monotonic ms at which the next consumer must be stepped; None if there is no consumer."""
        return min([driver.member.deadline_ms for driver in self.drivers], default=None)

    def due(self, now: Instant) -> bool:
        """Returns whether a consumer is to be stepped."""
        return any([driver.due(now) for driver in self.drivers])

    def add(self, driver: ConsumerDriver) -> None:
        """Adds a consumer and steps it."""
        with self._context.outbox, self._context.lock:
            self._drivers = [*self.drivers, driver]
            driver.advance()

    # --- a turn

    def run(self, records: Sequence[LogRecord]) -> None:
        """Folds these records, then steps each consumer that has something to do."""
        with self._context.outbox, self._context.lock:
            self.fold(records)
            self.step(heard=bool(records))

    def fold(self, records: Sequence[LogRecord]) -> None:
        """Folds each record into the world of its log, and passes the verdict to the members of that log."""
        context = self._context
        with context.outbox, context.lock:
            now, drivers = context.clock.now(), self.drivers
            if records:
                context.heard_ms = now.mono_ms
            for number, offset, value, _, _ in records:
                if number in context.broken:
                    continue
                world = self.worlds[number]
                try:
                    verdict = rationalizer.apply(world, offset, value)
                except CoordinationError as error:
                    self.break_log(number, error)
                    continue
                self.folded += 1
                self._maintenance.folded(number, verdict, now.mono_ms)
                if verdict.group:
                    for driver in drivers:
                        if driver.log == number:
                            driver.member.receive(verdict, now)

    def step(self, *, heard: bool) -> None:
        """Steps each consumer that has something to do. `heard`: records were folded since the last step."""
        context = self._context
        with context.outbox, context.lock:
            self._drivers = self.drivers
            now = context.clock.now()
            refused = context.coordination.refused()
            for driver in self._drivers:
                if refused is not None:
                    driver.member.fail(refused)
                if refused is not None or driver.due(now):
                    driver.advance()
            self._maintenance.tick(now)
            if heard or refused is not None:
                context.changed.notify_all()

    def carry_out(self) -> None:
        """Tells data clients, without the lock, what to fetch and pause, which was noted under it. A client that fails
        ends its consumer with ClusterError."""
        for driver in self.drivers:
            try:
                driver.source.carry_out()
            except Exception as error:
                self._context.logger.exception("group %s: the data client failed", driver.member.name)
                with self._context.outbox, self._context.lock:
                    driver.member.fail(ClusterError(f"the data client failed: {error!r}"))
                    driver.advance()

    # --- ends

    def break_log(self, number: int, error: CoordinationError) -> None:
        """Ends the consumers of log `number` with `error`, because the log cannot be trusted any more."""
        with self._context.outbox, self._context.lock:
            if number in self._context.broken:
                return
            self._context.broken[number] = error
            ending = self.of(number)
            if ending:  # otherwise the error reaches whoever opens the log, and nobody else is concerned
                self._context.logger.error(
                    "coordination partition %d: %s", number, error, extra={"marshal_log": number}
                )
            for driver in ending:
                driver.member.fail(error)
                driver.advance()
            self._context.changed.notify_all()

    def lose_history(self, number: int) -> None:
        """Takes their claims from the consumers of log `number`, whose records were deleted before they were read."""
        with self._context.outbox, self._context.lock:
            for driver in self.of(number):
                driver.lose_history()

    def regain_history(self, world: World) -> None:
        """Has the consumers of a log continue in `world`, which was read again (N11)."""
        with self._context.outbox, self._context.lock:
            for driver in self.of(world.log):
                driver.regain_history(world)

    def clear(self) -> None:
        """Forgets the consumers: nobody drives them any more."""
        self._drivers = []
