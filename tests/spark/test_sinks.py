"""All tables that hold every message once: they leave out rows that are there, fence, and notice other writers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from marshal_py.errors import InvalidOption, LedgerMoved, PartitionError, WriteFenced
from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.spark.guards import Span
from tests.spark.targets import KINDS, Rows, Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

INCARNATION = bytes(range(16))
ORDERS = TopicPartition("orders", 0)
OLD, NEW = "idOfTheOldTopic1234567", "idOfTheNewTopic1234567"


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return KINDS[request.param](tmp_path)


def span(epoch: int, start: int, to: int, topic_id: str = OLD, partition: int = 0) -> dict[TopicPartition, Span]:
    return {TopicPartition("orders", partition): Span(Token(INCARNATION, epoch), start, to, topic_id)}


def write(target: Target, entry: Any) -> None:
    """Writes as a service does."""
    with entry:
        ((tp, one),) = entry.spans.items()
        target.store(entry, [(tp.partition, o) for o in range(one.start, one.to) if entry.is_new(tp, o)])
        entry.commit()


def test_rows_that_come_again_are_left_out(target: Target) -> None:
    """From the same owner and from the next one, in batches with other bounds."""
    for epoch, start, to in ((5, 0, 10), (5, 0, 10), (9, 5, 15), (9, 2, 4), (9, 15, 20)):
        write(target, target.table.begin(span(epoch, start, to)))
    assert target.rows() == [(0, offset) for offset in range(20)]


def test_an_older_owner_is_fenced_off(target: Target) -> None:
    write(target, target.table.begin(span(9, 0, 5)))
    with pytest.raises(WriteFenced, match=r"rows of orders:0 under token .*0009, and this writer's .*0005"):
        target.table.begin(span(5, 5, 10))
    write(target, target.table.begin(span(5, 0, 2, partition=1)))
    assert target.rows() == [*((0, offset) for offset in range(5)), (1, 0), (1, 1)]


def test_uncommitted_rows_do_not_count(target: Target) -> None:
    entry = target.table.begin(span(5, 0, 3))
    target.store(entry, [(0, 0), (0, 1), (0, 2)])
    entry.close()
    assert target.rows() == []
    write(target, target.table.begin(span(5, 0, 3)))
    assert len(target.rows()) == 3


def test_a_topic_that_was_created_again_starts_at_zero(target: Target) -> None:
    """Its offsets start at 0 again: the old topic's positions do not apply."""
    write(target, target.table.begin(span(5, 0, 10)))
    write(target, target.table.begin(span(9, 0, 3, NEW)))
    assert target.rows() == sorted([*((0, o) for o in range(10)), *((0, o) for o in range(3))])
    write(target, target.table.begin(span(9, 0, 3, NEW)))
    assert len(target.rows()) == 13
    with pytest.raises(WriteFenced):
        target.table.begin(span(5, 0, 10, OLD))


@pytest.mark.parametrize("target", [kind for kind in KINDS if kind != "database"], indirect=True)
def test_a_writer_that_was_overtaken_must_begin_again(target: Target) -> None:
    """An earlier owner's batch was committed first: the later owner must not write its rows again."""
    late = target.table.begin(span(9, 0, 15))
    write(target, target.table.begin(span(5, 0, 10)))
    with pytest.raises(LedgerMoved):
        write(target, late)
    write(target, target.table.begin(span(9, 0, 15)))
    assert target.rows() == [(0, offset) for offset in range(15)]


@pytest.mark.parametrize("target", [kind for kind in KINDS if kind != "database"], indirect=True)
def test_writers_of_other_partitions_do_not_hinder_each_other(target: Target) -> None:
    """Not a database: there writers may wait for each other's rows, with SQLite for the whole file."""
    write(target, target.table.begin(span(3, 0, 1, partition=2)))
    mine = target.table.begin(span(5, 0, 3))
    write(target, target.table.begin(span(6, 100, 102, partition=1)))
    write(target, mine)
    assert target.rows() == [(0, 0), (0, 1), (0, 2), (1, 100), (1, 101), (2, 0)]


class Cluster:
    """A TopicIds whose topic is created again after `old` calls of `ask`."""

    def __init__(self, old: int) -> None:
        self.old = old

    def ask(self) -> dict[str, str]:
        self.old -= 1
        return {"orders": OLD if self.old >= 0 else NEW}


def test_a_query_asks_the_cluster_for_topic_ids(spark: SparkSession, tmp_path: Path) -> None:
    """It asks before and after the rows are read. If the answers differ, it is unknown whose the rows are: none is
    written."""
    target = KINDS["database"](tmp_path)

    def handle(df: DataFrame, entry: Any) -> None:
        target.store(entry, [(row.partition, row.offset) for row in df.collect()])

    sink = target.table.sink(handle, Cluster(old=3))
    sink(batch(spark, 5, [(0, 0), (0, 1)]), 0)
    with pytest.raises(PartitionError, match="created again while the batch was read"):
        sink(batch(spark, 5, [(0, 2)]), 1)
    sink(batch(spark, 9, [(0, 0)]), 0)
    assert target.rows() == [(0, 0), (0, 0), (0, 1)]
    with pytest.raises(InvalidOption, match="rows of orders"):
        target.table.sink(handle, Unrelated())(batch(spark, 9, [(0, 1)]), 1)


class Unrelated(Cluster):
    def __init__(self) -> None:
        super().__init__(0)

    def ask(self) -> dict[str, str]:
        return {"payments": NEW}


class Killed(Exception):
    """The driver died here."""


def batch(spark: SparkSession, epoch: int, rows: Rows) -> DataFrame:
    token = str(Token(INCARNATION, epoch))
    return spark.createDataFrame(
        [("orders", p, o, token, OLD, b"x") for p, o in rows],
        "topic string, partition int, offset bigint, token string, topic_id string, value binary",
    )


def test_a_sink_that_dies_at_any_point_writes_once(spark: SparkSession, target: Target) -> None:
    """Before its rows count, and after. The batch comes again: the same with its checkpoint, another one without it."""

    def die() -> None:
        raise Killed

    first = [(0, 0), (0, 1), (0, 2), (1, 0)]
    with pytest.raises(Killed):
        target.sink(die)(batch(spark, 5, first), 0)
    assert target.rows() == []
    target.sink(lambda: None)(batch(spark, 5, first), 0)
    assert target.rows() == first, "and then Spark's own commit did not come"
    with pytest.raises(Killed):
        target.sink(die)(batch(spark, 7, [*first, (0, 3), (1, 1)]), 0)
    target.sink(lambda: None)(batch(spark, 7, [*first, (0, 3), (1, 1)]), 0)
    target.sink(lambda: None)(batch(spark, 5, [(0, 3), (0, 4), (2, 0)]), 1)
    assert target.rows() == sorted([*first, (0, 3), (1, 1), (2, 0)]), "an older owner has its own partition alone"
