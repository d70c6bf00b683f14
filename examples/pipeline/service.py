"""The Python service: a member of the group like the Spark query, writing to the same table under its own tokens.

python -m examples.pipeline.service SERVERS TOPIC GROUP FOLDER
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

import marshal_py
from examples.pipeline.orders import parse
from marshal_py.errors import ClaimLost, WriteFenced
from marshal_py.spark import DeltaOutput, write_batch
from marshal_py.spark.sinks.delta import DeltaEntry
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.producer import KafkaProducer

ROWS = 400  # per commit of the table
DEAD = ".dead"  # the dead-letter topic has the topic's name with this suffix
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("customer", pa.string()),
        ("product", pa.string()),
        ("cents", pa.int64()),
        ("event_time", pa.timestamp("us", "UTC")),
        ("day", pa.string()),
    ]
)


def orders_table(folder: str) -> DeltaOutput:
    """Returns the table that the service and the query write to: Delta Lake, with a folder of Parquet files per day."""
    return DeltaOutput(f"{folder}/orders", partition_by=("day",))


def main(servers: str, topic: str, group: str, folder: str) -> None:
    orders, sink = orders_table(folder), KafkaProducer(KafkaTransport(servers, 30.0))
    with (
        marshal_py.connect(servers) as marshal,
        marshal.consumer(group, [topic], start="earliest", heartbeat_interval_s=1.0) as consumer,
        marshal_py.stop_on_signals(consumer),
    ):
        while True:  # until a signal
            batch = consumer.fetch(ROWS, expires_s=0.5)
            try:
                if batch:
                    write_batch(orders, batch, lambda messages, entry: write(messages, entry, sink))
                    batch.ack()
            except (WriteFenced, ClaimLost) as error:
                print(f"dropped: {error}", flush=True)  # another member owns the partition now and writes it


def write(messages: list[marshal_py.Message], entry: DeltaEntry, sink: KafkaProducer) -> None:
    """Writes the messages that are not in the table yet. Called again, with fewer, if another writer was faster."""
    rows: list[dict[str, Any]] = []
    for message in messages:
        order = parse(message.value)
        if order.problem:
            bury(sink, message.topic, message.partition, message.offset, message.value, order.problem)
            continue
        at = datetime.fromtimestamp(order.event_ms / 1000, UTC)
        rows.append(
            {
                "topic": message.topic,
                "partition": message.partition,
                "offset": message.offset,
                "customer": order.customer,
                "product": order.product,
                "cents": order.cents,
                "event_time": at,
                "day": at.strftime("%Y-%m-%d"),
            }
        )
    sink.flush()
    entry.append(pa.Table.from_pylist(rows, SCHEMA))


def bury(sink: KafkaProducer, topic: str, partition: int, offset: int, value: bytes | None, problem: str) -> None:
    """Sends a message to the dead-letter topic, with its origin and its problem."""
    origin = f"{topic}:{partition}:{offset}"
    sink.write(topic + DEAD, value, origin.encode(), [("origin", origin.encode()), ("problem", problem.encode())])


if __name__ == "__main__":
    main(*sys.argv[1:])
