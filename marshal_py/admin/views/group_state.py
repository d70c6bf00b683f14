"""What `marshal state` and `marshal groups ls` show of a group, as values; msgspec writes their JSON. overview.py makes
them. None stands for what nobody knows, or what there is not."""

from __future__ import annotations

from msgspec import Struct

from marshal_py.admin.views.group_info import PauseInfo


class SessionState(Struct, frozen=True):
    """A session. `state`: fresh, unknown or stale, by how long ago its last sign of life was (`last_extended_s`)."""

    session: int
    client_id: str
    member: str | None
    state: str
    last_extended_s: float | None
    interval_s: float
    delivery: str
    topics: tuple[str, ...]
    claims: int
    witness: str | None
    stepped_down: bool
    library: str
    reads_version: int


class PartitionState(Struct, frozen=True):
    """A partition. `owner`: the client id of `session`, which claimed it by the record at `epoch`."""

    topic: str
    partition: int
    owner: str | None
    session: int | None
    epoch: int | None
    position: int | None
    generation: int
    version: int | None
    in_flight: int
    end: int | None
    lag: int | None
    parked: str | None


class GroupState(Struct, frozen=True):
    """A group. `log`: its coordination partition. `notices`: why nobody consumes some partitions, in words."""

    group: str
    log: int
    delivery: str
    policy: str | None
    deleted: bool
    opaque_at: int | None
    pause: PauseInfo | None
    sessions: tuple[SessionState, ...]
    partitions: tuple[PartitionState, ...]
    notices: tuple[str, ...] = ()


class PartitionLag(Struct, frozen=True):
    """How far a partition is behind, how fast its position moves, and how long it takes to its end."""

    topic: str
    partition: int
    owner: str | None
    position: int | None
    end: int | None
    lag: int | None
    parked: str | None
    per_second: float
    time_s: float | None


class GroupLag(Struct, frozen=True):
    """How far a group is behind. `unknown`: how many partitions have a lag that is not known; it is not in `lag`."""

    group: str
    lag: int | None
    unknown: int
    parked: int
    per_second: float
    time_s: float | None
    partitions: tuple[PartitionLag, ...]
    notices: tuple[str, ...] = ()


class GroupSummary(Struct, frozen=True):
    """A group in one line. `stale`: how many sessions were silent for two intervals; `last_sign_s`: how long all were.

    `not_consumed`: the causes for which nobody consumes some partitions.
    """

    group: str
    delivery: str
    sessions: int
    topics: tuple[str, ...]
    partitions: int
    owned: int
    parked: int
    paused: bool
    deleted: bool
    opaque: bool
    stale: int = 0
    last_sign_s: float | None = None
    not_consumed: tuple[str, ...] = ()
