"""The policies alone: which session should own which partition (PROTOCOL.md A1, A2, A4, A5, F9.9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.protocol.fold.policies import DEFAULT_POLICY, KNOWN, OWN_POLICIES
from marshal_py.protocol.fold.world import Group, Partition, Session, Topic
from marshal_py.protocol.policy import OPEN, RESTRICTED, candidate_order
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import Join


def group_of(
    topics: dict[str, int], sessions: Sequence[dict[str, object]], owners: dict[tuple[str, int], int] | None = None
) -> Group:
    """A world as a policy sees it. Sessions are numbered from 1; `owners` names them."""
    group = Group("g")
    for name, count in topics.items():
        group.topics[name] = Topic(0, count, count, 0)
    for number, fields in enumerate(sessions, 1):
        options = {"topics": tuple(topics), **fields}
        mark = options.pop("mark", NONE)
        join = Join("c", number.to_bytes(16, "big"), 1, 1_000, **options)  # type: ignore[arg-type]
        group.sessions[number] = Session(number, join, b"", 0, number, mark)  # type: ignore[arg-type]
    for epoch, ((topic, number), owner) in enumerate((owners or {}).items(), 1_000):
        tp = TopicPartition(topic, number)
        group.partitions[tp] = Partition(tp, 0, owner, epoch, 0, 0, epoch)
        group.claims[epoch] = group.partitions[tp]
        group.sessions[owner].held += 1
    return group


def target(group: Group, policy: str = "balanced", out: Sequence[int] = ()) -> dict[TopicPartition, int]:
    return dict(OPEN[policy](group, candidate_order(group, set(out))))


def owners_of(group: Group) -> dict[tuple[str, int], int]:
    return {tuple(tp): p.owner for tp, p in group.partitions.items() if p.owner != NONE}  # type: ignore[misc]


def shared(partitions: int, sessions: int) -> dict[tuple[str, int], int]:
    """Owners after `sessions` members shared one topic out."""
    found = target(group_of({"t": partitions}, [{}] * sessions))
    return {(tp.topic, tp.partition): owner for tp, owner in found.items()}


def moves(before: dict[tuple[str, int], int], after: dict[TopicPartition, int]) -> int:
    return sum(after[TopicPartition(*key)] != owner for key, owner in before.items())


@pytest.mark.parametrize(
    ("partitions", "before", "after", "moved"), [(100, 10, 11, 9), (256, 9, 10, 25), (64, 20, 21, 3)]
)
def test_a_newcomer_costs_the_least_number_of_moves(partitions: int, before: int, after: int, moved: int) -> None:
    """A1, A4: balanced moves what the newcomer gets and nothing else; greedy moves nothing."""
    owners = shared(partitions, before)
    group = group_of({"t": partitions}, [{}] * after, owners)
    found = target(group)
    assert moves(owners, found) == moved
    assert all(
        found[TopicPartition(*key)] == after for key, owner in owners.items() if found[TopicPartition(*key)] != owner
    ), "every move goes to the newcomer"
    loads = Counter(found.values())
    assert max(loads.values()) - min(loads.values()) <= 1
    assert moves(owners, target(group, "greedy")) == 0


@pytest.mark.parametrize(("partitions", "before"), [(100, 11), (64, 21), (12, 5)])
def test_a_gone_member_costs_only_what_it_had(partitions: int, before: int) -> None:
    """A1, A4: the partitions of a dead member are shared among the rest; no other partition moves."""
    owners = shared(partitions, before)
    group = group_of({"t": partitions}, [{}] * before, owners)
    found = target(group, out=[before])
    assert moves(owners, found) == list(owners.values()).count(before)
    loads = Counter(found.values())
    assert before not in loads
    assert max(loads.values()) - min(loads.values()) <= 1


def test_a_balanced_group_stays_as_it_is() -> None:
    """A1: sticky: the target of what was reached is what was reached, for both policies."""
    owners = shared(31, 7)
    group = group_of({"t": 31}, [{}] * 7, owners)
    assert moves(owners, target(group)) == moves(owners, target(group, "greedy")) == 0


def test_a_partition_goes_back_to_its_last_owner() -> None:
    """A1: free ones: the successor that the release named, else the last owner, else the least loaded."""
    group = group_of({"t": 6}, [{}, {}, {}], {("t", 3): 1, ("t", 4): 2, ("t", 5): 3})
    for number, last, successor in ((0, 3, NONE), (1, 1, 2), (2, 77, 88)):
        tp = TopicPartition("t", number)
        group.partitions[tp] = Partition(tp, 0, NONE, NONE, 0, 0, 50 + number, last, successor)
    found = target(group)
    assert [found[TopicPartition("t", number)] for number in range(6)] == [3, 2, 1, 1, 2, 3]


def test_capacity_weighs() -> None:
    """A1: twice the capacity, twice the partitions, also when partitions must move for that."""
    fields = [{"capacity": 1}, {"capacity": 2}, {"capacity": 3}]
    assert Counter(target(group_of({"t": 24}, fields)).values()) == {1: 4, 2: 8, 3: 12}
    all_at_one = {("t", number): 1 for number in range(24)}
    found = target(group_of({"t": 24}, fields, all_at_one))
    assert Counter(found.values()) == {1: 4, 2: 8, 3: 12}


def test_claims_max_is_a_bound() -> None:
    """A5: never more than that, also when partitions then stay free; 0 is no bound."""
    found = target(group_of({"t": 10}, [{"claims_max": 2}, {"claims_max": 3}]))
    assert Counter(found.values()) == {1: 2, 2: 3}
    found = target(group_of({"t": 10}, [{"claims_max": 2}, {}]))
    assert Counter(found.values()) == {1: 2, 2: 8}
    owners = {("t", number): 1 for number in range(4)}
    found = target(group_of({"t": 4}, [{"claims_max": 1}, {}], owners))
    assert found == {TopicPartition("t", n): 1 if n == 0 else 2 for n in range(4)}, "it keeps the lowest"


def test_own_topics_only() -> None:
    """A5: no member gets a topic that it did not name; a topic that no member named stays free."""
    fields = [{"topics": ("a",)}, {"topics": ("b",)}, {"topics": ("a", "b")}]
    found = target(group_of({"a": 6, "b": 6, "c": 6}, fields))
    assert {tp.topic for tp in found} == {"a", "b"}
    assert len(found) == 12
    assert all(tp.topic in fields[owner - 1]["topics"] for tp, owner in found.items())
    assert set(Counter(found.values()).values()) <= {3, 4, 5}, "one at a time, no chain of moves is looked for"


def test_a_marked_session_comes_last() -> None:
    """A1, F9.9: a marked session gives its partitions to any candidate that can take them, and keeps the others."""
    owners = {("t", number): 1 + number % 2 for number in range(8)}
    found = target(group_of({"t": 8}, [{"mark": 9}, {}], owners))
    assert set(found.values()) == {2}
    found = target(group_of({"t": 8}, [{"mark": 9}, {"mark": 10}], owners))
    assert Counter(found.values()) == {1: 4, 2: 4}, "where all are marked nobody is"
    found = target(group_of({"t": 4, "u": 4}, [{"mark": 9}, {"topics": ("t",)}]))
    assert all(found[TopicPartition("t", number)] == 2 for number in range(4))
    assert all(found[TopicPartition("u", number)] == 1 for number in range(4)), "never absent"
    found = target(group_of({"t": 8}, [{"mark": 9}, {"claims_max": 3}], owners))
    assert Counter(found.values()) == {1: 5, 2: 3}


def test_the_order_of_candidates() -> None:
    """A2, F9.9: marked or not, mark, priority, rank, session; without those that the caller has waited out."""
    fields = [
        {"mark": 50},
        {"priority": 1},
        {"rank": 5},
        {"rank": 1, "priority": 2},
        {},
        {"mark": 40, "priority": 9},
        {"rank": 5},
    ]
    group = group_of({"t": 1}, fields)
    assert candidate_order(group, set()) == [5, 3, 7, 2, 4, 6, 1]
    assert candidate_order(group, {5, 6, 99}) == [3, 7, 2, 4, 1]


def test_the_default_policy_moves() -> None:
    """A1, A3: balanced is the default and takes from live owners; greedy does not."""
    assert DEFAULT_POLICY == "balanced"
    assert set(OWN_POLICIES) == {"balanced", "greedy"} == set(OPEN) - {"prioritized"}
    assert not KNOWN["greedy"].moves
    assert KNOWN["balanced"].moves
    assert OPEN.keys() | RESTRICTED.keys() == KNOWN.keys(), "each policy says who should own what"


# --- properties

TOPICS = {"a": 5, "b": 3, "c": 4}
SESSION = st.fixed_dictionaries(
    {},
    optional={
        "topics": st.lists(st.sampled_from(sorted(TOPICS)), unique=True, max_size=3).map(tuple),
        "capacity": st.integers(1, 4),
        "claims_max": st.integers(0, 5),
        "rank": st.integers(0, 2),
        "priority": st.integers(0, 2),
        "mark": st.sampled_from([NONE, NONE, NONE, 7, 8]),
    },
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    sessions = draw(st.lists(SESSION, min_size=1, max_size=5))
    owners = {}
    for topic, count in TOPICS.items():
        for number in range(count):
            owner = draw(st.integers(0, len(sessions)))
            if owner:
                owners[topic, number] = owner
    return group_of(TOPICS, sessions, owners)


@given(groups(), st.sampled_from(["balanced", "greedy"]), st.randoms())
def test_every_target_is_sound(group: Group, policy: str, chance: object) -> None:
    """A1, A5: complete if a candidate wants a partition and has room; within topics and claims_max; equal for all."""
    found = target(group, policy)
    joins = {sid: session.join for sid, session in group.sessions.items()}
    loads = Counter(found.values())
    for sid, join in joins.items():
        assert not join.claims_max or loads[sid] <= join.claims_max
    for topic, count in TOPICS.items():
        for number in range(count):
            owner = found.get(TopicPartition(topic, number))
            if owner is not None:
                assert topic in joins[owner].topics
            else:
                assert not any(
                    topic in join.topics and (not join.claims_max or loads[sid] < join.claims_max)
                    for sid, join in joins.items()
                ), "a candidate wants it and has room"
    assert len(found) <= sum(TOPICS.values())
    # The same whatever order dicts were filled in: two members that hold the same world have the same target.
    other = group_of(TOPICS, [])
    for name in ("topics", "sessions", "partitions"):
        items = list(getattr(group, name).items())
        chance.shuffle(items)  # type: ignore[attr-defined]
        getattr(other, name).clear()
        getattr(other, name).update(items)
    assert target(other, policy) == found


@given(groups())
def test_greedy_takes_nothing_from_anybody(group: Group) -> None:
    """A1: an owner keeps its partitions if it is unmarked and wants them, up to its claims_max."""
    found = target(group, "greedy")
    for tp, partition in group.partitions.items():
        join = group.sessions[partition.owner].join
        bound = join.claims_max and group.sessions[partition.owner].held > join.claims_max
        if group.sessions[partition.owner].mark == NONE and tp.topic in join.topics and not bound:
            assert found[tp] == partition.owner


@given(groups())
def test_balanced_ends_where_no_single_move_helps(group: Group) -> None:
    """A1: no unmarked member with room is left with less, by capacity, than one more move would give it."""
    found = target(group)
    marked = {sid for sid, session in group.sessions.items() if session.mark != NONE}
    if len(marked) == len(group.sessions):
        marked = set()
    loads = Counter(found.values())
    for tp, giver in found.items():
        for sid, session in group.sessions.items():
            join = session.join
            room = not join.claims_max or loads[sid] < join.claims_max
            if giver not in marked and sid not in marked and sid != giver and tp.topic in join.topics and room:
                load = loads[giver] / group.sessions[giver].join.capacity
                assert (loads[sid] + 1) / join.capacity >= load


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12))
def test_no_more_moves_than_needed(partitions: int, before: int, after: int) -> None:
    """A1, A4: equal members, one topic: from n to m members, exactly the surplus moves."""
    owners = shared(partitions, before)
    staying = min(before, after)
    group = group_of({"t": partitions}, [{}] * max(before, after), owners)
    found = target(group, out=range(after + 1, before + 1))
    loads = sorted(Counter(o for o in owners.values() if o <= staying).values(), reverse=True)
    loads += [0] * (staying - len(loads))
    low, extra = divmod(partitions, after)
    surplus = sum(max(0, load - low - (at < extra)) for at, load in enumerate(loads))
    gone = sum(owner > staying for owner in owners.values())
    assert moves(owners, found) == surplus + gone


def fewest_moves(partitions: int, has: Sequence[int], weights: Sequence[int]) -> int:
    """The moves that any assignment costs which fills the lowest slots: at a tie, who has the partition keeps it."""
    slots = [
        (Fraction(k, weight), k > had)
        for had, weight in zip(has, weights, strict=True)
        for k in range(1, partitions + 1)
    ]
    heights = sorted(height for height, _ in slots)
    last = heights[partitions - 1]
    ties = partitions - sum(height < last for height in heights)
    kept = sum(height < last and not new for height, new in slots)
    return sum(has) - kept - min(ties, sum(height == last and not new for height, new in slots))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=6), st.integers(0, 6))
def test_balanced_never_moves_more_than_the_ideal(members: list[tuple[int, int]], free: int) -> None:
    """A1, A4: whatever the members have, and whatever their capacity: no balanced assignment costs fewer moves."""
    has, weights = [count for count, _ in members], [weight for _, weight in members]
    partitions = sum(has) + free
    if not partitions:
        return
    owner = [sid for sid, count in enumerate(has, 1) for _ in range(count)]
    group = group_of(
        {"t": partitions},
        [{"capacity": weight} for weight in weights],
        {("t", at): sid for at, sid in enumerate(owner)},
    )
    assert moves(owners_of(group), target(group)) == fewest_moves(partitions, has, weights)
