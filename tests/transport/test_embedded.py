"""The embedded broker over TCP: what works, what it refuses and how, and how it differs from Kafka.

Half of these tests hold limits of librdkafka's mock cluster, not features. One that turns red after an upgrade says
that a sentence in the docstring of transport/embedded.py has become wrong, and perhaps that a guard can go.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import confluent_kafka
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic, ResourceType

from marshal_py import embedded as transport
from marshal_py.errors import ConsumerClosed, InvalidOption, TopicRefused, UnsupportedPlatform, UsedAfterFork
from marshal_py.transport import embedded
from marshal_py.transport.embedded import (
    AUTO_CREATED_PARTITIONS,
    CAPABILITIES,
    FETCH_WAIT_MS,
    KEPT_BYTES,
    PARTITION_BYTES_MAX,
    Broker,
    EmbeddedCallFailed,
    LogGuard,
    is_embedded,
    record_bytes_max,
)
from tests.support.broker_faults import bounds, fail_requests, set_leader, set_round_trip_ms, topics

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 40.0  # nothing here takes a second; a machine under load may be many times slower
T = TypeVar("T")


@pytest.fixture(scope="module")
def shared() -> Iterator[Broker]:
    """A broker shared by the tests that do no damage; each uses topics of its own."""
    with Broker() as broker:
        yield broker


@pytest.fixture
def own() -> Iterator[Broker]:
    """A broker for one test, which may break it."""
    with Broker() as broker:
        yield broker


def _property(name: str) -> str:
    """Options are written as Python names; callbacks keep theirs."""
    return name if name.endswith("_cb") else name.replace("_", ".")


def producer(broker: Broker, **options: Any) -> Producer:
    """A producer, by default without idempotence, whose first record may wait half a second for a producer id."""
    return Producer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "linger.ms": 0,
            "acks": "all",
            "retry.backoff.ms": 20,
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 50,
            "log_level": 0,
        }
        | {_property(name): value for name, value in options.items()}
    )


def consumer(broker: Broker, **options: Any) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "tests",
            "fetch.wait.max.ms": FETCH_WAIT_MS,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "log_level": 0,
        }
        | {_property(name): value for name, value in options.items()}
    )


def admin(broker: Broker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})


def write(target: Producer, topic: str, partition: int, *values: bytes, **fields: Any) -> list[int]:
    """Produces, waits for the acknowledgements and returns the offsets."""
    offsets: list[int] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        offsets.append(message.offset() or 0)

    for value in values:
        target.produce(topic, value, partition=partition, on_delivery=delivered, **fields)
    assert target.flush(DEADLINE_S) == 0
    return offsets


def read(source: Consumer, count: int) -> list[Message]:
    """The next `count` messages of the assigned partitions."""
    found: list[Message] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages"
        message = source.poll(0.2)
        if message is not None:
            assert message.error() is None, message.error()
            found.append(message)
    return found


def values_of(broker: Broker, topic: str, partition: int, count: int, **options: Any) -> list[bytes | None]:
    source = consumer(broker, **options)
    source.assign([TopicPartition(topic, partition, 0)])
    try:
        return [message.value() for message in read(source, count)]
    finally:
        source.close()


def until(condition: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


# --- what works


def test_a_record_comes_back_as_it_was_written(shared: Broker) -> None:
    shared.create_topic("whole", 12)
    target = producer(shared, enable_idempotence=True)
    headers: list[tuple[str, bytes | None]] = [("a", b"1"), ("a", b"2"), ("none", None)]
    assert write(target, "whole", 11, b"value", key=b"key", timestamp=1_700_000_000_123, headers=headers) == [0]
    source = consumer(shared)
    source.assign([TopicPartition("whole", 11, 0)])
    (message,) = read(source, 1)
    assert (message.key(), message.value(), message.headers()) == (b"key", b"value", headers)
    assert message.timestamp() == (confluent_kafka.TIMESTAMP_CREATE_TIME, 1_700_000_000_123)
    source.close()


def test_reading_starts_at_the_assigned_offset(shared: Broker) -> None:
    shared.create_topic("offsets", 1)
    assert write(producer(shared), "offsets", 0, *(b"%d" % n for n in range(20))) == list(range(20))
    source = consumer(shared)
    source.assign([TopicPartition("offsets", 0, 17)])
    assert [message.offset() for message in read(source, 3)] == [17, 18, 19]
    assert source.get_watermark_offsets(TopicPartition("offsets", 0), timeout=DEADLINE_S) == (0, 20)
    assert source.get_watermark_offsets(TopicPartition("offsets", 0), cached=True) == (0, 20)
    source.close()


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches(shared: Broker, codec: str) -> None:
    shared.create_topic(f"codec-{codec}", 1)
    sent = [b"%03d" % n * 50 for n in range(100)]
    write(producer(shared, compression_type=codec, linger_ms=20), f"codec-{codec}", 0, *sent)
    assert values_of(shared, f"codec-{codec}", 0, 100) == sent


def test_committed_offsets(shared: Broker) -> None:
    shared.create_topic("committed", 2)
    write(producer(shared), "committed", 0, b"x", b"y")
    first, second = consumer(shared, group_id="readers"), consumer(shared, group_id="readers")
    first.commit(offsets=[TopicPartition("committed", 0, 2)], asynchronous=False)
    asked = [TopicPartition("committed", 0), TopicPartition("committed", 1)]
    assert [part.offset for part in second.committed(asked, DEADLINE_S)] == [2, confluent_kafka.OFFSET_INVALID]
    first.close()
    second.close()


def test_metadata_shows_topics_that_came_later(shared: Broker) -> None:
    source = consumer(shared)
    assert "later" not in source.list_topics(timeout=DEADLINE_S).topics
    shared.create_topic("later", 3)
    assert len(source.list_topics(timeout=DEADLINE_S).topics["later"].partitions) == 3
    source.close()


@pytest.mark.new_client
def test_a_cluster_is_recognised_by_its_id(shared: Broker) -> None:
    source = consumer(shared)
    assert is_embedded(source.list_topics(timeout=DEADLINE_S).cluster_id)
    client = admin(shared)
    assert is_embedded(client.describe_cluster(request_timeout=DEADLINE_S).result(DEADLINE_S).cluster_id)
    source.close()


@pytest.mark.parametrize("cluster_id", [None, "", "mockCluster", "5L6g3nShT-eMCtK--X86sw", "my-mockCluster12"])
def test_other_clusters_are_not_taken_for_it(cluster_id: str | None) -> None:
    assert not is_embedded(cluster_id)


CHILD = """
import sys
from confluent_kafka import Consumer, Producer, TopicPartition
servers, partitions = sys.argv[1], int(sys.argv[2])
producer = Producer({"bootstrap.servers": servers, "linger.ms": 0, "acks": "all", "enable.idempotence": True})
source = Consumer({"bootstrap.servers": servers, "group.id": "child", "fetch.wait.max.ms": 5})
source.assign([TopicPartition("ask", p, 0) for p in range(partitions)])
for _ in range(partitions):
    while (message := source.poll(0.2)) is None:
        pass
    assert message.error() is None, message.error()
    producer.produce("answer", message.value() + b"!", partition=message.partition())
