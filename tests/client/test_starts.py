"""Where a partition begins (D5), what happens outside of what it holds (D6), and the mirror in Kafka (D7)."""

from __future__ import annotations

import pytest

from marshal_py import Marshal, TopicPartition
from marshal_py.errors import KafkaGroupIsLive, TopicMissing
from marshal_py.protocol.records import Note
from tests.support.fronts import Ground, MemoryGround, collect, joined, owns, places, until


def test_earliest_begins_at_the_beginning(ground: Ground) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 3)
    with ground.connect() as marshal, joined(marshal, ground.group(), [topic], start="earliest") as consumer:
        assert places(collect(consumer, 3)) == [(0, 0), (0, 1), (0, 2)]


def test_latest_begins_at_the_end(ground: Ground) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 3)
    with ground.connect() as marshal, joined(marshal, ground.group(), [topic], start="latest") as consumer:
        until(owns(consumer, 0), "the partition is ours")
        ground.fill(topic, 0, 1, first=3)
        assert places(collect(consumer, 1)) == [(0, 3)]


@pytest.mark.parametrize(("fallback", "first"), [("earliest", 0), ("latest", 3)])
def test_without_a_committed_offset_the_fallback_counts(ground: Ground, fallback: str, first: int) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 3)
    with ground.connect() as marshal, joined(
        marshal, ground.group(), [topic], start="committed", start_fallback=fallback
    ) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        ground.fill(topic, 0, 1, first=3)
        assert places(collect(consumer, 1)) == [(0, first)]


def test_a_group_that_ordinary_consumers_left_goes_on_where_they_were(ground: Ground) -> None:
    topic = ground.topic(2)
    group = ground.group()
    ground.fill(topic, 0, 5)
    ground.fill(topic, 1, 5)
    with ground.connect() as marshal:
        assert marshal._loop.admin.commit(group, {TopicPartition(topic, 0): 3}) == ""
        with joined(marshal, group, [topic], start="committed", start_fallback="earliest") as consumer:
            assert sorted(places(collect(consumer, 7))) == [(0, 3), (0, 4), *((1, i) for i in range(5))]


def test_the_log_counts_more_than_the_start(ground: Ground) -> None:
    topic = ground.topic()
    group = ground.group()
    ground.fill(topic, 0, 3)
    with ground.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            collect(consumer, 2)
        with joined(marshal, group, [topic], start="latest") as consumer:
            assert places(collect(consumer, 1)) == [(0, 2)]


def test_a_partition_that_is_added_begins_at_its_beginning(memory: MemoryGround) -> None:
    """What came before anybody knew of the partition is not lost, although the group starts at the latest."""
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], start="latest") as consumer:
        until(owns(consumer, 0), "the first partition is ours")
        memory.broker.grow(topic, 2)
        memory.fill(topic, 1, 3)
        _look_again(marshal)
        assert places(collect(consumer, 3)) == [(1, 0), (1, 1), (1, 2)]


def _look_again(marshal: Marshal) -> None:
    """The next look at the metadata is due now, not in some seconds."""
    marshal._loop._metadata_due = 0.0


def test_a_lost_range_is_reported_and_the_rest_goes_on(ground: Ground) -> None:
    """D6: below the beginning; the group's position was deleted while nobody read."""
    topic = ground.topic()
    group = ground.group()
    ground.fill(topic, 0, 10)
    with ground.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            collect(consumer, 2)
        ground.truncate(topic, 0, 6)
        with joined(marshal, group, [topic]) as consumer:
            assert places(collect(consumer, 4)) == [(0, i) for i in range(6, 10)]
            lost = [(e.partition, e.offset, e.to) for e in consumer.events() if e.kind == "offset_lost"]
            assert lost == [(0, 2, 6)]
            consumer.flush()
        notes = [n for n in ground.accepted(group, Note) if n.kind == "offset_lost"]
        assert [(n.topic, n.partition, n.from_, n.to) for n in notes] == [(topic, 0, 2, 6)]


