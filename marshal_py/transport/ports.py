"""Declares the interfaces to a cluster, as typing.Protocols: coordination log, data source, administration, clock.

Three transports implement them: memory.py, kafka*.py, and kafka*.py again on the broker of embedded.py. One conformance
suite runs over all of them (tests/support/conformance.py). No implementation makes a decision of the protocol.

A transport may lack capabilities: truncate (delete old records), grow (add partitions), time_lookup (find an offset by
time), describe_config (read a topic's settings), create_topic, long_log (keep more than a few MB per partition).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from msgspec import Struct

from marshal_py.errors import MarshalError
from marshal_py.protocol.wire.identity import Instant, TopicPartition

ALL_CAPABILITIES = frozenset({"truncate", "grow", "time_lookup", "describe_config", "create_topic", "long_log"})

EARLIEST = "earliest"
LATEST = "latest"


class LogRecord(NamedTuple):
    """A record of coordination partition `log`. `timestamp_ms` (since 1970) and `key` are for people; the fold reads
    neither."""

    log: int
    offset: int
    value: bytes | None
    timestamp_ms: int
    key: bytes | None = None


class RawMessage(Protocol):
    """A fetched data message: confluent_kafka's Message or the MemoryMessage of memory.py."""

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def key(self) -> Any: ...
    def value(self) -> Any: ...
    def headers(self) -> Any: ...
    def timestamp(self) -> tuple[int, int]: ...

    def __len__(self) -> int:
        """Returns the length of the value in bytes; 0 if there is none."""


class Chunk(NamedTuple):
    """Messages of one partition fetched together, in order, by assignment `round`. Without messages: all below
    `reached` have come (transactions leave offsets that do not exist)."""

    tp: TopicPartition
    round: int
    messages: Sequence[RawMessage]
    reached: int = -1


class Bounds(NamedTuple):
    """The first offset of a partition that still exists, and the offset after its last one."""

    first: int
    end: int


class TopicInfo(NamedTuple):
    """A topic and its number of `partitions`. `topic_id`: another if it is created again; "" without ids."""

    partitions: int
    topic_id: str = ""


class Replicas(NamedTuple):
    """Where a partition is, by numbers of brokers. `leader`: -1 if it has none now."""

    leader: int
    all: tuple[int, ...]
    in_sync: tuple[int, ...]


class BrokerInfo(Struct, frozen=True):
    """A broker. `address`: host:port. `rack`: "" if it has none, or the cluster does not say."""

    id: int
    address: str
    rack: str = ""


BROKER_LIMITS: Final = ("message.max.bytes", "num.partitions", "default.replication.factor")


class ClusterInfo(NamedTuple):
    """A cluster. `settings`: a broker's, {} if this client may not read them. `partition_counts`: by topic that it may
    see."""

    cluster_id: str
    brokers: tuple[BrokerInfo, ...]
    partition_counts: Mapping[str, int]
    settings: Mapping[str, str]
    client_versions: Mapping[str, str]

    def limits(self) -> dict[str, int]:
        """Returns the brokers' BROKER_LIMITS, as far as this client may read them."""
        return {name: int(self.settings[name]) for name in BROKER_LIMITS if name in self.settings}


class OutOfRange(NamedTuple):
    """Reports a refused fetch position: the partition does not have it, or has lost the records there since (D6)."""

    tp: TopicPartition
    position: int
    round: int  # the refused assignment
    truncated: str = ""  # the broker's words if its log was cut below what had been read, else ""


class Broken(NamedTuple):
    """A partition that the cluster does not serve, in assignment `round`. `reason`: the cluster's text."""

    tp: TopicPartition
    reason: str
    round: int
    permanent: bool  # waiting does not help; if False, the source has used up its retries


class Clock(Protocol):
    def now(self) -> Instant:
        """Returns the present time on the three clocks of this machine."""

    def boot_ns(self) -> int:
        """Returns the boot clock in ns since the zero of `Instant.boot_ms`; it is read before every message."""


