"""What a dump folds to, by the fold that is shipped and by the oracle: verdicts, and all digests of PROTOCOL.md 6.

`states` has the digest of the whole log's state (N3) behind each record, `verdicts` why it was not accepted. Both folds
give the same plain values, which a file can keep: a mapping for each log, digests in hex.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import Genesis
from marshal_py.transport.dump import Reader
from marshal_sim.oracle.oracle import Oracle

CHECKPOINT_OFFSETS = 16  # G1

Fold = Callable[[int, bytes | None], str]  # folds one value; "", or why it was not accepted
Look = Callable[[], tuple[int, int, dict[str, int]]]  # chain digest, digest of the whole state, digests of the groups


def by_the_core(dump: Path) -> dict[str, Any]:
    def begin(log: int, root: bytes) -> tuple[Fold, Look]:
        opened = codec.open_envelope(root, -1)
        assert opened is not None
        assert isinstance(opened[5], Genesis)
        world = World(log, opened[5] if log else None)
        return lambda offset, value: apply(world, offset, value).reason, lambda: (
            world.chain,
            snapshot.digest_of(world),
            {name: group.digest() for name, group in world.groups.items()},
        )

    return _folded(dump, begin)


def by_the_oracle(dump: Path) -> dict[str, Any]:
    def begin(log: int, root: bytes) -> tuple[Fold, Look]:
        oracle = Oracle(log, root if log else None)
        return lambda offset, value: oracle.apply(offset, value).reason, lambda: (
            oracle.chain_digest()[1],
            oracle.log_digest(),
            {name: oracle.state_digest(name) for name in oracle.groups},
        )

    return _folded(dump, begin)


def _folded(dump: Path, begin: Callable[[int, bytes], tuple[Fold, Look]]) -> dict[str, Any]:
    """Log 0 stands first in a dump, and its first record is the root."""
    with Reader(dump) as reader:
        records = list(reader)
    root = records[0].value
    assert root is not None
    logs: dict[str, Any] = {}
    for log in sorted({record.log for record in records}):
        fold, look = begin(log, root)
        told: dict[str, Any] = {"verdicts": [], "states": [], "checkpoints": {}}
        for record in (record for record in records if record.log == log):
            told["verdicts"].append(fold(record.offset, record.value))
            told["states"].append(f"{look()[1]:016x}")
            if (record.offset + 1) % CHECKPOINT_OFFSETS == 0:
                told["checkpoints"][str(record.offset + 1)] = _digests(*look())
        told["end"] = _digests(*look())
        logs[str(log)] = told
    return logs


def _digests(chain: int, state: int, groups: dict[str, int]) -> dict[str, Any]:
    return {
        "chain": f"{chain:016x}",
        "state": f"{state:016x}",
        "groups": {name: f"{digest:016x}" for name, digest in sorted(groups.items())},
    }
