"""For how long does an asyncio consumer keep the other tasks of its event loop waiting?

Contestants, each in a fresh process, one after the other, in turn: the ways to receive of `marshal_py.aio`, and
aiokafka's. Each reads a filled topic and acks what it gets, so that there is always something to deliver. An event loop
runs one callback at a time, so the longest callback is the longest wait of every other task. The time that Python's
collector took within a callback is also left out: how much it looks at depends on the program.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from bench.environment import BenchEnvironment, Result, spread

PARTITIONS: Final = 4
SIZE_BYTES: Final = 100
MESSAGES: Final = 1_000_000
MESSAGES_TINY: Final = 20_000
SPARE: Final = 100_000  # messages after those that are read, so that no batch waits for its last message
BATCH: Final = 1_000
LARGE_BATCH: Final = 10_000
ROUNDS: Final = 3
GOAL_MS: Final = 10

Contestant = Callable[[str, str, int], Awaitable[int]]


class Callbacks:
    """Measures every callback of all event loops of this process, in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.longest_s = self.longest_without_gc_s = 0.0
        self._collecting_s = self._collection_began = 0.0
        gc.callbacks.append(self._collected)
        self._run = asyncio.events.Handle._run
        asyncio.events.Handle._run = lambda handle: self._timed(handle)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Forgets what was measured: connecting and joining do not count."""
        self.count, self.longest_s, self.longest_without_gc_s = 0, 0.0, 0.0

    def _timed(self, handle: asyncio.Handle) -> None:
        self._collecting_s, began = 0.0, time.perf_counter()
        self._run(handle)
        took_s = time.perf_counter() - began
        self.count += 1
        self.longest_s = max(self.longest_s, took_s)
        self.longest_without_gc_s = max(self.longest_without_gc_s, took_s - self._collecting_s)

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began = time.perf_counter()
        else:
            self._collecting_s += time.perf_counter() - self._collection_began


callbacks: Callbacks | None = None  # of a contestant's process


def started() -> None:
    """A contestant calls this with its first message."""
    assert callbacks is not None
    callbacks.begin()


# --- contestants: each reads at least `count` messages and returns how many


async def iteration(bootstrap: str, topic: str, count: int) -> int:
    from marshal_py import aio

    seen = 0
    async with (
        aio.connect(bootstrap, coordination_topic=f"{topic}-m") as marshal,
        marshal.consumer(f"g-{time.time_ns()}", [topic], start="earliest") as consumer,
    ):
        async for message in consumer:
            if not seen:
                started()
            message.ack()
            seen += 1
            if seen == count:
                break
    return seen


async def batches(bootstrap: str, topic: str, count: int, size: int) -> int:
    from marshal_py import aio

    seen = 0
    async with (
        aio.connect(bootstrap, coordination_topic=f"{topic}-m") as marshal,
        marshal.consumer(f"g-{time.time_ns()}", [topic], start="earliest") as consumer,
    ):
        while seen < count:
            batch = await consumer.fetch(size, min_messages=size, expires_s=1.0)
            if not seen:
                started()
            seen += len(batch)
            batch.ack()
    return seen


async def with_handler(bootstrap: str, topic: str, count: int) -> int:
    from marshal_py import aio

    seen, done = 0, asyncio.Event()

    async def handle(message: Any) -> None:
        nonlocal seen
        if not seen:
            started()
        message.ack()
        seen += 1
        if seen == count:
            done.set()

    async with (
        aio.connect(bootstrap, coordination_topic=f"{topic}-m") as marshal,
        marshal.consumer(f"g-{time.time_ns()}", [topic], start="earliest") as consumer,
    ):
        consumer.consume(handle, max_messages=BATCH)
        await done.wait()
    return seen


async def aiokafka(bootstrap: str, topic: str, count: int, single: bool) -> int:
    from aiokafka import AIOKafkaConsumer, TopicPartition

    consumer, seen = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest"), 0
    await consumer.start()
    consumer.assign([TopicPartition(topic, partition) for partition in range(PARTITIONS)])
    while seen < count:
        if single:
            await consumer.getone()
        else:
            found = await consumer.getmany(max_records=BATCH, timeout_ms=1000)
        if not seen:
            started()
        seen += 1 if single else sum(map(len, found.values()))
    await consumer.stop()
    return seen


CONTESTANTS: Final[dict[str, Contestant]] = {
    "marshal aio iteration": iteration,
    "marshal aio fetch(1000)": lambda b, t, n: batches(b, t, n, BATCH),
    "marshal aio fetch(10000)": lambda b, t, n: batches(b, t, n, LARGE_BATCH),
    "marshal aio consume(), handler": with_handler,
    "aiokafka getmany(1000)": lambda b, t, n: aiokafka(b, t, n, False),
    "aiokafka getone()": lambda b, t, n: aiokafka(b, t, n, True),
}


def one(name: str, bootstrap: str, topic: str, count: int) -> dict[str, Any]:
    """Runs one contestant in this process."""
    global callbacks
    callbacks = Callbacks()

    async def read() -> tuple[int, dict[str, Any]]:
        seen = await CONTESTANTS[name](bootstrap, topic, count)
        assert callbacks is not None
        return seen, {
            "callbacks": callbacks.count,
            "ms": callbacks.longest_s * 1000,
            "ms_without_gc": callbacks.longest_without_gc_s * 1000,
        }

    seen, found = asyncio.run(read())
    return {"seen": seen, **found}


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    """Fills a topic once, then lets every contestant read it, round after round."""
    counts = dict.fromkeys(CONTESTANTS, MESSAGES_TINY if tiny else MESSAGES)
    rounds = 1 if tiny else ROUNDS
    found = environment.contest("bench.event_loop", counts, rounds, PARTITIONS, SIZE_BYTES, SPARE)
    rows: list[list[Any]] = [
        [
            name,
            min(one_["seen"] for one_ in runs),
            spread([one_["callbacks"] for one_ in runs]),
            spread([one_["ms"] for one_ in runs]),
            spread([one_["ms_without_gc"] for one_ in runs]),
        ]
        for name, runs in found.items()
    ]
    columns = ["contestant", "messages read", "callbacks", "longest callback, ms", "without the collector, ms"]
    notes = [f"goal: no callback of marshal_py takes {GOAL_MS} ms, the collector left out"]
    return Result("event_loop", columns, rows, notes, {"runs": found})


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
