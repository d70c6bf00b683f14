"""The oracle alone, rule by rule, on records built by hand: its verdicts must follow from PROTOCOL.md's text."""

import struct
from collections.abc import Callable

import mmh3
import pytest

from marshal_sim.oracle.oracle import HASH_NAME, Oracle, OracleStop, Partition, Verdict, decode_messagepack, route
from marshal_sim.oracle.wire import MAX_DEPTH, Foreign
from tests.support import wire
from tests.support.oracle_log import (
    CLAIM,
    CONFIG,
    EVICT,
    GRANT,
    GROUP,
    HEARTBEAT,
    INSTANCE,
    JOIN,
    LEAVE,
    MOVE,
    NOTE,
    NOW,
    PAUSE,
    RELEASE,
    SEEK,
    STEP_DOWN,
    TOPOLOGY,
    Log,
)
from tests.support.wire import INCARNATION, OTHER_INCARNATION, Raw, envelope, genesis, pack, record, snapshot

# ---------------------------------------------------------------------------------------------------------------------
# MessagePack


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x05", 5),
        (b"\xff", -1),
        (b"\xcc\x05", 5),
        (b"\xcd\x00\x05", 5),
        (b"\xce\x00\x00\x00\x05", 5),
        (b"\xcf" + b"\xff" * 8, 2**64 - 1),
        (b"\xd0\x80", -128),
        (b"\xd1\xff\xff", -1),
        (b"\xd2\xff\xff\xff\xff", -1),
        (b"\xd3" + b"\xff" * 8, -1),
        (b"\xc0", None),
        (b"\xc2", False),
        (b"\xc3", True),
        (b"\xca\x3f\x80\x00\x00", 1.0),
        (b"\xcb\x3f\xf0" + bytes(6), 1.0),
        (b"\xa1a", "a"),
        (b"\xd9\x01a", "a"),
        (b"\xda\x00\x01a", "a"),
        (b"\xdb\x00\x00\x00\x01a", "a"),
        (b"\xc4\x01a", b"a"),
        (b"\xc5\x00\x01a", b"a"),
        (b"\xc6\x00\x00\x00\x01a", b"a"),
        (b"\x92\x01\x91\x02", (1, (2,))),
        (b"\xdc\x00\x01\x07", (7,)),
        (b"\xdd\x00\x00\x00\x01\x07", (7,)),
        (b"\x81\x01\x02", Foreign("map")),
        (b"\xde\x00\x01\x01\x02", Foreign("map")),
        (b"\xdf\x00\x00\x00\x01\x01\x02", Foreign("map")),
        (b"\xd4\x01a", Foreign("ext")),
        (b"\xd8\x01" + bytes(16), Foreign("ext")),
        (b"\xc7\x02\x01ab", Foreign("ext")),
        (b"\xc9\x00\x00\x00\x01\x01a", Foreign("ext")),
        (b"\xa1\xff", Foreign("str")),
    ],
)
def test_every_form_of_messagepack_decodes(data: bytes, value: object) -> None:
    """E6: integers in any form of any width; every array header is the same array."""
    decoded = decode_messagepack(data)
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x05\x05",
        b"\xcc",
        b"\xcf\x00",
        b"\xa2a",
        b"\xc4\x02a",
        b"\x92\x01",
        b"\xdd\xff\xff\xff\xff\x01",
        b"\xdf\xff\xff\xff\xff\x01",
        b"\x81\x01",
        b"\xd4\x01",
        b"\xc7\x01\x01",
        b"\xcb\x00",
        b"\x91" * 5000 + b"\x01",
    ],
)
def test_what_is_not_exactly_one_value_is_refused(data: bytes) -> None:
    """E6: nothing may be missing and nothing may follow; hostile lengths and depths cost nothing."""
    with pytest.raises(ValueError, match=r"ends inside|follows|too deep|no MessagePack"):
        decode_messagepack(data)


def test_the_encoder_of_the_tests_reads_back() -> None:
    """Both are plain; at the borders of the forms they must agree."""
    numbers = [0, 127, 128, 255, 256, 65535, 65536, 2**32, 2**64 - 1, -1, -32, -33, -128, -129, -32769, -(2**31) - 1]
    values = (*numbers, "x" * 31, "x" * 32, "x" * 256, b"y" * 256, (1,) * 16, True, None, 0.5)
    assert decode_messagepack(pack(values)) == values


# ---------------------------------------------------------------------------------------------------------------------
# Envelope, Genesis, routing


def test_garbage() -> None:
    """E1: ignored, counted in the offsets, no group known."""
    good = record(GROUP, NOTE, -1, "k")
    bad: list[bytes | None] = [
        None,
        b"",
        good[:13],
        envelope(GROUP, NOTE, b"")[: 14 + len(GROUP) - 1],
        envelope(GROUP, NOTE, pack([NOTE, -1, "k"]), magic=b"mr"),
        envelope(GROUP, NOTE, pack([NOTE, -1, "k"]), length=len(good) + 1),
        envelope(b"\xff\xfe", NOTE, pack([NOTE, -1, "k"])),
        envelope(GROUP, NOTE, pack([NOTE, -1, "k"]), incarnation=OTHER_INCARNATION),
        good[:-1] + b"z",
        good + b"\x00",
    ]
    log = Log()
    for value in bad:
        assert log.put(value) == Verdict("ignored", "garbage", None, None)
    assert log.put(good).outcome == "accepted"
    assert log.oracle.groups == {}


