"""What one claim has delivered: PROTOCOL.md D1-D4 on the two trackers, against models too simple to be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.protocol.delivery import MARK_MS, AtLeastOnce, AtMostOnce, Run
from marshal_py.protocol.holdings import Claim, Stage
from marshal_py.protocol.identity import TopicPartition

# --- at least once


def test_the_position_is_the_lowest_unfinished_offset() -> None:
    """D1: acks come in any order, twice, and for single messages or ranges."""
    tracker = AtLeastOnce(100)
    assert (tracker.position(), tracker.in_flight, tracker.tracked) == (100, 0, 0)
    run = tracker.add(range(100, 105))
    assert tracker.position() == 100, "fetched is not finished"
    run.deliver(4, 0)
    assert (tracker.in_flight, tracker.tracked) == (4, 5)
    assert run.finish(2)
    assert not run.finish(2), "an ack may come twice"
    assert tracker.position() == 100
    assert run.finish(0)
    assert not run.finish(0)
    assert tracker.position() == 101
    assert run.finish(1)
    assert tracker.position() == 103, "over what was finished before"
    assert run.finish_range(3, 4) == 1
    assert tracker.position() == 104
    assert (tracker.in_flight, tracker.tracked) == (0, 1)
    run.deliver(1, 0)
    assert run.finish_range(0, 5) == 1
    assert (tracker.position(), tracker.tracked) == (105, 0)


def test_offsets_with_gaps_are_passed() -> None:
    """D1: compaction leaves holes; the position never lies above what is unfinished."""
    tracker = AtLeastOnce(10)
    run = tracker.add([12, 20, 21])
    run.deliver(3, 0)
    assert tracker.position() == 10
    run.finish(0)
    assert 13 <= tracker.position() <= 20
    run.finish(2)
    assert 13 <= tracker.position() <= 20
    run.finish(1)
    assert tracker.position() == 22


def test_a_trickle_shares_runs() -> None:
    """D1: messages that come one by one cost no run each, and the position is the same as with one each."""
    tracker = AtLeastOnce(0)
    runs = [tracker.add(range(at, at + 1)) for at in range(2_500)]
    assert len({id(run) for run in runs}) == 3, "a thousand each"
    for run in runs:
        run.deliver(1, 0)
    assert (tracker.in_flight, tracker.tracked) == (2_500, 2_500)
    runs[0].finish(0)
    runs[0].finish(2)
    assert tracker.position() == 1
    runs[0].finish(1)
    assert tracker.position() == 3
    assert tracker.add([2_505, 2_507]) is not runs[-1], "behind a gap begins another"


def test_attempts_are_of_the_message_at_the_position() -> None:
    """D1: an heir counts on from what the log says, for that one message; the next begins anew."""
    tracker = AtLeastOnce(7, 2)
    assert tracker.attempts() == 2
    run = tracker.add([7, 8])
    assert tracker.attempts() == 2
    assert (tracker.delivery_count(7), tracker.delivery_count(8)) == (3, 1)
    run.deliver(2, 0)
    assert tracker.attempts() == 3
    run.finish(0)
    assert tracker.attempts() == 1
    run.finish(1)
    assert tracker.attempts() == 0


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 6), st.integers(1, 3)),
        st.tuples(st.just("deliver"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("finish"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("range"), st.integers(0, 40), st.integers(0, 6)),
    ),
    max_size=60,
)


@given(OPS)
def test_the_watermark_against_a_naive_model(ops: list[tuple[str, int, int]]) -> None:
    """D1: any order of acks: no offset below the position is unfinished, and nothing that is finished holds it back."""
    tracker = AtLeastOnce(0)
    fetched: list[tuple[int, Run, int]] = []  # (offset, run, index), oldest first
    handed: list[int] = []
    done: set[int] = set()
    next_offset = 0
    for what, a, b in ops:
        if what == "add":
            offsets = range(next_offset, next_offset + a) if b == 1 else [next_offset + step * b for step in range(a)]
            run = tracker.add(offsets)
            fetched += [(offset, run, index) for index, offset in enumerate(offsets, len(run.offsets) - a)]
            next_offset = offsets[-1] + 1
        elif what == "deliver":
            for offset, run, _ in fetched[len(handed) : len(handed) + a]:
                run.deliver(1, 0)
                handed.append(offset)
        elif what == "finish" and handed:
            offset, run, index = fetched[a % len(handed)]
            assert run.finish(index) == (offset not in done)
            done.add(offset)
        elif what == "range" and handed:
            offset, run, index = fetched[a % len(handed)]
            mine = [one for one in fetched[: len(handed)] if one[1] is run and index <= one[2] < index + b]
            assert run.finish_range(index, index + len(mine)) == len({one[0] for one in mine} - done)
            done |= {one[0] for one in mine}
        unfinished = [offset for offset, _, _ in fetched if offset not in done]
        position = tracker.position()
        assert all(offset >= position for offset in unfinished), "it skipped something"
        below = [offset for offset, _, _ in fetched if offset < (unfinished[0] if unfinished else 10**9)]
        assert position == (below[-1] + 1 if below else 0), "it stays behind what is finished"
        assert tracker.in_flight == len(set(handed) - done)
        first = unfinished[0] if unfinished else next_offset
        assert tracker.tracked == len([one for one in fetched if one[0] >= first])


@given(st.lists(st.integers(0, 3_000), min_size=1, max_size=30), st.sets(st.integers(0, 29)))
def test_a_handler_is_never_blamed_early(pauses: list[int], finished: set[int]) -> None:
    """D4: the time of the oldest message in a handler is never too early, and late by at most a mark's grain."""
    tracker, now = AtLeastOnce(0), 0
    run = tracker.add(range(len(pauses)))
    times = []
    for pause in pauses:
        now += pause
        run.deliver(1, now)
        times.append(now)
    for index in finished:
        if index < len(times):
            run.finish(index)
    left = [index for index in range(len(times)) if index not in finished]
    oldest = tracker.oldest_ms()
    if not left:
        assert oldest is None
        return
    assert oldest is not None
    assert times[left[0]] <= oldest <= times[left[0]] + MARK_MS
    tracker.touch(now + 5_000)
    assert tracker.oldest_ms() == now + 5_000, "a handler that says it is at work begins anew"


