"""Connecting to a cluster that does not answer: the error says why, and comes soon where waiting does not help."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError

import marshal_py
from marshal_py.errors import AccessDenied, AuthenticationFailed, ClusterUnreachable, HistoryTruncated, TlsMismatch
from marshal_py.protocol.wire.records import Evict
from marshal_py.transport import connecting, kafka
from marshal_py.transport.memory import MemoryMessage
from marshal_py.transport.ports import Bounds
from tests.support.broker_faults import fail_requests
from tests.support.brokers import free_ports
from tests.support.client_fixtures import DEADLINE_S, LOG, EmbeddedTestCluster, collect, joined, places, until

LONG_S = 10 * DEADLINE_S  # of a connect that must not wait for it
HANDSHAKE_FAILURE = bytes.fromhex("15030300020228")  # a TLS alert, as a listener of another version sends it


@contextlib.contextmanager
def listener(answer: bytes = b"") -> Iterator[str]:
    """A port that gives this answer to everything and hangs up; without an answer it stays silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):  # the end of the test
                while True:
                    peer, _ = server.accept()
                    kept.append(peer)
                    if answer:
                        with contextlib.suppress(OSError), peer:
                            peer.recv(1024)
                            peer.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for peer in kept:
            peer.close()


def connect(servers: str, timeout_s: float = LONG_S, **given: Any) -> None:
    """Raises what `connect` raises, if it does so before a good part of a long timeout."""
    began_s = time.monotonic()
    settings = {"bootstrap.servers": servers, **{key.replace("_", "."): value for key, value in given.items()}}
    try:
        marshal_py.connect(settings, timeout_s=timeout_s).close()
    finally:
        assert time.monotonic() - began_s < DEADLINE_S, "it waited although waiting could not help"


SASL = {"sasl_mechanism": "PLAIN", "sasl_username": "alice", "sasl_password": "wrong"}


def test_a_port_where_nobody_listens_is_named() -> None:
    servers = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ClusterUnreachable, match="Connection refused") as raised:
        connect(servers, 0.5)
    assert raised.value.retriable


def test_a_wait_without_an_end_is_one_of_an_hour(embedded: EmbeddedTestCluster) -> None:
    """librdkafka takes no longer one for a request of an admin."""
    with marshal_py.connect(embedded.target, timeout_s=float("inf")) as marshal:
        assert marshal.topics("nothing-*") == ()


def test_a_name_that_does_not_resolve_is_named() -> None:
    with pytest.raises(ClusterUnreachable, match=r"Failed to resolve 'no-such-host\.invalid"):
        connect("no-such-host.invalid:9092", 0.5)


def test_refused_credentials_are_named_soon(embedded: EmbeddedTestCluster) -> None:
    """The embedded broker knows no SASL, and says so as Kafka says that a password is wrong."""
    with pytest.raises(AuthenticationFailed) as raised:
        connect(embedded.target, security_protocol="SASL_PLAINTEXT", **SASL)
    assert raised.value.principal == "User:alice"
    assert not raised.value.retriable


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tls_to_a_port_without_it_is_named_soon(
    embedded: EmbeddedTestCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TlsMismatch, match="this port answers without TLS"):
        connect(embedded.target, security_protocol="SSL")
    capfd.readouterr()  # the embedded broker complains of the bytes


@pytest.mark.parametrize("given", [{}, {"security_protocol": "SASL_PLAINTEXT", **SASL}], ids=["plain", "sasl"])
def test_a_port_that_speaks_tls_is_named_soon(given: dict[str, str]) -> None:
    with listener(HANDSHAKE_FAILURE) as servers, pytest.raises(TlsMismatch, match="this port speaks TLS") as raised:
        connect(servers, **given)
    assert raised.value.servers == servers


def test_while_connect_waits_a_line_on_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with listener() as servers, pytest.raises(ClusterUnreachable):
        connect(servers, 4.0)
    lines = [record.message for record in caplog.records if record.name == "marshal_py"]
    assert lines
    assert lines[0].startswith(f"connecting to {servers}: no answer for")


def test_ctrl_c_ends_connect() -> None:
    def interrupted(servers: str) -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        connect(servers)

    with listener() as servers, pytest.raises(KeyboardInterrupt):
        interrupted(servers)


def test_the_users_own_callbacks_are_called(embedded: EmbeddedTestCluster) -> None:
    """They run on the callbacks' thread, for every client; an exception in them has no effect."""
    called: set[tuple[str, str]] = set()

    def note(name: str) -> None:
        called.add((name, threading.current_thread().name))
        raise SystemExit(3)

    class Logger(logging.Logger):
        def log(self, *_: object, **__: object) -> None:
            note("logger")

    own = {
        "error_cb": lambda _: note("error_cb"),
        "stats_cb": lambda _: note("stats_cb"),
        "logger": Logger("own"),
        "log_level": 6,
        "reconnect.backoff.max.ms": 100,
    }
    with marshal_py.connect({"bootstrap.servers": embedded.target, **own}, statistics_interval_ms=100) as marshal:
        until(lambda: len(marshal.metrics().librdkafka) == 2, "our own statistics come, too")
        embedded.broker.broker_down()
        until(lambda: {name for name, _ in called} == {"error_cb", "stats_cb", "logger"}, "all of them")
        embedded.broker.broker_up()
        topic = embedded.topic()
        embedded.fill(topic, 0, 2)
        with joined(marshal, embedded.group(), [topic]) as consumer:
            assert places(collect(consumer, 2)) == [(0, 0), (0, 1)]
    assert {thread for _, thread in called} == {"marshal-callbacks"}


