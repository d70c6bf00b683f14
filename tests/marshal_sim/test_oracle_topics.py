"""The oracle alone on rule 9 (PROTOCOL.md 5): topics and their ids, configs, deletion and revival, change of mode."""

import pytest

from marshal_sim.oracle.oracle import Partition
from tests.support.oracle_log import (
    CLAIM,
    CONFIG,
    EVICT,
    GRANT,
    GROUP,
    HEARTBEAT,
    INSTANCE,
    JOIN,
    LEAVE,
    MOVE,
    NOTE,
    NOW,
    PAUSE,
    RELEASE,
    SEEK,
    STEP_DOWN,
    TOPOLOGY,
    Log,
)

# ---------------------------------------------------------------------------------------------------------------------
# Topology


def test_topology() -> None:
    """F9.1, F9.2, F9.3: growing is free, shrinking needs the pause, its token and free partitions."""
    log = Log()
    assert log.say(TOPOLOGY, "t", 2, 0) == "observed"
    first = log.must(TOPOLOGY, "t", 2, -1)
    assert log.say(TOPOLOGY, "t", 3, -1) == "observed"
    assert log.say(TOPOLOGY, "t", 2, first) == "same"
    grown = log.must(TOPOLOGY, "t", 4, first)
    topic = log.group.topics["t"]
    assert (topic.count, topic.first_count, topic.offset) == (4, 2, grown)
    session = log.join()
    low, high = log.must(CLAIM, session, "t", 0, -1, 5), log.must(CLAIM, session, "t", 3, -1, 5)
    log.must(CLAIM, session, "t", -1, -1)
    assert log.say(TOPOLOGY, "t", 3, grown, -1) == "token"
    token = log.pause()
    assert log.say(TOPOLOGY, "t", 3, grown, token - 1) == "token"
    assert log.say(TOPOLOGY, "t", 3, grown, token) == "held"
    assert log.release(session, high, position=5, attempts=1, in_flight=1, progress=b"p", parked="why") == "accepted"
    shrunk = log.must(TOPOLOGY, "t", 3, grown, token)
    assert log.partition(3) == Partition(generation=1, version=shrunk, last_owner=session)
    assert log.partition(0) == Partition(owner=session, epoch=low, position=5, version=low, floor=5, attempts=1)
    assert (topic.count, topic.first_count) == (3, 2)


def test_the_id_of_a_topic_becomes_known() -> None:
    """F9.1: at once, or where none was known, with any count; "" and the same id change nothing."""
    log = Log()
    first = log.must(TOPOLOGY, "t", 2, -1)
    assert log.group.topics["t"].id == ""
    session = log.join()
    epoch = log.must(CLAIM, session, "t", 0, -1, 5)
    known = log.must(TOPOLOGY, "t", 2, first, -1, "", "one")
    topic = log.group.topics["t"]
    assert (topic.id, topic.count, topic.first_count, topic.offset) == ("one", 2, 2, known)
    assert log.say(TOPOLOGY, "t", 2, known, -1, "", "one") == "same"
    assert log.say(TOPOLOGY, "t", 2, known) == "same"
    assert log.say(TOPOLOGY, "t", 1, known, -1, "", "one") == "token"
    grown = log.must(TOPOLOGY, "t", 3, known)
    assert (topic.id, topic.count, topic.first_count) == ("one", 3, 2)
    assert (log.partition().epoch, log.partition().position) == (epoch, 5)
    log.must(TOPOLOGY, "u", 1, -1, -1, "", "two")
    assert (log.group.topics["u"].id, topic.offset) == ("two", grown)


