"""Handlers for worker processes (`process(executor="processes")`), which import this file alone."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from marshal_py import Reject, Retry
from marshal_py.info import PlainMessage

FOLDER = "MARSHAL_TEST_FOLDER"  # names where handlers leave what their tests look at
KILLED = "killed"  # a file there: the first worker process that imports this one is killed

if parent_process() is not None and (killed := Path(os.environ.get(FOLDER, "/none")) / KILLED).exists():
    killed.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


class TwoParts(Exception):
    """Cannot be made again from what it tells: pickle has one argument for it."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} {why}")


def note(message: PlainMessage[Any, Any]) -> None:
    """Leaves a line with the process and the message."""
    line = f"{os.getpid()} {message.partition} {message.offset} {message.delivery_count}\n"
    with (Path(os.environ[FOLDER]) / "lines").open("a", encoding="utf-8") as file:
        file.write(line)


def tell(message: PlainMessage[Any, Any]) -> None:
    """Leaves what the message holds."""
    held = message.topic, message.partition, message.offset, message.key, message.value, message.headers
    text = repr((*held, message.delivery_count, message.idempotency_key, str(message.token)))
    (Path(os.environ[FOLDER]) / "told").write_text(text, encoding="utf-8")


def outcomes(message: PlainMessage[Any, Any]) -> None:
    """Answers in each way at the first delivery."""
    note(message)
    if message.delivery_count > 1:
        return
    if message.offset == 1:
        raise Reject("no amount")
    if message.offset == 2:
        raise Retry(after_s=0)
    if message.offset == 3:
        raise ValueError("once")
    if message.offset == 4:
        raise TwoParts("cannot", "travel")


def dies(message: PlainMessage[Any, Any]) -> None:
    """Kills its process at the first delivery of each third message."""
    note(message)
    if message.offset % 3 == 0 and message.delivery_count == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hangs(message: PlainMessage[Any, Any]) -> None:
    """Never returns from the first delivery of the first message."""
    note(message)
    if message.offset == 0 and message.delivery_count == 1:
        time.sleep(3_600)


def bug(message: PlainMessage[Any, Any]) -> None:
    raise KeyError("a bug")


def untellable(message: PlainMessage[Any, Any]) -> None:
    raise TwoParts("cannot", "travel")


def each(messages: list[PlainMessage[Any, Any]]) -> list[BaseException | None]:
    """Fails once with each fifth message."""
    for message in messages:
        note(message)
    return [ValueError() if one.offset % 5 == 0 and one.delivery_count == 1 else None for one in messages]


def no_list(messages: list[PlainMessage[Any, Any]]) -> Any:
    return lambda: None
