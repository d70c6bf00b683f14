"""Members that deliver and hand over: PROTOCOL.md, rules D and A, with several clients."""

from __future__ import annotations

from itertools import pairwise
from zlib import crc32

import pytest

from marshal_py.errors import GroupDeleted, GroupOpaque, MarshalError, ModeMismatch, SessionCloned
from marshal_py.protocol.claims import AtMostOnce, ClaimPhase
from marshal_py.protocol.member.member_state import MIRROR_MS, Wanted
from marshal_py.protocol.member.rebalance import GRANT_PACE_MS
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    ClaimingMessages,
    ClaimingPartition,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    MessageRange,
    Move,
    Note,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    StepDown,
    Topology,
)
from tests.support.virtual_cluster import (
    INTERVAL_MS,
    READ_MS,
    THIRD_MS,
    TOPIC,
    WRITE_MS,
    Client,
    VirtualCluster,
    granted,
    take_all,
    tp,
)

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
STEP = I // 10
TRIP = WRITE_MS + READ_MS
TIMEOUT_MS = 10 * I


# --- at least once


def test_a_hand_over_redelivers_nothing() -> None:
    """A3, D1: the owner drains what is in its handlers, then releases at its position and names the successor."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    run = a.deliver(a.claim(1), 0, 1, 2, 3)
    run.finish_range(0, 2)
    moving = a.claim(1)
    b = cluster.add("b")
    cluster.run_until(lambda: b.prefetched)
    assert b.prefetched[0] == (tp(1), 0), "it fetches ahead from the position that the log has"
    assert not b.sends(ClaimingPartition), "and claims nothing that is owned"
    cluster.run(I)
    assert moving.phase is ClaimPhase.DRAINING
    assert cluster.owners() == {0: "a", 1: "a"}, "its handler is still at work, and has time"
    assert not a.may(moving), "what was not handed over stays for the successor"
    run.finish_range(2, 4)
    a.due_ms = cluster.now_ms
    cluster.run(TRIP)
    (release,) = [r for _, r in a.sends(ReleasingPartition)]
    assert (release.position, release.successor, release.reason) == (4, b.session, "hand-over")
    cluster.run(2 * TRIP)
    assert b.claim(1).position() == 4
    assert b.may(b.claim(1))


def test_only_what_moves_stops() -> None:
    """A4: during a hand-over every other partition is still delivered, under the same epoch."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    kept = {claim.epoch: claim for client in (a, b) for claim in client.member.claims.values()}
    stopped: set[int] = set()
    cluster.add("c")
    for _ in range(3 * I // 10):
        cluster.run(10)
        for epoch, claim in kept.items():
            if not (a if epoch in a.member.claims else b).may(claim):
                stopped.add(epoch)
    assert len(stopped) == 4
    assert sorted(cluster.owners().values()) == ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    assert len(list(cluster.records(ReleasingPartition))) == 4


def test_a_successor_that_has_not_prefetched_gets_nothing() -> None:
    """A3: without the ready note the owner keeps and delivers."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    b = cluster.add("b")
    b.prefetch_succeeds = False
    cluster.run(4 * I)
    assert b.prefetched
    assert all(beat.ready == () for _, beat in b.sends(Heartbeat))
    assert cluster.owners() == {0: "a", 1: "a"}
    assert all(a.may(claim) for claim in a.member.claims.values())
    b.member.prefetched(tp(1))
    b.due_ms = cluster.now_ms
    cluster.run(4 * TRIP)
    assert cluster.owners() == {0: "a", 1: "b"}, "the note does not wait for its third"
    epochs = {epoch for _, beat in b.sends(Heartbeat) for epoch in beat.ready}
    assert epochs == {claim.epoch for _, claim, _ in a.lost}, "it named the claim's epoch"


def test_nothing_is_fetched_ahead_in_vain() -> None:
    """A3, T10: a member that may not act, in a pause or while fenced, stops fetching ahead, and begins again later."""
    for outage in (True, False):
        cluster = VirtualCluster(partitions=2)
        (a,) = cluster.team("a")
        a.deliver(a.claim(1), 0)  # so that the hand-over takes its time
        b = cluster.add("b")
        cluster.run(THIRD_MS)
        assert [partition for partition, _ in b.prefetched] == [tp(1)]
        assert not b.prefetch_stopped
        if outage:
            b.hold_writes()
            cluster.run(I + STEP)
        else:
            cluster.must(ReleaseGroup(cluster.group.pause_change, -1, 20 * I))
            cluster.run(TRIP)
        assert b.prefetch_stopped == [tp(1)]


def test_a_successor_that_fell_silent_gets_nothing() -> None:
    """A3: the owner hands over only to a member seen within one interval, and reopens when it is gone."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    moving = a.claim(1)
    run = a.deliver(moving, 0)
    b = cluster.add("b")
    cluster.run_until(lambda: moving.phase is ClaimPhase.DRAINING)
    cluster.kill(b)
    cluster.run(2 * I + THIRD_MS)
    assert moving.phase is ClaimPhase.OPEN
    assert a.may(moving)
    run.finish(0)
    cluster.run(I)
    assert not list(cluster.records(ReleasingPartition))


def test_greedy_takes_what_is_free_only() -> None:
    """A1: a newcomer gets nothing as long as all is owned; what becomes free is its."""
    cluster = VirtualCluster(partitions=4)
    (a,) = cluster.team("a", policy="greedy")
    (b,) = cluster.team("b", policy="greedy")
    assert len(a.owned) == 4
    assert not b.prefetched
    cluster.must(Topology(TOPIC, 6, cluster.group.topics[TOPIC].offset))
    cluster.run(I)
    assert b.owned == {4, 5}
    assert not list(cluster.records(ReleasingPartition))


def test_the_group_may_name_the_policy() -> None:
    """A1: a policy in the GroupConfig counts for every member; an unknown one for none."""
    cluster = VirtualCluster(partitions=4)
    cluster.must(GroupConfig(-1, policy="greedy"))
    (a,) = cluster.team("a")
    (b,) = cluster.team("b")
    assert (len(a.owned), len(b.owned)) == (4, 0)
    cluster = VirtualCluster(partitions=4)
    cluster.must(GroupConfig(-1, policy="of the future"))
    (a,) = cluster.team("a", policy="greedy")
    (b,) = cluster.team("b")
    cluster.run(2 * I)
    assert (len(a.owned), len(b.owned)) == (4, 0)


def test_own_topics_and_claims_max() -> None:
    """A5: never another topic, never more than claims_max, also when partitions stay free."""
    cluster = VirtualCluster(partitions=4)
    a = cluster.add("a", topics=("x",), claims_max=2)
    b = cluster.add("b", topics=("y",))
    cluster.run(4 * I)
    assert {claim.tp.topic for claim in a.member.claims.values()} == {"x"}
    assert {claim.tp.topic for claim in b.member.claims.values()} == {"y"}
    assert (len(a.member.claims), len(b.member.claims)) == (2, 4)
    assert max(len({c.epoch for _, c in a.claimed}), 2) == 2


def test_a_claim_that_is_dead_does_not_count() -> None:
    """A5, T17: one that was lost on its way and can never win must not hold the place of another."""
    cluster = VirtualCluster(partitions=2)
    a = cluster.add("a", claims_max=1)
    cluster.run_until(lambda: a.sends(ClaimingPartition))
    a.hold_writes()
    cluster.run(2 * WRITE_MS)
    (wanted,) = {record.partition for _, record in a.sends(ClaimingPartition)}
    assert a.held_back
    a.release_writes(lose=True)
    cluster.run(READ_MS)
    joined = cluster.add("b", claims_max=1)
    # The claim of another session on the same partition comes first.
    other = cluster.must(join_like(joined))
    cluster.must(ClaimingPartition(other, TOPIC, wanted, -1, 0))
    cluster.run(2 * THIRD_MS)
    assert a.owned == {1 - wanted}


def join_like(client: Client) -> Join:
    """A Join like this client's, of a session without a simulated client."""
    return Join("x", b"x" * 16, client.member.options.mode, 600_000, (TOPIC,))


def test_head_starts() -> None:
    """A2: the successor or target at once; then the former owner, then the rest, a third of an interval apart."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a", policy="greedy", rank=5)  # the last in the order of F9.9
    b, c = cluster.team("b", "c", policy="greedy")
    assert cluster.owners() == {0: "a"}
    epoch = a.claim(0).epoch
    # An onlooker cannot release for a; a's own Release names c, who is cut off, and a itself is the former owner.
    c.hold_writes()
    a.claim(0).stop("test", 0, c.session)
    a.due_ms = cluster.now_ms
    cluster.run_until(lambda: not cluster.owners())
    assert cluster.partition(0).successor == c.session
    freed = cluster.now_ms
    cluster.run_until(lambda: c.sends(ClaimingPartition))
    assert cluster.now_ms - freed <= READ_MS + 1, "rank 0 tries at once"
    cluster.run_until(lambda: cluster.owners())
    assert cluster.owners() == {0: "a"}, "rank 1 is the former owner"
    assert THIRD_MS <= cluster.now_ms - freed <= THIRD_MS + STEP + TRIP
    cluster.run(READ_MS)
    assert a.claim(0).epoch != epoch
    assert not b.sends(ClaimingPartition), "rank 2 left it alone"


def test_step_down_hands_over() -> None:
    """A3, F9.9: a marked session gives its partitions to the others and takes them back when they are gone."""
    cluster = VirtualCluster(partitions=4)
    a, b = cluster.team("a", "b")
    cluster.must(StepDown(a.session, -1))
    cluster.run(I)
    assert set(cluster.owners().values()) == {"b"}
    b.member.leave(b.now, "bye", 0)
    cluster.run(I)
    assert set(cluster.owners().values()) == {"a"}, "last, but never absent"


def test_the_named_successor_is_the_one_that_the_target_gives() -> None:
    """A2, A5, F9.9: a leaving member names neither a marked session nor a full one."""
    cluster = VirtualCluster(partitions=3)
    a, b, c, d = (cluster.add("a"), cluster.add("b", claims_max=1), cluster.add("c"), cluster.add("d"))
    cluster.run(3 * I)
    cluster.must(StepDown(d.session, -1))
    cluster.run(I)
    assert a.owned
    assert len(b.owned) == 1
    a.member.leave(a.now, "bye", 0)
    cluster.run(I)
    assert {r.successor for _, r in a.sends(ReleasingPartition) if r.reason == "bye"} == {c.session}


# --- stuck handlers


def test_a_stuck_handler_loses_its_partition() -> None:
    """D4: released at its position and reported; the same member does not claim it again at once, another does."""
    cluster = VirtualCluster(partitions=2)
    a, b = cluster.team("a", "b", handler_timeout_ms=TIMEOUT_MS)
    claim = a.claim(0)
    other = b.claim(1)
    run = a.deliver(claim, 0, 1)
    run.finish(0)
    begun = cluster.now_ms
    for _ in range(9):  # the other one's handler reports that it is at work
        b.due_ms = cluster.now_ms
        cluster.run(I)
        if other.tracker.runs:
            other.tracker.touch_all(b.now.mono_ms)
        else:
            b.deliver(other, 0)
    assert a.may(claim), "before its time nothing happens"
    cluster.run_until(lambda: claim.phase is not ClaimPhase.OPEN)
    assert TIMEOUT_MS <= cluster.now_ms - begun <= TIMEOUT_MS + STEP + 1_000
    (note,) = [r for _, r in a.sends(Note) if r.kind == "handler_stuck"]
    assert (note.topic, note.partition, note.from_) == (TOPIC, 0, 1)
    assert [advisory.offset for _, advisory in a.advised("handler_stuck")] == [1]
    cluster.run(I)
    assert cluster.partition(0).position == 1
    assert cluster.owners() == {0: "b", 1: "b"}
    assert a.alive, "only the partition, not the member"
    assert not b.advised("handler_stuck")
    cluster.run(TIMEOUT_MS - 2 * I)
    assert 0 not in [r.partition for _, r in a.sends(ClaimingPartition, begun)]
    cluster.run(3 * I)
    assert len(a.owned) == 1, "it keeps its share of the rest"


def test_a_program_that_hangs_leaves_all_that_it_does_not_serve_to_others() -> None:
    """D4: a handler is stuck, and its user has not asked. So it releases the claims of which no handler has
    a message, takes nothing in exchange, and takes its share again when the user asks."""
    cluster = VirtualCluster(partitions=6)
    a, b = cluster.team("a", "b", handler_timeout_ms=TIMEOUT_MS)
    mine = sorted(a.owned)
    assert len(mine) == 3
    a.member.user_asked(a.now.mono_ms)
    a.deliver(a.claim(mine[0]), 0)
    at_work = a.deliver(a.claim(mine[1]), 0)

    def serve(rounds: int) -> None:
        for _ in range(rounds):
            b.member.user_asked(b.now.mono_ms)
            if mine[1] in a.owned:
                a.claim(mine[1]).tracker.touch(at_work, 0, 1, a.now.mono_ms)
            cluster.run(I)

    serve(TIMEOUT_MS // I + 3)
    assert a.owned == {mine[1]}, "a handler is at work there"
    assert len(b.owned) == 5
    serve(2 * TIMEOUT_MS // I)
    assert len(b.owned) == 5, "the hung program gets nothing in exchange"
    assert not a.group.sessions[a.session].ready
    a.member.user_asked(a.now.mono_ms)
    serve(5)
    assert len(a.owned) == len(b.owned) == 3


def test_a_program_that_still_asks_keeps_its_other_partitions() -> None:
    """D4: one of its handlers is stuck, and others work."""
    cluster = VirtualCluster(partitions=4)
    a, b = cluster.team("a", "b", handler_timeout_ms=TIMEOUT_MS)
    stuck, kept = a.owned
    a.deliver(a.claim(stuck), 0)
    for _ in range(TIMEOUT_MS // I + 3):
        for client in (a, b):
            client.member.user_asked(client.now.mono_ms)
        cluster.run(I)
    assert kept in a.owned
    assert cluster.owners()[stuck] == "b"
    assert len(a.owned) == len(b.owned) == 2, "it takes another one in exchange"
    a.deliver(a.claim(kept), 0)
    cluster.run(TIMEOUT_MS + 2 * I)
    assert not a.owned, "now it asks no more"


def test_alone_it_leaves_the_partition_free() -> None:
    """D4: no other member is there; it does not claim it again before another handler timeout."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a", handler_timeout_ms=TIMEOUT_MS)
    a.deliver(a.claim(0), 0)
    cluster.run(TIMEOUT_MS + STEP)
    assert not cluster.owners()
    cluster.run(TIMEOUT_MS - I)
    assert not cluster.owners()
    cluster.run(2 * I)
    assert cluster.owners() == {0: "a"}


