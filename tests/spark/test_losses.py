"""At most once: what a query loses with its process is told in the log, once, and nothing else is. Without a JVM."""

from __future__ import annotations

from collections.abc import Callable

from marshal_py.protocol.advisory import UNCOMMITTED
from marshal_py.protocol.records import Note
from tests.spark.kafka_topic import Place
from tests.spark.test_stream_source import Query
from tests.support.client_fixtures import BackgroundConsumer, until

MakePlace = Callable[[int], Place]


def told_as_lost(here: Place) -> dict[int, list[tuple[int, int]]]:
    """[from, to) of the losses that the log tells, by partition, in the order of the log."""
    found: dict[int, list[tuple[int, int]]] = {}
    for note in here.accepted(Note):
        if note.kind == UNCOMMITTED:
            found.setdefault(note.partition, []).append((note.from_, note.to))
    return found


def test_at_most_once_a_process_that_ends_in_a_batch_tells_the_loss(place: MakePlace) -> None:
    """The process outlives the JVM. What it knows to be committed is no loss; what was only planned comes again."""
    here = place(2)
    here.fill(10)
    query = Query(here, delivery="at_most_once", max_rows_per_batch=8)
    query.turn()
    query.reader.commit(query.offset(0))
    query.reader.stop()
    assert told_as_lost(here) == {}
    query.start()
    until(query.write_ahead, "the next batch is planned")
    query.reader.stop()
    assert told_as_lost(here) == {}
    query.start()
    query.turn()  # that batch is empty: it may have been granted
    until(query.write_ahead, "the ranges are planned again")
    lost = query.read()
    assert len(lost) == 8
    query.reader.stop()
    assert told_as_lost(here) == {0: [(4, 8)], 1: [(4, 8)]}
    query.start()
    query.settled()
    assert sorted([*query.out, *lost]) == sorted(here.written)
    query.reader.stop()
    assert told_as_lost(here) == {0: [(4, 8)] * 2, 1: [(4, 8)] * 2}, "by both that know it"


def test_at_most_once_a_loss_of_a_killed_process_is_told_by_the_next(place: MakePlace) -> None:
    """Nobody outlived it: the plan is in the checkpoint, and the position says what was granted of it."""
    here = place(2)
    here.fill(10)
    query = Query(here, delivery="at_most_once", max_rows_per_batch=8)
    query.turn()
    until(query.write_ahead, "the next batch is planned")
    query.crash()
    query.turn()
    assert told_as_lost(here) == {}, "planned is not granted"
    until(query.write_ahead, "the ranges are planned again")
    lost = query.read()
    query.crash()
    query.settled()
    until(lambda: told_as_lost(here) == {0: [(4, 8)], 1: [(4, 8)]}, "the loss is told")
    assert sorted([*query.out, *lost]) == sorted(here.written)
    query.reader.stop()
    assert told_as_lost(here) == {0: [(4, 8)], 1: [(4, 8)]}, "once"


def test_at_most_once_a_loss_that_another_member_may_have_read_is_not_told(place: MakePlace) -> None:
    """What an earlier owner was granted is known only to the next one."""
    here = place(1)
    here.fill(10)
    query = Query(here, delivery="at_most_once")
    assert query.write_ahead()
    query.crash()
    with (
        here.connect() as marshal,
        here.consumer(marshal, delivery="at_most_once") as other,
        BackgroundConsumer(other) as keeper,
    ):
        until(lambda: len(keeper.seen) == 10, "another member has read it all")
    here.fill(5)
    query.settled()
    assert len(query.out) == 5
    query.reader.stop()
    assert told_as_lost(here) == {}


def test_at_most_once_a_batch_that_outlives_a_membership_is_not_lost(place: MakePlace) -> None:
    here = place(1)
    here.fill(10)
    query = Query(here, delivery="at_most_once", handler_timeout_s=1.0)
    assert query.write_ahead()
    rows = query.read()
    life = query.reader._life
    assert life is not None
    until(lambda: life.consumer._driver.ended, "the member has left")
    query.finish(rows)
    here.fill(5)
    query.settled()
    assert sorted(query.out) == sorted(here.written)
    query.until_idle()
    query.reader.stop()
    assert told_as_lost(here) == {}
