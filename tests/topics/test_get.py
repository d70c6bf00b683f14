"""Topic.get: the requests of ADR-31, over a cluster in memory and over the embedded broker, and against a plain model.

Each test that stands for a sentence of the seed quotes it.
"""

from __future__ import annotations

import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from confluent_kafka.serialization import IntegerDeserializer, StringDeserializer

from marshal_py.embedded import Broker
from marshal_py.errors import BadRequest, DeserializationFailed, InvalidOption, MessageNotFound, TopicMissing
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.topics.keys import PARTITIONERS, murmur2
from marshal_py.topics.request import MAX_BYTES_DEFAULT, GetRequest, StoredBatch, StoredMessage
from marshal_py.topics.topic import Topic
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.memory import MemoryBroker, MemoryTransport
from marshal_py.transport.producer import KafkaProducer

T0 = 1_700_000_000_000
NAME = "users"


class Entry(NamedTuple):
    partition: int
    key: bytes | None
    value: bytes | None
    at_ms: int


def in_memory(entries: list[Entry], partitions: int, **options: Any) -> Topic:
    broker = MemoryBroker()
    broker.create_topic(NAME, partitions)
    for entry in entries:
        broker.produce(NAME, entry.partition, entry.value, entry.key, None, entry.at_ms)
    return Topic(MemoryTransport(broker), NAME, **options)


@pytest.fixture(params=["memory", "embedded"])
def fill(request: pytest.FixtureRequest) -> Iterator[Callable[..., Topic]]:
    if request.param == "memory":
        yield in_memory
        return
    opened: list[Topic] = []
    with Broker() as broker:
        made = iter(range(100))

        def fill_embedded(entries: list[Entry], partitions: int, **options: Any) -> Topic:
            name = f"{NAME}-{next(made)}"
            broker.create_topic(name, partitions)
            transport = KafkaTransport(broker.bootstrap_servers, 30)
            producer = KafkaProducer(transport)
            for entry in entries:
                producer.write(name, entry.value, entry.key, (), entry.partition, entry.at_ms)
            producer.flush(30)
            producer.close()
            opened.append(Topic(transport, name, **options))
            return opened[-1]

        yield fill_embedded
        for topic in opened:
            topic.close()


def users() -> list[Entry]:
    """The seed's example: address 3 is updated by 4."""
    pairs = [
        ("1234.name", "Bob"),
        ("1234.surname", "Smith"),
        ("1234.address", "1 Main Street"),
        ("1234.address", "10 Oak Lane"),
        ("99.name", "Eve"),
    ]
    return [Entry(0, key.encode(), value.encode(), T0 + 1000 * at) for at, (key, value) in enumerate(pairs)]


def values(found: StoredBatch) -> list[bytes]:
    return [message.value for message in found]


def places(found: StoredBatch) -> list[tuple[int, int]]:
    return [(message.partition, message.offset) for message in found]


# --- one message


def test_a_message_by_offset(fill: Any) -> None:
    """ADR-31: `{seq: number}` - get a message by sequence. ADR-37: `getMsg(getMsgOpts)`."""
    found = fill(users(), 1).get(offset=1)
    assert (found.offset, found.key, found.value, found.timestamp) == (1, b"1234.surname", b"Smith", T0 + 1000)
    assert (found.num_pending, found.last_offset) == (None, None)


def test_the_last_message_of_a_key(fill: Any) -> None:
    """ADR-31: `{last_by_subj: string}` - get the last message having the subject."""
    assert fill(users(), 1).get(last_by_key="1234.address").value == b"10 Oak Lane"


def test_the_first_message_of_a_key(fill: Any) -> None:
    """ADR-31: `{next_by_subj: string}` - get the first message (lowest seq) having the specified subject."""
    assert fill(users(), 1).get(next_by_key="1234.address").value == b"1 Main Street"


def test_the_next_message_of_a_key(fill: Any) -> None:
    """ADR-31: `{seq: number, next_by_subj: string}` - get the first message with a seq >= to the input seq that has the
    specified subject.
    """
    topic = fill(users(), 1)
    assert topic.get(offset=2, next_by_key="1234.address").offset == 2
    assert topic.get(offset=3, next_by_key="1234.address").offset == 3
    with pytest.raises(MessageNotFound):
        topic.get(offset=4, next_by_key="1234.address")


