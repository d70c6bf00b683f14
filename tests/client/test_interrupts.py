"""Ctrl-C, and other signals whose handlers raise, between any two instructions: what was begun can be ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from marshal_py.protocol.delivery import Run
from tests.support.fronts import DEADLINE_S, MemoryGround, collect, joined

INTERRUPTS = 200  # one in four hit the instruction between a lock and its `try`


class Interrupted(BaseException):
    """What the signal's handler raises: as KeyboardInterrupt, but nobody else's."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within it SIGVTALRM raises Interrupted in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_an_interrupted_ack_leaves_the_lock_free(memory: MemoryGround) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer, interruptible():
        messages = collect(consumer, 3, ack=False)
        for number in range(INTERRUPTS):
            signal.setitimer(signal.ITIMER_VIRTUAL, 1e-6 * (1 + number))
            with contextlib.suppress(Interrupted):
                while True:
                    for message in messages:
                        message.ack()
        assert can_lock(marshal._loop.lock)


def test_an_interrupted_ack_forgets_no_other() -> None:
    """Where the lowest message is acked last, its ack goes over all that were acked before."""
    count = 2_000
    with interruptible():
        for number in range(INTERRUPTS // 2):
            run = Run(range(count))
            run.deliver(count, 0)
            for index in range(1, count):
                run.finish(index)
            signal.setitimer(signal.ITIMER_VIRTUAL, 1e-6 * (1 + number))
            with contextlib.suppress(Interrupted):
                while run.low < count:
                    run.finish(0)
                wait_for_the_signal()
            if run.low == 0:
                run.finish(0)
            assert (run.low, run.unfinished, run.finished) == (count, 0, set())


def wait_for_the_signal() -> None:
    while True:
        pass


def can_lock(lock: threading.RLock) -> bool:  # type: ignore[valid-type]
    """Asked on another thread: the one that leaked it may take it again."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=DEADLINE_S / 10))  # type: ignore[attr-defined]
        if got[0]:
            lock.release()  # type: ignore[attr-defined]

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]
