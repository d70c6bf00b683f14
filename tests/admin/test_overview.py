"""Groups as programs and people are shown them: the seed's words, lags, and what is not known."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from marshal_py.admin.views import overview
from marshal_py.admin.views.group_info import PauseInfo
from marshal_py.admin.views.recreated_topics import RecreatedTopic
from marshal_py.protocol.member.waiting import Facts, Standstill, standstills
from marshal_py.protocol.wire.identity import NONE, PIN, TopicPartition
from marshal_py.protocol.wire.records import (
    ClaimingPartition,
    ClaimState,
    GroupConfig,
    Heartbeat,
    Leave,
    ReleaseGroup,
    ReleasingPartition,
    Topology,
)
from tests.support.differential_log import TOPIC, DifferentialLog

ONE, TWO = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)


@pytest.mark.parametrize(
    ("age_s", "word"),
    [
        (0.0, "fresh"),
        (1.9, "fresh"),
        (2.0, "unknown"),
        (4.0, "unknown"),
        (4.1, "stale"),
        (1e9, "stale"),
        (None, "unknown"),
    ],
)
def test_the_words_of_the_seed(age_s: float | None, word: str) -> None:
    """Fresh below one heartbeat interval, unknown from one to two, stale beyond two."""
    assert overview.liveness(age_s, 2.0) == word


@pytest.fixture
def book() -> DifferentialLog:
    book = DifferentialLog()
    session, epoch = book.owner()
    book.must(Heartbeat(session, 1, (ClaimState(epoch, 130, in_flight=2),)))
    return book


def test_the_state_of_a_group(book: DifferentialLog) -> None:
    (session,) = book.group.sessions
    found = overview.state(book.group, 3, {session: 10_000}, {ONE: 150, TWO: 7}, 11_500.0)
    msgspec.json.encode(found)
    (shown,) = found.sessions
    assert (shown.state, shown.last_sign_s, shown.claims) == ("unknown", 1.5, (str(ONE),))
    first, second = found.partitions[:2]
    assert (first.owner, first.position, first.end, first.lag, first.in_flight) == ("c", 130, 150, 20, 2)
    assert first.version == first.epoch == book.partition().version
    assert (second.owner, second.position, second.lag, second.version) == (None, None, None, None)
    assert len(found.partitions) == 4


@pytest.mark.parametrize("topic_id", ["", "new"], ids=["shrunk", "created again"])
def test_partitions_that_a_topic_no_longer_has_are_gone(book: DifferentialLog, topic_id: str) -> None:
    """F9.2, F9.10: the log keeps their generation, and no view shows them: the total lag would be unknown for good."""
    (session,) = book.group.sessions
    epochs = [book.partition().epoch]
    for number in (1, 3):
        book.must(ClaimingPartition(session, TOPIC, number, NONE, 5))
        epochs.append(book.group.partitions[TopicPartition(TOPIC, number)].epoch)
    for epoch in epochs:
        book.must(ReleasingPartition(session, epoch, 9))
    book.must(Leave(session))
    if topic_id:
        book.must(Topology(TOPIC, 4, book.group.topology_offset(TOPIC), topic_id="old"))
    book.must(ReleaseGroup(book.group.pause_change, NONE, 60_000, 0, 0))
    book.must(Topology(TOPIC, 2, book.group.topology_offset(TOPIC), book.group.pause_change, topic_id=topic_id))
    assert TopicPartition(TOPIC, 3) in book.group.partitions
    shown = overview.state(book.group, 0, {}, {ONE: 0, TWO: 0}, 0.0).partitions
    assert [row.partition for row in shown] == [0, 1]
    assert overview.partitions(book.group) == [ONE, TWO]
    assert {at.partition for at in overview.info(book.group, None, 0, b"", None).positions} <= {0, 1}
    assert overview.summary(book.group).partitions == 2


def test_a_session_whose_last_sign_lies_before_the_log(book: DifferentialLog) -> None:
    (shown,) = overview.state(book.group, 0, {}, {}, 5.0).sessions
    assert (shown.state, shown.last_sign_s) == ("unknown", None)


def notices(book: DifferentialLog, *stopped: Standstill) -> list[str]:
    """As `state` and `lag` show them."""
    return [str(one) for one in standstills(book.group, Facts(parked=stopped))]


def test_the_pause_of_a_group_with_a_pin_is_told() -> None:
    """A11: the pin belongs to no topic, and has no position that could have been forgotten."""
    book = DifferentialLog()
    book.must(GroupConfig(-1, policy="pinned", priority_groups=("jobs",)))
    session = book.join("west", priority_group="jobs")
    book.topology()
    book.must(ClaimingPartition(session, *PIN, NONE, NONE))
    book.must(ReleaseGroup(book.group.pause_change, NONE, 60_000, 0, 0))
    assert PIN in book.group.partitions
    (paused,) = standstills(book.group)
    assert (paused.cause, "created again" in paused.advice) == ("paused", False)


def test_what_is_not_consumed_is_listed_by_topic_and_reason(book: DifferentialLog) -> None:
    """Also a topic that was created again and that nobody has parked yet."""
    assert overview.stopped(book.group, {}, {}) == ()
    session = next(iter(book.group.sessions))
    book.must(ReleasingPartition(session, book.partition().epoch, 130, parked="Newer"))
    (one,) = overview.stopped(book.group, {}, {})
    assert (one.topic, one.partitions) == (TOPIC, (0,))
    assert "Newer" in one.advice
    assert notices(book, one) == [f"1 partitions of '{TOPIC}' are parked (Newer): {one.advice}"]
    (one,) = overview.stopped(book.group, {TOPIC: RecreatedTopic(TOPIC, "old", "new", 2, 1)}, {})
    assert one.text == f"4 partitions of '{TOPIC}' are not consumed (DataTopicRecreated)"
    assert (one.partitions, one.advice.startswith("of the first one, ")) == ((0, 1, 2, 3), True)
    assert "its id was old, now it is new" in one.advice


def test_partitions_that_the_policy_gives_to_nobody_are_said() -> None:
    """A12: all consumers wait for their conditions."""
    book = DifferentialLog()
    config = GroupConfig(-1, policy="overflow", priority_groups=("jobs",))
    book.must(config)
    book.join("west", min_pending=1000, priority_group="jobs")
    book.topology()
    (notice,) = notices(book)
    assert notice.startswith(f"no partition of '{TOPIC}' has an owner: under the policy overflow")
    assert "west (min_pending 1000)" in notice
    assert "marshal groups update billing --failover 60" in notice
    book.must(replace(config, observed=book.group.config_offset, failover_ms=9_000))
    assert notices(book)[0].endswith("no consumer without conditions has asked for messages for 9 s")
    book.join("local", priority_group="jobs")
    assert notices(book) == [], "one of them will own it"


def test_a_pause_whose_time_is_over_says_who_ends_it() -> None:
    pause = PauseInfo(token=7, duration_s=60, by=None, reason=None, left_s=0.0)
    assert overview.paused(pause) == (
        "paused for 60 s, which are over: a consumer ends the pause, once it has waited for so long itself, token 7"
    )
