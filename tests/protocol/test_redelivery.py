"""Messages that handlers give back: D14 on the trackers, and what is reported of them (D11)."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.protocol.claims import WAITING_MAX, AtLeastOnce, Claim, OffsetRun, Redeliveries
from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.identity import TopicPartition


def delivered(count: int, position: int = 0) -> tuple[AtLeastOnce, OffsetRun]:
    """A tracker that has handed over `count` messages at time 0."""
    tracker = AtLeastOnce(position)
    run = tracker.add(range(position, position + count))
    run.deliver(count, 0)
    return tracker, run


def redeliveries_of(tracker: AtLeastOnce) -> Redeliveries:
    assert tracker.redeliveries is not None
    return tracker.redeliveries


def taken(tracker: AtLeastOnce, now_ms: int) -> list[int]:
    """The offsets that are due, in the order in which they are delivered again."""
    found = []
    while (one := redeliveries_of(tracker).take(now_ms)) is not None:
        found.append(one.offset)
    return found


def test_a_message_comes_again_when_its_delay_is_over() -> None:
    """D14: in the order of their times; the position stays below them."""
    tracker, run = delivered(5)
    for index, due_ms in ((3, 50), (1, 70), (2, 50)):
        assert tracker.give_back(run, index, f"message {index}", due_ms)
    assert (taken(tracker, 49), redeliveries_of(tracker).next_ms()) == ([], 50)
    assert redeliveries_of(tracker).is_due(50)
    assert taken(tracker, 60) == [2, 3]
    run.finish(0)
    assert tracker.position() == 1
    assert taken(tracker, 70) == [1]
    assert taken(tracker, 1_000) == []


def test_a_message_that_waits_is_held_by_no_handler() -> None:
    """D14, D4, T12: it is not silent, and a Release does not wait for it."""
    tracker, run = delivered(2)
    claim = Claim(TopicPartition("t", 0), 9, 0, tracker)
    claim.stop("a test", None)
    tracker.give_back(run, 0, None, 500)
    assert (tracker.in_flight, tracker.held) == (2, 1)
    assert tracker.oldest() == (1_000, 1), "the other one, up to MARK_MS late"
    assert not claim.drained(0)
    tracker.give_back(run, 1, None, 500)
    assert (tracker.in_flight, tracker.held, tracker.oldest()) == (2, 0, None)
    assert claim.drained(0)
    run.touch(0, 2, 400)
    assert tracker.oldest() is None, "who gave it back is not at work on it"
    assert taken(tracker, 500) == [0, 1]
    assert (tracker.held, tracker.oldest()) == (2, (500, 0)), "its time counts from the redelivery"


def test_a_handler_of_a_later_fetch_counts_while_earlier_messages_wait() -> None:
    """D4, D14: the longest silent handler is found in whichever fetch it is."""
    tracker, first = delivered(1_000)
    second = tracker.add(range(1_000, 1_001))
    second.deliver(1, 2_000)
    for index in range(1_000):
        tracker.give_back(first, index, None, 5_000)
    assert tracker.oldest() == (2_000, 1_000)
    assert len(taken(tracker, 5_000)) == 1_000
    assert tracker.oldest() == (2_000, 1_000)


def test_a_message_that_is_finished_while_it_waits_does_not_come_again() -> None:
    """D14: any thread may ack it meanwhile."""
    tracker, run = delivered(3)
    for index in range(3):
        tracker.give_back(run, index, None, 10)
    assert run.finish(0)
    assert run.finish(1)
    assert tracker.position() == 2
    assert taken(tracker, 10) == [2]
    assert not tracker.give_back(run, 0, None, 20), "it is done"
    run.finish(2)
    assert (tracker.position(), tracker.held, tracker.in_flight) == (3, 0, 0)
    redeliveries_of(tracker).forget_finished(3)
    assert (redeliveries_of(tracker).waiting, redeliveries_of(tracker).again) == ({}, {})


def test_times_of_messages_that_were_acked_early_are_not_kept() -> None:
    """D14: the delay may be a day, and the memory is bounded all the same."""
    count = 3 * WAITING_MAX
    tracker, run = delivered(count)
    for index in range(count - 1):
        tracker.give_back(run, index, None, 86_400_000)
        run.finish(index)
    tracker.give_back(run, count - 1, None, 10)
    tracker.progress()
    assert len(redeliveries_of(tracker)._due) == 1
    assert taken(tracker, 10) == [count - 1]


def test_a_second_call_does_not_move_the_time() -> None:
    tracker, run = delivered(1)
    assert tracker.give_back(run, 0, None, 10)
    assert tracker.give_back(run, 0, None, 5_000)
    assert taken(tracker, 10) == [0]
    assert tracker.give_back(run, 0, None, 5_000)
    assert (taken(tracker, 4_999), taken(tracker, 5_000)) == ([], [0])


def test_what_the_user_did_not_get_is_put_back() -> None:
    tracker, run = delivered(1)
    tracker.give_back(run, 0, None, 10)
    one = redeliveries_of(tracker).take(10)
    assert one is not None
    redeliveries_of(tracker).put_back(one)
    assert (tracker.held, tracker.delivery_count(0)) == (0, 1)
    assert taken(tracker, 10) == [0]


def test_each_redelivery_counts_and_is_reported() -> None:
    """D11, D14: at the position by `attempts`, above it by the progress; a next owner continues the count."""
    tracker, run = delivered(4, position=10)
    for _ in range(2):
        tracker.give_back(run, 0, None, 10)
        tracker.give_back(run, 2, None, 10)
        assert taken(tracker, 10) == [10, 12]
    assert [tracker.delivery_count(offset) for offset in range(10, 14)] == [3, 1, 3, 1]
    assert (tracker.attempts(), tracker.deliveries()) == (3, 3)
    heir = AtLeastOnce(tracker.position(), tracker.attempts(), tracker.in_flight, tracker.progress())
    assert [heir.delivery_count(offset) for offset in range(10, 15)] == [4, 2, 4, 2, 1]


def test_a_redelivery_adds_to_what_earlier_owners_delivered() -> None:
    """D11: the heir's count begins where theirs ended."""
    tracker, run = delivered(3)
    tracker.give_back(run, 1, None, 0)
    taken(tracker, 0)
    heir = AtLeastOnce(0, tracker.deliveries(), tracker.in_flight, tracker.progress())
    again = heir.add(range(3))
    again.deliver(3, 0)
    heir.give_back(again, 1, None, 0)
    taken(heir, 0)
    assert [heir.delivery_count(offset) for offset in range(3)] == [2, 4, 2]
    last = AtLeastOnce(0, heir.deliveries(), heir.in_flight, heir.progress())
    assert [last.delivery_count(offset) for offset in range(3)] == [3, 5, 3]


