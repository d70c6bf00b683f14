"""Records on their way from the Marshal's lock to the producer, in the order in which they were decided.

They are put in under the lock and produced after it was left, by whoever left it: no call of librdkafka is made under
it. Who comes while another thread produces waits for nobody: that one sends his records, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, NamedTuple

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


class Outbox:
    """Records that were decided and not yet handed to the producer."""

    def __init__(self, log: CoordinationLog) -> None:
        self._log = log
        self._waiting: deque[Sending] = deque()
        # Reentrant: a signal handler that comes in the midst of it sends its own, and what it interrupted.
        self._sending = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, log: int, key: bytes, values: Sequence[bytes], refused: Callable[[MarshalError], None]) -> None:
        """Under the lock, which keeps the order."""
        if len(self._waiting) < QUEUED_MAX:
            self._waiting.append(Sending(log, key, values, refused))

    def send(self) -> None:
        """Without the lock. Never waits."""
        while self._waiting and self._sending.acquire(blocking=False):
            try:
                while self._waiting:
                    # Taken out afterwards: an exception (Ctrl-C) in between sends it twice rather than not at all.
                    first = self._waiting[0]
                    error = self._produce(first)
                    if self._waiting and self._waiting[0] is first:
                        self._waiting.popleft()
                    if error is not None:
                        first.refused(error)
            finally:
                self._sending.release()

    def _produce(self, sending: Sending) -> MarshalError | None:
        try:
            for value in sending.values:
                self._log.append(sending.log, sending.key, value)
        except MarshalError as error:
            return error
        return None


class Deciding(threading.Condition):
    """The Marshal's lock for those who may decide something: who leaves it last sends what was decided.

    Not to be entered by a thread that holds the bare lock.
    """

    def __init__(self, lock: threading.RLock, outbox: Outbox) -> None:
        super().__init__(lock)
        self._outbox = outbox
        self._depth = 0  # how often the thread that is inside has entered

    def __enter__(self) -> bool:
        entered = super().__enter__()
        self._depth += 1
        return entered

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        self._depth -= 1
        outermost = not self._depth
        super().__exit__(kind, error, traceback)
        if outermost:
            self._outbox.send()

    def wait(self, timeout: float | None = None) -> bool:
        """As ever, for one who has entered once. If something is to be sent it returns at once: look again."""
        depth, self._depth = self._depth, 0
        try:
            if not self._outbox:
                return super().wait(timeout)
            self.release()
            try:
                self._outbox.send()
            finally:
                self.acquire()
            return True
        finally:
            self._depth = depth
