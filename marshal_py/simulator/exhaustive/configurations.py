"""The small worlds that are searched, by name."""

from __future__ import annotations

from marshal_py.simulator.exhaustive.configuration import Bounds, Configuration, Role, consumer
from marshal_py.simulator.exhaustive.prologue import Prologue


def nobody(script: Prologue) -> None:
    """Nothing but a Genesis."""


def owner_and_waiter(script: Prologue) -> None:
    """The first one joined, wrote the topology and owns all; the second one joined."""
    script.start(0, 1)
    script.settle(0, 1)

A, B = Role("a", consumer("a")), Role("b", consumer("b"))

ALL = (
    Configuration("at-least-once", "two join, claim, deliver", (A, B._replace(after=0)), nobody,
                  Bounds(quanta=1, records=8, starts=2)),
    Configuration("owned", "x", (A, B), owner_and_waiter, Bounds(quanta=2, records=5)),
)
