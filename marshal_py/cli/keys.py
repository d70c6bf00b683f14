"""`marshal keys`: a key of somebody who administers groups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from msgspec import Struct

from marshal_py.cli import output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import CommonOptions, command
from marshal_py.client.values.options import generate_key, read_key

EXAMPLE: Final = output.example("marshal keys ops.key --generate")


class Key(Struct, frozen=True):
    """A key. `public`: its public half, in hex; `file`: where the private half is."""

    public: str
    file: str


@command
@prints(Key)
def keys(
    options: CommonOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file of the private half: keep it secret.")],
    new: Annotated[
        bool, typer.Option("--generate", help="Make the key, in a file that does not exist. It is not encrypted.")
    ] = False,
) -> None:
    """Print the public half of a key for --sign-with, as `marshal groups update --admin-key` takes it."""
    public = generate_key(file) if new else read_key(file, "FILE").public.hex()
    options.print_result(Key(public, str(file)), public)
