"""Operating live groups on Apache Kafka: each command as a person runs it, while real consumers are at work.

The last test kills `marshal set-position` at random steps, under load, again and again: whatever the step, either all
positions of that run moved or none, and every message since is delivered.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from marshal_py.client.observer import Judged, Observer
from marshal_py.protocol.records import ReleaseGroup, SetPosition
from marshal_py.transport.kafka import KafkaTransport
from tests.support.kafka import Cluster, TopicFactory, wait_until

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 90.0  # nothing here takes ten seconds on an idle machine
PARTITIONS = 3
MESSAGES = 300
RUNS = 30
MODULE = (sys.executable, "-m", "marshal_py.cli")
DEADLY = (sys.executable, "-m", "tests.support.admin_tool")


class Shell:
    """`marshal` in processes of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "MARSHAL_BOOTSTRAP_SERVERS": cluster.bootstrap,
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, *arguments: str, module: tuple[str, ...] = MODULE, **streams: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([*module, *arguments], env=self.environment, cwd=ROOT, text=True, **streams)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MODULE, *arguments],
            env=self.environment,
            cwd=ROOT,
            text=True,
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


class Workers:
    """`marshal consume` processes of one group; counts what they print."""

    def __init__(self, shell: Shell, group: str, topic: str, count: int) -> None:
        self.seen: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()
        self.processes = [
            shell.start(
                "consume",
                topic,
                "--group",
                group,
                "--start",
                "earliest",
                "--heartbeat-interval",
                "1",
                "--client-id",
                f"worker-{number}",
                "--json",
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for number in range(count)
        ]
        self._threads = [threading.Thread(target=self._read, args=(process,)) for process in self.processes]
        for thread in self._threads:
            thread.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            with self._lock:
                self.seen[message["partition"], message["offset"]] += 1

    def total(self) -> int:
        with self._lock:
            return self.seen.total()

    def lacking(self, times: int, messages: int) -> int:
        """How many of the first messages of each partition were not seen so often yet."""
        per = messages // PARTITIONS
        with self._lock:
            return sum(self.seen[p, o] < times for p in range(PARTITIONS) for o in range(per))

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for process in self.processes:
            assert process.stdout is not None
            process.stdout.close()


class Scene:
    """One topic, one group, some consumers."""

    def __init__(self, cluster: Cluster, topic: str, group: str, workers: Workers, shell: Shell) -> None:
        self.cluster, self.topic, self.group, self.workers, self.shell = cluster, topic, group, workers, shell

    def await_seen(self, times: int, messages: int = MESSAGES) -> None:
        wait_until(lambda: self.workers.lacking(times, messages) == 0, DEADLINE_S, f"everything seen {times} times")

    def judged(self) -> list[Judged]:
        with Observer(KafkaTransport(self.cluster.bootstrap, DEADLINE_S), "__marshal") as observer:
            return [one for one in observer.read(self.group) if one.verdict.group == self.group]

    def positions(self) -> dict[int, int]:
        return {p["partition"]: p["position"] for p in self.shell.json("groups", "info", self.group)["positions"]}

    def await_owned(self) -> None:
        def owned() -> bool:
            return bool(self.shell.json("groups", "info", self.group)["owned"] == PARTITIONS)

        wait_until(owned, DEADLINE_S, "every partition has an owner")


def produce(cluster: Cluster, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all"})
    for number in range(count):
        producer.produce(topic, b"%d" % number, partition=number % PARTITIONS)
        producer.poll(0)
    assert producer.flush(DEADLINE_S) == 0


@contextmanager
def at_work(cluster: Cluster, topic: str, count: int = 3) -> Iterator[Scene]:
    produce(cluster, topic, MESSAGES)
    shell, group = Shell(cluster), f"g-{uuid.uuid4().hex[:8]}"
    workers = Workers(shell, group, topic, count)
    try:
        yield Scene(cluster, topic, group, workers, shell)
    finally:
        workers.stop()


@pytest.fixture
def context(kafka: Cluster, topic: TopicFactory) -> Iterator[Scene]:
    """Three consumers that have seen everything once and let go of nothing."""
    with at_work(kafka, topic(PARTITIONS)) as context:
        context.await_seen(1)
        context.await_owned()
        yield context


def test_release_then_set_position_then_everything_is_seen_again(context: Scene) -> None:
    """The acceptance of the issue, with the pause adopted, and the log telling who did it."""
    shell, group = context.shell, context.group
    released = shell.json("release", group, "--for", "60s", "--reason", "acceptance", "--yes")
    assert len(released["released"]) == PARTITIONS
    assert shell.json("groups", "info", group)["pause"]["token"] == released["token"]
    refused = shell.run("set-position", group, context.topic, "--to", "earliest", "--yes")
    assert refused.returncode == 1
    assert "(acceptance)" in refused.stderr
    assert "--adopt" in refused.stderr
    moved = shell.json("set-position", group, context.topic, "--to", "earliest", "--adopt", "--yes")
    assert (moved["outcome"], moved["token"]) == ("moved", released["token"])
    assert shell.json("groups", "info", group)["pause"]["token"] == released["token"]
    assert shell.json("resume", group)["resumed"] is True
    assert [(p["position"], p["target"], p["repeated"]) for p in moved["partitions"]] == [(100, 0, 100)] * 3
    context.await_seen(2)
    told = shell.json("explain", group, f"{context.topic}:0")
    # A tool that stands still for a third of an interval sends its record again, and the copy is refused.
    (record,) = [one for one in told["records"] if one["type"] == "SetPosition" and one["verdict"] == "accepted"]
    assert record["offset"] == moved["offset"]
    assert " run " in record["fields"]["by"]
    assert not told["paused"]
    before = shell.json("explain", group, f"{context.topic}:0", "--offset", str(moved["offset"] - 1))
    assert before["paused"]
    assert before["owner"] is None
    assert before["position"] == 100
    between = shell.json("diff", group, "--at", str(moved["offset"] - 1), "--at", str(moved["offset"]))
    assert {p["partition"]: p["to"]["position"] for p in between["partitions"]} == {0: 0, 1: 0, 2: 0}
    assert "paused" not in between["settings"], "the move left the pause in place"


def test_a_pause_stops_everybody_and_resume_lets_them_go_on(context: Scene) -> None:
    shell, group = context.shell, context.group
    token = shell.json("release", group, "--for", "10m", "--yes")["token"]
    produce(context.cluster, context.topic, 30)
    refused = shell.run("resume", group, "--token", str(token + 1))
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1
    assert "is paused by" in refused.stderr
    assert shell.json("groups", "info", group)["owned"] == 0
    assert context.workers.total() == MESSAGES, "nobody owns anything, so nobody reads"
    assert shell.json("resume", group)["resumed"] is True
    assert shell.json("resume", group)["resumed"] is False
    context.await_seen(1, MESSAGES + 30)


def test_targets_that_need_the_cluster(context: Scene, tmp_path: Path) -> None:
    """By time, by what Kafka's own tools committed, by file, relative to the end; and what lies outside is refused."""
    shell, group, topic = context.shell, context.group, context.topic

    def targets(*arguments: str) -> list[int]:
        found = shell.json("set-position", group, *arguments, "--dry-run")
        assert found["outcome"] == "dry_run"
        return [row["target"] for row in found["partitions"]]

    assert targets(topic, "--to", "latest-10") == [90] * 3
    assert targets(f"{topic}:1", "--to", "latest") == [100]
    assert targets(topic, "--to", "1999-12-31T00:00:00Z") == [0] * 3
    assert targets(topic, "--to", datetime.fromtimestamp(time.time() + 3600, UTC).isoformat()) == [100] * 3
    table = tmp_path / "positions.csv"
    table.write_text(f"{topic},0,7\n{topic},2,9\n", encoding="utf-8")
    assert targets("--to", str(table)) == [7, 9]
    exported = shell.run("groups", "info", group, "--csv").stdout
    assert len(exported.splitlines()) == PARTITIONS
    for arguments in (("--to", "101"), ("--to", "99999999")):
        refused = shell.run("set-position", group, topic, *arguments, "--yes")
        assert refused.returncode == 1
        assert "valid are 0 to 100" in refused.stderr
    assert not [one for one in context.judged() if isinstance(one.verdict.record, ReleaseGroup)], "before any pause"

    def committed() -> bool:
        found = shell.run("set-position", group, topic, "--to", "committed", "--dry-run", "--json")
        return found.returncode == 0 and [row["target"] for row in json.loads(found.stdout)["partitions"]] == [100] * 3

    wait_until(committed, DEADLINE_S, "the positions are mirrored to Kafka")
    moved = shell.json("set-position", group, topic, "--shift-by", "-5", "--yes")
    assert [row["target"] for row in moved["partitions"]] == [95] * 3


def test_members_step_down_and_groups_go(context: Scene) -> None:
    shell, group = context.shell, context.group
    members = shell.json("members", "ls", group)
    assert {member["client_id"] for member in members} == {"worker-0", "worker-1", "worker-2"}
    assert group in {one["group"] for one in shell.json("groups", "ls")}
    stepped = shell.json("members", "step-down", group, "worker-1", "--reason", "test")
    assert shell.json("members", "ls", group)[-1]["session"] == stepped["session"]
    for refused in (shell.run("evict", group, "worker-0", "--yes"), shell.run("groups", "rm", group, "--yes")):
        assert refused.returncode == 1
        assert "gave signs of life" in refused.stderr
    frozen = context.workers.processes[2]
    frozen.send_signal(signal.SIGSTOP)
    try:
        session = next(m["session"] for m in members if m["client_id"] == "worker-2")
        gone = shell.run("evict", group, str(session), "--yes", "--json")  # or the others were faster
        assert gone.returncode == 0 or "no live session" in gone.stderr
        assert session not in {member["session"] for member in shell.json("members", "ls", group)}
    finally:
        frozen.send_signal(signal.SIGCONT)
    context.workers.stop()
    assert shell.json("groups", "rm", group, "--yes")["deleted"] is True
    assert group not in {one["group"] for one in shell.json("groups", "ls")}


def test_a_killed_admin_leaves_positions_untouched(context: Scene) -> None:
    """Killed in its pause. The members end it and go on where they were."""
    shell, group = context.shell, context.group
    was = context.positions()
    tool = shell.start("release", group, "--for", "3s", "--hold", "--yes", "--json", stdout=subprocess.PIPE)
    assert tool.stdout is not None
    assert json.loads(tool.stdout.readline())["event"] == "drained"
    tool.kill()
    tool.wait(DEADLINE_S)
    tool.stdout.close()
    produce(context.cluster, context.topic, 30)
    context.await_seen(1, MESSAGES + 30)
    now = context.positions()
    assert all(now[partition] >= was[partition] for partition in was)
    assert not [one for one in context.judged() if isinstance(one.verdict.record, SetPosition)]
    assert max(context.workers.seen.values()) == 1


class Load:
    """A producer that does not stop by itself."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.sent = 0
        self._over = threading.Event()
        self._producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all"})
        self._topic = topic
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.02):
            for partition in range(PARTITIONS):
                self._producer.produce(self._topic, b"load", partition=partition)
                self.sent += 1
            self._producer.poll(0)

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        assert self._producer.flush(DEADLINE_S) == 0
        return self.sent


class Run:
    """One `marshal set-position`: what it was told, and how it ended."""

    def __init__(self, target: int, process: subprocess.Popen[str]) -> None:
        self.target, self.process = target, process
        self.said = ""

    def end(self) -> None:
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        with suppress(ValueError, IndexError):
            self.said = json.loads(out.splitlines()[-1])["outcome"]


@pytest.mark.timeout(600)
def test_positions_move_under_load_while_admins_are_killed_at_random_steps(kafka: Cluster, topic: TopicFactory) -> None:
    """S12 on Kafka: each run moved everything or nothing; who said so told the truth; no message is lost beyond it."""
    chance = random.Random(20)
    with at_work(kafka, topic(PARTITIONS), count=2) as context:
        context.await_seen(1)
        context.await_owned()
        load = Load(kafka, context.topic)
        try:
            runs = [one_run(context, number, chance) for number in range(RUNS)]
            final = context.shell.json(
                "set-position", context.group, context.topic, "--to", "0", "--take-over", "--yes"
            )
            assert final["outcome"] == "moved"
        finally:
            sent = load.stop()
        per = (MESSAGES + sent) // PARTITIONS

        def all_read() -> bool:
            return all(position == per for position in context.positions().values())

        wait_until(all_read, DEADLINE_S, "the group has read everything")
        judge(context, runs, final["offset"], per)


STEPS = [*((how, number) for how in ("write", "written") for number in (1, 2)), *(("tick", n) for n in range(2, 9))]


def one_run(context: Scene, number: int, chance: random.Random) -> Run:
    """A move to a position that no other run names. It kills itself at a step that is drawn; one in six may live."""
    move = ("set-position", context.group, context.topic, "--to", str(number + 1), "--take-over", "--yes", "--json")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    if number % 6 == 5:
        run = Run(number + 1, context.shell.start(*move, **streams))
    else:
        how, step = chance.choice(STEPS)
        run = Run(number + 1, context.shell.start(how, str(step), *move, module=DEADLY, **streams))
    run.end()
    assert run.said == "moved" or number % 6 != 5
    return run


def judge(context: Scene, runs: list[Run], last: int, per: int) -> None:
    moves: dict[int, list[Judged]] = {}
    for one in context.judged():
        record = one.verdict.record
        if isinstance(record, SetPosition):
            assert {move.partition for move in record.moves} == set(range(PARTITIONS)), "all of it in one record"
            if one.verdict.accepted:
                moves.setdefault(record.moves[0].position, []).append(one)
    for run in runs:
        landed = moves.get(run.target, [])
        assert len(landed) <= 1, "a copy moved it a second time"
        assert run.said in ("", "moved")  # "": killed before it could say
        assert not run.said or landed, "it said that it moved"
    killed = [run for run in runs if run.process.returncode == -signal.SIGKILL]
    assert len(killed) >= 15, "too few were killed for this to mean anything"
    landed_dead = [run for run in killed if run.target in moves]
    assert 0 < len(landed_dead) < len(killed), "killed both before and after the move"
    everything = {(partition, offset) for partition in range(PARTITIONS) for offset in range(per)}
    assert everything <= set(context.workers.seen), "every message was delivered, since the last move went to 0"
    assert moves[0][-1].record.offset == last
