"""What a simulated process has in place of librdkafka, threads and clocks: the other ports of the shipped client.

Each takes virtual time. What the cluster is asked gets an answer later; what is written leaves through the producer of
the process, which may be stopped between any two records.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final

from marshal_py.client.connection import Ask, Rest, TaskSteps, next_step
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.driver.loop import Turn
from marshal_py.errors import ClusterUnreachable, CoordinationError, MarshalError
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import Bounds, Headers, LogRecord, TopicInfo
from marshal_sim.cluster.log_reader import bounds_of, log_reader
from marshal_sim.cluster.process import Environment, Process

SERVERS: Final = "simulated"
LAGS: Final = 0.5  # how often a broker answers that lags behind, while some do
SILENT: Final = logging.Logger("simulated", logging.CRITICAL + 1)


class ClientLogger(logging.Logger):
    """Writes nothing, and raises again what the client logs as a bug of its own, by which one consumer ends: the run
    ends with it."""

    def exception(self, msg: object, *args: object, **options: Any) -> None:
        raise sys.exception() or AssertionError(msg)


class SimulatedLog:
    """Implements CoordinationLog for one process, which reads the log by itself (process.py)."""

    produce_errors = 0

    def __init__(self, process: Process) -> None:
        self._process = process
        self._held: deque[bytes] = deque()  # in the producer of a process that was stopped

    def append(self, log: int, key: bytes, value: bytes) -> bool:
        process = self._process
        if self._held or process.frozen:
            if not self._held:
                process.held_steps.appendleft((self._release, None))
            self._held.append(value)
        elif process.stall(self._release, None):
            self._held.append(value)
        else:
            process.post(value)
        return True

    def _release(self, _: None) -> None:
        """Sends what the producer still has, one by one. The process may be stopped again before each but the first."""
        self._process.post(self._held.popleft())
        while self._held:
            if self._process.stall(self._release, None):
                return
            self._process.post(self._held.popleft())
        self._process.ran()

    def follow(self, log: int, offset: int) -> None:
        raise AssertionError("a simulated process reads its log by itself")

    def poll(self, timeout_s: float) -> list[LogRecord]:
        raise AssertionError("a simulated process reads its log by itself")

    def gather(self, on: bool) -> None:
        pass

    def read(self, log: int, start: int, end: int, timeout_s: float) -> Iterator[list[LogRecord]]:
        check_up(self._process.environment, f"log {log}")
        return log_reader(self._process.environment.broker).read(log, start, end, timeout_s)

    def bounds(self, log: int, timeout_s: float) -> Bounds:
        check_up(self._process.environment, f"log {log}")
        return bounds_of(self._process.environment.broker, log)

    def waiting_for(self) -> str:
        broker, now_ms = self._process.environment.broker, self._process.environment.now_ms
        return "an outage" if max(broker.reads_down_until_ms, broker.writes_down_until_ms) > now_ms else ""

    def refused(self) -> MarshalError | None:
        return None

    def close(self, flush_s: float) -> None:
        pass


def check_up(environment: Environment, what: str) -> None:
    """Raises ClusterUnreachable during an outage. `what`: what was asked for."""
    if environment.broker.reads_down_until_ms > environment.now_ms:
        raise ClusterUnreachable(SERVERS, what, "an outage")


class SimulatedAdmin:
    """Implements the part of ClusterAdmin that consumers need. During an outage nothing is answered."""

    capabilities: frozenset[str] = frozenset({"truncate", "time_lookup"})

    def __init__(self, process: Process, heard: Callable[[str, TopicInfo], None]) -> None:
        """`heard(topic, info)` is told of each answer about a topic that exists."""
        self._environment, self._heard = process.environment, heard

    def _check(self, what: str) -> None:
        check_up(self._environment, what)

    def describe_topic(self, topic: str) -> TopicInfo | None:
        self._check(topic)
        environment = self._environment
        info, until_ms = environment.broker.lagging.get(topic, (None, 0))
        if until_ms <= environment.now_ms or environment.rng.random() >= LAGS:
            info = environment.broker.describe(topic, environment.now_ms)
        if info is not None:
            self._heard(topic, info)
        return info

    def topics(self) -> frozenset[str]:
        self._check("topics")
        broker, now_ms = self._environment.broker, self._environment.now_ms
        return frozenset(topic for topic in broker.counts if broker.describe(topic, now_ms) is not None)

    def partition_count(self, topic: str) -> int | None:
        info = self.describe_topic(topic)
        return None if info is None else info.partitions

    def bounds(
        self, tps: Sequence[TopicPartition], *, committed: bool = False, timeout_s: float | None = None
    ) -> dict[TopicPartition, Bounds]:
        self._check("bounds")
        broker, now_ms = self._environment.broker, self._environment.now_ms
        for tp in tps:
            if not broker.is_there(tp, now_ms):
                raise ClusterUnreachable(SERVERS, str(tp), "it does not exist")
            if not self._tells(tp):
                raise ClusterUnreachable(SERVERS, str(tp), "it has no leader, or one that does not know its end yet")
        return {tp: Bounds(broker.firsts[tp], broker.ends[tp]) for tp in tps}

    def told_offsets(
        self, tps: Sequence[TopicPartition], timeout_s: float, *, first: bool = False
    ) -> dict[TopicPartition, int]:
        there = self.bounds([tp for tp in tps if self._tells(tp)])
        return {tp: each.first if first else each.end for tp, each in there.items()}

    def _tells(self, tp: TopicPartition) -> bool:
        """Returns whether a leader answers questions for offsets: a new one not before it knows the end (KIP-207)."""
        broker = self._environment.broker
        return tp not in broker.leaderless and tp not in broker.high_watermarks

    def committed(self, group: str, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        self._check("committed offsets")
        return {}

    def offsets_at(self, tps: Sequence[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
        """Looks into coordination logs; the stamps are those of the leaders' clocks."""
        self._check("offsets by time")
        logs = self._environment.broker.logs
        stamps = {tp: enumerate(logs[tp.partition].stamps_ms) for tp in tps}
        found = {tp: next((at for at, ms in stamps[tp] if ms >= time_ms), None) for tp in tps}
        return {tp: at for tp, at in found.items() if at is not None}

    def delete_records(self, tp: TopicPartition, before: int) -> str:
        """Deletes records of a coordination log."""
        self._check("a deletion of records")
        log = self._environment.broker.logs[tp.partition]
        log.first = max(log.first, before)
        return ""

    def commit(self, group: str, positions: Mapping[TopicPartition, int]) -> str:
        self._check("a commit")
        return ""

    def close(self) -> None:
        pass


