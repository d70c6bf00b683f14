"""How fast a group consumes by the positions of the last minute, and since when it gets no further."""

from __future__ import annotations

from marshal_py.history.lag import WINDOW_MS, Pace
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Heartbeat,
    MessageRange,
    Move,
    Record,
    ReleasingPartition,
    SetPosition,
)
from tests.support.differential_log import GROUP, TOPIC, DifferentialLog

TP = TopicPartition(TOPIC, 0)


class Timed:
    """A log whose records come at given times."""

    def __init__(self, book: DifferentialLog) -> None:
        self.book, self.pace, self.world = book, Pace(), World()
        self.now_ms = 0
        self.catch_up()

    def catch_up(self) -> None:
        while self.world.next_offset < len(self.book.values):
            rationalizer.apply(self.world, self.world.next_offset, self.book.values[self.world.next_offset])
            self.pace.read(self.world, self.now_ms)
        self.pace.catch_up()

    def after(self, wait_ms: int, record: Record) -> None:
        self.now_ms += wait_ms
        self.book.must(record)
        self.catch_up()

    def per_second(self, later_ms: int = 0, tp: TopicPartition = TP) -> float:
        return self.pace.per_second(GROUP, tp, self.now_ms + later_ms)


def test_steady_progress_has_a_steady_rate() -> None:
    book = DifferentialLog()
    session, epoch = book.owner()
    log = Timed(book)
    assert log.per_second() == 0.0
    for number in range(1, 91):
        log.after(1_000, Heartbeat(session, number, (ClaimState(epoch, 100 + 50 * number),)))
    assert log.per_second() == 50.0
    assert log.per_second(tp=TopicPartition(TOPIC, 1)) == 0.0


def test_the_rate_of_a_stopped_partition_falls_to_zero() -> None:
    book = DifferentialLog()
    session, epoch = book.owner()
    log = Timed(book)
    log.after(10_000, Heartbeat(session, 1, (ClaimState(epoch, 1_100),)))
    assert log.per_second() == 100.0
    assert log.per_second(10_000) == 50.0
    assert log.per_second(WINDOW_MS + 1) == 0.0
    log.after(4_000, Heartbeat(session, 2, (ClaimState(epoch, 1_900),)))
    assert log.per_second(WINDOW_MS + 1) == 0.0, "also if it moved on after the last sample"


def test_a_move_is_no_consumption() -> None:
    book = DifferentialLog()
    session, epoch = book.owner()
    log = Timed(book)
    log.after(1_000, Heartbeat(session, 1, (ClaimState(epoch, 5_000),)))
    token = book.pause()
    book.release(session, epoch)
    log.after(1_000, SetPosition(token, (Move(*TP, book.partition().version, 0),), True))
    again = book.claim(session)
    log.catch_up()
    assert log.per_second() == 0.0
    log.after(2_000, Heartbeat(session, 2, (ClaimState(again, 20),)))
    assert log.per_second() == 10.0


def test_grants_count_and_do_not_pile_up() -> None:
    book = DifferentialLog()
    session, epoch = book.owner(AT_MOST_ONCE)
    log = Timed(book)
    for number in range(1_000):
        start = 100 + 10 * number
        log.after(10, ClaimingMessages(session, (MessageRange(epoch, start, start, start + 10),)))
    assert 950 < log.per_second() < 1_050
    assert len(log.pace._seen[GROUP][TP].samples) < 2 * 20


def test_what_was_granted_and_is_given_back_makes_no_rate_negative() -> None:
    book = DifferentialLog()
    session, epoch = book.owner(AT_MOST_ONCE)
    log = Timed(book)
    log.after(1_000, ClaimingMessages(session, (MessageRange(epoch, 100, 100, 1_100),)))
    log.after(10_000, ReleasingPartition(session, epoch, NONE, observed=1_100, give=139))
    log.after(1_000, ClaimingPartition(session, TOPIC, 0, log.world.next_offset - 1, NONE))
    assert log.world.groups[GROUP].partitions[TP].position == 139
    assert log.per_second() == 0.0


def test_foreign_and_rejected_entries_do_not_count() -> None:
    book = DifferentialLog()
    _, epoch = book.owner()
    other = book.join("other")
    log = Timed(book)
    log.after(1_000, Heartbeat(other, 1, (ClaimState(epoch, 9_000), ClaimState(77, 5))))
    assert log.per_second() == 0.0


def test_since_when_handlers_finish_nothing() -> None:
    """What was so at the first look was so since then; what is finished above the position is no standstill."""
    book = DifferentialLog()
    session, epoch = book.owner()
    log = Timed(book)
    log.after(10_000, Heartbeat(session, 1, (ClaimState(epoch, 120, in_flight=2),)))
    log.after(5_000, Heartbeat(session, 2, (ClaimState(epoch, 120, in_flight=3),)))
    group = log.world.groups[GROUP]
    assert log.pace.since(group) == log.pace.blocked(group) == {TP: 10_000}
    assert log.pace.stands(group) == {}, "nothing above the position is finished"
    assert log.pace.moved_ms(GROUP) == 10_000
    log.after(5_000, Heartbeat(session, 3, (ClaimState(epoch, 120, in_flight=2, progress=b"\x01\x01"),)))
    assert log.pace.since(group) == {TP: 20_000}
    assert log.pace.stands(group) == {TP: 10_000}
    assert log.pace.moved_ms(GROUP) == 10_000
    log.after(5_000, Heartbeat(session, 4, (ClaimState(epoch, 130),)))
    assert log.pace.since(group) == log.pace.stands(group) == {}
    log.after(5_000, Heartbeat(session, 5, (ClaimState(epoch, 130, in_flight=1),)))
    assert log.pace.since(group) == {TP: 30_000}, "before, handlers had nothing"
    assert log.pace.blocked(group) == {TP: 25_000}
    log.pace.forget([])
    assert log.pace.since(group) == log.pace.blocked(group) == {}


def test_the_longer_ago_the_fewer_looks() -> None:
    """A reader that begins at an old snapshot knows since when nothing moves, and does not look a thousand times."""
    book = DifferentialLog()
    session, epoch = book.owner()
    looks = []

    class Counted(Pace):
        def _look(self, world: World, now_ms: int) -> None:
            looks.append(now_ms)
            super()._look(world, now_ms)

    log = Timed(book)
    log.pace = Counted()
    for number in range(1, 3_601):
        log.now_ms += 1_000
        book.must(Heartbeat(session, number, (ClaimState(epoch, 100 + min(number, 600), in_flight=1),)))
        rationalizer.apply(log.world, log.world.next_offset, book.values[log.world.next_offset])
        log.pace.read(log.world, log.now_ms, now_ms=3_600_000)
    log.pace.catch_up()
    group = log.world.groups[GROUP]
    assert len(looks) < 150
    assert [at_ms for at_ms in looks if at_ms >= 3_592_000] == list(range(3_592_000, 3_601_000, 1_000))
    for since_ms in (log.pace.moved_ms(GROUP), log.pace.since(group)[TP], log.pace.blocked(group)[TP]):
        assert since_ms is not None
        assert 600_000 <= since_ms <= 600_000 + 3_000_000 // 8, "ten minutes after it began nothing moved any more"
