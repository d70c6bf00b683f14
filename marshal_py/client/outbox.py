"""Records on their way from the lock to the producer, in the order in which they were decided.

They are put in under the lock. The thread that leaves the lock then produces them, so that librdkafka is never called
under it. A thread that comes while another one produces does not wait: the other one sends its records, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, NamedTuple, NoReturn

from marshal_py.errors import MarshalError
from marshal_py.transport.ports import CoordinationLog

# As many as the producer queues. If more are decided at once, a later tick decides again what was not sent.
QUEUED_MAX: Final = 10_000


class Sending(NamedTuple):
    """Records of one log that belong together. `refused`: called without the lock if one of them can never be sent."""

    log: int
    key: bytes
    values: Sequence[bytes]
    refused: Callable[[MarshalError], None]


class _Turn:
    """One thread's turn to produce, known by its identity."""

    __slots__ = ("thread",)

    def __init__(self, thread: int) -> None:
        self.thread = thread


class Outbox:
    """Records that were decided and not yet handed to the producer."""

    def __init__(self, log: CoordinationLog, held: Callable[[], bool]) -> None:
        """`held`: whether this very thread holds the lock."""
        self._log, self._held = log, held
        self._waiting: deque[Sending] = deque()
        self._turn: _Turn | None = None  # of the thread that produces
        self._turns = threading.RLock()  # around taking it

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, log: int, key: bytes, values: Sequence[bytes], refused: Callable[[MarshalError], None]) -> None:
        """Under the lock, which keeps the order."""
        if len(self._waiting) < QUEUED_MAX:
            self._waiting.append(Sending(log, key, values, refused))

    def __enter__(self) -> None:
        """Goes around the lock wherever something may be decided: `with context.outbox, context.lock`."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._waiting and not self._held():
            self.send()

    def send(self) -> None:
        """Produces what is waiting, without the lock and without waiting.

        A signal handler may run anywhere inside: both what it decides and what it interrupted are sent. If it raises
        (ctrl-C), the turn is given up all the same.
        """
        while self._waiting:
            mine = _Turn(threading.get_ident())
            try:
                with self._turns:
                    if self._turn is None:
                        self._turn = mine
                turn = self._turn
                if turn is not None and turn.thread != mine.thread:
                    return  # that thread looks again after its turn
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
    """Wakes threads that wait for a change. They hold the lock, once; the condition itself is never entered.

    In `with context.outbox, context.lock` a signal handler may raise anywhere (ctrl-C), since the lock is entered and
    left inside C. A Condition is entered in Python code and could stay locked.
    """

    def __init__(self, lock: threading.RLock, outbox: Outbox) -> None:
        super().__init__(lock)
        self._outbox = outbox

    def __enter__(self) -> NoReturn:
        raise AssertionError("enter the outbox and the lock: with context.outbox, context.lock")

    def wait(self, timeout: float | None = None) -> bool:
        """As Condition.wait; but if records are waiting, it sends them and returns at once."""
        if not self._outbox:
            return super().wait(timeout)
        try:
            self.release()
            self._outbox.send()
        finally:
            self.acquire()
        return True
