"""What `marshal top` shows of its rows, and what each key does. Pure: (screen, key, rows) -> (screen, order)."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeVar

from msgspec.structs import asdict
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from marshal_py.admin.views.diagnosis import LEVELS
from marshal_py.admin.views.group_info import GroupHealth, MemberInfo, PartitionHealth
from marshal_py.admin.views.health import zero_s
from marshal_py.cli.documents import time_of
from marshal_py.cli.output import printable
from marshal_py.cli.terminal import scrolled
from marshal_py.history.lag import WINDOW_MS
from marshal_py.protocol.wire.identity import TopicPartition

STEPS_MS: Final = {"left": -10_000, "right": 10_000, "[": -10_000, "]": 10_000, "{": -600_000, "}": 600_000}
MOVES: Final = {"up": "up", "k": "up", "down": "down", "j": "down"}
CHANGES: Final = {"p": "pause", "r": "resume", "d": "step_down"}


def _most(value: float | None) -> float:
    return float("inf") if value is None else -value


# By what groups can be sorted, the worst first, and how.
SORTS: Final[dict[str, Callable[[GroupTrend], Any]]] = {
    "trouble": lambda row: (LEVELS.index(row.level), -sum(row.causes.values()), _most(row.oldest_s)),
    "oldest": lambda row: _most(row.oldest_s),
    "lag": lambda row: _most(row.lag),
    "growth": lambda row: _most(row.lag_per_second),
    "name": lambda row: 0,
}


class GroupTrend(GroupHealth, frozen=True):
    """A group, and how it changes, its lag included: per second, over a minute or between two pictures; None where one
    picture alone is known."""

    redelivered_per_second: float | None
    dead_letters_per_second: float | None


class _Figures(NamedTuple):
    time_ms: int
    lag: int | None
    unknown: int
    redelivered: int
    dead_letters: int


class Trends:
    """Keeps the figures of the newest pictures."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[_Figures]] = {}

    def read(self, groups: Iterable[GroupHealth], time_ms: int) -> tuple[GroupTrend, ...]:
        """Notes a picture of all groups, and returns it with the trends. `time_ms`: since 1970."""
        kept, self._kept = self._kept, {}
        found = []
        for one in groups:
            now = _Figures(time_ms, one.lag, one.unknown, one.redelivered, one.dead_letters)
            figures = self._kept[one.group] = kept.get(one.group, deque())
            if figures and not _comparable(figures[-1], now):
                figures.clear()
            figures.append(now)
            while len(figures) > 2 and figures[1].time_ms <= time_ms - WINDOW_MS:
                figures.popleft()
            found.append(GroupTrend(**{**asdict(one), **_trend_between(figures[0], now)}))
        return tuple(found)


def _comparable(before: _Figures, now: _Figures) -> bool:
    """Returns whether the difference says something: a reader that began anew counts from 0 again."""
    grown = before.redelivered <= now.redelivered and before.dead_letters <= now.dead_letters
    return grown and before.unknown == now.unknown and before.time_ms < now.time_ms


def _trend_between(before: _Figures, now: _Figures) -> dict[str, float | None]:
    found: dict[str, float | None] = dict.fromkeys((*GroupTrend.__annotations__, "lag_per_second"))
    found["zero_s"] = zero_s(now.lag, None)
    if before is now:
        return found
    elapsed_s = (now.time_ms - before.time_ms) / 1000
    if now.lag is not None and before.lag is not None:
        growth = (now.lag - before.lag) / elapsed_s
        found["lag_per_second"], found["zero_s"] = round(growth, 1), zero_s(now.lag, growth)
    found["redelivered_per_second"] = round((now.redelivered - before.redelivered) / elapsed_s, 2)
    found["dead_letters_per_second"] = round((now.dead_letters - before.dead_letters) / elapsed_s, 2)
    return found


class Order(NamedTuple):
    """What a key asks the command to do. `text`: what is asked before a change."""

    kind: str  # "quit", "explain", "pause", "resume" or "step_down"
    group: str = ""
    tp: TopicPartition | None = None
    session: int | None = None
    text: str = ""


class Rows(NamedTuple):
    """What there is to show. `members`: of the opened group. `lines`: the explanation of the chosen partition.
    `times_ms`: the first and the last time of a dump."""

    groups: Sequence[GroupTrend] = ()
    members: Sequence[MemberInfo] = ()
    lines: Sequence[str] = ()
    writes: bool = False
    times_ms: tuple[int, int] | None = None


