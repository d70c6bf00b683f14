"""What an observer of groups knows beyond their states: signs of life, pauses, handlers without an answer, the cluster.

A Watch passes each record that it reads in, and gets the Facts by which protocol/member/waiting.py says why nobody
consumes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Final

from marshal_py.admin.views import overview
from marshal_py.admin.views.overview import Stopped
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.admin.views.recreated_topics import find_recreated
from marshal_py.history.lag import Unanswered
from marshal_py.log.observer import Judged, Observer
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.waiting import HANGS_MS, UNOWNED_MS, Facts
from marshal_py.protocol.wire.identity import NONE, TopicPartition, consumed
from marshal_py.protocol.wire.records import Evict, Heartbeat, Leave, Note, died

STANDS_MS: Final = 30_000  # a position that stays so long, though later messages are finished
POISON_DELIVERIES: Final = 5  # of the message at a position, as consumers count


class Looking:
    """Collects what the records tell, while its owner reads them by an observer."""

    def __init__(self, observer: Observer) -> None:
        self.firsts: Mapping[TopicPartition, int] = {}  # first offsets of data partitions, as far as the owner asked
        self._observer = observer
        self._pauses: dict[str, PauseHistory] = {}
        self._unanswered: dict[int, Unanswered] = {}  # by log
        self._held_up: dict[tuple[str, TopicPartition], tuple[Note, int]] = {}  # the newest, with its timestamp
        self._recent: dict[int, tuple[int, int]] = {}  # by log: UNOWNED_MS before a time begins at that offset
        self._first_ms: dict[int, int] = {}  # by log: timestamp of the first record that was read
        self._died_ms: dict[str, dict[int, int]] = {}  # by group and session

    def read(self, judged: Judged) -> None:
        record, verdict = judged
        self._first_ms.setdefault(record.log, record.timestamp_ms)
        noted = verdict.record
        if verdict.group and (not isinstance(noted, Heartbeat) or noted.pause is not None):
            self._pauses.setdefault(verdict.group, PauseHistory(verdict.group)).read(verdict)
        if verdict.accepted and isinstance(noted, Note) and noted.kind == "held_up":
            tp = TopicPartition(noted.topic, noted.partition)
            self._held_up[verdict.group, tp] = noted, record.timestamp_ms
        if verdict.accepted and (isinstance(noted, Evict) or (isinstance(noted, Leave) and died(noted))):
            self._died_ms.setdefault(verdict.group, {})[noted.session] = record.timestamp_ms
        group = self._observer.worlds[record.log].groups.get(verdict.group)
        if record.log not in self._unanswered:
            self._unanswered[record.log] = Unanswered()
        self._unanswered[record.log].read(group, verdict, record.timestamp_ms)

    def forget(self, names: Collection[str]) -> None:
        """Forgets all groups but these."""
        self._pauses = {name: each for name, each in self._pauses.items() if name in names}
        self._died_ms = {name: each for name, each in self._died_ms.items() if name in names}
        self._held_up = {key: each for key, each in self._held_up.items() if key[0] in names}
        for unanswered in self._unanswered.values():
            unanswered.forget(names)

    def deaths(self, group: str, since_ms: int) -> int:
        """Returns how many sessions of a group have died since a time, and forgets the older ones. `since_ms` never
        falls."""
        kept = {session: at_ms for session, at_ms in self._died_ms.pop(group, {}).items() if at_ms >= since_ms}
        if kept:
            self._died_ms[group] = kept
        return len(kept)

    def pause_history(self, log: int, group: Group) -> PauseHistory:
        """Returns what the log says about the group's pause, also if that is older than what was read."""
        found = self._pauses.setdefault(group.name, PauseHistory(group.name))
        found.recall(group, partial(self._observer.look_up, log))
        return found

    def held_up(self, group: Group, now_ms: int) -> dict[TopicPartition, tuple[str, str]]:
        """Returns in words, with advice, which messages hold up the positions of their partitions: as owners said, or
        where messages come again, or stay while later ones go."""
        found = {}
        unanswered = self._unanswered.get(next(iter(self._observer.logs_of(group.name)), NONE))
        stands = {} if unanswered is None else unanswered.stands(group)
        since = {} if unanswered is None else unanswered.since(group)
        for tp, partition in sorted(group.partitions.items()):
            noted, said_ms = self._held_up.get((group.name, tp), (None, 0))
            stood_ms = now_ms - stands.get(tp, now_ms)
            stays = stood_ms >= STANDS_MS and now_ms - since.get(tp, now_ms) < HANGS_MS
            if noted is not None and noted.session == partition.owner and partition.position <= noted.from_:
                text = f"{tp} is held up at {noted.from_}: {noted.text} (said {max(0, now_ms - said_ms) // 1000} s ago)"
                found[tp] = text, f"see: marshal advisories {group.name} --kind held_up"
            elif partition.owner != NONE and (partition.attempts >= POISON_DELIVERIES or stays):
                text = f"{tp} is held up at {partition.position}"
                text += f" for {stood_ms // 1000} s, and later messages are finished" if stood_ms > 0 else ""
                text += f": that message was delivered {partition.attempts} times" if partition.attempts > 1 else ""
                look = f"marshal get {tp.topic} --partition {tp.partition} --offset {partition.position}"
                found[tp] = text, f"to see it: {look}; to skip it: marshal set-position {group.name} {tp} --shift-by 1"
        return found

    def facts(
        self,
        log: int,
        group: Group,
        now_ms: int,
        stopped: Iterable[Stopped],
        gone: Iterable[str],
        ends: Mapping[TopicPartition, int],
    ) -> Facts:
        """Returns what is known of a group at `now_ms` since 1970. `stopped`: until an admin acts; `gone`: topics that
        the cluster lacks; `ends`: as far as known."""
        pause = overview.pause(group, self.pause_history(log, group), now_ms)
        waiting = overview.free(group, ends, find_recreated(group, self._observer.topics), self.firsts)
        # Who has given no sign of life in all that is kept is silent since that begins.
        signs = dict.fromkeys(group.sessions, self._first_ms.get(log, now_ms)) | self._observer.signs_of(log, group)
        unanswered = self._unanswered[log].since(group) if log in self._unanswered else {}
        silent = overview.silence(group, signs, now_ms)
        return Facts(
            now_ms,
            "" if pause is None else overview.paused(pause),
            pause is not None and pause.left_s == 0 and not group.sessions.keys() - silent.keys(),
            tuple(one.standstill() for one in stopped),
            tuple(gone),
            sum(waiting.values()),
            silent,
            unanswered,
            self._blocked(log, group, now_ms, ends),
            self._unowned(log, group, now_ms, ends, silent),
            held_up=self.held_up(group, now_ms),
        )

    def _blocked(
        self, log: int, group: Group, now_ms: int, ends: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """Returns since when owners have finished nothing, by partition in which a message has waited for HANGS_MS."""
        if group.paused or log not in self._unanswered:
            return {}
        since = {
            tp: since_ms
            for tp, since_ms in self._unanswered[log].blocked(group).items()
            if now_ms - since_ms >= HANGS_MS and ends.get(tp, NONE) > group.partitions[tp].position
        }
        older = self._observer.ends_before(since, now_ms - HANGS_MS, ends) if since else {}
        return {tp: since_ms for tp, since_ms in since.items() if older.get(tp, NONE) > group.partitions[tp].position}

    def _unowned(
        self, log: int, group: Group, now_ms: int, ends: Mapping[TopicPartition, int], silent: Collection[int]
    ) -> dict[TopicPartition, int]:
        """Returns the lag of each partition without an owner for UNOWNED_MS, by offsets alone: what decides about the
        owner must be older than the newest records."""
        lags = overview.free(group, ends, (), self.firsts)
        if not lags or group.paused or not group.sessions:
            return {}
        if self._recent.get(log, (NONE, NONE))[0] != now_ms:
            self._recent[log] = now_ms, self._observer.first_since([log], now_ms - UNOWNED_MS)[log]
        recent = self._recent[log][1]
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
