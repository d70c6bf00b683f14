"""Decides how much one consumer fetches ahead, when it looks for more, and what it asks grants for. It fetches nothing.

librdkafka returns the messages of all partitions through one queue, in the order in which they were fetched, and
fetches nothing while that queue is full. A fast user gets through it in seconds. With a slow one, the first message of
a new partition would wait until thousands of another partition are handled. So a slow consumer reads the queue to its
end every LOOK_MS (a look), into one buffer per partition, and pauses the partitions that have enough. librdkafka then
drops what it had queued of them, and fetches it again when the buffer is low. This file holds the bounds.

Memory is bounded by `prefetch_bytes`, for these buffers and once more for librdkafka's queue. Each is filled up to half
of it. The other half is for what comes at once: into the buffers what one call of librdkafka returns, which is at most
its queue, or up to twice a fair share of each partition; into that queue one answer of a broker (settings.py). Messages
that no handler has, because they were given back or go to a dead-letter topic, count as if they were in the buffers.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from marshal_py.client.delivery.buffers import Buffer, blocked
from marshal_py.client.values.info import ProcessStats
from marshal_py.client.values.options import BOUNDS
from marshal_py.protocol.claims import AtLeastOnce, AtMostOnce, Claim, ClaimPhase
from marshal_py.protocol.member.rebalance import GRANTS_AHEAD
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import DataSource

# Messages per second: below it a consumer is slow. With librdkafka's queue as settings.py has it, and 12 partitions of
# small messages, about 140,000 are queued at most, six seconds of work at this rate.
SLOW_PER_S: Final = 25_000
LOOK_MS: Final = 50  # between two looks at the queue; a look that finds nothing costs a few microseconds
LOOK_PIECES_MAX: Final = 20  # pieces taken per look, so that a handler waits for some tens of ms at most
BUFFERED_MESSAGES_MAX: Final = 60_000  # per consumer; each takes about 600 bytes beside its payload
LOW_SHARE: Final = 4  # a paused partition is fetched again when its buffer is down to this fraction: 1/4
FILLED_SHARE: Final = 2  # buffers, and librdkafka's queue, are filled up to this fraction of `prefetch_bytes`: 1/2
# A partition is paused when it has so many times its even share of the bytes. With one share, partitions that get as
# much as each other would be paused all the time, and each pause throws away what librdkafka has queued of it.
UNFAIR: Final = 2


class Room(NamedTuple):
    """Says how much one partition may buffer now: how many messages, and how many bytes of keys and values."""

    messages: int
    size_bytes: int

    def full(self, buffer: Buffer) -> bool:
        """Returns whether nothing more should be fetched into this buffer."""
        return buffer.size >= self.messages or buffer.held_bytes() >= self.size_bytes

    def low(self, buffer: Buffer) -> bool:
        """Returns whether to fill this buffer again, because it holds at most 1/LOW_SHARE of what it may hold."""
        size = buffer.size
        if not size:
            return True
        return LOW_SHARE * size <= self.messages and LOW_SHARE * buffer.held_bytes() <= self.size_bytes


class Prefetch:
    """Bounds what all buffers of one consumer hold. Below the bound the partitions with messages share it; at the bound
    each has an even share, so that there is room for one whose messages come later. In bytes UNFAIR shares, as nothing
    more is taken at `bytes_max`, unless nothing can be delivered."""

    __slots__ = ("_aside_bytes", "_full", "_looked_ms", "_most_bytes", "_piece_messages", "bytes_max", "wanted")

    def __init__(self, prefetch_bytes: int, piece_messages: int, aside_bytes: Callable[[], int] = int) -> None:
        """Begins with empty buffers. `aside_bytes` returns the size of the messages that count as buffered, too."""
        self._most_bytes, self._aside_bytes = prefetch_bytes, aside_bytes
        self.bytes_max: int = prefetch_bytes // FILLED_SHARE
        self.wanted: int = 0  # messages of the batch that the user asks for: they must fit
        self._piece_messages = piece_messages
        self._looked_ms = 0
        self._full = False  # when the buffers were last measured

    def due(self, rate: HandlingRate, mono_ms: int) -> bool:
        """Returns whether a slow consumer must look now: LOOK_MS after the last look."""
        if mono_ms - self._looked_ms < LOOK_MS or not rate.slower_than(SLOW_PER_S):
            return False
        self._looked_ms = mono_ms
        return True

    def room(self, buffers: Collection[Buffer]) -> Room | None:
        """Returns how much each buffer may hold; None: any, while all together hold no more than is taken at once."""
        filled = [buffer for buffer in buffers if buffer.fetched]
        messages = sum([buffer.size for buffer in filled])
        size_bytes = held_bytes(filled)
        self._full = size_bytes + self._aside_bytes() >= self.bytes_max
        if messages <= self._piece_messages and not self._full:
            return None
        each = _share(self.bytes_max, size_bytes, len(filled), len(buffers))
        return Room(
            _share(max(BUFFERED_MESSAGES_MAX, 2 * self.wanted), messages, len(filled), len(buffers)),
            min(self.bytes_max, UNFAIR * each),
        )

    def full(self, buffers: Collection[Buffer]) -> bool:
        """Returns whether the buffers hold all their bytes. Only messages that come fill them, so it takes no time."""
        self._full = self._full and held_bytes(buffers) + self._aside_bytes() >= self.bytes_max
        return self._full

    def takes(self, buffers: Collection[Buffer], most: int) -> int:
        """Returns how many messages to take, `most` at most: what should fit; `most` into empty buffers, as
        librdkafka's queue has its own bound."""
        return self._fitting(buffers, most, 1)

    @property
    def stopped(self) -> bool:
        """Returns whether nothing new may be taken, because messages of `prefetch_bytes` bytes wait for an answer."""
        return self._aside_bytes() >= self._most_bytes

    def piece(self, buffers: Collection[Buffer]) -> int:
        """Returns how many messages to take per call during a look: about one partition's share; 0 ends the look."""
        return self._fitting(buffers, self._piece_messages, len(buffers))

    def _fitting(self, buffers: Collection[Buffer], most: int, parts: int) -> int:
        """Returns how many messages fit into what is left, but at most `most`, and one of `parts` of the whole."""
        chunks, aside_bytes = [chunk for buffer in buffers for chunk in buffer.fetched], self._aside_bytes()
        size_bytes = sum([chunk.held_bytes() for chunk in chunks])
        left_bytes = self.bytes_max - size_bytes - aside_bytes
        self._full = left_bytes <= 0
        if self._full or not chunks:
            return 0 if self._full else most
        mean_bytes = max(1.0, size_bytes / sum([len(chunk.messages) for chunk in chunks]))
        return min(most, max(1, int(min(left_bytes, self.bytes_max // parts) / mean_bytes)))


def held_bytes(buffers: Iterable[Buffer]) -> int:
    """Returns the size in bytes of the keys and values that these buffers hold in memory."""
    return sum([buffer.held_bytes() for buffer in buffers if buffer.fetched])


def _share(whole: int, used: int, filled: int, count: int) -> int:
    return max(1, whole // max(1, filled if used < whole else count))


# --- Measures how fast the user handles messages. How much is fetched and granted depends on it.
#
# A grant is the log's permission to deliver a range of offsets, in at-most-once mode (PROTOCOL.md D2).
#
# Time counts while the user has messages, not while he waits for some. Callers pass the time in and hold the lock.


FIRST_MESSAGES: Final = 1  # per second, until measured: a handler may take seconds, and a crash loses what was granted
BUSY_MS_MIN: Final = 20  # a rate over less time is too inexact, as the clock counts whole ms
BUSY_MS_MAX: Final = 2_000  # time that counts; what was measured before fades


class HandlingRate:
    """Measures how many messages per second one user handles."""

    __slots__ = ("_busy_ms", "_handled", "_since", "_total")

    def __init__(self) -> None:
        self._handled = 0.0
        self._total = 0
        self._busy_ms = 0.0
        self._since: tuple[int, int] | None = None  # (messages before, ms) of those that the user has now

    def delivered(self, messages_before: int, mono_ms: int) -> None:
        """Notes that the user gets messages now. `messages_before`: how many he had got before these, in all."""
        if self._since is None:
            self._since = messages_before, mono_ms

    def returned(self, messages: int, mono_ms: int) -> None:
        """Notes that the user asks for more messages. `messages`: how many he has got so far, in all."""
        if self._since is None:
            return
        before, since_ms = self._since
        self._since = None
        self._handled += messages - before
        self._total += messages - before
        self._busy_ms += mono_ms - since_ms
        if self._busy_ms > BUSY_MS_MAX:
            part = BUSY_MS_MAX / self._busy_ms
            self._handled, self._busy_ms = self._handled * part, self._busy_ms * part

    def slower_than(self, per_second: int) -> bool:
        """Returns whether the user handles fewer than `per_second` messages a second; False until measured."""
        return self._busy_ms >= BUSY_MS_MIN and 1000 * self._handled < per_second * self._busy_ms

    def per_second(self) -> int:
        """Returns about how many messages the user handles per second: at least 1, FIRST_MESSAGES until measured."""
        if not self._handled:
            return FIRST_MESSAGES
        return max(1, round(1000 * self._handled / max(BUSY_MS_MIN, self._busy_ms)))

    def within(self, ms: int) -> int:
        """Returns how many messages the user handles within `ms`: 1 at least and until measured, and twice what he has
        handled at most: few fast ones do not prove the next."""
        if not self._handled:
            return 1
        return max(1, min(int(ms * self._handled / max(BUSY_MS_MIN, self._busy_ms)), 2 * self._total))


# --- Bounds how many messages of one partition are delivered and not finished at once: the option `max_acks_pending`.
#
# A message counts from its delivery until it is acked or ended, also while it waits because its handler gave it back.
# So with a bound of one nothing of the partition is delivered before that message is finished (partitioned consumer
# groups: "Max acks pending"). Called with the Marshal's lock held.


# How long a call waits before it looks again whether acks of other threads have made room. The first wait is short, and
# each further one twice as long: so what a wait adds is at most about as long as the handler has taken.
WAIT_S_MIN: Final = 0.0005
WAIT_S_MAX: Final = 0.01
WAIT_SUPPLIED_S_MAX: Final = 0.05  # while handlers have enough: looks took a quarter of the time of a message


class Taker(Protocol):
    """A `process`, which takes what its consumer delivers, up to a bound of its own."""

    def end_of(self, claim: Claim) -> int:
        """Returns the offset below which messages of a claim may come."""

    def supplied(self) -> bool:
        """Returns whether so much is ready that what comes now waits for a worker in any case."""

    def stats(self) -> ProcessStats:
        """Returns how many messages are where now, and how many were answered how."""

    def silent_s(self) -> float:
        """Returns for how many seconds no handler has begun, returned or said that it is at work while all workers have
        one."""

    def unstarted(self) -> str:
        """Returns why no worker process can be started; "" if one has, or nobody needs one."""

    def counted_out(self, message: Any) -> None:
        """Hears of a Message that became a dead letter before it was delivered."""

    def at_work(self, claim: Claim, offsets: Sequence[int]) -> None:
        """Hears which messages of a claim handlers say to be at work on."""

    def terminated(self, claim: Claim, offsets: Sequence[int]) -> None:
        """Hears which messages of a claim handlers have ended by `term`."""


class AckWindow:
    """How much more of a claim may be delivered. `most`: None for any. `process`: the one that runs, if any."""

    __slots__ = ("_delivered", "_wait_s", "most", "process")

    def __init__(self, most: int | None) -> None:
        self.most: int | None = most
        self.process: Taker | None = None
        self._delivered = 0
        self._wait_s = WAIT_S_MIN

    @property
    def bounds(self) -> bool:
        """Returns whether anything may have to wait for acks."""
        return self.most is not None or self.process is not None

    def room(self, claim: Claim, buffer: Buffer) -> int:
        """Returns how many messages of `buffer` may be delivered for the first time under this claim; sys.maxsize:
        all."""
        if blocked(claim):
            return 0
        if not isinstance(claim.tracker, AtLeastOnce):
            return sys.maxsize
        room = sys.maxsize if self.process is None else buffer.room_below(self.process.end_of(claim))
        return room if self.most is None else max(0, min(room, self.most - claim.tracker.taken))

    def opens(self, claim: Claim, buffer: Buffer) -> bool:
        """Returns whether there is room for the first message of `buffer`, if it has one."""
        if blocked(claim):
            return False
        if not isinstance(claim.tracker, AtLeastOnce):
            return True
        if self.process is not None and buffer.fetched:
            head = buffer.fetched[0]
            if (head.messages[head.at].offset() or 0) >= self.process.end_of(claim):
                return False
        return self.most is None or claim.tracker.taken < self.most

    def at_work(self, claim: Claim, offsets: Sequence[int]) -> None:
        """Tells the process that runs, if any, which messages handlers say to be at work on."""
        if self.process is not None:
            self.process.at_work(claim, offsets)

    def counted_out(self, message: Any) -> None:
        """Tells the process that runs, if any, of a Message that became a dead letter before it was delivered."""
        if self.process is not None:
            self.process.counted_out(message)

    def terminated(self, claim: Claim, offsets: Sequence[int]) -> None:
        """Tells the process that runs, if any, which messages handlers have ended by `term`."""
        if self.process is not None:
            self.process.terminated(claim, offsets)

    def wait_s(self, buffers: Iterable[Buffer], delivered: int) -> float | None:
        """Returns how long to wait for acks before looking again; None if nothing waits. The waits grow until
        `delivered`, the consumer's count, changes."""
        if not any(self._full(buffers)):
            return None
        if delivered != self._delivered:
            self._delivered, self._wait_s = delivered, WAIT_S_MIN
        supplied = self.process is not None and self.process.supplied()
        wait_s = min(self._wait_s, WAIT_SUPPLIED_S_MAX if supplied else WAIT_S_MAX)
        self._wait_s = 2 * wait_s
        return wait_s

    def waits_for_handlers(self, buffers: Iterable[Buffer]) -> bool:
        """Returns whether a buffered message waits for an answer to one that a handler has now."""
        return any(
            isinstance(claim.tracker, AtLeastOnce) and claim.tracker.awaited > 0
            for claim in self._full(buffers)
            if claim.phase is ClaimPhase.OPEN
        )

    def _full(self, buffers: Iterable[Buffer]) -> Iterator[Claim]:
        """Yields the claims of which messages are buffered and none may be delivered before another is finished."""
        for buffer in buffers if self.bounds else ():
            claim = buffer.claim
            if claim is not None and buffer.fetched and not buffer.paused_by_user and not self.opens(claim, buffer):
                yield claim


# --- Says which partition of a consumer delivers next. Called with the Marshal's lock held.


class Turns:
    """The claimed partitions in the order of their turns. Who has had a turn goes behind the others."""

    __slots__ = ("_before", "_order", "_reserved")

    def __init__(self) -> None:
        self._order: deque[TopicPartition] = deque()
        self._reserved: TopicPartition | None = None
        self._before = 0

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(self._order)

    def add(self, tp: TopicPartition) -> None:
        self._order.append(tp)

    def remove(self, tp: TopicPartition) -> None:
        if tp in self._order:
            self._order.remove(tp)

    def each(self) -> Iterator[TopicPartition]:
        """Gives every partition one turn. The next call begins behind the last partition that this one has yielded."""
        for _ in range(len(self._order)):
            tp = self._order[0]
            self._order.rotate(-1)
            yield tp

    def reserved(self, tp: TopicPartition, delivered: int) -> None:
        """Notes whose turn it is, and how many messages the consumer had delivered when it began."""
        self._reserved, self._before = tp, delivered

    def resume(self, delivered: int) -> None:
        """Gives the last partition another turn if nothing was delivered since: a thread without processor time would
        deliver none of its reserved messages, and wait for all others."""
        last = self._reserved
        if last is not None and last in self._order and delivered == self._before:
            self._order.remove(last)
            self._order.appendleft(last)
        self._reserved = None


# --- Decides which offsets to ask grants for, in at-most-once mode (PROTOCOL.md D2)
#
# A grant is the log's permission to deliver a range of offsets; the member asks for it. A fast user's grants are asked
# for before the messages are taken from the source, up to the end of the partition: messages that wait in Python for
# their grant cost the garbage collector a visit at each collection. Called with the Marshal's lock held.


GRANTED_MS: Final = 2_000  # of the handler's work at most are granted and not delivered, in all partitions together


def before_fetching(rate: HandlingRate) -> bool:
    """Returns whether to ask for unfetched offsets: for a fast user. A slow one's grants, and those near a partition's
    end, where a transaction may be open, are for fetched messages only: nothing is granted that may come late or
    never."""
    return rate.per_second() >= SLOW_PER_S


def has_backlog(delivering: Iterable[tuple[Buffer, Claim]], source: DataSource) -> bool:
    """Returns whether a partition has a whole grant of offsets that are not fetched."""
    return any(source.end_offset(claim.tp) - buffer.next_offset >= BOUNDS.grant for buffer, claim in delivering)


def grants_fetched(buffer: Buffer, tracker: AtMostOnce, spent: bool) -> bool:
    """Returns whether no more can be granted now, and all granted were fetched. `spent`: the consumer has all its
    grants (`Offered`)."""
    no_more = len(tracker.grants) >= GRANTS_AHEAD or (spent and tracker.asked is None)
    return no_more and tracker.granted_to() <= buffer.next_offset


def grants_awaited(delivering: Iterable[tuple[Buffer, Claim]]) -> bool:
    """Returns whether fetched messages wait for their grant."""
    return any(
        buffer.fetched and isinstance(claim.tracker, AtMostOnce) and buffer.next_offset > claim.tracker.granted_to()
        for buffer, claim in delivering
    )


def grants_asked(delivering: Iterable[tuple[Buffer, Claim]]) -> bool:
    """Returns whether a grant of fetched messages was asked for and not read yet, or is about to be asked for."""
    return any(
        buffer.fetched
        and isinstance(claim.tracker, AtMostOnce)
        and (claim.offer is not None or claim.tracker.asked is not None)
        for buffer, claim in delivering
    )


class Offered(NamedTuple):
    """What `offer_grants` did. `something`: the member can ask for a grant now. `spent`: no more may be granted now."""

    something: bool
    spent: bool


def offer_grants(buffers: Collection[Buffer], source: DataSource, rate: HandlingRate, *, ends: bool) -> Offered:
    """Sets each claim's `offer`: about a second of work (`rate`), shared, BOUNDS.grant at most. All undelivered grants
    are GRANTED_MS of work at most, or one message, as a crash loses them. `buffers` in the order of delivery. `ends`:
    nothing more is delivered or offered."""
    if ends:
        for buffer in buffers:
            if buffer.claim is not None:
                buffer.claim.offer = None
        return Offered(False, False)
    ahead = before_fetching(rate)
    lacking: list[tuple[Buffer, Claim, AtMostOnce, int]] = []  # with the offset up to which to ask
    waiting = 0  # partitions that have messages, fetched or not
    supplied = False  # whether another partition will need its next grant soon
    for buffer in buffers:
        claim = buffer.claim
        if claim is None:
            continue
        waiting += bool(buffer.fetched)
        tracker = claim.tracker
        if not isinstance(tracker, AtMostOnce) or claim.phase is not ClaimPhase.OPEN:
            continue
        if not buffer.fetched:
            tracker.skipped(buffer.next_offset)
        tracker.holds(buffer.first_offset(tracker))  # drops grants that are used up, or hold no message
        may_fetch = ahead and not buffer.held_back and source.fetching(claim.tp)
        end = source.end_offset(claim.tp) if may_fetch else -1
        more = end > tracker.granted_to()
        waiting += more and not buffer.fetched
        if tracker.asked is not None or len(tracker.grants) >= GRANTS_AHEAD:
            supplied = supplied or more  # its offer stays as it is: a look at the buffer costs time
        else:
            lacking.append((buffer, claim, tracker, end))
    each = max(1, min(BOUNDS.grant, rate.within(1_000) // max(1, waiting)))
    # One record asks for all partitions. So a fast user's next grants wait until every partition needs one, but no
    # longer than the first of them has half a grant left.
    now = not (ahead and supplied) or any(_half_used(buffer, tracker, each) for buffer, _, tracker, _ in lacking)
    something = False
    left = rate.within(GRANTED_MS) - _undelivered(buffers) if now and lacking else 0
    for buffer, claim, tracker, end in lacking:
        count = min(each, left)
        claim.offer = buffer.ungranted(tracker, count, end) if count > 0 else None
        if claim.offer is not None:
            something, left = True, left - count
    return Offered(something, bool(now and lacking) and left <= 0)


def _undelivered(buffers: Iterable[Buffer]) -> int:
    """Returns how many messages are granted or asked for, and not delivered."""
    total = 0
    for buffer in buffers:
        tracker = buffer.claim.tracker if buffer.claim is not None else None
        if isinstance(tracker, AtMostOnce) and (tracker.grants or tracker.asked is not None):
            to = tracker.granted_to() if tracker.asked is None else tracker.asked[2]
            total += buffer.below(to, tracker)
    return total


def _half_used(buffer: Buffer, tracker: AtMostOnce, each: int) -> bool:
    granted_to = tracker.granted_to()
    return buffer.next_offset > granted_to or 2 * (granted_to - tracker.delivered_to) <= each
