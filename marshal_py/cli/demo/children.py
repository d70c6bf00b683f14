"""The child processes of the demo: one produces orders, each of the others consumes like a user's program.

Each writes a journal, one file. Here are its entries, its writer and its reader, the start and the end of a process,
and how it notices that the demo has died.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from marshal_py.client.consumer import Consumer
from marshal_py.client.marshal import connect
from marshal_py.client.signals import stop_on_signals
from marshal_py.client.values.info import ClaimInfo
from marshal_py.client.values.options import CONNECT_TIMEOUT_S
from marshal_py.errors import MarshalError
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.producer import KafkaProducer


class Started(Struct, frozen=True, tag="started"):
    """A process has started. If it is a consumer, it has joined its group only when `Joined` follows."""

    at: float
    pid: int


class Joined(Struct, frozen=True, tag="joined"):
    at: float


class Claimed(Struct, frozen=True, tag="claimed"):
    at: float
    partition: int
    epoch: int


class Lost(Struct, frozen=True, tag="lost"):
    at: float
    partition: int
    reason: str


class Reported(Struct, frozen=True, tag="reported"):
    """The consumer reported an advisory other than a claim or a loss: fenced, evicted, amo_dropped, ..."""

    at: float
    kind: str
    text: str


class Delivered(Struct, frozen=True, tag="delivered"):
    """A message was handed to the handler; written before its ack. `at` is when the handler began."""

    at: float
    partition: int
    offset: int
    checksum_fits: bool


class Written(Struct, frozen=True, tag="written"):
    """The cluster has acknowledged a message."""

    partition: int
    offset: int


class Failed(Struct, frozen=True, tag="failed"):
    """The process ends because of an error."""

    at: float
    reason: str


Entry = Started | Joined | Claimed | Lost | Reported | Delivered | Written | Failed

_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)
_encoder = msgspec.json.Encoder()


class Journal:
    """Writes a journal. Any thread may write, because a line is one append."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, entry: Entry) -> None:
        os.write(self._file, _encoder.encode(entry) + b"\n")

    def close(self) -> None:
        os.close(self._file)


class JournalReader:
    """Reads a journal while it is written. `new_entries` returns the complete lines since its last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def new_entries(self) -> Iterator[Entry]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        self._at += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            yield _decoder.decode(line)


def now() -> float:
    return time.monotonic()


CHILDREN: Final = "marshal_py.cli.demo.children"  # the program of every child
ORPHANED: Final = 70
END_TIMEOUT_S: Final = 15.0  # a consumer leaves within a few round trips; if it takes longer, the cluster is gone
KILL_TIMEOUT_S: Final = 5.0
STDERR_TAIL_BYTES: Final = 2_000
_SOURCE_ROOT: Final = Path(__file__).resolve().parents[3]


class Plan(Struct, frozen=True, kw_only=True):
    """Where the demo runs and for how long."""

    settings: dict[str, Any]
    topic: str
    group: str
    coordination_topic: str
    delivery: Literal["at_least_once", "at_most_once"]
    seconds: float
    last_will: bool = False


class Task(Struct, frozen=True):
    """What one process must do. `journal`: path of the file that it writes."""

    name: str
    work: Literal["produce", "consume"]
    plan: Plan
    journal: str


def run_task(works: Mapping[str, Callable[[Task, Journal], None]]) -> None:
    """Called in the child: reads the task and does it by one of `works`. Ends this process when the parent dies. Writes
    the start of the process into the journal. If the work raises a MarshalError, writes that too and exits with 1."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    journal = Journal(Path(task.journal))
    journal.write(Started(now(), os.getpid()))
    try:
        works[task.work](task, journal)
    except MarshalError as error:
        logging.error("%s", error)
        journal.write(Failed(now(), str(error)))
        raise SystemExit(1) from error


def _end_with_parent() -> None:
    # Reads the file descriptor: a daemon thread that holds sys.stdin's lock would abort the interpreter's exit.
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)


