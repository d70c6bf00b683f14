"""A log as a picture: each kind of span and mark, records that come back as they were, colours, and few bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from marshal_py.history.explain import describe
from marshal_py.history.picture import (
    HUES,
    NOBODY,
    PAUSED,
    THE_GROUP,
    Mark,
    Picture,
    PictureReader,
    Span,
    colours_of,
    page,
)
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.member.advisory import PROBE
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    ClaimState,
    Evict,
    Heartbeat,
    Leave,
    Move,
    Note,
    SeekingPartition,
    SetPosition,
    StepDown,
)
from tests.support.busy_group import busy_group
from tests.support.differential_log import GROUP, TOPIC, DifferentialLog

BEGIN_MS = 1_000_000
BYTES_MAX = 1_000_000 / 100_000  # of a page per record


def time_of(offset: int) -> int:
    return BEGIN_MS + 1_000 * offset


def drawn(values: Sequence[bytes | None], from_ms: int = 0, **finish: Any) -> Picture:
    """The picture of a log with a record per second."""
    reader = PictureReader(World(), GROUP, from_ms, time_of(len(values) - 1))
    for offset, value in enumerate(values):
        reader.read(offset, time_of(offset), value)
    return reader.finish(**finish)


def spans_of(picture: Picture, lane: int = 0) -> list[Span]:
    return [span for span in picture.spans if span.lane == lane]


def at(picture: Picture, offset: int) -> int:
    return time_of(offset) - picture.from_ms


def marks_of(picture: Picture, kind: str) -> list[Mark]:
    return [mark for mark in picture.marks if mark.kind == kind]


def test_owners_gaps_and_what_ended_them() -> None:
    book = DifferentialLog()
    first, epoch = book.owner()
    second = book.join("d")
    evicted = book.must(Evict(first, first, 2_000, "d"))
    taken = book.claim(second, start=-1)
    left = book.must(Leave(second))
    picture = drawn(book.values)
    assert picture.from_ms == time_of(first), "the group's first record; the log begins earlier"
    assert picture.lanes == ["t:0", "t:1", "t:2", "t:3"]
    assert [(owner.client, owner.session, owner.ended) for owner in picture.owners] == [
        ("c", first, "evict"),
        ("d", second, "leave"),
    ]
    assert picture.owners[0].sign_ms == at(picture, first)
    appeared = epoch - 1
    assert [(span.owner, span.from_offset, span.to_offset) for span in spans_of(picture)] == [
        (NOBODY, appeared, epoch),
        (0, epoch, evicted),
        (NOBODY, evicted, taken),
        (1, taken, left),
        (NOBODY, left, None),
    ]
    owned = spans_of(picture)[1]
    assert (owned.from_ms, owned.to_ms) == (at(picture, epoch), at(picture, evicted))
    assert [(mark.kind, mark.lane, mark.offset) for mark in picture.marks if mark.kind != "other"] == [
        ("join", THE_GROUP, first),
        ("join", THE_GROUP, second),
        ("evict", THE_GROUP, evicted),
        ("leave", THE_GROUP, left),
    ]


def test_a_gap_in_a_pause_is_none_and_moves_are_marked() -> None:
    book = DifferentialLog()
    session, epoch = book.owner()
    free = book.release(session, epoch, 150)
    token = book.pause()
    version = book.partition().version
    moves = (Move(TOPIC, 0, version, 7), Move(TOPIC, 1, -1, 9))
    moved = book.must(SetPosition(token, moves, True, "alice"))
    picture = drawn(book.values)
    (pause,) = picture.pauses
    assert (pause.owner, pause.from_offset, pause.to_offset) == (PAUSED, token, moved)
    assert [(span.owner, span.from_ms, span.to_ms) for span in spans_of(picture)[2:]] == [
        (NOBODY, at(picture, free), at(picture, token)),
        (PAUSED, at(picture, token), at(picture, moved)),
        (NOBODY, at(picture, moved), None),
    ]
    assert marks_of(picture, "rewind") == [Mark(0, "rewind", at(picture, moved), moved, "t:0: 150 -> 7")]
    assert marks_of(picture, "move") == [Mark(1, "move", at(picture, moved), moved, "t:1: none -> 9")]
    assert token in [mark.offset for mark in marks_of(picture, "other")]


def test_a_time_without_a_sign_of_life_is_drawn_and_the_probes_after_it_are_no_marks() -> None:
    """A broker that was down leaves no other trace: nobody is evicted, and no partition moves."""
    book = DifferentialLog()
    session, _ = book.owner()
    before = book.last
    probe = book.must(Note(session, PROBE, text="1"))
    alive = book.must(Heartbeat(session, 1))
    late = book.must(Heartbeat(session, 2))  # it was sent before
    book.must(Heartbeat(session, 3))
    book.must(Leave(session, "bye"))
    book.join("d")
    reader = PictureReader(World(), GROUP, 0, time_of(book.last) + 300_000)
    for offset, value in enumerate(book.values):
        later_ms = 30_000 * (offset > before) + 30_000 * (offset > probe)
        later_ms += 120_000 * (offset == book.last)  # without consumers it is not quiet
        reader.read(offset, time_of(offset) + later_ms * (offset != late), value)
    picture = reader.finish()
    began, ended = time_of(before) - picture.from_ms, time_of(alive) + 60_000 - picture.from_ms
    last_ms = time_of(book.last) + 180_000 - picture.from_ms
    assert [(span.from_ms, span.to_ms, span.to_offset) for span in picture.quiet] == [
        (began, ended, alive),
        (last_ms, time_of(book.last) + 300_000 - picture.from_ms, None),
    ]
    assert probe not in [mark.offset for mark in picture.marks]


def test_seeks_losses_notes_and_marks_of_a_caller() -> None:
    book = DifferentialLog()
    session, epoch = book.owner(AT_MOST_ONCE)
    lost = book.must(Note(session, "offset_lost", TOPIC, 0, 50, 60))
    note = book.must(Note(session, "handler_stuck", TOPIC, 2, 1, 2))
    down = book.must(StepDown(session, -1))
    picture = drawn(book.values, marks=[Mark(THE_GROUP, "fault", time_of(4), None, "the disk is full")])
    assert marks_of(picture, "lost") == [Mark(0, "lost", at(picture, lost), lost, "t:0: 50 to 59, offset_lost")]
    others = {(mark.lane, mark.offset) for mark in marks_of(picture, "other")}
    assert {(0, lost), (2, note), (THE_GROUP, down)} <= others
    assert marks_of(picture, "fault") == [Mark(THE_GROUP, "fault", at(picture, 4), None, "the disk is full")]

    book = DifferentialLog()
    session, epoch = book.owner()
    book.must(Heartbeat(session, 1, (ClaimState(epoch, 130, 5, 3),)))
    seek = book.must(SeekingPartition(session, epoch, 50))
    book.must(Leave(session))
    picture = drawn(book.values)
    assert [mark.offset for mark in marks_of(picture, "seek")] == [seek]
    before, after = (span for span in spans_of(picture) if span.owner >= 0)
    assert (before.to_offset, after.from_offset) == (seek, seek)


def test_a_part_of_the_time() -> None:
    """What began before is drawn from its beginning; what ended before is not there."""
    book = DifferentialLog()
    old = book.join("old")
    book.must(Leave(old))
    session, epoch = book.owner()
    since = book.must(Heartbeat(session, 1))
    until = book.must(Heartbeat(session, 2))
    values = book.values[: until + 1]
    picture = drawn(values, time_of(since))
    assert (picture.from_ms, picture.to_ms) == (time_of(since), 1_000)
    assert [(owner.client, owner.to_ms) for owner in picture.owners] == [("c", None)]
    (span,) = spans_of(picture)
    assert (span.owner, span.from_ms, span.to_ms) == (0, time_of(epoch) - picture.from_ms, None)
    assert picture.marks == []
    assert len(picture.records) == 2
    assert picture.moments[0] == 0
    assert picture.moments[-1] == picture.to_ms


def test_a_world_that_was_not_folded_from_the_beginning() -> None:
    """Since when its claims last is unknown."""
    book = DifferentialLog()
    session, _ = book.owner()
    book.must(Heartbeat(session, 1))
    world = World()
    for offset, value in enumerate(book.values):
        apply(world, offset, value)
    reader = PictureReader(world, GROUP, time_of(100), time_of(200))
    picture = reader.finish()
    assert [(span.owner, span.from_ms) for span in spans_of(picture)] == [(0, None)]
    assert [(owner.client, owner.from_ms) for owner in picture.owners] == [("c", None)]


def test_records_come_back_with_their_sentences() -> None:
    log = list(busy_group(400, 6))
    reader, world = PictureReader(World(), GROUP, 0, log[-1].timestamp_ms), World()
    sentences = []
    for record in log:
        reader.read(record.offset, record.timestamp_ms, record.value)
        verdict = apply(world, record.offset, record.value)
        if verdict.group:
            sentences.append((record.offset, record.timestamp_ms, type(verdict.record).__name__, describe(verdict)))
    picture = reader.finish()
    offset, time_ms, found = 0, picture.from_ms, []
    for more, later, number, *numbers in picture.records:
        form = picture.forms[number]
        offset, time_ms = offset + more, time_ms + later
        found.append((offset, time_ms, form.type, joined(form.text, numbers)))
        fields = json.loads(joined(form.fields, numbers[len(form.text) - 1 :]))
        assert "" not in fields.values()
    assert found == sentences
    assert json.loads(joined(form.fields, numbers[len(form.text) - 1 :])).keys() >= {"session", "claims"}


def joined(pieces: list[str], numbers: list[int]) -> str:
    return "".join(f"{piece}{number}" for piece, number in zip(pieces, [*numbers[: len(pieces) - 1], ""], strict=True))


def test_positions_and_lags_at_the_moments() -> None:
    book = DifferentialLog()
    session, epoch = book.owner()
    book.must(Heartbeat(session, 1, (ClaimState(epoch, 130, 5),)))
    book.must(Heartbeat(session, 2, (ClaimState(epoch, 131, 4),)))
    picture = drawn(book.values)
    assert (picture.positions[0][-1], picture.lags[0][-1], picture.lag_of) == (131, 4, "what owners wrote")
    assert picture.lags[1][-1] is None
    looked_up = drawn(book.values, ends_at=lambda tps, times: [dict.fromkeys(tps, 140)] * len(times))
    assert looked_up.lags[0][-1] == 9
    assert looked_up.moments[0] == 1_000, "the first moment before which the group is known"
    assert looked_up.moments[-1] == looked_up.to_ms


def test_a_client_keeps_its_colour() -> None:
    names = [f"worker-{number}" for number in range(3 * HUES)]
    many = colours_of(names)
    assert sorted(many.values()) == list(range(3 * HUES))
    assert {colour % HUES for colour in list(many.values())[:HUES]} == set(range(HUES)), "first the hues alone"
    alone = colours_of(["worker-3", "worker-3"])
    assert alone == {"worker-3": colours_of(["worker-3", "worker-9"])["worker-3"]}


def test_a_record_takes_few_bytes() -> None:
    """A page of 100,000 records has at most 1 MB: it grows by so much with each record."""
    sizes = []
    for count in (2_000, 6_000):
        log = list(busy_group(count, 20))
        reader = PictureReader(World(), GROUP, 0, log[-1].timestamp_ms)
        for record in log:
            reader.read(record.offset, record.timestamp_ms, record.value)
        picture = reader.finish()
        sizes.append((len(page("t", [picture]).encode()), len(picture.records)))
    (small, fewer), (large, more) = sizes
    assert (large - small) / (more - fewer) < BYTES_MAX
    assert small < 60_000 + fewer * BYTES_MAX
    assert msgspec.json.decode(msgspec.json.encode(picture), type=Picture) == picture
