"""`marshal log tail / dump / load / reset` and `marshal snapshot`: the logs of the coordination topic.

Their records for people, as JSON, and as files; logs kept short by hand; and a new history for logs whose beginning was
deleted without a snapshot.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import typer
from msgspec import Struct, structs

from marshal_py.admin import archive
from marshal_py.admin.examination import Examination
from marshal_py.admin.logs import CONFIRM_S, Begun, LogConnection, Logs, Written
from marshal_py.admin.watch import Watch
from marshal_py.cli import changes, output
from marshal_py.cli.documents import Time, prints, time_of
from marshal_py.cli.options import (
    NOBODY,
    CommonOptions,
    Force,
    ReadLineOptions,
    Since,
    Until,
    command,
    require_group,
    say_where_it_begins,
)
from marshal_py.history.explain import as_dict, describe
from marshal_py.log.observer import Judged, Observer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.records import Heartbeat, Record
from marshal_py.transport.ports import LogRecord

TAIL_EXAMPLE: Final = output.example("marshal log tail billing -n 20")
DUMP_EXAMPLE: Final = output.example("marshal log dump --output billing.dump")
BUNDLE_EXAMPLE: Final = output.example("marshal bundle billing -o billing.bundle")
LOAD_EXAMPLE: Final = output.example("marshal log load billing.dump --coordination-topic __restored")
RESET_EXAMPLE: Final = output.example("marshal log reset --dry-run")

Group = Annotated[str | None, typer.Argument(help="One group; all if left out.")]


class TailLine(Struct, frozen=True):
    """A record, and what the fold said of it. `type`, `fields`: as PROTOCOL.md names them."""

    log: int
    time: Time | None
    offset: int
    group: str
    type: str | None
    fields: dict[str, Any]
    verdict: str
    reason: str


class Dumped(Struct, frozen=True):
    """How many records a file holds."""

    file: str
    records: int


class Bundled(Struct, frozen=True):
    """The file, how many records are in it, and of how many something was left out."""

    file: str
    records: int
    left_out: int


class Loaded(Struct, frozen=True):
    """How many records a topic holds."""

    topic: str
    records: int


class BrokenLog(Struct, frozen=True):
    """A log that cannot be read, with its first and its end offset."""

    log: int
    first: int
    end: int


class Reset(Struct, frozen=True):
    """What a reset did, or would do. `same_incarnation`: whether a copy of the root is left. `begun`: the logs that
    begin again."""

    outcome: Literal["dry_run", "begun_anew", "nothing_to_do"]
    same_incarnation: bool | None
    logs: list[BrokenLog]
    begun: list[Begun]


app: Final = typer.Typer(help="Look into the coordination topic.", no_args_is_help=True, rich_markup_mode=None)


@app.command("tail", epilog=TAIL_EXAMPLE)
@command
@prints(TailLine)
def tail(
    options: ReadLineOptions,
    group: Group = None,
    count: Annotated[int, typer.Option("-n", min=0, help="This many of the last records.")] = 10,
    since: Since = None,
    until: Until = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until ctrl-C.")] = False,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="TYPE", help="Records of this type only, as Join; may be repeated."),
    ] = None,
    no_heartbeats: Annotated[bool, typer.Option("--no-heartbeats", help="All but heartbeats.")] = False,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="The records as they are in the log: log, offset, time in ms, key and value in base64."
        ),
    ] = False,
) -> None:
    """Show the newest records, each with the verdict of the fold. Those of several logs are ordered by timestamp."""
    if raw and (options.as_json or options.format == "csv"):
        raise typer.BadParameter("--raw goes without --json and -o csv")
    if until is not None and follow:
        raise typer.BadParameter("--until goes without --follow")
    hidden = _hidden(types or [], no_heartbeats)
    with output.until_interrupted(follow) as interrupted, options.observer() as observer:
        if observer.root is None:
            output.say(NOBODY)
        since_ms, until_ms = options.period(since, until)
        span_ms = range(since_ms or -1, sys.maxsize if until_ms is None else until_ms + 1)

        def told(_world: World, records: Iterator[Judged]) -> Iterator[Judged]:
            concern = (judged for judged in records if _concerns(judged, group, hidden))
            return (judged for judged in concern if judged.record.timestamp_ms in span_ms)

        merged = sorted(observer.newest(group, told, count, since_ms), key=_moment)
        require_group(observer, group, follow and options.dump is None)
        say_where_it_begins(observer)

        def shown() -> Iterator[Judged]:
            yield from merged[max(0, len(merged) - count) :]
            if follow and observer.root is not None and options.dump is None:
                for news in observer.follow(group):
                    if interrupted():
                        return
                    if news is not None and _concerns(news, group, hidden):
                        yield news

        options.show(shown(), TailLine.__struct_fields__, _raw if raw else _sentence, _tail_line)


@app.command("dump", epilog=DUMP_EXAMPLE)
@command
@prints(Dumped, dict[str, Any])  # the lines of a dump: transport/dump.py
def dump(
    options: CommonOptions,
    group: Group = None,
    path: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", dir_okay=False, help="Write there; stdout if left out."),
    ] = None,
    force: Force = False,
    human: Annotated[bool, typer.Option("--human", help="Sentences for people, which cannot be loaded again.")] = False,
) -> None:
    """Write every record as a line of JSON with a checksum; with --json each line has the verdict of the fold, too.

    Every command that takes --dump can read such a file, and `log load` loads it. A dump of one group holds the
    group's whole log, because only whole logs can be folded, and log 0, which holds the root.
    """
    if human and (options.as_json or path is not None):
        raise typer.BadParameter("--human goes to stdout, and not together with --json")
    transport = options.transport()
    if group is not None:
        with Observer(transport, options.coordination_topic) as observer:
            observer.fold(group)
            require_group(observer, group)
    with Observer(transport, options.coordination_topic) as observer:
        if observer.root is None:
            output.say(NOBODY)
        if human:
            for judged in observer.read(group, back=True):
                if _concerns(judged, group):
                    print(_sentence(judged), flush=True)
            say_where_it_begins(observer)
        elif path is None:
            archive.dump(observer, sys.stdout.buffer, group, options.as_json)
        else:
            with output.opened(path, force) as file:
                count = archive.dump(observer, file, group, options.as_json)
            options.print_result(Dumped(str(path), count), f"{count} records in {path}")


@command
@prints(Bundled)
def bundle(
    options: CommonOptions,
    group: changes.GroupName,
    path: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", dir_okay=False, help="Write there.")],
    force: Force = False,
) -> None:
    """Write one file about a group for a bug report: its log, what the doctor finds, lag, versions and settings.

    Every command that takes --dump reads it, and `marshal doctor --dump FILE` prints what the doctor found. The first
    line of the file has the rest as JSON.

    It holds no key and no value of a message. Left out are words of handlers (why they ended a message, and the keys
    that hold up a `process`), what others wrote into the coordination topic, and every setting that may be secret. It
    holds names of groups, topics and hosts, client ids, and the reasons that admins gave; also those of other groups in
    the same log. Look at it with `marshal log tail --dump FILE` before you send it.
    """
    settings, transport = options.settings(), options.transport()
    with Watch(options.observer, group, quotes=False) as watch:
        watch.refresh(whole=True)
        require_group(watch.observer, group)
        (health,) = watch.groups()
    asked = Examination(options.coordination_topic, group, quotes=False)
    checks = list(asked.checks({"bootstrap.servers": settings["bootstrap.servers"]}, lambda: transport))
    with closing(transport.admin()) as admin:
        cluster = admin.describe_cluster()
    about, left_out = archive.about(settings, checks, health, cluster), 0
    with output.opened(path, force) as file, options.observer() as observer:
        root = observer.root

        def change(record: LogRecord) -> LogRecord:
            nonlocal left_out
            written = archive.without_words(root, record)
            left_out += written is not record
            return written

        count = archive.dump(observer, file, group, about=about, change=change)
    text = f"{path} has {count} records{f', {left_out} of them without the words of others' if left_out else ''}"
    options.print_result(Bundled(str(path), count, left_out), text)


@app.command("load", epilog=LOAD_EXAMPLE)
@command
@prints(Loaded)
def load(
    options: CommonOptions,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", exists=True, dir_okay=False, readable=True, help="What `marshal log dump` wrote."
        ),
    ],
) -> None:
    """Write a dump into a fresh coordination topic, every record at the offset that it had.

    Refused if the topic holds anything.

    Consumers that use that topic continue where the dump ends. To look only, give --dump to the other commands instead.
    """
    topic = options.coordination_topic
    count = archive.load(file, options.transport(), topic)
    options.print_result(Loaded(topic, count), f"{count} records in {topic}")


def _hidden(types: list[str], no_heartbeats: bool) -> frozenset[type]:
    """Returns the types of records that are not shown, NoneType for what cannot be read. An unknown name ends the
    command with exit code 2."""
    known = {kind.__name__.lower(): kind for kind in get_args(Record)}
    if unknown := [name for name in types if name.lower() not in known]:
        names = ", ".join(kind.__name__ for kind in known.values())
        raise typer.BadParameter(f"--type {unknown[0]!r}: one of {names}")
    wanted = {known[name.lower()] for name in types} or {*known.values(), type(None)}
    return frozenset({*known.values(), type(None)} - wanted | ({Heartbeat} if no_heartbeats else set()))


def _concerns(judged: Judged, group: str | None, hidden: Collection[type] = ()) -> bool:
    return group in (None, judged.verdict.group) and type(judged.verdict.record) not in hidden


def _moment(judged: Judged) -> tuple[int, int, int]:
    return judged.record.timestamp_ms, judged.record.log, judged.record.offset


def _raw(judged: Judged) -> str:
    record = judged.record
    content = _base64(record.key), _base64(record.value)
    return " ".join(map(str, (record.log, record.offset, record.timestamp_ms, *content)))


def _tail_line(judged: Judged) -> TailLine:
    return TailLine(judged.record.log, time_of(judged.record.timestamp_ms), **as_dict(judged.verdict))


def _sentence(judged: Judged) -> str:
    line = _tail_line(judged)
    mark = {"accepted": " ", "rejected": "x", "ignored": "-"}[line.verdict]
    place = f"{line.time}  {line.log}:{line.offset:<6} {mark} {line.group or '-'}"
    return f"{place}  {line.type or '?'}  {describe(judged.verdict)}"


def _base64(content: bytes | None) -> str:
    """Returns the content as base64, or `-`, which is no base64, if there is none."""
    return "-" if content is None else base64.b64encode(content).decode()


RISKS: Final = """\
Everything in these logs is lost: positions, pauses, settings and sessions of their groups.
  - Consumers start at the committed offsets that Kafka has of their group (the library mirrors positions there every
    few seconds), else at the end, or where their `start` says. In at-least-once mode messages may come again, and
    at an end messages may be skipped.
  - The promise of at-most-once mode does not hold across this: messages that were delivered shortly before may be
    delivered again.
  - Consumers that still run with the old state stop with HistoryRestarted; start them again.
