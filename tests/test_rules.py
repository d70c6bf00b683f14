"""Every numbered rule of the protocol has a test that names it, and no test names a rule that does not exist.

The rules are in PROTOCOL.md and on the pages of docs/protocol/, on each page in the order of their numbers. A rule is a
list entry that begins with its number in bold. A test names rules at the beginning of its docstring: `F4.3: ...`, or
`F4.2, F4.3: ...`. Tests are parsed and not imported, so that those which need Kafka or Spark count on every machine.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

RULE = re.compile(r"^- \*\*([A-Z]\d+(?:\.\d+)?)\*\* ", re.MULTILINE)
PAGES = (
    "PROTOCOL.md",
    "docs/protocol/member.md",
    "docs/protocol/assignment.md",
    "docs/protocol/tools.md",
    "docs/protocol/snapshots.md",
    "docs/protocol/keys.md",
)
NAMED = re.compile(r"([A-Z]\d+(?:\.\d+)?(?:, [A-Z]\d+(?:\.\d+)?)*): ")


class Naming(NamedTuple):
    """A test that names a rule."""

    rule: str
    test: str


def rules_of(text: str) -> list[str]:
    """The rule numbers in the order of the text."""
    return RULE.findall(text)


def protocol() -> str:
    """The text of all pages with rules."""
    return "\n".join((REPOSITORY / page).read_text(encoding="utf-8") for page in PAGES)


def disorder(rules: list[str]) -> list[str]:
    """Rules of a page that follow a greater number of the same letter, or return to a letter that was over."""
    found = []
    last: dict[str, tuple[int, ...]] = {}
    for rule, before in zip(rules, ["", *rules], strict=False):
        number = tuple(map(int, rule[1:].split(".")))
        if number <= last.get(rule[0], (-1,)) or (rule[0] in last and rule[0] != before[:1]):
            found.append(f"{rule} follows {before}")
        last[rule[0]] = number
    return found


def namings_of(path: str, text: str) -> Iterator[Naming]:
    """The rules that the docstrings of a file's tests name."""
    for node in ast.walk(ast.parse(text, filename=path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found = NAMED.match(ast.get_docstring(node) or "")
            for rule in found[1].split(", ") if found else ():
                yield Naming(rule, f"{path}:{node.lineno} {node.name}")


def namings_under(root: Path) -> list[Naming]:
    return [
        naming
        for file in sorted((root / "tests").rglob("test_*.py"))
        for naming in namings_of(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
    ]


def faults(rules: list[str], namings: list[Naming]) -> list[str]:
    """Rules without a test, numbers used twice, and tests that name a rule which the text does not have.

    Names whose letter the text does not use for rules are ignored: a test may name other numbered things.
    """
    letters = {rule[0] for rule in rules}
    named = {naming.rule for naming in namings}
    found = [f"{rule} has no test" for rule in rules if rule not in named]
    found += [f"{rule} is the number of two rules" for rule in sorted(set(rules)) if rules.count(rule) > 1]
    found += [
        f"{naming.test} names {naming.rule}, which the protocol does not have"
        for naming in namings
        if naming.rule[0] in letters and naming.rule not in rules
    ]
    return found


def test_every_rule_has_a_test_and_every_test_a_rule() -> None:
    found = faults(rules_of(protocol()), namings_under(REPOSITORY))
    assert not found, "\n" + "\n".join(found)


def test_the_checker_reads_the_protocol() -> None:
    """A pattern that misses the rules would make the test above pass on nothing."""
    rules = rules_of(protocol())
    assert {rule[0] for rule in rules} == set("LEFGTDAKMN")
    assert {"L1", "L9", "E1", "E9", "F0", "F1.1", "F9.9", "F10.3", "G4", "T18", "D8", "A5", "K1"} <= set(rules)
    assert {"M1", "M12", "N14"} <= set(rules)
    # Every number in bold is a rule, so that no rule is missed because it is written in another way.
    assert rules == re.findall(r"\*\*([A-Z]\d[\d.]*)\*\*", protocol())
    assert {f"docs/protocol/{file.name}" for file in (REPOSITORY / "docs" / "protocol").iterdir()} == set(PAGES[1:])


@pytest.mark.parametrize("page", PAGES)
def test_the_rules_of_a_page_are_in_order(page: str) -> None:
    assert disorder(rules_of((REPOSITORY / page).read_text(encoding="utf-8"))) == []


def test_a_disorder_is_found() -> None:
    assert disorder(["F0", "F1.1", "F1.2", "F10.1", "G1"]) == []
    assert disorder(["F1.2", "F1.1"]) == ["F1.1 follows F1.2"]
    assert disorder(["F9.1", "F10.1", "F9.2"]) == ["F9.2 follows F10.1"]
    assert disorder(["T1", "G1", "T2"]) == ["T2 follows G1"]


TEXT = """# A protocol

- **F1.1** Rejected if it is late (`late`); see F1.2.
- **F1.2** Otherwise it is accepted,
  and F9.9 is spoken of here.
- **G1** A digest.
"""
TESTS = '''"""F7.7: a module is no test."""

def test_late():
    """F1.1: rejected."""

class TestMore:
    async def test_the_rest(self):
        """F1.2, G1: both of them.

        F6.6: only the beginning counts.
        """

def help_out():
    """F8.8: not a test."""

def test_of_an_invariant():
    """W1: a number of another list."""

def test_without():
    pass
'''


def test_a_complete_pair_has_no_fault() -> None:
    assert rules_of(TEXT) == ["F1.1", "F1.2", "G1"]
    assert faults(rules_of(TEXT), list(namings_of("tests/test_x.py", TESTS))) == []


@pytest.mark.parametrize(
    ("text", "tests", "fault"),
    [
        (TEXT + "- **F2.1** A new rule.\n", TESTS, "F2.1 has no test"),
        (TEXT, TESTS.replace("F1.1: rejected", "rejected"), "F1.1 has no test"),
        (TEXT, TESTS.replace("F1.2, G1: both", "F1.2 and G1: both"), "F1.2 has no test"),
        (TEXT + "- **F1.1** Once more.\n", TESTS, "F1.1 is the number of two rules"),
        (TEXT, TESTS + 'def test_old():\n    """F3.1: gone."""\n', "test_old names F3.1"),
        (TEXT, TESTS.replace("F1.2, G1", "F1.2, G1, G2"), "test_the_rest names G2"),
    ],
)
def test_a_planted_fault_is_found(text: str, tests: str, fault: str) -> None:
    found = faults(rules_of(text), list(namings_of("tests/test_x.py", tests)))
    assert any(fault in line for line in found)


def test_the_files_are_found(tmp_path: Path) -> None:
    """Reads every folder below tests/, and only files that pytest would collect."""
    inner = tmp_path / "tests" / "protocol"
    inner.mkdir(parents=True)
    (inner / "test_a.py").write_text('def test_a():\n    """F1.1: a."""\n', encoding="utf-8")
    (inner / "support.py").write_text('def test_b():\n    """F1.2: b."""\n', encoding="utf-8")
    assert namings_under(tmp_path) == [Naming("F1.1", "tests/protocol/test_a.py:1 test_a")]
