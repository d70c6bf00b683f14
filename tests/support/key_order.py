"""The order per key while members join, are dropped, step down, stop and are killed: processes on an Apache Kafka.

    python -m tests.support.key_order --messages 100000 --changes 25 --pending 1 --seed 1
    python -m tests.support.key_order --messages 100000 --changes 25 --workers 16
    python -m tests.support.key_order --messages 100000 --changes 25 --workers 4 --batch 20
    python -m tests.support.key_order --messages 20000 --changes 24 --workers 4 --executor processes

One group with the policy `members`; keys are made by `subject_key`. A slice of messages is produced before each change,
and the change comes while the slice is handled. Handlers give some messages back. With `--workers` each member handles
its messages by `Consumer.process`, with `--batch` in lists, and some are frozen for longer than their lease; with
`--executor processes` every other worker process of a member is killed amid its messages. Then
OrderJudge sees all deliveries in the order of the clock that the processes share: exit code 1 if a message of a key was
passed over, came in another order, or was never finished. tests/client/test_key_order.py does the same in virtual time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any, Final, Literal, NamedTuple

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import marshal_py
from marshal_py import Batches, GroupConfig, subject_key
from tests.support.kafka import start_cluster

ROOT: Final = Path(__file__).resolve().parents[2]
TOPIC, GROUP, PARTITIONS, KEYS = "orders", "billing", 12, 500
KINDS: Final = ("join", "crash", "step down", "drop", "stop")
KILL: Final = "kill workers"  # with `--executor processes` alone: every other process that has a handler
FREEZE: Final = "freeze"  # with `--workers` alone: a frozen handler begins a message that its next owner has begun
FROZEN_S: Final = 4.0
DEADLINE_S: Final = 300.0  # for a slice of messages, whatever happens meanwhile
NAK_EACH: Final = 200  # one delivery in so many is given back at first
HELD_S: Final = 0.02  # for how long
HANDLED_S: Final = 0.002  # with `--workers`: what a handler takes


class OrderJudge:
    """Sees each delivery in the order in which they happen, and says where the order within a key was broken.

    The messages of a key are numbered from 0. A message may come again, from its handler's `nak` or under a later
    owner's token, so two things are demanded. Always: of a key, number n + 1 is not delivered before n was. If
    `strict`, which holds for handlers that work one after the other: within one claim, each delivery is the next number
    of its key, or the same again; and the tokens of a partition never fall.
    """

    def __init__(self) -> None:
        self.repeated = 0
        self._strict: list[str] = []
        self._always: list[str] = []
        self._unfinished: set[tuple[int, int]] = set()
        self._next: dict[bytes | None, int] = defaultdict(int)
        self._last: dict[tuple[str, bytes | None], int] = {}
        self._token: dict[int, str] = defaultdict(str)
        self._tokens: set[tuple[int, str]] = set()

    @property
    def claims(self) -> int:
        """How many claims have delivered something."""
        return len(self._tokens)

    def produced(self, partition: int, offset: int) -> None:
        self._unfinished.add((partition, offset))

    def done(self, partition: int, offset: int) -> None:
        self._unfinished.discard((partition, offset))

    def missing(self) -> int:
        """How many messages were not finished."""
        return len(self._unfinished)

    def delivered(self, partition: int, offset: int, token: str, key: bytes | None, number: int) -> None:
        place = f"{partition}@{offset}, number {number} of {key!r} under {token[-8:]}"
        expected = self._next[key]
        self.repeated += number < expected
        if number > expected:
            self._always.append(f"{place}: {expected} was not delivered before")
        self._next[key] = max(expected, number + 1)
        last = self._last.get((token, key))
        if last is not None and number not in (last, last + 1):
            self._strict.append(f"{place}: it comes after {last}")
        self._last[token, key] = number
        if token < self._token[partition]:
            self._strict.append(f"{place}: a later owner has delivered before")
        self._token[partition] = max(token, self._token[partition])
        self._tokens.add((partition, token))

    def violations(self, strict: bool) -> list[str]:
        return self._always + (self._strict if strict else [])


# --- one process of the group


@functools.cache
def journal(path: str) -> int:
    """Returns the file to which each process appends what its handlers begin and finish."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def write(path: str, kind: str, message: Any, **more: Any) -> None:
    place = {"e": kind, "ns": time.monotonic_ns(), "p": message.partition, "o": message.offset, **more}
    os.write(journal(path), json.dumps(place).encode() + b"\n")


