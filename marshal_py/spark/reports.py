"""Reports on the coordination log: questions in SQL over its tables, and their answers. Must not fold itself.

The questions are data. docs/spark-reference.md names them, and a test keeps the two equal.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession, functions

from marshal_py.errors import InvalidOption
from marshal_py.history.tables import TABLES
from marshal_py.spark import log_tables

PREFIX: Final = "marshal_"


class Question(NamedTuple):
    """A question and its SQL over the views of `views`; `:at` is a time that the caller gives."""

    title: str
    sql: str


QUESTIONS: Final = {
    "owners": Question(
        "Who owned what at a time",
        """
SELECT group, topic, partition, client, session, from_time, to_time
FROM marshal_intervals
WHERE from_time <= :at AND (to_time IS NULL OR to_time > :at)
ORDER BY group, topic, partition
""",
    ),
    "take_overs": Question(
        "Take-overs per day: how long members lived from the dead owner's last sign of life to the new owner's claim",
        """
SELECT to_date(to_time) AS day, group, count(*) AS take_overs,
       round(percentile(seconds, 0.5), 3) AS median_s, round(percentile(seconds, 0.99), 3) AS p99_s,
       round(max(seconds), 3) AS longest_s
FROM (SELECT *, take_over_ms / 1000 AS seconds FROM marshal_gaps)
WHERE cause = 'evict' AND next_client IS NOT NULL
GROUP BY day, group
ORDER BY day, group
""",
    ),
    "gaps": Question(
        "The longest times without an owner that have ended, counted while members lived and the group was not paused",
        """
SELECT group, topic, partition, from_time, to_time, cause, client AS before, next_client AS after,
       round(lived_ms / 1000, 3) AS seconds
FROM marshal_gaps
WHERE lived_ms > 0 AND to_time IS NOT NULL
ORDER BY seconds DESC, from_time
LIMIT 20
""",
    ),
    "races": Question(
        "Claims that lost to another's, per day and client",
        """
SELECT to_date(time) AS day, group, client, count(*) AS lost, count(DISTINCT topic, partition) AS partitions,
       round(percentile((unix_millis(time) - unix_millis(winner_time)) / 1000, 0.5), 3) AS median_late_s
FROM marshal_races
GROUP BY day, group, client
ORDER BY lost DESC, day, group, client
""",
    ),
    "redelivered": Question(
        "What was delivered again: at least so many messages from each position on",
        """
SELECT i.to_time AS time, i.group, i.topic, i.partition, i.client, i.ended AS why, i.to_position AS from_position,
       i.in_flight AS messages
FROM marshal_intervals i JOIN marshal_sessions s ON s.log = i.log AND s.session = i.session
WHERE i.ended IS NOT NULL AND i.in_flight > 0 AND s.delivery = 'at_least_once'
UNION ALL
SELECT time, group, topic, partition, by, 'moved back', to_position, from_position - to_position
FROM marshal_moves
WHERE to_position < from_position
ORDER BY time, topic, partition
""",
    ),
    "lost": Question(
        "Messages that no owner was given, or whose batch was not committed",
        """
