"""Treats message keys as subjects, that is tokens between dots: matches wildcards, finds a key's partition. Pure.

In a pattern `*` stands for any one token, and `>` at the end for one or more tokens.
"""

from __future__ import annotations

import reprlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from marshal_py.errors import BadRequest, InvalidOption

SEPARATOR: Final = "."
ONE: Final = "*"  # any single token
REST: Final = ">"  # one or more tokens, at the end

Key = str | bytes

KEY_SHOWN: Final = 100  # characters of a key in the text of an error
_shortened: Final = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = KEY_SHOWN


def shown(key: object) -> str:
    """Returns a key for the text of an error: its repr, without the middle of a long one."""
    return _shortened.repr(key)


def exact(name: str, key: object) -> bytes:
    """Returns the bytes of one key: a text in UTF-8 without wildcards, or bytes as they are. `name`: the argument.
    Raises BadRequest."""
    if isinstance(key, bytes):
        return key
    if not isinstance(key, str) or not key:
        raise BadRequest(f"{name}={shown(key)} is no key: give a text that is not empty, or bytes")
    if has_wildcard(key):
        raise BadRequest(
            f"{name}={shown(key)} has a wildcard: multi_last takes wildcards; give a literal * or > as bytes"
        )
    return _encoded(name, key)


def _encoded(name: str, text: str) -> bytes:
    """Returns a text in UTF-8, with bytes of a command line that are none as they were. Raises BadRequest."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name}={shown(text)} has no form in UTF-8: give bytes") from error


def has_wildcard(pattern: str) -> bool:
    """Returns whether one of the pattern's tokens is `*` or `>`."""
    tokens = pattern.split(SEPARATOR)
    return ONE in tokens or REST in tokens


def is_pattern(pattern: str) -> bool:
    """Returns whether no token of the pattern is empty, and only the last one is `>`."""
    tokens = pattern.split(SEPARATOR)
    return "" not in tokens and REST not in tokens[:-1]


def matcher(pattern: Key) -> Callable[[bytes], bool]:
    """Returns a function that says whether a key matches: bytes exactly, a text token by token (no UTF-8 matches no
    wildcard). Raises BadRequest for a `>` that is not last, or an empty token."""
    if isinstance(pattern, bytes):
        return lambda key: key == pattern
    if not isinstance(pattern, str) or not pattern:
        raise BadRequest(f"multi_last has {shown(pattern)}: a key is a text that is not empty, or bytes")
    if not has_wildcard(pattern):
        wanted = _encoded("multi_last", pattern)
        return lambda key: key == wanted
    if not is_pattern(pattern):
        raise BadRequest(
            f"multi_last has {shown(pattern)}: `>` stands for the rest, so only the last token may be it; no token is "
            "empty"
        )
    _encoded("multi_last", pattern)
    matches_tokens = token_matcher(pattern)

    def matches(key: bytes) -> bool:
        try:
            return matches_tokens(key.decode().split(SEPARATOR))
        except UnicodeDecodeError:
            return False

    return matches


def token_matcher(pattern: str) -> Callable[[Sequence[str]], bool]:
    """Returns a function that says whether the tokens of a key match the pattern, for which `is_pattern` holds."""
    tokens = pattern.split(SEPARATOR)
    rest = tokens[-1] == REST
    fixed = tokens[:-1] if rest else tokens

    def matches(found: Sequence[str]) -> bool:
        if len(found) < len(fixed) + 1 if rest else len(found) != len(fixed):
            return False
        return all(want in (ONE, got) for want, got in zip(fixed, found, strict=False))

    return matches


def murmur2(data: bytes) -> int:
    """Returns Kafka's own hash of a key (org.apache.kafka.common.utils.Utils.murmur2), unsigned, 32 bits."""
    mask, factor = 0xFFFFFFFF, 0x5BD1E995
    result = (0x9747B28C ^ len(data)) & mask
    whole = len(data) & ~3
    for at in range(0, whole, 4):
        part = int.from_bytes(data[at : at + 4], "little") * factor & mask
        part = (part ^ part >> 24) * factor & mask
        result = result * factor & mask ^ part
    if tail := data[whole:]:
        result = (result ^ int.from_bytes(tail, "little")) * factor & mask
    result = (result ^ result >> 13) * factor & mask
    return result ^ result >> 15


