"""Members over one log in virtual time: PROTOCOL.md section 7, each rule with several clients."""

from __future__ import annotations

from itertools import pairwise

import pytest

from marshal_py.errors import DuplicateClientId, SessionCloned
from marshal_py.protocol.claims import ClaimPhase
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.policy import candidate_order
from marshal_py.protocol.wire.records import (
    DIED,
    HEARTBEAT_ENTRIES_MAX,
    INSTANCE_BYTES,
    ClaimingPartition,
    Evict,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    Note,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    StepDown,
)
from tests.support.virtual_cluster import INTERVAL_MS, READ_MS, THIRD_MS, TOPIC, WRITE_MS, Client, VirtualCluster, tp

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
STEP = I // 10
TRIP = WRITE_MS + READ_MS  # from a send to its reading


def last_sign(client: Client) -> int:
    """When it last sent what shows that it lives."""
    return max(at for at, record in client.sent if isinstance(record, Heartbeat | Join))


def pause(cluster: VirtualCluster, duration_ms: int, token: int | None = None) -> int:
    """An admin begins or renews a pause; its token."""
    change = cluster.group.pause_change
    return cluster.must(ReleaseGroup(change, change if token is None else token, duration_ms))


# --- the beginning


def test_three_members_share_twelve_partitions() -> None:
    """T9, D8: all own four, all may deliver, all send a heartbeat every third and not more often."""
    cluster = VirtualCluster()
    team = cluster.team("a", "b", "c")
    assert sorted(map(len, (c.owned for c in team))) == [4, 4, 4]
    assert set(cluster.owners()) == set(range(12))
    for client in team:
        assert all(client.may(claim) for claim in client.member.claims.values())
        assert not client.advised("fenced")
        begun = cluster.now_ms
    cluster.run(10 * I)
    for client in team:
        beats = [at for at, _ in client.sends(Heartbeat, begun)]
        assert len(beats) == pytest.approx(30, abs=1)
        assert all(THIRD_MS <= later - earlier <= THIRD_MS + STEP for earlier, later in pairwise(beats))
    assert not list(cluster.records(Evict))


# --- waiting


