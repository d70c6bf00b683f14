"""Builds the site in build/site from the pages as they are: `make docs`. Zensical does it by mkdocs.yml.

First it copies the pages to build/pages, where they stand to each other as in the repository, so that their links hold.
There it adds what the repository does not have: a page per public module for mkdocstrings, sequence diagrams as SVG
(sequence.py), and llms.txt, which lists the pages for programs that read. A warning ends the build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from sequence import drawn  # beside this file

ROOT: Final = Path(__file__).resolve().parents[1]
COPIED: Final = ("README.md", "PROTOCOL.md", "CONTRIBUTING.md", "CHANGELOG.md", "monitoring/README.md")
FILES: Final = ("monitoring/overview.json", "monitoring/group.json", "monitoring/alerts.yaml")  # which pages link
ENTRY: Final = re.compile(r"^ +- (?P<title>[^:\n]+): (?P<page>\S+\.md)$", re.MULTILINE)
OPTION: Final = re.compile(r"(?<=<code>)--[\w-]+")  # of a command; on a telephone, a line would end after its hyphens
MERMAID: Final = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ROW: Final = re.compile(r"^\| \[[^]]+\]\((?P<page>[^)]+)\) \| (?P<who>[^|]+) \| (?P<what>[^|]+) \|$", re.MULTILINE)
# Spark's names come by __getattr__, where mkdocstrings, which imports nothing, does not find them.
LAZY: Final = re.compile(r'^    "(?P<name>\w+)": "(?P<module>marshal_py\.spark\.[\w.]+)",$', re.MULTILINE)

BELOW: Final = ("heading_level: 2", "show_root_full_path: false")  # the options of one name on the page of a module


def entries() -> dict[str, str]:
    """Returns each page that the navigation of mkdocs.yml has, with its title."""
    return {entry["page"]: entry["title"] for entry in ENTRY.finditer((ROOT / "mkdocs.yml").read_text("utf-8"))}


def api_page(module: str) -> str:
    """Returns the page of a public module."""
    if module == "marshal_py.info":  # fields say by their names what they are
        return block(module, "show_if_no_docstring: true")
    if module == "marshal_py.errors":
        return block(module, "inherited_members: false")
    if module == "marshal_py.testing":  # a function with the name of its file is hidden by that
        return block(module) + block(f"{module}.replay.replay", *BELOW)
    if module != "marshal_py.spark":
        return block(module)
    names = LAZY.finditer((ROOT / "marshal_py/spark/__init__.py").read_text("utf-8"))
    pages = [block(f"{one['module']}.{one['name']}", *BELOW) for one in names]
    return block(module, "members: false") + "".join(pages)


def block(name: str, *options: str) -> str:
    """Returns what mkdocstrings replaces by the text of a name."""
    return "\n".join(
        [f"::: {name}", *(["    options:"] if options else []), *(f"      {one}" for one in options), "\n"]
    )


def llms() -> str:
    """Returns llms.txt: every page that docs/README.md lists, with what it answers. See llmstxt.org."""
    index = (ROOT / "docs/README.md").read_text("utf-8")
    pages = [f"- [{row['page']}](docs/{row['page']}): {row['what'].strip()}" for row in ROW.finditer(index)]
    listed = {f"docs/{row['page']}" for row in ROW.finditer(index)}
    others = {page: title for page, title in entries().items() if page not in listed}
    rest = [f"- [{title}]({page.replace('.md', '/') if 'api/' in page else page})" for page, title in others.items()]
    summary = "> Kafka consumers that coordinate through Kafka alone: one topic, no ZooKeeper, no database."
    return "\n".join(
        ["# marshal_py", "", summary, "", "## Pages", "", *pages, "", "## Rules, API, project", "", *rest, ""]
    )


def prepare(folder: Path) -> None:
    """Copies the pages into a folder, and adds those that are made."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in (*COPIED, *FILES):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for page in folder.rglob("*.md"):
        text = page.read_text("utf-8")
        page.write_text(MERMAID.sub(lambda block: drawn(block[1]), text), "utf-8")
    (folder / "api").mkdir()
    for name in entries():
        if name.startswith("api/"):
            (folder / name).write_text(api_page(Path(name).stem), "utf-8")


def build() -> int:
    """Returns the exit code of Zensical, which has written build/site."""
    prepare(ROOT / "build/pages")
    shutil.rmtree(ROOT / "build/site", ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    code = subprocess.run(command, cwd=ROOT).returncode
    if code == 0:
        shutil.rmtree(ROOT / "build/site/assets/stylesheets/classic")  # of the other variant of the theme
        for page in (ROOT / "build/site").rglob("*.html"):
            page.write_text(OPTION.sub(r"<nobr>\g<0></nobr>", page.read_text("utf-8")), "utf-8")
        (ROOT / "build/site/llms.txt").write_text(llms(), "utf-8")
        for name in entries():
            if not name.startswith("api/"):
                shutil.copy(ROOT / "build/pages" / name, ROOT / "build/site" / name)
    return code


if __name__ == "__main__":
    sys.exit(build())
