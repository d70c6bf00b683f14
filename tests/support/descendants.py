"""The processes that a process has started, at any depth."""

from __future__ import annotations

import subprocess


def descendants(pid: int) -> list[int]:
    """The process ids of all children, and theirs."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in table.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found, wave = list[int](), [pid]
    while wave := [child for parent in wave for child in children.get(parent, [])]:
        found += wave
    return found
