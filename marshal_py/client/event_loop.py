"""What the asyncio front needs of one event loop: to wait there for other threads without blocking it.

Three ways: a task waits for a change of what the Marshal's lock guards (Changes), for messages of a data source (Feed),
or for a verb that blocks, which runs on one of a few threads (Threads). A call that is cancelled loses nothing: what
other threads bring later is kept or undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from marshal_py.client.connection import Change, Context, Poll
from marshal_py.errors import EventLoopMisuse
from marshal_py.transport.ports import Chunk

SLICE_S: Final = 0.25  # one poll; a message ends it at once
# How long a receiver polls for a consumer that has not asked for more yet. A call that may not wait is so much later.
AHEAD_S: Final = 0.005


class Request(NamedTuple):
    """Asks for at most `max_messages` messages before `deadline` (seconds of the monotonic clock). `ahead`: the thread
    has made it itself."""

    max_messages: int
    deadline: float
    ahead: bool = False


VERBS_AT_ONCE_MAX: Final = 4  # threads for verbs that block: connect, close, admin. They are rare; more of them wait
# Threads for the verbs of topics and groups, which may take minutes, so that no other verb waits for them.
READS_AT_ONCE_MAX: Final = 4
TAKEN_MAX: Final = 2_000  # messages that the event loop's thread takes at once, which takes it about a millisecond

T = TypeVar("T")


class Threads:
    """Runs blocking functions on the threads of a pool."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    async def run(self, function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Returns `function()`, run on a thread. If the caller is cancelled, one that runs continues, and its result
        goes to `undo`. After the end of the threads one of the loop's runs it, to raise the error of a closed
        object."""
        try:
            future = self._pool.submit(function)
        except RuntimeError:
            return await asyncio.to_thread(function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                # Not in the callback: it is called here, on the event loop, if the function has returned already.
                future.add_done_callback(lambda done: self.submit(lambda: _undo(done, undo)))
            raise

    def submit(self, function: Callable[[], object]) -> None:
        """Runs `function` later, or in the calling thread if the threads have ended."""
        try:
            self._pool.submit(function)
        except RuntimeError:
            function()

    def close(self) -> None:
        """Ends the threads after the functions that are waiting now. Does not wait for that."""
        self._pool.shutdown(wait=False)


def _undo(done: Future[T], undo: Callable[[T], object]) -> None:
    if not done.cancelled() and done.exception() is None:
        undo(done.result())


class Changes:
    """Wakes the tasks of one event loop that wait for a change of what a Marshal's lock guards."""

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._context, self._loop = context, loop
        self._waiting: dict[asyncio.Future[None], None] = {}  # they wake in the order in which they have begun
        self._called = False  # the loop has been told to wake them: once is enough
        context.listen(self._changed)

    async def wait(self, change: Change) -> None:
        future = self._loop.create_future()
        self._waiting[future] = None  # before the look at the count, or a change in between would be missed
        timer = self._loop.call_later(change.timeout_s, _settle, future)
        try:
            if self._context.changes == change.seen:
                await future
        finally:
            timer.cancel()
            del self._waiting[future]

    def _changed(self) -> None:
        """Runs with the lock held, on any thread."""
        if self._waiting and not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._called = False
        for future in self._waiting:
            _settle(future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Feed:
    """Brings a data source's messages to the event loop. `pull` polls on a thread, the receiver, so that no event loop
    has to; `poll_now` takes what is there on the loop's: handing messages between threads takes longer than handling
    them.

    A call that waits makes a Request, one at a time; the receiver polls until messages come or the request expires, and
    hands them to the loop. It touches nothing else: buffers are filled on the loop's thread, and no code of the user
    runs on it. Where messages come one by one, to wake it for each takes longer than the rest. So if a call had to wait
    for messages, it polls for one more (`ahead`) before the consumer has asked for it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pull: Callable[[float, int], list[Chunk]],
        poll_now: Callable[[int], list[Chunk] | None],
        monotonic: Callable[[], float],
    ) -> None:
        """`monotonic`: the clock of requests, in seconds."""
        self._loop, self._pull, self._poll_now, self._monotonic = loop, pull, poll_now, monotonic
        self._chunks: list[Chunk] = []  # came while no call waited: the next call gets them
        self._error: Exception | None = None
        self._request: Request | None = None  # which the receiver has not answered yet
        self._waiter: asyncio.Future[None] | None = None
        self.waits: bool = False
        self._asked = threading.Condition()
        self._wanted: Request | None = None  # what the receiver polls for
        self._closed = False
        self._receiver: threading.Thread | None = None  # from the first request on

    def take(self, max_messages: int) -> list[Chunk] | None:
        """Returns messages that are there; None if only the receiver can tell. While it has a request, the next are
        its: a partition's must stay in order."""
        if self._chunks or self._error is not None or self._request is not None:
            return None
        return self._poll_now(min(max_messages, TAKEN_MAX))

    async def poll(self, wait: Poll) -> list[Chunk]:
        """Waits for messages. One task at a time may call it. If it is cancelled, the next call gets the messages."""
        at_once = wait.timeout_s <= 0
        if not self._chunks and self._error is None:
            self._waiter, self.waits = self._loop.create_future(), not at_once
            try:
                if self._request is None or not self._request.ahead:
                    self._request = Request(wait.max_messages, self._monotonic() + wait.timeout_s)
                    self._ask(self._request)
                await self._waiter
            finally:
                self._waiter, self.waits = None, False
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if at_once and self._request is None:  # the receiver has polled for one message only
            missing = wait.max_messages - sum([len(chunk.messages) for chunk in self._chunks])
            self._chunks += (self._poll_now(min(missing, TAKEN_MAX)) or ()) if missing > 0 else ()
        chunks, self._chunks = self._chunks, []
        return chunks

    def _ask(self, request: Request) -> None:
        """Has the receiver poll. Its request before is forgotten, though it may still be answered."""
        with self._asked:
            closed = self._closed
            if not closed:
                self._wanted = request
                self._asked.notify()
                if self._receiver is None:
                    self._start()
        if closed:
            self._answer(request, [], None)

    def close(self) -> None:
        """Ends the receiver after the poll that is running, and answers what is asked. Does not wait for that. Any
        thread may call it."""
        with self._asked:
            self._closed = True
            self._asked.notify()

    # --- on the receiver

    def _start(self) -> None:
        receiver = threading.Thread(target=self._receive, name="marshal-receiver", daemon=True)
        receiver.start()  # or raises: no more threads can be made, and the next call tries again
        self._receiver = receiver

    def _receive(self) -> None:
        while (request := self._next()) is not None:
            self._serve(request)
        if self._wanted is not None:
            self._answer(self._wanted, [], None)

    def _next(self) -> Request | None:
        """Waits for a request. Returns None at the end."""
        with self._asked:
            while self._wanted is None and not self._closed:
                self._asked.wait()
            return None if self._closed else self._wanted

    def _slice_s(self, request: Request) -> float:
        """Returns for how many seconds to poll at once."""
        return max(0.0, min(SLICE_S, request.deadline - self._monotonic()))

    def _serve(self, request: Request) -> None:
        """Polls once, and answers the request if that brought messages or its time is over."""
        chunks: list[Chunk] = []
        failed: Exception | None = None
        try:
            chunks = self._pull(self._slice_s(request), request.max_messages)
        except Exception as error:  # the consumer raises it
            failed = error
        if not chunks and failed is None and self._monotonic() < request.deadline:
            return
        following = None
        with self._asked:
            if self._wanted is request:
                if chunks and self.waits:
                    self.waits = False  # until it waits again: what comes now is the only one that nobody asked for
                    following = Request(1, self._monotonic() + AHEAD_S, ahead=True)
                self._wanted = following
        self._answer(request, chunks, failed, following)

    def _answer(
        self, request: Request, chunks: list[Chunk], error: Exception | None, following: Request | None = None
    ) -> None:
        """Hands the event loop what came for a request. `following`: what is polled for next."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the messages are fetched again by the next owner
            self._loop.call_soon_threadsafe(self._answered, request, chunks, error, following)

    def _answered(
        self, request: Request, chunks: list[Chunk], error: Exception | None, following: Request | None
    ) -> None:
        newest = request is self._request
        if newest:
            self._request = following
        self._error = error or self._error
        self._chunks += chunks
        if self._waiter is not None and (newest or chunks or error is not None):
            _settle(self._waiter)


class Stoppable(Protocol):
    async def __aenter__(self) -> Any: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


S = TypeVar("S", bound=Stoppable)


class Opening(Generic[S]):
    """Opens something: `await` it to get the open object, or use it in `async with`, which closes that at its end."""

    def __init__(self, opens: Callable[[], Coroutine[Any, Any, S]]) -> None:
        self._opens = opens
        self._open: S | None = None

    def __await__(self) -> Generator[Any, Any, S]:
        return self._opens().__await__()

    async def __aenter__(self) -> S:
        self._open = await self._opens()
        entered: S = await self._open.__aenter__()
        return entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._open is not None
        await self._open.__aexit__(kind, error, traceback)


class EventLoop:
    """What all consumers of one AsyncMarshal share."""

    def __init__(self, verbs: Threads, context: Context) -> None:
        """Belongs to the running loop, whose thread makes it."""
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.thread: int = threading.get_ident()
        self.verbs: Threads = verbs
        self.reads: Threads = Threads(ThreadPoolExecutor(READS_AT_ONCE_MAX, "marshal-reads"))
        self._feeds: WeakSet[Feed] = WeakSet()
        self._monotonic = context.monotonic
        self.changes: Changes = Changes(context, self.loop)
        self.closed: bool = False

    def feed(self, pull: Callable[[float, int], list[Chunk]], poll_now: Callable[[int], list[Chunk] | None]) -> Feed:
        """Returns a new consumer's feed. The end of this object ends it."""
        feed = Feed(self.loop, pull, poll_now, self._monotonic)
        self._feeds.add(feed)
        return feed

    def check(self, verb: str) -> None:
        """Raises EventLoopMisuse unless the running event loop is this one."""
        if asyncio._get_running_loop() is not self.loop:
            rule = (
                "was called in another event loop than the one that opened the consumer, or in a thread without one; "
                "close() of the Marshal stops it from any event loop"
            )
            raise EventLoopMisuse(verb, rule)

    def close(self) -> None:
        self.closed = True
        for feed in [*self._feeds]:
            feed.close()
        self.verbs.close()
        self.reads.close()
