"""docs/guarantees.md: every promise in the words of a story, who judges it, its test; what the simulator does."""

from __future__ import annotations

import re
from pathlib import Path

from marshal_sim.cluster.faults import KINDS
from marshal_sim.commands import simulate
from marshal_sim.tools.story import PROMISES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([SV]\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
NAMED = {name: text for name, text in PROMISES.items() if name != "crash"}


def source(folder: str) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / folder).rglob("*.py")))


def test_every_promise_is_on_the_page_in_the_words_of_a_story() -> None:
    assert {name: text for name, text, _ in ROW.findall(PAGE)} == NAMED


def test_what_users_are_promised_names_each_invariant_once() -> None:
    summary = PAGE.partition("## The invariants")[0]
    named: list[str] = []
    for first, last in re.findall(r"([SV]\d+)(?: to ([SV]\d+))?", summary):
        numbers = range(int(first[1:]), int((last or first)[1:]) + 1)
        named += [f"{first[0]}{number}" for number in numbers]
    assert sorted(named) == sorted(NAMED)


def test_somebody_judges_each_invariant() -> None:
    judges = source("marshal_sim/judge") + source("marshal_sim/cluster")
    assert [name for name in NAMED if f'"{name}"' not in judges] == []


def test_each_test_on_the_page_is_there() -> None:
    tests = source("tests")
    shown = {name: re.findall(r"`(\w+)`", cell) for name, _, cell in ROW.findall(PAGE)}
    assert [name for name, found in shown.items() if not found] == ["V15"], "the simulator alone shows it"
    missing = [test for found in shown.values() for test in found if f"def test_{test}(" not in tests]
    assert missing == []


def test_the_notes_are_about_promises_in_their_order() -> None:
    noted = [name for names in re.findall(r"\*\*((?:[SV]\d+(?:, )?)+)\.?\*\*", PAGE) for name in names.split(", ")]
    assert noted == [name for name in PROMISES if name in noted]
    assert len(noted) > 10


def test_every_kind_of_fault_is_on_the_page() -> None:
    section = PAGE.partition("## What goes wrong in a run")[2].partition("\n## ")[0]
    named = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"^\| .+ \| (.+) \|$", section, re.MULTILINE))))
    assert set(KINDS) <= named


def test_every_option_on_the_page_is_one() -> None:
    files = Path(simulate.__file__).parent.glob("*.py")
    known = {option for file in files for option in re.findall(r'"(--[a-z-]+)"', file.read_text(encoding="utf-8"))}
    simulator = PAGE.partition("## The layers of proof")[0]
    used = set(re.findall(r"marshal simulate[^\n#`]*?(--[a-z-]+)", PAGE)) | set(re.findall(r"`(--[a-z-]+)", simulator))
    assert used - known == set()
