"""Writes what a Watch shows of groups as text for Prometheus, under own names or those of other exporters. Pure.

The text is written once per refresh, in the format that all scrapers read, so that a scrape only sends it. A figure
that is not known has no line: it is never 0. A partition without an owner, and a group that nobody consumes, have all
their lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final, NamedTuple

from marshal_py.admin.views.diagnosis import EXIT_CODES
from marshal_py.admin.views.group_info import GroupHealth, MemberInfo, PartitionHealth
from marshal_py.admin.views.health import DEATHS, GAPS_S, Tally
from marshal_py.protocol.member.advisory import ALARMING, LOCAL

SETTLED_MS: Final = 10_000  # after a move a partition's lag says how the move went, and not how many consumers it needs

Number = int | float | None
Labelled = Iterable[tuple[str, str, Number]]  # suffix of the name, further labels, value


class Shown(NamedTuple):
    """A group, with its sessions and what was counted of it."""

    health: GroupHealth
    members: tuple[MemberInfo, ...]
    tally: Tally


class TopicRows(NamedTuple):
    """The partitions of one topic in a group."""

    topic: str
    rows: list[PartitionHealth]

    def lag(self) -> int | None:
        known = [row.lag for row in self.rows if row.lag is not None]
        return sum(known) if known else None


class Family(NamedTuple):
    """A metric. `value`: of a Shown, a TopicRows or a PartitionHealth; or several, with further labels."""

    name: str
    help: str
    value: Callable[[Any], Number | Labelled]
    kind: str = "gauge"


class Dialect(NamedTuple):
    """The names and labels of one exporter. `labels`: of group, topic and partition. `ends`: metrics of a partition,
    whatever group reads it. `owner`: whether the labels of a partition name its owner."""

    labels: tuple[str, str, str]
    groups: tuple[Family, ...]
    topics: tuple[Family, ...]
    partitions: tuple[Family, ...]
    ends: tuple[Family, ...] = ()
    cluster: str = ""
    owner: bool = False


def escaped(text: str) -> str:
    """Returns the text of a label's value."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _by(label: str, values: Mapping[str, Number], suffix: str = "") -> Labelled:
    return [(suffix, f'{label}="{escaped(name)}"', value) for name, value in values.items()]


def _gaps(shown: Shown) -> Labelled:
    tally = shown.tally
    bounds = [*map(str, GAPS_S), "+Inf"]
    yield from _by("le", dict(zip(bounds, accumulate(tally.gaps), strict=True)), "_bucket")
    yield from (("_sum", "", tally.gaps_s), ("_count", "", sum(tally.gaps)))


def _worst(figures: Iterable[float | None], lag: int | None) -> float | None:
    """Returns the greatest age; 0 if nothing waits."""
    known = [figure for figure in figures if figure is not None]
    return max(known) if known else 0 if lag == 0 else None


def _retention_used(shown: Shown) -> float | None:
    used = (row.retention_used for row in shown.health.partitions)
    return max((part for part in used if part is not None), default=None)


def _states(shown: Shown) -> Labelled:
    found = shown.health
    unknown = found.sessions - found.fresh - found.stale
    return _by("state", {"fresh": found.fresh, "unknown": unknown, "stale": found.stale})


def _sessions(shown: Shown) -> Labelled:
    return [
        ("", f'client_id="{escaped(one.client_id)}",session="{one.session}"', one.last_sign_s) for one in shown.members
    ]


def _advisories(shown: Shown) -> Labelled:
    return _by("kind", {kind: shown.tally.advisories[kind] for kind in sorted(ALARMING - LOCAL)})


def _owner(row: PartitionHealth) -> Labelled:
    return [("", f'client_id="{escaped(row.owner or "")}"', int(row.owner is not None))]


