"""Runs a Kafka broker in this process: librdkafka's mock cluster, called by ctypes in confluent_kafka's own library.

It listens on 127.0.0.1 and serves every process of this machine until the process that started it ends. It is for
demos, examples and fault tests, not for proofs. Differences from Kafka (measured with librdkafka 2.16.0):

* a partition keeps KEPT_BYTES of record batches, then drops the oldest silently. That number is fixed;
* a client that asks about an unknown topic creates it, with AUTO_CREATED_PARTITIONS. This cannot be switched off:
  create topics first, and leave `allow.auto.create.topics` of consumers at false, which the broker respects;
* a fetch that finds nothing is answered only after the client's whole `fetch.wait.max.ms`, even if data comes earlier,
  so that setting is the round trip (FETCH_WAIT_MS);
* idempotence is not enforced: if an acknowledgement is lost, the producer's retry is written a second time;
* `read_committed` is ignored: records of aborted and open transactions are read, too;
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
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import confluent_kafka
from confluent_kafka import KafkaError, cimpl

from marshal_py.errors import ConsumerClosed, InvalidOption, TopicRefused, UnsupportedPlatform, UsedAfterFork
from marshal_py.protocol.wire.identity import check_topic
from marshal_py.transport.option_names import constructor_checks_names

# Of the capabilities that a transport may lack (transport/ports.py), a client of this broker has none.
CAPABILITIES: frozenset[str] = frozenset()

# Constants in librdkafka's source, which no function or setting changes.
KEPT_BYTES = 5 * 1024 * 1024
AUTO_CREATED_PARTITIONS = 4

# The most that a run may write to one partition. The difference to KEPT_BYTES is for batches that a retry writes twice,
# which the writer cannot count.
PARTITION_BYTES_MAX = 4_000_000

# The most that a record adds besides its own bytes: 61 for the header of a batch of its own and 36 for its length
# fields. Each header of a record adds its two length fields.
RECORD_OVERHEAD_BYTES_MAX = 97
HEADER_OVERHEAD_BYTES_MAX = 10

# `fetch.wait.max.ms` for clients of this broker. 5 gives a round trip of 4.4 ms at 2 % of a core; the default, 500,
# gives half a second; 1 gives 1.3 ms at 7 %; 0 polls without pause.
FETCH_WAIT_MS = 5

# All brokers share one thread, so more of them add no speed, and replication beyond three shows nothing new.
BROKERS_MAX = 16

# A partition may take KEPT_BYTES of memory: a thousand take 5 GB, more than a demo should take by accident.
PARTITIONS_MAX = 1000

# The mock names its cluster after its address in memory. Kafka's own ids are 22 characters of base64.
CLUSTER_ID = re.compile(r"mockCluster[0-9a-f]+")

RD_KAFKA_PRODUCER = 0
ERROR_TEXT_BYTES = 512

_pointer, _int, _text, _i16, _i32, _i64, _size = (
    ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int16, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t,
)  # fmt: skip

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
    "rd_kafka_mock_broker_set_down": (_int, _pointer, _i32),
    "rd_kafka_mock_broker_set_up": (_int, _pointer, _i32),
    # Only newer libraries have these two.
    "rd_kafka_mock_set_controller_id": (None, _pointer, _i32),
    "rd_kafka_mock_partition_delete_records": (_int, _pointer, _text, _i32, _i64),
}


class EmbeddedCallFailed(Exception):
    """The error when the mock cluster refuses a call: a topic exists already, or a broker does not exist."""

    call: str
    code: int
    reason: str

    def __init__(self, call: str, code: int, reason: str) -> None:
        self.call, self.code, self.reason = call, code, reason
        super().__init__(f"the embedded broker refused {call}: {reason} ({code})")


def is_embedded(cluster_id: str | None) -> bool:
    """Returns whether the id of a cluster (`list_topics().cluster_id`) is that of an embedded broker."""
    return cluster_id is not None and CLUSTER_ID.fullmatch(cluster_id) is not None


def record_bytes_max(key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]] = ()) -> int:
    """Returns the most bytes that one record can add to its partition, whatever batch it is in."""
    size_bytes = RECORD_OVERHEAD_BYTES_MAX + len(key or b"") + len(value or b"")
    for name, content in headers:
        size_bytes += HEADER_OVERHEAD_BYTES_MAX + len(name.encode()) + len(content or b"")
    return size_bytes


@constructor_checks_names()
class LogGuard:
    """Counts bytes per partition and refuses a record beyond the limit, as the broker neither warns nor reports. It
    covers one process: several writers must share one, or each take a part."""

    def __init__(self, limit_bytes: int = PARTITION_BYTES_MAX) -> None:
        if not 0 < limit_bytes <= PARTITION_BYTES_MAX:
            raise InvalidOption("limit_bytes", limit_bytes, f"1 to {PARTITION_BYTES_MAX}")
        self.limit_bytes = limit_bytes
        self._used_bytes: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def reserve(self, topic: str, partition: int, record_bytes: int) -> int:
        """Reserves `record_bytes`; returns the partition's total. Raises TopicRefused beyond `limit_bytes`."""
        with self._lock:
            total_bytes = self._used_bytes.get((topic, partition), 0) + record_bytes
            if total_bytes > self.limit_bytes:
                raise TopicRefused(
                    topic,
                    f"partition {partition} of the embedded broker would hold {total_bytes} bytes, and it keeps "
                    f"{self.limit_bytes}: produce less, or use a real broker",
                )
            self._used_bytes[topic, partition] = total_bytes
            return total_bytes