def test_garbage_under_an_empty_group_id() -> None:
    """E2: another type, a body that does not decode, a Snapshot of another incarnation."""
    log = Log()
    for value in (
        record("", NOTE, -1, "k"),
        envelope("", 15, pack([15, 0, 0, 0])),
        envelope("", 16, pack([16])),
        envelope("", 0, pack([0, INCARNATION, 0, HASH_NAME, 2])),
        envelope("", 0, pack([14, INCARNATION, 1, HASH_NAME, 2])),
        envelope("", 0, b""),
        snapshot(OTHER_INCARNATION),
        record("", 0, OTHER_INCARNATION, 1, HASH_NAME, 2, incarnation=INCARNATION),
    ):
        assert log.put(value) == Verdict("ignored", "garbage", None, None)


def test_before_the_genesis_all_else_is_garbage() -> None:
    """E1, L3: only a Genesis is read before the Genesis; L7 forbids writing more."""
    log = Log(start=False)
    for value in (record(GROUP, NOTE, -1, "k"), snapshot(), snapshot(record_version=2)):
        assert log.put(value).reason == "garbage"
    verdict = log.put(genesis(16))
    assert verdict[:3] == ("accepted", "", None)
    assert verdict.record is not None
    assert verdict.record.fields == {"incarnation": INCARNATION, "partitions": 16, "hash": HASH_NAME, "protocol": 2}
    assert (log.oracle.incarnation, log.oracle.partitions) == (INCARNATION, 16)
    assert log.oracle.next_offset == 4


def test_a_snapshot_of_this_incarnation_is_accepted() -> None:
    """F10.1: and changes nothing."""
    log = Log()
    # L6 speaks of who begins with a snapshot; in the middle of a log one that names another protocol stops nobody.
    assert log.put(snapshot(protocol=1)).outcome == "accepted"
    verdict = log.put(snapshot())
    assert verdict[:3] == ("accepted", "", None)
    assert verdict.record is not None
    assert verdict.record.fields["genesis"]["incarnation"] == INCARNATION
    assert log.oracle.groups == {}


def test_genesis_and_snapshot_under_a_group_id() -> None:
    """E2: rejected as malformed, whatever the body says."""
    log = Log()
    assert log.say(0, INCARNATION, 1, HASH_NAME, 2) == "malformed"
    assert log.say(14, "x") == "malformed"


def test_later_genesis_are_ignored() -> None:
    """L5: whatever it says."""
    log = Log()
    for value in (genesis(), genesis(5), genesis(incarnation=OTHER_INCARNATION), genesis(protocol=9)):
        assert log.put(value)[:3] == ("ignored", "genesis", None)
    assert log.oracle.partitions == 1


@pytest.mark.parametrize(
    ("value", "expected", "reason"),
    [
        (genesis(), OTHER_INCARNATION, "recreated"),
        (genesis(hash_name="md5"), None, "hash"),
        (genesis(protocol=1), INCARNATION, "protocol"),
        (genesis(protocol=3), None, "protocol"),
    ],
)
def test_a_first_genesis_that_is_refused(value: bytes, expected: bytes | None, reason: str) -> None:
    """L6: recreated topic, unknown hash, another protocol; nothing is consumed."""
    oracle = Oracle(expect_incarnation=expected)
    for _ in range(2):
        with pytest.raises(OracleStop) as stop:
            oracle.apply(0, value)
        assert (stop.value.reason, stop.value.offset) == (reason, 0)
    assert (oracle.next_offset, oracle.incarnation) == (0, None)


def test_the_genesis_of_a_further_log() -> None:
    """L4: the first that equals the root counts; what comes before it is part of the chain only."""
    oracle = Oracle(1, genesis(16), INCARNATION)
    assert oracle.apply(0, genesis(16, OTHER_INCARNATION)).reason == "genesis"
    assert oracle.apply(1, genesis(8)).reason == "genesis"
    assert oracle.apply(2, record(GROUP, NOTE, -1, "k")).reason == "garbage"
    assert oracle.incarnation is None
    wide = envelope("", 0, pack([Raw(b"\xcc\x00"), INCARNATION, Raw(b"\xce\x00\x00\x00\x10"), HASH_NAME, 2, "later"]))
    assert oracle.apply(3, wide)[:2] == ("accepted", "")
    assert oracle.apply(4, genesis(16)).reason == "genesis"
    assert oracle.apply(5, record(GROUP, NOTE, -1, "k")).outcome == "accepted"


