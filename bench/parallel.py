"""Who keeps the order of keys while handlers run in parallel, and what is lost and repeated after `kill -9`?

Each contestant is a process that reads one topic, with the order per key where it has one. Three messages of a key are
written in a row. Handlers sleep for 5 ms on average, and note in a file which message they begin and end. Once half of
the messages are done the process is killed, and a second one of the same group goes on until all are done, or nothing
more comes. The judge reads the file alone.

Out of order: messages that began before an earlier one of their key had ended, or ended for the first time after a
later one. Repeated: messages that ended more than once. Lost: messages that never ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import Producer, ShareConsumer

import marshal_py
from bench.environment import FILL_TIMEOUT_S, QUIET, SHARE_START, BenchEnvironment, Result
from marshal_py import aio

KEYS: Final = 100
PARTITIONS: Final = 1
WORKERS: Final = 16
HANDLER_S: Final = 0.005  # on average, from half to one and a half of it
BURST: Final = 3  # messages of one key are written one after the other
COMMIT_S: Final = 1.0
MESSAGES: Final = 40_000  # half of them take longer than the 5 s after which Kafka's clients commit
MESSAGES_TINY: Final = 300
NOTHING_MORE_S: Final = 75.0  # longer than a session timeout of Kafka (45 s) and a lock of a share group (30 s)
LOOK_S: Final = 0.25


class Line(NamedTuple):
    """What a handler noted: whether it begins or ends, of which message, and when."""

    ends: bool
    key: int
    offset: int
    at_s: float


def duration_s(offset: int) -> float:
    return HANDLER_S * (0.5 + offset * 37 % 101 / 100)


class Journal:
    """A file to which handlers of any thread append, one write per line, so that a killed process loses nothing."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, ends: bool, key: bytes | None, offset: int) -> None:
        os.write(self._file, b"%d %d %d %.6f\n" % (ends, int(key or b""), offset, time.monotonic()))

    def handle(self, key: bytes | None, offset: int) -> None:
        self.note(False, key, offset)
        time.sleep(duration_s(offset))
        self.note(True, key, offset)

    async def handle_async(self, key: bytes | None, offset: int) -> None:
        self.note(False, key, offset)
        await asyncio.sleep(duration_s(offset))
        self.note(True, key, offset)


# --- the contestants, each until it is killed


def process_threads(servers: str, topic: str, journal: Journal) -> None:
    with (
        marshal_py.connect(servers, coordination_topic=f"{topic}-m") as marshal,
        marshal.consumer("g", [topic], start="earliest") as consumer,
        consumer.process(lambda message: journal.handle(message.key, message.offset), workers=WORKERS) as process,
    ):
        process.wait()


def process_asyncio(servers: str, topic: str, journal: Journal) -> None:
    async def handle(message: Any) -> None:
        await journal.handle_async(message.key, message.offset)

    async def main() -> None:
        async with (
            aio.connect(servers, coordination_topic=f"{topic}-m") as marshal,
            marshal.consumer("g", [topic], start="earliest") as consumer,
            consumer.process(handle, workers=WORKERS) as process,
        ):
            await process.wait()

    asyncio.run(main())


def faststream(servers: str, topic: str, journal: Journal) -> None:
    from faststream.kafka import KafkaBroker, KafkaMessage

    async def main() -> None:
        broker = KafkaBroker(servers, logger=None)

        @broker.subscriber(topic, group_id=f"{topic}-g", auto_offset_reset="earliest", max_workers=WORKERS)
        async def handle(_body: bytes, message: KafkaMessage) -> None:
            raw: Any = message.raw_message
            await journal.handle_async(raw.key, raw.offset)

        await broker.start()
        await asyncio.Event().wait()

    asyncio.run(main())


