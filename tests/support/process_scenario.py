"""A troupe: the processes of one scenario, started, hurt and stopped by name; what they wrote down; the verdict.

Every process is known by its pid and ended by its pid. A fault is written down before it happens, so that whatever
follows it has its cause in the journal. Waiting is done for conditions, with a deadline.
"""

from __future__ import annotations

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

from marshal_py.simulator.oracle_state import Group
from tests.support.brokers import wait_until
from tests.support.evidence import NEVER, Evidence, Fault, JournalReader
from tests.support.journal import Tail
from tests.support.judge import Judgement, judge
from tests.support.recorder import Recorder, contents

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0  # For anything that must happen at all; a machine with other work needs a multiple of the usual.
GONE_S = 60.0

MakeTroupe = Callable[..., "ProcessScenario"]


class Actor:
    """One process. `client` is the client id that it joins with."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], tail: Tail, log: Path) -> None:
        self.name, self.process, self.tail, self.log = name, process, tail, log
        self.client = f"{name}-{process.pid}"

    @property
    def running(self) -> bool:
        return self.process.poll() is None


class ProcessScenario:
    """A context manager; leaving it ends every process."""

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
        self.actors: dict[str, Actor] = {}
        self.recorder = Recorder(bootstrap, self.coordination_topic)
        self._coordination_partitions = coordination_partitions
        self._worker = worker
        self._diary = JournalReader(self.evidence)
        self._births = 0

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.recorder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for actor in self.actors.values():
            if actor.running:
                os.kill(actor.process.pid, signal.SIGKILL)
            actor.process.wait(GONE_S)
        self.recorder.close()

    # --- coming and going

    def _start(self, module: str, name: str, settings: dict[str, Any]) -> Actor:
        self._births += 1
        path = self.folder / f"{self._births:03d}-{name}.jsonl"
        log = path.with_suffix(".log")
        settings = {"name": name, "journal": str(path), "bootstrap": self.bootstrap, "topics": self.topics, **settings}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-B", "-m", module, json.dumps(settings)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._fault("start", f"{name}-{process.pid}")
        actor = self.actors[name] = Actor(name, process, Tail(path), log)
        return actor

    def start_worker(self, name: str, module: str = "tests.support.worker", **settings: Any) -> Actor:
        """Starts a worker. Returns at once."""
        if name in self.actors:
            self._retire(name)
        given = {
            "group": self.group,
            "coordination_topic": self.coordination_topic,
            "coordination_partitions": self._coordination_partitions,
            "delivery": self.delivery,
            "seed": self.seed * 1_000 + self._births,
            "style": ("single", "batch")[self._births % 2],
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

    def produce(self, name: str = "producer", **settings: Any) -> Actor:
        return self._start("tests.support.producer", name, settings)

    def kill(self, name: str) -> None:
        self._signal(name, "kill", signal.SIGKILL)
        self.actors[name].process.wait(GONE_S)

    def stop(self, name: str) -> None:
        self._signal(name, "stop", signal.SIGSTOP)

    def cont(self, name: str) -> None:
        self._signal(name, "cont", signal.SIGCONT)

    def term(self, name: str) -> None:
        self._signal(name, "term", signal.SIGTERM)

    def hurry(self, name: str) -> None:
        """Ends what a user of tests/support/failing_handler.py waits for."""
        self._signal(name, "hurry", signal.SIGUSR1)

    def _signal(self, name: str, kind: str, number: int) -> None:
        actor = self.actors[name]
        self._fault(kind, actor.client)
        if actor.running:
            os.kill(actor.process.pid, number)

    def fault(self, kind: str, who: str = "") -> None:
        """A fault that somebody else causes now."""
        self._fault(kind, who)

    def _fault(self, kind: str, who: str) -> None:
        self.evidence.faults.append(Fault(time.monotonic_ns(), kind, who))

    def await_gone(self, name: str, deadline_s: float = GONE_S) -> int:
        """Waits for the end of a process and returns its exit code."""
        actor = self.actors[name]
        self.wait(lambda: not actor.running, f"{name} is gone", deadline_s)
        return int(actor.process.returncode)

    def _retire(self, name: str) -> None:
        """Frees the name of a process that has ended; its journal is read to the end first."""
        actor = self.actors[name]
        actor.process.wait(GONE_S)
        self.scan()
        self._note_end(actor)
        self.actors[f"{name}#{actor.process.pid}"] = self.actors.pop(name)

    def _note_end(self, actor: Actor) -> None:
        life = self.evidence.lives.get(actor.client)
        code = actor.process.poll()
        if life is not None and code is not None and life.exit_code is None:
            life.exit_code, life.end_ns = code, time.monotonic_ns()

    # --- looking and waiting

    def scan(self) -> Evidence:
        """Reads what has been written down since the last look."""
        for actor in self.actors.values():
            self._diary.take(str(actor.tail.path), actor.tail.read())
            self._note_end(actor)
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
        """Where everybody stands, for the one who reads a failure."""
        lines = [f"group {self.group} in {self.coordination_topic}, log ends {self.recorder.ends()}"]
        group = self.recorder.group(self.group)
        if group is not None:
            for place, part in sorted(group.partitions.items()):
                made = self.evidence.topics.get(place, [])
                lines.append(f"  {place}: owner {part.owner}, position {part.position} of {max(made, default=-1) + 1}")
            lines += [f"  session {s.id}: {s.join['client_id']}" for s in group.sessions.values()]
        for actor in self.actors.values():
            said = actor.log.read_text(errors="replace")[-1500:]
            lines.append(f"  {actor.client}: {'runs' if actor.running else actor.process.returncode} {said}")
        lines += [f"  {failure}" for failure in self.evidence.failures]
        return "\n".join(lines)

    def world(self) -> Group | None:
        return self.recorder.group(self.group)

    def await_joined(self, name: str) -> None:
        client = self.actors[name].client

        def joined() -> bool:
            life = self.evidence.lives.get(client)
            return not self.actors[name].running or (life is not None and life.joined_ns < NEVER)

        self.wait(joined, f"{name} has joined")
        if not self.actors[name].running:
            raise AssertionError(f"{name} did not join\n{self.describe()}")

    def owned(self) -> dict[tuple[str, int], str]:
        """Who owns what, by the log: client ids."""
        group = self.world()
        if group is None:
            return {}
        return {
            place: group.sessions[part.owner].join["client_id"]
            for place, part in list(group.partitions.items())
            if part.owner in group.sessions
        }

    def session_of(self, name: str) -> int:
        """The newest live session of a worker, -1 if it has none."""
        group = self.world()
        client = self.actors[name].client
        mine = [s.id for s in list(group.sessions.values()) if s.join["client_id"] == client] if group else []
        return max(mine, default=-1)

    def begun(self, name: str = "") -> int:
        """Messages handed over so far, by one worker or by all."""
        client = self.actors[name].client if name else ""
        return sum(1 for d in self.evidence.deliveries if not client or d.client == client)

    def await_begun(self, more: int, name: str = "") -> None:
        """Waits for `more` further deliveries."""
        self.scan()
        wanted = self.begun(name) + more
        self.wait(lambda: self.begun(name) >= wanted, f"{more} more deliveries {name}")

    def all_owned(self, partitions: int) -> bool:
        """Whether every partition has an owner that still runs."""
        running = {actor.client for actor in self.actors.values() if actor.running}
        owned = self.owned()
        return len(owned) >= partitions and all(client in running for client in owned.values())

    def all_done(self) -> bool:
        """Whether the log's position stands behind everything that was acknowledged to a producer."""
        group = self.world()
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
        """Ends the producers, waits until everything is done and owned, stops the workers, judges.

        Where the wait is in vain the judge says what is missing (V1 to V3). `expect_settled=False` is for scenarios
        at whose end nobody is left who could do anything.
        """
        for actor in list(self.actors.values()):
            if actor.name.startswith("producer") and actor.running:
                self.term(actor.name)
        for actor in list(self.actors.values()):
            if actor.name.startswith("producer"):
                self.await_gone(actor.name)
        if expect_settled:
            self._settle(settle_s)
        for actor in list(self.actors.values()):
            if actor.running:
                self.term(actor.name)
        for actor in list(self.actors.values()):
            self.await_gone(actor.name)
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
        """Reads the log to its end and judges."""
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
        """The raw log beside the journals, for the one who looks into a violation."""
        with (self.folder / "log.jsonl").open("w") as file:
            for log, records in self.recorder.logs.items():
                for record in records:
                    value = None if record.value is None else record.value.hex()
                    file.write(json.dumps({"log": log, **record._asdict(), "value": value}) + "\n")
