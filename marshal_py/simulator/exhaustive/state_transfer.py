"""States on their way from one process of a search to another. Numbers mean something in one universe alone.

So a parcel defines whatever its states name and the receiver was not told before, in the sender's numbers: records,
logs, networks, journals, conditions of processes. What stood in the universe when the search began is the same
everywhere, because every process begins with the same script.
"""

from __future__ import annotations

from typing import NamedTuple

from marshal_py.simulator.exhaustive.search import Search
from marshal_py.simulator.exhaustive.state_store import Entry, Frozen, Network
from marshal_py.simulator.step_checker import Mark


class StateTransfer(NamedTuple):
    """States, and what they name. Each definition names only what stands before it."""

    sender: int
    entries: list[tuple[int, Entry]]
    logs: list[tuple[int, int, int]]  # number, parent, entry
    networks: list[tuple[int, Network]]
    journals: list[tuple[int, frozenset[Mark]]]
    locals: list[tuple[int, Frozen]]
    states: list[int]


class Sender:
    """What one process tells another."""

    def __init__(self, search: Search, number: int) -> None:
        self._search = search
        self._number = number
        universe = search.universe
        self._entries = set(range(len(universe.entries)))
        self._logs = set(range(len(universe.parents)))
        self._networks = set(range(len(universe.networks)))
        self._journals = set(range(len(universe.journals)))
        self._locals = set(range(len(universe.views)))

    def pack(self, states: set[int]) -> StateTransfer:
        parcel = StateTransfer(self._number, [], [], [], [], [], list(states))
        universe, unpack = self._search.universe, self._search.unpack
        for state in parcel.states:
            _, _, journal, network, log, locals_ = unpack(state)
            if journal not in self._journals:
                self._journals.add(journal)
                parcel.journals.append((journal, universe.journals[journal]))
            if network not in self._networks:
                self._networks.add(network)
                known = universe.networks[network]
                for entry in (*known.strays, *(entry for queue in known.queues for entry in queue)):
                    self._entry(entry, parcel)
                parcel.networks.append((network, known))
            if log not in self._logs:
                self._log(log, parcel)
            for local in locals_:
                if local not in self._locals:
                    self._locals.add(local)
                    self._log(universe.views[local].log, parcel)
                    parcel.locals.append((local, universe.frozen(local)))
        return parcel

    def _entry(self, entry: int, parcel: StateTransfer) -> None:
        if entry not in self._entries:
            self._entries.add(entry)
            parcel.entries.append((entry, self._search.universe.entries[entry]))

    def _log(self, log: int, parcel: StateTransfer) -> None:
        universe = self._search.universe
        for further in universe.paths[log]:
            if further not in self._logs:
                self._logs.add(further)
                self._entry(universe.newest[further], parcel)
                parcel.logs.append((further, universe.parents[further], universe.newest[further]))


class Receiver:
    """What one process was told by another: the other's numbers in its own."""

    def __init__(self, search: Search) -> None:
        self._search = search
        universe = search.universe
        self._entries = {number: number for number in range(len(universe.entries))}
        self._logs = {number: number for number in range(len(universe.parents))}
        self._networks = {number: number for number in range(len(universe.networks))}
        self._journals = {number: number for number in range(len(universe.journals))}
        self._locals = {number: number for number in range(len(universe.views))}

    def unpack(self, parcel: StateTransfer) -> list[int]:
        """Its states, in the numbers of this universe."""
        universe, search = self._search.universe, self._search
        entries, logs, networks = self._entries, self._logs, self._networks
        for number, entry in parcel.entries:
            entries[number] = universe.entry(*entry)
        for number, parent, newest in parcel.logs:
            logs[number] = universe.append(logs[parent], entries[newest])
        for number, network in parcel.networks:
            queues = tuple(tuple(entries[entry] for entry in queue) for queue in network.queues)
            strays = tuple(sorted(entries[entry] for entry in network.strays))
            networks[number] = universe.network(Network(queues, strays))
        for number, journal in parcel.journals:
            self._journals[number] = universe.journal(journal)
        for number, frozen in parcel.locals:
            view = frozen.view._replace(log=logs[frozen.view.log])
            self._locals[number] = universe.adopt(frozen._replace(view=view))
        found = []
        for state in parcel.states:
            quanta, spent, number, network_, log, locals_ = search.unpack(state)
            found.append(
                search.pack(
                    quanta,
                    spent,
                    self._journals[number],
                    networks[network_],
                    logs[log],
                    tuple(self._locals[local] for local in locals_),
                )
            )
        return found
