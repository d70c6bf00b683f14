"""Draws a sequence diagram as SVG, so that the site loads no script for it: the part of Mermaid that the pages use.

That is participants, messages (solid, and dashed for what is read back) and notes over one participant or two. Colours
are those of the text around it, so a picture is right in light and in dark.
"""

from __future__ import annotations

import html
import re
import textwrap
from typing import Final

COLUMN: Final = 180  # pixels between two participants
LINE: Final = 17
LETTER: Final = 6.4  # the width of an average letter of 12 pixels
PARTICIPANT: Final = re.compile(r"participant (\w+) as (.+)")
MESSAGE: Final = re.compile(r"(\w+)(--?)>>(\w+): (.+)")
NOTE: Final = re.compile(r"Note over (\w+)(?:,(\w+))?: (.+)")


def _text(x: float, y: float, words: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle" font-weight="{weight}">{html.escape(words)}</text>'


def _note(x: float, y: float, room: int, lines: list[str]) -> list[str]:
    width = min(room, max(map(len, lines)) * LETTER + 20)
    shape = f'<rect x="{x - width / 2}" y="{y}" width="{width}" height="{len(lines) * LINE + 9}" rx="4"'
    box = f'{shape} fill="var(--md-code-bg-color, #eee)"/>'
    return [box, *(_text(x, y + LINE * (number + 1), line) for number, line in enumerate(lines))]


def drawn(source: str) -> str:
    """Returns the picture of a diagram, to stand in a page. Raises ValueError for a line that it does not know."""
    names: dict[str, str] = {}
    at: dict[str, float] = {}
    marks: list[str] = []
    y = 52
    for line in filter(None, map(str.strip, source.splitlines()[1:])):
        if found := PARTICIPANT.fullmatch(line):
            at[found[1]] = COLUMN * (len(names) + 0.5)
            names[found[1]] = found[2]
        elif found := MESSAGE.fullmatch(line):
            begin, end = at[found[1]], at[found[3]]
            words = textwrap.wrap(found[4], int((abs(end - begin) - 12) / LETTER))
            marks += [_text((begin + end) / 2, y + LINE * (row + 1), text) for row, text in enumerate(words)]
            y += LINE * len(words) + 7
            dashes = ' stroke-dasharray="5 4"' if found[2] == "--" else ""
            tip = 6 if end < begin else -6
            marks.append(f'<path d="M{begin} {y}H{end}" stroke="currentColor"{dashes}/>')
            marks.append(f'<path d="M{end} {y}l{tip} -4v8z" fill="currentColor"/>')
            y += 6
        elif found := NOTE.fullmatch(line):
            first, last = at[found[1]], at[found[2] or found[1]]
            room = COLUMN - 10 + int(last - first)
            lines = [part for piece in found[3].split("<br/>") for part in textwrap.wrap(piece, int(room / LETTER) - 3)]
            marks += _note((first + last) / 2, y + 8, room, lines)
            y += len(lines) * LINE + 22
        else:
            raise ValueError(f"no line of a sequence diagram that is drawn here: {line!r}")
    heads = [_text(at[name], 20, title, "bold") for name, title in names.items()]
    lives = [f'<path d="M{x} 30V{y + 10}" stroke="currentColor" opacity=".3"/>' for x in at.values()]
    size = f'viewBox="0 0 {COLUMN * len(names)} {y + 16}"'
    picture = f'<svg {size} font-size="12" fill="currentColor">{"".join(heads + lives + marks)}</svg>'
    return f'<div class="sequence">{picture}</div>'
