"""The data source of one simulated consumer: how fetches succeed, fail and are refused.

The bookkeeping is the shipped one (transport/assignments.py). This file holds what librdkafka and KafkaSource do around
it: fetches that take time and may fail, a queue of what has come, and refusals that may come late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Final

from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.assignments import Assignments
from marshal_py.transport.memory import MemoryMessage
from marshal_py.transport.ports import Broken, Chunk, OutOfRange, RawMessage
from marshal_sim.cluster.process import Environment, Process

BATCH: Final = 8  # messages per fetch, and at most so many of a partition wait: few, so that claims end in mid-batch
MESSAGE_BYTES: Final = 128  # the size of each message: so that few fill the smallest `prefetch_bytes`

KEYS: Final = (b"a", b"b", b"c", None)  # few, so that messages of one key meet

EPOCHS_MAX: Final = 1_000  # leader epochs that a partition may have

_messages: dict[int, list[RawMessage]] = {}  # by timestamp, then by offset
_values: Final = {key: bytes(MESSAGE_BYTES - len(key or b"")) for key in KEYS}


def key_of(offset: int) -> bytes | None:
    """Returns the key of the message at an offset of any partition. Equal keys follow each other, or come later."""
    return KEYS[(offset * offset + 3 * offset) // 5 % len(KEYS)]


def message_at(offset: int, life: int, leader_epoch: int) -> RawMessage:
    """Returns what stands for a message: nobody reads its value, so one per offset serves all partitions. Its timestamp
    (`origin_of`) says how often its topic had been created again, and its leader epoch."""
    stamp = life * EPOCHS_MAX + leader_epoch
    known = _messages.setdefault(stamp, [])
    while len(known) <= offset:
        key = key_of(len(known))
        known.append(MemoryMessage("", 0, len(known), key, _values[key], None, stamp))
    return known[offset]


def origin_of(timestamp: int) -> tuple[int, int]:
    """Returns how often the topic of a message had been created again, and the leader epoch of the message."""
    return divmod(timestamp, EPOCHS_MAX)


class Fetch:
    """Describes a fetch of one partition that is under way, or that was refused. There is at most one per partition."""

    __slots__ = ("position", "refused", "tp")

    def __init__(self, tp: TopicPartition, position: int) -> None:
        self.tp, self.position = tp, position
        self.refused: bool = False  # it was refused, and this was reported


class SimulatedSource:
    """Implements DataSource for one consumer process. Fetches make no progress while the process is stopped."""

    def __init__(self, environment: Environment, process: Process, came: Callable[[], None]) -> None:
        """Begins without assignments. `came` is called in the process when a fetch has brought or found something."""
        self._environment, self._process, self._came = environment, process, came
        self.assignments: Assignments = Assignments()
        self._fetches: dict[TopicPartition, Fetch] = {}
        self._waiting: dict[TopicPartition, list[RawMessage]] = {}  # what has come and was not polled
        self._lives: dict[TopicPartition, int] = {}  # of what was polled
        self._read: dict[TopicPartition, int] = {}  # the leader epoch of what was polled, as librdkafka knows it
        self._epochs: dict[TopicPartition, int] = {}  # the leader epoch in which it fetches
        self._knows: dict[str, int] = {}  # by topic: the life whose leaders it knows
        self._ends: dict[TopicPartition, int] = {}
        self._closed = False

    def inherit(self, other: SimulatedSource, memo: dict[int, Any]) -> None:
        """Takes the memory of the source of a machine that this one is a clone of. Requests stay with the original."""
        self.assignments = deepcopy(other.assignments, memo)
        self._ends = dict(other._ends)
        self.assignments.unassigned_by_client([*self.assignments.fetched])

    # --- as DataSource

    def learn_leaders(self, topics: Iterable[str], anew: bool = False) -> None:
        """With `anew` goes on with another client, as KafkaSource does: what it has of all partitions comes again."""
        if anew:
            gone = [*self.assignments.fetched]
            for tp in gone:
                self._drop(tp)
            self._ends.clear()
            self._knows.clear()
            self._read.clear()
            self.assignments.forget_leader_epochs()
            self.assignments.unassigned_by_client(gone)
            self.carry_out()

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self.assignments.assign(positions)

    def unassign(self, tps: Iterable[TopicPartition]) -> None:
        self.assignments.unassign(tps)

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        self.assignments.pause(tps)

    def resume(self, positions: Mapping[TopicPartition, int]) -> None:
        self.assign(positions)  # as KafkaSource does

    def round(self, tp: TopicPartition) -> int:
        return self.assignments.round(tp)

    def fetching(self, tp: TopicPartition) -> bool:
        return self.assignments.fetching(tp)

    def poll(self, timeout_s: float, max_messages: int) -> list[Chunk]:
        """Returns what is here. Whoever waits for more is woken by `came`."""
        self.carry_out()
        chunks: list[Chunk] = []
        for tp in [*self._waiting] if max_messages > 0 else ():
            messages = self._waiting.pop(tp)
            taken, left = messages[:max_messages], messages[max_messages:]
            max_messages -= len(taken)
            to, origin = (taken[-1].offset() or 0) + 1, origin_of(taken[-1].timestamp()[1])
            self._lives[tp], self._read[tp] = origin
            chunks.append(Chunk(tp, self.assignments.received(tp, to, self._read[tp]), taken))
            if left:
                self._waiting[tp] = left
            else:
                self._fetch(tp)
            if max_messages <= 0:
                break
        return chunks

    def poll_now(self, max_messages: int) -> list[Chunk] | None:
        return self.poll(0.0, max_messages)

    def carry_out(self) -> None:
        now_ms = self._environment.now_ms
        if self._closed or not self.assignments.pending(now_ms):
            return
        changes = self.assignments.take(now_ms)
        for tp in changes.unassign:
            self._drop(tp)
            if tp not in changes.assign:
                self._ends.pop(tp, None)
            self._read.pop(tp, None)
            self._epochs.pop(tp, None)
        self._read |= changes.leader_epochs
        for tp in changes.pause:
            self._drop(tp)
        for tp in sorted(changes.assign):  # they come from a set, whose order is not the same everywhere
            self._fetch(tp)

    def _drop(self, tp: TopicPartition) -> None:
        """Forgets what has come of a partition and is under way, as librdkafka does with what it has queued."""
        self._fetches.pop(tp, None)
        self._waiting.pop(tp, None)

    def out_of_range(self) -> list[OutOfRange]:
        return self.assignments.out_of_range()

    def broken(self) -> list[Broken]:
        return self.assignments.broken()

    def end_offset(self, tp: TopicPartition) -> int:
        end = self._ends.get(tp, -1)
        return max(end, self.assignments.received_up_to(tp)) if end >= 0 else -1

    def close(self) -> None:
        self._closed = True
        self._fetches.clear()
        self._waiting.clear()

    # --- fetching

    @property
    def has_messages(self) -> bool:
        return bool(self._waiting)

    def _fetch(self, tp: TopicPartition) -> None:
        """Fetches the next messages of a partition, unless a fetch is under way or what has come waits for a poll."""
        assignment = self.assignments.fetched.get(tp)
        if assignment is None or assignment.paused or tp in self._fetches or tp in self._waiting:
            return
        fetch = self._fetches[tp] = Fetch(tp, assignment.reached)
        if self._environment.broker.ends.get(tp) != fetch.position or tp not in self._ends:
            self._schedule(fetch)
        else:
            self._environment.broker.wait(tp, lambda: self._schedule(fetch))

    def _schedule(self, fetch: Fetch) -> None:
        environment = self._environment
        environment.schedule(environment.network_faults.read_ms(), self._process, self._fetched, fetch)

    def _fetched(self, fetch: Fetch) -> None:
        environment, tp = self._environment, fetch.tp
        if self._fetches.get(tp) is not fetch:
            return  # the assignment has changed meanwhile
        if environment.broker.reads_down_until_ms > environment.now_ms:
            environment.broker.held.append(lambda: self._schedule(fetch))
            return
        absent = not environment.broker.is_there(tp, environment.now_ms) or tp in environment.broker.leaderless
        if absent or self._is_blind(tp.topic):
            environment.broker.wait(tp, lambda: self._schedule(fetch))  # librdkafka tries again, and says nothing
            return
        if environment.broker.fails_until_ms.get(tp, 0) > environment.now_ms:
            self.assignments.fail(tp, "injected", environment.now_ms)
            self._after_failure(tp)
            return
        if not self._in_epoch(fetch):
            return
        if not environment.broker.firsts[tp] <= fetch.position <= environment.broker.ends[tp]:
            self._refused(fetch)
            return
        late_ms = environment.network_faults.refusal_ms()
        if late_ms:  # it stops fetching, and reports the refusal later
            environment.network_faults.in_flight.append(
                lambda: environment.schedule(0, self._process, self._refused_late, fetch)
            )
            environment.schedule(late_ms, self._process, self._refused_late, fetch)
            return
        broker = environment.broker
        self._ends[tp] = broker.high_watermark(tp)
        if offsets := broker.fetch(tp, fetch.position, BATCH):
            del self._fetches[tp]
            life = broker.life(tp.topic)
            self._waiting[tp] = [message_at(offset, life, broker.epoch_of(tp, offset)) for offset in offsets]
        else:
            self.assignments.drained(environment.now_ms)
            broker.wait(tp, lambda: self._schedule(fetch))
        self._came()

    def _in_epoch(self, fetch: Fetch) -> bool:
        """Returns whether a fetch names the leader epoch of now. If not, its answer is an error, and librdkafka looks
        whether the partition still has what it has given out of it (KIP-320); that is reported, or it fetches again."""
        broker, tp = self._environment.broker, fetch.tp
        epoch, known, read = broker.leader_epoch(tp), self._epochs.get(tp), self._read.get(tp)
        self._epochs[tp] = epoch
        if epoch == known or (known is None and read is None):
            return True
        known_topic = self._lives.get(tp) == broker.life(tp.topic)
        end = fetch.position if read is None or not known_topic else broker.epoch_end(tp, read)
        if end < fetch.position:
            self._refused(fetch, f"truncation detected at {fetch.position}: end offset {end}")
        else:
            self._schedule(fetch)
        return False

    def _is_blind(self, topic: str) -> bool:
        """Returns whether the client takes no notice of the leaders of a topic that was created again."""
        broker = self._environment.broker
        if topic not in broker.ids:
            return False
        return self._knows.setdefault(topic, broker.life(topic)) != broker.life(topic) and topic in broker.blind

    def _refused(self, fetch: Fetch, truncated: str = "") -> None:
        """Reports a refused fetch; `truncated`: as in OutOfRange. Then librdkafka names no position."""
        environment = self._environment
        if truncated or fetch.position > environment.broker.ends[fetch.tp]:
            environment.refused(self._process, fetch.tp)
        fetch.refused = True
        self.assignments.refuse(fetch.tp, -1 if truncated else fetch.position, truncated, environment.now_ms)
        self._after_failure(fetch.tp)

    def _refused_late(self, fetch: Fetch) -> None:
        """Reports the refusal of an earlier assignment: librdkafka does not say which one a refusal belongs to. Where
        the same position is fetched still, or again, it would not have been refused: it is fetched now.
        """
        if fetch.refused or self._closed:
            return  # it was reported when everything healed
        fetch.refused = True
        assignment = self.assignments.fetched.get(fetch.tp)
        if self._fetches.get(fetch.tp) is fetch:
            del self._fetches[fetch.tp]
            self._fetch(fetch.tp)
        elif assignment is not None and assignment.reached != fetch.position:
            self.assignments.refuse(fetch.tp, fetch.position, "", self._environment.now_ms)
            self._after_failure(fetch.tp)

    def _after_failure(self, tp: TopicPartition) -> None:
        self.carry_out()
        due_ms = self.assignments.due_ms(tp)
        if due_ms is not None:
            delay_ms = max(1, due_ms - self._environment.now_ms)
            self._environment.schedule(delay_ms, self._process, lambda _: self.carry_out())
        self._came()
