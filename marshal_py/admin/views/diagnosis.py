"""Checks the health of groups, clocks and versions, from the records of the logs. Pure; fed record by record.

Each check is one line: a level, what was found and, if there is something to do, one line of advice. Nothing in this
module decides anything about a group, because timestamps come from the writers' clocks; the fold does not read them
either.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from shlex import quote
from typing import Any, Final, NamedTuple

from marshal_py.admin.views.group_info import Check, GroupCheck, GroupHealth, Level, PartitionHealth
from marshal_py.admin.views.overview import SKEW_MS, abandoned, positions
from marshal_py.admin.views.recreated_topics import find_recreated
from marshal_py.errors import first_of
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, Session
from marshal_py.protocol.member.waiting import Standstill, fails, start_one
from marshal_py.protocol.time import shared
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import Join, Snapshot
from marshal_py.transport.ports import Bounds, LogRecord, Replicas, TopicInfo

LEVELS: Final[tuple[Level, ...]] = ("fail", "unknown", "warn", "ok")  # the worst first
EXIT_CODES: Final[dict[Level, int]] = {"ok": 0, "warn": 1, "fail": 2, "unknown": 3}  # as Nagios counts
DEATHS_MANY: Final = 3  # within a minute: more than a restart of one process
RETENTION_NEAR: Final = 0.8  # of the time for which Kafka keeps a message, that the oldest unfinished one has waited
RETENTION_REACHED: Final = 0.95
DAY_MS: Final = 86_400_000
ORPHANED_MS: Final = 7 * DAY_MS  # as long as Kafka itself keeps the offsets of an empty group
SKEW_RECORDS: Final = 3  # that many records of a client must be late: a single one may have been retried
RECORDS_MANY: Final = 1_000_000  # folding them takes a joining consumer some seconds
RECORD_BYTES: Final = 70  # what Kafka adds to a value, about: framing, key, timestamp
NAMES_MAX: Final = 5  # how many names a line lists

TITLES: Final = {  # of a check, by the cause for which nobody consumes; another cause is its own title
    "pause_over": "pause over",
    "no_consumer": "no consumer",
    "silent": "silent consumer",
    "parked": "parked partitions",
    "conditions": "unserved partitions",
    "unassigned": "unassigned partitions",
    "absent": "absent member",
    "unlisted": "unlisted member",
    "topic_gone": "missing topic",
    "not_read": "topic without a reader",
    "hangs": "nothing finished",
    "unowned": "unowned partitions",
}


class Study:
    """What the checks need of the records, passed in after folding. `now_ms`: when the logs' ends were looked up, by
    which silence counts. `clock`: this machine's time while it reads (a long log takes seconds): a timestamp beyond it
    shows a clock that is ahead."""

    def __init__(self, now_ms: int, clock: Callable[[], int]) -> None:
        self.now_ms: int = now_ms
        self._clock = clock
        self.last_ms: dict[str, int] = {}  # by group: the newest timestamp
        self.sizes: dict[int, list[int]] = {}  # by log: how many records were read, and their bytes
        self.snapshot_at: dict[int, int] = {}  # by log: offset of the newest snapshot record
        self.behind_ms: dict[str, list[int]] = defaultdict(list)  # by client: how far behind others, per record
        self.ahead_ms: dict[str, int] = {}  # by client: ahead of this machine
        self._clients: dict[tuple[int, int], str] = {}
        self._newest: dict[int, tuple[int, str]] = {}  # by log: the greatest timestamp so far, and whose it is

    def read(self, judged: tuple[LogRecord, Verdict]) -> None:
        record, verdict = judged
        log, at_ms = record.log, record.timestamp_ms
        size = self.sizes.setdefault(log, [0, 0])
        size[0] += 1
        size[1] += len(record.value or b"") + RECORD_BYTES
        if isinstance(verdict.record, Snapshot):
            self.snapshot_at[log] = record.offset
        if verdict.group:
            self.last_ms[verdict.group] = max(at_ms, self.last_ms.get(verdict.group, 0))
        client = self._client_of(record, verdict)
        if client:
            self._compare(client, log, at_ms)

    def _client_of(self, record: LogRecord, verdict: Verdict) -> str:
        if not verdict.accepted:
            return ""
        if isinstance(verdict.record, Join):
            self._clients[record.log, record.offset] = verdict.record.client_id
            return verdict.record.client_id
        return self._clients.get((record.log, getattr(verdict.record, "session", NONE)), "")

    def _compare(self, client: str, log: int, at_ms: int) -> None:
        """Notes how far a timestamp is behind the greatest one of another client before it, and ahead of this machine's
        clock."""
        newest_ms, whose = self._newest.get(log, (at_ms, client))
        if whose != client:
            self.behind_ms[client].append(newest_ms - at_ms)
        if at_ms >= newest_ms:
            self._newest[log] = (at_ms, client)
        self.ahead_ms[client] = max(at_ms - self._clock(), self.ahead_ms.get(client, 0))


def of_clocks(study: Study) -> Check:
    """Checks, by the timestamps of the records, the clocks of the machines that wrote them."""
    behind = {client: min(found) for client, found in study.behind_ms.items() if len(found) >= SKEW_RECORDS}
    slow = {client: ms for client, ms in behind.items() if ms > SKEW_MS}
    fast = {client: ms for client, ms in study.ahead_ms.items() if ms > SKEW_MS}
    words = [f"{client!r} is at least {ms / 1000:.1f} s behind the others" for client, ms in sorted(slow.items())]
    words += [f"{client!r} is {ms / 1000:.1f} s ahead of this machine" for client, ms in sorted(fast.items())]
    if not words:
        return Check("clocks", "ok", f"no writer is more than {SKEW_MS / 1000:g} s off")
    advice = (
        "set the clocks there: ownership does not depend on them, times in `marshal explain --at` and positions by "
    )
    return Check("clocks", "warn", first_of(words, NAMES_MAX), advice + "time do")


def of_content(groups: Sequence[Group], silent: Collection[tuple[str, int]]) -> Check:
    """Says that all logs could be folded, and what is in them. `silent`: sessions that are not live, with groups."""
    sessions = sum(len(group.sessions) for group in groups)
    dead = f", {len(silent)} silent ones" if silent else ""
    return Check(
        "content", "ok", f"every log folds; {len(groups)} groups, {sessions - len(silent)} live sessions{dead}"
    )


def _live(groups: Iterable[Group], silent: Collection[tuple[str, int]]) -> list[Session]:
    return [each for group in groups for each in group.sessions.values() if (group.name, each.id) not in silent]


def of_kafka_consumers(group: str, live: int, early: bool = False) -> Iterator[Check]:
    """Yields a check if ordinary Kafka consumers are in Kafka's group of the same name (D7). `live`: how many. `early`:
    they may be, because none of this library has started yet."""
    if live:
        text = f"{live} ordinary Kafka consumers use the group id {group!r}: they read what this library's consumers "
        text += "read, and Kafka refuses copies of the positions"
        advice = "stop them, or give one side another group id"
        if not early:  # else consumers that start here later continue at its old positions
            advice += f"; if the group has gone back to them: marshal groups rm {quote(group)}"
        yield Check("Kafka consumers", "warn" if early else "fail", text, advice)


def of_replicas(found: Collection[Replicas], least: int) -> Iterator[Check]:
    """Yields a check if partitions of the coordination topic lack replicas in sync. `least`: of them, for a write; of
    fewer replicas Kafka wants all (since 3.7)."""
    if short := sum(one.leader < 0 or len(one.in_sync) < min(least, len(one.all)) for one in found):
        text = f"{short} of {len(found)} partitions take no records: they have no leader, or fewer than "
        text += f"min.insync.replicas={least} in sync; the consumers of their groups deliver nothing"
        yield Check("replicas", "fail", text, "start the brokers that are down: see their logs, and their disks")
    elif lagging := sum(len(one.all) - len(one.in_sync) for one in found):
        yield Check("replicas", "warn", f"{lagging} are not in sync", "a broker is down or slow: see its log")


def of_versions(groups: Iterable[Group], silent: Collection[tuple[str, int]] = ()) -> Check:
    """Checks that all live consumers use the same version of the library, which their Joins name."""
    libraries: dict[str, set[str]] = defaultdict(set)
    for session in _live(groups, silent):
        libraries[session.join.library or "unnamed"].add(session.join.client_id)
    if not libraries:
        return Check("versions", "ok", "no consumer is live")
    found = "; ".join(f"{library}: {len(clients)} consumers" for library, clients in sorted(libraries.items()))
    if len(libraries) == 1:
        return Check("versions", "ok", found)
    fewest = min(libraries, key=lambda library: len(libraries[library]))
    names = first_of(sorted(libraries[fewest]), NAMES_MAX)
    return Check("versions", "warn", found, f"harmless while you upgrade; {names} still run {fewest}")


def of_witnesses(groups: Iterable[Group], silent: Collection[tuple[str, int]] = ()) -> Check:
    """Says how many live consumers named a witness when they joined: their partitions move at once if they die."""
    sessions = _live(groups, silent)
    without = sorted(session.join.client_id for session in sessions if not session.join.witness)
    if not sessions:
        return Check("witnesses", "ok", "no consumer is live")
    found = f"{len(sessions) - len(without)} of {len(sessions)} consumers had one when they joined"
    return Check("witnesses", "ok", f"{found}; none: {first_of(without, NAMES_MAX)}" if without else found)


def of_client_ids(groups: Iterable[Group], silent: Collection[tuple[str, int]] = ()) -> Iterator[Check]:
    """Yields a warning for each group in which live consumers use one client_id at one time."""
    for group in groups:
        found = shared(_live([group], silent))
        words = [f"{name!r} (sessions {', '.join(map(str, each))})" for name, each in sorted(found.items())]
        if words:
            yield Check(
                "client ids",
                "warn",
                f"{group.name!r}: several live consumers have the client_id {first_of(words, NAMES_MAX)}",
                "harmless if one Marshal has them all; else give each process a client_id of its own, or none",
            )


def of_intervals(groups: Iterable[Group], silent: Collection[tuple[str, int]] = ()) -> Iterator[Check]:
    """Yields a warning for each group whose live consumers have different heartbeat intervals."""
    for group in groups:
        clients: dict[int, list[str]] = defaultdict(list)
        for session in _live([group], silent):
            clients[session.join.interval_ms].append(session.join.client_id)
        if len(clients) > 1:
            words = (f"{ms / 1000:g} s: {first_of(sorted(each), NAMES_MAX)}" for ms, each in sorted(clients.items()))
            text = f"{group.name!r}: live consumers have different heartbeat intervals ({'; '.join(words)})"
            yield Check("intervals", "warn", text, "harmless; but each is missed after two intervals of its own only")


def of_groups(
    groups: Iterable[Group],
    infos: Mapping[str, TopicInfo | None],
    study: Study,
    causes: Mapping[str, Sequence[Standstill]],
    named: str | None = None,
    lenient: bool = False,
) -> Iterator[Check]:
    """Yields a warning for each cause of a standstill, unused group, smaller topic, and a `named` group without
    consumers; one "ok" without any. Unless `lenient`, what stops the `named` group is a failure. `infos`: Kafka's
    topics, None if gone, without those it may not describe. `causes`: `standstills`, by group. With `named` nothing is
    said of other groups."""
    sound = named is None
    for group in groups:
        sound |= group.name == named
        if group.name != named and (group.deleted or named is not None):
            continue
        known = causes[group.name]
        found = of_group(group, infos, known, not lenient and group.name == named)
        idle_ms = study.now_ms - study.last_ms.get(group.name, study.now_ms)
        if not group.sessions and idle_ms > ORPHANED_MS:
            found.insert(0, _orphan(group, idle_ms))
        if group.name == named and not (
            group.sessions or group.deleted or "no_consumer" in {one.cause for one in known}
        ):
            found.append(_empty(group.name))
        sound = sound and not found
        yield from found
    if sound:
        which = "every group" if named is None else repr(named)
        yield Check("groups", "ok", f"{which} is used, and its topics are there")


def of_group(
    group: Group, infos: Mapping[str, TopicInfo | None], causes: Sequence[Standstill], strict: bool = True
) -> list[Check]:
    """Returns a check for each of the group's `causes` (`standstills`), then for topics that are gone or smaller.
    `strict`: what stops all of the group fails."""
    failed = fails(group, causes) if strict else set()
    found = []
    for one in causes:
        level: Level = "fail" if one.cause in failed else "warn"
        found.append(Check(TITLES.get(one.cause, one.cause), level, f"{group.name!r}: {one.text}", one.advice))
    return [*found, *_abandoned(group, infos), *_smaller(group, infos)]


def _empty(name: str) -> Check:
    """Says that nobody is there. With a lag, `standstills` says it."""
    return Check("no consumer", "warn", f"{name!r}: no live session", start_one(name))


def of_retention(name: str, rows: Iterable[PartitionHealth]) -> Iterator[Check]:
    """Yields a check of the partitions whose oldest unfinished message Kafka soon deletes because of its age, or has
    deleted. It deletes whole segments, so a message may outlive its time."""
    rows = list(rows)
    used = {f"{row.topic}:{row.partition}": part for row in rows if (part := row.retention_used) is not None}
    near = [place for place, part in used.items() if part >= RETENTION_NEAR]
    if near:
        worst = max(used.values())
        soon = "may delete at any moment" if worst == 1.0 else f"soon deletes (after {worst:.0%} of the retention)"
        what = "has deleted" if any(row.deleted for row in rows) else soon
        text = f"{name!r}: Kafka {what} unfinished messages of {first_of(near, NAMES_MAX)}"
        topics = {row.topic: None for row in rows if f"{row.topic}:{row.partition}" in near}
        advice = "if their age is the reason, and nobody deletes records by hand: more consumers, or a longer retention"
        advice += f": marshal topics update {next(iter(topics))} --config retention.ms=MS"
        yield Check("retention near", "fail" if worst >= RETENTION_REACHED else "warn", text, advice)


class Limits(NamedTuple):
    """What a caller of `check` tolerates: a lag in messages, an age of the oldest unfinished message in seconds."""

    lag: int | None = None
    age_s: float | None = None


class Slow(NamedTuple):
    """A partition whose owner is more than a minute behind and falls further behind. Both speeds are of this minute,
    in messages per second."""

    client_id: str
    tp: TopicPartition
    finished: float
    written: float


def of_slow(group: str, found: Iterable[Slow]) -> Iterator[Check]:
    """Yields a check for each consumer that is slower than the producers of what it owns."""
    by_client: dict[str, list[Slow]] = defaultdict(list)
    for one in found:
        by_client[one.client_id].append(one)
    for client, slow in by_client.items():
        finished, written = sum(one.finished for one in slow), sum(one.written for one in slow)
        text = f"{group!r}: {client!r} is slow: it finishes {round(finished, 2):.15g} messages/s of "
        text += f"{first_of([str(one.tp) for one in slow], NAMES_MAX)} against {round(written, 2):.15g}/s written"
        advice = "start more consumers, or let each work on several messages at once: Consumer.process"
        yield Check("slow consumer", "warn", text, advice)


def of_deaths(group: Group, deaths: Sequence[str], causes: Sequence[Standstill]) -> Iterator[Check]:
    """Yields a check if consumers have died: a fact, or, if they do so again and again, a warning that is as bad as
    that none is left. `deaths`: of the last minute; of each the class of the program's error, or ""."""
    count, errors = len(deaths), Counter(filter(None, deaths))
    advice = "why, their own logs say; who and when: "
    advice += f"marshal advisories {quote(group.name)} --kind died --kind evicted{' --kind left' if errors else ''}"
    text = f"{group.name!r}: {'a consumer has' if count == 1 else f'{count} consumers have'} died within a minute"
    if errors:
        text += f", {first_of([f'{each} by {error}' for error, each in errors.most_common()], NAMES_MAX)}"
    if count >= DEATHS_MANY:
        yield Check("crash loop", "fail" if "no_consumer" in fails(group, causes) else "warn", text, advice)
    elif count:
        yield Check("deaths", "ok", text, advice)


