"""Three copies of a program under `marshal run`, on Apache Kafka; all but one are killed in turn (T19).

No time is asserted: the interval is long, an eviction would write an Evict, and the log shows that there is none.
"""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import ExitStack
from pathlib import Path

from confluent_kafka import Producer

import marshal_py
from marshal_py.last_will import connecting
from tests.support.client_fixtures import ConsumerProcess, until
from tests.support.kafka import Cluster, TopicFactory

PARTITIONS, COPIES, MESSAGES = 6, 3, 20
RUN = tuple(connecting.command("run", "--"))
INTERVAL = ("--interval", "10")


def test_each_copy_is_replaced_without_an_eviction(kafka: Cluster, topic: TopicFactory) -> None:
    """T19: nothing is lost, the log names the signal, `marshal run` ends as the program did, and leaves no process."""
    name, group = topic(PARTITIONS), f"wills-{secrets.token_hex(4)}"
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    written: set[tuple[int, int]] = set()

    def write() -> None:
        for number in range(PARTITIONS):
            for _ in range(MESSAGES):
                producer.produce(
                    name,
                    b"x",
                    partition=number,
                    on_delivery=lambda _, message: written.add((message.partition(), message.offset())),
                )
        producer.flush()

    with ExitStack() as stack:
        copies: list[ConsumerProcess] = []

        def handled() -> list[tuple[int, int]]:
            return [(event["partition"], event["offset"]) for copy in copies for event in copy.said("message")]

        for number in range(COPIES):
            arguments = ("--client-id", f"copy-{number}", *INTERVAL)
            copies.append(stack.enter_context(ConsumerProcess(kafka.bootstrap, group, name, *arguments, under=RUN)))
        for copy in copies:
            copy.wait_for("joined")
        for victim in copies[:-1]:
            write()
            until(lambda: set(handled()) == written, "every message is handled")
            pid = victim.process.pid
            (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            os.kill(int(child), signal.SIGKILL)
            assert victim.wait() == 128 + signal.SIGKILL
        write()
        until(lambda: set(handled()) == written, "every message is handled")
        copies[-1].signal(signal.SIGTERM)
        assert copies[-1].wait() == 0
        again = len(handled()) - len(written)
    with marshal_py.connect(kafka.bootstrap) as marshal:
        events = list(marshal.group(group).advisories())
    assert [event.text for event in events if event.kind == "died"] == ["signal 9 (SIGKILL)"] * (COPIES - 1)
    assert not [event for event in events if event.kind == "evicted"]
    print(f"{again} of {len(written)} messages were delivered again after {COPIES - 1} kills")
