"""Which modules of the client a simulated run executes: all but those below, each for a reason."""

from __future__ import annotations

import gc
import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import marshal_py.client
from marshal_sim.cluster.run import simulate
from marshal_sim.cluster.scenario import Options

CLIENT = Path(marshal_py.client.__file__).parent
SNAPSHOTS = Options(
    kinds=frozenset({"snapshots", "arrive", "crash", "divergence", "late_refusal", "beyond"}), clients=3
)
RUNS = [
    (0, Options()),
    (1, Options()),
    (2, Options(calls=1, answers=1, mode=1)),
    (5, Options(lanes=1, answers=1, mode=1)),
    (3, Options(queries=2)),
    (4, SNAPSHOTS),
    (7, Options(aio=1, lanes=1, mode=1, clients=2, partitions=2, intervals=8)),
]

# A simulated process has no thread, signal, socket or log of its own process.
# What a run could execute. marshal_sim/cluster has its own way to do it instead, or does not do it.
OPENS = "connects, opens logs and checks what the user has passed: a simulated client is made without"
NOT_EXECUTED = {
    "driver/last_wills.py": "another process that a socket watches",
    "marshal.py": OPENS,
    "metrics.py": "figures for people, and a server of them",
    "signals.py": "signals",
    "sql_guard.py": "a database",
    "tracing.py": "spans around handlers",
    "values/finished.py": "what a table has, which is another store",
}


def test_a_run_executes_the_client_that_is_shipped() -> None:
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function, not a module or a class
            called.add(frame.f_code.co_filename)

    gc.collect()  # and none during the runs: consumers that other tests have left end by functions of the client, too
    gc.disable()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        results = [simulate(seed, options) for seed, options in RUNS]
    finally:
        sys.setprofile(before)
        gc.enable()
    assert [result.violations for result in results] == [()] * len(RUNS)
    modules = {path.relative_to(CLIENT).as_posix() for path in CLIENT.rglob("*.py") if path.name != "__init__.py"}
    executed = {name for name in modules if str(CLIENT / name) in called}
    missing = sorted(modules - executed - NOT_EXECUTED.keys())
    assert missing == [], "no simulated run executes these: drive them, or say why not"
    assert sorted(NOT_EXECUTED.keys() & executed) == [], "these are executed now: take them off the list"
    assert sorted(NOT_EXECUTED.keys() - modules) == [], "these are no modules any more"
