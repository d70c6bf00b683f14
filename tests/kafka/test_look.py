"""Reading a group's state on Apache Kafka: the lag agrees with Kafka's own tools; dumps can be verified and loaded."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from pathlib import Path

from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

import marshal_py
from tests.support.commands import DEADLINE_S, Commands
from tests.support.kafka import Cluster, TopicFactory, wait_until
from tests.support.timeline_page import picture_in

PARTITIONS = 3
MESSAGES = 90
READ = 40


def kafkas_lags(cluster: Cluster, group: str, topic: str) -> dict[int, tuple[int, int, int]]:
    """Per partition (committed, end, lag): the figures of `kafka-consumer-groups --describe`."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    tps = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    asked = [ConsumerGroupTopicPartitions(group, tps)]
    answer = admin.list_consumer_group_offsets(asked)[group].result(DEADLINE_S)
    ends = {
        tp.partition: future.result(DEADLINE_S).offset
        for tp, future in admin.list_offsets({tp: OffsetSpec.latest() for tp in tps}).items()
    }
    committed = {tp.partition: tp.offset for tp in answer.topic_partitions}
    return {number: (committed[number], ends[number], ends[number] - committed[number]) for number in ends}


def test_lag_agrees_with_kafkas_own_figures_and_the_log_with_itself(
    kafka: Cluster, topic: TopicFactory, tmp_path: Path
) -> None:
    name, group, command = topic(PARTITIONS), f"g-{uuid.uuid4().hex[:8]}", Commands(kafka.bootstrap)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for number in range(MESSAGES):
        producer.produce(name, b"%d" % number, partition=number % PARTITIONS)
    assert producer.flush(DEADLINE_S) == 0
    coordination = topic(PARTITIONS, config={"retention.ms": "-1", "retention.bytes": "-1"})
    with (
        marshal_py.connect(kafka.bootstrap, coordination_topic=coordination) as marshal,
        marshal.consumer(group, [name], start="earliest", heartbeat_interval_s=1.0) as consumer,
    ):
        read = 0
        while read < READ:
            batch = consumer.fetch(READ - read, min_messages=READ - read, expires_s=0.2)
            read += sum(len(part) for part in batch.parts)
            batch.ack()
        consumer.flush()
        then = datetime.now(UTC).isoformat()
        live = command.json("state", group, "--coordination-topic", coordination)["groups"][0]
        (session,) = live["sessions"]
        assert session["state"] in ("fresh", "unknown"), "unknown: the command was slow on a busy machine"
        assert len(session["claims"]) == PARTITIONS

    def agree() -> bool:
        ours = command.json("state", "--lag", group, "--coordination-topic", coordination)
        assert ours["lag"] == MESSAGES - READ
        found = {row["partition"]: (row["position"], row["end"], row["lag"]) for row in ours["partitions"]}
        return found == kafkas_lags(kafka, group, name)

    wait_until(agree, DEADLINE_S, "the positions are mirrored and the figures agree")

    past, now = (
        command.json("top", group, *when, "--coordination-topic", coordination)["groups"][0]
        for when in (("--at", then), ("--interval", "0.2"))
    )
    to_come = command.json("top", group, "--at", "2099-01-01T00:00:00Z", "--coordination-topic", coordination)
    assert "2099" not in json.dumps(to_come), "a time to come is now"
    assert (past["sessions"], past["owned"]) == (1, PARTITIONS)
    assert (now["sessions"], now["free"], now["lag"]) == (0, PARTITIONS, MESSAGES - READ)
    assert now["oldest_s"] > 0

    page, where = tmp_path / "page.html", ("--coordination-topic", coordination)
    drawn = command.json("timeline", group, "--output", str(page), *where)
    picture = picture_in(page.read_text(encoding="utf-8"))
    assert (drawn["records"], drawn["partitions"]) == (len(picture["records"]), PARTITIONS)
    assert [lane[-1] for lane in picture["lags"]] == [row[2] for row in kafkas_lags(kafka, group, name).values()]
    assert picture["lag_of"] == "the log's positions and the topic's ends"
    history = command.json("state", group, "--lag", "--since", "-1h", *where)
    assert (history["total"][-1], history["lag_of"]) == (MESSAGES - READ, picture["lag_of"])
    assert [mark[1] for mark in picture["marks"] if mark[1] != "other"] == ["join", "leave"]

    lines = command.run("advisories", group, "--coordination-topic", coordination, "--json").stdout.splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert [kind for kind in kinds if kind != "topology"] == (
        ["joined", "activated", *["claimed"] * PARTITIONS, *["released"] * PARTITIONS, "deactivated", "left"]
    )

    path = tmp_path / "log.dump"
    assert command.run("log", "dump", "--output", str(path), *where).returncode == 0
    offline = command.json("verify", "--dump", str(path))
    assert offline["ok"]
    assert offline["records"] == command.json("verify", *where)["records"]
    judged = command.json("simulate", "--dump", str(path))
    assert (judged["verdict"], judged["violations"], judged["sessions"]) == ("ok", 0, 1)
    assert (judged["records"], judged["claims"]) == (offline["records"], PARTITIONS)
    raced = command.json("simulate", "--dump", str(path), "--group", group, "--seeds", "0:3", "--processes", "1")
    assert (raced["seeds"], raced["violations"]) == (3, 0)
    assert raced["deliveries"] > 0
    copy = f"{coordination}-copy"
    assert command.json("log", "load", str(path), "--coordination-topic", copy)["records"] == offline["records"]
    again, first = (
        command.json("state", "--lag", group, "--coordination-topic", one)["partitions"] for one in (copy, coordination)
    )
    assert [(row["position"], row["lag"]) for row in again] == [(row["position"], row["lag"]) for row in first]
    whole = path.read_bytes()
    at = len(whole) * 2 // 3
    path.write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
    changed = command.run("verify", "--dump", str(path), "--json")
    assert changed.returncode == 1
    assert f"at offset {json.loads(changed.stdout)['first']['offset']} of log" in changed.stderr


def test_the_oldest_message_may_stand_behind_an_offset_without_one(kafka: Cluster, topic: TopicFactory) -> None:
    """The end of a transaction has an offset, and no message: the message after it counts, with its own time."""
    name, group, command = topic(2), f"g-{uuid.uuid4().hex[:8]}", Commands(kafka.bootstrap)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
    producer.init_transactions(DEADLINE_S)
    times_ms = (1_600_000_000_000, 1_700_000_000_000)
    for at_ms in times_ms:
        producer.begin_transaction()
        for number in range(2):
            producer.produce(name, b"x", partition=number, timestamp=at_ms + number)
        producer.commit_transaction(DEADLINE_S)
    coordination = topic(1, config={"retention.ms": "-1", "retention.bytes": "-1"})
    with (
        marshal_py.connect(kafka.bootstrap, coordination_topic=coordination) as marshal,
        marshal.consumer(group, [name], start=1) as consumer,
    ):
        wait_until(lambda: len(consumer.info().claims) == 2, DEADLINE_S, "both claims")
        rows = command.json("state", "--lag", group, "--coordination-topic", coordination)["partitions"]
    now_s = datetime.now(UTC).timestamp()
    assert {round((now_s - row["oldest_s"]) / 3600) for row in rows} == {round(times_ms[1] / 3_600_000)}
