"""The rationalizer and the oracle agree on any log: verdicts, reasons, digests, chain, where to stop.

A log is a list of (seed, count): each seed writes so many records with a generator that looks at the world so far
(`tests/support/hostile`). So hypothesis can drop some from a failing log and the others still mean something.
`DifferentialLog` compares both folds after every record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.protocol.fold.rationalizer import Verdict, apply
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    ClaimingMessages,
    GroupConfig,
    Heartbeat,
    Join,
    Note,
    ReleasingPartition,
    SeekingPartition,
    StepDown,
    Topology,
)
from tests.support import hostile, wire
from tests.support.differential_log import INCARNATION, DifferentialLog, Opened, digest_from_scratch, genesis
from tests.support.hostile_records import flood

STEPS = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 12)), max_size=30)
PARTITIONS = st.sampled_from((1, 1, 1, 2))  # two logs: some groups are misrouted then

BULK_RECORDS = 25_000  # of each seed: every planted bug of the fold is found within 10,000 of the first one
BULK_SEEDS = (20_240_229, 30_240_229, 40_240_229, 50_240_229)


Steps = list[tuple[int, int]]


def drawn(steps: Steps) -> Iterator[Random]:
    """One generator per record."""
    for seed, count in steps:
        rng = Random(seed)
        yield from (rng for _ in range(count))


def plausible_log(steps: Steps, partitions: int = 1) -> DifferentialLog:
    log = DifferentialLog(partitions)
    for rng in drawn(steps):
        name = rng.choice(hostile.GROUPS[:2])
        log.fold(codec.encode(hostile.plausible(rng, log.world, name), name, INCARNATION))
    return log


def digests(world: World) -> dict[str, int]:
    return {name: digest_from_scratch(group) for name, group in world.groups.items()}


@given(STEPS, PARTITIONS)
def test_on_logs_that_fit(steps: Steps, partitions: int) -> None:
    """F10.2: what members and admins write."""
    plausible_log(steps, partitions)


def test_logs_that_fit_reach_everywhere() -> None:
    """The generator is worth its name: every type of record is accepted, every reason given, in a few logs."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        rng = Random(seed)
        log = DifferentialLog()
        for _ in range(100):
            name = hostile.GROUPS[0]
            record = hostile.plausible(rng, log.world, name)
            verdict = log.put(codec.encode(record, name, INCARNATION))
            seen[type(record).__name__ if verdict.accepted else verdict.reason] += 1
    types = {kind.__name__ for kind in codec.RECORD_TYPES} - {"Genesis", "Snapshot"}
    assert types <= seen.keys()
    reasons = {"instance", "mode", "predecessor", "session", "observed", "waited", "paused", "topology", "held"}
    reasons |= {"start", "claim", "from", "range", "token", "empty", "repeats", "same", "sessions", "deleted", "parked"}
    assert reasons <= seen.keys()
    assert sum(seen[name] for name in types) > sum(seen[name] for name in reasons)


