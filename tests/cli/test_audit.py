"""Every command that changes something, audited by the same questions: what it shows, what it asks, what it writes.

A new one fails here until it is in one of the lists below.
"""

from __future__ import annotations

import getpass
import json
import re
import secrets
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from confluent_kafka import Producer

from marshal_py.admin.group import Group
from marshal_py.admin.plans.operation import Author
from marshal_py.cli.app import app
from marshal_py.client.marshal import VERSION, Marshal, connect
from marshal_py.errors import AdminBusy
from marshal_py.log.observer import Judged, Observer
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import route
from marshal_py.protocol.wire.records import (
    ClaimingPartition,
    Evict,
    GroupConfig,
    Join,
    Record,
    ReleaseGroup,
    SetPosition,
    StepDown,
    Topology,
)
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.ports import CoordinationLog
from tests.cli.shell import DEADLINE_S, Shell, wait_until

PARTITIONS = 3
WHY = "audit"
ADMIN_RECORDS = (Evict, GroupConfig, ReleaseGroup, SetPosition, StepDown, Topology)

# What it is called with, in a group of one silent session `ghost`; and whether it takes something away from somebody
# and so asks first.
CHANGES: dict[str, tuple[list[str], bool]] = {
    "pause": (["pause", "GROUP", "--for", "60s"], True),
    "resume": (["resume", "GROUP"], False),
    "set-position": (["set-position", "GROUP", "orders", "--to", "earliest"], True),
    "groups create": (["groups", "create", "NEW", "--policy", "greedy"], True),
    "groups update": (["groups", "update", "GROUP", "--delivery", "at_most_once"], True),
    "groups update --shrink": (["groups", "update", "GROUP", "--shrink", f"orders={PARTITIONS}"], True),
    "groups rm": (["groups", "rm", "GROUP"], True),
    "members step-down": (["members", "step-down", "GROUP", "ghost"], True),
    "groups update --add-member": (["groups", "update", "GROUP", "--add-member", "m3"], True),
    "groups update --drop-member": (["groups", "update", "GROUP", "--drop-member", "m2"], True),
    "groups update --map": (["groups", "update", "GROUP", "--map", "m1=0,1", "--map", "m2=2"], True),
    "groups update --no-map": (["groups", "update", "GROUP", "--no-map"], True),
    "members step-down, pinned": (["members", "step-down", "GROUP"], True),
    "evict": (["evict", "GROUP", "ghost"], True),
}
# What the members of the group must be for that; other commands take a group without a list of members.
MEMBERS: dict[str, list[str]] = {
    "groups update --add-member": ["--max-members", "3", "--member", "m1", "--member", "m2"],
    "groups update --drop-member": ["--max-members", "3", "--member", "m1", "--member", "m2"],
    "groups update --map": ["--max-members", "3", "--member", "m1", "--member", "m2"],
    "groups update --no-map": ["--max-members", "3", "--map", "m1=0,1", "--map", "m2=2"],
}
# They change a log as a whole and no group; their own tests ask the same of them.
ELSEWHERE = {
    "snapshot",
    "log reset",
    "topics create",
    "topics update",
    "topics rm",
    "topics purge",
    "dead-letters redrive",
}  # no records of groups


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(topics={"__marshal": 2, "orders": PARTITIONS}) as running:
        producer = Producer({"bootstrap.servers": running.bootstrap_servers})
        for number in range(PARTITIONS * 2):
            producer.produce("orders", b"x", partition=number % PARTITIONS)
        assert producer.flush(DEADLINE_S) == 0
        yield running


@pytest.fixture(scope="module")
def marshal(broker: Broker) -> Iterator[Marshal]:
    with connect({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0}) as connected:
        yield connected


@pytest.fixture(scope="module")
def writer(broker: Broker) -> Iterator[CoordinationLog]:
    log = transport(Shell(broker.bootstrap_servers)).log("__marshal", "audit")
    yield log
    log.close(0.0)


@pytest.fixture
def shell(broker: Broker) -> Shell:
    return Shell(broker.bootstrap_servers)


def transport(shell: Shell) -> KafkaTransport:
    return KafkaTransport({"bootstrap.servers": shell.servers, "log_level": 0}, DEADLINE_S)


@pytest.fixture
def group(shell: Shell, marshal: Marshal, writer: CoordinationLog) -> str:
    """Positions, and one session that died without a word."""
    name = f"g-{uuid.uuid4().hex[:8]}"
    with marshal.consumer(name, ["orders"], start="earliest") as consumer:
        for count, message in enumerate(consumer, 1):
            message.ack()
            if count == PARTITIONS * 2:
                break
    write(shell, writer, marshal, name, Join("ghost", secrets.token_bytes(16), 1, 1_000, ("orders",)))
    return name