@given(st.lists(st.tuples(st.sampled_from(["nak", "ack", "take"]), st.integers(0, 9)), max_size=60))
def test_a_simple_model_counts_the_same(steps: list[tuple[str, int]]) -> None:
    """D11, D14: whatever handlers answer, in whatever order, the next owner counts every delivery."""
    tracker, run = delivered(10)
    counts, done, waiting = [1] * 10, set[int](), set[int]()
    for now_ms, (step, index) in enumerate(steps):
        if step == "nak":
            assert tracker.give_back(run, index, None, now_ms) == (index not in done)
            waiting |= {index} - done
        elif step == "ack":
            run.finish(index)
            done.add(index)
            waiting.discard(index)
        elif tracker.redeliveries is not None:
            assert sorted(taken(tracker, now_ms)) == sorted(waiting)
            for one in waiting:
                counts[one] += 1
            waiting.clear()
        assert (tracker.in_flight, tracker.held) == (10 - len(done), 10 - len(done | waiting))
    position = next((index for index in range(10) if index not in done), 10)
    assert tracker.position() == position
    heir = AtLeastOnce(position, tracker.deliveries(), tracker.in_flight, tracker.progress())
    left = [index for index in range(10) if index not in done]
    assert [heir.delivery_count(index) - 1 for index in left] == [counts[index] for index in left]
    finished = [(start, to) for start, to, times in progress.decode(position, tracker.progress()) if not times]
    named = {offset for start, to in finished for offset in range(start, to)}
    assert named == {index for index in done if index >= position}


