"""Turns a log into the rows of tables.py, in one pass over its records. Pure; decides nothing.

Every record goes through the rationalizer; its verdict and the world after it say what happened. Besides the world it
keeps only what the world forgets, because no rule needs it: what has begun and not ended, and since when. Timestamps
appear in rows and decide nothing. The rows do not depend on where a reader paused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import astuple, replace

from marshal_py.errors import InvalidOption
from marshal_py.history.tables import (
    TABLES,
    DigestRow,
    GapRow,
    IntervalRow,
    LostRow,
    MoveRow,
    PauseRow,
    PositionRow,
    RaceRow,
    RecordRow,
    Row,
    SessionRow,
    StandingRow,
)
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, Group, Partition, World
from marshal_py.protocol.member.advisory import UNCOMMITTED
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    EVICT_INTERVALS,
    MODE_NAMES,
    ClaimingMessages,
    ClaimingPartition,
    Evict,
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
    Topology,
)


class OpenSession(Struct):
    """A session; ended ones are kept, as late records may name them. `until_ms`: alive until then unless it writes.
    `sign_time_ms`: its last sign of life; `sign_lived_ms`: `Presence.lived_ms` then."""

    row: SessionRow
    sign_time_ms: int | None
    alive: bool = True
    until_ms: int = 0
    sign_lived_ms: int | None = None


class OpenGap(Struct):
    """A span without an owner, in which only an admin can move `position`. Its row has `Presence.lived_ms` as it was at
    its beginning, and at the last sign of life of the owner before."""

    row: GapRow
    position: int | None


class Presence(Struct):
    """Counts how long a member was alive while the group was not paused: until its session ends, but two intervals
    after its newest record at most, as others wait before they evict it. Timestamps never go back."""

    lived_ms: int = 0
    at_ms: int | None = None  # the latest timestamp so far; `lived_ms` is as of then
    until_ms: int = 0  # some member counts as alive until then unless another record comes

    def advance(self, time_ms: int, paused: bool) -> None:
        """Counts until `time_ms`, before which no record came. `paused`: from `at_ms` on."""
        if self.at_ms is not None and not paused:
            self.lived_ms += max(0, min(time_ms, self.until_ms) - self.at_ms)
        self.at_ms = time_ms if self.at_ms is None else max(time_ms, self.at_ms)

    def extend(self, lease_ms: int) -> int:
        """Notes a sign of life at `at_ms`, good for `lease_ms`. Returns until when the member counts as alive."""
        assert self.at_ms is not None  # its record has advanced the time
        until_ms = self.at_ms + lease_ms
        self.until_ms = max(self.until_ms, until_ms)
        return until_ms


class OpenGroup(Struct):
    """What has begun and not ended in a group, as the rows that it will be, and ended sessions. `sessions` by number,
    `claims` by epoch, `gaps` by topic and partition. `token`: offset of the newest record of the `pause`."""

    sessions: dict[int, OpenSession] = {}
    claims: dict[int, IntervalRow] = {}
    gaps: dict[str, dict[int, OpenGap]] = {}
    pause: PauseRow | None = None
    token: int | None = None
    winners: dict[str, dict[int, tuple[int, int, int | None]]] = {}  # last claim of a partition: epoch, session, time
    deleted: bool = False
    presence: Presence = msgspec.field(default_factory=Presence)

    def client(self, session: int | None) -> str | None:
        opened = self.sessions.get(session) if session is not None else None
        return None if opened is None else opened.row.client


def offset_or_none(value: int) -> int | None:
    return None if value == NONE else value


def _session(log: int, name: str, session: int, join: Join, time_ms: int | None) -> SessionRow:
    who = join.client_id, join.member, MODE_NAMES[join.mode]
    return SessionRow(log, name, session, *who, time_ms, None, None, None, "", None)


def _interval(
    log: int, name: str, part: Partition, client: str, time_ms: int | None, after: str | None, position: int | None
) -> IntervalRow:
    whose = log, name, *part.tp, client, part.owner, part.epoch
    return IntervalRow(*whose, time_ms, None, None, None, after, position, None, part.generation, 0)


def _gap(
    log: int, group: Group, tp: TopicPartition, begin: tuple[int | None, int | None], lived_ms: int | None
) -> OpenGap:
    """Returns the span of a partition that appears at `begin`, an offset and its time."""
    there = len(group.sessions), group.paused
    row = GapRow(log, group.name, *tp, *begin, None, None, "new", None, None, None, None, *there, lived_ms, None)
    known = group.partitions.get(tp)
    return OpenGap(row, None if known is None else offset_or_none(known.position))


def open_groups_of(world: World) -> dict[str, OpenGroup]:
    """Returns what is open in a world that was not folded from the log's beginning: since when is unknown (None)."""
    found: dict[str, OpenGroup] = {}
    for name, group in world.groups.items():
        opened = found[name] = OpenGroup(deleted=group.deleted)
        for session, state in group.sessions.items():
            opened.sessions[session] = OpenSession(_session(world.log, name, session, state.join, None), None)
        for epoch, part in group.claims.items():
            client = group.sessions[part.owner].join.client_id
            opened.claims[epoch] = _interval(world.log, name, part, client, None, None, None)
            opened.winners.setdefault(part.tp.topic, {})[part.tp.partition] = epoch, part.owner, None
        if group.paused:
            opened.token = group.pause_change
            opened.pause = PauseRow(world.log, name, None, None, None, None, group.pause_duration_ms, 0, "", "", None)
        owned = {part.tp for part in group.claims.values()}
        for topic, known in group.topics.items() if not group.deleted else ():
            gaps = opened.gaps[topic] = {}
            for tp in (TopicPartition(topic, number) for number in range(known.count)):
                if tp not in owned:
                    gaps[tp.partition] = _gap(world.log, group, tp, (None, None), None)
                    gaps[tp.partition].row = gaps[tp.partition].row._replace(cause=None)
    return found


