"""The log gives the same advisories as a live consumer, in the same words; and they go to `logging`."""

from __future__ import annotations

import logging

import pytest

from marshal_py import GroupConfig
from marshal_py.admin.group import Group
from marshal_py.protocol.member.advisory import LOCAL, Advisory
from tests.support.client_fixtures import LOG, MemoryTestCluster, TestCluster, collect, joined, owns, until


def place(event: Advisory) -> tuple[object, ...]:
    """What identifies an advisory: without its words and without the time at which this process read it."""
    return (
        event.kind,
        event.group,
        event.client_id,
        event.topic,
        event.partition,
        event.epoch,
        event.to,
        event.session,
        event.log,
        event.log_offset,
    )


def test_events_are_in_the_log(cluster: TestCluster) -> None:
    topic, group = cluster.topic(2), cluster.group()
    cluster.fill(topic, 0, 3)
    with cluster.connect("one") as marshal:
        admin = Group(marshal.transport, group, LOG)
        consumer = joined(marshal, group, [topic])
        until(owns(consumer, 0, 1), "both partitions are claimed")
        collect(consumer, 3)
        consumer.flush()
        assert admin.set_position([topic], "earliest").offset >= 0
        until(owns(consumer, 0, 1), "both partitions are claimed again")
        consumer.stop()
        events = [event for event in consumer.events() if event.kind not in LOCAL]
        reported = list(admin.advisories())
    kinds = [event.kind for event in events]
    assert kinds.count("claimed") == kinds.count("released") == 4
    assert (kinds.count("paused"), kinds.count("moved"), kinds.count("resumed")) == (1, 2, 1)
    assert all(event.time_ms > 0 for event in events)
    assert {place(event) for event in events} <= {place(one) for one in reported}
    moved = {(one.partition, one.offset, one.to) for one in reported if one.kind == "moved"}
    assert moved == {(0, 3, 0), (1, 0, 0)}


def test_events_go_to_logging_with_their_fields(memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture) -> None:
    topic, group = memory.topic(), memory.group()
    caplog.set_level(logging.INFO, "marshal_py")
    with memory.connect("one") as marshal:
        consumer = joined(marshal, group, [topic])
        until(owns(consumer, 0), "the partition is claimed")
    fields = {getattr(record, "marshal_kind", ""): vars(record) for record in caplog.records}
    claimed = fields["claimed"]
    assert (claimed["marshal_group"], claimed["marshal_topic"], claimed["marshal_partition"]) == (group, topic, 0)
    assert claimed["marshal_partitions"] == [0]
    assert claimed["marshal_client_id"] == "one"
    assert claimed["marshal_session"] >= 0
    assert (claimed["levelno"], claimed["name"]) == (logging.INFO, "marshal_py")
    assert fields["released"]["message"] == f"group {group}: released {topic}:0 at 0 (one): stopped"


def test_what_happens_to_many_partitions_at_once_is_one_line(
    memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """`logging` is for people; `events` keeps every advisory. A start is not reported as a fence."""
    topic, group = memory.topic(12), memory.group()
    caplog.set_level(logging.INFO, "marshal_py")
    with memory.connect("one") as marshal:
        consumer = joined(marshal, group, [topic])
        until(owns(consumer, *range(12)), "all partitions are claimed")
        consumer.stop()
        events = [event.kind for event in consumer.events()]
    assert (events.count("claimed"), events.count("released")) == (12, 12)
    assert "unfenced" not in events
    reported = [vars(record) for record in caplog.records]
    lines = [line for line in reported if line.get("marshal_kind") in ("claimed", "released")]
    assert sorted(number for line in lines for number in line["marshal_partitions"]) == sorted([*range(12)] * 2)
    assert len(lines) < 12, [line["message"] for line in lines]
    released = next(line for line in lines if line["marshal_kind"] == "released")
    assert released["message"] == f"group {group}: released 12 partitions of {topic}: 0-11 (one): stopped"
    assert released["marshal_partition"] == -1


def test_a_member_that_is_not_listed_hears_of_it_itself(
    memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets nothing until an admin acts: one event and one warning when that begins, again when it begins again."""
    topic, group = memory.topic(2), memory.group()
    config = GroupConfig(policy="members", max_members=2, members=["m1"])
    with memory.connect("one") as marshal:
        admin = Group(marshal.transport, group, LOG)
        with joined(marshal, group, [topic], member="m2", group_config=config) as consumer:
            found: list[Advisory] = []

            def told() -> list[Advisory]:
                found.extend(event for event in consumer.events() if event.kind == "unserved")
                return found

            until(lambda: len(told()) == 1, "it is told")
            assert (found[0].session, found[0].client_id) == (consumer.cached_info().session, "one")
            assert f"marshal groups update {group} --add-member m2" in found[0].text
            admin.add_members("m2")
            until(lambda: consumer.cached_info().claims, "it is served")
            admin.drop_members("m2")
            until(lambda: len(told()) == 2, "it is told again")
    warned = [record for record in caplog.records if getattr(record, "marshal_kind", "") == "unserved"]
    assert [record.levelno for record in warned] == [logging.WARNING] * 2
