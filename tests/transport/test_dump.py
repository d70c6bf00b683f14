"""Dump files: a dump is read as it was written, and no byte of it can change unnoticed."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from marshal_py.errors import FileUnusable, HistoryTruncated
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.dump import Header, Reader, Span, Writer, memory_transport
from marshal_py.transport.ports import Bounds, LogRecord

RECORDS = [
    LogRecord(0, 0, b"root", 1_000, b""),
    LogRecord(0, 1, None, 1_001, None),
    LogRecord(2, 7, bytes(range(256)), 1_002, b"billing"),
    LogRecord(2, 8, b"", -1, "grüße".encode()),
    LogRecord(2, 9, b"last", 1_004, b"billing"),
]
SPANS = (Span(0, 0, 2), Span(1, 0, 0), Span(2, 7, 10))


def header(**fields: object) -> Header:
    given = {"topic": "__marshal", "incarnation": "00" * 16, "partitions": 3, "logs": SPANS, "time_ms": 5, **fields}
    return Header(**given)  # type: ignore[arg-type]


def written(records: list[LogRecord] = RECORDS, **fields: object) -> bytes:
    out = io.BytesIO()
    writer = Writer(out, header(**fields))
    for record in records:
        writer.write(record)
    writer.finish()
    return out.getvalue()


def read(path: Path, content: bytes) -> list[LogRecord]:
    path.write_bytes(content)
    with Reader(path) as reader:
        return list(reader)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.dump"


def test_what_is_written_is_read_again(path: Path) -> None:
    assert read(path, written()) == RECORDS
    with Reader(path) as reader:
        assert reader.header == header()
    assert read(path, written([], logs=())) == []


def test_lines_are_json_with_the_promised_names(path: Path) -> None:
    """Other tools read these lines: names, order and types stay."""
    lines = [json.loads(line) for line in written().splitlines()]
    assert list(lines[0])[:3] == ["dump", "version", "topic"]
    assert [list(line) for line in lines[1:-1]] == [["log", "offset", "time_ms", "key", "value", "sum"]] * len(RECORDS)
    assert lines[2] == {"log": 0, "offset": 1, "time_ms": 1_001, "key": None, "value": None, "sum": lines[2]["sum"]}
    assert lines[3]["key"] == "YmlsbGluZw=="
    assert (lines[-1]["dump"], lines[-1]["records"]) == ("end", len(RECORDS))


def test_further_fields_are_for_others(path: Path) -> None:
    out = io.BytesIO()
    writer = Writer(out, header())
    for record in RECORDS:
        writer.write(record, {"verdict": "accepted", "fields": {"value": 1}})
    writer.finish()
    assert read(path, out.getvalue()) == RECORDS


def test_every_changed_byte_is_noticed_in_its_line(path: Path) -> None:
    """Wherever the byte is (header, record, end mark, checksum, line end), the error names the nearest offset."""
    whole = written()
    places = [(0, 0), *((record.log, record.offset) for record in RECORDS), (2, 10)]
    line = 0
    for at, byte in enumerate(whole):
        for other in {byte ^ 1, byte ^ 0x20, 0x0A} - {byte}:
            with pytest.raises(FileUnusable) as caught:
                read(path, whole[:at] + bytes((other,)) + whole[at + 1 :])
            assert caught.value.line in (line + 1, line + 2), f"byte {at}"
            assert (caught.value.log, caught.value.offset) == places[line], f"byte {at} became {other}"
        line += byte == 0x0A
    assert line == len(places)


def test_every_missing_or_added_byte_is_noticed(path: Path) -> None:
    whole = written()
    for at in range(len(whole)):
        with pytest.raises(FileUnusable):
            read(path, whole[:at])
    for at in range(0, len(whole) + 1, 7):
        with pytest.raises(FileUnusable):
            read(path, whole[:at] + b" " + whole[at:])
    lines = whole.splitlines(keepends=True)
    for at in range(len(lines)):
        with pytest.raises(FileUnusable):
            read(path, b"".join(lines[:at] + lines[at + 1 :]))
        if at + 1 < len(lines):
            with pytest.raises(FileUnusable):
                read(path, b"".join([*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b'{"log":1}\n', "line 1 is no header"),
        (b"\xff" * 500, "line 1 is no header"),
        (written(version=2), "version 2, this library reads 1"),
        (written([LogRecord(5, 0, b"", 0)]), "the header knows no record 5:0"),
        (written([LogRecord(2, 10, b"", 0)]), "the header knows no record 2:10"),
        (written([RECORDS[2], RECORDS[2]]), "record 2:7 comes after a later one"),
        (written([RECORDS[2], RECORDS[0]]), "record 0:0 comes after a later one"),
    ],
)
def test_what_is_no_dump_says_so(path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(FileUnusable, match=re.escape(reason)):
        read(path, content)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileUnusable, match="it cannot be read: No such file"):
        Reader(tmp_path / "missing")


def test_a_dump_as_a_cluster(path: Path) -> None:
    """Offsets, times and keys are those of the dump; a truncated log raises the same error as on a cluster."""
    path.write_bytes(written())
    found, transport = memory_transport(path)
    assert found == header()
    admin, log = transport.admin(), transport.log("__marshal", "me")
    assert admin.partition_count("__marshal") == 3
    tps = [TopicPartition("__marshal", number) for number in range(3)]
    assert list(admin.bounds(tps).values()) == [Bounds(0, 2), Bounds(0, 0), Bounds(7, 10)]
    log.follow(0, 0)
    assert log.poll(0.0) == RECORDS[:2]
    log.follow(2, 7)
    assert log.poll(0.0) == RECORDS[2:]
    log.follow(2, 6)
    with pytest.raises(HistoryTruncated):
        log.poll(0.0)


def test_a_hole_in_a_log_stays_where_it_is(path: Path) -> None:
    """L8: the end of somebody's transaction has an offset and no record. Whoever folds the dump meets the same hole."""
    records = [RECORDS[0], RECORDS[2], RECORDS[4]]
    path.write_bytes(written(records, logs=(Span(0, 0, 1), Span(2, 5, 10))))
    _, transport = memory_transport(path)
    (bounds,) = transport.admin().bounds([TopicPartition("__marshal", 2)]).values()
    assert bounds == Bounds(5, 10)
    log = transport.log("__marshal", "me")
    assert [record for read in log.read(2, 5, 10, 0.0) for record in read] == records[1:]
    assert [record for read in log.read(2, 8, 10, 0.0) for record in read] == records[2:]
    log.follow(2, 8)
    assert log.poll(0.0) == records[2:]
