"""The wire form: byte layout, the worked example of PROTOCOL.md 4.3, frozen bytes, and the bounds of the tables of 4.2.

The bounds are read from PROTOCOL.md itself, so that the text, the codec and the oracle's table cannot drift apart.
`tests/fixtures/records_v2.txt` holds records as protocol 2 first wrote them; they must always decode to these values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec
import pytest

from marshal_py.errors import InvalidRecord
from marshal_py.protocol.wire import codec, progress, records
from marshal_py.protocol.wire.records import (
    Checkpoint,
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Evict,
    Genesis,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    Mapping,
    MessageRange,
    Move,
    Note,
    PauseWaited,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SeekingPartition,
    SetPosition,
    Signed,
    Snapshot,
    StepDown,
    Topology,
)
from marshal_sim.oracle import wire as oracle_wire
from tests.support import wire
from tests.support.differential_log import INCARNATION, OTHER_INCARNATION, DifferentialLog, Opened, fields_of

REPOSITORY = Path(__file__).resolve().parents[2]
PROTOCOL = (REPOSITORY / "PROTOCOL.md").read_text(encoding="utf-8")
SEED = crc32(INCARNATION)
OFFSET_MAX = 2**63 - 1


def opened(value: bytes) -> Opened:
    envelope = codec.open_envelope(value, SEED)
    assert envelope is not None
    return Opened(*envelope)


def _decoded(kind: int, body: bytes) -> Record | Signed | None:
    return codec.decode_signed(body) if kind == codec.SIGNED else codec.decode_body(kind, body)


def decoded(value: bytes) -> Record | Signed:
    """The record of a value, by the codec; the oracle must read the same."""
    envelope = opened(value)
    record = _decoded(envelope.type, envelope.body)
    assert record is not None
    judged = oracle_wire.decode_record(envelope.type, envelope.body)
    assert (judged.type, judged.fields) == (type(record).__name__, fields_of(record))
    return record


# --- layout


def test_layout() -> None:
    """E1: the table of 4.1, byte by byte."""
    value = codec.encode(Leave(5, "bye"), "grüppe", INCARNATION)
    group = "grüppe".encode()
    assert value[0:2] == b"Mr"
    assert value[2] == 1
    assert value[3:7] == len(value).to_bytes(4, "big")
    assert value[7:11] == crc32(INCARNATION + value[:7] + value[11:]).to_bytes(4, "big")
    assert value[11] == len(group) == 7
    assert value[12:19] == group
    assert (value[19], value[20]) == (1, 3)
    assert value[21:] == b"\x93\x03\x05\xa3bye"


@pytest.mark.parametrize("length", [1, 254, 255])
def test_length_of_group_ids(length: int) -> None:
    """E1: up to 255 bytes of utf-8."""
    name = "g" * length
    envelope = opened(codec.encode(Leave(5), name, INCARNATION))
    assert (envelope.group, envelope.envelope_version, envelope.record_version, envelope.type) == (name, 1, 1, 3)
    assert envelope.record is None


EXAMPLE = Heartbeat(41, 7, (ClaimState(epoch=42, position=1000, lag=5, in_flight=2, attempts=1, progress=b"\2\3\0"),))


def test_the_worked_example() -> None:
    """E1: the example of 4.3 is what is written, and both decoders read it as it is explained."""
    block = PROTOCOL.split("<!-- example:begin -->")[1].split("<!-- example:end -->")[0]
    lines = [line for line in block.split("```")[1].splitlines() if line.strip()]
    parts = [re.fullmatch(r"((?:[0-9a-f]{2} ?)+?)  +(\S.*)", line) for line in lines]
    assert all(parts), "every line is hex, two blanks at least, and what it means"
    value = bytes.fromhex("".join(part[1] for part in parts if part))
    assert value == codec.encode(EXAMPLE, "billing", bytes(range(16)))
    assert decoded(value) == EXAMPLE
    assert progress.decode(1_000, EXAMPLE.claims[0].progress) == [(1_002, 1_005, 0)]
    log = DifferentialLog()
    verdict = log.put(value)
    assert (verdict.group, verdict.reason, verdict.record) == ("billing", "session", EXAMPLE)


# --- frozen bytes

GENESIS = Genesis(INCARNATION, 16, "murmur3-x86-32", 2)
FROZEN: dict[str, Record] = {
    "Genesis": GENESIS,
    "Join": Join(
        "client-ü",
        OTHER_INCARNATION,
        2,
        15_000,
        ("orders", "événements"),
        77,
        "member",
        3,
        4,
        5,
        6,
        "pg",
        7,
        8,
        9,
        "marshal_py 0.2",
        "witness",
    ),
    "Heartbeat": Heartbeat(
        300,
        70_000,
        (ClaimState(301, 2**40, 1, 2, 3, b"\x01\x02\x00"), ClaimState(302, 0)),
        (303, OFFSET_MAX),
        PauseWaited(304, 5_000),
        Checkpoint(288, 2**64 - 1, 2**63, 1),
        60_000,
    ),
    "Leave": Leave(300, "done"),
    "Evict": Evict(300, 310, 30_000, "by"),
    "ClaimingPartition": ClaimingPartition(300, "orders", 99_999, -1, 12),
    "ReleasingPartition": ReleasingPartition(
        300, 301, 1_000, 305, "hand-over", 1_010, 1_005, 3, 4, b"\x80\x01\x01\x02", "DataTopicRecreated"
    ),
    "ClaimingMessages": ClaimingMessages(
        300, (MessageRange(301, 1_000, 1_005, 1_100), MessageRange(302, 0, 0, 1)), 2**62
    ),
    "ReleaseGroup": ReleaseGroup(-1, -1, 86_400_000, 1, 2**53, "reason", "by"),
    "SetPosition": SetPosition(400, (Move("orders", 0, -1, 5), Move("orders", 1, 301, 0)), True, "by"),
    "Topology": Topology("orders", 100_000, -1, 400, "by", "q83iXkcUT0qRnWlvSXqWCg"),
    "GroupConfig": GroupConfig(
        -1,
        400,
        2,
        False,
        "balanced",
        ("p", "q"),
        1,
        "all",
        2,
        ("m",),
        (Mapping("m", (0, 99_999)),),
        3,
        4,
        5,
        6,
        "by",
        "earliest",
        7,
        True,
        8,
    ),
    "StepDown": StepDown(300, -1, "reason", "by"),
    "Note": Note(-1, "probe", "orders", 3, 4, 5, "text"),
    "Snapshot": Snapshot(GENESIS, OTHER_INCARNATION, 4_096, 1, 2, 2**64 - 1, 3, b"\x00state"),
    "SeekingPartition": SeekingPartition(300, 301, 2**50),
    "Signed": Signed(bytes(range(32)), bytes(range(64)), 300, 8, b"body"),
}


def frozen_lines() -> list[tuple[str, str, bytes]]:
    text = (REPOSITORY / "tests" / "fixtures" / "records_v2.txt").read_text(encoding="utf-8")
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, "" if group == "-" else group, bytes.fromhex(data)) for name, group, data in rows]


def test_frozen_bytes() -> None:
    """E7: records as first written always decode to the same values, whatever fields were appended since."""
    rows = frozen_lines()
    assert [name for name, _, _ in rows] == list(NUMBERS) == list(FROZEN)
    for name, group, value in rows:
        assert opened(value).group == group
        assert opened(value).envelope_version == opened(value).record_version == 1
        assert decoded(value) == FROZEN[name]


# --- the tables of 4.2


class Bound(NamedTuple):
    """A field as the table describes it: values at the edges, values just outside, whether it has a default."""

    record: str
    name: str
    good: tuple[object, ...]
    bad: tuple[object, ...]
    optional: bool


def rows_of(heading: str) -> Iterator[list[str]]:
    table = PROTOCOL.split(heading)[1].split("\n\n")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) >= 2 and not set(line) <= set("|- "):
            yield cells


def fields_in(cell: str) -> list[str]:
    """The fields of a row. Text in brackets explains; a piece that starts with a digit belongs to the field before."""
    pieces: list[str] = []
    cell = cell.replace('text ("", "fail" or "earliest")', "word")
    for piece in re.sub(r" \([^)]*\)", "", cell).split(", "):
        if pieces and piece[0].isdigit():
            pieces[-1] += ", " + piece
        else:
            pieces.append(piece)
    return pieces


def number(text: str) -> int:
    text = text.replace(",", "")
    if "^" in text:
        power, _, less = text.partition("-")
        base, exponent = power.split("^")
        return int(base) ** int(exponent) - int(less or 0)
    return int(text)


WRONG_FOR_INTEGERS = (1.0, True, None, "1", b"1", [1], {})
ROWS = {cells[1]: fields_in(cells[2]) for cells in rows_of("| n | record | fields |\n") if cells[0].isdigit()}
NUMBERS = {**{kind.__name__: number for number, kind in enumerate(records.RECORD_TYPES)}, "Signed": codec.SIGNED}
NESTED = {cells[0]: fields_in(cells[1]) for cells in rows_of("| name | elements |\n")}


def values_of(kind: str) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Values within and without the bounds that the words of the table name."""
    named = {
        "offset": "0…2^63-1",
        "offset?": "-1…2^63-1",
        "ms": "0…2^53",
        "u64": "0…2^64-1",
        "1 or 2": "1…2",
        "0, 1 or 2": "0…2",
    }
    kind = named.get(kind, kind)
    if kind.endswith(" or nil"):
        good, bad = values_of(kind.removesuffix(" or nil"))
        return (*good, None), tuple(value for value in bad if value is not None)
    if found := re.fullmatch(r"array of ([01])…([\d,]+) (?:integers )?(.+)", kind):
        most, (good, bad) = number(found[2]), values_of(found[3])
        fits = (*(((),) if found[1] == "0" else ()), tuple(good), (good[0],) * most)
        empty = () if found[1] == "0" else ((),)
        return fits, (*empty, (good[0],) * (most + 1), None, {}, "", b"", 0, *((value,) for value in bad))
    if found := re.fullmatch(r"(-?[\d,^]+)…([\d,^-]+)", kind):
        low, high = number(found[1]), number(found[2])
        outside = (low - 1, *((high + 1,) if high < 2**64 - 1 else ()))
        return (low, high), (*outside, *WRONG_FOR_INTEGERS)
    if kind in ("id", "text", "topic?"):
        long = ("x" * 255, "ü" * 127 + "x", "漢" * 85, "\x00", "😀" * 63)
        no_utf8 = (wire.Raw(b"\xa1\xff"), wire.Raw(b"\xa3\xed\xa0\x80"))
        wrong = ("x" * 256, "ü" * 128, "😀" * 64, 1, None, b"x", ["x"], *no_utf8)
        return (("x", *long), (*wrong, "")) if kind == "id" else (("x", *long, ""), wrong)
    if found := re.fullmatch(r"bin of (\d+) bytes", kind):
        size = int(found[1])
        return (bytes(size),), (bytes(size - 1), bytes(size + 1), b"", "x" * size, None, 1, [1])
    if found := re.fullmatch(r"bin of 0…(\d+) bytes", kind):
        size = int(found[1])
        return (b"", b"x", b"\xff" * size), (bytes(size + 1), "", None, 1, [1])
    if kind == "word":
        return ("", "fail", "earliest"), ("x", "Fail", "latest", b"fail", None, 0, ["fail"])
    if kind == "bin":
        return (b"", bytes(1_000)), ("", None, 1)
    if kind == "bool":
        return (True, False), (0, 1, None, "", 1.0)
    if kind == "Genesis":
        good_fields = shortest(ROWS["Genesis"])
        return ((0, *good_fields),), (good_fields, (1, *good_fields), (0, *good_fields[:-1]), (), None, 0)
    elements = NESTED[kind]
    whole, least = shortest(elements), shortest(elements, without_defaults=True)
    outside = tuple(
        (*whole[:at], wrong, *whole[at + 1 :]) for at, text in enumerate(elements) for wrong in parse(text).bad
    )
    return (whole, least, (*whole, "later")), (least[:-1], (), None, 0, "", {}, *outside)


