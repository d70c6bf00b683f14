"""A process whose threads cannot run: the consumer is fenced, and says why."""

from __future__ import annotations

import ctypes

import pytest

from marshal_py.client.connection import RECENT_MS, STALL_MS_MIN, Stalls
from tests.support.client_fixtures import INTERVAL_S, MemoryTestCluster, joined, owns, until


def test_what_is_waited_for_is_no_stall() -> None:
    stalls = Stalls()
    stalls.waits(1_100)
    assert stalls.recent_ms(1_050) == 0
    stalls.woke(1_100 + STALL_MS_MIN - 1)
    assert (stalls.recent_ms(1_400), stalls.total_ms, stalls.longest_ms) == (0, 0, 0)


def test_a_stall_is_reported_while_it_lasts_and_just_after() -> None:
    stalls = Stalls()
    stalls.waits(1_100)
    assert stalls.recent_ms(3_500) == 2_400, "another thread asks before it runs again"
    stalls.woke(3_500)
    assert stalls.recent_ms(3_501) == 2_400
    stalls.waits(3_600)
    stalls.woke(3_600)
    assert stalls.recent_ms(3_500 + RECENT_MS) == 0
    stalls.waits(9_000)
    stalls.woke(10_000)
    assert (stalls.total_ms, stalls.longest_ms) == (3_400, 2_400)


def test_a_call_into_c_that_keeps_the_interpreter_is_named(memory: MemoryTestCluster) -> None:
    """PyDLL keeps the interpreter's lock during a call: no other thread of the process runs."""
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        until(lambda: marshal.metrics().consumers[0].lease_left_ms > 0, "the lease is valid")
        [*consumer.events()]
        ctypes.PyDLL(None).usleep(round(2.5 * INTERVAL_S * 1e6))
        fenced = until(lambda: [event for event in consumer.events() if event.kind == "fenced"], "the fence falls")
        assert "the thread that heartbeats did not run for" in fenced[0].text
        assert marshal.metrics().longest_stall_ms >= INTERVAL_S * 1_000
        assert marshal.metrics().stalled_ms >= marshal.metrics().longest_stall_ms


def test_a_fence_for_another_reason_says_nothing_of_it(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stall of less than a third of the interval costs no heartbeat."""
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        [*consumer.events()]
        monkeypatch.setattr(marshal._context.stalls, "recent_ms", lambda _: 300)
        memory.broker.queue_full = True
        fenced = until(lambda: [event for event in consumer.events() if event.kind == "fenced"], "the fence falls")
        assert fenced[0].text.startswith("no heartbeat came back for ")
        memory.broker.queue_full = False
