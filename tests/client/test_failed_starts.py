"""A connection or a consumer whose start fails leaves nothing open."""

from __future__ import annotations

from typing import Any, Final

import pytest

import marshal_py
from marshal_py.client import connection
from marshal_py.client import marshal as starting
from marshal_py.client.driver import consumer_driver
from marshal_py.errors import AccessDenied, ClusterUnreachable, InvalidOption
from marshal_py.protocol.member.member_state import Wanted
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.memory import MemoryBroker, MemoryTransport

UNREACHABLE: Final = ClusterUnreachable("memory", "metadata of orders", "the test says so")


class Noting(MemoryTransport):
    """Notes which of its logs and sources are open. `leaders`: whether sources learn their leaders."""

    def __init__(self) -> None:
        super().__init__(MemoryBroker())
        self.broker.create_topic("orders", 1)
        self.open: list[str] = []
        self.leaders = True

    def _noted(self, made: Any, what: str) -> Any:
        close, learn = made.close, getattr(made, "learn_leaders", None)
        self.open.append(what)

        def closes(*arguments: float) -> None:
            if what in self.open:
                self.open.remove(what)
            close(*arguments)

        def learns(*arguments: Any) -> None:
            assert learn is not None
            if not self.leaders:
                raise UNREACHABLE
            learn(*arguments)

        made.close, made.learn_leaders = closes, learns
        return made

    def log(self, *arguments: Any, **named: Any) -> Any:
        return self._noted(super().log(*arguments, **named), "log")

    def source(self, *arguments: Any, **named: Any) -> Any:
        return self._noted(super().source(*arguments, **named), "source")


def test_a_consumer_that_the_settings_refuse_leaves_no_source() -> None:
    transport = Noting()
    with marshal_py.connect(transport) as marshal:
        marshal.create_group("billing", marshal_py.GroupConfig(policy="balanced"))
        with pytest.raises(InvalidOption, match="group 'billing' has the policy balanced"):
            marshal.consumer("billing", ["orders"], release_behind_s=5.0)
        assert "source" not in transport.open
        transport.leaders = False
        with pytest.raises(ClusterUnreachable, match="the test says so"):
            marshal.consumer("billing", ["orders"])
        assert "source" not in transport.open
        transport.leaders = True
        marshal.consumer("billing", ["orders"]).stop()
        assert "source" not in transport.open


def test_a_connection_without_its_witness_thread_leaves_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(starting.last_wills, "check", lambda *_, reachable: "process")
    monkeypatch.setattr(starting, "LastWills", cannot)
    transport = Noting()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        marshal_py.connect(transport)
    assert transport.open == []


def test_errors_that_nobody_asks_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that the cluster refuses is asked again and again, while a program may not ask for messages at all."""
    denied = AccessDenied("User:test", "Describe", "topic", "orders")
    with marshal_py.connect(Noting()) as marshal, marshal.consumer("billing", ["orders"]) as consumer:
        driver = consumer._driver

        def refuse(_: object) -> None:
            raise denied

        monkeypatch.setattr(driver, "_starts_of", refuse)
        for _ in range(2 * consumer_driver.ERRORS_KEPT):  # the worker may ask, too
            driver._to_resolve = [Wanted(TopicPartition("orders", 0), False)]
            steps = driver._resolve()
            with pytest.raises(StopIteration):
                connection.next_step(steps, next(steps))
        assert len(driver.pending_errors) == consumer_driver.ERRORS_KEPT
        with pytest.raises(AccessDenied):
            consumer.fetch(1, expires_s=0)
        driver.pending_errors.clear()
