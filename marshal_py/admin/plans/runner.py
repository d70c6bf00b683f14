"""Drives one operation over a real log: reads, folds, calls its tick, sends, looks positions up.

Each operation has a connection of its own, folded to the log's end before anything is decided or written (L7). The
runner creates no topic and no group; only an operation that creates a group begins its log. It makes no protocol
decision.
"""

from __future__ import annotations

import getpass
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from marshal_py.admin.plans.operation import RUN_BYTES, Author, GroupContext, Operation, Progress
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.errors import AdminGaveUp, GroupMissing, KeyNeeded, MarshalError
from marshal_py.log import replay
from marshal_py.log.reader import POLL_S, LogReader
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE, PIN, TopicPartition, check_id, route
from marshal_py.protocol.wire.records import ClaimingPartition, Record, Signed
from marshal_py.protocol.wire.signatures import SigningKey, needs_key, signed
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.ports import ClusterAdmin, LogRecord, Transport

BEGIN_S: Final = 2.0  # before a Genesis that was not read is written again
ABANDON_S: Final = 1.0  # how long a second ctrl-C waits for the runner's thread, which checks every POLL_S
SAME_S: Final = 1.0  # a ctrl-C so soon after the first is the same one: `timeout -s INT` sends two, people press twice
LOOK_S: Final = 1.0  # how often a runner looks whether its operation has ended, although it is woken
FLUSH_S: Final = 5.0  # what a runner that closes may wait for its last records

ABANDONED: Final = "it was not undone: a pause that it made ends by itself when its time is over"

Watcher = Callable[[Progress], None]
Resolve = Callable[[], Mapping[TopicPartition, int]]


def author_here() -> Author:
    """Returns the author of this run's records: the user, the machine and random bytes."""
    from marshal_py.client.marshal import VERSION  # and all of the client, which commands that look do without

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = "unknown"
    return Author.of(user, socket.gethostname(), VERSION, secrets.token_bytes(RUN_BYTES))


