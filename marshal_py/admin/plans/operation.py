"""The base of every admin operation, and the runner that drives one over a real log.

An operation reads the log without a session, sends records, waits, evicts silent sessions, and gives up in time. The
runner folds each record into the world and then calls `receive`. It calls `tick` at `deadline_ms`, and after records
were received, and does what the returned Step says. An operation does not see acknowledgements: it learns the result of
its records by reading them (T17), and sends a record again until it has read it. An Author signs its records (`by`).

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from shlex import quote
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct, field

from marshal_py.admin.views.pause_history import Pause, PauseHistory
from marshal_py.errors import (
    AdminFailed,
    AdminGaveUp,
    GroupDeleted,
    GroupMissing,
    GroupOpaque,
    InvalidOption,
    KeyNeeded,
    MarshalError,
    MessageTooLarge,
)
from marshal_py.log import replay
from marshal_py.log.reader import POLL_S, LogReader
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, Session, World
from marshal_py.protocol.member.advisory import PROBE
from marshal_py.protocol.time import FailureDetector, Liveness
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.codec import SigningKey, needs_key, signed
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition, check_id, route
from marshal_py.protocol.wire.records import EVICT_INTERVALS, ClaimingPartition, Evict, Note, Record, Signed
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.ports import ClusterAdmin, LogRecord, Transport

BY_BYTES_MAX: Final = 255  # of a text in a record (PROTOCOL.md 4.2)
RUN_BYTES: Final = 4  # two runs of one person at one moment must tell their records apart


class Author(NamedTuple):
    """The author of one run's records. `who`: the same for every run of a person on a machine; `by`: unique to this
    run."""

    who: str
    by: str
    key: SigningKey | None = None  # what it signs records with, in groups that have keys (rule 11)

    @classmethod
    def of(cls, user: str, host: str, tool: str, random: bytes) -> Author:
        """Returns the author for one run, unique by RUN_BYTES `random` bytes. Names that are too long are cut, never
        the unique part."""
        tail = f" {tool} run {random.hex()}"
        who = f"{user}@{host}".replace(" ", "_")
        left = BY_BYTES_MAX - len(tail.encode())
        who = who.encode()[:left].decode(errors="ignore")
        return cls(who, who + tail)

    def signed(self, reason: str) -> str:
        """Returns `by` with the reason behind a colon, cut to fit, for a record that has no field for the reason."""
        if not reason:
            return self.by
        return f"{self.by}: {reason}".encode()[:BY_BYTES_MAX].decode(errors="ignore")

    def wrote(self, by: str) -> bool:
        """Returns whether this very run wrote the record that is signed `by` (M1)."""
        return by == self.by or by.startswith(f"{self.by}:")

    def is_also(self, by: str) -> bool:
        """Returns whether the same person, on the same machine, wrote the record that is signed `by` (M2)."""
        return by.partition(" ")[0] == self.who


INTERVAL_MS: Final = 2_000  # the heartbeat interval by which an operation waits (T2): a consumer's default
THIRD_MS: Final = INTERVAL_MS // 3  # between two probes, and before a record is sent again
GRACE_INTERVALS: Final = 10  # how long an operation that gave up may take to read the end of its own pause (M9)
PATIENCE_MS: Final = 60_000  # plus the time to evict the slowest session

R = TypeVar("R")


class Progress(NamedTuple):
    """Reports an event of a running operation, for people."""

    kind: str  # asking, paused, renewed, released, evicted, moving, moved, ended, ...
    text: str = ""
    tp: TopicPartition | None = None
    session: int = NONE
    offset: int = NONE


class Step(Struct):
    """Says what the driver must do after one tick."""

    send: list[Record] = field(default_factory=list)  # to the group's log, in this order
    events: list[Progress] = field(default_factory=list)
    resolve_positions: bool = False  # look the wanted positions up, then call `positions_resolved`
    ended: bool = False


class GroupContext(NamedTuple):
    """What an operation works on: a world folded to the log's end, a group's name, and facts beyond the world."""

    world: World
    name: str
    pause_history: PauseHistory
    author: Author
    draw: Callable[[int], bytes]  # random bytes

    @property
    def group(self) -> Group | None:
        return self.world.groups.get(self.name)

    @property
    def own_pause(self) -> Pause | None:
        """Returns the running pause if this run made it (M1)."""
        pause = None if self.group is None else self.pause_history.running(self.group)
        return pause if pause is not None and self.author.wrote(pause.by) else None


class Terms(NamedTuple):
    """The terms on which an operation runs. `reason`: in the user's words, in its records (M1). `token`: of a running
    pause to work in. `adopt`: one of the same person on the same machine (M2). `take_over`: it takes anybody's.
    `duration_ms`: of a pause of its own unless renewed; None: pause.default_ms. `patience_ms`: how long the
    operation may take; None: `patience_of` the group."""

    reason: str = ""
    token: int | None = None
    adopt: bool = False
    take_over: bool = False
    duration_ms: int | None = None
    patience_ms: int | None = None


USUAL: Final = Terms()


class Operation:
    """Runs one operation on a group. Subclasses do the work in `act`. When it gives up, `close` undoes it."""

    creates = False  # whether it creates or revives a group; `act` then gets an empty group if there is none (F10.3)
    takes_pause = True  # whether its user can give it a running pause (M2)
    undone = "nothing was changed"  # what became of it if somebody else has paused the group

    def __init__(self, context: GroupContext, terms: Terms = USUAL) -> None:
        """Raises InvalidOption if the reason is too long."""
        if len(terms.reason.encode()) > BY_BYTES_MAX:
            raise InvalidOption("reason", terms.reason, f"at most {BY_BYTES_MAX} bytes: the records contain it")
        self.context: GroupContext = context
        self.terms: Terms = terms
        self.reason: str = terms.reason
        self.liveness: Liveness = Liveness(INTERVAL_MS, context.draw)
        self.detector: FailureDetector = FailureDetector(INTERVAL_MS)
        self.step: Step = Step()
        self.ended: bool = False
        self.error: MarshalError | None = None
        self.deadline_ms: int = 0
        self.patience_ms: int = patience_of(context.group) if terms.patience_ms is None else terms.patience_ms
        self.giving_up: MarshalError | None = None
        self.made: str = ""  # what is changed already, for an error
        self.began: Instant | None = None
        self._given_up_ms: int | None = None
        self._sent_ms: dict[Record, int] = {}
        self._probe_ms: int | None = None
        self._silent: set[int] = set()  # sessions that were reported as silent

    # --- for subclasses

    def act(self, group: Group, now: Instant) -> None:
        """Sends the records that are due, or ends the operation; at each tick until it gives up."""
        raise NotImplementedError

    def timeout_error(self) -> MarshalError:
        """Returns the error of an operation that has taken longer than `patience_ms`."""
        raise NotImplementedError

    def pause_ended(self, by: str) -> MarshalError:
        """Returns the error of an operation whose own pause somebody else has ended. `by`: that run; "" if unknown."""
        return AdminFailed(self.context.name, AdminFailed.PAUSE_ENDED, by or "somebody")

    def close(self, group: Group, now: Instant) -> bool:
        """After giving up, at each tick until it returns True: undoes what must not remain."""
        return True

    def may_land(self, group: Group) -> bool:
        """Returns whether a record that this run sent may still be accepted. An interrupted user is told so."""
        return False

    def close_error(self, error: MarshalError) -> MarshalError:
        """Returns the user's error if `close` takes too long. `error`: why the operation gave up."""
        return error

    def read(self, verdict: Verdict, now: Instant) -> None:
        """Takes a record of the group that was folded, with the fold's verdict on it."""

    def waits(self) -> bool:
        """Returns whether a silent session may have to be evicted. Then `tick` also sends probes, which prove that this
        operation was reading (T2)."""
        return True

    def positions_resolved(self, positions: Mapping[TopicPartition, int]) -> None:
        """Takes the offsets that the driver has looked up after a Step with `resolve_positions`."""

    # --- driving

    def receive(self, verdict: Verdict, now: Instant) -> None:
        if self.ended or verdict.group != self.context.name or verdict.record is None:
            return
        if isinstance(verdict.record, Note) and verdict.record.kind == PROBE:
            self.liveness.read_probe(verdict.record.text)
        self.read(verdict, now)

    def tick(self, now: Instant) -> Step:
        """Returns what the driver must do at `now`; it must call again by `deadline_ms`, monotonic."""
        step, group = self.step, self.context.group
        if group is None and self.creates:
            group = Group(self.context.name)
        if self.began is None:
            self.began = now
        if not self.ended and group is not None:
            self.detector.refresh(group, now, self.liveness.proven(now))
            if (group.deleted and not self.creates) or group.opaque_at != NONE:
                self.give_up(GroupDeleted(group.name) if group.deleted else GroupOpaque(group.name, group.opaque_at))
            elif now.mono_ms - self.began.mono_ms >= self.patience_ms:
                self.give_up(self.timeout_error())
            if self.giving_up is None and not self.ended:
                self.act(group, now)
            if self.giving_up is not None and not self.ended:
                self._finish(group, now)
        if not self.ended and self.waits() and (self._probe_ms is None or now.mono_ms - self._probe_ms >= THIRD_MS):
            self._probe_ms = now.mono_ms
            step.send.append(Note(NONE, PROBE, text=self.liveness.new_probe(now)))
        step.ended = self.ended
        self.step = Step()
        self.deadline_ms = now.mono_ms + THIRD_MS if group is None else self.detector.deadline_ms(now)
        return step

    def give_up(self, error: MarshalError) -> None:
        """Makes the operation stop, undo what must not remain, and end with the first such error."""
        if self.giving_up is None and not self.ended:
            self.giving_up = error

    def _finish(self, group: Group, now: Instant) -> None:
        error = self.giving_up
        assert error is not None
        if self._given_up_ms is None:
            self._given_up_ms = now.mono_ms
        if self.close(group, now):
            if isinstance(error, AdminGaveUp) and not error.waited_s:
                error = self.giving_up = AdminGaveUp(error.group, error.what, 0.0, pending=self.may_land(group))
            self.end(error)
        elif now.mono_ms - self._given_up_ms >= GRACE_INTERVALS * INTERVAL_MS:
            self.fail(self.close_error(error))

    def fail(self, error: MarshalError) -> None:
        """Ends the operation with `error`. If its own pause runs, as far as it has read, the error says that, too."""
        pause, group = self.context.own_pause, self.context.group
        if pause is not None and group is not None:
            until = datetime.fromtimestamp(pause.expires_ms / 1000, UTC).isoformat(timespec="seconds")
            command = f"marshal resume {quote(group.name)}{' --sign-with FILE' if group.keys else ''}"
            error = AdminFailed(group.name, AdminFailed.STILL_PAUSED, f"{self.made}{error}", command, until)
        self.end(error)

    def end(self, error: MarshalError | None = None) -> None:
        self.ended, self.error = True, error

    # --- shared by subclasses

    def send(self, record: Record, now: Instant) -> None:
        """Adds a record to this tick's Step unless it was sent less than THIRD_MS ago. Subclasses call it at each tick
        until they have read the result."""
        last = self._sent_ms.get(record)
        if last is None or now.mono_ms - last >= THIRD_MS:
            self._sent_ms[record] = now.mono_ms
            self.step.send.append(record)

    def sent(self, kind: type[R]) -> Iterator[R]:
        """Yields each record of this type that was sent. A record that was sent several times appears once."""
        return (record for record in self._sent_ms if isinstance(record, kind))

    def report(
        self, kind: str, text: str = "", tp: TopicPartition | None = None, session: int = NONE, offset: int = NONE
    ) -> None:
        self.step.events.append(Progress(kind, text, tp, session, offset))

    def evict_silent(self, group: Group, sessions: set[int], now: Instant) -> None:
        """Evicts those of the sessions that were silent for EVICT_INTERVALS while this operation was reading (T4,
        M4)."""
        for session in sorted(sessions):
            held = group.sessions[session]
            waited_ms = self.detector.session_waited_ms(session)
            if waited_ms >= EVICT_INTERVALS * held.join.interval_ms:
                if session not in self._silent:
                    self._silent.add(session)
                    self.report("evicting", held.join.client_id, session=session)
                # Every copy names the first wait that was long enough, so that `send` recognises the record.
                self.send(self._eviction(held, waited_ms), now)

    def _eviction(self, session: Session, waited_ms: int) -> Evict:
        for record in self.sent(Evict):
            if (record.session, record.observed) == (session.id, session.extended):
                return record
        return Evict(session.id, session.extended, waited_ms, self.context.author.signed(self.reason))


