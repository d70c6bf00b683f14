"""Pausing a live group and ending the pause: PROTOCOL.md 14 on plans in virtual time, beside real members."""

from __future__ import annotations

import pytest

from marshal_py.admin.plans.operation import GroupContext, Terms
from marshal_py.admin.plans.pause import PausePlan, ResumePlan
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.errors import AdminBusy, AdminFailed, AdminGaveUp, GroupDeleted, InvalidOption
from marshal_py.protocol.claims import AtLeastOnce
from marshal_py.protocol.fold.rationalizer import Outcome, Verdict
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import Evict, GroupConfig, ReleaseGroup
from tests.admin.virtual_admin import Tool, finish, play_copies, start_tool
from tests.support.virtual_cluster import GROUP, INTERVAL_MS, VirtualCluster

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so


def start(
    cluster: VirtualCluster,
    name: str = "tool",
    who: str = "alice@desk",
    crash_after: int = 10**9,
    keep: bool = False,
    **options: object,
) -> Tool:
    def make(context: GroupContext) -> PausePlan:
        return PausePlan(context, Terms(**options), keep=keep)  # type: ignore[arg-type]

    return start_tool(cluster, make, name, who, crash_after=crash_after)


def resume(cluster: VirtualCluster, name: str = "resumer", who: str = "alice@desk", **options: object) -> Tool:
    def make(context: GroupContext) -> ResumePlan:
        return ResumePlan(context, Terms(**options))  # type: ignore[arg-type]

    return finish(cluster, start_tool(cluster, make, name, who))


def test_a_pause_ends_when_everybody_has_let_go() -> None:
    """M4: all partitions >= 0; the token is the pause's, nobody was evicted, and the group comes back by itself."""
    cluster = VirtualCluster(partitions=6)
    cluster.team("a", "b")
    assert len(cluster.owners()) == 6
    tool = finish(cluster, start(cluster, reason="deploy"))
    plan = tool.operation
    assert isinstance(plan, PausePlan)
    assert plan.error is None
    assert cluster.owners() == {}
    assert cluster.group.paused
    assert plan.token == cluster.group.pause_change
    assert len(plan.drain.released) == 6
    assert plan.drain.evicted == []
    assert tool.kinds.count("released") == 6
    assert tool.kinds[-1] == "drained"
    assert not list(cluster.records(Evict))
    ended = resume(cluster)
    assert ended.operation.error is None
    assert ended.kinds == ["resumed"]
    cluster.run(2 * I)
    assert len(cluster.owners()) == 6


def test_a_record_says_who_wrote_it() -> None:
    """M1: person, machine, tool and run; two runs of one person at one moment are distinguished."""
    cluster = VirtualCluster(partitions=2)
    cluster.team("a")
    one, two = start(cluster, "one"), start(cluster, "two")
    finish(cluster, one)
    finish(cluster, two)
    texts = {record.by for _, record in cluster.records(ReleaseGroup)}
    assert len(texts) == 2
    assert all(text.startswith("alice@desk test 1 run ") for text in texts)
    assert sum(tool.operation.error is None for tool in (one, two)) >= 1


def test_a_dead_owner_is_waited_out() -> None:
    """M4: evicted by the tool's own wait of two intervals, which needs proof by probes."""
    cluster = VirtualCluster(partitions=4)
    (victim,) = cluster.team("victim")
    cluster.kill(victim)
    begun = cluster.now_ms
    tool = start(cluster)
    cluster.run(I)
    tool.hold_writes()  # T3: what it does not prove, it does not wait
    cluster.run(4 * I)
    assert not list(cluster.records(Evict))
    tool.release_writes(lose=True)
    cluster.run(I)
    assert not list(cluster.records(Evict)), "the wait began again"
    finish(cluster, tool)
    (evict,) = [record for verdict, record in cluster.records(Evict) if verdict.accepted]
    assert evict.waited_ms >= 2 * I
    assert evict.by.startswith("alice@desk")
    assert cluster.now_ms - begun >= 7 * I
    assert tool.operation.error is None
    assert isinstance(tool.operation, PausePlan)
    assert tool.operation.drain.evicted == [evict.session]