def test_a_stuck_handler_is_not_waited_for_while_leaving() -> None:
    """D4: a long patience of leave() does not lengthen the handler's time."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a", handler_timeout_ms=TIMEOUT_MS)
    a.deliver(a.claim(0), 0)
    a.member.leave(a.now, "bye", 100 * TIMEOUT_MS)
    cluster.run(TIMEOUT_MS - I)
    assert a.alive
    cluster.run(2 * I)
    assert not a.alive
    assert [r.kind for _, r in a.sends(Note)] == ["handler_stuck"]


# --- where a partition starts


def test_position_text_a_partition_starts() -> None:
    """D5: the log's position; else the beginning if Topology added it; else what Kafka or the reset say."""
    cluster = VirtualCluster(partitions=2)
    a = cluster.add("a")
    a.starts = {tp(0): 500, tp(1): 600}
    cluster.run(2 * I)
    assert set(a.resolved) == {Wanted(tp(0), False), Wanted(tp(1), False)}
    assert {r.start for _, r in a.sends(ClaimingPartition)} == {500, 600}
    assert cluster.partition(0).position == a.claim(0).position() == 500
    cluster.must(Topology(TOPIC, 3, cluster.group.topics[TOPIC].offset))
    a.resolved.clear()
    cluster.run(I)
    assert set(a.resolved) == {Wanted(tp(2), True)}
    a.deliver(a.claim(0), 500).finish(0)
    cluster.run(I)
    a.resolved.clear()
    b = cluster.add("b")
    cluster.run(2 * I)
    assert not b.resolved, "the log has positions now"
    assert {r.start for _, r in b.sends(ClaimingPartition)} == {-1}


