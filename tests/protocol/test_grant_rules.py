"""Rules F5, F6.3 and F6.6, sentence by sentence: grants in at-most-once mode, what is given back, and seeks.

As in test_fold_rules.py, `DifferentialLog` asserts after every record that the rationalizer and the oracle agree, on
the granted ranges too, and that a rejected record left the group's digest as it was.
"""

from __future__ import annotations

import pytest

from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Evict,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    MessageRange,
    Move,
    ReleaseGroup,
    ReleasingPartition,
    SeekingPartition,
    SetPosition,
)
from tests.support.differential_log import GROUP, INCARNATION, NEVER, DifferentialLog


def ask(session: int, *ranges: tuple[int, int, int, int], nonce: int = 0) -> ClaimingMessages:
    """(epoch, from, start, to) each."""
    return ClaimingMessages(session, tuple(MessageRange(*wanted) for wanted in ranges), nonce)


def granted(log: DifferentialLog, record: ClaimingMessages) -> tuple[int, ...]:
    """Which of its ranges are granted; the record is accepted."""
    verdict = log.put(codec.encode(record, GROUP, INCARNATION))
    assert verdict.accepted, verdict.reason
    return verdict.granted


def give(session: int, epoch: int, observed: int, back_to: int, **fields: object) -> ReleasingPartition:
    return ReleasingPartition(session, epoch, -1, observed=observed, give=back_to, **fields)  # type: ignore[arg-type]


# --- rule 5, ClaimingMessages


def test_grant_that_may_not_be() -> None:
    """F5.1: `session`, `mode`, `paused` for the record, then `claim`, `from`, `range`: each beats all that follow."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    other = log.join("d", 2)
    whole, pin = log.claim(session, -1), log.claim(session, -1, topic="")
    nonsense = (0, 9, 9)
    log.refuses(ask(NEVER, (NEVER, *nonsense)), "session")
    for sender, of in ((session, NEVER), (session, whole), (session, pin), (other, epoch)):
        log.refuses(ask(sender, (of, *nonsense)), "claim")
    log.refuses(ask(session, (epoch, 99, 9, 9)), "from")
    log.refuses(ask(session, (epoch, 101, 101, 102)), "from")
    for start, to in ((99, 110), (110, 110), (111, 110), (100, 1_000_101), (100, 100)):
        log.refuses(ask(session, (epoch, 100, start, to)), "range")
    assert log.partition().position == 100
    log.must(ask(session, (epoch, 100, 100, 101)))
    token = log.pause()
    log.refuses(ask(session, (epoch, *nonsense)), "paused")
    log.refuses(ask(session, (NEVER, *nonsense)), "paused")
    log.refuses(ask(NEVER, (epoch, *nonsense)), "session")
    log.must(ReleaseGroup(token, token, 0))
    log.must(ask(session, (epoch, 101, 2_000_000, 3_000_000)))


def test_no_grant_at_least_once() -> None:
    """F5.1: `mode` comes before `paused` and before any range is looked at."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=1)
    for _ in range(2):
        for of in (NEVER, epoch):
            log.refuses(ask(session, (of, 0, 9, 9)), "mode")
            log.refuses(ask(session, (of, 100, 100, 101)), "mode")
        log.pause()


def test_ranges_are_judged_one_by_one() -> None:
    """F5.1: some may be refused while others are granted, each as of the ranges before it."""
    log = DifferentialLog()
    session, first = log.owner(mode=2)
    second, third = log.claim(session, 1, 7), log.claim(session, 2, 0)
    wanted = ask(
        session,
        (first, 99, 99, 120),
        (second, 7, 9, 20),
        (NEVER, 0, 0, 1),
        (third, 0, 0, 5),
        (third, 5, 5, 9),
        (third, 0, 0, 5),
        (second, 20, 20, 20),
    )
    assert granted(log, wanted) == (1, 3, 4)
    assert [log.partition(number).position for number in range(3)] == [100, 20, 9]
    # All refused: the reason is that of the first, whatever the others say.
    log.refuses(ask(session, (first, 99, 99, 120), (NEVER, 0, 0, 1)), "from")
    log.refuses(ask(session, (NEVER, 0, 0, 1), (first, 99, 99, 120)), "claim")
    log.refuses(ask(session, (second, 20, 20, 20), (NEVER, 0, 0, 1)), "range")
    assert granted(log, ask(session, (first, 100, 100, 101))) == (0,)


