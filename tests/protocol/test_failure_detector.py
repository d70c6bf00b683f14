"""The waits of one client: PROTOCOL.md T1-T5 on the FailureDetector, over a world that was folded."""

from __future__ import annotations

from marshal_py.protocol.time import FailureDetector
from marshal_py.protocol.wire.identity import Instant, TopicPartition
from marshal_py.protocol.wire.records import Heartbeat, ReleaseGroup
from tests.support.differential_log import INTERVAL_MS, PAUSE_MS, TOPIC, DifferentialLog

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
STEP = I // 10


def at(ms: int) -> Instant:
    return Instant(ms, ms, ms)


def wait(detector: FailureDetector, book: DifferentialLog, start: int, stop: int, *, proven: bool = True) -> None:
    """Looks at the world every step until `stop`."""
    for ms in [*range(start + STEP, stop, STEP), stop]:
        detector.refresh(book.group, at(ms), proven)


def free_waited_ms(detector: FailureDetector, partition: int) -> int:
    return detector.clock.waited_ms(detector.free()[TopicPartition(TOPIC, partition)][1])


def test_a_wait_begins_when_the_value_was_first_held() -> None:
    """T1: age in the log does not count; an extension begins a new wait, a heartbeat that extends nothing does not."""
    book = DifferentialLog()
    session = book.join()
    for number in range(5):
        book.must(Heartbeat(session, number))
    detector = FailureDetector(I)
    assert detector.session_waited_ms(session) == 0
    detector.refresh(book.group, at(9_000), True)
    assert detector.session_waited_ms(session) == 0, "it was silent before, but not before these eyes"
    wait(detector, book, 9_000, 9_500)
    assert detector.session_waited_ms(session) == 499
    book.must(Heartbeat(session, 9))
    detector.refresh(book.group, at(9_500), True)
    assert detector.session_waited_ms(session) == 0
    book.topology()
    book.claim(session)
    book.pause()
    wait(detector, book, 9_500, 9_900)
    book.must(Heartbeat(session, 10))  # an owner's in a pause: it does not extend
    wait(detector, book, 9_900, 10_000)
    assert detector.session_waited_ms(session) == 499


def test_waited_out_is_twice_the_sessions_own_interval() -> None:
    """T4: to the ms, by the interval that its Join named; the waiter's own does not matter."""
    book = DifferentialLog()
    session = book.join()
    detector = FailureDetector(600_000)
    detector.refresh(book.group, at(0), True)
    wait(detector, book, 0, 2 * I)
    assert detector.session_waited_ms(session) == 2 * I - 1
    assert detector.waited_out(book.group) == set()
    detector.refresh(book.group, at(2 * I + 1), True)
    assert detector.waited_out(book.group) == {session}
    book.must(Heartbeat(session, 1))
    detector.refresh(book.group, at(2 * I + 2), True)
    assert detector.waited_out(book.group) == set()


def test_all_waits_restart_after_an_unproven_step() -> None:
    """T3: for sessions, the pause and free partitions."""
    for paused in (False, True):
        book = DifferentialLog()
        session = book.join()
        book.topology(1)
        if paused:
            book.pause()
        detector = FailureDetector(I)

        def waited_ms(detector: FailureDetector = detector, session: int = session, paused: bool = paused) -> set[int]:
            other = detector.pause_waited_ms() if paused else free_waited_ms(detector, 0)
            return {detector.session_waited_ms(session), other}

        detector.refresh(book.group, at(0), True)
        wait(detector, book, 0, 1_900)
        assert waited_ms() == {1_899}
        detector.refresh(book.group, at(1_950), False)
        assert waited_ms() == {0}
        wait(detector, book, 1_950, 2_150)
        assert waited_ms() == {199}


def test_a_sleep_counts_as_one_step() -> None:
    """T2: an hour without a look is a tenth of the interval."""
    book = DifferentialLog()
    session = book.join()
    detector = FailureDetector(I)
    detector.refresh(book.group, at(0), True)
    detector.refresh(book.group, at(3_600_000), True)
    assert detector.session_waited_ms(session) == STEP - 1
    assert detector.deadline_ms(at(7)) <= 7 + STEP, "so it must tick at every step"


