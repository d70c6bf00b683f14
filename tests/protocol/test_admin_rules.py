"""Rules F7 to F10, sentence by sentence: pauses, positions, topology, config, and that nothing else changes the world.

As in test_fold_rules.py, `DifferentialLog` asserts after every record that the rationalizer and the oracle agree and
that a rejected record left the group's digest as it was.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from marshal_py.protocol.fold.rationalizer import Outcome
from marshal_py.protocol.policy import candidate_order
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, TopicPartition
from marshal_py.protocol.wire.records import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Genesis,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    MessageRange,
    Move,
    Note,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SeekingPartition,
    SetPosition,
    Snapshot,
    StepDown,
    Topology,
)
from tests.support import wire
from tests.support.differential_log import GROUP, INCARNATION, NEVER, PAUSE_MS, DifferentialLog, genesis


def moves(*listed: tuple[int, int, int], topic: str = "t") -> tuple[Move, ...]:
    """(partition, observed, position) each."""
    return tuple(Move(topic, partition, observed, position) for partition, observed, position in listed)


# --- rule 7, ReleaseGroup


def test_pause_that_saw_another_change() -> None:
    """F7.1: `observed`, before the token is looked at."""
    log = DifferentialLog()
    log.refuses(ReleaseGroup(0, -1, PAUSE_MS), "observed")
    assert GROUP not in log.world.groups
    token = log.pause()
    for seen in (-1, token - 1, token + 1):
        log.refuses(ReleaseGroup(seen, token, PAUSE_MS), "observed")
        log.refuses(ReleaseGroup(seen, -1, 0), "observed")


def test_a_running_pause() -> None:
    """F7.2: `paused` unless not paused, or the token, or duration 0 and waited as long as the running pause lasts."""
    log = DifferentialLog()
    token = log.must(ReleaseGroup(-1, NEVER, PAUSE_MS))
    for other in (-1, token - 1, token + 1):
        log.refuses(ReleaseGroup(token, other, 0, PAUSE_MS - 1), "paused")
        log.refuses(ReleaseGroup(token, other, 1, 2**53), "paused")
    renewed = log.must(ReleaseGroup(token, token, 2 * PAUSE_MS))
    # What was waited for on the shorter pause is not enough for the longer.
    log.refuses(ReleaseGroup(renewed, -1, 0, PAUSE_MS), "paused")
    log.must(ReleaseGroup(renewed, -1, 0, 2 * PAUSE_MS))
    assert not log.group.paused
    again = log.pause()
    log.must(ReleaseGroup(again, again, 0, 0))
    assert not log.group.paused


def test_every_change_of_a_pause_is_a_new_token() -> None:
    """F7.3: renewing, taking over and ending kill the old token; 0 on a running group kills what is in flight."""
    log = DifferentialLog()
    session, epoch = log.owner()
    first = log.pause()
    assert (log.group.pause_change, log.group.pause_duration_ms, log.group.paused) == (first, PAUSE_MS, True)
    assert log.state()["epoch"] == epoch
    log.release(session, epoch)
    renewed = log.pause(PAUSE_MS + 1)
    assert (log.group.pause_change, log.group.pause_duration_ms) == (renewed, PAUSE_MS + 1)
    log.refuses(SetPosition(first, moves((1, -1, 5))), "token")
    ended = log.must(ReleaseGroup(renewed, renewed, 0))
    assert (log.group.pause_change, log.group.paused) == (ended, False)
    log.refuses(SetPosition(renewed, moves((1, -1, 5))), "paused")
    in_flight = ReleaseGroup(ended, -1, PAUSE_MS)
    moved = log.must(ReleaseGroup(ended, -1, 0))
    assert (log.group.pause_change, log.group.paused) == (moved, False)
    log.refuses(in_flight, "observed")
    # Taking over after waiting: one record ends the pause, the next begins one's own.
    theirs = log.pause()
    waited = log.must(ReleaseGroup(theirs, -1, 0, PAUSE_MS))
    mine = log.must(ReleaseGroup(waited, -1, PAUSE_MS))
    log.refuses(ReleaseGroup(mine, theirs, PAUSE_MS), "paused")
    log.refuses(SetPosition(theirs, moves((1, -1, 5))), "token")
    assert log.group.pause_change == mine


# --- rule 8, SetPosition


def test_set_position_that_may_not_be() -> None:
    """F8.1: `paused`, `token`, `empty`, `repeats`: each beats all that come after it."""
    log = DifferentialLog()
    log.owner()
    log.refuses(SetPosition(0, ()), "paused")
    token = log.pause()
    log.refuses(SetPosition(token + 1, ()), "token")
    log.refuses(SetPosition(token, ()), "empty")
    log.refuses(SetPosition(token, moves((9, NEVER, 1), (9, NEVER, 2))), "repeats")
    log.must(SetPosition(token, (*moves((1, -1, 1)),)))
    log.must(Topology("u", 2, -1))
    # The same number in two topics is no repetition.
    log.must(SetPosition(token, (*moves((2, -1, 1)), *moves((1, -1, 1), topic="u"))))


def test_set_position_moves_all_or_nothing() -> None:
    """F8.2: `observed` for all, then `topology` for all, then `held` for all; one bad move stops the others."""
    log = DifferentialLog()
    session, epoch = log.owner()
    token = log.pause()
    good, held, outside, unseen = (1, -1, 7), (0, epoch, 7), (4, -1, 7), (2, 0, 7)
    log.refuses(SetPosition(token, moves(good, held, outside, unseen)), "observed")
    log.refuses(SetPosition(token, moves(good, held, outside)), "topology")
    log.refuses(SetPosition(token, moves(good, held)), "held")
    log.refuses(SetPosition(token, (*moves(good), Move("unknown", 0, -1, 7))), "topology")
    log.refuses(SetPosition(token, (*moves(held), Move("unknown", 0, 0, 7))), "observed")
    assert list(log.group.partitions) == [TopicPartition("t", 0)]
    log.must(Leave(session))
    moved = log.must(SetPosition(token, moves(good, held)))
    assert {log.partition(number).version for number in (0, 1)} == {moved}


def test_set_position_accepted() -> None:
    """F8.3: position, a new generation, version this offset; last owner and successor stay, the pause too."""
    log = DifferentialLog()
    session, epoch = log.owner()
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 200, 1, 2, 3, b"p"),)))
    version = log.must(ReleasingPartition(session, epoch, -1, 9, parked="why"))
    assert {"lag", "in_flight", "attempts", "progress", "parked"} <= log.state().keys()
    token = log.pause()
    moved = log.must(SetPosition(token, moves((0, version, 7), (3, -1, 0))))
    assert log.state() == {"position": 7, "generation": 1, "version": moved, "last_owner": session, "successor": 9}
    assert log.state(3) == {"position": 0, "generation": 1, "version": moved}
    again = log.must(SetPosition(token, moves((0, moved, 300))))
    assert (log.partition().generation, log.partition().position, log.partition().version) == (2, 300, again)
    assert (log.group.paused, log.group.pause_change) == (True, token)


def test_set_position_that_resumes() -> None:
    """F8.4: the pause ends and this offset becomes `pause_change`."""
    log = DifferentialLog()
    log.topology()
    token = log.pause()
    log.refuses(SetPosition(token, (), True), "empty")
    assert log.group.paused
    moved = log.must(SetPosition(token, moves((0, -1, 7)), True))
    assert (log.group.paused, log.group.pause_change, log.partition().position) == (False, moved, 7)
    log.refuses(ReleaseGroup(token, token, PAUSE_MS), "observed")


def test_which_rejections_of_set_position_are_final() -> None:
    """F8.5: `held` is not: when the owner's session ends, a copy is accepted. `token` and `observed` are."""
    log = DifferentialLog()
    session, epoch = log.owner()
    token = log.pause()
    held = SetPosition(token, moves((0, epoch, 7)))
    stale = SetPosition(token, moves((0, -1, 8)))
    other = SetPosition(token - 1, moves((0, epoch, 9)))
    log.refuses(held, "held")
    log.refuses(stale, "observed")
    log.refuses(other, "token")
    log.must(Leave(session))
    # F3.3: the end of a session leaves the version as it was.
    assert log.partition().version == epoch
    log.refuses(stale, "observed")
    log.refuses(other, "token")
    log.must(held)
    for copy in (held, stale):
        log.refuses(copy, "observed")
    log.refuses(other, "token")
    log.must(ReleaseGroup(token, token, 0))
    log.pause()
    for copy in (held, stale, other):
        log.refuses(copy, "token")
    assert log.partition().position == 7


