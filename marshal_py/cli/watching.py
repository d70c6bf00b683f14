"""`--watch SECONDS`: what a command shows, again and again until ctrl-C; in a terminal in one place, with keys."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from marshal_py.cli import output
from marshal_py.cli.options import ReadOptions, check_seconds
from marshal_py.errors import MarshalError

LEAST_S: Final = 0.1

Every = Annotated[
    float | None,
    typer.Option(
        "--watch",
        metavar="SECONDS",
        min=LEAST_S,
        callback=check_seconds,
        help="Show it again each time so many seconds are over.",
    ),
]


def show(options: ReadOptions, every_s: float | None, print_all: Callable[[], None]) -> None:
    """Calls `print_all`, which prints to stdout, once or until ctrl-C. From the second time on a MarshalError is shown
    and ends nothing."""

    def print_anew() -> None:
        options.close()  # the connections of the last time
        print_all()

    if every_s is None:
        print_all()
    elif options.dump is not None:
        raise typer.BadParameter("a dump does not change: --watch or --dump, not both")
    elif sys.stdin.isatty() and sys.stdout.isatty() and not options.as_json:
        with output.until_interrupted() as interrupted:
            _in_terminal(print_anew, every_s, interrupted)
    else:
        with output.until_interrupted() as interrupted:
            print_all()
            made_s = time.monotonic()
            while not interrupted():
                made_s = _repeat(print_anew, every_s, options.as_json, made_s)


def _repeat(print_all: Callable[[], None], every_s: float, as_json: bool, made_s: float) -> float:
    """Returns when something was shown last, which was `made_s` before."""
    sys.stdout.flush()
    time.sleep(every_s)
    if not as_json:
        print(f"---- {_now()}")
    try:
        print_all()
    except MarshalError as error:
        output.say(f"marshal: {error}; what is shown was so {output.ago(time.monotonic() - made_s)}")
        return made_s
    return time.monotonic()


class _Page(io.StringIO):
    """A piece of a terminal, so that what is printed here looks as it does there."""

    def isatty(self) -> bool:
        return True


def _in_terminal(print_all: Callable[[], None], every_s: float, interrupted: Callable[[], bool]) -> None:
    from rich.text import Text

    from marshal_py.cli.terminal import Terminal, scrolled

    def page() -> list[Text]:
        with redirect_stdout(_Page()) as printed, redirect_stderr(io.StringIO()) as said:
            print_all()
        return list(Text.from_ansi(said.getvalue() + printed.getvalue()).split("\n"))

    lines, head, top, made_s = page(), _now(), 0, time.monotonic()
    next_s = made_s + every_s
    with Terminal(output.console()) as terminal:
        while not interrupted():
            top = scrolled(top, "", len(lines), terminal.size()[1] - 1)  # the page may be shorter than the last one
            terminal.draw([Text(f"{head}  every {every_s:g} s; q quits", style="reverse"), *lines[top:]])
            for key in terminal.keys(max(0.0, next_s - time.monotonic())):
                if key == "q":
                    return
                top = scrolled(top, key, len(lines), terminal.size()[1] - 1)
            if time.monotonic() >= next_s:
                try:
                    lines, head, made_s = page(), _now(), time.monotonic()
                except MarshalError as error:
                    head = f"{head.partition(' ')[0]}, {output.ago(time.monotonic() - made_s)}; stale: {error}"
                next_s = time.monotonic() + every_s


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
