"""The oracle's own reading of bytes: MessagePack, the envelope (4.1) and the table of records (4.2).

Written from PROTOCOL.md alone, slow and plain on purpose: it exists to disagree with `marshal_py.protocol` whenever one
of the two misreads the text. So it may import the standard library only, and nothing of marshal_py.
"""

import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

MAGIC = b"Mr"
GENESIS_TYPE, SNAPSHOT_TYPE, HIGHEST_TYPE, SIGNED_TYPE = 0, 14, 15, 17
# What a Genesis must name (L3, L6): the hash of L2, and this version of the protocol.
HASH_NAME = "murmur3-x86-32"
PROTOCOL_VERSION = 2
MAX_OFFSET = 2**63 - 1
MAX_MS = 2**53
MAX_U64 = 2**64 - 1

# E6: at most 100 arrays or maps inside each other, empty ones included. What the innermost holds is no level more.
MAX_DEPTH = 100


# ---------------------------------------------------------------------------------------------------------------------
# MessagePack


class Foreign(NamedTuple):
    """Stands for a well-formed MessagePack value that no field of the protocol accepts.

    `kind` says which: a map, an ext, or a str that is not utf-8.
    """

    kind: str


class _Reader:
    """Reads bytes from first to last, and refuses to read past the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError("the input ends inside a value")
        self.at += size
        return self.data[self.at - size : self.at]

    def unsigned(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def signed(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big", signed=True)


def decode_messagepack(data: bytes) -> object:
    """Returns the one value that `data` consists of. Raises ValueError if it is not exactly one well-formed value."""
    reader = _Reader(data)
    value = _value(reader, 1)
    if reader.at != len(data):
        raise ValueError("something follows the value")
    return value


def _value(reader: _Reader, depth: int) -> object:
    head = reader.unsigned(1)
    if depth > MAX_DEPTH and (0x80 <= head <= 0x9F or 0xDC <= head <= 0xDF):
        raise ValueError("nested too deep")
    if head <= 0x7F:
        return head
    if head <= 0x8F:
        return _map(reader, head & 0x0F, depth)
    if head <= 0x9F:
        return _array(reader, head & 0x0F, depth)
    if head <= 0xBF:
        return _str(reader.take(head & 0x1F))
    if head >= 0xE0:
        return head - 0x100
    if head in (0xDC, 0xDD):
        return _array(reader, reader.unsigned(2 if head == 0xDC else 4), depth)
    if head in (0xDE, 0xDF):
        return _map(reader, reader.unsigned(2 if head == 0xDE else 4), depth)
    return _scalar(reader, head)


def _scalar(reader: _Reader, head: int) -> object:
    """Reads a value with a header byte of C0 to DB. None of these values contains others."""
    if head == 0xC0:
        return None
    if head in (0xC2, 0xC3):
        return head == 0xC3
    if head in (0xC4, 0xC5, 0xC6):
        return reader.take(reader.unsigned(1 << (head - 0xC4)))
    if head in (0xC7, 0xC8, 0xC9):
        # The byte between the length and the data of an ext is its type, which nobody reads.
        reader.take(reader.unsigned(1 << (head - 0xC7)) + 1)
        return Foreign("ext")
    if head in (0xCA, 0xCB):
        form, size = (">f", 4) if head == 0xCA else (">d", 8)
        number: float = struct.unpack(form, reader.take(size))[0]
        return number
    if 0xCC <= head <= 0xCF:
        return reader.unsigned(1 << (head - 0xCC))
    if 0xD0 <= head <= 0xD3:
        return reader.signed(1 << (head - 0xD0))
    if 0xD4 <= head <= 0xD8:
        reader.take((1 << (head - 0xD4)) + 1)
        return Foreign("ext")
    if 0xD9 <= head <= 0xDB:
        return _str(reader.take(reader.unsigned(1 << (head - 0xD9))))
    raise ValueError("C1 is no MessagePack")


def _str(raw: bytes) -> object:
    """Returns the text, or a Foreign if the bytes are not utf-8.

    This is the one place that decides about bad utf-8 (E6, E7). A known field refuses a Foreign. An unknown trailing
    element may be one, since its content is not read. To refuse bad utf-8 everywhere, let the error through here.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return Foreign("str")


