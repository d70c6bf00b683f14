"""Declares the interfaces to a cluster, as typing.Protocols: coordination log, data source, administration, clock.

Three transports implement them: memory.py, kafka*.py, and kafka*.py again on the broker of embedded.py. One conformance
suite runs over all of them (tests/support/conformance.py). No implementation makes a decision of the protocol.

A transport may lack capabilities: truncate (delete old records), grow (add partitions), time_lookup (find an offset by
time), describe_config (read a topic's settings), create_topic, long_log (keep more than a few MB per partition).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from marshal_py.errors import MarshalError
from marshal_py.protocol.wire.identity import Instant, TopicPartition

ALL_CAPABILITIES = frozenset({"truncate", "grow", "time_lookup", "describe_config", "create_topic", "long_log"})

EARLIEST = "earliest"
LATEST = "latest"


class LogRecord(NamedTuple):
    """A record of the coordination partition `log`. The fold reads neither `timestamp_ms` nor `key`.

    Both are for people. `timestamp_ms` counts from 1970.
    """

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
    """Messages of one partition that were fetched together, in offset order.

    `round` is the number of the assignment that fetched them (DataSource.assign). A chunk without messages says that
    all messages below the offset `reached` have come, because those that were still to come there do not exist
    (transactions leave such offsets behind).
    """

    tp: TopicPartition
    round: int
    messages: Sequence[RawMessage]
    reached: int = -1


class Bounds(NamedTuple):
    """The first offset of a partition that still exists, and the offset after its last one."""

    first: int
    end: int


class TopicInfo(NamedTuple):
    """A topic in the cluster. `partitions`: how many it has.

    `topic_id` changes if the topic is deleted and created again. It is "" if the topic has no id.
    """

    partitions: int
    topic_id: str = ""


class BrokerInfo(Struct, frozen=True):
    """A broker. `address`: host:port. `rack`: "" if it has none, or the cluster does not say."""

    id: int
    address: str
    rack: str = ""


class ClusterInfo(NamedTuple):
    """A cluster. `settings`: the configuration of a broker; {} if this client may not read it.

    `partition_counts`: by name, of each topic that this client may see. `client_versions`: of the client libraries.
    """

    cluster_id: str
    brokers: tuple[BrokerInfo, ...]
    partition_counts: Mapping[str, int]
    settings: Mapping[str, str]
    client_versions: Mapping[str, str]


class OutOfRange(NamedTuple):
    """Reports a refused fetch position: the partition does not have it, or has lost the records there since (D6)."""

    tp: TopicPartition
    position: int
    round: int  # the refused assignment
    truncated: str = ""  # the broker's words if its log was cut below what had been read, else ""


class Broken(NamedTuple):
    """Reports a partition that the cluster does not serve. `reason`: what the cluster said, as text for people.

    `round` is the number of the assignment that failed (DataSource.assign).
    """

    tp: TopicPartition
    reason: str
    round: int
    permanent: bool  # waiting does not help; if False, the source has used up its retries


class Clock(Protocol):
    def now(self) -> Instant:
        """Returns the present time on the three clocks of this machine."""

    def boot_ns(self) -> int:
        """Returns the boot clock alone, in ns since the same zero as `Instant.boot_ms`.

        It is read before every message.
        """


class CoordinationLog(Protocol):
    """Reads and writes the coordination topic. `log` is everywhere the number of a coordination partition.

    One thread calls `follow` and `poll`. Any thread may append, and appending never waits.
    """

    def follow(self, log: int, offset: int) -> None:
        """Makes `poll` also return the records of `log`, from `offset` on."""

    def poll(self, timeout_s: float) -> list[LogRecord]:
        """Returns new records of the followed logs, in order per log. Waits for the first one.

        Returns [] if none has come after `timeout_s`. Raises HistoryTruncated or TopicRecreated once if a followed
        offset is outside its log; other logs continue.
        """

    def read(self, log: int, start: int, end: int, timeout_s: float) -> Iterator[list[LogRecord]]:
        """Yields the records of `log` from offset `start` to `end` - 1, whether or not the log is followed.

        Any thread may call it. The last list may go beyond `end`. Raises HistoryTruncated if the log begins after
        `start`, TopicRecreated if the log ends before `start`, ClusterUnreachable if nothing came for `timeout_s`.
        """

    def append(self, log: int, key: bytes, value: bytes) -> bool:
        """Queues a record and returns True. Never waits.

        Returns False if the queue is full: then the record is not sent, and the caller tries again at a later tick.
        True does not mean that the record was written: only reading it back shows that (T17). Raises MessageTooLarge.
        """

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
    """Fetches messages of the assigned partitions. One thread polls; another may assign at the same time.

    `assign`, `unassign` and `pause` only note what is wanted, so they never wait. The polling thread, or `carry_out`,
    tells the client.
    """

    def learn_leaders(self, topics: Iterable[str]) -> None:
        """Looks up the leaders of these topics' partitions, so that a later `assign` can fetch at once. May wait."""

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
        """Returns at most `max_messages` new messages, as soon as there are any; [] after `timeout_s`.

        Chunks without messages come first.
        """

    def poll_now(self, max_messages: int) -> list[Chunk] | None:
        """Returns at most `max_messages` new messages that are here already. An event loop may call it.

        Returns None, without a call of the client, if that would have to wait or could run code of the user.
        """

    def carry_out(self) -> None:
        """Tells the client about assignments and pauses since the last poll. Never waits.

        Does nothing while a polling thread is about to do so. Must not be called under a lock that the polling thread
        may want.
        """

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
        """Yields the messages of each partition from its start to before its end, as far as they exist.

        `starts`, `ends`: offset by partition, for the same partitions of one topic. Messages of one partition come in
        offset order. `ends` must not be beyond the ends of the leaders: a replica that has not received the last
        offsets yet is waited for. Raises RangeLost for a start outside the partition, AccessDenied, ClusterUnreachable
        when nothing came for `timeout_s`. Only one reading runs at a time: the next call ends an unfinished one.
        """

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
        """Queues one message; waits while the queue is full. `timestamp_ms`: since 1970, 0 means now.

        Raises TopicMissing, InvalidOption, MessageTooLarge, EmbeddedLogFull, and the error of an earlier message that
        the cluster refused.
        """

    def flush(self, timeout_s: float) -> None:
        """Waits until every message is acknowledged. Raises the error of a message that the cluster refused.

        Raises ClusterUnreachable if an acknowledgement is missing after `timeout_s`.
        """

    def close(self) -> None:
        """Drops queued messages and disconnects. Call `flush` before."""


