"""The site: every page has its place, every link leads to one, and `make proof` builds all of it."""

from __future__ import annotations

import html
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Final

import pytest

import marshal_py
from marshal_py import MarshalError, errors

ROOT: Final = Path(__file__).resolve().parents[1]
SITE_BYTES_MAX: Final = 5_000_000
LINK: Final = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(#[^)\s]*)?\)")
CODE: Final = re.compile(r"^ *```.*?^ *```|``.+?``|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "docs"))


site, sequence = load("site_build"), load("sequence")


def public_modules() -> list[ModuleType]:
    """Those directly in marshal_py with `__all__`; and errors, all of whose errors are public."""
    names = [f"marshal_py.{module.name}" for module in pkgutil.iter_modules(marshal_py.__path__)]
    modules = map(importlib.import_module, ["marshal_py", *names])
    return [module for module in modules if module is errors or hasattr(module, "__all__")]


def pages() -> list[str]:
    return [*site.COPIED, *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {
        "#" + re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", one).lower()).replace(" ", "-")
        for one in titles
    }


def test_the_navigation_has_every_page() -> None:
    api = {f"api/{module.__name__}.md" for module in public_modules()}
    assert set(site.entries()) == {*pages(), *api}


@pytest.mark.parametrize("name", pages())
def test_each_link_leads_to_a_page_and_its_heading(name: str) -> None:
    page = ROOT / name
    for target, anchor in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), f"{name}: {target}"
        if file.suffix == ".md":
            assert str(file.relative_to(ROOT)) in pages(), f"{name}: the site has no {target}"
            assert not anchor or anchor in anchors(file.read_text("utf-8")), f"{name}: {target}{anchor}"
        else:
            there = str(file.relative_to(ROOT))
            assert there in site.FILES or there.startswith("docs/"), f"{name}: the site has no {target}"


def test_llms_lists_every_page() -> None:
    text = site.llms()
    assert [page for page in site.entries() if page.replace(".md", "") not in text] == []


def test_a_sequence_diagram_is_drawn() -> None:
    lines = ["sequenceDiagram", "participant A as one", "participant B as two", "A->>B: <hello>", "Note over A: waits"]
    picture = sequence.drawn("\n".join(lines))
    assert picture.count("<text") == 4
    assert "&lt;hello&gt;" in picture
    with pytest.raises(ValueError, match="loop"):
        sequence.drawn("sequenceDiagram\nloop")


@pytest.mark.proof
def test_the_site_is_built_and_has_every_public_name() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs/site_build.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = ROOT / "build/site"
    assert sum(file.stat().st_size for file in built.rglob("*") if file.is_file()) <= SITE_BYTES_MAX
    for module in public_modules():
        page = html.unescape((built / "api" / module.__name__ / "index.html").read_text("utf-8"))
        names = getattr(module, "__all__", None) or [
            name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, MarshalError)
        ]
        kinds = (type, FunctionType)  # a type of words, as AdvisoryKind is, has no text
        names = [name for name in names if isinstance(getattr(module, name), kinds)]
        assert [name for name in names if not re.search(rf'id="marshal_py[\w.]*\.{name}"', page)] == [], module
    assert all((built / name).read_bytes() == (ROOT / name).read_bytes() for name in site.FILES)
    front = (built / "api/marshal_py/index.html").read_text("utf-8")
    assert all(f'id="marshal_py.{name}"' in front for name in ("connect", "Consumer.fetch"))
    assert "Marks the message as done" in front
    pages_built = [page for page in built.rglob("*.html") if '<script src="http' in page.read_text("utf-8")]
    assert pages_built == [], "nothing is loaded from elsewhere"
