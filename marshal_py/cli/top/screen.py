"""What `marshal top` shows of its rows, and what each key does. Pure: (screen, key, rows) -> (screen, order)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from marshal_py.admin.views.diagnosis import LEVELS
from marshal_py.admin.views.group_info import MemberInfo, PartitionHealth
from marshal_py.admin.views.trends import GroupTrend
from marshal_py.cli.output import printable
from marshal_py.cli.terminal import scrolled
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
