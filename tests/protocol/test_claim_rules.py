"""Rules F4 to F6, sentence by sentence: claims, grants and releases.

As in test_fold_rules.py, `Logbook` asserts after every record that heart and oracle agree and that a rejected record
left the group's digest as it was.
"""

from __future__ import annotations

import pytest

from marshal_py.protocol.identity import TopicPartition
from marshal_py.protocol.records import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Heartbeat,
    Leave,
    ReleaseGroup,
    ReleasingPartition,
)
from tests.support.logbook import GROUP, NEVER, PAUSE_MS, Logbook

# --- rule 4, ClaimingPartition


def test_claim_that_may_not_be() -> None:
    """F4.1: `session`, `paused`, `topology` in this order; a topic asks for the topic only, the pin for nothing."""
    log = Logbook()
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
    log = Logbook()
    session = log.join()
    pin = log.must(ClaimingPartition(session, "", -1, -1))
    assert log.state(-1, "") == {"owner": session, "epoch": pin, "version": pin}
    assert not log.group.topics


def test_claim_of_an_owned_partition() -> None:
    """F4.2: `held`, before the version is looked at; the live owner's own claim changes nothing."""
    log = Logbook()
    session, epoch = log.owner()
    other = log.join("d")
    before = log.state()
    for claimer in (session, other):
        log.refuses(ClaimingPartition(claimer, "t", 0, epoch, 5), "held")
        log.refuses(ClaimingPartition(claimer, "t", 0, -1, 5), "held")
    assert log.state() == before


def test_claim_of_another_version() -> None:
    """F4.3: `observed`, before the start is looked at; a version is a claim, a release or a move."""
    log = Logbook()
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
    log = Logbook()
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
    """F4.5: owner the session, epoch and version this offset, successor none."""
    log = Logbook()
    session, epoch = log.owner()
    assert log.state() == {"owner": session, "epoch": epoch, "version": epoch, "position": 100}
    log.release(session, epoch, successor=session)
    assert log.partition().successor == session
    again = log.claim(session)
    held = {"owner": session, "epoch": again, "version": again, "position": 100, "last_owner": session}
    assert log.state() == held


def test_a_rejected_claim_never_wins() -> None:
    """F4.6: a copy of it does not win when the partition is free again; nor does one that was early."""
    log = Logbook()
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
    log = Logbook()
    session, epoch = log.owner()
    other = log.join("d")
    early = ClaimingPartition(other, "t", 0, epoch)
    log.refuses(early, "held")
    before = log.digest()
    log.must(Leave(session))
    assert log.state() == {"position": 100, "version": epoch, "last_owner": session}
    assert log.digest() != before
    token = log.pause()
    log.refuses(early, "paused")
    log.must(ReleaseGroup(token, token, 0))
    assert log.partition().owner == -1
    assert log.must(early) == log.partition().epoch


# --- rule 5, ClaimingMessages


def test_grant_that_may_not_be() -> None:
    """F5.1: `session`, `claim`, `mode`, `paused`, `from`, `range`: each beats all that come after it."""
    log = Logbook()
    session, epoch = log.owner(mode=2)
    other = log.join("d", 2)
    whole, pin = log.claim(session, -1), log.claim(session, -1, topic="")
    nonsense = (0, 9, 9)
    log.refuses(ClaimingMessages(NEVER, NEVER, *nonsense), "session")
    for sender, of in ((session, NEVER), (session, whole), (session, pin), (other, epoch)):
        log.refuses(ClaimingMessages(sender, of, *nonsense), "claim")
    log.refuses(ClaimingMessages(session, epoch, 99, 9, 9), "from")
    log.refuses(ClaimingMessages(session, epoch, 101, 101, 102), "from")
    for start, to in ((99, 110), (110, 110), (111, 110), (100, 1_000_101), (100, 100)):
        log.refuses(ClaimingMessages(session, epoch, 100, start, to), "range")
    assert log.partition().position == 100
    log.must(ClaimingMessages(session, epoch, 100, 100, 101))
    token = log.pause()
    log.refuses(ClaimingMessages(session, epoch, *nonsense), "paused")
    log.refuses(ClaimingMessages(session, whole, *nonsense), "claim")
    log.must(ReleaseGroup(token, token, 0))
    log.must(ClaimingMessages(session, epoch, 101, 2_000_000, 3_000_000))


