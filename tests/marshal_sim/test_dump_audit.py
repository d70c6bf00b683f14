"""The audit of a dump: its counts, the story of a broken promise, and files that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marshal_py.errors import FileUnusable, ForeignTopic, HistoryTruncated, MarshalError
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import (
    Checkpoint,
    ClaimingPartition,
    ClaimState,
    Evict,
    Heartbeat,
    Note,
    ReleaseGroup,
)
from marshal_py.transport.ports import LogRecord
from marshal_sim.oracle import oracle
from marshal_sim.tools.dump_audit import Audit, audit
from tests.support import dumps, logs
from tests.support.differential_log import GROUP, TOPIC, DifferentialLog

SEED = 0
BEATS = 40


def book_of(
    carry: Callable[[int, Checkpoint | None], Checkpoint | None] = lambda at, carried: carried,
) -> DifferentialLog:
    """An owner whose heartbeats carry digests; a pause in which it lets go."""
    book = DifferentialLog()
    book.world.watched.add(GROUP)
    session, epoch = book.owner()
    for number in range(BEATS):
        carried = carry(number, book.world.checkpoints.get(GROUP))
        book.must(Heartbeat(session, number, (ClaimState(epoch, 101 + number),), digest=carried))
    token = book.pause()
    book.release(session, epoch, 150)
    book.must(ReleaseGroup(token, token, 0))
    book.must(Note(session, "diverged"))
    return book


# --- what is sound


def test_the_log_of_a_run_is_sound_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.dump"
    records = dumps.of_run(path, SEED)
    found = audit(path)
    assert (found.verdict, found.violations, found.first, found.story) == ("ok", 0, None, [])
    assert found.records == len(records)
    world, joined, claimed, evicted = World(), 0, 0, 0
    for record in records:
        verdict = rationalizer.apply(world, record.offset, record.value)
        kind = type(verdict.record).__name__ if verdict.accepted else ""
        joined, claimed, evicted = (
            joined + (kind == "Join"),
            claimed + (kind == "ClaimingPartition"),
            (evicted + (kind == "Evict")),
        )
    assert (found.sessions, found.claims, found.evictions) == (joined, claimed, evicted)
    assert found.live_sessions == sum(len(group.sessions) for group in world.groups.values())
    assert found.handovers > 0
    assert found.takeovers > 0
    assert found.carried_digests > 0
    assert found.digests > found.records // 2, "behind every record, not only at checkpoints"


def test_pauses_moves_and_notes_are_counted(tmp_path: Path) -> None:
    found = audit(dumps.of_values(tmp_path / "log.dump", book_of().values))
    assert (found.pauses, found.claims, found.groups, found.diverged_notes) == (1, 1, 1, 1)


def test_logs_beside_the_first_are_judged_too(tmp_path: Path) -> None:
    rows = logs.topic(5, 3, 120)
    records = [LogRecord(log, offset, value, time_ms) for log, offset, time_ms, _, value in rows]
    found = audit(dumps.write(tmp_path / "three.dump", records, 3))
    assert (found.verdict, found.logs, found.records) == ("ok", 3, 360)


def test_what_is_left_of_a_truncated_log_is_judged_from_its_snapshot(tmp_path: Path) -> None:
    """N9: sessions and claims of before are known from there."""
    rows = logs.with_snapshots(logs.topic(5, 1, 200), 1, 96)
    records = [LogRecord(log, offset, value, time_ms) for log, offset, time_ms, _, value in rows]
    whole = audit(dumps.write(tmp_path / "whole.dump", records))
    cut = audit(dumps.write(tmp_path / "cut.dump", records[90:]))
    assert (whole.verdict, cut.verdict) == ("ok", "ok")
    assert cut.live_sessions == whole.live_sessions
    assert cut.claims <= whole.claims


def test_a_truncated_log_without_a_snapshot_is_refused(tmp_path: Path) -> None:
    """N10: its root is gone too."""
    records = [LogRecord(0, at, value, 0) for at, value in enumerate(book_of().values)]
    with pytest.raises(HistoryTruncated):
        audit(dumps.write(tmp_path / "lost.dump", records[20:]))


# --- what is not


def guilty(found: Audit) -> tuple[str, int, str, str]:
    """The first violation names the promise, the record, its sender and the rule; the story says the same."""
    assert found.first is not None
    assert found.verdict == "violation"
    assert found.violations > 0
    marked = [line for line in found.story if line.startswith(">")]
    assert [f"@{found.first.offset} " in line for line in marked] == [True]
    assert found.first.who in marked[0]
    assert found.first.time in marked[0]
    assert found.first.text in found.story[-2]
    assert f"PROTOCOL.md {found.first.rule}" in found.story[-1]
    return found.first.invariant, found.first.offset, found.first.who, found.first.rule


def test_a_client_that_held_another_state_is_named(tmp_path: Path) -> None:
    """S1, by what its own heartbeat says (G4)."""

    def lie(number: int, carried: Checkpoint | None) -> Checkpoint | None:
        return carried if number != 30 or carried is None else Checkpoint(carried.at, 17, carried.chain, carried.fold)

    book = book_of(lie)
    found = audit(dumps.of_values(tmp_path / "log.dump", book.values))
    assert guilty(found) == ("S1", 4 + 30, "c", "G4")


def test_a_fold_that_breaks_a_rule_is_named_by_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported at the record itself, not at the next checkpoint."""
    path = dumps.of_values(tmp_path / "log.dump", book_of().values)
    rules = list(rationalizer._RULES)
    honest = next(rule for rule in rules if rule is rationalizer._heartbeat)
    rules[rules.index(honest)] = lambda group, offset, record, body: (
        "" if offset == 20 else honest(group, offset, record, body)
    )
    monkeypatch.setattr(rationalizer, "_RULES", tuple(rules))
    assert guilty(audit(path)) == ("S1", 20, "c", "F2")


