"""How does one member of a group behave? One consumer as a process of its own, of one of four kinds.

Contestants:
  marshal      marshal_py, message by message, each acked
  eager        Kafka's classic group, `range` assignor: every rebalance takes everything away from everybody
  cooperative  Kafka's classic group, `cooperative-sticky` assignor
  consumer     Kafka's newer group protocol (KIP-848, `group.protocol=consumer`), assigned by the broker

All run the same loop: take one message, write down (monotonic ns, partition, offset) of its delivery with one system
call, so that a kill loses nothing of it. Settings are the defaults but for where a new group starts: at the earliest
message, so that a message that nobody got is a loss and not a matter of when the group was formed. Kafka's members
commit as they do by default (every 5 s).

    python -m bench.group_member '{"kind": ..., "bootstrap": ..., "group": ..., "topic": ..., "log": ...,
                                 "coordination": ..., "settings": {...}, "options": {...}}'

On stdin: "go" begins (consumer() or subscribe()), "stop" stops cleanly, the end of stdin kills. On stdout a JSON line
for each: ready (imported and connected), called (right before consumer() or subscribe()), stopping, stopped.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

KINDS = ("marshal", "eager", "cooperative", "consumer")
KAFKA_KINDS = KINDS[1:]
KAFKA_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "eager": {"partition.assignment.strategy": "range"},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
}
DELIVERY = struct.Struct("<qiq")  # monotonic ns, partition, offset
POLL_S = 0.1
METADATA_TIMEOUT_S = 30.0


def kafka_settings(kind: str, bootstrap: str, group: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings of a Kafka contestant: defaults, the protocol that makes its kind, and `extra`."""
    start = {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest", "log_level": 3}
    return {**start, **KAFKA_SETTINGS[kind], **(extra or {})}


def tell(event: str) -> None:
    print(json.dumps({"event": event, "ns": time.monotonic_ns()}), flush=True)


class Orders:
    """What the parent says, read in a thread. Without a parent the process ends at once: nothing is left running."""

    def __init__(self) -> None:
        self.go, self.stopping = threading.Event(), threading.Event()
        self.on_stop: Callable[[], None] = lambda: None
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            if line.strip() == "go":
                self.go.set()
            elif line.strip() == "stop":
                tell("stopping")
                self.stopping.set()
                self.on_stop()
        os._exit(1)


def run_marshal(order: Mapping[str, Any], orders: Orders, log: int) -> None:
    import marshal_py

    pack, write, now = DELIVERY.pack, os.write, time.monotonic_ns
    with marshal_py.connect(order["bootstrap"], coordination_topic=order["coordination"]) as marshal:
        tell("ready")
        orders.go.wait()
        tell("called")
        options = {"start_fallback": "earliest", **order["options"]}
        with marshal.consumer(order["group"], [order["topic"]], **options) as consumer:
            orders.on_stop = consumer.request_stop
            if orders.stopping.is_set():
                return
            for message in consumer:
                write(log, pack(now(), message.partition, message.offset))
                message.ack()


def run_kafka(order: Mapping[str, Any], orders: Orders, log: int) -> None:
    from confluent_kafka import Consumer

    pack, write, now = DELIVERY.pack, os.write, time.monotonic_ns
    consumer = Consumer(kafka_settings(order["kind"], order["bootstrap"], order["group"], order["settings"]))
    try:
        # Connected, as marshal_py is after connect(): the time to the first message begins with both in that state.
        consumer.list_topics(order["topic"], timeout=METADATA_TIMEOUT_S)
        tell("ready")
        orders.go.wait()
        tell("called")
        consumer.subscribe([order["topic"]])
        stopping = orders.stopping.is_set
        while not stopping():
            message = consumer.poll(POLL_S)
            if message is not None and message.error() is None:
                write(log, pack(now(), message.partition(), message.offset()))
    finally:
        consumer.close()


def main() -> None:
    order = json.loads(sys.argv[1])
    orders = Orders()
    log = os.open(Path(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    run = run_marshal if order["kind"] == "marshal" else run_kafka
    run(order, orders, log)
    tell("stopped")
    # Not through the interpreter's end: a thread of ours sits in a read of stdin.
    os._exit(0)


if __name__ == "__main__":
    main()
