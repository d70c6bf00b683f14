"""The command line: `marshal`. One file per command or noun: it reads options, calls another package and prints.

Nothing is decided here. The commands need typer and rich, which the extra `cli` brings; this file does not.

Exit codes: 0 done, 1 refused or failed with a one-line reason on stderr, 2 if the command line cannot be read (3 of
`check`), 130 after ctrl-C, unless the command goes on until then.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from typing import Final

from marshal_command import answer_soon, end_by_signals

_EXTRA: Final = frozenset({"typer", "rich"})  # what the extra `cli` brings


def main() -> None:
    """Runs the command line. Of the script `marshal`, marshal_command is the entry point."""
    _open_streams()
    if sys.argv[1:2] == ["run"]:
        from marshal_py.last_will import connecting  # no other command needs it

        connecting.hold()
    answer_soon()
    interrupted = end_by_signals()  # while it is being imported there is nothing to give up
    try:
        if find_spec("rich") is None:  # which commands import when they need it
            raise ModuleNotFoundError(name="rich")
        from marshal_py.cli.app import COMMANDS, app, load

        if sys.argv[1:2] and sys.argv[1] in COMMANDS:
            load(sys.argv[1])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        print(f"marshal: {missing} is not installed here: pip install 'marshal_py[cli]'", file=sys.stderr)
        sys.exit(2)
    for number in interrupted:  # a tool gives up in order, as by ctrl-C (M9)
        signal.signal(number, signal.default_int_handler)
    app(prog_name="marshal")


def _open_streams() -> None:
    """Has nothing to read, and drops what is written, where the shell has closed stdin, stdout or stderr (`>&-`). A
    connection to the cluster would get the number of such a stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
