"""Limits that a group's settings put on what a consumer asks for (ADR-37, "Status handling", its warnings)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from marshal_py import Consumer, GroupConfig, InvalidOption
from marshal_py.client.receive import group_limits
from marshal_py.client.values import requests
from marshal_py.client.values.waits import Steps
from marshal_py.transport.ports import Chunk
from tests.support.client_fixtures import MemoryTestCluster, collect, joined, owns, until


def limited(consumer: Consumer) -> list[str]:
    return [event.text for event in consumer.events() if event.kind == "request_limited"]


def test_a_fetch_of_more_messages_than_the_group_allows(memory: MemoryTestCluster) -> None:
    """ADR-37: "409 Exceeded MaxRequestBatch of %d"
    ADR-37: "Telegraphing warnings is optional."
    ADR-37: "Calls to next() and fetch() should be concluded when the pull is terminated." """
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 20)
    with memory.connect() as marshal:
        marshal.create_group(group, GroupConfig(max_request_batch=5))
        with joined(marshal, group, [topic]) as consumer:
            for _ in range(2):
                assert len(consumer.fetch(10, expires_s=600)) == 5
            assert len(list(consumer.fetch_each(10, expires_s=600))) == 5
            assert limited(consumer) == ["asked for 10, which exceeds the group's max_request_batch of 5"]
            assert len(consumer.fetch(2, expires_s=600)) == 2
            assert limited(consumer) == []


def test_each_value_is_reported_once_and_few_are_remembered(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = memory.topic(), memory.group()
    monkeypatch.setattr(group_limits, "REPORTED_MAX", 3)
    with memory.connect() as marshal:
        marshal.create_group(group, GroupConfig(max_request_batch=5))
        with joined(marshal, group, [topic]) as consumer:

            def asks(*values: int) -> list[str]:
                for value in values:
                    consumer.fetch(value, expires_s=0)
                return [text.split()[2] for text in limited(consumer)]

            assert asks(6, 7, 6, 7, 8, 6) == ["6,", "7,", "8,"]
            assert asks(9, 9, 6, 9) == ["9,", "6,"], "the oldest one is forgotten"


def test_a_fetch_that_would_wait_longer_than_the_group_allows(memory: MemoryTestCluster) -> None:
    """ADR-37: "409 Exceeded MaxRequestExpires of %v" """
    topic, group = memory.topic(), memory.group()
    with memory.connect() as marshal:
        marshal.create_group(group, GroupConfig(max_request_expires_s=0.1))
        with joined(marshal, group, [topic]) as consumer:
            assert consumer.next(expires_s=3600) is None
            assert limited(consumer) == ["asked for 3600, which exceeds the group's max_request_expires_s of 0.1"]


def test_an_expiry_that_the_program_has_not_chosen_is_reported_as_the_default(memory: MemoryTestCluster) -> None:
    assert requests.CONSUME_EXPIRES_S == requests.FETCH_EXPIRES_S
    assert requests.CONSUME_MESSAGES == requests.FETCH_MESSAGES
    topic, group = memory.topic(), memory.group()
    with memory.connect() as marshal:
        marshal.create_group(group, GroupConfig(max_request_expires_s=0.1))
        with joined(marshal, group, [topic]) as consumer:
            consumer.consume().stop()
            assert consumer.next() is None
            text = "asked for 30, the default, which exceeds the group's max_request_expires_s of 0.1"
            assert limited(consumer) == [text]


def test_a_fetch_of_more_bytes_than_the_group_allows(memory: MemoryTestCluster) -> None:
    """ADR-37: "409 Exceeded MaxRequestMaxBytes of %v" """
    topic, group = memory.topic(), memory.group()
    for _ in range(10):
        memory.put(topic, 0, b"x" * 100)
    with memory.connect() as marshal:
        marshal.create_group(group, GroupConfig(max_request_max_bytes=3 * (100 + len(topic))))
        with joined(marshal, group, [topic]) as consumer:
            assert len(consumer.fetch(max_bytes=1_000_000, expires_s=600)) == 3
            assert len(limited(consumer)) == 1
            assert len(consumer.fetch(4, expires_s=600)) == 4  # no bytes were asked for
            assert limited(consumer) == []


def test_a_fetch_that_names_no_count_or_a_huge_one_is_cut_and_reported(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 20)
    with memory.connect() as marshal:
        marshal.create_group(group, GroupConfig(max_request_batch=5))
        with joined(marshal, group, [topic]) as consumer:
            for given, shown in (
                ({"max_bytes": 10_000}, "any number of messages"),
                ({"max_messages": 1_000_000}, "1000000"),
                ({}, "1000, the default"),
            ):
                assert len(consumer.fetch(**given, expires_s=600)) == 5
                assert limited(consumer) == [f"asked for {shown}, which exceeds the group's max_request_batch of 5"]
            assert len(list(consumer.fetch_each(max_bytes=10_000, expires_s=600))) == 5
            assert limited(consumer) == [], "this was reported above"


def test_a_consume_in_bytes_asks_for_no_more_messages_than_the_group_allows(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 20)
    with memory.connect() as marshal:
        marshal.create_group(group, GroupConfig(max_request_batch=4))
        with joined(marshal, group, [topic]) as consumer:
            until(owns(consumer, 0), "the partition is ours")
            came: list[int] = []
            pull = consumer._receiving.intake.pull

            def counted(timeout_s: float, wanted: int, most: int) -> Steps[Sequence[Chunk]]:
                chunks = yield from pull(timeout_s, wanted, most)
                came.append(sum(len(chunk.messages) for chunk in chunks))
                return chunks

            monkeypatch.setattr(consumer._receiving.intake, "pull", counted)
            monkeypatch.setattr(consumer._queue, "looks", lambda: False)
            for message in consumer.consume(max_bytes=100_000):
                message.ack()
                if message.offset == 19:
                    break
            assert (max(came), sum(came)) == (4, 20)
            assert [text.partition(",")[0] for text in limited(consumer)] == ["asked for any number of messages"]


@pytest.mark.parametrize("given", [{"max_messages": 10}, {"max_bytes": 100_000}])
def test_consume_continues_with_further_requests(memory: MemoryTestCluster, given: dict[str, int]) -> None:
    """ADR-37: "On the other hand consume() should recover while maintaing its state (e.g. pending counts) by issuing a
    new pull request unless the status is 409 Consumer Deleted or 409 Consumer is push based in which case consume()
    call should conclude in an implementation specific way idiomatic to the language being used."
    ADR-37: "9. Go to #1."
    """
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 50)
    limits = GroupConfig(max_request_batch=2, max_request_max_bytes=50, max_request_expires_s=1)
    with memory.connect() as marshal:
        marshal.create_group(group, limits)
        with joined(marshal, group, [topic]) as consumer:
            for message in consumer.consume(**given):
                message.ack()
                if message.offset == 49:
                    break
            reported = limited(consumer)
            assert len(reported) == len(set(reported)) == len(given.keys() & {"max_bytes"}) + 2
            assert "asked for 30, the default, which exceeds the group's max_request_expires_s of 1" in reported
            asked = next(iter(given.values()))
            assert sum(text.startswith(f"asked for {asked}, ") for text in reported) == 1


def test_new_limits_count_at_once(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        marshal.update_group(group, GroupConfig(max_request_batch=1))
        consumer.info()
        memory.fill(topic, 0, 2)
        assert len(consumer.fetch(2, expires_s=600)) == 1
        assert marshal.group(group).info().max_request_batch == 1
        marshal.update_group(group, GroupConfig(max_request_batch=0))
        consumer.info()
        assert marshal.group(group).info().max_request_batch is None
        assert len(collect(consumer, 1)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_request_batch": -1},
        {"max_request_expires_s": "1"},
        {"max_request_max_bytes": 1.5},
        {"max_request_expires_s": 0.0004},  # 0 ms would be no limit
        {"priority_timeout_s": 0.0004},
        {"failover_s": 0.0004},
    ],
)
def test_a_limit_must_be_a_number(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        GroupConfig(**wrong)  # type: ignore[arg-type]


def test_a_fetch_ends_by_the_clock_of_the_client() -> None:
    """ADR-37: "pull requests issued by clients should have client-side timeouts in addition to server-side timeout
    (expiry)." The only clock here is the client's."""
    memory = MemoryTestCluster()
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        began = time.monotonic()
        assert len(consumer.fetch(1, expires_s=0.2)) == 0
        assert time.monotonic() - began >= 0.2
