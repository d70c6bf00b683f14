"""Messages as lines: `marshal consume` prints what the messages were, and `marshal produce` makes them again."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from marshal_py.cli.output import CommandFailed
from marshal_py.client.marshal import connect
from marshal_py.errors import ClusterUnreachable
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.producer import KafkaProducer
from tests.cli.shell import DEADLINE_S, MODULE, Shell

# All that a message can be: no value, an empty one, text, bytes that are not utf-8, newlines, headers that repeat.
MESSAGES: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = [
    (b"k", "grüße \u2028 \U0001f4b6".encode(), [("a", b"1"), ("a", b"2")]),
    (b"\xff\xfe", b"\x00\x80\r\n\xe2\x82", [("a", b"\xff"), ("b", b""), ("c", None), ("gr\u00fc\u00dfe", b"x")]),
    (None, b"no key\r", []),
    (b"", b"", []),
    (b"tombstone", None, []),
    (b"two lines", b"one\ntwo\n", []),
]


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(topics={"__marshal": 2, "binary": 1, "copy": 1, "text": 1, "ended": 1}) as running:
        sink = KafkaProducer(KafkaTransport(running.bootstrap_servers, DEADLINE_S))
        for key, value, headers in MESSAGES:
            sink.write("binary", value, key, headers)
        sink.flush(DEADLINE_S)
        sink.close()
        yield running


@pytest.fixture
def shell(broker: Broker) -> Shell:
    return Shell(broker.bootstrap_servers)


def consume(shell: Shell, topic: str, group: str, *options: str, count: int = len(MESSAGES)) -> bytes:
    command = [*MODULE, "consume", topic, "--group", group, "--start", "earliest", "--max-messages", str(count)]
    done = subprocess.run([*command, *options], env=shell.environment(), capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_consume_and_produce_make_the_same_messages_again(shell: Shell) -> None:
    lines = consume(shell, "binary", "copier", "--json")
    assert shell.json("produce", "copy", "--from-json", stdin=lines)["written"] == len(MESSAGES)
    with (
        connect({"bootstrap.servers": shell.servers, "log_level": 0}) as marshal,
        marshal.consumer("checker", ["copy"], start="earliest") as consumer,
    ):
        got = [(m.key, m.value, m.headers) for m in consumer.fetch(len(MESSAGES), min_messages=len(MESSAGES))]
    assert got == MESSAGES


def test_json_says_what_is_text_and_what_is_not(shell: Shell) -> None:
    shown = [json.loads(line) for line in consume(shell, "binary", "json reader", "--json").splitlines()]
    keys = [(one["key"], one["key_base64"]) for one in shown[:4]]
    assert keys == [("k", None), (None, "//4="), (None, None), ("", None)]
    assert shown[1]["value"] is None
    assert shown[1]["headers"][0] == {"name": "a", "value": None, "value_base64": "/w=="}
    assert [one["value"] for one in shown[0]["headers"]] == ["1", "2"]
    assert (shown[4]["value"], shown[4]["value_base64"]) == (None, None)


def test_text_is_the_exact_bytes(shell: Shell) -> None:
    expected = b"".join((value or b"") + b"\n" for _, value, _ in MESSAGES)
    assert consume(shell, "binary", "text reader") == expected
    with_keys = b"".join((key or b"") + b"|" + (value or b"") + b"\n" for key, value, _ in MESSAGES)
    assert consume(shell, "binary", "key reader", "--key-separator", "|") == with_keys


def test_produce_keeps_carriage_returns_and_bytes(shell: Shell) -> None:
    lines = b"\xff:\x80\r\n:\r\nlast:line"
    assert shell.json("produce", "text", "--key-separator", ":", stdin=lines)["written"] == 3
    assert consume(shell, "text", "again", "--key-separator", ":", count=3) == lines + b"\n"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"text", "malformed"),
        (b"[]", "array"),
        (b'{"value": 3}', "int"),
        (b'{"value_base64": "?"}', "base64"),
        (b'{"value": "x", "value_base64": "eA=="}', "both value and value_base64"),
        (b'{"headers": [{"value": "x"}]}', "name"),
    ],
)
def test_a_line_that_is_no_message_is_named(shell: Shell, line: bytes, why: str) -> None:
    result = shell.run("produce", "copy", "--from-json", stdin=line + b"\n")
    assert result.exit_code == 1
    assert "line 1 is no JSON object as `marshal consume --json` prints it" in result.stderr
    assert why in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "marshal: interrupted; 3 written"),
        (ClusterUnreachable("b:9092", "an answer", "cut"), 1, "cut; 3 written"),
        (CommandFailed("line 4: no; the lines before it are written"), 1, "are written; 3 written"),
    ],
)
def test_produce_says_how_much_it_has_written_before_its_end(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, says: str
) -> None:
    """So that whoever goes on knows with which line."""

    def lines(*_: object) -> Iterator[tuple[None, bytes, list[Any]]]:
        yield from [(None, b"x", [])] * 3
        raise error

    monkeypatch.setattr("marshal_py.cli.consume._lines", lines)
    result = shell.run("produce", "ended")
    assert (result.exit_code, result.stderr.strip().endswith(says)) == (code, True), result.stderr


@pytest.mark.parametrize("command", [["groups", "ls"], ["doctor"], ["produce", "copy"], ["check", "nobody"]])
def test_a_full_disk_is_one_line_in_every_command(shell: Shell, command: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*MODULE, *command],
            env=shell.environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == (3 if command[0] == "check" else 1), "unknown, and no warning"
    assert "the output cannot be written (No space left on device)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("full", [False, True])
def test_what_could_not_be_written_out_is_not_acknowledged(shell: Shell, full: bool) -> None:
    """A full disk, or a reader that has gone: the position stays, and the message comes again."""
    group = f"unwritten {full}"
    command = [*MODULE, "consume", "binary", "--group", group, "--start", "earliest"]
    reading, writing = os.pipe()
    os.close(reading)  # nobody reads
    with open("/dev/full", "wb") if full else os.fdopen(writing, "wb") as stdout:
        done = subprocess.run(
            command, env=shell.environment(), stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S
        )
    if full:
        os.close(writing)
        assert done.returncode == 1
        assert "binary:0 at offset 0 is not acknowledged" in done.stderr
    else:
        assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert [one["position"] for one in shell.json("state", group)["groups"][0]["partitions"]] == [0]
