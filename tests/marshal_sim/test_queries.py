"""Streaming queries in the simulator: Spark's order of calls, killed, frozen and overdue between any two of them."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from marshal_py.protocol.fold.world import World
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.spark.stream.micro_batches import FIRST, MicroBatches, key_of
from marshal_sim.cluster.run import simulate
from marshal_sim.cluster.scenario import Options
from marshal_sim.tools.schedule import Schedule, parse, text_of
from tests.support.command_line import invoke
from tests.support.command_line import simulate as run
from tests.support.partly import PARTLY
from tests.support.virtual_cluster import ranges_of


@PARTLY
@pytest.mark.parametrize("queries", [1, 2, 3])
def test_queries_lose_nothing_and_follow_the_rules_of_every_member(queries: int, part: int) -> None:
    results = [simulate(seed, Options(queries=queries)) for seed in range(100 * queries, 100 * queries + 6 // part)]
    assert [(result.seed, result.violations) for result in results if result.violations] == []
    assert sum(result.deliveries for result in results) > 500 // part


def test_an_outage_of_brokers_ends_no_query() -> None:
    """V6: in these runs the log did not accept a batch's positions for longer than Spark's call waits for it."""
    ended = [simulate(seed, Options(queries=2)) for seed in (70063, 70067)]
    assert [(result.seed, result.violations) for result in ended if result.violations] == []


def test_every_way_through_a_batch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is replayed whole, in part and after a wait, and reported by its process and by a later one."""
    seen: Counter[str] = Counter()
    replay, settle = MicroBatches.replay, MicroBatches.settle_proven

    def replayed(self: MicroBatches, end: dict[str, object], now: object) -> object:
        found = replay(self, end, now)  # type: ignore[arg-type]
        seen["waits"] += bool(found.waits)
        seen["left out"] += bool(found.left_out) and not found.waits
        seen["whole"] += not found.left_out and not found.waits
        return found

    def settled(self: MicroBatches, now: object) -> bool:
        moved = settle(self, now)  # type: ignore[arg-type]
        seen["told by a later life"] += moved
        return moved

    monkeypatch.setattr(MicroBatches, "replay", replayed)
    monkeypatch.setattr(MicroBatches, "settle_proven", settled)
    kinds = frozenset({"crash", "slow_handler", "admin"})
    options = Options(queries=2, clients=3, partitions=4, interval_ms=2_000, intervals=60, kinds=kinds)
    ways = {"waits", "left out", "whole", "told by a later life"}
    for seed in range(6):
        simulate(seed, options._replace(rate=20 if seed % 2 else 6))
        if ways <= (+seen).keys():
            return
    pytest.fail(f"{ways - (+seen).keys()} of {seen}")


@pytest.mark.parametrize(("incarnation", "kept"), [(b"one", 1), (b"another", 0)])
def test_what_was_handed_over_counts_in_its_own_incarnation_of_the_log_alone(incarnation: bytes, kept: int) -> None:
    member = Member(World(), "billing", MemberOptions(client_id="c1", topics=("orders",)), bytes)
    before = MicroBatches(member, ranges_of(member, b"one"), b"one")
    before.deliver(before.end_of(FIRST, []), [])
    assert len(MicroBatches(member, ranges_of(member, incarnation), incarnation, before).delivered) == kept


def test_a_seed_with_queries_can_be_kept_and_run_again() -> None:
    schedule = Schedule(4, Options(queries=2))
    assert "queries 2" in text_of(schedule)
    assert parse(text_of(schedule)) == schedule
    told = invoke(["simulate", "--seeds", "0:4", "--queries", "2", "--json"])
    assert told.exit_code in (0, 1), told.output
    assert json.loads(told.stdout.splitlines()[-1])["violations"] == 0
    assert run("mutants", "--queries", "2").exit_code == 2


def test_the_first_offset_is_the_same_for_ever() -> None:
    assert key_of(FIRST) == '{"b": 0, "r": {}}'
