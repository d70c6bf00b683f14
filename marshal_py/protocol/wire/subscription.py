"""Which topics a Join names: by name, and by patterns over the topics that the group knows (PROTOCOL.md A13).

    orders      the topic of this name
    ^orders-.*  a pattern: each topic that the log knows, whose name begins as the regular expression says
    !orders-dlq  never this topic, whatever the patterns say

All members evaluate the patterns of all sessions, on the thread that heartbeats. So matching must be fast for every
pattern, and the same in every version of Python: this file has a matcher of its own, which keeps the set of all places
that a match may have reached and never goes back. Its syntax is the part of POSIX extended regular expressions (those
of librdkafka) that names of topics need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from string import ascii_letters, digits
from typing import Final

PATTERN: Final = "^"  # no name of a topic holds one of these two
EXCEPT: Final = "!"
INTERNAL: Final = "__"  # no pattern matches a topic whose name begins so: Kafka's own and the coordination topic
PATTERN_BYTES_MAX: Final = 255  # PROTOCOL.md 4.2, id
REPEATS_MAX: Final = 255  # RE_DUP_MAX of POSIX; a name is shorter
MATCHES_KEPT: Final = 65_536  # answers that are kept: more than the 1,000 topics of some patterns

Places = frozenset[int]  # offsets in a name
Step = Callable[[str, Places], Places]  # from the places where a part of a pattern may begin to those where it may end

_NONE: Final[Places] = frozenset()
_CLASSES: Final = {"d": frozenset(digits), "w": frozenset(ascii_letters + digits + "_")}


def is_pattern(topic: str) -> bool:
    return topic.startswith(PATTERN)


def has_patterns(topics: Iterable[str]) -> bool:
    return any(map(is_pattern, topics))


def names_of(topics: Iterable[str]) -> tuple[str, ...]:
    """Returns the topics that are named, without patterns and exceptions."""
    return tuple(topic for topic in topics if not topic.startswith((PATTERN, EXCEPT)))


def consumed(topics: tuple[str, ...], known: Iterable[str]) -> tuple[str, ...]:
    """Returns the topics that a session's Join names in `topics`, then those of `known` that its patterns match."""
    if not has_patterns(topics):
        return topics
    named = names_of(topics)
    return (*named, *sorted(topic for topic in known if topic not in named and _matched(topics, topic)))


def consumes(topics: tuple[str, ...], topic: str) -> bool:
    """Returns whether a session consumes a topic that the group knows. `topics`: as in its Join."""
    return topic in topics or _matched(topics, topic)


@lru_cache(MATCHES_KEPT)
def _matched(topics: tuple[str, ...], topic: str) -> bool:
    if not topic or topic.startswith(INTERNAL) or EXCEPT + topic in topics:
        return False
    return any(is_pattern(pattern) and matches(pattern, topic) for pattern in topics)


def matches(pattern: str, topic: str) -> bool:
    """Returns whether the name begins as the pattern says. A pattern that cannot be read matches nothing."""
    step = _compiled(pattern)
    return step is not None and bool(step(topic, frozenset({0})))


@lru_cache(1_000)
def _compiled(pattern: str) -> Step | None:
    try:
        return compile_pattern(pattern)
    except ValueError:
        return None  # of another library


def compile_pattern(pattern: str) -> Step:
    """Reads a pattern. Raises ValueError, with what is wrong and where."""
    if len(pattern.encode()) > PATTERN_BYTES_MAX:
        raise ValueError(f"it is longer than {PATTERN_BYTES_MAX} bytes")
    return _Reader(pattern).read()


