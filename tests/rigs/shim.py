"""The clock and the disk of a broker: a small library that is loaded into its process (broker_shim.c).

A C compiler builds it once per run. A broker's wall clock can be moved by any number of seconds while it runs, as NTP
or an administrator does. Its disk can be full: each write to a file then fails with ENOSPC, as on a small volume, and
Kafka ends a broker whose only log folder cannot be written.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("broker_shim.c")
CONTROL: Final = struct.Struct("qq")  # seconds ahead, whether the disk is full
COMPILE_S: Final = 60.0


class Shim:
    """One library for all nodes, and a file for each with what its clock and its disk shall be."""

    def __init__(self, folder: Path, nodes: Iterable[int]) -> None:
        """Raises a RuntimeError if the machine has no C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise RuntimeError(
                "the clocks and disks of brokers need a C compiler (cc): install one, or name other faults by --faults"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._library = folder / "broker_shim.so"
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, timeout=COMPILE_S)
        self._files = {node: folder / f"node{node}.control" for node in nodes}
        self._now = dict.fromkeys(self._files, (0, False))
        for node in self._files:
            self._write(node)

    def environment(self, node: int) -> dict[str, str]:
        """What the environment of this node needs before it starts."""
        return {"LD_PRELOAD": str(self._library), "BROKER_SHIM": str(self._files[node])}

    def set_clock(self, node: int, ahead_s: int) -> None:
        """Moves the node's wall clock to so many seconds ahead of the machine's, at once."""
        self._now[node] = (ahead_s, self._now[node][1])
        self._write(node)

    def set_full(self, node: int, full: bool) -> None:
        """Says whether the node's disk is full, from now on."""
        self._now[node] = (self._now[node][0], full)
        self._write(node)

    def _write(self, node: int) -> None:
        with self._files[node].open(
            "r+b" if self._files[node].exists() else "wb"
        ) as file:  # the same inode: it is mapped
            file.write(CONTROL.pack(*self._now[node]))
