"""Settings and shape of a live group: PROTOCOL.md M13, M14 and rule 9 on plans in virtual time, beside real members.

What no test here may see: half a change, a change that its tool denies, a pause that nobody ends.
"""

from __future__ import annotations

from typing import Any

import pytest

from marshal_py.admin.plans import impact
from marshal_py.admin.plans.change import ConfigPlan, ShrinkPlan
from marshal_py.admin.plans.operation import BY_BYTES_MAX, Author, GroupContext, Terms
from marshal_py.admin.plans.pause import PausePlan, ResumePlan
from marshal_py.admin.plans.position import PositionPlan
from marshal_py.admin.plans.sessions import EvictPlan, RemovePlan, StepDownPlan
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.client.values.options import WORDS, settings_of
from marshal_py.errors import (
    AdminBusy,
    AdminGaveUp,
    AlreadyExists,
    GroupDeleted,
    GroupMissing,
    InvalidOption,
    ModeMismatch,
    SettingsChanged,
)
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    GroupConfig,
    Mapping,
    ReleaseGroup,
    SetPosition,
    Topology,
)
from tests.admin.virtual_admin import NEVER, Tool, finish, play_copies, start_tool
from tests.support.virtual_cluster import GROUP, INTERVAL_MS, TOPIC, Client, VirtualCluster, tp

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
PAUSE_MS = 9_000


def change(
    cluster: VirtualCluster,
    name: str = "tool",
    who: str = "alice@desk",
    crash_after: int = NEVER,
    create: bool = False,
    **options: Any,
) -> Tool:
    terms = Terms(**{name: options.pop(name) for name in Terms._fields if name in options})

    def make(context: GroupContext) -> ConfigPlan:
        return ConfigPlan(context, options, terms, create=create)

    return start_tool(cluster, make, name, who, crash_after=crash_after)


def shrink(cluster: VirtualCluster, partitions: int, crash_after: int = NEVER, topic: str = TOPIC) -> Tool:
    return start_tool(
        cluster,
        lambda context: ShrinkPlan(context, topic, partitions, Terms(duration_ms=PAUSE_MS)),
        crash_after=crash_after,
    )


def company(partitions: int = 4, handling: bool = False, **options: Any) -> tuple[VirtualCluster, list[Client]]:
    cluster = VirtualCluster(partitions=partitions, **options)
    team = cluster.team("a", "b")
    if handling:
        for client in team:
            for claim in client.member.claims.values():
                client.deliver(claim, 0)
    return cluster, team


def words_in(group: Any) -> dict[str, Any]:
    """The settings that are words."""
    return {name: value for name, value in settings_of(group).items() if name in WORDS}


def configs(cluster: VirtualCluster) -> list[GroupConfig]:
    return [record for verdict, record in cluster.records(GroupConfig) if verdict.accepted]


# --- settings


def test_what_is_not_named_stays() -> None:
    """M13: also what this release cannot set: another one may obey it."""
    cluster, _ = company()
    cluster.must(GroupConfig(-1, policy="balanced", max_members=7, members=("m",), mappings=(Mapping("m", (1, 2)),)))
    tool = finish(cluster, change(cluster, policy="greedy"))
    assert tool.operation.error is None
    finish(cluster, change(cluster, "identity", on_topic_recreated="earliest"))
    now = configs(cluster)[-1]
    assert (now.policy, now.max_members, now.members) == ("greedy", 7, ("m",))
    assert now.mappings == (Mapping("m", (1, 2)),)
    finish(cluster, change(cluster, "own", policy="own"))
    assert words_in(cluster.group) == {"delivery": "at_least_once", "policy": None, "on_topic_recreated": "earliest"}
    assert len(cluster.owners()) == 4
    assert not list(cluster.records(ReleaseGroup)), "no pause is needed for that"
    assert play_copies(cluster, tool) == []


