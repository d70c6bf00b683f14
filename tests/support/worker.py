"""A consumer as a process: handles messages with seeded durations, journals every delivery, can kill itself.

    python -m tests.support.worker '{"name": "w1", "journal": "/tmp/x/w1.jsonl", "bootstrap": "...", ...}'

The settings are those of `Settings`. SIGTERM stops it cleanly. Exit code 0 after a clean stop, 3 after an error of the
library that ended the consumer, 1 after any other error.

In at-least-once mode, messages go to a small pool of threads, so that acks come late and out of order, and a handler
that raises is called again later. In at-most-once mode, they are handled in the thread that fetches them.

The worker replaces three parts of the library. `WatchedClock` records when the library last read the clock before a
handler began (the journal's `gate`). `journal_heartbeats` notes when it read the clock before it wrote a heartbeat.
`die_at_grant` kills the process inside the library, at a moment that no other process could hit.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import marshal_py
from marshal_py.client.connection import Outbox
from marshal_py.client.values.options import BOUNDS
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.kafka import KafkaLog, KafkaTransport
from tests.support.journal import Journal

POOL_THREADS = 3
LANES = 8
POOL_QUEUE_MAX = 40  # chunks that wait for a thread; more would only make a stop slow
FETCH_EXPIRES_S = 0.3
FLUSH_TIMEOUT_S = 20.0
FETCHES_AFTER_ERROR = 5  # of a consumer that was closed by an error; it must not return messages (S14)
HEARTBEAT, CLAIMING_MESSAGES = 2, 7  # record types, PROTOCOL.md 4.2
GROUP_LENGTH_AT = 11  # of an envelope, PROTOCOL.md 4.1
HOUR_MS = 3_600_000
TYPE_AT = 13  # of an envelope, plus the length of the group id


@dataclass
class Settings:
    """The settings of a worker. Times in ms."""

    name: str
    journal: str
    bootstrap: str
    group: str
    topics: list[str]
    coordination_topic: str
    coordination_partitions: int = 2
    seed: int = 0
    delivery: str = "at_least_once"
    style: str = "single"  # or batch, or process: `Consumer.process` with LANES workers, in the order of each key
    batch_max: int = 50
    handler_ms: list[int] = field(default_factory=lambda: [0, 0, 1, 1, 2, 5, 20])
    fails: float = 0.01  # the probability that a handler raises
    beat_ms: int = 200
    die_at_grant: int = 0  # 1 = kill -9 between sending the first ClaimingMessages and reading it back; 0 = never
    die_after_write: bool = True  # whether this record is in the log when the process dies
    options: dict[str, Any] = field(default_factory=dict)  # of Marshal.consumer
    bounds: dict[str, int] = field(default_factory=dict)  # of client/values/options.py
    last_will: str = "off"
    plant: str = ""  # the mutant that is switched on in this process


class WatchedClock(SystemClock):
    """The library's clock. It remembers for each thread when it was last read. SIGUSR1 moves its wall clock."""

    seen = threading.local()
    wall_moved_ms = 0

    def boot_ns(self) -> int:  # type: ignore[override]
        self.seen.ns = time.monotonic_ns()
        return SystemClock.boot_ns()

    def now(self) -> Any:
        self.seen.ns = time.monotonic_ns()
        now = super().now()
        return now._replace(wall_ms=now.wall_ms + WatchedClock.wall_moved_ms) if WatchedClock.wall_moved_ms else now

    @classmethod
    def jump(cls, *_: object) -> None:
        """Moves the wall clock an hour ahead, then an hour back behind the true time, and so on."""
        cls.wall_moved_ms = -HOUR_MS if cls.wall_moved_ms > 0 else HOUR_MS


class HandlerError(Exception):
    """Raised by a seeded handler now and then. The worker survives it."""


class Chunk:
    """Messages of one partition that are handled together."""

    def __init__(self, messages: list[marshal_py.Message]) -> None:
        self.messages = messages
        self.first_try = True
        first = messages[0]
        self.place = {"tok": str(first.token), "t": first.topic, "p": first.partition}

    def line(self, messages: list[marshal_py.Message] | None = None) -> dict[str, Any]:
        return {**self.place, "o": [message.offset for message in (self.messages if messages is None else messages)]}


