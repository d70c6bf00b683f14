"""What only a cluster of three brokers shows: leaders that die, a broker that freezes, replicas, safe settings.

All of it is in one file, because the cluster lives as long as its file and takes ten CPU seconds to start.
"""

from __future__ import annotations

import json
import time
import uuid
from contextlib import ExitStack

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from pyspark import TaskContext

from marshal_py.client.driver import loop
from marshal_py.errors import WrongTopicSetting
from marshal_py.spark.stream import range_reader
from marshal_py.spark.stream.backfills import BackfillOptions, BackfillReader
from marshal_py.topics.topic import Topic
from marshal_py.transport.kafka import KafkaTransport
from tests.kafka.test_conformance import ApacheRig
from tests.kafka.test_harness import leader_of, numbered, read, write
from tests.kafka.test_processes import ADMIN_TIMEOUT_S, opened, passed
from tests.kafka.test_recreated import PARTITIONS, TopicCase
from tests.kafka.test_topics import create_and_use
from tests.support.client_fixtures import BackgroundConsumer, joined
from tests.support.kafka import Cluster, TopicFactory, brokers_seen_by, wait_until
from tests.support.process_scenario import DEADLINE_S as RUN_DEADLINE_S
from tests.support.process_scenario import MakeScenario

DEADLINE_S = 60.0  # Fail-over takes 2 to 5 s here, and several times that on a busy machine.


@pytest.mark.proof
@pytest.mark.node_control
def test_three_nodes_keep_what_was_acknowledged_when_the_leader_dies(kafka3: Cluster, topic: TopicFactory) -> None:
    name = topic(cluster=kafka3)
    write(kafka3, name, numbered(0, 100))
    lost = leader_of(kafka3, name)
    kafka3.kill(lost)
    write(kafka3, name, numbered(100, 200))
    assert leader_of(kafka3, name) != lost
    kafka3.restart(lost)
    assert brokers_seen_by(kafka3.bootstrap.split(",")[lost - 1]) == {1, 2, 3}
    assert read(kafka3, name, 200) == numbered(0, 200)


@pytest.mark.proof
@pytest.mark.node_control
def test_a_frozen_node_is_left_out_and_taken_back(kafka3: Cluster, topic: TopicFactory) -> None:
    name = topic(cluster=kafka3)
    frozen = leader_of(kafka3, name)
    witness = kafka3.bootstrap.split(",")[frozen % 3]  # The next node: address i-1 is node i.
    kafka3.stop(frozen)
    wait_until(lambda: brokers_seen_by(witness) == {1, 2, 3} - {frozen}, DEADLINE_S, "the frozen node is left out")
    assert brokers_seen_by(kafka3.bootstrap.split(",")[frozen - 1]) == set(), "a frozen node must not answer"
    write(kafka3, name, numbered(0, 10))
    # A coordination topic that is created meanwhile has three replicas: with two nobody could use it afterwards.
    admin, made = ApacheRig(witness).transport().admin(), f"made-{uuid.uuid4().hex[:12]}"
    assert admin.prepare_coordination(made, 2) == 2
    kafka3.cont(frozen)
    wait_until(lambda: brokers_seen_by(witness) == {1, 2, 3}, DEADLINE_S, "the frozen node is taken back")
    assert admin.prepare_coordination(made, 2) == 2
    assert read(kafka3, name, 10) == numbered(0, 10)


def test_three_brokers_must_be_safe_ones(kafka3: Cluster) -> None:
    """L1: with three brokers the topic gets safe settings; an error names the setting of one that is not safe."""
    rig = ApacheRig(kafka3.bootstrap)
    admin = rig.transport().admin()
    made = f"made-{uuid.uuid4().hex[:12]}"
    assert admin.prepare_coordination(made, 2) == 2
    settings = admin.settings(made)
    assert (settings["min.insync.replicas"], settings["unclean.leader.election.enable"]) == ("2", "false")

    for setting, value in (("min.insync.replicas", "1"), ("unclean.leader.election.enable", "true")):
        name = f"bad-{uuid.uuid4().hex[:12]}"
        rig.create(name, 1, {"retention.ms": "-1", setting: value}, replicas=3)
        with pytest.raises(WrongTopicSetting) as raised:
            admin.prepare_coordination(name, 1)
        assert (raised.value.setting, raised.value.value) == (setting, value)

    lonely = f"lonely-{uuid.uuid4().hex[:12]}"
    rig.create(lonely, 1, {"retention.ms": "-1", "min.insync.replicas": "1"}, replicas=1)
    with pytest.raises(WrongTopicSetting, match="replication factor=1"):
        admin.prepare_coordination(lonely, 1)