def test_who_was_faster_is_named_and_nothing_changes() -> None:
    """M13: two admins that saw the same settings: one change counts, the other tool says whose."""
    cluster, _ = company()
    first, second = (
        change(cluster, "first", policy="greedy"),
        change(cluster, "second", "bob@office", policy="balanced"),
    )
    first.write_ms = 40
    finish(cluster, second)
    finish(cluster, first)
    assert second.operation.error is None
    error = first.operation.error
    assert isinstance(error, SettingsChanged)
    assert error.by.startswith("bob@office")
    assert [config.policy for config in configs(cluster)] == ["balanced"]
    assert play_copies(cluster, first) == []


@pytest.mark.parametrize(
    ("wanted", "rule"),
    [
        ({"policy": "magic"}, "balanced, greedy"),
        ({"delivery": "exactly_once"}, "at_least_once"),
        ({"xyz": "3"}, "not allowed: settings of a group are"),
        ({"max_member": 3}, r"did you mean max_members\? settings of a group are"),
        ({"policy": "members", "max_members": "3"}, "a whole number"),
        ({"policy": "members", "max_members": 3, "members": "m1"}, "a list of names"),
    ],
)
def test_what_nobody_obeys_is_refused(wanted: dict[str, str], rule: str) -> None:
    cluster, _ = company()
    with pytest.raises(InvalidOption, match=rule):
        change(cluster, **wanted)


def test_a_group_is_created_before_its_first_consumer() -> None:
    """F10.3: by its settings, compare-and-set on nothing; its members then follow them."""
    cluster = VirtualCluster(partitions=4)
    with pytest.raises(GroupMissing, match="never been used"):
        change(cluster, policy="greedy")
    tool = finish(cluster, change(cluster, create=True, delivery="at_most_once", policy="greedy"))
    assert tool.operation.error is None
    assert words_in(cluster.group) == {"delivery": "at_most_once", "policy": "greedy", "on_topic_recreated": None}
    with pytest.raises(AlreadyExists, match="policy is 'greedy', which was not asked for"):
        change(cluster, create=True, delivery="at_most_once")
    values = len(cluster.values)
    again = finish(cluster, change(cluster, create=True, delivery="at_most_once", policy="greedy"))
    assert (again.operation.error, len(cluster.values)) == (None, values), "it has these settings: nothing is written"
    late = cluster.add("late")
    cluster.run(3 * I)
    assert isinstance(late.member.error, ModeMismatch)
    cluster.add("fine", mode=AT_MOST_ONCE)
    cluster.run(3 * I)
    assert len(cluster.owners()) == 4


@pytest.mark.parametrize("policy", ["greedy", "balanced"])
def test_replicas_that_create_their_group_at_once(policy: str) -> None:
    """M13: with the same settings each of them succeeds, whoever was faster; with others the loser learns which."""
    cluster = VirtualCluster(partitions=4)
    first = change(cluster, "first", create=True, policy="greedy")
    second = change(cluster, "second", "bob@office", create=True, policy=policy)
    first.write_ms = 40
    finish(cluster, second)
    finish(cluster, first)
    assert second.operation.error is None
    error = first.operation.error
    if policy == "greedy":
        assert error is None
    else:
        assert isinstance(error, AlreadyExists)
        assert error.differences == {"policy": ("balanced", "greedy")}
    assert [config.policy for config in configs(cluster)] == [policy]
    assert play_copies(cluster, first) == []


def test_a_deleted_group_is_revived_and_starts_from_nothing() -> None:
    """F9.5: its consumers were ended; new ones begin without its old mode, positions and settings."""
    cluster, (a, b) = company()
    cluster.must(GroupConfig(-1, policy="greedy", max_members=3))
    for client in (a, b):
        cluster.kill(client)
    cluster.run(I)
    assert finish(cluster, start_tool(cluster, RemovePlan, "rm")).operation.error is None
    with pytest.raises(GroupDeleted):
        change(cluster, policy="balanced")
    tool = finish(cluster, change(cluster, "create", create=True))
    assert tool.operation.error is None
    assert not cluster.group.deleted
    assert (configs(cluster)[-1].policy, configs(cluster)[-1].max_members) == ("", 0)
    cluster.add("c", mode=AT_MOST_ONCE)
    cluster.run(3 * I)
    assert cluster.owners() == {number: "c" for number in range(4)}
    assert play_copies(cluster, tool) == []


