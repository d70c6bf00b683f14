"""`Consumer.process(executor="processes")`: what travels, deaths, hangs, ends, and what is refused."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marshal_py import Batches, Consumer, Message, Process, Retry
from marshal_py.client.process import worker_processes
from marshal_py.client.process.worker_processes import WorkerProcess
from marshal_py.errors import InvalidOption
from marshal_py.info import PlainMessage
from tests.client.test_process import fill
from tests.support import worker_handlers
from tests.support.client_fixtures import DEADLINE_S, MemoryTestCluster, joined, positions, until

AT_ONCE = Retry(first_s=0.0)
TIMEOUT_S = 321.0  # of a handler
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(worker_handlers.FOLDER, str(tmp_path))
    return tmp_path


def lines(folder: Path) -> list[tuple[int, int, int, int]]:
    """Process, partition, offset and delivery of each call, in their order."""
    path = folder / "lines"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = [tuple(map(int, line.split())) for line in text.splitlines()]
    return found  # type: ignore[return-value]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text(encoding="utf-8").rpartition(") ")[2][0] != "Z"


def kill(pid: int) -> None:
    """Kills a worker process of this one, and waits until all its threads have ended. Its exit code stays."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), "it is dead")
    if hasattr(os, "waitid"):  # not on macOS
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_a_message_travels_as_plain_values(memory: MemoryTestCluster, folder: Path) -> None:
    topic = fill(memory, 1, keys=1)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(worker_handlers.tell, executor="processes", workers=1) as work,
    ):
        until(lambda: work.stats().finished == 1, "it is handled")
    told = (folder / "told").read_text(encoding="utf-8")
    assert told.startswith(f"('{topic}', 0, 0, b'k0', b'0', [], 1, '")


def test_answers_are_those_of_a_thread(memory: MemoryTestCluster, folder: Path) -> None:
    topic = fill(memory, 6, keys=6)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with consumer.process(worker_handlers.outcomes, executor="processes", workers=2, retry=AT_ONCE) as work:
            until(lambda: positions(consumer) == {0: 6}, "all are done")
            assert (work.stats().finished, work.stats().ended, work.stats().retried) == (5, 1, 3)
        failed = {event.offset: event.text for event in consumer.events() if event.kind == "handler_failed"}
    assert sorted(failed) == [3, 4]
    assert "cannot travel" in failed[4]
    pids = {pid for pid, *_ in lines(folder)}
    assert pids
    assert os.getpid() not in pids
    until(lambda: not any(map(alive, pids)), "they have ended")


def test_a_process_that_dies_has_failed_with_its_message_and_loses_none(
    memory: MemoryTestCluster, folder: Path
) -> None:
    topic = fill(memory, 12, keys=4)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with consumer.process(
            worker_handlers.dies, executor="processes", workers=2, retry=AT_ONCE, retry_on=ValueError
        ) as work:
            until(lambda: positions(consumer) == {0: 12}, "all are done")
            assert (work.stats().finished, work.stats().retried) == (12, 4)
        texts = [event.text for event in consumer.events() if event.kind == "handler_failed"]
    assert len(texts) == 4
    assert all("exit code -9" in text for text in texts)
    began: dict[int, list[int]] = defaultdict(list)
    for _, _, offset, _ in lines(folder):
        began[offset % 4].append(offset)
    assert all(offsets == sorted(offsets) for offsets in began.values())


def test_a_process_that_is_killed_before_it_begins_is_replaced(memory: MemoryTestCluster, folder: Path) -> None:
    topic = fill(memory, 2, keys=2)
    (folder / worker_handlers.KILLED).write_text("1", encoding="utf-8")
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(worker_handlers.note, executor="processes", workers=1, retry=AT_ONCE) as work,
    ):
        until(lambda: work.stats().finished == 2, "both are handled")
    assert not (folder / worker_handlers.KILLED).exists()


def test_a_message_whose_handler_has_not_begun_has_not_failed(memory: MemoryTestCluster, folder: Path) -> None:
    topic = fill(memory, 1, keys=1)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(
            worker_handlers.note, executor="processes", workers=1, retry=Retry(first_s=0.0, deliveries=1)
        ) as work,
    ):
        until(lambda: work.stats().finished == 1, "the first one is handled")
        (folder / worker_handlers.KILLED).write_text("2", encoding="utf-8")
        kill(lines(folder)[0][0])
        memory.put(topic, 0, b"1", b"k0")
        until(lambda: sum(positions(consumer).values()) == 2, "the second one is done")
        assert (work.stats().finished, work.stats().ended) == (2, 0)
    assert not (folder / worker_handlers.KILLED).exists()


