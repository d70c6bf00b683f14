"""A service that charges orders at least once. Start it as often as you like; stop it with SIGTERM or ctrl-C.

    python examples/at_least_once.py localhost:9092 orders

After a crash a few orders are delivered again. payments.py shows how each still takes effect only once.
"""

import sys

import marshal_py


def charge(order: marshal_py.Message) -> None:
    """Your code. Topic, partition and offset identify an order that comes again; a greater token is a later owner's."""
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
