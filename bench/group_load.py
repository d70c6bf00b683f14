"""A group under load with a log of every delivery, used by takeover, join, leave, rewind, traffic and policies.

Each group has a topic and a process that writes to it (load_generator.py). Its members are processes (group_member.py)
that log every delivery; this file reads the logs as they grow. `steady` waits until the members share all partitions
evenly and no partition has moved for a while. Gaps are then computed from the merged deliveries of each partition.

A gap is the time between two successive deliveries of a partition. The normal spacing is the median gap before the
event; it is subtracted from figures "over the normal spacing", so that they do not depend on the rate of messages.

This file must only kill processes that it started, through their handles.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from bench.environment import BenchEnvironment, Work
from bench.group_member import DELIVERY, OWN_KINDS

ROOT = Path(__file__).parents[1]
PARTITIONS = 12
PERIOD_S = 0.012  # with 12 partitions 1,000 messages per second
POLL_S = 0.05  # between two readings of the logs
STEADY_TIMEOUT_S = 90.0  # A KIP-848 group of two takes 10 s; this is for busy machines.
READY_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 30.0
RECENT = 200  # deliveries of a partition among which a take-over is looked for
ERROR_TAIL = 2_000  # characters of what a process reported before it ended
# A group is steady when nothing has moved for so long. Longer than the period of each protocol, so that no second step
# can follow: a heartbeat of classic groups (3 s) and of KIP-848 groups (5 s), the interval of marshal_py (2 s).
STEADY_S = {
    **dict.fromkeys(OWN_KINDS, 2.5),
    **dict.fromkeys(("eager", "cooperative", "aiokafka", "faststream"), 3.5),
    **dict.fromkeys(("consumer", "share"), 5.5),
}


class Delivery(NamedTuple):
    ns: int
    offset: int
    member: int


class Span(NamedTuple):
    """A time in monotonic ns, both ends included."""

    begin: int
    end: int


def _spawn(module: str, arguments: Mapping[str, Any], stdout: int | None, stderr: IO[bytes]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


class MemberProcess:
    """One member: its process, the events that it reported, and its log of deliveries."""

    def __init__(self, number: int, arguments: Mapping[str, Any], folder: Path) -> None:
        self.number = number
        self.kind = arguments["kind"]
        self.reported: dict[str, int] = {}  # event -> monotonic ns
        self._errors = folder / f"{number}.err"
        self._log = Path(arguments["log"])
        self._at = 0
        with self._errors.open("wb") as errors:
            self.spawned_ns = time.monotonic_ns()
            self.process = _spawn("bench.group_member", arguments, subprocess.PIPE, errors)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            self.reported[event["event"]] = event["ns"]

    def command(self, word: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()

    def logged(self) -> int:
        """How many deliveries it has logged so far; `read` costs more."""
        return self._log.stat().st_size // DELIVERY.size if self._log.exists() else 0

    def read(self) -> Iterator[tuple[int, int, int]]:
        """Yields the deliveries (monotonic ns, partition, offset) that were logged since the last call."""
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._at)
            found = log.read()
        whole = len(found) // DELIVERY.size * DELIVERY.size
        self._at += whole
        yield from DELIVERY.iter_unpack(found[:whole])

    def check(self) -> None:
        """Raises RuntimeError if the process ended without being asked to."""
        code = self.process.poll()
        if code is not None and "stopped" not in self.reported:
            why = self._errors.read_text()[-ERROR_TAIL:]
            raise RuntimeError(f"member {self.number} ({self.kind}) ended with {code}: {why}")

    def end(self) -> None:
        """Sends SIGKILL. Returns when the process has ended and everything that it reported is read."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        self.process.wait(EXIT_TIMEOUT_S)
        self._listener.join(EXIT_TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class LoadGroup:
    """The members of one group, their load and their deliveries. A context manager; leaving it ends every process."""

    def __init__(
        self,
        environment: BenchEnvironment,
        kind: str,
        *,
        partitions: int = PARTITIONS,
        period_s: float = PERIOD_S,
        steady_s: float | None = None,
        settings: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        name: str | None = None,
        topic: str | None = None,
    ) -> None:
        """`settings` go to the client of Kafka's kinds, `options` to `Marshal.consumer`. `name` is the group's.

        `topic` is one that others use, too; without it the group has its own, which goes with it.
        """
        self.environment, self.kind = environment, kind
        self.partitions, self.period_s = partitions, period_s
        self.steady_s = STEADY_S[kind] if steady_s is None else steady_s
        self.name = name or environment.group(kind)
        self.topic = topic or environment.topic(partitions)
        self.coordination = environment.coordination() if kind in OWN_KINDS else ""
        self._dropped = [each for each in (self.coordination, "" if topic else self.topic) if each]
        self.members: list[MemberProcess] = []  # those that run
        self.deliveries: dict[int, list[Delivery]] = defaultdict(list)
        self._all_members: list[MemberProcess] = []
        self._settings, self._options = dict(settings or {}), dict(options or {})
        self._folder = environment.folder / self.name
        self._folder.mkdir()
        self._generator: subprocess.Popen[str] | None = None

    # --- starting and ending

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for member in self.members:
            member.end()
        self.members.clear()
        self.stop_load()
        if self._dropped:
            self.environment.drop(*self._dropped)

    def start_load(self) -> None:
        arguments = {
            "bootstrap": self.environment.bootstrap,
            "topic": self.topic,
            "partitions": self.partitions,
            "period_s": self.period_s,
        }
        with (self._folder / "generator.err").open("ab") as errors:
            self._generator = _spawn("bench.load_generator", arguments, subprocess.DEVNULL, errors)

    def stop_load(self) -> None:
        """Ends the load. Returns when everything written is acknowledged."""
        generator, self._generator = self._generator, None
        if generator is None:
            return
        assert generator.stdin is not None
        generator.stdin.close()
        try:
            generator.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            generator.kill()
            generator.wait(EXIT_TIMEOUT_S)

    def start(self) -> MemberProcess:
        """Starts a member. Returns when it is about to join."""
        number = len(self._all_members)
        arguments = {
            "kind": self.kind,
            "bootstrap": self.environment.bootstrap,
            "group": self.name,
            "topic": self.topic,
            "log": str(self._folder / f"{number}.log"),
            "coordination": self.coordination,
            "settings": self._settings,
            "options": self._options,
        }
        member = MemberProcess(number, arguments, self._folder)
        self._all_members.append(member)
        self.members.append(member)
        member.command("go")
        self.wait(lambda: "called" in member.reported, READY_TIMEOUT_S, "a member is ready")
        return member

    def kill(self, member: MemberProcess) -> None:
        """Kills a member and reads the rest of its deliveries."""
        self.members.remove(member)
        member.end()
        self.read()

    def stop(self, member: MemberProcess) -> None:
        """Stops a member cleanly. Returns when its process has ended."""
        self.members.remove(member)
        member.command("stop")
        member.close()
        member.check()
        self.read()

    # --- reading

    def read(self) -> None:
        for member in self._all_members:
            for ns, partition, offset in member.read():
                known, found = self.deliveries[partition], Delivery(ns, offset, member.number)
                if known and known[-1].ns > ns:
                    insort(known, found)  # another member's log was read first
                else:
                    known.append(found)
        for member in self.members:
            member.check()
        if self._generator is not None and self._generator.poll() is not None:
            errors = (self._folder / "generator.err").read_text()
            raise RuntimeError(f"the load generator ended: {errors[-ERROR_TAIL:]}")

    def wait(self, condition: Any, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.read()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.kind}: not within {timeout_s:g} s: {what}; {self._state()}")
            time.sleep(POLL_S)

    def wait_delivered(self, since_ns: int, partitions: list[int], not_by: int, timeout_s: float) -> None:
        """Waits until members other than `not_by` have delivered from each of these partitions after `since_ns`."""

        def all_there() -> bool:
            return all(
                any(d.ns > since_ns and d.member != not_by for d in reversed(self.deliveries[p][-RECENT:]))
                for p in partitions
            )

        self.wait(all_there, timeout_s, f"partitions {partitions} are delivered by others")

    def steady(self, extra_s: float = 0.0) -> Span:
        """Waits until all partitions are shared evenly and none has moved for `steady_s`. Returns that span of time."""
        steady_ns = int((self.steady_s + extra_s) * 1e9)

        def quiet() -> bool:
            return self._shared(time.monotonic_ns() - steady_ns)

        self.wait(quiet, STEADY_TIMEOUT_S + extra_s, "the group is steady")
        end_ns = time.monotonic_ns()
        return Span(end_ns - steady_ns, end_ns)

    def _shared(self, since_ns: int) -> bool:
        fresh_ns = time.monotonic_ns() - int(max(0.5, 4 * self.period_s) * 1e9)
        held = {member.number: 0 for member in self.members}
        for partition in range(self.partitions):
            known = self.deliveries[partition]
            if not known or known[0].ns > since_ns:
                return False  # its deliveries do not reach back that far yet
            recent = self._recent(partition, since_ns)
            members = {delivery.member for delivery in recent}
            if len(members) != 1 or recent[-1].ns < fresh_ns or not members <= held.keys():
                return False
            held[members.pop()] += 1
        return max(held.values()) - min(held.values()) <= 1

    def _recent(self, partition: int, since_ns: int) -> list[Delivery]:
        known = self.deliveries[partition]
        at = len(known)
        while at and known[at - 1].ns >= since_ns:
            at -= 1
        return known[at:]

    def _state(self) -> str:
        now_ns = time.monotonic_ns()
        last = {p: (d[-1].member, round((now_ns - d[-1].ns) / 1e9, 2)) for p, d in self.deliveries.items() if d}
        return f"last delivery (member, seconds ago) by partition: {last}"

    def owners(self, span: Span) -> dict[int, int]:
        """The member that delivered last from each partition in that time."""
        return {p: found[-1].member for p in range(self.partitions) if (found := self.within(p, span))}

    def within(self, partition: int, span: Span) -> list[Delivery]:
        """The deliveries of a partition in that time, oldest first."""
        return [d for d in self._recent(partition, span.begin) if d.ns <= span.end]

    # --- gaps, in ms

    def _gaps(self, partition: int, span: Span) -> list[tuple[float, bool]]:
        """Each gap, and whether it is between two members."""
        pairs = pairwise(self.within(partition, span))
        return [((b.ns - a.ns) / 1e6, a.member != b.member) for a, b in pairs]

    def normal_ms(self, partition: int, span: Span) -> float:
        return statistics.median(gap for gap, _ in self._gaps(partition, span))

    def longest_ms(self, partition: int, span: Span) -> float:
        """The longest gap in that time; the whole time if there were fewer than two deliveries."""
        return max((gap for gap, _ in self._gaps(partition, span)), default=(span.end - span.begin) / 1e6)

    def hand_over_ms(self, partition: int, span: Span) -> float:
        """The longest gap between successive deliveries of two different members. There must be one."""
        return max(gap for gap, changed in self._gaps(partition, span) if changed)

    # --- evidence

    def tally(self) -> dict[str, Any]:
        """Counts all deliveries, the offsets missing below the last one, and the messages delivered again."""
        self.read()
        work, missing, again = Work(), 0, 0
        for partition, deliveries in self.deliveries.items():
            offsets = {d.offset for d in deliveries}
            for offset in offsets:
                work.add(partition, offset)
            missing += max(offsets) + 1 - len(offsets)
            again += len(deliveries) - len(offsets)
        return {"delivered": str(work), "missing": missing, "again": again}
