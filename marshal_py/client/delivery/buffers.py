"""Buffers of fetched messages, one per partition, messages reserved for delivery one by one, and messages given back.

delivery_queue.py decides what is taken from which buffer. Everything is called with the Marshal's lock held, except
Reserved.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple, cast

from marshal_py.client.messages.answers import Delivered, DeliveryContext
from marshal_py.client.messages.message import Message, Part
from marshal_py.client.values.requests import message_bytes, payload_bytes
from marshal_py.protocol.claims import AtLeastOnce, AtMostOnce, Claim, ClaimPhase, GivenBack, OffsetRun, Redeliveries
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.transport.ports import RawMessage

_OPEN: Final = ClaimPhase.OPEN  # bound once: an enum looks up its members at every use
MERGED_MAX: Final = 1_000  # messages; smaller chunks are merged up to this, since reading a buffer costs time per chunk
MERGED_BYTES_MAX: Final = 1 << 20  # of a merged chunk: it is held in memory until all of it is delivered


class Allowance(NamedTuple):
    """How much may be delivered before the next step: messages, bytes (None: any). `one_fits`: the first, whatever its
    size."""

    messages: int = sys.maxsize
    size_bytes: int | None = None
    one_fits: bool = True


ENDLESS: Final = Allowance()


class Fetched:
    """A chunk of messages of one partition. `at`: the first undelivered. `run`: tracks acks; None in at-most-once mode
    and for what is fetched ahead."""

    __slots__ = ("_held_bytes", "at", "last_offset", "messages", "run", "size_bytes")

    def __init__(self, messages: Sequence[RawMessage]) -> None:
        self.messages: Sequence[RawMessage] = messages
        self.last_offset: int = messages[-1].offset() or 0
        self.at: int = 0
        self.size_bytes: int = -1  # of the whole chunk, by `message_bytes`; -1 until it is measured
        self._held_bytes = -1  # of the whole chunk, keys and values only; -1 until it is measured
        self.run: OffsetRun | None = None

    def extend(self, messages: Sequence[RawMessage]) -> None:
        """Appends the next messages; not to a buffer's first chunk, on whose length a running iteration relies."""
        self.messages = [*self.messages, *messages]
        self.last_offset = messages[-1].offset() or 0
        self.size_bytes = -1
        self._held_bytes += payload_bytes(messages) if self._held_bytes >= 0 else 0

    def held_bytes(self) -> int:
        """Returns the bytes of values, and about those of keys, measured once. Delivered ones count: a chunk is freed
        as a whole."""
        if self._held_bytes < 0:
            self._held_bytes = payload_bytes(self.messages)
        return self._held_bytes

    def below(self, offset: int) -> int:
        """Returns the index of the first undelivered message at or above `offset`; the chunk's length if none is."""
        if self.last_offset < offset:
            return len(self.messages)
        if (self.messages[self.at].offset() or 0) >= offset:
            return self.at
        return bisect_left(self.messages, offset, self.at, key=lambda message: message.offset() or 0)


class Reserved:
    """Messages of one partition to deliver one by one. Before each it checks the claim's phase, as a record read
    meanwhile may have shut the gate, and the boot clock, as `Member.open_ms` said for how long it stays open."""

    __slots__ = ("_buffer", "_count", "_delivered", "_first", "_head", "_mono_ms", "_until_ns", "taken")

    def __init__(
        self, buffer: Buffer, head: Fetched, delivered: Delivered, count: int, until_ms: int, mono_ms: int
    ) -> None:
        self._buffer, self._head, self._delivered = buffer, head, delivered
        self._count, self._until_ns, self._mono_ms = count, until_ms * 1_000_000, mono_ms
        self._first = head.at
        self.taken: int = 0  # how many messages were delivered; known once `messages` has ended

    def raw(self) -> Sequence[RawMessage]:
        """Returns the messages that were delivered, once `messages` has ended."""
        return self._head.messages[self._first : self._first + self.taken]

    def messages(self, boot_ns: Callable[[], int]) -> Generator[Message, None, None]:
        """Yields the messages until the gate shuts or none is left. `boot_ns` reads the boot clock."""
        run = self._head.run
        return self._at_most_once(boot_ns) if run is None else self._at_least_once(run, boot_ns)

    def _at_least_once(self, run: OffsetRun, boot_ns: Callable[[], int]) -> Generator[Message, None, None]:
        """Yields without the lock. This thread puts a message in flight, then checks the gate; the loop shuts the gate,
        then checks what is in flight. So one sees the other, and no Release is sent between them (T16)."""
        buffer, head, delivered, until_ns = self._buffer, self._head, self._delivered, self._until_ns
        claim, fetched, messages, make = delivered.claim, buffer.fetched, head.messages, delivered.make
        run.deliver(0, self._mono_ms)
        last = len(messages) - 1
        first = done = head.at  # the user has the messages [first, done)
        at = index = -1
        try:
            for at in range(first, first + self._count):
                if head.at != at or buffer.paused_by_user:
                    return  # a fetch inside the loop has taken messages, or the user has paused the partition
                index = run.delivered
                run.delivered = index + 1
                if claim.phase is not _OPEN or boot_ns() >= until_ns:
                    run.delivered = index
                    return
                raw = messages[at]
                message = make(raw, delivered, index, raw.value())
                if at == last:
                    fetched.popleft()
                head.at = done = at + 1
                yield message
        except BaseException:
            if at == done:  # interrupted (ctrl-C) before the message was delivered, so it is still the first one
                run.delivered = index
                if not fetched or fetched[0] is not head:
                    fetched.appendleft(head)
            raise
        finally:
            delivered.context.delivered += done - first
            self.taken = done - first

    def _at_most_once(self, boot_ns: Callable[[], int]) -> Generator[Message, None, None]:
        """Yields the messages, taking the lock for each, because another thread may drop the grant that covers it."""
        buffer, head, delivered = self._buffer, self._head, self._delivered
        claim, fetched = delivered.claim, buffer.fetched
        tracker = claim.tracker
        assert isinstance(tracker, AtMostOnce)
        for _ in range(self._count):
            with delivered.context.lock:
                if not fetched or fetched[0] is not head or head.at == len(head.messages) or buffer.paused_by_user:
                    return
                raw = head.messages[head.at]
                offset = raw.offset() or 0
                if claim.phase is not _OPEN or boot_ns() >= self._until_ns or not tracker.holds(offset):
                    return
                tracker.deliver(offset, self._mono_ms)
                delivered.context.delivered += 1
                self.taken += 1
                head.at += 1
                if head.at == len(head.messages):
                    fetched.popleft()
            yield delivered.make(raw, delivered, 0, raw.value())


