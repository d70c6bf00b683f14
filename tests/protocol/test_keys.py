"""Rule 11 of PROTOCOL.md: who may administer a group that has keys. Both folds judge every record."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from marshal_py.protocol.fold import rationalizer, snapshot
from marshal_py.protocol.fold.rationalizer import Outcome, apply
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.codec import SIGNED_VERSION, SigningKey, signed
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import (
    Evict,
    Genesis,
    GroupConfig,
    Leave,
    Move,
    Record,
    ReleaseGroup,
    SetPosition,
    Signed,
    StepDown,
    Topology,
)
from marshal_sim.cluster.hostile import key_of
from marshal_sim.oracle import ed25519
from marshal_sim.oracle.snapshot import Snapshots
from marshal_sim.oracle.wire import Record as OracleRecord
from tests.support import wire
from tests.support.differential_log import GROUP, INCARNATION, OTHER_INCARNATION, PAUSE_MS, DifferentialLog

ALICE, BOB, MALLORY = key_of(1), key_of(2), key_of(3)


def keyed(*keys: SigningKey, **log: bool) -> DifferentialLog:
    """A log with the group, whose first settings name these keys."""
    book = DifferentialLog(**log)
    assert give(book, GroupConfig(NONE, mode=1, admin_keys=tuple(key.public for key in keys or (ALICE,)))) == "accepted"
    return book


def give(book: DifferentialLog, record: Record | Signed, version: int = SIGNED_VERSION) -> str:
    return book.put(codec.encode(record, GROUP, INCARNATION, version)).reason or "accepted"


def sign(book: DifferentialLog, record: Record, key: SigningKey = ALICE, observed: int | None = None) -> Signed:
    return signed(record, GROUP, INCARNATION, book.group.config_offset if observed is None else observed, key)


def test_a_group_with_keys_refuses_what_nobody_signed() -> None:
    """F11.1, F11.2: pauses, positions, settings and deletions; what members write stays as it is."""
    book = keyed()
    session, _ = book.owner()
    for record in (
        ReleaseGroup(NONE, NONE, PAUSE_MS),
        ReleaseGroup(NONE, NONE, 0, waited_ms=10**9),
        SetPosition(0, (Move("t", 0, NONE, 5),)),
        GroupConfig(book.group.config_offset),
        GroupConfig(book.group.config_offset, deleted=True),
    ):
        assert give(book, record, 1) == give(book, record) == "unsigned"
        assert give(book, sign(book, record, MALLORY)) == "key"
    assert give(book, StepDown(session, NONE)) == "accepted"
    assert give(book, Evict(session, book.session(session).extended, 10**6)) == "accepted"
    assert not book.group.paused


def test_what_is_signed_is_judged_as_if_it_were_not() -> None:
    """F11.3: by the rule of the record that it carries, which is also the verdict's."""
    book = keyed(ALICE, BOB)
    book.topology()
    assert give(book, sign(book, ReleaseGroup(5, NONE, PAUSE_MS))) == "observed"
    assert give(book, sign(book, ReleaseGroup(NONE, NONE, PAUSE_MS), BOB)) == "accepted"
    token = book.group.pause_change
    assert token == book.last
    move = SetPosition(token, (Move("t", 0, NONE, 5),), resume=True)
    verdict = book.put(codec.encode(sign(book, move), GROUP, INCARNATION, SIGNED_VERSION))
    assert (verdict.accepted, verdict.record) == (True, move)
    assert book.partition().position == 5
    session = book.join()
    for record in (StepDown(session, NONE), Leave(session), Topology("t", 4, book.group.topology_offset("t"))):
        assert give(book, sign(book, record)) == "malformed", "these need no signature"
    shrink = Topology("t", 1, book.group.topology_offset("t"), book.group.pause_change)
    assert give(book, shrink) == give(book, shrink, 1) == "unsigned"
    assert give(book, sign(book, shrink)) == "token", "the move has ended the pause"


