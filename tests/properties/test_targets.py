"""Targets against a plain, slow reading of PROTOCOL.md A1, on random worlds; and how members carry them out."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.protocol.fold.policies import OWN_POLICIES
from marshal_py.protocol.fold.world import Group, Partition, Session, Topic
from marshal_py.protocol.policy import OPEN, candidate_order
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import Join

COUNTS = {"a": 5, "b": 3, "c": 7, "d": 1}
SWEEPS_MAX = 100


class Reference:
    """A1, sentence by sentence."""

    def __init__(self, group: Group, order: Sequence[int], policy: str) -> None:
        self.group, self.policy = group, policy
        sessions = [group.sessions[sid] for sid in order]
        unmarked = any(session.mark == NONE for session in sessions)
        self.standing = [s for s in sessions if unmarked and s.mark != NONE]
        self.taking = [s for s in sessions if s not in self.standing]
        self.has: dict[int, list[TopicPartition]] = {session.id: [] for session in self.taking}
        self.gets: dict[tuple[int, int], int] = {}  # (pool, session) -> how many
        self.pools = self.make_pools(sessions)
        self.find_holders()

    def make_pools(self, sessions: list[Session]) -> list[list[TopicPartition]]:
        alike: dict[frozenset[int], list[str]] = {}
        for name in sorted(self.group.topics):
            consumers = frozenset(s.id for s in sessions if name in s.join.topics)
            if consumers:
                alike.setdefault(consumers, []).append(name)
        return [sorted((tp for name in names for tp in self.unparked(name)), key=self.key) for names in alike.values()]

    def unparked(self, name: str) -> list[TopicPartition]:
        tps = [TopicPartition(name, number) for number in range(self.group.topics[name].count)]
        return [tp for tp in tps if not self.group.parked(tp)]

    def key(self, tp: TopicPartition) -> tuple[Fraction, str]:
        return Fraction(tp.partition, self.group.topics[tp.topic].count), tp.topic

    def find_holders(self) -> None:
        for owned in (True, False):
            for tp in [tp for pool in self.pools for tp in pool]:
                known = self.group.partitions.get(tp)
                if known is None or (known.owner != NONE) is not owned:
                    continue
                line = [known.owner] if owned else [known.successor, known.last_owner]
                line = [sid for sid in line if sid in self.has or any(s.id == sid for s in self.standing)]
                holder = next((s for s in self.taking if line and s.id == line[0]), None)
                if holder is None or tp.topic not in holder.join.topics:
                    continue
                if not holder.join.claims_max or len(self.has[holder.id]) < holder.join.claims_max:
                    self.has[holder.id].append(tp)
        for at, pool in enumerate(self.pools):
            for session in self.consumers(at, self.taking):
                self.gets[at, session.id] = len([tp for tp in self.has[session.id] if tp in pool])

    def consumers(self, at: int, sessions: list[Session]) -> list[Session]:
        return [s for s in sessions if self.pools[at] and self.pools[at][0].topic in s.join.topics]

    def elsewhere(self, at: int, session: Session) -> int:
        return sum(count for (pool, sid), count in self.gets.items() if sid == session.id and pool != at)

    def fill(self, at: int) -> bool:
        """One pool: whether anything changed."""
        slots = []
        sure = {}
        for place, session in enumerate(self.consumers(at, self.taking)):
            has, n = self.gets[at, session.id], self.elsewhere(at, session)
            sure[session.id] = has if self.policy == "greedy" else 0
            for k in range(sure[session.id] + 1, len(self.pools[at]) + 1):
                if not session.join.claims_max or n + k <= session.join.claims_max:
                    slots.append((Fraction(n + k, session.join.capacity), k > has, place, k, session.id))
        slots.sort()
        filled = slots[: len(self.pools[at]) - sum(sure.values())]
        after = {sid: count + sum(slot[-1] == sid for slot in filled) for sid, count in sure.items()}
        changed = any(self.gets[at, sid] != count for sid, count in after.items())
        self.gets.update({(at, sid): count for sid, count in after.items()})
        return changed

    def target(self) -> dict[TopicPartition, int]:
        for _ in range(1 if self.policy == "greedy" else SWEEPS_MAX):
            if not any([self.fill(at) for at in range(len(self.pools))]):
                break
        found: dict[TopicPartition, int] = {}
        loads = dict.fromkeys((s.id for s in self.standing), 0)
        for at, pool in enumerate(self.pools):
            self.deal(at, pool, found, loads)
        return found

    def deal(
        self, at: int, pool: list[TopicPartition], found: dict[TopicPartition, int], loads: dict[int, int]
    ) -> None:
        takers = self.consumers(at, self.taking)
        for session in takers:
            mine = [tp for tp in self.has[session.id] if tp in pool]
            found.update(dict.fromkeys(mine[: self.gets[at, session.id]], session.id))
        owners = {tp: known.owner for tp, known in self.group.partitions.items()}
        rest = [tp for tp in pool if tp not in found]
        rest.sort(
            key=lambda tp: (
                owners.get(tp, NONE) in loads and any(s.id == owners[tp] for s in self.consumers(at, self.standing))
            )
        )
        for session in takers:
            gets = self.gets[at, session.id]
            while rest and sum(found.get(tp) == session.id for tp in pool) < gets:
                found[rest.pop(0)] = session.id
        reserve = self.consumers(at, self.standing)
        for keep in (True, False):
            for tp in list(rest):
                able = [s for s in reserve if not s.join.claims_max or loads[s.id] < s.join.claims_max]
                if keep:
                    able = [s for s in able if s.id == owners.get(tp, NONE)]
                if able:
                    best = min(able, key=lambda s: (Fraction(loads[s.id] + 1, s.join.capacity), reserve.index(s)))
                    loads[best.id] += 1
                    found[tp] = best.id
                    rest.remove(tp)


SESSION = st.fixed_dictionaries(
    {
        "topics": st.lists(st.sampled_from(sorted(COUNTS)), unique=True, max_size=4).map(tuple),
        "capacity": st.integers(1, 4),
        "claims_max": st.sampled_from([0, 0, 1, 2, 5]),
        "rank": st.integers(0, 1),
        "priority": st.sampled_from([0, 0, 1]),
    }
)


@st.composite
def worlds(draw: st.DrawFn, *, alike: bool = False) -> Group:
    """Sessions, owners, releases that named a successor, former owners that are gone, marks, parked partitions."""
    group = Group("g")
    for name, count in COUNTS.items():
        group.topics[name] = Topic(0, count, count, 0)
    topics = draw(SESSION)["topics"]
    for sid in range(1, draw(st.integers(1, 6)) + 1):
        fields = draw(SESSION)
        if alike:
            fields["topics"] = topics
        mark = draw(st.sampled_from([NONE, NONE, NONE, sid + 50]))
        join = Join("c", sid.to_bytes(16, "big"), 1, 1_000, **fields)
        group.sessions[sid] = Session(sid, join, b"", 0, sid, mark)
    who = st.integers(0, len(group.sessions) + 2)
    for name, count in COUNTS.items():
        for number in range(count):
            tp, owner = TopicPartition(name, number), draw(who)
            known = Partition(tp, 0, generation=1)
            if owner in group.sessions:
                own(group, known, owner)
            elif draw(st.booleans()):
                known.last_owner, known.successor = draw(who), draw(st.sampled_from([NONE, 1, 2, 99]))
                known.parked = draw(st.sampled_from(["", "", "", "poison"]))
            else:
                continue
            group.partitions[tp] = known
    return group


def own(group: Group, known: Partition, owner: int) -> None:
    """The partition belongs to the session from now on."""
    if known.owner != NONE:
        group.sessions[known.owner].held -= 1
        del group.claims[known.epoch]
    known.owner, known.successor = owner, NONE
    known.epoch = known.version = 1_000 + len(COUNTS) * max(COUNTS.values()) + len(group.claims)
    while known.epoch in group.claims:
        known.epoch += 1
    group.claims[known.epoch] = known
    group.sessions[owner].held += 1


def target(group: Group, policy: str) -> dict[TopicPartition, int]:
    return dict(OPEN[policy](group, candidate_order(group, set())))


@given(worlds(), st.sampled_from(OWN_POLICIES))
def test_a_target_is_what_the_text_says(group: Group, policy: str) -> None:
    """A1: pools, slots, what each keeps, how the rest is dealt, and what those that stand by get."""
    assert target(group, policy) == Reference(group, candidate_order(group, set()), policy).target()


@given(worlds(alike=True), st.sampled_from(sorted(OPEN)), st.randoms())
def test_a_target_that_came_true_in_part_is_the_same(group: Group, policy: str, chance: Random) -> None:
    """A1: some members have claimed what the target gives them, or had it released to them: the target stays.

    So of many hand-overs at once each is begun once.
    """
    marked = any(session.mark != NONE for session in group.sessions.values())
    before = target(group, policy)
    for tp, owner in before.items():
        known = group.partitions.setdefault(tp, Partition(tp, 0, generation=1))
        if known.owner == owner or chance.random() < 0.5 or (marked and group.sessions[owner].mark != NONE):
            continue
        if known.owner != NONE and chance.random() < 0.3:
            group.sessions[known.owner].held -= 1
            del group.claims[known.epoch]
            known.last_owner, known.owner, known.epoch, known.successor = known.owner, NONE, NONE, owner
        else:
            own(group, known, owner)
    assert target(group, policy) == before


@pytest.mark.parametrize("policy", sorted(OPEN))
@pytest.mark.parametrize("owners", [0, 1, 7, 40])
def test_a_target_looks_at_each_partition_a_few_times(policy: str, owners: int) -> None:
    """A1: however many members there are, and however many partitions move: work grows with the partitions alone."""
    looked = 0

    class Counting(dict[TopicPartition, Partition]):
        def get(self, key: TopicPartition, default: Partition | None = None) -> Partition | None:  # type: ignore[override]
            nonlocal looked
            looked += 1
            return super().get(key, default)

    group, partitions = Group("g"), 2_000
    group.topics["t"] = Topic(0, partitions, partitions, 0)
    for sid in range(1, 41):
        group.sessions[sid] = Session(sid, Join("c", sid.to_bytes(16, "big"), 1, 1_000, ("t",)), b"", 0, sid)
    for number in range(partitions if owners else 0):
        known = Partition(TopicPartition("t", number), 0, generation=1)
        own(group, known, 1 + number * owners // partitions)
        group.partitions[known.tp] = known
    group.partitions = Counting(group.partitions)
    assert len(target(group, policy)) == partitions
    assert looked <= 3 * partitions
