"""Commands of `marshal` on live groups on Apache Kafka, while real consumers work in processes of their own.

The last test kills `marshal set-position` at several steps, under load: whatever the step, each run has moved either
all positions or none, and every message from then on is delivered.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from confluent_kafka import Producer

from marshal_py.log.observer import Judged, Observer
from marshal_py.protocol.wire.records import ReleaseGroup, SetPosition
from marshal_py.transport.kafka import KafkaTransport
from tests.support.commands import DEADLINE_S, Commands, ConsumeProcesses
from tests.support.kafka import Cluster, TopicFactory, wait_until

PARTITIONS = 3
MESSAGES = 300
SELF_KILLING = (sys.executable, "-m", "tests.support.admin_tool")


class WorkingGroup:
    """A group with `marshal consume` processes, its topic, and the command."""

    def __init__(self, cluster: Cluster, topic: str, consumers: int) -> None:
        self.cluster, self.topic, self.group = cluster, topic, f"g-{uuid.uuid4().hex[:8]}"
        self.marshal = Commands(cluster.bootstrap)
        names = [f"worker-{number}" for number in range(consumers)]
        self.consumers = ConsumeProcesses(self.marshal, self.group, topic, names)

    def await_seen(self, times: int, messages: int = MESSAGES) -> None:
        """Waits until the first `messages` messages of the topic were printed so often."""
        wanted = [(p, o) for p in range(PARTITIONS) for o in range(messages // PARTITIONS)]

        def all_seen() -> bool:
            seen = self.consumers.seen()
            return all(seen[place] >= times for place in wanted)

        wait_until(all_seen, DEADLINE_S, f"everything seen {times} times")

    def judged(self) -> list[Judged]:
        with Observer(KafkaTransport(self.cluster.bootstrap, DEADLINE_S), "__marshal") as observer:
            return [one for one in observer.read(self.group) if one.verdict.group == self.group]

    def positions(self) -> dict[int, int]:
        return {
            p["partition"]: p["position"] for p in self.marshal.json("state", self.group, "--settings")["positions"]
        }

    def await_owned(self) -> None:
        def owned() -> bool:
            return bool(self.marshal.json("state", self.group, "--settings")["owned"] == PARTITIONS)

        wait_until(owned, DEADLINE_S, "every partition has an owner")


def produce(cluster: Cluster, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all"})
    for number in range(count):
        producer.produce(topic, b"%d" % number, partition=number % PARTITIONS)
        producer.poll(0)
    assert producer.flush(DEADLINE_S) == 0


@contextmanager
def at_work(cluster: Cluster, topic: str, count: int = 2) -> Iterator[WorkingGroup]:
    produce(cluster, topic, MESSAGES)
    case = WorkingGroup(cluster, topic, count)
    try:
        yield case
    finally:
        case.consumers.stop()


@pytest.fixture
def case(request: pytest.FixtureRequest, kafka: Cluster, topic: TopicFactory) -> Iterator[WorkingGroup]:
    """A group whose consumers, two unless a test asks for more, own all partitions and have seen everything once."""
    with at_work(kafka, topic(PARTITIONS), getattr(request, "param", 2)) as case:
        case.await_seen(1)
        case.await_owned()
        yield case


def test_release_then_set_position_then_everything_is_seen_again(case: WorkingGroup) -> None:
    """A move under an adopted pause; the log shows who moved the positions, and when."""
    marshal, group = case.marshal, case.group
    released = marshal.json("pause", group, "--for", "60s", "--reason", "acceptance", "--yes")
    assert len(released["released"]) == PARTITIONS
    assert marshal.json("state", group, "--settings")["pause"]["token"] == released["token"]
    refused = marshal.run("set-position", group, case.topic, "--to", "earliest", "--yes")
    assert refused.returncode == 1
    assert "(acceptance)" in refused.stderr
    assert "--adopt" in refused.stderr
    moved = marshal.json("set-position", group, case.topic, "--to", "earliest", "--adopt", "--yes")
    assert (moved["outcome"], moved["token"]) == ("moved", released["token"])
    assert marshal.json("state", group, "--settings")["pause"]["token"] == released["token"]
    assert marshal.json("resume", group)["resumed"] is True
    assert [(p["position"], p["target"], p["repeated"]) for p in moved["partitions"]] == [(100, 0, 100)] * 3
    case.await_seen(2)
    story = marshal.json("explain", group, f"{case.topic}:0")
    # A command that was not scheduled for a third of an interval sends its record again, and the copy is rejected.
    (record,) = [one for one in story["records"] if one["type"] == "SetPosition" and one["verdict"] == "accepted"]
    assert record["offset"] == moved["offset"]
    assert " run " in record["fields"]["by"]
    assert not story["paused"]
    before = marshal.json("explain", group, f"{case.topic}:0", "--at", str(moved["offset"] - 1))
    assert before["paused"]
    assert before["owner"] is None
    assert before["position"] == 100
    between = marshal.json("explain", group, "--since", str(moved["offset"] - 1), "--at", str(moved["offset"]))
    assert {p["partition"]: p["to"]["position"] for p in between["partitions"]} == {0: 0, 1: 0, 2: 0}
    assert "paused" not in between["settings"], "the move left the pause in place"


def test_a_pause_stops_every_consumer_until_it_is_resumed(case: WorkingGroup) -> None:
    marshal, group = case.marshal, case.group
    token = marshal.json("pause", group, "--for", "10m", "--yes")["token"]
    produce(case.cluster, case.topic, 30)
    refused = marshal.run("resume", group, "--token", str(token + 1))
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1
    assert "is paused by" in refused.stderr
    assert marshal.json("state", group, "--settings")["owned"] == 0
    assert case.consumers.seen().total() == MESSAGES, "no consumer owns a partition, so none reads"
    assert marshal.json("resume", group)["resumed"] is True
    assert marshal.json("resume", group)["resumed"] is False
    case.await_seen(1, MESSAGES + 30)


def test_targets_that_need_the_cluster(case: WorkingGroup, tmp_path: Path) -> None:
    """By time, by committed offset, by file, relative to the end; targets outside of the partition are refused."""
    marshal, group, topic = case.marshal, case.group, case.topic

    def targets(*arguments: str) -> list[int]:
        found = marshal.json("set-position", group, *arguments, "--dry-run")
        assert found["outcome"] == "dry_run"
        return [row["target"] for row in found["partitions"]]

    assert targets(topic, "--to", "latest-10") == [90] * 3
    assert targets(f"{topic}:1", "--to", "latest") == [100]
    assert targets(topic, "--to", "1999-12-31T00:00:00Z") == [0] * 3
    assert targets(topic, "--to", datetime.fromtimestamp(time.time() + 3600, UTC).isoformat()) == [100] * 3
    table = tmp_path / "positions.csv"
    table.write_text(f"{topic},0,7\n{topic},2,9\n", encoding="utf-8")
    assert targets("--to", str(table)) == [7, 9]
    exported = marshal.run("state", group, "--csv").stdout
    assert len(exported.splitlines()) == PARTITIONS
    for arguments in (("--to", "101"), ("--to", "99999999")):
        refused = marshal.run("set-position", group, topic, *arguments, "--yes")
        assert refused.returncode == 1
        assert "valid are 0 to 100" in refused.stderr
    assert not [one for one in case.judged() if isinstance(one.verdict.record, ReleaseGroup)], "before any pause"

    def committed() -> bool:
        found = marshal.run("set-position", group, topic, "--to", "committed", "--dry-run", "--json")
        return found.returncode == 0 and [row["target"] for row in json.loads(found.stdout)["partitions"]] == [100] * 3

    wait_until(committed, DEADLINE_S, "the positions are mirrored to Kafka")
    moved = marshal.json("set-position", group, topic, "--shift-by", "-5", "--yes")
    assert [row["target"] for row in moved["partitions"]] == [95] * 3


@pytest.mark.parametrize("case", [3], indirect=True)
def test_members_step_down_and_groups_go(case: WorkingGroup) -> None:
    marshal, group = case.marshal, case.group
    workers = {"worker-0", "worker-1", "worker-2"}  # on a slow machine one may join when others own everything

    def all_there() -> bool:
        return {member["client_id"] for member in marshal.json("state", group, "--members")} == workers

    wait_until(all_there, DEADLINE_S, "every worker has joined")
    members = marshal.json("state", group, "--members")
    assert group in {one["group"] for one in marshal.json("groups", "ls")}
    stepped = marshal.json("members", "step-down", group, "worker-1", "--yes", "--reason", "test")
    assert marshal.json("state", group, "--members")[-1]["session"] == stepped["session"]
    for refused in (marshal.run("evict", group, "worker-0", "--yes"), marshal.run("groups", "rm", group, "--yes")):
        assert refused.returncode == 1
        assert "gave signs of life" in refused.stderr
    frozen = case.consumers.processes["worker-2"]
    frozen.send_signal(signal.SIGSTOP)
    try:
        session = next(m["session"] for m in members if m["client_id"] == "worker-2")
        gone = marshal.run("evict", group, str(session), "--yes", "--json")  # unless other members were faster
        assert gone.returncode == 0 or "no live session" in gone.stderr
        assert session not in {member["session"] for member in marshal.json("state", group, "--members")}
    finally:
        frozen.send_signal(signal.SIGCONT)
    case.consumers.stop()
    assert marshal.json("groups", "rm", group, "--yes")["deleted"] is True
    assert group not in {one["group"] for one in marshal.json("groups", "ls")}


def test_a_killed_admin_leaves_positions_untouched(case: WorkingGroup) -> None:
    """The admin is killed during its pause. The members end the pause and continue at their positions."""
    marshal, group = case.marshal, case.group
    before = case.positions()
    tool = marshal.start("pause", group, "--for", "3s", "--hold", "--yes", "--json", stdout=subprocess.PIPE)
    assert tool.stdout is not None
    assert json.loads(tool.stdout.readline())["event"] == "drained"
    tool.kill()
    tool.wait(DEADLINE_S)
    tool.stdout.close()
    produce(case.cluster, case.topic, 30)
    case.await_seen(1, MESSAGES + 30)
    after = case.positions()
    assert all(after[partition] >= before[partition] for partition in before)
    assert not [one for one in case.judged() if isinstance(one.verdict.record, SetPosition)]
    assert max(case.consumers.seen().values()) == 1


class Load:
    """A producer in a thread, which writes until it is stopped."""

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
    """One run of `marshal set-position`: its target, and the outcome that it printed."""

    def __init__(self, target: int, process: subprocess.Popen[str]) -> None:
        self.target, self.process = target, process
        self.outcome = ""

    def end(self) -> None:
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        with suppress(ValueError, IndexError):
            self.outcome = json.loads(out.splitlines()[-1])["outcome"]


STEPS = [*((how, number) for how in ("write", "written") for number in (1, 2, 3)), *(("tick", n) for n in range(2, 9))]
FEW = [("written", "ReleaseGroup"), ("written", "SetPosition")]  # before the move, and after it


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [FEW, pytest.param(STEPS, marks=pytest.mark.proof)], ids=["few", "each"])
def test_positions_move_under_load_while_admins_are_killed_at_each_step(
    kafka: Cluster, topic: TopicFactory, kills: list[tuple[str, int | str]]
) -> None:
    """S12 on Kafka: each run moved all positions or none, and printed the truth; no message after it is lost."""
    kills = random.Random(20).sample(kills, len(kills))
    half = len(kills) // 2
    steps: list[tuple[str, int | str] | None] = [*kills[:half], None, *kills[half:], None]  # None: nothing kills it
    with at_work(kafka, topic(PARTITIONS)) as case:
        case.await_seen(1)
        case.await_owned()
        load = Load(kafka, case.topic)
        try:
            runs = [one_run(case, number, step) for number, step in enumerate(steps)]
            final = case.marshal.json("set-position", case.group, case.topic, "--to", "0", "--take-over", "--yes")
            assert final["outcome"] == "moved"
        finally:
            sent = load.stop()
        per = (MESSAGES + sent) // PARTITIONS

        def all_read() -> bool:
            return all(position == per for position in case.positions().values())

        wait_until(all_read, DEADLINE_S, "the group has read everything")
        judge(case, runs, final["offset"], per)


def one_run(case: WorkingGroup, number: int, step: tuple[str, int | str] | None) -> Run:
    """A move to a position of its own. The process kills itself at `step`, if there is one and it gets there."""
    move = ("set-position", case.group, case.topic, "--to", str(number + 1), "--take-over", "--yes", "--json")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    if step is None:
        run = Run(number + 1, case.marshal.start(*move, **streams))
    else:
        run = Run(number + 1, case.marshal.start(step[0], str(step[1]), *move, module=SELF_KILLING, **streams))
    run.end()
    assert run.outcome == "moved" or step is not None
    return run


def judge(case: WorkingGroup, runs: list[Run], last: int, per: int) -> None:
    moves: dict[int, list[Judged]] = {}
    for one in case.judged():
        record = one.verdict.record
        if isinstance(record, SetPosition):
            assert {move.partition for move in record.moves} == set(range(PARTITIONS)), "all moves are in one record"
            if one.verdict.accepted:
                moves.setdefault(record.moves[0].position, []).append(one)
    for run in runs:
        landed = moves.get(run.target, [])
        assert len(landed) <= 1, "a copy of the record moved the positions a second time"
        assert run.outcome in ("", "moved")  # "": killed before it could print it
        assert not run.outcome or landed, "it printed that it moved"
    killed = [run for run in runs if run.process.returncode == -signal.SIGKILL]
    assert len(killed) >= (len(runs) - 2) // 2, "too few were killed for this to show anything"
    landed_dead = [run for run in killed if run.target in moves]
    assert 0 < len(landed_dead) < len(killed), "killed both before and after the move"
    everything = {(partition, offset) for partition in range(PARTITIONS) for offset in range(per)}
    assert everything <= set(case.consumers.seen()), "every message was delivered, since the last move went to 0"
    assert moves[0][-1].record.offset == last
