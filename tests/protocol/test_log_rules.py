"""Rules L and E as far as the fold and the codec decide them: the log, the envelope, the bodies.

Writers and readers of the topic keep L1, L7 and L9; their tests are with the transports and the client.
"""

from __future__ import annotations

import inspect
from zlib import crc32

import mmh3
import pytest

from marshal_py.errors import LogGap, ProtocolUnknown, TopicRecreated
from marshal_py.protocol.fold.rationalizer import Outcome, apply
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, route
from marshal_py.protocol.wire.records import Checkpoint, ClaimState, Genesis, Heartbeat, Join, Leave, Note, Snapshot
from tests.support import wire
from tests.support.differential_log import GROUP, INCARNATION, NEVER, OTHER_INCARNATION, DifferentialLog, genesis

LEAVE, NOTE = 3, 13


def note(group: str = GROUP, incarnation: bytes = INCARNATION) -> bytes:
    return codec.encode(Note(-1, "k"), group, incarnation)


# --- the log


def test_which_log() -> None:
    """L2: MurmurHash3 x86-32, seed 0, of the utf-8 id, unsigned, modulo the root's partition count."""
    assert [route(group, 16) for group in ("billing", "team.consumer", "a/b")] == [1, 3, 7]
    # Published vectors of the hash; the second is negative when it is read signed.
    assert route("hello", 2**32) == 0x248BFA47
    assert route("The quick brown fox jumps over the lazy dog", 2**32) == 0x2E4FF723
    assert route("aaaa", 10**10) == mmh3.hash("aaaa", seed=0, signed=False)
    high = next(f"g{n}" for n in range(99) if mmh3.hash(f"g{n}".encode(), seed=0) < 0)
    assert route(high, 7) == (mmh3.hash(high.encode(), seed=0) + 2**32) % 7
    # In every log the root's count decides.
    for log in range(4):
        book = DifferentialLog(log=log, root=genesis(4), start=False)
        book.put(genesis(4))
        assert (book.put(note()).reason == "misrouted") == (route(GROUP, 4) != log)


def test_the_root() -> None:
    """L3: the first valid Genesis; it names incarnation, partition count, hash and protocol version."""
    book = DifferentialLog(start=False)
    broken = genesis(7)[:-1] + b"\x03"
    assert [book.put(value).reason for value in (None, b"Mr", broken, note())] == ["garbage"] * 4
    assert book.put(genesis(16)).record == Genesis(INCARNATION, 16, "murmur3-x86-32", 2)
    assert book.world.genesis == Genesis(INCARNATION, 16, HASH_NAME, 2)
    # The surplus of a topic that has grown is nobody's: no group hashes to a log beyond P.
    assert all(route(f"group-{number}", 16) < 16 for number in range(500))


def test_the_genesis_of_a_further_log() -> None:
    """L4: the first whose fields equal the root's; records before it are part of the chain digest only."""
    log = route(GROUP, 16)
    book = DifferentialLog(log=log, root=genesis(16), start=False)
    others = (genesis(8), genesis(16, OTHER_INCARNATION), genesis(16, hash="md5"), genesis(16, protocol=1))
    assert [book.put(value).reason for value in others] == ["genesis"] * 4
    for value in (note(), note(incarnation=OTHER_INCARNATION), codec.encode(snapshot(), "", INCARNATION)):
        assert book.put(value).reason == "garbage"
    assert book.world.genesis is None
    assert book.put(genesis(16)).accepted
    assert book.put(note()).accepted
    for _ in range(7):
        book.put(None)
    without = DifferentialLog(log=log, root=genesis(16), start=False)
    for value in (None, *book.values[1:16]):
        without.put(value)
    assert (book.world.chain_at, without.world.chain_at) == (16, 16)
    assert book.world.chain != without.world.chain


def test_a_further_genesis() -> None:
    """L5: is ignored with any fields; losing the race to write one is no error."""
    book = DifferentialLog()
    for value in (
        genesis(),
        genesis(5),
        genesis(incarnation=OTHER_INCARNATION),
        genesis(hash="md5"),
        genesis(protocol=9),
    ):
        verdict = book.put(value)
        assert (verdict.outcome, verdict.reason) == (Outcome.IGNORED, "genesis")
    assert book.world.genesis == Genesis(INCARNATION, 1, HASH_NAME, 2)


