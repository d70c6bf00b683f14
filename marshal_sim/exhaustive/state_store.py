"""The parts of all states, each stored once under a small number: logs, networks, journals, conditions of processes.

A state of the search is a few of these numbers. Its many interleavings meet the same few conditions of single processes
again and again. So the shipped code runs once for each (condition of one process, event, time), and the result is kept;
the rest of the search is arithmetic on numbers. A condition is stored as a pickle, to continue from, and is recognised
by 16 bytes of its canonical form (canonical.py). A log is its parent and one record. Its world is folded once and
shared by all readers.
"""

from __future__ import annotations

import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final, NamedTuple, TypeVar
from zlib import crc32

from marshal_py.errors import CoordinationError
from marshal_py.protocol.fold import rationalizer, snapshot
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec, records
from marshal_py.protocol.wire.codec import SIGNED_VERSION
from marshal_py.protocol.wire.identity import HASH_NAME
from marshal_py.protocol.wire.records import Genesis, Record
from marshal_sim.exhaustive.actors import GROUP, ORIGIN_MS, QUANTUM_MS, Actor, Consumer, Effects
from marshal_sim.exhaustive.canonical import digest
from marshal_sim.judge.step_checker import Delivery, Facts, Mark, begun, finished, judge_fold

T = TypeVar("T")

INCARNATION: Final = b"small and closed"
WORLDS_KEPT: Final = 2_048  # folded ones; a world takes some 80 KB, and one that is missed is folded again
# The fields of a record that a path shows.
SHOWN_FIELDS: Final = (
    "client_id",
    "session",
    "epoch",
    "topic",
    "partition",
    "observed",
    "token",
    "duration_ms",
    "claims",
    "ranges",
    "position",
    "give",
    "moves",
    "kind",
    "by",
)
ABSENT, GONE = 0, 1  # a slot that was never started, one whose process crashed


def moment_ms(quanta: int) -> int:
    return ORIGIN_MS + quanta * QUANTUM_MS


def newer(record: Record) -> bytes:
    """Returns the record's bytes with a record version that this library cannot read (E5)."""
    value = bytearray(codec.encode(record, GROUP, INCARNATION))
    value[12 + len(GROUP)] = SIGNED_VERSION + 1
    value[7:11] = crc32(value[11:], crc32(value[:7], crc32(INCARNATION))).to_bytes(4, "big")
    return bytes(value)


class Entry(NamedTuple):
    """A record that is in the log, or on its way there."""

    value: bytes
    sent_ms: int
    slot: int  # the sender's slot; -1 for records that the setup script planted


class View(NamedTuple):
    """The part of a process's condition that decides which steps the process can take."""

    log: int  # the prefix that was read
    due_quanta: int  # a tick at this time or later does something
    over: bool
    said: str
    handler_messages: tuple[tuple[int, int], ...]


class Frozen(NamedTuple):
    """A condition of a process, in the form in which it is stored."""

    view: View
    digest: bytes  # of its canonical form
    actor: bytes  # to continue from


class Outcome(NamedTuple):
    """The result of one event of a process: its new condition, what it sent, and what it broke."""

    what: str
    argument: int
    local: int
    sent: tuple[int, ...]  # entries
    delivery: Delivery | None
    mark: Mark | None  # goes into the journal
    broken: str


class Network(NamedTuple):
    """The records on their way: a queue per process, which keeps its order, and strays.

    A stray record may come at any time, or never.
    """

    queues: tuple[tuple[int, ...], ...]
    strays: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.queues)) + len(self.strays)


