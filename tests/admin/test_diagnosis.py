"""What the doctor says about groups, clocks, versions, growth and rights: each with a planted fault, and without it."""

from __future__ import annotations

from marshal_py.admin import examination
from marshal_py.admin.views import diagnosis, overview
from marshal_py.admin.views.diagnosis import DAY_MS, NAMES_MAX, ORPHANED_MS, RECORDS_MANY, Study
from marshal_py.admin.views.overview import SKEW_MS
from marshal_py.admin.views.recreated_topics import find_recreated
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.member.waiting import Facts, standstills
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, TopicPartition
from marshal_py.protocol.wire.records import (
    ClaimingPartition,
    Genesis,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    Move,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    Snapshot,
    Topology,
)
from marshal_py.transport.ports import Bounds, LogRecord, Replicas, TopicInfo

NOW_MS = 1_800_000_000_000
INCARNATION = bytes(range(16))
GENESIS = Genesis(INCARNATION, 1, HASH_NAME, 2)


class Story:
    """A log with timestamps, studied while it is written."""

    def __init__(self, began_ms: int = NOW_MS - 1_000) -> None:
        self.clock_ms = NOW_MS
        self.world, self.extended_ms = World(), dict[tuple[str, int], int]()
        self.study = Study(NOW_MS, lambda: self.clock_ms)
        self.tell(GENESIS, "", began_ms)

    def tell(self, record: Record, group: str = "g", at_ms: int = NOW_MS) -> int:
        offset, value = self.world.next_offset, codec.encode(record, group, INCARNATION)
        verdict = apply(self.world, offset, value)
        self.study.read((LogRecord(0, offset, value, at_ms, b""), verdict))
        assert verdict.accepted or isinstance(record, Genesis), verdict.reason
        if isinstance(record, Join | Heartbeat):
            self.extended_ms[group, record.session if isinstance(record, Heartbeat) else offset] = at_ms
        return offset

    def join(
        self, client: str, group: str = "g", at_ms: int = NOW_MS, library: str = "lib 1", interval_ms: int = 2_000
    ) -> int:
        instance = len(self.study.last_ms).to_bytes(8, "big") + self.world.next_offset.to_bytes(8, "big")
        return self.tell(Join(client, instance, 1, interval_ms, ("orders",), library=library), group, at_ms)

    def groups(self) -> list[Group]:
        return list(self.world.groups.values())

    def facts(self, group: Group, infos: dict[str, TopicInfo | None]) -> Facts:
        signs = {session: at_ms for (name, session), at_ms in self.extended_ms.items() if name == group.name}
        recreated = find_recreated(group, {topic: info for topic, info in infos.items() if info is not None})
        return Facts(
            NOW_MS,
            parked=overview.stopped(group, recreated, {}),
            gone=[topic for topic, info in infos.items() if info is None],
            silent=overview.silence(group, signs, NOW_MS),
        )

    def health(self, topics: dict[str, int | TopicInfo | None] | None = None) -> dict[str, str]:
        """Advice by name of what is not well."""
        infos = {name: TopicInfo(there) if isinstance(there, int) else there for name, there in (topics or {}).items()}
        causes = {group.name: standstills(group, self.facts(group, infos)) for group in self.groups()}
        found = diagnosis.of_groups(self.groups(), infos, self.study, causes)
        return {check.name: f"{check.found} -> {check.advice}" for check in found if check.level != "ok"}


def test_clocks_that_agree() -> None:
    """Late copies and slow ways are no wrong clock."""
    story = Story()
    a, b = story.join("a"), story.join("b", at_ms=NOW_MS + 5)
    for beat in range(6):
        story.tell(Heartbeat(a, beat), at_ms=NOW_MS + 700 * beat)
        story.tell(Heartbeat(b, beat), at_ms=NOW_MS + 700 * beat - (30_000 if beat == 3 else 40))
    assert diagnosis.of_clocks(story.study).level == "warn", "that is ahead of this machine"
    story.study.now_ms += 10_000
    story.study.ahead_ms.clear()
    assert diagnosis.of_clocks(story.study).level == "ok"


