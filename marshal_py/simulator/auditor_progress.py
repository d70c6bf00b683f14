"""The judge of progress: V1 to V6 of invariants.md, after every fault has healed, and V7 to V9.

V7: in a pause that an admin begins, who reads lets go of everything within one of its intervals (PROTOCOL.md T12).
V8: who hands over waits no longer for its handlers than it says (A3). V9: beyond the end a partition is parked (D6).

Like auditor.py it knows the oracle only. It reads the facts that auditor.py found, by the shapes named in `Facts`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Key = tuple[str, str, int]

SLACK_MS = 200  # log round trips between a record and the claims that follow it
CHECKPOINT = 16  # PROTOCOL.md G1
QUIET_INTERVALS = 4  # a client that revived twice in vain keeps silent that long (PROTOCOL.md T10)


class Departure(NamedTuple):
    """A client that is gone, or as good as gone."""

    ms: int
    group: str
    session: int
    interval_ms: int
    how: str  # left (a clean stop), killed, stuck_reader, slow_uplink, divergence
    silent_ms: int  # until then it may still show signs of life


class Demands(NamedTuple):
    """What the run says about its own course."""

    interval_ms: int
    healed_ms: int
    end_ms: int
    departures: tuple[Departure, ...]
    places: tuple[tuple[str, int], ...]
    topics: dict[str, tuple[str, ...]]  # of each group
    outages_only: bool  # V6: nobody may lose a claim before the first departure
    settled_ms: int | None = None  # when the run saw that everything was owned, if it did
    pauses: tuple[tuple[str, int], ...] = ()  # groups that an admin would pause, and since when (V7)


class Held(Protocol):
    """A claim, as auditor.py describes it."""

    epoch: int
    session: int
    ms: int
    end: int
    ended_by: str


class Facts(Protocol):
    """What auditor.py found in the log."""

    evidence: Any
    oracle: Any
    lives: dict[tuple[str, int], Any]
    claim_records: list[tuple[int, Key]]
    evictions: list[tuple[int, str, dict[str, Any]]]
    pauses: dict[str, list[tuple[int, int]]]
    notes: list[tuple[int, str, str]]

    @property
    def by_key(self) -> Mapping[Key, Sequence[Held]]: ...


class Finding(NamedTuple):
    invariant: str
    ms: int
    offset: int
    text: str


def judge_progress(demands: Demands, facts: Facts) -> list[Any]:
    """Every missed demand."""
    found: list[Any] = []
    for check in (_owned, _departed, _backlog, _claims, _noticed, _spurious, _drained, _handed_over, _beyond):
        found += check(demands, facts)
    return found


def _at(facts: Facts, key: Key, ms: int) -> Held | None:
    """The claim that holds `key` at `ms`."""
    tenures = facts.by_key.get(key, ())
    index = bisect_right(tenures, ms, key=lambda tenure: tenure.ms) - 1
    if index < 0:
        return None
    tenure = tenures[index]
    ended_ms = facts.evidence.appended_ms[tenure.end] if tenure.end < len(facts.evidence.log) else ms + 1
    return tenure if ended_ms > ms else None


def _keys(demands: Demands, facts: Facts) -> list[Key]:
    """What must be consumed: the partitions of each group's topics, but those that are parked (F6.4)."""
    return [(group, *place) for group, topics in demands.topics.items() for place in demands.places
            if place[0] in topics and not _parked(facts, group, place)]  # fmt: skip


def _parked(facts: Facts, group: str, place: tuple[str, int]) -> bool:
    state = facts.oracle.groups.get(group)
    part = state.partitions.get(place) if state is not None else None
    return part is not None and bool(part.parked)


def _pause_over_ms(demands: Demands, facts: Facts, group: str) -> int:
    """When the last pause that outlasted the heal was over; the heal if none did."""
    over_ms = demands.healed_ms
    for _, end in facts.pauses.get(group, ()):
        ended_ms = facts.evidence.appended_ms[end] if end < len(facts.evidence.log) else demands.end_ms
        over_ms = max(over_ms, ended_ms)
    return over_ms


