"""The simulated coordination log as log/replay.py reads it: its records, its bounds, where a reader
starts.

It needs only the broker, folds nothing itself and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from marshal_py.errors import ClusterUnreachable
from marshal_py.log import replay
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.records import Genesis
from marshal_py.transport.ports import Bounds, CoordinationLog, LogRecord
from marshal_sim.cluster.broker import MISSING, Broker


class _LogReader:
    """Reads the records of a CoordinationLog."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def read(self, log: int, start: int, end: int, timeout_s: float) -> Iterator[list[LogRecord]]:
        values = self.broker.logs[log].values
        if end > len(values):
            raise ClusterUnreachable("simulated", f"offset {end - 1} of log {log}", "the topic was created again")
        yield [LogRecord(log, at, values[at], 0) for at in range(start, end) if values[at] is not MISSING]


def log_reader(broker: Broker) -> CoordinationLog:
    return cast(CoordinationLog, _LogReader(broker))  # log/replay.py only reads


def bounds_of(broker: Broker, number: int) -> Bounds:
    log = broker.logs[number]
    return Bounds(log.first, len(log.values))


def starting_world(broker: Broker, number: int, root: Genesis | None, at: int) -> World:
    """Returns the world from which a reader starts if it must start at the offset `at` or below (N9, N10).

    Raises CoordinationError.
    """
    return replay.base_of(log_reader(broker), number, root, bounds_of(broker, number), at)
