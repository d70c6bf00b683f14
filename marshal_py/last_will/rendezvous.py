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
    except ConnectionError as error:
        ours.close()
        raise Unusable("marshal run has ended") from error
    except OSError as error:
        ours.close()
        raise OSError(f"marshal run has not taken earlier connections yet ({error})") from error
    finally:
        theirs.close()
    return ours
