"""The script `marshal`, as far as it runs before the library is imported.

It stands beside the library, so that nothing of that is imported before. Until the command line takes the signals
(marshal_py/cli/__init__.py), they end the process: there is nothing to give up yet, and a traceback out of an import
would tell nobody anything.
"""

from __future__ import annotations

import os
import signal
from typing import Final

# `timeout`, systemd and Kubernetes end a program by SIGTERM, a terminal that closes by SIGHUP.
INTERRUPTING: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


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


def _end(number: int, _: object) -> None:
    os._exit(128 + number)
