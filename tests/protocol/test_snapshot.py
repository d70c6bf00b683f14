"""Snapshots as bytes and records: the form of a state, its soundness, how chunks join, how a history restarts."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec
import pytest

from marshal_py.errors import HistoryRestarted, ProtocolUnknown, TopicRecreated
from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.snapshot import CHUNK_BYTES, STORED_MAX, SnapshotStore, Stored
from marshal_py.protocol.fold.world import FOLD_VERSION, World, hash64
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, TopicPartition, route
from marshal_py.protocol.wire.records import (
    ClaimingPartition,
    ClaimState,
    Genesis,
    GroupConfig,
    Heartbeat,
    Note,
    ReleasingPartition,
    SeekingPartition,
    Snapshot,
    StepDown,
    Topology,
)
from tests.support import hostile, wire
from tests.support.differential_log import GROUP, INCARNATION, OTHER_INCARNATION, TOPIC, DifferentialLog, genesis

GENESIS = Genesis(INCARNATION, 1, HASH_NAME, 2)
ONE, TWO = b"1" * 16, b"2" * 16
LATER = 10**6  # an offset beyond every checkpoint of these tests


def filled(log: DifferentialLog, group: str = GROUP) -> DifferentialLog:
    """Up to the next checkpoint."""
    while log.world.next_offset % 16:
        log.must(Note(-1, "filler"), group)
    return log


def example() -> DifferentialLog:
    """A log at checkpoint 16 with everything that a state may hold."""
    log = DifferentialLog()
    session, _ = log.owner()
    log.must(Heartbeat(session, 1, ready=(7, 8)))
    log.must(GroupConfig(-1, policy="greedy"))
    log.claim(session, 2)
    log.pause()
    log.join("other")
    return filled(log)


def stored(world: World, instance: bytes = ONE) -> Stored:
    """The snapshot of a world, as a SnapshotStore would return it."""
    data = snapshot.state_of(world)
    assert data is not None
    store = SnapshotStore()
    found = [store.take(record, world.next_offset) for record in pieces(world, instance)]
    assert found[-1] is not None
    return found[-1]


def pieces(world: World, instance: bytes = ONE) -> list[Snapshot]:
    data = snapshot.state_of(world)
    assert data is not None
    assert world.genesis is not None
    return snapshot.split(world.genesis, instance, world.chain_at, snapshot.digest_of(world), world.chain, data)


def test_the_state_is_what_the_text_says() -> None:
    """N2: one MessagePack value, written down here by hand."""
    log = DifferentialLog()
    session = log.join()
    topology = log.must(Topology(TOPIC, 4, -1, topic_id="one"))
    epoch = log.claim(session)
    config = log.must(GroupConfig(-1, policy="greedy"))
    parked = log.must(ReleasingPartition(session, log.claim(session, 1, 5), 6, 9, parked="why"))
    beat = log.must(Heartbeat(session, 1, (ClaimState(epoch, 110, 1, 2, 3, b"\1\2\0"),), (9,), idle_ms=77))
    filled(log)
    body = {number: value[14 + value[11] :] for number, value in enumerate(log.values) if value is not None}
    data = snapshot.state_of(log.world)
    assert data is not None
    assert msgspec.msgpack.decode(data) == [
        3,
        FOLD_VERSION,
        0,
        [
            [
                GROUP,
                1,
                -1,
                0,
                config,
                body[config],
                -1,
                [[TOPIC, 4, 4, topology, "one"]],
                [[session, body[session], beat, -1, [9], 77, 1]],
                [
                    [TOPIC, 0, session, epoch, 110, 0, epoch, -1, -1, 1, 2, 3, 100, b"\1\2\0", ""],
                    [TOPIC, 1, -1, -1, 6, 0, parked, session, 9, 0, 0, 0, -1, b"", "why"],
                ],
            ]
        ],
    ]


def test_the_digest_of_a_log() -> None:
    """N3: the sum over the groups of H(5, name, digest of the group)."""
    log = example()
    log.must(log.new_join(), "other")
    other = DifferentialLog(1)
    other.must(Note(-1, "k"))
    total = 0
    for name, group in log.world.groups.items():
        packed = b"".join(n.to_bytes(8, "little") for n in (5, hash64(name.encode()), group.digest()))
        total += hash64(packed)
    assert snapshot.digest_of(log.world) == total % 2**64
    assert snapshot.digest_of(other.world) == 0, "no group has a state"


def test_load_and_go_on() -> None:
    """N9: from a snapshot on, a reader holds what one from offset 0 holds."""
    log = example()
    world = snapshot.load(stored(log.world), 0)
    assert world is not None
    assert (world.next_offset, world.chain_at, world.chain) == (16, 16, log.world.chain)
    world.check()
    for name, group in log.world.groups.items():
        assert world.groups[name].digest() == group.digest()
    log.join("later")
    log.must(Note(-1, "k"))
    filled(log)
    for offset in range(16, log.world.next_offset):
        apply(world, offset, log.values[offset])
    assert (world.chain, snapshot.state_of(world)) == (log.world.chain, snapshot.state_of(log.world))


def rich() -> DifferentialLog:
    """A log at a checkpoint in which every field of the state has something to say, and a group that was deleted."""
    log = DifferentialLog()
    gone = log.delete()
    log.must(GroupConfig(gone, on_topic_recreated="earliest"))
    session = log.join()
    at = log.must(Topology(TOPIC, 4, gone, topic_id="one"))
    log.must(Topology(TOPIC, 3, at, topic_id="two"))
    epoch = log.claim(session)
    log.must(
        ReleasingPartition(
            session,
            log.claim(session, 1),
            130,
            5,
            "",
            attempts=4,
            in_flight=3,
            progress=b"q",
            parked="DataTopicRecreated",
        )
    )
    log.must(Heartbeat(session, 1, (ClaimState(epoch, 110, 1, 2, 3, b"p"),), (9,), idle_ms=77))
    log.must(StepDown(session, -1))
    log.must(SeekingPartition(session, epoch, 50))
    log.must(GroupConfig(-1, deleted=True), "deleted")
    log.must(log.new_join(mode=2), "other")
    return filled(log)


def test_a_state_with_everything_in_it() -> None:
    """N2, N3: written, read and written again it is the same; a reader that loads it folds on as the others do."""
    log = rich()
    whole = stored(log.world)
    world = snapshot.load(whole, 0)
    assert world is not None
    world.check()
    assert snapshot.state_of(world) == whole.data
    assert snapshot.digest_of(world) == snapshot.digest_of(log.world)
    group, topic = world.groups[GROUP], world.groups[GROUP].topics[TOPIC]
    assert (topic.id, topic.first_count, group.deleted_at, group.pause_change) == ("two", 0, 1, 1)
    assert world.groups["deleted"].deleted
    one, two = (group.partitions[TopicPartition(TOPIC, number)] for number in (0, 1))
    assert (one.floor, one.position, one.generation, one.attempts) == (50, 50, 3, 1)
    assert (two.parked, two.progress, two.attempts, two.in_flight) == ("DataTopicRecreated", b"q", 4, 3)
    (session,) = group.sessions.values()
    assert (session.idle_ms, session.ready, session.mark > 0) == (77, (9,), True)
    start = log.world.next_offset
    log.refuses(Topology(TOPIC, 3, 1), "observed")
    log.refuses(ClaimingPartition(session.id, TOPIC, 1, two.version), "parked")
    log.refuses(Topology(TOPIC, 3, -1), "deleted", "deleted")
    log.must(Heartbeat(session.id, 2, (ClaimState(one.epoch, 60, attempts=1),)))
    filled(log)
    for offset in range(start, log.world.next_offset):
        apply(world, offset, log.values[offset])
    assert (world.chain, snapshot.state_of(world)) == (log.world.chain, snapshot.state_of(log.world))


def test_a_snapshot_of_another_protocol() -> None:
    """L6: what names a Genesis of protocol 1 is refused by name, of a later one too; another incarnation goes first."""
    whole = stored(example().world)
    for protocol in (1, 3):
        other = Stored(whole.key, msgspec.structs.replace(whole.genesis, protocol=protocol), whole.data, {ONE})
        with pytest.raises(ProtocolUnknown) as raised:
            snapshot.load(other, 0)
        assert raised.value.outdated == (protocol == 1)
        with pytest.raises(TopicRecreated):
            snapshot.load(other, 0, expected=OTHER_INCARNATION)


def changed(**fields: object) -> Iterator[Stored]:
    whole = stored(example().world)
    yield Stored(msgspec.structs.replace(whole.key, **fields), whole.genesis, whole.data, {ONE})


def unsound() -> Iterator[tuple[str, Stored]]:
    whole = stored(example().world)

    def of(data: bytes) -> Stored:
        return Stored(whole.key, whole.genesis, data, {ONE})

    tree = msgspec.msgpack.decode(whole.data)
    yield "digest", next(changed(state=whole.key.state ^ 1))
    yield "checkpoint", next(changed(at=17))
    yield "offsets in the future", next(changed(at=0))
    yield "cut", of(whole.data[:-1])
    yield "followed", of(whole.data + b"\x00")
    yield "no state", of(b"\x01")
    yield "longer form", of(b"\xdc\x00\x04" + whole.data[1:])
    for at, value in ((0, 2), (0, 4), (1, FOLD_VERSION - 1), (1, FOLD_VERSION + 1), (2, 1)):
        other = [*tree]
        other[at] = value
        yield f"element {at} as {value}", of(msgspec.msgpack.encode(other))


def incoherent() -> Iterator[tuple[str, Stored]]:
    """States with a correct digest and form that no fold can have."""
    whole = stored(example().world)

    def of(path: tuple[int, ...], value: object) -> Stored:
        tree = inner = msgspec.msgpack.decode(whole.data)
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value
        return Stored(whole.key, whole.genesis, msgspec.msgpack.encode(tree), {ONE})

    group, sessions, partitions = (3, 0), 8, 9
    yield "a Join that is none", of((*group, sessions, 0, 1), b"no Join")
    yield "a config that is none", of((*group, 5), b"no config")
    yield "an owner that does not live", of((*group, partitions, 0, 2), 99)
    yield "an epoch without an owner", of((*group, partitions, 0, 2), -1)
    yield "two claims with one epoch", of((*group, partitions, 1, 3), whole_epoch(whole))
    yield "an extension in the future", of((*group, sessions, 0, 2), 16)
    yield "an owned partition without a position", of((*group, partitions, 0, 4), -1)
    yield "an owned partition that is parked", of((*group, partitions, 0, 14), "why")
    yield "a claim that began nowhere", of((*group, partitions, 0, 12), -1)
    yield "a claim that began above its position", of((*group, partitions, 0, 12), 101)
    yield "a session that the settings do not allow", of((*group, 5), wire.pack([11, -1, -1, 0, False, "members"]))
    yield "a first count that no topic has", of((*group, 7, 0, 2), -1)


def whole_epoch(whole: Stored) -> int:
    epoch: int = msgspec.msgpack.decode(whole.data)[3][0][9][0][3]
    return epoch


INCOHERENT = dict(incoherent())


@pytest.mark.parametrize("what", INCOHERENT)
def test_a_state_that_no_fold_can_have(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """N4: it would break its reader later, so it is refused even if its digest matches."""
    broken = INCOHERENT[what]
    monkeypatch.setattr(snapshot, "digest_of", lambda world: broken.key.state)
    assert snapshot.load(broken, 0) is None


UNSOUND = dict(unsound())


@pytest.mark.parametrize("what", UNSOUND)
def test_an_invalid_snapshot_is_skipped(what: str) -> None:
    """N4: another digest, form, fold version, log or order, or a state to which no fold comes."""
    assert snapshot.load(UNSOUND[what], 0) is None


def test_of_another_log_or_incarnation() -> None:
    """N4: a snapshot is valid for its own log alone; another incarnation than the known one means a recreated topic."""
    whole = stored(example().world)
    assert snapshot.load(whole, 0, expected=INCARNATION) is not None
    assert snapshot.load(whole, 1, GENESIS) is None
    with pytest.raises(TopicRecreated):
        snapshot.load(whole, 0, expected=OTHER_INCARNATION)


def test_chunks_join_in_any_order() -> None:
    """N1: by instance, checkpoint, count and digests; copies are ignored; no chunk exceeds the bound."""
    data = Random(5).randbytes(3 * CHUNK_BYTES + 5)
    chunks = snapshot.split(GENESIS, ONE, 32, 7, 8, data)
    assert [len(chunk.data) for chunk in chunks] == [CHUNK_BYTES] * 3 + [5]
    assert {chunk.genesis for chunk in chunks} == {GENESIS}
    assert all(len(codec.encode(chunk, "", INCARNATION)) < 900_000 for chunk in chunks)
    for seed in range(5):
        rng = Random(seed)
        mixed = [*chunks, *chunks[:3], *snapshot.split(GENESIS, TWO, 32, 7, 8, b"other")]
        mixed += [msgspec.structs.replace(chunks[0], chunk=4), msgspec.structs.replace(chunks[0], state=9, data=b"z")]
        rng.shuffle(mixed)
        store = SnapshotStore()
        found = [one for record in mixed if (one := store.take(record, LATER)) is not None]
        assert {one.data for one in found} == {data, b"other"}
        assert len(found) == 2


def test_a_snapshot_from_the_future_is_ignored() -> None:
    """N1: of a checkpoint beyond the record's own offset: its writer cannot have folded so far."""
    store = SnapshotStore()
    for record in (Snapshot(GENESIS, ONE, 48, 0, 1, 7, 8, b"state"), snapshot.witness(GENESIS, TWO, 48, 7, 8)):
        assert store.take(record, 47) is None
    assert (store.whole, store._vouched) == ({}, {})
    store.take(Snapshot(GENESIS, ONE, 48, 0, 1, 7, 8, b"state"), 48)
    assert not store.confirmed(), "the witness from the future does not count"
    assert store.take(snapshot.witness(GENESIS, TWO, 48, 7, 8), 49) is store.confirmed()[0]


