"""The course of the demo: who starts, dies and joins when. Executes the schedule and collects the journals.

Whatever happens, no process of it is left behind: `run` ends every child, and a child ends itself when the demo dies.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from marshal_py.cli.demo.journal import Claimed, Entry, Failed, Joined, JournalReader, Lost, Told
from marshal_py.cli.demo.judge import AT_MOST_ONCE, Judgement, Milestones, judge
from marshal_py.cli.demo.process import Child, Task
from marshal_py.cli.demo.totals import Totals
from marshal_py.cli.demo.view import View
from marshal_py.cli.frame import CommandFailed
from marshal_py.client.options import HEARTBEAT_INTERVAL_S
from marshal_py.protocol.identity import TopicPartition
from marshal_py.transport.ports import ClusterAdmin

PARTITIONS: Final = 12
CONSUMERS: Final = 3
KILLED: Final = "consumer-2"
JOINER: Final = "consumer-4"
RATE_PER_S: Final = 300  # visible traffic, and minutes of it fit into the embedded broker
LOOK_S: Final = 0.25  # as often as the view is drawn
JOIN_TIMEOUT_S: Final = 60.0  # three interpreters on a busy machine; usually a second
SLOW_JOIN_S: Final = 15.0  # added to the schedule at most, so that the fourth consumer is seen at work
STALL_TIMEOUT_S: Final = 30.0  # at the end: so long without one delivery, and the rest will not come


class Plan(Struct, frozen=True, kw_only=True):
    """Where and how long. The schedule is the same at any length."""

    settings: dict[str, Any]
    topic: str
    group: str
    coordination_topic: str
    delivery: str
    seconds: float

    @property
    def kill_at_s(self) -> float:
        return self.seconds / 3

    @property
    def join_at_s(self) -> float:
        return self.seconds * 0.6

    @property
    def stop_at_s(self) -> float:
        return self.seconds * 0.87  # what is left is for handling the rest and for leaving


class DemoScenario:
    """One run."""

    def __init__(self, plan: Plan, admin: ClusterAdmin, view: View, folder: Path) -> None:
        self.plan, self.admin, self.view, self.folder = plan, admin, view, folder
        self.tally = Totals(PARTITIONS)
        self.marks = Milestones()
        self._consumers: list[Child] = []
        self._producer: Child | None = None
        self._readers: list[tuple[str, JournalReader]] = []
        self._joined: set[str] = set()
        self._failed: dict[str, str] = {}
        self._missed: set[str] = set()  # ended by themselves, and said so
        self._began = self._on_air = time.monotonic()  # the schedule counts from when the group is complete

    # --- the schedule

    def run(self) -> Judgement:
        try:
            return self._run()
        finally:
            for child in self._children():
                child.ask_to_end()
            for child in self._children():
                child.end()

    def _run(self) -> Judgement:
        plan, marks = self.plan, self.marks
        for number in range(1, CONSUMERS + 1):
            self._start_consumer(f"consumer-{number}")
        self._until(lambda: len(self._joined) == CONSUMERS, JOIN_TIMEOUT_S, "the consumers to join")
        self._on_air = time.monotonic()
        self._producer = self._start("producer", "marshal_py.cli.demo.producer")
        self._event(f"the group is complete; {RATE_PER_S} orders per second from now on")

        self._until_s(plan.kill_at_s)
        victim = next(child for child in self._consumers if child.name == KILLED)
        marks.killed, marks.killed_at = KILLED, time.monotonic()
        victim.kill()
        self._event(f"{KILLED} (pid {victim.pid}) killed by SIGKILL")

        self._until_s(plan.join_at_s)
        marks.joiner, marks.joiner_started_at = JOINER, time.monotonic()
        self._start_consumer(JOINER)

        self._until_s(plan.stop_at_s)
        self._give_time(lambda: any(h.worker == JOINER for hs in self.tally.handlings.values() for h in hs))
        self._producer.end()
        self._look()
        marks.production_ended_at = time.monotonic()
        ends = self._ends()
        self._event(f"the producer has stopped; {sum(ends.values())} messages are in the topic")
        self._finish(ends)
        self._stop_consumers()
        return judge(self.tally, ends, marks, plan.delivery, time.monotonic() - self._began)

    def _finish(self, ends: dict[int, int]) -> None:
        """Until everything is handled, or nothing has been for so long that it never will."""
        handled, since = -1, time.monotonic()
        while not self._all_handled(ends) and time.monotonic() - since < STALL_TIMEOUT_S:
            if len(self.tally.handled) != handled:
                handled, since = len(self.tally.handled), time.monotonic()
            self._wait_a_look()

    def _all_handled(self, ends: dict[int, int]) -> bool:
        """In at-most-once mode what was dropped never comes: the end of every partition must have been reached."""
        if self.plan.delivery == AT_MOST_ONCE:
            return all(self.tally.next_offset[partition] >= end for partition, end in ends.items())
        return len(self.tally.handled) >= sum(ends.values())

    def _stop_consumers(self) -> None:
        for child in self._consumers:
            child.ask_to_end()
        for child in self._consumers:
            child.end()
        self._look()
        self._event("the consumers have left")

    def _ends(self) -> dict[int, int]:
        bounds = self.admin.bounds([TopicPartition(self.plan.topic, number) for number in range(PARTITIONS)])
        return {tp.partition: bound.end for tp, bound in bounds.items()}

    # --- processes

    def _children(self) -> list[Child]:
        return [*self._consumers, *([self._producer] if self._producer is not None else [])]

    def _start_consumer(self, name: str) -> None:
        self._consumers.append(self._start(name, "marshal_py.cli.demo.worker"))

    def _start(self, name: str, module: str) -> Child:
        plan = self.plan
        task = Task(
            name,
            plan.settings,
            plan.topic,
            plan.group,
            plan.coordination_topic,
            plan.delivery,
            HEARTBEAT_INTERVAL_S,
            RATE_PER_S,
            str(self.folder / f"{name}.journal"),
        )
        self._readers.append((name, JournalReader(Path(task.journal))))
        child = Child(module, task, self.folder / f"{name}.stderr")
        self._event(f"{name} starts (pid {child.pid})")
        return child

    # --- looking

    def _until_s(self, at_s: float) -> None:
        while time.monotonic() - self._on_air < at_s:
            self._wait_a_look()

    def _until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                raise CommandFailed(f"the demo waited {timeout_s:g} s for {what}")
            self._wait_a_look()

    def _give_time(self, condition: Callable[[], bool]) -> None:
        """Goes on producing until the joiner has had its share, on a machine that is slow to start it."""
        deadline = time.monotonic() + SLOW_JOIN_S
        while not condition() and time.monotonic() < deadline:
            self._wait_a_look()

    def _wait_a_look(self) -> None:
        time.sleep(LOOK_S)
        self._look()

    def _look(self) -> None:
        """Reads what the processes have written down since the last look."""
        for name, reader in self._readers:
            self._tell(name, self._collect(name, reader))
        for child in self._children():
            if child.ended and child.name != self.marks.killed and child.name not in self._missed and child.exit_code:
                self._missed.add(child.name)
                reason = self._failed.get(child.name) or child.last_words() or f"exit code {child.exit_code}"
                if child is self._producer or len(self._joined) < CONSUMERS:
                    raise CommandFailed(f"{child.name} of the demo ended: {reason}")
                self._event(f"{child.name} ended by itself: {reason}")
        self.view.show(time.monotonic() - self._began, self.tally)

    def _collect(self, name: str, reader: JournalReader) -> list[Entry]:
        entries = list(reader.news())
        for entry in entries:
            self.tally.add(name, entry)
            if isinstance(entry, Joined):
                self._joined.add(name)
            elif isinstance(entry, Failed):
                self._failed[name] = entry.reason
        return entries

    def _tell(self, name: str, entries: list[Entry]) -> None:
        """Claims and losses of one look in one line each, in the order in which they began."""
        groups: dict[str, list[int]] = defaultdict(list)
        for entry in entries:
            if isinstance(entry, Claimed):
                groups[f"{name} took {{}}"].append(entry.partition)
            elif isinstance(entry, Lost):
                groups[f"{name} let go of {{}} ({entry.reason})"].append(entry.partition)
            elif isinstance(entry, Told):
                self._event(f"{name}: {entry.kind} {entry.text}".rstrip())
        for words, partitions in groups.items():
            self._event(words.format(", ".join(map(str, sorted(partitions)))))

    def _event(self, text: str) -> None:
        self.view.event(time.monotonic() - self._began, text)


def play(plan: Plan, admin: ClusterAdmin, view: View) -> tuple[Judgement, Totals]:
    """Runs the demo in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="marshal-demo-") as folder:
        stage = DemoScenario(plan, admin, view, Path(folder))
        return stage.run(), stage.tally