def test_a_further_log_needs_the_root() -> None:
    """L4, L6: the root is read first and judged by the same rules."""
    with pytest.raises(ValueError, match="without the root"):
        Oracle(1)
    with pytest.raises(ValueError, match="no valid Genesis"):
        Oracle(1, b"no genesis")
    with pytest.raises(OracleStop, match="recreated"):
        Oracle(1, genesis(), OTHER_INCARNATION)
    with pytest.raises(OracleStop, match="protocol"):
        Oracle(1, genesis(protocol=1))


def test_another_envelope_version_stops() -> None:
    """E3: the CRC first, then the version; all before the routing. The state stays."""
    log = Log(16)
    assert log.put(envelope(GROUP, NOTE, b"", version=2, incarnation=OTHER_INCARNATION)).reason == "garbage"
    at = log.oracle.next_offset
    for value in (
        envelope(GROUP, NOTE, b"?", version=2),
        envelope(GROUP, NOTE, b"?", version=0),
        envelope("", 0, pack([0, INCARNATION, 1, HASH_NAME, 2]), version=2),
        envelope("", 0, pack([0, INCARNATION, 1, HASH_NAME, 2]), record_version=2),
        snapshot(record_version=0),
        snapshot(version=3),
    ):
        with pytest.raises(OracleStop) as stop:
            log.put(value)
        assert (stop.value.reason, stop.value.offset, log.oracle.next_offset) == ("envelope", at, at)
    foreign = pack([0, OTHER_INCARNATION, 1, HASH_NAME, 2])
    assert log.put(envelope("", 0, foreign, incarnation=OTHER_INCARNATION, version=2)).reason == "genesis"


def test_a_first_genesis_of_another_version_stops() -> None:
    """E3: none is held yet, so it counts as of this incarnation. In a further log the root's is held (L4)."""
    foreign = pack([0, OTHER_INCARNATION, 1, HASH_NAME, 2])
    value = envelope("", 0, foreign, incarnation=OTHER_INCARNATION, record_version=2)
    with pytest.raises(OracleStop, match="envelope"):
        Oracle().apply(0, value)
    assert Oracle(1, genesis(16)).apply(0, value).reason == "genesis"


def test_a_gap_stops() -> None:
    """L8: also an offset that comes again."""
    log = Log()
    for offset in (0, 2):
        with pytest.raises(OracleStop) as stop:
            log.oracle.apply(offset, None)
        assert (stop.value.reason, stop.value.offset) == ("gap", offset)
    assert log.oracle.next_offset == 1


def murmur3_32(data: bytes) -> int:
    """MurmurHash3 x86-32, seed 0, from its published description."""
    mask, state = 0xFFFFFFFF, 0

    def mix(block: int) -> int:
        block = block * 0xCC9E2D51 & mask
        block = (block << 15 | block >> 17) & mask
        return block * 0x1B873593 & mask

    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        state ^= mix(int.from_bytes(data[at : at + 4], "little"))
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    if data[whole:]:
        state ^= mix(int.from_bytes(data[whole:], "little"))
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16


def test_routing() -> None:
    """L2: MurmurHash3 x86-32 of the utf-8, unsigned, modulo P."""
    assert [route(group, 16) for group in (GROUP, "team.consumer", "a/b")] == [1, 3, 7]
    for text in ("", "a", "ab", "abc", "abcd", "abcde", "grüppe", "漢字" * 40, *map(str, range(200))):
        for partitions in (1, 7, 16, 100_000):
            assert route(text, partitions) == murmur3_32(text.encode()) % partitions


def test_misrouted() -> None:
    """E4: by the root's P, before version and body are looked at."""
    log = Log(16)
    verdict = log.put(envelope(GROUP, 99, b"?", record_version=9))
    assert verdict == Verdict("ignored", "misrouted", GROUP, None)
    assert log.oracle.groups == {}


def test_opaque() -> None:
    """E5: from that record on, that group only; it has a state from there."""
    for value in (envelope(GROUP, 16, b"?"), envelope(GROUP, NOTE, b"?", record_version=3)):
        log = Log()
        assert log.put(value) == Verdict("ignored", "opaque", GROUP, None)
        assert log.group.opaque_at == 1
        before = log.oracle.state_digest(GROUP)
        assert before != 0
        assert log.put(envelope(GROUP, 16, b"?")).reason == "opaque"
        assert log.say(NOTE, -1, "k") == "opaque"
        assert (log.group.opaque_at, log.oracle.state_digest(GROUP)) == (1, before)
        assert log.say(NOTE, -1, "k", group="other") == "accepted"


def test_record_version_zero() -> None:
    """E5: rejected; but a type above 15 makes opaque also under version 0."""
    log = Log()
    assert log.put(record(GROUP, NOTE, -1, "k", record_version=0)) == Verdict("rejected", "malformed", GROUP, None)
    assert log.oracle.groups == {}
    assert log.put(envelope(GROUP, 15, b"", record_version=0)).reason == "malformed"
    assert log.put(envelope(GROUP, 16, b"", record_version=0)).reason == "opaque"


# ---------------------------------------------------------------------------------------------------------------------
# Bodies