class Child:
    """Used in the parent: a process that does a task."""

    name: str
    journal: Path

    def __init__(self, task: Task, stderr: Path) -> None:
        self.name, self.journal = task.name, Path(task.journal)
        self._stderr = stderr
        self._stop_requested = False  # a second SIGTERM would end it before it has left the group
        paths = [str(_SOURCE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with stderr.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILDREN],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends its children in order
            )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def stderr_tail(self) -> str:
        return self._stderr.read_bytes()[-STDERR_TAIL_BYTES:].decode(errors="replace").strip()

    def kill(self) -> None:
        """Sends SIGKILL: the process cannot release anything."""
        self._process.kill()
        self._process.wait(KILL_TIMEOUT_S)

    def request_stop(self) -> None:
        """Sends SIGTERM, but only once."""
        if not self.ended and not self._stop_requested:
            self._stop_requested = True
            self._process.terminate()

    def end(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Sends SIGTERM and, after `timeout_s`, SIGKILL. The process has ended when this returns."""
        self.request_stop()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILL_TIMEOUT_S)
        finally:
            if self._process.stdin is not None:
                self._process.stdin.close()


KEYS: Final = 500  # many keys per partition, many messages per key
RATE_PER_S: Final = 300  # orders: enough to see, and minutes of them fit into the embedded broker
TICK_S: Final = 0.02  # how even the producer's pace is
# The callbacks journal claims and losses; a claim that is being revoked is lost within milliseconds here.
JOURNALED_ELSEWHERE: Final = frozenset({"claimed", "lost", "released", "revoking", "joined", "topology"})


def order(number: int) -> tuple[bytes, bytes]:
    """Returns key and value of the order with this number."""
    key = f"customer-{number * 7919 % KEYS}"  # a prime step, so that neighbours go to different partitions
    body = f"{key}/{number}"
    return key.encode(), json.dumps({"order": number, "checksum": zlib.crc32(body.encode())}).encode()


def checksum_fits(key: bytes | None, value: bytes | None) -> bool:
    """Returns whether key, number and checksum of a message belong together, as its producer wrote them."""
    try:
        content = json.loads(value or b"")
        body = f"{(key or b'').decode()}/{content['order']}"
        return bool(content["checksum"] == zlib.crc32(body.encode()))
    except (ValueError, KeyError, TypeError):
        return False


def produce(task: Task, journal: Journal) -> None:
    """Writes orders at an even pace until SIGTERM, and journals what was acknowledged."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    producer = KafkaProducer(
        KafkaTransport(task.plan.settings, CONNECT_TIMEOUT_S),
        lambda tp, offset: journal.write(Written(tp.partition, offset)),
    )
    began, sent = time.monotonic(), 0
    while not stop.wait(TICK_S):
        due = round((time.monotonic() - began) * RATE_PER_S)
        if due - sent > RATE_PER_S:
            # The machine stalled. Continue at the same pace: a burst would be another experiment.
            began += (due - sent) / RATE_PER_S
            continue
        while sent < due:
            key, value = order(sent)
            producer.write(task.plan.topic, value, key)
            sent += 1
        producer.poll()
    producer.flush()
    producer.close()


def consume(task: Task, journal: Journal) -> None:
    """Acks every message, and journals it before."""

    def claimed(info: ClaimInfo) -> None:
        journal.write(Claimed(now(), info.partition, info.token.epoch))

    def lost(info: ClaimInfo, reason: str) -> None:
        journal.write(Lost(now(), info.partition, reason))

    plan = task.plan
    with connect(
        plan.settings,
        client_id=task.name,
        coordination_topic=plan.coordination_topic,
        last_will="process" if plan.last_will else "auto",
    ) as marshal:
        with (
            marshal.consumer(
                plan.group,
                [plan.topic],
                delivery=plan.delivery,
                start="earliest",  # messages written before a partition's first claim count too
                on_claim=claimed,
                on_lost=lost,
            ) as consumer,
            stop_on_signals(consumer),
        ):
            journal.write(Joined(now()))
            for message in consumer:
                fits = checksum_fits(message.key, message.value)
                journal.write(Delivered(now(), message.partition, message.offset, fits))
                message.ack()
                report_events(consumer, journal)
        report_events(consumer, journal)


def report_events(consumer: Consumer, journal: Journal) -> None:
    for event in consumer.events():
        if event.kind not in JOURNALED_ELSEWHERE:
            journal.write(Reported(now(), event.kind, event.text))


if __name__ == "__main__":
    run_task({"produce": produce, "consume": consume})
