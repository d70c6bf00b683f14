"""Examines a cluster, the coordination topic, a client's rights and the groups, for `marshal doctor`. Reads only.

It does not try to write, because every record of the topic belongs to a group. It asks the brokers what they would
allow instead. The rights that it expects are minimal: tests/kafka/test_access.py runs each role with exactly these, and
with each one left out. In Kafka, Read, Write and Delete imply `Describe`, so `Describe` is named only where none of
these three is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from shlex import quote
from typing import Any, Final, NamedTuple

from marshal_py.admin.views import diagnosis
from marshal_py.admin.views.diagnosis import Study
from marshal_py.admin.views.group_info import Check
from marshal_py.admin.watch import Watch
from marshal_py.errors import AccessDenied, ClusterError, MarshalError, TopicMissing
from marshal_py.log import replay
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold.world import Group
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.kafka_admin import KafkaAdmin
from marshal_py.transport.option_names import NOBODY, suggestion
from marshal_py.transport.ports import ALL_CAPABILITIES
from marshal_py.transport.settings import UNKNOWN_PRINCIPAL, principal_of
from marshal_py.transport.topic_checks import COORDINATION_PARTITIONS, KEEP_FOREVER, SAFE_BROKERS, grow_command

CONSUMER: Final = "consumer"
ADMIN: Final = "admin"
OBSERVER: Final = "observer"
ROLES: Final = (CONSUMER, ADMIN, OBSERVER)


class Right(NamedTuple):
    """Names operations that a client may do on one topic or group. They have the names that Kafka's ACLs use."""

    kind: str  # topic, group
    name: str
    operations: tuple[str, ...]


def rights_of(role: str, coordination_topic: str, groups: Iterable[str], topics: Iterable[str]) -> list[Right]:
    """Returns the rights that a role (one of ROLES) needs for these groups and the topics that they consume."""
    data, committed = "Describe", ""
    log: tuple[str, ...] = ("Read",)
    if role == CONSUMER:
        log, data, committed = ("Read", "Write", "DescribeConfigs"), "Read", "Read"
    elif role == ADMIN:
        log, committed = ("Read", "Write", "Delete"), "Describe"
    found = [Right("topic", coordination_topic, log)]
    found += [Right("topic", topic, (data,)) for topic in sorted(topics)]
    return found + [Right("group", group, (committed,)) for group in sorted(groups) if committed]


def missing(needed: Sequence[Right], allowed: Callable[[str, str], frozenset[str]]) -> list[Right]:
    """Returns the rights of `needed` with the operations that `allowed(kind, name)` lacks on that topic or group."""
    lacking = [
        Right(one.kind, one.name, tuple(o for o in one.operations if o not in allowed(one.kind, one.name)))
        for one in needed
    ]
    return [one for one in lacking if one.operations]


def grant(right: Right, principal: str, servers: str) -> str:
    """Returns the shell command that gives the right to `principal`. `servers`: the bootstrap servers."""
    operations = " ".join(f"--operation {operation}" for operation in right.operations)
    return (
        f"kafka-acls.sh --bootstrap-server {servers} --add --allow-principal {quote(principal)} {operations} "
        f"--{right.kind} {quote(right.name)}"
    )


SETTINGS_OF_CLUSTERS: Final = ("replication factor", "min.insync.replicas", "unclean.leader.election.enable")
RECORD_BYTES_MIN: Final = 1_048_588  # Kafka's own default: a heartbeat of 10,000 claims and a large move fit
SIZE_SETTING: Final = "max.message.bytes"


