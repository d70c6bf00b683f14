"""A scenario with real processes: starts workers and producers, injects faults, reads journals, has the run judged.

Processes have names here; they are only ever signalled by the pid of a process that was started here. A fault is
recorded before it happens, so that the judge finds the cause of whatever follows. Every wait is for a condition and has
a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from marshal_sim.oracle.state import Group
from tests.support.brokers import wait_until
from tests.support.descendants import descendants
from tests.support.evidence import NEVER, Evidence, Fault, JournalReader
from tests.support.journal import Tail
from tests.support.judge import Judgement, judge
from tests.support.recorder import Recorder, contents

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0  # for anything that must happen at all; a machine with other work needs a multiple of the usual time
GONE_S = 60.0  # for the end of a process that was signalled
LOG_TAIL = 1_500  # characters of a process's output in a failure's message
WORKER, QUERY_WORKER = "tests.support.worker", "tests.support.query_worker"
WHOLE = frozenset({QUERY_WORKER})  # modules whose processes start others that belong to them

MakeScenario = Callable[..., "ProcessScenario"]


class ScenarioProcess:
    """One process. `client` is the client id that it joins with. `whole`: its descendants are killed and stopped with
    it."""

    def __init__(
        self, name: str, popen: subprocess.Popen[bytes], tail: Tail, output: Path, whole: bool = False
    ) -> None:
        self.name, self.popen, self.tail, self.output, self.whole = name, popen, tail, output, whole
        self.client = f"{name}-{popen.pid}"

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: int) -> None:
        """Does nothing if it has ended."""
        if not self.running:
            return
        others = descendants(self.popen.pid) if self.whole and number != signal.SIGTERM else []
        for pid in [self.popen.pid, *others]:
            with contextlib.suppress(ProcessLookupError):  # a descendant may end with its parent
                os.kill(pid, number)


class ProcessScenario:
    """A context manager that ends every process at its exit. `worker` are settings of every worker."""

    def __init__(
        self,
        bootstrap: str,
        folder: Path,
        topics: list[str],
        *,
        delivery: str = "at_least_once",
        coordination_partitions: int = 2,
        seed: int = 0,
        **worker: Any,
    ) -> None:
        mark = uuid.uuid4().hex[:8]
        self.bootstrap, self.folder, self.topics, self.delivery = bootstrap, folder, topics, delivery
        self.group, self.coordination_topic = f"group-{mark}", f"marshal-{mark}"
        self.seed = seed
        self.evidence = Evidence()
        self.processes: dict[str, ScenarioProcess] = {}
        self.recorder = Recorder(bootstrap, self.coordination_topic)
        self._coordination_partitions = coordination_partitions
        self._worker = worker
        self._journals = JournalReader(self.evidence)
        self._started = 0

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.recorder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.signal(signal.SIGKILL)
            process.popen.wait(GONE_S)
        self.recorder.close()

    # --- starting and ending

    def _start(self, module: str, name: str, settings: dict[str, Any]) -> ScenarioProcess:
        self._started += 1
        path = self.folder / f"{self._started:03d}-{name}.jsonl"
        output = path.with_suffix(".log")
        settings = {"name": name, "journal": str(path), "bootstrap": self.bootstrap, "topics": self.topics, **settings}
        with output.open("wb") as out:
            popen = subprocess.Popen(
                [sys.executable, "-B", "-m", module, json.dumps(settings)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.record_fault("start", f"{name}-{popen.pid}")
        process = self.processes[name] = ScenarioProcess(name, popen, Tail(path), output, module in WHOLE)
        return process

    def start_worker(self, name: str, module: str = WORKER, **settings: Any) -> ScenarioProcess:
        """Starts a worker and returns at once. `settings` are those of tests/support/worker.py."""
        if name in self.processes:
            self._free_name(name)
        given = {
            "group": self.group,
            "coordination_topic": self.coordination_topic,
            "coordination_partitions": self._coordination_partitions,
            "delivery": self.delivery,
            "seed": self.seed * 1_000 + self._started,
            "style": ("single", "batch")[self._started % 2],
            **self._worker,
            **settings,
        }
        return self._start(module, name, given)

    def start_workers(self, count: int, **settings: Any) -> list[str]:
        """Starts workers w1, w2, ... and waits until all have joined."""
        names = [f"w{number}" for number in range(1, count + 1)]
        for name in names:
            self.start_worker(name, **settings)
        for name in names:
            self.await_joined(name)
        return names

    def produce(self, name: str = "producer", **settings: Any) -> ScenarioProcess:
        return self._start("tests.support.producer", name, settings)

    def kill(self, name: str) -> None:
        self._signal(name, "kill", signal.SIGKILL)
        self.processes[name].popen.wait(GONE_S)

    def stop(self, name: str) -> None:
        self._signal(name, "stop", signal.SIGSTOP)

    def cont(self, name: str) -> None:
        self._signal(name, "cont", signal.SIGCONT)

    def term(self, name: str) -> None:
        self._signal(name, "term", signal.SIGTERM)

    def hurry(self, name: str) -> None:
        """Ends the wait of a handler of tests/support/failing_handler.py."""
        self._signal(name, "hurry", signal.SIGUSR1)

    def _signal(self, name: str, kind: str, number: int) -> None:
        process = self.processes[name]
        self.record_fault(kind, process.client)
        process.signal(number)

    def record_fault(self, kind: str, who: str = "") -> None:
        """Records a fault that is about to happen. `who` is the client id or the broker."""
        self.evidence.faults.append(Fault(time.monotonic_ns(), kind, who))

    def await_gone(self, name: str, deadline_s: float = GONE_S) -> int:
        """Waits for the end of a process and returns its exit code."""
        process = self.processes[name]
        self.wait(lambda: not process.running, f"{name} is gone", deadline_s)
        return int(process.popen.returncode)

    def _free_name(self, name: str) -> None:
        """Reads the journal of a process that has ended, and frees its name."""
        process = self.processes[name]
        process.popen.wait(GONE_S)
        self.scan()
        self._record_end(process)
        self.processes[f"{name}#{process.popen.pid}"] = self.processes.pop(name)

    def _record_end(self, process: ScenarioProcess) -> None:
        life = self.evidence.lives.get(process.client)
        code = process.popen.poll()
        if life is not None and code is not None and life.exit_code is None:
            life.exit_code, life.end_ns = code, time.monotonic_ns()

    # --- reading and waiting

    def scan(self) -> Evidence:
        """Reads what the processes have written to their journals since the last call."""
        for process in self.processes.values():
            self._journals.take(str(process.tail.path), process.tail.read())
            self._record_end(process)
        return self.evidence

    def wait(self, condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        def look() -> bool:
            self.scan()
            return condition()

        try:
            wait_until(look, deadline_s, what)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.describe()}") from None

    def describe(self) -> str:
        """The state of the group and of every process, for the message of a failure."""
        lines = [f"group {self.group} in {self.coordination_topic}, log ends {self.recorder.ends()}"]
        group = self.recorder.group(self.group)
        if group is not None:
            for place, part in sorted(group.partitions.items()):
                made = self.evidence.topics.get(place, [])
                lines.append(f"  {place}: owner {part.owner}, position {part.position} of {max(made, default=-1) + 1}")
            lines += [f"  session {s.id}: {s.join['client_id']}" for s in group.sessions.values()]
        for process in self.processes.values():
            output = process.output.read_text(errors="replace")[-LOG_TAIL:]
            lines.append(f"  {process.client}: {'runs' if process.running else process.popen.returncode} {output}")
        lines += [f"  {failure}" for failure in self.evidence.failures]
        return "\n".join(lines)

    def group_state(self) -> Group | None:
        """The group as the oracle folds the log."""
        return self.recorder.group(self.group)

    def await_joined(self, name: str, deadline_s: float = DEADLINE_S) -> None:
        client = self.processes[name].client

        def joined() -> bool:
            life = self.evidence.lives.get(client)
            return not self.processes[name].running or (life is not None and life.joined_ns < NEVER)

        self.wait(joined, f"{name} has joined", deadline_s)
        if not self.processes[name].running:
            raise AssertionError(f"{name} did not join\n{self.describe()}")

    def owned(self) -> dict[tuple[str, int], str]:
        """The client id of each partition's owner, by the log."""
        group = self.group_state()
        if group is None:
            return {}
        return {
            place: group.sessions[part.owner].join["client_id"]
            for place, part in list(group.partitions.items())
            if part.owner in group.sessions
        }

    def session_of(self, name: str) -> int:
        """The newest live session of a worker, -1 if it has none."""
        group = self.group_state()
        client = self.processes[name].client
        mine = [s.id for s in list(group.sessions.values()) if s.join["client_id"] == client] if group else []
        return max(mine, default=-1)

    def begun(self, name: str = "") -> int:
        """The number of deliveries so far, to one worker or to all."""
        client = self.processes[name].client if name else ""
        return sum(1 for d in self.evidence.deliveries if not client or d.client == client)

    def await_begun(self, more: int, name: str = "") -> None:
        """Waits for `more` deliveries, to one worker or to all."""
        self.scan()
        wanted = self.begun(name) + more
        self.wait(lambda: self.begun(name) >= wanted, f"{more} more deliveries {name}")

    def all_owned(self, partitions: int) -> bool:
        """Whether every partition has an owner whose process runs."""
        running = {process.client for process in self.processes.values() if process.running}
        owned = self.owned()
        return len(owned) >= partitions and all(client in running for client in owned.values())

    def all_done(self) -> bool:
        """Whether every position in the log is after all messages that were acknowledged to a producer."""
        group = self.group_state()
        if group is None:
            return False
        return all(
            place in group.partitions and group.partitions[place].position > max(made)
            for place, made in self.evidence.topics.items()
            if made
        )

    # --- the end

    def finish(
        self, *, takeovers: int = 0, deliveries: int = 1, settle_s: float = DEADLINE_S, expect_settled: bool = True
    ) -> Judgement:
        """Ends the producers, waits until everything is done and owned, stops the workers, and has the run judged.

        If the wait times out, the judge says what is missing (V1 to V3). `expect_settled=False` is for scenarios at
        whose end no worker is left.
        """
        for process in list(self.processes.values()):
            if process.name.startswith("producer") and process.running:
                self.term(process.name)
        for process in list(self.processes.values()):
            if process.name.startswith("producer"):
                self.await_gone(process.name, settle_s)  # it waits for what it has sent
        if expect_settled:
            self._settle(settle_s)
        for process in list(self.processes.values()):
            if process.running:
                self.term(process.name)
        for process in list(self.processes.values()):
            self.await_gone(process.name)
        return self.verdict(takeovers=takeovers, deliveries=deliveries)

    def _settle(self, settle_s: float) -> None:
        partitions = len([place for place in self.topic_contents() if place[0] in self.topics])
        try:
            self.wait(lambda: self.all_done() and self.all_owned(partitions), "everything is done and owned", settle_s)
        except TimeoutError as error:
            print(error)
        self.evidence.settled = self.recorder.ends()

    def topic_contents(self) -> dict[tuple[str, int], list[int]]:
        found: dict[tuple[str, int], list[int]] = {}
        for topic in self.topics:
            found |= contents(self.bootstrap, topic)
        return found

    def verdict(self, *, takeovers: int = 0, deliveries: int = 1) -> Judgement:
        """Reads the log to its end and has the run judged."""
        if not self.recorder.trouble:
            read = self.recorder.read_to_the_end()
            self.wait(read, "the recorder has read the log to its end")
        self.scan()
        self._keep_log()
        evidence = dataclasses.replace(self.evidence, logs={log: list(r) for log, r in self.recorder.logs.items()})
        there = self.topic_contents()
        evidence.topics = {
            place: sorted({*there.get(place, ()), *self.evidence.topics.get(place, ())})
            for place in {*there, *self.evidence.topics}
        }
        return judge(evidence, takeovers_min=takeovers, deliveries_min=deliveries)

    def _keep_log(self) -> None:
        """Writes the raw log and the faults next to the journals, for the analysis of a violation."""
        with (self.folder / "log.jsonl").open("w") as file:
            for log, records in self.recorder.logs.items():
                for record in records:
                    value = None if record.value is None else record.value.hex()
                    file.write(json.dumps({"log": log, **record._asdict(), "value": value}) + "\n")
        with (self.folder / "faults.jsonl").open("w") as file:
            file.writelines(json.dumps(fault._asdict()) + "\n" for fault in self.evidence.faults)