class TopicAdmin(Protocol):
    """Creates, changes and deletes topics. With `dry_run` the cluster checks a request and carries nothing out.

    All methods raise TopicRefused, AccessDenied, ClusterUnreachable; all but `create` also TopicMissing.
    """

    def create(
        self, name: str, partitions: int, replication: int | None, config: Mapping[str, str], dry_run: bool
    ) -> None:
        """Creates a topic. Raises TopicExists.

        `replication`: how many replicas each partition has; None takes the cluster's default. `config`: the topic's
        settings.
        """

    def grow(self, name: str, partitions: int, dry_run: bool) -> None:
        """Adds partitions. `partitions`: how many the topic has afterwards, which must be more than before."""

    def alter(self, name: str, config: Mapping[str, str | None], dry_run: bool) -> None:
        """Changes the settings that `config` names. The value None brings the cluster's default back."""

    def delete(self, name: str) -> None: ...


class ClusterAdmin(Protocol):
    """Sends requests that may wait, so a worker thread calls it. All methods raise ClusterUnreachable."""

    capabilities: frozenset[str]

    def prepare_coordination(self, topic: str, partitions: int) -> int:
        """Creates the coordination topic if it is missing, and checks its settings (L1). Returns its partition count.

        `partitions`: how many a new topic gets. Raises CoordinationTopicMissing, WrongTopicSetting.
        """

    def describe_topic(self, topic: str) -> TopicInfo | None:
        """Returns partition count and id of a topic; None if the cluster says that it does not exist."""

    def describe_cluster(self) -> ClusterInfo:
        """Returns what the cluster says of itself."""

    def topics(self) -> frozenset[str]:
        """Returns the names of all topics that this client may see."""

    def partition_count(self, topic: str) -> int | None:
        """Returns the partition count alone; None if the topic does not exist."""

    def bounds(
        self, tps: Sequence[TopicPartition], *, committed: bool = False, timeout_s: float | None = None
    ) -> dict[TopicPartition, Bounds]:
        """Returns first and end offset of each partition.

        With `committed` the end is the last stable offset, which is as far as read_committed consumers read. Raises
        ClusterUnreachable after `timeout_s`, and after the connection's own time if that is shorter or it is None.
        """

    def offsets_at(self, tps: Sequence[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
        """Returns for each partition the first offset whose message is at or after `time_ms` (since 1970).

        Partitions without such a message are left out. Raises UnsupportedPlatform if the capability `time_lookup` is
        missing.
        """

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
        """Opens the coordination topic `topic`. `writes`: whether the caller will append soon.

        If it will not, no right to write is needed until it does.
        """

    def source(
        self, group: str, client_id: str, settings: Mapping[str, Any], queue_bytes: int | None = None
    ) -> DataSource:
        """Makes a source of data messages. `group`: the `group.id` that the client names to the brokers.

        `queue_bytes`: how much to fetch ahead of `poll` before fetching stops, unless `settings` say otherwise.
        """
        ...

    def admin(self) -> ClusterAdmin: ...

    def reader(self, client_id: str, settings: Mapping[str, Any]) -> MessageReader: ...

    def writer(self, on_written: OnWritten | None = None) -> MessageWriter:
        """Makes a writer. It calls `on_written` inside `write` and `flush`, once per acknowledged message."""
        ...
