"""Commands that look, over a log that is long or whose beginning was deleted: what they say, and where they begin."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from marshal_py.client import replay_start
from marshal_py.protocol.records import Evict
from tests.cli.shell import Shell
from tests.client.test_looking_back import Life
from tests.support.dumps import BEGIN_MS
from tests.support.long_log import GROUP, STEP_MS

SHELL = Shell("127.0.0.1:1")  # a dump needs no broker


@pytest.fixture(autouse=True)
def _no_log_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_start, "COLD_FOLD_RECORDS", 0)
    monkeypatch.setattr(replay_start, "WINDOW_RECORDS", 32)


def time_of(offset: int) -> str:
    return datetime.fromtimestamp((BEGIN_MS + offset * STEP_MS) / 1000, UTC).isoformat()


def test_explain_begins_where_the_present_state_does(tmp_path: Path) -> None:
    """At the newest snapshot before the claim; --since and --offset move that; it says where it began."""
    life = Life(2)
    dump = str(life.dump(tmp_path / "dump"))
    whole = SHELL.json("explain", GROUP, "orders:0", "--dump", dump)
    assert whole["began_at"] == 0, "the claim is older than all snapshots"
    assert "ClaimingPartition" in [line["type"] for line in whole["records"]]
    old = SHELL.json("explain", GROUP, "orders:0", "--dump", dump, "--offset", str(life.snapshots[0] + 20))
    assert (old["at_offset"], old["owner"]["client_id"]) == (life.snapshots[0] + 20, "live")
    late = SHELL.json("explain", GROUP, "orders:0", "--dump", dump, "--since", time_of(life.snapshots[1] + 5))
    assert late["began_at"] == life.snapshots[1]
    assert (late["owner"], late["position"]) == (whole["owner"], whole["position"])
    assert [line["type"] for line in late["records"]] == ["Heartbeat"], "nobody claimed it since"
    text = SHELL.run("explain", GROUP, "orders:0", "--dump", dump, "--since", time_of(life.snapshots[1] + 5)).stdout
    assert f"(read from offset {life.snapshots[1]} of the log on; --since looks further back)" in text


def test_all_that_is_kept_can_be_explained(tmp_path: Path) -> None:
    """The log was cut at a snapshot: a time between that and the next snapshot still has its answer."""
    life = Life(3)
    cut, within = life.snapshots[0], life.snapshots[0] + 30
    dump = str(life.dump(tmp_path / "dump", cut))
    then = SHELL.json("explain", GROUP, "orders:0", "--dump", dump, "--at", time_of(within))
    assert (then["at_offset"], then["began_at"], then["owner"]["client_id"]) == (within, cut, "live")
    changed = SHELL.json("diff", GROUP, "--at", str(within), "--at", time_of(within + 20), "--dump", dump)
    assert (changed["from_offset"], changed["to_offset"]) == (within, within + 20)
    gone = SHELL.run("explain", GROUP, "orders:0", "--dump", dump, "--at", time_of(cut - 5))
    assert gone.exit_code == 1
    assert f"the history before offset {cut} of log 0 was deleted" in gone.stderr
    assert "what was before was deleted" in SHELL.run("explain", GROUP, "orders:0", "--dump", dump).stdout


def test_an_answer_that_is_empty_says_that_the_history_is_gone(tmp_path: Path) -> None:
    life = Life(1)
    life.tell(Evict(life.dead, life.dead, 10_000))
    life.beat(20)
    life.vouch()
    life.beat(3)
    whole, cut = str(life.dump(tmp_path / "whole")), str(life.dump(tmp_path / "cut", life.snapshots[1]))
    evicted = SHELL.run("advisories", GROUP, "--kind", "evicted", "--dump", whole)
    assert evicted.stdout.count("\n") == 1
    assert evicted.stderr == ""
    later = SHELL.run("advisories", GROUP, "--kind", "evicted", "--dump", cut)
    assert (later.exit_code, later.stdout) == (0, "")
    begins = f"the history begins in log 0 at offset {life.snapshots[1]}, {time_of(life.snapshots[1])}"
    assert later.stderr.startswith(begins)
    assert "older records were deleted" in later.stderr
    tail = SHELL.run("log", "tail", GROUP, "-n", "1000", "--dump", cut)
    assert tail.stdout.count("\n") == 3
    assert tail.stderr.startswith(begins)
    newest = SHELL.run("log", "tail", GROUP, "-n", "2", "--dump", cut)
    assert (newest.stdout.count("\n"), newest.stderr) == (2, "")


def test_since(tmp_path: Path) -> None:
    life = Life(2)
    dump, since = str(life.dump(tmp_path / "dump")), life.end - 15
    times = [
        json.loads(line)["time"]
        for line in SHELL.run(
            "log", "tail", GROUP, "-n", "1000", "--since", time_of(since), "--dump", dump, "--json"
        ).stdout.splitlines()
    ]
    assert min(times) >= datetime.fromtimestamp((BEGIN_MS + since * STEP_MS) / 1000, UTC).isoformat(
        timespec="milliseconds"
    )
    assert SHELL.run("advisories", GROUP, "--since", time_of(since), "--dump", dump).stdout == ""
    assert "joined" in SHELL.run("advisories", GROUP, "--dump", dump).stdout
    assert SHELL.run("advisories", "--since", "yesterday", "--dump", dump).exit_code == 2


def test_the_doctor_counts_who_lives(tmp_path: Path) -> None:
    """Sessions without a sign of life are not live, although the log has not ended them."""
    life = Life(2)
    checks = SHELL.json("doctor", "--dump", str(life.dump(tmp_path / "dump")))["checks"]
    found = {check["name"]: check["found"] for check in checks}
    assert found["content"] == "every log folds; 1 groups, 1 live sessions, 1 silent ones"
    assert found["versions"] == "unnamed: 1 consumers"
    assert found["witnesses"].startswith("0 of 1 consumers")
    assert f"session {life.dead} of 'dead' for {life.end - 1 - life.dead} s" in found["silent consumer"]
