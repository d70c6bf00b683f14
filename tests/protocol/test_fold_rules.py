"""Rules F0 to F3, sentence by sentence: sessions. Claims are in test_claim_rules.py, the rest in test_admin_rules.py.

Every record here goes through the rationalizer and the oracle, and `DifferentialLog` asserts after each that they agree
and that a rejected record left the group's digest as it was. So a test says only what the rule says: the verdict and
the state.
"""

from __future__ import annotations

import pytest

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
    Note,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SeekingPartition,
    SetPosition,
    StepDown,
    Topology,
)
from tests.support.differential_log import INTERVAL_MS, NEVER, DifferentialLog

ONCE_EACH: tuple[Record, ...] = (
    Join("c", bytes(16), 1, INTERVAL_MS, ()),
    Heartbeat(1, 0),
    Leave(1),
    Evict(1, 1, 0),
    ClaimingPartition(1, "t", 0, -1),
    ReleasingPartition(1, 1, -1),
    ClaimingMessages(1, (MessageRange(1, 0, 0, 1),)),
    SeekingPartition(1, 1, 0),
    ReleaseGroup(-1, -1, 0),
    SetPosition(0, ()),
    Topology("t", 1, -1),
    StepDown(1, -1),
)


# --- a deleted group


def test_a_deleted_group() -> None:
    """F0: everything but a GroupConfig and a Note is rejected, before the type's own rule is looked at."""
    log = DifferentialLog()
    gone = log.delete()
    for record in ONCE_EACH:
        log.refuses(record, "deleted")
    log.must(Note(-1, "k"))
    log.refuses(GroupConfig(-1), "observed")
    revived = log.must(GroupConfig(gone))
    log.refuses(Heartbeat(1, 0), "session")
    log.join()
    assert log.group.config_offset == revived


# --- rule 1, Join


def test_join_of_a_live_instance() -> None:
    """F1.1: a live session with the same instance_id; first of all reasons. Once it has ended, the id is free."""
    log = DifferentialLog()
    first = log.new_join("c")
    session = log.must(first)
    log.refuses(first, "instance")
    log.refuses(Join("d", first.instance_id, 2, INTERVAL_MS, (), session), "instance")
    log.must(first, "another group")
    log.must(Leave(session))
    again = log.must(first)
    assert list(log.group.sessions) == [again]


def test_join_of_another_mode() -> None:
    """F1.2: before the predecessor is looked at."""
    log = DifferentialLog()
    session = log.join(mode=1)
    log.refuses(log.new_join("d", 2, predecessor=session), "mode")
    log.refuses(log.new_join("c", 2), "mode")
    log.join("d", 1)


def test_join_that_names_another_clients_session() -> None:
    """F1.3: only a live one counts."""
    log = DifferentialLog()
    session = log.join("c")
    late = log.new_join("d", predecessor=session)
    log.refuses(late, "predecessor")
    assert list(log.group.sessions) == [session]
    log.must(Leave(session))
    log.must(late)


def test_join_begins_a_session() -> None:
    """F1.4: id and `extended` are its offset."""
    log = DifferentialLog()
    log.put(None)
    session = log.join("c", rank=3)
    assert session == 2
    live = log.session(session)
    assert (live.id, live.extended, live.mark, live.ready) == (session, session, -1, ())
    assert (live.join.client_id, live.join.rank) == ("c", 3)


def test_join_ends_its_predecessor() -> None:
    """F1.5: a live predecessor of the same client_id ends first, its claims with it; a dead one is ignored."""
    log = DifferentialLog()
    session, epoch = log.owner()
    successor = log.join("c", predecessor=session)
    assert list(log.group.sessions) == [successor]
    assert log.state() == {"position": 100, "version": epoch, "last_owner": session, "attempts": 1}
    # The same dead predecessor again, by its own client and by another; and one that never was.
    other, third = log.join("c", predecessor=session), log.join("d", predecessor=session)
    fourth = log.join("c", predecessor=NEVER)
    assert list(log.group.sessions) == [successor, other, third, fourth]
    # The predecessor is checked before it ends, so its own instance_id is still taken.
    taken = log.session(successor).join.instance_id
    log.refuses(Join("c", taken, 1, INTERVAL_MS, (), successor), "instance")
    assert successor in log.group.sessions


def test_mode_of_a_group() -> None:
    """F1.6: the last GroupConfig that names one, else the first accepted Join, permanently, also without a session."""
    log = DifferentialLog()
    log.refuses(Leave(1), "session")
    session = log.join(mode=2)
    assert log.group.mode == 2
    log.must(Leave(session))
    assert log.group.mode == 2
    log.refuses(log.new_join(mode=1), "mode")
    token = log.pause()
    named = log.must(GroupConfig(-1, token, 1))
    assert log.group.mode == 1
    # One that names none leaves the mode of the last that named one.
    log.must(GroupConfig(named))
    assert log.group.mode == 1
    log.refuses(log.new_join(mode=2), "mode")


