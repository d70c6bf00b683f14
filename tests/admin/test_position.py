"""Moving positions of a live group: PROTOCOL.md 14 on plans in virtual time, beside real members.

What every test of this file must not see: a position moved although the tool said that it did not, one of several moved
without the others, a pause that nobody ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from marshal_py.admin.author import Author
from marshal_py.admin.errand import Scene
from marshal_py.admin.ledger import Ledger
from marshal_py.admin.pause import PausePlan
from marshal_py.admin.position import MOVED, NOT_MOVED, UNKNOWN, PositionPlan
from marshal_py.admin.preview import Row, preview, rows_of
from marshal_py.errors import AdminBusy, GroupMissing, InvalidRecord, LogGap, PositionNotMoved, PositionUnknown
from marshal_py.protocol.identity import TopicPartition
from marshal_py.protocol.records import ReleaseGroup, ReleasingPartition, SetPosition, Topology
from tests.admin.theatre import NEVER, Tool, finish, hire, play_copies
from tests.support.stage import GROUP, INTERVAL_MS, Client, Stage, tp

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
WANTED = {tp(0): 500, tp(1): 700}


def move(
    stage: Stage,
    name: str = "tool",
    who: str = "alice@desk",
    aims: Any = WANTED,
    crash_after: int = NEVER,
    **options: Any,
) -> Tool:
    def make(scene: Scene) -> PositionPlan:
        return PositionPlan(scene, list(WANTED), **options)

    return hire(stage, make, name, who, aims, crash_after)


def plan_of(tool: Tool) -> PositionPlan:
    assert isinstance(tool.errand, PositionPlan)
    return tool.errand


def positions(stage: Stage) -> dict[TopicPartition, int]:
    return {where: stage.group.partitions[where].position for where in WANTED}


def company(partitions: int = 3, handling: bool = False) -> tuple[Stage, list[Client]]:
    """Two consumers at work; `handling`: with a message in hand that does not get done."""
    stage = Stage(partitions=partitions)
    team = stage.team("a", "b")
    if handling:
        for client in team:
            for claim in client.member.claims.values():
                client.deliver(claim, 0)
    return stage, team


def all_or_nothing(stage: Stage, tool: Tool, was: dict[TopicPartition, int]) -> bool:
    """Whether it moved; that the tool's last word is true, now and after late copies of all that it sent."""
    moved = positions(stage) == WANTED
    assert moved or positions(stage) == was, "half a move"
    outcome = plan_of(tool).outcome
    if tool.errand.ended:
        assert outcome in ((MOVED, UNKNOWN) if moved else (NOT_MOVED, UNKNOWN))
    return moved


def test_positions_move_while_the_consumers_stay() -> None:
    """M6: and every consumer goes on from the wanted position; the partition that was not named stays where it was."""
    stage, (a, b) = company()
    sessions = {a.session, b.session}
    tool = finish(stage, move(stage))
    plan = plan_of(tool)
    assert plan.error is None
    assert plan.outcome == MOVED
    assert positions(stage) == WANTED
    assert not stage.group.paused, "the move itself resumes"
    assert plan.before == {tp(0): 0, tp(1): 0}
    stage.run(2 * I)
    assert {a.session, b.session} == sessions
    assert len(stage.owners()) == 3
    for client in (a, b):
        for claim in client.member.claims.values():
            assert claim.position() == WANTED.get(claim.tp, 0)
    assert tool.kinds[-1] == "moved"
    assert play_copies(stage, tool) == []


def test_a_move_waits_until_all_of_it_is_free() -> None:
    """M5: no SetPosition is sent before the last Release of its partitions was read, in the pause of its own token."""
    stage, _ = company(handling=True)
    tool = finish(stage, move(stage))
    (sent_ms,) = [at for at, record in tool.sent if isinstance(record, SetPosition)]
    releases = [v.offset for v, r in stage.records(ReleasingPartition) if v.accepted]
    assert stage.appended_ms[max(releases)] + tool.read_ms <= sent_ms
    ((verdict, record),) = list(stage.records(SetPosition))
    assert verdict.accepted
    assert record.resume
    pause = stage.verdicts[record.token].record
    assert isinstance(pause, ReleaseGroup)
    assert plan_of(tool).scene.author.wrote(pause.by)


def test_what_depends_on_the_end_is_looked_up_in_the_pause() -> None:
    """M5: a position that was looked up before the group drained would be an old one."""
    stage, _ = company()
    looked: list[bool] = []

    def aims() -> dict[TopicPartition, int]:
        looked.append(stage.group.paused and not stage.owners())
        return WANTED

    finish(stage, move(stage, aims=aims))
    assert looked == [True]


