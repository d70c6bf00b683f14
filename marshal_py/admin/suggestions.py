"""Who named something that is not there probably meant something else: which name is nearest. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

LISTED_MAX: Final = 5  # names of a list for people
SIMILAR: Final = 0.6  # difflib's own default: two typing errors in a name of six letters


def instead(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that says that there is no `name`: what there is, nearest first."""
    names = sorted(known)
    near = get_close_matches(name, names, 1, SIMILAR) or [one for one in names if one.lower() == name.lower()]
    if near:
        return f"; did you mean {near[0]!r}?"
    if not names:
        return "; there is none yet"
    more = f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else ""
    return f"; there is {', '.join(map(repr, names[:LISTED_MAX]))}{more}"
