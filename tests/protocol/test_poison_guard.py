"""Messages that end the processes of their owners: what the log counts of their deliveries, and of others (D11).

Each life is a client that owns all partitions, hands messages over as `may_deliver` allows, and dies.
"""

from __future__ import annotations

import pytest

from marshal_py.protocol.claims import DELIVERIES, AtLeastOnce, Claim
from marshal_py.protocol.wire.identity import NONE
from tests.support.virtual_cluster import INTERVAL_MS, READ_MS, THIRD_MS, WRITE_MS, Client, VirtualCluster, ranges_of

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
TRIP = WRITE_MS + READ_MS
MESSAGES = range(9)


def tracker(claim: Claim) -> AtLeastOnce:
    assert isinstance(claim.tracker, AtLeastOnce)
    return claim.tracker


def born(cluster: VirtualCluster, number: int, partitions: int) -> Client:
    """A client that owns all partitions."""
    client = cluster.add(f"c{number}")
    cluster.run_until(lambda: len(client.member.claims) == partitions)
    return client


def died(cluster: VirtualCluster, partitions: int) -> None:
    """As many owners as it takes until the next one is careful; each dies before it has delivered anything."""
    for number in range(DELIVERIES):
        cluster.kill(born(cluster, number, partitions))


def opened(cluster: VirtualCluster, client: Client, number: int) -> Claim:
    """Waits as a driver does until the next message of a partition may be handed over."""
    claim = client.claim(number)

    def may() -> bool:
        if client.may(claim):
            return True
        if client.member.finished():
            client.tick()
        return False

    cluster.run_until(may)
    return claim


def handed(cluster: VirtualCluster, client: Client, number: int) -> int:
    """Hands the next message of a partition over; returns the number of its delivery."""
    claim = opened(cluster, client, number)
    at = tracker(claim)
    if not at.runs:
        at.admit(range(at.position(), MESSAGES.stop))
    run = at.runs[0]
    offset = run.offsets[run.delivered]
    run.deliver(1, client.now.mono_ms)
    return at.delivery_count(offset)


@pytest.mark.parametrize("partitions", [1, 3])
def test_what_ends_its_owners_is_counted_each_time_and_nothing_else_above_two(partitions: int) -> None:
    """D11: no owner lives long enough to send a heartbeat, and nothing of the other partitions is delivered."""
    cluster = VirtualCluster(partitions=partitions)
    for number in range(8):
        client = born(cluster, number, partitions)
        assert handed(cluster, client, 0) == number + 1
        cluster.kill(client)
    heir = born(cluster, 8, partitions)
    for innocent in range(1, partitions):
        assert handed(cluster, heir, innocent) <= 1 + DELIVERIES
        tracker(heir.claim(innocent)).runs[0].finish(0)


@pytest.mark.parametrize("lives", [1, 5])
def test_who_dies_without_a_delivery_counts_none_once_it_knows_that_there_is_no_message(lives: int) -> None:
    """D11: nobody can have delivered a message at the end of the partition."""
    cluster = VirtualCluster(partitions=1)
    for number in range(lives):
        client = born(cluster, number, 1)
        client.claim(0).saw_end(0)
        cluster.run(I)
        assert cluster.partition(0).attempts == 1
        cluster.kill(client)
    heir = born(cluster, lives, 1)
    assert handed(cluster, heir, 0) == 2


def test_a_careful_owner_delivers_one_message_of_all_its_partitions_at_a_time() -> None:
    """D11: the log says first which one, and takes the others back."""
    cluster = VirtualCluster(partitions=2)
    died(cluster, 2)
    client = born(cluster, DELIVERIES, 2)
    begun_ms = cluster.now_ms
    handed(cluster, client, 0)
    assert cluster.now_ms <= begun_ms + 2 * TRIP, "it did not wait for its next heartbeat"
    assert [cluster.partition(number).attempts for number in (0, 1)] == [DELIVERIES + 1, DELIVERIES]
    other = client.claim(1)
    cluster.run(TRIP)
    assert not client.may(other), "a handler has a message of partition 0"
    tracker(client.claim(0)).runs[0].finish(0)
    assert handed(cluster, client, 1) == DELIVERIES + 1
    assert [cluster.partition(number).attempts for number in (0, 1)] == [0, DELIVERIES + 1]
    assert not client.may(client.claim(0))


