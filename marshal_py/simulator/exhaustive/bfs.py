"""The walk: breadth first through every state that a configuration can reach within its bounds.

The set of visited states holds packed ints and nothing else, so that two states are never taken for one. A share is all
of them, or the part that is one process's in a search by several (group_load.py). A parent and the ordinal of a step
per state tell the path to a violation, which is then the shortest there is; only a share that is all of them has them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Final, NamedTuple

from marshal_py.simulator.exhaustive.search import Label, Search, invariant_of

PULSE_STATES: Final = 20_000  # looked at between two signs of life: a second or so


class Broken(NamedTuple):
    """A promise that a step breaks. `path`: every step from the beginning of the search to it, as people read it."""

    invariant: str
    text: str
    path: tuple[str, ...]


class Progress(NamedTuple):
    """How far a search is."""

    depth: int
    states: int
    frontier: int  # states that are not looked at yet


class Report(NamedTuple):
    """What a search came to. `clipped`: steps that were not taken because they would leave the bounds."""

    configuration: str
    complete: bool
    interrupted: bool  # by Ctrl-C; what is counted here was searched all the same
    states: int
    transitions: int
    clipped: int
    depth: int
    conditions: int  # of single processes
    logs: int
    deliveries: int  # steps that hand a message over
    seconds: float
    violations: tuple[Broken, ...]


class Share:
    """The states that one process looks at, level by level. `of` processes part them by their logs."""

    def __init__(self, search: Search, first: int, number: int = 0, of: int = 1) -> None:
        self.search = search
        self.number, self.of = number, of
        self.seen: set[int] = set()
        self.frontier: list[int] = []
        self.upcoming: list[int] = []  # the next level, as far as it is ours
        self.abroad: list[set[int]] = [set() for _ in range(of)]  # as far as it is others'
        self.transitions = 0
        self.looked_at = 0  # states of this level
        self.found: dict[str, Broken] = {}
        self.complete = True
        self._first = first
        self._base = 0  # number of the first state of this level
        self._parents, self._ordinals = array("L", [0]), array("H", [0])
        if self._owner(first) == number:
            self.seen.add(first)
            self.frontier.append(first)

    def _owner(self, state: int) -> int:
        return self.search.universe.shelves[self.search.log_of(state)] % self.of

    def expand(self, states_max: int, liveness: Callable[[], bool]) -> None:
        """Looks at every state of this level. `pulse` is called now and then, and ends it by False."""
        search, seen, tolerated = self.search, self.seen, self.search.tolerated
        for at, state in enumerate(self.frontier):
            steps = search.steps(state)
            self.transitions += len(steps)
            self.looked_at = at + 1
            if self.of == 1:
                self._keep(self._base + at, steps)
            else:
                self._part(steps)
            for text, label in search.broken:
                invariant = invariant_of(text)
                if invariant not in self.found:
                    path = self._path(self._base + at) if self.of == 1 else ()
                    self.found[invariant] = Broken(invariant, text, (*path, search.describe(state, label)))
                self.complete = self.complete and invariant in tolerated
            if len(seen) > states_max or (not self.looked_at % PULSE_STATES and not liveness()):
                self.complete = False
            if not self.complete:
                break

    def _keep(self, at: int, steps: list[int]) -> None:
        """What the state number `at` leads to, when all states are ours."""
        seen = self.seen
        for ordinal, to in enumerate(steps):
            count = len(seen)
            seen.add(to)
            if len(seen) > count:
                self.upcoming.append(to)
                self._parents.append(at)
                self._ordinals.append(ordinal)

    def _part(self, steps: list[int]) -> None:
        """What a state leads to, some of which is others'."""
        for to in steps:
            owner = self._owner(to)
            if owner != self.number:
                self.abroad[owner].add(to)
            elif to not in self.seen:
                self.seen.add(to)
                self.upcoming.append(to)

    def take(self, states: list[int]) -> None:
        """States of the next level that others came to."""
        fresh = [state for state in states if state not in self.seen]
        self.seen.update(fresh)
        self.upcoming += fresh

    def turn(self) -> None:
        """On to the next level."""
        self._base += len(self.frontier)
        self.frontier, self.upcoming, self.looked_at = self.upcoming, [], 0
        for states in self.abroad:
            states.clear()

    def _path(self, at: int) -> list[str]:
        """The steps to the state number `at`, in words."""
        taken = []
        while at:
            taken.append(self._ordinals[at])
            at = self._parents[at]
        search, state, told = self.search, self._first, []
        broken = list(search.broken)
        for ordinal in reversed(taken):
            labels: list[Label] = []
            states = search.steps(state, labels)
            told.append(search.describe(state, labels[ordinal]))
            state = states[ordinal]
        search.broken[:] = broken
        return told


def walk(search: Search, first: int, states_max: int, on_progress: Callable[[Progress], None]) -> Report:
    """Every state that can be reached from `first`, until one breaks a promise that is not tolerated, or Ctrl-C."""
    began_s, share, depth, interrupted = time.monotonic(), Share(search, first), 0, False

    def liveness() -> bool:
        waiting = len(share.frontier) - share.looked_at + len(share.upcoming)
        on_progress(Progress(depth, len(share.seen), waiting))
        return True

    try:
        while True:
            share.expand(states_max, liveness)
            if not share.upcoming or not share.complete:
                break
            share.turn()
            depth += 1
            liveness()
    except KeyboardInterrupt:
        interrupted = True
    universe = search.universe
    return Report(
        search.configuration.name,
        share.complete and not interrupted,
        interrupted,
        len(share.seen),
        share.transitions,
        search.clipped,
        depth,
        len(universe.views) - 2,
        len(universe.parents),
        search.deliveries,
        round(time.monotonic() - began_s, 2),
        tuple(share.found.values()),
    )