# --- refusals while it runs


def test_one_refused_write_ends_nothing(embedded: EmbeddedTestCluster) -> None:
    topic, group = embedded.topic(), embedded.group()
    embedded.fill(topic, 0, 2)
    with embedded.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        before = marshal.metrics().produce_errors
        fail_requests(embedded.broker, "Produce", 29)  # TOPIC_AUTHORIZATION_FAILED
        until(lambda: marshal.metrics().produce_errors > before, "a heartbeat is refused")
        until(lambda: not marshal.waiting_for, "the next one is not")
        assert places(collect(consumer, 2)) == [(0, 0), (0, 1)]
        with joined(marshal, embedded.group(), [topic]) as other:
            assert len(collect(other, 2)) == 2
    assert embedded.accepted(group, Evict) == []


class Told(MemoryMessage):
    """What a reader hands out: a record, or an error in its place."""

    denied = False

    def error(self) -> KafkaError | None:
        return KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "Topic authorization failed") if self.denied else None


class Refusing:
    """A librdkafka reader that may not read: it says so once per assignment. (The embedded broker allows all.)"""

    def __init__(self) -> None:
        self.granted = False
        self.reported: list[Told] = []

    def incremental_assign(self, tps: list[Any]) -> None:
        self.reported += [Told(LOG, tp.partition, tp.offset, None, b"x", None, 0) for tp in tps]
        for message in self.reported:
            message.denied = not self.granted

    def incremental_unassign(self, tps: list[Any]) -> None:
        self.reported.clear()

    def poll(self, _: float) -> Told | None:
        return self.reported.pop() if self.reported else None

    def consume(self, *_: object) -> list[Any]:
        return []


def test_a_refused_read_passes_and_a_lasting_one_is_named(
    embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka reports it once per assignment, so the test has it report it again."""
    monkeypatch.setattr(connecting, "REFUSED_S", 0.2)
    monkeypatch.setattr(connecting, "REFUSED_NEW_S", 0.2)
    monkeypatch.setattr(kafka, "DENIED_RETRY_S", 0.1)
    log, reader = kafka.KafkaTransport(embedded.target, DEADLINE_S).log(LOG, "reader"), Refusing()
    real, log._consumer = log._consumer, reader  # type: ignore[assignment]
    log._followed[0] = 0
    log.follow(0, 0)
    assert log.poll(0.0) == []
    assert log.refused() is None, "one proves nothing"
    assert "authorization failed" in log.waiting_for()
    until(lambda: log.poll(0.0) or log.refused(), "refused again and again")
    assert isinstance(log.refused(), AccessDenied)
    assert "may not Read topic '__marshal'" in str(log.refused())
    reader.granted = True
    until(lambda: log.poll(0.0), "it is read in the end")
    assert (log.refused(), log.waiting_for()) == (None, "")
    log._consumer = real
    log.close(0.0)


def test_a_producer_that_failed_for_good_is_replaced(embedded: EmbeddedTestCluster) -> None:
    """A broker that refuses the idempotence of a producer once ends that producer, and nothing else."""
    topic = embedded.topic()
    embedded.fill(topic, 0, 2)
    fail_requests(embedded.broker, "InitProducerId", 31)  # CLUSTER_AUTHORIZATION_FAILED
    with embedded.connect() as marshal, joined(marshal, embedded.group(), [topic]) as consumer:
        assert places(collect(consumer, 2)) == [(0, 0), (0, 1)]


@pytest.mark.new_client
def test_questions_about_a_refused_position_do_not_delay_the_loop(
    embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A followed log was deleted above what was read, and the cluster takes its time to say from where on it is there:
    other logs are read meanwhile.
    """
    log = kafka.KafkaTransport(embedded.target, DEADLINE_S).log(LOG, "reader")
    for number in range(5):
        embedded.put(LOG, 0, b"%d" % number)
    embedded.truncate(LOG, 0, 4)
    asked, answer = threading.Event(), threading.Event()
    bounds = log.bounds

    def slow(number: int, timeout_s: float) -> Bounds:
        asked.set()
        assert answer.wait(DEADLINE_S)
        return bounds(number, timeout_s)

    monkeypatch.setattr(log, "bounds", slow)
    log.follow(0, 1)
    log.follow(1, 0)
    until(lambda: log.poll(0.05) or asked.is_set(), "it asks")
    embedded.put(LOG, 1, b"other")
    until(lambda: [record.value for record in log.poll(0.05)] == [b"other"], "the other log")
    answer.set()
    with pytest.raises(HistoryTruncated) as raised:
        until(lambda: log.poll(0.05) and None, "the error")
    assert (raised.value.log, raised.value.first_offset) == (0, 4)
    log.close(0.0)