# A GroupConfig up to and with `by`.
CONFIG_TO_BY = (-1, -1, 0, False, "", (), 0, "", 0, (), (), 0, 0, 0, 0, "")
DEEP = Raw(b"\x91" * (MAX_DEPTH + 1) + b"\x01")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x03",
        pack({3: 0}),
        pack([]),
        pack([NOTE, 0]),
        pack([True, 0]),
        pack([LEAVE]),
        pack([LEAVE, -1]),
        pack([LEAVE, 2**63]),
        pack([LEAVE, 1.0]),
        pack([LEAVE, True]),
        pack([LEAVE, None]),
        pack([LEAVE, "0"]),
        pack([LEAVE, 0, "x" * 256]),
        pack([LEAVE, 0, "ü" * 128]),
        pack([LEAVE, 0, b"x"]),
        pack([LEAVE, 0, Raw(b"\xa1\xff")]),
        pack([LEAVE, 0, None]),
        pack([LEAVE, 0, "", Raw(b"\xc1")]),
        pack([LEAVE, 0, "", DEEP]),
        pack([LEAVE, 0]) + b"\x00",
    ],
)
def test_malformed_leave(body: bytes) -> None:
    """E6, E7: type, bounds, trailing bytes, kinds of values; unknown elements must be MessagePack."""
    log = Log()
    assert log.put(envelope(GROUP, LEAVE, body)) == Verdict("rejected", "malformed", GROUP, None)
    assert log.oracle.groups == {}


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (JOIN, ("", INSTANCE, 1, 1000, [])),
        (JOIN, ("c", bytes(15), 1, 1000, [])),
        (JOIN, ("c", "x" * 16, 1, 1000, [])),
        (JOIN, ("c", INSTANCE, 0, 1000, [])),
        (JOIN, ("c", INSTANCE, 3, 1000, [])),
        (JOIN, ("c", INSTANCE, 1, 999, [])),
        (JOIN, ("c", INSTANCE, 1, 600_001, [])),
        (JOIN, ("c", INSTANCE, 1, 1000, ["t"] * 1001)),
        (JOIN, ("c", INSTANCE, 1, 1000, [""])),
        (JOIN, ("c", INSTANCE, 1, 1000, {})),
        (JOIN, ("c", INSTANCE, 1, 1000, [], -2)),
        (JOIN, ("c", INSTANCE, 1, 1000, [], -1, "", 0)),
        (JOIN, ("c", INSTANCE, 1, 1000)),
        (HEARTBEAT, (0,)),
        (HEARTBEAT, (0, 0, [[1]])),
        (HEARTBEAT, (0, 0, [1])),
        (HEARTBEAT, (0, 0, [[1, 1, 2**53 + 1]])),
        (HEARTBEAT, (0, 0, [[1, 1]] * 10_001)),
        (HEARTBEAT, (0, 0, [], [-1])),
        (HEARTBEAT, (0, 0, [], [], [1])),
        (HEARTBEAT, (0, 0, [], [], None, [1, 2, 3, 0])),
        (HEARTBEAT, (0, 0, None)),
        (EVICT, (0, -1, 0)),
        (CLAIM, (0, "", 0, -1)),
        (CLAIM, (0, "t", 100_000, -1)),
        (HEARTBEAT, (0, 0, [[1, 1, 0, 0, 0, bytes(513)]])),
        (HEARTBEAT, (0, 0, [[1, 1, 0, 0, 0, "x"]])),
        (HEARTBEAT, (0, 0, [], [], None, None, -1)),
        (HEARTBEAT, (0, 0, [], [], None, None, 2**53 + 1)),
        (JOIN, ("c", INSTANCE, 1, 1000, [], -1, "", 1, 0, 0, 0, "", 0, 0, 1, "", "x" * 256)),
        (GRANT, (0, [])),
        (GRANT, (0, [[0, 0, 0]])),
        (GRANT, (0, [[0, 0, 0, -1]])),
        (GRANT, (0, [[0, 0, 0, 0], 7])),
        (GRANT, (0, [[0, 0, 0, 0]] * 10_001)),
        (GRANT, (0, [[0, 0, 0, 0]], -1)),
        (GRANT, (0, 0, 0, 0, 0)),
        (RELEASE, (0, 0, -1, -1, "", -2)),
        (RELEASE, (0, 0, -1, -1, "", -1, -2)),
        (RELEASE, (0, 0, -1, -1, "", -1, -1, -1)),
        (RELEASE, (0, 0, -1, -1, "", -1, -1, 0, 2**53 + 1)),
        (RELEASE, (0, 0, -1, -1, "", -1, -1, 0, 0, bytes(513))),
        (RELEASE, (0, 0, -1, -1, "", -1, -1, 0, 0, "")),
        (RELEASE, (0, 0, -1, -1, "", -1, -1, 0, 0, b"", "x" * 256)),
        (RELEASE, (0, 0, -1, -1, "", -1, -1, 0, 0, b"", b"x")),
        (SEEK, (0, 0)),
        (SEEK, (0, 0, -1)),
        (SEEK, (-1, 0, 0)),
        (PAUSE, (-1, -1, 86_400_001)),
        (MOVE, (0, [["t", -1, -1, 0]])),
        (MOVE, (0, [["t", 0, -1, -1]])),
        (MOVE, (0, [["t", 0, -1, 0]], 1)),
        (TOPOLOGY, ("t", 0, -1)),
        (TOPOLOGY, ("t", 1, -1, -1, "", "x" * 256)),
        (TOPOLOGY, ("t", 1, -1, -1, "", None)),
        (CONFIG, (*CONFIG_TO_BY, "no")),
        (CONFIG, (*CONFIG_TO_BY, "Fail")),
        (CONFIG, (*CONFIG_TO_BY, b"fail")),
        (CONFIG, (*CONFIG_TO_BY, "", -1)),
        (CONFIG, (*CONFIG_TO_BY, "", 0, 0)),
        (CONFIG, (*CONFIG_TO_BY, "", 0, False, 2**53 + 1)),
        (CONFIG, (-1, -1, 3)),
        (CONFIG, (-1, -1, 0, 0)),
        (CONFIG, (-1, -1, 0, False, "", ["x"] * 17)),
        (CONFIG, (-1, -1, 0, False, "", [], 0, "", 0, [], [["m", [100_000]]])),
        (NOTE, (-1, "")),
        (NOTE, (-1, "k", "t", -2)),
    ],
)
def test_malformed_fields(number: int, fields: tuple[object, ...]) -> None:
    """E6: every value within the bounds of 4.2, nothing clamped."""
    assert Log().say(number, *fields) == "malformed"