def _owned(demands: Demands, facts: Facts) -> Iterator[Finding]:
    """V3: everything is owned three intervals after the heal; a client in its silence may need it to be over first."""
    for key in _keys(demands, facts):
        due_ms = _pause_over_ms(demands, facts, key[0]) + (3 + QUIET_INTERVALS) * demands.interval_ms + 1_000
        if demands.settled_ms is not None:
            due_ms = min(due_ms, demands.settled_ms)
        if due_ms < demands.end_ms and not any(_at(facts, key, ms) for ms in (due_ms, due_ms + SLACK_MS)):
            yield Finding("V3", due_ms, -1, f"{key} has no owner")


def _departed(demands: Demands, facts: Facts) -> Iterator[Finding]:
    """V1 for who was killed, V2 for who left."""
    for gone in demands.departures:
        for key in _keys(demands, facts):
            held = _at(facts, key, gone.ms) if key[0] == gone.group else None
            if held is None or held.session != gone.session:
                continue
            heirs = [t for t in facts.by_key[key] if t.epoch > held.epoch]
            claimed_ms = heirs[0].ms if heirs else demands.end_ms + 1
            if gone.how == "left":
                released_ms = facts.evidence.appended_ms[held.end] if held.end < len(facts.evidence.log) else gone.ms
                if claimed_ms > released_ms + 1_000 + demands.interval_ms // 3 + SLACK_MS:
                    yield Finding("V2", released_ms, held.epoch, f"{key} is free for {claimed_ms - released_ms} ms")
                continue
            # Records of the dead may still be on their way: its last sign of life counts. Who is not quite dead must
            # fall silent by the rules in time.
            extended = facts.lives[gone.group, gone.session].extensions[-1].offset
            silent_ms = max(gone.ms, facts.evidence.appended_ms[extended])
            silent_ms = silent_ms if gone.how == "killed" else min(silent_ms, gone.silent_ms)
            if claimed_ms > silent_ms + 2 * gone.interval_ms + 1_000 + SLACK_MS:
                yield Finding("V1", silent_ms, held.epoch, f"{key} of a dead owner waits {claimed_ms - silent_ms} ms")


def _backlog(demands: Demands, facts: Facts) -> Iterator[Finding]:
    """V3: nothing is left to do when producers have been silent for long enough."""
    for key in _keys(demands, facts):
        group = facts.oracle.groups.get(key[0])
        offsets = facts.evidence.topics[key[1], key[2]]
        part = group.partitions.get((key[1], key[2])) if group is not None else None
        if offsets and (part is None or part.position <= offsets[-1]):
            at = -1 if part is None else part.position
            yield Finding("V3", demands.end_ms, -1, f"{key} stands at {at}, its last message is {offsets[-1]}")


def _claims(demands: Demands, facts: Facts) -> Iterator[Finding]:
    """V4: no herd."""
    counts: dict[Key, int] = {}
    begin_ms = demands.healed_ms + demands.interval_ms
    for ms, key in facts.claim_records:
        if ms >= begin_ms:
            counts[key] = counts.get(key, 0) + 1
    intervals = 2 + (demands.end_ms - begin_ms) // demands.interval_ms  # begun ones, at both ends
    for key, count in counts.items():
        if count > 3 * intervals:
            yield Finding("V4", demands.end_ms, -1, f"{count} claim records of {key} in {intervals} intervals")


