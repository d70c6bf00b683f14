"""A TCP proxy in front of each broker: the links between clients and brokers, which can be made slow, silent or dead.

Each connection is a link of its own. A fault strikes a seeded share of the links that are open, and new ones stay
whole, as when one cable of many is bad.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Final

CHUNK: Final = 64 * 1024
END_S: Final = 20.0  # for the end of connections that were cut
KINDS: Final = ("delay", "stall", "swallow", "half_open", "reset")
RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST


class Link:
    """One connection. `flows`: cleared while nothing passes. `swallows`: answers are read and dropped."""

    def __init__(self, client: asyncio.StreamWriter, broker: asyncio.StreamWriter) -> None:
        self.client, self.broker = client, broker
        self.flows = asyncio.Event()
        self.flows.set()
        self.delay_s, self.swallows = 0.0, False

    def cut(self) -> None:
        for writer in (self.client, self.broker):
            sock: socket.socket = writer.get_extra_info("socket")
            if not writer.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                writer.transport.abort()


class Links:
    """The proxies of a cluster, in a thread of their own. `targets`: listening port -> the broker's port. A context
    manager."""

    def __init__(self, targets: Mapping[int, int]) -> None:
        self._targets = targets
        self._links: set[Link] = set()
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links")

    def __enter__(self) -> Links:
        self._thread.start()
        for port, target in self._targets.items():
            asyncio.run_coroutine_threadsafe(self._listen(port, target), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        finally:  # or the thread would keep the process
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def strike(self, kind: str, share: float, chance: random.Random, delay_s: float = 0.0) -> list[Link]:
        """Strikes a share of the open links, at least one, and returns them."""
        return asyncio.run_coroutine_threadsafe(self._strike(kind, share, chance, delay_s), self._loop).result()

    def heal(self, links: list[Link]) -> None:
        """Ends what `strike` began. What was swallowed is gone, so those connections end."""
        asyncio.run_coroutine_threadsafe(self._heal(links), self._loop).result()

    async def _strike(self, kind: str, share: float, chance: random.Random, delay_s: float) -> list[Link]:
        links = sorted(self._links, key=lambda link: str(link.client.get_extra_info("peername")))
        struck = chance.sample(links, min(len(links), max(1, round(share * len(links)))))
        for link in struck:
            if kind == "delay":
                link.delay_s = delay_s
            elif kind == "swallow":
                link.swallows = True
            elif kind == "reset":
                link.cut()
            else:  # a half-open one looks the same until it heals
                link.flows.clear()
        return [] if kind == "reset" else struck

    async def _heal(self, links: list[Link]) -> None:
        for link in links:
            if link.swallows:
                link.cut()
            link.delay_s = 0.0
            link.flows.set()

    async def _listen(self, port: int, target: int) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                from_broker, to_broker = await asyncio.open_connection("127.0.0.1", target)
            except OSError:
                writer.transport.abort()
                return
            link = Link(writer, to_broker)
            self._links.add(link)
            try:
                await asyncio.gather(
                    self._pump(link, reader, to_broker, answers=False),
                    self._pump(link, from_broker, writer, answers=True),
                )
            finally:
                self._links.discard(link)

        self._servers.append(await asyncio.start_server(accept, "127.0.0.1", port))

    async def _pump(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        try:
            while data := await reader.read(CHUNK):
                if link.delay_s:
                    await asyncio.sleep(link.delay_s)
                await link.flows.wait()
                if not (answers and link.swallows):
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for link in list(self._links):
            link.cut()
            link.flows.set()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), END_S)
