"""Makes the advisories of a log, in the order of its records. Every reader gets the same, whenever it replays the log.

The caller folds the log and passes each verdict in. An accepted record may make the world forget who was alive and who
owned what, so this module remembers what was so before the record. Pure. protocol/member/advisory.py lists the kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, cast

from msgspec import Struct, field

from marshal_py.protocol.claims import suspicion
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.member.advisory import PROBE, Advisory, AdvisoryKind, GroupEvents, silence, unpinned_by
from marshal_py.protocol.member.waiting import READABLE, lasting
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import NONE, PIN, TopicPartition
from marshal_py.protocol.wire.records import (
    DIED,
    ClaimingMessages,
    ClaimingPartition,
    Evict,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    Note,
    Record,
    ReleasingPartition,
    SeekingPartition,
    StepDown,
    Topology,
    died,
)

# Kinds that one cause produces for many partitions at once; `to_lines` puts those in one line.
TOGETHER: Final = frozenset({"claimed", "revoking", "released", "parked", "lost", "moved"})
PARKED: Final = "parked"
NAMES_MAX: Final = 10_000  # ended sessions per group whose client ids are kept for late Notes


class _KnownGroup(Struct):
    """What was so in a group before the record. `names`: client id by session, with the newest ended ones."""

    events: GroupEvents
    names: dict[int, str] = {}
    sessions: set[int] = set()
    claims: dict[int, tuple[TopicPartition, int]] = {}  # by epoch: (partition, session)
    owned: Counter[int] = field(default_factory=Counter)  # by session: how many partitions it owns, without covers
    unserved: dict[tuple[str, str, tuple[int, ...]], str] = {}  # what nobody may own, by cause, topic, sessions
    free_positions: dict[TopicPartition, int] = {}  # position of each partition when it was last released


class _Event(NamedTuple):
    """The fields of an advisory that depend on its kind."""

    kind: AdvisoryKind
    session: int = NONE
    tp: TopicPartition | None = None
    epoch: int = NONE
    offset: int = NONE
    to: int = NONE
    text: str = ""


class Advisories:
    """Makes the advisories of one log, from verdicts that the caller passes to `read` in the log's order."""

    def __init__(self, world: World) -> None:
        """Starts after the part of the log that `world` holds. Nothing in that part becomes an advisory."""
        self._log = world.log
        self._groups: dict[str, _KnownGroup] = {}
        for name, group in world.groups.items():
            known = self._groups[name] = _KnownGroup(GroupEvents(group))
            known.names |= {session.id: session.join.client_id for session in group.sessions.values()}
            known.free_positions |= {tp: partition.position for tp, partition in group.partitions.items()}
            known.sessions |= group.sessions.keys()
            known.claims |= {epoch: (partition.tp, partition.owner) for epoch, partition in group.claims.items()}
            known.unserved = lasting(group)
            known.owned.update(session for tp, session in known.claims.values() if tp.partition != NONE)

    def read(self, group: Group | None, verdict: Verdict, time_ms: int) -> list[Advisory]:
        """Returns the advisories of a folded record. `time_ms`: its timestamp. `group`: after the record, or None."""
        record = verdict.record
        if isinstance(record, Heartbeat) or not verdict.group:
            return []
        if not verdict.accepted:
            return self._opaque(group, verdict, time_ms)
        known = self._groups.get(verdict.group)
        if known is None:
            known = self._groups[verdict.group] = _KnownGroup(GroupEvents())
        if isinstance(record, Join):
            known.names[verdict.offset] = record.client_id
            if len(known.names) > NAMES_MAX + len(known.sessions):
                del known.names[next(name for name in known.names if name not in known.sessions)]
        events = list(self._events_of(known, group, verdict, record))
        return [self._advisory(known, verdict, time_ms, event) for event in events]

    def _opaque(self, group: Group | None, verdict: Verdict, time_ms: int) -> list[Advisory]:
        """Returns an advisory if only a newer library can read the record (E5); other rejected ones cause none."""
        if group is None or group.opaque_at != verdict.offset:
            return []
        return [
            Advisory("opaque", verdict.group, text=READABLE, log=self._log, log_offset=verdict.offset, time_ms=time_ms)
        ]

    def _advisory(self, known: _KnownGroup, verdict: Verdict, time_ms: int, event: _Event) -> Advisory:
        topic, partition = event.tp if event.tp is not None else ("", NONE)
        return Advisory(
            kind=event.kind,
            group=verdict.group,
            client_id=known.names.get(event.session, ""),
            topic=topic,
            partition=partition,
            epoch=event.epoch,
            offset=event.offset,
            to=event.to,
            text=event.text,
            session=event.session,
            log=self._log,
            log_offset=verdict.offset,
            time_ms=time_ms,
        )

    def _events_of(
        self, known: _KnownGroup, group: Group | None, verdict: Verdict, record: Record | None
    ) -> Iterator[_Event]:
        at = verdict.offset
        match record:
            case Note() if record.kind != PROBE:
                tp = TopicPartition(record.topic, record.partition) if record.topic else None
                epoch = next((epoch for epoch, claim in known.claims.items() if claim == (tp, record.session)), NONE)
                kind = cast(AdvisoryKind, record.kind)  # or that of a newer library
                yield _Event(kind, record.session, tp, epoch, record.from_, record.to, record.text)
            case StepDown():
                why = ", ".join(part for part in (record.reason, f"by {record.by}" if record.by else "") if part)
                yield _Event("stepped_down", record.session, text=why)
            case ClaimingMessages():
                for wanted in [record.ranges[index] for index in verdict.granted]:
                    if wanted.start > wanted.from_:
                        tp, session = known.claims[wanted.epoch]
                        yield _Event("skipped", session, tp, wanted.epoch, wanted.from_, wanted.start)
            case ClaimingPartition() if group is not None:
                claim = group.claims[at]
                known.claims[at] = claim.tp, claim.owner
                if claim.tp.partition != NONE:
                    known.owned[claim.owner] += 1
                    if known.owned[claim.owner] == 1:
                        yield _Event("activated", claim.owner, text=group.sessions[claim.owner].join.member)
                if claim.tp == PIN:
                    yield _Event("pinned", claim.owner, epoch=at, text=_priority_group(group))
                else:
                    yield _Event("claimed", claim.owner, claim.tp, at, claim.position)
                    if text := suspicion(group, claim):
                        yield _Event("poison_message", claim.owner, claim.tp, at, claim.position, text=text)
            case ReleasingPartition() if group is not None:
                why = record.reason
                if record.parked:
                    why = records.parked_text(group.name, known.claims[record.epoch][0], record.parked, why)
                yield from self._end_of_claim(
                    known, group, record.epoch, "parked" if record.parked else "released", why, record
                )
            case SeekingPartition() if group is not None:
                tp, session = known.claims[at] = known.claims.pop(record.epoch)
                yield _Event("moved", session, tp, at, to=record.position, text="by its owner")
            case Join() | Leave() | Evict() | GroupConfig() if group is not None:
                yield from self._sessions(known, group, at, record)
        if isinstance(record, Join | Leave | Evict | GroupConfig | Topology) and group is not None:
            before, known.unserved = known.unserved, lasting(group)
            for key, text in known.unserved.items():
                _, topic, sessions = key
                if before.get(key) != text:
                    where = TopicPartition(topic, NONE) if topic else None
                    yield _Event("unserved", sessions[0] if sessions else NONE, where, text=text)
        if isinstance(record, GroupConfig | Topology) and group is not None:  # it may forget positions (F9.5, F9.10)
            known.free_positions = {tp: partition.position for tp, partition in group.partitions.items()}
        for kind, tp, to, text in known.events.read(record):
            was = NONE
            if kind == "moved" and tp is not None:
                was, known.free_positions[tp] = known.free_positions.get(tp, NONE), to
            yield _Event(kind, tp=tp, offset=was, to=to, text=text)

    def _end_of_claim(
        self, known: _KnownGroup, group: Group, epoch: int, kind: AdvisoryKind, why: str, record: Record
    ) -> Iterator[_Event]:
        tp, session = known.claims.pop(epoch)
        if tp == PIN:
            yield _Event("unpinned", session, epoch=epoch, text=unpinned_by(record))
            return
        part = group.partitions.get(tp)  # None: of a whole topic, whose group this record has deleted (F9.5)
        position = known.free_positions[tp] = NONE if part is None else part.position
        yield _Event(kind, session, tp, epoch, position, text=why)
        if (lost := group.unsettled(tp)) is not None:
            yield _Event(
                "amo_lost", session, tp, epoch, lost.start, lost.to, f"at most {lost.to - lost.start} messages"
            )
        if tp.partition != NONE:
            known.owned[session] -= 1
            if not known.owned[session]:
                del known.owned[session]
                yield _Event("deactivated", session, text=why)

    def _sessions(self, known: _KnownGroup, group: Group, at: int, record: Record) -> Iterator[_Event]:
        """Yields an event per session and claim that the record at `at` ended, sessions first, and for the one that it
        began. `known`, `group`: before and after."""
        ending, why = _ending(at, record)
        for session in sorted(known.sessions - group.sessions.keys()):
            yield _Event(ending, session, text=why)
        for epoch in sorted(known.claims.keys() - group.claims.keys()):
            yield from self._end_of_claim(known, group, epoch, "lost", f"the session {_VERBS[ending]}", record)
        known.sessions = set(group.sessions)
        if isinstance(record, Join):
            yield _Event("joined", at, text=record.member)


