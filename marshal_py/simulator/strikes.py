"""Which fault strikes whom and when, drawn from the seed; and how everything heals.

A strike changes the stage, the broker or the machine of one process. It never reaches into a Member: what a fault does
to the protocol's mind must come through clocks, bytes and silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.records import StepDown
from marshal_py.simulator.admins import Admin, Plan
from marshal_py.simulator.auditor import Report
from marshal_py.simulator.client import Client
from marshal_py.simulator.cluster import Cluster
from marshal_py.simulator.faults import LATE_MS_MAX, STRIKE_KINDS, spread_ms
from marshal_py.simulator.scenario import GroupPlan

STRIKE_GAP_INTERVALS: Final = 3  # at most, between two strikes
QUIET_INTERVALS: Final = 11  # before the healing no pause begins and no handler hangs: these outlast a heal
LONG_KINDS: Final = frozenset({"admin", "two_admins", "stuck_handler"})
WALL_JUMP_MS: Final = 3_600_000
NEVER: Final = 1_000_000


class AdminCluster(Cluster):
    """A cluster that also hears what admins say."""

    def reported(self, report: Report) -> None:
        self.evidence.reports.append(report)


class Striker:
    """Everything that happens to a cluster from outside."""

    def __init__(self, cluster: AdminCluster) -> None:
        self.cluster = cluster
        self.rng = cluster.rng
        self.interval_ms = cluster.scenario.interval_ms
        self.kinds = [kind for kind in STRIKE_KINDS if kind in cluster.scenario.kinds]
        self.strikes: dict[str, int] = {}
        self.names = 0
        self.healed = False
        self._actions: dict[str, Callable[[], object]] = {
            "stop": lambda: self._freeze(False), "suspend": lambda: self._freeze(True), "crash": self._crash,
            "twin": self._twin, "wall_jump": self._wall_jump, "lag": self._lag,
            "outage": lambda: self._outage(True, True), "outage_writes": lambda: self._outage(False, True),
            "outage_reads": lambda: self._outage(True, False), "grow": self._grow, "admin": self._admin,
            "two_admins": self._two_admins, "slow_handler": self._slow, "leave": self._leave,
            "arrive": self._arrive, "step_down": self._step_down, "poison": self._poison,
            "stuck_handler": self._stuck,
        }  # fmt: skip

    # --- the run

    def begin(self) -> None:
        """The first clients come within half an interval, some later; then strikes."""
        scenario, rng = self.cluster.scenario, self.rng
        for number in range(scenario.clients):
            group = scenario.groups[number % len(scenario.groups)]
            late = number >= len(scenario.groups) and rng.random() < 0.2 and not scenario.calm
            delay_ms = int(rng.random() * (8 * self.interval_ms if late else self.interval_ms // 2))
            self.cluster.at(delay_ms, None, self._join, group)
        if self.kinds:
            self._schedule()

    def _schedule(self) -> None:
        self.cluster.at(1 + int(self.rng.random() * STRIKE_GAP_INTERVALS * self.interval_ms), None, self._strike)

    def _strike(self, _: None) -> None:
        if self.healed:
            return
        kind = self.kinds[int(self.rng.random() * len(self.kinds))]
        late = self.cluster.now_ms > self.cluster.scenario.safety_ms - QUIET_INTERVALS * self.interval_ms
        if not (late and kind in LONG_KINDS):
            self.strikes[kind] = self.strikes.get(kind, 0) + 1
            self.cluster.trace(NONE, STRIKE_KINDS.index(kind), 0)
            self._actions[kind]()
        self._schedule()

    def heal(self) -> None:
        """Every fault ends now; each group has somebody."""
        cluster, now_ms = self.cluster, self.cluster.now_ms
        self.healed = True
        cluster.weather.heal()
        cluster.broker.reads_down_until_ms = cluster.broker.writes_down_until_ms = now_ms
        cluster.slow_until_ms, cluster.stuck = 0, 0
        for process in cluster.processes:
            process.lagging = False
            process.forget_order()
            if process.frozen and not process.dead:
                process.thaw()
        self._recover(None)
        for group in cluster.scenario.groups:
            if not any(client.group == group.name for client in cluster.staying()):
                self._join(group)
        for topic in cluster.broker.counts:
            self._spread_count(topic)

    # --- clients come and go

    def _join(self, group: GroupPlan) -> None:
        self.names += 1
        self.cluster.add_client(group.name, self.cluster.new_options(group, f"c{self.names}"))

    def _arrive(self) -> None:
        if len(self.cluster.living()) < 2 * self.cluster.scenario.clients:
            self._join(self.cluster.scenario.groups[int(self.rng.random() * len(self.cluster.scenario.groups))])

    def _some(self) -> Client | None:
        living = self.cluster.living()
        return living[int(self.rng.random() * len(living))] if living else None

    def _duration_ms(self, intervals: int) -> int:
        return spread_ms(self.rng, self.interval_ms // 50, intervals * self.interval_ms)

    def _crash(self) -> None:
        client = self._some()
        if client is None:
            return
        self.cluster.kill(client)
        if self.rng.random() < 0.8 or len(self.cluster.living()) < 1:
            self.cluster.at(self._duration_ms(4), None, self._restart, client)

    def _restart(self, old: Client) -> None:
        options = old.options
        if self.rng.random() < 0.3:
            self.names += 1
            options = replace(options, client_id=f"c{self.names}")
        elif "fast_reclaim" in self.cluster.scenario.kinds and old.twin_of == NONE:
            twins = any(client.twin_of == old.number and not client.dead for client in self.cluster.clients)
            options = replace(options, fast_reclaim=not twins)
        self.cluster.add_client(old.group, options)

    def _twin(self) -> None:
        client = self._some()
        if client is not None and client.member is not None and not client.frozen:
            self.cluster.add_twin(client)

    def _leave(self) -> None:
        client = self._some()
        if client is not None and not client.frozen and len(self.cluster.staying()) > 1:
            client.leave(int(self.rng.random() * self.interval_ms))

    # --- machines, network, broker

    def _freeze(self, asleep: bool) -> None:
        client = self._some()
        if client is not None:
            client.freeze(min(self.cluster.weather.stop_ms_max, self._duration_ms(8)), asleep)

    def _wall_jump(self) -> None:
        client = self._some()
        if client is not None:
            client.clock.set_wall(int((self.rng.random() * 2 - 1) * WALL_JUMP_MS))

    def _lag(self) -> None:
        client = self._some()
        if client is not None:
            client.lagging = True
            self.cluster.at(self._duration_ms(6), None, self._caught_up, client)

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
        self.cluster.weather.survival = (0.0, 0.5, 1.0)[int(self.rng.random() * 3)]
        if reads:
            broker.reads_down_until_ms = max(until_ms, broker.reads_down_until_ms)
        if writes:
            broker.writes_down_until_ms = max(until_ms, broker.writes_down_until_ms)
        self.cluster.at(until_ms - self.cluster.now_ms, None, self._recover)

    def _grow(self) -> None:
        topics = sorted(self.cluster.broker.counts)
        topic = topics[int(self.rng.random() * len(topics))]
        self.cluster.broker.add_partitions(topic, self.cluster.broker.counts[topic] + 1 + int(self.rng.random() * 2))
        self._spread_count(topic)

    def _spread_count(self, topic: str) -> None:
        for client in self.cluster.living():
            self.cluster.at(1 + int(self.rng.random() * self.interval_ms), client, client.topic_grew, topic)

    def _slow(self) -> None:
        self.cluster.slow_until_ms = self.cluster.now_ms + self._duration_ms(6)

    def _stuck(self) -> None:
        self.cluster.stuck = 1
        self.cluster.at(self.interval_ms, None, self._unstuck)

    def _unstuck(self, _: None) -> None:
        """If no handler was called meanwhile, none hangs: it would hang too late."""
        self.cluster.stuck = 0

    # --- people

    def _admin(self) -> None:
        cluster, rng = self.cluster, self.rng
        group = cluster.scenario.groups[int(rng.random() * len(cluster.scenario.groups))]
        places = [place for place in cluster.broker.topics if place[0] in group.topics and rng.random() < 0.7]
        moves = {TopicPartition(*place): int(rng.random() * (cluster.broker.ends[place] + 1)) for place in places}
        if not moves:
            return
        plan = Plan(moves, int((1 + rng.random() * 3) * self.interval_ms), self.interval_ms,
                    1 + int(rng.random() * 4) if rng.random() < 0.4 else NEVER)  # fmt: skip
        admin = Admin(cluster, len(cluster.processes), f"admin{len(cluster.processes)}", group.name,
                      cluster.new_clock(), plan)  # fmt: skip
        cluster.processes.append(admin)
        cluster.at(int(rng.random() * self.interval_ms), admin, self._wake, admin)

    def _two_admins(self) -> None:
        self._admin()
        self._admin()

    def _wake(self, admin: Any) -> None:
        admin.wake_reader()

    def _step_down(self) -> None:
        """An admin marks a session; some client's connection carries the record."""
        client = self._some()
        if client is None or client.member is None or client.frozen:
            return
        group = client.member.group
        if group is not None and group.sessions:
            sessions = list(group.sessions.values())
            session = sessions[int(self.rng.random() * len(sessions))]
            client.send(StepDown(session.id, session.mark, "asked to"))

    def _poison(self) -> None:
        """Bytes that nobody of ours wrote: noise, damaged records, and replayed old ones."""
        rng, log = self.rng, self.cluster.broker.log
        shape = rng.random()
        value = log[int(rng.random() * len(log))]
        if shape < 0.2:
            value = rng.randbytes(int(rng.random() * 40))
        elif shape < 0.5:
            at = int(rng.random() * len(value))
            value = value[:at] + bytes((value[at] ^ 1 << int(rng.random() * 8),)) + value[at + 1 :]
        elif shape < 0.6:
            value = value[: int(rng.random() * len(value))]
        self.cluster.broker.append(value, self.cluster.now_ms)
