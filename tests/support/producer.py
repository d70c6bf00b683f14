"""A producer as a process: writes keyed, numbered messages at a steady rate and journals what was acknowledged.

    python -m tests.support.producer '{"journal": "...", "bootstrap": "...", "topics": ["t"], "per_second": 500}'

SIGTERM ends it once every message sent is acknowledged; so does `count`, after so many messages.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaError, Message, Producer

from tests.support.journal import Journal

SLICE_S = 0.02
FLUSH_TIMEOUT_S = 60.0
KEYS = 97


@dataclass
class Settings:
    name: str
    journal: str
    bootstrap: str
    topics: list[str]
    per_second: int = 300
    count: int = 0  # 0 means until SIGTERM


class Acknowledged:
    """Collects acknowledged offsets, so that the journal gets one line per poll and not one per message."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._new: dict[tuple[str, int], list[int]] = {}

    def note(self, error: KafkaError | None, message: Message) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if error is None and topic is not None and partition is not None and offset is not None:
            self._new.setdefault((topic, partition), []).append(offset)

    def write(self) -> None:
        for (topic, partition), offsets in self._new.items():
            self._journal.write("made", t=topic, p=partition, o=offsets)
        self._new.clear()


def run(settings: Settings) -> None:
    journal = Journal(Path(settings.journal))
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    journal.write("start", name=settings.name, pid=os.getpid(), client="", group="", delivery="")
    producer = Producer(
        {
            "bootstrap.servers": settings.bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 5,
            # New partitions are seen within a second; by default the client refreshes every five minutes.
            "topic.metadata.refresh.interval.ms": 1000,
            "reconnect.backoff.max.ms": 1000,
        }
    )
    acknowledged = Acknowledged(journal)
    number, owed = 0, 0.0
    while not over.is_set() and not (settings.count and number >= settings.count):
        owed += settings.per_second * SLICE_S
        while owed >= 1 and not (settings.count and number >= settings.count):
            topic = settings.topics[number % len(settings.topics)]
            try:
                producer.produce(topic, b"%d" % number, b"key-%d" % (number % KEYS), on_delivery=acknowledged.note)
            except BufferError:
                break
            number, owed = number + 1, owed - 1
        producer.poll(0)
        acknowledged.write()
        over.wait(SLICE_S)
    left = producer.flush(FLUSH_TIMEOUT_S)
    acknowledged.write()
    journal.write("gone", code=0, left=left, sent=number)


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[1])))
