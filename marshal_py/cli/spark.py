"""`marshal spark report`: questions about the coordination topic, answered on Spark, here or on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from marshal_py.cli import output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import CommonOptions, command
from marshal_py.client.values.position_text import TIME, parse
from marshal_py.errors import InvalidOption
from marshal_py.spark import require_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REPORT_EXAMPLE: Final = output.example("marshal spark report --only take_overs --only lag --json")
LOCAL: Final = "local[*]"
QUIET: Final = {"spark.log.level": "OFF", "spark.ui.showConsoleProgress": "false"}  # stderr is for our error alone
ROWS_MAX: Final = 20  # of each table for people; --json has all

Master = Annotated[
    str, typer.Option("--master", metavar="URL", help="Of the Spark cluster; sc://HOST:PORT is Spark Connect.")
]


app: Final = typer.Typer(help="The coordination topic as data, on Spark.", no_args_is_help=True, rich_markup_mode=None)


@app.command("report", epilog=REPORT_EXAMPLE)
@command
@prints(dict[str, list[dict[str, Any]]])  # by question: docs/spark-reference.md
def report(
    options: CommonOptions,
    path: Annotated[str | None, typer.Option("--path", help="Of a dump, instead of the live topic.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="This question; may be repeated. All if left out."),
    ] = None,
    group: Annotated[str | None, typer.Option("--group", help="Of this group alone.")] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="Also who owned what at that time: ISO-8601.")
    ] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="TIME|OFFSET", help="Records from there on.")] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME|OFFSET", help="Records up to there.")] = None,
    master: Master = LOCAL,
) -> None:
    """Answer questions of operators: take-over times, races, gaps, lag, messages redelivered or lost, pauses, moves.

    docs/spark-reference.md lists them.
    """
    require_spark()
    from marshal_py.spark import reports
    from marshal_py.spark.stream.options import as_options

    moment = None if at is None else _time(at)
    source = {name: text for name, text in (("group", group), ("since", since), ("until", until)) if text is not None}
    if path is None:
        source |= as_options(options.settings())
        source["coordination_topic"] = options.coordination_topic
    else:
        source["path"] = str(Path(path).absolute()) if master.startswith("local") else path
    names = reports.check_questions(only or [], moment)
    with _session("marshal spark report", master) as session:
        found = reports.report(session, source, names, moment)
    if options.as_json:
        output.print_json(
            {name: [{key: _plain(value) for key, value in row.items()} for row in rows] for name, rows in found.items()}
        )
        return
    for name, rows in found.items():
        _print(reports.QUESTIONS[name].title, rows)


@contextmanager
def _session(name: str, master: str) -> Iterator[SparkSession]:
    """Opens a Spark session for this command and stops it at the end. An error of Spark becomes one sentence."""
    require_spark()
    from pyspark.errors import PySparkException

    from marshal_py.spark.stream.session import local_session

    session = local_session(master, name=name, settings=QUIET)
    try:
        yield session
    except PySparkException as error:
        raise output.CommandFailed(_reason(str(error))) from error
    finally:
        session.stop()


def _reason(text: str) -> str:
    """Returns the text of this library's own error if Spark's text contains one, else Spark's first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("marshal_py.errors.")]
    return ours[-1].partition(": ")[2] if ours else lines[0] if lines else "Spark failed and does not say why"


def _time(text: str) -> datetime:
    try:
        found = parse(text).rest
    except InvalidOption:
        found = None
    if found is None or found.kind != TIME:
        raise typer.BadParameter(f"--at {text!r} is no ISO-8601 time")
    return datetime.fromtimestamp(found.number / 1000, UTC)


def _plain(value: Any) -> Any:
    """Returns a value as one of JSON's types; a time becomes a text in UTC."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds")
    return value.isoformat() if isinstance(value, date) else value


def _cell(value: Any) -> Any:
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}" if isinstance(value, datetime) else value


def _print(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    output.console().print(title, style="bold")
    if not rows:
        print("  none")
        return
    columns = [name.replace("_", " ") for name in rows[0]]
    output.print_table(columns, (map(_cell, row.values()) for row in rows[:ROWS_MAX]))
    if len(rows) > ROWS_MAX:
        print(f"  and {len(rows) - ROWS_MAX} more; --json has all")
