"""A broker to try things on where there is no Kafka, in a terminal of its own. It keeps nothing.

    python examples/broker.py orders

It creates the topics that you name, with twelve partitions each, and prints its address. Stop it with ctrl-C.
"""

import signal
import sys
import threading

from marshal_py.testing import EmbeddedCluster


def main(*topics: str) -> None:
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    with EmbeddedCluster() as cluster:
        for topic in topics:
            cluster.create_topic(topic, 12)
        print(f"export MARSHAL_BOOTSTRAP_SERVERS={cluster.bootstrap_servers}", flush=True)
        over.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
