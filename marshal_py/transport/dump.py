"""Writes and reads dump files: coordination logs as JSON lines, to keep, send, read elsewhere and fold again.

The first line is a header and the last one an end mark; between them is one line per record, log after log:

    {"dump":"marshal","version":1,"topic":"__marshal","incarnation":"...","partitions":16,"group":"","logs":[...],...}
    {"log":0,"offset":0,"time_ms":1763700000000,"key":"","value":"TXIB...","sum":"0f3c..."}
    {"dump":"end","records":1,"sum":"..."}

Key and value are base64, or null where the record has none. Lines may have more fields; readers skip them. `sum` is the
hash of everything from the file's first byte to that place, so a changed byte is noticed in its own line. This guards
against accidents; the digests inside the log guard against intent (PROTOCOL.md 6).

A bundle (`marshal bundle`) is a dump whose header has an object `about`: what was known besides when it
was made.

Nothing here talks to a cluster or folds a record.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec
from msgspec import Struct

from marshal_py.errors import FileUnusable
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.memory import MemoryBroker, MemoryMessage, MemoryTransport
from marshal_py.transport.ports import LogRecord

T = TypeVar("T")

VERSION: Final = 1
SUM_BYTES: Final = 8  # length of the hash: a change goes unnoticed with a chance of 1 in 2^64
PLACE_BYTES: Final = 100  # the first bytes of a record's line, which hold its log and offset
_TAIL_BYTES: Final = len(b',"sum":""}\n') + 2 * SUM_BYTES

_PLACE = re.compile(rb'"log":(\d{1,6}),"offset":(\d{1,19})')


class Span(Struct, frozen=True):
    """Names one log of a dump and its offsets: `first` to `end` - 1."""

    log: int
    first: int
    end: int


class Header(Struct, frozen=True, kw_only=True):
    """Says what a dump holds. `group` is "" for a dump of all logs; `by` names the library, for people. `about`: of a
    bundle (admin/archive.py); {} for a plain dump."""

    topic: str
    incarnation: str | None  # hex; None if the topic has no root yet
    partitions: int | None
    logs: tuple[Span, ...]
    group: str = ""
    time_ms: int = 0
    by: str = ""
    about: dict[str, Any] = {}
    version: int = VERSION
    dump: str = "marshal"


class _Line(Struct, frozen=True):
    """The fields of a record's line that readers need."""

    log: int
    offset: int
    time_ms: int
    key: bytes | None
    value: bytes | None


class _End(Struct, frozen=True):
    dump: str
    records: int


_header_of: Final = msgspec.json.Decoder(Header)
_line_of: Final = msgspec.json.Decoder(_Line)
_end_of: Final = msgspec.json.Decoder(_End)
_encode: Final = msgspec.json.Encoder().encode


class _RunningSum:
    """Computes the hash of everything that was added so far."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=SUM_BYTES)

    def tail(self, body: bytes) -> bytes:
        """Adds a line without its end to the hash. Returns the end of the line, which holds the sum."""
        self._hash.update(body)
        return b',"sum":"%s"}\n' % self._hash.hexdigest().encode()


class Writer:
    """Writes one dump into an open file. Call `finish` last: a dump without an end mark counts as cut off."""

    def __init__(self, out: BinaryIO, header: Header) -> None:
        self.records: int = 0
        self._out, self._sum = out, _RunningSum()
        # `dump` and `version` come first, for people and for tools that look at the first bytes.
        fields = {"dump": header.dump, "version": header.version}
        fields |= {name: value for name, value in msgspec.to_builtins(header).items() if name not in fields}
        if not header.about:
            del fields["about"]
        self._put(fields)

    def _put(self, fields: Mapping[str, Any]) -> None:
        body = _encode(fields)[:-1]
        self._out.write(body + self._sum.tail(body))

    def write(self, record: LogRecord, more: Mapping[str, Any] | None = None) -> None:
        """Writes the next record. `more`: additional fields, of JSON's types, for people and other tools."""
        self._put(
            {
                "log": record.log,
                "offset": record.offset,
                "time_ms": record.timestamp_ms,
                "key": record.key,
                "value": record.value,
                **(more or {}),
            }
        )
        self.records += 1

    def finish(self) -> None:
        self._put({"dump": "end", "records": self.records})