class Buffer:
    """Messages of one partition that were fetched and not delivered."""

    __slots__ = ("claim", "fetched", "held_back", "lost", "next_offset", "paused_by_user", "tp")

    def __init__(self, tp: TopicPartition, position: int) -> None:
        self.tp: TopicPartition = tp
        self.claim: Claim | None = None  # None while the partition is fetched ahead
        self.fetched: deque[Fetched] = deque()
        self.next_offset: int = position  # where fetching continues
        self.held_back: bool = False  # the source does not fetch it: it is full, or paused by the user
        self.paused_by_user: bool = False
        self.lost: list[tuple[int, int]] = []  # offsets [start, to) that were deleted while it was fetched ahead

    @property
    def size(self) -> int:
        """Returns how many undelivered messages this buffer holds."""
        fetched = self.fetched
        return sum([len(part.messages) - part.at for part in fetched]) if fetched else 0

    @property
    def start(self) -> int:
        """Returns the lowest offset that this buffer holds in memory; the next one that is fetched if it is empty."""
        return (self.fetched[0].messages[0].offset() or 0) if self.fetched else self.next_offset

    def held_bytes(self) -> int:
        """Returns the size in bytes of the keys and values that this buffer holds in memory."""
        return sum([part.held_bytes() for part in self.fetched])

    def open(self, claim: Claim, position: int) -> None:
        """Begins a claim of the partition. Messages that were fetched ahead are kept from `position` on."""
        self.claim = claim
        for part in self.fetched:
            while part.at < len(part.messages) and (part.messages[part.at].offset() or 0) < position:
                part.at += 1
            part.messages, part.at = part.messages[part.at :], 0
        ahead, self.fetched = self.fetched, deque()
        for part in ahead:
            if part.messages:
                self._keep(part.messages)
        self.reach(position)

    def room_below(self, offset: int) -> int:
        """Returns how many undelivered messages lie below `offset`; sys.maxsize if all of them do."""
        total = 0
        for part in self.fetched:
            if part.last_offset >= offset:
                return total + part.below(offset) - part.at
            total += len(part.messages) - part.at
        return sys.maxsize

    def bytes_of(self, count: int, size: Callable[[RawMessage], int]) -> int:
        """Returns the sum of `size` over the next `count` messages; remembered for a chunk of which nothing was
        delivered, as a waiting fetch asks repeatedly."""
        total = 0
        for part in self.fetched:
            left = len(part.messages) - part.at
            if part.at or left > count:
                total += sum(map(size, part.messages[part.at : part.at + min(left, count)]))
            else:
                if part.size_bytes < 0:
                    part.size_bytes = sum(map(size, part.messages))
                total += part.size_bytes
            count -= min(left, count)
            if not count:
                break
        return total

    def add(self, messages: Sequence[RawMessage], reached: int = NONE) -> None:
        """Adds fetched messages from `next_offset` on: a claim may begin above where it was fetched ahead (A3). Without
        any, as `reach`."""
        if not messages:
            self.reach(reached)
            return
        if (messages[0].offset() or 0) < self.next_offset:
            messages = [message for message in messages if (message.offset() or 0) >= self.next_offset]
            if not messages:
                return
        self._keep(messages)
        self.next_offset = (messages[-1].offset() or 0) + 1  # last: an exception in between is undone (`forget`)

    def reach(self, offset: int) -> None:
        """Notes that all messages below `offset` were fetched: fetching continues there, and so may the position."""
        self.next_offset = max(self.next_offset, offset)
        if self.claim is not None and not self.claim.sealed and isinstance(self.claim.tracker, AtLeastOnce):
            self.claim.tracker.reached(self.next_offset)

    def forget(self) -> int:
        """Drops all undelivered messages. Returns the offset from which they must be fetched again."""
        position = self.start
        fetched, self.fetched = self.fetched, deque()
        for part in fetched:
            part.at = len(part.messages)  # ends an iteration over it
        if self.claim is None or self.claim.sealed:
            return position
        tracker = self.claim.tracker
        return tracker.forget_undelivered() if isinstance(tracker, AtLeastOnce) else tracker.delivered_to

    # --- in at-most-once mode

    def skip_to_grant(self, tracker: AtMostOnce) -> int:
        """Drops messages below where delivery continues. Returns how many undelivered ones of the first chunk the
        oldest grant covers."""
        while self.fetched:
            head = self.fetched[0]
            while head.at < len(head.messages) and (head.messages[head.at].offset() or 0) < tracker.delivered_to:
                head.at += 1
            if head.at == len(head.messages):
                self.fetched.popleft()
                continue
            if not tracker.holds(head.messages[head.at].offset() or 0):
                return 0
            return head.below(tracker.grants[0].to) - head.at
        return 0

    def first_offset(self, tracker: AtMostOnce) -> int:
        """Returns the offset of the first undelivered message, or where it will be at least if none is fetched."""
        if not self.fetched:
            return tracker.delivered_to
        head = self.fetched[0]
        return max(tracker.delivered_to, head.messages[head.at].offset() or 0)

    def granted(self, tracker: AtMostOnce) -> int:
        """Returns how many undelivered messages have a grant."""
        if not self.fetched or not tracker.grants:
            return 0
        to = tracker.granted_to()
        return sum(part.below(to) - part.at for part in self.fetched)

    def below(self, to: int, tracker: AtMostOnce) -> int:
        """Returns how many undelivered messages lie below `to`. Offsets that are not fetched yet count, too."""
        fetched = sum([part.below(to) - part.at for part in self.fetched])
        return fetched + max(0, to - max(self.next_offset, tracker.delivered_to))

    def ungranted(self, tracker: AtMostOnce, left: int, end: int) -> tuple[int, int] | None:
        """Returns the next `left` offsets [start, to) without a grant, or None: fetched ones with the empty offsets
        behind, then unfetched ones if there are as many below `end`."""
        start = to = granted_to = tracker.granted_to()
        for part in self.fetched:
            at = part.below(granted_to)
            count = min(left, len(part.messages) - at)
            if count > 0:
                start = (part.messages[at].offset() or 0) if start == to else start
                to = (part.messages[at + count - 1].offset() or 0) + 1
                left -= count
            if not left:
                break
        else:
            to = max(to, self.next_offset)
        to += left if to + left <= end else 0
        return (start, to) if start < to else None

    # --- what comes in

    def _keep(self, messages: Sequence[RawMessage]) -> None:
        """Stores messages. In at-least-once mode it leaves out those that an earlier owner has finished (D1)."""
        run = None
        if self.claim is not None and isinstance(self.claim.tracker, AtLeastOnce):
            offsets = offsets_of(messages)
            fresh, run = self.claim.tracker.admit(offsets)
            if run is None:
                return
            if fresh is not offsets:
                wanted = frozenset(fresh)
                messages = [message for message in messages if message.offset() in wanted]
        last = self.fetched[-1] if len(self.fetched) > 1 else None
        if last is not None and last.run is run and len(last.messages) + len(messages) <= MERGED_MAX:
            if last.held_bytes() <= MERGED_BYTES_MAX:
                last.extend(messages)
                return
        part = Fetched(messages)
        part.run = run
        self.fetched.append(part)


