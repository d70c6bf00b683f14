"""What the demo's processes write down, each in a file of its own, and how it is read back. Judges nothing.

An entry is one line of JSON, written by one system call before anything else happens: a process that dies by SIGKILL
leaves every entry that it finished. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct


class Started(Struct, frozen=True, tag="started"):
    """A process runs. For a consumer: it has joined the group when `Joined` follows."""

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


class Told(Struct, frozen=True, tag="told"):
    """An advisory that is no claim and no loss: fenced, evicted, amo_dropped, ..."""

    at: float
    kind: str
    text: str


class Delivered(Struct, frozen=True, tag="delivered"):
    """A message was handed to the handler; written before its ack. `at` is when the handler began."""

    at: float
    partition: int
    offset: int
    key: str
    sound: bool  # the checksum fits
    token: str


class Written(Struct, frozen=True, tag="written"):
    """The cluster has acknowledged a message."""

    partition: int
    offset: int


class Failed(Struct, frozen=True, tag="failed"):
    """The process ends because of an error."""

    at: float
    reason: str


Entry = Started | Joined | Claimed | Lost | Told | Delivered | Written | Failed

_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)
_encoder = msgspec.json.Encoder()


class Journal:
    """The writing end. Any thread may write: a line is one append."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, entry: Entry) -> None:
        os.write(self._file, _encoder.encode(entry) + b"\n")

    def close(self) -> None:
        os.close(self._file)


class JournalReader:
    """The reading end: what came since the last look. A line that is still being written waits for the next."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def news(self) -> Iterator[Entry]:
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
