"""Ranks, head starts and free partitions against plain readings of PROTOCOL.md A2 and T4, on random worlds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.protocol.fold import world as worlds_module
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.candidacy import Candidacy
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.rebalance import HeadStarts
from marshal_py.protocol.policy import OPEN, candidate_order
from marshal_py.protocol.time import FailureDetector
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition
from marshal_py.protocol.wire.records import Leave, Topology
from tests.properties.test_targets import COUNTS, worlds
from tests.support.differential_log import INTERVAL_MS, TOPIC, DifferentialLog

THIRD_MS = INTERVAL_MS // 3
SEEDS = st.integers(0, 2**32)


def candidacy(group: Group, me: int, out: set[int], policy: str) -> Candidacy:
    """As a member that has waited out these sessions sees it."""
    clock = SimpleNamespace(counted_ms=0, step_ms_max=1)
    detector = SimpleNamespace(
        waited_out=lambda group: set(out), clock=clock, watch_covers=lambda group, **watched: None
    )
    options = SimpleNamespace(policy=policy, topics=group.sessions[me].join.topics, group_config=None)
    member = SimpleNamespace(session=me, pin=NONE, detector=detector, options=options, gone_topics=frozenset())
    found = Candidacy(cast(Member, member))
    found.refresh(group)
    return found


def rank_for(group: Group, me: int, out: set[int], policy: str, tp: TopicPartition) -> int:
    """A2, sentence by sentence."""
    order = candidate_order(group, out)
    joins = {sid: group.sessions[sid].join for sid in order}
    able = [
        sid
        for sid in order
        if tp.topic in joins[sid].topics
        and (not joins[sid].claims_max or group.sessions[sid].held < joins[sid].claims_max)
    ]
    known, line = group.partitions.get(tp), []
    target = OPEN[policy](group, order).get(tp)
    if known is not None and known.successor in able:
        line.append(known.successor)
    elif target is not None:
        line.append(target)
    if known is not None and known.last_owner in able:
        line.append(known.last_owner)
    line += [sid for sid in order if sid in able or sid == me]
    return list(dict.fromkeys(line)).index(me)


@given(worlds(), st.sampled_from(sorted(OPEN)), SEEDS)
def test_a_rank_is_the_place_in_the_line(group: Group, policy: str, seed: int) -> None:
    """A2: successor or target, former owner, then by F9.9; a member that cannot take the partition delays no other."""
    chance = Random(seed)
    me = chance.choice(list(group.sessions))
    out = {sid for sid in group.sessions if sid != me and chance.random() < 0.3}
    seen = candidacy(group, me, out, policy)
    for name in group.sessions[me].join.topics:
        for number in range(COUNTS[name]):
            tp = TopicPartition(name, number)
            assert seen.rank_for(group, tp) == rank_for(group, me, out, policy, tp)


@given(worlds(), SEEDS)
def test_a_member_that_joined_after_the_last_sign_comes_last(group: Group, seed: int) -> None:
    """T4: the rank over a silent session, of every member."""
    chance = Random(seed)
    for session in group.sessions.values():
        session.extended = chance.randrange(10)
    for me in group.sessions:
        seen = candidacy(group, me, set(), "balanced")
        for silent in group.sessions.values():
            line = sorted(seen.order, key=lambda sid: sid > silent.extended)
            assert seen.rank_over(silent) == line.index(me)


def at(ms: int) -> Instant:
    return Instant(ms, ms, ms)


def history(book: DifferentialLog, chance: Random) -> Callable[[], Any]:
    """Something that happens to the group, at each call."""
    sessions = [book.join() for _ in range(3)]
    book.topology(6)

    def act() -> None:
        group, number = book.group, chance.randrange(6)
        known = group.partitions.get(TopicPartition(TOPIC, number))
        session = chance.choice(sessions)
        if chance.random() < 0.05:
            book.must(Leave(session))
            sessions.remove(session)
            sessions.append(book.join())
        elif chance.random() < 0.05:
            book.must(Topology(TOPIC, group.topics[TOPIC].count + 1, group.topology_offset(TOPIC)))
        elif known is None or known.owner == NONE:
            book.claim(session, number)
        else:
            book.release(known.owner, known.epoch)

    return act


@pytest.mark.parametrize("kept", [1_024, 3])
@given(SEEDS)
def test_free_partitions_are_updated_from_changes(kept: int, seed: int) -> None:
    """T1, A2: reading only what changed finds the same as reading everything, with the same waits."""
    chance = Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worlds_module, "CHANGES_KEPT", kept)
        book = DifferentialLog()
        happens, detector, ms = history(book, chance), FailureDetector(INTERVAL_MS), 0
        since: dict[TopicPartition, tuple[int, int]] = {}
        for _ in range(10):
            ms += chance.choice([0, 10, 50])
            for _ in range(chance.choice([0, 1, 1, 5])):
                happens()
            detector.refresh(book.group, at(ms), True)
            fresh = FailureDetector(INTERVAL_MS)
            fresh.refresh(book.group, at(ms), True)
            free = {tp: version for tp, (version, _) in fresh.free().items()}
            since = {
                tp: since[tp]
                if since.get(tp, (NONE,))[0] == version and tp in since
                else (version, detector.clock.counted_ms)
                for tp, version in free.items()
            }
            assert detector.free() == since


@given(SEEDS)
def test_a_partition_is_tried_when_its_wait_is_over(seed: int) -> None:
    """A2, T3: after rank thirds of own waiting, which unproven steps restart; at the same tick as a plain reading."""
    chance, book = Random(seed), DifferentialLog()
    happens, detector, starts, ms, revision = (
        history(book, chance),
        FailureDetector(INTERVAL_MS),
        HeadStarts(THIRD_MS),
        0,
        0,
    )
    ranks = {number: chance.randrange(3) for number in range(-1, 20)}

    def rank(tp: TopicPartition) -> int:
        return ranks[tp.partition]

    for _ in range(40):
        ms += chance.choice([10, INTERVAL_MS // 10])
        for _ in range(chance.choice([0, 0, 0, 1, 3])):
            happens()
        if chance.random() < 0.1:
            revision += 1
            ranks.update({number: chance.randrange(3) for number in range(-1, 20)})
        detector.refresh(book.group, at(ms), chance.random() < 0.98)
        if chance.random() < 0.9:  # a member that may not act does not look
            if chance.random() < 0.1:  # by another policy covers are free; the group is as it was
                revision += 1
                detector.watch_covers(book.group, topics=chance.random() < 0.5, pin=chance.random() < 0.5)
            due = starts.due(book.group, detector, revision, rank, frozenset({TOPIC, PIN.topic}))
            over = {
                tp
                for tp, (_, began) in detector.free().items()
                if detector.clock.waited_ms(began) >= ranks[tp.partition] * THIRD_MS
            }
            assert due == {tp: detector.free()[tp][0] for tp in over}
