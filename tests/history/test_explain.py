"""Explanations and differences from raw records alone."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from marshal_py.history.explain import Cut, Difference, Explanation, diff, explain
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    GroupConfig,
    Heartbeat,
    Leave,
    MessageRange,
    Move,
    SetPosition,
    StepDown,
)
from tests.support.differential_log import GROUP, TOPIC, DifferentialLog

ONE = TopicPartition(TOPIC, 0)


class Raw(NamedTuple):
    offset: int
    value: bytes | None
    timestamp_ms: int


def raw(book: DifferentialLog) -> list[Raw]:
    """The records of the log, one per second."""
    return [Raw(offset, value, 1_000 * offset) for offset, value in enumerate(book.values)]


def story(book: DifferentialLog, cut: Cut = Cut(), tp: TopicPartition = ONE, lines_max: int = 20) -> Explanation:  # noqa: B008
    return explain(World(), raw(book), GROUP, tp, cut, lines_max)


def change(book: DifferentialLog, a: Cut, b: Cut) -> Difference:
    return diff(World(), raw(book), GROUP, a, b)


@pytest.fixture
def book() -> DifferentialLog:
    """An owner, progress, a pause, a move, another owner."""
    book = DifferentialLog()
    session, epoch = book.owner()
    for number in range(30):
        book.must(Heartbeat(session, number, (ClaimState(epoch, 101 + number),)))
    book.put(b"garbage")
    token = book.pause()
    book.release(session, epoch, 140)
    book.must(SetPosition(token, (Move(*ONE, book.partition().version, 7),), True, "alice@desk tool run 1"))
    book.must(Leave(session, "bye"))
    book.claim(book.join("d"))
    return book


def test_the_end_of_the_story(book: DifferentialLog) -> None:
    found = story(book)
    assert found.at_offset == book.last
    assert found.at_ms == 1_000 * book.last
    assert (found.standing.owner, found.standing.position, found.standing.generation) == ("d", 7, 1)
    assert not found.paused
    kinds = [line.verdict["type"] for line in found.lines]
    assert kinds == [
        "Topology",
        "ClaimingPartition",
        "Heartbeat",
        "ReleaseGroup",
        "ReleasingPartition",
        "SetPosition",
        "ClaimingPartition",
    ]
    move = found.lines[-2]
    assert "by alice@desk" in move.text
    assert move.text.endswith("-> its position is 7, a new generation begins")
    assert found.lines[2].text.endswith("-> its position is 130"), "of thirty small steps the last one"
    json.dumps([line.verdict for line in found.lines])


def test_every_cut_shows_the_state_of_the_fold_there(book: DifferentialLog) -> None:
    """At each offset and each time, the standing is that of a reader that stopped there."""
    for offset in range(len(book.values)):
        part = DifferentialLog(start=False)
        for value in book.values[: offset + 1]:
            part.put(value)
        group = part.world.groups.get(GROUP)
        known = group.partitions.get(ONE) if group is not None else None
        for cut in (Cut(offset), Cut(time_ms=1_000 * offset), Cut(time_ms=1_000 * offset + 999)):
            found = story(book, cut)
            assert found.at_offset == offset
            assert (found.standing.session or NONE) == (NONE if known is None else known.owner)
            position = NONE if found.standing.position is None else found.standing.position
            assert position == (NONE if known is None else known.position)
            assert found.paused == (group is not None and group.paused)


def test_what_was_refused_belongs_to_the_story(book: DifferentialLog) -> None:
    session = book.join("late")
    book.refuses(ClaimingPartition(session, TOPIC, 0, -1, 0), "held")
    line = story(book).lines[-1]
    assert (line.verdict["verdict"], line.verdict["reason"]) == ("rejected", "held")
    assert "somebody owns it" in line.text


def test_other_partitions_and_groups_do_not(book: DifferentialLog) -> None:
    before = story(book).lines
    book.join("elsewhere")
    book.claim(book.join("other"), 1)
    book.must(book.new_join("x"), group="another")
    assert story(book).lines == before
    assert story(book, tp=TopicPartition("nothing", 5)).version == NONE


def test_a_long_story_keeps_the_move_it_rests_on(book: DifferentialLog) -> None:
    for _ in range(30):
        session = book.join("again")
        book.refuses(ClaimingPartition(session, TOPIC, 0, -1, 0), "held")
    found = story(book, lines_max=5)
    assert len(found.lines) == 5
    assert found.left_out == 7 + 30 - 5
    assert [line.verdict["type"] for line in found.lines].count("SetPosition") == 1


def test_what_a_session_that_ended_may_have_lost() -> None:
    """F3.3: the line of the record that ended the session says it."""
    book = DifferentialLog()
    session, epoch = book.owner(AT_MOST_ONCE)
    book.must(ClaimingMessages(session, (MessageRange(epoch, 100, 100, 150),)))
    book.must(Heartbeat(session, 1, (ClaimState(epoch, 120),)))
    book.must(Leave(session, "died: signal 9"))
    found = story(book)
    assert found.lines[-1].text.endswith("-> nobody owns it now, at most 30 messages are lost: 120 to 149")


def test_why_the_policy_gives_a_partition_to_nobody() -> None:
    """A12: the only consumer waits for its condition, until it owns a partition."""
    book = DifferentialLog()
    book.must(GroupConfig(-1, policy="overflow", priority_groups=("jobs",)))
    session = book.join("west", min_ack_pending=9, priority_group="jobs")
    book.topology()
    assert "west (min_ack_pending 9)" in story(book).unserved
    book.claim(session, 1)
    assert story(book).unserved == ""


def test_a_difference(book: DifferentialLog) -> None:
    found = change(book, Cut(4), Cut())
    assert (found.from_offset, found.to_offset) == (4, book.last)
    assert [one.client_id for one in found.joined] == ["d"]
    assert [one.client_id for one in found.ended] == ["c"]
    (changed,) = found.partitions
    assert (changed.from_.owner, changed.from_.position) == ("c", 101)
    assert (changed.to.owner, changed.to.position) == ("d", 7)
    assert found.settings == {}
    assert found.records["Heartbeat accepted"] == 29
    assert [line.verdict["type"] for line in found.notable] == ["ReleaseGroup", "SetPosition", "Leave", "Join"]
    assert found.notable[-2].text.startswith(f"session {found.ended[0].session} (c) leaves")
    assert found.notable[-1].text.startswith("d joins, at least once, for ")


@pytest.mark.parametrize(("stands_s", "told"), [(1, 0), (20, 1)])
def test_a_time_without_a_sign_of_life_is_part_of_the_difference(stands_s: int, told: int) -> None:
    """Nobody was evicted, and no partition moved: else nothing tells of a cluster that took no records. Two intervals
    are no news, nor is a group without consumers, nor a record that was sent before and comes late."""
    book = DifferentialLog()
    session, epoch = book.owner()
    for number in range(7):
        book.must(Heartbeat(session, number, (ClaimState(epoch, 101),)))
    book.must(Leave(session, "bye"))
    book.join("d")
    gap_at = book.last - 5
    later = [offset for offset in range(gap_at + 1, book.last + 1) if offset != gap_at + 2]
    stood = [
        each._replace(timestamp_ms=each.timestamp_ms + 1_000 * stands_s * (each.offset in later)) for each in raw(book)
    ]
    empty = [each._replace(timestamp_ms=each.timestamp_ms + 90_000 * (each.offset == book.last)) for each in stood]
    found = diff(World(), empty, GROUP, Cut(4), Cut())
    words = [line.text for line in found.notable if "without a sign of life" in line.text]
    assert len(words) == told
    assert all(text.startswith(f"after {stands_s + 1} s without a sign of life of any consumer: ") for text in words)


def test_a_difference_of_settings(book: DifferentialLog) -> None:
    pause = next(line.offset for line in story(book).lines if line.verdict["type"] == "ReleaseGroup")
    assert change(book, Cut(pause - 1), Cut(pause)).settings == {"paused": {"from": False, "to": True}}
    nothing = change(book, Cut(), Cut())
    assert (nothing.partitions, nothing.records, nothing.joined) == ([], {}, [])
    begun = change(book, Cut(0), Cut(3))
    assert begun.settings["topics"] == {"from": {}, "to": {TOPIC: 4}}


def test_every_setting_is_in_the_difference() -> None:
    book = DifferentialLog()
    first = book.must(GroupConfig(NONE, policy="members", max_members=3, members=("m1",)))
    keys = (bytes(range(32)),)
    second = book.must(GroupConfig(first, policy="members", max_members=3, members=("m1", "m2"), admin_keys=keys))
    assert change(book, Cut(first), Cut(second)).settings == {
        "members": {"from": ["m1"], "to": ["m1", "m2"]},
        "admin_keys": {"from": [], "to": [keys[0].hex()]},
    }


def test_a_step_down_of_the_owner_belongs_to_the_story() -> None:
    """It says who wanted the owner to hand the partition over, and why; of other owners it is another story."""
    book = DifferentialLog()
    session, _ = book.owner()
    other = book.join("other")
    book.must(StepDown(session, NONE, "slow disk on rack 7", "ann@host"))
    book.must(StepDown(other, NONE, "not this one", "bob@host"))
    told = [line.text for line in story(book).lines]
    assert f"session {session} (c) steps down (slow disk on rack 7), by ann@host" in told
    assert not any("not this one" in text for text in told)
    assert [line.verdict["type"] for line in change(book, Cut(0), Cut()).notable][-2:] == ["StepDown", "StepDown"]