def test_an_old_answer_is_asked_again() -> None:
    """D5: "latest" as of an hour ago would be a wrong start: it is looked up again."""
    cluster = VirtualCluster(partitions=1)
    a = cluster.add("a")
    a.resolves = False
    cluster.run_until(lambda: a.resolved)
    a.member.start_resolved(tp(0), 5, 5, a.now)
    a.reads_held = True
    a.due_ms = cluster.now_ms + 2 * I  # its process is busy with something else
    cluster.run(2 * I - 1)
    a.reads_held = False
    a.resolves = True
    a.starts = {tp(0): 9}
    cluster.run(3 * I)
    assert {r.start for v, r in cluster.records(ClaimingPartition) if v.accepted} == {9}


# --- at most once


def test_a_grant_is_read_before_anything_is_delivered() -> None:
    """D2: fetch, ask, read, deliver; the next range is asked for while one is handled; two grants ahead at most."""
    cluster = VirtualCluster(partitions=1, mode=AT_MOST_ONCE)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    assert a.take(claim) is None
    claim.offer = (0, 5)
    a.due_ms = cluster.now_ms
    cluster.run(WRITE_MS)
    assert cluster.partition(0).position == 5, "it is granted"
    assert a.take(claim) is None, "but it was not read yet"
    cluster.run(READ_MS)
    assert a.take(claim) == 0
    granted(cluster, a, claim, (5, 10))
    granted(cluster, a, claim, (10, 15))
    assert len(claim.tracker.grants) == 2
    assert cluster.partition(0).position == 10, "the third range waits"
    assert take_all(a, claim) == list(range(1, 10))
    granted(cluster, a, claim, (10, 15))
    assert take_all(a, claim) == list(range(10, 15))
    asked = [(r.from_, r.start, r.to) for _, record in a.sends(ClaimingMessages) for r in record.ranges]
    assert asked == [(0, 0, 5), (5, 5, 10), (10, 10, 15)]
    cluster.run(3 * I)
    assert take_all(a, claim) == []