def aiokafka_semaphore(servers: str, topic: str, journal: Journal) -> None:
    """What people write by hand: a task per message, a semaphore, and every second a commit of the first offset below
    which all are done."""
    from aiokafka import AIOKafkaConsumer, TopicPartition

    async def main() -> None:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=servers,
            group_id=f"{topic}-g",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        await consumer.start()
        free, tasks = asyncio.Semaphore(WORKERS), set()
        unfinished: dict[TopicPartition, dict[int, None]] = defaultdict(dict)
        read: dict[TopicPartition, int] = {}

        async def handle(tp: TopicPartition, message: Any) -> None:
            await journal.handle_async(message.key, message.offset)
            del unfinished[tp][message.offset]
            free.release()

        async def commit() -> None:
            while True:
                await asyncio.sleep(COMMIT_S)
                if read:
                    await consumer.commit({tp: next(iter(unfinished[tp]), end) for tp, end in read.items()})

        committing = asyncio.create_task(commit())
        async for message in consumer:
            await free.acquire()
            tp = TopicPartition(message.topic, message.partition)
            unfinished[tp][message.offset], read[tp] = None, message.offset + 1
            task = asyncio.create_task(handle(tp, message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await committing

    asyncio.run(main())


def share_name(topic: str) -> str:
    return f"{topic}-share"


def share_group(servers: str, topic: str, journal: Journal) -> None:
    """A share consumer, with a pool of threads: a batch of `poll` is done before the next one is asked for."""
    consumer = ShareConsumer(
        {"bootstrap.servers": servers, "group.id": share_name(topic), "share.acknowledgement.mode": "explicit", **QUIET}
    )
    consumer.subscribe([topic])
    with ThreadPoolExecutor(WORKERS) as pool:
        while True:
            messages = [each for each in consumer.poll(1.0) if each.error() is None]
            list(pool.map(lambda each: journal.handle(each.key(), each.offset()), messages))
            for each in messages:
                consumer.acknowledge(each)


CONTESTANTS: Final[dict[str, Callable[[str, str, Journal], None]]] = {
    "process, threads": process_threads,
    "process, asyncio": process_asyncio,
    "FastStream max_workers": faststream,
    "aiokafka, semaphore, own commits": aiokafka_semaphore,
    "share group, pool of threads": share_group,
}


# --- the judge


class Judgement(NamedTuple):
    """What the journal of one contestant shows."""

    per_second: float
    out_of_order: int
    repeated: int
    lost: int


def judge(runs: Sequence[Sequence[Line]], messages: int) -> Judgement:
    """`runs`: what the handlers of each process noted, of which the first one gives the speed."""
    finished: dict[int, int] = defaultdict(int)
    firsts: dict[int, list[int]] = defaultdict(list)
    early: set[int] = set()
    for lines in runs:
        in_work: dict[int, set[int]] = defaultdict(set)
        for line in lines:
            if line.ends:
                if not finished[line.offset]:
                    firsts[line.key].append(line.offset)
                finished[line.offset] += 1
                in_work[line.key].discard(line.offset)
            else:
                early.update(max(offset, line.offset) for offset in in_work[line.key])
                in_work[line.key].add(line.offset)
    early.update(later for order in firsts.values() for first, later in pairwise(order) if later < first)
    ends_s = [line.at_s for line in runs[0] if line.ends]
    return Judgement(
        len(ends_s) / (ends_s[-1] - runs[0][0].at_s),
        len(early),
        sum(count > 1 for count in finished.values()),
        messages - len(finished),
    )


def read(path: Path) -> list[Line]:
    text = path.read_bytes() if path.exists() else b""
    return [
        Line(ends == b"1", int(key), int(offset), float(at_s))
        for ends, key, offset, at_s in (line.split() for line in text.splitlines())
    ]


@contextmanager
def _running(name: str, environment: BenchEnvironment, topic: str, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "bench.parallel", name, environment.bootstrap, topic, str(path)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def _wait(child: subprocess.Popen[bytes], path: Path, enough: Callable[[list[Line]], bool]) -> list[Line]:
    """Returns the journal once it holds enough, or nothing was added for long."""
    size, since_s, lines = -1, time.monotonic(), list[Line]()
    while time.monotonic() - since_s < NOTHING_MORE_S:
        now = path.stat().st_size if path.exists() else 0
        if now != size:
            size, since_s, lines = now, time.monotonic(), read(path)
            if enough(lines):
                break
        if child.poll() is not None:
            raise RuntimeError(f"the contestant ended with exit code {child.returncode}")
        time.sleep(LOOK_S)
    return lines


def contest(name: str, environment: BenchEnvironment, messages: int) -> Judgement:
    topic, path = environment.topic(PARTITIONS), environment.folder / f"{time.monotonic_ns()}.journal"
    producer = Producer({"bootstrap.servers": environment.bootstrap, **QUIET, "linger.ms": 5})
    for number in range(messages):
        producer.produce(topic, b"x" * 100, b"%d" % (number // BURST % KEYS))
    assert producer.flush(FILL_TIMEOUT_S) == 0
    environment.configure_group(share_name(topic), SHARE_START)  # the other contestants have no such group
    with _running(name, environment, topic, path) as child:
        _wait(child, path, lambda found: sum(line.ends for line in found) >= messages // 2)
    first = read(path)
    with _running(name, environment, topic, path) as child:
        lines = _wait(child, path, lambda found: len({line.offset for line in found if line.ends}) == messages)
    environment.drop(topic, f"{topic}-m")
    return judge([first, lines[len(first) :]], messages)


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    messages = MESSAGES_TINY if tiny else MESSAGES
    rows: list[list[Any]] = []
    for name in CONTESTANTS:
        environment.say(name)
        found = contest(name, environment, messages)
        rows.append([name, round(found.per_second), found.out_of_order, found.repeated, found.lost])
    columns = ["contestant", "messages/s", "out of order", "repeated after kill -9", "lost"]
    notes = [
        f"{messages:,} messages of {KEYS} keys in {PARTITIONS} partition, {WORKERS} handlers at once, "
        f"{1000 * HANDLER_S:g} ms each on average: {WORKERS / HANDLER_S:,.0f}/s are ideal",
        "pyrallel-consumer needs Python 3.12 and Confluent's Parallel Consumer the JVM: neither is here",
    ]
    return Result("parallel", columns, rows, notes)


if __name__ == "__main__":
    CONTESTANTS[sys.argv[1]](sys.argv[2], sys.argv[3], Journal(sys.argv[4]))
