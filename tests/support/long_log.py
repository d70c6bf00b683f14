"""A long log for tests of those that look: one group that consumes, with confirmed snapshots on the way, as a dump."""

from __future__ import annotations

from pathlib import Path

from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.rationalizer import Verdict, apply
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import Record, Snapshot
from marshal_py.transport.ports import LogRecord
from tests.support import dumps
from tests.support.differential_log import INCARNATION, genesis

STEP_MS = 1_000  # a record per second
GROUP = "g"


class LongLog:
    """Log 0 of a coordination topic with one partition. Record N was written N seconds after dumps.BEGIN_MS."""

    def __init__(self) -> None:
        self.world = World()
        self.records: list[LogRecord] = []
        self.snapshots: list[int] = []  # their checkpoints
        self._append(genesis(1))

    def tell(self, record: Record, group: str = GROUP) -> int:
        """Appends a record that the fold accepts. Returns its offset."""
        verdict = self._append(codec.encode(record, group, INCARNATION))
        assert verdict.accepted, verdict.reason
        return verdict.offset

    def vouch(self) -> int:
        """Appends a confirmed snapshot of the state at the next checkpoint. Returns the checkpoint."""
        while self.world.next_offset % CHECKPOINT_OFFSETS:
            self._append(b"filler")
        world, data = self.world, snapshot.state_of(self.world)
        assert data is not None
        assert world.genesis is not None
        at, state = world.next_offset, snapshot.digest_of(world)
        chunks = snapshot.split(world.genesis, b"w" * 16, at, state, world.chain, data)
        for record in (*chunks, snapshot.witness(world.genesis, b"v" * 16, at, state, world.chain)):
            assert isinstance(record, Snapshot)
            self._append(codec.encode(record, "", INCARNATION))
        self.snapshots.append(at)
        return at

    def dump(self, path: Path, first: int = 0) -> Path:
        """Writes the log as a dump, without the records below `first`, which were deleted."""
        return dumps.write(path, [record for record in self.records if record.offset >= first])

    def _append(self, value: bytes) -> Verdict:
        offset = self.world.next_offset
        self.records.append(LogRecord(0, offset, value, dumps.BEGIN_MS + offset * STEP_MS))
        return apply(self.world, offset, value)
