"""The judge of liveness: V1 to V9 and V13 to V15, one function each, over the facts of one log.

V7: when an admin pauses a group, every member that is reading releases its partitions within one interval (T12). V8: an
owner that hands over waits for its handlers no longer than its limit (A3). V9: a partition whose position lies beyond
its end is parked, so nobody may claim it (D6). V13: who falls behind gives up one partition at a time, and keeps one
(D16). V14: a session asks for grants at a bounded pace (D2). V15: no partition waits for messages of another one that
nobody takes.

What a run must achieve depends on its course, which the run describes in `Demands`. The simulator gives exact times
after its heal, when all faults are over. A run of real processes gives the time at which all was owned and done, and
excuses processes that were stopped or got no time. Like auditor.py this file knows the oracle only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from marshal_sim.judge.checkpoints import CHECKPOINT_OFFSETS
from marshal_sim.judge.evidence import Client, Delivery, Key, Violation
from marshal_sim.judge.facts import ClaimSpan, FinalPosition, SessionFacts
from marshal_sim.judge.history import History
from marshal_sim.oracle.rules import EVICT_INTERVALS
from marshal_sim.oracle.state import Group

OVERFLOW: Final = "overflow"
QUIET_INTERVALS = 4  # a client whose second revival failed stays silent this long (PROTOCOL.md T10)
CLAIMS_MAX = 3  # claim records per partition and interval (V4)
GRANTS_MAX = 30  # ClaimingMessages of a session in any second (V14)
GONE, STARVED = "gone", "starved"


class Departure(NamedTuple):
    """A client that is gone, or that can no longer do its work (`how` says which)."""

    ms: float
    group: str
    session: int
    interval_ms: int
    how: str  # left (a clean stop), killed, stuck_reader, slow_uplink, divergence
    silent_ms: float  # until then it may still show signs of life


class Absence(NamedTuple):
    """Names a time in which nothing is demanded of a process: it was gone, stopped, or got no turn on its machine."""

    client_id: str
    since_ms: float
    until_ms: float
    why: str


class Demands(NamedTuple):
    """The course of a run. What the run must achieve follows from it."""

    interval_ms: int
    healed_ms: float
    end_ms: float
    departures: tuple[Departure, ...]
    places: tuple[tuple[str, int], ...]
    topics: dict[str, tuple[str, ...]]  # the topics of each group
    no_evictions: bool  # V6: no client may lose a claim before the first departure
    settled_ms: float | None = None  # when the run saw that everything was owned, if it did
    pauses: tuple[tuple[str, float], ...] = ()  # groups that an admin would pause, and since when (V7)
    absences: tuple[Absence, ...] = ()
    watched: frozenset[str] | None = None  # the client ids of which V6 and V7 ask; None: all
    herd: int = 1  # clients that may claim at once, because a slow machine reads late (V4)
    herds_since_ms: float | None = None  # V4; None: from an interval after the heal on
    fails: frozenset[str] = frozenset()  # groups that wait for an admin where a topic was created again (D10)


def judge_liveness(demands: Demands, history: History) -> list[Violation]:
    """Returns a violation for every missed demand."""
    found: list[Violation] = []
    for check in CHECKS:
        found += check(demands, history)
    return found


def _at(history: History, key: Key, ms: float) -> ClaimSpan | None:
    """Returns the claim that holds the partition `key` at the time `ms`, or None."""
    claims = history.by_key.get(key, ())
    index = bisect_right(claims, ms, key=lambda claim: claim.ms) - 1
    return claims[index] if index >= 0 and _ended_ms(history, claims[index], ms + 1) > ms else None


def _ended_ms(history: History, claim: ClaimSpan, otherwise: float) -> float:
    read_ms = history.evidence.read_ms
    return read_ms[claim.end] if claim.end < len(read_ms) else otherwise


def _keys(demands: Demands, history: History) -> list[Key]:
    """Returns the partitions that must be consumed: those of each group's topics that are not parked.

    Nobody may claim a parked partition (F6.4), nor one of a topic that was created again and is the old one in the log.
    """
    keys = [
        (group, *place)
        for group, topics in demands.topics.items()
        for place in demands.places
        if place[0] in topics and not (group in demands.fails and is_outdated(history, group, place[0]))
    ]
    return [key for key in keys if key not in history.final_positions or not history.final_positions[key].parked]


def is_outdated(history: History, group: str, topic: str) -> bool:
    """Returns whether the log ends with another id of the topic than the cluster has."""
    state, ids = history.oracle.groups.get(group), history.evidence.ids.get(topic)
    known = None if state is None else state.topics.get(topic)
    return known is not None and ids is not None and known.id not in ("", ids[-1])


def _pause_over_ms(demands: Demands, history: History, group: str) -> float:
    """Returns when the group's last pause ended, or the time of the heal if that is later."""
    read_ms = history.evidence.read_ms
    ends = [end for _, end in history.pauses.get(group, ())]
    return max([demands.healed_ms, *(read_ms[end] if end < len(read_ms) else demands.end_ms for end in ends)])