@pytest.mark.parametrize(("reason", "counts"), [(f"{DIED}: exit code 3", True), ("stopped", False)])
def test_a_claim_after_a_death_that_a_witness_told_is_a_take_over(reason: str, counts: bool) -> None:
    """T19: under `marshal run` nobody is evicted, and consumers that die again and again count all the same."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    had = len(b.owned)
    session = b.member.session
    cluster.kill(b)
    cluster.must(Leave(session, reason))
    cluster.run_until(lambda: set(cluster.owners()) == set(range(12)) and len(a.owned) == 12)
    assert had > 0
    assert a.member.take_overs == (had if counts else 0)


def test_an_eviction_after_two_intervals_and_not_earlier() -> None:
    """T1, T4: counted from the reading of the last extension; the first in rank sends, with the claims that follow."""
    cluster = VirtualCluster()
    a, b, c = cluster.team("a", "b", "c")
    cluster.kill(b)
    had = b.owned
    read_ms = last_sign(b) + TRIP
    cluster.run_until(lambda: list(cluster.records(Evict)))
    ((at, evict),) = a.sends(Evict)
    assert not c.sends(Evict), "rank 1 leaves it to rank 0"
    assert 2 * I <= at - read_ms <= 2 * I + STEP
    assert evict.observed == cluster.verdicts[evict.observed].offset
    assert 2 * I <= evict.waited_ms <= at - read_ms, "never more than it really was"
    claims = {record.partition for when, record in a.sends(ClaimingPartition) if when == at}
    assert claims, "its own share goes into the same breath"
    assert claims < had
    cluster.run(I)
    assert set(cluster.owners()) == set(range(12))
    assert {len(a.owned), len(c.owned)} == {6}
    takers = [record for at_, record in c.sends(ClaimingPartition, at)]
    assert {record.partition for record in takers} == had - claims
    assert (a.member.take_overs, c.member.take_overs) == (len(claims), len(had - claims))
    assert 0 < a.member.round_trip_ms <= I


def test_rank_orders_the_evictions() -> None:
    """T4, T13: rank k waits k thirds of an interval more; dead ones do not count."""
    cluster = VirtualCluster()
    a, b, c, d = cluster.team("a", "b", "c", "d")
    for client in (a, c):
        cluster.kill(client)
    begun = max(last_sign(a), last_sign(c)) + TRIP
    cluster.run(2 * I + STEP)
    assert {record.session for _, record in b.sends(Evict)} == {a.session, c.session}, "b is the first that lives"
    assert not d.sends(Evict)
    assert all(at - begun <= 2 * I + STEP for at, _ in b.sends(Evict))
    # The first in rank can read and wait, but its records are held; the second waits a third more.
    cluster = VirtualCluster()
    a, b, c = cluster.team("a", "b", "c")
    cluster.kill(c)
    read_ms = last_sign(c) + TRIP
    a.write_ms = 2_000  # proven still, but late
    cluster.run_until(lambda: b.sends(Evict))
    assert cluster.now_ms - read_ms >= 2 * I + THIRD_MS
    assert cluster.now_ms - read_ms <= 2 * I + THIRD_MS + STEP
    assert a.sends(Evict)[0][0] < cluster.now_ms


def test_a_newcomer_keeps_nobody_waiting_however_high_its_rank() -> None:
    """T4: a member that joined after the last sign comes last; seed 1011594."""
    cluster = VirtualCluster()
    cluster.must(GroupConfig(-1, policy="prioritized", priority_groups=("jobs",)))
    a, b = cluster.team("a", "b", priority=1, priority_group="jobs")
    cluster.kill(b)
    read_ms = last_sign(b) + TRIP
    cluster.run(I)
    newcomer = cluster.add("c", priority=0, priority_group="jobs")
    cluster.run_until(lambda: list(cluster.records(Evict)))
    ((at, _),) = a.sends(Evict)
    assert candidate_order(a.member.group, set())[0] == newcomer.session
    assert at - read_ms <= 2 * I + STEP


def test_a_dead_successor_costs_a_third() -> None:
    """A2: the named successor has the first third; when it does not come, the next one takes it."""
    cluster = VirtualCluster(partitions=1)
    a, b, c = cluster.team("a", "b", "c")
    cluster.kill(b)
    a.member.leave(a.now, "bye", 0)
    cluster.run_until(lambda: not a.alive)
    assert cluster.partition(0).successor == b.session
    freed = cluster.now_ms
    cluster.run_until(lambda: c.owned)
    assert THIRD_MS <= cluster.now_ms - freed <= THIRD_MS + STEP + 2 * TRIP


def test_an_outage_of_all_writes_evicts_nobody() -> None:
    """T2, T3: for 60 s no writes arrive: waits restart, all stop delivering, and every claim survives."""
    cluster = VirtualCluster()
    team = cluster.team("a", "b", "c")
    before = {number: cluster.partition(number).epoch for number in range(12)}
    for client in team:
        client.hold_writes()
    cluster.run(I + THIRD_MS + STEP)
    for client in team:
        assert client.advised("fenced")
        assert not any(client.may(claim) for claim in client.member.claims.values())
    cluster.run(60_000)
    for client in team:
        client.release_writes()
    cluster.run(2 * I)
    assert not list(cluster.records(Evict))
    assert {number: cluster.partition(number).epoch for number in range(12)} == before
    for client in team:
        assert len(client.advised("joined")) == 1
        assert len(client.advised("unfenced")) == 1, "not at its start, when no fence had been reported"
        assert client.member.healthy(client.now)
        assert all(client.may(claim) for claim in client.member.claims.values())
    cluster.run(4 * I)
    assert not list(cluster.records(Evict))


def test_an_outage_that_ends_for_one_after_the_other_evicts_nobody_at_once() -> None:
    """T3: the first that writes again counts from there, so the rest has two intervals to come back."""
    cluster = VirtualCluster()
    a, b, c = cluster.team("a", "b", "c")
    for client in (a, b, c):
        client.hold_writes()
    cluster.run(30_000)
    a.release_writes()
    cluster.run(2 * I - STEP)
    assert not a.sends(Evict)
    b.release_writes()
    c.release_writes()
    cluster.run(3 * I)
    assert not list(cluster.records(Evict))


def test_a_client_that_writes_and_does_not_read_is_evicted() -> None:
    """T10: it stops its heartbeats after an interval without reading one, and is evicted; it cannot revive itself."""
    cluster = VirtualCluster()
    _a, b, _c = cluster.team("a", "b", "c")
    b.reads_held = True
    session = b.session
    begun = cluster.now_ms
    cluster.run(I + 2 * THIRD_MS)
    beats = len(b.sends(Heartbeat))
    assert b.sends(Heartbeat)[-1][0] <= begun + I + THIRD_MS
    cluster.run(3 * I)
    assert len(b.sends(Heartbeat)) == beats
    assert [note for _, note in b.sends(Note) if note.kind == "probe"]
    assert [record.session for _, record in cluster.records(Evict)] == [session]
    assert not any(b.may(claim) for claim in b.member.claims.values())
    assert set(cluster.owners().values()) == {"a", "c"}
    b.reads_held = False
    cluster.run(2 * I)
    assert b.session != session, "it begins again as a new session"
    assert len(b.advised("joined")) == 2
    assert len(b.advised("evicted")) == 1
    assert set(cluster.owners().values()) == {"a", "b", "c"}


def test_a_client_that_is_too_slow_does_not_revive_permanently() -> None:
    """T10: a client whose records come back only after more than an interval is evicted (X40)."""
    cluster = VirtualCluster()
    _a, b, _c = cluster.team("a", "b", "c")
    b.read_ms = I + THIRD_MS
    session = b.session
    cluster.run(8 * I)
    assert session in {record.session for verdict, record in cluster.records(Evict) if verdict.accepted}
    revivals = [at for at, _ in b.sends(Heartbeat)][-6:]
    assert "b" not in cluster.owners().values()
    assert revivals


def test_a_short_outage_costs_no_claim() -> None:
    """T10: probe, read back, one heartbeat, a second; then it delivers again. In between it claims nothing."""
    cluster = VirtualCluster()
    _a, b, _c = cluster.team("a", "b", "c")
    epochs = {claim.epoch for claim in b.member.claims.values()}
    b.cut()
    begun = cluster.now_ms
    cluster.run(I + THIRD_MS)
    assert b.advised("fenced")
    assert not any(b.may(claim) for claim in b.member.claims.values())
    assert not b.sends(ClaimingPartition, begun)
    b.heal()
    cluster.run(THIRD_MS)
    assert {claim.epoch for claim in b.member.claims.values()} == epochs
    assert all(b.may(claim) for claim in b.member.claims.values())
    assert not list(cluster.records(Evict))


def test_an_unhealthy_client_claims_nothing() -> None:
    """T10: it reads that partitions became free, has not read its own signs back, and leaves them to others."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    b.hold_writes()
    cluster.run(I + STEP)
    begun = cluster.now_ms
    a.member.leave(a.now, "bye", 0)
    cluster.run(I)
    assert len(b.group.claims) == len(b.owned) == 6, "it has read that"
    assert not b.sends(ClaimingPartition, begun)
    b.release_writes()
    cluster.run(I)
    assert len(b.owned) == 12


