"""Turns a group's log into a page: lanes, spans, marks, lag over time, and every record. Pure; timeline.html draws it.

A lane is a partition. What happened comes from the rows of timeline.py, and a record's sentence from explain.py. Pages
are files that people mail and load nothing, so a record takes few bytes: sentences and fields that differ in their
numbers alone share a form, and a record names its form and has the numbers.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final, NamedTuple, TypeVar
from zlib import compress, crc32

import msgspec
from msgspec import Struct

from marshal_py.history.explain import as_dict, describe, is_probe, is_quiet
from marshal_py.history.lag import EndsAt, PositionSampler
from marshal_py.history.tables import GapRow, IntervalRow, LostRow, MoveRow, PauseRow, Row, SessionRow
from marshal_py.history.timeline import Timeline
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    ClaimingMessages,
    GroupConfig,
    Heartbeat,
    Note,
    ReleaseGroup,
    StepDown,
    Topology,
)

NOBODY: Final = -1  # the owner of a span in which nobody owns the partition
PAUSED: Final = -2  # the same, while the group is paused
THE_GROUP: Final = -1  # the lane of a mark that concerns the group
HUES: Final = 8  # of the page's palette; further clients get the same hues with another pattern
TABLES: Final = ("sessions", "intervals", "gaps", "pauses", "moves", "lost")
ROWS_HELD_MAX: Final = 4_096  # rows of all groups of the log between two looks at them

_NUMBER: Final = re.compile(r"(?<![\w.-])(?:0|[1-9]\d{0,14})(?![\w.])")  # JSON gives these back as they were
_FREQUENT: Final = (Heartbeat, ClaimingMessages)  # of their lists only the lengths are kept: positions are drawn
_TICKS: Final = (StepDown, GroupConfig, Topology, ReleaseGroup, Note)  # marked, and in no table with marks
_DEFAULTS: Final[tuple[Any, ...]] = ("", [], None, NONE)  # fields with these values say nothing
_ENDS: Final = {"leave": "leave", "evict": "evict"}  # the marks of how a session ended; "end" for another way

_R = TypeVar("_R", SessionRow, IntervalRow, GapRow, PauseRow)


class Owner(NamedTuple):
    """A session. `colour`: of its client. `sign_ms`: its last sign of life. Times are the picture's. None is unknown
    or, as `to_ms`, still alive."""

    client: str
    session: int
    member: str
    from_ms: int | None
    to_ms: int | None
    ended: str | None
    colour: int
    sign_ms: int | None


class Span(NamedTuple):
    """A lane from one time to another, None if that is unknown or did not come. `owner`: an index of the owners, NOBODY
    or PAUSED. `in_flight`: messages that are delivered again after it."""

    lane: int
    owner: int
    from_ms: int | None
    to_ms: int | None
    from_offset: int | None
    to_offset: int | None
    in_flight: int


class Mark(NamedTuple):
    """A moment of a lane, or of the group (THE_GROUP). `kind`: join, leave, evict, end, move, rewind, seek, lost,
    other, or what a caller adds (`finish`). `offset`: of its record; `text`: what that does not say."""

    lane: int
    kind: str
    ms: int
    offset: int | None
    text: str = ""


class Form(NamedTuple):
    """What records have in common. Between two pieces of a text stands a number of the record."""

    type: str
    verdict: str
    text: list[str]
    fields: list[str]


class Picture(Struct, kw_only=True, frozen=True):
    """What a page draws. Times are in ms after `from_ms`. `records`: offset and ms after the record before, the index
    of the form, its numbers. `clock`: "utc", or "run" for ms since a simulated run began. `lag_of`: whence the lag.
    `quiet`: when no consumer of the group gave a sign of life."""

    group: str
    clock: str
    from_ms: int
    to_ms: int
    lanes: list[str]
    owners: list[Owner]
    spans: list[Span]
    pauses: list[Span]
    quiet: list[Span]
    marks: list[Mark]
    moments: list[int]
    positions: list[list[int | None]]
    lags: list[list[int | None]]
    lag_of: str
    forms: list[Form]
    records: list[list[int]]


class PictureReader:
    """Folds a log onto `world`, and draws what one group did from `from_ms` to `to_ms`. The picture begins with the
    first record that is read of a log that knows the group, if that is later."""

    def __init__(self, world: World, group: str, from_ms: int, to_ms: int) -> None:
        self.group: str = group
        self._from_ms, self._to_ms = from_ms, max(from_ms, to_ms)
        self._timeline = Timeline(world, TABLES)
        self._sampler = PositionSampler(from_ms, to_ms)
        self._began = False
        self._rows: list[Row] = []
        self._forms: dict[tuple[Any, ...], int] = {}
        self._records: list[list[int]] = []
        self._last = (0, from_ms)
        self._ticks: list[tuple[TopicPartition | None, int, int]] = []  # partition, time, offset
        self._written_ms: int | None = None  # when the group's last record was written, while it has consumers
        self._quiet: list[tuple[int, int, int | None]] = []  # from, to, offset of the record after it

    def _known(self) -> Group | None:
        return self._timeline.world.groups.get(self.group)

    def read(self, offset: int, time_ms: int, value: bytes | None) -> None:
        """Folds a record. A later one than `to_ms` moves the picture's end."""
        self._to_ms = max(self._to_ms, time_ms)
        known = self._known()
        self._sampler.before(known, time_ms)
        verdict = self._timeline.read(offset, time_ms, value)
        if not self._began and (known is not None or verdict.group == self.group):
            self._began, self._from_ms = True, max(time_ms, self._from_ms)
            self._last = 0, self._from_ms
        if verdict.group == self.group and not is_probe(verdict):
            self._note_quiet(time_ms, offset)
        if verdict.group == self.group and time_ms >= self._from_ms:
            self._keep(verdict, time_ms)
        if self._timeline.pending >= ROWS_HELD_MAX:
            self._collect(self._timeline.take())

    def _note_quiet(self, time_ms: int, offset: int | None) -> None:
        group = self._known()
        if self._written_ms is not None and is_quiet(group, time_ms - self._written_ms):
            self._quiet.append((self._written_ms, time_ms, offset))
        self._written_ms = max(time_ms, self._written_ms or 0) if group is not None and group.sessions else None

    def _keep(self, verdict: Verdict, time_ms: int) -> None:
        record = verdict.record
        text, numbers = _parts(describe(verdict))
        fields, more = _parts(json.dumps(_fields(verdict), ensure_ascii=False, separators=(",", ":")))
        kind = "?" if record is None else type(record).__name__
        outcome = verdict.outcome.name.lower() if verdict.outcome else ""
        form = self._forms.setdefault((kind, outcome, text, fields), len(self._forms))
        self._records.append([verdict.offset - self._last[0], time_ms - self._last[1], form, *numbers, *more])
        self._last = verdict.offset, time_ms
        if isinstance(record, _TICKS) and verdict.accepted and not is_probe(verdict):
            tp = TopicPartition(record.topic, record.partition) if isinstance(record, Note) and record.topic else None
            self._ticks.append((tp, time_ms, verdict.offset))

    def _collect(self, tables: Mapping[str, Iterable[Row]]) -> None:
        self._rows += [row for rows in tables.values() for row in rows if row.group == self.group]

    def finish(self, ends_at: EndsAt | None = None, clock: str = "utc", marks: Iterable[Mark] = ()) -> Picture:
        """Returns the picture. `ends_at`: looks up the ends of data partitions. `marks`: of the group, to add, with
        times like those of records."""
        self._collect(self._timeline.finish())
        self._note_quiet(self._to_ms, None)
        series = self._sampler.series(self._known(), ends_at)
        left_out = sum(moment < self._from_ms for moment in series.moments)
        sessions, intervals = self._seen(SessionRow), self._seen(IntervalRow)
        gaps, pauses = self._seen(GapRow), self._seen(PauseRow)
        lanes = sorted({*map(_tp, intervals), *map(_tp, gaps)})
        places = {tp: number for number, tp in enumerate(lanes)}
        colours = colours_of(row.client for row in sessions)
        numbers = {row.session: number for number, row in enumerate(sessions)}
        owned = [
            self._span(places[_tp(row)], numbers[row.session], row, row.epoch, row.in_flight)
            for row in intervals
            if row.session in numbers
        ]
        free = [span for row in gaps for span in self._free(places[_tp(row)], row, pauses)]
        unknown: list[int | None] = [None] * len(series.moments)
        added = [mark._replace(ms=mark.ms - self._from_ms) for mark in marks]
        return Picture(
            group=self.group,
            clock=clock,
            from_ms=self._from_ms,
            to_ms=self._to_ms - self._from_ms,
            lanes=[_name(tp) for tp in lanes],
            owners=[self._owner(row, colours[row.client]) for row in sessions],
            spans=sorted([*owned, *free], key=lambda span: (span.lane, _begin(span))),
            pauses=[self._span(THE_GROUP, PAUSED, row, row.from_offset) for row in pauses],
            quiet=[
                Span(THE_GROUP, NOBODY, begin - self._from_ms, end - self._from_ms, None, offset, 0)
                for begin, end, offset in self._quiet
                if end > self._from_ms
            ],
            marks=sorted([*self._marks(sessions, intervals, places), *added], key=lambda mark: mark.ms),
            moments=[moment - self._from_ms for moment in series.moments[left_out:]],
            positions=[series.positions.get(tp, unknown)[left_out:] for tp in lanes],
            lags=[series.lags.get(tp, unknown)[left_out:] for tp in lanes],
            lag_of=series.lag_of,
            forms=[Form(kind, verdict, [*text], [*fields]) for kind, verdict, text, fields in self._forms],
            records=self._records,
        )

    def _seen(self, kind: type[_R]) -> list[_R]:
        """Returns the rows of a table that reach into the picture."""
        rows = [row for row in self._rows if isinstance(row, kind)]
        return [row for row in rows if row.to_time_ms is None or row.to_time_ms >= self._from_ms]

    def _at(self, time_ms: int | None) -> int | None:
        return None if time_ms is None else time_ms - self._from_ms

    def _owner(self, row: SessionRow, colour: int) -> Owner:
        from_ms, to_ms = self._at(row.from_time_ms), self._at(row.to_time_ms)
        sign_ms = self._at(row.last_sign_time_ms)
        return Owner(row.client, row.session, row.member, from_ms, to_ms, row.ended, colour, sign_ms)

    def _span(
        self, lane: int, owner: int, row: IntervalRow | GapRow | PauseRow, from_offset: int | None, in_flight: int = 0
    ) -> Span:
        at = self._at
        return Span(lane, owner, at(row.from_time_ms), at(row.to_time_ms), from_offset, row.to_offset, in_flight)

    def _free(self, lane: int, row: GapRow, pauses: Iterable[PauseRow]) -> Iterator[Span]:
        """Yields the parts of a span without an owner, those in a pause as PAUSED: there nobody may own the
        partition."""
        left = self._span(lane, NOBODY, row, row.from_offset)
        for pause in (self._span(lane, PAUSED, each, each.from_offset) for each in pauses):
            if _end(pause) <= _begin(left) or _end(left) <= _begin(pause):
                continue
            if _begin(left) < _begin(pause):
                yield left._replace(to_ms=pause.from_ms, to_offset=pause.from_offset)
            first, last = max(left, pause, key=_begin), min(left, pause, key=_end)
            yield pause._replace(from_ms=first.from_ms, to_ms=last.to_ms, to_offset=last.to_offset)
            if last is left:
                return
            left = left._replace(from_ms=pause.to_ms, from_offset=pause.to_offset)
        yield left

    def _marks(
        self, sessions: Iterable[SessionRow], intervals: Iterable[IntervalRow], places: Mapping[TopicPartition, int]
    ) -> Iterator[Mark]:
        """Yields the marks of the picture's time."""
        found: list[tuple[TopicPartition | None, str, int | None, int | None, str]] = []
        found += [(None, "join", row.from_time_ms, row.session, "") for row in sessions]
        found += [(None, _ENDS.get(row.ended or "", "end"), row.to_time_ms, row.to_offset, "") for row in sessions]
        found += [(_tp(row), "seek", row.to_time_ms, row.to_offset, "") for row in intervals if row.ended == "seek"]
        for row in self._rows:
            if isinstance(row, MoveRow):
                back = row.from_position is not None and row.to_position < row.from_position
                text = f"{_name(_tp(row))}: {_number(row.from_position)} -> {row.to_position}"
                found.append((_tp(row), "rewind" if back else "move", row.time_ms, row.offset, text))
            elif isinstance(row, LostRow):
                text = f"{_name(_tp(row))}: {row.from_position} to {row.to_position - 1}, {row.cause}"
                found.append((_tp(row), "lost", row.time_ms, row.offset, text))
        found += [(tp, "other", time_ms, offset, "") for tp, time_ms, offset in self._ticks]
        for tp, kind, time_ms, offset, text in found:
            if time_ms is not None and time_ms >= self._from_ms:
                lane = THE_GROUP if tp is None else places.get(tp, THE_GROUP)
                yield Mark(lane, kind, time_ms - self._from_ms, offset, text)