def _library() -> ctypes.CDLL:
    """Returns the librdkafka that confluent_kafka has loaded; another copy would have its own state. Raises
    UnsupportedPlatform."""
    if sys.platform == "win32":
        raise UnsupportedPlatform("marshal_py.embedded", "Windows", "use Linux, macOS or WSL, or a real broker")
    # First the extension module: a look-up in it also searches the libraries that it is linked to, whatever they are
    # called. If that fails, the folders where wheels for Linux and macOS put the library.
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
            continue  # another candidate may load; if none does, the error below names all of them
        if hasattr(library, "rd_kafka_mock_cluster_new"):
            return library
    raise UnsupportedPlatform(
        "marshal_py.embedded",
        f"{platform.system()} with confluent-kafka {confluent_kafka.__version__}",
        f"none of {', '.join(map(str, candidates))} has librdkafka's mock cluster; install confluent-kafka's wheel",
    )


def _bind(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Returns the C functions by name. A function that this library lacks is left out."""
    functions: dict[str, Callable[..., Any]] = {}
    for name, (result, *arguments) in _SIGNATURES.items():
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            functions[name] = function
    return functions


@constructor_checks_names()
class Broker:
    """Runs the embedded broker: `with Broker() as broker:`, or `start()` and `close()`.

    Any thread may call any method. `_cluster` and `_handle` are set exactly while the broker runs. `_lock` is held
    around every call into C, so that no call uses a cluster that is being destroyed.
    """

    brokers: int

    def __init__(self, brokers: int = 1, topics: Mapping[str, int] | None = None) -> None:
        """Does not listen yet. `brokers`: how many there are. `topics`: partition count by name of the topics that
        `start` creates."""
        _require("brokers", brokers, 1, BROKERS_MAX)
        self.brokers = brokers
        self._topics_at_start = dict(topics or {})
        self._functions: dict[str, Callable[..., Any]] = {}
        self._handle: int | None = None
        self._cluster: int | None = None
        self._servers = ""
        self._pid = os.getpid()
        self._lock = threading.RLock()

    def start(self) -> Self:
        """Listens. Does nothing if the broker runs. After `close` it starts again, empty and on other ports."""
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
            # Without a controller, clients wait their whole timeout before an administrative request fails.
            if "rd_kafka_mock_set_controller_id" in self._functions:
                self._functions["rd_kafka_mock_set_controller_id"](cluster, 1)
            try:
                for name, partitions in self._topics_at_start.items():
                    self.create_topic(name, partitions)
            except Exception:
                self.close()  # the caller has no broker yet, so nobody else would free it
                raise
            return self

    def _new_handle(self) -> int:
        """Creates the client handle of librdkafka to which the mock cluster belongs. It connects to nothing."""
        text = ctypes.create_string_buffer(ERROR_TEXT_BYTES)
        conf = self._functions["rd_kafka_conf_new"]()
        # Errors only: otherwise it would warn on stderr that it has no servers to connect to.
        self._functions["rd_kafka_conf_set"](conf, b"log_level", b"3", text, ERROR_TEXT_BYTES)
        handle = self._functions["rd_kafka_new"](RD_KAFKA_PRODUCER, conf, text, ERROR_TEXT_BYTES)
        if not handle:
            self._functions["rd_kafka_conf_destroy"](conf)  # it would belong to the handle, but there is none
            raise EmbeddedCallFailed("start", KafkaError._FAIL, text.value.decode(errors="replace"))
        return int(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None and os.getpid() == self._pid:
            warnings.warn("an embedded Broker was not closed", ResourceWarning, stacklevel=2, source=self)

    def close(self) -> None:
        """Stops listening and forgets everything. Closing twice, or in a forked process, does nothing."""
        if os.getpid() != self._pid:
            return  # the broker and the threads that C would wait for exist only in the parent
        with self._lock:
            cluster, handle, self._cluster, self._handle = self._cluster, self._handle, None, None
            if cluster is not None:
                self._functions["rd_kafka_mock_cluster_destroy"](cluster)
                self._functions["rd_kafka_destroy"](handle)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bootstrap_servers(self) -> str:
        with self._lock:
            self._require_running()
            return self._servers

    # --- topics

    def create_topic(self, name: str, partitions: int = AUTO_CREATED_PARTITIONS, replication: int = 1) -> None:
        """Creates a topic. Partitions cannot be added later. Raises EmbeddedCallFailed, code 36, if it exists."""
        check_topic(name)  # the mock accepts any name, so a mistake would only show on a real cluster
        _require("partitions", partitions, 1, PARTITIONS_MAX)
        _require("replication", replication, 1, self.brokers)
        self._call("rd_kafka_mock_topic_create", name.encode(), partitions, replication)

    def truncate(self, topic: str, partition: int, before_offset: int) -> None:
        """Drops the records before an offset, as retention does. No client can: the broker has no DeleteRecords."""
        _require("before_offset", before_offset, 0, 2**63 - 1)
        self._call("rd_kafka_mock_partition_delete_records", topic.encode(), partition, before_offset)

    def broker_down(self, broker_id: int = 1) -> None:
        """Closes all connections to a broker and refuses new ones. It keeps its data and its leaderships."""
        self._switch("rd_kafka_mock_broker_set_down", broker_id)

    def broker_up(self, broker_id: int = 1) -> None:
        """Makes a broker answer again after `broker_down`, on the same port."""
        self._switch("rd_kafka_mock_broker_set_up", broker_id)

    def _switch(self, function: str, broker_id: int) -> None:
        # To the mock, -1 means all brokers; from a caller it can only be a mistake.
        _require("broker_id", broker_id, 1, self.brokers)
        self._call(function, broker_id)

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


def _require(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidOption(option, value, f"{least} to {most}")
