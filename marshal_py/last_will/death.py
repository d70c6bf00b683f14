"""How a witness learns that a process has ended: a pidfd on Linux, kqueue's NOTE_EXIT on macOS and BSD.

Both name a process and not a number that another process may get. Both report its end once all of its threads are
gone, and nothing before that: not a stop, not a closed descriptor. kqueue is tested behind a fake only.
"""

from __future__ import annotations

import os
import select
from typing import Any, Final, Protocol


class Watch(Protocol):
    """Watches one process. Its descriptor becomes readable when the process has ended."""

    pid: int  # as this process sees it; 0 if it is unknown

    def fileno(self) -> int: ...
    def ended(self) -> bool: ...
    def close(self) -> None: ...


class PidfdWatch:
    """Watches the process that sent its own pidfd."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.pid: int = _pid_of(fd)

    def fileno(self) -> int:
        return self._fd

    def ended(self) -> bool:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        os.close(self._fd)


class KqueueWatch:
    """Watches a process by its id, from the moment at which the process itself sent that id."""

    def __init__(self, pid: int, module: Any = select) -> None:
        """Raises ProcessLookupError if the process has ended before. `module` stands for `select` in tests."""
        self.pid = pid
        self._queue = module.kqueue()
        event = module.kevent(pid, filter=module.KQ_FILTER_PROC, flags=module.KQ_EV_ADD, fflags=module.KQ_NOTE_EXIT)
        self._note_exit = module.KQ_NOTE_EXIT
        self._ended = False
        self._queue.control([event], 0, 0)

    def fileno(self) -> int:
        found: int = self._queue.fileno()
        return found

    def ended(self) -> bool:
        self._ended = self._ended or any(event.fflags & self._note_exit for event in self._queue.control(None, 1, 0))
        return self._ended

    def close(self) -> None:
        self._queue.close()


def unsupported() -> str:
    """Returns why this platform cannot prove a death; "" if it can."""
    if hasattr(select, "kqueue"):
        return ""
    try:
        os.close(own_pidfd()[0])
    except (AttributeError, OSError, IndexError) as error:
        return f"neither pidfd_open (Linux 5.3 or newer) nor kqueue is there: {error}"
    return ""


def own_pidfd() -> tuple[int, ...]:
    """Returns a pidfd of this process, as a tuple of one; an empty one where kqueue takes its place. Raises OSError
    where the kernel has none, or a sandbox refuses it."""
    if hasattr(os, "pidfd_open"):
        return (os.pidfd_open(os.getpid()),)
    return ()


def watch(pid: int, pidfd: int | None) -> Watch:
    """Returns the watch of a process that has sent its id and perhaps its pidfd. Raises OSError."""
    if pidfd is not None:
        return PidfdWatch(pidfd)
    if not hasattr(select, "kqueue"):
        raise OSError("no pidfd came from the process, and this system has no kqueue")
    return KqueueWatch(pid)


_FDINFO: Final = "/proc/self/fdinfo/{}"


def _pid_of(pidfd: int) -> int:
    """Returns the process's id in this process's namespace; 0 if that is unknown, or the process is gone."""
    try:
        with open(_FDINFO.format(pidfd), encoding="ascii") as info:
            lines = dict(line.split(":", 1) for line in info if ":" in line)
        return max(0, int(lines["Pid"]))
    except (OSError, KeyError, ValueError):
        return 0
