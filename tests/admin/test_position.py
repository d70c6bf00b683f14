"""Moving positions of a live group: PROTOCOL.md 14 on plans in virtual time, beside real members.

What every test of this file must not see: a position moved although the tool said that it did not, one of several moved
without the others, a pause that nobody ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from marshal_py.admin.plans.impact import Row, preview, rows_of
from marshal_py.admin.plans.operation import Author, GroupContext, Terms
from marshal_py.admin.plans.pause import PausePlan
from marshal_py.admin.plans.position import MOVED, NOT_MOVED, UNKNOWN, PositionPlan
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.errors import AdminBusy, AdminFailed, GroupMissing, InvalidRecord, LogGap
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import ReleaseGroup, ReleasingPartition, SetPosition, Topology
from tests.admin.virtual_admin import NEVER, Tool, finish, play_copies, start_tool
from tests.support.virtual_cluster import GROUP, INTERVAL_MS, Client, VirtualCluster, tp

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
WANTED = {tp(0): 500, tp(1): 700}


def move(
    cluster: VirtualCluster,
    name: str = "tool",
    who: str = "alice@desk",
    positions: Any = WANTED,
    crash_after: int = NEVER,
    stay_paused: bool = False,
    **options: Any,
) -> Tool:
    def make(context: GroupContext) -> PositionPlan:
        return PositionPlan(context, list(WANTED), Terms(**options), stay_paused=stay_paused)

    return start_tool(cluster, make, name, who, positions, crash_after)


def plan_of(tool: Tool) -> PositionPlan:
    assert isinstance(tool.operation, PositionPlan)
    return tool.operation


def positions(cluster: VirtualCluster) -> dict[TopicPartition, int]:
    return {where: cluster.group.partitions[where].position for where in WANTED}


def company(partitions: int = 3, handling: bool = False) -> tuple[VirtualCluster, list[Client]]:
    """Two consumers at work; `handling`: with a message in hand that does not get done."""
    cluster = VirtualCluster(partitions=partitions)
    team = cluster.team("a", "b")
    if handling:
        for client in team:
            for claim in client.member.claims.values():
                client.deliver(claim, 0)
    return cluster, team


def all_or_nothing(cluster: VirtualCluster, tool: Tool, was: dict[TopicPartition, int]) -> bool:
    """Whether it moved; that the tool's last word is true, now and after late copies of all that it sent."""
    moved = positions(cluster) == WANTED
    assert moved or positions(cluster) == was, "half a move"
    outcome = plan_of(tool).outcome
    if tool.operation.ended:
        assert outcome in ((MOVED, UNKNOWN) if moved else (NOT_MOVED, UNKNOWN))
    return moved


def test_positions_move_while_the_consumers_stay() -> None:
    """M6: and every consumer continues from the wanted position; a partition that is not named stays."""
    cluster, (a, b) = company()
    sessions = {a.session, b.session}
    tool = finish(cluster, move(cluster))
    plan = plan_of(tool)
    assert plan.error is None
    assert plan.outcome == MOVED
    assert positions(cluster) == WANTED
    assert not cluster.group.paused, "the move itself resumes"
    assert plan.before == {tp(0): 0, tp(1): 0}
    cluster.run(2 * I)
    assert {a.session, b.session} == sessions
    assert len(cluster.owners()) == 3
    for client in (a, b):
        for claim in client.member.claims.values():
            assert claim.position() == WANTED.get(claim.tp, 0)
    assert tool.kinds[-1] == "moved"
    assert play_copies(cluster, tool) == []


def test_a_move_waits_until_all_of_it_is_free() -> None:
    """M5: no SetPosition is sent before the last Release of its partitions was read, in the pause of its own token."""
    cluster, _ = company(handling=True)
    tool = finish(cluster, move(cluster))
    (sent_ms,) = [at for at, record in tool.sent if isinstance(record, SetPosition)]
    releases = [v.offset for v, r in cluster.records(ReleasingPartition) if v.accepted]
    assert cluster.appended_ms[max(releases)] + tool.read_ms <= sent_ms
    ((verdict, record),) = list(cluster.records(SetPosition))
    assert verdict.accepted
    assert record.resume
    pause = cluster.verdicts[record.token].record
    assert isinstance(pause, ReleaseGroup)
    assert plan_of(tool).context.author.wrote(pause.by)