def test_defaults_and_unknown_elements() -> None:
    """E7: missing trailing fields take their default; what follows the last known one is not read, nested too."""
    log = Log()
    verdict = log.put(record(GROUP, JOIN, "c", INSTANCE, 1, 1000, ["t", "t"]))
    assert verdict.record is not None
    assert verdict.record == (
        "Join",
        {
            "client_id": "c",
            "instance_id": INSTANCE,
            "mode": 1,
            "interval_ms": 1000,
            "topics": ("t", "t"),
            "predecessor": -1,
            "member": "",
            "capacity": 1,
            "claims_max": 0,
            "rank": 0,
            "priority": 0,
            "priority_group": "",
            "min_pending": 0,
            "min_ack_pending": 0,
            "reads_version": 1,
            "library": "",
            "witness": "",
        },
    )
    extra: tuple[object, ...] = ({"a": [1.5]}, Raw(b"\xd4\x01a"), Raw(b"\xa1\xff"), Raw(b"\xc7\x00\x05"))
    claims = [[5, 6, 7, 8, 9, b"p", *extra], [5, 6]]
    beat = log.put(record(GROUP, HEARTBEAT, 1, 0, claims, [], [1, 2, *extra], None, 3, *extra))
    assert beat.outcome == "accepted"
    assert beat.record is not None
    full = {"epoch": 5, "position": 6, "lag": 7, "in_flight": 8, "attempts": 9, "progress": b"p"}
    assert beat.record.fields["claims"] == (full, {**full, "lag": 0, "in_flight": 0, "attempts": 0, "progress": b""})
    assert beat.record.fields["idle_ms"] == 3
    assert beat.record.fields["pause"] == {"pause_change": 1, "waited_ms": 2}
    assert log.say(LEAVE, Raw(b"\xd3" + bytes(7) + b"\x01")) == "accepted"


def test_every_type_decodes_at_its_shortest() -> None:
    """4.2: a field without a default must be there, one with a default need not."""
    shortest: dict[int, tuple[object, ...]] = {
        HEARTBEAT: (0, 0),
        LEAVE: (0,),
        EVICT: (0, 0, 0),
        CLAIM: (0, "", -1, -1),
        RELEASE: (0, 0, -1),
        GRANT: (0, [[0, 0, 0, 0]]),
        PAUSE: (-1, -1, 0),
        MOVE: (0, []),
        TOPOLOGY: ("t", 1, -1),
        CONFIG: (-1,),
        STEP_DOWN: (0, -1),
        NOTE: (-1, "k"),
        SEEK: (0, 0, 0),
        JOIN: ("c", INSTANCE, 1, 1000, []),
    }
    assert sorted(shortest) == [*range(1, 14), 15]
    for number, fields in shortest.items():
        assert Log().say(number, *fields) != "malformed"
        assert Log().say(number, *fields[:-1]) == "malformed"


# ---------------------------------------------------------------------------------------------------------------------
# Rules 1 to 3: sessions


def test_join() -> None:
    """F1.1, F1.2, F1.3, F1.4, F1.5, F1.6: reasons in their order, predecessor, mode for ever."""
    log = Log()
    first = log.must(JOIN, "c", INSTANCE, 1, 1000, ["t"])
    assert (log.group.mode, log.group.sessions[first].extended) == (1, first)
    assert log.say(JOIN, "other", INSTANCE, 2, 1000, ["t"], first) == "instance"
    assert log.say(JOIN, "other", bytes(15) + b"1", 2, 1000, ["t"], first) == "mode"
    assert log.say(JOIN, "other", bytes(15) + b"1", 1, 1000, ["t"], first) == "predecessor"
    second = log.must(JOIN, "c", bytes(15) + b"1", 1, 1000, ["t"], first)
    assert list(log.group.sessions) == [second]
    third = log.must(JOIN, "other", INSTANCE, 1, 1000, ["t"], first)
    log.must(LEAVE, second)
    log.must(LEAVE, third)
    assert (log.group.sessions, log.group.mode) == ({}, 1)
    assert log.say(JOIN, "c", INSTANCE, 2, 1000, []) == "mode"


