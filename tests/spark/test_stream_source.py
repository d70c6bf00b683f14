"""The streaming source without a JVM: its methods called as Spark calls them, also after crashes of every kind."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles, ReadMaxRows
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from marshal_py.errors import (
    AckNotConfirmed,
    ClusterUnreachable,
    GroupDeleted,
    InvalidOption,
    MarshalError,
    MembersAlive,
    PartitionsParked,
    PartitionsUnread,
)
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import ClaimingMessages
from marshal_py.spark.log_tables import state_reader
from marshal_py.spark.stream import stream_source
from marshal_py.spark.stream.backfills import BackfillOptions, BackfillReader, RangeOptions, RangesReader
from marshal_py.spark.stream.options import StreamOptions
from marshal_py.spark.stream.stream_source import QueryMember, StreamReader
from pyspark_marshal import DefaultSource
from tests.spark.kafka_topic import KafkaTopic, MakeTopic
from tests.support.client_fixtures import BackgroundConsumer, places, until

Rows = list[tuple[int, int]]
NEEDED = {"group": "g", "topics": "t", "bootstrap.servers": "127.0.0.1:1"}


class Query:
    """A structured query: calls a reader in Spark's order, and keeps a checkpoint of JSON texts, as Spark does."""

    def __init__(self, orders: KafkaTopic, **options: Any) -> None:
        self.given = {**orders.options, **{name: str(value) for name, value in options.items()}}
        if "topics_pattern" in options:
            del self.given["topics"]
        self.offsets: list[str] = []  # the write-ahead log
        self.commits = 0  # batches in the commit log
        self.out: Rows = []
        self.start()

    def start(self) -> None:
        """Starts a new process: the reader is pickled."""
        reader = DefaultSource(self.given).streamReader(None)  # type: ignore[arg-type]  # it does not look
        self.reader: StreamReader = pickle.loads(cloudpickle.dumps(reader))
        self.current = json.dumps(self.reader.initialOffset())

    @property
    def member(self) -> QueryMember:
        """The reader's member."""
        assert self.reader._member is not None
        return self.reader._member

    def await_left(self) -> None:
        """Waits until its member is overdue and leaves."""
        member = self.member
        until(lambda: member.planner._driver.ended, "the member has left")

    def crash(self) -> None:
        """The process dies: no stop, no more heartbeats. (A thread cannot be killed; it is stopped from inside.)"""
        member = self.member
        member.marshal._loop._closing = True
        member.marshal._loop._thread.join()
        if member._commits is not None:
            member._commits.close()
        member.planner._ending.done = True  # so that close() ends its connections and sends nothing
        member.marshal.close(0.0)
        self.start()

    def offset(self, batch: int) -> dict[str, Any]:
        text = self.offsets[batch] if batch >= 0 else json.dumps(self.reader.initialOffset())
        found: dict[str, Any] = json.loads(text)
        return found

    def write_ahead(self) -> bool:
        """The first half of a trigger. Returns False if there is nothing new."""
        start = self.offset(self.commits - 1)
        end = json.dumps(self.reader.latestOffset(start, self.reader.getDefaultReadLimit()))
        if end == json.dumps(start):
            return False
        self.offsets.append(end)
        return True

    def read(self) -> Rows:
        """Runs the tasks of the newest batch."""
        if self.commits:
            self.reader.commit(self.offset(self.commits - 1))
        start, end = self.offset(self.commits - 1), self.offset(self.commits)
        parts = pickle.loads(cloudpickle.dumps(self.reader.partitions(start, end)))
        again = self.reader.partitions(start, end)
        assert [part.value for part in again] == [part.value for part in parts], "asked twice, the same answer"
        far: StreamReader = pickle.loads(cloudpickle.dumps(self.reader))
        return [
            (batch["partition"][at].as_py(), batch["offset"][at].as_py())
            for part in parts
            for batch in far.read(part)
            for at in range(batch.num_rows)
        ]

    def finish(self, rows: Rows) -> None:
        self.out += rows
        self.commits += 1

    def turn(self) -> bool:
        """One trigger; it replays an uncommitted batch if there is one. Returns False if there was nothing to do."""
        if len(self.offsets) > self.commits or self.write_ahead():
            self.finish(self.read())
            return True
        return False

    def until_idle(self) -> None:
        while self.turn():
            pass

    def settled(self) -> None:
        """Waits until a restarted query has claims, and runs until it is idle."""
        until(self.turn, "there is something to do")
        self.until_idle()


