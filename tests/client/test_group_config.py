"""A consumer that creates its group with settings, and what it may not bring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

import marshal_py
from marshal_py import GroupConfig
from marshal_py.errors import GroupMissing, InvalidOption
from marshal_py.info import PriorityGroupState
from marshal_py.transport.memory import MemoryBroker, MemoryTransport
from tests.support.client_fixtures import until

CONFIG = GroupConfig(policy="members", max_members=2, members=["m1", "m2"])


@pytest.fixture
def broker() -> MemoryBroker:
    broker = MemoryBroker()
    broker.create_topic("orders", 2)
    return broker


@pytest.fixture
def marshal(broker: MemoryBroker) -> Iterator[marshal_py.Marshal]:
    with marshal_py.connect(MemoryTransport(broker), coordination_partitions=1) as connected:
        yield connected


def test_the_first_consumer_creates_the_group(marshal: marshal_py.Marshal) -> None:
    with marshal.consumer("billing", ["orders"], member="m1", group_config=CONFIG) as consumer:
        while not consumer.cached_info().claims:
            consumer.fetch(1, expires_s=0.1)
        found = marshal.group("billing").info()
        assert (found.policy, found.member_list) == ("members", ("m1", "m2"))
        assert found.missing_members == ("m2",)
        wrong = [
            ({"member": None}, "name one of m1, m2"),
            (
                {"group_config": GroupConfig(policy="blocks", max_members=2)},
                "has the policy members for its whole life",
            ),
            (
                {"group_config": GroupConfig(policy="members", max_members=3)},
                "has the max_members 2 for its whole life",
            ),
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
        while [len(one.cached_info().claims) for one in running] != list(consumers):
            for one in running:
                one.fetch(1, expires_s=0.05)

    with join(5) as last:
        running = [last]
        wait_for(2)
        found = marshal.group("billing").info()
        assert (found.policy, found.priority_groups) == ("prioritized", (PriorityGroupState("jobs"),))
        assert [(one.priority_group, one.priority) for one in found.members] == [("jobs", 5)]
        with join(0, max_claims=1) as first:
            running = [last, first]
            wait_for(1, 1)
        running = [last]
        wait_for(2)
        for options, reason in (({"priority_group": None}, "priority group jobs"), ({"priority": 10}, "from 0 to 9")):
            with pytest.raises(InvalidOption, match=reason):
                marshal.consumer("billing", ["orders"], **{"priority_group": "jobs", **options})  # type: ignore[arg-type]


def test_a_consumer_with_conditions_takes_part_while_much_is_pending(
    broker: MemoryBroker, marshal: marshal_py.Marshal
) -> None:
    """PROTOCOL.md A12, with what `Group.info` says."""
    config = GroupConfig(policy="overflow", priority_groups=["jobs"], failover_s=5)

    def join(min_pending: int | None = None) -> marshal_py.Consumer:
        return marshal.consumer(
            "billing",
            ["orders"],
            start="earliest",
            heartbeat_interval_s=1,
            group_config=config,
            priority_group="jobs",
            min_pending=min_pending,
        )

    def wait_for(*owned: int) -> None:
        until(lambda: [len(one.cached_info().claims) for one in running] == list(owned) or None, f"they own {owned}")

    with join(20) as remote:
        with join() as local:
            running = [local, remote]
            wait_for(2, 0)
            until(lambda: "min_pending 20" in remote.cached_info().waiting_for, "it says what it waits for")
            for number in range(20):
                broker.produce("orders", number % 2, b"")
            wait_for(1, 1)
            info = marshal.group("billing").info()
            assert (info.policy, info.failover_s) == ("overflow", 5)
            assert sorted((one.min_pending or 0, one.min_ack_pending) for one in info.members) == [
                (0, None),
                (20, None),
            ]
        running = [remote]
        wait_for(2)
    for options, reason in (({"priority": 3}, "only prioritized obeys it"), ({"min_pending": 0}, "from 1 to")):
        with pytest.raises(InvalidOption, match=reason):
            marshal.consumer("billing", ["orders"], priority_group="jobs", **options)  # type: ignore[call-overload]


def test_one_consumer_is_pinned_until_it_is_unpinned_or_asks_no_more(
    broker: MemoryBroker, marshal: marshal_py.Marshal
) -> None:
    """PROTOCOL.md A11: callbacks, the pin of each message, what `Group` says, and the switch after the timeout.

    ADR-42: "the first message that will be delivered to this client, and all future ones, will include a
    Nats-Pin-Id: xyz header." "Clients can expose call-back notifications when they become pinned"
    """
    told: list[str] = []
    arrived = threading.Semaphore(0)
    config = GroupConfig(policy="pinned", priority_groups=["jobs"])
    group = marshal.group("billing")
    for partition in range(2):
        broker.produce("orders", partition, b"")

    def join(name: str) -> marshal_py.Consumer:
        def tell(what: str) -> Callable[[], None]:
            def call() -> None:
                told.append(f"{name} {what}")
                arrived.release()

            return call

        return marshal.consumer(
            "billing",
            ["orders"],
            start="earliest",
            heartbeat_interval_s=1,
            hand_over_timeout_s=0,  # nothing is acked here
            group_config=config,
            priority_group="jobs",
            on_activated=tell("is pinned"),
            on_deactivated=tell("is not"),
        )

    def messages_of(consumer: marshal_py.Consumer) -> list[marshal_py.Message]:
        found: list[marshal_py.Message] = []
        while len(consumer.cached_info().claims) < 2 or len(found) < 2:
            found += consumer.fetch(2, min_messages=2, expires_s=0.1)
        return found

    with join("one") as one, join("two") as two:
        first = {message.pin_id for message in messages_of(one)}
        assert arrived.acquire(timeout=60)
        (pin,) = first
        found = group.pin_info()
        assert (found.pinned_id, found.priority_group, len(found.standbys)) == (str(pin), "jobs", 1)
        info = group.info()
        assert info.priority_groups == (PriorityGroupState("jobs", str(pin), found.pinned_ts),)
        assert info.priority_timeout_s == 120
        assert found.pinned_ts.endswith("+00:00")
        assert group.unpin("maintenance") == found.session
        second = {message.pin_id for message in messages_of(two)}
        assert all(arrived.acquire(timeout=60) for _ in range(2))
        assert (told[0], sorted(told[1:])) == ("one is pinned", ["one is not", "two is pinned"])
        assert str(min(second)) > str(pin)  # type: ignore[type-var]
        group.set_config(priority_timeout_s=1)
        while len(one.cached_info().claims) < 2:
            one.fetch(1, expires_s=0.1)
        assert arrived.acquire(timeout=60)
    (why,) = [event.text for event in group.advisories() if event.kind == "stepped_down"]
    assert why.startswith("maintenance, by "), "the reason is kept"
    reasons = [event.text for event in group.advisories() if event.kind == "unpinned"]
    assert reasons[:2] == ["admin", "timeout"]
    with pytest.raises(GroupMissing, match="no pinned consumer"):
        group.unpin()


def test_only_a_pinned_group_is_unpinned(marshal: marshal_py.Marshal) -> None:
    with marshal.consumer("billing", ["orders"]):
        for call in (marshal.group("billing").pin_info, marshal.group("billing").unpin):
            with pytest.raises(GroupMissing, match="pins nobody: it has no policy in its settings"):
                call()


def test_a_running_group_cannot_become_partitioned(marshal: marshal_py.Marshal) -> None:
    with (
        marshal.consumer("billing", ["orders"]),
        pytest.raises(InvalidOption, match="exists with no policy in its settings"),
    ):
        marshal.consumer("billing", ["orders"], member="m1", group_config=CONFIG)


def test_settings_that_contradict_each_other_are_refused_before_anything_is_sent(marshal: marshal_py.Marshal) -> None:
    with pytest.raises(InvalidOption, match="to how many members"):
        marshal.consumer("billing", ["orders"], member="m1", group_config=GroupConfig(policy="members"))


def test_a_standby_is_told_when_it_is_active(marshal: marshal_py.Marshal) -> None:
    """The callbacks of both consumers, in their order, while an exclusive member changes.

    partitioned consumer groups: "optional callbacks to get notified when that particular instance of the member gets
    activated or de-activated as the membership of the group changes."
    """
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
