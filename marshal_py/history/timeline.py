"""One pass over a log that turns its records into the rows of tables.py. Pure; decides nothing.

Strategy: every record goes through the rationalizer; then the verdict and the world as it stands tell what happened.
Kept beside the world is only what the world forgets (open_state.py). Timestamps are put beside what happened and decide
nothing. The rows do not depend on where a reader paused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from msgspec.structs import astuple, replace

from marshal_py.history.open_state import Claim, FreeSpan, GroupTrack, Open, Pause, SessionSpan, appeared, some_offset
from marshal_py.history.tables import TABLES, DigestRow, LostRow, MoveRow, RaceRow, Row, StandingRow
from marshal_py.history.timeline_rows import TimelineRows
from marshal_py.protocol import rationalizer
from marshal_py.protocol.advisory import UNCOMMITTED
from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.lease import EVICT_INTERVALS
from marshal_py.protocol.records import (
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
from marshal_py.protocol.verdict import Verdict
from marshal_py.protocol.world import CHECKPOINT_OFFSETS, Group, World

NAMES_MAX: Final = 10_000  # ended sessions per group whose names are kept for late records; the oldest go first
LOST_NOTES: Final = ("offset_lost", UNCOMMITTED)


class Timeline(TimelineRows):
    """Folds a log onto `world` and collects rows. `take` hands out what has come since the last call."""

    def __init__(self, world: World, wanted: Collection[str] = tuple(TABLES), known: Open | None = None) -> None:
        """`world`: as far as the log was folded already; a fresh one for a log from its beginning.

        `known`: the `open` of another Timeline of this log at the same offset. Without it, what is open in the world
        began at a time that nobody knows. Raises InvalidOption if a wanted table does not exist.
        """
        super().__init__(world, wanted, known)
        self._tells: dict[type[Record], Callable[[Group, GroupTrack, int, int, Any], None]] = {
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
        """Folds one record. Raises a CoordinationError, having changed nothing, where the fold does."""
        verdict = rationalizer.apply(self.world, offset, value)
        self.open.time_ms = time_ms
        name, record = verdict.group, verdict.record
        if name:
            track = self.open.tracks.get(name) or GroupTrack()
            if self._tells_records:
                self._tell_record(track, time_ms, verdict)
            if record is not None:
                if not verdict.outcome:
                    tell = self._tells.get(type(record))
                    if isinstance(record, ClaimingMessages):  # what was granted of it (F5.2)
                        record = replace(record, ranges=tuple(record.ranges[index] for index in verdict.granted))
                    track.presence.advance(time_ms, track.pause is not None)
                    if tell is not None:
                        self.open.tracks[name] = track
                        group = self.world.groups.get(name) or Group(name)
                        tell(group, track, offset, time_ms, record)
                        self._hear(group, track, offset, record)
                elif verdict.reason in ("held", "observed") and isinstance(record, ClaimingPartition):
                    self._race(track, offset, time_ms, record, verdict)
            self.open.touched.add(name)
        elif self._tells_records:
            self._tell_record(GroupTrack(), time_ms, verdict)
        if offset % CHECKPOINT_OFFSETS == CHECKPOINT_OFFSETS - 1:
            self._checkpoint()
        return verdict

    def finish(self) -> dict[str, list[Row]]:
        """As `take`, and what is open at the end: without an end. The Timeline can still go on."""
        log, end = self.world.log, self.world.next_offset
        for name, group in sorted(self.world.groups.items()):
            track = self.open.tracks.get(name) or GroupTrack()
            lived_ms = track.presence.lived_by(self.open.time_ms or 0, track.pause is not None)
            for session, stay in track.stays.items():
                if stay.alive:
                    self._tell_stay(name, session, stay, None, None, None, "")
            for epoch, claim in track.claims.items():
                self._tell_claim(group, epoch, claim, None, None, None)
            for topic, spans in track.spans.items():
                for partition, span in spans.items():
                    if partition >= 0:
                        self._tell_span(name, topic, partition, span, None, None, None, None, lived_ms)
            if track.pause is not None:
                self._tell_pause(name, track.pause, None, None, None)
            for tp, part in sorted(group.partitions.items()):
                owner = some_offset(part.owner)
                self._tell(
                    StandingRow(
                        log,
                        end,
                        self.open.time_ms,
                        name,
                        tp.topic,
                        tp.partition,
                        owner,
                        track.client(owner),
                        some_offset(part.epoch),
                        some_offset(part.position),
                        part.generation,
                        part.lag,
                        part.in_flight,
                        part.attempts,
                        part.parked or None,
                    )
                )
            if end % CHECKPOINT_OFFSETS or name not in self._digested:
                chain = None if end % CHECKPOINT_OFFSETS else f"{self.world.chain:016x}"
                self._tell(DigestRow(log, end, name, f"{group.digest():016x}", chain))
        return self.take()

    def _hear(self, group: Group, track: GroupTrack, offset: int, record: Record) -> None:
        """Whose record it is lives. An Evict names another one's session."""
        session = offset if isinstance(record, Join) else getattr(record, "session", NONE)
        if session in group.sessions and not isinstance(record, Evict):
            lease_ms = EVICT_INTERVALS * group.sessions[session].join.interval_ms
            track.stays[session].until_ms = track.presence.extend(lease_ms)

    def _race(self, track: GroupTrack, offset: int, time_ms: int, record: ClaimingPartition, verdict: Verdict) -> None:
        """A claim that came late. One that lost to its own session is a copy (F4.2); to a move, nobody's."""
        epoch, session, when = track.winners.get(record.topic, {}).get(record.partition, (NONE, NONE, None))
        if epoch != NONE and session != record.session and record.observed < epoch:
            self._tell(
                RaceRow(
                    self.world.log,
                    offset,
                    time_ms,
                    verdict.group,
                    record.topic,
                    record.partition,
                    record.session,
                    track.client(record.session),
                    verdict.reason,
                    session,
                    track.client(session),
                    epoch,
                    when,
                )
            )

    # --- what accepted records did; `group` is as it stands after them

    def _heartbeat(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: Heartbeat) -> None:
        if group.sessions[record.session].extended == offset:
            stay = track.stays[record.session]
            stay.sign_time_ms, stay.sign_lived_ms = time_ms, track.presence.lived_ms
        if record.claims and "positions" in self._wanted:
            for entry in record.claims:
                part = group.claims.get(entry.epoch)
                if part is not None and part.owner == record.session and part.tp[1] >= 0:
                    self._tell_position(group, track, part, offset, time_ms, "heartbeat", part.owner, entry.epoch)

    def _join(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: Join) -> None:
        before = track.stays.get(record.predecessor)
        if before is not None and before.alive:
            self._end(group, track, record.predecessor, offset, time_ms, "replaced")
        track.stays[offset] = SessionSpan(
            record.client_id, record.member, record.mode, time_ms, time_ms, sign_lived_ms=track.presence.lived_ms
        )

    def _leave(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: Leave) -> None:
        self._end(group, track, record.session, offset, time_ms, "leave")

    def _evict(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: Evict) -> None:
        self._end(group, track, record.session, offset, time_ms, "evict", record.by)

    def _end(
        self, group: Group, track: GroupTrack, session: int, offset: int, time_ms: int, ended: str, by: str = ""
    ) -> None:
        """F3.3."""
        stay = track.stays[session]
        for epoch in [epoch for epoch, claim in track.claims.items() if claim.session == session]:
            self._free(group, track, epoch, offset, time_ms, ended)
        self._tell_stay(group.name, session, stay, offset, time_ms, ended, by)
        stay.alive = False
        track.presence.until_ms = max((kept.until_ms for kept in track.stays.values() if kept.alive), default=0)
        if len(track.stays) > NAMES_MAX + len(group.sessions):
            del track.stays[next(known for known, kept in track.stays.items() if not kept.alive)]

    def _free(self, group: Group, track: GroupTrack, epoch: int, offset: int, time_ms: int, ended: str) -> None:
        claim = track.claims[epoch]
        self._tell_claim(group, epoch, claim, offset, time_ms, ended)
        stay = track.stays[claim.session]
        part = group.partitions[TopicPartition(claim.topic, claim.partition)]
        span = FreeSpan(
            offset,
            time_ms,
            ended,
            stay.client,
            stay.sign_time_ms,
            len(group.sessions),
            group.paused,
            some_offset(part.position),
            track.presence.lived_ms,
            stay.sign_lived_ms,
        )
        track.spans.setdefault(claim.topic, {})[claim.partition] = span
        del track.claims[epoch]

    def _claim(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: ClaimingPartition) -> None:
        topic, partition = record.topic, record.partition
        part = group.claims[offset]
        span = track.spans.get(topic, {}).pop(partition, None)
        client, lived_ms = track.client(record.session), track.presence.lived_ms
        if span is not None and partition >= 0:
            self._tell_span(group.name, topic, partition, span, offset, time_ms, record.session, client, lived_ms)
        after = "new" if span is None else span.cause
        track.claims[offset] = Claim(
            topic, partition, record.session, time_ms, after, some_offset(part.position), part.generation
        )
        track.winners.setdefault(topic, {})[partition] = offset, record.session, time_ms
        if partition >= 0:
            self._tell_position(group, track, part, offset, time_ms, "claim", record.session, offset)

    def _release(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: ReleasingPartition) -> None:
        claim = track.claims[record.epoch]
        self._free(group, track, record.epoch, offset, time_ms, "release")
        if claim.partition >= 0:
            part = group.partitions[TopicPartition(claim.topic, claim.partition)]
            self._tell_position(group, track, part, offset, time_ms, "release", record.session, record.epoch)

    def _grant(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: ClaimingMessages) -> None:
        client = track.client(record.session)
        for epoch, from_, start, _ in map(astuple, record.ranges):
            part = group.claims[epoch]
            if start > from_:
                self._tell(
                    LostRow(
                        self.world.log,
                        offset,
                        time_ms,
                        group.name,
                        *part.tp,
                        record.session,
                        client,
                        from_,
                        start,
                        "skipped",
                        part.generation,
                    )
                )
            self._tell_position(group, track, part, offset, time_ms, "grant", record.session, epoch)

    def _seek(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: SeekingPartition) -> None:
        """F6.6: the same owner, under another epoch."""
        claim, part = track.claims.pop(record.epoch), group.claims[offset]
        self._tell_claim(group, record.epoch, claim, offset, time_ms, "seek")
        track.claims[offset] = Claim(
            claim.topic, claim.partition, claim.session, time_ms, "seek", part.position, part.generation
        )
        self._tell_position(group, track, part, offset, time_ms, "seek", record.session, offset)

    def _release_group(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: ReleaseGroup) -> None:
        pause = track.pause
        if record.duration_ms == 0:
            waited = pause is not None and record.token != pause.token
            self._end_pause(group, track, offset, time_ms, "waited" if waited else "resume")
        elif pause is None:
            track.pause = Pause(offset, time_ms, offset, record.duration_ms, record.reason, record.by)
        else:
            pause.renewals += 1
            pause.token = offset
            pause.duration_ms, pause.reason, pause.by = record.duration_ms, record.reason, record.by

    def _end_pause(self, group: Group, track: GroupTrack, offset: int, time_ms: int, ended: str) -> None:
        if track.pause is not None:
            self._tell_pause(group.name, track.pause, offset, time_ms, ended)
            track.pause = None

    def _set_position(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: SetPosition) -> None:
        for move in record.moves:
            part = group.partitions[TopicPartition(move.topic, move.partition)]
            span = track.spans[move.topic][move.partition]
            self._tell(
                MoveRow(
                    self.world.log,
                    offset,
                    time_ms,
                    group.name,
                    move.topic,
                    move.partition,
                    span.position,
                    move.position,
                    part.generation,
                    record.by,
                )
            )
            span.position = move.position
            self._tell_position(group, track, part, offset, time_ms, "move", None, None)
        if record.resume:
            self._end_pause(group, track, offset, time_ms, "set_position")

    def _topology(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: Topology) -> None:
        """Partitions that appear are free; those that a smaller count cuts off are nobody's business (F9.2)."""
        spans, lived_ms = track.spans.setdefault(record.topic, {}), track.presence.lived_ms
        for partition in [p for p in spans if p >= record.partitions]:
            self._tell_span(
                group.name, record.topic, partition, spans.pop(partition), offset, time_ms, None, None, lived_ms
            )
        for partition, span in spans.items():
            known = group.partitions.get(TopicPartition(record.topic, partition))
            if known is not None and known.position == NONE:
                span.position = None  # forgotten with the topic that it was of (F9.10)
        owned = {claim.partition for claim in track.claims.values() if claim.topic == record.topic}
        for partition in range(record.partitions):
            if partition not in owned and partition not in spans:
                spans[partition] = appeared(group, record.topic, partition, offset, time_ms, lived_ms)

    def _group_config(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: GroupConfig) -> None:
        gone = [session for session, stay in track.stays.items() if stay.alive and session not in group.sessions]
        for session in gone:
            self._end(group, track, session, offset, time_ms, "mode")
        lived_ms = track.presence.lived_ms
        if record.deleted and not track.deleted:
            self._end_pause(group, track, offset, time_ms, "deleted")
            for topic, spans in track.spans.items():
                for partition in sorted(spans):
                    if partition >= 0:
                        self._tell_span(
                            group.name, topic, partition, spans[partition], offset, time_ms, None, None, lived_ms
                        )
            track.spans.clear()
        elif track.deleted and not record.deleted:
            for topic, known in group.topics.items():
                track.spans[topic] = {
                    partition: appeared(group, topic, partition, offset, time_ms, lived_ms)
                    for partition in range(known.count)
                }
        track.deleted = record.deleted

    def _note(self, group: Group, track: GroupTrack, offset: int, time_ms: int, record: Note) -> None:
        if record.kind in LOST_NOTES and record.partition >= 0 and 0 <= record.from_ < record.to:
            session = some_offset(record.session)
            part = group.partitions.get(TopicPartition(record.topic, record.partition))
            self._tell(
                LostRow(
                    self.world.log,
                    offset,
                    time_ms,
                    group.name,
                    record.topic,
                    record.partition,
                    session,
                    track.client(session),
                    record.from_,
                    record.to,
                    record.kind,
                    0 if part is None else part.generation,
                )
            )