class Size(NamedTuple):
    columns: int
    lines: int


class Screen(NamedTuple):
    """What a person has chosen. `group`: "" for the first one. `wanted`: the filter, and whether it is being typed.
    `asked`: a change that waits for `y`. `scroll`: the first line of a text. `at_ms`: the time of a dump."""

    view: str = "groups"  # "groups", "group" or "partition"
    group: str = ""
    tp: TopicPartition | None = None
    sort: str = "trouble"
    wanted: str = ""
    typing: bool = False
    frozen: bool = False
    help: bool = False
    asked: Order | None = None
    scroll: int = 0
    at_ms: int | None = None


# --- what is shown


def groups(screen: Screen, rows: Rows) -> list[GroupTrend]:
    """Returns the groups that are shown, in their order."""
    filtered = screen.view == "groups"
    found = [row for row in rows.groups if not filtered or screen.wanted in row.group]
    return sorted(found, key=lambda row: (SORTS[screen.sort](row), row.group))


def chosen(screen: Screen, rows: Rows) -> GroupTrend | None:
    """Returns the group under the cursor. If the chosen one is not there, that is the first."""
    shown = groups(screen, rows)
    return next((row for row in shown if row.group == screen.group), shown[0] if shown else None)


def partitions(screen: Screen, rows: Rows) -> list[PartitionHealth]:
    """Returns the partitions that are shown: those whose name or owner has the filter's text."""
    group = chosen(screen, rows)
    return [
        row
        for row in (() if group is None else group.partitions)
        if screen.wanted in f"{row.topic}:{row.partition}" or screen.wanted in (row.owner or "")
    ]


def cell(screen: Screen, rows: Rows) -> PartitionHealth | None:
    """Returns the partition under the cursor."""
    shown = partitions(screen, rows)
    at = (row for row in shown if screen.tp == (row.topic, row.partition))
    return next(at, shown[0] if shown else None)


def cell_width(shown: Sequence[PartitionHealth]) -> int:
    """Returns the columns of a cell: the number, its owner's letter, a mark, a space."""
    return len(str(max((row.partition for row in shown), default=0))) + 3


