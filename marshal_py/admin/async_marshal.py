"""The Marshal of an asyncio program, with its topics and groups: the verbs of the synchronous ones, awaited.

Consumers wait without a thread (client/async_consumer.py). All other verbs that wait are rare: they run on a few
threads of the Marshal, and the event loop goes on meanwhile. A verb that is cancelled continues on its thread; what it
was to open is closed again.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, Unpack, overload

from marshal_py.admin.group import Group
from marshal_py.admin.marshal import Marshal
from marshal_py.client.async_consumer import AsyncConsumer
from marshal_py.client.consumer import Consumer
from marshal_py.client.event_loop import VERBS_AT_ONCE_MAX, EventLoop, Opening, Threads
from marshal_py.client.membership import LEAVE_TIMEOUT_S
from marshal_py.client.metrics import Metrics
from marshal_py.client.values.options import ConsumerKeywords, ConsumerOptions, explicit, parameters_of
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.topics.keys import Key
from marshal_py.topics.request import GetRequest, StoredBatch, StoredMessage
from marshal_py.topics.topic import FOLLOW_PAGE, FOLLOW_S, Topic
from marshal_py.transport import option_names
from marshal_py.transport.serialization import Deserializer, K, V

W = TypeVar("W")
T = TypeVar("T")
P = ParamSpec("P")

END: Final = object()  # an iterator has no more


def awaited(verb: Callable[Concatenate[W, P], T]) -> Callable[Concatenate[Blocking[Any], P], Coroutine[Any, Any, T]]:
    """Makes a method that awaits `verb` of the synchronous object, which runs on one of the Marshal's threads."""

    @functools.wraps(verb)
    async def run(self: Blocking[Any], /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._threads.run(lambda: verb(self._plain, *arguments, **named))

    return run


class Blocking(Generic[W]):
    """A synchronous object and the threads on which its verbs may block."""

    def __init__(self, plain: W, threads: Threads) -> None:
        self._plain, self._threads = plain, threads

    def __repr__(self) -> str:
        return f"Async{self._plain!r}"

    async def _each(self, items: Iterator[T]) -> AsyncIterator[T]:
        """Yields the items of an iterator that blocks."""
        while (item := await self._threads.run(lambda: next(items, END))) is not END:
            yield item  # type: ignore[misc]  # it is not END


class AsyncGroup(Blocking[Group]):
    """Does what `Group` does, with `await`. `AsyncMarshal.group` makes it."""

    @property
    def name(self) -> str:
        return self._plain.name

    info: Final = awaited(Group.info)
    members: Final = awaited(Group.members)
    add_members: Final = awaited(Group.add_members)
    drop_members: Final = awaited(Group.drop_members)
    change_members: Final = awaited(Group.change_members)
    set_mappings: Final = awaited(Group.set_mappings)
    delete_mappings: Final = awaited(Group.delete_mappings)
    create: Final = awaited(Group.create)  # type: ignore[arg-type]  # no setting is called self
    set_config: Final = awaited(Group.set_config)  # type: ignore[arg-type]  # no setting is called self
    shrink: Final = awaited(Group.shrink)
    impact: Final = awaited(Group.impact)
    impact_of_shrink: Final = awaited(Group.impact_of_shrink)
    pause: Final = awaited(Group.pause)
    resume: Final = awaited(Group.resume)
    set_position: Final = awaited(Group.set_position)
    positions: Final = awaited(Group.positions)
    step_down: Final = awaited(Group.step_down)
    pin_info: Final = awaited(Group.pin_info)
    unpin: Final = awaited(Group.unpin)
    evict: Final = awaited(Group.evict)
    delete: Final = awaited(Group.delete)

    async def advisories(self, follow: bool = False) -> AsyncIterator[Advisory]:
        """Yields the group's advisories, for `async for`, as `Group.advisories` does."""
        told = self._plain._advisories(follow)
        lock = threading.Lock()  # after a cancellation a thread may still be in `told`

        def step() -> Advisory | object | None:
            with lock:
                return next(told, END)

        def close() -> None:
            with lock:
                told.close()

        try:
            while (advisory := await self._threads.run(step)) is not END:
                if advisory is not None:  # else nothing has come for a while, and others have their turn on the thread
                    yield advisory  # type: ignore[misc]  # it is not END
        finally:
            self._threads.submit(close)


class AsyncTopic(Blocking[Topic]):
    """Does what `Topic` does, with `await`. `AsyncMarshal.topic` makes it. One question is answered at a time."""

    @property
    def name(self) -> str:
        return self._plain.name

    get: Final = awaited(Topic.get)
    find: Final = awaited(Topic.find)
    get_page: Final = awaited(Topic.get_page)
    info: Final = awaited(Topic.info)
    purge: Final = awaited(Topic.purge)
    delete_key: Final = awaited(Topic.delete_key)
    key_index: Final = awaited(Topic.key_index)
    update_index: Final = awaited(Topic.update_index)
    index_status: Final = awaited(Topic.index_status)
    close: Final = awaited(Topic.close)

    def __getitem__(self, key: Key) -> Coroutine[Any, Any, StoredMessage]:
        """Reads the last message of a key: `await topic["key"]`."""
        return self._threads.run(lambda: self._plain[key])

    def pages(self, request: GetRequest) -> AsyncIterator[StoredBatch]:
        """Yields every page of a question, for `async for`, as `Topic.pages` does."""
        return self._each(self._plain.pages(request))

    async def follow(self, request: GetRequest, *, every_s: float = FOLLOW_S) -> AsyncIterator[StoredMessage]:
        """Yields what answers the request, then what is written later, for `async for`, as `Topic.follow` does."""
        following = request.followed(FOLLOW_PAGE)
        while True:
            async for page in self.pages(following):
                for message in page:
                    yield message
                later = page.later_request()
            following = later
            await asyncio.sleep(every_s)  # not on a thread, of which there are few

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _with_group(
    verb: Callable[Concatenate[Marshal, P], Group],
) -> Callable[Concatenate[AsyncMarshal, P], Coroutine[Any, Any, AsyncGroup]]:
    """Makes a method that awaits `verb` of the Marshal, and returns its group."""

    @functools.wraps(verb)
    async def run(self: AsyncMarshal, /, *arguments: P.args, **named: P.kwargs) -> AsyncGroup:
        plain = await self._threads.run(lambda: verb(self._plain, *arguments, **named))
        return AsyncGroup(plain, self._shared.reads)

    return run


class AsyncMarshal(Blocking[Marshal]):
    """Does what `Marshal` does, for asyncio. Made by `aio.connect`. Leaving its `async with` stops its consumers.

    It belongs to the event loop that has made it. Beside the threads of `Marshal` it has one per consumer, which polls,
    and up to eight for verbs that block, made as they are needed.
    """

    def __init__(self, plain: Marshal, threads: Threads) -> None:
        super().__init__(plain, threads)
        self._shared = EventLoop(threads, plain._context)

    @property
    def client_id(self) -> str:
        return self._plain.client_id

    @property
    def coordination_topic(self) -> str:
        return self._plain.coordination_topic

    @property
    def waiting_for(self) -> str:
        """Returns what the connection is waiting for, in words for people; "" when all is well."""
        return self._plain.waiting_for

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Stops every consumer, sends what is queued and disconnects, as `Marshal.close` does."""
        if not self._shared.closed:
            await self._threads.run(lambda: self._plain.close(timeout_s))
            self._shared.close()

    def metrics(self) -> Metrics:
        """Returns figures of this connection and its consumers, as `Marshal.metrics` does. It sends nothing."""
        return self._plain.metrics()

    info: Final = awaited(Marshal.info)

    # --- topics and groups

    topics: Final = awaited(Marshal.topics)
    update_topic: Final = awaited(Marshal.update_topic)
    delete_topic: Final = awaited(Marshal.delete_topic)
    groups: Final = awaited(Marshal.groups)
    delete_group: Final = awaited(Marshal.delete_group)

    @parameters_of(Marshal.topic)
    def topic(self, *arguments: Any, **named: Any) -> AsyncTopic:
        """Returns a topic, as `Marshal.topic` does, without a request. Deserializers run on a thread of the Marshal."""
        return AsyncTopic(self._plain.topic(*arguments, **named), self._shared.reads)

    @parameters_of(Marshal.create_topic)
    async def create_topic(self, *arguments: Any, **named: Any) -> AsyncTopic:
        """Creates a topic and returns it, as `Marshal.create_topic` does."""
        plain = await self._threads.run(lambda: self._plain.create_topic(*arguments, **named))
        return AsyncTopic(plain, self._shared.reads)

    def group(self, name: str) -> AsyncGroup:
        """Returns the operations on a group, as `Marshal.group` does. Nothing is sent."""
        return AsyncGroup(self._plain.group(name), self._shared.reads)

    create_group: Final = _with_group(Marshal.create_group)
    update_group: Final = _with_group(Marshal.update_group)
    create_or_update_group: Final = _with_group(Marshal.create_or_update_group)

    # --- consumers

    # The overloads of Marshal.consumer.

    @overload
    def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        key_deserializer: Deserializer[K] | None = None,
        value_deserializer: Deserializer[V] | None = None,
        **keywords: Unpack[ConsumerKeywords],
    ) -> Opening[AsyncConsumer[K, V]]: ...
    @overload
    def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        options: ConsumerOptions,
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
        **keywords: Unpack[ConsumerKeywords],
    ) -> Opening[AsyncConsumer[Any, Any]]: ...
    @explicit
    def consumer(
        self, group: str, topics: Sequence[str], *, options: ConsumerOptions | None = None, **keywords: Any
    ) -> Opening[AsyncConsumer[Any, Any]]:
        """Joins `group` as a consumer of `topics`, as `Marshal.consumer` does: `await` it, or use it in `async with`.

        The callbacks run on the thread "marshal-callbacks", not on the event loop: they hand things over by
        `loop.call_soon_threadsafe`.
        """
        return Opening(lambda: self._join(group, topics, options, keywords))

    async def _join(
        self, group: str, topics: Sequence[str], options: ConsumerOptions | None, keywords: Mapping[str, Any]
    ) -> AsyncConsumer[Any, Any]:
        given: Mapping[str, Any] = {"options": options, **keywords}
        joined: Consumer[Any, Any] = await self._threads.run(
            lambda: self._plain.consumer(group, topics, **given), Consumer.stop
        )
        return AsyncConsumer(joined, self._shared)


def _opening(plainly: Callable[P, Marshal]) -> Callable[P, Opening[AsyncMarshal]]:
    """Makes the function that connects as `plainly` does, with its parameters."""
    parameters = inspect.signature(plainly)

    def connect(*arguments: P.args, **named: P.kwargs) -> Opening[AsyncMarshal]:
        """Connects as `marshal_py.connect` does. The Marshal belongs to the event loop that runs when it is awaited."""
        option_names.check("connect", named, parameters.parameters)
        parameters.bind(*arguments, **named)  # raises TypeError here, and not only where the result is awaited
        return Opening(lambda: _connect(lambda: plainly(*arguments, **named)))

    connect.__qualname__ = "connect"
    returns = "Opening[AsyncMarshal]"
    connect.__signature__ = parameters.replace(return_annotation=returns)  # type: ignore[attr-defined]  # inspect reads it
    return connect


connect: Final = _opening(Marshal.connect)
"""Connects as `marshal_py.connect` does: `await` it, or use it in `async with`."""


async def _connect(plainly: Callable[[], Marshal]) -> AsyncMarshal:
    threads = Threads(ThreadPoolExecutor(VERBS_AT_ONCE_MAX, "marshal-verbs"))
    try:
        return AsyncMarshal(await threads.run(plainly, Marshal.close), threads)
    except BaseException:
        threads.close()
        raise
