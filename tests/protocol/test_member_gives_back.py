"""Members that release in at-most-once mode: what they give back, and what they wait for (F6.3, T16, D2)."""

from __future__ import annotations

import pytest

from marshal_py.errors import SessionCloned
from marshal_py.protocol.claims import AtMostOnce, Claim, ClaimPhase
from marshal_py.protocol.member.rebalance import GRANT_PACE_MS
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    RECORD_TYPES,
    ClaimingMessages,
    Leave,
    MessageRange,
    Note,
    ReleaseGroup,
    ReleasingPartition,
)
from tests.support.virtual_cluster import (
    INTERVAL_MS,
    READ_MS,
    THIRD_MS,
    WRITE_MS,
    Client,
    VirtualCluster,
    granted,
    take_all,
)

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
STEP = I // 10
TRIP = WRITE_MS + READ_MS


def owner(partitions: int = 1, **options: object) -> tuple[VirtualCluster, Client]:
    cluster = VirtualCluster(partitions=partitions, mode=AT_MOST_ONCE)
    (a,) = cluster.team("a", **options)
    return cluster, a


def tracker(claim: Claim) -> AtMostOnce:
    assert isinstance(claim.tracker, AtMostOnce)
    return claim.tracker


def took(client: Client, claim: Claim, count: int) -> list[int | None]:
    """Hands over so many; the handler is done with them."""
    found = [client.take(claim) for _ in range(count)]
    tracker(claim).returned()
    return found


def releases(cluster: VirtualCluster) -> list[tuple[str, int, int]]:
    """(verdict, observed, give) of every Release."""
    return [(v.reason or "accepted", r.observed, r.give) for v, r in cluster.records(ReleasingPartition)]


# --- a clean stop


def test_a_clean_stop_loses_nothing() -> None:
    """T16, F6.3: what was granted and not handed over is given back; the Leave follows when the Release was read."""
    cluster, a = owner()
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    granted(cluster, a, claim, (10, 15))
    assert took(a, claim, 3) == [0, 1, 2]
    assert cluster.partition(0).position == 15
    a.member.leave(a.now, "bye", I)
    a.due_ms = cluster.now_ms
    cluster.run(TRIP - 1)
    assert releases(cluster) == [("accepted", 15, 3)]
    assert not a.sends(Leave), "it has not read its Release yet"
    cluster.run(1)
    assert a.sends(Leave)
    cluster.run(TRIP)
    assert not a.alive
    assert a.member.error is None
    assert cluster.partition(0).position == 3
    assert a.member.grants_dropped == 0
    assert not a.advised("amo_dropped")
    b = cluster.add("b")
    cluster.run(2 * I)
    successor = b.claim(0)
    assert tracker(successor).delivered_to == 3
    granted(cluster, b, successor, (3, 15))
    assert take_all(b, successor) == list(range(3, 15))


def test_what_a_handler_has_is_not_given_back() -> None:
    """T16: running handlers count as handed over: `give` is the offset after the highest that was handed over."""
    cluster, a = owner()
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    assert [a.take(claim), a.take(claim)] == [0, 1]
    a.member.leave(a.now, "bye", THIRD_MS)
    cluster.run(THIRD_MS - 1)
    assert not releases(cluster), "it waits for its handler as long as the user allowed"
    cluster.run_until(lambda: not a.alive)
    assert releases(cluster) == [("accepted", 10, 2)]
    (release,) = [r for _, r in a.sends(ReleasingPartition)]
    assert (release.in_flight, release.position) == (2, -1)


def test_a_grant_that_is_read_after_the_seal() -> None:
    """T16: the Release is rejected by `observed`, sent again at once with the position of then, and gives back all."""
    cluster, a = owner()
    claim = a.claim(0)
    claim.offer = (0, 10)
    a.due_ms = cluster.now_ms
    cluster.run(1)
    assert len(a.sends(ClaimingMessages)) == 1
    a.member.leave(a.now, "bye", 0)
    a.due_ms = cluster.now_ms
    cluster.run(1)
    assert claim.phase is ClaimPhase.RELEASING, "its request is in flight"
    cluster.run(2 * TRIP + 2)
    assert releases(cluster) == [("observed", 0, 0), ("accepted", 10, 0)]
    (first_ms, _), (second_ms, _) = a.sends(ReleasingPartition)
    assert second_ms - first_ms <= TRIP + 2, "at once, not a third later"
    cluster.run(TRIP)
    assert not a.alive
    assert cluster.partition(0).position == 0
    assert (a.member.grants_dropped, [note.kind for _, note in a.sends(Note)]) == (0, [])