def test_a_claim_of_another_session_among_the_ranges() -> None:
    """F5.1: only that one is refused."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    other = log.join("d", 2)
    theirs = log.claim(other, 1, 0)
    assert granted(log, ask(session, (theirs, 0, 0, 10), (epoch, 100, 100, 110))) == (1,)
    assert log.partition(1).position == 0


def test_grant_accepted() -> None:
    """F5.2: position = `to`; [from, start) is skipped; good once, and good although the claim is lost then."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    other = log.join("d", 2)
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 0, 1, 2),)))
    grant = ask(session, (epoch, 100, 105, 120))
    assert granted(log, grant) == (0,)
    held = {"owner": session, "epoch": epoch, "version": epoch, "lag": 1, "in_flight": 2, "floor": 100}
    assert log.state() == {**held, "position": 120}
    log.refuses(grant, "from")
    # What was skipped and what was granted is never granted again, to nobody.
    log.must(Leave(session))
    log.refuses(grant, "session")
    assert log.partition().position == 120
    successor = log.claim(other)
    for start in (100, 105, 119):
        log.refuses(ask(other, (successor, start, start, 130)), "from")
    log.must(ask(other, (successor, 120, 120, 130)))


def test_a_copy_grants_nothing_twice() -> None:
    """F5.2: also of a record that was granted in part, and of one whose refused range fits by now."""
    log = DifferentialLog()
    session, first = log.owner(mode=2)
    second = log.claim(session, 1, 0)
    both = ask(session, (first, 100, 100, 110), (second, 5, 5, 9), nonce=7)
    assert granted(log, both) == (0,)
    log.refuses(both, "from")
    assert granted(log, ask(session, (second, 0, 0, 5))) == (0,)
    # The position of the second is now what the copy names. It grants that range for the first time.
    assert granted(log, both) == (1,)
    log.refuses(both, "from")
    assert (log.partition().position, log.partition(1).position) == (110, 9)


# --- F6.3, what a Release gives back


def test_a_release_gives_back() -> None:
    """F6.3: position = `give`; the next owner is granted again what the release gave back, and nothing below it."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    log.must(ask(session, (epoch, 100, 100, 150)))
    version = log.must(give(session, epoch, 150, 120, reason="hand-over", in_flight=4, attempts=9, progress=b"p"))
    assert log.state() == {"position": 120, "version": version, "last_owner": session, "in_flight": 4}
    other = log.join("d", 2)
    epoch = log.claim(other)
    assert (log.partition().floor, log.partition().position) == (120, 120)
    log.refuses(ask(other, (epoch, 119, 119, 130)), "from")
    log.must(ask(other, (epoch, 120, 120, 130)))


@pytest.mark.parametrize(
    ("back_to", "reason"), [(100, ""), (120, ""), (150, ""), (99, "range"), (-1, "range"), (151, "range"), (0, "range")]
)
def test_what_may_be_given_back(back_to: int, reason: str) -> None:
    """F6.3: from where the claim began to the position, both included; a rejection leaves the claim alive."""
    log = DifferentialLog()
    session = log.join(mode=2)
    log.topology()
    epoch = log.claim(session, 0, 70)
    log.must(ask(session, (epoch, 70, 70, 100)))
    epoch = log.claim(session) if log.release(session, epoch) else -1  # begins at 100, not where the first began
    log.must(ask(session, (epoch, 100, 100, 150)))
    before, digest = log.state(), log.digest()
    assert log.say(give(session, epoch, 150, back_to)) == (reason or "accepted")
    if reason:
        assert (log.state(), log.digest()) == (before, digest)
        log.must(ask(session, (epoch, 150, 150, 151)))
        log.must(give(session, epoch, 151, 150))
    else:
        assert log.partition().position == back_to


def test_a_release_that_saw_another_position() -> None:
    """F6.3: `observed`, before `range`; it is not final: the same record with the position of then is accepted."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    late = give(session, epoch, 150, 120)
    log.refuses(late, "observed")
    for back_to in (-1, 99, 120, NEVER):
        log.refuses(give(session, epoch, 99, back_to), "observed")
    assert log.partition().epoch == epoch
    log.must(ask(session, (epoch, 100, 100, 150)))
    log.refuses(give(session, epoch, 100, 100), "observed")
    log.must(late)
    assert log.partition().position == 120


