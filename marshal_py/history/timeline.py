"""Turns a log into the rows of tables.py, in one pass over its records. Pure; decides nothing.

Every record goes through the rationalizer; its verdict and the world after it say what happened. Besides the world it
keeps only what the world forgets (open_state.py). Timestamps appear in rows and decide nothing. The rows do not depend
on where a reader paused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

from msgspec.structs import astuple, replace

from marshal_py.errors import InvalidOption
from marshal_py.history.open_state import (
    Claim,
    FreeSpan,
    OpenGroup,
    OpenState,
    Pause,
    SessionSpan,
    new_span,
    offset_or_none,
    open_state_of,
)
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
from marshal_py.protocol.wire.intervals import EVICT_INTERVALS
from marshal_py.protocol.wire.records import (
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

NAMES_MAX: Final = 10_000  # ended sessions per group whose names are kept for late records; the oldest go first
LOST_NOTES: Final = ("offset_lost", UNCOMMITTED)
OUTCOMES: Final = ("accepted", "rejected", "ignored")
_TABLE_NAMES: Final[dict[type[Row], str]] = {row: name for name, row in TABLES.items()}


class Moment(NamedTuple):
    """A record's offset and timestamp."""

    offset: int | None
    time_ms: int | None


STILL_OPEN: Final = Moment(None, None)  # the end of what has not ended


def part_of(group: Group, claim: Claim) -> Partition:
    """Returns the state of what was claimed, after the claim ended; nothing if that deleted the group, which ends only
    claims without a position (F9.5)."""
    tp = TopicPartition(claim.topic, claim.partition)
    return group.partitions.get(tp) or Partition(tp, 0)


