"""Planted bugs in `process`: lanes, retries, what becomes of messages that wait when a partition moves.

They are in the shipped code of marshal_py/client/process. mutants.py alone calls this file. The docstring of a replaced
function says how it behaves with the bug.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from marshal_py.client.messages.message import claim_of
from marshal_py.client.process import processing
from marshal_py.client.process.lanes import AnyMessage, Lane, LaneKey, Lanes, Ready
from marshal_py.client.process.processing import Processing, Retry, outcomes_of
from marshal_py.protocol.claims import OffsetRun

Patch = tuple[Any, str, Any]


def k1() -> list[Patch]:
    return [(Lanes, "park", Lanes.done)]


def k2() -> list[Patch]:
    unpark = Lanes._unpark

    def stays(self: Lanes, lane: Lane, message: AnyMessage) -> None:
        """Keeps what is tried again later, and so its lane, although its claim is over."""
        if not claim_of(message).sealed:
            unpark(self, lane, message)

    return [(Lanes, "_unpark", stays)]


def k3() -> list[Patch]:
    lane_of = Processing._lane_of

    def of_its_own(self: Processing[Any, Any], message: AnyMessage) -> LaneKey:
        """Puts a message that comes again into a lane of its own."""
        key = lane_of(self, message)
        return key if message.delivery_count == 1 else LaneKey(key.tp, None, message.offset)

    return [(Processing, "_lane_of", of_its_own)]


def k4() -> list[Patch]:
    return [(processing, "queue", lambda messages, since: None)]


def k5() -> list[Patch]:
    return [(processing, "put_back", lambda message, delay_s=0.0: None)]


def k6() -> list[Patch]:
    return [(processing, "waiting_again", lambda claim, delivery: [])]


def k7() -> list[Patch]:
    oldest = OffsetRun.oldest

    def since_it_came(self: OffsetRun) -> tuple[int, int] | None:
        """Takes a message for silent since it was queued, as if its handler had it."""
        queued, self.queued = self.queued, None
        try:
            return oldest(self)
        finally:
            self.queued = queued

    return [(OffsetRun, "oldest", since_it_came)]


def k8() -> list[Patch]:
    begins = Processing._begins

    def whatever_is_paused(self: Processing[Any, Any], message: AnyMessage) -> bool | None:
        paused, self._queue.user_paused = self._queue.user_paused, set()
        try:
            return begins(self, message)
        finally:
            self._queue.user_paused = paused

    return [(Processing, "_begins", whatever_is_paused)]


def k9() -> list[Patch]:
    return [(Lanes, "in_vain", lambda self: [])]


def k10() -> list[Patch]:
    def since_one_hangs(self: Processing[Any, Any]) -> int | None:
        """Takes what waits for silent as soon as one handler is, although others are free."""
        begun_s = min(self._begun_s.values(), default=None)
        return None if begun_s is None else round(1000 * begun_s)

    return [(Processing, "_silent_since_ms", since_one_hangs)]


def k11() -> list[Patch]:
    def of_all(result: object, count: int) -> Sequence[BaseException | None]:
        outcomes = outcomes_of(result, count)
        return [next((one for one in outcomes if one is not None), None)] * count

    return [(processing, "outcomes_of", of_all)]


def k12() -> list[Patch]:
    def of_the_first(result: object, count: int) -> Sequence[BaseException | None]:
        return [*outcomes_of(result, count)[:1], *[None] * (count - 1)]

    return [(processing, "outcomes_of", of_the_first)]


def k13() -> list[Patch]:
    def as_it_comes(self: Ready, lane: Lane) -> None:
        """Adds a lane behind all of its partition, whatever it begins with."""
        entries = self._of.setdefault(lane.key.tp, (deque(), []))
        if not entries[0]:
            self._turns.append(entries)
        entries[0].append((lane.waiting[0].offset, lane))
        self._count += 1

    return [(Ready, "add", as_it_comes)]


def k14() -> list[Patch]:
    take = Ready.take

    def again(self: Ready) -> Lane:
        """Takes all that is ready of a partition before it goes on to the next."""
        first = self._turns[0]
        lane = take(self)
        if self._turns and self._turns[-1] is first:
            self._turns.rotate(1)
        return lane

    return [(Ready, "take", again)]


def k15() -> list[Patch]:
    def given_back_first(self: Processing[Any, Any], message: AnyMessage, error: Retry) -> None:
        """Gives a message back before its lane waits for it, so that it may come again in between."""
        given = message.nak(error.delay_s(message.delivery_count, self._draw))
        with self._lock:
            self._returned(message)
            self._lanes.park(message)
            if not given:
                self._lanes.unpark(message)

    return [(Processing, "_retry", given_back_first)]


# Name, what it does wrong, the bug, the faults that make it likely to show, and other options.
_LANES: Final = {"mode": 1, "rate": 60, "intervals": 12}
PLANTED: Final[tuple[tuple[str, str, Callable[[], list[Patch]], tuple[str, ...], dict[str, Any]], ...]] = (
    ("K1", "a lane goes on before its message is tried again", k1, ("lanes",), _LANES),
    ("K2", "a lane waits for a message that went with its claim", k2, ("lanes", "admin", "lag"), _LANES),
    ("K3", "a message that comes again gets another lane", k3, ("lanes", "arrive"), _LANES),
    ("K4", "what waits in lanes counts as delivered", k4, ("lanes", "answers", "arrive", "leave"), _LANES),
    ("K5", "what waits in lanes is not given back", k5, ("lanes", "arrive", "leave"), _LANES),
    ("K6", "the next process begins behind what is tried again later", k6, ("lanes",), _LANES),
    ("K7", "what waits in lanes is taken for messages of silent handlers", k7, ("lanes", "slow_handler"), _LANES),
    ("K8", "a handler begins with what its user has paused", k8, ("lanes", "calls"), _LANES),
    ("K9", "a handler that has lost its claim holds up its lane", k9, ("lanes", "stuck_handler", "calls"), _LANES),
    ("K10", "one silent handler has all that waits given up", k10, ("lanes", "stuck_handler"), _LANES),
    ("K11", "one failure fails the rest of its list", k11, ("lanes",), _LANES),
    ("K12", "what a handler says of the others of a list is lost", k12, ("lanes",), _LANES),
    ("K13", "what comes late, or was put back, comes after all that is ready", k13, ("lanes", "calls"), _LANES),
    ("K14", "one partition comes after the other", k14, ("lanes",), _LANES),
    ("K15", "what is given back may come again before its lane waits for it", k15, ("lanes", "locks"), _LANES),
)
