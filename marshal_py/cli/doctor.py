"""`marshal doctor` and `marshal check`: whether all is well, in lines with advice or as an exit code.

admin/examination.py examines the cluster; `check` is for cron, Nagios, Prometheus and scripts.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Final

import typer
from msgspec import Struct, convert, json

from marshal_py.admin import examination
from marshal_py.admin.examination import Examination
from marshal_py.admin.views import diagnosis, exposition
from marshal_py.admin.views.diagnosis import Limits
from marshal_py.admin.views.exposition import Family, Labelled, escaped
from marshal_py.admin.views.group_info import Check, GroupCheck
from marshal_py.cli import changes, output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import ReadOptions, ReadTableOptions, check_topic_name, command
from marshal_py.errors import ClusterError, ClusterUnreachable, MarshalError
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


CHECK_EXAMPLE: Final = output.example("marshal check billing --lag 10000 --age 5m")
WORDS: Final = {"ok": "OK", "warn": "WARNING", "fail": "CRITICAL", "unknown": "UNKNOWN"}  # as Nagios has them
FIGURES: Final = {  # of GroupCheck: the name for Nagios, that for Prometheus, and its help
    "lag": ("lag", "lag", "Messages from the positions to the ends."),
    "oldest_s": ("age", "oldest_unfinished_seconds", "The age of the oldest unfinished message."),
    "retention_s": ("retention", "retention_seconds", "After how long Kafka may delete an unfinished message."),
    "sessions": ("consumers", "consumers", "Live sessions."),
    "owned": ("owned", "owned_partitions", "Partitions that have an owner."),
    "free": ("free", "free_partitions", "Partitions without one."),
    "parked": ("parked", "parked_partitions", "Partitions that nobody may own until an admin has looked at them."),
}


@command
@prints(GroupCheck)
def check(
    options: ReadOptions,
    group: changes.GroupName,
    lag: Annotated[int | None, typer.Option("--lag", min=0, metavar="N", help="Critical: more messages wait.")] = None,
    age: Annotated[
        str | None, typer.Option("--age", metavar="60s", help="Critical: a message has waited for longer.")
    ] = None,
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="text, json, nagios or prometheus.")] = "text",
) -> None:
    """Say whether a group is well: exit code 0 ok, 1 warning, 2 critical, 3 unknown.

    It finds, without any limit: nobody consumes although messages wait, parked partitions, handlers that hang, a pause
    that is over, silent sessions, partitions of no member, topics that are gone, and messages that wait while Kafka is
    about to delete them. `marshal doctor GROUP` has the same judgement, and looks at the cluster, too. Unknown: the
    cluster does not answer, nobody has used the group, a limit cannot be compared, or the command line cannot be read;
    the line says why.

    `--timeout` is for the whole command. `--format prometheus` is for the textfile collector of node_exporter: write to
    a file beside it, then rename that.
    """
    limits = Limits(lag, None if age is None else changes.seconds(age))
    form = "json" if options.as_json else form
    if form not in FORMS:
        raise typer.BadParameter(f"--format takes {', '.join(FORMS)}")
    try:
        with _within(options):
            found = _look(options, group, limits)
    except MarshalError as error:
        name = "cluster" if isinstance(error, ClusterError) else "group"
        found = diagnosis.checked(group, [Check(name, "unknown", " ".join(str(error).split()))])
    raise typer.Exit(_say(found, limits, form))


def _say(found: GroupCheck, limits: Limits, form: str) -> int:
    try:
        for line in FORMS[form](found, limits):
            print(line)
        sys.stdout.flush()
    except OSError as error:  # a full disk, or a reader that has gone: nobody knows how the group is
        output.close_stdout()
        output.say(f"marshal: the output cannot be written ({error.strerror})")
        return diagnosis.EXIT_CODES["unknown"]
    return found.exit_code


def say_unread(given: Sequence[str], error: str) -> int:
    """Prints that a command line cannot be read, in the form that it asks for, and returns the exit code: the usual 2
    would be a group in trouble. `given`: the arguments."""
    group = next((one for one in given[:1] if not one.startswith("-")), "?")
    asked = ASKED.search(" ".join(given))
    form = (asked["form"] or "json") if asked else "text"
    found = diagnosis.checked(group, [Check("command line", "unknown", " ".join(error.split()))])
    return _say(found, Limits(), form)


AGAIN_S: Final = 1.0  # between two alarms: code that goes on without an answer may have taken the first for one


@contextmanager
def _within(options: ReadOptions) -> Iterator[None]:
    """Raises ClusterUnreachable in the block when --timeout is over: many requests, each in time, may take longer."""

    def end(_number: int, _frame: object) -> None:
        reason = f"--timeout {options.timeout:g} is over"
        raise ClusterUnreachable(options.bootstrap_servers or "the cluster", "what `marshal check` asks for", reason)

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, options.timeout, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _look(options: ReadOptions, group: str, limits: Limits) -> GroupCheck:
    with options.watch(group, believes=True) as watch:
        (found,) = watch.groups()
    return diagnosis.check(found, limits, in_cluster=options.dump is None)


# --- forms


def _headline(found: GroupCheck) -> str:
    names = dict.fromkeys(one.name for one in found.checks if one.level != "ok")
    said = "; ".join(names if _judged(found) else (one.found for one in found.checks)) or "every partition is consumed"
    figures = []
    if found.sessions is not None:
        figures += [f"{found.sessions} consumers", f"{found.owned} partitions owned, {found.free} free"]
        figures += [f"lag {'unknown' if found.lag is None else found.lag}"]
    figures += [] if found.oldest_s is None else [f"oldest message {found.oldest_s:.0f} s"]
    return f"{WORDS[found.level]} {found.group}: {said}" + (f" ({', '.join(figures)})" if figures else "")


def _judged(found: GroupCheck) -> bool:
    """Returns whether there was a group to judge. Else its one finding says why not, and no figure is known."""
    return found.sessions is not None


def as_text(found: GroupCheck, limits: Limits) -> Iterator[str]:
    """Yields one line for people, then one for each finding."""
    yield _headline(found)
    for one in found.checks if _judged(found) else ():
        yield f"{one.level:7}  {one.name}: {one.found}" + (f"  -> {one.advice}" if one.advice else "")


def as_json(found: GroupCheck, limits: Limits) -> Iterator[str]:
    yield json.encode(found).decode()


def as_nagios(found: GroupCheck, limits: Limits) -> Iterator[str]:
    """Yields one line with performance data, as plugins of Nagios print it: U stands for an unknown value."""
    critical: dict[str, Any] = {"lag": limits.lag, "oldest_s": limits.age_s}
    data = []
    for field, (name, _, _) in FIGURES.items():
        value, most, unit = _value(found, field), critical.get(field), "s" if field.endswith("_s") else ""
        bounds = f";;{output.figure(most)};0" if most is not None else ""
        if value is not None or most is not None:
            data.append(f"{name}={'U' if value is None else f'{output.figure(value)}{unit}'}{bounds}")
    said = _headline(found) + "".join(f"; {one.found}" for one in found.checks if _judged(found))
    yield f"MARSHAL {said.replace('|', '/')}" + (f" | {' '.join(data)}" if data else "")


def as_prometheus(found: GroupCheck, limits: Limits) -> Iterator[str]:
    """Yields the lines of a file of metrics. What is unknown has no line, so that it is absent and not 0."""
    for family in METRICS:
        lines = exposition.lines_of(family, [(f'group="{escaped(found.group)}"', found)])
        yield from lines.decode().splitlines()


def _findings(found: GroupCheck) -> Labelled:
    counts = Counter((one.name, one.level) for one in found.checks)
    return [("", f'check="{escaped(name)}",level="{level}"', count) for (name, level), count in counts.items()]


def _value(found: GroupCheck, field: str) -> float | None:
    """Returns a figure of FIGURES. Where nothing waits, the age is 0."""
    value: float | None = getattr(found, field)
    return 0 if value is None and field == "oldest_s" and found.lag == 0 else value


METRICS: Final = (
    Family("marshal_check_state", "0 ok, 1 warning, 2 critical, 3 unknown.", lambda found: found.exit_code),
    Family("marshal_check_findings", "What was found, by check and level.", _findings),
    *(
        Family(f"marshal_check_{name}", text, partial(_value, field=field))
        for field, (_, name, text) in FIGURES.items()
    ),
    Family("marshal_check_time_seconds", "When the check was made, since 1970.", lambda _: time.time()),
)
FORMS: Final = {"text": as_text, "json": as_json, "nagios": as_nagios, "prometheus": as_prometheus}
ASKED: Final = re.compile(rf"--json( |$)|--format[ =](?P<form>{'|'.join(FORMS)})( |$)")
