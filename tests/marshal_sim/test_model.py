"""The auditor's own model of a group: each of its checks, with an oracle that is as wrong as the fold would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from marshal_sim.judge.evidence import ToolReport
from marshal_sim.oracle import oracle
from marshal_sim.oracle.oracle import Group, Record, Session
from marshal_sim.oracle.rules import delete_group
from tests.support.handmade_evidence import (
    CLAIM,
    EVICT,
    GRANT,
    GROUP,
    HEARTBEAT,
    INTERVAL,
    JOIN,
    LEAVE,
    MOVE,
    ONE,
    PAUSE,
    RELEASE,
    TOPOLOGY,
    TWO,
    EvidenceBuilder,
)

Fields = dict[str, Any]
CONFIG = 11


@pytest.fixture
def weaken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces a rule of the oracle: (group, fields, offset) -> reason, or None to ask the rule itself."""

    def replace(kind: str, changed: Callable[[Group, Fields, int], str | None]) -> None:
        rule = oracle.RULES[kind]

        def weak(group: Group, fields: Fields, offset: int, body: bytes) -> str:
            reason = changed(group, fields, offset)
            return rule(group, fields, offset, body) if reason is None else reason

        monkeypatch.setitem(oracle.RULES, kind, weak)

    return replace


def accepts(group: Group, fields: Fields, offset: int) -> str:
    """Accepts, and changes nothing."""
    return ""


Weaken = Callable[..., None]


def test_a_life_within_the_rules_is_clean() -> None:
    """Joins, a pause with a move, hand-overs, a change of mode, the deletion: the model follows all of it."""
    built = EvidenceBuilder()
    two = built.join(5, TWO)
    built.say(6, HEARTBEAT, built.one, 1, [[built.epoch, 0]])
    built.say(7, TOPOLOGY, "t", 3, 1)
    token = built.say(8, PAUSE, -1, -1, 60_000)
    built.say(9, HEARTBEAT, two, 1)
    built.say(10, HEARTBEAT, built.one, 2, [[built.epoch, 0]])
    released = built.say(11, RELEASE, built.one, built.epoch, 0)
    token = built.say(12, PAUSE, token, token, 70_000)
    moved = built.say(13, MOVE, token, [["t", 0, released, 5], ["t", 2, -1, 7]], False, "admin")
    built.say(14, TOPOLOGY, "t", 2, 4, token)
    config = built.say(15, CONFIG, -1, token, 2)
    built.say(70_016, PAUSE, token, -1, 0, 70_000)
    built.mode = 2
    three = built.join(70_017, b"3" * 16)
    epoch = built.say(70_018, CLAIM, three, "t", 0, moved)
    built.say(70_019, GRANT, three, [[epoch, 5, 5, 6]])
    built.deliver(5, 70_020, 70_021, epoch=epoch, instance=b"3" * 16)
    pin = built.say(70_022, CLAIM, three, "", -1, -1)
    built.say(70_023, RELEASE, three, pin, -1)
    built.say(70_024, LEAVE, three)
    built.say(70_025, CONFIG, config, -1, 0, True)
    assert built.found() == set()


# --- S15: extensions


def test_an_evict_after_a_sign_of_life_that_it_did_not_see_is_found(weaken: Weaken) -> None:
    def any_observed(group: Group, fields: Fields, offset: int) -> None:
        fields_of_both = group.sessions.get(fields["session"])
        if fields_of_both is not None:
            fields_of_both.extended = fields["observed"]

    built = EvidenceBuilder()
    built.say(10, HEARTBEAT, built.one, 1)
    built.say(4_100, EVICT, built.one, built.one, 2 * INTERVAL)
    assert built.found() == set(), "it is rejected"
    weaken("Evict", any_observed)
    assert built.found() == {"S15"}


def test_an_extension_of_who_keeps_a_claim_through_a_pause_is_found(weaken: Weaken) -> None:
    """F2.2."""

    def extends(group: Group, fields: Fields, offset: int) -> str:
        group.sessions[fields["session"]].extended = offset
        return ""

    built = EvidenceBuilder()
    built.say(5, PAUSE, -1, -1, 60_000)
    built.say(6, HEARTBEAT, built.one, 1)
    assert built.found() == set()
    weaken("Heartbeat", extends)
    assert built.found() == {"S15"}


@pytest.mark.parametrize("reason", ["", "sequence"])
def test_a_heartbeat_that_does_not_extend_a_live_session_is_found(reason: str, weaken: Weaken) -> None:
    """Accepted without effect, and refused."""
    built = EvidenceBuilder()
    built.say(6, HEARTBEAT, built.one, 1)
    assert built.found() == set()
    weaken("Heartbeat", lambda group, fields, offset: reason)
    assert built.found() == {"S15"}