def test_a_root_that_is_refused() -> None:
    """L6: another incarnation than the known one, an unknown hash, another protocol; nothing is consumed."""
    book = DifferentialLog(start=False, expected=OTHER_INCARNATION)
    error = book.stops(genesis())
    assert isinstance(error, TopicRecreated)
    assert (error.known, error.found) == (OTHER_INCARNATION.hex(), INCARNATION.hex())
    assert book.put(genesis(incarnation=OTHER_INCARNATION)).accepted
    fresh = DifferentialLog(start=False)
    for value, what in ((genesis(hash="md5"), "hash"), (genesis(protocol=3), "protocol version")):
        for _ in range(2):
            error = fresh.stops(value)
            assert isinstance(error, ProtocolUnknown)
            assert error.what == what
    assert (fresh.world.next_offset, fresh.world.genesis) == (0, None)
    assert fresh.put(genesis()).accepted


def test_a_root_of_protocol_1() -> None:
    """L6: refused by its own error, which says what to do; another incarnation than the known one is reported first."""
    fresh = DifferentialLog(start=False)
    error = fresh.stops(genesis(protocol=1))
    assert isinstance(error, ProtocolUnknown)
    assert (error.log, error.value, error.outdated) == (0, 1, True)
    assert "marshal log dump" in str(error)
    assert isinstance(fresh.stops(genesis(protocol=1, hash="md5")), ProtocolUnknown)
    assert (fresh.world.next_offset, fresh.world.genesis) == (0, None)
    known = DifferentialLog(start=False, expected=OTHER_INCARNATION)
    assert isinstance(known.stops(genesis(protocol=1)), TopicRecreated)
    assert isinstance(known.stops(genesis(protocol=1, incarnation=OTHER_INCARNATION)), ProtocolUnknown)
    # Behind a root that counts it is only one more Genesis (L5).
    assert DifferentialLog().put(genesis(protocol=1)).reason == "genesis"


def test_a_gap() -> None:
    """L8: the reader stops and names the error, also when an offset comes again; it continues with the right one."""
    book = DifferentialLog()
    for offset in (0, 2, NEVER):
        error = book.stops(note(), offset)
        assert isinstance(error, LogGap)
        assert (error.expected_offset, error.found_offset) == (1, offset)
    assert book.put(note()).accepted


# --- the envelope


def test_garbage() -> None:
    """E1: null, too short, magic, length, group id that is not utf-8, CRC; and all but a Genesis before the Genesis."""
    good, body = note(), wire.pack([NOTE, -1, "k"])
    bad: list[bytes | None] = [
        None,
        b"",
        *(good[:size] for size in range(1, len(good))),
        good + b"\x00",
        wire.envelope(GROUP, NOTE, body, magic=b"mr"),
        wire.envelope(GROUP, NOTE, body, magic=b"Mq"),
        wire.envelope(GROUP, NOTE, body, length=len(good) - 1),
        wire.envelope(GROUP, NOTE, body, length=0),
        wire.envelope(b"\xff\xfe", NOTE, body),
        wire.envelope(b"\xed\xa0\x80", NOTE, body),
        wire.envelope(GROUP, NOTE, body, incarnation=OTHER_INCARNATION),
        *(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good))),
    ]
    book = DifferentialLog()
    before = book.world.next_offset
    for value in bad:
        verdict = book.put(value)
        assert (verdict.outcome, verdict.reason, verdict.group) == (Outcome.IGNORED, "garbage", "")
    assert book.world.counters["garbage"] == len(bad)
    assert book.world.next_offset == before + len(bad)
    assert book.put(good).accepted
    young = DifferentialLog(start=False)
    for value in (
        good,
        codec.encode(snapshot(), "", INCARNATION),
        wire.snapshot(version=2),
        wire.envelope(GROUP, NOTE, body, version=2),
    ):
        assert young.put(value).reason == "garbage"


