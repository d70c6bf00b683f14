"""The one grammar for a place in topics: where a group begins, where `set-position` moves it, what a backfill reads.

    earliest | latest | latest-25 | 1200 | 2025-01-31T12:00:00Z | 2h ago | 2h-ago | -2h
    committed | committed|earliest | committed:blue | committed:blue|latest
    positions.csv, or its lines as text: topic,partition,offset
    {"orders": {"0": 23, "1": -2, "2": "2025-01-31T12:00:00Z"}}

A number is an offset, as text or as an int. A time means the first message that is not older, or the end if there is
none; without a zone it is UTC, as in Kafka's own tools. `committed` means Kafka's committed offsets of the group, or of
another one that is named; what follows `|` is for partitions that have none. A table has the lines of
`kafka-consumer-groups --reset-offsets --export` (for `set-position` also with the group first, as exported for
several), or the form of Spark's `startingOffsets`: there -1 is the end, -2 the beginning, and a text any of the words
above.
"""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from marshal_py.errors import InvalidOption, PositionOutOfRange
from marshal_py.protocol.member.member_state import Wanted
from marshal_py.protocol.wire.identity import NONE, TopicPartition, consumes
from marshal_py.protocol.wire.records import OFFSET_MAX
from marshal_py.topics.request import epoch_ms
from marshal_py.transport.ports import Bounds, ClusterAdmin

COMMITTED: Final = "committed"
EARLIEST: Final = "earliest"
LATEST: Final = "latest"
OFFSET: Final = "offset"
TIME: Final = "time"
AGO: Final = "ago"

FIXED_RULE: Final = (  # for a text that must mean the same for every group
    'earliest, latest, latest-N, an offset, an ISO-8601 time, "2h ago", a .csv file of topic,partition,offset, or JSON '
    'as {"topic": {"0": 23, "1": -2}}'
)
RULE: Final = f"{FIXED_RULE}, or committed, committed:GROUP, either with |earliest or |latest"
_ENDS: Final = {-1: LATEST, -2: EARLIEST}
_LATEST_MINUS: Final = re.compile(r"latest-(\d{1,18})")
_DIGITS: Final = re.compile(r"\d{1,19}")
_AGO: Final = re.compile(r"(-)?(\d{1,9}(?:\.\d{1,3})?) ?([smhd])(?(1)|[ -]ago)")
_CLOCK: Final = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?Z?")
_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class Point(NamedTuple):
    """One place in a partition. `kind`: committed, earliest, latest, offset, time or ago. `number`: offset, N of
    latest-N, ms since 1970, or ms ago. `group`: whose committed, "": its own. `otherwise`: earliest, latest, or "" if
    not said."""

    kind: str
    number: int = 0
    group: str = ""
    otherwise: str = ""


class Where(NamedTuple):
    """A parsed text. `named`: the partitions that it names. `rest`: all others; None if it must name all."""

    rest: Point | None
    named: Mapping[TopicPartition, Point]


