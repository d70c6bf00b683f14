"""The two ways in which a witness runs: alone beside one consumer process, or as `marshal run` around a command.

`marshal run` is what an init process of a container has to be, and no more: it starts the command in a process group of
its own, passes signals on, reaps whatever ends, and ends as the command did.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from marshal_py.last_will.messages import DESCRIPTORS_MAX
from marshal_py.last_will.rendezvous import VARIABLE, describe
from marshal_py.last_will.witness import Witness
from marshal_py.transport import bare_producer

NOT_FOUND: Final = 127  # exit codes of shells for a command that cannot be started
NOT_EXECUTABLE: Final = 126
SIGNALLED: Final = 128
STATUSES_MAX: Final = 1_000  # of reaped processes, kept until their pidfd has been looked at
FORWARDED: Final = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT", "SIGALRM")
# A witness of one process ends with that process. A signal to its control group must not end it sooner.
IGNORED: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def serve_parent() -> int:
    """Is the witness of the process at the other end of standard input. Returns when nobody needs it any more."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    witness = Witness(f"process {os.getpid()}", bare_producer.create, lambda _pid: "")
    witness.connect(socket.socket(fileno=os.dup(0)))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    while witness.busy:
        witness.step()
    return 0


def run(command: list[str]) -> int:
    """Runs a command and is the witness of every consumer in it. Returns the exit status for this process."""
    return Runner(command).run()


class Runner:
    """Holds a running command: its process, its witness, and what has ended below it."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._child = 0
        self._status: int | None = None  # of the command, once it has ended, as os.waitpid returns it
        self._statuses: dict[int, int] = {}
        self._witness = Witness(f"marshal run {os.getpid()}", bare_producer.create, self._how)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._theirs = theirs.detach()
        self._woken, self._waker = os.pipe()

    def run(self) -> int:
        for fd in (self._woken, self._waker):
            os.set_blocking(fd, False)
        self._ours.setblocking(False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        forwarded = [getattr(signal, name) for name in FORWARDED if hasattr(signal, name)]
        # Blocked until the command's process is known here, and until that process handles signals as a command does.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
        for number in forwarded:
            signal.signal(number, self._forward)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # it only has to wake the loop
        self._child = self._start(forwarded, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(self._theirs)
        _give_terminal_to(self._child)
        selector = self._witness.selector
        selector.register(self._woken, selectors.EVENT_READ, self._wake)
        selector.register(self._ours, selectors.EVENT_READ, self._accept)
        while self._status is None:
            self._witness.step()
            self._reap()
        self._settle()
        code = os.waitstatus_to_exitcode(self._status)
        return code if code >= 0 else SIGNALLED - code

    def _settle(self) -> None:
        """Publishes the wills of what has ended. Who still lives below the command loses its witness.

        What this process has not read yet counts: it may have been stopped while the command lived.
        """
        self._accept()
        for connection in list(self._witness.connections):
            connection.settle()
        while self._witness.unacknowledged:
            self._witness.step()

    def _start(self, handled: list[signal.Signals], mask: set[signal.Signals | int]) -> int:
        """Starts the command with the default handlers and this signal mask. Returns its process."""
        child = os.fork()
        if child:
            with contextlib.suppress(OSError):  # it may have done so itself, or be gone
                os.setpgid(child, child)
            return child
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (*handled, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.set_inheritable(self._theirs, True)
            os.environ[VARIABLE] = describe(self._theirs)
            os.execvp(self._command[0], self._command)
        except OSError as error:
            sys.stderr.write(f"marshal run: {self._command[0]}: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)

    # --- events

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._child and self._status is None:
                os.kill(self._child, number)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, 4_096):
                pass

    def _accept(self) -> None:
        """Takes the sockets that processes below have sent."""
        while True:
            try:
                _, fds, _, _ = socket.recv_fds(self._ours, 16, DESCRIPTORS_MAX)
            except OSError:
                return
            for fd in fds:
                os.set_inheritable(fd, False)
                self._witness.connect(socket.socket(fileno=fd))

    def _reap(self) -> None:
        """Collects every process that has ended: the command, its children, and orphans where this is process 1."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self._child:
                self._status = status
            self._statuses[pid] = status
            while len(self._statuses) > STATUSES_MAX:
                del self._statuses[next(iter(self._statuses))]

    def _how(self, pid: int) -> str:
        """Returns how a process ended, if it was a child of this one; else ""."""
        self._reap()
        status = self._statuses.get(pid)
        return "" if status is None else in_words(status)


def in_words(status: int) -> str:
    """Returns how a process ended, from the status that os.waitpid returned, such as "signal 9 (SIGKILL)"."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def _give_terminal_to(group: int) -> None:
    """Makes the command's process group the one that gets the terminal's signals.

    Does nothing without a terminal, or if this process is in its background: the terminal is another's then.
    """
    try:
        if not os.isatty(0) or os.tcgetpgrp(0) != os.getpgrp():
            return
    except OSError:  # a terminal that is not the controlling one
        return
    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.tcsetpgrp(0, group)
    signal.signal(signal.SIGTTOU, before)
