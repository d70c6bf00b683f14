"""A pseudo-terminal with a real bash, for tests of what keys and jobs do."""

from __future__ import annotations

import codecs
import os
import select
import subprocess
import termios
import time
from collections.abc import Mapping

DEADLINE_S = 60.0
# No echo of what is typed, and no signal that the process around the tests ignores.
SHELL = "stty -echo; exec env --default-signal PS1= bash --norc --noprofile --noediting -i"
CTRL_C, CTRL_Z = "\x03", "\x1a"


class Terminal:
    """A terminal with an interactive shell, which has job control."""

    def __init__(self, environment: Mapping[str, str] | None = None, size: tuple[int, int] = (24, 80)) -> None:
        """`size`: lines and columns."""
        self._fd, theirs = os.openpty()
        self.resize(*size)
        self.shell = subprocess.Popen(
            ["setsid", "--ctty", "sh", "-c", SHELL], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        self._shown = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self.type("echo shell-$((40+2))\n")
        self.wait("shell-42")

    def resize(self, lines: int, columns: int) -> None:
        termios.tcsetwinsize(self._fd, (lines, columns))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait(self, text: str) -> str:
        """Waits until the terminal has shown `text`. Returns what it has shown before that."""
        deadline, poller = time.monotonic() + DEADLINE_S, select.poll()
        poller.register(self._fd, select.POLLIN)
        while text not in self._shown:
            assert poller.poll(max(0.0, deadline - time.monotonic()) * 1000), f"no {text!r}: {self._shown[-2_000:]!r}"
            self._shown += self._decode(os.read(self._fd, 4_096))
        before, _, self._shown = self._shown.partition(text)
        return before

    def close(self) -> None:
        os.close(self._fd)  # the kernel hangs up on all that is left in the session
        self.shell.wait(DEADLINE_S)
