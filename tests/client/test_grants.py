"""Which offsets a consumer asks grants for, in at-most-once mode (D2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest

from marshal_py.client.delivery import prefetch
from marshal_py.client.delivery.buffers import Buffer
from marshal_py.client.delivery.prefetch import HandlingRate
from marshal_py.protocol.claims import AtMostOnce, Claim, Grant
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.memory import MemoryMessage
from marshal_py.transport.ports import DataSource
from tests.support.client_fixtures import TestCluster, calm

MOST = 100  # messages per grant
pytestmark = pytest.mark.bounds(grant=MOST)
FAST, SLOW = 1_000_000, 10_000  # messages per second
END = 10_000


class Partition:
    """A claimed partition of a source that fetches nothing by itself, and whose end is known."""

    def __init__(self, number: int = 0) -> None:
        self.tp = TopicPartition("orders", number)
        self.tracker = AtMostOnce(0)
        self.claim = Claim(self.tp, 7 + number, 0, self.tracker)
        self.buffer = Buffer(self.tp, 0)
        self.buffer.open(self.claim, 0)

    def fetch(self, *offsets: int) -> None:
        self.buffer.add([MemoryMessage(self.tp.topic, self.tp.partition, at, None, b"x", None, 0) for at in offsets])

    def grant(self) -> tuple[int, int]:
        """The log grants what is offered."""
        assert self.claim.offer is not None
        self.tracker.granted(*self.claim.offer)
        return self.claim.offer


class Ends:
    """A source of which only the ends are known."""

    def __init__(self, end: int, fetching: bool) -> None:
        self._end, self._fetching = end, fetching

    def end_offset(self, tp: TopicPartition) -> int:
        return self._end

    def fetching(self, tp: TopicPartition) -> bool:
        return self._fetching


def rate(per_second: int) -> HandlingRate:
    found = HandlingRate()
    found.delivered(0, 0)
    found.returned(per_second, 1_000)
    return found


def always_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandlingRate, "per_second", lambda self: FAST)
    monkeypatch.setattr(HandlingRate, "within", lambda self, ms: FAST * ms // 1_000)


def offer(*partitions: Partition, end: int = END, per_second: int = FAST, fetching: bool = True) -> bool:
    buffers = [one.buffer for one in partitions]
    source = cast(DataSource, Ends(end, fetching))
    return prefetch.offer_grants(buffers, source, rate(per_second), ends=False).something


def offers(partitions: Iterable[Partition]) -> list[tuple[int, int] | None]:
    return [one.claim.offer for one in partitions]


def granted_twice() -> tuple[Partition, Partition]:
    """Two partitions with nothing fetched, and with as many grants as a fast user may have."""
    one, other = Partition(0), Partition(1)
    for _ in range(2):
        assert offer(one, other)
        one.grant()
        other.grant()
    return one, other


def test_a_fast_user_s_grants_are_asked_for_before_anything_is_fetched() -> None:
    """D2: BOUNDS.grant at a time below the end of the partition, two grants that are not used up at most."""
    one = Partition()
    assert offer(one)
    assert one.grant() == (0, 100)
    assert offer(one)
    assert one.grant() == (100, 200)
    assert not offer(one), "two are not used up"
    one.fetch(*range(200))
    assert one.buffer.granted(one.tracker) == 200
    one.tracker.deliver(99, 0, 100)
    assert not offer(one, end=299), "near the end they are for fetched messages, as a transaction may be open there"
    one.fetch(*range(200, 230))
    assert offer(one, end=299)
    assert one.grant() == (200, 230)


@pytest.mark.parametrize(
    "why", ["the user is slow", "the end is unknown", "nothing is fetched now", "the cluster has refused to fetch"]
)
def test_otherwise_grants_are_for_fetched_messages_only(why: str) -> None:
    """D2: what may come late or never is not granted."""
    one = Partition()
    one.buffer.held_back = why == "nothing is fetched now"

    def again() -> bool:
        slow, end = why == "the user is slow", -1 if why == "the end is unknown" else END
        return offer(one, end=end, per_second=SLOW if slow else FAST, fetching=not why.startswith("the cluster"))

    assert not again()
    one.fetch(0, 1, 2)
    assert again()
    assert one.claim.offer == (0, 3)


def test_a_second_of_work_is_shared_by_all_partitions_that_have_messages() -> None:
    """D2: fetched or not."""
    team = [Partition(number) for number in range(prefetch.SLOW_PER_S // 50)]
    team[0].fetch(0, 1)
    assert offer(*team, per_second=prefetch.SLOW_PER_S)
    assert offers(team) == [(0, 50)] * len(team)


def test_grants_without_a_message_do_not_keep_the_next_message_waiting() -> None:
    """D2: compaction or a transaction has left a hole that is longer than two grants."""
    one, other = granted_twice()
    one.fetch(5_000, 5_001)
    assert offer(one, other), "although the other partition needs no grant yet"
    assert one.grant() == (5_000, 5_100)
    assert not other.tracker.dropped
    assert list(one.tracker.grants) == [Grant(5_000, 5_100)]
    assert one.tracker.holds(5_000)


def test_one_record_asks_for_all_partitions() -> None:
    """D2: a fast user's next grant waits for the other partitions until half of the grant at hand is used."""
    one, other = granted_twice()
    one.fetch(*range(200))
    one.tracker.deliver(99, 0, 100)
    assert not offer(one, other), "it has a whole grant left"
    assert offers([one]) == [None]
    one.tracker.deliver(149, 0, 50)
    assert offer(one, other)
    assert one.claim.offer == (200, 300)
    assert len(other.tracker.grants) == 2


