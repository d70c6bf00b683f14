"""Batch reads without claims: the messages between two points, given by offsets or by time."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark import cloudpickle
from pyspark.sql.pandas.types import from_arrow_schema

from marshal_py.errors import InvalidOption, PositionOutOfRange, TopicMissing
from marshal_py.spark.stream.backfills import BackfillOptions
from marshal_py.spark.stream.messages import arrow_schema
from pyspark_marshal import DefaultSource
from tests.spark.kafka_topic import KafkaTopic, MakeTopic

DAY_MS = 86_400_000
BASIS = {"bootstrap.servers": "127.0.0.1:1", "topics": "orders"}


def read(orders: KafkaTopic, **options: str) -> list[tuple[int, int]]:
    """Reads as Spark does: the driver plans, and executors get the reader and its partitions by pickle."""
    given = {"bootstrap.servers": orders.bootstrap, "topics": orders.topic, "min_partitions": "3", **options}
    source = DefaultSource(given)
    columns = BackfillOptions.of(given).columns
    reader = source.reader(from_arrow_schema(arrow_schema(columns)))
    far, parts = pickle.loads(cloudpickle.dumps((reader, reader.partitions())))
    found = pa.Table.from_batches([batch for part in parts for batch in far.read(part)], arrow_schema(columns))
    assert found.column_names == ["key", "value", "headers", "topic", "partition", "offset", "timestamp", "source"]
    return sorted(zip(found["partition"].to_pylist(), found["offset"].to_pylist(), strict=True))


def test_a_batch_read_needs_no_group_and_reads_everything(make_topic: MakeTopic) -> None:
    orders = make_topic(2)
    orders.fill(20)
    assert read(orders) == [(partition, offset) for partition in range(2) for offset in range(20)]


def test_a_batch_read_is_bounded_by_offsets(make_topic: MakeTopic) -> None:
    """Partitions that are not named are not read. Spark's option names mean the same."""
    orders = make_topic(3)
    orders.fill(20)
    start, until = json.dumps({orders.topic: {"0": 3, "2": -2}}), json.dumps({orders.topic: {"0": 7, "2": 2}})
    wanted = [(0, 3), (0, 4), (0, 5), (0, 6), (2, 0), (2, 1)]
    assert read(orders, start=start, until=until) == wanted
    assert read(orders, startingOffsets=start, endingOffsets=until, failOnDataLoss="true") == wanted
    assert read(orders, start="latest") == []


def test_a_batch_read_is_bounded_by_time(make_topic: MakeTopic) -> None:
    """From the first message that is not older, up to the first that is not older than the end."""
    orders = make_topic(1)
    producer = Producer({"bootstrap.servers": orders.bootstrap})
    for day in range(10):
        producer.produce(orders.topic, str(day), partition=0, timestamp=day * DAY_MS + 1_600_000_000_000)
    assert producer.flush(30) == 0
    third, sixth = (datetime.fromtimestamp(1_600_000_000 + day * DAY_MS / 1000, UTC).isoformat() for day in (3, 6))
    wanted = [(0, 3), (0, 4), (0, 5)]
    assert read(orders, start=third, until=sixth) == wanted
    assert read(orders, until="2030-01-01") == [(0, day) for day in range(10)]


def test_an_end_before_the_start_is_refused(make_topic: MakeTopic) -> None:
    """Otherwise it would read nothing, and look like success."""
    orders = make_topic(1)
    orders.fill(9)
    turned = (
        {"start": json.dumps({orders.topic: {"0": 5}}), "until": json.dumps({orders.topic: {"0": 3}})},
        {"start": "latest", "until": "2001-01-01"},
    )
    for options in turned:
        with pytest.raises(InvalidOption, match=r"until=.* it lies before start="):
            read(orders, **options)
    assert read(orders, startingOffsets="LATEST", endingOffsets="Latest") == []


def test_a_batch_read_ends_before_an_open_transaction(make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(4)
    producer = Producer({"bootstrap.servers": orders.bootstrap, "transactional.id": orders.topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(orders.topic, "open", partition=0)
    assert producer.flush(30) == 0
    assert read(orders) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    producer.abort_transaction(30)


def test_an_offset_that_a_partition_does_not_hold_is_refused(make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(9)
    orders.truncate(0, 5)
    for option, offset in (("start", 2), ("until", 10)):
        with pytest.raises(PositionOutOfRange, match=f"no position {offset}: valid are 5 to 9"):
            read(orders, **{option: json.dumps({orders.topic: {"0": offset}})})
    with pytest.raises(InvalidOption, match=f"{orders.topic}:1 is no partition"):
        read(orders, start=json.dumps({orders.topic: {"1": 0}}))
    with pytest.raises(TopicMissing):
        read(orders, topics="nobodys-topic")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"group": "billing"}, "claimed_batches"),
        ({"maxOffsetsPerTrigger": "5"}, "group=None .* a stream needs it.*no option maxOffsetsPerTrigger"),
        ({"until": "soon"}, "until"),
        ({"start": "committed"}, "those of a group"),
        ({"columns": "token"}, "no claims"),
        ({"topics": ""}, "topics"),
        ({"failOnDataLoss": "false"}, "failOnDataLoss"),
        ({"assign": "{}"}, "assign.*in start or until"),
        ({"maxRecordsPerPartition": "5"}, "maxRecordsPerPartition.*between start and until"),
        ({"kafka.group.id": "g"}, r"kafka\.group\.id.*has no group: leave it out"),
    ],
)
def test_a_bad_option_of_a_batch_read_is_named(options: dict[str, str], what: str) -> None:
    with pytest.raises(InvalidOption, match=what):
        BackfillOptions.of({**BASIS, **options})


@pytest.mark.parametrize(
    ("name", "value"), [("endingOffsets", "nonsense"), ("minPartitions", "0"), ("startingOffsets", "soon")]
)
def test_a_bad_value_is_named_as_the_user_wrote_it(name: str, value: str) -> None:
    given = {"bootstrap.servers": "127.0.0.1:1", "subscribe": "orders", name: value}
    with pytest.raises(InvalidOption) as refused:
        BackfillOptions.of(given)
    assert refused.value.option == name


@pytest.mark.parametrize("name", ["start", "until"])
def test_the_rule_for_a_bound_does_not_offer_committed(name: str) -> None:
    """`committed` is refused in a batch read, so the rule does not offer it."""
    with pytest.raises(InvalidOption) as refused:
        BackfillOptions.of({**BASIS, name: "soon"})
    assert refused.value.option == name
    assert refused.value.rule.startswith("earliest, latest")


def test_the_option_group_distinguishes_a_stream_from_a_batch_read() -> None:
    assert DefaultSource({**BASIS, "group": "billing"}).schema().endswith("token string, source string")
    assert DefaultSource(BASIS).schema().endswith("timestamp timestamp, source string")
