"""Fetches data messages from Kafka by explicit assignment, without group membership, commits or resets.

Messages are grouped into chunks of one partition, where possible without a Python step per message, because every
message of a consumer passes through here.

confluent-kafka admits one thread at a time into a Consumer, and others wait as long as a poll takes. So no thread that
holds a lock may call it: `assign` and `pause` only write to `Assignments`, and the polling thread passes that to the
client and notes the end offsets of the partitions. While no thread polls, because of a slow handler, `carry_out` does
so.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby, islice
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPartition

from marshal_py.errors import ClusterUnreachable
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport import settings
from marshal_py.transport.assignments import Assignments, Changes
from marshal_py.transport.connecting import calls_while_polled, metadata, told_right
from marshal_py.transport.ports import Broken, Chunk, OutOfRange

# Errors on a partition that librdkafka retries itself, without a limit.
_PASSING: Final = frozenset({
    KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._PARTITION_EOF, KafkaError._TIMED_OUT,
    KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.REQUEST_TIMED_OUT,
    KafkaError._RESOLVE, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC,
    KafkaError.UNKNOWN_TOPIC_ID,
})  # fmt: skip

# Errors that no later fetch can overcome. After any other error the fetch is retried.
_REFUSALS: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})

LEARN_TIMEOUT_S: Final = 10.0
LEARN_RUNNING_S: Final = 1.0  # while partitions are being fetched, because fetching stops for so long
# How long a poll holds the client at most, because an assignment waits for its end. Polls are longer when neither a
# message nor an assignment has come for QUIET_S: each wake takes at least 0.1 ms of CPU time, so with short ones
# waiting would take more than 1 % of a core.
POLL_SLICE_S: Final = 0.02
POLL_SLICE_QUIET_S: Final = 0.25
QUIET_S: Final = 1.0
ENDS_S: Final = 0.1  # between two rounds of noting end offsets: often enough for lag and hand-overs
ENDS_AT_ONCE_MAX: Final = (
    50  # partitions per poll, at 2 us each: with thousands of partitions a round takes several polls
)

T = TypeVar("T")


class KafkaSource:
    """Implements DataSource over one Consumer of librdkafka."""

    def __init__(self, configuration: Mapping[str, Any]) -> None:
        self._consumer = settings.create_client(Consumer, configuration)
        self._given = configuration
        self._runs_user_code = calls_while_polled(configuration)
        self._assignments = Assignments()
        # Held while the client is called. Reentrant for callbacks and signal handlers, which `_inside` detects.
        self._client_lock = threading.RLock()
        self._inside = False
        self._next_caller = threading.Lock()  # held while waiting for `_client_lock`, so that a poll does not overtake
        # Released to wake a poll that waits because nothing is assigned; no signal can interrupt a release.
        self._wake_lock = threading.Lock()
        self._wake_lock.acquire()
        self._topics: set[str] = set()  # every topic that was ever assigned: its messages may still arrive
        self._ends: dict[TopicPartition, int] = {}
        self._ends_unknown: set[TopicPartition] = set()
        self._ends_round: Iterator[TopicPartition] = iter(())
        self._ends_due = 0.0
        self._unconfirmed: set[TopicPartition] = set()
        # The client's position just after an assignment, where it had one: perhaps that of the assignment before.
        self._doubtful: dict[TopicPartition, int] = {}
        self._reached: list[Chunk] = []  # without messages, for the next poll
        self._busy_at = 0.0  # when the last message or assignment came
        self._closed = False
        self._consumer_closed = False

    # --- bookkeeping, without the client

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._assignments.assign(positions)
        self._wake()

    def unassign(self, tps: Iterable[TopicPartition]) -> None:
        self._assignments.unassign(tps)
        self._wake()

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        self._assignments.pause(tps)

    def resume(self, positions: Mapping[TopicPartition, int]) -> None:
        # librdkafka drops what it had fetched of a paused partition, so a new assignment costs no more than a resume.
        self.assign(positions)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is released already
            self._wake_lock.release()

    def round(self, tp: TopicPartition) -> int:
        return self._assignments.round(tp)

    def fetching(self, tp: TopicPartition) -> bool:
        return self._assignments.fetching(tp)

    def out_of_range(self) -> list[OutOfRange]:
        return self._assignments.out_of_range()

    def broken(self) -> list[Broken]:
        return self._assignments.broken()

    def end_offset(self, tp: TopicPartition) -> int:
        end = self._ends.get(tp, -1)
        return max(end, self._assignments.received_up_to(tp)) if end >= 0 else -1

    # --- with the client

    def _run(self, work: Callable[..., T], *arguments: Any) -> T | None:
        """Returns what `work` returns, called under `_client_lock`; None if the client is closed or this thread is
        inside it already."""
        if self._inside:
            return None
        try:
            self._inside = True
            return None if self._closed else work(*arguments)
        finally:
            self._inside = False
            if self._closed:  # by a callback or signal handler, which cannot wait for its own thread
                self._close()

    def learn_leaders(self, topics: Iterable[str], anew: bool = False) -> None:
        running = bool(self._assignments.fetched)
        if anew:
            with self._next_caller, self._client_lock:
                self._run(self._replace_client)
        # Without this a connected consumer learns of a new topic at librdkafka's next look, up to a second later. That
        # is a third of what a take-over may take.
        for topic in topics:
            with self._next_caller, self._client_lock:
                self._run(self._learn_topic, topic, running)

    def _replace_client(self) -> None:
        """Goes on with another client, which fetches again what the old one had fetched and nobody has polled.

        librdkafka (2.16, issue 4898) ignores the leaders of a topic that was created again as long as their epochs are
        lower than those that it has seen of the old topic: it would fetch nothing, without an error and without end.
        """
        self._unconfirmed = {*self._assignments.fetched}  # as if a Ctrl-C had come: all is assigned again
        old, self._consumer = self._consumer, settings.create_client(Consumer, self._given)
        self._ends_unknown.clear()
        self._ends.clear()
        self._doubtful.clear()
        self._assignments.forget_leader_epochs()
        old.close()

    def _learn_topic(self, topic: str, running: bool) -> None:
        if running or self._assignments.fetched:
            # The request may wait behind a fetch on the same connection for `fetch.wait.max.ms`, so it is not cut into
            # slices. If no answer comes, librdkafka learns the leaders at its own next look.
            with contextlib.suppress(KafkaException):
                self._consumer.list_topics(topic, timeout=LEARN_RUNNING_S)
            return
        try:
            metadata(self._consumer, topic, LEARN_TIMEOUT_S)
        except KafkaException as error:
            raise ClusterUnreachable(
                str(self._given["bootstrap.servers"]), f"metadata of {topic}", str(error.args[0])
            ) from error

    def carry_out(self) -> None:
        if self._client_lock.acquire(blocking=False):
            try:
                self._run(self._synchronize)
            finally:
                self._client_lock.release()

    def _synchronize(self) -> float:
        """Makes the client fetch what is wanted, and notes the end offsets that the client knows. Returns when, in
        seconds of the monotonic clock."""
        now = time.monotonic()
        if self._unconfirmed:
            self._forget_unconfirmed()
        if self._assignments.pending(int(now * 1000)):
            self._apply(self._assignments.take(int(now * 1000)))
        if self._ends_unknown or now >= self._ends_due:
            self._note_ends(now)
        return now

    def _apply(self, changes: Changes) -> None:
        self._unconfirmed = {*changes.unassign, *changes.assign, *changes.pause}
        self._busy_at = time.monotonic()
        if changes.resume:
            self._consumer.resume([KafkaPartition(*tp) for tp in changes.resume])
        if changes.unassign:
            self._consumer.incremental_unassign([KafkaPartition(*tp) for tp in changes.unassign])
            for tp in changes.unassign:
                if tp not in changes.assign:
                    self._ends.pop(tp, None)
                    self._ends_unknown.discard(tp)
        if changes.assign:
            self._topics.update(tp.topic for tp in changes.assign)
            self._ends_unknown.update(tp for tp in changes.assign if tp not in self._ends)
            epochs = changes.leader_epochs
            self._consumer.incremental_assign(
                [
                    KafkaPartition(*tp, offset, leader_epoch=epochs[tp])
                    if tp in epochs
                    else KafkaPartition(*tp, offset)
                    for tp, offset in changes.assign.items()
                ]
            )
            self._doubtful |= self._positions(changes.assign)
        if changes.pause:
            self._consumer.pause([KafkaPartition(*tp) for tp in changes.pause])
        self._unconfirmed = set()

    def _forget_unconfirmed(self) -> None:
        """Unassigns what an `_apply`, interrupted by Ctrl-C, may have told the client; the wanted ones are assigned
        again."""
        for tp in self._unconfirmed:
            with contextlib.suppress(KafkaException):  # it was not assigned
                self._consumer.resume([KafkaPartition(*tp)])
                self._consumer.incremental_unassign([KafkaPartition(*tp)])
        self._assignments.unassigned_by_client(self._unconfirmed)
        self._unconfirmed = set()

    def _note_ends(self, now: float) -> None:
        """Notes end offsets that came with fetches, for some partitions per call: first the unknown ones, then all in
        turn."""
        fetched = self._assignments.fetched
        for tp in list(islice(self._ends_unknown, ENDS_AT_ONCE_MAX)):
            self._note_end(tp)
        if now < self._ends_due:
            return
        at_once = list(islice(self._ends_round, ENDS_AT_ONCE_MAX))
        for tp in at_once:
            if tp in fetched:
                self._note_end(tp)
        if quiet := [tp for tp in at_once if self._assignments.is_quiet(tp, self._ends.get(tp, -1))]:
            self._note_skipped(quiet)
        if len(at_once) < ENDS_AT_ONCE_MAX:
            self._ends_round, self._ends_due = iter(list(fetched)), now + ENDS_S

    def _note_end(self, tp: TopicPartition) -> None:
        try:
            _, end = self._consumer.get_watermark_offsets(KafkaPartition(*tp), cached=True)
        except KafkaException:  # it does not know the partition yet
            return
        if end >= 0:
            self._ends[tp] = end
            self._ends_unknown.discard(tp)

    def _note_skipped(self, quiet: Iterable[TopicPartition]) -> None:
        """Notes where the client has passed a partition's last message. Until a record of the present assignment has
        come, its position may be the one before's."""
        for tp, position in self._positions(quiet).items():
            if self._doubtful.get(tp) == position:
                continue
            self._doubtful.pop(tp, None)
            if round_ := self._assignments.skipped(tp, position):
                self._reached.append(Chunk(tp, round_, (), position))

    def _positions(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Returns the client's position in each partition that has one. It asks nobody."""
        found = self._consumer.position([KafkaPartition(*tp) for tp in tps])
        return {TopicPartition(one.topic, one.partition): one.offset for one in found if one.offset >= 0}

    def poll(self, timeout_s: float, max_messages: int) -> list[Chunk]:
        deadline = time.monotonic() + timeout_s
        left_s = timeout_s
        while True:
            with self._next_caller:
                pass  # a thread that waits for the client goes first
            with self._client_lock:
                chunks = self._run(self._poll_once, left_s, max_messages)
            left_s = deadline - time.monotonic()
            if chunks or left_s <= 0 or self._closed:
                return chunks or []
            if not self._assignments.fetched:
                self._wake_lock.acquire(timeout=left_s)
                left_s = deadline - time.monotonic()

    def poll_now(self, max_messages: int) -> list[Chunk] | None:
        if self._runs_user_code or self._next_caller.locked() or not self._client_lock.acquire(blocking=False):
            return None
        try:
            return self._run(self._fetch_now, max_messages)
        finally:
            self._client_lock.release()

    def _fetch_now(self, max_messages: int) -> list[Chunk] | None:
        now = time.monotonic()
        if self._unconfirmed or self._assignments.pending(int(now * 1000)) or not self._assignments.fetched:
            return None  # to pass on an assignment may wait for librdkafka's own thread
        if self._ends_unknown or now >= self._ends_due:
            self._note_ends(now)
        return self._fetch(0.0, max_messages, now)

    def _poll_once(self, timeout_s: float, max_messages: int) -> list[Chunk]:
        now_s = self._synchronize()
        slice_s = POLL_SLICE_S if now_s - self._busy_at < QUIET_S else POLL_SLICE_QUIET_S
        return self._fetch(min(timeout_s, slice_s) if self._assignments.fetched else 0.0, max_messages, now_s)

    def _fetch(self, timeout_s: float, max_messages: int, began_s: float) -> list[Chunk]:
        messages = self._consume(timeout_s, max_messages)
        now_s = time.monotonic() if timeout_s > 0 else began_s
        now_ms = int(now_s * 1000)
        if messages:
            self._busy_at = now_s
        # By truth value: comparing a KafkaError with None leaves an exception set in C (2.16).
        failed = any(map(Message.error, messages))
        if len(messages) < max_messages and not failed:
            self._assignments.drained(now_ms)
        chunks = self._chunks(self._take_errors(messages, now_ms) if failed else messages)
        if self._reached:  # noted before these messages came, and so before them
            chunks[:0], self._reached = self._reached, []
        return chunks

    def _consume(self, timeout_s: float, max_messages: int) -> list[Message]:
        if timeout_s <= 0:
            messages: list[Message] = self._consumer.consume(max_messages, 0)
            return messages
        # At first the call that waits: one that finds nothing takes as long as to receive a message. In whole ms,
        # rounded up: what is left of one would be polled in a busy loop, because librdkafka cuts it off.
        first = self._consumer.poll((math.ceil(timeout_s * 1000) + 0.5) / 1000)
        if first is None:
            return []
        return [first, *self._consumer.consume(max_messages - 1, 0)] if max_messages > 1 else [first]

    def _chunks(self, messages: list[Message]) -> list[Chunk]:
        """Returns the messages as chunks: a new one begins at every change of partition. Its loops run in C."""
        count = len(messages)
        if count <= 1:
            return [self._chunk(one.topic(), one.partition(), messages) for one in messages]
        partitions = list(map(Message.partition, messages))
        many_topics = len(self._topics) != 1
        topics = list(map(Message.topic, messages)) if many_topics else [messages[0].topic()]
        if partitions.count(partitions[0]) == count and (not many_topics or topics.count(topics[0]) == count):
            return [self._chunk(topics[0], partitions[0], messages)]
        keys = zip(topics, partitions, strict=True) if many_topics else partitions
        chunks: list[Chunk] = []
        at = 0
        for _, same in groupby(keys):
            until = at + len(list(same))
            topic = topics[at] if many_topics else topics[0]
            chunks.append(self._chunk(topic, partitions[at], messages[at:until]))
            at = until
        return chunks

    def _chunk(self, topic: str | None, partition: int | None, messages: list[Message]) -> Chunk:
        assert topic is not None
        assert partition is not None
        tp = TopicPartition(topic, partition)
        if self._doubtful:
            self._doubtful.pop(tp, None)
        last = messages[-1]
        return Chunk(tp, self._assignments.received(tp, (last.offset() or 0) + 1, last.leader_epoch()), messages)

    def _take_errors(self, messages: list[Message], now_ms: int) -> list[Message]:
        """Handles errors among the messages and returns the others, without those after their partition's error: some
        may be missing in between."""
        good: list[Message] = []
        ended: set[TopicPartition] = set()
        for message in messages:
            error = message.error()
            topic, partition = message.topic(), message.partition()
            if topic is None or partition is None or partition < 0:
                continue
            tp = TopicPartition(topic, partition)
            if tp in ended:
                continue  # fetched after the failure, so messages may be missing in between
            if error is None:
                self._assignments.received(tp, (message.offset() or 0) + 1, message.leader_epoch())
                good.append(message)
            elif error.code() not in _PASSING:
                ended.add(tp)
                self._take_error(tp, error, message.offset(), now_ms)
        return good

    def _take_error(self, tp: TopicPartition, error: KafkaError, position: int | None, now_ms: int) -> None:
        if error.code() == KafkaError._AUTO_OFFSET_RESET:  # `position`: the refused one, not the assigned one
            self._assignments.refuse(tp, -1 if position is None else position, settings.truncation_text(error), now_ms)
        elif error.code() in _REFUSALS:
            told = told_right(self._given, error.str(), ("Read", "topic", tp.topic))
            self._assignments.refuse_permanently(tp, told)
        else:
            self._assignments.fail(tp, error.str(), now_ms)

    def close(self) -> None:
        self._closed = True
        self._wake()
        with self._client_lock:
            if not self._inside:  # otherwise this thread closes it when it leaves the client
                self._close()

    def _close(self) -> None:
        if not self._consumer_closed:
            self._consumer_closed = True
            self._consumer.close()
