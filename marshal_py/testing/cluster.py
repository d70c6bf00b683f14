"""Clusters for tests: one in memory, whose time a test moves, and the embedded broker behind the same methods.

Both run in this process, know nothing of each other and leave nothing behind, so tests may run in parallel.

The clock runs as usual. `Timekeeper.advance` moves it from one deadline of a consumer to the next, by a tenth of a
heartbeat interval at least, and waits after each step until nobody has anything to do. So nobody's lease ends only
because the clock has jumped. What a thread waits for (`fetch`, `next`, a timeout) takes real time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Self, TypeVar

from marshal_py.admin.async_marshal import AsyncMarshal
from marshal_py.admin.group import Group, Paused
from marshal_py.admin.marshal import Marshal, connect
from marshal_py.client.async_consumer import AsyncConsumer
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.driver.loop import Loop
from marshal_py.client.marshal import Marshal as ClientMarshal
from marshal_py.client.marshal import open_marshals
from marshal_py.client.membership import Membership
from marshal_py.client.values.options import COORDINATION_TOPIC
from marshal_py.errors import ConsumerClosed, InvalidOption, UnsupportedPlatform
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import EVICT_INTERVALS, Evict
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport, in_thread
from marshal_py.transport.memory import MemoryBroker, MemoryTransport
from marshal_py.transport.ports import MessageWriter, Transport
from marshal_py.transport.topic_checks import COORDINATION_PARTITIONS

SETTLE_S: Final = 10.0  # a step takes about a millisecond; only something that hangs takes so long
SETTLE_POLL_S: Final = 0.0002
STEPS_PER_INTERVAL: Final = 10  # at most: a wait for a dead consumer counts in such steps, and must not take longer
RUN_FACTOR: Final = 100  # `run_until` moves the clock so many times as fast as real time
RUN_POLL_S: Final = 0.001

T = TypeVar("T")


def marshals_of(servers: str) -> list[ClientMarshal]:
    """Returns the Marshals of this process that are connected to `servers` and not closed."""
    return [marshal for marshal in list(open_marshals) if marshal._context.servers == servers]


class MovableClock:
    """Implements Clock: the clocks of this machine, plus what the test has added."""

    def __init__(self) -> None:
        self._system = SystemClock()
        self._added_ms = 0

    def now(self) -> Instant:
        added_ms = self._added_ms
        return Instant(*(clock_ms + added_ms for clock_ms in self._system.now()))

    def boot_ns(self) -> int:
        return self._system.boot_ns() + self._added_ms * 1_000_000

    def move(self, by_ms: int) -> None:
        self._added_ms += by_ms


class Timekeeper:
    """Moves the clock of one MemoryBroker. `stopped`: Marshals that do nothing any more, so nobody waits for them."""

    def __init__(self, broker: MemoryBroker, clock: MovableClock) -> None:
        self._broker, self._clock = broker, clock
        self.stopped: list[ClientMarshal] = []

    def _running(self) -> Iterator[tuple[ClientMarshal, MemoryTransport, Loop]]:
        for marshal in marshals_of(self._broker.bootstrap_servers):
            if marshal not in self.stopped:
                assert isinstance(marshal.transport, MemoryTransport)
                yield marshal, marshal.transport, marshal._loop

    def settle(self) -> None:
        """Waits until every consumer has done what is due now. Raises TimeoutError after SETTLE_S."""
        deadline, before = time.monotonic() + SETTLE_S, None
        while True:
            busy, state = self._look()
            if not busy and state == before:  # twice the same: nobody has sent anything between the two looks
                return
            before = state
            if time.monotonic() >= deadline:
                raise TimeoutError(f"after {SETTLE_S:g} s there was still something to do: {', '.join(busy)}")
            self._broker.wake()
            time.sleep(SETTLE_POLL_S)

    def _look(self) -> tuple[list[str], list[int]]:
        """Returns the client ids of the Marshals that are busy, and numbers that change with whatever happens."""
        busy, state = [], []
        for marshal, transport, loop in self._running():
            behind = False
            for number, world in list(loop.worlds.items()):
                tp = TopicPartition(marshal.coordination_topic, number)
                with self._broker.lock:
                    end = self._broker.bounds(tp).end if self._broker.has(tp) else world.next_offset
                state.append(end)
                behind |= transport.connection.up and world.next_offset < end
            state.append(loop.turn.folded)
            if behind or loop.busy():
                busy.append(marshal.client_id)
        return busy, state

    def _step_ms(self, most_ms: int) -> int:
        """Returns how far the clock may move at once: to the next deadline, or a tenth of an interval if that is more.

        What consumers do within a tenth of an interval is then one step of the clock, so that time passes faster with
        many of them. It is at most `most_ms`.
        """
        now_ms = self._clock.now().mono_ms
        deadlines = [due for _, _, loop in self._running() if (due := loop.turn.deadline_ms()) is not None]
        thirds = [driver.member.third_ms for _, _, loop in self._running() for driver in loop.drivers]
        least_ms = min(thirds, default=1) * 3 // STEPS_PER_INTERVAL
        return min(max(least_ms, min(deadlines, default=now_ms + most_ms) - now_ms), most_ms)

    def _step(self, most_ms: int) -> int:
        step_ms = self._step_ms(most_ms)
        self._clock.move(step_ms)
        self.settle()
        return step_ms

    def advance(self, seconds: float) -> None:
        """Lets so many seconds pass at once."""
        until_ms = self._clock.now().mono_ms + round(seconds * 1000)
        self.settle()
        while (left_ms := until_ms - self._clock.now().mono_ms) > 0:
            self._step(left_ms)

    def run_until(self, condition: Callable[[], T], timeout_s: float) -> T:
        """Lets time pass RUN_FACTOR times as fast, until `condition()` is true; returns its value. Raises TimeoutError.

        `timeout_s`: of real time.
        """
        deadline, ahead_ms, began = time.monotonic() + timeout_s, 0, time.monotonic()
        self.settle()
        while not (value := condition()):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the condition did not come true within {timeout_s:g} s")
            allowed_ms = round((time.monotonic() - began) * 1000 * RUN_FACTOR) - ahead_ms
            if allowed_ms > 0:
                ahead_ms += self._step(allowed_ms)
            else:
                time.sleep(RUN_POLL_S)
        return value


TIMEOUT_S: Final = 10.0  # of real time, for what takes milliseconds
PAUSE_S: Final = 3_600.0  # in the consumers' time: a test ends it, or moves the clock
POLL_S: Final = 0.005
FENCE_INTERVALS: Final = 1.25  # a lease lasts one, its end is noticed a tenth later; after two comes the eviction
BY: Final = "marshal_py.testing"


AnyConsumer = Membership | AsyncConsumer[Any, Any]
AnyMarshal = Marshal | AsyncMarshal


class LocalCluster(ABC):
    """A cluster in this process. It is a context manager: leaving it closes every Marshal that is connected to it."""

    def __init__(self) -> None:
        self._writer: MessageWriter | None = None

    @property
    @abstractmethod
    def bootstrap_servers(self) -> str:
        """Returns what `connect` takes, here or in the service under test: a name as text."""

    @abstractmethod
    def _transport(self) -> Transport: ...

    @abstractmethod
    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Creates a topic."""

    def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        timestamp_ms: int = 0,
    ) -> None:
        """Writes a message, and returns once it can be read.

        Without `partition` the key chooses it, as librdkafka does by default. `timestamp_ms`: since 1970, 0 is now.
        Raises TopicMissing, InvalidOption.
        """
        _check_bytes("value", value)
        _check_bytes("key", key)
        headers = list(headers)
        for name, content in headers:
            _check_bytes(f"header {name}", content)
        writer = self._writing()
        writer.write(topic, value, key, headers, partition, timestamp_ms)
        writer.flush(TIMEOUT_S)

    def produce_many(self, topic: str, values: Iterable[bytes | None], *, partition: int | None = None) -> None:
        """Writes a message per value, as `produce` does, and returns once all of them can be read. Those before one
        that is refused are written."""
        writer = self._writing()
        for value in values:
            _check_bytes("value", value)
            writer.write(topic, value, partition=partition)
        writer.flush(TIMEOUT_S)

    def _writing(self) -> MessageWriter:
        if self._writer is None:
            self._writer = self._transport().writer()
        return self._writer

    def connect(self, client_id: str | None = None, **options: Any) -> Marshal:
        """Does `marshal_py.connect`, with the same options. The Marshal is closed with the cluster at the latest.

        So are its consumers, also those that the test drops.
        """
        marshal = connect(self.bootstrap_servers, client_id=client_id, **options)
        marshal._joining.kept = True
        return marshal

    def group(self, name: str, coordination_topic: str = COORDINATION_TOPIC) -> Group:
        """Returns the operations on a group: its positions, its members, a move of its positions."""
        return Group(self._transport(), name, coordination_topic, timeout_s=TIMEOUT_S)

    # --- time

    def settle(self) -> None:
        """Waits until every consumer has done what is due now. In memory alone."""
        raise _in_memory_alone("settle")

    def advance(self, seconds: float) -> None:
        """Lets so many seconds pass at once for the consumers: heartbeats, leases, take-overs, timeouts, pauses.

        It takes about a millisecond per heartbeat. Calls that wait (`fetch`, `next`) measure real time all the same. In
        memory alone.
        """
        raise _in_memory_alone("advance")

    @abstractmethod
    def run_until(self, condition: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
        """Lets time pass until `condition()` is true, in memory a hundred times as fast. Returns the condition's value.

        `timeout_s`: of real time; then it raises TimeoutError.
        """

    # --- switches

    @abstractmethod
    def outage(self) -> AbstractContextManager[None]:
        """Loses the cluster for the length of a `with` block: nobody reaches it, and what is sent is not stored."""

    def fence(self, consumer: AnyConsumer) -> AbstractContextManager[None]:
        """Ends the consumer's lease for the length of a `with` block: it keeps its claims and delivers nothing.

        Its connection is cut, and a little more than one heartbeat interval passes. At the end of the block it is
        connected again, and its lease is renewed. If another interval passes inside the block, other members take its
        partitions over. In memory alone.
        """
        raise _in_memory_alone("fence")

    def kill(self, marshal: AnyMarshal) -> None:
        """Stops a Marshal and its consumers as `kill -9` would: they write nothing more.

        After two heartbeat intervals (`advance`) other members take over. In memory alone.
        """
        raise _in_memory_alone("kill")

    def evict(self, consumer: AnyConsumer) -> None:
        """Ends the consumer's session, as other members do with one that is silent. It loses its claims and rejoins.

        Returns when it has read that. Raises ConsumerClosed.
        """
        driver = _plain(consumer)._driver
        member = driver.member
        session = member.session
        if session == NONE or driver.ended:
            raise ConsumerClosed("Consumer", "it has no session that could be evicted")
        log = self._transport().log(driver.context.topic, BY)
        sent: set[int] = set()  # the signs of life that an Evict of ours has named

        def evicted() -> bool:
            with driver.context.lock:
                state = None if member.group is None else member.group.sessions.get(session)
                version = member.writes_version
            if state is not None and state.extended not in sent:  # at first, and when a heartbeat came before it
                sent.add(state.extended)
                record = Evict(session, state.extended, EVICT_INTERVALS * state.join.interval_ms, BY)
                log.append(driver.log, driver.group_key, codec.encode(record, member.name, driver.incarnation, version))
            return member.session != session

        try:
            _wait(evicted, "the eviction")
        finally:
            log.close(TIMEOUT_S)

    def redeliver(self, consumer: AnyConsumer) -> None:
        """Has every message delivered again that was delivered and not acked, as after a take-over: with a greater
        token and a greater `delivery_count`.

        First the positions of acked messages are written to the log, so these do not come again. Then the consumer is
        evicted; it claims its partitions again, or another member does. Raises InvalidOption in at-most-once mode,
        ConsumerClosed.
        """
        plain = _plain(consumer)
        context, member = plain._context, plain._driver.member
        assert isinstance(plain._driver.queue, DeliveryQueue)
        if plain._driver.queue.at_most_once:
            raise InvalidOption("consumer", member.name, "in at-least-once mode: otherwise nothing comes again")
        lost = set(plain.cached_info().claims)
        with context.outbox, context.lock:
            member.urgent = True  # a heartbeat tells what was delivered, too, so that the counts are exact
            plain._driver.kick()
        known = plain._driver.queue.delivery.lost_acks.count  # the user's own flush is told of these
        context.complete(plain._confirmations.flush(TIMEOUT_S, after=known))
        self.evict(plain)

        def owned() -> bool:
            with context.lock:
                group = member.group
                return group is not None and all(group.partitions[tp].owner != NONE for tp in lost)

        self.run_until(owned)

    def pause(self, group: str, duration_s: float = PAUSE_S) -> Paused:
        """Pauses a group, and returns when every partition is free. `resume` ends the pause.

        Messages that were not acked keep their partition for up to one heartbeat interval first; in memory this time
        passes at once. An ack that comes after the call returns False. Raises GroupMissing.
        """
        return self._run(lambda: self.group(group).pause(duration_s, BY))

    def resume(self, group: str) -> bool:
        """Ends the pause of a group. Returns False if it was not paused."""
        return self._run(lambda: self.group(group).resume(take_over=True))

    def _run(self, operation: Callable[[], T]) -> T:
        """Runs an operation of an admin while time passes. Returns its result, raises its error."""
        answer = in_thread(operation, "marshal-testing")
        self.run_until(answer.done, timeout_s=6 * TIMEOUT_S)
        return answer.result()

    # --- end

    def close(self) -> None:
        """Closes every Marshal that is connected to it, also those of the code under test; then forgets everything."""
        errors: list[Exception] = []
        for marshal in marshals_of(self.bootstrap_servers):
            try:
                marshal.close()
            except Exception as error:  # the others have threads, too
                errors.append(error)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if errors:
            raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryCluster(LocalCluster):
    """A cluster in memory. Joining, reading and acking take a few milliseconds, and a test moves its time.

    `broker`: the transport's broker, with more switches for faults. Only marshal_py can connect to it; code that uses
    another Kafka client needs the embedded broker.
    """

    def __init__(self) -> None:
        super().__init__()
        clock = MovableClock()
        self.broker: MemoryBroker = MemoryBroker(clock)
        self._time = Timekeeper(self.broker, clock)

    @property
    def bootstrap_servers(self) -> str:
        return self.broker.bootstrap_servers

    def _transport(self) -> MemoryTransport:
        return MemoryTransport(self.broker)

    def create_topic(self, name: str, partitions: int = 1) -> None:
        self._transport().admin().topic_admin().create(name, partitions, None, {}, False)

    def settle(self) -> None:
        self._time.settle()

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise InvalidOption("seconds", seconds, "0 or more: time does not run backwards")
        self._time.advance(seconds)

    def run_until(self, condition: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
        return self._time.run_until(condition, timeout_s)

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.broker.down = True
        self.broker.wake()
        try:
            yield
        finally:
            self.broker.down = False
            self.broker.wake()

    @contextmanager
    def fence(self, consumer: AnyConsumer) -> Iterator[None]:
        plain = _plain(consumer)
        connection = self._connection_of(plain)
        driver, clock = plain._driver, self.broker.clock
        connection.cut = True
        try:
            self._time.advance(FENCE_INTERVALS * driver.options.heartbeat_interval_s)
            yield
        finally:
            connection.cut = False
            self.broker.wake()
        self._time.run_until(lambda: driver.ended or driver.member.healthy(clock.now()), TIMEOUT_S)

    def redeliver(self, consumer: AnyConsumer) -> None:
        super().redeliver(consumer)
        # A second time in a row it looks as if messages killed their owners: for one interval they come one by one.
        self._time.advance(_plain(consumer)._driver.options.heartbeat_interval_s)

    def kill(self, marshal: AnyMarshal) -> None:
        plain = marshal._plain if isinstance(marshal, AsyncMarshal) else marshal
        assert isinstance(plain.transport, MemoryTransport)
        plain.transport.connection.cut = True
        for ending in plain._joining.endings.values():
            ending.fronts += 1  # a consumer that is dead is not one that the program has dropped
        self._time.stopped.append(plain)

    def _connection_of(self, consumer: Membership) -> Any:
        for marshal in marshals_of(self.bootstrap_servers):
            if marshal._context is consumer._context:
                assert isinstance(marshal.transport, MemoryTransport)
                return marshal.transport.connection
        raise ConsumerClosed("Consumer", "its Marshal is not connected to this cluster")

    def close(self) -> None:
        for marshal in self._time.stopped:
            marshal.close(0.0)
        super().close()
        self.broker.down = True


class EmbeddedCluster(LocalCluster):
    """The embedded broker: any Kafka client can connect to it. Time is real there, and no single client can be cut
    off."""

    def __init__(self, coordination_partitions: int = COORDINATION_PARTITIONS) -> None:
        """Starts the broker and creates the coordination topic, which clients cannot do there."""
        super().__init__()
        self.broker: Broker = Broker(topics={COORDINATION_TOPIC: coordination_partitions}).start()

    @property
    def bootstrap_servers(self) -> str:
        return self.broker.bootstrap_servers

    def _transport(self) -> KafkaTransport:
        return KafkaTransport(self.bootstrap_servers, TIMEOUT_S)

    def create_topic(self, name: str, partitions: int = 1) -> None:
        self.broker.create_topic(name, partitions)

    def run_until(self, condition: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
        return _wait(condition, "the condition", timeout_s)

    @contextmanager
    def outage(self) -> Iterator[None]:
        for number in range(1, self.broker.brokers + 1):
            self.broker.broker_down(number)
        try:
            yield
        finally:
            for number in range(1, self.broker.brokers + 1):
                self.broker.broker_up(number)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.broker.close()


def local_cluster(kind: str = "memory") -> LocalCluster:
    """Makes a cluster: "memory" or "embedded". Raises InvalidOption."""
    if kind == "memory":
        return MemoryCluster()
    if kind == "embedded":
        return EmbeddedCluster()
    raise InvalidOption("marshal_broker_kind", kind, '"memory" or "embedded"')


def _check_bytes(name: str, content: object) -> None:
    """Raises InvalidOption for what Kafka cannot hold."""
    if content is not None and not isinstance(content, bytes):
        raise InvalidOption(name, content, "bytes, as a serializer of a producer returns them, or None")


def _plain(consumer: AnyConsumer) -> Membership:
    """Returns the consumer itself, or the one behind an asynchronous one."""
    return consumer._consumer if isinstance(consumer, AsyncConsumer) else consumer


def _in_memory_alone(verb: str) -> UnsupportedPlatform:
    return UnsupportedPlatform(verb, "the embedded broker", "use the cluster in memory (marshal_broker's default)")


def _wait(condition: Callable[[], T], what: str, timeout_s: float = TIMEOUT_S) -> T:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} did not come true within {timeout_s:g} s")
        time.sleep(POLL_S)
    return value