def test_what_depends_on_the_end_is_looked_up_in_the_pause() -> None:
    """M5: a position that was looked up before the group drained would be an old one."""
    cluster, _ = company()
    looked: list[bool] = []

    def positions() -> dict[TopicPartition, int]:
        looked.append(cluster.group.paused and not cluster.owners())
        return WANTED

    finish(cluster, move(cluster, positions=positions))
    assert looked == [True]


def test_a_dead_owner_delays_a_move_and_does_not_stop_it() -> None:
    """M4: a silent session is evicted, also with nobody else in the group."""
    cluster = VirtualCluster(partitions=2)
    (victim,) = cluster.team("victim")
    cluster.kill(victim)
    tool = finish(cluster, move(cluster))
    assert plan_of(tool).outcome == MOVED
    assert "evicting" in tool.kinds


@pytest.mark.parametrize("records", range(8))
@pytest.mark.parametrize("written", [True, False])
def test_a_tool_that_dies_at_any_step_moves_all_or_nothing(records: int, written: bool) -> None:
    """M9: whatever its last record was, and whether that was written. The members end its pause and continue."""
    cluster, _ = company(handling=True)
    was = positions(cluster)
    tool = move(cluster, crash_after=records + 1, duration_ms=9_000)
    if not written:
        cluster.run_until(lambda: not tool.alive or tool.operation.ended)
        cluster.lose_in_flight(tool)
    cluster.run(9_000 + 4 * I)
    moved = all_or_nothing(cluster, tool, was)
    assert not cluster.group.paused
    assert len(cluster.owners()) == 3
    play_copies(cluster, tool)
    cluster.run(9_000 + 4 * I)  # a copy of its pause may begin it again: members end that too
    assert all_or_nothing(cluster, tool, was) == moved
    assert not cluster.group.paused


@pytest.mark.parametrize("after_ms", [*range(0, 60), *range(2_990, 3_060)])
@pytest.mark.parametrize("write_ms", [4, 23])
def test_what_a_tool_says_when_it_gives_up_stays_true(after_ms: int, write_ms: int) -> None:
    """M7: interrupted at every ms; its last word holds after late copies of all that it sent, and no pause is left."""
    cluster, _ = company(handling=after_ms > 1_000)
    was = positions(cluster)
    tool = move(cluster, duration_ms=9_000)
    tool.write_ms = write_ms
    cluster.run(after_ms)
    if tool.operation.ended:
        return
    tool.give_up()
    finish(cluster, tool)
    plan = plan_of(tool)
    assert plan.outcome != UNKNOWN
    assert (plan.error is None) == (plan.outcome == MOVED)
    assert plan.error is None or (isinstance(plan.error, AdminFailed) and plan.error.outcome == plan.outcome)
    moved = all_or_nothing(cluster, tool, was)
    assert moved == (plan.outcome == MOVED)
    assert not cluster.group.paused
    assert play_copies(cluster, tool) == []
    cluster.run(I)
    play_copies(cluster, tool)
    assert all_or_nothing(cluster, tool, was) == moved
    assert not cluster.group.paused


def test_both_ends_of_a_move_are_seen_when_it_is_interrupted() -> None:
    """The test above would prove nothing if every interruption came too early or too late."""
    outcomes = set()
    for after_ms in range(0, 60):
        cluster, _ = company()
        tool = move(cluster)
        cluster.run(after_ms)
        tool.give_up()
        finish(cluster, tool)
        outcomes.add(plan_of(tool).outcome)
    assert outcomes == {MOVED, NOT_MOVED}


def test_held_is_no_answer() -> None:
    """M7: X36: a copy that was rejected by `held` is not dead; the tool says nothing before its token is."""
    cluster, (a, _) = company(handling=True)
    tool = move(cluster, duration_ms=60_000)
    cluster.run_until(lambda: cluster.group.paused)
    plan = plan_of(tool)
    cluster.run(20)
    # As if the tool had sent it too early: the record is its own, the partition still held.
    early = SetPosition(cluster.group.pause_change, plan_moves(cluster), True, plan.context.author.by)
    assert cluster.inject(early).reason == "held"
    plan._sent_ms[early] = 0
    cluster.run(20)
    assert plan.outcome == UNKNOWN, "while its token lives it may still land"
    tool.give_up()
    finish(cluster, tool)
    assert plan.outcome == NOT_MOVED
    assert cluster.inject(early).reason in ("paused", "token")
    assert a.alive


