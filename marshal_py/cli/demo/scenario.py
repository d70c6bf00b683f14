"""The demo's schedule: which process starts, dies and joins when. Runs it and collects the journals.

No child process outlives the demo: `run` ends every child, and a child ends itself when the demo dies.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from marshal_py.cli.demo.children import (
    RATE_PER_S,
    Child,
    Claimed,
    Entry,
    Failed,
    Joined,
    JournalReader,
    Lost,
    Plan,
    Reported,
    Task,
)
from marshal_py.cli.demo.verdict import AT_MOST_ONCE, Judgement, Milestones, Totals, judge
from marshal_py.cli.output import CommandFailed
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import ClusterAdmin

COLOURS: Final = {"consumer-1": "cyan", "consumer-2": "magenta", "consumer-3": "green", "consumer-4": "yellow"}
LINE_EVERY_S: Final = 2.0  # a line with the totals where nothing can be drawn


def picture(totals: Totals) -> Text:
    """Returns two lines: each partition in the colour of its owner with the owner's number, and the totals."""
    text = Text()
    text.append("partition ", style="dim")
    for number in range(totals.partitions):
        text.append(f"{number:^5}", style="dim")
    text.append("\nconsumer  ", style="dim")
    for number in range(totals.partitions):
        owner = totals.owners.get(number)
        mark = " - " if owner is None else f" {owner.worker.rpartition('-')[2]} "
        text.append(mark, "bold red" if owner is None else f"black on {COLOURS[owner.worker]}").append("  ")
    return text.append("\n").append(str(totals), style="dim")


