"""Which topics a Join names: by name, and by patterns over the topics that the group knows (PROTOCOL.md A13).

    orders      the topic of this name
    orders-*    a pattern: each topic that the log knows, whose name matches; * stands for any characters, or none
    !orders-dlq never this topic, whatever the patterns say

All members evaluate the patterns of all sessions, on the thread that heartbeats. So matching must be fast for every
pattern, and the same in every version of Python: a glob is looked for from left to right, and never goes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

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