def test_the_subject_appended_form(fill: Any) -> None:
    """ADR-31: Requests to this API endpoint will be interpreted as a shortcut for `last_by_subj` request.

    It is an error (408) if a client calls Subject-Appended Direct Get and includes a request payload.
    """
    topic = fill(users(), 1)
    assert topic["1234.name"].value == b"Bob"
    for key in ("missing", b"\xff" * 9_000):
        with pytest.raises(KeyError) as missing:  # as of any mapping, and with the library's sentence
            topic[key]
        assert str(missing.value).startswith("topic '")
        assert len(str(missing.value)) < 300
        assert isinstance(pickle.loads(pickle.dumps(missing.value)), MessageNotFound)
    with pytest.raises(BadRequest) as caught:
        topic["1234.name", 1]
    assert caught.value.status == 408


def test_a_message_by_time(fill: Any) -> None:
    """ADR-31: `{start_time: string}` - get the first message at or newer than the time specified in RFC 3339 format.

    The embedded broker finds no offsets by time, so all is read there.
    """
    topic = fill(users(), 1)
    for when in (datetime.fromtimestamp(T0 / 1000 + 2, UTC), "2023-11-14T22:13:22Z", "2023-11-14T22:13:21.5"):
        assert topic.get(start_time=when).offset == 2
    assert topic.get(start_time="2023-11-14T22:13:22Z", next_by_key="99.name").offset == 4
    with pytest.raises(MessageNotFound):
        topic.get(start_time="2030-01-01T00:00:00Z")


# --- batches


def test_a_batch_of_a_key(fill: Any) -> None:
    """ADR-31: `{seq: number, batch: number, next_by_subj: string}` - gets up to batch number of messages >= than seq
    that has specified subject.

    It would also have the `Status` header set to `204` with the `Description` header being `EOB`. `204` indicates the
    the end of a batch of messages, the description header would have value `EOB`.
    """
    found = fill(users(), 1).get(offset=0, batch=5, next_by_key="1234.address")
    assert places(found) == [(0, 2), (0, 3)]
    assert [(message.num_pending, message.last_offset) for message in found] == [(1, -1), (0, 2)]
    assert (found.end.num_pending, found.end.last_offset, found.end.up_to) == (0, {0: 3}, {0: 4})
    assert (found.end.status, found.end.description) == (204, "EOB")
    assert found.next_request() is None


