"""Converts progress above a partition's position to the bytes in the log and back (PROTOCOL.md 4.2, E10, D1, D11).

Progress is which messages above the position are finished, and how often earlier owners delivered the others. Its bytes
are a list of ranges, or a bitmap of what is finished and a list of the rest. This file also computes what a new owner
concludes from it. The fold keeps the bytes and never looks into them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from marshal_py.protocol.wire.records import OFFSET_MAX, PROGRESS_BYTES_MAX

NUMBER_BYTES_MAX = 9  # of a LEB128: 63 bits
SPAN_BYTES_MIN = 3  # of a range: its distance, its length, its deliveries
BITMAP: Final = b"\0\0"  # how a bitmap begins: as a list with a range without offsets, which is no list (E10)
BITMAP_OFFSETS_MAX: Final = 4_000  # their 500 bytes, and what stands before them, fit into PROGRESS_BYTES_MAX


class Range(NamedTuple):
    """The offsets [start, to). `times`: how often each of them was delivered; 0 if they are finished."""

    start: int
    to: int
    times: int


def encode(position: int, ranges: Iterable[Range]) -> bytes:
    """Returns `ranges` as bytes: as a list, or with a bitmap of the finished ones if that is shorter (E10).

    If not all fit into PROGRESS_BYTES_MAX, unfinished ones give way, because only a finished range that is missing
    makes a message be delivered twice; then the highest finished ones. `ranges` must be ascending and disjoint, and
    none may begin below `position`.
    """
    ranges = list(ranges)
    finished = [one for one in ranges if not one.times]
    listed, whole = _list(position, ranges, PROGRESS_BYTES_MAX)
    if mappable(finished) and len(mapped := _bitmap(position, finished)) <= PROGRESS_BYTES_MAX:
        others, fits = _list(position, [one for one in ranges if one.times], PROGRESS_BYTES_MAX - len(mapped))
        if not whole or (fits and len(mapped + others) < len(listed)):
            return mapped + others
    return listed if whole else _list(position, finished, PROGRESS_BYTES_MAX)[0]


def mappable(spans: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether one bitmap holds all of these spans, which are ascending."""
    return bool(spans) and spans[-1][1] - spans[0][0] <= BITMAP_OFFSETS_MAX


def _bitmap(position: int, finished: Sequence[Range]) -> bytes:
    first, bits = finished[0].start, 0
    for start, to, _ in finished:
        bits |= (1 << to - first) - (1 << start - first)
    data = bits.to_bytes(-(-bits.bit_length() // 8), "little")
    return BITMAP + _number(first - position) + _number(len(data)) + data


def _list(position: int, ranges: Iterable[Range], room: int) -> tuple[bytes, bool]:
    """Returns the lowest ranges as a list of at most `room` bytes, and whether these are all."""
    data = bytearray()
    for start, to, times in ranges:
        piece = _number(start - position) + _number(to - start) + _number(times)
        if len(data) + len(piece) > room:
            return bytes(data), False
        data += piece
        position = to
    return bytes(data), True


def fitting(
    position: int, spans: Sequence[tuple[int, int]], reported: Sequence[tuple[int, int]]
) -> Sequence[tuple[int, int]]:
    """Returns which of the finished `spans` above `position` go into the log, ascending (D1).

    They are those that were `reported` before, and of the others the lowest, as many as fit into PROGRESS_BYTES_MAX. So
    a later ack of a lower message does not make the log forget what it has accepted as finished. A bitmap holds all
    that lie within BITMAP_OFFSETS_MAX offsets; of others it may hold more than a list. `spans` and `reported` are
    ascending and disjoint; every reported span that ends above the position lies in one of `spans`.
    """
    if mappable(spans) or _bytes(position, spans) <= PROGRESS_BYTES_MAX:
        return spans
    kept = [(max(start, position), to) for start, to in reported if to > position]
    listed, end = _listed(position, spans, kept), spans[0][0] + BITMAP_OFFSETS_MAX
    mapped = [(start, min(to, end)) for start, to in spans if start < end]
    keeps_all = not kept or kept[-1][1] <= end
    return mapped if keeps_all and _offsets(mapped) > _offsets(listed) else listed


def _offsets(spans: Iterable[tuple[int, int]]) -> int:
    return sum(to - start for start, to in spans)


def _listed(
    position: int, spans: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]]
) -> Sequence[tuple[int, int]]:
    """Returns what of `spans` a list holds, as `fitting` chooses it: what is `kept` first, then the lowest."""
    grown = sorted({spans[bisect_right(spans, (start, OFFSET_MAX)) - 1] for start, _ in kept})
    room = PROGRESS_BYTES_MAX - _bytes(position, grown)
    if room < 0:
        return kept
    others = sorted({*spans} - {*grown}) if room >= SPAN_BYTES_MIN else []
    low, high = 0, len(others)
    while low < high:
        count = (low + high + 1) // 2
        if _bytes(position, sorted([*grown, *others[:count]])) <= PROGRESS_BYTES_MAX:
            low = count
        else:
            high = count - 1
    return sorted([*grown, *others[:low]])


