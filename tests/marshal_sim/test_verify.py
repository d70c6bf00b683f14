"""The second look at a log: silent where everything agrees, and with the first offset where something does not."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import pytest

from marshal_py.protocol.fold import rationalizer, snapshot
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import Checkpoint, ClaimState, Genesis, Heartbeat, Leave
from marshal_py.transport.ports import LogRecord
from marshal_sim.tools.verify import Comparison, verify
from tests.support.differential_log import GROUP, INCARNATION, DifferentialLog, genesis

BEATS = 60


def book_of(
    carry: Callable[[int, Checkpoint | None], Checkpoint | None] = lambda at, carried: carried,
) -> DifferentialLog:
    """An owner whose heartbeats carry digests, another group, garbage, an end."""
    book = DifferentialLog()
    book.world.watched.add(GROUP)
    session, epoch = book.owner()
    other = book.must(book.new_join("o"), group="another")
    for number in range(BEATS):
        carried = carry(number, book.world.checkpoints.get(GROUP))
        book.must(Heartbeat(session, number, (ClaimState(epoch, 101 + number),), digest=carried))
        if number % 7 == 0:
            book.must(Heartbeat(other, number), group="another")
            book.put(b"garbage")
    book.must(Leave(session, "bye"))
    return book


def checked(values: list[bytes | None], log: int = 0, root: bytes | None = None) -> Comparison:
    found = verify([LogRecord(log, offset, value, 0) for offset, value in enumerate(values)], None, root)
    assert found.logs == 1
    return found


def test_a_sound_log_is_equal_in_everything() -> None:
    book = book_of()
    found = checked(book.values)
    assert found.ok
    assert (found.records, found.groups) == (len(book.values), 2)
    assert found.checkpoints == len(book.values) // 16
    assert found.digests >= found.checkpoints + 2, "the groups of each block, and all of them at the end"
    assert 0 < found.heartbeat_digests < BEATS, "the first ones had no checkpoint yet"


@pytest.mark.parametrize("field", ["at", "state", "chain"])
def test_a_heartbeat_that_disagrees_is_named(field: str) -> None:
    """G4: its sender has read another log, or folded it otherwise."""

    def lie(number: int, carried: Checkpoint | None) -> Checkpoint | None:
        if number != 40 or carried is None:
            return carried
        values = {"at": carried.at, "state": carried.state, "chain": carried.chain, "fold": carried.fold}
        return Checkpoint(**{**values, field: values[field] + 160})

    book = book_of(lie)
    (difference,) = checked(book.values).differences
    liar = next(offset for offset in range(len(book.values)) if heartbeat_number(book, offset) == 40)
    assert (difference.log, difference.offset, difference.group) == (0, liar, GROUP)
    word = "checkpoint of a heartbeat" if field == "at" else f"{field} digest of a heartbeat"
    assert difference.what.startswith(word)


def heartbeat_number(book: DifferentialLog, offset: int) -> int:
    """The number of the heartbeat at that offset of GROUP, -1 if it is another record."""
    world = DifferentialLog(start=False).world
    for at, value in enumerate(book.values[: offset + 1]):
        verdict = rationalizer.apply(world, at, value)
    record = verdict.record
    return record.sequence if isinstance(record, Heartbeat) and verdict.group == GROUP else -1


def test_other_fold_versions_are_counted_and_not_compared() -> None:
    found = checked(book_of(lambda number, carried: carried and Checkpoint(carried.at, 1, 2, 9)).values)
    assert found.ok
    assert found.heartbeat_digests == 0
    assert found.other_fold_versions > 0


@pytest.mark.parametrize("at", [5, 33, 60])
def test_one_changed_byte_is_noticed_by_the_digests_alone(at: int) -> None:
    """The heartbeats after it show the change even where no checksum guards the file."""
    values = book_of().values
    value = values[at]
    assert value is not None
    values[at] = value[:-1] + bytes((value[-1] ^ 1,))
    (difference,) = checked(values).differences
    assert at < difference.offset
    assert "chain digest of a heartbeat" in difference.what


def test_a_log_that_stops_readers_is_named() -> None:
    values = book_of().values
    newer = bytearray(genesis())
    newer[2] = 9  # an envelope version of the future, of this incarnation
    values.insert(20, sealed(newer))
    (difference,) = checked(values).differences
    assert (difference.offset, difference.what) == (20, "the log cannot be folded further")


def sealed(value: bytearray) -> bytes:
    """The value with a checksum that fits again."""
    value[7:11] = crc32(bytes(value[11:]), crc32(bytes(value[:7]), crc32(bytes(range(16))))).to_bytes(4, "big")
    return bytes(value)


def test_a_gap_is_named() -> None:
    records = [LogRecord(0, offset, value, 0) for offset, value in enumerate(book_of().values)]
    (difference,) = verify(records[:30] + records[31:], None, None).differences
    assert (difference.offset, difference.what) == (31, "the log cannot be folded further")


def test_a_broken_rule_of_the_heart_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folds disagree on the state where the rationalizer does nothing, and on the verdict where it rejects."""
    values = book_of().values
    rules = list(rationalizer._RULES)
    kind = next(at for at, rule in enumerate(rules) if rule is rationalizer._heartbeat)
    honest = rules[kind]
    rules[kind] = lambda group, offset, record, body: ""
    monkeypatch.setattr(rationalizer, "_RULES", tuple(rules))
    (difference,) = checked(values).differences
    assert (difference.what, difference.offset, difference.group) == ("state digest", 15, "another")
    rules[kind] = lambda group, offset, record, body: "session" if offset > 24 else honest(group, offset, record, body)
    monkeypatch.setattr(rationalizer, "_RULES", tuple(rules))
    (difference,) = checked(values).differences
    assert difference.what == "verdict"
    assert difference.offset in (25, 26), "the first heartbeat behind 24"
    assert (difference.found, difference.expected) == ("rejected session billing", "accepted billing")


