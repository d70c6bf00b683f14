"""The consumer's side: it connects to a witness, registers sessions there, and notices when the witness is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from marshal_py.last_will import death
from marshal_py.last_will.messages import Hello as _Hello
from marshal_py.last_will.messages import Inbox, Register, Welcome, Withdraw, readable, send

SEND_S: Final = 5.0  # a witness that reads nothing for so long counts as lost
START_S: Final = 10.0  # for the interpreter that starts a witness to start it and end
PROGRAM: Final = Path(__file__).resolve().parent / "__main__.py"


def command(*arguments: str) -> list[str]:
    """Returns the command line of a small process that runs __main__.py with these arguments."""
    return [sys.executable, "-P", str(PROGRAM), *arguments]


def start_witness() -> socket.socket:
    """Starts a witness for this process alone, and returns the connection to it. It runs in a session of its own, so
    ctrl-C in a terminal does not reach it, and it is no child of this process. Raises OSError or
    subprocess.SubprocessError."""
    if not sys.executable:
        raise OSError("this process does not know its Python interpreter (sys.executable is empty)")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with theirs:
            starter = subprocess.Popen(
                command("witness"),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            status = starter.wait(START_S)
        if status:
            raise OSError(f"the interpreter {sys.executable} ended with status {status}")
    except BaseException:
        ours.close()
        raise
    return ours


class WitnessConnection:
    """The connection to one witness. One thread uses it."""

    def __init__(self, source: socket.socket) -> None:
        """Says hello. Raises OSError."""
        source.settimeout(SEND_S)
        self.source = source
        self.name: str = ""  # of the witness; "" until it has answered
        self._inbox = Inbox(source)
        pidfd: tuple[int, ...] = ()
        try:
            pidfd = death.own_pidfd()
            send(source, _Hello(os.getpid()), pidfd)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in pidfd:
                os.close(fd)

    def lost(self) -> bool:
        """Takes what the witness has said; returns True if it is gone."""
        for message in self._inbox.read():
            if isinstance(message, Welcome):
                self.name = message.name
        return self._inbox.closed

    def wait(self, timeout_s: float) -> None:
        """Waits until the witness has said its name or is gone, for `timeout_s` seconds at most."""
        deadline = time.monotonic() + timeout_s
        while not self.lost() and not self.name and (left_s := deadline - time.monotonic()) > 0:
            readable(self.source, left_s)

    def register(self, session: Register, kept_fd: int) -> None:
        """Has the witness end this session if the process dies. Raises OSError."""
        send(self.source, session, (kept_fd,))

    def withdraw(self, number: int) -> None:
        """Takes a registration back. Does nothing if the witness is gone."""
        with contextlib.suppress(OSError):
            send(self.source, Withdraw(number))

    def close(self) -> None:
        self._inbox.close()


# --- The start of `marshal run`: no signal that ends a program is lost, or half obeyed, while it is on its way
#
# The command line parses the words, then becomes the small process of `runner.py`. Signals that come in between stay
# pending: process 1, which no default action ends, gets them too. If one came, the command is not started.


ENDING: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
_held: frozenset[int] = frozenset()


def hold() -> None:
    """Blocks the signals that end a program, until the runner takes them."""
    global _held
    _held = ENDING - signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def become(program: Sequence[str]) -> None:
    """Replaces this process, which has all of the library in memory, by the runner of the program."""
    words = command("run", *(str(int(number)) for number in sorted(_held)), "--", *program)
    os.execv(words[0], words)


# --- How a process finds the `marshal run` that it runs under: an inherited socket, which the environment names
#
# The number of a descriptor alone proves nothing: a program may have closed it and opened something else. So the
# environment also names the socket's identity.


VARIABLE: Final = "MARSHAL_RUN_SOCKET"  # its value: descriptor:device:inode


class Unusable(OSError):
    """No witness is to be had from the `marshal run` around this process, now or later. The text says why."""


def describe(fd: int) -> str:
    """Returns the value of VARIABLE for a socket that a child will inherit."""
    found = os.fstat(fd)
    return f"{fd}:{found.st_dev}:{found.st_ino}"


def expected() -> bool:
    """Returns whether a `marshal run` was started around this process."""
    return bool(os.environ.get(VARIABLE))


def descriptor() -> int | None:
    """Returns the inherited socket to the `marshal run` around this process; None if there is none."""
    value = os.environ.get(VARIABLE, "")
    try:
        fd, device, inode = map(int, value.split(":"))
        found = os.fstat(fd)
    except (ValueError, OSError):
        return None
    return fd if stat.S_ISSOCK(found.st_mode) and (found.st_dev, found.st_ino) == (device, inode) else None


def connect() -> socket.socket:
    """Returns a new connection to the `marshal run` around this process. Waits for nothing. Raises Unusable if its
    socket was not inherited, or if it has ended; OSError if it cannot take one more now."""
    fd = descriptor()
    if fd is None:
        number = os.environ.get(VARIABLE, "").partition(":")[0]
        raise Unusable(
            f"{VARIABLE} is set, but a program between marshal run and this process has closed its socket; have that"
            f' program pass it on, such as subprocess.run(..., pass_fds=[{number}]), or use last_will="process"'
        )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket.socket(fileno=os.dup(fd)) as run:
            # Not socket.send_fds, which ignores flags.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [theirs.fileno()]))
            run.sendmsg([b"connect"], [rights], socket.MSG_DONTWAIT)
    except OSError as error:
        ours.close()
        if isinstance(error, ConnectionError) or error.errno == errno.ENOTCONN:  # which the second one that asks gets
            raise Unusable("marshal run has ended") from error
        raise OSError(f"marshal run has not taken earlier connections yet ({error})") from error
    finally:
        theirs.close()
    return ours
