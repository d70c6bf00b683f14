"""Makes the rows of tables.py for a Timeline, and keeps them until `take` hands them out. Decides nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from marshal_py.errors import InvalidOption
from marshal_py.history.open_state import (
    Claim,
    FreeSpan,
    OpenGroup,
    OpenState,
    Pause,
    SessionSpan,
    offset_or_none,
    open_state_of,
)
from marshal_py.history.tables import (
    TABLES,
    DigestRow,
    GapRow,
    IntervalRow,
    LostRow,
    PauseRow,
    PositionRow,
    RecordRow,
    Row,
    SessionRow,
    StandingRow,
)
from marshal_py.protocol.fold.verdict import Verdict
from marshal_py.protocol.fold.world import Group, Partition, World
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    MODE_NAMES,
    ClaimingMessages,
    ClaimingPartition,
    Join,
    Note,
    ReleasingPartition,
    Topology,
)

OUTCOMES: Final = ("accepted", "rejected", "ignored")


class Moment(NamedTuple):
    """Holds a record's offset and timestamp."""

    offset: int | None
    time_ms: int | None


STILL_OPEN: Final = Moment(None, None)  # the end of what has not ended


def part_of(group: Group, claim: Claim) -> Partition:
    """Returns the state of what was claimed, after the record that ended the claim.

    If that record deleted the group, nothing is left of it. Only a topic as a whole or the pin can be claimed then
    (F9.5), and neither ever has a position.
    """
    tp = TopicPartition(claim.topic, claim.partition)
    return group.partitions.get(tp) or Partition(tp, 0)


class TimelineRows:
    """Keeps what a Timeline knows, and the rows of the wanted tables. Each `_emit` method makes one row."""

    def __init__(self, world: World, wanted: Collection[str], known: OpenState | None) -> None:
        for name in wanted:
            if name not in TABLES:
                raise InvalidOption("tables", name, f"one of {', '.join(TABLES)}")
        self.world = world
        self.open: OpenState = open_state_of(world) if known is None else known
        self._wanted = frozenset(wanted)
        self._wants_records = "records" in self._wanted  # kept because it is needed for every record
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES if name in self._wanted}
        self._digested: set[str] = set()  # groups that got a digest row at the last checkpoint

    def take(self) -> dict[str, list[Row]]:
        """Returns the rows that were made since the last call, by table. Within a table they follow the log's order."""
        taken, self._rows = self._rows, {name: [] for name in self._rows}
        return taken

    @property
    def pending(self) -> int:
        """Returns how many rows the next call of `take` returns."""
        return sum(map(len, self._rows.values()))

    def _emit(self, row: Row) -> None:
        rows = self._rows.get(_TABLE_NAMES[type(row)])
        if rows is not None:
            rows.append(row)

    def _emit_checkpoint(self) -> None:
        """Makes a digest row for each group that had records since the last checkpoint.

        Call it when the world has reached a checkpoint, that is the end of a block of offsets (G1).
        """
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
        """Makes a GapRow for `span`, in which nobody owned the partition. `end`: where the span ended.

        `lived_ms`: what the group's `Presence.lived_ms` (open_state.py) was at that point. `next_session`,
        `next_client`: the session that claimed the partition then, and its client id; None if no claim ended the span.
        """
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


_TABLE_NAMES: Final[dict[type[Row], str]] = {row: name for name, row in TABLES.items()}
