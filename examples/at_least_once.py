"""A service that charges orders at least once. Start it as often as you like; stop it with SIGTERM or ctrl-C.

    python examples/at_least_once.py localhost:9092 orders
"""

import sys

import marshal_py


def charge(order: bytes, fence: str) -> None:
    """Your code. `fence` makes a late writer harmless: let the store refuse smaller ones."""
    print(f"charging {order.decode(errors='replace')} (fence {fence})", flush=True)


def main(servers: str, topic: str) -> None:
    with (
        marshal_py.connect(servers) as marshal,
        marshal.consumer("billing", [topic], start="earliest") as consumer,
        marshal_py.stop_on_signals(consumer),
    ):
        for message in consumer:
            charge(message.value, fence=str(message.token))
            message.ack()


if __name__ == "__main__":
    main(*sys.argv[1:3])
