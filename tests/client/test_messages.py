"""Messages, parts and batches as values: indexes and slices, deserializers that run once, how they are printed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from marshal_py import InvalidOption, Marshal
from marshal_py.errors import DeserializationFailed
from tests.support.client_fixtures import MemoryTestCluster, collect, joined, owns, until


def filled(memory: MemoryTestCluster, partitions: int = 1, count: int = 10) -> str:
    topic = memory.topic(partitions)
    for partition in range(partitions):
        memory.fill(topic, partition, count)
    return topic


# --- indexes and slices


def test_a_part_indexes_and_slices(memory: MemoryTestCluster) -> None:
    topic = filled(memory)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        (part,) = consumer.fetch(10, min_messages=10).parts
        assert [part[0].offset, part[9].offset, part[-1].offset] == [0, 9, 9]
        assert [message.value for message in part[3:5]] == [b"3", b"4"]
        assert part[8:].offsets == [8, 9]
        assert part[2:6][1:3].values == [b"3", b"4"]
        assert len(part[5:5]) == len(part[7:3]) == 0
        for wrong in (10, -11):
            with pytest.raises(IndexError):
                part[wrong]


def test_a_batch_indexes_and_slices_over_its_parts(memory: MemoryTestCluster) -> None:
    topic = filled(memory, partitions=3, count=4)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        batch = consumer.fetch(12, min_messages=12)
        assert len(batch) == 12
        every = [(message.partition, message.offset) for message in batch]

        def places(one: Any) -> list[tuple[int, int]]:
            return [(message.partition, message.offset) for message in one]

        assert [(batch[at].partition, batch[at].offset) for at in range(-12, 12)] == every * 2
        for start in range(13):
            for stop in range(13):
                assert places(batch[start:stop]) == every[start:stop]
        assert places(batch[:-5]) == every[:-5]
        assert not batch[12:]
        with pytest.raises(IndexError):
            batch[12]


def test_a_slice_is_acked_alone(memory: MemoryTestCluster) -> None:
    topic, group = filled(memory), memory.group()
    with memory.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            batch = consumer.fetch(10, min_messages=10)
            assert batch[:2].ack()
            assert batch.parts[0][4:6].ack()
            assert batch[8].ack()
        with joined(marshal, group, [topic]) as consumer:
            assert [message.offset for message in collect(consumer, 5)] == [2, 3, 6, 7, 9]


def test_a_slice_with_a_step_is_refused(memory: MemoryTestCluster) -> None:
    topic = filled(memory)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        batch = consumer.fetch(10, min_messages=10)
        for wrong in (batch, batch.parts[0]):
            with pytest.raises(InvalidOption, match="step of a slice"):
                wrong[::2]


# --- deserializers


class Reader:
    """A deserializer that counts its calls, and cannot read the value `bad`."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: bytes | None, _: Any) -> Any:
        self.calls += 1
        if value == b"bad":
            raise ValueError("not a number")
        return None if value is None else [int(value)]


@pytest.mark.parametrize("field", ["key", "value"])
def test_a_deserializer_runs_once_per_message(memory: MemoryTestCluster, field: str) -> None:
    topic, read = memory.topic(), Reader()
    for number in range(6):
        memory.put(topic, 0, b"%d" % number, b"%d" % number)
    options: dict[str, Any] = {f"{field}_deserializer": read}
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], **options) as consumer:
        message = consumer.next()
        assert message is not None
        assert read.calls == 0, "nothing is read before it is asked for"
        assert getattr(message, field) is getattr(message, field)
        assert message.key, message.value
        assert read.calls == 1
        batch = consumer.fetch(5, min_messages=5)
        part = batch.parts[0]
        assert getattr(part, f"{field}s") == getattr(part, f"{field}s") == [[n] for n in range(1, 6)]
        assert [getattr(message, field) for message in batch] == [[n] for n in range(1, 6)]
        assert getattr(batch[2], field) == getattr(part[1:][1], field) == [3]
        other = {"key": part.values, "value": part.keys}[field]
        assert other == [b"1", b"2", b"3", b"4", b"5"]
        assert read.calls == 6


def test_nothing_is_a_result_that_is_kept_too(memory: MemoryTestCluster) -> None:
    topic, read = memory.topic(), Reader()
    memory.put(topic, 0, None)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], value_deserializer=read) as consumer:
        message = consumer.next()
        assert message is not None
        assert message.value is message.value is None
        assert read.calls == 1


def test_one_bad_record_names_its_offset_and_does_not_spoil_the_rest(memory: MemoryTestCluster) -> None:
    topic, read = memory.topic(), Reader()
    for value in (b"0", b"1", b"bad", b"3"):
        memory.put(topic, 0, value)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], value_deserializer=read) as consumer:
        batch = consumer.fetch(4, min_messages=4)
        (part,) = batch.parts
        with pytest.raises(DeserializationFailed) as caught:
            assert part.values
        error = caught.value
        assert (error.topic, error.partition, error.offset, error.field) == (topic, 0, 2, "value")
        assert f"{topic}:0@2" in str(error)
        assert isinstance(error.__cause__, ValueError)
        assert part[:2].values + part[3:].values == [[0], [1], [3]]
        assert read.calls == 4
        with pytest.raises(ValueError, match="not a number"):
            assert batch[2].value
        assert part.keys == [None] * 4


def test_a_value_that_refers_to_its_message_is_freed(memory: MemoryTestCluster) -> None:
    class Order:
        message: Any

    topic = filled(memory, count=1)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], value_deserializer=lambda *_: Order()) as consumer,
    ):
        message = consumer.next()
        assert message is not None
        message.value.message = message
        gone = weakref.ref(message.value)
        del message
        gc.collect()
        assert gone() is None


# --- how they are printed


def test_what_is_printed(memory: MemoryTestCluster) -> None:
    topic, group = filled(memory, partitions=2), memory.group()
    with memory.connect("host-1") as marshal:
        address = memory.broker.bootstrap_servers
        assert repr(marshal) == f"Marshal('{address}', client_id='host-1', consumers=0)"
        with joined(marshal, group, [topic]) as consumer:
            until(owns(consumer, 0, 1), "both partitions are claimed")
            assert repr(consumer) == f"Consumer({group!r}, [{topic!r}], client_id='host-1', claims=2)"
            batch = consumer.fetch(20, min_messages=20)
            parts = [f"Part({part.topic_partition}@0..9, messages=10)" for part in batch.parts]
            assert list(map(repr, batch.parts)) == parts
            assert repr(batch) == f"Batch([{', '.join(parts)}])"
            assert repr(batch[:0]) == "Batch([])"
            assert repr(batch.parts[0][:0]) == f"Part({batch.parts[0].topic_partition}, messages=0)"
            assert repr(batch[0]) == f"Message({batch.parts[0].topic_partition}@0, token={batch[0].token})"
            assert "consumers=1" in repr(marshal)
        assert repr(consumer).endswith(", closed)")
        planner = marshal.planner(group, [topic])
        assert repr(planner).startswith(f"Planner({group!r}, ")
        assert repr(marshal.topic(topic)) == f"Topic({topic!r})"
    assert repr(marshal) == f"Marshal('{address}', client_id='host-1', consumers=0, closed)"
    assert isinstance(marshal, Marshal)


def test_printing_reads_no_value(memory: MemoryTestCluster) -> None:
    topic, read = filled(memory, count=1), Reader()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], value_deserializer=read) as consumer:
        assert str(consumer.fetch(1)[0]).startswith("Message(")
        assert read.calls == 0