def plan_moves(cluster: VirtualCluster) -> Any:
    from marshal_py.protocol.wire.records import Move

    return tuple(Move(*where, cluster.group.partitions[where].version, to) for where, to in WANTED.items())


def test_a_tool_that_cannot_read_says_unknown() -> None:
    """M8: with the command that finds out. It did not hear that everything moved."""
    cluster, _ = company()
    tool = move(cluster, patience_ms=10_000)
    cluster.run_until(lambda: any(isinstance(r, SetPosition) for r in tool.records))
    tool.reads_held = True
    finish(cluster, tool)
    plan = plan_of(tool)
    assert plan.outcome == UNKNOWN
    assert isinstance(plan.error, AdminFailed)
    assert plan.error.outcome == UNKNOWN
    assert plan.error.command == f"marshal explain {GROUP} orders:0"
    assert positions(cluster) == WANTED


@pytest.mark.parametrize(("sent", "outcome"), [(False, NOT_MOVED), (True, UNKNOWN)])
def test_a_log_that_breaks_is_reported_truthfully(sent: bool, outcome: str) -> None:
    """M8: also when the log itself cannot be read on, it says what is true: nothing sent, nothing moved."""
    cluster, _ = company()
    tool = move(cluster)
    cluster.run_until(lambda: any(isinstance(r, SetPosition if sent else ReleaseGroup) for r in tool.records))
    tool.operation.end(LogGap(0, 10, 12))
    error = plan_of(tool).error
    assert isinstance(error, AdminFailed)
    assert error.outcome == plan_of(tool).outcome == outcome


def test_a_tool_that_never_sent_the_move_knows_that_nothing_moved() -> None:
    """M7: without reading, too."""
    cluster, _ = company()
    tool = move(cluster, patience_ms=10_000)
    tool.cut()
    finish(cluster, tool)
    error = plan_of(tool).error
    assert isinstance(error, AdminFailed)
    assert error.outcome == NOT_MOVED


def test_a_lost_record_is_sent_again() -> None:
    cluster, _ = company()
    tool = move(cluster)
    tool.hold_writes()
    cluster.run(100)
    tool.release_writes(lose=True)
    finish(cluster, tool)
    assert plan_of(tool).outcome == MOVED


def test_a_short_pause_is_asked_for_again() -> None:
    """M2: members may end a pause before every partition is free; the tool pauses again and reports what is true."""
    cluster, team = company(handling=True)
    tool = move(cluster, duration_ms=1_000)
    tool.cut()  # it cannot renew
    tool.heal()
    cluster.run_until(lambda: cluster.group.paused)
    tool.cut()
    cluster.run(4 * I)
    assert not cluster.group.paused, "ended by the members"
    tool.heal()
    finish(cluster, tool)
    assert plan_of(tool).outcome == MOVED
    assert positions(cluster) == WANTED
    assert team[0].alive


def test_two_admins_move_one_after_the_other() -> None:
    """M2: the second admin gets an error that names the first; a take-over makes the first one fail."""
    cluster, _ = company(handling=True)
    first = move(cluster, "first", "bob@office")
    cluster.run(200)
    second = finish(cluster, move(cluster, "second"))
    assert isinstance(plan_of(second).error, AdminBusy)
    assert "left; no position moved, and none will: wait, " in str(plan_of(second).error)
    third = move(cluster, "third", positions={tp(0): 1, tp(1): 2}, take_over=True)
    finish(cluster, first)
    finish(cluster, third)
    assert isinstance(plan_of(first).error, AdminBusy)
    assert "; it took over from this operation, and no position moved, and none will: " in str(plan_of(first).error)
    assert str(plan_of(first).error).endswith(f"; who did what: marshal explain {cluster.group.name}")
    assert plan_of(first).outcome == NOT_MOVED
    assert plan_of(third).outcome == MOVED
    assert positions(cluster) == {tp(0): 1, tp(1): 2}
    assert play_copies(cluster, first) == []
    assert positions(cluster) == {tp(0): 1, tp(1): 2}


def paused(cluster: VirtualCluster, who: str = "alice@desk", keep: bool = False, **options: Any) -> Tool:
    """Somebody has paused the group."""
    terms = Terms("look", **options)
    tool = start_tool(cluster, lambda context: PausePlan(context, terms, keep=keep), "pauser", who)
    cluster.run_until(lambda: cluster.group.paused)
    return tool


