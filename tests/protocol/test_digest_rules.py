"""Rules G and K: digests, packed by hand here, and tokens."""

from __future__ import annotations

import struct

import mmh3
import pytest

from marshal_py.errors import InvalidOption
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, FOLD_VERSION
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import Token
from marshal_py.protocol.wire.records import (
    Checkpoint,
    ClaimState,
    GroupConfig,
    Heartbeat,
    Move,
    Note,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    StepDown,
    Topology,
)
from tests.support import wire
from tests.support.differential_log import GROUP, INCARNATION, NEVER, DifferentialLog, genesis


def word(data: bytes) -> int:
    """H of section 6."""
    return mmh3.hash64(data, seed=0, x64arch=True, signed=False)[0]


def note(group: str = GROUP) -> bytes:
    return codec.encode(Note(-1, "k"), group, INCARNATION)


def test_checkpoints() -> None:
    """G1: every 16 offsets, of the state after all offsets below."""
    assert CHECKPOINT_OFFSETS == 16
    book = DifferentialLog()
    book.world.watched.add(GROUP)
    session = book.join()
    while book.world.next_offset < 40:
        book.must(Heartbeat(session, book.world.next_offset))
        assert book.world.chain_at == book.world.next_offset // 16 * 16
        if book.world.next_offset % 16 == 0:
            assert book.world.checkpoints[GROUP] == Checkpoint(
                book.world.next_offset, book.digest(), book.world.chain, FOLD_VERSION
            )
    assert book.world.checkpoints[GROUP].at == 32
    assert book.world.checkpoints[GROUP].state != book.digest()


