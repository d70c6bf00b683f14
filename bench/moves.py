"""Planned moves in one group, again and again: a third member joins two, then one of the three leaves.

join.py and leave.py show the two halves of this measurement. The first of them to run does it and keeps the result.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.environment import BenchEnvironment
from bench.group_load import LoadGroup, MemberProcess, Span
from bench.group_member import KINDS

CYCLES = {"marshal": 10, "eager": 4, "cooperative": 4, "consumer": 4}  # enough for a median; Kafka's take longer
TINY_KINDS = ("marshal", "eager")
TINY_STEADY_S = 0.7
# Each join or stop is delayed by a random part of this time, so that it falls into any phase of a heartbeat interval.
PHASE_S = 1.0
AFTER_NS = 500_000_000  # for so long after the last change of owners, a gap still counts as caused by it


@dataclass
class Moves:
    """The samples of one contestant. Gaps are in ms over the normal spacing."""

    joins: int = 0
    from_call_s: list[float] = field(default_factory=list)
    from_spawn_s: list[float] = field(default_factory=list)
    join_moved_ms: list[float] = field(default_factory=list)
    join_stayed_ms: list[float] = field(default_factory=list)
    join_noise_ms: list[float] = field(default_factory=list)
    leaves: int = 0
    leave_its_ms: list[float] = field(default_factory=list)
    leave_others_ms: list[float] = field(default_factory=list)
    leave_noise_ms: list[float] = field(default_factory=list)
    tally: dict[str, Any] = field(default_factory=dict)


def measured(environment: BenchEnvironment, tiny: bool) -> dict[str, Moves]:
    """The samples of every contestant, measured once per environment."""
    key = f"moves, {tiny=}"
    if key not in environment.shared:
        kinds = TINY_KINDS if tiny else KINDS
        environment.shared[key] = {
            kind: _measure(environment, kind, 1 if tiny else CYCLES[kind], tiny) for kind in kinds
        }
    found: dict[str, Moves] = environment.shared[key]
    return found


def _measure(environment: BenchEnvironment, kind: str, cycles: int, tiny: bool) -> Moves:
    moves, rng = Moves(), random.Random(kind)
    environment.say(f"join and leave: {kind}, {cycles} times")
    with LoadGroup(environment, kind, steady_s=TINY_STEADY_S if tiny else None) as group:
        group.start_load()
        for _ in range(2):
            group.start()
        for _ in range(cycles):
            before = group.steady(rng.random() * PHASE_S)
            _join(group, group.start(), before, moves)
            before = group.steady(rng.random() * PHASE_S)
            _leave(group, rng.choice(group.members), before, moves)
        moves.tally = group.tally()
    return moves


def _join(group: LoadGroup, joiner: MemberProcess, before: Span, moves: Moves) -> None:
    called = joiner.reported["called"]
    owned = group.owners(before)
    whole = Span(before.begin, group.steady().end)
    now_owned = group.owners(whole)
    first = min(d.ns for p in range(group.partitions) for d in group.within(p, whole) if d.member == joiner.number)
    moves.joins += 1
    moves.from_call_s.append((first - called) / 1e9)
    moves.from_spawn_s.append((first - joiner.spawned_ns) / 1e9)
    window = Span(called, _settled(group, whole, called))
    for partition, owner in owned.items():
        normal = group.normal_ms(partition, before)
        moves.join_noise_ms.append(group.longest_ms(partition, before) - normal)
        if now_owned[partition] == owner:
            moves.join_stayed_ms.append(group.longest_ms(partition, window) - normal)
        else:
            moves.join_moved_ms.append(group.hand_over_ms(partition, whole) - normal)


def _leave(group: LoadGroup, leaver: MemberProcess, before: Span, moves: Moves) -> None:
    owned = group.owners(before)
    group.stop(leaver)
    stopping = leaver.reported["stopping"]
    whole = Span(before.begin, group.steady().end)
    moves.leaves += 1
    window = Span(stopping, _settled(group, whole, stopping))
    for partition, owner in owned.items():
        normal = group.normal_ms(partition, before)
        moves.leave_noise_ms.append(group.longest_ms(partition, before) - normal)
        if owner == leaver.number:
            moves.leave_its_ms.append(group.hand_over_ms(partition, whole) - normal)
        else:
            moves.leave_others_ms.append(group.longest_ms(partition, window) - normal)


def _settled(group: LoadGroup, whole: Span, event: int) -> int:
    """The time (monotonic ns) after which a gap is noise and no longer an effect of the event."""
    last = event
    for partition in range(group.partitions):
        found = group.within(partition, whole)
        last = max([last, *(b.ns for a, b in pairwise(found) if a.member != b.member)])
    return min(last + AFTER_NS, whole.end)
