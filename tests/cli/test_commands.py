"""produce, consume, state, log and doctor over the embedded broker: results, JSON shapes, exit codes."""

from __future__ import annotations

import io
import json
import signal
import socket
import urllib.request
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from marshal_py.cli import options, output
from marshal_py.cli.options import CommonOptions
from marshal_py.client.marshal import VERSION, connect
from marshal_py.testing import MemoryCluster
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.kafka_admin import KafkaAdmin
from marshal_py.transport.memory import MemoryAdmin, MemoryTransport
from tests.cli.shell import DEADLINE_S, Shell
from tests.support.broker_faults import fail_requests

COMMANDS = [
    ["demo"],
    ["consume"],
    ["produce"],
    ["state"],
    ["log"],
    ["log", "tail"],
    ["log", "dump"],
    ["doctor"],
    ["verify"],
    ["log", "load"],
    ["snapshot"],
    ["log", "reset"],
    ["pause"],
    ["advisories"],
]


# --- the frame


def test_version(shell: Shell) -> None:
    assert shell.run("--version").stdout.strip() == VERSION


def test_the_help_of_consume_says_which_fields_are_null(shell: Shell) -> None:
    assert "The field of each pair that is not used is null." in " ".join(shell.run("consume", "--help").stdout.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(shell: Shell, command: list[str]) -> None:
    result = shell.run(*command, "--help")
    assert result.exit_code == 0
    if command != ["log"]:
        for option in ("--bootstrap-servers", "--command-config", "--coordination-topic", "--json", "Example:"):
            assert option in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["consume", "orders"],  # no group
        ["consume", "orders", "--group", "g", "--delivery", "exactly_once"],
        ["produce"],
        ["produce", "orders", "--header", "no equals sign"],
        ["produce", "orders", "--key-separator", ""],
        ["produce", "orders", "--key-tokens", "1"],
        ["produce", "orders", "--key-separator", ":", "--key-tokens", "1;2"],
        ["produce", "orders", "--key-separator", ":", "--key-tokens", "0"],
        ["produce", "orders", "--key-separator", ":", "--key-tokens", "2", "--key-pattern", "orders.*"],
        ["produce", "orders", "--key-separator", ":", "--key-pattern", "orders.*"],
        ["state", "--command-config", "/does/not/exist"],
        ["get", "orders", "--key", "k", "--time", "9999-12-31T23:59:59-23:00"],
        ["demo", "--seconds", "1"],
        ["log", "tail", "-n", "-1"],
    ],
)
def test_wrong_usage_is_2(shell: Shell, arguments: list[str]) -> None:
    assert shell.run(*arguments).exit_code == 2


