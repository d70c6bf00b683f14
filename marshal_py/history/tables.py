"""A log as tables: the row type of each table. Types alone; timeline.py makes the rows, spark/ reads them.

In every table None means "none" or "unknown". A field that ends in `time_ms` is in ms since 1970 (UTC) and comes from a
record's timestamp, that is from the clock of a writer or a broker; the fold never reads it. `log` is the coordination
partition. Offsets are offsets in that log; positions are offsets in the data.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class RecordRow(NamedTuple):
    """A record of the log and the fold's verdict on it (F10.2). A field that the record does not name is None.

    `verdict`: accepted, rejected or ignored. `reason`: why it was not accepted.
    """

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
    """A session of a group. `session` is the offset of its Join; `to_offset` is None while it is alive.

    `delivery`: at_least_once or at_most_once. `ended`: how it ended, that is leave (it left), evict (it was silent),
    replaced (its client joined again), mode (the group's delivery changed). `by`: who evicted it.
    `last_sign_time_ms`: time of the last record that extended it.
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
    """An interval in which one session owned a partition: from the claim at `epoch` to before `to_offset`.

    `to_offset` is None while the interval lasts. `ended`: how it ended, that is release, seek (the owner moved its
    position and continues with a new epoch), or the way in which the session ended. `after`: how the interval before it
    ended, in the same words, or new if there was none. `in_flight`: messages that the owner had begun and not finished
    when it last wrote a record; in at-least-once mode they come again.
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
    """A position and its lag after a record that named it.

    `cause`: what the record was, that is claim, seek, heartbeat, grant (of messages, in at-most-once mode), release, or
    move (by an admin).
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
    """A claim that lost to another session's claim, the one at `winner_epoch`.

    `reason`: held (somebody owned the partition), or observed (the loser did not know the winner's claim yet).
    """

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
    """A span in which nobody owned a partition (0 or above). `to_offset` is None while it lasts.

    `cause`: new (the partition appeared), or how its owner's claim ended. `client`: that owner. `last_sign_time_ms`:
    last sign of life of that owner's session; if the session ended, the take-over lasted from then to `to_time_ms`.
    `next_session`, `next_client`: the next owner, None if no claim ended the span. `members`: how many sessions were
    alive when the span began; `paused`: whether the group was paused then. `lived_ms`: how long during the span some
    member was alive while the group was not paused. A member counts as alive until its session ends, but no longer than
    two heartbeat intervals after its newest record. `take_over_ms`: like `lived_ms`, but from `last_sign_time_ms` on.
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
    """Messages [from_position, to_position) that the group did not deliver, or is not known to have processed.

    `cause`: offset_lost (Kafka had deleted them, D6), skipped (a grant began above the position, F5.2), uncommitted
    (a streaming query in at-most-once mode handed them to its tasks and ended before a commit was known; nobody knows
    what the tasks did with them). Two processes may report the same loss; rows with the same `generation` are one loss.
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
    """A pause of a group. `duration_ms`: as its newest record asks for. `renewals`: how often it was renewed.

    `ended`: how it ended, that is resume (an admin ended it), waited (members ended it after `duration_ms`),
    set_position (a move of positions ended it), or deleted (the group was deleted).
    """

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
    """A position that an admin moved (rule 8).

    If it moved back, the messages in between are delivered again; if it moved forward, they are skipped.
    """

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
    """The state of a partition at the end of what was read, that is before `offset`.

    `time_ms`: timestamp of the last record that was read.
    `parked`: why nobody may claim the partition, None if it may be claimed.
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
    """The digest of a group after all offsets below `offset` (PROTOCOL.md, section 6), as 16 hex digits.

    Each checkpoint has one row per group with records since the checkpoint before; `chain` is the log's chain digest.
    The end of what was read has one row per group; its `chain` is None unless the end is a checkpoint.
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
