"""Says how well groups are, beside their states: their rows in `marshal state --lag`, `top`, `check` and the exporter.

The judgement is that of diagnosis.py and protocol/member/waiting.py; here stand the figures beside it. A `Tally` counts
what the records tell, from the verdicts that its owner passes in. `Looking` gets each record, too: it knows signs of
life, pauses and handlers without an answer, and gives the Facts by which waiting.py says why nobody consumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from shlex import quote
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict

from marshal_py.admin.views import overview
from marshal_py.admin.views.group_info import Check, GroupHealth, PartitionHealth, PauseInfo
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.admin.views.recreated_topics import find_recreated
from marshal_py.history.lag import WINDOW_MS, Pace
from marshal_py.log.observer import Judged, Observer
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.protocol.member.waiting import HANGS_MS, UNOWNED_MS, Facts, Standstill
from marshal_py.protocol.wire.identity import NONE, TopicPartition, consumed
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    MODE_NAMES,
    ClaimingPartition,
    Evict,
    Heartbeat,
    Leave,
    Note,
    Record,
    died,
    failure,
)

MOVES: Final = frozenset({"claimed", "released", "lost", "parked"})  # advisories of a claim that begins or ends
DEATHS: Final = ("died", "evicted", "failed")  # by its witness's word, by silence, by an error of the program
GAPS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # upper bounds of the histogram of gaps


def _death(record: Record | None) -> str:
    """Returns which of DEATHS an accepted record tells, "" for none."""
    if isinstance(record, Evict):
        return "evicted"
    if isinstance(record, Leave):
        return "died" if died(record) else "failed" if failure(record) else ""
    return ""


class DataFacts(Struct):
    """What the cluster says of data topics, as far as it was asked. By partition: `ends`, `firsts` (first offsets that
    are still there), `oldest_ms` (by group, too: timestamp of the oldest unfinished message, since 1970), `minute`
    (ends a minute ago).
    `retention_ms`: by topic whose messages are deleted because of their age."""

    ends: dict[TopicPartition, int] = {}
    firsts: dict[TopicPartition, int] = {}
    oldest_ms: dict[tuple[str, TopicPartition], int] = {}
    retention_ms: dict[str, int] = {}
    minute: dict[TopicPartition, int] = {}


class Tally:
    """Counts what the records of one group tell.

    - `advisories`, `deaths`: by kind. `redelivered`: deliveries of messages after their first, as far as the log says:
      what handlers of an owner had when the next one took over, and what was given back at a position. So at least so
      many.
    - `moved_ms`: when a claim began or ended last, by topic and partition.
    - `gaps`: how many partitions had nobody who worked on them for how long, until another session claimed them, by
      bucket of GAPS_S and one beyond; `gaps_s`: in all. From the last sign of life of a session that was evicted, else
      from the record that ended the claim. Pauses, and times in which the group had no session, do not count.
    """

    def __init__(self) -> None:
        self.advisories: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()
        self.redelivered: int = 0
        self.gaps: list[int] = [0] * (len(GAPS_S) + 1)
        self.gaps_s: float = 0.0
        self.moved_ms: dict[tuple[str, int], int] = {}
        self._free_ms: dict[tuple[str, int], int] = {}  # since when nobody works on the partition
        self._attempts: dict[TopicPartition, tuple[int, int]] = {}  # position, and its deliveries
        self._inherited: dict[TopicPartition, int] = {}  # the offset up to which a take-over was counted, about

    def begin(self, group: Group) -> None:
        """Counts from this state of the group on: what was delivered again before is not counted."""
        self._attempts = {tp: (one.position, one.attempts) for tp, one in group.partitions.items() if one.attempts > 1}

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
        if verdict.accepted and (death := _death(record)):
            self.deaths[death] += 1
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
    group: Group, tp: TopicPartition, data: DataFacts, pace: Pace, now_ms: int, recreated: Mapping[str, object]
) -> PartitionHealth:
    """Returns the row of one partition. Its time to the end is None where nothing moves or nobody owns it."""
    first = data.firsts.get(tp, 0)
    state = overview.partition_state(group, tp, data.ends.get(tp), recreated, first)
    lag, speed = state.lag, pace.per_second(group.name, tp, now_ms)
    time_s = oldest_s = retention_s = growth = None
    if lag is not None and tp in data.minute:
        growth = round((data.ends[tp] - data.minute[tp]) * 1000 / WINDOW_MS - speed, 1)
    if lag == 0:
        time_s = 0.0
    elif lag is not None:
        time_s = round(lag / speed, 1) if speed > 0 and state.owner is not None else None
        oldest_ms = data.oldest_ms.get((group.name, tp))
        keep_ms = data.retention_ms.get(tp.topic)
        if oldest_ms is not None:
            oldest_s = max(0, now_ms - oldest_ms) / 1000
        if oldest_ms is not None and keep_ms is not None:
            retention_s = max(0, oldest_ms + keep_ms - now_ms) / 1000
    deleted = 0 if lag is None or state.position is None else max(0, min(first, data.ends[tp]) - state.position)
    if deleted:
        retention_s = 0.0
    return PartitionHealth(
        **asdict(state),
        per_second=round(speed, 1),
        time_s=time_s,
        lag_per_second=growth,
        zero_s=zero_s(lag, growth),
        oldest_s=oldest_s,
        retention_s=retention_s,
        deleted=deleted,
    )


def zero_s(lag: int | None, per_second: float | None) -> float | None:
    """Returns in how many seconds a lag that changes so is 0; None for never."""
    if not lag:
        return None if lag is None else 0.0
    return round(lag / -per_second, 1) if per_second is not None and per_second < 0 else None


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
    partitions; `moved_ms`: of the pace."""
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
    grown = [row.lag_per_second for row in rows if row.lag_per_second is not None]
    growth = round(sum(grown), 1) if grown else None
    behind = sum(lags) if lags or not rows else None
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
        lag=behind,
        unknown=len(rows) - len(lags),
        per_second=round(sum([row.per_second for row in rows]), 1),
        time_s=None if None in times or (rows and not lags) else max(moving, default=0.0),
        lag_per_second=growth,
        zero_s=zero_s(behind, growth),
        oldest_s=max([row.oldest_s for row in rows if row.oldest_s is not None], default=None),
        retention_s=min([row.retention_s for row in rows if row.retention_s is not None], default=None),
        redelivered=tally.redelivered,
        advisories=dict(tally.advisories),
        partitions=rows,
    )


