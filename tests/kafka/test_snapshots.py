"""Snapshots and truncation on Apache Kafka: a running group that keeps its log short, starts behind it, the way out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import marshal_py
from marshal_py.client import log_maintenance
from marshal_py.errors import HistoryRestarted, HistoryTruncated
from marshal_py.protocol import codec, snapshotter
from marshal_py.protocol.identity import TopicPartition
from marshal_py.protocol.records import Move, Note, Record, ReleaseGroup, SetPosition, Topology
from marshal_py.protocol.snapshot import CHUNK_BYTES
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.kafka_admin import KafkaAdmin
from marshal_py.transport.ports import Bounds
from tests.client.test_bad_logs import ends_with
from tests.support.client_fixtures import collect, joined, places, until
from tests.support.kafka import Cluster, TopicFactory

ROOT = Path(__file__).resolve().parents[2]
GROUP = "billing"
DEADLINE_S = 90.0


class Ledger:
    """A coordination topic of one log, and hands to write into it, to cut it, and to run `marshal` over it."""

    def __init__(self, cluster: Cluster) -> None:
        self.servers = cluster.bootstrap
        self.name = f"marshal-{uuid.uuid4().hex[:8]}"
        self.log = TopicPartition(self.name, 0)
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
        return self.admin.bounds([self.log])[self.log]

    def grow(self, records: int) -> int:
        """Notes that mean nothing; where the log ends then."""
        value = codec.encode(Note(-1, "filler"), GROUP, self.incarnation)
        for _ in range(records):
            self._producer.produce(self.name, value, GROUP.encode(), 0)
        assert self._producer.flush(DEADLINE_S) == 0
        return self.bounds().end

    def write(self, *records: Record) -> None:
        """Records of the group, as an admin would write them."""
        for record in records:
            self._producer.produce(self.name, codec.encode(record, GROUP, self.incarnation), GROUP.encode(), 0)
        assert self._producer.flush(DEADLINE_S) == 0

    def fill(self, topic: str, *values: bytes) -> None:
        for value in values:
            self._producer.produce(topic, value, None, 0)
        assert self._producer.flush(DEADLINE_S) == 0

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MARSHAL_BOOTSTRAP_SERVERS": self.servers}
        return subprocess.Popen(
            [sys.executable, "-m", "marshal_py.cli", *arguments, "--coordination-topic", self.name],
            env=environment,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def marshal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        running = self.start(*arguments)
        stdout, stderr = running.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(arguments, running.returncode, stdout, stderr)

    def json(self, *arguments: str) -> Any:
        done = self.marshal(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def ledger(kafka: Cluster) -> Iterator[Ledger]:
    found = Ledger(kafka)
    yield found
    found.admin.close()


def test_a_running_group_keeps_its_log_short(
    ledger: Ledger, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N8, N9, N12: records are deleted under it, it goes on, and who comes later begins at a snapshot."""
    monkeypatch.setattr(snapshotter, "STAGGER_RECORDS", 64)
    monkeypatch.setattr(snapshotter, "RETRY_RECORDS", 256)
    monkeypatch.setattr(log_maintenance, "TRUNCATE_EVERY_MS", 200)
    monkeypatch.setattr(log_maintenance, "TRUNCATE_RECORDS_MIN", 16)
    monkeypatch.setattr(log_maintenance, "CHECK_AFTER_MS", 0)
    data = topic(2)
    options = {"snapshot_every_records": 256, "history_kept_s": 0.0}
    with (
        ledger.connect("a", **options) as one,
        joined(one, GROUP, [data]) as first,
        ledger.connect("b", **options) as two,
        joined(two, GROUP, [data]) as second,
    ):
        until(lambda: len(first.claims()) == len(second.claims()) == 1, "each has one")
        until(lambda: ledger.grow(64) and ledger.bounds().first > 0, "records were deleted")
        cut = ledger.bounds().first
        until(lambda: ledger.grow(64) and ledger.bounds().first > cut, "and again")
        ledger.fill(data, b"0", b"1")
        holder = first if 0 in {tp.partition for tp in first.claims()} else second
        assert places(collect(holder, 2)) == [(0, 0), (0, 1)]
        holder.flush()
        with ledger.connect("c", **options) as three, joined(three, GROUP, [data]) as third:
            world = three._loop.worlds[0]
            assert world.began_at >= ledger.bounds().first > 0
            until(lambda: len(third.claims()) + len(first.claims()) + len(second.claims()) == 2, "all is shared")
            assert not third.closed
        done = ledger.marshal("state", GROUP)
        assert done.returncode == 0, done.stderr
        assert data in done.stdout
        assert not first.closed
        assert not second.closed
    ledger.fill(data, b"2")
    with ledger.connect("d", **options) as four, joined(four, GROUP, [data]) as fourth:
        assert places(collect(fourth, 1)) == [(0, 2)]