# --- rule 9, GroupConfig, StepDown; Topology and deletions are in test_topic_rules.py


def test_config_that_saw_another() -> None:
    """F9.4: `observed`, before anything else that it says; a rejected one does not count as the last."""
    log = DifferentialLog()
    log.join()
    log.refuses(GroupConfig(0, deleted=True), "observed")
    first = log.must(GroupConfig(-1, policy="greedy"))
    log.refuses(GroupConfig(-1, mode=2), "observed")
    log.refuses(GroupConfig(first, mode=2), "token")
    second = log.must(GroupConfig(first, policy="balanced"))
    assert log.group.config is not None
    assert (log.group.config.policy, log.group.config_offset) == ("balanced", second)


def test_changing_the_mode() -> None:
    """F9.6: `token`, `held`; then every session ends, partitions >= 0 get a new generation, the mode is the new one."""
    log = DifferentialLog()
    session, epoch = log.owner()
    other = log.join("d")
    whole = log.claim(other, -1)
    log.release(session, log.claim(session, 1))
    log.refuses(GroupConfig(-1, -1, 2), "token")
    log.refuses(GroupConfig(-1, log.group.pause_change, 2), "token")
    token = log.pause()
    log.refuses(GroupConfig(-1, token - 1, 2), "token")
    log.refuses(GroupConfig(-1, token, 2), "held")
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 100, 1, 2, 3, b"p"),)))
    version = log.must(ReleasingPartition(session, epoch, -1, parked="why"))
    log.must(GroupConfig(-1, token, 2))
    assert (log.group.mode, log.group.sessions, log.group.paused) == (2, {}, True)
    # What was reported of the old generation is gone.
    assert log.state() == {"position": 100, "generation": 1, "version": version, "last_owner": session}
    assert (log.partition(1).generation, log.partition(-1).generation) == (1, 0)
    assert log.state(-1) == {"version": whole, "last_owner": other}


