"""`marshal simulate`: the shipped protocol code in simulated clusters with faults. Needs no Kafka.

One file per subcommand: `run`, `mutants`, `exhaustive`, `audit`.
"""

from __future__ import annotations

from typing import Final

import typer

from marshal_sim.commands import audit, exhaustive, mutants, run

app: Final = typer.Typer(
    help="Run the protocol in simulated clusters with faults, and judge each run by the promises.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("run", epilog=run.EXAMPLE)(run.run)
app.command("mutants", epilog=mutants.EXAMPLE)(mutants.mutants)
app.command("exhaustive", epilog=exhaustive.EXAMPLE)(exhaustive.exhaustive)
app.command("audit", epilog=audit.EXAMPLE)(audit.audit)