def test_a_stuck_handler_holds_no_pause_open() -> None:
    cluster = VirtualCluster(partitions=1)
    (owner,) = cluster.team("owner")
    owner.deliver(owner.claim(0), 0, 1, 2)
    tool = finish(cluster, start(cluster))
    assert tool.operation.error is None
    assert not cluster.owners()
    assert cluster.partition(0).position == 0


def test_another_admins_pause_is_left_alone() -> None:
    """M2: the refusal names who, why and how long; nothing is written."""
    cluster = VirtualCluster(partitions=2)
    cluster.team("a")
    finish(cluster, start(cluster, "first", "bob@office", reason="disk", duration_ms=60_000))
    token = cluster.group.pause_change
    tool = finish(cluster, start(cluster))
    error = tool.operation.error
    assert isinstance(error, AdminBusy)
    assert error.by.startswith("bob@office")
    assert error.reason == "disk"
    assert 55 < error.left_s <= 60
    assert error.token == token
    assert tool.records == []
    ended = resume(cluster)
    assert isinstance(ended.operation.error, AdminBusy)
    assert ended.records == []
    assert cluster.group.pause_change == token


@pytest.mark.parametrize("right", ["token", "take_over", "adopt"])
def test_a_pause_can_be_replaced_by_right(right: str) -> None:
    """M2: by its token, on demand, or as the same person who says so; the old token is dead then."""
    cluster = VirtualCluster(partitions=2)
    cluster.team("a")
    who = "alice@desk" if right == "adopt" else "bob@office"
    finish(cluster, start(cluster, "first", who))
    token = cluster.group.pause_change
    options = {"token": {"token": token}, "take_over": {"take_over": True}, "adopt": {"adopt": True}}[right]
    tool = finish(cluster, start(cluster, **options))
    assert tool.operation.error is None
    assert cluster.group.pause_change > token
    assert isinstance(tool.operation, PausePlan)
    assert tool.operation.token == cluster.group.pause_change
    assert cluster.inject(ReleaseGroup(token, token, 0)).reason == "observed"


@pytest.mark.parametrize("adopt", [False, True])
def test_a_pause_of_ones_own_is_not_replaced_without_a_word(adopt: bool) -> None:
    """M2: everybody on a bastion or in CI is the same person; and `adopt` means one's own, nobody else's."""
    cluster = VirtualCluster(partitions=2)
    cluster.team("a")
    finish(cluster, start(cluster, "first", "bob@office" if adopt else "alice@desk", reason="disk"))
    token = cluster.group.pause_change
    error = finish(cluster, start(cluster, adopt=adopt)).operation.error
    assert isinstance(error, AdminBusy)
    assert error.own is not adopt
    assert f"--token {token}" in str(error)
    assert ("--take-over" if adopt else "--adopt") in str(error)
    assert "disk" in str(error)
    assert cluster.group.pause_change == token


def test_a_wrong_token_opens_nothing() -> None:
    cluster = VirtualCluster(partitions=2)
    cluster.team("a")
    finish(cluster, start(cluster, "first"))
    tool = finish(cluster, start(cluster, token=cluster.group.pause_change - 1))
    assert isinstance(tool.operation.error, AdminBusy), "not even for the same person: it asked for another pause"


