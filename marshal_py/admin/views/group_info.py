"""What users are told about a group, its members, its pause and its pin. The order of the fields is that of the JSON.

Everything here is a frozen Struct, as all that tells about a state (client/values/info.py). A partition is named
"TOPIC:PARTITION", which `Group.set_position` reads. What `marshal state` and `marshal groups ls` show stands below;
there None stands for what nobody knows, or what there is not. overview.py makes all of it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class PauseInfo(Struct, frozen=True):
    """A running pause.

    `token`: names the pause, for `Group.resume` and for operations that work in it. `duration_s`: how long it lasts, in
    seconds, from when it began or was renewed. `by`, `reason`: its author, and why; None if the log does not say.
    `left_s`: for how many more seconds it may last; None if unknown.
    """

    token: int
    duration_s: float
    by: str | None
    reason: str | None
    left_s: float | None


class MemberInfo(Struct, frozen=True):
    """A live session, which is one consumer in one group.

    `member`, `priority_group`, `priority`, `min_pending`, `min_ack_pending`: the options of the consumer; None, and 0
    for the priority, if it did not give them. `delivery`, `topics`: its mode, and the topics and patterns that it
    consumes. `library`: the name and version of its library; `reads_version`: the newest version of records that it
    reads. `witness`: who ends the session if the process dies; None if nobody does. `interval_s`: its heartbeat
    interval in seconds. `claims`: the partitions that it owns. `stepped_down`: whether it is the last candidate for
    every partition because somebody called `Group.step_down`, or `Group.unpin`.
    `last_sign_s`: how many seconds ago its last sign of life was, by this machine's clock; None if that is not known,
    as in GroupInfo. `state`: "fresh" until an interval after it, "unknown" until two, or if it is not known, then
    "stale": the consumer is silent, so dead, stopped or cut off, and the others evict it.
    """

    group: str
    session: int
    client_id: str
    member: str | None
    priority_group: str | None
    priority: int
    min_pending: int | None
    min_ack_pending: int | None
    delivery: str
    topics: tuple[str, ...]
    library: str
    reads_version: int
    witness: str | None
    interval_s: float
    claims: tuple[str, ...]
    stepped_down: bool
    state: str = "unknown"
    last_sign_s: float | None = None


class MemberState(Struct, frozen=True):
    """One member name of a group with the policy `members` or `blocks`.

    `partitions`: those that belong to the name. `claims`: those that consumers with this name own now. `session`,
    `client_id`: of the consumer that is active for the name; None if no consumer with this name is there. `standbys`:
    the client ids of the other ones, the next in line first.
    """

    member: str
    partitions: tuple[str, ...]
    claims: tuple[str, ...]
    session: int | None
    client_id: str | None
    standbys: tuple[str, ...]


class PositionInfo(Struct, frozen=True):
    """What the log says about one partition of a group.

    `position`: the lowest offset that is not finished; None until the partition has an owner or a position was set.
    `generation`: how often the position was set or forgotten, as by `seek`, `Group.set_position` and a topic that was
    created again. `owner`: the client id of the `session` that owns the partition; None if nobody does. `parked`: why
    nobody may own it; None if somebody may.
    """

    topic: str
    partition: int
    position: int | None
    generation: int
    owner: str | None
    session: int | None
    parked: str | None


class PriorityGroupState(Struct, frozen=True):
    """A priority group, as the struct of this name of NATS does.

    `pinned_id`: the id of the pin, the text of `Message.pin_id`. `pinned_ts`: when that pin began, in ISO 8601; also
    None if the log does not say any more. Both are None if nobody is pinned.
    """

    name: str
    pinned_id: str | None = None
    pinned_ts: str | None = None


class PinInfo(Struct, frozen=True):
    """Says who is pinned in a group with the policy `pinned`.

    `pinned_id`, `pinned_ts`: as in PriorityGroupState. `session`, `client_id`: of the pinned consumer; None if nobody
    is pinned. `standbys`: the client ids of the other consumers, the next in line first.
    """

    group: str
    priority_group: str
    pinned_id: str | None
    pinned_ts: str | None
    session: int | None
    client_id: str | None
    standbys: tuple[str, ...]


class SettingsOrigin(Struct, frozen=True):
    """Names the record that set a group's settings. `by`: its author, and why; "" if the record does not say."""

    offset: int
    by: str