class Reader:
    """Reads a dump once, line by line. Every method raises FileUnusable, which names the offset near the damage."""

    def __init__(self, path: Path) -> None:
        """Opens the file and reads the header."""
        self._path = path
        self._sum = _RunningSum()
        self._number = 1
        self._log, self._next = 0, 0  # where the next record should be
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise FileUnusable(str(path), f"it cannot be read: {error.strerror}") from error
        try:
            self.header: Header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_header(self) -> Header:
        line = self._file.readline()
        if not line.startswith(b'{"dump":"marshal",'):
            # Probably another kind of file; if a record follows, it is a dump whose header is damaged.
            if not line:
                raise self._damage("it is empty")
            self._locate(line)
            raise self._damage('line 1 is no header of a dump: `marshal log dump` writes {"dump":"marshal",...}')
        if line[-_TAIL_BYTES:] != self._sum.tail(line[:-_TAIL_BYTES]):
            self._locate(line)
            raise self._damage("the header's sum does not fit")
        header = self._decoded(_header_of, line)
        if header.version > VERSION:
            raise self._damage(f"its format has version {header.version}, this library reads {VERSION}: upgrade")
        self._spans = {span.log: span for span in header.logs}
        self._begin_log(-1)
        return header

    def _locate(self, line: bytes) -> None:
        """Finds the offset nearest to a damaged header, for the error: in the same line, or the next."""
        found = _PLACE.search(line) or _PLACE.search(self._file.readline(PLACE_BYTES))
        if found is not None:
            self._log, self._next = int(found[1]), int(found[2])

    def _begin_log(self, after: int) -> None:
        """Expects the first record of the next log after number `after` that holds any record."""
        for log in sorted(self._spans):
            span = self._spans[log]
            if log > after and span.first < span.end:
                self._log, self._next = log, span.first
                return

    def _damage(self, reason: str) -> FileUnusable:
        return FileUnusable(str(self._path), reason, self._number, self._log, self._next)

    def _decoded(self, decoder: msgspec.json.Decoder[T], line: bytes) -> T:
        try:
            return decoder.decode(line)
        except msgspec.DecodeError as error:  # the sum fits, so it was written like this
            raise self._damage(f"the line is not of the format: {error}") from error

    def __iter__(self) -> Iterator[LogRecord]:
        """Yields the records, log after log in the order of their offsets. Checks that no line is missing. A
        log may have offsets without a record, where somebody has written transactions to it (L8)."""
        for count, line in enumerate(self._file):
            self._number += 1
            body = line[:-_TAIL_BYTES]
            if line[-_TAIL_BYTES:] != self._sum.tail(body):
                raise self._damage("the line's sum does not fit: something in it was changed, or lines are missing")
            if body.startswith(b'{"dump":"end"'):
                self._end(line, count)
                return
            found = self._decoded(_line_of, line)
            self._check_place(found)
            yield LogRecord(found.log, found.offset, found.value, found.time_ms, found.key)
        self._number += 1
        raise self._damage("it is cut off: its end mark is missing")

    def _check_place(self, found: _Line) -> None:
        span = self._spans.get(found.log)
        if span is None or not span.first <= found.offset < span.end:
            raise self._damage(f"the header knows no record {found.log}:{found.offset}")
        if (found.log, found.offset) < (self._log, self._next):
            raise self._damage(f"record {found.log}:{found.offset} comes after a later one")
        self._log, self._next = found.log, found.offset + 1
        if self._next == span.end:
            self._begin_log(found.log)

    def _end(self, line: bytes, count: int) -> None:
        if self._decoded(_end_of, line).records != count:
            raise self._damage(f"its end mark does not count the {count} records that are there")
        if self._file.readline():
            self._number += 1
            raise self._damage("something follows its end mark")


def about(path: Path) -> dict[str, Any]:
    """Returns what a bundle says besides its records; {} for a plain dump. Raises FileUnusable."""
    with Reader(path) as reader:
        return reader.header.about


def check_whole(path: Path) -> None:
    """Raises FileUnusable for a bundle, whose records are not all those of the log."""
    if about(path):
        why = "a bundle leaves words out, so digests differ: `marshal log dump` writes the log as it is"
        raise FileUnusable(str(path), why)


def memory_transport(path: Path) -> tuple[Header, MemoryTransport]:
    """Returns a dump's header, and a cluster in memory that holds its logs, for tools that read a log."""
    broker = MemoryBroker()
    with Reader(path) as reader:
        header = reader.header
        last = max((span.log for span in header.logs), default=0)
        broker.create_topic(header.topic, max(header.partitions or 0, last + 1))
        base = {span.log: span.first for span in header.logs}
        broker.base |= {TopicPartition(header.topic, log): first for log, first in base.items()}
        logs = broker.topics[header.topic]
        for record in reader:
            there = logs[record.log]
            there += [None] * (record.offset - base[record.log] - len(there))  # offsets that held no record
            there.append(
                MemoryMessage(
                    header.topic, record.log, record.offset, record.key, record.value, None, record.timestamp_ms
                )
            )
    return header, MemoryTransport(broker)