def parse(text: str, record: str = "") -> Bound:
    text, equals, _ = text.partition(" = ")
    name, kind = text.split(" ", 1)
    return Bound(record, name, *values_of(kind), bool(equals))


def shortest(texts: list[str], without_defaults: bool = False) -> tuple[object, ...]:
    bounds = [parse(text) for text in texts]
    return tuple(bound.good[0] for bound in bounds if not (without_defaults and bound.optional))


BOUNDS = [parse(text, record) for record, texts in ROWS.items() for text in texts]


def reads(kind: int, fields: tuple[object, ...]) -> bool:
    """Whether a body is read; the codec and the oracle must agree, also on the values."""
    body = wire.pack([kind, *fields])
    record = _decoded(kind, body)
    try:
        judged = oracle_wire.decode_record(kind, body)
    except ValueError:
        assert record is None
        return False
    assert record is not None
    assert fields_of(record) == judged.fields
    return True


def test_a_type_that_only_a_newer_library_knows() -> None:
    """E5: whoever looks a record up, or bundles a log, gets none of it, as of a malformed one."""
    for kind in (16, 18, 255):
        body = msgspec.msgpack.encode([kind])
        assert codec.decode_body(kind, body) is None
        carrier = codec.encode(Signed(bytes(32), bytes(64), 0, kind, body), "billing", wire.INCARNATION)
        assert codec.open_record(carrier, crc32(wire.INCARNATION)) is None


