"""A witness beside real processes, with a producer that is none: when it publishes, what, and how often (T19)."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import pytest

from marshal_py.last_will import witness as witness_module
from marshal_py.last_will.connecting import WitnessConnection
from marshal_py.last_will.kept_file import KeptFile
from marshal_py.last_will.messages import MESSAGE_BYTES_MAX, Hello, Inbox, Register, Withdraw, send
from marshal_py.last_will.witness import Witness
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import ClaimState, LastWill, Leave, Record, ReleasingPartition

DEADLINE_S = 60.0
INCARNATION = bytes(range(16))
SETTINGS = {"bootstrap.servers": "nowhere:1", "sasl.password": "secret"}

# Connects to the witness on descriptor 3, registers one session with the will that it gets as arguments, says so, and
# does what its standard input says: `close` the connection, `withdraw`, `keep` a higher position. Else it waits.
CONSUMER = """
import os, socket, sys
from marshal_py.last_will.connecting import WitnessConnection
from marshal_py.last_will.kept_file import KeptFile
from marshal_py.last_will.messages import Register
from marshal_py.protocol.wire.records import LastWill
from marshal_py.protocol.wire.records import ClaimState
connection = WitnessConnection(socket.socket(fileno=int(sys.argv[1])))
kept = KeptFile()
def keep(position): kept.keep(LastWill(7, 1, 2000, (ClaimState(9, position, attempts=1),)))
keep(100)
settings = {"bootstrap.servers": "nowhere:1", "sasl.password": "secret"}
connection.register(Register(1, "billing", bytes(range(16)), "__marshal", 3, settings), kept.fd)
print("ready", flush=True)
for line in sys.stdin:
    word, *rest = line.split()
    if word == "close": connection.close()
    if word == "withdraw": connection.withdraw(1)
    if word == "keep": keep(int(rest[0]))
    if word == "exit": os._exit(int(rest[0]))
    print("done", flush=True)
"""


class FakeProducer:
    """Takes records as confluent_kafka's Producer does, and acknowledges them when it is polled."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, bytes, Record]] = []
        self.answers: list[Callable[..., None]] = []
        self.full = False

    def produce(self, topic: str, value: bytes, key: bytes, partition: int, on_delivery: Callable[..., None]) -> None:
        if self.full:
            raise BufferError
        envelope = codec.open_envelope(value, crc32(INCARNATION))
        assert envelope is not None
        record = codec.decode_body(envelope[3], envelope[4])
        assert record is not None
        self.sent.append((topic, partition, key, record))
        self.answers.append(on_delivery)

    def poll(self, timeout: float) -> int:
        for answer in self.answers:
            answer(None, None)
        self.answers.clear()
        return 0

    def list_topics(self, topic: str, timeout: float) -> None:
        assert topic == "__marshal"