def test_an_id_where_none_was_known_excuses_no_smaller_count() -> None:
    """F9.1, F9.2: only another id than the known one says that the topic was recreated."""
    log = Log()
    first = log.must(TOPOLOGY, "t", 4, -1)
    session = log.join()
    epoch = log.must(CLAIM, session, "t", 3, -1, 5)
    assert log.say(TOPOLOGY, "t", 2, first, -1, "", "one") == "token"
    token = log.pause()
    assert log.say(TOPOLOGY, "t", 2, first, token, "", "one") == "held"
    log.must(RELEASE, session, epoch, -1)
    log.must(TOPOLOGY, "t", 2, first, token, "", "one")
    assert (log.group.topics["t"].id, log.group.topics["t"].first_count) == ("one", 4)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_topic_made_anew(count: int) -> None:
    """F9.10, F9.3, F6.5: all of it free, whatever the count; every position is forgotten, the first count is 0."""
    log = Log()
    shape = log.must(TOPOLOGY, "t", 4, -1, -1, "", "one")
    elsewhere = log.must(TOPOLOGY, "u", 4, -1, -1, "", "two")
    session = log.join()
    # Of the same topic: two partitions and the whole. Of another topic: a partition that stays owned all the time.
    low = log.must(CLAIM, session, "t", 0, -1, 5)
    high = log.must(CLAIM, session, "t", 3, -1, 6)
    whole = log.must(CLAIM, session, "t", -1, -1)
    other = log.must(CLAIM, session, "u", 0, -1, 7)
    pin = log.must(CLAIM, session, "", -1, -1)
    anew = (TOPOLOGY, "t", count, shape, -1, "", "three")
    assert log.say(TOPOLOGY, "t", count, elsewhere, -1, "", "three") == "observed"
    for epoch in (low, high, whole):
        assert log.say(*anew) == "held"
        assert log.release(session, epoch, attempts=1, progress=b"p", parked="DataTopicRecreated") == "accepted"
    assert log.partition(3).parked == "DataTopicRecreated"
    released = log.last
    at = log.must(*anew)
    for number in (0, 3):
        assert log.partition(number) == Partition(generation=1, version=at, last_owner=session)
    assert log.partition(-1) == Partition(version=released, last_owner=session)
    assert (log.partition(0, "u").owner, log.partition(0, "u").epoch) == (session, other)
    assert log.partition(-1, "").epoch == pin
    topic = log.group.topics["t"]
    assert (topic.count, topic.first_count, topic.offset, topic.id) == (count, 0, at, "three")
    assert log.say(CLAIM, session, "t", 0, at) == "start"
    log.must(CLAIM, session, "t", 0, at, 0)
    grown = log.must(TOPOLOGY, "t", 10, at)
    assert (topic.count, topic.first_count, topic.offset) == (10, 0, grown)


def test_a_topic_made_anew_may_need_a_pause() -> None:
    """F9.10: where the config says `fail`, and only there; a pause without its token is none."""
    log = Log()
    shape = log.must(TOPOLOGY, "t", 4, -1, -1, "", "one")
    assert log.config(on_topic_recreated="fail") == "accepted"
    session = log.join()
    epoch = log.must(CLAIM, session, "t", 0, -1, 5)
    assert log.say(TOPOLOGY, "t", 4, shape, -1, "", "two") == "token"
    token = log.pause()
    assert log.say(TOPOLOGY, "t", 4, shape, token - 1, "", "two") == "token"
    assert log.say(TOPOLOGY, "t", 4, shape, token, "", "two") == "held"
    log.must(RELEASE, session, epoch, -1)
    second = log.must(TOPOLOGY, "t", 4, shape, token, "", "two")
    log.must(PAUSE, token, token, 0)
    assert log.say(TOPOLOGY, "t", 4, second, token, "", "three") == "token"
    for said in ("earliest", ""):
        assert log.config(on_topic_recreated=said) == "accepted"
        second = log.must(TOPOLOGY, "t", 4, second, -1, "", f"after {said}")


# ---------------------------------------------------------------------------------------------------------------------
# GroupConfig


def test_deleted() -> None:
    """F0, F9.4, F9.5: no live session; topics and partitions go, no mode, no pause, then only config and notes."""
    log = Log()
    session, epoch = log.owner()
    log.must(CLAIM, session, "t", -1, -1)
    log.pause()
    assert log.say(CONFIG, 0, -1, 0, True) == "observed"
    assert log.say(CONFIG, -1, -1, 0, True) == "sessions"
    assert log.release(session, epoch, parked="why") == "accepted"
    log.must(LEAVE, session)
    gone = log.must(CONFIG, -1, -1, 2, True)
    assert (log.group.topics, log.group.partitions) == ({}, {})
    assert (log.group.mode, log.group.paused, log.group.pause_change, log.group.deleted_at) == (0, False, gone, gone)
    assert log.group.config_offset == gone
    for number, fields in (
        (JOIN, ("c", INSTANCE, 1, 1000, [])),
        (HEARTBEAT, (session, 0)),
        (LEAVE, (session,)),
        (EVICT, (session, 0, 0)),
        (CLAIM, (session, "t", 0, -1)),
        (RELEASE, (session, 0, -1)),
        (GRANT, (session, [[0, 0, 0, 0]])),
        (PAUSE, (gone, -1, 0)),
        (MOVE, (0, [])),
        (TOPOLOGY, ("t", 9, gone)),
        (STEP_DOWN, (session, -1)),
        (SEEK, (session, 0, 0)),
    ):
        assert log.say(number, *fields) == "deleted"
    log.must(NOTE, -1, "k")
    log.must(CONFIG, gone, -1, 0)
    assert (log.group.deleted_at, log.group.pause_change) == (gone, gone)
    log.join(mode=2)
    assert log.group.mode == 2


