"""Data topics that are deleted and recreated on Apache Kafka, while the consumers are stopped or run (D10, F9.10).

tests/client/test_recreated.py has more cases in memory. Here are the topic ids of a real broker, librdkafka with its
cached metadata of the old topic, and an operator's commands. Old messages and new ones differ in their values.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import marshal_py
from marshal_py import Consumer, Marshal, TopicPartition
from marshal_py.client.driver import loop
from marshal_py.protocol.wire.identity import NONE
from tests.support.client_fixtures import BackgroundConsumer, collect, joined
from tests.support.commands import Commands, ConsumeProcesses
from tests.support.kafka import Cluster, TopicFactory, wait_until

DEADLINE_S = 60.0  # nothing takes more than the ten seconds between two refreshes of the metadata
PARTITIONS = 2
OLD_MESSAGES = 100  # per partition
REASON = "DataTopicRecreated"
QUIET = {"log_level": 0}

# Partitions of the new topic and messages in each: fewer, as many, more. With more messages the old position exists in
# the new topic, with fewer it does not. `make proof` has every pair.
CASES = {(2, 300): "more messages"}
OTHER_CASES = {
    (2, 30): "fewer messages",
    (1, 30): "fewer of both",
    (1, 300): "fewer partitions",
    (3, 30): "more partitions",
    (3, 300): "more of both",
}
shapes = pytest.mark.parametrize(
    ("partitions", "messages"),
    [
        *(pytest.param(*case, id=name) for case, name in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.proof) for case, name in OTHER_CASES.items()),
    ],
)


@pytest.fixture
def _frequent_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "METADATA_S", 0.3)


class TopicCase:
    """A group and its data topic, which tests fill, delete and recreate."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.cluster, self.topic, self.group = cluster, topic, f"g-{uuid.uuid4().hex[:8]}"
        self.admin = AdminClient({"bootstrap.servers": cluster.bootstrap, **QUIET})
        self.commands = Commands(cluster.bootstrap)
        self.events: list[marshal_py.Advisory] = []

    def fill(self, topic: str, partitions: int, messages: int, word: str) -> set[tuple[int, bytes]]:
        """Writes messages into each partition. Returns them as (partition, value)."""
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
        listed = self.admin.list_topics
        wait_until(lambda: self.topic not in listed(timeout=DEADLINE_S).topics, DEADLINE_S, "it is deleted")

    def create(self, partitions: int) -> None:
        new = NewTopic(self.topic, num_partitions=partitions)
        self.admin.create_topics([new])[self.topic].result(DEADLINE_S)

        def usable() -> bool:
            found = self.admin.list_topics(timeout=DEADLINE_S).topics.get(self.topic)
            return found is not None and [p.leader > 0 for p in found.partitions.values()] == [True] * partitions

        wait_until(usable, DEADLINE_S, "it has leaders")

    def recreate(self, partitions: int, messages: int) -> set[tuple[int, bytes]]:
        self.delete()
        self.create(partitions)
        return self.fill(self.topic, partitions, messages, "new")

    def connect(self) -> Marshal:
        return marshal_py.connect({"bootstrap.servers": self.cluster.bootstrap, **QUIET})

    def begin(self, consumer: Consumer) -> None:
        """Fills the old topic and reads all of it."""
        self.fill(self.topic, PARTITIONS, OLD_MESSAGES, "old")
        collect(consumer, PARTITIONS * OLD_MESSAGES)
        consumer.flush()

    def event_kinds(self, consumer: Consumer) -> list[str]:
        self.events += consumer.events()
        return [event.kind for event in self.events]

    def await_event(self, consumer: Consumer, kind: str, count: int = 1) -> None:
        wait_until(lambda: self.event_kinds(consumer).count(kind) == count, DEADLINE_S, f"{count} times {kind}")

    def seen(self, reader: BackgroundConsumer, since: int = 0) -> set[tuple[int, bytes]]:
        return {(m.partition, m.value) for m in reader.seen[since:] if m.topic == self.topic}

    def await_all(self, reader: BackgroundConsumer, wanted: set[tuple[int, bytes]], since: int = 0) -> None:
        wait_until(lambda: wanted <= self.seen(reader, since), DEADLINE_S, "every message of the new topic")
        assert reader.error is None

    def adopt(self, partitions: int) -> None:
        """Runs the command that the error names."""
        done = self.commands.json("set-position", self.group, self.topic, "--to", "earliest", "--yes")
        assert done["outcome"] == "moved"
        assert [(one["topic"], one["partitions"]) for one in done["recreated"]] == [(self.topic, partitions)]
        assert [row["target"] for row in done["partitions"]] == [0] * partitions


