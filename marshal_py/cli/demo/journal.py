"""The journals of the demo's processes, one file each: their entries, the writer and the reader. Judges nothing.

An entry is one line of JSON, written by one system call before anything else happens, so a process that is killed
leaves every entry that it has finished. Times are seconds of the monotonic clock, which all processes of a machine
share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct


class Started(Struct, frozen=True, tag="started"):
    """A process has started. If it is a consumer, it has joined its group only when `Joined` follows."""

    at: float
    pid: int


class Joined(Struct, frozen=True, tag="joined"):
    at: float


class Claimed(Struct, frozen=True, tag="claimed"):
    at: float
    partition: int
    epoch: int


class Lost(Struct, frozen=True, tag="lost"):
    at: float
    partition: int
    reason: str


class Reported(Struct, frozen=True, tag="reported"):
    """The consumer reported an advisory other than a claim or a loss: fenced, evicted, amo_dropped, ..."""

    at: float
    kind: str
    text: str


class Delivered(Struct, frozen=True, tag="delivered"):
    """A message was handed to the handler; written before its ack. `at` is when the handler began."""

    at: float
    partition: int
    offset: int
    checksum_fits: bool


class Written(Struct, frozen=True, tag="written"):
    """The cluster has acknowledged a message."""

    partition: int
    offset: int


class Failed(Struct, frozen=True, tag="failed"):
    """The process ends because of an error."""

    at: float
    reason: str


Entry = Started | Joined | Claimed | Lost | Reported | Delivered | Written | Failed

_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)
_encoder = msgspec.json.Encoder()


class Journal:
    """Writes a journal. Any thread may write, because a line is one append."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, entry: Entry) -> None:
        os.write(self._file, _encoder.encode(entry) + b"\n")

    def close(self) -> None:
        os.close(self._file)


class JournalReader:
    """Reads a journal while it is written. `new_entries` returns the complete lines since its last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def new_entries(self) -> Iterator[Entry]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        self._at += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            yield _decoder.decode(line)


def now() -> float:
    return time.monotonic()