class _Reader:
    """Reads one pattern, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> Step:
        step = self._alternatives()
        if self._at < len(self._text):
            raise self._wrong("a ) without its (")
        return step

    def _wrong(self, what: str) -> ValueError:
        where = "the end" if self._at >= len(self._text) else f"character {self._at + 1}"
        return ValueError(f"{what}, at {where}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self, missing: str) -> str:
        char = self._peek()
        if not char:
            raise self._wrong(missing)
        self._at += 1
        return char

    def _alternatives(self) -> Step:
        branches = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else lambda name, at: _NONE.union(*(b(name, at) for b in branches))

    def _sequence(self) -> Step:
        steps: list[Step] = []
        while self._peek() not in ("", "|", ")"):
            steps.append(self._repeated(self._atom()))

        def step(name: str, at: Places) -> Places:
            for each in steps:
                if not at:
                    break
                at = each(name, at)
            return at

        return step

    def _atom(self) -> Step:
        match char := self._next(""):
            case "^":
                return lambda name, at: at & {0}
            case "$":
                return lambda name, at: at & {len(name)}
            case "(":
                if self._text.startswith("?", self._at) and not self._text.startswith("?:", self._at):
                    raise self._wrong("(? begins no group here: only ( and (?: do")
                self._at += 2 * self._text.startswith("?:", self._at)
                step = self._alternatives()
                self._next("a ( without its )")
                return step
            case "*" | "+" | "?" | "{":
                self._at -= 1
                raise self._wrong(f"nothing before {char} to repeat")
            case ".":
                return lambda name, at: frozenset(place + 1 for place in at if place < len(name))
            case "[":
                return self._bracket()
            case "\\":
                return _one_of(self._escaped())
            case _:
                return _one_of(frozenset(char))

    def _escaped(self) -> frozenset[str]:
        char = self._next("nothing after \\")
        if char in _CLASSES:
            return _CLASSES[char]
        if char.isalnum():
            self._at -= 1
            raise self._wrong(f"\\{char} means nothing here: only \\d, \\w and punctuation do")
        return frozenset(char)

    def _bracket(self) -> Step:
        inverse, missing, found = self._peek() == "^", "a [ without its ]", set[str]()
        self._at += inverse
        first = self._at
        while (char := self._next(missing)) != "]" or self._at == first + 1:
            if char == "[" and self._peek() in (":", ".", "="):
                raise self._wrong(f"[{self._peek()} names a class, which is not supported: write its characters")
            low = self._escaped() if char == "\\" else frozenset(char)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                high = self._next(missing)
                if len(low) != 1 or high < min(low):
                    raise self._wrong("a range that ends before it begins")
                low = frozenset(map(chr, range(ord(min(low)), min(ord(high), 127) + 1)))
            found |= low
        return _one_of(frozenset(found), inverse=inverse)

    def _repeated(self, step: Step) -> Step:
        least, most = 1, 1
        match self._peek():
            case "*":
                least, most = 0, REPEATS_MAX
            case "+":
                least, most = 1, REPEATS_MAX
            case "?":
                least, most = 0, 1
            case "{":
                end = self._text.find("}", self._at)
                low, comma, high = self._text[self._at + 1 : max(end, self._at)].partition(",")
                if not low.isdecimal() or not (high.isdecimal() or not high):
                    raise self._wrong("{ begins no repetition as {3}, {3,} or {3,5}")
                least, most = int(low), int(high) if high else REPEATS_MAX if comma else int(low)
                if most < least:
                    raise self._wrong(f"a repetition of at least {least} and at most {most}")
                if most > REPEATS_MAX:
                    raise self._wrong(f"a repetition outside 0 to {REPEATS_MAX}")
                self._at = end
            case _:
                return step
        self._at += 1
        if self._peek() and self._peek() in "*+?{":
            raise self._wrong("two repetitions in a row")
        return lambda name, at: _repeat(step, least, most, name, at)


def _one_of(chars: frozenset[str], *, inverse: bool = False) -> Step:
    return lambda name, at: frozenset(p + 1 for p in at if p < len(name) and (name[p] in chars) is not inverse)


def _repeat(step: Step, least: int, most: int, name: str, at: Places) -> Places:
    for _ in range(least):
        after = step(name, at)
        if after == at:
            return at  # so it stays, however often
        at = after
    found, fresh = at, at
    for _ in range(most - least):
        fresh = step(name, fresh) - found
        if not fresh:
            break
        found |= fresh
    return found