assert producer.flush(10) == 0
source.commit(offsets=[TopicPartition("ask", 0, 1)], asynchronous=False)
source.close()
"""


def test_another_process_reads_and_writes() -> None:
    with Broker(topics={"ask": 16, "answer": 16}) as broker:
        target = producer(broker)
        for partition in range(16):
            write(target, "ask", partition, b"%d" % partition)
        command = [sys.executable, "-c", CHILD, broker.bootstrap_servers, "16"]
        subprocess.run(command, check=True, timeout=DEADLINE_S, cwd=REPOSITORY)
        source = consumer(broker, group_id="child")
        source.assign([TopicPartition("answer", partition, 0) for partition in range(16)])
        answers = {message.partition(): message.value() for message in read(source, 16)}
        assert answers == {partition: b"%d!" % partition for partition in range(16)}
        assert source.committed([TopicPartition("ask", 0)], DEADLINE_S)[0].offset == 1
        source.close()


def test_brokers_share_the_partitions() -> None:
    with Broker(brokers=3) as broker:
        broker.create_topic("spread", 6, replication=3)
        assert len(broker.bootstrap_servers.split(",")) == 3
        target = producer(broker)
        for partition in range(6):
            assert write(target, "spread", partition, b"x") == [0]


# --- what it does otherwise than Kafka


def test_a_client_has_none_of_the_named_capabilities() -> None:
    """The tests below show why, one by one."""
    assert not CAPABILITIES


REFUSED: dict[str, Callable[[AdminClient], Any]] = {
    "create_topics": lambda client: client.create_topics([NewTopic("new", 1, 1)], request_timeout=DEADLINE_S),
    "create_partitions": lambda client: client.create_partitions(
        [NewPartitions("limits", 9)], request_timeout=DEADLINE_S
    ),
    "describe_configs": lambda client: client.describe_configs(
        [ConfigResource(ResourceType.TOPIC, "limits")], request_timeout=DEADLINE_S
    ),
    "delete_records": lambda client: client.delete_records(
        [TopicPartition("limits", 0, 0)], request_timeout=DEADLINE_S
    ),
    "delete_topics": lambda client: client.delete_topics(["limits"], request_timeout=DEADLINE_S),
    "describe_consumer_groups": lambda client: client.describe_consumer_groups(["g"], request_timeout=DEADLINE_S),
}


@pytest.fixture(scope="module")
def limits(shared: Broker) -> Broker:
    shared.create_topic("limits", 2)
    write(producer(shared), "limits", 0, b"x", timestamp=1000)
    return shared


@pytest.mark.new_client
@pytest.mark.parametrize("request_name", REFUSED)
def test_an_administrative_request_is_refused_at_once(limits: Broker, request_name: str) -> None:
    started = time.monotonic()
    client = admin(limits)  # without a reference the client is destroyed, and its requests with it
    (answer,) = REFUSED[request_name](client).values()
    with pytest.raises(KafkaException) as caught:
        answer.result(DEADLINE_S)
    assert caught.value.args[0].code() == KafkaError._UNSUPPORTED_FEATURE
    assert time.monotonic() - started < DEADLINE_S / 2, "it waited for a controller"


def test_groups_are_listed_as_none_with_an_error(limits: Broker) -> None:
    client = admin(limits)
    found = client.list_consumer_groups(request_timeout=DEADLINE_S).result(DEADLINE_S)
    assert found.valid == []
    assert [error.code() for error in found.errors] == [KafkaError._UNSUPPORTED_FEATURE]


@pytest.mark.parametrize("timestamp_ms", [0, 999, 1001])
def test_a_look_up_by_time_finds_nothing_and_does_not_fail(limits: Broker, timestamp_ms: int) -> None:
    source = consumer(limits)
    (answer,) = source.offsets_for_times([TopicPartition("limits", 0, timestamp_ms)], timeout=DEADLINE_S)
    assert (answer.offset, answer.error) == (confluent_kafka.OFFSET_END, None)
    source.close()


def test_asking_creates_the_topic_unless_a_consumer_asks(own: Broker) -> None:
    source = consumer(own)
    assert source.list_topics("asked", timeout=DEADLINE_S).topics["asked"].error is not None
    source.close()
    assert topics(own) == {}
    admin(own).list_topics("asked", timeout=DEADLINE_S)
    assert topics(own) == {"asked": AUTO_CREATED_PARTITIONS}


def test_the_number_of_auto_created_partitions_is_not_ours_to_set() -> None:
    with Broker() as broker:
        write(producer(broker), "written", 0, b"x")
        broker.create_topic("made", 7)
        assert topics(broker) == {"written": AUTO_CREATED_PARTITIONS, "made": 7}


def test_transactions_are_accepted_and_ignored(shared: Broker) -> None:
    shared.create_topic("transactions", 1)
    target = producer(shared, transactional_id="t")
    target.init_transactions(DEADLINE_S)
    target.begin_transaction()
    write(target, "transactions", 0, b"aborted")
    target.abort_transaction(DEADLINE_S)
    target.begin_transaction()
    write(target, "transactions", 0, b"open")
    assert values_of(shared, "transactions", 0, 2, isolation_level="read_committed") == [b"aborted", b"open"]
    target.abort_transaction(DEADLINE_S)


def test_a_lost_acknowledgement_doubles_the_record(own: Broker) -> None:
    """Idempotence is not enforced. With Kafka the log would hold two records here."""
    own.create_topic("lost", 1)
    sent: list[bool] = []

    def statistics(text: str) -> None:
        brokers = json.loads(text)["brokers"].values()
        requests = sum(broker["req"].get("Produce", 0) for broker in brokers)
        sent.append(requests == 2 and not any(broker["outbuf_cnt"] for broker in brokers))

    target = producer(own, enable_idempotence=True, statistics_interval_ms=10, stats_cb=statistics)
    write(target, "lost", 0, b"before")
    set_round_trip_ms(own, 60_000)
    target.produce("lost", b"twice", partition=0)
    until(lambda: target.poll(0.05) and sent[-1])
    # The mock has one thread, which alternates between sockets and calls: two calls later it has read what was sent.
    set_round_trip_ms(own, 60_000)
    set_round_trip_ms(own, 60_000)
    own.broker_down()
    set_round_trip_ms(own, 0)
    own.broker_up()
    assert target.flush(DEADLINE_S) == 0
    assert values_of(own, "lost", 0, 3) == [b"before", b"twice", b"twice"]


# --- the guard


def test_the_broker_keeps_five_mebibytes_and_drops_the_oldest(own: Broker) -> None:
    own.create_topic("long", 2)
    target, value = producer(own, batch_num_messages=1), b"x" * 50_000
    fit = PARTITION_BYTES_MAX // record_bytes_max(None, value)
    write(target, "long", 0, *[value] * fit)
    assert bounds(own, "long", 0).low == 0
    more = KEPT_BYTES // len(value) + 1
    write(target, "long", 0, *[value] * (more - fit))
    low, high = bounds(own, "long", 0)
    assert (low > 0, high) == (True, more)
    assert bounds(own, "long", 1) == (0, 0)


@pytest.mark.new_client
def test_reading_what_was_dropped_is_an_error_if_the_reader_wants_it(own: Broker) -> None:
    own.create_topic("short", 1)
    for value in (b"a", b"b", b"c"):
        write(producer(own), "short", 0, value)
    own.truncate("short", 0, 2)
    assert bounds(own, "short", 0) == (2, 3)
    source = consumer(own)
    source.assign([TopicPartition("short", 0, 0)])
    message = until(lambda: source.poll(0.2))
    error = message.error()
    assert error is not None
    assert error.code() == KafkaError._AUTO_OFFSET_RESET
    source.close()


def test_the_guard_refuses_before_the_limit_and_per_partition() -> None:
    guard = LogGuard(limit_bytes=1000)
    assert guard.reserve("t", 0, 600) == 600
    with pytest.raises(TopicRefused) as caught:
        guard.reserve("t", 0, 401)
    assert "partition 0 of the embedded broker would hold 1001 bytes, and it keeps 1000" in str(caught.value)
    assert guard.reserve("t", 0, 400) == 1000  # the refused record has taken no room
    assert guard.reserve("t", 1, 1000) == 1000
    with pytest.raises(InvalidOption):
        LogGuard(limit_bytes=PARTITION_BYTES_MAX + 1)


def test_the_guard_counts_no_less_than_the_broker(own: Broker) -> None:
    """With batches of one smallest record, the broker reaches its limit no earlier than the count does."""
    own.create_topic("small", 1)
    count = PARTITION_BYTES_MAX // record_bytes_max(None, b"x")
    target = producer(own, batch_num_messages=1)
    for _ in range(0, count, 5000):
        for _ in range(5000):
            target.produce("small", b"x", partition=0)
        assert target.flush(DEADLINE_S) == 0
    assert bounds(own, "small", 0).low == 0


# --- faults


def test_a_broker_that_is_down_keeps_its_port_and_its_records(own: Broker) -> None:
    own.create_topic("down", 1)
    servers = own.bootstrap_servers
    write(producer(own), "down", 0, b"kept")
    own.broker_down()
    source = consumer(own)
    with pytest.raises(KafkaException) as caught:
        source.list_topics(timeout=0.3)
    assert caught.value.args[0].code() in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)
    source.close()
    own.broker_up()
    assert own.bootstrap_servers == servers
    assert values_of(own, "down", 0, 1) == [b"kept"]


def test_a_producer_outlives_a_broker_that_was_down(own: Broker) -> None:
    own.create_topic("outage", 1)
    target = producer(own, enable_idempotence=True)
    write(target, "outage", 0, b"before")
    own.broker_down()
    target.produce("outage", b"during", partition=0)
    assert target.flush(0.2) == 1
    own.broker_up()
    assert target.flush(DEADLINE_S) == 0
    assert values_of(own, "outage", 0, 2) == [b"before", b"during"]


def test_injected_errors_are_answered_in_order_and_then_end(own: Broker) -> None:
    own.create_topic("errors", 1)
    target = producer(own, retries=0)
    write(target, "errors", 0, b"0")
    fail_requests(own, "Produce", 0, KafkaError.POLICY_VIOLATION)
    codes: list[int | None] = []
    for _ in range(3):
        target.produce(
            "errors", b"x", partition=0, on_delivery=lambda error, _: codes.append(error.code() if error else None)
        )
        assert target.flush(DEADLINE_S) == 0
    assert codes == [None, KafkaError.POLICY_VIOLATION, None]
    assert bounds(own, "errors", 0).high == 3  # records answered with an error were not written


def test_a_hung_up_connection_is_retried(own: Broker) -> None:
    own.create_topic("hangup", 1)
    fail_requests(own, "Produce", KafkaError._TRANSPORT)
    assert write(producer(own), "hangup", 0, b"x") == [0]


def test_the_round_trip_delays_answers(own: Broker) -> None:
    own.create_topic("delayed", 1)
    target = producer(own)
    write(target, "delayed", 0, b"x")
    set_round_trip_ms(own, 300)
    started = time.monotonic()
    write(target, "delayed", 0, b"y")
    assert time.monotonic() - started >= 0.3


def test_clients_follow_a_leader_that_moves() -> None:
    with Broker(brokers=2, topics={"moving": 1}) as broker:
        target = producer(broker, topic_metadata_refresh_fast_interval_ms=20)
        for number in range(4):
            set_leader(broker, "moving", 0, 1 + number % 2)
            assert write(target, "moving", 0, b"%d" % number) == [number]


# --- its life, and bad input


def test_before_start_and_after_close_there_is_no_broker() -> None:
    broker = Broker()
    with pytest.raises(ConsumerClosed):
        _ = broker.bootstrap_servers
    with broker:
        broker.create_topic("once", 1)
        assert broker.start() is broker
        servers = broker.bootstrap_servers
        assert servers.startswith("127.0.0.1:")
        assert topics(broker) == {"once": 1}
    broker.close()
    with pytest.raises(ConsumerClosed):
        broker.create_topic("late", 1)
    with broker:
        assert topics(broker) == {}


def test_two_brokers_live_side_by_side() -> None:
    with Broker(topics={"a": 1}) as first, Broker(topics={"b": 2}) as second:
        assert first.bootstrap_servers != second.bootstrap_servers
        assert (topics(first), topics(second)) == ({"a": 1}, {"b": 2})


FORKED = """
import os
from marshal_py.errors import UsedAfterFork
from marshal_py.transport.embedded import Broker
with Broker(topics={"t": 1}) as broker:
    child = os.fork()
    if child == 0:
        try:
            broker.create_topic("forked", 1)
        except UsedAfterFork:
            broker.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    broker.create_topic("kept", 1)
