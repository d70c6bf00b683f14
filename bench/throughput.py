"""How fast are messages handed over, compared with bare clients with the same and with default settings?

Contestants, each in a fresh process, one after the other, in turn: marshal_py in batches (at least once, at most
once), message by message with an ack each, both also with a witness (`last_will="process"`, right after the same
without), by its `consume` with and without a handler, and with asyncio, also compared with the same loop without it;
confluent-kafka's `consume(1000)` and `poll()`, bare, with librdkafka's defaults and with the settings that marshal_py
ships; aiokafka's `getmany` and `getone`. Each reads a filled topic (page cache warm) from its beginning and looks at
every value. The clock runs from the first message to the last one read, so that connecting and joining do not count:
join.py measures these. The topic holds some batches more than are read, so that no contestant waits a second for a last
batch that is not full.

The bare clients do the least that a correct program must do: they check whether a message is an error, because an error
arrives as a message whose value is its text. They track no positions and check no lease. One of them calls a handler
for each message of a batch, because `consume` hands over single messages, too. Another one does the least that Python
can do to check a lease before each message and to take its ack: it reads a clock, makes an object and appends a number
to a list. No `consume` can be faster than that. A third one does the least for batches that are acked by partition: it
sorts the messages by partition, and the program holds each batch until it has the next one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Final

from msgspec import Struct

from bench.environment import BenchEnvironment, Result, spread

MESSAGES: Final = 2_000_000
MESSAGES_TINY: Final = 20_000
MESSAGES_SLOW: Final = 400_000  # for contestants below 300 k/s: seconds enough to measure
SIZE_BYTES: Final = 100
PARTITIONS: Final = 4
BATCH: Final = 1_000
SPARE: Final = 20 * BATCH  # messages after those that are read
ROUNDS: Final = 5
IDLE_LIMIT_S: Final = 60.0  # a contestant without a message for so long has failed

Batches = Iterator[list[Any]]


# --- contestants: each yields the values of the messages that it received, and returns after `count`


def bare(bootstrap: str, topic: str, count: int, tuned: bool, single: bool, handled: bool = False) -> Batches:
    from confluent_kafka import Consumer, KafkaException, TopicPartition

    from marshal_py.transport import settings

    given = {"bootstrap.servers": bootstrap}
    if tuned:
        configuration = settings.data_reader(given, "bench", topic, None)
    else:
        configuration = {**given, "group.id": topic, "enable.auto.commit": False}
    consumer = Consumer(configuration)
    consumer.assign([TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
    seen = 0
    values: list[Any] = []

    def handle(message: Any) -> None:
        values.append(message.value())

    while seen < count:
        if handled:
            for message in consumer.consume(min(BATCH, count - seen), 1.0):
                if not message.error():
                    handle(message)
            done, values = values, []
            seen += len(done)
            yield done
        elif single:
            message = consumer.poll(IDLE_LIMIT_S)
            if message is None:
                raise TimeoutError("no message")
            if message.error():
                raise KafkaException(message.error())
            seen += 1
            yield [message.value()]
        else:
            most = min(BATCH, count - seen)  # the list has no name, so that it is freed before the next one comes
            values = [message.value() for message in consumer.consume(most, 1.0) if not message.error()]
            seen += len(values)
            yield values
    consumer.close()


class Acked(Struct, frozen=True, eq=False, gc=False):
    """A message that can be acked, and nothing else."""

    number: int
    value: Any
    acks: list[int]

    def ack(self) -> None:
        self.acks.append(self.number)


def least(bootstrap: str, topic: str, count: int) -> Batches:
    """The least work of any consumer that checks a lease before each message and takes its ack."""
    from confluent_kafka import Consumer, KafkaException, TopicPartition

    from marshal_py.transport import settings
    from marshal_py.transport.clock import SystemClock

    consumer = Consumer(settings.data_reader({"bootstrap.servers": bootstrap}, "bench", topic, None))
    consumer.assign([TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
    clock = SystemClock.boot_ns

    def messages() -> Iterator[Acked]:
        while True:
            lease_ends, acks = clock() + 10**10, list[int]()
            for number, raw in enumerate(consumer.consume(BATCH // 2, 1.0)):
                if raw.error():
                    raise KafkaException(raw.error())
                if clock() >= lease_ends:
                    raise TimeoutError("the lease is over")
                yield Acked(number, raw.value(), acks)

    values: list[Any] = []
    for seen, message in enumerate(messages(), 1):
        values.append(message.value)
        message.ack()
        if len(values) == BATCH or seen == count:
            yield values
            values = []
        if seen == count:
            break
    consumer.close()


def least_batches(bootstrap: str, topic: str, count: int) -> Batches:
    """The least work of any batches that are acked by partition, and that the program holds until the next one."""
    from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

    from marshal_py.transport import settings

    consumer = Consumer(settings.data_reader({"bootstrap.servers": bootstrap}, "bench", topic, None))
    consumer.assign([TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
    seen, parts = 0, list[tuple[int | None, list[Message]]]()
    while seen < count:
        raw = consumer.consume(min(BATCH, count - seen), 1.0)
        if any(map(Message.error, raw)):
            raise KafkaException(next(filter(None, map(Message.error, raw))))
        parts, at = [], 0
        for partition, same in groupby(map(Message.partition, raw)):
            until = at + len(list(same))
            parts.append((partition, raw[at:until]))
            at = until
        for _, messages in parts:
            values = [message.value() for message in messages]
            seen += len(values)
            yield values
    consumer.close()


def marshal_batches(bootstrap: str, topic: str, count: int, delivery: str, last_will: str = "off") -> Batches:
    import marshal_py

    with (
        marshal_py.connect(bootstrap, coordination_topic=f"{topic}-m", last_will=last_will) as marshal,
        marshal.consumer(f"g-{time.time_ns()}", [topic], start="earliest", delivery=delivery) as consumer,
    ):
        seen = 0
        while seen < count:
            batch = consumer.fetch(min(BATCH, count - seen), min_messages=min(BATCH, count - seen), expires_s=1.0)
            for part in batch.parts:
                values = part.values
                seen += len(values)
                yield values
            batch.ack()


def marshal_single(bootstrap: str, topic: str, count: int, last_will: str = "off", size: int = 1) -> Batches:
    import marshal_py

    with (
        marshal_py.connect(bootstrap, coordination_topic=f"{topic}-m", last_will=last_will) as marshal,
        marshal.consumer(f"g-{time.time_ns()}", [topic], start="earliest") as consumer,
    ):
        values: list[Any] = []
        for seen, message in enumerate(consumer, 1):
            values.append(message.value)
            message.ack()
            if len(values) == size or seen == count:
                yield values
                values = []
            if seen == count:
                return


def marshal_consume(bootstrap: str, topic: str, count: int, handled: bool) -> Batches:
    import queue

    import marshal_py

    with (
        marshal_py.connect(bootstrap, coordination_topic=f"{topic}-m") as marshal,
        marshal.consumer(f"g-{time.time_ns()}", [topic], start="earliest") as consumer,
    ):
        values: list[Any] = []
        if not handled:
            for seen, message in enumerate(consumer.consume(max_messages=BATCH), 1):
                values.append(message.value)
                message.ack()
                if len(values) == BATCH or seen == count:  # as the batches that it is compared with
                    yield values
                    values = []
                if seen == count:
                    return
        done: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

        def handle(message: Any) -> None:
            nonlocal values
            values.append(message.value)
            message.ack()
            if len(values) == BATCH:  # so that the queue between the threads is no part of the measurement
                done.put(values)
                values = []

        consumer.consume(handle, max_messages=BATCH)
        while True:
            yield done.get(timeout=IDLE_LIMIT_S)


def marshal_asyncio(bootstrap: str, topic: str, count: int, single: bool) -> Batches:
    import asyncio

    from marshal_py import aio

    loop = asyncio.new_event_loop()

    async def make() -> tuple[Any, Any]:
        marshal = await aio.connect(bootstrap, coordination_topic=f"{topic}-m")
        return marshal, await marshal.consumer(f"g-{time.time_ns()}", [topic], start="earliest")

    marshal, consumer = loop.run_until_complete(make())
    messages = aiter(consumer)

    async def many() -> list[Any]:
        batch = await consumer.fetch(min(BATCH, count - seen), min_messages=min(BATCH, count - seen), expires_s=1.0)
        values = [value for part in batch.parts for value in part.values]
        batch.ack()
        return values

    async def one_by_one() -> list[Any]:
        values, wanted = [], min(BATCH, count - seen)  # one event-loop entry for many messages, as for aiokafka
        async for message in messages:
            values.append(message.value)
            message.ack()
            if len(values) == wanted:
                break
        return values

    seen = 0
    while seen < count:
        values = loop.run_until_complete(one_by_one() if single else many())
        seen += len(values)
        yield values
    loop.run_until_complete(messages.aclose())
    loop.run_until_complete(marshal.close())


def aiokafka(bootstrap: str, topic: str, count: int, single: bool) -> Batches:
    import asyncio

    from aiokafka import AIOKafkaConsumer, TopicPartition

    loop = asyncio.new_event_loop()

    async def make() -> Any:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False)
        await consumer.start()
        consumer.assign([TopicPartition(topic, p) for p in range(PARTITIONS)])
        return consumer

    consumer = loop.run_until_complete(make())

    async def many() -> list[Any]:
        found = await consumer.getmany(max_records=min(BATCH, count - seen), timeout_ms=1000)
        return [message.value for messages in found.values() for message in messages]

    async def one_by_one() -> list[Any]:
        # One event-loop entry for many messages: `getone` is what is measured, not the entry.
        return [(await consumer.getone()).value for _ in range(min(BATCH, count - seen))]

    seen = 0
    while seen < count:
        values = loop.run_until_complete(one_by_one() if single else many())
        seen += len(values)
        yield values
    loop.run_until_complete(consumer.stop())


CONTESTANTS: Final[dict[str, Callable[[str, str, int], Batches]]] = {
    "bare consume(1000), default settings": lambda b, t, n: bare(b, t, n, False, False),
    "bare consume(1000), our settings": lambda b, t, n: bare(b, t, n, True, False),
    "bare consume(1000), a call per message": lambda b, t, n: bare(b, t, n, True, False, handled=True),
    "bare, with a clock, an object and an ack per message": least,
    "bare, sorted by partition and held": least_batches,
    "marshal fetch(1000), at least once": lambda b, t, n: marshal_batches(b, t, n, "at_least_once"),
    "marshal fetch(1000), with a witness": lambda b, t, n: marshal_batches(b, t, n, "at_least_once", "process"),
    "marshal fetch(1000), at most once": lambda b, t, n: marshal_batches(b, t, n, "at_most_once"),
    "aiokafka getmany(1000)": lambda b, t, n: aiokafka(b, t, n, False),
    "bare poll(), default settings": lambda b, t, n: bare(b, t, n, False, True),
    "bare poll(), our settings": lambda b, t, n: bare(b, t, n, True, True),
    "marshal iteration with ack": marshal_single,
    "marshal iteration with ack, with a witness": lambda b, t, n: marshal_single(b, t, n, "process"),
    "marshal iteration with ack, in lists of 1000": lambda b, t, n: marshal_single(b, t, n, size=BATCH),
    "marshal consume(1000), iterator": lambda b, t, n: marshal_consume(b, t, n, False),
    "marshal consume(1000), handler": lambda b, t, n: marshal_consume(b, t, n, True),
    "marshal aio fetch(1000)": lambda b, t, n: marshal_asyncio(b, t, n, False),
    "marshal aio iteration with ack": lambda b, t, n: marshal_asyncio(b, t, n, True),
    "aiokafka getone()": lambda b, t, n: aiokafka(b, t, n, True),
}
SLOW: Final = frozenset(name for name in CONTESTANTS if "default" in name or "aiokafka" in name)
# (contestant, compared with, goal)
RATIOS: Final = (
    ("marshal fetch(1000), at least once", "bare consume(1000), our settings", ">= 0.95"),
    ("marshal fetch(1000), at least once", "bare consume(1000), default settings", ">= 3"),
    ("bare, sorted by partition and held", "bare consume(1000), our settings", "none"),
    ("marshal fetch(1000), at least once", "bare, sorted by partition and held", "none"),
    ("marshal fetch(1000), with a witness", "marshal fetch(1000), at least once", ">= 0.99"),
    ("marshal iteration with ack, with a witness", "marshal iteration with ack", ">= 0.99"),
    ("marshal fetch(1000), at most once", "bare consume(1000), our settings", ">= 0.85"),
    ("marshal consume(1000), iterator", "bare consume(1000), our settings", ">= 0.95"),
    ("marshal consume(1000), handler", "bare consume(1000), our settings", ">= 0.95"),
    ("bare, with a clock, an object and an ack per message", "bare consume(1000), our settings", "none"),
    ("marshal consume(1000), iterator", "bare, with a clock, an object and an ack per message", "none"),
    ("marshal consume(1000), iterator", "bare consume(1000), a call per message", "none"),
    ("marshal consume(1000), handler", "bare consume(1000), a call per message", "none"),
    ("marshal iteration with ack", "bare poll(), our settings", ">= 1.0"),
    ("marshal iteration with ack", "bare poll(), default settings", ">= 3"),
    # asyncio's messages come in such lists, too
    ("marshal aio iteration with ack", "marshal iteration with ack, in lists of 1000", ">= 0.8"),
    ("marshal aio iteration with ack", "aiokafka getone()", ">= 2"),
    ("marshal aio fetch(1000)", "aiokafka getmany(1000)", ">= 1"),
)


def one(name: str, bootstrap: str, topic: str, count: int) -> dict[str, Any]:
    """Runs one contestant in this process. Returns its rate in messages per second, and how much it read."""
    seen = size = first = 0
    began = began_cpu = 0.0
    for values in CONTESTANTS[name](bootstrap, topic, count):
        if not seen and values:
            began, began_cpu, first = time.perf_counter(), time.process_time(), len(values)
        seen += len(values)
        size += sum(map(len, values))
        ended = time.perf_counter()
        if seen >= count:
            break
    rate = (seen - first) / max(ended - began, 1e-9)
    cpu_us = (time.process_time() - began_cpu) / max(seen - first, 1) * 1e6
    return {"rate": rate, "seen": seen, "bytes": size, "cpu_us": cpu_us}


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    """Fills a topic once, then lets every contestant read it, round after round."""
    count = MESSAGES_TINY if tiny else MESSAGES
    counts = {name: min(count, MESSAGES_SLOW) if name in SLOW else count for name in CONTESTANTS}
    rounds = 1 if tiny else ROUNDS
    found = environment.contest("bench.throughput", counts, rounds, PARTITIONS, SIZE_BYTES, SPARE)
    rates = {name: spread([run_["rate"] / 1000 for run_ in runs]) for name, runs in found.items()}
    rows: list[list[Any]] = [
        [name, rates[name], runs[0]["seen"], spread([r["cpu_us"] for r in runs])] for name, runs in found.items()
    ]
    notes = []
    for name, against, goal in RATIOS:
        pairs = [a["rate"] / b["rate"] for a, b in zip(found[name], found[against], strict=True)]
        ratio = spread(pairs)
        assert ratio is not None
        span = f"{ratio['median']:.2f} ({ratio['low']:.2f} - {ratio['high']:.2f})"
        notes.append(f"{name} / {against}: {span}, goal {goal}")
    columns = ["contestant", "thousand messages/s", "messages read", "CPU us per message"]
    return Result("throughput", columns, rows, notes, {"runs": found})


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