# --- at most once


def test_only_what_is_granted_is_handed_over() -> None:
    """D2: not before the grant was read, nothing outside of it, nothing twice."""
    tracker = AtMostOnce(5)
    assert not tracker.holds(5)
    tracker.asked = (5, 5, 8)
    assert not tracker.holds(5), "asked for is not granted"
    tracker.granted(5, 8)
    assert tracker.asked is None
    assert not tracker.holds(4)
    assert tracker.granted_to() == 8
    for offset in (5, 6, 7):
        assert tracker.holds(offset)
        tracker.deliver(offset, 0)
        assert not tracker.holds(offset)
    assert not tracker.holds(8)


def test_grants_are_used_up_in_order() -> None:
    """D2: the next range may be granted while the current is handled; a grant's end that does not exist is passed."""
    tracker = AtMostOnce(0)
    tracker.granted(0, 10)
    tracker.granted(10, 20)
    assert tracker.granted_to() == 20
    assert tracker.holds(0)
    tracker.deliver(0, 0)
    assert tracker.holds(12), "1 to 11 do not exist: the next message there is lies in the second grant"
    tracker.deliver(12, 0)
    assert not tracker.holds(5), "and what was passed is never handed over"
    assert not tracker.holds(20)


def test_a_dropped_grant_is_counted_and_gone() -> None:
    """D3: the undelivered rest, once; nothing of it is handed over afterwards, even if it were granted again."""
    tracker = AtMostOnce(0)
    tracker.granted(0, 10)
    tracker.granted(10, 15)
    tracker.deliver(0, 0)
    tracker.deliver(1, 0)
    assert tracker.drop() == 13
    assert tracker.drop() == 0
    assert tracker.dropped == 13
    assert not any(tracker.holds(offset) for offset in range(20))
    tracker.granted(5, 17)
    assert not tracker.holds(14)
    assert tracker.holds(15)


MOST_OPS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(0, 30), st.integers(1, 10)),
        st.tuples(st.just("take"), st.integers(0, 60), st.just(0)),
        st.tuples(st.just("next"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(MOST_OPS)
def test_no_offset_twice_whatever_is_granted(ops: list[tuple[str, int, int]]) -> None:
    """D2: also when grants overlap, repeat or go backwards, which the fold never does."""
    tracker, handed, granted = AtMostOnce(0), [], set()
    for what, a, b in ops:
        if what == "grant":
            tracker.granted(a, a + b)
            granted |= set(range(a, a + b))
        elif what == "drop":
            assert tracker.drop() >= 0
            assert not tracker.grants
        else:
            offset = a if what == "take" else tracker.delivered_to
            if tracker.holds(offset):
                tracker.deliver(offset, 0)
                handed.append(offset)
    assert handed == sorted(set(handed))
    assert set(handed) <= granted


# --- the stages of a claim


@pytest.mark.parametrize("mode", [AtLeastOnce, AtMostOnce])
def test_a_claim_drains_until_its_handlers_are_done_or_its_time_is_over(mode: type[AtLeastOnce | AtMostOnce]) -> None:
    """T12, T16: an earlier deadline replaces a later one, a later one changes nothing; once released it stays so."""
    tracker = mode(0)
    claim = Claim(TopicPartition("t", 0), 5, 0, tracker)
    claim.stop("hand-over", None, 9)
    assert claim.stage is Stage.DRAINING
    assert claim.drained(0)
    if isinstance(tracker, AtLeastOnce):
        run = tracker.add([0])
        run.deliver(1, 10)
        assert claim.position() == 0
    else:
        tracker.granted(0, 1)
        tracker.deliver(0, 10)
        assert claim.position() == -1, "at most once the log alone knows the position"
    assert claim.handler_since_ms() == 10
    assert not claim.drained(10**9)
    claim.stop("paused", 500)
    assert (claim.reason, claim.successor) == ("paused", -1)
    claim.stop("stopped", 900, 3)
    assert (claim.reason, claim.drain_until_ms) == ("paused", 500)
    assert not claim.drained(499)
    assert claim.drained(500)
    if isinstance(tracker, AtLeastOnce):
        run.finish(0)
    else:
        tracker.returned()
    assert claim.drained(499)
    claim.reopen()
    assert claim.stage is Stage.OPEN
    claim.stage = Stage.RELEASING
    claim.reopen()
    claim.stop("paused", 1)
    assert claim.stage is Stage.RELEASING
