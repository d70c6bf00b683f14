"""Do simulation sweeps on Spark outrun one process, and how near do they come to processes on the same machine?

All contestants run the same seeds and must get the same hash over all traces, or the benchmark fails. It measures wall
clock time, because the question is whether more cores help.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from bench.environment import BenchEnvironment, Result, ratio, spread
from bench.spark_session import spark_session
from marshal_sim.tools import sweep as local
from marshal_sim.tools.spark_sweeps import runs, sweep

SEEDS: Final = 240
SEEDS_TINY: Final = 4
ROUNDS: Final = 3


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    seeds, rounds = range(SEEDS_TINY if tiny else SEEDS), 1 if tiny else ROUNDS
    with spark_session() as spark:
        contestants: dict[str, Callable[[], local.Total]] = {
            "one process": lambda: local.total(local.sweep(seeds, 1)),
            "two processes": lambda: local.total(local.sweep(seeds, 2)),
            "Spark, local[2]": lambda: local.total(runs(sweep(spark, seeds))),
        }
        runs(sweep(spark, range(2)))  # starts the workers
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        totals: dict[str, local.Total] = {}
        for _ in range(rounds):
            for name, search in contestants.items():
                began = time.perf_counter()
                totals[name] = search()
                rates[name].append(len(seeds) / (time.perf_counter() - began))
    if len({total.trace_hash for total in totals.values()}) != 1:
        raise RuntimeError(f"the traces differ: {totals}")
    rows: list[list[Any]] = [
        [
            name,
            spread(found),
            ratio(found, rates["one process"]),
            totals[name].violations,
            f"{len(seeds):,} #{totals[name].trace_hash[:8]}",
        ]
        for name, found in rates.items()
    ]
    columns = ["contestant", "seeds/s", "ratio to one process", "violations", "work"]
    return Result("sweep", columns, rows, [f"{rounds} rounds in turn; the hashes of all are equal"])
