"""Commands that look, over a log that is long or whose beginning was deleted: what they say, and where they begin."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from marshal_py.cli.explain import _cut
from marshal_py.history.explain import Cut
from marshal_py.log import observer as observing
from marshal_py.log import replay
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.records import Evict
from tests.cli.shell import Shell
from tests.log.test_looking_back import Life, observer
from tests.support.dumps import BEGIN_MS
from tests.support.long_log import GROUP, STEP_MS

SHELL = Shell("127.0.0.1:1")  # a dump needs no broker


@pytest.fixture(autouse=True)
def _no_log_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "COLD_FOLD_RECORDS", 0)
    monkeypatch.setattr(replay, "WINDOW_RECORDS", 32)


def time_of(offset: int) -> str:
    return datetime.fromtimestamp((BEGIN_MS + offset * STEP_MS) / 1000, UTC).isoformat()


def test_an_offset_that_reads_like_a_date_is_an_offset() -> None:
    assert _cut("20260101", lambda: 0) == Cut(offset=20260101)
    assert _cut("2026-01-01", lambda: 0) == Cut(time_ms=1_767_225_600_000)


def test_explain_begins_at_the_newest_snapshot(tmp_path: Path) -> None:
    """What the present state comes from is older, and read singly; --since and --offset move that; it says so."""
    life = Life(2, paused=True)
    dump = str(life.dump(tmp_path / "dump"))
    whole = SHELL.json("explain", GROUP, "orders:0", "--dump", dump)
    assert whole["began_at"] == life.snapshots[1]
    told = [(line["type"], line["offset"], line["text"].partition(" -> ")[2]) for line in whole["records"]]
    assert told[:2] == [("ClaimingPartition", life.epoch, "live owns it now"), ("ReleaseGroup", life.pause, "")]
    assert {kind for kind, _, _ in told[2:]} == {"Heartbeat"}
    (one,) = SHELL.json("explain", GROUP, "orders:0", "--dump", dump, "-n", "1")["records"]
    assert one["type"] == "ReleaseGroup"
    everything = SHELL.json("explain", GROUP, "orders:0", "--dump", dump, "--since", "earliest")
    assert [everything[key] for key in ("began_at", "owner", "position", "paused")] == [
        0,
        *(whole[key] for key in ("owner", "position", "paused")),
    ]
    same = {line["offset"]: line["fields"] for line in everything["records"]}
    assert all(same[line["offset"]] == line["fields"] for line in whole["records"][:2])
    old = SHELL.json("explain", GROUP, "orders:0", "--dump", dump, "--at", str(life.snapshots[0] + 20))
    assert (old["at_offset"], old["owner"]) == (life.snapshots[0] + 20, "live")
    late = SHELL.json("explain", GROUP, "orders:0", "--dump", dump, "--since", time_of(life.snapshots[1] + 5))
    assert late["began_at"] == life.snapshots[1]
    assert (late["owner"], late["position"]) == (whole["owner"], whole["position"])
    assert [line["type"] for line in late["records"]][2:] == ["Heartbeat"], "nobody claimed it since"
    text = SHELL.run("explain", GROUP, "orders:0", "--dump", dump, "--since", time_of(life.snapshots[1] + 5)).stdout
    assert f"(read from offset {life.snapshots[1]} of the log on; --since looks further back)" in text


def test_all_that_is_kept_can_be_explained(tmp_path: Path) -> None:
    """The log was cut at a snapshot: a time between that and the next snapshot still has its answer."""
    life = Life(3)
    cut, within = life.snapshots[0], life.snapshots[0] + 30
    dump = str(life.dump(tmp_path / "dump", cut))
    then = SHELL.json("explain", GROUP, "orders:0", "--dump", dump, "--at", time_of(within))
    assert (then["at_offset"], then["began_at"], then["owner"]) == (within, cut, "live")
    changed = SHELL.json("explain", GROUP, "--since", str(within), "--at", time_of(within + 20), "--dump", dump)
    assert (changed["from_offset"], changed["to_offset"]) == (within, within + 20)
    gone = SHELL.run("explain", GROUP, "orders:0", "--dump", dump, "--at", time_of(cut - 5))
    assert gone.exit_code == 1
    assert f"the history before offset {cut} of log 0 was deleted" in gone.stderr
    assert "--since looks further back" in SHELL.run("explain", GROUP, "orders:0", "--dump", dump).stdout
    kept = SHELL.run("explain", GROUP, "orders:0", "--dump", dump, "--since", "earliest").stdout
    assert f"(read from offset {cut} of the log on; what was before was deleted)" in kept


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


@pytest.mark.parametrize(
    "command",
    [
        ("explain", GROUP, "orders:0", "--at"),
        ("explain", GROUP, "--since"),
        ("advisories", GROUP, "--since"),
        ("log", "tail", GROUP, "-n", "1000", "--since"),
        ("state", GROUP, "--lag", "--since"),
        ("timeline", GROUP, "--since"),
        ("top", "--at"),
    ],
)
def test_a_time_with_a_dump_counts_from_its_newest_record(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Whenever somebody reads it: a time of day is of the dump's last day, and -2m is before its end."""
    life = Life(2)
    life.tell(Evict(life.dead, life.dead, 10_000))
    dump = ("--dump", str(life.dump(tmp_path / "dump")))
    json_ = () if command[0] == "timeline" else ("--json",)
    for relative, offset in (("04:41:30", 90), ("-2m", life.end - 1 - 120)):
        found = [SHELL.run(*command, text, *json_, *dump) for text in (relative, time_of(offset))]
        assert [one.exit_code for one in found] == [0, 0], found[0].stderr
        assert found[0].stdout == found[1].stdout != ""


