"""Topic.get on a real Kafka: what the embedded broker has not, transactions, compaction, deleted records and times."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from marshal_py.errors import MessageNotFound
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.topics.request import GetRequest
from marshal_py.topics.topic import Topic
from marshal_py.transport.kafka import KafkaTransport
from tests.cli.shell import Shell
from tests.support import direct_get_examples
from tests.support.kafka import Cluster

DEADLINE_S = 60


def create(kafka: Cluster, name: str, partitions: int = 1, **settings: str) -> KafkaTransport:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    new = NewTopic(name, partitions, 1, config={key.replace("_", "."): value for key, value in settings.items()})
    admin.create_topics([new])[name].result(DEADLINE_S)
    return KafkaTransport(kafka.bootstrap, DEADLINE_S)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"get-{request.node.name.replace('[', '-').replace(']', '')}-{time.time_ns()}"


def test_aborted_messages_are_not_there(kafka: Cluster, name: str) -> None:
    """read_committed is the default: what was aborted, or is not committed yet, is not found and does not count."""
    transport = create(kafka, name)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
    producer.init_transactions(DEADLINE_S)
    for commits in (True, False, True):
        producer.begin_transaction()
        for at in range(3):
            producer.produce(name, b"%d" % at, key=b"committed" if commits else b"aborted")
        producer.flush(DEADLINE_S)
        (producer.commit_transaction if commits else producer.abort_transaction)(DEADLINE_S)
    producer.begin_transaction()
    producer.produce(name, b"open", key=b"open")
    producer.flush(DEADLINE_S)
    topic, everything = Topic(transport, name), Topic(transport, name, isolation="read_uncommitted")
    try:
        for key in ("aborted", "open"):
            with pytest.raises(MessageNotFound):
                topic.get(last_by_key=key)
            assert everything.get(last_by_key=key).key == key.encode()
        with pytest.raises(MessageNotFound):
            topic.get(offset=4)
        found = [message for page in topic.pages(GetRequest(batch=4)) for message in page]
        assert [message.value for message in found] == [b"0", b"1", b"2"] * 2
        assert len(topic.get(batch=100, next_by_key="committed")) == 6
        assert topic.get(multi_last=["*"])[0].offset == found[-1].offset
    finally:
        producer.abort_transaction(DEADLINE_S)
        topic.close()
        everything.close()


def test_compacted_topics_have_holes(kafka: Cluster, name: str) -> None:
    """An exact offset that is a hole is not found, never its neighbour; batches and keys pass over holes."""
    transport = create(
        kafka,
        name,
        cleanup_policy="compact",
        segment_ms="100",
        min_cleanable_dirty_ratio="0.001",
        min_compaction_lag_ms="0",
    )
    producer, topic = Producer({"bootstrap.servers": kafka.bootstrap}), Topic(transport, name)
    deadline = time.monotonic() + DEADLINE_S
    try:
        written = 0
        while True:  # the log cleaner takes closed segments at its own pace: write until it has taken one
            for at in range(3):
                producer.produce(name, b"%d" % written, key=b"k%d" % at)
                written += 1
            producer.flush(DEADLINE_S)
            try:
                topic.get(offset=0)
            except MessageNotFound:
                break
            assert time.monotonic() < deadline, "nothing was compacted"
            time.sleep(0.2)
        found = [message for page in topic.pages(GetRequest(batch=7)) for message in page]
        assert len(found) < written
        assert [message.offset for message in found] == sorted({message.offset for message in found})
        assert found[0].offset > 0
        while True:  # the cleaner may take the first message meanwhile, and then another one is the first
            first = topic.get(batch=1)[0]
            with contextlib.suppress(MessageNotFound):
                if topic.get(offset=first.offset) == topic.get(next_by_key=first.key):
                    break
            assert time.monotonic() < deadline, "the first message is not found by its key"
        assert {message.key: int(message.value) for message in topic.get(multi_last=["*"])} == {
            b"k0": written - 3,
            b"k1": written - 2,
            b"k2": written - 1,
        }
    finally:
        topic.close()


def test_deleted_records_and_times(kafka: Cluster, name: str) -> None:
    transport = create(kafka, name, 2)
    now_ms = int(time.time() * 1000)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for at in range(20):
        producer.produce(
            name, b"%d" % at, key=b"k%d" % (at % 4), partition=at % 2, timestamp=now_ms - 20_000 + at * 1000
        )
    producer.flush(DEADLINE_S)
    admin, topic = transport.admin(), Topic(transport, name)
    try:
        assert admin.delete_records(TopicPartition(name, 0), 4) == ""
        with pytest.raises(MessageNotFound):
            topic.get(offset=3, partition=0)
        assert topic.get(offset=4, partition=0).value == b"8"
        when = datetime.fromtimestamp((now_ms - 20_000 + 11_000) / 1000, UTC)
        assert topic.get(start_time=when).value == b"11"
        assert topic.get(start_time=when, next_by_key="k2").value == b"14"
        assert [message.value for message in topic.get(start_time=when, batch=4)] == [b"11", b"12", b"13", b"14"]
        then = {message.key: message.value for message in topic.get(multi_last=["*"], up_to_time=when)}
        assert then == {b"k0": b"8", b"k1": b"9", b"k2": b"10", b"k3": b"11"}
    finally:
        admin.close()
        topic.close()


def test_nothing_is_left_behind(kafka: Cluster, name: str) -> None:
    """Reads open no membership: no group appears, no topic is created, no offset is committed."""
    transport = create(kafka, name)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    before = set(admin.list_topics(timeout=DEADLINE_S).topics)
    topic = Topic(transport, name)
    with pytest.raises(MessageNotFound):
        topic.get(batch=1)
    topic.close()
    assert set(admin.list_topics(timeout=DEADLINE_S).topics) == before
    groups = admin.list_consumer_groups(request_timeout=DEADLINE_S).result(DEADLINE_S).valid
    assert [group.group_id for group in groups if "marshal-get" in group.group_id] == []


def test_the_examples_of_the_seed(kafka: Cluster) -> None:
    """ADR-31: `{"last_by_subj":"$KV.mykv1.mykey1"}` is answered by sequence 1, `hello`.

    `{"seq":1, "next_by_subj":"$KV.mykv1.mykey2"}` is answered by sequence 2, `goodbye`.
    `$JS.API.DIRECT.GET.KV_mykv1.$KV.mykv1.mykey1` without a payload is answered by sequence 1, `hello`.
    `$JS.API.DIRECT.GET.KV_mykv1.$KV.mykv1.mykey2` with the payload `{"seq":1, "next_by_subj":"$KV.mykv1.mykey2"}` is
    answered by 408 Bad Request.
    """
    topic, shell = f"KV-{time.time_ns()}", Shell(kafka.bootstrap)
    create(kafka, topic)
    direct_get_examples.load(shell, topic)
    for example in direct_get_examples.EXAMPLES:
        direct_get_examples.answers(shell, topic, example)
    direct_get_examples.refuses_a_payload(shell, topic)
