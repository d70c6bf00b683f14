"""Policy `prioritized`: lower numbers first, and fair among consumers of the same number (PROTOCOL.md A10)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.errors import InvalidOption
from marshal_py.protocol.member import group_settings
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import GroupConfig, StepDown
from tests.protocol.test_assignment import group_of, owners_of, target
from tests.support.virtual_cluster import INTERVAL_MS, Client, VirtualCluster

CONFIG = GroupConfig(NONE, policy="prioritized", priority_groups=("jobs",))
POLICY = "prioritized"


def shares(sessions: list[dict[str, Any]], owners: dict[tuple[str, int], int] | None = None) -> dict[int, int]:
    return dict(Counter(target(group_of({"t": 12}, sessions, owners), POLICY).values()))


def test_the_lowest_number_takes_all_that_it_can() -> None:
    """A10: 0 is a value like any other; who shares a number shares fairly, by capacity.

    ADR-42: "Groups of clients should access a Consumer but some should have higher priority than others for
    receiving messages"
    """
    assert shares([{"priority": 1}, {"priority": 0}, {"priority": 9}]) == {2: 12}
    assert shares([{"priority": 4}, {"priority": 9}]) == {1: 12}
    assert shares([{"priority": 2}, {"priority": 2, "capacity": 3}, {"priority": 3}]) == {1: 3, 2: 9}
    assert shares([{"claims_max": 3}, {"priority": 1, "claims_max": 4}, {"priority": 1}, {"priority": 2}]) == {
        1: 3,
        2: 4,
        3: 5,
    }


def test_who_stepped_down_comes_after_all_numbers() -> None:
    """A10, F9.9"""
    assert shares([{"mark": 9}, {"priority": 9}]) == {2: 12}
    assert shares([{"mark": 9}, {"priority": 9, "claims_max": 5}]) == {1: 7, 2: 5}
    assert shares([{"mark": 9}, {"mark": 8, "priority": 9}]) == {1: 12}, "where all are marked nobody is"


def test_nothing_moves_without_need() -> None:
    """A10, A4: a newcomer with a limit takes what nobody owns before it takes from a live owner."""
    owners = {("t", number): 2 for number in range(8)}
    found = target(group_of({"t": 12}, [{"claims_max": 3}, {"priority": 1}], owners), POLICY)
    assert [found[TopicPartition("t", number)] for number in range(12)] == [2] * 8 + [1] * 3 + [2]


SESSION = st.fixed_dictionaries(
    {
        "topics": st.lists(st.sampled_from(["a", "b"]), unique=True).map(tuple),
        "priority": st.integers(0, 2),
        "claims_max": st.sampled_from([0, 1, 3]),
        "mark": st.sampled_from([NONE, NONE, NONE, 50]),
    }
)


@given(st.lists(SESSION, max_size=6), st.dictionaries(st.tuples(st.just("a"), st.integers(0, 4)), st.integers(1, 6)))
def test_nobody_has_what_a_lower_number_could_take(
    sessions: list[dict[str, Any]], owners: dict[tuple[str, int], int]
) -> None:
    """A10, A5"""
    group = group_of({"a": 5, "b": 3}, sessions, {tp: sid for tp, sid in owners.items() if sid <= len(sessions)})
    found = target(group, POLICY)
    counts, all_marked = Counter(found.values()), all(s.mark != NONE for s in group.sessions.values())

    def level(sid: int) -> tuple[bool, int]:
        session = group.sessions[sid]
        marked = session.mark != NONE and not all_marked
        return marked, 0 if marked else session.join.priority

    for sid, session in group.sessions.items():
        assert not session.join.claims_max or counts[sid] <= session.join.claims_max
        if session.join.claims_max and counts[sid] == session.join.claims_max:
            continue
        for number in range(8):
            tp = TopicPartition("a", number) if number < 5 else TopicPartition("b", number - 5)
            if tp.topic in session.join.topics:
                assert level(found[tp]) <= level(sid), f"{sid} has room for {tp}"
    owned = Counter(owners_of(group).values())
    fits = all(owned[sid] <= (session.join.claims_max or 8) for sid, session in group.sessions.items())
    if fits and all(session.join.topics for session in group.sessions.values()):
        assert owners_of(group).keys() <= {tuple(tp) for tp in found}, "what is owned has an owner"


# --- running members


def add(cluster: VirtualCluster, name: str, priority: int, **options: Any) -> Client:
    client = cluster.add(name, priority=priority, priority_group="jobs", **options)
    cluster.run(3 * INTERVAL_MS)
    return client


def test_a_better_one_takes_over_and_a_standby_steps_in_when_it_is_gone() -> None:
    """A10, A3: joins, a crash and a step-down.

    ADR-42: "Groups of clients should access a Consumer but some should have higher priority than others for
    receiving messages"
    """
    cluster = VirtualCluster()
    cluster.must(CONFIG)
    low = add(cluster, "low", 5)
    partitions = len(low.member.claims)
    assert partitions > 1
    best = add(cluster, "best", 0)
    assert (len(best.member.claims), len(low.member.claims)) == (partitions, 0)
    middle = add(cluster, "middle", 3)
    assert (len(best.member.claims), len(middle.member.claims)) == (partitions, 0)
    cluster.kill(best)
    cluster.run(4 * INTERVAL_MS)
    assert (len(middle.member.claims), len(low.member.claims)) == (partitions, 0)
    cluster.must(StepDown(middle.session, NONE))
    cluster.run(3 * INTERVAL_MS)
    assert (len(middle.member.claims), len(low.member.claims)) == (0, partitions)


# --- settings

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"policy": POLICY}, "exactly one"),
    ({"policy": POLICY, "priority_groups": ("a", "b")}, "exactly one"),
    ({"policy": POLICY, "priority_groups": ("a" * 17,)}, "1 to 16"),
    ({"policy": POLICY, "priority_groups": ("a b",)}, "1 to 16"),
    ({"policy": POLICY, "priority_groups": ("a.b",)}, "1 to 16"),
    ({"policy": POLICY, "priority_groups": ("",)}, "1 to 16"),
    ({"policy": "balanced", "priority_groups": ("a",)}, "only the policies overflow, pinned and prioritized have it"),
]


@pytest.mark.parametrize(("settings", "reason"), WRONG)
def test_invalid_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    """ADR-42: "PriorityGroups require at least one entry." "In the initial implementation we should limit
    PriorityGroups to one per consumer only and error should one be made with multiple groups." "Valid PriorityGroups
    values must match limited-term ((A-Z, a-z, 0-9, dash, underscore, fwd-slash, equals)+) from ADR-6 and may not
    exceed 16 characters."
    """
    with pytest.raises(InvalidOption, match=reason):
        group_settings.check(GroupConfig(NONE, **settings), settings)


def test_names_of_the_design_are_taken() -> None:
    """ADR-42: "Valid PriorityGroups values must match limited-term ((A-Z, a-z, 0-9, dash, underscore, fwd-slash,
    equals)+) from ADR-6 and may not exceed 16 characters."
    """
    for name in ("a", "A-Za-z0-9_/=", "x" * 16):
        group_settings.check(GroupConfig(NONE, policy=POLICY, priority_groups=(name,)), ["policy", "priority_groups"])


@pytest.mark.parametrize("before", ["", "balanced", "greedy", "topic"])
def test_the_policy_is_for_the_groups_whole_life(before: str) -> None:
    """ADR-42: "we cannot support updating a consumer from one with groups to one without and vice versa" "We also
    cannot switch between different policies."
    """
    for old, new in ((GroupConfig(NONE, policy=before), CONFIG), (CONFIG, GroupConfig(NONE, policy=before))):
        with pytest.raises(InvalidOption, match=r"for its whole life|exists with (no|the) policy"):
            group_settings.check_change("billing", old, 0, new)
    with pytest.raises(InvalidOption, match="has the priority_groups jobs for its whole life"):
        group_settings.check_change("billing", CONFIG, 0, GroupConfig(NONE, policy=POLICY, priority_groups=("other",)))


def test_a_consumer_names_the_priority_group_and_only_where_there_is_one() -> None:
    def check(config: GroupConfig, **options: Any) -> None:
        group_settings.check_consumer("billing", config, MemberOptions(client_id="c", **options))

    check(CONFIG, priority_group="jobs", priority=9)
    check(GroupConfig(NONE))
    for options, reason in (({}, "names the priority group jobs"), ({"priority_group": "job"}, "priority group jobs")):
        with pytest.raises(InvalidOption, match=reason):
            check(CONFIG, **options)
    with pytest.raises(InvalidOption, match="has no priority groups"):
        check(GroupConfig(NONE, policy="greedy"), priority_group="jobs")
    with pytest.raises(InvalidOption, match="only prioritized obeys it"):
        check(GroupConfig(NONE), priority=1)