# --- another mode


def test_another_delivery_is_a_pause_and_the_end_of_all_sessions() -> None:
    """M14: by F9.6; positions stay, generations grow, and the group runs when the tool says that it changed."""
    cluster, (a, b) = company(handling=True)
    positions = [cluster.partition(number).position for number in range(4)]
    tool = finish(cluster, change(cluster, delivery="at_most_once"))
    assert tool.operation.error is None
    assert tool.kinds[-2:] == ["changed", "resumed"]
    assert not cluster.group.paused
    assert not cluster.group.sessions
    assert cluster.group.mode == AT_MOST_ONCE
    assert [cluster.partition(number).generation for number in range(4)] == [1] * 4
    cluster.run(2 * I)
    assert {type(a.member.error), type(b.member.error)} == {ModeMismatch}
    cluster.add("c", mode=AT_MOST_ONCE)
    cluster.run(3 * I)
    assert len(cluster.owners()) == 4
    assert [cluster.partition(number).position for number in range(4)] == positions
    assert play_copies(cluster, tool) == []


def test_the_same_delivery_needs_no_pause() -> None:
    cluster, _ = company()
    finish(cluster, change(cluster, delivery="at_least_once"))
    assert configs(cluster)[-1].mode == AT_LEAST_ONCE
    assert len(cluster.group.sessions) == 2
    assert not list(cluster.records(ReleaseGroup))


@pytest.mark.parametrize("records", range(6))
@pytest.mark.parametrize("kind", ["mode", "shrink"])
@pytest.mark.parametrize("written", [True, False])
def test_a_tool_that_dies_at_any_step_changes_all_or_nothing(records: int, kind: str, written: bool) -> None:
    """M14: whatever its last record was, and whether it was written; whoever consumes next ends its pause."""
    cluster, _ = company(handling=True)
    if kind == "mode":
        tool = change(cluster, delivery="at_most_once", crash_after=records + 1, duration_ms=PAUSE_MS)
    else:
        tool = shrink(cluster, 2, crash_after=records + 1)
    if not written:
        cluster.run_until(lambda: not tool.alive or tool.operation.ended)
        cluster.lose_in_flight(tool)
    cluster.run(PAUSE_MS + 4 * I)
    changed = all_or_nothing(cluster, kind)
    cluster.add("late", mode=cluster.group.mode)
    cluster.run(PAUSE_MS + 4 * I)
    assert not cluster.group.paused
    play_copies(cluster, tool)
    cluster.run(PAUSE_MS + 4 * I)  # a copy of its pause may begin it again
    assert all_or_nothing(cluster, kind) == changed
    assert not cluster.group.paused


def all_or_nothing(cluster: VirtualCluster, kind: str) -> bool:
    if kind == "mode":
        modes = {cluster.group.mode} | {session.join.mode for session in cluster.group.sessions.values()}
        assert len(modes) == 1
        return cluster.group.mode == AT_MOST_ONCE
    forgotten = [cluster.partition(number).position < 0 for number in range(4)]
    shrunk = bool([1 for verdict, record in cluster.records(Topology) if verdict.accepted and record.partitions == 2])
    assert forgotten[:2] == [False, False]
    assert shrunk or not any(forgotten)
    return shrunk


@pytest.mark.parametrize("after_ms", [*range(0, 40, 1), *range(2_990, 3_040, 2)])
@pytest.mark.parametrize("kind", ["mode", "shrink", "policy"])
def test_what_a_tool_says_when_it_gives_up_stays_true(after_ms: int, kind: str) -> None:
    """M14: interrupted at every ms. A change without a pause says when its record may still land."""
    cluster, _ = company(handling=after_ms > 1_000)
    if kind == "shrink":
        tool = shrink(cluster, 2)
    else:
        tool = change(cluster, **({"delivery": "at_most_once"} if kind == "mode" else {"policy": "greedy"}))
    cluster.run(after_ms)
    if tool.operation.ended:
        return
    tool.give_up()
    finish(cluster, tool)
    error = tool.operation.error
    changed = tool.operation.changed_at >= 0  # type: ignore[attr-defined]
    assert (error is None) == changed
    assert not cluster.group.paused
    pending = isinstance(error, AdminGaveUp) and error.pending
    assert not pending or kind == "policy"
    cluster.run(100)
    landed = play_copies(cluster, tool)
    if error is not None and not pending:
        assert not any(name in ("GroupConfig", "Topology") for name in landed)
        assert not [
            r
            for v, r in [*cluster.records(GroupConfig), *cluster.records(Topology)]
            if v.accepted and tool.operation.context.author.wrote(r.by)
        ]
    assert not cluster.group.paused


