"""What a command answers when there is nothing to change, when it cannot be done, or when it is not done yet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from marshal_py import GroupConfig
from marshal_py.admin.group import Group
from marshal_py.cli import members, options, topics
from marshal_py.testing import MemoryCluster
from marshal_py.transport.memory import MemoryTransport
from tests.cli.shell import Shell
from tests.cli.test_standstills import GROUP, TOPIC, Scene, look, said

PARTITIONS = 2


class Desk:
    """A cluster in memory, and the commands of an operator, who waits while its time passes."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.cluster = cluster

    def run(self, *arguments: str) -> Result:
        return self.cluster._run(lambda: Shell("none:1").run(*arguments))


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with MemoryCluster() as cluster:
        cluster.create_topic(TOPIC, PARTITIONS)
        monkeypatch.setattr(options.CommonOptions, "group", lambda self, name: cluster.group(name))
        monkeypatch.setattr(options.CommonOptions, "observer", lambda self: look(cluster))
        monkeypatch.setattr(options.CommonOptions, "transport", lambda self: MemoryTransport(cluster.broker))
        yield Desk(cluster)


def test_a_move_and_a_question_about_a_deleted_group_say_that_it_is_deleted(desk: Desk) -> None:
    cluster = desk.cluster
    consumer = cluster.connect("one").consumer(GROUP, [TOPIC])
    cluster.run_until(lambda: len(consumer.cached_info().claims) == PARTITIONS)
    cluster._run(consumer.stop)
    cluster._run(lambda: cluster.group(GROUP).delete())
    for command in (
        ("set-position", GROUP, TOPIC, "--to", "earliest", "--yes"),
        ("groups", "update", GROUP, "--shrink", f"{TOPIC}=1", "--yes"),
        ("explain", GROUP, f"{TOPIC}:0"),
    ):
        answer = desk.run(*command)
        assert answer.exit_code != 0, command
        assert f"group {GROUP!r} is deleted" in answer.stderr, (command, answer.output)
    before = answer.stderr.rpartition("--at ")[2].split()[0]
    assert f"{TOPIC}:0 of group {GROUP!r}" in desk.run("explain", GROUP, f"{TOPIC}:0", "--at", before).stdout


def test_a_picture_of_a_time_before_the_log_says_when_that_begins(desk: Desk) -> None:
    """An empty one would say that there was no group."""
    consumer = desk.cluster.connect("one").consumer(GROUP, [TOPIC])
    desk.cluster.run_until(lambda: len(consumer.cached_info().claims) == PARTITIONS)
    for group in ([], [GROUP]):
        answer = desk.run("top", *group, "--once", "--at", "2001-01-01")
        assert (answer.exit_code, answer.stdout) == (1, "")
        assert "--at 2001-01-01 lies before the log, which begins at " in answer.stderr
    assert desk.run("top", "--once", "--at", answer.stderr.split()[-1]).exit_code == 0


def test_a_time_to_come_is_said_to_be_one(desk: Desk) -> None:
    consumer = desk.cluster.connect("one").consumer(GROUP, [TOPIC])
    desk.cluster.run_until(lambda: len(consumer.cached_info().claims) == PARTITIONS)
    for question in (["explain", GROUP, f"{TOPIC}:0"], ["explain", GROUP, "--since", "0"]):
        answer = desk.run(*question, "--at", "2999-01-01")
        assert answer.stderr.startswith("--at 2999-01-01 lies after 20"), answer.output
        assert (answer.exit_code, GROUP in answer.stdout) == (0, True)


def test_check_says_of_a_dump_the_lag_that_top_says(desk: Desk, tmp_path: Path) -> None:
    """The one that owners wrote."""
    for _ in range(5):
        desk.cluster.produce(TOPIC, b"", partition=0)
    consumer = desk.cluster.connect("one").consumer(GROUP, [TOPIC], start="earliest")
    message = consumer.next(5)
    assert message is not None
    message.ack()
    desk.cluster.advance(20)
    dumped = str(tmp_path / "dump")
    assert desk.run("log", "dump", "-o", dumped).exit_code == 0
    (top,) = Shell("").json("top", "--once", "--dump", dumped)["groups"]
    answer = Shell("").run("check", GROUP, "--dump", dumped, "--lag", "3", "--age", "1s", "--json")
    check = json.loads(answer.stdout)
    assert (check["lag"], top["lag"]) == (4, 4)
    said = {one["name"]: one for one in check["checks"]}
    assert (said["lag"]["level"], said["age"]["level"]) == ("fail", "unknown")
    assert said["age"]["advice"] == "a dump has no messages, so no age"


def test_a_creation_says_what_would_be_created(desk: Desk) -> None:
    """Also in a log, and in a coordination topic, that nobody has used."""
    for _ in range(2):
        plain = desk.run("groups", "create", "shop", "--dry-run").stdout
        assert "'shop' would be created" in plain or "'shop' would be the first of __marshal" in plain
        for number in range(20):  # they are in several logs
            shown = desk.run("groups", "create", f"shop-{number}", "--policy", "greedy", "--dry-run").stdout
            assert "greedy" in shown, shown
            assert "nothing would change" not in plain + shown
        desk.cluster.connect("admin").create_group(GROUP, GroupConfig(policy="balanced"))
    assert "'shop' would be created: delivery as its consumers choose; policy as its consumers choose." in plain
    assert "'shop-19' would be created: policy greedy; delivery as its consumers choose." in shown


