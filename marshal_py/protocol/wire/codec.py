"""Converts records to bytes and back: the only file that knows the wire format (PROTOCOL.md 4).

`encode` turns a record into the value of a Kafka message; `open_envelope` reads a value's envelope and `decode_body`
its record. They judge bytes, never the world. A value that is not ours gives None and never an exception: a foreign
writer to the topic must not be able to stop its readers (S13).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from struct import Struct as Pack
from typing import Any, Final, NamedTuple
from zlib import crc32

from msgspec import DecodeError, Raw, Struct
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import astuple

from marshal_py.errors import InvalidRecord
from marshal_py.protocol.wire.identity import ID_BYTES_MAX, NONE
from marshal_py.protocol.wire.records import (
    RECORD_TYPES,
    Genesis,
    GroupConfig,
    Record,
    ReleaseGroup,
    SetPosition,
    Signed,
    Snapshot,
    Topology,
)

try:  # the package alone, which is small: the arithmetic is imported when the first signature comes
    import cryptography
except ImportError:
    cryptography = None  # type: ignore[assignment]  # F11.5

MAGIC: Final = b"Mr"
ENVELOPE_VERSION: Final = 1
RECORD_VERSION: Final = 1  # of a group's records that neither name keys nor are signed
SIGNED_VERSION: Final = 2  # of those that do or are (keys.md)
LOG_RECORD_VERSION: Final = 1  # of Genesis and Snapshot: the only one (E3)
TYPE_MAX: Final = len(RECORD_TYPES) - 1
GENESIS: Final = 0
SNAPSHOT: Final = 14
CONFIG: Final = 11
SIGNED: Final = 17  # logs have records of an invented type 16, which nobody reads
HEADER_BYTES: Final = 14  # without the group id
VALUE_BYTES_MAX: Final = 900_000  # a broker's default message limit is 1 MiB; leaves room for its own framing

DEPTH_MAX: Final = 100  # E6: far below any interpreter's recursion limit, far above what records need

_NOT_CONTAINERS: Final = bytes(b for b in range(256) if not (0x80 <= b < 0xA0 or 0xDC <= b < 0xE0))
_FIXSTR_LENGTH: Final = 0x1F  # bits of a fixstr's first byte that hold its length
_FIX_COUNT: Final = 0x0F  # bits of a fixarray's or fixmap's first byte that hold its count
# For 0xC4-0xDF: bytes of the length field, fixed payload bytes, children per counted element.
_FORMS: Final = (
    *((width, 0, 0) for width in (1, 2, 4)),  # bin 8, 16, 32
    *((width, 1, 0) for width in (1, 2, 4)),  # ext 8, 16, 32
    *((0, payload, 0) for payload in (4, 8)),  # float 32, 64
    *((0, payload, 0) for payload in (1, 2, 4, 8) * 2),  # uint, int
    *((0, payload, 0) for payload in (2, 3, 5, 9, 17)),  # fixext 1, 2, 4, 8, 16
    *((width, 0, 0) for width in (1, 2, 4)),  # str 8, 16, 32
    *((width, 0, per) for per in (1, 2) for width in (2, 4)),  # array 16, 32, map 16, 32
)
_HEADER: Final = Pack(">2sBIIB").unpack_from
_DECODERS: Final = tuple(Decoder(kind) for kind in RECORD_TYPES)
_SIGNED: Final = Decoder(Signed)
_ENCODER: Final = Encoder()
_ELEMENTS: Final = Decoder(list[Raw])
_CONFIG_ELEMENTS: Final = len(GroupConfig.__struct_fields__)  # in version 1: the type, and all fields but the keys


# Group ("" for Genesis and Snapshot only), envelope version, record version, type, body, and the decoded record of a
# Genesis or Snapshot (None for other types). A plain tuple, because one is made for every record that is folded.
Envelope = tuple[str, int, int, int, bytes, Genesis | Snapshot | None]


def encode(record: Record | Signed, group: str, incarnation: bytes, version: int = RECORD_VERSION) -> bytes:
    """Returns the value to append. `group`: "" for Genesis and Snapshot, which always have LOG_RECORD_VERSION;
    `incarnation` seeds the checksum; `version`: at least that. Raises InvalidRecord out of bounds (E6)."""
    kind = SIGNED if isinstance(record, Signed) else RECORD_TYPES.index(type(record))
    try:
        body = body_of(record)
        group_bytes = group.encode()
    except (ValueError, OverflowError, TypeError) as error:  # not utf-8, not a MessagePack integer, or of a wrong type
        raise InvalidRecord(type(record).__name__, str(error)) from error
    if len(group_bytes) > ID_BYTES_MAX:
        raise InvalidRecord(
            type(record).__name__, f"its group id has {len(group_bytes)} bytes, {ID_BYTES_MAX} is the limit"
        )
    if bool(group_bytes) == (kind in (GENESIS, SNAPSHOT)):
        raise InvalidRecord(type(record).__name__, "Genesis and Snapshot have an empty group id, and only they (E2)")
    length = HEADER_BYTES + len(group_bytes) + len(body)
    if length > VALUE_BYTES_MAX and kind != SNAPSHOT:
        raise InvalidRecord(type(record).__name__, f"it has {length} bytes, {VALUE_BYTES_MAX} is the limit")
    try:
        (_SIGNED if kind == SIGNED else _DECODERS[kind]).decode(body)
    except (DecodeError, ValueError) as error:
        raise InvalidRecord(type(record).__name__, str(error)) from error
    head = MAGIC + bytes((ENVELOPE_VERSION,)) + length.to_bytes(4, "big")
    if isinstance(record, Signed) or (isinstance(record, GroupConfig) and record.admin_keys):
        version = max(version, SIGNED_VERSION)  # F11.1, F11.3
    version = version if group_bytes else LOG_RECORD_VERSION
    tail = bytes((len(group_bytes),)) + group_bytes + bytes((version, kind)) + body
    checksum = crc32(tail, crc32(head, crc32(incarnation)))
    return head + checksum.to_bytes(4, "big") + tail


def body_of(record: Record | Signed) -> bytes:
    """Returns the record's body, unchecked."""
    return _ENCODER.encode(_trimmed(record))


