"""A log as tables: each row against the world at that offset, on logs that reach every rule."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from marshal_py.errors import InvalidOption, LogGap
from marshal_py.history.tables import TABLES, Row
from marshal_py.history.timeline import Timeline
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Evict,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    MessageRange,
    Move,
    Note,
    ReleaseGroup,
    ReleasingPartition,
    SeekingPartition,
    SetPosition,
    StepDown,
    Topology,
)
from tests.support import hostile
from tests.support.differential_log import GROUP, INCARNATION, INTERVAL_MS, TOPIC, DifferentialLog

SEEDS = 40
RECORDS = 250
Tables = dict[str, list[Any]]


def fold(values: Iterable[bytes | None], timeline: Timeline | None = None) -> Tables:
    """All rows of a log with a record per second."""
    timeline = timeline or Timeline(World())
    for value in values:
        timeline.read(timeline.world.next_offset, time_of(timeline.world.next_offset), value)
    return dict(timeline.finish())


def time_of(offset: int) -> int:
    return 1_000_000 + 1_000 * offset


def drawn_log(seed: int, records: int = RECORDS) -> list[bytes | None]:
    """Random records of two groups that fit the world so far, with some garbage among them."""
    rng, book = Random(seed), DifferentialLog(exhaustive=False)
    for _ in range(records):
        name = rng.choice(hostile.GROUPS[:2])
        record = hostile.plausible(rng, book.world, name)
        book.fold(codec.encode(record, name, INCARNATION) if rng.random() < 0.97 else b"garbage")
    return book.values


# --- the rows say what the world said


@pytest.mark.parametrize("seed", range(SEEDS))
def test_rows_agree_with_the_world_at_every_offset(seed: int) -> None:
    """Owners, spans without one, pauses, live sessions and positions agree with the fold after each record."""
    values = drawn_log(seed)
    tables = fold(values)
    world = World()
    owners = {(row.group, row.topic, row.partition, row.epoch): row for row in tables["intervals"]}
    assert len(owners) == len(tables["intervals"])
    positions = {(row.offset, row.group, row.topic, row.partition): row for row in tables["positions"]}
    covers = {
        name: _starts_and_ends(tables[name], first)
        for name, first in (
            ("intervals", "epoch"),
            ("gaps", "from_offset"),
            ("pauses", "from_offset"),
            ("sessions", "session"),
        )
    }
    now: dict[str, set[tuple[Any, ...]]] = {name: set() for name in covers}
    for offset, value in enumerate(values):
        apply(world, offset, value)
        for name, (starts, ends) in covers.items():
            now[name] -= ends.get(offset, set())
            now[name] |= starts.get(offset, set())
        seen = now["intervals"]
        groups = world.groups.items()
        assert {(row[0], row[1], row[2]) for row in seen} == {
            (name, *part.tp) for name, group in groups for part in group.claims.values()
        }
        assert {row[:3] for row in now["gaps"]} == {
            (name, topic, number)
            for name, group in groups
            if not group.deleted
            for topic, known in group.topics.items()
            for number in range(known.count)
            if (name, topic, number) not in {row[:3] for row in seen}
        }
        assert {row[0] for row in now["pauses"]} == {name for name, group in groups if group.paused}
        assert {(row[0], row[3]) for row in now["sessions"]} == {
            (name, session) for name, group in groups for session in group.sessions
        }
        for (at, name, topic, number), row in positions.items():
            if at == offset:
                part = next(p for tp, p in world.groups[name].partitions.items() if tp == (topic, number))
                assert (row.position, row.generation, row.lag, row.in_flight, row.attempts) == (
                    part.position,
                    part.generation,
                    part.lag,
                    part.in_flight,
                    part.attempts,
                )
    for row in tables["standings"]:
        part = next(p for tp, p in world.groups[row.group].partitions.items() if tp == (row.topic, row.partition))
        assert (row.position or -1, row.epoch or -1) == (part.position or -1, part.epoch or -1)


def _starts_and_ends(rows: list[Any], first: str) -> tuple[dict[int, set[Any]], dict[int, set[Any]]]:
    """What begins and what ends at each offset, as (group, topic, partition, offset of the beginning)."""
    starts: dict[int, set[Any]] = {}
    ends: dict[int, set[Any]] = {}
    for row in rows:
        start = getattr(row, first)
        key = (row.group, getattr(row, "topic", ""), getattr(row, "partition", -1), start)
        starts.setdefault(start, set()).add(key)
        if row.to_offset is not None:
            assert row.to_offset > start
            ends.setdefault(row.to_offset, set()).add(key)
    return starts, ends


def test_the_logs_reach_every_table_and_every_cause() -> None:
    """Otherwise the test above could pass on nothing."""
    tables: dict[str, list[Any]] = {name: [] for name in TABLES}
    for seed in range(SEEDS):
        for name, rows in fold(drawn_log(seed)).items():
            tables[name] += rows
    assert all(tables.values()), {name: len(rows) for name, rows in tables.items()}
    ends = {row.ended for row in tables["intervals"]}
    assert ends >= {"release", "leave", "evict", "replaced", "seek", None}
    assert {row.cause for row in tables["gaps"]} >= {"new", "release", "leave", "evict", "replaced"}
    assert {row.cause for row in tables["positions"]} == {"claim", "heartbeat", "grant", "release", "move", "seek"}
    assert {row.ended for row in tables["pauses"]} >= {"resume", "waited", "set_position"}
    assert {row.reason for row in tables["races"]} >= {"held"}
    assert {row.verdict for row in tables["records"]} == {"accepted", "rejected", "ignored"}


@pytest.mark.parametrize("seed", range(8))
def test_digests_are_the_oracles(seed: int) -> None:
    """G1-G3: at every checkpoint they equal the digests of the independent second fold."""
    values = drawn_log(seed)
    book = DifferentialLog(start=False, exhaustive=False)
    digests = {(row.offset, row.group): row for row in fold(values)["digests"]}
    for offset, value in enumerate(values, 1):
        book.put(value)
        for name in book.oracle.groups:
            row = digests.get((offset, name))
            if row is not None:
                assert row.state == f"{book.oracle.state_digest(name):016x}"
                assert row.chain == (f"{book.oracle.chain_digest()[1]:016x}" if offset % 16 == 0 else None)
    assert {at for at, _ in digests} >= set(range(16, len(values), 16))
    assert {name for at, name in digests if at == len(values)} == set(book.oracle.groups)


@pytest.mark.parametrize("seed", range(8))
def test_rows_do_not_depend_on_where_a_reader_paused(seed: int) -> None:
    """`take` may come at any offset."""
    values, rng = drawn_log(seed), Random(seed)
    whole = fold(values)
    pieces: Tables = {name: [] for name in TABLES}
    timeline = Timeline(World())
    for offset, value in enumerate(values):
        timeline.read(offset, time_of(offset), value)
        if rng.random() < 0.1:
            for name, rows in timeline.take().items():
                pieces[name] += rows
    for name, rows in timeline.finish().items():
        pieces[name] += rows
    ends = {row for row in pieces["digests"] if row.offset == len(values)}  # from the checkpoint and from the end
    assert ends == {row for row in whole["digests"] if row.offset == len(values)}
    del pieces["digests"][-len(ends) :], whole["digests"][-len(ends) :]
    assert pieces == whole


def test_a_reader_that_begins_in_the_middle_knows_no_times() -> None:
    """From a world alone: what is open is known, and since when is not."""
    values = drawn_log(3)
    world = World()
    for offset, value in enumerate(values):
        apply(world, offset, value)
    whole, late = fold(values), dict(Timeline(world).finish())
    assert late["standings"] == [row._replace(time_ms=None) for row in whole["standings"]]
    for name, first in (("intervals", "epoch"), ("sessions", "session"), ("gaps", "partition")):
        still = {(r.group, getattr(r, "topic", ""), getattr(r, first)) for r in whole[name] if r.to_offset is None}
        assert {(r.group, getattr(r, "topic", ""), getattr(r, first)) for r in late[name]} == still
        assert all(r.from_time_ms is None for r in late[name])


# --- one story, row by row


def times(row: Row) -> tuple[int | None, ...]:
    return tuple(getattr(row, name) for name in row._fields if name.endswith("time_ms"))


def test_a_take_over_and_a_race() -> None:
    book = DifferentialLog()
    first = book.join("a")
    second, third = book.join("b"), book.join("c")
    topology = book.topology(1)
    epoch = book.claim(first)
    beat = book.must(Heartbeat(first, 1, (ClaimState(epoch, 105, 40, 7),)))
    gone = book.must(Evict(first, beat, 2 * INTERVAL_MS, "b"))
    taken = book.must(ClaimingPartition(second, TOPIC, 0, epoch))
    book.refuses(ClaimingPartition(third, TOPIC, 0, epoch), "held")
    book.refuses(ClaimingPartition(second, TOPIC, 0, epoch), "held")  # a copy of the winning claim is no race
    tables = fold(book.values)
    ended, live = tables["intervals"]
    assert (ended.client, ended.epoch, ended.to_offset, ended.ended, ended.after) == ("a", epoch, gone, "evict", "new")
    assert (ended.from_position, ended.to_position, ended.in_flight) == (100, 105, 7)
    assert (live.client, live.epoch, live.to_offset, live.after) == ("b", taken, None, "evict")
    assert times(ended) == (time_of(epoch), time_of(gone))
    new, after = tables["gaps"]
    assert (new.cause, new.from_offset, new.to_offset, new.next_client) == ("new", topology, epoch, "a")
    assert (after.cause, after.client, after.next_client, after.members) == ("evict", "a", "b", 2)
    assert times(after) == (time_of(gone), time_of(taken), time_of(beat))
    (race,) = tables["races"]
    assert (race.client, race.reason, race.winner_client, race.winner_epoch) == ("c", "held", "b", taken)
    assert [(row.client, row.ended, row.by) for row in tables["sessions"]] == [
        ("a", "evict", "b"),
        ("b", None, ""),
        ("c", None, ""),
    ]
    assert [(row.cause, row.client, row.position, row.lag) for row in tables["positions"]] == [
        ("claim", "a", 100, 0),
        ("heartbeat", "a", 105, 40),
        ("claim", "b", 105, 40),
    ]
    refused = tables["records"][-1]
    assert (refused.type, refused.client, refused.verdict, refused.reason) == (
        "ClaimingPartition",
        "b",
        "rejected",
        "held",
    )


def fold_at(values: Iterable[bytes | None], seconds: dict[int, float]) -> Tables:
    """All rows of a log. `seconds`: by offset, the time since the record before it; 0 for all others."""
    timeline, time_ms = Timeline(World()), 1_000_000
    for offset, value in enumerate(values):
        time_ms += int(1000 * seconds.get(offset, 0))
        timeline.read(offset, time_ms, value)
    return dict(timeline.finish())


def test_time_without_live_members_does_not_count() -> None:
    """A consumer that stops releases first and then leaves; in between it is alive, afterwards nobody is."""
    book = DifferentialLog()
    first = book.join("a")
    book.topology(1)
    epoch = book.claim(first)
    book.release(first, epoch)
    left = book.must(Leave(first))
    second = book.join("b")
    claimed = book.claim(second)
    _, gap = fold_at(book.values, {left: 0.5, second: 61, claimed: 0.25})["gaps"]
    assert (gap.cause, gap.members, gap.to_time_ms - gap.from_time_ms) == ("release", 1, 61_750)
    assert (gap.lived_ms, gap.take_over_ms) == (750, 750)


def test_a_take_over_counts_while_a_member_was_alive() -> None:
    """The dead owner counts as alive until others may evict it; then nobody does until its successor joins."""
    book = DifferentialLog()
    first = book.join("a")
    book.topology(1)
    epoch = book.claim(first)
    beat = book.must(Heartbeat(first, 1, (ClaimState(epoch, 105),)))
    second = book.join("b")
    gone = book.must(Evict(first, beat, 2 * INTERVAL_MS, "b"))
    taken = book.must(ClaimingPartition(second, TOPIC, 0, epoch))
    _, gap = fold_at(book.values, {beat: 1, second: 300, gone: 1.5, taken: 0.25})["gaps"]
    assert gap.to_time_ms - gap.last_sign_time_ms == 301_750
    assert gap.take_over_ms == 2 * INTERVAL_MS + 1_750
    assert gap.lived_ms == 250


@pytest.mark.parametrize("seed", range(0, SEEDS, 4))
def test_the_time_in_which_members_lived_agrees_with_a_count(seed: int) -> None:
    """Compared with a count for each gap: which sessions exist, wrote lately, and are not paused."""
    values, rng = drawn_log(seed), Random(seed)
    times = [1_000_000 + 4_000 * offset + rng.randrange(-20_000, 20_000) for offset in range(len(values))]
    timeline, world = Timeline(World()), World()
    living: dict[str, list[tuple[int, int]]] = {}  # by group: (offset, ms lived up to its record)
    clocks: dict[str, int] = {}
    heard: dict[tuple[str, int], int] = {}
    for offset, value in enumerate(values):
        before = {name: (group.paused, list(group.sessions.values())) for name, group in world.groups.items()}
        verdict = apply(world, offset, value)
        timeline.read(offset, times[offset], value)
        name, record = verdict.group, verdict.record
        if record is None or not verdict.accepted or not name:
            continue
        now = max(times[offset], clocks.get(name, 0))
        paused, sessions = before.get(name, (False, []))
        ends = [heard.get((name, session.id), 0) + 2 * session.join.interval_ms for session in sessions]
        lived = 0 if paused else max(0, min(now, max(ends, default=0)) - clocks.get(name, now))
        history = living.setdefault(name, [(-1, 0)])
        history.append((offset, history[-1][1] + lived))
        clocks[name] = now
        author = offset if isinstance(record, Join) else getattr(record, "session", -1)
        if not isinstance(record, Evict | StepDown):
            heard[name, author] = now

    def lived_by(name: str, offset: int) -> int:
        return max(entry for entry in living[name] if entry[0] <= offset)[1]

    gaps = [gap for gap in timeline.finish()["gaps"] if gap.to_offset is not None]
    assert gaps
    for gap in gaps:
        assert gap.lived_ms == lived_by(gap.group, gap.to_offset) - lived_by(gap.group, gap.from_offset), gap


def test_pauses_moves_and_lost_ranges() -> None:
    book = DifferentialLog()
    session, epoch = book.owner(AT_MOST_ONCE)
    ranges = (MessageRange(epoch, 1, 2, 3), MessageRange(epoch, 100, 104, 110))  # the first is refused
    book.must(ClaimingMessages(session, ranges))
    book.must(Note(session, "offset_lost", TOPIC, 0, 50, 60))
    book.must(Note(session, "uncommitted", TOPIC, 0, 104, 110))
    book.must(Note(session, "handler_stuck", TOPIC, 0, 1, 2))
    token = book.pause()
    token = book.pause()
    book.release(session, epoch)
    move = book.must(SetPosition(token, (Move(TOPIC, 0, book.partition().version, 7),), True, "alice"))
    again = book.must(ReleaseGroup(book.group.pause_change, -1, 5_000, by="bob"))
    ended = book.must(ReleaseGroup(again, -1, 0, 5_000, by="c"))
    book.must(Leave(session))
    tables = fold(book.values)
    assert [(r.from_position, r.to_position, r.cause) for r in tables["lost"]] == [
        (100, 104, "skipped"),
        (50, 60, "offset_lost"),
        (104, 110, "uncommitted"),
    ]
    assert [(r.renewals, r.ended, r.by, r.to_offset) for r in tables["pauses"]] == [
        (1, "set_position", "", move),
        (0, "waited", "bob", ended),
    ]
    (moved,) = tables["moves"]
    assert (moved.from_position, moved.to_position, moved.generation, moved.by) == (110, 7, 1, "alice")


def test_what_is_given_back() -> None:
    """F6.3: the positions that the log held, one after the other; a Release that was refused ends no interval."""
    book = DifferentialLog()
    session, epoch = book.owner(AT_MOST_ONCE)
    book.must(ClaimingMessages(session, (MessageRange(epoch, 100, 100, 150),)))
    book.refuses(ReleasingPartition(session, epoch, -1, observed=100, give=100), "observed")
    gone = book.must(ReleasingPartition(session, epoch, -1, observed=150, give=120))
    tables = fold(book.values)
    assert [(r.cause, r.position) for r in tables["positions"]] == [("claim", 100), ("grant", 150), ("release", 120)]
    (row,) = tables["intervals"]
    assert (row.from_position, row.to_position, row.to_offset, row.ended) == (100, 120, gone, "release")


def test_what_a_session_that_ended_may_have_lost() -> None:
    """F3.3: a row of its own, at the record that ended the session; none for what was handled."""
    book = DifferentialLog()
    session, epoch = book.owner(AT_MOST_ONCE)
    book.must(ClaimingMessages(session, (MessageRange(epoch, 100, 100, 150),)))
    book.must(Heartbeat(session, 1, (ClaimState(epoch, 120),)))
    end = book.must(Evict(session, book.last, 2_000, "d"))
    (row,) = fold(book.values)["lost"]
    assert (row.from_position, row.to_position, row.cause, row.offset, row.session) == (
        120,
        150,
        "amo_lost",
        end,
        session,
    )


def test_a_seek_is_an_interval_of_its_own() -> None:
    """F6.6: the owner stays, under another epoch and in a new generation, without a gap."""
    book = DifferentialLog()
    session, epoch = book.owner()
    book.must(Heartbeat(session, 1, (ClaimState(epoch, 130),)))
    at = book.must(SeekingPartition(session, epoch, 50))
    book.must(Leave(session))
    tables = fold(book.values)
    first, second = tables["intervals"]
    assert (first.epoch, first.to_offset, first.ended, first.session) == (epoch, at, "seek", session)
    assert (second.epoch, second.after, second.from_position, second.generation) == (at, "seek", 50, 1)
    assert [row.cause for row in tables["positions"]] == ["claim", "heartbeat", "seek"]
    assert [row.cause for row in tables["gaps"] if row.partition == 0] == ["new", "leave"]


def test_a_recreated_topic() -> None:
    """F9.10: a later move has no old position, because that belonged to another topic."""
    book = DifferentialLog()
    session = book.join()
    at = book.must(Topology(TOPIC, 2, -1, topic_id="one"))
    book.release(session, book.claim(session), 130)
    at = book.must(Topology(TOPIC, 3, at, topic_id="two"))
    token = book.pause()
    book.must(SetPosition(token, (Move(TOPIC, 0, at, 7),), True))
    tables = fold(book.values)
    (moved,) = tables["moves"]
    assert (moved.from_position, moved.to_position, moved.generation) == (None, 7, 2)
    assert {row.partition for row in tables["gaps"]} == {0, 1, 2}


@pytest.mark.parametrize("topic", [TOPIC, ""])
def test_a_deletion_ends_the_claim_of_a_whole_topic_and_of_the_pin(topic: str) -> None:
    """F9.5: one record ends sessions, claims and the pause, and leaves nothing of the group to look up."""
    book = DifferentialLog()
    session, epoch = book.owner()
    cover = book.claim(session, -1, topic=topic)
    token = book.pause()
    book.release(session, epoch, 110)
    deletion = book.must(GroupConfig(-1, token, deleted=True))
    tables = fold(book.values)
    found = {row.epoch: (row.partition, row.ended, row.to_offset, row.to_position) for row in tables["intervals"]}
    assert found == {epoch: (0, "release", deletion - 1, 110), cover: (-1, "deleted", deletion, None)}
    assert [(row.session, row.ended, row.to_offset) for row in tables["sessions"]] == [(session, "deleted", deletion)]
    assert [row.ended for row in tables["pauses"]] == ["deleted"]


def test_only_wanted_tables_are_made() -> None:
    values = drawn_log(1)
    tables = fold(values, Timeline(World(), ["races", "gaps"]))
    whole = fold(values)
    assert tables == {name: whole[name] for name in ("races", "gaps")}
    with pytest.raises(InvalidOption, match="tables='claims' is not allowed: one of records"):
        Timeline(World(), ["claims"])


def test_a_gap_in_the_log_is_no_row_but_an_error() -> None:
    """L8."""
    timeline = Timeline(World())
    timeline.read(0, 0, drawn_log(1)[0])
    with pytest.raises(LogGap):
        timeline.read(2, 0, b"")


def test_a_join_that_was_refused_is_nobodys_session() -> None:
    book = DifferentialLog()
    join = Join("a", bytes(16), 1, INTERVAL_MS, (TOPIC,))
    book.must(join)
    book.refuses(join, "instance")
    row = fold(book.values)["records"][-1]
    assert (row.group, row.client, row.session, row.reason) == (GROUP, "a", None, "instance")
