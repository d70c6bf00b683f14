"""The interfaces to a cluster, as typing.Protocols: coordination log, data source, administration, clock.

Three transports implement them: memory.py, kafka*.py, and kafka*.py again on the broker of embedded.py. One conformance
suite runs over all of them (tests/support/conformance.py). No implementation makes a decision of the protocol.

Capabilities that a transport may lack, by name: truncate grow time_lookup describe_config create_topic long_log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from marshal_py.errors import MarshalError
from marshal_py.protocol.identity import Instant, TopicPartition

ALL_CAPABILITIES = frozenset({"truncate", "grow", "time_lookup", "describe_config", "create_topic", "long_log"})

EARLIEST = "earliest"
LATEST = "latest"


class LogRecord(NamedTuple):
    """A record of a coordination partition. `timestamp_ms` and `key` are for people; the fold reads neither."""

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


class Chunk(NamedTuple):
    """Messages of one partition, fetched together, in offset order. `round`: the assignment that fetched them."""

    tp: TopicPartition
    round: int
    messages: Sequence[RawMessage]


class Bounds(NamedTuple):
    """The first offset that still exists, and the offset after the last one."""

    first: int
    end: int


class TopicInfo(NamedTuple):
    """A topic in the cluster. `topic_id` changes if the topic is deleted and created again; "" if it has no id."""

    partitions: int
    topic_id: str = ""


class OutOfRange(NamedTuple):
    """A fetch position that the partition does not have, or whose records the partition has lost since (D6)."""

    tp: TopicPartition
    position: int
    round: int  # the refused assignment
    truncated: str = ""  # the broker's words if its log was cut below what had been read, else ""


class Broken(NamedTuple):
    """A partition that the cluster does not serve. `reason`: its words; `round`: the assignment that failed."""

    tp: TopicPartition
    reason: str
    round: int
    permanent: bool  # waiting does not help; if False, the source has used up its retries


class Clock(Protocol):
    def now(self) -> Instant:
        """The present time on the three clocks of this machine."""

    def boot_ns(self) -> int:
        """The boot clock alone, in ns since the same zero as `Instant.boot_ms`. It is read before every message."""


class CoordinationLog(Protocol):
    """The coordination topic: reads in order, appends without waiting. One thread reads, any may append."""

    def follow(self, log: int, offset: int) -> None:
        """From now on `poll` also returns the records of `log` from `offset` on."""

    def poll(self, timeout_s: float) -> list[LogRecord]:
        """New records of the followed logs, in order per log. Returns as soon as there is one; [] after `timeout_s`.

        Raises HistoryTruncated or TopicRecreated once if a followed offset is outside its log; other logs continue.
        """

    def read(self, log: int, start: int, end: int, timeout_s: float) -> Iterator[list[LogRecord]]:
        """Yields the records of [start, end), independently of what is followed. Any thread may call it.

        The last list may go beyond `end`. Raises HistoryTruncated if the log begins after `start`, TopicRecreated if it
        ends before it, ClusterUnreachable if nothing came for `timeout_s`.
        """

    def append(self, log: int, key: bytes, value: bytes) -> bool:
        """Queues a record without waiting. False: the queue is full, so it is not sent; a later tick retries.

        Only reading the record back shows that it was written (T17). Raises MessageTooLarge.
        """

    def bounds(self, log: int, timeout_s: float) -> Bounds:
        """First and end offset of `log`. Raises ClusterUnreachable after `timeout_s`."""

    produce_errors: int  # records that are known not to have been written

    def waiting_for(self) -> str:
        """The connection's present problem as text for people; "" if there is none."""

    def refused(self) -> MarshalError | None:
        """Why the cluster permanently refuses our reads or writes (authorization, size); None if it does not."""

    def close(self, flush_s: float) -> None:
        """Sends what is queued, for at most `flush_s`, then disconnects."""


class DataSource(Protocol):
    """Messages of the assigned partitions. One thread polls; another may assign at the same time, and never waits.

    `assign`, `unassign` and `pause` only note what is wanted. The polling thread, or `carry_out`, tells the client.
    """

    def learn_leaders(self, topics: Iterable[str]) -> None:
        """Looks up the leaders of these topics' partitions, so that a later `assign` can fetch at once. May wait."""

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Starts or restarts fetching at these positions, each as a new round."""

    def unassign(self, tps: Iterable[TopicPartition]) -> None: ...

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        """Stops fetching; the assignments stay."""

    def resume(self, positions: Mapping[TopicPartition, int]) -> None:
        """Continues at these positions."""

    def round(self, tp: TopicPartition) -> int:
        """Number of the current assignment of `tp`, even if it was refused; 0 if `tp` is not assigned."""

    def fetching(self, tp: TopicPartition) -> bool:
        """Whether `tp` has an assignment that was not refused, so that messages may come."""

    def poll(self, timeout_s: float, max_messages: int) -> list[Chunk]:
        """At most `max_messages` new messages. Returns as soon as there are any; [] after `timeout_s`."""

    def carry_out(self) -> None:
        """Applies assignments and pauses since the last poll, unless a polling thread is about to. Never waits.

        Must not be called under a lock that the polling thread may want.
        """

    def out_of_range(self) -> list[OutOfRange]:
        """Partitions whose position the cluster has refused since the last call. They are no longer fetched."""

    def broken(self) -> list[Broken]:
        """Partitions that the cluster has not served since the last call. They are no longer fetched."""

    def end_offset(self, tp: TopicPartition) -> int:
        """The partition's end offset as last seen, without a request; -1 before the first answer to a fetch."""

    def close(self) -> None:
        """Disconnects; inside a callback or signal handler of the polling thread, as soon as that has returned."""


