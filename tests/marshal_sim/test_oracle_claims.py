"""The oracle alone on rules 4 to 6 (PROTOCOL.md 5): claims, grants, releases, parked partitions, seeks."""

import pytest

from marshal_sim.oracle.oracle import Partition, Verdict
from tests.support.oracle_log import CLAIM, GRANT, GROUP, HEARTBEAT, LEAVE, MOVE, NOW, RELEASE, SEEK, TOPOLOGY, Log
from tests.support.wire import record

# ---------------------------------------------------------------------------------------------------------------------
# Rule 4: claims


def test_claim() -> None:
    """F4.1, F4.2, F4.3, F4.4, F4.5: reasons in their order; a start is read only without a position."""
    log = Log()
    session = log.join()
    assert log.say(CLAIM, NOW, "t", 0, -1, 5) == "session"
    assert log.say(CLAIM, session, "t", 0, -1, 5) == "topology"
    assert log.say(CLAIM, session, "t", -1, -1) == "topology"
    log.must(TOPOLOGY, "t", 2, -1)
    assert log.say(CLAIM, session, "t", 2, -1, 5) == "topology"
    assert log.say(CLAIM, session, "t", 0, 0, 5) == "observed"
    assert log.say(CLAIM, session, "t", 0, -1) == "start"
    assert log.group.partitions == {}
    epoch = log.must(CLAIM, session, "t", 0, -1, 5)
    assert log.partition() == Partition(owner=session, epoch=epoch, position=5, version=epoch, floor=5, attempts=1)
    assert log.say(CLAIM, session, "t", 0, epoch, 9) == "held"
    released = log.must(RELEASE, session, epoch, -1, NOW)
    again = log.must(CLAIM, session, "t", 0, released, 99)
    assert (log.partition().position, log.partition().successor, log.partition().epoch) == (5, -1, again)
    log.pause()
    assert log.say(CLAIM, session, "t", 7, 0) == "paused"


def test_every_claim_counts_a_delivery_at_least_once() -> None:
    """F4.5: attempts + 1 on what the release or the dead owner left; progress, lag and in flight stay."""
    log = Log()
    session, epoch = log.owner()
    assert log.release(session, epoch, position=110, attempts=4, in_flight=3, progress=b"p") == "accepted"
    log.must(CLAIM, session, "t", 0, log.last)
    part = log.partition()
    assert (part.attempts, part.in_flight, part.progress, part.floor) == (5, 3, b"p", 110)
    version = log.last
    log.must(LEAVE, session)
    assert (part.attempts, part.floor, part.progress) == (5, -1, b"p")
    log.must(CLAIM, log.join(), "t", 0, version)
    assert (part.attempts, part.floor, part.progress) == (6, 110, b"p")


def test_a_claim_at_most_once_counts_nothing() -> None:
    """F4.5: attempts grow in an at-least-once group only; the claim's beginning is noted in both."""
    log = Log()
    log.owner(mode=2)
    assert (log.partition().attempts, log.partition().floor) == (0, 100)


def test_claims_without_positions() -> None:
    """F4.1, F4.4, F4.5: a whole topic asks for the topic, the pin for nothing; neither has a position or figures."""
    log = Log()
    session = log.join()
    pin = log.must(CLAIM, session, "", -1, -1, 77)
    assert log.partition(-1, "") == Partition(owner=session, epoch=pin, version=pin)
    log.must(TOPOLOGY, "t", 1, -1)
    whole = log.must(CLAIM, session, "t", -1, -1)
    log.must(HEARTBEAT, session, 0, [[whole, 9, 9, 9, 9, b"p"]])
    assert log.say(SEEK, session, whole, 5) == "claim"
    assert (
        log.release(
            session, whole, position=50, observed=7, give=5, attempts=2, in_flight=2, progress=b"p", parked="why"
        )
        == "accepted"
    )
    assert log.partition(-1) == Partition(version=log.last, last_owner=session)
    log.must(CLAIM, session, "t", -1, log.last)


def test_a_rejected_claim_never_wins_later() -> None:
    """F4.6: the claim that lost names a version that is gone."""
    log = Log()
    session, epoch = log.owner()
    other = log.join("d")
    late = (CLAIM, other, "t", 0, -1, 5)
    assert log.say(*late) == "held"
    log.must(RELEASE, session, epoch, 100)
    assert log.say(*late) == "observed"


# ---------------------------------------------------------------------------------------------------------------------
# Rule 5: grants


