"""What all commands share: the options of the connection, how errors and results are printed. No command lives here."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, ParamSpec

import typer

from marshal_py.admin.suggestions import instead
from marshal_py.client.marshal import CONNECT_TIMEOUT_S
from marshal_py.client.observer import Observer
from marshal_py.client.options import COORDINATION_TOPIC, check_topics
from marshal_py.errors import InvalidName, MarshalError
from marshal_py.transport.dump import memory_transport
from marshal_py.transport.kafka import KafkaTransport

P = ParamSpec("P")

FAILED: Final = 1
BROKEN_PIPE: Final = 141  # 128 + SIGPIPE, as of a C program whose reader has gone

Servers = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-servers", envvar="MARSHAL_BOOTSTRAP_SERVERS", metavar="HOST:PORT,...", help="Where the cluster is."
    ),
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


def _topic_name(name: str) -> str:
    try:
        return check_topics([name])[0]
    except InvalidName as error:
        raise typer.BadParameter(str(error)) from error


CoordinationTopic = Annotated[
    str,
    typer.Option(
        "--coordination-topic",
        metavar="TOPIC",
        callback=_topic_name,
        help="The topic through which consumers coordinate.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
DumpFile = Annotated[
    Path | None,
    typer.Option("--dump", metavar="FILE", help="Look into this dump (`marshal log dump`) instead of a cluster."),
]

DEFAULT_COORDINATION_TOPIC: Final = COORDINATION_TOPIC


class CommandFailed(MarshalError):
    """A command could not do what it was asked for, for a reason that only the command line knows."""


def example(line: str) -> str:
    """The end of every help text. Each is run by a test (tests/cli/test_examples.py)."""
    return f"\b\nExample:\n  {line}"  # \b: not wrapped, so that it can be copied


DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """An error of ours becomes one line on stderr and exit code 1."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except MarshalError as error:
            say(f"marshal: {' '.join(str(error).split())}")
            raise typer.Exit(FAILED) from error
        except BrokenPipeError as error:
            # The reader has gone (`| head`). Python would complain again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from error
        except OSError as error:
            if error.filename is not None or error.errno not in DISK_ERRORS:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            say(
                f"marshal: the output cannot be written ({error.strerror}); what the command has done stays done: look "
                f"before you run it again"
            )
            raise typer.Exit(FAILED) from error

    return run


def settings_of(servers: str | None, config: Path | None) -> dict[str, Any]:
    """librdkafka's settings from the two options; --bootstrap-servers wins. Wrong usage if nothing names a cluster."""
    settings: dict[str, Any] = {"log_level": 0}  # what librdkafka would print, our errors say
    if config is not None:
        settings.update(read_properties(config))
    if servers:
        settings["bootstrap.servers"] = servers
    if not settings.get("bootstrap.servers"):
        raise typer.BadParameter(
            "name the cluster by --bootstrap-servers, MARSHAL_BOOTSTRAP_SERVERS or a line in the "
            "file of --command-config"
        )
    return settings


def read_properties(path: Path) -> dict[str, str]:
    """`key=value` per line; lines that begin with # or ! are comments. Wrong usage for anything else."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text[0] in "#!":
            continue
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"{path}:{number}: expected key=value")
        found[key.strip()] = value.strip()
    return found


def open_transport(servers: str | None, config: Path | None) -> KafkaTransport:
    return KafkaTransport(settings_of(servers, config), CONNECT_TIMEOUT_S)


def look(servers: str | None, config: Path | None, topic: str, dump: Path | None) -> Observer:
    """An observer of the cluster's coordination topic, or of a dump, which names its topic itself."""
    if dump is None:
        return Observer(open_transport(servers, config), topic)
    header, transport = memory_transport(dump)
    return Observer(transport, header.topic)


def must_know(observer: Observer, group: str | None, follow: bool = False) -> None:
    """After the group's log was read: raises CommandFailed if the group is not in it, with the name that is nearest.

    Who follows may wait for a group that is not there yet, and is told so.
    """
    if group is None or any(found.name == group for _, found in observer.groups()):
        return
    observer.fold()  # the other logs
    missing = f"group {group!r} is not in {observer.topic}"
    missing += instead(group, [found.name for _, found in observer.groups()])
    if observer.root is None or not follow:
        raise CommandFailed(missing)
    say(f"{missing}; waiting for its first consumer")


def ago(seconds: float) -> str:
    """For people: one number, rounded down."""
    for unit, size_s in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds // size_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


class _Stderr(logging.Handler):
    """What the library logs, one line each on the stderr of the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@contextmanager
def telling() -> Iterator[None]:
    """What happens to a consumer is told on stderr, each event once: by the library's own log (docs/logging.md)."""
    logger, handler = logging.getLogger("marshal_py"), _Stderr()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def say(line: str) -> None:
    """One line for people, on stderr: stdout belongs to the result."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON document on one line, written out at once so that the next program of a pipe sees it."""
    print(json.dumps(value, ensure_ascii=False), flush=True)
