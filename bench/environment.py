"""What all benchmarks use: a cluster with topics, statistics, and how a result is shown and stored.

    def run(environment: BenchEnvironment, tiny: bool) -> Result

A cell of a Result is a text, a number, None, or a `spread` (a dict of n, median, p99, low, high), which a table shows
as "median (low – high)". Units are part of the column's name. `raw` is only written to the JSON file.

This file must not depend on any single benchmark.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType  # type: ignore
from rich.console import Console
from rich.table import Table
from rich.text import Text

import marshal_py
from tests.support.brokers import free_ports
from tests.support.jars import KafkaUnavailable, cache_folder, find_java, tools_jars
from tests.support.kafka import start_cluster
from tests.support.kafka_topics import ADMIN_TIMEOUT_S, create_topic, join_first_group

FILL_TIMEOUT_S = 300.0
CONTESTANT_S = 300.0  # only a contestant that hangs takes so long
FILL_POLL_EVERY = 10_000  # messages between two looks at acknowledgements: few enough for the producer's queue
PIPE_WIDTH = 240  # columns of a table that is not printed to a terminal: a log file needs no wrapping
# These are only the lowest values that the broker allows: a group that asks for nothing keeps Kafka's defaults (45 s
# and 5 s). With them takeover.py can give a KIP-848 group the 6 s that classic groups may have anyway.
BROKER_SETTINGS = {
    f"group.{kind}.min.{name}.ms": value
    for kind in ("consumer", "share")
    for name, value in (("session.timeout", "6000"), ("heartbeat.interval", "1000"))
}
# Kafka's own counters of requests, which its JmxTool reads. A launcher takes these options from JDK_JAVA_OPTIONS.
REQUESTS = "kafka.network:type=RequestMetrics,name=RequestsPerSec,*"
JMX_OPTIONS = (
    "-Dcom.sun.management.jmxremote.port={port} -Dcom.sun.management.jmxremote.rmi.port={port} "
    "-Dcom.sun.management.jmxremote.host=127.0.0.1 -Djava.rmi.server.hostname=127.0.0.1 "
    "-Dcom.sun.management.jmxremote.authenticate=false -Dcom.sun.management.jmxremote.ssl=false"
)
JMX_TIMEOUT_S = 60.0

SHARE_START = {"share.auto.offset.reset": "earliest"}  # a setting of a share group at the broker, not of a client
QUIET = {"log_level": 3}  # librdkafka's errors only: its other messages would appear between the tables

Cell = Any  # str | int | float | None | the dict of `spread`


@dataclass
class Result:
    """The result of one benchmark. Everything in it can be written as JSON."""

    name: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: list[str]
    raw: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class BenchEnvironment:
    """A cluster to measure on, and a folder for logs. `shared` lets two benchmarks use one measurement.

    `jmx_port` is that of the broker's counters; 0 if they cannot be read. `quick` asks for figures within minutes.
    """

    bootstrap: str
    description: str
    folder: Path
    jmx_port: int = 0
    quick: bool = False
    shared: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.admin = AdminClient({"bootstrap.servers": self.bootstrap, **QUIET})

    def close(self) -> None:
        del self.admin

    def topic(self, partitions: int, config: Mapping[str, str] | None = None) -> str:
        """Creates a topic with the broker's replication. Returns its name once each partition has a leader."""
        name = f"bench-{uuid.uuid4().hex[:12]}"
        create_topic(self.admin, name, partitions, config)
        return name

    def drop(self, *topics: str) -> None:
        """Deletes topics, so that they cost the next benchmark nothing."""
        for future in self.admin.delete_topics(list(topics), operation_timeout=ADMIN_TIMEOUT_S).values():
            with contextlib.suppress(KafkaException):
                future.result(ADMIN_TIMEOUT_S)

    def coordination(self) -> str:
        """Lets the library create a coordination topic, as it does at its first use. Returns the topic's name."""
        name = f"bench-marshal-{uuid.uuid4().hex[:12]}"
        marshal_py.connect(self.bootstrap, coordination_topic=name).close()
        return name

    def group(self, hint: str) -> str:
        return f"bench-{hint}-{uuid.uuid4().hex[:12]}"

    def configure_group(self, group: str, settings: Mapping[str, str]) -> None:
        """Sets settings of a KIP-848 or share group at the broker. Raises KafkaException if it does not allow them."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
        self.admin.incremental_alter_configs([resource])[resource].result(ADMIN_TIMEOUT_S)

    def requests(self) -> tuple[float, int] | None:
        """Seconds, and how many requests the broker has answered so far, by its own counters; None without them."""
        if not self.jmx_port:
            return None
        try:
            java = find_java()
            jars = os.pathsep.join(map(str, tools_jars(java, cache_folder())))
            url = f"service:jmx:rmi:///jndi/rmi://127.0.0.1:{self.jmx_port}/jmxrmi"
            command = [java.executable, "-XX:TieredStopAtLevel=1", "-cp", jars, "org.apache.kafka.tools.JmxTool"]
            command += ["--jmx-url", url, "--object-name", REQUESTS, "--attributes", "Count", "--one-time"]
            read = subprocess.run(command, check=True, capture_output=True, text=True, timeout=JMX_TIMEOUT_S)
        except (KafkaUnavailable, subprocess.SubprocessError):
            return None
        at_ms, *counts = list(csv.reader(read.stdout.splitlines()))[-1]
        return int(at_ms) / 1000, sum(int(count) for count in counts)

    def fill(self, topic: str, partitions: int, count: int, size_bytes: int = 100) -> None:
        """Writes `count` messages to the partitions in turn. Returns when all of them are acknowledged."""
        value = b"x" * size_bytes
        refused: list[str] = []
        settings = {
            "bootstrap.servers": self.bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 20,
            "queue.buffering.max.messages": 1_000_000,
            "batch.num.messages": 100_000,
            **QUIET,
        }
        producer = Producer(settings)

        def on_delivery(error: object, _: object) -> None:
            if error:
                refused.append(str(error))

        for number in range(count):
            while True:
                try:
                    producer.produce(topic, value, partition=number % partitions, on_delivery=on_delivery)
                    break
                except BufferError:
                    producer.poll(0.1)
            if number % FILL_POLL_EVERY == 0:
                producer.poll(0)
        left = producer.flush(FILL_TIMEOUT_S)
        if left or refused:
            raise RuntimeError(f"{topic}: {left} messages without an answer, {len(refused)} refused: {refused[:1]}")

    def contest(
        self, module: str, counts: Mapping[str, int], rounds: int, partitions: int, size_bytes: int, spare: int
    ) -> dict[str, list[dict[str, Any]]]:
        """Fills a topic once, then lets every contestant read it, round after round, each in a fresh process.

        `counts`: by contestant how many messages it reads; the topic has `spare` more than the most. A process is
        `python -m module contestant servers topic count`. Returns the object that each one printed last, as JSON.
        """
        topic, most = self.topic(partitions), max(counts.values())
        self.say(f"filling {topic} with {most:,} messages of {size_bytes} bytes")
        self.fill(topic, partitions, most + spare, size_bytes)
        marshal_py.connect(self.bootstrap, coordination_topic=f"{topic}-m").close()
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in counts}
        for round_ in range(rounds):
            for name, count in counts.items():
                self.say(f"round {round_ + 1}: {name}")
                command = [sys.executable, "-m", module, name, self.bootstrap, topic, str(count)]
                answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=CONTESTANT_S)
                found[name].append(json.loads(answer.stdout.splitlines()[-1]))
        self.drop(topic, f"{topic}-m")
        return found

    def say(self, text: str) -> None:
        """Prints progress to stderr."""
        print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def warm_up(self) -> None:
        """Creates the first consumer group and the first idempotent producer, whose cost belongs to no measurement."""
        name = self.topic(1)
        self.fill(name, 1, 1)
        join_first_group(self.bootstrap, name, **QUIET)
        self.drop(name)


@contextlib.contextmanager
def _java_options(options: str) -> Iterator[None]:
    """Programs that start meanwhile see these options beside those that the user gave."""
    before = os.environ.get("JDK_JAVA_OPTIONS")
    os.environ["JDK_JAVA_OPTIONS"] = f"{before or ''} {options}"
    try:
        yield
    finally:
        del os.environ["JDK_JAVA_OPTIONS"]
        if before is not None:
            os.environ["JDK_JAVA_OPTIONS"] = before


@contextlib.contextmanager
def open_environment(bootstrap: str | None = None) -> Iterator[BenchEnvironment]:
    """Uses the cluster at `bootstrap` (or MARSHAL_TEST_BOOTSTRAP), otherwise starts one node. Warmed up."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="marshal_bench_")))
        port = 0
        if bootstrap:
            description = f"external ({bootstrap})"
        else:
            own = "MARSHAL_TEST_BOOTSTRAP" not in os.environ
            port = free_ports(1)[0] if own else 0
            with _java_options(JMX_OPTIONS.format(port=port) if own else ""):
                cluster = stack.enter_context(start_cluster(1, BROKER_SETTINGS if own else None))
            bootstrap, description = cluster.bootstrap, cluster.description
        environment = BenchEnvironment(bootstrap, description, folder, port)
        # Closed before the cluster ends, because a client that loses its broker logs errors.
        stack.callback(environment.close)
        environment.warm_up()
        yield environment