def test_a_clock_that_is_behind_or_ahead_is_named() -> None:
    story = Story()
    a, b = story.join("right", at_ms=NOW_MS - 60_000), story.join("slow", at_ms=NOW_MS - 67_500)
    for beat in range(3):
        story.tell(Heartbeat(a, beat), at_ms=NOW_MS - 50_000 + beat)
        story.tell(Heartbeat(b, beat), at_ms=NOW_MS - 57_500 + beat)
    check = diagnosis.of_clocks(story.study)
    assert (check.level, check.found) == ("warn", "'slow' is at least 7.5 s behind the others")
    assert check.advice
    story = Story()
    story.join("fast", at_ms=NOW_MS + SKEW_MS + 1_000)
    assert "'fast' is 3.0 s ahead of this machine" in diagnosis.of_clocks(story.study).found


def test_records_that_come_while_a_long_log_is_read_are_no_wrong_clock() -> None:
    """The reader looks at its clock when it reads a record, and not before it begins."""
    story = Story()
    for at_ms in range(NOW_MS, NOW_MS + 60_000, 5_000):
        story.clock_ms = at_ms + 3
        story.join(f"c{at_ms}", at_ms=at_ms)
    assert diagnosis.of_clocks(story.study).level == "ok"


def test_versions_of_live_consumers() -> None:
    story = Story()
    assert diagnosis.of_versions(story.groups()).found == "no consumer is live"
    sessions = [story.join(f"c{number}") for number in range(NAMES_MAX + 2)]
    assert diagnosis.of_versions(story.groups()).level == "ok"
    story.join("newest", library="lib 2")
    check = diagnosis.of_versions(story.groups())
    assert check.level == "warn"
    assert "lib 1: 7 consumers; lib 2: 1 consumers" in check.found
    assert "newest still run lib 2" in check.advice
    story.tell(Leave(sessions[0], "bye"))
    assert "lib 1: 6 consumers" in diagnosis.of_versions(story.groups()).found


def test_live_consumers_with_one_client_id_are_named() -> None:
    """One that does not heartbeat beside the other is the former session of a process that was started again."""
    story = Story()
    one, other = story.join("same"), story.join("same")
    story.join("third")
    story.tell(Heartbeat(other, 1))
    assert list(diagnosis.of_client_ids(story.groups())) == []
    story.tell(Heartbeat(one, 1))
    (check,) = diagnosis.of_client_ids(story.groups())
    assert check.level == "warn"
    assert check.found == f"'g': several live consumers have the client_id 'same' (sessions {one}, {other})"
    assert check.advice
    assert list(diagnosis.of_client_ids(story.groups(), {("g", one)})) == [], "it is silent"


def test_live_consumers_with_different_intervals_are_named() -> None:
    story = Story()
    story.join("a")
    story.join("b")
    assert list(diagnosis.of_intervals(story.groups())) == []
    slow = story.join("c", interval_ms=30_000)
    (check,) = diagnosis.of_intervals(story.groups())
    text = "'g': live consumers have different heartbeat intervals (2 s: a, b; 30 s: c)"
    assert (check.level, check.found) == ("warn", text)
    assert list(diagnosis.of_intervals(story.groups(), {("g", slow)})) == [], "it is silent"


def test_a_group_that_nobody_uses_any_more() -> None:
    story = Story(NOW_MS - ORPHANED_MS - 2 * DAY_MS)
    old = story.join("c", "old", NOW_MS - ORPHANED_MS - DAY_MS)
    story.tell(Leave(old), "old", NOW_MS - ORPHANED_MS - DAY_MS)
    new = story.join("c", "new", NOW_MS - DAY_MS)
    story.tell(Leave(new), "new", NOW_MS - DAY_MS)
    found = story.health()
    assert list(found) == ["orphaned group"]
    assert "'old': no consumer and no record for 8 days; 0 positions" in found["orphaned group"]
    assert "marshal groups rm old" in found["orphaned group"]
    story.tell(GroupConfig(-1, deleted=True), "old", NOW_MS)
    assert story.health() == {}


