"""The Python blocks of a page of docs/, which tests run, and a consumer for loops that would not end."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from marshal_py import Consumer, Message

DOCS = Path(__file__).resolve().parents[2] / "docs"
DEADLINE_S = 60.0


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[str]:
    """The blocks of docs/`name`, in their order."""
    return re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)


def run(block: str, name: str, **names: Any) -> dict[str, Any]:
    """Runs a block with these names; returns them and the names that it defines."""
    exec(compile(block, f"docs/{name}", "exec"), names)
    return names


def names_of(name: str) -> dict[str, Any]:
    """Runs all blocks of a page, one after the other; returns the names that they define."""
    names: dict[str, Any] = {}
    for block in blocks(name):
        names = run(block, name, **names)
    return names


def call(program: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function of a page, or runs it to its end if it is a coroutine function."""
    running = program(*arguments)
    if inspect.iscoroutine(running):
        asyncio.run(running)


class Enough(BaseException):
    """Ends a program that would wait for more. After an Exception in its handler a consume would continue."""


class Some:
    """A consumer whose iteration ends after so many messages."""

    def __init__(self, consumer: Consumer, messages: int) -> None:
        self.consumer, self.messages = consumer, messages
        self.complete = consumer.complete

    def __iter__(self) -> Iterator[Message]:
        for _ in range(self.messages):
            message = self.consumer.next(DEADLINE_S)
            assert message is not None
            yield message
