"""A Spark session for the benchmarks, on two cores of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from marshal_py.spark import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The JVM's own compilers, as a cluster has them; those of local_session are for short runs.
SETTINGS: Final = {"spark.log.level": "OFF", "spark.driver.extraJavaOptions": "-XX:+UseSerialGC"}


@contextmanager
def spark_session() -> Iterator[SparkSession]:
    """Uses the active session, which it does not stop, or opens one and stops it."""
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    session = active or local_session("local[2]", settings=SETTINGS)
    try:
        yield session
    finally:
        if active is None:
            session.stop()
