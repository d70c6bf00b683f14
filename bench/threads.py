"""How many threads does a Marshal have, and how many more does each consumer need?

librdkafka gives each of its clients a thread per broker. A process of its own is measured for each size of the cluster:
it has the embedded broker and one Marshal, and counts its threads in /proc (so this needs Linux) once the number stands
still. A connection has three clients: one reads the coordination log, one writes it, one sends requests. A consumer has
one, for its data. They cannot be shared: confluent-kafka admits one thread at a time into a client and gives it one
queue, so that a slow handler of one consumer would hold up the messages of another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import marshal_py
from bench.environment import BenchEnvironment, Result
from marshal_py.embedded import Broker

BROKERS: Final = (1, 3, 12)
BROKERS_TINY: Final = (1,)
CONSUMERS: Final = 3
STILL_S: Final = 1.0  # a count that is the same so much later is taken
TIMEOUT_S: Final = 120.0
GOAL: Final = (
    "Goal: 3 per broker and 12 more for a connection, 1 per broker and 4 more for each consumer, none left after close."
)


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    rows = []
    for brokers in BROKERS_TINY if tiny else BROKERS:
        environment.say(f"a cluster of {brokers}")
        command = [sys.executable, "-m", "bench.threads", str(brokers)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        rows.append([brokers, *json.loads(done.stdout)])
    return Result("threads", ["brokers", "connect", "each consumer", "left after close"], rows, [GOAL])


def _threads() -> int:
    """The number of threads of this process, once it stands still."""
    tasks, before = Path("/proc/self/task"), -1
    while before != (now := len(os.listdir(tasks))):
        before = now
        time.sleep(STILL_S)
    return now


def _measure(brokers: int) -> list[int]:
    with Broker(brokers, topics={"__marshal": 1, "orders": brokers}) as broker:
        idle = _threads()
        marshal = marshal_py.connect({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
        connected = _threads()
        consumers = [marshal.consumer(f"group-{number}", ["orders"]) for number in range(CONSUMERS)]
        consuming = _threads()
        marshal.close()
        return [connected - idle, (consuming - connected) // len(consumers), _threads() - idle]


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