STEPS = {"hand": 6, "begin": 6, "ack": 2, "nak": 2, "back": 1, "take": 1, "queue": 2}


@pytest.mark.parametrize("known", [b"", progress.encode(0, [progress.Range(2, 7, 2), progress.Range(19, 21, 5)])])
@pytest.mark.parametrize("seed", range(100))
def test_a_queued_message_counts_no_delivery(seed: int, known: bytes) -> None:
    """D17: whoever dies or releases the partition, the next owner counts a delivery where a handler had begun."""
    offsets = [0, 1, 3, 4, 5, 9, 12, 13, 20, 30]
    tracker = AtLeastOnce(0, 0, 0, known)
    before = {offset: tracker.delivery_count(offset) - 1 for offset in offsets}
    run, begun = tracker.add(offsets), dict.fromkeys(range(10), 0)
    queued, busy, done, back = set[int](), set[int](), set[int](), set[int]()
    dice, all_silent = Random(seed), list[int]()
    for now_ms, step in enumerate(dice.choices(list(STEPS), list(STEPS.values()), k=dice.randrange(80))):
        index = dice.randrange(10)
        if step == "hand" and run.delivered < 10:
            index = run.deliver(1, now_ms)
            tracker.queue(run, [index], lambda: all_silent[0] if all_silent else None)
            queued.add(index)
        elif step == "begin" and index in queued:
            tracker.begin(run, index, now_ms)
            queued.remove(index)
            busy.add(index)
            begun[index] += 1
        elif step == "ack" and index in busy:
            run.acks.append(index)
            tracker.settle()
            busy.remove(index)
            done.add(index)
        elif (step == "nak" and index in busy) or (step == "back" and index in queued):
            tracker.give_back(run, index, None, now_ms)
            (busy if step == "nak" else queued).remove(index)
            back.add(index)
        elif step in ("take", "queue") and tracker.redeliveries is not None:
            found = tracker.redeliveries.take(now_ms)
            assert (found is None) == (not back)
            if found is not None:
                back.remove(found.at)
                if step == "queue":
                    tracker.queue(run, [found.at], lambda: all_silent[0] if all_silent else None)
                    queued.add(found.at)
                else:
                    busy.add(found.at)
                    begun[found.at] += 1
        assert (tracker.held, tracker.awaited) == (len(busy), len(busy | queued))
        assert tracker.taken == len(busy | queued | back)
        oldest = tracker.oldest()
        assert (oldest is None) == (not busy), "what is queued is not silent, unless all handlers are"
        assert oldest is None or oldest[1] in {offsets[index] for index in busy}
        all_silent.append(-1)
        assert tracker.oldest() == ((-1, offsets[min(queued)]) if queued else oldest)
        all_silent.clear()
    left = [offset for index, offset in enumerate(offsets) if index not in done]
    heir = AtLeastOnce(tracker.position(), tracker.deliveries(), tracker.in_flight, tracker.progress())
    heir.add(left or [40])
    counted = {offset: heir.delivery_count(offset) - 1 for offset in left}
    assert counted == {offset: before[offset] + begun[offsets.index(offset)] for offset in left}


def test_the_number_of_waiting_messages_is_bounded() -> None:
    """D14: at the bound the owner delivers nothing new of the partition."""
    tracker, run = delivered(WAITING_MAX)
    for index in range(WAITING_MAX - 1):
        tracker.give_back(run, index, None, index)
    assert not redeliveries_of(tracker).full
    tracker.give_back(run, WAITING_MAX - 1, None, 0)
    assert redeliveries_of(tracker).full
    assert len(taken(tracker, 0)) == 2
    assert not redeliveries_of(tracker).full