@pytest.mark.proof
def test_the_nearest_replica_answers(kafka3: Cluster, topic: TopicFactory) -> None:
    """ADR-31: The JetStream Direct Get feature enables all stream peers (R>1), not just the stream leader, to respond
    to stream read calls.

    Direct Get does not assure read-after-write coherency. Here it does: the replica is waited for until it has what the
    leader had. librdkafka's statistics name the broker from which it fetches: with `client.rack` the one of that rack.
    """
    name = topic(cluster=kafka3)
    producer = Producer({"bootstrap.servers": kafka3.bootstrap})
    producer.produce(name, b"v", b"k")
    assert producer.flush(DEADLINE_S) == 0
    admin = AdminClient({"bootstrap.servers": kafka3.bootstrap})
    leader = admin.list_topics(name, timeout=DEADLINE_S).topics[name].partitions[0].leader
    near, fetched_from = leader % 3 + 1, set[int]()

    def note(text: str) -> None:
        partitions = json.loads(text)["topics"].get(name, {}).get("partitions", {})
        fetched_from.update(each["broker"] for number, each in partitions.items() if number == "0")

    given = {"bootstrap.servers": kafka3.bootstrap, "client.rack": f"rack-{near}"}
    source = Topic(KafkaTransport({**given, "statistics.interval.ms": 50, "stats_cb": note}, DEADLINE_S), name)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while near not in fetched_from:
            assert source["k"].value == b"v"
            assert time.monotonic() < deadline, f"fetched from {fetched_from}, led by {leader}"
    finally:
        source.close()


def test_what_was_created_can_be_used_at_once(kafka3: Cluster) -> None:
    """The controller answers before the brokers know a new topic, each of them at a time of its own."""
    create_and_use(kafka3)


def values_by_spark(case: TopicCase) -> set[bytes]:
    """Reads the topic by tasks of one process, as Spark's executors do."""
    reader = BackfillReader(BackfillOptions.of({"bootstrap.servers": case.cluster.bootstrap, "topics": case.topic}))
    batches = (batch for task in reader.partitions() for batch in reader.read(task))
    return {value for batch in batches for value in batch["value"].to_pylist()}


@pytest.mark.node_control
def test_a_topic_is_created_again_after_its_leader_has_changed(
    kafka3: Cluster, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaders of the new topic begin with epoch 0, which librdkafka takes for older than what it knows of the name.
    Consumers, a `Topic` and Spark's tasks read the new one, in a process that has read the old one.
    """
    monkeypatch.setattr(loop, "METADATA_S", 0.3)
    monkeypatch.setattr(range_reader, "_spare_collector", lambda: None)
    first = type("First", (), {"attemptNumber": lambda self: 0})()
    monkeypatch.setattr(TaskContext, "get", classmethod(lambda cls: first))
    case = TopicCase(kafka3, topic(PARTITIONS, cluster=kafka3))
    with (
        ExitStack() as stack,
        Topic(KafkaTransport({"bootstrap.servers": kafka3.bootstrap}, DEADLINE_S), case.topic) as stored,
        case.connect() as marshal,
        joined(marshal, case.group, [case.topic]) as consumer,
    ):
        stack.callback(range_reader._close_idle)
        case.begin(consumer)
        leader = leader_of(kafka3, case.topic)
        kafka3.kill(leader)
        wait_until(lambda: leader_of(kafka3, case.topic) != leader, DEADLINE_S, "another one leads")
        kafka3.restart(leader)
        with BackgroundConsumer(consumer) as reader:
            case.await_all(reader, case.fill(case.topic, PARTITIONS, 10, "later"))
            values = {stored.get(offset=0, partition=0).value, *values_by_spark(case)}
            assert {value.partition(b" ")[0] for value in values} == {b"old", b"later"}
            noticed, wanted = len(reader.seen), case.recreate(PARTITIONS, 30)
            values = {stored.get(offset=0, partition=0).value, *values_by_spark(case)}
            assert {value.partition(b" ")[0] for value in values} == {b"new"}
            case.await_event(consumer, "parked", PARTITIONS)
            case.adopt(PARTITIONS)
            case.await_all(reader, wanted, noticed)


@pytest.mark.node_control
@pytest.mark.timeout(4 * RUN_DEADLINE_S)
def test_the_leader_of_the_groups_log_dies(kafka3: Cluster, topic: TopicFactory, scenario: MakeScenario) -> None:
    run = scenario(kafka3, [topic(4, cluster=kafka3)])
    opened(run, 3, 4)
    log = run.recorder.log_of(run.group)
    assert log is not None
    admin = AdminClient({"bootstrap.servers": kafka3.bootstrap})
    described = admin.list_topics(run.coordination_topic, timeout=ADMIN_TIMEOUT_S).topics[run.coordination_topic]
    leader = described.partitions[log].leader
    run.record_fault("broker_kill", str(leader))
    kafka3.kill(leader)
    run.await_begun(200)
    kafka3.restart(leader)
    run.record_fault("broker_up", str(leader))
    run.await_begun(100)
    epochs = {record.leader_epoch for record in run.recorder.logs[log]}
    passed(run.finish(deliveries=300))
    assert len(epochs) > 1, "the log had only one leader, so the test shows nothing"
