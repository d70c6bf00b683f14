"""`simulate(seed, options)`: one run from its seed to its verdict.

A run begins with a safety phase, which has faults. Then everything heals, and progress is demanded: all partitions are
owned, those of an owner that is killed or leaves move to others, and the backlog falls. The judges read only the
evidence that the run leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from random import Random
from typing import Final, NamedTuple

from marshal_sim.cluster.busy_loops import BusyLoop
from marshal_sim.cluster.cluster import Cluster
from marshal_sim.cluster.fault_injector import FaultInjector
from marshal_sim.cluster.scenario import Options, Scenario, draw
from marshal_sim.judge.auditor import Judgement, judge
from marshal_sim.judge.conditions import IDLE_INTERVALS, judge_conditions
from marshal_sim.judge.evidence import Evidence, Violation
from marshal_sim.judge.history import History
from marshal_sim.judge.liveness import OVERFLOW, Demands, Departure, judge_liveness
from marshal_sim.judge.stops import judge_stops

SETTLE_INTERVALS: Final = 8  # after the heal: the longest silence of a client that revives (4), an eviction, a pause
# How long to wait after each of these. A slow client comes last: named as a successor it would keep others waiting.
STEP_INTERVALS: Final = {
    "calls": 12,
    "busy_join": 12,
    "drain": 6,
    "killed": 4,
    "divergence": 9,
    "stuck_reader": 5,
    "left": 4,
    "slow_uplink": 9,
}
HUNG_INTERVALS: Final = 6  # how long a handler that hangs keeps back its partition, and no other one (V15, D4)
PAUSE_INTERVALS: Final = 3  # how long an admin's pause lasts
UPLINK_INTERVALS: Final = 1.5  # of a slow uplink: each sign of life is read back too late to deliver by it (T9)
# How long a client that is as good as dead may still show signs of life. A stuck reader sends the heartbeats of one
# interval (T9). Over a slow uplink come, a third of an interval later at most, also a probe and the two heartbeats of a
# revival, each as late as the uplink is slow (T10).
# A client whose memory was falsified lives until a checkpoint and a heartbeat have shown it.
SIGNS_INTERVALS: Final = {
    "killed": 0.0,
    "left": 0.0,
    "divergence": 6.0,
    "stuck_reader": 1.0,
    "slow_uplink": 4 / 3 + 3 * UPLINK_INTERVALS,
}
REST_INTERVALS: Final = 1.5  # before a clean stop: what moves afterwards moves because of it (V11)
LOOKS_PER_INTERVAL: Final = 4  # how often a run checks whether it may continue earlier
V6_KINDS: Final = frozenset(
    {
        "outage",
        "outage_writes",
        "clock_rate",
        "broker_clock",
        "onlooker",
        "logs",
        "genesis_race",
        "grow_logs",
        "stuck_reader",
        "slow_uplink",
        "divergence",
        "drain",
        "busy_join",
        "beyond",
    }
)


class Result(NamedTuple):
    """The result of one seed."""

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
    counted: dict[str, int]  # allowed, only counted: S3 (X3), S4 (stale writes), S5 (clones)
    strikes: dict[str, int]
    endings: dict[str, int]
    advisories: dict[str, int]
    scenario: Scenario


def simulate(
    seed: int, options: Options | None = None, environment: Callable[[Scenario, Random], Cluster] = Cluster
) -> Result:
    """Runs one seed. The same seed and options give the same Result on every machine.

    `environment` makes the cluster: a class that watches more may be given, but it must not change the run.
    """
    options = options or Options()
    rng = Random(seed if not options.salt else f"{seed} {options.salt}")
    scenario = draw(rng, options)
    cluster = environment(scenario, rng)
    injector = FaultInjector(cluster)
    injector.begin()
    crashed: list[Violation] = []
    demands: Demands | None = None
    try:
        demands = _run(cluster, injector)
    except BusyLoop as error:
        crashed.append(Violation("V10", cluster.now_ms, -1, str(error)))
    except AssertionError as error:
        crashed.append(Violation("crash", cluster.now_ms, -1, f"assertion: {error}"))
    except Exception as error:  # any exception of the protocol is a finding of this seed, not the end of the search
        crashed.append(Violation("crash", cluster.now_ms, -1, f"{type(error).__name__}: {error}"))
    evidence = cluster.closed + cluster.close()
    found, judgements = crashed, [judge(log) for log in evidence] if options.audit else []
    for at, judgement in enumerate(judgements):
        found = found + judgement.violations
        if at >= len(cluster.closed) and demands is not None and not scenario.calm:
            asked = _asked_of(judgement, demands, cluster)
            found += judge_liveness(asked, judgement.history) + judge_stops(asked, judgement.history)
            found += judge_conditions(asked, judgement.history)
    counted: dict[str, int] = {}
    for name in judgements[0].counted if judgements else ():
        counted[name] = sum(judgement.counted[name] for judgement in judgements)
    takeovers, handovers = moves_between(judgement.history for judgement in judgements)
    result = Result(
        seed,
        "violation" if found else "ok",
        takeovers,
        handovers,
        sum(map(_deliveries, evidence)),
        cluster.network_faults.faults + sum(injector.strikes.values()),
        cluster.events,
        cluster.now_ms / 3_600_000,
        cluster.trace_hash(),
        tuple(found),
        counted,
        injector.strikes,
        cluster.endings,
        cluster.advisories,
        scenario,
    )
    cluster.end_tasks()
    return result


def _asked_of(judgement: Judgement, demands: Demands, cluster: Cluster) -> Demands:
    """Returns the part of `demands` that concerns the groups of one log, without groups that no client can read any
    more.
    """
    groups = set(judgement.history.evidence.groups) - cluster.damaged
    topics = {group: topics for group, topics in demands.topics.items() if group in groups}
    return demands._replace(topics=topics)


def _run(cluster: Cluster, injector: FaultInjector) -> Demands | None:
    scenario, interval_ms = cluster.scenario, cluster.scenario.interval_ms
    if scenario.until_ms is not None and scenario.until_ms < scenario.safety_ms:
        cluster.run_until(scenario.until_ms)
        return None
    cluster.run_until(scenario.safety_ms)
    injector.heal()
    healed_ms = cluster.now_ms
    if scenario.calm:
        return Demands(interval_ms, healed_ms, healed_ms, (), (), {}, True)
    cluster.run_until(healed_ms + interval_ms)  # by now the last delayed record is in the log
    # A pause from a dump may have to be waited out again: faults restart waits (T3).
    settled = _go_on(cluster, SETTLE_INTERVALS * interval_ms + 5_000 + scenario.pause_ms, cluster.settled)
    settled_ms = cluster.now_ms if settled else None
    departures: list[Departure] = []
    pauses: list[tuple[str, int]] = []
    for how, intervals in STEP_INTERVALS.items():
        if how in ("killed", "left") or how in scenario.kinds:
            if how == "calls":
                injector.hang_one()
                cluster.run_until(cluster.now_ms + HUNG_INTERVALS * interval_ms)
            elif how == "busy_join":
                injector.hang_one()  # A3: no handler keeps a joining client waiting beyond its limit
                cluster.run_until(cluster.now_ms + interval_ms)
                injector.join_all()
            elif how == "drain":
                injector.hang_one()  # T12: no handler holds a pause open
                cluster.run_until(cluster.now_ms + interval_ms)
                pauses = [(group.name, cluster.now_ms) for group in scenario.groups]
                injector.pause_all(PAUSE_INTERVALS * interval_ms)
            elif how == "left":
                cluster.run_until(cluster.now_ms + int(REST_INTERVALS * interval_ms))
                departures += _depart(cluster, how)
                cluster.run_until(cluster.now_ms + interval_ms)
            else:
                departures += _depart(cluster, how)
            cluster.producing = cluster.producing and how != "left"  # from then on the backlog must fall (V3)
            enough = cluster.settled if cluster.producing else cluster.finished
            if how in ("busy_join", "drain", "divergence"):
                enough = _never  # ownership does not show what is waited for
            _go_on(cluster, intervals * interval_ms + 2_000, enough)
    if any(group.policy == OVERFLOW for group in scenario.groups):
        cluster.run_until(cluster.now_ms + IDLE_INTERVALS * interval_ms)
    for process in cluster.processes:
        process.world.check()
    topics = {group.name: group.topics for group in scenario.groups}
    calm = not (set(scenario.kinds) - V6_KINDS) and not scenario.mixed  # T2 counts in the waiter's own interval
    return Demands(
        interval_ms,
        healed_ms,
        cluster.now_ms,
        tuple(departures),
        tuple(sorted(cluster.broker.topics)),
        topics,
        calm,
        settled_ms,
        tuple(pauses),
        fails=frozenset(topics) if scenario.on_topic_recreated == "fail" else frozenset(),
    )


def _never() -> bool:
    return False


def _go_on(cluster: Cluster, most_ms: int, enough: Callable[[], bool]) -> bool:
    """Lets the cluster run until `enough` returns True; returns False if it did not within `most_ms`."""
    end_ms = cluster.now_ms + most_ms
    while cluster.now_ms < end_ms:
        cluster.run_until(min(end_ms, cluster.now_ms + cluster.scenario.interval_ms // LOOKS_PER_INTERVAL))
        if enough():
            return True
    return False


def _depart(cluster: Cluster, how: str) -> list[Departure]:
    """Makes one client leave, or go in another way (`how`). Returns its departure in a list, or [] if no client can go.

    The client must own something, and must not be alone in its group.
    """
    for client in cluster.staying():
        others = [other for other in cluster.staying() if other.group == client.group]
        member = client.member
        if how == "divergence" and all(other.options.client_id == client.options.client_id for other in others):
            continue  # G5: digests of the own client id are not compared
        if len(others) > 1 and member is not None and member.session >= 0 and member.claims:
            interval_ms = member.options.interval_ms
            silent_ms = cluster.now_ms + int(SIGNS_INTERVALS[how] * interval_ms)
            gone = Departure(cluster.now_ms, client.group, member.session, interval_ms, how, silent_ms)
            if how == "left":
                client.leave(0)
            elif how == "killed":
                cluster.kill(client)
            elif how == "divergence":
                cluster.falsify(client)
            elif how == "stuck_reader":
                client.lagging = True
            else:
                client.uplink_ms = int(UPLINK_INTERVALS * interval_ms)
            return [gone]
    return []


def moves_between(histories: Iterable[History]) -> tuple[int, int]:
    """Counts take-overs, which are claims after an eviction, and hand-overs, which are claims after another session's
    release.
    """
    takeovers = handovers = 0
    for history in histories:
        for old, new in (pair for claims in history.by_key.values() for pair in pairwise(claims)):
            if new.epoch >= history.evidence.inherited:  # the others are a dump's, not this run's
                takeovers += old.ended_by == "Evict"
                handovers += old.ended_by in ("ReleasingPartition", "Leave") and old.session != new.session
    return takeovers, handovers


def _deliveries(evidence: Evidence) -> int:
    return sum(not delivery.inherited for delivery in evidence.deliveries)