def test_the_size_of_what_waits_is_known_at_every_step() -> None:
    """D14: a driver bounds what it holds in memory."""
    tracker, run = delivered(6)
    for index in range(5):
        tracker.give_back(run, index, None, index, 10**index)
        tracker.give_back(run, index, None, index, 10**index)
    found = redeliveries_of(tracker)
    assert found.size_bytes == 11_111
    one = found.take(0)
    assert one is not None
    assert found.size_bytes == 11_110
    found.put_back(one)
    assert found.size_bytes == 11_111
    assert tracker.post(run, 2)
    assert found.size_bytes == 11_011, "the writer of dead letters has it"
    run.finish(1)
    found.forget_finished(0)
    assert found.size_bytes == 11_001


def test_a_message_on_its_way_to_a_dead_letter_topic() -> None:
    """D15: no handler has it, a Release waits for it, it does not come again, and it counts when it is written."""
    tracker, run = delivered(3)
    tracker.give_back(run, 1, None, 10)
    assert tracker.post(run, 1)
    assert not tracker.post(run, 1)
    assert tracker.post(run, 0)
    run.finish(2)
    assert not tracker.post(run, 2), "it is finished"
    assert (tracker.held, tracker.in_flight, tracker.oldest()) == (2, 2, None)
    assert not tracker.give_back(run, 1, None, 10)
    assert taken(tracker, 1_000) == []
    tracker.finish_posted(run, 1, run.offsets[1])
    assert (tracker.position(), tracker.held) == (0, 1)
    run.finish(0)
    redeliveries_of(tracker).forget_finished(tracker.position())
    assert (tracker.position(), tracker.held, redeliveries_of(tracker).posted) == (3, 0, set())


def test_a_letter_that_is_written_finishes_its_message_although_its_run_was_forgotten() -> None:
    """An interrupted fetch takes back what came with the message that became a letter, and it is fetched again."""
    tracker, run = delivered(10)
    assert tracker.post(run, 5)
    run.delivered = 0
    assert tracker.forget_undelivered() == 0
    again = tracker.add(range(10))
    again.deliver(10, 1)
    assert not tracker.post(again, 5)
    tracker.finish_posted(run, 5, 5)
    for index in range(10):
        again.finish(index)
    assert (tracker.position(), tracker.in_flight, tracker.held) == (10, 0, 0)


def test_what_is_forgotten_is_not_counted_for_the_message_at_the_position() -> None:
    """D11: an interrupted fetch forgets what it had fetched beyond the last message that is finished; the next owner
    took a message for one that had ended three processes, and made a dead letter of it."""
    tracker = AtLeastOnce(100, attempts=3)
    run = tracker.add(range(100, 200))
    run.deliver(100, 0)
    run.finish_range(0, 100)
    assert tracker.position() == 200
    tracker.add(range(200, 300))
    assert (tracker.position(), tracker.attempts(), tracker.deliveries()) == (200, 1, 0)
    assert tracker.forget_undelivered() == 200
    assert (tracker.position(), tracker.attempts(), tracker.deliveries()) == (200, 1, 0)


def test_what_earlier_owners_delivered_too_often_is_found() -> None:
    """D15, D11: at the position and above it, and nothing else."""
    before, run = delivered(10, position=100)
    for index in (0, 4, 5):
        before.give_back(run, index, None, 0)
    taken(before, 0)
    tracker = AtLeastOnce(100, before.deliveries(), before.in_flight, before.progress())
    tracker.add(range(100, 120)).deliver(20, 0)
    counts = [tracker.delivery_count(offset) - 1 for offset in range(100, 120)]
    assert counts == [2, 1, 1, 1, 2, 2, 1, 1, 1, 1] + [0] * 10
    for times in (1, 2, 3):
        found, offset = [], 100
        while (offset := tracker.next_delivered(offset, times)) < 120:
            found.append(offset)
            offset += 1
        assert found == [100 + index for index, count in enumerate(counts) if count >= times]