@pytest.mark.parametrize("to", [7, 9])
def test_a_grant_is_of_the_process_that_sent_it(to: int) -> None:
    """D2, T18: a copy grants nothing again, and one that a clone won is not delivered here, whatever its range."""
    cluster = VirtualCluster(partitions=1, mode=AT_MOST_ONCE)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 5))
    assert take_all(a, claim) == [0, 1, 2, 3, 4]
    for verdict, _ in list(cluster.records(ClaimingMessages)):
        assert cluster.replay(verdict.offset).reason == "from"
    cluster.run(TRIP)
    assert a.alive
    assert take_all(a, claim) == []
    # It asks for [5, 9); its clone's [5, 7), or the very same range with another nonce, comes first.
    claim.offer = (5, 9)
    a.due_ms = cluster.now_ms
    cluster.run(1)
    cluster.must(ClaimingMessages(a.session, (MessageRange(claim.epoch, 5, 5, to),), 12345))
    cluster.run(TRIP)
    assert isinstance(a.member.error, SessionCloned)
    assert a.take(claim) is None


def test_past_the_fence_the_rest_is_dropped() -> None:
    """D3: dropped, counted and reported."""
    cluster = VirtualCluster(partitions=1, mode=AT_MOST_ONCE)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    assert [a.take(claim), a.take(claim)] == [0, 1]
    a.hold_writes()
    cluster.run(I + STEP)
    assert a.take(claim) is None, "D8 has no exception"
    a.release_writes()
    cluster.run(I)
    assert a.may(claim)
    assert take_all(a, claim) == []
    assert a.member.grants_dropped == 8
    assert [(advisory.offset, advisory.to) for _, advisory in a.advised("amo_dropped")] == [(2, 10)]


