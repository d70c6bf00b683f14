"""`marshal produce`: lines of stdin become messages. Reads and prints; transport/producer.py writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Final

import typer

from marshal_py.cli import frame, lines
from marshal_py.transport.producer import KafkaProducer

EXAMPLE: Final = frame.example("echo '42:paid' | marshal produce orders --key-separator : --header source=shell")


@frame.reports_errors
def produce(
    topic: Annotated[str, typer.Argument(help="Where to write. It must exist.")],
    key_separator: Annotated[str | None, typer.Option(help="What stands between key and value of a line.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="For every message; repeatable.")
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="All into this one.")] = None,
    from_json: Annotated[
        bool,
        typer.Option(
            "--from-json",
            help="Each line is an object as `marshal consume --json` "
            "prints it, and becomes the same key, value and headers.",
        ),
    ] = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Write each line of stdin as a message, and say how many the cluster has acknowledged.

    The bytes before the newline are the value as they are, a carriage return included. Values that hold newlines, no
    value at all, or headers of their own need --from-json.
    """
    if from_json and key_separator is not None:
        raise typer.BadParameter("--key-separator is for text: with --from-json the key has a field")
    if key_separator == "":
        raise typer.BadParameter("--key-separator must not be empty")
    if topic == coordination_topic:
        raise frame.CommandFailed(f"{topic} is the coordination topic: only the library writes to it")
    headers = [_header(text) for text in header or []]
    sink = KafkaProducer(frame.open_transport(bootstrap_servers, command_config))
    try:
        for key, value, own in _messages(key_separator, from_json):
            sink.write(topic, value, key, [*headers, *own], partition)
        sink.flush()
    finally:
        sink.close()
    if as_json:
        frame.print_json({"topic": topic, "written": sink.written})
    else:
        print(f"{sink.written} written")


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
            raise frame.CommandFailed(
                f"line {number} has no {separator!r} between key and value; the lines before it are written"
            )
        yield key, value, []
