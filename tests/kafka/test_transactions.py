"""Topics with transactions: control records and aborted messages are no lag, and no loss when they are deleted."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

import marshal_py
from marshal_py import Consumer
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.kafka_source import KafkaSource
from tests.support.client_fixtures import collect, joined, until
from tests.support.kafka import Cluster, TopicFactory
from tests.support.process_scenario import DEADLINE_S

MODES = pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
COMMITTED, ABORTED = 10, 500


@pytest.fixture
def data(kafka: Cluster, topic: TopicFactory) -> str:
    """A topic with a transaction that was committed and one that was aborted."""
    name = topic(1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
    producer.init_transactions(DEADLINE_S)
    transaction(producer, name, COMMITTED, commits=True)
    transaction(producer, name, ABORTED, commits=False)
    return name


def transaction(producer: Producer, topic: str, messages: int, *, commits: bool) -> None:
    producer.begin_transaction()
    for number in range(messages):
        producer.produce(topic, b"%d" % number)
    producer.flush(DEADLINE_S)
    (producer.commit_transaction if commits else producer.abort_transaction)(DEADLINE_S)


def at_end(consumer: Consumer, tp: TopicPartition) -> bool:
    """Whether position, lag and the offset committed in Kafka say that nothing is left."""
    assert not consumer.fetch(1, expires_s=0.1)
    (end,) = consumer._context.admin.bounds([tp]).values()
    claim = consumer.cached_info().claims.get(tp)
    if claim is None:
        return False  # not claimed yet
    known = consumer._context.admin.committed(consumer.cached_info().group, [tp]).get(tp)
    return (claim.position, claim.lag, known) == (end.end, 0, end.end)


@MODES
def test_a_topic_with_transactions_is_read_to_its_end(kafka: Cluster, data: str, delivery: str) -> None:
    """D1, D2, D6: and after a restart, and when retention has deleted what was handled."""
    tp = TopicPartition(data, 0)
    with marshal_py.connect(kafka.bootstrap) as marshal:
        with joined(marshal, f"g-{data}", [data], delivery=delivery) as consumer:
            assert len(collect(consumer, COMMITTED)) == COMMITTED
            until(lambda: at_end(consumer, tp), "nothing is left")
            end = consumer.cached_info().claims[tp].position
        assert end == COMMITTED + 1 + ABORTED + 1
        assert consumer._context.admin.delete_records(tp, end) == ""
        with joined(marshal, f"g-{data}", [data], delivery=delivery) as consumer:
            until(lambda: at_end(consumer, tp), "the next one knows it")
            assert [event for event in consumer.events() if event.kind == "offset_lost"] == []


def test_one_that_was_never_given_a_message_passes_what_is_there(kafka: Cluster, data: str) -> None:
    """D1: the partition is claimed at the control record, after everything before it was handled."""
    tp = TopicPartition(data, 0)
    with marshal_py.connect(kafka.bootstrap) as marshal:
        assert marshal._context.admin.commit(f"g-{data}", {tp: COMMITTED}) == ""
        with joined(marshal, f"g-{data}", [data], start="committed") as consumer:
            until(lambda: at_end(consumer, tp), "nothing is left")


def test_a_new_assignment_does_not_believe_the_position_of_the_one_before(kafka: Cluster, data: str) -> None:
    """D12: the client has read to the end and is assigned the beginning: nothing there is skipped."""
    tp = TopicPartition(data, 0)
    client = KafkaTransport(kafka.bootstrap, DEADLINE_S).source("reader", "reader", {})
    assert isinstance(client, KafkaSource)
    try:
        for _ in range(50):
            client.assign({tp: 0})
            came: list[int] = []
            while not came or came[-1] < COMMITTED + ABORTED + 2:
                for chunk in client.poll(0.1, 1_000):
                    if chunk.round != client.round(tp):
                        continue
                    assert chunk.messages or len(came) == COMMITTED, "all messages came before"
                    came += [message.offset() or 0 for message in chunk.messages] or [chunk.reached]
            assert came == [*range(COMMITTED), COMMITTED + ABORTED + 2]
    finally:
        client.close()
