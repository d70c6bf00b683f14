"""The public names: what `marshal_py.__all__` promises is there, and nothing is promised twice."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import itertools
import pydoc
import subprocess
import sys
import typing
from importlib import resources
from types import ModuleType
from typing import Any

import msgspec
import pytest

import marshal_py
from marshal_py import Advisory, MarshalError, errors, info, metrics
from marshal_py.topics.key_index import Status


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

PUBLIC_MODULES = (
    *(
        "marshal_py",
        "marshal_py.aio",
        "marshal_py.embedded",
        "marshal_py.errors",
        "marshal_py.info",
        "marshal_py.metrics",
        "marshal_py.otel",
        "marshal_py.sql",
    ),
    "marshal_py.testing",
)


def public_objects(*modules: str) -> dict[str, Any]:
    """Classes and functions of the public names, and classes of ours in their signatures, such as Part and Planner."""
    found: dict[str, Any] = {}
    waiting = [value for name in modules for value in values_of(importlib.import_module(name))]
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
                    hints += one.__bases__  # Marshal has `planner` from its base class
                waiting += [part for hint in hints for part in classes_in(hint)]
    return dict(sorted(found.items()))


def values_of(module: ModuleType) -> list[Any]:
    """The values of the public names; of marshal_py.errors, which has no list of them, all names."""
    return [getattr(module, name) for name in getattr(module, "__all__", vars(module))]


def calls_of(one: Any) -> list[Any]:
    if not inspect.isclass(one):
        return [one]
    values = [
        getattr(value, "fget", None) or getattr(value, "__func__", value)
        for name, value in vars(one).items()
        if not name.startswith("_") or name in ("__init__", "__iter__", "__next__", "__getitem__", "__enter__")
    ]
    return [value for value in values if inspect.isfunction(value)]


def classes_in(hint: Any) -> list[Any]:
    """The classes that a type is made of: of `Iterator[Message[K, V]] | None` Iterator and Message."""
    if inspect.isclass(hint):
        return [hint]
    inner = [typing.get_origin(hint), *typing.get_args(hint)] if typing.get_args(hint) else []
    return [part for arg in inner for part in classes_in(arg)]


OBJECTS = public_objects(*PUBLIC_MODULES)


@pytest.mark.parametrize("name", OBJECTS)
def test_the_types_of_public_names_can_be_resolved(name: str) -> None:
    check_types(OBJECTS[name])


def test_the_types_of_the_names_for_spark_can_be_resolved() -> None:
    """One test, because importing Spark takes a second, which collecting the tests must not wait for."""
    found = public_objects("marshal_py.spark")
    assert {"marshal_py.spark.stream.batches.claimed_batches", "marshal_py.spark.stream.batches.Batch"} <= found.keys()
    for one in found.values():
        check_types(one)


def check_types(one: Any) -> None:
    for asked in (one, *calls_of(one)):
        typing.get_type_hints(asked)
        if not (inspect.isclass(asked) and issubclass(asked, BaseException) and "__init__" not in vars(asked)):
            inspect.signature(asked)
    assert pydoc.render_doc(one)


def test_classes_in_public_signatures_are_checked_too() -> None:
    """Otherwise the test above would miss classes without a public name."""
    assert {"marshal_py.client.messages.message.Part", "marshal_py.client.planner.ClaimedBatch"} <= OBJECTS.keys()


NAMES_MAX = 45  # what a newcomer reads through; what only some programs need has a module of its own


def test_the_top_level_is_small() -> None:
    assert len(marshal_py.__all__) <= NAMES_MAX


def test_the_errors_at_the_top_are_those_that_programs_catch() -> None:
    """The roots and the errors that examples, guides and tests catch. Every error is in marshal_py.errors."""
    ours = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, MarshalError)}
    assert len(ours) > 50
    at_the_top = {name for name in marshal_py.__all__ if getattr(marshal_py, name) in vars(errors).values()}
    assert at_the_top < ours
    assert {"MarshalError", "CallerError", "PeerError", "ClusterError", "CoordinationError"} <= at_the_top


def test_the_names_that_are_imported_late_are_those_that_type_checkers_see() -> None:
    """Of the top level; with the errors, which are imported at once, they are all public names."""
    tree = ast.parse(inspect.getsource(marshal_py))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {name.name: line.module for line in typed.body if isinstance(line, ast.ImportFrom) for name in line.names}
    assert seen == marshal_py._FILES
    assert {*seen, "__version__"} | (vars(errors).keys() & set(marshal_py.__all__)) == set(marshal_py.__all__)


def test_importing_the_package_imports_little() -> None:
    """Spark's workers and the command line import this package, and need neither the client nor asyncio for that."""
    look = "import sys, marshal_py; print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert [name for name in found if name.startswith("marshal_py")] == ["marshal_py", "marshal_py.errors"]
    assert not {"confluent_kafka", "asyncio", "msgspec"} & set(found)


def test_names_are_listed_before_they_are_used() -> None:
    """`dir` and completion show them; an unknown name is refused as in any module."""
    assert set(marshal_py.__all__) <= set(dir(marshal_py))
    with pytest.raises(AttributeError, match="no attribute 'Consumers'"):
        marshal_py.Consumers  # noqa: B018


def test_nothing_has_two_public_names() -> None:
    """A class is at the top or in the module for its kind, so that one import is the usual one (the errors apart)."""
    homes = {
        name: {getattr(module, public) for public in module.__all__ if public != "__version__"}
        for name in (
            "marshal_py",
            "marshal_py.aio",
            "marshal_py.info",
            "marshal_py.metrics",
            "marshal_py.otel",
            "marshal_py.sql",
        )
        for module in [importlib.import_module(name)]
    }
    for one, other in itertools.combinations(homes, 2):
        assert homes[one].isdisjoint(homes[other]), (one, other)


NO_STATES = {"EndOfBatch", "StoredBatch", "Moved", "Paused"}  # messages, and the outcome of an operation
STATES = (
    *(Advisory, Status, metrics.Metrics, metrics.ConsumerMetrics, metrics.PartitionMetrics),
    *(getattr(info, name) for name in info.__all__ if name not in NO_STATES),
)


@pytest.mark.parametrize("kind", STATES)
def test_what_tells_about_a_state_is_one_kind_of_value(kind: type) -> None:
    """A frozen Struct: compared by value, and extendable, because nobody can unpack or count its fields."""
    assert issubclass(kind, msgspec.Struct)
    assert kind.__struct_config__.frozen
