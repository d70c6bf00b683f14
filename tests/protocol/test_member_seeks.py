"""The owner of a claim moves its position: PROTOCOL.md T20, F6.6."""

from __future__ import annotations

from marshal_py.errors import SessionCloned
from marshal_py.protocol.claims import AtLeastOnce, ClaimPhase
from marshal_py.protocol.wire.records import ReleaseGroup, ReleasingPartition, SeekingPartition
from tests.support.virtual_cluster import INTERVAL_MS, READ_MS, THIRD_MS, WRITE_MS, Client, VirtualCluster, tp


def seek(client: Client, number: int, position: int) -> None:
    """As the driver does it for `Consumer.seek`."""
    assert client.member.seek(tp(number), position, client.now) is not None
    client.due_ms = client.cluster.now_ms


def test_a_new_claim_takes_the_place_of_the_old_one() -> None:
    """T20: nothing is delivered until the record is read; then the same member delivers from the new position."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    number = min(a.owned)
    old = a.claim(number)
    run = a.deliver(old, 0, 1, 2)
    run.finish(0)
    others = cluster.owners()
    seek(a, number, 40)
    assert not a.may(old)
    assert old.sealed, "acks come too late"
    cluster.run(WRITE_MS + READ_MS + 1)
    new = a.claim(number)
    assert new is not old
    assert old.phase is ClaimPhase.GONE
    assert a.may(new)
    assert new.position() == cluster.partition(number).position == 40
    assert new.epoch > old.epoch
    assert new.generation > old.generation
    assert isinstance(new.tracker, AtLeastOnce)
    assert new.tracker.delivery_count(40) == 1
    assert [(claim, reason) for _, claim, reason in a.lost] == [(old, "seek")]
    assert a.claimed[-1][1] is new
    (moved,) = a.advised("moved")
    assert (moved[1].offset, moved[1].to, moved[1].text) == (1, 40, "by its owner")
    cluster.run(3 * INTERVAL_MS)
    assert cluster.owners() == others
    assert cluster.partition(number).position == 40
    assert a.claim(number) is new
    assert a.alive
    assert b.alive


def test_copies_do_not_seek_again() -> None:
    """T20: it is sent again until its fate is read; F6.6: the old epoch is over, so copies are rejected."""
    cluster = VirtualCluster()
    a, _ = cluster.team("a", "b")
    number = min(a.owned)
    a.hold_writes()
    seek(a, number, 40)
    cluster.run(2 * THIRD_MS)
    a.release_writes()
    cluster.run(WRITE_MS + READ_MS + 1)
    assert len(a.sends(SeekingPartition)) > 1
    verdicts = [verdict for verdict, _ in cluster.records(SeekingPartition)]
    assert [verdict.accepted for verdict in verdicts] == [True] + [False] * (len(verdicts) - 1)
    assert {verdict.reason for verdict in verdicts[1:]} == {"claim"}
    late = cluster.replay(verdicts[0].offset)
    assert late.reason == "claim"
    cluster.run(INTERVAL_MS)
    assert a.alive
    assert cluster.partition(number).position == 40


def test_a_pause_that_comes_first_releases_the_claim_where_it_was() -> None:
    """T20: rejected by `paused`, so the claim is released at its old position, as every claim is in a pause (T12)."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    number = min(a.owned)
    a.deliver(a.claim(number), 0, 1).finish_range(0, 2)
    seek(a, number, 40)
    cluster.must(ReleaseGroup(-1, -1, 10_000))
    cluster.run(INTERVAL_MS + THIRD_MS)
    assert {verdict.reason for verdict, _ in cluster.records(SeekingPartition)} == {"paused"}
    assert cluster.partition(number).position == 2
    assert not a.owned
    assert not b.owned
    assert a.alive


def test_a_member_that_leaves_meanwhile_releases_the_claim() -> None:
    """T20: at its old position if the record is not in the log yet; the new claim is released otherwise."""
    for held in (True, False):
        cluster = VirtualCluster()
        a, b = cluster.team("a", "b")
        number = min(a.owned)
        if held:
            a.hold_writes()
        seek(a, number, 40)
        cluster.run(1)
        a.member.leave(a.now, "stopped", 0)
        a.due_ms = cluster.now_ms
        if held:
            cluster.lose_in_flight(a)
            a.release_writes(lose=True)
        cluster.run(3 * INTERVAL_MS)
        assert not a.alive
        assert a.member.error is None
        assert cluster.partition(number).position == (0 if held else 40)
        assert len(b.owned) == cluster.partitions


def test_a_seek_that_was_not_sent_here_is_a_clones() -> None:
    """T18, T20."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    cluster.inject(SeekingPartition(b.session, b.claim(min(b.owned)).epoch, 7))
    cluster.run(READ_MS)
    assert isinstance(b.member.error, SessionCloned)
    assert a.alive


def test_only_open_claims_seek() -> None:
    """T20: a claim that is being released is not the user's any more."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    assert a.member.seek(tp(min(b.owned)), 7, a.now) is None
    claim = a.claim(min(a.owned))
    claim.stop("test", None)
    assert a.member.seek(claim.tp, 7, a.now) is None
    assert not list(cluster.records(SeekingPartition))
    assert not [one for one in cluster.records(ReleasingPartition) if one[1].epoch == claim.epoch]
