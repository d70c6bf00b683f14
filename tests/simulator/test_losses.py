"""At most once: every message of a grant is delivered, given back or noted. S6, with planted losses."""

from __future__ import annotations

from typing import Any

import pytest

from marshal_py.protocol.delivery import AtMostOnce
from marshal_py.protocol.member import Member
from marshal_py.simulator import oracle
from marshal_py.simulator.run import simulate
from marshal_py.simulator.scenario import Options
from tests.support.handmade_evidence import CLAIM, GRANT, GROUP, NOTE, RELEASE, Book
from tests.support.wire import record

SEEDS = range(8)
FENCES = Options(clients=3, partitions=3, interval_ms=2_000, mode=2, kinds=frozenset({"lag", "delay", "suspend"}))
ARRIVALS = Options(clients=3, partitions=3, interval_ms=2_000, mode=2, kinds=frozenset({"arrive", "leave"}))


def granted() -> Book:
    """[0, 4) is granted, and the first message is delivered."""
    book = Book(2)
    book.say(5, GRANT, book.one, [[book.epoch, 0, 0, 4]])
    book.deliver(0, 6, 7)
    return book


def dropped(book: Book, first: int, to: int, kind: str = "amo_dropped") -> bytes:
    return record(GROUP, NOTE, book.one, kind, "t", 0, first, to)


def test_a_grant_that_is_thrown_away_is_found() -> None:
    book = granted()
    assert book.found() == set(), "the claim is still open"
    book.say(10, RELEASE, book.one, book.epoch, -1)
    assert book.found() == {"S6"}


def test_a_whole_delivered_grant_loses_nothing() -> None:
    book = granted()
    for offset in (1, 2, 3):
        book.deliver(offset, 8 + offset, 8 + offset)
    book.say(20, RELEASE, book.one, book.epoch, -1)
    assert book.found() == set()


def test_a_message_that_does_not_exist_cannot_be_lost() -> None:
    """A grant may hold offsets of transaction markers."""
    book = granted()
    book.evidence.topics["t", 0] = [0, 4, 5]
    book.say(10, RELEASE, book.one, book.epoch, -1)
    assert book.found() == set()


def test_a_note_names_what_was_dropped() -> None:
    book = granted()
    book.put(8, dropped(book, 1, 4))
    book.say(10, RELEASE, book.one, book.epoch, -1)
    assert book.found() == set()


def test_a_note_that_never_reached_the_log_counts_too() -> None:
    """A Note is best effort: the network may lose it."""
    book = granted()
    book.evidence.sent[dropped(book, 1, 4)] = (8, 8, 0)
    book.say(10, RELEASE, book.one, book.epoch, -1)
    assert book.found() == set()


@pytest.mark.parametrize(
    ("first", "to", "kind"), [(2, 4, "amo_dropped"), (1, 3, "amo_dropped"), (1, 4, "probe"), (1, 4, "offset_lost")]
)
def test_a_note_about_something_else_excuses_nothing(first: int, to: int, kind: str) -> None:
    book = granted()
    book.put(8, dropped(book, first, to, kind))
    book.say(10, RELEASE, book.one, book.epoch, -1)
    assert book.found() == {"S6"}


def test_a_note_of_before_the_grant_excuses_nothing() -> None:
    book = Book(2)
    book.put(4, dropped(book, 1, 4))
    book.say(5, GRANT, book.one, [[book.epoch, 0, 0, 4]])
    book.say(10, RELEASE, book.one, book.epoch, -1)
    assert book.found() == {"S6"}


def test_who_died_before_it_read_the_end_of_its_claim_is_excused() -> None:
    """It is not excused from what it passed over while it lived."""
    book = granted()
    released = book.say(10, RELEASE, book.one, book.epoch, -1)
    book.evidence.acted_to[0] = released + 1
    assert book.found() == {"S6"}, "it read its Release, and had dropped what it never noted"
    book.evidence.acted_to[0] = released
    assert book.found() == set()
    book.evidence.acted_to[0] = -1
    assert book.found() == set(), "it was stopped when it died"
    book.deliver(2, 8, 9, read_to=released)
    assert book.found() == {"S6"}, "message 1 was passed over"


def test_who_lost_its_place_in_the_log_is_excused_from_grants_that_it_never_read() -> None:
    """N11."""
    book = Book(2)
    grant = book.say(5, GRANT, book.one, [[book.epoch, 0, 0, 4]])
    book.say(10, RELEASE, book.one, book.epoch, -1)
    book.evidence.restarts[0] = [(3, grant)]
    assert book.found() == {"S6"}, "it asked for the grant after that"
    book.evidence.restarts[0] = [(6, grant + 1)]
    assert book.found() == {"S6"}, "it had read the grant"
    book.evidence.restarts[0] = [(6, grant)]
    assert book.found() == set()


def test_what_a_grant_skips_must_be_noted_or_never_have_been_there() -> None:
    """F5.2: [from, start) counts as skipped."""
    book = Book(2)
    book.say(5, GRANT, book.one, [[book.epoch, 0, 2, 4]])
    assert book.found() == {"S6"}
    book.put(6, dropped(book, 0, 2, "offset_lost"))
    assert book.found() == set()
    holes = Book(2)
    holes.evidence.topics["t", 0] = [2, 3]
    holes.say(5, GRANT, holes.one, [[holes.epoch, 0, 2, 4]])
    assert holes.found() == set()


def give_back(book: Book, ms: int, epoch: int, observed: int, give: int) -> int:
    """F6.3."""
    return book.say(ms, RELEASE, book.one, epoch, -1, -1, "", observed, give)


def test_what_is_given_back_is_not_lost() -> None:
    """The next owner gets it by a grant of its own."""
    book = granted()
    released = give_back(book, 10, book.epoch, 4, 1)
    assert book.found() == set()
    epoch = book.say(12, CLAIM, book.one, "t", 0, released)
    book.say(13, GRANT, book.one, [[epoch, 1, 1, 3]])
    book.deliver(1, 14, 15, epoch=epoch)
    book.deliver(2, 14, 15, epoch=epoch)
    assert book.found() == set()


def test_a_give_back_of_less_than_was_undelivered_is_found() -> None:
    book = granted()
    give_back(book, 10, book.epoch, 4, 2)
    assert book.found() == {"S6"}, "message 1 is lost"


def test_what_was_handed_over_is_not_given_back() -> None:
    """S6: the next owner would deliver it once more."""
    book = granted()
    give_back(book, 10, book.epoch, 4, 0)
    assert book.found() == {"S6"}


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
        book = Book(2)
        book.say(4, GRANT, book.one, [[book.epoch, 0, 0, 2]])
        book.deliver(0, 5, 6)
        book.deliver(1, 5, 6)
        epoch = book.say(11, CLAIM, book.one, "t", 0, give_back(book, 10, book.epoch, 2, 2))
        book.say(12, GRANT, book.one, [[epoch, 2, 2, 4]])
        assert book.found() == set()
        give_back(book, 14, epoch, observed, give)
        assert book.found() & {"S6"} == found, (observed, give)


# --- runs


def invariants(options: Options) -> set[str]:
    return {violation.invariant for seed in SEEDS for violation in simulate(seed, options).violations}


@pytest.mark.parametrize(("options", "invariant"), [(FENCES, "S6"), (ARRIVALS, "V3")])
def test_a_consumer_that_throws_its_grants_away_is_found(
    options: Options, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6; where everybody lives to give back what it has thrown away, nothing is lost, and nothing goes on (V3)."""
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
