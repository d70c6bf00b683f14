"""Rules F4 and F6, sentence by sentence: claims and releases. Grants and what is given back are in test_grant_rules.py.

As in test_fold_rules.py, `DifferentialLog` asserts after every record that the rationalizer and the oracle agree and
that a rejected record left the group's digest as it was.
"""

from __future__ import annotations

import pytest

from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import (
    ClaimingPartition,
    ClaimState,
    GroupConfig,
    Heartbeat,
    Leave,
    Move,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    Topology,
)
from tests.support.differential_log import GROUP, NEVER, PAUSE_MS, DifferentialLog

# --- rule 4, ClaimingPartition


def test_claim_that_may_not_be() -> None:
    """F4.1: `session`, `paused`, `topology` in this order; a topic asks for the topic only, the pin for nothing."""
    log = DifferentialLog()
    session = log.join()
    log.refuses(ClaimingPartition(session, "t", 0, -1, 5), "topology")
    log.refuses(ClaimingPartition(session, "t", -1, -1), "topology")
    log.topology(2)
    log.refuses(ClaimingPartition(session, "t", 2, -1, 5), "topology")
    token = log.pause()
    log.refuses(ClaimingPartition(NEVER, "t", 2, -1, 5), "session")
    log.refuses(ClaimingPartition(session, "t", 2, -1, 5), "paused")
    log.refuses(ClaimingPartition(session, "", -1, -1), "paused")
    log.must(ReleaseGroup(token, token, 0))
    log.must(ClaimingPartition(session, "t", 1, -1, 5))
    log.must(ClaimingPartition(session, "t", -1, -1))
    assert log.must(ClaimingPartition(session, "", -1, -1)) == log.partition(-1, "").epoch


def test_the_pin_asks_for_nothing() -> None:
    """F4.1: it can be claimed in a group without any topology."""
    log = DifferentialLog()
    session = log.join()
    pin = log.must(ClaimingPartition(session, "", -1, -1))
    assert log.state(-1, "") == {"owner": session, "epoch": pin, "version": pin}
    assert not log.group.topics


def test_claim_of_an_owned_partition() -> None:
    """F4.2: `held`, before the version is looked at; the live owner's own claim changes nothing."""
    log = DifferentialLog()
    session, epoch = log.owner()
    other = log.join("d")
    before = log.state()
    for claimer in (session, other):
        log.refuses(ClaimingPartition(claimer, "t", 0, epoch, 5), "held")
        log.refuses(ClaimingPartition(claimer, "t", 0, -1, 5), "held")
    assert log.state() == before


def test_claim_of_another_version() -> None:
    """F4.3: `observed`, before the start is looked at; a version is a claim, a release or a move."""
    log = DifferentialLog()
    session = log.join()
    log.topology()
    log.refuses(ClaimingPartition(session, "t", 0, 0), "observed")
    epoch = log.claim(session)
    version = log.release(session, epoch)
    for old in (-1, epoch, version + 1):
        log.refuses(ClaimingPartition(session, "t", 0, old), "observed")
    log.must(ClaimingPartition(session, "t", 0, version))


def test_start_of_a_claim() -> None:
    """F4.4: needed and used without a position on a partition >= 0; with one it is not read."""
    log = DifferentialLog()
    session = log.join()
    log.topology()
    log.refuses(ClaimingPartition(session, "t", 0, -1), "start")
    assert TopicPartition("t", 0) not in log.group.partitions
    epoch = log.must(ClaimingPartition(session, "t", 0, -1, 0))
    assert log.partition().position == 0
    version = log.release(session, epoch, 20)
    epoch = log.must(ClaimingPartition(session, "t", 0, version, 99))
    assert log.partition().position == 20
    version = log.release(session, epoch)
    log.must(ClaimingPartition(session, "t", 0, version))
    assert log.partition().position == 20
    log.must(ClaimingPartition(session, "t", -1, -1, 77))
    log.must(ClaimingPartition(session, "", -1, -1, 77))
    assert (log.partition(-1).position, log.partition(-1, "").position) == (-1, -1)