def test_the_tables_are_read() -> None:
    """E6: a pattern that misses rows would prove nothing: names and order are those of the structs."""
    kinds = (*records.RECORD_TYPES, Signed, ClaimState, MessageRange, PauseWaited, Checkpoint, Move, Mapping)
    structs = {kind.__name__: kind for kind in kinds}
    numbers = {cells[1]: int(cells[0]) for cells in rows_of("| n | record | fields |\n") if cells[0].isdigit()}
    assert numbers == NUMBERS
    assert {**ROWS, **NESTED}.keys() == structs.keys()
    for name, texts in {**ROWS, **NESTED}.items():
        fields = msgspec.structs.fields(structs[name])
        assert [text.split(" ")[0] for text in texts] == [field.encode_name.rstrip("_") for field in fields]
        for text, field in zip(texts, fields, strict=True):
            _, equals, default = text.partition(" = ")
            assert bool(equals) != field.required
            said = {"nil": None, "false": False, "[]": (), '""': "", "empty": b""}
            if equals:
                assert (said[default] if default in said else int(default)) == field.default


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: f"{bound.record}.{bound.name}")
def test_bounds(bound: Bound) -> None:
    """E6: every field of 4.2: at its least and greatest value, just outside of it, and values of other kinds."""
    kind = NUMBERS[bound.record]
    base = shortest(ROWS[bound.record])
    if bound.record == "ClaimingPartition" and bound.name == "topic":
        base = (base[0], base[1], -1, *base[3:])  # an empty one goes with partition -1 only
    at = [text.split(" ")[0] for text in ROWS[bound.record]].index(bound.name)
    for good in bound.good:
        assert reads(kind, (*base[:at], good, *base[at + 1 :])), f"{bound.name}={str(good)[:80]}"
    for bad in bound.bad:
        assert not reads(kind, (*base[:at], bad, *base[at + 1 :])), f"{bound.name}={str(bad)[:80]}"
    # Cut before this field: read only if it and all that follow have defaults.
    assert reads(kind, base[:at]) == bound.optional