def test_a_batch_is_limited_in_bytes(fill: Any) -> None:
    """ADR-31: `{seq: number, batch: number, next_by_subj: string, max_bytes: number}` - as above but limited to a
    maximum size of messages received in bytes.

    Using the `batch` and `max_bytes` keys one can request multiple messages in a single API call. 250 bytes over
    messages of 100 give 2.
    """
    entries = [Entry(0, b"k", b"v" * 80, T0 + at) for at in range(5)]
    topic = fill(entries, 1)
    size = 81 + len(topic.name)
    found = topic.get(batch=10, max_bytes=2 * size + size // 2)
    assert places(found) == [(0, 0), (0, 1)]
    assert found.end.num_pending == 3
    assert places(topic.get(batch=10, max_bytes=size - 1)) == [(0, 0)], "one message always fits"


def test_pages_go_on_where_the_last_one_ended(fill: Any) -> None:
    """ADR-31: After the batch is sent a zero length payload message will be sent with the `Nats-Num-Pending` and
    `Nats-Last-Sequence` headers set that clients can use to determine if further batch calls are needed.
    """
    topic = fill([Entry(at % 3, b"k%d" % at, b"v", T0 + at) for at in range(20)], 3)
    pages = list(topic.pages(GetRequest(batch=6)))
    assert [len(page) for page in pages] == [6, 6, 6, 2]
    assert [page.end.num_pending for page in pages] == [14, 8, 2, 0]
    assert [message.timestamp - T0 for page in pages for message in page] == [*range(20)], "in the order of time"


@pytest.mark.parametrize(
    "request_", [None, GetRequest(offset=5, partition=0)], ids=["after the last page", "one message"]
)
def test_a_page_needs_a_request_for_a_batch(fill: Any, request_: Any) -> None:
    topic = fill([Entry(0, b"k", b"v", T0)], 1)
    assert topic.get_page(GetRequest(batch=6)).next_request() is None
    with pytest.raises(BadRequest, match=r"a page answers a GetRequest with batch or multi_last"):
        topic.get_page(request_)


def test_a_topic_is_no_container(fill: Any) -> None:
    """Python would ask `topic[0]`, and name an argument that nobody gave."""
    topic = fill([Entry(0, b"k", b"v", T0)], 1)
    with pytest.raises(TypeError, match="not iterable"):
        iter(topic)
    with pytest.raises(TypeError, match="not a container"):
        b"k" in topic  # noqa: B015


def test_a_batch_holds_64_mib_unless_it_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """ADR-31: When `max_bytes` is unset the server will use the `max_pending` configuration setting or the server
    default (currently 64MB).
    """
    assert MAX_BYTES_DEFAULT == 64 * 1024 * 1024
    monkeypatch.setattr("marshal_py.topics.reads.MAX_BYTES_DEFAULT", 300)
    topic = in_memory([Entry(0, b"k", b"v" * 94, T0 + at) for at in range(5)], 1)
    assert [len(page) for page in topic.pages(GetRequest(batch=5))] == [3, 2]
    assert len(topic.get(batch=5, max_bytes=500)) == 5


def test_what_an_answer_carries(fill: Any) -> None:
    """ADR-31: A regular (not JSON-encoded) NATS message is returned (from the stream store).

    `Nats-Stream`: stream name. `Nats-Sequence`: message sequence number. `Nats-Time-Stamp`: message publish timestamp.
    `Nats-Subject`: message subject. `Nats-Num-Pending`: when batched, the number of messages left in the stream
    matching the batch parameters. `Nats-Last-Sequence`: when batched, the stream sequence of the previous message.
    """
    topic = fill(users(), 1)
    alone = topic.get(offset=2)
    shown = (alone.topic, alone.partition, alone.offset, alone.timestamp, alone.key, alone.value)
    assert shown == (topic.name, 0, 2, T0 + 2000, b"1234.address", b"1 Main Street")
    batch = topic.get(batch=3, offset=1)
    assert batch[1] == replace(alone, num_pending=2, last_offset=1)
    assert [message.num_pending for message in batch] == [3, 2, 1]
    assert [message.last_offset for message in batch] == [-1, 1, 2]


# --- several keys at one point in time


def test_the_last_of_several_keys(fill: Any) -> None:
    """ADR-31: Using requests like `{"multi_last":["$KV.USERS.1234.>"]}` all the latest values for all subjects below
    that wildcard will be returned.

    `{"multi_last":["$KV.USERS.1234.name", "$KV.USERS.1234.address"]}`. Rather than getting all the user data, only
    values for for two specific keys will be returned. If we did a normal multi read using
    `{"multi_last":["$KV.USERS.1234.>"]}` we would get the address `10 Oak Lane` returned.
    """
    topic = fill(users(), 1)
    assert values(topic.get(multi_last=["1234.>"])) == [b"Bob", b"Smith", b"10 Oak Lane"]
    assert values(topic.get(multi_last=["*.name"])) == [b"Bob", b"Eve"]
    assert values(topic.get(multi_last=["1234.name", "1234.address", "nobody"])) == [b"Bob", b"10 Oak Lane"]
    found = topic.get(multi_last=["1234.>"])
    assert [(message.num_pending, message.last_offset) for message in found] == [(2, -1), (1, 0), (0, 1)]
    assert found.end.up_to == {0: 4}


def test_as_it_was_at_an_offset(fill: Any) -> None:
    """ADR-31: the `up_to_seq` and `up_to_time` keys can be added which will restrict the results up to a certain point
    in time.

    In this mode we support consistent point in time reads by allowing for a group of subjects to be read as they were
    at a point in time - assuming the stream holds enough historical data. Adding works as in the example: adding
    `"up_to_seq":3` to the request will return address `1 Main Street` along with the other data.
    """
    topic = fill(users(), 1)
    for up_to in ({"up_to_offset": 2, "partition": 0}, {"up_to_offset": {0: 2}}):
        assert values(topic.get(multi_last=["1234.>"], **up_to)) == [b"Bob", b"Smith", b"1 Main Street"]
        assert values(topic.get(multi_last=["1234.address", "1234.name"], **up_to)) == [b"Bob", b"1 Main Street"]


def test_a_number_is_enough_for_one_partition(fill: Any) -> None:
    """As for `offset`: a topic of one partition needs no name of it, and one of several asks for it."""
    found = fill(users(), 1).get(multi_last=["1234.>"], up_to_offset=2)
    assert (values(found), found.end.up_to) == ([b"Bob", b"Smith", b"1 Main Street"], {0: 2})
    with pytest.raises(BadRequest, match=r"up_to_offset=2 needs partition= too: topic .* has 2 partitions"):
        fill(users(), 2).get(multi_last=["1234.>"], up_to_offset=2)


def test_as_it_was_at_a_time(fill: Any) -> None:
    """ADR-31: the `up_to_time` could be used as a form of temporal querying."""
    topic = fill(users(), 1)
    when = datetime.fromtimestamp(T0 / 1000 + 2, UTC)
    assert values(topic.get(multi_last=["1234.>"], up_to_time=when)) == [b"Bob", b"Smith", b"1 Main Street"]


def test_pages_of_keys_are_of_one_point_in_time() -> None:
    """ADR-31: A `batch` parameter can be added to restrict the result set to a certain size.

    When the server cannot send any more data it will respond, like the above Batch, with a zero-length payload message
    including the `Nats-Num-Pending` and `Nats-Last-Sequence` headers enabling clients to determine if further batch
    calls are needed. Of the last offset that the answer covers: This number would be used in subsequent requests as the
    `up_to_seq` value to ensure batches of multi-gets are done around a consistent point in time. `Nats-UpTo-Sequence`:
    when doing multi subject gets the sequence should be used for following requests to ensure consistent reads.
    """
    broker = MemoryBroker()
    broker.create_topic(NAME, 2)
    for at in range(10):
        broker.produce(NAME, at % 2, b"old", b"u.%d" % at, None, T0 + at)
    topic = Topic(MemoryTransport(broker), NAME)
    first = topic.get(multi_last=["u.*"], batch=4)
    broker.produce(NAME, 1, b"new", b"u.9", None, T0 + 99)
    broker.produce(NAME, 0, b"new", b"u.0", None, T0 + 99)
    following = first.next_request()
    assert following is not None
    rest = [message for page in topic.pages(following) for message in page]
    assert {message.value for message in (*first, *rest)} == {b"old"}
    assert sorted(message.key for message in (*first, *rest)) == [b"u.%d" % at for at in range(10)]


def test_up_to_1024_keys() -> None:
    """ADR-31: any multi-subject request may only allow matching up to 1024 subjects. Any more will result in a `413`
    status reply.

    `413` when a multi subject get matches too many subjects.
    """
    topic = in_memory([Entry(at % 4, b"u.%d" % at, b"v", T0 + at) for at in range(1025)], 4)
    assert len(topic.get(multi_last=[f"u.{at}" for at in range(1024)])) == 1024
    for patterns in (["u.*"], [f"u.{at}" for at in range(1025)]):
        with pytest.raises(BadRequest) as caught:
            topic.get(multi_last=patterns)
        assert caught.value.status == 413
        assert "multi_last matches 1025 keys, at most 1024" in str(caught.value)


# --- tombstones, holes, keys of all kinds


def test_a_deserializer_that_fails_names_the_message() -> None:
    broker = MemoryBroker()
    broker.create_topic(NAME, 1)
    for value in (b"1", b"x"):
        broker.produce(NAME, 0, value, b"k", None, T0)
    topic = Topic(MemoryTransport(broker), NAME, value_deserializer=lambda content, _: int(content or b""))
    assert topic.get(offset=0).value == 1
    for question in ({"offset": 1}, {"batch": 2}, {"last_by_key": "k"}):
        with pytest.raises(
            DeserializationFailed, match=r"the value of users:0@1 cannot be .* ask a topic without"
        ) as e:
            topic.get(**question)
        assert isinstance(e.value.__cause__, ValueError)


def test_a_tombstone_is_not_found_unless_asked_for(fill: Any) -> None:
    topic = fill([Entry(0, b"k", b"v", T0), Entry(0, b"k", None, T0 + 1), Entry(0, b"e", b"", T0 + 2)], 1)
    with pytest.raises(MessageNotFound, match="tombstones=True") as caught:
        topic.get(last_by_key="k")
    assert (caught.value.status, caught.value.tombstone) == (404, True)
    assert topic.get(last_by_key="k", tombstones=True).tombstone
    assert topic.get(last_by_key="e").value == b"", "an empty value is a value"
    assert values(topic.get(multi_last=["k", "e"])) == [b""]
    assert values(topic.get(multi_last=["k", "e"], tombstones=True)) == [None, b""]
    with pytest.raises(MessageNotFound):
        topic.get(offset=1)


def test_a_time_passes_tombstones_over(fill: Any) -> None:
    """ADR-31: `{start_time: string}` - get the first message at or newer than the time specified in RFC 3339 format.

    The first one that is found is the first one with a value, as for `next_by_key`.
    """
    stored = [b"0", None, None, b"3", b"4"]
    entries = [Entry(at % 2, b"k", value, T0 + 1000 * at) for at, value in enumerate(stored)]
    topic = fill(entries, 2)
    when = datetime.fromtimestamp(T0 / 1000 + 0.5, UTC)
    assert topic.get(start_time=when).value == b"3"
    assert topic.get(start_time=when, tombstones=True).timestamp == T0 + 1000
    assert values(topic.get(start_time=when, batch=2)) == [None, None]
    with pytest.raises(MessageNotFound):
        fill(entries[:3], 2).get(start_time=when)


def test_what_is_not_there_is_not_found(fill: Any) -> None:
    """ADR-31: `404` if the request is valid but no matching message found in stream."""
    topic = fill(users(), 1)
    for question in (
        {"offset": 5},
        {"offset": 99},
        {"last_by_key": "x"},
        {"next_by_key": "x"},
        {"last_by_key": b"\xff"},
        {"multi_last": ["x"]},
        {"multi_last": ["x.>"], "batch": 2},
        {"batch": 3, "offset": 5},
        {"batch": 3, "next_by_key": "x"},
    ):
        with pytest.raises(MessageNotFound) as caught:
            topic.get(**question)
        assert caught.value.status == 404
    assert [len(page) for page in topic.pages(GetRequest(multi_last=["x"]))] == [0]


def test_the_rest_of_an_answer_may_be_empty(fill: Any) -> None:
    """A program that asks now and then for what came later learns from the empty batch up to where it has looked."""
    topic = fill(users(), 1)
    later = topic.get_page(topic.get(batch=9).later_request())
    assert (len(later), later.end.num_pending, later.end.up_to) == (0, 0, {0: 4})


def test_deleted_offsets_are_not_found() -> None:
    broker = MemoryBroker()
    broker.create_topic(NAME, 1)
    for entry in users():
        broker.produce(NAME, 0, entry.value, entry.key, None, entry.at_ms)
    broker.delete_records(place := Topic(MemoryTransport(broker), NAME)._reads()._partitions(GetRequest(batch=1))[0], 3)
    topic = Topic(MemoryTransport(broker), NAME)
    with pytest.raises(MessageNotFound):
        topic.get(offset=1)
    assert topic.get(next_by_key="1234.address").offset == 3
    assert places(topic.get(batch=10, offset=0)) == [(0, 3), (0, 4)]
    assert place.partition == 0


def test_keys_that_are_bytes_are_literal() -> None:
    topic = in_memory(
        [Entry(0, b"a.*", b"star", T0), Entry(0, b"\xff\x00", b"raw", T0), Entry(0, None, b"none", T0)], 1
    )
    assert topic.get(last_by_key=b"a.*").value == b"star"
    assert topic.get(last_by_key=b"\xff\x00").value == b"raw"
    assert topic["\udcff\x00"].value == b"raw", "as Python has it from a command line"
    assert values(topic.get(multi_last=["\udcff\x00"])) == [b"raw"]
    assert values(topic.get(multi_last=[">", "\udcff.*"])) == [b"star"], "no UTF-8, and none, match no wildcard"
    assert values(topic.get(multi_last=[b"a.*", b"\xff\x00"])) == [b"star", b"raw"]


def test_a_key_in_two_partitions_is_the_newer_one(fill: Any) -> None:
    """A topic that has grown: the old partition holds old messages of the key."""
    entries = [Entry(1, b"k", b"new", T0 + 500), *[Entry(0, b"other", b"x", T0 + at) for at in range(300)]]
    entries = [Entry(0, b"k", b"old", T0 - 1), *entries]
    topic = fill(entries, 2)
    assert topic.get(last_by_key="k").value == b"new"
    assert values(topic.get(multi_last=["k"])) == [b"new"]


# --- partitions


def test_the_partition_of_a_key() -> None:
    """The Java producer's murmur2, with values of Kafka's own tests, and librdkafka's CRC32."""
    known = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    assert {key: (murmur2(key) ^ 1 << 31) - (1 << 31) for key in known} == known
    crc = PARTITIONERS["consistent_random"]
    assert crc is not None
    assert crc(b"123456789", 1 << 32) == 0xCBF43926


@pytest.mark.parametrize("partitioner", ["murmur2_random", "consistent_random"])
def test_a_partitioner_reads_one_partition(partitioner: str) -> None:
    choose = PARTITIONERS[partitioner]
    assert choose is not None
    keys = [f"k{at}".encode() for at in range(20)]
    entries = [Entry(choose(key, 4), key, key, T0) for key in keys]
    topic = in_memory(entries, 4, partitioner=partitioner)
    assert [topic.get(last_by_key=key).value for key in keys] == keys
    assert [topic.get(next_by_key=key, offset=0).value for key in keys] == keys, "the key says which partition's offset"


def test_an_empty_key_may_be_anywhere() -> None:
    """librdkafka's consistent_random spreads empty keys as it spreads messages without a key."""
    for partitioner, found in (("consistent_random", b"new"), ("consistent", b"old")):
        topic = in_memory([Entry(0, b"", b"old", T0), Entry(2, b"", b"new", T0 + 1)], 4, partitioner=partitioner)
        assert topic.get(last_by_key=b"").value == found
        assert topic.get(next_by_key=b"").value == b"old"


def test_an_offset_of_several_partitions_names_one(fill: Any) -> None:
    topic = fill([Entry(1, b"k", b"v", T0)], 2)
    assert topic.get(offset=0, partition=1).value == b"v"
    with pytest.raises(BadRequest, match="needs partition="):
        topic.get(offset=0)
    with pytest.raises(BadRequest, match=r"partition=2: .* 0 to 1"):
        topic.get(batch=1, partition=2)
    with pytest.raises(BadRequest, match=r"up_to_offset names partition 2: .* 0 to 1"):
        topic.get(multi_last=["k"], up_to_offset={0: 1, 2: 1})


# --- wrong requests


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"partition": 0},
        {"tombstones": True},
        {"max_bytes": 10},
        {"offset": 1, "start_time": "2026-01-01T00:00:00Z"},
        {"offset": -1},
        {"offset": True},
        {"offset": 1.5},
        {"batch": 0},
        {"batch": 10**30},
        {"last_by_key": "k", "tombstones": "no"},
        {"batch": 1, "max_bytes": 0},
        {"offset": 1, "max_bytes": 5},
        {"last_by_key": "k", "next_by_key": "k"},
        {"last_by_key": "k", "offset": 1},
        {"last_by_key": "k", "batch": 1},
        {"last_by_key": ""},
        {"last_by_key": 5},
        {"last_by_key": "a.*"},
        {"next_by_key": "a.>"},
        {"last_by_key": "\ud800"},
        {"multi_last": ["\ud800"]},
        {"multi_last": ["\ud800.*"]},
        {"multi_last": 5},
        {"multi_last": (key for key in "k")},
        {"multi_last": {"k": 1}},
        {"multi_last": []},
        {"multi_last": "k"},
        {"multi_last": ["k"], "offset": 1},
        {"multi_last": ["a.>.b"]},
        {"multi_last": ["a..*"]},
        {"multi_last": [""]},
        {"multi_last": ["k"], "up_to_offset": -1},
        {"multi_last": ["k"], "up_to_offset": {0: "x"}},
        {"multi_last": ["k"], "up_to_offset": {0: None}},
        {"multi_last": ["k"], "up_to_offset": {0: 1}, "up_to_time": "2026-01-01T00:00:00Z"},
        {"offset": 1, "up_to_offset": {0: 1}},
        {"start_time": "soon"},
        {"start_time": 17},
    ],
)
def test_empty_and_contradictory_requests_are_bad(question: dict[str, Any]) -> None:
    """ADR-31: `408` if the request is empty or invalid. Nothing is asked of the cluster."""
    topic = Topic(MemoryTransport(MemoryBroker()), "nothing")
    with pytest.raises(BadRequest) as caught:
        topic.get(**question)
    assert caught.value.status == 408


