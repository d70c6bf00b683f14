"""Planted protocol bugs: each mutant weakens one rule of the shipped code while it is switched on, and must be found.

A mutant is a list of replaced attributes of marshal_py.protocol, and a bias: options that make its scenario likely.
Production code knows nothing of mutants, and `switched_on` puts every attribute back. Their numbers are those of the
counter-examples from which the protocol was made. fold.py has the bugs of the fold; by shipped_fold.py
the judge shares them. The docstring of a replaced function says how the mutant behaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from marshal_py.admin.plans.position import PositionPlan
from marshal_py.protocol import time
from marshal_py.protocol.claims import AtLeastOnce, Claim, ClaimPhase
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member import rebalance
from marshal_py.protocol.member.candidacy import Candidacy
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.time import HEARTBEATS_PER_INTERVAL, Due, FailureDetector, Lease, Liveness, WaitClock
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, AT_MOST_ONCE, ClaimState, Heartbeat, Leave, SetPosition
from marshal_sim.cluster.run import simulate
from marshal_sim.cluster.scenario import Options
from marshal_sim.judge import history
from marshal_sim.mutants import answers as mutants_answers
from marshal_sim.mutants import claims as mutants_claims
from marshal_sim.mutants import client as mutants_client
from marshal_sim.mutants import clock as mutants_clock
from marshal_sim.mutants import data as mutants_data
from marshal_sim.mutants import event_loops as mutants_event_loops
from marshal_sim.mutants import fold as mutants_fold
from marshal_sim.mutants import lanes as mutants_lanes
from marshal_sim.mutants import log as mutants_log
from marshal_sim.mutants import query as mutants_query
from marshal_sim.mutants import witness as mutants_witness
from marshal_sim.mutants.shipped_fold import ShippedFold

Patch = tuple[Any, str, Any]
SEEDS_BASE: Final = 1_000_000  # schedules of mutants do not overlap with those of the ordinary search


class Mutant(NamedTuple):
    """Describes one planted bug. `says`: what it does wrong, in words. `bias`: the options under which it is likely to
    show.
    """

    name: str
    says: str
    patches: Callable[[], list[Patch]]  # called for each run: some patches remember things
    bias: Options

    def places(self) -> tuple[str, ...]:
        """Returns the modules whose code it replaces: only a simulator that runs these modules can find it."""
        owners = (owner for owner, _, _ in self.patches())
        return tuple(sorted({getattr(owner, "__module__", None) or owner.__name__ for owner in owners}))


class Hunt(NamedTuple):
    """Holds the result of the search for one planted bug."""

    mutant: str
    found: bool
    invariant: str
    schedules: int
    seed: int


# ---------------------------------------------------------------------------------------------------------------------
# Mutants of the member


def _x2() -> list[Patch]:
    receive, read = Member.receive, Liveness.read_heartbeat
    current: list[Instant] = []

    def received(self: Member, verdict: Any, now: Instant) -> None:
        current[:] = [now]
        receive(self, verdict, now)

    def read_heartbeat(self: Liveness, sequence: int, accepted: bool, extended: bool) -> bool:
        known = read(self, sequence, accepted, extended)
        if extended:
            self.lease.started = current[0]
        return known

    return [(Member, "receive", received), (Liveness, "read_heartbeat", read_heartbeat)]


def _x4() -> list[Patch]:
    read = Liveness.read_heartbeat

    def read_heartbeat(self: Liveness, sequence: int, accepted: bool, extended: bool) -> bool:
        return read(self, sequence, accepted, True)

    def open_ms(self: Member, epoch: int, now: Instant) -> int:  # the lease alone must end delivery in a pause
        claim = self.claims.get(epoch)
        return self.liveness.lease.left_ms(now) + 1 if claim is not None and claim.phase is ClaimPhase.OPEN else 0

    def stop_unless_paused(self: Claim, reason: str, drain_until_ms: int | None, successor: int = NONE) -> None:
        if reason != "paused":
            stop(self, reason, drain_until_ms, successor)

    stop = Claim.stop
    return [
        (Liveness, "read_heartbeat", read_heartbeat),
        (Member, "open_ms", open_ms),
        (Claim, "stop", stop_unless_paused),
    ]


def _x5() -> list[Patch]:
    def open_ms(self: Member, epoch: int, now: Instant) -> int:
        return self.liveness.lease.left_ms(now) + 1 if epoch in self.claims and not self.paused else 0

    return [(Member, "open_ms", open_ms)]


def _x23() -> list[Patch]:
    def leave(self: Member, now: Instant, reason: str, wait_ms: int) -> None:
        self.leaving = reason

    def send_leave(self: Member, group: Group, now: Instant) -> None:
        if self.leave_sent_ms is None or now.mono_ms - self.leave_sent_ms >= self.third_ms:
            self.leave_sent_ms = now.mono_ms
            self.out.send.append(Leave(self.session, self.leaving))

    return [(Member, "leave", leave), (Member, "_leave", send_leave)]


def _x24() -> list[Patch]:
    def left_ms(self: Lease, now: Instant) -> int:
        return -1 if self.started is None else 2 * self.interval_ms - now.since_ms(self.started)

    return [(Lease, "left_ms", left_ms), (rebalance, "EVICT_INTERVALS", 1), (time, "EVICT_INTERVALS", 1)]


def _x25() -> list[Patch]:
    new = Liveness.new_instance

    def new_instance(self: Liveness, now: Instant) -> bytes:
        if not self.newest_instance:
            return new(self, now)
        self.instances[self.newest_instance] = now
        return self.newest_instance

    return [(Liveness, "new_instance", new_instance)]


def _x27() -> list[Patch]:
    beat = Member._heartbeat
    told: dict[int, dict[int, int]] = {}

    def heartbeat(self: Member, group: Group, now: Instant) -> None:
        beat(self, group, now)
        record, last = self.out.send.pop(), told.setdefault(id(self), {})
        assert isinstance(record, Heartbeat)
        fresh: list[ClaimState] = [e for e in record.claims if last.get(e.epoch) != e.position]
        last.update((e.epoch, e.position) for e in fresh)
        self.out.send.append(replace(record, claims=tuple(fresh)))

    return [(Member, "_heartbeat", heartbeat)]


def _x31() -> list[Patch]:
    def due(self: Liveness, now: Instant) -> Due:
        """Sends heartbeats on time, and nothing else: it does not matter whether a heartbeat was ever read back."""
        third_ms = self.interval_ms // HEARTBEATS_PER_INTERVAL
        late = self.last_sent is None or now.mono_ms - self.last_sent.mono_ms >= third_ms
        return Due.HEARTBEAT if late else Due.NOTHING

    return [(Liveness, "due", due)]


def _x40() -> list[Patch]:
    return [(time, "QUIET_INTERVALS", 0)]


def _t5() -> list[Patch]:
    def credit_pause(self: FailureDetector, pause_change: int, waited_ms: int, now: Instant) -> None:
        """Counts on from the end of the last step, so that what lies between counts twice."""
        if self._pause[0] == pause_change and waited_ms > self.pause_waited_ms():
            self._pause = (pause_change, self.clock.counted_ms, waited_ms)

    return [(FailureDetector, "credit_pause", credit_pause)]


def _x34() -> list[Patch]:
    advance = WaitClock.advance

    def always(self: WaitClock, now: Instant, proven: bool) -> None:
        advance(self, now, True)

    return [(WaitClock, "advance", always)]


def _x36() -> list[Patch]:
    act = PositionPlan.act

    def hasty(self: PositionPlan, group: Group, now: Instant) -> None:
        """Ends the operation with `not moved` once the first SetPosition was sent, without waiting for its verdict."""
        act(self, group, now)
        if self.moved is None and any(self.sent(SetPosition)):
            self.end()

    return [(PositionPlan, "act", hasty), (PositionPlan, "_may_land", lambda self, group: False)]


def _x37() -> list[Patch]:
    drained = Claim.drained

    def waits_for_handlers(self: Claim, now_ms: int) -> bool:
        return drained(self, -1)

    return [(Claim, "drained", waits_for_handlers)]


def _g1() -> list[Patch]:
    made = Claim.__init__
    committed: dict[TopicPartition, int] = {}

    def claim(self: Claim, tp: TopicPartition, epoch: int, generation: int, tracker: Any, topic_id: str) -> None:
        if isinstance(tracker, AtLeastOnce):
            position = committed[tp] = max(tracker.position(), committed.get(tp, 0))
            tracker = AtLeastOnce(position)
        made(self, tp, epoch, generation, tracker, topic_id)

    return [(Claim, "__init__", claim)]


def _a3() -> list[Patch]:
    def drained(self: Claim, now_ms: int) -> bool:
        return True

    return [(Claim, "drained", drained)]


def _h1() -> list[Patch]:
    stop = Claim.stop

    def stop_without_end(self: Claim, reason: str, drain_until_ms: int | None, successor: int = NONE) -> None:
        stop(self, reason, None if reason == "hand-over" else drain_until_ms, successor)

    return [(Claim, "stop", stop_without_end)]


def _d6() -> list[Patch]:
    def park(self: Member, epoch: int, reason: str, detail: str, now: Instant) -> None:
        pass

    return [(Member, "park", park)]


def _a6() -> list[Patch]:
    successors = Candidacy.successors

    def to_one(self: Candidacy, group: Group) -> dict[TopicPartition, int]:
        """Names the session that has the fewest claims as the successor of every partition."""
        target = successors(self, group)
        least = min(set(target.values()), key=lambda sid: (group.sessions[sid].held, sid), default=NONE)
        return dict.fromkeys(target, least)

    return [(Candidacy, "successors", to_one)]


def _d3() -> list[Patch]:
    drop = Member.drop_grants

    def drop_unless_fenced(self: Member, claim: Claim) -> None:
        if not self.fenced or self.paused:
            drop(self, claim)

    return [(Member, "drop_grants", drop_unless_fenced)]


def _w1() -> list[Patch]:
    return [(time, "HEARTBEATS_PER_INTERVAL", 10**6)]


def _w2() -> list[Patch]:
    due = Liveness.due

    def rarely(self: Liveness, now: Instant) -> Due:
        early = self.last_sent is not None and now.mono_ms - self.last_sent.mono_ms < self.interval_ms
        return Due.NOTHING if early and self.healthy(now) else due(self, now)

    return [(Liveness, "due", rarely)]


def _d8() -> list[Patch]:
    def open_ms(self: Member, epoch: int, now: Instant) -> int:
        return int(epoch in self.claims and self.claims[epoch].phase is ClaimPhase.OPEN and not self.paused)

    return [(Member, "open_ms", open_ms)]


def _bias(*kinds: str, clients: int = 3, **more: Any) -> Options:
    return Options(clients=clients, partitions=3, interval_ms=2_000, kinds=frozenset(kinds))._replace(**more)


_MEMBER: Final = (
    Mutant("X1", "a claim is as old as a broker's clock says", mutants_clock.x1, _bias("broker_clock", "arrive")),
    Mutant("X2", "the lease counts from the read-back", _x2, _bias("lag", "delay", "stop")),
    Mutant("X4", "a heartbeat that extends nothing renews the lease", _x4, _bias("admin", "slow_handler")),
    Mutant("X5", "delivers until a Release is read", _x5, _bias("arrive", "leave", "step_stop")),
    Mutant("X14", "the same, by a clamped clock of the log", mutants_clock.x14, _bias("broker_clock", "arrive")),
    Mutant("X16", "a compacted log elects another owner", mutants_log.x16, _bias("compaction", "arrive", "crash")),
    Mutant("X17", "a start in mid-log sees owned as free", mutants_log.x17, _bias("truncation", "arrive", "crash")),
    Mutant("X18", "more logs than the root says", mutants_log.x18, _bias("grow_logs", "arrive", "crash")),
    Mutant("X23", "a Leave stops nothing first", _x23, _bias("leave", "lag", "partial_read", "arrive", rate=99)),
    Mutant("X24", "evicted after one interval, fenced after two", _x24, _bias("lag", "delay", "stop")),
    Mutant("X25", "a second Join has the same instance id", _x25, _bias("drop", "duplicate", "delay", "lag")),
    Mutant("X26", "a client that loses the race for the Genesis refuses", mutants_log.x26, _bias("genesis_race")),
    Mutant("X27", "entries against what was last sent", _x27, _bias("drop", "crash", mode=AT_LEAST_ONCE)),
    Mutant("X31", "heartbeats of a stuck reader", _x31, _bias("stuck_reader", clients=4)),
    Mutant("T5", "what members waited for a pause adds up", _t5, _bias("admin", "two_admins", clients=4)),
    Mutant("X34", "waits continue through an outage", _x34, _bias("outage", "outage_writes")),
    Mutant(
        "X35",
        "a pause ends by a broker's timestamp",
        mutants_clock.x35,
        _bias("admin", "two_admins", "broker_clock", "slow_handler"),
    ),
    Mutant("X36", "`not moved` while a copy can still land", _x36, _bias("two_admins", "admin", "delay", "retry")),
    Mutant("X37", "a stuck handler holds a pause open", _x37, _bias("admin", "stuck_handler", "slow_handler")),
    Mutant(
        "X39",
        "an admin without a session evicts everybody after an outage",
        mutants_log.x39,
        _bias("onlooker", "outage_writes"),
    ),
    Mutant("X40", "a session too slow to deliver revives itself without end", _x40, _bias("slow_uplink", clients=4)),
    Mutant("X41", "the Genesis is judged misrouted", mutants_log.x41, _bias("logs")),
    Mutant("X42", "the tool exits while its own renewal follows", mutants_log.x42, _bias("admin", "delay", "reorder")),
    Mutant("G1", "max(committed, own) undoes a rewind", _g1, _bias("admin", "two_admins", mode=AT_LEAST_ONCE)),
    Mutant("G3", "the wall clock in the fold", mutants_clock.g3, _bias("wall_jump", "arrive", "lag")),
    Mutant("A3", "hands over while handlers still run", _a3, _bias("arrive", "slow_handler", mode=AT_LEAST_ONCE)),
    Mutant(
        "A6",
        "a member that stops names one successor for all",
        _a6,
        Options(clients=5, partitions=12, interval_ms=2_000, kinds=frozenset({"arrive"})),
    ),
    Mutant("D3", "what was granted outlives the fence", _d3, _bias("lag", "delay", "suspend", mode=AT_MOST_ONCE)),
    Mutant("D6", "an owner keeps a partition whose position lies beyond its end", _d6, _bias("beyond")),
    Mutant(
        "D6N",
        "what Kafka has deleted unread is passed over without a word",
        mutants_data.d6n,
        _bias("retention", "slow_handler", "calls", "lag"),
    ),
    Mutant(
        "D6E",
        "where Kafka has deleted the beginning, all is passed over",
        mutants_data.d6e,
        _bias("retention", "slow_handler", "calls", "lag"),
    ),
    Mutant(
        "D6G",
        "a partition that has grown over a refused position is fetched on",
        mutants_data.d6g,
        _bias("lost_tail", "late_refusal", rate=30),
    ),
    Mutant("D6T", "lost messages are taken for a fetch that failed", mutants_data.d6t, _bias("lost_tail")),
    Mutant(
        "D6F",
        "what is fetched again is fetched without its leader epoch",
        mutants_data.d6f,
        _bias("lost_tail", "fetch_error", "calls", rate=30),
    ),
    Mutant("D10L", "a topic that was created again is never noticed", mutants_data.d10l, _bias("recreate_topic")),
    Mutant("D10R", "an id that somebody has accepted counts unasked", mutants_data.d10r, _bias("recreate_topic")),
    Mutant("D10S", "an id that the log has replaced is ignored for good", mutants_data.d10s, _bias("recreate_topic")),
    Mutant("D10B", "the data client goes on with the deleted topic", mutants_data.d10b, _bias("recreate_topic")),
    Mutant("H1", "a hand-over waits for its handlers without end", _h1, _bias("busy_join", clients=1)),
    Mutant(
        "D12A",
        "an answer moves the partition, whichever assignment it is about",
        mutants_data.d12a,
        _bias("late_refusal", "lost_tail", "admin", mode=AT_LEAST_ONCE, clients=1, rate=30),
    ),
    Mutant(
        "D12L",
        "a refusal that comes late is taken for one of the position of now",
        mutants_data.d12l,
        _bias("late_refusal", "arrive", "leave", "step_down", "admin", mode=AT_LEAST_ONCE),
    ),
    Mutant(
        "D12H",
        "a refused partition goes on at the refused position, although what came while it was held back is dropped",
        mutants_data.d12h,
        _bias("late_refusal", "lost_tail", "lag", "outage_reads", mode=AT_LEAST_ONCE, rate=30),
    ),
    Mutant("D8", "the gate does not look at the lease", _d8, _bias("stop", "lag", "suspend")),
    Mutant("D12", "one failed fetch ends the fetching, and the claim is kept", mutants_data.d12, _bias("fetch_error")),
    Mutant("W1", "the third of an interval after which a heartbeat is due is none", _w1, _bias("arrive")),
    Mutant("W2", "a heartbeat is due after an interval, and looked for after a third", _w2, _bias("arrive")),
    Mutant("Q1", "a query plans and acks before its claims have come", mutants_query.q1, _bias("crash", queries=2)),
    Mutant("Q2", "a trigger acks what its tasks left out", mutants_query.q2, _bias("stop", "lag", "admin", queries=2)),
    Mutant(
        "Q3",
        "a replayed batch leaves out what nobody has claimed yet",
        mutants_query.q3,
        _bias("crash", "admin", "slow_handler", queries=3, rate=20, intervals=40),
    ),
    Mutant(
        "Q4",
        "late news of a commit acks the batch that the query has now",
        mutants_query.q4,
        _bias("crash", "lag", queries=3),
    ),
    Mutant(
        "Q5",
        "what was handed over in another incarnation of the log counts in this one",
        mutants_query.q5,
        _bias("recreate", "stuck_handler", queries=3),
    ),
    *(
        Mutant(name, says, patches, _bias(*kinds, **more))
        for name, says, patches, kinds, more in (
            *mutants_claims.PLANTED,
            *mutants_witness.PLANTED,
            *mutants_client.PLANTED,
            *mutants_lanes.PLANTED,
            *mutants_event_loops.PLANTED,
        )
    ),
    *(
        Mutant(name, says, patches, _bias("answers", *kinds, mode=AT_LEAST_ONCE))
        for name, says, patches, kinds in mutants_answers.PLANTED
    ),
)
_FOLD_BIAS: Final = {
    "X6": _bias("admin"),
    "X7": _bias("two_admins", "delay", "duplicate"),
    "X8": _bias("crash", mode=AT_MOST_ONCE),
    "X9": _bias("twin", "duplicate", "delay", mode=AT_MOST_ONCE, rate=30),
    "X10": _bias("duplicate", "admin", "delay", "two_admins"),
    "X11": _bias("crash", "twin", "delay"),
    "X13": _bias("duplicate", "reorder", "delay", mode=AT_LEAST_ONCE),
    "X15": _bias("reorder", "delay"),
    "X19": _bias("delay", "duplicate", "stop"),
    "X20": _bias("two_admins", "delay", "duplicate"),
    "X21": _bias("two_admins", "admin", "delay", "duplicate"),
    "X22": _bias("admin", "slow_handler", "stop"),
    "X28": _bias("two_admins", "delay"),
    "X29": _bias("two_admins", "duplicate"),
    "X32": _bias("arrive"),
    "X33": _bias("mixed_modes"),
    "X38": _bias("mode_change", "arrive"),
    "G2": _bias("arrive", "crash", "delay", "duplicate"),
    "G4": _bias("duplicate", "delay", "arrive", "slow_handler", mode=AT_LEAST_ONCE),
    "R4": _bias("arrive", "leave", "delay", "reorder", mode=AT_MOST_ONCE),
    "R5": _bias("leave", "arrive", mode=AT_MOST_ONCE),
    "L3": _bias("crash", mode=AT_MOST_ONCE),
    "U1": _bias("create_race", "delay"),
    "U2": _bias("create_race", "delay"),
    "U3": _bias("deletion", "delay"),
    "F11A": _bias("keys"),
    "F11B": _bias("keys"),
    "F11C": _bias("keys"),
    "F11D": _bias("keys", "admin"),
    "P3": _bias("admin", "two_admins", "stuck_handler", "slow_handler", mode=AT_LEAST_ONCE),
    "P4": _bias("retry", "delay", "duplicate", "crash", "calls", "answers", mode=AT_LEAST_ONCE),
}

VAGUE: Final = ("S1", "crash")  # they do not show that a check watches the promise which a bug breaks


def _fold_mutant(name: str) -> Mutant:
    says, rule, mutated = mutants_fold.MUTANTS[name]

    def patches() -> list[Patch]:
        rules = list(rationalizer._RULES)
        if rule >= 0:
            rules[rule] = mutated(rules[rule])
            return [(rationalizer, "_RULES", tuple(rules))]
        made: list[Patch] = mutated(rationalizer)  # what several rules share
        return made

    return Mutant(name, says, patches, _FOLD_BIAS[name])


MUTANTS: Final = {mutant.name: mutant for mutant in (*_MEMBER, *map(_fold_mutant, mutants_fold.MUTANTS))}


@contextmanager
def switched_on(mutant: Mutant) -> Iterator[None]:
    """Plants this bug in the shipped code for the time of the `with` block."""
    kept: list[Patch] = []
    try:
        for owner, name, value in mutant.patches():
            kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(kept):
            setattr(owner, name, value)


def with_its_judge(name: str) -> Mutant:
    """Returns the mutant `name`. If it is a bug of the fold, the judge folds the log with the bug as well, so that S1
    cannot see it."""
    mutant = MUTANTS[name]
    if name not in mutants_fold.MUTANTS:
        return mutant
    return mutant._replace(patches=lambda: [*mutant.patches(), (history, "Oracle", ShippedFold)])


def find(name: str, schedules: int, base: int = SEEDS_BASE) -> Hunt:
    """Runs up to `schedules` seeds from `base` on with the mutant switched on, until the auditor objects.

    A bug counts as found when it breaks an invariant that says what went wrong. S1, which says only that a reader
    differs, does not count, nor does a crash. So the judge shares a bug of the fold. A seed in which the
    shipped code breaks something, too, proves nothing.
    """
    mutant = with_its_judge(name)
    for number in range(schedules):
        seed = base + number
        with switched_on(mutant):
            violations = [v.invariant for v in simulate(seed, mutant.bias).violations if v.invariant not in VAGUE]
        if violations and not simulate(seed, mutant.bias).violations:  # the shipped code passes, so the bug was found
            return Hunt(name, True, violations[0], number + 1, seed)
    return Hunt(name, False, "", schedules, -1)
