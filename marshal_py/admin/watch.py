"""Watches groups: reads the logs once, and then, refresh by refresh, what is new in them and what the cluster says.

A refresh costs what has changed: records are folded as they come, the ends of data partitions are asked for in one
request and in turn if there are very many, and why nobody consumes is looked at again when the group changed, else
every FINDINGS_MS. The age of a message is known from the ends that were seen before; only of what had arrived before
the first refresh the record is read. It writes nothing and joins no group. One thread at a time.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final, Literal, NamedTuple

from marshal_py.admin.views import diagnosis, health, overview
from marshal_py.admin.views.diagnosis import Slow
from marshal_py.admin.views.group_info import Check, GroupHealth, GroupState, GroupSummary, MemberInfo, PartitionHealth
from marshal_py.admin.views.health import DataFacts, Looking, Tally
from marshal_py.admin.views.overview import SKEW_MS
from marshal_py.admin.views.recreated_topics import find_recreated
from marshal_py.errors import AccessDenied, ClusterUnreachable, MarshalError, RangeLost
from marshal_py.history.advisories import Advisories
from marshal_py.history.lag import WINDOW_MS, told_lag
from marshal_py.log.observer import Judged, Observer
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.waiting import HANGS_MS, Standstill, named, standstills
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import Heartbeat
from marshal_py.transport.ports import TopicInfo

Shows = Literal["groups", "states", "summaries"]
RATE_RECORDS: Final = 4_096  # of all logs: of busy ones the rest of a minute is a look at a snapshot
FINDINGS_MS: Final = 5_000  # why nobody consumes a group that did not change changes by silence alone
ANSWER_S: Final = 5.0  # for the offsets of data partitions; then the last ones stay
ENDS_MAX: Final = 2_000  # partitions per refresh: their answers take some 20 ms of a core
FIRSTS_MAX: Final = 500  # first offsets move slowly
TOPIC_MS: Final = 30_000  # a topic is described again after so long
TOPICS_MAX: Final = 20  # of these per refresh
SETTINGS_MS: Final = 600_000  # a topic's retention is asked for again after so long
SETTINGS_MAX: Final = 4  # of these per refresh
READS_MAX: Final = 8  # topics per refresh of which messages are read for their timestamps
ARRIVALS_MAX: Final = 32  # ends that are kept of a partition: newer ones near each other, older ones far apart
ROUNDS_MAX: Final = 5  # of reads for who asks once: in each, a partition's message for one group more
SLOW_MAX: Final = 12  # partitions of a group of which ends a minute ago are looked up, every FINDINGS_MS
SLOWER: Final = 1.1  # times faster is written: less may be the difference of two clocks
NEVER_MS: Final = -(10**15)  # a tick before all others
NEAR: Final = 2_000  # offsets from a position within which there is a message, unless transactions left a gap


class Watch:
    """The picture of all groups of a coordination topic, or of one.

    - `as_of_ms`: when the picture was made, in ms since 1970; in a dump its newest record's time. 0: never yet.
    - `problem`: why the last refresh failed; "" if the picture is fresh.
    - `observer`: what reads the logs; None before the first refresh, and after some errors.
    """

    def __init__(
        self,
        open_observer: Callable[[], Observer],
        group: str | None = None,
        in_cluster: bool = True,
        believes: bool = False,
        shows: Shows = "groups",
        listen: Callable[[Judged], None] = lambda _: None,
        quotes: bool = True,
    ) -> None:
        """`open_observer`: called by the first refresh, and again by one after an error that a new reader may not
        have. `in_cluster`: False for the past and a dump; with `believes` the ends are then those of that time, and
        where the reader has no cluster, or Kafka no such message any more, those that owners last wrote into the log.
        `shows`: `groups` and all else; or, with deleted groups, `states`, without how long messages wait; `summaries`:
        from few records and without rows of partitions. `listen`: gets each record that is read. `quotes`: as
        of Looking."""
        self.as_of_ms: int = 0
        self.problem: str = ""
        self.observer: Observer | None = None
        self._open_observer, self._group, self._in_cluster = open_observer, group, in_cluster
        self._believes, self._shows, self._listen = believes, shows, listen
        self._quotes = quotes
        self._groups: tuple[GroupHealth, ...] = ()
        self._worlds: dict[str, tuple[int, Group]] = {}  # the same groups, as their logs say
        self._tallies: dict[str, Tally] = {}
        self._known_tps: dict[str, tuple[tuple[int, int], list[TopicPartition]]] = {}
        self._judged: dict[str, Judgement] = {}
        self._ticks_ms = self._forgot_ms = 0

    def close(self) -> None:
        observer, self.observer, self._worlds = self.observer, None, {}
        if observer is not None:
            observer.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the picture

    def groups(self) -> tuple[GroupHealth, ...]:
        """Returns the groups of the last refresh that succeeded, by name, without deleted ones."""
        return self._groups

    def partitions(self, group: str) -> tuple[PartitionHealth, ...]:
        """Returns the partitions of a group; () for one that is not there."""
        return next((found.partitions for found in self._groups if found.group == group), ())

    def members(self, group: str) -> tuple[MemberInfo, ...]:
        """Returns the live sessions of a group as of the last refresh; () for one that is not there."""
        log, found = self._worlds.get(group, (NONE, None))
        if found is None or self.observer is None:
            return ()
        return overview.members(found, self.observer.signs_of(log, found), self.as_of_ms)

    def states(self) -> tuple[GroupState, ...]:
        """Returns the groups as `marshal state` shows them."""
        assert self.observer is not None
        data, topics, now_ms = self._data.facts, self.observer.topics, self.as_of_ms
        return tuple(
            overview.state(
                group,
                log,
                self.observer.signs_of(log, group),
                data.ends,
                now_ms,
                health.pause,
                find_recreated(group, topics),
                health.notices,
                data.firsts,
            )
            for health, (log, group) in zip(self._groups, self._worlds.values(), strict=True)
        )

    def summaries(self) -> tuple[GroupSummary, ...]:
        """Returns the groups as `marshal groups ls` shows them."""
        assert self.observer is not None
        causes = {name: dict.fromkeys(one.cause for one in each.causes) for name, each in self._judged.items()}
        return tuple(
            overview.summary(group, self.observer.signs_of(log, group), self.as_of_ms, causes[name])
            for name, (log, group) in self._worlds.items()
        )

    def judgement(self, group: str) -> Judgement:
        """Returns why nobody consumes a group of the last refresh."""
        return self._judged[group]

    def infos(self) -> Mapping[str, TopicInfo | None]:
        """Returns what the cluster says of the groups' topics: None for one that is gone; without those of which
        nothing is known."""
        return self._data.infos

    def tally(self, group: str) -> Tally:
        """Returns what was counted of a group since the first refresh."""
        return self._tallies.setdefault(group, Tally())

    def refresh(self, until_ms: int | None = None, whole: bool = False) -> None:
        """Brings the picture up to date; `until_ms`: as it was at that time, of a dump, and never back in time.
        `whole`: for who looks once, it asks the cluster for everything, else for what a refresh may cost. If that
        fails, it raises the MarshalError, the picture stays, and the next refresh continues."""
        try:
            if self.observer is not None and self.observer.root is None:
                self.close()  # nobody had begun here; a new reader finds the first consumer
            if self.observer is None:
                self._open()
            now_ms, self._ticks_ms = self._fold(until_ms), _ticks_ms()
            if self._in_cluster:
                self._data.look_up([group for _, group in self._live()], self._tps, now_ms, self._ticks_ms, whole)
            elif self._believes:
                self._data.believe([group for _, group in self._live()], self._tps, now_ms)
            self._judge(now_ms)
            self._groups = () if self._shows == "summaries" else tuple(self._picture(now_ms))
            self._worlds = {group.name: (log, group) for log, group in self._live()}
        except MarshalError as error:
            self.problem = str(error)
            if not isinstance(error, ClusterUnreachable):
                self.close()
            raise
        self.as_of_ms, self.problem = now_ms, ""
        if self._ticks_ms - self._forgot_ms >= WINDOW_MS:
            self._forgot_ms = self._ticks_ms
            self._forget()

    def _forget(self) -> None:
        """Forgets what belongs to sessions, groups and partitions that are gone."""
        assert self.observer is not None
        self.observer.forget_ended()
        names = self._worlds.keys()
        self._tallies = {name: each for name, each in self._tallies.items() if name in names}
        self._known_tps = {name: each for name, each in self._known_tps.items() if name in names}
        self._judged = {name: each for name, each in self._judged.items() if name in names}
        self._looking.forget(names)
        self._data.forget(names)

    def _open(self) -> None:
        self.observer = self._open_observer()
        self._looking = Looking(self.observer, self._quotes)
        self._data = _DataTopics(self.observer, ages=self._shows == "groups")
        self._looking.firsts = self._data.facts.firsts
        self._advisories: dict[int, Advisories] = {}  # by log
        self._tallies, self._known_tps, self._judged = {}, {}, {}
        self._newest_ms = 0
        self._followed_ms = 0  # records that are read from now on were written after this; 0: not yet

    def _fold(self, until_ms: int | None) -> int:
        """Reads what is new, and returns the time of the picture."""
        observer = self.observer
        assert observer is not None
        now_ms = until_ms if until_ms is not None else observer.as_of_ms if self._in_cluster else observer.newest_ms()
        since_ms, look = now_ms - WINDOW_MS, self._looking.pace.read
        few = 0 if self._shows == "summaries" else RATE_RECORDS
        for judged in observer.read(self._group, since_ms=since_ms, records_max=few, until_ms=until_ms, look=look):
            self._listen(judged)
            self._read(observer, judged if not self._followed_ms else self._timed(observer, judged), now_ms)
        self._looking.pace.catch_up()
        observer.read_signs(self._live())
        self._looking.read_pauses(self._live())
        if self._in_cluster:
            if not self._followed_ms and self._shows == "groups":  # from now on it counts
                self._advisories = {log: Advisories(world) for log, world in observer.worlds.items()}
                for _, group in self._live():
                    self.tally(group.name).begin(group)
            self._followed_ms = observer.as_of_ms
        return observer.as_of_ms if self._in_cluster else max(self._newest_ms, until_ms or 0)

    def _timed(self, observer: Observer, judged: Judged) -> Judged:
        """Returns a record that came since the last refresh with this machine's time, if its writer's clock is wrong:
        then nobody is called silent, or hanging, because of a clock."""
        record, verdict = judged
        if -SKEW_MS <= record.timestamp_ms - self._followed_ms <= observer.as_of_ms - self._followed_ms + SKEW_MS:
            return judged
        session = verdict.record.session if isinstance(verdict.record, Heartbeat) else record.offset
        if (record.log, session) in observer.extended_ms:
            observer.extended_ms[record.log, session] = observer.as_of_ms
        return Judged(record._replace(timestamp_ms=observer.as_of_ms), verdict)

    def _read(self, observer: Observer, judged: Judged, now_ms: int) -> None:
        record, verdict = judged
        self._looking.read(judged, now_ms)
        if record.timestamp_ms > self._newest_ms:
            self._newest_ms = record.timestamp_ms
        if self._shows != "groups" or (self._in_cluster and not self._followed_ms):
            return  # states count nothing, and another start would count the last minute again
        world = observer.worlds[record.log]
        group = world.groups.get(verdict.group)
        advisories = self._advisories.get(record.log)
        if advisories is None:
            self._advisories[record.log] = Advisories(world)
        if group is not None:
            told = advisories.read(group, verdict, record.timestamp_ms) if advisories is not None else ()
            self.tally(group.name).read(group, verdict, record.timestamp_ms, told)

    def _live(self) -> list[tuple[int, Group]]:
        assert self.observer is not None
        return [
            (log, group)
            for log, group in self.observer.groups()
            if group.name == self._group or (self._group is None and (self._shows != "groups" or not group.deleted))
        ]

    def _tps(self, group: Group) -> list[TopicPartition]:
        size = group.shape, len(group.partitions)
        kept = self._known_tps.get(group.name)
        if kept is None or kept[0] != size:
            kept = size, [tp for tp in overview.partitions(group) if tp.partition >= 0]
            self._known_tps[group.name] = kept
        return kept[1]

    def _picture(self, now_ms: int) -> Iterator[GroupHealth]:
        assert self.observer is not None
        data, pace = self._data.facts, self._looking.pace
        for log, group in self._live():
            recreated, judged = find_recreated(group, self.observer.topics), self._judged[group.name]
            left = set(overview.gone(group, self._data.infos)) - named(group)
            if overview.abandoned(group, self._data.infos):
                left = set()  # without any partition nothing would wait, and nobody knows that
            tps = [tp for tp in self._tps(group) if tp.topic not in left]
            rows = tuple([health.partition_health(group, tp, data, pace, now_ms, recreated) for tp in tps])
            history = self._looking.pause_history(log, group) if group.paused else None
            pause, signs_ms = overview.pause(group, history, now_ms), self.observer.signs_of(log, group)
            near = tuple(diagnosis.of_retention(group.name, rows))
            told = (
                (*judged.deaths, *judged.lost, *judged.findings, *judged.held_up, *judged.slow, *near),
                judged.causes,
                judged.notices(group.name, near),
            )
            moved_ms = pace.moved_ms(group.name)
            yield health.group_health(group, *told, signs_ms, pause, self.tally(group.name), rows, moved_ms, now_ms)

    def _judge(self, now_ms: int) -> None:
        """Notes of the groups that are due why nobody consumes, and what is wrong besides, by the judgement of `marshal
        doctor`. It asks for the ends of all of them at once."""
        observer, looking = self.observer, self._looking
        assert observer is not None
        infos, ends, due = self._data.infos, self._data.facts.ends, []
        for each in self._live():
            known = self._judged.get(each[1].name) if self._in_cluster else None
            if known is None or known.shape != each[1].shape or self._ticks_ms - known.ticks_ms >= FINDINGS_MS:
                due.append(each)
        waits = {group.name: looking.waits(group, now_ms, ends) for _, group in due}
        asked = set(chain.from_iterable(waits.values())) - self._data.untold
        then = observer.ends_before(asked, now_ms - HANGS_MS, ends)
        found = []
        for log, group in due:
            gone = overview.gone(group, infos)
            stopped = overview.stopped(group, find_recreated(group, observer.topics), ends)
            facts = looking.facts(log, group, now_ms, stopped, gone, ends, waits[group.name], then)
            found.append((group, facts, standstills(group, facts)))
        behind = {group.name: self._behind(group, now_ms, causes, ends) for group, _, causes in found}
        minute = observer.ends_before(set(chain.from_iterable(behind.values())), now_ms - WINDOW_MS, ends)
        for number, (group, facts, causes) in enumerate(found):
            said = _hanging(causes)
            held_up = (each for tp, each in facts.held_up.items() if (tp.topic, tp.partition) not in said)
            deaths = tuple(diagnosis.of_deaths(group, looking.deaths(group.name, now_ms - WINDOW_MS), causes))
            slow = _slow(group, behind[group.name], minute, ends) if not deaths else ()
            spread_ms = number % 7 * FINDINGS_MS // 7 if group.name not in self._judged else 0  # not all at once later
            self._judged[group.name] = Judgement(
                self._ticks_ms - spread_ms,
                group.shape,
                causes,
                tuple(diagnosis.of_group(group, infos, causes)),
                deaths,
                tuple(Check("held up", "warn", f"{group.name!r}: {text}", advice) for text, advice in held_up),
                tuple(diagnosis.of_slow(group.name, slow)),
                tuple(diagnosis.of_losses(group.name, looking.losses(group.name, now_ms - WINDOW_MS))),
            )

    def _behind(
        self, group: Group, now_ms: int, causes: Collection[Standstill], ends: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, float]:
        """Returns the speeds of the partitions that are a minute behind, of those that lag most, without those where
        nothing is finished at all, because a cause says so: it hangs, or its owner is silent."""
        hanging, silent = _hanging(causes), {one for each in causes if each.cause == "silent" for one in each.sessions}
        behind: dict[TopicPartition, float] = {}
        for each in group.claims.values() if not group.paused else ():
            lag = ends.get(each.tp, 0) - each.position
            if lag <= 0 or tuple(each.tp) in hanging or each.owner in silent or each.tp in self._data.untold:
                continue
            speed = self._looking.pace.per_second(group.name, each.tp, now_ms)
            if 0 < speed < lag * 1000 / WINDOW_MS:
                behind[each.tp] = speed
        most = sorted(behind, key=lambda tp: group.partitions[tp].position - ends[tp])[:SLOW_MAX]
        return {tp: behind[tp] for tp in most}


def _hanging(causes: Iterable[Standstill]) -> set[tuple[str, int]]:
    """Returns where nothing is finished at all."""
    return {(one.topic, number) for one in causes if one.cause == "hangs" for number in one.partitions}


def _slow(
    group: Group,
    behind: Mapping[TopicPartition, float],
    minute: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
) -> Iterator[Slow]:
    """Yields those of the partitions `behind` that fall further behind. `minute`: the ends a minute ago."""
    for tp, speed in sorted(behind.items()):
        known, written = group.partitions[tp], (ends[tp] - minute[tp]) * 1000 / WINDOW_MS
        if known.position < minute[tp] and written > speed * SLOWER:
            yield Slow(group.sessions[known.owner].join.client_id, tp, speed, written)


class Judgement(NamedTuple):
    """What is wrong with a group, as it was at this tick, and with this shape. `findings`: of its `causes` and
    topics."""

    ticks_ms: int
    shape: int
    causes: Sequence[Standstill]
    findings: tuple[Check, ...]
    deaths: tuple[Check, ...]
    held_up: tuple[Check, ...]
    slow: tuple[Check, ...]
    lost: tuple[Check, ...]

    def notices(self, group: str, near: Iterable[Check]) -> tuple[str, ...]:
        """Returns it in words, for who knows which group it is, with what is `near`, which each tick tells anew."""
        deaths, *others = (
            [f"{one.found}; {one.advice}" for one in each if one.level != "ok"]
            for each in (self.deaths, near, self.findings[len(self.causes) :], self.held_up, self.slow, self.lost)
        )
        return tuple(text.removeprefix(f"{group!r}: ") for text in chain(deaths, map(str, self.causes), *others))


def _ticks_ms() -> int:
    """Returns a time that only grows, for what happens every so often: this machine's clock may be set back."""
    return time.monotonic_ns() // 1_000_000


