"""The runbooks of docs/: every `marshal` line of their shell blocks is run, in order, on Apache Kafka, while consumers
work; and the tests check what the text promises.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from typer.testing import Result

import marshal_py
from marshal_py.admin.group import Group
from marshal_py.admin.plans.operation import Author
from marshal_py.errors import MembersAlive, ModeMismatch
from marshal_py.transport.kafka import KafkaTransport
from tests.support.command_line import invoke
from tests.support.commands import DEADLINE_S, Commands, ConsumeProcesses
from tests.support.kafka import Cluster, TopicFactory, wait_until

DOCS = Path(__file__).resolve().parents[2] / "docs"
PARTITIONS = 3
EACH = 20
INTERVAL_S = 1.0
FENCE = re.compile(r"^ *```sh\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def blocks(name: str) -> dict[str, list[str]]:
    """The lines of the shell blocks of a document, by section."""
    found = {}
    for section in ("\n" + (DOCS / name).read_text(encoding="utf-8")).split("\n## "):
        heading = section.lstrip().split("\n", 1)[0].strip("# ")
        lines = [line.strip() for block in FENCE.findall(section) for line in block.splitlines() if line.strip()]
        if lines:
            found[heading] = lines
    return found


class RunbookCase:
    """A group with its own data topic and coordination topic, and the consumers that a test starts."""

    def __init__(self, cluster: Cluster, topic: str, folder: Path) -> None:
        self.cluster, self.topic, self.folder = cluster, topic, folder
        name = uuid.uuid4().hex[:8]
        self.group, self.log = f"billing-{name}", f"log-{name}"
        self.handled: Counter[tuple[int, int]] = Counter()
        self.workers: list[Worker] = []
        self.processes: list[ConsumeProcesses] = []
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

    def start_process(self, client_id: str) -> ConsumeProcesses:
        """Starts a consumer that can be killed."""
        commands = Commands(self.cluster.bootstrap, self.log)
        self.processes.append(ConsumeProcesses(commands, self.group, self.topic, [client_id]))
        return self.processes[-1]

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()

    def seen(self) -> Counter[tuple[int, int]]:
        """How often each message was handled, by (partition, offset)."""
        return sum((one.seen() for one in self.processes), Counter(self.handled))

    def await_seen(self, times: int, beyond: int = 0) -> None:
        """Waits until each message from offset `beyond` on was handled so often."""
        wanted = [(partition, offset) for partition in range(PARTITIONS) for offset in range(beyond, self.produced)]

        def all_seen() -> bool:
            seen = self.seen()
            return all(seen[one] >= times for one in wanted)

        wait_until(all_seen, DEADLINE_S, f"all seen {times} times")

    def transport(self) -> KafkaTransport:
        return KafkaTransport({"bootstrap.servers": self.cluster.bootstrap, "log_level": 0}, DEADLINE_S)

    def admin_of(self, user: str) -> Group:
        """The admin API for the group, as this user."""
        author = Author.of(user, "office", "test", uuid.uuid4().bytes[:4])
        return Group(self.transport(), self.group, self.log, author=author)

    def words(self, line: str) -> list[str]:
        """The words of a document's line, with the names of this test."""
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
        done = invoke(
            [*words, "--coordination-topic", self.log], env={"MARSHAL_BOOTSTRAP_SERVERS": self.cluster.bootstrap}
        )
        if file is not None:
            file.write_text(done.stdout, encoding="utf-8")
        return done

    def follow(self, lines: list[str], before: dict[str, Callable[[], None]] | None = None) -> dict[str, str]:
        """Runs the lines. Returns the output of each. `before` are calls before the first line with that beginning."""
        output = {}
        waiting = dict(before or {})
        for line in lines:
            for start in [start for start in waiting if line.startswith(start)]:
                waiting.pop(start)()
            done = self.run(line)
            assert done.exit_code == 0 or "no live session" in done.stderr, f"{line}\n{done.output}"
            output[line] = done.output
        assert not waiting, "a line that the test expects is no longer in the document"
        return output