def test_reasons_of_grants() -> None:
    """F5.1: the record's reasons in their order, then those of a range in theirs."""
    log = Log()
    session, epoch = log.owner(mode=2)
    whole = log.must(CLAIM, session, "t", -1, -1)
    other = log.join("d", mode=2)
    assert log.say(GRANT, NOW, [[epoch, 100, 100, 110]]) == "session"
    for claim in (NOW, whole):
        assert log.say(GRANT, session, [[claim, 99, 100, 100]]) == "claim"
    assert log.say(GRANT, other, [[epoch, 100, 100, 110]]) == "claim"
    for from_ in (99, 101):
        assert log.say(GRANT, session, [[epoch, from_, 100, 100]]) == "from"
    for start, to in ((99, 110), (110, 110), (111, 110), (100, 1_000_101)):
        assert log.say(GRANT, session, [[epoch, 100, start, to]]) == "range"
    assert log.partition().position == 100
    log.pause()
    assert log.say(GRANT, session, [[NOW, 0, 0, 0]]) == "paused"


def test_grants() -> None:
    """F5.2: the position becomes `to`, version and epoch stay, a copy is granted nothing."""
    log = Log()
    session, epoch = log.owner(mode=2)
    log.must(GRANT, session, [[epoch, 100, 105, 1_000_105]])
    part = log.partition()
    assert (part.position, part.version, part.epoch, part.floor) == (1_000_105, epoch, epoch, 100)
    assert log.say(GRANT, session, [[epoch, 100, 105, 1_000_105]]) == "from"


def test_ranges_are_judged_one_by_one() -> None:
    """F5.1, F5.2: in order, each by the position that the ranges before it left; the verdict names the granted."""
    log = Log()
    session, first = log.owner(mode=2)
    second = log.must(CLAIM, session, "t", 1, -1, 7)

    def ask(*ranges: list[int]) -> Verdict:
        return log.put(record(GROUP, GRANT, session, list(ranges), 5))

    verdict = ask(
        [NOW, 0, 0, 1],
        [first, 100, 100, 110],
        [first, 100, 100, 110],
        [second, 7, 7, 7],
        [first, 110, 112, 120],
        [second, 7, 9, 10],
    )
    assert (verdict.outcome, verdict.reason, verdict.granted) == ("accepted", "", (1, 4, 5))
    assert (log.partition().position, log.partition(1).position) == (120, 10)
    for ranges, reason in (
        (([second, 10, 9, 10], [NOW, 0, 0, 1], [first, 0, 0, 1]), "range"),
        (([first, 0, 0, 1], [second, 10, 9, 10]), "from"),
        (([NOW, 0, 0, 1], [first, 0, 0, 1]), "claim"),
    ):
        before = log.oracle.state_digest(GROUP)
        refused = ask(*ranges)
        assert (refused.outcome, refused.reason, refused.granted) == ("rejected", reason, ())
        assert log.oracle.state_digest(GROUP) == before
    assert log.put(record(GROUP, HEARTBEAT, session, 0)).granted == ()


def test_no_grants_at_least_once() -> None:
    """F5.1: `mode`, before the pause and the ranges are looked at."""
    log = Log()
    session, _ = log.owner()
    log.pause()
    assert log.say(GRANT, session, [[NOW, 100, 100, 110]]) == "mode"


# ---------------------------------------------------------------------------------------------------------------------
# Rule 6: releases and seeks


@pytest.mark.parametrize(("given", "kept"), [(120, False), (100, False), (99, True), (-1, True)])
def test_release_at_least_once(given: int, kept: bool) -> None:
    """F6.1, F6.2, F6.4: also in a pause; with a position that does not fall come attempts, in flight and progress."""
    log = Log()
    session, epoch = log.owner()
    other = log.join("d")
    log.must(HEARTBEAT, session, 0, [[epoch, 100, 7, 8, 9, b"old"]])
    log.pause()
    assert log.say(RELEASE, NOW, epoch, 0) == "session"
    assert log.say(RELEASE, other, epoch, 0) == "claim"
    # `observed` and `give` are of at-most-once groups: nobody reads them here.
    assert (
        log.release(
            session,
            epoch,
            position=given,
            successor=other,
            observed=3,
            give=-1,
            attempts=1,
            in_flight=2,
            progress=b"new",
        )
        == "accepted"
    )
    expected = Partition(version=log.last, last_owner=session, successor=other, lag=7)
    if kept:
        expected.position, expected.in_flight, expected.attempts, expected.progress = 100, 8, 9, b"old"
    else:
        expected.position, expected.in_flight, expected.attempts, expected.progress = given, 2, 1, b"new"
    assert log.partition() == expected
    assert log.say(RELEASE, session, epoch, given) == "claim"


def test_release_at_most_once_keeps_the_position() -> None:
    """F6.3: without `observed`; of the figures in flight alone is the record's."""
    log = Log()
    session, epoch = log.owner(mode=2)
    log.must(GRANT, session, [[epoch, 100, 100, 120]])
    log.must(HEARTBEAT, session, 0, [[epoch, 0, 7, 8]])
    assert log.release(session, epoch, position=500, give=110, attempts=4, in_flight=2, progress=b"p") == "accepted"
    assert log.partition() == Partition(position=120, version=log.last, last_owner=session, lag=7, in_flight=2)