def _unowned(demands: Demands, history: History, invariant: str) -> Iterator[Violation]:
    """Yields partitions without a live owner at the time when all must be owned.

    That is three intervals and QUIET_INTERVALS more after the heal or the last pause, because a client may have to stay
    silent first. The caller says which `invariant` it judges: V1, V2 or V3. Who owned the partition last decides which
    of these is broken.
    """
    for key in _keys(demands, history):
        due_ms = _pause_over_ms(demands, history, key[0]) + (3 + QUIET_INTERVALS) * demands.interval_ms + 1_000
        if demands.settled_ms is not None:
            due_ms = min(due_ms, demands.settled_ms)
        owner = _at(history, key, due_ms)
        if owner is None and due_ms != demands.settled_ms:  # a claim may be under way, but not where the run saw none
            owner = _at(history, key, due_ms + history.slack.progress_ms)
        dead = {absence.client_id for absence in demands.absences if absence.why == GONE and absence.since_ms <= due_ms}
        if due_ms >= demands.end_ms or (owner is not None and owner.client_id not in dead):
            continue
        before = [claim for claim in history.by_key.get(key, ()) if claim.ms <= due_ms]
        last = before[-1] if before else None
        released_by = last is not None and owner is None and last.ended_by in ("ReleasingPartition", "Leave")
        if invariant == ("V3" if last is None else "V2" if released_by else "V1"):
            whose = last.client_id if last is not None else "nobody"
            yield Violation(invariant, due_ms, -1, f"{key} has no live owner; the last was {whose}")


def _waits(demands: Demands, history: History) -> Iterator[tuple[Departure, ClaimSpan, float]]:
    """Yields each departed client, each claim that it held, and the time at which the next client claimed that
    partition.
    """
    for gone in demands.departures:
        for key in _keys(demands, history):
            held = _at(history, key, gone.ms) if key[0] == gone.group else None
            if held is not None and held.session == gone.session:
                successors = [claim for claim in history.by_key[key] if claim.epoch > held.epoch]
                yield gone, held, successors[0].ms if successors else demands.end_ms + 1


def overflows(group: Group) -> bool:
    """Returns whether some consumers of the group have conditions under which they own something."""
    return group.config is not None and group.config.fields["policy"] == OVERFLOW