def test_no_grant_at_least_once() -> None:
    """F5.1: `mode` comes after `claim` and before `paused`."""
    log = Logbook()
    session, epoch = log.owner(mode=1)
    log.pause()
    log.refuses(ClaimingMessages(session, NEVER, 0, 9, 9), "claim")
    log.refuses(ClaimingMessages(session, epoch, 0, 9, 9), "mode")


def test_grant_accepted() -> None:
    """F5.2: position = `to`; [from, start) is skipped; good once, and good although the claim is lost then."""
    log = Logbook()
    session, epoch = log.owner(mode=2)
    other = log.join("d", 2)
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 0, 1, 2, 3),)))
    grant = ClaimingMessages(session, epoch, 100, 105, 120)
    log.must(grant)
    held = {"owner": session, "epoch": epoch, "version": epoch, "lag": 1, "in_flight": 2, "attempts": 3}
    assert log.state() == {**held, "position": 120}
    log.refuses(grant, "from")
    # What was skipped and what was granted is never granted again, to nobody.
    log.must(Leave(session))
    log.refuses(grant, "session")
    assert log.partition().position == 120
    heir = log.claim(other)
    for start in (100, 105, 119):
        log.refuses(ClaimingMessages(other, heir, start, start, 130), "from")
    log.must(ClaimingMessages(other, heir, 120, 120, 130))


# --- rule 6, ReleasingPartition


def test_release_that_may_not_be() -> None:
    """F6.1: `session`, then `claim`; a pause does not matter."""
    log = Logbook()
    session, epoch = log.owner()
    other = log.join("d")
    log.pause()
    log.refuses(ReleasingPartition(NEVER, NEVER, 0), "session")
    log.refuses(ReleasingPartition(session, NEVER, 0), "claim")
    log.refuses(ReleasingPartition(other, epoch, 0), "claim")
    log.release(session, epoch)
    log.refuses(ReleasingPartition(session, epoch, 500), "claim")
    assert log.partition().position == 100


@pytest.mark.parametrize(("mode", "given", "position"), [(1, 120, 120), (1, 100, 100), (1, 90, 100), (1, -1, 100),
                                                         (2, 120, 100), (2, 90, 100), (2, -1, 100)])  # fmt: skip
def test_release_accepted(mode: int, given: int, position: int) -> None:
    """F6.2: at least once the greater position; owner and epoch none, last owner, successor, version; figures stay."""
    log = Logbook()
    session, epoch = log.owner(mode)
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 100, 1, 2, 3),)))
    version = log.release(session, epoch, given, successor=NEVER)
    assert log.state() == {
        "position": position, "version": version, "last_owner": session, "successor": NEVER,
        "lag": 1, "in_flight": 2, "attempts": 3,
    }  # fmt: skip


def test_release_of_a_whole_topic_and_of_the_pin() -> None:
    """F6.2: there is no position on these."""
    log = Logbook()
    session, _ = log.owner()
    for topic in ("t", ""):
        version = log.release(session, log.claim(session, -1, topic=topic), 50, successor=7)
        assert log.state(-1, topic) == {"version": version, "last_owner": session, "successor": 7}


def test_names_of_the_group() -> None:
    """F10.1: what one group says changes no other, although all stand in one log."""
    log = Logbook()
    session, epoch = log.owner()
    for record in (Leave(session), ReleasingPartition(session, epoch, 500), Heartbeat(session, 0)):
        log.refuses(record, "session", "other")
    log.must(ReleaseGroup(-1, -1, PAUSE_MS), "other")
    assert not log.world.groups[GROUP].paused
