"""Stops consumers by signals. The handlers also call the handlers that were there before, and can be removed again.

A library installs no handler unasked; a program asks with `stop_on_signals`. A handler may run between any two
instructions of the main thread, so it only calls `Ending.request_stop`, which takes no lock.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any, Final, Self

from marshal_py.client.async_consumer import AsyncConsumer
from marshal_py.client.consumer import Consumer
from marshal_py.errors import ConsumerClosed, InvalidOption

Handler = Callable[[int, FrameType | None], object] | int
SIGNALS: Final = "numbers of signals, such as signal.SIGTERM"
AnyConsumer = Consumer[Any, Any] | AsyncConsumer[Any, Any]


class SignalHandlers:
    """Stops consumers when a signal comes. `stop_on_signals` makes one.

    It is a context manager: leaving it puts the former handlers back.
    """

    def __init__(self, consumers: Sequence[AnyConsumer], signals: Sequence[int]) -> None:
        _check_thread()
        for one in consumers or (None,):
            if not isinstance(one, Consumer | AsyncConsumer):
                rule = "one consumer or more; of what a consumer has begun, such as its process, name the consumer"
                raise InvalidOption("stop_on_signals", one, rule)
        if isinstance(signals, str) or not isinstance(signals, Iterable):
            raise InvalidOption("signals", signals, f"{SIGNALS}, in a list")
        self._consumers = consumers
        self._pid = os.getpid()
        self._seen: set[int] = set()  # signals that have come once
        self._former: dict[int, Handler] = {}
        self._active = True
        for number in signals:
            try:
                if number in self._former:
                    continue  # named twice: its former handler would be this one
                if (former := signal.getsignal(number)) is None:
                    raise ValueError("its handler was not installed by Python, so it could not be put back")
                self._former[number] = former
                signal.signal(number, self._handle)
            except TypeError as error:
                self.restore()
                raise InvalidOption("signals", number, SIGNALS) from error
            except (ValueError, OSError, OverflowError) as error:
                self._former.pop(number, None)
                self.restore()
                raise InvalidOption("signals", number, f"{error}; leave this signal out") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Ends a ConsumerClosed that `fetch` or `next` has raised because a signal came."""
        self.restore()
        return isinstance(error, ConsumerClosed) and any(one._ending.asked for one in self._consumers)

    def restore(self) -> None:
        """Puts the former handlers back, from the main thread. A second call does nothing.

        If the program has installed another handler since, that one stays. When it calls this object's handler, the
        call is passed on to the former handler.
        """
        _check_thread()
        self._active = False
        for number in self._former:
            self._put_back(number)

    def _put_back(self, number: int) -> None:
        if signal.getsignal(number) == self._handle:
            signal.signal(number, self._former[number])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child inherits the handler and none of the consumers.
        if not self._active or os.getpid() != self._pid or all(consumer._ending.done for consumer in self._consumers):
            self._as_before(number, frame)
            return
        again = number in self._seen
        self._seen.add(number)
        for consumer in self._consumers:
            consumer._ending.request_stop()
        former = self._former[number]
        if callable(former) and not _is_pythons(former):
            former(number, frame)
        elif again:  # a handler that was installed after this one has called it
            self._as_before(number, frame)
        else:
            self._put_back(number)  # so that a second signal works even while Python is inside C

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        former = self._former[number]
        if callable(former):
            former(number, frame)
        elif former == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _is_pythons(handler: Callable[[int, FrameType | None], object]) -> bool:
    """Returns whether Python has installed the handler: for ctrl-C, in `asyncio.run` one that cancels its main task."""
    runner = getattr(getattr(handler, "func", None), "__self__", None)
    return handler is signal.default_int_handler or isinstance(runner, asyncio.Runner)


def _check_thread() -> None:
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise InvalidOption(
            "stop_on_signals",
            thread.name,
            "call it from the main thread, the only one that Python "
            "lets install handlers; in another one call stop() or drain() of the consumer",
        )


def stop_on_signals(
    *consumers: AnyConsumer, signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT)
) -> SignalHandlers:
    """Ends what these consumers receive when a signal comes; the program then leaves its `with` block as usual.

        with marshal.consumer("billing", ["orders"]) as consumer, stop_on_signals(consumer):

    An iteration ends. A `fetch` or `next` that waits returns what it has; the following one raises ConsumerClosed,
    which ends a `while True` around it, and goes no further than the `with` block.

    If other members take over, messages still come until these members have fetched ahead, for at most a second, so
    that no partition stands still (A6). The call installs the handlers. The end of the `with` block, or `restore()`,
    removes them; after a plain call without either they stay, and do nothing of their own once the consumers have
    stopped.

    A handler that the program or its framework had installed (uvicorn, `loop.add_signal_handler`) is called each time,
    after the consumers were asked to stop. Python's own handlers are not, that of `asyncio.run` included: the first
    signal only ends the iteration; a second one of the same kind has its usual effect (SIGINT raises KeyboardInterrupt
    or cancels the main task, SIGTERM ends the process).

    Call it from the main thread. Raises InvalidOption in another thread, and for a signal that cannot be handled.
    """
    return SignalHandlers(consumers, signals)