def of_losses(group: str, losses: Sequence[tuple[TopicPartition, int, int]]) -> Iterator[Check]:
    """Yields a warning if offsets [start, to) were lost within the last minute."""
    if losses:
        words = first_of([f"{tp} offsets {start} to {to - 1}" for tp, start, to in losses], NAMES_MAX)
        text = f"{group!r}: at most these messages were lost within a minute: {words}"
        yield Check("lost messages", "warn", text, f"for more: marshal explain {quote(group)} {losses[0][0]}")


def check(found: GroupHealth, limits: Limits, in_cluster: bool = True) -> GroupCheck:
    """Returns whether a group is well, by the first picture of a Watch. `in_cluster`: False for a dump."""
    checks = [*found.findings, *_of_limits(found, limits, in_cluster)]
    if not (found.sessions or found.deleted or "no_consumer" in found.causes):
        checks.append(_empty(found.group))
    figures = found.sessions, found.owned, found.free, found.parked, found.lag, found.oldest_s, found.retention_s
    return checked(found.group, checks, *figures)


def checked(group: str, checks: Iterable[Check], *figures: Any) -> GroupCheck:
    """Returns the result of these checks. `figures`: as GroupCheck has them."""
    ordered = sorted(checks, key=lambda one: LEVELS.index(one.level))
    level = ordered[0].level if ordered else "ok"
    return GroupCheck(group, level, EXIT_CODES[level], tuple(ordered), *figures)


