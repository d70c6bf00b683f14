"""How commands print: results on stdout, everything else on stderr, an error as one line and an exit code."""

from __future__ import annotations

import csv
import errno
import io
import json
import logging
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import typer

from marshal_py.cli.documents import Failure, plain
from marshal_py.errors import MarshalError

if TYPE_CHECKING:
    from rich.console import Console

FAILED: Final = 1
PIPE_WIDTH: Final = 100_000  # of a table that nobody sees in a terminal: its lines are as long as their values
PADDING: Final = 2  # columns of a terminal, beside each cell
TEXT_LEAST: Final = 8  # columns of a text that is wrapped: narrower ones nobody reads
NAME_LEAST: Final = 4  # the same, of the name above numbers
INTERRUPTED: Final = 130  # 128 + SIGINT, as for a C program that ctrl-C has ended
BROKEN_PIPE: Final = 141  # 128 + SIGPIPE, as for a C program whose reader has gone
DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_QUOTED_OR_NAME: Final = re.compile(
    r"""(?<!\w)b?(?P<quote>['"])(?:\\.|(?!(?P=quote)).)*(?P=quote)"""
    r"""|(?<![\w'./-])(?P<name>[a-z]\w*)(?:=True\b|=(?=[\s,:;)]|$)|(?P<equals>=))?"""
)
_NUMBER: Final = re.compile(  # also with its unit, and as `marshal top` has it: +1.2M, 45s, 2+1
    r"-|[-+]?\d+(\.\d+)?(e[+-]\d+)?([kMGTsmhd]|\+\d+| (ms|s|min|h|days))?( ago)?"
)
_PARTITION: Final = re.compile(r".+:\d+")
SIZES_S: Final = (("days", 86_400), ("h", 3_600), ("min", 60))


class CommandFailed(MarshalError):
    """A command could not do its work, for a reason that only the command line knows."""


def example(line: str) -> str:
    """Returns the end of a command's help text: an example. A test runs each of them (tests/cli/test_examples.py)."""
    return f"\b\nExample:\n  {line}"  # \b: not wrapped, so that it can be copied


@contextmanager
def error_reporting(options: Mapping[str, str], as_json: bool = False) -> Iterator[None]:
    """Turns an error of this library, or of a full disk, into one line on stderr and exit code 1; ctrl-C into 130.

    `options`: by the name that an argument has in Python, the command's option for it. The line names the options, and
    ends with the error's notes: what the command had done.
    """

    def failed(error: BaseException, text: str, code: int = FAILED) -> typer.Exit:
        text = "; ".join([text, *getattr(error, "__notes__", ())])
        if as_json:
            say_failure(type(error).__name__, text, code, getattr(error, "retriable", False))
        else:
            say(f"marshal: {text}")
        return typer.Exit(code)

    try:
        yield
        sys.stdout.flush()
    except MarshalError as error:
        code = INTERRUPTED if isinstance(error.__cause__, KeyboardInterrupt) else FAILED
        raise failed(error, " ".join(_with_options(str(error), options).split()), code) from error
    except KeyboardInterrupt as error:
        raise failed(error, f"interrupted{f'; {error}' if str(error) else ''}", INTERRUPTED) from error
    except BrokenPipeError as error:
        close_stdout()  # its reader has gone (`| head`)
        raise typer.Exit(BROKEN_PIPE) from error
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_ERRORS:
            raise
        close_stdout()
        raise failed(
            error,
            f"the output cannot be written ({error.strerror}); what the command has done stays done: look before you "
            f"run it again",
        ) from error


def check_free(path: Path, force: bool) -> None:
    """Raises CommandFailed if the file of a result is there and nobody said --force."""
    if path.is_file() and not force:
        raise CommandFailed(f"{str(path)!r} is there; --force replaces it")


