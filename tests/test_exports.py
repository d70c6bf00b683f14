"""The public names: what `marshal_py.__all__` promises is there, and nothing is promised twice."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pydoc
import typing
from importlib import resources
from types import ModuleType
from typing import Any

import msgspec
import pytest

import marshal_py
from marshal_py import Advisory, ClaimInfo, ConsumerInfo, MarshalError, MarshalInfo, errors, metrics
from marshal_py.admin.views import group_info
from marshal_py.topics.key_index import Status
from marshal_py.topics.purging import TopicInfo
from marshal_py.transport.ports import BrokerInfo


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
        "marshal_py.metrics",
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


def test_every_error_can_be_imported_from_the_package() -> None:
    ours = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, MarshalError)}
    assert len(ours) > 70
    assert ours <= set(marshal_py.__all__)


STATES = (
    *(Advisory, ClaimInfo, ConsumerInfo, MarshalInfo, BrokerInfo, TopicInfo, Status),
    *(metrics.Metrics, metrics.ConsumerMetrics, metrics.PartitionMetrics),
    *(group_info.GroupInfo, group_info.MemberInfo, group_info.MemberState, group_info.PauseInfo, group_info.PinInfo),
    *(group_info.PositionInfo, group_info.PriorityGroupState, group_info.SettingsOrigin),
)


@pytest.mark.parametrize("kind", STATES)
def test_what_tells_about_a_state_is_one_kind_of_value(kind: type) -> None:
    """A frozen Struct: compared by value, and extendable, because nobody can unpack or count its fields."""
    assert issubclass(kind, msgspec.Struct)
    assert kind.__struct_config__.frozen