# --- leases


def test_delivery_ends_one_interval_after_the_send() -> None:
    """T6, T8: counted from just before the send of the newest extension that was read, whatever is in flight."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    cluster.run_until(lambda: a.sends(Heartbeat)[-1][0] == cluster.now_ms)
    sent_ms = cluster.now_ms
    cluster.run(TRIP)
    a.reads_held = True
    cluster.run(sent_ms + I - cluster.now_ms)
    assert a.may(a.claim(0))
    cluster.run(1)
    assert not a.may(a.claim(0))


@pytest.mark.parametrize("slept_ms", [I - 2 * TRIP, I + 1, 20 * I])
def test_a_suspended_machine(slept_ms: int) -> None:
    """T7: mono stopped, boot and wall time continued, so it does not wake up as an owner."""
    cluster = VirtualCluster()
    _a, b = cluster.team("a", "b")
    cluster.run_until(lambda: b.sends(Heartbeat)[-1][0] == cluster.now_ms - TRIP)
    claim = min(b.member.claims.values(), key=lambda one: one.tp)
    assert b.may(claim)
    b.suspend()
    cluster.run(slept_ms)
    b.resume()
    assert b.may(claim) == (slept_ms <= I - TRIP)
    cluster.run(3 * I)
    assert set(cluster.owners().values()) == {"a", "b"}
    if slept_ms > 2 * I:
        assert [advisory.kind for _, advisory in b.advisories].count("evicted") == 1


def test_a_wall_clock_that_jumps_costs_delivery_and_no_claim() -> None:
    """T7: an hour forward fences until the next heartbeat is read; backward changes nothing."""
    cluster = VirtualCluster()
    _a, b = cluster.team("a", "b")
    epochs = {claim.epoch for claim in b.member.claims.values()}
    b.wall_skew_ms = -3_600_000
    assert all(b.may(claim) for claim in b.member.claims.values())
    cluster.run(I)
    b.wall_skew_ms = 0
    assert not any(b.may(claim) for claim in b.member.claims.values())
    cluster.run(THIRD_MS)
    assert all(b.may(claim) for claim in b.member.claims.values())
    assert {claim.epoch for claim in b.member.claims.values()} == epochs


# --- heartbeats


def test_an_entry_is_what_differs_from_the_folded_world() -> None:
    """T11: an acked position goes into heartbeats until it was read back, not only into the next one."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    run = a.deliver(a.claim(0), 0, 1, 2)
    run.finish(0)
    a.hold_writes()
    begun = cluster.now_ms + 1
    cluster.run(2 * THIRD_MS + STEP)
    beats = a.sends(Heartbeat, begun)
    assert len(beats) >= 2
    for _, beat in beats:
        (entry,) = beat.claims
        assert (entry.epoch, entry.position, entry.in_flight, entry.attempts) == (a.claim(0).epoch, 1, 2, 1)
    a.release_writes()
    cluster.run(TRIP)
    assert cluster.partition(0).position == 1
    begun = cluster.now_ms + 1
    cluster.run(2 * THIRD_MS)
    assert all(beat.claims == () for _, beat in a.sends(Heartbeat, begun)), "the world knows it now"


