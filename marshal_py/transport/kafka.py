"""Implements the transport to Kafka: the coordination log over confluent_kafka, a reader of explicit ranges of offsets,
and the factory of all interfaces.

The log is read with `poll` and then drained with `consume(n, 0)`, because `consume(n, timeout)` would wait for n
messages or the whole timeout. This file reports what the cluster answered; the fold judges gaps and foreign records.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka import TopicPartition as KafkaPartition
from msgspec import Struct

from marshal_py.errors import (
    AccessDenied,
    ClusterUnreachable,
    CoordinationError,
    HistoryTruncated,
    MarshalError,
    MessageTooLarge,
    PartitionError,
    RangeLost,
    TopicRecreated,
)
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport import settings
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.connecting import (
    READ,
    WRITE,
    ConnectionErrors,
    call_directly,
    cluster_id,
    metadata,
    redirect_callbacks,
)
from marshal_py.transport.embedded import FETCH_WAIT_MS, is_embedded
from marshal_py.transport.kafka_admin import KafkaAdmin, SharedRequester, list_bounds
from marshal_py.transport.kafka_source import KafkaSource
from marshal_py.transport.ports import Bounds, LogRecord, OnWritten
from marshal_py.transport.producer import KafkaProducer

T = TypeVar("T")

DRAIN_MAX: Final = 10_000  # records taken at once: bounds the memory and the time under the caller's lock
LOG_FETCH_WAIT_MS: Final = 100  # how long an idle fetch waits at the broker, which answers at once when a record comes
# So long the client of a `read` waits, because it begins the next one only when that is over.
RANGE_FETCH_WAIT_MS: Final = 2
GATHER_BYTES: Final = 65_536  # `gather`: a fetch waits for so many bytes, or for LOG_FETCH_WAIT_MS
BOUNDS_TIMEOUT_S: Final = 10.0
LEARN_TIMEOUT_S: Final = 3.0  # before the first log is followed; afterwards librdkafka looks itself, once a second
FLUSH_POLL_S: Final = 0.05  # how often `close` checks whether everything is written
READ_POLL_S: Final = 0.1  # `read` returns from C this often, so that Ctrl-C can take effect

IDLE_S: Final = 5.0  # what reads pieces of a log reads the next one sooner
LISTEN_S: Final = 1.0  # how often the client for requests is polled for its events
DENIED_RETRY_S: Final = 1.0  # a reader that was denied a partition tries again after this
SIZE: Final = "Size"  # a kind of refusal; writing smaller records does not clear it
STATISTICS_KEPT: Final = 3  # intervals without statistics, after which their client counts as closed

# A missing Write also shows as the cluster's refusal, because Write implies the right to an idempotent producer.
_NO_RIGHT: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})


class KafkaLog:
    """Implements CoordinationLog over a Consumer and a Producer."""

    def __init__(
        self,
        given: settings.Settings,
        topic: str,
        client_id: str,
        fetch_wait_ms: int,
        writes: bool,
        requester: SharedRequester,
    ) -> None:
        self.topic = topic
        self._given = given
        self._servers = str(given["bootstrap.servers"])
        self.produce_errors: int = 0
        self._errors = ConnectionErrors(given)
        self._too_large_bytes = 0  # size of the smallest record that the cluster refused as too large; 0 if none
        self._followed: dict[int, int] = {}  # log -> next offset
        self._last: dict[int, LogRecord] = {}  # log -> the last record that was read
        self._again: dict[int, LogRecord] = {}  # the same, where it is read again
        self._cut: set[int] = set()  # logs of which it was not there any more
        self._to_follow: dict[int, int] = {}  # requested; the polling thread passes it on to the client
        self._wake_lock = threading.Lock()  # released to wake a thread that waits because nothing is followed yet
        self._wake_lock.acquire()
        self._broken: deque[CoordinationError] = deque()  # raised one by one; other logs are still read
        self._poll_lock = (
            threading.Lock()
        )  # librdkafka frees a client even while another thread is inside it, so `close` waits
        self._closed = False
        self._bounds_asked: dict[int, tuple[int, Future[Bounds]]] = {}  # log -> refused position, bounds of the log
        self._denied: dict[int, float] = {}  # log -> when reading it is retried
        self._listen_s = 0.0
        self._reader = {**settings.log_reader(given, client_id, fetch_wait_ms), "error_cb": self._errors.on_error}
        self._ranges = {**self._reader, "fetch.wait.max.ms": min(fetch_wait_ms, RANGE_FETCH_WAIT_MS)}
        self._can_gather = fetch_wait_ms == LOG_FETCH_WAIT_MS  # the embedded broker counts no bytes
        self._gather = self._gathers = False  # asked for, and done by the client that reads
        self._next_consumer: Future[Consumer] | None = None  # connects already, and will read instead
        self._consumer = settings.create_client(Consumer, self._reader)
        self._idle: deque[tuple[Consumer, float]] = deque()  # clients that a `read` has left for the next one, and when
        self._requester = requester
        requester.join()
        self._writer = {**settings.log_writer(given, client_id), "error_cb": self._errors.on_error}
        self._producer_lock = threading.Lock()
        self._producer = settings.create_client(Producer, self._writer) if writes else None

    def _note_error(self, error: KafkaError, operation: str) -> None:
        if error.code() in _NO_RIGHT:
            denied = AccessDenied(settings.principal_of(self._given), operation, "topic", self.topic)
            self._errors.refuse(operation, denied)
        self._errors.note(error.str())

    def follow(self, log: int, offset: int) -> None:
        self._to_follow[log] = offset
        with contextlib.suppress(RuntimeError):  # it is released already
            self._wake_lock.release()

    def gather(self, on: bool) -> None:
        self._gather = on and self._can_gather

    def _exchange_consumer(self) -> None:
        """Has another client read if `gather` has asked for it, because librdkafka changes no setting of a client that
        runs. The old one reads until the new one has connected."""
        coming = self._next_consumer
        if coming is None and self._gather != self._gathers:
            extra = {"fetch.min.bytes": GATHER_BYTES, "fetch.wait.max.ms": LOG_FETCH_WAIT_MS} if self._gather else {}
            self._gathers = self._gather
            self._next_consumer = in_thread(lambda: self._connected({**self._reader, **extra}))
        elif coming is not None and coming.done():
            self._next_consumer = None
            if coming.exception() is not None:  # a machine without threads or descriptors: the old one reads on
                self._gathers = not self._gathers
                return
            old, self._consumer = self._consumer, coming.result()
            # It begins with the last record that was read, to see whether the log was cut and has grown again:
            # librdkafka compares leader epochs (KIP-320) only with what a client has read itself.
            self._again = dict(self._last)
            starts = {**self._followed, **{log: last.offset for log, last in self._again.items()}}
            self._consumer.assign([KafkaPartition(self.topic, log, at) for log, at in starts.items()])
            in_thread(old.close)

    def _connected(self, reader: settings.Settings) -> Consumer:
        """Returns a client that knows the leaders of the topic, so that it can read at once. May wait."""
        consumer = settings.create_client(Consumer, reader)
        with contextlib.suppress(KafkaException):  # it learns them later
            metadata(consumer, self.topic, LEARN_TIMEOUT_S)
        return consumer

    def _start_following(self, log: int, offset: int) -> None:
        """Makes the client read `log` from `offset` on. The polling thread alone: the client admits no other."""
        at = KafkaPartition(self.topic, log, offset)
        if not self._followed:
            # As in KafkaSource.learn_leaders: an assignment of an unknown topic waits for librdkafka's next look.
            with contextlib.suppress(KafkaException):
                metadata(self._consumer, self.topic, LEARN_TIMEOUT_S)
        self._bounds_asked.pop(log, None)
        self._denied.pop(log, None)
        if log in self._followed:
            self._consumer.incremental_unassign([at])
        self._followed[log] = offset
        self._last.pop(log, None)
        self._again.pop(log, None)
        self._cut.discard(log)
        self._consumer.incremental_assign([at])

    def poll(self, timeout_s: float) -> list[LogRecord]:
        if not self._followed and not self._to_follow:
            self._wake_lock.acquire(timeout=timeout_s)
            timeout_s = 0.0
        with self._poll_lock:
            while self._to_follow and not self._closed:
                self._start_following(*self._to_follow.popitem())
            if not self._closed:
                self._exchange_consumer()
            records = [] if self._closed or self._broken else self._read(timeout_s)
        if self._broken and not records:
            raise self._broken.popleft()
        return records

    def _read(self, timeout_s: float) -> list[LogRecord]:
        self._handle_events()
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        records: list[LogRecord] = []
        for message in (first, *self._consumer.consume(DRAIN_MAX, 0)):
            error = message.error()
            if error is not None:
                self._read_error(message, error)
                continue
            log, offset = message.partition(), message.offset()
            assert log is not None
            assert offset is not None
            record = LogRecord(log, offset, message.value(), message.timestamp()[1], message.key())
            if self._again and not self._continues(record):
                continue
            self._followed[log], self._last[log] = offset + 1, record
            records.append(record)
        if records:
            self._errors.succeed(READ)
        return records

    def _continues(self, record: LogRecord) -> bool:
        """Returns whether a record follows what was read; not the record that is read again, nor any of a log that was
        cut."""
        last = self._again.get(record.log)
        if last is None:
            return True
        if record.log in self._cut:
            return False
        if record == last or record.offset > last.offset:  # beyond it: it is deleted
            del self._again[record.log]
            return record != last
        found = "a log that was cut below it, and has grown again"
        self._broken.append(TopicRecreated(record.log, f"offset {last.offset}", found))
        self._cut.add(record.log)
        return False

    def _handle_events(self) -> None:
        """Handles the results of earlier appends and requests. Retries reads that failed. Never waits."""
        producer, now_s = self._producer, time.monotonic()
        if producer is not None:
            try:
                producer.poll(0)
            except KafkaException as fatal:
                self._drop_producer(producer, fatal.args[0])
        if now_s >= self._listen_s:
            self._listen_s = now_s + LISTEN_S
            self._requester.client().listen()  # otherwise its events would pile up
            if self._idle and self._idle[0][1] < now_s - IDLE_S:
                in_thread(lambda: self._close_idle(now_s - IDLE_S))
        for log, (at, answer) in [*self._bounds_asked.items()]:
            if answer.done():
                self._bounds_asked.pop(log, None)
                if answer.exception() is None:
                    self._broken.append(self._out_of_log(log, at, answer.result()))
                else:
                    self._start_following(log, at)  # librdkafka reports this once per assignment, so assign again
        for log in [log for log, due_s in self._denied.items() if now_s >= due_s]:
            del self._denied[log]
            self._start_following(log, self._followed[log])  # likewise

    def _drop_producer(self, producer: Producer, error: KafkaError) -> None:
        """Drops a producer that can never write again, because of `error`: a missing right to Write shows first here,
        as the idempotent producer cannot be initialized. The next append makes another."""
        failed = PartitionError(self.topic, -1, f"the producer has failed permanently: {error.str()}")
        self._errors.refuse(WRITE, failed)
        self._note_error(error, WRITE)
        with self._producer_lock:
            if self._producer is producer:
                self._producer = None
        producer.purge(blocking=False)

    def _read_error(self, message: Message, error: KafkaError) -> None:
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            log = message.partition() or 0
            at, truncation = self._followed[log], settings.truncation_text(error)
            if truncation:
                self._broken.append(TopicRecreated(log, f"offset {at}", f"a log that was cut below it ({truncation})"))
                return
            # Asked in another thread, because heartbeats must not wait for the answer.
            self._bounds_asked[log] = at, in_thread(lambda: self.bounds(log, BOUNDS_TIMEOUT_S))
            return
        self._note_error(error, READ)
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and message.partition() in self._followed:
            self._denied[message.partition() or 0] = time.monotonic() + DENIED_RETRY_S

    def _out_of_log(self, log: int, at: int, bounds: Bounds) -> CoordinationError:
        if at < bounds.first:
            return HistoryTruncated(log, bounds.first)
        return TopicRecreated(log, f"offset {at}", f"the log's end at {bounds.end}")

    def read(self, log: int, start: int, end: int, timeout_s: float) -> Iterator[list[LogRecord]]:
        # It uses a client of its own, so that the followed logs are not disturbed and any thread may read.
        idle, finished = self._take_idle(), False
        consumer = idle or settings.create_client(Consumer, self._ranges)
        try:
            if idle is None:
                # As in KafkaSource.learn_leaders: an assignment of an unknown topic waits for librdkafka's next look.
                metadata(consumer, self.topic, timeout_s)
            consumer.assign([KafkaPartition(self.topic, log, start)])
            at, deadline = start, time.monotonic() + timeout_s
            while at < end:
                first = consumer.poll(max(0.0, min(deadline - time.monotonic(), READ_POLL_S)))
                messages = [] if first is None else [first, *consumer.consume(min(DRAIN_MAX, end - at - 1), 0)]
                records = [record for message in messages if (record := self._record(message, log, at)) is not None]
                if records:
                    at, deadline = records[-1].offset + 1, time.monotonic() + timeout_s
                    yield records
                elif self._closed or time.monotonic() >= deadline:
                    reason = "the connection was closed" if self._closed else self._errors.reason("nothing came")
                    raise ClusterUnreachable(self._servers, f"offset {at} of coordination partition {log}", reason)
            consumer.unassign()
            finished = True
        except KafkaException as error:
            reason = self._errors.reason(str(error.args[0]))
            raise ClusterUnreachable(self._servers, f"metadata of {self.topic}", reason) from error
        finally:
            if finished:
                self._idle.append((consumer, time.monotonic()))
            else:
                consumer.close()
            if self._closed:
                self._close_idle()

    def _take_idle(self) -> Consumer | None:
        with contextlib.suppress(IndexError):  # there is none, or another thread has taken it
            return self._idle.pop()[0]
        return None

    def _close_idle(self, before_s: float = math.inf) -> None:
        """Closes the clients that `read` has not needed since `before_s`."""
        with contextlib.suppress(IndexError):  # other threads take some
            while self._idle[0][1] < before_s:
                self._idle.popleft()[0].close()

    def _record(self, message: Message, log: int, at: int) -> LogRecord | None:
        """Returns what a message says; None for an error that is about the group, which librdkafka looks up though a
        reader never uses it: harmless; and for one of the log that the client has read before."""
        error = message.error()
        if error is None:
            return LogRecord(log, message.offset() or 0, message.value(), message.timestamp()[1], message.key())
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED or message.partition() not in (None, -1, log):
            return None
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise self._out_of_log(log, at, self.bounds(log, BOUNDS_TIMEOUT_S))
        if error.code() in _NO_RIGHT:
            raise AccessDenied(settings.principal_of(self._given), READ, "topic", self.topic)
        raise ClusterUnreachable(self._servers, f"offset {at} of coordination partition {log}", error.str())

    def append(self, log: int, key: bytes, value: bytes) -> bool:
        with self._producer_lock:
            if self._closed:
                return False
            if self._producer is None:
                self._producer = settings.create_client(Producer, self._writer)
            producer = self._producer
        try:
            producer.produce(self.topic, value, key, log, on_delivery=self._on_delivery)
        except BufferError:
            self.produce_errors += 1
            self._errors.note("the producer's queue is full")
            return False
        except KafkaException as error:
            self.produce_errors += 1
            self._errors.note(str(error.args[0]))
            if error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE:
                raise MessageTooLarge("a coordination record", len(value), self._errors.last_words) from error
            return False
        return True

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        size_bytes = len(message.value() or b"")
        if error is None:
            self._errors.succeed(WRITE)
            if 0 < self._too_large_bytes <= size_bytes:
                self._too_large_bytes = 0
                self._errors.succeed(SIZE)
            return
        self.produce_errors += 1
        self._note_error(error, WRITE)
        # Only snapshots have no key. Without a snapshot the history stays long, but consumers can continue.
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE and message.key():
            self._too_large_bytes = min(self._too_large_bytes or size_bytes, size_bytes)
            self._errors.refuse(SIZE, MessageTooLarge("a coordination record", size_bytes, error.str()))

    def bounds(self, log: int, timeout_s: float) -> Bounds:
        # The reading consumer is not asked, because the request would wait while another thread polls it (10 s seen).
        tp = TopicPartition(self.topic, log)
        found, _ = list_bounds(self._requester.client(), [tp], timeout_s, self._given, exists=True)
        return found[tp]

    def waiting_for(self) -> str:
        return self._errors.last_words

    def refused(self) -> MarshalError | None:
        return self._errors.refused()

    def close(self, flush_s: float) -> None:
        with self._producer_lock:
            producer = self._producer  # another thread may close, too
        if producer is not None:
            # Not flush(): if the producer has failed permanently, confluent-kafka raises a SystemError there or crashes
            # the process (seen with 2.16 after a broker had lost its newest records).
            deadline = time.monotonic() + flush_s
            with contextlib.suppress(KafkaException):  # it has failed permanently, and `refused` has said so
                while len(producer) and time.monotonic() < deadline:
                    producer.poll(FLUSH_POLL_S)
            producer.purge(blocking=False)
        with self._poll_lock:
            closed, self._closed = self._closed, True
            if not closed:
                self._consumer.close()
                self._close_idle()
                if self._next_consumer is not None:
                    self._next_consumer.add_done_callback(_close)
        with self._producer_lock:
            self._producer = None
        del producer  # ends its threads, even while the Marshal is referred to
        if not closed:
            self._requester.leave()


def in_thread(question: Callable[[], T], name: str = "marshal-question") -> Future[T]:
    """Runs `question`, which may wait and is rare, in a thread of its own; returns the future."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name=name, daemon=True).start()
    return answer