def test_nothing_is_asked_after_the_seal() -> None:
    """T16: after the step in which delivery stops for good no ClaimingMessages of the epoch is sent."""
    cluster, a = owner(2)
    claim, other = a.claim(0), a.claim(1)
    granted(cluster, a, claim, (0, 10))
    claim.stop("test", 0)
    claim.offer, other.offer = (10, 20), (0, 5)
    a.due_ms = cluster.now_ms
    a.hold_writes()
    begun = cluster.now_ms
    cluster.run(I - STEP)
    asked = {wanted.epoch for _, record in a.sends(ClaimingMessages, begun) for wanted in record.ranges}
    assert asked == {other.epoch}
    assert a.take(claim) is None


def loses_releases(cluster: VirtualCluster) -> None:
    """Whatever else is sent arrives."""
    send = cluster.send

    def lossy(client: Client | None, value: bytes) -> None:
        if value[13 + value[11]] != RECORD_TYPES.index(ReleasingPartition):
            send(client, value)

    cluster.send = lossy  # type: ignore[method-assign]


def test_a_leave_does_not_wait_for_ever() -> None:
    """T16: an interval after the seal Leave goes without an answer, and a Note names what was not given back."""
    cluster, a = owner()
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    assert took(a, claim, 2) == [0, 1]
    loses_releases(cluster)
    a.member.leave(a.now, "bye", 0)
    a.due_ms = cluster.now_ms
    begun = cluster.now_ms
    cluster.run(I - 1)
    assert len(a.sends(ReleasingPartition)) >= 3
    assert not a.sends(Leave)
    cluster.run_until(lambda: not a.alive, I)
    ((left_ms, _),) = a.sends(Leave)
    assert I <= left_ms - begun <= I + STEP
    cluster.run(TRIP)
    assert cluster.partition(0).position == 10, "the next owner does not get it"
    (note,) = [record for _, record in cluster.records(Note) if record.kind == "amo_dropped"]
    assert (note.topic, note.partition, note.from_, note.to) == ("orders", 0, 2, 10)
    assert a.member.grants_dropped == 8


# --- other ways to release


def test_a_pause_gives_back() -> None:
    """T12: an owner in a pause gives back the rest of its grants, also while its handler still runs."""
    cluster, a = owner()
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    assert [a.take(claim), a.take(claim)] == [0, 1]
    token = cluster.must(ReleaseGroup(cluster.group.pause_change, -1, 20 * I))
    cluster.run(I + 2 * TRIP)
    assert not cluster.owners()
    assert (cluster.partition(0).position, cluster.partition(0).in_flight) == (2, 2)
    cluster.must(ReleaseGroup(token, token, 0))
    cluster.run(I)
    again = a.claim(0)
    granted(cluster, a, again, (2, 10))
    assert take_all(a, again) == list(range(2, 10))


def test_a_hand_over_gives_back() -> None:
    """A3, T16: a planned move loses nothing: what was granted and not handed over is granted to the successor."""
    cluster, a = owner(2)
    claims = [a.claim(0), a.claim(1)]
    handed: list[int | None] = []
    for claim in claims:
        granted(cluster, a, claim, (0, 10))
        handed += took(a, claim, 1)
    b = cluster.add("b")
    cluster.run_until(lambda: "b" in cluster.owners().values())
    cluster.run(TRIP)
    (release,) = [r for _, r in a.sends(ReleasingPartition)]
    assert (release.reason, release.observed, release.give, release.successor) == ("hand-over", 10, 1, b.session)
    (successor,) = b.member.claims.values()
    assert tracker(successor).delivered_to == 1
    granted(cluster, b, successor, (1, 10))
    (kept,) = a.member.claims.values()
    assert take_all(b, successor) == take_all(a, kept) == list(range(1, 10))
    assert a.member.grants_dropped == 0