NAMES_MAX: Final = 10_000  # ended sessions per group whose names are kept for late records; the oldest go first
LOST_NOTES: Final = ("offset_lost", UNCOMMITTED)
OUTCOMES: Final = ("accepted", "rejected", "ignored")
_TABLE_NAMES: Final[dict[type[Row], str]] = {row: name for name, row in TABLES.items()}


class Here(NamedTuple):
    """Where the reader is: a record's group after the record, what is open in that group, the record's place. At the
    end of what was read nothing ends (`ends`)."""

    group: Group
    opened: OpenGroup
    offset: int
    time_ms: int
    ends: bool = True

    @property
    def end(self) -> tuple[int | None, int | None]:
        """Returns offset and time of what ends here; None for what is still open."""
        return (self.offset, self.time_ms) if self.ends else (None, None)

    def part_of(self, claim: IntervalRow) -> Partition:
        """Returns the state of what was claimed, after the claim ended; nothing if that deleted the group, which ends
        only claims without a position (F9.5)."""
        tp = TopicPartition(claim.topic, claim.partition)
        return self.group.partitions.get(tp) or Partition(tp, 0)


class Timeline:
    """Folds a log onto `world` and collects rows. `take` returns the rows that were made since its last call."""

    def __init__(self, world: World, wanted: Collection[str] = tuple(TABLES)) -> None:
        """Starts after what `world` holds; since when its open things last is unknown. `wanted`: tables; InvalidOption
        for an unknown one."""
        for name in wanted:
            if name not in TABLES:
                raise InvalidOption("tables", name, f"one of {', '.join(TABLES)}")
        self.world = world
        self._open = open_groups_of(world)
        self._touched: set[str] = set()  # groups with records since the last checkpoint
        self._time_ms: int | None = None  # of the last record
        self._wanted = frozenset(wanted)
        self._wants_records = "records" in self._wanted  # kept because it is needed for every record
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES if name in self._wanted}
        self._digested: set[str] = set()  # groups that got a digest row at the last checkpoint
        self._handlers: dict[type[Record], Callable[[Here, Any], None]] = {
            Heartbeat: self._heartbeat,
            Join: self._join,
            Leave: self._leave,
            Evict: self._evict,
            ClaimingPartition: self._claim,
            ReleasingPartition: self._release,
            ClaimingMessages: self._grant,
            SeekingPartition: self._seek,
            ReleaseGroup: self._release_group,
            SetPosition: self._set_position,
            Topology: self._topology,
            GroupConfig: self._group_config,
            Note: self._note,
        }

    def read(self, offset: int, time_ms: int, value: bytes | None) -> Verdict:
        """Folds a record, makes its rows, returns the verdict. If the fold raises a CoordinationError, nothing has
        changed."""
        verdict = rationalizer.apply(self.world, offset, value)
        self._time_ms = time_ms
        name, record = verdict.group, verdict.record
        if name:
            opened = self._open.get(name) or OpenGroup()
            if self._wants_records:
                self._emit_record(opened, time_ms, verdict)
            if record is not None:
                self._tell(opened, time_ms, verdict, record)
            self._touched.add(name)
        elif self._wants_records:
            self._emit_record(OpenGroup(), time_ms, verdict)
        if offset % CHECKPOINT_OFFSETS == CHECKPOINT_OFFSETS - 1:
            self._emit_checkpoint()
        return verdict

    def _tell(self, opened: OpenGroup, time_ms: int, verdict: Verdict, record: Record) -> None:
        """Makes the rows of a record that can be read: of an accepted one, or of a claim that lost."""
        name = verdict.group
        here = Here(self.world.groups.get(name) or Group(name), opened, verdict.offset, time_ms)
        if not verdict.outcome:
            handler = self._handlers.get(type(record))
            if isinstance(record, ClaimingMessages):  # only the ranges that were granted (F5.2)
                record = replace(record, ranges=tuple(record.ranges[index] for index in verdict.granted))
            opened.presence.advance(time_ms, opened.pause is not None)
            if handler is not None:
                self._open[name] = opened
                handler(here, record)
                self._sign_of_life(here, record)
        elif verdict.reason in ("held", "observed") and isinstance(record, ClaimingPartition):
            self._race(here, record, verdict.reason)

    def finish(self) -> dict[str, list[Row]]:
        """Returns what `take` does and a row, with None as its end, for everything open. The Timeline may read on."""
        log, end = self.world.log, self.world.next_offset
        for name, group in sorted(self.world.groups.items()):
            opened, time_ms = self._open.get(name) or OpenGroup(), self._time_ms or 0
            opened.presence.advance(time_ms, opened.pause is not None)
            here = Here(group, opened, end, time_ms, ends=False)
            for session in opened.sessions.values():
                if session.alive:
                    self._emit_session(here, session)
            for claim in opened.claims.values():
                self._emit_interval(here, claim)
            for gap in (one for gaps in opened.gaps.values() for one in gaps.values()):
                self._emit_gap(here, gap)
            if opened.pause is not None:
                self._emit(opened.pause)
            for _, part in sorted(group.partitions.items()):
                self._emit_standing(here, part)
            if end % CHECKPOINT_OFFSETS or name not in self._digested:
                chain = None if end % CHECKPOINT_OFFSETS else f"{self.world.chain:016x}"
                self._emit(DigestRow(log, end, name, f"{group.digest():016x}", chain))
        return self.take()

    def take(self) -> dict[str, list[Row]]:
        """Returns the rows that were made since the last call, by table. Within a table they follow the log's order."""
        taken, self._rows = self._rows, {name: [] for name in self._rows}
        return taken

    @property
    def pending(self) -> int:
        """Returns how many rows the next call of `take` returns."""
        return sum(map(len, self._rows.values()))

    def _sign_of_life(self, here: Here, record: Record) -> None:
        """Notes that a record's session is alive: its writer's, so not the one that an Evict names."""
        group, opened = here.group, here.opened
        session = here.offset if isinstance(record, Join) else getattr(record, "session", NONE)
        if session in group.sessions and not isinstance(record, Evict):
            lease_ms = EVICT_INTERVALS * group.sessions[session].join.interval_ms
            opened.sessions[session].until_ms = opened.presence.extend(lease_ms)

    def _race(self, here: Here, record: ClaimingPartition, reason: str) -> None:
        """Makes a row if a claim lost to another session's; not for a copy of its own (F4.2), or a move, which nobody
        won."""
        tp, opened = TopicPartition(record.topic, record.partition), here.opened
        epoch, winner, winner_time_ms = opened.winners.get(tp.topic, {}).get(tp.partition, (NONE, NONE, None))
        if epoch != NONE and winner != record.session and record.observed < epoch:
            lost = record.session, opened.client(record.session), reason
            self._emit(RaceRow(*self._place(here, tp), *lost, winner, opened.client(winner), epoch, winner_time_ms))

    # --- one handler per kind of accepted record

    def _heartbeat(self, here: Here, record: Heartbeat) -> None:
        group, opened = here.group, here.opened
        if group.sessions[record.session].extended == here.offset:
            span = opened.sessions[record.session]
            span.sign_time_ms, span.sign_lived_ms = here.time_ms, opened.presence.lived_ms
        if record.claims and "positions" in self._wanted:
            for entry in record.claims:
                part = group.claims.get(entry.epoch)
                if part is not None and part.owner == record.session and part.tp.partition >= 0:
                    self._emit_position(here, part, "heartbeat", part.owner, entry.epoch)

    def _join(self, here: Here, record: Join) -> None:
        opened, time_ms = here.opened, here.time_ms
        before = opened.sessions.get(record.predecessor)
        if before is not None and before.alive:
            self._end(here, record.predecessor, "replaced")
        row = _session(self.world.log, here.group.name, here.offset, record, time_ms)
        opened.sessions[here.offset] = OpenSession(row, time_ms, sign_lived_ms=opened.presence.lived_ms)

    def _leave(self, here: Here, record: Leave) -> None:
        self._end(here, record.session, "leave")

    def _evict(self, here: Here, record: Evict) -> None:
        self._end(here, record.session, "evict", record.by)

    def _end(self, here: Here, session: int, ended: str, by: str = "") -> None:
        """Closes a session and its claims (F3.3). `by`: who evicted it, or "". `ended`: as in tables.SessionRow."""
        opened = here.opened
        ending = opened.sessions[session]
        for epoch in [epoch for epoch, claim in opened.claims.items() if claim.session == session]:
            self._free(here, epoch, ended)
        self._emit_session(here, ending, ended, by)
        ending.alive = False
        opened.presence.until_ms = max((kept.until_ms for kept in opened.sessions.values() if kept.alive), default=0)
        if len(opened.sessions) > NAMES_MAX + len(here.group.sessions):
            del opened.sessions[next(known for known, kept in opened.sessions.items() if not kept.alive)]

    def _free(self, here: Here, epoch: int, ended: str) -> None:
        """Closes the claim and opens a span without an owner. `ended`: as in tables.IntervalRow."""
        group, opened = here.group, here.opened
        claim = opened.claims.pop(epoch)
        self._emit_interval(here, claim, ended)
        owner, part = opened.sessions[claim.session], here.part_of(claim)
        if (lost := group.unsettled(part.tp)) is not None:
            self._emit_lost(here, part.tp, claim.session, lost.start, lost.to, "amo_lost", part.generation)
        gap = self._new_gap(here, part.tp)
        before: dict[str, Any] = {"cause": ended, "client": claim.client, "last_sign_time_ms": owner.sign_time_ms}
        gap.row = gap.row._replace(**before, take_over_ms=owner.sign_lived_ms)
        gap.position = offset_or_none(part.position)
        opened.gaps.setdefault(claim.topic, {})[claim.partition] = gap

    def _claim(self, here: Here, record: ClaimingPartition) -> None:
        topic, partition, opened, epoch = record.topic, record.partition, here.opened, here.offset
        part = here.group.claims[epoch]
        gap = opened.gaps.get(topic, {}).pop(partition, None)
        if gap is not None:
            self._emit_gap(here, gap, record.session)
        after = "new" if gap is None else gap.row.cause
        client, position = opened.sessions[record.session].row.client, offset_or_none(part.position)
        opened.claims[epoch] = _interval(self.world.log, here.group.name, part, client, here.time_ms, after, position)
        opened.winners.setdefault(topic, {})[partition] = epoch, record.session, here.time_ms
        if partition >= 0:
            self._emit_position(here, part, "claim", record.session, epoch)

    def _release(self, here: Here, record: ReleasingPartition) -> None:
        claim = here.opened.claims[record.epoch]
        self._free(here, record.epoch, "release")
        if claim.partition >= 0:
            part = here.group.partitions[TopicPartition(claim.topic, claim.partition)]
            self._emit_position(here, part, "release", record.session, record.epoch)

    def _grant(self, here: Here, record: ClaimingMessages) -> None:
        for epoch, from_, start, _ in map(astuple, record.ranges):
            part = here.group.claims[epoch]
            if start > from_:
                self._emit_lost(here, part.tp, record.session, from_, start, "skipped", part.generation)
            self._emit_position(here, part, "grant", record.session, epoch)

    def _seek(self, here: Here, record: SeekingPartition) -> None:
        """Closes the claim whose owner moved its position, and opens a claim of the same owner here (F6.6)."""
        claim, part = here.opened.claims.pop(record.epoch), here.group.claims[here.offset]
        self._emit_interval(here, claim, "seek")
        here.opened.claims[here.offset] = _interval(
            claim.log, claim.group, part, claim.client, here.time_ms, "seek", part.position
        )
        self._emit_position(here, part, "seek", record.session, here.offset)

    def _release_group(self, here: Here, record: ReleaseGroup) -> None:
        opened, said = here.opened, (record.reason, record.by)
        if record.duration_ms == 0:
            self._end_pause(here, "waited" if opened.pause is not None and record.token != opened.token else "resume")
            return
        if opened.pause is None:
            begin = self.world.log, here.group.name, here.offset, here.time_ms
            opened.pause = PauseRow(*begin, None, None, record.duration_ms, 0, *said, None)
        else:
            renewals, (reason, by) = opened.pause.renewals + 1, said
            opened.pause = opened.pause._replace(
                renewals=renewals, duration_ms=record.duration_ms, reason=reason, by=by
            )
        opened.token = here.offset

    def _end_pause(self, here: Here, ended: str) -> None:
        if here.opened.pause is not None:
            self._emit(here.opened.pause._replace(to_offset=here.offset, to_time_ms=here.time_ms, ended=ended))
            here.opened.pause = None

    def _set_position(self, here: Here, record: SetPosition) -> None:
        for move in record.moves:
            part = here.group.partitions[TopicPartition(move.topic, move.partition)]
            gap = here.opened.gaps[move.topic][move.partition]
            place = self._place(here, part.tp)
            self._emit(MoveRow(*place, gap.position, move.position, part.generation, record.by))
            gap.position = move.position
            self._emit_position(here, part, "move", None, None)
        if record.resume:
            self._end_pause(here, "set_position")

    def _topology(self, here: Here, record: Topology) -> None:
        """Opens a span per partition that appears, and closes those of what is cut off (F9.2)."""
        group, opened = here.group, here.opened
        gaps = opened.gaps.setdefault(record.topic, {})
        for partition in [p for p in gaps if p >= record.partitions]:
            self._emit_gap(here, gaps.pop(partition))
        for partition, gap in gaps.items():
            known = group.partitions.get(TopicPartition(record.topic, partition))
            if known is not None and known.position == NONE:
                gap.position = None  # forgotten with the topic that was deleted (F9.10)
        owned = {claim.partition for claim in opened.claims.values() if claim.topic == record.topic}
        for partition in range(record.partitions):
            if partition not in owned and partition not in gaps:
                gaps[partition] = self._new_gap(here, TopicPartition(record.topic, partition))

    def _group_config(self, here: Here, record: GroupConfig) -> None:
        group, opened = here.group, here.opened
        for session in [one for one, kept in opened.sessions.items() if kept.alive and one not in group.sessions]:
            self._end(here, session, "deleted" if record.deleted else "mode")
        if record.deleted and not opened.deleted:
            self._end_pause(here, "deleted")
            for gap in (gaps[partition] for gaps in opened.gaps.values() for partition in sorted(gaps)):
                self._emit_gap(here, gap)
            opened.gaps.clear()
        elif opened.deleted and not record.deleted:
            for topic, known in group.topics.items():
                tps = (TopicPartition(topic, partition) for partition in range(known.count))
                opened.gaps[topic] = {tp.partition: self._new_gap(here, tp) for tp in tps}
        opened.deleted = record.deleted

    def _new_gap(self, here: Here, tp: TopicPartition) -> OpenGap:
        return _gap(self.world.log, here.group, tp, (here.offset, here.time_ms), here.opened.presence.lived_ms)

    def _note(self, here: Here, record: Note) -> None:
        if record.kind in LOST_NOTES and record.partition >= 0 and 0 <= record.from_ < record.to:
            tp, session = TopicPartition(record.topic, record.partition), offset_or_none(record.session)
            part = here.group.partitions.get(tp)
            generation = 0 if part is None else part.generation
            self._emit_lost(here, tp, session, record.from_, record.to, record.kind, generation)

    # --- the rows; each method makes one

    def _emit(self, row: Row) -> None:
        rows = self._rows.get(_TABLE_NAMES[type(row)])
        if rows is not None:
            rows.append(row)

    def _place(self, here: Here, tp: TopicPartition) -> tuple[int, int, int, str, str, int]:
        """Returns the fields with which each row about one partition begins: log, offset, time, group, topic,
        partition."""
        return self.world.log, here.offset, here.time_ms, here.group.name, tp.topic, tp.partition

    def _emit_checkpoint(self) -> None:
        """At a checkpoint (G1): makes a digest row per group with records since the last one."""
        if "digests" in self._wanted:
            at, chain = self.world.next_offset, f"{self.world.chain:016x}"
            for name in sorted(self._touched):
                group = self.world.groups.get(name)
                if group is not None:
                    self._emit(DigestRow(self.world.log, at, name, f"{group.digest():016x}", chain))
        self._digested = set(self._touched)
        self._touched.clear()

    def _emit_record(self, opened: OpenGroup, time_ms: int, verdict: Verdict) -> None:
        record, session, topic, partition, position = verdict.record, None, None, None, None
        client: str | None = None
        match record:
            case Join():
                session, client = verdict.offset if not verdict.outcome else None, record.client_id
            case ClaimingPartition():
                topic, partition, position = record.topic, record.partition, offset_or_none(record.start)
            case ReleasingPartition():
                position = offset_or_none(record.position)
            case ClaimingMessages():
                position = record.ranges[0].to if len(record.ranges) == 1 else None
            case Topology():
                topic = record.topic
            case Note():
                topic, partition = record.topic or None, offset_or_none(record.partition)
                position = offset_or_none(record.from_)
        if record is not None and client is None:
            session = offset_or_none(getattr(record, "session", NONE))
            client = opened.client(session)
        epoch = getattr(record, "epoch", None)
        if isinstance(record, ClaimingMessages) and len(record.ranges) == 1:
            epoch = record.ranges[0].epoch
        if epoch is not None and epoch in opened.claims:
            topic, partition = opened.claims[epoch].topic, opened.claims[epoch].partition
        what = verdict.group, None if record is None else type(record).__name__, session, client
        told = OUTCOMES[verdict.outcome], verdict.reason
        self._emit(RecordRow(self.world.log, verdict.offset, time_ms, *what, topic, partition, position, *told))

    def _emit_session(self, here: Here, session: OpenSession, ended: str | None = None, by: str = "") -> None:
        to_offset, to_time_ms = here.end
        self._emit(
            session.row._replace(
                to_offset=to_offset, to_time_ms=to_time_ms, ended=ended, by=by, last_sign_time_ms=session.sign_time_ms
            )
        )

    def _emit_interval(self, here: Here, claim: IntervalRow, ended: str | None = None) -> None:
        part, (to_offset, to_time_ms) = here.part_of(claim), here.end
        position = offset_or_none(part.position)
        end: dict[str, Any] = {
            "to_offset": to_offset,
            "to_time_ms": to_time_ms,
            "ended": ended,
            "to_position": position,
        }
        self._emit(claim._replace(**end, in_flight=part.in_flight))

    def _emit_gap(self, here: Here, gap: OpenGap, next_session: int | None = None) -> None:
        """Makes a row for a span in which nobody owned a partition; none for claims on a topic or the group.
        `next_session`: the one whose claim ended it, if a claim did."""
        row, now_ms = gap.row, here.opened.presence.lived_ms
        if row.partition < 0:
            return
        to_offset, to_time_ms = here.end
        self._emit(
            row._replace(
                to_offset=to_offset,
                to_time_ms=to_time_ms,
                next_session=next_session,
                next_client=here.opened.client(next_session),
                lived_ms=None if row.lived_ms is None else now_ms - row.lived_ms,
                take_over_ms=None if row.take_over_ms is None else now_ms - row.take_over_ms,
            )
        )

    def _emit_position(self, here: Here, part: Partition, cause: str, session: int | None, epoch: int | None) -> None:
        place, client = self._place(here, part.tp), here.opened.client(session)
        self._emit(PositionRow(*place, session, client, epoch, *_figures(part), cause=cause))

    def _emit_lost(
        self, here: Here, tp: TopicPartition, session: int | None, start: int, to: int, cause: str, generation: int
    ) -> None:
        """Makes a row for the messages `start` to `to` - 1."""
        client = here.opened.client(session)
        self._emit(LostRow(*self._place(here, tp), session, client, start, to, cause, generation))

    def _emit_standing(self, here: Here, part: Partition) -> None:
        place = self.world.log, self.world.next_offset, self._time_ms, here.group.name, *part.tp
        owner, epoch = offset_or_none(part.owner), offset_or_none(part.epoch)
        client = here.opened.client(owner)
        self._emit(StandingRow(*place, owner, client, epoch, *_figures(part), parked=part.parked or None))


def _figures(part: Partition) -> tuple[int | None, int, int, int, int]:
    """Returns what a row says of a partition's state: position, generation, lag, in_flight, attempts."""
    return offset_or_none(part.position), part.generation, part.lag, part.in_flight, part.attempts
