"""The acks of one consumer that the log will not have: their messages are delivered again, though they were acked.

An ack is lost if it comes too late (the claim was released or lost before), or if its claim is lost before the log has
accepted it. `flush` reports that, so a program that acks and then flushes knows as much as one that calls `double_ack`.
Called with the Marshal's lock held.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from marshal_py.protocol.claims.claim import Claim, ClaimPhase, finished_spans, log_has
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE, TopicPartition


class Loss(NamedTuple):
    """Says when acks of a partition were lost last: `number` counts the losses of the consumer.

    `certain`: whether the log says so. Otherwise this process has given the claim up, and the log may still get them.
    """

    number: int
    certain: bool


class LostAcks:
    """Keeps the lost acks of one consumer until a flush has reported them: one entry per partition at most."""

    def __init__(self) -> None:
        self.count: int = 0
        self._losses: dict[TopicPartition, Loss] = {}

    def late(self, tp: TopicPartition) -> None:
        """Notes an ack that came too late."""
        self._note(tp, certain=True)

    def ended(self, claims: Iterable[Claim], group: Group | None) -> None:
        """Notes what is lost with these claims, if they are GONE. `group`: as the log was when they ended."""
        for claim in claims:
            if claim.phase is not ClaimPhase.GONE or not isinstance(claim.tracker, AtLeastOnce):
                continue
            if claim.seek_to != NONE:
                continue  # its own user has moved it, and wants the messages again
            if not log_has(finished_spans(claim.tracker), claim, group):
                self._note(claim.tp, certain=claim.final is not None)

    def _note(self, tp: TopicPartition, *, certain: bool) -> None:
        self.count += 1
        self._losses[tp] = Loss(self.count, certain)

    def after(self, number: int) -> dict[TopicPartition, bool]:
        """Returns the partitions with losses after the loss `number`, and whether each is certain."""
        return {tp: loss.certain for tp, loss in self._losses.items() if loss.number > number}

    def reported(self, tps: Iterable[TopicPartition]) -> None:
        """Forgets the losses of these partitions, because the program knows of them."""
        for tp in tps:
            self._losses.pop(tp, None)
