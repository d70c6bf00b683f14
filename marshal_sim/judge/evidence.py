"""The evidence of a run for its judges: the raw logs, the delivery journal, what tools reported. Judges nothing.

Two kinds of runs are written down in this form: those of the simulator (cluster.py, in virtual time) and those of real
processes (tests/support/evidence.py, from the raw log and the journals of handlers). The only things that
come from the code under judgement are the bytes of the log and the digests that clients hold. Times are ms of one
clock, with fractions where the clock has them; -1 means never, or unknown where a comment says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Key = tuple[str, str, int]  # group, topic, partition
Client = int | str  # the number of a simulated process, the client id of a real one


class Slack(NamedTuple):
    """Says how much a judge allows for clocks and scheduling before it objects. Everything is zero if time is exact."""

    stamp_ms: float = 0  # error of one process's times: floored, or a bit too early
    wait_ms: float = 0  # by which a client's clock and true time may differ
    drift_ppm: int = 0  # by which they may differ, in proportion to the time
    progress_ms: float = 0  # time to read and answer records: V1, V2, V5, V7


# Two floors and a ceiling between a client's clock and true time; the widest rate of a clock, with room; round trips.
SIMULATED = Slack(wait_ms=3, drift_ppm=1_000, progress_ms=200)


class OffsetList(MutableSequence[Item], Generic[Item]):
    """Lists items by offset from `first` on. Offsets before it are deleted and read as `below`, but take no memory.

    So a log that is a year old, and begins at a large offset, fits into memory.
    """

    def __init__(self, first: int, items: Iterable[Item], below: Item) -> None:
        self._first, self._items, self._below = first, list(items), below

    def __len__(self) -> int:
        return self._first + len(self._items)

    def __getitem__(self, offset: Any) -> Any:
        """Returns the item at one offset. Slices are not supported."""
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
        """Appends `value`. Raises TypeError if `index` is not the end."""
        if index != len(self):
            raise TypeError("a log grows at its end")
        self._items.append(value)


class Delivery:
    """Describes one message that was handed to a handler.

    `instance` is the instance id of the client's Join, or its client id if the journal knows no more. `gate_ms` is when
    `Member.may_deliver` allowed it, `read_to` how much of the log the client had read then (-1: unknown). `ack_ms` is
    when the library heard that the message is finished. `again_ms` is the earliest time of its next delivery if the
    handler gave the message back, else -1. `token` is the fencing token that the user got, "" if the run has none.
    `together`: the number of the list in which its handler got it, 0 if alone. `life`: how often its topic had been
    created again before the message came to it (topics of Evidence.ids). `leader_epoch`: that of the message (Kafka's;
    partitions of Evidence.lost).
    """

    __slots__ = (
        "ack_ms",
        "again_ms",
        "begin_ms",
        "client",
        "end_ms",
        "epoch",
        "gate_ms",
        "group",
        "inherited",
        "instance",
        "leader_epoch",
        "life",
        "offset",
        "partition",
        "read_to",
        "together",
        "token",
        "topic",
    )

    ack_ms: float
    begin_ms: float
    client: Client
    end_ms: float
    epoch: int
    gate_ms: float
    group: str
    instance: bytes | str
    offset: int
    partition: int
    read_to: int
    topic: str

    def __init__(
        self,
        group: str,
        client: Client,
        instance: bytes | str,
        epoch: int,
        topic: str,
        partition: int,
        offset: int,
        read_to: int,
        gate_ms: float,
        begin_ms: float,
        end_ms: float = -1,
        token: str = "",
    ) -> None:
        self.group, self.client, self.instance, self.epoch = group, client, instance, epoch
        self.topic, self.partition, self.offset, self.read_to = topic, partition, offset, read_to
        self.gate_ms, self.begin_ms, self.end_ms, self.ack_ms = gate_ms, begin_ms, end_ms, end_ms
        self.again_ms: float = -1
        self.token: str = token
        self.inherited: bool = False
        self.together: int = 0
        self.life: int = 0
        self.leader_epoch: int = 0

    @property
    def key(self) -> Key:
        return self.group, self.topic, self.partition

    def finish(self, ms: float) -> None:
        """Notes that the handler has ended and acknowledged."""
        self.end_ms = self.ack_ms = ms

    def ack_was_late(self) -> None:
        """Notes that the library has refused the ack, because the claim was sealed: it has promised nothing."""
        self.ack_ms = -1

    def give_back(self, ms: float, delay_ms: float) -> None:
        """Notes that the handler has ended and gave the message back: it may come again after the delay (D14)."""
        self.end_ms, self.again_ms = ms, ms + delay_ms

    def inherited_by(self, client: int) -> Delivery:
        """Returns the same delivery, still running in a clone of the process."""
        born = Delivery(
            self.group,
            client,
            self.instance,
            self.epoch,
            self.topic,
            self.partition,
            self.offset,
            self.read_to,
            self.gate_ms,
            self.begin_ms,
        )
        born.inherited, born.together = True, self.together
        born.life, born.leader_epoch = self.life, self.leader_epoch
        return born


class DeadLetter:
    """Describes a message that an owner sends to the dead-letter topic (D15).

    `delivery` is the delivery whose handler ended the message, or None if the message was not delivered once more.
    `posted_ms` is when it was sent, `written_ms` when the topic had it, -1 if it never did.
    """

    __slots__ = ("client", "delivery", "epoch", "key", "offset", "posted_ms", "written_ms")

    key: Key
    client: Client
    epoch: int
    offset: int

    def __init__(self, key: Key, client: Client, epoch: int, offset: int) -> None:
        self.key, self.client, self.epoch, self.offset = key, client, epoch, offset
        self.delivery: Delivery | None = None
        self.posted_ms: float = -1
        self.written_ms: float = -1


class Confirmation(NamedTuple):
    """Says what a `flush` or a `double_ack` told its user (S19).

    It concerns the acks of its client before `since_ms`, or that of one delivery alone. `lost`: the partitions that an
    error named; None if the call has learned nothing. Of the others the log has the acks.
    """

    group: str
    client: Client
    since_ms: float
    until_ms: float
    lost: frozenset[tuple[str, int]] | None
    of: Delivery | None = None


class Seek(NamedTuple):
    """Says that a `seek` of the user has returned, and how much of the log its client had read by then (S20)."""

    key: Key
    client: Client
    position: int
    ms: float
    read_to: int


class UserPause(NamedTuple):
    """Says that a user had paused a partition of his consumer, from one moment to another (S21)."""

    key: Key
    client: Client
    since_ms: float
    until_ms: float


class Span:
    """Says from when to when something was so; `until_ms` is -1 as long as it is."""

    __slots__ = ("since_ms", "until_ms")

    def __init__(self, since_ms: float) -> None:
        self.since_ms = since_ms
        self.until_ms: float = -1


class Drain(NamedTuple):
    """Says that a user has drained his consumer, and how long its handlers were given (S23)."""

    group: str
    client: Client
    since_ms: float
    until_ms: float


class Touch(NamedTuple):
    """Says that a handler has reported that it is at work on a message (`in_progress`, S24)."""

    key: Key
    epoch: int
    offset: int
    ms: float


class FormerTopic(NamedTuple):
    """What a topic had that was deleted, and created again under its name. `offsets` and `firsts`: by partition."""

    deleted_ms: float
    offsets: dict[int, list[int]]
    firsts: dict[int, int]


class LostTail(NamedTuple):
    """Says that a partition lost all messages from `end` on, and that what follows has at least this leader epoch."""

    ms: float
    end: int
    leader_epoch: int
    topic_id: str  # "" in a cluster without ids


class Refusal(NamedTuple):
    """Says that the owner of a claim was told that its position is beyond the end, or that the partition has lost what
    it had read. What was written since is of a later life of the topic, or of this one and at least this leader epoch,
    as epochs begin anew with each life."""

    ms: float
    leader_epoch: int
    life: int


class Heard(NamedTuple):
    """Says that a broker has told a client the id of a topic. It need not be the newest one: brokers lag behind."""

    ms: float
    id: str


class CallbackRun(NamedTuple):
    """Says that a callback of the user ran (S28). `what`: claim, revoking or lost, of the claim `epoch`; activated or
    deactivated. `apart`: on the thread that runs nothing else."""

    what: str
    epoch: int
    ms: float
    apart: bool


class LaneStep(NamedTuple):
    """Says what a `process` did with messages (S30). `what`: came (they wait for handlers), begun (a handler has them),
    ended, back (they come again later), shut (some wait for a gate); attached (it begins), over (it takes no more).

    `places`: epoch, topic, partition and offset of each. `since`: how many steps there were when the call began that
    did this. `alone`: no other call was under way, and none came in between. `may`: the claims that may deliver then,
    unless handlers get lists.
    """

    what: str
    places: tuple[tuple[int, str, int, int], ...] = ()
    since: int = 0
    alone: bool = True
    may: frozenset[int] = frozenset()


class ToolReport(NamedTuple):
    """Says what an admin's tool reported about a SetPosition that it sent (S12)."""

    group: str
    by: str
    said: str  # moved, not moved, unknown
    moves: tuple[tuple[str, int, int], ...]  # topic, partition, wanted offset
    read_to: int = -1  # how much of the log it had read when it ended; -1 if it had not read its own last record


