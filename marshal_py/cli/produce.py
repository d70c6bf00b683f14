"""`marshal produce`: writes lines of stdin as messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Final

import typer

from marshal_py.cli import lines, output
from marshal_py.cli.options import CommonOptions, command
from marshal_py.transport.producer import KafkaProducer

EXAMPLE: Final = output.example("echo '42:paid' | marshal produce orders --key-separator : --header source=shell")


@command
def produce(
    options: CommonOptions,
    topic: Annotated[str, typer.Argument(help="Where to write. It must exist.")],
    key_separator: Annotated[str | None, typer.Option(help="What separates key and value of a line.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="For every message; repeatable.")
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Write every message to this one.")] = None,
    from_json: Annotated[
        bool,
        typer.Option(
            "--from-json",
            help="Each line is an object as `marshal consume --json` "
            "prints it, and becomes the same key, value and headers.",
        ),
    ] = False,
) -> None:
    """Write each line of stdin as a message, and say how many the cluster has acknowledged.

    The bytes before the newline are the value as they are, a carriage return included. Values that hold newlines, no
    value at all, or headers of their own need --from-json.
    """
    if from_json and key_separator is not None:
        raise typer.BadParameter("--key-separator is for text: with --from-json the key has a field")
    if key_separator == "":
        raise typer.BadParameter("--key-separator must not be empty")
    if topic == options.coordination_topic:
        raise output.CommandFailed(f"{topic} is the coordination topic: only the library writes to it")
    headers = [_header(text) for text in header or []]
    producer = KafkaProducer(options.transport())
    try:
        for key, value, own in _messages(key_separator, from_json):
            producer.write(topic, value, key, [*headers, *own], partition)
        producer.flush()
    finally:
        producer.close()
    options.print_result({"topic": topic, "written": producer.written}, f"{producer.written} written")


def _header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--header {text!r}: expected NAME=VALUE")
    return name, value.encode()


def _messages(separator: str | None, from_json: bool) -> Iterator[tuple[bytes | None, bytes | None, lines.Headers]]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        text = line.removesuffix(b"\n")
        if from_json:
            yield lines.from_json(text, number)
            continue
        if separator is None:
            yield None, text, []
            continue
        key, found, value = text.partition(separator.encode())
        if not found:
            raise output.CommandFailed(
                f"line {number} has no {separator!r} between key and value; the lines before it are written"
            )
        yield key, value, []