# --- statistics


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of all values do not exceed. p99 of ten is the largest."""
    ordered = sorted(values)
    rank = -(-len(ordered) * share // 1)  # upwards
    return ordered[max(0, int(rank) - 1)]


def spread(values: Iterable[float], digits: int = 4) -> dict[str, float] | None:
    """n, median, p99 and range; None if there are no values."""
    kept = [float(v) for v in values]
    if not kept:
        return None
    named = {"median": statistics.median(kept), "p99": percentile(kept, 0.99), "low": min(kept), "high": max(kept)}
    return {"n": len(kept), **{name: round(value, digits) for name, value in named.items()}}


def ratio(values: Sequence[float], base: Sequence[float]) -> float | None:
    """The median of `values` divided by that of `base`; None if there are no values or the base is not positive."""
    if not values or not base or statistics.median(base) <= 0:
        return None
    return round(statistics.median(values) / statistics.median(base), 3)


class Work:
    """Evidence that something was read: the number of messages, and a xor over their partitions and offsets."""

    def __init__(self) -> None:
        self.count = 0
        self.xor = 0

    def add(self, partition: int, offset: int) -> None:
        self.count += 1
        # Multiplied so that equal offsets of two partitions do not cancel each other.
        self.xor ^= (partition + 1) * 0x9E3779B97F4A7C15 + offset * 0x2545F4914F6CDD1D & 0xFFFFFFFFFFFFFFFF

    def __str__(self) -> str:
        return f"{self.count:,} #{self.xor >> 32:08x}"


# --- showing


def number_text(value: float) -> str:
    """A number with three or four significant digits."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def cell_text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, dict):
        median, low, high = (number_text(cell[name]) for name in ("median", "low", "high"))
        return median if cell["n"] == 1 else f"{median} ({low} – {high})"
    return number_text(cell) if isinstance(cell, int | float) and not isinstance(cell, bool) else str(cell)


def show(result: Result, title: str = "") -> None:
    """Prints the result as a table with its notes."""
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    # Text everywhere: brackets are no markup.
    console.print(Text(f"{result.name}: {title}" if title else result.name, style="bold"))
    table = Table()
    for number, column in enumerate(result.columns):
        table.add_column(Text(column), justify="left" if number == 0 else "right", overflow="fold")
    for row in result.rows:
        table.add_row(*(Text(cell_text(cell)) for cell in row))
    console.print(table)
    for note in result.notes:
        console.print(f"  {note}", markup=False, highlight=False)
    console.print()
