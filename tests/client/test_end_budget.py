"""`drain`, `stop` and `close` while the cluster does not answer: one deadline for all of them together.

The limits that a test does not judge are an hour, so a call that takes the wrong one does not end in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from marshal_py.client import connection, membership
from marshal_py.client.connection import END_TIMEOUT_S, EndBudget
from marshal_py.testing import MemoryCluster
from tests.support.client_fixtures import DEADLINE_S, joined

HOUR_S = 3600.0


def ends(call: Callable[[], object]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return not thread.is_alive()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "END_S_MIN", 0.1)
    monkeypatch.setattr(membership, "END_S_MIN", 0.1)


def test_a_drain_takes_its_time_and_as_much_for_the_release(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LEAVE_TIMEOUT_S", HOUR_S)
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce("orders", b"0")
        consumer = joined(cluster.connect(), "billing", ["orders"])
        assert consumer.next(DEADLINE_S) is not None, "a handler that never answers"
        with cluster.outage():
            assert ends(lambda: consumer.drain(0.2))


def test_a_drain_without_handlers_at_work_does_not_wait_for_them(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LEAVE_TIMEOUT_S", 0.2)
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        consumer = joined(cluster.connect(), "billing", ["orders"])
        with cluster.outage():
            assert ends(lambda: consumer.drain(HOUR_S))


def test_a_close_gets_what_the_stops_have_left(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        marshal = cluster.connect()
        consumers = [joined(marshal, group, ["orders"]) for group in ("billing", "audit")]
        flushes: list[float] = []
        monkeypatch.setattr(marshal._context.coordination, "close", flushes.append)
        with cluster.outage():
            consumers[0].stop(0.2)
            marshal._context.end_budget._until = 0.0 + (marshal._context.end_budget._until or 0.0) - END_TIMEOUT_S
            assert ends(lambda: marshal.close(HOUR_S))
        assert len(flushes) == 1
        assert flushes[0] <= 0.1


@pytest.mark.usefixtures("short")
def test_the_budget_counts_until_an_end_is_answered() -> None:
    now = 100.0
    budget = EndBudget(lambda: now)
    assert budget.deadline(10) == 110
    now = 110
    assert budget.deadline(10) == 120
    now = 118
    assert budget.deadline(10) == 120, "20 s in all"
    now = 125
    assert budget.deadline(10) == 125.1, "the least"
    budget.answered()
    assert budget.deadline(60) == 185, "as the caller says"
    now = 185 + END_TIMEOUT_S
    assert budget.deadline(10) == now + 10, "long ago"


def test_a_stop_that_the_cluster_answers_leaves_the_budget_whole() -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        marshal = cluster.connect()
        joined(marshal, "billing", ["orders"]).stop()
        assert marshal._context.end_budget._until is None


def test_a_second_stop_of_a_consumer_that_has_given_up_is_no_answer(short: None) -> None:
    """The end of a `with` block in its thread, while the main thread stops it: each consumer took all its time then."""
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        marshal = cluster.connect()
        ending = joined(marshal, "billing", ["orders"])._ending
        with cluster.outage():
            for _ in range(2):
                marshal._context.complete(ending.stop(0.1))
            assert marshal._context.end_budget._until is not None
            assert ends(lambda: marshal.close(0.1))
