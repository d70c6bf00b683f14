"""`timeout_s` of a call is its whole time: what it asks first and what it waits for afterwards share it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from marshal_py import AckNotConfirmed, Marshal, aio
from marshal_py.errors import InvalidOption
from tests.support.client_fixtures import DEADLINE_S, INTERVAL_S, MemoryTestCluster, collect, joined

TIMEOUT_S = 3_600.0  # a call that waits so long has failed


def until_asked(monkeypatch: pytest.MonkeyPatch, asked: Any, verb: str) -> list[float]:
    """Notes when the cluster is asked, on the clock of deadlines."""
    began: list[float] = []
    ask: Callable[..., Any] = getattr(asked, verb)

    def note(*args: Any, **options: Any) -> Any:
        began.append(time.monotonic())
        return ask(*args, **options)

    monkeypatch.setattr(asked, verb, note)
    return began


def deadlines(monkeypatch: pytest.MonkeyPatch, marshal: Marshal) -> list[float]:
    """Notes until when calls wait for the coordination log."""
    found: list[float] = []
    until_true = marshal._context.until

    def note(condition: Callable[[], bool], what: str, deadline: float, log: int) -> Any:
        found.append(deadline)
        return until_true(condition, what, deadline, log)

    monkeypatch.setattr(marshal._context, "until", note)
    return found


def test_info_has_one_time_for_both_of_its_questions(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks where the log ends, then reads up to there."""
    with memory.connect() as marshal, joined(marshal, memory.group(), [memory.topic()]) as consumer:
        asked = until_asked(monkeypatch, marshal._context.coordination, "bounds")
        found = deadlines(monkeypatch, marshal)
        consumer.info(TIMEOUT_S)
    assert len(asked) == len(found) == 1
    assert found[0] <= asked[0] + TIMEOUT_S


def test_info_of_asyncio_has_one_time(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[list[float], list[float]]:
        async with await aio.connect(memory.target) as marshal:
            consumer = await marshal.consumer(memory.group(), [memory.topic()], heartbeat_interval_s=INTERVAL_S)
            asked = until_asked(monkeypatch, marshal._plain._context.coordination, "bounds")
            found = deadlines(monkeypatch, marshal._plain)
            await consumer.info(TIMEOUT_S)
            return asked, found

    asked, found = asyncio.run(main())
    assert len(asked) == len(found) == 1
    assert found[0] <= asked[0] + TIMEOUT_S


def test_calls_that_wait_for_the_log_end_while_it_takes_no_record(memory: MemoryTestCluster) -> None:
    """The cluster answers questions, and what is written is lost. test_seek.py and test_end_budget.py have the rest."""
    with memory.reading(5) as consumer:
        (message,) = collect(consumer, 1, ack=False)
        memory.broker.writable = False
        with pytest.raises(AckNotConfirmed):
            message.double_ack(timeout_s=0.1)
        with pytest.raises(AckNotConfirmed):
            consumer.flush(timeout_s=0.1)
        assert len(consumer.fetch(10, min_messages=10, expires_s=0.1)) <= 4
        while consumer.next(expires_s=0.1) is not None:
            pass
        memory.broker.writable = True
        assert message.double_ack(timeout_s=DEADLINE_S), "then the log has it"


@pytest.mark.parametrize("verb", ["consume", "process"])
def test_a_stop_may_wait_any_time_and_no_time_that_is_none(memory: MemoryTestCluster, verb: str) -> None:
    with memory.connect() as marshal, joined(marshal, memory.group(), [memory.topic()]) as consumer:
        running = getattr(consumer, verb)(lambda message: None)
        with pytest.raises(InvalidOption):
            running.stop(-1.0)
        assert not running.closed
        running.stop(math.inf)
        assert running.closed
