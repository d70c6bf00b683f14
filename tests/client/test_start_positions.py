"""Where a partition begins (D5), what happens outside of what it holds (D6), and the mirror in Kafka (D7)."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from marshal_py import Marshal, TopicPartition
from marshal_py.client.driver import consumer_driver
from marshal_py.client.values import position_text
from marshal_py.errors import InvalidOption, MarshalError, MembersAlive, PositionOutOfRange, TopicMissing
from marshal_py.protocol.member import member_state
from marshal_py.protocol.wire.identity import Instant
from marshal_py.protocol.wire.records import Note
from marshal_py.transport.memory import MemoryAdmin
from tests.support.client_fixtures import (
    DEADLINE_S,
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    owns,
    places,
    positions,
    until,
)


def test_earliest_begins_at_the_beginning(cluster: TestCluster) -> None:
    with cluster.reading(3, start="earliest") as consumer:
        assert places(collect(consumer, 3)) == [(0, 0), (0, 1), (0, 2)]


def test_latest_begins_at_the_end(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 3)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic], start="latest") as consumer:
        until(owns(consumer, 0), "the partition is ours")
        cluster.fill(topic, 0, 1, first=3)
        assert places(collect(consumer, 1)) == [(0, 3)]


def test_a_file_is_read_once(cluster: TestCluster, tmp_path: Path) -> None:
    """It may be gone, or say something else, when a partition is claimed."""
    topic = cluster.topic()
    cluster.fill(topic, 0, 5)
    path = tmp_path / "start.csv"
    path.write_text(f"{topic},0,3\n", encoding="utf-8")
    with cluster.connect() as marshal, marshal.consumer(cluster.group(), [topic], start=str(path)) as consumer:
        path.unlink()
        assert places(collect(consumer, 2)) == [(0, 3), (0, 4)]


@pytest.mark.parametrize(("fallback", "first"), [("earliest", 0), ("latest", 3)])
def test_without_a_committed_offset_the_fallback_counts(cluster: TestCluster, fallback: str, first: int) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 3)
    with (
        cluster.connect() as marshal,
        joined(marshal, cluster.group(), [topic], start=f"committed|{fallback}") as consumer,
    ):
        until(owns(consumer, 0), "the partition is ours")
        cluster.fill(topic, 0, 1, first=3)
        assert places(collect(consumer, 1)) == [(0, first)]


def test_a_group_that_ordinary_consumers_left_continues_where_they_were(cluster: TestCluster) -> None:
    topic = cluster.topic(2)
    group = cluster.group()
    cluster.fill(topic, 0, 5)
    cluster.fill(topic, 1, 5)
    with cluster.connect() as marshal:
        assert marshal._context.admin.commit(group, {TopicPartition(topic, 0): 3}) == ""
        with joined(marshal, group, [topic], start="committed|earliest") as consumer:
            assert sorted(places(collect(consumer, 7))) == [(0, 3), (0, 4), *((1, i) for i in range(5))]


def test_a_group_may_begin_where_another_one_is(cluster: TestCluster) -> None:
    """Blue and green: the library copies positions to Kafka's committed offsets. What blue has not read, both may."""
    topic, blue = cluster.topic(2), cluster.group()
    cluster.fill(topic, 0, 5)
    cluster.fill(topic, 1, 5)
    with cluster.connect() as marshal:
        assert marshal._context.admin.commit(blue, {TopicPartition(topic, 0): 3}) == ""
        with joined(marshal, cluster.group(), [topic], start=f"committed:{blue}|earliest") as consumer:
            assert sorted(places(collect(consumer, 7))) == [(0, 3), (0, 4), *((1, i) for i in range(5))]


def test_a_group_of_a_wrong_name_is_no_start(memory: MemoryTestCluster) -> None:
    """It would begin at the end, and skip all that green was to take over from blue. With a word for it, it may."""
    topic = memory.topic(2)
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal:
        with pytest.raises(InvalidOption, match=r"no committed offset of group 'bleu'.*committed:bleu\|earliest"):
            marshal.consumer(memory.group(), [topic], start="committed:bleu").fetch(1)
        with joined(marshal, memory.group(), [topic], start="committed:bleu|earliest") as consumer:
            assert places(collect(consumer, 1)) == [(0, 0)]
        assert marshal._context.admin.commit("blue", {TopicPartition(topic, 1): 0}) == ""
        with joined(marshal, memory.group(), [topic], start="committed:blue") as consumer:
            until(owns(consumer, 0, 1), "blue has never read partition 0")


