"""Spark Connect: a client without a JVM can do everything. The server runs in the shared session's JVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import marshal_py.spark
from marshal_py.errors import UnsupportedPlatform
from marshal_sim.cluster.run import simulate
from tests.spark.kafka_topic import MakeTopic
from tests.support.connect_job import SMALL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0  # ten seconds of work on a quiet machine


@pytest.fixture
def server(spark: SparkSession) -> Iterator[str]:
    """The address of a Connect server in the session's JVM. conftest.py sets its port and interface."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    service = getattr(jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
    service = getattr(service, "MODULE$")
    service.start(spark.sparkContext._jsc.sc())
    yield f"sc://127.0.0.1:{service.localPort()}"
    service.stop(getattr(service, "stop$default$1")(), getattr(service, "stop$default$2")())


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_spark_connect_can_do_everything(server: str, make_topic: MakeTopic, tmp_path: Path) -> None:
    """Claimed batches, a stream with a sink in Python, the log in SQL, a sweep."""
    orders = make_topic(3)
    orders.fill(30)
    given = {"url": server, "options": orders.options, "folder": str(tmp_path)}
    # Without Spark's own variables, which name the JVM of this process.
    environ = {
        name: value
        for name, value in os.environ.items()
        if name != "JAVA_HOME" and not name.startswith(("SPARK_", "PYSPARK_"))
    }
    command = [sys.executable, "-B", "-m", "tests.support.connect_job", json.dumps(given)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, env={**environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["batches"] == sorted(map(list, orders.written))
    assert found["stream"] == found["batches"]
    assert found["intervals"] == [[orders.topic, partition, 2] for partition in range(3)]
    assert found["sweep"] == [simulate(seed, SMALL).trace_hash for seed in range(4)]


def test_a_client_without_grpc_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import SparkSession

    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(marshal_py.spark.util, "find_spec", lambda name: None if name == "grpc" else object())
    with pytest.raises(UnsupportedPlatform, match=r"a Python without grpcio: pip install 'pyspark\[connect\]'"):
        marshal_py.spark.local_session("sc://127.0.0.1:1")


def test_a_pyspark_under_another_distribution_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install pyspark-client` has another distribution name, and a cluster's own pyspark has none."""

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    marshal_py.spark.require_spark()
    monkeypatch.setattr("pyspark.version.__version__", "4.1.0")
    with pytest.raises(UnsupportedPlatform, match=r"on pyspark 4\.1\.0: 4\.2 or newer is needed"):
        marshal_py.spark.require_spark()
