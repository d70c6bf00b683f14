"""Hands records to the producer in the order in which they were decided, but not under the Marshal's lock.

They are put into the outbox under the lock. The thread that leaves the lock then produces them, so that librdkafka is
never called under the lock. A thread that wants to produce while another one does so does not wait: the other one sends
its records, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, NamedTuple, NoReturn

from marshal_py.errors import MarshalError
from marshal_py.transport.ports import CoordinationLog

# Entries, as many as the producer queues. What is put into a full outbox is dropped; a later tick decides it again.
QUEUED_MAX: Final = 10_000


class Sending(NamedTuple):
    """Records of one log that are produced together. `refused(error)`, without the lock: one can never be sent."""

    log: int
    key: bytes
    values: Sequence[bytes]
    refused: Callable[[MarshalError], None]


class _Turn:
    """One turn to produce: the call of `send` that took it produces, and alone gives it up; a signal handler may call
    `send` inside."""

    __slots__ = ("thread",)

    def __init__(self, thread: int) -> None:
        self.thread = thread


class Outbox:
    """The records that were decided and not yet handed to the producer."""

    def __init__(self, log: CoordinationLog, held: Callable[[], bool]) -> None:
        """Makes an empty outbox. `held()` tells whether the thread that calls it holds the Marshal's lock."""
        self._log, self._held = log, held
        self._waiting: deque[Sending] = deque()
        self._turn: _Turn | None = None  # of the thread that produces
        self._turns = threading.RLock()  # held while a thread takes the turn

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, log: int, key: bytes, values: Sequence[bytes], refused: Callable[[MarshalError], None]) -> None:
        """Adds records for the next `send`, under the lock, which keeps their order. With QUEUED_MAX waiting they are
        dropped."""
        if len(self._waiting) < QUEUED_MAX:
            self._waiting.append(Sending(log, key, values, refused))

    def __enter__(self) -> None:
        """Does nothing: `with context.outbox, context.lock` sends on leaving what was decided under the lock."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._waiting and not self._held():
            self.send()

    def send(self) -> None:
        """Produces what waits, without the lock or a wait for the broker. If another thread is producing, that one does
        it. A signal handler may run anywhere inside: its records, and the interrupted ones, are sent; if it raises
        (ctrl-C), another thread can produce."""
        while self._waiting:
            mine = _Turn(threading.get_ident())
            try:
                with self._turns:
                    if self._turn is None:
                        self._turn = mine
                turn = self._turn
                if turn is not None and turn.thread != mine.thread:
                    return  # that thread sends until nothing is waiting
                if turn is not None:
                    self._produce_all()
            finally:  # no function is called before it is done, so no signal can come between
                if self._turn is mine:
                    self._turn = None

    def _produce_all(self) -> None:
        while self._waiting:
            # Taken out afterwards: an exception (Ctrl-C) in between sends it twice rather than not at all.
            first = self._waiting[0]
            error = self._produce(first)
            if self._waiting and self._waiting[0] is first:
                self._waiting.popleft()
            if error is not None:
                first.refused(error)

    def _produce(self, sending: Sending) -> MarshalError | None:
        try:
            for value in sending.values:
                self._log.append(sending.log, sending.key, value)
        except MarshalError as error:
            return error
        return None


class Changes(threading.Condition):
    """Wakes threads that `wait`, with the lock entered once. Never enter the condition by `with`: that is Python code,
    and ctrl-C inside could leave the lock locked. `with context.outbox, context.lock` enters and leaves in C."""

    def __init__(self, lock: threading.RLock, outbox: Outbox) -> None:
        super().__init__(lock)
        self._outbox = outbox
        self.count: int = 0  # changes so far
        self.listeners: tuple[Callable[[], object], ...] = ()  # called at each change, with the lock held

    def notify(self, n: int = 1) -> None:
        self.count += 1
        super().notify(n)
        for listener in self.listeners:
            listener()

    def __enter__(self) -> NoReturn:
        raise AssertionError("enter the outbox and the lock: with context.outbox, context.lock")

    def wait(self, timeout: float | None = None) -> bool:
        """Waits as Condition.wait does. But if records are waiting in the outbox, it sends them and returns at once."""
        if not self._outbox:
            return super().wait(timeout)
        try:
            self.release()
            self._outbox.send()
        finally:
            self.acquire()
        return True