@pytest.mark.bounds(grant=800)
def test_everything_comes_once(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with grants of messages that are not fetched yet."""
    always_fast(monkeypatch)
    topic, group = cluster.topic(2), cluster.group()
    for partition in (0, 1):
        cluster.fill(topic, partition, 3_000)
    seen: list[tuple[int, int]] = []
    with cluster.connect() as marshal, calm(marshal, group, [topic], delivery="at_most_once") as consumer:
        while len(seen) < 6_000:
            batch = consumer.fetch(500, expires_s=30)
            seen += [(message.partition, message.offset) for message in batch]
        assert consumer.cached_info().grants_dropped == 0
    assert sorted(seen) == [(p, o) for p in (0, 1) for o in range(3_000)]
    ranges = cluster.granted(group)
    assert sum(one.to - one.start for one in ranges) == 6_000, "no offset is granted twice"
    assert max(one.to - one.start for one in ranges) <= 800


@pytest.mark.bounds(grant=700)
def test_what_was_granted_and_not_fetched_is_given_back(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6.3, T16: a clean stop loses nothing of it."""
    always_fast(monkeypatch)
    topic, group = cluster.topic(), cluster.group()
    cluster.fill(topic, 0, 2_000)
    with cluster.connect() as marshal:
        with calm(marshal, group, [topic], delivery="at_most_once") as consumer:
            seen = [message.offset for message in consumer.fetch(200, expires_s=30)]
        with calm(marshal, group, [topic], delivery="at_most_once") as successor:
            while len(seen) < 2_000:
                seen += [message.offset for message in successor.fetch(1_000, expires_s=1)]
    assert seen == list(range(2_000))


@pytest.mark.bounds(grant=600, prefetch=100)
def test_a_batch_waits_for_what_is_granted_and_comes(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two grants are a bound only if all of their messages are there; otherwise the batch can still be filled."""
    always_fast(monkeypatch)
    topic = cluster.topic()
    cluster.fill(topic, 0, 2_000)
    with cluster.connect() as marshal, calm(marshal, cluster.group(), [topic], delivery="at_most_once") as consumer:
        assert len(consumer.fetch(600, min_messages=600, expires_s=3_000)) == 600


@pytest.mark.bounds(grant=1_000_000)
@pytest.mark.parametrize("per_second", [1, 10, 400, 20_000])
def test_all_grants_together_are_two_seconds_of_work(per_second: int) -> None:
    """D2: a backlog that comes partition by partition, when each of them is the only one that has messages at first."""
    team, handler = [Partition(number) for number in range(12)], rate(per_second)
    source, most = cast(DataSource, Ends(END, True)), 0
    for one in team:
        one.fetch(*range(5_000))
        for _ in range(3):
            prefetch.offer_grants([each.buffer for each in team], source, handler, ends=False)
            for each in team:
                if each.claim.offer is not None and len(each.tracker.grants) < 2:
                    each.grant()
        most = max(most, sum(each.buffer.granted(each.tracker) for each in team))
    assert per_second <= most <= 2 * per_second


def test_a_new_consumer_is_granted_one_message_and_then_twice_what_it_has_handled() -> None:
    """D2: one fast message does not prove that the next ones are fast."""
    handler = HandlingRate()
    assert handler.within(2_000) == 1
    handler.delivered(0, 0)
    handler.returned(1, 1)
    assert handler.within(2_000) == 2
    handler.delivered(1, 1)
    handler.returned(3, 2)
    assert handler.within(2_000) == 6
    handler.delivered(3, 2)
    handler.returned(4, 10_002)
    assert handler.within(2_000) == 1, "it has become slow"