def _trimmed(struct: Struct) -> list[Any]:
    """Returns the fields as a list, the type number first, without the last ones that have their defaults (E7)."""
    values = list(astuple(struct))
    defaults = struct.__struct_defaults__
    while len(values) > len(struct.__struct_fields__) - len(defaults):
        default = defaults[len(values) - 1 - len(struct.__struct_fields__)]
        if values[-1] != default or type(values[-1]) is not type(default):
            break
        values.pop()
    tag = struct.__struct_config__.tag
    return [*(() if tag is None else (tag,)), *map(_flat, values)]


def _flat(value: Any) -> Any:
    """Returns the value of a field; structs in it become lists by `_trimmed`."""
    if isinstance(value, Struct):
        return _trimmed(value)
    return [_flat(each) for each in value] if type(value) is tuple and value and isinstance(value[0], Struct) else value


def is_ours(value: bytes | None) -> bool:
    """Returns whether a value has our magic and its own length, so that this library wrote it, in whatever version."""
    if value is None or len(value) < HEADER_BYTES:
        return False
    magic, _, size, _, _ = _HEADER(value)
    return bool(magic == MAGIC and size == len(value))


def open_envelope(value: bytes | None, seed: int) -> Envelope | None:
    """Returns a value's envelope, None for garbage (E1, E2). `seed`: crc32(incarnation), or -1 before the Genesis."""
    if value is None or len(value) < HEADER_BYTES:
        return None
    magic, version, size, checksum, group_bytes = _HEADER(value)
    at = 12 + group_bytes
    if magic != MAGIC or size != len(value) or at + 2 > size:
        return None
    if not group_bytes:
        return _open_unowned(value, seed)
    # The CRC first: it tells our bytes from foreign ones.
    if seed < 0 or crc32(value[11:], crc32(value[:7], seed)) != checksum:
        return None
    try:
        return value[12:at].decode(), version, value[at], value[at + 1], value[at + 2 :], None
    except UnicodeDecodeError:
        return None


def _open_unowned(value: bytes, seed: int) -> Envelope | None:
    """Returns the envelope of a Genesis or Snapshot, whose CRC is seeded with the incarnation that it names; None for
    garbage (E2)."""
    kind = value[13]
    if kind != GENESIS and kind != SNAPSHOT:
        return None
    record = decode_body(kind, value[14:])
    if isinstance(record, Genesis):
        named = crc32(record.incarnation)
    elif isinstance(record, Snapshot):
        named = crc32(record.genesis.incarnation)
        if named != seed and (record.chain or not record.at):
            return None  # a founding Snapshot must stop readers of every incarnation (N13)
    else:
        return None
    if crc32(value[11:], crc32(value[:7], named)) != int.from_bytes(value[7:11], "big"):
        return None
    return "", value[2], value[12], kind, value[14:], record


