"""The records of PROTOCOL.md 4.2 as frozen tagged structs, with the bounds of their fields.

codec.py knows their bytes and rationalizer.py their effects. Bounds are checked when a record is decoded and when
codec.encode writes one. New fields are only ever appended (E7). Fields that recur: `observed` is the value on which the
sender based the record, so that the fold rejects the record if the value has changed; `token` is the offset of the
record that began or renewed the sender's pause; `by` says for people who sent the record; -1 stands for none.

To add a field: append it here and in PROTOCOL.md 4.2, with bounds and a default. If the fold reads it, the record
version grows; if an old log can lead to another world, the fold version too; and the rule in PROTOCOL.md, the
rationalizer, a test that names the rule, and `marshal_sim/oracle/` change, which is written from the text and not from
the code. Add bytes with the field to the fixtures (the old ones must decode to the default), the field to the strategy
of the property tests, and to CHANGELOG.md what an older reader does when it meets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Annotated, Final, Literal, get_args

from msgspec import Meta, Struct

from marshal_py.errors import BEYOND_END as BEYOND_END
from marshal_py.errors import RECREATED as RECREATED
from marshal_py.errors import TRUNCATED as TRUNCATED
from marshal_py.errors import UNREADABLE as UNREADABLE
from marshal_py.errors import PartitionParked
from marshal_py.protocol.wire.identity import TopicPartition

OFFSET_MAX: Final = 2**63 - 1
COUNT_MAX: Final = 2**53  # integers that every JSON tool can print exactly
PARTITION_MAX: Final = 99_999  # far above Kafka's practical limits, far below what could exhaust memory
INTERVAL_MS_MIN: Final = 1_000
INTERVAL_MS_MAX: Final = 600_000
PAUSE_MS_MAX: Final = 86_400_000  # a day; an admin who needs longer renews the pause
GRANT_OFFSETS_MAX: Final = 1_000_000  # F5.1: bounds what one range can lose in at-most-once mode
HEARTBEAT_ENTRIES_MAX: Final = 10_000  # about 200 KB, well below a broker's default message limit
TEXT_BYTES_MAX: Final = 255  # of a text in a record, as utf-8
TEXT_CHARS_SAFE: Final = TEXT_BYTES_MAX // 4  # so many characters never take more
BY_CHARS_MAX: Final = 60  # of a client id in a field `by`, which then always fits
INSTANCE_BYTES: Final = 16
PRIORITY_MAX: Final = 9  # of a consumer under the policy `prioritized`, as in the design of priority groups
ADMIN_KEYS_MAX: Final = 16  # of a group: a key per operator or machine, and the next ones while they are replaced
PROGRESS_BYTES_MAX: Final = 512  # 4,000 offsets as a bitmap, at least 80 ranges; a snapshot holds one per partition

AT_LEAST_ONCE: Final = 1
AT_MOST_ONCE: Final = 2
ON_TOPIC_RECREATED: Final = ("fail", "earliest")  # what a group does when a topic was recreated (D10)
MODE_NAMES: Final = {0: "none", AT_LEAST_ONCE: "at_least_once", AT_MOST_ONCE: "at_most_once"}
MODES: Final = {name: mode for mode, name in MODE_NAMES.items() if mode}

Offset = Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
OffsetOrNone = Annotated[int, Meta(ge=-1, le=OFFSET_MAX)]
Ms = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
U64 = Annotated[int, Meta(ge=0)]  # MessagePack has no integer above 2^64-1
Id = Annotated[
    str, Meta(min_length=1, max_length=TEXT_BYTES_MAX)
]  # bytes are checked in check_lengths: Meta counts characters
Text = Annotated[str, Meta(max_length=TEXT_BYTES_MAX)]
Bytes16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
PartitionOrWhole = Annotated[int, Meta(ge=-1, le=PARTITION_MAX)]
AdminKey = Annotated[bytes, Meta(min_length=32, max_length=32)]  # the public half of an Ed25519 key
SignatureBytes = Annotated[bytes, Meta(min_length=64, max_length=64)]
Partition = Annotated[int, Meta(ge=0, le=PARTITION_MAX)]
Partitions = Annotated[int, Meta(ge=1, le=PARTITION_MAX + 1)]
Byte = Annotated[int, Meta(ge=1, le=255)]
Small = Annotated[int, Meta(ge=0, le=100_000)]
Progress = Annotated[bytes, Meta(max_length=PROGRESS_BYTES_MAX)]  # protocol/wire/progress.py reads and writes it


def check_lengths(*texts: str) -> None:
    """Raises ValueError (msgspec turns it into a ValidationError) if a text exceeds 255 bytes of utf-8."""
    for text in texts:
        if len(text) > TEXT_CHARS_SAFE and len(text.encode()) > TEXT_BYTES_MAX:
            raise ValueError(f"a string of {len(text.encode())} bytes exceeds {TEXT_BYTES_MAX} bytes")


def clipped(text: str) -> str:
    """Returns the text, cut to the TEXT_BYTES_MAX bytes that a record holds."""
    return text.encode()[:TEXT_BYTES_MAX].decode(errors="ignore")


class ClaimState(Struct, array_like=True, frozen=True, gc=False):
    """One claim in a heartbeat, if it differs from the world (T11). `position`: where a new owner reads; `lag`: offsets
    to the end; `in_flight`: with handlers; `attempts`: of the message at the position if the owner dies now."""

    epoch: Offset
    position: Offset
    lag: Count = 0
    in_flight: Count = 0
    attempts: Count = 0
    progress: Progress = b""


class MessageRange(Struct, array_like=True, frozen=True, gc=False):
    """The offsets [start, to) to grant in one partition (F5.1). `from_` (`from` on the wire): the position as the
    sender saw it; offsets below `start` are skipped."""

    epoch: Offset
    from_: Offset
    start: Offset
    to: Offset


class PauseWaited(Struct, array_like=True, frozen=True, gc=False):
    """For how many ms the sender has waited for the end of the pause that `pause_change`, an offset, began or renewed
    (T5)."""

    pause_change: Offset
    waited_ms: Ms


class Checkpoint(Struct, array_like=True, frozen=True, gc=False):
    """The sender's digests of the group and of the chain at checkpoint `at`, by the rules of version `fold` (G4)."""

    at: Offset
    state: U64
    chain: U64
    fold: Byte


