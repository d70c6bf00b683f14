"""What one claim has delivered: PROTOCOL.md D1-D4 on the two trackers, against very simple models."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.protocol.claims import MARK_MS, AtLeastOnce, AtMostOnce, Claim, ClaimPhase, OffsetRun
from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import OFFSET_MAX, PROGRESS_BYTES_MAX

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
    assert tracker.add([2_505, 2_507]) is not runs[-1], "after a gap another run begins"


def test_attempts_are_of_the_message_at_the_position() -> None:
    """D11: the owner reports one delivery more than there was, until it releases; the next message begins at one."""
    tracker = AtLeastOnce(7, 2)
    assert (tracker.attempts(), tracker.deliveries()) == (3, 2)
    run = tracker.add([7, 8])
    assert (tracker.attempts(), tracker.deliveries()) == (3, 2)
    assert (tracker.delivery_count(7), tracker.delivery_count(8)) == (3, 1)
    run.deliver(2, 0)
    assert (tracker.attempts(), tracker.deliveries()) == (3, 3)
    run.finish(0)
    assert (tracker.attempts(), tracker.deliveries()) == (1, 1)
    run.finish(1)
    assert (tracker.attempts(), tracker.deliveries()) == (1, 0)


def test_the_message_at_a_position_that_does_not_exist() -> None:
    """D11: the count is of the first message that exists there: a transaction marker may stand at the position."""
    tracker = AtLeastOnce(7, 2, 1)
    assert tracker.attempts() == 3
    run = tracker.add([9, 12])
    assert (tracker.delivery_count(9), tracker.delivery_count(12)) == (3, 1)
    run.deliver(2, 0)
    assert (tracker.position(), tracker.attempts(), tracker.in_flight) == (7, 3, 2)
    # By its number alone the message in flight at 12 could not be found: it is named.
    assert progress.decode(7, tracker.progress()) == [(8, 13, 1)]
    successor = AtLeastOnce(7, 3, 2, tracker.progress())
    successor.add([9, 12])
    assert (successor.delivery_count(9), successor.delivery_count(12)) == (4, 2)


def test_what_earlier_owners_finished_is_skipped_and_reported_again() -> None:
    """D1: it is not handed over, a range that touches the position is absorbed, the rest is reported again."""
    known = progress.encode(10, [Range(12, 14, 0), Range(16, 18, 0), Range(20, 21, 3)])
    tracker = AtLeastOnce(10, 1, 0, known)
    assert tracker.finished_to() == 18
    assert (tracker.position(), tracker.progress()) == (10, known), "before anything is fetched"
    assert [tracker.next_finished(offset) for offset in (10, 13, 14)] == [(12, 14), (12, 14), (16, 18)]
    fresh, run = tracker.admit(range(10, 19))
    assert fresh == [10, 11, 14, 15, 18]
    assert run is not None
    chunk = range(19, 25)
    assert tracker.admit(chunk)[0] is chunk
    run.deliver(5, 0)
    run.finish(0)
    assert tracker.position() == 11
    run.finish(1)
    assert tracker.position() == 14, "over what lies between and is finished"
    run.finish(3)
    assert progress.decode(14, tracker.progress()) == [(15, 18, 0), (18, 19, 1), (20, 21, 3)]
    run.finish(2)
    assert (tracker.position(), progress.decode(18, tracker.progress())) == (18, [(20, 21, 3)])
    assert tracker.next_finished(18) == (OFFSET_MAX, OFFSET_MAX)


def test_a_long_span_stays_finished_though_the_position_passes_it_before_it_is_fetched() -> None:
    """D1: the message before ten thousand finished ones is acked while only the first thousand were fetched."""
    tracker = AtLeastOnce(100, 1, 1, progress.encode(100, [Range(101, 10_101, 0)]))
    fresh, run = tracker.admit(range(100, 1_100))
    assert list(fresh) == [100]
    assert run is not None
    run.deliver(1, 0)
    run.finish(0)
    assert tracker.position() == 10_101
    assert tracker.admit(range(1_100, 2_100)) == ([], None)
    assert tracker.next_finished(1_100) == (1_100, 10_101), "nor is it planned for others"
    fresh, run = tracker.admit(range(10_000, 10_200))
    assert (fresh[0], fresh[-1]) == (10_101, 10_199)
    assert (tracker.position(), tracker.in_flight) == (10_101, 0)


def test_progress_of_a_truncated_partition_is_discarded() -> None:
    """D1: all of it, the counts too: it speaks of messages that are gone."""
    known = progress.encode(10, [Range(12, 14, 0), Range(16, 18, 4)])
    tracker = AtLeastOnce(10, 5, 2, known)
    tracker.discard_inherited()
    assert (tracker.finished_to(), tracker.progress(), tracker.attempts()) == (0, b"", 1)
    assert tracker.admit([10, 12, 13, 16])[0] == [10, 12, 13, 16]
    assert {tracker.delivery_count(offset) for offset in (10, 12, 13, 16)} == {1}


def test_nothing_is_reported_while_nothing_is_finished_above_the_position() -> None:
    """D1: heartbeats cost what they did: a prefix of handlers at work, or what is finished in order, needs no bytes."""
    tracker = AtLeastOnce(0)
    run = tracker.add(range(100))
    run.deliver(50, 0)
    run.finish_range(0, 20)
    assert (tracker.position(), tracker.in_flight, tracker.progress()) == (20, 30, b"")
    other = tracker.add([100, 103])
    assert tracker.progress() == b""
    run.finish(30)
    assert progress.decode(20, tracker.progress()) == [(30, 31, 0)]
    run.finish_range(20, 30)
    assert tracker.progress() == b""
    assert other.delivered == 0


def test_progress_that_does_not_fit() -> None:
    """D1: the lowest ranges are reported; the next owner gets the rest again, and skips nothing."""
    tracker = AtLeastOnce(0)
    run = tracker.add(range(8_000))
    run.deliver(8_000, 0)
    for index in range(1, 8_000, 2):
        run.finish(index)
    reported = tracker.progress()
    assert len(reported) <= PROGRESS_BYTES_MAX
    successor = AtLeastOnce(tracker.position(), 1, tracker.in_flight, reported)
    known = progress.decode(0, reported)
    assert [one for one in progress.decode(0, successor.progress()) if not one.times] == known, "counts give way"
    fresh, again = successor.admit(range(8_000))
    assert fresh == [offset for offset in range(8_000) if offset % 2 == 0 or offset > 4_000]
    assert again is not None
    run = again
    assert successor.position() == 0
    assert [one for one in progress.decode(0, successor.progress()) if not one.times] == known
    assert (successor.delivery_count(0), successor.delivery_count(2), successor.delivery_count(7_999)) == (2, 2, 1)
    run.deliver(200, 0)
    for index in range(1, 200):
        run.finish(index)
    finished = [span for span in progress.decode(0, successor.progress()) if not span.times]
    assert (finished[0], finished[1], finished[-1]) == ((1, 400, 0), (401, 402, 0), (3_999, 4_000, 0))


@pytest.mark.parametrize("order", ["descending", "random", "ascending"])
def test_what_was_reported_as_finished_stays_reported(order: str) -> None:
    """D1: lower messages that are acked later, by this owner or the next, do not push reported ones out."""
    tracker, indexes, seen = AtLeastOnce(0), list(range(1, 1_200, 2)), set[int]()
    if order == "random":
        random.Random(7).shuffle(indexes)
    elif order == "descending":
        indexes.reverse()
    for half in (indexes[:300], indexes[300:]):
        _, run = tracker.admit(range(1_200))
        assert run is not None
        run.deliver(len(run.offsets), 0)
        places = {offset: at for at, offset in enumerate(run.offsets)}
        for count, offset in enumerate(half):
            if offset in places:
                run.finish(places[offset])
            if count % 10 == 0:
                reported = tracker.progress()
                assert len(reported) <= PROGRESS_BYTES_MAX
                finished = {
                    at for start, to, times in progress.decode(0, reported) if not times for at in range(start, to)
                }
                assert finished >= seen
                seen = finished
        assert len(seen) >= (150 if order == "random" else 165)
        tracker = AtLeastOnce(0, 1, tracker.in_flight, reported)


@given(
    st.lists(st.integers(1, 400), unique=True, min_size=1, max_size=400),
    st.lists(st.booleans(), min_size=400, max_size=400),
    st.integers(1, 10**6),
)
def test_reported_is_finished_and_stays_so(order: list[int], reports: list[bool], stride: int) -> None:
    """D1: whatever the order of acks and reports, and however many bytes an offset takes."""
    tracker, seen, acked = AtLeastOnce(0), set[int](), set[int]()
    run = tracker.add([at * stride for at in range(401)])
    run.deliver(401, 0)
    for index, report in zip(order, reports, strict=False):
        run.finish(index)
        acked.add(index)
        if report:
            data = tracker.progress()
            spans = [(start, to) for start, to, times in progress.decode(0, data) if not times]
            finished = {at for at in range(401) if any(start <= at * stride < to for start, to in spans)}
            assert seen <= finished <= acked
            assert len(data) <= PROGRESS_BYTES_MAX
            seen = finished


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
    fetched: list[tuple[int, OffsetRun, int]] = []  # (offset, run, index), oldest first
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
    oldest = tracker.oldest()
    if not left:
        assert oldest is None
        return
    assert oldest is not None
    assert oldest[1] == left[0]
    assert times[left[0]] <= oldest[0] <= times[left[0]] + MARK_MS
    tracker.touch_all(now + 5_000)
    assert tracker.oldest() == (now + 5_000, left[0]), "who works on all of them says that it is at work"


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.lists(st.tuples(st.sampled_from(["touch", "finish"]), st.integers(0, 99), st.integers(1, 5_000)), max_size=40),
)
def test_a_handler_at_work_keeps_no_other_alive(sizes: list[int], steps: list[tuple[str, int, int]]) -> None:
    """D4: each message has its own time; touching others does not change it. Several runs, acks in any order."""
    tracker, now, first = AtLeastOnce(0), 0, 0
    places = []
    since: dict[int, int] = {}
    for size in sizes:
        run = tracker.add(range(first, first + size))
        for index in range(size):
            places.append((run, index))
            since[first + index] = now
        run.deliver(size, now)
        first += 2 * size  # a gap, so that the next ones make a run of their own
        now += 2 * MARK_MS
    for what, number, pause in steps:
        now += pause
        run, index = places[number % len(places)]
        offset = run.offsets[index]
        if what == "finish":
            run.finish(index)
            since.pop(offset, None)
        else:
            tracker.touch(run, index, index + 1, now)
            if offset in since:
                since[offset] = now
        oldest = tracker.oldest()
        assert (oldest is None) == (not since)
        if oldest is not None:
            assert min(since.values()) <= oldest[0] <= min(since.values()) + MARK_MS
            assert since[oldest[1]] <= oldest[0]


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


def test_what_may_be_given_back() -> None:
    """D2, D3: the offset after the highest that was handed over, else where the claim began, also after a drop."""
    tracker = AtMostOnce(5)
    assert tracker.handed_to == 5
    tracker.granted(5, 20)
    tracker.granted(30, 40)
    assert tracker.handed_to == 5, "granted is not handed over"
    assert tracker.holds(9), "5 to 8 do not exist"
    assert tracker.handed_to == 5
    tracker.deliver(9, 0)
    tracker.deliver(12, 0, 3)
    assert tracker.handed_to == 13
    tracker.returned()
    assert tracker.drop() == 7 + 10
    assert (tracker.handed_to, tracker.delivered_to) == (13, 40)
    tracker.granted(40, 50)
    assert not tracker.holds(39)
    tracker.deliver(41, 0)
    assert tracker.handed_to == 42
    tracker.drop()
    assert tracker.handed_to == 42


def test_an_ack_does_not_say_that_the_rest_of_a_batch_is_handled() -> None:
    """T11, D4: what the user got is handled when it asks for more. Until all is acked, the handler is at work on it."""
    tracker = AtMostOnce(5)
    tracker.granted(5, 20)
    tracker.deliver(9, 0, 5)
    tracker.acked(1, 70)
    assert (tracker.in_flight, tracker.in_flight_since_ms, tracker.handled_to) == (4, 70, 5)
    tracker.acked(4, 80)
    assert (tracker.in_flight, tracker.in_flight_since_ms, tracker.handled_to) == (0, None, 5)
    tracker.acked(1, 90)
    assert tracker.in_flight == 0, "acked twice"
    tracker.deliver(19, 0)
    tracker.skipped(20)
    assert tracker.handled_to == 5, "a message is in hand"
    tracker.returned()
    tracker.granted(20, 25)
    tracker.skipped(22)
    assert tracker.handled_to == 22


MOST_OPS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(0, 30), st.integers(1, 10)),
        st.tuples(st.just("take"), st.integers(0, 60), st.just(0)),
        st.tuples(st.sampled_from(("next", "drop")), st.just(0), st.just(0)),
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
        assert tracker.handed_to == (handed[-1] + 1 if handed else 0), "M2"
    assert handed == sorted(set(handed))
    assert set(handed) <= granted


# --- the phases of a claim


@pytest.mark.parametrize("mode", [AtLeastOnce, AtMostOnce])
def test_a_claim_drains_until_its_handlers_are_done_or_its_time_is_over(mode: type[AtLeastOnce | AtMostOnce]) -> None:
    """T12, T16: an earlier deadline replaces a later one, a later one changes nothing; once released it stays so."""
    tracker = mode(0)
    claim = Claim(TopicPartition("t", 0), 5, 0, tracker)
    claim.stop("hand-over", None, 9)
    assert claim.phase is ClaimPhase.DRAINING
    assert claim.drained(0)
    if isinstance(tracker, AtLeastOnce):
        run = tracker.add([0])
        run.deliver(1, 10)
        assert claim.position() == 0
    else:
        tracker.granted(0, 1)
        tracker.deliver(0, 10)
        assert claim.position() == 1, "after all that was handed over: its Release gives back the rest"
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
    assert claim.phase is ClaimPhase.OPEN
    claim.phase = ClaimPhase.RELEASING
    claim.reopen()
    claim.stop("paused", 1)
    assert claim.phase is ClaimPhase.RELEASING
