"""The judge of a run: raw log bytes and the delivery journal against invariants.md, by the oracle's fold alone.

It shares no code with what it judges: nothing of marshal_py.protocol, its own model of claims, grants and pauses. One
pass folds the log (auditor_history.py), then each invariant is one function over what the pass found. Liveness has its
own judge, auditor_progress.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from marshal_py.simulator.auditor_closed import fail_closed
from marshal_py.simulator.auditor_evidence import Delivery, Evidence, Key, Violation
from marshal_py.simulator.auditor_history import History, Life, Tenure
from marshal_py.simulator.auditor_losses import losses

DRIFT_PPM = 1_000  # the widest clock rate that a run may use, with room
SLACK_MS = 3  # two floors and a ceiling between a client's clock and true time


class Judgement(NamedTuple):
    violations: list[Violation]
    counted: dict[str, int]  # what the text says is counted, not failed
    history: History


def judge(evidence: Evidence) -> Judgement:
    """Every violation of S1-S15 that the evidence of one log shows, in the order of the invariants.

    Of a log that lost its tail only what the log says by itself, and that its readers noticed: handlers, tools and
    waits were right by records that are gone.
    """
    history = History(evidence)
    counted = {"S3": 0, "S4": 0, "S5": 0, "X12": 0}
    found = list(history.found)
    if evidence.branched:
        return Judgement(found + list(fail_closed(history)), counted, history)
    found += _owners_and_leases(history, counted)
    found += _at_most_once(history, counted)
    found += losses(history)
    found += _at_least_once(history)
    found += _redelivery(history)
    found += _reports(history)
    found += fail_closed(history)
    found += _waits(history)
    return Judgement(found, counted, history)


def _owners_and_leases(history: History, counted: dict[str, int]) -> Iterator[Violation]:
    """S2, S3, S4, S11, one delivery at a time, and the fence of T8 (reported as S3)."""
    greatest: dict[Key, int] = {}
    for d in sorted(history.evidence.deliveries, key=lambda d: d.begin_ms):
        if d.inherited:
            continue
        tenure = history.tenures.get((d.group, d.epoch))
        if d.epoch < greatest.get(d.key, -1):
            counted["S4"] += 1  # the store refuses it: its token is older
        greatest[d.key] = max(d.epoch, greatest.get(d.key, -1))
        if tenure is None or tenure.key != d.key or not d.epoch < d.read_to <= tenure.end:
            yield Violation("S2", d.gate_ms, d.epoch, f"client {d.client} delivers {d.key} {d.offset}, not its own")
            continue
        life = history.lives[d.group, tenure.session]
        if life.instance != d.instance:
            yield Violation("S2", d.gate_ms, d.epoch, f"the token of {d.key} {d.offset} is another instance's")
        if d.client == tenure.let_go[0] and d.gate_ms > tenure.let_go[1]:
            yield Violation("S3", d.gate_ms, tenure.end, f"client {d.client} delivers {d.key} {d.offset}, having let "
                                                         f"go of it")  # fmt: skip
        tenures = history.by_key[d.key]
        after = bisect_right(tenures, d.epoch, key=lambda t: t.epoch)
        if after < len(tenures) and tenures[after].session != tenure.session:
            if tenure.ended_by == "Join" and tenures[after].ms < d.begin_ms:
                counted["X12"] += 1  # displaced by a fast reclaim whose caller vouched that this one is dead
            elif tenures[after].ms < d.gate_ms:
                yield Violation("S3", d.gate_ms, tenures[after].epoch, f"client {d.client} delivers {d.key} {d.offset}"
                                f", owned by another since {tenures[after].ms}")  # fmt: skip
            elif tenures[after].ms < d.begin_ms:
                counted["S3"] += 1  # stopped between gate and call (X3)
        yield from _lease(d, life)
        for start, end in history.pauses.get(d.group, ()):
            if start < d.read_to <= end:
                yield Violation("S11", d.gate_ms, start, f"client {d.client} delivers {d.key} {d.offset} in a pause")


def _lease(d: Delivery, life: Life) -> Iterator[Violation]:
    read = bisect_left(life.extensions, d.read_to, key=lambda e: e.offset)
    sent_ms = life.extensions[read - 1].sent_ms if read else -1
    limit_ms = life.interval_ms * (1_000_000 + DRIFT_PPM) // 1_000_000 + SLACK_MS
    if d.gate_ms - sent_ms > limit_ms:
        yield Violation("S3", d.gate_ms, -1, f"client {d.client} delivers {d.key} {d.offset} "
                                             f"{d.gate_ms - sent_ms} ms after its last extension was sent")  # fmt: skip


def _separated_ms(history: History, a: int, b: int) -> int:
    """When the memories of two clients parted (ms), -1 if they never were one."""
    parents = {twin: (original, ms) for ms, original, twin in history.evidence.forks}

    def line(client: int) -> dict[int, int]:
        since = {client: 2**62}
        while client in parents:
            client, ms = parents[client][0], min(parents[client][1], since[client])
            since[client] = ms
        return since

    mine, other = line(a), line(b)
    return max((min(mine[c], other[c]) for c in mine if c in other), default=-1)


def _at_most_once(history: History, counted: dict[str, int]) -> Iterator[Violation]:
    """S5, S6.

    A cloned machine holds the grants that the original asked for before the cloning: counted, nobody can mend that.
    """
    seen: dict[tuple[Key, int, int], Delivery] = {}
    for d in history.evidence.deliveries:
        tenure = history.tenures.get((d.group, d.epoch))
        if d.inherited or tenure is None or tenure.mode != 2:
            continue
        inside = [g for g in history.grants.get((d.group, d.epoch), ()) if g.start <= d.offset < g.to]
        if len(inside) != 1:
            yield Violation("S6", d.begin_ms, d.epoch, f"{d.key} {d.offset} lies in {len(inside)} grants")
        elif any(inside[0].offset < read_to and fenced_ms < d.gate_ms
                 for fenced_ms, read_to in history.evidence.fences.get(d.client, ())):  # fmt: skip
            yield Violation("S6", d.begin_ms, d.epoch, f"client {d.client} delivers {d.key} {d.offset} by a grant of "
                                                       f"before its fence (D3)")  # fmt: skip
        if _given_back(d, tenure) and not _cloned_owner(history, d, tenure):
            yield Violation("S6", d.begin_ms, tenure.end, f"{d.key} {d.offset} was handed over, and given back")
        known = seen.setdefault((d.key, tenure.generation, d.offset), d)
        if known is d:
            continue
        before = history.tenures[known.group, known.epoch]
        if _given_back(known, before) and _cloned_owner(history, known, before):
            counted["S5"] += 1
            continue
        one_ms = _separated_ms(history, known.client, d.client) if d.client != known.client else -1
        if inside and inside[0].sent_ms <= one_ms:
            counted["S5"] += 1
        else:
            yield Violation("S5", d.begin_ms, d.epoch, f"{d.key} {d.offset} is delivered twice, by {known.client} "
                                                       f"and {d.client}")  # fmt: skip


def _given_back(d: Delivery, tenure: Tenure) -> bool:
    return tenure.given_back is not None and d.offset >= tenure.given_back


def _cloned_owner(history: History, d: Delivery, tenure: Tenure) -> bool:
    """Whether a copy of the machine gave back what the other copy delivers by a grant of before the cloning.

    Neither of the two can know it.
    """
    grants = history.grants.get((d.group, d.epoch), ())
    sent_ms = next((g.sent_ms for g in grants if g.start <= d.offset < g.to), 2**62)
    return d.client != tenure.let_go[0] and sent_ms <= _separated_ms(history, d.client, tenure.let_go[0])


def _at_least_once(history: History) -> Iterator[Violation]:
    """S7, S8: every position that the log accepted lies behind finished messages only.

    Also behind those of clients that have not noticed yet that the topic was made anew: their records count too.
    """
    ended: dict[tuple[Key, int, int], int] = {}
    for d in history.evidence.deliveries + history.evidence.strays:
        tenure = history.tenures.get((d.group, d.epoch))
        if tenure is not None and d.end_ms >= 0:
            place = (d.key, tenure.generation, d.offset)
            ended[place] = min(d.end_ms, ended.get(place, d.end_ms))
    for step in history.advances:
        offsets = history.evidence.topics.get((step.key[1], step.key[2]), [])
        for offset in offsets[bisect_left(offsets, step.before) : bisect_left(offsets, step.after)]:
            end_ms = ended.get((step.key, step.generation, offset))
            if end_ms is None:
                yield Violation("S7", step.sent_ms, step.offset, f"{step.key} {offset} is skipped")
            elif end_ms > step.sent_ms:
                yield Violation("S8", step.sent_ms, step.offset, f"{step.key} {offset} was unfinished when reported")


def _redelivery(history: History) -> Iterator[Violation]:
    """S9, for each take-over in an at-least-once group; a hand-over repeats what was unfinished for too long alone."""
    by_epoch: dict[tuple[str, int], list[Delivery]] = {}
    for d in history.evidence.deliveries:
        by_epoch.setdefault((d.group, d.epoch), []).append(d)
    for key, tenures in history.by_key.items():
        for tenure in tenures:
            for d in by_epoch.get((key[0], tenure.epoch), ()) if tenure.finished else ():
                if any(start <= d.offset < to for start, to in tenure.finished) and not d.inherited:
                    yield Violation("S9", d.begin_ms, tenure.epoch, f"{key} {d.offset} comes again, and its claim was "
                                                                    f"told that it is finished")  # fmt: skip
        for old, new in pairwise(tenures):
            if old.mode != 1 or old.generation != new.generation:
                continue
            if old.handed_over:
                begun = _in_time(history, by_epoch.get((key[0], old.epoch), []), old)
                yield from _repeated(begun, by_epoch.get((key[0], new.epoch), []), old)
            if old.ended_by != "Evict":
                continue
            for client, sent_ms in history.lives[key[0], old.session].heartbeats.items():
                begun = [d for d in by_epoch.get((key[0], old.epoch), ()) if d.client == client]
                before = {d.offset: d for d in begun if d.begin_ms <= sent_ms}
                # A clone may have let go of the claim for a handler that hung in the original, and not in itself.
                open_ = (o for o, d in before.items() if d.inherited or d.end_ms < 0 or d.end_ms >= sent_ms)
                still_open = set(open_)
                low = min(still_open, default=2**63)
                for d in by_epoch.get((key[0], new.epoch), ()):
                    told = d.offset < low or (old.in_order and d.offset not in still_open)  # above it: D1
                    if d.offset in before and told and not d.inherited:
                        yield Violation("S9", d.begin_ms, new.epoch, f"{key} {d.offset}, finished in time, comes again")


def _in_time(history: History, begun: list[Delivery], old: Tenure) -> list[Delivery]:
    """Without what a handler still held when the time that a hand-over gives it was over (A3)."""
    wait_ms = history.evidence.hand_over_intervals * history.lives[old.key[0], old.session].interval_ms
    over_ms = old.let_go[1] - wait_ms + wait_ms * DRIFT_PPM // 1_000_000 + SLACK_MS
    return [d for d in begun if 0 <= d.end_ms <= old.let_go[1] or d.gate_ms > over_ms]


def _repeated(begun: list[Delivery], after: list[Delivery], old: Tenure) -> Iterator[Violation]:
    """What whoever handed over had begun was finished by then (A3), so its successor gets none of it."""
    handled = {d.offset for d in begun if d.client == old.let_go[0] and not d.inherited}
    for d in after:
        if d.offset in handled and not d.inherited:
            yield Violation("S9", d.begin_ms, old.end, f"{d.key} {d.offset} comes again after a hand-over")


def _reports(history: History) -> Iterator[Violation]:
    """S12: what the tool said is what happened, also later."""
    first: dict[tuple[str, int, int], int] = {}
    for d in history.evidence.deliveries:
        first[d.group, d.epoch, d.partition] = min(d.offset, first.get((d.group, d.epoch, d.partition), d.offset))
    for report in history.evidence.reports:
        moved = history.moved.get((report.group, report.by), [])
        accepted = [move for move in moved if move[0] >= history.evidence.inherited]
        if report.said == "not moved" and accepted:
            yield Violation("S12", -1, accepted[0][0], f"{report.by} said not moved, and it moved")
        late = [at for at in history.pauses_of.get((report.group, report.by), ()) if at >= report.read_to >= 0]
        if late:
            yield Violation("S12", -1, late[0], f"{report.by} had gone home, and its own pause began")
        if report.said != "moved":
            continue
        if not accepted:
            yield Violation("S12", -1, -1, f"{report.by} said moved, and nothing did")
            continue
        for topic, number, wanted in report.moves:
            heirs = [t for t in history.by_key.get((report.group, topic, number), ()) if t.epoch > accepted[0][0]]
            offsets = history.evidence.topics.get((topic, number), [])
            expected = offsets[bisect_left(offsets, wanted)] if offsets and wanted <= offsets[-1] else wanted
            if heirs and heirs[0].position == wanted and (
                first.get((report.group, heirs[0].epoch, number), expected) != expected and heirs[0].mode == 1
            ):
                yield Violation("S12", -1, heirs[0].epoch, f"{report.by} moved {topic} {number} to {wanted}, and "
                                                           f"delivery went on elsewhere")  # fmt: skip


def _waits(history: History) -> Iterator[Violation]:
    """S15: who evicts has waited, in true time."""
    appended_ms = history.evidence.appended_ms
    for offset, group, fields in history.evictions:
        if offset < history.evidence.inherited:
            continue  # by clocks that nobody knows
        need_ms = 2 * history.lives[group, fields["session"]].interval_ms
        waited_ms = appended_ms[offset] - appended_ms[fields["observed"]]
        if waited_ms < need_ms - need_ms * DRIFT_PPM // 1_000_000 - SLACK_MS:
            yield Violation("S15", appended_ms[offset], offset, f"session {fields['session']} was evicted after "
                                                                f"{waited_ms} ms of {need_ms}")  # fmt: skip
