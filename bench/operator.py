"""What do the commands of an operator cost, on a long log and with 500 groups?

- *long log*: one group, 20 consumers with 100 partitions, 525,000 records, of which each heartbeat changes 12 claims;
  snapshots as consumers write them. The newest one is as far back as it regularly gets.
- *groups*: 500 groups with 12 partitions and one consumer each in 16 logs, whose newest snapshots are as far back as in
  the middle of an interval. Ten groups share a topic.

Each command is a process of its own, and finds the package compiled, as pip leaves it. Then `marshal top` in a terminal
of 200x50 and `marshal exporter`, while every consumer heartbeats three times in two seconds and every position moves
each time: the share of a core, the time of a scrape and the peak of the memory. CPU time is that of the process, user
and system.
"""

from __future__ import annotations

import gzip
import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import IO, Any, Final

from confluent_kafka import Producer

from bench.environment import QUIET, BenchEnvironment, Result, spread
from bench.fold import INCARNATION
from bench.startup import vouched
from marshal_py.protocol.duties import SNAPSHOT_RECORDS_MIN
from marshal_py.protocol.fold.rationalizer import PROTOCOL_VERSION
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, route
from marshal_py.protocol.wire.records import ClaimingPartition, ClaimState, Genesis, Heartbeat, Join, Record, Topology
from tests.support.brokers import free_ports, wait_until

LOGS: Final = 16
CLAIMS: Final = 12  # changed by each heartbeat
BEAT_S: Final = 2.0 / 3
SCREEN: Final = (50, 200)
MARSHAL: Final = str(Path(sys.executable).with_name("marshal"))
COMMAND_S: Final = 120.0
REPEATS: Final = 5
WARM_S: Final = 60.0  # top first reads what follows the snapshots
WATCHED_S: Final = 30.0
MESSAGES: Final = 1_000  # in each partition
BEHIND: Final = 600  # where the positions are at the end of the history