def test_logs_beside_the_first_are_judged_by_the_root() -> None:
    root = genesis(16)
    opened = DifferentialLog(16).world.genesis
    assert isinstance(opened, Genesis)
    mixed = [LogRecord(0, 0, root, 0), LogRecord(5, 0, b"early", 0), LogRecord(5, 1, root, 0)]
    found = verify(mixed, opened, root)
    assert found.ok
    assert (found.logs, found.records) == (2, 3)


def with_snapshots(*wrong: int) -> list[bytes | None]:
    """A log with three confirmed snapshots; those of these checkpoints are wrong about the state.

    The heartbeats carry digests, as in `book_of`.
    """
    book = DifferentialLog()
    book.world.watched.add(GROUP)
    session, epoch = book.owner()
    done = 0
    for number in range(BEATS):
        world = book.world
        book.must(Heartbeat(session, number, (ClaimState(epoch, 101 + number),), digest=world.checkpoints.get(GROUP)))
        if world.next_offset % 16 == 0 and done < 3:
            done += 1
            data = snapshot.state_of(world)
            assert data is not None
            assert world.genesis is not None
            state = snapshot.digest_of(world) ^ (world.chain_at in wrong)
            records = snapshot.split(world.genesis, b"w" * 16, world.chain_at, state, world.chain, data)
            records.append(snapshot.witness(world.genesis, b"v" * 16, world.chain_at, state, world.chain))
            for record in records:
                book.put(codec.encode(record, "", INCARNATION))
    return book.values


def test_snapshots_are_compared() -> None:
    """N3: their digests and their witnesses' are the folds'."""
    found = checked(with_snapshots())
    assert found.ok
    assert found.snapshot_digests == 6
    (difference,) = checked(with_snapshots(32)).differences
    assert (difference.offset, difference.what) == (32, "state digest of a snapshot, of checkpoint 32")


def test_a_truncated_log_is_folded_from_its_oldest_snapshot() -> None:
    """N9: a sound one; without any, that is the difference."""
    records = [LogRecord(0, offset, value, 0) for offset, value in enumerate(with_snapshots())]
    found = verify(records[10:], None, None)
    assert found.ok
    assert (found.records, found.snapshot_digests) == (len(records) - 16, 6)
    assert found.heartbeat_digests > 0
    later = verify(records[20:], None, None)
    assert (later.ok, later.records) == (True, len(records) - 32)
    wrong = [LogRecord(0, offset, value, 0) for offset, value in enumerate(with_snapshots(16))]
    passed = verify(wrong[10:], None, None)
    assert passed.records == len(records) - 32, "the unsound one is passed over"
    (difference,) = verify(records[60:], None, None).differences
    assert (difference.offset, difference.what) == (60, "the log cannot be folded")
