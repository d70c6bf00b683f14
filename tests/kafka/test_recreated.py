"""Data topics that are deleted and made anew on Apache Kafka, under consumers that stand still or run (D10, F9.10).

tests/client/test_recreated.py has more of it in memory; here are the broker's own ids, librdkafka, which knows the old
topic's metadata, and the commands of an operator. Old messages and new ones differ in their values.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import marshal_py
from marshal_py import Consumer, Marshal, TopicPartition
from marshal_py.client import loop
from marshal_py.protocol.identity import NONE
from tests.support.client_fixtures import BackgroundConsumer, collect, joined
from tests.support.kafka import Cluster, TopicFactory, wait_until

ROOT = Path(__file__).resolve().parents[2]
MODULE = (sys.executable, "-m", "marshal_py.cli")
DEADLINE_S = 60.0  # nothing here takes more than the ten seconds between two looks at the metadata
PARTITIONS = 2
OLD_MESSAGES = 100  # per partition
REASON = "DataTopicRecreated"
QUIET = {"log_level": 0}

shapes = pytest.mark.parametrize("partitions", [1, 2, 3], ids=["fewer partitions", "as many", "more"])
sizes = pytest.mark.parametrize("messages", [30, 300], ids=["fewer messages", "more messages"])


@pytest.fixture
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "METADATA_S", 0.3)


class Scene:
    """One cluster, a topic of which a group has read everything, and hands on it."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.cluster, self.topic, self.group = cluster, topic, f"g-{uuid.uuid4().hex[:8]}"
        self.admin = AdminClient({"bootstrap.servers": cluster.bootstrap, **QUIET})
        self.events: list[marshal_py.Advisory] = []

    def fill(self, topic: str, partitions: int, messages: int, word: str) -> set[tuple[int, bytes]]:
        """Messages into each partition; what was written."""
        producer = Producer({"bootstrap.servers": self.cluster.bootstrap, "acks": "all", **QUIET})
        written = {
            (partition, f"{word} {number}".encode()) for partition in range(partitions) for number in range(messages)
        }
        for partition, value in sorted(written):
            producer.produce(topic, value, partition=partition)
        assert producer.flush(DEADLINE_S) == 0
        return written

    def delete(self) -> None:
        self.admin.delete_topics([self.topic])[self.topic].result(DEADLINE_S)
        look = self.admin.list_topics
        wait_until(lambda: self.topic not in look(timeout=DEADLINE_S).topics, DEADLINE_S, "it is gone")

    def create(self, partitions: int) -> None:
        new = NewTopic(self.topic, num_partitions=partitions)
        self.admin.create_topics([new])[self.topic].result(DEADLINE_S)

        def usable() -> bool:
            found = self.admin.list_topics(timeout=DEADLINE_S).topics.get(self.topic)
            return found is not None and [p.leader > 0 for p in found.partitions.values()] == [True] * partitions

        wait_until(usable, DEADLINE_S, "it has leaders")

    def make_anew(self, partitions: int, messages: int) -> set[tuple[int, bytes]]:
        self.delete()
        self.create(partitions)
        return self.fill(self.topic, partitions, messages, "new")

    def connect(self) -> Marshal:
        return marshal_py.connect({"bootstrap.servers": self.cluster.bootstrap, **QUIET})

    def begin(self, consumer: Consumer) -> None:
        """Reads all of the old topic."""
        self.fill(self.topic, PARTITIONS, OLD_MESSAGES, "old")
        collect(consumer, PARTITIONS * OLD_MESSAGES)
        consumer.flush()

    def told(self, consumer: Consumer) -> list[str]:
        self.events += consumer.events()
        return [event.kind for event in self.events]

    def await_told(self, consumer: Consumer, kind: str, count: int = 1) -> None:
        wait_until(lambda: self.told(consumer).count(kind) == count, DEADLINE_S, f"{count} times {kind}")

    def seen(self, keeper: BackgroundConsumer, since: int = 0) -> set[tuple[int, bytes]]:
        return {(m.partition, m.value) for m in keeper.seen[since:] if m.topic == self.topic}

    def await_all(self, keeper: BackgroundConsumer, wanted: set[tuple[int, bytes]], since: int = 0) -> None:
        wait_until(lambda: wanted <= self.seen(keeper, since), DEADLINE_S, "every message of the new topic")
        assert keeper.error is None

    # --- commands

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MARSHAL_BOOTSTRAP_SERVERS": self.cluster.bootstrap}
        return subprocess.run(
            [*MODULE, *arguments],
            env=environment,
            cwd=ROOT,
            text=True,
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def adopt(self, partitions: int) -> None:
        """What the error names."""
        done = self.json("set-position", self.group, self.topic, "--to", "earliest", "--yes")
        assert done["outcome"] == "moved"
        assert [(one["topic"], one["partitions"]) for one in done["recreated"]] == [(self.topic, partitions)]
        assert [row["target"] for row in done["partitions"]] == [0] * partitions


@pytest.fixture
def context(kafka: Cluster, topic: TopicFactory) -> Scene:
    return Scene(kafka, topic(PARTITIONS))


@shapes
@sizes
@pytest.mark.usefixtures("_look_often")
def test_made_anew_while_the_consumers_stand_still(context: Scene, partitions: int, messages: int) -> None:
    """D10: at a join, before anything of it is claimed; the case that lost 1,000 messages of 4,000 without a word."""
    with context.connect() as marshal, joined(marshal, context.group, [context.topic]) as consumer:
        context.begin(consumer)
    wanted = context.make_anew(partitions, messages)
    with (
        context.connect() as marshal,
        joined(marshal, context.group, [context.topic]) as consumer,
        BackgroundConsumer(consumer) as keeper,
    ):
        context.await_told(consumer, "parked", PARTITIONS)
        wait_until(lambda: REASON in consumer.cached_info().waiting_for, DEADLINE_S, "it says what it waits for")
        assert keeper.seen == []
        context.adopt(partitions)
        context.await_all(keeper, wanted)
        assert len(keeper.seen) == len(wanted), "each once"


@shapes
@sizes
@pytest.mark.usefixtures("_look_often")
def test_made_anew_while_they_run(context: Scene, topic: TopicFactory, partitions: int, messages: int) -> None:
    """D10: at the next look at the metadata, or when the broker refuses the position, what comes first."""
    other = topic(1)
    with context.connect() as marshal, joined(marshal, context.group, [context.topic, other]) as consumer:
        context.begin(consumer)
        with BackgroundConsumer(consumer) as keeper:
            wanted = context.make_anew(partitions, messages)
            context.await_told(consumer, "parked", PARTITIONS)
            noticed = len(keeper.seen)
            more = context.fill(context.topic, partitions, 10, "later")
            context.fill(other, 1, 20, "other")
            wait_until(lambda: sum(m.topic == other for m in list(keeper.seen)) == 20, DEADLINE_S, "the rest goes on")
            assert {m.topic for m in keeper.seen[noticed:]} == {other}
            assert keeper.error is None
            context.adopt(partitions)
            context.await_all(keeper, wanted | more, noticed)


@shapes
@sizes
@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
@pytest.mark.usefixtures("_look_often")
def test_a_group_that_wants_it_goes_on_by_itself(context: Scene, partitions: int, messages: int, running: bool) -> None:
    """D10: by the config of the group in one half of the cases, by the consumer's option in the other."""
    by_config = messages == 30
    options = {} if by_config else {"on_topic_recreated": "earliest"}
    with context.connect() as marshal:
        consumer = joined(marshal, context.group, [context.topic], **options)
        context.begin(consumer)
        if by_config:
            done = context.json("groups", "update", context.group, "--on-topic-recreated", "earliest", "--yes")
            assert done["changed"] == {"on_topic_recreated": "earliest"}
        if running:
            with BackgroundConsumer(consumer) as keeper:
                wanted = context.make_anew(partitions, messages)
                context.await_all(keeper, wanted)
            return
        consumer.stop()
        wanted = context.make_anew(partitions, messages)
        with joined(marshal, context.group, [context.topic], **options) as again, BackgroundConsumer(again) as keeper:
            context.await_all(keeper, wanted)
            assert len(keeper.seen) == len(wanted), "each once"


@pytest.mark.usefixtures("_look_often")
def test_two_consumers_and_at_most_once(context: Scene) -> None:
    """No offset of the new topic is delivered twice in its generation (S2)."""
    options = {"delivery": "at_most_once", "on_topic_recreated": "earliest"}
    with context.connect() as one, context.connect() as two:
        context.fill(context.topic, PARTITIONS, OLD_MESSAGES, "old")
        with (
            joined(one, context.group, [context.topic], **options) as first,
            joined(two, context.group, [context.topic], **options) as second,
            BackgroundConsumer(first, ack=False) as left,
            BackgroundConsumer(second, ack=False) as right,
        ):

            def seen(word: bytes) -> list[tuple[int, int]]:
                found = [*left.seen, *right.seen]
                return [(m.partition, m.offset) for m in found if m.value.startswith(word)]

            wait_until(lambda: len(seen(b"old")) == PARTITIONS * OLD_MESSAGES, DEADLINE_S, "the old topic is read")
            before = len(left.seen) + len(right.seen)
            wanted = context.make_anew(PARTITIONS, 300)
            group = marshal_py.group(one, context.group)
            wait_until(lambda: context.seen(left) | context.seen(right) >= wanted, DEADLINE_S, "the new topic is read")
            assert before == PARTITIONS * OLD_MESSAGES
            assert (left.error, right.error) == (None, None)
            assert {row["parked"] for row in group.info()["positions"]} == {None}


@pytest.mark.usefixtures("_look_often")
def test_deleted_while_it_is_consumed(context: Scene, topic: TopicFactory) -> None:
    other = topic(1)
    with context.connect() as marshal, joined(marshal, context.group, [context.topic, other]) as consumer:
        context.begin(consumer)
        with BackgroundConsumer(consumer) as keeper:
            context.delete()
            context.await_told(consumer, "topic_missing")
            info = consumer.cached_info()
            assert context.topic in info.waiting_for
            assert info.lag == -1
            assert {tp.topic: claim.lag for tp, claim in info.claims.items()}[context.topic] == -1
            lag = context.json("lag", context.group)
            assert {row["topic"]: row["lag"] for row in lag["partitions"]}[context.topic] is None
            context.fill(other, 1, 20, "other")
            wait_until(lambda: sum(m.topic == other for m in list(keeper.seen)) == 20, DEADLINE_S, "the rest goes on")
            context.create(PARTITIONS)
            context.await_told(consumer, "topic_found")
            context.await_told(consumer, "parked", PARTITIONS)
            wanted = context.fill(context.topic, PARTITIONS, 30, "new")
            context.adopt(PARTITIONS)
            context.await_all(keeper, wanted)
        assert context.told(consumer).count("topic_missing") == 1


# --- as an operator sees it: processes, the usual ten seconds between two looks, every command


class Workers:
    """`marshal consume` processes; keeps what they print."""

    def __init__(self, context: Scene, count: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "MARSHAL_BOOTSTRAP_SERVERS": context.cluster.bootstrap,
            "PYTHONUNBUFFERED": "1",
        }
        self.seen: list[tuple[int, bytes]] = []
        self._processes = [
            subprocess.Popen(
                [
                    *MODULE,
                    "consume",
                    context.topic,
                    "--group",
                    context.group,
                    "--start",
                    "earliest",
                    "--heartbeat-interval",
                    "1",
                    "--json",
                ],
                env=environment,
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(count)
        ]
        self._threads = [threading.Thread(target=self._read, args=(process,)) for process in self._processes]
        for thread in self._threads:
            thread.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            self.seen.append((message["partition"], message["value"].encode()))

    def stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(DEADLINE_S)
        for thread, process in zip(self._threads, self._processes, strict=True):
            thread.join(DEADLINE_S)
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def at_work(context: Scene, count: int) -> Iterator[Workers]:
    workers = Workers(context, count)
    try:
        yield workers
    finally:
        workers.stop()


def test_what_an_operator_sees_and_does(context: Scene) -> None:
    """`state`, `lag`, `doctor`, `groups` and `explain` name it; one command goes on."""
    old = context.fill(context.topic, PARTITIONS, OLD_MESSAGES, "old")
    command = f"marshal set-position {context.group} {context.topic} --to earliest"
    with at_work(context, 2) as workers:
        wait_until(lambda: old <= set(workers.seen), DEADLINE_S, "the old topic is read")
        wanted = context.make_anew(3, 400)

        def parked() -> bool:
            rows = context.json("state", context.group)["groups"][0]["partitions"]
            return [row["parked"] for row in rows] == [REASON] * PARTITIONS

        wait_until(parked, DEADLINE_S, "both are parked")
        (state,) = context.json("state", context.group)["groups"]
        assert all((row["owner"], row["lag"], row["end"]) == (None, None, 400) for row in state["partitions"])
        (notice,) = state["notices"]
        assert command in notice
        assert "its id was" in notice
        assert REASON in context.run("state", context.group).stdout
        lag = context.json("lag", context.group)
        assert (lag["lag"], lag["unknown"], lag["parked"]) == (None, PARTITIONS, PARTITIONS)
        words = context.run("lag", context.group).stdout
        assert f"lag - and what {PARTITIONS} partitions have, which is not known, 2 partitions parked" in words
        doctor = {
            (check["name"], check["level"]): check
            for check in context.json("doctor")["checks"]
            if context.group in check["found"]
        }
        assert command in doctor["parked partitions", "warn"]["advice"]
        assert "smaller topic" not in {name for name, _ in doctor}
        (listed,) = [one for one in context.json("groups", "ls") if one["group"] == context.group]
        assert listed["parked"] == PARTITIONS
        assert f"(parked: {REASON})" in context.run("groups", "info", context.group).stdout
        story = context.run("explain", context.group, f"{context.topic}:0").stdout
        assert f"parked: {REASON}" in story
        assert f"it is parked: {REASON}" in story
        advisories = context.run("advisories", context.group, "--kind", "parked").stdout
        assert advisories.count(REASON) >= PARTITIONS
        refused = context.run("groups", "shrink", context.group, context.topic, "--partitions", "1", "--yes")
        assert refused.returncode == 1
        assert command in refused.stderr

        noticed = len(workers.seen)
        dry = context.json("set-position", context.group, context.topic, "--to", "earliest", "--dry-run")
        assert dry["recreated"][0]["forgotten"] == PARTITIONS
        assert [(row["partition"], row["position"], row["target"]) for row in dry["partitions"]] == [
            (number, None, 0) for number in range(3)
        ]
        assert (
            "was made anew"
            in context.run("set-position", context.group, context.topic, "--to", "earliest", "--dry-run").stdout
        )
        assert len(workers.seen) == noticed, "nothing of it is delivered"
        context.adopt(3)
        wait_until(lambda: wanted <= set(workers.seen[noticed:]), DEADLINE_S, "every message of the new topic")
        after = context.json("state", context.group)["groups"][0]
        assert after["notices"] == []
        assert {row["parked"] for row in after["partitions"]} == {None}
        assert "made anew" in context.run("advisories", context.group, "--kind", "topology").stdout


def test_a_move_to_the_new_end_skips_what_is_there(context: Scene) -> None:
    """Targets are those of the new topic; a shift and Kafka's committed offsets are of the old one, and refused."""
    with context.connect() as marshal, joined(marshal, context.group, [context.topic]) as consumer:
        context.begin(consumer)
    context.make_anew(PARTITIONS, 30)
    for target in (("--shift-by", "0"), ("--to", "committed")):
        refused = context.run("set-position", context.group, context.topic, *target, "--dry-run")
        assert refused.returncode == 1
        assert f"marshal set-position {context.group} {context.topic} --to earliest" in refused.stderr
    beyond = context.run("set-position", context.group, context.topic, "--to", str(OLD_MESSAGES), "--yes")
    assert beyond.returncode == 1
    assert "valid are 0 to 30" in beyond.stderr
    one = context.json("set-position", context.group, f"{context.topic}:0", "--to", "latest", "--yes")
    assert one["outcome"] == "moved"
    with context.connect() as marshal, joined(marshal, context.group, [context.topic]) as consumer:
        found = collect(consumer, 30)
        assert {message.partition for message in found} == {1}, "the one that was not named starts at its beginning"
        positions = {tp: claim.position for tp, claim in consumer.claims().items()}
    assert positions[TopicPartition(context.topic, 0)] == 30
    assert NONE not in positions.values()
