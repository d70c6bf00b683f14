"""Consumers over logs that are long, truncated, or kept short by the consumers themselves; and a broken fold, live."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from marshal_py.client.driver import loop
from marshal_py.client.values.options import RetentionPolicy
from marshal_py.errors import (
    ClusterUnreachable,
    Diverged,
    HistoryRestarted,
    HistoryTruncated,
    InvalidOption,
    LogGap,
    SnapshotRefused,
    TopicRecreated,
)
from marshal_py.history import explain
from marshal_py.log import replay
from marshal_py.protocol import duties
from marshal_py.protocol.fold import rationalizer, snapshot
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import TopicPartition, route
from marshal_py.protocol.wire.records import Evict, Genesis, GroupConfig, Join, Leave, Note, Snapshot
from marshal_py.transport.ports import Bounds, TopicInfo
from tests.client.test_bad_logs import ends_with
from tests.support.client_fixtures import (
    DEADLINE_S,
    LOG,
    LOGS,
    ConsumerProcess,
    EmbeddedTestCluster,
    MemoryTestCluster,
    collect,
    joined,
    owns,
    places,
    positions,
    until,
)

IN = {number: next(f"g{i}" for i in range(100) if route(f"g{i}", LOGS) == number) for number in range(LOGS)}
OTHER = next(name for name in (f"h{i}" for i in range(100)) if route(name, LOGS) == 1)  # lives in log 1 as well
WRITER, WITNESS = b"w" * 16, b"v" * 16


@pytest.fixture(params=[0, 1])
def number(request: pytest.FixtureRequest) -> int:
    """The log of a test's group: the root's own, or another."""
    found: int = request.param
    return found


def root_of(memory: MemoryTestCluster) -> Genesis:
    value = memory.log_values(0)[0]
    envelope = codec.open_envelope(value, -1)
    assert envelope is not None
    assert isinstance(envelope[5], Genesis)
    return envelope[5]


def folded(memory: MemoryTestCluster, number: int, to: int | None = None) -> World:
    world = World(number, None if number == 0 else root_of(memory))
    for offset, value in enumerate(memory.log_values(number)[:to]):
        rationalizer.apply(world, offset, value)
    return world


def pad(memory: MemoryTestCluster, number: int, records: int = 0) -> int:
    """Writes this many records, and up to the next checkpoint. Returns the log's end."""
    value = codec.encode(Note(-1, "filler"), IN[number], root_of(memory).incarnation)
    while records > 0 or memory.broker.bounds(TopicPartition(LOG, number)).end % 16:
        memory.put(LOG, number, value)
        records -= 1
    return memory.broker.bounds(TopicPartition(LOG, number)).end


def write_snapshot(memory: MemoryTestCluster, number: int, *, change: Any = None, confirm: bool = True) -> int:
    """Writes a snapshot of the log as another client would; `change` makes its state wrong."""
    at = pad(memory, number)
    world = folded(memory, number)
    if change is not None:
        change(world)
    data, root = snapshot.state_of(world), root_of(memory)
    assert data is not None
    records = snapshot.split(root, WRITER, at, snapshot.digest_of(world), world.chain, data)
    if confirm:
        records.append(snapshot.witness(root, WITNESS, at, records[0].state, records[0].chain))
    for record in records:
        memory.put(LOG, number, codec.encode(record, "", root.incarnation))
    return at


def lived(memory: MemoryTestCluster, number: int, messages: int = 3) -> str:
    """A group that has consumed: its topic."""
    topic = memory.topic()
    memory.fill(topic, 0, messages)
    with memory.connect() as marshal, joined(marshal, IN[number], [topic]) as consumer:
        assert len(collect(consumer, messages)) == messages
        consumer.flush()
    return topic


def test_start_after_truncation(memory: MemoryTestCluster, number: int) -> None:
    """N9: after a snapshot the log continues where it was, in the root's log and in another."""
    topic = lived(memory, number)
    write_snapshot(memory, number)
    at = write_snapshot(memory, number)
    memory.truncate(LOG, number, at)
    memory.fill(topic, 0, 2, first=3)
    with memory.connect() as marshal, joined(marshal, IN[number], [topic]) as consumer:
        assert places(collect(consumer, 2)) == [(0, 3), (0, 4)]
        world = marshal._loop.worlds[number]
        assert world.began_at == at
        world.check()


