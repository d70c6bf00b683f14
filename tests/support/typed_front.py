"""What type checkers make of the client API. `make lint` checks it with mypy; nothing here is run.

Each `type: ignore` marks a mistake that the checker must find: it reports an ignore that ignores nothing.
"""

from __future__ import annotations

from typing import Any, assert_type

from marshal_py import Batch, Consumer, ConsumerOptions, Marshal, Message, Part
from marshal_py.aio import AsyncConsumer, AsyncGroup
from marshal_py.info import GroupInfo, MemberInfo, PinInfo


def as_int(value: bytes | None, _: Any) -> int:
    return int(value or 0)


def as_text(value: bytes | None, _: Any) -> str:
    return (value or b"").decode()


def the_types_follow_the_deserializers(marshal: Marshal) -> None:
    raw = marshal.consumer("billing", ["orders"])
    assert_type(raw, Consumer[bytes | None, bytes | None])
    values = marshal.consumer("billing", ["orders"], value_deserializer=as_int, delivery="at_most_once")
    assert_type(values, Consumer[bytes | None, int])
    keys = marshal.consumer("billing", ["orders"], key_deserializer=as_text)
    assert_type(keys, Consumer[str, bytes | None])
    both = marshal.consumer("billing", ["orders"], key_deserializer=as_text, value_deserializer=as_int)
    assert_type(both, Consumer[str, int])
    batch = both.fetch(10)
    assert_type(batch, Batch[str, int])
    assert_type(batch[0], Message[str, int])
    assert_type(batch[1:], Batch[str, int])
    assert_type(batch.parts[0], Part[str, int])
    assert_type(batch.parts[0][1:], Part[str, int])
    assert_type(batch.parts[0].values, list[int])
    assert_type(batch.parts[0].keys, list[str])
    for message in both:
        assert_type(message.key, str)
        assert_type(message.value, int)
    last = both.next()
    assert_type(last, Message[str, int] | None)


def a_message_without_types_is_any_message(marshal: Marshal) -> None:
    def handle(message: Message) -> None:
        assert_type(message.value, Any)

    for message in marshal.consumer("billing", ["orders"], value_deserializer=as_int):
        handle(message)


def values_of_a_narrower_type_fit(message: Message[str, bool]) -> Message[str | None, int]:
    return message


def a_kind_of_event_that_does_not_exist_is_found(consumer: Consumer) -> list[str]:
    return [event.text for event in consumer.events() if event.kind == "claimd"]  # type: ignore[comparison-overlap]


def handlers_of_asyncio_are_coroutine_functions_or_plain_ones(consumer: AsyncConsumer[str, int]) -> None:
    async def wait(message: Message[str, int]) -> None: ...

    def work(message: Message[str, int]) -> bool:
        return message.ack()

    for handler in (wait, work):
        consumer.consume(handler)
    consumer.consume("work")  # type: ignore[arg-type]


async def what_tells_about_a_group_has_types(group: AsyncGroup) -> None:
    info = await group.info()
    assert_type(info, GroupInfo)
    assert_type(info.members, tuple[MemberInfo, ...])
    assert_type(await group.members(), tuple[MemberInfo, ...])
    assert_type(await group.pin_info(), PinInfo)
    info["policy"]  # type: ignore[index]


def options_are_checked(marshal: Marshal) -> None:
    chosen = ConsumerOptions(delivery="at_most_once", value_deserializer=as_int)
    assert_type(marshal.consumer("billing", ["orders"], options=chosen, capacity=2), Consumer[Any, Any])
    marshal.consumer("billing", ["orders"], prefetch_message=5)  # type: ignore[call-overload]
    marshal.consumer("billing", ["orders"], delivery="exactly_once")  # type: ignore[call-overload]
    marshal.consumer("billing", ["orders"], capacity="2")  # type: ignore[call-overload]
    marshal.planner("billing", ["orders"], capacity="2")  # type: ignore[arg-type]
