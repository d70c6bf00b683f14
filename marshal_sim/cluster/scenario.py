"""The scenario of a run: its clients, partitions, groups, rates and faults, drawn from the seed.

`Options` are the caller's wishes (None: the seed decides); `Scenario` is what was decided. Nothing runs here.
"""

from __future__ import annotations

from random import Random
from typing import Final, NamedTuple

from marshal_py.protocol.fold.policies import EXPLICIT
from marshal_py.protocol.wire.codec import VERIFIES
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, AT_MOST_ONCE
from marshal_sim.cluster import dump_state
from marshal_sim.cluster.dump_state import DumpState
from marshal_sim.cluster.faults import draw_kinds, spread

INTERVALS_MS: Final = (1_000, 2_000, 2_000, 5_000, 10_000, 60_000)
# The faulty part of a run. Short ones are cheap, so that there are many; an admin's pause needs a long one.
SAFETY_INTERVALS: Final = (8, 8, 12, 24)
USUAL_INTERVALS: Final = 20  # where the caller names the faults: room for some take-overs and their echoes
AIO_INTERVAL_MS_MAX: Final = 2_000  # tasks wait in slices of some ms: a longer run would take long
FEW_CLIENTS: Final = 5
FEW_PARTITIONS: Final = 8
CLIENTS_MAX: Final = 50
PARTITIONS_MAX: Final = 64
MANY_PARTITIONS: Final = 0.03  # how often a run has more than a few
CROWD: Final = 0.006  # how often a run has many clients, who read each other's records
BY_THEMSELVES: Final = 0.7  # how often groups go on by themselves where a topic was created again
TOPICS: Final = ("orders", "bills")
# Faults that take away what a run inherits from a dump, or come before anything can be inherited.
NOT_INHERITED: Final = frozenset(
    {"logs", "genesis_race", "recreate", "recreate_topic", "lost_tail", "truncation", "compaction"}
)
# A clone of a machine has what waits in lanes; the simulated one begins its calls again, and would have none of it.
NOT_IN_LANES: Final = frozenset({"twin"})
NOT_IN_TASKS: Final = frozenset({"twin"})  # nor can tasks be copied
NOT_AT_LOCKS: Final = frozenset({"twin"})  # nor of what a thread has taken that is stopped where it has left a lock
# Faults after which a group's settings, or the numbers of its members, no longer cover all partitions.
NOT_RESTRICTED: Final = frozenset({"grow", "shrink"})


class Options(NamedTuple):
    """Holds the caller's wishes. None leaves a choice to the seed."""

    clients: int | None = None
    partitions: int | None = None
    interval_ms: int | None = None
    mode: int | None = None
    kinds: frozenset[str] | None = None  # the kinds of faults
    intervals: int | None = None  # length of the safety phase
    rate: int | None = None  # productions per interval
    calm: bool = False  # no faults, few messages, no process killed: for measuring
    audit: bool = True
    witnesses: int = 0  # 1: clients have witnesses that publish their last wills (T19)
    answers: int = 0  # 1: handlers give messages back and end them, and there is a dead-letter topic (D14, D15)
    calls: int = 0  # 1: users make all other calls, too, from other threads, which may be stopped alone
    turns: int = 0  # 1: `calls`, which are cancelled at any of their waits, and stop where they leave a lock
    aio: int = 0  # 1: most consumers are AsyncConsumers
    lanes: int = 0  # 1: half of the consumers handle messages by `process`
    behind: int = 0  # 1: groups are greedy, and consumers release partitions on which they fall behind (D16)
    queries: int = 0  # so many of the first clients are streaming queries, in at-least-once mode
    policy: str = ""  # of every group
    # Set by shrink.py to make a failing run small:
    salt: int = 0  # another course of all chance
    skip: frozenset[int] = frozenset()  # faults that do not happen, by their number
    until_ms: int | None = None  # the run ends here, and no progress is demanded
    # The dump that the run begins with (dump_state.py):
    dump: str = ""  # a file
    group: str = ""  # if set, only this group of the dump


class GroupPlan(NamedTuple):
    """Describes one group of the run."""

    name: str
    mode: int
    topics: tuple[str, ...]
    policy: str


class Scenario(NamedTuple):
    """Holds everything about a run that was decided before it begins."""

    groups: tuple[GroupPlan, ...]
    clients: int
    partitions: int
    interval_ms: int  # the longest heartbeat interval of a client
    mixed: bool  # clients choose among this interval and half of it
    kinds: frozenset[str]
    safety_ms: int
    produce_gap_ms: int
    handler_ms: int
    concurrency: int
    start_latest: bool
    calm: bool
    logs: int = 1
    skip: frozenset[int] = frozenset()
    until_ms: int | None = None
    dump: str = ""
    group: str = ""
    queries: int = 0
    pause_ms: int = 0  # the longest pause with which the run begins
    on_topic_recreated: str = "fail"


def _safety_intervals(rng: Random, options: Options, clients: int) -> int:
    if options.intervals is not None:
        return options.intervals
    drawn = SAFETY_INTERVALS[int(rng.random() * len(SAFETY_INTERVALS))]
    return USUAL_INTERVALS if options.kinds is not None else SAFETY_INTERVALS[0] if clients > FEW_CLIENTS else drawn