class Move(Struct, array_like=True, frozen=True, gc=False):
    """Moves one partition to `position`, as a part of a SetPosition. `observed`: the partition's version."""

    topic: Id
    partition: Partition
    observed: OffsetOrNone
    position: Offset

    def __post_init__(self) -> None:
        check_lengths(self.topic)


class Mapping(Struct, array_like=True, frozen=True):
    """Lists the partitions that an admin gives to the members with one name."""

    member: Id
    partitions: Annotated[tuple[Partition, ...], Meta(max_length=100_000)]

    def __post_init__(self) -> None:
        check_lengths(self.member)


class Genesis(Struct, array_like=True, frozen=True, tag=0):
    """Begins a log of a topic with so many `partitions`, and names its incarnation of 16 bytes (L3, L4). `hash`: finds
    a group's log. `protocol`: the version of the rules."""

    incarnation: Bytes16
    partitions: Partitions
    hash: Text
    protocol: Byte

    def __post_init__(self) -> None:
        check_lengths(self.hash)


class Join(Struct, array_like=True, frozen=True, tag=1):
    """Begins a session (rule 1). `instance_id` is new for each Join; `predecessor`, an older session of the client,
    ends."""

    client_id: Id
    instance_id: Bytes16
    mode: Annotated[int, Meta(ge=1, le=2)]
    interval_ms: Annotated[int, Meta(ge=INTERVAL_MS_MIN, le=INTERVAL_MS_MAX)]
    topics: Annotated[tuple[Id, ...], Meta(max_length=1_000)]
    predecessor: OffsetOrNone = -1
    member: Text = ""
    capacity: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    claims_max: Small = 0
    rank: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    priority: Annotated[int, Meta(ge=0, le=PRIORITY_MAX)] = 0
    priority_group: Text = ""
    min_pending: Count = 0
    min_ack_pending: Count = 0
    reads_version: Byte = 1
    library: Text = ""
    witness: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self.client_id, self.member, self.priority_group, self.library, self.witness, *self.topics)