def test_a_wait_on_the_pause_may_start_from_what_others_waited() -> None:
    """T5: the greatest value that was read for the same pause_change counts, and the wait continues from it."""
    book = DifferentialLog()
    session = book.join()
    token = book.pause()
    detector = FailureDetector(I)
    detector.credit_pause(token, 4_000, at(0))
    assert detector.pause_waited_ms() == 0, "it does not hold that pause yet"
    detector.refresh(book.group, at(0), True)
    detector.credit_pause(token - 1, 4_000, at(0))
    detector.credit_pause(token + 1, 4_000, at(0))
    assert detector.pause_waited_ms() == 0
    detector.credit_pause(token, 3_000, at(0))
    assert detector.pause_waited_ms() == 3_000
    detector.credit_pause(token, 2_000, at(0))
    assert detector.pause_waited_ms() == 3_000, "the greatest counts"
    wait(detector, book, 0, 500)
    assert detector.pause_waited_ms() == 3_499
    assert detector.session_waited_ms(session) == 499, "other waits get no credit"
    renewed = book.must(ReleaseGroup(token, token, PAUSE_MS))
    detector.refresh(book.group, at(500), True)
    assert detector.pause_waited_ms() == 0, "a renewed pause is another one"
    detector.credit_pause(token, 4_000, at(500))
    assert detector.pause_waited_ms() == 0
    detector.credit_pause(renewed, 1_000, at(500))
    assert detector.pause_waited_ms() == 1_000


def test_a_wait_that_is_taken_over_amid_a_step_counts_on_from_there() -> None:
    """T5: what lies before the reading is in the other wait already, however often others are longer by a little."""
    book = DifferentialLog()
    book.join()
    token = book.pause()
    detector = FailureDetector(I)
    detector.refresh(book.group, at(0), True)
    for ms in range(STEP, 40 * STEP, STEP):
        detector.credit_pause(token, ms - 1, at(ms - 1))
        detector.refresh(book.group, at(ms), True)
        assert detector.pause_waited_ms() <= ms


def test_a_head_start_counts_from_the_version() -> None:
    """T1, A2: a partition that was taken and freed again begins a new wait; one that others only looked at does not."""
    book = DifferentialLog()
    session = book.join()
    book.topology(2)
    detector = FailureDetector(I)
    detector.refresh(book.group, at(0), True)
    assert set(detector.free()) == {TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)}
    wait(detector, book, 0, 300)
    epoch = book.claim(session)
    detector.refresh(book.group, at(300), True)
    assert set(detector.free()) == {TopicPartition(TOPIC, 1)}
    book.release(session, epoch)
    detector.refresh(book.group, at(310), True)
    assert free_waited_ms(detector, 0) == 0
    assert free_waited_ms(detector, 1) == 309


def test_a_head_start_counts_from_the_end_of_a_pause() -> None:
    """A2: in a pause nothing may be claimed. If its waits counted, all members would claim everything when it ends."""
    book = DifferentialLog()
    session = book.join()
    book.topology(2)
    epoch = book.claim(session)
    detector = FailureDetector(I)
    detector.refresh(book.group, at(0), True)
    wait(detector, book, 0, 500)
    token = book.pause()
    book.release(session, epoch)
    wait(detector, book, 500, 3_000)
    assert detector.free() == {}
    book.must(ReleaseGroup(token, token, 0))
    detector.refresh(book.group, at(3_100), True)
    assert set(detector.free()) == {TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)}
    assert free_waited_ms(detector, 0) == free_waited_ms(detector, 1) == 0


def test_what_ended_is_forgotten() -> None:
    """T1: a session that is gone is not waited on, and no memory stays."""
    book = DifferentialLog()
    first, second = book.join(), book.join()
    detector = FailureDetector(I)
    detector.refresh(book.group, at(0), True)
    wait(detector, book, 0, 500)
    book.new_join()
    book.must(book.new_join(predecessor=first))
    detector.refresh(book.group, at(500), True)
    assert detector.session_waited_ms(first) == 0
    assert detector.session_waited_ms(second) == 499