class OperationRunner:
    """A connection to one group's log, and runs operations over it. A context manager."""

    topic: str
    timeout_s: float

    def __init__(
        self,
        transport: Transport,
        topic: str,
        group: str,
        timeout_s: float,
        author: Author | None = None,
        key: SigningKey | None = None,
    ) -> None:
        """Folds the group's log to its end. `context.group` is None for a group that was never used."""
        check_id("group", group)
        self.topic, self.timeout_s = topic, timeout_s
        self._clock = SystemClock()
        self._pause_history = PauseHistory(group)
        self.pinned_ms: int | None = None  # when the pin was claimed (ms since 1970); None: not in the records read
        self._name = group
        self._interrupted_s: float | None = None  # when the first ctrl-C came
        self._abandoned = False
        self._woken = threading.Lock()  # held until the operation has ended
        self._reader = LogReader(transport, topic, "admin", timeout_s)
        self.admin: ClusterAdmin = self._reader.admin
        try:
            root = self._reader.find_root()
            if root is None:
                raise GroupMissing(group, f"has never been used: no consumer has run with topic {topic!r}")
            self._number = route(group, root.partitions)
            self._world = self._reader.open_world(self._number)
            self.refresh()
            self._recall()
        except BaseException:
            self.close()
            raise
        self.context: GroupContext = GroupContext(
            self._world, group, self._pause_history, (author or author_here())._replace(key=key), secrets.token_bytes
        )

    def __enter__(self) -> OperationRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close(FLUSH_S)

    @property
    def incarnation(self) -> bytes:
        """Returns the incarnation of the coordination topic, which is a part of every token."""
        root = self._world.genesis or self._world.root
        return root.incarnation if root is not None else b""

    # --- reading

    def refresh(self) -> None:
        """Folds the records that were written since the log was last read."""
        (bounds,) = self._reader.bounds([self._number]).values()
        self._fold(self._reader.records({self._number: bounds.end}, {self._number: self._world.next_offset}))
        self._reader.follow(self._number, self._world.next_offset)  # where later polls go on, even of an empty log

    def _recall(self) -> None:
        """Looks up what the group's pause and its pin say, if the snapshot at which the fold began is newer."""
        group = self._world.groups.get(self._name)
        if group is None:
            return
        self._pause_history.recall(group, self._look_up)
        pin = group.partitions.get(PIN)
        if pin is not None and pin.owner != NONE and self.pinned_ms is None:
            claim = replay.record_at(self._reader.log, self._number, pin.epoch)
            self.pinned_ms = None if claim is None else claim.timestamp_ms

    def _look_up(self, offset: int) -> Record | None:
        found = replay.record_at(self._reader.log, self._number, offset)
        return None if found is None else codec.open_record(found.value, self._world.crc_seed)

    def _fold(self, records: Iterable[LogRecord], operation: Operation | None = None) -> None:
        """Folds records of the group's log, and skips others. `operation` receives each verdict."""
        now = self._clock.now()
        for record in records:
            if record.log != self._number:
                continue
            verdict = rationalizer.apply(self._world, record.offset, record.value)
            self._pause_history.read(verdict)
            if verdict.accepted and _claims_pin(verdict.record) and verdict.group == self._name:
                self.pinned_ms = record.timestamp_ms
            if operation is not None:
                operation.receive(verdict, now)

    def begin(self) -> None:
        """Begins the group's log if nobody has: writes a copy of the root, and waits until such a copy is read (L4)."""
        root = self._reader.root
        assert root is not None  # it was found when the runner was opened
        deadline = time.monotonic() + self.timeout_s
        while self._world.genesis is None:
            self._reader.log.append(self._number, b"", codec.encode(root, "", root.incarnation))
            records = self._reader.poll(BEGIN_S)
            if not records and time.monotonic() >= deadline:
                raise self._reader.unreachable(self._number)
            self._fold(records)

    # --- driving

    def run(self, operation: Operation, watcher: Watcher | None = None, resolve: Resolve | None = None) -> None:
        """Runs the operation to its end and raises its error. `watcher` gets each event; `resolve` looks new positions
        up. Ctrl-C makes it give up and undo; a second one, a second later, abandons it. It runs in a thread of its own:
        a KeyboardInterrupt between the poll of a record and its fold would lose the record."""
        failed: list[BaseException] = []
        # Not by join(): one that is interrupted counts its thread as ended in Python 3.11, while it runs on. Nor by
        # Event.wait(), which is Python: of two signals at once the second one breaks its lock. This waits in C.
        done = threading.Event()
        self._woken.acquire(blocking=False)
        thread = threading.Thread(
            target=self._work, args=(operation, watcher, resolve, failed, done), name="marshal-operation"
        )
        thread.daemon = True
        thread.start()
        try:
            self._wait(done)
        except KeyboardInterrupt:  # came while `_wait` took note of another one
            if self._abandoned:
                raise
            self._interrupted_s = self._interrupted_s or time.monotonic()
            self._wait(done)
        if failed:
            raise failed[0]
        if operation.error is not None:
            raise operation.error from (None if self._interrupted_s is None else KeyboardInterrupt())

    def _wait(self, done: threading.Event) -> None:
        """Waits for the end of the operation, and takes note of ctrl-C."""
        while not done.is_set():
            try:
                self._woken.acquire(timeout=LOOK_S)  # a signal may come when it has just returned
            except KeyboardInterrupt:
                now_s = time.monotonic()
                if self._interrupted_s is None:
                    self._interrupted_s = now_s
                elif now_s - self._interrupted_s >= SAME_S:
                    self._abandoned = True
                    self._woken.acquire(timeout=ABANDON_S)
                    raise KeyboardInterrupt(ABANDONED) from None

    def _work(
        self,
        operation: Operation,
        watcher: Watcher | None,
        resolve: Resolve | None,
        failed: list[BaseException],
        done: threading.Event,
    ) -> None:
        try:
            while not operation.ended and not self._abandoned:
                if self._interrupted_s is not None:
                    operation.give_up(AdminGaveUp(self._name, "the operation", 0.0))  # the first reason counts
                self._turn(operation, watcher, resolve)
        except MarshalError as error:
            operation.end(error)  # the log cannot be read further; the operation knows what is true now (M8)
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()
            self._woken.release()

    def _turn(self, operation: Operation, watcher: Watcher | None, resolve: Resolve | None) -> None:
        if (refused := self._reader.log.refused()) is not None:
            raise refused
        step = operation.tick(self._clock.now())
        for record in step.send:
            self._append(record)
        for event in step.events:
            if watcher is not None:
                watcher(event)
        if step.ended:
            return
        if step.resolve_positions and resolve is not None:
            self._resolve(operation, resolve)
            return
        left_s = (operation.deadline_ms - self._clock.now().mono_ms) / 1000
        self._fold(self._reader.poll(min(max(left_s, 0.0), POLL_S)), operation)

    def _resolve(self, operation: Operation, resolve: Resolve) -> None:
        try:
            operation.positions_resolved(resolve())
        except MarshalError as error:
            operation.give_up(error)

    def _append(self, record: Record) -> None:
        genesis = self._world.genesis
        if genesis is None:  # the group's log has not begun, so no group is in it
            raise GroupMissing(self._name, "has never been used")
        value = sealed(self._world, self._name, genesis.incarnation, record, self.context.author.key)
        self._reader.log.append(self._number, self._name.encode(), value)


def sealed(world: World, name: str, incarnation: bytes, record: Record, key: SigningKey | None) -> bytes:
    """Returns the value to write, signed in a group with keys. Raises KeyNeeded without one of them."""
    group = world.groups.get(name)
    written: Record | Signed = record
    if group is not None and group.keys and needs_key(record):
        if key is None or key.public not in group.keys:
            raise KeyNeeded(name, tuple(each.hex() for each in group.keys), "" if key is None else key.public.hex())
        written = signed(record, name, incarnation, group.config_offset, key)
    return codec.encode(written, name, incarnation, world.writes_version(name))


def _claims_pin(record: Record | None) -> bool:
    return isinstance(record, ClaimingPartition) and not record.topic