def test_a_copy_of_a_release_gives_nothing_back() -> None:
    """F6.3: the epoch is over; what the next owner was granted stays granted."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    log.must(ask(session, (epoch, 100, 100, 150)))
    release = give(session, epoch, 150, 120)
    log.must(release)
    log.refuses(release, "claim")
    again = log.claim(session)
    log.refuses(release, "claim")
    log.must(ask(session, (again, 120, 120, 150)))
    log.refuses(release, "claim")
    assert log.partition().position == 150
    log.must(Leave(session))
    log.refuses(release, "session")


def test_a_release_that_gives_nothing_back() -> None:
    """F6.3: without `observed` the position stays and `give` is ignored; `in_flight` is set in both cases."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 0, 1, 2),)))
    log.must(ask(session, (epoch, 100, 100, 150)))
    version = log.must(ReleasingPartition(session, epoch, 500, give=100, attempts=3, progress=b"p"))
    assert log.state() == {"position": 150, "version": version, "last_owner": session, "lag": 1}
    epoch = log.claim(session)
    log.must(ReleasingPartition(session, epoch, 0, in_flight=8))
    assert (log.partition().position, log.partition().in_flight) == (150, 8)


def test_a_pause_does_not_keep_anybody_from_giving_back() -> None:
    """F6.1, F6.3: a pause does not matter; after it the admin sees what was given back."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    log.must(ask(session, (epoch, 100, 100, 150)))
    token = log.pause()
    log.must(give(session, epoch, 150, 110, parked="why"))
    assert (log.partition().position, log.partition().parked) == (110, "why")
    log.must(ReleaseGroup(token, token, 0))


# --- F6.6, SeekingPartition


def test_seek_that_may_not_be() -> None:
    """F6.6: `session`, `claim`, `mode`, `paused` in this order; a whole topic and the pin have no position."""
    log = DifferentialLog()
    session, epoch = log.owner()
    other = log.join("d")
    whole, pin = log.claim(session, -1), log.claim(session, -1, topic="")
    log.refuses(SeekingPartition(NEVER, epoch, 5), "session")
    for of in (NEVER, whole, pin):
        log.refuses(SeekingPartition(session, of, 5), "claim")
    log.refuses(SeekingPartition(other, epoch, 5), "claim")
    log.pause()
    log.refuses(SeekingPartition(session, NEVER, 5), "claim")
    log.refuses(SeekingPartition(session, epoch, 5), "paused")
    once = DifferentialLog()
    session, epoch = once.owner(mode=2)
    once.refuses(SeekingPartition(session, NEVER, 5), "claim")
    once.refuses(SeekingPartition(session, epoch, 5), "mode")
    once.pause()
    once.refuses(SeekingPartition(session, epoch, 5), "mode")


@pytest.mark.parametrize("to", [5, 100, 130, 10**6])
def test_seek_accepted(to: int) -> None:
    """F6.6: a new generation at the given position, attempts 1, under a new epoch; the owner stays."""
    log = DifferentialLog()
    session, epoch = log.owner()
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 130, 1, 2, 3, b"p"),)))
    at = log.must(SeekingPartition(session, epoch, to))
    assert log.state() == {
        "owner": session,
        "epoch": at,
        "version": at,
        "position": to,
        "floor": to,
        "generation": 1,
        "attempts": 1,
    }
    assert log.session(session).epochs == {at}
    assert list(log.group.claims) == [at]
    log.refuses(ClaimingPartition(session, "t", 0, at), "held")
    log.must(Heartbeat(session, 0, (ClaimState(at, to + 1),)))
    log.must(ReleasingPartition(session, at, to + 2))
    assert log.partition().position == to + 2


def test_nothing_old_undoes_a_seek() -> None:
    """F6.6: the old epoch is over: neither a heartbeat nor a release of it counts, and a copy seeks no second time."""
    log = DifferentialLog()
    session, epoch = log.owner()
    beat = Heartbeat(session, 0, (ClaimState(epoch, 130),))
    log.must(beat)
    seek = SeekingPartition(session, epoch, 50)
    at = log.must(seek)
    before = log.state()
    log.must(beat)
    log.must(Heartbeat(session, 1, (ClaimState(epoch, 500, 1, 1, 1, b"p"),)))
    log.refuses(ReleasingPartition(session, epoch, 500), "claim")
    log.refuses(seek, "claim")
    assert log.state() == before
    log.must(Heartbeat(session, 2, (ClaimState(at, 60),)))
    log.refuses(seek, "claim")
    assert (log.partition().position, log.partition().generation) == (60, 1)
    # Nor does it move the position of the next owner.
    log.must(Leave(session))
    log.claim(log.join("d"))
    log.refuses(seek, "session")
    assert log.partition().position == 60


def test_a_move_and_a_change_of_mode_know_the_version_of_a_seek() -> None:
    """F6.6: the version is the seek's offset, so what named the claim's version comes too late."""
    log = DifferentialLog()
    session, epoch = log.owner()
    at = log.must(SeekingPartition(session, epoch, 50))
    log.must(Leave(session))
    token = log.pause()
    log.refuses(SetPosition(token, (("t", 0, epoch, 7),)), "observed")  # type: ignore[arg-type]
    log.must(SetPosition(token, (("t", 0, at, 7),)))  # type: ignore[arg-type]
    assert log.partition().generation == 2
    log.must(GroupConfig(-1, token, 2))
    assert log.partition().generation == 3


# --- F2.3, F3.3, F4.5: what became of the grants of an owner that ended


def unsettled(log: DifferentialLog) -> tuple[int, int] | None:
    return log.group.unsettled(TopicPartition("t", 0))


def test_a_heartbeat_raises_the_floor() -> None:
    """F2.3: its position becomes the floor, from the floor up to the position, both included; nothing else does."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    log.must(ask(session, (epoch, 100, 100, 150)))
    for position, floor in ((99, 100), (120, 120), (119, 120), (151, 120), (150, 150)):
        log.must(Heartbeat(session, 0, (ClaimState(epoch, position),)))
        assert (log.partition().floor, log.partition().position) == (floor, 150)