def test_members_end_a_pause_that_is_over() -> None:
    """F11.2: nobody signs that, and nothing earlier or else."""
    book = keyed()
    assert give(book, sign(book, ReleaseGroup(NONE, NONE, PAUSE_MS))) == "accepted"
    token = book.group.pause_change
    assert give(book, ReleaseGroup(token, NONE, 0, waited_ms=PAUSE_MS - 1)) == "unsigned"
    assert give(book, ReleaseGroup(token, token, PAUSE_MS, waited_ms=PAUSE_MS)) == "unsigned"
    assert give(book, ReleaseGroup(token, NONE, 0, waited_ms=PAUSE_MS), 1) == "accepted"


def test_a_signature_is_good_once_here_and_now() -> None:
    """F11.3, F11.4: not for another group, incarnation, body or type, and not under later settings."""
    book = keyed()
    settings = sign(book, replace(book.group.config, observed=book.group.config_offset))
    early = sign(book, ReleaseGroup(NONE, NONE, PAUSE_MS))
    assert give(book, settings) == "accepted"
    assert give(book, settings) == "observed"
    assert give(book, early) == "observed", "signed under settings that are gone"
    pause = ReleaseGroup(NONE, NONE, PAUSE_MS)
    observed, good = book.group.config_offset, sign(book, pause)
    for forged in (
        signed(pause, "other", INCARNATION, observed, ALICE),
        signed(pause, GROUP, OTHER_INCARNATION, observed, ALICE),
        replace(good, body=codec.body_of(ReleaseGroup(NONE, NONE, PAUSE_MS + 1))),
        replace(good, signature=bytes(64)),
        replace(good, signature=good.signature[:32] + bytes(32)),
    ):
        assert give(book, forged) == "signature"
    assert give(book, replace(good, key=BOB.public)) == "key"
    assert give(book, replace(good, kind=13)) == give(book, replace(good, kind=200)) == "malformed"
    assert give(book, replace(good, kind=17, body=codec.body_of(good))) == "malformed", "one in another"
    assert give(book, replace(good, body=b"?")) == "malformed"
    assert give(book, good) == "accepted"


def test_keys_are_replaced_and_removed_by_whom_has_one() -> None:
    """F11.1: by new settings, which a key of the old ones signs; also those of a deletion stay in force."""
    book = keyed()
    config = book.group.config
    assert config is not None
    wanted = replace(config, observed=book.group.config_offset, admin_keys=(BOB.public,))
    assert give(book, sign(book, wanted, BOB)) == "key"
    assert give(book, sign(book, wanted)) == "accepted"
    assert book.group.keys == (BOB.public,)
    gone = GroupConfig(book.group.config_offset, deleted=True, admin_keys=(BOB.public,))
    assert give(book, sign(book, gone, ALICE)) == "key"
    assert give(book, sign(book, gone, BOB)) == "token", "F11.4: only in a pause, so that no copy counts after it"
    assert give(book, sign(book, ReleaseGroup(NONE, NONE, PAUSE_MS), BOB)) == "accepted"
    gone = replace(gone, token=book.group.pause_change)
    assert give(book, sign(book, gone, BOB)) == "accepted"
    revived = GroupConfig(book.group.config_offset)
    assert give(book, revived) == "unsigned"
    assert give(book, sign(book, ReleaseGroup(NONE, NONE, 1), BOB)) == "deleted"
    assert give(book, sign(book, revived, BOB)) == "accepted"
    assert book.group.keys == ()
    assert give(book, ReleaseGroup(book.group.pause_change, NONE, PAUSE_MS), 1) == "accepted"


def test_settings_of_version_1_name_no_keys() -> None:
    """E7, F11.1: an older reader does not know the field, so nobody reads it there, whatever it is."""
    digests = []
    for version, last in ((1, [ALICE.public]), (2, [ALICE.public]), (1, "what a later library adds")):
        book = DifferentialLog()
        body = (-1, -1, 1, False, "", [], 0, "", 0, [], [], 0, 0, 0, 0, "", "", 0, False, 0, last)
        assert book.put(wire.record(GROUP, codec.CONFIG, *body, record_version=version)).accepted
        assert book.group.keys == ((ALICE.public,) if version == 2 else ())
        digests.append(book.digest())
    assert digests[0] != digests[1]


