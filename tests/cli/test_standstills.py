"""For each cause for which nobody consumes, each view says so: one test per cell of the table of docs/operations.md.

A cell holds what the view must say, or, in angle brackets, why it cannot say it.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import msgspec
import pytest

from marshal_py import GroupConfig
from marshal_py.admin.examination import Examination
from marshal_py.admin.views import diagnosis
from marshal_py.admin.views.group_info import GroupSummary
from marshal_py.cli import doctor, groups, options
from marshal_py.client.consumer import Consumer
from marshal_py.client.driver import loop
from marshal_py.client.metrics import Collector
from marshal_py.errors import GroupOpaque
from marshal_py.log import observer as observing
from marshal_py.log.observer import Observer
from marshal_py.protocol.member.waiting import CAUSES, FAILS, OBSERVED
from marshal_py.protocol.wire.identity import NONE, TopicPartition, route
from marshal_py.protocol.wire.records import Leave, Topology
from marshal_py.testing import MemoryCluster
from marshal_py.testing.cluster import marshals_of
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.memory import MemoryAdmin, MemoryConnection, MemoryTransport
from tests.cli.shell import Shell
from tests.support import wire
from tests.support.written_log import WrittenLog

GROUP, TOPIC = "billing $1 'eu'", "orders"
VIEWS = ("state", "lag", "doctor", "waiting_for", "metrics", "advisories")
NO_PROCESS = "<no process of the group is there>"
ENDED = "<its consumers have ended with GroupDeleted>"
ENDED_TOO = "<its consumers have ended with GroupOpaque>"
WORKS = "<the consumers that are there work>"
BACKLOG = 3
HANGS_S = 20.0


class Scene(NamedTuple):
    cluster: MemoryCluster
    consumer: Consumer | None


def _consumer(cluster: MemoryCluster, name: str = "one", **given: Any) -> Consumer:
    consumer: Consumer = cluster.connect(name).consumer(GROUP, [TOPIC], start="earliest", **given)
    return consumer


def _owner(cluster: MemoryCluster, **given: Any) -> Consumer:
    consumer = _consumer(cluster, **given)
    cluster.run_until(lambda: len(consumer.cached_info().claims) > 0)
    return consumer


def _close(cluster: MemoryCluster, consumer: Consumer) -> None:
    cluster._run(consumer.stop)


@contextmanager
def paused(cluster: MemoryCluster) -> Iterator[Scene]:
    consumer = _owner(cluster)
    cluster.pause(GROUP)
    cluster.advance(5)
    yield Scene(cluster, consumer)


@contextmanager
def pause_over(cluster: MemoryCluster) -> Iterator[Scene]:
    consumer = _owner(cluster)
    cluster.pause(GROUP)
    cluster.advance(5)
    _close(cluster, consumer)
    cluster.advance(3_600)
    yield Scene(cluster, None)


@contextmanager
def no_consumer(cluster: MemoryCluster) -> Iterator[Scene]:
    _close(cluster, _owner(cluster))
    yield Scene(cluster, None)


@contextmanager
def deleted(cluster: MemoryCluster) -> Iterator[Scene]:
    _close(cluster, _owner(cluster))
    cluster._run(lambda: cluster.group(GROUP).delete())
    yield Scene(cluster, None)


@contextmanager
def opaque(cluster: MemoryCluster) -> Iterator[Scene]:
    """A newer library has written to the group what this one cannot read."""
    consumer = _owner(cluster)
    root = marshals_of(cluster.bootstrap_servers)[0].root
    future = wire.record(GROUP, 3, 0, incarnation=root.incarnation, record_version=3)
    cluster.broker.produce("__marshal", route(GROUP, root.partitions), future)
    cluster.run_until(lambda: consumer.cached_info().closed)
    with pytest.raises(GroupOpaque):
        consumer.fetch(1)
    yield Scene(cluster, None)


@contextmanager
def hangs(cluster: MemoryCluster) -> Iterator[Scene]:
    consumer = _owner(cluster)
    assert consumer.next(5) is not None
    cluster.advance(15)
    yield Scene(cluster, consumer)


@contextmanager
def unowned(cluster: MemoryCluster) -> Iterator[Scene]:
    """The pinned consumer has asked for no message for the priority timeout, and nobody else has."""
    config = GroupConfig(policy="pinned", priority_groups=["jobs"], priority_timeout_s=20)
    cluster.connect("admin").create_group(GROUP, config)
    consumer = _consumer(cluster, priority_group="jobs")
    message = consumer.next(5)
    assert message is not None
    message.ack()
    cluster.advance(40)
    assert not consumer.cached_info().claims
    yield Scene(cluster, consumer)


@contextmanager
def conditions(cluster: MemoryCluster) -> Iterator[Scene]:
    cluster.connect("admin").create_group(GROUP, GroupConfig(policy="overflow", priority_groups=["jobs"]))
    consumer = _consumer(cluster, priority_group="jobs", min_pending=1_000)
    cluster.advance(5)
    yield Scene(cluster, consumer)


def _create(cluster: MemoryCluster, **given: Any) -> None:
    config = GroupConfig(policy="members", **{"max_members": 2, **given})
    cluster.connect("admin").create_group(GROUP, config)


@contextmanager
def unassigned(cluster: MemoryCluster) -> Iterator[Scene]:
    _create(cluster, max_members=1, mappings={"a": [0]})
    consumer = _owner(cluster, member="a")
    cluster.advance(5)
    yield Scene(cluster, consumer)


@contextmanager
def absent(cluster: MemoryCluster) -> Iterator[Scene]:
    _create(cluster, members=["a", "b"])
    consumer = _owner(cluster, member="a")
    cluster.advance(5)
    yield Scene(cluster, consumer)


@contextmanager
def unlisted(cluster: MemoryCluster) -> Iterator[Scene]:
    _create(cluster, members=["a", "b"])
    consumer = _consumer(cluster, member="A 1")
    cluster.advance(5)
    yield Scene(cluster, consumer)


@contextmanager
def parked(cluster: MemoryCluster) -> Iterator[Scene]:
    consumer = _owner(cluster)
    cluster.run_until(lambda: len(consumer.cached_info().claims) == 2)
    for tp in list(consumer.cached_info().claims):
        consumer._driver.park(tp, "PartitionUnreadable", "the right to read the topic is missing")
    cluster.run_until(lambda: consumer._driver.member.group is not None and len(consumer._driver.parked()) == 2)
    cluster.advance(5)
    yield Scene(cluster, consumer)


@contextmanager
def topic_gone(cluster: MemoryCluster) -> Iterator[Scene]:
    """The process looks topics up by the clock of the machine; ten seconds apart would be a wait of ten seconds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "METADATA_S", 0.05)
        consumer = _owner(cluster)
        cluster.broker.delete_topic(TOPIC)
        cluster.run_until(lambda: consumer._driver.topic_watch.missing)
        yield Scene(cluster, consumer)


