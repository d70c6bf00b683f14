"""The judge of real runs: raw log bytes, delivery journals, topics and faults against invariants.md.

It shares no code with the library but the oracle (`marshal_py.simulator.oracle`), and reads nothing that the library
wrote but the log itself. How each invariant is checked on real processes, and with what tolerance:

  S1   every digest in a heartbeat (of a process, not of a forger) equals the oracle's at that checkpoint. Exact.
  S2   the oracle never holds two owners, epochs grow, and every delivery's token is an accepted claim of that partition
       by the very client that journalled it, sent before the delivery. Exact, but SLACK for the clocks.
  S3   one-sided, as written: no delivery's *gate* (the library's last look at a clock before the handler; the worker
       measures it) lies after the moment at which the recorder already had another session's claim. No tolerance.
       What lies between gate and call (X3) is counted as `late_calls`. Also the fence: the gate lies within one
       interval of the send of the newest accepted extension (T8), and before the send of the own Release or Leave
       (T16). SLACK each: CreateTime is floored to ms, the clock of the library too, its gate may stay open for 5 ms.
  S4   tokens are well formed, of this incarnation, and grow with the owners as texts; a store that keeps the greatest
       token is replayed over the journal, and every write that it refuses must be one of the late calls of S3.
  S5   at most once: no offset is begun twice in one generation of its position. Exact.
  S6   at most once: every delivery lies in exactly one accepted grant of its claim, and that was sent before. Grants of
       one generation are disjoint. Exact, but SLACK for the send.
  S7   at least once: whatever the position passed and the topic held has an `end` in that generation, or a lost-range
       event covers it. Exact.
  S8   and that `end` lies before the send of the record that passed it (CreateTime). SLACK.
  S9   after each eviction: what the heir was given again was begun after the send of the old owner's last accepted
       heartbeat, or not acked by then, or above something that was not. SLACK.
  S10  positions never fall in the log; the first delivery of an at-least-once claim is the first existing offset from
       the claim's position on, and deliveries of one claim go forward. Exact.
  S11  no claim and no grant is accepted in a pause. Deliveries in a pause: those gated later than one interval after
       the last extension are found by S3, for in a pause no owner is extended.
  S12  a reported move has happened, a reported no-move has not, and delivery goes on where the move says.
  S13  a record that was not accepted changed no state (every forged one, and every 16th of the others), and no process
       ended in a way that nobody foresaw: exit codes other than 0 and 3 need a fault, and an end with a named
       CoordinationError needs a log that is unsound.
  S14  where a log must not be trusted: every process that was there names an error, and after that error, and one
       interval after the log stopped, nothing is delivered. SLACK.
  S15  an accepted Evict was sent twice the interval after the record that it observed was sent, or later. SLACK. (The
       fold proves that no extension lies between.)
  V1-V3  not as times, which are reported: at the settled point, which the scenario waited for with a deadline, every
       partition has a live owner (V1 if the last one was evicted or is dead, V2 if it released, V3 if nobody ever
       claimed it), and nothing acknowledged to a producer is left to do (V3).
  V4   at most 3 claim records per partition, interval and live member: a slow machine reads late, and who has not read
       his claim's fate sends it again after a third. The greatest number is reported.
  V5   a divergence (S1) is noticed: a Note of kind `divergence`, a named error, or the end of that session follows.
  V6   nobody who holds something is evicted while its process was being scheduled (its own beats have no gap of an
       interval), was not killed or stopped, and sent in time. Others are counted as `starved`.

A run with fewer take-overs or deliveries than asked for is void.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tests.support.evidence import NEVER, Delivery, Evidence
from tests.support.history import MS, History, Key, Stay, Tenure, Violation

SLACK_NS = 12 * MS
TOKEN = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})")
TAKEOVERS_MIN, DELIVERIES_MIN = 20, 1_000
CLAIMS_MAX = 3
QUIET_INTERVALS = 7  # T10's four, the two of the eviction, and one to be stopped in
AT_LEAST_ONCE, AT_MOST_ONCE = 1, 2
CLEAN, FAILED_CLOSED = 0, 3  # exit codes that a worker foresees


@dataclass
class Judgement:
    violations: list[Violation]
    counters: dict[str, int]
    latencies_ms: dict[str, list[int]]  # of take-overs and hand-overs, for the report only
    void: str  # why the run proves nothing; "" if it does
    history: History = field(repr=False)

    @property
    def ok(self) -> bool:
        return not self.violations and not self.void

    def __str__(self) -> str:
        lines = [", ".join(f"{name} {count}" for name, count in self.counters.items() if count)]
        for name, times in self.latencies_ms.items():
            if times:
                lines.append(f"{name}: median {round(statistics.median(times))} ms, most {max(times)} ms")
        if self.void:
            lines.append(f"VOID: {self.void}")
        lines += [str(violation) for violation in self.violations[:30]]
        if len(self.violations) > 30:
            lines.append(f"... and {len(self.violations) - 30} more")
        return "\n".join(lines)


def judge(evidence: Evidence, *, takeovers_min: int = TAKEOVERS_MIN, deliveries_min: int = DELIVERIES_MIN) -> Judgement:
    """Everything that the evidence shows against the invariants."""
    case = Case(evidence)
    found = list(case.history.found)
    for check in CHECKS:
        found += check(case)
    counters = {name: case.counters.get(name, 0) for name in COUNTERS}
    void = ""
    if counters["takeovers"] < takeovers_min:
        void = f"{counters['takeovers']} take-overs, {takeovers_min} are needed"
    elif counters["deliveries"] < deliveries_min:
        void = f"{counters['deliveries']} deliveries, {deliveries_min} are needed"
    return Judgement(found, counters, case.latencies_ms(), void, case.history)


COUNTERS = ("takeovers", "handovers", "deliveries", "redelivered", "late_calls", "stale_writes", "starved",
            "claims_per_interval_max", "records", "garbage", "rejected")  # fmt: skip


class Case:
    """Evidence and history, joined: every delivery with the claim that its token names."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.history = History(evidence)
        self.counters: dict[str, int] = {}
        self.late_calls: set[int] = set()  # id() of deliveries that S3 counts
        self.deliveries = sorted(evidence.deliveries, key=lambda d: d.begin_ns)
        self.by_epoch: dict[tuple[str, int], list[Delivery]] = {}
        self._epochs: dict[str, tuple[str, int]] = {}
        seen: set[tuple[Key, int, int]] = set()
        for d in self.deliveries:
            self.by_epoch.setdefault((self.group_of(d), self.epoch_of(d)), []).append(d)
            tenure = self.tenure_of(d)
            place = (self.key_of(d), tenure.generation if tenure else -1, d.offset)
            self.count("redelivered" if place in seen else "first")
            seen.add(place)
        self.counters["deliveries"] = len(self.deliveries)
        self.counters["records"] = sum(map(len, evidence.logs.values()))
        for name, count in self.history.verdicts.items():
            if name == "ignored garbage":
                self.count("garbage", count)
            elif name.startswith("rejected"):
                self.count("rejected", count)
        for tenures in self.history.by_key.values():
            for old, new in pairwise(tenures):
                if old.ended_by == "Evict":
                    self.count("takeovers")
                elif old.session != new.session:
                    self.count("handovers")

    def count(self, name: str, more: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + more

    def group_of(self, d: Delivery) -> str:
        life = self.evidence.lives.get(d.client)
        return life.group if life else ""

    def epoch_of(self, d: Delivery) -> int:
        match = TOKEN.fullmatch(d.token)
        return int(match[2], 16) if match else -1

    def key_of(self, d: Delivery) -> Key:
        return self.group_of(d), d.topic, d.partition

    def tenure_of(self, d: Delivery) -> Tenure | None:
        tenure = self.history.tenures.get((self.group_of(d), self.epoch_of(d)))
        return tenure if tenure is not None and tenure.key == self.key_of(d) else None

    def heirs(self, tenure: Tenure) -> list[Tenure]:
        """Later claims of the same partition by other sessions."""
        tenures = self.history.by_key[tenure.key]
        after = bisect_right(tenures, tenure.epoch, key=lambda t: t.epoch)
        return [t for t in tenures[after:] if t.session != tenure.session]

    def latencies_ms(self) -> dict[str, list[int]]:
        """From the owner's last sign of life to the heir's first delivery; reported, never judged."""
        found: dict[str, list[int]] = {"take-over": [], "hand-over": []}
        for tenures in self.history.by_key.values():
            for old, new in pairwise(tenures):
                first = self.by_epoch.get((new.key[0], new.epoch), [])
                if not first or old.session == new.session or old.ended is None:
                    continue
                if old.ended_by == "Evict":
                    since_ns = self.history.stays[old.key[0], old.session].heartbeat_sent_ns
                    if since_ns >= 0:
                        found["take-over"].append((first[0].begin_ns - since_ns) // MS)
                else:
                    found["hand-over"].append((first[0].begin_ns - old.ended.sent_ns) // MS)
        return found


# ---------------------------------------------------------------------------------------------------------------------
# Safety


def owners_and_leases(case: Case) -> Iterator[Violation]:
    """S2, S3: every delivery under a live claim of its own, inside its lease."""
    history = case.history
    for d in case.deliveries:
        who = f"{d.client} delivers {d.topic}:{d.partition}@{d.offset}"
        tenure = case.tenure_of(d)
        if tenure is None:
            yield Violation("S2", d.gate_ns, f"{who} under {d.token}, which is no accepted claim of it")
            continue
        if tenure.client != d.client:
            yield Violation("S2", d.gate_ns, f"{who} under a claim of {tenure.client}")
        if tenure.record.sent_ns > d.gate_ns + SLACK_NS:
            yield Violation("S2", d.gate_ns, f"{who} before it claimed it")
        for heir in case.heirs(tenure):
            if heir.record.read_ns < d.gate_ns:
                yield Violation("S3", d.gate_ns, f"{who} under epoch {tenure.epoch} "
                                                 f"{(d.gate_ns - heir.record.read_ns) / MS:.3f} ms after the claim of "
                                                 f"{heir.client} at {heir.epoch} was in the log")  # fmt: skip
            elif heir.record.read_ns < d.begin_ns:
                case.count("late_calls")
                case.late_calls.add(id(d))
            break
        stay = history.stays[tenure.key[0], tenure.session]
        extended_ns = stay.extended_before(d.gate_ns + SLACK_NS)
        if d.gate_ns - extended_ns > stay.interval_ns + SLACK_NS:
            yield Violation("S3", d.gate_ns, f"{who} {(d.gate_ns - extended_ns) // MS} ms after the send of the last "
                                             f"extension of session {stay.id}")  # fmt: skip
        if d.gate_ns > min(tenure.release_sent_ns, stay.leave_sent_ns) + SLACK_NS:
            yield Violation("S3", d.gate_ns, f"{who} after it sent the Release or Leave (T16)")


def tokens(case: Case) -> Iterator[Violation]:
    """S4: a store that keeps the greatest token, replayed over the journal."""
    kept: dict[Key, str] = {}
    for d in case.deliveries:
        match, key = TOKEN.fullmatch(d.token), case.key_of(d)
        tenure = case.tenure_of(d)
        oracle = case.history.oracles.get(tenure.log) if tenure else None
        if match is None or (oracle is not None and oracle.incarnation is not None
                             and oracle.incarnation.hex() != match[1]):  # fmt: skip
            yield Violation("S4", d.begin_ns, f"{d.client} has the token {d.token}, which is none of this incarnation")
            continue
        if d.token >= kept.get(key, ""):
            kept[key] = d.token
            continue
        case.count("stale_writes")
        if id(d) not in case.late_calls and not _overtaken(case, d, kept[key]):
            yield Violation("S4", d.begin_ns, f"{d.client} writes {d.topic}:{d.partition}@{d.offset} with {d.token} "
                                              f"after {kept[key]}, though its lease was checked in time")  # fmt: skip


def _overtaken(case: Case, d: Delivery, greater: str) -> bool:
    """Whether the later owner began between this delivery's gate and its call: nobody could know (X3)."""
    epoch = int(greater[33:], 16)
    return any(other.begin_ns > d.gate_ns for other in case.by_epoch.get((case.group_of(d), epoch), [])[:1])


def at_most_once(case: Case) -> Iterator[Violation]:
    """S5, S6."""
    seen: dict[tuple[Key, int, int], Delivery] = {}
    for d in case.deliveries:
        tenure = case.tenure_of(d)
        if tenure is None or case.history.modes.get(tenure.key[0]) != AT_MOST_ONCE:
            continue
        grants = case.history.grants.get((tenure.key[0], tenure.epoch), [])
        inside = [grant for grant in grants if grant.start <= d.offset < grant.to]
        place = f"{d.topic}:{d.partition}@{d.offset}"
        if len(inside) != 1:
            yield Violation("S6", d.begin_ns, f"{d.client} delivers {place}, which lies in {len(inside)} grants of it")
        elif inside[0].sent_ns > d.gate_ns + SLACK_NS:
            yield Violation("S6", d.begin_ns, f"{d.client} delivers {place} before it asked for it")
        known = seen.setdefault((tenure.key, tenure.generation, d.offset), d)
        if known is not d:
            yield Violation("S5", d.begin_ns, f"{place} is delivered twice, by {known.client} and {d.client}")


def disjoint_grants(case: Case) -> Iterator[Violation]:
    """S6: accepted ranges of one generation do not overlap."""
    ends: dict[tuple[Key, int], int] = {}
    standing = [grants for grants in case.history.grants.values() if grants]  # of some claims all was given back
    for grants in sorted(standing, key=lambda grants: grants[0].epoch):
        for grant in grants:
            place = (grant.key, grant.generation)
            if grant.start < ends.get(place, -1):
                yield Violation("S6", grant.sent_ns, f"[{grant.start}, {grant.to}) of {grant.key} was granted twice")
            ends[place] = max(grant.to, ends.get(place, -1))


def never_lost(case: Case) -> Iterator[Violation]:
    """S7, S8: every position that the log accepted lies behind finished messages only."""
    ended: dict[tuple[Key, int, int], int] = {}
    for d in case.deliveries:
        tenure = case.tenure_of(d)
        if tenure is not None and d.end_ns < NEVER:
            place = (tenure.key, tenure.generation, d.offset)
            ended[place] = min(d.end_ns, ended.get(place, NEVER))
    for step in case.history.advances:
        offsets = case.evidence.topics.get((step.key[1], step.key[2]), [])
        for offset in offsets[bisect_left(offsets, step.before) : bisect_left(offsets, step.after)]:
            end_ns = ended.get((step.key, step.generation, offset))
            if end_ns is None:
                if not case.history.is_lost(step.key, offset):
                    yield Violation("S7", step.sent_ns, f"{step.key}@{offset} was passed by the position {step.after} "
                                                        f"(record {step.offset}), and nobody finished it")  # fmt: skip
            elif end_ns > step.sent_ns + SLACK_NS:
                yield Violation("S8", step.sent_ns, f"{step.key}@{offset} was unfinished when record {step.offset} "
                                                    f"said position {step.after}")  # fmt: skip


def redelivery(case: Case) -> Iterator[Violation]:
    """S9, for each take-over in an at-least-once group."""
    for key, tenures in case.history.by_key.items():
        if case.history.modes.get(key[0]) != AT_LEAST_ONCE:
            continue
        for old, new in pairwise(tenures):
            if old.ended_by != "Evict" or old.generation != new.generation:
                continue
            sent_ns = case.history.stays[key[0], old.session].heartbeat_sent_ns
            before = {d.offset: d for d in case.by_epoch.get((key[0], old.epoch), []) if d.begin_ns <= sent_ns}
            low = min((o for o, d in before.items() if d.ack_ns >= sent_ns - SLACK_NS), default=NEVER)
            for d in case.by_epoch.get((key[0], new.epoch), []):
                if d.offset in before and d.offset < low:
                    yield Violation("S9", d.begin_ns, f"{key}@{d.offset} was acked before the last heartbeat of "
                                                      f"{old.client} and is delivered again by {d.client}")  # fmt: skip


def starts(case: Case) -> Iterator[Violation]:
    """S10, the half that the journal shows: a claim is delivered from its position on, forwards."""
    for tenure in case.history.tenures.values():
        given = case.by_epoch.get((tenure.key[0], tenure.epoch), [])
        newest = tenure.position - 1
        for d in given:
            if d.offset <= newest:
                yield Violation("S10", d.begin_ns, f"{tenure.key}@{d.offset} is delivered under epoch {tenure.epoch} "
                                                   f"after {newest}")  # fmt: skip
            newest = max(newest, d.offset)
        if given and case.history.modes.get(tenure.key[0]) == AT_LEAST_ONCE:
            offsets = case.evidence.topics.get((tenure.key[1], tenure.key[2]), [])
            skipped = offsets[bisect_left(offsets, tenure.position) : bisect_left(offsets, given[0].offset)]
            skipped = [offset for offset in skipped if not case.history.is_lost(tenure.key, offset)]
            if skipped:
                yield Violation("S10", given[0].begin_ns, f"{tenure.client} begins {tenure.key} at {given[0].offset}, "
                                                          f"the position was {tenure.position}")  # fmt: skip


def reports(case: Case) -> Iterator[Violation]:
    """S12."""
    for report in case.evidence.reports:
        moved = [rows for (_, by), rows in case.history.moved.items() if by == report.by]
        if report.said == "not moved" and moved:
            yield Violation("S12", -1, f"{report.by} said not moved, and it moved")
        if report.said != "moved":
            continue
        if not moved:
            yield Violation("S12", -1, f"{report.by} said moved, and nothing did")
            continue
        at = moved[0][0][0]
        for topic, number, wanted in report.moves:
            for key, tenures in case.history.by_key.items():
                heirs = [t for t in tenures if t.epoch > at]
                if key[1:] == (topic, number) and heirs and heirs[0].position != wanted:
                    yield Violation("S12", -1, f"{report.by} moved {topic}:{number} to {wanted}, and it went on at "
                                               f"{heirs[0].position}")  # fmt: skip


def crashes(case: Case) -> Iterator[Violation]:
    """S13: no reader ends because of what it read, unless the log is unsound and the error says so."""
    killed = {fault.who for fault in case.evidence.faults if fault.kind == "kill"}
    unsound = bool(case.history.stops) or any(fault.kind == "recreated" for fault in case.evidence.faults)
    for life in case.evidence.lives.values():
        if life.exit_code not in (None, CLEAN, FAILED_CLOSED) and life.client not in killed:
            yield Violation("S13", life.end_ns, f"{life.client} ended with exit code {life.exit_code}")
    for failure in case.evidence.failures:
        if failure.closed and not unsound and {"CoordinationError", "GroupOpaque"} & set(failure.names):
            yield Violation("S13", failure.ns, f"{failure.client} stopped with {failure.names[0]} on a sound log: "
                                               f"{failure.text}")  # fmt: skip


def fail_closed(case: Case) -> Iterator[Violation]:
    """S14."""
    ended = {f.client: f.ns for f in reversed(case.evidence.failures) if f.closed}
    for d in case.deliveries:
        if d.gate_ns > ended.get(d.client, NEVER):
            yield Violation("S14", d.gate_ns, f"{d.client} delivers {d.topic}:{d.partition}@{d.offset} after its error")
    stops = [(stop.ns, stop.group, stop.reason) for stop in case.history.stops]
    stops += [(fault.ns, "", fault.kind) for fault in case.evidence.faults if fault.kind == "recreated"]
    for ns, group, reason in stops:
        most_ns = max((stay.interval_ns for stay in case.history.stays.values()), default=0)
        for d in case.deliveries:
            if d.gate_ns > ns + most_ns + SLACK_NS and group in ("", case.group_of(d)):
                yield Violation("S14", d.gate_ns, f"{d.client} delivers {d.topic}:{d.partition}@{d.offset} more than "
                                                  f"an interval after the log stopped ({reason})")  # fmt: skip
        for life in case.evidence.lives.values():
            there = life.joined_ns < ns < life.end_ns and group in ("", life.group)
            if there and life.client not in ended and life.exit_code != -9:
                yield Violation("S14", ns, f"{life.client} names no error although the log stopped ({reason})")


def waits(case: Case) -> Iterator[Violation]:
    """S15."""
    for eviction in case.history.evictions:
        stay = case.history.stays[eviction.group, eviction.session]
        waited_ns = eviction.record.sent_ns - eviction.observed.sent_ns
        if waited_ns < 2 * stay.interval_ns - SLACK_NS:
            yield Violation("S15", eviction.record.sent_ns, f"session {stay.id} of {stay.client} was evicted "
                                                            f"{waited_ns // MS} ms after it was extended")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Progress


def settled(case: Case) -> Iterator[Violation]:
    """V1, V2, V3 at the settled point."""
    evidence, history = case.evidence, case.history
    if not evidence.settled:
        return
    groups = {life.group for life in evidence.lives.values()}
    dead = {life.client for life in evidence.lives.values() if life.exit_code == -9}
    for group in sorted(groups):
        for (topic, number), offsets in sorted(evidence.topics.items()):
            key = (group, topic, number)
            owner = history.settled_owners.get(key)
            log = next((tenure.log for tenure in history.by_key.get(key, [])), 0)
            before = [t for t in history.by_key.get(key, []) if t.epoch < evidence.settled.get(log, 0)]
            if owner is None or owner in dead:
                ended_by = before[-1].ended_by if before else ""
                name = "V3" if not before else ("V2" if ended_by in ("ReleasingPartition", "Leave") else "V1")
                yield Violation(name, NEVER, f"{key} has no live owner in the end; the last was "
                                             f"{before[-1].client if before else 'nobody'}")  # fmt: skip
            position = history.settled_positions.get(key, -1)
            if offsets and position <= offsets[-1]:
                yield Violation("V3", NEVER, f"{key} stands at {position}, its last message is {offsets[-1]}")


def claim_rate(case: Case) -> Iterator[Violation]:
    """V4."""
    by_key: dict[Key, list[int]] = {}
    for sent_ns, key in sorted(case.history.claim_records):
        by_key.setdefault(key, []).append(sent_ns)
    for key, times in by_key.items():
        stays = [stay for (group, _), stay in case.history.stays.items() if group == key[0]]
        interval_ns = min((stay.interval_ns for stay in stays), default=1_000 * MS)
        members = len({stay.client for stay in stays})
        most = max(bisect_left(times, ns + interval_ns) - at for at, ns in enumerate(times))
        case.counters["claims_per_interval_max"] = max(most, case.counters.get("claims_per_interval_max", 0))
        if most > CLAIMS_MAX * max(1, members):
            yield Violation("V4", times[0], f"{most} claim records of {key} within one interval")


def noticed(case: Case) -> Iterator[Violation]:
    """V5."""
    for ns, group, session in case.history.divergent:
        stay = case.history.stays.get((group, session))
        named = any(fields["kind"] == "divergence" and name == group and at >= ns
                    for at, name, fields in case.history.notes)  # fmt: skip
        failed = any(failure.ns >= ns and stay is not None and failure.client == stay.client
                     for failure in case.evidence.failures)  # fmt: skip
        if not named and not failed:
            yield Violation("V5", ns, f"nobody noticed that session {session} of {group} holds another world")


def spurious(case: Case) -> Iterator[Violation]:
    """V6."""
    for eviction in case.history.evictions:
        stay = case.history.stays[eviction.group, eviction.session]
        life = case.evidence.lives.get(stay.client)
        if not eviction.held or life is None:
            continue
        ended = life.exit_code == -9 or life.end_ns < eviction.record.sent_ns
        if ended or _was_hurt(case, stay, eviction.record.sent_ns):
            continue
        begin_ns, end_ns = eviction.observed.sent_ns, eviction.record.sent_ns
        beats = [begin_ns, *(ns for ns in life.beats if begin_ns < ns < end_ns), end_ns]
        gap_ns = max(b - a for a, b in pairwise(beats))
        if gap_ns >= stay.interval_ns // 2:
            case.count("starved")
            continue
        yield Violation("V6", end_ns, f"{stay.client} was evicted with {eviction.held} partitions, though it ran: its "
                                      f"longest silence was {gap_ns // MS} ms")  # fmt: skip


def _was_hurt(case: Case, stay: Stay, ns: int) -> bool:
    """Whether the process was ended, or stopped shortly before: who comes back may be silent for a while (T10)."""
    stopped_ns = -NEVER
    for fault in case.evidence.faults:
        if fault.who != stay.client or fault.ns > ns:
            continue
        if fault.kind in ("kill", "term"):
            return True
        if fault.kind == "stop":
            stopped_ns = NEVER
        elif fault.kind == "cont":
            stopped_ns = fault.ns
    return stopped_ns + QUIET_INTERVALS * stay.interval_ns > ns


CHECKS: tuple[Callable[[Case], Iterator[Violation]], ...] = (
    owners_and_leases, tokens, at_most_once, disjoint_grants, never_lost, redelivery, starts, reports, crashes,
    fail_closed, waits, settled, claim_rate, noticed, spurious,
)  # fmt: skip
