"""Options of a consumer, a group and `connect`: defaults, bounds and reasons; a group's settings as records."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, Literal, NamedTuple, ParamSpec, TypedDict, TypeVar

from msgspec.structs import replace

from marshal_py.client.values import position_text
from marshal_py.client.values.info import ClaimInfo
from marshal_py.errors import InvalidOption, UnsupportedPlatform
from marshal_py.protocol.duties import SNAPSHOT_EVERY_RECORDS, SNAPSHOT_RECORDS_MIN
from marshal_py.protocol.fold.policies import DEFAULT_POLICY, OWN_POLICIES, OWN_POLICY, RELEASING
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member import group_settings
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire.codec import VERIFIES, SigningKey
from marshal_py.protocol.wire.identity import ANY, NONE, check_id, check_topic
from marshal_py.protocol.wire.records import (
    ADMIN_KEYS_MAX,
    INTERVAL_MS_MAX,
    INTERVAL_MS_MIN,
    MODE_NAMES,
    MODES,
    ON_TOPIC_RECREATED,
    PARTITION_MAX,
    PRIORITY_MAX,
)
from marshal_py.protocol.wire.records import GroupConfig as ConfigRecord
from marshal_py.transport import option_names
from marshal_py.transport.option_names import constructor_checks_names, nearest
from marshal_py.transport.serialization import Deserializer, check_plain

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# --- The settings of a group by name, as programs and the command line give and read them, and their GroupConfig record
#
# A setting that is not named stays. Whether settings belong together is decided by protocol/member/group_settings.py.


Wanted = Mapping[str, Any]  # setting -> its new value; check_settings says which there are

WORDS: Final[dict[str, tuple[str, ...]]] = {
    "delivery": tuple(MODES),
    "policy": group_settings.known_policies(),
    "on_topic_recreated": ON_TOPIC_RECREATED,
}
SECONDS_MAX: Final = 10**9  # some 30 years
SECONDS_MIN: Final = 0.001  # less would become 0, which means something else
LISTS: Final = ("members", "priority_groups")  # of names
TIMES: Final = ("priority_timeout_s", "failover_s")
NAMES: Final = (*WORDS, "lag_weighted", "max_members", "mappings", *LISTS, *TIMES, "admin_keys")


def check_settings(wanted: Wanted) -> dict[str, Any]:
    """Returns a copy of `wanted`.

    It may name `delivery`, `policy`, `on_topic_recreated`, `lag_weighted` (bool), `max_members` (int), `members` and
    `priority_groups` (lists of names), `mappings` (name -> list of partitions), `admin_keys` (list of hex) and TIMES.
    Raises InvalidOption for any other name, and for a value that its setting cannot have.
    """
    for name, value in wanted.items():
        if name not in NAMES:
            advice = f"{nearest(name, NAMES)} ".lstrip()
            raise InvalidOption(name, value, f"{advice}settings of a group are {', '.join(NAMES)}")
        if name in WORDS and value not in WORDS[name]:
            raise InvalidOption(name, value, "one of " + ", ".join(WORDS[name]))
        if name == "lag_weighted" and not isinstance(value, bool):
            raise InvalidOption(name, value, "True or False")
        if name == "max_members" and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidOption(name, value, "a whole number")
        if name in LISTS and (isinstance(value, str) or not _has_names(value)):
            raise InvalidOption(name, value, "a list of names")
        if name == "mappings" and not (isinstance(value, Mapping) and _has_names(value)):
            raise InvalidOption(name, value, "a dict that has the partitions of each member by its name")
        if name in TIMES:
            _check_time(name, value)
        if name == "admin_keys":
            _check_keys(value)
    return dict(wanted)


def _has_names(value: object) -> bool:
    return isinstance(value, Collection) and all(isinstance(one, str) for one in value)


def _check_time(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= SECONDS_MAX:
        raise InvalidOption(name, value, "a number of seconds")
    if 0 < value < SECONDS_MIN:
        raise InvalidOption(name, value, f"0, or at least {SECONDS_MIN:g} seconds: the log has whole milliseconds")


def base_of(group: Group | None) -> ConfigRecord:
    """Returns the settings that a change starts from: the group's own, or an empty record if the group is new or
    deleted.
    """
    if group is None or group.config is None or group.deleted:
        return ConfigRecord(NONE, admin_keys=() if group is None else group.keys)
    return group.config


def settle(base: ConfigRecord, wanted: Wanted, observed: int, token: int, by: str) -> ConfigRecord:
    """Returns the record that sets what `wanted` names. Every other setting stays as in `base`, and so do fields that
    this release does not know.

    Raises InvalidOption if the settings do not belong together.
    """
    changed = _changed(base, wanted, observed, token, by)
    group_settings.check(changed, wanted)
    return changed


def _changed(base: ConfigRecord, wanted: Wanted, observed: int, token: int, by: str) -> ConfigRecord:
    policy = wanted.get("policy", base.policy)
    mode = MODES[wanted["delivery"]] if "delivery" in wanted else base.mode
    members, mappings = base.members, base.mappings
    if "members" in wanted:
        members = tuple(sorted(set(wanted["members"])))
    if "mappings" in wanted:
        mappings = group_settings.mappings_of(wanted["mappings"])
    return replace(
        base,
        observed=observed,
        token=token,
        deleted=False,
        mode=mode,
        by=by,
        policy="" if policy == OWN_POLICY else policy,
        on_topic_recreated=wanted.get("on_topic_recreated", base.on_topic_recreated),
        max_members=wanted.get("max_members", base.max_members),
        members=members,
        mappings=mappings,
        priority_groups=tuple(wanted.get("priority_groups", base.priority_groups)),
        priority_timeout_ms=round(1000 * wanted.get("priority_timeout_s", base.priority_timeout_ms / 1000)),
        failover_ms=round(1000 * wanted.get("failover_s", base.failover_ms / 1000)),
        lag_weighted=wanted.get("lag_weighted", base.lag_weighted),
        admin_keys=_parsed_keys(wanted["admin_keys"]) if "admin_keys" in wanted else base.admin_keys,
    )


def check_wanted(group: Group | None, wanted: Wanted) -> None:
    """Raises InvalidOption if the group cannot have these settings, or cannot have them any more."""
    changed = _changed(base_of(group), wanted, NONE, NONE, "")
    if group is not None:  # first: what a policy needs is no way out where the group cannot have it
        group_settings.check_change(group.name, group.config, group.mode, changed)
    group_settings.check(changed, wanted)
    if group is not None:
        group_settings.check_readers(group, changed)


def changes_mode(group: Group | None, wanted: Wanted) -> bool:
    """Returns whether `wanted` names a delivery and the group already has another one (F9.6)."""
    return group is not None and "delivery" in wanted and group.mode not in (0, MODES[wanted["delivery"]])


def settings_of(group: Group | None) -> dict[str, Any]:
    """Returns the group's settings by name; None for a setting that is not set.

    `max_members`, `members` and `mappings` are there for a partitioned group alone, and `lag_weighted` and
    `priority_groups` only where the policy has them.
    """
    if group is None or group.deleted:
        return {"delivery": None, "policy": None, "on_topic_recreated": None}
    return {"delivery": MODE_NAMES[group.mode] if group.mode else None, **_in_config(base_of(group))}


def differences(group: Group, wanted: Wanted) -> dict[str, tuple[Any, Any]]:
    """Returns (what the group has, what was asked for) by name, for each setting in which the group differs from one
    that is created with `wanted`. Raises InvalidOption if `wanted` cannot be.
    """
    has, asked = settings_of(group), settings_named(ConfigRecord(NONE), wanted)
    if "delivery" not in wanted and not base_of(group).mode:
        del has["delivery"]  # its first consumer has decided, and so it would be again
    if "admin_keys" not in wanted:
        has.pop("admin_keys", None)  # who adds them to a group does not make another one of it
    pairs = {name: (has.get(name) or None, asked.get(name) or None) for name in {**asked, **has}}
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}


def settings_named(base: ConfigRecord, wanted: Wanted) -> dict[str, Any]:
    """Returns the settings by name as `settings_of` would return them if `wanted` were set. Raises InvalidOption."""
    given = {"delivery": wanted["delivery"]} if "delivery" in wanted else {}
    return {**given, **_in_config(settle(base, wanted, NONE, NONE, ""))}


def _in_config(config: ConfigRecord) -> dict[str, Any]:
    return {
        "policy": config.policy or None,
        "on_topic_recreated": config.on_topic_recreated or None,
        "admin_keys": [key.hex() for key in config.admin_keys] or None,
        **group_settings.settings_of(config),
    }


@constructor_checks_names()
@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Says how the consumers of a group share partitions. None leaves a setting as it is.

    `delivery`: "at_least_once" or "at_most_once"; if nobody sets it, the first consumer decides. `policy`: "balanced",
    "greedy", or "own", so that each consumer follows its own; "topic", so that each topic has one consumer; or
    "members" or "blocks", which go with `max_members` and either `members` (names) or `mappings` (name -> partitions);
    or "prioritized", "pinned" or "overflow", which go with `priority_groups` (a list of one name). All but the first
    three are for the group's whole life.
    `priority_timeout_s`: after how many seconds without a request of the pinned consumer another one is pinned; 120 if
    it is not set. `failover_s`: after how many seconds without a request of a consumer without conditions those with
    conditions get partitions under the policy overflow; 0, the default, is never. `lag_weighted`: whether the policy
    balanced shares the backlog, too, and not only the number of partitions.
    `on_topic_recreated`: what happens to the partitions of a topic that was deleted and created again; with "fail"
    nobody consumes them until somebody moves their positions, with "earliest" they are consumed from their beginnings.
    `admin_keys`: the public halves of `marshal keys` whose holders alone may administer the group; [] is everybody.

    Raises InvalidOption.
    """

    delivery: str | None = None
    policy: str | None = None
    on_topic_recreated: str | None = None
    max_members: int | None = None
    members: Sequence[str] | None = None
    mappings: Mapping[str, Sequence[int]] | None = None
    priority_groups: Sequence[str] | None = None
    priority_timeout_s: float | None = None
    failover_s: float | None = None
    lag_weighted: bool | None = None
    admin_keys: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_settings(self.named())

    def named(self) -> dict[str, Any]:
        """Returns the settings that are not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def record(self) -> ConfigRecord:
        """Returns the record that creates a group with these settings. Raises InvalidOption."""
        return settle(ConfigRecord(NONE), self.named(), NONE, NONE, "")

    def is_part_of(self, group: Group) -> bool:
        """Returns whether the group has these settings already."""
        named = self.named()
        known = settings_of(group)
        wanted = {**known, **settings_named(base_of(group), named)}
        return all(known.get(name) == wanted[name] for name in named)


EMPTY: Final = GroupConfig()


# --- How long a connection keeps the history of its coordination logs, and where it saves a broken state.

CONNECT_TIMEOUT_S: Final = 30.0  # a broker that restarts is back within seconds
HISTORY_KEPT_S: Final = 86_400.0  # a day: long enough to look at what happened last night


class RetentionPolicy(NamedTuple):
    """The options of `connect` that are about histories. PROTOCOL.md: N8, N12, G7."""

    snapshot_every_records: int = SNAPSHOT_EVERY_RECORDS
    history_kept_s: float = HISTORY_KEPT_S
    # Where a consumer that ends with Diverged saves its state; "": the system's folder; None: nowhere.
    evidence_dir: str | None = ""
    snapshot_records_min: int = SNAPSHOT_RECORDS_MIN


# --- The options of a consumer

Delivery = Literal["at_least_once", "at_most_once"]
OnTopicRecreated = Literal["fail", "earliest"]

HEARTBEAT_INTERVAL_S: Final = 2.0  # a fail-over takes about two; each consumer sends a small record every third of one
HANDLER_TIMEOUT_S: Final = 300.0  # Kafka's max.poll.interval: long for a handler, short for a hung one
HAND_OVER_TIMEOUT_S: Final = 30.0  # how long a new member may wait for a busy handler, so that a deployment goes on
ACKS_PENDING_MAX: Final = 1_000_000  # as many as any partition buffers; more bounds nothing
RELEASE_BEHIND_S_MIN: Final = 5.0  # a garbage collection or a slow fetch must not count as a speed
# Of keys and values; half of what librdkafka alone keeps by default, because its own queue gets as much (prefetch.py).
PREFETCH_BYTES: Final = 32 * 1024 * 1024
PREFETCH_BYTES_MIN: Final = 1024  # librdkafka counts its own bound in KiB
PREFETCH_BYTES_MAX: Final = 2_097_151 * 1024  # the most that librdkafka takes
PENDING_MAX: Final = 2**53  # of a condition: the bound of the Join
MAX_DELIVER_MAX: Final = 1_000_000  # far above what anybody wants to wait for
TOPICS_MAX: Final = 1_000  # of one consumer (PROTOCOL.md 4.2), those included that its patterns match
COORDINATION_TOPIC: Final = "__marshal"

# Callbacks run on a thread of their own, in order (`Callbacks`): a slow one delays the next ones and `close` alone.
OnClaim = Callable[[ClaimInfo], None]
OnRevoking = Callable[[ClaimInfo], None]
OnLost = Callable[[ClaimInfo, str], None]
OnActivity = Callable[[], None]


# Options that are called, or are yes or no: __post_init__ checks their types. It checks those of the others by bounds.
CALLABLES: Final = (
    "on_claim", "on_revoking", "on_lost", "on_activated", "on_deactivated", "key_deserializer", "value_deserializer",
)  # fmt: skip

# Options that are numbers: whole ones if their bounds are. With the default None an option may be None.
NUMBERS: Final[dict[str, tuple[float, float, str]]] = {
    "heartbeat_interval_s": (
        *(INTERVAL_MS_MIN / 1000, INTERVAL_MS_MAX / 1000),
        "shorter ones make traffic and false alarms, longer ones make slow take-overs",
    ),
    "handler_timeout_s": (1.0, 86_400.0, "a partition whose handler runs longer is handed to somebody else"),
    "max_claims": (1, PARTITION_MAX + 1, "None means no limit"),
    "priority": (0, PRIORITY_MAX, "lower ones come first"),
    "min_pending": (1, PENDING_MAX, "so many messages make this consumer take part"),
    "min_ack_pending": (1, PENDING_MAX, "so many messages make this consumer take part"),
    "capacity": (1, 1_000_000, "a weight relative to the other members'"),
    "max_acks_pending": (1, ACKS_PENDING_MAX, "of one partition; 1 keeps the order"),
    "max_deliver": (1, MAX_DELIVER_MAX, "deliveries of one message; 5 is a good choice"),
    "prefetch_bytes": (PREFETCH_BYTES_MIN, PREFETCH_BYTES_MAX, "of keys and values, buffered of all partitions"),
}
AT_LEAST_ONCE_ONLY: Final = {
    "max_acks_pending": "messages are done before they are delivered, always in order",
    "max_deliver": "nothing is delivered again",
    "dead_letter_topic": "nothing is delivered again",
}


def _advice(name: str, known: Iterable[str]) -> str:
    if name == "client_id":
        return "client_id is an argument of connect()"
    if "." in name:
        return f"{name} is a setting of librdkafka: settings={{{name!r}: ...}}"
    return option_names.advice(name, known)


@constructor_checks_names(_advice)
@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """The options of `Marshal.consumer`. Raises InvalidOption when it is made.

    name, default, unit                      what it says, and when to touch it

    What to read
    delivery               at_least_once     or at_most_once, where a crash loses messages and repeats none
    start                  committed         where a group begins that has no position (client/values/position_text.py)
    on_topic_recreated     fail              or earliest: goes on by itself; the group's settings come first
    key_deserializer       None              makes `message.key` of bytes; as confluent-kafka's
    value_deserializer     None              makes `message.value` of bytes
    settings               {}                librdkafka's settings for the data of this consumer alone

    Which partitions are its
    policy                 None: balanced    or greedy: takes what is free and never what others have
    group_config           None              the settings with which it creates the group, if that has none (1)
    member                 None              for whom it works, under the policies members and blocks
    priority_group         None              under prioritized, pinned and overflow: the name of the group's one
    priority               0 (0 to 9)        under prioritized: the lowest first
    min_pending            None, messages    under overflow: takes part from so many that are not delivered (2)
    min_ack_pending        None, messages    under overflow: or from so many that are delivered and not acked
    max_claims             None, partitions  the most that it owns; for a machine that cannot take more
    capacity               1                 a weight beside the other members'; for machines of unlike sizes
    release_behind_s       None, s           under greedy: gives away what it falls behind on (3)

    How long things may take
    heartbeat_interval_s   2, s              a take-over takes two; longer ones write less
    handler_timeout_s      300, s            a message without an answer for so long ends the claim
    hand_over_timeout_s    None: 30, s       how long a partition that moves waits for its handlers (4)
    fast_reclaim           False             takes over at once from its own client_id; you vouch that it is dead

    What is in work
    max_acks_pending       None, messages    per partition; 1 keeps the order of each partition (5)
    max_deliver            None, deliveries  then a message goes to the dead_letter_topic; 5 is a good choice (6)
    dead_letter_topic      None              where these go, and those that a handler ends by `term`
    prefetch_bytes         32 MiB            keys and values that are buffered, of all partitions (7)

    What to call (on the thread "marshal-callbacks", in order)
    on_claim               None              (ClaimInfo): a partition is this consumer's
    on_revoking            None              (ClaimInfo): a claim is going to end; info.revoking says why
    on_lost                None              (ClaimInfo, reason): a claim has ended
    on_activated           None              (): it owns its first partition; a standby learns that it is its turn
    on_deactivated         None              (): it owns none any more

    1. Of settings that the group has, the policy, `max_members` and `priority_groups` must be the same; the others stay
    as they are.

    2. One of the two conditions suffices.

    3. Over windows of so many seconds it compares how many messages a partition of its gets with how many it handles.
    If it handles fewer, and more are left than it handles in a window, it releases the partition to a consumer with
    less than half of its lag: one per window, never its last one. Refused where the policy cannot be greedy.

    4. After `on_revoking` was called. Then the partition moves, and in at-least-once mode its unacked messages are
    delivered again. It is never longer than `handler_timeout_s`, and that for a consumer that plans ranges.

    5. The most that are delivered and not acked or ended; those that were given back count. With 1 a message is
    delivered when the one before it is done, so the order within a key holds, also after a `nak` and with handlers in
    many threads. In at-least-once mode only. Source: "Max acks pending" of partitioned consumer groups.

    6. The log counts deliveries, those of other consumers included (`Message.delivery_count`), and may count one too
    many for each owner that died. A message is done when Kafka has acknowledged its dead letter; a crash in between
    repeats the letter. In at-least-once mode only.

    7. librdkafka gets as much again. docs/operations.md, "Memory", says what else takes memory.
    """

    delivery: Delivery = "at_least_once"
    start: str | int = position_text.COMMITTED
    on_topic_recreated: OnTopicRecreated = "fail"  # where the group's config says nothing (PROTOCOL.md D10)
    key_deserializer: Deserializer | None = None
    value_deserializer: Deserializer | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    policy: str | None = None
    group_config: GroupConfig | None = None
    member: str | None = None
    priority_group: str | None = None
    priority: int = 0
    min_pending: int | None = None
    min_ack_pending: int | None = None
    max_claims: int | None = None
    capacity: int = 1
    release_behind_s: float | None = None
    heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S
    handler_timeout_s: float = HANDLER_TIMEOUT_S
    hand_over_timeout_s: float | None = None
    fast_reclaim: bool = False
    max_acks_pending: int | None = None
    max_deliver: int | None = None
    dead_letter_topic: str | None = None
    prefetch_bytes: int = PREFETCH_BYTES
    on_claim: OnClaim | None = None
    on_revoking: OnRevoking | None = None
    on_lost: OnLost | None = None
    on_activated: OnActivity | None = None
    on_deactivated: OnActivity | None = None

    def __post_init__(self) -> None:
        self._check_types()
        _one_of("delivery", self.delivery, tuple(MODES))
        position_text.parse(self.start)
        _one_of("on_topic_recreated", self.on_topic_recreated, ON_TOPIC_RECREATED)
        if self.policy is not None:
            _one_of("policy", self.policy, OWN_POLICIES)
        if self.group_config is not None:
            self.group_config.record()
            _one_of("group_config.delivery", self.group_config.delivery or self.delivery, (self.delivery,))
        if self.member is not None:
            check_id("member", self.member)
        for name, (least, most, reason) in NUMBERS.items():
            given = getattr(self, name)
            if given is not None or self.__dataclass_fields__[name].default is not None:
                (_whole if isinstance(most, int) else _within)(name, given, least, most, reason)
        if self.hand_over_timeout_s is not None:
            reason = "a new member waits that long; handler_timeout_s ends a handler's wait anyway"
            _within("hand_over_timeout_s", self.hand_over_timeout_s, 0.0, self.handler_timeout_s, reason)
        if self.release_behind_s is not None:
            least, reason = 2 * self.heartbeat_interval_s, "speeds over less than two heartbeat intervals are chance"
            _within("release_behind_s", self.release_behind_s, max(RELEASE_BEHIND_S_MIN, least), 86_400.0, reason)
        if self.priority_group is not None:
            check_id("priority_group", self.priority_group)
        self._check_redelivery()

    def _check_types(self) -> None:
        for name in CALLABLES:
            value = getattr(self, name)
            if value is not None:
                check_plain(name, value)
        if not isinstance(self.fast_reclaim, bool):
            raise InvalidOption("fast_reclaim", self.fast_reclaim, "True or False")
        if self.group_config is not None and not isinstance(self.group_config, GroupConfig):
            raise InvalidOption("group_config", self.group_config, 'a GroupConfig, as GroupConfig(policy="greedy")')
        if not isinstance(self.settings, Mapping) or not all(isinstance(name, str) for name in self.settings):
            raise InvalidOption("settings", self.settings, "a dict of librdkafka's settings by name")

    def _check_redelivery(self) -> None:
        if self.delivery == "at_most_once":
            for name, why in AT_LEAST_ONCE_ONLY.items():
                if (given := getattr(self, name)) is not None:
                    raise InvalidOption(name, given, f"in an at-most-once group {why}")
        if self.max_deliver is not None and self.dead_letter_topic is None:
            rule = "name a dead_letter_topic as well, or the messages would be lost; to drop them, look at "
            raise InvalidOption("max_deliver", self.max_deliver, rule + "message.delivery_count and call term()")
        if self.dead_letter_topic is not None:
            check_topics([self.dead_letter_topic])

    def check_policy(self, group: str, config: ConfigRecord | None) -> None:
        """Raises InvalidOption for `release_behind_s` under another policy than greedy, where it would do nothing.

        `config`: the settings that the group has, None if it has none. A consumer whose own policy is greedy may wait
        for a group that changes to it and back.
        """
        if self.release_behind_s is None:
            return
        if config is None and self.group_config is not None:
            config = self.group_config.record()
        policy = (config.policy if config is not None else "") or self.policy or DEFAULT_POLICY
        if policy not in RELEASING and (policy not in OWN_POLICIES or self.policy not in RELEASING):
            way_out = "leave it out" if policy not in OWN_POLICIES else f"name policy={RELEASING[0]!r}, or leave it out"
            rule = f"only the policy {RELEASING[0]} obeys it, and group {group!r} has the policy {policy}: {way_out}"
            raise InvalidOption("release_behind_s", self.release_behind_s, rule)

    def check_planning(self) -> None:
        """Raises InvalidOption for an option that says how messages are delivered: ranges are read by others."""
        for name in ("dead_letter_topic", "max_acks_pending"):
            if (given := getattr(self, name)) is not None:
                raise InvalidOption(name, given, "a consumer that plans ranges delivers no messages")

    def _hand_over_timeout_s(self) -> float:
        if self.hand_over_timeout_s is not None:
            return self.hand_over_timeout_s
        return min(HAND_OVER_TIMEOUT_S, self.handler_timeout_s)

    def member_options(self, client_id: str, topics: tuple[str, ...], library: str, witness: str = "") -> MemberOptions:
        return MemberOptions(
            client_id=client_id,
            mode=MODES[self.delivery],
            topics=topics,
            interval_ms=round(self.heartbeat_interval_s * 1000),
            member=self.member or "",
            capacity=self.capacity,
            claims_max=self.max_claims or 0,
            priority=self.priority,
            priority_group=self.priority_group or "",
            min_pending=self.min_pending or 0,
            min_ack_pending=self.min_ack_pending or 0,
            policy=self.policy or DEFAULT_POLICY,
            group_config=self.group_config.record() if self.group_config is not None else None,
            handler_timeout_ms=round(self.handler_timeout_s * 1000),
            hand_over_timeout_ms=round(1000 * self._hand_over_timeout_s()),
            release_behind_ms=round(1000 * (self.release_behind_s or 0)),
            fast_reclaim=self.fast_reclaim,
            on_topic_recreated=self.on_topic_recreated,
            library=library,
            witness=witness,
        )


def check_names(caller: str, names: Iterable[str]) -> None:
    """Raises InvalidOption if one of the names is no option of a consumer. `caller`: what was called, for the error."""
    option_names.check(caller, names, ConsumerOptions.__dataclass_fields__, _advice)


_PATTERN_RULE: Final = "; a pattern is a glob, such as orders-*: * stands for any characters, and nothing else does"


def check_topics(topics: Sequence[str], *, patterns: bool = False) -> tuple[str, ...]:
    """Returns the topics of a consumer, each once, in the order given. Raises InvalidOption.

    `patterns`: whether a text with * is a pattern (identity.py).
    """
    if isinstance(topics, str) or not isinstance(topics, Iterable):
        raise InvalidOption("topics", topics, "a list of topic names")
    names = tuple(dict.fromkeys(check_id("topic", topic) for topic in topics))
    if not names:
        raise InvalidOption("topics", topics, "name at least one topic")
    if len(names) > TOPICS_MAX:
        raise InvalidOption("topics", len(names), f"at most {TOPICS_MAX}: one Join record names them all")
    for name in names:
        if patterns:
            check_pattern(name)
        else:
            check_topic(name)
    return names


def check_pattern(pattern: str, option: str = "topics") -> None:
    """Raises InvalidOption for a text that is neither the name of a topic nor a pattern of names."""
    try:
        if pattern != ANY:
            check_topic(pattern.replace(ANY, "") if isinstance(pattern, str) else pattern)
    except InvalidOption as error:
        raise InvalidOption(option, pattern, error.rule + _PATTERN_RULE) from None


def check_retention(snapshot_every_records: int, history_kept_s: float, evidence_dir: str | None) -> RetentionPolicy:
    _whole("snapshot_every_records", snapshot_every_records, 1, 10_000_000, "a start folds that many at most")
    _within("history_kept_s", history_kept_s, 0.0, 3_650 * 86_400.0, "younger records stay readable for people")
    if evidence_dir is not None and not os.path.isdir(evidence_dir):
        raise InvalidOption("evidence_dir", evidence_dir, "a folder that exists")
    return RetentionPolicy(snapshot_every_records, history_kept_s, evidence_dir or "")


def _one_of(option: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidOption(option, value, "one of " + ", ".join(allowed))


def _within(option: str, value: float, least: float, most: float, reason: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidOption(option, value, f"a number from {least:g} to {most:g}: {reason}")


def _whole(option: str, value: object, least: float, most: float, reason: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidOption(option, value, f"a whole number from {least} to {most}: {reason}")


# --- How much of a consumer is in flight inside the library: bounds that are no options, because no user needs others
#
# What users bound is memory (`prefetch_bytes`) and messages in work (`max_acks_pending`). Tests set lower values.


@dataclass(slots=True)
class Bounds:
    """The bounds, in messages.

    `unacked`: offsets tracked per partition; while there are so many, it is not fetched (D1). `prefetch`: taken from
    librdkafka at once, which amortises the call, and delivered by a drain at most. `grant`: of a partition in one
    grant, in at-most-once mode, however fast the handler is; with half of it a consumer of a million messages per
    second waits for its grants for a sixth of the time.
    """

    unacked: int = 100_000
    prefetch: int = 1_000
    grant: int = 8_000


BOUNDS: Final = Bounds()


# --- Signatures that functions share. Most of all: the keyword arguments of `Marshal.consumer`
#
# There is one per field of ConsumerOptions, which has their defaults and bounds.
#
# Type checkers and editors know them by `ConsumerKeywords`, `inspect` and `help` by `explicit`. A test compares the two
# with ConsumerOptions.


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_FIELDS: Final = {field.name: field for field in dataclasses.fields(ConsumerOptions)}


class ConsumerKeywords(TypedDict, total=False):
    """The options of a consumer, except the deserializers, whose types decide those of its messages."""

    delivery: Delivery
    policy: str | None
    member: str | None
    group_config: GroupConfig | None
    heartbeat_interval_s: float
    max_claims: int | None
    capacity: int
    priority_group: str | None
    priority: int
    min_pending: int | None
    min_ack_pending: int | None
    fast_reclaim: bool
    start: str | int
    on_topic_recreated: OnTopicRecreated
    handler_timeout_s: float
    hand_over_timeout_s: float | None
    release_behind_s: float | None
    max_acks_pending: int | None
    max_deliver: int | None
    dead_letter_topic: str | None
    prefetch_bytes: int
    on_claim: OnClaim | None
    on_revoking: OnRevoking | None
    on_lost: OnLost | None
    on_activated: OnActivity | None
    on_deactivated: OnActivity | None
    settings: Mapping[str, Any]


def explicit(call: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function with `**keywords`: its signature names each field of ConsumerOptions with its default."""
    own = inspect.signature(call)
    kept = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=field.type)
        for name, field in _FIELDS.items()
        if name not in own.parameters
    ]
    call.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]  # inspect reads it
    return call