def test_nonsense_costs_no_memory() -> None:
    """N1: chunks that never become whole are forgotten, the oldest first."""
    store = SnapshotStore()
    for number in range(10 * STORED_MAX):
        store.take(Snapshot(GENESIS, ONE, 16 * number, 0, 2, 1, 1, b"half"), LATER)
        store.take(Snapshot(GENESIS, TWO, 16 * number, 0, 1, 1, 1, b"whole"), LATER)
        store.take(snapshot.witness(GENESIS, TWO, 16 * number + 1, 1, 1), LATER)
    assert (len(store.whole), len(store._open), len(store._vouched)) == (STORED_MAX,) * 3


def test_a_reader_of_history_keeps_the_oldest_snapshots() -> None:
    """N1: its fold begins at the first one that is left of a truncated log."""
    store = SnapshotStore(oldest=True)
    for number in range(1, 3 * STORED_MAX):
        store.take(Snapshot(GENESIS, ONE, 16 * number, 0, 1, 1, 1, b"whole"), LATER)
        store.take(snapshot.witness(GENESIS, TWO, 16 * number, 1, 1), LATER)
    assert [stored.at for stored in store.confirmed()] == [16 * number for number in range(STORED_MAX, 0, -1)]


def test_chunks_that_nest_together_are_no_snapshot() -> None:
    """N4, E6: each is within the limit; a reader must not end by its stack."""
    data, store = b"\x95\x03\x04\x00\x90" + b"\x91" * 200_000 + b"\x90", SnapshotStore()
    for record in [*snapshot.split(GENESIS, ONE, 16, 0, 1, data), snapshot.witness(GENESIS, TWO, 16, 0, 1)]:
        store.take(record, LATER)
    (stored,) = store.confirmed()
    assert snapshot.load(stored, 0) is None


