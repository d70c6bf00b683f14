"""Signatures of admin records, by Ed25519: what is signed, and whether it fits (PROTOCOL.md, rule 11).

The package `cryptography` (extra `keys`) does the arithmetic. Without it this library reads record version 1 only: a
group with keys is opaque to it, and it stops there by name. It never guesses what a signed record does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.codec import RECORD_VERSION, SIGNED_VERSION
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import (
    RECORD_TYPES,
    GroupConfig,
    Record,
    ReleaseGroup,
    SetPosition,
    Signed,
    Topology,
)

try:  # the package alone, which is small: the arithmetic is imported when the first signature comes
    import cryptography
except ImportError:
    cryptography = None  # type: ignore[assignment]  # F11.5

VERIFIES: Final = cryptography is not None
READS_VERSION: Final = (
    SIGNED_VERSION if VERIFIES else RECORD_VERSION
)  # of a group's records: the highest that this process reads

VERIFIED_MAX: Final = 1_024  # verdicts that are remembered: copies of a record then cost what other bytes cost

_DOMAIN: Final = b"marshal admin record"
_PRIME: Final = 2**255 - 19
_FOREIGN: Final = frozenset({0, 1, _PRIME - 1})  # y of points on which implementations disagree


class SigningKey(NamedTuple):
    """A key of whom may administer groups: its public half, and what signs with the private one."""

    public: bytes
    sign: Callable[[bytes], bytes]


def needs_key(record: Record) -> bool:
    """Returns whether only a holder of a key may write the record to a group with keys (F11.2)."""
    return isinstance(record, ReleaseGroup | SetPosition | GroupConfig) or (
        isinstance(record, Topology) and record.token != NONE
    )


def signed(record: Record, group: str, incarnation: bytes, observed: int, key: SigningKey) -> Signed:
    """Returns the record with a signature. `observed`: the offset of the group's settings (F11.3)."""
    kind, body = RECORD_TYPES.index(type(record)), codec.body_of(record)
    return Signed(key.public, key.sign(message_of(incarnation, group, observed, kind, body)), observed, kind, body)


def message_of(incarnation: bytes, group: str, observed: int, kind: int, body: bytes) -> bytes:
    """Returns the bytes that a signature is over (F11.3)."""
    name, offset = group.encode(), observed.to_bytes(8, "big")
    return b"".join([_DOMAIN, incarnation, bytes((len(name),)), name, offset, bytes((kind,)), body])


@lru_cache(VERIFIED_MAX)
def fits(record: Signed, incarnation: bytes, group: str) -> bool:
    """Returns whether the signature is one by the key that the record names (F11.3)."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    y = int.from_bytes(record.key, "little") & (2**255 - 1)
    if y >= _PRIME or y in _FOREIGN:
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(record.key)
        key.verify(record.signature, message_of(incarnation, group, record.observed, record.kind, record.body))
    except (InvalidSignature, ValueError):
        return False
    return True