def test_an_interrupted_change_says_what_may_still_happen() -> None:
    """Planted both ways: before the record was sent, and after."""
    said = set()
    for after_ms in range(0, 8):
        cluster, _ = company()
        tool = change(cluster, policy="greedy")
        tool.write_ms = 30
        if after_ms:
            cluster.run(after_ms)
        tool.give_up()
        finish(cluster, tool)
        assert isinstance(tool.operation.error, AdminGaveUp)
        said.add(str(tool.operation.error).partition("; ")[2])
    assert said == {"it may still take effect; retrying is safe", "it will not take effect"}


def test_a_foreign_pause_is_respected() -> None:
    """M14: as M2: a change that needs a pause is refused in another admin's, with its name."""
    cluster, _ = company()
    finish(
        cluster,
        start_tool(cluster, lambda context: PausePlan(context, Terms("mine", duration_ms=60_000)), "bob", "bob@office"),
    )
    refused = finish(cluster, change(cluster, delivery="at_most_once"))
    assert isinstance(refused.operation.error, AdminBusy)
    assert cluster.group.mode == AT_LEAST_ONCE
    assert cluster.group.paused
    taken = finish(cluster, change(cluster, "taken", delivery="at_most_once", take_over=True))
    assert taken.operation.error is None
    assert not cluster.group.paused


@pytest.mark.parametrize("kind", ["delivery", "shrink"])
def test_a_change_in_an_adopted_pause_leaves_it_in_place(kind: str) -> None:
    """M14, M2: it needs the pause's token, and ends nothing."""
    cluster, _ = company()
    finish(cluster, start_tool(cluster, lambda context: PausePlan(context, Terms(duration_ms=600_000)), "pauser"))
    token = cluster.group.pause_change

    def run(name: str, **options: Any) -> Tool:
        if kind == "delivery":
            return change(cluster, name, delivery="at_most_once", **options)
        return start_tool(cluster, lambda context: ShrinkPlan(context, TOPIC, 2, Terms(**options)), name)

    refused = finish(cluster, run("unasked"))
    assert isinstance(refused.operation.error, AdminBusy)
    tool = finish(cluster, run("asked", adopt=True))
    assert tool.operation.error is None
    assert (cluster.group.paused, cluster.group.pause_change) == (True, token)
    assert not any(isinstance(record, ReleaseGroup) for record in tool.records)
    assert play_copies(cluster, tool) == []


def test_a_change_in_an_adopted_pause_that_is_interrupted_says_what_may_come() -> None:
    """M14: nothing of it ends that pause, so a record on its way may still be accepted."""
    cluster, _ = company()
    finish(cluster, start_tool(cluster, lambda context: PausePlan(context, Terms(duration_ms=600_000)), "pauser"))
    tool = change(cluster, delivery="at_most_once", adopt=True)
    cluster.run_until(lambda: any(isinstance(record, GroupConfig) for record in tool.records))
    tool.cut()
    tool.give_up()
    finish(cluster, tool)
    assert isinstance(tool.operation.error, AdminGaveUp)
    assert "may still take effect" in str(tool.operation.error)


# --- a topic that became smaller


def test_a_topic_shrinks_and_forgets_the_positions_beyond() -> None:
    """M14: by F9.2; the partitions that stay keep position and generation, and their consumers continue."""
    cluster, (a, b) = company(handling=True)
    for client in (a, b):
        client.member.topics.counts[TOPIC] = 2  # what Kafka says by now
    tool = finish(cluster, shrink(cluster, 2))
    assert tool.operation.error is None
    assert cluster.group.topics[TOPIC].count == 2
    assert [cluster.partition(number).position for number in (2, 3)] == [-1, -1]
    assert [cluster.partition(number).generation for number in range(4)] == [0, 0, 1, 1]
    cluster.run(3 * I)
    assert set(cluster.owners()) == {0, 1}
    assert not cluster.group.paused
    assert play_copies(cluster, tool) == []


