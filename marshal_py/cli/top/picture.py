"""Draws what `marshal top` shows: rows and a screen become lines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from marshal_py.admin.views.group_info import MemberInfo, PartitionHealth
from marshal_py.admin.views.trends import GroupTrend
from marshal_py.cli.documents import time_of
from marshal_py.cli.output import printable
from marshal_py.cli.top import screen as choosing
from marshal_py.cli.top.screen import Rows, Screen, Size, wrapped

T = TypeVar("T")

LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of owners; the colours alone are too few
COLOURS: Final = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")
BAD, WARNING, TITLE, FAINT, CURSOR = "bold red", "yellow", "bold", "dim", "reverse"
LEVELS: Final = {"fail": BAD, "unknown": WARNING, "warn": WARNING, "ok": "green"}
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
WHY_LINES: Final = 4  # of what is wrong with a group
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
    Column("STATE", 13, word, lambda row: LEVELS[row.level]),
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
    shown, at = choosing.groups(screen, rows), choosing.chosen(screen, rows)
    columns = [one for one in COLUMNS if one.least <= size.columns]
    left_over = size.columns - sum(one.width + 1 for one in columns)
    width = max(4, min(left_over, max([cell_len(printable(row.group)) for row in shown], default=0) + 1))
    if left_over - width < WHY_LEAST:
        width = left_over
    head = Text(fit("GROUP", width), style=f"{TITLE} underline")
    for one in columns:
        head.append(f" {one.name:>{one.width}}")
    head.append(f"  {'WHY':<{left_over - width - 2}}" if left_over > width else "")
    told = [] if at is None else wrapped([why(at)], size)[:WHY_LINES]
    room = max(1, size.lines - 3 - len(told))
    found = [
        _group_line(row, columns, width, left_over - width - 2, row is at)
        for row in window(shown, 0 if at is None else shown.index(at), room)
    ]
    if at is None:
        found = [Text(f"no group has {printable(screen.wanted)!r} in its name" if screen.wanted else "no group")]
    return [head, *found, *(Text() for _ in range(room - len(found))), *map(Text, told)]


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
    group = choosing.chosen(screen, rows)
    if group is None or group.group != screen.group:
        return [Text(f"group {printable(screen.group)!r} is gone", style=WARNING)]
    at = choosing.cell(screen, rows)
    body = [Text(printable(group.group), style=TITLE).append(f"  {word(group)}", LEVELS[group.level])]
    body[0].append(f"  {group.owned} owned, {group.free} free, {group.parked} parked", "not bold")
    body[0].append(f", the pause ends in {left(group)}" if group.pause is not None else "", WARNING)
    body.append(
        Text(
            f"lag {count(group.lag)} ({growth(group.lag_per_second)}/s, 0 in {age(group.zero_s)}); oldest "
            f"{age(group.oldest_s)}; read {count(group.per_second)}/s; again "
            f"{count(group.redelivered_per_second)}/s, dead {count(group.dead_letters_per_second)}/s"
        )
    )
    body += (Text(line, style=LEVELS[group.level]) for line in wrapped([why(group)], size)[:WHY_LINES])
    marks = {one.session: (number, one.state == "stale") for number, one in enumerate(rows.members)}
    body += _members(rows.members, marks, at, size)
    cells = choosing.partitions(screen, rows)
    found, chosen_line = _grid(choosing.lines(cells, size), at, marks, choosing.cell_width(cells))
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
