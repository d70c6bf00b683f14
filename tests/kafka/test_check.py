"""`marshal check` on Apache Kafka, with what really goes wrong: exit codes, findings, ages and retention."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer

import marshal_py
from marshal_py import TopicPartition
from tests.support.client_fixtures import BackgroundConsumer, joined
from tests.support.commands import DEADLINE_S, Commands
from tests.support.kafka import Cluster, TopicFactory, wait_until

MESSAGES = 5
HOUR_MS = 3_600_000
KEPT = {"retention.ms": "-1", "retention.bytes": "-1"}


class Case:
    """A topic with messages of an hour ago, and a group; `at`: the options that every command gets."""

    def __init__(self, kafka: Cluster, topic: TopicFactory, **config: str) -> None:
        self.kafka, self.group = kafka, "billing"
        self.topic = topic(2, config={"retention.ms": "-1", **config})
        self.coordination = topic(2, config=KEPT)
        self.commands = Commands(kafka.bootstrap, self.coordination)
        producer = Producer({"bootstrap.servers": kafka.bootstrap})
        for number in range(2 * MESSAGES):
            at_ms = time.time_ns() // 1_000_000 - HOUR_MS
            producer.produce(self.topic, b"%d" % number, partition=number % 2, timestamp=at_ms)
        assert producer.flush(DEADLINE_S) == 0

    def connect(self) -> marshal_py.Marshal:
        return marshal_py.connect(self.kafka.bootstrap, coordination_topic=self.coordination)

    def check(self, *options: str) -> tuple[int, dict[str, str], dict[str, Any]]:
        """The exit code, the levels of what was found, and the whole."""
        done = self.commands.run("check", self.group, *options, "--json")
        found = json.loads(done.stdout)
        assert done.returncode == found["exit_code"], done.stderr
        return done.returncode, {one["name"]: one["level"] for one in found["checks"]}, found

    def finds(self, code: int, checks: dict[str, str], *options: str) -> Callable[[], bool]:
        return lambda: self.check(*options)[:2] == (code, checks)


@pytest.fixture
def case(kafka: Cluster, topic: TopicFactory) -> Case:
    return Case(kafka, topic)


def test_a_group_that_works_then_parks_then_stops(case: Case) -> None:
    code, _, found = case.check()
    assert (code, case.check("--lag", "1")[0]) == (3, 3), "nobody has used the group"
    assert "; there is none yet" in found["checks"][0]["found"]
    with case.connect() as marshal, joined(marshal, case.group, [case.topic], start="earliest") as consumer:
        message = consumer.next(DEADLINE_S)
        assert message is not None
        consumer.flush()
        wait_until(lambda: len(consumer.cached_info().claims) == 2, DEADLINE_S, "it owns both")
        code, checks, found = case.check("--lag", "9", "--age", "59m")
        assert (code, checks, found["lag"]) == (2, {"lag": "fail", "age": "fail"}, 10)
        assert HOUR_MS / 1000 <= found["oldest_s"] < 2 * HOUR_MS / 1000, "the age is that of the message"
        message.nak(0)
        with BackgroundConsumer(consumer):
            wait_until(case.finds(0, {}, "--lag", "0", "--age", "1s"), DEADLINE_S, "all is handled")
            first, second = sorted(consumer.cached_info().claims)
            consumer._driver.park(first, "PartitionUnreadable", "no right")
            wait_until(case.finds(1, {"parked partitions": "warn"}), DEADLINE_S, "one of two is parked")
            consumer._driver.park(second, "PartitionUnreadable", "no right")
            wait_until(case.finds(2, {"parked partitions": "fail"}), DEADLINE_S, "all are parked")
    assert case.check()[1] == {"parked partitions": "fail", "no consumer": "warn"}


def test_nobody_consumes_and_a_pause_is_over(case: Case) -> None:
    with case.connect() as marshal, joined(marshal, case.group, [case.topic], start="earliest") as consumer:
        assert consumer.next(DEADLINE_S) is not None
        wait_until(lambda: len(consumer.cached_info().claims) == 2, DEADLINE_S, "it owns both")
    code, checks, found = case.check()
    assert (code, checks, found["sessions"], found["free"]) == (2, {"no consumer": "fail"}, 0, 2)
    assert case.commands.run("pause", case.group, "--for", "3s", "--yes").returncode == 0
    wait_until(
        case.finds(2, {"pause over": "warn", "no consumer": "fail"}), DEADLINE_S, "nobody is there to end the pause"
    )
    line = case.commands.run("check", case.group, "--format", "nagios").stdout
    assert line.startswith("MARSHAL CRITICAL billing: no consumer; pause over (0 consumers, ")
    assert "lag=10 " in line
    assert case.commands.run("doctor", case.group).returncode == 1, "it is the same judgement"


def test_a_frozen_consumer_is_found_without_any_limit(case: Case) -> None:
    process = case.commands.start(
        "consume", case.topic, "--group", case.group, "--start", "earliest", "--heartbeat-interval", "1"
    )
    try:
        wait_until(case.finds(0, {}, "--lag", "0"), DEADLINE_S, "it has read everything")
        process.send_signal(signal.SIGSTOP)
        wait_until(case.finds(2, {"silent consumer": "fail"}), DEADLINE_S, "it gives no sign of life")
    finally:
        process.kill()
        process.wait()


def test_what_waits_is_soon_deleted(kafka: Cluster, topic: TopicFactory) -> None:
    case = Case(kafka, topic, **{"retention.ms": str(HOUR_MS * 11 // 10)})
    with case.connect() as marshal, joined(marshal, case.group, [case.topic], start="earliest") as consumer:
        message = consumer.next(DEADLINE_S)
        assert message is not None
        consumer.flush()
        wait_until(lambda: TopicPartition(case.topic, 1) in consumer.cached_info().claims, DEADLINE_S, "it owns both")
        code, checks, found = case.check()
        assert (code, checks) == (1, {"retention near": "warn"})
        assert 0 < found["retention_s"] <= 360
