"""A consumer as a process whose user is slow, forgetful, or dies of a message; journals each delivery with its number.

    python -m tests.support.failing_handler '{"name": "w1", "journal": "/tmp/x/w1.jsonl", "bootstrap": "...", "held":
    100, ...}'

Settings are those of tests/support/worker.py and those below. One thread handles the messages and acks each of them as
soon as it is handled. SIGTERM stops the consumer in the documented way. SIGUSR1 ends all waiting: from then on handlers
take no time.

Journal lines beside those of the worker: `begin` has the number of the delivery (`n`); `late` is an ack that returned
False; with `watch_grants`, `asks` and `answered` are a ClaimingMessages that is sent, and the same one read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import marshal_py
from marshal_py.protocol.member.rebalance import GrantRequests
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import ClaimingMessages
from marshal_py.transport.kafka import KafkaLog, KafkaTransport
from tests.support import worker
from tests.support.journal import Journal

POISONED = 70  # exit code of a process that died of its message


@dataclass
class Settings(worker.Settings):
    client: str = ""  # its client id; "" for the name with the pid
    quick: int = 0  # so many messages take no time; `handler_ms` counts from then on
    leaves_after: int = 0  # it leaves by itself after that many messages; 0 = never
    leaves_by: str = "block"  # the end of the `with` block, or drain
    held: int = -1  # the message at this offset is never acked, and handling continues
    poison: int = -1  # the message at this offset ends the process
    poison_waits: bool = False  # and does so after SIGUSR1
    watch_grants: bool = False


class User(worker.Worker):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.wishes = settings
        self.client = settings.client or self.client
        self.handled = 0
        self.hurried = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: self.hurried.set())
        if settings.watch_grants:
            watch_grants(self.journal)

    def _consume(self) -> None:
        wishes = self.wishes
        with marshal_py.connect(
            wishes.bootstrap,
            client_id=self.client,
            coordination_topic=wishes.coordination_topic,
            coordination_partitions=wishes.coordination_partitions,
        ) as marshal:
            options = {"heartbeat_interval_s": 1.0, "start": "earliest", **wishes.options}
            with marshal.consumer(wishes.group, wishes.topics, delivery=wishes.delivery, **options) as consumer:
                self.consumer = consumer
                marshal_py.stop_on_signals(consumer)
                self.journal.write("joined")
                with contextlib.suppress(marshal_py.ConsumerClosed):  # a signal came between two batches
                    self._take_all(consumer)

    def _take_all(self, consumer: marshal_py.Consumer) -> None:
        while not consumer._ending.stopping:
            for messages in self._delivered(consumer):
                self._take(messages)
                if self.wishes.leaves_after and self.handled >= self.wishes.leaves_after:
                    if self.wishes.leaves_by == "block":
                        return
                    if not consumer._ending.stopping:
                        consumer.drain()

    def _delivered(self, consumer: marshal_py.Consumer) -> Iterator[list[marshal_py.Message]]:
        """The messages that are delivered together: one, or a batch."""
        if self.wishes.style == "single":
            yield from ([message] for message in consumer)
        elif batch := list(consumer.fetch(self.wishes.batch_max, expires_s=worker.FETCH_EXPIRES_S)):
            yield batch

    def _take(self, messages: list[marshal_py.Message]) -> None:
        gate_ns = worker.WatchedClock.seen.ns
        for message in messages:
            self.journal.write("begin", gate=gate_ns, n=message.delivery_count, **place(message))
        for message in messages:
            self._handle(message)

    def _handle(self, message: marshal_py.Message) -> None:
        wishes = self.wishes
        if message.offset == wishes.poison:
            if wishes.poison_waits:
                self.hurried.wait()
            os._exit(POISONED)
        self.handled += 1
        if self.handled > wishes.quick and not self.hurried.is_set():
            time.sleep(self.random.choice(wishes.handler_ms) / 1000)  # The work itself.
        self.journal.write("end", **place(message))
        if message.offset != wishes.held:
            self.journal.write("ack" if message.ack() else "late", **place(message))


def place(message: marshal_py.Message) -> dict[str, Any]:
    return {"tok": str(message.token), "t": message.topic, "p": message.partition, "o": [message.offset]}


def watch_grants(journal: Journal) -> None:
    """Patches the library: a log shows when a record was written, not when its sender has read it."""
    append, read = KafkaLog.append, GrantRequests.read

    def appending(log: KafkaLog, number: int, key: bytes, value: bytes) -> bool:
        kind, body = value[13 + value[11]], value[14 + value[11] :]
        if kind == worker.CLAIMING_MESSAGES:
            record = codec.decode_body(kind, body)
            assert isinstance(record, ClaimingMessages)
            journal.write("asks", nonce=record.nonce)
        return append(log, number, key, value)

    def reading(grants: GrantRequests, record: ClaimingMessages, accepted: bool) -> bool:
        journal.write("answered", nonce=record.nonce)
        return read(grants, record, accepted)

    KafkaLog.append = appending  # type: ignore[method-assign]
    GrantRequests.read = reading  # type: ignore[method-assign]


def main() -> None:
    threading.excepthook = worker.end_loudly
    KafkaTransport.clock = worker.WatchedClock()  # type: ignore[misc]
    sys.exit(User(Settings(**json.loads(sys.argv[1]))).run())


if __name__ == "__main__":
    main()
