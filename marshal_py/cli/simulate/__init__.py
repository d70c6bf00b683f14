"""`marshal simulate`: the shipped protocol code in simulated clusters with faults. Needs no Kafka.

One file per subcommand: `run`, `mutants`, `exhaustive`, `audit`. Options without a subcommand are translated here into
the subcommand that they mean: `marshal simulate --seeds 0:20` runs, `--dump FILE` audits.
"""

from __future__ import annotations

from typing import Any, Final

import typer
from typer.core import TyperGroup

from marshal_py.cli.simulate import audit, exhaustive, mutants, run

EXAMPLE: Final = run.EXAMPLE
HELP_OPTION: Final = "--help"
# Options that choose a subcommand; the value of the second one, if it has one, becomes the subcommand's argument.
CHOOSING: Final = {"--dump": "audit", "--exhaustive": "exhaustive", "--mutants": "mutants", "--mutant": "mutants"}
FLAGS: Final = frozenset({"--mutants"})


def with_subcommand(arguments: list[str]) -> list[str]:
    """Returns the arguments with a subcommand in front.

    If they name none, it follows from an option of CHOOSING, and is `run` if they have none of these. Only one such
    option is translated; a second one stays in place, and the subcommand refuses it as unknown.
    """
    if arguments and (not arguments[0].startswith("-") or arguments[0] == HELP_OPTION):
        return arguments
    for option, name in CHOOSING.items():
        for place, argument in enumerate(arguments):
            if argument == option:
                after = place + (1 if option in FLAGS else 2)
                return [name, *arguments[place + 1 : after], *arguments[:place], *arguments[after:]]
            if argument.startswith(f"{option}="):
                return [name, argument.partition("=")[2], *arguments[:place], *arguments[place + 1 :]]
    return ["run", *arguments]


class SimulateGroup(TyperGroup):
    """The command `simulate`, whose subcommand follows from the options if the user names none."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parsed: list[str] = super().parse_args(ctx, with_subcommand(args))
        return parsed


app: Final = typer.Typer(
    cls=SimulateGroup,
    help="Run the protocol in simulated clusters with faults, and judge each run by the promises. Without a "
    "subcommand, `run`.",
    epilog=EXAMPLE,
    rich_markup_mode=None,
)
app.command("run", epilog=run.EXAMPLE)(run.run)
app.command("mutants", epilog=mutants.EXAMPLE)(mutants.mutants)
app.command("exhaustive", epilog=exhaustive.EXAMPLE)(exhaustive.exhaustive)
app.command("audit", epilog=audit.EXAMPLE)(audit.audit)