@pytest.fixture
def case(kafka: Cluster, topic: TopicFactory) -> TopicCase:
    return TopicCase(kafka, topic(PARTITIONS))


@shapes
@pytest.mark.usefixtures("_frequent_metadata")
def test_recreated_while_the_consumers_are_stopped(case: TopicCase, partitions: int, messages: int) -> None:
    """D10: noticed at a join, before any partition is claimed; it once lost 1,000 of 4,000 messages silently."""
    with case.connect() as marshal, joined(marshal, case.group, [case.topic]) as consumer:
        case.begin(consumer)
    wanted = case.recreate(partitions, messages)
    with (
        case.connect() as marshal,
        joined(marshal, case.group, [case.topic]) as consumer,
        BackgroundConsumer(consumer) as reader,
    ):
        case.await_event(consumer, "parked", PARTITIONS)
        wait_until(lambda: REASON in consumer.cached_info().waiting_for, DEADLINE_S, "it reports what it waits for")
        assert reader.seen == []
        case.adopt(partitions)
        case.await_all(reader, wanted)
        assert len(reader.seen) == len(wanted), "each once"


@shapes
@pytest.mark.usefixtures("_frequent_metadata")
def test_recreated_while_they_run(case: TopicCase, topic: TopicFactory, partitions: int, messages: int) -> None:
    """D10: noticed at the next refresh of the metadata, or when the broker refuses the position, whichever is first."""
    other = topic(1)
    with case.connect() as marshal, joined(marshal, case.group, [case.topic, other]) as consumer:
        case.begin(consumer)
        with BackgroundConsumer(consumer) as reader:
            wanted = case.recreate(partitions, messages)
            case.await_event(consumer, "parked", PARTITIONS)
            noticed = len(reader.seen)
            more = case.fill(case.topic, partitions, 10, "later")
            case.fill(other, 1, 20, "other")
            wait_until(lambda: sum(m.topic == other for m in list(reader.seen)) == 20, DEADLINE_S, "the rest continues")
            assert {m.topic for m in reader.seen[noticed:]} == {other}
            assert reader.error is None
            case.adopt(partitions)
            case.await_all(reader, wanted | more, noticed)


@shapes
@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
@pytest.mark.usefixtures("_frequent_metadata")
def test_a_group_configured_so_continues_by_itself(
    case: TopicCase, partitions: int, messages: int, running: bool
) -> None:
    """D10: one half of the cases sets the group's config, the other half the consumer's option."""
    by_config = running
    options = {} if by_config else {"on_topic_recreated": "earliest"}
    with case.connect() as marshal:
        consumer = joined(marshal, case.group, [case.topic], **options)
        case.begin(consumer)
        if by_config:
            done = case.commands.json("groups", "update", case.group, "--on-topic-recreated", "earliest", "--yes")
            assert done["changed"] == {"on_topic_recreated": "earliest"}
        if running:
            with BackgroundConsumer(consumer) as reader:
                wanted = case.recreate(partitions, messages)
                case.await_all(reader, wanted)
            return
        consumer.stop()
        wanted = case.recreate(partitions, messages)
        with joined(marshal, case.group, [case.topic], **options) as again, BackgroundConsumer(again) as reader:
            case.await_all(reader, wanted)
            assert len(reader.seen) == len(wanted), "each once"


