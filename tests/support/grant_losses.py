"""Consumers in at-most-once mode are killed on Apache Kafka: what each kill loses, and whether the survivor names it.

    python -m tests.support.grant_losses --rate 100 --kills 6

In each case two consumers share a group of 12 partitions, and one of them is killed (SIGKILL) again and again, at a
moment that the seed decides; a new one replaces it. Cases: nothing to do (idle), `--rate` messages per second, and a
backlog, with handlers of `--handler-ms`. Handlers write a journal before and after each message. Prints a row per kill:

  lost      messages that were granted to the dead consumer and that no handler ever got
  work_s    the same as time, at the speed of the dead consumer's handler: at most two seconds, or one message
  named     messages in the ranges that the survivor reports as `amo_lost`
  begun     those of them that the dead consumer's handler had begun; oldest_s: how long before the kill the first ended

Exit code 1 if a message is missing that no range names, if a range names a message that is neither missing nor was
handled within an interval before the kill, if a message was handled twice, or if a kill lost more than its bound.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import marshal_py
from tests.support.journal import Journal, Tail
from tests.support.kafka import start_cluster

ROOT: Final = Path(__file__).resolve().parents[2]
PARTITIONS: Final = 12
INTERVAL_S: Final = 1.0
BACKLOG: Final = 20_000
FEW: Final = 60  # messages that are handled before a consumer with nothing to do is killed
WORK_S: Final = 2.0  # of a handler's work: what a kill may lose (PROTOCOL.md D2)
DELAYS_S: Final = (0.5, 3.0)
DEADLINE_S: Final = 120.0
LOOK_S: Final = 0.05
Place = tuple[int, int]  # partition, offset


def consume(servers: str, topic: str, group: str, handler_ms: int, path: str) -> None:
    """The program of a consumer."""
    journal = Journal(Path(path))
    with (
        marshal_py.connect(servers, last_will="off") as marshal,
        marshal.consumer(
            group, [topic], start="earliest", delivery="at_most_once", heartbeat_interval_s=INTERVAL_S
        ) as consumer,
        marshal_py.stop_on_signals(consumer),
    ):
        ended = threading.Event()

        def note() -> None:
            for event in consumer.events():
                if event.kind in ("claimed", "amo_lost"):
                    journal.write(event.kind, p=event.partition, o=event.offset, to=event.to)

        def report() -> None:
            while not ended.wait(LOOK_S):
                note()

        reporting = threading.Thread(target=report)
        reporting.start()
        try:
            for message in consumer:
                journal.write("begin", p=message.partition, o=message.offset)
                time.sleep(handler_ms / 1000)
                journal.write("end", p=message.partition, o=message.offset)
                message.ack()
        finally:
            ended.set()
            reporting.join()
            note()  # what came since the last look: a consumer may be stopped as soon as it owns all


class Life:
    """One consumer's process, with its journal."""

    def __init__(self, servers: str, topic: str, group: str, handler_ms: int, path: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self.killed_ns = 0
        self._tail = Tail(path)
        given = (servers, topic, group, str(handler_ms), str(path))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.grant_losses", "--consume", *given], cwd=ROOT
        )

    def said(self, kind: str) -> list[dict[str, Any]]:
        self.lines += self._tail.read()
        return [line for line in self.lines if line["e"] == kind]

    def places(self, kind: str) -> dict[Place, int]:
        """Returns the messages of these lines, with the time of each."""
        return {(line["p"], line["o"]): line["ns"] for line in self.said(kind)}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.killed_ns = time.monotonic_ns()


class Row(NamedTuple):
    case: str
    handler_ms: int
    handled: int
    speed: float  # messages that its handler does per second
    lost: int
    work_s: float
    named: int
    begun: int
    oldest_s: float
    within: bool  # what is lost is two seconds of work at most, or one message


class Verdict(NamedTuple):
    rows: list[Row]
    wrong: list[str]


