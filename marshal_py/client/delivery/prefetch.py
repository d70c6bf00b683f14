"""Decides how much one consumer fetches ahead, and when it looks for more. It fetches and pauses nothing itself.

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

from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

from marshal_py.client.delivery.buffers import Buffer
from marshal_py.client.delivery.handling_rate import HandlingRate

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
        """Tells whether nothing more should be fetched into this buffer."""
        return buffer.size >= self.messages or buffer.held_bytes() >= self.size_bytes

    def low(self, buffer: Buffer) -> bool:
        """Tells whether to fill this buffer again, because it holds at most 1/LOW_SHARE of what it may hold."""
        size = buffer.size
        if not size:
            return True
        return LOW_SHARE * size <= self.messages and LOW_SHARE * buffer.held_bytes() <= self.size_bytes


class Prefetch:
    """Bounds how many messages and how many bytes all buffers of one consumer hold together.

    While the buffers hold less than a bound, the partitions that have messages share it evenly: those without messages
    need nothing yet. Once they hold as much as the bound, every partition gets an even share of it, with messages or
    without, so that there is room for a partition whose messages come later. In bytes each gets UNFAIR such shares,
    because nothing more is taken once the buffers hold `bytes_max`, unless nothing of it can be delivered.
    """

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
        """Tells whether the consumer is slow and its last look is LOOK_MS ago.

        If so, the caller must look now, and the next look is due LOOK_MS later.
        """
        if mono_ms - self._looked_ms < LOOK_MS or not rate.slower_than(SLOW_PER_S):
            return False
        self._looked_ms = mono_ms
        return True

    def room(self, buffers: Collection[Buffer]) -> Room | None:
        """Returns how much each buffer may hold at most, given how full all buffers of the consumer are.

        None stands for any number: together they hold no more messages than are taken at once, and are not full.
        """
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
        """Tells whether the buffers hold as many bytes as they may, if the last message came while they were not empty.

        Only messages that come fill them, so where they were not full then, this takes no time.
        """
        self._full = self._full and held_bytes(buffers) + self._aside_bytes() >= self.bytes_max
        return self._full

    def takes(self, buffers: Collection[Buffer], most: int) -> int:
        """Returns how many messages to take at once, at most `most`: so many as should fit; 0 if the buffers are full.

        While the buffers are empty it is `most`, however large they are: librdkafka's queue has a bound of its own.
        """
        return self._fitting(buffers, most, 1)

    @property
    def stopped(self) -> bool:
        """Tells whether nothing new may be taken, because messages of `prefetch_bytes` bytes wait for an answer."""
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
