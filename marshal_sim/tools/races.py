"""The measurement behind `python -m bench races`: how fast the shipped protocol code races in simulated clusters.

Seeds run in their order, in as many processes as the caller asks for. Every CALM_EVERY-th seed runs a second time
without faults. Results are taken in the order of the seeds, too, so the same seeds give the same hash on any machine.
Rates are per CPU time of the runs, so that other work on the machine changes them little.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from hashlib import sha256
from itertools import count
from multiprocessing import get_context
from typing import Final, NamedTuple

from marshal_sim.cluster.run import simulate
from marshal_sim.cluster.scenario import Options
from marshal_sim.tools.sweep import leave_interrupts_to_the_parent

CALM_EVERY: Final = 8  # a calm run simulates an hour; at this rate they take a quarter of the time
CALM: Final = Options(clients=5, partitions=16, interval_ms=60_000, intervals=60, calm=True)
AHEAD: Final = 4  # runs per process that are handed out before their turn: none waits, and little is thrown away


class Task(NamedTuple):
    seed: int
    calm: bool


class TimedRun(NamedTuple):
    """The counts of one run, and the CPU time that it took."""

    task: Task
    cpu_s: float
    events: int
    simulated_hours: float
    races: int
    violations: int
    trace_hash: str


class Rates(NamedTuple):
    """The rates over all runs of one kind: with faults, or calm."""

    runs: int
    cpu_s: float
    events_per_cpu_s: float
    simulated_hours_per_cpu_hour: float
    races_per_cpu_s: float  # partitions that another member claimed, by a take-over or a hand-over


class Races(NamedTuple):
    """The measured rates over all runs."""

    complete: bool  # False: stopped by Ctrl-C; what is here was run all the same
    processes: int
    seconds: float
    seeds: int
    seeds_per_minute: float
    races_per_s: float  # of all processes together
    violations: int
    runs: int
    trace_hash: str  # over `runs` runs in their order: as many of them give the same hash everywhere
    faulty: Rates
    calm: Rates


def tasks(seeds: range | None) -> Iterator[Task]:
    """Yields a task for each seed, and for every CALM_EVERY-th one a calm run as well. With None, seeds are counted
    from 0 on.
    """
    for number, seed in enumerate(count() if seeds is None else seeds):
        yield Task(seed, False)
        if number % CALM_EVERY == 0:
            yield Task(seed, True)


def measure(
    seeds: range | None, seconds: float | None, processes: int, on_progress: Callable[[int, float], None]
) -> Races:
    """Runs these seeds, or as many runs as begin within `seconds`, and returns the rates over the finished runs.

    `on_progress` is called after each run with the number of runs and the seconds so far. Ctrl-C ends it early.
    """
    began, done, complete = time.monotonic(), [], True
    end = None if seconds is None else began + seconds
    running = _timed_runs(tasks(seeds), end, processes)
    try:
        for timed in running:
            done.append(timed)
            on_progress(len(done), time.monotonic() - began)
    except KeyboardInterrupt:
        complete = False
    finally:
        running.close()
    return _summed(done, complete, processes, time.monotonic() - began)


def run(task: Task) -> TimedRun:
    began = time.process_time()
    result = simulate(task.seed, CALM if task.calm else None)
    return TimedRun(
        task,
        time.process_time() - began,
        result.events,
        result.simulated_hours,
        result.takeovers + result.handovers,
        len(result.violations),
        result.trace_hash,
    )


def _timed_runs(wanted: Iterator[Task], end: float | None, processes: int) -> Generator[TimedRun, None, None]:
    """Runs each task in one of the processes and yields the results in the order of the tasks. No run starts after
    `end`, but there is at least one.
    """
    if processes == 1:
        for task in wanted:
            yield run(task)
            if end is not None and time.monotonic() >= end:
                return
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), leave_interrupts_to_the_parent)
    pending: deque[Future[TimedRun]] = deque()
    try:
        for task in wanted:
            pending.append(pool.submit(run, task))
            if len(pending) < AHEAD * processes:
                continue
            yield pending.popleft().result()
            if end is not None and time.monotonic() >= end:
                break
        while pending and (end is None or pending[0].running() or pending[0].done()):
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _summed(done: list[TimedRun], complete: bool, processes: int, took_s: float) -> Races:
    traces = sha256()
    for timed in done:
        traces.update(f"{timed.task.seed}{'c' if timed.task.calm else ''}:{timed.trace_hash}\n".encode())
    faulty = [timed for timed in done if not timed.task.calm]
    races = sum(timed.races for timed in done)
    return Races(
        complete,
        processes,
        round(took_s, 2),
        len(faulty),
        round(len(faulty) * 60 / took_s, 1),
        round(races / took_s, 1),
        sum(timed.violations for timed in done),
        len(done),
        traces.hexdigest(),
        _rates(faulty),
        _rates([timed for timed in done if timed.task.calm]),
    )


def _rates(done: list[TimedRun]) -> Rates:
    cpu_s = sum(timed.cpu_s for timed in done)
    events, hours, races = (
        sum(getattr(timed, name) for timed in done) for name in ("events", "simulated_hours", "races")
    )
    per = 1 / cpu_s if cpu_s else 0.0
    return Rates(len(done), round(cpu_s, 2), round(events * per), round(hours * 3_600 * per), round(races * per, 1))
