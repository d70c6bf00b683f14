"""The options of a consumer as keywords: every signature names them, a typo gets the nearest, a value replaces one."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable

import pytest

from marshal_py import ConsumerOptions, GetRequest, GroupConfig, InvalidOption, Marshal, aio, connect
from marshal_py.client.values.options import ConsumerKeywords, chosen
from marshal_py.embedded import Broker, LogGuard
from marshal_py.sql import AsyncGuard, Guard
from tests.support.client_fixtures import MemoryTestCluster, joined

DESERIALIZERS = {"key_deserializer", "value_deserializer"}  # not among ConsumerKeywords: overloads name them


def test_checkers_know_the_same_options_as_the_program() -> None:
    fields = typing.get_type_hints(ConsumerOptions)
    assert typing.get_type_hints(ConsumerKeywords) == {
        name: fields[name] for name in fields if name not in DESERIALIZERS
    }


@pytest.mark.parametrize("call", [Marshal.consumer, Marshal.planner])
def test_a_signature_names_every_option_with_its_default(call: object) -> None:
    assert callable(call)
    parameters = inspect.signature(call).parameters
    for field in dataclasses.fields(ConsumerOptions):
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[field.name].default == getattr(ConsumerOptions(), field.name)
    assert {"self", "group", "topics", "options"} == parameters.keys() - ConsumerOptions.__dataclass_fields__.keys()


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ("prefetch_byte", "no option is called prefetch_byte; did you mean prefetch_bytes?"),
        ("heartbeat_interval", "did you mean heartbeat_interval_s?"),
        ("on_claimed", "did you mean on_claim?"),
        ("client_id", "an argument of connect"),
        ("fetch.min.bytes", "settings={'fetch.min.bytes': ...}"),
        ("xyzzy", "no option is called xyzzy"),
    ],
)
def test_an_unknown_name_gets_the_nearest_option(wrong: str, advice: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        chosen("consumer", None, {wrong: 1})
    assert advice in str(caught.value)
    assert "consumer()" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "name", "near"),
    [
        (Guard, "tabel", "table"),
        (AsyncGuard, "tabel", "table"),
        (GroupConfig, "polcy", "policy"),
        (ConsumerOptions, "delivry", "delivery"),
        (GetRequest, "ofset", "offset"),
        (Broker, "topic", "topics"),
        (LogGuard, "limit", "limit_bytes"),
        (lambda **named: connect("nowhere:1", **named), "coordination_topc", "coordination_topic"),
        (lambda **named: aio.connect("nowhere:1", **named), "client", "client_id"),
    ],
)
def test_so_does_whatever_is_made(call: Callable[..., object], name: str, near: str) -> None:
    """What users construct takes names that are easily mistyped, and Python 3.11 names no nearest one."""
    with pytest.raises(InvalidOption, match=rf"^\w+\(\)=\['{name}'\].*; did you mean {near}\?") as caught:
        call(**{name: 1})
    if isinstance(call, type):
        assert caught.value.option == f"{call.__name__}()"
        assert near in inspect.signature(call).parameters


def test_options_are_given_as_a_value_and_single_ones_replace_its_fields(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(2), memory.group()
    options = ConsumerOptions(delivery="at_most_once", heartbeat_interval_s=1.0, start="earliest", max_claims=1)
    with memory.connect() as marshal:
        with marshal.consumer(group, [topic], options=options) as consumer:
            assert consumer.info().delivery == "at_most_once"
        with marshal.planner(group, [topic], options=options, max_claims=None) as planner:
            assert planner.info().delivery == "at_most_once"
    assert chosen("consumer", options, {"max_claims": None}) == dataclasses.replace(options, max_claims=None)
    assert chosen("consumer", options, {}) == options
    assert chosen("consumer", None, {}) == ConsumerOptions()


def test_options_of_another_kind_are_refused(memory: MemoryTestCluster) -> None:
    with memory.connect() as marshal, pytest.raises(InvalidOption, match="a ConsumerOptions"):
        joined(marshal, memory.group(), [memory.topic()], options={"capacity": 2})


def test_the_table_of_options_names_each_with_its_default() -> None:
    """And there are no more of them than a reader can take in."""
    shown_table = inspect.getdoc(ConsumerOptions) or ""
    rows = re.findall(r"^ *(\w+) +(None|[\d,.]+(?: MiB)?|True|False|\{\}|[a-z_]+)(?=[\s:,(])", shown_table, re.M)
    table = {name: default.rstrip(",") for name, default in rows if name in ConsumerOptions.__dataclass_fields__}
    assert list(table) == list(ConsumerOptions.__dataclass_fields__), "in the order of the fields"
    options = ConsumerOptions()
    for name, default in table.items():
        value = getattr(options, name)
        shown = f"{value // 2**20} MiB" if name == "prefetch_bytes" else f"{value:g}" if type(value) is float else value
        assert str(shown) == default, name
    assert len(table) <= 29
