"""A log as it was written under fold version 4, and what it folds to: no later release may come to anything else.

tests/fixtures/fold_4.dump and fold_4.json were made once by tests/support/fold_4.py, which tells what is in them. They
are never created again: whoever changes the fold raises its version and adds files beside these. protocol_2.dump and
fold_3.dump are of earlier ones, whose records must still be read.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import (
    RECORD_TYPES,
    Checkpoint,
    ClaimState,
    Genesis,
    Mapping,
    MessageRange,
    Move,
    PauseWaited,
)
from marshal_py.transport.dump import Reader
from tests.cli.shell import Shell
from tests.support import checkpoints

FIXTURES = Path(__file__).parents[1] / "fixtures"
DUMP = FIXTURES / "fold_4.dump"
BYTES_MAX = 60_000
NESTED = (ClaimState, MessageRange, PauseWaited, Checkpoint, Move, Mapping)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / "fold_4.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("fold", [checkpoints.by_the_core, checkpoints.by_the_oracle])
def test_a_log_of_fold_4_folds_to_what_it_always_did(fold: Any, expected: dict[str, Any]) -> None:
    """G1 to G3, N3: every verdict, the state after every record, every digest at every checkpoint and at the end."""
    folded = fold(DUMP)
    assert folded.keys() == expected.keys()
    for log, shown in folded.items():
        for offset, (verdict, state) in enumerate(zip(shown["verdicts"], shown["states"], strict=True)):
            known = expected[log]["verdicts"][offset], expected[log]["states"][offset]
            assert (verdict, state) == known, f"log {log}, offset {offset}"
        for at, digests in shown["checkpoints"].items():
            assert digests == expected[log]["checkpoints"].get(at), f"log {log}, checkpoint {at}"
        assert shown == expected[log]


def test_the_commands_accept_the_log() -> None:
    shell, where = Shell(""), ("--dump", str(DUMP))
    report = shell.json("verify", *where)
    assert report["ok"], report["first"]
    assert report["heartbeat_digests"] + report["other_fold_versions"] > 10
    assert report["snapshot_digests"] > 4
    audit = shell.json("simulate", "--dump", str(DUMP))
    assert audit["verdict"] == "ok", audit["first"]
    assert audit["records"] == report["records"] == sum(len(shown) for shown in verdicts())
    assert min(audit[what] for what in ("handovers", "takeovers", "evictions", "grants", "pauses", "moves")) > 0


@pytest.mark.parametrize("name", ["protocol_2", "fold_3"])
def test_the_records_of_earlier_folds_are_still_read(name: str) -> None:
    """E6, E7: whatever the fold did not call garbage or malformed then decodes now, field by field the same bytes."""
    shown = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    incarnation, read = -1, 0
    with Reader(FIXTURES / f"{name}.dump") as reader:
        for record in reader:
            opened = codec.open_envelope(record.value, incarnation)
            verdict = shown[str(record.log)]["verdicts"][record.offset]
            unread = verdict in ("garbage", "malformed", "opaque", "misrouted")
            if opened is None or unread:
                assert unread
                continue
            if isinstance(opened[5], Genesis) and not verdict:
                incarnation = zlib.crc32(opened[5].incarnation)
            assert (opened[5] or codec.decode_body(opened[3], opened[4])) is not None
            read += 1
    assert read > 150


def verdicts() -> list[list[str]]:
    return [log["verdicts"] for log in json.loads((FIXTURES / "fold_4.json").read_text(encoding="utf-8")).values()]


def test_everything_occurs_in_the_log() -> None:
    """Every type of record, and every field with something else than its default."""
    assert DUMP.stat().st_size < BYTES_MAX
    seen: dict[str, set[str]] = {kind.__name__: set() for kind in (*RECORD_TYPES, *NESTED)}
    accepted: set[str] = set()
    shown = dict(enumerate(verdicts()))
    seed = -1
    with Reader(DUMP) as reader:
        for record in reader:
            opened = codec.open_envelope(record.value, seed)
            if opened is None:
                continue
            if isinstance(opened[5], Genesis):
                seed = zlib.crc32(opened[5].incarnation)
            if not shown[record.log][record.offset]:
                value = opened[5] or codec.decode_body(opened[3], opened[4])
                assert value is not None
                accepted.add(type(value).__name__)
                look(value, seen)
    assert accepted == {kind.__name__ for kind in RECORD_TYPES}
    for kind in (*RECORD_TYPES, *NESTED):  # the keys of settings need record version 2
        assert seen[kind.__name__] == {field.name for field in fields(kind)} - {"admin_keys"}, kind.__name__
    refused = {reason for log in verdicts() for reason in log if reason}
    assert refused >= {
        "claim",
        "config",
        "deleted",
        "from",
        "garbage",
        "genesis",
        "held",
        "lifelong",
        "malformed",
        "misrouted",
        "mode",
        "observed",
        "opaque",
        "parked",
        "paused",
        "range",
        "repeats",
        "same",
        "session",
        "sessions",
        "start",
        "token",
        "topology",
        "waited",
    }


def look(value: Struct, seen: dict[str, set[str]]) -> None:
    """Notes which fields of a record and of what is nested in it are not at their defaults."""
    for field in fields(value):
        found = getattr(value, field.name)
        if field.default is NODEFAULT or found != field.default:
            seen[type(value).__name__].add(field.name)
        for inner in found if isinstance(found, tuple) else (found,):
            if isinstance(inner, Struct):
                look(inner, seen)