"""


def test_a_fork_can_neither_use_nor_close_it() -> None:
    """In a separate process, because forking this one with its client threads could hang it."""
    assert UsedAfterFork.__name__ in FORKED
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=DEADLINE_S, env=environment)


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "x" * 250, "a\n"])
def test_a_name_that_kafka_refuses(shared: Broker, name: str) -> None:
    with pytest.raises(InvalidOption):
        shared.create_topic(name, 1)


def test_a_topic_that_exists(shared: Broker) -> None:
    shared.create_topic("exists", 1)
    with pytest.raises(EmbeddedCallFailed) as caught:
        shared.create_topic("exists", 1)
    assert caught.value.code == KafkaError.TOPIC_ALREADY_EXISTS


BAD_CALLS: dict[str, Callable[[Broker], object]] = {
    "brokers": lambda _: Broker(brokers=0),
    "partitions": lambda broker: broker.create_topic("bad", 0),
    "replication": lambda broker: broker.create_topic("bad", 1, replication=2),
    "all brokers": lambda broker: broker.broker_down(-1),
    "before": lambda broker: broker.truncate("bad", 0, -1),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_a_value_out_of_bounds(shared: Broker, call: str) -> None:
    with pytest.raises(InvalidOption):
        BAD_CALLS[call](shared)
    assert "bad" not in topics(shared)


def test_a_topic_out_of_bounds_at_the_start_leaves_no_broker() -> None:
    broker = Broker(topics={"fine": 1, "not fine": 1})
    with pytest.raises(InvalidOption):
        broker.start()
    with pytest.raises(ConsumerClosed):
        _ = broker.bootstrap_servers


def test_windows_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.sys, "platform", "win32")
    with pytest.raises(UnsupportedPlatform, match="Windows"):
        Broker().start()


def test_a_library_without_the_mock_cluster_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded.cimpl, "__file__", str(tmp_path / "cimpl.so"))
    monkeypatch.setattr(embedded.confluent_kafka, "__file__", str(tmp_path / "confluent_kafka" / "__init__.py"))
    with pytest.raises(UnsupportedPlatform, match=r"cimpl\.so"):
        Broker().start()


def test_the_bundled_folder_is_found_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the extension module does not lead to the library, its place in the wheel does."""
    monkeypatch.setattr(embedded.cimpl, "__file__", str(tmp_path / "cimpl.so"))
    if sys.platform == "linux":
        with Broker() as broker:
            assert topics(broker) == {}


@pytest.mark.new_client
def test_a_call_that_an_older_library_lacks(monkeypatch: pytest.MonkeyPatch, own: Broker) -> None:
    monkeypatch.delitem(own._functions, "rd_kafka_mock_partition_delete_records")
    with pytest.raises(UnsupportedPlatform, match="newer confluent-kafka"):
        own.truncate("t", 0, 0)


def test_the_public_module_exports_the_same_objects() -> None:
    for name in transport.__all__:
        assert getattr(transport, name) is getattr(embedded, name)
