"""The proxies of the rig: what passes a link, and what does not while it is struck."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from tests.rigs.links import Links
from tests.support.brokers import free_ports

TIMEOUT_S = 20.0


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server that answers each line with itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(connection: socket.socket) -> None:
            with connection, connection.makefile("rwb") as lines:
                try:
                    for line in lines:
                        lines.write(line)
                        lines.flush()
                except OSError:
                    pass

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


class Client:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)

    def close(self) -> None:
        self.socket.close()

    def ask(self, text: bytes) -> bytes:
        self.socket.sendall(text + b"\n")
        return self.socket.recv(100)

    def hears_nothing(self) -> None:
        self.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            self.socket.recv(100)
        self.socket.settimeout(TIMEOUT_S)


def test_what_a_struck_link_does(port: int) -> None:
    [listening] = free_ports(1)
    chance = random.Random(1)
    with Links({listening: port}) as links, closing(Client(listening)) as client:
        assert client.ask(b"whole") == b"whole\n"
        for kind in ("delay", "stall", "half_open"):
            struck = links.strike(kind, 1.0, chance, delay_s=0.01)
            assert len(struck) == 1
            client.socket.sendall(kind.encode() + b"\n")
            if kind != "delay":
                client.hears_nothing()
                links.heal(struck)
            assert client.socket.recv(100) == kind.encode() + b"\n"
            links.heal(struck)
        struck = links.strike("swallow", 1.0, chance)
        client.socket.sendall(b"swallowed\n")
        client.hears_nothing()
        links.heal(struck)
        with pytest.raises(ConnectionError):
            client.socket.recv(100)


def test_a_link_that_is_reset(port: int) -> None:
    [listening] = free_ports(1)
    with Links({listening: port}) as links:
        with closing(Client(listening)) as client:
            assert client.ask(b"whole") == b"whole\n"
            assert links.strike("reset", 1.0, random.Random(1)) == []
            with pytest.raises(ConnectionError):
                client.socket.recv(100)
        with closing(Client(listening)) as client:
            assert client.ask(b"a new one is whole") == b"a new one is whole\n"


def test_a_share_of_the_links(port: int) -> None:
    [listening] = free_ports(1)
    with Links({listening: port}) as links, ExitStack() as stack:
        clients = [stack.enter_context(closing(Client(listening))) for _ in range(10)]
        assert all(client.ask(b"x") == b"x\n" for client in clients)
        assert len(links.strike("stall", 0.3, random.Random(1))) == 3
        assert len(links.strike("stall", 0.01, random.Random(1))) == 1


def test_links_that_do_not_end_in_time_leave_no_thread(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rigs.links.END_S", 0.0)
    [listening] = free_ports(1)
    links = Links({listening: port})
    with ExitStack() as stack:
        with pytest.raises(TimeoutError), links:
            assert stack.enter_context(closing(Client(listening))).ask(b"whole") == b"whole\n"
        assert not links._thread.is_alive()