# --- S2: sessions and owners


@pytest.mark.parametrize(
    ("kind", "number", "fields"),
    [
        ("Heartbeat", HEARTBEAT, (99, 1)),
        ("Leave", LEAVE, (99,)),
        ("Evict", EVICT, (99, 1, 4_000)),
        ("ClaimingPartition", CLAIM, (99, "t", 0, -1)),
        ("StepDown", 12, (99, -1)),
    ],
)
def test_a_record_of_a_session_that_is_not_live_is_found(
    kind: str, number: int, fields: tuple[Any, ...], weaken: Weaken
) -> None:
    built = EvidenceBuilder()
    built.say(6, number, *fields)
    assert built.found() == set()
    weaken(kind, lambda group, fields, offset: "" if offset > 3 else None)
    judged = [violation for violation in built.judged() if violation.invariant == "S2"]
    assert any("which is not live" in violation.text for violation in judged)


def test_a_session_that_outlives_its_leave_is_found(weaken: Weaken) -> None:
    built = EvidenceBuilder()
    built.say(6, LEAVE, built.one)
    assert built.found() == set()
    weaken("Leave", accepts)
    assert built.found() == {"S2", "S18"}, "it keeps its claim, and with it the floor"


def test_a_claim_of_what_is_owned_is_found(weaken: Weaken) -> None:
    def takes(group: Group, fields: Fields, offset: int) -> None:
        group.partitions["t", 0].owner = -1

    built = EvidenceBuilder()
    two = built.join(5, TWO)
    built.say(6, CLAIM, two, "t", 0, built.epoch)
    assert built.found() == set()
    weaken("ClaimingPartition", lambda group, fields, offset: takes(group, fields, offset) if offset > 4 else None)
    assert built.found() == {"S2"}


def test_a_release_by_somebody_else_is_found(weaken: Weaken) -> None:
    def frees(group: Group, fields: Fields, offset: int) -> str:
        group.free(group.partitions["t", 0], -1)
        return ""

    built = EvidenceBuilder()
    two = built.join(5, TWO)
    built.say(6, RELEASE, two, built.epoch, 0)
    assert built.found() == set()
    weaken("ReleasingPartition", frees)
    assert built.found() == {"S2", "S18"}, "the claim is gone, and with it the floor"


# --- S10, S11, S12: positions and pauses


def test_a_position_that_a_rejected_record_moves_is_found(weaken: Weaken) -> None:
    def moves(group: Group, fields: Fields, offset: int) -> str | None:
        if ("t", 0) in group.partitions:
            group.partitions["t", 0].position = 4
            return "held"
        return None

    built = EvidenceBuilder()
    built.say(6, CLAIM, built.one, "t", 0, -1)
    assert built.found() == set()
    weaken("ClaimingPartition", moves)
    assert built.found() == {"S10"}


def test_a_claim_and_a_grant_in_a_pause_are_found(weaken: Weaken) -> None:
    exact = dict(oracle.RULES)

    def paused(group: Group, fields: Fields, offset: int) -> str:
        duration_ms, group.pause_duration_ms = group.pause_duration_ms, 0
        reason = exact["ClaimingMessages" if "ranges" in fields else "ClaimingPartition"](group, fields, offset, b"")
        group.pause_duration_ms = duration_ms
        return reason

    built, other = EvidenceBuilder(2), EvidenceBuilder()
    built.say(5, PAUSE, -1, -1, 60_000)
    built.say(6, GRANT, built.one, [[built.epoch, 0, 0, 2]])
    released = other.say(5, RELEASE, other.one, other.epoch, 0)
    other.say(6, PAUSE, -1, -1, 60_000)
    other.say(7, CLAIM, other.one, "t", 0, released)
    assert built.found() | other.found() == set()
    weaken("ClaimingMessages", paused)
    assert built.found() == {"S11"}
    weaken("ClaimingPartition", paused)
    assert other.found() == {"S11"}