class Heartbeat(Struct, array_like=True, frozen=True, tag=2, gc=False):
    """Extends a session and reports changed claims (rule 2). `ready`: epochs of others' claims fetched ahead (A3)."""

    session: Offset
    sequence: Offset
    claims: Annotated[tuple[ClaimState, ...], Meta(max_length=HEARTBEAT_ENTRIES_MAX)] = ()
    ready: Annotated[tuple[Offset, ...], Meta(max_length=HEARTBEAT_ENTRIES_MAX)] = ()
    pause: PauseWaited | None = None
    digest: Checkpoint | None = None
    idle_ms: Ms = 0


class Leave(Struct, array_like=True, frozen=True, tag=3):
    """Ends the sender's session (F3.1)."""

    session: Offset
    reason: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self.reason)


class Evict(Struct, array_like=True, frozen=True, tag=4):
    """Ends a silent session after `waited_ms`, twice its interval at least (F3.2). `observed`: the newest record that
    extended it, as the sender saw it."""

    session: Offset
    observed: Offset
    waited_ms: Ms
    by: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self.by)


class ClaimingPartition(Struct, array_like=True, frozen=True, tag=5):
    """Claims a partition, a whole topic (partition -1) or the group (the pin, topic ""; rule 4). `observed`: its
    version. `start`: the position if the log has none."""

    session: Offset
    topic: Text
    partition: PartitionOrWhole
    observed: OffsetOrNone
    start: OffsetOrNone = -1

    def __post_init__(self) -> None:
        check_lengths(self.topic)
        if not self.topic and self.partition >= 0:
            raise ValueError("only partition -1 may go without a topic")


class ReleasingPartition(Struct, array_like=True, frozen=True, tag=6):
    """Ends a claim; the next owner starts at the position (rule 6). `give`: in at-most-once mode, the position to go
    back to, because grants were not used; `observed` is then the present one. `parked`: why nobody may claim it, or
    ""."""

    session: Offset
    epoch: Offset
    position: OffsetOrNone
    successor: OffsetOrNone = -1
    reason: Text = ""
    observed: OffsetOrNone = -1
    give: OffsetOrNone = -1
    attempts: Count = 0
    in_flight: Count = 0
    progress: Progress = b""
    parked: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self.reason, self.parked)


class ClaimingMessages(Struct, array_like=True, frozen=True, tag=7):
    """Asks for grants of one range in each of some partitions (rule 5). A clone uses another `nonce`."""

    session: Offset
    ranges: Annotated[tuple[MessageRange, ...], Meta(min_length=1, max_length=HEARTBEAT_ENTRIES_MAX)]
    nonce: Offset = 0


class ReleaseGroup(Struct, array_like=True, frozen=True, tag=8):
    """Pauses a group for `duration_ms`, or ends its pause if that is 0 (rule 7)."""

    observed: OffsetOrNone
    token: OffsetOrNone
    duration_ms: Annotated[int, Meta(ge=0, le=PAUSE_MS_MAX)]
    waited_ms: Ms = 0
    msg_expire_time_ms: Ms = 0
    reason: Text = ""
    by: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self.reason, self.by)


class SetPosition(Struct, array_like=True, frozen=True, tag=9):
    """Moves positions of a paused group: either all partitions that it names are moved, or none (rule 8)."""

    token: Offset
    moves: Annotated[tuple[Move, ...], Meta(max_length=100_000)]
    resume: bool = False
    by: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self.by)


class Topology(Struct, array_like=True, frozen=True, tag=10):
    """A topic's partition count and its id in the cluster, "" if unknown (F9.1-F9.3, F9.10)."""

    topic: Id
    partitions: Partitions
    observed: OffsetOrNone
    token: OffsetOrNone = -1
    by: Text = ""
    topic_id: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self.topic, self.by, self.topic_id)