def _bytes(position: int, spans: Iterable[tuple[int, int]]) -> int:
    """Returns how many bytes a list of all of these finished spans would need."""
    size = 0
    for start, to in spans:
        size += len(_number(start - position)) + len(_number(to - start)) + 1
        position = to
    return size


def decode(position: int, data: bytes) -> list[Range]:
    """Returns the ranges above `position` that `encode` turned into `data`; [] if the bytes are malformed."""
    try:
        return _decode(position, data)
    except ValueError:
        return []


def _decode(position: int, data: bytes) -> list[Range]:
    ranges: list[Range] = []
    at = 0
    if data.startswith(BITMAP):
        gap, at = _read(data, len(BITMAP))
        length, at = _read(data, at)
        if length > len(data) - at:
            raise ValueError("a bitmap that does not end")
        ranges = _runs(position + gap, int.from_bytes(data[at : at + length], "little"))
        at += length
    while at < len(data):
        gap, at = _read(data, at)
        length, at = _read(data, at)
        times, at = _read(data, at)
        if not length:
            raise ValueError("a range without offsets")
        ranges.append(Range(position + gap, position + gap + length, times))
        position += gap + length
    ranges.sort()
    if any(before.to > after.start for before, after in pairwise(ranges)) or (ranges and ranges[-1].to > OFFSET_MAX):
        raise ValueError("an offset twice, or one that no log has")
    return ranges


def _runs(first: int, bits: int) -> list[Range]:
    """Returns the set bits as finished ranges. Bit 0 stands for the offset `first`."""
    lowest_first = f"{bits:b}"[::-1]
    return [Range(first + run.start(), first + run.end(), 0) for run in re.finditer("1+", lowest_first)]


def _read(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at `data[at]`, and where it ends. Raises ValueError if it does not."""
    value = 0
    for width, byte in enumerate(data[at : at + NUMBER_BYTES_MAX]):
        value |= (byte & 127) << 7 * width
        if byte < 128:
            return value, at + width + 1
    raise ValueError("a number that does not end")


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def deliveries(position: int, attempts: int, in_flight: int, ranges: Sequence[Range]) -> list[Range]:
    """Returns how often earlier owners delivered unfinished messages, as disjoint ranges. The lowest that `ranges` does
    not name count once, as many as were in flight without those that it names; `attempts` is for the message at
    `position`."""
    found = [Range(position, position + 1, attempts)] if attempts else []
    at = position
    in_flight -= sum(to - start for start, to, times in ranges if times)
    for start, to, times in [*ranges, Range(OFFSET_MAX, OFFSET_MAX, 0)]:
        once = min(start - at, in_flight)
        if once > 0:
            found += _above(position, Range(at, at + once, 1))
            in_flight -= once
        if times:
            found += _above(position, Range(start, to, times))
        at = to
    return found


def _above(position: int, found: Range) -> list[Range]:
    """Returns the part of a range above the position, which is counted separately, as a list of one or none."""
    start = max(found.start, position + 1)
    return [found._replace(start=start)] if start < found.to else []


def union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the spans [start, to) in ascending order; spans that touch or overlap are merged."""
    merged: list[tuple[int, int]] = []
    for start, to in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(to, merged[-1][1]))
        else:
            merged.append((start, to))
    return merged


def without(ranges: Iterable[Range], spans: Sequence[tuple[int, int]]) -> list[Range]:
    """Returns the parts of `ranges` that lie in none of `spans`. Both must be ascending and disjoint."""
    left: list[Range] = []
    first = 0  # of the spans that end above the range
    for start, to, times in ranges:
        while first < len(spans) and spans[first][1] <= start:
            first += 1
        at = first
        while at < len(spans) and spans[at][0] < to:
            if spans[at][0] > start:
                left.append(Range(start, spans[at][0], times))
            start = spans[at][1]
            at += 1
        if start < to:
            left.append(Range(start, to, times))
    return left