class Examination:
    """The checks of one cluster."""

    topic: str
    group: str | None
    roles: list[str]
    strict: bool

    def __init__(
        self,
        topic: str,
        group: str | None = None,
        topics: Sequence[str] = (),
        roles: Sequence[str] = (),
        strict: bool = False,
        quotes: bool = True,
    ) -> None:
        """`group`, `topics`: whose rights are checked, too. `roles`: of permissions.ROLES; empty: all. `strict`: a
        right that is lacking is a failure, and a group or topic that is not there, or a group that stands still, is
        none. `quotes`: as of Looking."""
        self.topic, self.group, self._quotes = topic, group, quotes
        self.roles, self.strict = list(roles or ROLES), strict
        self.asked: list[str] = list(topics)
        self.topics: set[str] = set(topics)

    def checks(self, settings: Mapping[str, Any], connect: Callable[[], KafkaTransport]) -> Iterator[Check]:
        """Checks the cluster of these settings of librdkafka. `connect` connects to it."""
        address = str(settings["bootstrap.servers"])
        try:
            transport = connect()
            admin = transport.admin()
            brokers = admin.brokers()
        except MarshalError as error:
            advice = (
                "check the address, the network and the security settings" if isinstance(error, ClusterError) else ""
            )
            yield Check("cluster", "fail", str(error), advice)
            return
        yield Check("cluster", "ok", f"{address} answers")
        try:
            yield from _brokers(transport, brokers)
            yield from self._topic(transport, admin, len(brokers))
            if not transport.embedded:  # it has no rights
                yield from self._rights(admin, principal_of(settings), address)
        except ClusterError as error:
            yield Check(type(error).__name__, "fail", str(error))
        finally:
            admin.close()

    def _topic(self, transport: KafkaTransport, admin: KafkaAdmin, brokers: int) -> Iterator[Check]:
        """Checks the coordination topic and what is in it. If this client may not make a check, one line says so."""
        try:
            count = admin.partition_count(self.topic)
            if count is None:
                yield Check(
                    "coordination topic",
                    "warn",
                    f"{self.topic} does not exist yet",
                    "the first consumer creates it, or its error says how",
                )
                yield from self._unused([])
                return
            yield _partitions(transport, admin, self.topic, count)
            try:
                yield from _settings(transport, admin, self.topic, brokers)
            except AccessDenied as error:
                yield Check("settings", "warn", "this client may not see them", str(error))
            with Observer(transport, self.topic) as observer:
                yield from self.content(observer, lambda: time.time_ns() // 1_000_000, count)
                known = {topic for _, group in observer.groups() for topic in group.topics}
            if self.group is not None:
                with Watch(lambda: Observer(transport, self.topic), self.group, quotes=self._quotes) as watch:
                    watch.refresh(whole=True)
                    yield from diagnosis.of_retention(self.group, watch.partitions(self.group))
                    left = any(one.deleted for one in watch.groups())  # as on the way back to Kafka's groups
                live = 0 if left else admin.live_kafka_members(self.group)
                yield from diagnosis.of_kafka_consumers(self.group, live, self.strict)
            yield from self._absent(admin, known)
        except AccessDenied as error:
            yield Check("coordination topic", "warn", "this client may not look into it", str(error))

    def of_dump(self, observe: Callable[[], Observer]) -> Iterator[Check]:
        """Checks the content of a dump, as of the time of its newest record. `observe` returns a reader of it."""
        with observe() as observer:
            times_ms = (record.timestamp_ms for record in observer.records(observer.bounds(observer.logs_of(None))))
            newest_ms = max(times_ms, default=0)
        with observe() as observer:
            yield from self.content(observer, lambda: newest_ms)

    def content(self, observer: Observer, clock: Callable[[], int], count: int | None = None) -> Iterator[Check]:
        """Checks the records of all logs since their newest snapshots, and the groups. `clock`: ms since 1970, of a
        dump its newest record's. `count`: the topic's partitions; None for a dump."""
        if observer.root is None:
            yield Check("root", "warn", NOBODY)
            yield from self._unused([])
            return
        root = observer.root
        yield Check(
            "root", "ok", f"incarnation {root.incarnation.hex()}, {root.partitions} logs, protocol {root.protocol}"
        )
        if count is not None and count > root.partitions:
            surplus = count - root.partitions
            yield Check("partitions", "ok", f"{surplus} beyond the root's {root.partitions} are not used")
        study = Study(clock(), clock)
        there = count is not None
        watch = Watch(lambda: observer, in_cluster=there, shows="states", listen=study.read, quotes=self._quotes)
        watch.refresh(whole=True)
        study.now_ms = watch.as_of_ms
        groups = [group for _, group in observer.groups()]
        _note_quiet(observer, study)
        judged = {group.name: watch.judgement(group.name) for group in groups}
        causes = {name: found.causes for name, found in judged.items()}
        gone = ((name, one) for name, found in causes.items() for one in found if one.cause == "silent")
        silent = {(name, session) for name, one in gone for session in one.sessions}
        yield diagnosis.of_content(groups, silent)
        for name, found in judged.items():
            if self.group in (None, name):
                yield from (*found.deaths, *found.lost, *found.held_up, *found.slow)
        yield from _odd_records(observer)
        logs = observer.logs_of(None)
        yield diagnosis.of_growth(
            study, observer.bounds(logs), observer.first_since(logs, study.now_ms - diagnosis.DAY_MS)
        )
        yield diagnosis.of_clocks(study)
        yield diagnosis.of_versions(groups, silent)
        yield diagnosis.of_witnesses(groups, silent)
        yield from diagnosis.of_client_ids(groups, silent)
        yield from diagnosis.of_intervals(groups, silent)
        yield from self._unused(groups)
        yield from diagnosis.of_groups(groups, watch.infos(), study, causes, self.group, self.strict)
        for group in groups:
            if group.name == self.group:
                self.topics |= set(group.topics)

    def _unused(self, groups: list[Group]) -> Iterator[Check]:
        """Yields a line if nobody ever used the group that the caller named: it may be mistyped, or yet to come."""
        names = [group.name for group in groups]
        if self.group is not None and self.group not in names:
            yield Check(
                "group",
                "warn" if self.strict else "fail",
                f"{self.group!r} has never been used{suggestion(self.group, names)}",
                "" if self.strict else "before its first consumer, ask with --as consumer",
            )

    def _absent(self, admin: KafkaAdmin, known: set[str]) -> Iterator[Check]:
        """Yields a line for each named topic that does not exist; `known`: the groups' topics, for a suggestion. One
        of these is said to be deleted."""
        for topic in self.asked:
            with suppress(AccessDenied):  # the rights tell
                if admin.partition_count(topic) is None:
                    yield Check(
                        "topic",
                        "warn" if self.strict else "fail",
                        f"{topic!r} does not exist" + (" any more" if topic in known else suggestion(topic, known)),
                        "create it again" if topic in known else "create it, or correct its name",
                    )

    def _rights(self, admin: KafkaAdmin, principal: str, address: str) -> Iterator[Check]:
        absent = set()
        who = "this client" if principal == UNKNOWN_PRINCIPAL else principal

        def allowed(kind: str, name: str) -> frozenset[str]:
            try:
                return admin.allowed(kind, name)
            except TopicMissing:
                absent.add(name)
                return frozenset()

        for role in self.roles:
            needed = rights_of(role, self.topic, [self.group] if self.group else [], self.topics)
            lacking = [one for one in missing(needed, allowed) if one.name not in absent]
            if not lacking:
                where = f" of group {self.group!r}" if self.group else ""
                unsure = f"; nobody can say for {', '.join(sorted(absent))}, missing yet" if absent else ""
                article = "an" if role[0] in "ao" else "a"
                yield Check(f"rights: {role}", "ok", f"{who} has what {article} {role}{where} needs{unsure}")
            for one in lacking:
                yield Check(
                    f"rights: {role}",
                    "fail" if self.strict else "warn",
                    f"{who} lacks {', '.join(one.operations)} on {one.kind} {one.name}",
                    grant(one, principal, address),
                )


def _note_quiet(observer: Observer, study: Study) -> None:
    """Notes when the groups of which no record was read had their last one, or the oldest record that is left."""
    for log, bounds in observer.bounds(observer.worlds).items():
        groups = observer.worlds[log].groups.values()
        quiet = {each.name: diagnosis.newest_offset(each) for each in groups if each.name not in study.last_ms}
        quiet = {name: max(at, bounds.first) for name, at in quiet.items()}
        times = observer.times_of(log, quiet.values()) if quiet else {}
        study.last_ms |= {name: times[at] for name, at in quiet.items() if at in times}


def _brokers(transport: KafkaTransport, brokers: dict[int, str]) -> Iterator[Check]:
    names = ", ".join(f"{address} (id {number})" for number, address in sorted(brokers.items()))
    if transport.embedded:
        lacking = ", ".join(sorted(ALL_CAPABILITIES - transport.admin().capabilities))
        yield Check(
            "broker",
            "warn",
            f"embedded broker, {names}; it lacks {lacking}",
            "for demos and tests only: its records are gone when its process ends",
        )
    elif len(brokers) < SAFE_BROKERS:
        yield Check("brokers", "warn", names, f"{SAFE_BROKERS} or more survive the loss of one; fewer do not")
    else:
        yield Check("brokers", "ok", names)


def _partitions(transport: KafkaTransport, admin: KafkaAdmin, topic: str, count: int) -> Check:
    """Checks how many logs the groups share, which cannot change once a client has connected (L3)."""
    says = f"{topic} has {count} partition{'s' if count != 1 else ''}"
    wanted = admin.can_grow(topic, COORDINATION_PARTITIONS)
    if wanted:
        return Check(
            "coordination topic",
            "warn",
            f"{says}, and nothing in it yet; {wanted} are usual",
            grow_command(topic, wanted, str(transport.given["bootstrap.servers"])),
        )
    if count == 1:
        return Check(
            "coordination topic",
            "warn",
            f"{says}: every group shares one log",
            "well for a few groups; more partitions are a fresh coordination topic",
        )
    return Check("coordination topic", "ok", says)


def _settings(transport: KafkaTransport, admin: KafkaAdmin, topic: str, brokers: int) -> Iterator[Check]:
    if "describe_config" not in admin.capabilities:
        yield Check("settings", "warn", "the embedded broker cannot describe settings; the check is waived there")
        return
    wrong = {error.setting: error for error in admin.wrong_settings(topic)}
    if wrong:  # the commands that correct them would change somebody else's topic
        log = transport.log(topic, f"doctor-{transport.name}", writes=False)
        try:
            replay.refuse_foreign(admin, log, topic)
        finally:
            log.close(0.0)
    values = admin.settings(topic)
    for name in (*KEEP_FOREVER, *(SETTINGS_OF_CLUSTERS if brokers >= SAFE_BROKERS else ())):
        error = wrong.get(name)
        if error is not None:
            yield Check(name, "fail", f"{error.value}, it must be {error.wanted}", error.command)
        else:
            yield Check(name, "ok", values.get(name, "as it must be"))
    size = int(values.get(SIZE_SETTING, RECORD_BYTES_MIN))
    if size < RECORD_BYTES_MIN:
        yield Check(
            SIZE_SETTING,
            "warn",
            f"{size}: the records of large groups do not fit",
            f"kafka-configs.sh --alter --topic {topic} --add-config {SIZE_SETTING}={RECORD_BYTES_MIN}",
        )
    yield from diagnosis.of_replicas(admin.replicas(topic).values(), int(values.get("min.insync.replicas", 1)))


def _odd_records(observer: Observer) -> Iterator[Check]:
    """Yields a line for each kind of record that this library does not write."""
    for reason in ("garbage", "misrouted", "malformed", "opaque"):
        number = sum(world.counters.get(reason, 0) for world in observer.worlds.values())
        if number:
            yield Check(
                "content",
                "warn",
                f"{number} records are {reason} and were ignored",
                "something else writes to this topic, or a newer library does",
            )
