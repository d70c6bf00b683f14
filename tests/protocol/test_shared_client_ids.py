"""Two live consumers with one client_id, in virtual time: both learn of it, and a restart is none."""

from __future__ import annotations

from marshal_py.protocol.time import shared
from tests.support.virtual_cluster import INTERVAL_MS, THIRD_MS, Client, VirtualCluster


def told(client: Client) -> list[int]:
    return [advisory.session for _, advisory in client.advised("client_id_shared")]


def test_both_are_told_once() -> None:
    cluster = VirtualCluster()
    a, other = cluster.team("a", "b")
    twin = cluster.add("a")
    cluster.run(10 * INTERVAL_MS)
    assert (told(a), told(twin), told(other)) == ([twin.session], [a.session], [])
    (_, advisory), *_rest = a.advised("client_id_shared")
    assert advisory.client_id == "a"
    assert str(twin.session) in advisory.text
    assert shared(cluster.group.sessions.values()) == {"a": sorted([a.session, twin.session])}


def test_a_restart_is_told_nothing() -> None:
    """The former session stays until others evict it, and nobody extends it."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    former = a.session
    cluster.kill(a)
    cluster.run(THIRD_MS)
    again = cluster.add("a")
    cluster.run(INTERVAL_MS)
    assert {former, again.session} <= cluster.group.sessions.keys(), "both are in the group"
    assert shared(cluster.group.sessions.values()) == {}
    cluster.run(10 * INTERVAL_MS)
    assert former not in cluster.group.sessions
    assert (told(again), told(b)) == ([], [])


def test_a_process_that_was_replaced_while_it_stood_still_is_told() -> None:
    """Its operator took it for dead and started another one; then it continued, before others had evicted it."""
    cluster = VirtualCluster()
    a, _b = cluster.team("a", "b")
    a.cut()
    cluster.run(THIRD_MS)
    again = cluster.add("a")
    cluster.run(INTERVAL_MS)
    assert told(again) == []
    a.heal()
    cluster.run(3 * INTERVAL_MS)
    assert a.session in cluster.group.sessions
    assert (told(a), told(again)) == ([again.session], [a.session])