def test_claim_accepted() -> None:
    """F4.5: owner the session, epoch and version this offset, successor none, and what began is the position."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    assert log.state() == {"owner": session, "epoch": epoch, "version": epoch, "position": 100, "floor": 100}
    log.release(session, epoch, successor=session)
    assert log.partition().successor == session
    again = log.claim(session)
    held = {"owner": session, "epoch": again, "version": again, "position": 100, "last_owner": session, "floor": 100}
    assert log.state() == held


def test_a_claim_counts_a_delivery_at_least_once() -> None:
    """F4.5: attempts + 1, for the owner may die from here on; never in an at-most-once group, nor of a whole topic."""
    log = DifferentialLog()
    first, epoch = log.owner()
    assert (log.partition().attempts, log.partition().floor) == (1, 100)
    log.must(Heartbeat(first, 0, (ClaimState(epoch, 150, attempts=4),)))
    assert log.partition().floor == 100, "where the claim began, not its present position"
    log.must(Leave(first))
    assert (log.partition().attempts, log.partition().floor) == (4, -1)
    second = log.join("d")
    epoch = log.claim(second)
    assert (log.partition().attempts, log.partition().floor) == (5, 150)
    log.must(ReleasingPartition(second, epoch, 150, attempts=2))
    log.claim(second)
    assert log.partition().attempts == 3
    for topic in ("t", ""):
        log.claim(second, -1, topic=topic)
        assert (log.partition(-1, topic).attempts, log.partition(-1, topic).floor) == (0, -1)
    once = DifferentialLog()
    session, epoch = once.owner(mode=2)
    once.release(session, epoch)
    once.claim(session)
    assert once.partition().attempts == 0


def test_attempts_are_bounded() -> None:
    """F4.5: at most 2^53, so that every later heartbeat and snapshot can say it."""
    log = DifferentialLog()
    session, epoch = log.owner()
    log.must(ReleasingPartition(session, epoch, 100, attempts=2**53))
    log.claim(session)
    assert log.partition().attempts == 2**53


def test_claim_of_a_parked_partition() -> None:
    """F4.2: `parked`, whatever version and session; the other partitions of its topic are not affected."""
    log = DifferentialLog()
    session, epoch = log.owner()
    log.must(ReleasingPartition(session, epoch, 100, parked="why"))
    other = log.join("d")
    for claimer in (session, other):
        for observed in (log.last, log.partition().version, -1, NEVER):
            log.refuses(ClaimingPartition(claimer, "t", 0, observed, 5), "parked")
    log.refuses(ClaimingPartition(NEVER, "t", 0, -1, 5), "session")
    log.refuses(ClaimingPartition(other, "t", 9, -1, 5), "topology")
    log.claim(other, 1)
    log.claim(other, -1)
    token = log.pause()
    log.refuses(ClaimingPartition(other, "t", 0, -1, 5), "paused")
    log.must(ReleaseGroup(token, token, 0))
    assert log.group.parked(TopicPartition("t", 0)) == "why"
    assert (log.group.parked(TopicPartition("t", 1)), log.group.parked(TopicPartition("t", 3))) == ("", "")


def test_a_rejected_claim_never_wins() -> None:
    """F4.6: a copy of it does not win when the partition is free again; nor does one that was early."""
    log = DifferentialLog()
    session, epoch = log.owner()
    other = log.join("d")
    lost, guess = ClaimingPartition(other, "t", 0, -1, 5), ClaimingPartition(other, "t", 1, NEVER, 5)
    log.refuses(lost, "held")
    log.refuses(guess, "observed")
    assert TopicPartition("t", 1) not in log.group.partitions
    log.release(session, epoch)
    log.refuses(lost, "observed")
    log.claim(session)
    log.must(Leave(session))
    log.refuses(lost, "observed")
    log.must(Leave(other))
    log.refuses(lost, "session")


def test_a_rejected_claim_leaves_no_trace() -> None:
    """F4.6: when what stood in its way is gone, the partition is free. Only a copy may be accepted then (T17)."""
    log = DifferentialLog()
    session, epoch = log.owner()
    other = log.join("d")
    early = ClaimingPartition(other, "t", 0, epoch)
    log.refuses(early, "held")
    before = log.digest()
    log.must(Leave(session))
    assert log.state() == {"position": 100, "version": epoch, "last_owner": session, "attempts": 1}
    assert log.digest() != before
    token = log.pause()
    log.refuses(early, "paused")
    log.must(ReleaseGroup(token, token, 0))
    assert log.partition().owner == -1
    assert log.must(early) == log.partition().epoch


# --- rule 6, ReleasingPartition


def test_release_that_may_not_be() -> None:
    """F6.1: `session`, then `claim`; a pause does not matter."""
    log = DifferentialLog()
    session, epoch = log.owner()
    other = log.join("d")
    log.pause()
    log.refuses(ReleasingPartition(NEVER, NEVER, 0), "session")
    log.refuses(ReleasingPartition(session, NEVER, 0), "claim")
    log.refuses(ReleasingPartition(other, epoch, 0), "claim")
    log.release(session, epoch)
    log.refuses(ReleasingPartition(session, epoch, 500), "claim")
    assert log.partition().position == 100


@pytest.mark.parametrize(("given", "position"), [(120, 120), (100, 100), (90, 100), (-1, 100)])
def test_release_at_least_once(given: int, position: int) -> None:
    """F6.2: at least the position: position, attempts, in flight and progress become the record's; lag stays."""
    log = DifferentialLog()
    session, epoch = log.owner()
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 100, 1, 2, 3, b"p"),)))
    # Without `observed` and with it: nothing is given back at least once.
    version = log.must(ReleasingPartition(session, epoch, given, NEVER, "why", 7, 9, 5, 6, b"q"))
    released = {"attempts": 5, "in_flight": 6, "progress": b"q"}
    held = {"attempts": 3, "in_flight": 2, "progress": b"p"}
    assert log.state() == {
        "position": position,
        "version": version,
        "last_owner": session,
        "successor": NEVER,
        "lag": 1,
        **(released if given >= 100 else held),
    }


