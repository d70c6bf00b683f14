"""What was not closed says so by a ResourceWarning, and a Marshal is closed all the same when the program ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from marshal_py.embedded import Broker
from tests.support.client_fixtures import ROOT

LEFT_OPEN = """
import threading
import marshal_py
from marshal_py.embedded import Broker

broker = Broker(topics={"__marshal": 1, "orders": 1})
broker.start()
marshal = marshal_py.connect(broker.bootstrap_servers, client_id="host-1")
claimed = threading.Event()
consumer = marshal.consumer(
    "billing", ["orders"], on_claim=lambda info: claimed.set(), on_lost=lambda info, reason: print(reason)
)
assert claimed.wait(60)
"""


@pytest.mark.parametrize("flags", [["-W", "default"], ["-W", "error"]], ids=["shown", "as errors"])
def test_a_program_that_closes_nothing_is_told_and_releases_its_claims(flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *flags, "-c", LEFT_OPEN], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    assert done.stdout == "stopped\n"
    shown = "ResourceWarning: Marshal(" in done.stderr and "client_id='host-1'" in done.stderr
    assert shown is (flags[1] == "default")


def test_a_program_that_does_not_ask_is_not_told() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "ResourceWarning" not in done.stderr


def test_an_embedded_broker_that_was_not_closed() -> None:
    brokers = [Broker(), Broker(), Broker()]
    brokers[0].start()
    brokers[0].close()
    brokers[1].start()
    del brokers[2], brokers[0]
    with pytest.warns(ResourceWarning, match="embedded Broker was not closed"):
        brokers.clear()
