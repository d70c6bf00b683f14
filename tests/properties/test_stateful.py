"""Whole lives of a log, rule by rule: hypothesis chooses the writes, and how far and from where readers read.

`DifferentialLog` compares the rationalizer with the oracle after every record, and asserts that what was not accepted
changed no group. Beside it there is a third, much smaller model, of owners alone: who may own a partition follows from
verdicts, not from a state. Readers of every kind must come to the digests that were taken when the record was written.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.rationalizer import Outcome, Verdict, apply
from marshal_py.protocol.fold.snapshot import Stored
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import (
    ClaimingPartition,
    Evict,
    GroupConfig,
    Join,
    Leave,
    ReleasingPartition,
    SeekingPartition,
)
from marshal_sim.mutants.mutants import MUTANTS, switched_on
from marshal_sim.oracle.oracle import Oracle
from tests.support import hostile
from tests.support.differential_log import INCARNATION, DifferentialLog, digest_from_scratch

SEEDS = st.integers(0, 2**32 - 1)
READERS_MAX = 4  # each folds every record: more would only be slower

Digests = tuple[dict[str, int], int, int]


def digests_of(world: World) -> Digests:
    return {name: digest_from_scratch(group) for name, group in world.groups.items()}, world.chain_at, world.chain


class Owners:
    """The owners of partitions, from accepted records alone."""

    def __init__(self) -> None:
        self.claims: dict[tuple[str, str, int], tuple[int, int]] = {}  # group, topic, partition -> (session, epoch)
        self.newest: dict[tuple[str, str, int], int] = {}
        self.modes: dict[str, int] = {}

    def read(self, verdict: Verdict) -> None:
        if not verdict.accepted:
            return
        group, record = verdict.group, verdict.record
        match record:
            case ClaimingPartition():
                key = (group, record.topic, record.partition)
                assert key not in self.claims, f"two owners of {key}: {self.claims[key]} and {verdict}"
                assert self.newest.get(key, -1) < verdict.offset
                self.claims[key] = (record.session, verdict.offset)
                self.newest[key] = verdict.offset
            case ReleasingPartition():
                key = next(key for key, claim in self.claims.items() if claim == (record.session, record.epoch))
                assert key[0] == group
                del self.claims[key]
            case SeekingPartition():
                key = next(key for key, claim in self.claims.items() if claim == (record.session, record.epoch))
                assert key[0] == group
                self.claims[key] = (record.session, verdict.offset)
                self.newest[key] = verdict.offset
            case Leave() | Evict():
                self._end(group, {record.session})
            case Join():
                self._end(group, {record.predecessor})
                self.modes[group] = record.mode
            case GroupConfig() if record.deleted:
                assert not any(key[0] == group for key in self.claims), "F9.5: no session, no claim"
                self.modes[group] = 0
            case GroupConfig() if record.mode:
                if self.modes.get(group, 0) not in (0, record.mode):
                    self._end(group, {session for key, (session, _) in self.claims.items() if key[0] == group})
                self.modes[group] = record.mode
            case _:
                pass

    def _end(self, group: str, sessions: set[int]) -> None:
        for key, (session, _) in list(self.claims.items()):
            if key[0] == group and session in sessions:
                del self.claims[key]


class LogLife(RuleBasedStateMachine):
    """One log, its writers and its readers."""

    late: Bundle[bytes] = Bundle("late")

    def __init__(self) -> None:
        super().__init__()
        self.log = DifferentialLog()
        self.owners = Owners()
        self.taken: list[Digests] = [digests_of(World()), digests_of(self.log.world)]  # by number of records
        self.readers: list[World] = []

    def write(self, value: bytes | None) -> None:
        """Appends one record; a value that would stop the log is left out, because every reader stops there."""
        verdict, _ = self.log.fold(value)
        if verdict is None:
            return
        self.owners.read(verdict)
        self.taken.append(digests_of(self.log.world))
        for reader in self.readers:
            assert apply(reader, reader.next_offset, value) == verdict

    # --- writers

    @rule(seed=SEEDS, count=st.integers(1, 12))
    def members_write(self, seed: int, count: int) -> None:
        rng = Random(seed)
        for _ in range(count):
            name = rng.choice(hostile.GROUPS[:2])
            self.write(codec.encode(hostile.plausible(rng, self.log.world, name), name, INCARNATION))

    @rule(seed=SEEDS)
    def an_enemy_writes(self, seed: int) -> None:
        self.write(hostile.hostile(Random(seed), self.log.world, self.log.values))

    @rule(target=late, seed=SEEDS)
    def a_record_is_held_up(self, seed: int) -> bytes:
        """It was right when it was sent, and comes later, or twice, or never."""
        rng = Random(seed)
        name = rng.choice(hostile.GROUPS[:2])
        return codec.encode(hostile.plausible(rng, self.log.world, name), name, INCARNATION)

    @rule(value=late)
    def it_comes(self, value: bytes) -> None:
        self.write(value)

    @rule(at=st.integers(0, 2**16))
    def a_copy_comes(self, at: int) -> None:
        self.write(self.log.values[at % len(self.log.values)])

    # --- readers

    @rule(cuts=st.lists(st.integers(0, 2**16), max_size=4))
    def read_in_pieces(self, cuts: list[int]) -> None:
        """Any chunking: at each cut the rationalizer and the oracle have the state of when that record was written."""
        values = self.log.values
        world, oracle = World(), Oracle()
        for end in sorted({cut % (len(values) + 1) for cut in cuts} | {len(values)}):
            for value in values[world.next_offset : end]:
                apply(world, world.next_offset, value)
                oracle.apply(oracle.next_offset, value)
            assert digests_of(world) == self.taken[end]
            assert {name: oracle.state_digest(name) for name in oracle.groups} == self.taken[end][0]
            assert oracle.chain_digest() == self.taken[end][1:]

    @rule(at=st.integers(0, 2**16))
    def start_from_a_snapshot(self, at: int) -> None:
        """At any checkpoint: a loaded world continues like a folded one."""
        point = at % (len(self.log.values) // CHECKPOINT_OFFSETS + 1) * CHECKPOINT_OFFSETS
        world = World()
        for value in self.log.values[:point]:
            apply(world, world.next_offset, value)
        loaded = snapshot_of(world)
        if loaded is None:
            return
        for value in self.log.values[point:]:
            apply(loaded, loaded.next_offset, value)
        self.readers = [*self.readers, loaded][-READERS_MAX:]

    @invariant()
    def everybody_holds_the_same(self) -> None:
        for reader in self.readers:
            assert digests_of(reader) == self.taken[-1]
        owned = {
            (name, p.tp.topic, p.tp.partition): (p.owner, p.epoch)
            for name, group in self.log.world.groups.items()
            for p in group.claims.values()
        }
        assert owned == self.owners.claims


def snapshot_of(world: World) -> World | None:
    """The world that a reader loads from the snapshot of this one; None where there is nothing to write yet."""
    data = snapshot.state_of(world)
    if data is None or world.genesis is None or not world.next_offset:
        return None
    return snapshot.load(stored_of(world, data), 0)


def stored_of(world: World, data: bytes) -> Stored:
    assert world.genesis is not None
    store = snapshot.SnapshotStore(INCARNATION)
    found = None
    digest = snapshot.digest_of(world)
    for record in snapshot.split(world.genesis, b"i" * 16, world.chain_at, digest, world.chain, data):
        found = store.take(record, world.next_offset) or found
    assert found is not None
    return found


TestLogLife = LogLife.TestCase
TestLogLife.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("mutant", ["X22", "X28", "X32", "G2"])
def test_a_planted_bug_is_found(mutant: str) -> None:
    """F10.2: a check that cannot fail is a defect."""
    with switched_on(MUTANTS[mutant]), pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(LogLife, settings=settings(max_examples=100, phases=[Phase.generate]))


def test_two_owners_are_noticed() -> None:
    """The third model does not lean on the other two."""
    owners = Owners()
    claims = [Verdict(at, Outcome.ACCEPTED, "", "g", ClaimingPartition(at, "t", 0, -1)) for at in (3, 4)]
    owners.read(claims[0])
    with pytest.raises(AssertionError, match="two owners"):
        owners.read(claims[1])


def test_a_snapshot_is_taken_and_loaded() -> None:
    """The rule of the machine is not idle: most logs have a snapshot at their checkpoints."""
    life = LogLife()
    for seed in range(20):
        life.members_write(seed, 4)
    life.start_from_a_snapshot(3)
    assert life.readers
    life.members_write(99, 8)
    life.everybody_holds_the_same()