def _close(connected: Future[Consumer]) -> None:
    if connected.exception() is None:
        connected.result().close()


class _Named(Struct):
    """The only field of librdkafka's statistics that is read here."""

    name: str


_name_of: Final = msgspec.json.Decoder(_Named)


class KafkaTransport:
    """Gives access to a Kafka cluster, which may be the embedded broker."""

    clock: Final = SystemClock()

    def __init__(
        self,
        servers: str | Mapping[str, Any],
        connect_timeout_s: float,
        call: Callable[[Callable[[], object]], object] = call_directly,
    ) -> None:
        """Connects once to learn the cluster's id. `call` is given every call of the user's own `error_cb`, `stats_cb`
        and `logger` as a function, and runs it. Raises ClusterUnreachable after `connect_timeout_s`,
        AuthenticationFailed, TlsMismatch, InvalidOption."""
        self.given: settings.Settings = settings.from_user(servers)
        self._call = call
        self.redirected: settings.Settings = redirect_callbacks(self.given, call)
        self.client_id: str = str(self.given.get("client.id", settings.default_client_id()))
        self.embedded: bool = is_embedded(cluster_id(self.redirected, self.client_id, connect_timeout_s))
        self.name = "embedded" if self.embedded else "kafka"
        self.timeout_s = connect_timeout_s
        self._requester = SharedRequester(self.redirected, self.client_id)
        self._statistics_settings: settings.Settings = {}
        self._statistics: dict[str, tuple[float, str]] = {}

    def collect_statistics(self, interval_ms: int) -> None:
        """Makes every log and source that is created later report librdkafka's statistics. 0 ends that."""
        self._statistics_settings = (
            {"statistics.interval.ms": interval_ms, "stats_cb": self._keep_statistics} if interval_ms else {}
        )

    def _keep_statistics(self, text: str) -> None:
        """The `stats_cb` of every client, called while polled: keeps the newest statistics (JSON), calls the user's,
        forgets closed clients."""
        own = self.redirected.get("stats_cb")
        if own is not None:
            own(text)
        now = time.monotonic()
        self._statistics[_name_of.decode(text).name] = now, text
        kept_s = STATISTICS_KEPT * self._statistics_settings["statistics.interval.ms"] / 1000
        for name, (at, _) in self._statistics.copy().items():  # clients are polled on several threads
            if now - at > kept_s:
                self._statistics.pop(name, None)  # its client has been closed

    def statistics(self) -> dict[str, str]:
        """Returns the newest statistics of each client as JSON text, by the client's name."""
        return {name: text for name, (_, text) in self._statistics.copy().items()}

    def log(self, topic: str, client_id: str, writes: bool = True) -> KafkaLog:
        wait_ms = FETCH_WAIT_MS if self.embedded else LOG_FETCH_WAIT_MS
        return KafkaLog(
            {**self.redirected, **self._statistics_settings}, topic, client_id, wait_ms, writes, self._requester
        )

    def source(
        self, group: str, client_id: str, extra: Mapping[str, Any], queue_bytes: int | None = None
    ) -> KafkaSource:
        wait_ms = FETCH_WAIT_MS if self.embedded else None
        own = redirect_callbacks(settings.checked(dict(extra)), self._call)
        given = {**self.redirected, **self._statistics_settings, **own}
        return KafkaSource(settings.data_reader(given, client_id, group, wait_ms, queue_bytes))

    def reader(self, client_id: str, extra: Mapping[str, Any]) -> KafkaReader:
        wait_ms = FETCH_WAIT_MS if self.embedded else None
        return KafkaReader({**self.redirected, **settings.checked(dict(extra))}, client_id, wait_ms)

    def writer(self, on_written: OnWritten | None = None) -> KafkaProducer:
        return KafkaProducer(self, on_written)

    def admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.redirected, self._requester, self.embedded, self.timeout_s)


