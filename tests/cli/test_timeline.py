"""`marshal timeline`: the page of a dump. tests/kafka/test_look.py has that of a cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import Shell
from tests.support import dumps
from tests.support.busy_group import GROUP, BusyGroup


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


def picture_in(text: str) -> Any:
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    (picture,) = json.loads(found[1])["pictures"]
    return picture


def test_the_page_of_a_dump(group: BusyGroup, dump: str, tmp_path: Path) -> None:
    """All of it; or a part, in which times count from the dump's newest record."""
    offline, path = Shell(""), tmp_path / "busy.html"
    found = offline.json("timeline", GROUP, "--dump", dump, "-o", str(path))
    assert (found["group"], found["file"], found["partitions"]) == (GROUP, str(path), 4)
    assert found["records"] == len(group.records) - 1
    whole = picture_in(path.read_text(encoding="utf-8"))
    assert [mark[1] for mark in whole["marks"] if mark[1] != "other"] == ["join", "join", "evict"]
    assert whole["lags"][0][-1] is not None
    done = offline.run("timeline", GROUP, "--dump", dump, "--since", "8s ago", "--until", "2s ago", "-o", str(path))
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