def test_a_heartbeat_of_too_many_claims_continues_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """T11: no more than the limit in one; the rest follow in the next even while the first ones change again."""
    assert HEARTBEAT_ENTRIES_MAX == 10_000
    monkeypatch.setattr("marshal_py.protocol.member.member.HEARTBEAT_ENTRIES_MAX", 4)
    cluster = VirtualCluster(partitions=10)
    (a,) = cluster.team("a")
    runs = {claim.epoch: a.deliver(claim, *range(50)) for claim in a.member.claims.values()}
    begun = cluster.now_ms + 1
    seen: list[set[int]] = []
    for index in range(3):
        for run in runs.values():
            run.finish(index)
        cluster.run(THIRD_MS)
        for _, beat in a.sends(Heartbeat, begun)[len(seen) :]:
            assert len(beat.claims) <= 4
            seen.append({entry.epoch for entry in beat.claims})
    assert set().union(*seen[:3]) == set(runs), "no claim waits while another one is reported twice"


def test_a_ready_list_that_is_too_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A3, F2.5: a heartbeat holds so many epochs at most; the lowest ones, so that it is the same list each time."""
    monkeypatch.setattr("marshal_py.protocol.member.rebalance.HEARTBEAT_ENTRIES_MAX", 4)
    cluster = VirtualCluster(partitions=20)
    (a,) = cluster.team("a")
    runs = [a.deliver(claim, 0) for claim in a.member.claims.values()]  # so that no hand-over comes to its end
    b = cluster.add("b")
    cluster.run_until(lambda: len(b.prefetched) == 10)
    begun = cluster.now_ms + 1
    cluster.run(I)
    moving = sorted(a.claim(place.partition).epoch for place, _ in b.prefetched)
    assert {beat.ready for _, beat in b.sends(Heartbeat, begun)} == {tuple(moving[:4])}
    for _ in range(4):
        for run in runs:
            run.finish(0)
        a.due_ms = cluster.now_ms
        cluster.run(I)
    assert len(a.owned) == len(b.owned) == 10, "the others follow when the first have moved"


# --- pauses


def test_a_pause_is_drained_within_one_interval() -> None:
    """T12: delivery stops, all is released at its position, also what a hanging handler holds."""
    cluster = VirtualCluster(partitions=4)
    a, b = cluster.team("a", "b")
    first, second = sorted(a.member.claims.values(), key=lambda one: one.tp)
    hung = a.deliver(first, 0, 1, 2)
    hung.finish(0)
    begun = cluster.now_ms
    pause(cluster, 20 * I)
    cluster.run(READ_MS)
    assert not any(c.may(claim) for c in (a, b) for claim in c.member.claims.values())
    cluster.run(TRIP)
    assert set(cluster.owners()) == {first.tp.partition}, "what no handler holds is released at once"
    assert second.phase is ClaimPhase.GONE
    cluster.run_until(lambda: not cluster.owners())
    assert I <= cluster.now_ms - begun <= I + 2 * TRIP
    assert cluster.partition(first.tp.partition).position == 1, "at the lowest unfinished offset"
    assert [r.reason for _, r in cluster.records(ReleasingPartition)] == ["paused"] * 4
    hung.finish(1)
    assert a.member.ack_is_late(first)
    assert a.member.late_acks == 1
    cluster.run(5 * I)
    assert not cluster.owners(), "nobody claims in a pause"
    assert not list(cluster.records(Evict)), "nor is anybody evicted who lives"


def test_what_extends_nothing_renews_no_lease() -> None:
    """T6, T9: an owner's heartbeat in a pause is accepted, keeps it healthy, and leaves its lease where it was.

    That its lease ends so is no fence that anybody should look at; that its heartbeats do not come back is one.
    """
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    a.deliver(a.claim(0), 0)
    pause(cluster, 20 * I)
    begun = cluster.now_ms
    cluster.run(I - STEP)
    assert cluster.owners() == {0: "a"}
    assert len(a.sends(Heartbeat, begun + 1)) >= 2
    assert a.member.healthy(a.now)
    started = a.member.liveness.lease.started
    assert started is not None
    assert started.mono_ms <= begun
    assert a.member.liveness.last_accepted is not None
    assert a.member.liveness.last_accepted.mono_ms > begun
    cluster.run_until(lambda: not cluster.owners())
    assert a.member.fenced, "its handler has outlived its lease"
    cluster.run(I)
    assert not a.member.fenced
    assert not a.advised("fenced")
    assert not a.advised("unfenced")
    a.cut()
    cluster.run(I + THIRD_MS)
    ((_, fenced),) = a.advised("fenced")
    assert fenced.text == f"no heartbeat came back for {I / 1000:g} s"
    a.heal()
    cluster.run(I)
    assert (len(a.advised("fenced")), len(a.advised("unfenced"))) == (1, 1)


def test_a_cut_in_a_pause_is_reported_after_its_lease_is_over() -> None:
    """T9: what the pause has ended in silence is a fence once the heartbeats do not come back either."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    a.deliver(a.claim(0), 0)
    pause(cluster, 20 * I)
    cluster.run_until(lambda: a.member.fenced)
    assert not a.advised("fenced")
    a.cut()
    cluster.run(2 * I)
    assert len(a.advised("fenced")) == 1