def test_a_long_log_begins_at_its_snapshot(
    memory: MemoryTestCluster, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N9: also where nothing was deleted; and if there is no sound one, at offset 0."""
    monkeypatch.setattr(replay, "COLD_FOLD_RECORDS", 0)
    topic = lived(memory, number)
    root = root_of(memory)
    write_snapshot(memory, number, confirm=False)
    with memory.connect() as marshal, joined(marshal, IN[number], [topic]):
        assert marshal._loop.worlds[number].began_at == 0
    at = write_snapshot(memory, number)
    pad(memory, number, 3 * replay.WINDOW_RECORDS)
    unsound = Snapshot(root, WRITER, at + 16, 0, 1, 1, 1, b"nothing")
    for record in (unsound, snapshot.witness(root, WITNESS, at + 16, 1, 1)):
        memory.put(LOG, number, codec.encode(record, "", root.incarnation))
    with memory.connect() as marshal, joined(marshal, IN[number], [topic]) as consumer:
        world = marshal._loop.worlds[number]
        assert world.began_at == at
        assert positions(consumer) == {0: 3} or until(owns(consumer, 0), "the partition is ours")
        with marshal._context.lock:  # it reads on
            chain_at, chain, end, digest = world.chain_at, world.chain, world.next_offset, snapshot.digest_of(world)
        assert folded(memory, number, chain_at).chain == chain
        assert snapshot.digest_of(folded(memory, number, end)) == digest


def test_truncated_while_it_is_looked_at(memory: MemoryTestCluster, number: int) -> None:
    """N9: records are deleted between the look at the log's bounds and the reading: the reader looks again."""
    lived(memory, number)
    write_snapshot(memory, number)
    pad(memory, number, 2 * replay.WINDOW_RECORDS)
    at = write_snapshot(memory, number)
    tp = TopicPartition(LOG, number)
    memory.truncate(LOG, number, 3)
    log = memory.target.log(LOG, "reader")
    stale = memory.broker.bounds(tp)
    memory.truncate(LOG, number, at)
    root = None if number == 0 else root_of(memory)
    assert replay.open_world(log, number, root, stale).began_at == at
    memory.truncate(LOG, number, stale.end)
    with pytest.raises(HistoryTruncated):
        replay.open_world(log, number, root, stale)


def test_truncated_between_the_questions_for_its_bounds(memory: MemoryTestCluster, number: int) -> None:
    """N9: Kafka tells the end and the first offset one after the other. What lies between is no whole log then."""
    lived(memory, number)
    pad(memory, number, 2 * replay.WINDOW_RECORDS)
    end = memory.broker.bounds(TopicPartition(LOG, number)).end
    at = write_snapshot(memory, number)
    memory.truncate(LOG, number, end - 1)
    log = memory.target.log(LOG, "reader")
    root = None if number == 0 else root_of(memory)
    assert replay.open_world(log, number, root, Bounds(end - 1, end)).began_at == at


def test_a_snapshot_of_another_incarnation(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """N4: in a whole log the Genesis says what the log is; an old client's snapshot is garbage."""
    monkeypatch.setattr(replay, "COLD_FOLD_RECORDS", 0)
    topic = lived(memory, 0)
    root = root_of(memory)
    at = pad(memory, 0)
    world = folded(memory, 0)
    data = snapshot.state_of(world)
    assert data is not None
    other = msgspec.structs.replace(root, incarnation=b"o" * 16)
    records = snapshot.split(other, WRITER, at, snapshot.digest_of(world), world.chain, data)
    for record in (*records, snapshot.witness(other, WITNESS, at, records[0].state, records[0].chain)):
        memory.put(LOG, 0, codec.encode(record, "", b"o" * 16))
    with memory.connect() as marshal, joined(marshal, IN[0], [topic]):
        assert marshal.root == root
        assert marshal._loop.worlds[0].began_at == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_wrong_snapshot_is_found_out(
    memory: MemoryTestCluster, number: int, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """N9: the older one folds to another state than the newer one holds: the reader fences, also if the cluster did not
    answer when it was going to compare them."""
    monkeypatch.setattr(loop, "CHECK_AFTER_MS", 100)
    find, asked = replay.find, list[bool]()

    def unanswered_once(*args: Any) -> Any:
        asked.append(True)
        if fails and len(asked) == 1:
            raise ClusterUnreachable("memory", "the log", "no answer in time")
        return find(*args)

    monkeypatch.setattr(replay, "find", unanswered_once)
    topic = lived(memory, number)
    older = write_snapshot(memory, number)

    def wrong(world: World) -> None:
        group = world.groups[IN[number]]
        partition = group.partitions[TopicPartition(topic, 0)]
        partition.position += 1
        group.dirty.add(partition)

    newer = write_snapshot(memory, number, change=wrong)
    memory.truncate(LOG, number, older)
    deadline = time.monotonic() + DEADLINE_S
    with pytest.raises(SnapshotRefused) as raised, memory.connect() as marshal:  # noqa: PT012  # at any of these steps
        consumer = joined(marshal, IN[number], [topic])
        while time.monotonic() < deadline:
            consumer.fetch(10, min_messages=10, expires_s=0.05)
    assert (raised.value.log, raised.value.at, raised.value.older) == (number, newer, older)


def test_a_gap_that_only_a_second_look_meets(
    memory: MemoryTestCluster, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L8, N9: the log was compacted between the two newest snapshots; a start after them would not notice."""
    monkeypatch.setattr(loop, "CHECK_AFTER_MS", 100)
    topic = lived(memory, number)
    older = write_snapshot(memory, number)
    newer = write_snapshot(memory, number)
    memory.truncate(LOG, number, older)
    with memory.broker.lock:
        # In the place of a record stands the next one, as a fetch finds it where compaction has left nothing.
        memory.broker.topics[LOG][number][newer - 2] = memory.broker.topics[LOG][number][newer - 1]
    deadline = time.monotonic() + DEADLINE_S
    with pytest.raises(LogGap), memory.connect() as marshal:  # noqa: PT012  # at any of these steps
        consumer = joined(marshal, IN[number], [topic])
        while time.monotonic() < deadline:
            consumer.fetch(10, min_messages=10, expires_s=0.05)


def test_a_gap_that_only_an_audit_meets(memory: MemoryTestCluster, number: int) -> None:
    """L8, N6: the log was compacted behind a consumer that has read it, and folds it again."""
    topic = memory.topic()
    with memory.connect("a", snapshot_every_records=64) as one, joined(one, IN[number], [topic]) as consumer:
        records = memory.broker.topics[LOG][number]
        with memory.broker.lock:
            records[1] = records[2]
        deadline = time.monotonic() + DEADLINE_S
        with pytest.raises(LogGap):  # noqa: PT012  # when the audit is done
            while time.monotonic() < deadline:
                pad(memory, number, 16)
                consumer.fetch(10, min_messages=10, expires_s=0.05)


def test_no_snapshot_stands_in(memory: MemoryTestCluster, number: int) -> None:
    """N10: none, an unconfirmed one, one of a checkpoint that is gone: zero claims, zero records, zero deliveries."""
    topic = lived(memory, number)
    write_snapshot(memory, number)
    at = write_snapshot(memory, number, confirm=False)
    memory.truncate(LOG, number, at)
    before = memory.broker.bounds(TopicPartition(LOG, number)).end
    memory.fill(topic, 0, 1, first=3)
    with pytest.raises(HistoryTruncated, match="log reset") as raised, memory.connect() as marshal:
        joined(marshal, IN[number], [topic])
    assert (raised.value.log, raised.value.first_offset) == (number, at)
    assert memory.broker.bounds(TopicPartition(LOG, number)).end == before


def test_truncated_while_running(memory: MemoryTestCluster, number: int) -> None:
    """N11: it fences, begins again after a snapshot, leaves its old session and joins again; nothing is lost."""
    topic = memory.topic()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal, joined(marshal, IN[number], [topic]) as consumer:
        assert len(collect(consumer, 3)) == 3
        consumer.flush()
        old = consumer._driver.member.session
        with memory.broker.lock:  # nobody reads meanwhile
            at = write_snapshot(memory, number)
            memory.truncate(LOG, number, at + 2)
            at = write_snapshot(memory, number)
        until(lambda: marshal._loop.worlds[number].began_at == at, "the state comes from the snapshot")
        memory.fill(topic, 0, 2, first=3)
        assert places(collect(consumer, 2)) == [(0, 3), (0, 4)]
        assert consumer._driver.member.session not in (old, -1)
        reasons = [event.text for event in consumer._driver.events if event.kind == "lost"]
        assert reasons == ["history truncated"]
    left = [verdict.record for verdict in folded_verdicts(memory, number, at) if isinstance(verdict.record, Leave)]
    assert left[0].session == old


def cut_unread(memory: MemoryTestCluster, number: int) -> int:
    """Deletes records that nobody has read yet. Returns where a reader begins again."""
    with memory.broker.lock:
        memory.truncate(LOG, number, write_snapshot(memory, number) + 2)
        return write_snapshot(memory, number)


def test_truncated_while_no_consumer_is_there(memory: MemoryTestCluster, number: int) -> None:
    """N11: the log is read again all the same, or no later consumer of this Marshal could join."""
    topic = memory.topic()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal:
        with joined(marshal, IN[number], [topic]):
            pass
        at = cut_unread(memory, number)
        until(lambda: marshal._loop.worlds[number].began_at == at, "the state comes from the snapshot")
        with joined(marshal, IN[number], [topic]) as consumer:
            assert places(collect(consumer, 3)) == [(0, 0), (0, 1), (0, 2)]


def test_truncated_while_a_consumer_is_made(
    memory: MemoryTestCluster, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N11: it joins in the state that was read again, not in the one that it was going to begin with."""
    topic = memory.topic()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal:
        with joined(marshal, IN[number], [topic]):
            pass
        source = marshal.transport.source

        def cut_first(*args: Any) -> Any:
            at = cut_unread(memory, number)
            until(lambda: marshal._loop.worlds[number].began_at == at, "the state comes from the snapshot")
            return source(*args)

        monkeypatch.setattr(marshal.transport, "source", cut_first)
        with joined(marshal, IN[number], [topic]) as consumer:
            assert places(collect(consumer, 3)) == [(0, 0), (0, 1), (0, 2)]


def test_a_reading_again_that_fails(
    memory: MemoryTestCluster, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """N11: whatever goes wrong, it is tried again; until then the thread wakes up for nobody (V10)."""
    topic = memory.topic()
    memory.fill(topic, 0, 3)
    failed, go_on, open_world = threading.Event(), threading.Event(), replay.open_world

    def fails_once(*args: Any) -> World:
        if not failed.is_set():
            failed.set()
            assert go_on.wait(DEADLINE_S)
            raise RuntimeError("can't start new thread")
        return open_world(*args)

    with memory.connect() as marshal, joined(marshal, IN[number], [topic]) as consumer:
        monkeypatch.setattr(replay, "open_world", fails_once)
        cut_unread(memory, number)
        assert failed.wait(DEADLINE_S)
        assert marshal._loop.turn.deadline_ms() is None
        go_on.set()
        assert places(collect(consumer, 3)) == [(0, 0), (0, 1), (0, 2)]
    assert "can't start new thread; trying again" in caplog.text


def folded_verdicts(memory: MemoryTestCluster, number: int, first: int) -> list[Verdict]:
    """From a checkpoint on: the broker of these tests deletes nothing really."""
    world = folded(memory, number, first)
    return [
        rationalizer.apply(world, offset, value)
        for offset, value in enumerate(memory.log_values(number))
        if offset >= first
    ]


def test_the_consumers_keep_their_log_short(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """N8, N12: they write snapshots, confirm them, and delete what lies below two of them."""
    monkeypatch.setattr(duties, "STAGGER_RECORDS", 16)
    monkeypatch.setattr(duties, "RETRY_RECORDS", 64)
    monkeypatch.setattr(loop, "TRUNCATE_EVERY_MS", 50)
    monkeypatch.setattr(loop, "TRUNCATE_RECORDS_MIN", 16)
    topic = memory.topic(2)
    tp = TopicPartition(LOG, 1)
    options = {"snapshot_every_records": 64, "history_kept_s": 0.0}
    with (
        memory.connect("a", **options) as one,
        memory.connect("b", **options) as two,
        joined(one, IN[1], [topic]) as a,
        joined(two, IN[1], [topic]) as b,
    ):
        until(lambda: len(a.cached_info().claims) == len(b.cached_info().claims) == 1, "each has one")
        until(lambda: pad(memory, 1, 16) and memory.broker.bounds(tp).first > 0, "records were deleted")
        assert not a.cached_info().closed
        assert not b.cached_info().closed
        found = [codec.open_snapshot(value) for value in memory.log_values(1)]
        records = [record for record in found if record is not None]
        instances = {loop.maintenance.snapshotters[1].instance for loop in (one._loop, two._loop)}
        assert {record.instance for record in records} == instances
        confirmed = one._loop.maintenance.snapshotters[1].store.confirmed()
        assert not confirmed[0].self_audit
        assert memory.broker.bounds(tp).first <= confirmed[1].at
    memory.fill(topic, 0, 1)
    with memory.connect("c", **options) as three, joined(three, IN[1], [topic]) as consumer:
        assert places(collect(consumer, 1)) == [(0, 0)]


def test_a_dead_group_does_not_stop_truncation(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """N14: a session of a killed process, alone in its group, is evicted by consumers of another group; then they
    confirm snapshots and delete records again."""
    monkeypatch.setattr(duties, "STAGGER_RECORDS", 16)
    monkeypatch.setattr(duties, "RETRY_RECORDS", 64)
    monkeypatch.setattr(loop, "TRUNCATE_EVERY_MS", 50)
    monkeypatch.setattr(loop, "TRUNCATE_RECORDS_MIN", 16)
    topic, tp = lived(memory, 1), TopicPartition(LOG, 1)
    orphan = memory.broker.bounds(tp).end
    join = Join("killed", b"k" * 16, 1, 1_000, (topic,))
    memory.put(LOG, 1, codec.encode(join, IN[1], root_of(memory).incarnation))
    options = {"snapshot_every_records": 64, "history_kept_s": 0.0}
    with (
        memory.connect("a", **options) as one,
        memory.connect("b", **options) as two,
        joined(one, OTHER, [topic]),
        joined(two, OTHER, [topic]),
    ):
        until(lambda: pad(memory, 1, 16) and memory.broker.bounds(tp).first > orphan, "records were deleted")
    (evicted,) = (record for record in memory.accepted(IN[1], Evict) if record.session == orphan)
    assert evicted.by in ("a", "b"), "b waits longer, unless a is slow"
    assert evicted.waited_ms >= 2_000


def test_a_killed_process_does_not_stop_snapshots(embedded: EmbeddedTestCluster) -> None:
    """N14, N6: kill -9 of a group's only consumer; the only one of another group evicts it, and is alone again."""
    topic = embedded.topic()
    with ConsumerProcess(embedded.target, IN[1], topic, "--client-id", "killed") as killed:
        orphan = killed.wait_for("joined")[0]["session"]
        killed.signal(signal.SIGKILL)
        killed.wait()
    with embedded.connect("a", snapshot_every_records=64) as one, joined(one, OTHER, [topic]):
        filler = codec.encode(Note(-1, "filler"), OTHER, one.root.incarnation)

        def confirmed() -> bool:
            for _ in range(16):
                embedded.put(LOG, 1, filler)
            return one._loop.maintenance.snapshotters[1].confirmed_at > 0

        until(confirmed, "a snapshot is confirmed")
    (evicted,) = embedded.accepted(IN[1], Evict)
    assert (evicted.session, evicted.by) == (orphan, "a")


def test_alone_it_audits_itself(memory: MemoryTestCluster, number: int) -> None:
    """N6: one client in the log: a second fold of re-read bytes."""
    topic = memory.topic()
    with memory.connect("a", snapshot_every_records=64) as one, joined(one, IN[number], [topic]):
        kept = one._loop.maintenance.snapshotters[number]
        until(lambda: pad(memory, number, 16) and kept.confirmed_at > 0, "confirmed")
        assert kept.store.confirmed()[0].self_audit


def test_without_the_right_to_delete(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """N12: snapshots are written, deletion is left to an admin, one advisory says so."""
    monkeypatch.setattr(loop, "TRUNCATE_EVERY_MS", 10)
    monkeypatch.setattr(loop, "TRUNCATE_RECORDS_MIN", 16)
    memory.broker.may_delete = False
    topic = memory.topic()
    tp = TopicPartition(LOG, 1)
    with memory.connect("a", snapshot_every_records=64, history_kept_s=0.0) as one, joined(one, IN[1], [topic]) as a:

        def refused() -> list[Any]:
            return [event for event in a._driver.events if event.kind == "truncation_refused"]

        until(lambda: pad(memory, 1, 16) and refused(), "it was refused")
        end = memory.broker.bounds(tp).end
        kept = one._loop.maintenance.snapshotters[1]
        until(lambda: pad(memory, 1, 16) and kept.confirmed_at > end, "snapshots go on")
        assert len(refused()) == 1
        assert memory.broker.bounds(tp).first == 0
        assert "not authorized" in refused()[0].text


def test_young_history_stays(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """N12: what is younger than the margin is not deleted, however many snapshots lie before it."""
    monkeypatch.setattr(loop, "TRUNCATE_EVERY_MS", 10)
    monkeypatch.setattr(loop, "TRUNCATE_RECORDS_MIN", 1)
    deleted: list[int] = []
    topic = memory.topic()
    monkeypatch.setattr(memory.broker, "delete_records", lambda tp, before: deleted.append(before))
    wall_ms = 10**15  # far in the future: nothing in the log is older
    monkeypatch.setattr(
        MemoryTestCluster,
        "put",
        lambda self, topic, partition, value, key=None, headers=None: self.broker.produce(
            topic, partition, value, key, headers, wall_ms
        ),
    )
    tp = TopicPartition(LOG, 1)
    with memory.connect("a", snapshot_every_records=64, history_kept_s=3_600.0) as one, joined(one, IN[1], [topic]):
        kept = one._loop.maintenance.snapshotters[1]
        until(lambda: pad(memory, 1, 16) and len(kept.store.confirmed()) == 2, "two are confirmed")
        until(lambda: pad(memory, 1, 16) and kept.deletable() > 100, "the session has shown that it read on")
        end = memory.broker.bounds(tp).end
        until(lambda: pad(memory, 1, 16) > end + 300, "time for it to look")
    first = min(message.offset() for message in memory.broker.topics[LOG][1] if message.timestamp()[1] == wall_ms)
    assert all(before <= first for before in deleted)


def test_a_recreated_topic_is_not_truncated(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """N12: the look before a deletion finds another topic, and ends the client before anything is lost."""
    monkeypatch.setattr(loop, "TRUNCATE_EVERY_MS", 10)
    monkeypatch.setattr(loop, "TRUNCATE_RECORDS_MIN", 1)
    monkeypatch.setattr(loop, "METADATA_S", 3_600.0)
    topic = memory.topic()
    with (
        memory.connect("a", snapshot_every_records=64, history_kept_s=0.0) as one,
        joined(one, IN[1], [topic]) as consumer,
    ):
        monkeypatch.setattr(one._context.admin, "describe_topic", lambda topic: TopicInfo(1, "another"))

        def ended() -> bool:
            pad(memory, 1, 16)
            try:
                consumer.fetch(1, expires_s=0.05)
            except TopicRecreated:
                return True
            return False

        until(ended, "it looks before it deletes")
        assert memory.broker.bounds(TopicPartition(LOG, 1)).first == 0


def test_a_broken_fold_among_three(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """G7: found by the digests, proved by a second fold of re-read bytes; it alone ends, the others take over.

    What it held is kept, and differs from the log in exactly what was falsified.
    """
    topic = memory.topic(3)
    broken: list[World] = []
    apply = rationalizer.apply

    def warped(world: World, offset: int, value: bytes | None) -> Verdict:
        verdict = apply(world, offset, value)
        if world in broken and verdict.accepted and isinstance(verdict.record, GroupConfig):
            group = world.groups[IN[1]]
            partition = group.partitions[TopicPartition(topic, 0)]
            partition.generation += 1
            group.dirty.add(partition)
        return verdict

    monkeypatch.setattr(rationalizer, "apply", warped)
    marshals = [memory.connect(name, evidence_dir=str(tmp_path)) for name in "abc"]
    try:
        consumers = [joined(marshal, IN[1], [topic]) for marshal in marshals]
        until(lambda: [len(consumer.cached_info().claims) for consumer in consumers] == [1, 1, 1], "each has one")
        broken.append(marshals[1]._loop.worlds[1])
        offset = memory.broker.bounds(TopicPartition(LOG, 1)).end
        memory.put(LOG, 1, codec.encode(GroupConfig(-1), IN[1], root_of(memory).incarnation))
        pad(memory, 1, 1)
        error = ends_with(consumers[1], Diverged)
        assert isinstance(error, Diverged)
        assert error.group == IN[1]
        assert error.offset - 32 <= offset < error.offset
        (kept,) = tmp_path.iterdir()
        assert error.evidence == str(kept)
        assert str(kept) in str(error)
        assert [event.text for event in consumers[1]._driver.events if event.kind == "state_kept"] == [str(kept)]
        held = explain.load_state(kept, IN[1])
        assert (held["client_id"], held["log"], held["first_difference"]) == ("b", 1, error.offset)
        log = explain.plain_state(folded(memory, 1, held["at_offset"] + 1).groups[IN[1]], 100)
        assert list(explain.differences(held["state"], log)) == [(f"partition {topic}:0", "generation", 1, 0)]
        until(
            lambda: sorted(len(consumers[at].cached_info().claims) for at in (0, 2)) == [1, 2], "the others take over"
        )
        for at in (0, 2):
            events = [event for event in consumers[at]._driver.events if event.kind == "diverged"]
            assert all(event.text.startswith("b ") for event in events)
            assert not consumers[at].cached_info().closed
    finally:
        for marshal in marshals:
            marshal.close()


def test_a_history_that_began_again_stops_readers_of_the_old_one(memory: MemoryTestCluster, number: int) -> None:
    """N13: with the error that says so; a consumer that starts after it knows nothing of the old history."""
    topic = memory.topic()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal, joined(marshal, IN[number], [topic]) as consumer:
        assert len(collect(consumer, 2)) == 2
        consumer.flush()
        at = pad(memory, number)
        for record in snapshot.founding(root_of(memory), number, WRITER, at):
            memory.put(LOG, number, codec.encode(record, "", marshal.root.incarnation))
        error = ends_with(consumer, HistoryRestarted)
        assert isinstance(error, HistoryRestarted)
        assert (error.log, error.at) == (number, at)
    memory.truncate(LOG, number, at)
    with memory.connect() as marshal, joined(marshal, IN[number], [topic]) as consumer:
        group = marshal._loop.worlds[number].groups[IN[number]]
        assert min(itertools.chain(group.sessions)) >= at


@pytest.mark.parametrize(
    "options",
    [
        {"snapshot_every_records": 0},
        {"snapshot_every_records": 1.5},
        {"history_kept_s": -1.0},
        {"history_kept_s": "a day"},
        {"evidence_dir": "/no/such/folder"},
    ],
)
def test_settings_out_of_bounds(memory: MemoryTestCluster, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        memory.connect(**options)
    assert RetentionPolicy() == (16_000, 86_400.0, "", 500)