# --- rule 2, Heartbeat


def test_heartbeat_of_a_dead_session() -> None:
    """F2.1: rejected if and only if the session is not live."""
    log = DifferentialLog()
    session, epoch = log.owner()
    log.refuses(Heartbeat(NEVER, 0, (ClaimState(epoch, 500),)), "session")
    log.must(Heartbeat(session, 0))
    log.must(Leave(session))
    log.refuses(Heartbeat(session, 1, (ClaimState(epoch, 500),), (3,)), "session")
    assert log.state() == {"position": 100, "version": epoch, "last_owner": session, "attempts": 1}


def test_heartbeat_extends() -> None:
    """F2.2: unless the group is paused and the session holds a partition >= 0; a topic and the pin do not count."""
    log = DifferentialLog()
    session, epoch = log.owner()
    whole, idle = log.join("d"), log.join("e")
    log.claim(whole, -1)
    log.claim(whole, -1, topic="")
    for beat in (session, whole, idle):
        assert log.session(beat).extended == beat
        sent = log.must(Heartbeat(beat, 0))
        assert log.session(beat).extended == sent
    before = log.session(session).extended
    log.pause()
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 150),), (9,)))
    assert log.session(session).extended == before
    assert (log.partition().position, log.session(session).ready) == (150, (9,))
    for beat in (whole, idle):
        sent = log.must(Heartbeat(beat, 0))
        assert log.session(beat).extended == sent
    log.release(session, epoch)
    sent = log.must(Heartbeat(session, 0))
    assert log.session(session).extended == sent


def test_heartbeat_moves_positions_at_least_once() -> None:
    """F2.3: unless its position is lower than the folded one, it sets position, counts and progress."""
    log = DifferentialLog()
    session, epoch = log.owner()
    second = log.claim(session, 1, 7)
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 110, 1, 2, 3, b"p"), ClaimState(second, 8))))
    held = {"owner": session, "epoch": epoch, "version": epoch, "floor": 100}
    assert log.state() == {**held, "position": 110, "lag": 1, "in_flight": 2, "attempts": 3, "progress": b"p"}
    assert log.partition(1).position == 8
    later = {**held, "position": 110, "lag": 4, "in_flight": 5, "attempts": 6, "progress": b"no list"}
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 110, 4, 5, 6, b"no list"),)))
    assert log.state() == later, "the fold does not look into the bytes"
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 109, 7, 8, 9, b"q"),)))
    assert log.state() == later
    # What is not named is 0 or empty, and an entry that comes twice counts twice.
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 120), ClaimState(epoch, 115, 1), ClaimState(epoch, 121, 2))))
    assert log.state() == {**held, "position": 121, "lag": 2}


def test_heartbeat_sets_figures_only_at_most_once() -> None:
    """F2.3: lag and in flight in an at-most-once group, also with a smaller or greater position; nothing else."""
    log = DifferentialLog()
    session, epoch = log.owner(mode=2)
    for position in (50, 100, 200):
        log.must(Heartbeat(session, 0, (ClaimState(epoch, position, position, 5, 6, b"p"),)))
        assert log.state() == {
            "owner": session,
            "epoch": epoch,
            "version": epoch,
            "position": 100,
            "floor": 100,
            "lag": position,
            "in_flight": 5,
        }


def test_heartbeat_with_other_epochs() -> None:
    """F2.4: an epoch of another session, a dead one, one that never was, a whole topic and the pin are no-ops."""
    log = DifferentialLog()
    session, dead = log.owner()
    log.release(session, dead)
    epoch = log.claim(session)
    other = log.join("d")
    whole, pin = log.claim(other, -1), log.claim(other, -1, topic="")
    before = {number: log.state(number) for number in (0, -1)} | {9: log.state(-1, "")}
    entries = tuple(ClaimState(e, 900, 1, 1, 1) for e in (dead, epoch, NEVER, whole, pin))
    log.must(Heartbeat(other, 0, entries))
    log.must(Heartbeat(session, 0, entries[:1]))
    assert before == {number: log.state(number) for number in (0, -1)} | {9: log.state(-1, "")}
    # The entries beside them count.
    log.must(Heartbeat(session, 0, entries))
    assert log.partition().position == 900