def test_predecessor_frees_its_claims() -> None:
    """F1.5, F3.3: last owner the session; positions, versions, figures and progress stay."""
    log = Log()
    session, epoch = log.owner()
    log.must(HEARTBEAT, session, 0, [[epoch, 100, 1, 2, 3, b"p"]])
    log.join(predecessor=session)
    assert log.partition() == Partition(
        position=100, version=epoch, last_owner=session, lag=1, in_flight=2, attempts=3, progress=b"p"
    )


def test_heartbeat_at_least_once() -> None:
    """F2.1, F2.3, F2.4, F2.5: figures and progress come with a position that does not fall, else nothing comes."""
    log = Log()
    session, epoch = log.owner()
    other = log.join("d")
    assert log.say(HEARTBEAT, NOW, 0) == "session"
    beat = log.must(HEARTBEAT, session, 0, [[epoch, 110, 1, 2, 3, b"p"], [NOW, 500]], [7, 8], None, None, 60)
    assert log.group.sessions[session].extended == beat
    assert (log.group.sessions[session].ready, log.group.sessions[session].idle_ms) == ((7, 8), 60)
    part = log.partition()
    expected = Partition(
        owner=session,
        epoch=epoch,
        position=110,
        version=epoch,
        lag=1,
        in_flight=2,
        attempts=3,
        floor=100,
        progress=b"p",
    )
    assert part == expected
    log.must(HEARTBEAT, session, 0, [[epoch, 109, 9, 9, 9, b"q"]])
    assert part == expected
    log.must(HEARTBEAT, session, 0, [[epoch, 110, 9, 8, 7, bytes(512)]])
    assert (part.position, part.lag, part.in_flight, part.attempts) == (110, 9, 8, 7)
    assert part.progress == bytes(512)
    log.must(HEARTBEAT, session, 0, [[epoch, 110]])
    assert (part.lag, part.in_flight, part.attempts, part.progress) == (0, 0, 0, b"")
    log.must(HEARTBEAT, other, 0, [[epoch, 200]])
    assert part.position == 110
    assert (log.group.sessions[session].ready, log.group.sessions[session].idle_ms) == ((), 0)


def test_a_late_heartbeat() -> None:
    """F2.6: extends, and counts where it raises a position; figures of at-most-once mode are not ordered."""
    log = Log()
    session, epoch = log.owner()
    log.must(HEARTBEAT, session, 2, [[epoch, 110, 1, 2, 3, b"p"]], [7], None, None, 60)
    late = log.must(HEARTBEAT, session, 1, [[epoch, 110, 9, 9, 9, b"q"]], [8], None, None, 5)
    live, part = log.group.sessions[session], log.partition()
    assert (live.extended, live.sequence, live.ready, live.idle_ms) == (late, 2, (7,), 60)
    assert (part.lag, part.in_flight, part.attempts, part.progress) == (1, 2, 3, b"p")
    log.must(HEARTBEAT, session, 1, [[epoch, 111, 9, 9, 9, b"q"]])
    assert (part.position, part.progress, live.sequence) == (111, b"q", 2)
    log = Log()
    session, epoch = log.owner(mode=2)
    log.must(HEARTBEAT, session, 2, [[epoch, 100, 4, 5]])
    log.must(HEARTBEAT, session, 1, [[epoch, 100, 6, 7]])
    assert (log.partition().lag, log.partition().in_flight) == (6, 7)


def test_heartbeat_at_most_once() -> None:
    """F2.3: lag and in flight only, whatever the position says: that is moved by grants alone."""
    log = Log()
    session, epoch = log.owner(mode=2)
    for position in (50, 150):
        log.must(HEARTBEAT, session, 0, [[epoch, position, position + 4, 5, 6, b"p"]])
        part = log.partition()
        assert (part.position, part.lag, part.in_flight, part.attempts) == (100, position + 4, 5, 0)
        assert part.progress == b""


def test_heartbeat_in_a_pause() -> None:
    """F2.2: extends only a session without a claim on a partition >= 0; the rest of it still counts."""
    log = Log()
    session, epoch = log.owner()
    whole = log.join("d")
    log.must(CLAIM, whole, "t", -1, -1)
    log.pause()
    log.must(HEARTBEAT, session, 0, [[epoch, 120]], [3])
    assert log.group.sessions[session].extended == session
    assert (log.group.sessions[session].ready, log.partition().position) == ((3,), 120)
    beat = log.must(HEARTBEAT, whole, 0)
    assert log.group.sessions[whole].extended == beat


