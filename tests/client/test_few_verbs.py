"""What a consumer can be asked: few names, the same on both fronts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from marshal_py import Consumer, ConsumerClosed, stop_on_signals
from marshal_py.aio import AsyncConsumer
from marshal_py.testing import MemoryCluster

RECEIVING = {"fetch", "next", "consume", "process"}
ANSWERS = {"complete", "message", "flush"}
POSITIONS = {"seek", "pause", "resume"}
STATE = {"info", "cached_info", "events", "healthy"}
ENDS = {"stop", "drain"}
VERBS = RECEIVING | ANSWERS | POSITIONS | STATE | ENDS


def public(kind: type[Any]) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("front", "own"), [(Consumer, set()), (AsyncConsumer, {"double_ack"})])
def test_a_consumer_has_these_verbs_and_no_others(front: type[Any], own: set[str]) -> None:
    """Who adds one needs a reason that outweighs one more question: which of these shall I use?

    `AsyncConsumer.double_ack` is awaited: that of a message would block the event loop.
    """
    assert public(front) == VERBS | own
    assert len(VERBS | own) <= 17


@pytest.mark.parametrize("receive", [Consumer.fetch, Consumer.next])
def test_a_signal_ends_a_loop_without_an_end_and_goes_no_further(receive: Callable[[Consumer], object]) -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce("orders", b"1")
        marshal = cluster.connect()
        with marshal.consumer("billing", ["orders"], start="earliest") as consumer:
            received = 0
            with stop_on_signals(consumer, signals=[signal.SIGTERM]):
                while True:
                    receive(consumer)
                    received += 1
                    signal.raise_signal(signal.SIGTERM)
            assert received == 1
            with pytest.raises(ConsumerClosed, match="asked to stop"):
                receive(consumer)


def test_an_end_that_no_signal_has_caused_goes_on() -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        consumer = cluster.connect().consumer("billing", ["orders"])
        consumer.drain()
        with pytest.raises(ConsumerClosed, match="drained"), stop_on_signals(consumer):
            consumer.fetch()
