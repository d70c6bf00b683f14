"""The consumer's side: it connects to a witness, registers sessions there, and notices when the witness is gone."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
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
