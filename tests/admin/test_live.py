"""The front and the commands over an embedded broker, with real consumers at work in threads and processes.

What needs a look-up by time or a kill is in tests/kafka/test_admin.py.
"""

from __future__ import annotations

import json
import shlex
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import marshal_py
from marshal_py.admin.group import Group
from marshal_py.admin.plans.operation import Author, Progress
from marshal_py.cli import explain, groups, members, pause
from marshal_py.errors import (
    AdminBusy,
    CoordinationTopicMissing,
    GroupDeleted,
    GroupMissing,
    InvalidOption,
    MembersAlive,
    ModeMismatch,
    PositionOutOfRange,
    UnsupportedPlatform,
)
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.memory import MemoryBroker, MemoryTransport
from tests.cli.shell import DEADLINE_S, Shell, wait_until

PARTITIONS = 4
EACH = 25
QUIET = {"log_level": 0}


class Worker:
    """A consumer in a thread that counts what it is handed."""

    def __init__(
        self,
        transport: Any,
        name: str,
        group: str,
        topic: str,
        seen: Counter[tuple[int, int]],
        lost: list[str],
        **options: Any,
    ) -> None:
        self.error: BaseException | None = None
        self.consumer: marshal_py.Consumer | None = None
        self._arguments = (transport, name, group, topic, seen, lost, options)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        transport, name, group, topic, seen, lost, options = self._arguments
        try:
            with (
                marshal_py.connect(transport, client_id=name) as marshal,
                marshal.consumer(
                    group,
                    [topic],
                    start="earliest",
                    heartbeat_interval_s=1.0,
                    on_lost=lambda _, reason: lost.append(reason),
                    **options,
                ) as consumer,
            ):
                self.consumer = consumer
                for message in consumer:
                    seen[message.partition, message.offset] += 1
                    message.ack()
        except marshal_py.MarshalError as error:
            self.error = error

    def stop(self) -> None:
        if self.consumer is not None:
            self.consumer._ending.request_stop()
        self.thread.join(DEADLINE_S)


class Scene:
    def __init__(self, transport: Any, topic: str, **options: Any) -> None:
        self.group, self.topic = f"g-{uuid.uuid4().hex[:8]}", topic
        self.seen: Counter[tuple[int, int]] = Counter()
        self.lost: list[str] = []
        self.workers = [
            Worker(transport, f"{self.group}-{n}", self.group, topic, self.seen, self.lost, **options) for n in "ab"
        ]

    def await_total(self, count: int) -> None:
        wait_until(lambda: all(worker.consumer is not None for worker in self.workers), "both have joined")
        wait_until(lambda: self.seen.total() >= count, f"{count} deliveries")

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(topics={"__marshal": 4, "orders": PARTITIONS, "bare": 1}) as running:
        producer = Producer({"bootstrap.servers": running.bootstrap_servers})
        for number in range(PARTITIONS * EACH):
            producer.produce("orders", b"%d" % number, partition=number % PARTITIONS)
        assert producer.flush(DEADLINE_S) == 0
        yield running


@pytest.fixture
def servers(broker: Broker) -> dict[str, Any]:
    return {"bootstrap.servers": broker.bootstrap_servers, **QUIET}


@pytest.fixture
def shell(broker: Broker) -> Shell:
    return Shell(broker.bootstrap_servers)


@contextmanager
def at_work(transport: Any, **options: Any) -> Iterator[Scene]:
    """Two consumers that have seen everything and own everything."""
    context = Scene(transport, "orders", **options)
    try:
        context.await_total(PARTITIONS * EACH)
        yield context
    finally:
        context.stop()


