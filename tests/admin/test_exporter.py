"""What `marshal exporter` serves: the page in four dialects, the probe, the scaler's figures, and old figures."""

from __future__ import annotations

import gzip
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from marshal_py.admin.exporter import STALE_MS, GroupsExporter
from marshal_py.admin.views.exposition import DIALECTS, SETTLED_MS
from marshal_py.admin.watch import Watch
from marshal_py.errors import InvalidOption
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.wire.identity import NONE, route
from marshal_py.protocol.wire.records import (
    ClaimingPartition,
    ClaimState,
    GroupConfig,
    Heartbeat,
    Leave,
    ReleasingPartition,
)
from marshal_py.transport.clock import SystemClock
from marshal_sim.cluster.hostile import key_of
from tests.support import wire
from tests.support.written_log import INCARNATION, WrittenLog


class Scene(WrittenLog):
    """A log with the group `billing`, whose owner has finished 3 of 5 messages of one of two partitions."""

    def __init__(self, names: str = "marshal", granularity: str = "partition") -> None:
        super().__init__(SystemClock().now().wall_ms)
        self.exporter = GroupsExporter(Watch(self.observer), 0, "127.0.0.1", names, granularity, "prod")
        self.session, self.epochs = self.own("billing", 'one"\n', "orders", 2, witness="parent")
        self.beat(3)
        self.fill("orders", 0, 5)

    def beat(self, position: int, attempts: int = 0) -> None:
        self.write(Heartbeat(self.session, 1, (ClaimState(self.epochs[0], position, attempts=attempts),)), "billing")

    def page(self) -> str:
        return b"".join(self.exporter.answer("/metrics", self.now_ms).parts(compressed=False)).decode()

    def samples(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """What Prometheus reads, by name."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(self.page()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def figures(self, name: str) -> list[float]:
        return [value for _, value in self.samples().get(name, [])]

    def keda(self, group: str = "billing", now_ms: int | None = None) -> tuple[int, Any]:
        answer = self.exporter.answer(f"/keda/{group}", self.now_ms if now_ms is None else now_ms)
        return answer.status, json.loads(answer.body)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    with scene.exporter:
        scene.exporter.refresh()
        yield scene


def test_a_group_with_admin_keys_without_the_extra(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter that cannot verify says so, and gives a scaler no figures that are old (E5)."""
    monkeypatch.setattr(rationalizer, "READS_VERSION", 1)
    scene.write(GroupConfig(-1, mode=1, admin_keys=(key_of(1).public,)), "billing")
    scene.fill("orders", 0, 9)
    scene.exporter.refresh()
    assert [labels["cause"] for labels, _ in scene.samples()["marshal_group_not_consumed"]] == ["opaque"]
    status, figures = scene.keda()
    assert (status, figures["lag"]) == (503, None)


def test_own_names(scene: Scene) -> None:
    found = scene.samples()
    assert found["marshal_group_lag"] == [({"group": "billing"}, 2.0)]
    assert {tuple(labels.values()): value for labels, value in found["marshal_partition_lag"]} == {
        ("billing", "orders", "0"): 2.0,
        ("billing", "orders", "1"): 0.0,
    }
    assert found["marshal_partition_owner"][0][0]["client_id"] == 'one"\n', "labels are escaped"
    assert found["marshal_group_sessions_witnessed"][0][1] == found["marshal_group_level"][0][1] + 1 == 1
    assert found["marshal_session_last_sign_seconds"][0][0]["client_id"] == 'one"\n'
    assert len(found["marshal_group_failover_seconds_bucket"]) == 11
    assert "marshal_group_retention_used_ratio" not in found
    assert "marshal_group_retention_left_seconds" not in found, "what is not known has no line"
    assert len(scene.figures("marshal_group_oldest_message_seconds")) == 1
    scene.beat(5, attempts=1)
    scene.exporter.refresh()
    assert scene.figures("marshal_group_oldest_message_seconds") == [0], "nothing waits"
    scene.beat(5, attempts=3)
    scene.exporter.refresh()
    assert scene.figures("marshal_group_redelivered_total") == [2]


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ("kafka-exporter", 'kafka_consumergroup_lag{consumergroup="billing",topic="orders",partition="0"} 2'),
        (
            "kafka-lag-exporter",
            'kafka_consumergroup_group_lag{cluster_name="prod",group="billing",topic="orders",partition="0",'
            'member_host="",consumer_id="1",client_id="one\\"\\n"} 2',
        ),
        (
            "kminion",
            'kminion_kafka_consumer_group_topic_partition_lag{group_id="billing",topic_name="orders",'
            'partition_id="0"} 2',
        ),
    ],
)
def test_names_of_other_exporters(names: str, line: str) -> None:
    scene = Scene(names)
    with scene.exporter:
        scene.exporter.refresh()
        assert line in scene.page().splitlines()
        read = set(scene.samples())
    dialect = DIALECTS[names]
    families = (*dialect.groups, *dialect.topics, *dialect.partitions, *dialect.ends)
    assert read - {name for name in read if name.startswith("marshal_exporter_")} == {one.name for one in families}


