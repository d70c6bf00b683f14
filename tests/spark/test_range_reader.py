"""What executors read, without a JVM: ranges with gaps, at the log's end, lost, stuck; and how they are passed."""

from __future__ import annotations

import gc
import pickle
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute
import pytest
from confluent_kafka import Consumer, Message
from pyspark import TaskContext, cloudpickle

from marshal_py.client.ranges import ClaimedRange
from marshal_py.errors import BatchRefused, ClusterUnreachable, InvalidOption, RangeLost
from marshal_py.protocol.wire.identity import Token
from marshal_py.spark.stream import messages, range_reader
from marshal_py.spark.stream.backfills import RangeOptions, RangesReader, ranges_json
from marshal_py.spark.stream.messages import Run, arrow_schema, as_arrow, columns_of
from marshal_py.spark.stream.options import as_options, kafka_options
from marshal_py.spark.stream.range_reader import Piece, RangePartition, pieces_of, source_text
from marshal_py.transport import settings
from marshal_py.transport.ports import RawMessage
from tests.spark.kafka_topic import KafkaTopic, MakeTopic

SERVERS = {"bootstrap.servers": "127.0.0.1:1"}


def reader_of(options: dict[str, str]) -> RangesReader:
    return RangesReader(RangeOptions.of(options))


def read(orders: KafkaTopic, start: int, to: int, *, timeout_s: float = 30.0, **options: str) -> pa.Table:
    """Reads as an executor does, with a reader and partitions that were pickled."""
    given = {
        "bootstrap.servers": orders.bootstrap,
        "read_timeout_s": str(timeout_s),
        "ranges": ranges_json([Piece(orders.topic, 0, start, to, "t")]),
        **options,
    }
    reader = reader_of(given)
    parts = reader.partitions()
    far, far_parts = pickle.loads(cloudpickle.dumps((reader, parts)))
    return pa.Table.from_batches(
        [batch for part in far_parts for batch in far.read(part)], arrow_schema(columns_of(options.get("columns")))
    )


