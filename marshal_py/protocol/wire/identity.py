"""Topic partitions, instants, fencing tokens, names of topics and their patterns. Knows no records, reads no clock."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

import mmh3

from marshal_py.errors import InvalidOption

ID_BYTES_MAX = 255  # one length byte in the envelope (PROTOCOL.md 4.1)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_TOPIC_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")  # Kafka's rule
NONE = -1  # "no offset, no session, no partition" on the wire and in the world (PROTOCOL.md 5)


class TopicPartition(NamedTuple):
    """Names a partition of a topic. Partition -1 names the whole topic; ("", -1), the pin, names the whole group."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"


PIN: Final = TopicPartition("", NONE)


class Instant(NamedTuple):
    """One moment on the three clocks of one machine, each in ms from an arbitrary zero (PROTOCOL.md T7). `mono_ms`
    stops while the machine sleeps, `boot_ms` does not, `wall_ms` can be set by people."""

    mono_ms: int
    boot_ms: int
    wall_ms: int

    def since_ms(self, earlier: Instant) -> int:
        """Returns the ms since `earlier`: the greatest of the three differences, so that sleep counts (T7)."""
        mono_ms, boot_ms, wall_ms = self
        was_mono_ms, was_boot_ms, was_wall_ms = earlier
        elapsed_ms = mono_ms - was_mono_ms  # no max(): every delivery and every tick comes here several times
        if boot_ms - was_boot_ms > elapsed_ms:
            elapsed_ms = boot_ms - was_boot_ms
        return wall_ms - was_wall_ms if wall_ms - was_wall_ms > elapsed_ms else elapsed_ms


def check_id(kind: str, value: object) -> str:
    """Returns `value` if people may choose it as an id, else raises InvalidOption: 1-255 bytes of utf-8 without control
    characters (4.2). No rule of the fold, which never looks into an id."""
    if not isinstance(value, str):
        raise InvalidOption(kind, value, f"it must be a str, not {type(value).__name__}")
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidOption(kind, value, "it must be encodable as utf-8") from error
    if not 1 <= size_bytes <= ID_BYTES_MAX:
        raise InvalidOption(kind, value, f"it must be 1 to {ID_BYTES_MAX} bytes of utf-8, this is {size_bytes}")
    if _CONTROL.search(value):
        rule = "it must not hold control characters: NUL cuts it short in Kafka's C client, a newline breaks a table"
        raise InvalidOption(kind, value, rule)
    return value


def check_topic(name: object, also: str = "") -> str:
    """Returns `name` if Kafka takes it as a topic's, else raises InvalidOption. `also`: what else the caller takes."""
    checked = check_id("topic", name)
    if not _TOPIC_NAME.fullmatch(checked):
        rule = "Kafka takes 1 to 249 of the characters a-z A-Z 0-9 . _ - and neither . nor .. alone"
        raise InvalidOption("topic", checked, rule + also)
    return checked


# --- Computes which coordination partition, that is which log, a group belongs to (PROTOCOL.md L2).


HASH_NAME = "murmur3-x86-32"  # the Genesis names it; a log with another hash is refused (L6)


def route(group: str, partitions: int) -> int:
    """Returns the number of the log of `group`: its MurmurHash3 x86-32, seed 0, unsigned, modulo `partitions`."""
    return mmh3.hash(group.encode(), 0, signed=False) % partitions


# --- The fencing token of a claim, which a store compares to refuse a stale owner (PROTOCOL.md K1)


_TOKEN = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}")


class Token(NamedTuple):
    """The fencing token of a claim (PROTOCOL.md K1). A later claim's token is greater, also as a text.

    `incarnation`: 16 bytes that name the coordination topic; they change if it is created again. `epoch`: offset of the
    claim's record.
    """

    incarnation: bytes
    epoch: int

    def __str__(self) -> str:
        return f"{self.incarnation.hex()}-{self.epoch:016x}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """Returns the token that `str(token)` printed. Raises InvalidOption for any other text."""
        if _TOKEN.fullmatch(text):
            return cls(bytes.fromhex(text[:32]), int(text[33:], 16))
        raise InvalidOption("token", text, "32 hex digits, a dash, 16 hex digits")


# --- Which topics a Join names: by name, and by patterns over the topics that the group knows (PROTOCOL.md A13)
#
#     orders      the topic of this name
#     orders-*    a pattern: each topic that the log knows, whose name matches; * stands for any characters, or none
#     !orders-dlq never this topic, whatever the patterns say
#
# All members evaluate the patterns of all sessions, on the thread that heartbeats. So matching must be fast for every
# pattern, and the same in every version of Python: a glob is looked for from left to right, and never goes back.


ANY: Final = "*"  # no name of a topic holds one of these two
EXCEPT: Final = "!"
INTERNAL: Final = "__"  # no pattern matches a topic whose name begins so: Kafka's own and the coordination topic
MATCHES_KEPT: Final = 65_536  # answers that are kept: more than the 1,000 topics of some patterns


def is_pattern(topic: str) -> bool:
    return ANY in topic


def has_patterns(topics: Iterable[str]) -> bool:
    return any(map(is_pattern, topics))


def names_of(topics: Iterable[str]) -> tuple[str, ...]:
    """Returns the topics that are named, without patterns and exceptions."""
    return tuple(topic for topic in topics if not is_pattern(topic) and not topic.startswith(EXCEPT))


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
    """Returns whether the whole name is as the pattern says."""
    if not is_pattern(pattern):
        return topic == pattern
    first, *between, last = pattern.split(ANY)
    if not topic.startswith(first):
        return False
    at = len(first)
    for part in between:  # the leftmost place of each leaves most for the others
        at = topic.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return topic.endswith(last) and len(topic) - len(last) >= at
