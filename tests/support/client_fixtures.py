"""Fixtures of the client tests: a cluster in memory or in this process, and ways to wait for consumers.

A TestCluster has its own coordination topic, methods that write data, and a reader that folds a group's log from
genesis: tests learn what happened from verdicts, never from the time it took.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import marshal_py
from marshal_py import Batch, Consumer, Marshal, Message
from marshal_py.client.planner import Planner
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.identity import TopicPartition, route
from marshal_py.protocol.wire.records import ClaimingMessages, Genesis, MessageRange, Record
from marshal_py.testing import EmbeddedCluster, LocalCluster, MemoryCluster
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.memory import MemoryMessage, MemoryTransport

ROOT = Path(__file__).resolve().parents[2]
LOG = "__marshal"
LOGS = 2  # partitions of the coordination topic: two, so that a group is not always in the root
INTERVAL_S = 1.0  # the shortest that is allowed: every take-over waits two of them
CALM_S = 10.0  # where nothing is to be taken over: no machine stands still for so long that the lease ends
DEADLINE_S = 40.0  # for conditions; only something broken takes so long
T = TypeVar("T")


def until(condition: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Polls `condition` and returns its first true value. Fails at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: it did not come true"
        time.sleep(0.01)
    return value


class TestCluster:
    """A cluster for client tests. Topics and groups get new names. `local` is what users get for their own tests."""

    kind = ""
    local: LocalCluster

    @property
    def target(self) -> Any:
        """What `connect` takes."""
        raise NotImplementedError

    def create(self, topic: str, partitions: int) -> None:
        self.local.create_topic(topic, partitions)

    def put(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None = None,
        headers: list[tuple[str, bytes | None]] | None = None,
    ) -> None:
        self.local.produce(topic, value, key=key, partition=partition, headers=headers or (), timestamp_ms=1_000)

    def truncate(self, topic: str, partition: int, before: int) -> None:
        raise NotImplementedError

    def log_values(self, number: int) -> list[bytes | None]:
        """All values of a coordination partition."""
        raise NotImplementedError

    # --- the same for all

    def topic(self, partitions: int = 1) -> str:
        name = f"t-{uuid.uuid4().hex[:8]}"
        self.create(name, partitions)
        return name

    def group(self) -> str:
        return f"g-{uuid.uuid4().hex[:8]}"

    def connect(self, client_id: str | None = None, **options: Any) -> Marshal:
        return marshal_py.connect(self.target, client_id=client_id, **options)

    def fill(self, topic: str, partition: int, count: int, first: int = 0) -> None:
        self.local.produce_many(topic, [b"%d" % number for number in range(first, first + count)], partition=partition)

    @contextlib.contextmanager
    def reading(self, count: int, **options: Any) -> Iterator[Consumer]:
        """Yields the only consumer of a new group, and of a new topic that has `count` messages in one partition."""
        topic = self.topic()
        self.fill(topic, 0, count)
        with self.connect() as marshal, joined(marshal, self.group(), [topic], **options) as consumer:
            yield consumer

    def verdicts(self, group: str) -> list[Verdict]:
        """The verdicts on every record of this group, from genesis on."""
        return [verdict for verdict in self._fold(group)[1] if verdict.group == group]

    def world(self, group: str) -> World:
        """The state that the log of this group folds to."""
        return self._fold(group)[0]

    def _fold(self, group: str) -> tuple[World, list[Verdict]]:
        root = World(0, None)
        for offset, value in enumerate(self.log_values(0)):
            rationalizer.apply(root, offset, value)
        genesis = root.genesis
        assert isinstance(genesis, Genesis)
        number = route(group, genesis.partitions)
        world = World(number, None if number == 0 else genesis)
        return world, [rationalizer.apply(world, at, value) for at, value in enumerate(self.log_values(number))]

    def accepted(self, group: str, kind: type[Record]) -> list[Any]:
        """Accepted records of one kind, in the order of the log."""
        return [v.record for v in self.verdicts(group) if v.accepted and isinstance(v.record, kind)]

    def granted(self, group: str) -> list[MessageRange]:
        """The ranges of messages that were granted, in the order of the log (F5.2)."""
        found = []
        for verdict in self.verdicts(group):
            if isinstance(verdict.record, ClaimingMessages):
                found += [verdict.record.ranges[index] for index in verdict.granted]
        return found


class MemoryTestCluster(TestCluster):
    kind = "memory"

    def __init__(self) -> None:
        self.local = MemoryCluster()
        self.broker = self.local.broker
        self.broker.create_topic(LOG, LOGS)

    @property
    def target(self) -> MemoryTransport:
        return MemoryTransport(self.broker)

    def truncate(self, topic: str, partition: int, before: int) -> None:
        self.broker.delete_records(TopicPartition(topic, partition), before)

    def log_values(self, number: int) -> list[bytes | None]:
        return [message.value() for message in self.broker.topics[LOG][number] if message is not None]

    def jump(self, number: int) -> None:
        """Appends a record that leaves an offset out, as compaction or a transaction would."""
        with self.broker.lock:
            records = self.broker.topics[LOG][number]
            records.append(MemoryMessage(LOG, number, len(records) + 1, None, b"x", None, 0))
            self.broker.changed.notify_all()


class EmbeddedTestCluster(TestCluster):
    kind = "embedded"

    def __init__(self) -> None:
        self.local = EmbeddedCluster(coordination_partitions=LOGS)
        self.broker = self.local.broker

    @property
    def target(self) -> str:
        return self.local.bootstrap_servers

    def truncate(self, topic: str, partition: int, before: int) -> None:
        self.broker.truncate(topic, partition, before)

    def log_values(self, number: int) -> list[bytes | None]:
        log = KafkaTransport(self.target, DEADLINE_S).log(LOG, "observer")
        try:
            end = log.bounds(number, DEADLINE_S).end
            log.follow(number, 0)
            found: list[bytes | None] = []
            deadline = time.monotonic() + DEADLINE_S
            while len(found) < end:
                assert time.monotonic() < deadline, "the coordination log was not read"
                found += [record.value for record in log.poll(0.1)]
            return found
        finally:
            log.close(0.0)

    def close(self) -> None:
        self.local.close()


# --- consumers


def joined(marshal: Marshal, group: str, topics: Iterable[str], **options: Any) -> Consumer:
    """A consumer with this suite's defaults: the shortest interval, from the beginning."""
    options = {"heartbeat_interval_s": INTERVAL_S, "start": "earliest", **options}
    return marshal.consumer(group, list(topics), **options)


