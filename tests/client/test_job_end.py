"""A job that ends by itself ends well only if nothing before its end is left that nobody reads."""

from __future__ import annotations

import pytest

from marshal_py.client.planner import Planner
from marshal_py.errors import PartitionsParked, PartitionsUnread
from marshal_py.protocol.wire.identity import TopicPartition
from tests.support.client_fixtures import MemoryTestCluster, joined, until


def read(planner: Planner, rows_max: int = 1_000) -> dict[TopicPartition, int]:
    """Reads one batch, as far as `rows_max`. Returns where the partitions end."""
    ends = planner.ranges.ends()
    with planner.batch(rows_max, wait_s=30.0) as batch:
        batch.commit()
    return ends


def test_parked_partitions_fail_the_job_even_if_they_are_all(memory: MemoryTestCluster) -> None:
    topic = memory.topic(2)
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal, marshal.planner(memory.group(), [topic], start="earliest") as planner:
        assert planner.ranges.settle(30.0)
        ends = read(planner)
        planner.ranges.check_read(ends)
        for number in range(2):
            planner._driver.park(TopicPartition(topic, number), "PartitionTruncated", "a test")
        until(lambda: len(planner._driver.parked()) == 2, "both are parked")
        assert planner.ranges.settle(30.0), "there is nothing to wait for"
        with pytest.raises(PartitionsParked) as raised:
            planner.ranges.check_read(ends)
        assert list(raised.value.parked) == [f"{topic}:0", f"{topic}:1"]
        planner.ranges.check_read({})  # a job over other partitions


def test_a_pause_fails_the_job_only_if_something_is_left(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(2), memory.group()
    memory.fill(topic, 0, 5)
    memory.fill(topic, 1, 5)
    with memory.connect() as marshal, marshal.planner(group, [topic], start="earliest") as planner:
        assert planner.ranges.settle(30.0)
        ends = read(planner)
        hold = marshal.group(group).pause(60)
        until(lambda: planner.cached_info().paused, "the planner knows")
        planner.ranges.check_read(ends)
        with pytest.raises(
            PartitionsUnread, match=f"{topic}:1: the group is paused .* marshal resume {group}"
        ) as raised:
            planner.ranges.check_read({**ends, TopicPartition(topic, 1): 6})
        assert list(raised.value.unread) == [f"{topic}:1"]
        assert raised.value.retriable
        marshal.group(group).resume(token=hold.token)


def test_a_topic_that_is_gone_fails_the_job(memory: MemoryTestCluster) -> None:
    gone, kept = memory.topic(), memory.topic()
    memory.fill(gone, 0, 5)
    with memory.connect() as marshal, marshal.planner(memory.group(), [gone, kept], start="earliest") as planner:
        assert planner.ranges.settle(30.0)
        ends = planner.ranges.ends()
        memory.broker.delete_topic(gone)
        assert not planner.batch(10, wait_s=0.5)
        until(lambda: gone in planner._driver.topic_watch.absent, "it is known to be gone")
        with pytest.raises(PartitionsUnread, match="is gone") as raised:
            planner.ranges.check_read(ends)
        assert list(raised.value.unread) == [f"{gone}:0"]


def test_what_a_live_member_owns_is_its_work_and_a_dead_one_has_none(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(2), memory.group()
    memory.fill(topic, 0, 5)
    memory.fill(topic, 1, 5)
    ends = {TopicPartition(topic, number): 5 for number in range(2)}
    with memory.connect() as marshal:
        with joined(marshal, group, [topic]) as other:
            until(lambda: len(other.cached_info().claims) == 2, "it has both")
            with marshal.planner(group, [topic]) as planner:
                assert planner.ranges.settle(30.0)
                planner.ranges.check_read(ends)
        with memory.connect() as second:
            dead = joined(second, group, [topic], heartbeat_interval_s=60.0)
            until(lambda: len(dead.cached_info().claims) == 2, "it has both")
            second._loop._closing = True  # no more heartbeats
            second._loop._thread.join()
            with (
                marshal.planner(group, [topic]) as planner,
                pytest.raises(PartitionsUnread, match="no live member of the group owns it"),
            ):
                planner.ranges.check_read(ends)
            dead._ending.done = True


def test_a_limit_of_claims_is_meant(memory: MemoryTestCluster) -> None:
    topic = memory.topic(2)
    memory.fill(topic, 0, 5)
    memory.fill(topic, 1, 5)
    with memory.connect() as marshal, marshal.planner(memory.group(), [topic], max_claims=1) as planner:
        assert planner.ranges.settle(30.0)
        planner.ranges.check_read({TopicPartition(topic, number): 5 for number in range(2)})
