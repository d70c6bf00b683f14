"""What a table has of each partition: the finished offsets as ranges, and the fencing token of the last writer. Pure.

Every table that takes each message once keeps one Kept per Source, beside its rows and in their transaction. A message
is left out only if its offset is in one of these ranges, because only then the table is known to have it. A highest
offset would say less: a batch that failed and comes back after the next one, or the history before the first message
that was written, lies below it and is not there.

Offsets that Kafka gives to no message (markers of transactions, compacted messages) would split ranges without end. So
writers name what they have read, and not only where messages were; and a Source keeps RANGES_MAX ranges. If there are
more, the holes that came first are given up: offsets there are `unclear` from then on, and a message that comes from
there is refused with an error (OffsetsUnclear). It is never passed over, and never written twice. A writer that knows
the group's position keeps all holes from there on, because their messages come again. A consumer bounds them: it
delivers nothing new of a partition of which too many messages wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from marshal_py.errors import InvalidOption, OffsetsUnclear
from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.identity import Token, TopicPartition
from marshal_py.protocol.wire.records import OFFSET_MAX

# Ranges kept per source. One is the rule. A message that was given back leaves a hole for a while, and a marker of a
# transaction between two fetches leaves one for good. What is delivered again after a crash is above the newest holes.
RANGES_MAX: Final = 256

Range = tuple[int, int]  # the offsets [start, to)
Ranges = tuple[Range, ...]  # ascending; no two overlap or touch


def union(ranges: Iterable[Range]) -> Ranges:
    """Returns the offsets of all these ranges, in ascending ranges that do not touch. Empty ones are left out."""
    return tuple(progress.union(one for one in ranges if one[0] < one[1]))


def common(ranges: Ranges, others: Ranges) -> Ranges:
    """Returns the offsets that are in both."""
    found: list[Range] = []
    for start, to in ranges:
        at = max(0, bisect_right(others, (start, -1)) - 1)
        while at < len(others) and others[at][0] < to:
            found.append((max(start, others[at][0]), min(to, others[at][1])))
            at += 1
    return union(found)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Returns the offsets of `ranges` that are not in `others`."""
    found: list[Range] = []
    for start, to in ranges:
        for taken_from, taken_to in common(((start, to),), others):
            found.append((start, taken_from))
            start = taken_to
        found.append((start, to))
    return union(found)


def holds(ranges: Ranges, offset: int) -> bool:
    """Returns whether the offset is in one of the ranges."""
    at = bisect_right(ranges, offset, key=lambda one: one[0]) - 1
    return at >= 0 and offset < ranges[at][1]


class Finished(NamedTuple):
    """The offsets of one source that a table has. It may not know it of those in `unclear`."""

    ranges: Ranges = ()
    unclear: Range = (0, 0)

    def add(self, ranges: Ranges, position: int = OFFSET_MAX) -> Finished:
        """Returns the value with these offsets added. Of more than RANGES_MAX ranges some become one, if the hole
        between them lies below `position`."""
        merged, (low, high) = list(union((*self.ranges, *ranges))), self.unclear
        while len(merged) > RANGES_MAX and merged[1][0] <= position:
            # The lowest hole, unless what was added now lies beside it: the next batch may be what belongs into it.
            below = (n for n in range(len(merged) - 1) if merged[n + 1][0] <= position)
            at = next((n for n in below if not common(tuple(merged[n : n + 2]), ranges)), 0)
            hole = merged[at][1], merged[at + 1][0]
            low, high = (min(low, hole[0]), max(high, hole[1])) if low < high else hole
            merged[at : at + 2] = [(merged[at][0], merged[at + 1][1])]
        return Finished(tuple(merged), (low, high))

    def unclear_in(self, ranges: Ranges) -> Range | None:
        """Returns the lowest of these offsets of which it is not known whether the table has them, as a range."""
        low, high = self.unclear
        return next(iter(common(ranges, ((low, high),))), None) if low < high else None

    def back_to(self, offset: int) -> Finished:
        """Returns the value without the offsets from `offset` on."""
        low, high = self.unclear
        kept = common(self.ranges, ((0, offset),))
        return Finished(kept, (low, min(high, offset)) if low < offset and low < high else (0, 0))

    def __str__(self) -> str:
        """Returns it as a short text, which `parse` reads."""
        texts = [f"{start}-{to}" for start, to in self.ranges]
        return " ".join(texts + (["?{}-{}".format(*self.unclear)] if self.unclear[0] < self.unclear[1] else []))

    @classmethod
    def parse(cls, text: str) -> Finished:
        """Returns the value that `str` printed. Raises ValueError for any other text."""
        ranges, unclear = [], (0, 0)
        for one in text.split():
            start, _, to = one.removeprefix("?").partition("-")
            if one.startswith("?"):
                unclear = int(start), int(to)
            else:
                ranges.append((int(start), int(to)))
        return cls(union(ranges), unclear)


