"""How long does one consumer need until it owns all partitions of a topic without owners?

Contestants: marshal_py, Kafka's groups: eager (range), cooperative-sticky, KIP-848 (`group.protocol=consumer`). One
consumer, alone in a fresh group, 256 and 1,000 empty partitions, defaults.

Measured in this process, the contestants in turn: from the consumer() or subscribe() call, already connected
(connect(), list_topics()), to the callback for the last partition (`on_claim`, `on_assign`). By then marshal_py has
looked up the start position of each partition, and has written, read back and folded one record for it. A Kafka group
only has its assignment, made by its only member or by the broker; it looks up positions afterwards.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from confluent_kafka import Consumer, TopicPartition

import marshal_py
from bench.environment import BenchEnvironment, Result, Work, ratio, spread
from bench.group_member import KAFKA_KINDS, KINDS, METADATA_TIMEOUT_S, kafka_settings

SIZES = (256, 1_000)
TINY_SIZES = (32,)
REPEATS = {"marshal": 5, "eager": 3, "cooperative": 3, "consumer": 3}
TIMEOUT_S = 60.0
POLL_S = 0.01
GOAL = "Goal for marshal: 256 free partitions in < 1 s."


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    rows: list[list[Any]] = []
    raw: dict[str, list[float]] = {}
    for partitions in TINY_SIZES if tiny else SIZES:
        environment.say(f"claims of {partitions} partitions")
        topic, coordination = environment.topic(partitions), environment.coordination()
        taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
        work = {kind: Work() for kind in KINDS}
        for turn in range(1 if tiny else max(REPEATS.values())):
            for kind in KINDS:
                if turn < REPEATS[kind]:
                    found = _claim(environment, kind, topic, coordination, partitions, work[kind])
                    taken[kind].append(found)
        environment.drop(topic, coordination)
        for kind in KINDS:
            rows.append(
                [
                    kind,
                    partitions,
                    len(taken[kind]),
                    spread(taken[kind]),
                    ratio(taken[kind], taken["marshal"]),
                    str(work[kind]),
                ]
            )
            raw[f"{kind}, {partitions}"] = taken[kind]
    return Result(
        "claims", ["contestant", "partitions", "runs", "all claimed after, s", "x marshal", "claims"], rows, [GOAL], raw
    )


def _claim(
    environment: BenchEnvironment, kind: str, topic: str, coordination: str, partitions: int, work: Work
) -> float:
    measure = _kafka if kind in KAFKA_KINDS else _marshal
    return measure(environment, kind, topic, coordination, partitions, work)


def _marshal(
    environment: BenchEnvironment, kind: str, topic: str, coordination: str, partitions: int, work: Work
) -> float:
    claimed: list[tuple[float, int]] = []
    whole = threading.Event()

    def on_claim(claim: marshal_py.info.ClaimInfo) -> None:
        claimed.append((time.monotonic(), claim.partition))
        if len(claimed) == partitions:
            whole.set()

    with marshal_py.connect(environment.bootstrap, coordination_topic=coordination) as marshal:
        began = time.monotonic()
        with marshal.consumer(environment.group(kind), [topic], on_claim=on_claim) as consumer:
            if not whole.wait(TIMEOUT_S):
                raise TimeoutError(f"{len(claimed)} of {partitions} claimed within {TIMEOUT_S:g} s")
            assert len(consumer.cached_info().claims) == partitions
    for _, partition in claimed:
        work.add(partition, 0)
    return claimed[-1][0] - began


def _kafka(
    environment: BenchEnvironment, kind: str, topic: str, coordination: str, partitions: int, work: Work
) -> float:
    claimed: list[int] = []

    def on_assign(_: Consumer, assigned: list[TopicPartition]) -> None:
        claimed.extend(found.partition for found in assigned)

    consumer = Consumer(kafka_settings(kind, environment.bootstrap, environment.group(kind)))
    try:
        consumer.list_topics(topic, timeout=METADATA_TIMEOUT_S)
        began = time.monotonic()
        consumer.subscribe([topic], on_assign=on_assign)
        while len(claimed) < partitions:
            consumer.poll(POLL_S)
            if time.monotonic() - began > TIMEOUT_S:
                raise TimeoutError(f"{kind}: {len(claimed)} of {partitions} assigned within {TIMEOUT_S:g} s")
        taken = time.monotonic() - began
    finally:
        consumer.close()
    for partition in claimed:
        work.add(partition, 0)
    return taken
