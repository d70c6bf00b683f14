"""Runs one search, from the name of a model to a report, with the shipped code or with one planted bug in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from marshal_py.errors import InvalidOption
from marshal_sim.exhaustive import parallel
from marshal_sim.exhaustive.bfs import Progress, SearchReport, search_all
from marshal_sim.exhaustive.configurations import MODELS, Model
from marshal_sim.exhaustive.search import Search
from marshal_sim.exhaustive.setup_script import SetupScript
from marshal_sim.mutants.mutants import MUTANTS, switched_on

STATES_MAX: Final = 30_000_000  # some 4 GB

OnProgress = Callable[[Progress], None]
# That a mutant's fold differs from the oracle's is only the first thing that it breaks.
TOLERATED: Final = frozenset({"S1"})


def explore(
    name: str,
    states_max: int = STATES_MAX,
    mutant: str | None = None,
    on_progress: OnProgress = lambda progress: None,
    processes: int = 1,
) -> SearchReport:
    """Searches the model `name`, with the planted bug `mutant` if one is given.

    A planted bug is searched for by one process, whatever `processes` says, because it is found soon. Raises
    InvalidOption for an unknown name.
    """
    if name not in MODELS:
        raise InvalidOption("exhaustive", name, f"one of {', '.join(MODELS)}")
    if mutant is None:
        return search(MODELS[name], states_max, on_progress, processes)
    if mutant not in MUTANTS:
        raise InvalidOption("mutant", mutant, f"one of {', '.join(MUTANTS)}")
    with switched_on(MUTANTS[mutant]):
        return search(MODELS[name], states_max, on_progress, 1, TOLERATED)


def search(
    model: Model, states_max: int, on_progress: OnProgress, processes: int, tolerated: frozenset[str] = frozenset()
) -> SearchReport:
    """Searches this model. Ctrl-C ends the search early, with a report of what was searched."""
    if processes > 1:
        report = parallel.search(model.name, partial(_begun, model), processes, states_max, on_progress)
        if report is not None:
            return report
    begun, script = _scripted(model, tolerated)
    if script.broken.keys() - tolerated:
        states_max = 0  # the script has found it already
    report = search_all(begun, script.begin(), states_max, on_progress)
    return report._replace(violations=(*script.broken.values(), *report.violations))


def _scripted(model: Model, tolerated: frozenset[str]) -> tuple[Search, SetupScript]:
    made = Search(model.configuration, tolerated)
    script = SetupScript(made)
    model.setup(script)
    return made, script


def _begun(model: Model) -> tuple[Search, int]:
    """Returns the search and its first state, for one of several processes of a search."""
    made, script = _scripted(model, frozenset())
    return made, script.begin()
