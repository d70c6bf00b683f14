"""One simulated operating system process: its machine's clocks, its reader of the log, its producer, how it is stopped.

Client, Query and AdminProcess are such processes. This file has what happens to any process on a bad network, and no
protocol decision.
Every event of a process goes through `Environment.schedule`, which holds events back while the process is stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Protocol

from marshal_py.errors import CoordinationError, TopicRecreated
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import Instant, TopicPartition, route
from marshal_py.protocol.wire.records import Genesis, Record
from marshal_sim.cluster.broker import MISSING, Broker
from marshal_sim.cluster.clock import MachineClock
from marshal_sim.cluster.faults import NetworkFaults
from marshal_sim.cluster.log_reader import starting_world

Step = Callable[[Any], None]
GENESIS_MS = 5_000  # between two attempts to write a Genesis, as in client/driver/loop.py


class Environment(Protocol):
    """Declares what a process needs of the cluster around it."""

    now_ms: int
    events: int
    rng: Random
    broker: Broker
    network_faults: NetworkFaults

    def schedule(self, delay_ms: int, who: Process | None, step: Step, argument: Any = None) -> None: ...
    def sent(self, who: Process, value: bytes) -> None: ...
    def folded(self, who: Process, first: int, count: int) -> None: ...
    def digest(self, who: Process) -> None: ...
    def stopped(self, who: Process, error: CoordinationError) -> None: ...
    def new_genesis(self) -> Genesis: ...
    def begins_late(self, who: Process) -> bool: ...
    def refused(self, who: Process, tp: TopicPartition) -> None: ...


class ThreadGone(BaseException):
    """Ends what a thread does that was stopped when its process died. No `except Exception` of the client meets it."""


class InFlightRecord:
    """A record on its way to the log."""

    __slots__ = ("landed", "log", "value")

    landed: bool
    log: int
    value: bytes

    def __init__(self, log: int, value: bytes) -> None:
        self.log, self.value, self.landed = log, value, False


class Process:
    """Simulates a process with one World, one reader of the log and one producer."""

    def __init__(self, environment: Environment, number: int, name: str, group: str, clock: MachineClock) -> None:
        self.environment = environment
        self.number = number
        self.name = name
        self.group = group
        self.clock = clock
        self.topic_id: int = -1  # the id of the topic whose root it has read
        self.log: int = 0  # number of the log that it reads: 0 until the root says which (L2, L3)
        self.world: World = World()
        self.dead = False
        self.frozen: bool = False
        self.lagging = False  # its reader is cut off from the broker, its producer is not
        self.forked = False  # it has read what an unclean election undid; its next fetch says so (KIP-320)
        self.uplink_ms = 0  # by how much later this process's records arrive
        self.held_steps: deque[tuple[Step, Any]] = deque()
        self._thaw_number = 0
        self._fetching = False
        self._newest_arrival_ms = 0
        self._sleeping_ms = 0
        self._genesis_due_ms = 0

    def now(self) -> Instant:
        return self.clock.read(self.environment.now_ms)

    def boot_ns(self) -> int:
        return self.now().boot_ms * 1_000_000

    # --- stopped and started by the operating system

    def freeze(self, duration_ms: int, asleep: bool = False) -> None:
        """Stops the process for `duration_ms`, as SIGSTOP does. With `asleep`, the whole machine sleeps."""
        if self.frozen or self.dead:
            return
        self.frozen = True
        self._thaw_number += 1
        self._sleeping_ms = duration_ms if asleep else 0
        self.environment.schedule(duration_ms, None, self._thaw, self._thaw_number)

    def _thaw(self, number: int) -> None:
        if number == self._thaw_number and self.frozen:
            self.thaw(self._sleeping_ms)

    def thaw(self, slept_ms: int = 0) -> None:
        """Lets the process continue: first the step at which it stopped, then the steps that were held back."""
        self.frozen = False
        self.clock.sleep(slept_ms)
        while self.held_steps and not self.frozen and not self.dead:
            step, argument = self.held_steps.popleft()
            step(argument)

    def stall(self, step: Step, argument: Any) -> bool:
        """Stops this process at this point, if the seed says so. Returns True if it did.

        `step` is then called, with `argument`, when the process continues.
        """
        duration_ms = self.environment.network_faults.stall_ms()
        if not duration_ms:
            return False
        self.held_steps.appendleft((step, argument))
        self.freeze(duration_ms)
        return True

    # --- reading

    def wake_reader(self) -> None:
        """Schedules a fetch of the log, unless one is under way. Called when the log may have grown."""
        if self._fetching or self.dead:
            return
        self._fetching = True
        self.environment.schedule(self.environment.network_faults.read_ms(), self, self._arrived)

    def _arrived(self, _: None) -> None:
        """Folds the records that a fetch brought. They need not be all that the log holds by now."""
        environment = self.environment
        if environment.broker.reads_down_until_ms > environment.now_ms or self.lagging:
            environment.broker.held.append(
                lambda: environment.schedule(environment.network_faults.read_ms(), self, self._arrived)
            )
            return
        self._fetching = False
        if self.forked:
            end = len(environment.broker.logs[self.log].values)
            self.log_failed(TopicRecreated(self.log, f"offset {self.world.next_offset}", f"another log, up to {end}"))
            return
        if self.log >= len(environment.broker.logs):
            self.check_topic(None)  # fewer logs than the root says (L8)
            return
        log = environment.broker.logs[self.log]
        end = len(log.values)
        if self.world.next_offset < log.first or (
            self.world.next_offset == 0 and end and environment.begins_late(self)
        ):
            try:
                at = end if log.first else int(environment.rng.random() * (end + 1))  # perhaps an older snapshot
                began = starting_world(environment.broker, self.log, self.world.root, at)
            except CoordinationError as error:
                self.log_failed(error)
                return
            self.begin(began)
        if end < self.world.next_offset:
            self.check_topic(None)  # the log's end lies below what was read (L8)
            return
        upto = environment.network_faults.cut(self.world.next_offset, end)
        if upto < end:
            self.wake_reader()
        if self.world.next_offset < upto:
            self.fold_to(upto)
        elif not end:
            self.act(None)  # an empty log: a client has to write the Genesis

    def fold_to(self, upto: int) -> None:
        """Folds the log up to the offset `upto`, record by record, then acts on what was read."""
        world, environment = self.world, self.environment
        values = environment.broker.logs[self.log].values
        first = world.next_offset
        if self.log == 0 and first == world.began_at:
            self.topic_id = environment.broker.topic_id
        now = self.clock.read(environment.now_ms)
        for offset in range(first, upto):
            value = values[offset]
            if value is MISSING:
                continue  # the next record that is there shows the gap (L8)
            try:
                verdict = rationalizer.apply(world, offset, value)
            except CoordinationError as error:
                self.log_failed(error)
                return
            if world.next_offset % CHECKPOINT_OFFSETS == 0:
                environment.digest(self)
            self.read(verdict, now)
            if self.dead:
                break
        environment.folded(self, first, world.next_offset - first)
        if not self.dead and not self.stall(self.look, None):
            self.look(None)

    def look(self, _: None) -> None:
        """Acts on the records that were read."""
        self.act(None)

    def read(self, verdict: Verdict, now: Instant) -> None:
        """Takes the verdict on a record that was just folded."""
        raise NotImplementedError

    def begin(self, world: World) -> None:
        """Continues from this world, which is a confirmed snapshot or the log's beginning (N9)."""
        self.world = world

    def act(self, _: None) -> None:
        """Does what is due. Called after records were read, and when a deadline has come."""
        raise NotImplementedError

    def log_failed(self, error: CoordinationError) -> None:
        """Ends the process because the log cannot be folded any further."""
        self.environment.stopped(self, error)
        self.end_with(error)

    def check_topic(self, _: None) -> None:
        """Ends the process if the topic was created again. client/driver/loop.py, too, checks this from time to
        time."""
        if self.topic_id != self.environment.broker.topic_id:
            self.log_failed(
                TopicRecreated(self.log, f"topic id {self.topic_id}", str(self.environment.broker.topic_id))
            )

    def end_with(self, error: CoordinationError) -> None:
        """Ends the process with this error."""
        raise NotImplementedError

    # --- opening, as client/driver/loop.py and admin/plans/operation.py do

    def opened(self) -> bool:
        """Returns True if the group's log is folded to its end and has a Genesis.

        Otherwise takes a step towards that (reads on, writes a Genesis, or moves from log 0 to the group's log) and
        returns False.
        """
        world, broker = self.world, self.environment.broker
        if self.log >= len(broker.logs):
            return False
        if world.next_offset < len(broker.logs[self.log].values):
            self.wake_reader()
        elif world.genesis is None:
            self._write_genesis()
        elif self.log == 0 and self.log_of(world.genesis):
            self.log = self.log_of(world.genesis)
            self.world = World(self.log, world.genesis)
            self.wake_reader()
        else:
            return True
        return False

    def log_of(self, root: Genesis) -> int:
        """Returns the number of the log that the group lives in (L2)."""
        return route(self.group, root.partitions)

    def ran(self) -> None:
        """The cluster calls this after something has run here that the own steps do not know of."""

    def _write_genesis(self) -> None:
        """Writes a Genesis, unless it wrote one a short time ago; `act` calls this until the fold has accepted one.

        In log 0 it is a Genesis of its own, in other logs a copy of the root (L4, L5).
        """
        now_ms = self.environment.now_ms
        if now_ms >= self._genesis_due_ms:
            self._genesis_due_ms = now_ms + GENESIS_MS
            genesis = self.world.root or self.environment.new_genesis()
            self.post(codec.encode(genesis, "", genesis.incarnation))
            self.environment.schedule(GENESIS_MS, self, self.act)

    # --- writing

    def send(self, record: Record) -> None:
        """Writes a record of the group to the group's log."""
        assert self.world.genesis is not None  # L7: no client writes before it has read the Genesis
        version = self.world.writes_version(self.group)
        self.post(codec.encode(record, self.group, self.world.genesis.incarnation, version))

    def post(self, value: bytes) -> None:
        """Hands a value to the producer. Values arrive in the order of sending, unless a network fault changes it."""
        environment, network_faults = self.environment, self.environment.network_faults
        environment.sent(self, value)
        for delay_ms, in_order in network_faults.write_ms():
            arrival_ms = environment.now_ms + delay_ms + self.uplink_ms
            if in_order:
                arrival_ms = self._newest_arrival_ms = max(arrival_ms, self._newest_arrival_ms)
            in_flight = InFlightRecord(self.log, value)
            if network_faults.stormy:
                network_faults.in_flight.append(partial(self._append, in_flight))
            environment.schedule(arrival_ms - environment.now_ms, None, self._append, in_flight)

    def _append(self, record: InFlightRecord) -> None:
        environment = self.environment
        if record.landed or record.log >= len(environment.broker.logs) or record.value in environment.broker.gone:
            # Healed, and so here already; or for a log that is gone; or a copy of what a deleted topic has accepted: a
            # client sends a value no longer than its producer tries, and so much later nobody creates the topic (L3).
            return
        if environment.broker.writes_down_until_ms <= environment.now_ms:
            record.landed = True
            environment.broker.append(record.log, record.value, environment.now_ms)
        elif environment.network_faults.survives_outage():
            environment.broker.held.append(
                lambda: environment.schedule(environment.network_faults.read_ms(), None, self._append, record)
            )
        else:
            record.landed = True

    def forget_order(self) -> None:
        """Starts a new producer: records that the old one still holds no longer delay what is sent from now on."""
        self._newest_arrival_ms = 0
