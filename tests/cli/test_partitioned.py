"""Policies that are chosen when a group is created, as processes: members with standbys, and whole topics."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from marshal_py.transport.embedded import Broker
from tests.cli.shell import DEADLINE_S, Shell, wait_until


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with Broker(topics={"__marshal": 4, "orders": 6, "bills": 2, "users": 3}) as broker:
        shell = Shell(broker.bootstrap_servers)
        shell.json("produce", "orders", stdin=b"0\n")
        made = shell.run("consume", "orders", "--group", "first", "--start", "earliest", "--max-messages", "1")
        assert made.exit_code == 0, made.output  # now the coordination topic is a log
        yield shell


INVALID = {
    "to how many members": ["--policy", "members"],
    "never both": ["--policy", "members", "--max-members", "2", "--member", "a", "--map", "a=0,1"],
    "nobody has this partition": ["--policy", "members", "--max-members", "3", "--map", "a=0,1"],
    "only one may": ["--policy", "blocks", "--max-members", "2", "--map", "a=0,1", "--map", "b=1"],
    "partitions are 0 to 1": ["--policy", "members", "--max-members", "2", "--map", "a=0,1,2"],
    "1 to 100000": ["--policy", "blocks", "--max-members", "0", "--member", "a"],
    "exactly one": ["--policy", "prioritized"],
    "exactly one: name it": ["--policy", "prioritized", "--priority-group", "a", "--priority-group", "b"],
    "1 to 16": ["--policy", "prioritized", "--priority-group", "a.b"],
    "have it: prioritized": ["--policy", "greedy", "--priority-group", "a"],
    "have it": ["--policy", "balanced", "--member", "a"],
}


@pytest.mark.parametrize("reason", INVALID)
def test_an_invalid_configuration_ends_with_its_reason(shell: Shell, reason: str) -> None:
    result = shell.run("groups", "create", "wrong", *INVALID[reason], "--yes")
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.strip().splitlines()
    assert reason in line
    assert shell.run("groups", "info", "wrong").exit_code == 1, "nothing was created"


def info(shell: Shell, group: str) -> dict[str, Any]:
    found: dict[str, Any] = shell.json("groups", "info", group)
    return found


def claims(shell: Shell, group: str) -> dict[str, int]:
    """How many partitions each consumer owns."""
    return {one["client_id"]: len(one["claims"]) for one in info(shell, group)["members"] if one["claims"]}


def test_members_standbys_step_down_drop_and_mappings(shell: Shell) -> None:
    """Every step is seen in `marshal groups info`, which reads the log."""
    create = ("--policy", "members", "--max-members", "6", "--member", "m1", "--member", "m2", "--yes")
    shell.json("groups", "create", "shipping", *create)
    assert shell.run("groups", "update", "shipping", "--policy", "balanced", "--yes").exit_code == 1
    assert shell.run("groups", "update", "shipping", "--max-members", "7", "--yes").exit_code == 1
    refused = shell.run("consume", "orders", "--group", "shipping")
    assert (refused.exit_code, "name one of m1, m2" in refused.stderr) == (1, True), refused.output
    running: dict[str, subprocess.Popen[str]] = {}

    def start(client_id: str, member: str) -> None:
        options = ("--client-id", client_id, "--heartbeat-interval", "1", "--start", "earliest", "--json")
        running[client_id] = shell.start("consume", "orders", "--group", "shipping", "--member", member, *options)

    try:
        start("a", "m1")
        wait_until(lambda: claims(shell, "shipping") == {"a": 3}, "m1 has its share, and nobody has that of m2")
        assert info(shell, "shipping")["missing_members"] == ["m2"]
        start("a2", "m1")
        start("b", "m2")
        wait_until(lambda: claims(shell, "shipping") == {"a": 3, "b": 3}, "m2 has its share")
        wait_until(lambda: info(shell, "shipping")["member_states"][0]["standbys"] == ["a2"], "a standby of m1")
        shell.json("members", "step-down", "shipping", "a")
        wait_until(lambda: claims(shell, "shipping") == {"a2": 3, "b": 3}, "the standby is active")
        running["a2"].kill()
        wait_until(lambda: claims(shell, "shipping") == {"a": 3, "b": 3}, "the other one is active again")
        shell.json("members", "drop", "shipping", "m2", "--yes")
        wait_until(lambda: claims(shell, "shipping") == {"a": 6}, "m2 is dropped")
        shell.json("members", "add", "shipping", "m2", "--yes")
        wait_until(lambda: claims(shell, "shipping") == {"a": 3, "b": 3}, "m2 is back")
        shell.json("members", "map", "set", "shipping", "m1=0,1,2,3,4", "m2=5", "--yes")
        wait_until(lambda: claims(shell, "shipping") == {"a": 5, "b": 1}, "the mappings count")
        assert shell.run("members", "add", "shipping", "m3", "--yes").exit_code == 1
        shell.json("members", "map", "delete", "shipping", "--yes")
        wait_until(lambda: claims(shell, "shipping") == {}, "nobody is a member")
        assert len(info(shell, "shipping")["unassigned"]) == 6
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for process in running.values():
            process.communicate(timeout=DEADLINE_S)


def test_a_consumer_of_a_priority_group_names_it(shell: Shell) -> None:
    shell.json("groups", "create", "jobs", "--policy", "prioritized", "--priority-group", "eu", "--yes")
    found = info(shell, "jobs")
    assert (found["policy"], found["priority_groups"]) == ("prioritized", [{"name": "eu"}])
    assert shell.run("groups", "update", "jobs", "--policy", "greedy", "--yes").exit_code == 1
    consume = ("consume", "orders", "--group", "jobs", "--start", "earliest", "--max-messages", "1")
    refused = shell.run(*consume)
    assert (refused.exit_code, "names the priority group eu" in refused.stderr) == (1, True), refused.output
    done = shell.run(*consume, "--priority-group", "eu", "--priority", "7")
    assert (done.exit_code, done.stdout) == (0, "0\n"), done.output


def test_whole_topics(shell: Shell) -> None:
    """A topic has one consumer, and moves as a whole when that is killed."""
    shell.json("groups", "create", "whole", "--policy", "topic", "--yes")

    def start(client_id: str) -> subprocess.Popen[str]:
        options = ("--client-id", client_id, "--heartbeat-interval", "1", "--start", "earliest", "--json")
        return shell.start("consume", "bills", "users", "--group", "whole", *options)

    running = [start("a"), start("b")]
    try:
        wait_until(lambda: claims(shell, "whole") in ({"a": 3, "b": 4}, {"a": 4, "b": 3}), "each has a topic")
        found = {one["client_id"]: one["claims"] for one in info(shell, "whole")["members"]}
        bills, users = ["bills:-1", "bills:0", "bills:1"], ["users:-1", "users:0", "users:1", "users:2"]
        assert sorted(found.values()) == [bills, users]
        running[0].kill()
        wait_until(lambda: claims(shell, "whole") == {"b": 7}, "the other one has both")
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.communicate(timeout=DEADLINE_S)
