"""A group under load whose every delivery is known: what takeover, join, leave and traffic share.

Strategy: a topic and a feeder process for each group; members are processes (group_member.py) that log every delivery;
the logs are read here as they grow. `steady` waits until the members have shared all partitions evenly and nothing has
moved for a while; gaps are then read off the merged deliveries of each partition.

A gap is the time between two deliveries of a partition in a row. The normal spacing is the median of these before the
event; figures "over the normal spacing" have it subtracted, so that they do not depend on how often messages come.

Not allowed here: killing by anything but the handle of a process that was started here.
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
from bench.group_member import DELIVERY

ROOT = Path(__file__).parents[1]
PARTITIONS = 12
PERIOD_S = 0.012  # with 12 partitions 1,000 messages per second
LOOK_S = 0.05  # between two looks at the logs
STEADY_TIMEOUT_S = 90.0  # A KIP-848 group of two takes 10 s; this is for busy machines.
READY_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 30.0
ERROR_TAIL = 2_000  # characters of what a process said before it ended
# Nothing may have moved for so long. Longer than the protocol's own clock, so that no second step is still to come:
# a heartbeat of classic groups (3 s) and of KIP-848 (5 s), the whole interval of marshal_py (2 s).
HOLD_S = {"marshal": 2.5, "eager": 3.5, "cooperative": 3.5, "consumer": 5.5}


class Delivery(NamedTuple):
    ns: int
    offset: int
    member: int


class Span(NamedTuple):
    """A time in monotonic ns, both ends included."""

    begin: int
    end: int


def _spawn(module: str, order: Mapping[str, Any], stdout: int | None, stderr: IO[bytes]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(order)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


class MemberProcess:
    """One member: its process, what it said, its log."""

    def __init__(self, number: int, order: Mapping[str, Any], folder: Path) -> None:
        self.number = number
        self.kind = order["kind"]
        self.said: dict[str, int] = {}  # event -> monotonic ns
        self._errors = folder / f"{number}.err"
        self._log = Path(order["log"])
        self._at = 0
        with self._errors.open("wb") as errors:
            self.spawned_ns = time.monotonic_ns()
            self.process = _spawn("bench.group_member", order, subprocess.PIPE, errors)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            self.said[event["event"]] = event["ns"]

    def order(self, word: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()

    def read(self) -> Iterator[tuple[int, int, int]]:
        """Deliveries that were logged since the last call."""
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._at)
            found = log.read()
        whole = len(found) // DELIVERY.size * DELIVERY.size
        self._at += whole
        yield from DELIVERY.iter_unpack(found[:whole])

    def check(self) -> None:
        """Raises when the process has ended by itself."""
        code = self.process.poll()
        if code is not None and "stopped" not in self.said:
            why = self._errors.read_text()[-ERROR_TAIL:]
            raise RuntimeError(f"member {self.number} ({self.kind}) ended with {code}: {why}")

    def end(self) -> None:
        """SIGKILL; returns when the process is gone and all that it said is read."""
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
        hold_s: float | None = None,
        settings: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        group: str | None = None,
    ) -> None:
        """`settings` are librdkafka's for Kafka's kinds, `options` those of `Marshal.consumer`."""
        self.environment, self.kind = environment, kind
        self.partitions, self.period_s = partitions, period_s
        self.hold_s = HOLD_S[kind] if hold_s is None else hold_s
        self.group = group or environment.group(kind)
        self.topic = environment.topic(partitions)
        self.coordination = environment.coordination() if kind == "marshal" else ""
        self.members: list[MemberProcess] = []  # alive
        self.deliveries: dict[int, list[Delivery]] = defaultdict(list)
        self._everyone: list[MemberProcess] = []
        self._settings, self._options = dict(settings or {}), dict(options or {})
        self._folder = environment.folder / self.group
        self._folder.mkdir()
        self._feeder: subprocess.Popen[str] | None = None

    # --- life

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for player in self.members:
            player.end()
        self.members.clear()
        self.starve()
        self.environment.drop(self.topic, *filter(None, [self.coordination]))

    def feed(self) -> None:
        order = {
            "bootstrap": self.environment.bootstrap,
            "topic": self.topic,
            "partitions": self.partitions,
            "period_s": self.period_s,
        }
        with (self._folder / "feeder.err").open("ab") as errors:
            self._feeder = _spawn("bench.load_generator", order, subprocess.DEVNULL, errors)

    def starve(self) -> None:
        """Ends the load; what was written is acknowledged then."""
        feeder, self._feeder = self._feeder, None
        if feeder is None:
            return
        assert feeder.stdin is not None
        feeder.stdin.close()
        try:
            feeder.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            feeder.kill()
            feeder.wait(EXIT_TIMEOUT_S)

    def start(self) -> MemberProcess:
        """A new member, which begins as soon as it is ready."""
        number = len(self._everyone)
        order = {
            "kind": self.kind,
            "bootstrap": self.environment.bootstrap,
            "group": self.group,
            "topic": self.topic,
            "log": str(self._folder / f"{number}.log"),
            "coordination": self.coordination,
            "settings": self._settings,
            "options": self._options,
        }
        player = MemberProcess(number, order, self._folder)
        self._everyone.append(player)
        self.members.append(player)
        player.order("go")
        self._wait(lambda: "called" in player.said, READY_TIMEOUT_S, "a member is ready")
        return player

    def kill(self, player: MemberProcess) -> None:
        """SIGKILL, and what it had delivered is read."""
        self.members.remove(player)
        player.end()
        self.read()

    def stop(self, player: MemberProcess) -> None:
        """A clean stop; returns when the process has ended."""
        self.members.remove(player)
        player.order("stop")
        player.close()
        player.check()
        self.read()

    # --- looking

    def read(self) -> None:
        for player in self._everyone:
            for ns, partition, offset in player.read():
                known, found = self.deliveries[partition], Delivery(ns, offset, player.number)
                if known and known[-1].ns > ns:
                    insort(known, found)  # of another member, whose log was read first
                else:
                    known.append(found)
        for player in self.members:
            player.check()
        if self._feeder is not None and self._feeder.poll() is not None:
            raise RuntimeError(f"the feeder ended: {(self._folder / 'feeder.err').read_text()[-ERROR_TAIL:]}")

    def _wait(self, condition: Any, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.read()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.kind}: not within {timeout_s:g} s: {what}; {self._state()}")
            time.sleep(LOOK_S)

    def wait_delivered(self, since_ns: int, partitions: list[int], not_by: int, timeout_s: float) -> None:
        """Until somebody else than `not_by` has delivered of each of these partitions after `since_ns`."""

        def all_there() -> bool:
            return all(
                any(d.ns > since_ns and d.member != not_by for d in reversed(self.deliveries[p][-200:]))
                for p in partitions
            )

        self._wait(all_there, timeout_s, f"partitions {partitions} are delivered by others")

    def steady(self, extra_s: float = 0.0) -> Span:
        """Waits until all partitions are shared evenly and nothing has moved for `hold_s`; that time is returned."""
        hold_ns = int((self.hold_s + extra_s) * 1e9)

        def quiet() -> bool:
            return self._shared(time.monotonic_ns() - hold_ns)

        self._wait(quiet, STEADY_TIMEOUT_S + extra_s, "the group is steady")
        end_ns = time.monotonic_ns()
        return Span(end_ns - hold_ns, end_ns)

    def _shared(self, since_ns: int) -> bool:
        fresh_ns = time.monotonic_ns() - int(max(0.5, 4 * self.period_s) * 1e9)
        held = {player.number: 0 for player in self.members}
        for partition in range(self.partitions):
            known = self.deliveries[partition]
            if not known or known[0].ns > since_ns:
                return False  # not delivered for so long yet
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
        """Who delivered last of each partition in that time."""
        return {p: found[-1].member for p in range(self.partitions) if (found := self.within(p, span))}

    def within(self, partition: int, span: Span) -> list[Delivery]:
        """Deliveries of a partition in a time, in its order."""
        return [d for d in self._recent(partition, span.begin) if d.ns <= span.end]

    # --- gaps, in ms

    def _gaps(self, partition: int, span: Span) -> list[tuple[float, bool]]:
        """Each gap, and whether it lies between two members."""
        pairs = pairwise(self.within(partition, span))
        return [((b.ns - a.ns) / 1e6, a.member != b.member) for a, b in pairs]

    def normal_ms(self, partition: int, span: Span) -> float:
        return statistics.median(gap for gap, _ in self._gaps(partition, span))

    def longest_ms(self, partition: int, span: Span) -> float:
        """The longest gap in that time; all of it when nothing came."""
        return max((gap for gap, _ in self._gaps(partition, span)), default=(span.end - span.begin) / 1e6)

    def hand_over_ms(self, partition: int, span: Span) -> float:
        """The longest gap between deliveries of two members in a row. There must be one."""
        return max(gap for gap, changed in self._gaps(partition, span) if changed)

    # --- evidence

    def tally(self) -> dict[str, Any]:
        """What was delivered in all: how often, what is missing below the last one, what came more than once."""
        self.read()
        work, missing, again = Work(), 0, 0
        for partition, deliveries in self.deliveries.items():
            offsets = {d.offset for d in deliveries}
            for offset in offsets:
                work.add(partition, offset)
            missing += max(offsets) + 1 - len(offsets)
            again += len(deliveries) - len(offsets)
        return {"delivered": str(work), "missing": missing, "again": again}
