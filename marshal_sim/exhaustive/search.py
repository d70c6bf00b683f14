"""Computes steps: from one state of a small model, every state that may come next within the bounds, and what breaks.

A state is the numbers of state_store.py packed into one int: time, what was spent of the bounds, the journal of the
handlers, the network, the log, and the condition of every process. A slot is the place of one process in a state.
bfs.py visits the states.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final

from marshal_py.errors import GroupMissing
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS
from marshal_py.protocol.wire import records
from marshal_sim.exhaustive.actors import ORIGIN_MS, TOPIC, AdminActor, Consumer
from marshal_sim.exhaustive.configuration import SPENDINGS, UNBOUNDED, Bounds, Configuration
from marshal_sim.exhaustive.state_store import ABSENT, GONE, Network, Outcome, StateStore, moment_ms
from marshal_sim.judge.step_checker import judge_advances, judge_delivery

# Bits of a packed state, from the lowest: more than fits into memory. With up to three processes a state takes 180 bits
# at most, which are 48 bytes as an int; one bit more would be 64 bytes.
TIME, SPENT, JOURNAL, NETWORK, LOG, LOCAL = 8, 28, 20, 24, 22, 24
_AT_JOURNAL: Final = TIME + SPENT
_AT_NETWORK: Final = _AT_JOURNAL + JOURNAL
_AT_LOG: Final = _AT_NETWORK + NETWORK
_AT_LOCALS: Final = _AT_LOG + LOG

# One of each spending, four bits each.
STOP, CRASH, START, LEAVE, DUPLICATE, DROP, REORDER = (1 << 4 * at for at in range(len(SPENDINGS)))

Label = tuple[str, int, int]  # what, slot (-1: none), argument


def invariant_of(text: str) -> str:
    return text[: text.index(":")]


class Search:
    """Computes the steps of one configuration."""

    clipped: int
    deliveries: int

    def __init__(self, configuration: Configuration, tolerated: frozenset[str] = frozenset()) -> None:
        """Prepares a search. A violation of an invariant in `tolerated` is noted once and does not end the search."""
        self.configuration = configuration
        self.tolerated = tolerated
        self.store: StateStore = StateStore(len(configuration.roles))
        self._consumers = {slot for slot, role in enumerate(configuration.roles) if role.options is not None}
        self.bounds: Bounds = UNBOUNDED
        self._caps: tuple[int, ...] = ()
        self._quanta_max = self._records_max = 0
        self.clipped = self.deliveries = 0
        self._moves: dict[int, tuple[Outcome, ...]] = {}
        self._reads: dict[int, tuple[Outcome, ...]] = {}  # results of reading, by what the whole log is
        self._read: dict[int, Outcome] = {}  # results by what is read: logs that part later share them
        self._runs: dict[int, Outcome] = {}
        self._leaves: dict[int, Outcome | None] = {}
        self._starts: dict[tuple[int, int, int, int], int] = {}
        self._wills: dict[int, tuple[int, ...]] = {}
        self._sent: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._flow: dict[int, tuple[tuple[str, int, int, int], ...]] = {}
        self.broken: list[tuple[str, Label]] = []  # what steps of the newest expanded state break

    def bound(self, bounds: Bounds, quanta: int, log: int) -> None:
        """Sets the bounds that hold from now on, counted from the time `quanta` and from the length of `log`."""
        self.bounds = bounds
        self._caps = tuple(getattr(bounds, name) for name in SPENDINGS)
        self._quanta_max = quanta + bounds.quanta
        self._records_max = len(self.store.paths[log]) + bounds.records

    # --- states

    def pack(self, quanta: int, spent: int, journal: int, network: int, log: int, locals_: tuple[int, ...]) -> int:
        state = 0
        for local in reversed(locals_):
            state = state << LOCAL | local
        state = (state << LOG | log) << NETWORK | network
        return ((state << JOURNAL | journal) << SPENT | spent) << TIME | quanta

    def unpack(self, state: int) -> tuple[int, int, int, int, int, tuple[int, ...]]:
        locals_ = state >> _AT_LOCALS
        return (
            state & (1 << TIME) - 1,
            state >> TIME & (1 << SPENT) - 1,
            state >> _AT_JOURNAL & (1 << JOURNAL) - 1,
            state >> _AT_NETWORK & (1 << NETWORK) - 1,
            state >> _AT_LOG & (1 << LOG) - 1,
            tuple(locals_ >> LOCAL * at & (1 << LOCAL) - 1 for at in range(len(self.configuration.roles))),
        )

    def log_of(self, state: int) -> int:
        return state >> _AT_LOG & (1 << LOG) - 1

    def first(self) -> int:
        """Returns the state with a log of nothing but its Genesis, and with no process."""
        return self.pack(0, 0, 0, 0, self.store.genesis, (ABSENT,) * len(self.configuration.roles))

    def _may(self, spent: int, unit: int) -> bool:
        at = unit.bit_length() // 4
        return (spent >> 4 * at & 15) < self._caps[at]

    # --- steps

    def steps(self, state: int, labels: list[Label] | None = None) -> list[int]:
        """Returns every state that one step leads to. `labels`, if given, is filled with a label of each step.

        What a step breaks is added to `self.broken`. A step that breaks an invariant is taken only if that invariant is
        tolerated.
        """
        found: list[int] = []
        self.broken.clear()
        quanta, spent, _, network, log, locals_ = self.unpack(state)
        for slot, local in enumerate(locals_):
            if local > GONE:
                self._by_process(state, slot, local, found, labels)
            elif self._may(spent, START):
                self._start(state, slot, found, labels)
        self._by_network(state, network, log, found, labels)
        if quanta < self._quanta_max:
            self._by_time(state, found, labels)
        return found

    def _by_process(self, state: int, slot: int, local: int, found: list[int], labels: list[Label] | None) -> None:
        """Adds to `found` the steps of one process: its own ones, its reading, and what the user or a fault does to
        it.
        """
        store = self.store
        quanta, spent, log = state & 255, state >> TIME & (1 << SPENT) - 1, state >> _AT_LOG & (1 << LOG) - 1
        view = store.views[local]
        key = local << TIME | quanta
        moves = self._moves.get(key)
        if moves is None:
            moves = self._moves[key] = store.moves(local, slot, quanta)
        for outcome in moves:
            self._land(state, slot, local, outcome, found, labels)
        if view.over:
            return
        if view.log != log:
            key = key << LOG | log
            reads = self._reads.get(key)
            if reads is None:
                reads = self._reads[key] = self._ways_to_read(local, slot, log, quanta)
            for outcome in reads:
                self._land(state, slot, local, outcome, found, labels)
        if self._may(spent, LEAVE):
            key = local << TIME | quanta
            if key not in self._leaves:
                self._leaves[key] = store.leave(local, slot, quanta)
            left = self._leaves[key]
            if left is not None:
                self._land(state + (LEAVE << TIME), slot, local, left, found, labels)
        if self._may(spent, CRASH):
            self._crash(state, slot, local, found, labels)
            if self.configuration.witnessed and slot in self._consumers:
                self._witness(state, slot, local, found, labels)

    def _ways_to_read(self, local: int, slot: int, log: int, quanta: int) -> tuple[Outcome, ...]:
        """Returns the results of the two ways in which a process can read on: one record, or everything in the log."""
        path, read = self.store.paths[log], len(self.store.paths[self.store.views[local].log])
        found = []
        for upto in dict.fromkeys((path[read], log)):
            key = (local << TIME | quanta) << LOG | upto
            outcome = self._read.get(key)
            if outcome is None:
                outcome = self._read[key] = self.store.reads(local, slot, upto, quanta)
            found.append(outcome)
        return tuple(found)

    def _land(
        self, state: int, slot: int, local: int, outcome: Outcome, found: list[int], labels: list[Label] | None
    ) -> None:
        """Adds to `found` the state after `outcome`, if the outcome breaks nothing and stays within the bounds."""
        broken = outcome.broken
        if outcome.delivery is not None:
            self.deliveries += 1
            store, log = self.store, state >> _AT_LOG & (1 << LOG) - 1
            journal = state >> _AT_JOURNAL & (1 << JOURNAL) - 1
            broken = broken or judge_delivery(
                outcome.delivery,
                store.facts[store.views[local].log],
                store.facts[log],
                store.journals[journal],
                moment_ms(state & 255),
            )
        after = self.store.views[outcome.local]
        if after.over and after.said and slot in self._consumers and after.said not in self.configuration.endings:
            broken = broken or f"T18: {self.configuration.roles[slot].name} ends with {after.said}"
        if broken and self._breaks(broken, (outcome.what, slot, outcome.argument)):
            return
        state += outcome.local - local << _AT_LOCALS + LOCAL * slot
        if outcome.mark is not None:
            journal = state >> _AT_JOURNAL & (1 << JOURNAL) - 1
            marks = self.store.journals[journal] | {outcome.mark}
            state += self.store.journal(marks) - journal << _AT_JOURNAL
        if outcome.sent:
            network = state >> _AT_NETWORK & (1 << NETWORK) - 1
            sent = self._send(network, slot, outcome.sent)
            if sent < 0:
                self.clipped += 1
                return
            state += sent - network << _AT_NETWORK
        found.append(state)
        if labels is not None:
            labels.append((outcome.what, slot, outcome.argument))

    def _send(self, network: int, slot: int, sent: tuple[int, ...]) -> int:
        """Returns the network with the records `sent` at the end of the slot's queue.

        Returns -1 if the bounds allow fewer records on their way.
        """
        known = self._sent.get((network, slot, sent))
        if known is None:
            before = self.store.networks[network]
            queues = list(before.queues)
            queues[slot] = (*queues[slot], *sent)
            after = Network(tuple(queues), before.strays)
            known = -1 if after.size > self.bounds.in_flight else self.store.network(after)
            self._sent[network, slot, sent] = known
        return known

    def _crash(self, state: int, slot: int, local: int, found: list[int], labels: list[Label] | None) -> None:
        """Adds to `found` the state in which the process has crashed.

        The records in its queue may come at any time from then on, or never.
        """
        network = state >> _AT_NETWORK & (1 << NETWORK) - 1
        before = self.store.networks[network]
        queues = list(before.queues)
        strays = tuple(sorted((*before.strays, *queues[slot])))
        queues[slot] = ()
        after = self.store.network(Network(tuple(queues), strays))
        found.append(
            state + (CRASH << TIME) + (after - network << _AT_NETWORK) + (GONE - local << _AT_LOCALS + LOCAL * slot)
        )
        if labels is not None:
            labels.append(("crash", slot, 0))

    def _witness(self, state: int, slot: int, local: int, found: list[int], labels: list[Label] | None) -> None:
        """Adds to `found` the states after the witness of a consumer has noticed something.

        After a death, and after a sign that is taken for one, the records of the will may come at any time, twice, or
        never.
        """
        key = local << TIME | state & (1 << TIME) - 1
        will = self._wills.get(key)
        if will is None:
            will = self._wills[key] = self.store.will(local, state & (1 << TIME) - 1)
        network = state >> _AT_NETWORK & (1 << NETWORK) - 1
        before = self.store.networks[network]
        for sign in records.Sign:
            if not records.proves_death(sign) or not will:
                continue
            dies = sign is records.Sign.ENDED
            queues = [() if dies and at == slot else queue for at, queue in enumerate(before.queues)]
            rest = before.queues[slot] if dies else ()
            after = self.store.network(Network(tuple(queues), tuple(sorted((*before.strays, *rest, *will, *will)))))
            gone = GONE - local << _AT_LOCALS + LOCAL * slot if dies else 0
            found.append(state + (CRASH << TIME) + (after - network << _AT_NETWORK) + gone)
            if labels is not None:
                labels.append(("will" if dies else "false will", slot, 0))

    def _start(self, state: int, slot: int, found: list[int], labels: list[Label] | None) -> None:
        """Adds to `found` the state in which a process has started in this slot, with the whole log read."""
        role = self.configuration.roles[slot]
        quanta, spent, _, _, log, locals_ = self.unpack(state)
        if role.after >= 0 and locals_[role.after] == ABSENT:
            return
        number = slot + len(self.configuration.roles) * (spent >> 8 & 15)
        key = (log, slot, number, quanta)
        if key not in self._starts:
            self._starts[key] = self.start(slot, number, log, quanta)
        if self._starts[key] == ABSENT:
            return
        state += self._starts[key] - locals_[slot] << _AT_LOCALS + LOCAL * slot
        found.append(state + (START << TIME))
        if labels is not None:
            labels.append(("start", slot, 0))

    def start(self, slot: int, number: int, log: int, quanta: int) -> int:
        """Returns the condition of a new process that has read this log; ABSENT for an admin that finds no group to
        work on.

        The process draws random bytes by its `number`, so another number gives other bytes.
        """
        role, store, configuration = self.configuration.roles[slot], self.store, self.configuration
        path = store.paths[log]
        loaded = (len(path) - 1) // CHECKPOINT_OFFSETS * CHECKPOINT_OFFSETS if configuration.snapshots else 0
        world, _ = store.world(log, path[loaded])
        if role.options is not None:
            actor: Consumer | AdminActor = Consumer(
                number, role.options, world, {TOPIC: configuration.partitions}, configuration.messages
            )
        else:
            assert role.plan is not None
            verdicts = [store.world(further)[1] for further in path[1:]]
            try:
                actor = AdminActor(
                    number, role.name, world, role.plan, role.position, [v for v in verdicts if v is not None]
                )
            except GroupMissing:
                return ABSENT
        actor.loaded = loaded
        return store.born(actor, log, quanta)

    def _by_network(self, state: int, network: int, log: int, found: list[int], labels: list[Label] | None) -> None:
        """Adds to `found` the steps of the network: a record comes to the log in its producer's order or not, twice,
        late, or never.
        """
        if not network:
            return
        flow = self._flow.get(network)
        if flow is None:
            flow = self._flow[network] = tuple(self._flows(self.store.networks[network]))
        spent = state >> TIME & (1 << SPENT) - 1
        for what, slot, entry, after in flow:
            unit = _FLOW_COSTS[what]
            if unit and not self._may(spent, unit):
                continue
            to = state + (after - network << _AT_NETWORK) + (unit << TIME)
            if what != "drop":
                appended = self._append(state, log, entry, (what, slot, entry))
                if appended < 0:
                    continue
                to += appended - log << _AT_LOG
            found.append(to)
            if labels is not None:
                labels.append((what, slot, entry))

    def _flows(self, network: Network) -> Iterator[tuple[str, int, int, int]]:
        number = self.store.network
        for slot, queue in enumerate(network.queues):
            for what, at in (("append", 0), ("duplicate", 0), ("drop", 0), ("reorder", 1)):
                if at < len(queue):
                    queues = list(network.queues)
                    queues[slot] = (*queue[:at], *queue[at + 1 :])
                    strays = (*network.strays, queue[at]) if what == "duplicate" else network.strays
                    yield what, slot, queue[at], number(Network(tuple(queues), tuple(sorted(strays))))
        for at, stray in enumerate(network.strays):
            if stray not in network.strays[:at]:
                rest = (*network.strays[:at], *network.strays[at + 1 :])
                yield "stray", -1, stray, number(Network(network.queues, rest))

    def _append(self, state: int, log: int, entry: int, label: Label) -> int:
        """Returns the number of the log with the record appended, or -1 if that breaks something or leaves the
        bounds.
        """
        store = self.store
        if len(store.paths[log]) >= self._records_max:
            self.clipped += 1
            return -1
        appended = store.append(log, entry)
        facts = store.facts[appended]
        broken = store.broken_logs.get(appended, "")
        if facts.advances and not broken:
            broken = judge_advances(facts, store.journals[state >> _AT_JOURNAL & (1 << JOURNAL) - 1])
        if facts.kind == "SetPosition" and facts.outcome == "accepted" and not broken:
            broken = self._denied(state, facts.by)
        return -1 if broken and self._breaks(broken, label) else appended

    def _breaks(self, text: str, label: Label) -> bool:
        """Notes what a step breaks; returns True if the step must not be taken."""
        invariant = invariant_of(text)
        if invariant in self.configuration.uncounted:
            return False
        self.broken.append((text, label))
        return invariant not in self.tolerated

    def _denied(self, state: int, by: str) -> str:
        """Returns a sentence if an admin's move takes effect after the admin has reported `not_moved` (S12), else
        "".
        """
        for slot, local in enumerate(self.unpack(state)[5]):
            name = self.configuration.roles[slot].name
            if self.store.views[local].said == "not_moved" and by.startswith(f"{name}@"):
                return f"S12: {name} said not moved, and it moved"
        return ""

    def _by_time(self, state: int, found: list[int], labels: list[Label] | None) -> None:
        """Adds to `found` the states after a third of an interval has passed.

        There is one for each choice of processes that were stopped meanwhile. All others have done what was due.
        """
        quanta, spent, _, _, _, locals_ = self.unpack(state)
        living = [slot for slot, local in enumerate(locals_) if local > GONE and not self.store.views[local].over]
        for running in product((True, False), repeat=len(living)):
            stops = len(living) - sum(running)
            if (spent & 15) + stops > self._caps[0]:
                continue
            # Outcomes are landed on a scratch list one after the other: each adds its own slot and its own queue.
            at, mask = state + stops * (STOP << TIME) + 1, 0
            for slot, runs in zip(living, running, strict=True):
                if runs and at >= 0:
                    mask |= 1 << slot
                    at = self._run(at, slot, locals_[slot], quanta)
            if at >= 0:
                found.append(at)
                if labels is not None:
                    labels.append(("time", -1, mask))

    def _run(self, state: int, slot: int, local: int, quanta: int) -> int:
        key = local << TIME | quanta
        outcome = self._runs.get(key)
        if outcome is None:
            outcome = self._runs[key] = self.store.runs(local, slot, quanta)
        landed: list[int] = []
        self._land(state, slot, local, outcome, landed, None)
        return landed[0] if landed else -1

    # --- words

    def describe(self, state: int, label: Label) -> str:
        """Returns one step in words: time, process, action, record and offset."""
        quanta, _, _, _, log, _ = self.unpack(state)
        what, slot, argument = label
        who = self.configuration.roles[slot].name if slot >= 0 else "-"
        match what:
            case "append" | "duplicate" | "reorder" | "stray":
                text = self.store.describe_record(log, argument)
                how = {
                    "append": "",
                    "duplicate": ", and a copy stays on its way",
                    "reorder": ", before an earlier one",
                    "stray": ", late",
                }[what]
                text = f"{text}{how}"
            case "drop":
                text = f"loses {self.store.describe_entry(argument)}"
            case "read":
                text = f"reads {argument} more of the log, and acts"
            case "deliver":
                text = f"hands the next message over under epoch {argument}"
            case "finish":
                text = "a handler is done"
            case "time":
                running = [role.name for at, role in enumerate(self.configuration.roles) if argument >> at & 1]
                text = f"a third of an interval goes by; running: {', '.join(running) or 'nobody'}"
            case _:
                text = {
                    "tick": "acts",
                    "run": "acts while time goes by",
                    "leave": "is told to stop",
                    "crash": "crashes",
                    "will": "dies, and its witness publishes its will",
                    "false will": "lives, and its witness takes it for dead",
                    "start": "starts, with all of the log read",
                }[what]
        return f"{moment_ms(quanta) - ORIGIN_MS:>6} ms  {who:<6} {text}"


_FLOW_COSTS: Final = {"append": 0, "stray": 0, "duplicate": DUPLICATE, "drop": DROP, "reorder": REORDER}
