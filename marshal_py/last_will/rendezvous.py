"""How a process finds the `marshal run` that it runs under: an inherited socket, which the environment names.

The number of a descriptor alone proves nothing: a program may have closed it and opened something else. So the
environment also names the socket's identity.
"""

from __future__ import annotations

import os
import socket
import stat
from array import array
from typing import Final

VARIABLE: Final = "MARSHAL_RUN_SOCKET"  # its value: descriptor:device:inode


def describe(fd: int) -> str:
    """Returns the value of VARIABLE for a socket that a child will inherit."""
    found = os.fstat(fd)
    return f"{fd}:{found.st_dev}:{found.st_ino}"


def descriptor() -> int | None:
    """Returns the inherited socket to the `marshal run` around this process; None if there is none."""
    value = os.environ.get(VARIABLE, "")
    try:
        fd, device, inode = map(int, value.split(":"))
        found = os.fstat(fd)
    except (ValueError, OSError):
        return None
    return fd if stat.S_ISSOCK(found.st_mode) and (found.st_dev, found.st_ino) == (device, inode) else None


def connect() -> socket.socket | None:
    """Returns a new connection to the `marshal run` around this process; None if there is none, or if it has ended.

    Waits for nothing: also None if more processes have connected than it has taken so far.
    """
    fd = descriptor()
    if fd is None:
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket.socket(fileno=os.dup(fd)) as run:
            # Not socket.send_fds, which ignores flags.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [theirs.fileno()]))
            run.sendmsg([b"connect"], [rights], socket.MSG_DONTWAIT)
    except OSError:
        ours.close()
        return None
    finally:
        theirs.close()
    return ours