def test_valid_logs_exercise_all_that_protocol_2_allows() -> None:
    """F5.2, F6.3, F6.4, F6.6, F9.5, F9.10: each of them is accepted often enough, with all kinds of progress."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        rng = Random(seed)
        log = DifferentialLog(exhaustive=False)
        name = hostile.GROUPS[0]
        for _ in range(100):
            group = log.world.groups.get(name)
            ids = {topic: known.id for topic, known in group.topics.items()} if group else {}
            mode = group.mode if group else 0
            verdict = log.put(codec.encode(hostile.plausible(rng, log.world, name), name, INCARNATION))
            seen.update(done_by(verdict, ids, mode) if verdict.accepted else ())
    few = {what: seen[what] for what in ALLOWED if seen[what] < 4}
    assert not few, f"seldom or never: {few}"


ALLOWED = (
    "one of many",
    "many of many",
    "given back",
    "parked",
    "sought",
    "deleted",
    "revived",
    "recreated",
    "id learned",
    "512 bytes",
    "progress",
    "idle",
)


def done_by(verdict: Verdict, ids: dict[str, str], mode: int) -> Iterator[str]:
    """What an accepted record did. `ids`, `mode`: of the topics and of the group before it."""
    match verdict.record:
        case ClaimingMessages(ranges=ranges) if len(ranges) > 1:
            yield "one of many" if len(verdict.granted) == 1 else "many of many"
        case ReleasingPartition() as record:
            if mode == AT_MOST_ONCE and record.observed >= 0:
                yield "given back"
            if record.parked:
                yield "parked"
        case SeekingPartition():
            yield "sought"
        case GroupConfig() as record:
            yield "deleted" if record.deleted else "revived" if mode == 0 else "configured"
        case Topology(topic=topic, topic_id=topic_id) if topic_id and ids.get(topic) is not None:
            yield "id learned" if ids[topic] == "" else "same id" if ids[topic] == topic_id else "recreated"
        case Heartbeat() as record:
            if record.idle_ms:
                yield "idle"
            for entry in record.claims:
                if entry.progress:
                    yield "512 bytes" if len(entry.progress) == 512 else "progress"


@given(STEPS, st.randoms(use_true_random=False))
def test_on_logs_out_of_order(steps: Steps, rng: Random) -> None:
    """Records twice, late, missing, in any order (L9, the half that is the fold's)."""
    source = plausible_log(steps)
    values = [value for value in source.values[1:] for _ in range(rng.choice((0, 1, 1, 2)))]
    for _ in range(rng.randrange(5)):
        if values:
            values.insert(rng.randrange(len(values) + 1), values.pop(rng.randrange(len(values))))
    if rng.random() < 0.3:
        rng.shuffle(values)
    log = DifferentialLog()
    for value in values:
        log.fold(value)


# A heartbeat sets what it set before, and moves no position back. A Join begins a session that owns nothing. A mark
# that a GroupConfig cleared (F9.7) may be set by a copy; marks guide only (F9.9).
TWICE = (Join, Heartbeat, StepDown, Note)


def end_and_revive(log: DifferentialLog, name: str) -> None:
    """Every session leaves, the group is deleted and, at once, revived."""
    revived = False
    while not revived:
        record = hostile.ending(log.world.groups[name])
        assert log.put(codec.encode(record, name, INCARNATION)).accepted
        revived = isinstance(record, GroupConfig) and not record.deleted


@given(STEPS, st.randoms(use_true_random=False))
def test_on_groups_that_end_and_begin_again(steps: Steps, rng: Random) -> None:
    """F9.5: deletions, revivals, and late copies of what was written before; generations never come again."""
    log = DifferentialLog()
    name = hostile.GROUPS[0]
    generations: dict[tuple[str, int], int] = {}
    for draw in drawn(steps):
        log.fold(codec.encode(hostile.plausible(draw, log.world, name), name, INCARNATION))
        group = log.world.groups.get(name)
        if group is None:
            continue
        for tp, known in group.partitions.items():
            assert known.generation >= generations.get(tp, 0)
            generations[tp] = known.generation
        if rng.random() < 0.05:
            end_and_revive(log, name)
            for _ in range(rng.randrange(9)):
                log.fold(rng.choice(log.values))


@given(STEPS)
def test_a_log_read_twice(steps: Steps) -> None:
    """A log, followed by two copies of itself (L9): no copy is accepted where that would matter."""
    source = plausible_log(steps)
    log = DifferentialLog()
    accepted: set[tuple[bytes, int]] = set()
    for value in source.values[1:] * 3:
        assert value is not None
        verdict = log.put(value)
        if verdict.accepted and not isinstance(verdict.record, TWICE):
            # F5.2: what is granted once is one range; a copy may be granted another one of the same record.
            parts = verdict.granted if isinstance(verdict.record, ClaimingMessages) else (0,)
            for part in parts:
                assert (value, part) not in accepted, f"{verdict.record} was accepted twice"
                accepted.add((value, part))


@given(STEPS, PARTITIONS, st.integers(0, 2))
def test_on_hostile_logs(steps: Steps, partitions: int, start: int) -> None:
    """E6: any bytes: nothing but the named errors is raised, and a rejected or ignored record changes no group."""
    log = DifferentialLog(start=False) if start == 0 else DifferentialLog(partitions)
    for rng in drawn(steps):
        log.fold(hostile.hostile(rng, log.world, log.values))
        if log.world.genesis is None and rng.random() < 0.2:
            log.fold(genesis(partitions))


@given(STEPS)
def test_on_hostile_further_logs(steps: Steps) -> None:
    """L4: in a log k > 0 with a root."""
    log = DifferentialLog(log=1, root=genesis(2), start=False)
    for rng in drawn(steps):
        log.fold(hostile.hostile(rng, log.world, log.values))
        if log.world.genesis is None and rng.random() < 0.3:
            log.fold(genesis(2))


def replay(values: list[bytes | None], world: World) -> tuple[World, list[Verdict]]:
    return world, [apply(world, world.next_offset, value) for value in values]


@given(STEPS, st.lists(st.integers(0, 99), max_size=6))
def test_any_chunking_and_any_restart(steps: Steps, cuts: list[int]) -> None:
    """G3: same log, same world: read in pieces with digests taken between them, or from the start at any point."""
    log = DifferentialLog()
    for rng in drawn(steps):
        log.fold(hostile.hostile(rng, log.world, log.values))
    values = log.values
    whole, verdicts = replay(values, World())
    pieces, folded = World(), []
    bounds = sorted({min(cut, len(values)) for cut in cuts} | {len(values)})
    for start, end in zip([0, *bounds], bounds, strict=False):
        folded += replay(values[start:end], pieces)[1]
        # A reader that starts again here folds from 0, and must come to the same state as one that continued.
        again, _ = replay(values[:end], World())
        assert {name: group.digest() for name, group in pieces.groups.items()} == digests(again)
        assert (pieces.chain_at, pieces.chain) == (again.chain_at, again.chain)
    assert folded == verdicts
    assert digests(pieces) == digests(whole) == digests(log.world)
    assert (whole.chain_at, whole.chain, whole.next_offset) == (log.world.chain_at, log.world.chain, len(values))
    assert whole.counters == pieces.counters == log.world.counters


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.integers(0, 9), inner, max_size=3),
    max_leaves=30,
)