def calm(marshal: Marshal, group: str, topics: Iterable[str], **options: Any) -> Consumer:
    """A consumer that loses no grant because this machine stands still for a while."""
    return joined(marshal, group, topics, heartbeat_interval_s=CALM_S, **options)


def planning(marshal: Marshal, group: str, topics: Iterable[str], **options: Any) -> Planner:
    """A planner with the same defaults."""
    options = {"heartbeat_interval_s": INTERVAL_S, "start": "earliest", **options}
    return marshal.planner(group, list(topics), **options)


def collect(consumer: Consumer, count: int, *, ack: bool = True, deadline_s: float = DEADLINE_S) -> list[Message]:
    """Fetches the next `count` messages."""
    found: list[Message] = []
    deadline = time.monotonic() + deadline_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages"
        batch: Batch = consumer.fetch(count - len(found), expires_s=0.1)
        found += batch
        if ack:
            batch.ack()
    return found


def places(messages: Iterable[Message]) -> list[tuple[int, int]]:
    return [(message.partition, message.offset) for message in messages]


def owns(consumer: Consumer, *partitions: int) -> Callable[[], bool]:
    return lambda: {tp.partition for tp in consumer.cached_info().claims} == set(partitions)


def positions(consumer: Consumer) -> dict[int, int]:
    return {tp.partition: claim.position for tp, claim in consumer.cached_info().claims.items()}


class BackgroundConsumer:
    """Fetches on a thread of its own, as a program does, and keeps what came in `seen`."""

    def __init__(self, consumer: Consumer, *, ack: bool = True) -> None:
        self.consumer = consumer
        self.seen: list[Message] = []
        self.error: BaseException | None = None
        self._ack = ack
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                batch = self.consumer.fetch(100, expires_s=0.05)
                self.seen += batch
                if self._ack:
                    batch.ack()
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        self._over.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> BackgroundConsumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ConsumerProcess:
    """A consumer in a process of its own (consumer_process.py): what it prints comes as dicts, in order."""

    def __init__(self, servers: str, group: str, topic: str, *arguments: str, under: tuple[str, ...] = ()) -> None:
        """Starts it. `under`: a command that runs it, with its arguments, such as `marshal run --`."""
        self.events: list[dict[str, Any]] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [*under, sys.executable, "-B", "-m", "tests.support.consumer_process", servers, group, topic, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def look(self) -> list[dict[str, Any]]:
        """Everything that it has printed so far."""
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get_nowait()) is not None:
                self.events.append(json.loads(line))
        return self.events

    def said(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.look() if event["event"] == kind]

    def wait_for(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        return until(lambda: found if len(found := self.said(kind)) >= count else None, f"{count} times {kind!r}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._thread.join(DEADLINE_S)
        return code

    def __enter__(self) -> ConsumerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join(DEADLINE_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def clusters(kind: str) -> Iterator[TestCluster]:
    if kind == "memory":
        yield MemoryTestCluster()
        return
    cluster = EmbeddedTestCluster()
    yield cluster
    cluster.close()
