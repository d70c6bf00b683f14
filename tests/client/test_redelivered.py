"""What the log says will be delivered again, compared with what was."""

from __future__ import annotations

from collections import Counter

from marshal_py.history.timeline import Timeline
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.identity import route
from marshal_py.protocol.wire.records import Genesis
from tests.support.client_fixtures import MemoryTestCluster, collect, joined, owns, places, until


def test_a_release_reports_what_comes_again(memory: MemoryTestCluster) -> None:
    """A consumer stops with messages in flight: the same figure that `report` on Spark shows."""
    topic, group = memory.topic(2), memory.group()
    memory.fill(topic, 0, 10)
    memory.fill(topic, 1, 5)
    with memory.connect("first") as marshal:
        first = joined(marshal, group, [topic])
        messages = collect(first, 15, ack=False)
        for message in messages:
            if (message.partition, message.offset) in {(0, 0), (0, 1), (0, 5), (1, 4)}:
                message.ack()
        first.stop(0.0)
    with memory.connect("second") as marshal, joined(marshal, group, [topic]) as second:
        until(owns(second, 0, 1), "both are the successor's")
        again = collect(second, 11)
    twice = [place for place, count in Counter(places([*messages, *again])).items() if count > 1]
    reported = {
        row.partition: row.in_flight
        for row in intervals(memory, group)
        if row.ended == "release" and row.client == "first"
    }
    assert reported == Counter(partition for partition, _ in twice) == {0: 7, 1: 4}


def intervals(memory: MemoryTestCluster, group: str) -> list:  # type: ignore[type-arg]  # rows of one table
    root = World(0, None)
    for offset, value in enumerate(memory.log_values(0)):
        rationalizer.apply(root, offset, value)
    assert isinstance(root.genesis, Genesis)
    number = route(group, root.genesis.partitions)
    timeline = Timeline(World(number, None if number == 0 else root.genesis), ["intervals"])
    for offset, value in enumerate(memory.log_values(number)):
        timeline.read(offset, 0, value)
    return timeline.finish()["intervals"]
