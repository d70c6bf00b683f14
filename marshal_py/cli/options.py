"""The options that commands share, as values that know what to do with them.

A command takes one parameter `options` of a class of this file or of changes.py. `command` shows each field of that
class as an option of its own in the help text, and hands the command one value. No command is defined here.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

from marshal_py.cli import output
from marshal_py.cli.documents import time_of
from marshal_py.client.values.options import CONNECT_TIMEOUT_S, COORDINATION_TOPIC, check_topics
from marshal_py.client.values.position_text import moment_of
from marshal_py.errors import InvalidOption, first_of
from marshal_py.log.observer import Observer
from marshal_py.protocol.wire.identity import NONE, check_topic
from marshal_py.transport.dump import Header, memory_transport
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.memory import MemoryTransport
from marshal_py.transport.option_names import NOBODY as NOBODY
from marshal_py.transport.option_names import suggestion

if TYPE_CHECKING:
    from marshal_py.admin.group import Group
    from marshal_py.admin.watch import Shows, Watch
    from marshal_py.protocol.wire.codec import SigningKey

LOGS_NAMED: Final = 5  # how many logs a line names
NO_PERIOD: Final = "--since names no time before the end (--until, or now)"
SECONDS_MAX: Final = 1_000_000  # some 11 days: librdkafka counts ms in 32 bits
_PARAMETER: Final = "options"


def check_time(text: str | None) -> str | None:
    """Returns the text of a TIME option unchanged. Any text that is no time ends in exit code 2."""
    try:
        time_of(since_of(text))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no time like 2026-01-31T12:00:00Z, 14:05 or -5m") from error
    return text


def check_seconds(seconds: float | None) -> float | None:
    """Returns the value of a SECONDS option unchanged. One that is no number, or too large, ends in exit code 2."""
    if seconds is not None and not seconds <= SECONDS_MAX:
        raise typer.BadParameter(f"{seconds:g} is not in the range x<={SECONDS_MAX:,}")
    return seconds


def iso_time(text: str | None) -> str | None:
    """Returns a TIME, which may count from now, in ISO 8601."""
    return time_of(since_of(check_time(text)))


def check_topic_name(given: str | list[str] | None) -> str | list[str] | None:
    """Returns what an argument or option TOPIC holds. A name that Kafka does not take ends in exit code 2."""
    try:
        for name in [given] if isinstance(given, str) else given or ():
            check_topic(name)
    except InvalidOption as error:
        raise typer.BadParameter(str(error)) from error
    return given


TopicName = Annotated[str, typer.Argument(metavar="TOPIC", callback=check_topic_name, help="The topic.")]
KEYS: Final = "keys and values are librdkafka's (its CONFIGURATION.md), not those of Java clients"
SERVERS: Final = "MARSHAL_BOOTSTRAP_SERVERS"
Servers = Annotated[
    str | None,
    typer.Option("--bootstrap-servers", envvar=SERVERS, metavar="HOST:PORT,...", help="Where the cluster is."),
]
CommandConfig = Annotated[
    Path | None,
    typer.Option(
        "--command-config",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="Properties file with librdkafka's keys: security.protocol, sasl.*, ssl.*, ...",
    ),
]
CoordinationTopic = Annotated[
    str,
    typer.Option(
        "--coordination-topic",
        envvar="MARSHAL_COORDINATION_TOPIC",
        metavar="TOPIC",
        help="The topic through which consumers coordinate.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0.1,
        metavar="SECONDS",
        callback=check_seconds,
        help="How long to wait for an answer of the cluster.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Force = Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")]
Since = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="TIME", callback=check_time, help="Only from then on: ISO-8601, UTC without a zone; or -5m."
    ),
]
Until = Annotated[
    str | None, typer.Option("--until", metavar="TIME", callback=check_time, help="Only up to then, as --since.")
]
DumpFile = Annotated[
    Path | None,
    typer.Option("--dump", metavar="FILE", help="Read this dump (`marshal log dump`) instead of a cluster."),
]


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """The options of every command: which cluster, which coordination topic, and how to print."""

    bootstrap_servers: Servers = None
    command_config: CommandConfig = None
    coordination_topic: CoordinationTopic = COORDINATION_TOPIC
    timeout: Timeout = CONNECT_TIMEOUT_S
    as_json: Json = False

    def __post_init__(self) -> None:
        """Raises InvalidOption."""
        check_topics([self.coordination_topic])

    def settings(self) -> dict[str, Any]:
        """Returns librdkafka's settings, from --bootstrap-servers and the file of --command-config. --bootstrap-servers
        overrides the file. If nothing names a cluster, the command ends with exit code 2."""
        return settings_of(self.bootstrap_servers, self.command_config)

    def transport(self) -> KafkaTransport:
        """Connects to the cluster. Raises ClusterUnreachable if it does not answer. Raises CommandFailed for
        a wrong line in the file of --command-config."""
        try:
            return KafkaTransport(self.settings(), self.timeout)
        except InvalidOption as error:
            key = error.value if error.option == "settings" else error.option
            for number, line in _lines(self.command_config):
                if line.partition("=")[0].strip() == key:
                    where = f"{self.command_config}:{number}: {key}: {error.rule}"
                    raise output.CommandFailed(f"{where}; correct that line, or leave it out: {KEYS}") from error
            raise

    def observer(self) -> Observer:
        """Returns a reader of the cluster's coordination topic."""
        return Observer(self.transport(), self.coordination_topic, self.timeout)

    def key(self) -> SigningKey | None:
        """Returns the key of --sign-with, which only commands that change a group have."""
        return None

    def group(self, name: str) -> Group:
        """Returns the operations on a group. The command keeps one connection for all of them."""
        from marshal_py.admin.group import Group  # and with it all of the client, which commands that look do without

        group = Group(self.transport(), name, self.coordination_topic, key=self.key())
        return self._open.enter_context(group.connected())

    @functools.cached_property
    def _open(self) -> ExitStack:
        return ExitStack()

    def close(self) -> None:
        """Closes the connections of the command."""
        self._open.close()

    def print_result(self, result: Any, text: str) -> None:
        """Prints `result` as JSON if --json was given, else `text`."""
        if self.as_json:
            output.print_json(result)
        else:
            print(text)


