"""All commands of `marshal`, and their order in its help."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from marshal_py.cli import (
    advisories,
    bench,
    consume,
    demo,
    doctor,
    explain,
    get,
    groups,
    index,
    log,
    log_reset,
    members,
    pause,
    position,
    produce,
    run,
    simulate,
    snapshot,
    spark,
    state,
    topics,
    verify,
)
from marshal_py.client.marshal import VERSION

app: Final = typer.Typer(
    name="marshal",
    help="Kafka consumers that coordinate through Kafka alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help text: the same in a terminal, a pipe and a test
)
app.command("demo", epilog=demo.EXAMPLE)(demo.demo)
app.command("consume", epilog=consume.EXAMPLE)(consume.consume)
app.command("run", epilog=run.EXAMPLE, context_settings=run.WORDS)(run.run)
app.command("produce", epilog=produce.EXAMPLE)(produce.produce)
app.command("get", epilog=get.EXAMPLE)(get.get)
app.command("index", epilog=index.EXAMPLE)(index.index)
app.add_typer(topics.app, name="topics")
app.command("state", epilog=state.EXAMPLE)(state.state)
log.app.command("reset", epilog=log_reset.EXAMPLE)(log_reset.reset)
app.add_typer(log.app, name="log")
app.command("advisories", epilog=advisories.EXAMPLE)(advisories.advisories)
app.command("verify", epilog=verify.EXAMPLE)(verify.verify)
app.command("doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
app.command("pause", epilog=pause.EXAMPLE)(pause.pause)
app.command("resume", epilog=pause.RESUME_EXAMPLE)(pause.resume)
app.command("set-position", epilog=position.EXAMPLE)(position.set_position)
app.add_typer(groups.app, name="groups")
app.add_typer(members.app, name="members")
app.command("evict", epilog=members.EVICT_EXAMPLE)(members.evict)
app.command("explain", epilog=explain.EXAMPLE)(explain.explain)
app.command("snapshot", epilog=snapshot.EXAMPLE)(snapshot.snapshot)
app.add_typer(simulate.app, name="simulate")
app.add_typer(bench.app, name="bench")
app.add_typer(spark.app, name="spark")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


@app.callback()
def marshal(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Kafka consumers that coordinate through Kafka alone."""
