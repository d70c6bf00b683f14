"""Bounds how many messages of one partition are delivered and not finished at once: the option `max_acks_pending`.

A message counts from its delivery until it is acked or ended, also while it waits because its handler gave it back. So
with a bound of one nothing of the partition is delivered before that message is finished (partitioned consumer groups:
"Max acks pending"). Called with the Marshal's lock held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from marshal_py.client.delivery.buffers import Buffer
from marshal_py.client.delivery.redelivery import blocked
from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.claims.delivery import AtLeastOnce

# How long a call waits before it looks again whether acks of other threads have made room. The first wait is short, and
# each further one twice as long: so what a wait adds is at most about as long as the handler has taken.
WAIT_S_MIN: Final = 0.0005
WAIT_S_MAX: Final = 0.01


class AckWindow:
    """Says how much more of a claim may be delivered. `most`: None for any number.

    `room_of(claim)`: how many messages a `process` still takes of the claim; None where none runs.
    """

    __slots__ = ("_delivered", "_wait_s", "most", "room_of")

    def __init__(self, most: int | None) -> None:
        self.most: int | None = most
        self.room_of: Callable[[Claim], int] | None = None
        self._delivered = 0
        self._wait_s = WAIT_S_MIN

    def room(self, claim: Claim) -> int:
        """Returns how many messages of the claim may be delivered that were not delivered under it before."""
        if blocked(claim):
            return 0
        if not isinstance(claim.tracker, AtLeastOnce):
            return sys.maxsize
        room = sys.maxsize if self.room_of is None else self.room_of(claim)
        return room if self.most is None else max(0, min(room, self.most - claim.tracker.in_flight))

    def wait_s(self, buffers: Iterable[Buffer], delivered: int) -> float | None:
        """Returns how long to wait for acks before looking again; None if no buffered message waits for one.

        `delivered`: how many messages the consumer has delivered; the waits grow until this number changes.
        """
        if not any(self._full(buffers)):
            return None
        if delivered != self._delivered:
            self._delivered, self._wait_s = delivered, WAIT_S_MIN
        wait_s, self._wait_s = self._wait_s, min(WAIT_S_MAX, 2 * self._wait_s)
        return wait_s

    def waits_for_handlers(self, buffers: Iterable[Buffer]) -> bool:
        """Tells whether a buffered message waits for an answer to one that a handler has now."""
        return any(
            isinstance(claim.tracker, AtLeastOnce) and claim.tracker.held > 0
            for claim in self._full(buffers)
            if claim.phase is ClaimPhase.OPEN
        )

    def _full(self, buffers: Iterable[Buffer]) -> Iterator[Claim]:
        """Yields the claims of which messages are buffered and none may be delivered before another is finished."""
        for buffer in buffers if self.most is not None or self.room_of is not None else ():
            claim = buffer.claim
            if claim is not None and buffer.fetched and not buffer.paused_by_user and not self.room(claim):
                yield claim