class GroupConfig(Struct, array_like=True, frozen=True, tag=11):
    """Replaces the settings of a group, or deletes the group (F9.4-F9.7)."""

    observed: OffsetOrNone
    token: OffsetOrNone = -1
    mode: Annotated[int, Meta(ge=0, le=2)] = 0
    deleted: bool = False
    policy: Text = ""
    priority_groups: Annotated[tuple[Id, ...], Meta(max_length=16)] = ()
    priority_timeout_ms: Ms = 0
    ack_policy: Text = ""
    max_members: Small = 0
    members: Annotated[tuple[Id, ...], Meta(max_length=10_000)] = ()
    mappings: Annotated[tuple[Mapping, ...], Meta(max_length=10_000)] = ()
    max_batch: Count = 0
    max_expires_ms: Ms = 0
    max_bytes: Count = 0
    max_deliver: Count = 0
    by: Text = ""
    on_topic_recreated: Literal["", "fail", "earliest"] = ""
    failover_ms: Ms = 0
    lag_weighted: bool = False
    release_behind_ms: Ms = 0
    admin_keys: Annotated[tuple[AdminKey, ...], Meta(max_length=ADMIN_KEYS_MAX)] = ()

    def __post_init__(self) -> None:
        check_lengths(self.policy, self.ack_policy, self.by, *self.priority_groups, *self.members)


class StepDown(Struct, array_like=True, frozen=True, tag=12):
    """Makes a session come last among the candidates for partitions (F9.8, F9.9)."""

    session: Offset
    observed: OffsetOrNone
    reason: Text = ""
    by: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self.reason, self.by)


class Note(Struct, array_like=True, frozen=True, tag=13):
    """An event; no state changes. `from_` is `from` on the wire. Who reads its own `probe` back has read to where the
    log ended when it was sent (T2, T10)."""

    session: OffsetOrNone
    kind: Id
    topic: Text = ""
    partition: PartitionOrWhole = -1
    from_: OffsetOrNone = -1
    to: OffsetOrNone = -1
    text: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self.kind, self.topic, self.text)


class Snapshot(Struct, array_like=True, frozen=True, tag=14):
    """Chunk number `chunk` of `chunks` of a log's state at checkpoint `at`, whose digests are `state` and `chain`; no
    state changes (F10.1). Without data it is a witness: its writer came to the same digests."""

    genesis: Genesis
    instance: Bytes16
    at: Offset
    chunk: Partition
    chunks: Partitions
    state: U64
    chain: U64
    data: bytes


class SeekingPartition(Struct, array_like=True, frozen=True, tag=15, gc=False):
    """Moves the position of the sender's claim, which continues with this record's offset as its epoch (F6.6)."""

    session: Offset
    epoch: Offset
    position: Offset


class Signed(Struct, array_like=True, frozen=True, tag=17):
    """Carries the body of an admin record, of type `kind`, with a signature by one of the group's keys (rule 11).
    `observed`: the offset of the settings that name the key."""

    key: AdminKey
    signature: SignatureBytes
    observed: Offset
    kind: Byte
    body: bytes


Record = (
    Genesis | Join | Heartbeat | Leave | Evict | ClaimingPartition | ReleasingPartition | ClaimingMessages
    | ReleaseGroup | SetPosition | Topology | GroupConfig | StepDown | Note | Snapshot | SeekingPartition
)  # fmt: skip  # and Signed, which carries one of them: verdicts have the record that it carries

RECORD_TYPES: Final[tuple[type[Record], ...]] = get_args(Record)  # the index is the type number of PROTOCOL.md 4.2


# --- Says why a partition is parked, in sentences that name the way out (PROTOCOL.md F6.4, F6.5).
#
# Nobody may claim a parked partition until a new generation begins, for example because an admin sets its position. The
# field `parked` of a Release holds the reason; `parked_error` alone turns it into an error. The sentences are in
# errors.py.

# With these reasons the position is no offset of the partition's present messages.
LAG_UNKNOWN: Final = frozenset({RECREATED, BEYOND_END, TRUNCATED})
PARKED_REASON: Final = "parked"  # reason of a Release that parks without a detail