@contextmanager
def opened(path: Path, force: bool) -> Iterator[BinaryIO]:
    """Opens a file for a result. Raises CommandFailed if it cannot, or if the file is there and nobody said --force.
    The file is there, or replaced, once the result is whole; meanwhile its name ends with .part."""
    check_free(path, force)
    direct = path.exists() and not path.is_file()  # as a pipe or a device
    whole = path.resolve()  # what a link leads to
    part = path if direct else whole.with_name(whole.name + ".part")
    try:
        file = part.open("wb")
    except OSError as error:
        raise CommandFailed(f"{str(path)!r} cannot be written: {error.strerror}") from error
    if direct:
        with file:
            yield file
        return
    try:
        with file:
            yield file
        if whole.exists():
            part.chmod(stat.S_IMODE(whole.stat().st_mode))
        part.replace(whole)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def close_stdout() -> None:
    """Lets nothing more be written to stdout, which takes nothing: Python would try again, and complain, at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_failure(error: str, text: str, exit_code: int, retriable: bool = False) -> None:
    """Prints on stderr, as one line of JSON, why a command fails."""
    say(json.dumps(plain(Failure(error, text, retriable, exit_code)), ensure_ascii=False))


def _with_options(text: str, options: Mapping[str, str]) -> str:
    """Returns an error's text, in which options stand for arguments: `max_bytes=0` is `--max-bytes 0`. What is in
    quotes stays as it is, because it is the user's."""

    def named(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in options or ("_" not in name and found[0] == name):
            return found[0]  # something in quotes, or a word of the sentence
        return options[name] + (" " if found["equals"] else "")

    return _QUOTED_OR_NAME.sub(named, text)


@contextmanager
def until_interrupted(goes_on: bool = True) -> Iterator[Callable[[], bool]]:
    """Surrounds a command that runs until ctrl-C, which ends it with exit code 0. Does nothing if not `goes_on`. Gives
    what tells whether it came: a KeyboardInterrupt may be raised where it is lost, as in the end of an object.

    `timeout -s INT` sends two signals at once. The second one must not end what the command does to end in order, so
    within runner.SAME_S of the first one others count as the same.
    """
    if not goes_on:
        yield lambda: False
        return
    from marshal_py.admin.plans import operation

    never = float("inf")
    first_s = never

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal first_s
        now_s = time.monotonic()
        same = first_s != never and now_s - first_s < operation.SAME_S
        first_s = min(first_s, now_s)
        if not same:
            raise KeyboardInterrupt

    interrupting = [one for one in signal.valid_signals() if signal.getsignal(one) is signal.default_int_handler]
    for number in interrupting:
        signal.signal(number, interrupt)
    try:
        with suppress(KeyboardInterrupt):
            yield lambda: first_s != never
    finally:
        if first_s == never:  # else the process ends now, and the other signals may still be on their way
            for number in interrupting:
                signal.signal(number, signal.default_int_handler)


def ago(seconds: float) -> str:
    """Returns how long ago something was, for people: one number and its unit, rounded down."""
    for unit, size_s in SIZES_S:
        if seconds >= 2 * size_s:
            return f"{seconds // size_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


class _Stderr(logging.Handler):
    """Writes log records to whatever stderr is at that moment, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Shows the library's own log (docs/monitoring.md) on stderr: each event of a consumer is one line."""
    logger, handler = logging.getLogger("marshal_py"), _Stderr()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def print_table(columns: Iterable[str], rows: Iterable[Iterable[object]], *, stderr: bool = False) -> None:
    """Prints a table in which nothing is cut off, numbers stand below each other, and a cell of None is shown as -. In
    a terminal too narrow for its numbers it is as in a pipe, because half a number reads as another one."""
    names, texts = list(columns), [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    numbers = [all(_NUMBER.fullmatch(row[at]) for row in texts) for at in range(len(names))]
    longest = [max((_cells(row[at]) for row in texts), default=0) for at in range(len(names))]
    widths = [max(_cells(name), width) for name, width in zip(names, longest, strict=True)]
    file = sys.stderr if stderr else sys.stdout
    if file.isatty():
        from rich.table import Table

        terminal, table = console(stderr=stderr), Table(box=None)
        least = [
            max(figures, min(width, NAME_LEAST)) if number else min(width, TEXT_LEAST)
            for width, figures, number in zip(widths, longest, numbers, strict=True)
        ]
        fitted = _fitted(widths, least, terminal.width - PADDING * len(names))
        if fitted is not None:
            for name, number, width in zip(names, numbers, fitted, strict=True):
                table.add_column(name, justify="right" if number else "left", overflow="fold", width=width)
            for row in texts:
                table.add_row(*row)
            terminal.print(table)
            return
    for line in (names, *texts):  # rich, which wraps lines, takes a second for thousands of them
        padded = []
        for cell, number, width in zip(line, numbers, widths, strict=True):
            blank = " " * (width - _cells(cell))
            padded.append(blank + cell if number else cell + blank)
        print(" " + "  ".join(padded), file=file)


def _cells(text: str) -> int:
    """Returns how many columns of a terminal a text takes: some characters take two, others none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _fitted(widths: Sequence[int], least: Sequence[int], room: int) -> list[int] | None:
    """Returns the widths, the greatest ones reduced until all fit; None if the `least` ones do not."""
    if sum(least) > room:
        return None
    found = [min(width, room) for width in widths]
    for _ in range(sum(found) - room):
        found[max((at for at in range(len(found)) if found[at] > least[at]), key=found.__getitem__)] -= 1
    return found


def print_csv(fields: Iterable[str], rows: Iterable[Any]) -> None:
    """Prints documents as CSV, below the names of their fields. Null is empty, and a list has spaces between its
    entries."""
    cells: Iterator[list[object]] = ([_csv_cell(cell) for cell in row.values()] for row in map(plain, rows))
    for line in chain([list[object](fields)], cells):
        text = io.StringIO()
        csv.writer(text, lineterminator="\r\n").writerow(line)  # so that a cell with either of them is quoted
        print(text.getvalue().removesuffix("\r\n"), flush=True)


def _csv_cell(value: Any) -> object:
    return " ".join(map(str, value)) if isinstance(value, list) else _text(value)


def printable(text: str) -> str:
    """Returns a text without what would move a terminal's cursor: a client id may hold anything."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def figure(value: float) -> str:
    """Returns a number to three decimals, without an exponent."""
    return f"{round(value, 3):.15g}"


def wide_cells(row: Any) -> dict[str, object]:
    """Returns all fields of a document, as the cells of a table."""
    return {name.replace("_", " "): _cell(value) for name, value in plain(row).items()}


def _cell(value: Any) -> object:
    if isinstance(value, list):
        return (
            ranges(value) if all(map(_PARTITION.fullmatch, map(str, value))) else ", ".join(map(str, value))
        ) or None
    return None if value is None else _text(value)


def _text(value: Any) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | dict) else value


def ranges(partitions: Iterable[str]) -> str:
    """Returns partitions like `orders:0` for people: those that follow each other as `orders:0-99`."""
    runs: list[tuple[str, int, int]] = []
    for topic, number in sorted((topic, int(number)) for topic, _, number in (tp.rpartition(":") for tp in partitions)):
        if runs and runs[-1][0] == topic and runs[-1][2] == number - 1:
            runs[-1] = (topic, runs[-1][1], number)
        else:
            runs.append((topic, number, number))
    return ", ".join(f"{topic}:{first}" + (f"-{last}" if last > first else "") for topic, first, last in runs)


def console(*, stderr: bool = False) -> Console:
    """Returns where commands print tables: a terminal wraps long values, and a pipe or file has long lines. A name may
    hold anything, also what rich would take for its markup."""
    from rich.console import Console

    width = None if (sys.stderr if stderr else sys.stdout).isatty() else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def say(line: str) -> None:
    """Prints one line for people on stderr: stdout is for the result."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Prints one document (documents.py) as JSON on one line, flushed at once so that the next program of a pipe sees
    it."""
    print(json.dumps(plain(value), ensure_ascii=False), flush=True)
