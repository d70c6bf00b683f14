"""Snapshots by hand, deletion of old records, and a new history for a log that was deleted; on a cluster in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from marshal_py.admin.logs import LogConnection, Logs
from marshal_py.errors import (
    CoordinationTopicMissing,
    GroupOpaque,
    HistoryRestarted,
    HistoryTruncated,
    InvalidOption,
    PartitionError,
    SnapshotNotConfirmed,
)
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import Join
from tests.client.test_bad_logs import ends_with
from tests.client.test_snapshots import IN, folded, lived, pad, root_of, write_snapshot
from tests.support import wire
from tests.support.client_fixtures import LOG, LOGS, MemoryTestCluster, collect, joined, owns, places, until


@pytest.fixture
def memory() -> MemoryTestCluster:
    return MemoryTestCluster()


@pytest.fixture
def logs(memory: MemoryTestCluster) -> Iterator[Logs]:
    with Logs(memory.target, LOG, 5.0) as opened:
        yield opened


@pytest.fixture(params=[0, 1])
def number(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def end(memory: MemoryTestCluster, number: int) -> int:
    return memory.broker.bounds(TopicPartition(LOG, number)).end


def test_a_snapshot_where_nobody_lives(memory: MemoryTestCluster, logs: Logs, number: int) -> None:
    """N6: this process is the only one: it folds a second time, vouches, and reads that back."""
    lived(memory, number)
    pad(memory, number, 20)
    memory.put(LOG, number, b"garbage after the checkpoint")
    at = end(memory, number) // 16 * 16
    written = logs.connect(number).write(5.0)
    assert written is not None
    assert (written.at, written.self_audit) == (at, True)
    assert written.state_bytes > 50
    again = logs.connect(number)
    assert (again.bounds, again.snapshots(), again.clients()) == ((0, end(memory, number)), [at], ())


def test_written_once(memory: MemoryTestCluster, logs: Logs) -> None:
    lived(memory, 1)
    at = write_snapshot(memory, 1)
    connection = logs.connect(1)
    assert connection.wanted == at
    before = end(memory, 1)
    found = connection.write(5.0)
    assert found is not None
    assert (found.at, found.state_bytes) == (at, 0)
    assert end(memory, 1) == before


def test_too_short(memory: MemoryTestCluster, logs: Logs) -> None:
    with memory.connect():
        pass
    assert logs.numbers(None) == list(range(LOGS))
    assert logs.connect(0).write(5.0) is None
    assert end(memory, 0) == 1


def test_live_consumers_confirm_it(memory: MemoryTestCluster, logs: Logs, number: int) -> None:
    """N5, N6: a witness of another process."""
    topic = memory.topic()
    with memory.connect("a") as marshal, joined(marshal, IN[number], [topic]) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        pad(memory, number, 20)
        connection = logs.connect(number)
        written = connection.write(20.0)
        assert written is not None
        assert not written.self_audit
        assert connection.clients() == ("a",)


def test_who_lives_by_the_log_alone_does_not_confirm(memory: MemoryTestCluster, logs: Logs) -> None:
    """N6: a session of somebody who died: not confirmed, and said so."""
    lived(memory, 1)
    root = root_of(memory)
    memory.put(LOG, 1, codec.encode(Join("dead", b"d" * 16, 1, 1_000, ("t",)), IN[1], root.incarnation))
    pad(memory, 1, 16)
    with pytest.raises(SnapshotNotConfirmed, match="dead") as raised:
        logs.connect(1).write(0.2)
    assert raised.value.sessions == ("dead",)


def test_an_opaque_group(memory: MemoryTestCluster, logs: Logs) -> None:
    """N7: named, and nothing is written."""
    lived(memory, 1)
    memory.put(LOG, 1, wire.record(IN[1], 3, 0, incarnation=root_of(memory).incarnation, record_version=3))
    pad(memory, 1)
    before = end(memory, 1)
    with pytest.raises(GroupOpaque):
        logs.connect(1).write(1.0)
    assert end(memory, 1) == before


def test_deletion_behind_two_snapshots(memory: MemoryTestCluster, logs: Logs, number: int) -> None:
    """N12: to the older of the two, no further than the margin, and the log can be read on."""
    topic = lived(memory, number)
    older = write_snapshot(memory, number)
    assert logs.limit(logs.connect(number), 0.0) == 0, "there is one only"
    write_snapshot(memory, number)
    connection = logs.connect(number)
    assert connection.snapshots()[1] == older
    assert logs.limit(connection, 0.0) == older
    assert logs.limit(connection, 10**10) == 0, "all of it is younger"
    logs.delete(number, older)
    assert memory.broker.bounds(TopicPartition(LOG, number)).first == older
    memory.fill(topic, 0, 1, first=3)
    with memory.connect() as marshal, joined(marshal, IN[number], [topic]) as consumer:
        assert places(collect(consumer, 1)) == [(0, 3)]
    memory.broker.may_delete = False
    with pytest.raises(PartitionError, match="not authorized"):
        logs.delete(number, older + 16)


def test_names_that_are_wrong(memory: MemoryTestCluster) -> None:
    with Logs(memory.target, LOG) as opened:
        assert opened.numbers(None) == [], "nothing has begun here"
    lived(memory, 1)
    with Logs(memory.target, LOG) as opened, pytest.raises(InvalidOption, match="0 to 1"):
        opened.numbers(LOGS)
    with pytest.raises(CoordinationTopicMissing):
        Logs(memory.target, "missing")


@pytest.mark.parametrize("cut", [0, 3])
def test_history_begun_anew(memory: MemoryTestCluster, number: int, cut: int) -> None:
    """N13: of the broken log alone, in the same incarnation, at or after its first offset; consumers start again."""
    topic = lived(memory, number)
    other = lived(memory, 1 - number)
    root = root_of(memory)
    first = end(memory, number) - cut
    memory.truncate(LOG, number, first)
    with pytest.raises(HistoryTruncated), memory.connect() as marshal:
        joined(marshal, IN[number], [topic])
    with Logs(memory.target, LOG) as logs:
        assert list(logs.broken()) == [number]
        assert logs.surviving_root() == root
        begun = logs.restart(number, root)
        assert begun.at >= first
        assert begun.at % 16 == 0
        assert not logs.broken()
    memory.fill(topic, 0, 1, first=3)
    memory.fill(other, 0, 1, first=3)
    with memory.connect() as marshal:
        assert marshal.root == root
        with joined(marshal, IN[1 - number], [other]) as consumer:
            assert places(collect(consumer, 1)) == [(0, 3)]
        with joined(marshal, IN[number], [topic], start="committed") as consumer:
            assert places(collect(consumer, 1)) == [(0, 3)], "by the mirrored offsets"


def test_history_begun_anew_under_a_consumer(memory: MemoryTestCluster) -> None:
    """N13: one that had read the old one stops by name."""
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, IN[1], [topic]) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        until(lambda: marshal._loop.worlds[1].next_offset == end(memory, 1), "all is read")
        memory.truncate(LOG, 1, 3)
        with Logs(memory.target, LOG) as logs:
            (broken,) = logs.broken()
            logs.restart(broken, marshal.root)
        assert isinstance(ends_with(consumer, HistoryRestarted), HistoryRestarted)


def test_not_even_a_root_is_left(memory: MemoryTestCluster) -> None:
    """N13: then there is a new one; tokens keep growing."""
    topic = lived(memory, 0)
    root = root_of(memory)
    for number in range(LOGS):
        memory.put(LOG, number, b"x")
        memory.truncate(LOG, number, end(memory, number))
    with Logs(memory.target, LOG) as logs:
        assert list(logs.broken()) == list(range(LOGS))
        assert logs.surviving_root() is None
        fresh = logs.new_root()
        assert fresh.incarnation > root.incarnation
        for number in logs.broken():
            logs.restart(number, fresh)
    with memory.connect() as marshal, joined(marshal, IN[0], [topic]) as consumer:
        assert marshal.root == fresh
        until(owns(consumer, 0), "the partition is ours")


def test_a_desk_folds_what_a_consumer_folds(memory: MemoryTestCluster, logs: Logs) -> None:
    lived(memory, 1)
    connection: LogConnection = logs.connect(1)
    assert connection.world.chain == folded(memory, 1).chain
