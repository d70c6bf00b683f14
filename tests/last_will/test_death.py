"""What proves that a process has died, and what does not (T19)."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from marshal_py.last_will import death
from marshal_py.last_will.death import KqueueWatch, PidfdWatch

SLEEPER = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPER, stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def ended_within(watch: death.Watch, timeout_s: float) -> bool:
    select.select([watch.fileno()], [], [], timeout_s)
    return watch.ended()


def test_a_pidfd_says_when_the_process_has_ended(child: subprocess.Popen[bytes]) -> None:
    watch = PidfdWatch(os.pidfd_open(child.pid))
    assert watch.pid == child.pid
    assert not watch.ended()
    child.kill()
    assert ended_within(watch, 30)
    child.wait()
    assert watch.ended(), "also after its parent has reaped it"
    watch.close()


def test_a_stopped_process_is_not_dead(child: subprocess.Popen[bytes]) -> None:
    """T19: it holds a valid lease when it continues."""
    watch = PidfdWatch(os.pidfd_open(child.pid))
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert not watch.ended()
    os.kill(child.pid, signal.SIGCONT)
    assert not watch.ended()
    watch.close()


def test_a_process_lives_as_long_as_one_of_its_threads() -> None:
    """T19: the main thread may have ended; another one still handles messages."""
    script = (
        "import ctypes, sys, threading\n"
        "def late():\n print('late', flush=True); sys.stdin.read()\n"
        "threading.Thread(target=late).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"late\n"
    watch = PidfdWatch(os.pidfd_open(process.pid))
    assert not watch.ended()
    process.kill()
    assert ended_within(watch, 30)
    process.communicate()
    watch.close()


def test_this_process_hands_out_a_pidfd_of_itself() -> None:
    (fd,) = death.own_pidfd()
    watch = death.watch(0, fd)
    assert watch.pid == os.getpid()
    assert not watch.ended()
    watch.close()
    assert death.unsupported() == ""


def test_a_platform_without_both_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    assert "kqueue" in death.unsupported()
    with pytest.raises(OSError, match="no pidfd came"):
        death.watch(os.getpid(), None)


def test_a_kernel_that_refuses_pidfds_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuses)
    assert "not permitted" in death.unsupported()


class FakeKqueue:
    """A kqueue that knows one process."""

    def __init__(self) -> None:
        self.asked: list[SimpleNamespace] = []
        self.events: list[SimpleNamespace] = []

    def fileno(self) -> int:
        return 99

    def control(self, changes: list[SimpleNamespace] | None, most: int, timeout: float) -> list[SimpleNamespace]:
        if changes and changes[0].ident == 404:
            raise ProcessLookupError
        self.asked += changes or []
        found, self.events = self.events[:most], self.events[most:]
        return found

    def close(self) -> None:
        self.asked.clear()


def test_kqueue_watches_by_note_exit() -> None:
    queue = FakeKqueue()
    module = SimpleNamespace(
        kqueue=lambda: queue,
        kevent=lambda ident, **more: SimpleNamespace(ident=ident, **more),
        KQ_FILTER_PROC=-5,
        KQ_EV_ADD=1,
        KQ_NOTE_EXIT=0x80000000,
    )
    watch = KqueueWatch(123, module)
    assert (watch.pid, watch.fileno()) == (123, 99)
    (asked,) = queue.asked
    assert (asked.ident, asked.filter, asked.flags, asked.fflags) == (123, -5, 1, 0x80000000)
    assert not watch.ended()
    queue.events.append(SimpleNamespace(fflags=0x20000000))  # NOTE_EXEC proves nothing
    assert not watch.ended()
    queue.events.append(SimpleNamespace(fflags=0x80000000))
    assert watch.ended()
    assert watch.ended(), "the event comes once"
    watch.close()
    with pytest.raises(ProcessLookupError):
        KqueueWatch(404, module)
