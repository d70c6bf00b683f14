"""Those that look at a long log read what their question needs: from the newest snapshot on, or from an older one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from marshal_py.admin import archive
from marshal_py.admin.logs import Logs
from marshal_py.admin.views.health import Looking
from marshal_py.admin.watch import Watch
from marshal_py.errors import PartitionError
from marshal_py.log import replay
from marshal_py.log.observer import Judged, Observer
from marshal_py.log.reader import LogReader
from marshal_py.protocol.duties import SNAPSHOT_RECORDS_MIN
from marshal_py.protocol.fold.snapshot import STORED_MAX
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import (
    ClaimingPartition,
    ClaimState,
    Evict,
    Heartbeat,
    Join,
    ReleaseGroup,
    Topology,
)
from marshal_py.transport.dump import memory_transport
from marshal_py.transport.memory import MemoryLog
from tests.client.test_snapshots import IN, lived, pad, write_snapshot
from tests.support.client_fixtures import LOG, MemoryTestCluster
from tests.support.dumps import BEGIN_MS
from tests.support.long_log import GROUP, STEP_MS, LongLog

BEATS = 100  # heartbeats before each snapshot


@pytest.fixture(autouse=True)
def _no_log_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "COLD_FOLD_RECORDS", 0)
    monkeypatch.setattr(replay, "WINDOW_RECORDS", 32)


class Life(LongLog):
    """`dead` joins and is silent, `live` owns a partition and heartbeats; the group may be paused before all that."""

    def __init__(self, snapshots: int = 3, *, paused: bool = False) -> None:
        super().__init__()
        self.dead = self.tell(Join("dead", b"d" * 16, 1, 2_000, ("orders",)))
        self.live = self.tell(Join("live", b"l" * 16, 1, 2_000, ("orders",)))
        self.tell(Topology("orders", 1, NONE))
        self.epoch = self.tell(ClaimingPartition(self.live, "orders", 0, NONE, 0))
        self.pause = self.tell(ReleaseGroup(NONE, NONE, 3_600_000, reason="lunch", by="ops")) if paused else NONE
        self.sequence = 0
        for _ in range(snapshots):
            self.beat(BEATS)
            self.vouch()
        self.beat(10)

    def beat(self, count: int) -> None:
        for _ in range(count):
            self.sequence += 1
            self.tell(Heartbeat(self.live, self.sequence, (ClaimState(self.epoch, self.sequence),)))

    @property
    def end(self) -> int:
        return self.world.next_offset


def observer(path: Path) -> Observer:
    header, transport = memory_transport(path)
    return Observer(transport, header.topic)


def offsets(judged: Iterator[Judged]) -> list[int]:
    return [one.record.offset for one in judged]


def test_the_present_state_needs_the_newest_snapshot_and_what_follows(tmp_path: Path) -> None:
    life = Life()
    with observer(life.dump(tmp_path / "dump")) as looking:
        assert offsets(looking.read()) == list(range(life.snapshots[-1], life.end))
        ((_, group),) = looking.groups()
        assert group.digest() == life.world.groups[GROUP].digest()


def test_what_the_state_does_not_hold_is_looked_up(tmp_path: Path) -> None:
    """When silent sessions gave their last sign of life, and who paused the group: records before the snapshot."""
    life = Life()
    with observer(life.dump(tmp_path / "dump")) as looking:
        looking.fold()
        ((_, group),) = looking.groups()
        signs = looking.signs_of(0, group)
        assert signs[life.dead] == BEGIN_MS + life.dead * STEP_MS
        assert signs[life.live] == BEGIN_MS + (life.end - 1) * STEP_MS
    with observer(life.dump(tmp_path / "cut", life.snapshots[0])) as looking:
        looking.fold()
        ((_, group),) = looking.groups()
        assert set(looking.signs_of(0, group)) == {life.live}, "the other record was deleted"
    life = Life(paused=True)
    with observer(life.dump(tmp_path / "paused")) as looking:
        looking.fold()
        ((_, group),) = looking.groups()
        told = Looking(looking).pause_history(0, group)
        found = told.running(group)
        assert found is not None
        assert (found.by, found.reason, found.token) == ("ops", "lunch", life.pause)
    with observer(life.dump(tmp_path / "cut", life.snapshots[0])) as looking:
        looking.fold()
        ((_, group),) = looking.groups()
        told = Looking(looking).pause_history(0, group)
        assert told.running(group) is None


@pytest.mark.parametrize("shows", ["groups", "summaries"])
def test_a_log_is_not_read_once_for_each_group(
    shows: Literal["groups", "summaries"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were paused, and have given their last sign of life, before the snapshot; 500 such groups took 50 seconds."""
    read, calls = MemoryLog.read, list[int]()
    monkeypatch.setattr(MemoryLog, "read", lambda self, *asked: calls.append(asked[0]) or read(self, *asked))
    counts = []
    for groups in (2, 20):
        life = Life(1)
        for number in range(groups):
            life.tell(Join("silent", b"s" * 16, 1, 2_000, ("orders",)), f"group-{number}")
            life.tell(ReleaseGroup(NONE, NONE, 3_600_000, reason="lunch", by="ops"), f"group-{number}")
        life.vouch()
        path = life.dump(tmp_path / "dump")
        calls.clear()
        with Watch(lambda path=path: observer(path), shows=shows) as watch:  # type: ignore[misc]
            watch.refresh()
            found = watch.groups() if shows == "groups" else watch.summaries()
            assert len(found) == 1 + groups
            assert {sign for log, sign in watch.observer.extended_ms} >= {life.live, life.dead}
            if shows == "groups":
                assert [one.pause.by for one in watch.groups() if one.pause is not None] == ["ops"] * groups
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_who_asks_for_a_time_gets_a_snapshot_before_it(tmp_path: Path) -> None:
    life = Life()
    with observer(life.dump(tmp_path / "dump")) as looking:
        wanted = life.snapshots[1] + 40
        read = offsets(looking.read(since_ms=BEGIN_MS + wanted * STEP_MS))
        assert read == list(range(life.snapshots[1], life.end))


