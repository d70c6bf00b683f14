"""How fast do simulated clusters race, on the shipped protocol code?

No broker and no contestant: the simulator runs in one process, over the same seeds each time, with faults (0 to SEEDS)
and calm (5 clients, 16 partitions, an interval of 60 s, an hour each). CPU time, so that other processes do not count.
"""

from __future__ import annotations

from typing import Any, Final

from bench.environment import BenchEnvironment, Result
from marshal_sim.tools import races

SEEDS: Final = 400
SEEDS_TINY: Final = 3
GOALS: Final = {"faulty": "50,000 events/s", "calm": "20,000 hours per hour"}


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    found = races.measure(range(SEEDS_TINY if tiny else SEEDS), None, 1, lambda runs, seconds: None)
    rows: list[list[Any]] = []
    for name, pace in (("faulty", found.faulty), ("calm", found.calm)):
        rows.append(
            [
                name,
                pace.events_per_cpu_s,
                pace.simulated_hours_per_cpu_hour,
                pace.races_per_cpu_s,
                GOALS[name],
                f"{pace.runs} runs",
            ]
        )
    columns = ["clusters", "events per CPU s", "simulated hours per CPU hour", "claim races per CPU s", "goal", "work"]
    notes = [f"{found.violations} violations, #{found.trace_hash[:8]} over {found.runs} runs, on one core"]
    return Result("races", columns, rows, notes)