def test_a_dead_owner_delays_a_move_and_does_not_stop_it() -> None:
    """M4: it is waited out, also with nobody else in the group."""
    stage = Stage(partitions=2)
    (victim,) = stage.team("victim")
    stage.kill(victim)
    tool = finish(stage, move(stage))
    assert plan_of(tool).outcome == MOVED
    assert "evicting" in tool.kinds


@pytest.mark.parametrize("records", range(8))
@pytest.mark.parametrize("written", [True, False])
def test_a_tool_that_dies_at_any_step_moves_all_or_nothing(records: int, written: bool) -> None:
    """M9: whatever its last record was, and whether that was written. The members end its pause and go on."""
    stage, _ = company(handling=True)
    was = positions(stage)
    tool = move(stage, crash_after=records + 1, duration_ms=9_000)
    if not written:
        stage.run_until(lambda: not tool.alive or tool.errand.ended)
        stage._flying = [flight for flight in stage._flying if flight[2] is not tool]
    stage.run(9_000 + 4 * I)
    moved = all_or_nothing(stage, tool, was)
    assert not stage.group.paused
    assert len(stage.owners()) == 3
    play_copies(stage, tool)
    stage.run(9_000 + 4 * I)  # a copy of its pause may begin it anew: members end that too
    assert all_or_nothing(stage, tool, was) == moved
    assert not stage.group.paused


@pytest.mark.parametrize("after_ms", [*range(0, 60), *range(2_990, 3_060)])
@pytest.mark.parametrize("write_ms", [4, 23])
def test_what_a_tool_says_when_it_gives_up_stays_true(after_ms: int, write_ms: int) -> None:
    """M7: interrupted at every ms; its last word holds after late copies of all that it sent, and no pause is left."""
    stage, _ = company(handling=after_ms > 1_000)
    was = positions(stage)
    tool = move(stage, duration_ms=9_000)
    tool.write_ms = write_ms
    stage.run(after_ms)
    if tool.errand.ended:
        return
    tool.give_up()
    finish(stage, tool)
    plan = plan_of(tool)
    assert plan.outcome != UNKNOWN
    assert (plan.error is None) == (plan.outcome == MOVED)
    assert isinstance(plan.error, PositionNotMoved | None)
    moved = all_or_nothing(stage, tool, was)
    assert moved == (plan.outcome == MOVED)
    assert not stage.group.paused
    assert play_copies(stage, tool) == []
    stage.run(I)
    play_copies(stage, tool)
    assert all_or_nothing(stage, tool, was) == moved
    assert not stage.group.paused


def test_both_ends_of_a_move_are_seen_when_it_is_interrupted() -> None:
    """The test above would prove nothing if every interruption came too early or too late."""
    outcomes = set()
    for after_ms in range(0, 60):
        stage, _ = company()
        tool = move(stage)
        stage.run(after_ms)
        tool.give_up()
        finish(stage, tool)
        outcomes.add(plan_of(tool).outcome)
    assert outcomes == {MOVED, NOT_MOVED}


def test_held_is_no_answer() -> None:
    """M7: X36: a copy that was rejected by `held` is not dead; the tool says nothing before its token is."""
    stage, (a, _) = company(handling=True)
    tool = move(stage, duration_ms=60_000)
    stage.run_until(lambda: stage.group.paused)
    plan = plan_of(tool)
    stage.run(20)
    # As if the tool had sent it too early: the record is its own, the partition still held.
    early = SetPosition(stage.group.pause_change, plan_moves(stage), True, plan.scene.author.by)
    assert stage.inject(early).reason == "held"
    plan._sent_ms[early] = 0
    stage.run(20)
    assert plan.outcome == UNKNOWN, "while its token lives it may still land"
    tool.give_up()
    finish(stage, tool)
    assert plan.outcome == NOT_MOVED
    assert stage.inject(early).reason in ("paused", "token")
    assert a.alive


def plan_moves(stage: Stage) -> Any:
    from marshal_py.protocol.records import Move

    return tuple(Move(*where, stage.group.partitions[where].version, to) for where, to in WANTED.items())


def test_a_tool_that_cannot_read_says_unknown() -> None:
    """M8: with the command that finds out. It did not hear that everything moved."""
    stage, _ = company()
    tool = move(stage, patience_ms=10_000)
    stage.run_until(lambda: any(isinstance(r, SetPosition) for r in tool.records))
    tool.reads_held = True
    finish(stage, tool)
    plan = plan_of(tool)
    assert plan.outcome == UNKNOWN
    assert isinstance(plan.error, PositionUnknown)
    assert plan.error.command == f"marshal explain {GROUP} orders:0"
    assert positions(stage) == WANTED


