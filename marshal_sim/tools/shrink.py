"""Makes a failing schedule small: fewer clients, partitions, kinds of faults, faults and messages, and a shorter run.

This is delta debugging: one change after another is tried, and kept if the run still violates the same invariant. After
a change all later random numbers mean something else, so each change is tried with a few salts, which give other
numbers. The number of runs is bounded. The result depends on the schedule alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from marshal_sim.cluster.run import Result
from marshal_sim.cluster.scenario import Options
from marshal_sim.tools.schedule import Schedule, run, telling

RUNS_MAX: Final = 300  # about half a minute of small runs
SALTS: Final = 4  # courses that are tried per change
SLACK_MS: Final = 1  # the run ends so long after the violation


class Shrunk(NamedTuple):
    """A schedule that still fails, its result, and how many runs it took to find it."""

    schedule: Schedule
    result: Result
    runs: int


def shrink(schedule: Schedule, on_smaller: Callable[[Schedule], None] = lambda schedule: None) -> Shrunk:
    """Returns a smaller schedule that violates the same invariant; its field `violates` names the invariant.

    `schedule` must fail, or ValueError is raised. `on_smaller` is called with each smaller schedule that is found.
    """
    result = run(schedule)
    if not result.violations:
        raise ValueError(f"seed {schedule.seed} violates nothing: there is nothing to shrink")
    best = schedule._replace(violates=telling(result.violations).invariant)
    runs, again = 1, True
    while again:
        again = False
        for options in _smaller(best.options, result):
            for salt in (best.options.salt, *range(1, SALTS)):
                if runs >= RUNS_MAX:
                    return Shrunk(best, result, runs)
                tried = best._replace(options=options._replace(salt=salt))
                found, runs = run(tried), runs + 1
                if best.violates in {violation.invariant for violation in found.violations}:
                    best, result, again = tried, found, True
                    on_smaller(best)
                    break
            if again:
                break  # begin again with the greatest change
    return Shrunk(best, result, runs)


def _smaller(options: Options, result: Result) -> Iterator[Options]:
    """Yields options that make the run smaller, the greatest change first."""
    scenario = result.scenario
    violation = telling(result.violations)
    for clients in _fewer(scenario.clients):
        yield options._replace(clients=clients)
    for partitions in _fewer(scenario.partitions):
        yield options._replace(partitions=partitions)
    if options.kinds is None:
        yield options._replace(kinds=scenario.kinds)
    for kind in sorted(scenario.kinds):
        yield options._replace(kinds=scenario.kinds - {kind})
    end_ms = int(violation.ms) + SLACK_MS
    if violation.invariant[0] == "S" and violation.ms >= 0 and (options.until_ms is None or end_ms < options.until_ms):
        yield options._replace(until_ms=end_ms * 2 // 3)
        yield options._replace(until_ms=end_ms)
    # Some of the skipped faults may lie after the end by now: trying them again costs a run each.
    count = sum(result.strikes.values()) + len(options.skip)
    struck = [number for number in range(count) if number not in options.skip]
    if len(struck) > 1:
        yield options._replace(skip=options.skip | frozenset(struck[: len(struck) // 2]))
    for number in reversed(struck):
        yield options._replace(skip=options.skip | {number})
    if options.rate is None or options.rate > 2:
        yield options._replace(rate=2 if options.rate is None else options.rate // 2)


def _fewer(number: int) -> Iterator[int]:
    """Yields half of the number, then one less than it."""
    if number > 3:
        yield number // 2
    if number > 1:
        yield number - 1