def front(servers: dict[str, Any], group: str, user: str = "alice") -> Group:
    author = Author.of(user, "desk", "test", uuid.uuid4().bytes[:4])
    return Group(KafkaTransport(servers, DEADLINE_S), group, "__marshal", author=author)


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_live_group_is_moved_and_sees_everything_again(servers: dict[str, Any], delivery: str) -> None:
    with at_work(servers, delivery=delivery) as context, marshal_py.connect(servers) as marshal:
        group = marshal.group(context.group)
        reported: list[Progress] = []
        moved = group.set_position("orders", "earliest", watcher=reported.append)
        assert [(row.partition, row.target) for row in moved.rows] == [(p, 0) for p in range(PARTITIONS)]
        assert {row.owner for row in moved.rows} <= {f"{context.group}-a", f"{context.group}-b"}
        assert reported[-1].kind == "moved"
        context.await_total(2 * PARTITIONS * EACH)
        assert set(context.seen.values()) == {2}
        assert context.lost.count("paused") == PARTITIONS
        assert len(group.members()) == 2, "they stayed"
        shifted = group.set_position(["orders:1"], shift_by=-5)
        assert [(row.position, row.target, row.repeated) for row in shifted.rows] == [(EACH, EACH - 5, 5)]
        context.await_total(2 * PARTITIONS * EACH + 5)
        assert all(worker.error is None for worker in context.workers)


def test_a_pause_and_its_rights(servers: dict[str, Any]) -> None:
    with at_work(servers) as context:
        alice, bob = front(servers, context.group), front(servers, context.group, "bob")
        with pytest.raises(InvalidOption, match="duration_s='60'"):
            alice.pause("60")  # type: ignore[arg-type]
        paused = alice.pause(60, "lunch")
        assert len(paused.released) == PARTITIONS
        assert alice.info().owned == 0
        for refused in (bob.resume, bob.pause, lambda: bob.set_position("orders", 0)):
            with pytest.raises(AdminBusy, match=r"alice@desk test run \w+ \(lunch\), about \d+ s left"):
                refused()  # type: ignore[operator]
        another = front(servers, context.group)
        with pytest.raises(AdminBusy, match="another run of yours"):
            another.set_position("orders", 0)
        assert "--adopt" in another.set_position("orders", 0, dry_run=True).refused
        assert not another.set_position("orders", 0, dry_run=True, adopt=True).refused
        again = another.set_position("orders", 0, adopt=True)
        assert again.token == paused.token
        assert bob.resume(token=again.token)
        assert not bob.resume()
        context.await_total(2 * PARTITIONS * EACH)


def test_what_is_refused_writes_nothing(servers: dict[str, Any]) -> None:
    with at_work(servers) as context:
        group = front(servers, context.group)
        before = group.info()
        with pytest.raises(PositionOutOfRange, match=f"valid are 0 to {EACH}"):
            group.set_position("orders", EACH + 1)
        with pytest.raises(PositionOutOfRange, match=f"valid are 0 to {EACH}"):
            group.set_position("orders", shift_by=-EACH - 1)  # wherever the owner is
        with pytest.raises(GroupMissing, match="never consumed topic 'bare'"):
            group.set_position("bare", 0)
        with pytest.raises(GroupMissing, match="knows 4 partitions"):
            group.set_position("orders:4", 0)
        with pytest.raises(UnsupportedPlatform, match="a position by time does not work on the embedded broker"):
            group.set_position("orders", "2024-01-01")
        with pytest.raises(InvalidOption):
            group.set_position("orders", "earliest", shift_by=1)
        with pytest.raises(InvalidOption):
            group.pause(100_000)
        with pytest.raises(MembersAlive):
            group.delete()
        with pytest.raises(MembersAlive):
            group.evict(before.members[0].session)
        assert group.info().pause is None
        assert [one.session for one in group.members()] == [one.session for one in before.members]


def test_a_group_that_was_deleted_ends_its_past_and_its_consumers(servers: dict[str, Any]) -> None:
    with at_work(servers) as context:
        pass
    group = front(servers, context.group)
    assert group.positions()
    assert group.delete()
    assert not group.delete()
    assert group.positions() == {}
    with pytest.raises(GroupDeleted), marshal_py.connect(servers) as marshal:
        marshal.consumer(context.group, ["orders"])