class Life:
    """Groups in one coordination topic: as many members and partitions each, which heartbeat in turn."""

    def __init__(self, topics: list[str], groups: list[str], members: int, partitions: int, logs: int) -> None:
        self.topics, self.members, self.partitions, self.logs = topics, members, partitions, logs
        self.groups = {name: topics[number % len(topics)] for number, name in enumerate(groups)}
        self.values: dict[int, list[bytes]] = defaultdict(list)
        self.beats: dict[int, list[tuple[str, int, list[int]]]] = defaultdict(list)  # by log: group, session, epochs
        self.turns: dict[int, int] = defaultdict(int)
        self.worlds: dict[int, World] = {}
        self.covered: dict[int, int] = {}  # by log: where the records after its newest snapshot begin
        self.random = Random(1)
        self.root = Genesis(INCARNATION, logs, HASH_NAME, PROTOCOL_VERSION)
        for log in range(logs):
            self.values[log].append(codec.encode(self.root, "", INCARNATION))
        for name in groups:
            self._begin(name)

    def _begin(self, group: str) -> None:
        log, topic = route(group, self.logs), self.groups[group]

        def add(record: Record) -> int:
            self.values[log].append(codec.encode(record, group, INCARNATION))
            return len(self.values[log]) - 1

        joins = [Join(f"client-{m}", self.random.randbytes(16), 1, 2_000, (topic,)) for m in range(self.members)]
        sessions = [add(join) for join in joins]
        add(Topology(topic, self.partitions, -1))
        epochs: dict[int, list[int]] = {session: [] for session in sessions}
        for partition in range(self.partitions):
            session = sessions[partition % self.members]
            epochs[session].append(add(ClaimingPartition(session, topic, partition, -1, 0)))
        self.beats[log] += [(group, session, own) for session, own in epochs.items()]

    def beat(self, log: int, at: int) -> bytes:
        """Returns the next heartbeat of a log. `at`: where its positions are."""
        turn, self.turns[log] = self.turns[log], self.turns[log] + 1
        round_, number = divmod(turn, len(self.beats[log]))
        group, session, own = self.beats[log][number]
        changed = [own[(round_ + k) % len(own)] for k in range(min(CLAIMS, len(own)))]
        states = tuple(ClaimState(epoch, at, MESSAGES - at, 1) for epoch in sorted(changed))
        return codec.encode(Heartbeat(session, round_, states), group, INCARNATION)

    def history(self, log: int, records: int, tail: int) -> list[bytes]:
        """Returns the log's values, with snapshots every so many records and `tail` records after the last one."""
        values = self.values[log]
        opening = len(values)  # whose offsets are sessions and epochs: no snapshot may move them
        while len(values) < records and self.beats[log]:
            values.append(self.beat(log, BEHIND * len(values) // records))
        world = self.worlds[log] = World(log, self.root) if log else World()
        found = vouched(values, range(len(values) - tail, opening, -SNAPSHOT_RECORDS_MIN), world)
        self.covered[log] = world.next_offset - tail
        return found

    def live(self, log: int, at: int) -> list[bytes]:
        """Returns a heartbeat of each consumer, and a snapshot when consumers write one. `at`: of the positions."""
        values, world = [self.beat(log, at) for _ in self.beats[log]], self.worlds[log]
        due = world.next_offset - self.covered[log] >= SNAPSHOT_RECORDS_MIN
        found = vouched(values, {len(values)} if due else (), world)
        self.covered[log] = world.next_offset if due else self.covered[log]
        return found


class Feed:
    """Writes values with the times at which a group would have written them."""

    def __init__(self, environment: BenchEnvironment, topic: str) -> None:
        queue = {"queue.buffering.max.messages": 1_100_000, "linger.ms": 20}
        self.producer = Producer({"bootstrap.servers": environment.bootstrap, **queue, **QUIET})
        self.topic = topic

    def write(self, log: int, values: Iterable[bytes], step_ms: float) -> None:
        values = list(values)
        at_ms = time.time() * 1000 - len(values) * step_ms
        for number, value in enumerate(values):
            self.producer.produce(self.topic, value, None, log, timestamp=int(at_ms + number * step_ms))
        if self.producer.flush(COMMAND_S):
            raise TimeoutError(f"{self.topic} did not take {len(values)} records within {COMMAND_S:g} s")


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    rows = _long_log(environment, tiny) + _groups(environment, tiny)
    columns = ["where", "command", "CPU, s", "wall, s", "goal"]
    notes = ["Goals: CPU seconds of a command; top: share of a core; a scrape in ms; MB of the exporter."]
    return Result("operator", columns, rows, notes)


def _long_log(environment: BenchEnvironment, tiny: bool) -> list[list[Any]]:
    records, partitions = (3_000, 12) if tiny else (525_000, 100)
    topic, log = environment.topic(partitions), environment.topic(1, {"retention.ms": "-1", "retention.bytes": "-1"})
    environment.fill(topic, partitions, partitions * MESSAGES, 10)
    life = Life([topic], ["billing"], 1 if tiny else 20, partitions, 1)
    environment.say(f"a log of {records:,} records")
    feed = Feed(environment, log)
    feed.write(0, life.history(0, records, min(SNAPSHOT_RECORDS_MIN, records // 2)), BEAT_S * 1000 / life.members)
    commands = [
        ["state", "billing"],
        ["state", "billing", "--lag"],
        ["state", "billing", "--members"],
        ["explain", "billing", f"{topic}:0"],
        ["groups", "ls"],
        ["doctor"],
        ["check", "billing"],
    ]
    rows = [_row(environment, log, f"log of {records:,}", command, 1.0, tiny) for command in commands]
    environment.drop(topic, log)
    return [_row(environment, log, "", ["--help"], 0.2, tiny), *rows]


def _groups(environment: BenchEnvironment, tiny: bool) -> list[list[Any]]:
    count = 20 if tiny else 500
    topics = [environment.topic(CLAIMS) for _ in range(count // 10)]
    for topic in topics:
        environment.fill(topic, CLAIMS, CLAIMS * MESSAGES, 10)
    log = environment.topic(LOGS, {"retention.ms": "-1", "retention.bytes": "-1"})
    names = [f"group-{number:03}" for number in range(count)]
    life, feed = Life(topics, names, 1, CLAIMS, LOGS), Feed(environment, log)
    for number in range(LOGS):
        environment.say(f"log {number} of {count} groups")
        tail = 100 if tiny else SNAPSHOT_RECORDS_MIN // 2
        values = life.history(number, 12 * tail, tail)
        feed.write(number, values, BEAT_S * 1000 / max(1, len(life.beats[number])))
    one = names[count // 2]
    commands = [
        ["state", one],
        ["state", one, "--lag"],
        ["explain", one, f"{life.groups[one]}:0"],
        ["check", one],
        ["state"],
        ["state", "--lag"],
        ["groups", "ls"],
        ["doctor"],
        ["top", "--once"],
    ]
    where = f"{count} groups"
    with _living(life, feed):
        rows = [_row(environment, log, where, command, 0.6, tiny) for command in commands]
        rows.append([where, "top, share of a core", _top(environment, log, tiny), None, 0.1])
        scrape_ms, peak_mb = _exporter(environment, log, tiny)
    rows += [[where, "exporter, a scrape in ms", scrape_ms, None, 50], [where, "exporter, MB", peak_mb, None, 80]]
    environment.drop(log, *topics)
    return rows


@contextmanager
def _living(life: Life, feed: Feed) -> Iterator[None]:
    """All consumers heartbeat until the context ends."""
    ended = threading.Event()

    def live() -> None:
        at = BEHIND
        while not ended.is_set():
            began, at = time.monotonic(), min(MESSAGES, at + 1)
            for log in life.beats:
                feed.write(log, life.live(log, at), 0)
            ended.wait(max(0.0, BEAT_S - (time.monotonic() - began)))

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _arguments(environment: BenchEnvironment, log: str, command: list[str]) -> list[str]:
    where = ["--bootstrap-servers", environment.bootstrap, "--coordination-topic", log]
    return [MARSHAL, *command, *(where if log and command != ["--help"] else [])]


def _row(environment: BenchEnvironment, log: str, where: str, command: list[str], goal: float, tiny: bool) -> list[Any]:
    walls, spent = [], []
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(1 if tiny else REPEATS):
        with tempfile.TemporaryFile() as out:
            began = time.monotonic()
            process = subprocess.Popen(_arguments(environment, log, command), stdout=out, stderr=out, env=compiled)
            _, status, used = os.wait4(process.pid, 0)
            walls.append(time.monotonic() - began)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode not in (0, 1, 2):
                out.seek(0)
                raise RuntimeError(f"{command}: {process.returncode}: {out.read().decode()}")
        spent.append(used.ru_utime + used.ru_stime)
    return [where, " ".join(command), spread(spent), spread(walls), goal]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _watched(process: subprocess.Popen[bytes], tiny: bool, look: Callable[[], None] = lambda: None) -> float:
    """Returns the share of a core that a running process uses."""
    time.sleep(WARM_S / (5 if tiny else 1))
    began, before = time.monotonic(), _cpu_s(process.pid)
    while time.monotonic() - began < (2 if tiny else WATCHED_S):
        time.sleep(1)
        look()
    return (_cpu_s(process.pid) - before) / (time.monotonic() - began)


def _top(environment: BenchEnvironment, log: str, tiny: bool) -> float:
    ours, its = pty.openpty()
    with os.fdopen(ours, "rb", 0) as screen:
        size = {"LINES": str(SCREEN[0]), "COLUMNS": str(SCREEN[1]), "TERM": "xterm-256color"}
        process = subprocess.Popen(
            _arguments(environment, log, ["top"]), stdin=its, stdout=its, stderr=its, env={**os.environ, **size}
        )
        os.close(its)
        seen: list[int] = []
        reading = threading.Thread(target=_drain, args=(screen, seen))
        reading.start()
        share = _watched(process, tiny)
        process.terminate()
        process.wait()
        reading.join()
    if sum(seen) < SCREEN[1]:
        raise RuntimeError("top has drawn nothing")
    return round(share, 3)


def _drain(screen: IO[bytes], seen: list[int]) -> None:
    try:
        while piece := screen.read(65_536):
            seen.append(len(piece))
    except OSError:  # Linux: the other end is closed
        pass


def _exporter(environment: BenchEnvironment, log: str, tiny: bool) -> tuple[Any, float]:
    (port,) = free_ports(1)
    arguments = _arguments(environment, log, ["exporter", "--port", str(port)])
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    took = list[float]()
    page = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept-Encoding": "gzip"})

    def knows_lags() -> bool:
        with suppress(urllib.error.URLError):
            began = time.monotonic()
            with urllib.request.urlopen(page) as answer:
                found = answer.read()
            took.append((time.monotonic() - began) * 1000)
            packed = answer.headers["Content-Encoding"] == "gzip"  # not before the first refresh
            return b"marshal_group_lag{" in (gzip.decompress(found) if packed else found)
        return False

    def scrape() -> None:
        if not knows_lags():
            raise RuntimeError("the exporter has forgotten the lags")

    try:
        wait_until(knows_lags, COMMAND_S, "the exporter has read the logs")
        took.clear()
        _watched(process, tiny, scrape)
        status = Path(f"/proc/{process.pid}/status").read_text()
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    finally:
        process.terminate()
        process.wait()
    return spread(took), round(int(peak) / 1024, 1)