def parameters_of(
    verb: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[Concatenate[S, ...], R]], Callable[Concatenate[S, P], R]]:
    """Decorates a method with `*arguments, **named` that passes them to `verb`: its parameters are those of `verb`."""

    def decorate(method: Callable[Concatenate[S, ...], R]) -> Callable[Concatenate[S, P], R]:
        returns = inspect.signature(method).return_annotation
        method.__signature__ = inspect.signature(verb).replace(return_annotation=returns)  # type: ignore[attr-defined]  # inspect reads it
        return method

    return decorate


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def chosen(verb: str, options: ConsumerOptions | None, keywords: Mapping[str, Any]) -> ConsumerOptions:
    """Returns the options of a consumer: `options`, or the defaults, replaced by `keywords` where these are given.

    `verb`: the calling method's name, for errors. Raises InvalidOption.
    """
    if options is not None and not isinstance(options, ConsumerOptions):
        raise InvalidOption("options", options, "a ConsumerOptions")
    check_names(verb, keywords)
    return ConsumerOptions(**keywords) if options is None else dataclasses.replace(options, **keywords)


# --- Keys of whom may administer groups: in files, and as texts (PROTOCOL.md, rule 11)
#
# A file has the private half in PKCS#8, PEM. Nothing here prints it, and no error contains it.

