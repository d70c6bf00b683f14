"""The script `marshal`, as far as it runs before the library is imported.

It stands beside the library, so that nothing of that is imported before. Until the command line takes the signals
(marshal_py/cli/__init__.py), they end the process: there is nothing to give up yet, and a traceback out of an import
would tell nobody anything.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Final

# `timeout`, systemd and Kubernetes end a program by SIGTERM, a terminal that closes by SIGHUP.
INTERRUPTING: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
ASKING: Final = "_MARSHAL_COMPLETE"  # in the environment, while a shell asks what it can offer after TAB
ANSWER_S: Final = 1.0  # so long somebody waits who has pressed TAB


def main() -> None:
    """Entry point of the `marshal` script."""
    end_by_signals()
    from marshal_py.cli import main

    main()


def end_by_signals() -> list[signal.Signals]:
    """Has these signals end the process with 128 plus their number, also process 1, which no default action ends.

    Returns those that do so now. One that somebody has taken before, or ignores as `nohup` does, stays as it is.
    """
    free = (signal.SIG_DFL, signal.default_int_handler, _end)
    taken = [number for number in INTERRUPTING if signal.getsignal(number) in free]
    for number in taken:
        signal.signal(number, _end)
    return taken


def answer_soon() -> None:
    """If a shell asks, ends this process when it has no answer after ANSWER_S, and discards what it writes to
    stderr."""
    if os.environ.get(ASKING, "").startswith("complete"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        late = threading.Timer(ANSWER_S, os._exit, (0,))
        late.daemon = True
        late.start()


def _end(number: int, _: object) -> None:
    os._exit(128 + number)
