"""The facts that the invariants speak of, as values: claims, sessions, grants. history.py finds them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final, NamedTuple

from marshal_sim.judge.evidence import Client, Key

NOBODY: Final = -1
FOREVER: Final = 2**62  # an offset after every log


class ClaimSpan:
    """One accepted claim. It lasts from the record at offset `epoch` to the one at offset `end`."""

    __slots__ = (
        "attempts",
        "behind",
        "client_id",
        "died",
        "drained",
        "end",
        "ended_by",
        "epoch",
        "finished",
        "generation",
        "given_back",
        "handed_over",
        "in_order",
        "key",
        "mode",
        "ms",
        "policy",
        "position",
        "raised",
        "released",
        "released_by",
        "sent_ms",
        "session",
        "topic_id",
        "unsettled",
    )

    client_id: str
    epoch: int
    generation: int
    key: Key
    mode: int
    ms: float
    policy: str
    position: int
    sent_ms: float
    session: int
    topic_id: str

    def __init__(
        self,
        key: Key,
        epoch: int,
        session: int,
        client_id: str,
        ms: float,
        sent_ms: float,
        position: int,
        generation: int,
        mode: int,
        policy: str,
        topic_id: str = "",
    ) -> None:
        self.topic_id = topic_id  # the log's, "" if it knows none: positions are those of this topic
        self.key, self.epoch, self.session, self.client_id = key, epoch, session, client_id
        self.ms, self.sent_ms = ms, sent_ms  # when it was read, and when it was first sent
        self.position, self.generation, self.mode = position, generation, mode
        self.policy = (
            policy  # of its group, "" if its settings name none; another life of the group may have another one
        )
        self.attempts: int = 0  # at-least-once: how often the log says that the message at `position` was delivered
        self.end: int = FOREVER
        self.ended_by: str = ""
        self.released_by: tuple[Client, float] = (NOBODY, -1)  # the first sender of the record that ended it, and when
        self.released: dict[Client, float] = {}  # by sender of a Release of it, accepted or not: when first
        self.drained: dict[Client, float] = {}  # by sender of a Release of it that a drain sent: when first
        self.finished: list[tuple[int, int]] = []  # at-least-once: what was reported to its owner as finished (D1)
        self.in_order: bool = (
            True  # the heartbeats of its one owner came in the order in which they were sent, each once
        )
        self.handed_over: bool = (
            False  # by a Release for the sake of another live member, after its handlers had finished
        )
        self.behind: bool = False  # by a Release of an owner that fell behind (D16)
        self.died: bool = False  # by a Release that its witness sent
        self.given_back: int | None = None  # at-most-once: its Release lowered the position to this
        self.raised: list[Raise] = []  # at-most-once: what heartbeats reported as handled
        # at-most-once: [start, to) that its verdict names as granted to the owner before it, and unsettled
        self.unsettled: tuple[int, int] = (0, 0)


class Extension(NamedTuple):
    offset: int
    sent_ms: float  # the newest send among this and all earlier extensions


class SessionFacts:
    """The facts of one session."""

    instance: bytes
    client_id: str
    interval_ms: int

    def __init__(self, instance: bytes, client_id: str, interval_ms: int) -> None:
        self.instance, self.client_id, self.interval_ms = instance, client_id, interval_ms
        self.extensions: list[Extension] = []
        self.heartbeats: dict[Client, float] = {}  # client (a cloned one is another) -> newest send of an accepted one
        self.left: dict[Client, float] = {}  # each sender of a Leave of it, and when it first did

    def extended_ms(self, read_to: int, ms: float) -> float:
        """Returns when the newest extension was sent that the client has read at the time `ms`; -1 if there is none.

        From then on the client may deliver for one interval.

        `read_to` is how much of the log the client has read. With -1 (unknown) the sending times decide.
        """
        if read_to >= 0:
            known = bisect_left(self.extensions, read_to, key=lambda e: e.offset)
        else:
            known = bisect_right(self.extensions, ms, key=lambda e: e.sent_ms)
        return self.extensions[known - 1].sent_ms if known else -1


class Advance(NamedTuple):
    """Says that a record of the owner moved a position forward, in at-least-once mode."""

    claim: ClaimSpan
    before: int
    after: int
    offset: int
    sent_ms: float


class Raise(NamedTuple):
    """Says that a heartbeat reported a claim's messages up to `after` as handled, in at-most-once mode (F2.3)."""

    before: int
    after: int
    offset: int
    sent_ms: float


class Grant(NamedTuple):
    key: Key
    epoch: int
    from_: int
    start: int
    to: int
    sent_ms: float
    offset: int  # the record's offset


class Eviction(NamedTuple):
    """An accepted Evict.

    `observed` is the extension that it names. `waited_ms` passed between the append of that extension and the Evict's
    first sending.
    """

    offset: int
    group: str
    session: int
    observed: int
    waited_ms: float
    by: str
    held: int  # how many partitions it took from the session


class WaitedOut(NamedTuple):
    """An accepted ReleaseGroup that ended somebody else's pause. `waited_ms` passed between the append of the pause's
    newest change, at `start`, and the first sending of this record."""

    offset: int
    group: str
    start: int
    need_ms: int
    waited_ms: float
    by: str


class FinalPosition(NamedTuple):
    """The position of a partition at the offset by which everything should be done."""

    position: int
    parked: bool


def finished_spans(position: int, progress: bytes) -> list[tuple[int, int]]:
    """Returns the ranges [start, to) that a claim's `progress` names as finished (PROTOCOL.md 4.2, E10); none if it is
    malformed.
    """
    spans: list[tuple[int, int]] = []
    if progress[:2] == b"\0\0":
        (gap, size), rest = _leb128(progress[2:], 2)
        first = position + gap
        offsets = [first + 8 * at + bit for at, byte in enumerate(rest[:size]) for bit in range(8) if byte >> bit & 1]
        spans, progress = [(offset, offset + 1) for offset in offsets], rest[size:]
    numbers, _ = _leb128(progress, len(progress))
    for gap, length, times in zip(*[iter(numbers)] * 3, strict=False):
        start, position = position + gap, position + gap + length
        spans += [(start, position)] if times == 0 else []
    return spans


def _leb128(data: bytes, most: int) -> tuple[list[int], bytes]:
    """Reads at most so many numbers. Returns them, and the bytes behind the last one."""
    numbers, value, shift, read = list[int](), 0, 0, 0
    for at, byte in enumerate(data, 1):
        if len(numbers) == most:
            break
        value, shift = value + ((byte % 128) << shift), shift + 7
        if byte < 128:
            numbers.append(value)
            value, shift, read = 0, 0, at
    return numbers, data[read:]
