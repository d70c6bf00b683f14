"""Says what a log did, in sentences and as values: one verdict, why a partition is as it is, how states differ.

To explain, the caller passes a world and the raw records that follow it: a fresh world and the whole log, or the world
of a snapshot and the rest of the log. The records are folded up to the cut. A record belongs to a partition's story if
it changed the partition or tried to. All is pure, but for the file of a state that was wrong.

A client that diverged saves its state as plain values (`save_state`), and `marshal explain --state` compares it with
the log. Fields are named as in PROTOCOL.md, 5; record bodies appear as their hashes in hex, as in the digest.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from marshal_py.errors import Diverged, InvalidOption, first_of
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.rationalizer import Outcome, Verdict
from marshal_py.protocol.fold.world import Group, Span, World
from marshal_py.protocol.member.advisory import PROBE
from marshal_py.protocol.member.group_settings import SETTINGS
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.waiting import unserved
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    EVICT_INTERVALS,
    INTERVAL_MS_MIN,
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
    "opaque": "its group holds records that this installation cannot read",
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
    "unsigned": "the group has admin keys, and it is not signed",
    "key": "its key is not one of the group's",
    "signature": "its signature is false",
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
                return f"the pause ends{_because(record.reason)}{_by(record.by)}"
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


NOTABLE: Final = (Join, Leave, Evict, StepDown, ReleaseGroup, SetPosition, GroupConfig, Topology)  # what a diff tells
LINES_MAX: Final = 20  # how many lines a story has; older lines are only counted


class RawRecord(Protocol):
    """A record of a log that was not decoded yet, for example a transport.ports.LogRecord."""

    @property
    def offset(self) -> int: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def timestamp_ms(self) -> int: ...


class Cut(NamedTuple):
    """A point of the log: after the record at `offset`, or before the first one later than `time_ms` (since 1970, by
    the writers' clocks); the end without either."""

    offset: int | None = None
    time_ms: int | None = None

    def excludes(self, record: RawRecord) -> bool:
        if self.offset is not None and record.offset > self.offset:
            return True
        return self.time_ms is not None and record.timestamp_ms > self.time_ms


class Line(NamedTuple):
    """Tells one record of a story: `text` in words, `verdict` as `describe.as_dict` returns it."""

    offset: int
    time_ms: int
    text: str
    verdict: dict[str, Any]


class PartitionStanding(Struct, frozen=True):
    """The state of a partition. `owner`: the client id of `session`. `parked`: why nobody may own it."""

    owner: str | None = None
    session: int | None = None
    epoch: int | None = None
    position: int | None = None
    generation: int = 0
    parked: str | None = None


class Explanation(NamedTuple):
    """The answer of `explain`: the partition's state at the cut (`standing`), and the story of how it came about
    (`lines`). `at_offset`, `at_ms`: offset and time of the last record that was read, of any group. `left_out`: how
    many older lines of the story are not in `lines`. `known`: whether the group had the partition at the cut.
    `unserved`: why the policy gives the partition to nobody, "" if somebody may claim it, owns it, or it is parked.
    `causes`: offsets of the records that the present state comes from, `version` of the one that last changed owner or
    position; those from before the story are told by `with_causes`."""

    group: str
    tp: TopicPartition
    at_offset: int
    at_ms: int
    standing: PartitionStanding
    paused: bool
    deleted: bool
    lines: list[Line]
    left_out: int
    known: bool
    unserved: str
    version: int
    causes: tuple[int, ...]


def fold(world: World, records: Iterable[RawRecord], cut: Cut) -> Iterator[tuple[RawRecord, Verdict]]:
    """Folds the records up to the cut onto `world`. Yields each of them with its verdict."""
    for record in records:
        if cut.excludes(record):
            return
        yield record, rationalizer.apply(world, record.offset, record.value)


def explain(
    world: World, records: Iterable[RawRecord], name: str, tp: TopicPartition, cut: Cut, lines_max: int = LINES_MAX
) -> Explanation:
    """Explains owner and position of `tp` at the cut. `world`: folded to where `records` begin. `lines_max`: of the
    story. Raises CoordinationError."""
    story = _Story(world.groups.get(name), tp, lines_max)
    at_offset, at_ms = NONE, NONE
    for record, verdict in fold(world, records, cut):
        at_offset, at_ms = record.offset, record.timestamp_ms
        if verdict.group == name:
            story.read(world.groups.get(name), verdict, record.timestamp_ms)
    group, now = world.groups.get(name), story.standing
    paused, deleted = (group.paused, group.deleted) if group is not None else (False, False)
    causes = {story.version, NONE if now.epoch is None else now.epoch}
    causes |= {group.pause_change} if group is not None and group.paused else set()
    causes |= {group.deleted_at} if group is not None and group.deleted else set()
    known = group is not None and (tp in group.partitions or group.partition_exists(tp))
    free = tp.partition >= 0 and now.owner is None and not now.parked
    why = unserved(group).get(tp.topic, "") if group is not None and free else ""
    return Explanation(
        group=name,
        tp=tp,
        at_offset=at_offset,
        at_ms=at_ms,
        standing=story.standing,
        paused=paused,
        deleted=deleted,
        lines=story.lines,
        left_out=story.left_out,
        known=known,
        unserved=str(why),
        version=story.version,
        causes=tuple(sorted(causes - {NONE})),
    )


def with_causes(found: Explanation, earlier: Iterable[tuple[int, int, Record]], lines_max: int) -> Explanation:
    """Returns the explanation with older lines in front. `earlier`: (offset, ms since 1970, record), accepted `causes`,
    in order. Within `lines_max` the causes stay."""
    now, lines = found.standing, list[Line]()
    for offset, time_ms, record in earlier:
        verdict = Verdict(offset, Outcome.ACCEPTED, "", found.group, record)
        before = replace(now, owner=None, session=None, parked=None) if offset == found.version else now
        clients = {now.session: now.owner} if now.session is not None and now.owner is not None else {}
        text = describe(verdict, clients) + _change(before, now, None)
        lines.append(Line(offset, time_ms, text, as_dict(verdict)))
    lines = lines[-lines_max:]
    kept = found.lines[max(0, len(lines) + len(found.lines) - lines_max) :]
    return found._replace(lines=[*lines, *kept], left_out=found.left_out + len(found.lines) - len(kept))


def standing_of(group: Group | None, tp: TopicPartition) -> PartitionStanding:
    partition = group.partitions.get(tp) if group is not None else None
    if group is None or partition is None:
        return PartitionStanding()
    owner = group.sessions.get(partition.owner)
    return PartitionStanding(
        owner=None if owner is None else owner.join.client_id,
        session=None if owner is None else owner.id,
        epoch=None if partition.epoch == NONE else partition.epoch,
        position=None if partition.position == NONE else partition.position,
        generation=partition.generation,
        parked=partition.parked or None,
    )


class _Story:
    """Collects the records that changed one partition or tried to, in the order of the log."""

    def __init__(self, group: Group | None, tp: TopicPartition, lines_max: int) -> None:
        """`group`: as it is before the first record that `read` gets."""
        self.tp, self.lines_max = tp, lines_max
        self.standing = PartitionStanding()
        self.lines: list[Line] = []
        self.left_out = 0
        self._clients = _clients(group)
        self.version = NONE
        self._epochs: set[int] = set()  # claims on this partition, ended ones too
        self._note_state(group)
        self._heartbeat = NONE  # index of the last line if that is a heartbeat; the next heartbeat replaces it

    def read(self, group: Group | None, verdict: Verdict, time_ms: int) -> None:
        before = self.standing
        self._note_state(group)
        _note_client(self._clients, verdict)
        if before == self.standing and not self._concerns(verdict):
            return
        lost = group.unsettled(self.tp) if group is not None and before.owner is not None else None
        text = describe(verdict, self._clients) + _change(before, self.standing, lost)
        line = Line(verdict.offset, time_ms, text, as_dict(verdict))
        is_progress = isinstance(verdict.record, Heartbeat | ClaimingMessages) and verdict.accepted
        if is_progress and self._heartbeat == len(self.lines) - 1 >= 0:
            self.lines[-1] = line  # of many small steps forward, the last one says enough
        else:
            self.lines.append(line)
        self._heartbeat = len(self.lines) - 1 if is_progress else NONE
        if len(self.lines) > self.lines_max:
            self._forget_one()

    def _note_state(self, group: Group | None) -> None:
        self.standing = standing_of(group, self.tp)
        if group is not None and self.tp in group.partitions:
            self.version = group.partitions[self.tp].version
        if self.standing.epoch is not None:
            self._epochs.add(self.standing.epoch)

    def _forget_one(self) -> None:
        """Drops the oldest line, but not the newest accepted SetPosition, which explains the position, nor the last
        line."""
        moves = [
            line
            for line in self.lines
            if line.verdict["type"] == SetPosition.__name__
            and line.offset <= self.version
            and line.verdict["verdict"] == "accepted"
        ]
        at = next((at for at, line in enumerate(self.lines[:-1]) if not moves or line is not moves[-1]), 0)
        del self.lines[at]
        self.left_out += 1
        self._heartbeat -= 1

    def _concerns(self, verdict: Verdict) -> bool:
        """Returns whether a record that did not change the partition belongs to its story: it tried to, is a Note about
        it, or changed its topic or group."""
        match verdict.record:
            case ClaimingPartition() as record:
                return (record.topic, record.partition) == self.tp
            case ReleasingPartition() | SeekingPartition() as record:
                return record.epoch in self._epochs
            case ClaimingMessages() as record:
                return any(wanted.epoch in self._epochs for wanted in record.ranges)
            case SetPosition() as record:
                return any((move.topic, move.partition) == self.tp for move in record.moves)
            case ReleaseGroup() | GroupConfig():
                return verdict.accepted
            case StepDown() as record:  # why its owner hands it over, and who wanted that
                return verdict.accepted and record.session == self.standing.session
            case Topology() as record:
                return verdict.accepted and record.topic == self.tp.topic
            case Note() as record:
                return (record.topic, record.partition) == self.tp
        return False


def _clients(group: Group | None) -> dict[int, str]:
    """Returns the client ids of the sessions of a group, which `_note_client` adds to: a sentence names those that have
    ended, too."""
    return {} if group is None else {session.id: session.join.client_id for session in group.sessions.values()}


def _note_client(clients: dict[int, str], verdict: Verdict) -> None:
    if verdict.accepted and isinstance(verdict.record, Join):
        clients[verdict.offset] = verdict.record.client_id


def _change(before: PartitionStanding, after: PartitionStanding, lost: Span | None) -> str:
    """Returns what a record did to the partition, as a sentence's end, or "". `lost`: in at-most-once mode, by the
    owner whose session ended."""
    changes = []
    if before.session != after.session:
        changes.append("nobody owns it now" if after.owner is None else f"{after.owner} owns it now")
    if before.position != after.position:
        changes.append("its position is forgotten" if after.position is None else f"its position is {after.position}")
    if before.generation != after.generation:
        changes.append("a new generation begins")
    if before.parked != after.parked:
        changes.append(f"it is parked: {after.parked}" if after.parked else "it is parked no more")
    if lost is not None:
        changes.append(f"at most {lost.to - lost.start} messages are lost: {lost.start} to {lost.to - 1}")
    return f" -> {', '.join(changes)}" if changes else ""


# --- two points of the log


class Consumer(Struct, frozen=True):
    """A session, and the client id of its consumer."""

    session: int
    client_id: str


class Changed(Struct, frozen=True):
    """A partition at two points of the log."""

    topic: str
    partition: int
    from_: PartitionStanding
    to: PartitionStanding


class Difference(Struct, frozen=True):
    """What changed in a group between two points of its log, and nothing else. `settings`: "from" and "to" of each.
    `records`: how many of each type and outcome. `notable`: sessions, pauses, moves, step-downs, parking, settings,
    topics; the first one after a silence."""

    group: str
    from_offset: int
    to_offset: int
    joined: list[Consumer]
    ended: list[Consumer]
    partitions: list[Changed]
    settings: dict[str, dict[str, Any]]
    records: dict[str, int]
    notable: list[Line]


class _Snapshot(NamedTuple):
    at_offset: int
    sessions: dict[int, str]
    standings: dict[TopicPartition, PartitionStanding]
    settings: dict[str, Any]


def diff(world: World, records: Iterable[RawRecord], name: str, a: Cut, b: Cut) -> Difference:
    """Returns what changed in a group between the cuts. `world`: a fresh one for the whole log's `records`. Raises
    InvalidOption if `b` is before `a`."""
    first: _Snapshot | None = None
    counts: dict[str, int] = {}
    notable: list[Line] = []
    clients: dict[int, str] = {}
    last_ms = 0  # the group's last record, while it has consumers; else 0
    for record in records:
        if first is None and a.excludes(record):
            first = _snapshot(world, name)
            clients = dict(first.sessions)
        if b.excludes(record):
            if first is None:
                raise InvalidOption("b", b, f"a cut at {a} or after it")
            break
        verdict = rationalizer.apply(world, record.offset, record.value)
        if verdict.group != name:
            continue
        group, quiet_ms = world.groups.get(name), 0
        if not is_probe(verdict):
            quiet_ms = record.timestamp_ms - (last_ms or record.timestamp_ms)
            quiet_ms = quiet_ms if is_quiet(group, quiet_ms) else 0
            last_ms = max(last_ms, record.timestamp_ms) if group is not None and group.sessions else 0
        if first is None:
            continue
        kind = type(verdict.record).__name__ if verdict.record is not None else "unreadable"
        key = f"{kind} {verdict.outcome.name.lower()}"
        counts[key] = counts.get(key, 0) + 1
        _note_client(clients, verdict)
        parks = verdict.accepted and isinstance(verdict.record, ReleasingPartition) and verdict.record.parked
        if quiet_ms or parks or isinstance(verdict.record, NOTABLE):
            text = f"after {quiet_ms / 1000:.0f} s without a sign of life of any consumer: " if quiet_ms else ""
            text += describe(verdict, clients)
            notable.append(Line(record.offset, record.timestamp_ms, text, as_dict(verdict)))
    last = _snapshot(world, name)
    first = first or last
    nothing = PartitionStanding()
    tps = sorted(first.standings.keys() | last.standings.keys())
    partitions = [Changed(*tp, first.standings.get(tp, nothing), last.standings.get(tp, nothing)) for tp in tps]
    return Difference(
        group=name,
        from_offset=first.at_offset,
        to_offset=last.at_offset,
        joined=[Consumer(*one) for one in sorted(last.sessions.items() - first.sessions.items())],
        ended=[Consumer(*one) for one in sorted(first.sessions.items() - last.sessions.items())],
        partitions=[one for one in partitions if one.from_ != one.to],
        settings={
            key: {"from": first.settings[key], "to": value}
            for key, value in last.settings.items()
            if first.settings[key] != value
        },
        records=dict(sorted(counts.items())),
        notable=notable,
    )


def is_probe(verdict: Verdict) -> bool:
    """Returns whether a consumer that reads nothing back has tried whether it can: that is no sign of life."""
    return isinstance(verdict.record, Note) and verdict.record.kind == PROBE


def is_quiet(group: Group | None, quiet_ms: int) -> bool:
    """Returns whether any one consumer that gave no sign of life for so long would have been evicted."""
    if group is None or quiet_ms <= EVICT_INTERVALS * INTERVAL_MS_MIN:
        return False  # of nearly every record
    return quiet_ms > EVICT_INTERVALS * max(
        [each.join.interval_ms for each in group.sessions.values()], default=quiet_ms
    )


def _snapshot(world: World, name: str) -> _Snapshot:
    group = world.groups.get(name) or Group(name)
    config = group.config or GroupConfig(NONE)
    return _Snapshot(
        at_offset=world.next_offset - 1,
        sessions=_clients(group),
        standings={tp: standing_of(group, tp) for tp in group.partitions},
        settings={
            "mode": MODE_NAMES[group.mode],
            "paused": group.paused,
            "deleted": group.deleted,
            "policy": config.policy,
            "on_topic_recreated": config.on_topic_recreated,
            **{name: read(config) for name, read in SETTINGS.items()},
            "admin_keys": [key.hex() for key in config.admin_keys],
            "topics": {topic: state.count for topic, state in sorted(group.topics.items())},
            "topic_ids": {topic: state.id for topic, state in sorted(group.topics.items())},
        },
    )


NO_LIMIT: Final = 10**9  # sessions or partitions: nothing is left out of the log's own state
PARTITION_FIELDS: Final = (
    "owner", "epoch", "position", "generation", "version", "last_owner", "successor", "lag", "in_flight", "attempts",
    "floor", "parked",
)  # fmt: skip


class Differing(NamedTuple):
    """A field that differs: `held` in the client's state, `log` in the log's; None where it is missing."""

    entry: str  # group, topic orders, session 41, partition orders:0
    field: str
    held: Any
    log: Any


def plain_state(group: Group | None, entries_max: int) -> dict[str, dict[str, Any]]:
    """Returns all that the digest covers (G3), by entry ("session 41") and field, of a group, its topics, sessions and
    partitions; {} without one. At most `entries_max` sessions, the oldest, and partitions, the first."""
    if group is None:
        return {}
    found: dict[str, dict[str, Any]] = {
        "group": {
            "mode": group.mode,
            "pause_change": group.pause_change,
            "pause_duration_ms": group.pause_duration_ms,
            "config_offset": group.config_offset,
            "config": f"{group.config_hash:016x}",
            "opaque_at": group.opaque_at,
            "deleted_at": group.deleted_at,
        }
    }
    for name, topic in sorted(group.topics.items()):
        found[f"topic {name}"] = {
            "count": topic.count,
            "first_count": topic.first_count,
            "offset": topic.offset,
            "id": topic.id,
        }
    for _, session in sorted(group.sessions.items())[:entries_max]:
        found[f"session {session.id}"] = {
            "client_id": session.join.client_id,
            "join": f"{session.join_hash:016x}",
            "extended": session.extended,
            "mark": session.mark,
            "ready": list(session.ready),
            "sequence": session.sequence,
            "idle_ms": session.idle_ms,
        }
    for tp, partition in sorted(group.partitions.items())[:entries_max]:
        fields = {name: getattr(partition, name) for name in PARTITION_FIELDS}
        found[f"partition {tp}"] = {**fields, "progress": partition.progress.hex()}
    return found


def left_out(group: Group | None, entries_max: int) -> int:
    """Returns how many sessions and partitions `plain_state` leaves out with the same `entries_max`."""
    if group is None:
        return 0
    return sum(max(0, len(entries) - entries_max) for entries in (group.sessions, group.partitions))


def differences(
    held: dict[str, dict[str, Any]], log: dict[str, dict[str, Any]], whole: bool = True
) -> Iterator[Differing]:
    """Yields what differs between two results of `plain_state`. `whole`: `held` has every entry; else only its entries
    count."""
    entries = held.keys() | log.keys() if whole else held.keys()
    for entry in sorted(entries):
        mine, other = held.get(entry, {}), log.get(entry, {})
        for field in mine or other:
            if mine.get(field) != other.get(field):
                yield Differing(entry, field, mine.get(field), other.get(field))


def compare_with_log(kept: Mapping[str, Any], world: World, records: Iterable[RawRecord]) -> list[Differing] | None:
    """Returns how the state that a diverged client `kept` in its file differs from the log at the same offset; None if
    the log does not reach it or is another one. `world`: folded to where `records` begin. Raises CoordinationError."""
    for _ in fold(world, records, Cut(kept["at_offset"])):
        pass
    known = world.genesis.incarnation.hex() if world.genesis is not None else ""
    if world.next_offset != kept["at_offset"] + 1 or known != kept["incarnation"]:
        return None
    log = plain_state(world.groups.get(kept["group"]), NO_LIMIT)
    return list(differences(kept["state"], log, whole=not kept["left_out"]))


# --- Saves and loads the file that a consumer writes, for a bug report, when its state is wrong (PROTOCOL.md G7, G8)
#
# The log can be folded again at any time, but the state of this process is gone when it ends. So the file holds only
# the group's state in this process, the log's offset, and the digests that differ. `marshal explain GROUP --state FILE`
# compares the file with the log.


logger: Final = logging.getLogger("marshal_py")

VERSION: Final = 1
KEPT: Final = "a file that a consumer kept when it ended with Diverged"
BYTES_MAX: Final = 8_388_608  # per file: room for a group of 30,000 partitions; larger states are cut
ENTRIES_MAX: Final = 65_536  # of sessions, and of partitions, in the first attempt
NAME_CHARACTERS_MAX: Final = 60  # of the group's name in the file's name


def save_state(member: Member, error: Diverged, folder: str | None, library: str, time_ms: int) -> str:
    """Writes the file into `folder` ("": for temporary files) and returns its path; "" if that fails, which it logs, or
    for None."""
    if folder is None:
        return ""
    world = member.world
    fields: dict[str, Any] = {
        "evidence": "marshal",
        "version": VERSION,
        "by": library,
        "time_ms": time_ms,
        "group": member.name,
        "log": world.log,
        "incarnation": world.genesis.incarnation.hex() if world.genesis is not None else "",
        "client_id": member.options.client_id,
        "session": member.session,
        "at_offset": world.next_offset - 1,
        "first_difference": error.offset,
        "held": f"{error.held:016x}",
        "again": f"{error.again:016x}",
        "reason": error.reason,
    }
    most = ENTRIES_MAX
    while True:
        data = msgspec.json.encode(
            {**fields, "left_out": left_out(member.group, most), "state": plain_state(member.group, most)}
        )
        if len(data) <= BYTES_MAX:
            break
        most //= 2
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", member.name)[:NAME_CHARACTERS_MAX]
    try:
        # Only this user can read it: a state names clients and positions.
        number, path = tempfile.mkstemp(".json", f"marshal-diverged-{safe}-{error.offset}-", folder or None)
        with os.fdopen(number, "wb") as file:
            file.write(data + b"\n")
    except OSError as failed:
        logger.warning("group %s: the state that differs could not be kept: %s", member.name, failed)
        return ""
    return path


def load_state(path: Path, group: str) -> dict[str, Any]:
    """Returns the content of a file that `save_state` wrote. Raises InvalidOption for any other, or another group's."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidOption("--state", str(path), f"{KEPT}: {error}") from error
    if not isinstance(found, dict) or found.get("evidence") != "marshal" or found.get("version") != VERSION:
        raise InvalidOption("--state", str(path), f"{KEPT}, of version {VERSION}")
    if found["group"] != group:
        raise InvalidOption("--state", str(path), f"of group {group!r}; it is of {found['group']!r}")
    return found