@pytest.mark.usefixtures("_frequent_metadata")
def test_two_consumers_and_at_most_once(case: TopicCase) -> None:
    """No offset of the new topic is delivered twice in one generation of the topic (S2)."""
    options = {"delivery": "at_most_once", "on_topic_recreated": "earliest"}
    with case.connect() as one, case.connect() as two:
        case.fill(case.topic, PARTITIONS, OLD_MESSAGES, "old")
        with (
            joined(one, case.group, [case.topic], **options) as first,
            joined(two, case.group, [case.topic], **options) as second,
            BackgroundConsumer(first, ack=False) as left,
            BackgroundConsumer(second, ack=False) as right,
        ):

            def seen(word: bytes) -> list[tuple[int, int]]:
                found = [*left.seen, *right.seen]
                return [(m.partition, m.offset) for m in found if m.value.startswith(word)]

            wait_until(lambda: len(seen(b"old")) == PARTITIONS * OLD_MESSAGES, DEADLINE_S, "the old topic is read")
            before = len(left.seen) + len(right.seen)
            wanted = case.recreate(PARTITIONS, 300)
            group = one.group(case.group)
            wait_until(lambda: case.seen(left) | case.seen(right) >= wanted, DEADLINE_S, "the new topic is read")
            assert before == PARTITIONS * OLD_MESSAGES
            assert (left.error, right.error) == (None, None)
            assert {row.parked for row in group.info().positions} == {None}


@pytest.mark.usefixtures("_frequent_metadata")
def test_deleted_while_it_is_consumed(case: TopicCase, topic: TopicFactory) -> None:
    other = topic(1)
    with case.connect() as marshal, joined(marshal, case.group, [case.topic, other]) as consumer:
        case.begin(consumer)
        with BackgroundConsumer(consumer) as reader:
            case.delete()
            case.await_event(consumer, "topic_missing")
            info = consumer.cached_info()
            assert case.topic in info.waiting_for
            assert info.lag == -1
            assert {tp.topic: claim.lag for tp, claim in info.claims.items()}[case.topic] == -1
            lag = case.commands.json("state", "--lag", case.group)
            assert {row["topic"]: row["lag"] for row in lag["partitions"]}[case.topic] is None
            case.fill(other, 1, 20, "other")
            wait_until(lambda: sum(m.topic == other for m in list(reader.seen)) == 20, DEADLINE_S, "the rest continues")
            case.create(PARTITIONS)
            case.await_event(consumer, "topic_found")
            case.await_event(consumer, "parked", PARTITIONS)
            wanted = case.fill(case.topic, PARTITIONS, 30, "new")
            case.adopt(PARTITIONS)
            case.await_all(reader, wanted)
        assert case.event_kinds(consumer).count("topic_missing") == 1


# --- an operator's commands: consumers as processes, with the usual ten seconds between two refreshes of the metadata


def test_what_an_operator_sees_and_does(case: TopicCase) -> None:
    """`state`, `lag`, `doctor`, `groups` and `explain` show the reason; one command lets the group continue."""
    old = case.fill(case.topic, PARTITIONS, OLD_MESSAGES, "old")
    command = f"marshal set-position {case.group} {case.topic} --to earliest"
    with contextlib.ExitStack() as stack:
        consumers = ConsumeProcesses(case.commands, case.group, case.topic, ("a", "b"))
        stack.callback(consumers.stop)

        def seen(since: int = 0) -> set[tuple[int, bytes]]:
            return {(message["partition"], message["value"].encode()) for message in consumers.messages[since:]}

        wait_until(lambda: old <= seen(), DEADLINE_S, "the old topic is read")
        wanted = case.recreate(3, 400)

        def parked() -> bool:
            rows = case.commands.json("state", case.group)["groups"][0]["partitions"]
            return [row["parked"] for row in rows] == [REASON] * PARTITIONS

        wait_until(parked, DEADLINE_S, "both are parked")
        (state,) = case.commands.json("state", case.group)["groups"]
        assert all((row["owner"], row["lag"], row["end"]) == (None, None, 400) for row in state["partitions"])
        (notice,) = state["notices"]
        assert command in notice
        assert "its id was" in notice
        assert REASON in case.commands.run("state", case.group).stdout
        lag = case.commands.json("state", "--lag", case.group)
        assert (lag["lag"], lag["unknown"], lag["parked"]) == (None, PARTITIONS, PARTITIONS)
        words = case.commands.run("state", "--lag", case.group).stdout
        assert f"lag unknown (without {PARTITIONS} partitions, whose lag is unknown), 2 partitions parked" in words
        doctor = {
            (check["name"], check["level"]): check
            for check in case.commands.json("doctor")["checks"]
            if case.group in check["found"]
        }
        assert command in doctor["parked partitions", "warn"]["advice"]
        assert "smaller topic" not in {name for name, _ in doctor}
        (listed,) = [one for one in case.commands.json("groups", "ls") if one["group"] == case.group]
        assert listed["parked"] == PARTITIONS
        assert f"(parked: {REASON})" in case.commands.run("state", case.group, "--settings").stdout
        story = case.commands.run("explain", case.group, f"{case.topic}:0").stdout
        assert f"parked: {REASON}" in story
        assert f"it is parked: {REASON}" in story
        advisories = case.commands.run("advisories", case.group, "--kind", "parked").stdout
        assert advisories.count(REASON) >= PARTITIONS
        refused = case.commands.run("groups", "update", case.group, "--shrink", f"{case.topic}=1", "--yes")
        assert refused.returncode == 1
        assert command in refused.stderr

        noticed = len(consumers.messages)
        dry = case.commands.json("set-position", case.group, case.topic, "--to", "earliest", "--dry-run")
        assert dry["recreated"][0]["forgotten"] == PARTITIONS
        assert [(row["partition"], row["position"], row["target"]) for row in dry["partitions"]] == [
            (number, None, 0) for number in range(3)
        ]
        assert (
            "was created again"
            in case.commands.run("set-position", case.group, case.topic, "--to", "earliest", "--dry-run").stdout
        )
        assert len(consumers.messages) == noticed, "no message of the new topic is delivered"
        case.adopt(3)
        wait_until(lambda: wanted <= seen(noticed), DEADLINE_S, "every message of the new topic")
        after = case.commands.json("state", case.group)["groups"][0]
        assert after["notices"] == []
        assert {row["parked"] for row in after["partitions"]} == {None}
        assert "recreated" in case.commands.run("advisories", case.group, "--kind", "topology").stdout


