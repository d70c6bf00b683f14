"""The README as the package page shows it: there a link into this repository is dead unless it is absolute.

Run by hatchling when it builds (pyproject.toml, tool.hatch.metadata.hooks). The README itself keeps relative links,
which work wherever the repository is looked at. Where it is to be found stands in pyproject.toml alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")


def absolute(readme: str, source: str) -> str:
    """The text with each link to a file of this repository as one to `source`, the repository's address."""
    return RELATIVE.sub(lambda link: f"]({source.rstrip('/')}/blob/main/{link[1]})", readme)


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, metadata["urls"]["Source"])}
