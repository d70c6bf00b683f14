"""One member of a group as a process of its own. It is of one of four kinds.

Contestants:
  marshal      marshal_py, message by message, each acked
  eager        Kafka's classic group, `range` assignor: every rebalance revokes all partitions of all members
  cooperative  Kafka's classic group, `cooperative-sticky` assignor
  consumer     Kafka's newer group protocol (KIP-848, `group.protocol=consumer`), assigned by the broker

All run the same loop: take one message and log its delivery (monotonic ns, partition, offset) with one system call, so
that a kill loses no delivery. Settings are the defaults, except that a new group starts at the earliest message: a
message that no member received is then lost, whenever the group was formed. Kafka's members commit as they do by
default (every 5 s).

    python -m bench.group_member '{"kind": ..., "bootstrap": ..., "group": ..., "topic": ..., "log": ...,
                                 "coordination": ..., "settings": {...}, "options": {...}}'

Commands on stdin: "go" begins (consumer() or subscribe()), "stop" stops cleanly, the end of stdin kills. Events on
stdout, one JSON line each: ready (imported and connected), called (right before consumer() or subscribe()), stopping,
stopped.
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
    """librdkafka's settings for a kind of Kafka group: the defaults, its protocol or assignor, and `extra`."""
    start = {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest", "log_level": 3}
    return {**start, **KAFKA_SETTINGS[kind], **(extra or {})}


def report(event: str) -> None:
    print(json.dumps({"event": event, "ns": time.monotonic_ns()}), flush=True)


class Commands:
    """The parent's commands, read in a thread. If the parent ends, this process ends at once."""

    def __init__(self) -> None:
        self.go, self.stopping = threading.Event(), threading.Event()
        self.on_stop: Callable[[], None] = lambda: None
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            if line.strip() == "go":
                self.go.set()
            elif line.strip() == "stop":
                report("stopping")
                self.stopping.set()
                self.on_stop()
        os._exit(1)


def run_marshal(arguments: Mapping[str, Any], commands: Commands, log: int) -> None:
    import marshal_py

    pack, write, now = DELIVERY.pack, os.write, time.monotonic_ns
    options = {"start": "committed|earliest", **arguments["options"]}
    last_will = options.pop("last_will", "off")
    with marshal_py.connect(
        arguments["bootstrap"], coordination_topic=arguments["coordination"], last_will=last_will
    ) as marshal:
        report("ready")
        commands.go.wait()
        report("called")
        with marshal.consumer(arguments["group"], [arguments["topic"]], **options) as consumer:
            commands.on_stop = consumer._ending.request_stop
            if commands.stopping.is_set():
                return
            for message in consumer:
                write(log, pack(now(), message.partition, message.offset))
                message.ack()


def run_kafka(arguments: Mapping[str, Any], commands: Commands, log: int) -> None:
    from confluent_kafka import Consumer

    pack, write, now = DELIVERY.pack, os.write, time.monotonic_ns
    consumer = Consumer(
        kafka_settings(arguments["kind"], arguments["bootstrap"], arguments["group"], arguments["settings"])
    )
    try:
        # Connect now, as marshal_py does in connect(): the time to the first message begins with both connected.
        consumer.list_topics(arguments["topic"], timeout=METADATA_TIMEOUT_S)
        report("ready")
        commands.go.wait()
        report("called")
        consumer.subscribe([arguments["topic"]])
        stopping = commands.stopping.is_set
        while not stopping():
            message = consumer.poll(POLL_S)
            if message is not None and message.error() is None:
                write(log, pack(now(), message.partition(), message.offset()))
    finally:
        consumer.close()


def main() -> None:
    arguments = json.loads(sys.argv[1])
    commands = Commands()
    log = os.open(Path(arguments["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    run = run_marshal if arguments["kind"] == "marshal" else run_kafka
    run(arguments, commands, log)
    report("stopped")
    # Without the interpreter's shutdown, because one thread is still blocked in a read of stdin.
    os._exit(0)


if __name__ == "__main__":
    main()
