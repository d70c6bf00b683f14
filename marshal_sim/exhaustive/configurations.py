"""The small models that are searched, by name. QUICK ones take seconds each; WIDE ones take minutes to hours.

The setup of a model brings it to the moment before what its name says. From there on, everything that the bounds allow
may happen in every order. The setups are in setups.py. A slot is the place of one process. Slots 0 and 1 are consumers
`a` and `b`, unless a role says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from marshal_py.admin.plans.position import PositionPlan
from marshal_py.protocol.wire.records import AT_MOST_ONCE, GroupConfig
from marshal_sim.exhaustive.configuration import Bounds, Configuration, Role, consumer
from marshal_sim.exhaustive.setup_script import SetupScript
from marshal_sim.exhaustive.setups import (
    BLOCKS,
    M1_M2,
    abandoned_pause,
    both_own,
    cloned,
    dead_owner,
    empty_log,
    granted_ahead,
    half_changed,
    long_log,
    mappings_swapped,
    member_dropped,
    outage,
    owner,
    owner_and_successor,
    owner_and_waiter,
    owner_at_work,
    silent_owner,
    stepped_down,
    stranger,
)

A, B = Role("a", consumer("a")), Role("b", consumer("b"))
ONCE_A, ONCE_B = Role("a", consumer("a", AT_MOST_ONCE)), Role("b", consumer("b", AT_MOST_ONCE))
PINNED: Final = GroupConfig(-1, policy="pinned", priority_groups=("jobs",))
OVERFLOW: Final = GroupConfig(-1, policy="overflow", priority_groups=("jobs",))
PRIORITIZED: Final = GroupConfig(-1, policy="prioritized", priority_groups=("jobs",))
ANNE, BERT = Role("anne", plan=PositionPlan, position=1), Role("bert", plan=PositionPlan, position=0)


def created(config: GroupConfig, option: str = "", a: object = None, b: object = None) -> tuple[Role, Role]:
    """Returns consumers `a` and `b` that create their group with `config`. An `option` has a value for each of them."""
    always: dict[str, Any] = {"group_config": config, "priority_group": "".join(config.priority_groups)}
    one, two = ({**always, option: value} if option else always for value in (a, b))
    return Role("a", consumer("a", **one)), Role("b", consumer("b", **two))


class Model(NamedTuple):
    """A configuration, and the script that leads to the state where its search begins."""

    configuration: Configuration
    setup: Callable[[SetupScript], None]

    @property
    def name(self) -> str:
        return self.configuration.name


def _model(
    setup: Callable[[SetupScript], None],
    name: str,
    says: str,
    roles: tuple[Role, ...],
    bounds: Bounds,
    partitions: int = 1,
    messages: int = 2,
    snapshots: bool = False,
    witnessed: bool = False,
    uncounted: Iterable[str] = (),
    endings: Iterable[str] = (),
) -> Model:
    sizes = bounds, partitions, messages
    found = Configuration(name, says, roles, *sizes, snapshots, witnessed, frozenset(uncounted), frozenset(endings))
    return Model(found, setup)


# --- the models

QUICK: Final[tuple[Model, ...]] = (
    _model(
        empty_log,
        "at-least-once",
        "two consumers join, claim, deliver, report; any order",
        (A, B._replace(after=0)),
        Bounds(quanta=1, records=7, in_flight=2, starts=2),
    ),
    _model(
        empty_log,
        "at-most-once",
        "two consumers join, ask for messages and deliver them once",
        (ONCE_A, ONCE_B._replace(after=0)),
        Bounds(quanta=1, records=7, in_flight=2, starts=2),
    ),
    _model(
        owner_at_work,
        "set-position",
        "an admin pauses the owner and moves its position back; it may crash at any step",
        (A, ANNE),
        Bounds(quanta=1, records=6, in_flight=3, starts=1, crashes=1),
    ),
    _model(
        owner_at_work,
        "two-admins",
        "two admins want other positions of the same partition, one may crash",
        (A, ANNE, BERT),
        Bounds(quanta=0, records=5, in_flight=2, starts=2, crashes=1),
    ),
    _model(
        silent_owner,
        "eviction",
        "a silent owner wakes while another is about to evict it",
        (A, B),
        Bounds(quanta=1, records=5, in_flight=3, stops=1),
    ),
    _model(
        silent_owner,
        "eviction-at-most-once",
        "the same, at most once",
        (ONCE_A, ONCE_B),
        Bounds(quanta=1, records=6, in_flight=3, stops=1),
        messages=4,
    ),
    _model(
        dead_owner,
        "restart",
        "an owner crashed and comes back under its name while another evicts it",
        (A, B),
        Bounds(quanta=2, records=4, in_flight=2, starts=1, stops=1),
    ),
    _model(
        outage,
        "revival",
        "after an outage both come back, and neither loses what was finished",
        (A, B),
        Bounds(quanta=2, records=6, in_flight=4, stops=1),
    ),
    _model(
        owner,
        "join-leave",
        "two partitions; a second consumer joins, gets one, and anybody may be stopped",
        (A, B),
        Bounds(quanta=0, records=7, in_flight=2, starts=1, leaves=1),
        partitions=2,
        messages=1,
    ),
    _model(
        owner_and_successor,
        "last-will",
        "the owner dies; its will, twice, and its own last records come in any order, or not at all",
        (A, B),
        Bounds(quanta=1, records=4, in_flight=5, crashes=1),
        witnessed=True,
    ),
    _model(
        both_own,
        "stop",
        "two owners, each may be told to stop with messages in its handler",
        (A, B),
        Bounds(quanta=0, records=5, in_flight=2, leaves=1),
        partitions=2,
    ),
    _model(
        stepped_down,
        "step-down",
        "the owner is asked to step down, and hands over",
        (A, B),
        Bounds(quanta=1, records=6, in_flight=3),
    ),
    _model(
        half_changed,
        "mode-change",
        "a group turns to at most once while old and new consumers come and go",
        (A, ONCE_B),
        Bounds(quanta=1, records=5, in_flight=3, starts=1),
        endings={"ModeMismatch"},
    ),
    _model(
        abandoned_pause,
        "abandoned-pause",
        "members end a pause whose admin is gone; a late renewal may come first",
        (A, B),
        Bounds(quanta=1, records=6, in_flight=3, stops=1),
    ),
    _model(
        owner_and_waiter,
        "duplicates",
        "records come twice and out of order, at least once",
        (A, B),
        Bounds(quanta=1, records=5, in_flight=4, duplicates=2, reorders=1),
    ),
    _model(
        owner_and_waiter,
        "duplicates-at-most-once",
        "records come twice, out of order, or never, at most once",
        (ONCE_A, ONCE_B),
        Bounds(quanta=1, records=6, in_flight=3, duplicates=1, drops=1),
        messages=4,
    ),
    _model(
        granted_ahead,
        "give-back",
        "an owner with open grants is told to stop; its records come twice or out of order",
        (ONCE_A, ONCE_B),
        Bounds(quanta=0, records=4, in_flight=3, leaves=1, duplicates=1, reorders=1),
        messages=4,
    ),
    _model(
        silent_owner,
        "give-back-eviction",
        "an owner that was silent gives grants back while another one evicts it",
        (ONCE_A, ONCE_B),
        Bounds(quanta=1, records=5, in_flight=2, stops=1, leaves=1),
        messages=4,
    ),
    _model(
        owner,
        "give-back-join",
        "a second consumer joins and gets a partition whose owner has open grants",
        (ONCE_A, ONCE_B),
        Bounds(quanta=1, records=6, in_flight=2, starts=1),
        partitions=2,
        messages=1,
    ),
    _model(
        owner,
        "give-back-move",
        "an admin pauses an owner with open grants and moves its position; it may crash",
        (ONCE_A, ANNE),
        Bounds(quanta=1, records=7, in_flight=3, starts=1, crashes=1),
        messages=3,
    ),
    _model(
        cloned,
        "give-back-twin",
        "a consumer's machine was cloned before it held grants; either copy may be stopped",
        (ONCE_A, ONCE_A._replace(name="twin")),
        Bounds(quanta=1, records=7, in_flight=3, leaves=1),
        endings={"SessionCloned"},
    ),
    _model(
        cloned,
        "twin",
        "a consumer's machine was cloned: two processes, one session, at most once",
        (ONCE_A, ONCE_A._replace(name="twin")),
        Bounds(quanta=1, records=7, in_flight=3),
        endings={"SessionCloned"},
    ),
    _model(
        owner_and_waiter,
        "fast-reclaim",
        "a crashed owner comes back and names its old session as its predecessor",
        (Role("a", consumer("a", fast_reclaim=True)), B),
        Bounds(quanta=1, records=7, crashes=1, starts=1),
    ),
    _model(
        owner,
        "fast-reclaim-of-the-living",
        "the caller was wrong, its predecessor lives: at most once holds all "
        "the same (X3 and X12: what a lease says at delivery is not promised here)",
        (ONCE_A, Role("a2", consumer("a", AT_MOST_ONCE, fast_reclaim=True))),
        Bounds(quanta=1, records=8, starts=1),
        uncounted={"S3"},
        endings={"DuplicateClientId"},
    ),
    _model(
        long_log,
        "snapshots",
        "whoever starts has loaded a snapshot and folded the rest; an owner crashed",
        (A, B),
        Bounds(quanta=1, records=6, in_flight=3, crashes=1, starts=1),
        snapshots=True,
    ),
    _model(
        stranger,
        "stranger",
        "garbage, and a record of a newer version that ends the group for this library",
        (A, B),
        Bounds(quanta=1, records=4, in_flight=4),
        endings={"GroupOpaque"},
    ),
    _model(
        owner,
        "greedy",
        "two partitions under the policy greedy; a second consumer joins, and anybody may be stopped",
        created(GroupConfig(-1, policy="greedy")),
        Bounds(quanta=0, records=5, in_flight=2, starts=1, leaves=1),
        partitions=2,
        messages=1,
    ),
    _model(
        member_dropped,
        "members-drop",
        "an admin drops a member that owns a partition; anybody may be stopped",
        created(M1_M2, "member", "m1", "m2"),
        Bounds(quanta=0, records=3, in_flight=2, leaves=1),
        partitions=2,
        messages=1,
    ),
    _model(
        dead_owner,
        "members-standby",
        "the active consumer of a member crashed; its standby evicts it while it comes back",
        created(M1_M2, "member", "m1", "m1"),
        Bounds(quanta=1, records=5, in_flight=3, starts=1, stops=1),
        partitions=2,
        messages=1,
    ),
    _model(
        mappings_swapped,
        "blocks-mappings",
        "an admin gives each of two members the partition of the other",
        created(BLOCKS, "member", "m1", "m2"),
        Bounds(quanta=0, records=4, in_flight=2),
        partitions=2,
        messages=1,
    ),
    _model(
        owner,
        "topic",
        "two partitions of one topic that is never split; a second consumer joins, anybody may be stopped",
        created(GroupConfig(-1, policy="topic")),
        Bounds(quanta=0, records=7, in_flight=2, starts=1, leaves=1),
        partitions=2,
        messages=1,
    ),
    _model(
        stepped_down,
        "topic-step-down",
        "the owner of a topic is asked to step down, and hands it over as a whole",
        created(GroupConfig(-1, policy="topic")),
        Bounds(quanta=0, records=8, in_flight=3),
        partitions=2,
    ),
    _model(
        stepped_down,
        "pinned",
        "an admin unpins the only consumer that has everything; anybody may be stopped",
        created(PINNED),
        Bounds(quanta=0, records=6, in_flight=2, leaves=1),
        messages=1,
    ),
    _model(
        silent_owner,
        "pinned-eviction",
        "a silent consumer that is pinned wakes while its standby is about to take the pin",
        created(PINNED),
        Bounds(quanta=1, records=5, in_flight=2, stops=1),
        messages=1,
    ),
    _model(
        owner,
        "prioritized",
        "a consumer with a lower number joins and gets everything; anybody may be stopped",
        created(PRIORITIZED, "priority", 1, 0),
        Bounds(quanta=0, records=7, in_flight=2, starts=1, leaves=1),
        messages=1,
    ),
    _model(
        owner,
        "overflow",
        "two partitions; a consumer whose condition is met joins; anybody may be stopped",
        created(OVERFLOW, "min_pending", 0, 1),
        Bounds(quanta=0, records=6, in_flight=1, starts=1, leaves=1),
        partitions=2,
        messages=1,
    ),
    _model(
        owner,
        "overflow-first",
        "one partition, whose owner has a condition; a consumer without one joins, and has it first",
        created(OVERFLOW, "min_pending", 1, 0),
        Bounds(quanta=1, records=5, in_flight=1, starts=1, leaves=1),
    ),
    _model(
        dead_owner,
        "prioritized-standby",
        "the consumer with the lowest number crashed; its standby evicts it while it comes back",
        created(PRIORITIZED, "priority", 0, 1),
        Bounds(quanta=1, records=5, in_flight=2, starts=1, stops=1),
    ),
)

WIDE: Final[tuple[Model, ...]] = (
    _model(
        granted_ahead,
        "give-back-wide",
        "as give-back, with time, and records that are lost",
        (ONCE_A, ONCE_B),
        Bounds(quanta=1, records=6, in_flight=3, leaves=1, duplicates=1, drops=1, reorders=1),
        messages=4,
    ),
    _model(
        owner,
        "give-back-join-wide",
        "as give-back-join, and anybody may be stopped",
        (ONCE_A, ONCE_B),
        Bounds(quanta=0, records=8, in_flight=2, starts=1, leaves=1),
        partitions=2,
    ),
    _model(
        dead_owner,
        "restart-wide",
        "as restart, with more of everything",
        (A, B),
        Bounds(quanta=2, records=6, in_flight=3, starts=1, stops=2),
    ),
    _model(
        silent_owner,
        "crossroads",
        "a silent owner wakes, or crashes and comes back, while another evicts it and an admin "
        "pauses the group and moves its position; any of them may stand still or crash",
        (A, B, ANNE),
        Bounds(quanta=1, records=4, in_flight=2, starts=2, stops=2, crashes=1),
    ),
)

MODELS: Final = {model.name: model for model in (*QUICK, *WIDE)}