def open_snapshot(value: bytes | None) -> Snapshot | None:
    """Returns the Snapshot in a value, of any incarnation, to search a log for a beginning (N9); or None."""
    if value is None or len(value) < HEADER_BYTES or value[11] or value[13] != SNAPSHOT:
        return None
    record = decode_body(SNAPSHOT, value[14:])
    if not isinstance(record, Snapshot) or (value[2], value[12]) != (ENVELOPE_VERSION, LOG_RECORD_VERSION):
        return None
    return record if open_envelope(value, crc32(record.genesis.incarnation)) is not None else None


def open_record(value: bytes | None, seed: int) -> Record | None:
    """Returns the record in a value, to look up one that a fold has accepted; or None. Of a Signed, the record that it
    carries. `seed`: as in `open_envelope`."""
    envelope = open_envelope(value, seed)
    if envelope is None:
        return None
    _, _, version, kind, body, record = envelope
    if kind != SIGNED:
        return record or decode_body(kind, body, version)
    carrier = decode_signed(body)
    return None if carrier is None else decode_body(carrier.kind, carrier.body)


def decode_signed(body: bytes) -> Signed | None:
    """Returns the Signed of a body of its type, or None if the body is malformed (E6)."""
    try:
        return None if len(body) > DEPTH_MAX and _too_deep(body) else _SIGNED.decode(body)
    except (DecodeError, ValueError):
        return None


def decode_body(kind: int, body: bytes, version: int = SIGNED_VERSION) -> Record | None:
    """Returns the record of a body of type `kind`, or None if the body is malformed (E6) or of another type than those
    of RECORD_TYPES. `version`: of the record."""
    # Each level takes a byte, so a short body cannot be too deep; a long one seldom has so many container bytes.
    if len(body) > DEPTH_MAX and len(body.translate(None, _NOT_CONTAINERS)) > DEPTH_MAX and _too_deep(body):
        return None
    try:
        if kind == CONFIG and version < SIGNED_VERSION:
            elements = _ELEMENTS.decode(body)  # what follows the fields of this version is not read (E7)
            body = body if len(elements) <= _CONFIG_ELEMENTS else _ENCODER.encode(elements[:_CONFIG_ELEMENTS])
        return _DECODERS[kind].decode(body)
    except (DecodeError, ValueError, IndexError):
        return None  # msgspec reports bad utf-8 as UnicodeDecodeError, a ValueError


def _too_deep(body: bytes) -> bool:
    """Returns whether the MessagePack value nests deeper than DEPTH_MAX; malformed bytes are left to the decoder."""
    left: list[int] = []  # elements still to come, per open container
    at, size = 0, len(body)
    while at < size:
        byte = body[at]
        at += 1
        per = children = 0
        if byte >= 0xA0 and byte < 0xC0:
            at += byte & _FIXSTR_LENGTH
        elif 0x80 <= byte < 0xA0:
            per = 2 if byte < 0x90 else 1
            children = (byte & _FIX_COUNT) * per
        elif byte >= 0xC4 and byte < 0xE0:
            width, payload, per = _FORMS[byte - 0xC4]
            count = int.from_bytes(body[at : at + width], "big")
            at += width + payload + (0 if per else count)
            children = per * count
        if per and len(left) == DEPTH_MAX:
            return True  # an empty container is a level, too
        if children:
            left.append(children)
            continue
        while left:
            left[-1] -= 1
            if left[-1]:
                break
            left.pop()
    return False


# --- Signatures of admin records, by Ed25519: what is signed, and whether it fits (PROTOCOL.md, rule 11)
#
# The package `cryptography` (extra `keys`) does the arithmetic. Without it this library reads record version 1 only: a
# group with keys is opaque to it, and it stops there by name. It never guesses what a signed record does.

VERIFIES: Final = cryptography is not None
READS_VERSION: Final = SIGNED_VERSION if VERIFIES else RECORD_VERSION  # the highest, of a group's records
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
    kind, body = RECORD_TYPES.index(type(record)), body_of(record)
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
