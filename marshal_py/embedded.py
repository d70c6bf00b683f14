"""Public module for the in-process broker: for demos, examples and fault tests. Its limits: transport/embedded.py."""

from marshal_py.transport.embedded import (
    AUTO_CREATED_PARTITIONS,
    CAPABILITIES,
    FETCH_WAIT_MS,
    PARTITION_BYTES_MAX,
    Broker,
    EmbeddedCallFailed,
    LogGuard,
    is_embedded,
    record_bytes_max,
)

__all__ = [
    "AUTO_CREATED_PARTITIONS", "Broker", "CAPABILITIES", "EmbeddedCallFailed", "FETCH_WAIT_MS", "LogGuard",
    "PARTITION_BYTES_MAX", "is_embedded", "record_bytes_max",
]  # fmt: skip
