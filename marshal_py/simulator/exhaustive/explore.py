"""One search from its name to its report, with the shipped code or with one planted bug in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from marshal_py.errors import InvalidOption
from marshal_py.simulator.exhaustive import parallel
from marshal_py.simulator.exhaustive.bfs import Progress, Report, walk
from marshal_py.simulator.exhaustive.configuration import Configuration
from marshal_py.simulator.exhaustive.configurations import CONFIGURATIONS
from marshal_py.simulator.exhaustive.search import Search
from marshal_py.simulator.exhaustive.setup_script import SetupScript
from marshal_py.simulator.mutants import MUTANTS, switched_on

STATES_MAX: Final = 30_000_000  # some 4 GB

OnProgress = Callable[[Progress], None]
# That the fold of a mutant comes to another world than the oracle's is only the beginning of what it breaks.
TOLERATED: Final = frozenset({"S1"})


def explore(
    name: str,
    states_max: int = STATES_MAX,
    mutant: str | None = None,
    on_progress: OnProgress = lambda progress: None,
    processes: int = 1,
) -> Report:
    """Searches the configuration `name`. Raises InvalidOption for a name that there is not.

    A planted bug is searched for by one process, whatever `processes` says: it is found soon.
    """
    if name not in CONFIGURATIONS:
        raise InvalidOption("exhaustive", name, f"one of {', '.join(CONFIGURATIONS)}")
    if mutant is None:
        return search(CONFIGURATIONS[name], states_max, on_progress, processes)
    if mutant not in MUTANTS:
        raise InvalidOption("mutant", mutant, f"one of {', '.join(MUTANTS)}")
    with switched_on(MUTANTS[mutant]):
        return search(CONFIGURATIONS[name], states_max, on_progress, 1, TOLERATED)


def search(
    configuration: Configuration,
    states_max: int,
    on_progress: OnProgress,
    processes: int,
    tolerated: frozenset[str] = frozenset(),
) -> Report:
    """Searches this world. Ctrl-C ends it early, with a report of what was searched."""
    if processes > 1:
        report = parallel.walk(configuration.name, partial(_begun, configuration), processes, states_max, on_progress)
        if report is not None:
            return report
    begun, script = _scripted(configuration, tolerated)
    if script.broken.keys() - tolerated:
        states_max = 0  # it is found already
    report = walk(begun, script.begin(), states_max, on_progress)
    return report._replace(violations=(*script.broken.values(), *report.violations))


def _scripted(configuration: Configuration, tolerated: frozenset[str]) -> tuple[Search, SetupScript]:
    made = Search(configuration, tolerated)
    script = SetupScript(made)
    configuration.prologue(script)
    return made, script


def _begun(configuration: Configuration) -> tuple[Search, int]:
    """For one process of several."""
    made, script = _scripted(configuration, frozenset())
    return made, script.begin()
