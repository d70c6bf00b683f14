"""Two clusters have a topic of one name, and their queries write into one Delta, one Iceberg and one SQL table.

    python -m tests.support.two_clusters --kills 10 --seed 1

Real Spark, two Apache Kafkas. Each query runs on a trigger and is killed (kill -9 of all that it started), then started
again; halfway one checkpoint is deleted, and then each table is rewound and the position of one group is moved back.
An independent count compares each table with what was produced on both clusters: exit code 1 if a message is missing,
or is there twice. `--tables` names some of the tables; all queries of a table run at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import marshal_py
from examples.pipeline.__main__ import TOO_SLOW
from marshal_py.spark import Database, DeltaOutput, IcebergOutput, local_session
from tests.support.descendants import descendants
from tests.support.kafka import start_cluster

ROOT: Final = Path(__file__).resolve().parents[2]
TOPIC, PARTITIONS, CLUSTERS = "orders", 2, ("eu", "us")
TABLES: Final = ("delta", "iceberg", "database")
PER_ROUND: Final = 200  # messages per cluster between two kills
REWIND_TO: Final = 50
STARTS_S: Final = 900.0  # until a query that was started again has written something, beside a full load too
ENDS_S: Final = 300.0  # after the last kill, until everything is in the table
SCHEMA: Final = pa.schema([("cluster", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])
Place = tuple[str, int, int]  # cluster, partition, offset


def catalog_of(folder: Path) -> Any:
    from pyiceberg.catalog.sql import SqlCatalog

    return SqlCatalog("lake", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/lake")


class Store:
    """One table, for its writers and for whoever counts its rows."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.path = folder / kind
        self.table: Any
        if kind == "delta":
            self.table = DeltaOutput(str(self.path))
        elif kind == "iceberg":
            self.table = IcebergOutput(catalog_of(self.folder), "shop.orders")
        else:
            self.table = Database(lambda: sqlite3.connect(f"{self.path}.db", timeout=60))

    def create(self) -> None:
        if self.kind == "database":
            self.table.create()
            db = sqlite3.connect(f"{self.path}.db")
            db.execute('CREATE TABLE rows (cluster TEXT, partition INTEGER, "offset" INTEGER)')
            db.close()

    def sink(self, cluster: str) -> Any:
        if self.kind != "database":
            return self.table.sink(lambda df: df.selectExpr(f"'{cluster}' AS cluster", "partition", "offset"))

        def handle(df: Any, entry: Any) -> None:
            rows = [(cluster, row.partition, row.offset) for row in df.select("partition", "offset").collect()]
            entry.cursor.executemany("INSERT INTO rows VALUES (?, ?, ?)", rows)

        return self.table.sink(handle)

    def rewind(self, cluster: str, topic_id: str) -> None:
        where = f"cluster = '{cluster}'"
        if self.kind == "database":
            undo = f'DELETE FROM rows WHERE {where} AND partition = 0 AND "offset" >= {REWIND_TO}'
            self.table.rewind(
                group_of(self.kind),
                TOPIC,
                [0],
                to=REWIND_TO,
                topic_id=topic_id,
                undo=lambda cursor: cursor.execute(undo),
            )
        else:
            self.table.rewind(TOPIC, 0, REWIND_TO, where=where, topic_id=topic_id)

    def places(self) -> list[Place]:
        """Returns the rows, by another reader than the sink's."""
        if self.kind == "database":
            db = sqlite3.connect(f"{self.path}.db", timeout=60)
            try:
                return db.execute("SELECT * FROM rows").fetchall()
            finally:
                db.close()
        if self.kind == "delta":
            table = self.table.table()
            found = SCHEMA.empty_table() if table is None else table.to_pyarrow_table()
        else:
            found = catalog_of(self.folder).load_table("shop.orders").scan().to_arrow()
        return [(row["cluster"], row["partition"], row["offset"]) for row in found.to_pylist()]


def group_of(kind: str) -> str:
    return f"into-{kind}"


def query(servers: str, folder: str, kind: str, cluster: str) -> None:
    """Runs until it is killed."""
    spark = local_session("local[1]", settings={"spark.local.dir": f"{folder}/local-{kind}-{cluster}"})
    spark.sparkContext.setLogLevel("ERROR")
    source = spark.readStream.format("marshal").option("bootstrap.servers", servers).option("topics", TOPIC)
    source = source.option("group", group_of(kind)).option("start", "earliest").option("heartbeat_interval_s", "1")
    (
        source.load()
        .writeStream.foreachBatch(Store(kind, Path(folder)).sink(cluster))
        .option("checkpointLocation", f"{folder}/checkpoint-{kind}-{cluster}")
        .trigger(processingTime="1 second")
        .start()
        .awaitTermination()
    )