OWN: Final = Dialect(
    ("group", "topic", "partition"),
    (
        Family(
            "marshal_group_level",
            "0: ok, 1: a warning, 2: critical, as `marshal check` says.",
            lambda s: EXIT_CODES[s.health.level],
        ),
        Family(
            "marshal_group_not_consumed",
            "Partitions that nobody consumes, by cause; 1 where it is the whole group or a consumer.",
            lambda s: _by("cause", s.health.causes),
        ),
        Family("marshal_group_sessions", "Sessions, by what is known of their last sign of life.", _states),
        Family(
            "marshal_group_sessions_witnessed",
            "Sessions whose end somebody notices at once.",
            lambda s: s.health.witnessed,
        ),
        Family("marshal_session_last_sign_seconds", "Seconds since a session's last sign of life.", _sessions),
        Family(
            "marshal_group_partitions",
            "Partitions, by whether somebody owns them.",
            lambda s: _by("state", {"owned": s.health.owned, "free": s.health.free, "parked": s.health.parked}),
        ),
        Family("marshal_group_lag", "Messages behind the ends, where that is known.", lambda s: s.health.lag),
        Family("marshal_group_lag_unknown", "Partitions whose lag is not known.", lambda s: s.health.unknown),
        Family(
            "marshal_group_consumed_per_second", "Messages per second, over a minute.", lambda s: s.health.per_second
        ),
        Family(
            "marshal_group_oldest_message_seconds",
            "Age of the oldest unfinished message.",
            lambda s: _worst([s.health.oldest_s], s.health.lag),
        ),
        Family(
            "marshal_group_retention_left_seconds",
            "Seconds until Kafka may delete an unfinished message; 0 if it has.",
            lambda s: s.health.retention_s,
        ),
        Family(
            "marshal_group_retention_used_ratio",
            "Part of the retention that an unfinished message has lived; 1 if Kafka may have deleted one.",
            _retention_used,
        ),
        Family("marshal_group_paused", "1 while the group is paused.", lambda s: int(s.health.pause is not None)),
        Family(
            "marshal_group_pause_left_seconds",
            "Seconds that the pause may still last.",
            lambda s: s.health.pause and s.health.pause.left_s,
        ),
        Family(
            "marshal_group_redelivered",
            "Further deliveries of messages at positions.",
            lambda s: s.tally.redelivered,
            "counter",
        ),
        Family("marshal_group_dead_letters", "Messages given up.", lambda s: s.health.dead_letters, "counter"),
        Family(
            "marshal_group_advisories", "Advisories at which somebody should look, by kind.", _advisories, "counter"
        ),
        Family(
            "marshal_group_deaths",
            "Sessions that a witness, silence or an error of the program ended.",
            lambda s: _by("kind", {kind: s.tally.deaths[kind] for kind in DEATHS}),
            "counter",
        ),
        Family(
            "marshal_group_failover_seconds", "How long nobody worked on a partition that moved.", _gaps, "histogram"
        ),
    ),
    (
        Family("marshal_topic_lag", "Messages behind the ends.", TopicRows.lag),
        Family(
            "marshal_topic_partitions_without_owner",
            "Partitions that nobody owns.",
            lambda t: sum(r.owner is None for r in t.rows),
        ),
        Family(
            "marshal_topic_oldest_message_seconds",
            "Age of the oldest unfinished message.",
            lambda t: _worst([row.oldest_s for row in t.rows], t.lag()),
        ),
    ),
    (
        Family("marshal_partition_position", "Next offset to finish.", lambda row: row.position),
        Family("marshal_partition_end", "Offset behind the last message.", lambda row: row.end),
        Family("marshal_partition_lag", "Messages behind the end.", lambda row: row.lag),
        Family("marshal_partition_owner", "1, with the owner's client id; 0 without an owner.", _owner),
        Family("marshal_partition_parked", "1 while nobody may own it.", lambda row: int(row.parked is not None)),
        Family(
            "marshal_partition_oldest_message_seconds",
            "Age of the oldest unfinished message.",
            lambda row: _worst([row.oldest_s], row.lag),
        ),
    ),
)
KAFKA_EXPORTER: Final = Dialect(
    ("consumergroup", "topic", "partition"),
    (Family("kafka_consumergroup_members", "Amount of members in a consumer group", lambda s: s.health.sessions),),
    (
        Family(
            "kafka_consumergroup_current_offset_sum",
            "Current Offset of a ConsumerGroup at Topic for all partitions",
            lambda t: sum(row.position or 0 for row in t.rows),
        ),
        Family(
            "kafka_consumergroup_lag_sum",
            "Current Approximate Lag of a ConsumerGroup at Topic for all partitions",
            TopicRows.lag,
        ),
    ),
    (
        Family(
            "kafka_consumergroup_current_offset",
            "Current Offset of a ConsumerGroup at Topic/Partition",
            lambda row: -1 if row.position is None else row.position,
        ),
        Family(
            "kafka_consumergroup_lag",
            "Current Approximate Lag of a ConsumerGroup at Topic/Partition",
            lambda row: -1 if row.lag is None else row.lag,
        ),
    ),
    (
        Family(
            "kafka_topic_partition_current_offset", "Current Offset of a Broker at Topic/Partition", lambda row: row.end
        ),
    ),
)
SIMPLE: Final = 'is_simple_consumer="false"'
KAFKA_LAG_EXPORTER: Final = Dialect(
    ("group", "topic", "partition"),
    (
        Family("kafka_consumergroup_group_sum_lag", "Sum of group offset lag", lambda s: s.health.lag),
        Family(
            "kafka_consumergroup_group_max_lag",
            "Max group offset lag",
            lambda s: [
                ("", SIMPLE, max((row.lag for row in s.health.partitions if row.lag is not None), default=None))
            ],
        ),
        Family(
            "kafka_consumergroup_group_max_lag_seconds",
            "Max group time lag",
            lambda s: [("", SIMPLE, _worst([s.health.oldest_s], s.health.lag))],
        ),
    ),
    (
        Family(
            "kafka_consumergroup_group_topic_sum_lag", "Sum of group offset lag across topic partitions", TopicRows.lag
        ),
    ),
    (
        Family(
            "kafka_consumergroup_group_offset", "Last group consumed offset of a partition", lambda row: row.position
        ),
        Family("kafka_consumergroup_group_lag", "Group offset lag of a partition", lambda row: row.lag),
        Family(
            "kafka_consumergroup_group_lag_seconds",
            "Group time lag of a partition",
            lambda row: _worst([row.oldest_s], row.lag),
        ),
    ),
    (Family("kafka_partition_latest_offset", "Latest offset of a partition", lambda row: row.end),),
    cluster="cluster_name",
    owner=True,
)
KMINION: Final = Dialect(
    ("group_id", "topic_name", "partition_id"),
    (
        Family(
            "kminion_kafka_consumer_group_members",
            "Number of members in the consumer group",
            lambda s: s.health.sessions,
        ),
        Family(
            "kminion_kafka_consumer_group_empty_members",
            "Number of members in the consumer group with no partition assigned",
            lambda s: sum(not one.claims for one in s.members),
        ),
    ),
    (
        Family(
            "kminion_kafka_consumer_group_topic_assigned_partitions",
            "Number of partitions assigned in the consumer group for a given topic",
            lambda t: sum(row.owner is not None for row in t.rows),
        ),
        Family(
            "kminion_kafka_consumer_group_topic_offset_sum",
            "The sum of all committed group offsets across all partitions in a topic",
            lambda t: sum(row.position or 0 for row in t.rows),
        ),
        Family(
            "kminion_kafka_consumer_group_topic_lag", "Messages behind across all partitions in a topic", TopicRows.lag
        ),
    ),
    (
        Family(
            "kminion_kafka_consumer_group_topic_partition_lag",
            "The number of messages a consumer group is lagging behind the latest offset of a partition",
            lambda row: row.lag,
        ),
    ),
    (Family("kminion_kafka_topic_partition_high_water_mark", "Partition High Water Mark", lambda row: row.end),),
)
DIALECTS: Final = {
    "marshal": OWN,
    "kafka-exporter": KAFKA_EXPORTER,
    "kafka-lag-exporter": KAFKA_LAG_EXPORTER,
    "kminion": KMINION,
}