@pytest.mark.parametrize(("granularity", "lags"), [("group", 1), ("topic", 2), ("partition", 4)])
def test_granularity(granularity: str, lags: int) -> None:
    scene = Scene(granularity=granularity)
    with scene.exporter:
        scene.exporter.refresh()
        assert scene.page().count("_lag{") == lags


def test_what_nobody_owns_has_its_lines_and_a_group_that_is_gone_has_none(scene: Scene) -> None:
    scene.write(Leave(scene.session), "billing")
    scene.own("other", "two", "orders", 2)
    scene.exporter.refresh()
    assert [value for labels, value in scene.samples()["marshal_partition_owner"] if labels["group"] == "billing"] == [
        0,
        0,
    ]
    (cause,) = scene.samples()["marshal_group_not_consumed"]
    assert cause == ({"group": "billing", "cause": "no_consumer"}, 1.0)
    assert 'group="other"' in scene.page()
    del scene.exporter._watch._groups  # as if the log had forgotten it
    scene.exporter._watch._groups = ()
    scene.broker.topics["__marshal"] = [each[:1] for each in scene.broker.topics["__marshal"]]
    scene.exporter._watch.close()
    scene.exporter.refresh()
    assert 'group="' not in scene.page()


def test_an_outage_is_seen_and_figures_stay(scene: Scene) -> None:
    assert scene.figures("marshal_exporter_up") == [1]
    (as_of,) = scene.figures("marshal_exporter_last_refresh_timestamp_seconds")
    before = scene.exporter.answer("/metrics", 0).rest
    scene.transport.connection.cut = True
    assert "cut" in scene.exporter.refresh()
    assert scene.figures("marshal_exporter_up") == [0]
    assert scene.figures("marshal_exporter_last_refresh_timestamp_seconds") == [as_of]
    assert scene.exporter.answer("/metrics", 0).rest == before
    healthy = scene.exporter.answer("/healthz", 0)
    assert (healthy.status, json.loads(healthy.body)["ok"]) == (200, False)
    assert scene.keda()[0] == 200, "for a minute"
    status, told = scene.keda(now_ms=scene.now_ms + STALE_MS + 10_000)
    assert (status, "cut" in told["problem"]) == (503, True), "KEDA holds the scale on an error"
    scene.exporter._late_s = 185.0
    late = scene.keda(now_ms=scene.now_ms + 100_000)
    assert (late[0], late[1]["old_after_s"] > STALE_MS / 1000) == (200, True), "until the next refresh is late"
    scene.transport.connection.cut = False
    assert scene.exporter.refresh() == ""
    assert scene.figures("marshal_exporter_up") == [1]