def test_a_mode_that_changes_nothing() -> None:
    """F9.6: the group's own mode needs no pause; a group without a mode just takes the one that is named."""
    log = DifferentialLog()
    first = log.must(GroupConfig(-1, -1, 2))
    assert log.group.mode == 2
    session = log.join(mode=2)
    log.topology()
    log.claim(session)
    log.must(GroupConfig(first, -1, 2))
    assert (list(log.group.sessions), log.partition().generation) == ([session], 0)


def test_config_clears_marks() -> None:
    """F9.7: every one of them; a rejected config clears none."""
    log = DifferentialLog()
    sessions = [log.join(name) for name in "cde"]
    marks = {session: log.must(StepDown(session, -1)) for session in sessions[:2]}
    log.refuses(GroupConfig(5), "observed")
    log.refuses(GroupConfig(-1, deleted=True), "sessions")
    assert {session: log.session(session).mark for session in marks} == marks
    log.must(GroupConfig(-1))
    assert [log.session(session).mark for session in sessions] == [-1, -1, -1]


def test_step_down() -> None:
    """F9.8: `session`, `observed`; accepted, the mark becomes this offset."""
    log = DifferentialLog()
    session = log.join()
    log.refuses(StepDown(NEVER, 0), "session")
    log.refuses(StepDown(session, 0), "observed")
    first = log.must(StepDown(session, -1))
    log.refuses(StepDown(session, -1), "observed")
    second = log.must(StepDown(session, first))
    assert log.session(session).mark == second
    log.must(Leave(session))
    log.refuses(StepDown(session, second), "session")


