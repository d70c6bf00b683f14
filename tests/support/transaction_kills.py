"""Processes of one group run a program of the guide and are killed and stopped all the time.

    python -m tests.support.transaction_kills --messages 30000 --kills 20 --stops 4 --processes 3 --seed 1
    python -m tests.support.transaction_kills --database postgresql
    python -m tests.support.transaction_kills --program inbox

The program is that of docs/acks.md with a guard, or that of docs/process.md with an inbox and handlers in parallel.
On an Apache Kafka with its default settings, and SQLite unless it says otherwise. Messages are produced in equal
shares, one for each end. When a quarter of a share has taken effect, one of the processes, drawn from the seed, ends in
the midst of it by kill -9 or by SIGTERM, and another one starts. The next share comes when all before it is in the
table. Then an independent count compares the table with what was produced: exit code 1 if a message has no effect, or
two.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import psycopg
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support import postgres
from tests.support.kafka import start_cluster

ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAMS: Final = {  # the page of each, and the heading before it
    "guard": ("docs/acks.md", "## Each effect once"),
    "inbox": ("docs/process.md", "### Each effect once"),
}
TOPIC: Final = "orders"
PARTITIONS: Final = 6
ENDS_S: Final = 300.0  # after the last end everything is in the table within this
POLL_S: Final = 0.05
IDS: Final = "SELECT id FROM orders"
# What the guide's program says differently with psycopg, where a connection's own block closes it.
ON_POSTGRES: Final = (
    ("import sqlite3", "import psycopg"),
    ('sqlite3.connect("shop.db", timeout=30)', "psycopg.connect(URL)"),
    ("with database:", "with database.transaction():"),
    (") as database, database:", ") as database, database.transaction():"),
    ("value BLOB", "value BYTEA"),
    ("VALUES (?, ?)", "VALUES (%s, %s)"),
)


class Count(NamedTuple):
    """What the table says of the messages that were produced."""

    produced: int
    missing: int
    doubled: int


class Sqlite:
    """The database of the guide: a file in the folder of the processes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "shop.db"

    def program(self, code: str) -> str:
        return code

    def ids(self) -> list[str]:
        """The ids in the table; none as long as there is no table."""
        if not self._path.exists():
            return []
        with closing(sqlite3.connect(self._path, timeout=60)) as database:
            try:
                return [found for (found,) in database.execute(IDS)]
            except sqlite3.OperationalError:
                return []


class Postgres:
    """A database on a server of PostgreSQL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def program(self, code: str) -> str:
        for there, here in ON_POSTGRES:
            code = code.replace(there, here)
        assert "sqlite" not in code
        assert "?" not in code
        return code.replace("URL", repr(self._url))

    def ids(self) -> list[str]:
        """The ids in the table; none as long as there is no table."""
        with psycopg.connect(self._url) as database:
            try:
                return [found for (found,) in database.execute(IDS)]
            except psycopg.errors.UndefinedTable:
                return []


def program(servers: str, name: str) -> str:
    """The first program behind the heading, for a cluster elsewhere."""
    page, heading = PROGRAMS[name]
    [first, *_] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text().partition(heading)[2], re.DOTALL)
    return str(first).replace("localhost:9092", servers)


def fill(servers: str, first: int, messages: int) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for number in range(first, first + messages):
        producer.produce(TOPIC, b"value", key=str(number).encode())
        if number % 1000 == 999:
            producer.poll(0)
    assert producer.flush(60) == 0


def effects(database: Sqlite | Postgres) -> Counter[int]:
    """How often each message is in the table. The program stores its key as the text of its bytes."""
    return Counter(int(key[2:-1]) for key in database.ids())


def run(
    servers: str,
    folder: Path,
    messages: int,
    ends: list[int],
    processes: int,
    seed: int,
    say: Callable[[str], object] = print,
    database: Sqlite | Postgres | None = None,
    name: str = "guard",
) -> Count:
    """`ends`: a signal per end, one for each share of the messages. The topic exists and is empty."""
    database = database or Sqlite(folder)
    dice, code = Random(seed), database.program(program(servers, name))
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        running.append(subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment))

    def wait(wanted: int) -> None:
        deadline = time.monotonic() + ENDS_S
        while (found := len(effects(database))) < wanted:
            if any(process.poll() is not None for process in running):
                raise RuntimeError("a process has ended by itself; its error is above")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{found} of {wanted} messages have an effect")
            time.sleep(POLL_S)

    try:
        start()
        fill(servers, 0, 1)
        wait(1)  # the first process has created the tables: on PostgreSQL two at once would get in each other's way
        for _ in range(processes - 1):
            start()
        produced, share = 1, messages // (len(ends) + 1)
        for number, sent in enumerate(ends, 1):
            wait(produced)
            fill(servers, produced, share)
            wait(produced + share // 4)
            produced += share
            victim = running.pop(dice.randrange(len(running)))
            victim.send_signal(sent)
            victim.wait(60)
            say(f"end {number} by {signal.Signals(sent).name}: {len(effects(database))} of {produced} have an effect")
            start()
        fill(servers, produced, messages - produced)
        wait(messages)
    finally:
        for process in running:
            process.kill()
            process.wait(60)
    found = effects(database)
    return Count(messages, messages - len(found), sum(times - 1 for times in found.values()))


def main(arguments: Any) -> int:
    ends = [int(signal.SIGKILL)] * arguments.kills + [int(signal.SIGTERM)] * arguments.stops
    Random(arguments.seed).shuffle(ends)
    with start_cluster() as cluster, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        database = Postgres(stack.enter_context(postgres.server())) if arguments.database == "postgresql" else None
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(60)
        shape = (arguments.messages, ends, arguments.processes, arguments.seed)
        count = run(cluster.bootstrap, folder, *shape, database=database, name=arguments.program)
    print(json.dumps({**count._asdict(), **vars(arguments)}))
    return 1 if count.missing or count.doubled else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("messages", 30_000), ("kills", 20), ("stops", 4), ("processes", 3), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--program", choices=[*PROGRAMS], default="guard")
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    raise SystemExit(main(parser.parse_args()))