def test_the_past_is_read_as_far_back_as_needed(tmp_path: Path) -> None:
    life = Life()

    for count, began in ((5, life.snapshots[-1]), (50, life.snapshots[-2]), (10**6, 0)):
        with observer(life.dump(tmp_path / "dump")) as looking:
            begins: list[int] = []

            def noted(world: World, records: Iterator[Judged], begins: list[int] = begins) -> list[int]:
                begins.append(world.next_offset)
                return offsets(records)

            assert looking.newest(GROUP, noted, count) == list(range(life.end))[-count:]
            assert begins[-1] == began
            assert looking.began == {}, "nothing was deleted"
            assert list(looking.read()) == [], "it goes on at the end"
            ((_, group),) = looking.groups()
            assert group.digest() == life.world.groups[GROUP].digest()


def test_position_text_the_past_begins_is_said(tmp_path: Path) -> None:
    life = Life()
    cut = life.snapshots[0]
    with observer(life.dump(tmp_path / "dump", cut)) as looking:
        found = looking.newest(GROUP, lambda _world, records: offsets(records), None)
        assert found == list(range(cut, life.end))
        assert looking.began == {0: cut}
    with observer(life.dump(tmp_path / "dump", cut)) as looking:
        looking.newest(GROUP, lambda _world, records: offsets(records), 5)
        assert looking.began == {}, "it did not come there"


def test_advisories_are_the_same_from_whatever_snapshot(tmp_path: Path) -> None:
    life = Life()
    life.tell(Evict(life.dead, life.dead, 10_000, by="live"))
    life.beat(1)
    with observer(life.dump(tmp_path / "dump")) as looking:
        whole = list(looking.advisories(GROUP))
    with observer(life.dump(tmp_path / "dump")) as looking:
        pieces = looking.newest(GROUP, lambda world, records: looking.told(GROUP, world, records), None)
        assert pieces == whole
        assert [advisory.kind for advisory in pieces][-1] == "evicted"
        assert pieces[-1].client_id == "dead"


@pytest.mark.parametrize("number", [0, 1])
def test_a_cut_is_made_at_a_snapshot(number: int) -> None:
    """N12: all that is kept can be read, because what lies before the oldest snapshot that is kept cannot be folded."""
    memory = MemoryTestCluster()
    lived(memory, number)
    cuts = [write_snapshot(memory, number) for _ in range(4) if pad(memory, number, 40)]
    with Logs(memory.target, LOG, 5.0) as logs:
        log, root = logs._log, logs.root() if number else None
        bounds = log.bounds(number, 5.0)
        for before, expected in ((cuts[1] + 20, cuts[1]), (cuts[2], cuts[2]), (cuts[0] - 1, 0)):
            assert replay.cut_of(log, number, root, bounds, before) == expected
        memory.truncate(LOG, number, cuts[1])
        bounds = log.bounds(number, 5.0)
        assert replay.cut_of(log, number, root, bounds, cuts[2] - 1) == cuts[1]
        assert replay.oldest_world(log, number, root, bounds).began_at == cuts[1]
    with Observer(memory.target, LOG) as looking:
        assert offsets(looking.read(IN[number], back=True))[0] == cuts[1]


