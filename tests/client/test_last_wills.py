"""Consumers with a witness, over the embedded broker: real processes that die in several ways (T19).

The broker lives in this process, so consumers and witnesses are others. No time is asserted: an eviction would write an
Evict, and the log shows that there is none.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import uuid
from pathlib import Path

import pytest

from marshal_py import Consumer, connect
from marshal_py.client.driver import last_wills
from marshal_py.client.driver.last_wills import FOR_GOOD, KEEP_S, UNKEPT
from marshal_py.errors import InvalidOption, UnsupportedPlatform
from marshal_py.last_will import connecting, death
from marshal_py.last_will.connecting import WitnessConnection
from marshal_py.last_will.kept_file import KeptFile
from marshal_py.last_will.messages import Register
from marshal_py.last_will.witness import Witness
from marshal_py.protocol.wire.records import Evict, Heartbeat, Join, Leave, ReleasingPartition, died
from tests.last_will.test_witness import FakeProducer
from tests.support.client_fixtures import (
    DEADLINE_S,
    BackgroundConsumer,
    ConsumerProcess,
    EmbeddedTestCluster,
    MemoryTestCluster,
    joined,
    until,
)
from tests.support.marked_processes import witnesses

SLOW = ("--interval", "6")  # an eviction would take 12 s: what happens sooner is the witness's work
RUN = tuple(connecting.command("run", "--"))
SETTINGS = {"bootstrap.servers": "nowhere:1"}


def kept(process: ConsumerProcess, cluster: EmbeddedTestCluster, group: str) -> int:
    """Waits until a witness has the session, and returns the session."""
    (told,) = process.wait_for("joined")
    until(lambda: any(record.witness for record in cluster.accepted(group, Join)), "a Join that names a witness")
    return int(told["session"])


def lost(consumer: Consumer) -> list[str]:
    """Returns the texts of the consumer's new events `last_will_lost`."""
    return [event.text for event in consumer.events() if event.kind == "last_will_lost"]


MARK = f"MARSHAL_TEST={uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process's witnesses be told from those of others on the machine."""
    monkeypatch.setenv(*MARK.split("="))


@pytest.mark.parametrize(
    ("witness", "how"), [("process", "kill"), ("run", "kill"), ("run", "exit"), ("run", "segfault")]
)
def test_a_process_that_dies_is_replaced_without_an_eviction(
    embedded: EmbeddedTestCluster, witness: str, how: str
) -> None:
    """T19: what it acked is not delivered again; its session leaves, and the log says how it ended."""
    topic, group = embedded.topic(2), embedded.group()
    arguments = [*SLOW, "--last-will", "process" if witness == "process" else "auto"]
    arguments += ["--die-after", "13", "--how", how] if how != "kill" else []
    embedded.fill(topic, 0, 6)
    embedded.fill(topic, 1, 6)
    with ConsumerProcess(embedded.target, group, topic, *arguments, under=RUN if witness == "run" else ()) as first:
        session = kept(first, embedded, group)
        first.wait_for("message", 12)
        # The log has the acks with a heartbeat; the kept file has them sooner.
        until(lambda: _positions(embedded, group) == {6}, "both positions at 6")
        with embedded.connect() as marshal, joined(marshal, group, [topic], heartbeat_interval_s=6.0) as second:
            until(lambda: len(second.cached_info().claims) == 1, "a hand-over")
            held = {*second.cached_info().claims}
            with BackgroundConsumer(second) as reader:
                if how == "kill":
                    _kill(first, witness)
                else:
                    embedded.fill(topic, 1 - next(iter(held)).partition, 1)
                until(lambda: len(second.cached_info().claims) == 2, "a take-over")
                again = [(m.partition, m.offset) for m in list(reader.seen)]
        code = first.wait()
    leave = next(record for record in embedded.accepted(group, Leave) if record.session == session)
    assert died(leave)
    assert not embedded.accepted(group, Evict)
    ended = {
        "kill": ("signal 9 (SIGKILL)", 137),
        "exit": ("exit status 3", 3),
        "segfault": ("signal 11 (SIGSEGV)", 139),
    }
    words, status = ended[how]
    if witness == "run":
        assert (leave.reason, code) == (f"died: {words}", status)
    else:
        assert leave.reason == "died"
    released = [r for r in embedded.accepted(group, ReleasingPartition) if r.session == session and r.reason == "died"]
    assert len(released) == 1
    assert not [offset for _, offset in again if offset < 6], "what was acked and kept is not delivered again"


