"""Members report what is finished above the position, and how often messages were delivered (T11, D1, D11, E8)."""

from __future__ import annotations

import pytest

from marshal_py.protocol.claims import AtLeastOnce, AtMostOnce, Claim, OffsetRun
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.member.member import HEARTBEAT_BYTES
from marshal_py.protocol.wire import codec, progress
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    PROGRESS_BYTES_MAX,
    ClaimState,
    Heartbeat,
    Join,
    Leave,
    ReleaseGroup,
    ReleasingPartition,
)
from tests.support.virtual_cluster import (
    GROUP,
    INCARNATION,
    INTERVAL_MS,
    READ_MS,
    THIRD_MS,
    WRITE_MS,
    Client,
    VirtualCluster,
    granted,
)

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
STEP = I // 10
TRIP = WRITE_MS + READ_MS


def tracker(claim: Claim) -> AtLeastOnce:
    assert isinstance(claim.tracker, AtLeastOnce)
    return claim.tracker


def admitted(client: Client, claim: Claim, offsets: range) -> tuple[list[int], OffsetRun]:
    """Fetches these and hands over what earlier owners left."""
    fresh, run = tracker(claim).admit(offsets)
    assert run is not None
    run.deliver(len(fresh), client.now.mono_ms)
    return list(fresh), run


def beats(client: Client, since_ms: int) -> list[Heartbeat]:
    return [beat for _, beat in client.sends(Heartbeat, since_ms)]


def test_heartbeats_carry_what_is_finished_although_the_position_does_not_move() -> None:
    """T11: progress and counts are reported while they differ from the folded world."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    run = a.deliver(claim, *range(10))
    cluster.run(2 * THIRD_MS)
    assert (cluster.partition(0).in_flight, cluster.partition(0).attempts, cluster.partition(0).progress) == (
        10,
        1,
        b"",
    )
    for index in (2, 3, 7):
        run.finish(index)
    begun = cluster.now_ms + 1
    cluster.run(2 * THIRD_MS)
    entries = [beat.claims for beat in beats(a, begun) if beat.claims]
    reported = progress.encode(0, [Range(2, 4, 0), Range(7, 8, 0)])
    assert entries == [(ClaimState(claim.epoch, 0, 0, 7, 1, reported),)]
    assert (cluster.partition(0).position, cluster.partition(0).progress) == (0, reported)
    claim.end_offset = 50
    begun = cluster.now_ms + 1
    cluster.run(2 * THIRD_MS)
    assert [beat.claims for beat in beats(a, begun) if beat.claims] == [
        (ClaimState(claim.epoch, 0, 50, 7, 1, reported),)
    ]


def test_heartbeats_of_in_flight_messages_at_most_once() -> None:
    """T11: counts are reported in at-most-once groups too, also while nothing else changes, and so is up to where the
    handlers are done.
    """
    cluster = VirtualCluster(partitions=1, mode=AT_MOST_ONCE)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    begun = cluster.now_ms + 1
    cluster.run(2 * THIRD_MS)
    assert all(beat.claims == () for beat in beats(a, begun))
    assert a.take(claim) == 0
    claim.end_offset = 30
    begun = cluster.now_ms + 1
    cluster.run(3 * THIRD_MS)
    assert [beat.claims for beat in beats(a, begun) if beat.claims] == [(ClaimState(claim.epoch, 0, 29, 1),)]
    assert (cluster.partition(0).lag, cluster.partition(0).in_flight, cluster.partition(0).attempts) == (29, 1, 0)
    assert isinstance(claim.tracker, AtMostOnce)
    claim.tracker.returned()
    begun = cluster.now_ms + 1
    cluster.run(3 * THIRD_MS)
    assert [beat.claims for beat in beats(a, begun) if beat.claims] == [(ClaimState(claim.epoch, 1, 29, 0),)]
    assert (cluster.partition(0).floor, cluster.partition(0).position) == (1, 10)


def test_heartbeats_cost_what_they_did() -> None:
    """T11: no progress is reported while handlers finish in order: the bytes are those of the five counts."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    run = a.deliver(claim, *range(100))
    for index in range(30):
        run.finish(index)
        cluster.run(STEP)
    reported = [(verdict, beat) for verdict, beat in cluster.records(Heartbeat) if beat.claims]
    assert len(reported) > 5
    for verdict, beat in reported:
        (entry,) = beat.claims
        assert entry.progress == b""
        body = cluster.values[verdict.offset][14 + len(GROUP) :]
        assert (
            bytes([0x95])
            + codec._ENCODER.encode([entry.epoch, entry.position, entry.lag, entry.in_flight, entry.attempts])[1:]
            in body
        )


