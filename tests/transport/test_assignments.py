"""Every answer names the assignment that it belongs to; an answer about an earlier one changes nothing."""

from __future__ import annotations

import pytest

from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.assignments import FAILURES_MAX, FORGET_FAILURES_MS, RETRY_MS, RETRY_MS_MAX, Assignments
from marshal_py.transport.ports import Broken, OutOfRange

TP = TopicPartition("orders", 0)


@pytest.fixture
def assignments() -> Assignments:
    return Assignments()


def assigned(assignments: Assignments, position: int, now_ms: int = 0) -> int:
    assignments.assign({TP: position})
    assert assignments.take(now_ms).assign == {TP: position}
    return assignments.round(TP)


def test_the_client_gets_the_difference_and_no_more(assignments: Assignments) -> None:
    other = TopicPartition("orders", 1)
    assignments.assign({TP: 5, other: 6})
    assignments.unassign([other])
    assignments.assign({TP: 7})
    changes = assignments.take(0)
    assert (changes.unassign, changes.assign) == ([], {TP: 7})
    assignments.assign({TP: 9})
    assignments.pause([TP])
    changes = assignments.take(0)
    assert (changes.unassign, changes.assign, changes.pause) == ([TP], {TP: 9}, {TP})
    assert not assignments.pending(0)
    assignments.unassign([TP])
    changes = assignments.take(0)
    assert (changes.resume, changes.unassign, changes.assign) == ([TP], [TP], {}), "a client remembers the pause"


def test_messages_name_the_assignment_that_fetched_them(assignments: Assignments) -> None:
    """Even while another one is wanted that the client does not know yet."""
    first = assigned(assignments, 0)
    assignments.assign({TP: 3})
    assert assignments.received(TP, 5) == first != assignments.round(TP)
    assignments.take(0)
    assert assignments.received(TP, 4) == assignments.round(TP)


def test_a_refusal_of_an_earlier_assignment_says_nothing_about_the_current_one(assignments: Assignments) -> None:
    """D6: refused at 500; released, then claimed again at 100, which is refused as well; the first answer is late."""
    first = assigned(assignments, 500)
    assignments.refuse(TP, 500, "", 0)
    assert assignments.out_of_range() == [OutOfRange(TP, 500, first)]
    assignments.unassign([TP])
    assert not assignments.current(TP, first)
    assignments.assign({TP: 100})
    assignments.take(0)
    second = assignments.round(TP)
    assignments.refuse(TP, 100, "", 0)
    assert assignments.out_of_range() == [OutOfRange(TP, 100, second)]
    assert not assignments.current(TP, first)
    assert assignments.current(TP, second)


def test_an_unread_refusal_is_forgotten_with_its_assignment(assignments: Assignments) -> None:
    assigned(assignments, 500)
    assignments.refuse(TP, 500, "", 0)
    assignments.assign({TP: 100})
    assert assignments.out_of_range() == []


def test_an_error_does_not_end_an_assignment_that_the_client_does_not_know(assignments: Assignments) -> None:
    assigned(assignments, 500)
    assignments.assign({TP: 100})
    assignments.refuse(TP, 500, "", 0)
    assignments.refuse_permanently(TP, "not authorized")
    assignments.fail(TP, "unknown", 0)
    assert (assignments.out_of_range(), assignments.broken()) == ([], [])
    assert assignments.fetching(TP)
    assert assignments.take(0).assign == {TP: 100}


@pytest.mark.parametrize("received_up_to", [None, 150])
def test_a_late_refusal_does_not_move_the_position(assignments: Assignments, received_up_to: int | None) -> None:
    """Its position was never reached, so it belongs to an earlier assignment: nothing may be skipped."""
    round_ = assigned(assignments, 100)
    if received_up_to is not None:
        assignments.received(TP, received_up_to)
    assignments.refuse(TP, 500, "", 0)
    assert assignments.out_of_range() == []
    assert assignments.take(0).unassign == [TP]
    assert assignments.take(RETRY_MS).assign == {TP: received_up_to or 100}
    assert assignments.round(TP) == round_


