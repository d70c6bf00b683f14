"""A terminal that one command has for itself: pictures on it, keys from it, and afterwards all as it was before.

Ctrl-C stays a signal, and so does ctrl-Z, which gives the terminal back until `fg`. It knows nothing of what is shown.
"""

from __future__ import annotations

import codecs
import errno
import logging
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from rich.console import Console, ConsoleDimensions
from rich.live import Live
from rich.text import Text

ESCAPE_S: Final = 0.05  # the bytes of one key come together; an Esc without more is the key Esc
READ_BYTES: Final = 4_096
WOKEN: Final = (signal.SIGTSTP, signal.SIGWINCH)

_SEQUENCE: Final = re.compile(r"\x1b(?:\[[0-9;]*[@-~]|O[@-~])|[^\x1b]|\x1b(?!\[[0-9;]*$|O?$)", re.DOTALL)
_NAMED: Final = {
    **{
        f"\x1b{lead}{letter}": name
        for lead in "[O"
        for letter, name in {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end"}.items()
    },
    **{"\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[1~": "home", "\x1b[4~": "end"},
    **{"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x1b": "esc"},
}


def keys_of(text: str) -> tuple[list[str], str]:
    """Returns the keys that a terminal has sent, and the beginning of one that has not come whole. A letter is its own
    name; a key that has none here is left out."""
    found, at = [], 0
    while (match := _SEQUENCE.match(text, at)) is not None:
        key, at = match[0], match.end()
        if key in _NAMED or key.isprintable():
            found.append(_NAMED.get(key, key))
    return found, text[at:]


def scrolled(top: int, key: str, lines: int, room: int) -> int:
    """Returns the first line of a text that is shown after a key. `room`: how many lines are."""
    page = max(1, room - 1)
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page, "home": -lines, "end": lines}
    return max(0, min(lines - room, top + steps.get(key, 0)))


def cut(lines: Sequence[Text], width: int, height: int) -> list[Text]:
    """Returns lines of exactly this width, as many as there is room for."""
    shown = list(lines[:height])
    for line in shown:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis", pad=True)
    return shown


@contextmanager
def no_log_lines() -> Iterator[None]:
    """Keeps the library's log off the screen, which has no line for it: what a user needs of it is in the picture."""
    logger, handler = logging.getLogger("marshal_py"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class Terminal:
    """The terminal of stdin and stdout. It is a context manager. Only `wake` may be called by other threads."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._shown: list[Text] = []
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""
        self._stop = False  # ctrl-Z was pressed
        self._open = ExitStack()

    def __enter__(self) -> Terminal:
        with ExitStack() as opened:
            self._stdin = sys.stdin.fileno()
            self._woken, self._wakes = os.pipe()
            for end in (self._woken, self._wakes):
                os.set_blocking(end, False)
                opened.callback(os.close, end)
            opened.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False))
            for number in WOKEN:
                opened.callback(signal.signal, number, signal.signal(number, self._signalled))
            opened.enter_context(no_log_lines())
            self._kept: list[Any] = termios.tcgetattr(self._stdin)
            opened.callback(self._give_back)
            self._take()
            self._open = opened.pop_all()
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        self._open.close()
        if isinstance(error, OSError) and error.errno == errno.EIO:
            raise KeyboardInterrupt from error  # the terminal is gone

    def _signalled(self, number: int, _frame: object) -> None:
        self._stop = self._stop or number == signal.SIGTSTP

    def _take(self) -> None:
        tty.setcbreak(self._stdin)
        self._live = Live(
            self._picture(),
            console=self.console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def _give_back(self) -> None:
        live, self._live = self._live, None
        with suppress(OSError, termios.error):  # of a terminal that is gone
            try:
                if live is not None:
                    live.stop()
            finally:
                termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._kept)

    def size(self) -> tuple[int, int]:
        """Returns the columns and the lines that there are now, whatever the environment says."""
        self.console.size = ConsoleDimensions(*os.get_terminal_size(self._stdin))
        return self.console.size

    def draw(self, lines: Sequence[Text]) -> None:
        """Shows lines, cut to the size of the terminal."""
        self._shown = cut(lines, *self.size())
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)

    def _picture(self) -> Text:
        return Text("\n", no_wrap=True, overflow="crop").join(self._shown)

    def wake(self) -> None:
        """Ends the `keys` that another thread waits in."""
        with suppress(OSError):  # the pipe is full, so it ends anyway; or closed
            os.write(self._wakes, b"\0")

    def keys(self, wait_s: float) -> list[str]:
        """Returns the keys that were pressed; [] after `wait_s`, when it was woken, and when the size has changed.
        Raises KeyboardInterrupt if the terminal is gone."""
        deadline, found = time.monotonic() + wait_s, list[str]()
        while not found:
            left_s = ESCAPE_S if self._rest else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._stdin, self._woken], [], [], left_s)
            if self._stdin in ready:
                data = os.read(self._stdin, READ_BYTES)
                if not data:
                    raise KeyboardInterrupt  # the terminal is gone
                found, self._rest = keys_of(self._rest + self._decode(data))
            elif not ready and self._rest:
                found, self._rest = ["esc"], ""
            if self._woken in ready:
                os.read(self._woken, READ_BYTES)
                self._stop_for_a_while()
                break
            if not ready:
                break
        return found

    def _stop_for_a_while(self) -> None:
        """Stops the process, as ctrl-Z does, and returns when it continues."""
        if not self._stop:
            return
        self._give_back()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._stop = False
        self._take()