@contextmanager
def not_read(cluster: MemoryCluster) -> Iterator[Scene]:
    _close(cluster, _owner(cluster))
    cluster.create_topic("mails", 1)
    consumer: Consumer = cluster.connect("two").consumer(GROUP, ["mails"], start="earliest")
    cluster.run_until(lambda: len(consumer.cached_info().claims) > 0)
    yield Scene(cluster, consumer)


@contextmanager
def fenced(cluster: MemoryCluster) -> Iterator[Scene]:
    """A cluster that hangs: it gives no error, and no answer."""
    consumer = _owner(cluster)
    with pytest.MonkeyPatch.context() as patched, cluster.fence(consumer):
        patched.setattr(MemoryConnection, "problem", lambda self: "")
        yield Scene(cluster, consumer)


@contextmanager
def silent(cluster: MemoryCluster) -> Iterator[Scene]:
    consumer = _owner(cluster)
    cluster.kill(next(one for one in marshals_of(cluster.bootstrap_servers) if one._context is consumer._context))
    cluster.advance(12)
    yield Scene(cluster, None)


SCENES: dict[str, tuple[Callable[[MemoryCluster], AbstractContextManager[Scene]], tuple[str, ...]]] = {
    # cause: how it comes about, and what the views say, in the order of VIEWS
    "deleted": (
        deleted,
        ("the group is deleted", "the group is deleted", "the group is deleted", ENDED, ENDED, "deleted"),
    ),
    "opaque": (opaque, ("this installation cannot read the group's records",) * 3 + (ENDED_TOO, ENDED_TOO, "opaque")),
    "paused": (paused, ("the group is paused for 3600 s",) * 4 + ("paused", "paused")),
    "pause_over": (pause_over, ("which are over: a consumer ends the pause",) * 3 + (NO_PROCESS, NO_PROCESS, "paused")),
    "topic_gone": (
        topic_gone,
        (f"2 positions of '{TOPIC}', which is gone",) * 3
        + (f"topic {TOPIC}, which the cluster does not have", "topic_gone", "<it is no fact of the log>"),
    ),
    "parked": (
        parked,
        (f"2 partitions of '{TOPIC}' are parked (PartitionUnreadable)",) * 3
        + ("an admin: all of its 2 partitions are parked", "parked", "parked"),
    ),
    "no_consumer": (
        no_consumer,
        (f"no consumer is there, and {BACKLOG} messages wait",) * 3 + (NO_PROCESS, NO_PROCESS, "left"),
    ),
    "silent": (
        silent,
        ("no sign of life of session",) * 3 + (NO_PROCESS, NO_PROCESS, "<others write that they evict it>"),
    ),
    "not_read": (not_read, (f"no consumer of the group reads '{TOPIC}'",) * 3 + (WORKS, "not_read", "left")),
    "conditions": (
        conditions,
        (f"no partition of '{TOPIC}' has an owner: under the policy overflow",) * 3
        + ("its conditions, min_pending 1000", "conditions", "unserved"),
    ),
    "unassigned": (
        unassigned,
        (f"1 partitions of '{TOPIC}' (1) belong to no member",) * 3 + (WORKS, "unassigned", "unserved"),
    ),
    "absent": (
        absent,
        (f"1 partitions of '{TOPIC}' (1) belong to member 'b', of which no consumer is there",) * 3
        + (WORKS, "absent", "<it is so at every start>"),
    ),
    "unlisted": (
        unlisted,
        ("'one' gets no partition: member 'A 1' is not in the group's list",) * 4 + ("unlisted", "unserved"),
    ),
    "hangs": (hangs, (f"no message of {TOPIC}",) * 4 + ("hangs", "<after the handler timeout: handler_stuck>")),
    "unowned": (
        unowned,
        (f"1 partitions of '{TOPIC}' (0) have had no owner for more than 10 s, though 2 messages wait",) * 2
        + ("no consumer is pinned: none has asked for a message for 20 s",)
        + ("its user, who has asked for no message for 20 s", "<a client looks at its own partitions>", "unpinned"),
    ),
    "fenced": (
        fenced,
        ("<others see a silent consumer>",) * 3
        + (
            "a sign of life of its own: none was read back",
            "fenced",
            "<nothing can be written: Consumer.events say it>",
        ),
    ),
}