def lines(shown: Sequence[PartitionHealth], size: Size) -> list[list[PartitionHealth]]:
    """Returns the lines of the grid. A topic begins a line."""
    room, found = max(1, size.columns // cell_width(shown)), []
    for _, of_topic in groupby(shown, lambda row: row.topic):
        cells = list(of_topic)
        found += [cells[at : at + room] for at in range(0, len(cells), room)]
    return found


def wrapped(texts: Sequence[str], size: Size) -> list[str]:
    """Returns texts as lines that fit."""
    width = max(20, size.columns)
    return [line for text in texts for line in textwrap.wrap(printable(text), width, subsequent_indent="    ") or [""]]


# --- what keys do


def press(screen: Screen, key: str, rows: Rows, size: Size) -> tuple[Screen, Order | None]:
    """Returns the screen after a key, and what the key asks for."""
    if screen.asked is not None:
        return screen._replace(asked=None), screen.asked if key in ("y", "Y") else None
    if screen.typing:
        return _typed(screen, key), None
    if screen.help:
        return (screen, Order("quit")) if key == "q" else (screen._replace(help=False), None)
    match key:
        case "q":
            return screen, Order("quit")
        case "?":
            return screen._replace(help=True), None
        case " ":
            return screen._replace(frozen=not screen.frozen), None
        case "s" if screen.view == "groups":
            names = list(SORTS)
            return screen._replace(sort=names[(names.index(screen.sort) + 1) % len(names)], group=""), None
        case "/" if screen.view != "partition":
            return screen._replace(typing=True), None
        case "esc" | "backspace":
            return _back(screen), None
        case "enter":
            return _enter(screen, rows)
        case "p" | "r" | "d":
            return _change(screen, CHANGES[key], rows)
    if rows.times_ms is not None and key in STEPS_MS and (screen.view == "groups" or key in "[]{}"):
        first_ms, last_ms = rows.times_ms
        now_ms = last_ms if screen.at_ms is None else screen.at_ms
        return screen._replace(at_ms=min(last_ms, max(first_ms, now_ms + STEPS_MS[key]))), None
    return _moved(screen, MOVES.get(key, key), rows, size), None


def _typed(screen: Screen, key: str) -> Screen:
    match key:
        case "enter":
            return screen._replace(typing=False)
        case "esc":
            return screen._replace(typing=False, wanted="")
        case "backspace":
            return screen._replace(wanted=screen.wanted[:-1])
    return screen._replace(wanted=screen.wanted + key) if len(key) == 1 else screen


def _back(screen: Screen) -> Screen:
    if screen.wanted and screen.view != "partition":
        return screen._replace(wanted="")
    before = {"partition": "group", "group": "groups", "groups": "groups"}[screen.view]
    return screen._replace(view=before, scroll=0, tp=screen.tp if before == "group" else None)


def _enter(screen: Screen, rows: Rows) -> tuple[Screen, Order | None]:
    group, at = chosen(screen, rows), cell(screen, rows)
    if screen.view == "groups" and group is not None:
        return screen._replace(view="group", group=group.group, wanted="", tp=None), None
    if screen.view == "group" and group is not None and at is not None:
        tp = TopicPartition(at.topic, at.partition)
        return screen._replace(view="partition", tp=tp, scroll=0), Order("explain", group.group, tp)
    return screen, None


def _change(screen: Screen, kind: str, rows: Rows) -> tuple[Screen, Order | None]:
    group, at = chosen(screen, rows), cell(screen, rows)
    if group is None:
        return screen, None
    if not rows.writes:
        return screen, Order("refused", text="top changes nothing without --write")
    if kind != "step_down":
        verb = "Pause" if kind == "pause" else "End the pause of"
        return screen._replace(asked=Order(kind, group.group, text=f"{verb} group {group.group!r}?")), None
    if screen.view == "groups" or at is None or at.session is None:
        return screen, Order("refused", text="choose a partition: its owner steps down")
    text = f"Step {at.owner} (session {at.session}) down in group {group.group!r}?"
    return screen._replace(asked=Order(kind, group.group, session=at.session, text=text)), None


def _moved(screen: Screen, key: str, rows: Rows, size: Size) -> Screen:
    """Returns the screen after a key that moves the cursor, or scrolls a text."""
    if screen.view == "partition":
        top = scrolled(screen.scroll, key, len(wrapped(rows.lines, size)), size.lines - 2)
        return screen._replace(scroll=top)
    page = max(1, size.lines - 8)
    steps = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -(10**9), "end": 10**9}
    if screen.view == "groups":
        names = [row.group for row in groups(screen, rows)]
        if not names or key not in steps:
            return screen
        at = names.index(screen.group) if screen.group in names else 0
        return screen._replace(group=names[min(len(names) - 1, max(0, at + steps[key]))])
    chosen_cell, found = cell(screen, rows), lines(partitions(screen, rows), size)
    if chosen_cell is None:
        return screen
    flat = [row for line in found for row in line]
    if key in ("left", "right", "h", "l"):
        to = flat[min(len(flat) - 1, max(0, flat.index(chosen_cell) + (1 if key in ("right", "l") else -1)))]
    elif key in ("home", "end"):
        to = flat[0 if key == "home" else -1]
    elif key in steps:
        y = next(number for number, line in enumerate(found) if chosen_cell in line)
        line = found[min(len(found) - 1, max(0, y + steps[key]))]
        to = line[min(len(line) - 1, found[y].index(chosen_cell))]
    else:
        return screen
    return screen._replace(tp=TopicPartition(to.topic, to.partition))


T = TypeVar("T")

LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of owners; the colours alone are too few
COLOURS: Final = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")
BAD, WARNING, TITLE, FAINT, CURSOR = "bold red", "yellow", "bold", "dim", "reverse"
LEVEL_STYLES: Final = {"fail": BAD, "unknown": WARNING, "warn": WARNING, "ok": "green"}
STATES: Final = {"fresh": "green", "unknown": WARNING, "stale": BAD}
KEYS: Final = {
    "groups": "arrows choose  Enter open  s sort  / filter  Space freeze  ? help  q quit",
    "group": "arrows choose  Enter explain  Esc back  / filter  ? help  q quit",
    "partition": "arrows scroll  Esc back  ? help  q quit",
}
HELP: Final = """\
up down j k, PgUp PgDn Home End   choose a group or a partition, scroll a text
Enter           open the group; explain the partition
Esc Backspace   drop the filter; then back
s               sort by trouble, oldest message, lag, growth of the lag, name
/               filter: groups by name; partitions by name or owner
Space           freeze the picture, and let it go on
left right      in the past: 10 s earlier, later ([ ] in a group; { } 10 min)
p r             pause the group, end its pause (with --write; asks first)
d               step the owner of the chosen partition down (likewise)
q, ctrl-C       quit

MEMB    consumers with a fresh sign of life + those without
LAG/S   how fast the lag changes, over a minute; ZERO: time until it is 0
OLDEST  age of the oldest message that is not finished
READ/S  how fast positions move, over a minute; AGAIN/S: delivered once more
A cell of the grid is a partition with the letter of its owner, - for nobody, or
# for parked; ! if its owner is silent, or a message has waited for a minute."""
WHY_LINES: Final = 4  # of what is wrong with a group, at least
WHY_LEAST: Final = 20  # columns that such a text needs beside the figures
OLD_S: Final = 60.0  # so old is an oldest unfinished message with a mark


