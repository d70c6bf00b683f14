"""Each wait of each call of a user is cancelled once: the call is made again at once, and nothing is lost or left.

Two consumers with all their calls, without any other fault: one run per wait. `make proof` cancels at each of them.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Final, NamedTuple

import pytest

from marshal_py.protocol.wire.records import AT_LEAST_ONCE, AT_MOST_ONCE
from marshal_sim.cluster.cluster import Cluster
from marshal_sim.cluster.fault_injector import FaultInjector
from marshal_sim.cluster.faults import NetworkFaults
from marshal_sim.cluster.scenario import Options, draw
from marshal_sim.judge.auditor import judge
from marshal_sim.judge.evidence import Violation
from marshal_sim.mutants.mutants import MUTANTS, switched_on

INTERVAL_MS: Final = 1_000
CALLS: Final = frozenset({"calls", "cancels", "answers"})
# Mode, kinds, whether one of the two drains in the end, and a seed in which they receive in different ways.
WAYS: Final = (
    (AT_LEAST_ONCE, CALLS, True, 2),  # fetch and consume
    (AT_LEAST_ONCE, CALLS, False, 4),  # an iteration and consume, with a flush
    (AT_LEAST_ONCE, CALLS | {"lanes"}, True, 3),
    (AT_MOST_ONCE, CALLS, True, 5),
    (AT_MOST_ONCE, CALLS, False, 2),
)


class Waits(NetworkFaults):
    """Counts the waits of each kind of call. Cancels the call at number `at` of those of `call`."""

    call = ""
    at = -1

    def watch(self, call: str, at: int) -> None:
        self.call, self.at, self.seen = call, at, Counter[str]()

    def cancels(self, call: str) -> bool:
        self.seen[call] += 1
        return (call, self.seen[call] - 1) == (self.call, self.at)


class Ran(NamedTuple):
    waits: Counter[str]
    violations: list[Violation]
    finished: bool  # all messages, and one consumer has left


def run(way: tuple[int, frozenset[str], bool, int], call: str = "", at: int = -1) -> Ran:
    """Runs two consumers, one of which leaves. Cancels one call at one of its waits."""
    mode, kinds, drains, seed = way
    rng = Random(seed)
    options = Options(2, 2, INTERVAL_MS, mode, kinds, intervals=3, rate=5, calm=True)
    cluster = Cluster(draw(rng, options), rng)
    waits = cluster.network_faults = Waits(rng, kinds, INTERVAL_MS)
    waits.watch(call, at)
    FaultInjector(cluster).begin()
    cluster.run_until(3 * INTERVAL_MS)
    leaving = cluster.living()[0]
    leaving.leave(INTERVAL_MS // 2 if drains else 0)
    cluster.run_until(5 * INTERVAL_MS)
    cluster.healed, cluster.producing = True, False
    waits.heal()
    while cluster.now_ms < 13 * INTERVAL_MS and not cluster.finished():
        cluster.run_until(cluster.now_ms + INTERVAL_MS // 10)
    violations = [violation for log in cluster.close() for violation in judge(log).violations]
    return Ran(waits.seen, violations, cluster.finished() and leaving.dead)


def cancelled(way: tuple[int, frozenset[str], bool, int], every: int) -> tuple[dict[str, Ran], set[str]]:
    """Returns the runs that are not well, with what was cancelled in each, and the calls that were cancelled."""
    waits, bad = [(call, at) for call, count in run(way).waits.items() for at in range(count)], {}
    chosen = waits[way[-1] % every :: every]
    for call, at in chosen:
        ran = run(way, call, at)
        if ran.violations or not ran.finished:
            bad[f"wait {at} of {call}"] = ran
    return bad, {call for call, _ in chosen}


@pytest.mark.parametrize("every", [53, pytest.param(1, marks=pytest.mark.proof)])
def test_a_call_that_is_cancelled_anywhere_loses_nothing_and_can_be_repeated_at_once(every: int) -> None:
    """No message is skipped or comes twice, all are finished, no claim, grant or lock stays behind, and the consumer
    leaves."""
    calls = set[str]()
    for way in WAYS:
        bad, some = cancelled(way, every)
        assert bad == {}, way
        calls |= some
    assert calls >= {"fetch", "iterate", "receive"}
    assert every > 1 or calls == {"fetch", "iterate", "receive", "flush", "_accepted", "seek", "stop", "finish_drain"}


def test_a_call_that_loses_something_where_it_is_cancelled_is_found() -> None:
    with switched_on(MUTANTS["C40"]):
        assert not run(WAYS[0]).violations
        assert cancelled(WAYS[0], 17)[0]
