"""What a table has of a partition, against a plain set of offsets: nothing is passed over, nothing is written twice."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.client.values import finished
from marshal_py.client.values.finished import Finished, Kept, Source, Span, common, holds, source_of, union, without
from marshal_py.errors import InvalidOption, OffsetsUnclear
from marshal_py.protocol.wire.identity import Token

ORDERS = Source("orders", 0, "idOfATopic")
RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda one: (one[0], one[0] + one[1])))


def offsets(ranges: finished.Ranges) -> set[int]:
    return {offset for start, to in ranges for offset in range(start, to)}


@given(RANGES, RANGES)
def test_ranges_are_sets_of_offsets(some: list[finished.Range], others: list[finished.Range]) -> None:
    one, other = union(some), union(others)
    assert offsets(one) == offsets(tuple(some))
    assert offsets(common(one, other)) == offsets(one) & offsets(other)
    assert offsets(without(one, other)) == offsets(one) - offsets(other)
    assert {offset for offset in range(80) if holds(one, offset)} == offsets(one)
    for found in (one, common(one, other), without(one, other)):
        assert all(a < b for a, b in found)
        assert all(before[1] < after[0] for before, after in pairwise(found)), "none touch"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 60), st.integers(1, 8)),
        st.tuples(st.just("rewind"), st.integers(0, 60), st.just(0)),
    )
)


@given(STEPS, st.integers(2, 5))
def test_a_table_has_what_was_written_or_says_that_it_does_not_know(
    steps: list[tuple[str, int, int]], ranges_max: int
) -> None:
    """The oracle is the set of written offsets. A batch that comes back is written where it is missing. With few ranges
    kept it may be refused; it is never passed over, and never written twice."""
    written: set[int] = set()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(finished, "RANGES_MAX", ranges_max)
        kept = Kept()
        for what, at, count in steps:
            if what == "rewind":
                kept = kept.back_to(at)
                written = {offset for offset in written if offset < at}
                continue
            span = Span(((at, at + count),))
            if kept.finished.unclear_in(span.ranges):
                with pytest.raises(OffsetsUnclear) as refused:
                    kept.missing("t", ORDERS, span.ranges)
                named = set(range(refused.value.start, refused.value.to))
                assert named <= set(range(*kept.finished.unclear)) & set(range(at, at + count))
                continue
            missing = kept.missing("t", ORDERS, span.ranges)
            assert offsets(missing) == set(range(at, at + count)) - written
            written |= set(range(at, at + count))
            kept = kept.after(span)
            assert len(kept.finished.ranges) <= ranges_max
            assert Finished.parse(str(kept.finished)) == kept.finished
        if kept.finished.unclear == (0, 0):
            assert offsets(kept.finished.ranges) == written
        assert written <= offsets(kept.finished.ranges)


def test_a_batch_that_comes_back_after_the_next_one_is_missing() -> None:
    """Finding 20: a highest offset would say that it is there."""
    later = Finished().add(((200, 1000),))
    assert Kept(later).missing("t", ORDERS, ((0, 200),)) == ((0, 200),)
    assert later.add(((0, 200),)) == Finished(((0, 1000),))


def test_holes_that_never_close_are_given_up_and_then_refused() -> None:
    """As markers of transactions make them. What comes again from there is neither passed over nor written."""
    kept = Kept()
    for at in range(0, 4 * finished.RANGES_MAX, 2):
        kept = kept.after(Span(((at, at + 1),)))
    assert len(kept.finished.ranges) == finished.RANGES_MAX
    assert kept.missing("t", ORDERS, ((4 * finished.RANGES_MAX - 50, 4 * finished.RANGES_MAX),)), "the newest are exact"
    with pytest.raises(OffsetsUnclear, match=r"t may or may not have each of the offsets \[1, 10\) of orders:0"):
        kept.missing("t", ORDERS, ((0, 10),))
    again = kept.back_to(0)
    assert again == Kept()
    assert kept.back_to(4).finished.unclear == (1, 4)


def test_the_history_of_a_table_with_many_holes_can_be_written() -> None:
    """The hole below the first message is not given up while it is being filled."""
    kept = Kept()
    for at in range(1000, 1000 + 4 * finished.RANGES_MAX, 2):
        kept = kept.after(Span(((at, at + 1),)))
    for at in range(0, 1000, 100):
        assert kept.missing("t", ORDERS, ((at, at + 100),)) == ((at, at + 100),)
        kept = kept.after(Span(((at, at + 100),)))


def test_tokens_fence_within_a_group() -> None:
    """K1. Tokens of two groups say nothing about each other, and a batch read has none."""
    kept = Kept(token="b", group="shop")
    assert kept.fences(Span((), "a", "shop"))
    assert not kept.fences(Span((), "b", "shop"))
    assert not kept.fences(Span((), "a", "another"))
    assert not kept.fences(Span(()))
    assert kept.after(Span(((0, 1),)))[1:] == ("b", "shop")
    assert kept.after(Span(((0, 1),), "c", "shop"))[1:] == ("c", "shop")


def test_a_topic_without_an_id_is_named_by_its_coordination_topic() -> None:
    token = Token(bytes(range(16)), 7)
    assert source_of("orders", 0, "", str(token)).topic_id == token.incarnation.hex()
    assert source_of("orders", 0, "id", str(token)) == Source("orders", 0, "id") == source_of("orders", 0, "id", "")
    with pytest.raises(InvalidOption, match="a cluster that gives topics ids"):
        source_of("orders", 0, "", "")