def page(
    groups: Iterable[Shown], names: str = "marshal", granularity: str = "partition", cluster: str = ""
) -> Iterator[bytes]:
    """Yields the text in parts, which together may have megabytes. `names`: of DIALECTS; `granularity`: group, topic or
    partition; `cluster`: for dialects that name it."""
    dialect = DIALECTS[names]
    of_group, of_topic, of_partition = dialect.labels
    prefix = f'{dialect.cluster}="{escaped(cluster)}",' if dialect.cluster else ""
    whole: list[tuple[str, Any]] = []
    topics: list[tuple[str, Any]] = []
    partitions: list[tuple[str, Any]] = []
    ends: dict[str, Any] = {}
    for shown in groups:
        group = f'{prefix}{of_group}="{escaped(shown.health.group)}"'
        whole.append((group, shown))
        for each in _topics(shown.health) if granularity != "group" else ():
            named = f'{of_topic}="{escaped(each.topic)}"'
            topics.append((f"{group},{named}", each))
            for row in each.rows if granularity == "partition" else ():
                place = f'{named},{of_partition}="{row.partition}"'
                partitions.append((f"{group},{place}{_owner_labels(row) if dialect.owner else ''}", row))
                ends[prefix + place] = row
    levels = (
        (dialect.groups, whole),
        (dialect.topics, topics),
        (dialect.partitions, partitions),
        (dialect.ends, ends.items()),
    )
    yield from (lines_of(family, subjects) for families, subjects in levels for family in families)


