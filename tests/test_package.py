"""What the package page shows: its links lead somewhere, and it says whose it is. Nothing is built, nothing fetched."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import marshal_py
from marshal_py.client.marshal import VERSION
from tests.support import lowest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = "run `uv lock`"


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The project's metadata behind its hook, which hatchling calls with the table of pyproject.toml."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = SimpleNamespace().__class__  # type: ignore[attr-defined]
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["ReadmeHook"](root=str(ROOT))
    found: dict[str, Any] = dict(PROJECT["project"])
    before = set(found)
    hook.update(found)
    assert set(found) - before == set(found["dynamic"]), "hatchling refuses anything else"
    return found


def test_every_link_of_the_page_is_absolute_and_leads_to_a_file(metadata: dict[str, Any]) -> None:
    assert metadata["readme"]["content-type"] == "text/markdown"
    links = re.findall(r"\]\(([^)]+)\)", metadata["readme"]["text"])
    assert len(links) >= 10
    here = metadata["urls"]["Source"] + "/blob/main/"
    for link in links:
        assert link.startswith("https://"), link
        if link.startswith(here):
            assert (ROOT / link.removeprefix(here).partition("#")[0]).is_file(), link


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_links_of_the_documents_lead_to_files_and_headings() -> None:
    """The same files as in the repository: there they are relative."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.is_file(), f"{page.name}: {link}"
            assert not anchor or anchor in headings(target), f"{page.name}: {link}"


def test_the_package_says_whose_it_is_and_where() -> None:
    project = PROJECT["project"]
    assert project["authors"] == [{"name": "The marshal_py authors"}]
    assert set(project["urls"]) >= {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(project["urls"]["Source"]) for url in project["urls"].values()), "one address, one change"
    first = re.fullmatch(r">=3\.(\d+)", project["requires-python"])
    assert first is not None
    minors = [int(found[1]) for one in project["classifiers"] if (found := re.search(r":: 3\.(\d+)$", one))]
    assert minors == list(range(int(first[1]), max(minors) + 1))


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["project"]["version"]
    assert marshal_py.__version__ == version
    assert f"marshal_py {version}" == VERSION
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_every_dependency_has_a_lowest_version() -> None:
    """With which `make lowest` runs the tests."""
    assert {"confluent-kafka", "typer", "pyspark"} <= lowest.lowest(PROJECT["project"]).keys()
    with pytest.raises(ValueError, match=r"no lowest version \(>=\) of rich"):
        lowest.lowest({**PROJECT["project"], "dependencies": ["rich<16"], "optional-dependencies": {}})


def locked() -> dict[str, dict[str, Any]]:
    found = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    return {package["name"]: package for package in found["package"]}


def versions(lines: list[str]) -> dict[str, SpecifierSet]:
    """By dependency and its extras, as pyproject.toml has them."""
    found = [Requirement(line) for line in lines]
    return {f"{canonicalize_name(one.name)}{sorted(one.extras)}": one.specifier for one in found}


def locked_versions(lines: list[dict[str, Any]]) -> dict[str, SpecifierSet]:
    """The same, as uv.lock has them."""
    return {f"{one['name']}{sorted(one.get('extras', []))}": SpecifierSet(one.get("specifier", "")) for one in lines}


def test_the_lock_file_is_of_this_project() -> None:
    own, project = locked()["marshal-py"], PROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    assert own["version"] == project["version"]
    assert locked_versions(own["metadata"]["requires-dist"]) == versions([*project["dependencies"], *extras]), LOCK
    groups = {name: locked_versions(lines) for name, lines in own["metadata"]["requires-dev"].items()}
    assert groups == {name: versions(lines) for name, lines in PROJECT["dependency-groups"].items()}, LOCK


def test_the_lock_file_has_what_pyproject_allows_by_its_hash() -> None:
    packages = locked()
    for requirement in lowest.requirements(PROJECT["project"]):
        version = packages[canonicalize_name(requirement.name)]["version"]
        assert requirement.specifier.contains(version), f"{requirement}: {LOCK}"
    for name, package in packages.items():
        if name != "marshal-py":
            assert package["source"] == {"registry": "https://pypi.org/simple"}, name
            files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
            assert files, name
            for file in files:
                assert file["url"].startswith("https://files.pythonhosted.org/packages/"), name
                assert re.fullmatch(r"sha256:[0-9a-f]{64}", file["hash"]), name


def test_workflows_pin_their_actions_and_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(workflows) > 1
    for workflow in workflows:
        text = workflow.read_text(encoding="utf-8")
        for action in re.findall(r"uses: *(.*)", text):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), f"{workflow.name}: {action}"
        for called in re.findall(r"run: make (.*)", text):
            assert set(called.split()) <= targets, f"{workflow.name}: make {called}"