def test_two_admins_do_not_quarrel() -> None:
    """M2: who lost its pause to another does not take it back; who had it ended by another's will neither."""
    cluster = VirtualCluster(partitions=2)
    (owner,) = cluster.team("a")
    owner.deliver(owner.claim(0), 0)  # the drain lasts
    slow = start(cluster, "slow", keep=True)
    cluster.run(I // 3)
    taken = finish(cluster, start(cluster, "other", "bob@office", take_over=True))
    assert taken.operation.error is None
    finish(cluster, slow)
    assert isinstance(slow.operation.error, AdminBusy)
    assert "; it took over from this operation, and this operation does not pause it: " in str(slow.operation.error)
    assert slow.operation.error.by.startswith("bob@office")
    assert cluster.group.pause_change == taken.operation.token  # type: ignore[attr-defined]

    kept = start(cluster, "kept", "bob@office", keep=True, adopt=True)
    cluster.run(I)
    resume(cluster, "bobs second shell", "bob@office")
    finish(cluster, kept)
    assert kept.operation.error is not None
    assert isinstance(kept.operation.error, AdminFailed)
    assert kept.operation.error.outcome == AdminFailed.PAUSE_ENDED
    text = str(kept.operation.error)
    assert "continues, because bob@office" in text
    assert "position" not in text, "nobody asked for one"
    cluster.run(20 * I)
    assert not cluster.group.paused


def test_a_kept_pause_is_renewed_and_ends_with_its_tool() -> None:
    """M3: after a third of its duration, with its own token; without the tool the members end it."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    tool = start(cluster, keep=True, duration_ms=9_000)
    cluster.run(30_000)
    assert cluster.group.paused
    asked = [record for verdict, record in cluster.records(ReleaseGroup) if verdict.accepted]
    assert len(asked) >= 9
    assert all(record.token == record.observed for record in asked[1:])
    cluster.kill(tool)
    cluster.run(9_000 + 2 * I)
    assert not cluster.group.paused
    assert len(a.owned) == 2


def go_on(tool: Tool) -> None:
    """After a SIGSTOP of its process alone: the machine's clocks have gone on."""
    tool.resume()
    tool.slept_ms = 0
    tool.due_ms = tool.cluster.now_ms


@pytest.mark.parametrize("stopped_ms", [9_000 + 2 * I, 300_000], ids=["a while", "longer than its patience"])
def test_a_kept_pause_that_was_over_is_not_said_to_be_renewed(stopped_ms: int) -> None:
    """M3: its process stood still, and the members have ended it and consumed. It is paused and drained again."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    tool = start(cluster, keep=True, duration_ms=9_000)
    cluster.run_until(lambda: "drained" in tool.kinds)
    tool.suspend()
    cluster.run(stopped_ms)
    assert not cluster.group.paused
    assert len(a.owned) == 2
    before = len(tool.events)
    go_on(tool)
    cluster.run_until(lambda: "drained" in tool.kinds[before:])
    assert tool.kinds[before:] == ["paused_again", "released", "released", "drained"]
    plan = tool.operation
    assert isinstance(plan, PausePlan)
    assert plan.pause_lock.over_at == [tool.events[before].text]
    cluster.run(9_000)
    assert "renewed" in tool.kinds[before:]
    assert len(plan.pause_lock.over_at) == 1
    tool.give_up()
    finish(cluster, tool)
    assert not cluster.group.paused
    assert play_copies(cluster, tool) == []


def test_a_kept_pause_whose_process_stood_still_for_less_than_that_is_renewed() -> None:
    cluster = VirtualCluster(partitions=2)
    cluster.team("a")
    tool = start(cluster, keep=True, duration_ms=600_000)
    cluster.run_until(lambda: "drained" in tool.kinds)
    tool.suspend()
    cluster.run(300_000)
    go_on(tool)
    cluster.run_until(lambda: "renewed" in tool.kinds)
    assert cluster.group.paused
    assert "paused_again" not in tool.kinds
    assert not tool.operation.ended


def test_a_kept_pause_ends_when_its_user_has_had_enough() -> None:
    cluster = VirtualCluster(partitions=2)
    cluster.team("a")
    tool = start(cluster, keep=True)
    cluster.run(I)
    tool.give_up()
    finish(cluster, tool)
    assert not cluster.group.paused
    assert play_copies(cluster, tool) == []


def test_the_default_duration() -> None:
    """M3: a minute, and twice the longest interval; more than a day is refused."""
    cluster = VirtualCluster(partitions=2)
    cluster.team("a")
    cluster.team("b", interval_ms=10_000)
    finish(cluster, start(cluster))
    assert cluster.group.pause_duration_ms == 80_000
    with pytest.raises(InvalidOption, match="24 h"):
        start(cluster, duration_ms=86_400_001)
    with pytest.raises(InvalidOption):
        start(cluster, duration_ms=0)


def test_a_pause_that_is_not_drained_in_time_is_taken_back() -> None:
    """M9: the pause is read over before the tool ends, and nothing of it can come later."""
    cluster = VirtualCluster(partitions=2)
    (owner,) = cluster.team("owner")
    owner.cut()  # it neither reads the pause nor can be evicted in that time
    tool = finish(cluster, start(cluster, patience_ms=I))
    error = tool.operation.error
    assert isinstance(error, AdminGaveUp)
    assert error.held_by == (f"owner (session {owner.session})",)
    assert not cluster.group.paused
    assert play_copies(cluster, tool) == []
    assert not cluster.group.paused


@pytest.mark.parametrize("after_ms", [*range(0, 40, 2), 100, 400, 1_000, 2_990, 3_000, 3_004, 3_008, 3_012, 6_010])
def test_a_tool_that_gives_up_leaves_nothing(after_ms: int) -> None:
    """M9: at whatever moment, its renewals on their way: X42. Its last act is read before it ends."""
    cluster = VirtualCluster(partitions=2)
    (owner,) = cluster.team("owner")
    owner.deliver(owner.claim(0), 0)
    tool = start(cluster, keep=True, duration_ms=9_000)
    tool.write_ms = 15
    cluster.run(after_ms)
    tool.give_up()
    finish(cluster, tool)
    cluster.run(100)
    assert not cluster.group.paused
    assert play_copies(cluster, tool) == []
    assert not cluster.group.paused


def test_a_renewal_that_comes_before_the_end_is_ended_too() -> None:
    """M9: X42 to the letter: the end is rejected by `observed`, and written again with the new token."""
    cluster = VirtualCluster(partitions=2)
    cluster.team("owner")
    tool = start(cluster, keep=True, duration_ms=9_000)
    cluster.run(1_000)
    tool.write_ms = 50
    cluster.run_until(lambda: sum(isinstance(r, ReleaseGroup) for r in tool.records) == 2)
    tool.give_up()
    finish(cluster, tool)
    fates = [(record.duration_ms > 0, verdict.reason) for verdict, record in cluster.records(ReleaseGroup)]
    assert fates[:4] == [(True, ""), (True, ""), (False, "observed"), (False, "")]
    assert not cluster.group.paused


def test_the_token_that_is_told_is_final() -> None:
    """M10: a tool that leaves its pause in place first waits for the result of its renewals."""
    cluster = VirtualCluster(partitions=1)
    (owner,) = cluster.team("owner")
    owner.deliver(owner.claim(0), 0)
    # The drain lasts one interval; a renewal is on its way when it ends.
    tool = start(cluster, duration_ms=3 * (I - 30))
    tool.write_ms = 60
    finish(cluster, tool)
    assert isinstance(tool.operation, PausePlan)
    assert tool.operation.error is None
    renewed = [r for r in tool.records if isinstance(r, ReleaseGroup)]
    assert len(renewed) >= 2, "a renewal was sent: the test is about one"
    token = tool.operation.token
    cluster.run(1_000)
    assert cluster.group.pause_change == token
    assert play_copies(cluster, tool) == []
    assert cluster.group.pause_change == token


def test_a_deleted_group_ends_the_tool() -> None:
    cluster = VirtualCluster(partitions=1)
    cluster.team("a")
    tool = start(cluster, keep=True)
    cluster.run(I)
    for client in cluster.clients[:1]:
        client.member.leave(client.now, "bye", 0)
    cluster.run(I)
    cluster.must(GroupConfig(-1, deleted=True))
    finish(cluster, tool)
    assert isinstance(tool.operation.error, GroupDeleted)


def test_resuming_a_running_group_is_no_error() -> None:
    cluster = VirtualCluster(partitions=1)
    (owner,) = cluster.team("a")
    tool = resume(cluster)
    assert tool.operation.error is None
    assert tool.kinds == ["running"]
    assert tool.records == []
    assert isinstance(owner.claim(0).tracker, AtLeastOnce)


def test_the_end_of_a_run_that_gives_up_hides_nobody_who_has_ended_the_pause_before() -> None:
    """M2: else the pause would count as waited out, and a run that holds it would pause again."""
    history = PauseHistory(GROUP)
    ends = [ReleaseGroup(NONE, NONE, 60_000, by="a"), ReleaseGroup(1, 1, 0, by="b"), ReleaseGroup(2, NONE, 0, by="c")]
    for offset, record in enumerate(ends, 1):
        history.read(Verdict(offset, Outcome.ACCEPTED, "", GROUP, record))
    assert (history.ended_by, history.waited_out) == ("b", False)