def test_the_doctor_counts_who_lives(tmp_path: Path) -> None:
    """Sessions without a sign of life are not live, although the log has not ended them."""
    life = Life(2)
    checks = SHELL.json("doctor", "--dump", str(life.dump(tmp_path / "dump")))["checks"]
    found = {check["name"]: check["found"] for check in checks if "garbage" not in check["found"]}  # fillers of the log
    assert found["content"] == "every log folds; 1 groups, 1 live sessions, 1 silent ones"
    assert found["versions"] == "unnamed: 1 consumers"
    assert found["witnesses"].startswith("0 of 1 consumers")
    assert f"session {life.dead} of 'dead' for {life.end - 1 - life.dead} s" in found["silent consumer"]


def test_what_is_rare_is_looked_for_in_the_newest_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says where it has stopped, and --since looks further."""
    monkeypatch.setattr(observing, "LOOK_BACK_RECORDS", 100)
    life = Life(3)
    dump = str(life.dump(tmp_path / "dump"))
    rare = ("advisories", GROUP, "--kind", "joined", "-n", "1", "--dump", dump)
    bounded = SHELL.run(*rare)
    assert (bounded.exit_code, bounded.stdout) == (0, "")
    at = life.snapshots[1]
    assert bounded.stderr == f"looked back to log 0 at offset {at}, {time_of(at)}: --since TIME looks further\n"
    for found in (SHELL.run(*rare, "--since", "2000-01-01"), SHELL.run(*rare[:4], "--dump", dump)):
        assert "joined" in found.stdout
        assert found.stderr == ""


def test_lag_reads_no_more_than_a_speed_needs(tmp_path: Path) -> None:
    """If all records are of the last minute, it takes the newest ones alone."""
    life = Life(3)
    with observer(life.dump(tmp_path / "dump")) as looking:
        began = min(one.record.offset for one in looking.read(since_ms=0, records_max=8))
        assert began == life.snapshots[2]
    with observer(life.dump(tmp_path / "dump")) as looking:
        began = min(one.record.offset for one in looking.read(since_ms=0, records_max=100))
        assert began == life.snapshots[1]


def test_of_what_it_leaves_out_it_looks_at_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it knows where positions stood, though it folds nothing from there on. Where all is read, it does not."""
    monkeypatch.setattr(replay, "SOON_RECORDS", 300)
    life = Life(3)
    looks = list[tuple[int, int, int]]()

    def look(world: World, time_ms: int) -> None:
        looks.append((world.next_offset, time_ms, sum(one.position for one in world.groups[GROUP].claims.values())))

    since_ms = BEGIN_MS + (life.snapshots[0] - 5) * STEP_MS
    with observer(life.dump(tmp_path / "dump")) as looking:
        now = list(looking.read(since_ms=since_ms, records_max=8, look=look))
        assert [one.record.offset for one in now] == list(range(life.snapshots[2], life.end))
        ((at, time_ms, positions),) = looks
        assert (at, time_ms) == (life.snapshots[1], BEGIN_MS + (at - 1) * STEP_MS)
        assert positions < sum(one.position for one in looking.worlds[0].groups[GROUP].claims.values())
    for records_max, since in ((10_000, since_ms), (8, BEGIN_MS + life.end * STEP_MS)):
        with observer(life.dump(tmp_path / "dump")) as looking:
            list(looking.read(since_ms=since, records_max=records_max, look=look))
    assert len(looks) == 1