def said(scene: Scene, view: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a view says of the group."""
    cluster, consumer = scene
    if view == "waiting_for":
        assert consumer is not None
        return consumer.cached_info().waiting_for
    if view == "metrics":
        assert consumer is not None
        marshal = next(one for one in marshals_of(cluster.bootstrap_servers) if one._context is consumer._context)
        return " ".join(marshal.metrics().consumers[0].not_consumed)
    monkeypatch.setattr(options.CommonOptions, "observer", lambda self: look(cluster))
    monkeypatch.setattr(observing, "SystemClock", lambda: cluster.broker.clock)
    if view == "advisories":
        with look(cluster) as looking:
            return " ".join(one.kind for one in looking.advisories(GROUP) if one is not None)
    if view == "doctor":
        asked = Examination("__marshal", GROUP)
        with look(cluster) as looking:
            found = asked.content(looking, lambda: cluster.broker.clock.now().wall_ms, 16)
            return "\n".join(f"{one.found} -> {one.advice}" for one in found if one.level != "ok")
    shown = Shell("none:1").json("state", GROUP, *(["--lag"] if view == "lag" else []))
    return "\n".join(shown["notices"] if view == "lag" else shown["groups"][0]["notices"])


def look(cluster: MemoryCluster) -> Observer:
    return Observer(MemoryTransport(cluster.broker), "__marshal")


@pytest.mark.parametrize("timed_out", [False, True], ids=["in the handler", "after handler_stuck"])
@pytest.mark.parametrize("view", ["state", "lag", "doctor"])
def test_a_loop_that_hangs_is_told_of_all_the_partitions_that_it_blocks(
    view: str, timed_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        for number in range(2 * BACKLOG):
            cluster.produce(TOPIC, b"%d" % number, partition=number % 2)
        consumer = _owner(cluster, handler_timeout_s=60)
        cluster.run_until(lambda: len(consumer.cached_info().claims) == 2)
        assert consumer.next(5) is not None
        cluster.advance(75 if timed_out else 15)
        found = said(Scene(cluster, consumer), view, monkeypatch)
        if timed_out:  # it has released what it does not serve, too (D4)
            assert f"2 partitions of '{TOPIC}' (0, 1) have had no owner for more than 10 s" in found, found
            assert "restart one whose handler is stuck" in found, found
        else:
            assert f"no message of {TOPIC}:0, 1 was finished for " in found, found


@pytest.mark.parametrize("view", ["state", "lag", "doctor"])
def test_the_limit_of_each_consumer_is_named_where_it_leaves_partitions_alone(
    view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 3)
        for number in range(BACKLOG):
            cluster.produce(TOPIC, b"%d" % number, partition=number % 3)
        consumers = [_owner(cluster, name=f"client{number}", max_claims=1) for number in range(2)]
        cluster.advance(15)
        found = said(Scene(cluster, consumers[0]), view, monkeypatch)
        assert "have had no owner for more than 10 s" in found, found
        assert "each consumer of the topic owns as many partitions as its max_claims allows" in found, found


@pytest.mark.parametrize("view", ["state", "lag", "doctor"])
def test_one_handler_that_hangs_beside_others_that_finish_is_not_said_to_finish_nothing(
    view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its position stands still, and what is finished above it is in the log, too."""
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 1)
        for number in range(6):
            cluster.produce(TOPIC, b"%d" % number, partition=0)
        consumer = _owner(cluster, handler_timeout_s=60)
        assert consumer.next(5) is not None
        for _ in range(4):
            message = consumer.next(5)
            assert message is not None
            message.ack()
            cluster.advance(4)
        found = said(Scene(cluster, consumer), view, monkeypatch)
        assert "was finished for" not in found, found
        cluster.advance(15)
        assert f"no message of {TOPIC}:0 was finished for " in said(Scene(cluster, consumer), view, monkeypatch)