@pytest.mark.parametrize("give", [100, 110, 120])
def test_give_back(give: int) -> None:
    """F6.3: the position falls to `give`, at most to where the claim began; a rejection leaves the claim as it was."""
    log = Log()
    session, epoch = log.owner(mode=2)
    log.must(GRANT, session, [[epoch, 100, 105, 120]])
    before = log.oracle.state_digest(GROUP)
    for observed in (119, 121, 0):
        assert log.release(session, epoch, observed=observed, give=50, parked="why") == "observed"
    for wrong in (-1, 0, 99, 121):
        assert log.release(session, epoch, observed=120, give=wrong, in_flight=9, parked="why") == "range"
    assert log.oracle.state_digest(GROUP) == before
    assert log.release(NOW, epoch, observed=0, give=50) == "session"
    assert log.release(session, NOW, observed=0, give=50) == "claim"
    log.pause()
    assert log.release(session, epoch, observed=120, give=give, in_flight=1) == "accepted"
    assert log.partition() == Partition(position=give, version=log.last, last_owner=session, in_flight=1)
    assert log.release(session, epoch, observed=120, give=give) == "claim"


def test_a_give_back_that_was_overtaken_is_not_final() -> None:
    """F6.3: a copy may still be accepted, for the same claim, once the position is the observed one."""
    log = Log()
    session, epoch = log.owner(mode=2)
    early = {"observed": 120, "give": 100}
    assert log.release(session, epoch, **early) == "observed"
    log.must(GRANT, session, [[epoch, 100, 100, 120]])
    assert log.release(session, epoch, **early) == "accepted"
    assert log.partition().position == 100


def test_nothing_is_given_back_from_below_the_claim() -> None:
    """F6.3: what a claim before granted stays granted: the next claim begins above it."""
    log = Log()
    session, epoch = log.owner(mode=2)
    log.must(GRANT, session, [[epoch, 100, 100, 120]])
    log.must(LEAVE, session)
    session = log.join(mode=2)
    epoch = log.must(CLAIM, session, "t", 0, epoch)
    log.must(GRANT, session, [[epoch, 120, 120, 130]])
    assert log.release(session, epoch, observed=130, give=119) == "range"
    assert log.release(session, epoch, observed=130, give=120) == "accepted"


@pytest.mark.parametrize("mode", [1, 2])
def test_parked(mode: int) -> None:
    """F4.2, F6.4, F6.5: no claim wins before a new generation; `parked` comes after `topology`, before all else."""
    log = Log()
    session, epoch = log.owner(mode)
    assert log.release(session, epoch, parked="poison") == "accepted"
    version = log.last
    assert log.partition().parked == "poison"
    for observed in (version, 0):
        assert log.say(CLAIM, session, "t", 0, observed) == "parked"
    assert log.say(CLAIM, session, "t", 4, version) == "topology"
    log.must(LEAVE, session)
    session = log.join(mode=mode)
    assert log.say(CLAIM, session, "t", 0, version) == "parked"
    token = log.pause()
    assert log.say(CLAIM, session, "t", 0, version) == "paused"
    moved = log.must(MOVE, token, [["t", 0, version, 100]], True)
    assert (log.partition().parked, log.partition().generation) == ("", 1)
    log.must(CLAIM, session, "t", 0, moved)


def test_seek() -> None:
    """F6.6: a new generation in place; owner and last owner stay, the claim goes on under a new epoch."""
    log = Log()
    session, epoch = log.owner()
    log.must(HEARTBEAT, session, 0, [[epoch, 110, 1, 2, 3, b"p"]], [NOW])
    other = log.join("d")
    whole = log.must(CLAIM, session, "t", -1, -1)
    assert log.say(SEEK, NOW, epoch, 5) == "session"
    assert log.say(SEEK, other, epoch, 5) == "claim"
    assert log.say(SEEK, session, whole, 5) == "claim"
    assert log.say(SEEK, session, NOW, 5) == "claim"
    for position in (5, 5, 500):  # back, to where it stands, forward
        generation = log.partition().generation
        seek = (SEEK, session, log.partition().epoch, position)
        at = log.must(*seek)
        assert log.partition() == Partition(
            owner=session,
            epoch=at,
            position=position,
            generation=generation + 1,
            version=at,
            floor=position,
            attempts=1,
        )
        assert log.say(*seek) == "claim"
    log.must(HEARTBEAT, session, 0, [[epoch, 1000]])
    assert log.partition().position == 500
    log.pause()
    assert log.say(SEEK, session, log.partition().epoch, 5) == "paused"


def test_no_seek_at_most_once() -> None:
    """F6.6: `mode`, after `claim` and before the pause."""
    log = Log()
    session, epoch = log.owner(mode=2)
    log.pause()
    assert log.say(SEEK, session, NOW, 5) == "claim"
    assert log.say(SEEK, session, epoch, 5) == "mode"


def test_a_seek_creates_no_group() -> None:
    """F10.3: a rejected record does not."""
    log = Log()
    assert log.say(SEEK, 0, 0, 0) == "session"
    assert log.oracle.groups == {}
