"""The judge of real runs: checks raw log bytes, delivery journals, topics and faults against docs/guarantees.md.

The checks are the simulator's (`marshal_sim.judge`), which share no code with the library but the oracle.
This file translates the evidence of processes into their terms (`logs_of`), derives what such a run must achieve
(`demands_of`), and sets the slack:

- CreateTime is floored to ms, and so is the clock of the library, whose gate may stay open for 5 ms: STAMP_MS.
- A record counts as appended when it was sent, and as read when the recorder's own consumer had it. So S3 is one-sided:
  no delivery's *gate* (the library's last look at a clock before the handler; the worker measures it) lies after the
  moment at which the recorder had another session's claim. What lies between gate and call (X3) is counted.
- A thread may be without a turn between writing a heartbeat and the call of produce(). Workers journal when they began
  to write it, and only acks before that must be in it (S9).
- How much a client had read at a given time is unknown; what it had sent is known. A lease counts from the newest
  extension that was sent by then (T8), and a claim ends for its owner when it sends its Release or Leave (T16).
- A Note of which the process was told counts as sent, also if an outage kept it from the log (S6).
- V1 to V3 are not judged as times, which are reported, but at the settled point, which the scenario waited for with a
  deadline. V5 and V7 have SCHEDULING_MS more than the rules say, for machines with other work.
- V6 and V7 demand nothing of processes that were killed, stopped, or without a turn (their own beats have a gap of half
  an interval): the latter are counted as `starved`.
- V4 allows three records per interval and member: a member on a slow machine may send its claim again before it has
  read the fate of the first.

A run with fewer take-overs or deliveries than asked for is void.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import Note
from marshal_sim.judge import auditor
from marshal_sim.judge import evidence as neutral
from marshal_sim.judge.claims import TOKEN, claim_of
from marshal_sim.judge.evidence import Crash, Key, Presence, Slack, Stop, Violation
from marshal_sim.judge.facts import ClaimSpan
from marshal_sim.judge.history import History, root_of
from marshal_sim.judge.liveness import (
    GONE,
    QUIET_INTERVALS,
    STARVED,
    Absence,
    Demands,
    claims_per_interval,
    judge_liveness,
)
from marshal_sim.oracle.oracle import route
from marshal_sim.oracle.wire import decode_record, parse_envelope
from tests.support.evidence import NEVER, Evidence, Life

NS: Final = 1_000_000  # per ms
STAMP_MS: Final = 12
SCHEDULING_MS: Final = 10_000
PROCESSES: Final = Slack(stamp_ms=STAMP_MS, wait_ms=STAMP_MS, progress_ms=SCHEDULING_MS)
TAKEOVERS_MIN, DELIVERIES_MIN = 20, 1_000
SILENT_INTERVALS: Final = QUIET_INTERVALS + 1  # after a stop: T10's, and one to be stopped in
CLEAN, FAILED_CLOSED = 0, 3  # exit codes that a worker returns on purpose
UNSOUND: Final = frozenset({"CoordinationError", "GroupOpaque"})  # errors that blame the log
JOIN, EVICT, CLAIM = 1, 4, 5  # PROTOCOL.md 4.2
TAKE_OVER, BESIDE = "take-over", "take-over beside another fault"


@dataclass
class Judgement:
    violations: list[Violation]
    counters: dict[str, int]
    latencies_ms: dict[str, list[int]]  # of each kind of move, for the report only
    void: str  # why the run proves nothing; "" if it does
    histories: list[History] = field(repr=False)

    @property
    def ok(self) -> bool:
        return not self.violations and not self.void

    @property
    def lost_ranges(self) -> dict[Key, list[tuple[int, int]]]:
        """The messages that Kafka deleted before they were read, as the log says."""
        return {key: ranges for history in self.histories for key, ranges in history.lost_ranges.items()}

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
    """Judges all evidence of a run against the invariants."""
    found: list[Violation] = []
    histories: list[History] = []
    most = 0
    for log in logs_of(evidence):
        judged = auditor.judge(log, PROCESSES)
        demands = demands_of(evidence, judged.history)
        found += judged.violations + judge_liveness(demands, judged.history)
        histories.append(judged.history)
        most = max([most, *claims_per_interval(demands, judged.history).values()])
    counters = _counters(evidence, histories)
    counters["claims_per_interval_max"] = most
    void = ""
    if counters["takeovers"] < takeovers_min:
        void = f"{counters['takeovers']} take-overs, {takeovers_min} are needed"
    elif counters["deliveries"] < deliveries_min:
        void = f"{counters['deliveries']} deliveries, {deliveries_min} are needed"
    return Judgement(found, counters, _latencies_ms(evidence, histories), void, histories)


# ---------------------------------------------------------------------------------------------------------------------
# The evidence, in the terms of the checks


def logs_of(evidence: Evidence) -> Iterator[neutral.Evidence]:
    """The evidence of each log that has a root."""
    root, count = root_of(record.value for record in evidence.logs.get(0, ()))
    for number in sorted(evidence.logs):
        if number == 0 or root:
            yield _log(evidence, number, root, count)


def _log(evidence: Evidence, number: int, root: bytes, count: int) -> neutral.Evidence:
    groups = {life.group for life in evidence.lives.values()} or {""}
    here = tuple(sorted(group for group in groups if route(group, count) == number))
    lives = [life for life in evidence.lives.values() if life.group in here]
    gone_ns = [fault.ns for fault in evidence.faults if fault.kind == "recreated"]
    stops = [
        Stop(life.group, life.client, failure.ns / NS, -1, failure.names[0])
        for life in lives
        for failure in evidence.failures
        if failure.closed and failure.client == life.client
    ]
    found = neutral.Evidence(
        number,
        here,
        root if number else b"",
        stops=stops,
        topics=evidence.topics,
        deliveries=list(_deliveries(evidence, here)),
        reports=[report for report in evidence.reports if report.group in here],
        excused={failure.names[0] for failure in evidence.failures if not UNSOUND & set(failure.names)},
        foreign_records={offset: "forged" for log, offset in evidence.forged if log == number},
        present=[
            Presence(life.group, life.client, life.joined_ns / NS, life.end_ns / NS)
            for life in lives
            if life.exit_code != -9
        ],
        crashes=[
            Crash(life.client, life.end_ns / NS, f"exit code {life.exit_code}")
            for life in lives
            if life.exit_code not in (None, CLEAN, FAILED_CLOSED)
            and not _killed_ns(evidence, life)
            and not _ended_early(evidence, life)
        ],
        gone_ms=min(gone_ns) / NS if gone_ns else -1,
        settled=evidence.settled.get(number),
        acted_to={life.client: -1 for life in lives if life.exit_code != CLEAN or life.checkpoint},
        lanes={life.client: lambda *place: evidence.keys.get(place) for life in lives if life.lanes},
        workers={life.client: life.lanes for life in lives if life.lanes},
        queries={life.client: life.checkpoint for life in lives if life.checkpoint},
    )
    if evidence.hand_over_intervals is not None:
        found.hand_over_intervals = evidence.hand_over_intervals
    values, appended_ms, read_ms = [], [], []
    for record in evidence.logs[number]:
        found.gaps.update(range(len(values), record.offset))
        for _ in range(record.offset + 1 - len(values)):
            values.append(record.value)
            appended_ms.append(record.sent_ns / NS)
            read_ms.append(record.read_ns / NS)
        if record.value is not None and record.offset not in found.foreign_records:
            first_ms = found.sent.get(record.value, (record.sent_ns / NS,))[0]
            found.sent[record.value] = (first_ms, record.sent_ns / NS, None)
            if record.value in evidence.told:
                found.told[record.offset] = min(record.sent_ns, evidence.told[record.value]) / NS
    found.log, found.appended_ms, found.read_ms = values, appended_ms, read_ms
    owners = {offset: fields["session"] for offset, fields in _decoded(values, CLAIM)}
    envelope = parse_envelope(root)
    incarnation = b"" if envelope is None else decode_record(envelope.type, envelope.body).fields["incarnation"]
    for one in evidence.dropped:
        if evidence.lives[one.client].group in here and one.epoch in owners:
            note = Note(owners[one.epoch], "amo_dropped", one.topic, one.partition, one.first, one.to)
            value = codec.encode(note, evidence.lives[one.client].group, incarnation)
            found.sent.setdefault(value, (one.ns / NS, one.ns / NS, None))
    sessions = dict(_decoded(values, JOIN))
    for client in {fields["client_id"] for fields in sessions.values()} - evidence.lives.keys():
        found.acted_to[client] = -1  # it keeps no journal
    for offset, fields in _decoded(values, EVICT):
        life = evidence.lives.get(sessions.get(fields["session"], {}).get("client_id", ""))
        if life is not None and life.end_ns / NS < read_ms[offset]:
            found.acted_to.setdefault(
                life.client, offset
            )  # its stop's time was over before it could read what it wrote
    return found


def _decoded(values: Iterable[bytes | None], number: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The offsets and the fields of a log's records of one type."""
    for offset, value in enumerate(values):
        envelope = parse_envelope(value)
        if envelope is not None and envelope.type == number and envelope.group:
            try:
                yield offset, decode_record(envelope.type, envelope.body).fields
            except ValueError:
                continue  # garbage