def test_the_report_of_what_is_dropped_names_all_of_several_grants_that_lie_apart() -> None:
    """D3: offsets 3 to 7 hold no message, so that no grant covers them."""
    cluster = VirtualCluster(partitions=1, mode=AT_MOST_ONCE)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 3))
    granted(cluster, a, claim, (8, 10))
    assert a.take(claim) == 0
    a.hold_writes()
    cluster.run(I + STEP)
    a.release_writes()
    cluster.run(I)
    assert a.member.grants_dropped == 4
    assert [(advisory.offset, advisory.to) for _, advisory in a.advised("amo_dropped")] == [(1, 10)]


def test_a_grant_that_comes_past_the_fence_is_dropped() -> None:
    """D3: it was asked for in time and read too late."""
    cluster = VirtualCluster(partitions=1, mode=AT_MOST_ONCE)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    claim.offer = (0, 10)
    a.due_ms = cluster.now_ms
    cluster.run(1)
    a.reads_held = True
    cluster.run(I + STEP)
    a.reads_held = False
    cluster.run(READ_MS)
    assert cluster.partition(0).position == 10
    assert a.member.grants_dropped == 10
    cluster.run(I)
    assert take_all(a, claim) == []


def test_a_move_ends_what_was_granted() -> None:
    """T12, D3: a pause gives back the rest; a SetPosition is a new generation."""
    cluster = VirtualCluster(partitions=1, mode=AT_MOST_ONCE)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    assert a.take(claim) == 0
    claim.tracker.returned()  # type: ignore[union-attr]
    token = cluster.must(ReleaseGroup(cluster.group.pause_change, -1, 20 * I))
    cluster.run(TRIP)
    assert a.take(claim) is None
    cluster.run(I + TRIP)
    assert not cluster.owners()
    assert cluster.partition(0).position == 1, "the next owner gets what no handler saw"
    assert a.member.grants_dropped == 0
    cluster.must(SetPosition(token, ((TOPIC, 0, cluster.partition(0).version, 3),), True))  # type: ignore[arg-type]
    cluster.run(I)
    again = a.claim(0)
    assert isinstance(again.tracker, AtMostOnce)
    granted(cluster, a, again, (3, 6))
    assert take_all(a, again) == [3, 4, 5], "a new generation, at the admin's word"
    assert again.generation == claim.generation + 1