def test_release_accepted() -> None:
    """F6.4: owner, epoch and what began none, last owner, successor, version; parked for the reason that it names."""
    log = DifferentialLog()
    session, epoch = log.owner()
    version = log.must(ReleasingPartition(session, epoch, 130, 9, parked="DataTopicRecreated"))
    assert log.state() == {
        "position": 130,
        "version": version,
        "last_owner": session,
        "successor": 9,
        "parked": "DataTopicRecreated",
    }
    assert not log.session(session).epochs
    plain = log.claim(session, 1)
    log.release(session, plain, 100)
    assert log.partition(1).parked == ""
    # A whole topic and the pin cannot be parked.
    for topic in ("t", ""):
        log.must(ReleasingPartition(session, log.claim(session, -1, topic=topic), -1, parked="why"))
        assert log.partition(-1, topic).parked == ""
        log.claim(session, -1, topic=topic)


def test_release_of_a_whole_topic_and_of_the_pin() -> None:
    """F6.2, F6.4: there is no position on these, and nothing is given back."""
    log = DifferentialLog()
    session, _ = log.owner()
    for topic in ("t", ""):
        epoch = log.claim(session, -1, topic=topic)
        version = log.must(ReleasingPartition(session, epoch, 50, 7, "", 3, 3, 1, 1, b"p"))
        assert log.state(-1, topic) == {"version": version, "last_owner": session, "successor": 7}


@pytest.mark.parametrize("ended_by", ["SetPosition", "Topology", "GroupConfig"])
def test_what_ends_that_a_partition_is_parked(ended_by: str) -> None:
    """F6.5: a new generation alone: a move, another id, another mode; no time, no session, no pause, no growth."""
    log = DifferentialLog()
    session = log.join()
    log.must(Topology("t", 4, -1, topic_id="one"))
    log.must(ReleasingPartition(session, log.claim(session), 120, attempts=2, progress=b"p", parked="why"))
    at = log.last
    log.must(Topology("t", 5, log.group.topics["t"].offset))
    log.must(Leave(session))
    token = log.pause()
    log.must(ReleaseGroup(token, token, 0))
    session = log.join()
    log.refuses(ClaimingPartition(session, "t", 0, at), "parked")
    token = log.pause()
    end: dict[str, Record] = {
        "SetPosition": SetPosition(token, (Move("t", 0, at, 120),)),
        "Topology": Topology("t", 5, log.group.topics["t"].offset, token, topic_id="two"),
        "GroupConfig": GroupConfig(-1, token, 2),
    }
    log.must(end[ended_by])
    state = log.state()
    assert (state.get("parked"), state["generation"]) == (None, 1)
    assert not {"attempts", "progress", "in_flight", "lag"} & state.keys()


def test_names_of_the_group() -> None:
    """F10.1: what one group says changes no other, although all stand in one log."""
    log = DifferentialLog()
    session, epoch = log.owner()
    for record in (Leave(session), ReleasingPartition(session, epoch, 500), Heartbeat(session, 0)):
        log.refuses(record, "session", "other")
    log.must(ReleaseGroup(-1, -1, PAUSE_MS), "other")
    assert not log.world.groups[GROUP].paused
