"""The rows of groups and partitions: lag, ages, retention, and what a Tally counts. Pure."""

from __future__ import annotations

import pytest

from marshal_py.admin.views import health, overview
from marshal_py.admin.views.group_info import Check, GroupHealth
from marshal_py.admin.views.health import GAPS_S, DataFacts, Tally
from marshal_py.history.advisories import Advisories
from marshal_py.history.lag import Pace
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.member.waiting import standstills
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    ClaimingPartition,
    ClaimState,
    Evict,
    Heartbeat,
    Leave,
    ReleaseGroup,
    ReleasingPartition,
)
from tests.support.differential_log import GROUP, TOPIC, DifferentialLog, genesis

ONE = TopicPartition(TOPIC, 0)


class Steady(Pace):
    def per_second(self, group: str, tp: TopicPartition, now_ms: int) -> float:
        return 4.0 if tp == ONE else 0.0


@pytest.fixture
def book() -> DifferentialLog:
    book = DifferentialLog()
    session, epoch = book.owner()
    book.must(Heartbeat(session, 1, (ClaimState(epoch, 130, in_flight=2),)))
    return book


def row(
    book: DifferentialLog, data: DataFacts, pace: Pace | None = None, findings: tuple[Check, ...] = ()
) -> GroupHealth:
    """As of 100 s after the epoch; the session was heard a second before."""
    tps = [tp for tp in overview.partitions(book.group) if tp.partition >= 0]
    pace = pace or Pace()
    rows = tuple(health.partition_health(book.group, tp, data, pace, 100_000, {}) for tp in tps)
    signs_ms = dict.fromkeys(book.group.sessions, 99_000)
    causes = standstills(book.group)
    return health.group_health(book.group, findings, causes, (), signs_ms, None, Tally(), rows, 98_000, 100_000)


def test_lag_and_the_time_that_it_takes(book: DifferentialLog) -> None:
    found = row(book, DataFacts({ONE: 150}), Steady())
    assert (found.lag, found.unknown, found.per_second, found.time_s) == (20, 3, 4.0, 5.0)
    assert [each.time_s for each in found.partitions] == [5.0, None, None, None]
    still = row(book, DataFacts({ONE: 150}))
    assert (still.lag, still.time_s) == (20, None)
    book.must(Leave(next(iter(book.group.sessions)), "bye"))
    nobody = row(book, DataFacts({ONE: 150}), Steady())
    assert (nobody.lag, nobody.time_s) == (20, None), "without an owner the position does not move"
    unknown = row(book, DataFacts(), Steady())
    assert (unknown.lag, unknown.time_s) == (None, None), "what is not known takes no 0 s"
    done = row(book, DataFacts({ONE: 130}))
    assert (done.lag, done.time_s, done.oldest_s) == (0, 0.0, None)


def test_who_is_there_and_what_has_an_owner(book: DifferentialLog) -> None:
    found = row(book, DataFacts(), findings=(Check("a", "warn", "x"), Check("b", "fail", "y")))
    assert (found.sessions, found.fresh, found.stale, found.witnessed, found.last_sign_s) == (1, 0, 0, 0, 1.0)
    assert found.last_progress_s == 2.0
    assert (found.owned, found.free, found.parked, found.level) == (1, 3, 0, "fail")
    session = next(iter(book.group.sessions))
    book.must(ReleasingPartition(session, book.partition().epoch, 130, parked="Newer"))
    found = row(book, DataFacts())
    assert (found.owned, found.free, found.parked, found.level) == (0, 3, 1, "ok")
    assert found.causes == {"parked": 1}


@pytest.mark.parametrize(
    ("data", "oldest_s", "retention_s"),
    [
        (DataFacts({ONE: 150}), None, None),
        (DataFacts({ONE: 150}, {}, {(GROUP, ONE): 40_000}), 60.0, None),
        (DataFacts({ONE: 150}, {ONE: 130}, {(GROUP, ONE): 40_000}, {TOPIC: 90_000}), 60.0, 30.0),
        (DataFacts({ONE: 150}, {ONE: 131}, {(GROUP, ONE): 40_000}, {TOPIC: 90_000}), 60.0, 0.0),
        (DataFacts({ONE: 150}, {}, {(GROUP, ONE): 1_000}, {TOPIC: 90_000}), 99.0, 0.0),
        (DataFacts({ONE: 130}, {ONE: 140}, {(GROUP, ONE): 1_000}, {TOPIC: 90_000}), None, None),
    ],
    ids=["nothing known", "kept forever", "by age", "deleted already", "overdue", "nothing waits"],
)
def test_the_oldest_message_and_when_kafka_may_delete_it(
    book: DifferentialLog, data: DataFacts, oldest_s: float | None, retention_s: float | None
) -> None:
    found = row(book, data)
    assert (found.oldest_s, found.retention_s) == (oldest_s, retention_s)
    assert (found.partitions[0].oldest_s, found.partitions[0].retention_s) == (oldest_s, retention_s)