POLL_S: Final = 0.25
SILENT_S: Final = 2.0  # without a message or an error: longer than an election of leaders usually takes
NEAR: Final = 2_000  # offsets of a partition: a read of at most so many fetches little
RANGE_FETCH: Final[Mapping[str, Any]] = {
    "enable.partition.eof": True,  # the only sign of a range whose last offsets are missing at the log's end
    "fetch.wait.max.ms": RANGE_FETCH_WAIT_MS,
    "queued.max.messages.kbytes": 65_536,
}
# A fetch brings at least one batch of messages and otherwise up to so much of each partition. The default of 1 MB is
# right for long ranges, and costs tens of milliseconds where one message is wanted.
RANGE_FETCH_LITTLE: Final[Mapping[str, Any]] = {**RANGE_FETCH, "fetch.message.max.bytes": 65_536}


class KafkaReader:
    """A MessageReader over confluent_kafka, with a client for long ranges and one for short ones. One thread at a
    time."""

    def __init__(self, given: Mapping[str, Any], client_id: str, fetch_wait_ms: int | None) -> None:
        self._errors = ConnectionErrors(given)
        self._configurations = [
            settings.data_reader(
                {**fetch, **given, "error_cb": self._errors.on_error}, client_id, client_id, fetch_wait_ms
            )
            for fetch in (RANGE_FETCH, RANGE_FETCH_LITTLE)
        ]
        self._servers = str(given["bootstrap.servers"])
        self._clients: dict[bool, _RangeClient] = {}  # by whether they read short ranges
        self._assigned: Consumer | None = None  # the client of the newest reading
        self._reading = 0  # number of the newest reading: only that one's end ends the assignment

    def read(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], timeout_s: float
    ) -> Iterator[Sequence[Message]]:
        """Yields messages as MessageReader.read says."""
        near = all(ends[tp] - start <= NEAR for tp, start in starts.items())
        client = self._clients.get(near) or self._created(near)
        consumer = client.consumer
        if self._assigned is not None and self._assigned is not consumer:
            self._assigned.unassign()  # its reading has been left unfinished
        self._assigned = consumer
        self._reading = reading = self._reading + 1
        try:
            for tp in starts:
                if tp.topic not in client.known:
                    metadata(consumer, tp.topic, timeout_s)
                    client.known.add(tp.topic)
            consumer.assign([KafkaPartition(*tp, start) for tp, start in starts.items()])
            yield from self._read(consumer, near, dict(starts), dict(ends), timeout_s)
        except KafkaException as error:
            reason = self._errors.reason(str(error.args[0]))
            raise ClusterUnreachable(self._servers, f"messages of {next(iter(starts))}", reason) from error
        finally:
            if self._assigned is not None and self._reading == reading:
                self._assigned.unassign()
                self._assigned = None

    def _created(self, near: bool) -> _RangeClient:
        created = _RangeClient(settings.create_client(Consumer, self._configurations[near]), set())
        self._clients[near] = created
        return created

    def _renewed(self, near: bool, at: Mapping[TopicPartition, int]) -> Consumer:
        """Returns another client, which goes on where the present one is: that may know the topic from before it was
        created again, and would wait without end (KafkaSource._replace_client)."""
        old = self._clients[near].consumer
        reached = old.position([KafkaPartition(*tp) for tp in at])
        consumer = self._assigned = self._created(near).consumer
        starts = zip(reached, at.values(), strict=True)
        consumer.assign([KafkaPartition(one.topic, one.partition, max(one.offset, start)) for one, start in starts])
        old.close()
        return consumer

    def _read(
        self,
        consumer: Consumer,
        near: bool,
        at: dict[TopicPartition, int],
        ends: dict[TopicPartition, int],
        timeout_s: float,
    ) -> Iterator[Sequence[Message]]:
        """Yields the ranges' messages. `at`: the starts of unfinished partitions; one ends with a message at or beyond
        its last offset, or its end if that is not below, so missing offsets do no harm and a lagging replica is waited
        for. Only there messages are looked at one by one; the rest loops in C."""
        deadline, topic = time.monotonic() + timeout_s, next((tp.topic for tp in at), "")
        renew_at = time.monotonic() + min(SILENT_S, timeout_s / 2)
        while at:
            most = sum(ends[tp] - start for tp, start in at.items()) if near else settings.PIECE_MESSAGES
            found = consumer.consume(max(1, min(most, settings.PIECE_MESSAGES)), 0)
            if not found:
                first = consumer.poll(max(0.0, min(POLL_S, deadline - time.monotonic())))
                found = [] if first is None else [first]
            if any(map(Message.error, found)):
                for event in [message for message in found if message.error() is not None]:
                    self._note(event, at, ends)
                found = [message for message in found if message.error() is None]
            numbers = list(map(Message.partition, found))
            backwards = numbers[::-1]
            beyond = {}
            for number in set(numbers):
                last = found[-1 - backwards.index(number)]
                tp = TopicPartition(topic, number or 0)
                if tp not in ends or (last.offset() or 0) + 1 >= ends[tp]:
                    beyond[number] = ends.get(tp, 0)
                    if tp in at:
                        self._done(consumer, tp, at)
            if beyond:
                found = [
                    message
                    for message, number in zip(found, numbers, strict=True)
                    if number not in beyond or (message.offset() or 0) < beyond[number]
                ]
            if found:
                deadline, renew_at = time.monotonic() + timeout_s, math.inf
                yield found
            elif at and time.monotonic() >= renew_at:
                consumer, renew_at = self._renewed(near, at), math.inf
            elif at and time.monotonic() >= deadline:
                tp = next(iter(at))
                reason = self._errors.reason("no answer in time")
                raise ClusterUnreachable(self._servers, f"messages of {tp} up to {ends[tp]}", reason)

    def _done(self, consumer: Consumer, tp: TopicPartition, at: dict[TopicPartition, int]) -> None:
        del at[tp]
        if at:
            consumer.incremental_unassign([KafkaPartition(*tp)])

    def _note(self, event: Message, at: dict[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> None:
        """Handles an error event; a partition without further messages leaves `at`. Raises RangeLost outside the
        partition, AccessDenied; librdkafka retries others."""
        error, tp = event.error(), TopicPartition(event.topic() or "", event.partition() or 0)
        assert error is not None
        if error.code() == KafkaError._PARTITION_EOF:
            if (event.offset() or 0) >= ends.get(tp, 0):  # else a replica that has not received the last messages yet
                at.pop(tp, None)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and tp in at:
            raise RangeLost(tp.topic, tp.partition, at[tp], ends[tp], error.str())
        elif error.code() in _NO_RIGHT:
            raise AccessDenied(settings.principal_of(self._configurations[False]), "Read", "topic", tp.topic)
        else:
            self._errors.note(error.str())

    def close(self) -> None:
        """Closes the clients. A later `read` creates others."""
        clients, self._clients, self._assigned = self._clients, {}, None
        for client in clients.values():
            client.consumer.close()


class _RangeClient(NamedTuple):
    """A client of librdkafka. `known`: the topics whose leaders it has looked up."""

    consumer: Consumer
    known: set[str]
