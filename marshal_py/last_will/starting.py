"""The start of `marshal run`: no signal that ends a program is lost, or half obeyed, while it is on its way.

The command line parses the words, then becomes the small process of `runner.py`. Signals that come in between stay
pending: process 1, which no default action ends, gets them too. If one came, the command is not started.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Final

from marshal_py.last_will import connecting

ENDING: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
_held: frozenset[int] = frozenset()


def hold() -> None:
    """Blocks the signals that end a program, until the runner takes them."""
    global _held
    _held = ENDING - signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def become(program: Sequence[str]) -> None:
    """Replaces this process, which has all of the library in memory, by the runner of the program."""
    words = connecting.command("run", *(str(int(number)) for number in sorted(_held)), "--", *program)
    os.execv(words[0], words)
