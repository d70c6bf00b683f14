"""At-most-once mode: every message of a grant is delivered, given back or noted (S6), and what a crash may have lost is
named (S18). With planted losses.
"""

from __future__ import annotations

from typing import Any

import pytest

from marshal_py.protocol.claims import AtMostOnce
from marshal_py.protocol.member.member import Member
from marshal_sim.cluster.run import simulate
from marshal_sim.cluster.scenario import Options
from marshal_sim.oracle import oracle
from tests.support.handmade_evidence import CLAIM, GRANT, GROUP, HEARTBEAT, NOTE, RELEASE, EvidenceBuilder
from tests.support.wire import record

SEEDS = range(8)
FENCES = Options(clients=3, partitions=3, interval_ms=2_000, mode=2, kinds=frozenset({"lag", "delay", "suspend"}))
ARRIVALS = Options(clients=3, partitions=3, interval_ms=2_000, mode=2, kinds=frozenset({"arrive", "leave"}))


def granted() -> EvidenceBuilder:
    """[0, 4) is granted, and the first message is delivered."""
    built = EvidenceBuilder(2)
    built.say(5, GRANT, built.one, [[built.epoch, 0, 0, 4]])
    built.deliver(0, 6, 7)
    return built


def dropped(built: EvidenceBuilder, first: int, to: int, kind: str = "amo_dropped") -> bytes:
    return record(GROUP, NOTE, built.one, kind, "t", 0, first, to)


def test_a_grant_that_is_thrown_away_is_found() -> None:
    built = granted()
    assert built.found() == set(), "the claim is still open"
    built.say(10, RELEASE, built.one, built.epoch, -1)
    assert built.found() == {"S6"}


def test_a_whole_delivered_grant_loses_nothing() -> None:
    built = granted()
    for offset in (1, 2, 3):
        built.deliver(offset, 8 + offset, 8 + offset)
    built.say(20, RELEASE, built.one, built.epoch, -1)
    assert built.found() == set()


def test_a_message_that_does_not_exist_cannot_be_lost() -> None:
    """A grant may hold offsets of transaction markers."""
    built = granted()
    built.evidence.topics["t", 0] = [0, 4, 5]
    built.say(10, RELEASE, built.one, built.epoch, -1)
    assert built.found() == set()


def test_a_note_names_what_was_dropped() -> None:
    built = granted()
    built.put(8, dropped(built, 1, 4))
    built.say(10, RELEASE, built.one, built.epoch, -1)
    assert built.found() == set()


def test_a_note_that_never_reached_the_log_counts_too() -> None:
    """A Note is best effort: the network may lose it."""
    built = granted()
    built.evidence.sent[dropped(built, 1, 4)] = (8, 8, 0)
    built.say(10, RELEASE, built.one, built.epoch, -1)
    assert built.found() == set()


@pytest.mark.parametrize(
    ("first", "to", "kind"), [(2, 4, "amo_dropped"), (1, 3, "amo_dropped"), (1, 4, "probe"), (1, 4, "offset_lost")]
)
def test_a_note_about_something_else_excuses_nothing(first: int, to: int, kind: str) -> None:
    built = granted()
    built.put(8, dropped(built, first, to, kind))
    built.say(10, RELEASE, built.one, built.epoch, -1)
    assert built.found() == {"S6"}


def test_a_note_of_before_the_grant_excuses_nothing() -> None:
    built = EvidenceBuilder(2)
    built.put(4, dropped(built, 1, 4))
    built.say(5, GRANT, built.one, [[built.epoch, 0, 0, 4]])
    built.say(10, RELEASE, built.one, built.epoch, -1)
    assert built.found() == {"S6"}


def test_who_died_before_it_read_the_end_of_its_claim_is_excused() -> None:
    """The owner is not excused from messages that it skipped while it lived."""
    built = granted()
    released = built.say(10, RELEASE, built.one, built.epoch, -1)
    built.evidence.acted_to[0] = released + 1
    assert built.found() == {"S6"}, "it read its Release, and had dropped what it never noted"
    built.evidence.acted_to[0] = released
    assert built.found() == set()
    built.evidence.acted_to[0] = -1
    assert built.found() == set(), "it was stopped when it died"
    built.deliver(2, 8, 9, read_to=released)
    assert built.found() == {"S6"}, "message 1 was passed over"


def test_who_lost_its_place_in_the_log_is_excused_from_grants_that_it_never_read() -> None:
    """N11."""
    built = EvidenceBuilder(2)
    grant = built.say(5, GRANT, built.one, [[built.epoch, 0, 0, 4]])
    built.say(10, RELEASE, built.one, built.epoch, -1)
    built.evidence.restarts[0] = [(3, grant)]
    assert built.found() == {"S6"}, "it asked for the grant after that"
    built.evidence.restarts[0] = [(6, grant + 1)]
    assert built.found() == {"S6"}, "it had read the grant"
    built.evidence.restarts[0] = [(6, grant)]
    assert built.found() == set()