def test_leave_and_evict() -> None:
    """F3.1, F3.2, F3.3: compare-and-set on `extended`, twice the interval, anybody may send it."""
    log = Log()
    session, epoch = log.owner()
    assert log.say(LEAVE, NOW) == "session"
    assert log.say(EVICT, NOW, 0, 0) == "session"
    assert log.say(EVICT, session, session + 1, 0) == "observed"
    assert log.say(EVICT, session, session, 1999) == "waited"
    log.must(EVICT, session, session, 2000)
    assert log.partition() == Partition(position=100, version=epoch, last_owner=session, attempts=1)
    assert log.say(EVICT, session, session, 2000) == "session"


# ---------------------------------------------------------------------------------------------------------------------
# Rules 7 and 8: pauses and positions


def test_pause() -> None:
    """F7.1, F7.2, F7.3: compare-and-set, then token or waited out; every acceptance is a new token."""
    log = Log()
    assert log.say(PAUSE, 0, -1, 5000) == "observed"
    assert log.oracle.groups == {}
    token = log.must(PAUSE, -1, -1, 5000)
    assert (log.group.pause_change, log.group.pause_duration_ms) == (token, 5000)
    assert log.say(PAUSE, token, -1, 9000, 9000) == "paused"
    assert log.say(PAUSE, token, -1, 0, 4999) == "paused"
    renewed = log.must(PAUSE, token, token, 7000)
    assert log.say(PAUSE, renewed, token, 0) == "paused"
    ended = log.must(PAUSE, renewed, -1, 0, 7000)
    assert (log.group.pause_change, log.group.paused) == (ended, False)
    moved = log.must(PAUSE, ended, -1, 0)
    assert (log.group.pause_change, log.group.paused) == (moved, False)
    assert log.say(PAUSE, ended, -1, 5000) == "observed"


def test_set_position_rejected() -> None:
    """F8.1, F8.2: each reason is checked for all moves before the next; one record moves all or nothing."""
    log = Log()
    session, epoch = log.owner()
    assert log.say(MOVE, 0, []) == "paused"
    token = log.pause()
    assert log.say(MOVE, token + 1, []) == "token"
    assert log.say(MOVE, token, []) == "empty"
    assert log.say(MOVE, token, [["t", 0, epoch, 1], ["t", 0, NOW, 2]]) == "repeats"
    assert log.say(MOVE, token, [["t", 0, epoch, 1], ["t", 9, -1, 1], ["t", 1, NOW, 1]]) == "observed"
    assert log.say(MOVE, token, [["t", 0, epoch, 1], ["t", 4, -1, 1]]) == "topology"
    assert log.say(MOVE, token, [["t", 1, -1, 1], ["t", 0, epoch, 1]]) == "held"
    assert ("t", 1) not in log.group.partitions
    log.must(LEAVE, session)
    assert log.say(MOVE, token, [["t", 1, -1, 1], ["t", 0, epoch, 1]]) == "accepted"


def test_set_position_accepted() -> None:
    """F6.5, F8.3, F8.4, F8.5: a new generation without figures, progress or parking; the pause ends on wish."""
    log = Log()
    session, epoch = log.owner()
    assert (
        log.release(session, epoch, position=200, successor=9, attempts=3, in_flight=2, progress=b"p", parked="why")
        == "accepted"
    )
    version = log.last
    assert log.partition().parked == "why"
    token = log.pause()
    moved = log.must(MOVE, token, [["t", 0, version, 7], ["t", 3, -1, 8]])
    assert log.partition() == Partition(position=7, generation=1, version=moved, last_owner=session, successor=9)
    assert log.partition(3) == Partition(position=8, generation=1, version=moved)
    assert (log.group.paused, log.group.pause_change) == (True, token)
    assert log.say(MOVE, token, [["t", 0, version, 7]]) == "observed"
    again = log.must(MOVE, token, [["t", 0, moved, 9]], True)
    assert (log.group.paused, log.group.pause_change) == (False, again)


# ---------------------------------------------------------------------------------------------------------------------
# Rules 9 and 10


def test_step_down() -> None:
    """F9.7, F9.8: compare-and-set on the mark; a GroupConfig clears it."""
    log = Log()
    session = log.join()
    assert log.say(STEP_DOWN, NOW, -1) == "session"
    assert log.say(STEP_DOWN, session, 0) == "observed"
    mark = log.must(STEP_DOWN, session, -1)
    assert log.group.sessions[session].mark == mark
    assert log.say(STEP_DOWN, session, -1) == "observed"
    log.must(CONFIG, -1)
    assert log.group.sessions[session].mark == -1


def test_what_leaves_no_state() -> None:
    """F10.1, F10.2, F10.3: a Note changes nothing, a rejected record creates no group."""
    log = Log()
    assert log.say(NOTE, -1, "k") == "accepted"
    assert log.say(LEAVE, 0) == "session"
    assert log.oracle.groups == {}
    assert log.oracle.state_digest(GROUP) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Digests


def first_word(data: bytes) -> int:
    return mmh3.hash64(data, seed=0, x64arch=True, signed=False)[0]


