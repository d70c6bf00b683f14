"""What lets a claim go, and when its Release follows (D6, A3, T12)."""

from __future__ import annotations

import pytest

from marshal_py.protocol.parking import BEYOND_END, TRUNCATED
from marshal_py.protocol.records import AT_LEAST_ONCE, AT_MOST_ONCE, ClaimingPartition, ReleasingPartition
from tests.support.stage import INTERVAL_MS, READ_MS, WRITE_MS, Client, Stage

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
TRIP = WRITE_MS + READ_MS


def park(client: Client, number: int, reason: str = BEYOND_END, detail: str = "position 9, end 3") -> None:
    claim = client.claim(number)
    client.member.releases.park(claim.epoch, reason, detail, client.now)
    client.due_ms = client.stage.now_ms


def parked(stage: Stage) -> dict[int, str]:
    return {p.tp.partition: p.parked for p in stage.group.partitions.values() if p.parked}


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, AT_MOST_ONCE])
def test_a_partition_that_cannot_be_read_is_parked_alone(mode: int) -> None:
    """D6, F6.4: delivery stops at once; the others keep their epochs, and nobody claims the one."""
    stage = Stage(partitions=4, mode=mode)
    a, b = stage.team("a", "b")
    owner, other = (a, b) if 0 in a.owned else (b, a)
    kept = {claim.epoch for c in (a, b) for claim in c.member.claims.values() if claim.tp.partition}
    claim = owner.claim(0)
    park(owner, 0)
    assert not owner.may(claim)
    stage.run(2 * TRIP)
    assert parked(stage) == {0: BEYOND_END}
    (release,) = [record for _, record in owner.sends(ReleasingPartition) if record.parked]
    assert (release.parked, release.reason, release.successor) == (BEYOND_END, "position 9, end 3", -1)
    (told,) = [advisory.text for _, advisory in owner.told("parked")]
    assert "(position 9, end 3)" in told
    end = stage.verdicts[-1].offset
    stage.run(4 * I)
    assert parked(stage) == {0: BEYOND_END}
    assert not [r for _, r in stage.records(ClaimingPartition, end) if r.partition == 0]
    assert {claim.epoch for c in (a, b) for claim in c.member.claims.values()} == kept
    assert not other.told("parked")


def test_it_waits_for_its_handlers_for_an_interval() -> None:
    """D6: what they finish until then is told with the Release; a second look at the same partition changes nothing."""
    stage = Stage(partitions=1)
    (a,) = stage.team("a")
    run = a.deliver(a.claim(0), 0, 1, 2)
    park(a, 0, TRUNCATED, "cut at 1")
    stage.run(I // 2)
    assert parked(stage) == {}
    run.finish(0)
    park(a, 0, BEYOND_END, "position 2, end 1")
    stage.run(I // 2 + 2 * TRIP)
    assert parked(stage) == {0: TRUNCATED}
    assert stage.partition(0).position == 1
    stage.run(I)
    run.finish(1)
    assert stage.partition(0).position == 1, "an ack that comes too late"


def test_a_claim_that_is_being_handed_over_is_parked_all_the_same() -> None:
    """D6, A3: and it does not open again when its successor goes."""
    stage = Stage(partitions=1)
    (a,) = stage.team("a")
    a.deliver(a.claim(0), 0)
    claim = a.claim(0)
    claim.stop("hand-over", None, 999)
    park(a, 0)
    stage.run(I // 2)
    assert not a.may(claim)
    stage.run(I)
    assert parked(stage) == {0: BEYOND_END}
