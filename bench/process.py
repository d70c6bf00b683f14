"""How many messages per second do handlers in parallel finish, and how long does a blocked key delay the others?

Each row is a fresh topic, filled beforehand, and a fresh group; one process has all partitions. Handlers sleep for
5 ms, do nothing, or use a processor, with the order per key. In the row of a blocked key messages are written at a
steady rate, and the handler of one key waits until all others are done: the delay of a message is from its write to
the begin of its handler.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import Producer

import marshal_py
from bench.environment import QUIET, BenchEnvironment, Result, percentile
from marshal_py import Batches, Retry, aio

KEYS: Final = 100
HANDLER_S: Final = 0.005
WORKERS: Final = 16
TASKS: Final = 100
MANY_TASKS: Final = 256
MANY_KEYS: Final = 10_000
POISONED: Final = 20
RETRY_S: Final = 0.1
DELIVERIES: Final = 3
LIST: Final = 100
PROCESSES: Final = 2
MESSAGES: Final = 20_000
MESSAGES_FAST: Final = 300_000
MESSAGES_OF_PROCESSES: Final = 4_000
MESSAGES_BLOCKED: Final = 3_600  # less than the window of `process`, at which a blocked key stops its partition
RATE: Final = 200  # messages per second, while a key is blocked
MESSAGES_TINY: Final = 500
DEADLINE_S: Final = 300.0
IDEAL: Final = WORKERS / HANDLER_S


class Journal:
    """Notes what handlers of one run begin and end, from any thread. The rate is that between the first and the last
    tenth: at first all keys meet their first poison together, and at last workers wait for what is tried again."""

    def __init__(self, wanted: int) -> None:
        self.done = threading.Event()
        self.delays_ms: list[float] = []
        self.rate = 0.0
        self._wanted, self._from, self._count, self._from_s = wanted, wanted // 10, 0, 0.0
        self._offsets: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
        self._lock = threading.Lock()

    def begin(self, message: Any) -> None:
        self._offsets[message.partition, message.key].append(message.offset)
        self.delays_ms.append(1000 * time.time() - message.timestamp)

    def end(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == self._from:
                self._from_s = time.monotonic()
            elif self._count == self._wanted - self._from:
                self.rate = (self._count - self._from) / (time.monotonic() - self._from_s)
            if self._count == self._wanted:
                self.done.set()

    @property
    def order_kept(self) -> bool:
        return all(offsets == sorted(set(offsets)) for offsets in self._offsets.values())


def _write(environment: BenchEnvironment, topic: str, messages: int, rate: int | None = None, keys: int = KEYS) -> None:
    producer, began_s = (
        Producer({"bootstrap.servers": environment.bootstrap, **QUIET, "linger.ms": 1}),
        time.monotonic(),
    )
    for number in range(messages):
        producer.produce(topic, b"x" * 100, b"%d" % (number % keys))
        if rate is not None:
            producer.poll(0)
            time.sleep(max(0.0, began_s + number / rate - time.monotonic()))
        elif number % 10_000 == 0:
            producer.flush(DEADLINE_S)
    assert producer.flush(DEADLINE_S) == 0


def _threads(
    environment: BenchEnvironment,
    topic: str,
    journal: Journal,
    handle: Callable[[Any], None],
    batch: Batches | None = None,
    dead_letter_topic: str | None = None,
) -> None:
    with (
        marshal_py.connect(environment.bootstrap, coordination_topic=f"{topic}-m") as marshal,
        marshal.consumer("g", [topic], start="earliest", dead_letter_topic=dead_letter_topic) as consumer,
        consumer.process(handle, workers=WORKERS, batch=batch, retry=Retry(first_s=RETRY_S, deliveries=DELIVERIES)),
    ):
        assert journal.done.wait(DEADLINE_S)


def threads(environment: BenchEnvironment, messages: int) -> Journal:
    topic, journal = environment.topic(1), Journal(messages)
    _write(environment, topic, messages)

    def handle(message: Any) -> None:
        journal.begin(message)
        time.sleep(HANDLER_S)
        journal.end()

    _threads(environment, topic, journal, handle)
    return journal


def blocked(environment: BenchEnvironment, messages: int) -> Journal:
    """A consumer that waits for messages gets them; the key of the first one is blocked until all others are done."""
    topic, journal = environment.topic(1), Journal(messages - messages // KEYS)

    def handle(message: Any) -> None:
        if message.key == b"0":
            journal.done.wait(DEADLINE_S)
        else:
            journal.begin(message)
            journal.end()

    writing = threading.Thread(target=_write, args=(environment, topic, messages, RATE))
    writing.start()
    _threads(environment, topic, journal, handle)
    writing.join()
    return journal


def poisoned(environment: BenchEnvironment, messages: int) -> Journal:
    """One message in POISONED fails at each delivery, and becomes a dead letter. The speed is of the others."""
    topic, journal = environment.topic(1), Journal(messages - messages // POISONED)
    _write(environment, topic, messages, keys=KEYS - 1)  # of no key each message is poisoned

    def handle(message: Any) -> None:
        if message.offset % POISONED == 0:
            raise ValueError("poison")
        journal.begin(message)
        time.sleep(HANDLER_S)
        journal.end()

    logger = logging.getLogger("marshal_py")
    logger.setLevel(logging.ERROR)  # each dead letter is a warning
    try:
        _threads(environment, topic, journal, handle, dead_letter_topic=environment.topic(1))
    finally:
        logger.setLevel(logging.NOTSET)
    return journal


def tasks(
    environment: BenchEnvironment, partitions: int, messages: int, workers: int, sleep_s: float, keys: int = KEYS
) -> Journal:
    topic, journal = environment.topic(partitions), Journal(messages)
    _write(environment, topic, messages, keys=keys)

    async def handle(message: Any) -> None:
        journal.begin(message)
        if sleep_s:
            await asyncio.sleep(sleep_s)
        journal.end()

    async def main() -> None:
        async with (
            aio.connect(environment.bootstrap, coordination_topic=f"{topic}-m") as marshal,
            marshal.consumer("g", [topic], start="earliest") as consumer,
            consumer.process(handle, workers=workers),
        ):
            assert await asyncio.to_thread(journal.done.wait, DEADLINE_S)

    asyncio.run(main())
    return journal


def bare(messages: int, workers: int, sleep_s: float) -> float:
    """Returns how often per second tasks of an event loop sleep that do nothing else: epoll wakes them late."""
    left = iter(range(messages))

    async def sleeps() -> None:
        for _ in left:
            await asyncio.sleep(sleep_s)

    async def main() -> float:
        began_s = time.monotonic()
        await asyncio.gather(*(sleeps() for _ in range(workers)))
        return messages / (time.monotonic() - began_s)

    return asyncio.run(main())


def lists(environment: BenchEnvironment, messages: int) -> Journal:
    topic, journal = environment.topic(1), Journal(messages)
    _write(environment, topic, messages)

    def handle(batch: list[Any]) -> None:
        for message in batch:
            journal.begin(message)
        time.sleep(HANDLER_S)
        for _ in batch:
            journal.end()

    _threads(environment, topic, journal, handle, batch=Batches(LIST))
    return journal


def _use_the_processor(_message: Any) -> None:
    """Runs in a worker process: uses it for HANDLER_S."""
    until_s = time.thread_time() + HANDLER_S
    while time.thread_time() < until_s:
        pass


def processes(environment: BenchEnvironment, messages: int) -> float:
    """Returns messages per second, from the first message that is finished."""
    topic = environment.topic(1)
    _write(environment, topic, messages)
    with (
        marshal_py.connect(environment.bootstrap, coordination_topic=f"{topic}-m") as marshal,
        marshal.consumer("g", [topic], start="earliest") as consumer,
        consumer.process(_use_the_processor, workers=PROCESSES, executor="processes") as work,
    ):
        deadline_s = time.monotonic() + DEADLINE_S
        began_s, before = 0.0, 0
        while (finished := work.stats().finished) < messages:
            assert time.monotonic() < deadline_s
            if finished and not before:
                began_s, before = time.monotonic(), finished
            time.sleep(0.001)
        return (messages - before) / (time.monotonic() - began_s)


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    slow, fast, few, cpu = (
        [MESSAGES_TINY] * 4 if tiny else (MESSAGES, MESSAGES_FAST, MESSAGES_BLOCKED, MESSAGES_OF_PROCESSES)
    )
    found = {
        "threads, 5 ms": (1, WORKERS, IDEAL, threads(environment, slow)),
        "asyncio, 5 ms": (1, WORKERS, IDEAL, tasks(environment, 1, slow, WORKERS, HANDLER_S)),
        "asyncio, 10 ms, 10,000 keys": (
            12,
            MANY_TASKS,
            MANY_TASKS / (2 * HANDLER_S),
            tasks(environment, 12, fast, MANY_TASKS, 2 * HANDLER_S, MANY_KEYS),
        ),
        "threads, 5 ms, a dead letter in 20": (1, WORKERS, IDEAL, poisoned(environment, slow)),
        "asyncio, nothing": (12, TASKS, None, tasks(environment, 12, fast, TASKS, 0.0)),
        f"threads, 5 ms, lists of up to {LIST}": (1, WORKERS, None, lists(environment, fast)),
        "threads, a key blocked": (1, WORKERS, None, blocked(environment, few)),
    }
    rows: list[list[Any]] = []
    for name, (partitions, workers, ideal, journal) in found.items():
        # What is joined later than written is late for that reason: of the blocked row the first seconds do not count.
        delays_ms = journal.delays_ms[len(journal.delays_ms) // 3 :] if "blocked" in name else []
        delay_ms = round(percentile(delays_ms, 0.99), 1) if delays_ms else None
        rows.append([name, partitions, workers, round(journal.rate), ideal, delay_ms, journal.order_kept])
    for name, workers, sleep_s, count in (
        ("a bare event loop, 5 ms", WORKERS, HANDLER_S, slow),
        ("a bare event loop, 10 ms", MANY_TASKS, 2 * HANDLER_S, fast),
    ):
        rows.append([name, None, workers, round(bare(count, workers, sleep_s)), workers / sleep_s, None, None])
    rate = round(processes(environment, cpu))
    rows.append(["processes, 5 ms of CPU", 1, PROCESSES, rate, PROCESSES / HANDLER_S, None, None])
    columns = ["handlers", "partitions", "workers", "messages/s", "ideal", "delay p99, ms", "order kept"]
    notes = [
        "goals: 2,900/s with handlers of 5 ms, 0.95 of that beside dead letters, 0.9 of the ideal with 256 tasks, "
        "60,000/s with handlers that do nothing, a p99 below 20 ms; with asyncio no client can exceed the bare event "
        "loops"
    ]
    return Result("process", columns, rows, notes)