def test_no_window_holds_more_snapshots_than_a_store_keeps() -> None:
    """N8: one may come every 500 records; else the oldest ones of a window would not be found."""
    assert replay.WINDOW_RECORDS_MAX // SNAPSHOT_RECORDS_MIN < STORED_MAX


# --- a running consumer deletes what is old whenever it likes, also while a command reads (N12)


class CutLog:
    """A log with four snapshots, `whole` or without the records before the oldest. `cut` deletes more, once."""

    def __init__(self, whole: bool = False) -> None:
        self.memory = MemoryTestCluster()
        lived(self.memory, 0)
        self.cuts = [write_snapshot(self.memory, 0) for _ in range(4) if pad(self.memory, 0, 40)]
        self.done = False
        if not whole:
            self.memory.truncate(LOG, 0, self.cuts[0])

    def cut(self) -> None:
        if not self.done:
            self.done = True
            self.memory.truncate(LOG, 0, self.cuts[3])

    def cut_after(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
        """Has the log cut when this function is called first, and has its answer."""
        call = getattr(where, name)

        def cut_then(*given: Any, **named: Any) -> Any:
            found = call(*given, **named)
            self.cut()
            return found

        monkeypatch.setattr(where, name, cut_then)


@pytest.fixture
def log() -> CutLog:
    return CutLog()


@pytest.mark.parametrize("how", [{"back": True}, {"since_ms": 0}], ids=["back", "since"])
def test_a_log_that_is_cut_after_its_beginning_was_found_is_begun_again(
    monkeypatch: pytest.MonkeyPatch, log: CutLog, how: dict[str, Any]
) -> None:
    log.cut_after(monkeypatch, Observer, "_begin")
    with Observer(log.memory.target, LOG) as looking:
        assert offsets(looking.read(IN[0], **how))[0] == log.cuts[3]
        assert looking.began == ({0: log.cuts[3]} if "back" in how else {})


def test_advisories_of_a_log_that_is_cut_are_those_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch, log: CutLog
) -> None:
    log.cut_after(monkeypatch, Observer, "_begin")
    with Observer(log.memory.target, LOG) as looking:
        found = list(looking.advisories(IN[0]))
    with Observer(log.memory.target, LOG) as looking:
        assert log.done
        assert found == list(looking.advisories(IN[0]))


def test_what_is_deleted_while_the_past_is_read_is_not_there(monkeypatch: pytest.MonkeyPatch, log: CutLog) -> None:
    log.cut_after(monkeypatch, Observer, "_stretch")
    with Observer(log.memory.target, LOG) as looking:
        found = looking.newest(IN[0], lambda _world, records: offsets(records), None)
        assert found == list(range(log.cuts[3], looking.bounds([0])[0].end))
        assert looking.began == {0: log.cuts[3]}


def test_a_history_begins_with_the_world_that_its_records_follow(monkeypatch: pytest.MonkeyPatch, log: CutLog) -> None:
    log.cut_after(monkeypatch, replay, "oldest_world")
    with Observer(log.memory.target, LOG) as looking:
        world, records = looking.history(0)
        assert world.next_offset == next(records).offset == log.cuts[3]


def test_what_is_left_is_looked_for_again_in_a_log_that_is_cut(monkeypatch: pytest.MonkeyPatch, log: CutLog) -> None:
    with Observer(log.memory.target, LOG) as looking:
        log.cut_after(monkeypatch, replay, "incarnation_of")
        assert looking.oldest(0).next_offset == log.cuts[3]


def test_single_records_that_are_deleted_while_they_are_read_are_left_out(
    monkeypatch: pytest.MonkeyPatch, log: CutLog
) -> None:
    with Observer(log.memory.target, LOG) as looking:
        log.cut_after(monkeypatch, type(looking._reader.log), "bounds")
        assert set(looking.times_of(0, [log.cuts[1], log.cuts[3] + 1])) == {log.cuts[3] + 1}


def test_the_root_is_found_although_the_log_is_cut_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CutLog(whole=True)
    log.cut_after(monkeypatch, LogReader, "bounds")
    with Observer(log.memory.target, LOG) as looking:
        assert log.done
        assert looking.root is not None


def test_a_dump_of_a_log_that_is_cut_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, log: CutLog) -> None:
    """A gap in it would be read as if its records had other offsets."""
    with Observer(log.memory.target, LOG) as looking:
        log.cut_after(monkeypatch, Observer, "bounds")
        with pytest.raises(PartitionError, match="do it again"):
            archive.dump(looking, io.BytesIO())