def test_order_of_candidates() -> None:
    """F9.9: (marked or not, mark, priority, rank, session); a marked one is last, never absent; marks own nothing."""
    log = DifferentialLog()
    named = GroupConfig(-1, policy="prioritized", priority_groups=("jobs",))
    config = log.must(named)
    plain = log.join("a", priority=1, priority_group="jobs")
    ranked = log.join("b", priority=0, rank=2, priority_group="jobs")
    late = log.join("c", priority=0, rank=2, priority_group="jobs")
    best = log.join("d", priority=0, rank=1, priority_group="jobs")
    assert candidate_order(log.group, ()) == [best, ranked, late, plain]
    log.must(StepDown(best, -1))
    assert candidate_order(log.group, ()) == [ranked, late, plain, best]
    mark = log.must(StepDown(ranked, -1))
    assert candidate_order(log.group, ()) == [late, plain, best, ranked]
    for session in (late, plain):
        log.must(StepDown(session, -1))
    assert candidate_order(log.group, ()) == [best, ranked, late, plain]
    log.must(StepDown(ranked, mark))
    assert candidate_order(log.group, ()) == [best, late, plain, ranked]
    # Guidance grants and takes nothing: the last one claims before all, a topic it never named.
    log.topology(4, "u")
    epoch = log.claim(ranked, 0, topic="u")
    log.must(replace(named, observed=config, members=("nobody",), max_members=1))
    log.must(StepDown(ranked, -1))
    assert (log.partition(0, "u").owner, log.partition(0, "u").epoch) == (ranked, epoch)
    log.must(log.new_join("z", priority_group="jobs"))


# --- rule 10, nothing else


def test_what_changes_nothing() -> None:
    """F10.1: a Note and a Snapshot are accepted and change nothing; rejected and ignored records change no group."""
    log = DifferentialLog()
    session, epoch = log.owner()
    before = log.digest()
    log.must(Note(session, "rebalance", "t", 0, 1, 2, "text"))
    log.must(Note(NEVER, "probe"))
    inner = Genesis(INCARNATION, 1, HASH_NAME, 2)
    assert log.put(codec.encode(Snapshot(inner, bytes(16), 16, 0, 1, 2, 3, b"state"), "", INCARNATION)).accepted
    for record in (Leave(NEVER), ClaimingPartition(session, "t", 0, epoch, 1), ReleaseGroup(0, -1, 1)):
        assert log.say(record) != "accepted"
    for value in (None, b"junk", genesis(), genesis(5), wire.envelope(GROUP, 3, b"?")):
        assert not log.put(value).accepted
    assert log.digest() == before


EVERY_TYPE: tuple[Record, ...] = (
    Join("c", bytes(16), 1, 1_000, ()),
    Heartbeat(1, 0),
    Leave(1),
    ClaimingPartition(1, "t", 0, -1, 0),
    ReleasingPartition(1, 3, 0),
    ClaimingMessages(1, (MessageRange(3, 0, 0, 1),)),
    SeekingPartition(1, 3, 0),
    ReleaseGroup(-1, -1, 1),
    SetPosition(0, ()),
    Topology("t", 1, -1),
    GroupConfig(-1),
    StepDown(1, -1),
    Note(-1, "k"),
)


@pytest.mark.parametrize("record", EVERY_TYPE, ids=lambda record: type(record).__name__)
def test_one_verdict_for_every_record(record: Record) -> None:
    """F10.2: accepted without a reason, or rejected or ignored with one; for any record in any state."""
    log = DifferentialLog()
    log.owner()
    for value in (codec.encode(record, GROUP, INCARNATION), codec.encode(record, "another", INCARNATION), b""):
        verdict = log.put(value)
        assert verdict.outcome in Outcome
        assert (verdict.outcome is Outcome.ACCEPTED) == (verdict.reason == "")
        assert verdict.offset == log.last


@pytest.mark.parametrize("record", EVERY_TYPE, ids=lambda record: type(record).__name__)
def test_a_group_without_an_accepted_record(record: Record) -> None:
    """F10.3: has no state; a rejected record does not create one, nor does a Note (F10.1)."""
    log = DifferentialLog()
    accepted = log.say(record) == "accepted"
    assert accepted == isinstance(record, Join | ReleaseGroup | Topology | GroupConfig | Note)
    assert (GROUP in log.world.groups) == (accepted and not isinstance(record, Note))
    assert log.put(wire.envelope("new", type(record).__struct_config__.tag, b"?")).reason == "malformed"
    assert "new" not in log.world.groups