def _murmur2_partition(key: bytes, partitions: int) -> int:
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def _crc32_partition(key: bytes, partitions: int) -> int:
    return zlib.crc32(key) % partitions


def _crc32_or_random(key: bytes, partitions: int) -> int | None:
    return _crc32_partition(key, partitions) if key else None  # librdkafka treats an empty key as it treats none


# Partitioners by librdkafka's names. The Java producer's default is murmur2_random, librdkafka's consistent_random.
# "all" means that the producers of the topic are not known, so every partition is read.
ALL: Final = "all"
Partitioner = Callable[[bytes, int], int | None]  # of a key and the number of partitions; None: any of them
PARTITIONERS: Final[Mapping[str, Partitioner | None]] = {
    ALL: None,
    "murmur2_random": _murmur2_partition,
    "murmur2": _murmur2_partition,
    "consistent_random": _crc32_or_random,
    "consistent": _crc32_partition,
}


@dataclass(frozen=True, slots=True)
class SubjectKey:
    """Makes the keys of messages from their subjects; `subject_key` makes one of these. It can be pickled.

    Messages with the same parts of their subjects get the same key, hence the same partition. It is the seed's choice
    of "partitioning wildcards" (partitioned consumer groups, "Partitioned consumer group configuration"). In Kafka the
    producer makes it, because the key that it gives to a message decides the partition.

    `pattern`, `tokens`: as they were given to `subject_key`. `places`: which tokens of a subject make the key, from 0.
    """

    pattern: str | None
    tokens: tuple[int, ...]
    places: tuple[int, ...]

    def __call__(self, subject: str | bytes | bytearray) -> bytes:
        """Returns the key of a message with this subject: the chosen tokens with dots between them, in UTF-8.

        Raises InvalidOption if the subject does not match the pattern, or has an empty token.
        """
        if not isinstance(subject, str | bytes | bytearray):
            raise InvalidOption("subject", subject, "a text, or bytes")
        # Bytes that are no UTF-8 come back as they are from `encode`.
        text = subject if isinstance(subject, str) else bytes(subject).decode(errors="surrogateescape")
        tokens = text.split(SEPARATOR)
        if "" in tokens or not self._matches(tokens):
            wanted = f"at least {max(self.tokens)} tokens" if self.pattern is None else f"{self.pattern!r}"
            raise InvalidOption("subject", subject, f"it must match {wanted}, and no token may be empty")
        return SEPARATOR.join([tokens[place] for place in self.places]).encode(errors="surrogateescape")

    def _matches(self, tokens: Sequence[str]) -> bool:
        return len(tokens) > max(self.places) if self.pattern is None else token_matcher(self.pattern)(tokens)


def subject_key(pattern: str | None = None, *, tokens: Sequence[int]) -> SubjectKey:
    """Returns a function that makes the key of a message from its subject, for the producer of any library.

    `pattern`: the form of all subjects, tokens between dots: `*` stands for one token, `>` at the end for one or more.
    `tokens`: which of its `*` make the key, counted from 1, in the order that the key has them. So with
    `key = subject_key("orders.*.*", tokens=(2, 1))`, `key("orders.eu.42")` is `b"42.eu"`. Without a pattern all tokens
    are counted. All producers of a topic must choose the same tokens in the same order.

    Raises InvalidOption, as the function does for a subject that does not match. Source: the seed's
    partitioning wildcards.
    """
    if pattern is None:
        wildcards = None
    elif not isinstance(pattern, str) or not is_pattern(pattern):
        raise InvalidOption("pattern", pattern, "tokens between dots; only the last may be `>`, and none is empty")
    else:
        wildcards = [place for place, token in enumerate(pattern.split(SEPARATOR)) if token == ONE]
        if not wildcards:
            raise InvalidOption("pattern", pattern, "it needs at least one `*`, of which the key is made")
    most = None if wildcards is None else len(wildcards)
    chosen = tuple(tokens) if isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes) else ()
    fits = all(type(one) is int and one >= 1 and (most is None or one <= most) for one in chosen)
    if not chosen or not fits or len(set(chosen)) < len(chosen):
        of = "from 1 on" if most is None else f"from 1 to {most}, for the `*` of {pattern!r}"
        raise InvalidOption("tokens", tokens, f"at least one number {of}, each once")
    places = tuple(one - 1 if wildcards is None else wildcards[one - 1] for one in chosen)
    return SubjectKey(pattern, chosen, places)
