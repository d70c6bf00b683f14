"""The demo's producer process: writes orders at an even pace until SIGTERM, and journals what was acknowledged."""

from __future__ import annotations

import signal
import threading
import time
from typing import Final

from marshal_py.cli.demo.journal import Journal, Written
from marshal_py.cli.demo.orders import order
from marshal_py.cli.demo.process import Task, run_task
from marshal_py.client.marshal import CONNECT_TIMEOUT_S
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.producer import KafkaProducer

TICK_S: Final = 0.02  # how even the pace is


def produce(task: Task, journal: Journal, stop: threading.Event) -> None:
    producer = KafkaProducer(
        KafkaTransport(task.settings, CONNECT_TIMEOUT_S),
        lambda tp, offset: journal.write(Written(tp.partition, offset)),
    )
    began, sent = time.monotonic(), 0
    while not stop.wait(TICK_S):
        due = round((time.monotonic() - began) * task.rate_per_s)
        if due - sent > task.rate_per_s:
            # The machine stalled. Continue at the same pace: a burst would be another experiment.
            began += (due - sent) / task.rate_per_s
            continue
        while sent < due:
            key, value = order(sent)
            producer.write(task.topic, value, key)
            sent += 1
        producer.poll()
    producer.flush()
    producer.close()


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    run_task(lambda task, journal: produce(task, journal, stop))


if __name__ == "__main__":
    main()
