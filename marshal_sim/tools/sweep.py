"""The work behind `marshal simulate`: many seeds in processes, one seed with its trace, a search for each planted bug.

Results come in the order of the seeds, so that sums and hashes do not depend on the number of processes. This file
judges nothing: run.py gives the verdicts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from random import Random
from statistics import median
from typing import Final, NamedTuple, Protocol, TypeVar
from zlib import crc32

from msgspec.structs import replace

from marshal_py.errors import MarshalError
from marshal_py.history.explain import describe
from marshal_py.protocol.fold.rationalizer import Outcome, Verdict
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE
from marshal_sim.cluster.client import Client
from marshal_sim.cluster.clock import MachineClock
from marshal_sim.cluster.cluster import Cluster
from marshal_sim.cluster.faults import TRACED_KINDS
from marshal_sim.cluster.process import Process
from marshal_sim.cluster.run import Result, simulate
from marshal_sim.cluster.scenario import Options, Scenario
from marshal_sim.judge.evidence import Evidence, Violation
from marshal_sim.judge.history import oracle_of
from marshal_sim.mutants.mutants import MUTANTS, SEEDS_BASE, Hunt, find, switched_on, with_its_judge
from marshal_sim.oracle.oracle import OracleStop
from marshal_sim.tools.schedule import Schedule
from marshal_sim.tools.schedule import run as run_schedule

CHUNK_MAX: Final = 16  # seeds per task of a process: few enough that all processes end at about the same time
BASES: Final = tuple(SEEDS_BASE + number * 10_000_000 for number in range(5))  # of searches for one planted bug
NOBODY: Final = "-"

# The documented limits, which the auditor counts without failing. name -> (what makes it likely, counter)
COUNTED: Final = {
    "X3": (Options(clients=3, partitions=3, interval_ms=2_000, kinds=frozenset({"gate_stop"})), "S3"),
    "X12": (Options(clients=3, partitions=3, interval_ms=2_000, kinds=frozenset({"false_reclaim", "lag"})), "X12"),
}

Task = TypeVar("Task")
Done = TypeVar("Done")


# ---------------------------------------------------------------------------------------------------------------------
# Many


class Total(NamedTuple):
    """The sum over many seeds."""

    seeds: int
    violations: int
    void: bool  # no take-over or no delivery: such a search proves nothing
    takeovers: int
    handovers: int
    deliveries: int
    faults: int
    events: int
    simulated_hours: float
    trace_hash: str
    failing: list[int]


class Counted(Protocol):
    """Declares the fields of a result that `total` needs. A Result has them, and so has a row of a sweep on Spark."""

    @property
    def seed(self) -> int: ...
    @property
    def violations(self) -> tuple[Violation, ...]: ...
    @property
    def takeovers(self) -> int: ...
    @property
    def handovers(self) -> int: ...
    @property
    def deliveries(self) -> int: ...
    @property
    def faults(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def simulated_hours(self) -> float: ...
    @property
    def trace_hash(self) -> str: ...


def cores() -> int:
    """Returns how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(seeds: range, processes: int, options: Options | None = None) -> Iterator[Result]:
    """Runs every seed in `processes` processes, and yields the results in the order of the seeds."""
    return _each(partial(simulate, options=options), seeds, len(seeds), processes)


def total(results: Iterable[Counted]) -> Total:
    """Sums up the results. They must come in the order of their seeds, because the hash depends on it."""
    traces, failing, hours = sha256(), [], 0.0
    seeds = violations = takeovers = handovers = deliveries = faults = events = 0
    for result in results:
        traces.update(f"{result.seed}:{result.trace_hash}\n".encode())
        failing += [result.seed] if result.violations else []
        hours += result.simulated_hours
        seeds += 1
        violations += len(result.violations)
        takeovers += result.takeovers
        handovers += result.handovers
        deliveries += result.deliveries
        faults += result.faults
        events += result.events
    void = not takeovers or not deliveries
    return Total(
        seeds, violations, void, takeovers, handovers, deliveries, faults, events, hours, traces.hexdigest(), failing
    )


