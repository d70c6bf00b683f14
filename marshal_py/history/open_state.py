"""What is open in a log at some point, beside its world: stays, claims, spans without an owner, pauses; since when.

Plain values that msgspec writes down and reads back. The world forgets these things because no rule needs them;
timeline.py keeps them for people. No row is made here.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.world import Group, World


class SessionSpan(Struct):
    """A session that was begun. `alive` ends with it; the rest stays for the names in late records.

    `until_ms`: it lives up to here, if it is not heard of again. `sign_lived_ms`: as of its last sign of life, for how
    long some member of the group had lived.
    """

    client: str
    member: str
    mode: int
    from_time_ms: int | None
    sign_time_ms: int | None
    alive: bool = True
    until_ms: int = 0
    sign_lived_ms: int | None = None


class Claim(Struct):
    """A live claim."""

    topic: str
    partition: int
    session: int
    from_time_ms: int | None
    after: str | None
    from_position: int | None
    generation: int


class FreeSpan(Struct):
    """A partition that nobody owns. `position` is the one it has; it moves by SetPosition only.

    `lived_ms`: for how long some member of the group had lived when it began, `sign_lived_ms`: at the owner's last sign
    of life.
    """

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
    """A running pause."""

    from_offset: int | None
    from_time_ms: int | None
    token: int | None
    duration_ms: int
    reason: str = ""
    by: str = ""
    renewals: int = 0


class Presence(Struct):
    """How long some member of a group has lived while the group was not paused.

    A member lives until its session ends, but no longer than two of its heartbeat intervals behind its newest record:
    so long do others wait for it. Time never runs back here, whatever the records say.
    """

    lived_ms: int = 0
    at_ms: int | None = None  # as of the latest of the records' timestamps
    until_ms: int = 0  # some member lives up to here, if it is not heard of again

    def lived_by(self, time_ms: int, paused: bool) -> int:
        """`lived_ms` as of a later moment. The group was paused up to then, or was not."""
        if self.at_ms is None or paused:
            return self.lived_ms
        return self.lived_ms + max(0, min(time_ms, self.until_ms) - self.at_ms)

    def advance(self, time_ms: int, paused: bool) -> None:
        self.lived_ms = self.lived_by(time_ms, paused)
        self.at_ms = time_ms if self.at_ms is None else max(time_ms, self.at_ms)

    def extend(self, lease_ms: int) -> int:
        """A member is heard of now. The time up to which it lives."""
        assert self.at_ms is not None  # its record has advanced the time
        until_ms = self.at_ms + lease_ms
        self.until_ms = max(self.until_ms, until_ms)
        return until_ms


class GroupTrack(Struct):
    """What is open in one group. A plain value: msgspec writes it down and reads it back."""

    stays: dict[int, SessionSpan] = {}
    claims: dict[int, Claim] = {}
    spans: dict[str, dict[int, FreeSpan]] = {}
    pause: Pause | None = None
    winners: dict[str, dict[int, tuple[int, int, int | None]]] = {}  # last claim of a partition: epoch, session, time
    deleted: bool = False
    presence: Presence = msgspec.field(default_factory=Presence)

    def client(self, session: int | None) -> str | None:
        stay = self.stays.get(session) if session is not None else None
        return None if stay is None else stay.client


class Open(Struct):
    """All that a Timeline knows beside its world.

    `touched`: groups with records since the last checkpoint. `time_ms`: timestamp of the last record.
    """

    tracks: dict[str, GroupTrack] = {}
    touched: set[str] = set()
    time_ms: int | None = None


def some_offset(value: int) -> int | None:
    return None if value == NONE else value


def appeared(
    group: Group, topic: str, partition: int, offset: int | None, time_ms: int | None, lived_ms: int | None
) -> FreeSpan:
    part = group.partitions.get(TopicPartition(topic, partition))
    position = None if part is None else some_offset(part.position)
    return FreeSpan(offset, time_ms, "new", None, None, len(group.sessions), group.paused, position, lived_ms)


def open_in(world: World) -> Open:
    """What is open in a world of which nothing else is known: since when, nobody can say."""
    found: dict[str, GroupTrack] = {}
    for name, group in world.groups.items():
        track = found[name] = GroupTrack(deleted=group.deleted)
        for session, state in group.sessions.items():
            track.stays[session] = SessionSpan(state.join.client_id, state.join.member, state.join.mode, None, None)
        for epoch, part in group.claims.items():
            track.claims[epoch] = Claim(*part.tp, part.owner, None, None, None, part.generation)
            track.winners.setdefault(part.tp.topic, {})[part.tp.partition] = epoch, part.owner, None
        if group.paused:
            track.pause = Pause(None, None, group.pause_change, group.pause_duration_ms)
        owned = {part.tp for part in group.claims.values()}
        for topic, known in group.topics.items() if not group.deleted else ():
            spans = track.spans[topic] = {}
            for partition in range(known.count):
                if (topic, partition) not in owned:
                    spans[partition] = appeared(group, topic, partition, None, None, None)
                    spans[partition].cause = None
    return Open(found)
