"""Prints the lowest version of each dependency that pyproject.toml allows, as constraints of pip (`make lowest`).

Of the library and its extras alone: the tools of the tests are those of the day.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def requirements(project: dict[str, Any]) -> Iterator[Requirement]:
    """Yields each dependency of the library and of its extras, without its own extras."""
    for line in (
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ):
        found = Requirement(line)
        if found.name != project["name"]:
            yield found


def lowest(project: dict[str, Any]) -> dict[str, str]:
    """The lowest version of each dependency. Raises ValueError for a dependency that does not say one."""
    versions: dict[str, str] = {}
    for requirement in requirements(project):
        bounds = [one.version for one in requirement.specifier if one.operator == ">="]
        if bounds:
            versions[requirement.name] = bounds[0]
    missing = {one.name for one in requirements(project)} - versions.keys()
    if missing:
        raise ValueError(f"pyproject.toml: no lowest version (>=) of {', '.join(sorted(missing))}")
    return versions


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, version in lowest(project).items():
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
