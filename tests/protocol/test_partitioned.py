"""Policies `members` and `blocks` (PROTOCOL.md A7): the seed's partition filters, and members that carry them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.errors import InvalidOption
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member import group_settings
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.member.waiting import standstills, why_idle
from marshal_py.protocol.policy import RESTRICTED, block_owners, candidate_order, names
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import GroupConfig, Mapping, ReleasingPartition, StepDown
from tests.protocol.test_assignment import group_of
from tests.support.virtual_cluster import INTERVAL_MS, VirtualCluster

# --- the seed's algorithm


def seeds_filters(members: list[str], max_members: int, name: str) -> list[int]:
    """GetPartitionFilters of the seed, line by line."""
    found = sorted(set(members))
    if len(found) > max_members:
        found = found[:max_members]
    filters: list[int] = []
    if len(found) > 0:
        per = max_members // len(found)
        for i in range(max_members):
            if i < len(found) * per:
                if found[(i // per) % len(found)] == name:
                    filters.append(i)
            elif found[(i - len(found) * per) % len(found)] == name:
                filters.append(i)
    return filters


def blocks(members: list[str], max_members: int, names: Iterable[str]) -> dict[str, list[int]]:
    owners = block_owners(members, max_members)
    return {name: [at for at, owner in enumerate(owners) if owner == name] for name in names}


@pytest.mark.parametrize(
    ("members", "max_members", "expected"),
    [
        (["m1", "m2", "m3"], 6, {"m1": [0, 1], "m2": [2, 3], "m3": [4, 5]}),
        (["m3", "m1", "m2", "m1"], 8, {"m1": [0, 1, 6], "m2": [2, 3, 7], "m3": [4, 5]}),
        (["a", "b", "c"], 2, {"a": [0], "b": [1], "c": []}),
        (["a", "b", "c", "d"], 7, {"a": [0, 4], "b": [1, 5], "c": [2, 6], "d": [3]}),
        (["B", "a", "A"], 3, {"A": [0], "B": [1], "a": [2]}),
        (["one"], 5, {"one": [0, 1, 2, 3, 4]}),
        ([], 5, {"one": []}),
    ],
)
def test_blocks_are_the_partition_filters_of_the_seed(
    members: list[str], max_members: int, expected: dict[str, list[int]]
) -> None:
    """A7"""
    assert blocks(members, max_members, expected) == expected
    assert {name: seeds_filters(members, max_members, name) for name in expected} == expected


@given(st.lists(st.text("abcABC019-é", min_size=1, max_size=3), max_size=30), st.integers(1, 64))
def test_blocks_are_the_seeds_for_any_members(members: list[str], max_members: int) -> None:
    """A7

    partitioned consumer groups: "De-duplicate the list of members in the consumer group's configuration" "Sort the
    list" "Cap the list to the max number of members" "assigning continuous blocks of partitions of size (number of
    partitions divided by the number of members in the list)" "finally distribute the remainder (if the number of
    members in the list is not a multiple of the number of partitions) over the members using a modulo."
    """
    wanted = {name: seeds_filters(members, max_members, name) for name in {*members, "nobody"}}
    assert blocks(members, max_members, wanted) == wanted


@pytest.mark.parametrize(
    ("partitions", "before", "last", "first", "ideal"),
    [(100, 10, 55, 46, 9), (256, 9, 139, 123, 25), (64, 20, 4, 64, 3), (100, 20, 90, 80, 4)],
)
def test_members_move_fewer_partitions_than_blocks(
    partitions: int, before: int, last: int, first: int, ideal: int
) -> None:
    """A7: one member more. Blocks depend on where its name sorts; the sticky policy moves what the newcomer gets.

    partitioned consumer groups: "Minimization of the re-distribution of keys as the consumer group is scaled up or
    down."
    """
    old = [f"m{at:02}" for at in range(before)]
    was = block_owners(old, partitions)
    for newcomer, moved in (("z", last), ("a", first)):
        now = block_owners([*old, newcomer], partitions)
        assert sum(one != other for one, other in zip(was, now, strict=True)) == moved
    group = group_of({"t": partitions}, [{"member": name} for name in [*old, "z"]])
    group.config = GroupConfig(NONE, policy="members", max_members=partitions, members=tuple(old))
    assign(group)
    held = {at: p.owner for at, p in group.partitions.items()}
    group.config = GroupConfig(NONE, policy="members", max_members=partitions, members=(*old, "z"))
    found = lines(group)
    moves = [at for at, owner in held.items() if found[at][0] != owner]
    assert len(moves) == ideal
    assert {found[at][0] for at in moves} == {before + 1}


def lines(group: Group) -> dict[TopicPartition, list[int]]:
    assert group.config is not None
    found = RESTRICTED[group.config.policy](group, candidate_order(group, ()))
    return {at: list(line) for at, line in found.items()}


def assign(group: Group) -> None:
    """Gives every partition to the first in line."""
    owners = {(at.topic, at.partition): line[0] for at, line in lines(group).items()}
    sessions = [{"member": one.join.member} for one in group.sessions.values()]
    other = group_of({name: topic.count for name, topic in group.topics.items()}, sessions, owners)
    group.partitions, group.claims, group.sessions = other.partitions, other.claims, other.sessions


@given(
    st.lists(st.sampled_from("abcdef"), unique=True, min_size=1),
    st.lists(st.sampled_from("abcdefx"), max_size=8),
    st.integers(1, 20),
)
def test_every_partition_belongs_to_one_listed_member_and_shares_are_even(
    listed: list[str], running: list[str], partitions: int
) -> None:
    """A7: whoever is there; a member that is away keeps its share; the world after it came true gives the same."""
    group = group_of({"t": partitions}, [{"member": name} for name in running])
    group.config = GroupConfig(NONE, policy="members", max_members=partitions, members=tuple(listed))
    owners = names(group, candidate_order(group, ()))
    assert len(owners) == partitions
    counted = sorted(listed)[:partitions]
    loads = Counter(owners.values())
    assert set(loads) <= set(counted)
    assert max(loads.values()) - min(loads.get(name, 0) for name in counted) <= 1
    for at, line in lines(group).items():
        assert line == [sid for sid, one in group.sessions.items() if one.join.member == owners[at]]
    assign(group)
    assert names(group, candidate_order(group, ())) == owners


def test_a_mapping_is_obeyed_and_a_full_consumer_gives_way_to_its_standby() -> None:
    """A7, A5: partitions above the mapping belong to nobody; claims_max sends the rest to the next in line.

    partitioned consumer groups: "Support for both automatic or administratively defined mapping of members to
    partitions."
    """
    sessions = [{"member": "b"}, {"member": "a", "claims_max": 1}, {"member": "a"}, {"member": "c"}]
    group = group_of({"t": 5}, sessions)
    group.config = GroupConfig(
        NONE, policy="members", max_members=4, mappings=(Mapping("a", (0, 2, 3)), Mapping("b", (1,)))
    )
    found = lines(group)
    assert found == {
        TopicPartition("t", 0): [2, 3],
        TopicPartition("t", 1): [1],
        TopicPartition("t", 2): [3, 2],
        TopicPartition("t", 3): [3, 2],
    }


# --- running members


@pytest.mark.parametrize("policy", ["members", "blocks"])
@pytest.mark.parametrize("how", ["step-down", "rank"])
def test_a_first_one_with_few_places_gets_them_and_then_nothing_moves(policy: str, how: str) -> None:
    """A7: what was released for it is its own. Otherwise the owner of the others takes it back, without end."""
    cluster = cluster_of(partitions=4, policy=policy, members=("m1",))
    last = cluster.add("last", member="m1", rank=int(how == "rank"))
    cluster.run(9 * INTERVAL_MS)
    first = cluster.add("first", member="m1", claims_max=2)
    cluster.run(9 * INTERVAL_MS)
    if how == "step-down":
        cluster.must(StepDown(last.session, NONE))
        cluster.run(9 * INTERVAL_MS)
    written = len(cluster.verdicts)
    assert (len(first.owned), len(last.owned)) == (2, 2)
    cluster.run(20 * INTERVAL_MS)
    assert [*cluster.records(ReleasingPartition, written)] == []


def test_a_new_topic_of_a_lower_name_moves_nothing_of_another() -> None:
    """A7: a session keeps what it has before it takes what nobody has."""
    group = group_of({"alpha": 1, "zeta": 1}, [{"member": "a", "claims_max": 1}] * 2, {("zeta", 0): 1})
    group.config = GroupConfig(NONE, policy="members", max_members=2, members=("a",))
    assert lines(group) == {TopicPartition("alpha", 0): [2, 1], TopicPartition("zeta", 0): [1, 2]}


def cluster_of(*, partitions: int = 6, policy: str = "members", **settings: object) -> VirtualCluster:
    cluster = VirtualCluster(partitions=partitions)
    settings.setdefault("max_members", partitions)
    cluster.must(GroupConfig(NONE, policy=policy, **settings))  # type: ignore[arg-type]
    return cluster


def update(cluster: VirtualCluster, **settings: object) -> None:
    group = cluster.world.groups["billing"]
    assert group.config is not None
    base = {"policy": group.config.policy, "max_members": group.config.max_members}
    cluster.must(GroupConfig(group.config_offset, **{**base, **settings}))  # type: ignore[arg-type]


def test_a_standby_says_for_whom_it_stands_by_and_when_the_next_one_takes_over() -> None:
    """That partitions of another member are free is not its business."""
    cluster = cluster_of(members=("m1", "m2"))
    first = cluster.add("first", member="m1")
    cluster.run(INTERVAL_MS)
    standby = cluster.add("standby", member="m1")
    cluster.run(3 * INTERVAL_MS)
    assert (first.owned, standby.owned) == ({0, 1, 2}, set())
    stands_by = "its turn: it stands by for first, which owns all that it could own. The next in line takes over when "
    assert why_idle(standby.member) == f"{stands_by}first leaves, and 6 s after first dies"
    cluster.kill(first)
    cluster.run(4 * INTERVAL_MS)
    assert (standby.owned, why_idle(standby.member)) == ({0, 1, 2}, "")


def test_who_works_for_a_member_beyond_max_members_is_told_so() -> None:
    """The first names count (A7); to add the name once more would change nothing."""
    cluster = cluster_of(max_members=2, members=("m1", "m2", "m3"))
    cluster.add("third", member="m3")
    cluster.run(INTERVAL_MS)
    (found,) = [one for one in standstills(cluster.group) if one.cause == "unlisted"]
    assert found.text == "'third' gets no partition: member 'm3' is beyond max_members"
    assert found.advice == "2 members count: m1, m2. To have others, marshal groups update billing --drop-member NAME"


def test_a_standby_of_an_open_policy_names_all_whom_it_stands_by_for() -> None:
    cluster = VirtualCluster(partitions=2)
    cluster.team("a", "b")
    standby = cluster.add("c")
    cluster.run(3 * INTERVAL_MS)
    says = "its turn: it stands by for a, b, which own all that it could own. The next in line takes over when "
    assert why_idle(standby.member) == f"{says}one of them leaves, and 6 s after one of them dies"


@pytest.mark.parametrize("policy", ["members", "blocks"])
def test_each_member_owns_its_share_and_a_missing_one_leaves_its_partitions_alone(policy: str) -> None:
    """A7: nobody stands in for a member of another name.

    partitioned consumer groups: "Starting to 'consume' doesn't mean that messages will actually start being
    delivered to the client application"
    """
    cluster = cluster_of(policy=policy, members=("m1", "m2", "m3"))
    one, two = cluster.add("one", member="m1"), cluster.add("two", member="m2")
    other = cluster.add("other", member="m9")
    cluster.run(5 * INTERVAL_MS)
    assert (one.owned, two.owned, other.owned) == ({0, 1}, {2, 3}, set())
    three = cluster.add("three", member="m3")
    cluster.run(3 * INTERVAL_MS)
    assert three.owned == {4, 5}


def test_a_standby_takes_over_after_a_crash_and_after_a_step_down() -> None:
    """A7, F9.9: the instances of one name; the oldest is active, and who stepped down comes last.

    partitioned consumer groups: "Starting to 'consume' doesn't mean that messages will actually start being
    delivered to the client application" "if more than one instance of the same member are joined to the consumer
    group at the time, being selected as the 'exclusive' client application instance receiving the messages for that
    member's subset of the subjects in the stream." "Fault-tolerance through the deployment of 'standby' consuming
    client applications that automatically take over the consumption of messages even in the case of process or host
    failure." "Request the current active member instance for a member to step-down and have another member instance
    currently joined (if there's one take over as the current active member instance)" "wait a second before going
    back to trying to create the synchronization consumer"
    """
    cluster = cluster_of(members=("m1", "m2"))
    first = cluster.add("first", member="m1")
    cluster.run(INTERVAL_MS)
    standby = cluster.add("standby", member="m1")
    other = cluster.add("other", member="m2")
    cluster.run(3 * INTERVAL_MS)
    assert (first.owned, standby.owned, other.owned) == ({0, 1, 2}, set(), {3, 4, 5})
    kept = {claim.epoch for claim in other.member.claims.values()}
    cluster.must(StepDown(first.session, NONE))
    cluster.run(INTERVAL_MS)
    assert (first.owned, standby.owned) == (set(), {0, 1, 2})
    cluster.kill(standby)
    cluster.run(4 * INTERVAL_MS)
    assert first.owned == {0, 1, 2}
    assert {claim.epoch for claim in other.member.claims.values()} == kept, "partitions that stay are not touched"


def test_members_come_and_go_while_consumers_run() -> None:
    """A7, A4: the list changes; what does not move keeps its claim; who is dropped releases everything.

    partitioned consumer groups: "As soon as they get the config update, they first delete the consumers, and then
    wait a small amount of time before trying to create the new consumer again with the new filters." "In order to
    avoid flapping of the active member instance on membership changes the currently active instance waits a fixed
    amount of time 500ms before trying to create the consumer while the others wait 500ms plus a random amount of
    time up to 100ms before trying."
    """
    cluster = cluster_of(members=("m1", "m2"))
    one, two, three = (cluster.add(name, member=name) for name in ("m1", "m2", "m3"))
    cluster.run(3 * INTERVAL_MS)
    before = {claim.tp: claim.epoch for client in (one, two) for claim in client.member.claims.values()}
    assert (one.owned, two.owned, three.owned) == ({0, 1, 2}, {3, 4, 5}, set())
    update(cluster, members=("m1", "m2", "m3"))
    cluster.run(INTERVAL_MS)
    assert (one.owned, two.owned, three.owned) == ({0, 1}, {3, 4}, {2, 5})
    assert all(before[claim.tp] == claim.epoch for claim in [*one.member.claims.values(), *two.member.claims.values()])
    update(cluster, members=("m1", "m3"))
    cluster.run(INTERVAL_MS)
    assert (len(one.owned), two.owned, len(three.owned)) == (3, set(), 3)
    update(cluster, mappings=(Mapping("m2", (0, 1, 2, 3, 4, 5)),))
    cluster.run(INTERVAL_MS)
    assert two.owned == {0, 1, 2, 3, 4, 5}
    update(cluster)
    cluster.run(INTERVAL_MS)
    assert not cluster.owners(), "nobody is listed"


def test_a_dropped_member_waits_for_the_handlers_and_not_for_a_successor_that_is_away() -> None:
    """A7: it drains for at most its hand-over timeout, and names no successor."""
    cluster = cluster_of(partitions=2, members=("m1", "m2"))
    one = cluster.add("one", member="m1", hand_over_timeout_ms=INTERVAL_MS)
    cluster.run(2 * INTERVAL_MS)
    one.deliver(one.claim(0), 0)
    update(cluster, members=("m2",))
    cluster.run(INTERVAL_MS // 2)
    assert one.owned == {0}, "its handler still works"
    cluster.run(INTERVAL_MS)
    assert one.owned == set()
    releases = [record for verdict, record in cluster.records(ReleasingPartition) if verdict.accepted]
    assert [(record.reason, record.successor) for record in releases] == [("unassigned", NONE)]


def test_a_successor_that_never_fetches_ahead_gets_its_partitions_after_an_interval() -> None:
    """A7: a member keeps no partition that belongs to another name."""
    cluster = cluster_of(partitions=2, members=("m1",))
    one, two = cluster.add("one", member="m1"), cluster.add("two", member="m2")
    two.prefetch_succeeds = False
    cluster.run(2 * INTERVAL_MS)
    update(cluster, members=("m2",))
    cluster.run(INTERVAL_MS // 2)
    assert one.owned == {0, 1}
    cluster.run(2 * INTERVAL_MS)
    assert (one.owned, two.owned) == (set(), {0, 1})


def test_a_clean_stop_moves_partitions_to_the_standby_once() -> None:
    """A6, A7

    partitioned consumer groups: "When that other instance of "m1" decides to stop consuming, it will delete that
    consumer, and another instance will be the first one to succeed in creating its version of that consumer."
    """
    cluster = cluster_of(members=("m1",))
    first = cluster.add("first", member="m1")
    cluster.run(INTERVAL_MS)
    standby = cluster.add("standby", member="m1")
    cluster.run(2 * INTERVAL_MS)
    first.member.prepare_stop()
    cluster.run(INTERVAL_MS // 2)
    assert standby.owned == {0, 1, 2, 3, 4, 5}
    first.member.leave(first.now, "", 0)
    cluster.run(INTERVAL_MS)
    assert not first.alive
    standby.member.prepare_stop()
    assert standby.member.ready_to_stop(), "nobody else works for m1"


# --- settings


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"policy": "members"}, "max_members"),
        ({"policy": "blocks", "members": ("m1",)}, "max_members"),
        ({"policy": "members", "max_members": 2, "members": ("a",), "mappings": {"a": [0, 1]}}, "never both"),
        ({"policy": "members", "max_members": 3, "mappings": {"a": [0, 1]}}, "nobody has partition 2"),
        ({"policy": "members", "max_members": 2, "mappings": {"a": [0, 1], "b": [1]}}, "both have partition 1"),
        ({"policy": "members", "max_members": 2, "mappings": {"a": [0, 1, 1]}}, "has partition 1 twice"),
        ({"policy": "blocks", "max_members": 2, "mappings": {"a": [0, 1, 2]}}, "2 is above 1"),
        ({"policy": "members", "max_members": 1, "mappings": {"a": [-1]}}, "whole numbers"),
        ({"policy": "balanced", "max_members": 2}, "only the policies"),
        ({"policy": "", "members": ("a",)}, "only the policies"),
        ({"policy": "random"}, "one of"),
    ],
)
def test_settings_that_the_seed_refuses_are_refused_with_its_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        check_settings(**settings)


def check_settings(mappings: dict[str, object] | None = None, **settings: object) -> None:
    named = {**settings, "mappings": group_settings.mappings_of(mappings)} if mappings is not None else settings
    group_settings.check(GroupConfig(NONE, **named), named)  # type: ignore[arg-type]


def test_two_mappings_of_one_member_are_refused() -> None:
    twice = GroupConfig(NONE, policy="members", max_members=2, mappings=(Mapping("a", (0,)), Mapping("a", (1,))))
    with pytest.raises(InvalidOption, match="one mapping"):
        group_settings.check(twice, ())


@pytest.mark.parametrize(
    ("before", "after", "allowed"),
    [
        ("balanced", "greedy", True),
        ("", "greedy", True),
        ("greedy", "", True),
        ("balanced", "members", False),
        ("", "blocks", False),
        ("members", "balanced", False),
        ("members", "blocks", False),
        ("blocks", "", False),
    ],
)
def test_which_policies_may_replace_each_other(before: str, after: str, allowed: bool) -> None:
    old, new = (GroupConfig(NONE, policy=policy, max_members=2) for policy in (before, after))
    if allowed:
        group_settings.check_change("billing", old, 0, new)
        return
    with pytest.raises(InvalidOption, match=r"for its whole life|exists with (no|the) policy"):
        group_settings.check_change("billing", old, 0, new)


def test_of_a_partitioned_group_only_members_and_mappings_change() -> None:
    """partitioned consumer groups: "the list of members or the list member mappings are the only part of its
    configuration that can be changed."
    """
    old = GroupConfig(NONE, policy="members", max_members=4, members=("a",))
    group_settings.check_change("billing", old, 0, GroupConfig(NONE, policy="members", max_members=4, members=("b",)))
    with pytest.raises(InvalidOption, match="has the max_members 4 for its whole life"):
        group_settings.check_change(
            "billing", old, 0, GroupConfig(NONE, policy="members", max_members=5, members=("a",))
        )


def test_a_consumer_names_its_member_and_only_in_a_partitioned_group() -> None:
    config = GroupConfig(NONE, policy="members", max_members=2, members=("m1",))
    group_settings.check_consumer("billing", config, MemberOptions(client_id="c", member="m1"))
    group_settings.check_consumer("billing", GroupConfig(NONE), MemberOptions(client_id="c"))
    with pytest.raises(InvalidOption, match="name one of m1"):
        group_settings.check_consumer("billing", config, MemberOptions(client_id="c"))
    options = MemberOptions(client_id="c", member="m1")
    for policy, chosen in (("", "no policy in its settings"), ("greedy", "the policy greedy")):
        rule = f"^member='m1' .* group 'billing' has {chosen}: only the policies blocks and members obey it$"
        with pytest.raises(InvalidOption, match=rule):
            group_settings.check_consumer("billing", GroupConfig(NONE, policy=policy), options)


# --- a group that its first consumer creates


def test_the_first_consumer_creates_the_group_once() -> None:
    """A8: whoever writes first; a consumer that brings other settings obeys the ones that are there."""
    cluster = VirtualCluster(partitions=4)
    first, second = (
        GroupConfig(NONE, policy="blocks", max_members=4, members=members) for members in (("m1", "m2"), ("m1",))
    )
    one = cluster.add("one", member="m1", group_config=first)
    two = cluster.add("two", member="m2", group_config=first)
    cluster.add("three", member="m1", group_config=second)
    cluster.run(3 * INTERVAL_MS)
    assert (one.owned, two.owned) == ({0, 1}, {2, 3})
    (accepted,) = [record for verdict, record in cluster.records(GroupConfig) if verdict.accepted]
    assert (accepted.policy, accepted.members, accepted.by) == ("blocks", ("m1", "m2"), "one")


def test_the_settings_of_a_group_that_has_some_stay() -> None:
    """A8"""
    cluster = VirtualCluster(partitions=4)
    cluster.must(GroupConfig(NONE, policy="greedy"))
    cluster.add("one", group_config=GroupConfig(NONE, policy="balanced"))
    cluster.run(3 * INTERVAL_MS)
    assert len(list(cluster.records(GroupConfig))) == 1
