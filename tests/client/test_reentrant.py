"""Calls inside another call of the same thread: by signal handlers, callbacks of librdkafka, `__del__`.

What would wait for the call that it is inside of, or change what that one is changing, is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from marshal_py import Consumer, Marshal
from marshal_py.errors import ReentrantCall
from tests.support.client_fixtures import MemoryTestCluster, collect, joined, owns, places, until

TAKING = ("fetch", "next", "iteration", "flush")
WAITING = ("stop", "drain", "info", "close", "consumer")
LOOKING = ("cached_info", "metrics", "pause", "resume")


def verbs(marshal: Marshal, consumer: Consumer, topic: str) -> dict[str, Callable[[], Any]]:
    tps = [(topic, 0)]
    return {
        "fetch": lambda: consumer.fetch(1, expires_s=0),
        "next": lambda: consumer.next(0),
        "iteration": lambda: next(iter(consumer)),
        "flush": consumer.flush,
        "stop": consumer.stop,
        "drain": lambda: consumer.drain(0),
        "info": consumer.info,
        "close": marshal.close,
        "consumer": lambda: marshal.consumer("another", [topic]),
        "cached_info": consumer.cached_info,
        "metrics": marshal.metrics,
        "pause": lambda: consumer.pause(tps),
        "resume": lambda: consumer.resume(tps),
    }


def outcome(call: Callable[[], Any]) -> str:
    """ "" if it works, else the error and where it says to be."""
    try:
        call()
    except ReentrantCall as error:
        return f"{error.verb} inside {error.inside}"
    return ""


def refused(reported: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in reported.items() if text}


def named(names: Iterable[str], place: str) -> dict[str, str]:
    return {name: f"{name} inside {place}" for name in names}


class Inside:
    """Runs calls once, on the thread and at the place of a call of `name`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, *calls: Callable[[], Any]) -> None:
        self.reported: list[str] = []
        self.done = threading.Event()
        self._waiting, self._call = list(calls), getattr(place, name)
        monkeypatch.setattr(place, name, self)

    def __call__(self, *arguments: Any) -> Any:
        while self._waiting:
            self.reported.append(outcome(self._waiting.pop(0)))
        self.done.set()
        return self._call(*arguments)


def test_a_thread_that_holds_the_lock_is_refused_by_name(memory: MemoryTestCluster) -> None:
    """A signal handler may interrupt its thread there. The lock is reentrant: it would change what is being changed."""
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition")
        calls = verbs(marshal, consumer, topic)
        with marshal._context.lock:
            reported = {name: outcome(call) for name, call in calls.items()}
        place = "a call of the same thread that holds the Marshal's lock"
        assert refused(reported) == named((*TAKING, *WAITING, *LOOKING), place)
        assert not consumer.cached_info().closed


def test_a_stop_that_is_refused_is_asked_for(memory: MemoryTestCluster) -> None:
    """A signal handler that came at the wrong moment: the iteration went on, as if nobody had asked."""
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition")
        with marshal._context.lock, pytest.raises(ReentrantCall):
            consumer.stop()
        assert list(consumer) == []


@pytest.mark.parametrize("outer", ["fetch", "iteration"])
def test_a_callback_of_the_data_client_may_look_and_not_fetch(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, outer: str
) -> None:
    """stats_cb and error_cb run inside the poll of whoever fetches."""
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition")
        calls = verbs(marshal, consumer, topic)
        names = (*TAKING, *LOOKING, "info")
        inside = Inside(monkeypatch, consumer._driver.source, "poll", *(calls[name] for name in names))
        memory.fill(topic, 0, 2)
        if outer == "fetch":
            assert places(collect(consumer, 2)) == [(0, 0), (0, 1)]
        else:
            messages = iter(consumer)
            assert [next(messages).offset, next(messages).offset] == [0, 1]
        reported = dict(zip(names, inside.reported, strict=True))
        assert refused(reported) == named(TAKING, f"{outer} of the same consumer")


def test_what_waits_for_the_background_thread_is_refused_on_it(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logging handler or a `__del__` may run there. It waited for its own thread until the timeout."""
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition")
        calls = verbs(marshal, consumer, topic)
        names = (*TAKING, *WAITING, *LOOKING)
        inside = Inside(monkeypatch, marshal._context.coordination, "poll", *(calls[name] for name in names))
        assert inside.done.wait(40)
        reported = dict(zip(names, inside.reported, strict=True))
        place = "the background thread of the Marshal, which sends the heartbeats"
        assert refused(reported) == named((*TAKING, *WAITING), place)
        assert not consumer.cached_info().closed


def test_a_stop_may_be_requested_anywhere(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition")
        Inside(monkeypatch, consumer._driver.source, "poll", consumer._ending.request_stop)
        assert not consumer.fetch(1, expires_s=40)
        assert consumer._ending.stopping
