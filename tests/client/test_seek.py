"""`Consumer.seek`: the owner of a claim moves its position, in the log (PROTOCOL.md T20, F6.6)."""

from __future__ import annotations

import threading
from typing import Any

import confluent_kafka
import pytest

from marshal_py import ClaimLost, ClusterUnreachable, ConsumerClosed, InvalidOption
from marshal_py.errors import NeedsAtLeastOnce, PositionOutOfRange
from marshal_py.protocol.wire.records import ReleasingPartition, SeekingPartition
from tests.support.client_fixtures import DEADLINE_S, MemoryTestCluster, TestCluster, collect, joined, owns, until


def test_delivery_continues_at_the_offset_and_so_does_a_later_owner(cluster: TestCluster) -> None:
    topic, group = cluster.topic(), cluster.group()
    cluster.fill(topic, 0, 10)
    with cluster.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            first = collect(consumer, 8)
            assert [message.offset for message in first] == list(range(8))
            consumer.seek((topic, 0), 3)
            assert consumer.cached_info().claims[(topic, 0)].position == 3
            again = collect(consumer, 2)
            assert [message.offset for message in again] == [3, 4]
            assert again[0].token > first[0].token
            assert again[0].delivery_count == 1
            consumer.seek((topic, 0), 9)
            assert [message.offset for message in collect(consumer, 1, ack=False)] == [9]
            consumer.seek((topic, 0), 7)
        with joined(marshal, group, [topic]) as consumer:
            assert [message.offset for message in collect(consumer, 3)] == [7, 8, 9]
    assert [record.position for record in cluster.accepted(group, SeekingPartition)] == [3, 9, 7]


def test_an_iteration_continues_at_the_offset(memory: MemoryTestCluster) -> None:
    topic, seen = memory.topic(), list[int]()
    memory.fill(topic, 0, 6)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        for message in consumer:
            seen.append(message.offset)
            if seen == [0, 1, 2]:
                consumer.seek((topic, 0), 1)
                assert not message.ack(), "too late: its claim was replaced"
            elif len(seen) == 8:
                break
            else:
                assert message.ack()
    assert seen == [0, 1, 2, 1, 2, 3, 4, 5]


def test_concurrent_seeks_run_one_after_the_other(memory: MemoryTestCluster) -> None:
    """A seek replaces the claim; another one, as after a cancelled one of asyncio, waits for the new claim."""
    topic, offsets = memory.topic(), list(range(8))
    memory.fill(topic, 0, 10)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "claimed")
        together = threading.Barrier(len(offsets))
        sought: list[int] = []

        def seek(offset: int) -> None:
            together.wait()
            consumer.seek((topic, 0), offset)
            sought.append(offset)

        threads = [threading.Thread(target=seek, args=(offset,)) for offset in offsets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(sought) == offsets
        with pytest.raises(InvalidOption, match="timeout_s"):
            consumer.seek((topic, 0), 1, timeout_s=-1)


def test_the_user_is_told(memory: MemoryTestCluster) -> None:
    topic, told, claimed = memory.topic(2), list[str](), threading.Semaphore(0)
    memory.fill(topic, 1, 5)

    def on_claim(info: object) -> None:
        told.append("claimed")
        claimed.release()

    with (
        memory.connect() as marshal,
        joined(
            marshal,
            memory.group(),
            [topic],
            on_claim=on_claim,
            on_revoking=lambda info: told.append("revoking"),
            on_lost=lambda info, reason: told.append(f"lost: {reason}"),
        ) as consumer,
    ):
        until(owns(consumer, 0, 1), "both partitions are claimed")
        consumer.seek((topic, 1), 4)
        assert all(claimed.acquire(timeout=40) for _ in range(3))
        assert told == ["claimed", "claimed", "lost: seek", "claimed"]
        (moved,) = [event for event in consumer.events() if event.kind == "moved"]
        assert (moved.topic, moved.partition, moved.offset, moved.to) == (topic, 1, 0, 4)
        assert moved.text == "by its owner"
        assert [message.offset for message in collect(consumer, 1)] == [4]


def test_positions_outside_the_partition_are_refused(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 5)
    memory.truncate(topic, 0, 2)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], start="earliest") as consumer:
        until(owns(consumer, 0), "the partition is claimed")
        for wrong in (1, 6, -1):
            with pytest.raises(PositionOutOfRange, match="valid are 2 to 5"):
                consumer.seek((topic, 0), wrong)
        consumer.seek((topic, 0), 5)
        assert consumer.cached_info().claims[(topic, 0)].position == 5