def test_partitions_that_the_policy_gives_to_nobody() -> None:
    """A12: all consumers wait for their conditions."""
    story = Story()
    story.tell(GroupConfig(-1, policy="overflow", priority_groups=("jobs",)))
    story.tell(Join("west", bytes(16), 1, 2_000, ("orders",), priority_group="jobs", min_pending=1000))
    story.tell(Topology("orders", 2, -1))
    found = story.health()
    assert list(found) == ["unserved partitions"]
    assert found["unserved partitions"].startswith("'g': no partition of 'orders' has an owner: under the policy")
    assert found["unserved partitions"].endswith("marshal groups update g --failover 60")


def test_a_silent_session_is_named_with_what_to_do() -> None:
    """Longer than twice its interval, and than clocks may differ: by then a running consumer would have evicted it."""
    story = Story()
    dead = story.join("dead", at_ms=NOW_MS - 21_000)
    story.join("alive", at_ms=NOW_MS - 4_000 - SKEW_MS)
    assert story.health()["silent consumer"] == (
        f"'g': no sign of life of session {dead} of 'dead' for 21 s (its interval: 2 s) -> its process hangs, is "
        f"gone, or may not write: its own log says which; any running consumer of this log evicts them: start one of "
        f"this group, or: marshal evict g {dead}"
    )
    story.tell(Heartbeat(dead, 1), at_ms=NOW_MS - 1_000)
    assert story.health() == {}


def test_the_way_out_of_a_pause_works_for_whoever_reads_it() -> None:
    """The pause of a colleague is ended with --take-over alone."""
    story = Story()
    story.join("a")
    story.tell(ReleaseGroup(-1, -1, 60_000))
    assert story.health()["paused"].endswith("to end it now: marshal resume g --take-over")


def test_if_all_consumers_are_silent_the_cluster_may_be_the_cause() -> None:
    """A log with too few replicas in sync takes no heartbeat: no restart helps, and no eviction can be written."""
    story = Story()
    story.join("a", at_ms=NOW_MS - 21_000)
    b = story.join("b", at_ms=NOW_MS - 21_000)
    assert " -> the cluster takes no records (marshal doctor says so), or its " in story.health()["silent consumer"]
    story.tell(Heartbeat(b, 1), at_ms=NOW_MS)
    assert "marshal doctor" not in story.health()["silent consumer"]


def test_a_log_that_takes_no_records_is_a_failure_and_a_replica_behind_a_warning() -> None:
    whole, behind = Replicas(1, (1, 2, 3), (1, 2, 3)), Replicas(1, (1, 2, 3), (1, 2))
    assert list(diagnosis.of_replicas([whole, Replicas(1, (1,), (1,))], 2)) == [], "Kafka takes a write to the only one"
    (check,) = diagnosis.of_replicas([whole, behind], 2)
    assert (check.level, check.found) == ("warn", "1 are not in sync")
    for short in (Replicas(1, (1, 2, 3), (1,)), Replicas(-1, (1, 2, 3), (1, 2))):
        (check,) = diagnosis.of_replicas([whole, behind, short], 2)
        assert (check.level, check.found[:36]) == ("fail", "1 of 3 partitions take no records: t")
        assert "min.insync.replicas=2" in check.found


def test_a_group_that_nobody_used_is_not_said_to_be_used() -> None:
    story = Story()
    story.join("alive", at_ms=NOW_MS)
    assert list(diagnosis.of_groups(story.groups(), {}, story.study, {}, "mistyped")) == []


def test_topics_that_are_gone_or_smaller() -> None:
    story = Story()
    story.join("c")
    story.tell(Topology("orders", 4, -1))
    token = story.tell(ReleaseGroup(-1, -1, 60_000))
    story.tell(SetPosition(token, (Move("orders", 0, -1, 5), Move("orders", 3, -1, 6)), True))
    assert story.health({"orders": 4}) == {}
    assert story.health({}) == {}, "a topic that this client may not see says nothing"
    gone = story.health({"orders": None})["missing topic"]
    assert "2 positions of 'orders', which is gone" in gone
    assert "--to earliest" in gone
    assert "marshal groups update g --shrink orders=3" in story.health({"orders": 3})["smaller topic"]


