"""Planted bugs in what becomes of fetches that fail, of positions that are refused (PROTOCOL.md D12), of partitions
that lose messages (D6), and of topics that are created again (D10).

They are in the shipped client: in ConsumerDriver, and in the bookkeeping that KafkaSource uses (assignments.py).
mutants.py alone calls this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.driver.consumer_driver import ConsumerDriver, TopicWatch
from marshal_py.protocol.member import rebalance
from marshal_py.protocol.member.rebalance import Topics
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import Topology
from marshal_py.transport.assignments import Assignment, Assignments, State
from marshal_py.transport.ports import OutOfRange

Patch = tuple[Any, str, Any]
settle: Final = ConsumerDriver._settle_position


def _moves(self: ConsumerDriver, refused: OutOfRange, first: int, end: int) -> None:
    """Fetches on at the refused position, although the buffer may end below it."""
    with self.context.outbox, self.context.lock:
        self.refused_positions.pop(refused.tp, None)
        queue = self.queue
        assert isinstance(queue, DeliveryQueue)
        if refused.position > end or not queue.has(refused.tp):
            settle(self, refused._replace(round=self.source.round(refused.tp)), first, end)
        else:
            queue.buffers[refused.tp].next_offset = refused.position
            queue.source.assign({refused.tp: refused.position})


def d12a() -> list[Patch]:
    return [(ConsumerDriver, "_settle_position", _moves)]


def d12l() -> list[Patch]:
    def refuse(self: Assignments, tp: TopicPartition, position: int, truncated: str, now_ms: int) -> None:
        """Notes that the present assignment was refused, although it may have been an earlier one."""
        fetched = self.fetched.get(tp)
        if fetched is not None:
            fetched.state = State.STOPPED
            self._refused[tp] = OutOfRange(tp, position, fetched.round, truncated)
            self._changed.add(tp)

    return [(Assignments, "refuse", refuse), *d12h()]


def d12h() -> list[Patch]:
    def settled(self: ConsumerDriver, refused: OutOfRange, first: int, end: int) -> None:
        """Moves the partition as `_moves` does, if the answer is about its assignment of now."""
        if self.source.round(refused.tp) == refused.round:
            _moves(self, refused, first, end)

    return [(ConsumerDriver, "_settle_position", settled)]


def d6n() -> list[Patch]:
    restart = DeliveryQueue.restart

    def quietly(self: DeliveryQueue, tp: TopicPartition, first: int) -> int:
        """Goes on where what Kafka still has begins, and says nothing of what it had before."""
        restart(self, tp, first)
        return first

    return [(DeliveryQueue, "restart", quietly)]


def d6e() -> list[Patch]:
    def at_the_end(self: ConsumerDriver, refused: OutOfRange, first: int, end: int) -> None:
        """Takes all that is there for deleted where something is."""
        settle(self, refused, end if refused.position < first else first, end)

    return [(ConsumerDriver, "_settle_position", at_the_end)]


def d6g() -> list[Patch]:
    def grown(self: ConsumerDriver, refused: OutOfRange, first: int, end: int) -> None:
        """Fetches on at a refused position that the partition has by now."""
        with self.context.outbox, self.context.lock:
            here = self.queue.has(refused.tp) and self.source.round(refused.tp) == refused.round
            if here and not refused.truncated and first <= refused.position <= end:
                del self.refused_positions[refused.tp]
                self.queue.restart(refused.tp, first)
                return
        settle(self, refused, first, end)

    return [(ConsumerDriver, "_settle_position", grown)]


def d6t() -> list[Patch]:
    refuse = Assignments.refuse

    def retried(self: Assignments, tp: TopicPartition, position: int, truncated: str, now_ms: int) -> None:
        """Takes a report of lost messages for a fetch that failed."""
        if truncated:
            self.fail(tp, truncated, now_ms)
        else:
            refuse(self, tp, position, truncated, now_ms)

    return [(Assignments, "refuse", retried)]


def d6f() -> list[Patch]:
    def assign(self: Assignments, positions: Mapping[TopicPartition, int]) -> None:
        """Forgets in which leader epoch it has read what it fetches again."""
        for tp, position in positions.items():
            self._round += 1
            self._wanted[tp] = Assignment(self._round, position)
            self._changed.add(tp)

    return [(Assignments, "assign", assign)]


def d10l() -> list[Patch]:
    learn = Topics.learn

    def first(self: Topics, topic: str, count: int, topic_id: str = "") -> bool:
        """Keeps the id that it has heard first."""
        return learn(self, topic, count, self.ids.get(topic, topic_id))

    return [(Topics, "learn", first)]


def d10r() -> list[Patch]:
    read = Topics.read

    def trusting(self: Topics, record: Topology) -> None:
        """Takes the id that somebody has accepted for the cluster's, though it has heard another one itself."""
        read(self, record)
        self._asked.clear()

    return [(Topics, "read", trusting)]


def d10s() -> list[Patch]:
    return [(rebalance, "BELIEVED_MS", 10**12)]  # an id that the log has replaced is never believed again


def d10b() -> list[Patch]:
    look_at = TopicWatch.look_at

    def quietly(self: TopicWatch, topic: str) -> None:
        """Does not remember which topic it has looked at, so that the data client goes on with what it knows of it."""
        self._ids.clear()
        look_at(self, topic)

    return [(TopicWatch, "look_at", quietly)]


def d12() -> list[Patch]:
    def fail(self: Assignments, tp: TopicPartition, reason: str, now_ms: int) -> None:
        fetched = self.fetched.get(tp)
        if fetched is not None:
            fetched.state = State.STOPPED
            self._changed.add(tp)

    return [(Assignments, "fail", fail)]
