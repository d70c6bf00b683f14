"""Late copies (L9): every type of record again, right after the original and at the end of a group's life.

`DifferentialLog` asserts that a copy which is rejected leaves the group as it was; the tests say which copies are
accepted.
"""

from __future__ import annotations

from marshal_py.protocol.wire.records import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    GroupConfig,
    Heartbeat,
    Leave,
    MessageRange,
    Move,
    Note,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    StepDown,
    Topology,
)
from tests.support.differential_log import PAUSE_MS, DifferentialLog


def test_late_copies_are_harmless() -> None:
    """F10.1: a copy of every record of a group's life, at its end: no session lives, and positions stay.

    Two kinds of copies are accepted. A Join begins a session that owns nothing, and the client that sent it ends it
    (T14). A Note changes nothing.
    """
    log = DifferentialLog()
    first = log.last + 1
    session, epoch = log.owner()
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 150),), (3,)))
    log.must(StepDown(session, -1))
    log.must(Note(session, "k"))
    log.must(GroupConfig(-1, policy="greedy"))
    log.release(session, epoch, 160)
    token = log.pause()
    version = log.partition().version
    log.must(SetPosition(token, (Move("t", 0, version, 140),), True))
    log.claim(session)
    log.must(Leave(session))
    before = log.state()
    verdicts = log.copies(first)
    assert log.state() == before
    assert verdicts == [
        "accepted",
        "observed",
        "session",
        "session",
        "session",
        "accepted",
        "observed",
        "session",
        "observed",
        "paused",
        "session",
        "session",
    ]


def test_copies_right_after_the_original() -> None:
    """F10.1: each record of a session's life twice; only those that set what is set already are accepted again."""
    log = DifferentialLog()
    join = log.new_join(mode=2)
    session = log.must(join)
    log.refuses(join, "instance")
    log.must(topology := Topology("t", 4, -1))
    log.refuses(topology, "observed")
    claim = ClaimingPartition(session, "t", 0, -1, 100)
    epoch = log.must(claim)
    log.refuses(claim, "held")
    log.must(grant := ClaimingMessages(session, (MessageRange(epoch, 100, 100, 110),)))
    log.refuses(grant, "from")
    log.must(beat := Heartbeat(session, 0, (ClaimState(epoch, 103, 1, 1, 1),), (9,)))
    state = log.state()
    log.must(beat)
    assert log.state() == state
    log.must(mark := StepDown(session, -1))
    log.refuses(mark, "observed")
    log.must(release := ReleasingPartition(session, epoch, -1, observed=110, give=105))
    log.refuses(release, "claim")
    log.must(pause := ReleaseGroup(-1, -1, PAUSE_MS))
    log.refuses(pause, "observed")
    log.must(moved := SetPosition(log.group.pause_change, (Move("t", 0, log.partition().version, 7),)))
    log.refuses(moved, "observed")
    log.must(config := GroupConfig(-1))
    log.refuses(config, "observed")
    log.must(leave := Leave(session))
    log.refuses(leave, "session")