def v1_dead_owner(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V1: a dead owner's partition is claimed within two intervals and a second of the owner's
    last sign of life.
    """
    yield from _unowned(demands, history, "V1")
    for gone, held, claimed_ms in _waits(demands, history):
        # Records of the dead may still be on their way: its last sign of life counts. A client that still runs must
        # fall silent in time.
        extended = history.sessions[gone.group, gone.session].extensions[-1].offset
        silent_ms = max(gone.ms, history.evidence.read_ms[extended])
        silent_ms = silent_ms if gone.how == "killed" else min(silent_ms, gone.silent_ms)
        due_ms = silent_ms + EVICT_INTERVALS * gone.interval_ms + 1_000 + history.slack.progress_ms
        if (group := history.oracle.groups.get(gone.group)) is not None and overflows(group):
            due_ms += gone.interval_ms // 3  # those with conditions may each take another for the next owner
        if gone.how != "left" and claimed_ms > due_ms:
            yield Violation(
                "V1", silent_ms, held.epoch, f"{held.key} of a dead owner waits {claimed_ms - silent_ms:g} ms"
            )


def v2_released(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V2: a released partition is claimed within a second and a third of an interval."""
    yield from _unowned(demands, history, "V2")
    for gone, held, claimed_ms in _waits(demands, history):
        released_ms = _ended_ms(history, held, gone.ms)
        due_ms = released_ms + 1_000 + demands.interval_ms // 3 + history.slack.progress_ms
        if gone.how == "left" and claimed_ms > due_ms:
            yield Violation("V2", released_ms, held.epoch, f"{held.key} is free for {claimed_ms - released_ms:g} ms")


def v3_all_done(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V3: after the heal every partition is owned, and once producers have been silent for a
    while, every message is done.
    """
    yield from _unowned(demands, history, "V3")
    for key in _keys(demands, history):
        offsets = history.evidence.topics[key[1], key[2]]
        position = history.final_positions.get(key, FinalPosition(-1, False)).position
        if is_outdated(history, key[0], key[1]):
            yield Violation("V3", demands.end_ms, -1, f"{key} is still one of a topic that is gone")
        elif offsets and position <= offsets[-1]:
            yield Violation("V3", demands.end_ms, -1, f"{key} stands at {position}, its last message is {offsets[-1]}")


def claims_per_interval(demands: Demands, history: History) -> dict[Key, int]:
    """Returns the largest number of claim records of each partition that came within any one interval after the
    heal.
    """
    times: dict[Key, list[float]] = {}
    since_ms = demands.healed_ms + demands.interval_ms if demands.herds_since_ms is None else demands.herds_since_ms
    for ms, key in sorted(history.claim_records):
        if ms >= since_ms:
            times.setdefault(key, []).append(ms)
    return {
        key: max(bisect_left(mine, ms + demands.interval_ms) - at for at, ms in enumerate(mine))
        for key, mine in times.items()
    }


def v4_no_herd(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V4: at most CLAIMS_MAX claim records of a partition come within one interval."""
    for key, most in claims_per_interval(demands, history).items():
        if most > CLAIMS_MAX * demands.herd:
            yield Violation("V4", demands.end_ms, -1, f"{most} claim records of {key} in one interval")


def v5_noticed(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V5: within a checkpoint and a heartbeat of a divergence, a client notes it in the log or
    ends.

    A divergence begins where the simulator falsified a client's memory, or where a heartbeat reports another state than
    the oracle's.
    """
    read_ms = history.evidence.read_ms
    senders: dict[tuple[str, int], Client] = {}
    begun: dict[tuple[str, int], tuple[float, int]] = {}  # group, session -> since when, first record that shows it
    for gone in demands.departures:
        checkpoint = (bisect_right(read_ms, gone.ms) // CHECKPOINT_OFFSETS + 1) * CHECKPOINT_OFFSETS
        if gone.how == "divergence" and checkpoint < len(read_ms):
            begun[gone.group, gone.session] = gone.ms, checkpoint
    for offset, group, session, sender in history.divergent:
        begun.setdefault((group, session), (read_ms[offset], offset))
        senders[group, session] = sender
    for (group, session), (since_ms, offset) in begun.items():
        due_ms = read_ms[offset] + demands.interval_ms + 1_000 + history.slack.progress_ms
        said = [ms for ms, name, fields in history.notes if name == group and fields["kind"] == "diverged"]
        said += [stop.ms for stop in history.evidence.stops if stop.client == senders.get((group, session))]
        noticed = any(since_ms <= ms <= due_ms for ms in said)
        if group in demands.topics and due_ms < demands.end_ms and not noticed:
            yield Violation("V5", due_ms, offset, f"nobody in {group} says that session {session} differs")


def _absent(demands: Demands, facts: SessionFacts, since_ms: float, until_ms: float) -> set[str]:
    """Returns the reasons why nothing may be demanded of a client between two times; empty if there is none.

    That the client got no turn on its machine is a reason only if it lasted for more than half an interval.
    """
    found = set()
    for absence in demands.absences:
        shared_ms = min(until_ms, absence.until_ms) - max(since_ms, absence.since_ms)
        enough_ms = facts.interval_ms // 2 if absence.why == STARVED else 0
        if absence.client_id == facts.client_id and shared_ms > enough_ms:
            found.add(absence.why)
    return found


def _is_watched(demands: Demands, client_id: str) -> bool:
    return demands.watched is None or client_id in demands.watched


def v6_no_spurious(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V6: whatever happens to brokers, no client is evicted that lives, is connected and holds a
    claim.
    """
    read_ms = history.evidence.read_ms
    first_ms = min((gone.ms for gone in demands.departures), default=demands.end_ms)
    for eviction in history.evictions if demands.no_evictions else ():
        facts, ms = history.sessions[eviction.group, eviction.session], read_ms[eviction.offset]
        if not eviction.held or ms >= first_ms or not _is_watched(demands, facts.client_id):
            continue
        if eviction.session < history.evidence.inherited:
            continue  # a client of a dump: dead when the run began
        away = _absent(demands, facts, read_ms[eviction.observed], ms)
        if away:
            history.counted["V6"] += away == {STARVED}
            continue
        yield Violation(
            "V6",
            ms,
            eviction.offset,
            f"session {eviction.session} of {eviction.group} ({facts.client_id}) "
            f"was evicted by {eviction.by} with {eviction.held} partitions",
        )


def v7_drained(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V7: in a pause, an owner that reads the log releases all within one interval (T12)."""
    read_ms = history.evidence.read_ms
    for name, asked_ms in demands.pauses:
        for start, end in history.pauses.get(name, ()) if name in demands.topics else ():
            over_ms = read_ms[end] if end < len(read_ms) else demands.end_ms
            for key, claims in history.by_key.items():
                for held in claims if key[0] == name and read_ms[start] >= asked_ms else ():
                    facts = history.sessions[name, held.session]
                    due_ms = read_ms[start] + facts.interval_ms + 1_000 + history.slack.progress_ms
                    ended_ms = _ended_ms(history, held, demands.end_ms)
                    away = _absent(demands, facts, read_ms[start] - facts.interval_ms, due_ms)
                    if not _is_watched(demands, held.client_id) or away:
                        continue
                    if held.epoch < start < held.end and ended_ms > due_ms < over_ms:
                        yield Violation(
                            "V7",
                            due_ms,
                            start,
                            f"{key} is still held {ended_ms - read_ms[start]:g} ms after the pause began",
                        )


def v8_handed_over(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V8: a hand-over ends in time. It ends with the claim, or when its owner delivers again
    because the successor has gone.
    """
    evidence, gone = history.evidence, {(one.group, one.session): one.ms for one in demands.departures}
    for begun_ms, group, epoch in evidence.handovers:
        held = history.claims.get((group, epoch))
        if held is None or begun_ms < demands.healed_ms or group not in demands.topics:
            continue
        interval_ms, slack_ms = history.sessions[group, held.session].interval_ms, history.slack.progress_ms
        due_ms = begun_ms + (evidence.hand_over_intervals + 1) * interval_ms + 1_000 + slack_ms
        ended_ms = _ended_ms(history, held, demands.end_ms)
        again = any(
            (d.group, d.epoch) == (group, epoch) and d.begin_ms > begun_ms + slack_ms for d in history.deliveries
        )
        if min(ended_ms, gone.get((group, held.session), ended_ms)) > due_ms and not again:
            yield Violation(
                "V8",
                due_ms,
                epoch,
                f"{held.key} is still held {ended_ms - begun_ms:g} ms after its owner began to hand it over",
            )


def v9_parked(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V9: an owner releases a partition whose position has been beyond its end for an interval
    and a second.
    """
    for key in _keys(demands, history):
        offsets = history.evidence.topics[key[1], key[2]]
        position = history.final_positions.get(key, FinalPosition(-1, False)).position
        held = _at(history, key, demands.end_ms)
        if held is None or position <= (offsets[-1] + 1 if offsets else 0):
            continue
        due_ms = max(held.ms, demands.healed_ms) + history.sessions[key[0], held.session].interval_ms + 1_000
        due_ms += history.slack.progress_ms
        if due_ms < demands.end_ms and not any(one.session == held.session for one in demands.departures):
            yield Violation("V9", due_ms, held.epoch, f"{key} stands at {position}, its end is lower")


def v13_one_per_window(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V13: an owner that releases a partition on which it falls behind owns another one, releases
    no second one within its window, and does not claim the first one again within it.
    """
    evidence, begun = history.evidence, dict[tuple[str, int], float]()
    for begun_ms, group, epoch in () if evidence.forks else evidence.handovers:  # a clone has windows of its own
        held = history.claims.get((group, epoch))
        if held is None or not held.behind:
            continue
        facts = history.sessions[group, held.session]
        exact_ms = evidence.behind_intervals * facts.interval_ms
        window_ms = exact_ms - exact_ms * history.slack.drift_ppm // 1_000_000 - history.slack.wait_ms
        mine = [claim for claim in history.claims.values() if (claim.key[0], claim.session) == (group, held.session)]
        last_ms = begun.get((group, held.session))
        begun[group, held.session] = begun_ms
        again = [claim for claim in mine if claim.key == held.key and claim.epoch > epoch]
        if last_ms is not None and begun_ms - last_ms < window_ms:
            yield Violation(
                "V13", begun_ms, epoch, f"{held.key} is the second that {held.client_id} gives up in a window"
            )
        if again and again[0].sent_ms - begun_ms < window_ms:
            yield Violation("V13", again[0].ms, again[0].epoch, f"{held.key} is claimed again by {held.client_id}")
        if not any(
            claim.ms <= begun_ms <= min(claim.released.values(), default=begun_ms) for claim in mine if claim != held
        ):
            yield Violation("V13", begun_ms, epoch, f"{held.key} is the last partition of {held.client_id}")


def v14_pace(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V14: in no second a session sends more than GRANTS_MAX records that ask for grants."""
    for (group, session, client), sent in history.asked.items():
        times = sorted(sent.values())
        for first_ms, last_ms in zip(times, times[GRANTS_MAX:], strict=False):
            if last_ms - first_ms < 1_000 - history.slack.wait_ms:
                yield Violation(
                    "V14",
                    last_ms,
                    -1,
                    f"client {client} asks for grants {GRANTS_MAX + 1} times within {last_ms - first_ms:g} ms in "
                    f"session {session} of {group}",
                )


def v15_served(demands: Demands, history: History) -> Iterator[Violation]:
    """Yields each breach of V15: while a user asks for messages, each partition that his consumer delivers and that has
    some gives him one within an interval and a second.

    That of others no handler takes, or that they wait for acks, is no reason. Its own handlers are one, since
    `max_acks_pending` may keep the next message back. So are messages that they have given back, and dead letters.
    """
    evidence = history.evidence
    given: dict[tuple[str, int], list[Delivery]] = {}
    for d in history.deliveries if evidence.asking else ():
        given.setdefault((d.group, d.epoch), []).append(d)
    cloned = {client for _, *both in evidence.forks for client in both}
    clients = {offset: client for offset, client, _ in history.claimants}
    ended = {(one.key[0], one.epoch) for one in evidence.letters}  # their owners deliver no message that gets a letter
    for claim in history.claims.values() if evidence.asking else ():
        mine = given.get((claim.key[0], claim.epoch), [])
        client = clients.get(claim.epoch, mine[0].client if mine else None)
        asks = claim.key[0] in demands.topics and claim.key[1:] in evidence.topics and client in evidence.asking
        asks = asks and not history.is_gone(claim, demands.end_ms)
        apart = client in cloned or (claim.key[0], claim.epoch) in ended or any(d.again_ms >= 0 for d in mine)
        if asks and not apart:
            assert client is not None
            yield from _unserved(demands, history, claim, client, mine)


def _unserved(
    demands: Demands, history: History, claim: ClaimSpan, client: Client, mine: list[Delivery]
) -> Iterator[Violation]:
    """Yields each message of a claim for which the user of `client` had to ask for too long; `mine`: its deliveries."""
    evidence, facts = history.evidence, history.sessions[claim.key[0], claim.session]
    place = claim.key[1], claim.key[2]
    settled_ms = demands.healed_ms + (3 + QUIET_INTERVALS) * demands.interval_ms + 1_000
    since_ms = max(claim.ms, settled_ms if demands.settled_ms is None else demands.settled_ms)
    end_ms = _delivers_until_ms(demands, history, claim, client, since_ms)
    most_ms = facts.interval_ms + 1_000 + history.slack.progress_ms
    left = [offset for offset in evidence.topics[place] if offset >= claim.position]
    granted = [one for one in history.grants.get((claim.key[0], claim.epoch), ()) if one.sent_ms <= since_ms]
    over = [*claim.finished, *((one.start, one.to) for one in granted)]  # a fence may have lost what was granted
    over.append((0, (evidence.firsts or {}).get(place, 0)))
    left = [offset for offset in left if not any(start <= offset < to for start, to in over)]
    done_ms, at = 0.0, 0
    for d in [*mine, None]:
        until_ms = end_ms if d is None else min(end_ms, d.begin_ms)
        if at < len(left) and until_ms > since_ms:
            ready_ms = max(since_ms, done_ms, evidence.produced_ms.get((place, left[at]), 0))
            asked_ms = sum(
                max(0.0, min(until_ms, until_ms if one.until_ms < 0 else one.until_ms) - max(ready_ms, one.since_ms))
                for one in evidence.asking[client]
            )
            history.counted["V15"] += ready_ms < until_ms
            if asked_ms > most_ms:
                text = f"client {client} has asked for {asked_ms:g} ms, and {claim.key} {left[at]} did not come"
                yield Violation("V15", until_ms, claim.epoch, text)
        if d is not None:
            done_ms = max(done_ms, d.end_ms if d.end_ms >= 0 else demands.end_ms)
            at = bisect_right(left, d.offset)


def _delivers_until_ms(demands: Demands, history: History, claim: ClaimSpan, client: Client, since_ms: float) -> float:
    """Returns until when the owner of a claim has no reason to deliver nothing of it, as far as `client` goes."""
    evidence, group = history.evidence, claim.key[0]
    ends = [demands.end_ms, _ended_ms(history, claim, demands.end_ms), *claim.released.values()]
    for gone in demands.departures:
        known = history.sessions.get((gone.group, gone.session)) if gone.group == group else None
        accused = known is not None and gone.how == "divergence"  # nobody asks for grants until that is settled (G6)
        ends += [gone.ms] if accused or (known is not None and known.client_id == claim.client_id) else []
    ends += [one.since_ms for one in evidence.drains if one.client == client]
    ends += [ms for ms, name, epoch in evidence.handovers if (name, epoch) == (group, claim.epoch)]
    ends += [ms for ms, _ in (*evidence.fences.get(client, ()), *evidence.restarts.get(client, ())) if ms > since_ms]
    ends += [one.since_ms for one in evidence.user_pauses if one.client == client and one.until_ms > since_ms]
    ends += [
        evidence.read_ms[start] for start, _ in history.pauses.get(group, ()) if evidence.read_ms[start] > since_ms
    ]
    ends += [stop.ms for stop in evidence.stops if stop.client == client]
    return min(ends)


Check = Callable[[Demands, History], Iterator[Violation]]
CHECKS: Final[tuple[Check, ...]] = (
    v1_dead_owner,
    v2_released,
    v3_all_done,
    v4_no_herd,
    v5_noticed,
    v6_no_spurious,
    v7_drained,
    v8_handed_over,
    v9_parked,
    v13_one_per_window,
    v14_pace,
    v15_served,
)