If a backup of the log exists (`marshal log dump`), keep it: a reset cannot be undone."""


@app.command("reset", epilog=RESET_EXAMPLE)
@command
@prints(Reset)
def reset(options: CommonOptions, dry_run: changes.DryRun = False, yes: changes.Yes = False) -> None:
    """Begin a new history for logs whose beginning was deleted without a snapshot (HistoryTruncated).

    The last way out: the command says what is lost and asks twice. Logs that can be read are not touched.
    """
    topic = options.coordination_topic
    with Logs(options.transport(), topic) as logs:
        broken = logs.broken()
        root = logs.surviving_root() if broken else None
        kept = root is not None
        if broken:
            output.say(f"Logs of {topic!r} that cannot be read: {', '.join(map(str, broken))}.")
            output.say(RISKS)
            if not kept:
                output.say(
                    "No copy of the root Genesis is left: the topic becomes another incarnation, whose fencing "
                    "tokens are greater than all before."
                )
        begun = []
        if broken and not dry_run:
            changes.ask(f"Begin a new history for {len(broken)} log(s) of {topic!r}?", yes)
            changes.ask("Everything in them is lost. Are all consumers of these groups stopped?", yes)
            root = root or logs.new_root()
            begun = [logs.restart(number, root) for number in broken]
    if options.as_json:
        output.print_json(
            Reset(
                outcome="dry_run" if dry_run and broken else "begun_anew" if begun else "nothing_to_do",
                same_incarnation=kept if broken else None,
                logs=[BrokenLog(number, log.first, log.end) for number, log in broken.items()],
                begun=begun,
            )
        )
        return
    for each in begun:
        print(f"log {each.log} begins again at offset {each.at}")
    if broken and dry_run:
        print(f"{len(broken)} logs would begin again; {changes.DRY}")
    if not broken:
        print("every log can be read: nothing to do")


SNAPSHOT_EXAMPLE: Final = output.example("marshal snapshot --log 0 --dry-run")

Outcome = Literal["dry_run", "too_short", "already_there", "self_audit", "confirmed"]


class Kept(Struct, frozen=True):
    """A log from its `first` offset to its `end`. `clients`: the ids of live ones. `snapshot`, `older`: the
    offsets of the newest two. `deleted_before`: with --truncate."""

    log: int
    first: int
    end: int
    clients: list[str]
    outcome: Outcome
    snapshot: int | None
    older: int | None
    state_bytes: int | None
    deleted_before: int | None


@command
@prints(list[Kept])
def snapshot(
    options: CommonOptions,
    log: Annotated[
        int | None, typer.Option("--log", metavar="N", help="One log (coordination partition); all if left out.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Then delete records before the second newest snapshot.")
    ] = False,
    keep: Annotated[
        str, typer.Option("--keep", metavar="DURATION", help="With --truncate: keep records younger than that.")
    ] = "24h",
    wait: Annotated[
        str, typer.Option("--wait", metavar="DURATION", help="How long to wait for a live consumer to confirm it.")
    ] = f"{CONFIRM_S:g}s",
    dry_run: changes.DryRun = False,
    yes: changes.Yes = False,
) -> None:
    """Write a snapshot of each log, so that earlier records need not be read again.

    Consumers do this by themselves every 500 to 16,000 records. A live consumer of the log confirms the snapshot; if
    there is none, this command folds the log a second time and confirms it itself. A snapshot deletes nothing;
    --truncate deletes only records before the second newest confirmed snapshot that all live consumers have read.
    """
    kept_s, wait_s = changes.seconds(keep), changes.seconds(wait)
    found: list[Kept] = []
    with Logs(options.transport(), options.coordination_topic) as logs:
        numbers = logs.numbers(log)
        if not numbers:
            output.say(NOBODY)
        if truncate and not dry_run:
            changes.ask(
                f"Delete the records of {len(numbers)} log(s) of {options.coordination_topic!r} that lie before their "
                f"second newest confirmed snapshot and are older than {keep}?",
                yes,
            )
        for number in numbers:
            row = _one(logs, logs.connect(number), truncate, kept_s, wait_s, dry_run)
            found.append(row)
            if not options.as_json:
                print(_kept_sentence(row), flush=True)
    if options.as_json:
        output.print_json(found)


def _one(logs: Logs, connection: LogConnection, truncate: bool, kept_s: float, wait_s: float, dry_run: bool) -> Kept:
    """Writes the snapshot of one log, and truncates it; in a dry run only says what it would do."""
    written = None if dry_run else connection.write(wait_s)
    bounds, deleted_before = connection.bounds, None
    newest, older, *_ = [*connection.snapshots(), None, None]
    if truncate and (before := logs.limit(connection, kept_s)) > bounds.first:
        deleted_before = before
        if not dry_run:
            logs.delete(connection.number, before)
    return Kept(
        log=connection.number,
        first=bounds.first,
        end=bounds.end,
        clients=list(connection.clients()),
        outcome="dry_run" if dry_run and connection.wanted else _outcome(written),
        snapshot=(connection.wanted or newest) if dry_run else newest,
        older=older,
        state_bytes=written.state_bytes if written is not None else None,
        deleted_before=deleted_before,
    )


def _outcome(written: Written | None) -> Outcome:
    if written is None:
        return "too_short"
    if not written.state_bytes:
        return "already_there"
    return "self_audit" if written.self_audit else "confirmed"


def _kept_sentence(row: Kept) -> str:
    words = {
        "dry_run": "would be written down at offset {snapshot}",
        "too_short": "has less than 16 records: nothing to write down",
        "already_there": "had been written down at offset {snapshot}",
        "self_audit": "is written down at offset {snapshot} ({state_bytes} bytes), confirmed by a second fold",
        "confirmed": "is written down at offset {snapshot} ({state_bytes} bytes), confirmed by a consumer",
    }
    text = f"log {row.log} ({row.first} to {row.end}) " + words[row.outcome].format(**structs.asdict(row))
    if row.deleted_before is not None:
        verb = "would go" if row.outcome == "dry_run" else "are deleted"
        text += f"; records below {row.deleted_before} {verb}"
    return text
