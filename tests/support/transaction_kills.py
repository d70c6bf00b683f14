"""Processes of one group run the program of docs/transactions.md and are killed and stopped all the time.

    python -m tests.support.transaction_kills --messages 30000 --kills 20 --stops 4 --processes 3 --seed 1

On an Apache Kafka with its default settings. Which process ends next is drawn from the seed; it ends by kill -9 or by
SIGTERM while it works, and another one starts. Then an independent count compares the table with what was produced:
exit code 1 if a message has no effect, or two.
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
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.kafka import start_cluster

ROOT: Final = Path(__file__).resolve().parents[2]
GUIDE: Final = ROOT / "docs" / "transactions.md"
TOPIC: Final = "orders"
PARTITIONS: Final = 6
ENDS_S: Final = 300.0  # after the last end everything is in the table within this


class Count(NamedTuple):
    """What the table says of the messages that were produced."""

    produced: int
    missing: int
    doubled: int


def program(servers: str) -> str:
    """The guide's first program, for a cluster elsewhere."""
    [first, *_] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return str(first).replace("localhost:9092", servers)


def fill(servers: str, messages: int) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for number in range(messages):
        producer.produce(TOPIC, b"value", key=str(number).encode())
        if number % 1000 == 999:
            producer.poll(0)
    producer.flush(60)


def effects(folder: Path) -> Counter[int]:
    """How often each message is in the table. The program stores its key as the text of its bytes."""
    path = folder / "shop.db"
    if not path.exists():
        return Counter()
    with closing(sqlite3.connect(path, timeout=60)) as database:
        try:
            rows = database.execute("SELECT id FROM orders").fetchall()
        except sqlite3.OperationalError:  # no table yet
            return Counter()
    return Counter(int(key[2:-1]) for (key,) in rows)


def run(
    servers: str,
    folder: Path,
    messages: int,
    ends: list[int],
    processes: int,
    seed: int,
    say: Callable[[str], object] = print,
) -> Count:
    """`ends`: a signal per end, evenly over the messages. The topic exists and is empty."""
    dice, code = Random(seed), program(servers)
    fill(servers, messages)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})

    def wait(wanted: int) -> None:
        deadline = time.monotonic() + ENDS_S
        while len(effects(folder)) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(effects(folder))} of {wanted} messages have an effect")
            time.sleep(0.05)

    running = [start() for _ in range(processes)]
    try:
        for number, sent in enumerate(ends, 1):
            wait(messages * number // (len(ends) + 1))
            victim = running.pop(dice.randrange(len(running)))
            victim.send_signal(sent)
            victim.wait(60)
            say(f"end {number} by {signal.Signals(sent).name}: {len(effects(folder))} messages have an effect")
            running.append(start())
        wait(messages)
    finally:
        for process in running:
            process.kill()
            process.wait(60)
    found = effects(folder)
    return Count(messages, messages - len(found), sum(times - 1 for times in found.values()))


def main(arguments: Any) -> int:
    ends = [int(signal.SIGKILL)] * arguments.kills + [int(signal.SIGTERM)] * arguments.stops
    Random(arguments.seed).shuffle(ends)
    with start_cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(60)
        count = run(cluster.bootstrap, Path(folder), arguments.messages, ends, arguments.processes, arguments.seed)
    print(json.dumps({**count._asdict(), "kills": arguments.kills, "stops": arguments.stops, "seed": arguments.seed}))
    return 1 if count.missing or count.doubled else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("messages", 30_000), ("kills", 20), ("stops", 4), ("processes", 3), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    raise SystemExit(main(parser.parse_args()))