class MessageReader(Protocol):
    """Explicit ranges of offsets, without a group, a claim or a commit. One thread at a time."""

    def read(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], timeout_s: float
    ) -> Iterator[Sequence[RawMessage]]:
        """The messages of [start, end) of each partition that exist, in offset order per partition; then it ends.

        Raises RangeLost for a start outside the partition, AccessDenied, ClusterUnreachable when nothing came for
        `timeout_s`. One reading at a time: the next one ends the one before it.
        """

    def close(self) -> None: ...


class TopicAdmin(Protocol):
    """Changes to topics. With `dry_run` the cluster checks the request and carries nothing out.

    All raise TopicRefused, AccessDenied, ClusterUnreachable; all but `create` TopicMissing.
    """

    def create(
        self, name: str, partitions: int, replication: int | None, config: Mapping[str, str], dry_run: bool
    ) -> None:
        """`replication` None: what the cluster is configured for. Raises TopicExists."""

    def grow(self, name: str, partitions: int, dry_run: bool) -> None:
        """`partitions`: how many there are afterwards; more than before."""

    def alter(self, name: str, config: Mapping[str, str | None], dry_run: bool) -> None:
        """None as a value brings the cluster's default back. What is not named stays."""

    def delete(self, name: str) -> None: ...


class ClusterAdmin(Protocol):
    """Requests that may wait, called from a worker thread. All raise ClusterUnreachable."""

    capabilities: frozenset[str]

    def prepare_coordination(self, topic: str, partitions: int) -> int:
        """Creates the coordination topic, or checks its settings (L1). Returns its partition count.

        Raises CoordinationTopicMissing, WrongTopicSetting.
        """

    def describe_topic(self, topic: str) -> TopicInfo | None:
        """Partition count and id from one answer; None if the cluster says that the topic does not exist."""

    def topics(self) -> frozenset[str]:
        """Names of all topics that this client may see."""

    def partition_count(self, topic: str) -> int | None:
        """The partition count alone; None if the topic does not exist."""

    def bounds(self, tps: Sequence[TopicPartition], *, committed: bool = False) -> dict[TopicPartition, Bounds]:
        """First and end offsets. `committed`: end at the last stable offset, as read_committed readers do."""

    def offsets_at(self, tps: Sequence[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
        """First offset whose message is at or after `time_ms` (since 1970); partitions without one are left out.

        Raises UnsupportedPlatform if the capability `time_lookup` is missing.
        """

    def committed(self, group: str, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Kafka's committed offsets; partitions without one are left out."""

    def commit(self, group: str, positions: Mapping[TopicPartition, int]) -> str:
        """Commits positions for the usual lag tools (D7); returns why Kafka refused, "" if it did not."""

    def delete_records(self, tp: TopicPartition, before: int) -> str:
        """Deletes the records below an offset; returns why Kafka refused, "" if it did not."""

    def topic_admin(self) -> TopicAdmin:
        """Changes to topics. Raises UnsupportedPlatform where the capability `create_topic` is missing."""

    def live_kafka_members(self, group: str) -> int:
        """How many ordinary Kafka consumers are alive in the group."""

    def settings(self, topic: str) -> dict[str, str]:
        """The topic's settings; {} if the capability `describe_config` is missing."""

    def close(self) -> None: ...


class Transport(Protocol):
    """Access to a cluster: creates the three interfaces above. `name`: the kind of transport, for people."""

    name: str

    def log(self, topic: str, client_id: str, writes: bool = True) -> CoordinationLog:
        """`writes`: whether the caller will append soon. If not, no right to write is needed until it does."""

    def source(
        self, group: str, client_id: str, settings: Mapping[str, Any], queue_bytes: int | None = None
    ) -> DataSource:
        """`queue_bytes`: roughly how much to fetch ahead of `poll`, unless `settings` say otherwise."""
        ...

    def admin(self) -> ClusterAdmin: ...

    def reader(self, client_id: str, settings: Mapping[str, Any]) -> MessageReader: ...
