"""Finds the processes that a test has started, at any depth, by a variable that they have inherited. Linux only."""

from __future__ import annotations

import contextlib
from pathlib import Path

from marshal_py.last_will import connecting


def marked(mark: str) -> set[int]:
    """Returns the ids of the processes whose environment began with `mark`, such as "NAME=value"; no zombies."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def witnesses(mark: str) -> set[int]:
    """Returns the ids of those of them that are witnesses."""
    found = set()
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if {str(connecting.PROGRAM).encode(), b"witness"} <= {*words}:
                found.add(pid)
    return found
