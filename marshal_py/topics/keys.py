"""Treats message keys as subjects, that is tokens between dots: matches wildcards, finds a key's partition. Pure.

In a pattern `*` stands for any one token, and `>` at the end for one or more tokens.
"""

from __future__ import annotations

import reprlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from marshal_py.errors import BadRequest

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
    return key.encode()


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
        wanted = pattern.encode()
        return lambda key: key == wanted
    if not is_pattern(pattern):
        raise BadRequest(
            f"multi_last has {shown(pattern)}: `>` stands for the rest, so only the last token may be it; no token is "
            "empty"
        )
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


# Partitioners by librdkafka's names. The Java producer's default is murmur2_random, librdkafka's consistent_random.
# "all" means that the producers of the topic are not known, so every partition is read.
ALL: Final = "all"
PARTITIONERS: Final[Mapping[str, Callable[[bytes, int], int] | None]] = {
    ALL: None,
    "murmur2_random": _murmur2_partition,
    "murmur2": _murmur2_partition,
    "consistent_random": _crc32_partition,
    "consistent": _crc32_partition,
}