def _priority_group(group: Group) -> str:
    return group.config.priority_groups[0] if group.config is not None and group.config.priority_groups else ""


_VERBS: Final = {
    "left": "left",
    "died": "ended by its witness",
    "evicted": "was evicted",
    "replaced": "was replaced",
    "ended": "ended",
}


def _ending(at: int, record: Record | None) -> tuple[AdvisoryKind, str]:
    """Returns two texts about the sessions that a record ends: the kind of their advisories, and why they end. `at`:
    the record's offset. The kind is "left", "died", "evicted", "replaced" or "ended"."""
    match record:
        case Leave():
            return ("died", record.reason[len(DIED) + 2 :]) if died(record) else ("left", record.reason)
        case Evict():
            return "evicted", silence(record)
        case Join():
            return "replaced", f"its client joined again as session {at}"
        case GroupConfig(deleted=True):
            return "ended", "the group was deleted"
    return "ended", "the group's mode changed"


def to_lines(advisories: Iterable[Advisory]) -> Iterator[tuple[list[Advisory], str]]:
    """Yields (advisories, their one line). Those of a kind in TOGETHER that differ in the partition alone share a line,
    parked ones by the reason's name, where the first stands."""
    lines: dict[tuple[str, ...] | int, list[Advisory]] = {}
    for number, one in enumerate(advisories):
        alike = one.kind in TOGETHER and one.partition != NONE
        why = one.text.partition(":")[0] if one.kind == PARKED else one.text
        key = (one.kind, one.group, one.client_id, one.topic, why) if alike else number
        lines.setdefault(key, []).append(one)
    for alike_ones in lines.values():
        yield alike_ones, to_text(alike_ones[0]) if len(alike_ones) == 1 else _many(alike_ones)


