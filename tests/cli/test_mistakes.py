"""Every command with a group, a topic or a partition that is not there: exit code 1, and the name that was meant.

A typing error must not read as "all is well": a runbook or an alert would believe it.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from marshal_py.client.marshal import connect
from marshal_py.transport.embedded import Broker
from tests.cli.shell import DEADLINE_S, MODULE, REPOSITORY, Shell, wait_until

GROUP = [
    ("state", "biling"),
    ("state", "--lag", "biling"),
    ("log", "tail", "biling"),
    ("log", "dump", "biling"),
    ("log", "dump", "biling", "--human"),
    ("advisories", "biling"),
    ("verify", "biling"),
    ("doctor", "biling"),
    ("explain", "biling", "orders:0"),
    ("explain", "biling", "--since", "0", "--at", "5"),
    ("state", "biling", "--settings"),
    ("state", "biling", "--csv"),
    ("state", "biling", "--members"),
    *(
        (*command, *how)
        for how in (("--dry-run",), ("--yes",))
        for command in (
            ("pause", "biling"),
            ("resume", "biling"),
            ("set-position", "biling", "orders", "--to", "earliest"),
            ("groups", "update", "biling", "--policy", "greedy"),
            ("groups", "rm", "biling"),
            ("groups", "update", "biling", "--shrink", "orders=1"),
            ("evict", "biling", "7"),
            ("members", "step-down", "biling", "7"),
        )
        if how != ("--yes",) or command[0] not in ("resume", "members")
    ),
]
TOPIC = [
    ("explain", "billing", "ordrs:0"),
    ("doctor", "--topic", "ordrs"),
    ("set-position", "billing", "ordrs", "--to", "earliest", "--yes"),
    ("set-position", "billing", "ordrs", "--to", "earliest", "--dry-run"),
    ("set-position", "billing", "ordrs:0", "--to", "earliest", "--yes"),
    ("groups", "update", "billing", "--shrink", "ordrs=1", "--yes"),
]
PARTITION = [
    ("explain", "billing", "orders:9"),
    ("set-position", "billing", "orders:9", "--to", "earliest", "--yes"),
    ("produce", "orders", "--partition", "9"),
    ("evict", "billing", "7", "--yes"),
    ("members", "step-down", "billing", "7"),
]


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    """A group `billing` that has handled something of `orders`, and another one."""
    with Broker(topics={"__marshal": 4, "orders": 2, "__unused": 4}) as broker:
        shell = Shell(broker.bootstrap_servers)
        shell.json("produce", "orders", stdin=b"1\n2\n3\n")
        with connect({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0}) as marshal:
            for name in ("billing", "shipping"):
                with marshal.consumer(name, ["orders"], start="earliest") as consumer:
                    for message in consumer.fetch(3, min_messages=3):
                        message.ack()
        yield shell


def refused(shell: Shell, *command: str) -> str:
    result = shell.run(*command, stdin=b"1\n")
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize("start", ["yesterday", "23h", '{"ordrs": {"0": 1}}'])
def test_a_start_that_cannot_be_is_told_before_a_cluster_is_waited_for(start: str) -> None:
    """Nothing listens there."""
    line = refused(Shell("127.0.0.1:1"), "consume", "orders", "--group", "billing", "--start", start)
    assert line.startswith("marshal: --start ")


@pytest.mark.parametrize("name", ["", "my orders", ".."])
@pytest.mark.parametrize(
    "command",
    [
        ("produce",),
        ("dead-letters", "ls"),
        ("get",),
        ("topics", "ls"),
        ("topics", "purge", "--keep", "1"),
        ("topics", "rm", "--yes"),
        ("doctor", "billing", "--topic"),
    ],
    ids=" ".join,
)
def test_a_name_that_kafka_takes_for_no_topic_is_refused_before_a_cluster_is_waited_for(
    command: tuple[str, ...], name: str
) -> None:
    """Nothing listens there. librdkafka raises ValueError for an empty name."""
    result = Shell("127.0.0.1:1").run(*command, name)
    assert result.exit_code == 2, result.output
    assert f"topic={name!r} is not allowed: " in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("servers", ["localhost:http", "localhost:0", "a:1,b:70000", "SSL://b:x"])
def test_a_port_that_is_none_is_refused_before_a_cluster_is_waited_for(servers: str) -> None:
    assert "is no number of a port" in refused(Shell(servers), "state", "billing")


def test_a_wrong_line_of_the_settings_file_is_named(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    for wrong in ("no.such.key = 1", "security.protocol = TSL", f"ssl.ca.location = {tmp_path}/none"):
        tls = "security.protocol = SSL" if "ca.location" in wrong else ""
        file.write_text(f"# ours\n\n\n{wrong}\n{tls}\n", encoding="utf-8")
        line = refused(shell, "state", "billing", "--command-config", str(file))
        says = f"{file}:4: {wrong.partition(' ')[0]}: "
        assert line.startswith(f"marshal: {says}")
        assert "; correct that line, or leave it out: " in line
        (check,) = shell.run("doctor", "--command-config", str(file)).stdout.splitlines()
        assert check.startswith(f"fail  cluster: {says}")
        assert "network" not in check


def test_files_that_are_not_there(shell: Shell, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "x"
    assert f"{str(missing)!r} cannot be written: " in refused(shell, "log", "dump", "--output", str(missing))
    assert "No such file" in refused(shell, "state", "billing", "--dump", str(missing))


def test_a_time_is_written_as_iso_text_or_as_ago(shell: Shell) -> None:
    for ago in ("1h ago", "1h-ago", "-1h"):
        assert shell.run("advisories", "billing", "--since", ago).stdout.strip()
    for command in (("advisories", "billing", "--since", "1h"), ("explain", "billing", "orders:0", "--at", "1h")):
        assert "-5m" in shell.run(*command).stderr


@pytest.mark.parametrize("command", [("log", "tail"), ("advisories",), ("timeline", "billing")])
def test_a_period_ends_after_its_begin(shell: Shell, command: tuple[str, ...]) -> None:
    result = shell.run(*command, "--since", "2026-01-02", "--until", "2026-01-01")
    assert (result.exit_code, "--since names no time before the end" in result.stderr) == (2, True), result.output


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("groups", "ls", "--timeout", "nan"), "'--timeout': nan is not in the range"),
        (("state", "--watch", "1e300"), "'--watch': 1e+300 is not in the range"),
        (("top", "--interval", "inf"), "'--interval': inf is not in the range"),
        (("exporter", "--refresh", "nan"), "'--refresh': nan is not in the range"),
        (("explain", "billing", "orders:\u00b2"), "is not TOPIC:PARTITION"),
        (("groups", "update", "billing", "--shrink", "orders=\u00b2"), "expected TOPIC=PARTITIONS"),
        (("explain", "\udcff", "orders:0"), "'\\udcff' is not in UTF-8"),
        (("produce", "orders", "--header", "a=\udcff"), "'a=\\udcff' is not in UTF-8"),
    ],
)
def test_what_is_no_number_and_no_text_is_named(shell: Shell, command: tuple[str, ...], says: str) -> None:
    result = shell.run(*command)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output


def test_a_partition_is_a_number_of_digits(shell: Shell) -> None:
    command = "set-position", "billing", "orders:\u00b2", "--to", "earliest", "--yes"
    assert "has never consumed topic 'orders:\u00b2'" in refused(shell, *command)


@pytest.mark.parametrize(
    ("closed", "command"), [("<&-", "produce orders"), (">&-", "groups ls"), ("2>&-", "groups ls"), ("<&-", "state")]
)
def test_a_stream_that_the_shell_has_closed_is_empty(shell: Shell, closed: str, command: str) -> None:
    line = f"{shlex.join(MODULE)} {command} {closed}"
    done = subprocess.run(line, shell=True, env=shell.environment(), capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_offset_beyond_the_log_is_refused(shell: Shell) -> None:
    last = shell.json("explain", "billing", "orders:0")["at_offset"]
    for question in (("orders:0",), ("--since", "0")):
        line = refused(shell, "explain", "billing", *question, "--at", "5000000")
        assert line == f"marshal: --at 5000000 lies beyond the group's log, whose newest record is at {last}"
        assert shell.run("explain", "billing", *question, "--at", str(last)).exit_code == 0


@pytest.mark.parametrize("number", ["1732787000", "1732787000999"])
def test_a_number_that_would_be_a_time_is_an_offset_and_the_error_has_the_time(shell: Shell, number: str) -> None:
    for question in (("orders:0",), ()):
        line = refused(shell, "explain", "billing", *question, "--since", number)
        assert line.startswith(f"marshal: --since {number} lies beyond the group's log, ")
        assert line.endswith("; a number is an offset, and the time would be 2024-11-28T09:43:20+00:00")


def test_a_number_of_members_that_was_not_given_is_asked_for(shell: Shell) -> None:
    line = refused(shell, "groups", "create", "shares", "--policy", "members", "--yes")
    assert line.startswith("marshal: no --max-members given: ")


@pytest.mark.parametrize("command", GROUP, ids=" ".join)
def test_a_group_that_is_not_there(shell: Shell, command: tuple[str, ...]) -> None:
    line = refused(shell, *command)
    if command[0] == "doctor":
        assert line == "marshal: failed: group"
        line = next(text for text in shell.run(*command).stdout.splitlines() if text.startswith("fail"))
    assert "'biling'" in line
    assert "did you mean 'billing'?" in line


@pytest.mark.parametrize("command", TOPIC, ids=" ".join)
def test_a_topic_that_is_not_there(shell: Shell, command: tuple[str, ...]) -> None:
    line = refused(shell, *command)
    if command[0] == "doctor":
        assert line == "marshal: failed: topic"
        line = next(text for text in shell.run(*command).stdout.splitlines() if text.startswith("fail"))
    assert "did you mean 'orders'?" in line


@pytest.mark.parametrize("command", PARTITION, ids=" ".join)
def test_a_partition_or_session_that_is_not_there(shell: Shell, command: tuple[str, ...]) -> None:
    assert re.search(r"2 partitions|0 to 1|there is nobody", refused(shell, *command))


@pytest.mark.parametrize(
    "command",
    [
        one
        for one in GROUP
        if one[0] in ("state", "log", "advisories", "verify") and not {"--settings", "--csv", "--members"} & {*one}
    ],
    ids=" ".join,
)
def test_a_group_of_a_topic_that_nobody_used(shell: Shell, command: tuple[str, ...]) -> None:
    result = shell.run(*command, "--coordination-topic", "__unused")
    assert result.exit_code == 1
    assert "group 'biling' is not in __unused; there is none yet" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("state", "biling"),
        ("verify", "biling"),
        ("advisories", "biling"),
        ("log", "tail", "biling"),
        ("log", "tail", "biling", "--follow"),
        ("explain", "biling", "orders:0"),
        ("explain", "biling", "--since", "0", "--at", "5"),
    ],
    ids=" ".join,
)
def test_a_group_that_is_not_in_a_dump(shell: Shell, tmp_path: Path, command: tuple[str, ...]) -> None:
    file = tmp_path / "all.dump"
    assert shell.run("log", "dump", "--output", str(file)).exit_code == 0
    assert "did you mean 'billing'?" in refused(shell, *command, "--dump", str(file))


def test_nothing_like_it_lists_what_there_is(shell: Shell) -> None:
    assert refused(shell, "state", "x").endswith("group 'x' is not in __marshal; there is 'billing', 'shipping'")


def test_rights_may_be_asked_for_a_group_that_is_yet_to_come(shell: Shell) -> None:
    """Before its first consumer a group is nowhere, and that is no failure."""
    result = shell.run("doctor", "newcomer", "--topic", "nowhere", "--as", "consumer")
    assert result.exit_code == 0
    assert "warn  group: 'newcomer' has never been used" in result.stdout
    assert "warn  topic: 'nowhere' does not exist" in result.stdout


@pytest.mark.parametrize("command", [("log", "tail"), ("advisories",)])
def test_follow_waits_for_a_group_that_is_yet_to_come(shell: Shell, command: tuple[str, ...]) -> None:
    group = f"new-{command[0]}"
    child = shell.start(*command, group, "--follow", "--json")
    try:
        assert child.stdout is not None
        assert child.stderr is not None
        assert f"group '{group}' is not in __marshal" in (line := child.stderr.readline())
        assert line.endswith("waiting for its first consumer\n")
        with (
            connect({"bootstrap.servers": shell.servers, "log_level": 0}) as marshal,
            marshal.consumer(group, ["orders"]),
        ):
            assert json.loads(child.stdout.readline())["group"] == group
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        ("pause", "billing"),
        ("resume", "billing"),
        ("set-position", "billing", "orders", "--to", "earliest"),
        ("groups", "create", "new"),
        ("groups", "update", "billing", "--delivery", "at_most_once"),
        ("groups", "update", "billing", "--shrink", "orders=1"),
        ("groups", "rm", "billing"),
    ],
    ids=" ".join,
)
def test_a_dry_run_does_not_read_as_done(shell: Shell, command: tuple[str, ...]) -> None:
    shown = shell.run(*command, "--dry-run").stdout
    assert " would " in shown
    assert shown.endswith("dry run: nothing was written\n")
    for done in ("is paused", "are paused", "is changed", "is deleted", "are forgotten", "moved at"):
        assert done not in shown


def test_a_group_whose_consumers_are_dead_does_not_run(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """`groups ls`: nobody consumes, whatever the log holds of sessions."""
    monkeypatch.setenv("COLUMNS", "200")  # a row on one line
    assert {one["group"]: (one["sessions"], one["stale"], one["last_sign_s"]) for one in shell.json("groups", "ls")}[
        "billing"
    ] == (0, 0, None)
    assert re.search(r"billing .* no consumer *$", shell.run("groups", "ls").stdout, re.MULTILINE)
    child = shell.start("consume", "orders", "--group", "dead", "--start", "earliest", "--heartbeat-interval", "1")
    assert child.stdout is not None
    assert child.stdout.readline()
    assert re.search(r"dead .* running *$", shell.run("groups", "ls").stdout, re.MULTILINE)
    child.send_signal(signal.SIGSTOP)  # if it were killed, its witness would end its session
    row = _until_stale(shell)
    assert row["sessions"] == row["stale"] == 1
    for command in (["state", "--members"], ["state", "dead", "--members"]):
        (member,) = [one for one in shell.json(*command) if one["group"] == "dead"]
        assert (member["state"], member["last_sign_s"] > 2 * member["interval_s"]) == ("stale", True)
        assert " ago, silent" in shell.run(*command).stdout
    assert re.search(
        r"dead .* no live consumer: last heartbeat \d+ s ago *$", shell.run("groups", "ls").stdout, re.MULTILINE
    )
    child.kill()
    child.communicate(timeout=DEADLINE_S)


def _until_stale(shell: Shell) -> dict[str, int]:
    found: list[dict[str, int]] = []

    def stale() -> bool:
        found[:] = [one for one in shell.json("groups", "ls") if one["group"] == "dead"]
        return found[0]["stale"] == 1

    wait_until(stale, "its heartbeats are two intervals old")
    return found[0]


def test_a_coordination_topic_that_kafka_would_not_take_is_refused(shell: Shell) -> None:
    found = shell.run("state", "billing", "--coordination-topic", "my marshal")
    assert (found.exit_code, "my marshal" in found.stderr) == (1, True)


def test_nothing_is_written_to_a_topic_that_does_not_exist(shell: Shell) -> None:
    """Also if there is nothing to write: the name is wrong all the same."""
    found = shell.run("produce", "nowhere")
    assert (found.exit_code, found.stdout) == (1, "")
    assert "topic 'nowhere' does not exist" in found.stderr
    assert shell.json("produce", "orders") == {"topic": "orders", "written": 0}


def test_a_purge_names_its_options(shell: Shell) -> None:
    line = refused(shell, "topics", "purge", "orders", "--yes")
    assert all(option in line for option in ("--before-offset", "--before-time", "--keep")), line


@pytest.mark.parametrize("policy", ["pinned", "overflow", "prioritized", "members"])
def test_a_policy_that_a_group_cannot_get_any_more_is_refused_for_that_reason(
    shell: Shell, billing: str, policy: str
) -> None:
    """And not for the lack of an option that `groups update` does not have."""
    line = refused(shell, "groups", "update", billing, "--policy", policy, "--yes")
    assert "so it can have balanced or greedy alone" in line
    assert "priority_groups" not in line
