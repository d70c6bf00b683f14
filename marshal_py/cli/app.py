"""All commands of `marshal`, and their order in its help. A command's module is imported when the command is called."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final, NamedTuple, cast

import typer
from typer.core import CompletionItem, TyperGroup  # type: ignore[attr-defined]  # it has one of its own
from typer.main import get_command, get_group

from marshal_command import ASKING


class Command(NamedTuple):
    """Says where a command is, and what the help shows of it before that is imported. `help`: the first sentence of its
    own help text. `place`: the name of a module (of this package, or of marshal_sim with its whole name), of a function
    in it, and of the function's example; a group of commands is the `app` of its module."""

    help: str
    place: str


COMMANDS: Final = {
    "demo": Command(
        "Watch consumers share twelve partitions while one is killed and one joins, and see whether a message was "
        "lost.",
        "demo demo EXAMPLE",
    ),
    "consume": Command("Consume topics as a member of a group, until ctrl-C.", "consume consume EXAMPLE"),
    "run": Command(
        "Run a program, and end the sessions of its consumers at once if their process dies.", "run run EXAMPLE"
    ),
    "produce": Command(
        "Write each line of stdin as a message, and say how many the cluster has acknowledged.",
        "consume produce PRODUCE_EXAMPLE",
    ),
    "get": Command("Print messages of a topic by offset, time or key.", "get get EXAMPLE"),
    "top": Command("Watch all groups on one screen, the ones in trouble first.", "top top EXAMPLE"),
    "state": Command(
        "Show groups: sessions, claims, positions, lag, pause, policy; or one of these in full.", "state state EXAMPLE"
    ),
    "advisories": Command(
        "Show what happened: claims, releases, evictions, pauses, moves, lost offsets, stuck handlers.",
        "advisories advisories EXAMPLE",
    ),
    "verify": Command(
        "Fold the log twice and compare all digests, including those that consumers wrote into it.",
        "marshal_sim.commands.verify verify EXAMPLE",
    ),
    "doctor": Command(
        "Check the connection, the coordination topic, this client's rights, clocks, versions, groups and growth.",
        "doctor doctor EXAMPLE",
    ),
    "check": Command(
        "Say whether a group is well: exit code 0 ok, 1 warning, 2 critical, 3 unknown.", "doctor check CHECK_EXAMPLE"
    ),
    "exporter": Command("Serve metrics of all groups, from the log, until ctrl-C.", "exporter exporter EXAMPLE"),
    "pause": Command(
        "Pause a group: its consumers finish the messages they have and release all partitions.", "pause pause EXAMPLE"
    ),
    "resume": Command(
        "End a pause: your own, the one that --token names, or with --take-over anybody's.",
        "pause resume RESUME_EXAMPLE",
    ),
    "set-position": Command(
        "Move a live group to other positions: pause it, wait until every partition is free, move, resume.",
        "pause set_position SET_POSITION_EXAMPLE",
    ),
    "evict": Command(
        "End a session that is silent for twice its heartbeat interval, counted from now.",
        "members evict EVICT_EXAMPLE",
    ),
    "explain": Command(
        "Show who owns a partition, its position, and the records that led to this; or what changed in a group.",
        "explain explain EXAMPLE",
    ),
    "timeline": Command(
        "Draw a group's history as a page: who owned each partition, gaps, pauses, moves, members, lag.",
        "timeline timeline EXAMPLE",
    ),
    "snapshot": Command(
        "Write a snapshot of each log, so that earlier records need not be read again.", "log snapshot SNAPSHOT_EXAMPLE"
    ),
    "dead-letters": Command("Dead letters: list, show, put their messages back.", "dead_letters"),
    "topics": Command("Topics: create, show, change, delete.", "topics"),
    "bundle": Command(
        "Write one file about a group for a bug report: its log, what the doctor finds, lag, versions and settings.",
        "log bundle BUNDLE_EXAMPLE",
    ),
    "log": Command("Look into the coordination topic.", "log"),
    "groups": Command("Administer groups.", "groups"),
    "members": Command("Administer the consumers of a group.", "members"),
    "keys": Command(
        "Print the public half of a key for --sign-with, as `marshal groups update --admin-key` takes it.",
        "keys keys EXAMPLE",
    ),
    "schema": Command(
        "Print the JSON Schema of what a command prints with --json; without COMMAND, the names of all of them.",
        "schema schema EXAMPLE",
    ),
    "simulate": Command(
        "Run the protocol in simulated clusters with faults, and judge each run by the promises.",
        "marshal_sim.commands.simulate simulate EXAMPLE",
    ),
}

AS_JSON: Final = re.compile(r"--json( |$)|(-o|--format)[ =]?json( |$)")
UNREADABLE: Final = cast(type[Exception], typer.BadParameter.__mro__[2])  # errors of a command line, all of them


@cache
def load(name: str) -> Any:
    """Imports a command of COMMANDS and returns it, as typer runs it."""
    module_name, *names = COMMANDS[name].place.split()
    module = import_module(module_name if "." in module_name else f"marshal_py.cli.{module_name}")
    if ASKING in os.environ:
        asked = [getattr(module, names[0])] if names else [one.callback for one in module.app.registered_commands]
        for each in asked:
            import_module("marshal_py.cli.completing").attach(each)
    if not names:
        return get_group(module.app)
    function, example = names
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    options = getattr(module, "CONTEXT_SETTINGS", None)
    alone.command(name, epilog=getattr(module, example), context_settings=options)(getattr(module, function))
    return get_command(alone)


class Commands(Mapping[str, Any]):
    """Maps each name to its command, which is imported when somebody asks for it."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        return load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Group(TyperGroup):
    """Shows the help of COMMANDS, and imports a command when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, Commands())

    def invoke(self, ctx: Any) -> Any:
        """Runs a command. If --json was given, a command line that cannot be read is told as JSON, too. `check` always
        says what it knows on stdout."""
        given = ctx.args[: ctx.args.index("--") if "--" in ctx.args else None]
        try:
            return super().invoke(ctx)
        except (UNREADABLE, typer.Abort) as error:
            if ctx.invoked_subcommand == "check" and isinstance(error, UNREADABLE):
                from marshal_py.cli.doctor import say_unread

                raise typer.Exit(say_unread(given, cast(Any, error).format_message())) from error
            if not AS_JSON.search(" ".join(given)):
                raise
            from marshal_py.cli.output import say_failure

            name = "Aborted" if isinstance(error, typer.Abort) else "Usage"
            code = getattr(error, "exit_code", 1)
            say_failure(name, getattr(error, "message", "the answer was no"), code)
            raise typer.Exit(code) from error

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        """Returns the commands that begin so, without importing them."""
        if incomplete.startswith("-"):
            return super(TyperGroup, self).shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=one.help) for name, one in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        room = formatter.width - 6 - max(map(len, COMMANDS))
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, textwrap.shorten(one.help, room, placeholder="...")) for name, one in COMMANDS.items()]
            )


app: Final = typer.Typer(
    name="marshal",
    cls=Group,
    help="Kafka consumers that coordinate through Kafka alone.",
    epilog="\b\nType first:\n  marshal demo                                        no Kafka is needed"
    "\n  marshal doctor --bootstrap-servers localhost:9092   is all well?"
    "\n  marshal groups ls --bootstrap-servers localhost:9092",
    context_settings={"help_option_names": ["--help", "-h"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help text: the same in a terminal, a pipe and a test
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from marshal_py.client.marshal import VERSION

        print(VERSION)
        raise typer.Exit


@app.callback()
def marshal(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Kafka consumers that coordinate through Kafka alone."""
