"""How each small model comes to where its search begins: scripts that the models name (configurations.py).

The docstring of a setup says what is true when the search begins. Slots 0 and 1 are consumers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    GroupConfig,
    Heartbeat,
    Mapping,
    Record,
    ReleaseGroup,
    StepDown,
)
from marshal_sim.exhaustive.actors import INTERVAL_MS
from marshal_sim.exhaustive.setup_script import SetupScript
from marshal_sim.exhaustive.state_store import newer

PAUSE_MS: Final = INTERVAL_MS
SILENT_QUANTA: Final = 6  # a waiting consumer evicts in the course of the seventh
M1_M2: Final = GroupConfig(-1, policy="members", max_members=2, members=("m1", "m2"))
BLOCKS: Final = GroupConfig(-1, policy="blocks", max_members=2, members=("m1", "m2"))
SWAPPED: Final = (Mapping("m1", (1,)), Mapping("m2", (0,)))


def empty_log(script: SetupScript) -> None:
    """Begins with a log that holds a Genesis and nothing else."""


def owner(script: SetupScript) -> None:
    """The first consumer has joined, has written the topology and owns every partition."""
    script.start(0)
    script.settle(0)


def owner_and_waiter(script: SetupScript) -> None:
    """The first consumer owns every partition, and the second one has joined."""
    script.start(0, 1)
    script.settle(0, 1)


def owner_at_work(script: SetupScript) -> None:
    """The owner has finished and reported its first message."""
    owner(script)
    script.must("deliver", 0)
    script.must("finish", 0)
    script.wait(1, 0)


def owner_and_successor(script: SetupScript) -> None:
    """The owner has finished its first message and has not reported it yet; a second consumer waits."""
    owner_and_waiter(script)
    script.must("deliver", 0)
    script.must("finish", 0)


def silent_owner(script: SetupScript) -> None:
    """The owner is stopped with a message in a handler. The other one has nearly waited long enough to evict it."""
    owner_and_waiter(script)
    script.must("deliver", 0)
    script.wait(SILENT_QUANTA, 1)


def dead_owner(script: SetupScript) -> None:
    """Differs from `silent_owner` in that the owner has crashed, and none of its records is on its way."""
    owner_and_waiter(script)
    script.must("deliver", 0)
    script.must("crash", 0)
    script.wait(SILENT_QUANTA, 1)


def granted_ahead(script: SetupScript) -> None:
    """In at-most-once mode, the owner has handed one message over and holds a grant for another. A second consumer
    waits.
    """
    owner_and_waiter(script)
    script.wait(1, 0, 1)
    script.must("deliver", 0)
    script.must("finish", 0)
    script.settle(0, 1)


def outage(script: SetupScript) -> None:
    """No record has reached the log for longer than an interval, so both consumers have fallen silent."""
    owner_and_waiter(script)
    for _ in range(SILENT_QUANTA):
        script.wait(1, 0, 1, settle=False)
        while script.take("drop"):
            pass


def long_log(script: SetupScript) -> None:
    """The log is about to reach a checkpoint that has a snapshot, or has just passed it."""
    owner_and_waiter(script)
    script.wait(5, 0, 1)


def both_own(script: SetupScript) -> None:
    """There are two partitions, and each consumer owns one."""
    owner_and_waiter(script)
    script.wait(1, 0, 1)


def cloned(script: SetupScript) -> None:
    """A consumer has joined and sent its first claim, and its machine is cloned."""
    script.must("start", 0)
    script.must("tick", 0)
    for _ in range(2):
        script.must("append", 0)
        script.must("read", 0)
    script.clone(0, 1)


def stepped_down(script: SetupScript) -> None:
    """An admin has asked the owner to step down."""
    owner_and_waiter(script)
    script.plant(lambda group: [StepDown(min(group.sessions), -1, "", "anne")])


def half_changed(script: SetupScript) -> None:
    """The group is paused and its partitions are released. A change of mode and the end of the pause are on their
    way.
    """
    owner(script)
    script.plant(lambda group: [ReleaseGroup(-1, -1, 8 * INTERVAL_MS, by="anne")])
    script.must("stray")
    script.settle(0)

    def change(group: Group) -> Iterable[Record]:
        token = group.pause_change
        return [GroupConfig(-1, token, AT_MOST_ONCE, by="anne"), ReleaseGroup(token, token, 0, by="anne")]

    script.plant(change)


def abandoned_pause(script: SetupScript) -> None:
    """An admin has paused the group and is gone. A renewal of its pause is still on its way."""
    owner_and_waiter(script)
    script.plant(lambda group: [ReleaseGroup(-1, -1, PAUSE_MS, by="anne")])
    script.must("stray")
    script.settle(0, 1)
    script.wait(3, 0, 1)
    script.plant(lambda group: [ReleaseGroup(group.pause_change, group.pause_change, PAUSE_MS, by="anne")])


def member_dropped(script: SetupScript) -> None:
    """Each member owns one partition. An admin has dropped the second member."""
    both_own(script)
    script.plant(lambda group: [replace(M1_M2, observed=group.config_offset, members=("m1",))])


def mappings_swapped(script: SetupScript) -> None:
    """Each member owns one partition. An admin has given each of them that of the other."""
    both_own(script)
    script.plant(lambda group: [replace(BLOCKS, observed=group.config_offset, members=(), mappings=SWAPPED)])


def stranger(script: SetupScript) -> None:
    """Garbage and a record of a newer version are on their way. They are addressed to a group whose owner is at
    work.
    """
    owner_and_waiter(script)
    script.plant(lambda group: [b"garbage", newer(Heartbeat(min(group.sessions), 1))])