class Worker:
    """A consumer in a thread that counts what it handles."""

    def __init__(self, case: RunbookCase, client_id: str, options: dict[str, Any]) -> None:
        self.case, self.client_id, self.options = case, client_id, options
        self.error: BaseException | None = None
        self.over, self.joined = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        wait_until(lambda: self.joined.is_set() or self.error is not None, DEADLINE_S, f"{client_id} joins")

    def _run(self) -> None:
        case = self.case
        options = {"start": "committed|earliest", "heartbeat_interval_s": INTERVAL_S, **self.options}
        try:
            with (
                marshal_py.connect(
                    {"bootstrap.servers": case.cluster.bootstrap, "log_level": 0},
                    client_id=self.client_id,
                    coordination_topic=case.log,
                    coordination_partitions=2,
                ) as marshal,
                marshal.consumer(case.group, [case.topic], **options) as consumer,
            ):
                self.joined.set()
                while not self.over.is_set():
                    message = consumer.next(expires_s=0.1)
                    if message is not None:
                        case.handled[message.partition, message.offset] += 1
                        message.ack()
        except marshal_py.MarshalError as error:
            self.error = error

    def stop(self) -> None:
        self.over.set()
        self.thread.join(DEADLINE_S)


@pytest.fixture
def case(kafka: Cluster, topic: TopicFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunbookCase]:
    monkeypatch.chdir(tmp_path)
    found = RunbookCase(kafka, topic(PARTITIONS), tmp_path)
    try:
        yield found
    finally:
        found.stop()


OPERATIONS = blocks("operations.md")
TO = OPERATIONS.pop("From Kafka's consumer groups to Marshal")
BACK = OPERATIONS.pop("Back to Kafka's consumer groups")


def test_the_documents_have_their_commands() -> None:
    """A document without blocks would pass every other test here."""
    assert len(OPERATIONS) == 14
    assert {line.split()[0] for lines in OPERATIONS.values() for line in lines} == {"marshal"}


@pytest.mark.timeout(300)
def test_the_operations_guide(case: RunbookCase) -> None:
    """All sections, from a rewind to the deletion of the group, one after the other."""
    sections = dict(OPERATIONS)
    case.start("worker-1")
    doomed = case.start_process("worker-2")
    try:
        wait_until(lambda: len(case.admin_of("me").members()) == 2, DEADLINE_S, "worker-2 joins")
        case.await_seen(1)
        case.follow(sections.pop("Operations: what the cluster needs, rights, runbooks, migration"))

        output = case.follow(
            sections.pop("Rewind a live group"), {"marshal state billing --csv": lambda: caught_up(case)}
        )
        assert "SetPosition" in "".join(output.values()) or "positions move" in "".join(output.values())
        before = (case.folder / "before.csv").read_text(encoding="utf-8").splitlines()
        assert before == [f"{case.topic},{partition},{EACH}" for partition in range(PARTITIONS)]

        case.follow(
            sections.pop("A stuck partition"),
            {"marshal evict": doomed.kill, "marshal set-position billing orders:1": lambda: leave_five(case)},
        )
    finally:
        doomed.kill()
    case.start("worker-1")
    skipped = (1, EACH)
    wanted = {(partition, offset) for partition in range(PARTITIONS) for offset in range(EACH, case.produced)}
    wait_until(lambda: wanted - {skipped} <= set(case.seen()), DEADLINE_S, "the rest is handled")
    assert skipped not in case.seen(), "the message was skipped"
    output = case.follow(sections.pop("What happened at 14:05"))
    assert " steps down (slow disk), by " in output["marshal explain billing"]
    assert "</html>" in (case.folder / "timeline.html").read_text(encoding="utf-8")
    case.follow(sections.pop("A parked partition"))

    output = case.follow(
        sections.pop("A lost admin"), {"marshal state billing --settings": lambda: lose_an_admin(case)}
    )
    assert "bob@office" in output["marshal resume billing --dry-run --take-over"]
    assert case.admin_of("me").info().pause is None

    case.follow(sections.pop("A full disk"))
    case.follow(sections.pop("An unclean leader election"), {"marshal set-position": lambda: await_mirror(case)})
    assert (case.folder / "incident.dump").stat().st_size > 0
    case.follow(sections.pop("A bug report"))
    assert case.topic in (case.folder / f"{case.group}.bundle").read_text(encoding="utf-8")
    output = case.follow(sections.pop("Upgrading the library in a running group"))
    assert marshal_py.__version__ in output["marshal state billing --members"]

    worker = case.workers[-1]
    case.follow(sections.pop("Changing how a group delivers"))
    wait_until(lambda: worker.error is not None, DEADLINE_S, "its consumer ends")
    assert isinstance(worker.error, ModeMismatch)
    case.follow(sections.pop("A topic that was deleted and created again"))
    case.stop()
    case.follow(sections.pop("Deleting a group"))
    assert case.admin_of("me").positions() == {}
    case.follow(sections.pop("Truncated history"))
    assert sections == {}, "a section that no test runs"


