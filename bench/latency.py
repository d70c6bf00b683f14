"""How long does a message take from the producer to the handler, and what do waiting and a steady stream cost?

Contestants, each in a fresh process, one after the other, in turn: every way to receive of marshal_py, and the bare
client, which commits every 5 s. The parent sends one message at a time, at random distances, so that no contestant can
follow a rhythm. The value of a message is the time of its `produce` on the machine's monotonic clock. A contestant
first waits for some seconds without any message: the CPU time of its process meanwhile is what waiting costs. Last, the
parent sends 1,000 messages per second, and the CPU time meanwhile is what handling them one by one costs.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from confluent_kafka import Producer

from bench.environment import QUIET, BenchEnvironment, Result, spread

PARTITIONS: Final = 4
MESSAGES: Final = 500
MESSAGES_TINY: Final = 20
SPACING_S: Final = (0.005, 0.045)  # between two messages, drawn evenly
IDLE_S: Final = 10.0
IDLE_TINY_S: Final = 1.0
LOAD_S: Final = 15  # covers three commits of the bare client
LOAD_TINY_S: Final = 1
LOAD_PER_S: Final = 1_000
ROUNDS: Final = 3
READY_TIMEOUT_S: Final = 60.0
FIRST_EACH_S: Final = 0.2  # between two messages that are sent until the contestant has received one

Values = Iterator[tuple[bytes | None, int]]


# --- contestants: each yields the values of messages as they come, with the time in ns, without an end


def bare(bootstrap: str, topic: str) -> Values:
    from confluent_kafka import Consumer, TopicPartition

    group = f"g-{time.time_ns()}"  # of its own: the next round must not begin where this one ended
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "latest", **QUIET})
    consumer.assign([TopicPartition(topic, p) for p in range(PARTITIONS)])
    while True:
        message = consumer.poll(1.0)
        if message is not None and not message.error():
            yield message.value(), time.monotonic_ns()


@contextlib.contextmanager
def joined(bootstrap: str, topic: str, delivery: str = "at_least_once") -> Iterator[Any]:
    import marshal_py

    with (
        marshal_py.connect(bootstrap, coordination_topic=f"{topic}-m") as marshal,
        marshal.consumer(f"g-{time.time_ns()}", [topic], start="latest", delivery=delivery) as consumer,
    ):
        yield consumer


def iteration(bootstrap: str, topic: str, delivery: str = "at_least_once") -> Values:
    with joined(bootstrap, topic, delivery) as consumer:
        for message in consumer:
            yield message.value, time.monotonic_ns()
            message.ack()


def one_by_one(bootstrap: str, topic: str) -> Values:
    with joined(bootstrap, topic) as consumer:
        while True:
            message = consumer.next()
            if message is not None:
                yield message.value, time.monotonic_ns()
                message.ack()


def batches(bootstrap: str, topic: str) -> Values:
    with joined(bootstrap, topic) as consumer:
        while True:
            batch = consumer.fetch(1000)
            for message in batch:
                yield message.value, time.monotonic_ns()
            batch.ack()


def with_handler(bootstrap: str, topic: str) -> Values:
    found: queue.SimpleQueue[tuple[bytes | None, int]] = queue.SimpleQueue()

    def handle(message: Any) -> None:
        found.put((message.value, time.monotonic_ns()))
        message.ack()

    with joined(bootstrap, topic) as consumer:
        consumer.consume(handle)
        while True:
            yield found.get(timeout=READY_TIMEOUT_S)


def consuming(bootstrap: str, topic: str) -> Values:
    with joined(bootstrap, topic) as consumer:
        for message in consumer.consume():
            yield message.value, time.monotonic_ns()
            message.ack()


def on_an_event_loop(bootstrap: str, topic: str) -> Values:
    import asyncio

    from marshal_py import aio

    loop = asyncio.new_event_loop()

    async def make() -> Any:
        marshal = await aio.connect(bootstrap, coordination_topic=f"{topic}-m")
        return await marshal.consumer(f"g-{time.time_ns()}", [topic], start="latest")

    async def following() -> tuple[Any, int]:
        message = await anext(messages)
        return message, time.monotonic_ns()

    messages = aiter(loop.run_until_complete(make()))
    while True:
        message, now_ns = loop.run_until_complete(following())
        yield message.value, now_ns
        message.ack()


CONTESTANTS: Final[dict[str, Callable[[str, str], Values]]] = {
    "bare poll()": bare,
    "marshal iteration": iteration,
    "marshal iteration, at most once": lambda b, t: iteration(b, t, "at_most_once"),
    "marshal next()": one_by_one,
    "marshal fetch(1000)": batches,
    "marshal consume(), iterator": consuming,
    "marshal consume(), handler": with_handler,
    "marshal aio iteration": on_an_event_loop,
}


def one(name: str, bootstrap: str, topic: str, count: int, load: int) -> dict[str, Any]:
    """Runs one contestant in this process: prints "ready" after its first message, then measures `count` messages.

    Messages of before the end of the idle time are not measured; the parent marks them with an empty value. Prints
    "load" then, and measures the CPU time of `load` more messages.
    """
    found: list[float] = []
    ready = False
    idle_cpu_s = idle_s = 0.0
    came = 0
    for value, now_ns in CONTESTANTS[name](bootstrap, topic):
        if len(found) == count:
            if not came:
                began, began_cpu = time.perf_counter(), time.process_time()
            came += 1
            if came == load:
                break
            continue
        if not value:
            if not ready:
                print("ready", flush=True)
                ready = True
            began, began_cpu = time.perf_counter(), time.process_time()
            continue
        if not found:
            idle_s, idle_cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        found.append((now_ns - int(value)) / 1e6)
        if len(found) == count:
            print("load", flush=True)
    load_s, load_cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    return {"ms": found, "idle_cpu": 100 * idle_cpu_s / max(idle_s, 1e-9), "load_cpu": 100 * load_cpu_s / load_s}


def _measure(
    name: str, bootstrap: str, topic: str, producer: Producer, tiny: bool, draw: random.Random
) -> dict[str, Any]:
    count, idle_s, load_s = (MESSAGES_TINY, IDLE_TINY_S, LOAD_TINY_S) if tiny else (MESSAGES, IDLE_S, LOAD_S)
    command = [sys.executable, "-m", "bench.latency", name, bootstrap, topic, str(count), str(load_s * LOAD_PER_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        reader = threading.Thread(target=lambda out: [lines.put(line) for line in out], args=(child.stdout,))
        reader.start()
        try:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while lines.empty():
                if time.monotonic() >= deadline or child.poll() is not None:
                    raise RuntimeError(f"{name}: it received no message")
                _send(producer, topic, b"", draw)
                time.sleep(FIRST_EACH_S)
            lines.get()
            time.sleep(idle_s)
            for _ in range(count):
                _send(producer, topic, b"%d" % time.monotonic_ns(), draw)
                time.sleep(draw.uniform(*SPACING_S))
            lines.get(timeout=READY_TIMEOUT_S)
            _send_steadily(producer, topic, load_s * LOAD_PER_S, draw)
            found: dict[str, Any] = json.loads(lines.get(timeout=READY_TIMEOUT_S))
            return found
        finally:
            child.kill()
            reader.join()


def _send(producer: Producer, topic: str, value: bytes, draw: random.Random) -> None:
    producer.produce(topic, value, partition=draw.randrange(PARTITIONS))
    producer.poll(0)


def _send_steadily(producer: Producer, topic: str, count: int, draw: random.Random) -> None:
    """Sends `count` messages, LOAD_PER_S in each second."""
    began = time.monotonic()
    for number in range(count):
        _send(producer, topic, b"load", draw)
        time.sleep(max(0.0, began + (number + 1) / LOAD_PER_S - time.monotonic()))
    producer.flush()


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    """Measures every contestant, round after round."""
    import marshal_py

    topic = environment.topic(PARTITIONS)
    marshal_py.connect(environment.bootstrap, coordination_topic=f"{topic}-m").close()
    producer = Producer({"bootstrap.servers": environment.bootstrap, "linger.ms": 0, **QUIET})
    draw = random.Random(1)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    for round_ in range(1 if tiny else ROUNDS):
        for name in CONTESTANTS:
            environment.say(f"round {round_ + 1}: {name}")
            found[name].append(_measure(name, environment.bootstrap, topic, producer, tiny, draw))
    producer.flush()
    environment.drop(topic, f"{topic}-m")
    rows: list[list[Any]] = [
        [
            name,
            spread([ms for one_ in runs for ms in one_["ms"]]),
            *(spread([one_[part] for one_ in runs]) for part in ("idle_cpu", "load_cpu")),
        ]
        for name, runs in found.items()
    ]
    notes = [
        "goal: the median at most 1 ms above that of bare poll(), idle below 1 % of a core",
        "goal at 1,000 messages per second: at most 1.5 times the CPU time of bare poll(), with asyncio 2 times",
        f"{MESSAGES_TINY if tiny else MESSAGES} messages per round, {PARTITIONS} partitions, "
        f"one every {SPACING_S[0]:g} to {SPACING_S[1]:g} s",
    ]
    columns = ["way to receive", "produce to handler, ms", "idle CPU, % of a core", "CPU at 1,000/s, % of a core"]
    return Result("latency", columns, rows, notes, {"runs": found})


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))))
