"""The runbooks of docs/ as they stand there: every `marshal` line of their shell blocks is run, in its order, on an
Apache Kafka, while consumers are at work; and what the text promises is counted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from typer.testing import CliRunner, Result

import marshal_py
from marshal_py.admin.author import Author
from marshal_py.admin.group import Group
from marshal_py.cli import app
from marshal_py.errors import KafkaGroupIsLive, ModeMismatch
from marshal_py.transport.kafka import KafkaTransport
from tests.support.kafka import Cluster, TopicFactory, wait_until

DOCS = Path(__file__).resolve().parents[2] / "docs"
DEADLINE_S = 90.0
PARTITIONS = 3
EACH = 20
INTERVAL_S = 1.0
FENCE = re.compile(r"^ *```sh\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def blocks(name: str) -> dict[str, list[str]]:
    """Lines of the shell blocks of a document, by section."""
    found = {}
    for section in ("\n" + (DOCS / name).read_text(encoding="utf-8")).split("\n## "):
        heading = section.lstrip().split("\n", 1)[0].strip("# ")
        lines = [line.strip() for block in FENCE.findall(section) for line in block.splitlines() if line.strip()]
        if lines:
            found[heading] = lines
    return found


class Scene:
    """A group, a topic and a coordination topic of their own, under the names that the documents use."""

    def __init__(self, cluster: Cluster, topic: str, folder: Path) -> None:
        self.cluster, self.topic, self.folder = cluster, topic, folder
        name = uuid.uuid4().hex[:8]
        self.group, self.log = f"billing-{name}", f"log-{name}"
        self.seen: Counter[tuple[int, int]] = Counter()
        self.workers: list[Worker] = []
        self.produced = 0
        self.produce(EACH)

    def produce(self, each: int) -> None:
        producer = Producer({"bootstrap.servers": self.cluster.bootstrap, "acks": "all"})
        for number in range(each * PARTITIONS):
            producer.produce(self.topic, b"x", partition=number % PARTITIONS)
        assert producer.flush(DEADLINE_S) == 0
        self.produced += each

    def start(self, client_id: str, **options: Any) -> Worker:
        worker = Worker(self, client_id, options)
        self.workers.append(worker)
        return worker

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()

    def await_seen(self, times: int, beyond: int = 0) -> None:
        """Until each message from `beyond` on was seen so often."""
        wanted = [(partition, offset) for partition in range(PARTITIONS) for offset in range(beyond, self.produced)]
        wait_until(lambda: all(self.seen[one] >= times for one in wanted), DEADLINE_S, f"all seen {times} times")

    def transport(self) -> KafkaTransport:
        return KafkaTransport({"bootstrap.servers": self.cluster.bootstrap, "log_level": 0}, DEADLINE_S)

    def front(self, user: str) -> Group:
        author = Author.of(user, "office", "test", uuid.uuid4().bytes[:4])
        return Group(self.transport(), self.group, self.log, author=author)

    def words(self, line: str) -> list[str]:
        """A line of a document, with our names for its names."""
        found = re.sub(r"\bbilling\b", self.group, re.sub(r"\borders\b", self.topic, line))
        quoted = [part for part in re.findall(r'"([^"]*)"|(\S+)', found)]
        return [first or second for first, second in quoted]

    def run(self, line: str) -> Result:
        program, *words = self.words(line)
        assert program == "marshal", line
        file = None
        if ">" in words:
            file = self.folder / words[words.index(">") + 1]
            words = words[: words.index(">")]
        done = CliRunner().invoke(
            app, [*words, "--coordination-topic", self.log], env={"MARSHAL_BOOTSTRAP_SERVERS": self.cluster.bootstrap}
        )
        if file is not None:
            file.write_text(done.stdout, encoding="utf-8")
        return done

    def follow(self, lines: list[str], before: dict[str, Callable[[], None]] | None = None) -> dict[str, str]:
        """Runs the lines; `before` is done before the first line that begins so. What each of them printed."""
        told = {}
        waiting = dict(before or {})
        for line in lines:
            for start in [start for start in waiting if line.startswith(start)]:
                waiting.pop(start)()
            done = self.run(line)
            assert done.exit_code == 0 or "no live session" in done.stderr, f"{line}\n{done.output}"
            told[line] = done.output
        assert not waiting, "a line that the test waits for is not in the document any more"
        return told


class Worker:
    """A consumer in a thread that counts what it handles."""

    def __init__(self, context: Scene, client_id: str, options: dict[str, Any]) -> None:
        self.context, self.client_id, self.options = context, client_id, options
        self.error: BaseException | None = None
        self.over, self.joined = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        wait_until(lambda: self.joined.is_set() or self.error is not None, DEADLINE_S, f"{client_id} joins")

    def _run(self) -> None:
        context = self.context
        options = {"start_fallback": "earliest", "heartbeat_interval_s": INTERVAL_S, **self.options}
        try:
            with (
                marshal_py.connect(
                    {"bootstrap.servers": context.cluster.bootstrap, "log_level": 0},
                    client_id=self.client_id,
                    coordination_topic=context.log,
                    coordination_partitions=2,
                ) as marshal,
                marshal.consumer(context.group, [context.topic], **options) as consumer,
            ):
                self.joined.set()
                while not self.over.is_set():
                    message = consumer.next(expires_s=0.1)
                    if message is not None:
                        context.seen[message.partition, message.offset] += 1
                        message.ack()
        except marshal_py.MarshalError as error:
            self.error = error

    def stop(self) -> None:
        self.over.set()
        self.thread.join(DEADLINE_S)


@pytest.fixture
def context(kafka: Cluster, topic: TopicFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.chdir(tmp_path)
    found = Scene(kafka, topic(PARTITIONS), tmp_path)
    try:
        yield found
    finally:
        found.stop()


OPERATIONS = blocks("operations.md")


def test_the_documents_have_their_commands() -> None:
    """A document without blocks would pass every other test here."""
    assert len(OPERATIONS) == 12
    assert {line.split()[0] for lines in OPERATIONS.values() for line in lines} == {"marshal"}
    assert list(blocks("migration.md")) == ["To Marshal", "Back"]


@pytest.mark.timeout(300)
def test_the_operations_guide(context: Scene) -> None:
    """From a rewind to the deletion, one after the other, as somebody would who has a very bad day."""
    sections = dict(OPERATIONS)
    context.start("worker-1")
    doomed = Process(context, "worker-2")
    try:
        wait_until(lambda: len(context.front("me").members()) == 2, DEADLINE_S, "worker-2 joins")
        context.await_seen(1)
        context.follow(sections.pop("Operating live groups: runbooks"))

        told = context.follow(sections.pop("Rewind a live group"), {"marshal groups info": lambda: caught_up(context)})
        assert "SetPosition" in "".join(told.values()) or "positions move" in "".join(told.values())
        before = (context.folder / "before.csv").read_text(encoding="utf-8").splitlines()
        assert before == [f"{context.topic},{partition},{EACH}" for partition in range(PARTITIONS)]

        context.follow(
            sections.pop("A stuck partition"),
            {"marshal evict": doomed.kill, "marshal set-position billing orders:1": lambda: leave_five(context)},
        )
    finally:
        doomed.kill()
    context.start("worker-1")
    skipped = (1, EACH)
    wanted = {(partition, offset) for partition in range(PARTITIONS) for offset in range(EACH, context.produced)}
    wait_until(lambda: wanted - {skipped} <= set(context.seen), DEADLINE_S, "the rest is handled")
    assert skipped not in context.seen, "it was stepped over"
    context.follow(sections.pop("A parked partition"))

    told = context.follow(sections.pop("A lost admin"), {"marshal groups info": lambda: lose_an_admin(context)})
    assert "bob@office" in told["marshal resume billing --dry-run --take-over"]
    assert context.front("me").info()["pause"] is None

    context.follow(sections.pop("A full disk"))
    context.follow(sections.pop("An unclean leader election"), {"marshal set-position": lambda: await_mirror(context)})
    assert (context.folder / "incident.dump").stat().st_size > 0
    told = context.follow(sections.pop("Upgrading the library in a running group"))
    assert marshal_py.__version__ in told["marshal members ls billing"]

    worker = context.workers[-1]
    context.follow(sections.pop("Changing how a group delivers"))
    wait_until(lambda: worker.error is not None, DEADLINE_S, "its consumer ends")
    assert isinstance(worker.error, ModeMismatch)
    context.follow(sections.pop("A topic that was deleted and created again"))
    context.stop()
    context.follow(sections.pop("Deleting a group"))
    assert context.front("me").positions() == {}
    context.follow(sections.pop("Truncated history"))
    assert sections == {}, "a section that no test runs"


def caught_up(context: Scene) -> None:
    """Everything was handled a second time, and the log says so."""
    context.await_seen(2)
    wait_until(lambda: set(context.front("me").positions().values()) == {EACH}, DEADLINE_S, "the positions are written")


def leave_five(context: Scene) -> None:
    """Messages in each partition that nobody has handled yet."""
    context.stop()
    context.produce(5)


def lose_an_admin(context: Scene) -> None:
    context.front("bob").pause(600, "gone home")


class Process:
    """A consumer in a process of its own, which can be killed; what it prints is counted."""

    def __init__(self, context: Scene, client_id: str) -> None:
        command = [
            sys.executable,
            "-m",
            "marshal_py.cli",
            "consume",
            context.topic,
            "--group",
            context.group,
            "--json",
            "--client-id",
            client_id,
            "--heartbeat-interval",
            str(INTERVAL_S),
            "--start",
            "earliest",
            "--coordination-topic",
            context.log,
            "--bootstrap-servers",
            context.cluster.bootstrap,
        ]
        self.context = context
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=DOCS.parent
        )
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            self.context.seen[message["partition"], message["offset"]] += 1

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.thread.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def await_mirror(context: Scene) -> None:
    """Until Kafka's committed offsets are the group's positions."""
    admin, front = context.transport().admin(), context.front("me")
    positions = front.positions()
    wait_until(lambda: admin.committed(context.group, list(positions)) == front.positions(), DEADLINE_S, "the mirror")
    admin.close()


# --- migration


class Ordinary:
    """An ordinary consumer of Kafka's own, that commits what it has handled."""

    def __init__(self, context: Scene) -> None:
        self.context = context
        self.consumer = Consumer(
            {
                "bootstrap.servers": context.cluster.bootstrap,
                "group.id": context.group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        self.consumer.subscribe([context.topic])

    def handle(self, count: int, commits: bool = True) -> None:
        handled = 0

        def enough() -> bool:
            nonlocal handled
            for message in self.consumer.consume(min(10, count - handled), 0.2):
                assert message.error() is None, message.error()
                partition, offset = message.partition(), message.offset()
                assert partition is not None
                assert offset is not None
                self.context.seen[partition, offset] += 1
                handled += 1
            if handled == count and commits:
                self.consumer.commit(asynchronous=False)
            return handled == count

        wait_until(enough, DEADLINE_S, f"{count} messages")

    def handle_nothing_more(self) -> None:
        """It is assigned, and there is nothing that it has not got."""
        wait_until(lambda: self.consumer.poll(0.1) is None and bool(self.consumer.assignment()), DEADLINE_S, "it rests")
        assert self.consumer.poll(2.0) is None

    def close(self) -> None:
        self.consumer.close()


@pytest.mark.timeout(300)
def test_a_group_moves_to_marshal_and_back_and_loses_nothing(context: Scene) -> None:
    """The runbook, to and fro and to again. Twice handled is only what an ordinary consumer did not commit."""
    to, back = blocks("migration.md")["To Marshal"], blocks("migration.md")["Back"]
    *back, again = back
    assert "create" in again
    uncommitted, total = 4, 0

    ordinary = Ordinary(context)
    ordinary.handle(20)
    ordinary.handle(uncommitted, commits=False)  # and then it stops as if it had crashed
    early = context.start("too-early")
    early.stop()
    assert isinstance(early.error, KafkaGroupIsLive), "it would join beside a live ordinary consumer"
    assert context.run(to[0]).exit_code == 0
    ordinary.close()

    worker = context.start("worker-1")
    context.await_seen(1)
    told = context.follow(to[1:])
    assert all(f"{context.topic}:{partition}" in told["marshal groups info billing"] for partition in range(PARTITIONS))
    total = EACH * PARTITIONS
    assert context.seen.total() == total + uncommitted
    assert max(context.seen.values()) <= 2

    released, mirrored, removed = back
    context.follow([released])
    context.produce(5)
    await_mirror(context)
    assert "skipped" in context.follow([mirrored])[mirrored]
    context.stop()
    context.follow([removed])
    ordinary = Ordinary(context)
    ordinary.handle(5 * PARTITIONS)
    ordinary.handle_nothing_more()
    ordinary.close()
    assert context.seen.total() == total + uncommitted + 5 * PARTITIONS, "the ordinary one began where Marshal ended"

    context.produce(5)
    context.follow([again])
    worker = context.start("worker-2")
    context.await_seen(1)
    worker.stop()
    assert worker.error is None
    assert context.seen.total() == total + uncommitted + 10 * PARTITIONS, "and Marshal where the ordinary one had ended"
    assert sum(count - 1 for count in context.seen.values()) == uncommitted