class SimulatedLogs:
    """Implements Logs: the log of one process, as its LogMaintenance sees it."""

    def __init__(self, process: Process, turn: Turn) -> None:
        self._process, self._turn = process, turn

    @property
    def worlds(self) -> dict[int, World]:
        return self._turn.worlds

    @property
    def drivers(self) -> list[ConsumerDriver]:
        return self._turn.drivers

    def break_log(self, number: int, error: CoordinationError) -> None:
        self._process.log_failed(error)

    def check_topic(self) -> bool:
        return self._process.topic_id == self._process.environment.broker.topic_id


class SimulatedWorker:
    """Runs tasks of one process, one after the other, each some time after it was submitted.

    A task that asks the cluster gets the answer later still, and the process goes on meanwhile. What is no error of the
    library is a finding, so it ends the run.
    """

    alive = True

    def __init__(self, process: Process) -> None:
        self._process = process
        self._tasks: deque[tuple[tuple[str, int], Callable[[], object]]] = deque()
        self._waiting: set[tuple[str, int]] = set()
        self._running = False

    @property
    def busy(self) -> bool:
        return self._running

    def submit(self, what: str, task: Callable[[], object], owner: object = None) -> None:
        key = what, id(owner)  # never ordered, so that the number does not matter
        if key in self._waiting:
            return
        self._waiting.add(key)
        self._tasks.append((key, task))
        if not self._running:
            self._running = True
            self._schedule(self._begin, None)

    def _schedule(self, step: Callable[[Any], None], argument: Any) -> None:
        environment = self._process.environment
        environment.schedule(environment.network_faults.read_ms(), self._process, step, argument)

    def _begin(self, _: None) -> None:
        key, task = self._tasks.popleft()
        self._waiting.discard(key)
        try:
            steps = task()
            if isinstance(steps, Generator):
                self._wait(steps, next(steps))
                return
        except (StopIteration, MarshalError):
            pass  # the member's next tick asks again for what it still needs
        self._ended()

    def _wait(self, steps: TaskSteps, step: Ask | Rest) -> None:
        environment = self._process.environment
        if isinstance(step, Rest):
            environment.schedule(round(step.seconds * 1000), self._process, self._rested, steps)
        else:
            self._schedule(self._ask, (steps, step))
        self._process.ran()

    def _ask(self, state: tuple[TaskSteps, Ask]) -> None:
        """Has the cluster answer now; the task hears it later."""
        steps, step = state
        environment = self._process.environment
        try:
            answer, error = step.question(), None
        except Exception as failed:
            answer, error = None, failed
        heard = _Answer(steps, answer, error)
        if environment.network_faults.late_refusal:  # else it comes soon
            environment.network_faults.in_flight.append(
                lambda: environment.schedule(0, self._process, self._answered, heard)
            )
        environment.schedule(environment.network_faults.question_ms(), self._process, self._answered, heard)

    def _answered(self, heard: _Answer) -> None:
        if not heard.given:  # it came when everything healed
            heard.given = True
            self._go_on(lambda: next_step(heard.steps, Ask(heard.say)), heard.steps)

    def _rested(self, steps: TaskSteps) -> None:
        self._go_on(lambda: next(steps), steps)

    def _go_on(self, continued: Callable[[], Ask | Rest], steps: TaskSteps) -> None:
        try:
            step = continued()
        except (StopIteration, MarshalError):
            self._ended()
        else:
            self._wait(steps, step)

    def _ended(self) -> None:
        self._running = bool(self._tasks)
        if self._tasks:
            self._schedule(self._begin, None)
        self._process.ran()

    def end(self) -> None:
        pass  # what waits is done; nothing follows

    def close(self, timeout_s: float) -> None:
        pass


