"""Rules F9.1 to F9.3, F9.5 and F9.10, sentence by sentence: what a group knows of its topics, and how it forgets them.

As in test_fold_rules.py, `DifferentialLog` asserts after every record that the rationalizer and the oracle agree and
that a rejected record left the group's digest as it was.
"""

from __future__ import annotations

import pytest

from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    ClaimingPartition,
    ClaimState,
    GroupConfig,
    Heartbeat,
    Leave,
    Move,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    StepDown,
    Topology,
)
from tests.support.differential_log import PAUSE_MS, DifferentialLog

# --- counts


def test_topology() -> None:
    """F9.1: `observed`, then `same`; a greater count is accepted at any time, from any client."""
    log = DifferentialLog()
    log.refuses(Topology("t", 2, 0), "observed")
    first = log.must(Topology("t", 2, -1))
    log.refuses(Topology("t", 2, -1), "observed")
    log.refuses(Topology("t", 3, first + 1), "observed")
    log.refuses(Topology("t", 2, first), "same")
    log.pause()
    grown = log.must(Topology("t", 100_000, first))
    topic = log.group.topics["t"]
    assert (topic.count, topic.offset) == (100_000, grown)
    # Each topic has its own.
    log.must(Topology("u", 1, -1))
    assert log.group.topics["u"].count == 1


def test_topology_that_shrinks() -> None:
    """F9.2: a pause, its token, and free partitions; what is known beyond the count is forgotten, the rest stays."""
    log = DifferentialLog()
    session = log.join()
    first = log.topology(6)
    low, high, whole = log.claim(session, 0), log.claim(session, 4), log.claim(session, -1)
    log.must(Heartbeat(session, 0, (ClaimState(high, 120, 1, 2, 3, b"p"),)))
    log.must(ReleasingPartition(session, log.claim(session, 3), 100, 9, parked="why"))
    log.refuses(Topology("t", 3, first, -1), "token")
    log.refuses(Topology("t", 3, first, log.group.pause_change), "token")
    token = log.pause()
    log.refuses(Topology("t", 3, first - 1, token), "observed")
    log.refuses(Topology("t", 3, first, token - 1), "token")
    log.refuses(Topology("t", 3, first, token), "held")
    log.release(session, high)
    shrunk = log.must(Topology("t", 3, first, token))
    assert log.state(3) == {"generation": 1, "version": shrunk, "last_owner": session, "successor": 9}
    assert log.state(4) == {"generation": 1, "version": shrunk, "last_owner": session}
    assert TopicPartition("t", 5) not in log.group.partitions
    assert (log.partition(0).epoch, log.partition(0).position, log.partition(-1).epoch) == (low, 100, whole)
    assert (log.group.paused, log.group.pause_change) == (True, token)
    # Grown again, a partition has no position: it must be given one again.
    log.must(Topology("t", 5, shrunk))
    log.must(ReleaseGroup(token, token, 0))
    log.refuses(ClaimingPartition(session, "t", 4, shrunk), "start")
    log.must(ClaimingPartition(session, "t", 4, shrunk, 3))
    assert log.partition(4).position == 3


def test_first_count_of_a_topic() -> None:
    """F9.3: fixed until another id is accepted; a first id does not change it."""
    log = DifferentialLog()
    offset = log.topology(2)
    offset = log.must(Topology("t", 4, offset))
    token = log.pause()
    offset = log.must(Topology("t", 1, offset, token))
    offset = log.must(Topology("t", 3, offset))
    offset = log.must(Topology("t", 3, offset, topic_id="one"))
    offset = log.must(Topology("t", 6, offset, topic_id="one"))
    assert (log.group.topics["t"].first_count, log.group.topics["t"].count) == (2, 6)
    log.must(Topology("t", 6, offset, topic_id="two"))
    assert (log.group.topics["t"].first_count, log.group.topics["t"].count) == (0, 6)


# --- ids


def ids(log: DifferentialLog) -> tuple[str, int, int]:
    topic = log.group.topics["t"]
    return topic.id, topic.count, topic.first_count


def test_an_id_that_was_not_known() -> None:
    """F9.1: is taken at any time, from any client, also with the same count; "" changes nothing."""
    log = DifferentialLog()
    session, epoch = log.owner()
    at = log.group.topics["t"].offset
    log.refuses(Topology("t", 4, at, topic_id=""), "same")
    log.refuses(Topology("t", 4, -1, topic_id="one"), "observed")
    log.must(GroupConfig(-1, on_topic_recreated="fail"))
    at = log.must(Topology("t", 4, at, topic_id="one"))
    assert ids(log) == ("one", 4, 4)
    assert log.partition().epoch == epoch, "nobody loses anything"
    log.refuses(Topology("t", 4, at, topic_id="one"), "same")
    log.refuses(Topology("t", 4, at), "same")
    at = log.must(Topology("t", 5, at))
    assert ids(log) == ("one", 5, 4)
    # With a smaller count it is no recreation: that needs what F9.2 needs.
    other = DifferentialLog()
    other.topology(4)
    other.refuses(Topology("t", 3, other.last, topic_id="one"), "token")
    both = DifferentialLog()
    both.must(Topology("t", 3, -1, topic_id="first"))
    assert ids(both) == ("first", 3, 3)
    log.must(Leave(session))


