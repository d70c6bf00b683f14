"""The life of groups in a run: an admin creates a group while consumers join it, changes its settings, or deletes it
with its consumers.

The operators revive a deleted group. cluster.py restarts the consumers that ended with it, or that were refused because
the group has other settings than they bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any, Final, Protocol

from marshal_py.admin.plans.change import ConfigPlan, DeletionPlan
from marshal_py.admin.plans.operation import GroupContext, Terms
from marshal_py.protocol.fold.policies import DEFAULT_POLICY, LIFELONG
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.policy import RESTRICTED
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, AT_MOST_ONCE, MODE_NAMES
from marshal_sim.cluster.admins import CrashPoint
from marshal_sim.cluster.cluster import Cluster
from marshal_sim.cluster.hostile import key_of
from marshal_sim.cluster.restricted import changed, of_policy
from marshal_sim.cluster.scenario import GroupPlan

PATIENCE_INTERVALS: Final = 12  # how long tools wait: most end before the heal
DELETION_INTERVALS: Final = 8  # how long one that deletes a group waits: it ends before the heal
REVIVAL_INTERVALS: Final = 12  # a deleted group is revived within so many, from the order to delete it on
KEYS: Final = ((1,), (1, 2), (2,), (1, 2))  # of each group, one after the other: two rotations
NEVER: Final = CrashPoint(1_000_000, 1_000_000)


class RunTool(Protocol):
    """Runs an admin's tool in a group; FaultInjector.run_tool."""

    def __call__(self, group: GroupPlan, operation: Any, moves: Any, crash_point: CrashPoint | None = None) -> None: ...


def settings_of(group: GroupPlan, options: MemberOptions) -> dict[str, Any]:
    """Returns the settings with which an admin creates the group, as the consumers with these options bring them."""
    brought = options.group_config
    if brought is None:
        return {"policy": group.policy}
    return {name: value for name in (*LIFELONG, "members") if (value := getattr(brought, name))}


class GroupLives:
    """Creates, deletes and revives the groups of a run, as the kinds of its scenario say."""

    def __init__(self, cluster: Cluster, run_tool: RunTool) -> None:
        self._cluster = cluster
        self._rng: Random = cluster.rng
        self._run_tool = run_tool

    def begin(self) -> None:
        """Lets an admin create each group, and a consumer bring other settings than the rest, while all begin."""
        scenario = self._cluster.scenario
        for group in scenario.groups if "keys" in scenario.kinds else ():
            for number, keys in enumerate(KEYS):
                at_ms = int((number + self._rng.random()) * scenario.safety_ms / (2 * len(KEYS)))
                self._cluster.schedule(at_ms, None, self._set_keys, (group, keys))
        if "create_race" not in scenario.kinds:
            return
        for number, group in enumerate(scenario.groups):
            options = self._cluster.new_options(group, f"s{number}")
            other = DEFAULT_POLICY
            if group.policy not in RESTRICTED:
                other = "pinned" if group.mode == AT_LEAST_ONCE else "topic"
            stranger = of_policy(options, group, other, scenario)
            wanted = settings_of(group, stranger if group.policy not in RESTRICTED else options)
            self._create(group, wanted)
            delay_ms = int(self._rng.random() * scenario.interval_ms)
            self._cluster.schedule(delay_ms, None, self._start, (group, stranger))

    def _start(self, who: tuple[GroupPlan, MemberOptions]) -> None:
        group, options = who
        self._cluster.add_client(group.name, options)

    def _create(self, group: GroupPlan, wanted: dict[str, Any], crash_point: CrashPoint | None = None) -> None:
        self._run_tool(group, lambda context: ConfigPlan(context, wanted, create=True), {}, crash_point)

    def _set_keys(self, change: tuple[GroupPlan, Sequence[int]]) -> None:
        """Lets an admin give a group keys, or exchange them, once its consumers have begun it."""
        group, seeds = change
        wanted = {"admin_keys": [key_of(seed).public.hex() for seed in seeds]}

        def operation(context: GroupContext) -> ConfigPlan:
            there = context.group
            if there is not None and there.config is None:  # then consumers that bring settings could not join any more
                return ConfigPlan(context, settings_of(group, self._cluster.new_options(group, "s0")) | wanted)
            return ConfigPlan(context, wanted)

        self._run_tool(group, operation, {})

    def pause_ms(self) -> int:
        """Draws how long an admin's pause lasts."""
        return int((1 + self._rng.random() * 3) * self._cluster.scenario.interval_ms)

    def terms(self) -> Terms:
        """Draws how long an admin's pause lasts; the admin has patience in proportion to the intervals."""
        return Terms(duration_ms=self.pause_ms(), patience_ms=PATIENCE_INTERVALS * self._cluster.scenario.interval_ms)

    def change_mode(self, group: GroupPlan) -> None:
        terms = self.terms()
        wanted = {"delivery": MODE_NAMES[AT_LEAST_ONCE if self._rng.random() < 0.5 else AT_MOST_ONCE]}
        self._run_tool(group, lambda context: ConfigPlan(context, wanted, terms), {})

    def change_members(self, change: tuple[GroupPlan, Sequence[str]]) -> None:
        """Lets an admin set a partitioned group's list of members, without those that `change` names."""
        group, dropped = change
        edit = partial(changed, dropped=dropped)
        terms = Terms(patience_ms=PATIENCE_INTERVALS * self._cluster.scenario.interval_ms)
        self._run_tool(group, lambda context: ConfigPlan(context, edit, terms), {})

    def delete(self, group: GroupPlan) -> None:
        """Lets an admin delete the group with its consumers, and another one revive it later."""
        interval_ms, duration_ms = self._cluster.scenario.interval_ms, self.pause_ms()
        terms = Terms(duration_ms=duration_ms, patience_ms=DELETION_INTERVALS * interval_ms)
        self._run_tool(group, lambda context: DeletionPlan(context, terms), {})
        self._cluster.schedule(
            int((2 + self._rng.random() * REVIVAL_INTERVALS) * interval_ms), None, self._revive, group
        )

    def _revive(self, group: GroupPlan, crash_point: CrashPoint | None = None) -> None:
        self._create(group, settings_of(group, self._cluster.new_options(group, "s0")), crash_point)

    def heal(self) -> None:
        """Sees to it that every group exists once all is healed, and all that was under way is in the log."""
        scenario = self._cluster.scenario
        for group in scenario.groups if "deletion" in scenario.kinds else ():
            for delay_ms in (scenario.interval_ms // 4, scenario.interval_ms):
                self._cluster.schedule(delay_ms, None, self._revive_now, group)

    def _revive_now(self, group: GroupPlan) -> None:
        self._revive(group, NEVER)
