"""`marshal log dump` and `load`, and the commands that look into a dump: the same answers as from the cluster."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from marshal_py.client.marshal import connect
from tests.cli.shell import Shell


@pytest.fixture(scope="module")
def dumped(shell: Shell, billing: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dumps") / "all.dump"
    done = shell.run("log", "dump", "--output", str(path))
    assert done.exit_code == 0
    assert done.stdout.strip() == f"{len(path.read_text(encoding='utf-8').splitlines()) - 2} records in {path}"
    return path


@pytest.mark.parametrize("arguments", [("--json",), ()])
def test_what_goes_to_stdout_is_a_dump_too(shell: Shell, billing: str, tmp_path: Path, arguments: tuple[str]) -> None:
    path = tmp_path / "billing.dump"
    path.write_bytes(shell.run("log", "dump", billing, *arguments).stdout_bytes)
    assert Shell("").json("explain", billing, "orders:0", "--dump", str(path))["position"] is not None


def test_a_dump_answers_as_the_cluster_does(shell: Shell, billing: str, dumped: Path) -> None:
    offline, where = Shell(""), ("--dump", str(dumped))
    assert offline.json("explain", billing, "orders:0", *where) == shell.json("explain", billing, "orders:0")
    cut = ("--at", "3", "--at", "9")
    assert offline.json("diff", billing, *cut, *where) == shell.json("diff", billing, *cut)
    assert offline.run("log", "tail", billing, *where).stdout == shell.run("log", "tail", billing).stdout


def test_a_dump_becomes_a_topic_of_the_same_records(shell: Shell, billing: str, dumped: Path, tmp_path: Path) -> None:
    loaded = shell.json("log", "load", str(dumped), "--coordination-topic", "__copy")
    lines = dumped.read_text(encoding="utf-8").splitlines()
    assert loaded == {"topic": "__copy", "records": len(lines) - 2}
    again = tmp_path / "again.dump"
    assert shell.run("log", "dump", "-o", str(again), "--coordination-topic", "__copy").exit_code == 0
    copied = [json.loads(line) for line in again.read_text(encoding="utf-8").splitlines()]
    given = [json.loads(line) for line in lines]
    for line in (*copied, *given):
        del line["sum"]
    assert copied[1:] == given[1:]
    assert copied[0]["incarnation"] == given[0]["incarnation"]
    with (
        connect({"bootstrap.servers": shell.servers, "log_level": 0}, coordination_topic="__copy") as marshal,
        marshal.consumer(billing, ["orders"]) as consumer,
    ):
        assert consumer.fetch(1, expires_s=0.5).parts == [], "it goes on where the dumped group stood"
    refused = shell.run("log", "load", str(dumped), "--coordination-topic", "__copy")
    assert refused.exit_code == 1
    assert "it is not empty: partition 0 ends at offset" in refused.stderr


def test_a_load_that_cannot_be_is_refused(shell: Shell, dumped: Path, tmp_path: Path) -> None:
    small = shell.run("log", "load", str(dumped), "--coordination-topic", "__small")
    assert small.exit_code == 1
    assert "it has 2 partitions, the dump's root names 16" in small.stderr
    broken = tmp_path / "broken.dump"
    broken.write_bytes(dumped.read_bytes()[:-1])
    cut_off = shell.run("log", "load", str(broken), "--coordination-topic", "__unused")
    assert cut_off.exit_code == 1
    assert len(cut_off.stderr.strip().splitlines()) == 1
    assert "is damaged in line" in cut_off.stderr
    assert shell.run("log", "load", str(tmp_path / "missing")).exit_code == 2


def test_the_tail_in_its_raw_form(shell: Shell, billing: str, dumped: Path) -> None:
    raw = [line.split() for line in shell.run("log", "tail", billing, "--raw", "-n", "3").stdout.splitlines()]
    lines = [json.loads(line) for line in dumped.read_text(encoding="utf-8").splitlines()[1:-1]]
    kept = {(str(line["log"]), str(line["offset"])): line for line in lines}
    assert len(raw) == 3
    for log, offset, time_ms, key, value in raw:
        line = kept[log, offset]
        assert (int(time_ms), key, value) == (line["time_ms"], line["key"], line["value"])
        assert base64.b64decode(key) == billing.encode()


@pytest.mark.parametrize(
    "arguments",
    [["log", "tail", "--raw", "--json"], ["log", "dump", "--human", "--json"], ["log", "dump", "--human", "-o", "x"]],
)
def test_forms_that_contradict_are_wrong_usage(shell: Shell, arguments: list[str]) -> None:
    assert shell.run(*arguments).exit_code == 2
