"""Folding on from a snapshot gives the same state as folding from the beginning; in both folds.

The library writes the snapshot. The library and the oracle each read it from the records as a log would hold them, in
any order and with copies, and continue beside the folds that began at offset 0.
"""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from marshal_py.errors import CoordinationError
from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.snapshot import SnapshotStore
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import Genesis, Snapshot
from marshal_sim.oracle.oracle import Oracle, OracleStop
from marshal_sim.oracle.snapshot import Snapshots
from marshal_sim.oracle.wire import decode_record
from tests.support import hostile
from tests.support.differential_log import INCARNATION, OTHER_INCARNATION, DifferentialLog, genesis

STEPS = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 12)), min_size=4, max_size=30)


def written(world: World, rng: Random) -> list[bytes]:
    """The records of a snapshot and of its witness, in any order, with copies, and some that mean nothing."""
    data = snapshot.state_of(world)
    assert data is not None
    assert world.genesis is not None
    state, chain, at = snapshot.digest_of(world), world.chain, world.chain_at
    count = rng.randrange(1, 5)
    size = -(-len(data) // count)
    cuts = [data[size * number : size * (number + 1)] for number in range(count)]
    cuts = [cut for cut in cuts if cut]
    chunks = [
        Snapshot(world.genesis, b"1" * 16, at, number, len(cuts), state, chain, cut) for number, cut in enumerate(cuts)
    ]
    stray = Genesis(OTHER_INCARNATION, 1, world.genesis.hash, 2)
    records = [*chunks, *rng.choices(chunks, k=2), snapshot.witness(world.genesis, b"2" * 16, at, state, chain)]
    records += [
        Snapshot(world.genesis, b"1" * 16, at, len(cuts), len(cuts), state, chain, b"beyond the last"),
        Snapshot(world.genesis, b"3" * 16, at, 0, 1, state ^ 1, chain, data),
    ]
    values = [codec.encode(record, "", record.genesis.incarnation) for record in records]
    values.append(codec.encode(snapshot.witness(stray, b"2" * 16, at, state ^ 1, chain), "", OTHER_INCARNATION))
    rng.shuffle(values)
    return values


def loaded(values: list[bytes], log: int, root: bytes | None, at: int) -> tuple[World, Oracle]:
    """What the two readers make of the records."""
    store, read = SnapshotStore(INCARNATION), Snapshots()
    for offset, value in enumerate(values, at):  # where they would stand if they were written at once
        record = codec.open_snapshot(value)
        assert record is not None
        store.take(record, at)
        if record.genesis.incarnation == INCARNATION:  # E2: of the log's own; the others are garbage
            read.read(decode_record(14, value[14:]), offset)
    (stored,) = store.confirmed()
    opened = None if root is None else codec.open_envelope(root, -1)
    root_genesis = None if opened is None else opened[5]
    assert root_genesis is None or isinstance(root_genesis, Genesis)
    world = snapshot.load(stored, log, root_genesis)
    assert world is not None
    ((state, chain),) = read.confirmed(log)
    assert state.at == at
    oracle = Oracle(log, root)
    oracle.begin_at(state, chain)
    return world, oracle


def go_on(log: DifferentialLog, world: World, oracle: Oracle, first: int) -> None:
    """The rest of the log, under the verdicts and digests of the folds that began at 0."""
    for offset in range(first, log.world.next_offset):
        value = log.values[offset]
        verdict, judged = apply(world, offset, value), oracle.apply(offset, value)
        assert (verdict.outcome.name.lower(), verdict.reason) == (judged.outcome, judged.reason)
        if world.chain_at == offset + 1:
            assert oracle.log_digest() == snapshot.digest_of(world)
            assert oracle.chain_digest() == (world.chain_at, world.chain)
    world.check()
    assert snapshot.state_of(world) == snapshot.state_of(log.world)
    assert (world.chain_at, world.chain) == (log.world.chain_at, log.world.chain)
    for name, group in log.world.groups.items():
        assert world.groups[name].digest() == group.digest() == oracle.state_digest(name)


def round_trip(log: DifferentialLog, number: int, root: bytes | None, rng: Random) -> int:
    """Every checkpoint of the log as a beginning; how many there were."""
    opened = None if root is None else codec.open_envelope(root, -1)
    root_genesis = None if opened is None else opened[5]
    assert root_genesis is None or isinstance(root_genesis, Genesis)
    through, done = World(number, root_genesis), 0
    for offset, value in enumerate(log.values):
        apply(through, offset, value)
        at = offset + 1
        if at % 16 or through.genesis is None or snapshot.state_of(through) is None:
            continue
        world, oracle = loaded(written(through, rng), number, root, at)
        assert snapshot.state_of(world) == snapshot.state_of(through), "loaded and written again: the same bytes"
        go_on(log, world, oracle, at)
        done += 1
    return done


@given(STEPS, st.randoms(use_true_random=False))
def test_round_trip_on_logs_that_fit(steps: list[tuple[int, int]], rng: Random) -> None:
    """N9: what members and admins write, cut at every checkpoint."""
    log = DifferentialLog(exhaustive=False)
    for seed, count in steps:
        for _ in range(count):
            name = hostile.GROUPS[seed % 2]
            log.fold(codec.encode(hostile.plausible(Random(seed), log.world, name), name, INCARNATION))
    round_trip(log, 0, None, rng)


@given(STEPS, st.randoms(use_true_random=False), st.booleans())
def test_round_trip_on_hostile_logs(steps: list[tuple[int, int]], rng: Random, further: bool) -> None:
    """N9: with hostile records between; in log 0 and in another one."""
    root = genesis(2) if further else None
    log = (
        DifferentialLog(log=1, root=root, start=False, exhaustive=False)
        if further
        else DifferentialLog(exhaustive=False)
    )
    if further:
        log.put(root)
    for seed, count in steps:
        draw = Random(seed)
        for _ in range(count):
            log.fold(hostile.hostile(draw, log.world, log.values))
    round_trip(log, int(further), root, rng)


def test_the_properties_see_snapshots() -> None:
    """The generators are worth their name: many checkpoints with sessions, claims, pauses and configs in them."""
    done, seen = 0, set()
    for seed in range(12):
        rng = Random(seed)
        log = DifferentialLog(exhaustive=False)
        for _ in range(120):
            name = hostile.GROUPS[0]
            log.fold(codec.encode(hostile.plausible(rng, log.world, name), name, INCARNATION))
        done += round_trip(log, 0, None, rng)
        group = log.world.groups[name]
        seen |= {"sessions"} if group.sessions else set()
        seen |= {"claims"} if group.claims else set()
        seen |= {"config"} if group.config is not None else set()
        seen |= {"pause"} if group.pause_change >= 0 else set()
    assert done >= 12 * 7
    assert seen == {"sessions", "claims", "config", "pause"}


def test_a_founding_snapshot_stops_both() -> None:
    """N13: an oracle that began before it stops; one that began there reads on."""
    log = DifferentialLog()
    while log.world.next_offset < 32:
        log.put(None)
    assert isinstance(log.world.genesis, Genesis)
    values = [
        codec.encode(record, "", INCARNATION) for record in snapshot.founding(log.world.genesis, 0, b"1" * 16, 32)
    ]
    for value in values:
        assert isinstance(log.stops(value), CoordinationError)
    world, oracle = loaded(values, 0, None, 32)
    for offset, value in enumerate(values, 32):
        assert apply(world, offset, value).accepted
        assert oracle.apply(offset, value).outcome == "accepted"
    try:
        Oracle(0).apply(0, values[0])
    except OracleStop as stop:
        raise AssertionError("before a Genesis every Snapshot is garbage (E1)") from stop