def _many(alike: list[Advisory]) -> str:
    """Returns one line for many: `claimed 12 partitions of orders: 0-11 (billing-1): why`."""
    one = alike[0]
    who = f" ({one.client_id})" if one.client_id else ""
    numbers = ranges_text(advisory.partition for advisory in alike)
    example = f", for example {one.topic}:{one.partition}" if one.kind == PARKED else ""
    return f"{one.kind} {len(alike)} partitions of {one.topic}: {numbers}{who}{example}{_reason(one)}"


def ranges_text(numbers: Iterable[int]) -> str:
    """Returns numbers as ranges, for example `0-3, 7, 9-11`."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def to_text(advisory: Advisory) -> str:
    """Returns an advisory as one line for people, for example `claimed orders:3 from 120 (billing-1): why`."""
    where = f" {advisory.topic}" if advisory.topic else ""
    where += f":{advisory.partition}" if advisory.topic and advisory.partition != NONE else ""
    word = "from" if advisory.to != NONE or advisory.kind == "claimed" else "at"
    span = f" {word} {advisory.offset}" if advisory.offset != NONE else ""
    span += f" to {advisory.to}" if advisory.to != NONE else ""
    who = f" ({advisory.client_id})" if advisory.client_id else ""
    return f"{advisory.kind}{where}{span}{who}{_reason(advisory)}"


def _reason(advisory: Advisory) -> str:
    """Returns the text of an advisory after a colon, in one line: users may have written any characters there."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in advisory.text)
    return f": {text}" if text else ""
