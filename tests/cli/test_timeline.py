"""`marshal timeline` and `marshal state --lag --since` of a dump. tests/kafka/test_look.py has those of a cluster."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from marshal_py.cli.state import spark_line
from marshal_py.history.lag import grows_since
from tests.cli.shell import Shell
from tests.support import dumps
from tests.support.busy_group import GROUP, BusyGroup
from tests.support.timeline_page import picture_in


@pytest.fixture(scope="module")
def group() -> BusyGroup:
    group = BusyGroup(partitions=4, members=2)
    group.heartbeats(40)
    group.crash()
    group.heartbeats(40)
    return group


@pytest.fixture(scope="module")
def dump(group: BusyGroup, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(dumps.write(tmp_path_factory.mktemp("timeline") / "busy.dump", group.records))


def test_the_page_of_a_dump(group: BusyGroup, dump: str, tmp_path: Path) -> None:
    """All of it; or a part, in which times count from the dump's newest record."""
    offline, path = Shell(""), tmp_path / "busy.html"
    found = offline.json("timeline", GROUP, "--dump", dump, "-o", str(path))
    assert (found["group"], found["file"], found["partitions"]) == (GROUP, str(path), 4)
    assert found["records"] == len(group.records) - 1
    whole = picture_in(path.read_text(encoding="utf-8"))
    assert [mark[1] for mark in whole["marks"] if mark[1] != "other"] == ["join", "join", "evict"]
    assert whole["lags"][0][-1] is not None
    again = ("timeline", GROUP, "--dump", dump, "--since", "-8s", "--until", "-2s", "-o", str(path))
    refused = offline.run(*again)
    assert (refused.exit_code, "is there; --force replaces it" in refused.stderr) == (1, True)
    assert picture_in(path.read_text(encoding="utf-8")) == whole
    done = offline.run(*again, "--force")
    assert re.fullmatch(rf"{path}: \S+ to \S+, 4 partitions, \d+ records", "".join(done.stdout.splitlines()))
    part = picture_in(path.read_text(encoding="utf-8"))
    assert (part["from_ms"], part["to_ms"]) == (group.now_ms - 8_000, 6_000)
    assert 0 < len(part["records"]) < len(whole["records"])
    printed = offline.run("timeline", GROUP, "--dump", dump)
    assert picture_in(printed.stdout) == whole


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("billink",), 1, "did you mean 'billing'?"),
        ((GROUP, "--since", "2001-01-01", "--until", "2000-01-01"), 2, "--since names no time before the end"),
        ((GROUP, "--since", "2000-01-01", "--until", "2001-01-01"), 1, "is younger than 2001-01-01"),
        ((GROUP, "--json"), 2, "--json needs --output"),
        ((GROUP, "-o", "/nowhere/x.html"), 1, "cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_drawn(dump: str, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = Shell("").run("timeline", *arguments, "--dump", dump)
    assert (done.exit_code, words in " ".join(done.stderr.replace("│", "").split())) == (code, True), done.stderr


def test_the_lag_over_time_of_a_dump(dump: str) -> None:
    offline, arguments = Shell(""), ("state", GROUP, "--lag", "--since", "-1h", "--dump", dump)
    found = offline.json(*arguments)
    now = found["partitions"][-4:]
    assert [(one["time"], one["topic"], one["partition"]) for one in now] == [
        (found["times"][-1], "orders", number) for number in range(4)
    ]
    assert found["total"][-1] == sum(one["lag"] for one in now) > 0
    assert found["lag_of"] == "what owners wrote"
    rows = list(csv.DictReader(offline.run(*arguments, "-o", "csv").stdout.splitlines()))
    assert len(rows) == len(found["partitions"]) == 4 * len(found["times"])
    assert rows[-4:] == [{name: str(value) for name, value in one.items()} for one in now]
    lags = [one["lag"] for one in found["partitions"] if one["partition"] == 3]
    *_, last, total, span = offline.run(*arguments).stdout.split("\nthe lag of all has grown")[0].splitlines()
    assert last.split() == ["orders", "3", spark_line(lags), *figures(lags)]
    assert total.split() == ["all", "-", spark_line(found["total"]), *figures(found["total"])]
    assert span == f"from {found['times'][0]} to {found['times'][-1]}; lag of what owners wrote"

    refused = offline.run("state", GROUP, "--members", "--since", "-1h", "--dump", dump)
    assert (refused.exit_code, "--since goes with GROUP and --lag" in refused.stderr) == (2, True)


@pytest.mark.parametrize("command", [("advisories", GROUP), ("log", "tail", GROUP), ("explain", GROUP, "orders:0")])
def test_records_as_csv(dump: str, command: tuple[str, ...]) -> None:
    offline = Shell("")
    told = [json.loads(line) for line in offline.run(*command, "--dump", dump, "-o", "json").stdout.splitlines()]
    told = told[0]["records"] if command[0] == "explain" else told
    rows = list(csv.DictReader(offline.run(*command, "--dump", dump, "-o", "csv").stdout.splitlines()))
    assert [list(row) for row in rows] == [list(one) for one in told]
    assert [(row["time"], row["offset"]) for row in rows] == [
        (one["time"], "" if one["offset"] is None else str(one["offset"])) for one in told
    ]
    assert rows


def figures(lags: list[int | None]) -> list[str]:
    known = [lag for lag in lags if lag is not None]
    return ["-" if one is None else str(one) for one in (lags[0], max(known), lags[-1])]


@pytest.mark.parametrize(
    ("lags", "at"),
    [
        ([3, 0, 2, 40, 80, 100], 2),
        ([5_000, 5_100, 8_000, 10_000], 1),
        ([None, 0, 100, None], 1),
        ([0, 100, 50], None),  # it falls
        ([7, 7, 7], None),
        ([0, 0, 1, 0, 100, 99], 3),
        ([None, None], None),
    ],
)
def test_since_when_a_lag_grows(lags: list[int | None], at: int | None) -> None:
    assert grows_since(lags) == at


def test_a_line_of_blocks() -> None:
    assert spark_line([0, 1, 7, None, 14]) == "▁▂▅·█"
    assert spark_line([0, 0]) == "▁▁"
    assert spark_line([None, None, 3, 9, 1, None], width=3) == "·█▂"
    assert spark_line([None]) == "·"
