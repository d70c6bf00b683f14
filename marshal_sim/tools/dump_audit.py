"""The audit of a dump: folds every record twice and checks the invariants that a log alone can show.

`verify` compares both folds at every offset and all digests that the log carries (S1, S13); the auditor's own
pass over the log (history.py) judges owners, grants, positions, pauses and moves (S2, S6, S10, S11, S12). What
needs a journal of deliveries, or clocks that can be trusted, is not judged. The first violation becomes a story.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec import Struct

from marshal_py.errors import FileUnusable
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.wire.records import Join
from marshal_py.transport.dump import Reader, memory_transport
from marshal_py.transport.ports import LogRecord
from marshal_sim.cluster.broker import MISSING
from marshal_sim.cluster.run import moves_between
from marshal_sim.judge.auditor import s15_honest_wait
from marshal_sim.judge.evidence import Evidence, OffsetList, Slack, Violation
from marshal_sim.judge.history import History, oracle_of
from marshal_sim.tools.story import ending_in
from marshal_sim.tools.sweep import NOBODY, TraceEvent, records_of
from marshal_sim.tools.verify import Comparison, Difference, verify

# By type of record, the section of PROTOCOL.md that decides about it; by invariant, the rule on which it rests.
SECTIONS: Final = {
    "Genesis": "L3",
    "Join": "F1",
    "Heartbeat": "F2",
    "Leave": "F3",
    "Evict": "F3",
    "ClaimingPartition": "F4",
    "ClaimingMessages": "F5",
    "ReleasingPartition": "F6",
    "ReleaseGroup": "F7",
    "SetPosition": "F8",
    "Topology": "F9",
    "GroupConfig": "F9",
    "StepDown": "F9",
    "Note": "F10.1",
    "Snapshot": "F10.1",
    "SeekingPartition": "F6",
}
RULES: Final = {"S2": "F4.2", "S6": "F5.1", "S10": "F2.3", "S11": "F4.1", "S12": "F8.2", "S14": "N10"}
# By the first words of a difference, the rule that it breaks.
UNTOUCHED: Final = "a record that is not accepted"
DIFFERENCES: Final = (
    ("chain digest of a heartbeat", "G4"),
    ("state digest of a heartbeat", "G4"),
    ("checkpoint of a heartbeat", "G4"),
    ("chain digest of a snapshot", "N3"),
    ("state digest of a snapshot", "N3"),
    ("chain digest", "G2"),
    ("the log cannot", "L8"),
    ("only one of the folds stops", "E3"),
    ("only one of the folds has", "F10.3"),
    (UNTOUCHED, "F10.1"),
)


class FirstViolation(Struct, frozen=True):
    """The first violation: the record, its sender, its time, and the rule that the record breaks."""

    invariant: str
    log: int
    offset: int
    time: str
    who: str
    rule: str
    text: str


class Audit(Struct, kw_only=True):
    """Says what a dump contains, and what the audit found in it."""

    file: str = ""
    topic: str = ""
    taken: str = ""
    by: str = ""  # the library that took it
    verdict: str = "ok"  # or violation
    violations: int = 0
    first: FirstViolation | None = None
    logs: int = 0
    records: int = 0
    groups: int = 0
    sessions: int = 0
    live_sessions: int = 0
    claims: int = 0
    handovers: int = 0
    takeovers: int = 0
    evictions: int = 0
    grants: int = 0
    pauses: int = 0
    moves: int = 0  # of positions, by a SetPosition
    diverged_notes: int = 0  # consumers that read another's digest and found it not theirs
    digests: int = 0  # of states, compared between the folds
    carried_digests: int = 0  # of heartbeats and snapshots, compared with the folds
    # Not judged, because the timestamps are those of their writers' clocks: evictions that they show as too early.
    short_waits: int = 0
    story: list[str] = []


def audit(path: Path) -> Audit:
    """Judges a dump and returns what was found. Raises FileUnusable, and CoordinationError if the root
    cannot be read.
    """
    header, transport = memory_transport(path)
    with Reader(path) as reader:
        records = list(reader)
    with Observer(transport, header.topic) as observer:
        root, root_value = observer.root, observer.root_value
    if root_value is None or root is None:
        held = "no Genesis in log 0" if records else "no record"
        raise FileUnusable(
            str(path),
            f"it holds {held}: no consumer has ever run there, or another topic was meant "
            f"(`marshal log dump --coordination-topic`)",
        )
    report = verify(records, root, root_value, each=True)
    logs = {
        number: _evidence(records, number, root_value, report.begins.get(number, 0))
        for number in sorted({record.log for record in records})
        if number < root.partitions
    }
    histories = {number: History(evidence, Slack()) for number, evidence in logs.items()}
    found = _counts(report, list(histories.values()))
    found.records = len(records)
    found.file, found.topic, found.by, found.taken = str(path), header.topic, header.by, _iso(header.time_ms)
    broken = [(each.log, _violation(each, logs[each.log])) for each in report.differences]
    known = {(each.log, each.offset) for each in report.differences}
    broken += [
        (number, violation)
        for number, history in histories.items()
        for violation in history.found
        if violation.invariant != "S1" or (number, violation.offset) not in known
    ]
    if broken:
        found.verdict, found.violations = "violation", len(broken)
        log, violation = min(broken, key=lambda pair: (pair[0], pair[1].offset))
        _add_story(found, logs[log], violation)
    return found


def _evidence(records: list[LogRecord], number: int, root: bytes, begins: int) -> Evidence:
    """Returns the evidence of one log of the dump, up to the first gap, because no reader continues after a gap
    (L8).
    """
    mine = [record for record in records if record.log == number]
    first = max(begins, mine[0].offset)
    mine = [record for record in mine if record.offset >= first]
    whole = [record for at, record in enumerate(mine, first) if record.offset == at]
    values: OffsetList[bytes | None] = OffsetList(first, [record.value for record in whole], MISSING)
    times_ms = OffsetList(first, [record.timestamp_ms for record in whole], 0)
    return Evidence(number, root=root if number else b"", log=values, appended_ms=times_ms, first=first)


def _counts(report: Comparison, histories: list[History]) -> Audit:
    """Returns an Audit that has only the counts of what the dump holds."""
    groups = [state for history in histories for state in history.oracle.groups.values()]
    takeovers, handovers = moves_between(histories)
    found = Audit(
        logs=report.logs,
        groups=len(groups),
        takeovers=takeovers,
        handovers=handovers,
        live_sessions=sum(len(state.sessions) for state in groups),
        digests=report.digests,
        carried_digests=report.heartbeat_digests + report.snapshot_digests,
    )
    for history in histories:
        found.sessions += len(history.sessions)
        found.claims += len(history.claims)
        found.evictions += len(history.evictions)
        found.grants += sum(map(len, history.grants.values()))
        found.pauses += sum(map(len, history.pauses.values()))
        found.moves += sum(map(len, history.moved.values()))
        found.diverged_notes += sum(fields["kind"] == "diverged" for _, _, fields in history.notes)
        found.short_waits += sum(1 for _ in s15_honest_wait(history))
    return found


def _violation(difference: Difference, evidence: Evidence) -> Violation:
    """Returns the difference as a violation of S1, or of S13 if a record that was not accepted changed the state."""
    untouched = difference.what.startswith(UNTOUCHED)
    whose = f" of group {difference.group!r}" if difference.group else ""
    values = f" is {difference.found}, must be {difference.expected}" if difference.found or difference.expected else ""
    at = difference.offset
    ms = evidence.appended_ms[at] if at < len(evidence.log) else -1
    return Violation("S13" if untouched else "S1", ms, at, f"{difference.what}{whose}{values}")


def _add_story(found: Audit, evidence: Evidence, violation: Violation) -> None:
    """Adds the story to `found`: the records up to the violation, and what is wrong about the last one."""
    names: dict[tuple[str, int], str] = {}
    types: dict[int, str] = {}
    begun = oracle_of(evidence)
    for group, state in begun.groups.items() if begun is not None else ():
        names |= {(group, session.id): session.join["client_id"] for session in state.sessions.values()}

    def sender(offset: int, verdict: Verdict | None) -> str:
        record = verdict.record if verdict is not None else None
        if verdict is None or record is None:
            return NOBODY
        types[offset] = type(record).__name__
        if isinstance(record, Join):
            names[verdict.group, offset] = record.client_id
            return record.client_id
        by = str(getattr(record, "by", "")).split(" ", 1)[0]
        session = getattr(record, "session", None)
        return by or (NOBODY if session is None else names.get((verdict.group, session), f"session {session}"))

    trace = [event for event in records_of(evidence, sender) if (event.offset or 0) <= violation.offset]
    guilty = next((event for event in reversed(trace) if event.offset == violation.offset), None)
    who = guilty.who if guilty is not None else NOBODY
    rule = _rule(violation, types.get(violation.offset, ""))
    found.first = FirstViolation(
        violation.invariant, evidence.number, violation.offset, _iso(violation.ms), who, rule, violation.text
    )
    found.story = [
        *ending_in(violation, trace, _line),
        f"  log {evidence.number}, written by {who} at {_iso(violation.ms)}; PROTOCOL.md {rule}",
    ]


def _rule(violation: Violation, kind: str) -> str:
    if violation.invariant in RULES:
        return RULES[violation.invariant]
    named = next((rule for words, rule in DIFFERENCES if violation.text.startswith(words)), None)
    return named or SECTIONS.get(kind, "5")


def _line(event: TraceEvent) -> str:
    return f"{_iso(event.ms)}  {event.who:<20} @{event.offset:<6} {event.verdict:<9} {event.text}"


def _iso(time_ms: float) -> str:
    return datetime.fromtimestamp(max(0, time_ms) / 1000, UTC).isoformat(timespec="milliseconds")
