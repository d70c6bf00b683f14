"""Each request of an admin's call to the cluster fails once, with each error of ports.py: what does the call do then?

It raises an error of the library, or does without the answer; it closes what it opened; where Kafka refused, no topic
is changed; and the same call succeeds afterwards, unless what was asked for may be done already. Over a cluster in
memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

import marshal_py
from marshal_py import GroupConfig
from marshal_py.admin.watch import Watch
from marshal_py.errors import AccessDenied, ClusterUnreachable, MarshalError, TopicRefused
from marshal_py.log.observer import Observer
from marshal_py.topics.topic import Topic
from marshal_py.transport.memory import MemoryBroker, MemoryTransport

UNREACHABLE: Final = ClusterUnreachable("memory", "an answer", "none came")
DENIED: Final = AccessDenied("User:alice", "Describe", "topic", "orders")
REFUSED: Final = TopicRefused("orders", "a policy forbids it")
CHANGES: Final = ("create", "grow", "alter", "delete")  # of topics: who may not, may not from the first request on
ERRORS: Final[dict[str, tuple[MarshalError, ...]]] = {
    **dict.fromkeys(("describe_topic", "partition_count", "bounds", "offsets_at", "bounds_and_times", "settings"),
                    (UNREACHABLE, DENIED)),
    **dict.fromkeys(("topics", "describe_cluster", "delete_records"), (UNREACHABLE,)),
    **dict.fromkeys(CHANGES, (UNREACHABLE, DENIED, REFUSED)),
    **dict.fromkeys(("read", "write"), (UNREACHABLE, DENIED)),
    "flush": (UNREACHABLE,),
}  # fmt: skip


class Port:
    """An interface to the cluster whose n-th request of a kind fails. Requests of the background thread do not."""

    def __init__(self, real: Any, faults: Faults) -> None:
        self.real, self.faults, self.during = real, faults, faults.on
        self.closed = False
        faults.ports.append(self)

    def close(self, *arguments: float) -> None:
        self.closed = True
        self.real.close(*arguments)

    def topic_admin(self) -> Port:
        return self

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if name not in ERRORS:
            return found

        def request(*arguments: Any, **named: Any) -> Any:
            if self.during or threading.current_thread() is self.faults.thread:
                self.faults.note(name)
            return found(*arguments, **named)

        return request


class Faults(MemoryTransport):
    """A transport whose request `fails` (its name, which one, and the error) fails while it is `on`."""

    def __init__(self, broker: MemoryBroker, fails: tuple[str, int, MarshalError] | None = None) -> None:
        super().__init__(broker)
        self.on, self.fails = False, fails
        self.thread = threading.current_thread()
        self.ports: list[Port] = []
        self.asked: Counter[str] = Counter()

    def note(self, name: str) -> None:
        if self.on:
            self.asked[name] += 1
            if self.fails is not None and self.fails[:2] == (name, self.asked[name]):
                raise self.fails[2]

    def log(self, *arguments: Any, **named: Any) -> Any:
        return Port(super().log(*arguments, **named), self)

    def reader(self, *arguments: Any) -> Any:
        return Port(super().reader(*arguments), self)

    def writer(self, *arguments: Any) -> Any:
        return Port(super().writer(*arguments), self)

    def admin(self) -> Any:
        return Port(super().admin(), self)


def in_topic(call: Callable[[Topic], Any]) -> Callable[[marshal_py.Marshal], Any]:
    def opened(marshal: marshal_py.Marshal) -> Any:
        with marshal.topic("orders") as topic:
            return call(topic)

    return opened


def watched(marshal: marshal_py.Marshal) -> int:
    with Watch(lambda: Observer(marshal.transport, marshal.coordination_topic), "billing") as watch:
        watch.refresh(whole=True)
        return len(watch.groups())


CALLS: Final[dict[str, Callable[[marshal_py.Marshal], Any]]] = {
    "info": lambda m: m.info().topics,
    "topics": lambda m: m.topics(),
    "create_topic": lambda m: m.create_topic("new").name,
    "update_topic": lambda m: m.update_topic("orders", partitions=3, settings={"retention.ms": "1"}),
    "delete_topic": lambda m: m.delete_topic("users"),
    "groups": lambda m: m.groups(),
    "a group's info": lambda m: m.group("billing").info().group,
    "members": lambda m: m.group("billing").members(),
    "update_group": lambda m: m.create_or_update_group("billing", GroupConfig(policy="balanced")).name,
    "pause": lambda m: m.group("billing").pause(60).released,
    "delete_group": lambda m: m.delete_group("billing"),
    "get": in_topic(lambda topic: topic.get(offset=0, partition=1).value),
    "get by key": in_topic(lambda topic: topic["b"].value),
    "get by time": in_topic(lambda topic: len(topic.get(start_time="1970-01-01T00:00:01Z", batch=9))),
    "a topic's info": in_topic(lambda topic: topic.info().offsets),
    "purge": in_topic(lambda topic: len(topic.purge(keep=0))),
    "delete_key": in_topic(lambda topic: len(topic.delete_key("b"))),
    "watch": watched,
}


def prepared() -> MemoryBroker:
    broker = MemoryBroker()
    broker.create_topic("orders", 2)
    broker.create_topic("users", 1)
    broker.settings["orders"]["cleanup.policy"] = "compact"
    for number, key in enumerate((b"a", b"b")):
        broker.produce("orders", number, key * 3, key, timestamp_ms=2_000 + number)
    return broker


def shape(broker: MemoryBroker) -> dict[str, tuple[int, dict[str, str]]]:
    return {topic: (len(broker.topics[topic]), dict(broker.settings[topic])) for topic in broker.topics}


def attempts(call: Callable[[marshal_py.Marshal], Any]) -> Iterator[tuple[str, int, MarshalError]]:
    """Every request that the call sends, with each error that it may end with."""
    faults = Faults(prepared())
    with marshal_py.connect(faults) as marshal:
        marshal.create_group("billing", GroupConfig(policy="greedy"))
        faults.on = True
        call(marshal)
        faults.on = False
    assert faults.asked, "it asks the cluster"
    for name, count in faults.asked.items():
        for number in range(1, count + 1):
            for error in ERRORS[name][: 1 if name in CHANGES and number > 1 else None]:
                yield name, number, error


@pytest.mark.parametrize("name", CALLS)
def test_each_request_fails_once(name: str) -> None:
    for fails in attempts(CALLS[name]):
        broker = prepared()
        faults = Faults(broker, fails)
        with marshal_py.connect(faults) as marshal:
            marshal.create_group("billing", GroupConfig(policy="greedy"))
            opened, before, faults.on = len(faults.ports), shape(broker), True
            error: MarshalError | None = None
            try:
                CALLS[name](marshal)
            except MarshalError as raised:
                error = raised
            faults.on = False
            assert [port.real for port in faults.ports[opened:] if not port.closed] == [], fails
            if error is not None and error is not UNREACHABLE:  # which may come after what was asked for was done
                assert shape(broker) == before, fails
            if error is not None and (fails[0] not in (*CHANGES, "flush") or error is not UNREACHABLE):
                CALLS[name](marshal)