def colours_of(clients: Iterable[str]) -> dict[str, int]:
    """Returns a colour per client: the same in every picture, unless another client there has it already. Colour N is
    hue N modulo HUES, with pattern N divided by HUES."""
    found: dict[str, int] = {}
    taken: set[int] = set()
    for client in clients:
        if client not in found:
            hue, pattern = crc32(client.encode()), len(found) // HUES
            wanted = (pattern * HUES + (hue + step) % HUES for step in range(HUES))
            found[client] = next(colour for colour in wanted if colour not in taken)
            taken.add(found[client])
    return found


def _fields(verdict: Verdict) -> dict[str, Any]:
    """Returns the fields of a record that say something."""
    fields = as_dict(verdict)["fields"]
    if isinstance(verdict.record, _FREQUENT):
        fields = {name: len(value) if isinstance(value, list) else value for name, value in fields.items()}
    return {name: value for name, value in fields.items() if value not in _DEFAULTS}


def _parts(text: str) -> tuple[tuple[str, ...], list[int]]:
    """Splits a text at its numbers: the pieces around them, and the numbers."""
    return tuple(_NUMBER.split(text)), [int(number) for number in _NUMBER.findall(text)]


def _tp(row: IntervalRow | GapRow | MoveRow | LostRow) -> TopicPartition:
    return TopicPartition(row.topic, row.partition)


def _name(tp: TopicPartition) -> str:
    return f"{tp.topic}:{tp.partition}" if tp.partition >= 0 else tp.topic or "the pin"


def _number(position: int | None) -> str:
    return "none" if position is None else str(position)


def _begin(span: Span) -> float:
    return float("-inf") if span.from_ms is None else span.from_ms


def _end(span: Span) -> float:
    return float("inf") if span.to_ms is None else span.to_ms


TEMPLATE: Final = "timeline.html"


def page(title: str, pictures: Sequence[Picture], notes: Sequence[str] = ()) -> str:
    """Returns the page. `pictures`: of one group each, of which it shows one at a time. `notes`: paragraphs below."""
    data = b64encode(compress(msgspec.json.encode({"title": title, "notes": notes, "pictures": pictures}))).decode()
    before, between, after = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8").split("@@")
    return f"{before}{escape(title)}{between}{data}{after}"
