"""The watch over a log in memory: what a refresh finds, what it asks, and what stays during an outage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from marshal_py.admin.examination import Examination
from marshal_py.admin.views import diagnosis
from marshal_py.admin.watch import ARRIVALS_MAX, SETTINGS_MAX, Watch
from marshal_py.errors import ClusterUnreachable
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition, route
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    DIED,
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Evict,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    MessageRange,
    Note,
    SeekingPartition,
    Topology,
)
from marshal_py.transport.clock import SystemClock
from tests.support import wire
from tests.support.written_log import INCARNATION, WrittenLog


class Scene(WrittenLog):
    """A log that begins a minute ago, a watch over it, and its clock, which the test moves."""

    def __init__(self) -> None:
        self.began_ms = SystemClock().now().wall_ms - 60_000
        super().__init__(self.began_ms)
        self.watch = Watch(self._open)
        self.asked: list[int] = []  # how many partitions each request was for

    def _open(self) -> Any:
        observer = self.observer()
        told = observer.admin.told_offsets

        def counted(tps: Any, timeout_s: float, *, first: bool = False) -> Any:
            self.asked.append(len(tps))
            return told(tps, timeout_s, first=first)

        observer.admin.told_offsets = counted  # type: ignore[method-assign]
        return observer


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    with scene.watch:
        yield scene


def test_a_refresh_shows_what_is_new(scene: Scene) -> None:
    session, epochs = scene.own("billing", "billing-1", "orders", 2, witness="parent")
    scene.own("audit", "audit-1", "orders", 2)
    scene.watch.refresh()
    audit, billing = scene.watch.groups()
    assert (billing.group, billing.lag, billing.oldest_s, billing.owned, billing.witnessed) == (
        "billing",
        0,
        None,
        2,
        1,
    )
    scene.fill("orders", 1, 3)
    scene.watch.refresh()
    audit, billing = scene.watch.groups()
    assert (billing.lag, audit.lag) == (3, 3)
    assert billing.oldest_s == 0.0, "it was seen to arrive just now, whatever its timestamp says"
    scene.write(Heartbeat(session, 1, (ClaimState(epochs[1], 3),)), "billing")
    scene.watch.refresh()
    audit, billing = scene.watch.groups()
    assert (billing.lag, audit.lag) == (0, 3)
    assert billing.last_progress_s is not None, "a record moved its position"
    assert audit.last_progress_s is None
    assert [row.position for row in scene.watch.partitions("billing")] == [0, 3]
    (member,) = scene.watch.members("billing")
    assert (member.client_id, member.state) == ("billing-1", "fresh"), "it was heard just now, whatever its clock says"
    assert scene.watch.partitions("nobody") == scene.watch.members("nobody") == ()


def test_of_what_was_there_before_the_record_is_read(scene: Scene) -> None:
    session, epochs = scene.own("billing", "billing-1", "orders", 1)
    scene.fill("orders", 0, 2)
    scene.now_ms += 20_000
    scene.fill("orders", 0, 2)
    scene.watch.refresh()
    (billing,) = scene.watch.groups()
    assert billing.oldest_s is not None
    assert billing.oldest_s >= 60
    scene.write(Heartbeat(session, 1, (ClaimState(epochs[0], 2),)), "billing")
    scene.watch.refresh()
    (later,) = scene.watch.groups()
    assert later.oldest_s is not None
    assert 40 <= later.oldest_s < billing.oldest_s


def test_a_clock_that_is_wrong_makes_nobody_silent(scene: Scene) -> None:
    """Before: its timestamps alone tell. Afterwards its records came between two refreshes, however old they look."""
    session, epochs = scene.own("billing", "billing-1", "orders", 1)
    scene.watch.refresh()
    assert list(scene.watch.groups()[0].causes) == ["silent"]
    for wrong_ms in (-3_600_000, 3_600_000):
        scene.now_ms = scene.began_ms + wrong_ms
        scene.write(Heartbeat(session, 1, (ClaimState(epochs[0], 0),)), "billing")
        scene.watch._judged.clear()
        scene.watch.refresh()
        assert (scene.watch.groups()[0].causes, scene.watch.groups()[0].fresh) == ({}, 1)


def test_a_reader_that_looks_once_knows_the_retention_of_all_topics(scene: Scene) -> None:
    """A refresh asks for that of some."""
    topics = [f"t{number}" for number in range(SETTINGS_MAX + 1)]
    for topic in topics:
        scene.own("billing", f"of-{topic}", topic, 1)
        scene.fill(topic, 0, 2)
        scene.broker.settings[topic] |= {"retention.ms": "3600000", "cleanup.policy": "delete"}
    with Watch(scene.observer, "billing") as watch:
        watch.refresh(whole=True)
        known = {row.topic for row in watch.partitions("billing") if row.retention_s is not None}
    assert known == set(topics)


def test_retention_is_that_of_the_topic(scene: Scene) -> None:
    scene.own("billing", "billing-1", "orders", 1)
    scene.broker.settings["orders"] |= {"retention.ms": "3600000", "cleanup.policy": "delete"}
    scene.fill("orders", 0, 2)
    scene.watch.refresh()
    (billing,) = scene.watch.groups()
    assert billing.oldest_s is not None
    assert billing.retention_s == pytest.approx(3_600 - billing.oldest_s)
    assert not [one for one in billing.findings if one.name == "retention near"]


def test_messages_that_kafka_is_about_to_delete_are_told_by_every_view(scene: Scene) -> None:
    """`marshal top` and the exporter show findings and notices; `check` alone knew of it."""
    scene.own("billing", "billing-1", "orders", 1)
    scene.broker.settings["orders"] |= {"retention.ms": "60000", "cleanup.policy": "delete"}
    scene.fill("orders", 0, 2)
    scene.now_ms += 57_500
    scene.watch.refresh()
    (billing,) = scene.watch.groups()
    assert [(one.name, one.level) for one in billing.findings if one.name == "retention near"] == [
        ("retention near", "fail")
    ]
    assert billing.level == "fail"
    (told,) = [
        text for text in billing.notices if text.startswith("Kafka may delete at any moment unfinished messages of ")
    ]
    assert told.endswith("marshal topics update orders --config retention.ms=MS")


def test_what_is_wrong_is_what_doctor_says(scene: Scene) -> None:
    session, _ = scene.own("billing", "billing-1", "orders", 1)
    scene.watch.refresh()
    (billing,) = scene.watch.groups()
    assert (billing.level, [check.name for check in billing.findings]) == ("fail", ["silent consumer"])
    assert list(billing.causes) == ["silent"]
    scene.write(Leave(session), "billing")
    scene.fill("orders", 0, 2)
    scene.watch.refresh()
    (billing,) = scene.watch.groups()
    assert list(billing.causes) == ["no_consumer"], "a change of the group is judged at once"
    assert "2 messages wait" in billing.notices[0]
    assert scene.watch.tally("billing").advisories["left"] == 1


def test_an_outage_keeps_the_picture_and_says_since_when(scene: Scene) -> None:
    scene.own("billing", "billing-1", "orders", 1)
    scene.watch.refresh()
    shown, as_of_ms = scene.watch.groups(), scene.watch.as_of_ms
    scene.transport.connection.cut = True
    with pytest.raises(ClusterUnreachable):
        scene.watch.refresh()
    assert scene.watch.problem
    assert (scene.watch.groups(), scene.watch.as_of_ms) == (shown, as_of_ms)
    scene.transport.connection.cut = False
    scene.own("audit", "audit-1", "orders", 1)
    scene.watch.refresh()
    assert scene.watch.problem == ""
    assert [group.group for group in scene.watch.groups()] == ["audit", "billing"]


def test_a_partition_without_a_leader_hides_no_other(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner finishes nothing of what waits there, and no broker says when that was written."""
    session, epochs = scene.own("billing", "billing-1", "orders", 2)
    scene.fill("orders", 0, 5)
    for sequence in (1, 2):
        scene.now_ms += 30_000
        scene.write(Heartbeat(session, sequence, tuple(ClaimState(epoch, 0) for epoch in epochs)), "billing")
    scene.watch.refresh()
    assert scene.watch.groups()[0].causes == {"hangs": 1}
    assert scene.watch.observer is not None
    admin, lost = scene.watch.observer.admin, TopicPartition("orders", 0)
    told, at_time = admin.told_offsets, admin.offsets_at

    def answered(tps: Any, timeout_s: float, *, first: bool = False) -> Any:
        return told([tp for tp in tps if tp != lost], timeout_s, first=first)

    def looked_up(tps: Any, time_ms: int) -> Any:
        if lost in tps:
            raise ClusterUnreachable("none:1", "the ends of orders:0", "no leader")
        return at_time(tps, time_ms)

    monkeypatch.setattr(admin, "told_offsets", answered)
    monkeypatch.setattr(admin, "offsets_at", looked_up)
    monkeypatch.setattr("marshal_py.admin.watch.FINDINGS_MS", 0)
    scene.fill("orders", 1, 3)
    scene.watch.refresh()
    assert scene.watch.groups()[0].lag == 8, "the last end stays"