def test_chain_digest() -> None:
    """G2: 0 at 0; then H(chain before, N, and of 16 values the length and the value; FF FF FF FF for null)."""
    book = DifferentialLog(start=False)
    values: list[bytes | None] = [None, b"", b"junk", genesis(), None, genesis(3)]
    values += [note(f"group-{number}") for number in range(42)]
    chain = 0
    for at, value in enumerate(values):
        assert (book.world.chain_at, book.world.chain) == (at // 16 * 16, chain)
        book.put(value)
        if at % 16 == 15:
            block = values[at - 15 : at + 1]
            data = b"".join(b"\xff\xff\xff\xff" if v is None else struct.pack("<I", len(v)) for v in block)
            data += b"".join(v or b"" for v in block)
            chain = word(struct.pack("<QQ", chain, at + 1) + data)
    assert (book.world.chain_at, book.world.chain) == (48, chain)


def test_state_digest() -> None:
    """G3: the sum of H over the packed entries, bodies as they stand in the log; packed by hand here."""
    book = DifferentialLog()
    # An array header and integers that our encoder would not write: the digest takes the bytes as they are.
    body = b"\xdc\x00\x06\x01\xa1c\xc4\x10" + bytes(16) + b"\xcc\x01\xcd\x03\xe8\x91\xa1t"
    assert book.put(wire.envelope(GROUP, 1, body)).accepted
    session = book.last
    topology = book.topology()
    epoch = book.claim(session)
    beat = book.must(Heartbeat(session, 5, (ClaimState(epoch, 110, 1, 2, 3, b"\1\2\0"),), (7, NEVER), idle_ms=77))
    book.must(Topology("t", 4, topology, topic_id="one"))
    topology = book.last
    parked = book.must(ReleasingPartition(session, book.claim(session, 1, 5), 6, 9, parked="why"))
    config = wire.pack([11, -1, -1, 0, False, "greedy"])
    assert book.put(wire.envelope(GROUP, 11, config)).accepted
    config_at = book.last
    mark = book.must(StepDown(session, -1))
    pause = book.pause()
    t = word(b"t")
    entries = [
        struct.pack("<qQqqqqQqq", 1, word(b"billing"), 1, pause, 5_000, config_at, word(config), -1, -1),
        struct.pack("<qQqqqQ", 2, t, 4, 4, topology, word(b"one")),
        struct.pack("<qqQqqQqq", 3, session, word(body), beat, mark, word(struct.pack("<qq", 7, NEVER)), 77, 5),
        struct.pack("<qQ12qQQ", 4, t, 0, session, epoch, 110, 0, epoch, -1, -1, 1, 2, 3, 100, word(b"\1\2\0"), 0),
        struct.pack("<qQ12qQQ", 4, t, 1, -1, -1, 6, 0, parked, session, 9, 0, 0, 0, -1, 0, word(b"why")),
    ]
    assert book.digest() == sum(map(word, entries)) % 2**64
    # Without config and ready list these fields are 0; the opaque offset counts.
    young = DifferentialLog()
    body = codec.encode(join := young.new_join(), GROUP, INCARNATION)[14 + len(GROUP) :]
    session = young.must(join)
    young.put(wire.envelope(GROUP, 16, b""))
    entries = [
        struct.pack("<qQqqqqQqq", 1, word(b"billing"), 1, -1, 0, -1, 0, young.last, -1),
        struct.pack("<qqQqqQqq", 3, session, word(body), session, -1, 0, 0, 0),
    ]
    assert young.digest() == sum(map(word, entries)) % 2**64
    # A topic whose id is not known, a deleted group, and the generation of a partition that is named after it.
    gone = DifferentialLog()
    gone.topology()
    deletion = gone.delete()
    body = codec.encode(GroupConfig(-1, deleted=True), GROUP, INCARNATION)[14 + len(GROUP) :]
    entry = struct.pack("<qQqqqqQqq", 1, word(b"billing"), 0, deletion, 0, deletion, word(body), -1, deletion)
    assert gone.digest() == word(entry)
    revival = gone.must(GroupConfig(deletion))
    body = codec.encode(GroupConfig(deletion), GROUP, INCARNATION)[14 + len(GROUP) :]
    topology = gone.must(Topology("t", 4, deletion))
    pause = gone.must(ReleaseGroup(deletion, -1, 5_000))
    moved = gone.must(SetPosition(pause, (Move("t", 2, -1, 7),)))
    entries = [
        struct.pack("<qQqqqqQqq", 1, word(b"billing"), 0, pause, 5_000, revival, word(body), -1, deletion),
        struct.pack("<qQqqqQ", 2, t, 4, 4, topology, 0),
        struct.pack("<qQ12qQQ", 4, t, 2, -1, -1, 7, deletion + 2, moved, -1, -1, 0, 0, 0, -1, 0, 0),
    ]
    assert gone.digest() == sum(map(word, entries)) % 2**64


def test_the_digest_in_a_heartbeat() -> None:
    """G4: state and chain of the newest checkpoint, with the fold version; the fold itself does not judge it."""
    assert FOLD_VERSION == 4
    book = DifferentialLog()
    book.world.watched.add(GROUP)
    session = book.join()
    while not book.world.checkpoints:
        book.put(note())
    newest = book.world.checkpoints[GROUP]
    assert newest == Checkpoint(16, book.digest(), book.world.chain, 4)
    book.must(Heartbeat(session, 0, digest=newest))
    book.must(Heartbeat(session, 0, digest=Checkpoint(16, newest.state ^ 1, 0, 255)))


def test_tokens() -> None:
    """K1: (incarnation, claim epoch) in this order; texts sort as the tokens do; a later owner's is greater."""
    incarnations = (bytes(16), INCARNATION, b"\xff" * 16)
    tokens = [Token(incarnation, epoch) for incarnation in incarnations for epoch in (0, 9, 10, 255, 256, 2**63 - 1)]
    assert tokens == sorted(tokens)
    assert list(map(str, tokens)) == sorted(map(str, tokens))
    assert str(Token(INCARNATION, 0x2A)) == "000102030405060708090a0b0c0d0e0f-000000000000002a"
    assert [Token.parse(str(token)) for token in tokens] == tokens
    zero = str(tokens[0])
    for text in ("", "00", zero[:-1], zero + "0", zero.replace("-", "_"), "g" * 32 + "-" + "0" * 16):
        with pytest.raises(InvalidOption):
            Token.parse(text)
    book = DifferentialLog()
    session, first = book.owner()
    book.release(session, first)
    assert Token(INCARNATION, book.claim(session)) > Token(INCARNATION, first)


def test_config_is_hashed_as_its_bytes_in_the_log() -> None:
    """G3: H(config body): the same settings in other bytes are another digest."""
    short, long = DifferentialLog(), DifferentialLog()
    assert short.put(codec.encode(GroupConfig(-1), GROUP, INCARNATION)).accepted
    assert long.put(wire.record(GROUP, 11, -1, -1, 0)).accepted
    assert short.group.config == long.group.config
    assert short.digest() != long.digest()
