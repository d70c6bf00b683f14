"""The oracle on snapshots (PROTOCOL.md 15): where they may come, which are sound, which bytes N2 demands."""

import struct
from typing import Any

import pytest

from marshal_sim.oracle.oracle import HASH_NAME, Oracle
from marshal_sim.oracle.snapshot import Snapshots
from marshal_sim.oracle.wire import Record, decode_record
from tests.support.oracle_log import CLAIM, CONFIG, GROUP, HEARTBEAT, JOIN, LEAVE, RELEASE, TOPOLOGY, Log
from tests.support.wire import INCARNATION, envelope, pack

GENESIS = [0, INCARNATION, 1, HASH_NAME, 2]


def told(at: int, state: int, chain: int, data: bytes, genesis: list[object] | None = None) -> Record:
    """One Snapshot record; a witness without data."""
    instance = b"w" * 16 if data == b"" else bytes(16)
    return decode_record(14, pack([14, genesis or GENESIS, instance, at, 0, 1, state, chain, data]))


def put_config(log: Log, *fields: object) -> bytes:
    body = pack([CONFIG, *fields])
    assert log.put(envelope(GROUP, CONFIG, body)).outcome == "accepted"
    return body


def lived() -> tuple[Log, list[Any]]:
    """A log at a checkpoint with all that a state can hold, and that state as N2 says, written by hand."""
    log = Log()
    gone = log.must(CONFIG, -1, -1, 0, True)
    config = put_config(log, gone, -1, 0, False, "p")
    config_offset = log.last
    session = log.join("c")
    joined = pack([JOIN, "c", struct.pack(">QQ", 1, session), 1, 1000, ["t"], -1])
    named = log.must(TOPOLOGY, "t", 4, gone, -1, "", "one")
    nameless = log.must(TOPOLOGY, "ü", 1, gone)
    epoch = log.must(CLAIM, session, "t", 0, -1, 100)
    parked = log.must(CLAIM, session, "t", 2, -1, 7)
    whole = log.must(CLAIM, session, "t", -1, -1)
    assert log.release(session, parked, parked="why", successor=3) == "accepted"
    released = log.last
    beat = log.must(HEARTBEAT, session, 4, [[epoch, 110, 1, 2, 3, bytes(300)]], [8, 7], None, None, 250)
    while log.oracle.next_offset < 16:
        log.put(None)
    group = [
        GROUP,
        1,
        gone,
        0,
        config_offset,
        config,
        gone,
        [["t", 4, 4, named, "one"], ["ü", 1, 1, nameless, ""]],
        [[session, joined, beat, -1, [8, 7], 250, 4]],
        [
            ["t", -1, session, whole, -1, gone + 1, whole, -1, -1, 0, 0, 0, -1, b"", ""],
            ["t", 0, session, epoch, 110, gone + 1, epoch, -1, -1, 1, 2, 3, 100, bytes(300), ""],
            ["t", 2, -1, -1, 7, gone + 1, released, session, 3, 0, 0, 1, -1, b"", "why"],
        ],
    ]
    return log, [3, 4, 0, [group]]


def read(log: Log, data: bytes, offset: int = 16, **given: Any) -> Snapshots:
    """What is known of snapshots after one and its witness at `offset`."""
    found = Snapshots()
    at, chain = log.oracle.chain_digest()
    for piece in (data, b""):
        found.read(told(given.get("at", at), log.oracle.log_digest(), chain, piece, given.get("genesis")), offset)
    return found


def test_a_state_by_hand() -> None:
    """N2, N3, N4, N9: format 3 of fold version 4; a reader that begins there has the same state and digests."""
    log, state = lived()
    ((found, chain),) = read(log, pack(state)).confirmed(0)
    assert (found.incarnation, found.partitions, found.at) == (INCARNATION, 1, 16)
    assert found.groups == log.oracle.groups
    oracle = Oracle()
    oracle.begin_at(found, chain)
    log.put(None)
    oracle.apply(16, None)
    for value in (pack([LEAVE, 3]), pack([RELEASE, 3, 8, -1])):
        told_by_both = [one.apply(one.next_offset, envelope(GROUP, value[1], value)) for one in (log.oracle, oracle)]
        assert told_by_both[0] == told_by_both[1]
    assert oracle.log_digest() == log.oracle.log_digest()