def test_no_cluster_named_is_wrong_usage() -> None:
    assert Shell("").run("state").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["produce", "missing"], "topic 'missing' does not exist"),
        (["produce", "__marshal"], "is the coordination topic"),
        (["produce", "orders", "--partition", "4"], "has the partitions 0 to 3"),
        (["consume", "missing", "--group", "g"], "topic 'missing' does not exist"),
        (["consume", "orders", "--group", "g", "--heartbeat-interval", "0.1"], "--heartbeat-interval 0.1"),
        (["consume", "orders", "--group", "g", "--release-behind", "2"], "--release-behind 2.0"),
        (["consume", "orders", "--group", "g", "--policy", "magic"], "--policy 'magic'"),
        (["consume", "orders", "--group", "g", "--max-deliver", "3"], "name a --dead-letter-topic as well"),
        (["consume", "orders", "--group", "g", "--dead-letter-topic", "orders"], "another topic than those"),
        (["state", "missing"], "group 'missing' is not in __marshal"),
        (["state", "--coordination-topic", "missing"], "coordination topic 'missing' is missing"),
        (["log", "dump", "--coordination-topic", "missing"], "coordination topic 'missing' is missing"),
        (["demo"], "clients of an embedded broker cannot create topics"),
    ],
)
@pytest.mark.usefixtures("billing")
def test_a_refusal_is_1_and_one_line(shell: Shell, arguments: list[str], reason: str) -> None:
    result = shell.run(*arguments, stdin=b"line\n")
    assert result.exit_code == 1
    assert reason in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_the_environment_names_the_coordination_topic(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARSHAL_COORDINATION_TOPIC", "elsewhere")
    result = shell.run("groups", "ls")
    assert result.exit_code == 1
    assert "'elsewhere'" in result.stderr
    assert "'named'" in shell.run("groups", "ls", "--coordination-topic", "named").stderr


def test_looking_creates_no_topic(shell: Shell) -> None:
    assert shell.run("state", "--coordination-topic", "never").exit_code == 1
    assert shell.run("produce", "never", stdin=b"line\n").exit_code == 1
    assert shell.run("produce", "never", stdin=b"line\n").exit_code == 1


def test_the_file_names_the_cluster(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text(f"# ours\n\nbootstrap.servers = {shell.servers}\nclient.id=shell\n", encoding="utf-8")
    assert Shell("").run("doctor", "--command-config", str(file)).exit_code == 0
    assert shell.run("doctor", "--command-config", str(file)).exit_code == 0
    other = Shell("127.0.0.1:1").run("doctor", "--command-config", str(file))
    assert other.exit_code == 2, "nobody knows which one is meant"
    assert f"names {shell.servers}, and MARSHAL_BOOTSTRAP_SERVERS names 127.0.0.1:1" in " ".join(other.stderr.split())
    assert shell.run("doctor", "--command-config", str(file), "--bootstrap-servers", "127.0.0.1:1").exit_code == 1
    file.write_text("no equals sign\n", encoding="utf-8")
    assert shell.run("doctor", "--command-config", str(file)).exit_code == 2
    file.write_bytes("sasl.password=gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n\n".encode("latin-1"))
    assert shell.run("doctor", "--command-config", str(file)).exit_code == 2
    file.write_text("group.id=mine\n", encoding="utf-8")
    assert shell.run("state", "--command-config", str(file)).exit_code == 1  # refused by name: InvalidOption


def test_a_group_that_went_back_to_ordinary_consumers_may_have_some(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice was to delete it here."""
    monkeypatch.setattr(KafkaAdmin, "live_kafka_members", lambda *_: 2)
    assert shell.run("groups", "create", "back", "--yes").exit_code == 0
    assert "fail  Kafka consumers: 2 ordinary Kafka consumers use" in shell.run("doctor", "back").stdout
    assert shell.run("groups", "rm", "back", "--yes").exit_code == 0
    after = shell.run("doctor", "back")
    assert (after.exit_code, "ordinary Kafka consumers" in after.stdout) == (0, False)


# --- produce


def test_produce_writes_keys_and_headers_to_a_partition(shell: Shell) -> None:
    result = shell.json(
        "produce",
        "empty",
        "--key-separator",
        ":",
        "--header",
        "a=1",
        "--header",
        "b=",
        "--partition",
        "1",
        stdin=b"k:v:w\n:\nlast:line",
    )
    assert result == {"topic": "empty", "written": 3}
    with (
        connect({"bootstrap.servers": shell.servers, "log_level": 0}) as marshal,
        marshal.consumer("reader", ["empty"], start="earliest") as consumer,
    ):
        got = list(consumer.fetch(3, min_messages=3))
    assert [(message.key, message.value, message.partition) for message in got] == [
        (b"k", b"v:w", 1),
        (b"", b"", 1),
        (b"last", b"line", 1),
    ]
    assert got[0].headers == [("a", b"1"), ("b", b"")]


def test_produce_makes_keys_of_tokens(shell: Shell) -> None:
    """The same as `subject_key`, with a pattern and without one; a subject of another form ends the command."""
    tokens = ("produce", "tokens", "--key-separator", ":", "--key-tokens", "2,1")
    shell.json(*tokens, stdin=b"eu.42.paid:1\n")
    shell.json(*tokens, "--key-pattern", "orders.*.*", stdin=b"orders.eu.42:2\n")
    shell.json("produce", "tokens", "--from-json", "--key-tokens", "1", stdin=b'{"key": "us.7", "value": "3"}\n')
    refused = shell.run(*tokens, "--key-pattern", "orders.*.*", stdin=b"orders.eu.42:4\nrefunds.eu.42:5\n")
    assert refused.exit_code == 1
    assert "line 2: subject=b'refunds.eu.42' is not allowed: it must match 'orders.*.*'" in refused.stderr
    with (
        connect({"bootstrap.servers": shell.servers, "log_level": 0}) as marshal,
        marshal.consumer("reader of tokens", ["tokens"], start="earliest") as consumer,
    ):
        got = {message.value: message.key for message in consumer.fetch(4, min_messages=4)}
    assert got == {b"1": b"42.eu", b"2": b"42.eu", b"3": b"us", b"4": b"42.eu"}


def test_a_line_without_separator_is_named(shell: Shell) -> None:
    result = shell.run("produce", "orders", "--key-separator", "|", stdin=b"no separator\n")
    assert result.exit_code == 1
    assert "line 1 has no '|'" in result.stderr


def test_a_message_too_large_is_named(shell: Shell, broker: Broker) -> None:
    """The topic says how large a message may be."""
    fail_requests(broker, "Produce", KafkaError.MSG_SIZE_TOO_LARGE)
    result = shell.run("produce", "full", stdin=b"x")
    assert result.exit_code == 1
    assert "too large" in result.stderr


def test_the_embedded_broker_is_not_overfilled(shell: Shell) -> None:
    """It would drop the oldest records without a word."""
    result = shell.run("produce", "full", stdin=(b"x" * 900_000 + b"\n") * 5)
    assert result.exit_code == 1
    assert "embedded broker" in result.stderr


# --- consume


def test_consume_prints_json_lines_and_leaves(shell: Shell, billing: str) -> None:
    child = shell.start("consume", "orders", "--group", "json", "--start", "earliest", "--max-messages", "20", "--json")
    stdout, stderr = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0, stderr
    messages = [json.loads(line) for line in stdout.splitlines()]
    assert {message["value"] for message in messages} == {str(number) for number in range(20)}
    assert list(messages[0]) == [
        "topic",
        "partition",
        "offset",
        "key",
        "value",
        "timestamp",
        "token",
        "key_base64",
        "value_base64",
        "headers",
        "delivery_count",
    ]
    (claimed,) = [line for line in stderr.splitlines() if "claimed" in line]
    assert claimed.startswith("group json: claimed 4 partitions of orders: 0-3 (")
    found = shell.json("state", "json")["groups"][0]
    assert found["sessions"] == []
    assert sum(partition["position"] for partition in found["partitions"]) == 20


def test_consume_stops_at_sigterm_and_releases(shell: Shell, billing: str) -> None:
    child = shell.start(
        "consume",
        "orders",
        "--group",
        "sigterm",
        "--start",
        "earliest",
        "--client-id",
        "me",
        "--delivery",
        "at_most_once",
    )
    assert child.stdout is not None
    first = child.stdout.readline().strip()
    assert first.isdigit()

    live = shell.json("state", "sigterm")["groups"][0]
    assert live["delivery"] == "at_most_once"
    assert [(session["client_id"], session["state"], len(session["claims"])) for session in live["sessions"]] == [
        ("me", "fresh", 4)
    ]
    assert {partition["owner"] for partition in live["partitions"]} == {"me"}

    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0
    assert shell.json("state", "sigterm")["groups"][0]["sessions"] == []


def test_the_reader_of_a_pipe_may_go(shell: Shell, billing: str) -> None:
    child = shell.start("log", "dump")
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.wait(DEADLINE_S) == 141
    assert "Traceback" not in child.stderr.read()
    child.stderr.close()


# --- state


def test_state_shows_positions_and_lag(shell: Shell, billing: str) -> None:
    found = shell.json("state", billing)
    assert list(found) == ["coordination_topic", "incarnation", "groups"]
    (group,) = found["groups"]
    assert (group["group"], group["delivery"], group["pause"]) == ("billing", "at_least_once", None)
    assert [partition["partition"] for partition in group["partitions"]] == [0, 1, 2, 3]
    for partition in group["partitions"]:
        assert partition["owner"] is None
        assert partition["lag"] == partition["end"] - partition["position"]
    table = shell.run("state").stdout
    assert "group billing  (at least once; log 1)" in table
    assert "no live session" in table


def test_an_unused_topic_is_no_error(shell: Shell) -> None:
    for command in (["state"], ["log", "tail"], ["log", "tail", "--follow"], ["log", "dump", "--human"]):
        result = shell.run(*command, "--coordination-topic", "__unused")
        assert result.exit_code == 0
        assert result.stderr.strip() == "no consumer has ever run here"
    assert shell.json("state", "--coordination-topic", "__unused")["groups"] == []


@pytest.mark.parametrize("command", [["state"], ["state", "--json"], ["groups", "ls"], ["log", "tail"], ["advisories"]])
def test_a_wrong_coordination_topic_is_an_error(shell: Shell, billing: str, command: list[str]) -> None:
    for topic, why in (("nowhere", "is missing"), ("orders", "orders:0 has messages")):
        result = shell.run(*command, "--coordination-topic", topic)
        assert (result.exit_code, result.stdout) == (1, ""), result.output
        assert len(result.stderr.splitlines()) == 1
        assert topic in result.stderr
        assert why in result.stderr


FORMATS = [
    (["state", "billing"], "group"),
    (["state", "billing", "--lag"], "topic"),
    (["state", "--members"], "group"),
    (["groups", "ls"], "group"),
    (["topics", "ls"], "topic"),
    (["topics", "ls", "orders"], "partition"),
    (["doctor", "billing"], "name"),
]


@pytest.mark.parametrize(("command", "first"), FORMATS, ids=lambda given: " ".join(given))
def test_a_table_has_four_formats(shell: Shell, billing: str, command: list[str], first: str) -> None:
    """CSV is without another line. `first`: the column that it begins with."""
    comma, wide = shell.run(*command, "-o", "csv"), shell.run(*command, "-o", "wide")
    assert (comma.exit_code, wide.exit_code) == (0, 0), comma.output + wide.output
    heads = comma.stdout.split("\n", 1)[0].split(",")
    assert heads[0] == first
    assert wide.stdout.split("\n", 1)[0].split() == " ".join(heads).replace("_", " ").split()
    assert type(json.loads(shell.run(*command, "-o", "json").stdout)) is type(shell.json(*command))


def test_a_wrong_format_is_refused(shell: Shell, billing: str) -> None:
    assert shell.run("groups", "ls", "-o", "yaml").exit_code == 2
    for view in ("--settings", "--csv"):
        refused = shell.run("state", billing, view, "--format", "csv")
        assert (refused.exit_code, f"{view} has no rows for -o csv" in refused.stderr) == (2, True)
    assert json.loads(shell.run("state", "--nothing", "--format=json").stderr)["error"] == "Usage"


def test_a_table_in_a_pipe_is_complete(shell: Shell, billing: str) -> None:
    """No column is cut, so orders:1, orders:10 and orders:11 stay what they are."""
    row = [", ".join(f"orders:{number}" for number in range(60)), "x" * 200]
    with redirect_stdout(io.StringIO()) as shown:
        output.print_table(("partitions", "more"), [row])
    assert "orders:59" in shown.getvalue()
    assert len(shown.getvalue().splitlines()) == 2


def test_a_dry_run_names_the_change_and_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryCluster() as cluster:
        monkeypatch.setattr(CommonOptions, "transport", lambda _: MemoryTransport(cluster.broker))
        memory = Shell("unused:1")
        cluster.create_topic("orders", 3)
        assert memory.json("topics", "rm", "orders", "--dry-run")["groups"] == [], "nobody has ever consumed here"
        consumer = cluster.connect().consumer("billing", ["orders"], start="earliest")
        cluster.run_until(lambda: len(consumer.cached_info().claims) == 3)
        grown = memory.json(
            "topics", "update", "orders", "--partitions", "5", "--config", "retention.ms=9", "--dry-run"
        )
        assert grown["would"] == {"partitions": "3 -> 5", "retention.ms": "-1 -> 9"}
        assert grown["groups"] == ["billing"]
        shown = memory.run("topics", "rm", "orders", "--dry-run").stdout
        assert "  partitions: 3\n  offsets: 0\ngroups that consume it: billing" in shown
        asked = memory.run("topics", "rm", "orders", stdin=b"n\n")
        assert (asked.exit_code, "billing" in asked.stderr) == (1, True)
        first = memory.json("topics", "ls", "orders")["partitions"][0]
        assert (first["leader"], first["replicas"], first["isr"]) == (0, [0], [0])
        monkeypatch.setattr(MemoryAdmin, "replicas", lambda self, topic: {})  # a broker that has not heard of it yet
        first = memory.json("topics", "ls", "orders")["partitions"][0]
        assert (first["leader"], first["replicas"], first["isr"]) == (None, [], [])


def test_a_group_is_created_by_the_first_command_on_a_cluster() -> None:
    with Broker(topics={"__marshal": 4}) as broker:
        fresh = Shell(broker.bootstrap_servers)
        words = ("groups", "create", "shipping", "--policy", "members", "--max-members", "4", "--member", "m1")
        planned = fresh.run(*words, "--dry-run")
        assert planned.exit_code == 0, planned.output
        assert "would be the first of __marshal" in planned.stdout
        assert fresh.json("groups", "ls") == []
        created = fresh.run(*words, "--yes")
        assert created.exit_code == 0, created.output
        assert fresh.json("groups", "ls")[0]["group"] == "shipping"
        assert fresh.json(*words, "--yes")["created"] is False
        assert fresh.run(*words, "--member", "m2", "--yes").exit_code == 1


# --- log


def test_log_dump_has_every_record_with_its_verdict(shell: Shell, billing: str) -> None:
    header, *lines, end = [json.loads(line) for line in shell.run("log", "dump", billing, "--json").stdout.splitlines()]
    assert (header["dump"], header["version"], header["group"]) == ("marshal", 1, billing)
    assert end["records"] == len(lines)
    assert list(lines[0]) == [
        "log",
        "offset",
        "time_ms",
        "key",
        "value",
        "group",
        "type",
        "fields",
        "verdict",
        "reason",
        "sum",
    ]
    assert {line["log"] for line in lines} == {0, 1}, "the group's log, and log 0, which holds the root"
    assert lines[0]["type"] == "Genesis"
    records = [line for line in lines if line["group"] == billing]
    assert records[0]["type"] == "Join"
    assert records[-1]["type"] == "Leave"
    assert {record["verdict"] for record in records} == {"accepted"}
    assert [record["offset"] for record in records] == sorted(record["offset"] for record in records)

    everything = [json.loads(line) for line in shell.run("log", "dump").stdout.splitlines()]
    assert len(everything) > len(lines)
    assert [span["log"] for span in everything[0]["logs"]] == list(range(16))
    assert list(everything[1]) == ["log", "offset", "time_ms", "key", "value", "sum"]


def test_log_tail_shows_the_newest(shell: Shell, billing: str) -> None:
    dumped = shell.run("log", "dump", billing, "--human").stdout.splitlines()
    assert shell.run("log", "tail", billing, "-n", "3").stdout.splitlines() == dumped[-3:]
    assert shell.run("log", "tail", billing, "-n", "0").stdout == ""
    assert "leaves (stopped)" in dumped[-1]
    lines = tail(shell, billing)
    every, until = [line["type"] for line in lines], str(lines[2]["time"])
    assert tail(shell, billing, "--until", until) == [line for line in lines if str(line["time"]) <= until] != lines
    assert shell.run("log", "tail", "--until", until, "--follow").exit_code == 2
    assert [line["type"] for line in tail(shell, billing, "--type", "join", "--type", "Leave")] == ["Join", "Leave"]
    assert [line["type"] for line in tail(shell, billing, "--no-heartbeats")] == [
        kind for kind in every if kind != "Heartbeat"
    ]
    assert shell.run("log", "tail", "--type", "Jump").exit_code == 2


def tail(shell: Shell, *arguments: str) -> list[dict[str, object]]:
    shown = shell.run("log", "tail", *arguments, "-n", "1000", "--json").stdout
    return [json.loads(line) for line in shown.splitlines()]


def test_a_cluster_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    class Unreachable(KafkaTransport):
        def __init__(self, settings: Mapping[str, Any], timeout_s: float) -> None:
            waited.append(timeout_s)
            super().__init__(settings, timeout_s)

    monkeypatch.setattr(options, "KafkaTransport", Unreachable)
    result = Shell("127.0.0.1:1").run("groups", "ls", "--timeout", "0.1", "--json")
    failure = json.loads(result.stderr)
    assert (result.exit_code, failure["error"], failure["retriable"]) == (1, "ClusterUnreachable", True)
    assert waited == [0.1]


def test_log_tail_follows(shell: Shell, billing: str) -> None:
    """What comes after the command was started is shown, and ctrl-C is a clean end."""
    child = shell.start("log", "tail", "followed", "--follow", "--json", "-n", "1000")
    try:
        with (
            connect({"bootstrap.servers": shell.servers, "log_level": 0}, client_id="newcomer") as marshal,
            marshal.consumer("followed", ["orders"]),
        ):
            assert child.stdout is not None
            first = json.loads(child.stdout.readline())
        assert (first["type"], first["fields"]["client_id"]) == ("Join", "newcomer")
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0


# --- doctor


def test_doctor_names_the_embedded_broker_and_what_it_lacks(shell: Shell, billing: str) -> None:
    shell.run("produce", "orders", stdin=b"one more\n")
    found = shell.json("doctor")
    assert found["ok"] is True
    assert {"name", "level", "found", "advice"} == set(found["checks"][0])
    levels = {check["name"]: check["level"] for check in found["checks"]}
    assert levels == {
        "cluster": "ok",
        "broker": "warn",
        "coordination topic": "ok",
        "settings": "warn",
        "root": "ok",
        "content": "ok",
        "growth": "ok",
        "clocks": "ok",
        "versions": "ok",
        "witnesses": "ok",
        "no consumer": "warn",
    }
    left = [check["found"] for check in found["checks"] if check["name"] == "no consumer"]  # of other tests, too
    assert any(one.startswith(f"'{billing}': no consumer is there, and ") for one in left)
    assert shell.run("doctor", "--as", "king").exit_code == 2
    assert shell.run("doctor", "--fail-on", "never").exit_code == 2
    strict = shell.run("doctor", "--fail-on", "warn")
    assert (strict.exit_code, "failed: broker, settings" in strict.stderr) == (1, True)
    lacks = next(check["found"] for check in found["checks"] if check["name"] == "broker")
    assert "describe_config" in lacks
    assert "warn  broker: embedded broker" in shell.run("doctor").stdout


def test_doctor_finds_nobody() -> None:
    result = Shell("127.0.0.1:1").run("doctor", "--timeout", "0.5")
    assert result.exit_code == 1
    assert result.stdout.startswith("fail  cluster: no answer from 127.0.0.1:1")
    assert result.stderr.strip() == "marshal: failed: cluster"


def test_doctor_does_not_mind_an_unused_topic(shell: Shell) -> None:
    for topic, sentence in (("__unused", "no consumer has ever run here"), ("nowhere", "does not exist yet")):
        result = shell.run("doctor", "--coordination-topic", topic)
        assert result.exit_code == 0
        assert sentence in result.stdout


def test_a_taken_port_is_noticed_before_anybody_joins(shell: Shell, billing: str) -> None:
    """The group never hears of a consumer that ends again at once; the error says how to fix it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = shell.run("consume", "orders", "--group", "unjoined", "--metrics-port", str(port))
    assert result.exit_code == 1
    assert f"127.0.0.1:{port}" in result.stderr
    assert "0 for a free one" in result.stderr
    assert "group 'unjoined' is not in __marshal" in shell.run("state", "unjoined").stderr


def test_consume_serves_metrics(shell: Shell, billing: str) -> None:
    child = shell.start(
        "consume",
        "orders",
        "--group",
        "measured",
        "--start",
        "earliest",
        "--metrics-port",
        "0",
        "--metrics-host",
        "0.0.0.0",
    )
    try:
        assert child.stdout is not None
        assert child.stderr is not None
        address = child.stderr.readline().strip().removeprefix("metrics at ")
        assert child.stdout.readline().strip().isdigit()
        with urllib.request.urlopen(address, timeout=DEADLINE_S) as answer:
            assert 'marshal_claims_total{client_id="' in answer.read().decode()
    finally:
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0
