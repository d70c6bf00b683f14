"""What has begun and not ended at a point of a log: sessions, claims, spans without an owner, pauses.

It says also since when. The world forgets when these things began, because no rule needs it; timeline.py remembers it
for people. No row is made here.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.wire.identity import NONE, TopicPartition


class SessionSpan(Struct):
    """A session; ended ones are kept, as late records may name them. `until_ms`: alive until then unless it writes.
    `sign_time_ms`: its last sign of life; `sign_lived_ms`: `Presence.lived_ms` then."""

    client: str
    member: str
    mode: int
    from_time_ms: int | None
    sign_time_ms: int | None
    alive: bool = True
    until_ms: int = 0
    sign_lived_ms: int | None = None


class Claim(Struct):
    """A live claim. `after`: how the partition's previous claim ended, in the words of tables.IntervalRow."""

    topic: str
    partition: int
    session: int
    from_time_ms: int | None
    after: str | None
    from_position: int | None
    generation: int


class FreeSpan(Struct):
    """A span without an owner; only an admin can move `position` in it. `cause`, `client`, `sign_time_ms`: of the claim
    before. `lived_ms`, `members`: at its beginning; `sign_lived_ms`: at that last sign."""

    from_offset: int | None
    from_time_ms: int | None
    cause: str | None
    client: str | None
    sign_time_ms: int | None
    members: int
    paused: bool
    position: int | None
    lived_ms: int | None = None
    sign_lived_ms: int | None = None


class Pause(Struct):
    """A running pause. `token`: offset of its newest record, by which others name the pause."""

    from_offset: int | None
    from_time_ms: int | None
    token: int | None
    duration_ms: int
    reason: str = ""
    by: str = ""
    renewals: int = 0


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
    """What has begun and not ended in a group, and ended sessions. `sessions` by number, `claims` by epoch, `spans` by
    topic and partition, `pause` or None."""

    sessions: dict[int, SessionSpan] = {}
    claims: dict[int, Claim] = {}
    spans: dict[str, dict[int, FreeSpan]] = {}
    pause: Pause | None = None
    winners: dict[str, dict[int, tuple[int, int, int | None]]] = {}  # last claim of a partition: epoch, session, time
    deleted: bool = False
    presence: Presence = msgspec.field(default_factory=Presence)

    def client(self, session: int | None) -> str | None:
        span = self.sessions.get(session) if session is not None else None
        return None if span is None else span.client


class OpenState(Struct):
    """All that a Timeline knows besides its world. `touched`: groups with records since the last checkpoint. `time_ms`:
    of the last record."""

    groups: dict[str, OpenGroup] = {}
    touched: set[str] = set()
    time_ms: int | None = None


def offset_or_none(value: int) -> int | None:
    return None if value == NONE else value


def new_span(
    group: Group, topic: str, partition: int, offset: int | None, time_ms: int | None, lived_ms: int | None
) -> FreeSpan:
    """Returns the span of a partition that appears with the record at `offset`. `lived_ms`: `Presence.lived_ms`
    then."""
    part = group.partitions.get(TopicPartition(topic, partition))
    position = None if part is None else offset_or_none(part.position)
    return FreeSpan(offset, time_ms, "new", None, None, len(group.sessions), group.paused, position, lived_ms)


def open_state_of(world: World) -> OpenState:
    """Returns what is open in a world that was not folded from the log's beginning: since when is unknown (None)."""
    found: dict[str, OpenGroup] = {}
    for name, group in world.groups.items():
        opened = found[name] = OpenGroup(deleted=group.deleted)
        for session, state in group.sessions.items():
            opened.sessions[session] = SessionSpan(state.join.client_id, state.join.member, state.join.mode, None, None)
        for epoch, part in group.claims.items():
            opened.claims[epoch] = Claim(*part.tp, part.owner, None, None, None, part.generation)
            opened.winners.setdefault(part.tp.topic, {})[part.tp.partition] = epoch, part.owner, None
        if group.paused:
            opened.pause = Pause(None, None, group.pause_change, group.pause_duration_ms)
        owned = {part.tp for part in group.claims.values()}
        for topic, known in group.topics.items() if not group.deleted else ():
            spans = opened.spans[topic] = {}
            for partition in range(known.count):
                if (topic, partition) not in owned:
                    spans[partition] = new_span(group, topic, partition, None, None, None)
                    spans[partition].cause = None
    return OpenState(found)
