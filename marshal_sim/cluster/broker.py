"""One simulated cluster of brokers: the coordination logs as raw bytes, the target topics as offsets, its clocks.

It stores values in the order of arrival and wakes the clients that wait. It draws nothing, and does not know what the
values mean.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, MutableSequence
from copy import deepcopy
from typing import Final

from marshal_py.transport.ports import TopicInfo
from marshal_sim.judge.evidence import FormerTopic, LostTail, OffsetList

Place = tuple[str, int]  # topic, partition
LEADERS = 3
MISSING: Final = b"nothing"  # marks an offset that holds no record; compared by identity
MILLION = 1_000_000


class CoordinationLog:
    """One coordination log, which is one partition of the coordination topic."""

    began: int
    inherited: int

    def __init__(self) -> None:
        self.values: MutableSequence[bytes | None] = []  # the values that readers get now
        self.recorded: MutableSequence[bytes | None] = []  # the values as they came
        self.first: int = 0  # offsets below were deleted
        self.began, self.inherited = 0, 0  # offsets from the one on and below the other came from a dump
        self.appended_ms: MutableSequence[int] = []  # when each value came, in true time
        self.stamps_ms: MutableSequence[int] = []  # what the leader of that time wrote beside it: no shipped code
        # reads it

    def inherit(self, first: int, values: Iterable[bytes | None]) -> None:
        """Begins the log with the values of a dump, from offset `first` on."""
        kept = list(values)
        self.first, self.began, self.inherited = first, first, first + len(kept)
        self.values, self.recorded = OffsetList(first, kept, MISSING), OffsetList(first, kept, MISSING)
        self.appended_ms, self.stamps_ms = OffsetList(first, [0] * len(kept), 0), OffsetList(first, [0] * len(kept), 0)

    def branch(self, end: int) -> CoordinationLog:
        """Returns this log as a replica holds it that has only the offsets below `end`."""
        other = deepcopy(self)
        for tape in (other.values, other.recorded, other.appended_ms, other.stamps_ms):
            while len(tape) > end:
                del tape[len(tape) - 1]
        return other


class LeaderClock:
    """The wall clock of one broker, with its own rate and with jumps."""

    def __init__(self) -> None:
        self.rate_ppm = 0
        self.shift_ms = 0

    def read(self, now_ms: int) -> int:
        return now_ms + now_ms * self.rate_ppm // MILLION + self.shift_ms


class Broker:
    """Stands for the brokers that every client reads from and writes to.

    Requests are held and not answered before `*_down_until_ms`.
    """

    def __init__(self, logs: int) -> None:
        self.logs: list[CoordinationLog] = [CoordinationLog() for _ in range(logs)]
        self.topic_id: int = 0  # the id of the coordination topic
        self.gone: set[bytes | None] = set()  # what the topics had that were deleted
        self.clocks: list[LeaderClock] = [LeaderClock() for _ in range(LEADERS)]
        self.leader = 0
        self.topics: dict[Place, list[int]] = {}  # offsets that exist, ascending: gaps stay gaps
        self.produced_ms: dict[tuple[Place, int], int] = {}  # by place and offset; not those of a dump
        self.firsts: dict[Place, int] = {}  # offsets below were deleted, which `topics` still has, for the judges
        self.ends: dict[Place, int] = {}
        self.counts: dict[str, int] = {}
        self.ids: dict[str, list[str]] = {}  # by topic that may be created again: all its ids, the present one last
        self.former: dict[tuple[str, str], FormerTopic] = {}  # by topic and id
        self.created_ms: dict[str, int] = {}  # when a topic is there again
        self.blind: set[str] = set()  # topics of which clients that knew the old one learn nothing by themselves
        # By topic: what some brokers still say of it, None where it is gone, and until when.
        self.lagging: dict[str, tuple[TopicInfo | None, int]] = {}
        self.reads_down_until_ms = 0
        self.writes_down_until_ms = 0
        self.fails_until_ms: dict[Place, int] = {}  # until then, fetches of a partition fail
        # By partition whose leader has changed: each leader epoch and the first offset that was written in it.
        self.epochs: dict[Place, list[tuple[int, int]]] = {}
        self.lost: dict[Place, list[LostTail]] = {}
        self.leaderless: set[Place] = set()  # partitions without a leader now
        self.high_watermarks: dict[Place, int] = {}  # of new leaders that know only a lower one than the old leader
        self.on_append: Callable[[int, int], None] = lambda number, now_ms: None
        self.held: list[Callable[[], None]] = []
        self._waiting: dict[Place, list[Callable[[], None]]] = {}

    def append(self, number: int, value: bytes, now_ms: int) -> None:
        log = self.logs[number]
        log.values.append(value)
        log.recorded.append(value)
        log.appended_ms.append(now_ms)
        log.stamps_ms.append(self.clocks[self.leader].read(now_ms))
        self.on_append(number, now_ms)

    def recreate(self, logs: int) -> None:
        """Deletes the coordination topic and creates it again."""
        self.gone.update(value for log in self.logs for value in log.recorded)
        self.logs = [CoordinationLog() for _ in range(logs)]
        self.topic_id += 1

    def add_logs(self, count: int) -> None:
        """Adds partitions to the coordination topic beyond those that the root names (L3)."""
        self.logs += [CoordinationLog() for _ in range(count)]

    def recover(self) -> None:
        """Sends every held request again. Called when an outage may be over."""
        if self.held:
            held, self.held = self.held, []
            for retry in held:
                retry()

    # --- target topics

    def add_partitions(self, topic: str, count: int) -> None:
        """Gives the topic `count` partitions, which is never fewer than before."""
        for number in range(self.counts.get(topic, 0), count):
            self.topics[topic, number] = []
            self.firsts[topic, number] = self.ends[topic, number] = 0
        self.counts[topic] = count

    def begin_lives(self) -> None:
        """Gives each topic an id, because it may be deleted and created again."""
        self.ids = {topic: [f"{topic} 0"] for topic in self.counts}

    def is_there(self, place: Place, now_ms: int) -> bool:
        """Returns whether the partition exists now."""
        return place in self.ends and self.created_ms.get(place[0], 0) <= now_ms

    def life(self, topic: str) -> int:
        """Returns how often a topic was created again."""
        return len(self.ids[topic]) - 1 if topic in self.ids else 0

    def describe(self, topic: str, now_ms: int) -> TopicInfo | None:
        """Returns what an up-to-date broker says of a topic."""
        if topic not in self.counts or self.created_ms.get(topic, 0) > now_ms:
            return None
        return TopicInfo(self.counts[topic], self.ids[topic][-1] if topic in self.ids else "")

    def recreate_topic(self, topic: str, count: int, now_ms: int, created_ms: int) -> None:
        """Deletes a topic, and has it created again later, with another id and without messages."""
        places = [(topic, number) for number in range(self.counts[topic])]
        taken = {number: self.firsts.pop((topic, number)) for _, number in places}
        kept = {number: self.topics.pop((topic, number)) for _, number in places}
        self.former[topic, self.ids[topic][-1]] = FormerTopic(now_ms, kept, taken)
        for place in places:
            del self.ends[place]
            self.fails_until_ms.pop(place, None)
            self.epochs.pop(place, None)
            self.high_watermarks.pop(place, None)
            self.leaderless.discard(place)
        for one in [one for one in self.produced_ms if one[0][0] == topic]:
            del self.produced_ms[one]
        self.ids[topic].append(f"{topic} {len(self.ids[topic])}")
        self.created_ms[topic], self.counts[topic] = created_ms, 0
        self.add_partitions(topic, count)

    def wake(self, topic: str) -> None:
        """Has all fetches of a topic that wait look again."""
        for place in [place for place in self._waiting if place[0] == topic]:
            for again in self._waiting.pop(place):
                again()

    def produce(self, place: Place, messages: int, gap: int, now_ms: int) -> None:
        """Appends messages. The first one leaves a gap of `gap` offsets, as transactions and compaction do."""
        end = self.ends[place] + gap
        offsets = range(end, end + messages)
        self.topics[place].extend(offsets)
        self.produced_ms.update(((place, offset), now_ms) for offset in offsets)
        self.ends[place] = end + messages
        for wake in self._waiting.pop(place, ()):
            wake()

    def fetch(self, place: Place, position: int, most: int) -> list[int]:
        """Returns at most `most` offsets of messages, from `position` to the high watermark."""
        offsets, end = self.topics[place], self.high_watermark(place)
        first = bisect_left(offsets, position)
        return [offset for offset in offsets[first : first + most] if offset < end]

    def high_watermark(self, place: Place) -> int:
        """Returns up to which offset the leader gives messages out."""
        return self.high_watermarks.get(place, self.ends[place])

    # --- leaders of partitions of target topics

    def leader_epoch(self, place: Place) -> int:
        return self.epochs[place][-1][0] if place in self.epochs else 0

    def epoch_of(self, place: Place, offset: int) -> int:
        """Returns the leader epoch of the message at an offset."""
        return max((epoch for epoch, first in self.epochs.get(place, ()) if first <= offset), default=0)

    def epoch_end(self, place: Place, epoch: int) -> int:
        """Returns where the messages of this leader epoch end, and of those before it, as OffsetsForLeaderEpoch
        does."""
        return min((first for later, first in self.epochs.get(place, ()) if later > epoch), default=self.ends[place])

    def move_leader(self, place: Place) -> None:
        """Makes another replica the leader, which has all messages."""
        self.epochs[place] = [*self.epochs.get(place, ()), (self.leader_epoch(place) + 1, self.ends[place])]

    def elect_uncleanly(self, place: Place, end: int, now_ms: int) -> None:
        """Makes a replica the leader that has only the messages below `end`: the others are lost."""
        epoch = self.leader_epoch(place) + 1
        self.high_watermarks.pop(place, None)
        self.epochs[place] = [one for one in self.epochs.get(place, ()) if one[1] < end] + [(epoch, end)]
        topic_id = self.ids[place[0]][-1] if place[0] in self.ids else ""
        self.lost.setdefault(place, []).append(LostTail(now_ms, end, epoch, topic_id))
        while self.topics[place] and self.topics[place][-1] >= end:
            self.produced_ms.pop((place, self.topics[place].pop()))
        self.ends[place] = end
        self.wake(place[0])

    def wait(self, place: Place, wake: Callable[[], None]) -> None:
        """Calls `wake` once, when the partition has grown."""
        self._waiting.setdefault(place, []).append(wake)
