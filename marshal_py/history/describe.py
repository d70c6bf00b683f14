"""Puts a Verdict into a sentence for people, and into a dict for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from marshal_py.errors import first_of
from marshal_py.protocol.fold.rationalizer import Outcome, Verdict
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import (
    MODE_NAMES,
    ClaimingMessages,
    ClaimingPartition,
    Evict,
    Genesis,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
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

MOVES_SHOWN: Final = 3  # of a SetPosition, in its sentence

# Each reason of PROTOCOL.md as the end of a sentence. A reason that is missing here is printed as it is.
REASONS: Final = {
    "garbage": "no record of this topic",
    "misrouted": "its group belongs to another log",
    "opaque": "its group holds records of a newer library",
    "malformed": "its content breaks the format",
    "genesis": "the log has its beginning already",
    "deleted": "the group is deleted",
    "session": "its session has ended, or never was",
    "instance": "a live session has this instance already",
    "claim": "the claim has ended, or was another session's",
    "held": "somebody owns it",
    "parked": "nobody may claim it until somebody has looked at it",
    "observed": "something had changed since its sender looked",
    "paused": "the group is paused",
    "topology": "there is no such partition",
    "start": "it names no start position",
    "mode": "the group has the other delivery mode",
    "config": "the consumer does not fit the group's settings",
    "lifelong": "these settings are for the group's whole life",
    "from": "the position had moved",
    "range": "the range is empty, too long, or not the claim's",
    "waited": "its sender has not waited long enough",
    "token": "it names no running pause",
    "empty": "it moves nothing",
    "repeats": "it names a partition twice",
    "same": "it changes nothing",
    "sessions": "consumers are alive",
    "predecessor": "the session that it replaces is another client's",
}


def describe(verdict: Verdict, clients: Mapping[int, str] = {}) -> str:
    """Returns one line: what the record asked for and, unless it was accepted, why that did not happen. `clients`: the
    client ids of sessions, as far as they are to be named."""
    what = "something unreadable" if verdict.record is None else _request(verdict.record, clients)
    if verdict.outcome is Outcome.ACCEPTED:
        return what
    reason = REASONS.get(verdict.reason, verdict.reason)
    if verdict.reason == "paused" and isinstance(verdict.record, SetPosition):
        reason = "the group is not paused"
    return f"{what}: {verdict.outcome.name.lower()}, {reason}"


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """Returns everything that the verdict says, in JSON's types. Byte strings are hex."""
    record = verdict.record
    return {
        "offset": verdict.offset,
        "group": verdict.group,
        "type": type(record).__name__ if record is not None else None,
        "fields": _fields(record) if record is not None else {},
        "verdict": verdict.outcome.name.lower(),
        "reason": verdict.reason,
    }


def _fields(record: Struct) -> dict[str, Any]:
    return {name.rstrip("_"): _plain(getattr(record, name)) for name in record.__struct_fields__}


def _plain(value: Any) -> Any:
    match value:
        case Struct():
            return _fields(value)
        case bytes():
            return value.hex()
        case tuple() | list():
            return [_plain(item) for item in value]
    return value


def _request(record: Record, clients: Mapping[int, str]) -> str:
    """Returns what the sender of a record asked for, as a sentence."""
    match record:
        case Join() | Heartbeat() | Leave() | Evict() | StepDown():
            return _session_request(record, clients)
        case ClaimingPartition() | ReleasingPartition() | SeekingPartition() | ClaimingMessages():
            return _claim_request(record, clients)
        case Genesis():
            return f"the log begins: incarnation {record.incarnation.hex()}, {record.partitions} partitions"
        case ReleaseGroup():
            if record.duration_ms == 0:
                return "the pause ends"
            return f"the group pauses for {record.duration_ms / 1000:g} s{_because(record.reason)}{_by(record.by)}"
        case SetPosition():
            moves = first_of((f"{m.topic}:{m.partition} to {m.position}" for m in record.moves), MOVES_SHOWN)
            return f"positions move: {moves}{_by(record.by)}"
        case Topology():
            named = f", id {record.topic_id}" if record.topic_id else ""
            return f"topic {record.topic} has {record.partitions} partitions{named}"
        case GroupConfig():
            return f"the group is deleted{_by(record.by)}" if record.deleted else f"settings change{_by(record.by)}"
        case Note():
            return _note_request(record)
        case Snapshot():
            return f"snapshot at {record.at}, part {record.chunk + 1} of {record.chunks}"


def _session(number: int, clients: Mapping[int, str]) -> str:
    return f"session {number} ({clients[number]})" if number in clients else f"session {number}"


def _session_request(record: Join | Heartbeat | Leave | Evict | StepDown, clients: Mapping[int, str]) -> str:
    who = "" if isinstance(record, Join) else _session(record.session, clients)
    match record:
        case Join():
            mode = MODE_NAMES[record.mode].replace("_", " ")
            return f"{record.client_id} joins, {mode}, for {', '.join(record.topics) or 'no topic'}"
        case Heartbeat():
            news = f", {len(record.claims)} positions" if record.claims else ""
            return f"{who} is alive{news}"
        case Leave():
            return f"{who} leaves{_because(record.reason)}"
        case Evict():
            return f"{who} is evicted after {record.waited_ms / 1000:g} s of silence{_by(record.by)}"
        case StepDown():
            return f"{who} steps down{_because(record.reason)}{_by(record.by)}"


def _claim_request(
    record: ClaimingPartition | ReleasingPartition | SeekingPartition | ClaimingMessages, clients: Mapping[int, str]
) -> str:
    who = _session(record.session, clients)
    match record:
        case ClaimingPartition():
            what = f"{record.topic}:{record.partition}" if record.partition >= 0 else record.topic or "the pin"
            start = f", starting at {record.start}" if record.start != NONE else ""
            return f"{who} claims {what}{start}"
        case ReleasingPartition():
            at = f" at {record.position}" if record.position != NONE else ""
            successor = f" for {_session(record.successor, clients)}" if record.successor != NONE else ""
            back = f", gives back from {record.give} on" if record.observed not in (NONE, record.give) else ""
            parked = f", parked: {record.parked}" if record.parked else ""
            return f"{who} releases claim {record.epoch}{at}{successor}{_because(record.reason)}{back}{parked}"
        case SeekingPartition():
            return f"{who} seeks to {record.position} under claim {record.epoch}"
        case ClaimingMessages():
            first = record.ranges[0]
            more = f" and of {len(record.ranges) - 1} more" if len(record.ranges) > 1 else ""
            return f"{who} takes messages {first.start} to {first.to - 1} of claim {first.epoch}{more}"


def _note_request(record: Note) -> str:
    where = f" {record.topic}:{record.partition}" if record.topic else ""
    span = f" {record.from_} to {record.to}" if record.from_ != NONE else ""
    return f"note: {record.kind}{where}{span}{_because(record.text)}"


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _by(who: str) -> str:
    return f", by {who}" if who else ""