@pytest.mark.parametrize("view", ["state", "lag", "doctor"])
def test_of_a_topic_that_was_created_again_all_messages_wait(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The position of the old one says nothing of it; and who moves to its end skips all of them."""
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        cluster.produce(TOPIC, b"old", partition=0)
        consumer = _owner(cluster)
        message = consumer.next(5)
        assert message is not None
        message.ack()
        _close(cluster, consumer)
        cluster.broker.delete_topic(TOPIC)
        cluster.create_topic(TOPIC, 2)
        for number in range(BACKLOG):
            cluster.produce(TOPIC, b"%d" % number, partition=0)
        assert f"and {BACKLOG} messages wait" in said(Scene(cluster, None), view, monkeypatch)
        moves = partial(cluster.group(GROUP).set_position, TOPIC, "latest")
        for dry_run in (True, False):
            moved = cluster._run(partial(moves, dry_run=dry_run))
            assert [(row.position, row.target, row.skipped) for row in moved.rows] == [(NONE, 3, 3), (NONE, 0, 0)]
        assert "messages wait" not in said(Scene(cluster, None), view, monkeypatch)


@pytest.mark.parametrize("view", ["state", "lag", "doctor"])
def test_a_message_that_has_just_come_is_not_said_to_wait(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        consumer = _owner(cluster)
        cluster.run_until(lambda: len(consumer.cached_info().claims) == 2)
        cluster.advance(60)
        cluster.produce(TOPIC, b"new", partition=0)
        assert said(Scene(cluster, consumer), view, monkeypatch) == ""
        cluster.advance(15)
        assert f"no message of {TOPIC}:0 was finished for " in said(Scene(cluster, consumer), view, monkeypatch)


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_a_consumer_that_handles_messages_does_not_hang(delivery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In at-most-once mode grants move the position, whatever handlers do. They are as far as the floor (F2.3)."""
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 1)
        consumer = _owner(cluster, delivery=delivery)
        cluster.advance(60)
        for number in range(300):
            cluster.produce(TOPIC, b"%d" % number)
        found = set()
        for number in range(250):
            message = consumer.next(5)
            assert message is not None
            cluster.advance(0.02)  # so long a handler needs
            if number % 10 == 0:
                found.add(said(Scene(cluster, consumer), "state", monkeypatch))
            message.ack()
        assert found == {""}
        assert consumer.next(5) is not None
        cluster.advance(15)
        assert f"no message of {TOPIC}:0 was finished for 1" in said(Scene(cluster, consumer), "state", monkeypatch)