def test_how_the_lag_changes_and_when_it_is_zero(book: DifferentialLog) -> None:
    """By what was written in this minute, of a reader that looks once."""
    for minute, growth, zero_s in ((30, -2.0, 10.0), (-90, 0.0, None), (-210, 2.0, None)):
        found = row(book, DataFacts({ONE: 150}, minute={ONE: minute}), Steady())
        assert (found.lag_per_second, found.zero_s) == (growth, zero_s)
        assert [each.lag_per_second for each in found.partitions] == [growth, None, None, None]
    unknown = row(book, DataFacts({ONE: 150}), Steady())
    assert (unknown.lag_per_second, unknown.zero_s) == (None, None)
    done = row(book, DataFacts({ONE: 130}, minute={ONE: 130}))
    assert (done.lag_per_second, done.zero_s) == (0.0, 0.0)


class Told(DifferentialLog):
    """A log whose records a Tally counts."""

    def __init__(self) -> None:
        super().__init__(start=False)
        self.told, self.tally, self.advisories = World(0), Tally(), Advisories(World(0))
        self.now_ms = 0
        assert self.put(genesis()).accepted

    def fold(self, value: bytes | None, offset: int | None = None):  # type: ignore[no-untyped-def]
        found = super().fold(value, offset)
        verdict = apply(self.told, self.told.next_offset, value)
        group = self.told.groups.get(verdict.group)
        if group is not None:
            self.tally.read(group, verdict, self.now_ms, self.advisories.read(group, verdict, self.now_ms))
        return found


def test_gaps_of_a_fail_over() -> None:
    log = Told()
    session, epoch = log.owner()
    other = log.join("other")
    log.now_ms = 10_000
    log.must(ReleasingPartition(session, epoch, 5))
    log.now_ms = 10_200
    epoch = log.must(ClaimingPartition(other, TOPIC, 0, log.partition().version))
    assert (log.tally.gaps[GAPS_S.index(0.25)], log.tally.gaps_s) == (1, 0.2)
    log.now_ms = 20_000
    log.must(Evict(other, log.group.sessions[other].extended, 4_000))
    log.now_ms = 21_000
    log.must(ClaimingPartition(session, TOPIC, 0, log.partition().version))
    assert log.tally.gaps[GAPS_S.index(5.0)] == 1, "from the last sign of life on"
    assert log.tally.advisories["evicted"] == 1
    counted = sum(log.tally.gaps)
    log.must(ReleaseGroup(log.group.pause_change, NONE, 60_000))
    log.must(ReleasingPartition(session, log.partition().epoch, 5))
    log.must(ReleaseGroup(log.group.pause_change, log.group.pause_change, 0))
    log.must(ClaimingPartition(session, TOPIC, 0, log.partition().version))
    log.must(Leave(session))
    session = log.join("third")
    log.must(ClaimingPartition(session, TOPIC, 0, log.partition().version))
    assert sum(log.tally.gaps) == counted, "neither a pause nor a group without sessions is a fail-over"


def test_deliveries_after_the_first_are_counted() -> None:
    log = Told()
    session, epoch = log.owner()
    for sequence, (position, attempts) in enumerate(
        [(500, 1), (500, 2), (500, 2), (500, 4), (600, 1), (700, 3), (800, 0)]
    ):
        log.must(Heartbeat(session, sequence, (ClaimState(epoch, position, attempts=attempts),)))
    assert log.tally.redelivered == 3 + 2


def test_what_handlers_had_at_a_take_over_comes_again() -> None:
    log = Told()
    session, epoch = log.owner()
    log.must(Heartbeat(session, 1, (ClaimState(epoch, 130, in_flight=3, attempts=1),)))
    other = log.join("other")
    log.must(Evict(session, log.group.sessions[session].extended, 4_000))
    epoch = log.must(ClaimingPartition(other, TOPIC, 0, log.partition().version))
    assert log.tally.redelivered == 3
    for sequence, (position, attempts, again) in enumerate([(131, 2, 3), (131, 3, 4), (140, 2, 5)]):
        log.must(Heartbeat(other, sequence, (ClaimState(epoch, position, attempts=attempts),)))
        assert log.tally.redelivered == again, "each once: the message at 131 was among the three"