def test_at_most_once_survives_an_eviction() -> None:
    """D2, D3: the owner is stopped with half a grant; the successor begins after it; nothing is delivered twice."""
    cluster = VirtualCluster(partitions=1, mode=AT_MOST_ONCE)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    taken = [a.take(claim), a.take(claim)]
    b = cluster.add("b")
    cluster.run(THIRD_MS)
    a.suspend()
    cluster.run(4 * I)
    successor = b.claim(0)
    granted(cluster, b, successor, (0, 20))
    taken += take_all(b, successor)
    a.resume()
    assert a.take(claim) is None
    cluster.run(I)
    assert taken == [0, 1, *range(10, 20)]
    assert a.member.grants_dropped == 8


# --- what goes to Kafka


def test_accepted_positions_are_mirrored() -> None:
    """D7: what the log has accepted and nothing else, when it changed, every few seconds and at the release."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    cluster.run(MIRROR_MS)
    assert [what for _, what in a.mirrored] == [{tp(0): 0}]
    run = a.deliver(a.claim(0), *range(10))
    run.finish_range(0, 4)
    a.hold_writes()
    cluster.run(THIRD_MS + STEP)
    a.release_writes(lose=True)
    assert cluster.partition(0).position == 0
    assert all(what == {tp(0): 0} for _, what in a.mirrored), "acked is not accepted"
    cluster.run(2 * MIRROR_MS)
    assert [what for _, what in a.mirrored] == [{tp(0): 0}, {tp(0): 4}]
    assert all(later - earlier >= MIRROR_MS for (earlier, _), (later, _) in pairwise(a.mirrored))
    for index in range(4, 7):
        run.finish(index)
        cluster.run(THIRD_MS)
    times = [at for at, _ in a.mirrored]
    assert all(later - earlier >= MIRROR_MS for earlier, later in pairwise(times)), "not at every heartbeat"
    a.member.leave(a.now, "bye", 0)
    cluster.run(THIRD_MS)
    assert a.mirrored[-1][1] == {tp(0): 7}, "the released position, for consumers without Marshal"


def test_who_claims_a_partition_again_mirrors_its_position_again() -> None:
    """D7: another owner has committed a later one, and an admin has moved it back since."""
    cluster = VirtualCluster(partitions=1)
    a = cluster.add("a")
    a.starts[tp(0)], a.ends = 100, 1_000
    cluster.run(2 * MIRROR_MS)
    assert [what for _, what in a.mirrored] == [{tp(0): 100}]
    b = cluster.add("b")
    cluster.run(3 * I)
    cluster.must(StepDown(a.session, NONE))
    cluster.run(3 * I)
    assert cluster.owners() == {0: "b"}
    b.deliver(b.claim(0), *range(100, 200)).finish_range(0, 100)
    cluster.run(2 * MIRROR_MS)
    assert b.mirrored[-1][1] == {tp(0): 200}
    pause = cluster.must(ReleaseGroup(NONE, NONE, 600_000, by="ops"))
    cluster.run(2 * I)
    cluster.kill(b)
    cluster.must(SetPosition(pause, (Move(TOPIC, 0, cluster.partition(0).version, 100),), True, "ops"))
    cluster.run(6 * I + 2 * MIRROR_MS)
    assert cluster.owners() == {0: "a"}
    assert [what for _, what in a.mirrored][-1] == {tp(0): 100}
    assert len(a.mirrored) == 2


def test_an_evicted_owner_mirrors_nothing() -> None:
    """D7: the partition is another's now, and so is its committed offset."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    a.deliver(a.claim(0), *range(10)).finish_range(0, 9)
    b = cluster.add("b")
    a.cut()
    cluster.run(4 * I)
    count = len(a.mirrored)
    assert cluster.owners() == {0: "b"}
    b.deliver(b.claim(0), *range(10)).finish_range(0, 3)
    a.heal()
    cluster.run(2 * MIRROR_MS)
    assert [what for _, what in a.mirrored[count:]] == []
    assert b.mirrored[-1][1] == {tp(0): 3}


