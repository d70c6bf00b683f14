"""A group of a dump, delivered again to a handler: what it was given, in which order, and where it ended otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marshal_py import Consumer, Reject
from marshal_py.admin import archive
from marshal_py.errors import FileUnusable, InvalidOption
from marshal_py.log.observer import Observer
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, AT_MOST_ONCE
from marshal_py.testing import Delivery, MemoryCluster, RecordedMessage, make_message, replay
from marshal_sim.cluster.scenario import Options
from tests.support import dumps

INTERVAL_S = 2.0


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with MemoryCluster() as cluster:
        cluster.create_topic("orders", 2)
        yield cluster


def dump(cluster: MemoryCluster, path: Path, group: str | None = "billing") -> Path:
    with Observer(cluster._transport(), "__marshal") as observer, path.open("wb") as out:
        archive.dump(observer, out, group)
    return path


def member(cluster: MemoryCluster, client: str, **options: Any) -> Consumer:
    return cluster.connect(client).consumer("billing", ["orders"], start="earliest", **options)


def brief(deliveries: list[Delivery]) -> list[tuple[str, int, int, int, str]]:
    return [(one.owner, one.partition, one.offset, one.delivery_count, one.outcome) for one in deliveries]


@pytest.fixture(scope="module")
def scene() -> Iterator[MemoryCluster]:
    """The cluster of the incident."""
    with MemoryCluster() as cluster:
        cluster.create_topic("orders", 2)
        yield cluster


@pytest.fixture(scope="module")
def incident(scene: MemoryCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One consumer finishes two messages, holds two more and is killed; the next owner finishes them, rejects the one
    after, and gives the last one back."""
    for number in range(6):
        scene.produce("orders", b"%d" % number, partition=0)
    doomed = scene.connect("a")
    first = doomed.consumer("billing", ["orders"], start="earliest")
    taken = list(first.fetch(4, min_messages=4, expires_s=30))
    taken[0].ack()
    taken[1].ack()
    scene.advance(2 * INTERVAL_S)
    scene.kill(doomed)
    scene.advance(4 * INTERVAL_S)
    second = member(scene, "b")
    scene.advance(4 * INTERVAL_S)
    rest = list(second.fetch(4, min_messages=4, expires_s=30))
    assert [one.offset for one in rest] == [2, 3, 4, 5]
    rest[0].ack()
    rest[1].ack()
    rest[2].term("no such account")
    rest[3].nak(delay_s=60)
    scene.advance(2 * INTERVAL_S)
    second.stop()
    return dump(scene, tmp_path_factory.mktemp("replay") / "incident.jsonl")


LOST = [("a", 0, 2, 1, "lost"), ("a", 0, 3, 1, "lost")]
SHOWN = [
    *[("a", 0, 0, 1, "finished"), ("a", 0, 1, 1, "finished"), *LOST],
    *[("b", 0, 2, 2, "finished"), ("b", 0, 3, 2, "finished"), ("b", 0, 4, 1, "dead_letter")],
    ("b", 0, 5, 1, "given_back"),
]


def test_the_deliveries_of_an_incident(incident: Path) -> None:
    found = replay(incident)
    assert brief(found.deliveries) == SHOWN
    assert (found.group, found.differences) == ("billing", [])
    kinds = [getattr(event, "kind", "delivery") for event in found.events]
    assert kinds.index("evicted") == kinds.index("joined", 1) + 1
    assert kinds.index("evicted") < max(at for at, kind in enumerate(kinds) if kind == "delivery")
    assert {one.time_ms for one in found.deliveries} <= {event.time_ms for event in found.events}


def test_a_handler_gets_the_same_deliveries_and_its_differences_are_told(incident: Path) -> None:
    seen: list[tuple[int, int]] = []

    def handler(message: RecordedMessage[Any, Any]) -> None:
        seen.append((message.offset, message.delivery_count))
        if message.offset == 1:
            raise KeyError("amount")
        if message.offset == 4:
            raise Reject("no such account")
        message.ack()

    found = replay(incident, handler)
    assert seen == [(offset, count) for _, _, offset, count, _ in SHOWN]
    assert [str(one) for one in found.differences] == [
        "orders:0@1, delivery 1 to a: finished in production, given back by KeyError('amount') here",
        "orders:0@5, delivery 1 to b: given back in production, finished here",
    ]