def _array(reader: _Reader, count: int, depth: int) -> object:
    # Every element takes a byte at least, so a count beyond the input is refused before anything is built.
    if count > len(reader.data) - reader.at:
        raise ValueError("the input ends inside an array")
    return tuple(_value(reader, depth + 1) for _ in range(count))


def _map(reader: _Reader, count: int, depth: int) -> object:
    if 2 * count > len(reader.data) - reader.at:
        raise ValueError("the input ends inside a map")
    for _ in range(2 * count):
        _value(reader, depth + 1)
    return Foreign("map")


# ---------------------------------------------------------------------------------------------------------------------
# Fields: every check returns the value as the fold must see it, or raises ValueError (E6; nothing is clamped).

Check = Callable[[object], object]


class Field(NamedTuple):
    name: str
    check: Check
    # Empty for a field that must be there, else the one default of a trailing field (E7).
    default: tuple[object, ...] = ()


def integer(low: int, high: int) -> Check:
    def check(value: object) -> object:
        # In Python a bool is an int; in the protocol it is none (E6).
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"no integer of {low}...{high}")
        return value

    return check


def string(low: int) -> Check:
    def check(value: object) -> object:
        if not isinstance(value, str) or not low <= len(value.encode("utf-8")) <= 255:
            raise ValueError(f"no string of {low}...255 bytes")
        return value

    return check


def one_of(*texts: str) -> Check:
    def check(value: object) -> object:
        if not isinstance(value, str) or value not in texts:
            raise ValueError(f"none of {texts}")
        return value

    return check


def binary(low: int, high: int | None) -> Check:
    def check(value: object) -> object:
        if not isinstance(value, bytes) or len(value) < low or (high is not None and len(value) > high):
            raise ValueError("no byte string of the right size")
        return value

    return check


