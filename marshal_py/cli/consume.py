"""`marshal consume` and `marshal produce`: a consumer in the shell, and lines of stdin as messages.

A consumer prints messages on stdout, and what happens to it on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from msgspec import Struct

from marshal_py.cli import lines, output
from marshal_py.cli.documents import prints
from marshal_py.cli.lines import DecodingOptions
from marshal_py.cli.options import CommonOptions, check_topic_name, command
from marshal_py.client.driver import last_wills
from marshal_py.client.marshal import Marshal, connect
from marshal_py.client.messages.message import Message
from marshal_py.client.metrics import LOOPBACK, metrics_url, serve
from marshal_py.client.signals import stop_on_signals
from marshal_py.client.values import position_text
from marshal_py.client.values.options import HEARTBEAT_INTERVAL_S, ConsumerOptions
from marshal_py.errors import InvalidOption, MarshalError, TopicMissing
from marshal_py.protocol.wire.records import PRIORITY_MAX
from marshal_py.topics.keys import SubjectKey, subject_key
from marshal_py.transport.producer import KafkaProducer

EXAMPLE: Final = output.example("marshal consume orders --group billing --start earliest --max-messages 10")


@dataclass(frozen=True, kw_only=True)
class ConsumeOptions(DecodingOptions):
    """The options of `consume`: how it takes part in the group, and what it prints."""

    delivery: Annotated[
        Literal["at_least_once", "at_most_once"], typer.Option(help="The delivery mode of the group.")
    ] = "at_least_once"
    client_id: Annotated[str | None, typer.Option(help="Unique per live process; generated if left out.")] = None
    start: Annotated[
        str,
        typer.Option(
            metavar="WHERE", help=f"Where to begin partitions that the group has never read: {position_text.RULE}."
        ),
    ] = "committed"
    heartbeat_interval_s: Annotated[
        float, typer.Option("--heartbeat-interval", metavar="SECONDS", help="A take-over takes about two of these.")
    ] = HEARTBEAT_INTERVAL_S
    max_messages: Annotated[int | None, typer.Option(min=1, help="Stop after this many messages.")] = None
    member: Annotated[
        str | None,
        typer.Option(help="In a group with the policy members or blocks: for which member this consumer works."),
    ] = None
    priority_group: Annotated[
        str | None, typer.Option(metavar="NAME", help="Policies prioritized, pinned and overflow: the priority group.")
    ] = None
    priority: Annotated[
        int, typer.Option(min=0, max=PRIORITY_MAX, help="Policy prioritized: lower ones come first.")
    ] = 0
    min_pending: Annotated[
        int | None, typer.Option(min=1, help="Policy overflow: take part while so many messages are not delivered yet.")
    ] = None
    min_ack_pending: Annotated[
        int | None, typer.Option(min=1, help="Policy overflow: or while so many are delivered and not acknowledged.")
    ] = None
    policy: Annotated[str | None, typer.Option(help="How consumers share partitions: balanced or greedy.")] = None
    release_behind_s: Annotated[
        float | None,
        typer.Option(
            "--release-behind",
            metavar="SECONDS",
            help="Policy greedy: over windows of so many seconds, give partitions away on which this consumer falls "
            "behind. Without it, it keeps them.",
        ),
    ] = None
    on_topic_recreated: Annotated[
        Literal["fail", "earliest"],
        typer.Option(
            help="For a topic that was deleted and created again, where the group's settings say nothing: its "
            "partitions are parked, or consumed from their beginnings."
        ),
    ] = "fail"
    max_deliver: Annotated[
        int | None, typer.Option(min=1, help="After so many deliveries a message goes to --dead-letter-topic instead.")
    ] = None
    dead_letter_topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Where messages go that were delivered --max-deliver times.")
    ] = None
    key_separator: Annotated[str | None, typer.Option(help="Print keys too, with this between key and value.")] = None
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Serve metrics for Prometheus there; 0 takes a free port.")
    ] = None
    metrics_host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where metrics are served: 127.0.0.1 is for this "
            "machine alone, 0.0.0.0 for all, as a container needs it.",
        ),
    ] = LOOPBACK
    evidence_dir: Annotated[
        Path | None,
        typer.Option(
            "--evidence-dir",
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Where to write the state if the consumer ends with Diverged.",
            show_default="the system's temporary folder",
        ),
    ] = None

    def of_consumer(self) -> dict[str, Any]:
        """Returns the arguments of `Marshal.consumer` after the topics: the options here that are called like its."""
        names = {field.name for field in fields(self)}.intersection(field.name for field in fields(ConsumerOptions))
        return {name: getattr(self, name) for name in names} | self.deserializers()


@command
@prints(lines.PrintedMessage)
def consume(
    options: ConsumeOptions,
    topics: Annotated[
        list[str], typer.Argument(metavar="TOPIC...", help="What to read: names of topics, or patterns as 'orders-*'.")
    ],
    group: Annotated[str, typer.Option(help="The group whose members share the topics.")],
) -> None:
    """Consume topics as a member of a group, until ctrl-C.

    Prints the bytes of each value and a newline, and acknowledges the message once they are written out. With --json
    one object per message: key and value as text if they are utf-8, otherwise as key_base64 and value_base64, and the
    headers. The field of each pair that is not used is null. `marshal produce --from-json` writes such lines as the
    same messages again.
    """
    if options.as_json and options.key_separator is not None:
        raise typer.BadParameter("--key-separator is for text: with --json the key has a field")
    position_text.check_topics(options.start, topics)  # before the cluster is contacted
    settings, taking_part, port = options.settings(), options.of_consumer(), options.metrics_port
    with (
        output.logging_to_stderr(),
        connect(
            settings,
            client_id=options.client_id,
            coordination_topic=options.coordination_topic,
            timeout_s=options.timeout,
            evidence_dir=str(options.evidence_dir) if options.evidence_dir is not None else None,
            last_will=last_wills.of_program(settings),
        ) as marshal,
        nullcontext() if port is None else _serving(marshal, port, options.metrics_host),
        marshal.consumer(group, topics, **taking_part) as consumer,
        stop_on_signals(consumer),
    ):
        for count, message in enumerate(consumer, 1):
            lines.write_out(_line(message, options.as_json, options.key_separator), message)
            message.ack()
            if count == options.max_messages:
                break


def _line(message: Message, as_json: bool, key_separator: str | None) -> bytes:
    try:
        return lines.as_json(message) if as_json else lines.as_text(message, key_separator)
    except Exception as error:  # whatever a deserializer raises
        where = f"{message.topic}:{message.partition} at offset {message.offset}"
        raise output.CommandFailed(
            f"{where} cannot be deserialized ({error!r}): it is not acknowledged and will come again"
        ) from error


@contextmanager
def _serving(marshal: Marshal, port: int, host: str) -> Iterator[None]:
    """Serves metrics. Enter it before the consumer joins, so that a port that is taken is noticed first."""
    with serve(marshal, port, host) as exporter:
        output.say(f"metrics at {metrics_url(host, exporter.port)}")
        yield


PRODUCE_EXAMPLE: Final = output.example(
    "echo '42:paid' | marshal produce orders --key-separator : --header source=shell"
)


SETTLE_S: Final = 5.0  # for acknowledgements of what was read, after an error or ctrl-C: somebody waits for the prompt


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
    with _counted(producer):
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
    options.print_result(Written(topic, producer.written), f"{producer.written} written")


@contextmanager
def _counted(producer: KafkaProducer) -> Iterator[None]:
    """Adds to an error, and to ctrl-C, how many messages are written, and closes the producer."""
    try:
        yield
    except (MarshalError, KeyboardInterrupt) as error:
        settled = False
        with suppress(KeyboardInterrupt):  # the second one
            settled = producer.settle(SETTLE_S)
        error.add_note(f"{'' if settled else 'at least '}{producer.written} written")
        raise
    finally:
        producer.close()


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
