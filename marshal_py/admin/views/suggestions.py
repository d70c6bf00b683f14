"""Suggests the nearest name for one that does not exist. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from marshal_py.errors import first_of

NOBODY: Final = "no consumer has ever run here"  # what tools say of a coordination topic without records
LISTED_MAX: Final = 5  # names of a list for people
SIMILAR: Final = 0.6  # difflib's own default: two typing errors in a name of six letters


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown name: the nearest `known` one, or all."""
    names = sorted(known)
    near = get_close_matches(name, names, 1, SIMILAR) or [one for one in names if one.lower() == name.lower()]
    if near:
        return f"; did you mean {near[0]!r}?"
    if not names:
        return "; there is none yet"
    return f"; there is {first_of(map(repr, names), LISTED_MAX)}"
