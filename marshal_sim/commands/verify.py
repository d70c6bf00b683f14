"""`marshal verify`: folds the log, or a dump of it, twice by independent code and compares every digest."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from msgspec import Struct, UnsetType

from marshal_py.cli import output
from marshal_py.cli.documents import plain, prints, with_fields
from marshal_py.cli.options import NOBODY, ReadOptions, command, require_group
from marshal_py.errors import FileUnusable
from marshal_py.transport.dump import check_whole
from marshal_sim.tools.verify import Comparison, Difference
from marshal_sim.tools.verify import verify as fold_twice

EXAMPLE: Final = output.example("marshal verify --dump billing.dump --json")

First: Final = with_fields(
    "First", Difference, line=int | UnsetType, **{name: str | UnsetType for name in ("group", "found", "expected")}
)
Verified: Final = with_fields("Verified", Comparison, ok=bool, first=First | None)


@command
@prints(Verified)
def verify(
    options: ReadOptions,
    group: Annotated[str | None, typer.Argument(help="The log of one group; all logs if left out.")] = None,
) -> None:
    """Fold the log twice and compare all digests, including those that consumers wrote into it.

    With exit code 1 it names the first offset that differs. A dump is also checked against its own checksums.
    """
    try:
        if options.dump is not None:
            check_whole(options.dump)
        if group is not None:
            with options.observer() as observer:
                observer.fold(group)
                require_group(observer, group)
        with options.observer() as observer:
            if observer.root is None:
                output.say(NOBODY)
            logs = observer.logs_of(group) if observer.root is not None else [0]
            report = fold_twice(observer.records(observer.bounds(logs)), observer.root, observer.root_value)
    except FileUnusable as error:
        first = First(log=error.log, offset=error.offset, line=error.line, what=error.reason)
        _print(Comparison(), first, options.as_json)
        raise
    _print(report, report.differences[0] if report.differences else None, options.as_json)
    for first in report.differences[:1]:
        raise output.CommandFailed(f"log {first.log}, offset {first.offset}: {_sentence(first)}")


def _print(report: Comparison, first: Struct | None, as_json: bool) -> None:
    if as_json:
        output.print_json({"ok": first is None, "first": first, **plain(report)})
        return
    if report.records:
        others = f", {report.other_fold_versions} of other fold versions" if report.other_fold_versions else ""
        print(
            f"{report.records} records in {report.logs} logs, {report.groups} groups: {report.checkpoints} "
            f"checkpoints folded twice, {report.digests} group digests, {report.heartbeat_digests} digests of "
            f"heartbeats and {report.snapshot_digests} of snapshots compared{others}"
        )
    if first is None:
        print("all digests are equal")


def _sentence(first: Difference) -> str:
    group = f" of group {first.group!r}" if first.group else ""
    values = f" is {first.found}, must be {first.expected}" if first.found or first.expected else ""
    return f"{first.what}{group}{values}"
