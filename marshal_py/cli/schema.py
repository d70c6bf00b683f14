"""`marshal schema`: the JSON Schema of what commands print with --json."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from marshal_py.cli import output
from marshal_py.cli.app import COMMANDS, load
from marshal_py.cli.documents import Failure, schema_of
from marshal_py.cli.options import command

EXAMPLE: Final = output.example("marshal schema groups ls")
ERROR: Final = "error"  # what every command prints on stderr when it fails


@command
def schema(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="As `groups ls`; `error` is what stderr has.")
    ] = None,
) -> None:
    """Print the JSON Schema of what a command prints with --json; without COMMAND, the names of all of them.

    A command that prints several lines prints a document on each. A document of another kind may come with a newer
    release, and so may another field; none goes away.
    """
    if not words:
        print("\n".join(documents()))
        return
    name = " ".join(words)
    found = documents()
    if name not in found:
        near = difflib.get_close_matches(name, found, 1)
        raise typer.BadParameter(f"{name!r} prints no JSON{f'; did you mean {near[0]!r}?' if near else ''}")
    output.print_json(schema_of(found[name]))


def documents() -> dict[str, tuple[Any, ...]]:
    """Returns by command the types of what it prints."""
    leaves = ((name, one) for top in COMMANDS for name, one in _leaves(top, load(top)))
    return {name: printed for name, one in leaves if (printed := one.callback.prints)} | {ERROR: (Failure,)}


def _leaves(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    for word, inner in getattr(one, "commands", {}).items():
        yield from _leaves(f"{name} {word}", inner)
    if not hasattr(one, "commands"):
        yield name, one
