"""What a handler of `process` may raise, and after which delay a message is tried again."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

from marshal_py.errors import InvalidOption

Order = Literal["key", "partition"]
Unkeyed = Literal["parallel", "ordered"]
AfterDeadLetter = Literal["continue", "key"]

DELIVERIES: Final = 5  # before a message becomes a dead letter, unless somebody says otherwise (KIP-932's default)
DELAY_S_MAX: Final = 86_400.0  # of one retry: that of `Message.nak`


class Reject(Exception):
    """A handler raises it of `Consumer.process`: this message is never to be tried again.

    It goes to the dead-letter topic, or, without one, an advisory `terminated` keeps the reason. `reason`: for people.
    Raises InvalidOption.
    """

    def __init__(self, reason: str = "") -> None:
        if not isinstance(reason, str):
            raise InvalidOption("reason", reason, "a text for people, such as str(error)")
        super().__init__(reason)
        self.reason: str = reason


class Retry(Exception):
    """Says when a message is tried again: as the option `retry` for all, raised by a handler for its message.

    The n-th delivery is followed by a delay of `first_s * factor ** (n - 1)` seconds, at most `max_s`, which differs at
    random by the share `jitter` in either direction. `after_s`: this delay instead; for a handler that knows. After
    `deliveries` of them a message goes to the dead-letter topic, or ends with an advisory `terminated`; None: after the
    consumer's `max_deliver`, or 5 with a `dead_letter_topic`, else never.

    Raises InvalidOption.
    """

    def __init__(
        self,
        first_s: float = 0.5,
        factor: float = 2.0,
        max_s: float = 60.0,
        jitter: float = 0.2,
        deliveries: int | None = None,
        *,
        after_s: float | None = None,
    ) -> None:
        _check("first_s", first_s, 0.0, DELAY_S_MAX)
        _check("factor", factor, 1.0, 100.0)
        _check("max_s", max_s, 0.0, DELAY_S_MAX)
        _check("jitter", jitter, 0.0, 1.0)
        if after_s is not None:
            _check("after_s", after_s, 0.0, DELAY_S_MAX)
        whole = isinstance(deliveries, int) and not isinstance(deliveries, bool)
        if deliveries is not None and not (whole and deliveries >= 1):
            raise InvalidOption("deliveries", deliveries, "a whole number of at least 1, or None")
        super().__init__("not now" if after_s is None else f"not before {after_s:g} s")
        self.first_s: float = first_s
        self.factor: float = factor
        self.max_s: float = max_s
        self.jitter: float = jitter
        self.deliveries: int | None = deliveries
        self.after_s: float | None = after_s

    def __reduce__(self) -> tuple[object, ...]:
        options: dict[str, Any] = {"deliveries": self.deliveries, "after_s": self.after_s}
        return partial(Retry, self.first_s, self.factor, self.max_s, self.jitter, **options), ()

    def delay_s(self, delivery_count: int, draw: Callable[[], float]) -> float:
        """Returns how many seconds to wait after so many deliveries. `draw()`: a random number in [0, 1)."""
        if self.after_s is not None:
            return self.after_s
        power = min(delivery_count - 1, 64)  # more would pass the bound, and overflow
        delay_s = min(self.max_s, self.first_s * self.factor**power)
        return min(DELAY_S_MAX, delay_s * (1 + self.jitter * (2 * draw() - 1)))


def _check(name: str, value: object, least: float, most: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not least <= value <= most:  # type: ignore[operator]
        raise InvalidOption(name, value, f"a number from {least:g} to {most:g}")
