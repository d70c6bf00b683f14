"""Snapshots and truncation on Apache Kafka: a group keeps its log short; readers start at snapshots; `bootstrap`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer

import marshal_py
from marshal_py.client.driver import loop
from marshal_py.errors import ClusterUnreachable, HistoryRestarted, HistoryTruncated
from marshal_py.protocol import duties
from marshal_py.protocol.fold.snapshot import CHUNK_BYTES
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import Move, Note, Record, ReleaseGroup, SetPosition, Topology
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.kafka_admin import KafkaAdmin
from marshal_py.transport.ports import Bounds
from tests.client.test_bad_logs import ends_with
from tests.support.client_fixtures import collect, joined, places, until
from tests.support.commands import DEADLINE_S, Commands
from tests.support.kafka import Cluster, TopicFactory

GROUP = "billing"


class CoordinationLog:
    """A coordination topic with one log, which tests write to, truncate, and run `marshal` on."""

    def __init__(self, cluster: Cluster) -> None:
        self.servers = cluster.bootstrap
        self.name = f"marshal-{uuid.uuid4().hex[:8]}"
        self.tp = TopicPartition(self.name, 0)
        self.commands = Commands(self.servers, self.name)
        self.admin: KafkaAdmin = KafkaTransport(self.servers, DEADLINE_S).admin()
        self._producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 0})
        with self.connect() as marshal:
            self.incarnation = marshal.root.incarnation

    def connect(self, client_id: str | None = None, **options: Any) -> marshal_py.Marshal:
        return marshal_py.connect(
            {"bootstrap.servers": self.servers, "log_level": 0},
            client_id=client_id,
            coordination_topic=self.name,
            coordination_partitions=1,
            **options,
        )

    def bounds(self) -> Bounds:
        """Also from a broker that has just been started again, whose partitions have no leaders at first."""

        def ask() -> Bounds | None:
            with contextlib.suppress(ClusterUnreachable):
                return self.admin.bounds([self.tp])[self.tp]
            return None

        return until(ask, "the log has a leader")

    def grow(self, records: int) -> int:
        """Appends Notes without a meaning. Returns the new end of the log."""
        value = codec.encode(Note(-1, "filler"), GROUP, self.incarnation)
        for _ in range(records):
            self._producer.produce(self.name, value, GROUP.encode(), 0)
        assert self._producer.flush(DEADLINE_S) == 0
        return self.bounds().end

    def write(self, *records: Record) -> None:
        """Appends records of the group, as an admin would write them."""
        for record in records:
            self._producer.produce(self.name, codec.encode(record, GROUP, self.incarnation), GROUP.encode(), 0)
        assert self._producer.flush(DEADLINE_S) == 0

    def fill(self, topic: str, *values: bytes) -> None:
        for value in values:
            self._producer.produce(topic, value, None, 0)
        assert self._producer.flush(DEADLINE_S) == 0


@pytest.fixture
def log(kafka: Cluster) -> Iterator[CoordinationLog]:
    found = CoordinationLog(kafka)
    yield found
    found.admin.close()


def test_a_running_group_keeps_its_log_short(
    log: CoordinationLog, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N8, N9, N12: records are deleted while the group runs, it continues, and later readers begin at a snapshot."""
    monkeypatch.setattr(duties, "STAGGER_RECORDS", 64)
    monkeypatch.setattr(duties, "RETRY_RECORDS", 256)
    monkeypatch.setattr(loop, "TRUNCATE_EVERY_MS", 200)
    monkeypatch.setattr(loop, "TRUNCATE_RECORDS_MIN", 16)
    monkeypatch.setattr(loop, "CHECK_AFTER_MS", 0)
    data = topic(2)
    options = {"snapshot_every_records": 256, "history_kept_s": 0.0}
    with (
        log.connect("a", **options) as one,
        joined(one, GROUP, [data]) as first,
        log.connect("b", **options) as two,
        joined(two, GROUP, [data]) as second,
    ):
        until(
            lambda: len(first.cached_info().claims) == len(second.cached_info().claims) == 1,
            "each consumer has one partition",
        )
        until(lambda: log.grow(64) and log.bounds().first > 0, "records were deleted")
        cut = log.bounds().first
        until(lambda: log.grow(64) and log.bounds().first > cut, "and again")
        log.fill(data, b"0", b"1")
        owner = first if 0 in {tp.partition for tp in first.cached_info().claims} else second
        assert places(collect(owner, 2)) == [(0, 0), (0, 1)]
        owner.flush()
        begins = log.bounds().first  # the others go on deleting
        with log.connect("c", **options) as three, joined(three, GROUP, [data]) as third:
            world = three._loop.worlds[0]
            assert world.began_at >= begins > 0
            until(
                lambda: (
                    len(third.cached_info().claims) + len(first.cached_info().claims) + len(second.cached_info().claims)
                    == 2
                ),
                "all is shared",
            )
            assert not third.cached_info().closed
        done = log.commands.run("state", GROUP)
        assert done.returncode == 0, done.stderr
        assert data in done.stdout
        assert not first.cached_info().closed
        assert not second.cached_info().closed
    log.fill(data, b"2")
    with log.connect("d", **options) as four, joined(four, GROUP, [data]) as fourth:
        assert places(collect(fourth, 1)) == [(0, 2)]


