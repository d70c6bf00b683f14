"""The pictures of docs/policies.md: who owns which partition, drawn from the log of a run in virtual time.

`python -m tests.protocol.test_policy_pictures` prints them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import GroupConfig, StepDown
from tests.support.virtual_cluster import VirtualCluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"
INTERVAL_MS = 2_000  # the default
CELL_MS = 500
PARTITIONS = 6
CELLS_BEFORE, CELLS_AFTER = 2, 10
CELLS_LOOKS = 28  # after little is left: five looks, two seconds apart
POLICIES = ("balanced", "overflow")
MIN_PENDING = {"A": 0, "B": 600}  # under overflow
PENDING = 100  # in each partition


class Run:
    """Consumers A and B of a group, and C where the policy needs it; a row for each partition says who owns it when."""

    def __init__(self, policy: str, names: str) -> None:
        self.policy = policy
        self.cluster = VirtualCluster()
        self.cluster.must(GroupConfig(NONE, policy=policy))
        self.rows = {f"orders:{number}": "" for number in range(PARTITIONS)}
        for name in names:
            self.add(name)
            self.cluster.run(INTERVAL_MS)
        self.cluster.run(3 * INTERVAL_MS)

    def add(self, name: str) -> None:
        self.cluster.add(
            name,
            counts={"orders": PARTITIONS},
            topics=("orders",),
            min_pending=MIN_PENDING[name] if self.policy == "overflow" else 0,
            interval_ms=INTERVAL_MS,
        )

    def pend(self, messages: int) -> None:
        self.cluster.ends = {tp: p.position + messages for tp, p in self.cluster.group.partitions.items()}

    def watch(self, cells: int) -> None:
        for _ in range(cells):
            self.cluster.run(CELL_MS)
            marks = {each.session: each.name if each.alive else each.name.lower() for each in self.cluster.clients}
            owners = {str(p.tp): marks[p.owner] for p in self.cluster.group.partitions.values() if p.owner != NONE}
            for row in self.rows:
                self.rows[row] += owners.get(row, ".")


EVENTS: dict[str, Callable[[Run], object]] = {
    "C joins": lambda run: run.add("C"),
    "A is killed": lambda run: run.cluster.kill(run.cluster.clients[0]),
    "A steps down": lambda run: run.cluster.must(StepDown(run.cluster.clients[0].session, NONE)),
}


OVERFLOW_EVENTS: dict[str, Callable[[Run], object]] = {
    "much is pending": lambda run: run.pend(PENDING),
    "A is killed": EVENTS["A is killed"],
    "little is left": lambda run: run.pend(0),
}


def picture(policy: str) -> str:
    """The events beside each other. A column of a row is half a second; `|` is the moment of the event."""
    lines: list[str] = []
    for title, event in (OVERFLOW_EVENTS if policy == "overflow" else EVENTS).items():
        run = Run(policy, "AB")
        if policy == "overflow" and title != "much is pending":
            run.pend(PENDING)
            run.cluster.run(3 * INTERVAL_MS)
        run.watch(CELLS_BEFORE)
        event(run)
        after = CELLS_LOOKS if title == "little is left" else CELLS_AFTER
        run.watch(after)
        lines = lines or [" " * 9, *(f"{row:<9}" for row in run.rows)]
        lines[0] += f"  {title:<{CELLS_BEFORE + after + 1}}"
        for number, marks in enumerate(run.rows.values(), 1):
            lines[number] += f"  {marks[:CELLS_BEFORE]}|{marks[CELLS_BEFORE:]}"
    return "\n".join(line.rstrip() for line in lines)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_page_shows_what_happens(policy: str) -> None:
    """A1, A3, A12: a join, a crash and a step-down; much and little to do."""
    assert f"```\n{picture(policy)}\n```" in PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    for each in POLICIES:
        print(f"{each}\n\n{picture(each)}\n")
