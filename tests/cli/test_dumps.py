"""`marshal log dump` and `load`, and the commands that look into a dump: the same answers as from the cluster."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from marshal_py.client.marshal import connect
from marshal_py.errors import Diverged
from marshal_py.history import explain
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import Heartbeat
from marshal_py.transport.dump import Reader, Writer, memory_transport
from marshal_py.transport.ports import LogRecord
from tests.cli.shell import Shell, wait_until
from tests.support import dumps
from tests.support.differential_log import INCARNATION, DifferentialLog


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
    cut = ("--since", "3", "--at", "9")
    assert offline.json("explain", billing, *cut, *where) == shell.json("explain", billing, *cut)
    swapped = offline.run("explain", billing, "--since", "9", "--at", "3", *where)
    assert (swapped.exit_code, "--at lies before --since" in " ".join(swapped.stderr.split())) == (2, True)
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
        wait_until(lambda: len(consumer.cached_info().claims) == 4, "all claims")
        stood = {
            number: Shell("").json("explain", billing, f"orders:{number}", "--dump", str(dumped))["position"]
            for number in range(4)
        }
        assert {tp.partition: claim.position for tp, claim in consumer.cached_info().claims.items()} == stood
    refused = shell.run("log", "load", str(dumped), "--coordination-topic", "__copy")
    assert refused.exit_code == 1
    assert "is not empty: partition 0 ends at offset" in refused.stderr


def test_a_load_that_cannot_be_is_refused(shell: Shell, dumped: Path, tmp_path: Path) -> None:
    small = shell.run("log", "load", str(dumped), "--coordination-topic", "__small")
    assert small.exit_code == 1
    assert "has 2 partitions, and its root names 16" in small.stderr
    broken = tmp_path / "broken.dump"
    broken.write_bytes(dumped.read_bytes()[:-1])
    cut_off = shell.run("log", "load", str(broken), "--coordination-topic", "__unused")
    assert cut_off.exit_code == 1
    assert len(cut_off.stderr.strip().splitlines()) == 1
    assert "is damaged in line" in cut_off.stderr
    assert shell.run("log", "load", str(tmp_path / "missing")).exit_code == 2


def test_a_dump_of_a_log_with_a_hole_is_not_loaded(shell: Shell, tmp_path: Path) -> None:
    """L8: sessions and epochs are offsets, and each record behind the hole would get another one."""
    path = dumps.write(tmp_path / "hole.dump", [LogRecord(0, at, b"", dumps.BEGIN_MS) for at in (0, 1, 3)])
    refused = shell.run("log", "load", str(path), "--coordination-topic", "__hole")
    assert refused.exit_code == 1
    assert "the log had no record at 0:2" in " ".join(refused.stderr.split())


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


# --- what a broken consumer kept


def test_what_a_broken_consumer_held_is_compared_with_the_log(billing: str, dumped: Path, tmp_path: Path) -> None:
    header, transport = memory_transport(dumped)
    with Observer(transport, header.topic) as observer:
        observer.fold(billing)
        (world,) = [world for world in observer.worlds.values() if billing in world.groups]
    group = world.groups[billing]
    group.partitions[TopicPartition("orders", 2)].position = 3
    broken = SimpleNamespace(
        name=billing, world=world, group=group, session=7, options=SimpleNamespace(client_id="broken-one")
    )
    error = Diverged(billing, world.log, 16, 1, 2, "planted")
    kept = explain.save_state(cast(Member, broken), error, str(tmp_path), "lib", 5)
    where = ("--state", kept, "--dump", str(dumped))
    found = Shell("").json("explain", billing, *where)
    assert (found["client_id"], found["first_difference"], found["left_out"]) == ("broken-one", 16, 0)
    assert found["at_offset"] == world.next_offset - 1
    assert found["differences"] == [{"entry": "partition orders:2", "field": "position", "held": 3, "log": 5}]
    shown = Shell("").run("explain", billing, *where)
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[1:] == ["partition orders:2, position: 3 held, 5 by the log"]
    other = Shell("").run("explain", "another", *where)
    assert other.exit_code == 1
    assert "it is of 'billing'" in other.stderr
    none = Shell("").run("explain", billing, "--state", str(dumped), "--dump", str(dumped))
    assert none.exit_code == 1
    assert "Diverged" in none.stderr
    assert Shell("").run("explain", billing, "--at", "3", *where).exit_code == 2
    assert Shell("").run("explain", billing, "--dump", str(dumped), "--at", "3").exit_code == 2
    hour = Shell("").run("explain", billing, "--dump", str(dumped), "--since", "-1h").stdout
    assert hour.startswith(f"group '{billing}' from the beginning to offset ")
    assert "nobody at none -> " in hour
    assert Shell("").run("explain", billing, "--dump", str(dumped)).stdout == hour
    kept_later = json.loads(Path(kept).read_text(encoding="utf-8"))
    later = tmp_path / "later.json"
    later.write_text(json.dumps({**kept_later, "at_offset": world.next_offset + 9}), encoding="utf-8")
    short = Shell("").run("explain", billing, "--state", str(later), "--dump", str(dumped))
    assert short.exit_code == 1
    assert "this history does not reach there" in short.stderr


# --- verify


def test_what_changed_in_a_group_is_as_short_as_asked_and_in_words(billing: str, dumped: Path) -> None:
    asked = ("explain", billing, "--since", "earliest", "--dump", str(dumped))
    whole, short = (Shell("").json(*asked, "-n", count) for count in ("100", "1"))
    assert whole["left_out"] == 0
    assert (short["notable"], short["left_out"]) == (whole["notable"][-1:], len(whole["notable"]) - 1)
    lines = Shell("").run(*asked, "-n", "1").stdout.splitlines()
    assert f"({short['left_out']} older records left out)" in lines
    assert not [line for line in lines if "{" in line]
    (topics,) = (line for line in lines if line.startswith("topics: "))
    assert topics.startswith("topics: none -> ")


def test_verify_agrees_with_the_cluster_and_with_its_dump(shell: Shell, billing: str, dumped: Path) -> None:
    for found in (shell.json("verify"), Shell("").json("verify", "--dump", str(dumped))):
        assert (found["ok"], found["first"], found["differences"]) == (True, None, [])
        assert found["records"] >= len(dumped.read_text(encoding="utf-8").splitlines()) - 2
        assert found["digests"] > 0
    assert shell.run("verify", billing).stdout.splitlines()[-1] == "all digests are equal"
    assert shell.run("verify", "--coordination-topic", "__unused").exit_code == 0


def test_verify_names_the_offset_of_a_changed_byte(dumped: Path, tmp_path: Path) -> None:
    """Anywhere in the file: 40 places, spread over it; test_dump.py changes every byte of a smaller one."""
    whole, changed = dumped.read_bytes(), tmp_path / "changed.dump"
    lines = whole.splitlines(keepends=True)
    for at in range(0, len(whole), len(whole) // 40):
        changed.write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
        done = Shell("").run("verify", "--dump", str(changed), "--json")
        assert done.exit_code == 1
        first = json.loads(done.stdout)["first"]
        line = whole.count(b"\n", 0, at)
        if 0 < line < len(lines) - 1:
            record = json.loads(lines[line])
            assert (first["log"], first["offset"]) == (record["log"], record["offset"])
        assert f"at offset {first['offset']} of log {first['log']}" in done.stderr


def test_verify_sees_through_a_dump_that_was_written_anew(shell: Shell, billing: str, tmp_path: Path) -> None:
    """Sums that fit do not help: the digests of the heartbeats stand in the log itself."""
    with (
        connect({"bootstrap.servers": shell.servers, "log_level": 0}) as marshal,
        marshal.consumer("long", ["orders"], heartbeat_interval_s=1.0) as consumer,
    ):
        path = tmp_path / "long.dump"

        def carried() -> bool:
            assert shell.run("log", "dump", "long", "-o", str(path), "--force").exit_code == 0
            consumer.flush()
            return bool(Shell("").json("verify", "long", "--dump", str(path))["heartbeat_digests"])

        wait_until(carried, "a heartbeat carries a digest")
    with Reader(path) as reader:
        header, records = reader.header, list(reader)
    forged = tmp_path / "forged.dump"
    with forged.open("wb") as out:
        writer = Writer(out, header)
        log = records[-1].log
        for record in records:
            if (record.log, record.offset) == (log, 3):
                assert record.value is not None
                record = record._replace(value=record.value[:-1] + bytes((record.value[-1] ^ 1,)))
            writer.write(record)
        writer.finish()
    done = Shell("").run("verify", "--dump", str(forged), "--json")
    assert done.exit_code == 1
    first = json.loads(done.stdout)["first"]
    assert first["log"] == log
    assert first["offset"] > 3
    assert "digest" in first["what"]
    assert f"log {log}, offset {first['offset']}: " in done.stderr


# --- doctor


def test_the_doctor_names_silent_sessions_of_a_dump(tmp_path: Path, dumped: Path) -> None:
    """As of the newest record; also one of a log without its beginning, of which a snapshot tells and nothing else."""
    doctor = ("doctor", "--dump")
    sound = Shell("").json(*doctor, str(dumped))
    names = [check["name"] for check in sound["checks"]]
    assert names == ["root", "content", "growth", "clocks", "versions", "witnesses", "groups"]
    assert sound["ok"]
    log = DifferentialLog()
    orphan = log.must(log.new_join("killed"), "other")
    session = log.join("alive")
    while log.world.next_offset % 16:
        log.must(Heartbeat(session, log.world.next_offset))
    root, data = log.world.genesis, snapshot.state_of(log.world)
    assert root is not None
    assert data is not None
    state, chain, at = snapshot.digest_of(log.world), log.world.chain, log.world.chain_at
    for record in (
        *snapshot.split(root, b"w" * 16, at, state, chain, data),
        snapshot.witness(root, b"v" * 16, at, state, chain),
    ):
        log.put(codec.encode(record, "", INCARNATION))
    for _ in range(10):
        log.must(Heartbeat(session, log.world.next_offset))
    whole = [LogRecord(0, offset, value, dumps.BEGIN_MS + 1_000 * offset) for offset, value in enumerate(log.values)]
    for first in (0, at):
        path = dumps.write(tmp_path / f"from-{first}.dump", whole[first:])
        (found,) = [check for check in Shell("").json(*doctor, str(path))["checks"] if check["level"] == "warn"]
        assert found["name"] == "silent consumer"
        silent_s = log.last - max(first, orphan)
        assert found["found"].startswith(f"'other': no sign of life of session {orphan} of 'killed' for {silent_s} s")
        assert f"marshal evict other {orphan}" in found["advice"]
    assert Shell("").run(*doctor, str(dumped), "--as", "admin").exit_code == 2


# --- state and lag


def test_state_of_a_dump_has_no_ends(shell: Shell, billing: str, dumped: Path) -> None:
    live, kept = shell.json("state", billing), Shell("").json("state", billing, "--dump", str(dumped))
    (now,), (then,) = live["groups"], kept["groups"]
    assert {partition["end"] for partition in then["partitions"]} == {None}
    assert [p["position"] for p in then["partitions"]] == [p["position"] for p in now["partitions"]]
    refused = Shell("").run("state", "nobody", "--dump", str(dumped))
    assert refused.exit_code == 1
    assert "group 'nobody' is not in __marshal" in refused.stderr


def test_lag_of_a_group(shell: Shell, billing: str) -> None:
    found = shell.json("state", "--lag", billing)
    assert found.keys() >= {"group", "lag", "unknown", "parked", "per_second", "time_s", "partitions", "notices"}
    (group,) = shell.json("state", billing)["groups"]
    more = ["per_second", "time_s", "lag_per_second", "zero_s", "oldest_s", "retention_s", "deleted"]
    assert list(found["partitions"][0]) == [*group["partitions"][0], *more]
    assert (found["unknown"], found["parked"], found["notices"]) == (0, 0, [])
    assert found["lag"] == sum(row["lag"] for row in found["partitions"])
    assert all(row["lag"] == row["end"] - row["position"] for row in found["partitions"])
    assert f"group billing: lag {found['lag']}, " in shell.run("state", "--lag", billing).stdout
    everything = shell.json("state", "--lag")
    assert [one["lag"] for one in everything if one["group"] == billing] == [found["lag"]]
    first, *rows = shell.run("state", "--lag").stdout.splitlines()
    assert (first.split()[0], first.split()[-3:]) == ("group", ["last", "progress", "found"])
    assert len(rows) == len(everything)
    refused = shell.run("state", "--lag", "nobody")
    assert refused.exit_code == 1
    assert "group 'nobody' is not in __marshal" in refused.stderr
