"""The fold as a stateful stream: one keyed state per log, from which a restarted query continues.

The state is the log's canonical snapshot at its last checkpoint, the few values since, what timeline.py knows beside
the world, and records that arrived before their predecessors. It is written with a version byte: another release of
this library can read a checkpoint folder, or refuses it with a clear error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import util
from typing import Any, Final

import msgspec
import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, functions
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

from marshal_py.errors import GroupOpaque, InvalidOption, LogGap, MissingSpark
from marshal_py.history.open_state import OpenState
from marshal_py.history.timeline import Timeline
from marshal_py.protocol.fold import rationalizer, snapshot
from marshal_py.protocol.fold.snapshot import Key, Stored
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, World
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import Genesis
from marshal_py.spark.log import columns
from marshal_py.spark.log.replays import NEEDED, check_columns, checked_tables

STATE_VERSION: Final = 1
HELD_MAX: Final = 200_000  # records of a log that wait for a missing one; then that counts as lost
PROVIDER: Final = "spark.sql.streaming.stateStore.providerClass"
ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

_PANDAS: Final = {pa.int32(): pd.Int32Dtype(), pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}


def replay_stream(sdf: DataFrame, root: Genesis, tables: Sequence[str] | None = None) -> DataFrame:
    """Returns a stream of the rows of `tables`, which it folds from the records in `sdf` as `replay` does for a batch.

    `sdf` has the columns log, offset, time and value. It must have each log from its beginning: read an archive or a
    whole topic. `tables` is None for all tables. `root` is the Genesis that `find_root` (replays.py) returns for the
    same records, read as a batch.

    A row comes only when it can no longer change: the row of a time in which one session owned a partition comes when
    that time is over. The table `digests` gets rows at checkpoints only, and the table `standings` gets none. Write the
    stream with outputMode("append") and a checkpoint. Raises InvalidOption, MissingSpark.
    """
    wanted = checked_tables(tables)
    check_columns(sdf)
    if util.find_spec("google.protobuf") is None:
        raise MissingSpark("protobuf", "which Spark's stateful streams need")
    provider = sdf.sparkSession.conf.get(PROVIDER)
    if provider != ROCKSDB:
        raise InvalidOption(
            PROVIDER, provider, f"{ROCKSDB}: set it on the session; other stores do not support this kind of state"
        )
    fields = columns.columns(wanted)
    in_ms = {name: pa.int64() if columns.is_time(kind) else kind for name, kind in fields.items()}
    known = sdf.select(*NEEDED).where(functions.col("log") < root.partitions)
    # Times as numbers: in pandas they would depend on the session's zone.
    rows = (
        known.withColumn("time", functions.unix_millis("time"))
        .groupBy("log")
        .transformWithStateInPandas(_Fold(root, wanted), columns.spark_schema(in_ms), "Append", "None")
    )
    return rows.select(
        *(
            functions.timestamp_millis(name).alias(name) if columns.is_time(kind) else name
            for name, kind in fields.items()
        )
    )


class _State(msgspec.Struct, array_like=True):
    """Holds what is kept of one log between two calls by Spark.

    `data` is the log's snapshot at its last checkpoint, the offset `at`. It is None if `at` is the log's beginning.
    """

    at: int
    data: bytes | None
    genesis: Genesis | None
    chain: int
    digest: int
    values: list[bytes | None]  # from `at` on
    known: OpenState
    held: dict[int, tuple[int, bytes | None]]  # offset -> time, value; not folded yet


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_State).decode


def read_state(blob: bytes | None) -> _State:
    """Decodes a state; None gives an empty one. Raises InvalidOption for another release's format."""
    if blob is None:
        return _State(0, None, None, 0, 0, [], OpenState(), {})
    if blob[0] != STATE_VERSION:
        raise InvalidOption(
            "checkpointLocation",
            f"state version {blob[0]}",
            f"version {STATE_VERSION}, which this release of marshal_py reads: use a new checkpoint folder",
        )
    return _decode(memoryview(blob)[1:])


def write_state(state: _State) -> bytes:
    return bytes([STATE_VERSION]) + _encode(state)


def fold_more(
    state: _State, log: int, root: Genesis, tables: Sequence[str], records: Iterable[tuple[int, int, bytes | None]]
) -> Timeline:
    """Folds records (offset, time in ms, value), which may come in any order, onto the state.

    Returns the Timeline, which has the new rows. Raises LogGap if more than HELD_MAX records wait for a missing one.
    Raises GroupOpaque if a group is opaque at a checkpoint, because such a log has no canonical state (N7).
    """
    world = _world(state, log, root)
    timeline = Timeline(world, tables, state.known)
    for offset, time_ms, value in records:
        if offset >= world.next_offset:
            state.held[offset] = time_ms, value
    end = world.next_offset
    while end in state.held:
        end += 1
    checkpoint = end - end % CHECKPOINT_OFFSETS
    for offset in range(world.next_offset, end):
        time_ms, value = state.held.pop(offset)
        timeline.read(offset, time_ms, value)
        state.values.append(value)
        if offset + 1 == checkpoint and world.genesis is not None:
            _take_snapshot(state, world)
    if len(state.held) > HELD_MAX:
        raise LogGap(log, end, min(state.held))
    return timeline


def _world(state: _State, log: int, root: Genesis) -> World:
    """Returns the world as it was when the state was written."""
    known = None if log == 0 else root
    world: World | None = World(log, known)
    if state.data is not None and state.genesis is not None:
        key = Key(bytes(16), state.at, 1, state.digest, state.chain)
        world = snapshot.load(Stored(key, state.genesis, state.data, set()), log, known)
        assert world is not None  # it was written by `_take_snapshot`
    assert world is not None
    for offset, value in enumerate(state.values, state.at):
        rationalizer.apply(world, offset, value)
    return world


def _take_snapshot(state: _State, world: World) -> None:
    data = snapshot.state_of(world)
    if data is None:
        name, group = next((name, group) for name, group in world.groups.items() if group.opaque_at != NONE)
        raise GroupOpaque(name, group.opaque_at)
    state.at, state.data, state.genesis = world.next_offset, data, world.genesis
    state.chain, state.digest = world.chain, snapshot.digest_of(world)
    state.values.clear()


class _Fold(StatefulProcessor):
    """Is the object that Spark calls with the new records of one log and with its state."""

    def __init__(self, root: Genesis, tables: Sequence[str]) -> None:
        self._root, self._tables = root, tables

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("log", "blob binary")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        stored = self._state.get()
        state = read_state(None if stored is None else bytes(stored[0]))
        timeline = fold_more(state, int(key[0]), self._root, self._tables, _records(rows))
        self._state.update((write_state(state),))
        for batch in columns.batches(timeline.take(), self._tables):
            yield _frame(batch)

    def close(self) -> None:
        pass


def _records(rows: Iterable[pd.DataFrame]) -> Iterator[tuple[int, int, bytes | None]]:
    for part in rows:
        for offset, time_ms, value in zip(part["offset"], part["time"], part["value"], strict=True):
            yield int(offset), NONE if pd.isna(time_ms) else int(time_ms), None if value is None else bytes(value)


def _frame(batch: pa.RecordBatch) -> pd.DataFrame:
    """Returns the batch as pandas has it: whole numbers that may be NULL stay whole, and times are in ms."""
    arrays = [columns.in_ms(column) if columns.is_time(column.type) else column for column in batch.columns]
    table = pa.Table.from_arrays(arrays, names=batch.schema.names)
    return table.to_pandas(types_mapper=_PANDAS.get)