@dataclass(frozen=True, kw_only=True)
class ReadOptions(CommonOptions):
    """The options of a command that only reads logs, and can therefore read a dump instead of a cluster."""

    dump: DumpFile = None

    def observer(self) -> Observer:
        """Returns a reader of the coordination topic or, with --dump, of the topic that the dump contains."""
        if self.dump is None:
            return super().observer()
        header, transport = self._dumped
        return Observer(transport, header.topic)

    @functools.cached_property
    def _dumped(self) -> tuple[Header, MemoryTransport]:
        assert self.dump is not None
        return memory_transport(self.dump)

    def now_ms(self) -> int:
        """Returns the time from which `-5m` and `14:05` count, in ms since 1970: of a dump, that of its newest record,
        whenever somebody reads it."""
        if self.dump is None:
            return time.time_ns() // 1_000_000
        with self.observer() as observer:
            return observer.newest_ms()

    def moment(self, text: str | None) -> int | None:
        """Returns the ms since 1970 that a TIME option names. Raises ValueError."""
        return None if text is None else moment_of(text, self.now_ms())

    def period(self, since: str | None, until: str | None) -> tuple[int | None, int | None]:
        """Returns the moments of --since and --until. If none lies between them the command ends with exit code 2."""
        since_ms, until_ms = self.moment(since), self.moment(until)
        if since_ms is not None and until_ms is not None and since_ms > until_ms:
            raise typer.BadParameter(NO_PERIOD)
        return since_ms, until_ms

    @contextmanager
    def watch(self, group: str | None, shows: Shows = "groups", believes: bool = False) -> Iterator[Watch]:
        """Gives a whole picture of a group, or of all. `shows`, `believes`: as Watch has them. Raises CommandFailed if
        there is no such group."""
        from marshal_py.admin.watch import Watch  # which most commands do without

        with Watch(self.observer, group, self.dump is None, believes, shows) as watch:
            watch.refresh(whole=True)
            require_group(watch.observer, group)
            if watch.observer is not None and watch.observer.root is None:
                output.say(NOBODY)
            yield watch