def test_a_commit_that_comes_after_the_next_owners_is_corrected() -> None:
    """D7: its driver may be slow. The log says which position is newer; an owner needs no correction."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    b = cluster.add("b")
    cluster.run(2 * I)
    (moved,) = (number for number, owner in cluster.owners().items() if owner == "b")
    assert a.member.overtaken({tp(moved): 0}) == {}, "nothing has come since"
    b.deliver(b.claim(moved), *range(10)).finish_range(0, 4)
    cluster.run(I)
    assert a.member.overtaken({tp(moved): 0}) == {tp(moved): 4}
    assert a.member.overtaken({tp(moved): 4}) == {}
    assert b.member.overtaken({tp(moved): 0}) == {}, "its next tick mirrors it"


# --- the gate


def test_the_gate() -> None:
    """D8: live session, own claim, valid lease, delivery not stopped, not paused: each alone shuts it."""
    cluster = VirtualCluster(partitions=2)
    a, b = cluster.team("a", "b")
    claim = a.claim(0)
    assert a.may(claim)
    assert not a.member.may_deliver(b.claim(1).epoch, a.now), "another's claim"
    assert not a.member.may_deliver(-1, a.now)
    assert not a.member.may_deliver(claim.epoch, a.now._replace(wall_ms=a.now.wall_ms + I + 1)), "the lease"
    claim.stop("test", None)
    assert not a.may(claim), "stopped"
    claim.reopen()
    assert a.may(claim)
    cluster.must(ReleaseGroup(cluster.group.pause_change, -1, 5 * I))
    assert a.may(claim), "it cannot know before it has read"
    a.alive = False  # its driver does not tick: the gate needs no tick
    cluster.now_ms += READ_MS
    assert a.read()
    assert claim.phase is ClaimPhase.OPEN
    assert not a.may(claim), "paused"


def test_the_gate_without_a_session() -> None:
    """D8: once the end of the session is folded, at the very record, nothing more is delivered."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    cluster.inject(Leave(a.session))
    cluster.run(READ_MS - 1)
    assert a.may(claim)
    a.alive = False  # the driver does not tick any more: the gate needs no tick
    cluster.now_ms += 1
    assert a.read()
    assert not a.may(claim)
    assert claim.phase is ClaimPhase.GONE