class Timeline:
    """Folds a log onto `world` and collects rows. `take` returns the rows that were made since its last call."""

    def __init__(self, world: World, wanted: Collection[str] = tuple(TABLES)) -> None:
        """Starts after what `world` holds; since when its open things last is unknown. `wanted`: tables; InvalidOption
        for an unknown one."""
        for name in wanted:
            if name not in TABLES:
                raise InvalidOption("tables", name, f"one of {', '.join(TABLES)}")
        self.world = world
        self.open: OpenState = open_state_of(world)
        self._wanted = frozenset(wanted)
        self._wants_records = "records" in self._wanted  # kept because it is needed for every record
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES if name in self._wanted}
        self._digested: set[str] = set()  # groups that got a digest row at the last checkpoint
        self._handlers: dict[type[Record], Callable[[Group, OpenGroup, int, int, Any], None]] = {
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
        self.open.time_ms = time_ms
        name, record = verdict.group, verdict.record
        if name:
            opened = self.open.groups.get(name) or OpenGroup()
            if self._wants_records:
                self._emit_record(opened, time_ms, verdict)
            if record is not None:
                if not verdict.outcome:
                    handler = self._handlers.get(type(record))
                    if isinstance(record, ClaimingMessages):  # only the ranges that were granted (F5.2)
                        record = replace(record, ranges=tuple(record.ranges[index] for index in verdict.granted))
                    opened.presence.advance(time_ms, opened.pause is not None)
                    if handler is not None:
                        self.open.groups[name] = opened
                        group = self.world.groups.get(name) or Group(name)
                        handler(group, opened, offset, time_ms, record)
                        self._sign_of_life(group, opened, offset, record)
                elif verdict.reason in ("held", "observed") and isinstance(record, ClaimingPartition):
                    self._race(opened, offset, time_ms, record, verdict)
            self.open.touched.add(name)
        elif self._wants_records:
            self._emit_record(OpenGroup(), time_ms, verdict)
        if offset % CHECKPOINT_OFFSETS == CHECKPOINT_OFFSETS - 1:
            self._emit_checkpoint()
        return verdict

    def finish(self) -> dict[str, list[Row]]:
        """Returns what `take` does and a row, with None as its end, for everything open. The Timeline may read on."""
        log, end = self.world.log, self.world.next_offset
        for name, group in sorted(self.world.groups.items()):
            opened = self.open.groups.get(name) or OpenGroup()
            lived_ms = opened.presence.lived_by(self.open.time_ms or 0, opened.pause is not None)
            for session, session_span in opened.sessions.items():
                if session_span.alive:
                    self._emit_session(name, session, session_span, STILL_OPEN)
            for epoch, claim in opened.claims.items():
                self._emit_interval(group, epoch, claim, STILL_OPEN)
            for topic, spans in opened.spans.items():
                for partition, span in spans.items():
                    if partition >= 0:
                        self._emit_gap(name, topic, partition, span, STILL_OPEN, lived_ms)
            if opened.pause is not None:
                self._emit_pause(name, opened.pause, STILL_OPEN)
            for _, part in sorted(group.partitions.items()):
                self._emit_standing(name, opened, part)
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

    def _sign_of_life(self, group: Group, opened: OpenGroup, offset: int, record: Record) -> None:
        """Notes that a record's session is alive: its writer's, so not the one that an Evict names."""
        session = offset if isinstance(record, Join) else getattr(record, "session", NONE)
        if session in group.sessions and not isinstance(record, Evict):
            lease_ms = EVICT_INTERVALS * group.sessions[session].join.interval_ms
            opened.sessions[session].until_ms = opened.presence.extend(lease_ms)

    def _race(self, opened: OpenGroup, offset: int, time_ms: int, record: ClaimingPartition, verdict: Verdict) -> None:
        """Makes a row if a claim lost to another session's; not for a copy of its own (F4.2), or a move, which nobody
        won."""
        epoch, winner, winner_time_ms = opened.winners.get(record.topic, {}).get(record.partition, (NONE, NONE, None))
        if epoch != NONE and winner != record.session and record.observed < epoch:
            self._emit(
                RaceRow(
                    log=self.world.log,
                    offset=offset,
                    time_ms=time_ms,
                    group=verdict.group,
                    topic=record.topic,
                    partition=record.partition,
                    session=record.session,
                    client=opened.client(record.session),
                    reason=verdict.reason,
                    winner_session=winner,
                    winner_client=opened.client(winner),
                    winner_epoch=epoch,
                    winner_time_ms=winner_time_ms,
                )
            )

    # --- one handler per kind of accepted record; `group` is its state after the record

    def _heartbeat(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: Heartbeat) -> None:
        if group.sessions[record.session].extended == offset:
            span = opened.sessions[record.session]
            span.sign_time_ms, span.sign_lived_ms = time_ms, opened.presence.lived_ms
        if record.claims and "positions" in self._wanted:
            for entry in record.claims:
                part = group.claims.get(entry.epoch)
                if part is not None and part.owner == record.session and part.tp.partition >= 0:
                    self._emit_position(group, opened, part, offset, time_ms, "heartbeat", part.owner, entry.epoch)

    def _join(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: Join) -> None:
        before = opened.sessions.get(record.predecessor)
        if before is not None and before.alive:
            self._end(group, opened, record.predecessor, Moment(offset, time_ms), "replaced")
        opened.sessions[offset] = SessionSpan(
            record.client_id, record.member, record.mode, time_ms, time_ms, sign_lived_ms=opened.presence.lived_ms
        )

    def _leave(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: Leave) -> None:
        self._end(group, opened, record.session, Moment(offset, time_ms), "leave")

    def _evict(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: Evict) -> None:
        self._end(group, opened, record.session, Moment(offset, time_ms), "evict", record.by)

    def _end(self, group: Group, opened: OpenGroup, session: int, end: Moment, ended: str, by: str = "") -> None:
        """Closes a session and its claims (F3.3). `by`: who evicted it, or "". `ended`: as in tables.SessionRow."""
        span = opened.sessions[session]
        for epoch in [epoch for epoch, claim in opened.claims.items() if claim.session == session]:
            self._free(group, opened, epoch, end, ended)
        self._emit_session(group.name, session, span, end, ended, by)
        span.alive = False
        opened.presence.until_ms = max((kept.until_ms for kept in opened.sessions.values() if kept.alive), default=0)
        if len(opened.sessions) > NAMES_MAX + len(group.sessions):
            del opened.sessions[next(known for known, kept in opened.sessions.items() if not kept.alive)]

    def _free(self, group: Group, opened: OpenGroup, epoch: int, end: Moment, ended: str) -> None:
        """Closes the claim and opens a span without an owner. `ended`: as in tables.IntervalRow."""
        claim = opened.claims.pop(epoch)
        self._emit_interval(group, epoch, claim, end, ended)
        owner, part = opened.sessions[claim.session], part_of(group, claim)
        if (lost := group.unsettled(part.tp)) is not None:
            assert end.offset is not None
            assert end.time_ms is not None
            self._emit_lost(
                group.name,
                opened,
                part.tp,
                end.offset,
                end.time_ms,
                claim.session,
                lost.start,
                lost.to,
                "amo_lost",
                part.generation,
            )
        opened.spans.setdefault(claim.topic, {})[claim.partition] = FreeSpan(
            from_offset=end.offset,
            from_time_ms=end.time_ms,
            cause=ended,
            client=owner.client,
            sign_time_ms=owner.sign_time_ms,
            members=len(group.sessions),
            paused=group.paused,
            position=offset_or_none(part.position),
            lived_ms=opened.presence.lived_ms,
            sign_lived_ms=owner.sign_lived_ms,
        )

    def _claim(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: ClaimingPartition) -> None:
        topic, partition = record.topic, record.partition
        part = group.claims[offset]
        span = opened.spans.get(topic, {}).pop(partition, None)
        if span is not None and partition >= 0:
            end, client = Moment(offset, time_ms), opened.client(record.session)
            self._emit_gap(group.name, topic, partition, span, end, opened.presence.lived_ms, record.session, client)
        after = "new" if span is None else span.cause
        opened.claims[offset] = Claim(
            topic, partition, record.session, time_ms, after, offset_or_none(part.position), part.generation
        )
        opened.winners.setdefault(topic, {})[partition] = offset, record.session, time_ms
        if partition >= 0:
            self._emit_position(group, opened, part, offset, time_ms, "claim", record.session, offset)

    def _release(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: ReleasingPartition) -> None:
        claim = opened.claims[record.epoch]
        self._free(group, opened, record.epoch, Moment(offset, time_ms), "release")
        if claim.partition >= 0:
            part = group.partitions[TopicPartition(claim.topic, claim.partition)]
            self._emit_position(group, opened, part, offset, time_ms, "release", record.session, record.epoch)

    def _grant(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: ClaimingMessages) -> None:
        session = record.session
        for epoch, from_, start, _ in map(astuple, record.ranges):
            part = group.claims[epoch]
            if start > from_:
                self._emit_lost(
                    group.name, opened, part.tp, offset, time_ms, session, from_, start, "skipped", part.generation
                )
            self._emit_position(group, opened, part, offset, time_ms, "grant", session, epoch)

    def _seek(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: SeekingPartition) -> None:
        """Closes the claim whose owner moved its position, and opens a claim of the same owner at `offset` (F6.6)."""
        claim, part = opened.claims.pop(record.epoch), group.claims[offset]
        self._emit_interval(group, record.epoch, claim, Moment(offset, time_ms), "seek")
        opened.claims[offset] = Claim(
            claim.topic, claim.partition, claim.session, time_ms, "seek", part.position, part.generation
        )
        self._emit_position(group, opened, part, offset, time_ms, "seek", record.session, offset)

    def _release_group(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: ReleaseGroup) -> None:
        pause = opened.pause
        if record.duration_ms == 0:
            waited = pause is not None and record.token != pause.token
            self._end_pause(group, opened, Moment(offset, time_ms), "waited" if waited else "resume")
        elif pause is None:
            opened.pause = Pause(offset, time_ms, offset, record.duration_ms, record.reason, record.by)
        else:
            pause.renewals += 1
            pause.token = offset
            pause.duration_ms, pause.reason, pause.by = record.duration_ms, record.reason, record.by

    def _end_pause(self, group: Group, opened: OpenGroup, end: Moment, ended: str) -> None:
        if opened.pause is not None:
            self._emit_pause(group.name, opened.pause, end, ended)
            opened.pause = None

    def _set_position(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: SetPosition) -> None:
        for move in record.moves:
            part = group.partitions[TopicPartition(move.topic, move.partition)]
            span = opened.spans[move.topic][move.partition]
            self._emit(
                MoveRow(
                    log=self.world.log,
                    offset=offset,
                    time_ms=time_ms,
                    group=group.name,
                    topic=move.topic,
                    partition=move.partition,
                    from_position=span.position,
                    to_position=move.position,
                    generation=part.generation,
                    by=record.by,
                )
            )
            span.position = move.position
            self._emit_position(group, opened, part, offset, time_ms, "move", None, None)
        if record.resume:
            self._end_pause(group, opened, Moment(offset, time_ms), "set_position")

    def _topology(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: Topology) -> None:
        """Opens a span per partition that appears, and closes those of what is cut off (F9.2)."""
        spans, lived_ms = opened.spans.setdefault(record.topic, {}), opened.presence.lived_ms
        for partition in [p for p in spans if p >= record.partitions]:
            span, end = spans.pop(partition), Moment(offset, time_ms)
            self._emit_gap(group.name, record.topic, partition, span, end, lived_ms)
        for partition, span in spans.items():
            known = group.partitions.get(TopicPartition(record.topic, partition))
            if known is not None and known.position == NONE:
                span.position = None  # forgotten with the topic that was deleted (F9.10)
        owned = {claim.partition for claim in opened.claims.values() if claim.topic == record.topic}
        for partition in range(record.partitions):
            if partition not in owned and partition not in spans:
                spans[partition] = new_span(group, record.topic, partition, offset, time_ms, lived_ms)

    def _group_config(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: GroupConfig) -> None:
        now, lived_ms = Moment(offset, time_ms), opened.presence.lived_ms
        for session in [one for one, span in opened.sessions.items() if span.alive and one not in group.sessions]:
            self._end(group, opened, session, now, "deleted" if record.deleted else "mode")
        if record.deleted and not opened.deleted:
            self._end_pause(group, opened, now, "deleted")
            for topic, spans in opened.spans.items():
                for partition in sorted(spans):
                    if partition >= 0:
                        self._emit_gap(group.name, topic, partition, spans[partition], now, lived_ms)
            opened.spans.clear()
        elif opened.deleted and not record.deleted:
            for topic, known in group.topics.items():
                opened.spans[topic] = {
                    partition: new_span(group, topic, partition, offset, time_ms, lived_ms)
                    for partition in range(known.count)
                }
        opened.deleted = record.deleted

    def _note(self, group: Group, opened: OpenGroup, offset: int, time_ms: int, record: Note) -> None:
        if record.kind in LOST_NOTES and record.partition >= 0 and 0 <= record.from_ < record.to:
            tp, session = TopicPartition(record.topic, record.partition), offset_or_none(record.session)
            part = group.partitions.get(tp)
            self._emit_lost(
                group.name,
                opened,
                tp,
                offset,
                time_ms,
                session,
                record.from_,
                record.to,
                record.kind,
                0 if part is None else part.generation,
            )

    # --- the rows; each method makes one

    def _emit(self, row: Row) -> None:
        rows = self._rows.get(_TABLE_NAMES[type(row)])
        if rows is not None:
            rows.append(row)

    def _emit_checkpoint(self) -> None:
        """At a checkpoint (G1): makes a digest row per group with records since the last one."""
        if "digests" in self._wanted:
            at, chain = self.world.next_offset, f"{self.world.chain:016x}"
            for name in sorted(self.open.touched):
                group = self.world.groups.get(name)
                if group is not None:
                    self._emit(DigestRow(self.world.log, at, name, f"{group.digest():016x}", chain))
        self._digested = set(self.open.touched)
        self.open.touched.clear()

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
        self._emit(
            RecordRow(
                log=self.world.log,
                offset=verdict.offset,
                time_ms=time_ms,
                group=verdict.group,
                type=None if record is None else type(record).__name__,
                session=session,
                client=client,
                topic=topic,
                partition=partition,
                position=position,
                verdict=OUTCOMES[verdict.outcome],
                reason=verdict.reason,
            )
        )

    def _emit_session(
        self, name: str, session: int, span: SessionSpan, end: Moment, ended: str | None = None, by: str = ""
    ) -> None:
        self._emit(
            SessionRow(
                log=self.world.log,
                group=name,
                session=session,
                client=span.client,
                member=span.member,
                delivery=MODE_NAMES[span.mode],
                from_time_ms=span.from_time_ms,
                to_offset=end.offset,
                to_time_ms=end.time_ms,
                ended=ended,
                by=by,
                last_sign_time_ms=span.sign_time_ms,
            )
        )

    def _emit_interval(self, group: Group, epoch: int, claim: Claim, end: Moment, ended: str | None = None) -> None:
        part = part_of(group, claim)
        self._emit(
            IntervalRow(
                log=self.world.log,
                group=group.name,
                topic=claim.topic,
                partition=claim.partition,
                client=self.open.groups[group.name].sessions[claim.session].client,
                session=claim.session,
                epoch=epoch,
                from_time_ms=claim.from_time_ms,
                to_offset=end.offset,
                to_time_ms=end.time_ms,
                ended=ended,
                after=claim.after,
                from_position=claim.from_position,
                to_position=offset_or_none(part.position),
                generation=claim.generation,
                in_flight=part.in_flight,
            )
        )

    def _emit_gap(
        self,
        name: str,
        topic: str,
        partition: int,
        span: FreeSpan,
        end: Moment,
        lived_ms: int,
        next_session: int | None = None,
        next_client: str | None = None,
    ) -> None:
        """Makes a GapRow for `span`, in which nobody owned the partition. `end`: where the span ended. `lived_ms`: what
        the group's `Presence.lived_ms` (open_state.py) was at that point. `next_session`, `next_client`: the session
        that claimed the partition then, and its client id; None if no claim ended the span."""
        self._emit(
            GapRow(
                log=self.world.log,
                group=name,
                topic=topic,
                partition=partition,
                from_offset=span.from_offset,
                from_time_ms=span.from_time_ms,
                to_offset=end.offset,
                to_time_ms=end.time_ms,
                cause=span.cause,
                client=span.client,
                last_sign_time_ms=span.sign_time_ms,
                next_session=next_session,
                next_client=next_client,
                members=span.members,
                paused=span.paused,
                lived_ms=None if span.lived_ms is None else lived_ms - span.lived_ms,
                take_over_ms=None if span.sign_lived_ms is None else lived_ms - span.sign_lived_ms,
            )
        )

    def _emit_pause(self, name: str, pause: Pause, end: Moment, ended: str | None = None) -> None:
        self._emit(
            PauseRow(
                log=self.world.log,
                group=name,
                from_offset=pause.from_offset,
                from_time_ms=pause.from_time_ms,
                to_offset=end.offset,
                to_time_ms=end.time_ms,
                duration_ms=pause.duration_ms,
                renewals=pause.renewals,
                reason=pause.reason,
                by=pause.by,
                ended=ended,
            )
        )

    def _emit_position(
        self,
        group: Group,
        opened: OpenGroup,
        part: Partition,
        offset: int,
        time_ms: int,
        cause: str,
        session: int | None,
        epoch: int | None,
    ) -> None:
        self._emit(
            PositionRow(
                log=self.world.log,
                offset=offset,
                time_ms=time_ms,
                group=group.name,
                topic=part.tp.topic,
                partition=part.tp.partition,
                session=session,
                client=opened.client(session),
                epoch=epoch,
                position=offset_or_none(part.position),
                generation=part.generation,
                lag=part.lag,
                in_flight=part.in_flight,
                attempts=part.attempts,
                cause=cause,
            )
        )

    def _emit_lost(
        self,
        name: str,
        opened: OpenGroup,
        tp: TopicPartition,
        offset: int,
        time_ms: int,
        session: int | None,
        from_position: int,
        to_position: int,
        cause: str,
        generation: int,
    ) -> None:
        self._emit(
            LostRow(
                log=self.world.log,
                offset=offset,
                time_ms=time_ms,
                group=name,
                topic=tp.topic,
                partition=tp.partition,
                session=session,
                client=opened.client(session),
                from_position=from_position,
                to_position=to_position,
                cause=cause,
                generation=generation,
            )
        )

    def _emit_standing(self, name: str, opened: OpenGroup, part: Partition) -> None:
        owner = offset_or_none(part.owner)
        self._emit(
            StandingRow(
                log=self.world.log,
                offset=self.world.next_offset,
                time_ms=self.open.time_ms,
                group=name,
                topic=part.tp.topic,
                partition=part.tp.partition,
                session=owner,
                client=opened.client(owner),
                epoch=offset_or_none(part.epoch),
                position=offset_or_none(part.position),
                generation=part.generation,
                lag=part.lag,
                in_flight=part.in_flight,
                attempts=part.attempts,
                parked=part.parked or None,
            )
        )
