"""The targets of `--to` and their offsets; names of authors; the history of pauses."""

from __future__ import annotations

import pytest

from marshal_py.admin.plans.author import Author
from marshal_py.admin.plans.targets import Facts, Target, parse, parse_table, print_table, resolve, shift
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.cli.changes import seconds
from marshal_py.errors import InvalidOption, PositionOutOfRange
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import ReleaseGroup
from tests.support.differential_log import GROUP, DifferentialLog

A, B = TopicPartition("orders", 0), TopicPartition("orders", 1)
FACTS = Facts({A: 50, B: NONE}, {A: 10, B: 0}, {A: 100, B: 0}, {A: 44}, {A: 60})


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("earliest", Target("earliest")),
        ("latest", Target("latest")),
        ("latest-25", Target("latest", 25)),
        ("0", Target("offset", 0)),
        ("9223372036854775807", Target("offset", 2**63 - 1)),
        ("committed", Target("committed")),
        ("2024-03-01T12:00:00Z", Target("time", 1_709_294_400_000)),
        ("2024-03-01T12:00:00", Target("time", 1_709_294_400_000)),
        ("2024-03-01T13:00:00+01:00", Target("time", 1_709_294_400_000)),
        ("2024-03-01", Target("time", 1_709_251_200_000)),
    ],
)
def test_what_people_write(text: str, target: Target) -> None:
    assert parse(text) == target


@pytest.mark.parametrize("text", ["", "-1", "late", "latest-", "latest--1", "1e3", "9223372036854775808", "12:00"])
def test_what_nobody_should_write(text: str) -> None:
    with pytest.raises(InvalidOption, match="latest-N"):
        parse(text)


@pytest.mark.parametrize(
    ("target", "position"),
    [
        ("earliest", 10),
        ("latest", 100),
        ("latest-3", 97),
        ("latest-1000", 10),
        ("77", 77),
        ("committed", 44),
        ("2024-03-01", 60),
        ("10", 10),
        ("100", 100),
    ],
)
def test_a_target_becomes_an_offset(target: str, position: int) -> None:
    assert resolve(parse(target), [A], FACTS) == {A: position}


def test_a_shift_goes_from_the_position() -> None:
    assert resolve(shift(-5), [A], FACTS) == {A: 45}
    assert resolve(shift(50), [A], FACTS) == {A: 100}
    with pytest.raises(InvalidOption, match="no position yet"):
        resolve(shift(1), [B], FACTS)


OUTSIDE = [(Target("offset", 9), 9), (Target("offset", 101), 101), (shift(51), 101)]


@pytest.mark.parametrize(("target", "position"), OUTSIDE)
def test_what_the_partition_does_not_have_is_refused_with_what_it_has(target: Target, position: int) -> None:
    """M3: with the valid range."""
    with pytest.raises(PositionOutOfRange, match="valid are 10 to 100") as caught:
        resolve(target, [A], FACTS)
    assert caught.value.position == position


def test_an_empty_partition_has_one_position() -> None:
    assert resolve(parse("earliest"), [B], FACTS) == resolve(parse("2024-03-01"), [B], FACTS) == {B: 0}
    with pytest.raises(InvalidOption, match="no committed offset"):
        resolve(parse("committed"), [B], FACTS)


def test_a_table_goes_out_and_comes_back() -> None:
    positions = {A: 7, B: 0, TopicPartition('a,"b', 3): 9}
    assert dict(parse_table(print_table(positions), GROUP).table) == positions
    assert print_table({A: 7}) == "orders,0,7\n"
    with_group = f'"{GROUP}",orders,0,7\n\n{GROUP},orders,1,8\n'
    assert dict(parse_table(with_group, GROUP).table) == {A: 7, B: 8}
    assert dict(parse_table("topic,partition,offset\norders,0,7", GROUP).table) == {A: 7}


BROKEN = ["", "orders,0", "orders,x,1", "orders,0,-1", "orders,0,1\norders,0,2", "g2,orders,0,1"]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_table_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        parse_table(text, GROUP)


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