def test_a_move_leaves_a_pause_of_the_same_person_alone() -> None:
    """M2: it may be a colleague's on the same bastion, whose work at the stopped group is not over."""
    cluster, _ = company()
    pause = finish(cluster, paused(cluster))
    token = cluster.group.pause_change
    error = plan_of(finish(cluster, move(cluster))).error
    assert isinstance(error, AdminBusy)
    assert (error.own, error.token, error.reason) == (True, token, "look")
    assert cluster.group.pause_change == token
    assert cluster.group.paused
    assert play_copies(cluster, pause) == []


@pytest.mark.parametrize("by", ["token", "adopt"])
def test_a_move_works_in_the_pause_that_it_is_told_of(by: str) -> None:
    """M2: release, look around, then move; the pause stays as it was, its token and its duration too."""
    cluster, _ = company()
    pause = finish(cluster, paused(cluster, "alice@desk" if by == "adopt" else "bob@office", duration_ms=600_000))
    token = cluster.group.pause_change
    options: dict[str, Any] = {"adopt": True} if by == "adopt" else {"token": token}
    tool = finish(cluster, move(cluster, **options))
    plan = plan_of(tool)
    assert plan.outcome == MOVED
    assert positions(cluster) == WANTED
    assert cluster.group.paused
    assert plan.token == cluster.group.pause_change == token
    assert cluster.group.pause_duration_ms == 600_000
    assert not any(isinstance(record, ReleaseGroup) for record in tool.records)
    assert play_copies(cluster, pause) == play_copies(cluster, tool) == []
    assert positions(cluster) == WANTED
    assert plan_of(finish(cluster, move(cluster, "again", positions={tp(0): 1, tp(1): 2}, **options))).outcome == MOVED
    assert cluster.group.paused


def test_an_adopted_pause_that_is_renewed_stays_adopted() -> None:
    """M2: a kept pause has another token every third of its duration, and is the same pause."""
    cluster, team = company(handling=True)
    keeper = paused(cluster, keep=True, duration_ms=900)
    first = cluster.group.pause_change
    tool = move(cluster, adopt=True)
    finish(cluster, tool)
    assert plan_of(tool).outcome == MOVED
    assert cluster.group.pause_change > first
    assert cluster.group.paused
    assert team[0].alive
    keeper.give_up()
    finish(cluster, keeper)
    assert not cluster.group.paused


def test_an_adopted_pause_that_ends_ends_the_move() -> None:
    """M2: it pauses nothing by itself then, because its user believes that the group is paused."""
    cluster, _ = company(handling=True)
    keeper = paused(cluster, keep=True)
    tool = move(cluster, adopt=True)
    cluster.run(10)
    keeper.give_up()
    finish(cluster, tool)
    assert plan_of(tool).outcome == NOT_MOVED
    assert "not in the pause" in str(plan_of(tool).error)
    assert tool.records == []


@pytest.mark.parametrize("options", [{"adopt": True}, {"token": 3}])
def test_a_pause_that_is_not_there_is_not_adopted(options: dict[str, Any]) -> None:
    """M2: a user who names a pause believes that the group is paused; nothing is paused or moved."""
    cluster, _ = company()
    tool = finish(cluster, move(cluster, **options))
    assert plan_of(tool).outcome == NOT_MOVED
    assert "nobody has paused it" in str(plan_of(tool).error)
    assert tool.records == []


@pytest.mark.parametrize("lost", [False, True])
def test_a_move_in_an_adopted_pause_that_is_interrupted_says_what_is_true(lost: bool) -> None:
    """M7, M8: nothing of it ends that pause, so it waits for its record's fate; unread, it says *unknown*."""
    cluster, _ = company()
    finish(cluster, paused(cluster, duration_ms=600_000))
    tool = move(cluster, adopt=True)
    cluster.run_until(lambda: any(isinstance(record, SetPosition) for record in tool.records))
    if lost:
        tool.cut()
    tool.give_up()
    finish(cluster, tool)
    assert plan_of(tool).outcome == (UNKNOWN if lost else MOVED)
    assert cluster.group.paused
    if not lost:
        assert positions(cluster) == WANTED


