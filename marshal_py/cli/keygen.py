"""`marshal keygen`: a key of somebody who administers groups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from msgspec import Struct

from marshal_py.cli import output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import CommonOptions, command
from marshal_py.client.values import keys

EXAMPLE: Final = output.example("marshal keygen ops.key")


class Key(Struct, frozen=True):
    """A key. `public`: its public half, in hex; `file`: where the private half is."""

    public: str
    file: str


@command
@prints(Key)
def keygen(
    options: CommonOptions, file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, for you alone.")]
) -> None:
    """Make a key for --sign-with, and print its public half, for `marshal groups update --admin-key`.

    FILE gets the private half: keep it secret. It is not encrypted.
    """
    public = keys.generate(file)
    options.print_result(Key(public, str(file)), public)