def test_the_hash_of_digests() -> None:
    """G3's H, by a published vector of MurmurHash3 x64-128."""
    assert first_word(b"The quick brown fox jumps over the lazy dog") == 0xE34BBC7BBC071B6C


def test_state_digest() -> None:
    """G3: the sum over all entries, packed by hand here."""
    log = Log()
    gone = log.must(CONFIG, -1, -1, 0, True)
    log.must(CONFIG, gone)
    session = log.join()
    shape = log.must(TOPOLOGY, "t", 4, gone, -1, "", "id one")
    nameless = log.must(TOPOLOGY, "u", 1, gone)
    epoch = log.must(CLAIM, session, "t", 0, -1, 100)
    beat = log.must(HEARTBEAT, session, 6, [[epoch, 110, 1, 2, 3, b"progress"]], [7], None, None, 250)
    other = log.must(CLAIM, session, "t", 1, -1, 5)
    assert log.release(session, other, parked="looked at by nobody") == "accepted"
    version = log.last
    config = pack([CONFIG, gone + 1, -1, 0, False, "greedy"])
    assert log.put(envelope(GROUP, CONFIG, config)).outcome == "accepted"
    config_offset = log.last
    mark = log.must(STEP_DOWN, session, -1)
    joined = pack([JOIN, "c", struct.pack(">QQ", 1, session), 1, 1000, ["t"], -1])
    t, u, parked = first_word(b"t"), first_word(b"u"), first_word(b"looked at by nobody")
    entries = [
        struct.pack("<qQqqqqQqq", 1, first_word(b"billing"), 1, gone, 0, config_offset, first_word(config), -1, gone),
        struct.pack("<qQqqqQ", 2, t, 4, 4, shape, first_word(b"id one")),
        struct.pack("<qQqqqQ", 2, u, 1, 1, nameless, 0),
        struct.pack("<qqQqqQqq", 3, session, first_word(joined), beat, mark, first_word(struct.pack("<q", 7)), 250, 6),
        struct.pack(
            "<qQ12qQQ", 4, t, 0, session, epoch, 110, gone + 1, epoch, -1, -1, 1, 2, 3, 100, first_word(b"progress"), 0
        ),
        struct.pack("<qQ12qQQ", 4, t, 1, -1, -1, 5, gone + 1, version, session, -1, 0, 0, 1, -1, 0, parked),
    ]
    assert log.oracle.state_digest(GROUP) == sum(map(first_word, entries)) % 2**64
    assert log.oracle.state_digest("nobody") == 0


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        (lambda log: log.say(NOTE, -1, "k"), False),
        (lambda log: log.say(LEAVE, NOW), False),
        (lambda log: log.put(None), False),
        (lambda log: log.put(snapshot()), False),
        (lambda log: log.say(PAUSE, -1, -1, 0, group="another"), False),
        (lambda log: log.say(HEARTBEAT, 1, 0), True),
        (lambda log: log.say(HEARTBEAT, 1, 0, [[3, 99, 1, 1, 1, b"p"]]), True),
        (lambda log: log.say(SEEK, 1, 3, 100), True),
        (lambda log: log.say(TOPOLOGY, "t", 4, 2, -1, "", "id"), True),
        (lambda log: log.say(SEEK, 1, 2, 100), False),
        (lambda log: log.say(STEP_DOWN, 1, -1), True),
        (lambda log: log.say(PAUSE, -1, -1, 0), True),
        (lambda log: log.say(CONFIG, -1), True),
        (lambda log: log.put(envelope(GROUP, 16, b"")), True),
    ],
)
def test_what_changes_the_state_digest(change: Callable[[Log], object], changes: bool) -> None:
    """G3, F10.1: accepted changes do; rejected, ignored and foreign records do not."""
    log = Log()
    log.owner()
    before = log.oracle.state_digest(GROUP)
    change(log)
    assert (log.oracle.state_digest(GROUP) != before) is changes


def test_chain_digest() -> None:
    """G1, G2: blocks of 16 values, garbage and null among them; the last full block counts."""
    values: list[bytes | None] = [None, b"", b"junk", genesis(), genesis()]
    values += [record(GROUP, NOTE, -1, f"k{number}") for number in range(29)]
    oracle, chain, lengths, block = Oracle(), 0, b"", b""
    for offset, value in enumerate(values):
        if offset % 16 == 0:
            lengths, block = struct.pack("<QQ", chain, offset + 16), b""
        lengths += b"\xff" * 4 if value is None else struct.pack("<I", len(value))
        block += value or b""
        before = oracle.chain_digest()
        oracle.apply(offset, value)
        if offset % 16 == 15:
            chain = first_word(lengths + block)
            assert oracle.chain_digest() == (offset + 1, chain)
        else:
            assert oracle.chain_digest() == before
    assert oracle.chain_digest()[0] == 32


def test_the_tests_and_the_oracle_name_the_same_hash() -> None:
    """L3: the name stands in two places that must agree."""
    assert wire.HASH_NAME == HASH_NAME
