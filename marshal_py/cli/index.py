"""`marshal index`: a key index in a file, which makes `marshal get --index` fast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from marshal_py.cli import output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import CommonOptions, TopicName, command
from marshal_py.cli.scan_bar import ScanBar
from marshal_py.topics.key_index import Status
from marshal_py.topics.topic import Topic

EXAMPLE: Final = output.example("marshal index users users.idx")
FOLLOW_S: Final = 1.0  # between two updates

File = Annotated[Path, typer.Argument(metavar="FILE", help="The index, an SQLite file.")]


@command
@prints(Status)
def index(
    options: CommonOptions,
    topic: TopicName,
    file: File,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Then keep it up to date until Ctrl-C.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only show how far it is behind; change nothing.")] = False,
) -> None:
    """Index the keys of a topic, so that `marshal get --index` is fast. Goes on where an earlier run ended.

    It creates the file if there is none, and shows how many keys and messages the index has. Other processes can use it
    meanwhile.
    """
    if follow and status:
        raise typer.BadParameter("--follow or --status, not both")
    if status:
        require_index(file, topic)
        with _opened(options, topic, file) as source:
            _print(options, source.index_status())
        return
    with output.until_interrupted(follow) as interrupted, _opened(options, topic, file) as source:
        known: Status | None = None
        while True:
            found = source.update_index()
            if found != known:
                _print(options, found)
            known = found
            if not follow or interrupted():
                return
            time.sleep(FOLLOW_S)


def require_index(file: Path, topic: str) -> None:
    """Raises CommandFailed if there is no such file: only `marshal index` without --status creates one."""
    if not file.exists():
        raise output.CommandFailed(f"{file} does not exist: marshal index {topic} {file}")


@contextmanager
def _opened(options: CommonOptions, topic: str, file: Path) -> Iterator[Topic]:
    bar = ScanBar()
    source = Topic(options.transport(), topic, on_progress=bar.show)
    try:
        source.key_index(file)
        yield source
    finally:
        bar.hide()
        source.close()


def _print(options: CommonOptions, found: Status) -> None:
    behind = f", {found.behind} offsets behind" if found.behind else ""
    options.print_result(
        found,
        f"{found.messages} messages of {found.keys} keys of topic {found.topic!r} are indexed, with copies of "
        f"{found.copies}{behind}",
    )