def change(state: list[Any], *path: int, to: object) -> list[Any]:
    """The state with one value changed."""
    if not path:
        raise AssertionError("a path names a place")
    copy = list(state)
    copy[path[0]] = change(copy[path[0]], *path[1:], to=to) if path[1:] else to
    return copy


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ((0,), 1),  # format
        ((1,), 1),  # fold version
        ((2,), 1),  # number of the log
        ((3, 0, 6), 0),  # offset of the last deletion
        ((3, 0, 6), b""),
        ((3, 0, 7, 0, 4), "other"),  # id of a topic
        ((3, 0, 7, 1, 4), b""),
        ((3, 0, 8), b""),
        ((3, 0, 8, 0, 5), 251),  # idle time
        ((3, 0, 8, 0, 4), b"\x08\x07"),  # ready epochs as a bin, which has the same numbers in it
        ((3, 0, 9, 1, 12), 101),  # where the claim began
        ((3, 0, 9, 1, 13), bytes(299)),  # progress
        ((3, 0, 9, 1, 13), "x"),
        ((3, 0, 9, 0, 13), ""),
        ((3, 0, 9, 2, 14), ""),  # parked
        ((3, 0, 9, 2, 14), b"why"),
        ((3, 0, 9, 0, 14), b""),
        ((3, 0, 9, 0), ["t", -1]),
    ],
)
def test_another_state_is_not_sound(path: tuple[int, ...], to: object) -> None:
    """N4: another digest, or not the one form of N2; it is passed over."""
    log, state = lived()
    assert read(log, pack(state)).confirmed(0)
    assert not read(log, pack(change(state, *path, to=to))).confirmed(0)


def test_a_state_of_format_1_is_not_sound() -> None:
    """N2, N4: the one of protocol 1 had shorter arrays."""
    log = Log()
    while log.oracle.next_offset < 16:
        log.put(None)
    assert read(log, pack([3, 4, 0, []])).confirmed(0)
    for other in ([1, 1, 0, []], [2, 4, 0, []], [3, 3, 0, []], [3, 4, 0], [3, 4, 0, b""]):
        assert not read(log, pack(other)).confirmed(0)


def test_a_snapshot_beyond_its_own_offset_is_passed_over() -> None:
    """N1: no reader can have folded so far when it was written. One at its own offset can be; so with witnesses."""
    log, state = lived()
    assert read(log, pack(state), offset=16).confirmed(0)
    assert read(log, pack(state), offset=17).confirmed(0)
    early = read(log, pack(state), offset=15)
    assert (early.chunks, early.witnesses, early.confirmed(0)) == ({}, {}, [])
    at, chain = log.oracle.chain_digest()
    digest = log.oracle.log_digest()
    late = Snapshots()
    late.read(told(at, digest, chain, pack(state)), 20)
    late.read(told(at, digest, chain, b""), 15)
    assert not late.confirmed(0)
    late.read(told(at, digest, chain, b""), 21)
    assert late.confirmed(0)


@pytest.mark.parametrize(
    "genesis", [[0, INCARNATION, 1, HASH_NAME, 1], [0, INCARNATION, 1, HASH_NAME, 3], [0, INCARNATION, 1, "md5", 2]]
)
def test_nobody_begins_with_a_genesis_that_is_refused(genesis: list[object]) -> None:
    """L6: of another protocol or hash."""
    log, state = lived()
    assert read(log, pack(state)).confirmed(0)
    assert not read(log, pack(state), offset=18, genesis=genesis).confirmed(0)
