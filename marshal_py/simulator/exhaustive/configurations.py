"""The small worlds that are searched, by name. QUICK ones take seconds each; WIDE ones minutes to hours.

A prologue brings a world to the moment before what its name says; from there on everything may happen that the bounds
allow, in every order. Slots 0 and 1 are consumers `a` and `b`, unless a role says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from marshal_py.admin.position import PositionPlan
from marshal_py.protocol.records import AT_MOST_ONCE, GroupConfig, Heartbeat, Record, ReleaseGroup, StepDown
from marshal_py.protocol.world import Group
from marshal_py.simulator.exhaustive.actors import INTERVAL_MS
from marshal_py.simulator.exhaustive.configuration import Bounds, Configuration, Role, consumer
from marshal_py.simulator.exhaustive.setup_script import SetupScript
from marshal_py.simulator.exhaustive.state_store import newer

A, B = Role("a", consumer("a")), Role("b", consumer("b"))
ONCE_A, ONCE_B = Role("a", consumer("a", AT_MOST_ONCE)), Role("b", consumer("b", AT_MOST_ONCE))
ANNE, BERT = Role("anne", plan=PositionPlan, aim=1), Role("bert", plan=PositionPlan, aim=0)
PAUSE_MS: Final = INTERVAL_MS
SILENT_QUANTA: Final = 6  # of the seven in whose course a waiter evicts


# --- how a world came to where its search begins


def nobody(script: SetupScript) -> None:
    """Nothing but a Genesis."""


def owner(script: SetupScript) -> None:
    """The first one joined, wrote the topology and owns everything."""
    script.start(0)
    script.settle(0)


def owner_and_waiter(script: SetupScript) -> None:
    """And the second one joined."""
    script.start(0, 1)
    script.settle(0, 1)


def owner_at_work(script: SetupScript) -> None:
    """The owner's first message is behind it, and was reported."""
    owner(script)
    script.must("deliver", 0)
    script.must("finish", 0)
    script.wait(1, 0)


def silent_owner(script: SetupScript) -> None:
    """The owner has a message in a handler and stands still; the other one waits, and has nearly waited enough."""
    owner_and_waiter(script)
    script.must("deliver", 0)
    script.wait(SILENT_QUANTA, 1)


def dead_owner(script: SetupScript) -> None:
    """The same, but it crashed, and nothing of it is on its way."""
    owner_and_waiter(script)
    script.must("deliver", 0)
    script.must("crash", 0)
    script.wait(SILENT_QUANTA, 1)


def granted_ahead(script: SetupScript) -> None:
    """At most once: the owner has handed one message over and holds the grant of another one; somebody waits."""
    owner_and_waiter(script)
    script.wait(1, 0, 1)
    script.must("deliver", 0)
    script.must("finish", 0)
    script.settle(0, 1)


def outage(script: SetupScript) -> None:
    """Nobody could write for longer than an interval: both fell silent, and nothing of it came through."""
    owner_and_waiter(script)
    for _ in range(SILENT_QUANTA):
        script.wait(1, 0, 1, settle=False)
        while script.take("drop"):
            pass


def long_log(script: SetupScript) -> None:
    """The log is about to reach, or has just passed, a checkpoint at which a snapshot stands."""
    owner_and_waiter(script)
    script.wait(5, 0, 1)


def both_own(script: SetupScript) -> None:
    """Two partitions, two owners."""
    owner_and_waiter(script)
    script.wait(1, 0, 1)


def forked(script: SetupScript) -> None:
    """The machine of a consumer that has joined, and has sent its first claim, is cloned."""
    script.must("start", 0)
    script.must("tick", 0)
    for _ in range(2):
        script.must("append", 0)
        script.must("read", 0)
    script.fork(0, 1)


def stepped_down(script: SetupScript) -> None:
    """Somebody asks the owner to step down."""
    owner_and_waiter(script)
    script.plant(lambda group: [StepDown(min(group.sessions), -1, "", "anne")])


def half_changed(script: SetupScript) -> None:
    """A drained pause, in which a change of mode is on its way, and the end of the pause."""
    owner(script)
    script.plant(lambda group: [ReleaseGroup(-1, -1, 8 * INTERVAL_MS, by="anne")])
    script.must("stray")
    script.settle(0)

    def change(group: Group) -> Iterable[Record]:
        token = group.pause_change
        return [GroupConfig(-1, token, AT_MOST_ONCE, by="anne"), ReleaseGroup(token, token, 0, by="anne")]

    script.plant(change)