def _of_limits(found: GroupHealth, limits: Limits, in_cluster: bool) -> Iterator[Check]:
    """Yields a check for each limit that is exceeded, or of which nobody can say whether it is."""
    if found.deleted:
        return
    untold = [row for row in found.partitions if row.lag is None]
    if limits.lag is not None:
        if (found.lag or 0) > limits.lag:
            yield Check("lag", "fail", f"{found.group!r}: {found.lag} messages wait, more than {limits.lag}")
        elif untold:
            yield Check("lag", "unknown", f"{found.group!r}: {_why_untold(found, untold, in_cluster)}")
    if limits.age_s is not None:
        ageless = [row for row in found.partitions if row.lag and row.oldest_s is None and row.retention_s != 0]
        if (found.oldest_s or 0) > limits.age_s:
            text = f"the oldest unfinished message is {found.oldest_s:.0f} s old, more than {limits.age_s:g} s"
            yield Check("age", "fail", f"{found.group!r}: {text}")
        elif ageless:
            row = ageless[0]
            text = f"the age of {row.topic}:{row.partition} at offset {row.position} is not known"
            advice = "this client may lack the right to read the topic: marshal doctor --as consumer"
            advice = advice if in_cluster else "a dump has no messages, so no age"
            yield Check("age", "unknown", f"{found.group!r}: {text}", advice)
        elif untold:
            yield Check("age", "unknown", f"{found.group!r}: {_why_untold(found, untold, in_cluster)}")


