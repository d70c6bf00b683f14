"""What fetch, next and consume ask for if the caller says nothing, on both fronts: without a cluster."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from marshal_py import Consumer
from marshal_py.aio import AsyncConsumer
from marshal_py.client.values.requests import ConsumeRequest, Request

FRONTS = [Consumer, AsyncConsumer]


class Asked(Exception):
    """Ends a call where its waiting would begin, with the request that it has made of its arguments."""

    def __init__(self, request: Request | ConsumeRequest) -> None:
        self.request = request


class Recorder:
    """Stands for the consumer: what a call asks for ends it."""

    def _call(self, call: object, request: Request) -> None:
        raise Asked(request)

    def _first(self, request: Request) -> None:
        raise Asked(request)

    def _each(self, request: Request) -> None:
        raise Asked(request)

    def _consume(self, request: ConsumeRequest, handler: object, on_error: object) -> None:
        raise Asked(request)


def asked(verb: Callable[..., Any], *arguments: Any) -> Request | ConsumeRequest:
    """What a verb asks for with these arguments alone."""

    async def call() -> None:
        await verb(Recorder(), *arguments)  # a verb that is no coroutine function has ended before

    with pytest.raises(Asked) as caught:
        asyncio.run(call())
    return caught.value.request


@pytest.mark.parametrize("front", FRONTS)
def test_a_fetch_of_nothing_said(front: Any) -> None:
    """ADR-37: "For requests with expires > 30s, heartbeats should be enabled by default"
    ADR-37: "Note that while max_messages and max_bytes are described as optional at least one of them is required."
    """
    everything = Request(max_messages=1_000, max_bytes=None, min_messages=1, expires_s=30.0, idle_heartbeat_s=None)
    assert asked(front.fetch) == everything
    assert asked(front.next) == everything._replace(max_messages=1)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("arguments", [(), (None,), (print,)], ids=["nothing", "no handler", "a handler"])
def test_a_consume_of_nothing_said(front: Any, arguments: tuple[Any, ...]) -> None:
    """ADR-37: "expires - default 30s, minimum 1s"
    ADR-37: "If no options is provided, clients should use a default value for max_messages and not set max_bytes."
    ADR-37: "If no option is provided, the default value for max_messages should be used, and max_bytes should not be
    set."
    ADR-37: "max_messages - depends on a client, probably between 100 and 1000 messages"
    ADR-37: "max_bytes - not set, use max_messages if not provided"
    ADR-37: "idle_heartbeat - default 1/2 of expires capping at 30s, minimum 500ms, maximum 30s"
    ADR-37: "threshold_messages - 50% of max_messages"
    """
    assert asked(front.consume, *arguments) == ConsumeRequest(
        limit=1_000, threshold=500, in_bytes=False, expires_s=30.0, idle_heartbeat_s=15.0
    )


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("verb", ["fetch", "next", "consume"])
def test_the_signatures_say_the_same(front: Any, verb: str) -> None:
    """Editors and help() show them. ADR-37: "expires - default 30s, minimum 1s" """
    defaults = {name: one.default for name, one in inspect.signature(getattr(front, verb)).parameters.items()}
    assert defaults.pop("expires_s") == 30.0
    assert defaults.pop("self") is inspect.Parameter.empty
    assert defaults.pop("min_messages", 1) == 1
    assert {name for name, default in defaults.items() if default is not None} == set()