class View:
    """Prints to one console. It is a context manager: leaving it gives the terminal back."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._open = ExitStack()
        self._began = self._line_due_s = time.monotonic()

    def __enter__(self) -> View:
        if self.console.is_terminal:
            self._open.enter_context(self._live)
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.close()

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """Prints what has happened, with the seconds since the beginning."""
        self.console.print(f"{self.seconds():5.1f} s  {text}", soft_wrap=not self.console.is_terminal)

    def draw(self, totals: Totals) -> None:
        """Shows who owns what now."""
        if self.console.is_terminal:
            self._live.update(picture(totals), refresh=True)
        elif time.monotonic() >= self._line_due_s:
            self._line_due_s = time.monotonic() + LINE_EVERY_S
            self.say(str(totals))


PARTITIONS: Final = 12
CONSUMERS: Final = 3
KILLED: Final = "consumer-2"
JOINER: Final = "consumer-4"
KILL_AT: Final = 1 / 3  # shares of the plan's seconds
JOIN_AT: Final = 0.6
STOP_AT: Final = 0.87  # the rest of the time is for the remaining messages and for leaving
WAIT: Final = "after 4 s without its heartbeats the others take over"
POLL_S: Final = 0.25  # between two looks at the journals
JOIN_TIMEOUT_S: Final = 60.0  # three interpreters on a busy machine; usually a second
SLOW_JOIN_S: Final = 15.0  # the schedule waits at most this long until the fourth consumer has handled a message
STALL_TIMEOUT_S: Final = 30.0  # after this long without a delivery at the end, the rest will not come


class DemoScenario:
    """One run of the demo."""

    plan: Plan
    admin: ClusterAdmin
    view: View
    folder: Path

    def __init__(self, plan: Plan, admin: ClusterAdmin, view: View, folder: Path) -> None:
        self.plan, self.admin, self.view, self.folder = plan, admin, view, folder
        self.totals: Totals = Totals(PARTITIONS)
        self.milestones: Milestones = Milestones()
        self._consumers: list[Child] = []
        self._producer: Child | None = None
        self._readers: list[tuple[str, JournalReader]] = []
        self._joined: set[str] = set()
        self._failed: dict[str, str] = {}
        self._reported_ended: set[str] = set()  # children that ended by themselves, already reported
        self._began = self._schedule_start = time.monotonic()  # set again when the group is complete

    # --- the schedule

    def run(self) -> Judgement:
        try:
            return self._run()
        finally:
            for child in self._children():
                child.request_stop()
            for child in self._children():
                child.end()

    def _run(self) -> Judgement:
        plan, milestones = self.plan, self.milestones
        for number in range(1, CONSUMERS + 1):
            self._start_consumer(f"consumer-{number}")
        self._wait_for(lambda: len(self._joined) == CONSUMERS, JOIN_TIMEOUT_S, "the consumers to join")
        self._schedule_start = time.monotonic()
        self._producer = self._start("producer", "produce")
        self.view.say(
            f"the group is complete: each has a share of the partitions; {RATE_PER_S} orders per second come now"
        )

        self._wait_until(plan.seconds * KILL_AT)
        victim = next(child for child in self._consumers if child.name == KILLED)
        milestones.killed, milestones.killed_at = KILLED, time.monotonic()
        victim.kill()
        then = "its witness ends its session" if plan.last_will else WAIT
        self.view.say(f"{KILLED} (pid {victim.pid}) killed by SIGKILL: {then}")

        self._wait_until(plan.seconds * JOIN_AT)
        milestones.joiner, milestones.joiner_started_at = JOINER, time.monotonic()
        self.view.say("a fourth consumer joins: its share moves to it, and the partitions that stay are not paused")
        self._start_consumer(JOINER)

        self._wait_until(plan.seconds * STOP_AT)
        self._wait_for_joiner(lambda: any(h.worker == JOINER for hs in self.totals.handlings.values() for h in hs))
        self._producer.end()
        self._poll()
        milestones.production_ended_at = time.monotonic()
        ends = self._ends()
        self.view.say(f"the producer has stopped; {sum(ends.values())} messages are in the topic")
        self._finish(ends)
        self._stop_consumers()
        return judge(self.totals, ends, milestones, plan.delivery, time.monotonic() - self._began)

    def _finish(self, ends: dict[int, int]) -> None:
        """Waits until every message is handled, or until no further one has been handled for STALL_TIMEOUT_S."""
        handled, since = -1, time.monotonic()
        while not self._all_handled(ends) and time.monotonic() - since < STALL_TIMEOUT_S:
            if len(self.totals.handled) != handled:
                handled, since = len(self.totals.handled), time.monotonic()
            self._wait_and_poll()

    def _all_handled(self, ends: dict[int, int]) -> bool:
        """Returns whether every message is handled. In at-most-once mode dropped messages never come, so it is enough
        that every partition was read to its end."""
        if self.plan.delivery == AT_MOST_ONCE:
            return all(self.totals.next_offset[partition] >= end for partition, end in ends.items())
        return len(self.totals.handled) >= sum(ends.values())

    def _stop_consumers(self) -> None:
        for child in self._consumers:
            child.request_stop()
        for child in self._consumers:
            child.end()
        self._poll()
        self.view.say("the consumers have left")

    def _ends(self) -> dict[int, int]:
        bounds = self.admin.bounds([TopicPartition(self.plan.topic, number) for number in range(PARTITIONS)])
        return {tp.partition: bound.end for tp, bound in bounds.items()}

    # --- processes

    def _children(self) -> list[Child]:
        return [*self._consumers, *([self._producer] if self._producer is not None else [])]

    def _start_consumer(self, name: str) -> None:
        self._consumers.append(self._start(name, "consume"))

    def _start(self, name: str, work: Literal["produce", "consume"]) -> Child:
        task = Task(name, work, self.plan, str(self.folder / f"{name}.journal"))
        self._readers.append((name, JournalReader(Path(task.journal))))
        child = Child(task, self.folder / f"{name}.stderr")
        self.view.say(f"{name} starts (pid {child.pid})")
        return child

    # --- waiting and reading journals

    def _wait_until(self, at_s: float) -> None:
        while time.monotonic() - self._schedule_start < at_s:
            self._wait_and_poll()

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                raise CommandFailed(f"the demo waited {timeout_s:g} s for {what}")
            self._wait_and_poll()

    def _wait_for_joiner(self, condition: Callable[[], bool]) -> None:
        """Waits up to SLOW_JOIN_S: on a slow machine the joiner starts late, and it must still find messages."""
        deadline = time.monotonic() + SLOW_JOIN_S
        while not condition() and time.monotonic() < deadline:
            self._wait_and_poll()

    def _wait_and_poll(self) -> None:
        time.sleep(POLL_S)
        self._poll()

    def _poll(self) -> None:
        """Reads the new journal entries, and prints the totals. Raises CommandFailed if the demo cannot continue."""
        for name, reader in self._readers:
            self._report(name, self._collect(name, reader))
        for child in self._children():
            expected = child.name == self.milestones.killed or child.name in self._reported_ended
            if child.exit_code and not expected:
                self._reported_ended.add(child.name)
                reason = self._failed.get(child.name) or child.stderr_tail() or f"exit code {child.exit_code}"
                if child is self._producer or len(self._joined) < CONSUMERS:
                    raise CommandFailed(f"{child.name} of the demo ended: {reason}")
                self.view.say(f"{child.name} ended by itself: {reason}")
        self.view.draw(self.totals)

    def _collect(self, name: str, reader: JournalReader) -> list[Entry]:
        entries = list(reader.new_entries())
        for entry in entries:
            self.totals.add(name, entry)
            if isinstance(entry, Joined):
                self._joined.add(name)
            elif isinstance(entry, Failed):
                self._failed[name] = entry.reason
        return entries

    def _report(self, name: str, entries: list[Entry]) -> None:
        """Reports all claims of one poll in one line, and its losses in one line per reason."""
        groups: dict[str, list[int]] = defaultdict(list)
        for entry in entries:
            if isinstance(entry, Claimed):
                groups[f"{name} took {{}}"].append(entry.partition)
            elif isinstance(entry, Lost):
                groups[f"{name} released {{}} ({entry.reason})"].append(entry.partition)
            elif isinstance(entry, Reported):
                self.view.say(f"{name}: {entry.kind} {entry.text}".rstrip())
        for words, partitions in groups.items():
            self.view.say(words.format(", ".join(map(str, sorted(partitions)))))


def run_demo(plan: Plan, admin: ClusterAdmin, view: View) -> tuple[Judgement, Totals]:
    """Runs the demo with its journals in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="marshal-demo-") as folder, view:
        scenario = DemoScenario(plan, admin, view, Path(folder))
        return scenario.run(), scenario.totals
