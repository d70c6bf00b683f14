"""The demo's schedule: who starts, dies and joins when. Writes the orders, and reads what its consumers tell.

No consumer outlives the demo: `DemoScenario.run` ends every one, and each ends itself when the demo dies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from marshal_py.cli.demo.verdict import AT_MOST_ONCE, JOINER, KILLED, Judgement, Milestones, Totals, judge
from marshal_py.cli.demo.worker import Entry, Plan
from marshal_py.cli.output import CommandFailed
from marshal_py.client.values.options import CONNECT_TIMEOUT_S
from marshal_py.errors import MarshalError
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.ports import ClusterAdmin
from marshal_py.transport.producer import KafkaProducer

COLOURS: Final = {"consumer-1": "cyan", "consumer-2": "magenta", "consumer-3": "green", "consumer-4": "yellow"}
LINE_EVERY_S: Final = 2.0  # a line with the totals where nothing can be drawn


def picture(totals: Totals) -> Text:
    """Returns three lines: the partitions, each in the colour of its owner with the owner's number, and the totals."""
    numbers, owners = Text("partition ", style="dim"), Text("consumer  ", style="dim")
    for number in range(totals.partitions):
        numbers.append(f"{number:^5}")
        _, owner = totals.owners.get(number, (0, ""))
        owners.append(
            f" {owner.rpartition('-')[2] or '-'} ",
            f"not dim black on {COLOURS[owner]}" if owner else "not dim bold red",
        )
        owners.append("  ")
    return Text("\n").join([numbers, owners, Text(str(totals), style="dim")])


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
KILL_AT: Final = 1 / 3  # shares of the plan's seconds
JOIN_AT: Final = 0.6
STOP_AT: Final = 0.87  # the rest of the time is for the remaining messages and for leaving
WAIT: Final = "after 4 s without its heartbeats the others take over"
POLL_S: Final = 0.25  # between two looks at what was told
JOIN_TIMEOUT_S: Final = 60.0  # three interpreters on a busy machine; usually a second
SLOW_JOIN_S: Final = 15.0  # the schedule waits at most this long until the fourth consumer has handled a message
STALL_TIMEOUT_S: Final = 30.0  # after this long without a delivery at the end, the rest will not come
END_TIMEOUT_S: Final = 15.0  # a consumer leaves within a few round trips; if it takes longer, the cluster is gone
KILL_TIMEOUT_S: Final = 5.0
STDERR_TAIL_BYTES: Final = 2_000
WORKER: Final = "marshal_py.cli.demo.worker"
_SOURCE_ROOT: Final = Path(__file__).resolve().parents[3]

KEYS: Final = 500  # many keys per partition, many messages per key
RATE_PER_S: Final = 300  # orders: enough to see, and minutes of them fit into the embedded broker
TICK_S: Final = 0.02  # how even the producer's pace is