STANDS_MS: Final = 30_000  # a position that stays so long, though later messages are finished
POISON_DELIVERIES: Final = 5  # of the message at a position, as consumers count


class _HeldUp(NamedTuple):
    """What an owner has noted: the message at offset `at` holds up the position. `offset`: of the record."""

    at: int
    text: str
    session: int
    offset: int
    said_ms: int

    def is_so(self, partition: Partition) -> bool:
        """Returns whether the same claim goes on, so that nobody has moved the position, and it has not passed on."""
        return self.session == partition.owner and self.offset > partition.epoch and partition.position <= self.at


class Looking:
    """Collects what the records tell, while its owner reads them by an observer."""

    def __init__(self, observer: Observer, quotes: bool = True) -> None:
        """`quotes`: whether words of owners, which may have the key of a message, are in what it says."""
        self.pace: Pace = Pace()
        self.firsts: Mapping[TopicPartition, int] = {}  # first offsets of data partitions, as far as the owner asked
        self._observer, self._quotes = observer, quotes
        self._pauses: dict[str, PauseHistory] = {}
        self._gone: dict[str, int] = {}  # by group: the record of its pause, which was deleted
        self._lost: dict[str, dict[tuple[TopicPartition, int, int], int]] = {}  # by group and offsets: when
        self._held_up: dict[tuple[str, TopicPartition], _HeldUp] = {}  # the newest
        self._recent: tuple[int, dict[int, int]] = NONE, {}  # UNOWNED_MS before a time logs began at these offsets
        self._first_ms: dict[int, int] = {}  # by log: timestamp of the first record that was read
        self._died: dict[str, dict[int, tuple[int, str]]] = {}  # by group and session: when, and the error's class

    def read(self, judged: Judged, now_ms: int) -> None:
        """`now_ms`: of which the picture will be."""
        record, verdict = judged
        log, noted = record.log, verdict.record
        self.pace.read(self._observer.worlds[log], record.timestamp_ms, now_ms)
        if log not in self._first_ms:
            self._first_ms[log] = record.timestamp_ms
        if type(noted) is Heartbeat and noted.pause is None:
            return
        if verdict.group:
            self._pauses.setdefault(verdict.group, PauseHistory(verdict.group)).read(verdict)
        if verdict.accepted and isinstance(noted, Note) and noted.kind == "held_up":
            tp = TopicPartition(noted.topic, noted.partition)
            self._held_up[verdict.group, tp] = _HeldUp(
                noted.from_, noted.text, noted.session, record.offset, record.timestamp_ms
            )
        lost = None
        if verdict.accepted and isinstance(noted, Note) and noted.kind == "offset_lost":
            lost = TopicPartition(noted.topic, noted.partition), noted.from_, noted.to
        elif isinstance(noted, ClaimingPartition) and (span := verdict.unsettled) is not None:
            lost = TopicPartition(noted.topic, noted.partition), span.start, span.to
        if lost is not None:
            self._lost.setdefault(verdict.group, {})[lost] = record.timestamp_ms
        if verdict.accepted and isinstance(noted, Evict | Leave) and _death(noted):
            error = failure(noted) if isinstance(noted, Leave) else ""
            self._died.setdefault(verdict.group, {})[noted.session] = record.timestamp_ms, error
            group = self._observer.worlds[log].groups[verdict.group]
            for tp, partition in group.partitions.items():  # in at-most-once mode; the next claim tells it, too
                if partition.last_owner == noted.session and (span := group.unsettled(tp)) is not None:
                    self._lost.setdefault(verdict.group, {})[tp, span.start, span.to] = record.timestamp_ms

    def forget(self, names: Collection[str]) -> None:
        """Forgets all groups but these."""
        self._pauses = {name: each for name, each in self._pauses.items() if name in names}
        self._gone = {name: token for name, token in self._gone.items() if name in names}
        self._died = {name: each for name, each in self._died.items() if name in names}
        self._lost = {name: each for name, each in self._lost.items() if name in names}
        self._held_up = {key: each for key, each in self._held_up.items() if key[0] in names}
        self.pace.forget(names)

    def deaths(self, group: str, since_ms: int) -> list[str]:
        """Returns of each session of a group that has died since a time the class of the error that ended it, or "",
        and forgets the older ones. `since_ms` never falls."""
        kept = {session: each for session, each in self._died.pop(group, {}).items() if each[0] >= since_ms}
        if kept:
            self._died[group] = kept
        return [error for _, error in kept.values()]

    def losses(self, group: str, since_ms: int) -> list[tuple[TopicPartition, int, int]]:
        """Returns which offsets [start, to) a group has lost since a time: Kafka had deleted them, or in at-most-once
        mode their owner ended. Forgets the older ones. `since_ms` never falls."""
        kept = {offsets: at_ms for offsets, at_ms in self._lost.pop(group, {}).items() if at_ms >= since_ms}
        if kept:
            self._lost[group] = kept
        return sorted(kept)

    def pause_history(self, log: int, group: Group) -> PauseHistory:
        """Returns what the log says about the group's pause, also if that is older than what was read. Who asks for
        several groups calls `read_pauses` before."""
        self.read_pauses([(log, group)])
        return self._pauses.setdefault(group.name, PauseHistory(group.name))

    def read_pauses(self, groups: Iterable[tuple[int, Group]]) -> None:
        """Reads the records of running pauses that are older than what was read, those of a log together."""
        unread: dict[int, list[Group]] = {}
        for log, group in groups:
            if group.paused and self._gone.get(group.name) != group.pause_change:
                history = self._pauses.setdefault(group.name, PauseHistory(group.name))
                if history.running(group) is None:
                    unread.setdefault(log, []).append(group)
        for log, paused in unread.items():
            world, wanted = self._observer.worlds[log], [group.pause_change for group in paused]
            found = {one.offset: record for one, record in self._observer.records_of(world, wanted)}
            for group in paused:
                self._pauses[group.name].recall(group, found.get)
                if group.pause_change not in found:
                    self._gone[group.name] = group.pause_change

    def held_up(self, group: Group, now_ms: int) -> dict[TopicPartition, tuple[str, str]]:
        """Returns in words, with advice, which messages hold up the positions of their partitions: as owners said, or
        where messages come again, or stay while later ones go."""
        found = {}
        stands, since = self.pace.stands(group), self.pace.since(group)
        for tp, partition in sorted(group.partitions.items()):
            said = self._held_up.get((group.name, tp))
            stood_ms = now_ms - stands.get(tp, now_ms)
            stays = stood_ms >= STANDS_MS and now_ms - since.get(tp, now_ms) < HANGS_MS
            if said is not None and said.is_so(partition):
                at = said.at
                text = f"{tp} is held up at {at}{f': {said.text}' if self._quotes else ''}"
                text += f" (said {max(0, now_ms - said.said_ms) // 1000} s ago)"
            elif partition.attempts >= POISON_DELIVERIES or (partition.owner != NONE and stays):
                at = partition.position
                text = f"{tp} is held up at {at}"
                text += f" for {stood_ms // 1000} s, and later messages are finished" if stood_ms > 0 else ""
                text += f": that message was delivered {partition.attempts} times" if partition.attempts > 1 else ""
                text += "" if partition.owner != NONE else ", and no owner finished it: it may end their processes"
            else:
                continue
            look = f"marshal get {tp.topic} --partition {tp.partition} --offset {at}"
            skip = f"marshal set-position {quote(group.name)} {tp} --to {at + 1}"
            again = "what is finished above it then comes again; max_deliver with a dead_letter_topic spares that"
            gone = self.firsts.get(tp, 0) > at
            see = "Kafka has deleted it since, so that no other owner can get it" if gone else f"to see it: {look}"
            found[tp] = text, f"{see}; to skip it: {skip}; {again}"
        return found

    def facts(
        self,
        log: int,
        group: Group,
        now_ms: int,
        stopped: tuple[Standstill, ...],
        gone: Iterable[str],
        ends: Mapping[TopicPartition, int],
        waits: Mapping[TopicPartition, int],
        then: Mapping[TopicPartition, int],
    ) -> Facts:
        """Returns what is known of a group at `now_ms` since 1970. `stopped`: until an admin acts; `gone`: topics that
        the cluster lacks; `ends`: as far as known; `waits`: by `waits`, and `then` the ends of these, HANGS_MS ago."""
        pause = overview.pause(group, self.pause_history(log, group), now_ms)
        waiting = overview.free(group, ends, find_recreated(group, self._observer.topics), self.firsts)
        # Who has given no sign of life in all that is kept is silent since that begins.
        signs = dict.fromkeys(group.sessions, self._first_ms.get(log, now_ms)) | self._observer.signs_of(log, group)
        silent = overview.silence(group, signs, now_ms)
        return Facts(
            now_ms,
            "" if pause is None else overview.paused(pause),
            pause is not None and pause.left_s == 0 and not group.sessions.keys() - silent.keys(),
            stopped,
            tuple(gone),
            sum(waiting.values()),
            silent,
            self.pace.since(group),
            {tp: since_ms for tp, since_ms in waits.items() if then.get(tp, NONE) > group.partitions[tp].position},
            self._unowned(log, group, now_ms, ends, silent),
            held_up=self.held_up(group, now_ms),
        )

    def waits(self, group: Group, now_ms: int, ends: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Returns since when owners have finished nothing, by partition, where that is HANGS_MS ago, or more, and a
        message waits."""
        return {
            tp: since_ms
            for tp, since_ms in (self.pace.blocked(group) if not group.paused else {}).items()
            if now_ms - since_ms >= HANGS_MS and ends.get(tp, NONE) > group.partitions[tp].position
        }

    def _unowned(
        self, log: int, group: Group, now_ms: int, ends: Mapping[TopicPartition, int], silent: Collection[int]
    ) -> dict[TopicPartition, int]:
        """Returns the lag of each partition without an owner for UNOWNED_MS, by offsets alone: what decides about the
        owner must be older than the newest records."""
        lags = overview.free(group, ends, (), self.firsts)
        if not lags or group.paused or not group.sessions:
            return {}
        if self._recent[0] != now_ms:
            self._recent = now_ms, self._observer.first_since(self._observer.worlds, now_ms - UNOWNED_MS)
        recent = self._recent[1][log]
        oldest: dict[str, int] = {}  # by topic: the oldest live session that reads it
        for session in sorted(group.sessions.keys() - set(silent), reverse=True):
            oldest |= dict.fromkeys(consumed(group.sessions[session].join.topics, group.topics), session)
        settings = max(group.config_offset, group.pause_change)
        found = {}
        for tp, lag in lags.items():
            known = group.partitions.get(tp)
            version = NONE if known is None else known.version
            if tp.topic in oldest and max(version, settings, group.topics[tp.topic].offset, oldest[tp.topic]) < recent:
                found[tp] = lag
        return found
