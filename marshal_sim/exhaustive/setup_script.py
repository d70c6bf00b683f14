"""The script that leads to where a search begins. It takes one possible step after the other, without faults.

A slot is the place of one process in a state, and a quantum of time is a third of an interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.records import Record
from marshal_sim.exhaustive.actors import GROUP
from marshal_sim.exhaustive.bfs import Broken
from marshal_sim.exhaustive.configuration import UNBOUNDED
from marshal_sim.exhaustive.search import Label, Search, invariant_of
from marshal_sim.exhaustive.state_store import Network, moment_ms

STEPS_MAX = 1_000  # a script that needs more is in an endless loop


class SetupScript:
    """Moves one state of a model step by step. Time passes only in `wait`."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.broken: dict[str, Broken] = {}  # what a possible step of the script breaks
        self.state: int = search.first()
        search.bound(UNBOUNDED, 0, search.store.genesis)

    def begin(self) -> int:
        """Returns the state where the search begins. The bounds count from this state on."""
        quanta, _, journal, network, log, locals_ = self.search.unpack(self.state)
        self.search.bound(self.search.configuration.bounds, quanta, log)
        self.search.clipped = self.search.deliveries = 0
        return self.search.pack(quanta, 0, journal, network, log, locals_)

    def take(self, what: str, slot: int = -1, argument: int | None = None) -> bool:
        """Takes a step of the kind `what`; returns False if none is possible.

        If several are possible, it takes the last one. Of several reads the last one reads everything.
        """
        labels: list[Label] = []
        states = self.search.steps(self.state, labels)
        for text, _ in self.search.broken:
            self.broken.setdefault(invariant_of(text), Broken(invariant_of(text), text, ("before the search begins",)))
        for label, state in zip(reversed(labels), reversed(states), strict=True):
            if label[0] == what and slot in (-1, label[1]) and argument in (None, label[2]):
                self.state = state
                return True
        return False

    def must(self, what: str, slot: int = -1, argument: int | None = None) -> None:
        assert self.take(what, slot, argument), f"{what} of {slot} is not possible"

    def start(self, *slots: int) -> None:
        for slot in slots:
            self.must("start", slot)
            self.settle(slot)

    def settle(self, *slots: int, handlers: bool = False) -> None:
        """Lets everything that was sent arrive, and these processes read it and act, until nothing is left to do at
        this time.
        """
        for _ in range(STEPS_MAX):
            if self.take("append"):
                continue
            if any(self.take(what, slot) for slot in slots for what in ("read", "tick")):
                continue
            if handlers and any(self.take(what, slot) for slot in slots for what in ("finish", "deliver")):
                continue
            return
        raise AssertionError("the script is in an endless loop")

    def wait(self, quanta: int, *running: int, settle: bool = True) -> None:
        """Lets `quanta` thirds of an interval pass. Only the processes in these slots run; the others are stopped."""
        for _ in range(quanta):
            self.must("time", -1, sum(1 << slot for slot in running))
            if settle:
                self.settle(*running)

    def clone(self, slot: int, copy: int) -> None:
        """Clones the process in `slot` into the slot `copy`."""
        quanta, spent, journal, network, log, locals_ = self.search.unpack(self.state)
        store = self.search.store
        actor = store.get(locals_[slot])
        actor.become_clone(copy)
        put = store.put(actor, store.views[locals_[slot]].log)
        locals_ = (*locals_[:copy], put, *locals_[copy + 1 :])
        self.state = self.search.pack(quanta, spent, journal, network, log, locals_)

    def plant(self, make: Callable[[Group], Iterable[Record | bytes]]) -> None:
        """Adds records of an author outside the model to the network. Each may come at any time, or never."""
        quanta, spent, journal, network, log, locals_ = self.search.unpack(self.state)
        store = self.search.store
        group = store.world(log)[0].groups[GROUP]
        now_ms, before = moment_ms(quanta), store.networks[network]
        made = [
            store.entry(item, now_ms, -1) if isinstance(item, bytes) else store.record(item, now_ms, -1)
            for item in make(group)
        ]
        planted = store.network(Network(before.queues, tuple(sorted((*before.strays, *made)))))
        self.state = self.search.pack(quanta, spent, journal, planted, log, locals_)
