"""Long runs that continue where they stopped: `make soak` (python -m tests.support.soak).

Four kinds of work take turns: seeds of the simulator, hostile records through both folds, examples of the property
tests, and exhaustive searches, each done once. After every slice the totals are written to one JSON file, so that a
run may be stopped at any moment; the next one continues after it. Another version of the package starts again, and the
old totals stay in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import marshal_py
from marshal_sim.exhaustive.bfs import Progress
from marshal_sim.exhaustive.configurations import MODELS
from marshal_sim.exhaustive.explore import STATES_MAX, explore
from marshal_sim.tools import sweep
from tests.support.hostile_records import flood

ROOT = Path(__file__).parents[2]
SEEDS = 500  # per slice: a minute or less
HOSTILE_RECORDS = 200_000  # per slice and process
WITHOUT = "not flood and not planted"  # a slice of its own; searches for bugs, which the seed of `make test` finds
ROUND_S = 3_600  # of properties takes minutes; a longer one hangs

State = dict[str, Any]


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
    }


def load(path: Path) -> State:
    """The file's entry for this version, made if it is missing."""
    runs: list[State] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for state in runs:
        if (state["version"], state["machine"]) == (marshal_py.__version__, machine()):
            return {"runs": runs, "now": state}
    runs.append({"version": marshal_py.__version__, "machine": machine(), "seconds": 0.0, "totals": {}, "failures": []})
    return {"runs": runs, "now": runs[-1]}


def save(path: Path, runs: list[State]) -> None:
    """All or nothing: a stop during the write must not lose earlier totals."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def add(now: State, name: str, amount: float) -> None:
    now["totals"][name] = now["totals"].get(name, 0) + amount


def seeds(now: State, processes: int) -> bool:
    first = now["totals"].get("seeds", 0)
    found = sweep.total(sweep.sweep(range(first, first + SEEDS), processes))
    for name in ("seeds", "violations", "takeovers", "handovers", "deliveries", "faults", "events", "simulated_hours"):
        add(now, name, getattr(found, name))
    now["failures"] += [f"marshal simulate --seed {seed}" for seed in found.failing]
    if found.void:
        now["failures"].append(f"seeds from {first} on: void")
    return True


def hostile_records(now: State, processes: int) -> bool:
    first = Random().randrange(2**40)
    bases = [first + number * HOSTILE_RECORDS for number in range(processes)]
    with ProcessPoolExecutor(processes, get_context("spawn"), sweep.leave_interrupts_to_the_parent) as pool:
        for base, flying in [(base, pool.submit(flood, base, HOSTILE_RECORDS)) for base in bases]:
            try:
                add(now, "hostile_records", flying.result().total())
            except Exception as error:
                now["failures"].append(f"flood({base}, {HOSTILE_RECORDS}): {error!r}, {error.__notes__}")
    return True


def properties(now: State, processes: int) -> bool:
    """One round of the differential properties, with another hypothesis seed; conftest.py says how many examples."""
    seed = Random().randrange(2**32)
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=soak",
        "--timeout=0",
        f"--hypothesis-seed={seed}",
        "-n",
        str(processes),
        "-k",
        WITHOUT,
        "tests/properties",
    ]
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=ROUND_S)
    except subprocess.TimeoutExpired:
        now["failures"].append(f"{' '.join(line[2:])}: not done after {ROUND_S} s")
        return True
    add(now, "property_rounds", 1)
    if done.returncode:
        failed = [text for text in done.stdout.splitlines() if text.startswith(("FAILED", "ERROR"))]
        now["failures"].append(f"{' '.join(line[2:])}: {failed or done.stdout.splitlines()[-1:]}")
    return True


def exhaustive(now: State, processes: int) -> bool:
    """The next small model that this version has not searched yet; the widest takes some minutes of CPU time."""
    done: State = now.setdefault("exhaustive", {})
    name = next((name for name in MODELS if name not in done), None)
    if name is None:
        return False
    report = explore(name, STATES_MAX, None, partial(print_progress, name), processes)
    if report.interrupted:
        print(f"{name}: stopped after {report.states:,} states; it starts again the next time")
        raise KeyboardInterrupt
    done[name] = {
        "states": report.states,
        "transitions": report.transitions,
        "complete": report.complete,
        "seconds": report.seconds,
        "bounds": MODELS[name].configuration.bounds._asdict(),
    }
    add(now, "exhaustive_states", report.states)
    if report.violations or not report.complete:
        now["failures"].append(f"python -m marshal_sim exhaustive {name}")
    return True


def print_progress(name: str, progress: Progress) -> None:
    if sys.stderr.isatty():
        print(
            f"\r{name}: depth {progress.depth}, {progress.states:,} states, {progress.frontier:,} to look at   ",
            end="",
            file=sys.stderr,
            flush=True,
        )


# Each does one slice; False if there was none to do.
WORK: dict[str, Callable[[State, int], bool]] = {
    "seeds": seeds,
    "hostile": hostile_records,
    "properties": properties,
    "exhaustive": exhaustive,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make soak ARGS=...", description=__doc__)
    parser.add_argument("--seconds", type=float, help="end after the slice in which they are over (default: never)")
    parser.add_argument("--out", type=Path, default=ROOT / "proof.json")
    parser.add_argument("--only", choices=WORK, action="append", help="this kind of work; may be repeated")
    parser.add_argument("--processes", type=int, default=sweep.cores())
    options = parser.parse_args(arguments)
    loaded = load(options.out)
    now, began = loaded["now"], time.monotonic()
    turns = deque(options.only or WORK)
    try:
        while turns and (options.seconds is None or time.monotonic() - began < options.seconds):
            started = time.monotonic()
            name = turns.popleft()
            if WORK[name](now, options.processes):
                turns.append(name)
                now["seconds"] = round(now["seconds"] + time.monotonic() - started, 1)
                save(options.out, loaded["runs"])
                print(f"{name}: {json.dumps(now['totals'])}, {len(now['failures'])} failures", flush=True)
    except KeyboardInterrupt:
        print(f"stopped; {options.out} holds all slices that were complete")
    for failure in now["failures"]:
        print(f"FAILED {failure}")
    return 1 if now["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
