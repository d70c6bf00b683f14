"""`marshal doctor`: prints what an examination of the cluster finds (admin/examination.py)."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from msgspec import Struct, convert

from marshal_py.admin import examination
from marshal_py.admin.examination import Examination
from marshal_py.admin.views.group_info import Check
from marshal_py.cli import output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import ReadTableOptions, check_topic_name, command
from marshal_py.transport.dump import about

EXAMPLE: Final = output.example("marshal doctor --bootstrap-servers localhost:9092")


class Examined(Struct, frozen=True):
    """The checks, and whether none has failed."""

    ok: bool
    checks: list[Check]


@command
@prints(Examined)
def doctor(
    options: ReadTableOptions,
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP", help="Check this group, and the rights on it.")
    ] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC",
            callback=check_topic_name,
            help="And on this topic, if the group has not consumed it yet.",
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option("--as", metavar="ROLE", help="consumer, admin or observer: a right that it lacks is a failure."),
    ] = None,
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="LEVEL", help="`warn`: a warning, too, ends in exit code 1.")
    ] = "fail",
) -> None:
    """Check the connection, the coordination topic, this client's rights, clocks, versions, groups and growth.

    Prints one line of advice for each problem. Exit code 1 if a check fails. A GROUP that nobody has ever used fails,
    and so does a topic, its own or of --topic, that does not exist. A GROUP also fails if all its partitions are
    parked, if its consumers are all silent, and if messages wait that nobody consumes, unless it is paused. All of
    these are warnings if --as asks about a client that has not started yet. In a dump it checks only clocks, versions,
    groups and growth, as of the newest record; of a bundle it prints what it found when that was made.
    """
    if options.dump is not None and (group or topics or role):
        raise typer.BadParameter("a dump says nothing about rights: --dump goes without GROUP, --topic and --as")
    if role is not None and role not in examination.ROLES:
        raise typer.BadParameter("--as takes " + ", ".join(examination.ROLES))
    if fail_on not in ("fail", "warn"):
        raise typer.BadParameter("--fail-on takes fail or warn")
    checks = []
    asked = Examination(
        options.coordination_topic, group, topics or [], [role] if role else [], strict=role is not None
    )
    if options.dump is not None and (known := about(options.dump)):  # a bundle
        found = iter(convert(known["checks"], list[Check]))
    elif options.dump is not None:
        found = asked.of_dump(options.observer)
    else:
        found = asked.checks(options.settings(), options.transport)
    for check in found:
        checks.append(check)
        if options.for_people:
            advice = f"  -> {check.advice}" if check.advice else ""
            print(f"{check.level:4}  {check.name}: {check.found}{advice}", flush=True)
    failing = ("fail",) if fail_on == "fail" else ("fail", "warn")
    failed = [check.name for check in checks if check.level in failing]
    if not options.for_people:
        options.show(Examined(not failed, checks), checks, Check.__struct_fields__)
    if failed:
        raise output.CommandFailed(f"failed: {', '.join(failed)}")
