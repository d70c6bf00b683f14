"""Planted bugs in what becomes of fetches that fail and positions that are refused (PROTOCOL.md D12).

They are in the bookkeeping that KafkaSource uses, too (transport/assignments.py). mutants.py alone calls this file.
"""

from __future__ import annotations

from typing import Any

from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.assignments import Assignments, State
from marshal_py.transport.ports import OutOfRange

Patch = tuple[Any, str, Any]


def d12a() -> list[Patch]:
    def current(self: Assignments, tp: TopicPartition, round_: int) -> bool:
        return self.round(tp) != 0

    return [(Assignments, "current", current)]


def d12l() -> list[Patch]:
    def refuse(self: Assignments, tp: TopicPartition, position: int, truncated: str, now_ms: int) -> None:
        """Notes that the present assignment was refused, although it may have been an earlier one."""
        fetched = self.fetched.get(tp)
        if fetched is not None:
            fetched.state = State.STOPPED
            self._refused[tp] = OutOfRange(tp, position, fetched.round, truncated)
            self._changed.add(tp)

    return [(Assignments, "refuse", refuse)]


def d12() -> list[Patch]:
    def fail(self: Assignments, tp: TopicPartition, reason: str, now_ms: int) -> None:
        fetched = self.fetched.get(tp)
        if fetched is not None:
            fetched.state = State.STOPPED
            self._changed.add(tp)

    return [(Assignments, "fail", fail)]
