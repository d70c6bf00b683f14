"""Handlers in processes of their own, for `process(executor="processes")`: one for each thread that hands out messages.

A process is started afresh (spawn), imports the handler, and answers over a pipe: its thread sends what a message holds
as a PlainMessage, and waits for what the handler returned or raised. So the consumer, its answers and the order of
lanes stay where they are. A process that dies has failed with the message that it had, and is replaced. One whose
handler takes longer than `timeout_s` is killed. None outlives its program: it ends when the pipe does, and a thread in
it ends it when the program has died. No signal to the process group ends one amid a message: the program ends it.
"""

from __future__ import annotations

import math
import multiprocessing.process
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import connection, get_context, parent_process, resource_tracker
from typing import Any, Final, Generic, NamedTuple

from msgspec import Struct

from marshal_py.client.connection import watch_forks
from marshal_py.client.messages.message import Message
from marshal_py.client.process.processing import Reject, Retry, Settings, check_returned
from marshal_py.errors import InvalidOption
from marshal_py.protocol.wire.identity import Token
from marshal_py.transport.serialization import K_co, V_co

LOOK_S: Final = 0.1  # how often the start of a process looks whether it is still wanted
CLOSE_S: Final = 2.0  # how long an idle process may take to end, before it is killed
FOR_THE_PROGRAM: Final = {signal.SIGINT, signal.SIGTERM}  # a terminal or systemd sends them to its processes, too
IMPORTABLE: Final = "a function at the top level of a module, which a new process imports by its name"
GUARD: Final = (
    "a process that begins: it ended with exit code {}. A program that is started as a file begins under `if __name__"
    ' == "__main__":`, because each of its processes imports it'
)


class PlainMessage(Struct, Generic[K_co, V_co], frozen=True):
    """What a message holds, for a handler in another process: it has no consumer there, and so nothing to ack."""

    topic: str
    partition: int
    offset: int
    key: K_co
    value: V_co
    headers: list[tuple[str, bytes | None]]
    timestamp: int
    token: Token
    group: str
    delivery_count: int
    idempotency_key: str


class HandlerError(RuntimeError):
    """Stands for an error that `retry_on` names and that cannot be sent: it is tried again as that."""


class Answer(NamedTuple):
    """What came of a call: what it returned, what it raised, and whether that ends the `process` (None: `retry_on` says
    so)."""

    result: object = None
    error: BaseException | None = None
    ends: bool | None = None


NOT_BEGUN: Final = Answer()  # no handler has begun
RETURNED: Final = Answer()  # a handler that returned None


def answered(result: object) -> Answer:
    """Returns what comes of a handler that has returned this."""
    if result is None:  # nearly always
        return RETURNED
    try:
        check_returned(result)
    except InvalidOption as refused:
        return Answer(error=refused, ends=True)
    return Answer(result)


def plain(message: Message[K_co, V_co]) -> PlainMessage[K_co, V_co]:
    """Returns what a message holds. Raises what a deserializer raises."""
    return PlainMessage(*(getattr(message, name) for name in PlainMessage.__struct_fields__))


class Work(NamedTuple):
    """What each process is given at its start. `handler` and `retry_on` are pickled."""

    handler: bytes
    timeout_s: float | None
    lists: bool


def work_of(handler: object, settings: Settings, timeout_s: float | None) -> tuple[Work, Settings]:
    """Returns what a process is given, and the settings of its program. Raises InvalidOption if that cannot be sent."""
    try:
        pickled = pickle.dumps((handler, settings.retry_on))
    except Exception as error:
        raise InvalidOption("handler", handler, f'with executor="processes" {IMPORTABLE} ({error})') from error
    work = Work(pickled, None if timeout_s == math.inf else timeout_s, settings.batch is not None)
    return work, replace(settings, retry_on=(*settings.retry_on, HandlerError))


# --- in the program


