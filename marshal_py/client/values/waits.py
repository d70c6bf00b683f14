"""What a call of a consumer waits for, as values. The call itself neither waits nor polls.

A call is written once, as a generator (Steps) that yields a wait and continues with its result. Each front carries the
waits out in its own way: `Consumer` on the user's thread, `AsyncConsumer` without blocking the event loop. A generator
never holds the Marshal's lock at a `yield`. An exception of a wait ends the call; it is not thrown into the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Poll(NamedTuple):
    """Waits up to `timeout_s` seconds for messages of the data source. Its result: chunks of `max_messages` at most."""

    timeout_s: float
    max_messages: int


class PollAhead(NamedTuple):
    """Asks the source for `max_messages` without a wait: what is there; nothing from a front that cannot."""

    max_messages: int


class Change(NamedTuple):
    """Waits `timeout_s` for a change of what the lock guards. `seen`: `Context.changes` at the last look; a newer one
    ends it."""

    timeout_s: float
    seen: int


Wait = Poll | PollAhead | Change
Steps = Generator[Wait, Any, T]


def complete(steps: Steps[T], carry_out: Callable[[Wait], Any]) -> T:
    """Runs a call to its end and returns its result. `carry_out` waits in the calling thread."""
    try:
        wait = next(steps)
        while True:
            # Without a variable: what was polled must be freed before the next is (PIECE_MESSAGES in settings.py).
            wait = steps.send(carry_out(wait))
    except StopIteration as end:
        result: T = end.value
        return result


def following(steps: Generator[T, Any, None], result: object) -> T | None:
    """Continues `steps` with the result of its last wait. Returns what it yields next, or None at its end."""
    try:
        return steps.send(result)
    except StopIteration:
        return None
