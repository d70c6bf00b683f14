"""How many consumers, each a process of its own, share a topic on this machine, and what does each of them cost?

Contestants: none. All processes start at once, each with one Marshal and one consumer, defaults, of an empty topic with
1,000 partitions: 10, then 30, then 100 processes. Measured:

- *shared out*: from the first start until the log says that each consumer owns its part, and that has lasted 5 s. It
  includes a quarter of a second of CPU per process for Python's imports.
- *CPU*: of a whole member process, per second, while nothing changes: heartbeats alone. Of the start: until then.
- *fenced* and *evicted*: how often that happened to the members while they started, and in the steady time.
- *log*: records per second and bytes per record (key and value) of the group's log in the steady time.

    python -m bench.group_processes --processes 100 --partitions 1000     another size

Wall times need a machine that does nothing else; CPU times do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from confluent_kafka import Consumer, TopicPartition

import marshal_py
from bench.environment import QUIET, BenchEnvironment, Result, open_environment, show, spread
from marshal_py.errors import ClusterUnreachable, GroupMissing
from marshal_py.protocol.wire.identity import route

PROCESSES: Final = (10, 30, 100)
PARTITIONS: Final = 1_000
PROCESSES_TINY: Final = (3,)
PARTITIONS_TINY: Final = 12
CALM_S, CALM_S_TINY = 5.0, 1.0  # shared out for so long
STEADY_S, STEADY_S_TINY = 30.0, 2.0
TIMEOUT_S: Final = 300.0
POLL_S: Final = 0.5
COUNTED: Final = ("fenced", "evicted")
COLUMNS: Final = [
    "processes",
    "partitions",
    "shared out after, s",
    "CPU of the start, s",
    "fenced, evicted in it",
    "CPU per member, ms/s",
    "fenced, evicted",
    "memory per member, MB",
    "log, records/s",
    "bytes per record",
]


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    sizes, partitions = (PROCESSES_TINY, PARTITIONS_TINY) if tiny else (PROCESSES, PARTITIONS)
    calm_s, steady_s = (CALM_S_TINY, STEADY_S_TINY) if tiny else (CALM_S, STEADY_S)
    rows = [_measure(environment, size, partitions, calm_s, steady_s) for size in sizes]
    notes = ["Goal: 100 processes on two cores share out 1,000 partitions; afterwards none is fenced or evicted."]
    return Result("group_processes", COLUMNS, rows, notes)


def _measure(
    environment: BenchEnvironment, processes: int, partitions: int, calm_s: float, steady_s: float
) -> list[Any]:
    environment.say(f"{processes} processes, {partitions} partitions")
    # In this order: a broker that makes a thousand partitions does not show another new topic in time.
    coordination, topic, group = environment.coordination(), environment.topic(partitions), environment.group("many")
    settings = {"bootstrap.servers": environment.bootstrap, **QUIET}
    with contextlib.ExitStack() as stack:
        admin = stack.enter_context(marshal_py.connect(settings, coordination_topic=coordination))
        log = stack.enter_context(_Log(environment, coordination, group))
        began_s = time.monotonic()
        members = [
            stack.enter_context(_process(environment.bootstrap, coordination, group, topic)) for _ in range(processes)
        ]

        def shared() -> bool:
            if ended := [member.returncode for member in members if member.poll() is not None]:
                raise RuntimeError(f"{len(ended)} members have ended, with {ended}")
            try:
                claims = sorted(len(member.claims) for member in admin.group(group).members())
            except (ClusterUnreachable, GroupMissing):
                return False
            part = partitions // processes
            return (
                len(claims) == processes and sum(claims) == partitions and claims[0] >= part and claims[-1] <= part + 1
            )

        shared_s = _lasting(shared, calm_s) - began_s
        before, _ = [_ask(member) for member in members], log.sizes()
        asked_s = time.monotonic()
        time.sleep(steady_s)
        after, sizes = [_ask(member) for member in members], log.sizes()
        took_s = time.monotonic() - asked_s
        assert shared(), "a partition has moved in the steady time"
    environment.drop(topic, coordination)
    return [
        processes,
        partitions,
        shared_s,
        spread([each["cpu_s"] for each in before]),
        [sum(each[kind] for each in before) for kind in COUNTED],
        spread([1000 * (b["cpu_s"] - a["cpu_s"]) / took_s for a, b in zip(before, after, strict=True)]),
        [sum(b[kind] - a[kind] for a, b in zip(before, after, strict=True)) for kind in COUNTED],
        spread([each["memory_mb"] for each in after]),
        len(sizes) / took_s,
        sum(sizes) / max(1, len(sizes)),
    ]


def _lasting(condition: Callable[[], bool], for_s: float) -> float:
    """Waits until `condition` has held for so long. Returns the monotonic time when it began to hold."""
    deadline_s, since_s = time.monotonic() + TIMEOUT_S, None
    while since_s is None or time.monotonic() - since_s < for_s:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the partitions were not shared out within {TIMEOUT_S:g} s")
        since_s = (since_s or time.monotonic()) if condition() else None
        time.sleep(POLL_S)
    return since_s


class _Log:
    """Reads what is written to the group's log."""

    def __init__(self, environment: BenchEnvironment, topic: str, group: str) -> None:
        self._consumer = Consumer({"bootstrap.servers": environment.bootstrap, "group.id": "unused", **QUIET})
        partitions = len(self._consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions)
        self._at = TopicPartition(topic, route(group, partitions), 0)
        self._consumer.assign([self._at])

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def sizes(self) -> list[int]:
        """Returns the bytes of key and value of each record since the last call."""
        _, end = self._consumer.get_watermark_offsets(self._at, TIMEOUT_S)
        found: list[int] = []
        while self._at.offset < end:
            for message in self._consumer.consume(10_000, 1.0):
                self._at.offset = (message.offset() or 0) + 1
                found.append(len(message.key() or b"") + len(message.value() or b""))
        return found


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A member, until the end of the block. Arguments as for `_consume`."""
    command = [sys.executable, "-m", "bench.group_processes", "--member", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # nothing to lose: the topic is empty


def _ask(member: subprocess.Popen[str]) -> dict[str, float]:
    assert member.stdin is not None
    assert member.stdout is not None
    member.stdin.write("\n")
    member.stdin.flush()
    line = member.stdout.readline()
    if not line:
        raise RuntimeError(f"a member has ended with {member.wait()}")
    found: dict[str, float] = json.loads(line)
    return found


def _joined(marshal: marshal_py.Marshal, group: str, topic: str) -> marshal_py.Consumer:
    """Joins, again if the broker does not answer in time while all processes start, as a supervisor would."""
    while True:
        with contextlib.suppress(ClusterUnreachable):
            return marshal.consumer(group, [topic], start="earliest")


def _consume(bootstrap: str, coordination: str, group: str, topic: str) -> None:
    """Consumes, and writes a line of figures for each line on stdin, until stdin ends."""
    settings = {"bootstrap.servers": bootstrap, "log_level": 0}
    seen: Counter[str] = Counter()
    with (
        marshal_py.connect(settings, coordination_topic=coordination, timeout_s=TIMEOUT_S) as marshal,
        _joined(marshal, group, topic) as consumer,
    ):

        def answer() -> None:
            for _ in sys.stdin:
                seen.update(event.kind for event in consumer.events())
                figures = {kind: seen[kind] for kind in COUNTED}
                memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
                print(json.dumps({**figures, "cpu_s": time.process_time(), "memory_mb": memory_mb}), flush=True)

        threading.Thread(target=answer, daemon=True).start()
        for message in consumer:
            message.ack()


def main() -> None:
    if sys.argv[1:2] == ["--member"]:
        _consume(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m bench.group_processes", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--processes", type=int, nargs="+", default=PROCESSES, metavar="N")
    parser.add_argument("--partitions", type=int, default=PARTITIONS, metavar="N")
    parser.add_argument("--bootstrap-servers", metavar="HOST:PORT,...", help="a cluster to measure on")
    arguments = parser.parse_args()
    with open_environment(arguments.bootstrap_servers) as environment:
        rows = [_measure(environment, size, arguments.partitions, CALM_S, STEADY_S) for size in arguments.processes]
    show(Result("group_processes", COLUMNS, rows, []))


if __name__ == "__main__":
    main()
