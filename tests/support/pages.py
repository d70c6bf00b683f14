"""The Python blocks of the README and of docs/, which tests run, and ways to end loops that would not end."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from marshal_py import Consumer, Message

ROOT: Final = Path(__file__).resolve().parents[2]
BLOCK: Final = re.compile(r"^ *```python\b[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
DEADLINE_S: Final = 60.0


def pages() -> list[str]:
    """The README and the pages of docs/, as `page` takes them."""
    return ["README.md", *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """What is below `## heading`, up to the next one of its kind."""
    found = page(name).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert found, f"{name} has no section {heading}"
    return found


def blocks(name: str) -> list[str]:
    """The Python blocks of a page, in their order (in a list they are indented), or all of a program."""
    if name.endswith(".py"):
        return [page(name)]
    return [textwrap.dedent(block) for block in BLOCK.findall(page(name))]


def run(block: str, name: str, **names: Any) -> dict[str, Any]:
    """Runs a block with these names; returns them and the names that it defines."""
    exec(compile(block, name, "exec"), names)
    return names


async def run_awaiting(block: str, name: str, **names: Any) -> None:
    """Runs a block that awaits outside of functions."""
    await eval(compile(block, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)


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


class Stop:
    """Asks for a stop once so many calls have been counted."""

    def __init__(self, consumer: Any, calls: int) -> None:
        self.consumer, self.left, self.lock = consumer, calls, threading.Lock()

    def count(self) -> None:
        with self.lock:
            self.left -= 1
            if not self.left:
                self.consumer._ending.request_stop()