def _each(work: Callable[[Task], Done], tasks: Iterable[Task], count: int, processes: int) -> Iterator[Done]:
    """Does each task in one of `processes` processes, and yields the results in the order of the tasks."""
    if processes == 1 or count <= 1:
        yield from map(work, tasks)
        return
    # spawn, not fork: the caller may have threads.
    pool = ProcessPoolExecutor(min(processes, count), get_context("spawn"), leave_interrupts_to_the_parent)
    try:
        yield from pool.map(work, tasks, chunksize=max(1, min(CHUNK_MAX, count // (4 * processes))))
    finally:
        pool.shutdown(cancel_futures=True)


def leave_interrupts_to_the_parent() -> None:
    """Makes this process ignore Ctrl-C, which a terminal sends to all of its processes. Runs when a pool starts a
    process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# ---------------------------------------------------------------------------------------------------------------------
# Planted bugs


class Found(NamedTuple):
    """The result of the search for one planted bug."""

    mutant: str
    found: bool | str  # also "counted", which is no planted bug
    invariant: str | None  # the broken invariant; never S1, since both folds have the bug
    schedules: int  # how many were run; over several searches the median
    seed: int | None  # the seed that showed the bug
    events: int | None = None  # events of the shortest run that showed the bug
    places: tuple[str, ...] = ()  # the modules in which it is planted


def all_mutants() -> list[str]:
    """Returns the name of every counter-example in its order: planted bugs, and those that are counted."""

    def place(name: str) -> tuple[bool, str, int, str]:
        return name[0] != "X", name[0], int("".join(filter(str.isdigit, name))), name

    return sorted({*MUTANTS, *COUNTED}, key=place)


def hunt_all(schedules: int, processes: int) -> Iterator[Found]:
    """Searches for every planted bug, each in several disjoint ranges of seeds, and yields the results."""
    names = all_mutants()
    return _each(partial(hunt, schedules=schedules, bases=BASES), names, len(names), processes)


def hunt(name: str, schedules: int, bases: tuple[int, ...] = BASES[:1]) -> Found:
    """Searches for a planted bug from each base on, in up to `schedules` seeds. It is found only if every search finds
    it.
    """
    hunts = [_count(name, schedules, base) if name in COUNTED else find(name, schedules, base) for base in bases]
    ran = round(median(hunt.schedules for hunt in hunts))
    places = () if name in COUNTED else MUTANTS[name].places()
    if not all(hunt.found for hunt in hunts):
        return Found(name, False, None, ran, None, places=places)
    first = hunts[0]
    events = min(_run_biased(hunt.seed, name).events for hunt in hunts)
    found = "counted" if name in COUNTED else True
    return Found(name, found, first.invariant or None, ran, first.seed, events, places)


def _count(name: str, schedules: int, base: int) -> Hunt:
    """Searches up to `schedules` seeds from `base` on for a run that shows the counter-example `name`.

    Counter-examples in COUNTED are known limits of the protocol: the auditor counts them and does not object.
    """
    options, counter = COUNTED[name]
    for number in range(schedules):
        if simulate(base + number, options).counted[counter]:
            return Hunt(name, True, counter, number + 1, base + number)
    return Hunt(name, False, "", schedules, -1)


def _run_biased(seed: int, name: str) -> Result:
    return simulate(seed, COUNTED[name][0]) if name in COUNTED else run_one(seed, name)


# ---------------------------------------------------------------------------------------------------------------------
# One


class TraceEvent(NamedTuple):
    """Something that happened in a run."""

    ms: float
    who: str
    what: str  # process, fault, record, delivery
    offset: int | None  # of the record in the log; of the message in its partition
    verdict: str | None  # the oracle's verdict on a record
    text: str


class _TracingCluster(Cluster):
    """Simulates a cluster and notes every event. It draws no random number and decides nothing, so it changes no
    run.
    """

    def __init__(self, scenario: Scenario, rng: Random) -> None:
        self.noted: list[TraceEvent] = []
        super().__init__(scenario, rng)

    def note(self, who: Process | None, what: str, text: str) -> None:
        self.noted.append(TraceEvent(self.now_ms, NOBODY if who is None else _title(who), what, None, None, text))

    def trace(self, who: int, what: int, value: int) -> None:
        if who == NONE:
            self.note(None, "fault", TRACED_KINDS[what])
        super().trace(who, what, value)

    def add_client(self, group: str, options: MemberOptions, clock: MachineClock | None = None) -> Client:
        client = super().add_client(group, options, clock)
        self.note(client, "process", f"starts, for group {group}")
        return client

    def add_clone(self, client: Client) -> Client:
        clone = super().add_clone(client)
        self.note(clone, "process", f"begins as a clone of {_title(client)}")
        return clone

    def kill(self, client: Process) -> None:
        self.note(client, "process", "is killed")
        super().kill(client)

    def client_ended(self, client: Client, reason: MarshalError | None) -> None:
        self.note(client, "process", "ends" if reason is None else f"ends with {type(reason).__name__}")
        super().client_ended(client, reason)


def run_one(seed: int, mutant: str | None = None) -> Result:
    """Runs one seed. With a planted bug, it runs under the conditions that make this bug likely."""
    return _run(seed, mutant, Cluster)


class TracedRun(NamedTuple):
    """A run, with everything that happened in it in the order of time."""

    result: Result
    trace: list[TraceEvent]
    logs: list[Evidence]


def trace_seed(seed: int, mutant: str | None = None) -> TracedRun:
    """Runs one seed as `run_one` does, and keeps the trace."""
    return _traced(lambda environment: _run(seed, mutant, environment))


def trace_schedule(schedule: Schedule) -> TracedRun:
    return _traced(lambda environment: run_schedule(schedule, environment))


def _traced(run: Callable[[Callable[[Scenario, Random], Cluster]], Result]) -> TracedRun:
    clusters: list[_TracingCluster] = []

    def environment(scenario: Scenario, rng: Random) -> Cluster:
        clusters.append(_TracingCluster(scenario, rng))
        return clusters[0]

    result = run(environment)
    (cluster,) = clusters
    logs = cluster.closed + cluster.close()
    records = [
        event for evidence in logs for event in records_of(evidence, _sender(cluster, evidence), evidence.inherited)
    ]
    trace = [*cluster.noted, *records, *_deliveries(cluster)]
    return TracedRun(result, sorted(trace, key=lambda event: event.ms), logs)


def _run(seed: int, mutant: str | None, environment: Callable[[Scenario, Random], Cluster]) -> Result:
    if mutant is None:
        return simulate(seed, environment=environment)
    with switched_on(with_its_judge(mutant)):
        return simulate(seed, MUTANTS[mutant].bias, environment)


def violated_anyway(seed: int, mutant: str) -> tuple[Violation, ...]:
    """Returns the violations of the code without the planted bug, under the same conditions. If there are any, what the
    search found need not be the bug.
    """
    return simulate(seed, MUTANTS[mutant].bias).violations


def _title(process: Process) -> str:
    """Returns the name of a process with its number, because a restarted client has the same name as before."""
    return f"{process.name}#{process.number}"


def _sender(cluster: _TracingCluster, evidence: Evidence) -> Callable[[int, Verdict | None], str]:
    """Returns a function that names the sender of the record at an offset. If equal records have several, it names the
    newest.
    """

    def sender(offset: int, _: Verdict | None) -> str:
        sent = evidence.sent.get(evidence.log[offset] or b"")
        return NOBODY if sent is None else _title(cluster.processes[int(sent[2] or 0)])

    return sender


def records_of(
    evidence: Evidence, sender: Callable[[int, Verdict | None], str], first: int = 0
) -> Iterator[TraceEvent]:
    """Yields the records of a log from offset `first` on, with the oracle's verdicts."""
    oracle = oracle_of(evidence)
    if oracle is None:
        return
    for offset in range(oracle.next_offset, len(evidence.log)):
        if offset in evidence.gaps:
            continue
        ms, value = evidence.appended_ms[offset], evidence.log[offset]
        try:
            outcome, reason, group, *_ = oracle.apply(offset, value)
        except OracleStop as stop:
            yield TraceEvent(ms, sender(offset, None), "record", offset, "stop", stop.reason)
            return
        verdict = Verdict(offset, Outcome[outcome.upper()], reason, group or "", None)
        verdict = replace(verdict, record=codec.open_record(value, crc32(oracle.incarnation or b"")))
        text, who = describe(verdict), sender(offset, verdict)
        if offset >= first:
            yield TraceEvent(ms, who, "record", offset, outcome, f"{group}: {text}" if group else text)


def _deliveries(cluster: _TracingCluster) -> Iterator[TraceEvent]:
    for delivery in cluster.evidence.deliveries:
        if not delivery.inherited:
            until = f"until {delivery.end_ms}" if delivery.end_ms >= 0 else "and never ends"
            where = f"{delivery.group}: message {delivery.topic}:{delivery.partition} {delivery.offset}"
            text = f"{where} of claim {delivery.epoch} is handled {until}"
            who = _title(cluster.processes[int(delivery.client)])
            yield TraceEvent(delivery.begin_ms, who, "delivery", delivery.offset, None, text)