def test_nothing_below_the_floor_is_given_back() -> None:
    """F6.3: what its owner has reported as handled stays granted."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    log.must(ask(session, (epoch, 100, 100, 150)))
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 120),)))
    log.refuses(give(session, epoch, 150, 119), "range")
    log.must(give(session, epoch, 150, 120))
    assert (log.partition().floor, log.partition().position) == (-1, 120)


@pytest.mark.parametrize("ends", [Leave, Evict, Join])
def test_what_is_unsettled(ends: type[Leave | Evict | Join]) -> None:
    """F3.3, F4.5: from the floor up to the position, until the next claim, whose verdict names it."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    other = log.join("d", 2)
    log.must(ask(session, (epoch, 100, 100, 150)))
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 120),)))
    extended = log.last
    assert unsettled(log) is None, "somebody owns it"
    records = {
        Leave: Leave(session),
        Evict: Evict(session, extended, 2_000),
        Join: log.new_join("c", 2, predecessor=session),
    }
    log.must(records[ends])
    assert unsettled(log) == (120, 150)
    claim = ClaimingPartition(other, "t", 0, log.partition().version)
    assert log.put(codec.encode(claim, GROUP, INCARNATION)).unsettled == (120, 150)
    again = log.last
    assert (log.partition().floor, unsettled(log)) == (150, None)
    log.must(ask(other, (again, 150, 150, 160)))
    log.must(Heartbeat(other, 0, (ClaimState(again, 160),)))
    log.must(Leave(other))
    assert unsettled(log) is None, "all of its grants were handled"


def test_a_new_generation_settles() -> None:
    """F3.3, F8.3: who moves the position knows what he does."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    log.must(ask(session, (epoch, 100, 100, 150)))
    log.must(Leave(session))
    token = log.must(ReleaseGroup(-1, -1, 60_000))
    log.must(SetPosition(token, (Move("t", 0, log.partition().version, 100),)))
    assert (log.partition().floor, unsettled(log)) == (-1, None)


def test_nothing_is_unsettled_at_least_once() -> None:
    """F3.3: the position is the lowest unfinished message, which the next owner delivers."""
    log = DifferentialLog()
    session, epoch = log.owner()
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 120),)))
    assert (log.partition().floor, log.partition().position) == (100, 120)
    log.must(Leave(session))
    assert (log.partition().floor, unsettled(log)) == (-1, None)