def test_a_class_begins_anew_with_each_session(incident: Path) -> None:
    class Handler:
        def __init__(self) -> None:
            self.seen: list[int] = []
            made.append(self)

        def __call__(self, message: RecordedMessage[Any, Any]) -> None:
            self.seen.append(message.offset)

    made: list[Handler] = []
    replay(incident, Handler)
    assert [one.seen for one in made] == [[0, 1, 2, 3], [2, 3, 4, 5]]


def test_coroutines_and_naks(incident: Path) -> None:
    async def handler(message: RecordedMessage[Any, Any]) -> None:
        message.nak()

    found = replay(incident, handler)
    assert {one.replayed for one in found.deliveries} == {"given_back"}
    assert len(found.differences) == 5, "what a crash cut off has no end to compare with"


def answer(message: RecordedMessage[Any, Any]) -> None:
    if message.offset in (1, 2):
        message.nak(0)
    if message.offset == 3:
        message.term("no such account")
    if message.offset != 1:
        message.ack()
    if message.offset == 4:
        message.nak()
        message.term("it is done already")
    if message.offset == 5:
        raise KeyError("after its ack")


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The handler gives offset 1 back until it is a dead letter, and answers others more than once."""
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.create_topic("dlq")
        cluster.produce_many("orders", [b"%d" % number for number in range(7)])
        marshal = cluster.connect("a")
        options = {"max_deliver": 2, "dead_letter_topic": "dlq"}
        consumer = marshal.consumer("billing", ["orders"], start="earliest", **options)
        for _ in range(8):
            message: Any = consumer.next(30)
            if message.offset == 3:
                message.term("no such account")
            else:
                with contextlib.suppress(KeyError):
                    answer(message)
        cluster.run_until(lambda: marshal.metrics().consumers[0].dead_letters == 2)
        cluster.advance(2 * INTERVAL_S)
        consumer.stop()
        return dump(cluster, tmp_path_factory.mktemp("replay") / "answered.jsonl")


def test_the_same_handler_makes_no_difference_however_it_answers(answered: Path) -> None:
    """The first ack or term decides, and what `max_deliver` made a dead letter had been given back."""
    found = replay(answered, answer)
    assert found.differences == []
    ended = {one.offset: (one.outcome, one.replayed) for one in found.deliveries}
    assert ended == {
        **{at: ("finished", "finished") for at in (0, 2, 4, 5, 6)},
        **{at: ("dead_letter", "dead_letter") for at in (1, 3)},
    }


def test_what_a_handler_rejected_is_no_message_that_it_gave_back(answered: Path) -> None:
    found = replay(answered, lambda message: message.nak())
    assert [one.offset for one in found.differences] == [0, 2, 3, 4, 5, 6]


def test_messages_of_the_topic(scene: MemoryCluster, incident: Path) -> None:
    values: list[bytes] = []
    with scene.connect("reader") as marshal:
        found = replay(incident, lambda message: values.append(message.value), topic=marshal.topic("orders"))
    assert values == [b"0", b"1", b"2", b"3", b"2", b"3", b"4", b"5"]
    assert all(one.replayed for one in found.deliveries)


def test_messages_of_a_file_and_what_it_lacks(incident: Path, tmp_path: Path) -> None:
    lines = tmp_path / "orders.jsonl"
    common = '"topic":"orders","partition":0,"timestamp":5'
    lines.write_text(
        f'{{{common},"offset":0,"key":"k","value":"v","headers":[{{"name":"a","value":"b"}}]}}\n'
        f'{{{common},"offset":1,"key":null,"key_base64":"AP8=","value":null,"headers":[]}}\n'
    )
    seen: list[tuple[object, ...]] = []
    found = replay(incident, lambda m: seen.append((m.offset, m.key, m.value, m.headers, m.timestamp)), messages=lines)
    assert seen == [(0, b"k", b"v", [("a", b"b")], 5), (1, b"\0\xff", None, [], 5)]
    assert [one.replayed for one in found.deliveries] == ["finished"] * 2 + [""] * 6
    lines.write_text("{}\n")
    with pytest.raises(FileUnusable, match="line 1 is no message as `marshal consume --json` prints it"):
        replay(incident, messages=lines)
    made = [make_message(b"w", topic="orders", offset=5)]
    assert [one.offset for one in replay(incident, print, messages=made).deliveries if one.replayed] == [5]


def test_at_most_once(memory: MemoryCluster, tmp_path: Path) -> None:
    """What was granted was delivered, unless it was given back."""
    for number in range(8):
        memory.produce("orders", b"%d" % number, partition=0)
    doomed = memory.connect("a")
    first = doomed.consumer("billing", ["orders"], start="earliest", delivery="at_most_once")
    assert [first.next(expires_s=30).offset for _ in range(2)] == [0, 1]
    first.stop()
    second = memory.connect("b")
    dying = second.consumer("billing", ["orders"], start="earliest", delivery="at_most_once")
    memory.advance(4 * INTERVAL_S)
    taken = [dying.next(expires_s=30).offset for _ in range(2)]
    memory.kill(second)
    memory.advance(4 * INTERVAL_S)
    found = replay(dump(memory, tmp_path / "dump"))
    assert [one.offset for one in found.deliveries if one.owner == "a"] == [0, 1]
    assert taken == [2, 3]
    lost = [one for one in found.deliveries if one.owner == "b"]
    assert [one.offset for one in lost][:2] == taken, "at least these, and what else it had been granted"


def test_a_bundle_without_words_has_no_digests_to_compare(scene: MemoryCluster, incident: Path, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    with Observer(scene._transport(), "__marshal") as observer, path.open("wb") as out:
        archive.dump(observer, out, "billing", about={"left_out": 1})
    assert replay(incident).digests > 0
    found = replay(path)
    assert (brief(found.deliveries), found.digests) == (SHOWN, 0)


def test_wrong_input(scene: MemoryCluster, incident: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="a group of the dump"):
        replay(incident, group="other")
    with scene.connect("c") as marshal:
        other = marshal.consumer("other", ["orders"])
        scene.run_until(lambda: other.info().session >= 0)
    with pytest.raises(InvalidOption, match="the name of one of the dump's groups"):
        replay(dump(scene, tmp_path / "all", None))
    with pytest.raises(FileUnusable):
        replay(tmp_path / "missing")
    with pytest.raises(FileUnusable, match="it cannot be read: No such file"):
        replay(incident, print, messages=tmp_path / "missing")
    with pytest.raises(InvalidOption, match=r"marshal\.topic"):
        replay(incident, topic="orders")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, AT_MOST_ONCE])
def test_what_a_simulated_group_delivered(mode: int, tmp_path: Path) -> None:
    """It tells no delivery that there was not, and leaves out only what no record reports: what an owner had begun
    since its last heartbeat when it died. A dead letter may stand for one delivery more."""
    kinds = frozenset({"crash", "leave", "arrive", "slow_handler", "answers"})
    cluster = dumps.run(1, Options(clients=3, partitions=4, interval_ms=2_000, kinds=kinds, until_ms=40_000, mode=mode))
    dumps.of_cluster(tmp_path / "dump", cluster)
    found = replay(tmp_path / "dump", group="billing")
    there = {(one.topic, one.partition, one.offset, one.epoch) for one in cluster.evidence.deliveries}
    places = {one[:3] for one in there}  # the topic has offsets without a message
    shown = {
        (*one.place, one.epoch) for one in found.deliveries if one.place in places and one.outcome != "dead_letter"
    }
    assert shown - there == set()
    assert len(shown) > 0.9 * len(there) > 300
    assert found.digests > 50
    finished = [one.place for one in found.deliveries if one.outcome in ("finished", "dead_letter")]
    assert len(finished) == len(set(finished))