def test_a_smaller_count_of_a_topic_without_a_known_id() -> None:
    """F9.2: an id that comes with a smaller count is taken together with it."""
    log = DifferentialLog()
    session = log.join()
    at = log.topology(4)
    log.release(session, log.claim(session, 3), 100)
    token = log.pause()
    log.must(Topology("t", 2, at, token, topic_id="one"))
    assert ids(log) == ("one", 2, 4)
    assert (log.partition(3).position, log.partition(3).generation) == (-1, 1)


@pytest.mark.parametrize("count", [2, 4, 9])
def test_another_id(count: int) -> None:
    """F9.10: accepted at any count; every position of the topic is forgotten, every partition starts at its beginning.

    F9.2 does not apply: no pause is needed where the config does not ask for one.
    """
    log = DifferentialLog()
    session = log.join()
    at = log.must(Topology("t", 4, -1, topic_id="one"))
    log.topology(2, "u")
    kept = log.claim(session, 0, topic="u")
    epoch = log.claim(session)
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 120, 1, 2, 3, b"p"),)))
    log.must(ReleasingPartition(session, epoch, 120, 9, parked="DataTopicRecreated"))
    log.release(session, log.claim(session, 3), 130)
    whole = log.release(session, log.claim(session, -1))
    at = log.must(Topology("t", count, at, topic_id="two"))
    assert ids(log) == ("two", count, 0)
    assert log.state() == {"generation": 1, "version": at, "last_owner": session, "successor": 9}
    assert log.state(3) == {"generation": 1, "version": at, "last_owner": session}
    assert TopicPartition("t", 1) not in log.group.partitions, "what was not known stays unknown"
    assert log.state(-1) == {"version": whole, "last_owner": session}, "there is no position on a whole topic"
    assert log.partition(0, "u").epoch == kept
    assert log.partition(0, "u").generation == 0
    # Claims need a start again, and name the new version.
    log.refuses(ClaimingPartition(session, "t", 0, at), "start")
    log.claim(session, 0, 0)
    assert log.partition().position == 0


def test_another_id_while_a_partition_is_owned() -> None:
    """F9.10: `held` while any partition of the topic, or the topic itself, is owned; other topics and the pin are not
    asked. It is not final."""
    log = DifferentialLog()
    session = log.join()
    at = log.must(Topology("t", 4, -1, topic_id="one"))
    log.topology(2, "u")
    log.claim(session, 0, topic="u")
    log.claim(session, -1, topic="")
    new = Topology("t", 2, at, topic_id="two")
    for number in (0, 3, -1):
        epoch = log.claim(session, number)
        log.refuses(new, "held")
        assert ids(log) == ("one", 4, 4)
        log.release(session, epoch)
    log.must(new)
    log.refuses(new, "observed")


def test_another_id_where_the_config_says_fail() -> None:
    """F9.10: `token`, before `held`: a running pause and its token. Without the config, and with `earliest`, none."""
    log = DifferentialLog()
    session = log.join()
    at = log.must(Topology("t", 4, -1, topic_id="one"))
    epoch = log.claim(session)
    config = log.must(GroupConfig(-1, on_topic_recreated="fail"))
    log.refuses(Topology("t", 4, at, topic_id="two"), "token")
    log.refuses(Topology("t", 4, at, log.group.pause_change, topic_id="two"), "token")
    token = log.pause()
    for wrong in (-1, token - 1, token + 1):
        log.refuses(Topology("t", 4, at, wrong, topic_id="two"), "token")
    log.refuses(Topology("t", 4, at, token, topic_id="two"), "held")
    log.release(session, epoch)
    at = log.must(Topology("t", 4, at, token, topic_id="two"))
    log.must(ReleaseGroup(token, token, 0))
    for said in ("earliest", ""):
        config = log.must(GroupConfig(config, on_topic_recreated=said))  # type: ignore[arg-type]
        at = log.must(Topology("t", 4, at, topic_id=f"three {said}"))


# --- deletions