def caught_up(case: RunbookCase) -> None:
    """Waits until everything was handled a second time and the log has the positions."""
    case.await_seen(2)
    wait_until(lambda: set(case.admin_of("me").positions().values()) == {EACH}, DEADLINE_S, "the positions are written")


def leave_five(case: RunbookCase) -> None:
    """Stops the consumers and writes messages to each partition that none of them has handled."""
    case.stop()
    case.produce(5)


def lose_an_admin(case: RunbookCase) -> None:
    case.admin_of("bob").pause(600, "gone home")


def await_mirror(case: RunbookCase) -> None:
    """Waits until Kafka's committed offsets are the group's positions."""
    admin, group = case.transport().admin(), case.admin_of("me")
    positions = group.positions()
    wait_until(lambda: admin.committed(case.group, list(positions)) == group.positions(), DEADLINE_S, "the mirror")
    admin.close()


# --- migration


class OrdinaryConsumer:
    """A consumer of one of Kafka's own groups, which commits what it has handled."""

    def __init__(self, case: RunbookCase) -> None:
        self.case = case
        self.consumer = Consumer(
            {
                "bootstrap.servers": case.cluster.bootstrap,
                "group.id": case.group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        self.consumer.subscribe([case.topic])

    def handle(self, count: int, commits: bool = True) -> None:
        handled = 0

        def enough() -> bool:
            nonlocal handled
            for message in self.consumer.consume(min(10, count - handled), 0.2):
                assert message.error() is None, message.error()
                partition, offset = message.partition(), message.offset()
                assert partition is not None
                assert offset is not None
                self.case.handled[partition, offset] += 1
                handled += 1
            if handled == count and commits:
                self.consumer.commit(asynchronous=False)
            return handled == count

        wait_until(enough, DEADLINE_S, f"{count} messages")

    def handle_nothing_more(self) -> None:
        """Checks that it has an assignment and gets no message."""
        wait_until(
            lambda: self.consumer.poll(0.1) is None and bool(self.consumer.assignment()), DEADLINE_S, "no message"
        )
        assert self.consumer.poll(2.0) is None

    def close(self) -> None:
        self.consumer.close()


@pytest.mark.timeout(300)
def test_a_group_moves_to_marshal_and_back_and_loses_nothing(case: RunbookCase) -> None:
    """The runbook: to Marshal, back, and to Marshal again. Only messages without a commit are handled twice."""
    to, (*back, again) = TO, BACK
    assert "create" in again
    uncommitted, total = 4, 0

    ordinary = OrdinaryConsumer(case)
    ordinary.handle(20)
    ordinary.handle(uncommitted, commits=False)  # as if it crashed afterwards
    early = case.start("too-early")
    early.stop()
    assert isinstance(early.error, MembersAlive), "it must not join while an ordinary consumer is live"
    assert case.run(to[0]).exit_code == 0
    ordinary.close()

    worker = case.start("worker-1")
    case.await_seen(1)
    output = case.follow(to[1:])
    assert all(
        f"{case.topic}:{partition}" in output["marshal state billing --settings"] for partition in range(PARTITIONS)
    )
    total = EACH * PARTITIONS
    assert case.seen().total() == total + uncommitted
    assert max(case.seen().values()) <= 2

    released, mirrored, removed = back
    case.follow([released])
    case.produce(5)
    await_mirror(case)
    looked = case.follow([mirrored])[mirrored]
    assert f"0 of {PARTITIONS} positions would move" in looked
    assert "refused" not in looked, "the runbook's own pause is no reason to refuse"
    case.stop()
    case.follow([removed])
    ordinary = OrdinaryConsumer(case)
    ordinary.handle(5 * PARTITIONS)
    ordinary.handle_nothing_more()
    ordinary.close()
    assert case.seen().total() == total + uncommitted + 5 * PARTITIONS, (
        "the ordinary consumer began where Marshal ended"
    )

    case.produce(5)
    case.follow([again])
    worker = case.start("worker-2")
    case.await_seen(1)
    worker.stop()
    assert worker.error is None
    assert case.seen().total() == total + uncommitted + 10 * PARTITIONS, (
        "Marshal began where the ordinary consumer ended"
    )
    assert sum(count - 1 for count in case.seen().values()) == uncommitted
