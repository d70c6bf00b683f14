"""A log as tables: what one row of each table says. Types alone; timeline.py makes the rows, spark/ shows them.

None stands for "none" or "not known" in every table. A field that ends in `time_ms` is a moment, in ms since 1970 in
UTC, as the records' timestamps say it: the clocks of writers or brokers, good for people and never read by the fold.
`log` is the coordination partition; offsets without another word are offsets in it, positions are offsets in the data.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class RecordRow(NamedTuple):
    """One record of the log and what the fold says about it (F10.2). What a record does not name is None."""

    log: int
    offset: int
    time_ms: int
    group: str
    type: str | None
    session: int | None
    client: str | None
    topic: str | None
    partition: int | None
    position: int | None
    verdict: str
    reason: str


class SessionRow(NamedTuple):
    """A client's stay in its group. `session` is the offset of its Join; `to_offset` None: it lives.

    `delivery`: at_least_once, at_most_once.
    `ended`: leave, evict, replaced (by a Join that names it), mode (the group's mode changed). `by`: who evicted.
    `last_sign_time_ms`: of the last record that extended it.
    """

    log: int
    group: str
    session: int
    client: str
    member: str
    delivery: str
    from_time_ms: int | None
    to_offset: int | None
    to_time_ms: int | None
    ended: str | None
    by: str
    last_sign_time_ms: int | None


class IntervalRow(NamedTuple):
    """Who owned a partition, from the claim at `epoch` until before `to_offset`; None: still.

    `ended`: release, seek, or as the session's end. `after`: how the partition had become free: new, or as `ended`.
    `in_flight`: messages begun and not finished as of the owner's last word; in at-least-once mode they come again.
    Partition -1 is a claim on the whole topic, or on the group where the topic is "" (the pin).
    """

    log: int
    group: str
    topic: str
    partition: int
    client: str
    session: int
    epoch: int
    from_time_ms: int | None
    to_offset: int | None
    to_time_ms: int | None
    ended: str | None
    after: str | None
    from_position: int | None
    to_position: int | None
    generation: int
    in_flight: int


class PositionRow(NamedTuple):
    """A position as it stood after a record that named it: its history, and that of the lag.

    `cause`: claim, seek, heartbeat, grant (at-most-once mode), release, move.
    """

    log: int
    offset: int
    time_ms: int
    group: str
    topic: str
    partition: int
    session: int | None
    client: str | None
    epoch: int | None
    position: int | None
    generation: int
    lag: int
    in_flight: int
    attempts: int
    cause: str


class RaceRow(NamedTuple):
    """A claim that lost to another session's. `reason`: held, observed. The winner claimed at `winner_epoch`."""

    log: int
    offset: int
    time_ms: int
    group: str
    topic: str
    partition: int
    session: int
    client: str | None
    reason: str
    winner_session: int | None
    winner_client: str | None
    winner_epoch: int | None
    winner_time_ms: int | None


class GapRow(NamedTuple):
    """A span in which nobody owned a partition >= 0; `to_offset` None: still.

    `cause`: new (the partition appeared), else how its owner's claim ended. `client`: that owner. `last_sign_time_ms`:
    of that owner's session; from it to `to_time_ms` is the time that a take-over took. `next_client` is None if the
    span ended otherwise than by a claim. `members`: live sessions at its beginning; `paused`: whether the group was.
    `lived_ms`: how much of the span, up to the end of what was read, some member lived while the group was not paused;
    a member lives until its session ends, but no longer than two heartbeat intervals behind its newest record.
    `take_over_ms`: the same, from `last_sign_time_ms` on.
    """

    log: int
    group: str
    topic: str
    partition: int
    from_offset: int | None
    from_time_ms: int | None
    to_offset: int | None
    to_time_ms: int | None
    cause: str | None
    client: str | None
    last_sign_time_ms: int | None
    next_session: int | None
    next_client: str | None
    members: int
    paused: bool
    lived_ms: int | None
    take_over_ms: int | None


class LostRow(NamedTuple):
    """Messages [from_position, to_position) that no owner of the group was given.

    `cause`: offset_lost (Kafka had deleted them, D6), skipped (a grant began above the position, F5.2), uncommitted
    (in at-most-once mode they were handed to the tasks of a streaming query, whose process ended and had heard of no
    commit; what the tasks did with them nobody knows). Two processes may tell the same loss: where the `generation` of
    the position is the same, it is one.
    """

    log: int
    offset: int
    time_ms: int
    group: str
    topic: str
    partition: int
    session: int | None
    client: str | None
    from_position: int
    to_position: int
    cause: str
    generation: int


class PauseRow(NamedTuple):
    """A pause of a group. `duration_ms`: as last asked for. `ended`: resume, waited, set_position, deleted."""

    log: int
    group: str
    from_offset: int | None
    from_time_ms: int | None
    to_offset: int | None
    to_time_ms: int | None
    duration_ms: int
    renewals: int
    reason: str
    by: str
    ended: str | None


class MoveRow(NamedTuple):
    """A position that an admin moved (rule 8). Back: what lies between is delivered again. On: it is skipped."""

    log: int
    offset: int
    time_ms: int
    group: str
    topic: str
    partition: int
    from_position: int | None
    to_position: int
    generation: int
    by: str


class StandingRow(NamedTuple):
    """How a partition stands at the end of what was read, before the record at `offset`; `time_ms`: of the last one.

    `parked`: why nobody may claim it.
    """

    log: int
    offset: int
    time_ms: int | None
    group: str
    topic: str
    partition: int
    session: int | None
    client: str | None
    epoch: int | None
    position: int | None
    generation: int
    lag: int
    in_flight: int
    attempts: int
    parked: str | None


class DigestRow(NamedTuple):
    """The digest of a group after all offsets below `offset` (section 6), 16 hex digits.

    One per checkpoint and group that had a record since the checkpoint before it, with the log's chain digest; and one
    per group for the end of what was read, whose `chain` is None unless the end is a checkpoint.
    """

    log: int
    offset: int
    group: str
    state: str
    chain: str | None


Row = (
    RecordRow
    | SessionRow
    | IntervalRow
    | PositionRow
    | RaceRow
    | GapRow
    | LostRow
    | PauseRow
    | MoveRow
    | StandingRow
    | DigestRow
)

TABLES: Final[dict[str, type[Row]]] = {
    "records": RecordRow,
    "sessions": SessionRow,
    "intervals": IntervalRow,
    "positions": PositionRow,
    "races": RaceRow,
    "gaps": GapRow,
    "lost": LostRow,
    "pauses": PauseRow,
    "moves": MoveRow,
    "standings": StandingRow,
    "digests": DigestRow,
}
