"""One simulated broker: the coordination log as raw bytes, the target topics as offsets, and whether it answers.

Stores what arrives in the order of arrival and tells who waits. Judges nothing, draws nothing, knows no record.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

Place = tuple[str, int]  # topic, partition


class Broker:
    """What every client reads and writes. `*_down_until_ms`: no answer before that; who asks is held."""

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.appended_ms: list[int] = []
        self.topics: dict[Place, list[int]] = {}  # offsets that exist, ascending: gaps stay gaps
        self.ends: dict[Place, int] = {}
        self.counts: dict[str, int] = {}
        self.reads_down_until_ms = 0
        self.writes_down_until_ms = 0
        self.on_append: Callable[[int], None] = lambda now_ms: None
        self.held: list[Callable[[], None]] = []
        self._waiting: dict[Place, list[Callable[[], None]]] = {}

    def append(self, value: bytes, now_ms: int) -> None:
        self.log.append(value)
        self.appended_ms.append(now_ms)
        self.on_append(now_ms)

    def recover(self) -> None:
        """An outage may be over: everybody who was held asks again."""
        if self.held:
            held, self.held = self.held, []
            for again in held:
                again()

    # --- target topics

    def add_partitions(self, topic: str, count: int) -> None:
        """Topic `topic` has `count` partitions from now on (never fewer)."""
        for number in range(self.counts.get(topic, 0), count):
            self.topics[topic, number] = []
            self.ends[topic, number] = 0
        self.counts[topic] = count

    def produce(self, place: Place, messages: int, gap: int) -> None:
        """Appends messages; the first skips `gap` offsets (transactions, compaction)."""
        end = self.ends[place] + gap
        self.topics[place].extend(range(end, end + messages))
        self.ends[place] = end + messages
        for wake in self._waiting.pop(place, ()):
            wake()

    def fetch(self, place: Place, position: int, most: int) -> list[int]:
        """Offsets from `position` on, at most `most`."""
        offsets = self.topics[place]
        first = bisect_left(offsets, position)
        return offsets[first : first + most]

    def wait(self, place: Place, wake: Callable[[], None]) -> None:
        """Calls `wake` once, when the partition has grown."""
        self._waiting.setdefault(place, []).append(wake)
