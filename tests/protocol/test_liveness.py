"""Signs of life of one client: PROTOCOL.md T2, T6, T9, T10 and T18 on Liveness alone."""

from __future__ import annotations

import random

from marshal_py.protocol.time import RANDOM_BITS, SENT_KEPT, Due, Liveness
from marshal_py.protocol.wire.identity import Instant

I = 3_000  # noqa: E741  the protocol calls an interval so
THIRD = I // 3


def at(ms: int) -> Instant:
    return Instant(ms, ms, ms)


def liveness(*, joined_at: int | None = 0) -> Liveness:
    """A client whose Join, sent at `joined_at`, was read."""
    found = Liveness(I, random.Random(1).randbytes)
    if joined_at is not None:
        instance = found.new_instance(at(joined_at))
        sent = found.read_join(instance)
        assert sent == at(joined_at)
        found.begin_session(sent)
    return found


def beat(one: Liveness, sent_ms: int, *, accepted: bool = True, extended: bool = True) -> int:
    """A heartbeat that was sent then and is read now."""
    sequence = one.new_sequence(at(sent_ms))
    assert one.read_heartbeat(sequence, accepted, extended)
    return sequence


def test_a_heartbeat_every_third() -> None:
    """T9: not earlier than a third after the last one was sent, and then at once; the Join counts as the first."""
    one = liveness()
    assert one.due(at(THIRD - 1)) is Due.NOTHING
    assert one.deadline_ms(at(10)) == THIRD
    assert one.due(at(THIRD)) is Due.HEARTBEAT
    one.new_sequence(at(THIRD))
    assert one.due(at(THIRD)) is Due.NOTHING
    assert one.due(at(2 * THIRD)) is Due.HEARTBEAT


def test_health_is_the_send_of_the_newest_accepted_sign() -> None:
    """T9: extending or not, but accepted; counted from the send, not from the reading."""
    one = liveness()
    assert one.healthy(at(I))
    assert not one.healthy(at(I + 1))
    beat(one, 1_000, accepted=False, extended=False)
    assert not one.healthy(at(I + 1)), "a rejected one shows no life"
    beat(one, 1_000, accepted=True, extended=False)
    assert one.healthy(at(1_000 + I)), "in a pause an owner's heartbeat does not extend, and shows life all the same"
    assert not one.healthy(at(1_001 + I))
    assert not one.lease.valid(at(I + 1)), "but it renews no lease"
    beat(one, 1_500)
    assert one.lease.valid(at(1_500 + I))


def test_the_lease_counts_from_the_send_of_what_extended() -> None:
    """T6: a late copy of a heartbeat counts at its first send; one that was rejected not at all."""
    one = liveness()
    sequence = one.new_sequence(at(800))
    assert one.read_heartbeat(sequence, True, True)
    assert one.read_heartbeat(sequence, True, True)
    assert one.lease.started == at(800)
    beat(one, 900, accepted=True, extended=False)
    beat(one, 950, accepted=False, extended=False)
    assert one.lease.started == at(800)


def test_proof_is_any_own_record_read_back() -> None:
    """T2: with any verdict, if it was sent at most one interval ago."""
    one = liveness(joined_at=None)
    assert not one.proven(at(0)), "who has read nothing of its own back has proven nothing"
    instance = one.new_instance(at(0))
    assert not one.proven(at(1)), "sending is no proof"
    assert one.read_join(instance) == at(0)
    assert one.proven(at(I))
    assert not one.proven(at(I + 1))
    beat(one, 500, accepted=False, extended=False)
    assert one.proven(at(500 + I))
    assert not one.proven(at(501 + I))
    assert one.read_join(b"x" * 16) is None, "another client's Join proves nothing here"
    assert not one.proven(at(501 + I))


def test_a_probe_is_proof_for_a_client_without_a_session_only() -> None:
    """T2: a member proves by a Heartbeat or Join; a probe is what others have."""
    onlooker = liveness(joined_at=None)
    onlooker.read_probe(onlooker.new_probe(at(0)))
    assert onlooker.proven(at(I))
    assert not onlooker.proven(at(I + 1))
    member = liveness()
    member.read_probe(member.new_probe(at(1_000)))
    assert not member.proven(at(I + 1))


