"""What `process` was asked for, checked, and what it tells of itself."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypedDict

from marshal_py.client.messages.message import Message
from marshal_py.client.receive.consuming import AWAIT_IT
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.client.values.requests import check_timeout
from marshal_py.client.values.retry import DELIVERIES, AfterDeadLetter, Order, Retry, Unkeyed
from marshal_py.errors import InvalidOption, NeedsAtLeastOnce
from marshal_py.protocol.wire.progress import BITMAP_OFFSETS_MAX
from marshal_py.transport.serialization import K_co, V_co, check_plain

WINDOW: Final = BITMAP_OFFSETS_MAX  # then the log can name all that is finished (E10)
WINDOW_MAX: Final = 100_000
WORKERS: Final = 16  # threads, by default
WORKERS_MAX: Final = 10_000
BATCH_MAX: Final = 10_000  # messages: more take longer to handle than to fetch
BATCH_WAIT_S: Final = 0.1
TIMEOUT_S_MAX: Final = 2_000_000.0  # of a handler, 23 days: poll() takes no more milliseconds

Executor = Literal["threads", "processes"]

AnyMessage = Message[Any, Any]
Outcomes = Sequence[BaseException | None] | None
BatchHandler = Callable[[list[Message[K_co, V_co]]], Outcomes]
AsyncHandler = Callable[[Message[K_co, V_co]], Awaitable[object]]
AsyncBatchHandler = Callable[[list[Message[K_co, V_co]]], Awaitable[Outcomes]]


class ProcessKeywords(TypedDict, Generic[K_co, V_co], total=False):
    """The options of a `process` which both fronts share, and which do not decide what its handler takes."""

    workers: int | None
    order: Order | None
    key: Callable[[Message[K_co, V_co]], Hashable] | None
    unkeyed: Unkeyed
    retry: Retry | None
    retry_on: type[Exception] | Iterable[type[Exception]]
    after_dead_letter: AfterDeadLetter
    window: int


@dataclass(frozen=True)
class Settings:
    """What `process` was asked for, checked. `deliveries`: after so many a failing message ends; None: never."""

    workers: int
    order: Order | None
    key: Callable[[AnyMessage], Hashable] | None
    unkeyed: Unkeyed
    retry: Retry
    retry_on: tuple[type[BaseException], ...]
    after_dead_letter: AfterDeadLetter
    window: int
    deliveries: int | None
    batch: int | None
    batch_wait_s: float


def check_settings(
    group: str,
    options: ConsumerOptions,
    workers: int,
    order: Order | None,
    key: Callable[[AnyMessage], Hashable] | None,
    unkeyed: Unkeyed,
    retry: Retry | None,
    retry_on: type[BaseException] | Iterable[type[BaseException]],
    after_dead_letter: AfterDeadLetter,
    window: int,
    batch: int | None = None,
    batch_wait_s: float = BATCH_WAIT_S,
) -> Settings:
    """Returns the settings of a `process`. Raises InvalidOption, NeedsAtLeastOnce."""
    if options.delivery == "at_most_once":
        raise NeedsAtLeastOnce("process", group)
    _check_count("workers", workers, WORKERS_MAX)
    _check_count("window", window, WINDOW_MAX)
    if batch is not None:
        _check_count("batch", batch, BATCH_MAX)
    check_timeout(batch_wait_s, option="batch_wait_s")
    if batch is None and batch_wait_s != BATCH_WAIT_S:
        raise InvalidOption("batch_wait_s", batch_wait_s, "left out, or together with batch=")
    _check_choice("order", order, ("key", "partition", None))
    _check_choice("unkeyed", unkeyed, ("parallel", "ordered"))
    _check_choice("after_dead_letter", after_dead_letter, ("continue", "key"))
    if key is not None and (order != "key" or not callable(key)):
        raise InvalidOption("key", key, 'a function of a message that returns its key, together with order="key"')
    if retry is not None and not isinstance(retry, Retry):
        raise InvalidOption("retry", retry, "a Retry(...), or None for its defaults")
    retry = Retry() if retry is None else retry
    one = isinstance(retry_on, type | str) or not isinstance(retry_on, Iterable)
    kinds: tuple[type[BaseException], ...] = (retry_on,) if one else tuple(retry_on)  # type: ignore[assignment, arg-type]
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise InvalidOption("retry_on", kind, "a class of exceptions below Exception, or several")
    deliveries = retry.deliveries or options.max_deliver
    if options.dead_letter_topic is not None:  # there the consumer itself ends messages after `max_deliver`
        deliveries = min(deliveries or DELIVERIES, options.max_deliver or sys.maxsize)
    return Settings(
        workers, order, key, unkeyed, retry, kinds, after_dead_letter, window, deliveries, batch, batch_wait_s
    )


def check_handler(handler: object) -> None:
    """Raises InvalidOption if no thread and no process can call it."""
    if not callable(handler):
        raise InvalidOption("handler", handler, "a function of one message, or with batch= of a list of them")
    check_plain("handler", handler, AWAIT_IT)


def check_executor(executor: Executor, timeout_s: float | None) -> None:
    """Raises InvalidOption if nothing can handle messages like that."""
    _check_choice("executor", executor, ("threads", "processes"))
    if timeout_s is None:
        return
    if executor == "threads":
        rule = (
            'left out: nothing can end a thread; executor="processes" has it, and the consumer of marshal_py.aio; and'
            " see handler_timeout_s"
        )
        raise InvalidOption("timeout_s", timeout_s, rule)
    check_timeout(timeout_s)
    if math.inf > timeout_s > TIMEOUT_S_MAX:
        raise InvalidOption("timeout_s", timeout_s, f"a number of seconds up to {TIMEOUT_S_MAX:g}, or None")


def _check_count(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidOption(name, value, f"a whole number from 1 to {most}")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise InvalidOption(name, value, "one of " + ", ".join(map(repr, choices)))


def check_returned(result: object) -> None:
    """Raises InvalidOption if a handler that returned this has not handled its message."""
    rule = ""
    if isinstance(result, BaseException):
        rule = "None: it acks its message. To have it tried again or ended, raise Retry, Reject or another exception"
    elif inspect.iscoroutine(result):
        result.close()  # Python would warn that nobody has awaited it
        rule = f"None, with its work done, not a coroutine; {AWAIT_IT}"
    elif inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        rule = "None, with its work done: nobody goes on with what it returned"
    elif isinstance(result, Future):
        rule = "None, with its work done: wait for the future's result() in the handler"
    if rule:
        raise InvalidOption("what the handler returned", result, rule)


def outcomes_of(result: object, count: int) -> Sequence[BaseException | None]:
    """Returns what a handler of batches says of each of its `count` messages. Raises InvalidOption."""
    if result is None:
        return [None] * count
    rule = f"None, or a list of {count} outcomes, one per message: None, Retry(...), Reject(...) or another exception"
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        raise InvalidOption("what the handler returned", result, rule)
    if len(result) != count:
        raise InvalidOption("what the handler returned", f"{len(result)} outcomes", rule)
    for outcome in result:
        if outcome is not None and not isinstance(outcome, BaseException):
            raise InvalidOption("an outcome", outcome, rule)
    return result
