"""Runs the pipeline end to end and judges it: `python -m examples.pipeline [--orders N] [--kill] [--folder DIR]`.

Without --bootstrap-servers it starts its own Apache Kafka (tests/support/kafka.py). The exit code is 0 if nothing was
lost and nothing is in the output twice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from examples.pipeline.orders import PARTITIONS, Order, is_very_late, make, parse
from examples.pipeline.service import DEAD
from marshal_py.errors import CoordinationTopicMissing
from marshal_py.log.observer import Observer
from marshal_py.transport.kafka import KafkaTransport
from tests.support.kafka import start_cluster

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 360.0  # for the whole run on a busy machine; a quiet one needs half a minute
EXIT_S = 30.0  # for a process to end after a signal
RATE = 1_000  # orders per second while both sides start
HOUR_MS = 3_600_000
COORDINATION = "__marshal"
TOO_SLOW = "Timed out while waiting for the Python worker to connect back"  # Spark waits 10 s


class Seen(NamedTuple):
    """A message as it is in a topic."""

    partition: int
    offset: int
    value: bytes | None
    headers: dict[str, bytes]


class Run:
    """One run: its topics, its processes, its folder."""

    def __init__(self, servers: str, folder: Path) -> None:
        self.servers, self.folder = servers, folder
        mark = uuid.uuid4().hex[:6]
        self.topic, self.group = f"orders-{mark}", f"orders-{mark}"
        self.deadline = time.monotonic() + DEADLINE_S
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.said: dict[str, int] = {}  # by process: how long its log was when it began
        self._create(self.topic, PARTITIONS)
        self._create(self.topic + DEAD, 1)

    def _create(self, topic: str, partitions: int) -> None:
        admin = AdminClient({"bootstrap.servers": self.servers})
        admin.create_topics([NewTopic(topic, partitions)], operation_timeout=30)[topic].result(30)

    def start(self, name: str) -> None:
        """Starts the service or the job, in a process group of its own, so that one signal ends all of it."""
        command = [
            sys.executable,
            "-m",
            f"examples.pipeline.{name}",
            self.servers,
            self.topic,
            self.group,
            str(self.folder),
        ]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.said[name] = log.tell()
            self.processes[name] = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def kill(self, name: str) -> None:
        """kill -9 for the process and everything that it has started, as Spark's JVM."""
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(EXIT_S)
        print(f"killed the {name} (kill -9)", flush=True)

    def _too_slow(self, name: str) -> bool:
        """Says whether Spark has ended it because the machine was too busy to start Python in time."""
        log = (self.folder / f"{name}.log").read_bytes()[self.said[name] :]
        return TOO_SLOW in log.decode(errors="replace")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            ended = [name for name, process in self.processes.items() if process.poll() not in (None, 0)]
            for name in [name for name in ended if self._too_slow(name)]:
                print(f"started the {name} again: the machine was too busy for Spark's workers", flush=True)
                ended.remove(name)
                self.start(name)
            if ended or time.monotonic() > self.deadline:
                for name in self.processes:
                    print((self.folder / f"{name}.log").read_text(errors="replace")[-3000:], file=sys.stderr)
                raise SystemExit(f"{', '.join(ended)} ended" if ended else f"not in time: {what}")
            time.sleep(0.2)

    def positions(self, group: str) -> dict[int, int]:
        """A group's positions by partition, from the coordination log."""
        try:
            with Observer(KafkaTransport(self.servers, 30.0), COORDINATION) as observer:
                observer.fold(group)
                found = [state for _, state in observer.groups() if state.name == group]
        except CoordinationTopicMissing:  # no member has joined yet
            return {}
        return {tp.partition: part.position for state in found for tp, part in state.partitions.items()}

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(EXIT_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(EXIT_S)


def produce(run: Run, count: int, seed: int, pause: Callable[[int], None]) -> None:
    """Produces `count` orders at RATE. Calls `pause` after every hundred, with their number so far."""
    producer = Producer({"bootstrap.servers": run.servers, "linger.ms": 20, "enable.idempotence": True})
    began = time.monotonic()
    for number, made in enumerate(make(count, seed), 1):
        producer.produce(run.topic, made.value, made.key, made.partition)
        if number % 100 == 0:
            producer.poll(0)
            time.sleep(max(0.0, began + number / RATE - time.monotonic()))
            pause(number)
    if producer.flush(30):
        raise SystemExit("Kafka did not take everything")


def contents(servers: str, topic: str, partitions: int) -> list[Seen]:
    """Returns all messages of a topic."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "judge", "enable.auto.commit": False})
    found: list[Seen] = []
    try:
        left = 0
        for number in range(partitions):
            first, end = consumer.get_watermark_offsets(KafkaPartition(topic, number), timeout=30)
            left += end - first
            if first < end:
                consumer.incremental_assign([KafkaPartition(topic, number, first)])
        while left:
            for message in consumer.consume(10_000, 0.2):
                if message.error():
                    raise KafkaException(message.error())
                headers = dict(message.headers() or [])
                found.append(Seen(message.partition() or 0, message.offset() or 0, message.value(), headers))
                left -= 1
    finally:
        consumer.close()
    return found


def judge(report: Mapping[str, Any], topic: Iterable[Seen], dead_letters: Iterable[Seen]) -> bool:
    """Compares the tables with what was produced, and prints a summary. Returns whether they agree."""
    produced = {(seen.partition, seen.offset): parse(seen.value) for seen in topic}
    good = {place: order for place, order in produced.items() if not order.problem}
    dead = Counter(seen.headers["origin"] for seen in dead_letters)
    stored = {(p, o): count for p, o, count in report["stored"]}
    lost = len(good.keys() - stored.keys()) + len(produced) - len(good) - len(dead)
    doubled = sum(count - 1 for count in stored.values()) + len(stored.keys() - good.keys())
    wrong = wrong_hours(report["hours"], good)
    counted = sum(orders for _, _, orders in report["hours"])
    print(f"produced        {len(produced):>8}")
    print(f"handled         {len(stored):>8}   rows of the Delta table, by day")
    print(f"dead-lettered   {len(dead):>8}   ({sum(dead.values()) - len(dead)} of them sent again after a kill)")
    print(f"counted by hour {counted:>8}   in {report['days']} days; later ones came after their hour was closed")
    for line in wrong:
        print(line)
    whole = len(produced) == len(stored) + len(dead)
    print(f"produced = handled + dead-lettered: {'yes' if whole else 'NO'}")
    print(f"lost {lost}, doubled in output {doubled}")
    return whole and not lost and not doubled and not wrong


def wrong_hours(found: Iterable[tuple[int, str, int]], good: Mapping[tuple[int, int], Order]) -> list[str]:
    """Returns a line for each hourly count that disagrees with the topic. Only very late orders may be missing."""
    expected, late = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    newest_ms = max(order.event_ms for order in good.values())
    seen_ms = 0
    for _, order in sorted(good.items(), key=lambda item: item[0][1]):  # partitions grow evenly, offset by offset
        hour = order.event_ms // HOUR_MS * HOUR_MS
        seen_ms = max(seen_ms, order.event_ms)
        if newest_ms - hour > 2 * HOUR_MS:  # closed by the last orders
            expected[hour, order.product] += 1
            late[hour, order.product] += is_very_late(order.event_ms, seen_ms)
    counts, wrong = Counter[tuple[int, str]](), []
    for ms, product, orders in found:
        if (ms, product) in counts or (ms, product) not in expected:
            wrong.append(f"hour {ms} of {product} is counted twice, or should not be there")
        counts[ms, product] += orders
    for hour_of, count in expected.items():
        if not count - late[hour_of] <= counts[hour_of] <= count:
            wrong.append(f"hour {hour_of} has {counts[hour_of]} orders of {count}, {late[hour_of]} of them very late")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.pipeline", description=__doc__)
    parser.add_argument("--orders", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="kill the Spark job and the service half-way, restart them")
    parser.add_argument("--folder", type=Path, help="where to write the output, and keep it")
    parser.add_argument("--bootstrap-servers", help="use a running Kafka")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="marshal_pipeline_"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if given.bootstrap_servers:
            return play(given.bootstrap_servers, folder, given)
        with start_cluster() as cluster:
            print(f"kafka: {cluster.description}", flush=True)
            return play(cluster.bootstrap, folder, given)
    finally:
        if given.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def play(servers: str, folder: Path, given: argparse.Namespace) -> int:
    run = Run(servers, folder)
    try:
        run.start("service")
        run.start("job")
        print("a Python service and a Spark query share one group; a second query counts by the hour", flush=True)

        def kill_both(number: int) -> None:
            """After half of the orders, once both groups have made progress, kills the Spark job, then the service."""
            if not given.kill or number != given.orders // 200 * 100:
                return
            for group in (run.group, f"{run.group}-hourly"):
                run.wait(lambda group=group: sum(run.positions(group).values()) > 500, f"{group} makes progress")
            run.kill("job")
            run.start("job")
            run.kill("service")
            run.start("service")

        produce(run, given.orders, given.seed, kill_both)
        ends = Counter(made.partition for made in make(given.orders, given.seed))
        for group in (run.group, f"{run.group}-hourly"):
            run.wait(lambda group=group: run.positions(group) == dict(ends), f"{group} has handled everything")
        (folder / "stop").touch()
        run.wait((folder / "report.json").exists, "the report")
    finally:
        run.end()
    report = json.loads((folder / "report.json").read_text())
    dead = contents(servers, run.topic + DEAD, 1)
    return 0 if judge(report, contents(servers, run.topic, PARTITIONS), dead) else 1


if __name__ == "__main__":
    sys.exit(main())
