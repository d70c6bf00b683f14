"""docs/proof.md names what the simulator does, no more and no less; guarantees.md has the promises."""

from __future__ import annotations

import re
from pathlib import Path

from marshal_sim.cluster.faults import KINDS
from marshal_sim.commands import simulate
from marshal_sim.tools.story import PROMISES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "proof.md").read_text(encoding="utf-8")


def test_the_notes_are_about_promises_in_their_order() -> None:
    noted = [name for names in re.findall(r"\*\*((?:[SV]\d+(?:, )?)+)\.?\*\*", PAGE) for name in names.split(", ")]
    assert noted == [name for name in PROMISES if name in noted]
    assert len(noted) > 10


def test_every_kind_of_fault_is_on_the_page() -> None:
    section = PAGE.partition("## What goes wrong in a run")[2].partition("## A run that fails")[0]
    named = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"^\| .+ \| (.+) \|$", section, re.MULTILINE))))
    assert set(KINDS) <= named


def test_every_option_on_the_page_is_one() -> None:
    files = Path(simulate.__file__).parent.glob("*.py")
    known = {option for file in files for option in re.findall(r'"(--[a-z-]+)"', file.read_text(encoding="utf-8"))}
    simulator = PAGE.partition("## The layers of proof")[0]
    used = set(re.findall(r"marshal simulate[^\n#`]*?(--[a-z-]+)", PAGE)) | set(re.findall(r"`(--[a-z-]+)", simulator))
    assert used - known == set()
