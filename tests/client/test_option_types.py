"""Each option of a consumer refuses a value of a wrong type when it is given, and not later, inside the consumer."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

from marshal_py import ConsumerOptions, GroupConfig, InvalidOption, connect
from marshal_py.client.values.options import CALLABLES
from tests.support.client_fixtures import MemoryTestCluster


async def coroutine(*_: object) -> None:
    """Nobody awaits what a callback returns, so it would never run."""


async def generator(*_: object) -> AsyncIterator[None]:
    yield


class Awaited:
    async def __call__(self, *_: object) -> None: ...


NUMBERS = ("5", None, [5], True, 1j, float("nan"))
TEXTS = (5, b"earliest", ["earliest"], {"a": 1}, object())
OPTIONAL_NUMBERS = tuple(value for value in NUMBERS if value is not None)
# What each option is not. Only values whose type is wrong; the tests of the options have those out of bounds.
WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        CALLABLES,
        (3, "print", True, [print], coroutine, generator, Awaited(), Awaited().__call__, functools.partial(coroutine)),
    ),
    "fast_reclaim": ("no", 1, 0, None, []),
    **dict.fromkeys(("delivery", "on_topic_recreated"), (*TEXTS, None)),
    "start": (-1, True, *TEXTS[1:], None),  # an int is an offset
    **dict.fromkeys(("policy", "member", "priority_group", "dead_letter_topic"), TEXTS),
    "group_config": ({"a": 1}, "balanced", 3, GroupConfig),
    **dict.fromkeys(("heartbeat_interval_s", "handler_timeout_s"), NUMBERS),
    **dict.fromkeys(("capacity", "priority", "prefetch_bytes"), NUMBERS),
    "hand_over_timeout_s": OPTIONAL_NUMBERS,
    "release_behind_s": OPTIONAL_NUMBERS,
    "max_claims": OPTIONAL_NUMBERS,
    **dict.fromkeys(("min_pending", "min_ack_pending"), OPTIONAL_NUMBERS),
    "max_deliver": OPTIONAL_NUMBERS,
    "max_acks_pending": OPTIONAL_NUMBERS,
    "settings": (None, 3, "a=b", [("a", "b")], {1: "b"}),
}


def test_the_table_has_every_option() -> None:
    assert {field.name for field in dataclasses.fields(ConsumerOptions)} == WRONG.keys()


@pytest.mark.parametrize("option", WRONG)
def test_a_value_of_a_wrong_type_is_refused_by_name(option: str) -> None:
    others = {"dead_letter_topic": "letters"} if option == "max_deliver" else {}
    for value in WRONG[option]:
        with pytest.raises(InvalidOption) as caught:
            ConsumerOptions(**{option: value}, **others)
        named = caught.value.option if isinstance(caught.value, InvalidOption) else caught.value.kind
        assert named in (option, "topic"), f"{option}={value!r}"


@pytest.mark.parametrize("wrong", [3, "m1", [3], ["m1", None], True, b"m1"])
@pytest.mark.parametrize("setting", ["members", "priority_groups", "mappings"])
def test_a_group_setting_of_a_wrong_type_is_refused_by_name(setting: str, wrong: Any) -> None:
    with pytest.raises(InvalidOption, match=f"^{setting}="):
        GroupConfig(**{setting: wrong})


@pytest.mark.parametrize("wrong", [{3: [0]}, {None: [0]}, ["m1"]])
def test_mappings_are_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^mappings=.*of each member by its name"):
        GroupConfig(mappings=wrong)


@pytest.mark.parametrize("wrong", [None, 3, "orders", [3], []])
def test_topics_of_a_wrong_type_are_refused_by_name(memory: MemoryTestCluster, wrong: Any) -> None:
    with memory.connect() as marshal, pytest.raises(InvalidOption, match=r"^topic"):
        marshal.consumer(memory.group(), wrong)


@pytest.mark.parametrize("wrong", ["a", None, True, 0, -1.0, float("nan")])
def test_a_timeout_of_a_wrong_type_or_size_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^timeout_s=.*a number of seconds, more than 0"):
        connect("127.0.0.1:1", timeout_s=wrong)


@pytest.mark.parametrize("wrong", ["", "a b", None, 3])
def test_a_topic_to_look_into_has_a_name_that_kafka_takes(memory: MemoryTestCluster, wrong: Any) -> None:
    with memory.connect() as marshal, pytest.raises(InvalidOption, match=r"^topic="):
        marshal.topic(wrong)


def test_the_consumer_refuses_it_before_it_joins(memory: MemoryTestCluster) -> None:
    with memory.connect() as marshal:
        for wrong in ({"on_claim": 3}, {"fast_reclaim": "no"}, {"group_config": {"a": 1}}):
            with pytest.raises(InvalidOption, match=next(iter(wrong))):
                marshal.consumer(memory.group(), [memory.topic()], **wrong)  # type: ignore[call-overload]
    with pytest.raises(InvalidOption, match="a GroupConfig"):
        ConsumerOptions(group_config={"a": 1})  # type: ignore[arg-type]


def test_a_coroutine_function_is_told_what_to_do_instead() -> None:
    with pytest.raises(InvalidOption, match=r"on_claim=.*nobody awaits.*run_coroutine_threadsafe"):
        ConsumerOptions(on_claim=coroutine)  # type: ignore[arg-type]


def test_an_unknown_name_gets_the_nearest_option() -> None:
    with pytest.raises(InvalidOption, match=r"ConsumerOptions\(\)=.*did you mean delivery\?"):
        ConsumerOptions(delivry="at_most_once")  # type: ignore[call-arg]
    with pytest.raises(InvalidOption, match=r"did you mean delivery\?"):
        dataclasses.replace(ConsumerOptions(), delivry="at_most_once")  # type: ignore[call-arg]


def test_options_are_still_a_dataclass() -> None:
    options = ConsumerOptions(delivery="at_most_once")
    assert "delivery" in inspect.signature(ConsumerOptions).parameters
    assert copy.copy(options) == options == pickle.loads(pickle.dumps(options))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.delivery = "at_least_once"  # type: ignore[misc]