def test_what_a_grant_skips_must_be_noted_or_never_have_been_there() -> None:
    """F5.2: [from, start) counts as skipped."""
    built = EvidenceBuilder(2)
    built.say(5, GRANT, built.one, [[built.epoch, 0, 2, 4]])
    assert built.found() == {"S6"}
    built.put(6, dropped(built, 0, 2, "offset_lost"))
    assert built.found() == set()
    holes = EvidenceBuilder(2)
    holes.evidence.topics["t", 0] = [2, 3]
    holes.say(5, GRANT, holes.one, [[holes.epoch, 0, 2, 4]])
    assert holes.found() == set()


def give_back(built: EvidenceBuilder, ms: int, epoch: int, observed: int, give: int) -> int:
    """F6.3."""
    return built.say(ms, RELEASE, built.one, epoch, -1, -1, "", observed, give)


def test_what_is_given_back_is_not_lost() -> None:
    """The next owner gets it by a grant of its own."""
    built = granted()
    released = give_back(built, 10, built.epoch, 4, 1)
    assert built.found() == set()
    epoch = built.say(12, CLAIM, built.one, "t", 0, released)
    built.say(13, GRANT, built.one, [[epoch, 1, 1, 3]])
    built.deliver(1, 14, 15, epoch=epoch)
    built.deliver(2, 14, 15, epoch=epoch)
    assert built.found() == set()


def test_a_give_back_of_less_than_was_undelivered_is_found() -> None:
    built = granted()
    give_back(built, 10, built.epoch, 4, 2)
    assert built.found() == {"S6"}, "message 1 is lost"


def test_what_was_handed_over_is_not_given_back() -> None:
    """S6: the next owner would deliver it once more."""
    built = granted()
    give_back(built, 10, built.epoch, 4, 0)
    assert built.found() == {"S6"}


def test_nobody_gives_back_what_it_never_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """S6: a position falls by no more than the grants of the claim, and by who has read them all; in both folds."""
    rule = oracle.RULES["ReleasingPartition"]

    def lenient(group: oracle.Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        held, give = group.claim(fields["session"], fields["epoch"]), fields["give"]
        reason = rule(group, {**fields, "observed": -1}, offset, body)
        if held is not None and not reason and give >= 0:
            held[1].position = give
        return reason

    monkeypatch.setitem(oracle.RULES, "ReleasingPartition", lenient)
    for observed, give, found in ((4, 2, set()), (4, 1, {"S6"}), (3, 2, {"S6"}), (4, 5, {"S6"})):
        built = EvidenceBuilder(2)
        built.say(4, GRANT, built.one, [[built.epoch, 0, 0, 2]])
        built.deliver(0, 5, 6)
        built.deliver(1, 5, 6)
        epoch = built.say(11, CLAIM, built.one, "t", 0, give_back(built, 10, built.epoch, 2, 2))
        built.say(12, GRANT, built.one, [[epoch, 2, 2, 4]])
        assert built.found() == set()
        give_back(built, 14, epoch, observed, give)
        assert built.found() & {"S6"} == found, (observed, give)


def reported(handled: int, *, second: tuple[int, int] | None = None) -> EvidenceBuilder:
    """Of [0, 4), message 0 was finished at 7, and 1 was delivered if `second` says from when until when. A heartbeat
    that is sent at 9 says that all below `handled` is handled. Then the owner dies, and a second one claims.
    """
    built = granted()
    if second is not None:
        built.deliver(1, *second)
    built.say(10, HEARTBEAT, built.one, 1, [[built.epoch, handled]])
    built.evidence.acted_to[0] = len(built.evidence.log)
    built.takeover(6_000)
    return built


def test_what_a_dead_owner_had_not_reported_is_named() -> None:
    """S18: 1 to 3 are lost, and the range begins there."""
    assert reported(1).found() == set()
    assert reported(1, second=(8, -1)).found() == set(), "nobody knows whether its handler has finished"
    assert reported(2, second=(8, 9)).found() == set()


def test_a_lost_message_that_was_reported_as_handled_is_found() -> None:
    """S18: no range names it then."""
    assert reported(2).found() == {"S18"}
    assert reported(2, second=(8, -1)).found() == {"S18"}
    assert reported(2, second=(8, 10)).found() == {"S18"}, "its handler had not finished by then"


def test_a_range_that_names_what_was_finished_before_a_heartbeat_is_found() -> None:
    """S18: an owner reports all that its handlers have finished, so that little is called lost."""
    assert reported(0).found() == {"S18"}


# --- runs


def invariants(options: Options) -> set[str]:
    return {violation.invariant for seed in SEEDS for violation in simulate(seed, options).violations}


@pytest.mark.parametrize(("options", "invariant"), [(FENCES, "S6"), (ARRIVALS, "V3")])
def test_a_consumer_that_throws_its_grants_away_is_found(
    options: Options, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6. Where every owner lives to give back what it dropped, nothing is lost, and nothing progresses (V3)."""
    assert invariants(options) == set()

    def thrown_away(self: AtMostOnce, start: int, to: int) -> None:
        self.asked = None

    monkeypatch.setattr(AtMostOnce, "granted", thrown_away)
    assert invariant in invariants(options)


def test_a_consumer_that_drops_without_a_note_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """D3."""
    note = Member.note

    def silent(self: Member, kind: str, *fields: Any, **named: Any) -> None:
        if kind != "amo_dropped":
            note(self, kind, *fields, **named)

    monkeypatch.setattr(Member, "note", silent)
    assert "S6" in invariants(FENCES)
