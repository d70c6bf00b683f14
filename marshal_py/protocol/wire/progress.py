"""Converts progress above a partition's position to the bytes in the log and back (PROTOCOL.md 4.2, D1, D11).

Progress is which messages above the position are finished, and how often earlier owners delivered the others. This file
also computes what a new owner concludes from it. The fold keeps the bytes and never looks into them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from marshal_py.protocol.wire.records import OFFSET_MAX, PROGRESS_BYTES_MAX

NUMBER_BYTES_MAX = 9  # of a LEB128: 63 bits
SPAN_BYTES_MIN = 3  # of a range: its distance, its length, its deliveries


class Range(NamedTuple):
    """The offsets [start, to). `times`: how often each of them was delivered; 0 if they are finished."""

    start: int
    to: int
    times: int


def encode(position: int, ranges: Iterable[Range]) -> bytes:
    """Returns ascending, disjoint `ranges`, none below `position`, as bytes; without the highest beyond
    PROGRESS_BYTES_MAX."""
    data = bytearray()
    for start, to, times in ranges:
        piece = _number(start - position) + _number(to - start) + _number(times)
        if len(data) + len(piece) > PROGRESS_BYTES_MAX:
            break
        data += piece
        position = to
    return bytes(data)


def fitting(
    position: int, spans: Sequence[tuple[int, int]], reported: Sequence[tuple[int, int]]
) -> Sequence[tuple[int, int]]:
    """Returns which finished `spans` above `position` go into the log (D1): those `reported` before, then the lowest
    that fit PROGRESS_BYTES_MAX. So a later ack below does not make the log forget. All are ascending and disjoint."""
    if _bytes(position, spans) <= PROGRESS_BYTES_MAX:
        return spans
    kept = [(max(start, position), to) for start, to in reported if to > position]
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
    """Returns how many bytes `encode` would need for all of these finished spans."""
    size = 0
    for start, to in spans:
        size += len(_number(start - position)) + len(_number(to - start)) + 1
        position = to
    return size


def decode(position: int, data: bytes) -> list[Range]:
    """Returns the ranges above `position` that `encode` turned into `data`; [] if the bytes are malformed."""
    numbers: list[int] = []
    value = width = 0
    for byte in data:
        value |= (byte & 127) << 7 * width
        width += 1
        if byte < 128:
            numbers.append(value)
            value = width = 0
        elif width == NUMBER_BYTES_MAX:
            return []
    if width or len(numbers) % 3:
        return []
    ranges = []
    for at in range(0, len(numbers), 3):
        start = position + numbers[at]
        position = start + numbers[at + 1]
        if start == position or position > OFFSET_MAX:
            return []
        ranges.append(Range(start, position, numbers[at + 2]))
    return ranges


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def deliveries(position: int, attempts: int, in_flight: int, ranges: Sequence[Range]) -> list[Range]:
    """Returns how often earlier owners delivered unfinished messages, as disjoint ranges. The lowest `in_flight` of the
    last owner that `ranges` does not name count once; `attempts` is for the message at `position`."""
    found = [Range(position, position + 1, attempts)] if attempts else []
    at = position
    for start, to, times in [*ranges, Range(OFFSET_MAX, OFFSET_MAX, 0)]:
        once = min(start - at, in_flight)
        if once > 0:
            found += _above(position, Range(at, at + once, 1))
            in_flight -= once
        if times:
            found += _above(position, Range(start, to, times))
            in_flight -= min(in_flight, to - start)
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
    for start, to, times in ranges:
        for low, high in spans:
            if high <= start:
                continue
            if low >= to:
                break
            if low > start:
                left.append(Range(start, low, times))
            start = high
        if start < to:
            left.append(Range(start, to, times))
    return left
