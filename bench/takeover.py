"""A member is killed (kill -9): how long until other members deliver from its partitions?

Contestants: marshal_py at its defaults (heartbeat interval 2 s), and the same with a witness that ends the session of a
killed member; Kafka's groups, eager (range), cooperative-sticky and KIP-848 (`group.protocol=consumer`), once at their
defaults (session timeout 45 s) and once at 6 s. 6 s is the shortest session timeout that a broker's defaults allow to
classic groups (`group.min.session.timeout.ms`). KIP-848 groups get no less than 45 s by default; the broker's minimum
was lowered for this, which on many clusters only an operator can do.

Measured: three processes share 12 partitions at 1,000 messages per second, and one gets SIGKILL at a random moment of
its heartbeat's phase. Per partition of this member: from its last delivery to the first of the successor. Each delivery
is logged with one system call before the next message is taken, so that the kill hides none. The kills of marshal_py
run first and alone. Kafka's three kinds then run at the same time, which makes no difference to figures of seconds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from confluent_kafka import KafkaException

from bench.environment import BenchEnvironment, Result, percentile, ratio, spread
from bench.group_load import PARTITIONS, PERIOD_S, LoadGroup
from bench.group_member import KAFKA_KINDS
from marshal_py.client.driver.last_wills import KEEP_S

WITNESSED = 'marshal, last_will="process"'
MARSHAL_KILLS = 12
WITNESSED_KILLS = 30
FLOOR_KILLS = 3
DEFAULT_KILLS = 1  # each takes its 45 s
MEMBERS = 3
DEFAULT_SESSION_S = 45.0
FLOOR_SESSION_S = 6.0
FLOOR_HEARTBEAT_S = 1.0  # KIP-848 groups at 6 s only: with their default of 5 s one lost heartbeat would end a member
PATIENCE_S = 30.0  # beyond the session timeout, before a take-over counts as failed
TINY_INTERVAL_S = 1.0
TINY_STEADY_S = 0.7


@dataclass
class Plan:
    """What is done to one group. Times in seconds."""

    label: str
    kind: str
    kills: int
    phase_s: float  # each kill is delayed by a random part of this time
    give_up_s: float
    steady_s: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    lowered: bool = False  # needs a broker that allows so short a session timeout


@dataclass
class Kills:
    """The samples of one group."""

    label: str
    takeover_s: list[float] = field(default_factory=list)
    kills: int = 0
    tally: dict[str, Any] = field(default_factory=dict)


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    done: list[Kills] = []
    notes = ["Goal for marshal at its defaults: median <= 4.2 s, p99 <= 5 s."]
    if tiny:
        batches = [[_marshal(1, TINY_INTERVAL_S, TINY_STEADY_S), _classic("eager", 1, FLOOR_SESSION_S, TINY_STEADY_S)]]
    else:
        batches = [
            [_marshal(MARSHAL_KILLS, 2.0, None)],
            [_witnessed(WITNESSED_KILLS)],
            [
                _classic("eager", FLOOR_KILLS, FLOOR_SESSION_S, None),
                _classic("cooperative", FLOOR_KILLS, FLOOR_SESSION_S, None),
                _lowered(FLOOR_KILLS),
            ],
            [_classic(kind, DEFAULT_KILLS, DEFAULT_SESSION_S, None) for kind in KAFKA_KINDS],
        ]
    for batch in batches:
        environment.say("take-overs: " + "; ".join(f"{plan.label}, {plan.kills} kills" for plan in batch))
        with ThreadPoolExecutor(len(batch)) as pool:
            for plan, kills in zip(batch, pool.map(lambda plan: _measure(environment, plan), batch), strict=True):
                if kills is None:
                    notes.append(f"{plan.label}: not measured, the broker's floor is 45 s and it is not ours to lower")
                else:
                    done.append(kills)
    notes += [beyond_spacing(kills) for kills in done if kills.label == WITNESSED]
    ours = done[0].takeover_s
    rows = [
        [
            kills.label,
            kills.kills,
            len(kills.takeover_s),
            spread(kills.takeover_s),
            percentile(kills.takeover_s, 0.99),
            ratio(kills.takeover_s, ours),
            kills.tally["missing"],
            kills.tally["again"],
            kills.tally["delivered"],
        ]
        for kills in done
    ]
    columns = [
        "contestant",
        "kills",
        "partitions",
        "fail-over, s",
        "p99, s",
        "x marshal",
        "missing",
        "delivered again",
        "messages",
    ]
    return Result("takeover", columns, rows, notes, {kills.label: asdict(kills) for kills in done})


def _marshal(kills: int, interval_s: float, steady_s: float | None) -> Plan:
    options = {"heartbeat_interval_s": interval_s} if interval_s != 2.0 else {}
    label = f"marshal, interval {interval_s:g} s" + ("" if options else " (default)")
    return Plan(label, "marshal", kills, interval_s / 3, 2 * interval_s + PATIENCE_S, steady_s, options=options)


def beyond_spacing(kills: Kills) -> str:
    """Returns the figures of kills with a witness as the README and docs/benchmarks.md give them, with their goals."""
    gaps_ms = [max(0.0, 1000 * (gap_s - PERIOD_S)) for gap_s in kills.takeover_s]
    again = kills.tally["again"] / kills.kills
    kept = KEEP_S * PARTITIONS / MEMBERS / PERIOD_S
    return (
        f"{kills.label}: a gap over the normal spacing is {statistics.median(gaps_ms):.0f} ms, p99 "
        f"{percentile(gaps_ms, 0.99):.0f} ms ({kills.kills} kills; goal: median <= 50 ms, p99 <= 200 ms); {again:.1f} "
        f"messages per kill are delivered again (goal: <= {kept:.0f}, what one member acks in {1000 * KEEP_S:.0f} ms, "
        f"and what was unfinished)."
    )


def _witnessed(kills: int) -> Plan:
    """The defaults, and a witness for each member: nobody waits for an eviction (docs/operations.md)."""
    return Plan(WITNESSED, "marshal", kills, 2.0 / 3, PATIENCE_S, options={"last_will": "process"})


def _classic(kind: str, kills: int, session_s: float, steady_s: float | None) -> Plan:
    default = session_s == DEFAULT_SESSION_S
    settings = {} if default else {"session.timeout.ms": round(session_s * 1000)}
    label = f"{kind}, session {session_s:g} s" + (" (default)" if default else "")
    return Plan(label, kind, kills, 3.0, session_s + PATIENCE_S, steady_s, settings)


def _lowered(kills: int) -> Plan:
    label = f"consumer, session {FLOOR_SESSION_S:g} s (broker's floor lowered)"
    return Plan(label, "consumer", kills, FLOOR_HEARTBEAT_S, FLOOR_SESSION_S + PATIENCE_S, 3.5, lowered=True)


def _lower(environment: BenchEnvironment, group: str) -> bool:
    """Sets the short session timeout for one KIP-848 group. Returns False if the broker does not allow it."""
    wanted = {"consumer.session.timeout.ms": FLOOR_SESSION_S, "consumer.heartbeat.interval.ms": FLOOR_HEARTBEAT_S}
    try:
        environment.configure_group(group, {name: str(round(value_s * 1000)) for name, value_s in wanted.items()})
    except KafkaException:
        return False
    return True


def _measure(environment: BenchEnvironment, plan: Plan) -> Kills | None:
    name = environment.group(plan.kind)
    if plan.lowered and not _lower(environment, name):
        return None
    kills, rng = Kills(plan.label), random.Random(plan.label)
    with LoadGroup(
        environment, plan.kind, steady_s=plan.steady_s, settings=plan.settings, options=plan.options, name=name
    ) as group:
        group.start_load()
        for _ in range(MEMBERS):
            group.start()
        while True:
            kills.takeover_s += _kill(group, plan, rng)
            kills.kills += 1
            if kills.kills == plan.kills:
                break
            group.start()
        kills.tally = group.tally()
    return kills


def _kill(group: LoadGroup, plan: Plan, rng: random.Random) -> list[float]:
    """Kills one member. Returns, for each of its partitions, the seconds without a delivery."""
    span = group.steady(rng.random() * plan.phase_s)
    victim = rng.choice(group.members)
    its = [partition for partition, member in group.owners(span).items() if member == victim.number]
    group.kill(victim)
    killed_ns = time.monotonic_ns()
    group.wait_delivered(killed_ns, its, victim.number, plan.give_up_s)
    found = []
    for partition in its:
        deliveries = group.deliveries[partition]
        last = max(d.ns for d in deliveries if d.member == victim.number)
        found.append((min(d.ns for d in deliveries if d.ns > last) - last) / 1e9)
    return found
