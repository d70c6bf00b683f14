"""Declares the tables into which a log can be turned: the row type of each. timeline.py makes the rows.

In every table None means "none" or "unknown". A field that ends in `time_ms` is in ms since 1970 (UTC) and comes from a
record's timestamp, that is from the clock of a writer or a broker; the fold never reads it. `log` is the coordination
partition. Fields named `offset` are offsets in that log; fields named `position` are offsets in a data partition.
`session` is the number of a session, which is the offset of its Join; `client` is that session's client id.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class RecordRow(NamedTuple):
    """A record of the log and the fold's verdict on it (F10.2). A field that the record lacks is None.

    `verdict`: accepted, rejected or ignored. `reason`: why it was not accepted, as PROTOCOL.md names it.
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
    """A session of a group. `to_offset` is None while the session is alive.

    `delivery`: "at_least_once" or "at_most_once". `ended`: how the session ended, which is "leave" (it left), "evict"
    (it was silent), "replaced" (its client joined again), "mode" (the group's delivery changed), or "deleted" (the
    group was). `by`: who evicted it. `last_sign_time_ms`: time of the last record that extended the session.
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
    """An interval in which one session owned a partition. It begins with the claim at offset `epoch`.

    `to_offset`: offset of the record that ended the interval; None while it lasts. `ended`: how it ended. It is
    "release", "seek" (the owner moved its position, and its next interval begins at once), or how the session ended, in
    the words of SessionRow. `after`: how the partition's previous interval ended, in the same words, or "new" if there
    was none. `in_flight`: how many messages the owner had begun and not finished when it last wrote a record; in
    at-least-once mode they are delivered again.

    Partition -1 stands for a claim on the whole topic. If the topic is also "", the claim is on the whole group (the
    pin).
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
    """A partition's position and figures after a record that named the position.

    `cause`: what the record was, which is "claim", "seek", "heartbeat", "grant" (of messages, in at-most-once mode),
    "release", or "move" (by an admin). `lag`: how far the position is behind the partition's end, as its owner last
    wrote. `in_flight`: how many messages the owner had begun and not finished then. `attempts`: in at-least-once mode,
    how many deliveries of the message at the position are counted if the owner dies now.
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
    """A claim that lost to another session's claim, the winner, whose offset is `winner_epoch`.

    `reason`: why the claim was rejected, which is "held" (the partition had an owner), or "observed" (the loser wrote
    its claim before it had read the winner's). `session` and `client` are the loser's.
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
    """A span in which nobody owned a partition. `to_offset` is None while it lasts.

    `cause`: "new" (the partition appeared), or how the last owner's claim ended, in the words of IntervalRow. `client`:
    that owner. `last_sign_time_ms`: when the owner's session gave its last sign of life; if the session ended, the
    take-over lasted from then to `to_time_ms`. `next_session`, `next_client`: the next owner, None if no claim ended
    the span. `members`: how many sessions were alive when the span began; `paused`: whether the group was paused then.
    `lived_ms`: how long during the span at least one member was alive while the group was not paused. A member is taken
    for alive until its session ends, but no longer than two heartbeat intervals after its newest record.
    `take_over_ms`: how long the same was true between `last_sign_time_ms` and the end of the span.
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
    """Messages that the group did not deliver, or is not known to have processed.

    They have the offsets `from_position` to `to_position` - 1. `cause`: "offset_lost" (Kafka had deleted them, D6),
    "skipped" (a grant began above the position, F5.2), "amo_lost" (granted to a session that ended and neither reported
    them as handled nor gave them back, F3.3: at most these are lost), "uncommitted" (a streaming query in at-most-once
    mode handed them to its tasks and ended before a commit was known; nobody knows what the tasks did with them). Two
    processes may report the same loss, and so may two causes: rows that name the same messages and the same
    `generation` are one loss.
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
    """A pause of a group. `duration_ms`: how long the newest record of the pause asks for.

    `renewals`: how often the pause was renewed. `ended`: how it ended, which is "resume" (an admin ended it), "waited"
    (members ended it after `duration_ms`), "set_position" (a move of positions ended it), or "deleted" (the group was
    deleted).
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
    """A move of one position by an admin (PROTOCOL.md, F8).

    A move back makes the group deliver the messages in between again; a move forward skips them.
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

    `time_ms`: timestamp of the last record that was read. `parked`: why nobody may claim the partition, None if it may
    be claimed. The other fields mean what they mean in PositionRow.
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

    There is one row at each checkpoint for each group that had records since the checkpoint before; there `chain` is
    the log's chain digest. At the end of what was read there is one row for each group; its `chain` is None unless the
    end is a checkpoint.
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