def test_a_forced_deletion_ends_consumers_at_work(servers: dict[str, Any], shell: Shell) -> None:
    with at_work(servers) as context:
        refused = shell.run("groups", "rm", context.group, "--yes")
        assert refused.exit_code == 1
        assert "a group with live members is not deleted" in refused.output
        done = shell.run("groups", "rm", context.group, "--force", "--yes", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout.splitlines()[-1]) == {"group": context.group, "deleted": True}
        wait_until(lambda: all(worker.error is not None for worker in context.workers), "the ends of all consumers")
        assert {type(worker.error) for worker in context.workers} <= {ModeMismatch, GroupDeleted}
    assert front(servers, context.group).positions() == {}


def test_a_group_or_a_topic_that_is_not_there(servers: dict[str, Any]) -> None:
    with pytest.raises(GroupMissing, match="has never been used"):
        front(servers, "nobody").info()
    with pytest.raises(CoordinationTopicMissing, match="reading it creates nothing"):
        Group(KafkaTransport(servers, DEADLINE_S), "g", "elsewhere").pause()
    with pytest.raises(GroupMissing, match="no consumer has run with topic 'bare'"):
        Group(KafkaTransport(servers, DEADLINE_S), "g", "bare").pause()


def test_the_same_over_the_memory_transport() -> None:
    broker = MemoryBroker()
    broker.create_topic("orders", PARTITIONS)
    for number in range(PARTITIONS * EACH):
        broker.produce("orders", number % PARTITIONS, b"x", timestamp_ms=1_000 * number)
    with at_work(MemoryTransport(broker)) as context, marshal_py.connect(MemoryTransport(broker)) as marshal:
        group = marshal.group(context.group)
        when = "1970-01-01T00:00:40Z"
        moved = group.set_position("orders", when)
        assert [row.target for row in moved.rows] == [10] * PARTITIONS
        context.await_total(PARTITIONS * (EACH + EACH - 10))


# --- the commands


def test_the_commands_do_what_they_say(servers: dict[str, Any], shell: Shell, tmp_path: Path) -> None:
    with at_work(servers) as context:
        group = context.group
        preview = shell.run("set-position", group, "orders", "--to", "latest-5", "--dry-run")
        assert preview.exit_code == 0
        assert "orders:3" in preview.stdout
        released = shell.json("pause", group, "--for", "60s", "--reason", "test", "--yes")
        assert sorted(released["released"]) == [f"orders:{p}" for p in range(PARTITIONS)]
        moved = shell.json("set-position", group, "orders", "--to", "earliest", "--adopt", "--yes")
        assert shell.json("resume", group)["resumed"]
        assert moved["outcome"] == "moved"
        context.await_total(2 * PARTITIONS * EACH)
        story = shell.json("explain", group, "orders:0")
        # A tool that the machine holds up sends its record again, and the copy is refused.
        accepted = [one for one in story["records"] if one["verdict"] == "accepted"]
        (record,) = [one for one in accepted if one["type"] == "SetPosition"]
        assert record["offset"] == moved["offset"]
        reported = shell.run("explain", group, "orders:0")
        assert "positions move" in reported.stdout
        assert "of group" in reported.stdout.splitlines()[0]
        difference = shell.json("explain", group, "--since", "0", "--at", str(moved["offset"]))
        assert "SetPosition accepted" in difference["records"]
        assert shell.run("explain", group, "--since", "0", "--at", str(moved["offset"])).exit_code == 0

        file = tmp_path / "back.csv"
        file.write_text("orders,0,3\norders,2,4\n", encoding="utf-8")
        rows = shell.json("set-position", group, "--to", str(file), "--yes")["partitions"]
        assert [(row["partition"], row["target"]) for row in rows] == [(0, 3), (2, 4)]
        context.await_total(2 * PARTITIONS * EACH + (EACH - 3) + (EACH - 4))

        assert {m["client_id"] for m in shell.json("state", group, "--members")} == {f"{group}-a", f"{group}-b"}
        assert shell.json("members", "step-down", group, f"{group}-a", "--yes")["mark"] > 0
        assert shell.json("state", group, "--members")[-1]["client_id"] == f"{group}-a"
        assert "yes" in shell.run("state", group, "--members").stdout
        assert group in [one["group"] for one in shell.json("groups", "ls")]
        assert shell.json("state", group, "--settings")["topics"] == {"orders": PARTITIONS}
        assert group in shell.run("groups", "ls").stdout
        assert "position: orders:0" in shell.run("state", group, "--settings").stdout
        exported = shell.run("state", group, "--csv").stdout
        assert [line.rsplit(",", 1)[0] for line in exported.splitlines()] == [f"orders,{p}" for p in range(PARTITIONS)]
    assert shell.json("groups", "rm", group, "--yes")["deleted"]
    assert group not in [one["group"] for one in shell.json("groups", "ls")]
    assert group in [one["group"] for one in shell.json("groups", "ls", "--deleted")]


