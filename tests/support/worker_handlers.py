"""Handlers for worker processes (`process(executor="processes")`), which import this file alone."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from marshal_py import Reject, Retry
from marshal_py.info import PlainMessage

FOLDER = "MARSHAL_TEST_FOLDER"  # names where handlers leave what their tests look at
KILLED = "killed"  # a file there, with a number: so many worker processes that import this one are killed
HELD = "held"  # a file there: a worker process that imports this one leaves its number there, and waits until it goes
GO = "go"  # a file there: `waits` returns

if parent_process() is not None:
    place = Path(os.environ.get(FOLDER, "/none"))
    if (killed := place / KILLED).exists():
        left = int(killed.read_text(encoding="utf-8")) - 1
        killed.write_text(str(left), encoding="utf-8") if left else killed.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if (held := place / HELD).exists():
        held.write_text(f"{os.getpid()}\n", encoding="utf-8")
        while held.exists():
            time.sleep(0.01)


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


def waits(message: PlainMessage[Any, Any]) -> None:
    """Returns once it may."""
    note(message)
    while not (Path(os.environ[FOLDER]) / GO).exists():
        time.sleep(0.01)


def dies_and_holds(message: PlainMessage[Any, Any]) -> None:
    """Kills its process, and has none begin after it."""
    note(message)
    (Path(os.environ[FOLDER]) / HELD).touch()
    os.kill(os.getpid(), signal.SIGKILL)


class BadOrder(Reject):
    """Cannot be made again from what it tells."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"{number}: {why}")


class Later(Retry):
    def __init__(self) -> None:
        super().__init__(after_s=0.0)


class Busy(TwoParts):
    """An error that `retry_on` names, and which cannot be sent."""


ANSWERS = BadOrder(0, "no"), Later(), Busy("is", "busy")


def own_classes(message: PlainMessage[Any, Any]) -> None:
    """Raises errors of classes of its own at the first delivery."""
    if message.delivery_count == 1:
        raise ANSWERS[message.offset]


def own_classes_in_lists(messages: list[PlainMessage[Any, Any]]) -> deque[BaseException | None]:
    """Returns them."""
    return deque(ANSWERS[one.offset] if one.delivery_count == 1 else None for one in messages)


def unnamed_in_lists(messages: list[PlainMessage[Any, Any]]) -> list[BaseException]:
    """Fails with what `retry_on` does not name, and which cannot be sent."""
    return [TwoParts("cannot", "travel") for _ in messages]


def only_in_the_program() -> Any:
    raise LookupError("not here")


class OnlyInTheProgram:
    """A value which can be pickled, but not unpickled in a worker process."""

    def __reduce__(self) -> Any:
        return only_in_the_program, ()


def made(kind: str) -> Any:
    if parent_process() is None:
        raise LookupError("not in the program")
    return OnlyInTheWorker(kind)


class OnlyInTheWorker(Exception):
    def __reduce__(self) -> Any:
        return made, ("of this process",)


def unreadable(message: PlainMessage[Any, Any]) -> None:
    raise OnlyInTheWorker("of this process")


@dataclass(frozen=True)
class Frozen(Exception):
    """Takes no notes."""


def frozen(message: PlainMessage[Any, Any]) -> None:
    raise Frozen


def generator(message: PlainMessage[Any, Any]) -> Any:
    return (one for one in ())


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
