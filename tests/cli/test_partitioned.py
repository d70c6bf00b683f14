"""Every policy as processes that start, are killed and step down: `marshal state --settings` shows who has what.

They run on the embedded broker, and with `pytest tests/cli/test_partitioned.py --on-kafka` on Apache Kafka.
A killed process has a witness, so nobody waits. A process that stands still for two intervals is evicted and joins
again; so no step names a consumer that another one could have replaced.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from marshal_py.transport.embedded import Broker
from tests.cli.shell import DEADLINE_S, Shell, wait_until
from tests.support.kafka import Cluster
from tests.support.kafka_topics import create_topic

TOPICS = {"orders": 6, "bills": 2, "users": 3, "pays": 2}


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.config.getoption("--on-kafka"):
        kafka: Cluster = request.getfixturevalue("kafka")
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        for name, partitions in TOPICS.items():
            create_topic(admin, name, partitions)
        yield kafka.bootstrap
    else:
        with Broker(topics={"__marshal": 4, **TOPICS}) as broker:
            yield broker.bootstrap_servers


@pytest.fixture(scope="module")
def shell(servers: str) -> Shell:
    shell = Shell(servers)
    shell.json("produce", "orders", stdin=b"0\n")
    made = shell.run("consume", "orders", "--group", "first", "--start", "earliest", "--max-messages", "1")
    assert made.exit_code == 0, made.output  # now the coordination topic is a log
    return shell


# Each configuration that the designs call invalid, by a part of the reason.
INVALID = {
    "to how many members": ["--policy", "members"],
    "never both": ["--policy", "members", "--max-members", "2", "--member", "a", "--map", "a=0,1"],
    "nobody has partition 2": ["--policy", "members", "--max-members", "3", "--map", "a=0,1"],
    "only one may": ["--policy", "blocks", "--max-members", "2", "--map", "a=0,1", "--map", "b=1"],
    "2 is above 1, --max-members - 1": ["--policy", "members", "--max-members", "2", "--map", "a=0,1,2"],
    "1 to 100000": ["--policy", "blocks", "--max-members", "0", "--member", "a"],
    "exactly one": ["--policy", "prioritized"],
    "exactly one: name one alone": ["--policy", "prioritized", "--priority-group", "a", "--priority-group", "b"],
    "1 to 16": ["--policy", "prioritized", "--priority-group", "a.b"],
    "explicit acks": ["--policy", "pinned", "--priority-group", "a", "--delivery", "at_most_once"],
    "1 to 86400": ["--policy", "pinned", "--priority-group", "a", "--priority-timeout", "0.5"],
    "only the policy pinned": ["--policy", "topic", "--priority-timeout", "9"],
    "5 to 3600": ["--policy", "overflow", "--priority-group", "a", "--failover", "4"],
    "the policy overflow needs explicit acks": [
        *("--policy", "overflow", "--priority-group", "a"),
        *("--delivery", "at_most_once"),
    ],
    "only the policy overflow": ["--policy", "pinned", "--priority-group", "a", "--failover", "9"],
    "only the policy balanced has it": ["--policy", "greedy", "--lag-weighted"],
    "only the policies overflow, pinned and prioritized": ["--policy", "greedy", "--priority-group", "a"],
    "have it": ["--policy", "balanced", "--member", "a"],
    "members have it": ["--policy", "topic", "--max-members", "2"],
    "'a' has partition 0 twice": ["--policy", "members", "--max-members", "2", "--map", "a=0,0,1"],
    "each member has one mapping": ["--policy", "members", "--max-members", "2", "--map", "a=0", "--map", "a=1"],
    "--policy 'magic' is not allowed: one of": ["--policy", "magic"],
    "--max-members -1": ["--policy", "members", "--max-members", "-1", "--member", "a"],
    "--priority-timeout -1.0": ["--policy", "pinned", "--priority-group", "a", "--priority-timeout", "-1"],
    "1 to 255 bytes": ["--policy", "members", "--max-members", "2", "--member", ""],
}


@pytest.mark.parametrize("reason", INVALID)
def test_an_invalid_configuration_ends_with_its_reason(shell: Shell, reason: str) -> None:
    result = shell.run("groups", "create", "wrong", *INVALID[reason], "--yes")
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.strip().splitlines()
    assert reason in line
    assert shell.run("state", "wrong", "--settings").exit_code == 1, "nothing was created"


def info(shell: Shell, group: str) -> dict[str, Any]:
    found: dict[str, Any] = shell.json("state", group, "--settings")
    return found


def owned(shell: Shell, group: str) -> dict[str, list[str]]:
    """What each consumer owns, as `state --settings` says it."""
    return {one["client_id"]: one["claims"] for one in info(shell, group)["members"] if one["claims"]}


def claims(shell: Shell, group: str) -> dict[str, int]:
    """How many partitions each consumer owns."""
    return {client: len(found) for client, found in owned(shell, group).items()}


def shares(shell: Shell, group: str) -> dict[str, int]:
    """How many partitions the consumers of each member own."""
    states = info(shell, group)["member_states"]
    return {state["member"]: len(state["claims"]) for state in states if state["claims"]}


def step_down(shell: Shell, group: str, client_id: str, after: dict[str, int]) -> None:
    """A consumer steps down, again if it has joined again; `after`: how many partitions each one owns then."""

    def stepped_down() -> bool:
        if not any(one["stepped_down"] for one in info(shell, group)["members"] if one["client_id"] == client_id):
            shell.run("members", "step-down", group, client_id, "--yes")
        return claims(shell, group) == after

    wait_until(stepped_down, f"{client_id} hands everything over")


@pytest.fixture
def consumers(shell: Shell) -> Iterator[Consumers]:
    with Consumers(shell) as running:
        yield running


class Consumers(dict[str, subprocess.Popen[str]]):
    """The `marshal consume` processes of a test, by client id."""

    def __init__(self, shell: Shell) -> None:
        super().__init__()
        self.shell = shell

    def start(self, client_id: str, group: str, *options: str, topics: tuple[str, ...] = ("orders",)) -> None:
        always = ("--client-id", client_id, "--heartbeat-interval", "3", "--start", "earliest", "--json")
        self[client_id] = self.shell.start("consume", *topics, "--group", group, *always, *options)

    def __enter__(self) -> Consumers:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.values():
            process.send_signal(signal.SIGTERM)
        for process in self.values():
            process.communicate(timeout=DEADLINE_S)


def test_greedy_keeps_and_balanced_shares(shell: Shell, consumers: Consumers) -> None:
    """A join, a crash, a change of the policy while consumers run, a step-down."""
    shell.json("groups", "create", "free", "--policy", "greedy", "--yes")
    consumers.start("a", "free")
    wait_until(lambda: claims(shell, "free") == {"a": 6}, "the first one has everything")
    consumers.start("b", "free")
    wait_until(lambda: len(info(shell, "free")["members"]) == 2, "the second one has joined")
    consumers["a"].kill()
    wait_until(lambda: claims(shell, "free") == {"b": 6}, "it takes over")
    consumers.start("c", "free")
    wait_until(lambda: len(info(shell, "free")["members"]) == 2, "a third one has joined")
    assert "hand-over" not in shell.run("advisories", "free", "--kind", "released").stdout, "greedy moves nothing"
    shell.json("groups", "update", "free", "--policy", "balanced", "--yes")
    wait_until(lambda: claims(shell, "free") == {"b": 3, "c": 3}, "balanced shares")
    shell.json("groups", "update", "free", "--lag-weighted", "--yes")
    assert (info(shell, "free")["policy"], info(shell, "free")["lag_weighted"]) == ("balanced", True)
    assert "lag weights: yes\n" in shell.run("state", "free", "--settings").stdout
    shell.json("groups", "update", "free", "--no-lag-weighted", "--yes")
    assert info(shell, "free")["lag_weighted"] is False
    step_down(shell, "free", "b", {"c": 6})
    said = shell.run("members", "step-down", "free", "b", "--yes").stdout
    undo = said.strip().partition("as they are: marshal ")[2].split()
    shell.run(*undo, "--yes")
    assert not any(one["stepped_down"] for one in info(shell, "free")["members"])
    wait_until(lambda: claims(shell, "free") == {"b": 3, "c": 3}, "b takes its share again")


def test_blocks_are_those_of_the_seed(shell: Shell, consumers: Consumers) -> None:
    """Five partitions for two members: blocks of two, the fifth to the first one. The sixth belongs to nobody.

    partitioned consumer groups: "assigning continuous blocks of partitions of size (number of partitions divided by
    the number of members in the list)" "finally distribute the remainder (if the number of members in the list is
    not a multiple of the number of partitions) over the members using a modulo." "You can also see the list of
    members that have currently active instances"
    """
    create = ("--policy", "blocks", "--max-members", "5", "--member", "m1", "--member", "m2", "--yes")
    shell.json("groups", "create", "blocks", *create)
    first, second = ["orders:0", "orders:1", "orders:4"], ["orders:2", "orders:3"]
    consumers.start("b", "blocks", "--member", "m2")
    wait_until(lambda: owned(shell, "blocks") == {"b": second}, "the second block, though it is alone")
    found = info(shell, "blocks")
    assert (found["active_members"], found["missing_members"]) == (["m2"], ["m1"])
    consumers.start("a", "blocks", "--member", "m1")
    consumers.start("b2", "blocks", "--member", "m2")
    wait_until(lambda: len(info(shell, "blocks")["members"]) == 3, "the standby has joined")
    wait_until(lambda: sorted(owned(shell, "blocks").values()) == [first, second], "the other block")
    (active,) = [client for client, found in owned(shell, "blocks").items() if found == second]
    consumers[active].kill()
    after = {"a": first, "b" if active == "b2" else "b2": second}
    wait_until(lambda: owned(shell, "blocks") == after, "the standby has the same block")
    assert info(shell, "blocks")["unassigned"] == ["orders:5"]


def test_members_standbys_step_down_drop_and_mappings(shell: Shell, consumers: Consumers) -> None:
    """Every step is seen in `marshal state --settings`, which reads the log.

    partitioned consumer groups: "Support for both automatic or administratively defined mapping of members to
    partitions." "Fault-tolerance through the deployment of 'standby' consuming client applications that
    automatically take over the consumption of messages even in the case of process or host failure." "Request the
    current active member instance for a member to step-down and have another member instance currently joined (if
    there's one take over as the current active member instance)"
    """
    create = ("--policy", "members", "--max-members", "6", "--member", "m1", "--member", "m2", "--yes")
    shell.json("groups", "create", "shipping", *create)
    assert shell.run("groups", "update", "shipping", "--policy", "balanced", "--yes").exit_code == 1
    assert shell.run("groups", "update", "shipping", "--max-members", "7", "--yes").exit_code == 1
    refused = shell.run("consume", "orders", "--group", "shipping")
    assert (refused.exit_code, "name one of m1, m2" in refused.stderr) == (1, True), refused.output
    consumers.start("a", "shipping", "--member", "m1")
    wait_until(lambda: claims(shell, "shipping") == {"a": 3}, "m1 has its share, and nobody has that of m2")
    assert info(shell, "shipping")["missing_members"] == ["m2"]
    consumers.start("a2", "shipping", "--member", "m1")
    consumers.start("b", "shipping", "--member", "m2")
    wait_until(lambda: shares(shell, "shipping") == {"m1": 3, "m2": 3}, "m2 has its share")
    wait_until(lambda: len(info(shell, "shipping")["member_states"][0]["standbys"]) == 1, "m1 has a standby")
    (first,) = owned(shell, "shipping").keys() & {"a", "a2"}
    standby = "a" if first == "a2" else "a2"
    shell.json("members", "step-down", "shipping", first, "--yes")
    wait_until(lambda: claims(shell, "shipping") == {standby: 3, "b": 3}, "the standby is active")
    consumers[standby].kill()
    wait_until(lambda: claims(shell, "shipping") == {first: 3, "b": 3}, "the other one is active again")
    shell.json("groups", "update", "shipping", "--drop-member", "m2", "--yes")
    wait_until(lambda: shares(shell, "shipping") == {"m1": 6}, "m2 is dropped")
    shell.json("groups", "update", "shipping", "--add-member", "m2", "--yes")
    wait_until(lambda: shares(shell, "shipping") == {"m1": 3, "m2": 3}, "m2 is back")
    shell.json("groups", "update", "shipping", "--map", "m1=0,1,2,3,4", "--map", "m2=5", "--yes")
    wait_until(lambda: shares(shell, "shipping") == {"m1": 5, "m2": 1}, "the mappings count")
    assert shell.run("groups", "update", "shipping", "--add-member", "m3", "--yes").exit_code == 1
    tried = shell.run("groups", "update", "shipping", "--no-map", "--dry-run").output
    assert "nobody would consume until the group has members or mappings again" in tried
    assert tried.count("would release orders:") == 6, tried
    shell.json("groups", "update", "shipping", "--no-map", "--yes")
    wait_until(lambda: claims(shell, "shipping") == {}, "nobody is a member")
    assert len(info(shell, "shipping")["unassigned"]) == 6


def test_a_consumer_of_a_priority_group_names_it(shell: Shell, consumers: Consumers) -> None:
    """The lowest number has everything, 0 too. Who stepped down stands by for all numbers.

    ADR-42: "pulls not part of a valid group will result in an error" "Groups of clients should access a Consumer but
    some should have higher priority than others for receiving messages"
    """
    shell.json("groups", "create", "jobs", "--policy", "prioritized", "--priority-group", "eu", "--yes")
    found = info(shell, "jobs")
    assert (found["policy"], found["priority_groups"]) == (
        "prioritized",
        [{"name": "eu", "pinned_id": None, "pinned_ts": None}],
    )
    assert shell.run("groups", "update", "jobs", "--policy", "greedy", "--yes").exit_code == 1
    consume = ("consume", "orders", "--group", "jobs", "--start", "earliest", "--max-messages", "1")
    refused = shell.run(*consume)
    assert (refused.exit_code, "names the priority group eu" in refused.stderr) == (1, True), refused.output
    done = shell.run(*consume, "--priority-group", "eu", "--priority", "7")
    assert (done.exit_code, done.stdout) == (0, "0\n"), done.output
    consumers.start("b", "jobs", "--priority-group", "eu", "--priority", "7")
    wait_until(lambda: claims(shell, "jobs") == {"b": 6}, "nobody else is there")
    consumers.start("a", "jobs", "--priority-group", "eu", "--priority", "0")
    wait_until(lambda: claims(shell, "jobs") == {"a": 6}, "a lower number is there")
    step_down(shell, "jobs", "a", {"b": 6})
    consumers["b"].kill()
    wait_until(lambda: claims(shell, "jobs") == {"a": 6}, "the other one is gone")


def test_consumers_with_conditions(shell: Shell, consumers: Consumers) -> None:
    """One with a condition has nothing, then everything of a backlog; one without takes over from it.

    ADR-42: "otherwise those Pull requests will sit idle in the same way that they would if no messages were available"
    """
    create = ("--policy", "overflow", "--priority-group", "eu", "--failover", "60", "--yes")
    shell.json("groups", "create", "over", *create)
    assert info(shell, "over")["failover_s"] == 60
    shell.json("groups", "update", "over", "--failover", "0", "--yes")
    assert info(shell, "over")["failover_s"] is None
    assert "failover: never" in shell.run("state", "over", "--settings").stdout
    consume = ("consume", "orders", "--group", "over", "--start", "earliest", "--max-messages", "1")
    refused = shell.run(*consume, "--priority-group", "eu", "--min-pending", "1", "--priority", "1")
    assert (refused.exit_code, "only prioritized obeys it" in refused.stderr) == (1, True), refused.output
    done = shell.run(*consume, "--priority-group", "eu", "--min-pending", "1", "--min-ack-pending", "1000")
    assert (done.exit_code, done.stdout) == (0, "0\n"), done.output
    consumers.start("b", "over", "--priority-group", "eu", "--min-pending", "200", topics=("pays",))
    wait_until(lambda: len(info(shell, "over")["members"]) == 1, "it has joined")
    said = " ".join(shell.run("state", "over").stdout.split())
    assert "none is met as far as the log shows: b (min_pending 200)" in said
    shell.json("produce", "pays", stdin=b"1\n" * 300)
    wait_until(lambda: claims(shell, "over") == {"b": 2}, "its condition is met")
    consumers.start("a", "over", "--priority-group", "eu", topics=("pays",))
    wait_until(lambda: len(info(shell, "over")["members"]) == 2, "one without conditions has joined")
    consumers["b"].kill()
    wait_until(lambda: claims(shell, "over") == {"a": 2}, "the other one is gone")


def test_a_pinned_consumer_is_killed_and_unpinned(shell: Shell, consumers: Consumers) -> None:
    """The pinned one is killed, and the next one is unpinned while it is alone; `state --settings` says who has what.

    ADR-42: "they also want to have a stand-by client that can take over when the primary, aka pinned client, fails."
    "can be called which will clear the ID and trigger a client switch as above." "Consumer state to include a new
    field PriorityGroups of type []PriorityGroupState"
    """
    create = ("--policy", "pinned", "--priority-group", "eu", "--priority-timeout", "600", "--yes")
    shell.json("groups", "create", "rack", *create)

    def pinned() -> dict[str, Any]:
        found: dict[str, Any] = shell.json("state", "rack", "--settings")["pin"]
        return found

    for name in "ab":
        consumers.start(name, "rack", "--priority-group", "eu", topics=("bills", "users"))
    wait_until(lambda: pinned()["session"] is not None and len(pinned()["standbys"]) == 1, "one stands by")
    first = pinned()
    second = "a" if first["client_id"] == "b" else "b"
    consumers["a" if second == "b" else "b"].kill()
    wait_until(lambda: claims(shell, "rack") == {second: 6}, "the standby has all partitions, and the pin")
    before = pinned()
    assert (before["client_id"], before["pinned_id"] > (first["pinned_id"] or "")) == (second, True)
    assert shell.run("members", "step-down", "rack", "--yes").exit_code == 0
    wait_until(lambda: (pinned()["pinned_id"] or "") > before["pinned_id"], "a new pin")
    assert [one["name"] for one in info(shell, "rack")["priority_groups"]] == ["eu"]
    assert "standbys: -" in shell.run("state", "rack", "--settings").stdout


def test_whole_topics(shell: Shell, consumers: Consumers) -> None:
    """A topic has one consumer, and moves as a whole when that is killed."""
    shell.json("groups", "create", "whole", "--policy", "topic", "--yes")
    consumers.start("a", "whole", topics=("bills", "users"))
    consumers.start("b", "whole", topics=("bills", "users"))
    bills, users = ["bills:-1", "bills:0", "bills:1"], ["users:-1", "users:0", "users:1", "users:2"]
    wait_until(lambda: sorted(owned(shell, "whole").values()) == [bills, users], "each has a topic")
    step_down(shell, "whole", "b", {"a": 7})
    consumers["a"].kill()
    wait_until(lambda: claims(shell, "whole") == {"b": 7}, "the other one has both")
