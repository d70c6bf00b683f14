"""What the tests of the command line share: an embedded broker with topics, a shell on it, a group that has worked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from marshal_py.client.marshal import connect
from marshal_py.transport.embedded import Broker
from tests.cli.shell import Shell


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    topics = {
        "orders": 4,
        "empty": 2,
        "full": 1,
        "tokens": 2,
        "__marshal": 16,
        "__unused": 16,
        "__copy": 16,
        "__small": 2,
        "__restored": 16,
    }
    with Broker(topics=topics) as running:
        yield running


@pytest.fixture(scope="module")
def shell(broker: Broker) -> Shell:
    return Shell(broker.bootstrap_servers)


@pytest.fixture(scope="module")
def billing(shell: Shell) -> str:
    """A group that has handled every message of `orders` that was there, and left."""
    assert shell.json("produce", "orders", stdin=b"".join(b"%d\n" % number for number in range(20)))["written"] == 20
    with (
        connect({"bootstrap.servers": shell.servers, "log_level": 0}) as marshal,
        marshal.consumer("billing", ["orders"], start="earliest") as consumer,
    ):
        for count, message in enumerate(consumer, 1):
            message.ack()
            if count == 20:
                break
    return "billing"
