"""What the fronts ask of a cluster, as Protocols: the coordination log, the data, the administration, the clock.

Three transports implement them: memory.py, kafka*.py, and the kafka ones again over embedded.py. One conformance suite
runs over all (tests/transport). No protocol decision is made behind a port.

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
    """One record of a coordination partition. The fold reads neither `timestamp_ms` nor `key`: they are for people."""

    log: int
    offset: int
    value: bytes | None
    timestamp_ms: int
    key: bytes | None = None


class RawMessage(Protocol):
    """A fetched data message: confluent_kafka's own Message, or memory.py's twin of it."""

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def key(self) -> Any: ...
    def value(self) -> Any: ...
    def headers(self) -> Any: ...
    def timestamp(self) -> tuple[int, int]: ...


class Chunk(NamedTuple):
    """Messages of one partition in offset order, as fetched together. `round` is the assignment that fetched them."""

    tp: TopicPartition
    round: int
    messages: Sequence[RawMessage]


class Bounds(NamedTuple):
    """First offset that is still there, and the offset after the last."""

    first: int
    end: int


class TopicInfo(NamedTuple):
    """What the cluster says of a topic. `topic_id` differs when the topic is made anew; "" where nobody can know."""

    partitions: int
    topic_id: str = ""


class OutOfRange(NamedTuple):
    """A fetch position outside what the partition holds, or on a history that is not the partition's any more (D6)."""

    tp: TopicPartition
    position: int
    round: int  # the assignment that was refused
    truncated: str = ""  # the broker's words, if its log was cut below what had been read


class Broken(NamedTuple):
    """A partition that the cluster does not serve, with its words. `round` is the assignment that it is about."""

    tp: TopicPartition
    reason: str
    round: int
    permanent: bool  # waiting does not mend it; otherwise it was tried again for as long as the source tries


class Clock(Protocol):
    def now(self) -> Instant:
        """The three clocks of this machine, now."""

    def boot_ns(self) -> int:
        """The boot clock alone, in ns from the same zero as `Instant.boot_ms`: what is asked before every message."""


class CoordinationLog(Protocol):
    """The coordination topic: ordered reads from genesis, appends without waiting. One thread reads; any appends."""

    def follow(self, log: int, offset: int) -> None:
        """Reads `log` from `offset` on, together with what is followed already."""

    def poll(self, timeout_s: float) -> list[LogRecord]:
        """Records in order per log; empty after `timeout_s`. Returns at once when there is one.

        Raises HistoryTruncated or TopicRecreated, once, if a followed offset is outside the log; the others go on.
        """

    def read(self, log: int, start: int, end: int, timeout_s: float) -> Iterator[list[LogRecord]]:
        """The records of [start, end), apart from what is followed, by any thread; nothing if there are none.

        Records may follow that lie behind `end`. Raises HistoryTruncated if the log begins above `start`,
        TopicRecreated, ClusterUnreachable if nothing came for `timeout_s`.
        """

    def append(self, log: int, key: bytes, value: bytes) -> bool:
        """Hands a record to the producer; False if its queue is full (the record is not sent, a later tick sends anew).

        Never waits. What becomes of the record is learned by reading it (T17). Raises MessageTooLarge.
        """

    def bounds(self, log: int, timeout_s: float) -> Bounds:
        """Raises ClusterUnreachable after `timeout_s`."""

    produce_errors: int  # records that were not written, as far as it is known

    def waiting_for(self) -> str:
        """What the connection is waiting for, in words for people; "" when all is well."""

    def refused(self) -> MarshalError | None:
        """Why the cluster refuses our reads or writes for good (authorization, size); None if it does not."""

    def close(self, flush_s: float) -> None:
        """Sends what is queued for at most `flush_s`, then lets go."""