def parse(text: object, option: str = "start", rule: str = RULE, group: str = "") -> Where:
    """Parses one of the forms. Raises InvalidOption with `option` and the `rule` it must obey. `group`: whose lines may
    be in a table."""
    if isinstance(text, datetime):
        raise InvalidOption(option, text, f"write the time as text, in ISO-8601: {text.isoformat()!r}")
    if type(text) is int and text >= 0:
        text = str(text)
    if not isinstance(text, str):
        raise InvalidOption(option, text, rule)
    if _CLOCK.fullmatch(text):  # it would mean another message tomorrow
        last = datetime.fromtimestamp(moment_of(text, time.time_ns() // 1_000_000) // 1_000, UTC)
        raise InvalidOption(option, text, f"a time of day needs its date; the last one of UTC is {last:%Y-%m-%dT%XZ}")
    if text.endswith(".csv"):
        return Where(None, _table(read(text, option), option, group, text))
    try:
        if text.lstrip().startswith("{"):
            return Where(None, _json(text, option))
        if "," in text:
            return Where(None, _table(text, option, group, text))
        return Where(_point(text), {})
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidOption(option, text, rule) from error


def read(text: str, option: str = "start") -> str:
    """Returns the content of a .csv file, which means the same from then on; another text as it is. Raises
    InvalidOption."""
    if not text.endswith(".csv"):
        return text
    try:
        return Path(text).read_text(encoding="utf-8-sig")  # spreadsheets begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(option, text, f"a file that can be read ({error})") from error


def _point(text: str) -> Point:
    if text.startswith(COMMITTED):
        return _committed(text)
    if text in (EARLIEST, LATEST):
        return Point(text)
    if found := _LATEST_MINUS.fullmatch(text):
        return Point(LATEST, int(found[1]))
    if _DIGITS.fullmatch(text):
        if int(text) > OFFSET_MAX:
            raise ValueError(text)
        return Point(OFFSET, int(text))
    if found := _AGO.fullmatch(text):
        return Point(AGO, _ago_ms(found))
    return Point(TIME, epoch_ms(text))


def _ago_ms(found: re.Match[str]) -> int:
    return round(float(found[2]) * _UNITS_MS[found[3]])


def _committed(text: str) -> Point:
    otherwise = next((one for one in (EARLIEST, LATEST) if text.endswith(f"|{one}")), "")
    word, colon, group = (text.removesuffix(f"|{otherwise}") if otherwise else text).partition(":")
    if word != COMMITTED or bool(colon) != bool(group):
        raise ValueError(text)
    return Point(COMMITTED, 0, group, otherwise)


def _json(text: str, option: str) -> dict[TopicPartition, Point]:
    named = {
        TopicPartition(topic, int(number)): _named(value)
        for topic, partitions in json.loads(text).items()
        for number, value in partitions.items()
    }
    if not named or min(tp.partition for tp in named) < 0:
        raise InvalidOption(option, text, "it must name partitions by their numbers, from 0 on")
    return named


def _named(value: Any) -> Point:
    if isinstance(value, str):
        return _point(value)
    if type(value) is not int or not -2 <= value <= OFFSET_MAX:
        raise ValueError(value)
    return Point(_ENDS[value]) if value < 0 else Point(OFFSET, value)


def _table(text: str, option: str, group: str, name: str) -> dict[TopicPartition, Point]:
    """Returns what a CSV text names. Raises InvalidOption with the line that is wrong. `name`: of the file, or the
    text."""
    rows: dict[TopicPartition, Point] = {}
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (number == 1 and _is_heading(cells)):
            continue
        if len(cells) == 4 and cells[0] == group:
            cells = cells[1:]
        if len(cells) != 3 or not _DIGITS.fullmatch(cells[1]) or not _DIGITS.fullmatch(cells[2]):
            raise InvalidOption(option, ",".join(row), f"line {number} must read topic,partition,offset")
        if int(cells[2]) > OFFSET_MAX:
            raise InvalidOption(option, ",".join(row), f"line {number} must name an offset of at most {OFFSET_MAX}")
        tp = TopicPartition(cells[0], int(cells[1]))
        if tp in rows:
            raise InvalidOption(option, ",".join(row), f"line {number} names {tp} a second time")
        rows[tp] = Point(OFFSET, int(cells[2]))
    if not rows:
        raise InvalidOption(option, name, "the table names no partition: its lines are topic,partition,offset")
    return dict(sorted(rows.items()))


def _is_heading(cells: Sequence[str]) -> bool:
    """Returns whether the first line names columns. A topic may be named `topic`: its line has a partition's number."""
    return "topic" in map(str.lower, cells) and not any(map(_DIGITS.fullmatch, cells[-2:-1]))


def print_table(positions: Mapping[TopicPartition, int]) -> str:
    """Returns the content of a CSV file that `parse` reads."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows((*tp, positions[tp]) for tp in sorted(positions))
    return out.getvalue()


def check_topics(start: str | int, topics: Sequence[str]) -> None:
    """Checks the topics that `start` names: raises InvalidOption if the consumer does not read one of them."""
    others = sorted(topic for topic in {tp.topic for tp in parse(start).named} if not consumes(tuple(topics), topic))
    if others:
        raise InvalidOption("start", start, f"{others[0]} is none of the consumer's topics ({', '.join(topics)})")


def check_partitions(start: str | int, counts: Mapping[str, int], option: str = "start") -> None:
    """Raises InvalidOption if `start` names a partition beyond `counts`; topics left out are not checked."""
    for tp in sorted(parse(start, option).named):
        count = counts.get(tp.topic)
        if count is not None and tp.partition >= count:
            rule = f"{tp} does not exist: topic {tp.topic!r} has the partitions 0 to {count - 1}; leave it out"
            raise InvalidOption(option, start, rule)


class Facts(NamedTuple):
    """What Kafka says of each partition: bounds, and where needed committed offset and offset of its time."""

    bounds: Mapping[TopicPartition, Bounds]
    committed: Mapping[TopicPartition, int]
    at_time: Mapping[TopicPartition, int]


def committed_at(points: Mapping[TopicPartition, Point], group: str, admin: ClusterAdmin) -> dict[TopicPartition, int]:
    """Returns the committed offsets that these points mean. `group`: the group that asks."""
    found: dict[TopicPartition, int] = {}
    asked = {tp: point.group or group for tp, point in points.items() if point.kind == COMMITTED}
    for one in sorted(set(asked.values())):
        found |= admin.committed(one, [tp for tp in points if asked.get(tp) == one])
    return found


def at_times(points: Mapping[TopicPartition, Point], admin: ClusterAdmin, now_ms: int) -> dict[TopicPartition, int]:
    """Returns the offsets at the times that these points mean. `now_ms`: the time now, in ms since 1970."""
    found: dict[TopicPartition, int] = {}
    moments = {tp: moment for tp, point in points.items() if (moment := moment_ms(point, now_ms)) is not None}
    for one in sorted(set(moments.values())):
        found |= admin.offsets_at([tp for tp in points if moments.get(tp) == one], one)
    return found


def moment_of(text: str, now_ms: int) -> int:
    """Returns the time at which an operator looks, in ms since 1970: as ISO-8601, "2h ago", -2h, or 14:05, which is the
    last one of UTC. Where messages begin, a time needs its date (`parse`). Raises ValueError."""
    if found := _CLOCK.fullmatch(text):
        of_day_ms = 1_000 * (3_600 * int(found[1]) + 60 * int(found[2]) + int(found[3] or 0))
        return now_ms - (now_ms - of_day_ms) % _UNITS_MS["d"]
    found = _AGO.fullmatch(text)
    return epoch_ms(text) if found is None else max(0, now_ms - _ago_ms(found))


def moment_ms(point: Point, now_ms: int) -> int | None:
    """Returns the time that a point means, in ms since 1970; None if it means no time."""
    if point.kind == AGO:
        return max(0, now_ms - point.number)
    return point.number if point.kind == TIME else None


def offset(tp: TopicPartition, point: Point, facts: Facts) -> int | None:
    """Returns the offset that a point means; None if it means a committed offset, and there is none."""
    bounds = facts.bounds[tp]
    match point.kind:
        case "offset":
            return point.number
        case "time" | "ago":
            return max(bounds.first, facts.at_time.get(tp, bounds.end))
        case "committed":
            if tp in facts.committed or not point.otherwise:
                return facts.committed.get(tp)
    first = EARLIEST in (point.kind, point.otherwise)
    return bounds.first if first else max(bounds.first, bounds.end - point.number)


class Begin(NamedTuple):
    """Where reading begins, NONE if only the end is wanted, and the end. `unsaid`: at the end, as nothing is committed
    and `start` says no more."""

    first: int
    end: int
    unsaid: bool = False


def resolve(
    start: str | int, wanted: Sequence[Wanted], group: str, admin: ClusterAdmin, now_ms: int
) -> dict[TopicPartition, Begin]:
    """Returns where reading begins in each partition of `wanted` (D5). `now_ms` since 1970. Without a committed offset
    at the end, as Kafka's consumers. Offsets below the beginning stay, and are reported as lost (D6). Raises
    InvalidOption, PositionOutOfRange, UnsupportedPlatform, ClusterUnreachable, AccessDenied."""
    chosen = parse(start)
    # Topics that a pattern has found later: they were not known at the Join.
    later = {tp.topic for tp in chosen.named}.intersection(want.tp.topic for want in wanted)
    check_partitions(start, {topic: count for topic in sorted(later) if (count := admin.partition_count(topic))})
    points = {want.tp: _of(want, chosen, start) for want in wanted if not want.end_only}
    bounds = admin.bounds(list(dict.fromkeys(want.tp for want in wanted)))
    facts = Facts(bounds, committed_at(points, group, admin), at_times(points, admin, now_ms))
    _check_groups(start, points, facts.committed, admin)
    begins = {tp: Begin(NONE, bound.end) for tp, bound in bounds.items()}
    for tp, point in points.items():
        found, end = offset(tp, point, facts), bounds[tp].end
        if point.kind == OFFSET and point.number > end:
            raise PositionOutOfRange(*tp, point.number, *bounds[tp])
        begins[tp] = Begin(end if found is None else found, end, found is None and end > bounds[tp].first)
    return begins


def _check_groups(
    start: str | int, points: Mapping[TopicPartition, Point], committed: Collection[TopicPartition], admin: ClusterAdmin
) -> None:
    """Raises InvalidOption if a group that `start` names has committed nothing in the topics: its name is wrong."""
    asked = {tp: point.group for tp, point in points.items() if point.group and not point.otherwise}
    for name in sorted(set(asked.values()) - {asked.get(tp) for tp in committed}):
        topics = sorted({tp.topic for tp, group in asked.items() if group == name})
        tps = [TopicPartition(one, number) for one in topics for number in range(admin.partition_count(one) or 0)]
        if tps and not admin.committed(name, tps):
            rule = f"Kafka has no committed offset of group {name!r} in {', '.join(topics)}: correct its name"
            raise InvalidOption("start", start, f"{rule}, or say what then: {COMMITTED}:{name}|{EARLIEST}")


def parse_fixed(text: object, option: str) -> Where:
    """Parses a text that means the same for every group, and so is not `committed`. Raises InvalidOption."""
    chosen = parse(text, option, FIXED_RULE)
    if any(point.kind == COMMITTED for point in (*chosen.named.values(), *filter(None, (chosen.rest,)))):
        raise InvalidOption(option, text, "committed offsets are those of a group: name a time, offsets or an end")
    return chosen


def offsets(
    text: str, option: str, tps: Sequence[TopicPartition], admin: ClusterAdmin, *, committed: bool
) -> dict[TopicPartition, int]:
    """Returns the offset of the text, not `committed`, in each of `tps`. `option`: for errors. `committed`: partitions
    end before open transactions. Raises as `resolve`."""
    chosen = parse_fixed(text, option)
    counts = {topic: admin.partition_count(topic) or 0 for topic in sorted({tp.topic for tp in chosen.named})}
    check_partitions(text, {topic: count for topic, count in counts.items() if count}, option)
    points = points_of(chosen, tps, option, text)
    facts = Facts(admin.bounds(tps, committed=committed), {}, at_times(points, admin, time.time_ns() // 1_000_000))
    found = {tp: at for tp, point in points.items() if (at := offset(tp, point, facts)) is not None}
    for tp, at in found.items():
        if at < facts.bounds[tp].first or (points[tp].kind == OFFSET and at > facts.bounds[tp].end):
            raise PositionOutOfRange(*tp, at, *facts.bounds[tp])
    return {tp: min(at, facts.bounds[tp].end) for tp, at in found.items()}


def points_of(chosen: Where, tps: Iterable[TopicPartition], option: str, text: object) -> dict[TopicPartition, Point]:
    """Returns the point of each partition. Raises InvalidOption for one that must be named and is not."""
    points: dict[TopicPartition, Point] = {}
    for tp in tps:
        point = chosen.named.get(tp, chosen.rest)
        if point is None:
            raise InvalidOption(option, text, f"it does not name {tp}: name every partition")
        points[tp] = point
    return points


def _of(want: Wanted, chosen: Where, text: str | int) -> Point:
    found = chosen.named.get(want.tp)
    if found is None:
        found = Point(EARLIEST) if want.earliest else chosen.rest
    if found is None:
        raise InvalidOption(
            "start",
            text,
            f"it does not name {want.tp}, for which the group has no position: name "
            "every partition, or move the group there first (marshal set-position)",
        )
    return found