@pytest.mark.parametrize("option", ["key_deserializer", "value_deserializer"])
def test_a_deserializer_is_a_plain_function(option: str) -> None:
    async def awaited(*_: object) -> None: ...

    for wrong in (3, "json", awaited):
        with pytest.raises(InvalidOption, match=option):
            Topic(MemoryTransport(MemoryBroker()), NAME, **{option: wrong})


def test_a_topic_that_does_not_exist(fill: Any) -> None:
    topic = fill([], 1)
    topic.name = "nothing"
    with pytest.raises(TopicMissing):
        topic.get(batch=1)


def test_a_message_of_a_topic_that_does_not_exist(fill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes from the topic's description: a read would wait for its timeout."""
    topic = fill([], 1)
    topic.name = "nothing"
    _, reader = topic._connection()
    monkeypatch.setattr(reader, "read", lambda *_: pytest.fail("it was read"))
    with pytest.raises(TopicMissing):
        topic.get(offset=0, partition=0)


def test_a_topic_that_is_created_again_between_two_pages() -> None:
    """The second page would be of other messages. Where topics have no ids, nothing shows it."""
    broker = MemoryBroker()

    def create() -> None:
        broker.create_topic(NAME, 1)
        for entry in users():
            broker.produce(NAME, 0, entry.value, entry.key, None, entry.at_ms)

    create()
    topic = Topic(MemoryTransport(broker), NAME)
    for question in (GetRequest(batch=2), GetRequest(multi_last=[">"], batch=2)):
        following = topic.get_page(question).next_request()
        assert following is not None
        assert len(topic.get_page(following)) == 2
        broker.delete_topic(NAME)
        create()
        with pytest.raises(BadRequest, match="created again since the first page"):
            topic.get_page(following)


def test_a_batch_without_multi_last_has_tombstones(fill: Any) -> None:
    topic = fill([Entry(0, b"k", b"v", T0), Entry(0, b"k", None, T0 + 1)], 1)
    assert values(topic.get(batch=5)) == values(topic.get(batch=5, next_by_key="k")) == [b"v", None]


@pytest.mark.parametrize("options", [{"partitioner": "round robin"}, {"isolation": "none"}, {"timeout_s": 0}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Topic(MemoryTransport(MemoryBroker()), NAME, **options)


def test_deserializers_get_what_confluent_kafkas_get() -> None:
    seen = []

    def read(data: bytes, context: Any) -> str:
        seen.append((context.topic, context.field))
        return data.decode().upper()

    topic = in_memory([Entry(0, b"k", b"v", T0)], 1, key_deserializer=read, value_deserializer=read)
    found = topic["k"]
    assert (found.key, found.value, seen) == ("K", "V", [(NAME, "key"), (NAME, "value")])


def test_the_deserializers_of_confluent_kafka() -> None:
    """The same objects as in consumers; those for a Schema Registry have the same form."""
    entries = [Entry(0, b"k", (7).to_bytes(4), T0), Entry(0, b"gone", None, T0 + 1)]
    topic = in_memory(entries, 1, key_deserializer=StringDeserializer(), value_deserializer=IntegerDeserializer())
    assert (topic["k"].key, topic["k"].value) == ("k", 7)
    assert topic.get(multi_last=["*"], tombstones=True)[1].value is None


# --- against a plain model


class Model:
    """The same answers by looking at a list."""

    def __init__(self, entries: list[Entry], partitions: int) -> None:
        self.stored: list[StoredMessage] = []
        ends = [0] * partitions
        for entry in entries:
            self.stored.append(
                StoredMessage(NAME, entry.partition, ends[entry.partition], entry.at_ms, entry.key, entry.value)
            )
            ends[entry.partition] += 1

    def last(self, key: bytes) -> StoredMessage | None:
        found = [message for message in self.stored if message.key == key]
        newest = max(found, key=lambda message: message.timestamp, default=None)
        return newest if newest is not None and newest.value is not None else None


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_those_of_a_list(seed: int) -> None:
    dice = random.Random(seed)
    partitions = dice.randrange(1, 4)
    names = [f"u{at % 3}.{at}" for at in range(dice.randrange(2, 9))]
    entries = [
        Entry(
            zlib.crc32(name.encode()) % partitions, name.encode(), None if dice.random() < 0.2 else b"%d" % at, T0 + at
        )
        for at in range(dice.randrange(0, 60))
        for name in [dice.choice(names)]
    ]
    model, topic = Model(entries, partitions), in_memory(entries, partitions)
    for name in names:
        wanted = model.last(name.encode())
        if wanted is None:
            with pytest.raises(MessageNotFound):
                topic.get(last_by_key=name)
        else:
            found = topic.get(last_by_key=name)
            assert (found.partition, found.offset, found.value) == (wanted.partition, wanted.offset, wanted.value)
        batch = dice.randrange(1, 5)
        pages = list(topic.pages(GetRequest(next_by_key=name, batch=batch)))
        got = [(message.partition, message.offset) for page in pages for message in page]
        assert got == [(m.partition, m.offset) for m in model.stored if m.key == name.encode()]
        pending = [message.num_pending for page in pages for message in page]
        assert pending == [*range(len(got) - 1, -1, -1)]
    wanted_keys = {m.key for name in names if (m := model.last(name.encode())) is not None}
    for patterns in ([">"], ["*.*"], names):
        pages = list(topic.pages(GetRequest(multi_last=patterns, batch=dice.randrange(1, 5))))
        assert sorted(message.key for page in pages for message in page) == sorted(wanted_keys)
    every = [message for page in topic.pages(GetRequest(batch=dice.randrange(1, 9))) for message in page]
    assert [message.timestamp for message in every] == [entry.at_ms for entry in entries]


def test_the_nearest_replica_may_answer() -> None:
    """ADR-31: The JetStream Direct Get feature enables all stream peers (R>1), not just the stream leader, to respond
    to stream read calls.

    On Kafka `client.rack` decides (KIP-392): it reaches both clients that read.
    """
    with Broker(topics={NAME: 1}) as broker:
        given = {"bootstrap.servers": broker.bootstrap_servers, "client.rack": "b"}
        reader = KafkaTransport(given, 30).reader("me", {})
        assert [configuration["client.rack"] for configuration in reader._configurations] == ["b", "b"]


def test_an_old_reading_that_ends_late_leaves_the_newer_one_alone(fill: Any) -> None:
    """A generator of a reader may be closed long after nobody wants it, by the garbage collector for one."""
    topic = fill(users(), 1)
    _, reader = topic._connection()
    tp = TopicPartition(topic.name, 0)
    old = reader.read({tp: 0}, {tp: 5}, 30)
    next(old)
    new = reader.read({tp: 3}, {tp: 5}, 30)
    found = [message.offset() for message in next(new)]
    old.close()
    found += [message.offset() for messages in new for message in messages]
    assert found == [3, 4]
