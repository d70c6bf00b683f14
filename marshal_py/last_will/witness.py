"""The witness: it waits until processes end, reads what their sessions kept, and publishes it (PROTOCOL.md T19).

Its only client of Kafka is a producer, which is connected before it is needed. This file imports little, so that a
witness takes little memory (bootstrap in __main__.py). One thread does all; nothing in it waits for a broker, so a
cluster that does not answer keeps no other will waiting.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from marshal_py.errors import InvalidOption, MarshalError
from marshal_py.last_will import death, kept_file
from marshal_py.last_will.death import Watch
from marshal_py.last_will.messages import Hello, Inbox, Message, Register, Welcome, Withdraw, send
from marshal_py.protocol.wire import codec, records
from marshal_py.protocol.wire.records import Sign
from marshal_py.transport import bare_producer

CONNECTIONS_MAX: Final = 1_000  # processes under one `marshal run`; more get no witness
WILLS_MAX: Final = 1_000  # of one process
PUBLISH_POLL_S: Final = 0.01  # while records wait for their acknowledgements
IDLE_POLL_S: Final = 10.0  # librdkafka's events are taken at least so often
WARM_S: Final = 5.0  # how long a producer may take to learn where the topic is, before it is needed


class Registered(NamedTuple):
    """One session whose will this witness executes."""

    session: Register
    kept_fd: int
    producer: Any  # confluent_kafka's


class Connection:
    """What a witness knows of one process: its socket, its watch, its sessions."""

    def __init__(self, witness: Witness, source: socket.socket) -> None:
        self.witness = witness
        self.inbox: Inbox = Inbox(source)
        self.watch: Watch | None = None
        self.wills: dict[int, Registered] = {}

    def read(self) -> None:
        """Takes the messages that have come."""
        for message in self.inbox.read():
            self._take(message)
        if self.inbox.closed:
            self.witness.selector.unregister(self.inbox.source)
            self.notice(Sign.CONNECTION_CLOSED)
            # One whose descriptors were lost is dropped with its wills: it registers all of them anew.
            if not self.wills or self.inbox.lost_fds:
                self.drop()

    def _take(self, message: Message) -> None:
        fd = self.inbox.fds.popleft() if isinstance(message, Hello | Register) and self.inbox.fds else None
        match message:
            case Hello() if self.watch is None:
                try:
                    watch = death.watch(message.pid, fd)
                except OSError:
                    self.inbox.closed = True  # it has ended already, or cannot be watched: nothing is registered
                    return
                try:
                    self.witness.selector.register(watch, selectors.EVENT_READ, self.look)
                except OSError:  # a descriptor that cannot be waited for
                    watch.close()
                    self.inbox.closed = True
                    return
                self.watch = watch
                with contextlib.suppress(OSError):
                    send(self.inbox.source, Welcome(self.witness.name))
            case Register() if fd is not None and self.watch is not None and len(self.wills) < WILLS_MAX:
                self._withdraw(message.number)
                with contextlib.suppress(InvalidOption):  # settings that make no producer
                    producer = self.witness.producer(message.settings, message.topic)
                    self.wills[message.number] = Registered(message, fd, producer)
                    return
                os.close(fd)
            case Withdraw():
                self._withdraw(message.number)
            case _:
                if fd is not None:
                    os.close(fd)

    def _withdraw(self, number: int) -> None:
        known = self.wills.pop(number, None)
        if known is not None:
            os.close(known.kept_fd)

    def look(self) -> None:
        """Acts if the process has ended. Messages that it sent before count first: a session may have left cleanly."""
        assert self.watch is not None
        if not self.watch.ended():
            return
        if not self.inbox.closed:
            for message in self.inbox.read():
                self._take(message)
            self.witness.selector.unregister(self.inbox.source)
            self.inbox.closed = True
        self.notice(Sign.ENDED)
        self.drop()

    def settle(self) -> None:
        """Takes what the process has said so far, and acts if it has ended."""
        if not self.inbox.closed:
            self.read()
        if self.watch is not None and self in self.witness.connections:
            self.look()

    def notice(self, sign: Sign) -> None:
        """Publishes the wills of the process if this sign proves its death."""
        if records.proves_death(sign):
            how = self.witness.how(self.watch.pid) if self.watch is not None and self.watch.pid else ""
            for number in list(self.wills):
                self.witness.publish(self.wills[number], how)
                self._withdraw(number)

    def drop(self) -> None:
        """Forgets the process."""
        if self in self.witness.connections:
            self.witness.connections.discard(self)
            for number in list(self.wills):
                self._withdraw(number)
            if self.watch is not None:
                self.witness.selector.unregister(self.watch)
                self.watch.close()
            if not self.inbox.closed:
                self.witness.selector.unregister(self.inbox.source)
            self.inbox.close()


class Witness:
    """Waits for the end of the processes that are connected to it."""

    name: str
    how: Callable[[int], str]

    def __init__(self, name: str, make_producer: Callable[[dict[str, Any]], Any], how: Callable[[int], str]) -> None:
        """Makes a witness without connections. `name`: for people. `how(pid)` returns how a process ended, in words; ""
        if that is not known."""
        self.name, self.how = name, how
        self.selector: selectors.DefaultSelector = selectors.DefaultSelector()
        self.connections: set[Connection] = set()
        self.unacknowledged: int = 0  # records
        self._make_producer = make_producer
        self._producers: dict[str, Any] = {}

    @property
    def busy(self) -> bool:
        """Returns whether a process may still need this witness, or a record waits for its acknowledgement."""
        return bool(self.connections) or self.unacknowledged > 0

    def connect(self, source: socket.socket) -> None:
        """Takes the other end of a consumer process's socket, and what has come through it. A process that has said
        hello can be named when it ends, before anybody collects its status."""
        if len(self.connections) >= CONNECTIONS_MAX:
            source.close()
            return
        connection = Connection(self, source)
        self.connections.add(connection)
        self.selector.register(source, selectors.EVENT_READ, connection.read)
        connection.read()

    def close(self) -> None:
        """Forgets all processes."""
        for connection in list(self.connections):
            connection.drop()
        self.selector.close()

    def step(self, timeout_s: float = IDLE_POLL_S) -> None:
        """Waits until something happens, for `timeout_s` seconds at most, and handles it."""
        timeout_s = PUBLISH_POLL_S if self.unacknowledged else timeout_s
        # A process that was stopped beyond the timeout is told of nothing, whatever has happened meanwhile.
        for key, _ in self.selector.select(timeout_s) or self.selector.select(0):
            # An earlier event of this round may have closed it, and opened something else under its number.
            if self.selector.get_map().get(key.fd) is key:
                key.data()
        for producer in self._producers.values():
            producer.poll(0)

    def producer(self, settings: dict[str, Any], topic: str) -> Any:
        """Returns a producer with these settings, one for all sessions that have the same. It connects at once. Raises
        InvalidOption if librdkafka refuses the settings."""
        key = repr(sorted(settings.items()))
        if key not in self._producers:
            self._producers[key] = made = self._make_producer(settings)
            task = partial(bare_producer.learn, made, topic, WARM_S)
            threading.Thread(target=task, name="marshal-warm", daemon=True).start()
        return self._producers[key]

    def publish(self, registered: Registered, how: str) -> None:
        """Sends what the session has kept. librdkafka tries until the timeout of the settings (two intervals)."""
        session = registered.session
        will = kept_file.read(registered.kept_fd)
        if will is None:
            return
        for record in records.records_of(will, how):
            with contextlib.suppress(MarshalError):  # a record out of bounds, which a sound client does not keep
                value = codec.encode(record, session.group, session.incarnation, will.version)
                key = session.group.encode()
                # What cannot be queued is freed by the Leave, or by an eviction.
                self.unacknowledged += bare_producer.enqueue(
                    registered.producer, session.topic, session.log, key, value, self._acknowledged
                )

    def _acknowledged(self, _error: object, _message: object) -> None:
        """Counts a record that was written, or given up: nobody would read an error here."""
        self.unacknowledged -= 1
