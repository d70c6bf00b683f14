"""The environment of a run: virtual time, one broker, the processes on it, and the journal of what happened.

There is one heap of events, ordered by (time, number). All random numbers come from one random.Random(seed), all times
are whole ms, and no order depends on a set or on hash(). So the same seed gives the same run on every machine.
fault_injector.py decides what goes wrong and when; this file carries it out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from copy import copy
from dataclasses import replace as replaced
from random import Random
from typing import Any

from msgspec.structs import replace

from marshal_py.errors import CoordinationError, Diverged, LogGap, MarshalError
from marshal_py.protocol.fold.rationalizer import PROTOCOL_VERSION
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire.identity import HASH_NAME, TopicPartition
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, AT_MOST_ONCE, Genesis
from marshal_sim.cluster import dump_state, restricted
from marshal_sim.cluster.broker import MISSING, Broker
from marshal_sim.cluster.client import DELIVERIES_MAX, METADATA_MS, Client
from marshal_sim.cluster.clock import MachineClock
from marshal_sim.cluster.dump_state import DumpState
from marshal_sim.cluster.faults import BROKER_RATE_PPM_MAX, RATE_PPM_MAX, NetworkFaults
from marshal_sim.cluster.process import Process, Step, ThreadGone
from marshal_sim.cluster.query import Checkpoint, Query
from marshal_sim.cluster.scenario import GroupPlan, Scenario
from marshal_sim.cluster.trace import Trace
from marshal_sim.cluster.witness import KEPT_PER_INTERVAL
from marshal_sim.judge.evidence import Client as AnyClient
from marshal_sim.judge.evidence import Delivery, Evidence, Refusal, Stop, ToolReport
from marshal_sim.judge.history import root_of
from marshal_sim.oracle.oracle import route

RESTARTED = ("SessionCloned", "ModeMismatch", "TopicRecreated", "DuplicateClientId", "GroupDeleted", "InvalidOption")
EVENTS_MAX = 5_000_000  # a run that needs more is in an endless loop
HANDLER_TIMEOUT_INTERVALS = 5  # short enough that a run sees it happen
HAND_OVER_INTERVALS = 2  # another number than the handler timeout, so that the two cannot be confused
LOST_RECORDS_MAX = 40  # records that an unclean election loses at most: over two checkpoints


class Runaway(Exception):
    """Raised when a run does not end, because a process sends or wakes without pause."""


class Cluster:
    """Holds everything that exists in one run: broker, network, processes, and the evidence for the judges."""

    def __init__(self, scenario: Scenario, rng: Random) -> None:
        self.scenario = scenario
        self.rng = rng
        self.now_ms: int = 0
        self.events: int = 0
        self.broker: Broker = Broker(scenario.logs)
        self.network_faults: NetworkFaults = NetworkFaults(rng, scenario.kinds, scenario.interval_ms)
        self.evidence: Evidence = Evidence()
        self.clients: list[Client] = []
        self.processes: list[Process] = []  # everything that reads the log
        self.advisories: dict[str, int] = {}
        self.endings: dict[str, int] = {}
        self.slow_until_ms = 0  # handlers are slow before this
        self.stuck: int = 0  # how many of the next handlers hang
        self.producing = True
        self.healed = False  # every fault is over
        self.answers: bool = "answers" in scenario.kinds
        self.calls: bool = "calls" in scenario.kinds
        self.cancels: bool = "cancels" in scenario.kinds
        self.locks: bool = "locks" in scenario.kinds
        self.stopped_threads: int = 0  # where they have left a lock
        self.lanes: bool = "lanes" in scenario.kinds
        self.aio: bool = "aio" in scenario.kinds
        self.start_latest: bool = scenario.start_latest
        self.checkpoints: dict[str, Checkpoint] = {}  # of the clients that are streaming queries, by client id
        self.keeps_snapshots: bool = "snapshots" in scenario.kinds
        self.closed: list[Evidence] = []  # evidence on coordination topics that are gone
        self.stops: list[tuple[int, Stop]] = []  # (number of the log, stop)
        self.foreign_records: dict[int, dict[int, str]] = {}  # by log and offset
        self.branched: set[int] = set()  # logs that lost their tail
        self.acted_to: dict[AnyClient, int] = {}  # by client that is gone; see Evidence.acted_to
        self.damaged: set[str] = set()  # groups whose log, or whose records in it, no client can read any more
        self.modes: dict[str, int] = {group.name: group.mode for group in scenario.groups}  # as operators know them
        self._heap: list[tuple[int, int, Process | None, Step, Any]] = []
        self._end_ms = self._number = 0
        self._trace = Trace()
        self.broker.on_append = self._appended
        self._root: tuple[bytes, int] | None = None  # of a dump, whose log 0 may begin after it
        if scenario.dump:
            self._inherit(dump_state.read(scenario.dump, scenario.group))
        for topic in sorted({topic for group in scenario.groups for topic in group.topics} - self.broker.counts.keys()):
            self.broker.add_partitions(topic, scenario.partitions)
        self.renews_topics: bool = "recreate_topic" in scenario.kinds
        if self.renews_topics:
            self.broker.begin_lives()
        if "broker_clock" in scenario.kinds:
            for clock in self.broker.clocks:
                clock.rate_ppm = int((rng.random() * 2 - 1) * BROKER_RATE_PPM_MAX)
        self.schedule(scenario.produce_gap_ms, None, self._produce)

    def _inherit(self, past: DumpState) -> None:
        """Fills the broker with the logs and topics of a dump, so that the run starts where the dump ends."""
        broker, self._root = self.broker, (past.root, past.partitions)
        for each in past.logs:
            broker.logs[each.number].inherit(each.first, each.values)
        for topic, count in past.counts.items():
            broker.add_partitions(topic, count)
        for place, target in past.targets.items():
            broker.topics[place], broker.ends[place] = list(target.offsets), target.end

    # --- time

    def schedule(self, delay_ms: int, who: Process | None, step: Step, argument: Any = None) -> None:
        """Calls `step(argument)` after `delay_ms`. The call waits while the process `who` is stopped, and is dropped if
        it is dead.
        """
        self._number += 1
        heapq.heappush(self._heap, (self.now_ms + delay_ms, self._number, who, step, argument))

    def run_until(self, end_ms: int) -> None:
        self._end_ms = end_ms
        self._run_until(end_ms)

    def go_on_for(self, stopped_ms: int, who: Process) -> None:
        """Lets everything go on while a thread of `who`, which calls this, is stopped, with its whole process for
        longer, and until `run_until` ends at most."""
        self.stopped_threads += 1
        self._run_until(min(self._end_ms, self.now_ms + stopped_ms))
        while who.frozen and not who.dead and self._heap and self._heap[0][0] <= self._end_ms:
            self._run_until(self._heap[0][0])
        self.stopped_threads -= 1

    def _run_until(self, end_ms: int) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end_ms:
            self.now_ms, _, who, step, argument = pop(heap)
            if who is not None:
                if who.dead:
                    continue
                if who.frozen:
                    who.held_steps.append((step, argument))
                    continue
            self.events += 1
            try:
                step(argument)
            except ThreadGone:  # of a process that is dead
                continue
            if self.events > EVENTS_MAX:
                raise Runaway(f"{EVENTS_MAX} events by {self.now_ms} ms")
        self.now_ms = max(end_ms, self.now_ms)  # a thread that was stopped meanwhile may have waited longer

    # --- what happened

    def trace(self, who: int, what: int, value: int) -> None:
        self._trace.add(self.now_ms, who, what, value)

    def trace_hash(self) -> str:
        return self._trace.digest()

    def sent(self, who: Process, value: bytes) -> None:
        self.events += 1
        known = self.evidence.sent.get(value)
        self.evidence.sent[value] = (self.now_ms if known is None else known[0], self.now_ms, who.number)

    def folded(self, who: Process, first: int, count: int) -> None:
        self.events += count
        self.trace(who.number, first, count)

    def digest(self, who: Process) -> None:
        """Notes the digest that a process holds at a checkpoint. The auditor compares it with the oracle's."""
        point = who.world.checkpoints.get(who.group)
        if point is not None and point.at == who.world.next_offset:
            self.evidence.digests.setdefault((who.group, point.at, point.state, point.chain), who.number)

    def delivered(self, delivery: Delivery) -> None:
        self.events += 1
        self.evidence.deliveries.append(delivery)
        self.trace(int(delivery.client), -delivery.epoch, delivery.offset)

    def advised(self, kind: str) -> None:
        self.advisories[kind] = self.advisories.get(kind, 0) + 1

    def handing_over(self, client: Client, epoch: int) -> None:
        self.evidence.handovers.append((self.now_ms, client.group, epoch))

    def fenced(self, client: Client) -> None:
        self.evidence.fences.setdefault(client.number, []).append((self.now_ms, client.world.next_offset))

    def restarted(self, client: Client, read_to: int) -> None:
        self.evidence.restarts.setdefault(client.number, []).append((self.now_ms, read_to))

    def kept(self, client: Client) -> None:
        self.evidence.kept[client.number] = self.now_ms

    def falsify(self, client: Client) -> None:
        """Changes the state in a client's memory although no record changed it, to see whether that is noticed (V5)."""
        group = client.world.groups[client.group]
        partition = list(group.partitions.values())[int(self.rng.random() * len(group.partitions))]
        partition.generation += 1
        group.dirty.add(partition)
        self.evidence.corrupted.add(client.number)

    def reported(self, report: ToolReport) -> None:
        self.evidence.reports.append(report)

    def stopped(self, who: Process, error: CoordinationError) -> None:
        # A reader that looks for a snapshot to start from may meet a gap elsewhere than at its own offset.
        read_to = error.expected_offset if isinstance(error, LogGap) else who.world.next_offset
        stop = Stop(who.group, who.number, self.now_ms, read_to, type(error).__name__)
        self.stops.append((who.log, stop))

    def refused(self, who: Process, tp: TopicPartition) -> None:
        """Notes that a client was told that what it fetches of a partition lies beyond its end, or is lost."""
        member = who.member if isinstance(who, Client) else None
        for epoch, claim in member.claims.items() if member is not None else ():
            if claim.tp == tp:
                place = who.number, who.group, epoch
                told = Refusal(self.now_ms, self.broker.leader_epoch(tp), self.broker.life(tp.topic))
                self.evidence.refusals.setdefault(place, told)

    def begins_late(self, who: Process) -> bool:
        """Returns True if a starting process must look for a snapshot although the log still has its beginning."""
        return self.keeps_snapshots and self.rng.random() < 0.7

    def new_genesis(self) -> Genesis:
        """Returns a new Genesis, for a process that found none in its log."""
        return Genesis(b"genesi" + self.rng.randbytes(10), len(self.broker.logs), HASH_NAME, PROTOCOL_VERSION)

    def client_ended(self, client: Client, reason: MarshalError | None) -> None:
        """Plays the operator, who restarts a client that ended with an error. A stopped client is not restarted."""
        error = "stopped" if reason is None else type(reason).__name__
        if isinstance(client, Query) and (reason is not None or not client.overdue):
            client.killed = True  # its source failed, and Spark ends it: it does not continue with a new member as well
        self.acted_to[client.number] = client.acted_to()
        if isinstance(reason, Diverged):
            self.stopped(client, reason)
        self.endings[error] = self.endings.get(error, 0) + 1
        group = client.world.groups.get(client.group)
        if error == "ModeMismatch" and group is not None and group.mode:
            self.modes[client.group] = group.mode  # the operator learns the mode from the error
        if error in RESTARTED:
            # A clone, or a client displaced by its namesake, is restarted only if the other one is gone as well.
            doubled = client.clone_of >= 0 or error == "DuplicateClientId"
            self.schedule(self.scenario.interval_ms, None, self._start_missed if doubled else self._start_again, client)

    def _start_missed(self, old: Client) -> None:
        if not any(client.group == old.group for client in self.living()):
            self._start_again(old)

    def _start_again(self, old: Client) -> None:
        # Two processes that each declare the other dead would displace each other without end: an operator's mistake.
        options = replace(old.options, fast_reclaim=False, mode=self.modes[old.group])
        self.add_client(old.group, restricted.fitting(old, options, self.scenario), old.clock)

    # --- the world outside of the processes

    def _appended(self, number: int, now_ms: int) -> None:
        self.events += 1
        for process in self.processes:
            if process.log == number:
                process.wake_reader()

    def _produce(self, _: None) -> None:
        """Appends a few messages to a partition drawn at random, sometimes after a gap in the offsets, and schedules
        itself again.
        """
        if not self.producing:
            return
        rng, places = self.rng, list(self.broker.topics)
        place = places[int(rng.random() * len(places))]
        count, gap = 1 + int(rng.random() * 4), int(rng.random() * 5) if rng.random() < 0.1 else 0
        if self.broker.is_there(place, self.now_ms) and place not in self.broker.leaderless:
            self.broker.produce(place, count, gap, self.now_ms)
        self.schedule(1 + int(rng.random() * 2 * self.scenario.produce_gap_ms), None, self._produce)

    def handler_ms(self, place: TopicPartition) -> int:
        """Returns how many ms the handler takes for the next message of a partition."""
        if self.stuck:
            self.stuck -= 1
            return 8 * HANDLER_TIMEOUT_INTERVALS * self.scenario.interval_ms
        slow = 20 if self.now_ms < self.slow_until_ms else 1
        return int(self.rng.random() * self.scenario.handler_ms) * slow

    # --- processes

    def new_clock(self) -> MachineClock:
        rng = self.rng
        rate_ppm = int((rng.random() * 2 - 1) * RATE_PPM_MAX) if "clock_rate" in self.scenario.kinds else 0
        return MachineClock(self.now_ms, rate_ppm, int(rng.random() * 10**9))

    def new_options(self, group: GroupPlan, name: str) -> MemberOptions:
        """Returns a new consumer's settings, which are mostly the defaults."""
        rng, scenario = self.rng, self.scenario
        odd = not scenario.calm and rng.random() < 0.15
        interval_ms = scenario.interval_ms // 2 if scenario.mixed and rng.random() < 0.5 else scenario.interval_ms
        mode = self.modes[group.name]
        if "mixed_modes" in scenario.kinds and rng.random() < 0.3:
            mode = AT_LEAST_ONCE + AT_MOST_ONCE - mode  # misconfigured: this one is refused (F1.2), or all others are
        options = MemberOptions(
            client_id=name,
            mode=mode,
            topics=group.topics,
            interval_ms=interval_ms,
            policy=group.policy,
            capacity=1 + int(rng.random() * 3) if odd else 1,
            rank=int(rng.random() * 3) if odd else 0,
            handler_timeout_ms=HANDLER_TIMEOUT_INTERVALS * interval_ms,
            hand_over_timeout_ms=HAND_OVER_INTERVALS * interval_ms,
            on_topic_recreated=scenario.on_topic_recreated,
        )
        return restricted.options_of(options, group, scenario)

    def add_client(self, group: str, options: MemberOptions, clock: MachineClock | None = None) -> Client:
        """Starts a new consumer process, which begins to read the log at once."""
        clock, checkpoint = clock or self.new_clock(), self.checkpoints.get(options.client_id)
        if checkpoint is None or options.mode != AT_LEAST_ONCE:
            return self._started(Client(self, len(self.processes), group, options, clock, self.scenario.concurrency))
        return self._started(Query(self, len(self.processes), group, options, clock, checkpoint))

    def revive(self, query: Query) -> None:
        """Lets a streaming query continue with a new member in its group."""
        before = query.batches if query.overdue else None
        self._started(
            Query(self, len(self.processes), query.group, query.options, query.clock, query.checkpoint, before)
        )

    def _started(self, client: Client) -> Client:
        self.processes.append(client)
        self.clients.append(client)
        if "witness" in self.scenario.kinds:
            client.keep_will(client.options.interval_ms // KEPT_PER_INTERVAL)
        client.start()
        return client

    def add_clone(self, client: Client) -> Client:
        """Clones a machine. From now on both copies run."""
        clone = client.clone(len(self.processes), copy(client.clock))
        self.processes.append(clone)
        self.clients.append(clone)
        self.evidence.forks.append((self.now_ms, client.number, clone.number))
        clone.wake_reader()
        self.schedule(METADATA_MS, clone, clone.check_topic)
        self.schedule(0, clone, clone.act)
        return clone

    def kill(self, client: Process) -> None:
        client.dead = True
        if isinstance(client, Query):
            client.killed = True
        if isinstance(client, Client):
            self.acted_to[client.number] = client.acted_to()

    def end_tasks(self) -> None:
        """Ends what event loops still run. Called when nobody looks at the run any more."""
        for client in self.clients:
            client.end_tasks()

    def living(self) -> list[Client]:
        return [client for client in self.clients if not client.dead]

    def staying(self) -> list[Client]:
        """Returns the living clients, except those that are leaving, have a stuck reader or have a slow connection."""
        return [
            client
            for client in self.living()
            if not client.lagging
            and not client.uplink_ms
            and not client.stops
            and (client.member is None or not client.member.leaving)
        ]

    def recreate(self) -> None:
        """Deletes the coordination topic and creates it again. Each process notices that when it next asks for the
        topic's id.
        """
        self.closed += self._close_early()
        journal = self.evidence
        self.evidence = Evidence(
            sent=journal.sent,
            topics=journal.topics,
            forks=journal.forks,
            queries=journal.queries,
            heard=journal.heard,
            excused={"TopicRecreated"},
        )
        self.stops, self.foreign_records, self.branched = [], {}, set()
        # Never fewer logs: a Genesis that was under way to the old topic may become the root of the new one.
        self.broker.recreate(len(self.broker.logs) + int(self.rng.random() * 2))
        for process in self.processes:
            process.wake_reader()
            self.schedule(int(self.rng.random() * METADATA_MS), process, process.check_topic)

    def recreate_topic(self, topic: str, count: int, gone_ms: int, lag_ms: int, blind: bool) -> None:
        """Deletes a data topic and creates it again after `gone_ms`, with `count` partitions. For `lag_ms` more some
        brokers do not know it. `blind`: clients learn its leaders only when they are made to ask for them anew.
        """
        broker, before = self.broker, self.broker.describe(topic, self.now_ms)
        broker.recreate_topic(topic, count, self.now_ms, self.now_ms + gone_ms)
        broker.lagging[topic] = before, self.now_ms + gone_ms + lag_ms
        (broker.blind.add if blind else broker.blind.discard)(topic)
        self.schedule(gone_ms, None, broker.wake, topic)

    def elect_uncleanly(self, number: int) -> None:
        """Makes an incomplete replica the leader of a log, which loses its newest records and grows on without them."""
        log = self.broker.logs[number]
        newest = len(log.values) - max(log.first, log.inherited, len(log.values) // 2)
        end = len(log.values) - 1 - int(self.rng.random() * min(newest, LOST_RECORDS_MAX))
        self.closed += [evidence for evidence in self._close_early() if evidence.number == number]
        self.broker.logs[number] = log.branch(end)
        self.branched.add(number)
        self.foreign_records[number] = {
            at: shape for at, shape in self.foreign_records.get(number, {}).items() if at < end
        }
        self.stops = [(at, stop) for at, stop in self.stops if at != number]
        self.evidence.excused.update(("TopicRecreated", "SnapshotRefused"))
        for process in self.processes:
            if process.log == number and process.world.next_offset > end:
                process.forked = True
                process.wake_reader()

    # --- may a run continue? The judges check the same in the log.

    def settled(self) -> bool:
        """Returns True if every remaining client is healthy, every partition is owned, and no admin is at work."""
        if any(not process.dead and not isinstance(process, Client) for process in self.processes):
            return False
        staying = [client for client in self.staying() if client.group not in self.damaged]
        return all(self._well(client) for client in staying) and all(
            self._owned(group, staying) for group in self.scenario.groups if group.name not in self.damaged
        )

    def _well(self, client: Client) -> bool:
        member = client.member
        if client.frozen or member is None or member.session < 0 or member.fenced:
            return False
        shuns = any(member.backs_off(TopicPartition(*place)) for place in self.broker.topics)  # D4
        now = client.now()
        begun = [claim.handler_since_ms() for claim in member.claims.values()]
        hangs = any(ms is not None and now.mono_ms - ms >= member.options.interval_ms for ms in begun)
        return member.healthy(now) and not shuns and not hangs

    def finished(self) -> bool:
        """Returns True if the cluster is settled (see `settled`) and every group's positions are past the last
        messages.
        """
        return self.settled() and all(
            not offsets or partition.position > offsets[-1]
            for plan in self.scenario.groups
            for group in (self._newest_group(plan.name),)
            if group is not None
            for tp, partition in group.partitions.items()
            for offsets in (() if self._waits(group, tp.topic) else self.broker.topics.get(tp, ()),)
        )

    def _waits(self, group: Group, topic: str) -> bool:
        """Returns whether the group waits for an admin because the topic was created again (D10)."""
        return self.scenario.on_topic_recreated == "fail" and self._is_outdated(group, topic)

    def _is_outdated(self, group: Group, topic: str) -> bool:
        known, ids = group.topics.get(topic), self.broker.ids.get(topic)
        return known is not None and ids is not None and known.id not in ("", ids[-1])

    def _newest_group(self, name: str) -> Group | None:
        """Returns the group as a client holds it that has read its log to the end, or None if no client has."""
        worlds = (client.world for client in self.living() if client.group == name)
        newest = max(worlds, key=lambda world: world.next_offset, default=None)
        whole = newest is not None and newest.next_offset == len(self.broker.logs[newest.log].values)
        return newest.groups.get(name) if newest is not None and whole else None

    def _owned(self, plan: GroupPlan, staying: list[Client]) -> bool:
        group = self._newest_group(plan.name)
        # Of this group alone: a session's id is an offset, and another log has the same offsets.
        sessions = {
            client.member.session for client in staying if client.member is not None and client.group == plan.name
        }
        places = [place for place in self.broker.topics if place[0] in plan.topics]
        return (
            group is not None
            and not group.paused
            and group.sessions.keys() <= sessions
            and all(
                (known := group.partitions.get(TopicPartition(*place))) is not None
                and (known.owner in sessions or known.parked)
                and not self._is_outdated(group, place[0])
                for place in places
                if not self._waits(group, place[0])
            )
        )

    def _close_early(self) -> list[Evidence]:
        """Returns the evidence of logs that end before the run does.

        It names no `stale_clients`, because clients that have not noticed the end of a log may still notice it.
        """
        return [replaced(evidence, stale_clients=[]) for evidence in self.close()]

    def close(self) -> list[Evidence]:
        """Returns the complete evidence on the present coordination topic, one item per log."""
        root, count = self._root or root_of(self.broker.logs[0].recorded)
        return [self._close(number, root, count) for number in range(count)]

    def _close(self, number: int, root: bytes, count: int) -> Evidence:
        journal, log, branched = self.evidence, self.broker.logs[number], number in self.branched
        groups = [group.name for group in self.scenario.groups if route(group.name, count) == number]
        mine = [
            process
            for process in self.processes
            if process.group in groups and process.topic_id == self.broker.topic_id and not process.forked
        ]
        here, names = {process.number for process in mine}, {process.name for process in mine}
        deliveries = [delivery for delivery in journal.deliveries if delivery.group in groups]
        return Evidence(
            number,
            tuple(groups),
            root if number else b"",
            log.recorded,
            log.appended_ms,
            journal.sent,
            [delivery for delivery in deliveries if delivery.client in here and not branched],
            {key: who for key, who in journal.digests.items() if who in here},
            [final for process in mine for final in _final_of(process)],
            self.broker.topics,
            journal.forks,
            [report for report in journal.reports if report.by in names],
            [stop for log_number, stop in self.stops if log_number == number],
            self.foreign_records.get(number, {}),
            {at for at in range(log.began, len(log.recorded)) if log.recorded[at] is MISSING},
            {at for at in range(log.began, len(log.values)) if log.values[at] is MISSING},
            [delivery for delivery in deliveries if delivery.client not in here or branched],
            [
                process.number
                for process in self.processes
                if not process.dead
                and process.group in groups
                and (process.forked or process.topic_id not in (-1, self.broker.topic_id))
            ],
            journal.corrupted,
            branched,
            journal.excused,
            log.began,
            log.inherited,
            journal.fences,
            self.acted_to | {client.number: client.acted_to() for client in self.living()},
            [one for one in journal.handovers if one[1] in groups],
            HAND_OVER_INTERVALS,
            journal.restarts,
            behind_intervals=restricted.BEHIND_INTERVALS,
            queries=journal.queries,
            firsts=self.broker.firsts,
            kept=journal.kept,
            deliveries_max=DELIVERIES_MAX if self.answers else None,
            acks_pending_max=journal.acks_pending_max,
            touches=journal.touches,
            lanes=journal.lanes,
            workers=journal.workers,
            follows=journal.follows,
            handler_intervals=HANDLER_TIMEOUT_INTERVALS,
            produced_ms=self.broker.produced_ms,
            ids=self.broker.ids,
            former=self.broker.former,
            heard=journal.heard,
            lost=self.broker.lost,
            refusals=journal.refusals,
            **self._of_calls(set() if branched else here),
        )

    def _of_calls(self, of: set[int]) -> dict[str, Any]:
        """Returns the evidence on what these clients promised to their users and told them."""
        journal = self.evidence
        known = dict(journal.known_claims)
        known |= {
            client.number: client.known_claims()
            for client in self.living()
            if client.callbacks.idle and not client.frozen
        }
        return {
            "letters": [one for one in journal.letters if one.client in of],
            "confirmations": [one for one in journal.confirmations if one.client in of],
            "seeks": [one for one in journal.seeks if one.client in of],
            "user_pauses": [one for one in journal.user_pauses if one.client in of],
            "drains": [one for one in journal.drains if one.client in of],
            "revoking": {one: spans for one, spans in journal.revoking.items() if one[0] in of},
            "asking": {client: spans for client, spans in journal.asking.items() if client in of},
            "callbacks": {client: [*runs] for client, runs in journal.callbacks.items() if client in of},
            "lane_steps": {client: steps for client, steps in journal.lane_steps.items() if client in of},
            "known_claims": {client: one for client, one in known.items() if client in of},
        }


def _final_of(process: Process) -> Iterator[tuple[AnyClient, str, int, int]]:
    """Yields what a process holds of its group in the end, if anything: client, group, read to, digest."""
    group = process.world.groups.get(process.group)
    if group is not None:
        yield process.number, process.group, process.world.next_offset, group.digest()
