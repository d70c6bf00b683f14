"""Dump files for tests: of given values, and of what a simulated cluster left behind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random

from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import Genesis
from marshal_py.transport.dump import Header, Span, Writer
from marshal_py.transport.ports import LogRecord
from marshal_sim.cluster.cluster import Cluster
from marshal_sim.cluster.run import simulate
from marshal_sim.cluster.scenario import Options, Scenario
from tests.support.differential_log import INCARNATION

BEGIN_MS = 1_763_700_000_000
CALMLY = Options(
    clients=3, partitions=4, interval_ms=2_000, kinds=frozenset({"crash", "leave", "arrive"}), until_ms=30_000
)


def write(path: Path, records: Iterable[LogRecord], partitions: int = 1, group: str = "") -> Path:
    """Writes a whole dump of these records, which must be sorted by log."""
    kept = list(records)
    logs = sorted({0, *(record.log for record in kept)})
    offsets = {log: [record.offset for record in kept if record.log == log] or [0, -1] for log in logs}
    spans = tuple(Span(log, offsets[log][0], offsets[log][-1] + 1) for log in logs)
    header = Header(
        topic="__marshal",
        incarnation=INCARNATION.hex(),
        partitions=partitions,
        logs=spans,
        group=group,
        time_ms=BEGIN_MS,
        by="a test",
    )
    with path.open("wb") as file:
        writer = Writer(file, header)
        for record in kept:
            writer.write(record)
        writer.finish()
    return path


def of_values(path: Path, values: Iterable[bytes | None]) -> Path:
    """One log, a record per second."""
    return write(path, [LogRecord(0, at, value, BEGIN_MS + 1_000 * at) for at, value in enumerate(values)])


def of_run(path: Path, seed: int, options: Options = CALMLY) -> list[LogRecord]:
    """Writes the logs of a simulated run as they are at its end; returns the records."""
    return of_cluster(path, run(seed, options))


def run(seed: int, options: Options = CALMLY) -> Cluster:
    """Returns the cluster of a simulated run, at its end."""
    clusters: list[Cluster] = []

    def make_cluster(scenario: Scenario, rng: Random) -> Cluster:
        clusters.append(Cluster(scenario, rng))
        return clusters[0]

    simulate(seed, options, make_cluster)
    return clusters[0]


def of_cluster(path: Path, cluster: Cluster) -> list[LogRecord]:
    """Writes the logs of a simulated cluster; returns the records."""
    logs = cluster.broker.logs
    records = [
        LogRecord(number, at, value, BEGIN_MS + ms)
        for number, log in enumerate(logs)
        for at, (value, ms) in enumerate(zip(log.recorded, log.appended_ms, strict=True))
    ]
    root = codec.open_envelope(records[0].value, -1)
    assert root is not None
    assert isinstance(root[5], Genesis)
    write(path, records, root[5].partitions)
    return records