_HEX: Final = re.compile("[0-9a-f]{64}")


def generate_key(file: Path) -> str:
    """Writes a new key into a file that does not exist, for its owner alone, and returns the public half in hex. Raises
    InvalidOption for a file that cannot be made, UnsupportedPlatform."""
    _check_verifies()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as made:
            made.write(text)
    except OSError as error:
        raise InvalidOption("file", str(file), f"a file that can be created: {error.strerror}") from error
    return _public(key).hex()


def read_key(file: str | PathLike[str], named: str = "sign_with") -> SigningKey:
    """Returns the key of a file, which the argument `named` gave. Raises InvalidOption for one without an Ed25519 key,
    UnsupportedPlatform."""
    _check_verifies()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_pem_private_key(Path(file).read_bytes(), None)
    except (OSError, ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidOption(named, str(file), "a file of `marshal keys FILE --generate`")
    return SigningKey(_public(key), key.sign)


def _check_keys(given: object) -> None:
    """Raises InvalidOption unless these are public halves of keys in hex, UnsupportedPlatform."""
    if not isinstance(given, list | tuple) or len(given) > ADMIN_KEYS_MAX:
        raise InvalidOption("admin_keys", given, f"a list of at most {ADMIN_KEYS_MAX} public keys")
    for text in given:
        if not isinstance(text, str) or _HEX.fullmatch(text) is None:
            raise InvalidOption("admin_keys", text, "64 hex digits, as `marshal keys FILE` prints them")
    if given:
        _check_verifies()


def _parsed_keys(given: Iterable[str]) -> tuple[bytes, ...]:
    """Returns the keys of texts that `_check_keys` has accepted, each one once, in the order of a record."""
    return tuple(sorted({bytes.fromhex(text) for text in given}))


def _public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _check_verifies() -> None:
    if not VERIFIES:
        raise UnsupportedPlatform("a key", "a Python without `cryptography`", "pip install 'marshal_py[keys]'")