def begin(path: str, message: Any) -> None:
    key = (message.key or b"").decode()
    write(path, "begin", message, t=str(message.token), k=key, n=int(message.value or b""))


def handle(path: str, message: Any) -> None:
    begin(path, message)
    if message.offset % NAK_EACH == NAK_EACH - 1 and message.delivery_count == 1:
        raise marshal_py.Retry(after_s=HELD_S)
    time.sleep(HANDLED_S)
    write(path, "done", message)


def outcome(path: str, message: Any) -> BaseException | None:
    try:
        return handle(path, message)
    except marshal_py.Retry as retry:
        return retry


def handle_all(path: str, messages: list[Any]) -> list[BaseException | None]:
    return [outcome(path, message) for message in messages]


def member(
    servers: str,
    name: str,
    pending: int,
    workers: int,
    batch: int,
    executor: Literal["threads", "processes"],
    path: str,
) -> None:
    """Writes a line before each message is handled, and one after its ack has counted."""
    most = {"max_acks_pending": pending} if not workers else {}
    with (
        marshal_py.connect(servers, client_id=f"{name}-{os.getpid()}") as marshal,
        marshal.consumer(GROUP, [TOPIC], member=name, start="earliest", heartbeat_interval_s=1.0, **most) as consumer,
        marshal_py.stop_on_signals(consumer),
    ):
        if workers:
            begun = (
                consumer.process(functools.partial(handle_all, path), workers=workers, batch=Batches(batch, HELD_S))
                if batch
                else consumer.process(functools.partial(handle, path), workers=workers, executor=executor)
            )
            with begun as work:
                work.wait()
            return
        for message in consumer:
            begin(path, message)
            if message.offset % NAK_EACH == NAK_EACH - 1 and message.delivery_count == 1:
                message.nak(HELD_S)
            elif message.ack():
                write(path, "done", message)


def worker_processes(of: int) -> list[int]:
    """Returns the pids of the processes in which a member's handlers run."""
    found = []
    for children in Path(f"/proc/{of}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return sorted(found)


class Instance(NamedTuple):
    """A process that works for a member."""

    name: str
    process: subprocess.Popen[bytes]
    path: Path


# --- the parent, which changes the members


class Run:
    """A run on one cluster. `names`: the members of the group; each has at least one process."""

    def __init__(
        self, servers: str, folder: Path, pending: int, workers: int, batch: int, executor: str, seed: int
    ) -> None:
        self.servers, self.folder = servers, folder
        self.given = str(pending), str(workers), str(batch), executor
        self.dice = Random(seed)
        self.names = ["m0", "m1", "m2"]
        self.running: list[Instance] = []
        self.paths: list[Path] = []
        self.made = 0
        self.produced = 0
        self.numbers: dict[bytes, int] = defaultdict(int)
        self.key_of = subject_key("orders.*.*", tokens=(2, 1))
        self._read: dict[Path, int] = defaultdict(int)
        self._done: set[tuple[int, int]] = set()
        self._producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 5})

    def start(self, name: str) -> Instance:
        self.made += 1
        path = self.folder / f"{self.made:03}-{name}.jsonl"
        given = *self.given, str(path)
        with path.with_suffix(".log").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.key_order", "--member", self.servers, name, *given],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        made = Instance(name, process, path)
        self.running.append(made)
        self.paths.append(path)
        return made

    def end(self, instance: Instance, by: int) -> None:
        self.running.remove(instance)
        instance.process.send_signal(by)
        instance.process.wait(DEADLINE_S)

    def produce(self, messages: int) -> None:
        def written(error: object, _: object) -> None:
            assert error is None, error

        for _ in range(messages):
            at = self.dice.randrange(KEYS)
            key = self.key_of(f"orders.{at % 7}.{at}")
            self._producer.produce(TOPIC, b"%d" % self.numbers[key], key, on_delivery=written)
            self._producer.poll(0)
            self.numbers[key] += 1
        self._producer.flush(60)
        self.produced += messages

    def wait(self, wanted: int) -> None:
        """Waits until so many messages are finished."""
        deadline = time.monotonic() + DEADLINE_S
        while self.done() < wanted:
            for one in self.running:
                if one.process.poll() is not None:
                    raise SystemExit(f"{one.name} ended by itself:\n{one.path.with_suffix('.log').read_text()[-4000:]}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{len(self._done)} of {wanted} messages are finished; see {self.folder}")
            time.sleep(0.05)

    def done(self) -> int:
        for path in self.paths:
            if path.exists():
                with path.open("rb") as file:
                    file.seek(self._read[path])
                    data = file.read()
                whole = data.rfind(b"\n") + 1
                self._read[path] += whole
                lines = (json.loads(line) for line in data[:whole].splitlines() if b'"done"' in line)
                self._done.update((line["p"], line["o"]) for line in lines)
        return len(self._done)

    def change(self, kind: str, group: Any) -> str:
        one = self.dice.choice(self.running)
        match kind:
            case "join":
                self.names.append(f"m{self.made}")
                self.start(self.names[-1])
                group.add_members(self.names[-1])
                return self.names[-1]
            case "drop":
                name = self.dice.choice(self.names)
                self.names.remove(name)
                group.drop_members(name)  # its processes stay, and have nothing to do
                return name
            case "step down":
                self.start(one.name)
                sessions = [found.session for found in group.members() if found.member == one.name]
                if sessions:
                    group.step_down(min(sessions))
                return one.name
            case "kill workers":
                killed = worker_processes(one.process.pid)[::2]
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
                return f"{len(killed)} of {one.name}"
            case "freeze":
                one.process.send_signal(signal.SIGSTOP)
                time.sleep(FROZEN_S)  # longer than its lease
                one.process.send_signal(signal.SIGCONT)
                return one.name
        self.end(one, signal.SIGKILL if kind == "crash" else signal.SIGTERM)
        self.start(one.name)
        return one.name

    def judge(self) -> OrderJudge:
        found = []
        for path in self.paths:
            if path.exists():
                found += [json.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]
        judge = OrderJudge()
        for line in sorted(found, key=lambda one: one["ns"]):
            if line["e"] == "begin":
                judge.delivered(line["p"], line["o"], line["t"], line["k"].encode(), line["n"])
        return judge


