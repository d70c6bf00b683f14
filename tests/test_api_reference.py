"""The API reference has every public name, with the text of its docstring."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "api_reference.py"


pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each page, by the name of its module. Built by a process of its own, as `make api` does."""
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("api"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [Path(line) for line in done.stdout.splitlines()]
    return dict(zip((module.__name__ for module in script.public_modules()), map(Path.read_text, found), strict=True))


def test_every_public_module_has_a_page(pages: dict[str, str]) -> None:
    assert pages.keys() >= {
        *("marshal_py", "marshal_py.aio", "marshal_py.embedded", "marshal_py.errors", "marshal_py.info"),
        *("marshal_py.metrics", "marshal_py.otel", "marshal_py.spark", "marshal_py.sql", "marshal_py.testing"),
    }


def test_every_public_name_is_there_and_says_what_it_is(script: ModuleType, pages: dict[str, str]) -> None:
    for module in script.public_modules():
        for name in script.public_names(module):
            assert f'id="{name}"' in pages[module.__name__], f"{module.__name__}.{name}"
            one = getattr(module, name)
            if inspect.isclass(one) or inspect.isfunction(one):
                assert inspect.getdoc(one), f"{module.__name__}.{name} has no docstring"


def test_methods_are_shown_with_their_text(pages: dict[str, str]) -> None:
    assert 'id="Consumer.fetch"' in pages["marshal_py"]
    assert "Marks the message as done" in pages["marshal_py"]