def test_the_next_owner_skips_what_is_finished() -> None:
    """D1: after an eviction, from the last heartbeat; it carries on what it skipped, and the one after it skips too."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    run = a.deliver(a.claim(0), *range(10))
    for index in (0, 2, 3, 7):
        run.finish(index)
    cluster.run(THIRD_MS + TRIP)
    b = cluster.add("b")
    cluster.run(THIRD_MS)
    cluster.kill(a)
    run.finish(8)  # not reported yet
    cluster.run(3 * I)
    successor = b.claim(0)
    assert successor.position() == 1
    fresh, mine = admitted(b, successor, range(1, 12))
    assert fresh == [1, 4, 5, 6, 8, 9, 10, 11]
    assert [tracker(successor).delivery_count(offset) for offset in fresh] == [2, 2, 2, 2, 2, 2, 1, 1]
    mine.finish(1)
    cluster.run(2 * THIRD_MS)
    known = cluster.partition(0).progress
    assert [span for span in progress.decode(1, known) if not span.times] == [(2, 5, 0), (7, 8, 0)]
    c = cluster.add("c")
    cluster.run(THIRD_MS)
    cluster.kill(b)
    cluster.run(3 * I)
    fresh, _ = admitted(c, c.claim(0), range(1, 12))
    assert fresh == [1, 5, 6, 8, 9, 10, 11]
    counts = [tracker(c.claim(0)).delivery_count(offset) for offset in fresh]
    assert counts == [3, 3, 3, 3, 3, 2, 2]


@pytest.mark.parametrize("delivered", [True, False])
def test_a_release_says_how_often_the_message_was_delivered(delivered: bool) -> None:
    """D11, F6.2: exactly, where an owner that dies is taken to have delivered it."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    if delivered:
        run = a.deliver(claim, 0, 1, 2, 3)
        run.finish(2)
    assert cluster.partition(0).attempts == 1
    a.member.leave(a.now, "bye", 0)
    a.due_ms = cluster.now_ms
    cluster.run(3 * TRIP)
    (release,) = [r for _, r in a.sends(ReleasingPartition)]
    reported = progress.encode(0, [Range(2, 3, 0)]) if delivered else b""
    assert (release.attempts, release.in_flight, release.progress) == (int(delivered), 3 * delivered, reported)
    b = cluster.add("b")
    cluster.run(2 * I)
    assert cluster.partition(0).attempts == 1 + delivered
    fresh, _ = admitted(b, b.claim(0), range(4))
    assert fresh == ([0, 1, 3] if delivered else [0, 1, 2, 3])
    assert [tracker(b.claim(0)).delivery_count(offset) for offset in fresh] == [1 + delivered] * len(fresh)