def _positions(cluster: EmbeddedTestCluster, group: str) -> set[int]:
    positions: dict[int, int] = {}
    for beat in cluster.accepted(group, Heartbeat):
        positions |= {entry.epoch: entry.position for entry in beat.claims}
    return set(positions.values()) if len(positions) == 2 else set()


def _kill(process: ConsumerProcess, witness: str) -> None:
    if witness == "process":
        process.signal(signal.SIGKILL)
        return
    children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)


def test_nothing_is_published_for_a_stopped_process(embedded: EmbeddedTestCluster) -> None:
    """T19: SIGSTOP is not death. It lasts for a whole interval, and the process goes on after SIGCONT."""
    topic, group = embedded.topic(2), embedded.group()
    with (
        ConsumerProcess(embedded.target, group, topic, "--last-will", "process") as process,
        embedded.connect() as marshal,
        joined(marshal, group, [topic]) as other,
    ):
        kept(process, embedded, group)
        mine = other.info().session

        def beats(*, own: bool) -> int:
            return sum((beat.session == mine) is own for beat in embedded.accepted(group, Heartbeat))

        process.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.process.pid, os.WSTOPPED | os.WNOWAIT)
        own, its = beats(own=True), beats(own=False)
        until(lambda: beats(own=True) >= own + 4, "more heartbeats than the other one writes in an interval")
        process.signal(signal.SIGCONT)
        until(lambda: beats(own=False) > its, "a heartbeat after it")
        assert not [leave for leave in embedded.accepted(group, Leave) if died(leave)]


def test_a_witness_ends_with_its_consumer_and_takes_nothing_with_it(embedded: EmbeddedTestCluster) -> None:
    """T19: a clean stop takes the will back; one Leave, none by the witness; no process is left."""
    topic, group = embedded.topic(), embedded.group()
    others = witnesses(MARK)
    marshal = embedded.connect(last_will="process")
    consumer = joined(marshal, group, [topic])
    (mine,) = witnesses(MARK) - others
    assert embedded.accepted(group, Join)[0].witness == f"process {mine}"
    assert os.getpgid(mine) != os.getpgrp(), "ctrl-C in this terminal does not reach it"
    words = Path(f"/proc/{mine}/cmdline").read_bytes()
    assert embedded.target.encode() not in words, "settings are on no command line"
    resident = next(line for line in Path(f"/proc/{mine}/status").read_text().splitlines() if "VmRSS" in line)
    assert int(resident.split()[1]) <= 30 * 1024, resident
    consumer.stop()
    marshal.close()
    until(lambda: mine not in witnesses(MARK), "the witness ends")
    (leave,) = embedded.accepted(group, Leave)
    assert not died(leave)


