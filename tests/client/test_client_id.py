"""The default of `client_id` is unique for each Marshal, and named after librdkafka's `client.id` if there is one.

Who shares a client_id with another live process learns of it.
"""

from __future__ import annotations

import marshal_py
from marshal_py import Consumer
from marshal_py.protocol.wire.records import Heartbeat
from marshal_py.testing import MemoryCluster
from tests.support.client_fixtures import EmbeddedTestCluster, MemoryTestCluster, joined, until


def test_the_settings_client_id_names_the_member_and_stays_unique(embedded: EmbeddedTestCluster) -> None:
    """Replicas of a deployment share their settings, so the name alone would be one name for all of them."""
    settings = {"bootstrap.servers": embedded.target, "client.id": "billing-service"}
    with marshal_py.connect(settings) as one, marshal_py.connect(settings) as other:
        assert one.client_id.startswith("billing-service-")
        assert one.client_id != other.client_id
    with marshal_py.connect(settings, client_id="mine") as one:
        assert one.client_id == "mine"


def test_without_one_it_is_the_host() -> None:
    with MemoryCluster() as cluster:
        assert not cluster.connect().client_id.startswith("billing")


# --- two live processes with one client_id


def sharers(consumer: Consumer) -> list[int]:
    return [event.session for event in consumer.events() if event.kind == "client_id_shared"]


def test_two_live_processes_with_one_client_id_learn_of_it(memory: MemoryTestCluster) -> None:
    """Each is told once of the other one's session. A second consumer of the same Marshal is no news."""
    topic, group = memory.topic(3), memory.group()
    with memory.connect("same") as marshal, memory.connect("same") as other, memory.connect("third") as third:
        one, sibling = joined(marshal, group, [topic]), joined(marshal, group, [topic])
        two, stranger = joined(other, group, [topic]), joined(third, group, [topic])
        session = {consumer: consumer.cached_info().session for consumer in (one, sibling, two)}
        found: dict[Consumer, list[int]] = {one: [], sibling: [], two: [], stranger: []}

        def told(*wanted: Consumer) -> bool:
            for consumer in found:
                found[consumer] += sharers(consumer)
            return all(found[consumer] for consumer in wanted)

        until(lambda: told(one, sibling, two) and len(found[two]) == 2, "all have learned of the others")
        beats = len(memory.accepted(group, Heartbeat))
        until(lambda: len(memory.accepted(group, Heartbeat)) > beats + 12, "each has sent some more heartbeats")
        told()
    assert found[one] == found[sibling] == [session[two]]
    assert sorted(found[two]) == sorted([session[one], session[sibling]])
    assert found[stranger] == []
