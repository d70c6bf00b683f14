"""Progress above a position: the bytes of PROTOCOL.md 4.2, and what a new owner concludes from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import OFFSET_MAX, PROGRESS_BYTES_MAX


def leb128(value: int) -> bytes:
    """As the text says it, and not as the library does: seven bits each, the lowest first."""
    groups = [value >> 7 * at & 127 for at in range(max(1, -(-value.bit_length() // 7)))]
    return bytes([group | 128 for group in groups[:-1]] + groups[-1:])


RANGES = st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 2**20), st.integers(0, 300)), max_size=40)


@given(st.integers(0, 2**40), RANGES)
def test_ranges_come_back(position: int, triples: list[tuple[int, int, int]]) -> None:
    """D1: triples (gap, length, n) in LEB128, the first gap counted from the position, the others from the last end."""
    ranges, at = [], position
    for gap, length, times in triples:
        ranges.append(Range(at + gap, at + gap + length, times))
        at += gap + length
    data = progress.encode(position, ranges)
    assert data == b"".join(leb128(number) for triple in triples for number in triple)[: len(data)]
    assert progress.decode(position, data) == ranges[: len(progress.decode(position, data))]
    if len(data) < PROGRESS_BYTES_MAX - 20:
        assert progress.decode(position, data) == ranges


def test_the_bytes_by_hand() -> None:
    """D1: 300 is AC 02; a list without ranges is empty."""
    assert progress.encode(10, []) == b""
    assert progress.encode(1_000, [Range(1_002, 1_005, 0), Range(1_305, 1_306, 2)]) == b"\x02\x03\x00\xac\x02\x01\x02"
    assert progress.decode(1_000, b"\x02\x03\x00\xac\x02\x01\x02") == [(1_002, 1_005, 0), (1_305, 1_306, 2)]
    # A LEB128 that is longer than it need be is one all the same, as long as it has at most 9 bytes.
    assert progress.decode(5, b"\x82\x00\x03\x00") == [(7, 10, 0)]
    assert progress.decode(5, b"\x82" + b"\x80" * 7 + b"\x00\x03\x00") == [(7, 10, 0)]


MALFORMED = {
    "a number that does not end": b"\x02\x03\x80",
    "two numbers": b"\x02\x03",
    "four numbers": b"\x02\x03\x00\x01",
    "a number of ten bytes": b"\x80" * 9 + b"\x00\x03\x00",
    "a range without offsets": b"\x02\x00\x00",
    "a range without offsets after a good one": b"\x02\x03\x00\x01\x00\x00",
    "an offset that no log has": leb128(OFFSET_MAX) + b"\x01\x00",
    "an end that no log has": b"\x00" + leb128(OFFSET_MAX) + b"\x00",
    "text": b"no list of ranges",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_bytes_that_are_no_list(what: str) -> None:
    """D1: a reader takes them for an empty list, whatever comes before the fault."""
    assert progress.decode(5, MALFORMED[what]) == []


@given(st.binary(max_size=40), st.integers(0, OFFSET_MAX))
def test_any_bytes_are_read(data: bytes, position: int) -> None:
    """D1: never an error; ascending, disjoint ranges at or above the position that have an offset each."""
    at = position
    for start, to, times in progress.decode(position, data):
        assert at <= start < to <= OFFSET_MAX
        assert times >= 0
        at = to


def test_what_does_not_fit_is_left_out_whole() -> None:
    """D1: the lowest ranges as far as 512 bytes go; none is merged with another, none is cut."""
    narrow = [Range(number, number + 1, 0) for number in range(1, 1_001, 2)]
    data = progress.encode(0, narrow)
    assert len(data) == 510
    assert progress.decode(0, data) == narrow[:170]
    wide = [Range(number * 2**40, number * 2**40 + 1, 0) for number in range(1, 100)]
    data = progress.encode(0, wide)
    assert PROGRESS_BYTES_MAX - 8 < len(data) <= PROGRESS_BYTES_MAX
    assert progress.decode(0, data) == wide[: len(data) // 8]
    # A short one that would fit after a long one that does not is left out too: the list is a prefix.
    full = [*narrow[:170], Range(2_000, 2**50, 0), Range(2**50 + 1, 2**50 + 2, 0)]
    assert progress.decode(0, progress.encode(0, full)) == narrow[:170]


def test_at_least_eighty_ranges_fit() -> None:
    """D1: holes below 128 offsets, spans and counts below 16,384."""
    ranges, at = [], 0
    for number in range(85):
        ranges.append(Range(at + 100, at + 10_100, number % 3 and 200))
        at += 10_100
    assert len(progress.decode(0, progress.encode(0, ranges))) >= 85


# --- how often others delivered what is unfinished


def delivered(position: int, attempts: int, in_flight: int, *ranges: Range) -> list[Range]:
    return progress.deliveries(position, attempts, in_flight, ranges)


def test_deliveries_of_the_message_at_the_position() -> None:
    """D11: they are `attempts`, with any ranges; 0 for a partition that was never owned."""
    assert delivered(100, 0, 0) == []
    assert delivered(100, 3, 0) == [(100, 101, 3)]
    assert delivered(100, 3, 1) == [(100, 101, 3)]
    assert delivered(100, 3, 1, Range(100, 102, 7)) == [(100, 101, 3), (101, 102, 7)]


def test_deliveries_of_what_was_in_flight() -> None:
    """D11: the last owner's messages in flight are its lowest unfinished ones; those that no range names came once."""
    assert delivered(100, 1, 4) == [(100, 101, 1), (101, 104, 1)]
    finished = Range(101, 103, 0)
    assert delivered(100, 1, 3, finished) == [(100, 101, 1), (103, 105, 1)]
    again = Range(104, 106, 4)
    assert delivered(100, 2, 4, finished, again) == [(100, 101, 2), (103, 104, 1), (104, 106, 4)]
    assert delivered(100, 2, 5, finished, again) == [(100, 101, 2), (103, 104, 1), (104, 106, 4), (106, 107, 1)]
    # Fewer in flight than a range has: the rest of it was delivered by earlier owners.
    assert delivered(100, 2, 1, Range(103, 110, 4)) == [(100, 101, 2), (103, 110, 4)]