Format = Annotated[
    Literal["table", "wide", "csv", "json"],
    typer.Option("--format", "-o", help="`wide` and `csv` have every field; `json` is --json."),
]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TableOptions(CommonOptions):
    """The options of a command that prints a table."""

    format: Format = "table"

    @property
    def for_people(self) -> bool:
        """Returns whether the command prints what it prints without any option."""
        return not self.as_json and self.format == "table"

    def show(
        self,
        document: Any,
        rows: Iterable[T],
        fields: Iterable[str],
        columns: Iterable[str] = (),
        cells: Callable[[T], Iterable[object]] = lambda _: (),
    ) -> bool:
        """Prints `document` as JSON, or its `rows` as CSV or as a table. Returns whether people read it, for whom the
        command may say more. `fields`: of the rows. `columns`, `cells`: of the table that is not wide."""
        if self.as_json:
            output.print_json(document)
        elif self.format == "csv":
            output.print_csv(fields, rows)
        elif self.format == "wide":
            wide = [output.wide_cells(row) for row in rows]
            output.print_table((name.replace("_", " ") for name in fields), (row.values() for row in wide))
        else:
            output.print_table(columns, map(cells, rows))
        return not self.as_json and self.format != "csv"


@dataclass(frozen=True, kw_only=True)
class ReadLineOptions(ReadOptions):
    """The options of a command that prints a line for each thing that it finds, at once."""

    format: Annotated[
        Literal["lines", "csv", "json"], typer.Option("--format", "-o", help="`csv` has every field; `json` is --json.")
    ] = "lines"

    def show(
        self, found: Iterable[T], fields: Iterable[str], text: Callable[[T], str], document: Callable[[T], Any]
    ) -> None:
        """Prints each thing as soon as it is there: as its `text`, or its `document` as JSON or CSV."""
        if self.format == "csv" and not self.as_json:
            output.print_csv(fields, map(document, found))
            return
        for one in found:
            if self.as_json:
                output.print_json(document(one))
            else:
                print(text(one), flush=True)


@dataclass(frozen=True, kw_only=True)
class ReadTableOptions(TableOptions, ReadOptions):
    """The options of a command that prints a table of what a cluster or a dump has."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a function a command: expands its parameter `options` into single options, and reports its errors. In the
    help text the function's own parameters come first, then the fields of the options' class, then those of its base
    class. A parameter that a method of the library gets has that method's name for it, so that errors can name the
    option instead."""
    parameters = []
    hints = get_type_hints(function, include_extras=True)
    shared = hints.get(_PARAMETER)
    for name, parameter in inspect.signature(function).parameters.items():
        if name != _PARAMETER:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
    names = [] if shared is None else _names(shared)
    if shared is not None:
        types = get_type_hints(shared, include_extras=True)
        defaults = {field.name: field.default for field in fields(shared)}
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=types[name])
            for name in names
        ]

    flags = {parameter.name: flag for parameter in parameters if (flag := _flag(parameter)) is not None}

    @functools.wraps(function)
    def run(**given: Any) -> None:
        if given.get("format") == "json":
            given["as_json"] = True
        with output.error_reporting(flags, given.get("as_json", False)):
            if shared is None:
                function(**given)
                return
            _check_text(given)
            with closing(shared(**{name: given.pop(name) for name in names})) as options:
                function(**given, **{_PARAMETER: options})

    run.prints = (*getattr(function, "prints", ()), *getattr(shared, "ALSO_PRINTS", ()))  # type: ignore[attr-defined]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads the options from it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _check_text(given: Mapping[str, Any]) -> None:
    """Ends a command with exit code 2 if a text that it was given is no UTF-8. A path may be anything."""
    for each in given.values():
        for text in each if isinstance(each, list) else [each]:
            if isinstance(text, str) and not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise typer.BadParameter(f"{text!a} is not in UTF-8") from None


