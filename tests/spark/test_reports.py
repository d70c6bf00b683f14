"""Reports: their answers against the rows of a fold in one process."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from marshal_py.errors import InvalidOption
from marshal_py.spark import report, views
from marshal_py.spark.reports import QUESTIONS
from tests.spark.test_log_tables import PARTITIONS, ROWS, write_dump
from tests.support.logs import folded, groups_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOON = datetime(2025, 11, 21, 7, 0, tzinfo=UTC)
TABLES = folded(ROWS, PARTITIONS)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dump(tmp_path_factory.mktemp("dumps") / "all.dump", ROWS)


@pytest.fixture(scope="module")
def answers(spark: SparkSession, dump: str) -> dict[str, list[dict[str, Any]]]:
    return report(spark, {"path": dump}, at=NOON)


def test_a_report_leaves_the_users_views(spark: SparkSession, dump: str) -> None:
    """Of the names that `views` gives by default. It replaced and then dropped them."""
    session = spark.newSession()  # without the views of other tests
    session.range(3).createOrReplaceTempView("marshal_moves")
    assert report(session, {"path": dump}, ["moves"])["moves"]
    assert session.table("marshal_moves").count() == 3
    assert [row.tableName for row in session.sql("SHOW TABLES LIKE 'marshal_*'").collect()] == ["marshal_moves"]


def test_every_question_has_an_answer(answers: dict[str, list[dict[str, Any]]]) -> None:
    assert answers.keys() == QUESTIONS.keys()
    assert all(answers.values()), "a question that nothing answers is not tested here"


def test_owners_at_a_time(answers: dict[str, list[dict[str, Any]]]) -> None:
    ms = NOON.timestamp() * 1000
    held = [row for row in TABLES["intervals"] if row.from_time_ms <= ms and (row.to_time_ms or ms + 1) > ms]
    assert [(row["group"], row["topic"], row["partition"], row["client"]) for row in answers["owners"]] == sorted(
        (row.group, row.topic, row.partition, row.client) for row in held
    )


def test_take_overs_count_members_time_from_the_last_sign_of_life(answers: dict[str, list[dict[str, Any]]]) -> None:
    took = [row for row in TABLES["gaps"] if row.cause == "evict" and row.next_client is not None]
    assert sum(row["take_overs"] for row in answers["take_overs"]) == len(took)
    longest = max(row.take_over_ms for row in took) / 1000
    assert max(row["longest_s"] for row in answers["take_overs"]) == longest
    assert longest < max(row.to_time_ms - row.last_sign_time_ms for row in took) / 1000, (
        "some had no member that could take over"
    )


def test_gaps_are_the_longest_first(answers: dict[str, list[dict[str, Any]]]) -> None:
    spans = sorted(
        (row.lived_ms / 1000 for row in TABLES["gaps"] if row.lived_ms and row.to_time_ms is not None), reverse=True
    )
    assert [row["seconds"] for row in answers["gaps"]] == spans[:20]


def test_races_losses_moves_and_pauses_are_all_there(answers: dict[str, list[dict[str, Any]]]) -> None:
    assert sum(row["lost"] for row in answers["races"]) == len(TABLES["races"])
    for name in ("moves", "pauses"):
        assert len(answers[name]) == len(TABLES[name])
    losses = {
        (row.group, row.topic, row.partition, row.generation, row.cause, row.from_position, row.to_position)
        for row in TABLES["lost"]
    }
    assert len(answers["lost"]) == len(losses), "a loss that two owners noted counts once"


Loss = tuple[Any, ...]


def loss(offset: int, first: int, to: int, cause: str, partition: int = 0, generation: int = 0) -> Loss:
    return 0, offset, NOON, "g", "t", partition, f"c{offset}", first, to, cause, generation


def listed(spark: SparkSession, rows: list[Loss]) -> list[Any]:
    """The answer to the question "lost", if the table has these rows."""
    schema = "log INT, offset LONG, time TIMESTAMP, group STRING, topic STRING, partition INT, client STRING, "
    schema += "from_position LONG, to_position LONG, cause STRING, generation LONG"
    spark.createDataFrame(rows, schema).createOrReplaceTempView("marshal_lost")
    try:
        return spark.sql(QUESTIONS["lost"].sql).collect()
    finally:
        spark.catalog.dropTempView("marshal_lost")


def test_each_lost_message_is_listed_once(spark: SparkSession) -> None:
    """Whatever ranges two causes and several processes report, against a count offset by offset."""
    random, rows = Random(7), list[Loss]()
    for partition in range(60):
        told = 0  # what amo_lost names does not overlap
        for number in range(random.randrange(6)):
            cause = random.choice(("amo_lost", "uncommitted", "uncommitted"))
            start = told + random.randrange(3) if cause == "amo_lost" else random.randrange(20)
            to = start + random.randrange(1, 9)
            told = to if cause == "amo_lost" else told
            rows.append(loss(1_000 * partition + number, start, to, cause, partition))
    found = listed(spark, rows)
    names = [(one.partition, at, one.cause) for one in found for at in range(one.from_position, one.to_position)]
    assert len({name[:2] for name in names}) == len(names), "none twice"
    given = {(row[5], at, row[9]) for row in rows for at in range(row[7], row[8])}
    amo_lost = {name[:2] for name in given if name[2] == "amo_lost"}
    assert set(names) == {name for name in given if name[2] == "amo_lost" or name[:2] not in amo_lost}, "amo_lost wins"
    assert all(one.messages == one.to_position - one.from_position > 0 for one in found)


def test_a_loss_that_two_causes_report_is_listed_once(spark: SparkSession) -> None:
    """`amo_lost` wins. A part of a range that it does not hold is a loss of its own."""
    rows = [
        loss(1, 0, 100, "amo_lost"),
        loss(2, 0, 100, "uncommitted"),
        loss(3, 20, 60, "uncommitted"),
        loss(4, 0, 100, "uncommitted", generation=1),
        loss(5, 100, 130, "uncommitted"),
        loss(6, 100, 130, "uncommitted"),
        loss(7, 0, 100, "uncommitted", partition=1),
        loss(8, 0, 100, "offset_lost", partition=1),
        loss(9, 50, 100, "amo_lost", partition=2),
        loss(10, 40, 120, "uncommitted", partition=2),
    ]
    assert sorted((one.client, one.cause, one.messages) for one in listed(spark, rows)) == [
        ("c1", "amo_lost", 100),
        ("c10", "uncommitted", 10),
        ("c10", "uncommitted", 20),
        ("c4", "uncommitted", 100),
        ("c5", "uncommitted", 30),
        ("c7", "uncommitted", 100),
        ("c8", "offset_lost", 100),
        ("c9", "amo_lost", 50),
    ]


def test_redelivered_messages(answers: dict[str, list[dict[str, Any]]]) -> None:
    """In at-most-once mode nothing is redelivered, so figures of such groups do not count."""
    at_least_once = {(row.log, row.session) for row in TABLES["sessions"] if row.delivery == "at_least_once"}
    again = [row for row in TABLES["intervals"] if row.ended is not None and row.in_flight]
    assert any(row.ended == "release" for row in again)
    counted = [row for row in again if (row.log, row.session) in at_least_once]
    back = [row for row in TABLES["moves"] if row.from_position is not None and row.to_position < row.from_position]
    assert len(counted) < len(again)
    assert back
    assert len(answers["redelivered"]) == len(counted) + len(back)
    assert sum(row["messages"] for row in answers["redelivered"]) == (
        sum(row.in_flight for row in counted) + sum(row.from_position - row.to_position for row in back)
    )


def test_fairness_is_in_partitions_while_alive(answers: dict[str, list[dict[str, Any]]]) -> None:
    ends = max(row.time_ms for row in TABLES["standings"])
    name = groups_of(0, PARTITIONS)[0]

    def total(table: str) -> int:
        return sum(
            (ends if row.to_time_ms is None else row.to_time_ms) - row.from_time_ms
            for row in TABLES[table]
            if row.group == name and getattr(row, "partition", 0) >= 0
        )

    (of_group,) = {row["of_group"] for row in answers["unfair"] if row["group"] == name}
    assert of_group == pytest.approx(total("intervals") / total("sessions"), abs=0.011)


def test_lag_is_per_hour(answers: dict[str, list[dict[str, Any]]]) -> None:
    beats = [row for row in TABLES["positions"] if row.cause == "heartbeat"]
    assert max(row["highest"] for row in answers["lag"]) == max(row.lag for row in beats)
    assert all(row["hour"].minute == row["hour"].second == 0 for row in answers["lag"])


def test_bad_questions_are_named(spark: SparkSession) -> None:
    with pytest.raises(InvalidOption, match="questions='why' is not allowed: of owners, take_overs"):
        report(spark, {"path": "x"}, ["why"])
    with pytest.raises(InvalidOption, match="no at given: a time, for the question 'owners'"):
        report(spark, {"path": "x"}, ["owners"])
    with pytest.raises(InvalidOption, match="with a column `table`"):
        views(spark.range(1))