class Worker:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.journal = Journal(Path(settings.journal))
        self.random = random.Random(settings.seed)
        self.client = f"{settings.name}-{os.getpid()}"
        self.jobs: queue.Queue[Chunk | None] = queue.Queue(POOL_QUEUE_MAX)
        self.consumer: marshal_py.Consumer | None = None
        self._over = threading.Event()

    def run(self) -> int:
        settings = self.settings
        self.journal.write(
            "start",
            name=settings.name,
            pid=os.getpid(),
            client=self.client,
            group=settings.group,
            delivery=settings.delivery,
            seed=settings.seed,
            lanes=LANES if settings.style == "process" else 0,
        )
        beat = threading.Thread(target=self._beat, name="beat", daemon=True)
        beat.start()
        code = 0
        try:
            self._consume()
        except marshal_py.MarshalError as error:
            self._note_error(error, True)
            code = 3
        self._over.set()
        beat.join()
        self.journal.write("gone", code=code)
        return code

    def _consume(self) -> None:
        settings = self.settings
        with marshal_py.connect(
            settings.bootstrap,
            client_id=self.client,
            coordination_topic=settings.coordination_topic,
            coordination_partitions=settings.coordination_partitions,
            last_will=settings.last_will,
        ) as marshal:
            options = {"heartbeat_interval_s": 1.0, "start": "earliest", **settings.options}
            for name, value in settings.bounds.items():
                setattr(BOUNDS, name, value)
            with marshal.consumer(settings.group, settings.topics, delivery=settings.delivery, **options) as consumer:
                self.consumer = consumer
                marshal_py.stop_on_signals(consumer)
                self.journal.write("joined")
                if settings.delivery == "at_most_once":
                    self._fetch_all(consumer, self._handle_here)
                    return
                if settings.style == "process":
                    with consumer.process(self._handle_in_lane, workers=LANES) as running:
                        running.wait()
                    return
                pool = [
                    threading.Thread(target=self._work, args=(settings.seed * 31 + i,), name=f"pool-{i}")
                    for i in range(POOL_THREADS)
                ]
                for thread in pool:
                    thread.start()
                try:
                    self._fetch_all(consumer, self.jobs.put)
                finally:
                    for _ in pool:
                        self.jobs.put(None)
                    for thread in pool:
                        thread.join()

    def _beat(self) -> None:
        while not self._over.wait(self.settings.beat_ms / 1000):
            self.journal.write("beat")
            if self.consumer is not None:
                for event in self.consumer.events():
                    place = {"t": event.topic, "p": event.partition, "epoch": event.epoch}
                    span = {"from": event.offset, "to": event.to, "text": event.text}
                    self.journal.write("event", kind=event.kind, **place, **span)

    # --- fetching

    def _fetch_all(self, consumer: marshal_py.Consumer, handle: Any) -> None:
        while True:
            try:
                if self.settings.style == "batch":
                    self._fetch_batches(consumer, handle)
                else:
                    for message in consumer:
                        self._begin([message], handle)
                    return
            except marshal_py.ConsumerClosed:  # it was asked to stop
                return
            except marshal_py.MarshalError as error:
                self._note_error(error, consumer.cached_info().closed)
                if consumer.cached_info().closed:
                    self._fetch_after_error(consumer, handle)
                    raise

    def _fetch_batches(self, consumer: marshal_py.Consumer, handle: Any) -> None:
        while True:
            batch = consumer.fetch(self.random.randint(1, self.settings.batch_max), expires_s=FETCH_EXPIRES_S)
            gate_ns = WatchedClock.seen.ns
            for part in batch.parts:
                self._begin(list(part), handle, gate_ns)

    def _begin(self, messages: list[marshal_py.Message], handle: Any, gate_ns: int | None = None) -> None:
        begin_ns = time.monotonic_ns()
        chunk = Chunk(messages)
        self.journal.write("begin", gate=gate_ns or min(WatchedClock.seen.ns, begin_ns), **chunk.line())
        handle(chunk)

    def _fetch_after_error(self, consumer: marshal_py.Consumer, handle: Any) -> None:
        for _ in range(FETCHES_AFTER_ERROR):
            with contextlib.suppress(marshal_py.MarshalError):
                for part in consumer.fetch(1, expires_s=0).parts:
                    self._begin(list(part), handle)

    def _note_error(self, error: marshal_py.MarshalError, closed: bool) -> None:
        names = [kind.__name__ for kind in type(error).__mro__]
        self.journal.write("error", name=names[0], names=names, text=str(error), closed=closed)

    # --- handling

    def _handler(self, chance: random.Random, first_try: bool) -> None:
        time.sleep(chance.choice(self.settings.handler_ms) / 1000)  # the handler's work; no test waits for its end
        if first_try and chance.random() < self.settings.fails:
            raise HandlerError

    def _handle_here(self, chunk: Chunk) -> None:
        try:
            self._handler(self.random, True)
        except HandlerError:
            self.journal.write("fail", **chunk.line())  # not tried again in at-most-once mode
            return
        self.journal.write("end", **chunk.line())
        for message in chunk.messages:
            message.ack()

    def _handle_in_lane(self, message: marshal_py.Message) -> None:
        chunk, begin_ns = Chunk([message]), time.monotonic_ns()
        self.journal.write(
            "begin",
            gate=min(getattr(WatchedClock.seen, "ns", begin_ns), begin_ns),
            k=(message.key or b"").decode(),
            **chunk.line(),
        )
        try:
            self._handler(self.random, True)
        except HandlerError:
            self.journal.write("fail", **chunk.line())
            raise
        self.journal.write("end", **chunk.line())

    def _work(self, seed: int) -> None:
        chance = random.Random(seed)
        later: list[Chunk] = []
        while True:
            try:
                chunk = self.jobs.get(timeout=0.05) if later else self.jobs.get()
            except queue.Empty:
                chunk = later.pop(0)
            if chunk is None:
                break
            if not self._try(chunk, chance):
                later.append(chunk)
        for chunk in later:
            self._try(chunk, chance)

    def _try(self, chunk: Chunk, chance: random.Random) -> bool:
        """Handles a chunk in one to three pieces, in any order. Returns False if a handler raised."""
        messages = chunk.messages[:]
        chance.shuffle(messages)
        pieces = chance.randint(1, 3) if chunk.first_try else 1
        for at in range(pieces):
            piece = messages[at::pieces]
            if not piece:
                continue
            try:
                self._handler(chance, chunk.first_try)
            except HandlerError:
                self.journal.write("fail", **chunk.line(piece))
                chunk.messages = [message for rest in range(at, pieces) for message in messages[rest::pieces]]
                chunk.first_try = False
                return False
            self.journal.write("end", **chunk.line(piece))
            done = [message for message in piece if message.ack()]
            if done:
                self.journal.write("ack", **chunk.line(done))
        return True


