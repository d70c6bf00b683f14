"""States on their way from one process of a search to another. Numbers mean something in one store alone.

So a transfer defines whatever its states name and the receiver does not know yet, in the sender's numbers: records,
logs, networks, journals, conditions of processes. The stores are equal when the search begins, because every process
begins with the same script.
"""

from __future__ import annotations

from typing import NamedTuple

from marshal_sim.exhaustive.search import Search
from marshal_sim.exhaustive.state_store import Entry, Frozen, Network
from marshal_sim.judge.step_checker import Mark


class StateTransfer(NamedTuple):
    """Carries states with the definitions that they need. Each definition uses only earlier ones."""

    sender: int
    entries: list[tuple[int, Entry]]
    logs: list[tuple[int, int, int]]  # number, parent, entry
    networks: list[tuple[int, Network]]
    journals: list[tuple[int, frozenset[Mark]]]
    locals: list[tuple[int, Frozen]]
    states: list[int]


class Sender:
    """Sends states to one other process, and remembers which definitions that process has."""

    def __init__(self, search: Search, number: int) -> None:
        self._search = search
        self._number = number
        store = search.store
        self._entries = set(range(len(store.entries)))
        self._logs = set(range(len(store.parents)))
        self._networks = set(range(len(store.networks)))
        self._journals = set(range(len(store.journals)))
        self._locals = set(range(len(store.views)))

    def pack(self, states: set[int]) -> StateTransfer:
        transfer = StateTransfer(self._number, [], [], [], [], [], list(states))
        store, unpack = self._search.store, self._search.unpack
        for state in transfer.states:
            _, _, journal, network, log, locals_ = unpack(state)
            if journal not in self._journals:
                self._journals.add(journal)
                transfer.journals.append((journal, store.journals[journal]))
            if network not in self._networks:
                self._networks.add(network)
                known = store.networks[network]
                for entry in (*known.strays, *(entry for queue in known.queues for entry in queue)):
                    self._entry(entry, transfer)
                transfer.networks.append((network, known))
            if log not in self._logs:
                self._log(log, transfer)
            for local in locals_:
                if local not in self._locals:
                    self._locals.add(local)
                    self._log(store.views[local].log, transfer)
                    transfer.locals.append((local, store.frozen(local)))
        return transfer

    def _entry(self, entry: int, transfer: StateTransfer) -> None:
        if entry not in self._entries:
            self._entries.add(entry)
            transfer.entries.append((entry, self._search.store.entries[entry]))

    def _log(self, log: int, transfer: StateTransfer) -> None:
        store = self._search.store
        for further in store.paths[log]:
            if further not in self._logs:
                self._logs.add(further)
                self._entry(store.newest[further], transfer)
                transfer.logs.append((further, store.parents[further], store.newest[further]))


class Receiver:
    """Receives states of one other process, and translates its numbers."""

    def __init__(self, search: Search) -> None:
        self._search = search
        store = search.store
        self._entries = {number: number for number in range(len(store.entries))}
        self._logs = {number: number for number in range(len(store.parents))}
        self._networks = {number: number for number in range(len(store.networks))}
        self._journals = {number: number for number in range(len(store.journals))}
        self._locals = {number: number for number in range(len(store.views))}

    def unpack(self, transfer: StateTransfer) -> list[int]:
        """Returns the states of a transfer, translated into the numbers of this process's store."""
        store, search = self._search.store, self._search
        entries, logs, networks = self._entries, self._logs, self._networks
        for number, entry in transfer.entries:
            entries[number] = store.entry(*entry)
        for number, parent, newest in transfer.logs:
            logs[number] = store.append(logs[parent], entries[newest])
        for number, network in transfer.networks:
            queues = tuple(tuple(entries[entry] for entry in queue) for queue in network.queues)
            strays = tuple(sorted(entries[entry] for entry in network.strays))
            networks[number] = store.network(Network(queues, strays))
        for number, journal in transfer.journals:
            self._journals[number] = store.journal(journal)
        for number, frozen in transfer.locals:
            view = frozen.view._replace(log=logs[frozen.view.log])
            self._locals[number] = store.adopt(frozen._replace(view=view))
        found = []
        for state in transfer.states:
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
