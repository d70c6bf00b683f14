"""Parses the target of a move of positions (the text of `--to`), and turns a target into offsets. Pure.

A target is `earliest | latest | latest-N | OFFSET | ISO-8601 time | committed | file.csv`, or a shift of the position
by N. The file has the lines of `kafka-consumer-groups --reset-offsets --export`: topic,partition,offset (with the group
first, if it was exported for several).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from marshal_py.client.values.start_positions import COMMITTED, EARLIEST, LATEST, OFFSET, TIME
from marshal_py.errors import InvalidOption, PositionOutOfRange
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import OFFSET_MAX
from marshal_py.topics.request import epoch_ms

SHIFT: Final = "shift"
TABLE: Final = "table"
WORDS: Final = "earliest, latest, latest-N, an offset, an ISO-8601 time, committed or a .csv file"

_LATEST_MINUS = re.compile(r"latest-(\d{1,18})")
_DIGITS = re.compile(r"\d{1,19}")


class Target(NamedTuple):
    """Holds what the caller gave as the target. `kind`: earliest, latest, offset, time, committed, shift or table.

    `number`: the offset, the N of latest-N or of a shift, or the time in ms since 1970. `table`: for a file, the offset
    of each partition.
    """

    kind: str
    number: int = 0
    table: tuple[tuple[TopicPartition, int], ...] = ()


def parse(text: str) -> Target:
    """Returns the target that the text of `--to` names; a file is parsed by `parse_table`. A time without a zone is
    UTC, as in Kafka's own tool.
    """
    if text in (EARLIEST, LATEST, COMMITTED):
        return Target(text)
    if found := _LATEST_MINUS.fullmatch(text):
        return Target(LATEST, int(found[1]))
    if _DIGITS.fullmatch(text) and int(text) <= OFFSET_MAX:
        return Target(OFFSET, int(text))
    try:
        return Target(TIME, epoch_ms(text))
    except ValueError as error:
        raise InvalidOption("to", text, WORDS) from error


def shift(by: int) -> Target:
    """Returns the target that is the position plus `by`, which may be negative."""
    return Target(SHIFT, by)


def target_of(to: str | int | Target | None, shift_by: int | None) -> Target:
    """Returns the target that a caller names in one of two ways. Raises InvalidOption if it names none or both."""
    if (to is None) == (shift_by is None):
        raise InvalidOption("to", to, "give either `to` or `shift_by`")
    if shift_by is not None:
        return shift(shift_by)
    if isinstance(to, Target):
        return to
    return parse(str(to))


def parse_table(text: str, group: str) -> Target:
    """Returns the target that a CSV file contains. Raises InvalidOption with the line that is wrong.

    `text`: the content of the file. `group`: the only group whose lines may be in it, if they name a group.
    """
    rows: dict[TopicPartition, int] = {}
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (number == 1 and "topic" in [cell.lower() for cell in cells]):
            continue  # empty, or a heading
        if len(cells) == 4 and cells[0] == group:
            cells = cells[1:]
        if len(cells) != 3 or not _DIGITS.fullmatch(cells[1]) or not _DIGITS.fullmatch(cells[2]):
            raise InvalidOption("to", ",".join(row), f"line {number} must read topic,partition,offset")
        tp = TopicPartition(cells[0], int(cells[1]))
        if tp in rows:
            raise InvalidOption("to", ",".join(row), f"line {number} names {tp} a second time")
        rows[tp] = int(cells[2])
    if not rows:
        raise InvalidOption("to", "the file", "it names no partition")
    return Target(TABLE, 0, tuple(sorted(rows.items())))


def print_table(positions: Mapping[TopicPartition, int]) -> str:
    """Returns the content of a CSV file that `parse_table` reads."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows((*tp, positions[tp]) for tp in sorted(positions))
    return out.getvalue()


class Facts(NamedTuple):
    """Holds what the log and Kafka say about each partition: its position, its first and its end offset, the group's
    committed offset, and the offset at the target's time. The last two may be empty if the target needs none.
    """

    positions: Mapping[TopicPartition, int]  # of the world; NONE where there is none
    first: Mapping[TopicPartition, int]
    end: Mapping[TopicPartition, int]
    committed: Mapping[TopicPartition, int]
    at_time: Mapping[TopicPartition, int]


def resolve(target: Target, tps: Iterable[TopicPartition], facts: Facts) -> dict[TopicPartition, int]:
    """Returns the offset that the target means in each partition. Raises PositionOutOfRange if a partition does not
    contain that offset, InvalidOption if a fact that the target needs is missing.
    """
    found = {tp: _resolve_one(target, tp, facts) for tp in tps}
    for tp, position in found.items():
        if not facts.first[tp] <= position <= facts.end[tp]:
            raise PositionOutOfRange(*tp, position, facts.first[tp], facts.end[tp])
    return found


def _resolve_one(target: Target, tp: TopicPartition, facts: Facts) -> int:
    match target.kind:
        case "earliest":
            return facts.first[tp]
        case "latest":
            # The last N of a partition that holds fewer are all that it holds.
            return max(facts.first[tp], facts.end[tp] - target.number)
        case "offset":
            return target.number
        case "time":
            return max(facts.first[tp], facts.at_time.get(tp, facts.end[tp]))
        case "committed":
            if tp not in facts.committed:
                raise InvalidOption("to", COMMITTED, f"Kafka has no committed offset of the group for {tp}")
            return facts.committed[tp]
        case "shift":
            if facts.positions.get(tp, NONE) == NONE:
                raise InvalidOption("shift_by", target.number, f"{tp} has no position yet")
            return facts.positions[tp] + target.number
    return dict(target.table)[tp]
