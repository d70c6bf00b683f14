"""Every command against a log of protocol 1, or its dump, says one clear line and ends with exit code 1 (L6).

tests/fixtures/protocol_1.dump was written by the last release of protocol 1: two logs, the group `billing`, a consumer
that handled twenty messages, a move of a position.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

import marshal_py
from marshal_py.errors import ProtocolUnknown
from marshal_py.transport.dump import Reader
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from tests.cli.shell import DEADLINE_S, Shell

DUMP = Path(__file__).resolve().parents[1] / "fixtures" / "protocol_1.dump"
WORDS = "protocol version 1, which this library cannot read"

LOOKS = {
    "state": ("state",),
    "state of a group": ("state", "billing"),
    "advisories": ("advisories",),
    "log tail": ("log", "tail"),
    "log tail of a group": ("log", "tail", "billing", "--raw"),
    "explain": ("explain", "billing", "orders:0"),
    "diff": ("explain", "billing", "--since", "1", "--at", "5"),
    "verify": ("verify",),
}
OFFLINE = {"simulate": ("simulate",), "simulate on": ("simulate", "--seeds", "0:2"), "doctor": ("doctor",)}
LIVE = {
    "log dump": ("log", "dump"),
    "log dump of a group": ("log", "dump", "billing", "--human"),
    "lag": ("state", "--lag", "billing"),
    "groups ls": ("groups", "ls"),
    "state --settings": ("state", "billing", "--settings"),
    "groups create": ("groups", "create", "shipping", "--yes"),
    "groups update": ("groups", "update", "billing", "--policy", "greedy", "--yes"),
    "groups update --shrink": ("groups", "update", "billing", "--shrink", "orders=1", "--yes"),
    "groups rm": ("groups", "rm", "billing", "--yes"),
    "state --members": ("state", "--members"),
    "state --members of a group": ("state", "billing", "--members"),
    "members step-down": ("members", "step-down", "billing", "1"),
    "evict": ("evict", "billing", "1", "--yes"),
    "pause": ("pause", "billing", "--yes"),
    "resume": ("resume", "billing", "--yes"),
    "set-position": ("set-position", "billing", "orders", "--to", "earliest", "--yes"),
    "set-position, dry": ("set-position", "billing", "orders", "--to", "earliest", "--dry-run"),
    "snapshot": ("snapshot", "--yes"),
    "log reset": ("log", "reset", "--yes"),
    "consume": ("consume", "orders", "--group", "billing"),
}


@pytest.fixture(scope="module")
def old() -> Iterator[Shell]:
    """A cluster whose coordination topic holds these logs."""
    with Broker(topics={"__marshal": 2, "orders": 2}) as broker:
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
        with Reader(DUMP) as reader:
            for record in reader:
                producer.produce("__marshal", record.value, record.key, record.log)
        assert producer.flush(DEADLINE_S) == 0
        yield Shell(broker.bootstrap_servers)


def refused(result: object) -> None:
    """One line of reason on stderr, whatever was printed before; exit code 1."""
    code, lines = getattr(result, "exit_code"), getattr(result, "stderr").splitlines()  # noqa: B009
    assert code == 1, lines
    assert [line for line in lines if WORDS in line] == lines, lines
    assert len(lines) == 1
    assert lines[0].startswith("marshal: ")
    assert "use a new coordination topic" in lines[0]


@pytest.mark.parametrize("arguments", [*LOOKS.values(), *OFFLINE.values()], ids=[*LOOKS, *OFFLINE])
def test_a_dump_is_refused(arguments: tuple[str, ...]) -> None:
    """L6."""
    if arguments[0] == "doctor":
        shown = Shell("").run(*arguments, "--dump", str(DUMP))
        assert shown.exit_code == 1
        assert WORDS in shown.output
        return
    refused(Shell("").run(*arguments, "--dump", str(DUMP)))


def test_a_dump_is_not_loaded(old: Shell) -> None:
    """L6: nobody could read the topic that it would become."""
    refused(old.run("log", "load", str(DUMP), "--coordination-topic", "__restored"))
    assert KafkaTransport(old.servers, DEADLINE_S).admin().partition_count("__restored") is None


@pytest.mark.parametrize("arguments", [*LOOKS.values(), *LIVE.values()], ids=[*LOOKS, *LIVE])
def test_a_log_is_refused(old: Shell, arguments: tuple[str, ...]) -> None:
    """L6; `log dump` too: who wants to keep the log takes the release that wrote it, which can read it."""
    ends = KafkaTransport(old.servers, DEADLINE_S).log("__marshal", "onlooker")
    try:
        before = [ends.bounds(number, DEADLINE_S) for number in (0, 1)]
        refused(old.run(*arguments))
        assert [ends.bounds(number, DEADLINE_S) for number in (0, 1)] == before, "nothing was written"
    finally:
        ends.close(0.0)


def test_the_doctor_names_it(old: Shell) -> None:
    shown = old.run("doctor", "--json")
    assert shown.exit_code == 1
    failed = [check for check in json.loads(shown.stdout)["checks"] if check["level"] == "fail"]
    assert [check["name"] for check in failed] == ["ProtocolUnknown"]
    assert WORDS in failed[0]["found"]


def test_a_consumer_does_not_start(old: Shell) -> None:
    """L6: `connect` reads the root first."""
    with pytest.raises(ProtocolUnknown) as raised:
        marshal_py.connect({"bootstrap.servers": old.servers, "log_level": 0})
    assert (raised.value.log, raised.value.value, raised.value.outdated) == (0, 1, True)
