"""A broker that comes back without its newest records, as after a power loss or an unclean leader election.

The library promises nothing about such records, but it notices the loss, names it and stops (PROTOCOL.md L8, D6), even
if the log has grown again before a consumer reads it. The tests use a node of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from marshal_py.errors import TopicRecreated
from marshal_py.transport.kafka import KafkaTransport
from tests.client.test_bad_logs import ends_with
from tests.kafka.test_snapshots import GROUP, CoordinationLog
from tests.support.brokers import JvmNodes
from tests.support.client_fixtures import collect, joined, places, until
from tests.support.kafka import Cluster

LOST_RECORDS = 8
READ_S = 30.0
GROWN_MESSAGES = 4
QUICKLY_BACK = {"broker.session.timeout.ms": "2000"}  # a killed node may register again when its session has expired


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JvmNodes]:
    with contextlib.closing(JvmNodes(1, QUICKLY_BACK, Path(tmp_path_factory.mktemp("broker")))) as found:
        found.start()
        yield found


@pytest.fixture
def log(nodes: JvmNodes) -> Iterator[CoordinationLog]:
    found = CoordinationLog(Cluster(nodes.addresses[1], 1, "a node that may lose records"))
    yield found
    found.admin.close()


@pytest.fixture
def data(log: CoordinationLog) -> str:
    name = f"{log.name}-data"
    log.admin.topic_admin().create(name, 1, None, {}, False)
    return name


@pytest.mark.parametrize(
    "grown", [pytest.param(0, id="shorter", marks=pytest.mark.proof), pytest.param(4 * LOST_RECORDS, id="grown again")]
)
def test_a_coordination_log_that_lost_its_tail_stops_a_consumer_that_had_read_it(
    nodes: JvmNodes, log: CoordinationLog, data: str, grown: int
) -> None:
    """L8: a consumer that starts afterwards continues with the records that are left."""
    log.fill(data, b"0", b"1", b"2")
    with log.connect("a") as marshal, joined(marshal, GROUP, [data]) as consumer:
        collect(consumer, 3)
        consumer.flush()
        for _ in range(2 * LOST_RECORDS):
            log.grow(1)
        end = log.bounds().end
        until(lambda: marshal._loop.worlds[0].next_offset >= end, "the consumer has read them")
        nodes.lose_tail(1, log.name, 0, end - LOST_RECORDS)
        for _ in range(grown):
            log.grow(1)
        error = ends_with(consumer, TopicRecreated)
        assert isinstance(error, TopicRecreated)
        assert error.log == 0
    log.fill(data, b"3")
    with log.connect("b") as marshal, joined(marshal, GROUP, [data]) as consumer:
        assert places(collect(consumer, 1))[-1:] == [(0, 3)]


def test_the_client_that_reads_instead_of_another_notices_what_is_lost(nodes: JvmNodes, log: CoordinationLog) -> None:
    """L8, although it has read nothing itself: it reads the last record again."""
    for _ in range(2 * LOST_RECORDS):
        log.grow(1)
    end = log.bounds().end
    reader = KafkaTransport(log.servers, READ_S).log(log.name, "reader")
    try:
        reader.follow(0, 0)
        until(lambda: any(record.offset == end - 1 for record in reader.poll(0.1)), "it has read all")
        nodes.lose_tail(1, log.name, 0, end - LOST_RECORDS)
        for _ in range(4 * LOST_RECORDS):
            log.grow(1)
        reader._next_consumer = Future()
        reader._next_consumer.set_result(reader._connected(reader._reader))
        with pytest.raises(TopicRecreated, match="a log that was cut below it"):
            until(lambda: any(record.offset >= end for record in reader.poll(0.1)), "it reads on")
    finally:
        reader.close(0.0)


def test_a_partition_that_lost_what_was_read_stops_until_its_position_is_set(
    nodes: JvmNodes, log: CoordinationLog, data: str
) -> None:
    """D6: no message is read again or skipped silently, although the partition is longer than before."""
    for number in range(6):
        log.fill(data, str(number).encode())
    with log.connect("a") as marshal, joined(marshal, GROUP, [data]) as consumer:
        collect(consumer, 6)
        consumer.flush()
        nodes.lose_tail(1, data, 0, 4)
        for number in range(GROWN_MESSAGES):
            log.fill(data, f"new {number}".encode())

        def parked() -> list[str]:
            assert not consumer.fetch(10, min_messages=10, expires_s=0.1)
            return [event.text for event in consumer.events() if event.kind == "parked" and event.topic == data]

        (text,) = until(parked, "the loss is reported")
        assert text.startswith("PartitionTruncated: ")
        assert "truncation detected at offset 6" in text
        assert not consumer.cached_info().closed
        log.fill(data, b"later")
        assert not consumer.fetch(10, min_messages=10, expires_s=0.5)
        done = log.commands.run("set-position", GROUP, f"{data}:0", "--to", "4", "--yes")
        assert done.returncode == 0, done.stderr
        seen = [message.value for message in collect(consumer, GROWN_MESSAGES + 1)]
        assert seen == [f"new {number}".encode() for number in range(GROWN_MESSAGES)] + [b"later"]