class Frame(NamedTuple):
    """What stands around the rows. `now_ms`: of the rows, since 1970. `stale`: why they are old, or "". `note`: the
    result of the last change, or its error."""

    now_ms: int
    stale: str = ""
    note: str = ""


class Column(NamedTuple):
    """A column of the list of groups. `least`: how wide a terminal must be to have it."""

    name: str
    width: int
    text: Callable[[GroupTrend], str]
    style: Callable[[GroupTrend], str] = lambda row: ""
    least: int = 0


def count(value: float | None) -> str:
    """Returns a number in at most six columns; "-" if it is unknown."""
    if value is None:
        return "-"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= (100 * size if unit == "k" else size):
            return f"{value / size:.0f}{unit}" if abs(value) >= 100 * size else f"{value / size:.1f}{unit}"
    return f"{value:.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.1f}"


def age(seconds: float | None) -> str:
    """Returns a time in at most four columns; "-" if it is unknown."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{min(999, seconds // size):.0f}{unit}"
    return f"{seconds:.0f}s"


def growth(value: float | None) -> str:
    return f"+{count(value)}" if value is not None and value > 0 else count(value)


def word(row: GroupTrend) -> str:
    """Returns the state of a group in one word or two."""
    if row.causes:
        return next(iter(row.causes)).replace("_", " ")
    if wrong := [one.name for one in row.findings if one.level != "ok"]:
        return wrong[0]
    return "ok" if row.sessions else "no member" if row.lag is None else "idle"


def why(row: GroupTrend) -> str:
    """Returns in words what is wrong, or that nothing is; or that it is not known, as of the past."""
    if row.notices or row.sessions or row.lag is not None:
        return "; ".join(row.notices) or f"{row.group!r}: nothing is wrong"
    return f"{row.group!r}: no consumer is there, and whether messages wait is not known"


def members(row: GroupTrend) -> str:
    silent = row.sessions - row.fresh
    return f"{row.fresh}+{silent}" if silent else str(row.fresh)


def left(row: GroupTrend) -> str:
    pause = row.pause
    return "" if pause is None else age(pause.left_s)


COLUMNS: Final = (
    Column("STATE", 13, word, lambda row: LEVEL_STYLES[row.level]),
    Column("MEMB", 5, members, lambda row: BAD if row.stale else ""),
    Column("OWNED", 5, lambda row: str(row.owned)),
    Column("FREE", 4, lambda row: str(row.free), lambda row: WARNING if row.free else FAINT),
    Column("PARK", 4, lambda row: str(row.parked), lambda row: BAD if row.parked else FAINT),
    Column("LAG", 6, lambda row: count(row.lag)),
    Column("LAG/S", 6, lambda row: growth(row.lag_per_second)),
    Column("ZERO", 4, lambda row: age(row.zero_s)),
    Column("OLDEST", 6, lambda row: age(row.oldest_s), lambda row: WARNING if (row.oldest_s or 0) >= OLD_S else ""),
    Column("READ/S", 6, lambda row: count(row.per_second), least=110),
    Column("AGAIN/S", 7, lambda row: count(row.redelivered_per_second), least=110),
    Column("DEAD/S", 6, lambda row: count(row.dead_letters_per_second), least=110),
    Column("WITNESS", 7, lambda row: str(row.witnessed), least=130),
    Column("PAUSE ENDS IN", 13, left, least=130),
)


def draw(screen: Screen, rows: Rows, frame: Frame, size: Size) -> list[Text]:
    """Returns the picture: as many lines as the terminal has, which it cuts."""
    if screen.help:
        body = [Text(line) for line in HELP.splitlines()]
    elif screen.view == "groups":
        body = _groups(screen, rows, size)
    elif screen.view == "group":
        body = _group(screen, rows, size)
    else:
        body = [Text(line) for line in wrapped(rows.lines, size)[screen.scroll :]]
    room = max(0, size.lines - 2)
    blank = [Text() for _ in range(room - len(body))]
    return [_head(screen, rows, frame), *body[:room], *blank, _foot(screen, frame)]


def _head(screen: Screen, rows: Rows, frame: Frame) -> Text:
    bad = sum(row.level != "ok" for row in rows.groups)
    when = datetime.fromtimestamp(frame.now_ms / 1000, UTC)
    head = Text(f"marshal top {when:{'%Y-%m-%d ' if rows.times_ms else ''}%H:%M:%S}Z", style=TITLE)
    if frame.stale:
        head.append(f"  {printable(frame.stale)}", BAD)
    if screen.at_ms not in (None, frame.now_ms):
        head.append(f"  reading {time_of(screen.at_ms, 'seconds')}", WARNING)
    if screen.frozen:
        head.append("  frozen", WARNING)
    head.append(f"  {len(rows.groups)} groups, ", "not bold")
    head.append(f"{bad} in trouble", BAD if bad else "not bold")
    head.append(f", by {screen.sort}" if screen.view == "groups" else "", "not bold")
    if screen.wanted or screen.typing:
        head.append(f"  /{printable(screen.wanted)}{'_' if screen.typing else ''}", WARNING)
    return head


def _foot(screen: Screen, frame: Frame) -> Text:
    if screen.asked is not None:
        return Text(f"{printable(screen.asked.text)} y/n", style=f"{CURSOR} {WARNING}")
    if frame.note:
        return Text(printable(frame.note), style=WARNING)
    return Text("any key: back" if screen.help else KEYS[screen.view], style=FAINT)


def window(rows: Sequence[T], at: int, room: int) -> Sequence[T]:
    """Returns `room` of the rows, with the row `at` in the middle as far as can be."""
    first = max(0, min(at - room // 2, len(rows) - room))
    return rows[first : first + room]


def fit(text: str, width: int) -> str:
    """Returns a name in exactly so many columns."""
    text = printable(text)
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


# --- the groups


def _groups(screen: Screen, rows: Rows, size: Size) -> list[Text]:
    shown, at = groups(screen, rows), chosen(screen, rows)
    columns = [one for one in COLUMNS if one.least <= size.columns]
    left_over = size.columns - sum(one.width + 1 for one in columns)
    width = max(4, min(left_over, max([cell_len(printable(row.group)) for row in shown], default=0) + 1))
    if left_over - width < WHY_LEAST:
        width = left_over
    head = Text(fit("GROUP", width), style=f"{TITLE} underline")
    for one in columns:
        head.append(f" {one.name:>{one.width}}")
    head.append(f"  {'WHY':<{left_over - width - 2}}" if left_over > width else "")
    told = [] if at is None else _told(at, size, size.lines - 3 - len(shown))
    room = max(1, size.lines - 3 - len(told))
    found = [
        _group_line(row, columns, width, left_over - width - 2, row is at)
        for row in window(shown, 0 if at is None else shown.index(at), room)
    ]
    if at is None:
        found = [Text(f"no group has {printable(screen.wanted)!r} in its name" if screen.wanted else "no group")]
    return [head, *found, *(Text() for _ in range(room - len(found))), *map(Text, told)]


def _told(row: GroupTrend, size: Size, free: int) -> list[str]:
    """Returns what is wrong with a group: of the way out, which stands last, as much as `free` lines hold."""
    return wrapped([why(row)], size)[: max(WHY_LINES, free)]


def _group_line(row: GroupTrend, columns: Sequence[Column], width: int, room: int, chosen: bool) -> Text:
    line = Text(fit(row.group, width))
    for one in columns:
        line.append(" ")
        line.append(f"{one.text(row)[: one.width]:>{one.width}}", one.style(row))
    if room > 0:
        line.append(f"  {fit('; '.join(row.notices), room)}", FAINT)
    if chosen:
        line.stylize(CURSOR)
    return line


# --- one group


def _group(screen: Screen, rows: Rows, size: Size) -> list[Text]:
    group = chosen(screen, rows)
    if group is None or group.group != screen.group:
        return [Text(f"group {printable(screen.group)!r} is gone", style=WARNING)]
    at = cell(screen, rows)
    body = [Text(printable(group.group), style=TITLE).append(f"  {word(group)}", LEVEL_STYLES[group.level])]
    body[0].append(f"  {group.owned} owned, {group.free} free, {group.parked} parked", "not bold")
    body[0].append(f", the pause ends in {left(group)}" if group.pause is not None else "", WARNING)
    body.append(
        Text(
            f"lag {count(group.lag)} ({growth(group.lag_per_second)}/s, 0 in {age(group.zero_s)}); oldest "
            f"{age(group.oldest_s)}; read {count(group.per_second)}/s; again "
            f"{count(group.redelivered_per_second)}/s, dead {count(group.dead_letters_per_second)}/s"
        )
    )
    marks = {one.session: (number, one.state == "stale") for number, one in enumerate(rows.members)}
    there = _members(rows.members, marks, at, size)
    cells = partitions(screen, rows)
    found, chosen_line = _grid(lines(cells, size), at, marks, cell_width(cells))
    told = _told(group, size, size.lines - 3 - len(body) - len(there) - len(found))
    body += [*(Text(line, style=LEVEL_STYLES[group.level]) for line in told), *there]
    room = max(1, size.lines - 3 - len(body))
    body += window(found, chosen_line, room)
    body += (Text() for _ in range(size.lines - 3 - len(body)))
    return [*body, Text("" if at is None else printable(_cell_text(at)))]


def _members(
    found: Sequence[MemberInfo], marks: Mapping[int, tuple[int, bool]], at: PartitionHealth | None, size: Size
) -> list[Text]:
    if not found:
        return [Text("no consumer is there", style=WARNING)]
    width = min(40, max(16, size.columns - 48))
    lines = [Text(f"  {fit('MEMBER', width)} STATE    LAST SIGN  OWNS  WITNESS", style=f"{TITLE} underline")]
    owner, _ = marks.get(-1 if at is None or at.session is None else at.session, (0, False))
    for one in window(found, owner, max(2, (size.lines - 9) // 3)):
        number, _ = marks[one.session]
        line = Text(_letter(number), style=_colour(number))
        line.append(f" {fit(f'{one.client_id} ({one.member})' if one.member else one.client_id, width)} ", "default")
        line.append(f"{one.state:<7}", STATES[one.state])
        line.append(f"  {age(one.last_sign_s):>9}  {len(one.claims):>4}  {printable(one.witness or '-')}", "default")
        line.append("  stepped down" if one.stepped_down else "", WARNING)
        if at is not None and one.session == at.session:
            line.stylize(TITLE)
        lines.append(line)
    return lines


def _grid(
    lines: Sequence[Sequence[PartitionHealth]],
    at: PartitionHealth | None,
    marks: Mapping[int, tuple[int, bool]],
    width: int,
) -> tuple[list[Text], int]:
    """Returns the lines of the grid with the names of topics, and which of them has the cursor."""
    found, chosen, topic = list[Text](), 0, ""
    for line in lines:
        if line[0].topic != topic:
            topic = line[0].topic
            found.append(Text(printable(topic), style=TITLE))
        text = Text()
        for one in line:
            if one is at:
                chosen = len(found)
            mark, style = _mark(one, marks)
            text.append(f"{f'{one.partition}{mark}':>{width - 1}}", f"{style} {CURSOR}" if one is at else style)
            text.append(" ")
        found.append(text)
    return found, chosen


def _mark(one: PartitionHealth, marks: Mapping[int, tuple[int, bool]]) -> tuple[str, str]:
    if one.parked is not None:
        return "# ", f"black on {WARNING}"
    if one.session is None:
        return "- ", BAD
    number, silent = marks.get(one.session, (0, False))
    old = silent or (one.oldest_s is not None and one.oldest_s >= OLD_S)
    return _letter(number) + ("!" if old else " "), f"{_colour(number)}{' bold' if old else ''}"


def _letter(number: int) -> str:
    return LETTERS[number % len(LETTERS)]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _cell_text(at: PartitionHealth) -> str:
    owner = (
        f"parked: {at.parked}" if at.parked else "nobody" if at.owner is None else f"{at.owner} (session {at.session})"
    )
    working = f", {at.in_flight} in flight" if at.owner is not None else ""
    retention = "" if at.retention_s is None else f", retention in {age(at.retention_s)}"
    return (
        f"{at.topic}:{at.partition}  {owner}, at {'-' if at.position is None else at.position}, lag {count(at.lag)}, "
        f"{count(at.per_second)}/s{working}, oldest {age(at.oldest_s)}{retention}"
    )