def test_everything_comes_once_in_batches_of_the_limit(make_topic: MakeTopic) -> None:
    orders = make_topic(3)
    orders.fill(40)
    query = Query(orders, max_rows_per_batch=50)
    query.until_idle()
    assert sorted(query.out) == sorted(orders.written)
    assert query.commits >= 3
    orders.fill(5)
    query.until_idle()
    assert sorted(query.out) == sorted(orders.written)
    report = query.reader.reportLatestOffset()
    assert report is not None
    assert (report["group"], report["claims"], report["lag"]) == (orders.group, 3, 0)
    query.reader.stop()


def test_the_end_offset_holds_the_plan(make_topic: MakeTopic) -> None:
    """It has claim epoch, generation, from and to of each partition. The first offset is constant; without new data the
    end is the start."""
    orders = make_topic(1)
    orders.fill(7)
    query = Query(orders, max_rows_per_batch=5)
    assert query.reader.initialOffset() == {"b": 0, "r": {}}
    query.turn()
    first = query.offset(0)
    ((epoch, generation, start, to),) = first["r"].values()
    assert (first["b"], list(first["r"]), generation, start, to) == (1, [f"{orders.topic}:0"], 0, 0, 5)
    assert epoch > 0
    query.until_idle()
    assert query.reader.latestOffset(query.offset(1), ReadAllAvailable()) == query.offset(1)
    assert query.reader.partitions(query.offset(1), query.offset(1)) == []
    query.reader.stop()


