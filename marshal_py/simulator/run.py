"""`simulate(seed, options)`: one run from its seed to its verdict.

A safety phase with faults; then everything heals and progress is demanded: all is owned, a killed owner's partitions
move, a leaver's partitions move, the backlog falls. The judges read only what the run left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Final, NamedTuple

from marshal_py.simulator.auditor import Evidence, Judgement, Violation, judge
from marshal_py.simulator.auditor_progress import Demands, Departure, judge_progress
from marshal_py.simulator.scenario import Options, Scenario, draw
from marshal_py.simulator.strikes import AdminCluster, Striker

SETTLE_INTERVALS: Final = 8  # after the heal: the longest silence of a client that revives (4), an eviction, a pause
STEP_INTERVALS: Final = 4  # after a kill or a leave
V6_KINDS: Final = frozenset({"outage", "outage_writes", "clock_rate"})


class Result(NamedTuple):
    """What a seed gave."""

    seed: int
    verdict: str  # ok, violation
    takeovers: int
    handovers: int
    deliveries: int
    faults: int
    events: int
    simulated_hours: float
    trace_hash: str
    violations: tuple[Violation, ...]
    counted: dict[str, int]  # what is counted, not failed: S3 (X3), S4 (stale writes), S5 (cloned memory)
    strikes: dict[str, int]
    endings: dict[str, int]
    advisories: dict[str, int]
    scenario: Scenario


def simulate(seed: int, options: Options | None = None,
             stage: Callable[[Scenario, Random], AdminCluster] = AdminCluster) -> Result:  # fmt: skip
    """Runs one seed. The same seed and options give the same Result on every machine; a `stage` may only watch."""
    options = options or Options()
    rng = Random(seed)
    scenario = draw(rng, options)
    cluster = stage(scenario, rng)
    striker = Striker(cluster)
    striker.begin()
    crashed: list[Violation] = []
    demands: Demands | None = None
    try:
        demands = _run(cluster, striker)
    except AssertionError as error:
        crashed.append(Violation("crash", cluster.now_ms, -1, f"assertion: {error}"))
    except Exception as error:  # any exception of the heart is a finding of this seed, not the end of the search
        crashed.append(Violation("crash", cluster.now_ms, -1, f"{type(error).__name__}: {error}"))
    evidence = cluster.close()
    found, judgement = crashed, None
    if options.audit:
        judgement = judge(evidence)
        found = crashed + judgement.violations
        if demands is not None and not scenario.calm:
            found += judge_progress(demands, judgement.history)
    takeovers, handovers = _moves(judgement)
    return Result(
        seed, "violation" if found else "ok", takeovers, handovers, _deliveries(evidence),
        cluster.weather.faults + sum(striker.strikes.values()), cluster.events, cluster.now_ms / 3_600_000,
        cluster.trace_hash(), tuple(found), judgement.counted if judgement else {}, striker.strikes,
        cluster.endings, cluster.advisories, scenario,
    )  # fmt: skip


def _run(cluster: AdminCluster, striker: Striker) -> Demands:
    scenario, interval_ms = cluster.scenario, cluster.scenario.interval_ms
    cluster.run_until(scenario.safety_ms)
    striker.heal()
    healed_ms, faults_before = cluster.now_ms, len(cluster.broker.log)
    if scenario.calm:
        return Demands(scenario.kinds, interval_ms, healed_ms, healed_ms, (), (), {}, -1, True)
    cluster.run_until(healed_ms + SETTLE_INTERVALS * interval_ms + 5_000)
    departures: list[Departure] = []
    for clean in (False, True):
        departures += _depart(cluster, clean)
        if clean:
            cluster.producing = False
        cluster.run_until(cluster.now_ms + STEP_INTERVALS * interval_ms + 2_000)
    for process in cluster.processes:
        process.world.check()
    topics = {group.name: group.topics for group in scenario.groups}
    calm = not (set(scenario.kinds) - V6_KINDS) and not scenario.mixed  # T2 counts in the waiter's own interval
    return Demands(scenario.kinds, interval_ms, healed_ms, cluster.now_ms, tuple(departures),
                   tuple(sorted(cluster.broker.topics)), topics, faults_before, calm)  # fmt: skip


def _depart(cluster: AdminCluster, clean: bool) -> list[Departure]:
    """One client that is not alone in its group and owns something goes, with or without a word."""
    for client in cluster.staying():
        others = [other for other in cluster.staying() if other.group == client.group]
        member = client.member
        if len(others) > 1 and member is not None and member.session >= 0 and member.claims:
            gone = Departure(cluster.now_ms, client.group, member.session, member.options.interval_ms, clean)
            if clean:
                client.leave(0)
            else:
                cluster.kill(client)
            return [gone]
    return []


def _moves(judgement: Judgement | None) -> tuple[int, int]:
    """Take-overs and hand-overs: claims that follow an eviction, and those that follow a release to another session."""
    takeovers = handovers = 0
    for tenures in judgement.history.by_key.values() if judgement else ():
        for old, new in pairwise(tenures):
            takeovers += old.ended_by == "Evict"
            handovers += old.ended_by in ("ReleasingPartition", "Leave") and old.session != new.session
    return takeovers, handovers


def _deliveries(evidence: Evidence) -> int:
    return sum(not delivery.inherited for delivery in evidence.deliveries)