def test_a_refusal_is_one_line_and_exit_code_1(servers: dict[str, Any], shell: Shell) -> None:
    with at_work(servers) as context:
        group = context.group
        front(servers, group, "bob").pause(60, "mine")
        busy = shell.run("set-position", group, "orders", "--to", "0", "--yes", "--json")
        assert busy.exit_code == 1
        assert json.loads(busy.stdout)["outcome"] == "not_moved"
        (line,) = busy.stderr.splitlines()
        assert "bob@desk" in line
        for arguments in (
            ("pause", group, "--yes"),
            ("resume", group),
            ("resume", group, "--token", "1"),
            ("groups", "rm", group, "--yes"),
            ("evict", group, "nobody", "--yes"),
            ("members", "step-down", group, "nobody"),
            ("explain", group, "orders:77"),
            ("explain", "nobody", "orders:0"),
            ("state", "nobody", "--settings"),
            ("set-position", group, "orders", "--to", "1000000", "--yes"),
            ("set-position", group, "orders", "--to", "2024-01-01", "--yes"),
        ):
            refused = shell.run(*arguments)
            assert refused.exit_code == 1, (arguments, refused.output)
            assert len(refused.stderr.splitlines()) == 1, refused.stderr
        assert shell.json("pause", group, "--take-over", "--yes")["token"] > 0
        assert shell.json("resume", group)["resumed"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("pause", "g", "--for", "soon"),
        ("pause", "g", "--for", "25h"),
        ("pause", "g", "--for", "0s"),
        ("set-position", "g", "orders"),
        ("set-position", "g", "--to", "0"),
        ("set-position", "g", "orders", "--to", "0", "--shift-by", "1"),
        ("set-position", "g", "orders", "--to", "sometime"),
        ("set-position", "g", "--to", "missing.csv"),
        ("explain", "g", "orders"),
        ("explain", "g", "orders:0", "--at", "noon"),
        ("explain", "g", "--at", "1"),
        ("explain", "g", "--since", "1", "--at", "never"),
        ("members",),
        ("state", "g", "--lag", "--members"),
        ("state", "--lag", "--since", "-1h"),
        ("state", "--csv"),
        ("state", "g", "--csv", "--json"),
        ("groups", "update", "g"),
        ("groups", "update", "g", "--add-member", "a", "--drop-member", "b"),
        ("groups", "update", "g", "--no-map", "--policy", "greedy"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    """It is refused before a command asks the cluster: here there is none."""
    assert Shell("localhost:1").run(*arguments).exit_code == 2


def test_a_destructive_command_asks(servers: dict[str, Any], shell: Shell) -> None:
    with at_work(servers) as context:
        group = context.group
        for arguments in (
            ("pause", group),
            ("set-position", group, "orders", "--to", "0"),
            ("groups", "rm", group),
            ("evict", group, f"{group}-a"),
        ):
            declined = shell.run(*arguments, stdin=b"n\n")
            assert declined.exit_code == 1, arguments
            assert "[y/N]" in declined.stderr
        info = shell.json("state", group, "--settings")
        assert (info["pause"], info["sessions"], info["owned"]) == (None, 2, PARTITIONS)
        once = shell.run("pause", group, "--take-over", stdin=b"y\ny\nn\n")
        assert once.exit_code == 1, "taking over asks a second time"
        assert shell.json("state", group, "--settings")["pause"] is None
        agreed = shell.run("pause", group, stdin=b"y\n")
        assert agreed.exit_code == 0
        assert "is paused for" in agreed.stdout
        assert "orders:0 is free" in agreed.stderr
        assert shell.run("resume", group).exit_code == 0


EXAMPLES = [
    pause.EXAMPLE,
    pause.RESUME_EXAMPLE,
    pause.SET_POSITION_EXAMPLE,
    explain.EXAMPLE,
    groups.LS_EXAMPLE,
    groups.CREATE_EXAMPLE,
    groups.UPDATE_EXAMPLE,
    members.STEP_DOWN_EXAMPLE,
]


def test_every_example_of_a_help_text_runs(servers: dict[str, Any], shell: Shell) -> None:
    with at_work(servers) as context:
        for example in EXAMPLES:
            words = shlex.split(example.splitlines()[-1])[1:]
            names = {"billing": context.group, "worker-1": f"{context.group}-a"}
            done = shell.run(*[names.get(word, word) for word in words])
            assert done.exit_code == 0, (words, done.output)
    rm = shlex.split(groups.RM_EXAMPLE.splitlines()[-1])[1:]
    assert shell.run(*[context.group if word == "billing" else word for word in rm]).exit_code == 0
    for example in [*EXAMPLES, groups.RM_EXAMPLE, members.EVICT_EXAMPLE]:
        words = example.splitlines()[-1].split()[1:]
        command = words[:2] if words[0] in ("groups", "members") else words[:1]
        assert example.splitlines()[-1].strip() in shell.run(*command, "--help").stdout


def test_a_held_pause_that_was_over_does_not_end_with_0(servers: dict[str, Any], shell: Shell) -> None:
    def paused() -> bool:
        return shell.json("state", context.group, "--settings")["pause"] is not None

    with at_work(servers) as context:
        holder = shell.start("pause", context.group, "--hold", "--for", "3s", "--yes", "--json")
        assert holder.stdout is not None
        assert json.loads(holder.stdout.readline())["event"] == "drained"
        holder.send_signal(signal.SIGSTOP)
        wait_until(lambda: not paused(), "the consumers end the pause")
        holder.send_signal(signal.SIGCONT)
        events = iter(lambda: json.loads(holder.stdout.readline()), None)  # type: ignore[union-attr]
        again = next(event for event in events if event["event"] != "renewed")
        assert again["event"] == "paused_again"
        assert next(event for event in events if event["event"] != "renewed")["event"] == "drained"
        holder.send_signal(signal.SIGINT)
        _, trouble = holder.communicate(timeout=DEADLINE_S)
        assert holder.returncode == 1, trouble
        assert f"the pause of group {context.group!r} did not hold: it was over at {again['over_at']}, " in trouble
        assert not paused()


def test_a_held_pause_ends_with_ctrl_c(servers: dict[str, Any], shell: Shell) -> None:
    with at_work(servers) as context:
        holder = shell.start("pause", context.group, "--hold", "--yes", "--json")
        assert holder.stdout is not None
        assert json.loads(holder.stdout.readline())["event"] == "drained"
        assert shell.json("state", context.group, "--settings")["pause"] is not None
        holder.send_signal(signal.SIGINT)
        out, trouble = holder.communicate(timeout=DEADLINE_S)
        assert holder.returncode == 0, trouble
        assert json.loads(out)["held"] is True
        assert shell.json("state", context.group, "--settings")["pause"] is None