@pytest.mark.parametrize("killed", ["idle", "with a message"])
def test_an_end_while_a_process_begins_ends_no_message(memory: MemoryTestCluster, folder: Path, killed: str) -> None:
    topic = fill(memory, 2 if killed == "with a message" else 1, keys=2)
    handler = worker_handlers.dies_and_holds if killed == "with a message" else worker_handlers.note
    once = Retry(first_s=0.0, deliveries=1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(handler, executor="processes", workers=1, retry=once)
        held = folder / worker_handlers.HELD
        if killed == "idle":
            until(lambda: work.stats().finished == 1, "the first one is handled")
            held.touch()
            kill(lines(folder)[0][0])
            memory.put(topic, 0, b"1", b"k1")
        until(lambda: held.exists() and held.read_text(encoding="utf-8").strip(), "the next process begins")
        work.stop()
        again = consumer.next(DEADLINE_S)
        assert again is not None
        assert again.offset == 1
        assert work.stats().ended == (killed == "with a message")


def test_a_call_that_raises_ends_it_and_gives_the_message_back(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(self: WorkerProcess, given: object) -> None:
        raise SystemExit("a bug")

    monkeypatch.setattr(WorkerProcess, "call", call)
    topic = fill(memory, 1, keys=1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(worker_handlers.note, executor="processes", workers=1)
        with pytest.raises(SystemExit):
            work.wait(DEADLINE_S)
        assert work.stats().working == 0
        assert consumer.next(DEADLINE_S) is not None


def test_a_consumer_is_not_healthy_while_none_of_its_worker_processes_can_start(
    memory: MemoryTestCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: WorkerProcess) -> bool:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    topic = fill(memory, 1, keys=1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with monkeypatch.context() as patched:
            patched.setattr(WorkerProcess, "ready", no_room)
            work = consumer.process(worker_handlers.note, executor="processes", workers=2, retry=AT_ONCE)
            until(lambda: not consumer.healthy(), "it knows")
            assert "worker processes, none of which can start: [Errno 11]" in consumer.cached_info().waiting_for
        until(consumer.healthy, "they can start")
        until(lambda: work.stats().finished == 1, "nothing is lost")
        assert consumer.cached_info().waiting_for == ""
        work.stop()


def test_a_value_that_a_worker_process_cannot_read_ends_it(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 1, keys=1)
    with (
        memory.connect() as marshal,
        joined(
            marshal, memory.group(), [topic], value_deserializer=lambda *_: worker_handlers.OnlyInTheProgram()
        ) as consumer,
    ):
        work = consumer.process(worker_handlers.note, executor="processes", workers=1, retry=AT_ONCE)
        with pytest.raises(InvalidOption, match=r"unpickle.*LookupError: not here"):
            work.wait(DEADLINE_S)


@pytest.mark.parametrize("lists", [False, True])
def test_errors_of_own_classes_keep_their_meaning(memory: MemoryTestCluster, lists: bool) -> None:
    topic = fill(memory, 3, keys=3)
    options: dict[str, Any] = {"retry": AT_ONCE, "retry_on": worker_handlers.Busy, "executor": "processes"}
    handler: Any = worker_handlers.own_classes_in_lists if lists else worker_handlers.own_classes
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with consumer.process(handler, workers=1, **options, **({"batch": Batches(3)} if lists else {})) as work:
            until(lambda: positions(consumer) == {0: 3}, "all are done")
            assert (work.stats().finished, work.stats().retried, work.stats().ended) == (2, 2, 1)
        events = [(event.kind, event.offset) for event in consumer.events()]
    assert [offset for kind, offset in events if kind == "handler_failed"] == [2]
    assert ("terminated", 0) in events


def over_when(condition: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the first handler is over once this is true, and that of the others never: both take what this
    machine lets them take."""
    plainly, over = worker_processes.connection.wait, list[float]()

    def wait(ready: Any, timeout: float | None = None) -> list[Any]:
        if timeout != TIMEOUT_S:
            return plainly(ready, timeout)
        over.append(timeout)
        if len(over) > 1:
            return plainly(ready)
        until(condition, "the first handler's time is over")
        return plainly(ready, 0)

    monkeypatch.setattr(worker_processes.connection, "wait", wait)


def test_a_handler_that_takes_too_long_is_killed_and_its_message_tried_again(
    memory: MemoryTestCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_when(lambda: lines(folder), monkeypatch)
    topic, options = fill(memory, 2, keys=1), {"timeout_s": TIMEOUT_S, "retry": AT_ONCE}
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(worker_handlers.hangs, executor="processes", workers=1, **options) as work,
    ):
        until(lambda: work.stats().finished == 2, "both are handled")
    assert [line[2:] for line in lines(folder)] == [(0, 1), (0, 2), (1, 1)]
    assert not alive(lines(folder)[0][0])


def test_a_timeout_without_end_is_none(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 1, keys=1)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(worker_handlers.note, executor="processes", workers=1, timeout_s=math.inf) as work,
    ):
        until(lambda: work.stats().finished == 1, "it is handled")


def test_lists_travel(memory: MemoryTestCluster, folder: Path) -> None:
    topic = fill(memory, 30, keys=3)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(
            worker_handlers.each, executor="processes", workers=2, batch=Batches(4, wait_s=0.01), retry=AT_ONCE
        ) as work,
    ):
        until(lambda: work.stats().finished == 30, "all are handled")
        assert work.drain()
    assert {line[2] for line in lines(folder)} == set(range(30))


@pytest.mark.parametrize(
    ("handler", "options", "error"),
    [
        (worker_handlers.bug, {"retry_on": ValueError}, KeyError),
        (worker_handlers.untellable, {"retry_on": ValueError}, RuntimeError),
        (worker_handlers.no_list, {"batch": Batches(3)}, InvalidOption),
        (worker_handlers.unnamed_in_lists, {"batch": Batches(3), "retry_on": RuntimeError}, Exception),
        (worker_handlers.frozen, {"retry_on": ValueError}, worker_handlers.Frozen),
        (worker_handlers.unreadable, {}, InvalidOption),
        (worker_handlers.generator, {}, InvalidOption),
    ],
)
def test_an_error_that_is_not_retried_ends_it_and_gives_the_message_back(
    memory: MemoryTestCluster, handler: Callable[[Any], Any], options: dict[str, Any], error: type[Exception]
) -> None:
    topic = fill(memory, 3, keys=1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(handler, executor="processes", workers=1, **options)
        with pytest.raises(error):
            work.wait(DEADLINE_S)
        assert [message.offset for message in consumer.fetch(3, min_messages=3)] == [0, 1, 2]


def test_a_value_that_cannot_be_pickled_ends_it_and_names_the_message(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 1, keys=1)
    with (
        memory.connect() as marshal,
        marshal.consumer(
            memory.group(), [topic], start="earliest", value_deserializer=lambda value, _: lambda: value
        ) as consumer,
    ):
        work = consumer.process(worker_handlers.note, executor="processes", workers=1)
        with pytest.raises(InvalidOption, match=rf"{topic}:0@0.*picklable"):
            work.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"handler": lambda message: None}, "top level of a module"),
        ({"executor": "process"}, "executor"),
        ({"executor": "processes", "timeout_s": -1}, "timeout_s"),
        ({"executor": "processes", "workers": 0}, "workers"),
        ({"executor": "processes", "timeout_s": 1e12}, "up to 2e.06"),
        ({"handler": None}, "a function of one message"),
    ],
)
def test_bad_input_is_refused(memory: MemoryTestCluster, given: dict[str, Any], names: str) -> None:
    topic = fill(memory, 1, keys=1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with pytest.raises(InvalidOption, match=names):
            consumer.process(**({"handler": worker_handlers.note, "executor": "processes"} | given))
        assert len(consumer.fetch(1)) == 1, "the consumer is as it was"


def program(folder: Path, body: str) -> subprocess.Popen[str]:
    """A program with a consumer in memory whose worker process has a message, which never returns."""
    path = folder / "program.py"
    path.write_text(body, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), worker_handlers.FOLDER: str(folder)}
    return subprocess.Popen(
        [sys.executable, str(path)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


HANGS = """
import sys
from tests.client.test_process import fill
from tests.support import worker_handlers
from tests.support.client_fixtures import MemoryTestCluster, joined, until


def main():
    memory = MemoryTestCluster()
    topic = fill(memory, 2, keys=2)
    marshal = memory.connect()
    consumer = joined(marshal, memory.group(), [topic])
    work = consumer.process(worker_handlers.hangs, executor="processes", workers=1)
    until(lambda: work.stats().working == 1, "it hangs")
    print("began", flush=True)
    sys.stdin.read() if {waits} else None


{guard}main()
"""


def began(folder: Path) -> int:
    return until(lambda: lines(folder), "a worker process has a message")[0][0]


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_no_worker_process_outlives_its_program(folder: Path, end: str) -> None:
    body = HANGS.format(waits=end == "kill", guard='if __name__ == "__main__":\n    ')
    if end == "exit":
        body = body.replace(
            'print("began"',
            "until(lambda: (worker_handlers.os.path.exists(worker_handlers.os.environ"
            '[worker_handlers.FOLDER] + "/lines")), "it has begun")\n    print("began"',
        )
    running = program(folder, body)
    pid = began(folder)
    if end == "kill":
        running.send_signal(signal.SIGKILL)
    running.communicate(timeout=DEADLINE_S)
    until(lambda: not alive(pid), "it ends with its program")


def test_a_program_without_a_guard_is_told_so(folder: Path) -> None:
    body = HANGS.format(waits=False, guard="").replace(
        'until(lambda: work.stats().working == 1, "it hangs")', "work.wait(60)"
    )
    running = program(folder, body)
    _, said = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 1
    assert "__main__" in said.splitlines()[-1], said


def test_ctrl_c_is_for_the_program_alone(
    memory: MemoryTestCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressed = threading.Event()
    over_when(pressed.is_set, monkeypatch)
    topic, options = fill(memory, 2, keys=1), {"timeout_s": TIMEOUT_S, "retry": AT_ONCE}
    before = signal.getsignal(signal.SIGINT)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(worker_handlers.hangs, executor="processes", workers=1, **options) as work,
    ):
        os.kill(began(folder), signal.SIGINT)
        pressed.set()
        until(lambda: work.stats().finished == 2, "both are handled, the first after its time")
        text = next(event.text for event in consumer.events() if event.kind == "handler_failed")
    assert "timeout_s" in text, "it was not the signal"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_to_all_processes_does_not_end_a_handler(memory: MemoryTestCluster, folder: Path) -> None:
    """systemd sends SIGTERM to all of them."""
    topic = fill(memory, 2, keys=1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with consumer.process(worker_handlers.waits, executor="processes", workers=1, retry=AT_ONCE) as work:
            pid = began(folder)
            os.kill(pid, signal.SIGTERM)
            (folder / worker_handlers.GO).touch()
            until(lambda: work.stats().finished == 2, "both are handled")
            assert work.stats().retried == 0
        until(lambda: not alive(pid), "it ends when the program ends it")


def test_a_signal_to_all_processes_does_not_end_one_that_begins(memory: MemoryTestCluster, folder: Path) -> None:
    topic, held = fill(memory, 1, keys=1), folder / worker_handlers.HELD
    held.touch()
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(worker_handlers.note, executor="processes", workers=1) as work,
    ):
        pid = int(until(lambda: held.read_text(encoding="utf-8").strip(), "a process begins"))
        os.kill(pid, signal.SIGTERM)
        held.unlink()
        until(lambda: work.stats().finished == 1, "it is handled")
    assert lines(folder)[0][0] == pid


FORKS = """
import os
import sys
import warnings
from pathlib import Path
from tests.client.test_process import fill
from tests.support import worker_handlers
from tests.support.client_fixtures import MemoryTestCluster, joined, until


def main():
    memory = MemoryTestCluster()
    topic = fill(memory, 1, keys=1)
    marshal = memory.connect()
    consumer = joined(marshal, memory.group(), [topic])
    work = consumer.process(worker_handlers.waits, executor="processes", workers=1)
    folder = Path(os.environ[worker_handlers.FOLDER])
    until(lambda: (folder / "lines").exists(), "it has begun")
    warnings.simplefilter("ignore")  # of newer Pythons: it has threads
    child = os.fork()
    if child == 0:
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    (folder / worker_handlers.GO).touch()
    until(lambda: work.stats().finished + work.stats().retried, "it is handled, or has failed")
    print(status, work.stats().finished, flush=True)
    work.stop()
    marshal.close()


if __name__ == "__main__":
    main()
"""


def test_a_forked_child_that_ends_leaves_the_worker_processes_alone(folder: Path) -> None:
    running = program(folder, FORKS)
    told, said = running.communicate(timeout=DEADLINE_S)
    assert (told, said, running.returncode) == ("0 1\n", "", 0)


def typed(consumer: Consumer[bytes, int]) -> None:
    """mypy checks that a handler in another process gets a plain message of the consumer's types."""

    def handle(message: PlainMessage[bytes, int]) -> None: ...
    def here(message: Message[bytes, int]) -> None: ...

    work: Process[bytes, int] = consumer.process(handle, executor="processes")
    work.stop()
    consumer.process(here, executor="processes").stop()  # type: ignore[call-overload]