class Stage:
    """A witness, and consumer processes that are connected to it."""

    def __init__(self) -> None:
        self.producers: list[tuple[dict[str, Any], FakeProducer]] = []
        self.witness = Witness("test", self._producer, lambda pid: f"pid {pid}")
        self.consumers: list[subprocess.Popen[str]] = []

    def _producer(self, settings: dict[str, Any]) -> FakeProducer:
        self.producers.append((settings, FakeProducer()))
        return self.producers[-1][1]

    def start(self) -> subprocess.Popen[str]:
        ours, theirs = socket.socketpair()
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-c", CONSUMER, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=(theirs.fileno(),),
            )
        self.consumers.append(child)
        self.witness.connect(ours)
        assert child.stdout is not None
        self.until(lambda: any(c.wills for c in self.witness.connections if c.watch and c.watch.pid == child.pid))
        assert child.stdout.readline() == "ready\n"
        return child

    def say(self, child: subprocess.Popen[str], words: str) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(words + "\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            self.witness.step(0.01)

    def quiet(self) -> None:
        """Lets the witness see everything that has happened so far."""
        for _ in range(5):
            self.witness.step(0.01)

    @property
    def published(self) -> list[Record]:
        return [record for _, producer in self.producers for _, _, _, record in producer.sent]

    def close(self) -> None:
        for child in self.consumers:
            child.kill()
            child.communicate()
        self.witness.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def test_a_killed_process_is_replaced(stage: Stage) -> None:
    """T19: each Release, then the Leave, as of the death; to the group's log, under its key."""
    child = stage.start()
    stage.say(child, "keep 140")
    child.kill()
    stage.until(lambda: not stage.witness.connections)
    assert stage.published == [
        ReleasingPartition(7, 9, 140, reason="died", attempts=1),
        Leave(7, f"died: pid {child.pid}"),
    ]
    ((settings, producer),) = stage.producers
    assert settings == SETTINGS
    assert {sent[:3] for sent in producer.sent} == {("__marshal", 3, b"billing")}
    stage.until(lambda: not stage.witness.busy)


def test_a_closed_connection_proves_nothing(stage: Stage) -> None:
    """T19: a program that becomes a daemon closes its descriptors and goes on; its death counts, later."""
    child = stage.start()
    stage.say(child, "close")
    stage.quiet()
    assert not stage.published
    assert stage.witness.busy
    stage.say(child, "keep 150")
    child.kill()
    stage.until(lambda: not stage.witness.connections)
    release, _ = stage.published
    assert isinstance(release, ReleasingPartition)
    assert release.position == 150, "what was kept after the connection was closed"


def test_a_stopped_process_is_left_alone(stage: Stage) -> None:
    """T19: SIGSTOP, and SIGCONT after it."""
    child = stage.start()
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    stage.quiet()
    os.kill(child.pid, signal.SIGCONT)
    stage.say(child, "keep 150")
    stage.quiet()
    assert not stage.published


def test_a_witness_that_was_stopped_sees_what_has_happened(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """T19: `select` returns nothing if the timeout has passed when the witness continues; what is there counts."""
    child = stage.start()
    child.kill()
    child.wait()
    select = stage.witness.selector.select
    monkeypatch.setattr(stage.witness.selector, "select", lambda timeout: [] if timeout else select(0))
    stage.witness.step(1.0)
    assert [type(record) for record in stage.published] == [ReleasingPartition, Leave]


def test_a_session_that_has_left_is_forgotten(stage: Stage) -> None:
    """T19: after a clean Leave the will is taken back, even if the process dies at once."""
    child = stage.start()
    stage.say(child, "withdraw")
    child.kill()
    child.wait()
    stage.until(lambda: not stage.witness.busy)
    assert not stage.published


def test_processes_die_apart(stage: Stage) -> None:
    """Sessions with the same settings share a producer; each is ended with its own process."""
    one, two = stage.start(), stage.start()
    one.kill()
    stage.until(lambda: len(stage.witness.connections) == 1)
    assert [r.reason for r in stage.published if isinstance(r, Leave)] == [f"died: pid {one.pid}"]
    two.kill()
    stage.until(lambda: not stage.witness.busy)
    assert len(stage.producers) == 1


def test_a_queue_that_is_full_costs_a_will_and_no_more(stage: Stage) -> None:
    child = stage.start()
    stage.producers[0][1].full = True
    child.kill()
    stage.until(lambda: not stage.witness.busy)
    assert not stage.published


@pytest.mark.parametrize(
    "garbage",
    [b"\0\0\0\1\xc1", (MESSAGE_BYTES_MAX + 1).to_bytes(4, "big"), b"\0\0\0\3\x81\xa4type"],
    ids=["no MessagePack", "too long", "no message"],
)
def test_what_is_no_message_ends_the_connection(stage: Stage, garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    stage.witness.connect(ours)
    theirs.sendall(garbage)
    stage.until(lambda: not stage.witness.connections)
    theirs.close()


def test_a_register_before_hello_is_not_taken(stage: Stage) -> None:
    """Without a watch nobody would ever learn of the death."""
    ours, theirs = socket.socketpair()
    stage.witness.connect(ours)
    file = KeptFile()
    send(theirs, Register(1, "g", INCARNATION, "__marshal", 0, {}), (file.fd,))
    send(theirs, Withdraw(1))
    stage.quiet()
    (connection,) = stage.witness.connections
    assert not connection.wills
    theirs.close()
    stage.until(lambda: not stage.witness.connections)
    file.close()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Lets this process open nothing more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("takes_hello", [False, True])
def test_a_process_whose_descriptors_were_lost_is_told(stage: Stage, takes_hello: bool) -> None:
    """Without its pidfd it has no watch, without the kept file no will. It asks again when there is room."""
    ours, theirs = socket.socketpair()
    connection, kept = WitnessConnection(theirs), KeptFile()
    other = KeptFile()
    if takes_hello:
        stage.witness.connect(ours)
        connection.register(Register(2, "g", INCARNATION, "__marshal", 0, SETTINGS), other.fd)
        stage.until(lambda: any(one.wills for one in stage.witness.connections))
    connection.register(Register(1, "g", INCARNATION, "__marshal", 0, SETTINGS), kept.fd)
    with no_descriptor_left():
        if not takes_hello:
            stage.witness.connect(ours)
        stage.until(lambda: not stage.witness.connections)
    assert connection.lost()
    connection.close()
    kept.close()
    other.close()


@pytest.mark.parametrize("with_a_file", [False, True])
def test_a_hello_without_a_pidfd_ends_the_connection(stage: Stage, with_a_file: bool) -> None:
    """What is no pidfd cannot be waited for. The witness goes on."""
    ours, theirs = socket.socketpair()
    kept = KeptFile()
    send(theirs, Hello(os.getpid()), (kept.fd,) if with_a_file else ())
    stage.witness.connect(ours)
    stage.until(lambda: not stage.witness.connections)
    theirs.close()
    kept.close()


def test_connections_are_bounded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness_module, "CONNECTIONS_MAX", 0)
    ours, theirs = socket.socketpair()
    stage.witness.connect(ours)
    assert theirs.recv(1) == b""
    theirs.close()


def test_messages_come_whole_with_their_descriptors() -> None:
    """Settings may be large; the descriptor belongs to its message."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(DEADLINE_S)
    inbox, file = Inbox(ours), KeptFile()
    send(theirs, Hello(5))
    send(theirs, Register(1, "g", INCARNATION, "t", 0, {"ssl.ca.pem": "x" * 50_000}), (file.fd,))
    found = []
    while len(found) < 2:
        found += inbox.read()
    assert [type(message) for message in found] == [Hello, Register]
    assert len(inbox.fds) == 1
    theirs.close()
    inbox.read()
    assert inbox.closed
    inbox.close()
    file.close()


def test_the_consumers_side_knows_its_witness(stage: Stage) -> None:
    """It learns the name, and notices when the witness is gone."""
    ours, theirs = socket.socketpair()
    stage.witness.connect(ours)
    connection = WitnessConnection(theirs)
    stage.quiet()
    assert not connection.lost()
    assert connection.name == "test"
    kept = KeptFile()
    kept.keep(LastWill(1, 1, 1_000, (ClaimState(1, 1),)))
    connection.register(Register(1, "g", INCARNATION, "__marshal", 0, SETTINGS), kept.fd)
    stage.quiet()
    for one in list(stage.witness.connections):
        one.drop()
    assert connection.lost()
    connection.withdraw(1)  # does nothing
    connection.close()
    kept.close()
    assert not stage.published
