"""A child process of the demo: its task, its start and end, and how it notices that the demo has died.

The task arrives as one line of JSON on stdin. It is not on the command line because it may hold a password. stdin stays
open afterwards; when it closes, the demo has died in some way, and the child ends itself.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from marshal_py.cli.demo.journal import Failed, Journal, Started, now
from marshal_py.errors import MarshalError

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
    """Used in the parent: a process that does a task (children.py)."""

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