def _flag(parameter: inspect.Parameter) -> str | None:
    """Returns how a command line gives this parameter, as `--max-bytes`; None for an argument without a name."""
    for about in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(about, OptionInfo):
            given = (about.default, *(about.param_decls or ()))  # in Annotated the first name stands for the default
            flags = (flag for flag in given if isinstance(flag, str) and flag.startswith("--"))
            return next(flags, "--" + parameter.name.replace("_", "-"))
    return None


def _names(shared: type[Any]) -> list[str]:
    """Returns the names of the fields of a class: first those that it adds itself, then those of its base class."""
    found: dict[str, None] = {}
    for each in shared.__mro__:
        found |= dict.fromkeys(name for name in inspect.get_annotations(each) if name in shared.__dataclass_fields__)
    return list(found)


def settings_of(servers: str | None, config: Path | None) -> dict[str, Any]:
    """Returns librdkafka's settings. `servers` overrides the file `config`. If neither names a cluster, or the file and
    the environment name two, the command ends with exit code 2."""
    settings: dict[str, Any] = {"log_level": 0}  # our errors say what librdkafka would print
    if config is not None:
        settings.update(read_properties(config))
    if servers:
        named = settings.get("bootstrap.servers") or servers
        if named != servers and servers == os.environ.get(SERVERS):
            raise typer.BadParameter(
                f"{config} names {named}, and {SERVERS} names {servers}: unset the variable, or take the line out"
            )
        settings["bootstrap.servers"] = servers
    if not settings.get("bootstrap.servers"):
        raise typer.BadParameter(
            f"name the cluster by --bootstrap-servers, {SERVERS} or a line in the file of --command-config"
        )
    return settings


def read_properties(path: Path) -> dict[str, str]:
    """Reads a file with `key=value` on each line. Empty lines, and lines that begin with # or !, are left out. For any
    other line, or a file that is not in UTF-8, the command ends with exit code 2."""
    found = {}
    for number, text in _lines(path):
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"{path}:{number}: expected key=value")
        found[key.strip()] = value.strip()
    return found


def _lines(path: Path | None) -> Iterator[tuple[int, str]]:
    """Yields the lines of a properties file that say something, with their numbers."""
    try:
        lines = [] if path is None else path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path}: not in UTF-8: {error.reason}") from error
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and text[0] not in "#!":
            yield number, text


def require_group(observer: Observer | None, group: str | None, wait: bool = False) -> None:
    """Raises CommandFailed, which suggests the nearest name, if the log that was read does not contain the group.
    `wait`: the caller follows the log and can wait for a group that does not exist yet, so the function prints a line
    on stderr instead of raising."""
    assert observer is not None  # a Watch has one after a refresh
    if group is None or any(found.name == group for _, found in observer.groups()):
        return
    observer.fold()  # the other logs
    missing = f"group {group!r} is not in {observer.topic}"
    missing += suggestion(group, [found.name for _, found in observer.groups()])
    if observer.root is None or not wait:
        raise output.CommandFailed(missing)
    output.say(f"{missing}; waiting for its first consumer")


def since_of(text: str | None) -> int | None:
    """Returns the ms since 1970 that a TIME option of a command without dumps names. Raises ValueError."""
    return None if text is None else moment_of(text, time.time_ns() // 1_000_000)


def say_where_it_begins(observer: Observer) -> None:
    """Says on stderr where the history begins that a command has shown, if older records were deleted, or not read. So
    an answer that is empty, or short, does not look like a group in which nothing happened."""
    if observer.began:
        output.say(f"the history begins in {_places(observer, observer.began)}: older records were deleted")
    if observer.stopped:
        output.say(f"looked back to {_places(observer, observer.stopped)}: --since TIME looks further")


def _places(observer: Observer, offsets: Mapping[int, int]) -> str:
    """Returns in words where records are, with their times. `offsets`: by log."""
    words = []
    for log, at in sorted(offsets.items()):
        when = time_of(observer.times_of(log, [at]).get(at), "seconds")
        words.append(f"log {log} at offset {at}{'' if when is None else f', {when}'}")
    return first_of(words, LOGS_NAMED)


def number_or_none(value: int) -> int | None:
    """Returns None, which JSON shows as null, for -1 (NONE), and any other number as it is."""
    return None if value == NONE else value