def _deliveries(evidence: Evidence, groups: tuple[str, ...]) -> Iterator[neutral.Delivery]:
    for d in evidence.deliveries:
        life, match = evidence.lives.get(d.client), TOKEN.fullmatch(d.token)
        group = life.group if life is not None else ""
        if group in groups:
            found = neutral.Delivery(
                group,
                d.client,
                d.client,
                int(match[2], 16) if match else -1,
                d.topic,
                d.partition,
                d.offset,
                -1,
                d.gate_ns / NS,
                d.begin_ns / NS,
                _ms(d.end_ns),
                d.token,
            )
            found.ack_ms, found.again_ms = _ms(d.ack_ns), _ms(d.again_ns)
            yield found


def _ms(ns: int) -> float:
    return ns / NS if ns < NEVER else -1


# ---------------------------------------------------------------------------------------------------------------------
# What a run must achieve


def demands_of(evidence: Evidence, history: History) -> Demands:
    """The demands at the settled point, if the run had one, on the processes that kept a journal."""
    log = history.evidence
    at = log.settled
    settled_ms = log.read_ms[at - 1] if at else 0.0
    members = [
        len({life.client_id for (name, _), life in history.sessions.items() if name == group}) for group in log.groups
    ]
    topics = tuple(sorted({topic for topic, _ in evidence.topics}))
    return Demands(
        min((life.interval_ms for life in history.sessions.values()), default=1_000),
        settled_ms,
        float("inf"),
        (),
        tuple(sorted(evidence.topics)) if at is not None else (),
        dict.fromkeys(log.groups, topics),
        no_evictions=True,
        settled_ms=settled_ms,
        pauses=tuple((group, 0.0) for group in log.groups),
        absences=tuple(_absences(evidence, history)),
        # The beats of a query are its driver's, and its member is another process.
        watched=frozenset(life.client for life in evidence.lives.values() if not life.checkpoint),
        herd=max([1, *members]),
        herds_since_ms=0,
    )