def test_heartbeat_notes_what_is_ready() -> None:
    """F2.5: list and idle time become the heartbeat's, also the empty one; what it names is not looked at."""
    log = DifferentialLog()
    session = log.join()
    log.must(Heartbeat(session, 0, (), (NEVER, 3, 3), idle_ms=77))
    assert (log.session(session).ready, log.session(session).idle_ms) == ((NEVER, 3, 3), 77)
    before = log.digest()
    log.must(Heartbeat(session, 1))
    assert (log.session(session).ready, log.session(session).idle_ms) == ((), 0)
    assert log.digest() != before


def test_a_late_heartbeat_takes_back_nothing() -> None:
    """F2.6: it extends the session, and in at-least-once mode counts if it raises the position; nothing else does."""
    log = DifferentialLog()
    session, epoch = log.owner()
    log.must(Heartbeat(session, 5, (ClaimState(epoch, 110, 1, 2, 3, b"p"),), (7,), idle_ms=77))
    before = log.state()
    late = log.must(Heartbeat(session, 4, (ClaimState(epoch, 110, 9, 9, 1),), (8,), idle_ms=5))
    assert log.state() == before
    kept = log.session(session)
    assert (kept.extended, kept.sequence, kept.ready, kept.idle_ms) == (late, 5, (7,), 77)
    log.must(Heartbeat(session, 4, (ClaimState(epoch, 111, 8, 1, 1, b"q"),)))
    assert (log.partition().position, log.partition().attempts, log.partition().progress) == (111, 1, b"q")
    # A copy of the newest one is not late, and another session has its own sequence.
    log.must(Heartbeat(session, 5, (ClaimState(epoch, 111, 1, 2, 3),), (9,)))
    assert (log.partition().progress, log.session(session).ready) == (b"", (9,))
    other = log.join("d")
    log.must(Heartbeat(other, 1, (), (3,)))
    assert log.session(other).ready == (3,)


# --- rule 3, Leave and Evict


def test_leave() -> None:
    """F3.1: rejected if the session is not live; otherwise it ends, never to live again."""
    log = DifferentialLog()
    session = log.join()
    log.refuses(Leave(NEVER), "session")
    log.must(Leave(session, "done"))
    assert not log.group.sessions
    log.refuses(Leave(session), "session")
    log.refuses(Heartbeat(session, 0), "session")


def test_evict() -> None:
    """F3.2: `session`, `observed`, `waited` in this order; any client may send it; sessions without claims end too."""
    log = DifferentialLog()
    session = log.join()
    twice = 2 * INTERVAL_MS
    log.refuses(Evict(NEVER, NEVER, 0), "session")
    log.refuses(Evict(session, session + 1, 0), "observed")
    log.refuses(Evict(session, session, twice - 1), "waited")
    # A heartbeat in between: a wait on the old extension does not count.
    beat = log.must(Heartbeat(session, 0))
    log.refuses(Evict(session, session, twice), "observed")
    log.must(Evict(session, beat, twice, "an admin without a session"))
    assert not log.group.sessions
    log.refuses(Evict(session, beat, twice), "session")
    # The interval is the one that the session named, not the sender's.
    slow = log.must(Join("s", bytes(16), 1, 600_000, ()))
    log.refuses(Evict(slow, slow, twice), "waited")
    log.must(Evict(slow, slow, 1_200_000))


@pytest.mark.parametrize("ended_by", ["Leave", "Evict", "Join"])
def test_the_end_of_a_session(ended_by: str) -> None:
    """F3.3: its claims are free, what began none, last owner the session, successor none; all else stays."""
    log = DifferentialLog()
    session, epoch = log.owner()
    other = log.join("d")
    kept = log.claim(other, 1)
    before = log.state(1)
    log.release(session, epoch, 150, successor=other)
    epoch = log.claim(session)
    whole, pin = log.claim(session, -1), log.claim(session, -1, topic="")
    log.must(Heartbeat(session, 0, (ClaimState(epoch, 160, 1, 2, 3, b"p"),)))
    assert log.partition().floor == 150
    end: dict[str, Record] = {
        "Leave": Leave(session),
        "Evict": Evict(session, log.session(session).extended, 2 * INTERVAL_MS),
        "Join": log.new_join("c", predecessor=session),
    }
    log.must(end[ended_by])
    figures = {"lag": 1, "in_flight": 2, "attempts": 3, "progress": b"p"}
    assert log.state() == {"position": 160, "version": epoch, "last_owner": session, **figures}
    assert log.state(-1) == {"version": whole, "last_owner": session}
    assert log.state(-1, "") == {"version": pin, "last_owner": session}
    assert log.state(1) == before
    assert log.partition(1).epoch == kept
