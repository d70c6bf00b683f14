"""A schedule: one run, by its seed, what the caller fixed and maybe a planted bug, as a text that can be kept.

The text has one `name value` per line; `#` begins a comment. The same text gives the same run everywhere, as long as
the simulator draws the same: a file under tests/scenarios also says what it violates, so that a test notices when a
change of the simulator has made it another run.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final, NamedTuple

from marshal_py.errors import InvalidOption
from marshal_py.protocol.wire.records import MODE_NAMES, MODES
from marshal_sim.cluster.cluster import Cluster
from marshal_sim.cluster.faults import KINDS
from marshal_sim.cluster.run import Result, simulate
from marshal_sim.cluster.scenario import Options, Scenario
from marshal_sim.judge.evidence import Violation
from marshal_sim.mutants.mutants import MUTANTS, switched_on, with_its_judge

VAGUE: Final = frozenset({"S1", "crash"})  # that worlds differ, or that one broke, is seldom the whole story
# The names of the fields of Options, with the type of each.
NUMBERS: Final = (
    "clients",
    "partitions",
    "interval_ms",
    "intervals",
    "rate",
    "salt",
    "until_ms",
    "queries",
    "witnesses",
    "answers",
    "calls",
    "lanes",
    "aio",
    "turns",
    "behind",
)
TEXTS: Final = ("dump", "group", "policy")


class Schedule(NamedTuple):
    """Describes one run that can be repeated. `violates` is the invariant that it is known to violate, "" for none."""

    seed: int
    options: Options = Options()
    mutant: str | None = None
    violates: str = ""  # the invariant that the run violates; empty if it violates none


def run(schedule: Schedule, environment: Callable[[Scenario, Random], Cluster] = Cluster) -> Result:
    """Runs the schedule, with the planted bug that it names."""
    if schedule.mutant is None:
        return simulate(schedule.seed, schedule.options, environment)
    with switched_on(with_its_judge(schedule.mutant)):
        return simulate(schedule.seed, schedule.options, environment)


def of_seed(seed: int, mutant: str | None) -> Schedule:
    """Returns the schedule of this seed. With a planted bug it has the conditions that make the bug likely."""
    return Schedule(seed, Options() if mutant is None else MUTANTS[mutant].bias, mutant)


def telling(violations: tuple[Violation, ...]) -> Violation:
    """Returns the first violation that says what went wrong (one not in VAGUE), or else the first of all."""
    return next((found for found in violations if found.invariant not in VAGUE), violations[0])


def text_of(schedule: Schedule) -> str:
    options = schedule.options
    lines = [f"seed {schedule.seed}"]
    lines += [f"mutant {schedule.mutant}"] if schedule.mutant else []
    lines += [f"violates {schedule.violates}"] if schedule.violates else []
    lines += [
        f"{name} {getattr(options, name)}"
        for name in NUMBERS
        if getattr(options, name) != Options._field_defaults[name]
    ]
    lines += [f"mode {MODE_NAMES[options.mode]}"] if options.mode is not None else []
    lines += ["kinds " + " ".join(sorted(options.kinds))] if options.kinds is not None else []
    lines += ["skip " + " ".join(map(str, sorted(options.skip)))] if options.skip else []
    lines += [f"{name} {getattr(options, name)}" for name in TEXTS if getattr(options, name)]
    return "\n".join(lines) + "\n"


def parse(text: str) -> Schedule:
    """Returns the schedule that a text describes. Raises InvalidOption, which names the line."""
    seed, mutant, violates, fixed = -1, None, "", dict[str, Any]()
    for number, line in enumerate(text.splitlines(), 1):
        name, _, value = line.partition("#")[0].strip().partition(" ")
        words = value.split()
        try:
            if name == "seed":
                seed = int(value)
            elif name == "mutant":
                mutant = {known: known for known in MUTANTS}[value]
            elif name == "violates":
                violates = value
            elif name in NUMBERS:
                fixed[name] = int(value)
            elif name in TEXTS:
                fixed[name] = value
            elif name == "mode":
                fixed["mode"] = MODES[value]
            elif name == "kinds":
                fixed["kinds"] = frozenset({kind: kind for kind in KINDS}[word] for word in words)
            elif name == "skip":
                fixed["skip"] = frozenset(map(int, words))
            elif name:
                raise InvalidOption(f"line {number}", line, f"a scenario has no {name!r}")
        except (KeyError, ValueError) as error:
            raise InvalidOption(f"line {number}", line, f"{error} is no value of {name!r}") from error
    if seed < 0:
        raise InvalidOption("scenario", text[:40], "it needs a line `seed N`")
    return Schedule(seed, Options(**fixed), mutant, violates)