def _troubles(evidence: Evidence) -> Iterator[tuple[int, int]]:
    """The times in which links were bad: of some clients, nobody here knows whose. They may overlap."""
    since_ns, bad = 0, 0
    for fault in evidence.faults:
        if fault.kind == "link":
            since_ns, bad = since_ns if bad else fault.ns, bad + 1
        elif fault.kind == "link_whole":
            bad -= 1
            if not bad:
                yield since_ns, fault.ns


def _stops(evidence: Evidence, life: Life) -> Iterator[tuple[int, int]]:
    """The times in which SIGSTOP held it."""
    stopped_ns = 0
    for fault in evidence.faults:
        if fault.who == life.client and fault.kind == "stop":
            stopped_ns = fault.ns
        elif fault.who == life.client and fault.kind == "cont" and stopped_ns:
            yield stopped_ns, fault.ns
            stopped_ns = 0
    if stopped_ns:
        yield stopped_ns, NEVER


def _ended_early(evidence: Evidence, life: Life) -> bool:
    """Whether SIGTERM ended it before its consumer was there to be stopped."""
    asked = any((fault.kind, fault.who) == ("term", life.client) for fault in evidence.faults)
    return asked and life.exit_code == -signal.SIGTERM and life.joined_ns == NEVER


def _killed_ns(evidence: Evidence, life: Life) -> int:
    """When it was killed; 0 if it was not."""
    return next((fault.ns for fault in evidence.faults if (fault.kind, fault.who) == ("kill", life.client)), 0)


