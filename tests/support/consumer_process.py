"""A consumer in a process of its own, for tests that kill, stop or signal it. It prints what it does as JSON lines.

    python -m tests.support.consumer_process SERVERS GROUP TOPIC [--delivery ...] [--hold] [--exit-after N]
    [--client-id ID] [--interval S] [--last-will auto|process|off] [--die-after N --how exit|segfault]

--hold: acks nothing. --exit-after N: after N messages the interpreter ends without stop(). --die-after N: after N
messages the process dies without a chance to leave. SIGTERM ends the iteration.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable

import marshal_py

TALKING = threading.Lock()


def say(event: str, **fields: object) -> None:
    with TALKING:  # callbacks come from another thread
        print(json.dumps({"event": event, **fields}), flush=True)


DEATHS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(3),
    "segfault": faulthandler._sigsegv,  # type: ignore[attr-defined]  # there for tests
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("servers", "group", "topic"):
        parser.add_argument(name)
    parser.add_argument("--delivery", default="at_least_once")
    parser.add_argument("--client-id", default="hand")
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--exit-after", type=int, default=0)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--last-will", default="auto")
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--how", choices=tuple(DEATHS), default="exit")
    given = parser.parse_args()
    marshal = marshal_py.connect(given.servers, client_id=given.client_id, last_will=given.last_will)
    consumer = marshal.consumer(
        given.group,
        [given.topic],
        delivery=given.delivery,
        start="earliest",
        heartbeat_interval_s=given.interval,
        on_claim=lambda claim: say("claim", partition=claim.partition),
        on_lost=lambda claim, reason: say("lost", partition=claim.partition, reason=reason),
    )
    marshal_py.stop_on_signals(consumer)
    say("joined", session=consumer.cached_info().session)
    for seen, message in enumerate(consumer, 1):
        say("message", partition=message.partition, offset=message.offset, epoch=message.token.epoch)
        if not given.hold:
            message.ack()
        if seen == given.die_after:
            DEATHS[given.how]()
        if seen == given.exit_after:
            say("exits")
            sys.exit(0)
    marshal.close()
    say("stopped")


if __name__ == "__main__":
    main()
