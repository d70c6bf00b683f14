"""A service that charges orders at least once. Start it as often as you like; stop it with SIGTERM or ctrl-C.

    python examples/at_least_once.py localhost:9092 orders

A few orders come again after a crash. payments.py shows how each has its effect once nevertheless.
"""

import sys

import marshal_py


def charge(order: marshal_py.Message) -> None:
    """Your code. The topic, partition and offset tell an order that comes again, the token tells a later owner."""
    print(f"charging {order.value.decode(errors='replace')} (token {order.token})", flush=True)


def main(servers: str, topic: str) -> None:
    with (
        marshal_py.connect(servers) as marshal,
        marshal.consumer("billing", [topic], start="earliest") as consumer,
        marshal_py.stop_on_signals(consumer),
    ):
        for message in consumer:
            charge(message)
            message.ack()


if __name__ == "__main__":
    main(*sys.argv[1:3])