@pytest.mark.parametrize("what", ["deleted", "mode", "opaque"])
def test_endings_caused_by_the_log(what: str) -> None:
    """D8, F9.5, F9.6: a group that went away under its members ends them, with the error that says so."""
    cluster = VirtualCluster(partitions=2)
    a, b = cluster.team("a", "b")
    error: type[MarshalError]
    if what == "opaque":
        value = bytearray(cluster.values[-1])
        value[12 + value[11]] = 9  # a record version that nobody here knows
        head = crc32(bytes(range(16)))
        value[7:11] = crc32(bytes(value[11:]), crc32(bytes(value[:7]), head)).to_bytes(4, "big")
        cluster.append(bytes(value))
        error = GroupOpaque
    else:
        token = cluster.must(ReleaseGroup(cluster.group.pause_change, -1, 60 * I))
        cluster.run(I)
        if what == "mode":
            cluster.must(GroupConfig(-1, token, AT_MOST_ONCE))
            error = ModeMismatch
        else:
            for client in (a, b):
                client.hold_writes()
            cluster.run(WRITE_MS)
            for session in list(cluster.group.sessions):
                cluster.must(Leave(session))
            cluster.must(GroupConfig(-1, deleted=True))
            error = GroupDeleted
            for client in (a, b):
                client.release_writes(lose=True)
    cluster.run(READ_MS)
    for client in (a, b):
        assert not client.alive
        if what == "deleted":
            assert isinstance(client.member.error, GroupDeleted | SessionCloned)
        else:
            assert isinstance(client.member.error, error)
        assert not client.member.claims
    late = cluster.add("late", mode=AT_LEAST_ONCE)
    cluster.run(I)
    assert isinstance(late.member.error, error)


def test_a_stream_of_offers_is_asked_for_at_a_pace() -> None:
    """D2: the first at once, then at most one record in GRANT_PACE_MS; the member names when it asks for the rest."""
    cluster = VirtualCluster(partitions=2, mode=AT_MOST_ONCE)
    (a,) = cluster.team("a")
    cluster.run(1_000)
    start = cluster.now_ms
    for offset in range(200):  # a message every 10 ms, of one partition after the other
        claim = a.claim(offset % 2)
        take_all(a, claim)
        assert isinstance(claim.tracker, AtMostOnce)
        claim.offer = (claim.tracker.granted_to(), offset // 2 + 1)
        a.due_ms = cluster.now_ms
        cluster.run(10)
    end = cluster.now_ms
    cluster.run(1_000)
    sent = [ms for ms, _ in a.sends(ClaimingMessages, start)]
    assert sent[0] == start
    assert min(later - one for one, later in pairwise(sent)) >= GRANT_PACE_MS
    assert len(sent) > 40, "and not much slower than that"
    assert sent[-1] <= end + GRANT_PACE_MS
    assert [cluster.partition(number).position for number in (0, 1)] == [100, 100]
