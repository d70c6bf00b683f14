"""One search by several processes: each has a store of its own and expands the states whose logs are its share
(bfs.py).

The processes go level by level. At the end of each level they hand each other the states of other shares. A state's log
decides whose it is, because most steps leave the log as it is: so few states travel, and the shipped code runs in one
process for each log. The counts are the same as with one process. A violation ends the search without its path:
explore.py then searches again in one process, so that the path is the same, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any, Final, NamedTuple

from marshal_sim.exhaustive.bfs import Progress, SearchReport, Share
from marshal_sim.exhaustive.search import Search
from marshal_sim.exhaustive.state_transfer import Receiver, Sender, StateTransfer
from marshal_sim.tools.sweep import leave_interrupts_to_the_parent

Prepare = Callable[[], tuple[Search, int]]  # makes the search and its first state, the same in every process
NO_LIMIT: Final = 2**63  # of the states of one process: the parent counts them all


class Counts(NamedTuple):
    """Says what one process has counted so far. States are waiting until the process has computed their steps."""

    states: int
    waiting: int  # states that are not expanded yet
    transitions: int
    clipped: int
    deliveries: int
    complete: bool
    broken: bool
    level: bool  # it is at the end of a level and waits for permission to continue


class Inventory(NamedTuple):
    """Names the conditions and logs that one process of the search met.

    The parent joins these sets, so that what several processes met counts once.
    """

    conditions: set[tuple[int, bytes]]
    logs: set[int]


def search(
    name: str, prepare: Prepare, of: int, states_max: int, on_progress: Callable[[Progress], None]
) -> SearchReport | None:
    """Searches as bfs.search_all does, by `of` processes.

    Returns None after a violation, because a single process must search again to find the path to it.
    """
    pool = WorkerPool(prepare, of)
    try:
        return pool.run(name, states_max, on_progress)
    finally:
        pool.end()


class WorkerPool:
    """The processes of a search, as their parent sees them."""

    def __init__(self, prepare: Prepare, of: int) -> None:
        context = get_context("spawn")  # not fork: the caller may have threads
        self.halt: Event = context.Event()
        self.inboxes: list[Queue[StateTransfer]] = [context.Queue() for _ in range(of)]
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection[bool, Any]] = []  # permission to continue is sent, counts come back
        self.counts: list[Counts] = [Counts(0, 0, 0, 0, 0, True, False, False)] * of
        self.depth: int = 0
        self.interrupted: bool = False
        for number in range(of):
            ours, theirs = context.Pipe()
            task = (prepare, number, self.inboxes, theirs, self.halt)
            process = context.Process(target=_work, args=task, daemon=True)
            process.start()
            theirs.close()  # so that the connection breaks when the process does
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, name: str, states_max: int, on_progress: Callable[[Progress], None]) -> SearchReport | None:
        """Searches level after level, until no new state comes, a promise is broken, or the search is stopped."""
        began_s, on = time.monotonic(), True
        while on:
            self._level(states_max, on_progress)
            whole = all(counted.complete and not counted.broken for counted in self.counts)
            on = whole and self._sum("waiting") > 0 and not self.halt.is_set()
            self.depth += on
            for connection in self.connections:
                connection.send(on)
        if any(counted.broken for counted in self.counts):
            return None
        met: list[Inventory] = [connection.recv() for connection in self.connections]
        return SearchReport(
            name,
            whole and not self._sum("waiting"),
            self.interrupted,
            self._sum("states"),
            self._sum("transitions"),
            self._sum("clipped"),
            self.depth,
            len(set().union(*(inventory.conditions for inventory in met))),
            len(set().union(*(inventory.logs for inventory in met))),
            self._sum("deliveries"),
            round(time.monotonic() - began_s, 2),
            (),
        )

    def _sum(self, name: str) -> int:
        return sum(getattr(counted, name) for counted in self.counts)

    def _level(self, states_max: int, on_progress: Callable[[Progress], None]) -> None:
        """Receives counts until all processes have finished the level. After Ctrl-C they finish it early."""
        busy = set(range(len(self.connections)))
        while busy:
            try:
                on_progress(Progress(self.depth, self._sum("states"), self._sum("waiting")))
                ready = wait([self.connections[number] for number in busy])
            except KeyboardInterrupt:
                self.interrupted = True
                self.halt.set()
                continue
            for number in [number for number in busy if self.connections[number] in ready]:
                self.counts[number] = self._receive(number)
                if self.counts[number].level:
                    busy.discard(number)
            if self._sum("states") > states_max:
                self.halt.set()

    def _receive(self, number: int) -> Counts:
        try:
            counted: Counts = self.connections[number].recv()
        except EOFError as error:
            self.processes[number].join()
            code = self.processes[number].exitcode
            raise ChildProcessError(f"process {number} of the search ended with {code}; was there memory?") from error
        return counted

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()
        for inbox in self.inboxes:
            inbox.cancel_join_thread()
            inbox.close()


def _work(
    prepare: Prepare, number: int, inboxes: list[Queue[StateTransfer]], connection: Connection[Any, bool], halt: Event
) -> None:
    """Runs one process of the search, until its parent does not allow another level or is gone."""
    leave_interrupts_to_the_parent()
    search, first = prepare()
    share = Share(search, first, number, len(inboxes))
    others = [other for other in range(len(inboxes)) if other != number]
    senders = {other: Sender(search, number) for other in others}
    receivers = {other: Receiver(search) for other in others}

    def send_counts(level: bool) -> bool:
        waiting = len(share.frontier) - share.expanded + len(share.upcoming)
        connection.send(
            Counts(
                len(share.seen),
                waiting,
                share.transitions,
                search.clipped,
                search.deliveries,
                share.complete,
                bool(share.found),
                level,
            )
        )
        return not halt.is_set()

    try:
        on = True
        while on:
            share.expand(NO_LIMIT, lambda: send_counts(False))
            for other in others:
                inboxes[other].put(senders[other].pack(share.for_others[other]))
            for _ in others:
                transfer = inboxes[number].get()
                share.take(receivers[transfer.sender].unpack(transfer))
            share.next_level()
            send_counts(True)
            on = connection.recv()
        connection.send(Inventory(search.store.conditions(), set(search.store.stable_ids)))
        connection.recv()  # until the parent has it, and ends this process
    except (BrokenPipeError, EOFError):
        pass  # the parent is gone