def run(
    servers: str,
    folder: Path,
    messages: int,
    changes: int,
    pending: int = 1,
    workers: int = 0,
    batch: int = 0,
    executor: str = "threads",
    seed: int = 1,
) -> int:
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(60)
    made, part = Run(servers, folder, pending, workers, batch, executor, seed), messages // (changes + 1)
    kinds = KINDS if not workers else (*KINDS, FREEZE) if executor == "threads" else (*KINDS, KILL, FREEZE, KILL)
    with marshal_py.connect(servers) as marshal:
        config = GroupConfig(policy="members", max_members=PARTITIONS, members=tuple(made.names))
        group = marshal.create_group(GROUP, config)
        for name in made.names:
            made.start(name)
        try:
            for number in range(changes):
                made.produce(part)
                made.wait(made.produced - part // 2)  # in the middle of the slice
                kind = kinds[number % len(kinds)]
                print(f"{number + 1}: {kind} {made.change(kind, group)}, {made.done()} finished", flush=True)
            made.produce(messages - made.produced)
            made.wait(messages)
        finally:
            for one in list(made.running):
                made.end(one, signal.SIGTERM)
    judge = made.judge()
    violations = judge.violations(strict=pending == 1 and not workers)
    figures = {
        "messages": messages,
        "finished": made.done(),
        "missing": messages - made.done(),
        "changes": changes,
        "claims": judge.claims,
        "delivered_again": judge.repeated,
        "out_of_order": len(violations),
        "some": violations[:5],
    }
    print(json.dumps(figures), flush=True)
    return int(bool(violations) or made.done() != messages)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"messages": 100_000, "changes": 25, "pending": 1, "workers": 0, "batch": 0, "seed": 1}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--executor", choices=("threads", "processes"), default="threads")
    parser.add_argument("--member", nargs=7, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.member:
        servers, name, pending, workers, batch, executor, path = given.member
        member(servers, name, int(pending), int(workers), int(batch), executor, path)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="key-order-"))
    with start_cluster() as cluster:
        asked = {name: getattr(given, name) for name in (*defaults, "executor")}
        return run(cluster.bootstrap, folder, **asked)


if __name__ == "__main__":
    sys.exit(main())
