"""Which test shows which sentence of a design that the library follows: a table, `build/requirements.md`.

Each file `tests/seeds/*.md` lists the requirement sentences of one design, `- ` before each of them. A line that begins
with `> ` below a sentence says how the library does it; without one it does it as written. A test shows a sentence if
its docstring names the design (as the title does in parentheses) and quotes the sentence. Backticks and line breaks do
not count. A sentence that has no meaning here needs no test.

    python -m tests.support.seeds        writes the table (`make requirements`)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
TABLE = REPOSITORY / "build" / "requirements.md"
OPEN = "**open**"
MEANINGLESS = "no meaning here"  # how a status begins that stands for a test

HEAD = """# Requirements and their tests

The designs that marshal_py follows, sentence by sentence, each with the tests whose docstrings quote it. A test fails
if a sentence has none.
"""


class Seed(NamedTuple):
    """A design. `text`: what its file says before the first list, in Markdown. `sections`: by title, the sentences.

    `name`: what tests call it, for example ADR-31. `statuses`: by sentence, how the library does it if not as written.
    """

    name: str
    text: str
    sections: dict[str, list[str]]
    statuses: dict[str, str]


class Quoted(NamedTuple):
    """A test, and its docstring without line breaks and backticks."""

    test: str
    docstring: str


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def seed_of(text: str) -> Seed:
    """Parses a file of tests/seeds: a title, some text, and sections with lists."""
    before: list[str] = []
    sections: dict[str, list[str]] = {}
    statuses: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            sections[line.removeprefix("## ")] = []
        elif not sections:
            before.append(line.replace("# ", "## ", 1) if line.startswith("# ") else line)
        elif line.startswith("- "):
            [*sections.values()][-1].append(line.removeprefix("- "))
        elif line.strip().startswith("> "):
            statuses[[*sections.values()][-1][-1]] = line.strip().removeprefix("> ")
        elif line.strip():
            [*sections.values()][-1][-1] += " " + line.strip()
    name = re.search(r"\((.+?)\)", before[0])
    return Seed(name[1] if name else before[0], "\n".join(before).strip(), sections, statuses)


def quotes_of(path: str, text: str) -> Iterator[Quoted]:
    for node in ast.walk(ast.parse(text, filename=path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield Quoted(f"{path}::{node.name}", plain(ast.get_docstring(node) or ""))


def quotes_under(root: Path) -> list[Quoted]:
    return [
        quoted
        for file in sorted((root / "tests").rglob("test_*.py"))
        for quoted in quotes_of(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
    ]


def shows(quoted: Quoted, seed: Seed, sentence: str) -> bool:
    return seed.name in quoted.docstring and plain(sentence) in quoted.docstring


def table(seeds: list[Seed], quotes: list[Quoted]) -> str:
    """The page: a section per seed, a row per sentence."""
    lines = [HEAD]
    for seed in seeds:
        lines.append(seed.text)
        for title, sentences in seed.sections.items():
            lines += ["", f"### {title}", "", "| requirement | tests | status |", "|---|---|---|"]
            for sentence in sentences:
                status = seed.statuses.get(sentence, "as written")
                tests = [f"`{quoted.test}`" for quoted in quotes if shows(quoted, seed, sentence)]
                cell, missing = sentence.replace("|", r"\|"), "" if status.startswith(MEANINGLESS) else OPEN
                lines.append(f"| {cell} | {'<br>'.join(tests) or missing} | {status} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def seeds_under(root: Path) -> list[Seed]:
    return [seed_of(file.read_text(encoding="utf-8")) for file in sorted((root / "tests" / "seeds").glob("*.md"))]


def generated() -> str:
    return table(seeds_under(REPOSITORY), quotes_under(REPOSITORY))


if __name__ == "__main__":
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(generated(), encoding="utf-8")
