"""Planned moves of one group: a third member joins two, then one of the three leaves, again and again.

join.py and leave.py show the two halves of one and the same measurement; whichever is run first pays for it.
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
TINY_HOLD_S = 0.7
# The moment of a join or a stop is drawn from this time, so that it meets every phase of the protocols' own clocks.
PHASE_S = 1.0
AFTER_NS = 500_000_000  # how long after the last change of owners gaps still count to it


@dataclass
class Moves:
    """Samples of one contestant. Gaps in ms over the normal spacing."""

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
    """The samples of every contestant; measured once per stand."""
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
    with LoadGroup(environment, kind, hold_s=TINY_HOLD_S if tiny else None) as crew:
        crew.feed()
        for _ in range(2):
            crew.start()
        for _ in range(cycles):
            before = crew.steady(rng.random() * PHASE_S)
            _join(crew, crew.start(), before, moves)
            before = crew.steady(rng.random() * PHASE_S)
            _leave(crew, rng.choice(crew.members), before, moves)
        moves.tally = crew.tally()
    return moves


def _join(crew: LoadGroup, joiner: MemberProcess, before: Span, moves: Moves) -> None:
    called = joiner.said["called"]
    owned = crew.owners(before)
    whole = Span(before.begin, crew.steady().end)
    now_owned = crew.owners(whole)
    first = min(d.ns for p in range(crew.partitions) for d in crew.within(p, whole) if d.member == joiner.number)
    moves.joins += 1
    moves.from_call_s.append((first - called) / 1e9)
    moves.from_spawn_s.append((first - joiner.spawned_ns) / 1e9)
    window = Span(called, _settled(crew, whole, called))
    for partition, owner in owned.items():
        normal = crew.normal_ms(partition, before)
        moves.join_noise_ms.append(crew.longest_ms(partition, before) - normal)
        if now_owned[partition] == owner:
            moves.join_stayed_ms.append(crew.longest_ms(partition, window) - normal)
        else:
            moves.join_moved_ms.append(crew.hand_over_ms(partition, whole) - normal)


def _leave(crew: LoadGroup, leaver: MemberProcess, before: Span, moves: Moves) -> None:
    owned = crew.owners(before)
    crew.stop(leaver)
    stopping = leaver.said["stopping"]
    whole = Span(before.begin, crew.steady().end)
    moves.leaves += 1
    window = Span(stopping, _settled(crew, whole, stopping))
    for partition, owner in owned.items():
        normal = crew.normal_ms(partition, before)
        moves.leave_noise_ms.append(crew.longest_ms(partition, before) - normal)
        if owner == leaver.number:
            moves.leave_its_ms.append(crew.hand_over_ms(partition, whole) - normal)
        else:
            moves.leave_others_ms.append(crew.longest_ms(partition, window) - normal)


def _settled(crew: LoadGroup, whole: Span, event: int) -> int:
    """When the last change of owners was over: beyond it a gap is noise and not the event's."""
    last = event
    for partition in range(crew.partitions):
        found = crew.within(partition, whole)
        last = max([last, *(b.ns for a, b in pairwise(found) if a.member != b.member)])
    return min(last + AFTER_NS, whole.end)
