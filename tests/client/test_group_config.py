"""A consumer that creates its group with settings, and what it may not bring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

import marshal_py
from marshal_py import GroupConfig
from marshal_py.errors import InvalidOption
from marshal_py.transport.memory import MemoryTransport
from marshal_py.transport.memory_broker import MemoryBroker

CONFIG = GroupConfig(policy="members", max_members=2, members=["m1", "m2"])


@pytest.fixture
def marshal() -> Iterator[marshal_py.Marshal]:
    broker = MemoryBroker()
    broker.create_topic("orders", 2)
    with marshal_py.connect(MemoryTransport(broker), coordination_partitions=1) as connected:
        yield connected


def test_the_first_consumer_creates_the_group(marshal: marshal_py.Marshal) -> None:
    with marshal.consumer("billing", ["orders"], member="m1", group_config=CONFIG) as consumer:
        while not consumer.claims():
            consumer.fetch(1, expires_s=0.1)
        found = marshal_py.group(marshal, "billing").info()
        assert (found["policy"], found["member_list"]) == ("members", ["m1", "m2"])
        assert found["missing_members"] == ["m2"]
        wrong = [
            ({"member": None}, "name one of m1, m2"),
            ({"group_config": GroupConfig(policy="blocks", max_members=2)}, "delete the group"),
            ({"group_config": GroupConfig(policy="members", max_members=3)}, "only the members"),
        ]
        for options, reason in wrong:
            with pytest.raises(InvalidOption, match=reason):
                marshal.consumer("billing", ["orders"], **{"member": "m2", **options})  # type: ignore[arg-type]


def test_consumers_of_a_lower_priority_number_come_first(marshal: marshal_py.Marshal) -> None:
    """PROTOCOL.md A10, with what `Group.info` says."""
    config = GroupConfig(policy="prioritized", priority_groups=["jobs"])

    def join(priority: int, **options: object) -> marshal_py.Consumer:
        return marshal.consumer(
            "billing", ["orders"], group_config=config, priority_group="jobs", priority=priority, **options
        )  # type: ignore[call-overload]

    def wait_for(*consumers: int) -> None:
        while [len(one.claims()) for one in running] != list(consumers):
            for one in running:
                one.fetch(1, expires_s=0.05)

    with join(5) as last:
        running = [last]
        wait_for(2)
        found = marshal_py.group(marshal, "billing").info()
        assert (found["policy"], found["priority_groups"]) == ("prioritized", [{"name": "jobs"}])
        assert [(one["priority_group"], one["priority"]) for one in found["members"]] == [("jobs", 5)]
        with join(0, max_claims=1) as first:
            running = [last, first]
            wait_for(1, 1)
        running = [last]
        wait_for(2)
        for options, reason in (({"priority_group": None}, "priority group jobs"), ({"priority": 10}, "from 0 to 9")):
            with pytest.raises(InvalidOption, match=reason):
                marshal.consumer("billing", ["orders"], **{"priority_group": "jobs", **options})  # type: ignore[arg-type]


def test_a_running_group_cannot_become_partitioned(marshal: marshal_py.Marshal) -> None:
    with marshal.consumer("billing", ["orders"]), pytest.raises(InvalidOption, match="cannot become this one"):
        marshal.consumer("billing", ["orders"], member="m1", group_config=CONFIG)


def test_settings_that_contradict_each_other_are_refused_before_anything_is_sent(marshal: marshal_py.Marshal) -> None:
    with pytest.raises(InvalidOption, match="to how many members"):
        marshal.consumer("billing", ["orders"], member="m1", group_config=GroupConfig(policy="members"))


def test_a_standby_is_told_when_it_is_active(marshal: marshal_py.Marshal) -> None:
    """The callbacks of both consumers, in their order, while an exclusive member changes."""
    told: list[str] = []
    arrived = threading.Semaphore(0)

    def tell(what: str) -> Callable[[], None]:
        def call() -> None:
            told.append(what)
            arrived.release()

        return call

    def join(name: str) -> marshal_py.Consumer:
        return marshal.consumer(
            "billing",
            ["orders"],
            member="m1",
            group_config=GroupConfig(policy="members", max_members=2, members=["m1"]),
            on_activated=tell(f"{name} is active"),
            on_deactivated=tell(f"{name} is not"),
        )

    with join("one") as one:
        assert arrived.acquire(timeout=60)
        with join("two"):
            one.stop()
            assert all(arrived.acquire(timeout=60) for _ in range(2))
            assert (told[0], sorted(told[1:])) == ("one is active", ["one is not", "two is active"])
        assert arrived.acquire(timeout=60)
    assert told[3:] == ["two is not"]