def test_the_owner_drains_before_it_hands_over() -> None:
    """A3: a handler at work keeps the partition until it is done, and then the rest is given back."""
    cluster, a = owner(2)
    for claim in list(a.member.claims.values()):
        granted(cluster, a, claim, (0, 10))
        assert a.take(claim) == 0
    b = cluster.add("b")
    cluster.run(2 * I)
    assert set(cluster.owners().values()) == {"a"}
    (moving,) = [claim for claim in a.member.claims.values() if claim.phase is ClaimPhase.DRAINING]
    assert a.take(moving) is None
    tracker(moving).returned()
    a.due_ms = cluster.now_ms
    cluster.run(2 * TRIP)
    assert cluster.owners()[moving.tp.partition] == "b"
    assert cluster.partition(moving.tp.partition).position == 1
    assert b.owned == {moving.tp.partition}


def test_what_a_fence_dropped_is_given_back() -> None:
    """T16: a fence's dropped grant does not raise `give`: the next owner gets it, and this one never delivers it."""
    cluster, a = owner()
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    assert took(a, claim, 2) == [0, 1]
    a.hold_writes()
    cluster.run(I + STEP)
    assert a.member.grants_dropped == 8
    a.release_writes()
    cluster.run(I)
    assert a.may(claim)
    assert take_all(a, claim) == []
    assert tracker(claim).handed_to == 2
    a.member.leave(a.now, "bye", 0)
    a.due_ms = cluster.now_ms
    cluster.run(3 * TRIP)
    assert releases(cluster) == [("accepted", 10, 2)]
    assert cluster.partition(0).position == 2


def test_what_was_handed_over_after_a_drop_is_not_given_back() -> None:
    """T16: the highest that was handed over counts, so what was dropped below it is lost, and said to be."""
    cluster, a = owner()
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    a.hold_writes()
    cluster.run(I + STEP)
    a.release_writes()
    cluster.run(I)
    granted(cluster, a, claim, (10, 15))
    assert took(a, claim, 1) == [10]
    a.member.leave(a.now, "bye", 0)
    a.due_ms = cluster.now_ms
    cluster.run(3 * TRIP)
    assert releases(cluster) == [("accepted", 15, 11)]
    assert [(advisory.offset, advisory.to) for _, advisory in a.advised("amo_dropped")] == [(0, 10)]


def test_a_claim_without_a_grant_gives_back_nothing() -> None:
    """T16: without a hand-over `give` is where the claim began, which is its position."""
    cluster, a = owner()
    a.member.leave(a.now, "bye", 0)
    a.due_ms = cluster.now_ms
    cluster.run(3 * TRIP)
    assert not a.alive
    assert releases(cluster) == [("accepted", 0, 0)]


def test_a_stuck_handler_gives_back() -> None:
    """D4, T16: released while the handler still hangs; what it has is not given back."""
    cluster, a = owner(handler_timeout_ms=2 * I)
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    assert a.take(claim) == 0
    cluster.run(3 * I)
    assert releases(cluster) == [("accepted", 10, 1)]
    assert cluster.partition(0).position == 1


def test_a_late_copy_of_a_grant_after_a_give_back() -> None:
    """D2, F5.2: it grants nothing: the epoch is over."""
    cluster, a = owner()
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    claim.stop("test", 0)
    a.due_ms = cluster.now_ms
    cluster.run(I)
    assert cluster.partition(0).position == 0
    again = a.claim(0)
    assert again.epoch != claim.epoch
    for verdict, _ in list(cluster.records(ClaimingMessages)):
        assert cluster.replay(verdict.offset).reason == "claim"
    for verdict, _ in list(cluster.records(ReleasingPartition)):
        assert cluster.replay(verdict.offset).reason == "claim"
    cluster.run(TRIP)
    assert a.alive
    assert take_all(a, again) == []


# --- one record for many partitions


def test_one_request_for_many_partitions() -> None:
    """D2: what is fetched and not granted in all partitions goes into one record, and one is in flight at a time."""
    cluster, a = owner(4)
    claims = [a.claim(number) for number in range(4)]
    for number, claim in enumerate(claims):
        claim.offer = (0, 5 + number)
    a.due_ms = cluster.now_ms
    cluster.run(1)
    ((_, first),) = a.sends(ClaimingMessages)
    assert first.ranges == tuple(MessageRange(claim.epoch, 0, 0, 5 + n) for n, claim in enumerate(claims))
    for claim in claims:
        claim.offer = (claim.offer[0], 20)  # type: ignore[index]
    a.due_ms = cluster.now_ms
    cluster.run(TRIP - 2)
    assert len(a.sends(ClaimingMessages)) == 1
    cluster.run(GRANT_PACE_MS)
    (_, (_, second)) = a.sends(ClaimingMessages)
    assert [(wanted.from_, wanted.to) for wanted in second.ranges] == [(5 + n, 20) for n in range(4)]
    assert second.nonce > first.nonce
    cluster.run(2 * TRIP)
    for claim in claims:
        assert take_all(a, claim) == list(range(20))


