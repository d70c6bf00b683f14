"""What the demo's child processes do: one produces orders, each of the others consumes like a user's program.

They journal what they have done for the judge (verdict.py), and decide nothing. An order carries a checksum of its key
and number.
"""

from __future__ import annotations

import json
import signal
import threading
import time
import zlib
from typing import Final

from marshal_py.cli.demo.journal import Claimed, Delivered, Joined, Journal, Lost, Reported, Written, now
from marshal_py.cli.demo.process import Task, run_task
from marshal_py.client.consumer import Consumer
from marshal_py.client.marshal import connect
from marshal_py.client.signals import stop_on_signals
from marshal_py.client.values.info import ClaimInfo
from marshal_py.client.values.options import CONNECT_TIMEOUT_S
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.producer import KafkaProducer

KEYS: Final = 500  # many keys per partition, many messages per key
RATE_PER_S: Final = 300  # orders: enough to see, and minutes of them fit into the embedded broker
TICK_S: Final = 0.02  # how even the producer's pace is
# The callbacks journal claims and losses; a claim that is being revoked is lost within milliseconds here.
JOURNALED_ELSEWHERE: Final = frozenset({"claimed", "lost", "released", "revoking", "joined", "topology"})


def order(number: int) -> tuple[bytes, bytes]:
    """Returns key and value of the order with this number."""
    key = f"customer-{number * 7919 % KEYS}"  # a prime step, so that neighbours go to different partitions
    body = f"{key}/{number}"
    return key.encode(), json.dumps({"order": number, "checksum": zlib.crc32(body.encode())}).encode()


def checksum_fits(key: bytes | None, value: bytes | None) -> bool:
    """Returns whether key, number and checksum of a message belong together, as its producer wrote them."""
    try:
        content = json.loads(value or b"")
        body = f"{(key or b'').decode()}/{content['order']}"
        return bool(content["checksum"] == zlib.crc32(body.encode()))
    except (ValueError, KeyError, TypeError):
        return False


def produce(task: Task, journal: Journal) -> None:
    """Writes orders at an even pace until SIGTERM, and journals what was acknowledged."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    producer = KafkaProducer(
        KafkaTransport(task.plan.settings, CONNECT_TIMEOUT_S),
        lambda tp, offset: journal.write(Written(tp.partition, offset)),
    )
    began, sent = time.monotonic(), 0
    while not stop.wait(TICK_S):
        due = round((time.monotonic() - began) * RATE_PER_S)
        if due - sent > RATE_PER_S:
            # The machine stalled. Continue at the same pace: a burst would be another experiment.
            began += (due - sent) / RATE_PER_S
            continue
        while sent < due:
            key, value = order(sent)
            producer.write(task.plan.topic, value, key)
            sent += 1
        producer.poll()
    producer.flush()
    producer.close()


def consume(task: Task, journal: Journal) -> None:
    """Acks every message, and journals it before."""

    def claimed(info: ClaimInfo) -> None:
        journal.write(Claimed(now(), info.partition, info.token.epoch))

    def lost(info: ClaimInfo, reason: str) -> None:
        journal.write(Lost(now(), info.partition, reason))

    plan = task.plan
    with connect(
        plan.settings,
        client_id=task.name,
        coordination_topic=plan.coordination_topic,
        last_will="process" if plan.last_will else "auto",
    ) as marshal:
        with (
            marshal.consumer(
                plan.group,
                [plan.topic],
                delivery=plan.delivery,
                start="earliest",  # messages written before a partition's first claim count too
                on_claim=claimed,
                on_lost=lost,
            ) as consumer,
            stop_on_signals(consumer),
        ):
            journal.write(Joined(now()))
            for message in consumer:
                fits = checksum_fits(message.key, message.value)
                journal.write(Delivered(now(), message.partition, message.offset, fits))
                message.ack()
                report_events(consumer, journal)
        report_events(consumer, journal)


def report_events(consumer: Consumer, journal: Journal) -> None:
    for event in consumer.events():
        if event.kind not in JOURNALED_ELSEWHERE:
            journal.write(Reported(now(), event.kind, event.text))


if __name__ == "__main__":
    run_task({"produce": produce, "consume": consume})