@pytest.mark.parametrize(("observed", "token", "duration_ms", "waited_ms"), [(1, 4, 60_000, 0), (4, 3, 0, 10)])
def test_a_pause_that_changes_for_a_stranger_is_found(
    observed: int, token: int, duration_ms: int, waited_ms: int, weaken: Weaken
) -> None:
    """By an author that did not see the newest change, or that has no token and did not wait the pause out."""

    def changes(group: Group, fields: Fields, offset: int) -> str:
        group.pause_change, group.pause_duration_ms = offset, fields["duration_ms"]
        return ""

    built = EvidenceBuilder()
    assert built.say(5, PAUSE, -1, -1, 60_000) == 4
    built.say(6, PAUSE, observed, token, duration_ms, waited_ms)
    assert built.found() == set()
    weaken("ReleaseGroup", changes)
    assert built.found() == {"S11"}


def test_a_pause_that_does_not_begin_is_found(weaken: Weaken) -> None:
    built = EvidenceBuilder()
    built.say(5, PAUSE, -1, -1, 60_000)
    weaken("ReleaseGroup", accepts)
    assert built.found() == {"S11"}


def test_a_move_outside_of_its_pause_and_under_an_owner_is_found(weaken: Weaken) -> None:
    def moves(group: Group, fields: Fields, offset: int) -> str:
        for move in fields["moves"]:
            group.partitions["t", 0].position = move["position"]
        return ""

    outside, owned = EvidenceBuilder(), EvidenceBuilder()
    released = outside.say(5, RELEASE, outside.one, outside.epoch, 0)
    outside.say(6, MOVE, 1, [["t", 0, released, 3]])
    token = owned.say(5, PAUSE, -1, -1, 60_000)
    owned.say(6, MOVE, token, [["t", 0, owned.epoch, 3]])
    assert outside.found() | owned.found() == set()
    weaken("SetPosition", moves)
    assert outside.found() == {"S12"}
    assert owned.found() == {"S12", "S18"}, "the owner's floor is another one"


# --- S6: grants


@pytest.mark.parametrize(
    ("mode", "session", "epoch", "first", "start"),
    [(2, 2, 2, 0, 0), (2, 3, 3, 0, 0), (2, 2, 3, 0, 0), (2, 2, 3, 3, 3), (1, 2, 3, 2, 2)],
)
def test_a_grant_that_nobody_may_have_is_found(
    mode: int, session: int, epoch: int, first: int, start: int, weaken: Weaken
) -> None:
    """To no claim, to somebody else, of what was granted, with a gap before it, at least once."""

    def grants(group: Group, fields: Fields, offset: int) -> str:
        group.partitions["t", 0].position = fields["ranges"][0]["to"]
        group.granted = (0,)
        return ""

    built = EvidenceBuilder(mode)
    if mode == 2:
        built.say(5, GRANT, built.one, [[built.epoch, 0, 0, 2]])
    else:
        built.say(5, HEARTBEAT, built.one, 1, [[built.epoch, 2]])
    clean = built.found()
    built.say(8, GRANT, session, [[epoch, first, start, 4]])
    assert built.found() == clean
    weaken("ClaimingMessages", grants)
    assert "S6" in {violation.invariant for violation in built.judged() if violation.offset == 5}


# --- S17: settings and deletions

PINNED = (-1, -1, 0, False, "pinned", ["eu", "us"])
MEMBERS: tuple[Any, ...] = (-1, -1, 0, False, "members", [], 0, "", 2, ["m1", "m2"])
OVERFLOW = (-1, -1, 0, False, "overflow", ["eu"])


def of_nobody() -> EvidenceBuilder:
    """A log whose group has neither settings nor sessions."""
    built = EvidenceBuilder()
    del built.evidence.log[1:], built.evidence.appended_ms[1:]
    return built


def joins(group: Group, fields: Fields, offset: int) -> str:
    """Accepts the Join, whatever it says."""
    group.sessions[offset] = Session(offset, fields, b"", offset)
    group.mode = fields["mode"]
    return ""


