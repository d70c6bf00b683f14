"""Journals: what test processes write down while they run, one append-only file per process, one JSON object per line.

A line is one `os.write` to a file that is opened for appending, made before the thing that it announces: a process that
dies by kill -9 has lost nothing that was begun. If a disk is full, the last line may be incomplete; a reader skips it.

Kinds of lines (`e`), with `ns` = CLOCK_MONOTONIC, which all processes of one host share:
  start   name, pid, client, group, delivery   a process is there
  joined                                       the consumer is in its group
  begin   tok, t, p, o[, gate]                 messages are about to be handled; `gate`: last look at the clock before
  end     tok, t, p, o                         their handler has returned
  ack     tok, t, p, o                         their ack has returned True
  fail    tok, t, p, o                         their handler has raised; in at-least-once mode it is called again later
  error   name, text, closed                   the library raised
  event   kind, t, p, from, to, text           an advisory of the library
  beat                                         the process is being scheduled, whatever the library does
  told    since, v                             a heartbeat (its value) that the library began to write at `since`
  made    t, p, o                              a producer's record was acknowledged
  gone                                         the process ends by itself
  kill                                         the process is about to end itself by kill -9
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["Journal", "Tail"]


class Journal:
    """The writing end. Any thread may write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, /, **fields: Any) -> None:
        line = {"e": kind, "ns": time.monotonic_ns(), **fields}
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


class Tail:
    """The reading end: the lines that have come since the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._at += whole
        return [json.loads(line) for line in data[:whole].splitlines()]
