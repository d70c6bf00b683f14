"""Suggests the nearest name for one that does not exist; refuses keyword arguments that nothing has. Sends no request.

Python's own TypeError names the nearest in newer versions only, and never what else there is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Final, ParamSpec, TypeVar

from marshal_py.errors import InvalidOption, first_of

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the text "did you mean ...?"; "" if no known name is near."""
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else ""


def advice(name: str, known: Iterable[str]) -> str:
    """Returns what an error says of a name that is none of the known ones."""
    found = nearest(name, known)
    return f"no option is called {name}" + (f"; {found}" if found else "")


Advise = Callable[[str, Iterable[str]], str]


def check(caller: str, names: Iterable[str], known: Iterable[str], advise: Advise = advice) -> None:
    """Raises InvalidOption for an unknown name. `caller`: what was called. `advise(name, known)`: what to say of it."""
    wanted = [*known]
    unknown = sorted({*names}.difference(wanted))
    if unknown:
        raise InvalidOption(f"{caller}()", unknown, "; ".join(advise(name, wanted) for name in unknown))


def parameters(call: Callable[..., Any]) -> list[str]:
    """Returns the names that a call takes as keywords."""
    return [one.name for one in inspect.signature(call).parameters.values() if one.kind in _NAMED]


def checks_names(call: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function without `**keywords`: a keyword argument that it does not have raises InvalidOption."""
    known = parameters(call)

    @functools.wraps(call)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        check(call.__name__, keywords, known)
        return call(*args, **keywords)

    return checked


def constructor_checks_names(advise: Advise = advice) -> Callable[[C], C]:
    """Decorates a class: its construction raises InvalidOption for a keyword argument that it does not have."""

    def decorate(made: C) -> C:
        init: Any = made.__init__  # type: ignore[misc]  # the class's own: a subclass that has one decorates it
        known = parameters(init)[1:]  # without self

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **keywords: Any) -> None:
            check(type(self).__name__, keywords, known, advise)
            init(self, *args, **keywords)

        made.__init__ = checked  # type: ignore[misc]  # with its signature, by functools.wraps
        return made

    return decorate


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