def write(shell: Shell, writer: CoordinationLog, marshal: Marshal, group: str, record: Record) -> None:
    """Somebody's record; waits until it is in the log."""
    value = codec.encode(record, group, marshal.root.incarnation)
    assert writer.append(route(group, marshal.root.partitions), group.encode(), value)
    wait_until(lambda: record in [one.verdict.record for one in judged(shell, group)], "the record is there")


def grow(shell: Shell, writer: CoordinationLog, marshal: Marshal, group: str) -> None:
    """As if the topic had been larger once."""
    last = [one.verdict.offset for one in judged(shell, group) if isinstance(one.verdict.record, Topology)][-1]
    write(shell, writer, marshal, group, Topology("orders", PARTITIONS + 1, last))


def pinned(shell: Shell, writer: CoordinationLog, marshal: Marshal) -> str:
    """A group whose pin a dead session holds."""
    group = f"pinned-{uuid.uuid4().hex[:8]}"
    shell.json("groups", "create", group, "--policy", "pinned", "--priority-group", "jobs", "--yes")
    join = Join("ghost", secrets.token_bytes(16), 1, 1_000, ("orders",), priority_group="jobs")
    write(shell, writer, marshal, group, join)
    session = judged(shell, group)[-1].verdict.offset
    write(shell, writer, marshal, group, ClaimingPartition(session, "", -1, -1))
    return group


def judged(shell: Shell, group: str) -> list[Judged]:
    with Observer(transport(shell), "__marshal") as observer:
        return [one for one in observer.read(group) if one.verdict.group == group]


def commands() -> dict[str, Any]:
    """Every command of the tool, by its words."""
    found: dict[str, Any] = {}

    def walk(command: Any, words: list[str]) -> None:
        if hasattr(command, "commands"):
            for name, sub in command.commands.items():
                walk(sub, [*words, name])
        else:
            found[" ".join(words)] = command

    walk(typer.main.get_command(app), [])
    return found


NO_JSON = {"run", "schema"}  # the output of a program, and what is JSON anyway
COMMANDS_MAX = 40  # what `marshal --help` and those of its groups list; three are of dead letters


def test_there_are_few_commands() -> None:
    """One more needs another that goes, or a reason to raise the number."""
    assert len(commands()) <= COMMANDS_MAX
    assert not [name for name, command in commands().items() if command.hidden], "a second name of another one"


def test_every_command_that_changes_something_is_audited() -> None:
    """By its options: who asks, gives a reason or has a dry run changes something."""
    changing = set()
    for name, command in commands().items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options or name in NO_JSON, name
        if options & {"--dry-run", "--yes", "--reason"}:
            changing.add(name)
        if name in CHANGES:
            assert {"--dry-run", "--reason"} <= options, name
            assert not CHANGES[name][1] or "--yes" in options, name
    assert {re.split(" --|,", name)[0] for name in CHANGES} <= changing <= {*CHANGES, *ELSEWHERE}


@pytest.mark.parametrize("name", CHANGES)
def test_a_command_that_changes_something(
    shell: Shell, group: str, name: str, marshal: Marshal, writer: CoordinationLog
) -> None:
    """Shows and asks; a dry run and a no write nothing; done is 0, refused 1, wrong 2; its records say who and why."""
    words, asks = CHANGES[name]
    if name in MEMBERS:
        group = f"listed-{uuid.uuid4().hex[:8]}"
        shell.json("groups", "create", group, "--policy", "members", *MEMBERS[name], "--yes")
    new = f"new-{uuid.uuid4().hex[:8]}"
    where = new if "NEW" in words else group
    arguments = [{"GROUP": group, "NEW": new}.get(word, word) for word in words]
    if name == "members step-down, pinned":
        group = pinned(shell, writer, marshal)
        where, arguments = group, [*words[:-1], group]
    if name == "resume":
        assert shell.run("pause", group, "--yes", "--reason", WHY).exit_code == 0
    if name == "groups update --shrink":
        grow(shell, writer, marshal, group)
    before = len(judged(shell, where))

    assert shell.run(*arguments[: len(re.split(" --|,", name)[0].split())], "--nonsense").exit_code == 2
    planned = shell.json(*arguments, "--dry-run")
    assert (planned["group"], planned["outcome"]) == (where, "dry_run")
    shown = shell.run(*arguments, "--dry-run")
    assert shown.exit_code == 0
    assert shown.stdout.strip()
    if asks:
        declined = shell.run(*arguments, stdin=b"n\n")
        assert declined.exit_code == 1
        assert "[y/N]" in declined.stderr
        assert len(declined.stderr.splitlines()) > 1, "it shows before it asks"
    assert len(judged(shell, where)) == before, "not a byte so far"

    missing = [
        word.replace(group, "nobody") if name != "groups create" else word.replace(new, group) for word in arguments
    ]
    refused = shell.run(*missing, *(["--yes"] if asks else []))
    assert refused.exit_code == 1
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    assert len(judged(shell, where)) == before

    done = shell.run(*arguments, "--reason", WHY, "--json", *(["--yes"] if asks else []))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["group"] == where
    by = re.compile(
        rf"{re.escape(getpass.getuser())}@{re.escape(socket.gethostname())} {re.escape(VERSION)} "
        rf"run [0-9a-f]{{8}}(: {WHY})?"
    )
    written = [one.verdict for one in judged(shell, where)[before:] if isinstance(one.verdict.record, ADMIN_RECORDS)]
    assert any(verdict.accepted for verdict in written)
    for verdict in written:
        record: Any = verdict.record
        assert by.fullmatch(record.by), record
        assert WHY in (getattr(record, "reason", "") or record.by), record


