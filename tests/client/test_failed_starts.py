"""A connection or a consumer whose start fails leaves nothing open."""

from __future__ import annotations

from typing import Any, Final

import pytest

import marshal_py
from marshal_py.client import marshal as starting
from marshal_py.errors import ClusterUnreachable, InvalidOption
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