def test_who_cannot_verify_stops_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """F11.5, E5: without `cryptography` the group is opaque from its first keys on, and others go on."""
    book = keyed()
    give(book, sign(book, ReleaseGroup(NONE, NONE, PAUSE_MS)))
    book.must(Topology("t", 4, NONE), "other")
    monkeypatch.setattr(rationalizer, "READS_VERSION", 1)
    world = World()
    outcomes = [apply(world, offset, value).outcome for offset, value in enumerate(book.values)]
    assert outcomes == [Outcome.ACCEPTED, Outcome.IGNORED, Outcome.IGNORED, Outcome.ACCEPTED]
    assert (world.groups[GROUP].opaque_at, world.groups["other"].opaque_at) == (1, NONE)
    assert book.put(wire.envelope(GROUP, codec.SIGNED, b"")).reason == "opaque", "of version 1 there is no such type"


@pytest.mark.parametrize("rest", ["valid", "doctored"])
def test_a_snapshot_has_the_keys(rest: str) -> None:
    """N2: in a format of its own, which readers of the older one pass over; logs without keys keep theirs."""
    book = keyed()
    for _ in range(16 - book.world.next_offset):
        book.put(b"")
    genesis, data = book.world.genesis, snapshot.state_of(book.world)
    assert genesis is not None
    assert data is not None
    assert data[1] == snapshot.KEYED_FORMAT
    state = snapshot.digest_of(book.world)
    if rest == "doctored":  # as if the settings were of version 1
        data = data[:-1] + b"\0"
    records = snapshot.split(genesis, bytes(16), 16, state, book.world.chain, data)
    store, oracle = snapshot.SnapshotStore(), Snapshots()
    for record in [*records, snapshot.witness(genesis, bytes(16), 16, state, book.world.chain)]:
        stored = store.take(record, 20)
        fields = {name: getattr(record, name) for name in record.__struct_fields__}
        named = {name: getattr(record.genesis, name) for name in Genesis.__struct_fields__}
        oracle.read(OracleRecord("Snapshot", {**fields, "genesis": named}), 20)
    assert stored is not None
    loaded, read = snapshot.load(stored, 0), oracle.confirmed(0)
    if rest == "doctored":
        assert (loaded, read) == (None, [])
        return
    assert loaded is not None
    assert loaded.groups[GROUP].keys == (ALICE.public,)
    assert loaded.groups[GROUP].opaque_at == NONE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "READS_VERSION", 1)
        older = snapshot.load(stored, 0)
        assert older is not None
        assert older.groups[GROUP].opaque_at == 1, "F11.5: who cannot verify begins there, and stops at this group"
    assert read[0][0].groups[GROUP].keys == (ALICE.public,)
    assert snapshot.state_of(loaded) == data


def test_two_ways_to_verify_agree() -> None:
    """F11.3: `cryptography` and the oracle's integers, on good, bent and odd signatures and keys."""
    rng, seen = Random(1), set()
    for number in range(60):
        key, message = key_of(number % 5 + 1), rng.randbytes(number)
        signature, public = key.sign(message), key.public
        match number % 4:
            case 1:
                signature = bent(rng, signature)
            case 2:
                public = bent(rng, public)
            case 3:  # the same value modulo the order, which RFC 8032 forbids
                s = int.from_bytes(signature[32:], "little") + ed25519.ORDER
                signature = signature[:32] + s.to_bytes(32, "little")
        for each in (public, *((y.to_bytes(32, "little")) for y in (0, 1, ed25519.P - 1, ed25519.P, 2**255 - 1))):
            asked = Signed(each, signature, 3, 8, message)
            told = signed_message(asked)
            with_s = replace(asked, signature=key.sign(told)) if number % 4 == 0 else asked
            judged = rationalizer.fits(with_s, INCARNATION, GROUP)
            assert judged == ed25519.verify(each, with_s.signature, told)
            seen.add(judged)
    assert seen == {True, False}