def test_a_record_that_is_refused_and_changes_something_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F10.1, also where both folds do it: S13 asks the log, not one fold about the other."""
    path = dumps.of_values(tmp_path / "log.dump", book_of().values)
    rules = list(rationalizer._RULES)

    def heart(group: Group, offset: int, _record: Any, _body: bytes) -> str:
        group.pause_change = offset
        group.dirty.add(group)
        return "session"

    def other(group: Any, _fields: dict[str, Any], offset: int, _body: bytes) -> str:
        group.pause_change = offset
        return "session"

    rules[rules.index(rationalizer._heartbeat)] = heart
    monkeypatch.setattr(rationalizer, "_RULES", tuple(rules))
    monkeypatch.setitem(oracle.RULES, "Heartbeat", other)
    assert guilty(audit(path)) == ("S13", 4, "c", "F10.1")


def test_a_claim_in_a_pause_breaks_a_promise_whatever_the_folds_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S11, by the log alone."""
    book = DifferentialLog()
    session, _ = book.owner()
    book.pause()
    book.refuses(ClaimingPartition(session, TOPIC, 1, -1, 100), "paused")
    path = dumps.of_values(tmp_path / "log.dump", book.values)
    rules = list(rationalizer._RULES)
    honest, judge = rationalizer._claim_partition, oracle.RULES["ClaimingPartition"]

    def heart(group: Group, offset: int, record: Any, body: bytes) -> str:
        duration_ms, group.pause_duration_ms = group.pause_duration_ms, 0
        reason = honest(group, offset, record, body)
        group.pause_duration_ms = duration_ms
        return reason

    def other(group: Any, fields: dict[str, Any], offset: int, body: bytes) -> str:
        duration_ms, group.pause_duration_ms = group.pause_duration_ms, 0
        reason = judge(group, fields, offset, body)
        group.pause_duration_ms = duration_ms
        return reason

    rules[rules.index(honest)] = heart
    monkeypatch.setattr(rationalizer, "_RULES", tuple(rules))
    monkeypatch.setitem(oracle.RULES, "ClaimingPartition", other)
    assert guilty(audit(path)) == ("S11", book.last, "c", "F4.1")


def test_a_gap_is_named_and_nothing_behind_it_is_judged(tmp_path: Path) -> None:
    records = [LogRecord(0, at, value, 0) for at, value in enumerate(book_of().values)]
    found = audit(dumps.write(tmp_path / "gap.dump", records[:30] + records[31:]))
    assert found.first is not None
    assert (found.first.invariant, found.first.offset, found.first.rule) == ("S1", 31, "L8")


def test_early_evictions_by_timestamps_are_counted_and_not_judged(tmp_path: Path) -> None:
    """S15 needs clocks that can be trusted: those of the writers cannot."""
    book = DifferentialLog()
    session, _ = book.owner()
    book.must(Evict(session, book.session(session).extended, 5_000))
    found = audit(
        dumps.write(tmp_path / "now.dump", [LogRecord(0, at, value, 5) for at, value in enumerate(book.values)])
    )
    assert (found.verdict, found.evictions, found.short_waits) == ("ok", 1, 1)


# --- files that are no use


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda whole: b"", FileUnusable, "it is empty"),
        (lambda whole: b"PK\x03\x04 a zip", FileUnusable, "no header of a dump"),
        (lambda whole: whole.replace(b'"version":1', b'"version":9', 1), FileUnusable, "the header's sum"),
        (lambda whole: b"".join(whole.splitlines(keepends=True)[:-1]), FileUnusable, "it is cut off"),
        (lambda whole: whole[: len(whole) // 2], FileUnusable, "sum does not fit"),
    ],
)
def test_a_broken_file_is_refused_by_name(
    tmp_path: Path, change: Callable[[bytes], bytes], error: type[MarshalError], says: str
) -> None:
    path = dumps.of_values(tmp_path / "log.dump", book_of().values)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(error) as caught:
        audit(path)
    assert says in str(caught.value)
    assert "marshal log dump" in str(caught.value), "the way out"


def test_a_dump_without_records_or_without_a_beginning_is_refused(tmp_path: Path) -> None:
    envelope_without_genesis = codec.encode(Heartbeat(0, 0), "billing", bytes(16))
    with pytest.raises(ForeignTopic):
        audit(dumps.of_values(tmp_path / "log.dump", [b"garbage"]))
    for values, says in (([], "no record"), ([envelope_without_genesis], "no Genesis")):
        with pytest.raises(FileUnusable, match=says) as caught:
            audit(dumps.of_values(tmp_path / "log.dump", values))
        assert "marshal log dump" in str(caught.value)
        assert json.dumps(str(tmp_path))[1:-1] in str(caught.value)