def test_a_careful_owner_is_so_for_an_interval() -> None:
    """D11: after it, and when the log counts the delivery, messages are handed over as usual."""
    cluster = VirtualCluster(partitions=2)
    died(cluster, 2)
    client = born(cluster, DELIVERIES, 2)
    assert all(claim.one_by_one for claim in client.member.claims.values())
    cluster.run(I)
    for number in (0, 1):
        assert handed(cluster, client, number) <= DELIVERIES + 1
        assert cluster.partition(number).attempts == DELIVERIES + 1
        assert not client.claim(number).one_by_one


def test_who_delivers_ranges_is_never_careful() -> None:
    """D9, D11: a range of many messages is one delivery."""
    cluster = VirtualCluster(partitions=2)
    died(cluster, 2)
    client = cluster.add("planner")
    client.member.poison_guard.end_all()
    cluster.run_until(lambda: len(client.member.claims) == 2)
    assert [client.may(client.claim(number)) for number in (0, 1)] == [True, True]


@pytest.mark.parametrize("end", ["kill", "leave"])
def test_whose_ranges_fail_counts_no_deliveries_of_a_message(end: str) -> None:
    """D9, D11: as often as a table cannot be written, its first message counts as delivered once. What owners of single
    messages have counted before stays.
    """
    cluster = VirtualCluster(partitions=1)
    for lives, before in ((6, 1), (2, 3)):
        for _ in range(lives):
            client = born(cluster, 1, 1)
            ranges = ranges_of(client.member, bytes(16))
            claim = client.claim(0)
            ranges.begin_claims([claim])
            assert ranges.take(ranges.range_of(claim.tp, 0, MESSAGES.stop), client.now) is not None
            cluster.run(I)
            assert cluster.partition(0).attempts == before
            if end == "kill":
                cluster.kill(client)
            else:
                client.member.leave(client.now, "the table cannot be written", 0)
                cluster.run_until(lambda: cluster.partition(0).owner == NONE)
        if before == 1:
            for number in (2, 3):
                single = born(cluster, number, 1)
                assert handed(cluster, single, 0) == number
                assert {tracker(single.claim(0)).delivery_count(offset) for offset in MESSAGES[1:]} == {2}
                cluster.run(I)
                cluster.kill(single)


def test_a_slow_log_does_not_keep_a_careful_owner_from_delivering() -> None:
    """D11: with a heartbeat on its way at all times it delivers when the interval is over."""
    cluster = VirtualCluster(partitions=2)
    died(cluster, 2)
    client = born(cluster, DELIVERIES, 2)
    begun_ms, client.read_ms = cluster.now_ms, THIRD_MS + TRIP
    for number in (0, 1):
        handed(cluster, client, number)
    assert cluster.now_ms <= begun_ms + 2 * I


LIMIT = 5  # `max_deliver`
MANY = 10_000


def deaths(distance: int, partitions: int) -> int:
    """How many owners die of the message at offset `distance` of partition 0 before it becomes a dead letter (D15).

    All partitions have messages, which come in turn. Handlers take no time: an owner that is not careful has no time to
    report anything before it dies.
    """
    cluster = VirtualCluster(partitions=partitions)
    for number in range(100):
        client = born(cluster, number, partitions)
        turn = 0
        while True:
            claim = opened(cluster, client, turn)
            at = tracker(claim)
            if not at.runs:
                at.admit(range(at.position(), MANY))
            run = at.runs[0]
            offset = run.offsets[run.delivered]
            index = run.deliver(1, client.now.mono_ms)
            if (turn, offset) == (0, distance):
                break
            run.finish(index)
            turn = (turn + 1) % partitions
        if at.delivery_count(distance) > LIMIT:
            return number
        cluster.kill(client)
    raise AssertionError("it never becomes a dead letter")


@pytest.mark.parametrize(("partitions", "intervals"), [(1, 1), (3, 1), (3, 2)])
def test_how_many_owners_die_of_a_message_before_it_becomes_a_dead_letter(partitions: int, intervals: int) -> None:
    """D11: as many as the limit where it is the one at the position; else two more, if the third owner reaches it.

    That owner hands messages of all its partitions over one by one for an interval. Each interval that comes closer and
    does not reach it costs two more owners: this one, and the next, which is not careful.
    """
    reach = I // TRIP // partitions  # messages of each partition in an interval
    assert deaths(0, partitions) == LIMIT
    assert {deaths(distance, partitions) for distance in (1, reach // 2)} == {DELIVERIES + LIMIT}
    assert deaths(intervals * reach + reach // 2, partitions) == DELIVERIES + LIMIT + 2 * intervals