def test_the_way_back() -> None:
    """T10: probe, one heartbeat, a second as soon as the first is read, then none for four intervals."""
    one = liveness()
    now = I + 1
    assert one.due(at(now)) is Due.PROBE
    probe = one.new_probe(at(now))
    assert one.due(at(now + 1)) is Due.NOTHING, "no heartbeat before the probe was read back"
    assert one.due(at(now + THIRD - 1)) is Due.NOTHING
    assert one.due(at(now + THIRD)) is Due.PROBE, "a probe extends nothing, so it may be repeated"
    second = one.new_probe(at(now + THIRD))
    one.read_probe("somebody else's")
    assert one.due(at(now + THIRD + 1)) is Due.NOTHING
    one.read_probe(probe)
    one.read_probe(second)
    now += I + 10
    assert one.due(at(now)) is Due.HEARTBEAT
    first = one.new_sequence(at(now))
    assert one.due(at(now + THIRD)) is Due.NOTHING, "one, not one every third"
    assert one.read_heartbeat(first, True, True)  # so late that it does not make healthy
    late = now + I + 1
    assert one.due(at(late)) is Due.HEARTBEAT
    last = one.new_sequence(at(late))
    assert one.read_heartbeat(last, True, True)
    for ms in range(late + I + 1, late + 4 * I, 100):
        assert one.due(at(ms)) is Due.NOTHING, "so that others can wait it out and evict it"
    assert one.due(at(late + 4 * I)) is Due.PROBE, "then it begins again"


def test_a_probe_of_an_earlier_round_starts_no_heartbeat() -> None:
    """T10: only what was sent in this round shows that the log is read to its end as of now."""
    one = liveness()
    now = I + 1
    assert one.due(at(now)) is Due.PROBE
    old = one.new_probe(at(now))
    assert one.due(at(now + I)) is Due.PROBE
    one.read_probe(one.new_probe(at(now + I)))
    now += I + 5
    assert one.due(at(now)) is Due.HEARTBEAT
    one.new_sequence(at(now))
    now += 4 * I
    assert one.due(at(now)) is Due.PROBE
    one.new_probe(at(now))
    one.read_probe(old)
    assert one.due(at(now + 1)) is Due.NOTHING


def test_a_client_that_is_quick_enough_recovers() -> None:
    """T10: a reviving heartbeat that is read within an interval of its send ends the way back."""
    one = liveness()
    now = 10 * I
    assert one.due(at(now)) is Due.PROBE
    one.read_probe(one.new_probe(at(now)))
    assert one.due(at(now + 5)) is Due.HEARTBEAT
    beat(one, now + 5)
    assert one.healthy(at(now + 10))
    assert one.due(at(now + 10)) is Due.NOTHING
    assert one.due(at(now + 5 + THIRD)) is Due.HEARTBEAT


def test_what_was_not_sent_here_is_recognised() -> None:
    """T18: an own session's heartbeat with another sequence; copies of old ones are no clone's."""
    one = liveness()
    assert not one.read_heartbeat(1 << RANDOM_BITS, True, True), "before the first was sent none can be ours"
    first = one.new_sequence(at(1))
    assert not one.read_heartbeat(first ^ 1, True, True), "the same counter, other random bits"
    assert not one.read_heartbeat(first + (1 << RANDOM_BITS), True, True)
    for ms in range(SENT_KEPT):
        one.new_sequence(at(2 + ms))
    renewed = one.lease.started
    assert one.read_heartbeat(first, True, True), "a late copy of one that is no longer kept"
    assert one.lease.started == renewed, "and it renews nothing"


def test_every_join_is_an_instance_of_its_own() -> None:
    """T14: fresh for each Join; all of them are remembered as own."""
    one = liveness(joined_at=None)
    names = [one.new_instance(at(ms)) for ms in range(50)]
    assert len(set(names)) == 50
    assert one.newest_instance == names[-1]
    assert [one.read_join(name) for name in names] == [at(ms) for ms in range(50)]
