"""`marshal top`: all groups on one screen that changes with them, the ones in trouble first; also of the past.

picture.py says what keys do and draws, source.py has the rows from the log and the cluster.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Any, Final

import typer
from msgspec import Struct

from marshal_py.cli import explain, output
from marshal_py.cli.documents import Time, prints, time_of
from marshal_py.cli.options import ReadOptions, check_seconds, check_time, command, require_group
from marshal_py.cli.terminal import Terminal
from marshal_py.cli.top import picture
from marshal_py.cli.top.picture import Frame, GroupTrend, Order, Rows, Screen, Size
from marshal_py.cli.top.source import Source, change
from marshal_py.errors import MarshalError
from marshal_py.log.observer import Observer
from marshal_py.transport.clock import SystemClock

EXAMPLE: Final = output.example("marshal top --once")
LEAST_S: Final = 0.2  # a refresh of thousands of partitions takes a third of it
LATE_S: Final = 5.0  # an answer takes so long only if something is wrong
LOOK_S: Final = 1.0  # how often the screen looks whether the rows are late


class TopPicture(Struct, frozen=True):
    """The groups at a time, the ones in trouble first."""

    coordination_topic: str
    at: Time | None
    groups: list[GroupTrend]


@command
@prints(TopPicture)
def top(
    options: ReadOptions,
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP", help="Begin with this one; none of the others.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture as a table, as --json does as JSON.")] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=LEAST_S, callback=check_seconds, help="Between two pictures.")
    ] = 1.0,
    write: Annotated[
        bool, typer.Option("--write", help="Let p, r and d pause a group, end its pause, step an owner down.")
    ] = False,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", callback=check_time, help="As it was then; left and right move the time."),
    ] = None,
) -> None:
    """Watch all groups on one screen, the ones in trouble first. ? shows the keys.

    It reads the log and the ends of data topics, and joins no group. The change of the lag is that of the last
    minute; with --once, of one interval. With --at the lag is that of that time; of a dump, what the owners wrote.
    """
    live = not (once or options.as_json)
    if live and not (sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"):
        raise output.CommandFailed("top needs a terminal; --once prints one picture")
    if write and (options.dump is not None or at is not None):
        raise typer.BadParameter("--write changes the present, not the past")
    open_observer, times_ms = _reader(options)
    asked_ms = at_ms = options.moment(at)
    if times_ms is not None:
        at_ms = times_ms[1] if at_ms is None else min(max(at_ms, times_ms[0]), times_ms[1])
    with output.until_interrupted(live) as interrupted, closing(Source(open_observer, group, at_ms)) as source:
        source.look()
        observer = source.observer
        if at is not None and "time_lookup" not in observer.admin.capabilities:
            raise output.CommandFailed("this broker cannot look up times; a dump can")
        if times_ms is None and asked_ms is not None:
            times_ms = observer.oldest_ms(group), SystemClock().now().wall_ms
            source.at_ms = min(max(asked_ms, times_ms[0]), times_ms[1])
        if not live and times_ms is not None and asked_ms is not None and asked_ms < times_ms[0]:
            what = "log" if options.dump is None else "dump"
            raise output.CommandFailed(f"--at {at} lies before the {what}, which begins at {time_of(times_ms[0])}")
        if group is not None:
            require_group(observer, group)
        if not live:
            if at_ms is None:
                time.sleep(interval)
            _print(options, source)
            return
        with Terminal(output.console()) as terminal:
            _Top(options, source, terminal, interval, write, times_ms).run(group, interrupted)


def _reader(options: ReadOptions) -> tuple[Callable[[], Observer], tuple[int, int] | None]:
    """Returns what opens a reader of the log and, of a dump, its first and last time."""
    if options.dump is None:
        return options.observer, None
    with options.observer() as observer:
        times_ms = [record.timestamp_ms for record in observer.records(observer.bounds(observer.logs_of(None)))] or [0]
    return options.observer, (min(times_ms), max(times_ms))


def _print(options: ReadOptions, source: Source) -> None:
    seen = source.look()
    rows = picture.groups(Screen(), Rows(seen.groups))
    if options.as_json:
        output.print_json(TopPicture(source.observer.topic, time_of(seen.as_of_ms), rows))
        return
    names = [one.name.lower() for one in picture.COLUMNS]
    cells = ([row.group, *(one.text(row) for one in picture.COLUMNS), picture.why(row)] for row in rows)
    output.print_table(["group", *names, "why"], cells)


class _Top:
    """The screen, and what threads bring. They set one field each, and wake the terminal."""

    def __init__(
        self,
        options: ReadOptions,
        source: Source,
        terminal: Terminal,
        interval_s: float,
        writes: bool,
        times_ms: tuple[int, int] | None,
    ) -> None:
        self._options, self._source, self._terminal, self._interval_s = options, source, terminal, interval_s
        self._writes, self._times_ms = writes, times_ms
        self._seen = self._shown = source.seen
        self._lines: list[str] = []
        self._note = ""
        self._changing: threading.Thread | None = None
        self._drawn: object = None

    def run(self, group: str | None, interrupted: Callable[[], bool]) -> None:
        screen = Screen(at_ms=self._source.at_ms)
        if group is not None:
            screen = screen._replace(view="group", group=group)
        self._source.start(self._interval_s, self._see)
        try:
            while not interrupted():
                if not screen.frozen:
                    self._shown = self._seen
                size = Size(*self._terminal.size())
                self._draw(screen, size)
                for key in self._terminal.keys(LOOK_S):
                    self._note = ""
                    before, (screen, order) = screen, picture.press(screen, key, self._rows(), size)
                    if order is not None and self._obey(order, screen):
                        return
                    if screen.view == "partition" and screen.at_ms != before.at_ms and screen.tp is not None:
                        self._explain(Order("explain", screen.group, screen.tp), screen.at_ms)
                self._source.ask(screen.group if screen.view != "groups" else "", screen.at_ms)
        finally:
            self._source.close()

    def _see(self, seen: Any) -> None:
        self._seen = seen
        self._terminal.wake()

    def _rows(self) -> Rows:
        seen = self._shown
        return Rows(seen.groups, seen.members, self._lines, self._writes, self._times_ms)

    def _draw(self, screen: Screen, size: Size) -> None:
        seen, problem = self._shown, self._seen.problem
        late_s = SystemClock().now().wall_ms / 1000 - self._seen.as_of_ms / 1000 - self._interval_s
        if not problem and self._times_ms is None and late_s > LATE_S:
            problem = "the cluster does not answer"
        stale = f"stale since {f'{time_of(self._seen.as_of_ms)}'[11:19]}: {problem}" if problem else ""
        frame = Frame(seen.as_of_ms, stale, self._note)
        now = screen, size, frame, id(seen), tuple(self._lines)
        if now != self._drawn:
            self._drawn = now
            self._terminal.draw(picture.draw(screen, self._rows(), frame, size))

    def _obey(self, order: Order, screen: Screen) -> bool:
        """Begins what a key asks for. Returns whether it ends the command."""
        busy = self._changing is not None and self._changing.is_alive()
        match order.kind:
            case "quit":
                if not busy:
                    return True
                self._note = "a change is under way; ctrl-C leaves it to the group"
            case "refused":
                self._note = order.text
            case "explain":
                self._explain(order, screen.at_ms)
            case _ if busy:
                self._note = "another change is under way"
            case _:
                self._note = f"{order.text} yes..."
                self._changing = self._begin(lambda: self._set_note(change(self._options, order)))
        return False

    def _explain(self, order: Order, at_ms: int | None) -> None:
        assert order.tp is not None
        tp, lines = order.tp, ["reading the log..."]
        self._lines = lines  # of this question: the answer to an older one, which comes later, nobody sees

        def answer() -> None:
            try:
                lines[:] = explain.sentences(self._options, order.group, tp, at_ms)
            except MarshalError as error:
                lines[:] = [" ".join(str(error).split())]
            self._terminal.wake()

        self._begin(answer)

    def _begin(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except MarshalError as error:
                self._set_note(str(error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _set_note(self, text: str) -> None:
        self._note = " ".join(text.split())
        self._terminal.wake()
