"""Works on whole logs: writes a snapshot, deletes old records, restarts a history whose beginning was deleted.

Each uses a connection of its own, folded to the log's end, with a Snapshotter that judges snapshots as a consumer does
(PROTOCOL.md 15). It creates no topic and no group. It reads back what it wrote before it reports success.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from marshal_py.errors import (
    ClusterUnreachable,
    GroupOpaque,
    HistoryTruncated,
    InvalidOption,
    PartitionError,
    SnapshotNotConfirmed,
    UnsupportedPlatform,
)
from marshal_py.log import replay
from marshal_py.log.reader import POLL_S, READ_TIMEOUT_S, LogReader
from marshal_py.protocol.duties import SNAPSHOT_EVERY_RECORDS, Snapshotter
from marshal_py.protocol.fold import rationalizer, snapshot
from marshal_py.protocol.fold.snapshot import Stored
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, NONE, TopicPartition
from marshal_py.protocol.wire.records import Genesis, Snapshot
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.ports import Bounds, ClusterAdmin, CoordinationLog, LogRecord, Transport

CONFIRM_S: Final = 15.0  # a live consumer confirms within seconds; a silent one may be dead
FLUSH_S: Final = 5.0
INSTANCE_BYTES: Final = 16


class Written(NamedTuple):
    """A confirmed snapshot at checkpoint `at`. `state_bytes`: 0 if not just written. `self_audit`: only its writer
    confirmed it."""

    at: int
    state_bytes: int
    self_audit: bool


class Begun(NamedTuple):
    """A log whose history was restarted at offset `at`. `first`: the oldest offset that can still be read."""

    log: int
    at: int
    first: int


class LogConnection:
    """Has one log, folded to its end."""

    number: int

    def __init__(self, reader: LogReader, number: int) -> None:
        """Folds the log to its end. Raises HistoryTruncated, CoordinationError, ClusterUnreachable."""
        self.number, self._reader = number, reader
        self.bounds: Bounds = reader.bounds([number])[number]
        self.world: World = replay.open_world(reader.log, number, reader.root_of(number), self.bounds)
        self.snapshotter: Snapshotter = Snapshotter(self.world, SNAPSHOT_EVERY_RECORDS, secrets.token_bytes)
        self.wanted: int = self.bounds.end - self.bounds.end % CHECKPOINT_OFFSETS  # newest checkpoint: `write` saves it
        self.pieces: list[Snapshot] | None = None
        if self.world.next_offset == self.wanted:
            self.pieces = self.snapshotter.write()
        for record in reader.records({number: self.bounds.end}, {number: self.world.next_offset}):
            self._fold(record)
        incarnation = None if self.world.genesis is None else self.world.genesis.incarnation
        self.snapshotter.store = replay.find(reader.log, number, self.bounds, incarnation, 2)

    def fold_until(self, condition: Callable[[], bool], wait_s: float) -> bool:
        """Reads and folds records until the condition holds. Returns False if it does not hold within `wait_s`."""
        deadline = time.monotonic() + wait_s
        self._reader.follow(self.number, self.world.next_offset)
        while not condition():
            for record in self._reader.poll():
                if record.log == self.number:
                    self._fold(record)
            if time.monotonic() >= deadline:
                return condition()
        return True

    def _fold(self, record: LogRecord) -> None:
        verdict = rationalizer.apply(self.world, record.offset, record.value)
        self.snapshotter.folded(verdict, 0)
        if self.world.next_offset == self.wanted:
            self.pieces = self.snapshotter.write()

    def clients(self) -> tuple[str, ...]:
        """Returns the client ids of the live sessions."""
        sessions = (session for group in self.world.groups.values() for session in group.sessions.values())
        return tuple(sorted({session.join.client_id for session in sessions}))

    def snapshots(self) -> list[int]:
        """Returns the checkpoints of the confirmed snapshots, newest first."""
        return [stored.at for stored in self.snapshotter.store.confirmed(self.bounds.first)]

    # --- a snapshot now

    def write(self, wait_s: float) -> Written | None:
        """Writes a snapshot of the newest checkpoint and waits up to `wait_s` for its confirmation (N5, N6). None for a
        log of fewer than 16 records."""
        there = self._confirmed()
        if there is not None:
            return Written(self.wanted, 0, there.self_audit)
        if not self.wanted:
            return None
        if self.pieces is None:
            for group in self.world.groups.values():
                if group.opaque_at != NONE:
                    raise GroupOpaque(group.name, group.opaque_at)
            raise HistoryTruncated(self.number, self.bounds.first)  # no Genesis: the log has not begun
        for piece in self.pieces:
            _append(self._reader.log, self.number, piece)
        sessions = self.clients()
        if not sessions:
            self._confirm_alone(self.pieces[0])
        self.fold_until(lambda: self._confirmed() is not None, wait_s)
        found = self._confirmed()
        if found is None:
            raise SnapshotNotConfirmed(self.number, self.wanted, wait_s, sessions)
        return Written(self.wanted, sum(len(piece.data) for piece in self.pieces), found.self_audit)

    def _confirmed(self) -> Stored | None:
        """Returns the snapshot of the newest checkpoint, once it is confirmed."""
        return next((stored for stored in self.snapshotter.store.confirmed() if stored.at == self.wanted), None)

    def _confirm_alone(self, piece: Snapshot) -> None:
        """Confirms an own snapshot if no consumer lives that could, by a second fold (N6). `piece`: one of its
        records."""

        def read_back() -> bool:
            return any(key.at == piece.at and key.instance == piece.instance for key in self.snapshotter.store.whole)

        log = self._reader.log
        if not self.fold_until(read_back, self._reader.timeout_s):
            raise ClusterUnreachable(
                "the cluster",
                f"the snapshot in coordination partition {self.number}",
                log.waiting_for() or "it was not read back",
            )
        root = self._reader.root_of(self.number)
        base = replay.base_of(log, self.number, root, self.bounds, piece.at - CHECKPOINT_OFFSETS)
        again = replay.refold(log, base, piece.at)
        for key, stored in list(self.snapshotter.store.whole.items()):
            if key.instance == piece.instance and key.at == piece.at:
                for record in self.snapshotter.audited(stored, again):
                    _append(log, self.number, record)


class Logs:
    """Connects to all logs of a coordination topic. A context manager."""

    topic: str

    def __init__(self, transport: Transport, topic: str, timeout_s: float = READ_TIMEOUT_S) -> None:
        """Connects to the coordination topic. Raises CoordinationTopicMissing, ClusterUnreachable."""
        self.topic = topic
        self._reader = LogReader(transport, topic, "logs", timeout_s, writes=True)
        self.admin: ClusterAdmin = self._reader.admin
        self._log = self._reader.log

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close(FLUSH_S)

    def root(self) -> Genesis | None:
        """Returns the root Genesis; None if nobody has begun log 0 yet. Raises HistoryTruncated, CoordinationError."""
        return self._reader.find_root()

    def numbers(self, wanted: int | None) -> list[int]:
        """Returns the wanted log, or all; none without a root. Raises InvalidOption for a log that does not exist."""
        root = self.root()
        if root is None:
            return []
        if wanted is None:
            return list(range(root.partitions))
        if not 0 <= wanted < root.partitions:
            raise InvalidOption("--log", wanted, f"the topic has the logs 0 to {root.partitions - 1}")
        return [wanted]

    def connect(self, number: int) -> LogConnection:
        """Returns the log with this number, folded to its end. Use one at a time, because all share a connection."""
        self.root()
        return LogConnection(self._reader, number)

    def _bounds(self, number: int) -> Bounds:
        return self._reader.bounds([number])[number]

    # --- deletion

    def limit(self, connection: LogConnection, kept_s: float) -> int:
        """Returns the offset below which records may be deleted: neither snapshots nor sessions need them (N12).
        `kept_s`: younger ones stay, and the snapshot to read them from. Raises UnsupportedPlatform where offsets by
        time are unknown."""
        number, deletable = connection.number, connection.snapshotter.deletable()
        if not deletable:
            return connection.bounds.first
        tp = TopicPartition(self.topic, number)
        since_ms = SystemClock().now().wall_ms - round(kept_s * 1000)
        before = min(deletable, self.admin.offsets_at([tp], since_ms).get(tp, deletable))
        return replay.cut_of(self._log, number, self._reader.root_of(number), self._bounds(number), before)

    def delete(self, number: int, before: int) -> None:
        """Deletes a log's records below `before`. Raises PartitionError, UnsupportedPlatform."""
        if "truncate" not in self.admin.capabilities:
            raise UnsupportedPlatform("the deletion of records", "the embedded broker", "use a real broker")
        refused = self.admin.delete_records(TopicPartition(self.topic, number), before)
        if refused:
            raise PartitionError(self.topic, number, f"the deletion of its records is refused: {refused}")

    # --- a new history

    def broken(self) -> dict[int, Bounds]:
        """Returns the bounds of each log that nobody can fold: its beginning is deleted and nothing replaces it
        (N10)."""
        found: dict[int, Bounds] = {}
        root: Genesis | None = None
        for number in range(self._reader.count):
            bounds = self._bounds(number)
            try:
                if number == 0:
                    root = self.root()
                elif bounds.first and (root is None or number < root.partitions):
                    replay.open_world(self._log, number, root, bounds)
            except HistoryTruncated:
                found[number] = bounds
        return found

    def surviving_root(self) -> Genesis | None:
        """Returns the root from any Genesis or snapshot that is left, in any log; None without one."""
        try:
            return self.root()
        except HistoryTruncated:
            pass
        for number in range(self._reader.count):
            bounds = self._bounds(number)
            for records in self._log.read(number, bounds.first, bounds.end, replay.SILENCE_S):
                for record in records:
                    envelope = codec.open_envelope(record.value, -1)
                    if envelope is not None and isinstance(envelope[5], Genesis):
                        return envelope[5]
                    found = codec.open_snapshot(record.value)
                    if found is not None:
                        return found.genesis
        return None

    def new_root(self) -> Genesis:
        """Returns a new root, with a new incarnation, for a topic that has lost its root."""
        created_ms = SystemClock().now().wall_ms
        return Genesis(
            created_ms.to_bytes(6, "big") + secrets.token_bytes(10),
            self._reader.count,
            HASH_NAME,
            rationalizer.PROTOCOL_VERSION,
        )

    def restart(self, number: int, root: Genesis) -> Begun:
        """Begins a new history by a snapshot of an empty state (N13). The log's consumers stop with
        HistoryRestarted."""
        bounds = self._bounds(number)
        deadline = time.monotonic() + self._reader.timeout_s
        # At a checkpoint that is not deleted: up to 15 copies of the Genesis, which every reader ignores (L5).
        while (at := bounds.end - bounds.end % CHECKPOINT_OFFSETS) < bounds.first:
            _append(self._log, number, root)
            bounds = self._wait_until_longer(number, bounds.end, deadline)
        for record in snapshot.founding(root, number, secrets.token_bytes(INSTANCE_BYTES), at):
            _append(self._log, number, record)
            bounds = self._wait_until_longer(number, bounds.end, deadline)
        world: World = replay.open_world(self._log, number, None if number == 0 else root, bounds)
        assert world.began_at == at, "what was read back is what was written"
        return Begun(number, at, bounds.first)

    def _wait_until_longer(self, number: int, end: int, deadline: float) -> Bounds:
        while (bounds := self._bounds(number)).end <= end:
            if time.monotonic() >= deadline:
                raise ClusterUnreachable(
                    "the cluster",
                    f"the record in coordination partition {number}",
                    self._log.waiting_for() or "it was not written in time",
                )
            self._reader.poll(0.0)
            time.sleep(POLL_S / 10)
        return bounds


def _append(log: CoordinationLog, number: int, record: Genesis | Snapshot) -> None:
    genesis = record if isinstance(record, Genesis) else record.genesis
    log.append(number, b"", codec.encode(record, "", genesis.incarnation))