@pytest.mark.parametrize("view", ["state", "lag", "doctor"])
@pytest.mark.parametrize("answer", ["none", "nak"])
def test_a_message_that_is_never_finished_holds_up_its_position(
    view: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of its partition are finished, so nothing hangs; and a plain loop writes no Note of it."""
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 1)
        consumer = _owner(cluster)
        for number in range(40):
            cluster.produce(TOPIC, b"%d" % number)
            message = consumer.next(5)
            while message is not None:
                if message.offset:
                    message.ack()
                elif answer == "nak":
                    message.nak(0.5)
                message = consumer.next(0)
            cluster.advance(1)
            found = said(Scene(cluster, consumer), view, monkeypatch) if number in (2, 39) else ""
            if number == 2:
                assert "held up" not in found
        times = ": that message was delivered" if answer == "nak" else ""
        assert re.search(rf"{TOPIC}:0 is held up at 0 for [34]\d s, and later messages are finished{times}", found)
        assert f"marshal set-position {quote(GROUP)} {TOPIC}:0 --to 1" in found
        (row,) = cluster.connect("admin").group(GROUP).set_position(f"{TOPIC}:0", to=1, dry_run=True).rows
        assert (row.skipped, row.repeated) == (1, 39), "what is finished above it comes again"


@pytest.mark.parametrize("view", ["state", "lag", "doctor"])
@pytest.mark.parametrize(("delay_s", "times"), [(6, 3), (1.5, 10)])
def test_a_message_that_comes_again_is_not_said_to_hang(
    view: str, delay_s: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No restart helps, nor another owner. From five deliveries on it holds up its position, which is said once."""
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 1)
        cluster.produce(TOPIC, b"fails")
        consumer = _owner(cluster)
        for _ in range(times):
            message = consumer.next(5)
            assert message is not None
            message.nak(delay_s)
            cluster.advance(delay_s)
        found = said(Scene(cluster, consumer), view, monkeypatch)
        again = re.findall(
            rf"{TOPIC}:0 (?:at offset 0 was|is held up at 0: that message was) delivered \d+ times", found
        )
        assert len(again) == 1, found
        assert "--kind poison_message" in found or f"marshal set-position {quote(GROUP)} {TOPIC}:0 --to 1" in found
        assert "restart" not in found, found
        assert "step-down" not in found, found


