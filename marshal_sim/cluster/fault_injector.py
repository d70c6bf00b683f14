"""The faults of a run: which fault happens to which process and when, drawn from the seed, and how everything heals.

A fault changes the environment, the broker or the machine of one process. It never reaches into a Member: a member
notices faults only through clocks, bytes and silence.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from marshal_py.admin.plans.change import ShrinkPlan
from marshal_py.admin.plans.operation import GroupContext, Operation, Terms
from marshal_py.admin.plans.pause import PausePlan
from marshal_py.admin.plans.position import PositionPlan
from marshal_py.admin.plans.sessions import EvictPlan
from marshal_py.admin.views.recreated_topics import find_recreated
from marshal_py.protocol.fold.policies import PARTITIONED
from marshal_py.protocol.member.rebalance import LEFT_INTERVALS
from marshal_py.protocol.policy import RESTRICTED
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import Genesis, StepDown
from marshal_sim.cluster import restricted
from marshal_sim.cluster.admins import AdminProcess, CrashPoint
from marshal_sim.cluster.broker import MISSING, Place
from marshal_sim.cluster.client import Client
from marshal_sim.cluster.cluster import Cluster
from marshal_sim.cluster.faults import (
    ASKED_KINDS,
    DAMAGE_KINDS,
    DATA_KINDS,
    LATE_MS_MAX,
    LIFE_KINDS,
    LONG_KINDS,
    STRIKE_KINDS,
    TRACED_KINDS,
    spread,
)
from marshal_sim.cluster.group_lives import PATIENCE_INTERVALS, GroupLives
from marshal_sim.cluster.hostile import hostile
from marshal_sim.cluster.malformed_records import damaged_envelope, harmless, newer_record
from marshal_sim.cluster.query import Checkpoint, Query
from marshal_sim.cluster.restricted import MEMBERS
from marshal_sim.cluster.scenario import GroupPlan
from marshal_sim.cluster.witness import Witnesses

STRIKE_GAP_INTERVALS: Final = 3  # at most, between two faults
QUIET_INTERVALS: Final = 11  # before the healing no pause begins and no handler hangs: these outlast a heal
WALL_JUMP_MS: Final = 3_600_000
NEVER: Final = 1_000_000
FLAP_MS: Final = 1_000  # leaders change up to once per second
HAND_OVER_MS: Final = 1_000  # how long the client lets a stop wait for hand-overs (A6)
FLAPS_MAX: Final = 5
RECREATED_MAX: Final = 3  # how often topics are created again in a run
TWICE: Final = 0.3  # how often it follows soon that a topic is created again once more
LOST_MESSAGES_MAX: Final = 12  # that a partition loses at most
AGAIN: Final = 0.5  # how often it has grown again before anybody notices
LAG_MS_MAX: Final = 4_000  # for so long some brokers do not know a new topic
BURST: Final = 5  # how many records a hostile writer writes at a time
CHECKPOINT_LOST: Final = 0.2  # the share of a query's restarts that lose its checkpoint


class FaultInjector:
    """Causes everything that happens to a cluster from outside: clients that start and stop, faults, and admins."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rng: random.Random = cluster.rng
        self.interval_ms: int = cluster.scenario.interval_ms
        self.kinds: list[str] = [
            kind for kind in STRIKE_KINDS + LIFE_KINDS + ASKED_KINDS + DATA_KINDS if kind in cluster.scenario.kinds
        ]
        self.strikes: dict[str, int] = {}
        self.names: int = 0
        self._witnesses: Witnesses = Witnesses()
        self._lives: GroupLives = GroupLives(cluster, self._run_tool)
        self._struck = 0  # the number of faults, including skipped ones
        self.healed: bool = False
        self._actions: dict[str, Callable[[], object]] = {
            "stop": lambda: self._freeze(False),
            "suspend": lambda: self._freeze(True),
            "crash": self._crash,
            "twin": self._clone,
            "wall_jump": self._wall_jump,
            "lag": self._lag,
            "outage": lambda: self._outage(True, True),
            "outage_writes": lambda: self._outage(False, True),
            "outage_reads": lambda: self._outage(True, False),
            "grow": self._grow,
            "admin": self._admin,
            "two_admins": self._two_admins,
            "slow_handler": self._slow,
            "leave": self._leave,
            "arrive": self._arrive,
            "step_down": self._step_down,
            "poison": self._write_malformed,
            "stuck_handler": self.hang_one,
            "broker_clock": self._broker_clock,
            "onlooker": self._evict_sessions,
            "false_reclaim": self._false_reclaim,
            "mode_change": lambda: self._lives.change_mode(self._group()),
            "shrink": self._shrink,
            "recreate": self._recreate,
            "beyond": self._beyond,
            "fetch_error": self._fetch_error,
            "witness": self._witness,
            "deletion": lambda: self._lives.delete(self._group()),
            "keys": self._write_hostile,
            "retention": self._delete_beginning,
            "recreate_topic": self._recreate_topic,
            "lost_tail": self._lose_tail,
            "leader_move": self._move_leader,
            "grow_logs": lambda: self.cluster.broker.add_logs(1),
        }

    # --- the run

    def begin(self) -> None:
        """Schedules the first clients within half an interval and some later, then the faults."""
        scenario, rng = self.cluster.scenario, self.rng
        for number in range(scenario.clients):
            group = scenario.groups[number % len(scenario.groups)]
            late = number >= len(scenario.groups) and rng.random() < 0.2 and not scenario.calm
            within_ms = 1 if "genesis_race" in scenario.kinds else self.interval_ms // 2
            delay_ms = int(rng.random() * (8 * self.interval_ms if late else within_ms))
            self.cluster.schedule(delay_ms, None, self._join, group)
        self._lives.begin()
        if self.kinds:
            self._schedule()
        for group in scenario.groups:
            for change in range(restricted.CHANGES if group.policy in PARTITIONED else 0):
                at_ms = int(rng.random() * scenario.safety_ms)
                self.cluster.schedule(
                    at_ms, None, self._lives.change_members, (group, MEMBERS[change % 3 : change % 3 + 1])
                )
        for kind in DAMAGE_KINDS:
            if kind in scenario.kinds:
                self.cluster.schedule(int((0.2 + 0.6 * rng.random()) * scenario.safety_ms), None, self._damage, kind)

    def _schedule(self) -> None:
        self.cluster.schedule(1 + int(self.rng.random() * STRIKE_GAP_INTERVALS * self.interval_ms), None, self._strike)

    def _strike(self, _: None) -> None:
        if self.healed:
            return
        kind = self.kinds[int(self.rng.random() * len(self.kinds))]
        self._struck += 1
        if self._struck - 1 in self.cluster.scenario.skip:
            self._schedule()
            return
        late = self.cluster.now_ms > self.cluster.scenario.safety_ms - QUIET_INTERVALS * self.interval_ms
        if not (late and kind in LONG_KINDS):
            self.strikes[kind] = self.strikes.get(kind, 0) + 1
            self.cluster.trace(NONE, TRACED_KINDS.index(kind), 0)
            self._actions[kind]()
        self._schedule()

    def heal(self) -> None:
        """Ends every fault, and makes sure that each group has a client."""
        cluster, now_ms = self.cluster, self.cluster.now_ms
        self.healed = cluster.healed = True
        cluster.broker.reads_down_until_ms = cluster.broker.writes_down_until_ms = now_ms
        cluster.broker.fails_until_ms = dict.fromkeys(cluster.broker.fails_until_ms, now_ms)
        cluster.network_faults.heal()
        cluster.slow_until_ms, cluster.stuck = 0, 0
        for process in cluster.processes:
            process.lagging = False
            process.forget_order()
            if process.frozen and not process.dead:
                process.thaw()
        self._recover(None)
        for place in sorted(cluster.broker.leaderless):
            self._elected(place)
        for place in [*cluster.broker.high_watermarks]:
            self._caught_up_with(place)
        for topic in cluster.broker.lagging:
            cluster.broker.created_ms[topic] = now_ms
            cluster.broker.wake(topic)
        cluster.broker.lagging.clear()
        self._lives.heal()
        for group in cluster.scenario.groups:
            while not restricted.enough(group, cluster.staying()):
                self._join(group)
        for topic in cluster.broker.counts:
            self._spread_count(topic)

    # --- clients come and go

    def _join(self, group: GroupPlan) -> None:
        self.names += 1
        name = f"c{self.names}"
        if len(self.cluster.checkpoints) < self.cluster.scenario.queries:
            self.cluster.checkpoints[name] = Checkpoint()
        self.cluster.add_client(group.name, self.cluster.new_options(group, name))

    def _arrive(self) -> None:
        if len(self.cluster.living()) < 2 * self.cluster.scenario.clients:
            self._join(self.cluster.scenario.groups[int(self.rng.random() * len(self.cluster.scenario.groups))])

    def _some(self) -> Client | None:
        living = self.cluster.living()
        return living[int(self.rng.random() * len(living))] if living else None

    def _duration_ms(self, intervals: int) -> int:
        return spread(self.rng, self.interval_ms // 50, intervals * self.interval_ms)

    def _crash(self) -> None:
        client = self._some()
        if client is None:
            return
        self.cluster.kill(client)
        if self.rng.random() < 0.8 or len(self.cluster.living()) < 1:
            self.cluster.schedule(self._duration_ms(4), None, self._restart, client)

    def _witness(self) -> None:
        """Lets the witness of a client notice something: mostly that the client died (T19)."""
        client = self._some()
        if client is not None and not isinstance(client, Query):
            if self._witnesses.strike(client, self.rng, self.cluster.network_faults, self._duration_ms):
                self.cluster.kill(client)
                self.cluster.schedule(self._duration_ms(4), None, self._restart, client)

    def _restart(self, old: Client) -> None:
        options = old.options
        if isinstance(old, Query):
            if self.rng.random() < CHECKPOINT_LOST:
                self.cluster.checkpoints[options.client_id] = Checkpoint()
        elif self.rng.random() < 0.3:
            self.names += 1
            options = replace(options, client_id=f"c{self.names}")
        elif "fast_reclaim" in self.cluster.scenario.kinds and old.clone_of == NONE:
            options = replace(options, fast_reclaim=not self._clones_of(old))
        self.cluster.add_client(old.group, options)

    def _false_reclaim(self) -> None:
        """Starts a client whose user vouches that a predecessor is dead although it lives (X12)."""
        client = self._some()
        if isinstance(client, Query):
            return  # Spark sees to it that a checkpoint has one query
        if client is not None and client.clone_of == NONE and not self._clones_of(client):
            self.cluster.add_client(client.group, replace(client.options, fast_reclaim=True))

    def _clones_of(self, client: Client) -> bool:
        return any(other.clone_of == client.number and not other.dead for other in self.cluster.clients)

    def _clone(self) -> None:
        client = self._some()
        if client is not None and client.member is not None and not client.frozen and not isinstance(client, Query):
            self.cluster.add_clone(client)

    def _leave(self) -> None:
        client = self._some()
        if client is not None and not client.frozen and len(self.cluster.staying()) > 1:
            if self.rng.random() < 0.5:
                client.prepare_stop()
                self.cluster.schedule(HAND_OVER_MS, client, self._left, client)
            else:
                self._left(client)

    def _left(self, client: Client) -> None:
        at_once = self.cluster.calls and self.rng.random() < 0.5
        client.leave(0 if at_once else int(self.rng.random() * self.interval_ms))

    # --- machines, network, broker

    def _freeze(self, asleep: bool) -> None:
        client = self._some()
        if client is not None:
            client.freeze(min(self.cluster.network_faults.stop_ms_max, self._duration_ms(8)), asleep)

    def _wall_jump(self) -> None:
        client = self._some()
        if client is not None:
            client.clock.set_wall(int((self.rng.random() * 2 - 1) * WALL_JUMP_MS))

    def _lag(self) -> None:
        client = self._some()
        if client is not None:
            client.lagging = True
            self.cluster.schedule(self._duration_ms(6), None, self._caught_up, client)

    def _caught_up(self, client: Client) -> None:
        client.lagging = False
        self._recover(None)

    def _recover(self, _: None) -> None:
        self.cluster.broker.recover()

    def _outage(self, reads: bool, writes: bool) -> None:
        until_ms = self.cluster.now_ms + min(LATE_MS_MAX, self._duration_ms(5))
        broker = self.cluster.broker
        if self.cluster.now_ms < max(broker.reads_down_until_ms, broker.writes_down_until_ms) + self.interval_ms:
            return  # outages in a row can cut one client off and spare another: that client is not connected (V6)
        self.cluster.network_faults.survival = (0.0, 0.5, 1.0)[int(self.rng.random() * 3)]
        if reads:
            broker.reads_down_until_ms = max(until_ms, broker.reads_down_until_ms)
        if writes:
            broker.writes_down_until_ms = max(until_ms, broker.writes_down_until_ms)
        self.cluster.schedule(until_ms - self.cluster.now_ms, None, self._recover)

    def _fetch_error(self) -> None:
        """Makes one partition unreadable for a while. No partition gets this twice in a run.

        It never lasts so long that a client gives the partition up twice, because then only an admin could help (D13).
        """
        places, failing = list(self.cluster.broker.topics), self.cluster.broker.fails_until_ms
        place = places[int(self.rng.random() * len(places))]
        if place not in failing:
            failing[place] = self.cluster.now_ms + self._duration_ms(LEFT_INTERVALS - 1)

    def _delete_beginning(self) -> None:
        """Has Kafka delete the beginning of a partition. Tasks of Spark would fail: those of a run never do."""
        broker, rng = self.cluster.broker, self.rng
        places = list(broker.topics)
        place = places[int(rng.random() * len(places))]
        if not self.cluster.scenario.queries:
            broker.firsts[place] += int(rng.random() * (broker.ends[place] - broker.firsts[place] + 1))

    def _lose_tail(self) -> None:
        """Has an incomplete replica become the leader of a partition. Tasks of Spark would fail: those of a run never
        do."""
        cluster, rng = self.cluster, self.rng
        broker, places = cluster.broker, list(cluster.broker.topics)
        place = places[int(rng.random() * len(places))]
        there = [offset for offset in broker.topics[place] if offset >= broker.firsts[place]]
        if cluster.scenario.queries or not there or not broker.is_there(place, cluster.now_ms):
            return
        lost = 1 + int(rng.random() * min(len(there), LOST_MESSAGES_MAX))
        broker.elect_uncleanly(place, there[-lost], cluster.now_ms)
        if rng.random() < AGAIN:
            broker.produce(place, 1 + int(rng.random() * 2 * lost), 0, cluster.now_ms)
        for group in cluster.scenario.groups:
            if place[0] in group.topics and rng.random() < 0.6:
                cluster.schedule(self._duration_ms(4), None, self._set_one, (group, place))

    def _set_one(self, of: tuple[GroupPlan, Place]) -> None:
        if not self.healed and of[1] in self.cluster.broker.ends:
            self._set_positions(of[0], [of[1]])

    def _move_leader(self) -> None:
        """Takes a partition its leader for a while."""
        cluster, places = self.cluster, list(self.cluster.broker.topics)
        place = places[int(self.rng.random() * len(places))]
        if cluster.broker.is_there(place, cluster.now_ms) and place not in cluster.broker.leaderless:
            cluster.broker.leaderless.add(place)
            cluster.schedule(self._duration_ms(2), None, self._elected, place)

    def _elected(self, place: Place) -> None:
        """Gives a partition a new leader, which may know only a lower high watermark than the old one."""
        broker, rng = self.cluster.broker, self.rng
        if place in broker.leaderless:
            broker.leaderless.discard(place)
            broker.move_leader(place)
            if rng.random() < 0.5 and not self.healed:
                newest = broker.ends[place] - broker.firsts[place]
                broker.high_watermarks[place] = broker.ends[place] - int(rng.random() * newest)
                self.cluster.schedule(spread(rng, 1, LAG_MS_MAX), None, self._caught_up_with, place)
            broker.wake(place[0])

    def _caught_up_with(self, place: Place) -> None:
        """Lets a leader learn what its predecessor gave out."""
        if self.cluster.broker.high_watermarks.pop(place, None) is not None:
            self.cluster.broker.wake(place[0])

    def _recreate_topic(self) -> None:
        """Has somebody delete a topic and create it again. Tasks of Spark would fail: those of a run never do."""
        cluster, rng = self.cluster, self.rng
        topics = sorted(cluster.broker.counts)
        topic = topics[int(rng.random() * len(topics))]
        gone = cluster.broker.created_ms.get(topic, 0) > cluster.now_ms
        if cluster.scenario.queries or gone or self.strikes["recreate_topic"] > RECREATED_MAX:
            return
        grows = all(group.policy not in RESTRICTED for group in cluster.scenario.groups)
        change = int(rng.random() * 5) - 2
        count = max(1, cluster.broker.counts[topic] + max(-1, min(change, 1 if grows else 0)))
        gone_ms = 0 if rng.random() < 0.5 else self._duration_ms(2)
        lag_ms = 0 if rng.random() < 0.5 else spread(rng, 1, LAG_MS_MAX)
        cluster.recreate_topic(topic, count, gone_ms, lag_ms, rng.random() < 0.5)
        if rng.random() < TWICE:
            cluster.schedule(gone_ms + 1 + int(rng.random() * LAG_MS_MAX), None, self._recreate_once_more, topic)
        for group in cluster.scenario.groups:
            if topic in group.topics and rng.random() < 0.4:
                cluster.schedule(gone_ms + self._duration_ms(4), None, self._accept, (group, topic))

    def _recreate_once_more(self, topic: str) -> None:
        if not self.healed:
            self.cluster.recreate_topic(topic, self.cluster.broker.counts[topic], 0, LAG_MS_MAX, False)

    def _accept(self, place: tuple[GroupPlan, str]) -> None:
        """Lets an admin accept a topic that was created again, and set the positions of some of its partitions."""
        group, topic = place
        if not self.healed:
            self._set_positions(group, [one for one in self.cluster.broker.topics if one[0] == topic])

    def _broker_clock(self) -> None:
        """Lets a broker's clock jump or, more often, moves leadership from broker to broker for a while."""
        broker, rng = self.cluster.broker, self.rng
        if rng.random() < 0.3:
            clock = broker.clocks[int(rng.random() * len(broker.clocks))]
            clock.shift_ms += int((rng.random() * 2 - 1) * WALL_JUMP_MS)
        for number in range(1 + int(rng.random() * FLAPS_MAX)):
            self.cluster.schedule(number * FLAP_MS, None, self._flap)

    def _flap(self, _: None) -> None:
        self.cluster.broker.leader = int(self.rng.random() * len(self.cluster.broker.clocks))

    def _grow(self) -> None:
        topics = sorted(self.cluster.broker.counts)
        topic = topics[int(self.rng.random() * len(topics))]
        self.cluster.broker.add_partitions(topic, self.cluster.broker.counts[topic] + 1 + int(self.rng.random() * 2))
        self._spread_count(topic)

    def _spread_count(self, topic: str) -> None:
        for client in self.cluster.living():
            self.cluster.schedule(1 + int(self.rng.random() * self.interval_ms), client, client.topic_grew, topic)

    def _slow(self) -> None:
        self.cluster.slow_until_ms = self.cluster.now_ms + self._duration_ms(6)

    def hang_one(self) -> None:
        """Makes the next handler hang, if one is called within an interval."""
        self.cluster.stuck = 1
        self.cluster.schedule(self.interval_ms, None, self._unstuck)

    def _unstuck(self, _: None) -> None:
        """Withdraws `hang_one`. A handler that is called from now on would hang too late in the run."""
        self.cluster.stuck = 0

    # --- people

    def _group(self) -> GroupPlan:
        groups = self.cluster.scenario.groups
        return groups[int(self.rng.random() * len(groups))]

    def pause_all(self, duration_ms: int) -> None:
        """Lets an admin pause each group for `duration_ms`. Called after the heal; members end the pause when its time
        is over.
        """
        for group in self.cluster.scenario.groups:
            self._run_tool(
                group, lambda context: PausePlan(context, Terms(duration_ms=duration_ms)), {}, CrashPoint(NEVER, NEVER)
            )

    def _run_tool(
        self,
        group: GroupPlan,
        operation: Callable[[GroupContext], Operation],
        moves: dict[TopicPartition, int],
        crash_point: CrashPoint | None = None,
    ) -> None:
        """Runs an admin's tool, which sometimes crashes at one of its steps."""
        cluster, rng = self.cluster, self.rng
        way, after = rng.random(), 1 + int(rng.random() * 4)
        crash_point = crash_point or CrashPoint(after if way < 0.4 else NEVER, after if 0.4 <= way < 0.6 else NEVER)
        tool = AdminProcess(
            cluster,
            len(cluster.processes),
            f"admin{len(cluster.processes)}",
            group.name,
            cluster.new_clock(),
            operation,
            moves,
            crash_point,
        )
        cluster.processes.append(tool)
        cluster.schedule(int(rng.random() * self.interval_ms), tool, lambda _: tool.wake_reader())

    def _admin(self) -> None:
        cluster, rng, group = self.cluster, self.rng, self._group()
        self._set_positions(
            group, [place for place in cluster.broker.topics if place[0] in group.topics and rng.random() < 0.7]
        )

    def _set_positions(self, group: GroupPlan, places: list[Place]) -> None:
        broker, rng = self.cluster.broker, self.rng
        moves = {TopicPartition(*place): int(rng.random() * (broker.ends[place] + 1)) for place in places}
        terms = self._lives.terms()
        if moves:
            self._run_tool(group, lambda context: self._position_plan(context, moves, terms), moves)

    def _position_plan(self, context: GroupContext, moves: dict[TopicPartition, int], terms: Terms) -> PositionPlan:
        """Makes the plan as admin/plans/position.py does, which finds topics that were created again."""
        broker, now_ms = self.cluster.broker, self.cluster.now_ms
        infos = {topic: info for topic in broker.ids if (info := broker.describe(topic, now_ms)) is not None}
        recreated = {} if context.group is None else find_recreated(context.group, infos)
        named = {topic: one for topic, one in recreated.items() if any(tp.topic == topic for tp in moves)}
        return PositionPlan(context, moves, terms, recreated=named)

    def join_all(self) -> None:
        """Starts one more client in each group. Called after the heal."""
        for group in self.cluster.scenario.groups:
            self._join(group)

    def _beyond(self) -> None:
        """Lets an admin move a position beyond the end of its partition, without the check by which the tool would
        refuse this.
        """
        cluster, rng, group = self.cluster, self.rng, self._group()
        places = [place for place in cluster.broker.topics if place[0] in group.topics]
        place = TopicPartition(*places[int(rng.random() * len(places))])
        moves = {place: cluster.broker.ends[place] + 50 + int(rng.random() * 50)}
        terms = self._lives.terms()
        self._run_tool(group, lambda context: self._position_plan(context, moves, terms), moves)

    def _two_admins(self) -> None:
        self._admin()
        self._admin()

    def _shrink(self) -> None:
        """Lets an admin say that a topic has become smaller. It has not, and consumers that see this say so."""
        group, terms = self._group(), self._lives.terms()
        count = self.cluster.broker.counts[group.topics[0]] - 1
        self._run_tool(group, lambda context: ShrinkPlan(context, group.topics[0], count, terms), {})

    def _recreate(self) -> None:
        if self.strikes["recreate"] == 1:  # once: nothing settles between two
            self.cluster.recreate()

    def _evict_sessions(self) -> None:
        """Lets an admin evict every session that is silent. The tool gives up at a sign of life."""

        def operation(context: GroupContext) -> Operation:
            sessions = set(context.group.sessions) if context.group is not None else set()
            return EvictPlan(context, sessions, Terms(patience_ms=PATIENCE_INTERVALS * self.interval_ms))

        self._run_tool(self._group(), operation, {})

    def _step_down(self) -> None:
        """Lets an admin ask a session to step down. The record is sent by some client of the group."""
        client = self._some()
        if client is None or client.member is None or client.frozen:
            return
        group = client.member.group
        if group is not None and group.sessions:
            sessions = list(group.sessions.values())
            session = sessions[int(self.rng.random() * len(sessions))]
            client.send(StepDown(session.id, session.mark, "asked to"))

    def _used_log(self) -> int:
        """Returns the number of some log that processes use."""
        used = sorted({process.log for process in self.cluster.processes})
        return used[int(self.rng.random() * len(used))] if used else 0

    def _write_malformed(self) -> None:
        """Writes bytes that no client would write. They must change nothing (S13)."""
        number = self._used_log()
        genesis = self._genesis(number)
        if genesis is not None:
            value, shape = harmless(self.rng, self.cluster.broker.logs[number].recorded, genesis, self._group().name)
            self._write(number, value, shape)

    def _write_hostile(self) -> None:
        """Writes what only holders of a key may, to a group that has keys. It must change nothing (S13)."""
        name = self._group().name
        for process in self.cluster.processes:
            world, log = process.world, self.cluster.broker.logs[process.log]
            group = world.groups.get(name)
            same = process.topic_id == self.cluster.broker.topic_id and not process.forked
            if same and group is not None and group.keys and world.next_offset == len(log.values):
                for _ in range(BURST):
                    self._write(process.log, *hostile(self.rng, log.values, world, group))
                return

    def _genesis(self, number: int) -> Genesis | None:
        """Returns the Genesis that holds in a log, or None if there is none yet.

        Nobody may write a foreign Genesis before that, because it would be accepted.
        """
        worlds = [
            process.world
            for process in self.cluster.processes
            if process.log == number and process.topic_id == self.cluster.broker.topic_id
        ]
        return next((world.genesis for world in worlds if world.genesis is not None), None)

    def _write(self, number: int, value: bytes, shape: str) -> None:
        offset = len(self.cluster.broker.logs[number].recorded)
        self.cluster.foreign_records.setdefault(number, {})[offset] = shape
        self.cluster.broker.append(number, value, self.cluster.now_ms)

    # --- what does not heal

    def _damage(self, kind: str) -> None:
        """Damages a log, or a group in it, so that it cannot be trusted any more (S14)."""
        cluster, rng, number = self.cluster, self.rng, self._used_log()
        genesis, log = self._genesis(number), cluster.broker.logs[number]
        here = [client.group for client in cluster.clients if client.log == number]
        if genesis is None or self.healed or len(log.values) < 8 or not here:
            return
        self.strikes[kind] = 1
        self.cluster.trace(NONE, TRACED_KINDS.index(kind), 0)
        group = here[int(rng.random() * len(here))]
        everybody = [plan.name for plan in cluster.scenario.groups]
        # A client that starts reads log 0 to its end before it knows the log of its group (L2, L3).
        cluster.damaged.update([group] if kind == "newer" else everybody if number == 0 else here)
        if kind == "newer":
            self._write(number, newer_record(rng, genesis, group), kind)
        elif kind == "envelope":
            self._write(number, damaged_envelope(genesis, group), kind)
        elif kind == "gap":
            for _ in range(1 + int(rng.random() * 3)):
                cluster.broker.append(number, MISSING, cluster.now_ms)
        elif kind == "compaction":
            for at in range(1, len(log.values) - 1):
                if rng.random() < 0.7:
                    log.values[at] = MISSING
            cluster.evidence.excused.add("HistoryTruncated")  # a snapshot that a start needs may be gone
        elif kind == "unclean":
            cluster.elect_uncleanly(number)
        else:
            log.first = 1 + int(rng.random() * len(log.values))
            cluster.evidence.excused.add("HistoryTruncated")
