"""Says how well groups are: their rows in `marshal state --lag`, `top`, `check` and the exporter. Pure.

The judgement is that of diagnosis.py and protocol/member/waiting.py; here stand the figures beside it. A `Tally` counts
what the records tell, from the verdicts that its owner passes in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict

from marshal_py.admin.views import overview
from marshal_py.admin.views.group_info import Check, GroupHealth, PartitionHealth, PauseInfo
from marshal_py.history.lag import ConsumptionRate
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.protocol.member.waiting import Standstill
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, MODE_NAMES, ClaimingPartition, Evict, Heartbeat

MOVES: Final = frozenset({"claimed", "released", "lost", "parked"})  # advisories of a claim that begins or ends
GAPS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # upper bounds of the histogram of gaps


class DataFacts(Struct):
    """What the cluster says of data topics, as far as it was asked. By partition: `ends`, `firsts` (first offsets that
    are still there), `oldest_ms` (by group, too: timestamp of the oldest unfinished message, since 1970).
    `retention_ms`: by topic whose messages are deleted because of their age."""

    ends: dict[TopicPartition, int] = {}
    firsts: dict[TopicPartition, int] = {}
    oldest_ms: dict[tuple[str, TopicPartition], int] = {}
    retention_ms: dict[str, int] = {}


class Tally:
    """Counts what the records of one group tell.

    - `advisories`: by kind. `redelivered`: deliveries of messages after their first, as far as the log says so: what
      handlers of an owner had when the next one took over, and what was given back at a position. So at least so many.
    - `moved_ms`: when a claim began or ended last, by topic and partition.
    - `gaps`: how many partitions had nobody who worked on them for how long, until another session claimed them, by
      bucket of GAPS_S and one beyond; `gaps_s`: in all. From the last sign of life of a session that was evicted, else
      from the record that ended the claim. Pauses, and times in which the group had no session, do not count.
    """

    def __init__(self) -> None:
        self.advisories: Counter[str] = Counter()
        self.redelivered: int = 0
        self.gaps: list[int] = [0] * (len(GAPS_S) + 1)
        self.gaps_s: float = 0.0
        self.moved_ms: dict[tuple[str, int], int] = {}
        self._free_ms: dict[tuple[str, int], int] = {}  # since when nobody works on the partition
        self._attempts: dict[TopicPartition, tuple[int, int]] = {}  # position, and its deliveries
        self._inherited: dict[TopicPartition, int] = {}  # the offset up to which a take-over was counted, about

    def read(self, group: Group, verdict: Verdict, time_ms: int, advisories: Iterable[Advisory]) -> None:
        """Notes what a folded record says. `time_ms`: its timestamp. `group`: after it."""
        record = verdict.record
        if isinstance(record, Heartbeat):
            for entry in record.claims if verdict.accepted else ():
                partition = group.claims.get(entry.epoch)
                if partition is not None and (entry.attempts > 1 or partition.tp in self._attempts):
                    self._deliveries(partition.tp, partition.position, partition.attempts)
            return
        if isinstance(record, ClaimingPartition) and verdict.accepted and group.mode == AT_LEAST_ONCE:
            self._taken_over(group.claims[verdict.offset])
        silent_ms = record.waited_ms if isinstance(record, Evict) else 0
        for one in advisories:
            self.advisories[one.kind] += 1
            place = one.topic, one.partition
            if one.kind in MOVES:
                self.moved_ms[place] = time_ms
            if one.kind in ("released", "lost") and not group.paused:
                self._free_ms[place] = time_ms - silent_ms
            elif one.kind == "claimed" and (since_ms := self._free_ms.pop(place, NONE)) != NONE:
                self._gap(max(0, time_ms - since_ms) / 1000)
        if self._free_ms and (group.paused or not group.sessions):
            self._free_ms.clear()

    def _taken_over(self, partition: Partition) -> None:
        tp = partition.tp
        self._inherited.pop(tp, None)
        self._attempts.pop(tp, None)
        if partition.in_flight:
            self.redelivered += partition.in_flight
            self._inherited[tp] = partition.position + partition.in_flight
        if partition.attempts > 1:
            self._attempts[tp] = partition.position, partition.attempts

    def _deliveries(self, tp: TopicPartition, position: int, attempts: int) -> None:
        was_at, was = self._attempts.pop(tp, (NONE, 1))
        counted = was if was_at == position else 2 if position < self._inherited.get(tp, NONE) else 1
        self.redelivered += max(0, attempts - max(1, counted))
        if attempts > 1:
            self._attempts[tp] = position, attempts

    def _gap(self, seconds: float) -> None:
        self.gaps[next((i for i, bound in enumerate(GAPS_S) if seconds <= bound), len(GAPS_S))] += 1
        self.gaps_s += seconds


def partition_health(
    group: Group,
    tp: TopicPartition,
    data: DataFacts,
    rate: ConsumptionRate,
    now_ms: int,
    recreated: Mapping[str, object],
) -> PartitionHealth:
    """Returns the row of one partition. Its time to the end is None where nothing moves or nobody owns it."""
    state = overview.partition_state(group, tp, data.ends.get(tp), recreated)
    lag, speed = state.lag, rate.per_second(group.name, tp, now_ms)
    time_s = oldest_s = retention_s = None
    if lag == 0:
        time_s = 0.0
    elif lag is not None:
        time_s = round(lag / speed, 1) if speed > 0 and state.owner is not None else None
        oldest_ms = data.oldest_ms.get((group.name, tp))
        keep_ms = data.retention_ms.get(tp.topic)
        if oldest_ms is not None:
            oldest_s = max(0, now_ms - oldest_ms) / 1000
        if data.firsts.get(tp, NONE) > (state.position or 0):
            retention_s = 0.0
        elif oldest_ms is not None and keep_ms is not None:
            retention_s = max(0, oldest_ms + keep_ms - now_ms) / 1000
    return PartitionHealth(
        **asdict(state), per_second=round(speed, 1), time_s=time_s, oldest_s=oldest_s, retention_s=retention_s
    )


def group_health(
    group: Group,
    findings: tuple[Check, ...],
    causes: Iterable[Standstill],
    notices: tuple[str, ...],
    signs_ms: Mapping[int, int],
    pause: PauseInfo | None,
    tally: Tally,
    rows: tuple[PartitionHealth, ...],
    moved_ms: int | None,
    now_ms: int,
) -> GroupHealth:
    """Returns the row of one group. `signs_ms`: when each session gave its last sign of life; `rows`: of its
    partitions; `moved_ms`: of the rate."""
    levels = {check.level for check in findings}
    by_cause: Counter[str] = Counter()
    for one in causes:
        by_cause[one.cause] += len(one.partitions) or 1
    ages_s = {session: max(0, now_ms - signs_ms[session]) / 1000 for session in group.sessions if session in signs_ms}
    states = [overview.liveness(ages_s.get(each.id), each.join.interval_ms / 1000) for each in group.sessions.values()]
    owned = sum([row.owner is not None for row in rows])
    parked = sum([row.parked is not None for row in rows])
    lags = [row.lag for row in rows if row.lag is not None]
    times = [row.time_s for row in rows if row.lag is not None]
    moving = [time_s for time_s in times if time_s is not None]
    return GroupHealth(
        group=group.name,
        level="fail" if "fail" in levels else "warn" if "warn" in levels else "ok",
        findings=findings,
        notices=notices,
        causes=dict(by_cause),
        delivery=MODE_NAMES[group.mode],
        deleted=group.deleted,
        pause=pause,
        sessions=len(group.sessions),
        fresh=states.count("fresh"),
        stale=states.count("stale"),
        witnessed=sum(bool(each.join.witness) for each in group.sessions.values()),
        last_sign_s=min(ages_s.values(), default=None),
        last_progress_s=None if moved_ms is None else max(0, now_ms - moved_ms) / 1000,
        owned=owned,
        free=len(rows) - owned - parked,
        parked=parked,
        lag=sum(lags) if lags or not rows else None,
        unknown=len(rows) - len(lags),
        per_second=round(sum([row.per_second for row in rows]), 1),
        time_s=None if None in times or (rows and not lags) else max(moving, default=0.0),
        oldest_s=max([row.oldest_s for row in rows if row.oldest_s is not None], default=None),
        retention_s=min([row.retention_s for row in rows if row.retention_s is not None], default=None),
        redelivered=tally.redelivered,
        advisories=dict(tally.advisories),
        partitions=rows,
    )