def test_changes_of_members_say_what_they_change(desk: Desk) -> None:
    desk.cluster.connect("admin").create_group(
        GROUP, GroupConfig(policy="members", max_members=3, members=["m1", "m2"])
    )
    again = desk.run("groups", "update", GROUP, "--add-member", "m1", "--yes")
    assert again.exit_code == 0
    assert "nothing to change" in again.output
    unknown = desk.run("groups", "update", GROUP, "--drop-member", "zzz", "--yes")
    assert unknown.exit_code == 0
    assert "nothing to change" in unknown.output
    dropped = desk.run("groups", "update", GROUP, "--drop-member", "m1", "--yes")
    assert dropped.exit_code == 0
    assert "are changed" in dropped.output


def test_a_shift_beyond_the_end_is_refused_before_the_group_is_paused(desk: Desk) -> None:
    cluster = desk.cluster
    consumer = cluster.connect("one").consumer(GROUP, [TOPIC])
    cluster.run_until(lambda: len(consumer.cached_info().claims) == PARTITIONS)
    refused = desk.run("set-position", GROUP, TOPIC, "--shift-by", "999999", "--yes")
    assert refused.exit_code != 0
    assert "has no position 999999" in refused.stderr
    assert "paused" not in refused.output
    assert len(consumer.cached_info().claims) == PARTITIONS
    with look(cluster) as observer:
        assert not [one for one in observer.advisories(GROUP) if one is not None and one.kind == "paused"]


def test_a_pinned_consumer_that_steps_down_is_said_to_finish_its_handlers_first(desk: Desk) -> None:
    cluster = desk.cluster
    cluster.connect("admin").create_group(GROUP, GroupConfig(policy="pinned", priority_groups=["jobs"]))
    cluster.produce(TOPIC, b"one", partition=0)
    consumer = cluster.connect("one").consumer(GROUP, [TOPIC], start="earliest", priority_group="jobs")
    assert consumer.next(5) is not None  # its handler does not end
    shown = desk.run("members", "step-down", GROUP, "--dry-run")
    assert "would finish its handlers and be pinned no longer" in shown.stdout
    assert "stepped down" not in desk.run("state", GROUP).stdout
    answer = desk.run("members", "step-down", GROUP, "--yes")
    assert answer.exit_code == 0, answer.output
    assert ", stepped down " in desk.run("state", GROUP).stdout


def test_a_purge_says_which_groups_have_not_finished_what_would_go(desk: Desk) -> None:
    for number in range(9):
        desk.cluster.produce(TOPIC, b"", partition=number % PARTITIONS)  # 5 and 4
    purge = ("topics", "purge", TOPIC, "--keep", "1")
    assert json.loads(desk.run(*purge, "--dry-run", "--json").stdout)["unfinished"] == {}
    for group, finished in ((GROUP, 3), ("done", 9)):
        consumer = desk.cluster.connect(group[:4]).consumer(group, [TOPIC], start="earliest")
        for _ in range(finished):
            message = consumer.next(5)
            assert message is not None
            message.ack()
        desk.cluster._run(consumer.stop)
    text = f"7 offsets would be deleted\ngroup {GROUP!r} has not finished 4 of them\n"
    assert desk.run(*purge, "--dry-run").stdout.endswith(text)
    assert json.loads(desk.run(*purge, "--dry-run", "--json").stdout)["unfinished"] == {GROUP: 4}
    assert f"group {GROUP!r} has not finished 4 of them" in desk.run(*purge).stderr, "before it asks"


def test_a_purge_deletes_what_it_has_asked_about(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what is written while somebody reads the question."""

    def written_meanwhile(_question: str, _yes: bool) -> None:
        for _ in range(50):
            desk.cluster.produce(TOPIC, b"", partition=0)

    for _ in range(5):
        desk.cluster.produce(TOPIC, b"", partition=0)
    monkeypatch.setattr(topics, "ask", written_meanwhile)
    answer = desk.run("topics", "purge", TOPIC, "--keep", "2")
    assert f"{TOPIC}:0 begins at 3 (was 0)" in answer.stdout, answer.output
    assert answer.stdout.endswith("3 offsets are deleted\n")


def test_a_dry_run_about_a_deleted_group_says_so(desk: Desk) -> None:
    desk.cluster.connect("admin").create_group(GROUP, GroupConfig(policy="balanced"))
    assert desk.run("groups", "rm", GROUP, "--yes").exit_code == 0
    for verb in ("pause", "resume"):
        answer = desk.run(verb, GROUP, "--dry-run")
        assert (answer.exit_code, "deleted" in answer.stderr) == (1, True), answer.output


def test_a_session_that_leaves_while_it_is_watched_was_evicted_by_nobody(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for how in ("left", "ended"):
        monkeypatch.setattr(Group, "evict", lambda *_, how=how, **__: how)
        monkeypatch.setattr(members.changes, "find_session", lambda *_: 7)
        answer = desk.run("evict", GROUP, "7", "--yes", "--json")
        assert (answer.exit_code, json.loads(answer.stdout)["ended_by"]) == (0, ""), answer.output


def test_doctor_says_of_the_group_that_it_is_asked_about_that_nobody_is_there(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.cluster.connect("admin").create_group(GROUP, GroupConfig(policy="balanced"))
    assert "no live session" in said(Scene(desk.cluster, None), "doctor", monkeypatch)


def test_what_changed_in_a_group_comes_with_what_is_wrong_now(desk: Desk) -> None:
    cluster = desk.cluster
    consumer = cluster.connect("one").consumer(GROUP, [TOPIC])
    cluster.run_until(lambda: len(consumer.cached_info().claims) == PARTITIONS)
    cluster._run(lambda: cluster.group(GROUP).pause(60))
    *_, last = desk.run("explain", GROUP, "--since", "0").stdout.splitlines()
    assert last.startswith("! the group is paused "), last
    assert json.loads(desk.run("explain", GROUP, "--since", "0", "--json").stdout)["notices"] == [last[2:]]
    assert "! " not in desk.run("explain", GROUP, "--since", "0", "--at", "3").stdout, "then it was not"
