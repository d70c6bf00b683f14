"""The records that execute a last will, and what the fold makes of them when they come late or twice (T19)."""

from __future__ import annotations

import pytest

from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.progress import Range, encode
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    ClaimState,
    Evict,
    Heartbeat,
    Join,
    LastWill,
    Leave,
    ReleasingPartition,
    Sign,
)
from tests.support.differential_log import INTERVAL_MS, DifferentialLog
from tests.support.virtual_cluster import VirtualCluster

HOW = "signal 9 (SIGKILL)"


def will_of(session: int, *claims: ClaimState) -> LastWill:
    return LastWill(session, 1, INTERVAL_MS, claims)


def test_only_the_end_of_the_process_proves_its_death() -> None:
    """T19: neither a closed connection nor a stop."""
    assert [sign for sign in Sign if records.proves_death(sign)] == [Sign.ENDED]


def test_every_claim_is_released_before_the_session_leaves() -> None:
    """T19, F6.2: at the kept position, with attempts, in flight and progress as kept; the next owner starts there."""
    log = DifferentialLog()
    session, epoch = log.owner(start=100)
    done = encode(107, [Range(110, 112, 0)])
    kept = ClaimState(epoch, 107, 0, 4, 2, done)
    release, leave = records.records_of(will_of(session, kept), HOW)
    assert release == ReleasingPartition(session, epoch, 107, reason="died", attempts=2, in_flight=4, progress=done)
    assert leave == Leave(session, f"died: {HOW}")
    assert records.died(leave)
    log.must(release)
    log.must(leave)
    part = log.partition()
    assert (part.owner, part.position, part.attempts, part.in_flight, part.progress) == (-1, 107, 2, 4, done)
    assert not log.group.sessions


def test_a_will_that_comes_twice_changes_nothing() -> None:
    """T19, F3.1, F6.1: every record of the second one is rejected, also when it comes before the first is complete."""
    log = DifferentialLog()
    session, epoch = log.owner()
    release, leave = records.records_of(will_of(session, ClaimState(epoch, 120)), HOW)
    log.must(release)
    log.refuses(release, "claim")
    log.must(leave)
    log.refuses(release, "session")
    log.refuses(leave, "session")


def test_the_leave_alone_or_first_is_enough() -> None:
    """T19, F3.3: records of a will in the wrong order: the position is the one of the last heartbeat."""
    log = DifferentialLog()
    session, epoch = log.owner(start=100)
    log.must(Heartbeat(session, 1, (ClaimState(epoch, 111),)))
    release, leave = records.records_of(will_of(session, ClaimState(epoch, 120)), HOW)
    log.must(leave)
    log.refuses(release, "session")
    assert (log.partition().owner, log.partition().position) == (-1, 111)


def test_records_of_the_dead_that_were_in_flight() -> None:
    """T19, F2.3, F2.4: before the will they count, after it they do not; an older will lowers nothing."""
    log = DifferentialLog()
    session, epoch = log.owner(start=100)
    release, leave = records.records_of(will_of(session, ClaimState(epoch, 108, attempts=1)), HOW)
    log.must(Heartbeat(session, 1, (ClaimState(epoch, 115, attempts=1),)))
    log.must(release)
    assert log.partition().position == 115
    log.must(Heartbeat(session, 2, (ClaimState(epoch, 130),)))
    assert log.partition().position == 115
    log.must(leave)
    log.refuses(Heartbeat(session, 3, (ClaimState(epoch, 140),)), "session")


@pytest.mark.parametrize("ended_by", ["evict", "join"])
def test_a_late_will_leaves_the_successor_alone(ended_by: str) -> None:
    """T19: the session was evicted meanwhile, or its client has joined again; the newer session keeps its claim."""
    log = DifferentialLog()
    session, epoch = log.owner(start=100)
    if ended_by == "evict":
        log.must(Evict(session, log.session(session).extended, 2 * INTERVAL_MS))
        newer = log.join("c")
    else:
        newer = log.must(log.new_join("c", predecessor=session))
    claim = log.claim(newer)
    before = log.digest()
    for record in records.records_of(will_of(session, ClaimState(epoch, 150)), HOW):
        log.refuses(record, "session")
    assert log.digest() == before
    assert log.partition().epoch == claim


def test_what_a_member_keeps() -> None:
    """T19, D1, F4.5: the lowest unfinished offset, what is finished above it, and one delivery more than before."""
    cluster = VirtualCluster(partitions=2, mode=AT_LEAST_ONCE)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    run = a.deliver(claim, 0, 1, 2, 3)
    run.finish(0)
    run.finish(2)
    will = a.member.last_will()
    assert will is not None
    assert (will.session, will.interval_ms) == (a.session, a.member.options.interval_ms)
    kept = {entry.epoch: entry for entry in will.claims}
    assert kept.keys() == a.member.claims.keys()
    entry = kept[claim.epoch]
    assert (entry.position, entry.in_flight, entry.attempts) == (1, 2, 1)
    assert entry.progress == encode(1, [Range(2, 3, 0)])
    run.finish(1)
    later = a.member.last_will()
    assert later is not None
    assert {entry.epoch: entry.position for entry in later.claims}[claim.epoch] == 3


def test_in_at_most_once_mode_the_will_is_the_leave_alone() -> None:
    """T19, F6.3: a Release would have to give back exactly what was not handed over."""
    cluster = VirtualCluster(partitions=2, mode=AT_MOST_ONCE)
    (a,) = cluster.team("a")
    will = a.member.last_will()
    assert will is not None
    assert list(records.records_of(will, "")) == [Leave(a.session, "died")]


def test_a_member_without_a_session_keeps_nothing() -> None:
    """T19: there is nothing that could be ended."""
    cluster = VirtualCluster()
    a = cluster.add("a")
    assert a.member.last_will() is None


def test_others_take_over_at_once() -> None:
    """T19, A2: as after a clean stop, and from the kept position; nobody waits for an eviction."""
    cluster = VirtualCluster(partitions=4)
    a, b = cluster.team("a", "b")
    mine = a.owned
    will = a.member.last_will()
    assert mine
    assert will is not None
    cluster.kill(a)
    for record in records.records_of(will, HOW):
        cluster.inject(record)
    cluster.run(a.member.third_ms // 2)
    assert b.owned == {0, 1, 2, 3}


def test_the_join_names_the_witness() -> None:
    """T19: the field is in the Join's bytes, and the default is no witness."""
    cluster = VirtualCluster()
    a, b = cluster.add("a", witness="marshal run 1"), cluster.add("b")
    cluster.run_until(lambda: a.owned and b.owned)
    names = {record.client_id: record.witness for _, record in cluster.records(Join)}
    assert names == {"a": "marshal run 1", "b": ""}