class Query:
    """A process with one query, which is started again after each kill."""

    def __init__(self, servers: str, folder: Path, kind: str, cluster: str) -> None:
        self.arguments = (servers, str(folder), kind, cluster)
        self.checkpoint = folder / f"checkpoint-{kind}-{cluster}"
        self.log = folder / f"{kind}-{cluster}.log"
        self.kills = 0
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.said = out.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.two_clusters", "--member", *self.arguments],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def check(self) -> None:
        """Starts the query again if Spark gave up waiting for Python, as on a busy machine. Else none may end."""
        if self.process.poll() is not None:
            said = self.log.read_text(errors="replace")[self.said :]
            if TOO_SLOW not in said:
                raise SystemExit(f"{self.log.name} ended by itself:\n{said[-4000:]}")
            self.start()

    def kill(self) -> None:
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(60)
        self.kills += 1


class Clusters:
    """The two clusters, and what was produced on each."""

    def __init__(self, servers: dict[str, str]) -> None:
        self.servers = servers
        self.produced: set[Place] = set()
        for address in servers.values():
            admin = AdminClient({"bootstrap.servers": address})
            admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(60)

    def produce(self) -> None:
        for name, address in self.servers.items():
            producer = Producer({"bootstrap.servers": address})
            for number in range(PER_ROUND):
                producer.produce(
                    TOPIC, name.encode(), partition=number % PARTITIONS, on_delivery=partial(self._note, name)
                )
            producer.flush(60)

    def _note(self, name: str, error: object, message: Any) -> None:
        self.produced.add((name, message.partition(), message.offset()))

    def topic_id(self, name: str) -> str:
        from confluent_kafka import TopicCollection

        admin = AdminClient({"bootstrap.servers": self.servers[name]})
        return str(admin.describe_topics(TopicCollection([TOPIC]))[TOPIC].result(60).topic_id)


def run(clusters: Clusters, folder: Path, kind: str, kills: int, random: Random) -> int:
    """Kills each query of one table `kills` times. Returns 0 if the counts agree."""
    if kind == "iceberg":
        catalog_of(folder).create_namespace("shop")
        catalog_of(folder).create_table("shop.orders", SCHEMA)
    store = Store(kind, folder)
    store.create()
    queries = {name: Query(address, folder, kind, name) for name, address in clusters.servers.items()}
    try:
        for number in range(kills):
            clusters.produce()
            _await_progress(store, queries, set(store.places()))
            time.sleep(random.uniform(0, 1.5))
            for one in queries.values():
                one.check()
                one.kill()
            if number == kills // 2:
                shutil.rmtree(queries["us"].checkpoint)
                store.rewind("eu", clusters.topic_id("eu"))
                with marshal_py.connect(clusters.servers["eu"]) as marshal:
                    marshal.group(group_of(kind)).set_position(TOPIC, to="earliest")
                print(f"{kind}: a checkpoint deleted, the table rewound, the group of eu set back", flush=True)
            for one in queries.values():
                one.start()
        return _count(store, clusters.produced, queries, kills)
    finally:
        for one in queries.values():
            one.kill()


def _await_progress(store: Store, queries: dict[str, Query], before: set[Place]) -> None:
    """Waits until each query has written something since `before`, so that every kill finds one at work."""
    deadline = time.monotonic() + STARTS_S
    while {place[0] for place in set(store.places()) - before} < queries.keys():
        for one in queries.values():
            one.check()
        if time.monotonic() > deadline:
            raise SystemExit(f"{store.kind}: a query has written nothing for {STARTS_S:g} s")
        time.sleep(0.2)


def _count(store: Store, produced: set[Place], queries: dict[str, Query], kills: int) -> int:
    """Reads the table until nothing is missing, and prints what is missing, twice or unknown."""
    deadline = time.monotonic() + ENDS_S
    while True:
        for one in queries.values():
            one.check()
        seen = Counter(store.places())
        missing = produced - seen.keys()
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    twice, unknown = [place for place, times in seen.items() if times > 1], seen.keys() - produced
    figures = {"produced": len(produced), "missing": len(missing), "twice": len(twice), "unknown": len(unknown)}
    print(json.dumps({"table": store.kind, "kills": 2 * kills, **figures}), flush=True)
    return int(bool(missing or twice or unknown))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.member:
        query(*given.member)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="two-clusters-"))
    with start_cluster(1, {}) as eu, start_cluster(1, {}) as us:
        servers = dict(zip(CLUSTERS, (eu.bootstrap, us.bootstrap), strict=True))
        clusters = Clusters(servers)
        verdicts = [run(clusters, folder, kind, given.kills, Random(given.seed)) for kind in given.tables]
    if not any(verdicts):
        shutil.rmtree(folder)
    return int(any(verdicts))


if __name__ == "__main__":
    sys.exit(main())
