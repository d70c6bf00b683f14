"""The targets of `--to` and their offsets; names of authors; the history of pauses."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from marshal_py.admin.plans.operation import Author
from marshal_py.admin.plans.position import resolve, target_of
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.cli.changes import seconds
from marshal_py.client.values.position_text import Facts, Point, parse, parse_fixed, print_table
from marshal_py.errors import InvalidOption, PositionOutOfRange
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import ReleaseGroup
from marshal_py.transport.ports import Bounds
from tests.support.differential_log import GROUP, DifferentialLog

A, B = TopicPartition("orders", 0), TopicPartition("orders", 1)
POSITIONS = {A: 50, B: NONE}
FACTS = Facts({A: Bounds(10, 100), B: Bounds(0, 0)}, {A: 44}, {A: 60})


def resolved(to: str | int | None, tp: TopicPartition, shift_by: int | None = None) -> int:
    return resolve(target_of(to, shift_by, GROUP), [tp], POSITIONS, FACTS)[tp]


def test_committed_offsets_of_one_partition_are_of_the_past_too() -> None:
    """M5: a topic that was created again does not take the offsets of the deleted one."""
    assert target_of("committed", None, GROUP).of_the_past
    assert target_of('{"orders": {"0": 23, "1": "committed"}}', None, GROUP).of_the_past
    assert not target_of('{"orders": {"0": 23, "1": -2}}', None, GROUP).of_the_past


def test_a_table_has_no_offset_beyond_the_greatest() -> None:
    with pytest.raises(InvalidOption, match="line 1 must name an offset of at most"):
        parse("orders,0,9999999999999999999")


def test_an_int_is_an_offset_and_a_datetime_is_refused_with_its_text() -> None:
    assert parse(5) == parse("5") == (Point("offset", 5), {})
    with pytest.raises(InvalidOption, match="'2025-01-31T00:00:00'"):
        parse(datetime(2025, 1, 31))  # what people write


def test_errors_name_what_was_given(tmp_path: Path) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("topic,partition,offset\n", encoding="utf-8")
    with pytest.raises(InvalidOption, match=r"empty\.csv.*names no partition"):
        parse(str(empty), "to")
    with pytest.raises(
        InvalidOption, match=r"committed:blue.*of group 'blue'.*committed:blue\|earliest or committed:blue\|latest"
    ):
        resolved("committed:blue", B)


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("earliest", Point("earliest")),
        ("latest", Point("latest")),
        ("latest-25", Point("latest", 25)),
        ("0", Point("offset", 0)),
        ("1738324800000", Point("offset", 1_738_324_800_000)),
        ("9223372036854775807", Point("offset", 2**63 - 1)),
        ("committed", Point("committed")),
        ("committed|earliest", Point("committed", otherwise="earliest")),
        ("committed:blue", Point("committed", group="blue")),
        ("committed:blue|latest", Point("committed", group="blue", otherwise="latest")),
        ("committed:a|b:c|earliest", Point("committed", group="a|b:c", otherwise="earliest")),
        ("2024-03-01T12:00:00Z", Point("time", 1_709_294_400_000)),
        ("2024-03-01T12:00:00", Point("time", 1_709_294_400_000)),
        ("2024-03-01T13:00:00+01:00", Point("time", 1_709_294_400_000)),
        ("2024-03-01", Point("time", 1_709_251_200_000)),
        ("2h ago", Point("ago", 7_200_000)),
        ("1.5 d ago", Point("ago", 129_600_000)),
        ("30m-ago", Point("ago", 1_800_000)),
        ("-5m", Point("ago", 300_000)),
    ],
)
def test_what_people_write(text: str, point: Point) -> None:
    """The same for `start`, for `--to` and for a backfill, which knows no group."""
    assert parse(text) == parse(text, "to") == (point, {})
    if point.kind == "committed":
        with pytest.raises(InvalidOption, match="those of a group"):
            parse_fixed(text, "until")
    else:
        assert parse_fixed(text, "until").rest == point


WRONG = [
    "",
    "-1",
    "late",
    "latest-",
    "latest--1",
    "1e3",
    "9223372036854775808",
    "2 hours ago",
    "h ago",
    "5m",
    "-5",
    "-5m ago",
]


WRONG += ["committed|", "committed|first", "committed:", "committed:|latest", "latest|earliest", "committedx"]


@pytest.mark.parametrize("text", WRONG)
def test_what_nobody_should_write(text: str) -> None:
    with pytest.raises(InvalidOption, match=r"to=.*latest-N, .*2h ago.*committed:GROUP.*\|earliest or \|latest"):
        parse(text, "to")


@pytest.mark.parametrize(
    ("target", "position"),
    [
        ("earliest", 10),
        ("latest", 100),
        ("latest-3", 97),
        ("latest-1000", 10),
        ("77", 77),
        (77, 77),
        ("committed", 44),
        ("committed:blue|earliest", 44),
        ("2024-03-01", 60),
        ("3m ago", 60),
        ("10", 10),
        ("100", 100),
    ],
)
def test_a_target_becomes_an_offset(target: str | int, position: int) -> None:
    assert resolved(target, A) == position


def test_a_shift_goes_from_the_position() -> None:
    assert resolved(None, A, -5) == 45
    assert resolved(None, A, 50) == 100
    with pytest.raises(InvalidOption, match="no position yet"):
        resolved(None, B, 1)


@pytest.mark.parametrize(("to", "shift_by"), [(None, None), ("earliest", 1)])
def test_a_target_is_a_place_or_a_shift(to: str | None, shift_by: int | None) -> None:
    with pytest.raises(InvalidOption, match="either `to` or `shift_by`"):
        target_of(to, shift_by, GROUP)


@pytest.mark.parametrize(("to", "shift_by", "position"), [("9", None, 9), ("101", None, 101), (None, 51, 101)])
def test_what_the_partition_does_not_have_is_refused_with_what_it_has(
    to: str | None, shift_by: int | None, position: int
) -> None:
    """M3: with the valid range."""
    with pytest.raises(PositionOutOfRange, match="valid are 10 to 100") as caught:
        resolved(to, A, shift_by)
    assert caught.value.position == position


def test_an_empty_partition_has_one_position() -> None:
    assert resolved("earliest", B) == resolved("2024-03-01", B) == resolved("committed|latest", B) == 0
    with pytest.raises(InvalidOption, match="no committed offset"):
        resolved("committed", B)


def offsets_in(text: str) -> dict[TopicPartition, int]:
    return {tp: point.number for tp, point in parse(text, "to", group=GROUP).named.items()}


def test_a_table_goes_out_and_comes_back(tmp_path: Path) -> None:
    positions = {A: 7, B: 0, TopicPartition('a,"b', 3): 9}
    assert offsets_in(print_table(positions)) == positions
    assert print_table({A: 7}) == "orders,0,7\n"
    file = tmp_path / "positions.csv"
    file.write_text(print_table(positions))
    assert offsets_in(str(file)) == positions
    with_group = f'"{GROUP}",orders,0,7\n\n{GROUP},orders,1,8\n'
    assert offsets_in(with_group) == {A: 7, B: 8}
    assert offsets_in("topic,partition,offset\norders,0,7") == {A: 7}
    file.write_text("topic,partition,offset\norders,0,7", encoding="utf-8-sig")
    assert offsets_in(str(file)) == {A: 7}
    assert offsets_in('{"orders": {"0": 7, "1": 8}}') == {A: 7, B: 8}
    with pytest.raises(InvalidOption, match="does not name orders:1"):
        resolve(target_of(str(print_table({A: 7})), None, GROUP), [A, B], POSITIONS, FACTS)


@pytest.mark.parametrize("topic", ["topic", "TOPIC"])
def test_the_first_line_of_a_topic_named_topic_is_no_heading(topic: str) -> None:
    positions = {TopicPartition(topic, 0): 5, TopicPartition(topic, 1): 7}
    assert offsets_in(print_table(positions)) == positions
    assert offsets_in(f"{GROUP},{topic},0,5") == {TopicPartition(topic, 0): 5}
    assert offsets_in(f"GROUP,TOPIC,PARTITION,OFFSET\n{GROUP},{topic},0,5") == {TopicPartition(topic, 0): 5}


BROKEN = ["orders,0", "orders,x,1", "orders,0,-1", "orders,0,1\norders,0,2", "g2,orders,0,1", "topic", "nowhere.csv"]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_table_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match=r"^to="):
        parse(text, "to", group=GROUP)


def test_an_author_fits_into_a_record() -> None:
    """M1: however long the names are, and whatever they are made of; the part that is unique stays."""
    for user, host in [("u" * 300, "h"), ("ü" * 200, "h" * 200), ("a b", "c d")]:
        author = Author.of(user, host, "marshal_py 0.1.0", b"\x01\x02\x03\x04")
        assert len(author.by.encode()) <= 255
        assert author.by.endswith(" run 01020304")
        assert author.by.startswith(author.who)
        assert " " not in author.who
        other = Author.of(user, host, "marshal_py 0.1.0", b"\x01\x02\x03\x05")
        assert other.is_also(author.by)
        assert not other.wrote(author.by)
        assert author.wrote(author.by)
    assert not Author.of("alice", "desk", "t", b"1234").is_also("alice@desk2 t run 31323334")


def test_the_ledger_knows_the_running_pause() -> None:
    """M2: who, why, how long yet; and whether waiting or a will ended the last one."""
    book, pause_history = DifferentialLog(), PauseHistory(GROUP)

    def say(record: ReleaseGroup) -> int:
        offset = book.must(record)
        return offset

    def look() -> PauseHistory:
        found = PauseHistory(GROUP)
        fresh = DifferentialLog(start=False)
        for value in book.values:
            found.read(fresh.put(value))
        return found

    assert pause_history.left_s(0) == -1
    first = say(ReleaseGroup(-1, -1, 5_000, 0, 10_000, "why", "bob"))
    known = look()
    pause = known.running(book.group)
    assert pause is not None
    assert (pause.token, pause.by, pause.reason) == (first, "bob", "why")
    assert known.left_s(4_000) == 6
    assert known.left_s(99_000) == 0
    say(ReleaseGroup(first, -1, 0, 5_000, by="member"))
    known = look()
    assert known.running(book.group) is None
    assert (known.ended_by, known.waited_out) == ("member", True)
    second = say(ReleaseGroup(book.group.pause_change, -1, 5_000))
    say(ReleaseGroup(second, second, 0, by="carol"))
    assert (look().ended_by, look().waited_out) == ("carol", False)


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("500ms", 0.5), (" 2 s ", 2)])
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "10", "s", "-1s", "1d", "1s2m"])
def test_no_durations(text: str) -> None:
    with pytest.raises(Exception, match="is no duration"):
        seconds(text)
