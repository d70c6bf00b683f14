"""Why a claim is released, and when its Release follows (D6, A3, T12)."""

from __future__ import annotations

import pytest

from marshal_py.protocol.claims import Claim, ClaimPhase
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    BEYOND_END,
    TRUNCATED,
    ClaimingPartition,
    Leave,
    ReleaseGroup,
    ReleasingPartition,
)
from tests.support.virtual_cluster import INTERVAL_MS, READ_MS, WRITE_MS, Client, VirtualCluster, granted

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
TRIP = WRITE_MS + READ_MS


def park(client: Client, number: int, reason: str = BEYOND_END, detail: str = "position 9, end 3") -> None:
    claim = client.claim(number)
    client.member.park(claim.epoch, reason, detail, client.now)
    client.due_ms = client.cluster.now_ms


def parked(cluster: VirtualCluster) -> dict[int, str]:
    return {p.tp.partition: p.parked for p in cluster.group.partitions.values() if p.parked}


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, AT_MOST_ONCE])
def test_a_partition_that_cannot_be_read_is_parked_alone(mode: int) -> None:
    """D6, F6.4: delivery stops at once; the others keep their epochs, and no member claims this one."""
    cluster = VirtualCluster(partitions=4, mode=mode)
    a, b = cluster.team("a", "b")
    owner, other = (a, b) if 0 in a.owned else (b, a)
    kept = {claim.epoch for c in (a, b) for claim in c.member.claims.values() if claim.tp.partition}
    claim = owner.claim(0)
    park(owner, 0)
    assert not owner.may(claim)
    cluster.run(2 * TRIP)
    assert parked(cluster) == {0: BEYOND_END}
    (release,) = [record for _, record in owner.sends(ReleasingPartition) if record.parked]
    assert (release.parked, release.reason, release.successor) == (BEYOND_END, "position 9, end 3", -1)
    (text,) = [advisory.text for _, advisory in owner.advised("parked")]
    assert "(position 9, end 3)" in text
    end = cluster.verdicts[-1].offset
    cluster.run(4 * I)
    assert parked(cluster) == {0: BEYOND_END}
    assert not [r for _, r in cluster.records(ClaimingPartition, end) if r.partition == 0]
    assert {claim.epoch for c in (a, b) for claim in c.member.claims.values()} == kept
    assert not other.advised("parked")


def test_it_waits_for_its_handlers_for_an_interval() -> None:
    """D6: the Release reports what they finish until then; parking the same partition again changes nothing."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    run = a.deliver(a.claim(0), 0, 1, 2)
    park(a, 0, TRUNCATED, "cut at 1")
    cluster.run(I // 2)
    assert parked(cluster) == {}
    run.finish(0)
    park(a, 0, BEYOND_END, "position 2, end 1")
    cluster.run(I // 2 + 2 * TRIP)
    assert parked(cluster) == {0: TRUNCATED}
    assert cluster.partition(0).position == 1
    cluster.run(I)
    run.finish(1)
    assert cluster.partition(0).position == 1, "an ack that comes too late"


def test_a_claim_that_is_being_handed_over_is_parked_all_the_same() -> None:
    """D6, A3: and it does not open again when its successor goes."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    a.deliver(a.claim(0), 0)
    claim = a.claim(0)
    claim.stop("hand-over", None, 999)
    park(a, 0)
    cluster.run(I // 2)
    assert not a.may(claim)
    cluster.run(I)
    assert parked(cluster) == {0: BEYOND_END}


# --- hand-overs have a bound


BOUND = 3 * I


def handing_over(mode: int = AT_LEAST_ONCE) -> tuple[VirtualCluster, Client, Client, Claim]:
    """An owner of two partitions, just stopped on the one of which its handler has a message."""
    cluster = VirtualCluster(partitions=2, mode=mode)
    (a,) = cluster.team("a", hand_over_timeout_ms=BOUND)
    claim = a.claim(1)
    if mode == AT_LEAST_ONCE:
        a.deliver(claim, 0, 1, 2).finish(1)
    else:
        granted(cluster, a, claim, (0, 10))
        assert a.take(claim) == 0
    b = cluster.add("b")
    cluster.run_until(lambda: claim.phase is ClaimPhase.DRAINING)
    return cluster, a, b, claim


def test_a_busy_owner_keeps_its_successor_waiting_for_so_long_and_no_longer() -> None:
    """A3, D1: what its handler holds comes again there, what it has finished does not; its late ack counts nothing."""
    cluster, a, b, claim = handing_over()
    run = claim.tracker.runs[0]  # type: ignore[union-attr]
    since_ms = cluster.now_ms
    cluster.run(BOUND - 2)
    assert cluster.owners() == {0: "a", 1: "a"}
    cluster.run(3 * TRIP)
    assert cluster.owners() == {0: "a", 1: "b"}
    assert cluster.now_ms - since_ms < BOUND + 3 * TRIP
    (release,) = [r for _, r in a.sends(ReleasingPartition)]
    assert (release.position, release.successor, release.reason, release.in_flight) == (0, b.session, "hand-over", 2)
    assert b.claim(1).position() == 0
    offsets, _ = b.claim(1).tracker.admit([0, 1, 2])  # type: ignore[union-attr]
    assert list(offsets) == [0, 2]
    assert a.member.ack_is_late(claim)
    run.finish(0)
    cluster.run(I)
    assert cluster.partition(1).position == 0
    assert a.may(a.claim(0)), "the rest is delivered all the while"


def test_a_busy_owner_hands_over_at_most_once() -> None:
    """A3, F6.3: what it has handed over is past, the rest of its grant is given back."""
    cluster, _, b, claim = handing_over(AT_MOST_ONCE)
    cluster.run(BOUND + 3 * TRIP)
    assert cluster.owners() == {0: "a", 1: "b"}
    assert b.claim(1).position() == 1
    assert claim.phase is ClaimPhase.GONE


@pytest.mark.parametrize("why", ["hand-over", "paused", "stopped", "handler stuck"])
def test_the_user_learns_once_that_a_claim_will_be_released(why: str) -> None:
    """A3: by an event before anything is released, with the reason."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a", handler_timeout_ms=4 * I)
    a.deliver(a.claim(0), 0)
    match why:
        case "hand-over":
            a.claim(0).stop(why, cluster.now_ms + I, a.session)
        case "paused":
            cluster.must(ReleaseGroup(-1, -1, 60_000))
        case "stopped":
            a.member.leave(a.now, why, 4 * I)
        case _:
            cluster.run(4 * I)
    a.member.request_tick()
    a.due_ms = cluster.now_ms
    cluster.run(TRIP)
    assert [advisory.text for _, advisory in a.advised("revoking")] == [why]
    at_ms = a.advised("revoking")[0][0]
    assert all(sent_ms >= at_ms for sent_ms, _ in (*a.sends(ReleasingPartition), *a.sends(Leave)))
    cluster.run(2 * I)
    assert len(a.advised("revoking")) == 1


def test_a_hand_over_that_is_called_off_may_be_reported_again() -> None:
    """A3: the successor has gone before the Release; the claim delivers again, and is to go a second time."""
    cluster, a, b, claim = handing_over()
    cluster.kill(b)
    cluster.run(BOUND - I)
    assert len(a.advised("revoking")) == 1
    cluster.run_until(lambda: claim.phase is not ClaimPhase.DRAINING)
    if claim.phase is ClaimPhase.OPEN:
        assert a.may(claim)
        a.member.leave(a.now, "bye", 0)
        a.due_ms = cluster.now_ms
        cluster.run(TRIP)
        assert len(a.advised("revoking")) == 3, "both claims, once each"