@pytest.mark.parametrize("kind", range(16))
def test_more_elements_than_known(kind: int) -> None:
    """E7: ignored under every type, whatever they are, as long as they are MessagePack."""
    base = shortest(list(ROWS.values())[kind])
    assert reads(kind, (*base, None, 1.5, {"x": [1]}, wire.Raw(b"\xa1\xff"), wire.Raw(b"\xd4\x01a"), [[[]]]))
    for broken in (b"\xc1", b"\xa5x", b"\x91", b"\xc7\x00"):
        assert not reads(kind, (*base, wire.Raw(broken)))


def test_a_topic_that_is_empty() -> None:
    """E6: `topic?` may be empty only together with partition -1."""
    for topic, partition, expected in (("", -1, True), ("", 0, False), ("t", -1, True), ("t", 0, True)):
        assert reads(5, (0, topic, partition, -1)) is expected


# --- what is written


OUT_OF_BOUNDS: list[Record] = [
    Leave(-1),
    Leave(2**63),
    Leave(2**64),
    Leave(-(2**70)),
    Leave(0, "\ud800"),
    Evict(0, -1, 0),
    StepDown(0, -2),
    Join("", bytes(16), 1, 1_000, ()),
    Join("c", bytes(15), 1, 1_000, ()),
    Join("c", bytes(16), 0, 1_000, ()),
    Join("c", bytes(16), 1, 999, ()),
    Join("c", bytes(16), 1, 1_000, ("",)),
    Heartbeat(0, -1),
    Join("c", bytes(16), 1, 1_000, ("t",) * 1_001),
    Heartbeat(0, 0, (ClaimState(0, 0),) * 10_001),
    Heartbeat(0, 0, (ClaimState(0, -1),)),
    ClaimingPartition(0, "t", 100_000, -1),
    ReleaseGroup(-1, -1, 86_400_001),
    SetPosition(0, (Move("t", 0, -1, -1),)),
    SetPosition(0, (Move("t", -1, -1, 0),)),
    Topology("t", 0, -1),
    GroupConfig(-1, mode=3),
    Note(-1, ""),
    ReleasingPartition(0, 0, -2),
    ReleasingPartition(0, 0, 0, progress=bytes(513)),
    Heartbeat(0, 0, idle_ms=-1),
    ReleasingPartition(0, 0, 0, give=-2),
    Heartbeat(0, 0, (ClaimState(0, 0, progress=bytes(513)),)),
    ClaimingMessages(0, ()),
    ClaimingMessages(0, (MessageRange(0, 0, 0, 1),) * 10_001),
    SeekingPartition(0, 0, -1),
    ClaimingMessages(0, (MessageRange(0, -1, 0, 1),)),
    GroupConfig(-1, on_topic_recreated="x"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("record", OUT_OF_BOUNDS, ids=lambda record: type(record).__name__)
def test_nothing_out_of_bounds_is_written(record: Record) -> None:
    """E6: it is refused with the record's name, never clamped."""
    with pytest.raises(InvalidRecord) as error:
        codec.encode(record, "g", INCARNATION)
    assert error.value.record == type(record).__name__


@pytest.mark.parametrize("text", ["x" * 256, "ü" * 128, "😀" * 64])
def test_long_texts_are_refused_when_the_record_is_built(text: str) -> None:
    """E6: msgspec counts characters, so the bytes are counted where a struct is made, by a writer or by the decoder."""
    builders: tuple[Callable[[], object], ...] = (
        lambda: Leave(0, text),
        lambda: Move(text, 0, -1, 0),
        lambda: Join("c", bytes(16), 1, 1_000, ("t", text)),
        lambda: Mapping(text, ()),
        lambda: GroupConfig(-1, members=(text,)),
        lambda: Note(-1, "k", text=text),
    )
    for build in builders:
        with pytest.raises(ValueError, match="exceeds 255 bytes"):
            build()
    with pytest.raises(ValueError, match="without a topic"):
        ClaimingPartition(0, "", 0, -1)


def test_values_of_another_type_are_not_written() -> None:
    """E6: wrong types are refused at run time too."""
    for wrong in ("1", 1.0, True, None, object()):
        with pytest.raises(InvalidRecord):
            codec.encode(Leave(wrong), "g", INCARNATION)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "group"),
    [
        (Leave(0), ""),
        (Leave(0), "g" * 256),
        (Leave(0), "ü" * 128),
        (Leave(0), "\ud800"),
        (GENESIS, "g"),
        (FROZEN["Snapshot"], "g"),
    ],
)
def test_group_ids_that_are_not_written(record: Record, group: str) -> None:
    """E2: Genesis and Snapshot have an empty group id, and only they; the others 1 to 255 bytes of utf-8."""
    with pytest.raises(InvalidRecord):
        codec.encode(record, group, INCARNATION)


