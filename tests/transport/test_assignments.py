"""Every answer of the data plane names the assignment that it belongs to; one about an earlier one changes nothing."""

from __future__ import annotations

import pytest

from marshal_py.protocol.identity import TopicPartition
from marshal_py.transport.assignments import FAILURES_MAX, QUIET_MS, RETRY_MS, RETRY_MS_MAX, Assignments
from marshal_py.transport.ports import Broken, OutOfRange

TP = TopicPartition("orders", 0)


@pytest.fixture
def held() -> Assignments:
    return Assignments()


def assigned(held: Assignments, position: int, now_ms: int = 0) -> int:
    held.assign({TP: position})
    assert held.take(now_ms).assign == {TP: position}
    return held.round(TP)


def test_the_client_is_told_the_difference_and_no_more(held: Assignments) -> None:
    other = TopicPartition("orders", 1)
    held.assign({TP: 5, other: 6})
    held.unassign([other])
    held.assign({TP: 7})
    changes = held.take(0)
    assert (changes.unassign, changes.assign) == ([], {TP: 7})
    held.assign({TP: 9})
    held.pause([TP])
    changes = held.take(0)
    assert (changes.unassign, changes.assign, changes.pause) == ([TP], {TP: 9}, {TP})
    assert not held.pending(0)
    held.unassign([TP])
    changes = held.take(0)
    assert (changes.resume, changes.unassign, changes.assign) == ([TP], [TP], {}), "a client remembers the pause"


def test_messages_name_the_assignment_that_fetched_them(held: Assignments) -> None:
    """Also while another one is wanted already and the client was not told yet."""
    first = assigned(held, 0)
    held.assign({TP: 3})
    assert held.came(TP, 5) == first != held.round(TP)
    held.take(0)
    assert held.came(TP, 4) == held.round(TP)


def test_a_refusal_of_an_earlier_assignment_says_nothing_of_the_present_one(held: Assignments) -> None:
    """D6: refused at 500; dropped, and claimed again at 100, which is refused as well; the first is answered late."""
    first = assigned(held, 500)
    held.refuse(TP, 500, "", 0)
    assert held.out_of_range() == [OutOfRange(TP, 500, first)]
    held.unassign([TP])
    assert not held.current(TP, first)
    held.assign({TP: 100})
    held.take(0)
    second = held.round(TP)
    held.refuse(TP, 100, "", 0)
    assert held.out_of_range() == [OutOfRange(TP, 100, second)]
    assert not held.current(TP, first)
    assert held.current(TP, second)


def test_what_nobody_asked_for_in_time_is_forgotten_with_its_assignment(held: Assignments) -> None:
    assigned(held, 500)
    held.refuse(TP, 500, "", 0)
    held.assign({TP: 100})
    assert held.out_of_range() == []


def test_an_error_does_not_end_an_assignment_that_the_client_was_not_told_of(held: Assignments) -> None:
    assigned(held, 500)
    held.assign({TP: 100})
    held.refuse(TP, 500, "", 0)
    held.refuse_for_good(TP, "not authorized")
    held.fail(TP, "unknown", 0)
    assert (held.out_of_range(), held.broken()) == ([], [])
    assert held.fetching(TP)
    assert held.take(0).assign == {TP: 100}


@pytest.mark.parametrize("came_to", [None, 150])
def test_a_refusal_that_comes_too_late_does_not_move_the_position(held: Assignments, came_to: int | None) -> None:
    """Its position was never reached, so it is of an earlier assignment: what lies between must be read."""
    round_ = assigned(held, 100)
    if came_to is not None:
        held.came(TP, came_to)
    held.refuse(TP, 500, "", 0)
    assert held.out_of_range() == []
    assert held.take(0).unassign == [TP]
    assert held.take(RETRY_MS).assign == {TP: came_to or 100}
    assert held.round(TP) == round_


def test_a_failed_fetch_is_tried_again_from_where_it_was(held: Assignments) -> None:
    """One error that passes must not leave a partition that nobody reads and everybody believes to be read."""
    round_ = assigned(held, 0)
    held.came(TP, 7)
    held.fail(TP, "unknown", 1_000)
    assert held.take(1_000).unassign == [TP]
    assert not held.pending(1_000 + RETRY_MS - 1)
    assert held.pending(1_000 + RETRY_MS)
    assert held.take(1_000 + RETRY_MS).assign == {TP: 7}
    assert held.came(TP, 8) == round_ == held.round(TP)
    assert held.broken() == []


def test_failures_one_after_the_other_are_told_and_it_is_tried_no_more(held: Assignments) -> None:
    round_ = assigned(held, 0)
    now_ms, waits = 0, []
    for _ in range(FAILURES_MAX - 1):
        held.fail(TP, "unknown", now_ms)
        held.take(now_ms)
        began_ms = now_ms
        while not held.pending(now_ms):
            now_ms += RETRY_MS
        waits.append(now_ms - began_ms)
        assert held.take(now_ms).assign == {TP: 0}
        held.quiet(now_ms + 1)  # nothing more was told just now, which is no success
    assert waits == sorted(waits)
    assert waits[0] == RETRY_MS
    assert waits[-1] == RETRY_MS_MAX
    assert held.broken() == []
    held.fail(TP, "unknown", now_ms)
    assert held.broken() == [Broken(TP, "unknown", round_, False)]
    assert held.take(now_ms).unassign == [TP]
    assert not held.pending(now_ms + 10 * RETRY_MS_MAX)
    assert not held.fetching(TP)
    held.assign({TP: 0})
    assert held.take(now_ms).assign == {TP: 0}


@pytest.mark.parametrize("success", ["messages", "silence"])
def test_a_success_in_between_begins_a_new_count(held: Assignments, success: str) -> None:
    assigned(held, 0)
    now_ms = 0
    for number in range(3 * FAILURES_MAX):
        held.fail(TP, "unknown", now_ms)
        held.take(now_ms)
        now_ms += RETRY_MS
        assert held.take(now_ms).assign == {TP: held.fetched[TP].reached}
        if success == "messages":
            held.came(TP, number + 1)
        else:
            now_ms += QUIET_MS
        held.quiet(now_ms)
    assert held.broken() == []


def test_a_pause_holds_beyond_a_retry(held: Assignments) -> None:
    assigned(held, 0)
    held.pause([TP])
    assert held.take(0).pause == {TP}
    held.fail(TP, "unknown", 0)
    changes = held.take(0)
    assert (changes.resume, changes.unassign) == ([TP], [TP])
    changes = held.take(RETRY_MS)
    assert (changes.assign, changes.pause) == ({TP: 0}, {TP})


def test_what_is_refused_for_good_is_told_once(held: Assignments) -> None:
    round_ = assigned(held, 0)
    held.refuse_for_good(TP, "not authorized")
    held.refuse_for_good(TP, "not authorized")
    assert held.broken() == [Broken(TP, "not authorized", round_, True)]
    assert held.broken() == []
    assert held.take(0).unassign == [TP]


def test_what_an_interrupt_left_half_told_is_told_again(held: Assignments) -> None:
    assigned(held, 4)
    held.came(TP, 6)
    held.dropped([TP])
    assert held.take(0).assign == {TP: 6}
