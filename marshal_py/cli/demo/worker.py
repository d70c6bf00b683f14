"""The demo's consumer process: a user's program plus a journal for the judge. Decides nothing."""

from __future__ import annotations

from typing import Any, Final

from marshal_py.cli.demo.journal import Claimed, Delivered, Joined, Journal, Lost, Reported, now
from marshal_py.cli.demo.orders import checksum_fits
from marshal_py.cli.demo.process import Task, run_task
from marshal_py.client.consumer import Consumer
from marshal_py.client.marshal import connect
from marshal_py.client.signals import stop_on_signals
from marshal_py.client.values.info import ClaimInfo

# The callbacks journal claims and losses; a claim that is being revoked is lost within milliseconds here.
JOURNALED_ELSEWHERE: Final = frozenset({"claimed", "lost", "released", "revoking", "joined", "topology"})


def consume(task: Task, journal: Journal) -> None:
    def claimed(info: ClaimInfo) -> None:
        journal.write(Claimed(now(), info.partition, info.token.epoch))

    def lost(info: ClaimInfo, reason: str) -> None:
        journal.write(Lost(now(), info.partition, reason))

    # earliest: messages written before a partition's first claim count too.
    options: dict[str, Any] = {
        "delivery": task.delivery,
        "start": "earliest",
        "on_claim": claimed,
        "on_lost": lost,
        "heartbeat_interval_s": task.interval_s,
    }
    with connect(
        task.settings,
        client_id=task.name,
        coordination_topic=task.coordination_topic,
        last_will="process" if task.last_will else "auto",
    ) as marshal:
        with marshal.consumer(task.group, [task.topic], **options) as consumer, stop_on_signals(consumer):
            journal.write(Joined(now()))
            for message in consumer:
                journal.write(
                    Delivered(
                        now(),
                        message.partition,
                        message.offset,
                        (message.key or b"").decode(),
                        checksum_fits(message.key, message.value),
                        str(message.token),
                    )
                )
                message.ack()
                report_events(consumer, journal)
        report_events(consumer, journal)


def report_events(consumer: Consumer, journal: Journal) -> None:
    for event in consumer.events():
        if event.kind not in JOURNALED_ELSEWHERE:
            journal.write(Reported(now(), event.kind, event.text))


if __name__ == "__main__":
    run_task(consume)