def snapshot(incarnation: bytes = INCARNATION) -> Snapshot:
    return Snapshot(Genesis(incarnation, 1, HASH_NAME, 2), bytes(16), 16, 0, 1, 2, 3, b"state")


def test_records_of_the_log() -> None:
    """E2: Genesis and Snapshot alone have an empty group id and are never misrouted; under a group id: `malformed`."""
    book = DifferentialLog(16)
    for value in (
        wire.record("", NOTE, -1, "k"),
        wire.envelope("", 15, wire.pack([15, 1, 2, 3])),
        wire.envelope("", 16, wire.pack([16])),
        wire.envelope("", 0, b""),
        wire.record("", 0, INCARNATION, 0, HASH_NAME, 2),
        wire.envelope("", 0, wire.pack([14, INCARNATION, 1, HASH_NAME, 1])),
        # A CRC seeded with another incarnation than the one that is named.
        wire.record("", 0, OTHER_INCARNATION, 1, HASH_NAME, 1, incarnation=INCARNATION),
        codec.encode(snapshot(), "", OTHER_INCARNATION),
        codec.encode(snapshot(OTHER_INCARNATION), "", OTHER_INCARNATION),
    ):
        assert book.put(value).reason == "garbage"
    assert book.put(codec.encode(snapshot(), "", INCARNATION)).accepted
    assert book.put(genesis(16)).reason == "genesis"
    for type_number, record in ((0, Genesis(INCARNATION, 1, HASH_NAME, 2)), (14, snapshot())):
        log_record = codec.encode(record, "", INCARNATION)
        verdict = DifferentialLog().put(wire.envelope(GROUP, type_number, log_record[14:]))
        assert (verdict.outcome, verdict.reason, verdict.group) == (Outcome.REJECTED, "malformed", GROUP)


def with_the_same_crc(incarnation: bytes) -> bytes:
    """Another incarnation with the same CRC-32. The CRC is linear: what cancels out in one place does so everywhere."""
    zero = crc32(bytes(16))
    basis: dict[int, tuple[int, int]] = {}
    for bit in range(128):
        change = 1 << bit
        effect = crc32(change.to_bytes(16, "big")) ^ zero
        while effect:
            top = effect.bit_length()
            if top not in basis:
                basis[top] = (effect, change)
                break
            effect, change = effect ^ basis[top][0], change ^ basis[top][1]
        else:
            return (int.from_bytes(incarnation, "big") ^ change).to_bytes(16, "big")
    raise AssertionError("32 bits cannot tell 128 apart")


def test_a_snapshot_of_an_incarnation_with_the_same_crc() -> None:
    """E2: an incarnation is another although its CRC is the same; a Snapshot that names it is garbage."""
    other = with_the_same_crc(INCARNATION)
    assert other != INCARNATION
    book = DifferentialLog()
    value = codec.encode(snapshot(other), "", other)
    assert value[7:11] == codec.encode(snapshot(other), "", INCARNATION)[7:11]
    assert book.put(value).reason == "garbage"
    assert book.put(wire.snapshot(other, version=2)).reason == "garbage"


def test_another_envelope_version() -> None:
    """E3: after the CRC, before the routing: the whole log stops. Of another incarnation it does not."""
    book = DifferentialLog(16)
    body = wire.pack([NOTE, -1, "k"])
    for version in (0, 2, 255):
        assert book.put(wire.envelope(GROUP, NOTE, body, version=version, incarnation=OTHER_INCARNATION)).reason == (
            "garbage"
        )
        for value in (
            wire.envelope(GROUP, NOTE, body, version=version),
            wire.envelope(GROUP, 99, b"?", version=version, record_version=9),
        ):
            error = book.stops(value)
            assert isinstance(error, ProtocolUnknown)
            assert (error.offset, error.what, error.value) == (book.world.next_offset, "envelope version", version)


