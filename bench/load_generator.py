"""The load: one message to every partition, again and again, from a process of its own until stdin ends.

Contestants: none; the same load for all of them. 12 partitions every 12 ms are 1,000 messages a second.

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
BEHIND_S = 1.0  # A process that was held up this long does not make up for it: a burst would disturb more than a gap.
FLUSH_TIMEOUT_S = 10.0


def main() -> None:
    order = json.loads(sys.argv[1])
    topic, partitions, period_s = order["topic"], order["partitions"], order["period_s"]
    producer = Producer({"bootstrap.servers": order["bootstrap"], "acks": "all", "linger.ms": 1, "log_level": 3})
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
        if left_s < -BEHIND_S:
            due = time.monotonic()
        elif left_s > 0:
            ended.wait(left_s)
    producer.flush(FLUSH_TIMEOUT_S)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