def test_a_pause_keeps_progress() -> None:
    """T12, D1: what was finished above the position of a release is not delivered again after the pause."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    run = a.deliver(a.claim(0), *range(6))
    for index in (1, 2, 5):
        run.finish(index)
    token = cluster.must(ReleaseGroup(cluster.group.pause_change, -1, 20 * I))
    cluster.run(I + 2 * TRIP)
    assert not cluster.owners()
    cluster.must(ReleaseGroup(token, token, 0))
    cluster.run(I)
    fresh, _ = admitted(a, a.claim(0), range(6))
    assert fresh == [0, 3, 4]
    assert [tracker(a.claim(0)).delivery_count(offset) for offset in fresh] == [2, 2, 2]


def test_a_heartbeat_is_bounded_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """T11: 800,000 bytes of progress at most; the next one begins with the rest, and no claim is left out."""
    assert HEARTBEAT_BYTES == 800_000
    assert PROGRESS_BYTES_MAX == 512
    monkeypatch.setattr("marshal_py.protocol.member.member.HEARTBEAT_BYTES", 2_000)
    cluster = VirtualCluster(partitions=8)
    (a,) = cluster.team("a")
    for claim in a.member.claims.values():
        run = a.deliver(claim, *range(8_000))
        for index in range(1, 8_000, 30):
            run.finish(index)
    begun = cluster.now_ms + 1
    cluster.run(3 * THIRD_MS)
    reported = [[entry.epoch for entry in beat.claims] for beat in beats(a, begun)]
    assert [len(epochs) for epochs in reported] == [3, 3, 2]
    assert sorted(epoch for epochs in reported for epoch in epochs) == sorted(a.member.claims)
    assert all(len(entry.progress) == 510 for beat in beats(a, begun) for entry in beat.claims)


def test_the_largest_heartbeat_is_one_that_may_be_written() -> None:
    """T11, E6: with the largest counts, much progress and as many ready epochs as fit."""
    wide = ClaimState(2**63 - 1, 2**63 - 1, 2**53, 2**53, 2**53, bytes(30))
    entries = (wide,) * (800_000 // (50 + 30))
    codec.encode(Heartbeat(2**63 - 1, 2**63 - 1, entries, (2**63 - 1,) * 10_000), "g" * 255, INCARNATION)
    plain = (ClaimState(2**63 - 1, 2**63 - 1, 2**53, 2**53, 2**53),) * 10_000
    codec.encode(Heartbeat(2**63 - 1, 2**63 - 1, plain, (2**63 - 1,) * 10_000), "g" * 255, INCARNATION)


# --- E8


def versions(cluster: VirtualCluster, since: int = 0) -> dict[str, set[int]]:
    """Kind of record -> the versions of those that stand in the log."""
    found: dict[str, set[int]] = {}
    for verdict in cluster.verdicts[since:]:
        value = cluster.values[verdict.offset]
        if value[11]:
            found.setdefault(type(verdict.record).__name__, set()).add(value[12 + value[11]])
    return found


def test_a_group_of_two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """E8: a newer reader writes the old version while a session lives that reads no other, and then its own."""
    cluster = VirtualCluster(partitions=4)
    new = cluster.add("new", reads_version=2, writes_version=2)
    cluster.run(2 * I)
    assert versions(cluster)["Heartbeat"] == {2}
    assert {record.reads_version for _, record in new.sends(Join)} == {2}
    mixed = VirtualCluster(partitions=4)
    old = mixed.add("old", reads_version=1)
    mixed.run(THIRD_MS)
    new = mixed.add("new", reads_version=2, writes_version=2)
    mixed.run(3 * I)
    assert old.owned
    assert new.owned
    kinds = versions(mixed)
    assert kinds.keys() >= {"Join", "Topology", "Heartbeat", "ClaimingPartition", "ReleasingPartition"}
    assert all(found == {1} for found in kinds.values()), "its Join too: another session was there before it"
    old.member.leave(old.now, "bye", 0)
    mixed.run_until(lambda: not old.alive)
    mixed.run(READ_MS)
    at = len(mixed.values) + 1  # what was on its way was written before it had read the Leave
    mixed.run(2 * I)
    assert all(found == {2} for found in versions(mixed, at).values())
    assert new.owned == {0, 1, 2, 3}
    (left,) = [verdict.offset for verdict, _ in mixed.records(Leave)]
    monkeypatch.setattr(rationalizer, "READS_VERSION", 1)
    world = World()
    for offset, value in enumerate(mixed.values):
        rationalizer.apply(world, offset, value)
    assert left < world.groups[GROUP].opaque_at <= at


def test_the_oldest_reader_decides_the_version_that_others_write() -> None:
    """E8: from the moment its Join is read; until then the group may be opaque to it."""
    cluster = VirtualCluster(partitions=2)
    new = cluster.add("new", reads_version=2, writes_version=2)
    cluster.run(2 * I)
    old = cluster.add("old", reads_version=1)
    cluster.run(THIRD_MS)
    at = len(cluster.values)
    cluster.run(2 * I)
    assert all(found == {1} for found in versions(cluster, at).values())
    assert new.member.writes_version == old.member.writes_version == 1
