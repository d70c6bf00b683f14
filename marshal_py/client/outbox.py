"""Records on their way from the Marshal's lock to the producer, in the order in which they were decided.

They are put in under the lock and produced after it was left, by whoever left it: no call of librdkafka is made under
it. Who comes while another thread produces waits for nobody: that one sends his records, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, NamedTuple, NoReturn

from marshal_py.errors import MarshalError
from marshal_py.transport.ports import CoordinationLog

# As many as the producer queues. More were decided at once: what is not sent is decided again by a later tick.
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
        """Around the lock of whoever may decide something: `with loop.outbox, loop.lock`."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._waiting and not self._held():
            self.send()

    def send(self) -> None:
        """Without the lock. Never waits.

        A handler of a signal may come anywhere in it: what it decides is sent, and what it interrupted, too. If it
        raises (ctrl-C) the turn is given up all the same.
        """
        while self._waiting:
            mine = _Turn(threading.get_ident())
            try:
                with self._turns:
                    if self._turn is None:
                        self._turn = mine
                turn = self._turn
                if turn is not None and turn.thread != mine.thread:
                    return  # it looks again after its turn
                if turn is not None:
                    self._produce_all()
            finally:  # nothing is called before it is done: no signal can come between
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
    """Wakes those who wait for a change; they hold the lock once. It is not entered itself.

    In `with loop.outbox, loop.lock` the handler of a signal may raise anywhere (ctrl-C): the lock is entered and left
    inside C. A Condition is entered in Python, and would stay locked.
    """

    def __init__(self, lock: threading.RLock, outbox: Outbox) -> None:
        super().__init__(lock)
        self._outbox = outbox

    def __enter__(self) -> NoReturn:
        raise AssertionError("enter the outbox and the lock: with loop.outbox, loop.lock")

    def wait(self, timeout: float | None = None) -> bool:
        """As ever. If something is to be sent it returns at once: look again."""
        if not self._outbox:
            return super().wait(timeout)
        try:
            self.release()
            self._outbox.send()
        finally:
            self.acquire()
        return True