class _Answer:
    """The cluster's answer to a question of a task, on its way to the task."""

    __slots__ = ("_answer", "_error", "given", "steps")

    def __init__(self, steps: TaskSteps, answer: Any, error: Exception | None) -> None:
        self.steps, self._answer, self._error = steps, answer, error
        self.given = False

    def say(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer


class SimulatedWriter:
    """Implements MessageWriter: writes dead letters, which may fail. `written(place, offset)` is told of each letter
    that the topic has."""

    def __init__(
        self, process: Process, fails: Callable[[], bool], written: Callable[[TopicPartition, int], None]
    ) -> None:
        self._process, self._fails, self._written = process, fails, written
        self._queued: list[tuple[TopicPartition, int]] = []

    def write(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int = 0,
    ) -> None:
        named = {name.rpartition(".")[2]: value or b"" for name, value in headers}
        place = TopicPartition(named["topic"].decode(), int(named["partition"]))
        self._queued.append((place, int(named["offset"])))

    def flush(self, timeout_s: float) -> None:
        environment = self._process.environment
        queued, self._queued = self._queued, []
        for place, offset in queued:  # of several letters, those before the one that fails are written
            if environment.broker.writes_down_until_ms > environment.now_ms or self._fails():
                raise ClusterUnreachable(SERVERS, "a dead letter", "an outage")
            self._written(place, offset)

    def close(self) -> None:
        self._queued = []
