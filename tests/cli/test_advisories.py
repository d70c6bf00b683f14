"""`marshal advisories`: the story of groups from the log, from a dump, and live."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from marshal_py.admin.group import Group
from marshal_py.client.marshal import connect
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.transport.kafka import KafkaTransport
from tests.cli.shell import DEADLINE_S, Shell


def shown(shell: Shell, *arguments: str) -> list[dict[str, object]]:
    done = shell.run("advisories", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_story_of_a_group(shell: Shell, billing: str) -> None:
    found = shown(shell, billing)
    assert [list(one) for one in found] == [["time", *Advisory.__struct_fields__]] * len(found)
    assert found[0]["partition"] is None
    kinds = [one["kind"] for one in found]
    assert kinds[0] in ("joined", "topology")
    assert [kind for kind in kinds if kind in ("joined", "claimed", "released", "left")] == (
        ["joined", *["claimed"] * 4, *["released"] * 4, "left"]
    )
    released = [one for one in found if one["kind"] == "released"]
    assert {one["text"] for one in released} == {"stopped"}
    assert sum(int(str(one["offset"])) for one in released) == 20


def test_all_groups_kinds_and_the_newest(shell: Shell, billing: str) -> None:
    everything = shown(shell)
    assert {one["group"] for one in everything} >= {billing}
    assert [one["time_ms"] for one in everything] == sorted(int(str(one["time_ms"])) for one in everything)
    assert {one["kind"] for one in shown(shell, "--kind", "claimed", "--kind", "left")} == {"claimed", "left"}
    assert shown(shell, billing, "-n", "2") == shown(shell, billing)[-2:]
    assert shown(shell, billing, "--kind", "alarming") == []
    assert shown(shell, billing, "--until", "2020-01-01") == []
    assert shown(shell, billing, "--until", "0s ago", "-n", "2") == shown(shell, billing)[-2:]
    assert shell.run("advisories", "--until", "0s ago", "--follow").exit_code == 2
    refused = shell.run("advisories", "--kind", "nonsense")
    assert refused.exit_code == 2
    line = shell.run("advisories", billing, "-n", "1").stdout.strip()
    assert line.endswith("): stopped")
    assert "  billing  left (" in line


def test_a_dump_tells_the_same(shell: Shell, billing: str, tmp_path: Path) -> None:
    path = tmp_path / "log.dump"
    assert shell.run("log", "dump", billing, "-o", str(path)).exit_code == 0
    assert shown(Shell(""), billing, "--dump", str(path)) == shown(shell, billing)


def test_the_python_api_tells_the_same(shell: Shell, billing: str) -> None:
    group = Group(KafkaTransport(shell.servers, DEADLINE_S), billing, "__marshal")
    assert [one.log_offset for one in group.advisories()] == [one["log_offset"] for one in shown(shell, billing)]


def test_following_shows_what_happens(shell: Shell, billing: str) -> None:
    child = shell.start("advisories", "watched", "--follow", "--json")
    try:
        with (
            connect({"bootstrap.servers": shell.servers, "log_level": 0}, client_id="newcomer") as marshal,
            marshal.consumer("watched", ["orders"]),
        ):
            assert child.stdout is not None
            lines = [json.loads(child.stdout.readline()) for _ in range(3)]
    finally:
        for _ in range(3):  # `timeout -s INT` sends two at once, and they may come while it closes its connections
            child.send_signal(signal.SIGINT)
        _, trouble = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0
    assert not trouble or trouble.endswith("waiting for its first consumer\n"), "it may look before the consumer joins"
    joined = next(line for line in lines if line["kind"] == "joined")
    assert joined["client_id"] == "newcomer"
    assert {line["kind"] for line in lines} <= {"joined", "topology", "activated", "claimed"}


@pytest.mark.usefixtures("billing")
def test_an_unused_topic_tells_nothing(shell: Shell) -> None:
    done = shell.run("advisories", "--coordination-topic", "__unused")
    assert (done.exit_code, done.stdout, done.stderr.strip()) == (0, "", "no consumer has ever run here")