def test_another_version_of_a_log_record() -> None:
    """E3: of a Genesis or Snapshot also another record version stops, if it names the incarnation held, or none is."""
    own, other = (wire.pack([0, named, 1, HASH_NAME, 1]) for named in (INCARNATION, OTHER_INCARNATION))
    for version, record_version in ((2, 1), (0, 1), (1, 2), (1, 0)):
        versions = {"version": version, "record_version": record_version}
        of_own = wire.envelope("", 0, own, **versions)
        of_other = wire.envelope("", 0, other, incarnation=OTHER_INCARNATION, **versions)
        young = DifferentialLog(start=False)
        for value in (of_own, of_other):
            assert isinstance(young.stops(value), ProtocolUnknown)
        # None is held, and yet: a Snapshot before the Genesis is garbage (E1).
        assert young.put(wire.snapshot(**versions)).reason == "garbage"
        # In a further log the root's is held from the start.
        for book in (DifferentialLog(), DifferentialLog(log=1, root=genesis(16), start=False)):
            assert isinstance(book.stops(of_own), ProtocolUnknown)
            assert book.put(of_other).reason == "genesis"
            assert book.put(wire.snapshot(OTHER_INCARNATION, **versions)).reason == "garbage"
        assert isinstance(DifferentialLog().stops(wire.snapshot(**versions)), ProtocolUnknown)


def test_a_log_record_has_one_version() -> None:
    """E3: Genesis and Snapshot have version 1, independent of the version of group records."""
    book = DifferentialLog(start=False)
    value = codec.encode(Genesis(INCARNATION, 1, HASH_NAME, 2), "", INCARNATION, 2)
    assert value == genesis()
    assert apply(book.world, 0, value).accepted
    assert apply(book.world, 1, codec.encode(snapshot(), "", INCARNATION, 2)).accepted
    assert codec.open_snapshot(codec.encode(snapshot(), "", INCARNATION, 2)) == snapshot()


def test_misrouted() -> None:
    """E4: ignored, before version, type and body are looked at; no state comes of it."""
    book = DifferentialLog(16)
    for value in (note(), wire.envelope(GROUP, 99, b"?", record_version=9), wire.envelope(GROUP, 0, b"?")):
        verdict = book.put(value)
        assert (verdict.outcome, verdict.reason, verdict.group) == (Outcome.IGNORED, "misrouted", GROUP)
    assert not book.world.groups


@pytest.mark.parametrize(
    "newer",
    [
        wire.record(GROUP, NOTE, -1, "k", record_version=3),
        wire.record(GROUP, NOTE, -1, "k", record_version=255),
        wire.envelope(GROUP, 17, b"?"),
        wire.envelope(GROUP, 255, b"", record_version=0),
        wire.envelope(GROUP, 0, b"", record_version=3),
    ],
)
def test_opaque(newer: bytes) -> None:
    """E5: this record and every later one of the group is ignored; other groups continue; version 0 is malformed."""
    book = DifferentialLog()
    session = book.join()
    assert book.put(wire.record(GROUP, LEAVE, session, record_version=0)).reason == "malformed"
    before = book.digest()
    verdict = book.put(newer)
    assert (verdict.outcome, verdict.reason, verdict.group) == (Outcome.IGNORED, "opaque", GROUP)
    at = book.last
    assert (book.group.opaque_at, book.digest() != before) == (at, True)
    opaque = book.digest()
    for value in (
        newer,
        codec.encode(Leave(session), GROUP, INCARNATION),
        wire.envelope(GROUP, NOTE, b"?"),
        wire.envelope(GROUP, 17, b""),
    ):
        assert book.put(value).reason == "opaque"
    assert (book.digest(), book.group.opaque_at) == (opaque, at)
    assert book.say(Note(-1, "k"), "other") == "accepted"
    # A group of which nothing was accepted yet has a state from there.
    fresh = DifferentialLog()
    fresh.put(newer)
    assert fresh.group.opaque_at == fresh.last
    # Also a deleted one (F0 comes after).
    gone = DifferentialLog()
    gone.delete()
    assert gone.put(newer).reason == "opaque"