def test_by_hand_under_a_running_consumer(log: CoordinationLog, topic: TopicFactory) -> None:
    """`marshal snapshot --truncate`: the consumer confirms; records before the older snapshot go; it works on."""
    data = topic(1)
    with log.connect("a") as marshal, joined(marshal, GROUP, [data]) as consumer:
        until(lambda: len(consumer.cached_info().claims) == 1, "the consumer owns it")
        log.grow(100)
        (first,) = log.commands.json("snapshot", "--log", "0")
        assert (first["outcome"], first["clients"], first["deleted_before"]) == ("confirmed", ["a"], None)
        log.grow(100)
        at = first["snapshot"]

        def shown() -> bool:  # whether its heartbeats show that it has read so far
            kept = marshal._loop.maintenance.snapshotters[0]
            return kept.reported.get(consumer._driver.member.session, 0) >= at

        until(shown, "its heartbeat shows a newer checkpoint")
        (dry,) = log.commands.json("snapshot", "--truncate", "--keep", "0s", "--dry-run")
        assert dry["deleted_before"] is None, "there is one confirmed snapshot"
        (second,) = log.commands.json("snapshot", "--truncate", "--keep", "0s", "--yes")
        assert (second["outcome"], second["older"], second["deleted_before"]) == ("confirmed", at, at)
        assert log.bounds().first == at
        log.fill(data, b"0")
        assert places(collect(consumer, 1)) == [(0, 0)]
    with log.connect("b") as marshal, joined(marshal, GROUP, [data]) as consumer:
        until(lambda: len(consumer.cached_info().claims) == 1, "a later one begins at the snapshot")
        assert marshal._loop.worlds[0].began_at == second["snapshot"]
    looked = log.commands.json("verify")
    assert looked["ok"], looked
    assert looked["snapshot_digests"] >= 2


def test_truncated_history_and_the_way_out(log: CoordinationLog, topic: TopicFactory) -> None:
    """N10, N13: no claim and no record before `bootstrap`; old clients stop; positions come from Kafka's offsets."""
    data = topic(1)
    log.fill(data, b"0", b"1", b"2")
    with log.connect("a") as marshal, joined(marshal, GROUP, [data]) as consumer:
        assert len(collect(consumer, 3)) == 3
        consumer.flush()
    with log.connect("old") as marshal, joined(marshal, GROUP, [data]) as old:
        until(lambda: len(old.cached_info().claims) == 1, "the consumer owns it")
        assert log.admin.delete_records(log.tp, log.grow(20) - 10) == ""
        end = log.bounds().end
        with pytest.raises(HistoryTruncated, match="log reset"):
            log.connect("b")
        assert log.bounds().end - end < 30, "heartbeats of the old one alone"
        looked = log.commands.run("state")
        assert looked.returncode == 1
        assert "marshal log reset" in looked.stderr
        done = log.commands.json("log", "reset", "--yes")
        assert (done["outcome"], [row["log"] for row in done["begun"]]) == ("begun_anew", [0])
        assert isinstance(ends_with(old, HistoryRestarted), HistoryRestarted)
    log.fill(data, b"3")
    with log.connect("b") as marshal, joined(marshal, GROUP, [data], start="committed") as consumer:
        assert marshal.root.incarnation != log.incarnation, "the one copy of the root was lost with the log"
        assert places(collect(consumer, 1)) == [(0, 3)]