def test_a_lost_witness_is_started_again(embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """T19: the event `last_will_lost`, once, and another process after a pause."""
    monkeypatch.setattr(last_wills, "PAUSE_S_MIN", 0.01)
    topic, group = embedded.topic(), embedded.group()
    others = witnesses(MARK)
    with embedded.connect(last_will="process") as marshal, joined(marshal, group, [topic]) as consumer:
        (first,) = witnesses(MARK) - others
        until(lambda: consumer.cached_info().claims, "its claim")
        os.kill(first, signal.SIGKILL)
        texts: list[str] = []
        until(lambda: (texts.extend(lost(consumer)), texts)[1], "last_will_lost")
        assert texts == ["the witness has ended; another witness is started after a pause"]
        until(lambda: witnesses(MARK) - others - {first}, "another witness")
        assert len(consumer.cached_info().claims) == 1, "the consumer has not noticed anything else"


def test_a_witness_that_is_late_gets_the_session_all_the_same(
    embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T19: a `marshal run` that is stopped for a while is not lost, and the Join says that there is one."""
    monkeypatch.setattr(last_wills, "READY_S", 0.01)
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(connecting.VARIABLE, "0:0:0")
    monkeypatch.setattr(connecting, "connect", lambda: theirs)
    group = embedded.group()
    with embedded.connect() as marshal, joined(marshal, group, [embedded.topic()]) as consumer:
        assert embedded.accepted(group, Join)[0].witness == "marshal run"
        witness = Witness("late", lambda _settings: FakeProducer(), lambda _pid: "")
        witness.connect(ours)
        (connection,) = witness.connections
        until(lambda: (witness.step(0.01), connection.wills)[1], "the witness has the session")
        (registered,) = connection.wills.values()
        assert registered.session.group == group
        assert not lost(consumer)
    until(lambda: (witness.step(0.01), not witness.busy)[1], "the will is taken back")
    witness.close()


def test_a_witness_that_starts_slowly_counts(embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """T19: on a busy machine its interpreter takes longer than a consumer waits."""
    monkeypatch.setattr(last_wills, "READY_S", 0.01)
    may_start, start = threading.Event(), connecting.start_witness
    monkeypatch.setattr(last_wills, "start_witness", lambda: may_start.wait(DEADLINE_S) and start())
    group = embedded.group()
    with embedded.connect(last_will="process") as marshal, joined(marshal, group, [embedded.topic()]):
        assert embedded.accepted(group, Join)[0].witness == "process"
        may_start.set()
        until(lambda: witnesses(MARK), "the witness")


def test_a_consumer_that_has_joined_is_registered(
    embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T19: the process may die as soon as `consumer` has returned."""
    registered: list[str] = []
    plain = WitnessConnection.register

    def register(connection: WitnessConnection, session: Register, kept_fd: int) -> None:
        plain(connection, session, kept_fd)
        registered.append(session.group)

    monkeypatch.setattr(WitnessConnection, "register", register)
    monkeypatch.setattr(last_wills, "KEEP_S", DEADLINE_S)  # it does not wait for the next round
    group = embedded.group()
    with embedded.connect(last_will="process") as marshal, joined(marshal, group, [embedded.topic()]):
        assert registered == [group]


def test_auto_does_nothing_where_there_is_no_marshal_run(embedded: EmbeddedTestCluster) -> None:
    """T19: no process, no witness in the Join."""
    group = embedded.group()
    before = witnesses(MARK)
    with embedded.connect() as marshal, joined(marshal, group, [embedded.topic()]):
        assert not witnesses(MARK) - before
        assert embedded.accepted(group, Join)[0].witness == ""


def test_auto_says_why_it_cannot_use_a_marshal_run(
    embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T19: to each consumer, with a way out; its Join names no witness."""
    monkeypatch.setenv(connecting.VARIABLE, "99999:1:1")
    topic, group = embedded.topic(2), embedded.group()
    with embedded.connect() as marshal, joined(marshal, group, [topic]) as first:
        until(lambda: [text for text in lost(first) if "pass_fds=[99999]" in text], "the first one is told")
        with joined(marshal, group, [topic]) as second:
            until(lambda: [text for text in lost(second) if "pass_fds=[99999]" in text], "the second one, too")
    monkeypatch.setattr(last_wills, "_calls", lambda _settings: "a witness cannot call oauth_cb")
    with embedded.connect() as marshal, joined(marshal, group, [topic]) as third:
        until(lambda: lost(third) == [f"a witness cannot call oauth_cb; {FOR_GOOD}"], "the settings are named")
    assert {join.witness for join in embedded.accepted(group, Join)} == {""}


def test_a_marshal_run_that_has_ended_does_not_come_back(
    embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T19: one event, which says so; another text than for a witness that is started again."""
    monkeypatch.setattr(last_wills, "READY_S", 0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setenv(connecting.VARIABLE, connecting.describe(theirs.fileno()))
    with embedded.connect() as marshal, joined(marshal, embedded.group(), [embedded.topic()]) as consumer, theirs:
        assert not lost(consumer)
        ours.close()
        texts: list[str] = []
        until(lambda: (texts.extend(lost(consumer)), texts)[1], "last_will_lost")
        assert texts == [f"marshal run has ended; {FOR_GOOD}"]


def test_a_marshal_run_that_drops_a_process_is_asked_again(
    embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T19: it lives, and had no descriptor left. The consumer is told so, and registered again after the pause."""
    monkeypatch.setattr(last_wills, "READY_S", 0.01)
    witness = Witness("run", lambda _settings: FakeProducer(), lambda _pid: "")
    asked: list[socket.socket] = []

    def reach() -> socket.socket:
        ours, theirs = socket.socketpair()
        asked.append(ours)
        return theirs

    def registered() -> bool:
        while asked:
            witness.connect(asked.pop())
        witness.step(0.01)
        return any(connection.wills for connection in witness.connections)

    monkeypatch.setenv(connecting.VARIABLE, "0:0:0")
    monkeypatch.setattr(connecting, "connect", reach)
    with embedded.connect() as marshal, joined(marshal, embedded.group(), [embedded.topic()]) as consumer:
        until(registered, "the witness has the session")
        for connection in list(witness.connections):
            connection.drop()
        texts: list[str] = []
        until(lambda: (texts.extend(lost(consumer)), texts)[1], "last_will_lost")
        assert texts == ["the witness has ended; marshal run is asked again after a pause"]
        until(registered, "the witness has the session again")
    witness.close()


def test_a_will_that_cannot_be_kept(embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """T19: the consumer is told why, once, and its witness stays; the session is registered when there is room."""
    registered: list[str] = []
    plain, full = WitnessConnection.register, [True]

    class FullFile(KeptFile):
        def __init__(self) -> None:
            if full:
                raise OSError(errno.EMFILE, "Too many open files")
            super().__init__()

    def register(connection: WitnessConnection, session: Register, kept_fd: int) -> None:
        plain(connection, session, kept_fd)
        registered.append(session.group)

    monkeypatch.setattr(WitnessConnection, "register", register)
    monkeypatch.setattr(last_wills, "KeptFile", FullFile)
    group = embedded.group()
    with embedded.connect(last_will="process") as marshal, joined(marshal, group, [embedded.topic()]) as consumer:
        texts: list[str] = []
        until(lambda: (texts.extend(lost(consumer)), texts)[1], "last_will_lost")
        assert texts == [UNKEPT.format("[Errno 24] Too many open files")]
        first = witnesses(MARK)
        assert not registered
        full.clear()
        until(lambda: registered == [group], "it is registered")
        assert (witnesses(MARK), lost(consumer)) == (first, [])


def test_bad_options_are_refused(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """T19: each by its name and with a way out; `auto` refuses nothing."""
    with pytest.raises(InvalidOption, match="auto, process, off"):
        connect("nowhere:1", last_will="always")
    with pytest.raises(InvalidOption, match="in memory"):
        connect(memory.target, last_will="process")
    with pytest.raises(InvalidOption, match="oauth_cb"):
        last_wills.check("process", {**SETTINGS, "oauth_cb": print}, reachable=True)
    assert last_wills.check("process", {**SETTINGS, "error_cb": print}, reachable=True) == "process"
    for choice in ("auto", "off"):
        assert last_wills.check(choice, {**SETTINGS, "oauth_cb": print}, reachable=True) == ""
    monkeypatch.setattr(death, "unsupported", lambda: "no pidfd_open")
    with pytest.raises(UnsupportedPlatform, match="no pidfd_open"):
        last_wills.check("process", SETTINGS, reachable=True)
    assert last_wills.check("auto", SETTINGS, reachable=True) == ""


def test_a_program_chooses_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """`marshal consume` and Spark's driver: a process of their own, unless there is a `marshal run`."""
    assert last_wills.of_program(SETTINGS) == "process"
    assert last_wills.of_program({**SETTINGS, "oauth_cb": print}) == "auto"
    monkeypatch.setenv(connecting.VARIABLE, "99999:1:1")
    assert last_wills.of_program(SETTINGS) == "process", "it cannot be reached"
    monkeypatch.setattr(connecting, "descriptor", lambda: 0)
    assert last_wills.of_program(SETTINGS) == "auto"


def test_what_is_promised_about_the_time() -> None:
    """docs/operations.md: at most every 50 ms."""
    assert KEEP_S == 0.05