class CoordinationLog(Protocol):
    """Reads and writes the coordination topic; `log` is a coordination partition. One thread calls `follow` and `poll`;
    any may append, which never waits."""

    def follow(self, log: int, offset: int) -> None:
        """Makes `poll` also return the records of `log`, from `offset` on."""

    def poll(self, timeout_s: float) -> list[LogRecord]:
        """Returns new records of followed logs, in order per log; [] after `timeout_s`. Raises HistoryTruncated or
        TopicRecreated once for an offset outside its log; others continue."""

    def gather(self, on: bool) -> None:
        """Sets whether `poll` returns many records at once, each a tenth of a second late at most, and not each as soon
        as it is there: where many come, that saves most of the reader's and the brokers' CPU."""

    def read(self, log: int, start: int, end: int, timeout_s: float) -> Iterator[list[LogRecord]]:
        """Yields `log` from `start` to `end` - 1 (the last list may go beyond), on any thread. Raises HistoryTruncated,
        TopicRecreated if it ends before `start`, AccessDenied, ClusterUnreachable after `timeout_s` without any."""

    def append(self, log: int, key: bytes, value: bytes) -> bool:
        """Queues a record; never waits. False if the queue is full: try again at a later tick. True proves nothing,
        only reading back does (T17). Raises MessageTooLarge."""

    def bounds(self, log: int, timeout_s: float) -> Bounds:
        """Returns the first and the end offset of `log`. Raises ClusterUnreachable after `timeout_s`."""

    produce_errors: int  # records that are known not to have been written

    def waiting_for(self) -> str:
        """Returns the connection's present problem as text for people; "" if there is none."""

    def refused(self) -> MarshalError | None:
        """Returns why the cluster permanently refuses our reads or writes (authorization, size), else None."""

    def close(self, flush_s: float) -> None:
        """Sends what is queued, which may take at most `flush_s`, then disconnects."""


class DataSource(Protocol):
    """Fetches messages of assigned partitions. One thread polls, another may assign: `assign`, `unassign` and `pause`
    only note, and the polling thread or `carry_out` tells the client."""

    def learn_leaders(self, topics: Iterable[str], anew: bool = False) -> None:
        """Looks up the leaders of these topics' partitions, so that a later `assign` can fetch at once. May wait.
        `anew`: the topics were created again, so what is known of them is worth nothing."""

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Starts or restarts fetching at these positions. Each assignment gets a new number, its round."""

    def unassign(self, tps: Iterable[TopicPartition]) -> None: ...

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        """Stops fetching these partitions. Their assignments stay."""

    def resume(self, positions: Mapping[TopicPartition, int]) -> None:
        """Fetches these paused partitions again, from these positions on. The round may be a new one."""

    def round(self, tp: TopicPartition) -> int:
        """Returns the number of the current assignment of `tp`, even if it was refused; 0 if `tp` is not assigned."""

    def fetching(self, tp: TopicPartition) -> bool:
        """Returns whether `tp` has an assignment that was not refused, so that messages may come."""

    def poll(self, timeout_s: float, max_messages: int) -> list[Chunk]:
        """Returns at most `max_messages` new messages, as soon as there are any; [] after `timeout_s`. Empty chunks
        come first."""

    def poll_now(self, max_messages: int) -> list[Chunk] | None:
        """Returns at most `max_messages` that are here, for an event loop; None if that would wait or run user code."""

    def carry_out(self) -> None:
        """Tells the client about assignments and pauses; nothing if a polling thread is about to. Never under a lock
        that this thread may want."""

    def out_of_range(self) -> list[OutOfRange]:
        """Returns the positions that the cluster has refused since the last call. They are no longer fetched."""

    def broken(self) -> list[Broken]:
        """Returns the partitions that failed for good since the last call. They are no longer fetched."""

    def end_offset(self, tp: TopicPartition) -> int:
        """Returns the partition's end offset as last seen, without a request; -1 before the first answer to a fetch."""

    def close(self) -> None:
        """Disconnects. Inside a callback or signal handler of the polling thread, it does so once that has returned."""


class MessageReader(Protocol):
    """Reads explicit ranges of offsets, without a group, a claim or a commit. One thread at a time."""

    def read(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], timeout_s: float
    ) -> Iterator[Sequence[RawMessage]]:
        """Yields each partition's messages from its start to before its end, in order. `ends` must not be beyond the
        leaders': a lagging replica is waited for. One reading at a time: the next call ends it. Raises RangeLost,
        AccessDenied, ClusterUnreachable after `timeout_s` without any."""

    def close(self) -> None: ...


OnWritten = Callable[[TopicPartition, int], None]  # is given the place of a message that the cluster acknowledged
Headers = Sequence[tuple[str, bytes | None]]


class MessageWriter(Protocol):
    """Writes data messages. One thread at a time."""

    def write(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int = 0,
    ) -> None:
        """Queues one message; waits while the queue is full. `timestamp_ms`: since 1970, 0: now. Raises TopicMissing,
        InvalidOption, MessageTooLarge, TopicRefused, or an earlier message's error."""

    def flush(self, timeout_s: float) -> None:
        """Waits until all are acknowledged. Raises a refused message's error, or ClusterUnreachable after
        `timeout_s`."""

    def close(self) -> None:
        """Drops queued messages and disconnects. Call `flush` before."""