def test_parked_partitions_are_named_with_the_way_out() -> None:
    """F6.4, D10: by topic and reason; also a topic that was created again and that nobody has parked yet."""
    story = Story()
    session = story.join("c")
    story.tell(Topology("orders", 2, -1, topic_id="old"))
    claim = story.tell(ClaimingPartition(session, "orders", 1, -1, 5))
    assert story.health({"orders": TopicInfo(2, "old")}) == {}
    recreated = {"orders": TopicInfo(1, "new")}
    found = story.health(recreated)
    assert list(found) == ["parked partitions"], "and no smaller topic: another command accepts it"
    assert found["parked partitions"].startswith("'g': 2 partitions of 'orders' are not consumed (DataTopicRecreated)")
    assert "its id was old, now it is new" in found["parked partitions"]
    assert "marshal set-position g orders --to earliest" in found["parked partitions"]
    story.tell(ReleasingPartition(session, claim, 5, parked="DataTopicRecreated"))
    assert "2 partitions of 'orders' are not consumed" in story.health(recreated)["parked partitions"], (
        "one is not parked"
    )
    dumped = story.health()["parked partitions"]
    assert dumped.startswith("'g': 1 partitions of 'orders' are parked (DataTopicRecreated) -> ")
    assert "marshal set-position g orders --to earliest" in dumped
    other = story.tell(ClaimingPartition(session, "orders", 0, -1, 5))
    story.tell(ReleasingPartition(session, other, 5, parked="Newer"))
    assert "marshal set-position g orders:0 --to POSITION" in story.health()["parked partitions"]


def test_growth_counts_from_the_last_snapshot() -> None:
    story = Story()
    session = story.join("c", at_ms=NOW_MS - 2 * DAY_MS)
    for beat in range(20):
        story.tell(Heartbeat(session, beat), at_ms=NOW_MS)
    end = story.world.next_offset
    check = diagnosis.of_growth(story.study, {0: Bounds(0, end)}, {0: 2})
    assert (check.level, check.found.split(" records", 1)[0]) == ("ok", str(end))
    assert f"{end - 2} records, about 0.0 MB, within a day" in check.found
    count, size = story.study.sizes[0]
    assert (count, 20 * 90 < size < 22 * 200) == (end, True)
    assert diagnosis.of_growth(story.study, {0: Bounds(0, RECORDS_MANY + 1)}, {}).level == "warn"
    at = story.tell(Snapshot(GENESIS, bytes(range(1, 17)), 16, 0, 1, 0, 1, b""), "")
    assert story.study.snapshot_at == {0: at}
    assert diagnosis.of_growth(story.study, {0: Bounds(0, at + 5)}, {}).found.startswith("5 records")


def test_rights_that_are_missing_come_with_their_command() -> None:
    needed = examination.rights_of(examination.CONSUMER, "__marshal", ["g"], ["orders"])
    everything = frozenset({"Read", "Write", "Delete", "Describe", "DescribeConfigs"})
    assert examination.missing(needed, lambda kind, name: everything) == []
    nothing = examination.missing(needed, lambda kind, name: frozenset())
    assert nothing == needed
    reads = examination.missing(needed, lambda kind, name: frozenset({"Read", "Describe"}))
    assert reads == [examination.Right("topic", "__marshal", ("Write", "DescribeConfigs"))]
    assert examination.grant(reads[0], "User:alice", "b:9092") == (
        "kafka-acls.sh --bootstrap-server b:9092 --add --allow-principal User:alice --operation Write "
        "--operation DescribeConfigs --topic __marshal"
    )
    assert examination.rights_of(examination.OBSERVER, "__marshal", ["g"], ["orders"]) == [
        examination.Right("topic", "__marshal", ("Read",)),
        examination.Right("topic", "orders", ("Describe",)),
    ]


def test_the_positions_counted_are_those_of_the_topic() -> None:
    story = Story()
    story.join("c")
    story.tell(Topology("orders", 1, -1))
    story.tell(Topology("mails", 1, -1))
    token = story.tell(ReleaseGroup(-1, -1, 60_000))
    story.tell(SetPosition(token, (Move("mails", 0, -1, 5),), True))
    assert "keeps 0 positions of 'orders'" in story.health({"mails": 1, "orders": None})["missing topic"]
    assert story.groups()[0].partitions[TopicPartition("mails", 0)].position == 5