def parked_error(
    group: str, tp: TopicPartition, reason: str, known: str = "", found: str = "", detail: str = ""
) -> PartitionParked:
    """Returns the error that says why a partition is parked. `reason`, `detail`: the Release's; `known`, `found`: the
    topic's ids in log and cluster, "" if unknown."""
    if reason == RECREATED:
        seen = f"its id was {known}, now it is {found}" if known and found else ""
    else:
        seen = "" if detail == PARKED_REASON else detail
    return PartitionParked(group, *tp, reason, seen)


def beyond_end(position: int, end: int) -> str:
    """Returns the `detail` for a partition whose position is beyond its end."""
    return f"position {position}, end {end}"


def grown_over(position: int, end: int) -> str:
    """Returns the `detail` for a partition whose end was below its position, and is not any more."""
    return f"position {position} was beyond the end, which is {end} now"


def parked_text(group: str, tp: TopicPartition, reason: str, detail: str = "") -> str:
    """Returns, for people, why a partition is parked and what to do, as `parked_error` does."""
    return f"{reason}: {parked_error(group, tp, reason, detail=detail)}"


# --- How many heartbeat intervals something takes, as the fold, members, witnesses and admins all count


EVICT_INTERVALS: Final = 2  # after so many of its intervals without a sign of life a session may be evicted (F3.2)
TRY_INTERVALS: Final = EVICT_INTERVALS  # how long a witness tries to publish: then others have waited long enough (T4)


# --- The last will of a session: the records that a witness sends when the owner's process has died (PROTOCOL.md T19)
#
# A witness is another process on the same machine. While the owner lives, it keeps its will: its session, and in
# at-least-once mode how far each claim has come. Once the operating system has told the witness that the process has
# ended, it reads what was kept and sends the records that `records_of` makes of it. The fold knows nothing of wills: a
# will that comes late, twice or in vain is rejected like any other late record.


DIED: Final = "died"  # how the reasons of a will's records begin
FAILED: Final = "stopped: "  # so begins the reason of a Leave because of an error, whose class follows


class Sign(Enum):
    """What a witness may notice about a process."""

    CONNECTION_CLOSED = auto()
    STOPPED = auto()
    ENDED = auto()  # every thread of it, as the operating system says: a pidfd, or NOTE_EXIT of kqueue


def proves_death(sign: Sign) -> bool:
    """Returns whether the will may be sent (T19). A closed connection proves nothing (a daemon closes what it does not
    know), nor does a stop: after SIGCONT a process holds a valid lease for a while."""
    return sign is Sign.ENDED


class LastWill(Struct, frozen=True, array_like=True):
    """What one session keeps for its witness. `version`: the record version that all live sessions of the group
    can read (E8). `interval_ms`: of the session. `claims`: in at-least-once mode, the entries of a heartbeat that would
    be sent now, of all claims. What is kept may be old when it is used. That is harmless: the position of a claim never
    falls, so an old one is lower than the truth, and F6.2 ignores one that is lower than the log's. In at-most-once
    mode a Release gives back exactly what was not handed over (F6.3). Something old cannot say that, so there the will
    is the Leave alone."""

    session: int
    version: int
    interval_ms: int
    claims: tuple[ClaimState, ...] = ()


def records_of(will: LastWill, how: str) -> Iterator[Record]:
    """Yields a will's records in order: each Release, then the Leave. `how`: how the process ended, for people, or
    ""."""
    for entry in will.claims:
        yield ReleasingPartition(
            will.session,
            entry.epoch,
            entry.position,
            reason=DIED,
            attempts=entry.attempts,
            in_flight=entry.in_flight,
            progress=entry.progress,
        )
    yield Leave(will.session, clipped(f"{DIED}: {how}" if how else DIED))


def died(leave: Leave) -> bool:
    """Returns whether a witness sent this Leave."""
    return leave.reason == DIED or leave.reason.startswith(f"{DIED}: ")


def failure(leave: Leave) -> str:
    """Returns the class of the program's error because of which a consumer left, "" for any other reason."""
    return leave.reason.removeprefix(FAILED) if leave.reason.startswith(FAILED) else ""