def patience_of(group: Group | None) -> int:
    """Returns how long an operation may take, in ms: a minute, plus twice the time to evict the slowest session."""
    longest = max((s.join.interval_ms for s in group.sessions.values()), default=0) if group is not None else 0
    return PATIENCE_MS + 2 * EVICT_INTERVALS * longest


def holders(group: Group, tps: set[TopicPartition] | None = None) -> dict[TopicPartition, int]:
    """Returns the owned partitions of `tps` (None: all) with their sessions; no claims on whole topics or the group."""
    return {p.tp: p.owner for p in group.claims.values() if p.tp.partition >= 0 and (tps is None or p.tp in tps)}


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
        self, transport: Transport, topic: str, group: str, timeout_s: float, author: Author | None = None
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
            self._world, group, self._pause_history, author or author_here(), secrets.token_bytes
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

    def begin_again(self, author: Author) -> bool:
        """Prepares for another call, of which `author` is the author: folds what is new, and forgets a ctrl-C. Returns
        False after a second ctrl-C: the thread that was abandoned may still use this connection."""
        if self._abandoned:
            return False
        self._interrupted_s = None
        self.context = self.context._replace(author=author)
        self.refresh()
        return True

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
            raise failed[0] from operation.error
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
        cause: MarshalError | None = None  # of the cluster
        try:
            while not operation.ended and not self._abandoned:
                if self._interrupted_s is not None or failed:
                    operation.give_up(AdminGaveUp(self._name, "the operation", 0.0))  # the first reason counts
                try:
                    self._turn(operation, None if failed else watcher, resolve)
                except MarshalError as error:
                    # One more turn tries to undo. What undoes is small, also where something else was too large.
                    if cause is not None and not isinstance(error, MessageTooLarge):
                        operation.fail(cause)  # the operation knows what is true now (M8)
                    cause = cause or error
                    operation.give_up(cause)
                except Exception as error:  # of the watcher
                    if failed:
                        raise
                    failed.append(error)
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()
            self._woken.release()

    def _turn(self, operation: Operation, watcher: Watcher | None, resolve: Resolve | None) -> None:
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
        if (refused := self._reader.log.refused()) is not None:
            raise refused

    def _resolve(self, operation: Operation, resolve: Resolve) -> None:
        try:
            operation.positions_resolved(resolve())
        except MarshalError as error:
            operation.give_up(error)

    def _append(self, record: Record) -> None:
        if self._world.genesis is None:  # the group's log has not begun, so no group is in it
            raise GroupMissing(self._name, "has never been used")
        value = sealed(self._world, self._name, record, self.context.author.key)
        self._reader.log.append(self._number, self._name.encode(), value)


def sealed(world: World, name: str, record: Record, key: SigningKey | None) -> bytes:
    """Returns the value to write, signed in a group with keys. Raises KeyNeeded without one of them."""
    assert world.genesis is not None
    incarnation, group = world.genesis.incarnation, world.groups.get(name)
    written: Record | Signed = record
    if group is not None and group.keys and needs_key(record):
        if key is None or key.public not in group.keys:
            raise KeyNeeded(name, tuple(each.hex() for each in group.keys), "" if key is None else key.public.hex())
        written = signed(record, name, incarnation, group.config_offset, key)
    return codec.encode(written, name, incarnation, world.writes_version(name))


def _claims_pin(record: Record | None) -> bool:
    return isinstance(record, ClaimingPartition) and not record.topic
