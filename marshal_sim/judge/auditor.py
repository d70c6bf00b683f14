"""The judge of a run: checks raw log bytes and the delivery journal against the invariants S1 to S30.

It shares no code with what it judges: it uses the oracle's fold and its own model of claims, grants and pauses, and
nothing of marshal_py.protocol. One pass folds the log (history.py); then each invariant is one function over
what the pass found, named by its number. The same functions judge runs in virtual time and runs of real processes; only
the evidence and the slack for clocks and scheduling differ. liveness.py judges liveness (V1 to V9, V13 to V15).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from marshal_sim.judge.answers import s16_answers
from marshal_sim.judge.calls import (
    s19_confirmed,
    s20_sought,
    s21_paused,
    s22_window,
    s23_drained,
    s24_heard,
    s28_callbacks,
)
from marshal_sim.judge.claims import s2_one_owner, s3_lease, s4_fencing, s11_pause, s25_revoked
from marshal_sim.judge.closed import s13_poison_proof, s14_fail_closed
from marshal_sim.judge.evidence import SIMULATED, Evidence, Slack, Violation
from marshal_sim.judge.facts import FOREVER
from marshal_sim.judge.history import MAY_COUNT, History
from marshal_sim.judge.lanes import s26_lanes, s26_letters, s26_silent, s30_turns
from marshal_sim.judge.losses import s6_losses, s18_unsettled
from marshal_sim.judge.messages import (
    is_lost,
    s5_once,
    s6_granted,
    s7_never_lost,
    s8_heartbeat_honest,
    s9_redelivery,
    s10_position,
    s27_renewed,
    s29_truncated,
)
from marshal_sim.judge.model import AT_LEAST_ONCE
from marshal_sim.oracle.rules import EVICT_INTERVALS


class Judgement(NamedTuple):
    violations: list[Violation]
    counted: dict[str, int]  # what an invariant allows and the auditor counts
    history: History


def judge(evidence: Evidence, slack: Slack = SIMULATED) -> Judgement:
    """Returns every violation of S1 to S30 that the evidence of one log shows.

    If the log lost its tail, only the log itself is judged, and whether readers noticed: deliveries, reports and waits
    may have relied on records that are gone.
    """
    history = History(evidence, slack)
    checks = OF_READERS if evidence.branched else (*OF_DELIVERIES, *OF_READERS, s15_honest_wait, s11_pause_length)
    found = list(history.found)
    for check in checks:
        found += check(history)
    return Judgement(found, history.counted, history)


def s12_reports(history: History) -> Iterator[Violation]:
    """Yields each breach of S12: what a tool reported about its move agrees with what happened before and after the
    report.
    """
    first: dict[tuple[str, int, int], int] = {}
    for d in history.evidence.deliveries:
        first[d.group, d.epoch, d.partition] = min(d.offset, first.get((d.group, d.epoch, d.partition), d.offset))
    for report in history.evidence.reports:
        moved = history.moved.get((report.group, report.by), [])
        accepted = [at for at, _ in moved if at >= history.evidence.inherited]
        if report.said == "not moved" and accepted:
            yield Violation("S12", -1, accepted[0], f"{report.by} said not moved, and it moved")
        late = [at for at in history.pauses_of.get((report.group, report.by), ()) if at >= report.read_to >= 0]
        if late:
            yield Violation("S12", -1, late[0], f"{report.by} had ended, and then its own pause began")
        if report.said == "moved" and not accepted:
            yield Violation("S12", -1, -1, f"{report.by} said moved, and nothing did")
        for topic, number, wanted in report.moves if report.said == "moved" and accepted else ():
            key = (report.group, topic, number)
            later = next((t for t in history.by_key.get(key, ()) if t.epoch > accepted[0]), None)
            if later is None or any(accepted[0] < at < later.epoch for at in history.set_at.get(key, ())):
                continue  # nobody has owned it since, or its position was set again before that
            if history.is_gone(later, FOREVER):
                continue  # the topic was deleted after the move
            offsets = [offset for offset in history.offsets(later) if not history.is_anew(later, offset)]
            expected = offsets[bisect_left(offsets, wanted)] if offsets and wanted <= offsets[-1] else wanted
            given = first.get((report.group, later.epoch, number), expected)
            passed = [offset for offset in offsets if expected <= offset < given]
            elsewhere = given < expected or not all(is_lost(history, key, offset) for offset in passed)
            if later.position != wanted or (elsewhere and later.mode == AT_LEAST_ONCE):
                yield Violation(
                    "S12",
                    -1,
                    later.epoch,
                    f"{report.by} moved {topic} {number} to {wanted}, and delivery "
                    f"went on at {given}, by a claim at {later.position}",
                )


def s15_honest_wait(history: History) -> Iterator[Violation]:
    """Yields each breach of S15: an evictor has waited long enough. The group's model checks that no extension came in
    between.
    """
    for eviction in history.evictions:
        if eviction.offset < history.evidence.inherited:
            continue  # of a dump: its clocks are unknown
        need_ms = EVICT_INTERVALS * history.sessions[eviction.group, eviction.session].interval_ms
        drift_ms = need_ms * history.slack.drift_ppm // 1_000_000
        if eviction.waited_ms < need_ms - drift_ms - history.slack.wait_ms:
            yield Violation(
                "S15",
                history.evidence.appended_ms[eviction.offset],
                eviction.offset,
                f"session {eviction.session} was evicted after {eviction.waited_ms:g} ms of {need_ms}",
            )


def s11_pause_length(history: History) -> Iterator[Violation]:
    """Yields each breach of S11: nobody ends the pause of somebody else before it has lasted for its duration."""
    evidence = history.evidence
    may_lie = [
        at for at, kind in evidence.foreign_records.items() if kind in MAY_COUNT
    ]  # about how long they waited (T5)
    for ended in history.waited_out:
        lied = any(ended.start < at <= ended.offset for at in may_lie)
        if lied or ended.start < max(evidence.inherited, evidence.first):
            continue  # of a dump the clocks are unknown
        drift_ms = ended.need_ms * history.slack.drift_ppm // 1_000_000
        if ended.waited_ms < ended.need_ms - drift_ms - history.slack.wait_ms:
            yield Violation(
                "S11",
                evidence.appended_ms[ended.offset],
                ended.offset,
                f"{ended.by} ended the pause of {ended.group} after {ended.waited_ms:g} ms of {ended.need_ms}",
            )


Check = Callable[[History], Iterator[Violation]]
OF_DELIVERIES: Final[tuple[Check, ...]] = (
    s2_one_owner,
    s3_lease,
    s4_fencing,
    s11_pause,
    s5_once,
    s6_granted,
    s6_losses,
    s7_never_lost,
    s8_heartbeat_honest,
    s9_redelivery,
    s10_position,
    s12_reports,
    s16_answers,
    s18_unsettled,
    s19_confirmed,
    s20_sought,
    s21_paused,
    s22_window,
    s23_drained,
    s24_heard,
    s25_revoked,
    s26_lanes,
    s26_letters,
    s26_silent,
    s27_renewed,
    s28_callbacks,
    s29_truncated,
    s30_turns,
)
OF_READERS: Final[tuple[Check, ...]] = (s13_poison_proof, s14_fail_closed)