def test_what_an_update_says_and_does(shell: Shell, group: str) -> None:
    shown = shell.run("groups", "update", group, "--delivery", "at_most_once", "--dry-run").stdout
    assert "delivery: at_least_once -> at_most_once" in shown
    assert "1 consumers would end with ModeMismatch" in shown
    assert shell.run("groups", "update", group).exit_code == 2
    for option in (("--policy", "magic"), ("--delivery", "none")):
        assert shell.run("groups", "update", group, *option).exit_code == 1
    changed = shell.json("groups", "update", group, "--policy", "greedy", "--yes", "--reason", WHY)
    info = shell.json("state", group, "--settings")
    assert info["policy"] == "greedy"
    assert info["settings_from"]["offset"] == changed["offset"]
    assert info["settings_from"]["by"].endswith(f": {WHY}")
    shown = shell.run("state", group, "--settings").stdout
    assert "policy: greedy" in shown
    assert shell.json("groups", "update", group, "--policy", "own", "--yes")["changed"] == {"policy": "own"}
    assert shell.json("state", group, "--settings")["policy"] is None


def test_a_shrink_that_kafka_would_undo_is_refused(
    shell: Shell, group: str, marshal: Marshal, writer: CoordinationLog
) -> None:
    grow(shell, writer, marshal, group)
    larger = shell.run("set-position", group, "orders", "--to", "earliest", "--yes")
    assert larger.exit_code == 1
    assert "--shrink orders=" in larger.stderr, "the way out is named"
    refused = shell.run("groups", "update", group, "--shrink", "orders=1", "--yes")
    assert refused.exit_code == 1
    assert "has 3 in Kafka" in refused.stderr
    foreseen = shell.run("groups", "update", group, "--shrink", "orders=1", "--dry-run")
    assert "As things are it would be refused: partitions=1 is not allowed" in foreseen.stdout
    assert shell.run("groups", "update", group, "--shrink", "orders=9", "--yes").exit_code == 1
    assert shell.json("groups", "update", group, "--shrink", "orders=3", "--yes")["changed"] == {"orders": 3}
    assert shell.json("set-position", group, "orders", "--to", "earliest", "--yes")["outcome"] == "moved"


def test_members_of_all_groups_are_listed(shell: Shell, group: str) -> None:
    everybody = shell.json("state", "--members")
    assert (group, "ghost") in {(one["group"], one["client_id"]) for one in everybody}
    assert group in shell.run("state", "--members").stdout


def test_a_group_is_created_for_consumers_to_come(shell: Shell, group: str) -> None:
    """Also in a log that nobody has written to: the group's name decides which (L2)."""
    for _ in range(4):  # two logs: by chance all four in the one that is there already is no harm
        name = f"new-{uuid.uuid4().hex[:8]}"
        assert shell.json("groups", "create", name, "--delivery", "at_most_once", "--yes")["created"]
        assert shell.json("groups", "create", name, "--delivery", "at_most_once", "--yes")["created"] is False
        again = shell.run("groups", "create", name, "--delivery", "at_most_once", "--yes")
        assert again.exit_code == 0
        assert f"group '{name}' has these settings already" in again.output
        assert shell.run("groups", "create", name, "--yes").exit_code == 1
        assert shell.json("state", name, "--settings")["delivery"] == "at_most_once"