def test_a_record_that_no_broker_takes() -> None:
    """E6: within every bound and yet too long as a whole; a Snapshot's writer cuts it itself."""
    moves = tuple(Move("x" * 255, number, -1, 0) for number in range(4_000))
    with pytest.raises(InvalidRecord, match="limit"):
        codec.encode(SetPosition(0, moves), "g", INCARNATION)
    assert codec.encode(SetPosition(0, moves[:3_000]), "g", INCARNATION)


# --- trailing defaults


SPARSE: list[tuple[Record, list[object]]] = [
    (FROZEN["Leave"], [3, 300, "done"]),
    (Leave(300), [3, 300]),
    (Heartbeat(300, 7), [2, 300, 7]),
    (Heartbeat(300, 7, idle_ms=5), [2, 300, 7, [], [], None, None, 5]),
    (Heartbeat(300, 7, (ClaimState(1, 2), ClaimState(3, 4, attempts=1))), [2, 300, 7, [[1, 2], [3, 4, 0, 0, 1]]]),
    (Heartbeat(300, 7, (ClaimState(1, 2, progress=b"x"),)), [2, 300, 7, [[1, 2, 0, 0, 0, b"x"]]]),
    (ClaimingPartition(300, "t", 0, -1), [5, 300, "t", 0, -1]),
    (ReleasingPartition(300, 301, -1), [6, 300, 301, -1]),
    (ReleasingPartition(300, 301, -1, parked="why"), [6, 300, 301, -1, -1, "", -1, -1, 0, 0, b"", "why"]),
    (ClaimingMessages(300, (MessageRange(1, 2, 3, 4),)), [7, 300, [[1, 2, 3, 4]]]),
    (GroupConfig(-1), [11, -1]),
    (GroupConfig(-1, deleted=True), [11, -1, -1, 0, True]),
    (SetPosition(1, (Move("t", 0, -1, 5),)), [9, 1, [["t", 0, -1, 5]]]),
    (SetPosition(1, (), True), [9, 1, [], True]),
    (Join("c", bytes(16), 1, 1_000, (), -1, "m"), [1, "c", bytes(16), 1, 1_000, [], -1, "m"]),
    (
        Snapshot(GENESIS, bytes(16), 16, 0, 1, 2, 3, b""),
        [14, [0, INCARNATION, 16, "murmur3-x86-32", 2], bytes(16), 16, 0, 1, 2, 3, b""],
    ),
]