def test_only_the_owner_may_seek(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition is claimed")
        with pytest.raises(ClaimLost, match=f"does not own {topic}:77, .*it owns {topic}:0: Group.set_pos") as caught:
            consumer.seek((topic, 77), 0)
        assert (caught.value.lost, caught.value.claimed) == ((f"{topic}:77",), (f"{topic}:0",))
        assert "roll back" not in str(caught.value)


def test_a_consumer_without_claims_and_one_with_many_are_told_so() -> None:
    assert "it owns nothing:" in str(ClaimLost("g", ("t:0",), ()))
    assert "t:9 and 2 more:" in str(ClaimLost("g", ("u:0",), tuple(f"t:{number}" for number in range(12))))


def test_what_names_no_partition_is_refused(memory: MemoryTestCluster) -> None:
    """A text of two characters is no pair. `pause` and `resume` refuse the same."""
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        wrong: Any
        for wrong in ("f1", topic, (topic,), (topic, "0"), (topic, True), (0, topic), (topic, 0, 1), None, 3):
            with pytest.raises(InvalidOption, match=r"partition=.* as \(\"orders\", 3\)"):
                consumer.seek(wrong, 1)
            for verb in (consumer.pause, consumer.resume):
                with pytest.raises(InvalidOption, match="partition="):
                    verb([wrong])
        for wrong in ("1", None, 1.0, True):
            with pytest.raises(InvalidOption, match="offset="):
                consumer.seek((topic, 0), wrong)


def test_the_partition_may_be_named_by_an_object(memory: MemoryTestCluster) -> None:
    """As confluent-kafka does it. `pause` and `resume` take the same."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        until(owns(consumer, 0), "the partition is claimed")
        named = confluent_kafka.TopicPartition(topic, 0)
        consumer.pause([named])
        assert not consumer.fetch(1, expires_s=0)
        consumer.resume([named])
        consumer.seek(named, 2)
        assert [message.offset for message in consumer.fetch(1, expires_s=DEADLINE_S)] == [2]


def test_an_at_most_once_group_refuses_it_by_name(memory: MemoryTestCluster) -> None:
    """ACKS: In at-most-once groups `seek` is refused by name."""
    topic = memory.topic()
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], delivery="at_most_once") as consumer,
        pytest.raises(NeedsAtLeastOnce, match=r"seek\(\)"),
    ):
        consumer.seek((topic, 0), 0)


def test_a_partition_that_the_user_has_paused_stays_paused(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], start="earliest") as consumer:
        until(owns(consumer, 0), "the partition is claimed")
        consumer.pause([(topic, 0)])
        consumer.seek((topic, 0), 3)
        assert not consumer.fetch(1, expires_s=0.2)
        consumer.resume([(topic, 0)])
        assert [message.offset for message in collect(consumer, 2)] == [3, 4]


def test_a_stop_right_after_it_releases_the_new_claim(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal, joined(marshal, group, [topic], start="earliest") as consumer:
        until(owns(consumer, 0), "the partition is claimed")
        consumer.seek((topic, 0), 3)
    (released,) = memory.accepted(group, ReleasingPartition)
    assert released.position == 3


HOUR_S = 3_600.0


def test_a_stop_that_times_out_ends_a_seek_that_waits(memory: MemoryTestCluster) -> None:
    """The stop has not read back that it left, so the claim is still there; but nobody will ever move it."""
    topic, raised = memory.topic(), list[BaseException]()
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal:
        consumer = joined(marshal, memory.group(), [topic])
        until(owns(consumer, 0), "the partition is claimed")

        def seek() -> None:
            try:
                consumer.seek((topic, 0), 3, timeout_s=HOUR_S)
            except BaseException as error:
                raised.append(error)

        memory.broker.writable = False
        seeker = threading.Thread(target=seek, daemon=True)
        seeker.start()
        until(lambda: any(claim.seek_sent for claim in consumer._member.claims.values()), "the seek waits")
        consumer.stop(0.1)
        seeker.join(DEADLINE_S)
        assert not seeker.is_alive()
        memory.broker.writable = True
    assert [type(error) for error in raised] == [ConsumerClosed]


def test_a_seek_without_an_answer_ends_in_time(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is for the question to the cluster and for the record together."""
    topic, asked = memory.topic(), list[float]()
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition is claimed")
        admin = marshal._context.admin
        ask = admin.bounds

        def bounds(tps: Any, **options: Any) -> Any:
            asked.append(options["timeout_s"])
            return ask(tps, **options)

        monkeypatch.setattr(admin, "bounds", bounds)
        memory.broker.writable = False
        with pytest.raises(ClusterUnreachable):
            consumer.seek((topic, 0), 3, timeout_s=0.2)
        memory.broker.writable = True
        until(
            lambda: consumer.cached_info().claims[(topic, 0)].position == 3,
            "it is moved all the same, once the cluster answers",
        )
    assert len(asked) == 1
    assert 0 < asked[0] <= 0.2
