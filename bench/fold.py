"""How fast does a reader that starts from nothing fold the history of a log, with digests?

One process, no broker: a log as 20 consumers of one group with 100 partitions write it (heartbeats with one and with
four changed claims, and with digests), folded from the first record. It is compared with a bare loop that only decodes
the bodies of the same records, in the same run. CPU time, so that other processes do not count.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any, Final

from bench.environment import BenchEnvironment, Result, spread
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME
from marshal_py.protocol.wire.records import (
    Checkpoint,
    ClaimingPartition,
    ClaimState,
    Genesis,
    Heartbeat,
    Join,
    Record,
    Topology,
)

RECORDS: Final = 200_000
RECORDS_TINY: Final = 4_000
ROUNDS: Final = 5
MEMBERS: Final = 20
PARTITIONS: Final = 100
GROUP: Final = "billing"
INCARNATION: Final = bytes(range(16))


def history(records: int, claims: int, group: str = GROUP, logs: int = 1) -> list[bytes]:
    """The values of a log of this length: joins, topology and claims, then heartbeats of the members in turn."""
    random = Random(1)
    opening: list[Record] = [Join(f"client-{m}", random.randbytes(16), 1, 2_000, ("orders",)) for m in range(MEMBERS)]
    opening.append(Topology("orders", PARTITIONS, -1))
    epochs = range(MEMBERS + 2, MEMBERS + 2 + PARTITIONS)
    opening += [ClaimingPartition(1 + p % MEMBERS, "orders", p, -1, 0) for p in range(PARTITIONS)]
    values = [codec.encode(Genesis(INCARNATION, logs, HASH_NAME, 2), "", INCARNATION)]
    values += [codec.encode(record, group, INCARNATION) for record in opening]
    for beat in range(records - len(values)):
        member, turn = beat % MEMBERS, beat // MEMBERS
        own = [epochs[(member + MEMBERS * ((turn + k) % (PARTITIONS // MEMBERS))) % PARTITIONS] for k in range(claims)]
        changed = tuple(ClaimState(epoch, beat, 3, 1) for epoch in own)
        digest = Checkpoint(len(values) // 16 * 16, random.getrandbits(64), random.getrandbits(64), 1)
        values.append(codec.encode(Heartbeat(1 + member, beat, changed, (), None, digest), group, INCARNATION))
    return values


def fold(values: list[bytes]) -> tuple[float, int]:
    """CPU seconds of a fold from the first record with the group watched, and the digest at its end."""
    world = World()
    world.watched.add(GROUP)
    apply = rationalizer.apply
    began = time.process_time()
    for offset, value in enumerate(values):
        apply(world, offset, value)
    took_s = time.process_time() - began
    world.check()
    return took_s, world.checkpoints[GROUP].state


def decode(values: list[bytes]) -> float:
    """CPU seconds of decoding the bodies alone."""
    bodies = [(value[13 + value[11]], value[14 + value[11] :]) for value in values]
    began = time.process_time()
    for kind, body in bodies:
        codec.decode_body(kind, body)
    return time.process_time() - began


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    rows: list[list[Any]] = []
    for claims, goal in ((1, 300), (4, 200)):
        values = history(RECORDS_TINY if tiny else RECORDS, claims)
        folds, decodes, digest = [], [], 0
        for _ in range(1 if tiny else ROUNDS):
            took_s, digest = fold(values)
            folds.append(len(values) / took_s / 1000)
            decodes.append(len(values) / decode(values) / 1000)
        ratio = spread([f / d for f, d in zip(folds, decodes, strict=True)])
        rows.append(
            [
                f"{claims} changed claim(s) per heartbeat",
                spread(folds),
                spread(decodes),
                ratio,
                goal,
                f"{len(values):,} #{digest >> 32:08x}",
            ]
        )
    columns = ["history", "fold, thousand records/s", "bare decode, thousand/s", "ratio", "goal", "work"]
    return Result("fold", columns, rows, ["one process, CPU time, digests of the group at every checkpoint"])