@given(
    st.integers(0, 3),
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 4)), max_size=10),
)
def test_deliveries_are_ascending_and_disjoint(
    attempts: int, in_flight: int, triples: list[tuple[int, int, int]]
) -> None:
    """D11: so that a look-up finds one count per offset; nothing that is finished is counted."""
    ranges, at = [], 100
    for gap, length, times in triples:
        ranges.append(Range(at + gap, at + gap + length, times))
        at += gap + length
    found = delivered(100, attempts, in_flight, *ranges)
    at = 100
    for start, to, times in found:
        assert at <= start < to
        assert times > 0
        at = to
    counted = {offset for start, to, _ in found for offset in range(start, min(to, 1_000))}
    finished = {offset for start, to, times in ranges if not times for offset in range(start, to)}
    assert counted & finished <= {100}


# --- spans


def test_spans_that_touch_are_one() -> None:
    """D1: a range that touches another, or lies in it, is absorbed."""
    assert progress.union([(5, 7), (1, 3), (3, 4), (6, 6), (9, 12), (10, 11)]) == [(1, 4), (5, 7), (9, 12)]
    assert progress.union([]) == []


def test_ranges_without_what_is_finished() -> None:
    """D1: cut on either side, in the middle, or gone."""
    ranges = [Range(0, 10, 1), Range(20, 30, 2), Range(40, 50, 3)]
    spans = [(0, 2), (4, 6), (9, 22), (35, 60)]
    assert progress.without(ranges, spans) == [(2, 4, 1), (6, 9, 1), (22, 30, 2)]
    assert progress.without(ranges, []) == ranges
