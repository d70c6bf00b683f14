"""A bug of the fold: S1 finds it, because the oracle does not share it, and so does the invariant that it breaks."""

from __future__ import annotations

import pytest

from marshal_sim.cluster.run import simulate
from marshal_sim.cluster.scenario import Options
from marshal_sim.judge import history
from marshal_sim.judge.evidence import Evidence
from marshal_sim.judge.history import History
from marshal_sim.mutants.fold import MUTANTS as OF_THE_FOLD
from marshal_sim.mutants.mutants import MUTANTS, find, switched_on, with_its_judge
from marshal_sim.mutants.shipped_fold import ShippedFold
from marshal_sim.oracle.oracle import Oracle, OracleStop, Verdict
from tests.support.partly import PARTLY

SCHEDULES = 40
# The first seed in which the folds differ, of those bugs that earlier ones do not show.
FIRST = {"X9": 7, "X19": 5, "U1": 8, "U2": 1, "G4": 3, "P3": 4, "R4": 2}


def _folded(oracle: Oracle, evidence: Evidence) -> list[object]:
    told: list[object] = []
    for offset, value in enumerate(evidence.log):
        try:
            told.append(oracle.apply(offset, value))
        except OracleStop as stop:
            told.append((stop.reason, stop.offset))
            break
        told.append({name: oracle.state_digest(name) for name in oracle.groups})
    return [*told, oracle.groups, oracle.log_digest(), oracle.chain_digest()]


@PARTLY
@pytest.mark.parametrize("mode", [1, 2])
def test_without_a_bug_the_judge_reads_the_same_from_both_folds(
    mode: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All verdicts, states and digests, so what a hunt finds is of the bug."""
    seen: list[Evidence] = []
    begin = History.__init__

    def noted(self: History, evidence: Evidence, *rest: object) -> None:
        seen.append(evidence)
        begin(self, evidence, *rest)

    monkeypatch.setattr(History, "__init__", noted)
    for seed in range(4 // part):
        simulate(seed, Options(mode=mode))
    judged = [evidence for evidence in seen if not evidence.first]
    assert len(judged) > 4 // part
    verdicts = set()
    for evidence in judged:
        number, root = evidence.number, evidence.root or None
        told = _folded(Oracle(number, root), evidence)
        assert _folded(ShippedFold(number, root), evidence) == told
        verdicts |= {(one.outcome, one.reason) for one in told if isinstance(one, Verdict)}
    assert len(verdicts) > 5


def test_the_judge_of_a_hunt_folds_with_the_bug() -> None:
    for name in OF_THE_FOLD:
        with switched_on(with_its_judge(name)):
            assert history.Oracle is ShippedFold  # type: ignore[attr-defined]
    assert history.Oracle is Oracle  # type: ignore[attr-defined]


@pytest.mark.proof
@pytest.mark.parametrize("name", OF_THE_FOLD)
def test_a_bug_of_both_folds_is_found_by_what_it_breaks(name: str) -> None:
    hunt = find(name, SCHEDULES)
    assert hunt.found
    assert hunt.invariant not in ("S1", "crash")


@pytest.mark.parametrize("name", OF_THE_FOLD)
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
        for patched, attribute, _ in with_its_judge(name).patches()
        if not hasattr(patched, attribute)
    ]
    assert missing == []
