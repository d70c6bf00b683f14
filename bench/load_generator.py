"""A process that writes one message to every partition at a steady rate, until its stdin ends.

It is the same load for all contestants. 12 partitions every 12 ms are 1,000 messages per second.

    python -m bench.load_generator '{"bootstrap": ..., "topic": ..., "partitions": 12, "period_s": 0.012}'
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from confluent_kafka import Producer

VALUE = b"x" * 100
LATE_MAX_S = 1.0  # A process that was late by more does not catch up: a burst would disturb more than a gap.
FLUSH_TIMEOUT_S = 10.0


def main() -> None:
    arguments = json.loads(sys.argv[1])
    topic, partitions, period_s = arguments["topic"], arguments["partitions"], arguments["period_s"]
    producer = Producer({"bootstrap.servers": arguments["bootstrap"], "acks": "all", "linger.ms": 1, "log_level": 3})
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    due = time.monotonic()
    while not ended.is_set():
        for partition in range(partitions):
            producer.produce(topic, VALUE, partition=partition)
        producer.poll(0)
        due += period_s
        left_s = due - time.monotonic()
        if left_s < -LATE_MAX_S:
            due = time.monotonic()
        elif left_s > 0:
            ended.wait(left_s)
    producer.flush(FLUSH_TIMEOUT_S)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
