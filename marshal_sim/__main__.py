"""`python -m marshal_sim mutants` and `exhaustive`: would the simulator notice a bug, and what can a small model do?

They are for who works on this library; `marshal simulate` is for all.
"""

from __future__ import annotations

from typing import Final

import typer

from marshal_sim.commands import exhaustive, mutants

app: Final = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
app.command("mutants", epilog=mutants.EXAMPLE)(mutants.mutants)
app.command("exhaustive", epilog=exhaustive.EXAMPLE)(exhaustive.exhaustive)

if __name__ == "__main__":
    app(prog_name="python -m marshal_sim")
