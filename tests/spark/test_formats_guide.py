"""The formats of docs/spark-reference.md: the page's programs and examples/decoding run on good and bad messages."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from marshal_py.spark import DeltaOutput
from tests.spark.kafka_topic import KafkaTopic
from tests.support.kafka import Cluster, TopicFactory
from tests.support.pages import ROOT, section

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TEXT = section("docs/spark-reference.md", "JSON, Avro, Protobuf")
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
FILES = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "examples" / "decoding").glob("*.py")}
UNTESTED = {"orders_avro.py"}
MODULES = {name: text for name, text in FILES.items() if name not in UNTESTED}

HEADER = b"\0\0\0\1\2"  # schema 258
VALUES = [
    b'{"id": 1, "amount": 2.5}',
    b'{"id": 2}',
    b'{"id": "x"}',
    None,
    b"",
    b"\xff\xfe",
    b"{}",
    HEADER + b"\0" + b"\x08\x07" + b"\x11" + bytes(8),
    HEADER + b"\0",
    HEADER + b"\0\xff\xff",
    HEADER + b"\2\2\x08\x07",
    b"\0" + 4 * b"\xff" + b"\0",
]
JSON = {0: (1, 2.5), 1: (2, None), 3: (None, None)}  # by offset; the others are malformed
PROTOBUF = {3: None, 7: (7, 0.0), 8: (0, 0.0), 11: (0, 0.0)}  # by offset; the others have an error


def test_every_program_is_classified() -> None:
    """A module that no test runs compiles at least, and the page says so."""
    assert (sorted(MODULES), len(PROGRAMS)) == (["decoding.py", "orders_protobuf.py"], 3)
    for name in UNTESTED:
        compile(FILES[name], name, "exec")
        assert "not run by a test" in " ".join(TEXT.split())
    assert [name for name in FILES if f"`{name}`" not in TEXT] == []


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_message_that_cannot_be_decoded_is_a_row_and_no_error(
    spark: SparkSession, kafka: Cluster, topic: TopicFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every message is in the tables once, also after a second run without checkpoints."""
    orders = KafkaTopic(kafka, topic, partitions=1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for value in VALUES:
        producer.produce(orders.topic, value, partition=0)
    assert producer.flush(30) == 0
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {**MODULES, "orders_pb2.py": orders_pb2()}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        spark.sparkContext.addPyFile(str(tmp_path / name))
    try:
        for _ in range(2):
            names: dict[str, Any] = {}
            for program, table in zip(PROGRAMS, ("json", "", "protobuf"), strict=True):
                exec(compile(program, "docs/spark-reference.md", "exec"), names)
                if table:
                    run(spark, orders, DeltaOutput(str(tmp_path / table)).sink(names["change"]), tmp_path / table)
            for checkpoint in tmp_path.glob("*-checkpoint"):
                shutil.rmtree(checkpoint)
    finally:
        for name in (*MODULES, "orders_pb2.py"):
            sys.modules.pop(name.removesuffix(".py"), None)

    offsets = set(range(len(VALUES)))
    rows = DeltaTable(str(tmp_path / "json")).to_pyarrow_table().to_pylist()
    found = {row["offset"]: (row["id"], row["amount"], row["malformed"]) for row in rows}
    bad = {offset: (None, None, VALUES[offset]) for offset in offsets - JSON.keys()}
    assert len(rows) == len(offsets)
    assert found == {offset: (*fields, None) for offset, fields in JSON.items()} | bad

    rows = DeltaTable(str(tmp_path / "protobuf")).to_pyarrow_table().to_pylist()
    assert sorted(row["offset"] for row in rows) == sorted(offsets)
    for row in rows:
        if row["offset"] in PROTOBUF:
            assert (row["error"], row["value"]) == (None, None)
            assert (row["order"] and tuple(row["order"].values())) == PROTOBUF[row["offset"]]
        else:
            assert row["error"]
            assert (row["order"], row["value"]) == (None, VALUES[row["offset"]])

    raw = spark.createDataFrame([(value,) for value in VALUES], "value BINARY")
    bodies = raw.select(names["SCHEMA_ID"], names["AVRO"], names["PROTOBUF"]).collect()
    for value, (schema, avro, protobuf) in zip(VALUES, bodies, strict=True):
        framed = value is not None and len(value) > 5 and value.startswith(b"\0")
        assert (schema, avro) == ((int.from_bytes(value[1:5], "big"), value[5:]) if framed else (None, None)), value
        assert protobuf == (value[6:] if framed and value[5:6] == b"\0" else None)


def run(spark: SparkSession, orders: KafkaTopic, sink: Callable[[DataFrame, int], None], table: Path) -> None:
    """The stream of the first job of docs/spark.md, in a group of its own."""
    stream = (
        spark.readStream.format("marshal")
        .option("bootstrap.servers", orders.bootstrap)
        .option("coordination_topic", orders.log)
        .option("group", table.name)
        .option("topics", orders.topic)
        .option("start", "earliest")
        .load()
    )
    writer = stream.writeStream.foreachBatch(sink).option("checkpointLocation", f"{table}-checkpoint")
    writer.trigger(availableNow=True).start().awaitTermination()


def orders_pb2() -> str:
    """The module that protoc would generate for an Order with an id and an amount."""
    file = FileDescriptorProto(name="orders.proto", syntax="proto3")
    message = file.message_type.add(name="Order")
    for number, (name, kind) in enumerate((("id", "INT64"), ("amount", "DOUBLE")), start=1):
        message.field.add(
            name=name,
            number=number,
            label=FieldDescriptorProto.LABEL_OPTIONAL,
            type=FieldDescriptorProto.Type.Value(f"TYPE_{kind}"),
        )
    return f"""
from google.protobuf import descriptor_pool
from google.protobuf.internal import builder
DESCRIPTOR = descriptor_pool.Default().AddSerializedFile({file.SerializeToString()!r})
builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, "orders_pb2", globals())
"""
