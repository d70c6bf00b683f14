"""What a consumer process and its witness say to each other, over a Unix socket that only the two hold.

A message is its length, then MessagePack. File descriptors travel with the length: the process's pidfd with Hello, the
kept file with Register. The settings of the cluster go this way and no other: never on a command line, never in a log.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from struct import Struct as Pack
from typing import Any, Final

from msgspec import DecodeError, Struct
from msgspec.msgpack import Decoder, Encoder

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024  # settings may hold certificates; more is no message of ours
DESCRIPTORS_MAX: Final = 8  # in one read: each message has one at most
READ_BYTES: Final = 65_536


class Hello(Struct, tag="hello"):
    """Begins a connection. With it comes a pidfd of the sender, where there is one."""

    pid: int


class Register(Struct, tag="register"):
    """Has the witness end a session if the process dies. With it comes the kept file. `number` names the consumer on
    this connection. `settings`: librdkafka's, for the producer. `log`: the number of the partition of the coordination
    topic."""

    number: int
    group: str
    incarnation: bytes
    topic: str
    log: int
    settings: dict[str, Any]


class Withdraw(Struct, tag="withdraw"):
    """Takes a registration back, because the session has ended."""

    number: int


class Welcome(Struct, tag="welcome"):
    """Answers Hello: the witness watches the process. `name` is for people."""

    name: str


Message = Hello | Register | Withdraw | Welcome

_LENGTH: Final = Pack(">I")
_ENCODER: Final = Encoder()
_DECODER: Final = Decoder(Message)


def send(to: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Sends a message. Raises OSError if the other side is gone, or does not read for the socket's timeout."""
    body = _ENCODER.encode(message)
    socket.send_fds(to, [_LENGTH.pack(len(body))], list(fds))
    to.sendall(body)


def readable(source: socket.socket, timeout_s: float) -> bool:
    """Waits for `timeout_s` seconds at most; tells whether there is something to read, or the end of the stream."""
    poller = select.poll()  # select.select knows no descriptor above 1,023
    poller.register(source, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


class Inbox:
    """Reads messages from one socket, without waiting."""

    def __init__(self, source: socket.socket) -> None:
        self.source = source
        self.closed: bool = False  # the other side has closed it, or sent what is no message, or descriptors were lost
        self.lost_fds: bool = False  # this process had no room for a descriptor that came
        self.fds: deque[int] = deque()  # received and not taken yet, in the order of their messages
        self._bytes = bytearray()

    def read(self) -> list[Message]:
        """Returns the messages that have come. Sets `closed` at the end of the stream, and where the kernel has dropped
        a descriptor: nobody knows then to which message the others belong."""
        found: list[Message] = []
        while not self.closed and readable(self.source, 0.0):
            try:
                data, fds, flags, _ = socket.recv_fds(self.source, READ_BYTES, DESCRIPTORS_MAX)
            except OSError:
                data, fds, flags = b"", [], 0
            for fd in fds:
                os.set_inheritable(fd, False)
            self.fds += fds
            self._bytes += data
            self.lost_fds = bool(flags & socket.MSG_CTRUNC)
            self.closed = not data or self.lost_fds
            found += self._whole()
        return found

    def _whole(self) -> list[Message]:
        found: list[Message] = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + length
            if length > MESSAGE_BYTES_MAX:
                self.closed = True
                break
            if len(self._bytes) < end:
                break
            try:
                found.append(_DECODER.decode(self._bytes[_LENGTH.size : end]))
            except DecodeError:
                self.closed = True
                break
            del self._bytes[:end]
        return found

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.popleft())
        self.source.close()
