"""A bug in both folds: they agree on a wrong state, so S1 is silent, and the invariant that it breaks must find it."""

from __future__ import annotations

import pytest

from marshal_sim.cluster.run import simulate
from marshal_sim.mutants.fold import MUTANTS as OF_THE_FOLD
from marshal_sim.mutants.mutants import MUTANTS, find, in_both_folds, switched_on
from marshal_sim.mutants.oracle import COUNTERPARTS

SCHEDULES = 40
# The first seed in which the folds differ, of those bugs that earlier ones do not show.
FIRST = {"X9": 7, "X19": 5, "U1": 8, "U2": 1, "G4": 3, "P3": 4, "R4": 2}


def test_every_bug_of_the_fold_has_its_twin_in_the_oracle() -> None:
    assert COUNTERPARTS.keys() == OF_THE_FOLD.keys()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.proof)])
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_a_bug_of_both_folds_leaves_them_agreed(name: str, seed: int) -> None:
    """Otherwise the counterpart is another bug, and what is found may be its own."""
    mutant = in_both_folds(name)
    with switched_on(mutant):
        found = {violation.invariant for violation in simulate(seed, mutant.bias).violations}
    assert "S1" not in found


@pytest.mark.proof
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_a_bug_of_both_folds_is_found_by_what_it_breaks(name: str) -> None:
    hunt = find(name, SCHEDULES)
    assert hunt.found
    assert hunt.invariant not in ("S1", "crash")


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_a_bug_of_the_shipped_fold_alone_is_found_by_the_difference(name: str) -> None:
    """S1: the oracle does not share it."""
    mutant = MUTANTS[name]
    first = FIRST.get(name, 0)
    for seed in range(first, first + SCHEDULES):
        with switched_on(mutant):
            if "S1" in {violation.invariant for violation in simulate(seed, mutant.bias).violations}:
                return
    pytest.fail(f"{SCHEDULES} runs in which both folds agree")


def test_each_bug_replaces_what_the_shipped_code_has() -> None:
    """What was renamed or removed is missed here, and not only by whoever plants this bug."""
    missing = [
        (name, patched, attribute)
        for name in MUTANTS
        for patched, attribute, _ in in_both_folds(name).patches()
        if not hasattr(patched, attribute)
    ]
    assert missing == []
