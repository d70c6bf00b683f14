"""`marshal produce`: writes lines of stdin as messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Final

import typer
from msgspec import Struct

from marshal_py.cli import lines, output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import CommonOptions, check_topic_name, command
from marshal_py.errors import InvalidOption, TopicMissing
from marshal_py.topics.keys import SubjectKey, subject_key
from marshal_py.transport.producer import KafkaProducer

EXAMPLE: Final = output.example("echo '42:paid' | marshal produce orders --key-separator : --header source=shell")


class Written(Struct, frozen=True):
    """How many messages the cluster has acknowledged."""

    topic: str
    written: int


@command
@prints(Written)
def produce(
    options: CommonOptions,
    topic: Annotated[str, typer.Argument(callback=check_topic_name, help="Where to write. It must exist.")],
    key_separator: Annotated[str | None, typer.Option(help="What separates key and value of a line.")] = None,
    key_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N,N...",
            help="The key of a line is a subject, tokens between dots: write these tokens of it, "
            "counted from 1, as the key instead.",
        ),
    ] = None,
    key_pattern: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="The form of the subjects, as orders.*.*: --key-tokens then counts the * alone, and "
            "a subject of another form is refused.",
        ),
    ] = None,
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
    key_of = _subject_key(key_pattern, key_tokens)
    if key_of is not None and key_separator is None and not from_json:
        raise typer.BadParameter("--key-tokens needs the keys of --key-separator or --from-json")
    if topic == options.coordination_topic:
        raise output.CommandFailed(f"{topic} is the coordination topic: only the library writes to it")
    headers = [_header(text) for text in header or []]
    transport = options.transport()
    producer = KafkaProducer(transport)
    try:
        try:
            for key, value, own in _messages(key_separator, from_json, key_of):
                producer.write(topic, value, key, [*headers, *own], partition)
        except output.CommandFailed:  # it says that the lines before are written
            producer.flush()
            raise
        producer.flush()
        if not producer.written:  # else the cluster has said so
            with closing(transport.admin()) as admin:
                if admin.partition_count(topic) is None:
                    raise TopicMissing(topic)
    finally:
        producer.close()
    options.print_result(Written(topic, producer.written), f"{producer.written} written")


def _header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--header {text!r}: expected NAME=VALUE")
    return name, value.encode()


def _subject_key(pattern: str | None, tokens: str | None) -> SubjectKey | None:
    if tokens is None:
        if pattern is not None:
            raise typer.BadParameter("--key-pattern is for --key-tokens")
        return None
    try:
        return subject_key(pattern, tokens=[int(token) for token in tokens.split(",")])
    except ValueError:
        raise typer.BadParameter(f"--key-tokens {tokens!r}: expected numbers, as 2,1") from None
    except InvalidOption as error:
        raise typer.BadParameter(f"--key-{error}") from None


def _messages(
    separator: str | None, from_json: bool, key_of: SubjectKey | None
) -> Iterator[tuple[bytes | None, bytes | None, lines.Headers]]:
    for number, (key, value, headers) in enumerate(_lines(separator, from_json), 1):
        if key_of is not None:
            try:
                key = key_of(key or b"")
            except InvalidOption as error:
                raise output.CommandFailed(f"line {number}: {error}; the lines before it are written") from None
        yield key, value, headers


def _lines(separator: str | None, from_json: bool) -> Iterator[tuple[bytes | None, bytes | None, lines.Headers]]:
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