class Source(NamedTuple):
    """Names one partition of one topic of one cluster, for good. `topic_id` is the id that Kafka gave to the topic. No
    other topic has it: neither one of the same name on another cluster, nor one that was created again under the name.
    On a cluster that gives no ids it is the incarnation of the coordination topic, in hex."""

    topic: str
    partition: int
    topic_id: str

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.topic_id}"


def source_of(topic: str, partition: int, topic_id: str, token: str) -> Source:
    """Returns the source of a message. `topic_id`, `token`: "" if unknown. Raises InvalidOption if both are."""
    if not topic_id and not token:
        rule = "a cluster that gives topics ids, or messages under a claim: else they could be of any topic of the name"
        raise InvalidOption("topic", topic, rule)
    return Source(topic, partition, topic_id or Token.parse(token).incarnation.hex())


class Span(NamedTuple):
    """What a batch has of one source. `ranges`: the offsets that it stands for; some may have no message.
    `token`: of the claim under which it was read, `group`: that claim's. Both are "" for a batch without a claim."""

    ranges: Ranges
    token: str = ""
    group: str = ""


class Kept(NamedTuple):
    """What a table knows of one source. `token`, `group`: of the newest owner that wrote; "" before any did."""

    finished: Finished = Finished()
    token: str = ""
    group: str = ""

    def fences(self, span: Span) -> bool:
        """Returns whether a later owner has written (PROTOCOL.md K1). Tokens of two groups cannot be compared."""
        return "" not in (span.token, self.token) and span.group == self.group and self.token > span.token

    def missing(self, table: str, source: Source, ranges: Ranges) -> Ranges:
        """Returns the offsets of `ranges` that the table `table` does not have. Raises OffsetsUnclear."""
        unclear = self.finished.unclear_in(ranges)
        if unclear is not None:
            raise OffsetsUnclear(table, str(source.tp), *unclear, RANGES_MAX)
        return without(ranges, self.finished.ranges)

    def after(self, span: Span, position: int = OFFSET_MAX) -> Kept:
        """Returns what the table knows once the batch is written. `position`: as `Finished.add` has it."""
        by = (span.token, span.group) if span.token else (self.token, self.group)
        return Kept(self.finished.add(span.ranges, position), *by)

    def back_to(self, offset: int) -> Kept:
        return self._replace(finished=self.finished.back_to(offset))


class LeftOut(NamedTuple):
    """Names offsets [start, to) of a partition that a writer left out. `why`: "there", or "fenced" (see `str`)."""

    topic: str
    partition: int
    topic_id: str
    start: int
    to: int
    why: str

    def __str__(self) -> str:
        says = {"there": "are in the table already", "fenced": "belong to a later owner of the partition"}[self.why]
        return f"{self.topic}:{self.partition} from {self.start} to {self.to - 1}: {says}"


def _several(messages: Any) -> list[Any]:
    """Returns a message, or those of an iterable, in a list. Raises InvalidOption for anything else."""
    each = [messages] if hasattr(messages, "offset") or not isinstance(messages, Iterable) else list(messages)
    for one in each:
        # A Part has no offset, a PlainMessage no topic id.
        if not all(hasattr(one, name) for name in ("offset", "token", "topic_id")):
            rule = "a message, a batch, a part, or several messages in a list"
            shown = type(one) if hasattr(one, "offset") else one  # no error shows the value of a message
            raise InvalidOption(
                "messages", shown, f"{rule}; a PlainMessage, which a worker process has, is none of them"
            )
    return each


def spans_of_messages(messages: Any) -> tuple[dict[Source, Span], list[tuple[Source, Any]]]:
    """Returns what a message, a batch, a part or an iterable of messages has of each source, and each message with its
    source, in the order given. Raises InvalidOption for messages of two groups, for a message that is there twice,
    and for what is no message."""
    if hasattr(messages, "parts"):
        parts = [(part[0], part.covered, part) for part in messages.parts]
    elif hasattr(messages, "raw"):
        parts = [(messages[0], messages.covered, messages)] if len(messages) else []
    else:
        parts = [(one, getattr(one, "covered", ((one.offset, one.offset + 1),)), (one,)) for one in _several(messages)]
    ranges: dict[Source, list[Range]] = {}
    tokens: dict[Source, list[str]] = {}
    found: list[tuple[Source, Any]] = []
    for first, covered, some in parts:
        token = str(first.token)
        source = source_of(first.topic, first.partition, first.topic_id, token)
        ranges.setdefault(source, []).extend(covered)
        tokens.setdefault(source, []).append(token)
        found += ((source, one) for one in some)
    groups = {first.group for first, *_ in parts}
    if len(groups) > 1:
        raise InvalidOption("messages", f"of groups {', '.join(sorted(groups))}", "messages of one group")
    if len({(source, one.offset) for source, one in found}) < len(found):
        raise InvalidOption("messages", f"{len(found)}, some of them twice", "each message once")
    return {source: Span(union(of), max(tokens[source]), *groups) for source, of in ranges.items()}, found
