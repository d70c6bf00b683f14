"""Planted bugs in the asyncio front: what comes for a cancelled call, what waits after it has taken, how it ends.

mutants.py alone calls this file. The docstring of a replaced function says how it behaves with the bug.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from marshal_py.client.async_consumer import AsyncConsumer
from marshal_py.client.event_loop import Feed, Request
from marshal_py.client.process.processing import Processing
from marshal_py.protocol.wire.records import AT_LEAST_ONCE
from marshal_py.transport.ports import Chunk

Patch = tuple[Any, str, Any]


def e1() -> list[Patch]:
    answered = Feed._answered

    def for_the_waiter(
        self: Feed, request: Request, chunks: list[Chunk], error: Exception | None, following: Request | None
    ) -> None:
        """Keeps only what a call waits for."""
        answered(self, request, chunks if self._waiter is not None else [], error, following)

    return [(Feed, "_answered", for_the_waiter)]


def e2() -> list[Patch]:
    complete = AsyncConsumer._complete

    async def late(self: AsyncConsumer[Any, Any], steps: Any) -> Any:
        """Waits once more when the call is at its end."""
        result = await complete(self, steps)
        await asyncio.sleep(0.001)
        return result

    return [(AsyncConsumer, "_complete", late)]


def e3() -> list[Patch]:
    finish = AsyncConsumer._finish_drain

    async def at_once(self: AsyncConsumer[Any, Any]) -> None:
        """Waits for no handler."""
        self._ending.drain_until = 0.0
        await finish(self)

    return [(AsyncConsumer, "_finish_drain", at_once)]


def e4() -> list[Patch]:
    return _cancelled(handled=True)


def e5() -> list[Patch]:
    return _cancelled(handled=False)


def _cancelled(*, handled: bool) -> list[Patch]:
    settle = Processing.settle_given

    def settled(
        self: Processing[Any, Any], given: Any, result: object, error: BaseException | None, **ends: Any
    ) -> None:
        """Takes a handler that was cancelled for one that has returned, or forgets its message."""
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if handled or not is_cancelled:
            settle(self, given, result, None if is_cancelled else error, **ends)

    return [(Processing, "settle_given", settled)]


_ALO: Final = {"mode": AT_LEAST_ONCE}
PLANTED: Final[tuple[tuple[str, str, Callable[[], list[Patch]], tuple[str, ...], dict[str, Any]], ...]] = (
    ("E1", "what comes for a task that was cancelled is dropped", e1, ("aio",), _ALO),
    ("E2", "a call waits once it has taken, and loses that if its task is cancelled", e2, ("aio",), _ALO),
    ("E4", "a message counts as handled whose handler was cancelled", e4, ("aio", "lanes"), _ALO),
    ("E5", "a message whose handler was cancelled does not come again", e5, ("aio", "lanes"), _ALO),
    ("E3", "an AsyncConsumer's drain ends before its last ack", e3, ("aio", "leave", "arrive", "slow_handler"), _ALO),
)