@pytest.mark.parametrize(("sent", "error"), [(False, PositionNotMoved), (True, PositionUnknown)])
def test_a_log_that_breaks_leaves_no_lie_behind(sent: bool, error: type[Exception]) -> None:
    """M8: also when the log itself cannot be read on, it says what is true: nothing sent, nothing moved."""
    stage, _ = company()
    tool = move(stage)
    stage.run_until(lambda: any(isinstance(r, SetPosition if sent else ReleaseGroup) for r in tool.records))
    tool.errand.end(LogGap(0, 10, 12))
    assert type(plan_of(tool).error) is error


def test_a_tool_that_never_sent_the_move_knows_that_nothing_moved() -> None:
    """M7: without reading, too."""
    stage, _ = company()
    tool = move(stage, patience_ms=10_000)
    tool.cut()
    finish(stage, tool)
    assert isinstance(plan_of(tool).error, PositionNotMoved)


def test_a_lost_record_is_sent_again() -> None:
    stage, _ = company()
    tool = move(stage)
    tool.hold_writes()
    stage.run(100)
    tool.release_writes(lose=True)
    finish(stage, tool)
    assert plan_of(tool).outcome == MOVED


def test_a_short_pause_is_asked_for_again() -> None:
    """M2: members may wait a pause out before everybody has let go; the tool asks again and says the truth."""
    stage, team = company(handling=True)
    tool = move(stage, duration_ms=1_000)
    tool.cut()  # it cannot renew
    tool.heal()
    stage.run_until(lambda: stage.group.paused)
    tool.cut()
    stage.run(4 * I)
    assert not stage.group.paused, "waited out by the members"
    tool.heal()
    finish(stage, tool)
    assert plan_of(tool).outcome == MOVED
    assert positions(stage) == WANTED
    assert team[0].alive


def test_two_admins_move_one_after_the_other() -> None:
    """M2: whoever comes second is told of the first; a take-over ends the first one's hope, and it says so."""
    stage, _ = company(handling=True)
    first = move(stage, "first", "bob@office")
    stage.run(200)
    second = finish(stage, move(stage, "second"))
    assert isinstance(plan_of(second).error, AdminBusy)
    third = move(stage, "third", aims={tp(0): 1, tp(1): 2}, take_over=True)
    finish(stage, first)
    finish(stage, third)
    assert isinstance(plan_of(first).error, AdminBusy)
    assert plan_of(first).outcome == NOT_MOVED
    assert plan_of(third).outcome == MOVED
    assert positions(stage) == {tp(0): 1, tp(1): 2}
    assert play_copies(stage, first) == []
    assert positions(stage) == {tp(0): 1, tp(1): 2}


def paused(stage: Stage, who: str = "alice@desk", **options: Any) -> Tool:
    """Somebody has paused the group."""
    tool = hire(stage, lambda scene: PausePlan(scene, reason="look", **options), "pauser", who)
    stage.run_until(lambda: stage.group.paused)
    return tool


def test_a_move_leaves_a_pause_of_the_same_person_alone() -> None:
    """M2: it may be a colleague's on the same bastion, whose work at the stopped group is not over."""
    stage, _ = company()
    pause = finish(stage, paused(stage))
    token = stage.group.pause_change
    error = plan_of(finish(stage, move(stage))).error
    assert isinstance(error, AdminBusy)
    assert (error.own, error.token, error.reason) == (True, token, "look")
    assert stage.group.pause_change == token
    assert stage.group.paused
    assert play_copies(stage, pause) == []


@pytest.mark.parametrize("by", ["token", "adopt"])
def test_a_move_works_in_the_pause_that_it_is_told_of(by: str) -> None:
    """M2: release, look around, then move; the pause stays as it was, its token and its duration too."""
    stage, _ = company()
    pause = finish(stage, paused(stage, "alice@desk" if by == "adopt" else "bob@office", duration_ms=600_000))
    token = stage.group.pause_change
    options: dict[str, Any] = {"adopt": True} if by == "adopt" else {"token": token}
    tool = finish(stage, move(stage, **options))
    plan = plan_of(tool)
    assert plan.outcome == MOVED
    assert positions(stage) == WANTED
    assert stage.group.paused
    assert plan.token == stage.group.pause_change == token
    assert stage.group.pause_duration_ms == 600_000
    assert not any(isinstance(record, ReleaseGroup) for record in tool.records)
    assert play_copies(stage, pause) == play_copies(stage, tool) == []
    assert positions(stage) == WANTED
    assert plan_of(finish(stage, move(stage, "again", aims={tp(0): 1, tp(1): 2}, **options))).outcome == MOVED
    assert stage.group.paused


def test_an_adopted_pause_that_is_renewed_stays_adopted() -> None:
    """M2: a kept pause has another token every third of its duration, and is the same pause."""
    stage, team = company(handling=True)
    keeper = paused(stage, keep=True, duration_ms=900)
    first = stage.group.pause_change
    tool = move(stage, adopt=True)
    finish(stage, tool)
    assert plan_of(tool).outcome == MOVED
    assert stage.group.pause_change > first
    assert stage.group.paused
    assert team[0].alive
    keeper.give_up()
    finish(stage, keeper)
    assert not stage.group.paused


