"""Fixtures for the tests of pipelines: one Spark session for all in a process. No test stops it, and none is skipped.

The broker is the one of tests/kafka, when both folders run in one process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest

from marshal_py.spark import local_session
from tests.spark.kafka_topic import KafkaTopic, MakeTopic
from tests.support import spark_archive
from tests.support.kafka import Cluster, TopicFactory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# For queries over few rows: each is planned once, and interpreted, because compiling one takes longer than running it.
FEW_ROWS: Final = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "1",
}


@pytest.fixture(scope="session", autouse=True)
def _quick_starts(pytestconfig: pytest.Config) -> None:
    """For every JVM that these tests and their processes start. It stays for the files that this process runs later."""
    if cache := getattr(pytestconfig, "cache", None):  # None with `-p no:cacheprovider`
        spark_archive.use(cache.mkdir("spark"))


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """A reader that a test makes here has SIGTERM stop it, as in a process of Spark. Other files need their own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Local Spark on two cores. Its warehouse is a temporary folder: nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("spark")
    session = local_session(
        "local[2]",
        settings={
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.local.dir": str(folder / "local"),
            **FEW_ROWS,
            "spark.connect.grpc.binding.address": "127.0.0.1",  # test_connect.py starts the server in this JVM
            "spark.connect.grpc.binding.port": "0",
        },
    )
    session.sparkContext.setLogLevel("ERROR")  # Spark's own warnings on stderr would hide a test's failure
    yield session
    session.stop()


@pytest.fixture
def make_topic(kafka: Cluster, topic: TopicFactory) -> MakeTopic:
    """Makes a KafkaTopic with this many partitions."""
    return lambda partitions: KafkaTopic(kafka, topic, partitions)