def test_a_new_group_that_begins_at_the_end_says_so_once(
    memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A newcomer who has written messages first sees none of them, and learns why. An empty partition is no reason."""
    topic = memory.topic(3)
    memory.fill(topic, 0, 3)
    memory.fill(topic, 1, 3)
    with memory.connect() as marshal:
        with joined(marshal, memory.group(), [topic], start="committed") as consumer:
            until(owns(consumer, 0, 1, 2), "the partitions are ours")
            assert consumer.info().began_at_end == (TopicPartition(topic, 0), TopicPartition(topic, 1))
            (event,) = [event for event in consumer.events() if event.kind == "began_at_end"]
            assert "start='earliest'" in event.text
        assert len([line for line in caplog.messages if "began_at_end" in line]) == 1
        for said in ("latest", "committed|latest", "earliest"):
            with joined(marshal, memory.group(), [topic], start=said) as consumer:
                until(owns(consumer, 0, 1, 2), "the partitions are ours")
                assert consumer.info().began_at_end == ()


def test_the_log_counts_more_than_the_start(cluster: TestCluster) -> None:
    topic = cluster.topic()
    group = cluster.group()
    cluster.fill(topic, 0, 3)
    with cluster.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            collect(consumer, 2)
        with joined(marshal, group, [topic], start="latest") as consumer:
            assert places(collect(consumer, 1)) == [(0, 2)]


DAY_MS = 86_400_000
BEGAN_MS = 1_738_281_600_000  # 2025-01-31T00:00:00Z


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ("2025-02-02T00:00:00Z", 2),
        ("2025-02-01T23:59:59", 2),
        ("2025-02-02T01:00:00+01:00", 2),
        ("1999-12-31", 0),
        ("2030-01-01", 4),
    ],
)
def test_a_time_begins_at_the_first_message_that_is_not_older(
    memory: MemoryTestCluster, start: str, first: int
) -> None:
    """D5. Where no message is as new, it begins at the end."""
    topic = memory.topic()
    for day in range(4):
        memory.broker.produce(topic, 0, b"", None, None, BEGAN_MS + day * DAY_MS)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], start=start) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        assert consumer.cached_info().claims[TopicPartition(topic, 0)].position == first


def test_offsets_are_named_by_partition(cluster: TestCluster) -> None:
    """D5: an offset, the end, the beginning."""
    topic = cluster.topic(3)
    for partition in range(3):
        cluster.fill(topic, partition, 4)
    named = json.dumps({topic: {"0": 3, "1": -1, "2": -2}})
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic], start=named) as consumer:
        until(lambda: len(consumer.cached_info().claims) == 3, "the partitions are ours")
        assert [claim.position for _, claim in sorted(consumer.cached_info().claims.items())] == [3, 4, 0]


def test_a_time_is_named_by_partition(memory: MemoryTestCluster) -> None:
    topic = memory.topic(2)
    for day in range(4):
        for partition in range(2):
            memory.broker.produce(topic, partition, b"", None, None, BEGAN_MS + day * DAY_MS)
    named = json.dumps({topic: {"0": "2025-02-01", "1": "2025-02-03"}})
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], start=named) as consumer:
        until(lambda: len(consumer.cached_info().claims) == 2, "the partitions are ours")
        assert [claim.position for _, claim in sorted(consumer.cached_info().claims.items())] == [1, 3]


def test_a_named_offset_that_retention_deleted_is_reported_as_lost(memory: MemoryTestCluster) -> None:
    """D6: a user who names an offset wants the messages from there on."""
    topic = memory.topic()
    memory.fill(topic, 0, 6)
    memory.truncate(topic, 0, 4)
    start = json.dumps({topic: {"0": 1}})
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], start=start) as consumer:
        assert places(collect(consumer, 2)) == [(0, 4), (0, 5)]
        assert [(e.offset, e.to) for e in consumer.events() if e.kind == "offset_lost"] == [(1, 4)]


@pytest.mark.parametrize(
    ("partitions", "named", "error", "says"),
    [(2, {"0": 0}, InvalidOption, "does not name .*:1"), (1, {"0": 5}, PositionOutOfRange, "valid are 0 to 4")],
)
def test_a_start_that_cannot_be_ends_the_consumer_and_frees_its_partitions(
    memory: MemoryTestCluster, partitions: int, named: dict[str, int], error: type[MarshalError], says: str
) -> None:
    """D5: the library cannot guess what was meant."""
    topic, group = memory.topic(partitions), memory.group()
    for partition in range(partitions):
        memory.fill(topic, partition, 4)
    with memory.connect() as marshal:
        with pytest.raises(error, match=says):  # at once if the answer comes before the join was seen
            collect(marshal.consumer(group, [topic], start=json.dumps({topic: named})), 1)
        with joined(marshal, group, [topic], start="earliest") as other:
            assert len(collect(other, 4 * partitions)) == 4 * partitions


def test_named_offsets_and_a_partition_that_is_added(memory: MemoryTestCluster) -> None:
    """D5: it begins at its beginning; it cannot be named before, because a wrong number would never be noticed."""
    topic = memory.topic(2)
    memory.fill(topic, 1, 3)
    start = json.dumps({topic: {"0": 0, "1": 2}})
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], start=start) as consumer:
        until(owns(consumer, 0, 1), "both partitions are ours")
        memory.broker.grow(topic, 3)
        memory.fill(topic, 2, 1)
        _look_again(marshal)
        assert sorted(places(collect(consumer, 2))) == [(1, 2), (2, 0)]


@pytest.mark.parametrize(
    "start",
    [
        "",
        "yesterday",
        "-1",
        "20250131x",
        "{",
        "[]",
        "{}",
        '{"t": 3}',
        '{"t": {}}',
        '{"t": {"x": 1}}',
        '{"t": {"0": -3}}',
        '{"t": {"-1": 0}}',
        '{"t": {"0": true}}',
        '{"t": {"0": 1.5}}',
        '{"t": {"0": "noon"}}',
        '{"t": {"0": null}}',
        '{"t": {"0": 99999999999999999999}}',
    ],
)
def test_a_start_that_says_nothing_is_named(start: str) -> None:
    with pytest.raises(InvalidOption, match="start="):
        position_text.parse(start)


@pytest.mark.parametrize("text", ["10:00", "9:30:05Z"])
def test_a_time_of_day_is_refused_with_its_date(text: str) -> None:
    """Messages would begin elsewhere if the command was repeated tomorrow. What is advised can be given."""
    with pytest.raises(InvalidOption, match="a time of day needs its date") as raised:
        position_text.parse(text, "to")
    advised = str(raised.value).split()[-1]
    point = position_text.parse(advised, "to").rest
    assert point is not None
    assert position_text.moment_of(text, point.number + 1_000) == point.number


def test_a_start_of_another_topic_is_a_slip_of_the_pen(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal, pytest.raises(InvalidOption, match="none of the consumer's topics"):
        marshal.consumer(memory.group(), [topic], start='{"order": {"0": 0}}')


def test_a_partition_that_is_added_begins_at_its_beginning(memory: MemoryTestCluster) -> None:
    """Messages from before the partition was known are not lost, although the group starts at the latest."""
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], start="latest") as consumer:
        until(owns(consumer, 0), "the first partition is ours")
        memory.broker.grow(topic, 2)
        memory.fill(topic, 1, 3)
        _look_again(marshal)
        assert places(collect(consumer, 3)) == [(1, 0), (1, 1), (1, 2)]


def _look_again(marshal: Marshal) -> None:
    """Makes the next look at the metadata due now."""
    marshal._loop._metadata_due = 0.0


@pytest.mark.new_client
def test_a_lost_range_is_reported_and_the_rest_continues(cluster: TestCluster) -> None:
    """D6: below the beginning: messages at the position were deleted while no consumer ran."""
    topic = cluster.topic()
    group = cluster.group()
    cluster.fill(topic, 0, 10)
    with cluster.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            collect(consumer, 2)
        cluster.truncate(topic, 0, 6)
        with joined(marshal, group, [topic]) as consumer:
            assert places(collect(consumer, 4)) == [(0, i) for i in range(6, 10)]
            lost = [(e.partition, e.offset, e.to) for e in consumer.events() if e.kind == "offset_lost"]
            assert lost == [(0, 2, 6)]
            consumer.flush()
        notes = [n for n in cluster.accepted(group, Note) if n.kind == "offset_lost"]
        assert [(n.topic, n.partition, n.from_, n.to) for n in notes] == [(topic, 0, 2, 6)]


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_the_position_passes_a_lost_range_behind_which_nothing_is_left(
    memory: MemoryTestCluster, delivery: str
) -> None:
    """D6: retention has deleted all that was there. It is no lag, and the next owner reports no loss."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 10)
    told = []
    for _ in range(2):
        with memory.connect() as marshal, joined(marshal, group, [topic], delivery=delivery) as consumer:
            until(owns(consumer, 0), "the partition is ours")
            memory.truncate(topic, 0, 10)
            until(lambda: not consumer.fetch(1, expires_s=0.05) and positions(consumer) == {0: 10}, "it is passed")
            assert consumer.cached_info().lag == 0
            told.append([(event.offset, event.to) for event in consumer.events() if event.kind == "offset_lost"])
    assert told == [[(0, 10)], []]


@pytest.mark.new_client
def test_a_range_that_is_lost_while_reading_begins_after_what_was_read(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 4)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        collect(consumer, 4)
        consumer.pause([(topic, 0)])
        cluster.fill(topic, 0, 6, first=4)
        cluster.truncate(topic, 0, 8)
        consumer.resume([(topic, 0)])
        assert places(collect(consumer, 2)) == [(0, 8), (0, 9)]
        assert [(e.offset, e.to) for e in consumer.events() if e.kind == "offset_lost"] == [(4, 8)]


@pytest.mark.parametrize("kept", [0, 4])
def test_a_consumer_that_only_fetches_ahead_reports_no_loss(memory: MemoryTestCluster, kept: int) -> None:
    """D6, A3: its owner may have read what was deleted since. Once the claim is its own, it reports what is lost.
    `kept`: so many messages it had fetched before."""
    topic, group = memory.topic(2), memory.group()
    for number in range(2):
        memory.fill(topic, number, 4)

    def delete() -> None:
        for number in range(2):
            memory.fill(topic, number, 6, first=4)
            memory.truncate(topic, number, 8)

    def reaches(offset: int) -> bool:
        if any(buffer.next_offset >= offset for buffer in list(buffers.values())):
            return True
        assert not successor.fetch(1, expires_s=0.05)
        return False

    with memory.connect() as one, memory.connect() as other, joined(one, group, [topic]) as owner:
        held = collect(owner, 8, ack=False)
        if not kept:
            delete()
        with joined(other, group, [topic]) as successor:
            queue: Any = successor._driver.queue
            buffers = queue.buffers
            if kept:
                until(lambda: reaches(kept), "it has fetched ahead")
                delete()
            until(lambda: reaches(8), "it was refused")
            ((_, ahead),) = buffers
            for message in held:
                if message.offset < 2:
                    message.ack()
            owner.stop()
            began = [(number, kept if kept and number == ahead else 2) for number in range(2)]
            read = [(number, at) for number, to in began for at in (*range(2, to), 8, 9)]
            assert sorted(places(collect(successor, len(read)))) == read
            successor.flush()
        notes = [note for note in memory.accepted(group, Note) if note.kind == "offset_lost"]
        assert sorted((note.partition, note.from_, note.to) for note in notes) == [(n, to, 8) for n, to in began]


def test_without_ids_a_recreated_data_topic_is_not_read_again_in_silence(memory: MemoryTestCluster) -> None:
    """D6; where the cluster gives ids, its partitions are parked (test_recreated.py)."""
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
            assert not consumer.fetch(10, min_messages=10, expires_s=0.1)
            return [event.text for event in consumer.events() if event.kind == "parked"]

        (text,) = until(parked, "it is parked")
        assert "PositionBeyondEnd" in text
        assert "position 5, end 2" in text


def test_a_partition_that_grows_over_a_refused_position_is_not_read_on_in_silence(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6: the cluster says where the partition ends after it has refused the position. Found by the simulator: what
    had been written below the position by then was skipped."""
    memory.broker.tells_ids = False
    topic = memory.topic()
    memory.fill(topic, 0, 5)
    bounds, grown = MemoryAdmin.bounds, list[str]()

    def later(self: MemoryAdmin, *arguments: Any, **options: Any) -> Any:
        if not grown:
            grown.append(topic)
            memory.fill(topic, 0, 6)
        return bounds(self, *arguments, **options)

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        collect(consumer, 5)
        monkeypatch.setattr(MemoryAdmin, "bounds", later)
        with memory.broker.lock:
            memory.broker.delete_topic(topic)
            memory.broker.create_topic(topic, 1)

        def parked() -> list[str]:
            assert not consumer.fetch(10, min_messages=10, expires_s=0.1)
            return [event.text for event in consumer.events() if event.kind == "parked"]

        (text,) = until(parked, "it is parked")
        assert text.startswith("PartitionTruncated: ")
        assert "(position 5 was beyond the end, which is 6 now)" in text


def test_accepted_positions_are_mirrored(cluster: TestCluster) -> None:
    topic = cluster.topic(3)
    group = cluster.group()
    for partition in range(3):
        cluster.fill(topic, partition, partition + 1)
    tps = [TopicPartition(topic, partition) for partition in range(3)]
    with cluster.connect() as marshal, cluster.connect() as observer:
        with joined(marshal, group, [topic]) as consumer:
            collect(consumer, 6)
        until(lambda: observer._context.admin.committed(group, tps) == {tps[0]: 1, tps[1]: 2, tps[2]: 3}, "the mirror")


def test_two_consumers_of_one_marshal_are_both_mirrored(cluster: TestCluster) -> None:
    topic = cluster.topic(2)
    group = cluster.group()
    for partition in (0, 1):
        cluster.fill(topic, partition, 4)
    tps = [TopicPartition(topic, partition) for partition in (0, 1)]
    with cluster.connect() as marshal, cluster.connect() as observer:
        with joined(marshal, group, [topic], max_claims=1) as one, joined(marshal, group, [topic]) as two:
            until(lambda: len(one.cached_info().claims) == len(two.cached_info().claims) == 1, "one partition each")
            collect(one, 4)
            collect(two, 4)
        until(lambda: observer._context.admin.committed(group, tps) == {tps[0]: 4, tps[1]: 4}, "the mirror")


def test_a_late_mirror_does_not_hide_the_next_owners(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D7: the commit of a consumer that has left waits until the next owner has committed and left, too."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    tp = TopicPartition(topic, 0)
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()
    with memory.connect() as marshal:
        admin = marshal._context.admin
        commit = admin.commit

        def late(name: str, positions: dict[TopicPartition, int]) -> str:
            if begun.is_set():
                return commit(name, positions)
            begun.set()
            assert go_on.wait(DEADLINE_S)
            refused = commit(name, positions)
            done.set()
            return refused

        monkeypatch.setattr(admin, "commit", late)
        with joined(marshal, group, [topic]) as consumer:
            collect(consumer, 2)
        assert begun.wait(DEADLINE_S)
        with joined(marshal, group, [topic]) as consumer:
            collect(consumer, 1)
        until(lambda: admin.committed(group, [tp]) == {tp: 3}, "the mirror of the second")
        go_on.set()
        assert done.wait(DEADLINE_S)
        until(lambda: admin.committed(group, [tp]) == {tp: 3}, "the mirror of the second, again")


def test_a_mirror_that_is_refused_for_long_is_an_event(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D7: it says since when. Only the first copy is new: the others try the same position again."""
    monkeypatch.setattr(member_state, "MIRROR_MS", 10)
    monkeypatch.setattr(consumer_driver, "LASTS_MS", 50)
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        memory.broker.live_kafka[group] = 1
        collect(consumer, 1)
        found: list[str] = []

        def told() -> list[str]:
            found.extend(event.text for event in consumer.events() if event.kind == "mirror_refused")
            return found

        until(told, "the refusal is reported")
        assert "; no copy has succeeded since 20" in found[0]
        del memory.broker.live_kafka[group]
        until(lambda: memory.broker.committed, "the copy is made again, though nothing has moved")


def test_a_refusal_that_passes_is_not_reported() -> None:
    def at(seconds: int) -> Instant:
        return Instant(1000 * seconds, 0, 1_800_000_000_000 + 1000 * seconds)

    copies = consumer_driver.CommitRefusals()
    assert [copies.answered(text, at(s)) for s, text in ((0, "moved"), (25, "moved"), (35, ""), (40, "moved"))] == [
        ""
    ] * 4, "none lasted for 30 s"
    assert copies.answered("moved", at(69)) == ""
    told = copies.answered("moved", at(70))
    assert told == "moved; no copy has succeeded since 2027-01-15T08:00:40+00:00"
    assert copies.answered("moved", at(75)) == "", "once"
    assert copies.answered("denied", at(80)).startswith("denied; no copy"), "another reason"


def test_live_ordinary_consumers_keep_the_group_for_themselves(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    group = memory.group()
    memory.broker.live_kafka[group] = 2
    with memory.connect() as marshal:
        with pytest.raises(MembersAlive) as raised:
            joined(marshal, group, [topic])
        assert (raised.value.group, raised.value.members) == (group, ("2 ordinary Kafka consumers",))
        memory.broker.live_kafka[group] = 0
        with joined(marshal, group, [topic]) as consumer:
            until(owns(consumer, 0), "they have gone")


@pytest.mark.parametrize(("plans", "offset"), [(True, 0), (False, 3)])
def test_a_topic_that_joins_those_of_a_group_begins_as_start_says_and_for_a_query_at_its_beginning(
    memory: MemoryTestCluster, plans: bool, offset: int
) -> None:
    """D5: messages from before the topic was listed. A group's first topics are not meant."""
    topics, group = [memory.topic()], memory.group()
    with memory.connect() as marshal:
        for _ in range(2):
            memory.fill(topics[-1], 0, 3)
            join = marshal.planner if plans else marshal.consumer
            with join(group, topics, start="latest", heartbeat_interval_s=1) as consumer:
                until(lambda: len(consumer.cached_info().claims) == len(topics), "the partitions are ours")
                begun = {tp.topic: claim.position for tp, claim in consumer.cached_info().claims.items()}
            topics.append(memory.topic())
    assert begun == {topics[0]: 3, topics[1]: offset}


def test_topics_are_found_by_a_pattern(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.create(f"{topic}.more", 1)
    cluster.create("__consumer_offsets", 1)
    with cluster.connect() as marshal:
        assert marshal.topics(f"{topic}*") == (topic, f"{topic}.more")
        assert marshal.topics(topic[:-1]) == ()
        assert not {"__marshal", "__consumer_offsets"} & set(marshal.topics("*"))
        with pytest.raises(InvalidOption, match=r"pattern='\('"):
            marshal.topics("(")


def test_a_topic_that_is_missing_is_named(cluster: TestCluster) -> None:
    topic = cluster.topic()
    with cluster.connect() as marshal:
        with pytest.raises(TopicMissing) as raised:
            joined(marshal, cluster.group(), [topic, "absent"])
        assert raised.value.topic == "absent"
        assert raised.value.retriable
        cluster.create("absent", 1)
        joined(marshal, cluster.group(), [topic, "absent"]).stop()


@pytest.mark.parametrize(
    ("text", "then"),
    [
        ("05:50", "2026-11-27T05:50:00+00:00"),
        ("5:50:07Z", "2026-11-27T05:50:07+00:00"),
        ("06:30:00", "2026-11-27T06:30:00+00:00"),
        ("06:31", "2026-11-26T06:31:00+00:00"),
    ],
)
def test_a_time_of_day_is_the_last_one(text: str, then: str) -> None:
    now_ms = position_text.moment_of("2026-11-27T06:30:00", 0)
    assert position_text.moment_of(text, now_ms) == position_text.moment_of(then, 0)


@pytest.mark.parametrize("text", ["24:00", "05:60", "5", "05:50:60", "-05:50"])
def test_what_is_no_time_of_day(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        position_text.moment_of(text, 0)