def lines_of(family: Family, subjects: Iterable[tuple[str, Any]]) -> bytes:
    """Returns the lines of one metric; none if nothing of it is known. `subjects`: with their labels."""
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    lines = []
    for labels, subject in subjects:
        found = family.value(subject)
        if isinstance(found, int | float):
            named = f"{{{labels}}}" if labels else ""
            lines.append(f"{name}{named} {found if isinstance(found, int) else round(found, 3)}\n")
        elif found is not None:
            for suffix, more, value in found:
                if value is not None:
                    figure = value if isinstance(value, int) else round(value, 3)
                    lines.append(f"{name}{suffix}{{{labels}{',' if more else ''}{more}}} {figure}\n")
    head = f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n" if lines else ""
    return (head + "".join(lines)).encode()


def _topics(health: GroupHealth) -> Iterator[TopicRows]:
    by_topic: dict[str, list[PartitionHealth]] = {}
    for row in health.partitions:
        by_topic.setdefault(row.topic, []).append(row)
    yield from (TopicRows(topic, rows) for topic, rows in by_topic.items())


def _owner_labels(row: PartitionHealth) -> str:
    session = "" if row.session is None else row.session
    return f',member_host="",consumer_id="{session}",client_id="{escaped(row.owner or "")}"'


def for_scaler(health: GroupHealth, tally: Tally, now_ms: int) -> dict[str, Any]:
    """Returns the figures by which an autoscaler may choose how many consumers a group has: `lag` and `oldest_s` of the
    partitions that more consumers would help. Those that are parked are left out, and those that moved just now while
    consumers were there, because their lag comes from the last change of the scale. `partitions`: how many have lag;
    more consumers than that are idle."""
    open_to_all = [row for row in health.partitions if row.parked is None]
    since_ms = now_ms - SETTLED_MS if health.sessions else now_ms
    settled = [row for row in open_to_all if tally.moved_ms.get((row.topic, row.partition), 0) <= since_ms]
    found = settled or open_to_all  # a group that has just begun has no others
    lags = [row.lag for row in found if row.lag is not None]
    readable = "opaque" not in health.causes  # else positions are those before a newer library's first record
    lag = sum(lags) if readable and (lags or not found) else None
    return {
        "group": health.group,
        "lag": lag,
        "oldest_s": _worst([row.oldest_s for row in found], lag),
        "partitions": sum(lag > 0 for lag in lags),
        "unknown": len(found) - len(lags),
        "parked": health.parked,
        "moving": len(open_to_all) - len(settled),
        "sessions": health.sessions,
        "paused": health.pause is not None,
    }