class StateStore:
    """The tables of every log, network, journal and condition that the search has met."""

    def __init__(self, slots: int) -> None:
        self.entries: list[Entry] = []
        self._entry_ids: dict[Entry, int] = {}
        self.parents: list[int] = [0]
        self.newest: list[int] = [-1]  # entry at the end of each log
        self.paths: list[tuple[int, ...]] = [(0,)]  # logs by length, from the empty one to this
        self.facts: list[Facts] = [Facts()]
        self.stable_ids: list[int] = [0]  # a number per log that is the same in every process
        self._log_ids: dict[tuple[int, int], int] = {}
        self._worlds: OrderedDict[tuple[int, int], tuple[World, Verdict | None]] = OrderedDict()
        self.networks: list[Network] = [Network(((),) * slots, ())]
        self._network_ids: dict[Network, int] = {self.networks[0]: 0}
        self.journals: list[frozenset[Mark]] = [frozenset()]
        self._journal_ids: dict[frozenset[Mark], int] = {frozenset(): 0}
        nobody = View(0, 0, True, "", ())
        self.views: list[View] = [nobody, nobody]
        self._frozen: list[bytes] = [b"", b""]
        self._digests: list[bytes] = [b"", b""]
        self._local_ids: dict[tuple[int, bytes], int] = {}
        self.broken_logs: dict[int, str] = {}
        self.events: int = 0  # times that the shipped code was asked
        genesis = codec.encode(Genesis(INCARNATION, 1, HASH_NAME, rationalizer.PROTOCOL_VERSION), "", INCARNATION)
        self.genesis: int = self.append(0, self.entry(genesis, 0, -1))

    # --- records, logs

    def entry(self, value: bytes, sent_ms: int, slot: int) -> int:
        return _number(self._entry_ids, self.entries, Entry(value, sent_ms, slot))

    def record(self, record: Record, sent_ms: int, slot: int) -> int:
        return self.entry(codec.encode(record, GROUP, INCARNATION), sent_ms, slot)

    def append(self, log: int, entry: int) -> int:
        """Returns the number of the log that follows `log` when this record is appended. The rationalizer and the
        oracle fold it.
        """
        known = self._log_ids.get((log, entry))
        if known is not None:
            return known
        made = self._log_ids[log, entry] = len(self.parents)
        self.parents.append(log)
        self.newest.append(entry)
        self.paths.append((*self.paths[log], made))
        value, sent_ms, slot = self.entries[entry]
        name = blake2b(b"%d %d %d " % (self.stable_ids[log], sent_ms, slot) + value, digest_size=8).digest()
        self.stable_ids.append(int.from_bytes(name, "big"))
        facts = self.facts[log].then(GROUP, value, sent_ms)
        self.facts.append(facts)
        broken = facts.broken
        try:
            world, verdict = self.world(made)
            assert verdict is not None
            group = world.groups.get(GROUP)
            held = 0 if group is None else group.digest()
            broken = broken or judge_fold(facts, verdict.outcome.name.lower(), verdict.reason, held)
            world.check()
        except (CoordinationError, AssertionError) as error:
            broken = broken or f"S1: {type(error).__name__}: {error}"
        if broken:
            self.broken_logs[made] = broken
        return made

    def world(self, log: int, loaded: int = 0) -> tuple[World, Verdict | None]:
        """Returns the rationalizer's world of a log, which must not be changed, and its verdict on the newest record.

        `loaded` is the log whose checkpoint's snapshot the reader began with; 0 for a reader that folded the log from
        its start.
        """
        found = self._worlds.get((log, loaded))
        if found is not None:
            self._worlds.move_to_end((log, loaded))
            return found
        verdict = None
        if not log:
            world = World()
        elif log == loaded:
            world = _reloaded(self.world(log)[0])
        else:
            world = pickle.loads(pickle.dumps(self.world(self.parents[log], loaded)[0], 5))
            verdict = rationalizer.apply(world, world.next_offset, self.entries[self.newest[log]].value)
        world.watched.add(GROUP)
        self._worlds[log, loaded] = world, verdict
        if len(self._worlds) > WORLDS_KEPT:
            self._worlds.popitem(last=False)
        return world, verdict

    # --- networks, journals

    def network(self, network: Network) -> int:
        return _number(self._network_ids, self.networks, network)

    def journal(self, marks: frozenset[Mark]) -> int:
        return _number(self._journal_ids, self.journals, marks)

    # --- processes

    def put(self, actor: Actor, log: int) -> int:
        """Stores an actor that has read `log`, and returns the number of its condition."""
        actor.attach(None)
        key = (log, digest(actor))
        known = self._local_ids.get(key)
        if known is not None:
            return known
        due = max(0, -(-(actor.deadline_ms - ORIGIN_MS) // QUANTUM_MS))
        view = View(log, 0 if actor.woken else due, actor.over, actor.said, actor.handler_messages())
        return self.adopt(Frozen(view, key[1], zlib.compress(pickle.dumps(actor, 5), 1)))

    def adopt(self, frozen: Frozen) -> int:
        """Returns the number of a condition that this or another search process has stored."""
        key = (frozen.view.log, frozen.digest)
        known = self._local_ids.get(key)
        if known is None:
            known = self._local_ids[key] = len(self.views)
            self.views.append(frozen.view)
            self._digests.append(frozen.digest)
            self._frozen.append(frozen.actor)
        return known

    def frozen(self, local: int) -> Frozen:
        return Frozen(self.views[local], self._digests[local], self._frozen[local])

    def conditions(self) -> set[tuple[int, bytes]]:
        """Returns all conditions that were met, by names that are the same in every search process."""
        met = zip(self.views[GONE + 1 :], self._digests[GONE + 1 :], strict=True)
        return {(self.stable_ids[view.log], digest) for view, digest in met}

    def get(self, local: int) -> Actor:
        """Returns an actor in this condition, to continue from."""
        actor: Actor = pickle.loads(zlib.decompress(self._frozen[local]))
        actor.attach(self._world_of(actor, self.views[local].log)[0])
        return actor

    def _world_of(self, actor: Actor, log: int) -> tuple[World, Verdict | None]:
        """Returns the world of a log as `actor` would hold it after reading that log."""
        return self.world(log, self.paths[log][actor.loaded])

    def born(self, actor: Actor, log: int, quanta: int) -> int:
        """Stores an actor that has read the whole log and has done nothing yet; returns the number of its condition."""
        actor.note_extensions(self._world_of(actor, log)[0], moment_ms(quanta))
        return self.put(actor, log)

    def after(
        self, local: int, slot: int, what: str, argument: int, event: Callable[[Actor, Effects], None]
    ) -> Outcome:
        """Returns the result of `event` on a process that reads nothing meanwhile."""
        return self._after(self.get(local), self.views[local].log, slot, what, argument, event)

    def _after(
        self, actor: Actor, log: int, slot: int, what: str, argument: int, event: Callable[[Actor, Effects], None]
    ) -> Outcome:
        self.events += 1
        effects = Effects()
        event(actor, effects)
        sent = tuple(self.record(record, ms, slot) for record, ms in effects.sent)
        facts, delivery, mark = self.facts[log], None, None
        if actor.loaded and not effects.broken:
            group = self._world_of(actor, log)[0].groups.get(GROUP)
            if (0 if group is None else group.digest()) != facts.digest:
                effects.broken = "S1: another world than the oracle's, from a snapshot"
        if effects.handed is not None:
            epoch, offset, first = effects.handed
            assert isinstance(actor, Consumer)
            delivery = Delivery(actor.member.newest_instance, epoch, offset, first)
            if facts.mode == 2 and epoch in facts.claims:
                mark = begun(facts.claims[epoch], offset)
        elif effects.ended is not None and facts.mode == 1 and effects.ended[0] in facts.claims:
            mark = finished(facts.claims[effects.ended[0]], effects.ended[1])
        return Outcome(what, argument, self.put(actor, log), sent, delivery, mark, effects.broken)

    def reads(self, local: int, slot: int, log: int, quanta: int) -> Outcome:
        """Returns the result of reading on to the end of `log` and of the tick that follows."""
        path, read = self.paths[log], len(self.paths[self.views[local].log])
        now_ms = moment_ms(quanta)

        def event(actor: Actor, effects: Effects) -> None:
            for further in path[read:]:
                world, verdict = self._world_of(actor, further)
                assert verdict is not None
                actor.read(world, verdict, now_ms)
            actor.tick(now_ms, effects)

        return self._after(self.get(local), log, slot, "read", len(path) - read, event)

    def moves(self, local: int, slot: int, quanta: int) -> tuple[Outcome, ...]:
        """Returns the result of each thing that a process can do by itself right now."""
        now_ms, view, found = moment_ms(quanta), self.views[local], []
        if view.due_quanta <= quanta and not view.over:
            found.append(self.after(local, slot, "tick", 0, lambda actor, effects: actor.tick(now_ms, effects)))
        actor = self.get(local)
        for epoch in actor.next_epochs():

            def deliver(actor: Actor, effects: Effects, epoch: int = epoch) -> None:
                assert isinstance(actor, Consumer)
                actor.deliver(epoch, now_ms, effects)

            outcome = self.after(local, slot, "deliver", epoch, deliver)
            if outcome.delivery is not None:
                found.append(outcome)
        for at in range(len(view.handler_messages)):

            def finish(actor: Actor, effects: Effects, at: int = at) -> None:
                assert isinstance(actor, Consumer)
                actor.finish(at, now_ms, effects)

            found.append(self.after(local, slot, "finish", at, finish))
        return tuple(found)

    def leave(self, local: int, slot: int, quanta: int) -> Outcome | None:
        """Returns the result when the user stops the consumer, or None if there is no running consumer in this
        condition.
        """
        actor = self.get(local)
        if not isinstance(actor, Consumer) or actor.over or actor.member.leaving:
            return None
        now_ms = moment_ms(quanta)

        def event(actor: Actor, effects: Effects) -> None:
            assert isinstance(actor, Consumer)
            actor.leave(now_ms, effects)

        return self.after(local, slot, "leave", 0, event)

    def will(self, local: int, quanta: int) -> tuple[int, ...]:
        """Returns the records that execute the will of a consumer in this condition (T19)."""
        actor = self.get(local)
        assert isinstance(actor, Consumer)
        will = actor.member.last_will()
        made = [] if will is None else records.records_of(will, "signal 9")
        return tuple(self.record(record, moment_ms(quanta), -1) for record in made)

    def runs(self, local: int, slot: int, quanta: int) -> Outcome:
        """Returns the result of letting QUANTUM_MS pass while the process runs."""
        now_ms = moment_ms(quanta)
        return self.after(local, slot, "run", 0, lambda a, effects: a.run(now_ms, now_ms + QUANTUM_MS, effects))

    # --- words

    def describe_entry(self, entry: int) -> str:
        value, sent_ms, _ = self.entries[entry]
        opened = codec.open_envelope(value, crc32(INCARNATION))
        record = codec.decode_body(opened[3], opened[4]) if opened is not None and opened[3] <= codec.TYPE_MAX else None
        if record is None:
            return "a record that this library does not read"
        fields = ", ".join(f"{name} {getattr(record, name)}" for name in SHOWN_FIELDS if hasattr(record, name))
        return f"{type(record).__name__} ({fields}; sent at {sent_ms - ORIGIN_MS} ms)"

    def describe_record(self, log: int, entry: int) -> str:
        """Returns a sentence about the record that is appended to this log, with its verdict."""
        made = self._log_ids.get((log, entry))
        facts = self.facts[made] if made is not None else None
        fate = f"{facts.outcome} {facts.reason}".strip() if facts is not None else "not folded"
        return f"{self.describe_entry(entry)} comes to offset {len(self.paths[log]) - 1}: {fate}"


def _reloaded(world: World) -> World:
    """Returns a world at a checkpoint as a new reader would hold it: written as a snapshot and read again."""
    data = snapshot.state_of(world)
    assert data is not None
    assert world.genesis is not None
    store, found = snapshot.SnapshotStore(INCARNATION), None
    digest_ = snapshot.digest_of(world)
    for record in snapshot.split(world.genesis, INCARNATION, world.chain_at, digest_, world.chain, data):
        found = store.take(record, world.next_offset) or found
    assert found is not None
    loaded = snapshot.load(found, 0)
    assert loaded is not None
    return loaded


def _number(ids: dict[T, int], table: list[T], value: T) -> int:
    known = ids.get(value)
    if known is None:
        known = ids[value] = len(table)
        table.append(value)
    return known