def offsets_of(messages: Sequence[RawMessage]) -> Sequence[int]:
    """Returns the offsets of messages, as a range if they are consecutive, which costs no memory per message."""
    first, last = messages[0].offset() or 0, messages[-1].offset() or 0
    if last - first + 1 == len(messages):
        return range(first, last + 1)
    return [message.offset() or 0 for message in messages]


def fit(messages: Sequence[RawMessage], at: int, count: int, limit_bytes: int, at_least_one: bool) -> int:
    """Returns how many of `count` messages from `at` on fit into `limit_bytes`; with `at_least_one` 1 at least."""
    total = 0
    for taken in range(count):
        total += message_bytes(messages[at + taken])
        if total > limit_bytes and not (taken == 0 and at_least_one):
            return taken
    return count


# --- Delivers messages again that their handlers have given back (PROTOCOL.md D14), from the user's thread
#
# The tracker of the claim knows which of them are due. A message is taken and made the user's in one step under the
# Marshal's lock, with the gate checked (D8); what an exception keeps from the user is due again at once.


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
            claim.settle()  # a message that was acked after all does not come again
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
            raw, times = head.messages[head.at], tracker.delivery_count(offset) - 1
            index = answers.post_undelivered(claim, head.run, raw, times)
            self._context.counted_out(
                self._context.make(raw, Delivered(self._context, claim, head.run), index, raw.value())
            )
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
                    claim.settle()  # as in `take`
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
