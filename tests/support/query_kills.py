"""Two queries and a Python service share one group and one table, and are stopped and killed again and again.

    python -m tests.support.query_kills --kills 30 --every 2 --seed 1 --table delta

It runs real Spark and an Apache Kafka with its default settings. `--table`: one of those in tests/spark/targets.py,
which must hold every message once. `--every`: the trigger interval of the queries in seconds; their
`handler_timeout_s` is 5. The seed decides which process ends, when, how (kill -9 of everything that it started, or
SIGTERM), and whether its checkpoint is deleted. In the end an independent count compares the table with what was
produced: exit code 1 if a message is missing or is there twice. Takes a quarter of a minute per kill.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, Final

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import marshal_py
from marshal_py.errors import ClaimLost, WriteFenced
from marshal_py.spark import local_session, write_batch
from tests.spark.targets import KINDS, Target, quietly
from tests.support.descendants import descendants
from tests.support.kafka import start_cluster

ROOT: Final = Path(__file__).resolve().parents[2]
TOPIC, GROUP, PARTITIONS = "orders", "billing", 6
PER_S: Final = 240  # messages
ENDS_S: Final = 300.0  # after the last kill, until everything is in the table
KEEPS_CHECKPOINT: Final = 0.7  # the share of restarts that find it
BY_SIGTERM: Final = 0.3  # the share of ends that are stops


# --- the members


def query(servers: str, folder: Path, name: str, every_s: float, kind: str) -> None:
    sink = KINDS[kind](folder).sink(quietly)
    spark = local_session("local[2]", settings={"spark.local.dir": str(folder / "local")})
    spark.sparkContext.setLogLevel("ERROR")
    started = (
        spark.readStream.format("marshal")
        .option("bootstrap.servers", servers)
        .option("topics", TOPIC)
        .option("group", GROUP)
        .option("start", "earliest")
        .option("heartbeat_interval_s", "1")
        .option("handler_timeout_s", "5")
        .load()
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(folder / name))
        .trigger(processingTime=f"{every_s} seconds")
        .start()
    )
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    while not stopping.is_set() and started.isActive:
        stopping.wait(0.1)
    if not stopping.is_set():
        started.awaitTermination()  # raises the error that ended it
    started.stop()
    spark.stop()


def service(servers: str, folder: Path, kind: str) -> None:
    target = KINDS[kind](folder)
    with (
        marshal_py.connect(servers) as marshal,
        marshal.consumer(GROUP, [TOPIC], start="earliest", heartbeat_interval_s=1.0) as consumer,
        marshal_py.stop_on_signals(consumer),
    ):
        while True:
            batch = consumer.fetch(400, expires_s=0.5)
            try:
                if batch:
                    write_batch(
                        target.table,
                        batch,
                        lambda messages, entry: target.store(
                            entry, [(message.partition, message.offset) for message in messages]
                        ),
                    )
                    batch.ack()
            except (WriteFenced, ClaimLost) as error:
                print(f"dropped: {error}", flush=True)


# --- the parent, which ends them


class Member:
    """A process of the group, which is started again and again."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder, self.arguments = folder, arguments
        self.runs = 0
        self.start()

    def start(self) -> None:
        self.runs += 1
        self.log = self.folder / f"{self.arguments[0]}-{self.runs}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.query_kills", "--member", *self.arguments],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def check(self) -> None:
        if self.process.poll() not in (None, 0):
            raise SystemExit(f"{self.arguments[0]} ended by itself:\n{self.log.read_text(errors='replace')[-4000:]}")

    def kill(self) -> None:
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(60)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()


def run(servers: str, folder: Path, kills: int, every_s: float, seed: int, kind: str) -> int:
    random = Random(seed)
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values():
        future.result(60)
    produced, stopping = Counter[int](), threading.Event()
    producing = threading.Thread(target=_produce, args=(servers, produced, stopping))
    producing.start()
    target = KINDS[kind](folder)
    members = [Member(folder, name, servers, str(folder), str(every_s), kind) for name in ("one", "two", "service")]
    try:
        for number in range(kills):
            deadline = time.monotonic() + random.uniform(1.0, 12.0 + 2 * every_s)
            while time.monotonic() < deadline:
                time.sleep(0.1)
                for member in members:
                    member.check()
            member = random.choice(members)
            by_signal = random.random() < BY_SIGTERM
            (member.stop if by_signal else member.kill)()
            forgets = member is not members[-1] and random.random() > KEEPS_CHECKPOINT
            if forgets:
                shutil.rmtree(folder / member.arguments[0], ignore_errors=True)
            print(
                f"{number + 1}: {member.arguments[0]} {'stopped' if by_signal else 'killed'}"
                f"{', its checkpoint deleted' * forgets}; produced {produced.total()}",
                flush=True,
            )
            member.start()
    finally:
        stopping.set()
        producing.join()
    verdict = _count(target, produced, members, time.monotonic() + ENDS_S)
    for member in members:
        member.stop()
    return verdict


def _produce(servers: str, produced: Counter[int], stopping: threading.Event) -> None:
    producer, number = Producer({"bootstrap.servers": servers, "linger.ms": 20}), 0

    def written(error: object, message: Any) -> None:
        if error is None:
            produced[message.partition()] += 1

    while not stopping.wait(0.1):
        for _ in range(PER_S // 10):
            producer.produce(TOPIC, f"order {number}", partition=number % PARTITIONS, on_delivery=written)
            number += 1
        producer.poll(0)
    producer.flush(60)


def _count(target: Target, produced: Counter[int], members: list[Member], deadline: float) -> int:
    """Reads the table, without Spark, until nothing is missing, and prints what is missing, twice or unknown."""
    wanted = {(partition, offset) for partition, count in produced.items() for offset in range(count)}
    while True:
        for member in members:
            member.check()
        seen = Counter(target.rows())
        missing = wanted - seen.keys()
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    twice = [place for place, times in seen.items() if times > 1]
    unknown = seen.keys() - wanted
    print(
        json.dumps(
            {
                "produced": len(wanted),
                "missing": len(missing),
                "twice": len(twice),
                "unknown": len(unknown),
                "some": sorted(missing)[:5] + sorted(twice)[:5],
            }
        ),
        flush=True,
    )
    return int(bool(missing or twice or unknown))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--table", choices=KINDS, default="delta")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--member", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.member:
        name, servers, folder, every_s, kind = given.member
        if name == "service":
            service(servers, Path(folder), kind)
        else:
            query(servers, Path(folder), name, float(every_s), kind)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="query-kills-"))
    print(
        f"{given.table}, seed {given.seed}, a trigger every {given.every:g} s, {given.kills} kills, in {folder}",
        flush=True,
    )
    with start_cluster(1, {"auto.create.topics.enable": "true"}) as cluster:
        verdict = run(cluster.bootstrap, folder, given.kills, given.every, given.seed, given.table)
    if not verdict:
        shutil.rmtree(folder)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