def test_by_hand_under_a_running_consumer(ledger: Ledger, topic: TopicFactory) -> None:
    """`marshal snapshot --truncate`: confirmed by the consumer, deleted behind two; the consumer does not notice."""
    data = topic(1)
    with ledger.connect("a") as marshal, joined(marshal, GROUP, [data]) as consumer:
        until(lambda: len(consumer.claims()) == 1, "it is ours")
        ledger.grow(100)
        (first,) = ledger.json("snapshot", "--log", "0")
        assert (first["outcome"], first["sessions"], first["deleted_before"]) == ("confirmed", ["a"], None)
        ledger.grow(100)
        at = first["snapshot"]

        def shown() -> bool:  # its heartbeats say that it has read so far
            kept = marshal._loop.maintenance.snapshotters[0]
            return kept.reported.get(consumer._driver.member.session, 0) >= at

        until(shown, "its heartbeat has shown a newer checkpoint")
        (dry,) = ledger.json("snapshot", "--truncate", "--keep", "0s", "--dry-run")
        assert dry["deleted_before"] is None, "there is one confirmed snapshot"
        (second,) = ledger.json("snapshot", "--truncate", "--keep", "0s", "--yes")
        assert (second["outcome"], second["older"], second["deleted_before"]) == ("confirmed", at, at)
        assert ledger.bounds().first == at
        ledger.fill(data, b"0")
        assert places(collect(consumer, 1)) == [(0, 0)]
    with ledger.connect("b") as marshal, joined(marshal, GROUP, [data]) as consumer:
        until(lambda: len(consumer.claims()) == 1, "a later one begins at the snapshot")
        assert marshal._loop.worlds[0].began_at == second["snapshot"]
    looked = ledger.json("verify")
    assert looked["ok"], looked
    assert looked["snapshot_digests"] >= 2


def test_truncated_history_and_the_way_out(ledger: Ledger, topic: TopicFactory) -> None:
    """N10, N13: no claim, no record; bootstrap; those of the old history stop; positions come from Kafka's offsets."""
    data = topic(1)
    ledger.fill(data, b"0", b"1", b"2")
    with ledger.connect("a") as marshal, joined(marshal, GROUP, [data]) as consumer:
        assert len(collect(consumer, 3)) == 3
        consumer.flush()
    with ledger.connect("old") as marshal, joined(marshal, GROUP, [data]) as old:
        until(lambda: len(old.claims()) == 1, "it is ours")
        assert ledger.admin.delete_records(ledger.log, ledger.grow(20) - 10) == ""
        end = ledger.bounds().end
        with pytest.raises(HistoryTruncated, match="bootstrap"):
            ledger.connect("b")
        assert ledger.bounds().end - end < 30, "heartbeats of the old one alone"
        looked = ledger.marshal("state")
        assert looked.returncode == 1
        assert "marshal bootstrap" in looked.stderr
        done = ledger.json("bootstrap", "--yes")
        assert (done["outcome"], [row["log"] for row in done["begun"]]) == ("begun_anew", [0])
        assert isinstance(ends_with(old, HistoryRestarted), HistoryRestarted)
    ledger.fill(data, b"3")
    with ledger.connect("b") as marshal, joined(marshal, GROUP, [data], start="committed") as consumer:
        assert marshal.root.incarnation != ledger.incarnation, "the one copy of the root was lost with the log"
        assert places(collect(consumer, 1)) == [(0, 3)]


def test_a_state_of_many_chunks(ledger: Ledger) -> None:
    """N1: larger than one record may be: written in chunks, read back, and begun at after the rest was deleted."""
    partitions = 20_000
    moves = tuple(Move("a-wide-topic", number, -1, 10**9 + number) for number in range(partitions))
    ledger.write(Topology("a-wide-topic", partitions, -1), ReleaseGroup(-1, -1, 60_000), SetPosition(2, moves, True))
    ledger.grow(20)
    (first,) = ledger.json("snapshot")
    assert first["outcome"] == "self_audit"
    assert first["state_bytes"] > CHUNK_BYTES
    ledger.grow(20)
    (second,) = ledger.json("snapshot", "--truncate", "--keep", "0s", "--yes")
    assert second["deleted_before"] == first["snapshot"] == ledger.bounds().first
    with ledger.connect() as marshal:
        world = marshal._loop.worlds[0]
        assert world.began_at == second["snapshot"]
        assert world.groups[GROUP].partitions[TopicPartition("a-wide-topic", 19_999)].position == 10**9 + 19_999


def test_a_reader_that_falls_behind_its_log_begins_anew(ledger: Ledger, topic: TopicFactory) -> None:
    """N11: it was stopped while what it had not read was deleted. The brokers' own answer is how it learns of that."""
    data = topic(1)
    ledger.fill(data, b"0")
    slow = ledger.start(
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
    )
    try:
        assert slow.stdout is not None
        assert slow.stderr is not None
        assert json.loads(slow.stdout.readline())["offset"] == 0
        (before,) = ledger.json("members", "ls", GROUP)
        os.kill(slow.pid, signal.SIGSTOP)
        ledger.grow(1)  # all that its pending fetch gets
        with ledger.connect("b") as marshal, joined(marshal, GROUP, [data], heartbeat_interval_s=1.0) as other:
            until(lambda: len(other.claims()) == 1, "the silent one is evicted")
            ledger.grow(200)
            (first,) = ledger.json("snapshot")
            ledger.grow(100)
            kept = marshal._loop.maintenance.snapshotters[0]
            until(lambda: kept.reported.get(other._driver.member.session, 0) >= first["snapshot"], "it has read on")
            (second,) = ledger.json("snapshot", "--truncate", "--keep", "0s", "--yes")
            assert second["deleted_before"] == first["snapshot"] == ledger.bounds().first
            os.kill(slow.pid, signal.SIGCONT)
            until(
                lambda: {"slow", "b"} == {each["client_id"] for each in ledger.json("members", "ls", GROUP)},
                "it is back",
            )
            sessions = {each["client_id"]: each["session"] for each in ledger.json("members", "ls", GROUP)}
            assert sessions["slow"] > first["snapshot"] > before["session"]
        ledger.fill(data, b"1")
        assert json.loads(slow.stdout.readline())["offset"] == 1, "it goes on where the group stands"
        slow.terminate()
        told = slow.communicate(timeout=DEADLINE_S)[1]
        assert slow.returncode == 0, told
        assert f"begins at offset {first['snapshot']}" in told
        assert "history truncated" in told, "its claims were lost, and its user was told why"
    finally:
        slow.kill()
        slow.communicate(timeout=DEADLINE_S)