@pytest.mark.parametrize(("record", "fields"), SPARSE, ids=lambda one: type(one).__name__)
def test_trailing_defaults_are_left_out(record: Record, fields: list[object]) -> None:
    """E7: at the end of a record and of nested arrays, never in the middle; what is read is the same record."""
    value = codec.encode(record, "" if isinstance(record, Snapshot) else "billing", INCARNATION)
    assert msgspec.msgpack.decode(opened(value).body) == fields
    assert decoded(value) == record


@pytest.mark.parametrize("name", FROZEN)
def test_every_record_comes_back(name: str) -> None:
    """E7: with all its fields, and cut to any number of fields whose rest has defaults."""
    record, group = FROZEN[name], "" if name in ("Genesis", "Snapshot") else "billing"
    assert decoded(codec.encode(record, group, INCARNATION)) == record
    fields = msgspec.structs.fields(type(record))
    for last in range(len(fields)):
        if not fields[last].required:
            cut = msgspec.structs.replace(record, **{field.name: field.default for field in fields[last:]})
            value = codec.encode(cut, group, INCARNATION)
            assert decoded(value) == cut
            assert len(msgspec.msgpack.decode(opened(value).body)) <= 1 + last


def test_a_false_that_is_no_default_stays() -> None:
    """E7: 0 and False are equal and not the same: only a value of the default's own type is left out."""
    with pytest.raises(InvalidRecord):
        codec.encode(GroupConfig(-1, release_behind_ms=False), "g", INCARNATION)  # bool is an int for msgspec