def test_a_shrink_that_is_none_is_refused_before_the_pause() -> None:
    cluster, _ = company()
    for partitions in (0, 4, 5):
        with pytest.raises(InvalidOption, match="1 to 3"):
            shrink(cluster, partitions)
    with pytest.raises(GroupMissing, match="never consumed topic 'other'"):
        shrink(cluster, 1, topic="other")
    assert not list(cluster.records(ReleaseGroup))


def test_a_topic_that_grew_meanwhile_is_not_shrunk() -> None:
    """M13: what the user saw is what is changed, or nothing is."""
    cluster, _ = company(handling=True)
    tool = shrink(cluster, 2)
    cluster.run_until(lambda: cluster.group.paused)
    cluster.must(Topology(TOPIC, 6, cluster.group.topics[TOPIC].offset))
    finish(cluster, tool)
    assert isinstance(tool.operation.error, SettingsChanged)
    assert cluster.group.topics[TOPIC].count == 6
    assert not cluster.group.paused


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("revived", [False, True])
def test_a_shrink_whose_group_is_deleted_meanwhile(adopt: bool, revived: bool) -> None:
    """F9.5: the topic is gone with the group, also if that is there again when the tool looks."""
    cluster, _ = company()
    if adopt:
        finish(cluster, start_tool(cluster, lambda context: PausePlan(context, Terms(duration_ms=600_000)), "pauser"))
    tool = start_tool(cluster, lambda context: ShrinkPlan(context, TOPIC, 2, Terms(adopt=adopt)))
    cluster.run_until(lambda: any(isinstance(record, Topology) for record in tool.records))
    deletion = cluster.must(GroupConfig(-1, cluster.group.pause_change, deleted=True))
    if revived:
        cluster.must(GroupConfig(deletion))
    finish(cluster, tool)
    assert isinstance(tool.operation.error, SettingsChanged if revived else GroupDeleted)
    assert not cluster.group.paused


# --- who and why


def test_every_record_of_a_tool_says_who_and_why() -> None:
    """M1: user, host, tool, run; the reason in its own field, or after a colon; cut to fit into the record."""
    cluster, (a, _) = company()
    why = "disk is slow"
    plans: list[Any] = [
        lambda context: StepDownPlan(context, a.session, Terms(why)),
        lambda context: PositionPlan(context, [tp(0)], Terms(why)),
        lambda context: PausePlan(context, Terms(why)),
        lambda context: ResumePlan(context, Terms(why)),
        lambda context: ConfigPlan(context, {"delivery": "at_most_once"}, Terms(why)),
        lambda context: ShrinkPlan(context, TOPIC, 2, Terms(why)),
        lambda context: RemovePlan(context, Terms(why)),
    ]
    kinds = set()
    deserted = VirtualCluster(partitions=1)
    (dead,) = deserted.team("dead")
    deserted.kill(dead)
    deserted.run(I)
    tools = [finish(deserted, start_tool(deserted, lambda context: EvictPlan(context, {dead.session}, Terms(why))))]
    for number, make in enumerate(plans):
        tools.append(finish(cluster, start_tool(cluster, make, f"run {number}", positions={tp(0): 5})))
    for tool in tools:
        assert tool.operation.error is None, tool.operation.error
        who = tool.operation.context.author.by
        assert who.startswith("alice@desk test 1 run ")
        for record in tool.records:
            by, reason = getattr(record, "by", ""), getattr(record, "reason", None)
            kinds.add(type(record).__name__)
            assert by in (who, f"{who}: {why}")
            assert why in (reason or by), record
    assert kinds == {"Evict", "StepDown", "SetPosition", "ReleaseGroup", "GroupConfig", "Topology"}
    author = Author.of("u", "h", "t", b"1234")
    assert len(author.signed("ü" * BY_BYTES_MAX).encode()) <= BY_BYTES_MAX
    assert author.wrote(author.signed("ü" * BY_BYTES_MAX))
    assert not author.wrote(Author.of("u", "h", "t", b"1235").signed("x"))
    with pytest.raises(InvalidOption, match="255 bytes"):
        start_tool(cluster, lambda context: PausePlan(context, Terms("x" * 256)))


