"""One thread that polls the data clients of all asyncio consumers of one Marshal, so that no event loop has to.

A consumer asks for messages by a Request; the thread polls its data source until messages come or the request expires,
and hands them to the consumer's event loop. It touches nothing else: buffers are filled on the loop's thread, and no
code of the user runs here. confluent-kafka cannot wait for several clients at once. So if several consumers use the
thread, it blocks in one of them for some ms at most and looks at the others in between.
"""

from __future__ import annotations

import threading
import time
from typing import Final, NamedTuple, Protocol

from marshal_py.transport.ports import Chunk

ALONE_SLICE_S: Final = 0.25  # one poll, if one consumer uses the thread; a message ends it at once
SHARED_SLICE_S: Final = 0.005  # one poll, if several do: messages of the others may come so much later
# The same when no message has come for QUIET_S: with shorter ones, waiting would take more than 1 % of a core.
SHARED_SLICE_QUIET_S: Final = 0.02
QUIET_S: Final = 1.0


class Request(NamedTuple):
    """Asks for at most `max_messages` messages before `deadline` (seconds of the monotonic clock)."""

    max_messages: int
    deadline: float


class Client(Protocol):
    """Declares what the thread needs of a consumer."""

    def pull(self, timeout_s: float, max_messages: int) -> list[Chunk]:
        """Polls the data source. Called on the receiver's thread."""

    def answer(self, request: Request, chunks: list[Chunk], error: Exception | None) -> None:
        """Takes what came for a request, or the error of the data source. Called on the receiver's thread."""


class Receiver:
    """Polls for any number of consumers, each of which has at most one request at a time."""

    def __init__(self) -> None:
        self._clients: set[Client] = set()  # from their first request on
        self._requests: dict[Client, Request] = {}
        self._asked = threading.Condition()
        self._closed = False
        self._latest: Client | None = None  # whose messages came last: probably the next ones are its, too
        self._came_at = 0.0  # when they came, in seconds of the monotonic clock
        self._thread: threading.Thread | None = None  # from the first request on

    def ask(self, client: Client, request: Request) -> None:
        """Begins to poll for `client`. Its request before is forgotten, though it may still be answered."""
        with self._asked:
            closed = self._closed
            if not closed:
                self._clients.add(client)
                self._requests[client] = request
                self._asked.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="marshal-receiver", daemon=True)
                    self._thread.start()
        if closed:
            client.answer(request, [], None)

    def forget(self, client: Client) -> None:
        """Polls no more for `client`, apart from a poll that is running."""
        with self._asked:
            self._clients.discard(client)
            self._requests.pop(client, None)

    def close(self) -> None:
        """Ends the thread after the poll that is running, and answers what is asked. Does not wait for that."""
        with self._asked:
            self._closed = True
            self._asked.notify()

    def _run(self) -> None:
        while (asked := self._waiting()) is not None:
            if len(asked) == 1 or not any([self._serve(client, request, 0.0) for client, request in asked]):
                self._serve(*asked[0], self._slice_s())
        with self._asked:
            left = list(self._requests.items())
        for client, request in left:
            client.answer(request, [], None)

    def _slice_s(self) -> float:
        if len(self._clients) == 1:
            return ALONE_SLICE_S
        return SHARED_SLICE_S if time.monotonic() - self._came_at < QUIET_S else SHARED_SLICE_QUIET_S

    def _waiting(self) -> list[tuple[Client, Request]] | None:
        """Waits for requests. Returns them, that of the consumer whose messages came last first; None at the end."""
        with self._asked:
            while not self._requests and not self._closed:
                self._asked.wait()
            if self._closed:
                return None
            return sorted(self._requests.items(), key=lambda one: one[0] is not self._latest)

    def _serve(self, client: Client, request: Request, slice_s: float) -> bool:
        """Polls once for up to `slice_s` seconds. Returns whether that answered the request."""
        chunks: list[Chunk] = []
        failed: Exception | None = None
        try:
            left_s = request.deadline - time.monotonic()
            chunks = client.pull(max(0.0, min(slice_s, left_s)), request.max_messages)
        except Exception as error:  # the consumer raises it; the others are still polled for
            failed = error
        if not chunks and failed is None and time.monotonic() < request.deadline:
            return False
        if chunks:
            self._latest, self._came_at = client, time.monotonic()
        with self._asked:
            if self._requests.get(client) is request:
                del self._requests[client]
        client.answer(request, chunks, failed)
        return True
