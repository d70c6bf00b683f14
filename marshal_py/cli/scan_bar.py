"""A progress bar on stderr for a question that reads for longer than a second; only on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SILENT_S: Final = 1.0  # a shorter question shows no bar


class ScanBar:
    """Draws the progress that a Topic reports. `hide` removes the bar, before something else is printed."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._bar: Progress | None = None

    def show(self, read: int, wanted: int) -> None:
        """Draws that `read` of `wanted` offsets are read."""
        if self._bar is None:
            if time.monotonic() - self._began_s < SILENT_S or not sys.stderr.isatty():
                return
            columns = TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=read, total=wanted)

    def hide(self) -> None:
        """Removes the bar. The next one appears a second later."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._began_s = time.monotonic()
