"""What a test does to an embedded broker beside what its users can do: faults of requests, leaders, round trips.

They are functions of librdkafka's mock cluster that the product does not call (rdkafka_mock.h).
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, TopicPartition

from marshal_py.transport import embedded
from marshal_py.transport.embedded import Broker

LOOKUP_TIMEOUT_S: Final = 10.0

# The requests that the mock answers, by the names that Kafka's protocol guide gives them.
API_KEYS: Final = {
    "Produce": 0,
    "Fetch": 1,
    "ListOffsets": 2,
    "Metadata": 3,
    "OffsetCommit": 8,
    "OffsetFetch": 9,
    "FindCoordinator": 10,
    "InitProducerId": 22,
}


class LogBounds(NamedTuple):
    """The first offset of a partition that can be read, and the one that is written next."""

    low: int
    high: int


def _call(broker: Broker, function: str, kinds: tuple[Any, ...], *arguments: Any) -> None:
    called = getattr(embedded._library(), function)
    called.restype, called.argtypes = ctypes.c_int, (ctypes.c_void_p, *kinds)
    broker._functions[function] = called
    broker._call(function, *arguments)


def topics(broker: Broker) -> dict[str, int]:
    """Returns the partition count of every topic, including those that clients created by asking for them."""
    client = _client(broker)
    try:
        return {name: len(one.partitions) for name, one in client.list_topics(timeout=LOOKUP_TIMEOUT_S).topics.items()}
    finally:
        client.close()


def bounds(broker: Broker, topic: str, partition: int) -> LogBounds:
    client = _client(broker)
    try:
        return LogBounds(*client.get_watermark_offsets(TopicPartition(topic, partition), timeout=LOOKUP_TIMEOUT_S))
    finally:
        client.close()


def _client(broker: Broker) -> Consumer:
    """Returns a consumer, because a consumer creates no topic that it asks about."""
    return Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "embedded", "log_level": 0})


def fail_requests(broker: Broker, api: str, *error_codes: int) -> None:
    """Has the next requests of a kind answered with these errors, one each, without effect; `KafkaError._TRANSPORT`
    disconnects, 0 lets one pass."""
    codes = (ctypes.c_int * len(error_codes))(*error_codes)
    kinds = (ctypes.c_int16, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int))
    library = embedded._library()
    push = library.rd_kafka_mock_push_request_errors_array
    push.restype, push.argtypes = None, (ctypes.c_void_p, *kinds)
    push(broker._cluster, API_KEYS[api], len(error_codes), codes)


def set_leader(broker: Broker, topic: str, partition: int, broker_id: int) -> None:
    """Moves the leadership of a partition to a broker. Clients notice by an error and ask for metadata."""
    kinds = (ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32)
    _call(broker, "rd_kafka_mock_partition_set_leader", kinds, topic.encode(), partition, broker_id)


def set_round_trip_ms(broker: Broker, round_trip_ms: int) -> None:
    """Delays every answer of the first broker; 0 ends that. Requests take effect at once, so a `broker_down` meanwhile
    loses only answers."""
    _call(broker, "rd_kafka_mock_broker_set_rtt", (ctypes.c_int32, ctypes.c_int), 1, round_trip_ms)