def _absences(evidence: Evidence, history: History) -> Iterator[Absence]:
    """Of each process: its end, its stops and the silence after them, and gaps between its own beats."""
    intervals = {life.client_id: life.interval_ms for life in history.sessions.values()}
    troubles = list(_troubles(evidence))
    for life in evidence.lives.values():
        for since_ns, until_ns in troubles:
            rest_ms = SILENT_INTERVALS * intervals.get(life.client, 1_000)
            yield Absence(life.client, since_ns / NS, until_ns / NS + rest_ms, "link")
        if life.exit_code is not None:
            # The time at which a process ended itself is unknown; its end is noted when the scenario looks.
            last_ns = max(life.beats, default=life.start_ns) if life.exit_code else life.end_ns
            yield Absence(life.client, (_killed_ns(evidence, life) or last_ns) / NS, NEVER, GONE)
        for fault in evidence.faults:
            if fault.who == life.client and fault.kind in ("kill", "term"):
                yield Absence(life.client, fault.ns / NS, NEVER, fault.kind)
        for since_ns, until_ns in _stops(evidence, life):
            rest_ms = SILENT_INTERVALS * intervals.get(life.client, 1_000)
            yield Absence(life.client, since_ns / NS, until_ns / NS + rest_ms, "stop")
        for before, after in pairwise([life.start_ns, *life.beats, *([life.end_ns] if life.end_ns < NEVER else [])]):
            yield Absence(life.client, before / NS, after / NS, STARVED)


# ---------------------------------------------------------------------------------------------------------------------
# Counters and latencies


def _counters(evidence: Evidence, histories: list[History]) -> dict[str, int]:
    verdicts = [pair for history in histories for pair in history.verdicts.items()]
    pairs = [pair for history in histories for claims in history.by_key.values() for pair in pairwise(claims)]
    seen: set[tuple[Key, int, int]] = set()
    redelivered = 0
    for history in histories:
        for d in history.deliveries:
            claim = claim_of(history, d)
            place = (d.key, claim.generation if claim is not None else -1, d.offset)
            redelivered += place in seen
            seen.add(place)
    return {
        "takeovers": sum(old.ended_by == "Evict" for old, _ in pairs),
        "handovers": sum(old.ended_by != "Evict" and old.session != new.session for old, new in pairs),
        "deliveries": len(evidence.deliveries),
        "redelivered": redelivered,
        "late_calls": sum(history.counted["S3"] for history in histories),
        "stale_writes": sum(history.counted["S4"] for history in histories),
        "starved": sum(history.counted["V6"] for history in histories),
        "records": sum(map(len, evidence.logs.values())),
        "garbage": sum(count for name, count in verdicts if name == "ignored garbage"),
        "rejected": sum(count for name, count in verdicts if name.startswith("rejected")),
    }


def _latencies_ms(evidence: Evidence, histories: list[History]) -> dict[str, list[int]]:
    """From the owner's last sign of life to the successor's first delivery; reported, never judged. BESIDE are the
    take-overs that another fault overlaps: of brokers, of links, of the successor. They count from its end."""
    found: dict[str, list[int]] = {TAKE_OVER: [], BESIDE: [], "hand-over": []}
    troubles = [(since_ns / NS, until_ns / NS, "") for since_ns, until_ns in _troubles(evidence)]
    for life in evidence.lives.values():
        troubles += [(since_ns / NS, until_ns / NS, life.client) for since_ns, until_ns in _stops(evidence, life)]
    for history in histories:
        first: dict[tuple[str, int], float] = {}
        for d in history.deliveries:
            first.setdefault((d.group, d.epoch), d.begin_ms)
        for old, new in (pair for claims in history.by_key.values() for pair in pairwise(claims)):
            begin_ms = first.get((new.key[0], new.epoch))
            if begin_ms is None or old.session == new.session or not old.ended_by:
                continue
            since_ms, kind = _since_ms(history, old), "hand-over"
            if old.ended_by == "Evict":
                beside = [
                    until_ms
                    for start_ms, until_ms, client in troubles
                    if client in ("", new.client_id) and start_ms < begin_ms and until_ms > since_ms
                ]
                kind, since_ms = BESIDE if beside else TAKE_OVER, min(begin_ms, max([since_ms, *beside]))
            found[kind].append(round(begin_ms - since_ms))
    return found


def _since_ms(history: History, old: ClaimSpan) -> float:
    if old.ended_by != "Evict":
        return history.evidence.appended_ms[old.end]
    life = history.sessions[old.key[0], old.session]
    return max(life.heartbeats.values(), default=life.extensions[-1].sent_ms)