@pytest.mark.parametrize("view", ["state", "lag", "doctor"])
def test_a_message_that_ends_its_owners_is_named_with_the_way_past_it(
    view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the owners have died nobody is there who could tell: the log has counted."""
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 1)
        cluster.produce(TOPIC, b"kills")
        for number in range(5):
            consumer = _consumer(cluster, f"c{number}")
            cluster.run_until(lambda here=consumer: len(here.cached_info().claims) > 0)
            assert consumer.next(60) is not None
            assert ("held up" in said(Scene(cluster, None), view, monkeypatch)) == (number == 4)
            cluster.kill(next(one for one in marshals_of(cluster.bootstrap_servers) if one.client_id == f"c{number}"))
            cluster.advance(12)
        cluster._run(lambda: cluster.group(GROUP).evict("c4"))
        found = said(Scene(cluster, None), view, monkeypatch)
        assert f"{TOPIC}:0 is held up at 0: that message was delivered 5 times, and no owner finished it" in found
        assert f"marshal get {TOPIC} --partition 0 --offset 0; to skip it: marshal set-position" in found


def assert_commands_are_quoted(text: str) -> None:
    """Each command that names the group can be pasted into a shell."""
    commands = re.findall(r"marshal (?:set-position|groups \w+|members \S+|advisories|resume|evict|state) (.*)", text)
    assert [command for command in commands if not command.startswith(quote(GROUP))] == []
    assert "--add-member A" not in text, "the member is called 'A 1'"


CELLS = [
    (cause, view, SCENES[cause][1][at])
    for cause in SCENES
    for at, view in enumerate(VIEWS)
    if not SCENES[cause][1][at].startswith("<")
]


@pytest.mark.parametrize(("cause", "view", "expected"), CELLS, ids=[f"{cause}-{view}" for cause, view, _ in CELLS])
def test_the_view_says_why_nobody_consumes(
    cause: str, view: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        for number in range(BACKLOG):
            cluster.produce(TOPIC, b"%d" % number, partition=0)
        with SCENES[cause][0](cluster) as scene:
            found = said(scene, view, monkeypatch)
            assert expected in (found.split() if view in ("metrics", "advisories") else found), found
            assert_commands_are_quoted(found)


def levels(cluster: MemoryCluster, **asked: Any) -> dict[str, str]:
    """What the doctor says of the group, by the title of the check."""
    with look(cluster) as looking:
        found = Examination("__marshal", GROUP, **asked).content(
            looking, lambda: cluster.broker.clock.now().wall_ms, 16
        )
        return {one.name: one.level for one in found}


@pytest.mark.parametrize("cause", sorted(SCENES.keys() - {"fenced"}))
def test_the_doctor_fails_if_the_group_that_it_is_asked_about_stands_still(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing, "SystemClock", lambda: cluster.broker.clock)
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        for number in range(BACKLOG):
            cluster.produce(TOPIC, b"%d" % number, partition=0)
        with SCENES[cause][0](cluster):
            title = diagnosis.TITLES.get(cause, cause)
            assert levels(cluster)[title] == ("fail" if cause in FAILS else "warn")
            assert "fail" not in levels(cluster, strict=True).values(), "asked with --as"


def test_the_doctor_does_not_take_a_deleted_topic_for_a_mistyped_one() -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        _close(cluster, _owner(cluster))
        cluster.broker.delete_topic(TOPIC)
        asked = Examination("__marshal", GROUP, [TOPIC, "ordrs"])
        admin: Any = MemoryTransport(cluster.broker).admin()
        deleted, mistyped = asked._absent(admin, {TOPIC})
        assert (deleted.level, deleted.found) == ("fail", f"{TOPIC!r} does not exist any more")
        assert mistyped.found == f"'ordrs' does not exist; did you mean {TOPIC!r}?"


def test_the_doctor_does_not_fail_a_group_of_which_a_part_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "SystemClock", lambda: cluster.broker.clock)
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        consumer = _owner(cluster)
        cluster.run_until(lambda: len(consumer.cached_info().claims) == 2)
        consumer._driver.park(next(iter(consumer.cached_info().claims)), "PartitionUnreadable", "no right")
        cluster.run_until(lambda: len(consumer._driver.parked()) == 1)
        assert levels(cluster)["parked partitions"] == "warn"


def test_the_doctor_fails_neither_a_job_that_has_ended_nor_a_paused_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "SystemClock", lambda: cluster.broker.clock)
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        _close(cluster, _owner(cluster))
        assert levels(cluster)["no consumer"] == "warn", "it has read everything"
        cluster.produce(TOPIC, b"new", partition=0)
        assert levels(cluster)["no consumer"] == "fail"
        cluster.pause(GROUP)
        assert levels(cluster)["no consumer"] == "warn"
        cluster.advance(3_605)
        assert (levels(cluster)["no consumer"], levels(cluster)["pause over"]) == ("fail", "warn")


@pytest.mark.parametrize("cause", sorted(SCENES.keys() - {"fenced"}))
def test_the_list_of_groups_says_so_too(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        for number in range(BACKLOG):
            cluster.produce(TOPIC, b"%d" % number, partition=0)
        with SCENES[cause][0](cluster) as scene:
            monkeypatch.setattr(options.CommonOptions, "observer", lambda self: look(scene.cluster))
            monkeypatch.setattr(observing, "SystemClock", lambda: cluster.broker.clock)
            (found,) = Shell("none:1").json("groups", "ls", "--deleted")
            assert cause in found["not_consumed"], found
            if not found["deleted"] and found["sessions"] and not found["parked"]:
                words = groups._condition(msgspec.convert(found, GroupSummary))
                assert "running" not in words, words


@pytest.mark.parametrize("view", VIEWS)
def test_position_text_all_is_well_no_view_says_otherwise(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        consumer = _owner(cluster)
        cluster.run_until(lambda: len(consumer.cached_info().claims) == 2)
        cluster.advance(5)
        found = said(Scene(cluster, consumer), view, monkeypatch)
        assert found == "" or (view == "advisories" and "unserved" not in found), found


@pytest.mark.parametrize("view", ["state", "groups ls", "doctor", "check"])
def test_every_view_looks_at_the_topics_alike(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted messages do not wait, and a topic that never was there is missing."""
    written = WrittenLog(SystemClock().now().wall_ms)
    written.broker.create_topic(TOPIC, 1)
    session = written.join(GROUP, "one", TOPIC)
    written.write(Topology(TOPIC, 1, NONE), GROUP)
    written.fill(TOPIC, 0, 5)
    written.broker.delete_records(TopicPartition(TOPIC, 0), 5)
    written.write(Leave(session), GROUP)
    written.join("audit", "two", "nowhere")
    monkeypatch.setattr(options.CommonOptions, "observer", lambda self: written.observer())

    def causes(group: str) -> list[str]:
        if view == "doctor":
            with written.observer() as observer:
                checks = list(Examination("__marshal").content(observer, lambda: written.now_ms, 2))
            return [one.found for one in checks if one.level == "fail" or repr(group) in one.found]
        if view == "groups ls":
            return next(one["not_consumed"] for one in Shell("none:1").json("groups", "ls") if one["group"] == group)
        if view == "check":
            found = Shell("none:1").run("check", group, "--json")
            return [one["name"] for one in json.loads(found.stdout)["checks"] if one["level"] == "fail"]
        notices: list[str] = Shell("none:1").json("state", group)["groups"][0]["notices"]
        return notices

    assert causes(GROUP) == []
    (said,) = causes("audit")
    assert "nowhere" in said or said in ("topic_gone", "missing topic")


def test_a_check_takes_no_longer_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer comes in time, and there are many: the alarm ends the wait for the last of them."""

    over = threading.Event()

    def never(self: MemoryAdmin, topic: str) -> None:
        over.wait(HANGS_S)

    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        _owner(cluster)
        monkeypatch.setattr(options.CommonOptions, "transport", lambda _: MemoryTransport(cluster.broker))
        monkeypatch.setattr(MemoryAdmin, "describe_topic", never)
        monkeypatch.setattr(MemoryAdmin, "partition_count", lambda self, topic: 16)
        found = Shell("none:1").run("check", GROUP, "--timeout", "0.5", "--json")
        over.set()
        assert (found.exit_code, "--timeout 0.5 is over" in found.stdout) == (3, True), found.output
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_cluster_that_hangs_is_what_the_connection_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readiness asks the Marshal: it must not say that all is well while none of its consumers may deliver."""
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 2)
        with fenced(cluster) as (_, consumer):
            assert consumer is not None
            marshal = next(one for one in marshals_of(cluster.bootstrap_servers) if one._context is consumer._context)
            assert marshal.waiting_for == consumer.cached_info().waiting_for == marshal.metrics().waiting_for
            text = "a sign of life of its own: none was read back for {} s, so it delivers nothing; "
            text += "the cluster does not answer"
            began = re.fullmatch(text.format(r"(\d+)"), marshal.waiting_for)
            assert began is not None, marshal.waiting_for
            cluster.advance(7)
            assert marshal.waiting_for == text.format(int(began[1]) + 7), "it says since when"
            monkeypatch.setattr(marshal._context, "stalled_ms", lambda: 12_300)
            assert marshal.waiting_for.endswith("; this process stood still for 12.3 s"), "then that is why"
        assert marshal.waiting_for == ""


def test_the_table_is_whole_and_documented() -> None:
    assert SCENES.keys() == CAUSES.keys()
    page = (Path(doctor.__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.split("## Why nobody consumes")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(CAUSES)


def test_the_metric_has_no_cause_that_a_consumer_cannot_know() -> None:
    """A figure that is 0 whatever happens would say that all is well."""
    untold = {cause for cause, (_, texts) in SCENES.items() if texts[VIEWS.index("metrics")].startswith("<")}
    assert untold >= OBSERVED
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, 1)
        with cluster.connect() as marshal, marshal.consumer("billing", [TOPIC]):
            (family,) = (one for one in Collector(marshal).collect() if one.name == "marshal_not_consumed")
            assert {sample.labels["cause"] for sample in family.samples} == CAUSES.keys() - OBSERVED
