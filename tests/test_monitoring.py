"""monitoring/: the boards and alert rules name only metrics that the exporter has, and alert when they should.

`promtool` is not needed: the rules use so little of PromQL that `Rules` evaluates them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from marshal_py.admin.exporter import GroupsExporter
from marshal_py.admin.views.exposition import OWN
from marshal_py.admin.watch import Watch
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    DIED,
    FAILED,
    ClaimingPartition,
    Evict,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    Note,
    ReleaseGroup,
    ReleasingPartition,
    Topology,
)
from marshal_py.transport.clock import SystemClock
from tests.support.written_log import WrittenLog

MONITORING = Path(__file__).parents[1] / "monitoring"
BOARDS = sorted(MONITORING.glob("*.json"))
LABELS = {"group", "topic", "partition", "kind", "cause", "state", "client_id", "session", "le"}

Samples = dict[str, list[tuple[Mapping[str, str], float]]]


def exposed() -> set[str]:
    """The names of all samples that the exporter may have."""
    found = {
        f"marshal_exporter_{name}" for name in ("up", "last_refresh_timestamp_seconds", "refresh_seconds", "groups")
    }
    for family in (*OWN.groups, *OWN.topics, *OWN.partitions):
        suffixes = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}[family.kind]
        found |= {family.name + suffix for suffix in suffixes}
    return found


def expressions(board: Path) -> list[str]:
    found = json.loads(board.read_text(encoding="utf-8"))
    return [target["expr"] for panel in found["panels"] for target in panel["targets"]]


class Rules:
    """The rules of alerts.yaml. Each expression is `METRIC{...} OP NUMBER`, of `increase(METRIC{...}[...])` too, or
    `time() - METRIC OP NUMBER`, and may have `and`, or `and ignoring(cause)`, another one, or two in brackets with
    `or`."""

    def __init__(self) -> None:
        text = (MONITORING / "alerts.yaml").read_text(encoding="utf-8")
        self.rules: dict[str, str] = dict(re.findall(r"- alert: (\w+)\n\s+expr: (.+)\n", text))
        assert len(self.rules) == text.count("- alert:")

    def firing(self, before: Samples, now: Samples, now_s: float) -> set[str]:
        """The alerts that fire once `for` is over; with counters as they were `before`."""
        return {name for name, rule in self.rules.items() if self._groups(rule, before, now, now_s)}

    def _groups(self, rule: str, before: Samples, now: Samples, now_s: float) -> set[str]:
        if rule.startswith("absent("):
            return set() if rule[len("absent(") : -1] in now else {""}
        found = []
        for part in re.split(r" and (?:ignoring\(cause\) )?", rule):
            either = part.strip("()").split(" or ") if " or " in part else [part]
            found.append({group for one in either for group in self._one(one, before, now, now_s)})
        return set.intersection(*found)

    def _one(self, rule: str, before: Samples, now: Samples, now_s: float) -> Iterator[str]:
        summed = rule.startswith("sum without (kind) (")
        rule = re.sub(r"^sum without \(kind\) \((.*)\) ([<>=]+)", r"\1 \2", rule)
        found = re.fullmatch(
            r"(increase\(|time\(\) - )?(\w+)(?:\{(\w+)(=~?)\"(.+)\"\})?(?:\[\w+\]\))? ([<>=]+) ([\d.]+)", rule
        )
        assert found is not None, rule
        function, metric, label, match, wanted, operator, limit = found.groups()
        then = {tuple(sorted(labels.items())): value for labels, value in before.get(metric, [])}
        figures: Counter[tuple[str, str]] = Counter()  # by group and, unless they are summed up, by their other labels
        for labels, value in now.get(metric, []):
            if label and not re.fullmatch(wanted if match == "=~" else re.escape(wanted), labels[label]):
                continue
            key = "" if summed else json.dumps(sorted(labels.items()))
            if function == "increase(":
                value -= then.get(tuple(sorted(labels.items())), value)
            figures[labels.get("group", ""), key] += now_s - value if function == "time() - " else value
        for (group, _), value in figures.items():
            if {">": value > float(limit), "<": value < float(limit), "==": value == float(limit)}[operator]:
                yield group


class Scene(WrittenLog):
    """A group with one consumer of two partitions that is well, as it was an hour ago and ever since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("marshal_py.admin.watch.FINDINGS_MS", 0)
        monkeypatch.setattr("marshal_py.admin.watch.TOPIC_MS", 0)
        super().__init__(SystemClock().now().wall_ms - 60_000)
        self.exporter = GroupsExporter(Watch(self.observer), 0, "127.0.0.1")
        self.session, self.epochs = self.own("billing", "one", "orders", 2)
        self.now_ms += 60_000
        self.sequence = 0
        self.beat()
        self.before: Samples = {}
        self.now_s = self.now_ms / 1000

    def beat(self) -> None:
        self.sequence += 1
        self.extended = self.write(Heartbeat(self.session, self.sequence), "billing")

    def look(self) -> set[str]:
        """Which alerts fire after another refresh."""
        self.exporter.refresh()
        now: Samples = {}
        page = b"".join(self.exporter.answer("/metrics", self.now_ms).parts(compressed=False)).decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                now.setdefault(sample.name, []).append((sample.labels, sample.value))
        self.before, before = now, self.before
        return Rules().firing(before, now, self.now_s)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(monkeypatch)
    with scene.exporter:
        assert scene.look() == set()
        yield scene