def test_a_release_is_sent_again_until_it_is_read() -> None:
    """T12, T16: every third; and delivery under that epoch never resumes."""
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    claim = a.claim(0)
    pause(cluster, 20 * I)
    a.hold_writes()
    begun = cluster.now_ms
    cluster.run(I)
    again = a.sends(ReleasingPartition, begun)
    assert len(again) in (3, 4)
    assert len({record for _, record in again}) == 1
    a.release_writes(lose=True)
    cluster.run(2 * THIRD_MS)
    assert not cluster.owners()
    count = len(a.sends(ReleasingPartition))
    cluster.run(I)
    assert len(a.sends(ReleasingPartition)) == count
    assert not a.may(claim)


def test_an_owner_without_a_lease_releases_too() -> None:
    """T12: it reads the pause late and without a lease, and still releases."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    a.cut()
    cluster.run(3 * I)
    assert not a.member.liveness.lease.valid(a.now)
    pause(cluster, 20 * I)
    cluster.run(I)
    assert len(cluster.owners()) == 2
    a.heal()
    begun = cluster.now_ms
    cluster.run_until(lambda: a.sends(ReleasingPartition, begun))
    assert not a.member.liveness.lease.valid(a.now)
    cluster.run(TRIP)
    assert not cluster.owners()


def test_a_pause_that_nobody_ends_is_ended_by_rank() -> None:
    """T13: after its duration of own waiting by rank 0, by rank 1 a third later, and not earlier."""
    for dead in (0, 1):
        cluster = VirtualCluster()
        team = cluster.team("a", "b", "c")
        pause(cluster, 3 * I)
        begun = cluster.now_ms
        cluster.run(2 * I + THIRD_MS)
        for client in team[:dead]:
            client.hold_writes()  # it waits and sends, and nothing of it arrives
        cluster.run_until(lambda s=cluster: not s.group.paused)
        late = cluster.now_ms - begun - 3 * I
        assert dead * THIRD_MS <= late <= dead * THIRD_MS + STEP + 2 * TRIP
        (end,) = [r for v, r in cluster.records(ReleaseGroup) if v.accepted and r.duration_ms == 0]
        assert end.by == team[dead].name
        assert end.token == -1
        assert 3 * I <= end.waited_ms <= cluster.now_ms - begun


def test_after_a_pause_all_is_claimed_again() -> None:
    """T12, T13: from the positions that the admin set; with resume no member needs to wait it out."""
    cluster = VirtualCluster()
    team = cluster.team("a", "b", "c")
    token = pause(cluster, 20 * I)
    cluster.run(I)
    cluster.must(SetPosition(token, ((TOPIC, 3, cluster.partition(3).version, 77),), True))  # type: ignore[arg-type]
    cluster.run(I)
    assert set(cluster.owners()) == set(range(12))
    (claim,) = [c for client in team for c in client.member.claims.values() if c.tp == tp(3)]
    assert claim.position() == 77
    assert claim.generation == 1
    assert not [r for v, r in cluster.records(ReleaseGroup) if r.duration_ms == 0]


def test_pause_credit() -> None:
    """T5: a newcomer continues from the wait of others if the pause is the same; a renewed pause restarts it."""
    cluster = VirtualCluster()
    (a,) = cluster.team("a")
    token = pause(cluster, 10 * I)
    begun = cluster.now_ms
    cluster.run(6 * I)
    (beat,) = [beat for _, beat in a.sends(Heartbeat)][-1:]
    assert beat.pause is not None
    assert beat.pause.pause_change == token
    assert 5 * I < beat.pause.waited_ms <= cluster.now_ms - begun
    b = cluster.add("b")
    cluster.run(THIRD_MS + STEP)
    cluster.kill(a)
    assert 5 * I < b.member.detector.pause_waited_ms() <= cluster.now_ms - begun
    cluster.run_until(lambda: not cluster.group.paused)
    assert 10 * I <= cluster.now_ms - begun <= 11 * I, "although nobody was there all the time"
    cluster = VirtualCluster()
    (a,) = cluster.team("a")
    pause(cluster, 10 * I)
    cluster.run(6 * I)
    pause(cluster, 10 * I)
    begun = cluster.now_ms
    cluster.run(STEP)
    assert a.member.detector.pause_waited_ms() <= STEP
    cluster.run_until(lambda: not cluster.group.paused)
    assert cluster.now_ms - begun >= 10 * I


# --- sessions


def test_every_join_has_its_own_instance_and_orphaned_sessions_are_left() -> None:
    """T14: Joins held up by an outage all arrive; the newest one's session is adopted, the others end with a Leave."""
    cluster = VirtualCluster()
    a = cluster.add("a")
    a.hold_writes()
    cluster.run(3 * I + STEP)
    joins = [record for _, record in a.sends(Join)]
    assert len(joins) == 4, "one per interval until one is read"
    assert len({join.instance_id for join in joins}) == 4
    a.release_writes()
    cluster.run(THIRD_MS)
    (live,) = cluster.group.sessions.values()
    assert live.id == a.session
    assert live.join.instance_id == joins[-1].instance_id
    left = {record.session for _, record in a.sends(Leave)}
    assert left == {v.offset for v, _ in cluster.records(Join)} - {a.session}
    assert len(a.advised("joined")) == 1
    assert not a.member.orphaned_sessions