WITH known AS (SELECT min(offset) AS number, min(time) AS time, group, topic, partition, generation,
                      min_by(client, offset) AS client, cause, from_position, to_position
               FROM marshal_lost
               GROUP BY group, topic, partition, generation, cause, from_position, to_position),
     -- what of a range is listed already, in the order of the offsets; at its end nothing
     listed AS (SELECT l.*, o.from_position AS cut_from, o.to_position AS cut_to
                FROM known l JOIN known o ON (o.group, o.topic, o.partition, o.generation)
                                           = (l.group, l.topic, l.partition, l.generation)
                WHERE l.cause = 'uncommitted' AND o.from_position < l.to_position AND l.from_position < o.to_position
                  AND (o.cause = 'amo_lost' OR (o.cause = 'uncommitted' AND o.number < l.number))
                UNION ALL
                SELECT *, to_position AS cut_from, to_position AS cut_to FROM known),
     parts AS (SELECT *, greatest(from_position, max(cut_to) OVER before) AS start FROM listed
               WINDOW before AS (PARTITION BY group, topic, partition, generation, cause, from_position, to_position
                                 ORDER BY cut_from, cut_to ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
SELECT time, group, topic, partition, client, cause, start AS from_position, cut_from AS to_position,
       cut_from - start AS messages
FROM parts
WHERE start < cut_from
ORDER BY time, topic, partition, from_position
""",
    ),
    "unfair": Question(
        "Partitions that a client held on average while it lived, against the average of its group",
        """
WITH ends AS (SELECT max(time) AS end FROM marshal_standings),
     held AS (SELECT group, client, sum(unix_millis(coalesce(to_time, end)) - unix_millis(from_time)) AS held_ms
              FROM marshal_intervals CROSS JOIN ends WHERE partition >= 0 GROUP BY group, client),
     lived AS (SELECT group, client, sum(unix_millis(coalesce(to_time, end)) - unix_millis(from_time)) AS lived_ms
               FROM marshal_sessions CROSS JOIN ends GROUP BY group, client HAVING lived_ms > 0)
SELECT group, client, round(coalesce(held_ms, 0) / lived_ms, 2) AS partitions,
       round(sum(coalesce(held_ms, 0)) OVER same_group / sum(lived_ms) OVER same_group, 2) AS of_group
FROM lived LEFT JOIN held USING (group, client)
WINDOW same_group AS (PARTITION BY group)
ORDER BY abs(partitions - of_group) DESC, group, client
""",
    ),
    "lag": Question(
        "The lag per hour, as heartbeats named it",
        """
SELECT date_trunc('HOUR', time) AS hour, group, topic, max(lag) AS highest, round(avg(lag), 1) AS average,
       max_by(partition, lag) AS worst_partition
FROM marshal_positions
WHERE cause = 'heartbeat'
GROUP BY hour, group, topic
ORDER BY hour, group, topic
""",
    ),
    "pauses": Question(
        "Pauses: when, for how long, by whom and why",
        """
SELECT group, from_time, to_time, round((unix_millis(to_time) - unix_millis(from_time)) / 1000, 3) AS seconds,
       renewals, by, reason, ended
FROM marshal_pauses
ORDER BY from_time, group
""",
    ),
    "moves": Question(
        "Positions that admins moved",
        """
SELECT time, group, topic, partition, from_position, to_position, by
FROM marshal_moves
ORDER BY time, topic, partition
""",
    ),
}


def views(folded: DataFrame, prefix: str = PREFIX) -> list[str]:
    """Creates a temporary view for each table of a wide DataFrame, which format("marshal-state") gives.

    Returns the views' names: `prefix` and the table's name. Call `folded.persist()` first, or every query folds the log
    again. Raises InvalidOption if `folded` is not wide.
    """
    if log_tables.WHICH not in folded.columns:
        raise InvalidOption("folded", folded.columns, "the wide DataFrame of several tables, with a column `table`")
    made = []
    for name in TABLES:
        own = list(log_tables.columns([name]))
        if set(own) <= set(folded.columns):
            part = folded.where(functions.col(log_tables.WHICH) == name).select(*own)
            part.createOrReplaceTempView(prefix + name)
            made.append(prefix + name)
    return made


@contextmanager
def _views_of(folded: DataFrame) -> Iterator[str]:
    """Creates the views of one fold, for the time of the `with` block, and yields their prefix. The fold stays cached
    for that time."""
    prefix = f"{PREFIX}{uuid.uuid4().hex}_"  # so that the user's views remain
    try:
        views(folded.persist(), prefix)
        yield prefix
    finally:
        for name in TABLES:
            folded.sparkSession.catalog.dropTempView(prefix + name)
        folded.unpersist()


def report(
    spark: SparkSession, source: Mapping[str, str], names: Sequence[str] = (), at: datetime | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Answers the questions of these names, by default all. "owners" needs `at`, and is left out if `at` is None.

    `source`: options of format("marshal-state"), which are bootstrap.servers or path (of a dump), group, since, until.
    Returns, for each question, rows as dictionaries; times have a zone. Raises InvalidOption.
    """
    wanted = check_questions(names, at)
    folded = spark.read.format("marshal-state").options(**source).load()
    with _views_of(folded) as prefix:
        return {name: _answer(spark, name, at, prefix).toArrow().to_pylist() for name in wanted}


def _answer(spark: SparkSession, name: str, at: datetime | None, prefix: str) -> DataFrame:
    sql = QUESTIONS[name].sql.replace(PREFIX, prefix)
    return spark.sql(sql, args={"at": at}) if ":at" in sql else spark.sql(sql)


def check_questions(names: Sequence[str], at: datetime | None) -> list[str]:
    """Returns the questions of these names, or all, without those that need a time if `at` is None. Raises
    InvalidOption."""
    for name in names:
        if name not in QUESTIONS:
            raise InvalidOption("questions", name, f"of {', '.join(QUESTIONS)}")
        if ":at" in QUESTIONS[name].sql and at is None:
            raise InvalidOption("at", None, f"a time, for the question {name!r}", given=False)
    return list(names) or [name for name, asked in QUESTIONS.items() if at is not None or ":at" not in asked.sql]