# --- names


def test_every_name_in_the_boards_and_rules_is_exposed() -> None:
    rules = Rules().rules
    for where, expression in [
        *rules.items(),
        *((board.name, expression) for board in BOARDS for expression in expressions(board)),
    ]:
        found = set(re.findall(r"marshal_\w+", expression))
        assert found, f"{where}: {expression}"
        assert found <= exposed(), f"{where}: {sorted(found - exposed())}"
        named = set(re.findall(r"(\w+)(?:=~|!=|=)\"", expression))
        named |= {
            name.strip() for part in re.findall(r"\b(?:by|on) ?\(([^)]*)\)", expression) for name in part.split(",")
        }
        assert named <= LABELS, f"{where}: {sorted(named - LABELS)}"
        assert expression.count("(") == expression.count(")")


def test_the_boards_can_be_imported() -> None:
    assert [board.stem for board in BOARDS] == ["group", "overview"]
    for path in BOARDS:
        board = json.loads(path.read_text(encoding="utf-8"))
        assert board["uid"] == f"marshal-{path.stem}"
        places = [panel["gridPos"] for panel in board["panels"]]
        assert len({panel["id"] for panel in board["panels"]}) == len(places)
        cells = [
            (x, y)
            for at in places
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        ]
        assert len(cells) == len(set(cells)), "no panel covers another one"
        assert max(x for x, _ in cells) == 23
        names = {variable["name"] for variable in board["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
        assert used - {"__rate_interval", "__value", "__url_time_range"} <= names


# --- what must not page


def test_a_topic_that_is_gone_pages_nobody(scene: Scene) -> None:
    scene.fill("orders", 0, 5)
    scene.broker.delete_topic("orders")
    scene.beat()
    assert scene.look() == set()


def test_a_wrong_clock_pages_nobody(scene: Scene) -> None:
    for wrong_ms in (-3_600_000, 3_600_000):
        scene.now_ms += wrong_ms
        scene.beat()
        assert scene.look() == set()


def test_a_copy_of_positions_that_is_refused_pages_nobody(scene: Scene) -> None:
    scene.write(Note(scene.session, "mirror_refused", text="refused since 30 s"), "billing")
    assert scene.look() == set()


def test_one_consumer_that_dies_and_is_replaced_pages_nobody(scene: Scene) -> None:
    scene.write(Leave(scene.session, f"{DIED}: signal 9"), "billing")
    scene.session = scene.join("billing", "one", "orders")
    for number in range(2):
        scene.write(ClaimingPartition(scene.session, "orders", number, scene.epochs[number]), "billing")
    scene.beat()
    assert scene.look() == set()
    assert [value for _, value in scene.before["marshal_partition_owner"]] == [1, 1]


def test_a_pause_pages_nobody(scene: Scene) -> None:
    for number, epoch in enumerate(scene.epochs):
        scene.fill("orders", number, 5)
        scene.write(ReleasingPartition(scene.session, epoch, 0, reason="paused"), "billing")
    scene.write(ReleaseGroup(NONE, NONE, 600_000, msg_expire_time_ms=scene.now_ms + 600_000), "billing")
    assert scene.look() == set()


# --- what must page


def test_a_group_that_nobody_consumes(scene: Scene) -> None:
    scene.write(Leave(scene.session), "billing")
    scene.fill("orders", 0, 1)
    assert scene.look() == {"MarshalNobodyConsumes"}


@pytest.mark.parametrize("reason", [f"{DIED}: signal 9", f"{FAILED}ValueError"])
def test_a_crash_loop(scene: Scene, reason: str) -> None:
    scene.look()
    for number in range(4):
        if number % 2:
            scene.write(Leave(scene.session, reason), "billing")
        else:
            scene.write(Evict(scene.session, scene.extended, 4_000), "billing")
        scene.session = scene.join("billing", f"copy-{number}", "orders")
        scene.beat()
    assert scene.look() == {"MarshalCrashLoop"}


def test_a_partition_without_an_owner(scene: Scene) -> None:
    scene.now_ms -= 60_000
    scene.broker.create_topic("events", 2)
    session = scene.join("other", "two", "events")
    scene.write(Topology("events", 2, NONE), "other")
    scene.write(ClaimingPartition(session, "events", 0, NONE, 0), "other")
    scene.now_ms += 60_000
    scene.write(Heartbeat(session, 1), "other")
    scene.fill("events", 1, 3)
    assert scene.look() == {"MarshalPartitionsWithoutOwner"}
    owners = [value for labels, value in scene.before["marshal_partition_owner"] if labels["group"] == "other"]
    assert owners == [1, 0]


def test_parked(scene: Scene) -> None:
    scene.write(ReleasingPartition(scene.session, scene.epochs[0], 0, parked="Unreadable"), "billing")
    assert scene.look() == {"MarshalParked"}


def test_messages_that_were_lost_given_up_or_come_again(scene: Scene) -> None:
    scene.write(Note(scene.session, "offset_lost", "orders", 0, 0, 5), "billing")
    scene.write(Note(scene.session, "dead_letter", "orders", 0, 7), "billing")
    scene.write(Note(scene.session, "poison_message", "orders", 0, 8), "billing")
    assert scene.look() == {"MarshalMessagesLost", "MarshalDeadLetters", "MarshalPoison"}


@pytest.mark.parametrize(("retention_ms", "alerts"), [(3_600_000, set()), (60_000, {"MarshalRetentionNear"})])
def test_retention_that_is_near_compared_with_the_whole(
    monkeypatch: pytest.MonkeyPatch, retention_ms: int, alerts: set[str]
) -> None:
    scene = Scene(monkeypatch)
    scene.broker.settings["orders"] |= {"retention.ms": str(retention_ms), "cleanup.policy": "delete"}
    scene.now_ms -= 55_000
    scene.fill("orders", 0, 1)
    with scene.exporter:
        assert scene.look() - {"MarshalHangs"} == alerts, "nothing is finished, either"


def test_an_old_topic_that_nobody_reads_is_at_rest(scene: Scene) -> None:
    scene.own("two topics", "two", "events", 1)
    scene.write(Topology("orders", 2, NONE), "two topics")
    assert scene.look() == set()


def test_a_partition_that_nobody_may_own_and_that_never_had_a_position(scene: Scene) -> None:
    scene.now_ms -= 60_000
    scene.broker.create_topic("events", 2)
    scene.write(GroupConfig(NONE, policy="members", members=("a", "b"), max_members=2), "other")
    instance = bytes([9]) * 16
    session = scene.write(Join("two", instance, AT_LEAST_ONCE, 1_000, ("events",), member="a"), "other")
    scene.write(Topology("events", 2, NONE), "other")
    scene.write(ClaimingPartition(session, "events", 0, NONE, 0), "other")
    scene.now_ms += 60_000
    scene.write(Heartbeat(session, 1), "other")
    assert scene.look() == set(), "nothing waits"
    scene.fill("events", 1, 3)
    assert scene.look() == {"MarshalUnserved"}
    assert [value for labels, value in scene.before["marshal_group_lag"] if labels["group"] == "other"] == [0]


def test_an_exporter_that_is_gone() -> None:
    assert Rules().firing({}, {}, 0.0) == {"MarshalExporterGone"}


def test_a_consumer_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.now_ms -= 60_000
    scene.own("frozen", "two", "events", 1)
    with scene.exporter:
        assert scene.look() == {"MarshalConsumersSilent"}


def test_an_exporter_that_does_not_reach_the_cluster(scene: Scene) -> None:
    scene.transport.connection.cut = True
    scene.now_s += 200
    assert scene.look() == {"MarshalExporterStale"}
