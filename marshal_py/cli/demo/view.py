"""What the demo shows: a line for each event and, in a terminal, below them who owns each partition at this moment.

Where there is no terminal it prints the totals now and then instead. It decides nothing.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from marshal_py.cli.demo.verdict import Totals

COLOURS: Final = {"consumer-1": "cyan", "consumer-2": "magenta", "consumer-3": "green", "consumer-4": "yellow"}
LINE_EVERY_S: Final = 2.0  # a line with the totals where nothing can be drawn


def picture(totals: Totals) -> Text:
    """Returns two lines: each partition in the colour of its owner with the owner's number, and the totals."""
    text = Text()
    text.append("partition ", style="dim")
    for number in range(totals.partitions):
        text.append(f"{number:^5}", style="dim")
    text.append("\nconsumer  ", style="dim")
    for number in range(totals.partitions):
        owner = totals.owners.get(number)
        mark = " - " if owner is None else f" {owner.worker.rpartition('-')[2]} "
        text.append(mark, "bold red" if owner is None else f"black on {COLOURS[owner.worker]}").append("  ")
    return text.append("\n").append(str(totals), style="dim")


class View:
    """Prints to one console. It is a context manager: leaving it gives the terminal back."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._open = ExitStack()
        self._began = self._line_due_s = time.monotonic()

    def __enter__(self) -> View:
        if self.console.is_terminal:
            self._open.enter_context(self._live)
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.close()

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """Prints what has happened, with the seconds since the beginning."""
        self.console.print(f"{self.seconds():5.1f} s  {text}", soft_wrap=not self.console.is_terminal)

    def draw(self, totals: Totals) -> None:
        """Shows who owns what now."""
        if self.console.is_terminal:
            self._live.update(picture(totals), refresh=True)
        elif time.monotonic() >= self._line_due_s:
            self._line_due_s = time.monotonic() + LINE_EVERY_S
            self.say(str(totals))