def record_type(value: bytes) -> int:
    return value[TYPE_AT + value[GROUP_LENGTH_AT]]


def journal_heartbeats(journal: Journal) -> None:
    """Journals each heartbeat in the thread that writes it, which may be another one than produces it."""
    put = Outbox.put

    def noted(outbox: Outbox, log: int, key: bytes, values: Sequence[bytes], refused: Any) -> None:
        for value in values:
            if record_type(value) == HEARTBEAT:
                journal.write("told", since=WatchedClock.seen.ns, v=value.hex())
        put(outbox, log, key, values, refused)

    Outbox.put = noted  # type: ignore[method-assign]


def die_at_grant(settings: Settings, journal: Journal) -> None:
    """Makes this process kill itself when the library writes its n-th ClaimingMessages."""
    append, count = KafkaLog.append, 0

    def deadly(log: KafkaLog, number: int, key: bytes, value: bytes) -> bool:
        nonlocal count
        done = append(log, number, key, value)
        if record_type(value) == CLAIMING_MESSAGES:
            count += 1
            if count == settings.die_at_grant:
                if settings.die_after_write:
                    log._producer.flush(FLUSH_TIMEOUT_S)
                journal.write("kill")
                os.kill(os.getpid(), signal.SIGKILL)
        return done

    KafkaLog.append = deadly  # type: ignore[method-assign]


def end_loudly(arguments: threading.ExceptHookArgs) -> None:
    """Ends the process if any of its threads ends with an error, also one of the library's (S13)."""
    sys.__excepthook__(arguments.exc_type, arguments.exc_value or arguments.exc_type(), arguments.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    threading.excepthook = end_loudly
    settings = Settings(**json.loads(sys.argv[1]))
    KafkaTransport.clock = WatchedClock()  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, WatchedClock.jump)
    worker = Worker(settings)
    journal_heartbeats(worker.journal)
    if settings.die_at_grant:
        die_at_grant(settings, worker.journal)
    with contextlib.ExitStack() as planted:
        if settings.plant:
            from marshal_sim.mutants.mutants import MUTANTS, switched_on

            planted.enter_context(switched_on(MUTANTS[settings.plant]))
        sys.exit(worker.run())


if __name__ == "__main__":
    main()