def test_deleting_a_group() -> None:
    """F9.5: `sessions`; its mode is not read; topics, partitions, mode and pause are gone, and `pause_change` moves."""
    log = DifferentialLog()
    session, epoch = log.owner()
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 120, 1, 2, 3),)))
    log.claim(session, -1)
    log.claim(session, -1, topic="")
    token = log.pause()
    log.refuses(GroupConfig(-1, token - 1, 2, deleted=True), "sessions")
    log.must(Leave(session))
    gone = log.must(GroupConfig(-1, -1, 2, deleted=True))
    assert (log.group.topics, log.group.partitions, log.group.claims) == ({}, {}, {})
    assert (log.group.mode, log.group.paused, log.group.pause_change) == (0, False, gone)
    assert (log.group.deleted_at, log.group.deleted) == (gone, True)
    # F0 holds until a GroupConfig without `deleted`.
    log.refuses(log.new_join(), "deleted")
    again = log.must(GroupConfig(gone, deleted=True))
    assert (log.group.deleted_at, log.group.pause_change) == (again, again)
    log.refuses(log.new_join(), "deleted")
    log.must(GroupConfig(again, mode=2))
    assert (log.group.mode, log.group.deleted_at, log.group.pause_change) == (2, again, again)
    log.refuses(log.new_join(mode=1), "mode")
    successor = log.join(mode=2)
    log.refuses(ClaimingPartition(successor, "t", 0, -1, 5), "topology")


def test_a_revived_group_begins_from_nothing() -> None:
    """F9.5: without a mode it takes the first Join's (F1.6); a pause is asked for with the offset of the deletion."""
    log = DifferentialLog()
    token = log.pause()
    log.must(ReleaseGroup(token, token, 0))
    gone = log.delete()
    log.must(GroupConfig(gone))
    assert log.group.mode == 0
    session = log.join(mode=2)
    assert log.group.mode == 2
    log.refuses(ReleaseGroup(-1, -1, PAUSE_MS), "observed")
    log.must(ReleaseGroup(gone, -1, PAUSE_MS))
    log.must(Leave(session))


def test_late_copies_after_a_revival() -> None:
    """F9.5: a Topology that names no earlier one, and a ReleaseGroup, are of the group that was; so are all others."""
    log = DifferentialLog()
    first = log.last + 1
    session, epoch = log.owner()
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 150),)))
    log.must(StepDown(session, -1))
    log.must(GroupConfig(-1, policy="greedy"))
    token = log.pause()
    log.release(session, epoch, 160)
    log.must(SetPosition(token, (Move("t", 0, log.partition().version, 140),), True))
    log.must(ReleaseGroup(log.group.pause_change, -1, 0))
    log.must(Leave(session))
    gone = log.must(GroupConfig(log.group.config_offset, deleted=True))
    log.must(GroupConfig(gone))
    before = log.digest()
    verdicts = log.copies(first)
    assert verdicts == [
        "accepted",
        "observed",
        *["session"] * 3,
        "observed",
        "observed",
        "session",
        "paused",
        "observed",
        "session",
        "observed",
        "observed",
    ], "of a Join alone (T14)"
    assert list(log.group.sessions) == [log.last - 12]
    log.must(Leave(log.last - 12))
    log.refuses(Topology("t", 4, -1), "observed")
    log.must(Topology("t", 4, gone))
    assert log.digest() != before


def test_generations_of_a_revived_group() -> None:
    """F9.5: greater than all before, so records from before cannot break at-most-once mode (D2)."""
    log = DifferentialLog()
    greatest, gone = -1, -1
    for _ in range(3):
        session = log.join(mode=AT_MOST_ONCE)
        log.must(Topology("t", 4, gone))
        for number in (0, 1):
            log.release(session, log.claim(session, number))
            assert log.partition(number).generation > greatest
            assert log.partition(number).generation == gone + 1
        token = log.pause()
        for _ in range(3):
            log.must(SetPosition(token, (Move("t", 0, log.partition().version, 7),)))
        log.must(SetPosition(token, (Move("t", 3, -1, 7),), True))
        assert log.partition(3).generation == gone + 2
        log.must(Leave(session))
        greatest = max(part.generation for part in log.group.partitions.values())
        gone = log.delete()
        assert greatest < gone + 1
        log.must(GroupConfig(gone))


def test_deleted_groups_cost_a_snapshot_little() -> None:
    """F9.5: only name, record and two offsets are left of each; nothing of their partitions."""
    log = DifferentialLog(exhaustive=False)
    for number in range(200):
        name = f"group-{number}"
        log.must(Topology("t", 12, -1, topic_id="one"), name)
        session = log.must(log.new_join(), name)
        for partition in range(12):
            log.must(ClaimingPartition(session, "t", partition, -1, 0), name)
        log.must(Leave(session), name)
        log.must(GroupConfig(-1, deleted=True), name)
    log.audit()
    data = snapshot.state_of(log.world)
    assert data is not None
    assert len(data) < 200 * 60
    assert {len(group.partitions) + len(group.topics) for group in log.world.groups.values()} == {0}