def test_what_is_fetched_again_keeps_its_leader_epoch(assignments: Assignments) -> None:
    """D6: without it a client would not notice that the partition has lost what was read (KIP-320)."""
    assigned(assignments, 0)
    assignments.received(TP, 7, 3)
    assignments.assign({TP: 5})
    assert assignments.take(0).leader_epochs == {TP: 3}
    assignments.fail(TP, "unknown", 0)
    assignments.take(0)
    assert assignments.take(RETRY_MS).leader_epochs == {TP: 3}
    assignments.received(TP, 7, 3)
    assignments.assign({TP: 8})
    assert assignments.take(RETRY_MS).leader_epochs == {}, "it was not read up to there"
    assignments.received(TP, 9, 4)
    assignments.skipped(TP, 10)
    assignments.assign({TP: 10})
    assert assignments.take(RETRY_MS).leader_epochs == {}, "what was passed may be of a later one"
    assignments.received(TP, 11, 4)
    assignments.unassign([TP])
    assignments.assign({TP: 11})
    assert assignments.take(RETRY_MS).leader_epochs == {}, "another claim, after what an admin did"
    assignments.received(TP, 12, 4)
    assignments.forget_leader_epochs()
    assignments.assign({TP: 12})
    assert assignments.take(RETRY_MS).leader_epochs == {}, "the topic was created again"


def test_a_failed_fetch_is_retried_from_where_it_was(assignments: Assignments) -> None:
    """A temporary error must not leave a partition unread that counts as being read."""
    round_ = assigned(assignments, 0)
    assignments.received(TP, 7)
    assignments.fail(TP, "unknown", 1_000)
    assert assignments.take(1_000).unassign == [TP]
    assert not assignments.pending(1_000 + RETRY_MS - 1)
    assert assignments.pending(1_000 + RETRY_MS)
    assert assignments.take(1_000 + RETRY_MS).assign == {TP: 7}
    assert assignments.received(TP, 8) == round_ == assignments.round(TP)
    assert assignments.broken() == []


def test_failures_in_a_row_are_reported_and_end_the_retries(assignments: Assignments) -> None:
    round_ = assigned(assignments, 0)
    now_ms, waits = 0, []
    for _ in range(FAILURES_MAX - 1):
        assignments.fail(TP, "unknown", now_ms)
        assignments.take(now_ms)
        began_ms = now_ms
        while not assignments.pending(now_ms):
            now_ms += RETRY_MS
        waits.append(now_ms - began_ms)
        assert assignments.take(now_ms).assign == {TP: 0}
        assignments.drained(now_ms + 1)  # no event at this moment is not a success
    assert waits == sorted(waits)
    assert waits[0] == RETRY_MS
    assert waits[-1] == RETRY_MS_MAX
    assert assignments.broken() == []
    assignments.fail(TP, "unknown", now_ms)
    assert assignments.broken() == [Broken(TP, "unknown", round_, False)]
    assert assignments.take(now_ms).unassign == [TP]
    assert not assignments.pending(now_ms + 10 * RETRY_MS_MAX)
    assert not assignments.fetching(TP)
    assignments.assign({TP: 0})
    assert assignments.take(now_ms).assign == {TP: 0}


@pytest.mark.parametrize("success", ["messages", "silence"])
def test_a_success_in_between_resets_the_count(assignments: Assignments, success: str) -> None:
    assigned(assignments, 0)
    now_ms = 0
    for number in range(3 * FAILURES_MAX):
        assignments.fail(TP, "unknown", now_ms)
        assignments.take(now_ms)
        now_ms += RETRY_MS
        assert assignments.take(now_ms).assign == {TP: assignments.fetched[TP].reached}
        if success == "messages":
            assignments.received(TP, number + 1)
        else:
            now_ms += FORGET_FAILURES_MS
        assignments.drained(now_ms)
    assert assignments.broken() == []


def test_a_pause_holds_beyond_a_retry(assignments: Assignments) -> None:
    assigned(assignments, 0)
    assignments.pause([TP])
    assert assignments.take(0).pause == {TP}
    assignments.fail(TP, "unknown", 0)
    changes = assignments.take(0)
    assert (changes.resume, changes.unassign) == ([TP], [TP])
    changes = assignments.take(RETRY_MS)
    assert (changes.assign, changes.pause) == ({TP: 0}, {TP})


def test_a_permanent_refusal_is_reported_once(assignments: Assignments) -> None:
    round_ = assigned(assignments, 0)
    assignments.refuse_permanently(TP, "not authorized")
    assignments.refuse_permanently(TP, "not authorized")
    assert assignments.broken() == [Broken(TP, "not authorized", round_, True)]
    assert assignments.broken() == []
    assert assignments.take(0).unassign == [TP]


def test_an_interrupted_change_is_passed_to_the_client_again(assignments: Assignments) -> None:
    assigned(assignments, 4)
    assignments.received(TP, 6)
    assignments.unassigned_by_client([TP])
    assert assignments.take(0).assign == {TP: 6}
