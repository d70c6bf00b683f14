"""Breadth-first search through every state that a configuration can reach within its bounds.

The set of visited states holds packed ints and nothing else, so that two states are never taken for one. A share is the
part of the states that one process of the search expands: all of them, or some if parallel.py uses several processes.
To expand a state is to compute its steps. A level is all states that the same number of steps leads to. A share of all
states keeps for each the state before it and the ordinal of the step between them: they give the path to a violation,
which is the shortest.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Final, NamedTuple

from marshal_sim.exhaustive.search import Label, Search, invariant_of

PROGRESS_STATES: Final = 20_000  # expanded between two reports of progress: a second or so


class Broken(NamedTuple):
    """A promise that a step breaks. `path` has every step from the beginning of the search to that one, in
    words.
    """

    invariant: str
    text: str
    path: tuple[str, ...]


class Progress(NamedTuple):
    """Says how far a search has come."""

    depth: int
    states: int
    frontier: int  # states that are not expanded yet


class SearchReport(NamedTuple):
    """The result of a search. `clipped` counts the steps that were not taken because they would leave the
    bounds.
    """

    configuration: str
    complete: bool
    interrupted: bool  # by Ctrl-C; what is counted here was searched all the same
    states: int
    transitions: int
    clipped: int
    depth: int
    conditions: int  # how many conditions of processes were met
    logs: int
    deliveries: int  # steps that hand a message over
    seconds: float
    violations: tuple[Broken, ...]


class Share:
    """The states that one process of the search expands, level by level.

    There are `of` processes with the numbers 0 to `of` - 1, and this is the share of process `number`. A state's log
    decides to which share the state belongs. `first` is the state where the search begins.
    """

    number: int
    of: int

    def __init__(self, search: Search, first: int, number: int = 0, of: int = 1) -> None:
        self.search = search
        self.number, self.of = number, of
        self.seen: set[int] = set()
        self.frontier: list[int] = []
        self.upcoming: list[int] = []  # the part of the next level that belongs to this share
        self.for_others: list[set[int]] = [set() for _ in range(of)]  # the parts that belong to other shares
        self.transitions: int = 0
        self.expanded: int = 0  # states of this level that are expanded
        self.found: dict[str, Broken] = {}
        self.complete: bool = True
        self._first = first
        self._base = 0  # number of the first state of this level
        self._parents, self._ordinals = array("L", [0]), array("H", [0])
        if self._owner(first) == number:
            self.seen.add(first)
            self.frontier.append(first)

    def _owner(self, state: int) -> int:
        return self.search.store.stable_ids[self.search.log_of(state)] % self.of

    def expand(self, states_max: int, keep_going: Callable[[], bool]) -> None:
        """Expands every state of this level.

        `keep_going` is called every PROGRESS_STATES states. The search ends when it returns False, when more than
        `states_max` states are known, or when a step breaks a promise that is not tolerated.
        """
        search, seen, tolerated = self.search, self.seen, self.search.tolerated
        for at, state in enumerate(self.frontier):
            steps = search.steps(state)
            self.transitions += len(steps)
            self.expanded = at + 1
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
            if len(seen) > states_max or (not self.expanded % PROGRESS_STATES and not keep_going()):
                self.complete = False
            if not self.complete:
                break

    def _keep(self, at: int, steps: list[int]) -> None:
        """Adds the successors of state number `at` to the next level. Used only if one process has all states."""
        seen = self.seen
        for ordinal, to in enumerate(steps):
            count = len(seen)
            seen.add(to)
            if len(seen) > count:
                self.upcoming.append(to)
                self._parents.append(at)
                self._ordinals.append(ordinal)

    def _part(self, steps: list[int]) -> None:
        """Divides the successors of a state among the shares: those of other processes are collected for sending."""
        for to in steps:
            owner = self._owner(to)
            if owner != self.number:
                self.for_others[owner].add(to)
            elif to not in self.seen:
                self.seen.add(to)
                self.upcoming.append(to)

    def take(self, states: list[int]) -> None:
        """Adds states to the next level of this share. Other processes have reached them and sent them here."""
        fresh = [state for state in states if state not in self.seen]
        self.seen.update(fresh)
        self.upcoming += fresh

    def next_level(self) -> None:
        """Makes the states that were collected for the next level the ones to expand."""
        self._base += len(self.frontier)
        self.frontier, self.upcoming, self.expanded = self.upcoming, [], 0
        for states in self.for_others:
            states.clear()

    def _path(self, at: int) -> list[str]:
        """Returns the steps that lead to state number `at`, in words."""
        taken = []
        while at:
            taken.append(self._ordinals[at])
            at = self._parents[at]
        search, state, path = self.search, self._first, []
        broken = list(search.broken)
        for ordinal in reversed(taken):
            labels: list[Label] = []
            states = search.steps(state, labels)
            path.append(search.describe(state, labels[ordinal]))
            state = states[ordinal]
        search.broken[:] = broken
        return path


def search_all(search: Search, first: int, states_max: int, on_progress: Callable[[Progress], None]) -> SearchReport:
    """Expands every state that can be reached from `first`.

    It ends early when a step breaks a promise that is not tolerated, at more than `states_max` states, or at Ctrl-C.
    """
    began_s, share, depth, interrupted = time.monotonic(), Share(search, first), 0, False

    def keep_going() -> bool:
        waiting = len(share.frontier) - share.expanded + len(share.upcoming)
        on_progress(Progress(depth, len(share.seen), waiting))
        return True

    try:
        while True:
            share.expand(states_max, keep_going)
            if not share.upcoming or not share.complete:
                break
            share.next_level()
            depth += 1
            keep_going()
    except KeyboardInterrupt:
        interrupted = True
    store = search.store
    return SearchReport(
        search.configuration.name,
        share.complete and not interrupted,
        interrupted,
        len(share.seen),
        share.transitions,
        search.clipped,
        depth,
        len(store.views) - 2,
        len(store.parents),
        search.deliveries,
        round(time.monotonic() - began_s, 2),
        tuple(share.found.values()),
    )
