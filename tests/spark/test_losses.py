"""At-most-once mode: a query that loses messages with its process notes them in the log, once. Without a JVM."""

from __future__ import annotations

from marshal_py.protocol.member.advisory import UNCOMMITTED
from marshal_py.protocol.wire.records import Note
from tests.spark.kafka_topic import KafkaTopic, MakeTopic
from tests.spark.test_stream_source import Query
from tests.support.client_fixtures import BackgroundConsumer, until


def noted_losses(orders: KafkaTopic) -> dict[int, list[tuple[int, int]]]:
    """[from, to) of the losses that the log notes, by partition, in the order of the log."""
    found: dict[int, list[tuple[int, int]]] = {}
    for note in orders.accepted(Note):
        if note.kind == UNCOMMITTED:
            found.setdefault(note.partition, []).append((note.from_, note.to))
    return found


def test_at_most_once_a_process_that_ends_during_a_batch_notes_the_loss(make_topic: MakeTopic) -> None:
    """The process outlives the JVM. A committed batch is no loss, and one that was only planned comes again."""
    orders = make_topic(2)
    orders.fill(10)
    query = Query(orders, delivery="at_most_once", max_rows_per_batch=8)
    query.turn()
    query.reader.commit(query.offset(0))
    query.reader.stop()
    assert noted_losses(orders) == {}
    query.start()
    until(query.write_ahead, "the next batch is planned")
    query.reader.stop()
    assert noted_losses(orders) == {}
    query.start()
    query.turn()  # that batch is empty: it may have been granted
    until(query.write_ahead, "the ranges are planned again")
    lost = query.read()
    assert len(lost) == 8
    query.reader.stop()
    assert noted_losses(orders) == {0: [(4, 8)], 1: [(4, 8)]}
    query.start()
    query.settled()
    assert sorted([*query.out, *lost]) == sorted(orders.written)
    query.reader.stop()
    assert noted_losses(orders) == {0: [(4, 8)] * 2, 1: [(4, 8)] * 2}, "by both processes"


def test_at_most_once_the_next_process_notes_the_loss_of_a_killed_one(make_topic: MakeTopic) -> None:
    """The checkpoint has the plan, and the group's position says how much of it was granted."""
    orders = make_topic(2)
    orders.fill(10)
    query = Query(orders, delivery="at_most_once", max_rows_per_batch=8)
    query.turn()
    until(query.write_ahead, "the next batch is planned")
    query.crash()
    query.turn()
    assert noted_losses(orders) == {}, "planned is not granted"
    until(query.write_ahead, "the ranges are planned again")
    lost = query.read()
    query.crash()
    query.settled()
    until(lambda: noted_losses(orders) == {0: [(4, 8)], 1: [(4, 8)]}, "the loss is noted")
    assert sorted([*query.out, *lost]) == sorted(orders.written)
    query.reader.stop()
    assert noted_losses(orders) == {0: [(4, 8)], 1: [(4, 8)]}, "once"


def test_at_most_once_without_a_checkpoint_the_next_member_says_what_may_be_lost(make_topic: MakeTopic) -> None:
    """F3.3: nobody knows the plan any more, but the log knows what was granted to the session that has ended."""
    orders = make_topic(2)
    orders.fill(10)
    query = Query(orders, delivery="at_most_once", max_rows_per_batch=8)
    query.turn()
    until(query.write_ahead, "the next batch is planned")
    lost = query.read()
    query.crash()
    query.offsets, query.commits = [], 0
    query.settled()
    assert sorted([*query.out, *lost]) == sorted(orders.written)
    events = [one for one in query.member.planner._driver.events if one.kind == "amo_lost"]
    assert {*lost} <= {(one.partition, offset) for one in events for offset in range(one.offset, one.to)}
    query.reader.stop()


def test_at_most_once_no_loss_is_noted_if_another_member_may_have_read_it(make_topic: MakeTopic) -> None:
    """Only the next owner of a partition can tell what the last one was granted."""
    orders = make_topic(1)
    orders.fill(10)
    query = Query(orders, delivery="at_most_once")
    assert query.write_ahead()
    query.crash()
    with (
        orders.connect() as marshal,
        orders.consumer(marshal, delivery="at_most_once") as other,
        BackgroundConsumer(other) as keeper,
    ):
        until(lambda: len(keeper.seen) == 10, "another member has read it all")
    orders.fill(5)
    query.settled()
    assert len(query.out) == 5
    query.reader.stop()
    assert noted_losses(orders) == {}


def test_at_most_once_a_batch_that_outlives_a_membership_is_not_lost(make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(10)
    query = Query(orders, delivery="at_most_once", handler_timeout_s=1.0)
    assert query.write_ahead()
    rows = query.read()
    member = query.reader._member
    assert member is not None
    until(lambda: member.planner._driver.ended, "the member has left")
    query.finish(rows)
    orders.fill(5)
    query.settled()
    assert sorted(query.out) == sorted(orders.written)
    query.until_idle()
    query.reader.stop()
    assert noted_losses(orders) == {}
