"""The public names: what `marshal_py.__all__` promises is there, and nothing is promised twice."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pydoc
import typing
from importlib import resources
from typing import Any

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


def test_the_package_is_marked_as_typed() -> None:
    assert resources.files(marshal_py).joinpath("py.typed").is_file()


# --- types can be resolved at run time, as `inspect`, `help`, documentation tools and containers do

PUBLIC_MODULES = ("marshal_py", "marshal_py.embedded", "marshal_py.errors", "marshal_py.metrics", "marshal_py.spark")


def public_objects() -> dict[str, Any]:
    """Classes and functions of the public names, and classes of ours in their signatures, such as Part and Planner."""
    found: dict[str, Any] = {}
    waiting = [value for name in PUBLIC_MODULES for value in vars(importlib.import_module(name)).values()]
    while waiting:
        one = waiting.pop()
        home = getattr(one, "__module__", None) or ""
        if not (inspect.isclass(one) or inspect.isfunction(one)) or home.partition(".")[0] != "marshal_py":
            continue
        name = f"{home}.{one.__qualname__}"
        if name not in found:
            found[name] = one
            with contextlib.suppress(NameError):  # the test below finds it
                hints = [typing.get_type_hints(call).get("return") for call in calls_of(one)]
                if inspect.isclass(one):
                    hints += [hint for field, hint in typing.get_type_hints(one).items() if not field.startswith("_")]
                waiting += [part for hint in hints for part in classes_in(hint)]
    return dict(sorted(found.items()))


def calls_of(one: Any) -> list[Any]:
    if not inspect.isclass(one):
        return [one]
    values = [
        getattr(value, "fget", None) or getattr(value, "__func__", value)
        for name, value in vars(one).items()
        if not name.startswith("_")
    ]
    return [value for value in values if inspect.isfunction(value)]


def classes_in(hint: Any) -> list[Any]:
    """The classes that a type is made of: of `Iterator[Message] | None` Message."""
    return [hint] if inspect.isclass(hint) else [part for arg in typing.get_args(hint) for part in classes_in(arg)]


@pytest.mark.parametrize("name", public_objects())
def test_the_types_of_public_names_can_be_resolved(name: str) -> None:
    one = public_objects()[name]
    for asked in (one, *calls_of(one)):
        typing.get_type_hints(asked)
        if not (inspect.isclass(asked) and issubclass(asked, BaseException) and "__init__" not in vars(asked)):
            inspect.signature(asked)
    assert pydoc.render_doc(one)


def test_classes_in_public_signatures_are_checked_too() -> None:
    """Otherwise the test above would miss classes without a public name."""
    assert {"marshal_py.client.message.Part", "marshal_py.client.planner.ClaimedBatch"} <= public_objects().keys()
