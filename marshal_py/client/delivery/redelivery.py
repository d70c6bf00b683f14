"""Delivers messages again that their handlers have given back (PROTOCOL.md D14), from the user's thread.

The tracker of the claim knows which of them are due. A message is taken and made the user's in one step under the
Marshal's lock, with the gate checked (D8); what an exception keeps from the user is due again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import groupby
from typing import cast

from marshal_py.client.delivery.buffers import Buffer, Reserved
from marshal_py.client.messages.answers import Delivered, DeliveryContext
from marshal_py.client.messages.message import Message, Part
from marshal_py.client.values.requests import message_bytes
from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.claims.delivery import AtLeastOnce, GivenBack, Redeliveries
from marshal_py.protocol.wire.identity import Instant
from marshal_py.transport.ports import RawMessage


def redeliveries_of(claim: Claim) -> Redeliveries | None:
    """Returns the messages of the claim that wait to be delivered again; None if there never was one."""
    return claim.tracker.redeliveries if isinstance(claim.tracker, AtLeastOnce) else None


def due_count(claim: Claim, now: Instant) -> int:
    """Returns how many messages of the claim are due to be delivered again, finished ones included."""
    found = redeliveries_of(claim)
    if found is None or not found.is_due(now.mono_ms):
        return 0
    return sum(one.due_ms <= now.mono_ms for one in found.waiting.values())


def blocked(claim: Claim) -> bool:
    """Returns whether so many messages of the claim wait that nothing new of it may be delivered."""
    found = redeliveries_of(claim)
    return found is not None and found.full


def most_deliveries(claim: Claim) -> int:
    """Returns the most deliveries of an unfinished message, by earlier owners and this one: at the position, or
    delivered again here. 0 without one, and in at-most-once mode."""
    tracker = claim.tracker
    if not isinstance(tracker, AtLeastOnce):
        return 0
    claim.settle()
    most, found = tracker.deliveries(), tracker.redeliveries
    for offset in () if found is None else found.again:
        count = tracker.delivery_count(offset)
        if count > most and (place := tracker.place_of(offset)) is not None and not place[0].is_finished(place[1]):
            most = max(most, count - place[0].is_queued(place[1]))
    return most


class Redelivering:
    """Takes due messages of one consumer's claims, and remembers those of the running fetch."""

    def __init__(self, context: DeliveryContext) -> None:
        self._context = context
        self._taken: list[tuple[Redeliveries, GivenBack]] = []

    def begin(self) -> None:
        """Notes that the user has the messages of earlier fetches."""
        self._taken.clear()

    def take_back(self) -> None:
        """Makes the messages of the running fetch due again, because an exception kept them from the user."""
        while self._taken:
            found, one = self._taken.pop()
            found.put_back(one)

    def take(
        self,
        claims: Iterable[Claim | None],
        now: Instant,
        left: int,
        left_bytes: int | None,
        parts: list[tuple[Part, Delivered]],
    ) -> tuple[int, int | None]:
        """Takes due messages into `parts`, `left` and `left_bytes` (None: any) at most, the first whatever its size,
        where the gate is open. Returns what remains."""
        for claim in claims:
            if (
                claim is None
                or redeliveries_of(claim) is None
                or not self._context.member.may_deliver(claim.epoch, now)
            ):
                continue
            for part, delivered in self._take(claim, now, left, left_bytes, bool(parts)):
                parts.append((part, delivered))
                left -= len(part.raw)
                if left_bytes is not None:
                    left_bytes -= sum(map(message_bytes, part.raw))
        return left, left_bytes

    def _take(
        self, claim: Claim, now: Instant, left: int, left_bytes: int | None, have_some: bool
    ) -> list[tuple[Part, Delivered]]:
        found = redeliveries_of(claim)
        taken: list[GivenBack] = []
        while found is not None and len(taken) < left and (one := found.take(now.mono_ms)) is not None:
            if left_bytes is not None:
                left_bytes -= message_bytes(_raw(one))
                if left_bytes < 0 and (have_some or taken):
                    found.put_back(one)
                    break
            taken.append(one)
            self._taken.append((found, one))
        self._count(len(taken), sum(not one.queued for one in taken))
        parts = []
        in_place = sorted(taken, key=lambda one: one.offset)
        again = {} if found is None else found.again
        for _, group in groupby(
            enumerate(in_place), lambda pair: (id(pair[1].run), pair[1].at - pair[0], again.get(pair[1].offset, 0))
        ):
            same = [one for _, one in group]  # messages that follow each other, at the same delivery, share a part
            delivered = Delivered(self._context, claim, same[0].run, again.get(same[0].offset, 0))
            parts.append((Part([_raw(one) for one in same], delivered, same[0].at), delivered))
        return parts

    def _count(self, messages: int, redelivered: int) -> None:
        self._context.delivered += messages
        self._context.answers.redelivered += redelivered

    def limit(self, claim: Claim, buffer: Buffer, count: int) -> int:
        """Returns how many of the next `count` may be delivered, given `max_deliver`; the first that earlier owners
        delivered so often become dead letters, which may empty the first chunk. Then the next one counts."""
        answers, tracker = self._context.answers, claim.tracker
        if (most := answers.deliveries_max) is None or not isinstance(tracker, AtLeastOnce):
            return count
        while buffer.fetched:
            head = buffer.fetched[0]
            assert head.run is not None
            offset = head.messages[head.at].offset() or 0
            exhausted = tracker.next_delivered(offset, most)
            if exhausted != offset:
                return min(count, head.below(exhausted) - head.at, len(head.messages) - head.at)
            answers.post_undelivered(claim, head.run, head.messages[head.at], tracker.delivery_count(offset) - 1)
            head.at += 1
            if head.at == len(head.messages):
                buffer.fetched.popleft()
        return 0

    def reserve(self, claim: Claim, now: Instant, until_ms: int) -> Redelivered | None:
        """Returns one due message to deliver before `until_ms` of the boot clock; None if there is none."""
        found = redeliveries_of(claim)
        if found is None or not found.is_due(now.mono_ms):
            return None
        return Redelivered(self, claim, found, now, until_ms)

    def deliver(self, claim: Claim, found: Redeliveries, now: Instant) -> Iterator[Message]:
        one: GivenBack | None = None
        done = False
        try:
            with self._context.lock:
                if claim.phase is ClaimPhase.OPEN:
                    one = found.take(now.mono_ms)
            if one is None:
                return
            raw, delivered = _raw(one), Delivered(self._context, claim, one.run, found.again.get(one.offset, 0))
            message = cast(Message, delivered.make(raw, delivered, one.at, raw.value()))
            self._count(1, int(not one.queued))
            done = True
            yield message
        except BaseException:
            if one is not None and not done:
                found.put_back(one)
            raise


class Redelivered(Reserved):
    """The permission to deliver one message again while the gate stays open."""

    __slots__ = ("_claim", "_found", "_now", "_raw", "_redelivering")

    def __init__(
        self, redelivering: Redelivering, claim: Claim, found: Redeliveries, now: Instant, until_ms: int
    ) -> None:
        # Not the constructor of Reserved, whose messages come from a buffer; the two have only their end in common.
        self._redelivering, self._claim, self._found, self._now = redelivering, claim, found, now
        self._until_ns = until_ms * 1_000_000
        self._raw: list[RawMessage] = []
        self.taken: int = 0

    def raw(self) -> Sequence[RawMessage]:
        return self._raw

    def messages(self, boot_ns: Callable[[], int]) -> Generator[Message, None, None]:
        """Yields the message unless the gate has shut. `boot_ns` reads the boot clock."""
        if boot_ns() < self._until_ns:
            for message in self._redelivering.deliver(self._claim, self._found, self._now):
                self._raw, self.taken = [message._raw], 1
                yield message


def _raw(one: GivenBack) -> RawMessage:
    return cast(RawMessage, one.message)