@pytest.mark.parametrize(
    ("settings", "mode", "wrong"),
    [
        (None, 1, {"member": "m1"}),
        (None, 1, {"priority_group": "eu"}),
        (None, 1, {"priority": 1}),
        (None, 1, {"min_pending": 1}),
        (None, 1, {"min_ack_pending": 1}),
        (MEMBERS, 1, {}),
        (PINNED, 1, {}),
        (PINNED, 1, {"priority_group": "asia"}),
        (PINNED, 2, {"priority_group": "eu"}),
        (PINNED, 1, {"priority_group": "eu", "claims_max": 1}),
        (OVERFLOW, 1, {"priority_group": "eu", "priority": 1}),
    ],
)
def test_a_consumer_that_does_not_fit_its_group_is_found(
    settings: tuple[Any, ...] | None, mode: int, wrong: Fields, weaken: Weaken
) -> None:
    """F1.7."""
    built = of_nobody()
    if settings is not None:
        built.say(1, CONFIG, *settings)
    rest = {"predecessor": -1, "member": "", "capacity": 1, "claims_max": 0, "rank": 0, "priority": 0}
    rest |= {"priority_group": "", "min_pending": 0, "min_ack_pending": 0} | wrong
    built.say(2, JOIN, "c", ONE, mode, INTERVAL, ["t"], *rest.values())
    assert built.found() == set(), "it is rejected"
    weaken("Join", joins)
    assert built.found() == {"S17"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (PINNED, ()),
        (PINNED, ("overflow", ["eu", "us"])),
        (PINNED, ("pinned", ["eu"])),
        (MEMBERS, ("members", [], 0, "", 3, ["m1", "m2"])),
        (MEMBERS, ("balanced",)),
        (None, ("members", [], 0, "", 2, ["m1", "m2"])),
    ],
)
def test_a_setting_for_life_that_changes_is_found(
    before: tuple[Any, ...] | None, after: tuple[Any, ...], weaken: Weaken
) -> None:
    """F9.11. A group that somebody has joined before it had settings has the policy "" for life."""

    def changes(group: Group, fields: Fields, offset: int) -> str:
        group.config = Record("GroupConfig", fields)
        group.config_offset = offset
        return ""

    built = of_nobody() if before is not None else EvidenceBuilder()
    config = built.say(5, CONFIG, *before) if before is not None else -1
    built.say(6, CONFIG, config, -1, 0, False, *after)
    assert built.found() == set(), "it is rejected"
    weaken("GroupConfig", lambda group, fields, offset: changes(group, fields, offset) if offset > config else None)
    assert built.found() == {"S17"}


def deletes(group: Group, fields: Fields, offset: int) -> str:
    """Deletes the group, whoever is in it."""
    for session in list(group.sessions):
        group.end_session(session)
    delete_group(group, offset)
    group.config = Record("GroupConfig", fields)
    group.config_offset = offset
    return ""


def test_a_deletion_of_a_group_in_use_is_found(weaken: Weaken) -> None:
    """F9.5: outside of a pause, by somebody else than who has paused, under an owner."""
    live, stranger, owned = EvidenceBuilder(), EvidenceBuilder(), EvidenceBuilder()
    for built in (live, stranger):
        built.say(5, RELEASE, built.one, built.epoch, 0)
    live.say(6, CONFIG, -1, -1, 0, True)
    token = stranger.say(6, PAUSE, -1, -1, 60_000)
    stranger.say(7, CONFIG, -1, token - 1, 0, True)
    token = owned.say(5, PAUSE, -1, -1, 60_000)
    owned.say(6, CONFIG, -1, token, 0, True)
    assert live.found() | stranger.found() | owned.found() == set()
    weaken("GroupConfig", deletes)
    assert live.found() == stranger.found() == owned.found() == {"S17"}


def test_each_life_of_a_group_is_judged_by_its_own_settings_and_positions() -> None:
    """F9.5: before the deletion nothing covers a claim and an admin moves a position, afterwards neither holds."""
    built = EvidenceBuilder()
    built.deliver(0, 5, 6)
    released = built.say(7, RELEASE, built.one, built.epoch, 1)
    token = built.say(8, PAUSE, -1, -1, 60_000)
    built.say(9, MOVE, token, [["t", 0, released, 3]], False, "admin")
    built.evidence.reports.append(ToolReport(GROUP, "admin", "moved", (("t", 0, 3),)))
    deleted = built.say(11, CONFIG, -1, token, 0, True)
    built.say(12, CONFIG, deleted, -1, 0, False, "topic")
    built.say(13, TOPOLOGY, "t", 1, deleted)
    two = built.join(14, TWO)
    cover = built.say(15, CLAIM, two, "t", -1, -1)
    epoch = built.say(16, CLAIM, two, "t", 0, -1, 0)
    built.deliver(0, 17, 18, epoch=epoch, instance=TWO, client=1)
    assert built.judged() == []
    built.say(19, RELEASE, two, cover, -1)
    built.deliver(1, 20, 21, epoch=epoch, instance=TWO, client=1)
    assert built.found() == {"S2"}, "the second life has covers"


def test_a_record_that_counts_in_a_deleted_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """F0."""
    built = EvidenceBuilder()
    built.say(5, LEAVE, built.one)
    built.say(6, CONFIG, -1, -1, 0, True)
    built.join(7, TWO)
    assert built.found() == set()
    monkeypatch.setattr(Group, "deleted", False)
    assert built.found() == {"S17"}