def test_a_state_of_many_chunks(log: CoordinationLog) -> None:
    """N1: a state larger than a record is written in chunks; a reader begins at it after the rest was deleted."""
    partitions = 20_000
    moves = tuple(Move("a-wide-topic", number, -1, 10**9 + number) for number in range(partitions))
    log.write(Topology("a-wide-topic", partitions, -1), ReleaseGroup(-1, -1, 60_000), SetPosition(2, moves, True))
    log.grow(20)
    (first,) = log.commands.json("snapshot")
    assert first["outcome"] == "self_audit"
    assert first["state_bytes"] > CHUNK_BYTES
    log.grow(20)
    (second,) = log.commands.json("snapshot", "--truncate", "--keep", "0s", "--yes")
    assert second["deleted_before"] == first["snapshot"] == log.bounds().first
    with log.connect() as marshal:
        world = marshal._loop.worlds[0]
        assert world.began_at == second["snapshot"]
        assert world.groups[GROUP].partitions[TopicPartition("a-wide-topic", 19_999)].position == 10**9 + 19_999


def test_a_reader_whose_unread_records_were_deleted_starts_again(log: CoordinationLog, topic: TopicFactory) -> None:
    """N11: a stopped reader's unread records are deleted; it learns this from the broker's answer to its fetch."""
    data = topic(1)
    log.fill(data, b"0")
    slow = log.commands.start(
        "consume",
        data,
        "--group",
        GROUP,
        "--client-id",
        "slow",
        "--start",
        "earliest",
        "--heartbeat-interval",
        "1",
        "--json",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert slow.stdout is not None
        assert slow.stderr is not None
        assert json.loads(slow.stdout.readline())["offset"] == 0
        until(lambda: log.commands.json("state", GROUP, "--lag")["lag"] == 0, "the log has its ack")
        (before,) = log.commands.json("state", "--members", GROUP)
        os.kill(slow.pid, signal.SIGSTOP)
        log.grow(1)  # all that its pending fetch gets
        with log.connect("b") as marshal, joined(marshal, GROUP, [data], heartbeat_interval_s=1.0) as other:
            until(lambda: len(other.cached_info().claims) == 1, "the silent one is evicted")
            log.grow(200)
            (first,) = log.commands.json("snapshot")
            log.grow(100)
            kept = marshal._loop.maintenance.snapshotters[0]
            until(lambda: kept.reported.get(other._driver.member.session, 0) >= first["snapshot"], "it has read on")
            (second,) = log.commands.json("snapshot", "--truncate", "--keep", "0s", "--yes")
            assert second["deleted_before"] == first["snapshot"] == log.bounds().first
            os.kill(slow.pid, signal.SIGCONT)
            until(
                lambda: {"slow", "b"} == {each["client_id"] for each in log.commands.json("state", "--members", GROUP)},
                "it is back",
            )
            sessions = {each["client_id"]: each["session"] for each in log.commands.json("state", "--members", GROUP)}
            assert sessions["slow"] > first["snapshot"] > before["session"]
        log.fill(data, b"1")
        assert json.loads(slow.stdout.readline())["offset"] == 1, "it continues at the position of the group"
        slow.terminate()
        errors = slow.communicate(timeout=DEADLINE_S)[1]
        assert slow.returncode == 0, errors
        assert f"begins at offset {first['snapshot']}" in errors
        assert "history truncated" in errors, "its claims were lost, and the output says why"
    finally:
        slow.kill()
        slow.communicate(timeout=DEADLINE_S)