def abandoned_pause(script: SetupScript) -> None:
    """An admin paused the group and is gone; a renewal and a move of it are still on their way."""
    owner_and_waiter(script)
    script.plant(lambda group: [ReleaseGroup(-1, -1, PAUSE_MS, by="anne")])
    script.must("stray")
    script.settle(0, 1)
    script.wait(3, 0, 1)
    script.plant(lambda group: [ReleaseGroup(group.pause_change, group.pause_change, PAUSE_MS, by="anne")])


def stranger(script: SetupScript) -> None:
    """Garbage and a record of a newer version are on their way to the group of an owner at work."""
    owner_and_waiter(script)
    script.plant(lambda group: [b"garbage", newer(Heartbeat(min(group.sessions), 1))])


# --- the worlds

QUICK: Final = (
    Configuration(
        "at-least-once",
        "two consumers join, claim, deliver, report; any order",
        (A, B._replace(after=0)),
        nobody,
        Bounds(quanta=1, records=7, in_flight=2, starts=2),
    ),
    Configuration(
        "at-most-once",
        "two consumers join, ask for messages and deliver them once",
        (ONCE_A, ONCE_B._replace(after=0)),
        nobody,
        Bounds(quanta=1, records=7, in_flight=2, starts=2),
    ),
    Configuration(
        "set-position",
        "an admin pauses the owner and moves its position back; it may crash at any step",
        (A, ANNE),
        owner_at_work,
        Bounds(quanta=1, records=6, in_flight=3, starts=1, crashes=1),
    ),
    Configuration(
        "two-admins",
        "two admins want other positions of the same partition, one may crash",
        (A, ANNE, BERT),
        owner_at_work,
        Bounds(quanta=0, records=5, in_flight=2, starts=2, crashes=1),
    ),
    Configuration(
        "eviction",
        "a silent owner wakes while another is about to evict it",
        (A, B),
        silent_owner,
        Bounds(quanta=1, records=5, in_flight=3, stops=1),
    ),
    Configuration(
        "eviction-at-most-once",
        "the same, at most once",
        (ONCE_A, ONCE_B),
        silent_owner,
        Bounds(quanta=1, records=6, in_flight=3, stops=1),
        messages=4,
    ),
    Configuration(
        "restart",
        "an owner crashed and comes back under its name while another evicts it",
        (A, B),
        dead_owner,
        Bounds(quanta=2, records=4, in_flight=2, starts=1, stops=1),
    ),
    Configuration(
        "revival",
        "after an outage both come back, and nobody loses what was finished",
        (A, B),
        outage,
        Bounds(quanta=2, records=6, in_flight=4, stops=1),
    ),
    Configuration(
        "join-leave",
        "two partitions; a second consumer joins, gets one, and anybody may be stopped",
        (A, B),
        owner,
        Bounds(quanta=0, records=7, in_flight=2, starts=1, leaves=1),
        partitions=2,
        messages=1,
    ),
    Configuration(
        "stop",
        "two owners, each may be told to stop with messages in its handler",
        (A, B),
        both_own,
        Bounds(quanta=0, records=5, in_flight=2, leaves=1),
        partitions=2,
    ),
    Configuration(
        "step-down",
        "the owner is asked to step down, and hands over",
        (A, B),
        stepped_down,
        Bounds(quanta=1, records=6, in_flight=3),
    ),
    Configuration(
        "mode-change",
        "a group turns to at most once while old and new consumers come and go",
        (A, ONCE_B),
        half_changed,
        Bounds(quanta=1, records=5, in_flight=3, starts=1),
        endings=frozenset({"ModeMismatch"}),
    ),
    Configuration(
        "abandoned-pause",
        "members end a pause whose admin is gone; a late renewal may come first",
        (A, B),
        abandoned_pause,
        Bounds(quanta=1, records=6, in_flight=3, stops=1),
    ),
    Configuration(
        "duplicates",
        "records come twice and out of order, at least once",
        (A, B),
        owner_and_waiter,
        Bounds(quanta=1, records=5, in_flight=4, duplicates=2, reorders=1),
    ),
    Configuration(
        "duplicates-at-most-once",
        "records come twice, out of order, or never, at most once",
        (ONCE_A, ONCE_B),
        owner_and_waiter,
        Bounds(quanta=1, records=6, in_flight=3, duplicates=1, drops=1),
        messages=4,
    ),
    Configuration(
        "give-back",
        "an owner with open grants is told to stop; its records come twice or out of order",
        (ONCE_A, ONCE_B),
        granted_ahead,
        Bounds(quanta=0, records=4, in_flight=3, leaves=1, duplicates=1, reorders=1),
        messages=4,
    ),
    Configuration(
        "give-back-eviction",
        "an owner that was silent gives grants back while another one evicts it",
        (ONCE_A, ONCE_B),
        silent_owner,
        Bounds(quanta=1, records=5, in_flight=2, stops=1, leaves=1),
        messages=4,
    ),
    Configuration(
        "give-back-join",
        "a second consumer joins and gets a partition whose owner has open grants",
        (ONCE_A, ONCE_B),
        owner,
        Bounds(quanta=1, records=6, in_flight=2, starts=1),
        partitions=2,
        messages=1,
    ),
    Configuration(
        "give-back-move",
        "an admin pauses an owner with open grants and moves its position; it may crash",
        (ONCE_A, ANNE),
        owner,
        Bounds(quanta=1, records=7, in_flight=3, starts=1, crashes=1),
        messages=3,
    ),
    Configuration(
        "give-back-twin",
        "a consumer's machine was cloned before it held grants; either copy may be stopped",
        (ONCE_A, ONCE_A._replace(name="twin")),
        forked,
        Bounds(quanta=1, records=7, in_flight=3, leaves=1),
        endings=frozenset({"SessionCloned"}),
    ),
    Configuration(
        "twin",
        "a consumer's machine was cloned: two processes, one session, at most once",
        (ONCE_A, ONCE_A._replace(name="twin")),
        forked,
        Bounds(quanta=1, records=7, in_flight=3),
        endings=frozenset({"SessionCloned"}),
    ),
    Configuration(
        "fast-reclaim",
        "a crashed owner comes back and names its old session as its predecessor",
        (Role("a", consumer("a", fast_reclaim=True)), B),
        owner_and_waiter,
        Bounds(quanta=1, records=7, crashes=1, starts=1),
    ),
    Configuration(
        "fast-reclaim-of-the-living",
        "the caller was wrong, its predecessor lives: at most once holds all "
        "the same (X3 and X12: what a lease says at delivery is not promised here)",
        (ONCE_A, Role("a2", consumer("a", AT_MOST_ONCE, fast_reclaim=True))),
        owner,
        Bounds(quanta=1, records=8, starts=1),
        uncounted=frozenset({"S3"}),
        endings=frozenset({"DuplicateClientId"}),
    ),
    Configuration(
        "snapshots",
        "whoever starts has loaded a snapshot and folded the rest; an owner crashed",
        (A, B),
        long_log,
        Bounds(quanta=1, records=6, in_flight=3, crashes=1, starts=1),
        snapshots=True,
    ),
    Configuration(
        "stranger",
        "garbage, and a record of a newer version that ends the group for this library",
        (A, B),
        stranger,
        Bounds(quanta=1, records=4, in_flight=4),
        endings=frozenset({"GroupOpaque"}),
    ),
)

WIDE: Final = (
    Configuration(
        "give-back-wide",
        "as give-back, with time, and records that are lost",
        (ONCE_A, ONCE_B),
        granted_ahead,
        Bounds(quanta=1, records=6, in_flight=3, leaves=1, duplicates=1, drops=1, reorders=1),
        messages=4,
    ),
    Configuration(
        "give-back-join-wide",
        "as give-back-join, and anybody may be stopped",
        (ONCE_A, ONCE_B),
        owner,
        Bounds(quanta=0, records=8, in_flight=2, starts=1, leaves=1),
        partitions=2,
    ),
    Configuration(
        "restart-wide",
        "as restart, with more of everything",
        (A, B),
        dead_owner,
        Bounds(quanta=2, records=6, in_flight=3, starts=1, stops=2),
    ),
    Configuration(
        "crossroads",
        "a silent owner wakes, or crashes and comes back, while another evicts it and an admin "
        "pauses the group and moves its position; any of them may stand still or crash",
        (A, B, ANNE),
        silent_owner,
        Bounds(quanta=1, records=4, in_flight=2, starts=2, stops=2, crashes=1),
    ),
)

CONFIGURATIONS: Final = {configuration.name: configuration for configuration in (*QUICK, *WIDE)}