# --- what would be


def scene_of(client: Client) -> GroupContext:
    return GroupContext(
        client.world, GROUP, PauseHistory(GROUP), Author.of("alice", "desk", "test", b"1234"), client.rng.randbytes
    )


def test_an_outlook_is_what_then_happens_and_writes_nothing() -> None:
    """M12: by the fold itself; the digest of the world that was looked at stays."""
    cluster, (a, b) = company()
    cluster.run(I)
    context, digest, values = scene_of(a), a.group.digest(), len(cluster.values)
    looks = {
        "pause": impact.of_pause(context, a.now),
        "resume": impact.of_resume(context, a.now),
        "evict": impact.of_eviction(context, b.session),
        "step down": impact.of_step_down(context, b.session),
        "delete": impact.of_deletion(context, a.now),
        "policy": impact.of_settings(context, {"policy": "greedy"}, False, a.now),
        "mode": impact.of_settings(context, {"delivery": "at_most_once"}, False, a.now),
        "shrink": impact.of_shrink(context, TOPIC, 2, a.now),
    }
    assert (a.group.digest(), len(cluster.values)) == (digest, values)
    a.world.check()
    assert len(looks["pause"].releases) == len(looks["mode"].releases) == 4
    assert set(looks["shrink"].releases) == {"orders:2", "orders:3"}
    assert set(looks["evict"].releases.values()) == {"b"}
    assert "6 s" in looks["evict"].does[0]
    assert "not paused" in looks["resume"].does[0]
    assert looks["policy"].settings == {"policy": {"from": None, "to": "greedy"}}
    assert looks["mode"].settings == {"delivery": {"from": "at_least_once", "to": "at_most_once"}}
    assert looks["shrink"].settings == {"orders:2": {"from": 0, "to": None}, "orders:3": {"from": 0, "to": None}}
    assert len(looks["delete"].settings) == 4
    assert "refused" not in looks["delete"].does[-1]
    assert looks["step down"].does[-1].endswith(f"marshal groups update {GROUP} --policy own")
    finish(cluster, change(cluster, policy="greedy"))
    assert settings_of(cluster.group)["policy"] == "greedy"
    with pytest.raises(AlreadyExists):
        impact.of_settings(scene_of(a), {}, True, a.now)
    assert "has these settings already" in impact.of_settings(scene_of(a), {"policy": "greedy"}, True, a.now).does[0]
    finish(
        cluster,
        start_tool(cluster, lambda context: PausePlan(context, Terms("mine", duration_ms=60_000)), "bob", "bob@office"),
    )
    cluster.run(10)
    for refused in (impact.of_pause, impact.of_resume):
        with pytest.raises(AdminBusy):
            refused(scene_of(a), a.now)
        assert refused(scene_of(a), a.now, Terms(take_over=True)).does
    changed = {"delivery": "at_most_once"}
    for look in (
        lambda terms: impact.of_settings(scene_of(a), changed, False, a.now, terms),
        lambda terms: impact.of_shrink(scene_of(a), TOPIC, 2, a.now, terms),
    ):
        with pytest.raises(AdminBusy):
            look(Terms())
        assert look(Terms(take_over=True)).does
    assert impact.of_settings(scene_of(a), {"policy": "balanced"}, False, a.now).does, "that needs no pause"
    told = impact.of_deletion(scene_of(a), a.now, force=True).does[-1]
    assert told.startswith("As things are it would be refused: ")
    assert f"wait, or end it (marshal resume {GROUP} --token {a.group.pause_change}); " in told
    assert "refused" not in str(impact.of_deletion(scene_of(a), a.now).does), "it needs no pause of its own"
    assert not list(cluster.records(SetPosition))