def test_an_orphaned_session_that_comes_later_is_left_too() -> None:
    """T14: a copy of an older Join, accepted when the session is long another one."""
    cluster = VirtualCluster()
    _a, b = cluster.team("a", "b")
    first = next(v.offset for v, r in cluster.records(Join) if r.client_id == "b")
    b.reads_held = True
    cluster.run(4 * I)
    b.reads_held = False
    cluster.run(I)
    session = b.session
    assert session != first
    orphan = cluster.replay(first)
    assert orphan.accepted
    cluster.run(THIRD_MS)
    assert orphan.offset not in cluster.group.sessions
    assert b.session == session
    assert b.alive


def test_a_client_stopped_before_it_has_read_its_join_leaves_that_session() -> None:
    """T14: the Join is accepted after the stop; the session that it begins must be left too."""
    cluster = VirtualCluster()
    a = cluster.add("a")
    cluster.run(1)
    assert len(a.sends(Join)) == 1
    a.member.leave(a.now, "changed my mind", 0)
    a.tick()
    assert a.alive
    assert cluster.run_until(lambda: not a.alive) <= 2 * TRIP, "as soon as it has read the Join and then its Leave"
    assert a.member.error is None
    (joined,) = [verdict.offset for verdict, _ in cluster.records(Join)]
    assert [record.session for _, record in a.sends(Leave)] == [joined]
    assert not cluster.group.sessions
    assert not a.advised("joined")


def test_how_long_a_stop_waits_for_a_join() -> None:
    """T14: one interval since it was sent; not at all if none was."""
    cluster = VirtualCluster()
    lost = cluster.add("lost")
    lost.hold_writes()
    cluster.run(THIRD_MS)
    lost.member.leave(lost.now, "", 0)
    (sent_ms,) = [at for at, _ in lost.sends(Join)]
    cluster.run_until(lambda: not lost.alive)
    assert I <= cluster.now_ms - sent_ms <= I + THIRD_MS
    assert len(lost.sent) == 1, "nothing new is sent"
    lost.release_writes(lose=True)
    late = cluster.add("late")
    late.member.leave(late.now, "", 0)
    assert late.tick().ended
    assert not late.sent, "it never joined"


def test_leaving() -> None:
    """T16: no delivery after leave(), Releases before the Leave, at their positions; successors come at once."""
    cluster = VirtualCluster()
    _a, b, _c = cluster.team("a", "b", "c")
    numbers = sorted(b.owned)
    hung, done = b.claim(numbers[0]), b.claim(numbers[1])
    b.deliver(hung, 0)
    b.deliver(done, 0, 1).finish_range(0, 2)
    b.member.leave(b.now, "deploy", I)
    assert not any(b.may(claim) for claim in b.member.claims.values()), "at once, before any tick"
    begun = len(cluster.values)
    cluster.run(THIRD_MS)
    assert b.alive, "a handler is still at work"
    cluster.run_until(lambda: not b.alive)
    assert b.member.error is None
    records = [r for v, r in cluster.records(object, begun) if isinstance(r, ReleasingPartition | Leave)]
    assert [type(r).__name__ for r in records] == ["ReleasingPartition"] * 4 + ["Leave"]
    assert {r.reason for r in records} == {"deploy"}
    assert cluster.partition(numbers[0]).position == 0
    assert cluster.partition(numbers[1]).position == 2
    left_ms = cluster.now_ms
    cluster.run_until(lambda: set(cluster.owners()) == set(range(12)))
    assert cluster.now_ms - left_ms < THIRD_MS
    assert not [r for _, r in cluster.records(Evict)]