def _why_untold(found: GroupHealth, rows: Sequence[PartitionHealth], in_cluster: bool) -> str:
    """Returns why the lag of partitions is not known."""
    row = rows[0]
    why = f"the records at its position were lost ({row.parked})" if row.parked else "the topic was created again"
    if "opaque" in found.causes:
        why = "this installation cannot read its records"
    elif not in_cluster:
        why = "a dump does not say where topics end, and no owner has written the lag"
    elif row.end is None:
        why = "the cluster does not say where it ends"
    elif row.position is None:
        why = "it has no position yet"
    elif row.position > row.end:
        why = f"its position {row.position} is beyond its end {row.end}"
    return f"the lag of {len(rows)} partitions is not known, first {row.topic}:{row.partition}: {why}"


def _orphan(group: Group, idle_ms: int) -> Check:
    found = f"{group.name!r}: no consumer and no record for {idle_ms // DAY_MS} days; {len(positions(group))} positions"
    return Check("orphaned group", "warn", found, f"marshal groups rm {quote(group.name)}, if no consumer comes back")


def _abandoned(group: Group, infos: Mapping[str, TopicInfo | None]) -> Iterator[Check]:
    if lost := abandoned(group, infos):
        text = f"{group.name!r}: no consumer, and the cluster does not have {first_of(lost, NAMES_MAX)} any more"
        yield Check("missing topic", "warn", text, f"marshal groups rm {quote(group.name)}, if no consumer comes back")