class Child:
    """The process of a consumer, and a thread that hands on what it tells."""

    def __init__(self, name: str, plan: Plan, heard: Callable[[tuple[str, Entry]], None]) -> None:
        self.name = name
        self.reported = False  # that it has ended, or that it was killed
        self._stop_requested = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # read when the process has ended
        paths = [str(_SOURCE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends its children in order
        )
        self.pid: int = self._process.pid
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode((name, plan)) + b"\n")
        self._process.stdin.flush()
        self._listener = threading.Thread(target=self._listen, args=(heard,), daemon=True)
        self._listener.start()

    def _listen(self, heard: Callable[[tuple[str, Entry]], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as told:
            for line in told:
                heard((self.name, msgspec.json.decode(line, type=Entry)))

    def failure(self) -> str:
        """Returns why the process has ended with an error; "" if it has not."""
        code = self._process.poll()
        if not code:
            return ""
        self._stderr.seek(0)
        said = self._stderr.read()[-STDERR_TAIL_BYTES:].decode(errors="replace").strip()
        return said or f"exit code {code}"

    def kill(self) -> None:
        """Sends SIGKILL: the process cannot release anything."""
        self.reported = True
        self._process.kill()
        self._process.wait(KILL_TIMEOUT_S)

    def request_stop(self) -> None:
        """Sends SIGTERM once: a second one would end the process before it has left the group."""
        if self._process.poll() is None and not self._stop_requested:
            self._stop_requested = True
            self._process.terminate()

    def end(self) -> None:
        """Sends SIGTERM and, after a time, SIGKILL. When this returns the process has ended, and all is handed on."""
        self.request_stop()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._listener.join(KILL_TIMEOUT_S)


class DemoScenario:
    """One run of the demo."""

    def __init__(self, plan: Plan, admin: ClusterAdmin, view: View) -> None:
        self.plan, self.admin, self.view = plan, admin, view
        self.totals: Totals = Totals(PARTITIONS)
        self._milestones = Milestones()
        self._heard: SimpleQueue[tuple[str, Entry]] = SimpleQueue()
        self._consumers: list[Child] = []
        self._producer = threading.Thread(target=self._produce, name="demo-producer", daemon=True)
        self._stop_producing, self._cannot_produce = threading.Event(), ""
        self._began = time.monotonic()

    def run(self) -> Judgement:
        with self.view:
            try:
                return self._run()
            finally:
                self._stop_producing.set()
                self._stop_consumers()

    def _run(self) -> Judgement:
        plan, milestones = self.plan, self._milestones
        for number in range(1, CONSUMERS + 1):
            self._start(f"consumer-{number}")
        if not self._wait(lambda: len(self.totals.joined) == CONSUMERS, JOIN_TIMEOUT_S):
            raise CommandFailed(f"the demo waited {JOIN_TIMEOUT_S:g} s for the consumers to join")
        begun = time.monotonic()

        def wait_until(share: float) -> None:
            self._wait(lambda: False, begun + plan.seconds * share - time.monotonic())

        self._producer.start()
        self.view.say(
            f"the group is complete: each has a share of the partitions; {RATE_PER_S} orders per second come now"
        )
        wait_until(KILL_AT)
        victim = next(child for child in self._consumers if child.name == KILLED)
        milestones.killed = time.monotonic()
        victim.kill()
        then = "its witness ends its session" if plan.last_will else WAIT
        self.view.say(f"{KILLED} (pid {victim.pid}) killed by SIGKILL: {then}")
        wait_until(JOIN_AT)
        milestones.joiner_started = time.monotonic()
        self.view.say("a fourth consumer joins: its share moves to it, and the partitions that stay are not paused")
        self._start(JOINER)
        wait_until(STOP_AT)
        self._wait(lambda: self.totals.has_worked(JOINER), SLOW_JOIN_S)  # it must still find messages
        self._stop_producing.set()
        self._producer.join()
        self._look()
        milestones.production_ended = time.monotonic()
        bounds = self.admin.bounds([TopicPartition(plan.topic, number) for number in range(PARTITIONS)])
        ends = {tp.partition: bound.end for tp, bound in bounds.items()}
        self.view.say(f"the producer has stopped; {sum(ends.values())} messages are in the topic")
        self._wait(lambda: self._all_handled(ends), STALL_TIMEOUT_S, lambda: len(self.totals.handled))
        self._stop_consumers()
        self._look()
        self.view.say("the consumers have left")
        return judge(self.totals, ends, milestones, plan.delivery, time.monotonic() - self._began)

    def _all_handled(self, ends: dict[int, int]) -> bool:
        """Returns whether every message is handled. In at-most-once mode dropped messages never come, so it is enough
        that every partition was read to its end."""
        if self.plan.delivery == AT_MOST_ONCE:
            return all(self.totals.next_offset[partition] >= end for partition, end in ends.items())
        return len(self.totals.handled) >= sum(ends.values())

    def _start(self, name: str) -> None:
        child = Child(name, self.plan, self._heard.put)
        self._consumers.append(child)
        self.view.say(f"{name} starts (pid {child.pid})")

    def _stop_consumers(self) -> None:
        for child in self._consumers:
            child.request_stop()
        for child in self._consumers:
            child.end()

    def _produce(self) -> None:
        """Writes orders at an even pace, and tells which were acknowledged."""

        def written(tp: TopicPartition, offset: int) -> None:
            self._heard.put(("producer", Entry("written", time.monotonic(), tp.partition, offset)))

        try:
            producer = KafkaProducer(KafkaTransport(self.plan.settings, CONNECT_TIMEOUT_S), written)
            began, sent = time.monotonic(), 0
            while not self._stop_producing.wait(TICK_S):
                due = round((time.monotonic() - began) * RATE_PER_S)
                if due - sent > RATE_PER_S:
                    # The machine stalled. Continue at the same pace: a burst would be another experiment.
                    began += (due - sent) / RATE_PER_S
                    continue
                for number in range(sent, due):
                    key = f"customer-{number * 7919 % KEYS}"  # a prime step: neighbours go to different partitions
                    producer.write(self.plan.topic, f'{{"order": {number}}}'.encode(), key.encode())
                sent = due
                producer.poll()
            producer.flush()
            producer.close()
        except MarshalError as error:
            self._cannot_produce = str(error)

    # --- waiting and reading

    def _wait(self, done: Callable[[], bool], timeout_s: float, progress: Callable[[], int] = lambda: 0) -> bool:
        """Shows what happens until `done`, or until a time is over, which begins again with each `progress`. Returns
        whether it is done."""
        at, since = progress(), time.monotonic()
        while not done():
            if time.monotonic() - since >= timeout_s:
                return False
            time.sleep(POLL_S)
            self._look()
            if progress() != at:
                at, since = progress(), time.monotonic()
        return True

    def _look(self) -> None:
        """Reads what was told, and shows it: the claims of a consumer in one line, and its losses in one per reason.
        Raises CommandFailed if the demo cannot continue."""
        lines: dict[tuple[str, str], list[int]] = defaultdict(list)
        with suppress(Empty):
            while True:
                name, entry = self._heard.get_nowait()
                self.totals.add(name, entry)
                if entry.kind == "claimed":
                    lines[f"{name} took", ""].append(entry.partition)
                elif entry.kind == "lost":
                    lines[f"{name} released", f" ({entry.text})"].append(entry.partition)
        for (words, why), partitions in lines.items():
            self.view.say(f"{words} {', '.join(map(str, sorted(partitions)))}{why}")
        if self._cannot_produce:
            raise CommandFailed(f"the producer of the demo ended: {self._cannot_produce}")
        for child in self._consumers:
            if not child.reported and (reason := child.failure()):
                child.reported = True
                if len(self.totals.joined) < CONSUMERS:
                    raise CommandFailed(f"{child.name} of the demo ended: {reason}")
                self.view.say(f"{child.name} ended by itself: {reason}")
        self.view.draw(self.totals)
