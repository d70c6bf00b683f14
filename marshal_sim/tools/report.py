"""The page of one run: each group's timeline (history/picture.py) with faults and broken promises as marks, and
in words what the run was, what it broke, and how long take-overs took.

The timelines come from the raw logs, folded by the code as it is shipped, also where a mutant ran.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from marshal_py.errors import CoordinationError
from marshal_py.history.picture import THE_GROUP, Mark, Picture, PictureReader
from marshal_py.history.picture import page as timeline_page
from marshal_py.log.replay import Placed, beginning, root_among
from marshal_sim.cluster.run import Result
from marshal_sim.judge.auditor import judge
from marshal_sim.judge.evidence import Evidence
from marshal_sim.tools.sweep import TraceEvent


def page(
    result: Result,
    trace: Sequence[TraceEvent],
    logs: Sequence[Evidence],
    again: str,
    takeovers: Sequence[float],
    seeds: str,
) -> str:
    """Returns the HTML page of a run.

    `again` is the command that repeats the run. `takeovers` has how long take-overs took, in intervals, over the runs
    that `seeds` describes.
    """
    end_ms = max([round(result.simulated_hours * 3_600_000), 1])
    notes = [f"Again: {again}"]
    notes += [f"{found.invariant} at {found.ms} ms: {found.text}" for found in result.violations]
    notes.append(
        f"{result.scenario.clients} clients, {result.scenario.partitions} partitions, {result.takeovers} take-overs, "
        f"{result.handovers} hand-overs, {result.deliveries} deliveries, {result.faults} faults, {end_ms / 1000:.0f} "
        f"simulated seconds"
    )
    notes.append(
        f"Take-overs of {seeds}, from the last accepted sign of life of the old owner to the claim of the new one, in "
        f"intervals: {_spread(takeovers)}"
    )
    marks = [Mark(THE_GROUP, "fault", round(event.ms), None, event.text) for event in trace if event.what == "fault"]
    marks += [
        Mark(THE_GROUP, "violation", round(found.ms), None, str(found)) for found in result.violations if found.ms >= 0
    ]
    pictures = []
    for log in logs:
        for group in log.groups:
            picture, stopped = _picture(log, group, end_ms, marks)
            pictures += [picture] if picture is not None and picture.lanes else []
            notes += [f"group {group!r}: {stopped}"] if stopped else []
    return timeline_page(f"marshal: seed {result.seed}, {result.verdict}", pictures, notes)


def _picture(log: Evidence, group: str, end_ms: int, marks: Iterable[Mark]) -> tuple[Picture | None, str]:
    """Returns the picture of a group, and why the log could not be read to its end, or ""."""
    values: list[Placed] = [(at, log.log[at]) for at in range(log.first, len(log.log)) if at not in log.gaps]
    reader = None
    try:
        root = root_among(0, [(0, log.root)]) if log.root else root_among(log.first, values)
        if root is None:
            return None, "its log has no beginning"
        world = beginning(log.number, log.first, root, values).world()
        reader = PictureReader(world, group, 0, max(end_ms, *map(round, log.appended_ms)))
        for offset, value in values:
            if offset >= world.next_offset:
                reader.read(offset, round(log.appended_ms[offset]), value)
    except CoordinationError as error:
        return None if reader is None else reader.finish(clock="run", marks=marks), f"its log ends early: {error}"
    return reader.finish(clock="run", marks=marks), ""


def _spread(takeovers: Sequence[float]) -> str:
    """Returns how many take-overs there were, and how many of them took how long."""
    halves = sorted(Counter(math.floor(took * 2) for took in takeovers).items())
    return "; ".join(
        [f"{len(takeovers)} in all", *(f"{at / 2:g} to {at / 2 + 0.5:g}: {count}" for at, count in halves)]
    )


def takeover_times(logs: Iterable[Evidence], interval_ms: int) -> list[float]:
    """Returns how long each take-over took, from the owner's last sign of life to the next claim, in intervals."""
    times = []
    for log in logs:
        history = judge(log).history
        for claims in history.by_key.values():
            for old, new in pairwise(claims):
                if old.ended_by == "Evict":
                    signs = history.sessions[old.key[0], old.session].extensions
                    times.append((new.ms - log.appended_ms[signs[-1].offset]) / interval_ms)
    return times
