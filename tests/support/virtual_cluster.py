"""A virtual cluster for Members: several clients over one log, in virtual time, with the outages that a test asks for.

Nothing here waits: `VirtualCluster.run` jumps to the next moment at which something is due. A record is in the log
`write_ms` after it was sent and at a reader `read_ms` after that, per client. `hold_writes` and `cut` cut a client off;
`suspend` stops its machine: the monotonic clock stops, boot and wall time continue.

Checked in every test that uses it: the world's invariants after every fold; that clients at the same offset have the
same digest; that no two running clients may deliver the same partition (unless the test clones a session).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypeVar
from unittest.mock import Mock

from marshal_py.client.ranges import Ranges
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.protocol.claims import AtLeastOnce, AtMostOnce, Claim, OffsetRun
from marshal_py.protocol.fold.rationalizer import Verdict, apply
from marshal_py.protocol.fold.world import Group, Partition, World
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.member_state import Advisory, MemberOptions, Ready, Wanted
from marshal_py.protocol.member.rebalance import GRANT_PACE_MS
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import ClaimingMessages, Genesis, Record

INCARNATION = bytes(range(16))
GROUP = "billing"
TOPIC = "orders"
INTERVAL_MS = 3_000
THIRD_MS = INTERVAL_MS // 3
WRITE_MS = 4
READ_MS = 3

R = TypeVar("R")


def ranges_of(member: Member, incarnation: bytes) -> Ranges:
    """The ranges of a member whose cluster is asked nothing."""
    return Ranges(Mock(), member, Mock(), ConsumerOptions(), incarnation, Mock(), frozenset)


def tp(number: int, topic: str = TOPIC) -> TopicPartition:
    return TopicPartition(topic, number)


class Client:
    """One process: its world, its member, its clocks, and everything that its member asked it to do."""

    def __init__(self, cluster: VirtualCluster, name: str, options: MemberOptions, counts: dict[str, int]) -> None:
        self.cluster = cluster
        self.name = name
        self.rng = random.Random(f"client {len(cluster.clients)} {name}")
        self.alive = True
        self.suspended_at: int | None = None
        self.slept_ms = 0
        self.wall_skew_ms = 0
        self.write_ms, self.read_ms = WRITE_MS, READ_MS
        self.writes_held = False
        self.reads_held = False
        self.held_back: list[bytes] = []  # values sent while its writes were held
        self.prefetch_succeeds = True  # whether fetching ahead gives data at once
        self.resolves = True
        self.warp: Callable[[World, Verdict], None] = lambda world, verdict: None  # what a broken fold does in addition
        self.warps_again = False  # also when it folds again
        self.starts: dict[TopicPartition, int] = {}
        self.sent: list[tuple[int, Record]] = []  # (time, record)
        self.claimed: list[tuple[int, Claim]] = []
        self.lost: list[tuple[int, Claim, str]] = []
        self.advisories: list[tuple[int, Advisory]] = []
        self.resolved: list[Wanted] = []
        self.prefetched: list[tuple[TopicPartition, int]] = []
        self.prefetch_stopped: list[TopicPartition] = []
        self.refolds: list[tuple[int, int]] = []  # (time, checkpoint)
        self.mirrored: list[tuple[int, dict[TopicPartition, int]]] = []
        self.world = World()
        for value in cluster.values:
            self._fold(value)
        self.member = Member(self.world, GROUP, options, self.rng.randbytes)
        for topic, partitions in counts.items():
            self.member.learn_topic(topic, partitions)
        self.due_ms = cluster.now_ms

    # --- clocks

    @property
    def now(self) -> Instant:
        at = self.cluster.now_ms
        if self.suspended_at is not None:
            at = self.suspended_at
        return Instant(at - self.slept_ms, at, at + self.wall_skew_ms)

    def suspend(self) -> None:
        self.suspended_at = self.cluster.now_ms

    def resume(self) -> None:
        assert self.suspended_at is not None
        self.slept_ms += self.cluster.now_ms - self.suspended_at
        self.suspended_at = None

    @property
    def runs(self) -> bool:
        return self.alive and self.suspended_at is None

    # --- reading and ticking

    def _fold(self, value: bytes) -> Verdict:
        verdict = apply(self.world, self.world.next_offset, value)
        self.warp(self.world, verdict)
        self.world.check()
        return verdict

    def fold_again(self, at: int) -> World | None:
        """What a driver does for G6: folds the bytes of the log from its beginning."""
        again = World()
        again.watched.add(GROUP)
        for offset in range(at):
            verdict = apply(again, offset, self.cluster.values[offset])
            if self.warps_again:
                self.warp(again, verdict)
        return again

    def read(self) -> bool:
        """Reads the values that have arrived; True if there were any."""
        cluster, came = self.cluster, False
        while not self.reads_held and self.world.next_offset < len(cluster.values):
            if cluster.appended_ms[self.world.next_offset] + self.read_ms > cluster.now_ms:
                break
            verdict = self._fold(cluster.values[self.world.next_offset])
            self.member.receive(verdict, self.now)
            came = True
        return came

    def tick(self) -> Ready:
        """One tick; carries out the Ready in its order."""
        out = self.member.tick(self.now)
        at = self.cluster.now_ms
        self.lost += [(at, claim, reason) for claim, reason in out.lost]
        self.prefetch_stopped += out.stop_prefetch
        for record in out.send:
            self.sent.append((at, record))
            self.cluster.send(self, codec.encode(record, GROUP, INCARNATION, self.member.writes_version))
        self.claimed += [(at, claim) for claim in out.claimed]
        for partition, position in out.start_prefetch:
            self.prefetched.append((partition, position))
            if self.prefetch_succeeds:
                self.member.prefetched(partition)
        for wanted in out.resolve:
            self.resolved.append(wanted)
            if self.resolves:
                end = self.cluster.ends.get(wanted.tp, 0)
                start = NONE if wanted.end_only else self.starts.get(wanted.tp, 0)
                self.member.start_resolved(wanted.tp, start, end, self.now)
        if out.mirror:
            self.mirrored.append((at, out.mirror))
        self.advisories += [(at, advisory) for advisory in out.advisories]
        if out.refold >= 0:
            self.refolds.append((at, out.refold))
            self.member.refolded(out.refold, self.fold_again(out.refold), self.now)
        if out.ended:
            self.alive = False
        # After the driver has reported starts or prefetched data, the member is due again.
        driver_acted = bool(out.start_prefetch and self.prefetch_succeeds) or bool(out.resolve and self.resolves)
        self.due_ms = at + 1 if driver_acted else max(self.member.deadline_ms + self.slept_ms, at + 1)
        return out

    def next_ms(self) -> int:
        """When it must run next, as far as is known now."""
        due = self.due_ms
        if not self.reads_held and self.world.next_offset < len(self.cluster.values):
            due = min(due, self.cluster.appended_ms[self.world.next_offset] + self.read_ms)
        return due

    # --- outages

    def hold_writes(self) -> None:
        self.writes_held = True

    def release_writes(self, *, lose: bool = False) -> None:
        """The brokers are back: held values are appended in their order, or lost."""
        self.writes_held = False
        held, self.held_back = self.held_back, []
        for value in held if not lose else ():
            self.cluster.append(value)

    def cut(self) -> None:
        self.reads_held = True
        self.hold_writes()

    def heal(self) -> None:
        self.reads_held = False
        self.release_writes()

    # --- handlers

    def deliver(self, claim: Claim, *offsets: int) -> OffsetRun:
        """Fetches these messages in at-least-once mode and hands all of them over."""
        assert isinstance(claim.tracker, AtLeastOnce)
        assert self.may(claim), f"{self.name} may not deliver {claim.tp}"
        run = claim.tracker.add(offsets)
        run.deliver(len(offsets), self.now.mono_ms)
        return run

    def may(self, claim: Claim) -> bool:
        return self.member.may_deliver(claim.epoch, self.now)

    def take(self, claim: Claim) -> int | None:
        """In at-most-once mode, hands over the next offset if it may be; every offset exists."""
        tracker = claim.tracker
        assert isinstance(tracker, AtMostOnce)
        if not self.may(claim) or not tracker.holds(tracker.delivered_to):
            return None
        offset = tracker.delivered_to
        tracker.deliver(offset, self.now.mono_ms)
        return offset

    # --- state

    @property
    def session(self) -> int:
        return self.member.session

    @property
    def group(self) -> Group:
        return self.world.groups[GROUP]

    @property
    def owned(self) -> set[int]:
        """Numbers of the partitions that it has claims on."""
        return {claim.tp.partition for claim in self.member.claims.values()}

    def claim(self, number: int, topic: str = TOPIC) -> Claim:
        (found,) = [claim for claim in self.member.claims.values() if claim.tp == tp(number, topic)]
        return found

    def advised(self, kind: str) -> list[tuple[int, Advisory]]:
        return [(at, advisory) for at, advisory in self.advisories if advisory.kind == kind]

    def sends(self, kind: type[R], since_ms: int = 0) -> list[tuple[int, R]]:
        """(time, record) of the records of this kind that it sent."""
        return [(at, record) for at, record in self.sent if isinstance(record, kind) and at >= since_ms]


class VirtualCluster:
    """The log and its clients."""

    def __init__(self, *, partitions: int = 12, mode: int = 1, clones: bool = False) -> None:
        """`clones`: the test clones a session, so two clients may deliver at once."""
        self.now_ms = 1_000_000
        self.partitions = partitions
        self.mode = mode
        self.clones = clones
        self.values: list[bytes] = []
        self.appended_ms: list[int] = []
        self.clients: list[Client] = []
        self._in_flight: list[tuple[int, int, Client | None, bytes]] = []
        self._numbers = count()
        self._digests: dict[int, int] = {}
        self.ends: dict[TopicPartition, int] = {}  # where partitions end
        self.broken: set[str] = set()  # clients whose fold a test has broken
        self.world = World()  # of a reader without delay
        self.verdicts: list[Verdict] = []
        self.append(codec.encode(Genesis(INCARNATION, 1, HASH_NAME, 2), "", INCARNATION))

    # --- clients

    def add(self, name: str, *, counts: dict[str, int] | None = None, **options: Any) -> Client:
        options.setdefault("interval_ms", INTERVAL_MS)
        options.setdefault("topics", (TOPIC,))
        options.setdefault("mode", self.mode)
        if counts is None:
            counts = {topic: self.partitions for topic in options["topics"]}
        client = Client(self, name, MemberOptions(client_id=name, **options), counts)
        self.clients.append(client)
        return client

    def team(self, *names: str, **options: Any) -> list[Client]:
        """Adds clients and runs until they have joined and claimed their partitions."""
        team = [self.add(name, **options) for name in names]
        self.run(3 * INTERVAL_MS)
        return team

    def fork(self, client: Client, name: str) -> Client:
        """Clones the process: the same memory, but its random bits differ from here on."""
        cluster, client.cluster = client.cluster, None  # type: ignore[assignment]
        try:
            clone = copy.deepcopy(client)
        finally:
            client.cluster = cluster
        clone.cluster, clone.name = self, name
        clone.rng.seed(f"client {name}")
        self.clients.append(clone)
        return clone

    def kill(self, client: Client) -> None:
        """Ends it. Values in flight still reach the brokers; held ones do not."""
        client.alive = False

    # --- the log

    def append(self, value: bytes) -> int:
        """Appends a value; returns its offset."""
        self.values.append(value)
        self.appended_ms.append(self.now_ms)
        self.verdicts.append(apply(self.world, len(self.values) - 1, value))
        self.world.check()
        return len(self.values) - 1

    def inject(self, record: Record) -> Verdict:
        """Appends a record of a writer that is not simulated: an admin, a clone, another library."""
        return self.verdicts[self.append(codec.encode(record, GROUP, INCARNATION))]

    def must(self, record: Record) -> int:
        verdict = self.inject(record)
        assert verdict.accepted, verdict.reason
        return verdict.offset

    def replay(self, offset: int) -> Verdict:
        """Appends a late copy of a record of the log."""
        return self.verdicts[self.append(self.values[offset])]

    def send(self, client: Client | None, value: bytes) -> None:
        delay = WRITE_MS if client is None else client.write_ms
        self._in_flight.append((self.now_ms + delay, next(self._numbers), client, value))

    def lose_in_flight(self, client: Client) -> None:
        """Drops the values of this client that have not reached the brokers."""
        self._in_flight = [one for one in self._in_flight if one[2] is not client]

    def records(self, kind: type[R], since: int = 0) -> Iterator[tuple[Verdict, R]]:
        for verdict in self.verdicts[since:]:
            if isinstance(verdict.record, kind):
                yield verdict, verdict.record

    # --- time

    def run(self, for_ms: int) -> None:
        until_ms = self.now_ms + for_ms
        while True:
            self._run_due()
            next_ms = min(
                [due for due, *_ in self._in_flight] + [c.next_ms() for c in self.clients if c.runs],
                default=until_ms + 1,
            )
            if next_ms > until_ms:
                self.now_ms = until_ms
                return
            assert next_ms > self.now_ms, "time must move"
            self.now_ms = next_ms

    def run_until(self, condition: Callable[[], object], at_most_ms: int = 60_000) -> int:
        """Runs ms by ms until the condition holds; returns how long that took in ms."""
        begun = self.now_ms
        while not condition():
            assert self.now_ms - begun < at_most_ms, "it did not happen"
            self.run(1)
        return self.now_ms - begun

    def _run_due(self) -> None:
        """Does everything that is due at this moment."""
        self._in_flight.sort(key=lambda one: one[:2])
        while self._in_flight and self._in_flight[0][0] <= self.now_ms:
            _, _, client, value = self._in_flight.pop(0)
            if client is not None and client.writes_held:
                client.held_back.append(value)
            else:
                self.append(value)
        for client in self.clients:
            if client.runs and (client.read() or client.due_ms <= self.now_ms):
                client.tick()
                self._same_world(client)
        if not self.clones:
            self._exclusive()

    def _same_world(self, client: Client) -> None:
        group = client.world.groups.get(GROUP)
        if group is not None:
            digest = group.digest()
            if client.name in self.broken:
                return
            assert self._digests.setdefault(client.world.next_offset, digest) == digest, "two readers, two worlds"

    def _exclusive(self) -> None:
        """Asserts that no two running clients may deliver the same partition."""
        by: dict[TopicPartition, str] = {}
        for client in self.clients:
            if client.runs:
                for claim in client.member.claims.values():
                    if client.may(claim):
                        assert by.setdefault(claim.tp, client.name) == client.name, f"two deliver {claim.tp}"

    # --- state

    @property
    def group(self) -> Group:
        return self.world.groups[GROUP]

    def partition(self, number: int, topic: str = TOPIC) -> Partition:
        return self.group.partitions[tp(number, topic)]

    def owners(self) -> dict[int, str]:
        """Partition -> name of the client that owns it, by the log."""
        names = {client.session: client.name for client in self.clients}
        return {
            p.tp.partition: names.get(p.owner, f"session {p.owner}")
            for p in self.group.partitions.values()
            if p.owner >= 0
        }


def granted(cluster: VirtualCluster, client: Client, claim: Claim, offer: tuple[int, int]) -> None:
    """Offers fetched messages and runs until the grant was read, also if another one was asked for just before."""
    claim.offer = offer
    client.due_ms = cluster.now_ms
    before = len(client.sends(ClaimingMessages))
    cluster.run(0)
    if len(client.sends(ClaimingMessages)) == before:
        cluster.run(GRANT_PACE_MS)
    cluster.run(WRITE_MS + READ_MS)


def take_all(client: Client, claim: Claim) -> list[int]:
    """In at-most-once mode, hands over all that may be; returns the offsets."""
    taken = []
    while (offset := client.take(claim)) is not None:
        taken.append(offset)
    return taken
