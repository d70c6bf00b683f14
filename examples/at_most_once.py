"""A service that sends each mail at most once: it would rather lose a mail than send it twice. Works in batches.

python examples/at_most_once.py localhost:9092 mails
"""

import sys

import marshal_py


def send(mail: bytes) -> None:
    """Your code."""
    print(f"sending {mail.decode(errors='replace')}", flush=True)


def main(servers: str, topic: str) -> None:
    with (
        marshal_py.connect(servers) as marshal,
        marshal.consumer("mailer", [topic], delivery="at_most_once", start="earliest") as consumer,
        marshal_py.stop_on_signals(consumer),
    ):
        while True:  # until a signal
            batch = consumer.fetch(100, expires_s=0.5)
            for part in batch.parts:
                for mail in part.values:
                    send(mail)
            batch.ack()


if __name__ == "__main__":
    main(*sys.argv[1:3])