class Stop(NamedTuple):
    """Describes a reader that refused to read on, and the error that it raised (S13, S14)."""

    group: str
    client: Client
    ms: float
    read_to: int  # the record at which it stopped, -1 if unknown
    error: str


class Presence(NamedTuple):
    """Says that a process read the log, and for how long.

    If the log becomes unreadable meanwhile, the process must end and name the error (S14).
    """

    group: str
    client: Client
    since_ms: float
    until_ms: float


class Crash(NamedTuple):
    """Describes a process that ended in an unforeseen way (S13)."""

    client: Client
    ms: float
    how: str


@dataclass
class Evidence:
    """Holds all evidence of one log.

    `log` is what a plain consumer saw that read every record as it came. A record was appended at `appended_ms` or
    later, and read by that consumer at `read_ms`; both are the time of the append if that is known. `sent` maps a value
    to its first send, last send, and first sender or None. Offsets in `gaps` never held a record. Records below `first`
    were deleted before the run; a snapshot at `first` replaces them. Records below `inherited` come from a dump: their
    senders, readers, deliveries and times are unknown.
    """

    number: int = 0
    groups: tuple[str, ...] = ()
    root: bytes = b""  # the root Genesis, for a log that is not its own root
    log: Sequence[bytes | None] = field(default_factory=list)
    appended_ms: Sequence[float] = field(default_factory=list)
    sent: dict[bytes, tuple[float, float, Client | None]] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    digests: dict[tuple[str, int, int, int], Client] = field(default_factory=dict)  # group, at, state, chain -> client
    finals: list[tuple[Client, str, int, int]] = field(default_factory=list)  # client, group, read to, state digest
    topics: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    forks: list[tuple[float, Client, Client]] = field(default_factory=list)  # ms, original, clone
    reports: list[ToolReport] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    foreign_records: dict[int, str] = field(default_factory=dict)  # offset -> what was written there, not by a client
    gaps: set[int] = field(default_factory=set)
    compacted: set[int] = field(default_factory=set)  # offsets that later readers no longer found
    other_deliveries: list[Delivery] = field(default_factory=list)  # by clients of a topic that is gone
    stale_clients: list[Client] = field(default_factory=list)  # clients that never noticed that their topic is gone
    corrupted: set[Client] = field(default_factory=set)  # clients whose memory was falsified
    branched: bool = False  # the log once lost its tail: promises that relied on it cannot be checked
    excused: set[str] = field(default_factory=set)  # errors that readers may end with for a reason outside the log
    first: int = 0
    inherited: int = 0
    # By client, unless it may deliver late: when it reported a fence to its user, and how much of the log it had read.
    fences: dict[Client, list[tuple[float, int]]] = field(default_factory=dict)
    # By client: how far it had read when it last did something, because it was killed, ended with an
    # error or the run ended. -1 if it was stopped then: what it had read may have led to nothing.
    acted_to: dict[Client, int] = field(default_factory=dict)
    # When an owner stopped delivering a partition for the sake of another member: (ms, group, epoch).
    handovers: list[tuple[float, str, int]] = field(default_factory=list)
    hand_over_intervals: int = 2**31  # how many of its own intervals an owner that hands over waits for its handlers
    # By client: when it lost its place in the log and started again (N11), and how much it had read by then.
    restarts: dict[Client, list[tuple[float, int]]] = field(default_factory=dict)
    read_ms: Sequence[float] = field(default_factory=list)  # empty if it equals `appended_ms`
    present: list[Presence] = field(default_factory=list)
    crashes: list[Crash] = field(default_factory=list)
    gone_ms: float = -1  # when somebody deleted the topic
    settled: int | None = None  # how long the log was when all should have been done and owned; None: as it ended
    kept: dict[Client, float] = field(default_factory=dict)  # by client: when it last kept its will, if that is known
    told: dict[int, float] = field(default_factory=dict)  # offset of a heartbeat -> when its client began to write it
    letters: list[DeadLetter] = field(default_factory=list)
    deliveries_max: int | None = None  # with a dead-letter topic: no message gets a delivery of a higher number
    # By client that is a streaming query: its checkpoint. A query may ack what it did under an earlier claim.
    queries: dict[Client, Hashable] = field(default_factory=dict)
    confirmations: list[Confirmation] = field(default_factory=list)
    seeks: list[Seek] = field(default_factory=list)
    user_pauses: list[UserPause] = field(default_factory=list)
    drains: list[Drain] = field(default_factory=list)
    # By client, in order, if that is known: when its user was in calls that wait for any message (V15).
    asking: dict[Client, list[Span]] = field(default_factory=dict)
    # By client, group and epoch: when its user knew that it will release the partition (event `revoking`, S25).
    revoking: dict[tuple[Client, str, int], list[Span]] = field(default_factory=dict)
    touches: list[Touch] = field(default_factory=list)
    callbacks: dict[Client, list[CallbackRun]] = field(default_factory=dict)  # by client, in their order
    # By client all of whose callbacks have run: the claims that it has and of which its user should know (S28).
    known_claims: dict[Client, frozenset[int]] = field(default_factory=dict)
    # By client that handles messages by `process`: what names the lane of a message, by topic, partition and offset,
    # within its partition; None for a message that is on its own (S26).
    lanes: dict[Client, Callable[[str, int, int], Hashable]] = field(default_factory=dict)
    lane_steps: dict[Client, list[LaneStep]] = field(default_factory=dict)  # of these, in order (S30)
    workers: dict[Client, int] = field(default_factory=dict)  # of these: the least number of workers that each has had
    follows: set[Client] = field(default_factory=set)  # of these: messages behind a dead letter of their lane follow it
    handler_intervals: int = 2**31  # how many of its own intervals an owner waits for a silent handler (D4)
    acks_pending_max: dict[Client, int] = field(default_factory=dict)  # by client that has this option (S22)
    # By partition and offset: when a message was produced, if that is known.
    produced_ms: dict[tuple[tuple[str, int], int], int] = field(default_factory=dict)
    firsts: dict[tuple[str, int], int] | None = None  # by partition: what lies below was deleted; None: unknown
    ids: dict[str, list[str]] = field(default_factory=dict)  # by topic that may be created again: its ids, in order
    former: dict[tuple[str, str], FormerTopic] = field(default_factory=dict)  # by topic and id
    heard: dict[tuple[Client, str], list[Heard]] = field(default_factory=dict)  # by client and topic, in order
    lost: dict[tuple[str, int], list[LostTail]] = field(default_factory=dict)  # by partition, in order
    refusals: dict[tuple[Client, str, int], Refusal] = field(default_factory=dict)  # by client, group, epoch of a claim
    behind_intervals: int = 0  # over so many of its intervals an owner falls behind before it releases (D16)

    def __post_init__(self) -> None:
        self.read_ms = self.read_ms or self.appended_ms


class Violation(NamedTuple):
    invariant: str
    ms: float
    offset: int  # in the log, -1 if it concerns no record
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"
