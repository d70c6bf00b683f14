"""The observer over the memory transport: it reads what is there, knows when there is nothing, and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from marshal_py.client.marshal import connect
from marshal_py.errors import CoordinationTopicMissing, TopicRecreated
from marshal_py.log import reader
from marshal_py.log.observer import Judged, Observer
from marshal_py.protocol.wire.identity import TopicPartition, route
from marshal_py.protocol.wire.records import Genesis, Heartbeat, Join, Leave
from marshal_py.transport.memory import MemoryBroker, MemoryTransport

TOPIC = "__marshal"


@pytest.fixture
def transport() -> MemoryTransport:
    broker = MemoryBroker()
    broker.create_topic("orders", 3)
    return MemoryTransport(broker)


@pytest.fixture
def worked(transport: MemoryTransport) -> MemoryTransport:
    """Two groups, in different logs, have come and gone."""
    assert route("billing", 16) != route("audit", 16)
    for group in ("billing", "audit"):
        with connect(transport, client_id=f"{group}-1") as marshal, marshal.consumer(group, ["orders"]):
            pass
    return transport


def test_a_missing_topic_is_named_and_not_created(transport: MemoryTransport) -> None:
    for _ in range(2):
        with pytest.raises(CoordinationTopicMissing, match="reading it creates nothing"):
            Observer(transport, TOPIC)


def test_an_empty_topic_has_no_root(transport: MemoryTransport) -> None:
    transport.broker.create_topic(TOPIC, 16)
    with Observer(transport, TOPIC) as observer:
        assert observer.root is None
        assert list(observer.read()) == []
        assert observer.logs_of("billing") == []


def test_a_group_is_read_alone_or_with_all(worked: MemoryTransport) -> None:
    with Observer(worked, TOPIC) as observer:
        records = list(observer.read("billing"))
        assert {judged.record.log for judged in records} == {route("billing", 16)}
        kinds = [type(judged.verdict.record) for judged in records]
        assert kinds[0] is Genesis
        assert kinds[1] is Join
        assert kinds[-1] is Leave
        assert [judged.record.offset for judged in records] == list(range(len(records)))
    with Observer(worked, TOPIC) as observer:
        observer.fold()
        assert [group.name for _, group in observer.groups()] == ["audit", "billing"]


def test_a_second_read_continues(worked: MemoryTransport) -> None:
    with Observer(worked, TOPIC) as observer:
        first = list(observer.read())
        assert list(observer.read()) == []
        with connect(worked, client_id="late") as marshal, marshal.consumer("late", ["orders"]):
            pass
        second = list(observer.read())
        assert first
        assert {judged.verdict.group for judged in second} >= {"late"}
        assert {judged.record for judged in first}.isdisjoint(judged.record for judged in second)


@pytest.mark.parametrize("records", [1, 100])
def test_a_topic_that_is_created_again_is_not_read_on(
    worked: MemoryTransport, records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L8: neither where its end is below what was read, nor where its offsets fit."""
    monkeypatch.setattr(reader, "CHECK_S", 0.0 if records > 1 else 3_600.0)
    with Observer(worked, TOPIC) as observer:
        assert list(observer.read("billing"))
        follows = observer.follow("billing")
        while next(follows) is not None:
            pass
        worked.broker.delete_topic(TOPIC)
        worked.broker.create_topic(TOPIC, 16)
        for _ in range(records):
            worked.broker.produce(TOPIC, route("billing", 16), b"")
        with pytest.raises(TopicRecreated):
            list(observer.read("billing"))
        if records > 1:
            with pytest.raises(TopicRecreated):
                next(follows)


def test_following_shows_what_comes(worked: MemoryTransport) -> None:
    with Observer(worked, TOPIC) as observer:
        news = observer.follow("billing")
        while next(news) is not None:
            pass
        with connect(worked, client_id="second") as marshal, marshal.consumer("billing", ["orders"]):
            join = next_join(news)
        assert join.client_id == "second"


def next_join(news: Iterator[Judged | None]) -> Join:
    for judged in news:
        if judged is not None and isinstance(judged.verdict.record, Join):
            return judged.verdict.record
    raise AssertionError("the stream has no end")


def test_the_age_of_a_session_is_that_of_its_last_extension(worked: MemoryTransport) -> None:
    with (
        connect(worked, client_id="live") as marshal,
        marshal.consumer("billing", ["orders"]) as consumer,
        Observer(worked, TOPIC) as observer,
    ):
        stamps = {}
        for judged in observer.read("billing"):
            record = judged.verdict.record
            if isinstance(record, Join):
                stamps[judged.record.offset] = judged.record.timestamp_ms
            elif isinstance(record, Heartbeat):
                stamps[record.session] = judged.record.timestamp_ms
        session = consumer.cached_info().session
        assert observer.extended_ms[route("billing", 16), session] == stamps[session]


def test_ends_of_partitions_that_are_gone_are_left_out(worked: MemoryTransport) -> None:
    with Observer(worked, TOPIC) as observer:
        asked = [TopicPartition("orders", 0), TopicPartition("orders", 9), TopicPartition("gone", 0)]
        assert observer.ends(asked) == {TopicPartition("orders", 0): 0}


def test_looking_writes_nothing(worked: MemoryTransport) -> None:
    with Observer(worked, TOPIC) as observer:
        before = observer.bounds(range(16))
        observer.fold()
        assert observer.bounds(range(16)) == before
