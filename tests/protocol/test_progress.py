"""Progress above a position: the bytes of PROTOCOL.md 4.2, and what a new owner concludes from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import OFFSET_MAX, PROGRESS_BYTES_MAX
from marshal_sim.judge.facts import finished_spans as judges_spans


def leb128(value: int) -> bytes:
    """As the text says it, and not as the library does: seven bits each, the lowest first."""
    groups = [value >> 7 * at & 127 for at in range(max(1, -(-value.bit_length() // 7)))]
    return bytes([group | 128 for group in groups[:-1]] + groups[-1:])


def joined(ranges: list[Range]) -> list[Range]:
    """Finished ranges that touch are one in a bitmap."""
    found: list[Range] = []
    for one in ranges:
        if found and found[-1].to == one.start and not found[-1].times and not one.times:
            found[-1] = Range(found[-1].start, one.to, 0)
        else:
            found.append(one)
    return found


RANGES = st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 2**20), st.integers(0, 300)), max_size=40)


@given(st.integers(0, 2**40), RANGES)
def test_ranges_come_back(position: int, triples: list[tuple[int, int, int]]) -> None:
    """D1: triples (gap, length, n) in LEB128, the first gap counted from the position, the others from the last end.

    Or a bitmap, if that is shorter.
    """
    ranges, at = [], position
    for gap, length, times in triples:
        ranges.append(Range(at + gap, at + gap + length, times))
        at += gap + length
    data = progress.encode(position, ranges)
    listed = b"".join(leb128(number) for triple in triples for number in triple)
    assert len(data) <= min(len(listed), PROGRESS_BYTES_MAX)
    if data == listed or data.startswith(b"\0\0"):
        assert joined(progress.decode(position, data)) == joined(ranges)
    else:
        assert progress.decode(position, data) == [one for one in ranges if not one.times][: len(data) // 3]


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
    "a bitmap without a gap": b"\0\0",
    "a bitmap without a size": b"\0\0\x01",
    "a bitmap that does not end": b"\0\0\x01\x02\xff",
    "a bitmap, then a number that does not end": b"\0\0\x01\x01\xff\x80",
    "a bitmap, then a range without offsets": b"\0\0\x01\x01\xff\x09\x00\x01",
    "a bitmap and a range that overlap": b"\0\0\x01\x01\x05\x03\x02\x01",
    "a bitmap of offsets that no log has": b"\0\0" + leb128(OFFSET_MAX) + b"\x01\x01",
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
    narrow = [Range(number, number + 1, 0) for number in range(1, 5_001, 10)]
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


# --- as a bitmap


def test_a_bitmap_by_hand() -> None:
    """E10: gap, size, bits with the lowest first, and a list of the rest whose first gap begins at the position."""
    finished = [Range(1_003, 1_004, 0), Range(1_005, 1_007, 0), Range(1_012, 1_013, 0)]
    data = progress.encode(1_000, finished)
    assert data == b"\0\0" + b"\x03\x02" + bytes([0b0000_1101, 0b0000_0010])
    assert progress.decode(1_000, data) == finished
    others = [Range(1_001, 1_003, 2), Range(1_008, 1_010, 4)]
    data = progress.encode(1_000, sorted([*finished, *others]))
    assert data == b"\0\0" + b"\x03\x02" + bytes([0b0000_1101, 0b0000_0010]) + b"\x01\x02\x02" + b"\x05\x02\x04"
    assert progress.decode(1_000, data) == sorted([*finished, *others])
    assert progress.decode(7, b"\0\0\x00\x03\x00\x00\x00") == [], "nothing is set"
    assert progress.decode(7, b"\0\0\x00\x02\x80\x00\x01\x01\x03") == [(8, 9, 3), (14, 15, 0)]


def test_the_shorter_one_is_written() -> None:
    """E10: one range is a list of three bytes; two that lie together are a bitmap of five."""
    assert progress.encode(0, [Range(5, 9, 0)]) == b"\x05\x04\x00"
    assert progress.encode(0, [Range(5, 6, 0), Range(7, 8, 0)]) == b"\0\0\x05\x01\x05"
    apart = [Range(5, 6, 0), Range(120, 121, 0)]
    assert progress.encode(0, apart) == b"\x05\x01\x00\x72\x01\x00"


@pytest.mark.parametrize("gap", [1, 300, 2**40])
def test_what_lies_within_4000_offsets_fits(gap: int) -> None:
    """E10: every second one of them, and those at both ends; of the counts the lowest that fit."""
    finished = [Range(offset, offset + 1, 0) for offset in range(gap, gap + 4_000, 2)]
    finished[-1] = Range(gap + 3_999, gap + 4_000, 0)
    data = progress.encode(0, finished)
    assert len(data) <= PROGRESS_BYTES_MAX
    assert progress.decode(0, data) == finished
    counts = [Range(offset, offset + 1, 3) for offset in range(gap + 1, gap + 3_000, 2)]
    found = progress.decode(0, progress.encode(0, sorted([*finished, *counts])))
    assert [one for one in found if not one.times] == finished
    kept = [one for one in found if one.times]
    assert kept == counts[: len(kept)]
    spans = [(one.start, one.to) for one in finished]
    assert progress.fitting(0, spans, spans[:7]) == spans


def test_beyond_a_bitmap() -> None:
    """D1: what was reported stays; of the rest, whichever form holds more."""
    spans = [(offset, offset + 1) for offset in range(10, 8_000, 2)]
    assert progress.fitting(0, spans, []) == [span for span in spans if span[0] < 4_010]
    assert progress.fitting(0, spans, [(6_000, 6_001)])[-1] == (6_000, 6_001)
    wide = [(start, start + 900) for start in range(10, 900_000, 1_000)]
    assert len(progress.fitting(0, wide, [])) > 100
    straddling = [*[(offset, offset + 1) for offset in range(10, 3_000, 2)], (3_500, 90_000)]
    assert progress.fitting(0, straddling, [])[-1] == (3_500, 4_010)


@given(st.integers(0, 2**40), st.sets(st.integers(0, 5_000)), st.dictionaries(st.integers(0, 5_000), st.integers(1, 9)))
def test_a_second_reader_reads_the_same(position: int, finished: set[int], counts: dict[int, int]) -> None:
    """E10: the judge's own reader agrees; a reader that knows lists alone finds nothing in a bitmap."""
    spans = progress.union((position + at, position + at + 1) for at in finished)
    others = [Range(position + at, position + at + 1, times) for at, times in counts.items() if at not in finished]
    data = progress.encode(position, sorted([*(Range(start, to, 0) for start, to in spans), *others]))
    mine = [(one.start, one.to) for one in progress.decode(position, data) if not one.times]
    assert progress.union(judges_spans(position, data)) == mine
    if not data.startswith(b"\0\0"):
        assert [one[:2] for one in list_of_0_1_0(position, data) if not one.times] == mine
    else:
        assert list_of_0_1_0(position, data) == []
        assert mine == spans


def list_of_0_1_0(position: int, data: bytes) -> list[Range]:
    """The reader before there were bitmaps."""
    numbers: list[int] = []
    value = width = 0
    for byte in data:
        value |= (byte & 127) << 7 * width
        width += 1
        if byte < 128:
            numbers.append(value)
            value = width = 0
        elif width == 9:
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
    # All in flight are named: none of those before them was delivered.
    assert delivered(100, 2, 2, Range(104, 105, 1), Range(106, 107, 1)) == [(100, 101, 2), (104, 105, 1), (106, 107, 1)]
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
