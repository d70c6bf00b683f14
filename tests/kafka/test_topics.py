"""Topics on a real Kafka: created, shown, changed, purged and deleted, from Python and from the shell."""

from __future__ import annotations

import time

import pytest

import marshal_py
from marshal_py.errors import AlreadyExists, BadRequest, ForeignTopic, TopicMissing, TopicRefused
from tests.cli.shell import Shell
from tests.support.kafka import Cluster

DEADLINE_S = 60


def test_a_topic_from_its_creation_to_its_end(kafka: Cluster) -> None:
    name = f"topics-{time.time_ns()}"
    with marshal_py.connect(kafka.bootstrap, coordination_topic=f"{name}-m") as marshal:
        cluster = marshal.info()
        assert (len(cluster.brokers), cluster.limits["message.max.bytes"] > 0) == (1, True)
        assert cluster.cluster_id
        marshal.create_topic(name, partitions=2, settings={"retention.ms": "60000"}, dry_run=True)
        assert name not in marshal.topics()
        topic = marshal.create_topic(name, partitions=2, settings={"retention.ms": "60000"})
        with pytest.raises(AlreadyExists):
            marshal.create_topic(name)
        for wrong in ({"replication": 9}, {"settings": {"no.such": "1"}}, {"settings": {"retention.ms": "soon"}}):
            with pytest.raises(TopicRefused):
                marshal.create_topic(f"{name}-x", **wrong)
        until(lambda: name in marshal.topics())
        assert topic.info().settings["retention.ms"] == "60000"
        marshal.update_topic(name, partitions=3, settings={"retention.ms": None}, dry_run=True)
        assert len(topic.info().partitions) == 2
        marshal.update_topic(name, partitions=3, settings={"retention.ms": None})
        until(lambda: len(topic.info().partitions) == 3)
        assert topic.info().settings["retention.ms"] != "60000"
        marshal.delete_topic(name)
        until(lambda: name not in marshal.topics())
        with pytest.raises(TopicMissing):
            marshal.delete_topic(name)
        topic.close()


def test_what_was_created_can_be_used_at_once(kafka: Cluster) -> None:
    """test_three_brokers.py does so where each broker knows a new topic at a time of its own."""
    create_and_use(kafka)


def create_and_use(cluster: Cluster) -> None:
    mark = time.time_ns()
    with marshal_py.connect(cluster.bootstrap, coordination_topic=f"made-{mark}-m") as marshal:
        for number in range(10):
            name = f"made-{mark}-{number % 2}"  # one that was deleted a moment ago, too
            with marshal.create_topic(name) as topic:
                with marshal.consumer(f"{name}-{number}", [name]) as consumer:
                    assert not consumer.next(expires_s=0)
                marshal.update_topic(name, partitions=3)
                assert len(topic.info().partitions) == 3
            marshal.delete_topic(name)


def test_a_data_topic_is_no_coordination_topic(kafka: Cluster) -> None:
    """With the retention that brokers give a topic; no answer advises to change it."""
    name, shell = f"data-{time.time_ns()}", Shell(kafka.bootstrap)
    with marshal_py.connect(kafka.bootstrap, coordination_topic=f"{name}-m") as marshal:
        marshal.create_topic(name, partitions=4).close()
    assert shell.run("produce", name, "--partition", "2", stdin=b"a\nb\n").exit_code == 0
    with pytest.raises(ForeignTopic, match=f"{name}:2 has messages"):
        marshal_py.connect(kafka.bootstrap, coordination_topic=name)
    for command in (["doctor"], ["state", "g"], ["groups", "ls"], ["groups", "create", "g"], ["log", "tail"]):
        found = shell.run(*command, "--coordination-topic", name)
        assert (found.exit_code, f"{name}:2 has messages" in found.output) == (1, True), (command, found.output)
        assert "retention" not in found.output
        assert "--alter" not in found.output


def test_an_empty_setting_reaches_kafka(kafka: Cluster) -> None:
    name, shell = f"topics-{time.time_ns()}", Shell(kafka.bootstrap)
    refused = shell.run("topics", "create", name, "--config", "retention.ms=")
    assert (refused.exit_code, "retention.ms" in refused.stderr) == (1, True)
    assert shell.run("topics", "ls", name).exit_code == 1, "nothing was created"


def test_purging_and_what_is_refused(kafka: Cluster) -> None:
    name = f"topics-{time.time_ns()}"
    shell = Shell(kafka.bootstrap)
    made = shell.json("topics", "create", name, "--partitions", "2", "--config", "cleanup.policy=compact")
    assert made == {"topic": name, "dry_run": False, "outcome": "created"}
    assert (
        shell.run("produce", name, "--key-separator", ":", stdin=b"".join(b"%d:x\n" % at for at in range(20))).exit_code
        == 0
    )
    with marshal_py.connect(kafka.bootstrap, coordination_topic=f"{name}-m") as marshal:
        topic = marshal.topic(name)
        with pytest.raises(TopicRefused):
            topic.purge(keep=0)
        [(partition, offset)] = topic.delete_key("7").items()
        assert topic.get(last_by_key="7", tombstones=True).offset == offset
        assert topic.get(offset=offset, partition=partition, tombstones=True).key == b"7"
        assert shell.json("topics", "update", name, "--config", "cleanup.policy=delete")["outcome"] == "changed"
        until(lambda: topic.info().settings["cleanup.policy"] == "delete")
        with pytest.raises(BadRequest):
            topic.delete_key("8")
        purged = topic.purge(keep=1)
        assert sum(each.after - each.before for each in purged.values()) == 19
        assert [first for first, _ in topic.info().partitions.values()] == [each.after for each in purged.values()]
        topic.close()
    assert shell.run("topics", "rm", name, "--yes").exit_code == 0


def until(condition: object) -> None:
    """Brokers learn of a change one after the other."""
    assert callable(condition)
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
