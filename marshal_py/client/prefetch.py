"""Decides how much one consumer fetches ahead, and when it looks for more. It fetches and pauses nothing itself.

librdkafka returns the messages of all partitions through one queue, in the order in which they were fetched, and
fetches nothing while that queue is full. A fast user gets through it in seconds. With a slow one, the first message of
a new partition would wait until thousands of another partition are handled. So a slow consumer reads the queue to its
end every LOOK_MS (a look), into one buffer per partition, and pauses the partitions that have enough. librdkafka then
drops what it had queued of them, and fetches it again when the buffer is low. This file holds the bounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from marshal_py.client.buffers import Buffer
from marshal_py.client.handling_rate import HandlingRate

# Messages per second: below it a consumer is slow. With librdkafka's queue as settings.py has it, and 12 partitions of
# small messages, about 140,000 are queued at most, six seconds of work at this rate.
SLOW_PER_S: Final = 25_000
LOOK_MS: Final = 50  # between two looks at the queue; a look that finds nothing costs a few microseconds
LOOK_PIECES_MAX: Final = 20  # pieces taken per look, so that a handler waits for some tens of ms at most
BUFFERED_MESSAGES_MAX: Final = 60_000  # per consumer; each takes about 600 bytes beside its payload
LOW_SHARE: Final = 4  # a paused partition is fetched again when its buffer is down to this fraction: 1/4


class Room(NamedTuple):
    """Says how much one partition may buffer now: how many messages, and how many bytes of keys and values."""

    messages: int
    size_bytes: int

    def full(self, buffer: Buffer) -> bool:
        """Tells whether nothing more should be fetched into this buffer."""
        return buffer.size >= self.messages or buffer.payload_bytes() >= self.size_bytes

    def low(self, buffer: Buffer) -> bool:
        """Tells whether to fill this buffer again, because it holds at most 1/LOW_SHARE of what it may hold."""
        size = buffer.size
        if not size:
            return True
        return LOW_SHARE * size <= self.messages and LOW_SHARE * buffer.payload_bytes() <= self.size_bytes


class Prefetch:
    """Bounds how many messages and how many bytes all buffers of one consumer hold together.

    While the buffers hold less than a bound, the partitions that have messages share it evenly: those without messages
    need nothing yet. Once they hold as much as the bound, every partition gets an even share of it, with messages or
    without, so that there is room for a partition whose messages come later.
    """

    __slots__ = ("_looked_ms", "_mean_bytes", "_piece_messages", "bytes_max", "wanted")

    def __init__(self, bytes_max: int, piece_messages: int) -> None:
        self.bytes_max: int = bytes_max
        self.wanted: int = 0  # messages of the batch that the user asks for: they must fit
        self._piece_messages = piece_messages
        self._mean_bytes = 1  # of a message, as of the last look at the buffers
        self._looked_ms = 0

    def due(self, rate: HandlingRate, mono_ms: int) -> bool:
        """Tells whether the consumer is slow and its last look is LOOK_MS ago.

        If so, the caller must look now, and the next look is due LOOK_MS later.
        """
        if mono_ms - self._looked_ms < LOOK_MS or not rate.slower_than(SLOW_PER_S):
            return False
        self._looked_ms = mono_ms
        return True

    def room(self, buffers: Iterable[Buffer]) -> Room:
        """Returns how much each buffer may hold at most, given how full all buffers of the consumer are."""
        count = filled = messages = size_bytes = 0
        for buffer in buffers:
            count += 1
            if buffer.fetched:
                filled += 1
                messages += buffer.size
                size_bytes += buffer.payload_bytes()
        self._mean_bytes = max(1, size_bytes // max(1, messages))
        messages_max = max(BUFFERED_MESSAGES_MAX, 2 * self.wanted)
        return Room(_share(messages_max, messages, filled, count), _share(self.bytes_max, size_bytes, filled, count))

    def piece(self, partitions: int) -> int:
        """Returns how many messages to take from the queue per call during a look: about one partition's share."""
        return max(1, min(self._piece_messages, self.bytes_max // (max(1, partitions) * self._mean_bytes)))


def _share(whole: int, used: int, filled: int, count: int) -> int:
    return max(1, whole // max(1, filled if used < whole else count))
