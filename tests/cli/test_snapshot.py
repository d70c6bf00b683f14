"""`marshal snapshot` and `marshal log reset` over the embedded broker: what they show, ask, write and answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from marshal_py.client.marshal import connect
from marshal_py.protocol.wire.identity import route
from marshal_py.transport.embedded import Broker
from tests.cli.shell import Shell
from tests.support.broker_faults import bounds
from tests.support.logs import groups_of

LOGS = 2
GROUP = next(f"g{number}" for number in range(100) if route(f"g{number}", LOGS) == 1)


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(topics={"__marshal": LOGS, "orders": 1}) as running:
        yield running


@pytest.fixture
def shell(broker: Broker) -> Shell:
    return Shell(broker.bootstrap_servers)


def live(shell: Shell, group: str = GROUP) -> None:
    """Consumers of one group come and go until its log is worth a snapshot."""
    with connect({"bootstrap.servers": shell.servers, "log_level": 0}) as marshal:
        for _ in range(4):
            with marshal.consumer(group, ["orders"], start="earliest", heartbeat_interval_s=1.0) as consumer:
                consumer.fetch(1, expires_s=0.2)


def end(broker: Broker, number: int) -> int:
    return bounds(broker, "__marshal", number).high


def test_write_down(shell: Shell, broker: Broker) -> None:
    """A dry run writes nothing; the real one confirms itself where nobody lives; the second finds it there."""
    live(shell)
    before = end(broker, 1)
    assert before >= 16
    (dry,) = shell.json("snapshot", "--log", "1", "--dry-run")
    assert (dry["outcome"], dry["snapshot"], dry["end"]) == ("dry_run", before // 16 * 16, before)
    assert end(broker, 1) == before
    (row,) = shell.json("snapshot", "--log", "1")
    assert (row["outcome"], row["snapshot"], row["clients"]) == ("self_audit", dry["snapshot"], [])
    assert row["state_bytes"] > 0
    assert end(broker, 1) == before + 2, "a chunk and its witness"
    both = shell.json("snapshot")
    assert [row["log"] for row in both] == [0, 1]
    assert both[0]["outcome"] == "too_short"
    assert both[1]["outcome"] in ("already_there", "self_audit")
    assert "written down" in shell.run("snapshot", "--log", "1").stdout


def test_deletion_is_asked_for(shell: Shell) -> None:
    live(shell)
    refused = shell.run("snapshot", "--truncate", stdin=b"n\n")
    assert refused.exit_code == 1
    assert "Delete the records" in refused.stderr
    assert shell.run("snapshot", "--log", "2").exit_code == 1
    assert shell.run("snapshot", "--keep", "a day").exit_code == 2


@pytest.mark.new_client
def test_what_is_left_of_a_truncated_log_is_told(shell: Shell, broker: Broker, tmp_path: Path) -> None:
    """N9: from the oldest snapshot that is left; earlier offsets are refused by name, and never answered wrongly."""
    live(shell)
    (first,) = shell.json("snapshot", "--log", "1")
    live(shell)
    (second,) = shell.json("snapshot", "--log", "1")
    oldest, newest = first["snapshot"], second["snapshot"]
    assert oldest < newest
    whole = shell.json("explain", GROUP, "orders:0", "--at", str(newest))
    broker.truncate("__marshal", 1, oldest)
    path = tmp_path / "cut.dump"
    assert shell.run("log", "dump", GROUP, "--json", "--output", str(path)).exit_code == 0
    for where in ((), ("--dump", str(path))):
        shown = shell.json("explain", GROUP, "orders:0", "--at", str(newest), *where)
        changing: dict[str, object] = {"records": [], "left_out": 0, "began_at": 0}
        assert {**shown, **changing} == {**whole, **changing}
        assert shown["began_at"] >= oldest
        assert shown["records"]
        changed = shell.json("explain", GROUP, "--since", str(oldest), "--at", str(newest), *where)
        assert (changed["from_offset"], changed["to_offset"]) == (oldest, newest)
        assert changed["records"]["Join accepted"] > 0
        tail = shell.run("log", "tail", GROUP, "-n", "1000", "--json", *where).stdout.splitlines()
        assert oldest <= json.loads(tail[0])["offset"] < newest
        for command in (
            ("explain", GROUP, "orders:0", "--at", "3"),
            ("explain", GROUP, "--since", "3", "--at", "9"),
            ("explain", GROUP, "orders:0", "--at", "2001-01-01"),
        ):
            refused = shell.run(*command, *where)
            assert refused.exit_code == 1
            assert f"the history before offset {oldest} of log 1 was deleted" in refused.stderr
    news = [json.loads(line) for line in shell.run("advisories", GROUP, "--json").stdout.splitlines()]
    assert oldest <= min(one["log_offset"] for one in news) < newest
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    judged = [line for line in lines if line.get("log") == 1 and "verdict" in line]
    assert judged[0]["offset"] == oldest
    assert shell.json("simulate", "--dump", str(path))["verdict"] == "ok"


@pytest.mark.new_client
def test_a_dump_holds_all_that_is_left_of_the_roots_log(shell: Shell, broker: Broker, tmp_path: Path) -> None:
    """The root is looked up in log 0; that must not move where reading of this log begins."""
    (group, *_) = groups_of(0, 2)
    live(shell, group)
    (first,) = shell.json("snapshot", "--log", "0")
    live(shell, group)
    shell.json("snapshot", "--log", "0")
    broker.truncate("__marshal", 0, first["snapshot"])
    path = tmp_path / "root.dump"
    assert shell.run("log", "dump", group, "--output", str(path)).exit_code == 0
    for command in (("verify",), ("state", group), ("explain", group, "orders:0"), ("log", "tail", group)):
        for where in ((), ("--dump", str(path))):
            done = shell.run(*command, *where)
            assert done.exit_code == 0, (command, where, done.stderr)
    assert shell.json("simulate", "--dump", str(path))["verdict"] == "ok"


@pytest.mark.new_client
def test_bootstrap(shell: Shell, broker: Broker) -> None:
    """It touches no log that can be read, says what is lost, asks twice, and consumers start again."""
    live(shell)
    assert shell.json("log", "reset", "--yes")["outcome"] == "nothing_to_do"
    broker.truncate("__marshal", 1, 5)
    before = end(broker, 1)
    looked = shell.run("state")
    assert looked.exit_code == 1
    assert "marshal log reset" in looked.stderr
    dry = shell.run("log", "reset", "--dry-run")
    assert dry.exit_code == 0
    assert "The promise of at-most-once mode does not hold across this" in dry.stderr
    for answers in (b"n\n", b"y\nn\n"):
        refused = shell.run("log", "reset", stdin=answers)
        assert refused.exit_code == 1
    assert end(broker, 1) == before
    done = shell.json("log", "reset", "--yes")
    assert (done["outcome"], done["same_incarnation"]) == ("begun_anew", True)
    (begun,) = done["begun"]
    assert begun["log"] == 1
    assert begun["at"] >= 5
    assert shell.json("log", "reset", "--yes")["outcome"] == "nothing_to_do"
    live(shell)
    assert shell.run("state", GROUP).exit_code == 0
