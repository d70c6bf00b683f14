"""How long does a consumer need from its start to its first message, with a short and with a long history in the log?

The coordination topic has one partition, whose log holds 10^3, 10^4, 10^5 or 10^6 records, written by 20 consumers that
have left. Logs of 10^4 records and more contain two snapshots, as consumers write them: the older one is 500 records
before the newer one, which as many follow. One more log of 10^5 records has no snapshot.

Measured in this process, the logs in turn: from the connect() call to the first message of a topic with one partition
and one message, and the CPU time of the whole process. It does not include the check that the older snapshot folds to
the newer one (PROTOCOL.md N9), which runs seconds later in the background.
"""

from __future__ import annotations

import time
from collections.abc import Container
from typing import Any, Final

from confluent_kafka import Producer

import marshal_py
from bench.environment import QUIET, BenchEnvironment, Result, Work, ratio, spread
from bench.fold import GROUP, INCARNATION, MEMBERS, history
from marshal_py.protocol.duties import SNAPSHOT_RECORDS_MIN
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.snapshot import digest_of, split, state_of, witness
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import Leave

SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
TINY_SIZES: Final = (1_000, 10_000)
BARE: Final = 100_000  # without a snapshot
BETWEEN: Final = SNAPSHOT_RECORDS_MIN  # from snapshot to snapshot
TAIL: Final = BETWEEN
REPEATS: Final = 7
TIMEOUT_S: Final = 120.0
GOAL: Final = "Goal: with 10^6 records behind snapshots at most 1.2 times as long as with 10^3."


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    topic = environment.topic(1)
    environment.fill(topic, 1, 1)
    sizes = TINY_SIZES if tiny else SIZES
    logs: dict[str, str] = {}
    for size in sizes:
        environment.say(f"a history of {size:,} records")
        logs[f"{size:,}"] = _log(environment, size, snapshots=size > sizes[0])
    if not tiny:
        logs[f"{BARE:,}, no snapshot"] = _log(environment, BARE, snapshots=False)
    took: dict[str, list[float]] = {name: [] for name in logs}
    spent: dict[str, list[float]] = {name: [] for name in logs}
    work = {name: Work() for name in logs}
    for _ in range(1 if tiny else REPEATS):
        for name, log in logs.items():
            wall_s, cpu_s = _start(environment, log, topic, work[name])
            took[name].append(wall_s)
            spent[name].append(cpu_s)
    environment.drop(topic, *logs.values())
    short = took[f"{sizes[0]:,}"]
    rows: list[list[Any]] = [
        [name, spread(took[name]), ratio(took[name], short), spread(spent[name]), str(work[name])] for name in logs
    ]
    columns = ["records of history", "first message after, s", "x the shortest", "CPU, s", "messages"]
    return Result("startup", columns, rows, [GOAL], {name: took[name] for name in logs})


def _log(environment: BenchEnvironment, size: int, snapshots: bool) -> str:
    """Creates a coordination topic with this history. Returns its name."""
    name = environment.topic(1, {"retention.ms": "-1", "retention.bytes": "-1"})
    values = history(size - TAIL - MEMBERS, 1)
    values += [codec.encode(Leave(1 + member), GROUP, INCARNATION) for member in range(MEMBERS)]
    if snapshots:
        values = vouched(values, (len(values) - BETWEEN, len(values)))
    values += values[MEMBERS + 200 :][:TAIL]  # heartbeats of sessions that have ended: read and rejected
    _append(environment, name, values)
    return name


def vouched(values: list[bytes], ends: Container[int], world: World | None = None) -> list[bytes]:
    """The same log with confirmed snapshots, one of the last checkpoint before each of these record numbers. `world`:
    of a log that does not begin with its Genesis, or of what is before `values`."""
    found: list[bytes] = []
    world = world or World()
    for number, value in enumerate(values, 1):
        found.append(value)
        apply(world, world.next_offset, value)
        if number in ends:
            while world.next_offset % CHECKPOINT_OFFSETS:
                found.append(values[0])  # a copy: ignored, or rejected
                apply(world, world.next_offset, values[0])
            data, genesis, at, state = state_of(world), world.genesis, world.chain_at, digest_of(world)
            assert data is not None
            assert genesis is not None
            records = [*split(genesis, b"w" * 16, at, state, world.chain, data)]
            records.append(witness(genesis, b"v" * 16, at, state, world.chain))
            for record in records:
                found.append(codec.encode(record, "", INCARNATION))
                apply(world, world.next_offset, found[-1])
    return found


def _append(environment: BenchEnvironment, topic: str, values: list[bytes]) -> None:
    producer = Producer(
        {
            "bootstrap.servers": environment.bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 20,
            "queue.buffering.max.messages": 1_100_000,
            **QUIET,
        }
    )
    for value in values:
        producer.produce(topic, value, GROUP.encode(), 0)
    if producer.flush(TIMEOUT_S):
        raise TimeoutError(f"{topic} did not take {len(values)} records within {TIMEOUT_S:g} s")


def _start(environment: BenchEnvironment, log: str, topic: str, work: Work) -> tuple[float, float]:
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    servers = {"bootstrap.servers": environment.bootstrap, **QUIET}
    with (
        marshal_py.connect(servers, coordination_topic=log, timeout_s=TIMEOUT_S) as marshal,
        marshal.consumer(environment.group("startup"), [topic], start="earliest") as consumer,
    ):
        message = next(iter(consumer))
        took_s, spent_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        work.add(message.partition, message.offset)
        message.ack()
    return took_s, spent_s