def test_the_position_follows_what_spark_has_committed(make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(10)
    query = Query(orders, max_rows_per_batch=5)
    query.turn()
    assert orders.positions() == {0: 0}, "the batch is acked only once Spark has committed it"
    query.write_ahead()
    assert orders.positions() == {0: 5}
    query.reader.stop()
    assert orders.positions() == {0: 5}


@pytest.mark.parametrize("how", ["crash", "stop"])
def test_a_restart_between_triggers_skips_nothing_and_repeats_nothing(make_topic: MakeTopic, how: str) -> None:
    """Spark has committed the batch, and it is not acked yet: the next process acks it."""
    orders = make_topic(2)
    orders.fill(10)
    query = Query(orders)
    query.turn()
    orders.fill(10)
    if how == "crash":
        query.crash()
    else:
        query.reader.stop()
        query.start()
    query.settled()
    assert sorted(query.out) == sorted(orders.written)
    assert orders.positions() == {0: 20, 1: 20}
    query.reader.stop()


def test_a_trigger_beyond_the_handler_timeout_loses_nothing(make_topic: MakeTopic) -> None:
    """Between two triggers Spark calls nothing: the member leaves, and the next one acks its batch."""
    orders = make_topic(2)
    query = Query(orders, handler_timeout_s=1.0)
    for _ in range(3):
        orders.fill(10)
        query.settled()
        query.await_left()
    query.turn()
    assert sorted(query.out) == sorted(orders.written)
    assert orders.positions() == {0: 30, 1: 30}
    query.reader.stop()


def test_a_batch_that_outlives_two_memberships_comes_once(make_topic: MakeTopic) -> None:
    """Twice the member left as overdue and joined again while Spark worked on the same batch."""
    orders = make_topic(2)
    orders.fill(10)
    query = Query(orders, handler_timeout_s=3.0)
    assert query.write_ahead()
    rows = query.read()
    for _ in range(2):
        query.await_left()
        query.read()  # Spark asks again
        until(lambda: len(query.member.planner._member.claims) == 2, "it is back")
    query.finish(rows)
    orders.fill(5)
    query.settled()
    assert sorted(query.out) == sorted(orders.written)
    query.reader.stop()


def test_a_pause_between_the_plan_and_its_tasks_loses_nothing(make_topic: MakeTopic) -> None:
    """The batch has the planned ranges, because they were handed over with the plan."""
    orders = make_topic(2)
    orders.fill(10)
    query = Query(orders)
    assert query.write_ahead()
    with orders.connect() as marshal, ThreadPoolExecutor(1) as aside:
        admin = marshal.group(orders.group)
        hold = aside.submit(admin.pause, 60)
        member = query.member
        until(lambda: member.planner.cached_info().paused, "the group is paused")
        query.finish(query.read())
        assert not query.turn(), "the pause has waited for the batch, and nothing new is planned"
        admin.resume(token=hold.result(30).token)
    orders.fill(5)
    query.settled()
    assert set(query.out) == set(orders.written), "nothing is lost"
    query.reader.stop()


def test_a_replay_leaves_out_what_another_member_has_claimed_since(make_topic: MakeTopic) -> None:
    """A dead process's batch is replayed without the partitions that another member owns, which are not acked."""
    orders = make_topic(2)
    orders.fill(10)
    query = Query(orders)
    assert query.write_ahead()
    query.read()
    query.crash()
    with orders.connect() as marshal, orders.consumer(marshal) as consumer:
        until(lambda: len(consumer.cached_info().claims) == 2, "the dead query is evicted")
        until(lambda: (query.turn() or True) and query.commits > 0, "the replayed batch is done")
        query.crash()  # committed, and not acked
    query.settled()
    assert set(query.out) == set(orders.written), "nothing is lost"
    query.reader.stop()


@pytest.mark.parametrize("at", ["before the tasks", "in the sink", "after the sink"])
def test_at_least_once_a_crash_repeats_at_most_its_batch(make_topic: MakeTopic, at: str) -> None:
    orders = make_topic(2)
    orders.fill(20)
    query = Query(orders, max_rows_per_batch=16)
    query.turn()
    query.write_ahead()
    doubled: Rows = []
    if at != "before the tasks":
        doubled = query.read()
        query.out += doubled
    if at == "after the sink":
        query.commits += 1
        doubled = []
    query.crash()
    query.settled()
    assert sorted(query.out) == sorted([*orders.written, *doubled])
    assert len(doubled) <= 16
    query.reader.stop()


def test_at_least_once_without_a_checkpoint_the_log_has_the_positions(
    make_topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs a warning, because sinks that know batches by their numbers would skip them."""
    orders = make_topic(2)
    orders.fill(20)
    query = Query(orders, max_rows_per_batch=16)
    query.turn()
    query.write_ahead()
    doubled = query.read()
    query.out += doubled
    query.crash()
    query.offsets, query.commits = [], 0
    assert "fresh checkpoint" not in caplog.text
    query.settled()
    assert sorted(query.out) == sorted([*orders.written, *doubled])
    assert caplog.text.count("fresh checkpoint") == 1
    query.reader.stop()


def test_a_sink_that_fails_makes_no_message_look_like_poison(make_topic: MakeTopic) -> None:
    """Also not to a service of the same group, which would write it to its dead-letter topic."""
    orders = make_topic(1)
    orders.fill(5)
    query = Query(orders)
    for _ in range(4):
        until(query.write_ahead, "a batch is planned") if len(query.offsets) == query.commits else None
        query.read()
        query.reader.stop()  # Spark's, because the sink has raised
        query.start()
    with (
        orders.connect() as marshal,
        orders.consumer(marshal, max_deliver=3, dead_letter_topic=make_topic(1).topic) as consumer,
    ):
        batch = consumer.fetch(5, min_messages=5, expires_s=30)
        assert batch[0].delivery_count == 2
        batch.ack()
        assert {"poison_message", "dead_letter"}.isdisjoint(event.kind for event in consumer._driver.events)
    with orders.connect() as marshal:
        kinds = {one.kind for one in marshal.group(orders.group).advisories()}
    assert kinds & {"claimed", "poison_message", "dead_letter"} == {"claimed"}


@pytest.mark.parametrize("at", ["before the tasks", "in the sink"])
def test_at_most_once_a_crash_loses_at_most_its_batch(
    make_topic: MakeTopic, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The replayed batch is empty, whether its tasks ran or not, and says so."""
    orders = make_topic(2)
    orders.fill(20)
    query = Query(orders, max_rows_per_batch=16, delivery="at_most_once")
    query.turn()
    query.write_ahead()
    granted = [wanted for record in orders.accepted(ClaimingMessages) for wanted in record.ranges]
    assert sum(wanted.to - wanted.start for wanted in granted) == 16, "planned is not granted"
    lost = query.read()
    assert len(lost) == 16
    if at == "in the sink":
        query.out += lost
        lost = []
    assert "is empty" not in caplog.text
    query.crash()
    query.settled()
    assert caplog.text.count("is empty; 2 ranges were planned for it") == 1
    assert sorted(query.out + lost) == sorted(orders.written)
    query.reader.stop()


def test_a_claim_lost_in_the_middle_comes_again_elsewhere(make_topic: MakeTopic) -> None:
    """A member that joins gets its share of the partitions, once the query has finished its batch."""
    orders = make_topic(4)
    orders.fill(25)
    query = Query(orders, max_rows_per_batch=40)
    query.turn()
    query.write_ahead()
    rows = query.read()
    with orders.connect() as marshal, orders.consumer(marshal) as consumer, BackgroundConsumer(consumer) as keeper:
        query.finish(rows)
        until(lambda: (query.turn() or True) and len(consumer.cached_info().claims) == 2, "the consumer has its share")
        orders.fill(25)
        until(lambda: (query.turn() or True) and len(keeper.seen) + len(query.out) == 200, "all is there")
        assert sorted([*places(keeper.seen), *query.out]) == sorted(orders.written)
        assert keeper.seen
    query.turn()
    query.reader.stop()
    assert orders.positions() == dict.fromkeys(range(4), 50)


def test_a_pause_and_a_rewind_in_the_middle(make_topic: MakeTopic) -> None:
    """T12: the batch that tasks are reading is released; the rewound ranges are planned again, under new tokens."""
    orders = make_topic(1)
    orders.fill(12)
    query = Query(orders, max_rows_per_batch=6)
    query.turn()
    query.write_ahead()
    rows = query.read()
    with orders.connect() as marshal:
        marshal.group(orders.group).set_position(orders.topic, "earliest")
    query.finish(rows)
    query.settled()
    offsets = [offset for _, offset in query.out]
    assert offsets == [*range(6), *range(6, 12), *range(6), *range(6, 12)]
    first, again = query.offset(0)["r"][f"{orders.topic}:0"], query.offset(2)["r"][f"{orders.topic}:0"]
    assert (again[1], again[2]) == (first[1] + 1, 0)
    query.reader.stop()


def test_a_paused_group_plans_nothing(make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(5)
    query = Query(orders)
    assert query.write_ahead()
    query.finish(query.read())
    query.turn()
    with orders.connect() as marshal:
        admin = marshal.group(orders.group)
        hold = admin.pause(30)
        orders.fill(5)
        assert not query.turn()
        report = query.reader.reportLatestOffset()
        assert report is not None
        assert report["paused"]
        admin.resume(token=hold.token)
    query.settled()
    assert sorted(query.out) == sorted(orders.written)
    query.reader.stop()


def test_available_now_ends_at_what_was_there(make_topic: MakeTopic) -> None:
    orders = make_topic(2)
    orders.fill(10)
    query = Query(orders, max_rows_per_batch=8)
    query.reader.prepareForTriggerAvailableNow()
    there = set(orders.written)
    assert query.turn()
    orders.fill(10)
    query.until_idle()
    assert sorted(query.out) == sorted(there)
    assert orders.positions() == {0: 10, 1: 10}
    query.reader.stop()


def test_available_now_fails_at_its_end_if_partitions_are_parked(make_topic: MakeTopic) -> None:
    """F6.4: what can be read is read before, and the next run fails, too, although it has nothing to read."""
    orders = make_topic(2)
    orders.fill(10)
    with orders.connect() as marshal, orders.consumer(marshal) as consumer:
        until(lambda: len(consumer.cached_info().claims) == 2, "it has both")
        consumer._driver.park(TopicPartition(orders.topic, 0), "PartitionTruncated", "a test")
        until(lambda: list(consumer._driver.parked()) == [(orders.topic, 0)], "one is parked")
    for _ in range(2):
        query = Query(orders, max_rows_per_batch=8)
        query.reader.prepareForTriggerAvailableNow()
        with pytest.raises(PartitionsParked) as raised:
            query.until_idle()
        assert sorted(query.out) in ([(1, offset) for offset in range(10)], [])
        assert list(raised.value.parked) == [f"{orders.topic}:0"]
        assert f"marshal set-position {orders.group} {orders.topic}:0 --to" in str(raised.value)
        query.reader.stop()
    assert orders.positions() == {0: 0, 1: 10}


def test_available_now_fails_if_all_partitions_are_parked(make_topic: MakeTopic) -> None:
    """As after a topic was created again: the job has read nothing, and must not look as if it had nothing to do."""
    orders = make_topic(2)
    orders.fill(10)
    with orders.connect() as marshal, orders.consumer(marshal) as consumer:
        until(lambda: len(consumer.cached_info().claims) == 2, "it has both")
        for number in range(2):
            consumer._driver.park(TopicPartition(orders.topic, number), "PartitionTruncated", "a test")
        until(lambda: len(consumer._driver.parked()) == 2, "both are parked")
    query = Query(orders)
    query.reader.prepareForTriggerAvailableNow()
    with pytest.raises(PartitionsParked) as raised:
        query.turn()
    assert list(raised.value.parked) == [f"{orders.topic}:0", f"{orders.topic}:1"]
    assert (query.offsets, query.out) == ([], [])
    query.reader.stop()


def test_available_now_fails_in_a_paused_group_unless_all_is_read(make_topic: MakeTopic) -> None:
    orders = make_topic(2)
    orders.fill(10)
    with orders.connect() as marshal:
        admin = marshal.group(orders.group)
        query = Query(orders, max_rows_per_batch=8)
        query.reader.prepareForTriggerAvailableNow()
        query.turn()
        query.turn()
        hold = admin.pause(60)
        with pytest.raises(PartitionsUnread, match=f"marshal resume {orders.group}") as raised:
            query.until_idle()
        assert f"{orders.topic}:0" in raised.value.unread
        query.reader.stop()
        admin.resume(token=hold.token)
        query.start()
        query.reader.prepareForTriggerAvailableNow()
        query.until_idle()
        assert set(query.out) == set(orders.written)
        query.reader.stop()
        hold = admin.pause(60)
        query.start()
        query.reader.prepareForTriggerAvailableNow()
        query.until_idle()
        query.reader.stop()
        admin.resume(token=hold.token)


def test_a_query_with_state_refuses_a_new_checkpoint(make_topic: MakeTopic) -> None:
    """Its open windows would miss what the group has passed; with `restart` it begins with empty state."""
    orders = make_topic(1)
    orders.fill(10)
    query = Query(orders, stateful="true")
    query.until_idle()
    query.reader.stop()
    orders.fill(5)
    second = Query(orders, stateful="true")
    with pytest.raises(InvalidOption, match="checkpoint is new") as raised:
        second.turn()
    assert (raised.value.option, f"set-position {orders.group}" in str(raised.value)) == ("stateful", True)
    second.reader.stop()
    third = Query(orders, stateful="restart")
    third.settled()
    assert sorted(third.out) == [(0, offset) for offset in range(10, 15)]
    third.reader.stop()


def test_a_query_with_state_begins_anew_after_retention(make_topic: MakeTopic) -> None:
    """The error names this way out: `set-position ... --to earliest`, which is the first offset that is there."""
    orders = make_topic(1)
    orders.fill(10)
    query = Query(orders, stateful="true")
    query.until_idle()
    query.reader.stop()
    orders.truncate(0, 4)
    with orders.connect() as marshal:
        marshal.group(orders.group).set_position([orders.topic], "earliest")
    second = Query(orders, stateful="true")
    second.settled()
    assert sorted(second.out) == [(0, offset) for offset in range(4, 10)]
    second.reader.stop()


def test_a_query_with_state_refuses_to_share_its_group(make_topic: MakeTopic) -> None:
    """The second one ends; the first one waits for that, and continues."""
    orders = make_topic(2)
    orders.fill(10)
    first, second = Query(orders, stateful="true"), Query(orders, stateful="true")
    first.until_idle()
    with pytest.raises(MembersAlive, match="a group of its own"):
        second.turn()
    second.reader.stop()
    orders.fill(10)
    first.settled()
    assert sorted(first.out) == sorted(orders.written)
    with orders.connect() as marshal, orders.consumer(marshal) as consumer:
        until(lambda: consumer.cached_info().claims, "a service has joined")
        orders.fill(1)
        with pytest.raises(MembersAlive):
            first.turn()
    first.reader.stop()


def test_the_lag_of_a_batch_is_what_it_leaves(make_topic: MakeTopic) -> None:
    """Spark shows the report when the batch is done, and no newer one while nothing arrives."""
    orders = make_topic(2)
    orders.fill(10)
    query = Query(orders, max_rows_per_batch=12)
    seen = []
    while query.turn():
        report = query.reader.reportLatestOffset()
        assert report is not None
        seen.append((report["lag"], sum(one["position"] for one in report["partitions"].values())))
    assert seen == [(8, 12), (0, 20)]
    query.reader.stop()


def test_available_now_waits_for_a_dead_owner(make_topic: MakeTopic) -> None:
    """Messages must not be left out because a crashed run still seems to own them."""
    orders = make_topic(2)
    orders.fill(10)
    query = Query(orders)
    query.turn()
    query.crash()
    query.offsets, query.commits, query.out = [], 0, []
    query.reader.prepareForTriggerAvailableNow()
    query.until_idle()
    assert sorted(query.out) == sorted(orders.written)
    query.reader.stop()


def test_a_query_that_hangs_leaves_and_joins_again(make_topic: MakeTopic) -> None:
    """D4: a driver that hangs keeps no claim. When it continues, the query joins again."""
    orders = make_topic(1)
    orders.fill(6)
    query = Query(orders, handler_timeout_s=1.0, max_rows_per_batch=3)
    query.turn()
    with orders.connect() as marshal, orders.consumer(marshal) as consumer:
        until(lambda: len(consumer.cached_info().claims) == 1, "the partition went to a member that reads")
    query.settled()
    assert set(query.out) == orders.written
    assert len(query.out) <= 6 + 3, "at most the batch that Spark had while another member owned the partition"
    query.reader.stop()


def test_a_replay_skips_ranges_that_retention_deleted(make_topic: MakeTopic) -> None:
    """D6: they are noted in the log, and the query continues after them."""
    orders = make_topic(1)
    orders.fill(20)
    query = Query(orders, max_rows_per_batch=10)
    query.write_ahead()
    query.crash()
    orders.truncate(0, 4)
    query.settled()
    assert [offset for _, offset in query.out] == [*range(4, 20)]
    query.reader.stop()


def test_a_checkpoint_of_another_coordination_topic_does_not_count(
    make_topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """Offsets of another incarnation of the log have no meaning here. State in the checkpoint would count twice."""
    orders = make_topic(1)
    orders.fill(5)
    query = Query(orders)
    query.turn()
    query.reader.stop()
    query.given |= {"coordination_topic": f"{orders.log}-new", "stateful": "true"}
    query.start()
    with pytest.raises(InvalidOption, match=r"another coordination topic.*Take a new checkpointLocation"):
        query.turn()
    query.reader.stop()
    del query.given["stateful"]
    query.start()
    query.settled()
    assert query.out == [*((0, n) for n in range(5))] * 2
    assert "continues at the group's positions here" in caplog.text
    query.reader.stop()


def test_a_query_with_state_notices_that_its_group_was_deleted_and_created_again(
    make_topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """The new group delivers again what the state has. A query that runs meanwhile ends with the deletion."""
    orders = make_topic(1)
    orders.fill(5)
    query = Query(orders, stateful="true")
    query.until_idle()
    orders.fill(3)
    assert query.write_ahead(), "a batch that is not committed"
    with orders.connect() as marshal:
        admin = marshal.group(orders.group)
        admin.delete(force=True)
        admin.create()
        with pytest.raises(GroupDeleted):
            query.turn()
        query.reader.stop()
        for begin in (query.turn, lambda: query.reader.latestOffset(query.offset(0), ReadAllAvailable())):
            query.start()
            with pytest.raises(InvalidOption, match=r"was deleted and created again.*Take a new checkpointLocation$"):
                begin()
            query.reader.stop()
        fresh = Query(orders, stateful="true")
        fresh.settled()
        assert sorted(fresh.out) == sorted(orders.written), "a new checkpoint begins with the new group"
        fresh.reader.stop()
        admin.delete()
        admin.create()
    del query.given["stateful"]
    query.start()
    query.settled()
    assert set(query.out) == orders.written
    assert caplog.text.count("deleted and created again: the query continues at the group's positions here") == 1
    query.reader.stop()


def test_a_checkpoint_of_another_group_is_refused(make_topic: MakeTopic) -> None:
    """Sessions and epochs of one group, compared with those of another, made messages count as done that were not."""
    orders = make_topic(1)
    orders.fill(5)
    query = Query(orders, max_rows_per_batch=3)
    query.until_idle()
    query.reader.stop()
    first, last = query.offset(0), query.offset(1)
    query.given["group"] = f"{orders.group}-b"
    query.start()
    nameless = {name: value for name, value in last.items() if name != "g"}
    calls = [
        lambda: query.reader.latestOffset(last, ReadAllAvailable()),
        lambda: query.reader.latestOffset(nameless, ReadAllAvailable()),
        lambda: query.reader.partitions(query.reader.initialOffset(), first),  # a batch that was not committed
        lambda: query.reader.partitions(first, last),
    ]
    for call in calls:
        with pytest.raises(InvalidOption, match="take another checkpointLocation") as raised:
            call()
        assert (raised.value.option, raised.value.value) == ("group", f"{orders.group}-b")
        assert query.reader._member is None, "nothing is claimed, so no position of the group moves"
    assert repr(orders.group) in str(raised.value), "the way back to the checkpoint's own group"


def test_a_cluster_that_does_not_answer_is_waited_for(make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = make_topic(1)
    orders.fill(3)
    query = Query(orders)
    query.turn()
    member = query.member

    def silent(*_: Any) -> Any:
        raise ClusterUnreachable("a:1", "bounds", "gone")

    monkeypatch.setattr(member, "plan", silent)
    assert not query.turn()
    query.reader.prepareForTriggerAvailableNow()
    with pytest.raises(ClusterUnreachable):
        query.turn()
    query.reader.stop()


def test_a_log_that_does_not_accept_the_positions_ends_no_query(
    make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V6: in an outage Spark's next call waits some seconds for the log, and the query continues."""
    orders = make_topic(1)
    orders.fill(3)
    query = Query(orders)
    query.turn()
    orders.fill(3)

    def silent() -> Any:
        raise AckNotConfirmed(orders.group, (f"{orders.topic}:0@2",), 10.0, "an outage")

    with monkeypatch.context() as outage:
        outage.setattr(query.member.ranges, "flushing", silent)
        assert query.turn()
    query.until_idle()
    assert sorted(query.out) == sorted(orders.written)
    assert orders.positions() == {0: 6}
    query.reader.stop()


def test_a_reader_makes_nothing_before_it_is_used() -> None:
    """Spark also builds readers in processes that only plan. No broker listens at this address."""
    reader = DefaultSource(NEEDED).streamReader(None)  # type: ignore[arg-type]
    assert reader._member is None
    reader.commit({"b": 1, "r": {}})
    assert reader.reportLatestOffset() is None
    reader.stop()
    assert "value binary" in DefaultSource(NEEDED).schema()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group", ""),
        ("topics", ""),
        ("topics", " , "),
        ("bootstrap.servers", ""),
        ("max_rows_per_batch", "0"),
        ("max_rows_per_batch", "1e6"),
        ("delivery", "exactly_once"),
        ("start", "yesterday"),
        ("fast_reclaim", "maybe"),
        ("heartbeat_interval_s", "0.1"),
        ("max_claims", "-1"),
        ("read_timeout_s", "x"),
        ("groupid", "g"),
        ("path", "/x"),
        ("policy", "chaos"),
        ("topics_pattern", "t"),
        ("min_rows_per_batch", "1000001"),
        ("max_batch_delay_s", "5"),
        ("min_rows_per_batch", "-1"),
        ("kafka.group.id", "g"),
        ("topics", "a b"),
        ("coordination_partitions", "none"),
    ],
)
def test_a_bad_option_is_named_when_the_stream_is_loaded(name: str, value: str) -> None:
    with pytest.raises(InvalidOption, match=name.removeprefix("kafka.").removesuffix("s")):
        DefaultSource({**NEEDED, name: value}).schema()


def _backfill(options: dict[str, str]) -> None:
    plain = {name: value for name, value in options.items() if name != "group"}
    BackfillReader(BackfillOptions.of(plain)).partitions()


def _ranges(options: dict[str, str]) -> None:
    kept = {name: value for name, value in options.items() if name not in ("group", "topics")}
    reader = RangesReader(RangeOptions.of({**kept, "ranges": '[["t", 0, 0, 1, "", "id 0 1 "]]'}))
    list(reader.read(reader.partitions()[0]))


def _log(options: dict[str, str]) -> None:
    kept = {name: value for name, value in options.items() if name not in ("group", "topics")}
    state_reader(kept).partitions()


@pytest.mark.parametrize(
    "source", [lambda options: QueryMember(StreamOptions.of(options)), _backfill, _ranges, _log], ids=range(4)
)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kafka.no.such": "secret"}, r"option='kafka\.no\.such' is not allowed: .*leave it out"),
        ({"kafka.security.protocol": "quantum"}, r"kafka\.security\.protocol='quantum' is not allowed"),
        ({"kafka.enable.auto.commit": "true"}, r"kafka\.enable\.auto\.commit='true' is not allowed"),
    ],
)
def test_a_setting_that_is_refused_is_named_as_it_was_written(
    source: Callable[[dict[str, str]], object], given: dict[str, str], said: str
) -> None:
    """By every source that reads Kafka. No broker listens at this address."""
    with pytest.raises(InvalidOption, match=said) as raised:
        source({**NEEDED, **given})
    assert "secret" not in str(raised.value)


def test_options_reach_the_member() -> None:
    options = StreamOptions.of(
        {
            **NEEDED,
            "topics": "a, b",
            "delivery": "at_most_once",
            "max_claims": "3",
            "heartbeat_interval_s": "5",
            "fast_reclaim": "true",
            "kafka.security.protocol": "SSL",
        }
    )
    assert options.topics == ("a", "b")
    assert options.at_most_once
    assert options.consumer == {
        "delivery": "at_most_once",
        "max_claims": 3,
        "heartbeat_interval_s": 5.0,
        "fast_reclaim": True,
    }
    assert options.kafka == {"bootstrap.servers": "127.0.0.1:1", "security.protocol": "SSL"}


def test_a_schema_of_the_users_own_is_refused_before_a_query_reads() -> None:
    """Spark accepts it at load() without asking the source, and passes it when the query starts."""
    columns = "value,offset"
    source = DefaultSource({**NEEDED, "columns": columns})
    own = StructType([StructField("value", BinaryType()), StructField("offset", LongType())])
    assert source.streamReader(own)._member is None
    with pytest.raises(InvalidOption, match=r"leave \.schema\(\) out"):
        source.streamReader(StructType([StructField("value", StringType())]))


def test_topics_that_match_a_pattern_are_found_while_the_query_runs(
    make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read from their beginning, even if the group began at the end, because no start could name them. Nothing
    is lost or read twice meanwhile.
    """
    monkeypatch.setattr(stream_source, "TOPICS_CHECK_S", 0.0)
    orders = make_topic(1)
    orders.fill(3)
    query = Query(orders, topics_pattern=f"{orders.topic}*", start="latest")
    query.until_idle()
    orders.fill(4)
    query.until_idle()
    old, orders.topic = orders.topic, f"{orders.topic}-new"
    query.member.marshal._context.admin.topic_admin().create(orders.topic, 1, None, {}, False)
    orders.fill(5)
    until(query.turn, "the topic is found")
    query.until_idle()
    assert sorted(query.out) == sorted([(0, at) for at in range(3, 7)] + [(0, at) for at in range(5)])
    orders.topic = old
    orders.fill(1)
    query.until_idle()
    assert query.out[-1] == (0, 7)
    query.reader.stop()


def test_a_pattern_that_matches_nothing_is_refused(make_topic: MakeTopic) -> None:
    query = Query(make_topic(1), topics_pattern="no-such-topic")
    with pytest.raises(InvalidOption, match="topics_pattern='no-such-topic'"):
        query.turn()


def test_a_small_batch_waits_for_more_rows_but_not_too_long(make_topic: MakeTopic) -> None:
    """Spark's minOffsetsPerTrigger and maxTriggerDelay. The first batch goes at once, and a query that ends waits for
    nothing.
    """
    orders = make_topic(1)
    query = Query(orders, min_rows_per_batch=5, max_batch_delay_s=3600)
    assert not query.turn()
    orders.fill(3)
    assert query.turn()
    orders.fill(4)
    assert not query.turn()
    orders.fill(1)
    assert query.turn()
    assert len(query.out) == 8
    orders.fill(2)
    assert not query.turn()
    member = query.member
    member._last_batch_s -= 3600
    assert query.turn()
    orders.fill(1)
    assert not query.turn()
    query.reader.prepareForTriggerAvailableNow()
    assert query.turn()
    assert sorted(query.out) == sorted(orders.written)
    query.reader.stop()


def test_the_checkpoint_of_another_source_is_refused_and_its_offsets_can_be_used(make_topic: MakeTopic) -> None:
    orders = make_topic(2)
    orders.fill(9)
    offsets = {orders.topic: {"0": 4, "1": 7}}
    reader = Query(orders).reader
    reader.prepareForTriggerAvailableNow()
    planned = {orders.topic: {"0": 9, "1": 9}}  # by a batch that has not been committed
    for call in (lambda: reader.latestOffset(offsets, ReadAllAvailable()), lambda: reader.partitions(offsets, planned)):
        with pytest.raises(InvalidOption, match=r"checkpointLocation=.*as startingOffsets") as raised:
            call()
        assert raised.value.value == json.dumps(offsets)
        assert reader._member is None, "a claim would give the group positions, and then `start` would be ignored"
    query = Query(orders, start=json.dumps(offsets))
    query.until_idle()
    assert sorted(query.out) == [(0, at) for at in range(4, 9)] + [(1, 7), (1, 8)]
    query.reader.stop()


def test_a_batch_read_with_a_group_gets_advice() -> None:
    with pytest.raises(MarshalError, match="claimed_batches"):
        DefaultSource(NEEDED).reader(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "rows"), [(ReadMaxRows(3), 3), (ReadAllAvailable(), 9)])
def test_limits_of_rows_are_kept(make_topic: MakeTopic, limit: Any, rows: int) -> None:
    orders = make_topic(1)
    orders.fill(9)
    query = Query(orders)
    start = query.reader.initialOffset()
    ((_, _, first, to),) = query.reader.latestOffset(start, limit)["r"].values()
    assert to - first == rows
    with pytest.raises(InvalidOption, match="ReadMaxFiles"):
        query.reader.latestOffset(start, ReadMaxFiles(1))
    query.reader.stop()