class TopicAdmin(Protocol):
    """Changes topics; with `dry_run` the cluster only checks. All raise TopicRefused, AccessDenied, ClusterUnreachable;
    all but `create` TopicMissing."""

    def create(
        self, name: str, partitions: int, replication: int | None, config: Mapping[str, str], dry_run: bool
    ) -> None:
        """Creates a topic. `replication` None: the cluster's default. `config`: its settings. Raises AlreadyExists."""

    def grow(self, name: str, partitions: int, dry_run: bool) -> None:
        """Adds partitions. `partitions`: how many the topic has afterwards, which must be more than before."""

    def alter(self, name: str, config: Mapping[str, str | None], dry_run: bool) -> None:
        """Changes the settings that `config` names. The value None brings the cluster's default back."""

    def delete(self, name: str) -> None: ...


class ClusterAdmin(Protocol):
    """Sends requests that may wait, so a worker thread calls it. All methods raise ClusterUnreachable."""

    capabilities: frozenset[str]

    def prepare_coordination(self, topic: str, partitions: int) -> int:
        """Creates the coordination topic with `partitions` if missing, and checks its settings (L1). Returns its count.
        Raises CoordinationTopicMissing, WrongTopicSetting."""

    def describe_topic(self, topic: str) -> TopicInfo | None:
        """Returns partition count and id of a topic; None if the cluster says that it does not exist."""

    def replicas(self, topic: str) -> dict[int, Replicas]:
        """Returns where the topic's partitions are, by number, as far as one broker knows; {} without such a topic."""

    def describe_cluster(self) -> ClusterInfo:
        """Returns what the cluster says of itself."""

    def topics(self) -> frozenset[str]:
        """Returns the names of all topics that this client may see."""

    def partition_count(self, topic: str) -> int | None:
        """Returns the partition count alone; None if the topic does not exist."""

    def bounds(
        self, tps: Sequence[TopicPartition], *, committed: bool = False, timeout_s: float | None = None
    ) -> dict[TopicPartition, Bounds]:
        """Returns first and end offset of each partition; with `committed` the last stable one. Raises
        ClusterUnreachable after the smaller of `timeout_s` and the connection's own time."""

    def told_offsets(
        self, tps: Sequence[TopicPartition], timeout_s: float, *, first: bool = False
    ) -> dict[TopicPartition, int]:
        """Returns each partition's end, or its `first` offset, as far as the cluster tells them within `timeout_s`: it
        asks once, and one partition without an answer hides no other."""
        ...

    def offsets_at(self, tps: Sequence[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
        """Returns each partition's first offset at or after `time_ms` (since 1970), if any. Raises UnsupportedPlatform
        without `time_lookup`."""

    def bounds_and_times(
        self, tps: Sequence[TopicPartition], times_ms: Sequence[int], *, committed: bool = False
    ) -> tuple[dict[TopicPartition, Bounds], list[dict[TopicPartition, int]]]:
        """Returns what `bounds` returns, and for each time what `offsets_at` returns, in the time of one round trip."""
        ...

    def committed(self, group: str, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Returns the offsets that `group` has committed in Kafka. Partitions without one are left out."""

    def commit(self, group: str, positions: Mapping[TopicPartition, int]) -> str:
        """Commits positions in Kafka for the usual lag tools (D7). Returns why Kafka refused; "" if it did not."""

    def delete_records(self, tp: TopicPartition, before: int) -> str:
        """Deletes the records below offset `before`. Returns why Kafka refused; "" if it did not."""

    def topic_admin(self) -> TopicAdmin:
        """Returns the TopicAdmin. Raises UnsupportedPlatform where the capability `create_topic` is missing."""

    def live_kafka_members(self, group: str) -> int:
        """Returns how many ordinary Kafka consumers are alive in the group."""

    def settings(self, topic: str) -> dict[str, str]:
        """Returns the topic's settings; {} if the capability `describe_config` is missing."""

    def close(self) -> None: ...


class Transport(Protocol):
    """Gives access to a cluster: makes the interfaces above. `name`: the kind of transport, for people."""

    name: str

    @property
    def clock(self) -> Clock:
        """Returns the clock by which clients of this transport keep their leases."""

    def log(self, topic: str, client_id: str, writes: bool = True) -> CoordinationLog:
        """Opens the coordination topic. Without `writes` no right to write is needed until an append."""

    def source(
        self, group: str, client_id: str, settings: Mapping[str, Any], queue_bytes: int | None = None
    ) -> DataSource:
        """Makes a source. `group`: the `group.id` for the brokers. `queue_bytes`: what to fetch ahead, unless
        `settings` say otherwise."""
        ...

    def admin(self) -> ClusterAdmin: ...

    def reader(self, client_id: str, settings: Mapping[str, Any]) -> MessageReader: ...

    def writer(self, on_written: OnWritten | None = None) -> MessageWriter:
        """Makes a writer. It calls `on_written` inside `write` and `flush`, once per acknowledged message."""
        ...