def test_an_adopted_pause_that_ends_ends_the_move() -> None:
    """M2: it pauses nothing by itself then: its user thinks that the group stands still all the time."""
    stage, _ = company(handling=True)
    keeper = paused(stage, keep=True)
    tool = move(stage, adopt=True)
    stage.run(10)
    keeper.give_up()
    finish(stage, tool)
    assert plan_of(tool).outcome == NOT_MOVED
    assert "not in the pause" in str(plan_of(tool).error)
    assert tool.records == []


@pytest.mark.parametrize("options", [{"adopt": True}, {"token": 3}])
def test_a_pause_that_is_not_there_is_not_adopted(options: dict[str, Any]) -> None:
    """M2: whoever names a pause thinks that the group stands still; nothing is paused or moved."""
    stage, _ = company()
    tool = finish(stage, move(stage, **options))
    assert plan_of(tool).outcome == NOT_MOVED
    assert "nobody has paused it" in str(plan_of(tool).error)
    assert tool.records == []


@pytest.mark.parametrize("lost", [False, True])
def test_a_move_in_an_adopted_pause_that_is_interrupted_says_what_is_true(lost: bool) -> None:
    """M7, M8: nothing of it ends that pause, so it waits for its record's fate; unread, it says *unknown*."""
    stage, _ = company()
    finish(stage, paused(stage, duration_ms=600_000))
    tool = move(stage, adopt=True)
    stage.run_until(lambda: any(isinstance(record, SetPosition) for record in tool.records))
    if lost:
        tool.cut()
    tool.give_up()
    finish(stage, tool)
    assert plan_of(tool).outcome == (UNKNOWN if lost else MOVED)
    assert stage.group.paused
    if not lost:
        assert positions(stage) == WANTED


def test_what_can_be_refused_is_refused_before_the_pause() -> None:
    """M3: an unknown topic or partition, and a record that no broker takes."""
    stage, _ = company(partitions=2)

    def refused(error: type[Exception], *tps: TopicPartition) -> None:
        with pytest.raises(error):
            hire(stage, lambda scene: PositionPlan(scene, tps))

    refused(GroupMissing, TopicPartition("other", 0))
    refused(GroupMissing, tp(0), tp(2))
    stage.must(Topology("large" * 40, 90_000, -1))
    refused(InvalidRecord, *(TopicPartition("large" * 40, number) for number in range(90_000)))
    assert not list(stage.records(ReleaseGroup))


def test_what_lies_below_a_parked_position_is_not_said_to_be_repeated() -> None:
    """It may lie beyond the end: the messages in between do not exist."""
    assert rows_of({}, {tp(0): 900}, {tp(0): 10}, {tp(0)}) == [Row(tp(0).topic, 0, "", 900, 10, 0, 0)]


def test_the_dry_run_writes_nothing_and_tells_the_truth() -> None:
    """M12: the rows of the preview are what the move then does."""
    stage, (a, b) = company()
    stage.run(I)
    scene = Scene(a.world, GROUP, Ledger(GROUP), Author.of("alice", "desk", "test", b"1234"), a.rng.randbytes)
    digest, values = a.group.digest(), len(stage.values)
    rows = preview(scene, {tp(0): 500, tp(1): 0})
    assert (a.group.digest(), len(stage.values)) == (digest, values)
    a.world.check()
    assert [(row.partition, row.position, row.target, row.skipped, row.repeated) for row in rows] == [
        (0, 0, 500, 500, 0),
        (1, 0, 0, 0, 0),
    ]
    assert {row.owner for row in rows} <= {"a", "b"}
    with pytest.raises(PositionNotMoved, match="topology"):
        preview(scene, {tp(99): 1})
    tool = finish(stage, move(stage, aims={tp(0): 500, tp(1): 0}))
    assert plan_of(tool).outcome == MOVED
    assert {row.partition: row.target for row in rows} == {
        where.partition: position for where, position in positions(stage).items()
    }
    assert b.alive


def test_a_move_under_late_copies_of_another_run() -> None:
    """M1: a copy of yesterday's run is not today's answer."""
    stage, _ = company()
    yesterday = finish(stage, move(stage, "yesterday"))
    stage.run(I)
    today = move(stage, "today", aims={tp(0): 1, tp(1): 2})
    check: list[Callable[[], object]] = [lambda: play_copies(stage, yesterday)]
    stage.run_until(lambda: stage.group.paused)
    assert check[0]() == []
    finish(stage, today)
    assert positions(stage) == {tp(0): 1, tp(1): 2}
    assert play_copies(stage, yesterday) == []
