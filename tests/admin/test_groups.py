"""Groups as objects, and Marshal.info; over a cluster in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import marshal_py
from marshal_py import GroupConfig
from marshal_py.embedded import Broker
from marshal_py.errors import AdminBusy, AlreadyExists, GroupDeleted, GroupMissing, InvalidOption, MembersAlive
from marshal_py.transport.memory import MemoryBroker, MemoryTransport

GREEDY = GroupConfig(policy="greedy")


@pytest.fixture
def broker() -> MemoryBroker:
    made = MemoryBroker()
    made.create_topic("orders", 2)
    made.create_topic("users", 1)
    return made


@pytest.fixture
def marshal(broker: MemoryBroker) -> Iterator[marshal_py.Marshal]:
    with marshal_py.connect(MemoryTransport(broker)) as made:
        yield made


def policy_of(group: marshal_py.Group) -> Any:
    return group.info().policy


def log_end(broker: MemoryBroker) -> int:
    return sum(len(partition) for partition in broker.topics["__marshal"])


def test_a_group_from_its_creation_to_its_end(marshal: marshal_py.Marshal) -> None:
    """ADR-37: JetStreamContext should also expose methods co manage consumers directly, bypassing the need to
    get/create a stream. Of streams: Streams also allow for and managing consumers. Every verb is on the context alone:

    `createConsumer(streamName, consumerConfig)`, `createConsumer(consumerConfig)`,
    `updateConsumer(streamName, consumerConfig)`, `updateConsumer(consumerConfig)`,
    `getConsumer(streamName, consumerName)`, `getConsumer(consumerName)`,
    `deleteConsumer(streamName, consumerName)`, `deleteConsumer(consumerName)`.
    ADR-37: "An optional operation that allows deleting the consumer."
    """
    group = marshal.create_group("billing", GREEDY, reason="a test")
    assert (group.name, policy_of(group)) == ("billing", "greedy")
    with pytest.raises(AlreadyExists, match="policy is 'greedy', which was not asked for") as caught:
        marshal.create_group("billing")
    assert caught.value.differences == {"policy": ("greedy", None)}
    assert policy_of(marshal.update_group("billing", GroupConfig(policy="balanced"))) == "balanced"
    assert policy_of(marshal.group("billing")) == "balanced"
    assert marshal.groups() == ("billing",)
    assert marshal.delete_group("billing")
    assert not marshal.delete_group("billing"), "twice is once"
    assert marshal.groups() == ()
    with pytest.raises(GroupDeleted):
        marshal.update_group("billing", GREEDY)
    assert policy_of(marshal.create_group("billing", GREEDY)) == "greedy", "a deleted group can be created again"


def test_a_creation_is_a_declaration(marshal: marshal_py.Marshal, broker: MemoryBroker) -> None:
    """Each replica of a service may say at its start what the group is."""
    pinned = GroupConfig(policy="pinned", priority_groups=["jobs"], delivery="at_least_once")
    marshal.create_group("billing", pinned)
    end = log_end(broker)
    for same in (pinned, replace(pinned, priority_timeout_s=120)):
        assert policy_of(marshal.create_group("billing", same)) == "pinned"
    assert log_end(broker) == end, "nothing was written"
    for other, difference in (
        (replace(pinned, priority_timeout_s=9), "priority_timeout_s is 120.0, not 9.0"),
        (replace(pinned, delivery=None), "delivery is 'at_least_once', which was not asked for"),
        (
            GroupConfig(policy="greedy", on_topic_recreated="earliest"),
            "policy is 'pinned', not 'greedy'; on_topic_recreated is not set, not 'earliest'",
        ),
    ):
        with pytest.raises(AlreadyExists, match=difference):
            marshal.create_group("billing", other)
    assert log_end(broker) == end


def test_create_or_update(marshal: marshal_py.Marshal, broker: MemoryBroker) -> None:
    """ADR-37: `createOrUpdateConsumer(streamName, consumerConfig)` and `createOrUpdateConsumer(consumerConfig)`.

    It creates, changes, and writes nothing if there is nothing to change.
    """
    marshal.create_or_update_group("billing", GREEDY)
    written = log_end(broker)
    for same in (GREEDY, GroupConfig()):
        assert policy_of(marshal.create_or_update_group("billing", same)) == "greedy"
    assert log_end(broker) == written
    assert policy_of(marshal.create_or_update_group("billing", GroupConfig(policy="balanced"))) == "balanced"
    own = GroupConfig(policy="own")
    marshal.create_or_update_group("billing", own)
    written = log_end(broker)
    marshal.create_or_update_group("billing", own)
    assert log_end(broker) == written


def test_a_group_with_members(marshal: marshal_py.Marshal, broker: MemoryBroker) -> None:
    """Its policy stays; its members change, and a change that changes nothing writes nothing."""
    config = GroupConfig(policy="members", max_members=2, members=["b", "a"])
    group = marshal.create_or_update_group("billing", config)
    written = log_end(broker)
    marshal.create_or_update_group("billing", config)
    assert log_end(broker) == written
    group.add_members("c")
    with pytest.raises(InvalidOption, match="for its whole life"):
        marshal.update_group("billing", GREEDY)
    marshal.update_group("billing", GroupConfig(members=[], mappings={"a": [0, 1]}))
    found = group.info()
    assert (found.member_list, found.mappings) == (None, {"a": (0, 1)})
    group.delete_mappings()
    with pytest.raises(InvalidOption, match="the group has none"):
        group.delete_mappings()
    plain = marshal.create_group("plain")
    for call in (lambda: plain.add_members("a"), lambda: plain.set_mappings({"a": [0]}), plain.delete_mappings):
        with pytest.raises(InvalidOption, match=r"^m\w+=.* is not allowed: the group has no policy in its settings"):
            call()
    with pytest.raises(InvalidOption, match=r"^no settings given: name what should change$"):
        plain.set_config()
    with pytest.raises(InvalidOption, match="never both"):
        marshal.create_group(
            "shipping", GroupConfig(policy="blocks", max_members=1, members=["a"], mappings={"a": [0]})
        )


def test_the_groups_of_a_topic(marshal: marshal_py.Marshal) -> None:
    """ADR-37: Some libraries may support chaining functionality if it aligns with their JetStream implementation
    semantics, such as `getStream(name).getConsumer(name)`.

    A topic only reads. Which groups have consumed it, the Marshal says.
    """
    marshal.create_group("new")
    with marshal.consumer("billing", ["orders"]):
        assert marshal.groups() == ("billing", "new")
        assert (marshal.groups("orders"), marshal.groups("users")) == (("billing",), ())
        with pytest.raises(MembersAlive):
            marshal.delete_group("billing")
    assert marshal.delete_group("billing")
    assert marshal.groups("orders") == ()
    assert not hasattr(marshal.topic("orders"), "groups")


def test_groups_that_nobody_created(marshal: marshal_py.Marshal) -> None:
    for call in (lambda: marshal.group("nobody").info(), lambda: marshal.update_group("nobody", GREEDY)):
        with pytest.raises(GroupMissing):
            call()
    with pytest.raises(GroupMissing):
        marshal.delete_group("nobody")
    for name in ("", "two\nlines"):
        with pytest.raises(InvalidOption, match="group"):
            marshal.group(name)
        with pytest.raises(InvalidOption, match="group"):
            marshal.create_group(name, GREEDY)


@pytest.mark.parametrize("wrong", [{"policy": "dice"}, {"delivery": "twice"}, {"on_topic_recreated": "maybe"}])
def test_settings_that_no_group_can_have(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidOption, match="one of"):
        GroupConfig(**wrong)


def test_an_update_names_what_should_change(marshal: marshal_py.Marshal) -> None:
    marshal.create_group("billing")
    with pytest.raises(InvalidOption, match="name what should change"):
        marshal.update_group("billing", GroupConfig())


def test_info(marshal: marshal_py.Marshal) -> None:
    """ADR-37: `accountInfo()`. Limits, versions, what there is."""
    found = marshal.info()
    assert (found.topics, found.partitions) == (3, 2 + 1 + 16)
    assert found.limits == {"coordination_partitions": 16, "multi_last_keys": 1024, "batch_bytes": 64 * 1024 * 1024}
    assert found.versions["marshal_py"] == marshal_py.__version__


def test_info_of_the_embedded_broker() -> None:
    with (
        Broker(topics={"orders": 3, "__marshal": 16}) as broker,
        marshal_py.connect(broker.bootstrap_servers) as marshal,
    ):
        found = marshal.info()
        assert [one.address for one in found.brokers] == broker.bootstrap_servers.split(",")
        assert found.topics >= 1
        assert {"confluent-kafka", "librdkafka"} <= found.versions.keys()


def test_calls_in_connected_fold_the_log_once(marshal: marshal_py.Marshal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preview and the operation after it, as the commands do. The operation sees what has happened in between."""
    marshal.create_group("billing", GREEDY)
    opened: list[str] = []
    open_log = MemoryTransport.log

    def counted(self: MemoryTransport, topic: str, name: str, writes: bool = True) -> Any:
        opened.append(name)
        return open_log(self, topic, name, writes)

    monkeypatch.setattr(MemoryTransport, "log", counted)
    group = marshal.group("billing")
    with group.connected():
        assert group.info().policy == "greedy"
        marshal.update_group("billing", GroupConfig(policy="balanced"))
        assert group.info().policy == "balanced"
        group.delete()
        with pytest.raises(GroupDeleted):
            group.set_config(policy="own")
    assert len(opened) == 2, "one for these calls, one for the update"
    with pytest.raises(GroupDeleted):
        group.set_config(policy="own")
    assert len(opened) == 3


def test_each_call_in_connected_has_an_author_of_its_own(marshal: marshal_py.Marshal) -> None:
    """M1: the pause of one call is that of another run for the next one, as without `connected`."""
    marshal.create_group("billing", GREEDY)
    group = marshal.group("billing")
    with group.connected():
        group.pause(600, "maintenance")
        with pytest.raises(AdminBusy):
            group.pause(60)
        assert group.info().paused
        assert group.resume()


def test_a_ctrl_c_ends_the_call_that_it_interrupts_and_no_later_one(marshal: marshal_py.Marshal) -> None:
    """Nor does a second one, which abandons a call: its connection is not used again."""
    marshal.create_group("billing", GREEDY)
    group = marshal.group("billing")
    with group.connected():
        with group.runner() as runner:
            runner._interrupted_s = 1.0
        assert group.pause(600) is not None
        with group.runner() as runner:
            runner._abandoned = True
        assert group.resume(take_over=True)
        assert not group.info().paused
