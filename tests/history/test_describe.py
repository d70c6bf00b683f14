"""Verdicts as text and as JSON: every kind of record has its sentence, and every reason of the fold a text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from marshal_py.history.explain import REASONS, as_dict, describe
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.rationalizer import Outcome, Verdict
from marshal_py.protocol.wire.records import (
    RECORD_TYPES,
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Evict,
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

ID = bytes(range(16))
GENESIS = Genesis(ID, 16, "murmur3-x86-32", 2)
SENTENCES: list[tuple[Record, str]] = [
    (GENESIS, f"the log begins: incarnation {ID.hex()}, 16 partitions"),
    (Join("me", ID, 1, 2_000, ("a", "b")), "me joins, at least once, for a, b"),
    (Heartbeat(7, 1), "session 7 is alive"),
    (Heartbeat(7, 1, (ClaimState(8, 5),)), "session 7 is alive, 1 positions"),
    (Leave(7, "stopped"), "session 7 leaves (stopped)"),
    (Evict(7, 9, 4_000, "you"), "session 7 is evicted after 4 s of silence, by you"),
    (ClaimingPartition(7, "a", 3, -1, 5), "session 7 claims a:3, starting at 5"),
    (ClaimingPartition(7, "a", -1, -1), "session 7 claims a"),
    (ClaimingPartition(7, "", -1, -1), "session 7 claims the pin"),
    (ReleasingPartition(7, 8, 5, 9, "hand-over"), "session 7 releases claim 8 at 5 for session 9 (hand-over)"),
    (ReleasingPartition(7, 8, -1, observed=10, give=6), "session 7 releases claim 8, gives back from 6 on"),
    (ReleasingPartition(7, 8, -1, observed=10, give=10), "session 7 releases claim 8"),
    (
        ReleasingPartition(7, 8, 5, parked="DataTopicRecreated"),
        "session 7 releases claim 8 at 5, parked: DataTopicRecreated",
    ),
    (SeekingPartition(7, 8, 5), "session 7 seeks to 5 under claim 8"),
    (ClaimingMessages(7, (MessageRange(8, 5, 5, 10),)), "session 7 takes messages 5 to 9 of claim 8"),
    (ClaimingMessages(7, (MessageRange(8, 5, 5, 10),) * 3), "session 7 takes messages 5 to 9 of claim 8 and of 2 more"),
    (ReleaseGroup(-1, -1, 60_000, reason="deploy", by="ops"), "the group pauses for 60 s (deploy), by ops"),
    (ReleaseGroup(5, 5, 0), "the pause ends"),
    (ReleaseGroup(5, 5, 0, reason="mended", by="ops"), "the pause ends (mended), by ops"),
    (
        SetPosition(5, tuple(Move("a", n, -1, 0) for n in range(5))),
        "positions move: a:0 to 0, a:1 to 0, a:2 to 0 and 2 more",
    ),
    (Topology("a", 12, -1), "topic a has 12 partitions"),
    (Topology("a", 12, -1, topic_id="q83i"), "topic a has 12 partitions, id q83i"),
    (GroupConfig(-1, deleted=True, by="ops"), "the group is deleted, by ops"),
    (GroupConfig(-1, policy="greedy"), "settings change"),
    (StepDown(7, -1, "maintenance"), "session 7 steps down (maintenance)"),
    (Note(7, "offset_lost", "a", 3, 0, 10), "note: offset_lost a:3 0 to 10"),
    (Snapshot(GENESIS, ID, 64, 0, 2, 1, 2, b"x"), "snapshot at 64, part 1 of 2"),
]


def test_every_record_type_is_here() -> None:
    assert {type(record) for record, _ in SENTENCES} == set(RECORD_TYPES)


@pytest.mark.parametrize(("record", "sentence"), SENTENCES)
def test_a_record_in_words_and_as_json(record: Record, sentence: str) -> None:
    verdict = Verdict(3, Outcome.ACCEPTED, "", "g", record)
    assert describe(verdict) == sentence
    found = json.loads(json.dumps(as_dict(verdict)))
    assert list(found) == ["offset", "group", "type", "fields", "verdict", "reason"]
    assert found["type"] == type(record).__name__
    assert found["verdict"] == "accepted"


def test_fields_are_nested_and_named_as_on_the_wire() -> None:
    claims = as_dict(Verdict(3, Outcome.ACCEPTED, "", "g", Heartbeat(7, 1, (ClaimState(8, 5),))))["fields"]["claims"]
    assert claims == [{"epoch": 8, "position": 5, "lag": 0, "in_flight": 0, "attempts": 0, "progress": ""}]
    asked = ClaimingMessages(7, (MessageRange(8, 5, 6, 10),))
    (wanted,) = as_dict(Verdict(3, Outcome.ACCEPTED, "", "g", asked))["fields"]["ranges"]
    assert wanted == {"epoch": 8, "from": 5, "start": 6, "to": 10}


def test_a_refused_record_says_why() -> None:
    claim = ClaimingPartition(7, "a", 3, -1)
    held = describe(Verdict(3, Outcome.REJECTED, "held", "g", claim))
    assert held == "session 7 claims a:3: rejected, somebody owns it"
    assert describe(Verdict(3, Outcome.REJECTED, "paused", "g", claim)).endswith("rejected, the group is paused")
    move = SetPosition(5, (Move("a", 0, -1, 0),))
    assert describe(Verdict(3, Outcome.REJECTED, "paused", "g", move)).endswith("rejected, the group is not paused")
    assert describe(Verdict(3, Outcome.IGNORED, "garbage", "", None)) == (
        "something unreadable: ignored, no record of this topic"
    )


def test_every_reason_of_the_fold_has_a_text() -> None:
    """Read from the source, so that a new reason without a text is noticed."""
    source = Path(rationalizer.__file__).read_text(encoding="utf-8")
    reasons = set(re.findall(r'(?:return|else) "(\w+)"', source)) | set(
        re.findall(r'Verdict\(\w+, [\w.]+, "(\w+)"', source)
    )
    assert len(reasons) > 15
    assert reasons <= REASONS.keys()
    assert REASONS.keys() <= reasons
