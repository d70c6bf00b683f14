"""`marshal run`: starts a program and is the witness of its consumers, as process 1 of a container or anywhere else."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from marshal_py.cli import output
from marshal_py.cli.options import command
from marshal_py.last_will import connecting, death

EXAMPLE: Final = output.example("marshal run -- python app.py")
# Options behind the program's name are the program's, with or without --.
CONTEXT_SETTINGS: Final = {"allow_interspersed_args": False}


@command
def run(
    program: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The program and its arguments.")],
) -> None:
    """Run a program, and end the sessions of its consumers at once if their process dies.

    Other consumers then own its partitions within milliseconds, not after two heartbeat intervals. The program's
    consumers find this process by themselves. It passes signals on, reaps orphans if it is process 1, and ends with the
    status of the program, or with 128 plus the number of the signal that ended it.
    """
    if why := death.unsupported():
        raise output.CommandFailed(f"marshal run cannot prove here that a process has died: {why}")
    connecting.become(program)