@given(st.integers(0, 16), st.lists(JUNK, max_size=20), st.binary(max_size=8))
def test_on_any_messagepack(number: int, elements: list[object], tail: bytes) -> None:
    """E6: a body of any shape under any type; what one fold decodes the other decodes, to the same values."""
    log = DifferentialLog()
    for body in ([number, *elements], elements):
        log.put(wire.envelope("billing", number, wire.pack(body)))
    log.put(wire.envelope("other", number % 16, wire.pack([number, *elements]) + tail))


@given(st.integers(-1, 2**32 - 1), st.binary(max_size=120), st.integers(0, 15))
def test_decoding_raises_nothing(seed: int, data: bytes, kind: int) -> None:
    """E1: a foreign writer must not be able to stop the readers."""
    assert codec.open_envelope(data, seed) is None or data[:2] == b"Mr"
    codec.decode_body(kind, data)
    codec.open_envelope(wire.envelope("", 14 * (kind % 2), data), crc32(INCARNATION))
    envelope = codec.open_envelope(wire.envelope("g", kind, data), crc32(INCARNATION))
    assert envelope is not None
    opened = Opened(*envelope)
    assert (opened.group, opened.type, opened.body) == ("g", kind, data)


@given(st.integers(0, 2**32 - 1))
def test_what_is_written_is_read(seed: int) -> None:
    """E7: encode, open and decode give the record back, and MessagePack in other forms the same record."""
    rng = Random(seed)
    log = DifferentialLog()
    for _ in range(rng.randrange(12)):
        log.fold(codec.encode(hostile.plausible(rng, log.world, "g"), "g", INCARNATION))
    record = hostile.plausible(rng, log.world, "g")
    envelope = codec.open_envelope(codec.encode(record, "g", INCARNATION), crc32(INCARNATION))
    assert envelope is not None
    opened = Opened(*envelope)
    assert codec.decode_body(opened.type, opened.body) == record
    tree = msgspec.msgpack.decode(opened.body)
    for head in (b"\xdc" + len(tree).to_bytes(2, "big"), b"\xdd" + len(tree).to_bytes(4, "big")):
        other = head + b"".join(map(wire.pack, tree))
        assert codec.decode_body(opened.type, other) == record


@pytest.mark.parametrize(
    "seed", [BULK_SEEDS[0], *(pytest.param(seed, marks=pytest.mark.proof) for seed in BULK_SEEDS[1:])]
)
def test_a_flood_of_hostile_records(seed: int) -> None:
    """E1, E6: through the codec and both folds; in `make proof` a hundred thousand. `make soak` continues."""
    seen = flood(seed, BULK_RECORDS)
    print(f"seed {seed}:", ", ".join(f"{reason} {count}" for reason, count in seen.most_common()))
    assert seen.total() == BULK_RECORDS
    # A flood that is all garbage proves little: a fair part must get as far as the rules.
    assert seen["accepted"] > BULK_RECORDS // 10
    assert seen["malformed"] > BULK_RECORDS // 20
