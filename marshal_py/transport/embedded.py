"""An in-process Kafka broker: librdkafka's own mock cluster, by ctypes on the library that confluent_kafka bundles.

It listens on 127.0.0.1 and serves any process of this machine, for as long as the process that made it lives. It is for
demos, examples and fault tests, never a proof. What it does otherwise than Kafka (measured with librdkafka 2.16.0):

* a partition keeps KEPT_BYTES of record batches, then drops the oldest without a word. Nothing changes that number;
* a client that asks about an unknown topic creates it, with AUTO_CREATED_PARTITIONS. Nothing switches that off: create
  topics first, and let consumers keep `allow.auto.create.topics` at false, which the broker honours;
* a fetch that finds nothing is answered after the client's whole `fetch.wait.max.ms`, even if data comes meanwhile, so
  that setting is the round trip (FETCH_WAIT_MS);
* idempotence is not enforced: when an acknowledgement is lost, the producer's retry is written a second time;
* `read_committed` is not honoured: aborted and open transactions are read like all others;
* a look-up by time answers "no such record" instead of failing, and so does list_consumer_group_offsets without
  partitions; every administrative request that changes or describes something fails as _UNSUPPORTED_FEATURE.

This file makes no protocol decision and knows nothing of coordination.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import confluent_kafka
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition, cimpl

from marshal_py.errors import (
    ClusterUnreachable,
    ConsumerClosed,
    EmbeddedLogFull,
    InvalidName,
    InvalidOption,
    TopicMissing,
    UnsupportedPlatform,
    UsedAfterFork,
)

# What a client of this broker can do, of the names that transports may lack: truncate, grow, time_lookup,
# describe_config, create_topic, long_log. None of them. Who holds the Broker object can create topics and truncate.
CAPABILITIES: frozenset[str] = frozenset()
OWNER_CAPABILITIES: frozenset[str] = frozenset({"create_topic", "truncate"})

# librdkafka's own numbers: constants in its source, which no function and no setting changes.
KEPT_BYTES = 5 * 1024 * 1024
AUTO_CREATED_PARTITIONS = 4

# The most that a run may write to one partition. The distance to KEPT_BYTES is for what the writer cannot count:
# batches that a retry writes twice.
PARTITION_BYTES_MAX = 4_000_000

# What a record may cost beside its bytes: 61 for the header of a batch of its own, 36 for its length fields at their
# longest; and the two length fields of each header at theirs.
RECORD_OVERHEAD_BYTES_MAX = 97
HEADER_OVERHEAD_BYTES_MAX = 10

# `fetch.wait.max.ms` for clients of this broker. 5 gives a round trip of 4.4 ms at 2 % of a core; the default, 500,
# gives half a second; 1 gives 1.3 ms at 7 %; 0 polls without pause.
FETCH_WAIT_MS = 5

# All brokers share one thread, so that more of them add no speed; replication beyond three shows nothing new either.
BROKERS_MAX = 16

# A partition may come to hold KEPT_BYTES of memory: a thousand of them are 5 GB, more than a demo may take by accident.
PARTITIONS_MAX = 1000

# An hour: longer than any test waits, and far from the overflow of librdkafka's microseconds.
ROUND_TRIP_MS_MAX = 3_600_000

# Metadata and offsets are one round trip on this machine; a broker that takes longer was switched off.
LOOKUP_TIMEOUT_S = 10.0

# Kafka's own rule. The mock takes any name, so that a mistake would show on the real cluster only.
TOPIC_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")

# The mock names its cluster after its address in memory. Kafka's own ids are 22 characters of base64.
CLUSTER_ID = re.compile(r"mockCluster[0-9a-f]+")

# The requests that the mock answers, by the names that Kafka's protocol guide gives them.
API_KEYS: Mapping[str, int] = {
    "Produce": 0,
    "Fetch": 1,
    "ListOffsets": 2,
    "Metadata": 3,
    "OffsetCommit": 8,
    "OffsetFetch": 9,
    "FindCoordinator": 10,
    "JoinGroup": 11,
    "Heartbeat": 12,
    "LeaveGroup": 13,
    "SyncGroup": 14,
    "ApiVersions": 18,
    "InitProducerId": 22,
    "OffsetForLeaderEpoch": 23,
    "AddPartitionsToTxn": 24,
    "AddOffsetsToTxn": 25,
    "EndTxn": 26,
    "TxnOffsetCommit": 28,
}

RD_KAFKA_PRODUCER = 0
ERROR_TEXT_BYTES = 512

_pointer, _int, _text, _i16, _i32, _i64, _size = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int16,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_size_t,
)

# Every C function that is called: its result, then its arguments, as in rdkafka.h and rdkafka_mock.h.
_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "rd_kafka_conf_new": (_pointer,),
    "rd_kafka_conf_set": (_int, _pointer, _text, _text, _text, _size),
    "rd_kafka_conf_destroy": (None, _pointer),
    "rd_kafka_new": (_pointer, _int, _pointer, _text, _size),
    "rd_kafka_destroy": (None, _pointer),
    "rd_kafka_mock_cluster_new": (_pointer, _pointer, _int),
    "rd_kafka_mock_cluster_destroy": (None, _pointer),
    "rd_kafka_mock_cluster_bootstraps": (_text, _pointer),
    "rd_kafka_mock_topic_create": (_int, _pointer, _text, _int, _int),
    "rd_kafka_mock_partition_set_leader": (_int, _pointer, _text, _i32, _i32),
    "rd_kafka_mock_broker_set_down": (_int, _pointer, _i32),
    "rd_kafka_mock_broker_set_up": (_int, _pointer, _i32),
    "rd_kafka_mock_broker_set_rtt": (_int, _pointer, _i32, _int),
    "rd_kafka_mock_push_request_errors_array": (None, _pointer, _i16, _size, ctypes.POINTER(_int)),
    "rd_kafka_mock_clear_request_errors": (None, _pointer, _i16),
    # Only newer libraries have these two.
    "rd_kafka_mock_set_controller_id": (None, _pointer, _i32),
    "rd_kafka_mock_partition_delete_records": (_int, _pointer, _text, _i32, _i64),
}


class EmbeddedCallFailed(Exception):
    """The mock cluster refused a call: a topic that exists already, a broker that does not exist."""

    def __init__(self, call: str, code: int, reason: str) -> None:
        self.call, self.code, self.reason = call, code, reason
        super().__init__(f"the embedded broker refused {call}: {reason} ({code})")


class EmbeddedLogDropped(Exception):
    """Records are gone because a partition outgrew what the embedded broker keeps. What was read cannot be trusted."""

    def __init__(self, topic: str, partition: int, first_offset: int, kept_bytes: int) -> None:
        self.topic, self.partition, self.first_offset, self.kept_bytes = topic, partition, first_offset, kept_bytes
        super().__init__(
            f"{topic}:{partition} has lost its records before offset {first_offset}: the embedded broker "
            f"keeps {kept_bytes} bytes per partition; produce less, or use a real broker"
        )


class LogBounds(NamedTuple):
    """Where a partition begins and ends: the first offset that can be read, and the one that is written next."""

    low: int
    high: int


def is_embedded(cluster_id: str | None) -> bool:
    """Whether a cluster id, from `list_topics().cluster_id` or `describe_cluster`, is that of an embedded broker."""
    return cluster_id is not None and CLUSTER_ID.fullmatch(cluster_id) is not None


def record_bytes_max(key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]] = ()) -> int:
    """The most that one record can add to its partition, whatever the batch in which it travels."""
    size_bytes = RECORD_OVERHEAD_BYTES_MAX + len(key or b"") + len(value or b"")
    for name, content in headers:
        size_bytes += HEADER_OVERHEAD_BYTES_MAX + len(name.encode()) + len(content or b"")
    return size_bytes


class LogGuard:
    """Counts what is written to each partition and refuses the record that would pass the limit, before it is sent.

    The broker itself neither warns nor tells the size of a partition, so who writes must count. One guard covers one
    process; several writers of one partition need one guard between them, or a share of the limit each.
    """

    def __init__(self, limit_bytes: int = PARTITION_BYTES_MAX) -> None:
        if not 0 < limit_bytes <= PARTITION_BYTES_MAX:
            raise InvalidOption("limit_bytes", limit_bytes, f"1 to {PARTITION_BYTES_MAX}")
        self.limit_bytes = limit_bytes
        self._used_bytes: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def reserve(self, topic: str, partition: int, record_bytes: int) -> int:
        """Take room for a record (`record_bytes_max`) and return what the partition holds then; or EmbeddedLogFull."""
        with self._lock:
            total_bytes = self._used_bytes.get((topic, partition), 0) + record_bytes
            if total_bytes > self.limit_bytes:
                raise EmbeddedLogFull(topic, partition, total_bytes, self.limit_bytes)
            self._used_bytes[topic, partition] = total_bytes
            return total_bytes


def _library() -> ctypes.CDLL:
    """librdkafka as confluent_kafka has loaded it; a second copy would have its own state and other options."""
    if sys.platform == "win32":
        raise UnsupportedPlatform("marshal_py.embedded", "Windows", "use Linux, macOS or WSL, or a real broker")
    # The extension module comes first: a look-up in it goes on into the libraries that it is linked to, however they
    # are named. The folders are where wheels for Linux and for macOS put the library, should that look-up fail.
    package = Path(confluent_kafka.__file__).parent
    candidates = [
        Path(cimpl.__file__),
        *sorted(package.parent.glob("confluent_kafka.libs/librdkafka*")),
        *sorted(package.glob(".dylibs/librdkafka*")),
    ]
    for path in candidates:
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue  # Another candidate may load; if none does, the error below names them all.
        if hasattr(library, "rd_kafka_mock_cluster_new"):
            return library
    raise UnsupportedPlatform(
        "marshal_py.embedded",
        f"{platform.system()} with confluent-kafka {confluent_kafka.__version__}",
        f"none of {', '.join(map(str, candidates))} has librdkafka's mock cluster; install confluent-kafka's wheel",
    )


def _bind(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """The C functions by name, those that this library lacks left out."""
    functions: dict[str, Callable[..., Any]] = {}
    for name, (result, *arguments) in _SIGNATURES.items():
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            functions[name] = function
    return functions


class Broker:
    """The embedded broker. `with Broker() as broker:`, or `start()` and `close()`; any thread may call any method.

    1. `_cluster` is set exactly while the broker runs, and `_handle` with it.
    2. `_lock` is held around every call into C, so that none of them meets a cluster that is being destroyed.
    3. `_truncated` holds, per partition, the first offset that `truncate` left; only more than that counts as dropped.
    """

    def __init__(
        self, brokers: int = 1, partitions: int = AUTO_CREATED_PARTITIONS, topics: Mapping[str, int] | None = None
    ) -> None:
        """`partitions` is for `create_topic` without a number; `topics` (name -> partitions) are there from the start.

        Topics that come to be because a client asked for them have AUTO_CREATED_PARTITIONS, whatever is said here.
        """
        _require("brokers", brokers, 1, BROKERS_MAX)
        _require("partitions", partitions, 1, PARTITIONS_MAX)
        self.brokers, self.partitions, self.guard = brokers, partitions, LogGuard()
        self._topics_at_start = dict(topics or {})
        self._functions: dict[str, Callable[..., Any]] = {}
        self._handle: int | None = None
        self._cluster: int | None = None
        self._servers = ""
        self._lookup: Consumer | None = None
        self._pid = os.getpid()
        self._truncated: dict[tuple[str, int], int] = {}
        self._lock = threading.RLock()

    def start(self) -> Self:
        """Listen. Does nothing if the broker runs; after `close` it starts anew, empty and on other ports."""
        with self._lock:
            if self._cluster is not None:
                return self
            self._pid = os.getpid()
            self._functions = _bind(_library())
            self._handle = self._new_handle()
            cluster = self._functions["rd_kafka_mock_cluster_new"](self._handle, self.brokers)
            if not cluster:
                self._functions["rd_kafka_destroy"](self._handle)
                raise EmbeddedCallFailed("start", KafkaError._FAIL, "the mock cluster could not listen on 127.0.0.1")
            self._cluster = cluster
            self._servers = self._functions["rd_kafka_mock_cluster_bootstraps"](cluster).decode()
            self._truncated, self.guard = {}, LogGuard()
            # Without a controller, clients wait their whole timeout before an administrative request fails.
            if "rd_kafka_mock_set_controller_id" in self._functions:
                self._functions["rd_kafka_mock_set_controller_id"](cluster, 1)
            try:
                for name, partitions in self._topics_at_start.items():
                    self.create_topic(name, partitions)
            except Exception:
                self.close()  # Nobody holds a broker whose start failed, so nobody else would free it.
                raise
            return self

    def _new_handle(self) -> int:
        """A client handle of librdkafka, which the mock cluster needs as its home; it connects to nothing."""
        text = ctypes.create_string_buffer(ERROR_TEXT_BYTES)
        conf = self._functions["rd_kafka_conf_new"]()
        # Errors only: as a client without servers to connect to, it would warn about that on standard error.
        self._functions["rd_kafka_conf_set"](conf, b"log_level", b"3", text, ERROR_TEXT_BYTES)
        handle = self._functions["rd_kafka_new"](RD_KAFKA_PRODUCER, conf, text, ERROR_TEXT_BYTES)
        if not handle:
            self._functions["rd_kafka_conf_destroy"](conf)  # It belongs to the handle only if there is one.
            raise EmbeddedCallFailed("start", KafkaError._FAIL, text.value.decode(errors="replace"))
        return int(handle)

    def close(self) -> None:
        """Stop listening and forget everything. Closing twice does no harm; nor does closing in a fork."""
        if os.getpid() != self._pid:
            return  # The threads that C would wait for live in the parent only, and so does the broker.
        with self._lock:
            if self._lookup is not None:
                self._lookup.close()
                self._lookup = None
            cluster, handle, self._cluster, self._handle = self._cluster, self._handle, None, None
            if cluster is not None:
                self._functions["rd_kafka_mock_cluster_destroy"](cluster)
                self._functions["rd_kafka_destroy"](handle)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def bootstrap_servers(self) -> str:
        with self._lock:
            self._require_running()
            return self._servers

    # --- topics

    def create_topic(self, name: str, partitions: int | None = None, replication: int = 1) -> None:
        """Create a topic. Its partitions cannot be added to later. One that exists: EmbeddedCallFailed, code 36."""
        if not TOPIC_NAME.fullmatch(name):
            raise InvalidName("topic", name, "1 to 249 of A-Z a-z 0-9 . _ - and not . or ..")
        count = self.partitions if partitions is None else partitions
        _require("partitions", count, 1, PARTITIONS_MAX)
        _require("replication", replication, 1, self.brokers)
        self._call("rd_kafka_mock_topic_create", name.encode(), count, replication)

    def topics(self) -> dict[str, int]:
        """Every topic with its number of partitions, those that clients created by asking included."""
        try:
            found = self._client().list_topics(timeout=LOOKUP_TIMEOUT_S).topics
        except KafkaException as error:
            raise ClusterUnreachable(self._servers, "metadata", str(error)) from error
        return {name: len(topic.partitions) for name, topic in found.items()}

    def bounds(self) -> dict[tuple[str, int], LogBounds]:
        """Where every partition begins and ends."""
        found = {}
        for key in [(name, index) for name, count in self.topics().items() for index in range(count)]:
            try:
                answer = self._client().get_watermark_offsets(TopicPartition(*key), timeout=LOOKUP_TIMEOUT_S)
            except KafkaException as error:
                raise ClusterUnreachable(self._servers, "offsets", str(error)) from error
            found[key] = LogBounds(*answer)
        return found

    def truncate(self, topic: str, partition: int, before_offset: int) -> None:
        """Drop the records before an offset, as retention does. Clients cannot: the broker refuses DeleteRecords."""
        _require("before_offset", before_offset, 0, 2**63 - 1)
        with self._lock:
            self._call("rd_kafka_mock_partition_delete_records", topic.encode(), partition, before_offset)
            self._truncated[topic, partition] = max(before_offset, self._truncated.get((topic, partition), 0))

    def require_nothing_dropped(self) -> None:
        """EmbeddedLogDropped if a partition has outgrown the broker and lost its oldest records. Ask after a run."""
        for (topic, partition), (low, _) in self.bounds().items():
            if low > self._truncated.get((topic, partition), 0):
                raise EmbeddedLogDropped(topic, partition, low, KEPT_BYTES)

    # --- fault switches

    def broker_down(self, broker_id: int = 1) -> None:
        """Close all connections to a broker and refuse new ones. What it holds is kept; its leaders do not move."""
        self._call_broker("rd_kafka_mock_broker_set_down", broker_id)

    def broker_up(self, broker_id: int = 1) -> None:
        """End `broker_down`; the port is the same."""
        self._call_broker("rd_kafka_mock_broker_set_up", broker_id)

    def set_round_trip_ms(self, broker_id: int, round_trip_ms: int) -> None:
        """Delay every answer of a broker. Requests take effect at once: with `broker_down`, answers are lost."""
        _require("round_trip_ms", round_trip_ms, 0, ROUND_TRIP_MS_MAX)
        self._call_broker("rd_kafka_mock_broker_set_rtt", broker_id, round_trip_ms)

    def fail_requests(self, api_key_name: str, *error_codes: int) -> None:
        """Answer the next requests of a kind with these errors, one each; `KafkaError._TRANSPORT` hangs up instead.

        The request has no effect then. Code 0 lets a request pass, so that (0, 0, 7) fails the third.
        """
        codes = (ctypes.c_int * len(error_codes))(*error_codes)
        self._call("rd_kafka_mock_push_request_errors_array", _api_key(api_key_name), len(error_codes), codes)

    def set_leader(self, topic: str, partition: int, broker_id: int) -> None:
        """Move the leadership of a partition; clients notice by an error and ask for metadata."""
        self._require_broker(broker_id)
        if topic not in self.topics():
            raise TopicMissing(topic)  # The mock would create it, with just enough partitions.
        self._call("rd_kafka_mock_partition_set_leader", topic.encode(), partition, broker_id)

    def clear(self) -> None:
        """End all faults: brokers up, no delay, no errors in waiting. Leaders stay where they are."""
        for key in API_KEYS.values():
            self._call("rd_kafka_mock_clear_request_errors", key)
        for broker_id in range(1, self.brokers + 1):
            self.set_round_trip_ms(broker_id, 0)
            self.broker_up(broker_id)

    # --- the way into C

    def _call_broker(self, function: str, broker_id: int, *arguments: int) -> None:
        self._require_broker(broker_id)
        self._call(function, broker_id, *arguments)

    def _require_broker(self, broker_id: int) -> None:
        # To the mock, -1 means all brokers, or no leader; here it can only be a slip.
        _require("broker_id", broker_id, 1, self.brokers)

    def _call(self, function: str, *arguments: Any) -> None:
        with self._lock:
            self._require_running()
            if function not in self._functions:
                version = confluent_kafka.libversion()[0]
                raise UnsupportedPlatform(function, f"librdkafka {version}", "install a newer confluent-kafka")
            code = self._functions[function](self._cluster, *arguments)
            if code:
                raise EmbeddedCallFailed(function, code, KafkaError(code).str())

    def _require_running(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork("embedded Broker", self._pid, os.getpid())
        if self._cluster is None:
            raise ConsumerClosed("embedded Broker", "it was not started, or it was closed")

    def _client(self) -> Consumer:
        """One client for look-ups: a consumer, because it is the kind that does not create the topics it asks about."""
        with self._lock:
            self._require_running()
            if self._lookup is None:
                self._lookup = Consumer({"bootstrap.servers": self._servers, "group.id": "embedded", "log_level": 0})
            return self._lookup


def _api_key(name: str) -> int:
    if name not in API_KEYS:
        raise InvalidOption("api_key_name", name, f"one of {', '.join(API_KEYS)}")
    return API_KEYS[name]


def _require(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidOption(option, value, f"{least} to {most}")
