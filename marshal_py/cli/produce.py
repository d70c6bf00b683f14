"""`marshal produce`: lines of stdin become messages. Reads and prints; transport/sink.py writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Final

import typer

from marshal_py.cli import frame
from marshal_py.transport.sink import KafkaSink

EXAMPLE: Final = frame.example("echo '42:paid' | marshal produce orders --key-separator : --header source=shell")


@frame.reports_errors
def produce(
    topic: Annotated[str, typer.Argument(help="Where to write. It must exist.")],
    key_separator: Annotated[str | None, typer.Option(help="What stands between key and value of a line.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="For every message; repeatable.")]
    = None,
    partition: Annotated[int | None, typer.Option(min=0, help="All into this one.")] = None,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:  # fmt: skip
    """Write each line of stdin as a message, and say how many the cluster has acknowledged."""
    if key_separator == "":
        raise typer.BadParameter("--key-separator must not be empty")
    if topic == coordination_topic:
        raise frame.CommandFailed(f"{topic} is the coordination topic: only the library writes to it")
    headers = [_header(text) for text in header or []]
    sink = KafkaSink(frame.open_door(bootstrap_servers, command_config))
    try:
        for key, value in _lines(key_separator):
            sink.write(topic, value, key, headers, partition)
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


def _lines(separator: str | None) -> Iterator[tuple[bytes | None, bytes]]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        text = line.removesuffix(b"\n").removesuffix(b"\r")
        if separator is None:
            yield None, text
            continue
        key, found, value = text.partition(separator.encode())
        if not found:
            raise frame.CommandFailed(f"line {number} has no {separator!r} between key and value; the lines before it "
                                      f"are written")  # fmt: skip
        yield key, value