def test_a_range_that_is_lost_while_reading_begins_behind_what_was_read(ground: Ground) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 4)
    with ground.connect() as marshal, joined(marshal, ground.group(), [topic]) as consumer:
        collect(consumer, 4)
        consumer.pause([(topic, 0)])
        ground.fill(topic, 0, 6, first=4)
        ground.truncate(topic, 0, 8)
        consumer.resume([(topic, 0)])
        assert places(collect(consumer, 2)) == [(0, 8), (0, 9)]
        assert [(e.offset, e.to) for e in consumer.events() if e.kind == "offset_lost"] == [(4, 8)]


def test_without_ids_a_recreated_data_topic_is_not_read_anew_in_silence(memory: MemoryGround) -> None:
    """D6; where the cluster tells ids, its partitions are parked (test_recreated.py)."""
    memory.broker.tells_ids = False
    topic = memory.topic()
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        collect(consumer, 5)
        with memory.broker.lock:
            memory.broker.delete_topic(topic)
            memory.broker.create_topic(topic, 1)
        memory.fill(topic, 0, 2)

        def parked() -> list[str]:
            assert not consumer.fetch(10, expires_s=0.1)
            return [event.text for event in consumer.events() if event.kind == "parked"]

        (text,) = until(parked, "it is parked")
        assert "PositionBeyondEnd" in text
        assert "position 5, end 2" in text


def test_accepted_positions_are_mirrored(ground: Ground) -> None:
    topic = ground.topic(3)
    group = ground.group()
    for partition in range(3):
        ground.fill(topic, partition, partition + 1)
    tps = [TopicPartition(topic, partition) for partition in range(3)]
    with ground.connect() as marshal, ground.connect() as onlooker:
        with joined(marshal, group, [topic]) as consumer:
            collect(consumer, 6)
        until(lambda: onlooker._loop.admin.committed(group, tps) == {tps[0]: 1, tps[1]: 2, tps[2]: 3}, "the mirror")


def test_two_consumers_of_one_marshal_are_both_mirrored(ground: Ground) -> None:
    topic = ground.topic(2)
    group = ground.group()
    for partition in (0, 1):
        ground.fill(topic, partition, 4)
    tps = [TopicPartition(topic, partition) for partition in (0, 1)]
    with ground.connect() as marshal, ground.connect() as onlooker:
        with joined(marshal, group, [topic], max_claims=1) as one, joined(marshal, group, [topic]) as two:
            until(lambda: len(one.claims()) == len(two.claims()) == 1, "one partition each")
            collect(one, 4)
            collect(two, 4)
        until(lambda: onlooker._loop.admin.committed(group, tps) == {tps[0]: 4, tps[1]: 4}, "the mirror")


def test_mirroring_can_be_switched_off(memory: MemoryGround) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], mirror_offsets=False) as consumer:
        collect(consumer, 1)
        consumer.flush()
    assert memory.broker.committed == {}


def test_a_refused_mirror_is_an_event(memory: MemoryGround) -> None:
    topic = memory.topic()
    group = memory.group()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        memory.broker.live_kafka[group] = 1
        collect(consumer, 1)
        consumer.stop()
        until(lambda: "mirror_refused" in [event.kind for event in consumer.events()], "the refusal is told")


def test_live_ordinary_consumers_keep_the_group_for_themselves(memory: MemoryGround) -> None:
    topic = memory.topic()
    group = memory.group()
    memory.broker.live_kafka[group] = 2
    with memory.connect() as marshal:
        with pytest.raises(KafkaGroupIsLive) as raised:
            joined(marshal, group, [topic])
        assert (raised.value.group, raised.value.members) == (group, 2)
        with joined(marshal, group, [topic], join_live_kafka_group=True) as consumer:
            until(owns(consumer, 0), "it was told to join anyway")


def test_a_topic_that_is_missing_is_named(ground: Ground) -> None:
    topic = ground.topic()
    with ground.connect() as marshal:
        with pytest.raises(TopicMissing) as raised:
            joined(marshal, ground.group(), [topic, "absent"])
        assert raised.value.topic == "absent"
        assert raised.value.retriable
        ground.create("absent", 1)
        joined(marshal, ground.group(), [topic, "absent"]).stop()
