"""Shows a running demo: a live table in a terminal, plain lines elsewhere. Changes nothing."""

from __future__ import annotations

import sys
from collections import Counter, deque
from types import TracebackType
from typing import Final, Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from marshal_py.cli.demo.totals import Totals

EVENTS_SHOWN: Final = 8  # with twelve partitions this fits a terminal of 24 lines
LINE_EVERY_S: Final = 2.0
COLOURS: Final = ("cyan", "magenta", "yellow", "green", "blue", "white")


class View(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, at_s: float, text: str) -> None:
        """Shows an event that happened `at_s` seconds into the demo."""

    def show(self, at_s: float, totals: Totals) -> None:
        """Shows the totals as of `at_s` seconds into the demo."""


def summary(totals: Totals) -> str:
    shares = Counter(claim.worker for claim in totals.owners.values())
    owners = " ".join(f"{worker}:{count}" for worker, count in sorted(shares.items()))
    lag = sum(totals.lag(partition) for partition in range(totals.partitions))
    return f"produced {len(totals.acknowledged)}  handled {len(totals.handled)}  lag {lag}  {owners}"


class LinesView:
    """Shows the demo as plain lines, for pipes and log files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._due_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def event(self, at_s: float, text: str) -> None:
        print(f"{at_s:5.1f} s  {text}", file=self._stream, flush=True)

    def show(self, at_s: float, totals: Totals) -> None:
        if at_s >= self._due_s:
            self._due_s = at_s + LINE_EVERY_S
            self.event(at_s, summary(totals))


class LiveView:
    """Shows the demo as a live table, for terminals."""

    def __init__(self, console: Console) -> None:
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._colours: dict[str, str] = {}
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def event(self, at_s: float, text: str) -> None:
        self._events.append(f"{at_s:5.1f} s  {text}")

    def show(self, at_s: float, totals: Totals) -> None:
        table = Table(box=None, pad_edge=False)
        for name in ("partition", "owner", "next", "end", "lag"):
            table.add_column(name, justify="left" if name == "owner" else "right")
        for partition in range(totals.partitions):
            claim = totals.owners.get(partition)
            table.add_row(
                str(partition),
                self._named(claim.worker) if claim else Text("nobody", "dim"),
                str(totals.next_offset[partition]),
                str(totals.end[partition]),
                str(totals.lag(partition)),
            )
        self._live.update(
            Group(Text(f"{at_s:5.1f} s  {summary(totals)}", "bold"), table, Text("\n".join(self._events)))
        )

    def _named(self, worker: str) -> Text:
        colour = self._colours.setdefault(worker, COLOURS[len(self._colours) % len(COLOURS)])
        return Text(worker, colour)


def make_view(json_wanted: bool) -> View:
    """Returns a live table if the output is a terminal, else plain lines.

    With --json the view goes to stderr, because stdout is for the result alone.
    """
    stream = sys.stderr if json_wanted else sys.stdout
    return LiveView(Console(file=stream)) if stream.isatty() else LinesView(stream)
