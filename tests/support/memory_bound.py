"""Measures the memory of consumers of large messages against the figure that docs/operations.md names.

    python -m tests.support.memory_bound
    python -m tests.support.memory_bound --ways iterate consume --modes at_most_once --handler-ms 8000 --seconds 40

A topic has 12 partitions full of messages of 1 MB. For each way to receive, each mode and each time that the handler
takes, one process receives from it, as in a container of 512 MB: this program kills it when its resident memory is
larger. `max_deliver` is 5, so a process that is killed again and again would make harmless messages dead letters. Exit
code 1 if a peak is above the documented figure, if a process was killed, or if there is a dead letter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import marshal_py
from marshal_py import Consumer, Message, aio
from marshal_py.client.values.options import PREFETCH_BYTES
from tests.support.kafka import start_cluster

ROOT: Final = Path(__file__).resolve().parents[2]
PARTITIONS: Final = 12
MESSAGE_BYTES: Final = 1_000_000
IN_HAND: Final = 10  # messages of one fetch
MIB: Final = 1 << 20
CONTAINER_BYTES: Final = 512 * MIB
PROCESS_BYTES: Final = 64 * MIB  # of a program that only imports the library and has a consumer without messages
LOOK_S: Final = 0.02  # between two looks at the memory of a process; the kernel keeps its peak
JOIN_S: Final = 60.0


def documented_bytes(prefetch_bytes: int = PREFETCH_BYTES, brokers: int = 1, in_hand: int = 1) -> int:
    """Returns the figure of docs/operations.md, "Memory"."""
    return PROCESS_BYTES + 2 * prefetch_bytes + brokers * prefetch_bytes // 4 + in_hand * MESSAGE_BYTES


# --- the process that receives


def iterate(consumer: Consumer) -> Iterator[Message]:
    yield from consumer


def one_by_one(consumer: Consumer) -> Iterator[Message]:
    while True:
        if (message := consumer.next(expires_s=5)) is not None:
            yield message


def in_batches(consumer: Consumer) -> Iterator[Message]:
    while True:
        yield from consumer.fetch(IN_HAND, expires_s=5)


def consume(consumer: Consumer) -> Iterator[Message]:
    yield from consumer.consume()


def consume_bytes(consumer: Consumer) -> Iterator[Message]:
    yield from consumer.consume(max_bytes=64 * MIB)


async def aio_iterate(consumer: aio.AsyncConsumer) -> AsyncIterator[Message]:
    async for message in consumer:
        yield message


async def aio_one_by_one(consumer: aio.AsyncConsumer) -> AsyncIterator[Message]:
    while True:
        if (message := await consumer.next(expires_s=5)) is not None:
            yield message


async def aio_in_batches(consumer: aio.AsyncConsumer) -> AsyncIterator[Message]:
    while True:
        for message in await consumer.fetch(IN_HAND, expires_s=5):
            yield message


async def aio_consume(consumer: aio.AsyncConsumer) -> AsyncIterator[Message]:
    async for message in consumer.consume():
        yield message


WAYS: Final[dict[str, Callable[[Consumer], Iterator[Message]]]] = {
    "iterate": iterate,
    "next": one_by_one,
    "fetch": in_batches,
    "consume": consume,
    "consume_bytes": consume_bytes,
}
AIO_WAYS: Final[dict[str, Callable[[aio.AsyncConsumer], AsyncIterator[Message]]]] = {
    "aio_iterate": aio_iterate,
    "aio_next": aio_one_by_one,
    "aio_fetch": aio_in_batches,
    "aio_consume": aio_consume,
}
HANDLERS: Final = ("handler", "aio_handler")  # of `consume`, on a thread or in a task
MODES: Final = ("at_least_once", "at_most_once")


class Task(NamedTuple):
    """Says what one process does, as JSON on its command line."""

    servers: str
    topic: str
    group: str
    dead_letters: str
    way: str
    mode: str
    handler_ms: int
    seconds: float
    messages: int  # it ends after so many
    options: dict[str, Any]


class Progress:
    """Prints a line for each message that was handled, and says when it is time to end."""

    def __init__(self, task: Task) -> None:
        self.task, self.count = task, 0
        self.until = time.monotonic() + task.seconds

    def handled(self, message: Message) -> None:
        message.ack()
        self.count += 1
        print(message.partition, message.offset, flush=True)

    @property
    def over(self) -> bool:
        return self.count >= self.task.messages or time.monotonic() >= self.until


def receive(task: Task) -> None:
    options: dict[str, Any] = {"start": "earliest", "delivery": task.mode, **task.options}
    if task.mode == "at_least_once":
        options |= {"max_deliver": 5, "dead_letter_topic": task.dead_letters}
    progress = Progress(task)
    if task.way.startswith("aio"):
        asyncio.run(receive_async(task, options, progress))
        return
    with marshal_py.connect(task.servers) as marshal, marshal.consumer(task.group, [task.topic], **options) as consumer:
        if task.way == "handler":

            def handle(message: Message) -> None:
                time.sleep(task.handler_ms / 1000)
                progress.handled(message)

            context = consumer.consume(handle)
            while not progress.over:
                context.wait(0.1)
            return
        for message in WAYS[task.way](consumer):
            time.sleep(task.handler_ms / 1000)
            progress.handled(message)
            if progress.over:
                return


async def receive_async(task: Task, options: dict[str, Any], progress: Progress) -> None:
    async with aio.connect(task.servers) as marshal, marshal.consumer(task.group, [task.topic], **options) as consumer:
        if task.way == "aio_handler":

            async def handle(message: Message) -> None:
                await asyncio.sleep(task.handler_ms / 1000)
                progress.handled(message)

            context = consumer.consume(handle)
            while not progress.over:
                await context.wait(0.1)
            return
        async for message in AIO_WAYS[task.way](consumer):
            await asyncio.sleep(task.handler_ms / 1000)
            progress.handled(message)
            if progress.over:
                return


# --- the container around it


class Outcome(NamedTuple):
    """Says what came of one process. `peak_bytes`: its largest resident memory."""

    peak_bytes: int
    killed: bool
    handled: int
    errors: str


def contain(task: Task, limit_bytes: int = CONTAINER_BYTES) -> Outcome:
    """Runs a task in a process of its own, and kills it when its resident memory is above `limit_bytes`."""
    command = [sys.executable, "-m", "tests.support.memory_bound", "--receive", json.dumps(task._asdict())]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        status, peak, killed = Path(f"/proc/{process.pid}/status"), 0, False
        until = time.monotonic() + task.seconds + JOIN_S
        while process.poll() is None:
            peak = max(peak, _peak(status))
            if peak > limit_bytes or time.monotonic() > until:
                process.kill()
                killed = True
                break
            time.sleep(LOOK_S)
        out, err = process.communicate()
    return Outcome(peak, killed, out.count("\n"), err)


def _peak(status: Path) -> int:
    """Returns the largest resident memory that a process has had; 0 if it has ended."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def make_topics(servers: str, name: str, count: int) -> tuple[str, str]:
    """Makes a topic with `count` messages of 1 MB in each of its 12 partitions, and one for dead letters."""
    topic, dead = f"{name}-large", f"{name}-dead"
    limit = {"max.message.bytes": "4000000"}
    admin = AdminClient({"bootstrap.servers": servers})
    new = [NewTopic(topic, PARTITIONS, 1, config=limit), NewTopic(dead, 1, 1, config=limit)]
    for future in admin.create_topics(new).values():
        future.result()
    producer = Producer({"bootstrap.servers": servers, "message.max.bytes": 4_000_000, "linger.ms": 5})
    for number in range(count * PARTITIONS):
        producer.produce(topic, bytes([number % 251]) * MESSAGE_BYTES, partition=number % PARTITIONS)
        while len(producer) > 20:
            producer.poll(0.1)
    assert not producer.flush(60)
    return topic, dead


