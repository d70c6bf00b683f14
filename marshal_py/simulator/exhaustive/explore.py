"""One search from its name to its report, with the shipped code or with one planted bug in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

from marshal_py.errors import InvalidOption
from marshal_py.simulator.exhaustive.configurations import CONFIGURATIONS
from marshal_py.simulator.exhaustive.prologue import Prologue
from marshal_py.simulator.exhaustive.search import Progress, Report, Search
from marshal_py.simulator.mutants import MUTANTS, switched_on

STATES_MAX: Final = 30_000_000  # some 4 GB
# That the fold of a mutant comes to another world than the oracle's is only the beginning of what it breaks.
TOLERATED: Final = frozenset({"S1"})


def explore(name: str, states_max: int = STATES_MAX, mutant: str | None = None,
            watch: Callable[[Progress], None] = lambda progress: None) -> Report:  # fmt: skip
    """Searches the configuration `name`. Raises InvalidOption for a name that there is not."""
    if name not in CONFIGURATIONS:
        raise InvalidOption("exhaustive", name, f"one of {', '.join(CONFIGURATIONS)}")
    if mutant is not None and mutant not in MUTANTS:
        raise InvalidOption("mutant", mutant, f"one of {', '.join(MUTANTS)}")
    configuration = CONFIGURATIONS[name]
    with nullcontext() if mutant is None else switched_on(MUTANTS[mutant]):
        search = Search(configuration, frozenset() if mutant is None else TOLERATED)
        script = Prologue(search)
        configuration.prologue(script)
        if script.broken.keys() - search.tolerated:
            states_max = 0  # it is found already
        report = search.walk(script.begin(), states_max, watch)
        return report._replace(violations=(*script.broken.values(), *report.violations))