def test_a_range_is_read_exactly(make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(30)
    found = read(orders, 7, 21)
    assert found["offset"].to_pylist() == list(range(7, 21))
    assert found["value"].to_pylist()[0] == b"0-7"
    assert found["key"].to_pylist()[0] == b"7"
    assert set(found["topic"].to_pylist()) == {orders.topic}
    assert set(found["partition"].to_pylist()) == {0}
    assert set(found["token"].to_pylist()) == {"t"}
    assert found["headers"].null_count == 14
    assert found["timestamp"].null_count == 0


def test_headers_and_tombstones_arrive(make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(1, headers=[("trace", b"\x00\x01"), ("trace", b""), ("none", None)])
    orders.fill(1)
    found = read(orders, 0, 2)["headers"].to_pylist()
    assert found == [
        [{"key": "trace", "value": b"\x00\x01"}, {"key": "trace", "value": b""}, {"key": "none", "value": None}],
        None,
    ]


def test_columns_that_are_not_selected_are_not_read_from_the_message(
    make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read headers, keys and values costs a call and a copy per message."""
    orders = make_topic(1)
    orders.fill(3, headers=[("trace", b"1")])

    def refuse(found: object) -> pa.Array:
        raise AssertionError(found)

    bare = {
        name: column if name in ("offset", "value") else column._replace(take=refuse)
        for name, column in messages._COLUMNS.items()
    }
    monkeypatch.setattr(messages, "_COLUMNS", bare)
    assert read(orders, 0, 3, columns="offset, value").to_pydict() == {
        "offset": [0, 1, 2],
        "value": [b"0-0", b"0-1", b"0-2"],
    }


class Stamped:
    """A message of Kafka without a value, and without a time if that is None."""

    def __init__(self, offset: int, at_ms: int | None) -> None:
        self._offset, self._at_ms = offset, at_ms

    def offset(self) -> int:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return (0, -1) if self._at_ms is None else (1, self._at_ms)


def test_offsets_and_times_are_those_of_each_message() -> None:
    """Offsets that miss some are not counted up from the first, neither in one partition nor over two."""
    runs = [
        Run("t", partition, "", cast("list[RawMessage]", [Stamped(at, at or None) for at in offsets]))
        for partition, offsets in enumerate([(0, 1, 2), (3, 5), (7, 9, 8_640_000_000_123)])
    ]
    found = as_arrow(runs, ["offset", "timestamp", "partition"])
    assert found["offset"].to_pylist() == [0, 1, 2, 3, 5, 7, 9, 8_640_000_000_123]
    assert found["timestamp"].cast(pa.int64()).to_pylist() == [None] + [
        at * 1000 for at in (1, 2, 3, 5, 7, 9, 8_640_000_000_123)
    ]
    assert found["partition"].to_pylist() == [0, 0, 0, 1, 1, 2, 2, 2]
    stamped = as_arrow(runs[1:], ["timestamp"])["timestamp"].cast(pa.int64())
    assert stamped.to_pylist() == [at * 1000 for at in (3, 5, 7, 9, 8_640_000_000_123)], "all messages have a time"


def test_a_time_that_spark_cannot_hold_is_none() -> None:
    """Of a producer that writes microseconds or nanoseconds, for example. It wrapped to another year."""
    times = (1, 253_402_300_799_999, 253_402_300_800_000, 1_763_700_000_000_000_000)
    run = Run("t", 0, "", cast("list[RawMessage]", [Stamped(offset, at) for offset, at in enumerate(times)]))
    found = as_arrow([run], ["timestamp"])["timestamp"].cast(pa.int64()).to_pylist()
    assert found == [1_000, 253_402_300_799_999_000, None, None]


@pytest.mark.parametrize("columns", ["", "value,", "value,value", "values", "value offset"])
def test_unknown_columns_are_refused(columns: str) -> None:
    with pytest.raises(InvalidOption, match=r"columns=.*some of key, value, headers"):
        columns_of(columns)


def test_a_range_that_ends_in_missing_offsets_ends(make_topic: MakeTopic) -> None:
    """Aborted records and transaction markers are offsets without messages, also at the log's very end."""
    orders = make_topic(1)
    orders.fill(5)
    orders.fill(5, transaction="abort")
    orders.fill(5, transaction="commit")
    assert read(orders, 0, 17)["offset"].to_pylist() == [0, 1, 2, 3, 4, 11, 12, 13, 14, 15]
    assert read(orders, 5, 11).num_rows == 0
    assert read(orders, 3, 8)["offset"].to_pylist() == [3, 4]
    uncommitted = read(orders, 0, 17, **{"kafka.isolation.level": "read_uncommitted"})
    assert uncommitted.num_rows == 15


def test_a_range_whose_beginning_is_deleted_is_lost(make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(30)
    orders.truncate(0, 10)
    with pytest.raises(RangeLost, match=rf"{orders.topic}:0 \[5, 20\) cannot be read any more"):
        read(orders, 5, 20)
    assert read(orders, 10, 20).num_rows == 10


def test_no_progress_is_an_error_that_names_the_offset(make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(3)
    with pytest.raises(ClusterUnreachable, match=rf"{orders.topic}:0 from 3 on, planned to 9: .*1 s without progress"):
        read(orders, 0, 9, timeout_s=1.0)


def test_at_most_once_a_second_attempt_is_refused(make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = make_topic(1)
    orders.fill(3)
    assert read(orders, 0, 3, once="true").num_rows == 3
    second = type("Second", (), {"attemptNumber": lambda self: 1})()
    monkeypatch.setattr(TaskContext, "get", classmethod(lambda cls: second))
    assert read(orders, 0, 3).num_rows == 3
    with pytest.raises(
        BatchRefused, match=r"\[0, 3\) may be read only once, and this follows attempt 1 .*maxFailures=1"
    ):
        read(orders, 0, 3, once="true")


def test_ranges_of_several_partitions_share_a_task_and_a_client(make_topic: MakeTopic) -> None:
    """Each has its own token, also if the log continues after the range, or lacks its last offsets."""
    orders = make_topic(4)
    orders.fill(30)
    orders.fill(4, [3], transaction="abort")
    wanted = [
        Piece(orders.topic, 0, 3, 20, "a"),
        Piece(orders.topic, 1, 0, 30, "b"),
        Piece(orders.topic, 2, 29, 30, "c"),
        Piece(orders.topic, 3, 28, 35, "d"),
    ]
    reader = RangesReader(
        RangeOptions.of({"bootstrap.servers": orders.bootstrap, "ranges": ranges_json(wanted), "min_partitions": "1"})
    )
    (task,) = reader.partitions()
    found = pa.Table.from_batches(list(reader.read(task)))
    rows = sorted(
        zip(found["partition"].to_pylist(), found["offset"].to_pylist(), found["token"].to_pylist(), strict=True)
    )
    assert rows == (
        [(0, at, "a") for at in range(3, 20)]
        + [(1, at, "b") for at in range(30)]
        + [(2, 29, "c")]
        + [(3, 28, "d"), (3, 29, "d")]
    )
    assert [value.decode() for value in found["value"].to_pylist()] == [
        f"{partition}-{offset}"
        for partition, offset in zip(found["partition"].to_pylist(), found["offset"].to_pylist(), strict=True)
    ]


def test_the_next_task_of_a_worker_reuses_its_client(make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that were fetched for one task must not appear in the next, which may start earlier. Of a topic that was
    created again it might fetch nothing.
    """
    orders = make_topic(2)
    orders.fill(50)
    made: list[object] = []
    first = type("First", (), {"attemptNumber": lambda self: 0})()
    monkeypatch.setattr(TaskContext, "get", classmethod(lambda cls: first))
    make = settings.create_client
    monkeypatch.setattr(settings, "create_client", lambda *given: made.append(given) or make(*given))
    monkeypatch.setattr(range_reader, "_spare_collector", lambda: None)
    try:
        for partition, start, to, of in ((0, 20, 40, "1"), (0, 5, 10, "1"), (1, 0, 50, "1"), (0, 0, 50, "2")):
            pieces = ranges_json(
                [
                    Piece(orders.topic, partition, start, to, "t", source_text(of, start, to)),
                    Piece(orders.topic, 1 - partition, 7, 8, "u", source_text(of, 7, 8)),
                ]
            )
            reader = RangesReader(
                RangeOptions.of({"bootstrap.servers": orders.bootstrap, "ranges": pieces, "min_partitions": "1"})
            )
            found = pa.Table.from_batches([batch for task in reader.partitions() for batch in reader.read(task)])
            own = found.filter(pa.compute.equal(found["token"], "t"))
            assert own["offset"].to_pylist() == list(range(start, to))
            assert len(made) == int(of)
    finally:
        range_reader._close_idle()


def test_a_worker_spares_its_collector_what_it_has_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of later tasks are not exempt: what they leave in reference cycles is freed as always."""
    monkeypatch.setattr(range_reader, "_spared", [])
    before = gc.get_freeze_count()
    try:
        range_reader._spare_collector()
        exempt = gc.get_freeze_count()
        assert exempt > before
        later = [[number] for number in range(1_000)]
        range_reader._spare_collector()
        assert gc.get_freeze_count() <= exempt
        assert gc.is_tracked(later)
    finally:
        gc.unfreeze()


def test_an_empty_range_makes_no_task() -> None:
    reader = reader_of({**SERVERS, "ranges": ranges_json([Piece("t", 0, 5, 5, "t")])})
    assert reader.partitions() == []
    assert list(reader.read(type("Empty", (), {})())) == []  # type: ignore[arg-type]  # Spark makes one of its own


def test_ranges_are_passed_as_json() -> None:
    token = Token(bytes(16), 7)
    (piece,) = pieces_of([ClaimedRange("orders", 3, 10, 20, token, 0, "id")], "g")
    (part,) = reader_of({**SERVERS, "ranges": ranges_json([piece])}).partitions()
    assert isinstance(part, RangePartition)
    assert part.value == (Piece("orders", 3, 10, 20, str(token), "id 10 20 g"),)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ranges", "not json"),
        ("ranges", '[["t", 0, 5]]'),
        ("ranges", '[["t", 0, 5, 4, "x"]]'),
        ("ranges", '[["t", 0, 5, 6, "x"], ["t", 0, 6, 7, "x"]]'),
        ("min_partitions", "0"),
        ("ranges", '[["t", -1, 5, 6, "x"]]'),
        ("ranges", '[["t", 0, "5", 6, "x"]]'),
        ("once", "perhaps"),
        ("topics", "t"),
        ("read_timeout_s", "soon"),
        ("read_timeout_s", "0"),
        ("read_timeout_s", "inf"),
        ("bootstrap.servers", ""),
        ("kafka.auto.offset.reset", "earliest"),
    ],
)
def test_a_bad_option_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidOption, match=name.removeprefix("kafka.")):
        reader_of({**SERVERS, "ranges": "[]", name: value})


def test_settings_are_passed_as_options() -> None:
    given: dict[str, Any] = {
        "bootstrap.servers": "a:1",
        "security.protocol": "SSL",
        "socket.keepalive.enable": True,
        "x": 5,
    }
    options = as_options(given)
    assert options == {
        "bootstrap.servers": "a:1",
        "kafka.security.protocol": "SSL",
        "kafka.x": "5",
        "kafka.socket.keepalive.enable": "true",
    }
    back = {key: str(value).lower() for key, value in given.items()} | {"security.protocol": "SSL"}
    assert kafka_options(options) == back
    with pytest.raises(InvalidOption, match="not callbacks"):
        as_options({"oauth_cb": print})


class Queue:
    """Stands for a client of librdkafka: it has as many messages as it is asked for, and notes how many these are."""

    def __init__(self, sizes: list[int]) -> None:
        self.messages = [Message(topic="orders", partition=0, offset=at, value=b"x" * n) for at, n in enumerate(sizes)]
        self.asked: list[int] = []

    def poll(self, timeout_s: float) -> Message | None:
        return self.messages.pop(0) if self.messages else None

    def consume(self, count: int, timeout_s: float) -> list[Message]:
        self.asked.append(count + 1)
        taken, self.messages = self.messages[:count], self.messages[count:]
        return taken


def test_a_batch_of_large_messages_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at BATCH_BYTES, and how many messages are taken at once follows from the size of the last ones."""
    monkeypatch.setattr(range_reader, "BATCH_BYTES", 100_000)
    sizes = [10_000] * 300 + [5] * 20_000
    piece = Piece("orders", 0, 0, len(sizes), "token")
    queue = Queue(sizes)
    reader = range_reader._RangeReader(cast(Consumer, queue), [piece], "servers")
    task = range_reader.RangePartition([piece], {}, 30.0, once=False, columns=("offset", "value"))
    batches = list(reader.batches(task))
    assert [row for batch in batches for row in batch.column("offset").to_pylist()] == list(range(len(sizes)))
    held = [sum(map(len, batch.column("value").to_pylist())) for batch in batches]
    assert queue.asked[0] == range_reader.FIRST_ROWS
    assert held[0] == range_reader.FIRST_ROWS * 10_000
    assert 90_000 <= max(held[1:]) <= 100_000
    assert max(len(batch) for batch in batches) == range_reader.BATCH_ROWS, "small messages still fill a batch"
