"""The public names: what `marshal_py.__all__` promises is there, and nothing is promised twice."""

from __future__ import annotations

from importlib import resources

import pytest

import marshal_py


@pytest.mark.parametrize("name", marshal_py.__all__)
def test_an_exported_name_exists(name: str) -> None:
    assert hasattr(marshal_py, name)


def test_exports_are_sorted_and_named_once() -> None:
    """Plain code point order, so that a name has one place and a merge shows what came in."""
    assert list(marshal_py.__all__) == sorted(set(marshal_py.__all__))


def test_no_export_is_private() -> None:
    assert [name for name in marshal_py.__all__ if name.startswith("_") and name != "__version__"] == []


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files(marshal_py).joinpath("py.typed").is_file()