def boolean(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError("no boolean")
    return value


def array(most: int, item: Check, least: int = 0) -> Check:
    def check(value: object) -> object:
        # A Foreign is a tuple too, by way of NamedTuple, and no array.
        if not isinstance(value, tuple) or isinstance(value, Foreign) or not least <= len(value) <= most:
            raise ValueError(f"no array of {least}...{most}")
        return tuple(item(element) for element in value)

    return check


def nested(*fields: Field) -> Check:
    def check(value: object) -> object:
        if not isinstance(value, tuple) or isinstance(value, Foreign):
            raise ValueError("no array")
        return _fields(fields, value)

    return check


def or_nil(inner: Check) -> Check:
    def check(value: object) -> object:
        return None if value is None else inner(value)

    return check


def genesis_array(value: object) -> object:
    """Reads the Genesis inside a Snapshot. It is "an array like record 0", so it starts with the type number 0."""
    if not isinstance(value, tuple) or isinstance(value, Foreign) or not value:
        raise ValueError("no Genesis")
    integer(0, 0)(value[0])
    return _fields(RECORDS[0][1], value[1:])


def _fields(fields: tuple[Field, ...], values: tuple[object, ...]) -> dict[str, Any]:
    """Returns the named fields. Missing trailing ones get defaults; elements after the last known one are not read
    (E7).
    """
    result: dict[str, Any] = {}
    for index, field in enumerate(fields):
        if index < len(values):
            result[field.name] = field.check(values[index])
        elif field.default:
            result[field.name] = field.default[0]
        else:
            raise ValueError(f"{field.name} is missing")
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The table of 4.2, in its words.

ID, TEXT, BIN16, FLAG = string(1), string(0), binary(16, 16), boolean
OFFSET, OFFSET_OR_NONE = integer(0, MAX_OFFSET), integer(-1, MAX_OFFSET)
MS, COUNT, U64 = integer(0, MAX_MS), integer(0, 2**53), integer(0, MAX_U64)
PARTITION, PARTITION_OR_WHOLE, PARTITIONS = integer(0, 99_999), integer(-1, 99_999), integer(1, 100_000)


def text_field(name: str) -> Field:
    return Field(name, TEXT, ("",))


IN_FLIGHT, ATTEMPTS = Field("in_flight", COUNT, (0,)), Field("attempts", COUNT, (0,))
PROGRESS = Field("progress", binary(0, 512), (b"",))
CLAIM_STATE = nested(
    Field("epoch", OFFSET), Field("position", OFFSET), Field("lag", COUNT, (0,)), IN_FLIGHT, ATTEMPTS, PROGRESS
)
MESSAGE_RANGE = nested(Field("epoch", OFFSET), Field("from", OFFSET), Field("start", OFFSET), Field("to", OFFSET))
PAUSE_WAITED = nested(Field("pause_change", OFFSET), Field("waited_ms", MS))
CHECKPOINT = nested(Field("at", OFFSET), Field("state", U64), Field("chain", U64), Field("fold", integer(1, 255)))
MOVE = nested(
    Field("topic", ID), Field("partition", PARTITION), Field("observed", OFFSET_OR_NONE), Field("position", OFFSET)
)
MAPPING = nested(Field("member", ID), Field("partitions", array(100_000, PARTITION)))
OBSERVED, SESSION = Field("observed", OFFSET_OR_NONE), Field("session", OFFSET)
BY, REASON = text_field("by"), text_field("reason")

RECORDS: dict[int, tuple[str, tuple[Field, ...]]] = {
    0: (
        "Genesis",
        (
            Field("incarnation", BIN16),
            Field("partitions", PARTITIONS),
            Field("hash", TEXT),
            Field("protocol", integer(1, 255)),
        ),
    ),
    1: (
        "Join",
        (
            Field("client_id", ID),
            Field("instance_id", BIN16),
            Field("mode", integer(1, 2)),
            Field("interval_ms", integer(1_000, 600_000)),
            Field("topics", array(1_000, ID)),
            Field("predecessor", OFFSET_OR_NONE, (-1,)),
            text_field("member"),
            Field("capacity", integer(1, 1_000_000), (1,)),
            Field("claims_max", integer(0, 100_000), (0,)),
            Field("rank", integer(0, 1_000_000), (0,)),
            Field("priority", integer(0, 9), (0,)),
            text_field("priority_group"),
            Field("min_pending", COUNT, (0,)),
            Field("min_ack_pending", COUNT, (0,)),
            Field("reads_version", integer(1, 255), (1,)),
            text_field("library"),
            text_field("witness"),
        ),
    ),
    2: (
        "Heartbeat",
        (
            SESSION,
            Field("sequence", integer(0, MAX_OFFSET)),
            Field("claims", array(10_000, CLAIM_STATE), ((),)),
            Field("ready", array(10_000, OFFSET), ((),)),
            Field("pause", or_nil(PAUSE_WAITED), (None,)),
            Field("digest", or_nil(CHECKPOINT), (None,)),
            Field("idle_ms", MS, (0,)),
        ),
    ),
    3: ("Leave", (SESSION, REASON)),
    4: ("Evict", (SESSION, Field("observed", OFFSET), Field("waited_ms", MS), BY)),
    5: (
        "ClaimingPartition",
        (
            SESSION,
            Field("topic", TEXT),
            Field("partition", PARTITION_OR_WHOLE),
            OBSERVED,
            Field("start", OFFSET_OR_NONE, (-1,)),
        ),
    ),
    6: (
        "ReleasingPartition",
        (
            SESSION,
            Field("epoch", OFFSET),
            Field("position", OFFSET_OR_NONE),
            Field("successor", OFFSET_OR_NONE, (-1,)),
            REASON,
            Field("observed", OFFSET_OR_NONE, (-1,)),
            Field("give", OFFSET_OR_NONE, (-1,)),
            ATTEMPTS,
            IN_FLIGHT,
            PROGRESS,
            text_field("parked"),
        ),
    ),
    7: (
        "ClaimingMessages",
        (SESSION, Field("ranges", array(10_000, MESSAGE_RANGE, least=1)), Field("nonce", OFFSET, (0,))),
    ),
    8: (
        "ReleaseGroup",
        (
            OBSERVED,
            Field("token", OFFSET_OR_NONE),
            Field("duration_ms", integer(0, 86_400_000)),
            Field("waited_ms", MS, (0,)),
            Field("msg_expire_time_ms", MS, (0,)),
            REASON,
            BY,
        ),
    ),
    9: (
        "SetPosition",
        (Field("token", OFFSET), Field("moves", array(100_000, MOVE)), Field("resume", FLAG, (False,)), BY),
    ),
    10: (
        "Topology",
        (
            Field("topic", ID),
            Field("partitions", PARTITIONS),
            OBSERVED,
            Field("token", OFFSET_OR_NONE, (-1,)),
            BY,
            text_field("topic_id"),
        ),
    ),
    11: (
        "GroupConfig",
        (
            OBSERVED,
            Field("token", OFFSET_OR_NONE, (-1,)),
            Field("mode", integer(0, 2), (0,)),
            Field("deleted", FLAG, (False,)),
            text_field("policy"),
            Field("priority_groups", array(16, ID), ((),)),
            Field("priority_timeout_ms", MS, (0,)),
            text_field("ack_policy"),
            Field("max_members", integer(0, 100_000), (0,)),
            Field("members", array(10_000, ID), ((),)),
            Field("mappings", array(10_000, MAPPING), ((),)),
            Field("max_batch", COUNT, (0,)),
            Field("max_expires_ms", MS, (0,)),
            Field("max_bytes", COUNT, (0,)),
            Field("max_deliver", COUNT, (0,)),
            BY,
            Field("on_topic_recreated", one_of("", "fail", "earliest"), ("",)),
            Field("failover_ms", MS, (0,)),
            Field("lag_weighted", FLAG, (False,)),
            Field("release_behind_ms", MS, (0,)),
            Field("admin_keys", array(16, binary(32, 32)), ((),)),
        ),
    ),
    12: ("StepDown", (SESSION, OBSERVED, REASON, BY)),
    13: (
        "Note",
        (
            Field("session", OFFSET_OR_NONE),
            Field("kind", ID),
            text_field("topic"),
            Field("partition", PARTITION_OR_WHOLE, (-1,)),
            Field("from", OFFSET_OR_NONE, (-1,)),
            Field("to", OFFSET_OR_NONE, (-1,)),
            text_field("text"),
        ),
    ),
    14: (
        "Snapshot",
        (
            Field("genesis", genesis_array),
            Field("instance", BIN16),
            Field("at", OFFSET),
            Field("chunk", integer(0, 99_999)),
            Field("chunks", PARTITIONS),
            Field("state", U64),
            Field("chain", U64),
            Field("data", binary(0, None)),
        ),
    ),
    SIGNED_TYPE: (
        "Signed",
        (
            Field("key", binary(32, 32)),
            Field("signature", binary(64, 64)),
            Field("observed", OFFSET),
            Field("kind", integer(1, 255)),
            Field("body", binary(0, None)),
        ),
    ),
    15: ("SeekingPartition", (SESSION, Field("epoch", OFFSET), Field("position", OFFSET))),
}


class Record(NamedTuple):
    type: str
    # Any, because the fold reads values whose types the table above has already checked.
    fields: dict[str, Any]


def decode_record(number: int, body: bytes, version: int = 2) -> Record:
    """Returns the record that `body` holds under the envelope's type `number`. Raises ValueError (E6)."""
    values = decode_messagepack(body)
    if not isinstance(values, tuple) or isinstance(values, Foreign) or not values:
        raise ValueError("a body is one array that starts with the type")
    integer(number, number)(values[0])
    name, fields = RECORDS[number]
    if name == "GroupConfig" and version < 2:  # E7: its last field is of version 2
        return Record(name, {**_fields(fields[:-1], values[1:]), "admin_keys": ()})
    record = Record(name, _fields(fields, values[1:]))
    # 4.2: a `topic?` is empty only together with partition -1 (the pin).
    if name == "ClaimingPartition" and record.fields["topic"] == "" and record.fields["partition"] != -1:
        raise ValueError("a partition without a topic")
    return record


# ---------------------------------------------------------------------------------------------------------------------
# The envelope


class Envelope(NamedTuple):
    version: int
    group: str
    record_version: int
    type: int
    body: bytes


def parse_envelope(value: bytes | None) -> Envelope | None:
    """Returns the envelope's parts, or None for garbage that needs no CRC to be seen (E1). All versions have the same
    shape.
    """
    if value is None or len(value) < 14 or len(value) < 14 + value[11]:
        return None
    if value[:2] != MAGIC or int.from_bytes(value[3:7], "big") != len(value):
        return None
    end = 12 + value[11]
    try:
        group = value[12:end].decode("utf-8")
    except UnicodeDecodeError:
        return None
    return Envelope(value[2], group, value[end], value[end + 1], value[end + 2 :])


def crc_fits(value: bytes, incarnation: bytes) -> bool:
    """Returns True if the CRC fits this value in this incarnation (4.1)."""
    return zlib.crc32(incarnation + value[:7] + value[11:]) == int.from_bytes(value[7:11], "big")
