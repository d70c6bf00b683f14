"""Turns a text into the offsets at which a group begins to read partitions that have no position in the log (D5).

    committed | earliest | latest | 2025-01-31T12:00:00Z | 1738324800000
    {"orders": {"0": 23, "1": -2, "2": "2025-01-31T12:00:00Z"}}

A number alone is a time in ms since 1970. The JSON object has the form of Spark's `startingOffsets`: a number is an
offset, -1 the end, -2 the beginning, and a text is a time. It must name every partition that needs a start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from marshal_py.errors import InvalidOption, PositionOutOfRange
from marshal_py.protocol.member.member_state import Wanted
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import OFFSET_MAX
from marshal_py.protocol.wire.subscription import consumes
from marshal_py.topics.request import epoch_ms
from marshal_py.transport.ports import Bounds, ClusterAdmin

COMMITTED: Final = "committed"
EARLIEST: Final = "earliest"
LATEST: Final = "latest"
WORDS: Final = (COMMITTED, EARLIEST, LATEST)
OFFSET: Final = "offset"
TIME: Final = "time"

FIXED_RULE: Final = (  # for a text that must mean the same for every group
    'earliest, latest, an ISO-8601 time, ms since 1970 (12 digits or more), or JSON as {"topic": {"0": 23, '
    '"1": -2, "2": "2025-01-31T12:00:00Z"}}: an offset, -1 for the end, -2 for the beginning, or a time'
)
RULE: Final = f"{COMMITTED}, {FIXED_RULE}"
_ENDS: Final = {-1: LATEST, -2: EARLIEST}
_MS: Final = re.compile(r"\d{12,15}")  # from 1973 on; offsets rarely have that many digits


class Point(NamedTuple):
    """Says where to start.

    `kind`: a word of WORDS, OFFSET or TIME. `number`: the offset, or the time in ms since 1970.
    """

    kind: str
    number: int = 0


class Start(NamedTuple):
    """Holds a parsed text. `named`: where the partitions begin that the text names. `rest`: where all others begin.

    `rest` is None if the text must name every partition.
    """

    rest: Point | None
    named: Mapping[TopicPartition, Point]


def parse(text: object, option: str = "start", rule: str = RULE) -> Start:
    """Parses a text of one of the forms above. Raises InvalidOption.

    `option` and `rule` are for its error text: the name of the option that holds the text, and what the option may
    hold.
    """
    if not isinstance(text, str):
        raise InvalidOption(option, text, rule)
    try:
        if not text.lstrip().startswith("{"):
            return Start(_point(text), {})
        named = {
            TopicPartition(topic, int(number)): _named(value)
            for topic, partitions in json.loads(text).items()
            for number, value in partitions.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidOption(option, text, rule) from error
    if not named or min(tp.partition for tp in named) < 0:
        raise InvalidOption(option, text, "it must name partitions by their numbers, from 0 on")
    return Start(None, named)


def _point(text: str) -> Point:
    if text in WORDS:
        return Point(text)
    return Point(TIME, int(text) if _MS.fullmatch(text) else epoch_ms(text))


def _named(value: Any) -> Point:
    if isinstance(value, str):
        return Point(TIME, epoch_ms(value))
    if type(value) is not int or not -2 <= value <= OFFSET_MAX:
        raise ValueError(value)
    return Point(_ENDS[value]) if value < 0 else Point(OFFSET, value)


def check_topics(start: str, topics: Sequence[str]) -> None:
    """Checks the topics that `start` names: raises InvalidOption if the consumer does not read one of them."""
    others = sorted(topic for topic in {tp.topic for tp in parse(start).named} if not consumes(tuple(topics), topic))
    if others:
        raise InvalidOption("start", start, f"{others[0]} is none of the consumer's topics ({', '.join(topics)})")


def check_partitions(start: str, counts: Mapping[str, int], option: str = "start") -> None:
    """Raises InvalidOption if `start` names a partition that its topic does not have.

    `counts`: how many partitions each topic has. A topic that is left out is not known yet, and not checked.
    """
    for tp in sorted(parse(start, option).named):
        count = counts.get(tp.topic)
        if count is not None and tp.partition >= count:
            rule = f"{tp} does not exist: topic {tp.topic!r} has the partitions 0 to {count - 1}; leave it out"
            raise InvalidOption(option, start, rule)


def resolve(
    start: str, fallback: str, wanted: Sequence[Wanted], group: str, admin: ClusterAdmin
) -> dict[TopicPartition, Bounds]:
    """Returns where reading begins in each partition of `wanted` (D5), and where it ends. `first` is NONE if only the
    end is wanted.

    `start`: the text. `fallback`: "earliest" or "latest", where a partition without a committed offset begins if the
    text says `committed`.

    A named offset below the partition's beginning stays as it is: the offsets between are reported as lost (D6). Raises
    InvalidOption for a partition that must be named and is not, PositionOutOfRange for an offset beyond the end,
    UnsupportedPlatform for a time where the cluster cannot look it up; ClusterUnreachable, AccessDenied.
    """
    chosen = parse(start)
    # Topics that a pattern has found later: they were not known at the Join.
    later = {tp.topic for tp in chosen.named}.intersection(want.tp.topic for want in wanted)
    check_partitions(start, {topic: count for topic in sorted(later) if (count := admin.partition_count(topic))})
    points = {want.tp: _of(want, chosen, start) for want in wanted if not want.end_only}
    bounds = admin.bounds(list(dict.fromkeys(want.tp for want in wanted)))
    asked = [tp for tp, point in points.items() if point.kind == COMMITTED]
    committed = admin.committed(group, asked) if asked else {}
    at_time = _at_times(points, admin)
    found = {tp: _offset(tp, point, bounds[tp], committed, at_time, fallback) for tp, point in points.items()}
    return {tp: Bounds(found.get(tp, NONE), bound.end) for tp, bound in bounds.items()}


def parse_fixed(text: object, option: str) -> Start:
    """Parses a text that means the same for every group, and so is not `committed`. Raises InvalidOption."""
    chosen = parse(text, option, FIXED_RULE)
    if chosen.rest is not None and chosen.rest.kind == COMMITTED:
        raise InvalidOption(option, text, "committed offsets are those of a group: name a time, offsets or an end")
    return chosen


def offsets(
    text: str, option: str, tps: Sequence[TopicPartition], admin: ClusterAdmin, *, committed: bool
) -> dict[TopicPartition, int]:
    """Returns the offset that the text names in each partition of `tps`. The text may not be `committed`.

    `option`: the name of the option that holds the text, for errors. `committed`: if true, a partition ends where
    read_committed readers stop, before open transactions. Raises InvalidOption, also for a partition that must be named
    and is not; PositionOutOfRange for an offset that the partition does not hold; UnsupportedPlatform,
    ClusterUnreachable, AccessDenied.
    """
    chosen = parse_fixed(text, option)
    counts = {topic: admin.partition_count(topic) or 0 for topic in sorted({tp.topic for tp in chosen.named})}
    check_partitions(text, {topic: count for topic, count in counts.items() if count}, option)
    points: dict[TopicPartition, Point] = {}
    for tp in tps:
        point = chosen.named.get(tp, chosen.rest)
        if point is None:
            raise InvalidOption(option, text, f"it does not name {tp}: name every partition")
        points[tp] = point
    bounds, at_time = admin.bounds(tps, committed=committed), _at_times(points, admin)
    found = {tp: _offset(tp, point, bounds[tp], {}, at_time, LATEST) for tp, point in points.items()}
    for tp, offset in found.items():
        if offset < bounds[tp].first:
            raise PositionOutOfRange(*tp, offset, *bounds[tp])
    return {tp: min(offset, bounds[tp].end) for tp, offset in found.items()}


def _of(want: Wanted, chosen: Start, text: str) -> Point:
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


def _at_times(points: Mapping[TopicPartition, Point], admin: ClusterAdmin) -> dict[TopicPartition, int]:
    found: dict[TopicPartition, int] = {}
    for moment in sorted({point.number for point in points.values() if point.kind == TIME}):
        found |= admin.offsets_at([tp for tp, point in points.items() if point == Point(TIME, moment)], moment)
    return found


def _offset(
    tp: TopicPartition,
    point: Point,
    bounds: Bounds,
    committed: Mapping[TopicPartition, int],
    at_time: Mapping[TopicPartition, int],
    fallback: str,
) -> int:
    match point.kind:
        case "offset":
            if point.number > bounds.end:
                raise PositionOutOfRange(*tp, point.number, *bounds)
            return point.number
        case "time":  # no message since then: it begins at the end
            return max(bounds.first, at_time.get(tp, bounds.end))
        case "committed" if tp in committed:
            return committed[tp]
    word = fallback if point.kind == COMMITTED else point.kind
    return bounds.first if word == EARLIEST else bounds.end
