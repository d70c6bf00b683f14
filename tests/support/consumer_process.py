"""A consumer in a process of its own, for tests that kill, stop or signal it. It prints what it does as JSON lines.

    python -m tests.support.consumer_process SERVERS GROUP TOPIC [--delivery ...] [--hold] [--exit-after N]
    [--client-id ID]

--hold: acks nothing. --exit-after N: after N messages the interpreter ends without stop(). SIGTERM ends the iteration.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading

import marshal_py

TALKING = threading.Lock()


def say(event: str, **fields: object) -> None:
    with TALKING:  # callbacks come from another thread
        print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("servers", "group", "topic"):
        parser.add_argument(name)
    parser.add_argument("--delivery", default="at_least_once")
    parser.add_argument("--client-id", default="hand")
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--exit-after", type=int, default=0)
    given = parser.parse_args()
    marshal = marshal_py.connect(given.servers, client_id=given.client_id)
    consumer = marshal.consumer(
        given.group,
        [given.topic],
        delivery=given.delivery,
        start="earliest",
        heartbeat_interval_s=1.0,
        on_claim=lambda claim: say("claim", partition=claim.partition),
        on_lost=lambda claim, reason: say("lost", partition=claim.partition, reason=reason),
    )
    marshal_py.stop_on_signals(consumer)
    say("joined", session=consumer.cached_info().session)
    for seen, message in enumerate(consumer, 1):
        say("message", partition=message.partition, offset=message.offset, epoch=message.token.epoch)
        if not given.hold:
            message.ack()
        if seen == given.exit_after:
            say("exits")
            sys.exit(0)
    marshal.close()
    say("stopped")


if __name__ == "__main__":
    main()
