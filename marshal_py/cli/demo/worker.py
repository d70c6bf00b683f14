"""One consumer of the demo, in a process of its own. It works like a user's program, and tells on stdout what happens.

The demo writes its task on stdin and keeps that open: when the demo dies, its consumers notice and end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from marshal_py.client.marshal import connect
from marshal_py.client.signals import stop_on_signals
from marshal_py.client.values.info import ClaimInfo
from marshal_py.errors import MarshalError
from marshal_py.protocol.wire.identity import NONE

ORPHANED: Final = 70
STDOUT: Final = 1

Kind = Literal["joined", "claimed", "lost", "delivered", "written"]


class Plan(Struct, frozen=True, kw_only=True):
    """Where the demo runs and for how long."""

    settings: dict[str, Any]
    topic: str
    group: str
    coordination_topic: str
    delivery: Literal["at_least_once", "at_most_once"]
    seconds: float
    last_will: bool = False


class Entry(Struct, frozen=True):
    """What happened `at` a moment of the monotonic clock: a handler began with a message ("delivered", `number` is its
    offset), the cluster acknowledged one ("written"), a claim began (`number`: its epoch) or ended (`text`: why)."""

    kind: Kind
    at: float
    partition: int = NONE
    number: int = NONE
    text: str = ""


def tell(kind: Kind, partition: int = NONE, number: int = NONE, text: str = "") -> None:
    """Any thread may tell: a line is one write, which a pipe keeps whole."""
    os.write(STDOUT, msgspec.json.encode(Entry(kind, time.monotonic(), partition, number, text)) + b"\n")


def consume(name: str, plan: Plan) -> None:
    """Acks every message, after it has told of it."""

    def claimed(info: ClaimInfo) -> None:
        tell("claimed", info.partition, info.token.epoch)

    def lost(info: ClaimInfo, reason: str) -> None:
        tell("lost", info.partition, text=reason)

    last_will: Literal["process", "auto"] = "process" if plan.last_will else "auto"
    with (
        connect(
            plan.settings, client_id=name, coordination_topic=plan.coordination_topic, last_will=last_will
        ) as marshal,
        marshal.consumer(
            plan.group,
            [plan.topic],
            delivery=plan.delivery,
            start="earliest",  # messages written before a partition's first claim count too
            on_claim=claimed,
            on_lost=lost,
        ) as consumer,
        stop_on_signals(consumer),
    ):
        tell("joined")
        for message in consumer:
            tell("delivered", message.partition, message.offset)
            message.ack()


def _end_with_parent() -> None:
    # Reads the file descriptor: a daemon thread that holds sys.stdin's lock would abort the interpreter's exit.
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)


if __name__ == "__main__":
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[str, Plan])
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    try:
        consume(*task)
    except MarshalError as failed:
        sys.exit(str(failed))