def test_an_index_of_the_old_topic_is_refused(case: TopicCase, tmp_path: Path) -> None:
    """From the shell, whatever the new topic has at the offsets that the index names."""
    question = ("get", case.topic, "k", "--index", str(tmp_path / "keys.idx"))

    def write(value: bytes) -> None:
        producer = Producer({"bootstrap.servers": case.cluster.bootstrap, **QUIET})
        producer.produce(case.topic, value, b"k", partition=0)
        assert producer.flush(DEADLINE_S) == 0

    write(b"old")
    assert case.commands.run(*question).stdout.splitlines()[-1] == "old"
    case.delete()
    case.create(PARTITIONS)
    write(b"new")
    refused = case.commands.run(*question)
    assert (refused.returncode, "created again" in " ".join(refused.stderr.split())) == (1, True), refused
    (tmp_path / "keys.idx").unlink()
    assert case.commands.run(*question).stdout.splitlines()[-1] == "new"


def test_a_move_to_the_new_end_skips_what_is_there(case: TopicCase) -> None:
    """Targets refer to the new topic; a shift and Kafka's committed offsets refer to the old one and are refused."""
    with case.connect() as marshal, joined(marshal, case.group, [case.topic]) as consumer:
        case.begin(consumer)
    case.recreate(PARTITIONS, 30)
    for target in (("--shift-by", "0"), ("--to", "committed")):
        refused = case.commands.run("set-position", case.group, case.topic, *target, "--dry-run")
        assert refused.returncode == 1
        assert f"marshal set-position {case.group} {case.topic} --to earliest" in refused.stderr
    beyond = case.commands.run("set-position", case.group, case.topic, "--to", str(OLD_MESSAGES), "--yes")
    assert beyond.returncode == 1
    assert "valid are 0 to 30" in beyond.stderr
    one = case.commands.json("set-position", case.group, f"{case.topic}:0", "--to", "latest", "--yes")
    assert one["outcome"] == "moved"
    with case.connect() as marshal, joined(marshal, case.group, [case.topic]) as consumer:
        found = collect(consumer, 30)
        assert {message.partition for message in found} == {1}, (
            "the partition that was not named starts at its beginning"
        )
        positions = {tp: claim.position for tp, claim in consumer.cached_info().claims.items()}
    assert positions[TopicPartition(case.topic, 0)] == 30
    assert NONE not in positions.values()
