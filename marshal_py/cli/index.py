"""`marshal index build / status / follow`: a key index in a file, which makes `marshal get --index` fast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from msgspec import structs

from marshal_py.cli import output
from marshal_py.cli.options import CommonOptions, command
from marshal_py.cli.scan_bar import ScanBar
from marshal_py.topics.key_index import Status
from marshal_py.topics.topic import Topic

BUILD_EXAMPLE: Final = output.example("marshal index build users users.idx")
STATUS_EXAMPLE: Final = output.example("marshal index status users users.idx")
FOLLOW_EXAMPLE: Final = output.example("marshal index follow users users.idx")
FOLLOW_S: Final = 1.0  # between two updates

app: Final = typer.Typer(no_args_is_help=True, help="Key indexes: where the messages of each key are.")
TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The index, an SQLite file.")]


@app.command("build", epilog=BUILD_EXAMPLE)
@command
def build(options: CommonOptions, topic: TopicName, file: File) -> None:
    """Index what a topic holds now. Goes on where an earlier build ended, and creates the file if it does not exist."""
    with _opened(options, topic, file) as source:
        found = source.update_index()
    _print(options, found)


@app.command("status", epilog=STATUS_EXAMPLE)
@command
def status(options: CommonOptions, topic: TopicName, file: File) -> None:
    """Show how many keys and messages an index has, and how far it is behind the topic. Changes nothing."""
    require_index(file, topic)
    with _opened(options, topic, file) as source:
        _print(options, source.index_status())


@app.command("follow", epilog=FOLLOW_EXAMPLE)
@command
def follow(options: CommonOptions, topic: TopicName, file: File) -> None:
    """Keep an index up to date until Ctrl-C. Other processes can use the index meanwhile."""
    require_index(file, topic)
    with output.until_interrupted(), _opened(options, topic, file) as source:
        known: Status | None = None
        while True:
            found = source.update_index()
            if found != known:
                _print(options, found)
            known = found
            time.sleep(FOLLOW_S)


def require_index(file: Path, topic: str) -> None:
    """Raises CommandFailed if there is no such file: only `marshal index build` creates one."""
    if not file.exists():
        raise output.CommandFailed(f"{file} does not exist: marshal index build {topic} {file}")


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
        structs.asdict(found),
        f"{found.messages} messages of {found.keys} keys of topic {found.topic!r} are indexed, with copies of "
        f"{found.copies}{behind}",
    )
