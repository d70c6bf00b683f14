"""Ack handles: small values that name a message of a consumer, so that another process can send back which one is done.

A handle is bytes without meaning outside its consumer: a random number of the consumer, then epoch, offset, partition
and topic, and a keyed checksum of all of them, so that a handle that was damaged on its way names no other message. The
consumer that made it completes it. What a handle needs besides is kept here until the message is done.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from marshal_py.client.messages.acks import Delivered, DeliveryContext
from marshal_py.client.messages.message import Message
from marshal_py.errors import HandleUnknown, NeedsAtLeastOnce
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.wire.identity import TopicPartition

CONSUMER_BYTES: Final = 8  # random, so that a handle of another consumer or process is recognised
CHECKSUM_BYTES: Final = 8  # at the end; one damaged handle of 2^64 would be believed
_FORMAT: Final = struct.Struct(f">{CONSUMER_BYTES}sqqi")
KEPT_MIN: Final = 1_000  # messages; with more than twice as many as after the last look, those that are done go


class Place(NamedTuple):
    """Says what a handle names: a message of a claim."""

    epoch: int
    offset: int
    tp: TopicPartition


class Handles:
    """Makes and reads the handles of one consumer."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._consumer = secrets.token_bytes(CONSUMER_BYTES)
        self._key = secrets.token_bytes(blake2b.MAX_KEY_SIZE)
        self._kept: dict[Place, Message[Any, Any]] = {}  # in at-least-once mode
        self._look_at = 2 * KEPT_MIN

    def make(self, message: Message[Any, Any]) -> bytes:
        """Returns the message's handle, and keeps the message until it is done. Called with the lock held."""
        delivered, offset = message._delivered, message.offset
        claim = delivered.claim
        if delivered.run is not None:
            self._kept[Place(claim.epoch, offset, claim.tp)] = message
            if len(self._kept) >= self._look_at:
                self._kept = {place: one for place, one in self._kept.items() if _open(one)}
                self._look_at = 2 * max(KEPT_MIN, len(self._kept))
        named = _FORMAT.pack(self._consumer, claim.epoch, offset, claim.tp.partition) + claim.tp.topic.encode()
        return named + self._checksum(named)

    def _checksum(self, named: bytes) -> bytes:
        return blake2b(named, digest_size=CHECKSUM_BYTES, key=self._key).digest()

    def read(self, handle: bytes) -> Place:
        """Returns what a handle names. Raises HandleUnknown if this consumer has not made it, or not like this."""
        if not isinstance(handle, bytes):
            raise HandleUnknown(
                self._group, f"a handle is bytes, as message.handle() returns; this is of type {type(handle).__name__}"
            )
        if len(handle) <= _FORMAT.size + CHECKSUM_BYTES or not handle.startswith(self._consumer):
            raise HandleUnknown(self._group, "this consumer has not made it; complete it where message.handle() ran")
        named = handle[:-CHECKSUM_BYTES]
        if not hmac.compare_digest(handle[-CHECKSUM_BYTES:], self._checksum(named)):
            raise HandleUnknown(self._group, "it was damaged on its way; send the bytes of message.handle() unchanged")
        _, epoch, offset, partition = _FORMAT.unpack_from(named)
        return Place(epoch, offset, TopicPartition(named[_FORMAT.size :].decode(), partition))

    def message(self, handle: bytes, context: DeliveryContext) -> Message[Any, Any]:
        """Returns a handle's message; under the lock. At-least-once groups alone keep them. Raises HandleUnknown,
        NeedsAtLeastOnce."""
        place = self.read(handle)
        message = self._kept.get(place)
        if message is None or not _open(message):
            claim = context.member.claims.get(place.epoch)
            if claim is not None and not isinstance(claim.tracker, AtLeastOnce):
                raise NeedsAtLeastOnce("message", self._group)
            raise HandleUnknown(self._group, f"its message {place.tp}@{place.offset} is done, or its claim is over")
        return message

    def complete(self, handle: bytes, context: DeliveryContext) -> bool:
        """Acks a handle's message, under the lock; returns whether in time. Raises HandleUnknown."""
        epoch, offset, tp = place = self.read(handle)
        self._kept.pop(place, None)
        claim = context.member.claims.get(epoch)
        if claim is None:
            context.member.late_acks += 1
            context.lost_acks.late(tp)
            return False
        if not isinstance(claim.tracker, AtLeastOnce):
            return Delivered(context, claim, None).finish_one()
        run, index = claim.tracker.place_of(offset) or (None, 0)
        return run is None or Delivered(context, claim, run).finish_range(index, index + 1)


def _open(message: Message[Any, Any]) -> bool:
    """Returns whether the message still waits for an answer that counts."""
    delivered = message._delivered
    delivered.claim.settle()
    return not delivered.claim.sealed and delivered.run is not None and not delivered.run.is_finished(message._index)