def test_a_member_that_will_stop_hands_over_first() -> None:
    """A6: it marks itself once and delivers until a successor that has fetched ahead takes each partition."""
    cluster = VirtualCluster()
    a, b, c = cluster.team("a", "b", "c")
    had = set(b.owned)
    for successor in (a, c):
        successor.prefetch_succeeds = False
    b.member.prepare_stop()
    cluster.run(THIRD_MS)
    assert [r.session for _, r in b.sends(StepDown)] == [b.session]
    assert b.owned == had, "nobody has fetched ahead yet"
    assert all(b.may(claim) for claim in b.member.claims.values())
    assert not b.member.ready_to_stop()
    for successor in (a, c):
        successor.prefetch_succeeds = True
        for partition, _ in successor.prefetched:
            successor.member.prefetched(partition)
        successor.due_ms = cluster.now_ms
    cluster.run_until(b.member.ready_to_stop)
    assert not b.owned
    released = [r for _, r in b.sends(ReleasingPartition)]
    assert {r.reason for r in released} == {"hand-over"}
    assert {r.successor for r in released} <= {a.session, c.session}
    assert len(b.sends(StepDown)) == 1
    cluster.run(3 * I)
    assert had <= a.owned | c.owned, "it takes nothing back while others are there"


def test_a_member_without_a_successor_need_not_wait() -> None:
    """A6: alone, among others that are marked, with a policy that moves nothing, or without claims, it may stop now."""
    cluster = VirtualCluster()
    (a,) = cluster.team("a")
    a.member.prepare_stop()
    assert a.member.ready_to_stop()
    cluster.run(THIRD_MS)
    assert a.member.ready_to_stop()
    assert not a.sends(StepDown)
    two = VirtualCluster()
    a, b = two.team("a", "b")
    for client in (a, b):
        client.member.prepare_stop()
    two.run(THIRD_MS)
    assert a.member.ready_to_stop() or b.member.ready_to_stop(), "who has the last place keeps nobody waiting"
    two.run(3 * I)
    assert a.member.ready_to_stop()
    assert b.member.ready_to_stop()
    greedy = VirtualCluster()
    a, b = greedy.team("a", "b", policy="greedy")
    a.member.prepare_stop()
    assert a.member.ready_to_stop()


def test_fast_reclaim() -> None:
    """T15, T18: opt-in; it names the session of its own client_id, whose client ends and does not join again."""
    cluster = VirtualCluster()
    _a, old = cluster.team("a", "b")
    had = old.owned
    session = old.session
    new = cluster.add("b", fast_reclaim=True)
    cluster.run(THIRD_MS)
    assert [record.predecessor for _, record in new.sends(Join)] == [session]
    assert isinstance(old.member.error, DuplicateClientId)
    assert not old.alive
    assert {reason for _, _, reason in old.lost} == {"session ended"}
    cluster.run(2 * I)
    assert len(new.owned) == len(had)
    assert session not in cluster.group.sessions
    sent = len(old.sent)
    cluster.run(I)
    assert len(old.sent) == sent


def test_without_the_option_no_session_is_replaced() -> None:
    """T15: two clients of one name live side by side; only its own client_id is ever named."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    second = cluster.add("b")
    other = cluster.add("c", fast_reclaim=True)
    cluster.run(2 * I)
    assert all(client.alive for client in (a, b, second, other))
    assert {record.predecessor for _, record in cluster.records(Join)} == {-1}


# --- own records


@pytest.mark.parametrize("kind", [Heartbeat, ClaimingPartition, ReleasingPartition, Join, Leave])
def test_late_copies_of_own_records_are_no_clones(kind: type) -> None:
    """T18: a late copy of every record of a live session ends no client."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    c = cluster.add("c")  # so that partitions were released and claimed again
    cluster.run(2 * I)
    if kind is Leave:
        c.member.leave(c.now, "bye", 0)
        cluster.run(I)
    offsets = [v.offset for v, _ in cluster.records(kind)]
    assert offsets
    owners = cluster.owners()
    for offset in offsets:
        cluster.replay(offset)
    cluster.run(I)
    assert a.alive
    assert b.alive
    assert cluster.owners() == owners