class _DataTopics:
    """What the cluster says about the topics that groups consume. `infos`: by topic that this client may describe; None
    for one that is gone."""

    def __init__(self, observer: Observer, ages: bool) -> None:
        """`ages`: whether it looks for how long messages wait, and may wait."""
        self.facts = DataFacts()
        self.infos: dict[str, TopicInfo | None] = {}
        self.untold: set[TopicPartition] = set()  # no broker answered for them when they were asked for last
        self._observer, self._ages = observer, ages
        self._described_ms: dict[str, int] = {}
        self._settings_ms: dict[str, int] = {}
        self._read_ms: dict[str, int] = {}
        self._wanted: set[str] = set()  # the topics of all groups
        self._turns = {"ends": 0, "firsts": 0}
        self._there: dict[TopicPartition, None] = {}  # what exists of the groups' partitions
        self._beyond: set[TopicPartition] = set()  # positions were beyond the end when that was asked for
        self._arrivals: dict[TopicPartition, array[int]] = {}  # times and ends in turn
        self._read: dict[tuple[str, TopicPartition], tuple[int, int]] = {}  # position, and its message's timestamp

    def look_up(
        self,
        groups: Iterable[Group],
        tps_of: Callable[[Group], list[TopicPartition]],
        now_ms: int,
        ticks_ms: int,
        whole: bool,
    ) -> None:
        """Asks the cluster. `ticks_ms`: of a clock that only grows. `whole`: for everything. Raises
        ClusterUnreachable."""
        self._describe({topic for group in groups for topic in overview.topics(group)}, ticks_ms)
        there = self._there = dict.fromkeys(tp for group in groups for tp in tps_of(group) if self._has(tp))
        facts, told = self.facts, self._observer.admin.told_offsets
        asked = self._turn("ends", list(there), len(there) if whole else ENDS_MAX)
        ends = told(asked, ANSWER_S)
        self.untold = self.untold.difference(asked) | (set(asked) - ends.keys())
        facts.ends = {tp: end for tp, end in facts.ends.items() if tp in there} | ends
        self._beyond -= ends.keys()
        placed = [(group, each.tp, each.position) for group in groups for each in group.partitions.values()]
        placed = [each for each in placed if each[2] != NONE and each[1] in facts.ends]
        lowest: dict[TopicPartition, int] = {}
        for _, tp, position in placed:
            lowest[tp] = min(position, lowest.get(tp, position))
            if position > facts.ends[tp]:
                if tp in ends:
                    self._beyond.add(tp)
                elif tp not in self._beyond:  # the end is older than the position
                    facts.ends[tp] = position
        for tp, end in ends.items():
            self._note(tp, end, lowest.get(tp, end), now_ms)
        behind = [(group, tp, position) for group, tp, position in placed if position < facts.ends[tp]]
        wanted = dict.fromkeys(tp for _, tp, _ in behind)
        unread = [tp for tp, end in facts.ends.items() if end and tp not in lowest]
        firsts = told(
            self._turn("firsts", [*wanted, *unread], len(there) if whole else FIRSTS_MAX), ANSWER_S, first=True
        )
        for tp in facts.firsts.keys() - there.keys():
            del facts.firsts[tp]
        facts.firsts |= firsts
        if not self._ages:
            return
        if whole and "time_lookup" in self._observer.admin.capabilities:
            facts.minute = self._observer.ends_before(facts.ends, now_ms - WINDOW_MS, facts.ends)
        topics = {tp.topic for tp in wanted}
        self._ask_retention(topics, ticks_ms, len(topics) if whole else SETTINGS_MAX)
        for _ in range(ROUNDS_MAX if whole else 1):
            facts.oldest_ms = self._oldest(behind, ticks_ms, len(topics) if whole else READS_MAX)
            if len(facts.oldest_ms) == len(behind):
                break

    def forget(self, names: Collection[str]) -> None:
        """Forgets the partitions that are no longer there. `names`: of the groups that there are."""
        topics = {tp.topic for tp in self._there}
        self._read = {key: each for key, each in self._read.items() if key[0] in names and key[1] in self._there}
        self._arrivals = {tp: each for tp, each in self._arrivals.items() if tp in self._there}
        self._beyond &= self._there.keys()
        for kept in (self._settings_ms, self._read_ms, self.facts.retention_ms):
            for topic in kept.keys() - topics:
                del kept[topic]
        for topic in self.infos.keys() - self._wanted:
            del self.infos[topic]
            self._described_ms.pop(topic, None)
            self._observer.topics.pop(topic, None)

    def believe(self, groups: Collection[Group], tps_of: Callable[[Group], list[TopicPartition]], then_ms: int) -> None:
        """Takes the ends that owners last wrote into the log, and those that the cluster knows of that time."""
        owned = ((group, each) for group in groups for each in group.claims.values() if each.tp.partition >= 0)
        told = ((each, told_lag(group, each)) for group, each in owned)
        ends = {each.tp: each.position + lag for each, lag in told if lag is not None}
        asked = list(dict.fromkeys(tp for group in groups for tp in tps_of(group)))[:ENDS_MAX]
        for found in self._observer.ends_at(asked, [then_ms]):
            for tp, end in found.items():
                ends[tp] = max(end, ends.get(tp, end))
        for each in (each for group in groups for each in group.partitions.values() if each.tp in ends):
            ends[each.tp] = max(ends[each.tp], each.position)  # the clocks of a topic and of the log differ
        self.facts.ends = ends

    def _has(self, tp: TopicPartition) -> bool:
        info = self.infos.get(tp.topic)
        return info is not None and tp.partition < info.partitions

    def _turn(self, what: str, tps: list[TopicPartition], most: int) -> list[TopicPartition]:
        """Returns `most` of these partitions at most; the next call returns the following ones."""
        if len(tps) <= most:
            return tps
        at = self._turns[what] % len(tps)
        self._turns[what] = at + most
        return [*tps[at : at + most], *tps[: max(0, at + most - len(tps))]]

    def _due(
        self, topics: Iterable[str], asked_ms: dict[str, int], ticks_ms: int, every_ms: int, most: int
    ) -> list[str]:
        """Returns the topics that were asked about longest ago."""
        due = sorted((asked_ms.get(topic, NEVER_MS), topic) for topic in topics)
        return [topic for at_ms, topic in due if ticks_ms - at_ms >= every_ms][:most]

    def _describe(self, topics: set[str], ticks_ms: int) -> None:
        new, self._wanted = topics - self._described_ms.keys(), topics
        for topic in self._due(topics, self._described_ms, ticks_ms, TOPIC_MS, max(len(new), TOPICS_MAX)):
            with suppress(AccessDenied):
                info = self.infos[topic] = self._observer.admin.describe_topic(topic)
                self._observer.topics.pop(topic, None)
                if info is not None:
                    self._observer.topics[topic] = info
            self._described_ms[topic] = ticks_ms

    def _ask_retention(self, topics: set[str], ticks_ms: int, most: int) -> None:
        for topic in self._due(topics, self._settings_ms, ticks_ms, SETTINGS_MS, most):
            self.facts.retention_ms.pop(topic, None)
            with suppress(AccessDenied):
                found = self._observer.admin.settings(topic)
                keep_ms = int(found.get("retention.ms", NONE))
                if keep_ms >= 0 and "delete" in found.get("cleanup.policy", "delete"):
                    self.facts.retention_ms[topic] = keep_ms
            self._settings_ms[topic] = ticks_ms

    # --- when messages arrived

    def _note(self, tp: TopicPartition, end: int, lowest: int, now_ms: int) -> None:
        """Notes an end. `lowest`: the lowest position, whose message must be found: older samples go, and of those
        above it the ones that are nearest to their neighbours, compared with their age."""
        kept = self._arrivals.get(tp)
        if kept is None or end < kept[-1]:
            kept = self._arrivals[tp] = array("q", (now_ms, end))
        elif end > kept[-1]:
            kept.extend((now_ms, end))
        done = bisect_right(kept[1::2], lowest) - 1
        if done > 0:
            del kept[: 2 * done]
        if len(kept) > 2 * ARRIVALS_MAX:
            times = kept[::2]
            least = min(range(2, len(times) - 1), key=lambda i: (times[i + 1] - times[i - 1]) / (now_ms - times[i] + 1))
            del kept[2 * least : 2 * least + 2]

    def _arrived_ms(self, tp: TopicPartition, offset: int) -> int | None:
        """Returns when the message at an offset was seen to be there; None if it was there before."""
        kept = self._arrivals.get(tp, ())
        at = bisect_right(kept[1::2], offset)
        return kept[2 * at] if 0 < at < len(kept) // 2 else None

    def _oldest(
        self, behind: Iterable[tuple[Group, TopicPartition, int]], ticks_ms: int, most: int
    ) -> dict[tuple[str, TopicPartition], int]:
        """Returns the timestamps of the oldest unfinished messages, as far as known."""
        found: dict[tuple[str, TopicPartition], int] = {}
        unread: dict[str, dict[TopicPartition, tuple[str, int]]] = {}
        for group, tp, position in behind:
            key = group.name, tp
            arrived_ms = self._arrived_ms(tp, position)
            if arrived_ms is not None:
                found[key] = arrived_ms
                self._read.pop(key, None)
                continue
            if key in self._read:
                found[key] = self._read[key][1]
            if key not in self._read or self._read[key][0] != position:
                unread.setdefault(tp.topic, {}).setdefault(tp, (group.name, position))
        for topic in self._due(unread, self._read_ms, ticks_ms, 0, most):
            starts = {tp: max(at, self.facts.firsts.get(tp, at)) for tp, (_, at) in unread[topic].items()}
            ends = {tp: min(self.facts.ends[tp], start + NEAR) for tp, start in starts.items()}
            starts = {tp: start for tp, start in starts.items() if start < ends[tp]}
            times_ms: dict[TopicPartition, int] = {}
            with suppress(AccessDenied, RangeLost, ClusterUnreachable):
                times_ms = self._observer.times_at(starts, ends, ANSWER_S) if starts else {}
            self._read_ms[topic] = ticks_ms if times_ms else ticks_ms + TOPIC_MS  # not allowed, or its leader is away
            for tp, at_ms in times_ms.items():
                name, position = unread[topic][tp]
                self._read[name, tp] = position, at_ms
                found[name, tp] = at_ms
        return found