class GroupInfo(Struct, frozen=True, kw_only=True):
    """A group, as the log says it.

    `delivery`: "at_least_once" or "at_most_once"; "none" until a consumer or a setting decides it. `sessions`,
    `partitions`, `owned`, `parked`: how many live sessions there are, partitions of all topics, those that have an
    owner, and those that nobody may own. `topics`: how many partitions each has. `opaque`: whether a newer release
    wrote records that this one cannot read. `policy`: None if nobody set one; then each consumer follows its own.
    `pause`: None if the group is not paused. `on_topic_recreated`: as in GroupConfig; None
    if it is not set.

    Policies `members` and `blocks`: `max_members`; `member_list` (names) and `mappings` (name -> partitions), each None
    if it is not set; `member_states`, one for each name; `active_members`, the names whose consumers own partitions;
    `missing_members`, the names for which no consumer is there; `unassigned`, the partitions that belong to no name.

    `topic_ids`: Kafka's, None where the cluster has none. `members`: the live sessions, in the order in which they are
    candidates for partitions. `positions`: of the partitions that were owned or moved at least once.

    Policies `prioritized`, `pinned` and `overflow`: `priority_groups`. Policy `pinned`: `priority_timeout_s`. Policy
    `overflow`: `failover_s`, None for never. Both are in seconds, as in GroupConfig. Policy `balanced`: `lag_weighted`.

    What the policy of the group does not have is None, False or empty.

    `admin_keys`: as in GroupConfig. `settings_from`: None if nobody has set anything.
    """

    group: str
    delivery: str
    sessions: int
    topics: dict[str, int]
    partitions: int
    owned: int
    parked: int
    paused: bool
    deleted: bool
    opaque: bool
    policy: str | None
    pause: PauseInfo | None
    on_topic_recreated: str | None
    max_members: int | None = None
    member_list: tuple[str, ...] | None = None
    mappings: dict[str, tuple[int, ...]] | None = None
    member_states: tuple[MemberState, ...] = ()
    active_members: tuple[str, ...] = ()
    missing_members: tuple[str, ...] = ()
    unassigned: tuple[str, ...] = ()
    topic_ids: dict[str, str | None]
    members: tuple[MemberInfo, ...]
    positions: tuple[PositionInfo, ...]
    priority_groups: tuple[PriorityGroupState, ...] = ()
    priority_timeout_s: float | None = None
    failover_s: float | None = None
    lag_weighted: bool = False
    admin_keys: tuple[str, ...] = ()
    settings_from: SettingsOrigin | None


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
    sessions: tuple[MemberInfo, ...]
    partitions: tuple[PartitionState, ...]
    notices: tuple[str, ...] = ()


Level = Literal["ok", "warn", "fail", "unknown"]


class Check(Struct, frozen=True):
    """The result of one check, shown as one line. `advice` says what to do, "" if nothing is to be done."""

    name: str
    level: Level
    found: str
    advice: str = ""


class PartitionHealth(PartitionState, frozen=True):
    """A partition, how fast its position moves, and how long it takes to its end.

    `lag_per_second`: how the lag changes, by this minute; `zero_s`: in how many seconds it is 0 then, None for never.
    Both are None for a reader that looks again and again, and for one of the past. `oldest_s`: the age of its oldest
    unfinished message; None if nothing waits, or it is unknown. `retention_s`: in how many seconds Kafka may delete
    that one because of its age, 0 if it may have. `deleted`: how many offsets at and above the position it has deleted.
    """

    per_second: float
    time_s: float | None
    lag_per_second: float | None
    zero_s: float | None
    oldest_s: float | None
    retention_s: float | None
    deleted: int = 0

    @property
    def retention_used(self) -> float | None:
        """Returns which part of the retention its oldest unfinished message has used, 1 if it may be deleted."""
        if self.retention_s is None:
            return None
        age_s = self.oldest_s or 0.0
        return age_s / (age_s + self.retention_s) if self.retention_s else 1.0


class GroupHealth(Struct, frozen=True):
    """A group: what is wrong (`level`: the worst of `findings`; `notices`: the same in words), who is there, and how
    far it is behind.

    `causes`: for how many partitions nobody consumes, by cause (operations.md); 1 where it is the whole group, or a
    consumer. Of the `sessions`, `fresh` and `stale` as MemberInfo says, `witnessed` have a witness; `last_sign_s`: of
    the one that was heard last; `last_progress_s`: since a consumer last moved a position forward, None if not while
    the reader looked (a minute and longer). `owned`, `free`, `parked`: partitions. `unknown`: how many partitions have
    a lag that is not known; it is not in `lag`. `oldest_s`, `retention_s`: the worst of `partitions`. `redelivered`,
    `advisories` (by kind): since the reader began.
    """

    group: str
    level: Level
    findings: tuple[Check, ...]
    notices: tuple[str, ...]
    causes: dict[str, int]
    delivery: str
    deleted: bool
    pause: PauseInfo | None
    sessions: int
    fresh: int
    stale: int
    witnessed: int
    last_sign_s: float | None
    last_progress_s: float | None
    owned: int
    free: int
    parked: int
    lag: int | None
    unknown: int
    per_second: float
    time_s: float | None
    lag_per_second: float | None
    zero_s: float | None
    oldest_s: float | None
    retention_s: float | None
    redelivered: int
    advisories: dict[str, int]
    partitions: tuple[PartitionHealth, ...]

    @property
    def dead_letters(self) -> int:
        """Returns how many messages became dead letters since the reader began."""
        return self.advisories.get("dead_letter", 0)


class GroupCheck(Struct, frozen=True):
    """What `marshal check` says. `level`: the worst of `checks`, where "unknown" is worse than "warn"; `exit_code`: 0
    ok, 1 warn, 2 fail, 3 unknown. The figures are those of GroupHealth, None if they are unknown."""

    group: str
    level: Level
    exit_code: int
    checks: tuple[Check, ...]
    sessions: int | None = None
    owned: int | None = None
    free: int | None = None
    parked: int | None = None
    lag: int | None = None
    oldest_s: float | None = None
    retention_s: float | None = None


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