def test_a_clone_is_recognised_by_its_heartbeat() -> None:
    """T18: a machine that was copied while it ran: both have one session; both fence and end with SessionCloned."""
    cluster = VirtualCluster(clones=True)
    a, b = cluster.team("a", "b")
    clone = cluster.fork(b, "b2")
    cluster.run(THIRD_MS + STEP)
    for client in (b, clone):
        assert isinstance(client.member.error, SessionCloned)
        assert not client.alive
        assert not client.member.claims
    cluster.run(3 * I)
    assert a.alive
    assert set(cluster.owners().values()) == {"a"}


def test_any_record_of_a_clone_is_recognised() -> None:
    """T18: a claim, a release, a Leave, a heartbeat in the own session's name that was not sent here."""
    for kind in ("claim", "release", "leave", "heartbeat"):
        cluster = VirtualCluster()
        a, b = cluster.team("a", "b")
        taken = min(a.owned)
        record = {
            "claim": ClaimingPartition(b.session, TOPIC, taken, cluster.partition(taken).version),
            "release": ReleasingPartition(b.session, b.claim(min(b.owned)).epoch, 0),
            "leave": Leave(b.session),
            "heartbeat": Heartbeat(b.session, 1 << 60),
        }[kind]
        cluster.inject(record)
        cluster.run(READ_MS)
        assert isinstance(b.member.error, SessionCloned), kind
        assert a.alive


def test_records_of_other_clients_are_not_taken_for_a_clone() -> None:
    """T18: the same records for another session end no client."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    cluster.kill(a)
    for record in (
        Heartbeat(a.session, 1 << 60),
        ReleasingPartition(a.session, a.claim(min(a.owned)).epoch, 0),
        ClaimingPartition(a.session, TOPIC, 3, 1),
        Leave(a.session),
    ):
        cluster.inject(record)
        cluster.run(READ_MS)
    assert b.alive


def test_fate_is_learnt_by_reading() -> None:
    """T17: one claim per (partition, observed) until it is read or a third has passed; an unread one is no claim."""
    cluster = VirtualCluster(partitions=1)
    a = cluster.add("a")
    cluster.run_until(lambda: a.resolved)
    a.hold_writes()
    begun = cluster.now_ms
    cluster.run(2 * THIRD_MS)
    claims = a.sends(ClaimingPartition, begun)
    assert 2 <= len(claims) <= 3
    assert all(later - earlier >= THIRD_MS for (earlier, _), (later, _) in pairwise(claims))
    assert not a.member.claims
    a.release_writes()
    cluster.run(READ_MS)
    assert list(a.member.claims) == [cluster.partition(0).epoch], "the first that arrived"
    cluster.run(2 * I)
    assert a.alive, "and the others, rejected, were its own"
    assert len(a.sends(ClaimingPartition)) == len(claims)


def test_a_late_claim_that_wins_after_leave_is_released() -> None:
    """T16, T17: a claim in flight may still be accepted; it is released at once and never delivered."""
    cluster = VirtualCluster(partitions=1)
    a = cluster.add("a")
    cluster.run_until(lambda: a.sends(ClaimingPartition))
    a.member.leave(a.now, "bye", 10 * I)
    cluster.run(I)
    assert not a.alive
    assert a.member.error is None
    assert not a.claimed
    assert not cluster.owners()
    assert not cluster.group.sessions


def test_a_join_says_every_option_of_its_member_that_the_log_knows() -> None:
    options = MemberOptions(client_id="c", topics=("orders",), interval_ms=3_000, capacity=2, witness="run 7")
    join = options.join(bytes(INSTANCE_BYTES), 9)
    own = {"instance_id", "predecessor"}
    assert {name for name in Join.__struct_fields__ if not hasattr(options, name)} == own
    assert {name: getattr(join, name) for name in {*Join.__struct_fields__} - own} == {
        name: getattr(options, name) for name in {*Join.__struct_fields__} - own
    }
    assert (join.instance_id, join.predecessor) == (bytes(INSTANCE_BYTES), 9)


def test_the_user_never_hears_of_a_claim_that_is_over_before_the_member_acts() -> None:
    """A process that was stopped reads its claim and its eviction at once: a user told of a claim after its loss would
    take the partition for his own."""
    cluster = VirtualCluster(partitions=1)
    a = cluster.add("a")
    cluster.run_until(lambda: a.sends(ClaimingPartition))
    a.suspend()
    b = cluster.add("b")
    cluster.run_until(lambda: b.owned)
    a.resume()
    cluster.run(2 * I)
    (lost,) = [claim for _, claim, _ in a.lost]
    assert (lost.told, a.claimed) == (False, [])
    assert [advisory.kind for _, advisory in a.advisories if advisory.partition == 0][:2] == ["claimed", "lost"]