def _noticed(demands: Demands, facts: Facts) -> Iterator[Finding]:
    """V5: one checkpoint and one heartbeat after a client's state was falsified, somebody says so in the log."""
    appended_ms = facts.evidence.appended_ms
    for gone in demands.departures:
        if gone.how != "divergence" or gone.group not in demands.topics:
            continue
        checkpoint = (bisect_right(appended_ms, gone.ms) // CHECKPOINT + 1) * CHECKPOINT
        if checkpoint >= len(appended_ms):
            continue
        due_ms = appended_ms[checkpoint] + demands.interval_ms + 1_000
        said = [ms for ms, group, kind in facts.notes if group == gone.group and kind == "diverged" and ms > gone.ms]
        if due_ms < demands.end_ms and not any(ms <= due_ms for ms in said):
            yield Finding("V5", due_ms, checkpoint, f"nobody in {gone.group} says that session {gone.session} differs")


def _drained(demands: Demands, facts: Facts) -> Iterator[Finding]:
    """V7: an owner that reads lets go in a pause."""
    appended_ms = facts.evidence.appended_ms
    for name, asked_ms in demands.pauses:
        begun = [(at, end) for at, end in facts.pauses.get(name, ()) if appended_ms[at] >= asked_ms]
        if name not in demands.topics or not begun:
            continue
        start, end = begun[0]
        over_ms = appended_ms[end] if end < len(appended_ms) else demands.end_ms
        for key, tenures in facts.by_key.items():
            for held in tenures if key[0] == name else ():
                due_ms = appended_ms[start] + facts.lives[name, held.session].interval_ms + 1_000 + SLACK_MS
                ended_ms = appended_ms[held.end] if held.end < len(appended_ms) else demands.end_ms
                if held.epoch < start < held.end and ended_ms > due_ms < over_ms:
                    yield Finding("V7", due_ms, start, f"{key} is still held {ended_ms - appended_ms[start]} ms after "
                                                       f"the pause began")  # fmt: skip


def _handed_over(demands: Demands, facts: Facts) -> Iterator[Finding]:
    """V8: the claim is over, or its owner delivers again, because the other one has gone."""
    evidence, gone = facts.evidence, {(one.group, one.session): one.ms for one in demands.departures}
    tenures = {(key[0], tenure.epoch): (key, tenure) for key, found in facts.by_key.items() for tenure in found}
    for begun_ms, group, epoch in evidence.handovers:
        if begun_ms < demands.healed_ms or group not in demands.topics or (group, epoch) not in tenures:
            continue
        key, held = tenures[group, epoch]
        interval_ms = facts.lives[group, held.session].interval_ms
        due_ms = begun_ms + (evidence.hand_over_intervals + 1) * interval_ms + 1_000 + SLACK_MS
        ended_ms = evidence.appended_ms[held.end] if held.end < len(evidence.log) else demands.end_ms
        again = any(d.epoch == epoch and d.group == group and d.begin_ms > begun_ms + SLACK_MS
                    for d in evidence.deliveries)  # fmt: skip
        if min(ended_ms, gone.get((group, held.session), ended_ms)) > due_ms and not again:
            yield Finding("V8", due_ms, epoch, f"{key} is still held {ended_ms - begun_ms} ms after its owner began to "
                                               f"hand it over")  # fmt: skip


def _beyond(demands: Demands, facts: Facts) -> Iterator[Finding]:
    """V9: who owns such a partition for an interval and a second lets go of it, and says so."""
    evidence = facts.evidence
    for key in _keys(demands, facts):
        group = facts.oracle.groups.get(key[0])
        part = group.partitions.get((key[1], key[2])) if group is not None else None
        offsets = evidence.topics[key[1], key[2]]
        held = _at(facts, key, demands.end_ms)
        if part is None or held is None or part.position <= (offsets[-1] + 1 if offsets else 0):
            continue
        due_ms = max(held.ms, demands.healed_ms) + facts.lives[key[0], held.session].interval_ms + 1_000 + SLACK_MS
        if due_ms < demands.end_ms and not any(one.session == held.session for one in demands.departures):
            yield Finding("V9", due_ms, held.epoch, f"{key} stands at {part.position}, its end is lower")


def _spurious(demands: Demands, facts: Facts) -> Iterator[Finding]:
    """V6: with outages alone nobody who holds a claim is evicted."""
    first_ms = min((gone.ms for gone in demands.departures), default=demands.end_ms)
    if demands.outages_only:
        holders = {(key[0], tenure.end) for key, tenures in facts.by_key.items() for tenure in tenures}
        for offset, group, fields in facts.evictions:
            ms = facts.evidence.appended_ms[offset]
            if fields["session"] < facts.evidence.inherited:
                continue  # a client of a dump: dead when the run began
            if ms < first_ms and (group, offset) in holders:
                yield Finding("V6", ms, offset, f"session {fields['session']} of {group} was evicted by "
                                                f"{fields['by']}")  # fmt: skip
