"""What a run leaves behind for its judges: the raw logs, the delivery journal, what tools said. Judges nothing.

Written by the simulator, read by the auditor. Nothing here comes from what is being judged but the bytes of the log and
the digests that clients hold.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Key = tuple[str, str, int]  # group, topic, partition


class Tape(MutableSequence[Item], Generic[Item]):
    """A list by offset that begins at `first`. What lies below was deleted: `below` stands for each of it.

    A log that lived for a year begins at a great offset, and nobody wants a list of nothing before it.
    """

    def __init__(self, first: int, items: Iterable[Item], below: Item) -> None:
        self._first, self._items, self._below = first, list(items), below

    def __len__(self) -> int:
        return self._first + len(self._items)

    def __getitem__(self, offset: Any) -> Any:
        """One item only: nobody needs a slice."""
        if offset < 0:
            offset += len(self)
        return self._items[offset - self._first] if offset >= self._first else self._below

    def __setitem__(self, offset: Any, item: Any) -> None:
        if offset >= self._first:
            self._items[offset - self._first] = item

    def __delitem__(self, offset: Any) -> None:
        if offset != len(self) - 1 or not self._items:
            raise TypeError("a log loses nothing from its middle")
        self._items.pop()

    def insert(self, index: int, value: Item) -> None:
        """Only at the end: `append`."""
        if index != len(self):
            raise TypeError("a log grows at its end")
        self._items.append(value)


class Delivery:
    """One message handed to a handler. `read_to`: how much of the log the client had read at the gate."""

    __slots__ = ("begin_ms", "client", "end_ms", "epoch", "gate_ms", "group", "inherited", "instance", "offset",
                 "partition", "read_to", "topic")  # fmt: skip

    def __init__(self, group: str, client: int, instance: bytes, epoch: int, topic: str, partition: int, offset: int,
                 read_to: int, gate_ms: int, begin_ms: int, end_ms: int = -1) -> None:  # fmt: skip
        self.group, self.client, self.instance, self.epoch = group, client, instance, epoch
        self.topic, self.partition, self.offset, self.read_to = topic, partition, offset, read_to
        self.gate_ms, self.begin_ms, self.end_ms = gate_ms, begin_ms, end_ms
        self.inherited = False

    @property
    def key(self) -> Key:
        return self.group, self.topic, self.partition

    def inherited_by(self, client: int) -> Delivery:
        """The same call, still running in a forked twin."""
        born = Delivery(self.group, client, self.instance, self.epoch, self.topic, self.partition, self.offset,
                        self.read_to, self.gate_ms, self.begin_ms)  # fmt: skip
        born.inherited = True
        return born


class Report(NamedTuple):
    """What an admin's tool said about its SetPosition (S12)."""

    group: str
    by: str
    said: str  # moved, not moved, unknown
    moves: tuple[tuple[str, int, int], ...]  # topic, partition, wanted offset
    read_to: int = -1  # how much of the log it had read when it went home; -1 if it went without having read its end


class Stop(NamedTuple):
    """A reader that refused to read on, and the error that it named (S13, S14)."""

    group: str
    client: int
    ms: int
    read_to: int  # the record at which it stopped
    error: str


@dataclass
class Evidence:
    """All that a run leaves behind about one log. `sent`: value -> (first send, last send, first sender).

    `log` is what a plain consumer saw that read every record as it came. Offsets in `gaps` never held one. Records
    below `first` were deleted before that; a snapshot at `first` stands for them. Those below `inherited` are a dump's:
    who read, sent or delivered what then, and when, is not known.
    """

    number: int = 0
    groups: tuple[str, ...] = ()
    root: bytes = b""  # the root Genesis, for a log that is not its own root
    log: Sequence[bytes | None] = field(default_factory=list)
    appended_ms: Sequence[int] = field(default_factory=list)
    sent: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    digests: dict[tuple[str, int, int, int], int] = field(default_factory=dict)  # group, at, state, chain -> client
    finals: list[tuple[int, str, int, int]] = field(default_factory=list)  # client, group, read to, state digest
    topics: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    forks: list[tuple[int, int, int]] = field(default_factory=list)  # ms, original, twin
    reports: list[Report] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    poisoned: dict[int, str] = field(default_factory=dict)  # offset -> what nobody of ours wrote there
    gaps: set[int] = field(default_factory=set)
    compacted: set[int] = field(default_factory=set)  # offsets that later readers did not find any more
    strays: list[Delivery] = field(default_factory=list)  # by clients of a topic that is gone
    astray: list[int] = field(default_factory=list)  # clients that never noticed that
    corrupted: set[int] = field(default_factory=set)  # clients whose memory was falsified
    branched: bool = False  # the log once lost its tail: what was promised upon that cannot be asked for
    excused: set[str] = field(default_factory=set)  # errors of readers for which the brokers' answers gave the reason
    first: int = 0
    inherited: int = 0
    # By client, unless it may deliver late: when it told its user of a fence, and how much of the log it had read then.
    fences: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    # By client: up to where it had read when it did something for the last time, because it was killed, ended with an
    # error or the run ended. -1 if it was stopped then: what it had read may have led to nothing.
    acted_to: dict[int, int] = field(default_factory=dict)
    # When an owner stopped delivering a partition for the sake of another member: (ms, group, epoch).
    handovers: list[tuple[int, str, int]] = field(default_factory=list)
    hand_over_intervals: int = 2**31  # how many of its own intervals an owner that hands over waits for its handlers
    # By client: when it lost its place in the log and began anew (N11), and how much of the log it had read by then.
    restarts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class Violation(NamedTuple):
    invariant: str
    ms: int
    offset: int  # in the log, -1 if it stands for no record
    text: str