def test_a_refresh_that_hangs_is_seen(scene: Scene) -> None:
    scene.exporter._late_s = -1.0
    assert scene.figures("marshal_exporter_up") == [0]
    assert json.loads(scene.exporter.answer("/healthz", 0).body)["ok"] is False


def test_figures_for_a_scaler(scene: Scene) -> None:
    status, told = scene.keda()
    assert (status, told["lag"], told["partitions"], told["moving"], told["sessions"]) == (200, 2, 1, 0, 1)
    assert told["oldest_s"] >= 0
    assert (told["as_of_ms"], told["old_after_s"]) == (scene.exporter._picture.as_of_ms, STALE_MS / 1000)
    assert scene.keda("nobody")[0] == 404
    session = scene.join("billing", "two", "orders")
    released = scene.write(ReleasingPartition(scene.session, scene.epochs[0], 3), "billing")
    epoch = scene.write(ClaimingPartition(session, "orders", 0, released), "billing")
    scene.exporter.refresh()
    assert scene.keda()[1]["moving"] == 1, "the lag of a partition that moves is that of the move"
    assert scene.keda()[1]["lag"] == 0
    tally = scene.exporter._watch.tally("billing")
    tally.moved_ms = {place: at_ms - SETTLED_MS for place, at_ms in tally.moved_ms.items()}
    scene.exporter.refresh()
    assert scene.keda()[1]["lag"] == 2
    scene.write(ReleasingPartition(session, epoch, 3, parked="Unreadable"), "billing")
    scene.exporter.refresh()
    assert (scene.keda()[1]["lag"], scene.keda()[1]["parked"]) == (0, 1), "no consumer can help there"


def test_an_unknown_lag_is_no_lag_of_zero(scene: Scene) -> None:
    session = scene.join("new", "three", "missing")
    assert session != NONE
    scene.own("lost", "four", "gone", 1)
    scene.broker.delete_topic("gone")
    scene.exporter.refresh()
    assert scene.keda("lost") == (503, {**scene.keda("lost")[1], "lag": None, "oldest_s": None, "unknown": 1})


def test_a_group_of_a_newer_library_has_no_figure_for_a_scaler(scene: Scene) -> None:
    scene.broker.produce(
        "__marshal",
        route("billing", scene.logs),
        wire.record("billing", 3, 0, record_version=9, incarnation=INCARNATION),
    )
    scene.exporter.refresh()
    status, told = scene.keda()
    assert (status, told["lag"], told["oldest_s"]) == (503, None, None)


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [("gzip", "gzip"), ("br, gzip;q=1.0", "gzip"), ("gzip;q=0, *", None), ("identity", None), ("", None)],
)
def test_who_takes_gzip_gets_it(scene: Scene, accepted: str, coding: str | None) -> None:
    """Prometheus does; 500 groups are megabytes otherwise."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{scene.exporter.port}/metrics", headers={"Accept-Encoding": accepted}
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        page, found = answer.read(), answer.headers
    assert (found["Content-Encoding"], int(found["Content-Length"])) == (coding, len(page))
    assert found["Vary"] == "Accept-Encoding"
    text = gzip.decompress(page) if coding else page
    assert text.decode() == scene.page()


def test_over_http(scene: Scene) -> None:
    def get(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{scene.exporter.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    assert 'marshal_group_lag{group="billing"} 2\n' in get("/metrics?name=x")
    assert json.loads(get("/keda/billing"))["lag"] == 2
    head = urllib.request.Request(f"http://127.0.0.1:{scene.exporter.port}/metrics", method="HEAD")
    with urllib.request.urlopen(head, timeout=30) as answer:
        assert int(answer.headers["Content-Length"]) > len(answer.read()) == 0
    with GroupsExporter(Watch(scene.observer), 0, "::1") as six:
        assert six.port
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        get("/")
    refused.value.close()
    with pytest.raises(InvalidOption, match="cannot be used"):
        GroupsExporter(Watch(scene.observer), scene.exporter.port, "127.0.0.1")