def test_a_request_that_is_lost_is_sent_again() -> None:
    """T17: after a third of an interval; the first request, which arrives late, grants nothing twice."""
    cluster, a = owner(2)
    first, second = a.claim(0), a.claim(1)
    first.offer = (0, 5)
    a.due_ms = cluster.now_ms
    a.hold_writes()
    cluster.run(2 * TRIP)
    second.offer = (0, 7)
    cluster.run(THIRD_MS)
    requests = [record for _, record in a.sends(ClaimingMessages)]
    assert [len(record.ranges) for record in requests] == [1, 2]
    a.release_writes()
    cluster.run(TRIP)
    verdicts = [(v.reason or "accepted", v.granted) for v, _ in cluster.records(ClaimingMessages)]
    assert verdicts == [("accepted", (0,)), ("accepted", (1,))]
    assert (take_all(a, first), take_all(a, second)) == (list(range(5)), list(range(7)))
    assert a.alive


def test_a_partial_grant() -> None:
    """D2, F5.2: what was refused is asked for again by the log of that moment; what was granted is delivered."""
    cluster, a = owner(2)
    first, second = a.claim(0), a.claim(1)
    first.offer = second.offer = (0, 5)
    a.due_ms = cluster.now_ms
    cluster.run(1)
    # An admin's tool cannot release for it; a copy of its own Release that was on the way ends the first epoch.
    cluster.must(ReleasingPartition(a.session, first.epoch, -1))
    a.member.claims[first.epoch].seal(ClaimPhase.RELEASING)
    cluster.run(TRIP)
    (verdict, _) = next(cluster.records(ClaimingMessages))
    assert verdict.granted == (1,)
    assert take_all(a, second) == list(range(5))
    assert a.alive


@pytest.mark.parametrize("same_range", [True, False])
def test_a_clone_gives_nothing_back_that_the_other_delivers(same_range: bool) -> None:
    """D2, T18: a grant with a nonce that this process did not draw: it ends at once and releases nothing."""
    cluster, a = owner()
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 5))
    claim.offer = (5, 9)
    a.due_ms = cluster.now_ms
    cluster.run(1)
    cluster.must(ClaimingMessages(a.session, (MessageRange(claim.epoch, 5, 5, 9 if same_range else 7),), 12345))
    cluster.run(TRIP)
    assert isinstance(a.member.error, SessionCloned)
    assert a.take(claim) is None
    assert releases(cluster) == []
    cluster.run(I)
    assert releases(cluster) == []


# --- what an owner that died may have lost


def test_who_takes_over_says_what_a_dead_owner_may_have_lost() -> None:
    """F4.5, T11: its grants above what its last heartbeat said that handlers are done with; the new owner says so."""
    cluster = VirtualCluster(partitions=1, mode=AT_MOST_ONCE)
    a, b = cluster.team("a", "b")
    claim = next(iter(a.member.claims.values()), None) or next(iter(b.member.claims.values()))
    owner, other = (a, b) if a.member.claims else (b, a)
    granted(cluster, owner, claim, (0, 10))
    took(owner, claim, 4)
    cluster.run(THIRD_MS + TRIP)
    assert owner.take(claim) == 4  # its handler has it when the process dies
    cluster.kill(owner)
    cluster.run_until(lambda: other.owned == {0})
    ((_, lost),) = other.advised("amo_lost")
    assert (lost.offset, lost.to) == (4, 10)
    assert other.member.grants_lost == 6


def test_an_idle_owner_that_dies_has_lost_nothing() -> None:
    """T11: also for one who joins when the owner's last heartbeat with an entry is long past."""
    cluster, a = owner()
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    took(a, claim, 10)
    cluster.run(3 * I)
    (b,) = cluster.team("b")
    cluster.kill(a)
    cluster.run_until(lambda: b.owned == {0})
    assert not b.advised("amo_lost")
    assert b.member.grants_lost == 0
