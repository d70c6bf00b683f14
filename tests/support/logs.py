"""Whole coordination topics for tests: several logs with several groups each, from a seed, as raw records."""

from __future__ import annotations

from functools import cache
from itertools import islice
from random import Random

from marshal_py.history.tables import TABLES
from marshal_py.history.timeline import Timeline
from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, route
from marshal_py.protocol.wire.records import Genesis
from tests.support import hostile
from tests.support.differential_log import INCARNATION, genesis

GROUPS_PER_LOG = 2
BEGIN_MS = 1_763_700_000_000  # 2025-11-21 04:40 UTC
STEP_MS = 60_000  # a record per minute: some hundreds reach into the next day

Raw = tuple[int, int, int, bytes | None, bytes | None]  # log, offset, time in ms, key, value


def root(partitions: int) -> Genesis:
    return Genesis(INCARNATION, partitions, HASH_NAME, 2)


def groups_of(log: int, partitions: int) -> list[str]:
    names = (f"group-{number}" for number in range(10_000))
    return list(islice((name for name in names if route(name, partitions) == log), GROUPS_PER_LOG))


@cache
def topic(seed: int, partitions: int, records: int) -> tuple[Raw, ...]:
    """`records` per log, what members and admins write and some garbage; log after log."""
    rows: list[Raw] = []
    for log in range(partitions):
        rng = Random(seed * 1_000 + log)
        world = World(log, None if log == 0 else root(partitions))
        names = groups_of(log, partitions)
        for offset in range(records):
            name = rng.choice(names)
            value = genesis(partitions) if offset == 0 else b"garbage"
            if offset > 0 and rng.random() < 0.98:
                value = codec.encode(hostile.plausible(rng, world, name), name, INCARNATION)
            apply(world, offset, value)
            # Clocks of writers disagree by minutes, so days overlap.
            time_ms = BEGIN_MS + offset * STEP_MS + rng.randrange(-5, 6) * STEP_MS
            rows.append((log, offset, time_ms, name.encode() if rng.random() < 0.9 else None, value))
    return tuple(rows)


def folded(rows: tuple[Raw, ...], partitions: int, tables: tuple[str, ...] = tuple(TABLES)) -> dict[str, list]:
    """The rows of every table, by one process."""
    found: dict[str, list] = {name: [] for name in tables}
    for log in range(partitions):
        timeline = Timeline(World(log, None if log == 0 else root(partitions)), tables)
        for _, offset, time_ms, _, value in (row for row in rows if row[0] == log):
            timeline.read(offset, time_ms, value)
        for name, rows_of_table in timeline.finish().items():
            found[name] += rows_of_table
    return found


def with_snapshots(rows: tuple[Raw, ...], partitions: int, at: int) -> tuple[Raw, ...]:
    """The same topic, in which every log wrote and confirmed a snapshot when it stood at `at`."""
    found: list[Raw] = []
    for log in range(partitions):
        values = [(time_ms, key, value) for number, _, time_ms, key, value in rows if number == log]
        world = World(log, None if log == 0 else root(partitions))
        for offset, (_, _, value) in enumerate(values[:at]):
            apply(world, offset, value)
        data = snapshot.state_of(world)
        assert data is not None
        state = snapshot.digest_of(world)
        records = [
            *snapshot.split(root(partitions), bytes(16), at, state, world.chain, data),
            snapshot.witness(root(partitions), bytes(15) + b"w", at, state, world.chain),
        ]
        values[at:at] = [(values[at][0], None, codec.encode(record, "", INCARNATION)) for record in records]
        found += [(log, offset, time_ms, key, value) for offset, (time_ms, key, value) in enumerate(values)]
    return tuple(found)