def test_a_revived_group_begins_above_all_that_was() -> None:
    """F9.1, F9.5 and section 5: generations begin after the deletion; late copies of old records find nothing."""
    log = Log()
    shape = (TOPOLOGY, "t", 4, -1, -1, "", "one")
    first = log.must(*shape)
    session = log.join()
    epoch = log.must(CLAIM, session, "t", 0, -1, 5)
    log.must(SEEK, session, epoch, 7)
    grown = (TOPOLOGY, "t", 5, first)
    log.must(*grown)
    log.must(LEAVE, session)
    late = (PAUSE, -1, -1, 5000)
    gone = log.must(CONFIG, -1, -1, 0, True)
    again = log.must(CONFIG, gone, -1, 0, True)
    assert log.group.deleted_at == again
    assert log.say(CONFIG, gone, -1, 0) == "observed"
    log.must(CONFIG, again)
    for copy in (shape, grown, late, (TOPOLOGY, "t", 4, gone)):
        assert log.say(*copy) == "observed"
    session = log.join()
    assert log.say(CLAIM, session, "t", 0, -1, 5) == "topology"
    log.must(TOPOLOGY, "t", 4, again)
    epoch = log.must(CLAIM, session, "t", 0, -1, 5)
    whole = log.must(CLAIM, session, "t", -1, -1)
    assert log.partition() == Partition(
        owner=session, epoch=epoch, position=5, generation=again + 1, version=epoch, floor=5, attempts=1
    )
    assert log.partition(-1) == Partition(owner=session, epoch=whole, generation=again + 1, version=whole)
    token = log.must(PAUSE, again, -1, 5000)
    moved = log.must(MOVE, token, [["t", 3, -1, 9]])
    assert log.partition(3) == Partition(position=9, generation=again + 2, version=moved)


def test_a_group_that_never_was_may_be_deleted() -> None:
    """F9.5: the record creates it; nothing else asks for a state of before."""
    log = Log()
    gone = log.must(CONFIG, -1, -1, 0, True)
    assert (log.group.deleted_at, log.group.pause_change) == (gone, gone)
    assert log.say(JOIN, "c", INSTANCE, 1, 1000, []) == "deleted"


def test_change_of_mode() -> None:
    """F9.6, F6.5, F1.6: needs a pause, its token and free partitions; ends all sessions, a new generation for all."""
    log = Log()
    session, epoch = log.owner()
    log.must(CLAIM, session, "t", -1, -1)
    assert log.say(CONFIG, -1, -1, 2) == "token"
    token = log.pause()
    assert log.say(CONFIG, -1, token - 1, 2) == "token"
    assert log.say(CONFIG, -1, token, 2) == "held"
    same = log.must(CONFIG, -1, -1, 1)
    assert log.release(session, epoch, position=100, attempts=1, in_flight=2, progress=b"p", parked="why") == "accepted"
    released = log.last
    log.must(CONFIG, same, token, 2)
    assert (log.group.mode, log.group.sessions, log.group.paused) == (2, {}, True)
    assert log.partition() == Partition(position=100, generation=1, version=released, last_owner=session)
    assert (log.partition(-1).generation, log.partition(-1).owner) == (0, -1)


def test_a_group_without_a_mode_takes_it() -> None:
    """F9.6: no pause needed; the first Join then has to fit (F1.2)."""
    log = Log()
    log.must(CONFIG, -1, -1, 2)
    assert log.say(JOIN, "c", INSTANCE, 1, 1000, []) == "mode"


def test_settings_that_guide_members_change_nothing_else() -> None:
    """4.2: the fold reads mode, deleted and on_topic_recreated; the rest stands in the config alone."""
    log = Log()
    log.owner()
    assert log.config(failover_ms=700, lag_weighted=True, release_behind_ms=9, max_deliver=3, by="me") == "accepted"
    fields = log.group.config.fields
    assert (fields["failover_ms"], fields["lag_weighted"], fields["release_behind_ms"]) == (700, True, 9)
    assert log.partition().version != log.last
    assert log.oracle.state_digest(GROUP) != 0
    assert log.say(STEP_DOWN, NOW, -1) == "session"