def letters_in(servers: str, dead: str) -> int:
    with marshal_py.connect(servers) as marshal:
        return marshal.topic(dead).info().partitions[0].end


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.memory_bound")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    every = [*WAYS, *AIO_WAYS, *HANDLERS]
    parser.add_argument("--ways", nargs="+", choices=every, default=every)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--handler-ms", nargs="+", type=int, default=[30, 8_000])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each process")
    parser.add_argument("--messages", type=int, default=60, help="of each partition")
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=NUMBER", help="of the consumer")
    parser.add_argument("--servers", help="a cluster that runs already")
    given = parser.parse_args()
    if given.receive:
        receive(Task(**json.loads(given.receive)))
        return
    if given.servers:
        sys.exit(measure(given, given.servers))
    with start_cluster() as cluster:
        failures = measure(given, cluster.bootstrap)
    sys.exit(failures)


def measure(given: argparse.Namespace, servers: str) -> int:
    """Runs everything that was asked for, prints a line for each, and returns 1 if a bound was not kept."""
    options = {name: int(number) for name, number in (option.split("=") for option in given.option)}
    name = f"memory-{time.time_ns()}"
    topic, dead = make_topics(servers, name, given.messages)
    failures = 0
    for mode in given.modes:
        for handler_ms in given.handler_ms:
            for way in given.ways:
                group = f"{name}-{mode}-{way}-{handler_ms}"
                task = Task(servers, topic, group, dead, way, mode, handler_ms, given.seconds, 10**9, options)
                found = contain(task)
                bound = documented_bytes(
                    options.get("prefetch_bytes", PREFETCH_BYTES), 1, IN_HAND if way.endswith("fetch") else 1
                )
                failed = found.killed or found.peak_bytes > bound or not found.handled
                failures += failed
                print(
                    f"{'FAILED' if failed else 'ok':6} {mode} {way:14} {handler_ms:5} ms: "
                    f"peak {found.peak_bytes / MIB:.0f} of {bound / MIB:.0f} MiB{', killed' * found.killed}, "
                    f"{found.handled} handled {found.errors[-300:]}",
                    flush=True,
                )
    letters = letters_in(servers, dead)
    print(f"{letters} dead letters")
    return int(failures > 0 or letters > 0)


if __name__ == "__main__":
    main()