def run_case(
    servers: str, folder: Path, case: str, handler_ms: int, kills: int, rate: float, rng: random.Random
) -> Verdict:
    """Runs one case: `case` is idle, rate or backlog."""
    name = f"{case}-{handler_ms}-{rng.randbytes(4).hex()}"
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([NewTopic(name, PARTITIONS, 1)]).values():
        future.result(DEADLINE_S)
    producer, stopping = Producer({"bootstrap.servers": servers, "linger.ms": 2}), threading.Event()
    produced = 0

    def produce(count: int) -> None:
        nonlocal produced
        for number in range(produced, produced + count):
            producer.produce(name, b"order", partition=number % PARTITIONS)
        produced += count
        producer.flush(DEADLINE_S)

    def trickle() -> None:
        begun = time.monotonic()
        while not stopping.wait(0.01):
            produce(int(rate * (time.monotonic() - begun)) - produced)

    lives: list[Life] = []

    def start() -> Life:
        lives.append(Life(servers, name, name, handler_ms, folder / f"{name}-{len(lives)}.journal"))
        return lives[-1]

    producing = threading.Thread(target=trickle)
    dead: list[Life] = []
    with marshal_py.connect(servers) as marshal:
        group = marshal.group(name)

        def settled(sessions: int) -> bool:
            info = group.info()
            return (info.sessions, info.owned) == (sessions, PARTITIONS)

        try:
            if case == "backlog":
                produce(BACKLOG)
            elif case == "rate":
                producing.start()
            pair = [start(), start()]
            for _ in range(kills):
                _until(lambda: all(life.said("claimed") for life in pair), "both own partitions")
                if case == "idle":
                    produce(FEW)
                    _until(lambda: sum(len(life.said("end")) for life in lives) == produced, "all is handled")
                    time.sleep(INTERVAL_S)  # heartbeats say so
                else:
                    _until(lambda: all(life.said("end") for life in pair), "both handle messages")
                time.sleep(rng.uniform(*DELAYS_S))
                victim = pair.pop(rng.randrange(2))
                victim.kill()
                dead.append(victim)
                _until(lambda: settled(1), "the survivor owns all")
                pair.append(start())
        finally:
            stopping.set()
            if producing.ident is not None:
                producing.join()
            for life in lives:
                if life.process.poll() is None:
                    life.process.send_signal(signal.SIGTERM)
            for life in lives:
                life.process.wait(DEADLINE_S)
        granted = {position.partition: position.position or 0 for position in group.info().positions}
    return _judge(case, handler_ms, lives, dead, granted)


def _judge(case: str, handler_ms: int, lives: list[Life], dead: list[Life], granted: dict[int, int]) -> Verdict:
    """Compares what was granted for good with what the journals hold and with what survivors named."""
    begun = Counter(place for life in lives for place in life.places("begin"))
    missing = {(number, offset) for number, to in granted.items() for offset in range(to)} - begun.keys()
    wrong = [f"{place} was handled {times} times" for place, times in begun.items() if times > 1]
    ranges = [line for life in lives for line in life.said("amo_lost")]
    unnamed, rows = set(missing), []
    for number, victim in enumerate(dead):
        until_ns = dead[number + 1].killed_ns if number + 1 < len(dead) else time.monotonic_ns()
        mine = [line for line in ranges if victim.killed_ns <= line["ns"] < until_ns]
        named = {(line["p"], offset) for line in mine for offset in range(line["o"], line["to"])}
        began, ended = victim.places("begin"), victim.places("end")
        wrong += [f"{place} is named, and somebody else got it" for place in named - missing - began.keys()]
        ages_s = [(victim.killed_ns - ended[place]) / 1e9 for place in named & ended.keys()]
        wrong += [f"a message is named that was handled {age:.2f} s before" for age in ages_s if age > INTERVAL_S]
        took_s = [(ended[place] - began[place]) / 1e9 for place in ended]
        each_s, lost = statistics.fmean(took_s) if took_s else 0.0, len(named & missing)
        within = lost <= 1 or lost * each_s <= WORK_S
        if not within:
            wrong.append(f"{lost} messages, {lost * each_s:.1f} s of work, were lost in one kill")
        unnamed -= named
        rows.append(
            Row(
                case,
                handler_ms,
                len(ended),
                round(1 / each_s, 1) if each_s else 0.0,
                lost,
                round(lost * each_s, 2),
                len(named),
                len(named & began.keys()),
                round(max(ages_s, default=0.0), 2),
                within,
            )
        )
    wrong += [f"{place} is missing, and no survivor named it" for place in sorted(unnamed)]
    return Verdict(rows, wrong)


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {DEADLINE_S:g} s: {what}")
        time.sleep(LOOK_S)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.grant_losses")
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--handler-ms", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--consume", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.consume:
        servers, topic, group, handler_ms, path = given.consume
        consume(servers, topic, group, int(handler_ms), path)
        return 0
    rng, wrong = random.Random(given.seed), list[str]()
    cases = [("idle", given.handler_ms[0])]
    cases += [(case, handler_ms) for case in ("rate", "backlog") for handler_ms in given.handler_ms]
    print(json.dumps(Row._fields))
    with start_cluster() as cluster, tempfile.TemporaryDirectory(prefix="grant-losses-") as folder:
        for case, handler_ms in cases:
            verdict = run_case(cluster.bootstrap, Path(folder), case, handler_ms, given.kills, given.rate, rng)
            wrong += [f"{case}, {handler_ms} ms: {what}" for what in verdict.wrong]
            for row in verdict.rows:
                print(json.dumps(row), flush=True)
    for what in wrong:
        print(what)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