def test_which_clients_vouch() -> None:
    """N5: a witness of any client, read before or after; by the writer alone it is a self audit."""
    for early in (False, True):
        for by, self_audit in ((TWO, False), (ONE, True)):
            store = SnapshotStore()
            records = [*snapshot.split(GENESIS, ONE, 32, 7, 8, b"state"), snapshot.witness(GENESIS, by, 32, 7, 8)]
            for record in reversed(records) if early else records:
                assert not store.confirmed()
                store.take(record, LATER)
            (found,) = store.confirmed()
            assert (found.at, found.self_audit) == (32, self_audit)
    store.take(snapshot.witness(GENESIS, TWO, 48, 7, 8), LATER)
    assert not store.confirmed(48), "it vouches for a snapshot that is not there"
    store.take(Snapshot(GENESIS, TWO, 48, 0, 1, 7, 9, b"state"), LATER)
    assert not store.confirmed(48), "of another chain"


def test_an_opaque_group() -> None:
    """N7: no snapshot, because this version cannot read the whole state."""
    log = example()
    assert snapshot.state_of(log.world) is not None
    log.put(wire.record("zz", 3, 0, record_version=3))
    assert snapshot.state_of(log.world) is None


def test_a_founding_snapshot_stops_readers_that_began_before() -> None:
    """N13: an older reader stops; one that begins there or after it reads on."""
    log = example()
    data = [codec.encode(record, "", INCARNATION) for record in snapshot.founding(GENESIS, 0, ONE, 16)]
    error = log.stops(data[0])
    assert isinstance(error, HistoryRestarted)
    assert (error.log, error.offset, error.at) == (0, 16, 16)
    store = SnapshotStore()
    for offset, value in enumerate(data, 16):
        record = codec.open_snapshot(value)
        assert record is not None
        store.take(record, offset)
    world = snapshot.load(store.confirmed(16)[0], 0)
    assert world is not None
    assert (world.groups, world.chain) == ({}, 0)
    for offset, value in enumerate([*data, codec.encode(log.new_join(), GROUP, INCARNATION)], 16):
        assert apply(world, offset, value).accepted
    assert list(world.groups) == [GROUP]