def nested(depth: int, inner: bytes, shapes: bytes = b"\x91") -> wire.Raw:
    """`inner` inside `depth` arrays or maps, each with one element."""
    return wire.Raw(b"".join(bytes([s]) + b"\x01" * (s == 0x81) for s in (shapes * depth)[:depth]) + inner)


def test_malformed_bodies() -> None:
    """E6: does not decode, another type, something follows, out of bounds, other kinds of values; never clamped."""
    book = DifferentialLog()
    session = book.join()
    raw = wire.Raw
    bad = [
        b"",
        b"\xc1",
        b"\x92\x03",
        wire.pack(3),
        wire.pack({3: session}),
        wire.pack([]),
        wire.pack([LEAVE]),
        wire.pack([4, session]),
        wire.pack([session, LEAVE]),
        wire.pack([LEAVE, session]) + b"\x00",
        wire.pack([LEAVE, session]) + wire.pack([LEAVE, session]),
        *(
            wire.pack([LEAVE, wrong])
            for wrong in (
                -1,
                2**63,
                2**64 - 1,
                1.0,
                float(session),
                True,
                None,
                str(session),
                bytes([session]),
                [session],
                {},
            )
        ),
        *(wire.pack([wrong, session]) for wrong in (3.0, True, None, "3", raw(b"\xc4\x013"), -3, 259)),
        *(
            wire.pack([LEAVE, session, wrong])
            for wrong in (
                "x" * 256,
                "ü" * 128,
                b"x",
                1,
                None,
                [],
                raw(b"\xa1\xff"),
                raw(b"\xa3\xed\xa0\x80"),
                raw(b"\xa2\xc0\x80"),
            )
        ),
        wire.pack([LEAVE, session, raw(b"\xa5ab")]),
        wire.pack([LEAVE, session, "", raw(b"\xc1")]),
        wire.pack([LEAVE, session, "", raw(b"\xd4\x01")]),
    ]
    before = book.digest()
    for body in bad:
        verdict = book.put(wire.envelope(GROUP, LEAVE, body))
        assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, "malformed")
    assert book.digest() == before


@pytest.mark.parametrize(
    "form",
    [
        b"\xcc\x01",
        b"\xcd\x00\x01",
        b"\xce" + bytes(3) + b"\x01",
        b"\xcf" + bytes(7) + b"\x01",
        b"\xd0\x01",
        b"\xd1\x00\x01",
        b"\xd2" + bytes(3) + b"\x01",
        b"\xd3" + bytes(7) + b"\x01",
    ],
)
def test_integers_of_any_width(form: bytes) -> None:
    """E6: in any MessagePack integer form, for the type as well as for a field; str and array in any form too."""
    book = DifferentialLog()
    assert book.join() == 1
    kind = wire.Raw(form[:-1] + b"\x03")
    for array in (b"\x93", b"\xdc\x00\x03", b"\xdd\x00\x00\x00\x03"):
        for text in (b"\xa1x", b"\xd9\x01x", b"\xda\x00\x01x", b"\xdb\x00\x00\x00\x01x"):
            fork = DifferentialLog()
            assert fork.join() == 1
            assert fork.put(wire.envelope(GROUP, LEAVE, array + kind + form + text)).record == Leave(1, "x")


@pytest.mark.parametrize("shapes", [b"\x91", b"\x81", b"\x91\x81"])
@pytest.mark.parametrize("inner", [b"\x01", b"\xa0", b"\xc4\x00"])
def test_the_limit_of_nesting(shapes: bytes, inner: bytes) -> None:
    """E6: 100 arrays or maps inside each other, the body's own among them, are read; 101 are malformed."""
    for containers, expected in ((99, "accepted"), (100, "accepted"), (101, "malformed"), (5_000, "malformed")):
        book = DifferentialLog()
        book.join()
        body = wire.pack([LEAVE, 1, "", nested(containers - 1, inner, shapes)])
        assert (book.put(wire.envelope(GROUP, LEAVE, body)).reason or "accepted") == expected