def test_the_positions_of_a_group_go_to_a_file_and_back(shell: Shell, group: str, tmp_path: Path) -> None:
    """As with kafka-consumer-groups --reset-offsets --export, and --from-file."""
    table = tmp_path / "positions.csv"
    table.write_text(shell.run("state", group, "--csv").stdout, encoding="utf-8")
    assert table.read_text(encoding="utf-8") == "".join(f"orders,{number},2\n" for number in range(PARTITIONS))
    assert shell.json("set-position", group, "orders", "--to", "earliest", "--yes")["outcome"] == "moved"
    back = shell.json("set-position", group, "--to", str(table), "--yes")
    assert [(row["position"], row["target"]) for row in back["partitions"]] == [(0, 2)] * PARTITIONS


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT] * 2],
    ids=["int", "term", "hup", "twice"],
)
def test_an_interrupted_move_says_what_is_true_and_takes_its_pause_back(
    shell: Shell, group: str, marshal: Marshal, writer: CoordinationLog, numbers: list[int]
) -> None:
    """M8, M9: also when a service manager ends the tool, or by two signals at once, as `timeout -s INT` sends them."""
    write(shell, writer, marshal, group, Join("slow", secrets.token_bytes(16), 1, 600_000, ("orders",)))
    session = max(one.verdict.offset for one in judged(shell, group) if isinstance(one.verdict.record, Join))
    version = json.loads(shell.run("state", group, "--json").stdout)["groups"][0]["partitions"][0]["version"]
    write(shell, writer, marshal, group, ClaimingPartition(session, "orders", 0, version, 0))
    running = shell.start("set-position", group, "orders", "--to", "earliest", "--yes")
    assert running.stderr is not None
    shown = [running.stderr.readline(), running.stderr.readline()]
    assert "orders:0 is owned by slow" in "".join(shown), "it waits, and would for minutes"
    for number in numbers:
        running.send_signal(number)
    out, trouble = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 130
    assert out == ""
    assert "Traceback" not in trouble
    assert f"no position of group {group!r} moved" in trouble.splitlines()[-1]
    assert "the pause is ended: the group continues" in trouble.splitlines()[-2]
    info = shell.json("state", group, "--settings")
    assert info["pause"] is None
    assert {row["position"] for row in info["positions"]} == {2}


@pytest.mark.parametrize("adopted", [False, True], ids=["alone", "adopted"])
def test_a_held_pause_ends_by_ctrl_c(shell: Shell, group: str, adopted: bool) -> None:
    """Also after another command has worked in it, and when ctrl-C comes twice at once."""
    holding = shell.start("pause", group, "--hold", "--yes")
    assert holding.stderr is not None
    while "all partitions are free" not in (line := holding.stderr.readline()):
        assert line, "it ended"
    if adopted:
        moved = shell.run("set-position", group, "orders", "--shift-by", "0", "--adopt", "--yes")
        assert moved.exit_code == 0, moved.output
        assert "the group stays paused" in moved.stdout
    for _ in range(2):
        holding.send_signal(signal.SIGINT)
    out, trouble = holding.communicate(timeout=DEADLINE_S)
    assert (holding.returncode, out) == (0, f"group {group!r} continues\n"), trouble
    assert trouble.splitlines()[-1] == "the pause is ended: the group continues"
    assert shell.json("state", group, "--settings")["pause"] is None


def test_a_question_that_is_interrupted_is_no_answer(shell: Shell, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command ends with 130 by ctrl-C, also while it asks; a no is 1."""

    def interrupted(*_: object, **__: object) -> None:  # what typer makes of ctrl-C at a prompt
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise typer.Abort from None

    assert shell.run("pause", group, stdin=b"n\n").exit_code == 1
    monkeypatch.setattr(typer, "confirm", interrupted)
    result = shell.run("pause", group)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (130, "marshal: interrupted")


def test_a_pause_says_whose_it_is(shell: Shell, group: str) -> None:
    """To who looks, and to who finds it in the way: with the token and the options that end the quarrel."""
    token = shell.json("pause", group, "--for", "10m", "--yes", "--reason", WHY)["token"]
    author = f"{getpass.getuser()}@{socket.gethostname()} "
    for found in (shell.json("state", group, "--settings"), shell.json("state", group)["groups"][0]):
        pause = found["pause"]
        assert (pause["token"], pause["duration_s"], pause["reason"]) == (token, 600.0, WHY)
        assert pause["by"].startswith(author)
        assert 0 < pause["left_s"] <= 600
    for command in (("state", "--settings"), ("state",)):
        shown = " ".join(shell.run(*command, group).stdout.split())
        assert f"paused for 600 s by {author}" in shown
        assert f"{WHY}, about " in shown
        assert f"s left, token {token}" in shown
    other = Author("somebody@else", "run")
    with pytest.raises(AdminBusy) as caught:
        Group(transport(shell), group, "__marshal", author=other).resume()
    for word in (author, WHY, "s left", f"--token {token}", "--take-over"):
        assert word in str(caught.value)
    assert shell.run("resume", group).exit_code == 0
    assert shell.json("state", group, "--settings")["pause"] is None
