"""Claimed ranges read by Spark's own Kafka source, for `claimed_batches(..., reader="jvm")`. Must not claim.

Rows then never pass through Python, and Spark optimises as for any of its own sources. The session has to bring the
source's package (PACKAGE). The source uses Java's client, which does not know librdkafka's settings. So the caller
gives those that say how to connect a second time, under Java's names.

`format("marshal")` cannot use it: Spark has the partitions of a Python source read by Python workers only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from marshal_py.errors import InvalidOption, MissingSpark

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from marshal_py.spark.stream.tasks import Piece

PACKAGE: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13"  # its version is Spark's, or the newest before it
_SECURITY: Final = ("security.", "sasl.", "ssl.", "enable.ssl.")
_OURS: Final = frozenset(
    {
        "assign",
        "subscribe",
        "subscribepattern",
        "startingoffsets",
        "endingoffsets",
        "startingtimestamp",
        "endingtimestamp",
        "startingoffsetsbytimestamp",
        "endingoffsetsbytimestamp",
        "includeheaders",
        "failondataloss",
    }
)


def options_of(connection: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, str]:
    """Returns the options of Spark's Kafka source for a consumer of this `connection`. Options in `given` override
    them.

    Raises InvalidOption if the connection is secured and `given` does not say how to connect, and for options that the
    claims decide.
    """
    for name in given:
        if name.lower() in _OURS:
            raise InvalidOption("jvm_options", name, "the claims say which ranges are read: leave it out")
    secured = any(name.lower().startswith(tuple(f"kafka.{kind}" for kind in _SECURITY)) for name in given)
    for name in connection:
        if name.startswith(_SECURITY) and not secured:
            rule = (
                "Java's client has other names for it: give kafka.security.protocol and its related options in "
                "jvm_options, as for format('kafka')"
            )
            raise InvalidOption("jvm_options", name, rule)
    return {
        "kafka.bootstrap.servers": str(connection["bootstrap.servers"]),
        "includeHeaders": "true",
        "kafka.isolation.level": str(connection.get("isolation.level", "read_committed")),
        **given,
    }


def check(spark: SparkSession) -> None:
    """Checks that the session has Spark's Kafka source. Raises MissingSpark."""
    from pyspark.errors import AnalysisException

    try:
        spark.read.format("kafka").options(**{"kafka.bootstrap.servers": "-", "subscribe": "-"}).load()
    except AnalysisException as error:
        package = f"{PACKAGE}:{spark.version}"
        raise MissingSpark(
            "its own Kafka source for reader='jvm'",
            "which is not on the class path of this session",
            f"set spark.jars.packages={package}, or spark-submit --packages {package}; where that "
            "version was not published, the newest before it",
        ) from error


def frame(
    spark: SparkSession, pieces: Sequence[Piece], options: Mapping[str, str], columns: Sequence[str]
) -> DataFrame:
    """Returns the rows of these ranges, with the columns of format("marshal-ranges")."""
    topics: dict[str, dict[int, Piece]] = {}
    for piece in pieces:
        topics.setdefault(piece.topic, {})[piece.partition] = piece
    ranges = {
        "assign": json.dumps({topic: sorted(of) for topic, of in topics.items()}),
        "startingOffsets": json.dumps({topic: {n: one.start for n, one in of.items()} for topic, of in topics.items()}),
        "endingOffsets": json.dumps({topic: {n: one.to for n, one in of.items()} for topic, of in topics.items()}),
    }
    rows = spark.read.format("kafka").options(**options, **ranges, failOnDataLoss="true").load()
    return (
        rows.withColumn("token", _constants(topics, "token"))
        .withColumn("source", _constants(topics, "source"))
        .select(*columns)
    )


def _constants(topics: Mapping[str, Mapping[int, Piece]], field: str) -> Column:
    """Returns a column with this field of the piece of the row's partition. Each topic has an array of values, indexed
    by partition.
    """
    from pyspark.sql import functions

    column = functions.lit(None).cast("string")
    for topic, of in topics.items():
        values = (getattr(of[number], field) if number in of else None for number in range(max(of) + 1))
        array = functions.array(*map(functions.lit, values))
        column = functions.when(functions.col("topic") == topic, array[functions.col("partition")]).otherwise(column)
    return column