def test_a_founding_snapshot_of_another_incarnation() -> None:
    """N13: no copy of the root was left; a reader that knows the old one stops. Without a Genesis it is garbage."""
    other = Genesis(OTHER_INCARNATION, 1, HASH_NAME, 2)
    chunk, vouched = (codec.encode(record, "", OTHER_INCARNATION) for record in snapshot.founding(other, 0, ONE, 16))
    log = example()
    for value in (chunk, vouched):
        assert isinstance(log.stops(value), HistoryRestarted)
    assert DifferentialLog(start=False).put(chunk).reason == "garbage"
    further = DifferentialLog(log=1, root=genesis(2), start=False)
    assert further.put(chunk).reason == "garbage", "of a checkpoint beyond its own offset (N1)"
    while further.world.next_offset < 16:
        further.put(None)
    assert isinstance(further.stops(chunk), HistoryRestarted), "a reader of a further log knows the root's"
    plain = Snapshot(other, ONE, 16, 0, 1, 0, 5, b"x")
    assert log.put(codec.encode(plain, "", OTHER_INCARNATION)).reason == "garbage"
    assert log.put(wire.snapshot(OTHER_INCARNATION, chain=0, record_version=2)).reason == "garbage"
    assert type(log.stops(wire.snapshot(INCARNATION, chain=0, record_version=2))).__name__ == "ProtocolUnknown"


def test_looking_for_snapshots() -> None:
    """N4: garbage, other records, other versions and broken checksums are no snapshots."""
    (chunk,) = pieces(example().world)
    value = codec.encode(chunk, "", INCARNATION)
    assert codec.open_snapshot(value) == chunk
    for other in (
        None,
        b"",
        value[:-1],
        value[:20] + b"\xff" + value[21:],
        genesis(),
        value[:2] + b"\x02" + value[3:],
        codec.encode(Note(-1, "k"), GROUP, INCARNATION),
    ):
        assert codec.open_snapshot(other) is None


def test_many_groups_of_two_logs() -> None:
    """N2: groups of other logs are no part of the state."""
    log = DifferentialLog(2)
    names = [f"g{number}" for number in range(20)]
    for name in names:
        log.put(codec.encode(hostile.plausible(Random(1), log.world, name), name, INCARNATION))
        if route(name, 2) == 0:
            log.must(log.new_join(), name)
    while log.world.next_offset % 16:
        log.put(None)
    world = snapshot.load(stored(log.world), 0)
    assert world is not None
    assert sorted(world.groups) == sorted(name for name in names if route(name, 2) == 0)