class WorkerProcess:
    """Runs a handler in a process, for one thread."""

    def __init__(self, work: Work, is_over: Callable[[], bool]) -> None:
        """`is_over()`: whether nothing is to begin any more."""
        self._work, self._is_over = work, is_over
        self._process: Any = None
        self._pipe: connection.Connection[Any, Any]
        self._began = False  # whether a process has ever imported the handler
        watch_forks(self)

    def forked(self) -> None:
        """Lets go of the pipe in a forked child process, else the worker process would not see its program close it."""
        process, self._process = self._process, None
        if process is not None:
            self._pipe.close()

    def ready(self) -> bool:
        """Has a process that can handle a message. Returns whether it has: not if all ends. Raises InvalidOption if it
        cannot import the handler; OSError if the machine has no room for it, or has killed it."""
        if self._process is None or not self._process.is_alive():
            self.close()
            self._start()
        return self._process is not None

    def _start(self) -> None:
        """Starts a process, and waits until it has imported the handler; without one if all ends."""
        if self._is_over():
            return
        # The mask is that of this thread, and its process inherits it, until it has handlers of signals.
        resource_tracker.ensure_running()  # first: its start takes these signals out of the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_PROGRAM)
        spawn = get_context("spawn")
        self._pipe, there = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve, args=(there, self._work.handler, self._work.lists), name="marshal-handler", daemon=True
        )
        try:
            self._process.start()
        except BaseException as error:
            self._process = None
            self._pipe.close()
            if isinstance(error, AssertionError):  # of multiprocessing: this process may have none
                raise InvalidOption("executor", "processes", str(error)) from error
            raise
        finally:
            there.close()
        # At the end of the program multiprocessing would wait for the handler. At that of a forked child, too.
        getattr(multiprocessing.process, "_children", set()).discard(self._process)
        while not connection.wait((self._pipe, self._process.sentinel), LOOK_S):
            if self._is_over():
                self.close()
                return
        refused = self._received()
        if refused is None:
            code = self._ended()
            if self._began or (code or 0) < 0:  # a signal ended it
                raise ChildProcessError(f"a new worker process ended with exit code {code} before it began")
            raise InvalidOption("executor", "processes", GUARD.format(code))
        if refused.error is not None:
            self.close()
            raise refused.error
        self._began = True

    def call(self, given: Any) -> Answer:
        """Has the process handle a message, or a list of them. Raises InvalidOption as `ready`."""
        try:
            if not self.ready():  # all ends while it began
                return NOT_BEGUN
        except OSError:
            return NOT_BEGUN
        try:
            plainly = [plain(one) for one in given] if self._work.lists else plain(given)
        except Exception as error:  # of a deserializer
            return Answer(error=error)
        try:
            sent = pickle.dumps(plainly)
        except Exception as error:
            rule = f'picklable for executor="processes"; what the deserializers return is not ({error})'
            return Answer(error=InvalidOption("the message", given, rule), ends=True)
        return self._answered(sent)

    def _answered(self, sent: bytes) -> Answer:
        process = self._process
        try:
            self._pipe.send_bytes(sent)
            came = connection.wait((self._pipe, process.sentinel), self._work.timeout_s)
        except OSError:
            came = [process.sentinel]
        if not came:
            process.kill()
            self._ended()
            return Answer(error=TimeoutError(f"the handler took longer than timeout_s={self._work.timeout_s:g}"))
        answer = self._received()
        if answer is None:
            text = f"the worker process ended with exit code {self._ended()} while its handler had the message"
            return Answer(error=ChildProcessError(text), ends=False)
        return answer

    def _received(self) -> Answer | None:
        """Returns what the process has sent; None if it has ended without."""
        try:
            sent = self._pipe.recv_bytes() if self._pipe.poll() else None
        except (EOFError, OSError):
            return None
        try:
            return None if sent is None else pickle.loads(sent)
        except Exception as error:
            rule = f"such that the program can unpickle it ({type(error).__name__}: {error})"
            return Answer(error=InvalidOption("what the handler returned or raised", "as sent", rule), ends=True)

    def _ended(self) -> int | None:
        """Returns the exit code of a process that has ended, and forgets it."""
        process, self._process = self._process, None
        self._pipe.close()
        process.join(CLOSE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        code: int | None = process.exitcode
        with suppress(ValueError):  # another thread that starts a process has just asked how this one ended
            process.close()
        return code

    def close(self) -> None:
        """Ends the process, which has nothing to handle."""
        if self._process is not None:
            self._ended()


# --- in the process


def _serve(pipe: connection.Connection[Any, Any], pickled: bytes, lists: bool) -> None:
    """Handles what comes, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which programs inherit that the handler starts
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_PROGRAM)
    threading.Thread(target=_end_with_the_program, name="marshal-parent", daemon=True).start()
    try:
        handler, retry_on = pickle.loads(pickled)
    except BaseException as error:
        text = f"{IMPORTABLE}: {type(error).__name__}: {error}"
        answer = Answer(error=InvalidOption("handler", "as sent to a process", text), ends=True)
        handler = None
    else:
        answer = Answer()
    with suppress(EOFError, OSError):
        pipe.send_bytes(pickle.dumps(answer))
        while handler is not None:
            pipe.send_bytes(pickle.dumps(_handled(handler, pipe.recv_bytes(), retry_on, lists)))


def _end_with_the_program() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait((parent.sentinel,))
    os._exit(1)


def _handled(handler: Any, sent: bytes, retry_on: tuple[type[BaseException], ...], lists: bool) -> Answer:
    """Returns what came of a call, as it can be sent."""
    try:
        given = pickle.loads(sent)
    except BaseException as error:
        rule = f"such that a worker process can unpickle what it holds ({type(error).__name__}: {error})"
        return Answer(error=InvalidOption("the message", "as sent", rule), ends=True)
    try:
        result = handler(given)
    except BaseException as error:  # sys.exit() too, as in a thread
        raised = _sendable(error, retry_on)
        with suppress(Exception):  # of a frozen dataclass
            raised.add_note("In the worker process:\n" + "".join(traceback.format_exception(error)))
        return Answer(error=raised)
    answer = answered(result)
    if isinstance(answer.error, InvalidOption):
        refused = InvalidOption(answer.error.option, repr(answer.error.value), answer.error.rule)
        return Answer(error=refused, ends=True)
    if not lists:
        return Answer()
    if isinstance(result, Sequence) and not isinstance(result, str | bytes):
        result = [_sendable(one, retry_on) if isinstance(one, BaseException) else one for one in result]
    try:
        pickle.dumps(result)
    except Exception:
        rule = "None, or a list of outcomes, one per message"
        return Answer(error=InvalidOption("what the handler returned", repr(result), rule), ends=True)
    return Answer(result)


def _sendable(error: BaseException, retry_on: tuple[type[BaseException], ...]) -> BaseException:
    """Returns the error; if it cannot be sent, one with its text which means the same to the program."""
    with suppress(Exception):  # of a class that only its module makes, or with a value that cannot be pickled
        if isinstance(error, Reject):
            return Reject(error.reason)
        if isinstance(error, Retry):
            bounds = error.first_s, error.factor, error.max_s, error.jitter, error.deliveries
            return Retry(*bounds, after_s=error.after_s)
        if isinstance(pickle.loads(pickle.dumps(error)), type(error)):
            return error
    text = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, retry_on):
        return HandlerError(text)
    return next(kind for kind in (RuntimeError, Exception, BaseException) if not issubclass(kind, retry_on))(text)