def test_a_pause_outlives_the_key_that_began_it() -> None:
    """F11.2: after a rotation the pause is ended by the new key; its token alone does not help."""
    book = keyed()
    assert give(book, sign(book, ReleaseGroup(NONE, NONE, PAUSE_MS))) == "accepted"
    token, config = book.group.pause_change, book.group.config
    assert config is not None
    rotated = replace(config, observed=book.group.config_offset, admin_keys=(BOB.public,))
    assert give(book, sign(book, rotated)) == "accepted"
    end = ReleaseGroup(token, token, 0)
    assert give(book, end) == "unsigned"
    assert give(book, sign(book, end)) == "key"
    assert give(book, sign(book, end, BOB)) == "accepted"


def signed_message(record: Signed) -> bytes:
    from marshal_py.protocol.wire.codec import message_of

    return message_of(INCARNATION, GROUP, record.observed, record.kind, record.body)


def bent(rng: Random, value: bytes) -> bytes:
    at = rng.randrange(len(value))
    return value[:at] + bytes((value[at] ^ 1 << rng.randrange(8),)) + value[at + 1 :]


def test_a_hostile_writer_changes_nothing_beyond_its_rights() -> None:
    """F11.2, F11.3: whoever may write to the topic has copies of all signed records, and keys of its own."""
    rng = Random(7)
    book = keyed(ALICE, BOB, exhaustive=False)
    book.topology()
    honest = []
    for number in range(1, 6):
        group = book.group
        for record in (
            ReleaseGroup(group.pause_change, group.pause_change, PAUSE_MS),
            replace(group.config, observed=group.config_offset, max_batch=number),
        ):
            value = codec.encode(sign(book, record, rng.choice((ALICE, BOB))), GROUP, INCARNATION, SIGNED_VERSION)
            assert book.put(value).accepted
            honest.append(value)
    before = book.digest()
    for _ in range(1_500):
        value = rng.choice(honest)
        if rng.random() < 0.7:
            envelope = codec.open_envelope(value, book.world.crc_seed)
            assert envelope is not None
            carrier = codec.decode_signed(envelope[4])
            assert isinstance(carrier, Signed)
            fields = {
                "key": rng.choice((ALICE, BOB, MALLORY)).public,
                "signature": bent(rng, carrier.signature),
                "observed": book.group.config_offset,
                "body": codec.body_of(
                    ReleaseGroup(book.group.pause_change, book.group.pause_change, rng.choice((0, 9)))
                ),
            }
            names = rng.sample(sorted(fields), rng.randint(1, 4))
            forged = replace(carrier, **{name: fields[name] for name in names})
            value = codec.encode(forged, GROUP, INCARNATION, SIGNED_VERSION)
        assert not book.put(value).accepted
    assert book.digest() == before
    book.must(Leave(book.join()))


def test_a_fold_that_accepts_a_replay_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """F11.4: a planted bug: `observed` is not compared, so what a key signed before it was taken away counts later."""
    book = keyed(ALICE, BOB)
    pause = sign(book, ReleaseGroup(NONE, NONE, PAUSE_MS))
    for names in ((BOB.public,), (ALICE.public, BOB.public)):
        config = replace(book.group.config, observed=book.group.config_offset, admin_keys=names)
        assert give(book, sign(book, config, BOB)) == "accepted"
    honest = rationalizer.badly_signed

    def forgetful(group: Group, record: Signed, incarnation: bytes) -> str:
        reason = honest(group, record, incarnation)
        return "" if reason == "observed" else reason

    assert give(book, pause) == "observed"
    monkeypatch.setattr(rationalizer, "badly_signed", forgetful)
    with pytest.raises(AssertionError):
        give(book, pause)