def draw(rng: Random, options: Options) -> Scenario:
    kinds = options.kinds if options.kinds is not None else frozenset() if options.calm else draw_kinds(rng)
    kinds = kinds | {"witness"} if options.witnesses else kinds
    kinds = kinds | {"answers"} if options.answers else kinds
    kinds = kinds | {"calls"} if options.calls or options.turns else kinds
    kinds = kinds | {"cancels", "locks"} if options.turns else kinds
    kinds = kinds - NOT_AT_LOCKS if "locks" in kinds else kinds
    kinds = (kinds | {"lanes"}) - NOT_IN_LANES if options.lanes or "lanes" in kinds else kinds
    kinds = (kinds | {"aio", "calls"}) - NOT_IN_TASKS if options.aio or "aio" in kinds else kinds
    kinds = kinds | {"behind"} if options.behind else kinds
    kinds = kinds if VERIFIES else kinds - {"keys"}
    interval_ms = options.interval_ms or INTERVALS_MS[int(rng.random() * len(INTERVALS_MS))]
    interval_ms = min(interval_ms, AIO_INTERVAL_MS_MAX) if "aio" in kinds else interval_ms
    # Bugs need few actors, and small runs are fast; of the rest each order of magnitude is as likely as the others.
    partitions = (
        spread(rng, FEW_PARTITIONS, PARTITIONS_MAX)
        if rng.random() < MANY_PARTITIONS
        else 1 + int(rng.random() * FEW_PARTITIONS)
    )
    clients = spread(rng, FEW_CLIENTS, CLIENTS_MAX) if rng.random() < CROWD else 1 + int(rng.random() * FEW_CLIENTS)
    partitions, clients = options.partitions or partitions, options.clients or clients
    first_mode = AT_LEAST_ONCE if options.queries or options.policy in EXPLICIT else options.mode
    first_mode = first_mode or (AT_LEAST_ONCE if rng.random() < 0.5 else AT_MOST_ONCE)
    policy = "greedy" if rng.random() < 0.2 or "behind" in kinds else "balanced"
    groups = [GroupPlan("billing", first_mode, TOPICS[:1], policy)]
    if not options.calm and clients > 2 and rng.random() < 0.25:
        other = AT_LEAST_ONCE + AT_MOST_ONCE - first_mode if options.mode is None else first_mode
        groups.append(GroupPlan("audit", other, TOPICS[: 1 + int(rng.random() * 2)], "balanced"))
    per_interval = options.rate or 2 + int(rng.random() * 10)
    produce_gap_ms = interval_ms if options.calm else interval_ms // per_interval
    scenario = Scenario(
        groups=tuple(groups),
        clients=clients,
        partitions=partitions,
        interval_ms=interval_ms,
        mixed=not options.calm and interval_ms >= 2_000 and rng.random() < 0.3,
        kinds=kinds,
        safety_ms=interval_ms * _safety_intervals(rng, options, clients),
        produce_gap_ms=produce_gap_ms,
        handler_ms=1 + int(rng.random() * min(200, produce_gap_ms // 4)),  # one handler keeps up with all messages
        concurrency=1 + int(rng.random() * 4),
        start_latest=rng.random() < 0.2,
        calm=options.calm,
        logs=2 + int(rng.random() * 3) if "logs" in kinds else 1,
        skip=options.skip,
        until_ms=options.until_ms,
        queries=options.queries,
    )
    if "recreate_topic" in kinds and rng.random() < BY_THEMSELVES:
        scenario = scenario._replace(on_topic_recreated="earliest")
    if "create_race" in kinds:
        scenario = scenario._replace(kinds=kinds - NOT_RESTRICTED)
    if options.policy:
        groups = [group._replace(policy=options.policy) for group in groups]
        if options.policy in EXPLICIT:
            groups = [group._replace(mode=AT_LEAST_ONCE) for group in groups]
        scenario = scenario._replace(groups=tuple(groups), kinds=kinds - NOT_RESTRICTED)
    return _from_dump(scenario, options, dump_state.read(options.dump, options.group)) if options.dump else scenario


def _from_dump(scenario: Scenario, options: Options, past: DumpState) -> Scenario:
    """Returns the scenario with the groups, topics and logs of a dump. The run is long enough to outlast the dump's
    sessions.
    """
    interval_ms = max(scenario.interval_ms, past.interval_ms)
    groups = tuple(GroupPlan(group.name, group.mode, group.topics, scenario.groups[0].policy) for group in past.groups)
    return scenario._replace(
        groups=groups,
        clients=options.clients or max(scenario.clients, len(groups)),
        partitions=1,
        interval_ms=interval_ms,
        safety_ms=scenario.safety_ms * interval_ms // scenario.interval_ms,
        produce_gap_ms=scenario.produce_gap_ms * interval_ms // scenario.interval_ms,
        logs=past.partitions,
        kinds=scenario.kinds - NOT_INHERITED,
        dump=options.dump,
        group=options.group,
        pause_ms=past.pause_ms,
    )
