"""One member of a group as a process of its own. It is of one of these kinds.

Contestants:
  marshal      marshal_py, message by message, each acked
  eager        Kafka's classic group, `range` assignor: every rebalance revokes all partitions of all members
  cooperative  Kafka's classic group, `cooperative-sticky` assignor
  consumer     Kafka's newer group protocol (KIP-848, `group.protocol=consumer`), assigned by the broker
  process      marshal_py, `Consumer.process` with 16 threads (from here on: bench peers only)
  share        a share group (KIP-932) with implicit acknowledgements
  aiokafka     aiokafka, `async for`
  faststream   FastStream, one subscriber

All run the same loop: take one message and log its delivery (monotonic ns, partition, offset) with one system call, so
that a kill loses no delivery. Settings are the defaults, except that a new group starts at the earliest message: a
message that no member received is then lost, whenever the group was formed. Kafka's members commit as they do by
default (every 5 s). aiokafka and FastStream connect where they join, and so after "called".

    python -m bench.group_member '{"kind": ..., "bootstrap": ..., "group": ..., "topic": ..., "log": ...,
                                 "coordination": ..., "settings": {...}, "options": {...}}'

Commands on stdin: "go" begins (consumer() or subscribe()), "stop" stops cleanly, the end of stdin kills. Events on
stdout, one JSON line each: ready (imported and connected), called (right before consumer() or subscribe()), stopping,
stopped.
"""

from __future__ import annotations

import asyncio
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
OWN_KINDS = ("marshal", "process")
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
            if arguments["kind"] == "process":
                with consumer.process(lambda each: write(log, pack(now(), each.partition, each.offset))) as process:
                    process.wait()
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


def run_share(arguments: Mapping[str, Any], commands: Commands, log: int) -> None:
    from confluent_kafka import ShareConsumer

    pack, write, now = DELIVERY.pack, os.write, time.monotonic_ns
    consumer = ShareConsumer(
        {"bootstrap.servers": arguments["bootstrap"], "group.id": arguments["group"], "log_level": 3}
    )
    report("ready")
    commands.go.wait()
    report("called")
    consumer.subscribe([arguments["topic"]])
    while not commands.stopping.is_set():
        for message in consumer.poll(POLL_S):
            if message.error() is None:
                write(log, pack(now(), message.partition(), message.offset()))
    consumer.close()


async def _stopped(commands: Commands) -> None:
    """Returns when the parent wants this member to stop."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_stop() -> None:
        loop.call_soon_threadsafe(stop.set)

    commands.on_stop = on_stop
    if not commands.stopping.is_set():
        await stop.wait()


def run_aiokafka(arguments: Mapping[str, Any], commands: Commands, log: int) -> None:
    from aiokafka import AIOKafkaConsumer

    pack, write, now = DELIVERY.pack, os.write, time.monotonic_ns

    async def main() -> None:
        consumer = AIOKafkaConsumer(
            arguments["topic"],
            bootstrap_servers=arguments["bootstrap"],
            group_id=arguments["group"],
            auto_offset_reset="earliest",
            **arguments["settings"],
        )
        report("called")
        await consumer.start()

        async def handle() -> None:
            async for message in consumer:
                write(log, pack(now(), message.partition, message.offset))

        handling, stopped = asyncio.create_task(handle()), asyncio.create_task(_stopped(commands))
        await asyncio.wait((handling, stopped), return_when=asyncio.FIRST_COMPLETED)
        handling.cancel()
        await asyncio.gather(handling, return_exceptions=True)
        await consumer.stop()

    report("ready")
    commands.go.wait()
    asyncio.run(main())


def run_faststream(arguments: Mapping[str, Any], commands: Commands, log: int) -> None:
    from faststream.kafka import KafkaBroker, KafkaMessage

    pack, write, now = DELIVERY.pack, os.write, time.monotonic_ns
    broker = KafkaBroker(arguments["bootstrap"], logger=None)
    settings = {"auto_offset_reset": "earliest", **arguments["settings"]}

    @broker.subscriber(arguments["topic"], group_id=arguments["group"], **settings)
    async def handle(_body: bytes, message: KafkaMessage) -> None:
        raw: Any = message.raw_message
        write(log, pack(now(), raw.partition, raw.offset))

    async def main() -> None:
        report("called")
        await broker.start()
        await _stopped(commands)
        await broker.stop()

    report("ready")
    commands.go.wait()
    asyncio.run(main())


RUNS: Mapping[str, Callable[[Mapping[str, Any], Commands, int], None]] = {
    **dict.fromkeys(OWN_KINDS, run_marshal),
    **dict.fromkeys(KAFKA_KINDS, run_kafka),
    "share": run_share,
    "aiokafka": run_aiokafka,
    "faststream": run_faststream,
}


def main() -> None:
    arguments = json.loads(sys.argv[1])
    commands = Commands()
    log = os.open(Path(arguments["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    RUNS[arguments["kind"]](arguments, commands, log)
    report("stopped")
    # Without the interpreter's shutdown, because one thread is still blocked in a read of stdin.
    os._exit(0)


if __name__ == "__main__":
    main()