def _smaller(group: Group, infos: Mapping[str, TopicInfo | None]) -> Iterator[Check]:
    for topic, known in sorted(group.topics.items()):
        info = infos.get(topic)
        if info is not None and info.partitions < known.count and not find_recreated(group, {topic: info}):
            count = info.partitions
            yield Check(
                "smaller topic",
                "warn",
                f"{group.name!r} knows {known.count} partitions of {topic!r}, Kafka has {count}",
                f"marshal groups update {quote(group.name)} --shrink {topic}={count}",
            )


def newest_offset(group: Group) -> int:
    """Returns the greatest offset that the state of a group names, about that of its last record; NONE if none."""
    offsets = [group.config_offset, group.deleted_at, group.pause_change]
    offsets += [topic.offset for topic in group.topics.values()]
    offsets += [partition.version for partition in group.partitions.values()]
    return max([*offsets, *(session.extended for session in group.sessions.values())])


def of_growth(study: Study, bounds: Mapping[int, Bounds], day_began: Mapping[int, int]) -> Check:
    """Checks how many records a joining consumer folds, and shows the growth. `day_began`: each log's first offset of
    the last 24 hours."""
    records = {log: at.end - max(at.first, study.snapshot_at.get(log, 0)) for log, at in bounds.items()}
    longest = max(records, key=lambda log: records[log])
    day = {log: at.end - max(at.first, day_began.get(log, at.end)) for log, at in bounds.items()}
    day_mb = sum(day[log] * size / count for log, (count, size) in study.sizes.items() if log in day) / 1_000_000
    found = (
        f"{sum(records.values())} records since the last snapshots, {records[longest]} of them in log {longest}; "
        f"{sum(day.values())} records, about {day_mb:.1f} MB, within a day"
    )
    if records[longest] > RECORDS_MANY:
        advice = (
            "a joining consumer reads its group's log from the last snapshot on: see that snapshots are written and "
        )
        return Check("growth", "warn", found, advice + "old records deleted")
    return Check("growth", "ok", found)
