"""How commands print tables, and how those end that go on until ctrl-C."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest

import marshal_py.cli
from marshal_py.admin.plans import operation
from marshal_py.admin.views.group_info import PositionInfo
from marshal_py.cli import output

# Who prints no table: a progress bar, the demo's live view, and messages, whose lines have no greatest width.
OTHERS = {"output.py", "get.py"}


def test_one_place_decides_how_wide_a_table_is() -> None:
    """Each console of its own was 80 columns wide in a pipe, and cut its table."""
    folder = Path(marshal_py.cli.__file__).parent
    makers = {path.name for path in folder.rglob("*.py") if re.search(r"\bConsole\(", path.read_text(encoding="utf-8"))}
    assert makers == OTHERS


@pytest.mark.parametrize("stderr", [False, True])
def test_a_table_in_a_pipe_shows_every_value_as_it_is(monkeypatch: pytest.MonkeyPatch, stderr: bool) -> None:
    """Also one that rich would take for markup or for the name of an emoji."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr" if stderr else "stdout", written)
    values = ["[red]", ":smile:", "x" * 300]
    output.print_table("abc", [values], stderr=stderr)
    assert written.getvalue().splitlines()[1].split() == values


@contextmanager
def _closing(closed: list[bool], *numbers: int) -> Iterator[None]:
    try:
        yield
    finally:
        for number in numbers:
            signal.raise_signal(number)
        closed.append(True)


@pytest.fixture
def pythons_own() -> Iterator[None]:
    """Python's own handler of ctrl-C, as in a program of its own: a SparkContext of another test leaves another."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_own")
def test_a_second_signal_does_not_end_the_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    try:
        with output.until_interrupted(), _closing(closed, signal.SIGINT):
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("ctrl-C ends it")
        assert closed == [True]
        signal.signal(signal.SIGINT, before)
        monkeypatch.setattr(operation, "SAME_S", 0.0)  # so the second one is another one: the clean-up may hang
        with output.until_interrupted(), _closing(closed, signal.SIGINT):
            signal.raise_signal(signal.SIGINT)
        assert closed == [True]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_own")
def test_without_a_signal_nothing_stays_changed() -> None:
    before = signal.getsignal(signal.SIGINT)
    with output.until_interrupted():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with output.until_interrupted(False):
        assert signal.getsignal(signal.SIGINT) is before


def test_numbers_stand_below_each_other() -> None:
    with redirect_stdout(io.StringIO()) as shown:
        output.print_table(("end", "time", "name", "nobody"), [(7, "9 s", "7a", None), (1200, "10.5 s ago", "b", None)])
    assert [line.rstrip() for line in shown.getvalue().splitlines()] == [
        "  end        time  name  nobody",
        "    7         9 s  7a         -",
        " 1200  10.5 s ago  b          -",
    ]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [100, 80, 60, 30])
def test_a_number_is_never_broken(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Its first half, with the other one a line below, reads as a number of its own."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")  # without colours
    names = "topic", "partition", "owner", "position", "end", "lag", "per second", "time", "oldest", "+/s"
    row = "customer-orders", 3, "billing-7f9c4b-x2k", 18273645, 18274645, 1000, 12.5, "80 s", "125d", "+1.2M"
    with redirect_stdout(_Terminal()) as shown:
        output.print_table(names, [row])
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert any(re.search(r" 3 .* 18273645 +18274645 +1000 +12\.5 +80 s +125d +\+1\.2M$", line) for line in lines), lines
    assert columns < 80 or max(map(len, lines)) <= columns


def test_a_column_is_as_wide_as_a_terminal_shows_it() -> None:
    with redirect_stdout(io.StringIO()) as shown:
        output.print_table(("group", "lag"), [("\u8ba2\u5355", 1), ("orders", 2)])
    assert shown.getvalue().splitlines() == [" group   lag", " \u8ba2\u5355      1", " orders    2"]


def test_a_name_moves_no_cursor() -> None:
    with redirect_stdout(io.StringIO()) as shown:
        output.print_table(["client"], [["\x1b[31mred\nline"], ["grün"]])
    assert shown.getvalue().split() == ["client", "\\x1b[31mred\\nline", "grün"]


def test_partitions_that_follow_each_other_are_a_range() -> None:
    names = [f"orders:{number}" for number in (11, 9, 10, 2, 0)]
    assert output.ranges([*names, "a-1:b:3"]) == "a-1:b:3, orders:0, orders:2, orders:9-11"
    assert output.ranges(f"orders:{number}" for number in range(100)) == "orders:0-99"
    assert output.ranges([]) == ""


def test_csv_has_every_field() -> None:
    rows = [PositionInfo("orders", 0, None, 1, "a", 7, 'why "so"'), PositionInfo("orders", 1, 5, 0, None, None, None)]
    with redirect_stdout(io.StringIO()) as shown:
        output.print_csv(PositionInfo.__struct_fields__, rows)
        output.print_csv(["claims", "paused", "topics"], [{"c": ("orders:0", "orders:1"), "p": True, "t": {"a": 1}}])
        output.print_csv(["text"], [{"text": "a\rb"}])
        output.print_csv(["empty"], [])
    assert shown.getvalue().endswith('text\n"a\rb"\nempty\n')
    found = list(csv.reader(shown.getvalue().split("\n")))[:5]
    assert found == [
        ["topic", "partition", "position", "generation", "owner", "session", "parked"],
        ["orders", "0", "", "1", "a", "7", 'why "so"'],
        ["orders", "1", "5", "0", "", "", ""],
        ["claims", "paused", "topics"],
        ["orders:0 orders:1", "true", '{"a": 1}'],
    ]


def test_a_wide_table_has_every_field() -> None:
    assert output.wide_cells({"last_offset": None, "claims": ["orders:0", "orders:1"], "names": [], "ok": False}) == {
        "last offset": None,
        "claims": "orders:0-1",
        "names": None,
        "ok": "false",
    }


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_is_lost_is_known_all_the_same() -> None:
    """Python raises KeyboardInterrupt wherever it is, also at the end of an object, where nobody can catch it."""

    class Ends:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pyspark, in another test, sets its own
    try:
        with output.until_interrupted() as interrupted:
            assert not interrupted()
            Ends()
            assert interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


def _write(path: Path, error: BaseException | None = None) -> None:
    with output.opened(path, force=True) as file:
        file.write(b"new")
        file.flush()
        if error is not None:
            raise error


def test_a_file_is_replaced_once_the_result_is_whole(tmp_path: Path) -> None:
    path, link = tmp_path / "a.dump", tmp_path / "link"
    path.write_bytes(b"old")
    path.chmod(0o600)
    link.symlink_to(path)
    with pytest.raises(KeyboardInterrupt):
        _write(link, KeyboardInterrupt())
    assert (path.read_bytes(), sorted(tmp_path.iterdir())) == (b"old", [path, link])
    _write(link)
    assert (path.read_bytes(), path.stat().st_mode & 0o777, link.is_symlink()) == (b"new", 0o600, True)
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_a_pipe_is_written_as_it_is() -> None:
    reading, writing = os.pipe()
    _write(Path(f"/dev/fd/{writing}"))
    os.close(writing)
    with open(reading, "rb") as read:
        assert read.read() == b"new"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(output.CommandFailed, match=r"a\.dump' cannot be written: No such file"):
        _write(tmp_path / "missing" / "a.dump")
