"""Runs that begin where a dump ends: the dead of it are taken over, positions go on, bugs are found from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from marshal_py.errors import FileUnusable
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.records import Leave, Topology
from marshal_py.transport.ports import LogRecord
from marshal_sim.cluster import dump_state
from marshal_sim.cluster.run import simulate
from marshal_sim.cluster.scenario import Options
from marshal_sim.judge.evidence import OffsetList
from marshal_sim.judge.history import History
from marshal_sim.mutants.mutants import MUTANTS, switched_on
from marshal_sim.tools import sweep
from marshal_sim.tools.schedule import Schedule, parse, text_of
from tests.support import dumps, logs
from tests.support.differential_log import GROUP, DifferentialLog

SEED = 3
SEEDS = range(1, 3)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heritage") / "run.dump"
    dumps.of_run(path, SEED)
    return path


def world_of(path: Path) -> World:
    world = World()
    for at, value in enumerate(dump_state.read(str(path)).logs[0].values):
        rationalizer.apply(world, at, value)
    return world


def test_runs_go_on_from_there_and_keep_every_promise(dump: Path) -> None:
    left = world_of(dump)
    dead = {session for group in left.groups.values() for session in group.sessions}
    assert dead
    for seed in SEEDS:
        traced = sweep.trace_schedule(Schedule(seed, Options(dump=str(dump))))
        assert traced.result.violations == ()
        assert traced.result.deliveries > 0
        (log,) = traced.logs
        history = History(log)
        assert log.inherited == left.next_offset
        assert all(
            event.offset is None or event.what != "record" or event.offset >= log.inherited for event in traced.trace
        ), "the past is not in the trace"
        if not traced.result.scenario.kinds & {"newer", "envelope", "gap"}:  # then no client can continue
            live = {session for group in history.oracle.groups.values() for session in group.sessions}
            assert not live & dead, "who was dead when the run began is gone when it ends"
        assert traced.result.takeovers <= sum(
            new.epoch >= log.inherited for claims in history.by_key.values() for new in claims
        ), "this run's alone"


def test_delivery_goes_on_at_the_positions_of_the_dump(dump: Path) -> None:
    left = world_of(dump)
    options = Options(dump=str(dump), kinds=frozenset())
    traced = sweep.trace_schedule(Schedule(1, options))
    (log,) = traced.logs
    for group in left.groups.values():
        for tp, part in group.partitions.items():
            seen = [each.offset for each in log.deliveries if each.key == (group.name, *tp)]
            assert seen, f"{tp} is delivered again"
            assert min(seen) == next(offset for offset in log.topics[tp] if offset >= part.position)
    assert traced.result.scenario.interval_ms >= max(
        session.join.interval_ms for group in left.groups.values() for session in group.sessions.values()
    )


def test_the_same_seeds_give_the_same_runs_in_any_number_of_processes(dump: Path) -> None:
    one, two = (sweep.total(sweep.sweep(range(1, 3), processes, Options(dump=str(dump)))) for processes in (1, 2))
    assert one == two
    assert (one.violations, one.void) == (0, False)


def test_a_planted_bug_is_found_from_there(dump: Path) -> None:
    """The judges of such a run are awake."""
    bias = MUTANTS["X11"].bias._replace(dump=str(dump))
    with switched_on(MUTANTS["X11"]):
        assert any(simulate(seed, bias).violations for seed in range(40))


def test_a_schedule_names_its_dump(dump: Path) -> None:
    schedule = Schedule(5, Options(dump=str(dump), group="billing", clients=2))
    assert parse(text_of(schedule)) == schedule


# --- what is inherited


def test_a_paused_group_goes_on_when_its_pause_is_waited_out(tmp_path: Path) -> None:
    book = DifferentialLog()
    session, epoch = book.owner()
    book.pause(60_000)
    book.release(session, epoch, 130)
    path = dumps.of_values(tmp_path / "paused.dump", book.values)
    assert dump_state.read(str(path)).pause_ms == 60_000
    result = simulate(2, Options(dump=str(path), kinds=frozenset()))
    assert result.violations == ()
    assert result.simulated_hours * 3_600_000 > 60_000
    assert result.deliveries > 0


def test_a_truncated_log_begins_at_its_snapshot(tmp_path: Path) -> None:
    """N9: as a consumer that starts would, and the auditor too."""
    rows = logs.with_snapshots(logs.topic(5, 2, 200), 2, 96)
    records = [LogRecord(log, at, value, time_ms) for log, at, time_ms, _, value in rows if at >= 90]
    path = dumps.write(tmp_path / "cut.dump", records, 2)
    past = dump_state.read(str(path))
    assert [(each.number, each.first) for each in past.logs] == [(0, 96), (1, 96)]
    for seed in (1, 3):  # others take ten times as long
        result = simulate(seed, Options(dump=str(path)))
        assert result.violations == ()
    assert result.deliveries > 0


def test_values_that_are_null_stay_null(tmp_path: Path) -> None:
    """Somebody wrote a tombstone: the chain digest says so (G2)."""
    book = DifferentialLog()
    book.owner()
    book.put(None)
    path = dumps.of_values(tmp_path / "null.dump", book.values)
    assert dump_state.read(str(path)).logs[0].values[-1] is None
    assert simulate(1, Options(dump=str(path))).violations == ()


def test_one_group_of_many_can_be_chosen(tmp_path: Path) -> None:
    book = DifferentialLog(exhaustive=False)
    for number in range(dump_state.GROUPS_MAX + 1):
        book.must(book.new_join(f"c{number}"), group=f"g{number}")
        book.must(Topology("t", 2, -1), group=f"g{number}")
    path = dumps.of_values(tmp_path / "many.dump", book.values)
    with pytest.raises(FileUnusable, match="--group"):
        dump_state.read(str(path))
    assert [group.name for group in dump_state.read(str(path), "g3").groups] == ["g3"]
    with pytest.raises(FileUnusable, match="no group 'g99'; it has g0, g1"):
        dump_state.read(str(path), "g99")


@pytest.mark.parametrize("how", ["deleted", "no topic", "paused"])
def test_a_group_with_which_nobody_can_go_on_is_refused(tmp_path: Path, how: str) -> None:
    book = DifferentialLog()
    session = book.join()
    if how == "deleted":
        book.must(Leave(session))
        book.delete()
    elif how == "paused":
        book.topology()
        book.pause(dump_state.PAUSE_MS_MAX + 1)
    path = dumps.of_values(tmp_path / "refused.dump", book.values)
    for group in ("", GROUP):
        with pytest.raises(FileUnusable, match=f"group '{GROUP}'.*{how}"):
            dump_state.read(str(path), group)


def test_a_broken_dump_is_refused(dump: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.dump"
    broken.write_bytes(dump.read_bytes()[:-40])
    with pytest.raises(FileUnusable, match=r"cut off|does not fit"):
        dump_state.read(str(broken))
    with pytest.raises(FileUnusable, match="no record"):
        dump_state.read(str(dumps.of_values(tmp_path / "empty.dump", [])))


def test_a_tape_is_a_list_that_begins_late() -> None:
    tape = OffsetList(1_000_000_000, [1, 2], 0)
    tape.append(3)
    assert (len(tape), tape[1_000_000_002], tape[-1], tape[7]) == (1_000_000_003, 3, 3, 0)
    tape[1_000_000_000] = 9
    tape[5] = 9
    assert (tape[1_000_000_000], tape[5]) == (9, 0)
    for wrong in (lambda: tape.insert(0, 1), lambda: tape.__delitem__(0)):
        with pytest.raises(TypeError):
            wrong()