class DataSource(Protocol):
    """Messages of the assigned partitions. One thread polls; one at a time assigns, which never waits.

    What is assigned, unassigned or paused is carried out by the thread that polls, or by `carry_out`.
    """

    def learn_leaders(self, topics: Iterable[str]) -> None:
        """Looks up who leads the partitions of these topics, so that a later `assign` fetches at once. May wait."""

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Begins or restarts fetching at these positions; a new round begins for each."""

    def unassign(self, tps: Iterable[TopicPartition]) -> None: ...

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        """Stops fetching without forgetting where."""

    def resume(self, positions: Mapping[TopicPartition, int]) -> None:
        """Goes on at these positions."""

    def round(self, tp: TopicPartition) -> int:
        """Number of the present assignment of `tp`, also if it was refused; 0 if it is not assigned."""

    def fetching(self, tp: TopicPartition) -> bool:
        """Whether messages may come of the present assignment: there is one, and it was not refused."""

    def poll(self, timeout_s: float, max_messages: int) -> list[Chunk]:
        """What has come, at most `max_messages`; empty after `timeout_s`. Returns at once when there is something."""

    def carry_out(self) -> None:
        """Does what was asked for since the last poll, unless another thread is polling: that one does it. Never waits.

        Not to be called under a lock that a polling thread may want.
        """

    def out_of_range(self) -> list[OutOfRange]:
        """Partitions whose position the cluster refused since the last call; they are not fetched any more."""

    def broken(self) -> list[Broken]:
        """Partitions that the cluster did not serve, since the last call; they are not fetched any more."""

    def end_offset(self, tp: TopicPartition) -> int:
        """End of the partition as last seen, without asking; -1 before the first answer (then it is not warm)."""

    def close(self) -> None:
        """Lets go. Inside a callback of the polling thread, or a signal handler on it, that thread does so soon."""


class ClusterAdmin(Protocol):
    """Questions and changes that may wait; called from a worker thread. All raise ClusterUnreachable."""

    capabilities: frozenset[str]

    def prepare_coordination(self, topic: str, partitions: int) -> int:
        """Creates or checks the coordination topic (L1); returns its partition count.

        Raises CoordinationTopicMissing, WrongTopicSetting.
        """

    def describe_topic(self, topic: str) -> TopicInfo | None:
        """Partition count and id from one answer; None where the cluster says that there is no such topic."""

    def topics(self) -> frozenset[str]:
        """Names of all topics that this client may see."""

    def partition_count(self, topic: str) -> int | None:
        """The count alone; None if there is no such topic."""

    def bounds(self, tps: Sequence[TopicPartition], *, committed: bool = False) -> dict[TopicPartition, Bounds]:
        """First and end offsets. `committed`: the end that read_committed readers see (the last stable offset)."""

    def offsets_at(self, tps: Sequence[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
        """First offset whose message is not older than `time_ms`; partitions without one are left out.

        Raises UnsupportedPlatform where the capability `time_lookup` is missing.
        """

    def committed(self, group: str, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Kafka's committed offsets; partitions without one are left out."""

    def commit(self, group: str, positions: Mapping[TopicPartition, int]) -> str:
        """Commits positions for the usual lag tools (D7); returns why Kafka refused, "" if it did not."""

    def delete_records(self, tp: TopicPartition, before: int) -> str:
        """Deletes what lies below an offset; returns why Kafka refused, "" if it did not."""

    def live_kafka_members(self, group: str) -> int:
        """Ordinary Kafka consumers that are alive in the group."""

    def settings(self, topic: str) -> dict[str, str]:
        """The topic's settings; empty where they cannot be described."""

    def close(self) -> None: ...


class Transport(Protocol):
    """A way into a cluster: makes the three ports. `name` says which, for people."""

    name: str

    def log(self, topic: str, client_id: str, writes: bool = True) -> CoordinationLog:
        """`writes`: whether it will soon append. Who mostly looks needs no right to write until it does."""

    def source(
        self, group: str, client_id: str, settings: Mapping[str, Any], queue_bytes: int | None = None
    ) -> DataSource:
        """`queue_bytes`: how much it fetches ahead of `poll`, about, unless the settings say it."""
        ...

    def admin(self) -> ClusterAdmin: ...
