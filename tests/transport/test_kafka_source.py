"""What KafkaSource makes of errors that librdkafka hands out among the messages; here the tests hand them in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError

from marshal_py.protocol.identity import TopicPartition
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaDoor
from marshal_py.transport.kafka_source import KafkaSource
from marshal_py.transport.ports import OutOfRange

TP = TopicPartition("orders", 0)


class Refusal:
    """As a message: the broker refuses a position."""

    def __init__(self, position: int, code: int = KafkaError._AUTO_OFFSET_RESET) -> None:
        self._position, self._code = position, code

    def error(self) -> KafkaError:
        return KafkaError(self._code)

    def topic(self) -> str:
        return TP.topic

    def partition(self) -> int:
        return TP.partition

    def offset(self) -> int:
        return self._position


@pytest.fixture
def source() -> Iterator[KafkaSource]:
    with Broker(topics={"orders": 1}) as broker:
        source = KafkaDoor(broker.bootstrap_servers, 10.0).source("group", "reader", {})
        yield source
        source.close()


def hand_in(source: KafkaSource, refusal: Refusal, rounds: dict[TopicPartition, int]) -> None:
    assert source._take_errors(cast(Any, [refusal]), rounds) == []


def test_a_refused_position_ends_the_assignment(source: KafkaSource) -> None:
    source.assign({TP: 100})
    hand_in(source, Refusal(100), {TP: source.round(TP)})
    assert source.out_of_range() == [OutOfRange(TP, 100)]
    assert source.round(TP) == 0


def test_a_refusal_that_was_fetched_before_the_partition_was_assigned_anew(source: KafkaSource) -> None:
    """As after a topic was made anew: the position of the old topic is refused, the new one is fetched by then."""
    source.assign({TP: 100})
    before = {TP: source.round(TP)}
    source.unassign([TP])
    source.assign({TP: 0})
    hand_in(source, Refusal(100), before)
    hand_in(source, Refusal(100), {})
    assert source.out_of_range() == []
    assert source.round(TP) == before[TP] + 1


def test_a_refusal_that_librdkafka_tells_of_too_late(source: KafkaSource) -> None:
    """Nothing has come of the new assignment yet, and the refused position is not where it began: it begins again."""
    source.assign({TP: 100})
    source.unassign([TP])
    source.assign({TP: 0})
    fresh = source.round(TP)
    hand_in(source, Refusal(100), {TP: fresh})
    assert source.out_of_range() == []
    assert source.round(TP) == fresh + 1


@pytest.mark.parametrize(
    "code", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID, KafkaError._UNKNOWN_TOPIC]
)
def test_a_topic_that_is_gone_is_waited_for(source: KafkaSource, code: int) -> None:
    source.assign({TP: 0})
    hand_in(source, Refusal(0, code), {TP: source.round(TP)})
    assert source.broken() == []
    assert source.round(TP) > 0