def test_a_topic_that_is_gone_hides_no_other(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.own("billing", "billing-1", "orders", 1)
    scene.own("audit", "audit-1", "events", 1)
    scene.watch.refresh()
    scene.broker.delete_topic("orders")
    scene.fill("events", 0, 5)
    scene.watch.refresh()
    assert [group.lag for group in scene.watch.groups()] == [5, 0], "the last end stays until the topic is looked at"
    monkeypatch.setattr("marshal_py.admin.watch.TOPIC_MS", 0)
    monkeypatch.setattr("marshal_py.admin.watch.FINDINGS_MS", 0)
    scene.watch.refresh()
    audit, billing = scene.watch.groups()
    assert (audit.lag, billing.lag, billing.unknown) == (5, None, 1)
    assert "topic_gone" in billing.causes


@pytest.mark.parametrize(("reads", "level"), [("orders", "ok"), ("o*", "ok"), ("", "warn")])
def test_a_topic_that_is_gone_and_that_no_consumer_names_is_not_missed(scene: Scene, reads: str, level: str) -> None:
    """It was retired, as a pattern tells of none, and nobody either. Kafka's own groups forget such a topic."""
    session, _ = scene.own("billing", "billing-1", "old", 2)
    scene.broker.create_topic("orders", 1)
    scene.write(Topology("orders", 1, NONE), "billing")
    scene.write(ClaimingPartition(session, "orders", 0, NONE, 0), "billing")
    scene.now_ms += 60_000
    scene.write(Leave(session), "billing")
    if reads:
        scene.join("billing", "billing-2", reads)
    scene.broker.delete_topic("old")
    scene.watch.refresh(whole=True)
    (billing,) = scene.watch.groups()
    assert [row.topic for row in billing.partitions] == ["orders"]
    assert (billing.causes, billing.unknown) == ({}, 0)
    assert diagnosis.check(billing, diagnosis.Limits(lag=10)).level == level


def test_of_a_group_that_nobody_serves_and_whose_topics_are_gone_nobody_knows_the_lag(scene: Scene) -> None:
    """What waited there was lost or is elsewhere: a lag of 0 would say that nothing is wrong."""
    session, _ = scene.own("billing", "billing-1", "orders", 2)
    scene.now_ms += 60_000
    scene.write(Leave(session), "billing")
    scene.broker.delete_topic("orders")
    scene.watch.refresh(whole=True)
    (billing,) = scene.watch.groups()
    assert (billing.lag, billing.unknown, billing.time_s) == (None, 2, None)
    assert (billing.level, [one.name for one in billing.findings]) == ("warn", ["missing topic"])
    assert billing.notices[0].startswith("no consumer, and the cluster does not have orders any more; ")
    found = diagnosis.check(billing, diagnosis.Limits(lag=10))
    assert (found.level, found.lag) == ("unknown", None)


def test_a_topic_that_was_never_there_is_gone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.now_ms = SystemClock().now().wall_ms
    scene.join("billing", "billing-1", "missing")
    scene.join("audit", "audit-1", "no-*")
    scene.watch.refresh()
    audit, billing = scene.watch.groups()
    assert (audit.causes, billing.causes) == ({}, {"topic_gone": 1})
    assert diagnosis.check(billing, diagnosis.Limits()).exit_code == 2
    scene.broker.create_topic("missing", 1)
    monkeypatch.setattr("marshal_py.admin.watch.TOPIC_MS", 0)
    monkeypatch.setattr("marshal_py.admin.watch.FINDINGS_MS", 0)
    scene.watch.refresh()
    assert scene.watch.groups()[1].causes == {}


def test_a_group_of_a_newer_library_is_judged_by_nothing_old(scene: Scene) -> None:
    scene.own("billing", "billing-1", "orders", 1)
    scene.fill("orders", 0, 5)
    newer = wire.record("billing", 3, 0, record_version=9, incarnation=INCARNATION)
    scene.broker.produce("__marshal", route("billing", scene.logs), newer, timestamp_ms=scene.now_ms)
    scene.watch.refresh()
    (billing,) = scene.watch.groups()
    assert (billing.causes, billing.lag, billing.unknown) == ({"opaque": 1}, None, 1), "it is silent to this library"
    found = diagnosis.check(billing, diagnosis.Limits(lag=0))
    assert "this installation cannot read its records" in found.checks[0].found


def test_many_partitions_are_asked_in_turn(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marshal_py.admin.watch.ENDS_MAX", 3)
    scene.own("billing", "billing-1", "orders", 5)
    for number in range(5):
        scene.fill("orders", number, 1)
    scene.watch.refresh()
    (billing,) = scene.watch.groups()
    assert (billing.lag, billing.unknown) == (3, 2)
    scene.watch.refresh()
    (billing,) = scene.watch.groups()
    assert (billing.lag, billing.unknown) == (5, 0)
    assert max(scene.asked) == 5, "first offsets, of those that are behind"
    assert scene.asked[::2] == [3, 3]


def test_an_end_that_is_older_than_a_position_is_no_loss(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more partitions than one refresh asks for, the others have older ends."""
    monkeypatch.setattr("marshal_py.admin.watch.ENDS_MAX", 2)
    session, epochs = scene.own("billing", "billing-1", "orders", 4)
    scene.watch.refresh(whole=True)
    assert scene.watch.groups()[0].unknown == 0, "a caller that asks once has all ends"
    for sequence in range(1, 5):
        for number in range(4):
            scene.fill("orders", number, 1)
        scene.write(Heartbeat(session, sequence, tuple(ClaimState(epoch, sequence) for epoch in epochs)), "billing")
        scene.watch._judged.clear()
        scene.watch.refresh()
        (billing,) = scene.watch.groups()
        assert (billing.lag, "parked" in billing.causes) == (0, False)
    scene.write(Heartbeat(session, 9, tuple(ClaimState(epoch, 99) for epoch in epochs)), "billing")
    scene.watch.refresh()
    scene.watch.refresh()
    scene.watch._judged.clear()
    scene.watch.refresh()
    assert scene.watch.groups()[0].causes["parked"] == 4, "but one that was asked for since is"


def test_a_caller_that_asks_once_gets_a_judgement_by_all_ends(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marshal_py.admin.watch.ENDS_MAX", 2)
    session, _ = scene.own("billing", "billing-1", "orders", 8)
    scene.write(Leave(session), "billing")
    scene.fill("orders", 7, 3)
    scene.watch.refresh(whole=True)
    (billing,) = scene.watch.groups()
    assert (billing.lag, billing.unknown, list(billing.causes)) == (3, 0, ["no_consumer"])


def test_the_age_of_a_message_for_which_a_consumer_hangs(scene: Scene) -> None:
    """However many messages came after it."""
    scene.watch.refresh()
    data, tp = scene.watch._data, TopicPartition("orders", 0)
    for end in range(1, 1_500):
        data._note(tp, end, min(end, 4), 5_000 * end)
    assert data._arrived_ms(tp, 4) == 5 * 5_000
    assert len(data._arrivals[tp]) <= 2 * ARRIVALS_MAX


def test_a_clock_that_is_set_back_stops_no_judgement(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marshal_py.admin.watch.FINDINGS_MS", 0)
    scene.own("billing", "billing-1", "orders", 1)
    scene.watch.refresh()
    back = SystemClock().now().wall_ms - 3_600_000
    monkeypatch.setattr(SystemClock, "now", lambda _: Instant(0, 0, back))
    scene.broker.delete_topic("orders")
    monkeypatch.setattr("marshal_py.admin.watch.TOPIC_MS", 0)
    scene.watch.refresh()
    assert "topic_gone" in scene.watch.groups()[0].causes


def test_messages_before_the_first_that_is_there_do_not_wait(scene: Scene) -> None:
    scene.broker.create_topic("orders", 1)
    session = scene.join("billing", "billing-1", "orders")
    scene.write(Topology("orders", 1, NONE), "billing")
    scene.fill("orders", 0, 5)
    scene.broker.delete_records(TopicPartition("orders", 0), 5)
    scene.write(Leave(session), "billing")
    scene.watch.refresh()
    assert scene.watch.groups()[0].causes == {}


@pytest.mark.parametrize(("first", "causes"), [(27, ["no_consumer"]), (201, [])])
def test_messages_that_were_deleted_are_no_lag_but_are_told(scene: Scene, first: int, causes: list[str]) -> None:
    session, _ = scene.own("billing", "billing-1", "orders", 1)
    scene.write(Leave(session), "billing")
    scene.fill("orders", 0, 201)
    scene.broker.delete_records(TopicPartition("orders", 0), first)
    scene.watch.refresh()
    (billing,), (state,) = scene.watch.groups(), scene.watch.states()
    assert (billing.lag, state.partitions[0].lag, list(billing.causes)) == (201 - first, 201 - first, causes)
    assert any(f"{billing.lag} messages wait" in notice for notice in billing.notices) == bool(causes)
    assert any("Kafka has deleted unfinished messages of orders:0" in notice for notice in billing.notices)


def test_what_was_delivered_again_before_the_first_look_is_not_counted(scene: Scene) -> None:
    """Else the rate of `top --once` would be that of a message's whole life."""
    session, (epoch,) = scene.own("billing", "billing-1", "orders", 1)
    scene.write(Heartbeat(session, 1, (ClaimState(epoch, 0, in_flight=1, attempts=31),)), "billing")
    scene.watch.refresh()
    scene.write(Heartbeat(session, 2, (ClaimState(epoch, 0, in_flight=1, attempts=33),)), "billing")
    scene.watch.refresh()
    assert scene.watch.tally("billing").redelivered == 2


def test_what_is_gone_is_forgotten(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marshal_py.admin.watch.WINDOW_MS", 0)
    assert scene.watch.tally("billing").redelivered == 0, "also before the first refresh"
    session, _ = scene.own("billing", "billing-1", "orders", 1)
    scene.watch.refresh()
    scene.write(Leave(session), "billing")
    scene.write(GroupConfig(NONE, deleted=True), "billing")
    scene.watch.refresh()
    assert scene.watch.groups() == ()
    kept = (scene.watch._tallies, scene.watch._judged, scene.watch._known_tps, scene.watch._data._arrivals)
    assert all(not each for each in kept)
    assert not scene.watch._data.infos


def test_ends_that_were_seen_are_kept_sparsely(scene: Scene) -> None:
    scene.own("billing", "billing-1", "orders", 1)
    scene.watch.refresh()
    data, tp = scene.watch._data, TopicPartition("orders", 0)
    for end in range(1, 2_000):
        data._note(tp, end, 0, 1_000 * end)
    assert len(data._arrivals[tp]) <= 2 * ARRIVALS_MAX + 2
    for offset in (1_990, 1_900, 1_500, 1_000):
        seen_ms = data._arrived_ms(tp, offset)
        assert seen_ms is not None
        assert 0 <= seen_ms / 1000 - (offset + 1) <= (2_000 - offset), "the older, the less exactly"
    assert data._arrived_ms(tp, 5_000) is None


def test_a_dump_is_shown_as_it_was_at_a_time(scene: Scene) -> None:
    session, epochs = scene.own("billing", "billing-1", "orders", 1)
    for sequence in range(1, 4):
        scene.now_ms += 1_000
        scene.write(Heartbeat(session, sequence, (ClaimState(epochs[0], 10 * sequence, 7),)), "billing")
    with Watch(scene.observer, in_cluster=False, believes=True) as past:
        past.refresh(scene.now_ms - 2_000)
        assert [one.lag for one in past.groups()] == [7], "as the owner wrote"
    with Watch(scene.observer, in_cluster=False) as past:
        for back_ms, position in ((2_000, 10), (1_000, 20), (0, 30)):
            past.refresh(scene.now_ms - back_ms)
            (billing,) = past.groups()
            assert billing.partitions[0].position == position
            assert (billing.lag, billing.causes, billing.fresh) == (None, {}, 1)
        past.refresh()
        assert past.as_of_ms == scene.now_ms


def test_a_topic_in_which_nobody_has_begun_is_looked_at_again() -> None:
    scene = Scene()
    root = scene.broker.topics["__marshal"][0][0]
    scene.broker.topics["__marshal"][0].clear()
    with scene.watch as watch:
        watch.refresh()
        assert watch.groups() == ()
        scene.broker.topics["__marshal"][0].append(root)
        scene.own("billing", "billing-1", "orders", 1)
        watch.refresh()
        assert [group.group for group in watch.groups()] == ["billing"]


def die(scene: Scene, times: int, apart_ms: int) -> None:
    """Each consumer is ended by its witness, and by an eviction that comes too late; the last one now."""
    scene.now_ms = SystemClock().now().wall_ms - times * apart_ms
    for number in range(times):
        scene.now_ms += apart_ms
        session = scene.join("billing", "billing-1", "orders")
        first, second = Leave(session, DIED), Evict(session, session, 2_500, "keeper")
        for record in (first, second) if number % 2 else (second, first):
            scene.write(record, "billing")


@pytest.mark.parametrize("in_cluster", [True, False])
@pytest.mark.parametrize(
    ("times", "apart_ms", "said", "fact"),
    [
        (3, 5_000, ["crash loop"], []),
        (2, 5_000, [], ["'billing': 2 consumers have died within a minute"]),
        (6, 3_600_000, [], ["'billing': a consumer has died within a minute"]),
    ],
)
def test_consumers_that_die_again_and_again(
    scene: Scene, times: int, apart_ms: int, said: list[str], fact: list[str], in_cluster: bool
) -> None:
    """Also those that died before the first refresh. A death or two are a fact, and no level is worse for them."""
    scene.write(Topology("orders", 1, NONE), "billing")
    scene.broker.create_topic("orders", 1)
    scene.fill("orders", 0, 2)
    die(scene, times, apart_ms)
    left = ["no consumer"]
    with Watch(scene.observer, "billing", in_cluster) as watch:
        watch.refresh()
        (billing,) = watch.groups()
        found = diagnosis.check(billing, diagnosis.Limits(), in_cluster)
        *worse, last = found.checks if fact else (*found.checks, None)
        assert [check.name for check in worse] == said + left, "why, before that nobody is there"
        assert [(last.level, last.found)] == [("ok", fact[0])] if last else not fact
        assert found.level == ("fail" if in_cluster else "warn"), "a dump does not say that messages wait"
        assert billing.level == ("fail" if in_cluster else "warn" if said else "ok")
        assert ["have died within a minute" in notice for notice in billing.notices][: len(said)] == [True] * len(said)
    if not in_cluster:
        examined = Examination("__marshal").of_dump(scene.observer)
        assert [check.name for check in examined if check.name == "crash loop"] == said, "doctor says so, too"


@pytest.mark.parametrize(
    ("reasons", "name", "found"),
    [
        (["stopped: RuntimeError"] * 3, "crash loop", "3 consumers have died within a minute, 3 by RuntimeError"),
        (["stopped: KeyError", DIED, "stopped"], "deaths", "2 consumers have died within a minute, 1 by KeyError"),
        (["stopped", "drained", "superseded"], None, ""),
    ],
)
def test_consumers_that_an_error_ended_count_as_deaths(
    scene: Scene, reasons: list[str], name: str | None, found: str
) -> None:
    scene.now_ms = SystemClock().now().wall_ms
    for reason in reasons:
        scene.write(Leave(scene.join("billing", "billing-1", "orders"), reason), "billing")
    with Watch(scene.observer, "billing", in_cluster=False) as watch:
        watch.refresh()
        checks = watch.judgement("billing").deaths
    assert [(one.name, one.found) for one in checks] == ([(name, f"'billing': {found}")] if name else [])
    assert all(one.advice.endswith("--kind died --kind evicted --kind left") for one in checks)


def test_what_holds_up_a_position_is_told_until_somebody_moves_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the advice to skip that message would skip those between the position and it."""
    session, (epoch,) = scene.own("billing", "billing-1", "orders", 1)
    scene.write(Note(session, "held_up", "orders", 0, 5, -1, "the message has held it up for 60 s"), "billing")
    scene.watch.refresh()
    (check,) = scene.watch.judgement("billing").held_up
    assert "orders:0 is held up at 5: the message has held it up" in check.found
    assert check.advice.startswith("to see it: marshal get orders --partition 0 --offset 5; to skip it: ")
    assert "--to 6; what is finished above it then comes again; max_deliver with" in check.advice
    with monkeypatch.context() as patched:
        patched.setattr(scene.watch._looking, "firsts", {TopicPartition("orders", 0): 9})
        ((_, advice),) = scene.watch._looking.held_up(scene.watch._live()[0][1], scene.now_ms).values()
        assert advice.startswith("Kafka has deleted it since, so that no other owner can get it; to skip it: ")
    scene.write(SeekingPartition(session, epoch, 1), "billing")
    scene.watch.refresh()
    assert scene.watch.judgement("billing").held_up == ()


@pytest.mark.parametrize("old_ms", [0, 61_000])
def test_lost_messages_are_a_warning_for_a_minute(scene: Scene, old_ms: int) -> None:
    """Deleted ones, as an owner notes them. The same loss, noted twice, is one."""
    scene.now_ms = SystemClock().now().wall_ms - old_ms
    session, _ = scene.own("billing", "billing-1", "orders", 1)
    for _ in range(2):
        scene.write(Note(session, "offset_lost", "orders", 0, 5, 198), "billing")
    scene.now_ms += old_ms
    scene.write(Heartbeat(session, 1, ()), "billing")
    with Watch(scene.observer, "billing", in_cluster=False) as watch:
        watch.refresh()
        (billing,) = watch.groups()
        assert [(one.level, one.found, one.advice) for one in billing.findings if one.name == "lost messages"] == (
            [
                (
                    "warn",
                    "'billing': at most these messages were lost within a minute: orders:0 offsets 5 to 197",
                    "for more: marshal explain billing orders:0",
                )
            ]
            if not old_ms
            else []
        )
        assert any("orders:0 offsets 5 to 197" in notice for notice in billing.notices) == (not old_ms)
    examined = Examination("__marshal").of_dump(scene.observer)
    assert ("lost messages" in [one.name for one in examined]) == (not old_ms), "doctor says so, too"


@pytest.mark.parametrize("claimed", [False, True])
def test_what_an_owner_in_at_most_once_mode_lost_is_named_at_once(scene: Scene, claimed: bool) -> None:
    """Its death is enough; nobody may be there to claim."""
    scene.now_ms = SystemClock().now().wall_ms
    scene.broker.create_topic("orders", 1)
    first, second = (
        scene.write(Join(f"billing-{n}", bytes([n]) * 16, AT_MOST_ONCE, 1_000, ("orders",)), "billing") for n in (1, 2)
    )
    scene.write(Topology("orders", 1, NONE), "billing")
    epoch = scene.write(ClaimingPartition(first, "orders", 0, NONE, 0), "billing")
    scene.write(ClaimingMessages(first, (MessageRange(epoch, 0, 0, 30),)), "billing")
    scene.write(Heartbeat(first, 1, (ClaimState(epoch, 10),)), "billing")
    scene.write(Leave(first, DIED), "billing")
    if claimed:
        scene.write(ClaimingPartition(second, "orders", 0, epoch, NONE), "billing")
    with Watch(scene.observer, "billing", in_cluster=False) as watch:
        watch.refresh()
        (lost,) = watch.judgement("billing").lost
    assert (lost.level, "orders:0 offsets 10 to 29" in lost.found) == ("warn", True)


def test_deaths_are_forgotten_after_a_minute(scene: Scene) -> None:
    die(scene, 3, 5_000)
    with Watch(scene.observer, "billing", in_cluster=False) as watch:
        watch.refresh()
        assert len(watch._looking.deaths("billing", 0)) == 3
        scene.now_ms += 58_000
        keeper = scene.join("billing", "keeper", "orders")
        watch.refresh()
        assert len(watch._looking.deaths("billing", 0)) == 1
        scene.now_ms += 4_000
        scene.write(Heartbeat(keeper, 1, ()), "billing")
        watch.refresh()
        assert len(watch._looking.deaths("billing", 0)) == 0


@pytest.mark.parametrize(
    ("finished", "silent_s", "said"),
    [(1, 0, True), (4, 0, False), (0, 0, False), (1, 10, False)],
    ids=["slow", "fast", "hangs", "silent"],
)
def test_a_consumer_that_is_slower_than_the_producers_is_named(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, finished: int, silent_s: int, said: bool
) -> None:
    """Per second 3 messages are written, for two minutes; who catches up is not slow."""
    began_ms = scene.now_ms = SystemClock().now().wall_ms - 120_000
    session, epochs = scene.own("billing", "billing-1", "orders", 2)
    scene.fill("orders", 0, 500)
    for second in range(1, 121):
        scene.now_ms = began_ms + 1_000 * second
        scene.fill("orders", 0, 3)
        scene.write(Heartbeat(session, second, (ClaimState(epochs[0], finished * second),)), "billing")
    scene.now_ms += 1_000 * silent_s
    monkeypatch.setattr(SystemClock, "now", lambda _: Instant(0, 0, scene.now_ms))
    scene.watch.refresh()
    (billing,) = scene.watch.groups()
    text = "'billing-1' is slow: it finishes 1 messages/s of orders:0 against 3.05/s written"
    assert ("slow consumer" in [check.name for check in diagnosis.check(billing, diagnosis.Limits()).checks]) == said
    assert any(text in notice for notice in billing.notices) == said, billing.notices
    with Watch(scene.observer, "billing", shows="states") as watch:
        watch.refresh()
        assert any(text in notice for notice in watch.states()[0].notices) == said