def test_what_can_be_refused_is_refused_before_the_pause() -> None:
    """M3: an unknown topic or partition, and a record that no broker takes."""
    cluster, _ = company(partitions=2)

    def refused(error: type[Exception], *tps: TopicPartition) -> None:
        with pytest.raises(error):
            start_tool(cluster, lambda context: PositionPlan(context, tps))

    refused(GroupMissing, TopicPartition("other", 0))
    refused(GroupMissing, tp(0), tp(2))
    cluster.must(Topology("large" * 40, 90_000, -1))
    refused(InvalidRecord, *(TopicPartition("large" * 40, number) for number in range(90_000)))
    assert not list(cluster.records(ReleaseGroup))


def test_what_lies_below_a_parked_position_is_not_said_to_be_repeated() -> None:
    """It may lie beyond the end: the messages in between do not exist."""
    assert rows_of({}, {tp(0): 900}, {tp(0): 10}, {tp(0): 0}, {tp(0)}) == [Row(tp(0).topic, 0, "", 900, 10, 0, 0)]


def test_without_a_position_all_before_the_target_is_said_to_be_skipped() -> None:
    """Also of a parked partition: then its topic was created again, and what was finished is of the old one."""
    for parked in (set(), {tp(0)}):
        finished = {tp(0): [Range(8, 20, 0)]} if parked else {}
        rows = rows_of({}, {tp(0): NONE}, {tp(0): 10, tp(1): 4}, {tp(0): 7, tp(1): 4}, parked, finished)
        assert [(row.position, row.skipped, row.repeated) for row in rows] == [(NONE, 3, 0), (NONE, 0, 0)]


@pytest.mark.parametrize(
    ("target", "skipped", "repeated"), [(10, 0, 5), (11, 1, 5), (14, 2, 3), (18, 4, 1), (20, 5, 0), (8, 0, 7)]
)
def test_what_is_finished_above_the_position_is_said_to_come_again(target: int, skipped: int, repeated: int) -> None:
    """D1: every move forgets it, also one to where the position is."""
    finished = {tp(0): [Range(12, 16, 0), Range(18, 19, 0)]}
    (row,) = rows_of({}, {tp(0): 10}, {tp(0): target}, {tp(0): 0}, finished=finished)
    assert (row.skipped, row.repeated) == (skipped, repeated)
    (parked,) = rows_of({}, {tp(0): 10}, {tp(0): target}, {tp(0): 0}, {tp(0)}, finished)
    assert (parked.skipped, parked.repeated) == (0, 0)


def test_the_dry_run_writes_nothing_and_tells_the_truth() -> None:
    """M12: the rows of the preview are what the move then does."""
    cluster, (a, b) = company()
    cluster.run(I)
    context = GroupContext(
        a.world, GROUP, PauseHistory(GROUP), Author.of("alice", "desk", "test", b"1234"), a.rng.randbytes
    )
    digest, values = a.group.digest(), len(cluster.values)
    rows = preview(context, {tp(0): 500, tp(1): 0}, {tp(0): 0, tp(1): 0})
    assert (a.group.digest(), len(cluster.values)) == (digest, values)
    a.world.check()
    assert [(row.partition, row.position, row.target, row.skipped, row.repeated) for row in rows] == [
        (0, 0, 500, 500, 0),
        (1, 0, 0, 0, 0),
    ]
    assert {row.owner for row in rows} <= {"a", "b"}
    with pytest.raises(AdminFailed, match=r"would not be changed: positions move.*there is no such partition"):
        preview(context, {tp(99): 1}, {})
    tool = finish(cluster, move(cluster, positions={tp(0): 500, tp(1): 0}))
    assert plan_of(tool).outcome == MOVED
    assert {row.partition: row.target for row in rows} == {
        where.partition: position for where, position in positions(cluster).items()
    }
    assert b.alive


def test_a_move_under_late_copies_of_another_run() -> None:
    """M1: a copy of yesterday's run is not today's answer."""
    cluster, _ = company()
    yesterday = finish(cluster, move(cluster, "yesterday"))
    cluster.run(I)
    today = move(cluster, "today", positions={tp(0): 1, tp(1): 2})
    check: list[Callable[[], object]] = [lambda: play_copies(cluster, yesterday)]
    cluster.run_until(lambda: cluster.group.paused)
    assert check[0]() == []
    finish(cluster, today)
    assert positions(cluster) == {tp(0): 1, tp(1): 2}
    assert play_copies(cluster, yesterday) == []
