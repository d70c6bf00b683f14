"""The rows of tables.py as a Timeline tells them, kept until somebody takes them. Decides nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from marshal_py.errors import InvalidOption
from marshal_py.history.open_state import Claim, FreeSpan, GroupTrack, Open, Pause, SessionSpan, open_in, some_offset
from marshal_py.history.tables import (
    TABLES,
    DigestRow,
    GapRow,
    IntervalRow,
    PauseRow,
    PositionRow,
    RecordRow,
    Row,
    SessionRow,
)
from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.records import (
    MODE_NAMES,
    ClaimingMessages,
    ClaimingPartition,
    Join,
    Note,
    ReleasingPartition,
    Topology,
)
from marshal_py.protocol.verdict import Verdict
from marshal_py.protocol.world import Group, Partition, World

OUTCOMES: Final = ("accepted", "rejected", "ignored")


class TimelineRows:
    """What a Timeline knows, and the tables that are wanted of it."""

    def __init__(self, world: World, wanted: Collection[str], known: Open | None) -> None:
        for name in wanted:
            if name not in TABLES:
                raise InvalidOption("tables", name, f"one of {', '.join(TABLES)}")
        self.world = world
        self.open = open_in(world) if known is None else known
        self._wanted = frozenset(wanted)
        self._tells_records = "records" in self._wanted  # asked for every record
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES if name in self._wanted}
        self._digested: set[str] = set()  # groups whose digest was told at the last checkpoint

    def take(self) -> dict[str, list[Row]]:
        """The rows since the last call, by table, each in the order of the log."""
        taken, self._rows = self._rows, {name: [] for name in self._rows}
        return taken

    @property
    def pending(self) -> int:
        """How many rows wait for `take`."""
        return sum(map(len, self._rows.values()))

    def _tell(self, row: Row) -> None:
        rows = self._rows.get(_NAMES[type(row)])
        if rows is not None:
            rows.append(row)

    def _checkpoint(self) -> None:
        """G1: the world has just closed a block."""
        if "digests" in self._wanted:
            at, chain = self.world.next_offset, f"{self.world.chain:016x}"
            for name in sorted(self.open.touched):
                group = self.world.groups.get(name)
                if group is not None:
                    self._tell(DigestRow(self.world.log, at, name, f"{group.digest():016x}", chain))
        self._digested = set(self.open.touched)
        self.open.touched.clear()

    def _tell_record(self, track: GroupTrack, time_ms: int, verdict: Verdict) -> None:
        record, session, topic, partition, position = verdict.record, None, None, None, None
        client: str | None = None
        match record:
            case Join():
                session, client = verdict.offset if not verdict.outcome else None, record.client_id
            case ClaimingPartition():
                topic, partition, position = record.topic, record.partition, some_offset(record.start)
            case ReleasingPartition():
                position = some_offset(record.position)
            case ClaimingMessages():
                position = record.ranges[0].to if len(record.ranges) == 1 else None
            case Topology():
                topic = record.topic
            case Note():
                topic, partition = record.topic or None, some_offset(record.partition)
                position = some_offset(record.from_)
        if record is not None and client is None:
            session = some_offset(getattr(record, "session", NONE))
            client = track.client(session)
        epoch = getattr(record, "epoch", None)
        if isinstance(record, ClaimingMessages) and len(record.ranges) == 1:
            epoch = record.ranges[0].epoch
        if epoch is not None and epoch in track.claims:
            topic, partition = track.claims[epoch].topic, track.claims[epoch].partition
        kind = None if record is None else type(record).__name__
        self._tell(
            RecordRow(
                self.world.log,
                verdict.offset,
                time_ms,
                verdict.group,
                kind,
                session,
                client,
                topic,
                partition,
                position,
                OUTCOMES[verdict.outcome],
                verdict.reason,
            )
        )

    def _tell_stay(
        self,
        name: str,
        session: int,
        stay: SessionSpan,
        offset: int | None,
        time_ms: int | None,
        ended: str | None,
        by: str,
    ) -> None:
        self._tell(
            SessionRow(
                self.world.log,
                name,
                session,
                stay.client,
                stay.member,
                MODE_NAMES[stay.mode],
                stay.from_time_ms,
                offset,
                time_ms,
                ended,
                by,
                stay.sign_time_ms,
            )
        )

    def _tell_claim(
        self, group: Group, epoch: int, claim: Claim, offset: int | None, time_ms: int | None, ended: str | None
    ) -> None:
        part = group.partitions[TopicPartition(claim.topic, claim.partition)]
        client = self.open.tracks[group.name].stays[claim.session].client
        self._tell(
            IntervalRow(
                self.world.log,
                group.name,
                claim.topic,
                claim.partition,
                client,
                claim.session,
                epoch,
                claim.from_time_ms,
                offset,
                time_ms,
                ended,
                claim.after,
                claim.from_position,
                some_offset(part.position),
                claim.generation,
                part.in_flight,
            )
        )

    def _tell_span(
        self,
        name: str,
        topic: str,
        partition: int,
        span: FreeSpan,
        offset: int | None,
        time_ms: int | None,
        session: int | None,
        client: str | None,
        by_now_ms: int,
    ) -> None:
        """`by_now_ms`: for how long some member has lived at its end."""
        lived_ms, take_over_ms = (
            None if since is None else by_now_ms - since for since in (span.lived_ms, span.sign_lived_ms)
        )
        self._tell(
            GapRow(
                self.world.log,
                name,
                topic,
                partition,
                span.from_offset,
                span.from_time_ms,
                offset,
                time_ms,
                span.cause,
                span.client,
                span.sign_time_ms,
                session,
                client,
                span.members,
                span.paused,
                lived_ms,
                take_over_ms,
            )
        )

    def _tell_pause(self, name: str, pause: Pause, offset: int | None, time_ms: int | None, ended: str | None) -> None:
        self._tell(
            PauseRow(
                self.world.log,
                name,
                pause.from_offset,
                pause.from_time_ms,
                offset,
                time_ms,
                pause.duration_ms,
                pause.renewals,
                pause.reason,
                pause.by,
                ended,
            )
        )

    def _tell_position(
        self,
        group: Group,
        track: GroupTrack,
        part: Partition,
        offset: int,
        time_ms: int,
        cause: str,
        session: int | None,
        epoch: int | None,
    ) -> None:
        self._tell(
            PositionRow(
                self.world.log,
                offset,
                time_ms,
                group.name,
                part.tp[0],
                part.tp[1],
                session,
                track.client(session),
                epoch,
                some_offset(part.position),
                part.generation,
                part.lag,
                part.in_flight,
                part.attempts,
                cause,
            )
        )


_NAMES: Final[dict[type[Row], str]] = {row: name for name, row in TABLES.items()}