@pytest.mark.parametrize(
    "empty", [b"\x90", b"\x80", b"\xdc\x00\x00", b"\xdd" + bytes(4), b"\xde\x00\x00", b"\xdf" + bytes(4)]
)
def test_an_empty_array_is_a_level(empty: bytes) -> None:
    """E6: an array or map without elements counts as a level."""
    for containers, expected in ((100, "accepted"), (101, "malformed")):
        book = DifferentialLog()
        book.join()
        # Brothers do not add up, whatever they hold.
        body = wire.pack([LEAVE, 1, "", [[]] * 150, nested(containers - 2, empty), {}])
        assert (book.put(wire.envelope(GROUP, LEAVE, body)).reason or "accepted") == expected


def test_unknown_and_missing_fields() -> None:
    """E7: elements after the last known field are ignored, nested too; missing trailing fields take their default."""
    raw = wire.Raw
    extra = (None, 1.5, {"a": [1]}, raw(b"\xd4\x01a"), raw(b"\xa1\xff"), raw(b"\xc7\x00\x05"), [[]], True, 2**64 - 1)
    book = DifferentialLog()
    joined = book.put(wire.record(GROUP, 1, "c", bytes(16), 1, 1_000, ["t"]))
    assert joined.record == Join("c", bytes(16), 1, 1_000, ("t",))
    beat = book.put(
        wire.record(
            GROUP, 2, 1, 0, [[5, 6, 7, 8, 9, b"p", *extra], [5, 6]], [3], None, [1, 2, 3, 1, *extra], 77, *extra
        )
    )
    claims = (ClaimState(5, 6, 7, 8, 9, b"p"), ClaimState(5, 6))
    assert beat.record == Heartbeat(1, 0, claims, (3,), None, Checkpoint(1, 2, 3, 1), 77)
    assert book.put(wire.record(GROUP, 2, 1, 0)).record == Heartbeat(1, 0, (), (), None, None)
    # A field in the middle has no default, and unknown elements must be MessagePack.
    assert book.put(wire.record(GROUP, 2, 1)).reason == "malformed"
    assert book.put(wire.record(GROUP, 2, 1, 0, [[5]])).reason == "malformed"
    assert book.put(wire.record(GROUP, LEAVE, 1, "", raw(b"\xa5x"))).reason == "malformed"
    assert book.put(wire.record(GROUP, LEAVE, 1, "", *extra)).accepted


def test_versions_that_members_read() -> None:
    """E8: Join carries the highest record version that its library reads; it is carried, never judged."""
    join = Join("c", bytes(16), 1, 1_000, ())
    assert join.reads_version == codec.RECORD_VERSION == 1
    assert MemberOptions(client_id="c").reads_version == 2, "this one can verify signatures (F11.5)"
    assert codec.encode(join, GROUP, INCARNATION)[12 + len(GROUP)] == 1
    assert codec.encode(join, GROUP, INCARNATION, 2)[12 + len(GROUP)] == 2
    book = DifferentialLog()
    session = book.must(Join("c", bytes(16), 1, 1_000, (), reads_version=255))
    assert book.session(session).join.reads_version == 255


def test_the_version_that_is_written() -> None:
    """E8: the lowest that the writer and all live sessions of the group read; each group for itself."""
    book = DifferentialLog()
    assert [book.world.writes_version(GROUP, own) for own in (1, 2, 9)] == [1, 2, 9], "nobody is there yet"
    newer = book.join("a", reads_version=3)
    assert [book.group.writes_version(own) for own in (1, 2, 9)] == [1, 2, 3]
    older = book.join("b", reads_version=2)
    assert [book.world.writes_version(GROUP, own) for own in (1, 2, 9)] == [1, 2, 2]
    assert book.world.writes_version("other", 9) == 9
    assert book.world.writes_version(GROUP) == codec.RECORD_VERSION
    book.must(Leave(older))
    assert book.group.writes_version(9) == 3
    book.must(Leave(newer))
    assert book.group.writes_version(9) == 9


def test_what_the_fold_is_given() -> None:
    """E9: an offset and a value; it cannot read a record's key or timestamp, for it never gets them."""
    assert list(inspect.signature(apply).parameters) == ["world", "offset", "value"]
