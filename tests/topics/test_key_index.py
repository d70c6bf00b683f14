"""The key index: the same answers as reading everything; restarts, several processes, and files that are wrong."""

from __future__ import annotations

import gc
import os
import random
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from marshal_py.errors import FileUnusable, IndexBusy, InvalidOption, MarshalError, TopicMissing
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.topics import key_index
from marshal_py.topics.key_index import prefix_of
from marshal_py.topics.request import GetRequest
from marshal_py.topics.topic import Topic
from marshal_py.transport.memory import MemoryBroker, MemoryMessage, MemoryTransport

NAME = "users"
T0 = 1_700_000_000_000


@pytest.fixture
def broker() -> MemoryBroker:
    made = MemoryBroker()
    made.create_topic(NAME, 3)
    return made


def write(broker: MemoryBroker, dice: random.Random, count: int) -> None:
    for _ in range(count):
        key = f"u{dice.randrange(4)}.{dice.randrange(3)}".encode()
        total = sum(len(messages) for messages in broker.topics[NAME])
        value = None if dice.random() < 0.15 else b"%d" % total
        partition = (sum(key) + (dice.random() < 0.2)) % 3  # of a topic that grew, or whose producers disagree
        broker.produce(NAME, partition, value, None if dice.random() < 0.05 else key, None, T0 + total)


def opened(broker: MemoryBroker, path: Path) -> Topic:
    topic = Topic(MemoryTransport(broker), NAME)
    topic.key_index(path)
    return topic


def compact(broker: MemoryBroker, dice: random.Random, topics: list[Topic]) -> None:
    """Takes from the topics what Kafka's cleaner may delete: messages with a newer one of their key, old tombstones."""
    gone: set[tuple[int | None, int | None]] = set()
    for messages in broker.topics[NAME]:
        cleaned = messages[: dice.randrange(len(messages) + 1)]
        lasts = {message.key(): message for message in cleaned if message.key() is not None}
        for message in cleaned:
            last = lasts.get(message.key())
            if last is not message or message.value() is None:
                gone.add((message.partition(), message.offset()))
    for topic in topics:
        _, reader = topic._connection()
        read = type(reader).read.__get__(reader)

        def those_left(starts: Any, ends: Any, timeout_s: float, read: Any = read) -> Any:
            for messages in read(starts, ends, timeout_s):
                if left := [message for message in messages if (message.partition(), message.offset()) not in gone]:
                    yield left

        reader.read = those_left  # type: ignore[method-assign]


def count_reads(topic: Topic, patch: pytest.MonkeyPatch) -> list[dict[TopicPartition, tuple[int, int]]]:
    """Returns a list that grows by the starts and ends of each read of Kafka."""
    _, reader = topic._connection()
    reads: list[dict[TopicPartition, tuple[int, int]]] = []
    read = reader.read

    def spy(starts: Any, ends: Any, timeout_s: float) -> Any:
        reads.append({tp: (start, ends[tp]) for tp, start in starts.items()})
        return read(starts, ends, timeout_s)

    patch.setattr(reader, "read", spy)
    return reads


def answer(topic: Topic, question: dict[str, Any]) -> Any:
    try:
        found = topic.get(**question)
    except MarshalError as error:
        return type(error), str(error)
    return (list(found), found.end) if isinstance(found, list) or hasattr(found, "end") else found


def questions(dice: random.Random) -> list[dict[str, Any]]:
    keys = [f"u{at}.{part}" for at in range(5) for part in range(3)]
    found: list[dict[str, Any]] = []
    for key in keys:
        found += [{"last_by_key": key}, {"last_by_key": key, "tombstones": True}, {"next_by_key": key}]
        found += [{"next_by_key": key, "batch": dice.randrange(1, 6)}]
        found += [{"next_by_key": key, "offset": dice.randrange(20), "partition": sum(key.encode()) % 3}]
    for patterns in (["u1.*"], [">"], ["*.2", "u0.0"], keys[:4]):
        found += [{"multi_last": patterns}, {"multi_last": patterns, "batch": 2}]
        found += [{"multi_last": patterns, "up_to_offset": {0: dice.randrange(30), 1: dice.randrange(30), 2: 5}}]
    return found


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_answers_as_reading_everything(
    broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, copies: bool
) -> None:
    """While the topic grows, across restarts of the index, and after retention deleted records."""
    dice = random.Random(seed)
    monkeypatch.setattr(key_index, "ROWS_AT_ONCE", dice.choice((1, 3, 7)))
    broker.tells_ids = copies
    plain = Topic(MemoryTransport(broker), NAME)
    for round_ in range(4):
        write(broker, dice, dice.randrange(0, 60))
        if round_ == 2:
            broker.delete_records(TopicPartition(NAME, 0), min(5, len(broker.topics[NAME][0])))
        with_index = opened(broker, tmp_path / "keys.db")
        for question in questions(dice):
            assert answer(with_index, question) == answer(plain, question), question
        pages = [list(page) for page in with_index.pages(GetRequest(multi_last=[">"], batch=3))]
        assert pages == [list(page) for page in plain.pages(GetRequest(multi_last=[">"], batch=3))]
        with_index.close()


@pytest.mark.parametrize("seed", range(8))
def test_the_same_answers_on_a_compacted_topic(broker: MemoryBroker, tmp_path: Path, seed: int) -> None:
    """What compaction may have deleted is read from Kafka, and what it keeps is in the index."""
    broker.settings[NAME]["cleanup.policy"] = "compact"
    dice = random.Random(seed)
    plain = Topic(MemoryTransport(broker), NAME)
    for _ in range(4):
        write(broker, dice, dice.randrange(0, 60))
        with_index = opened(broker, tmp_path / "keys.db")
        assert with_index._index is not None
        with_index._index.has_copies = dice.random() < 0.6  # else copies are left behind, as by a slower writer
        with_index.update_index()
        with_index._index.has_copies = True
        compact(broker, dice, [plain, with_index])
        for question in questions(dice):
            assert answer(with_index, question) == answer(plain, question), question
        pages = [list(page) for page in with_index.pages(GetRequest(multi_last=[">"], batch=3))]
        assert pages == [list(page) for page in plain.pages(GetRequest(multi_last=[">"], batch=3))]
        with_index.close()


# --- values in the index


def test_the_last_message_of_a_key_is_in_the_index(
    broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its headers. A tombstone, a message that is too large and an answer as of an earlier offset are read."""
    monkeypatch.setattr(key_index, "COPY_BYTES_MAX", 20)
    headers = [("h", b"1"), ("h", None)]
    for key, value, given in ((b"a", b"0", None), (b"a", b"1", headers), (b"b", b"2" * 20, None), (b"c", None, None)):
        broker.produce(NAME, 0, value, key, given, T0)
    topic = opened(broker, tmp_path / "keys.db")
    status = topic.update_index()
    assert (status.keys, status.messages, status.copies) == (3, 4, 1)
    reads = count_reads(topic, monkeypatch)
    assert topic["a"] == Topic(MemoryTransport(broker), NAME)["a"]
    assert topic["a"].headers == tuple(headers)
    assert topic.get(multi_last=["a"])[0].value == b"1"
    assert reads == []
    assert len(topic.get(multi_last=["a", "b"])) == 2
    assert reads.pop() == {TopicPartition(NAME, 0): (2, 3)}
    assert topic.get(last_by_key="c", tombstones=True).tombstone
    assert reads.pop() == {TopicPartition(NAME, 0): (3, 4)}
    assert topic.get(multi_last=["a"], up_to_offset=0, partition=0)[0].value == b"0"
    assert reads.pop() == {TopicPartition(NAME, 0): (0, 1)}
    topic.close()


def test_a_deleted_key_leaves_no_value_in_the_index(broker: MemoryBroker, tmp_path: Path) -> None:
    """A file that outlives a message must not go on holding what the message said."""
    for value in (b"secret", None):
        broker.produce(NAME, 0, value, b"a", None, T0)
        broker.produce(NAME, 0, b"other", b"b", None, T0)
        topic = opened(broker, tmp_path / "keys.db")
        topic.update_index()
        topic.close()
    broker.delete_records(TopicPartition(NAME, 0), 4)
    broker.produce(NAME, 0, None, b"c", None, T0)
    with closing(sqlite3.connect(tmp_path / "keys.db")) as database, database:
        assert database.execute("SELECT key FROM last_message").fetchall() == [(b"b",)]
    topic = opened(broker, tmp_path / "keys.db")
    topic.update_index()
    topic.close()
    with closing(sqlite3.connect(tmp_path / "keys.db")) as database, database:
        assert database.execute("SELECT key FROM last_message").fetchall() == []


def test_a_damaged_copy_is_refused(broker: MemoryBroker, tmp_path: Path) -> None:
    broker.produce(NAME, 0, b"right", b"k", None, T0)
    topic = opened(broker, tmp_path / "keys.db")
    topic.update_index()
    topic.close()
    (tmp_path / "keys.db").write_bytes((tmp_path / "keys.db").read_bytes().replace(b"right", b"wrong"))
    topic = opened(broker, tmp_path / "keys.db")
    with pytest.raises(FileUnusable, match="its copy of users:0@0 is damaged: delete it"):
        _ = topic["k"]
    topic.close()


@pytest.mark.parametrize("tells_ids", [True, False])
def test_copies_of_a_topic_that_is_created_again_are_not_used(
    broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells_ids: bool
) -> None:
    """Its id shows it. Without ids values are not taken from the index, and the message that is read shows it."""
    broker.tells_ids = tells_ids
    broker.produce(NAME, 0, b"1", b"k", None, T0)
    topic = opened(broker, tmp_path / "keys.db")
    topic.update_index()
    reads = count_reads(topic, monkeypatch)
    assert topic["k"].value == b"1"
    assert bool(reads) != tells_ids
    broker.delete_topic(NAME)
    broker.create_topic(NAME, 3)
    broker.produce(NAME, 0, b"2", b"other", None, T0)
    with pytest.raises(FileUnusable, match="created again"):
        _ = topic["k"]
    topic.close()


def test_copies_are_of_committed_messages(
    broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest message of a key may go with its transaction, and then the one before counts."""
    broker.produce(NAME, 0, b"1", b"k", None, T0)
    topic = Topic(MemoryTransport(broker), NAME, isolation="read_uncommitted")
    topic.key_index(tmp_path / "keys.db")
    topic.update_index()
    reads = count_reads(topic, monkeypatch)
    assert topic["k"].value == b"1"
    assert len(reads) == 1
    topic.close()


@pytest.mark.parametrize(("limit", "most"), [("REACH_MESSAGES", 3), ("REACH_KEYS", 3), ("REACH_BYTES", 21)])
def test_an_update_that_ends_early_is_taken_up(
    broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    """Entries may be there without copies. The messages since the last copies are read again."""
    monkeypatch.setattr(key_index, "ADD_AT_ONCE", 1)
    monkeypatch.setattr(key_index, limit, most)
    monkeypatch.setattr("marshal_py.transport.memory.READ_MAX", 1)
    for at in range(5):
        broker.produce(NAME, 0, b"%d" % at, b"k%d" % at, None, T0)
    topic = opened(broker, tmp_path / "keys.db")
    reach, calls = key_index.KeyIndex.reach, iter(range(9))

    def fails(self: Any, *arguments: Any) -> None:
        if next(calls):
            raise KeyboardInterrupt
        reach(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index.KeyIndex, "reach", fails)
        with pytest.raises(KeyboardInterrupt):
            topic.update_index()
    status = topic.index_status()
    assert (status.messages, status.behind) == (5, 2)
    reads = count_reads(topic, monkeypatch)
    assert topic["k4"].value == b"4"
    assert reads == [{TopicPartition(NAME, 0): (3, 5)}]
    assert [topic[f"k{at}"].value for at in range(5)] == [b"%d" % at for at in range(5)]
    assert len(reads) == 1
    topic.close()


def test_an_update_keeps_nothing_that_the_garbage_collector_visits() -> None:
    """It would visit each message and each tuple again and again, and take longer than the rest of the update."""
    new = key_index._Unwritten(copies=True)
    headers = [("h", b"1")]
    new.append(1, [MemoryMessage(NAME, 1, at, b"k%d" % at, b"v", headers if at % 2 else None, T0) for at in range(10)])
    new.append(2, [MemoryMessage(NAME, 2, 7, None, b"v", None, T0), MemoryMessage(NAME, 2, 8, b"k", None, None, T0)])
    kept = [*new.entries, *new.progress.items(), *(part for lasts in new.lasts.values() for part in lasts)]
    found = [item for part in kept for item in (part.items() if isinstance(part, dict) else part)]
    assert not [
        item for pair in found for item in (pair if isinstance(pair, tuple) else (pair,)) if gc.is_tracked(item)
    ]
    assert (len(new.entries.keys), new.progress) == (11, {1: 10, 2: 9})
    assert new.lasts[2] == ({b"k": 8}, {b"k": None})


def test_it_catches_up_incrementally(broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "ADD_AT_ONCE", 7)
    dice = random.Random(1)
    write(broker, dice, 50)
    topic = opened(broker, tmp_path / "keys.db")
    before = topic.update_index()
    assert (before.topic, before.behind) == (NAME, 0)
    write(broker, dice, 30)
    assert topic.update_index().messages > before.messages
    with_key = sum(message.key() is not None for messages in broker.topics[NAME] for message in messages)
    assert topic.update_index().messages == with_key
    topic.close()


def test_a_compacted_topic_has_entries_without_messages(broker: MemoryBroker, tmp_path: Path) -> None:
    """The message before a gone one counts; a key of which nothing is left is not found; counts come from reading."""
    broker.settings[NAME]["cleanup.policy"] = "compact"
    for at in range(4):
        broker.produce(NAME, 0, b"%d" % at, b"k", None, T0 + at)
    topic = opened(broker, tmp_path / "keys.db")
    assert topic["k"].value == b"3"
    assert topic.get(next_by_key="k", batch=2).end.num_pending == 2
    topic.close()


def test_many_keys_take_few_reads(broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All partitions are read at once, and offsets that are close together in one run."""
    monkeypatch.setattr(key_index, "GAP_MAX", 5)
    broker.tells_ids = False  # so there are no copies
    for at in range(300):  # of each partition: two keys near each other, and two far away
        name = {0: b"a", 2: b"b", 100: b"c", 200: b"d"}.get(at, b"")
        for partition in range(3):
            broker.produce(NAME, partition, b"%d" % at, name + b"%d" % partition, None, T0 + at)
    topic = opened(broker, tmp_path / "keys.db")
    topic.update_index()
    reads = count_reads(topic, monkeypatch)
    found = topic.get(multi_last=[f"{name}{partition}" for name in "abcd" for partition in range(3)])
    assert len(found) == 12
    partitions = [TopicPartition(NAME, number) for number in range(3)]
    assert reads == [dict.fromkeys(partitions, run) for run in ((0, 3), (100, 101), (200, 201))]
    topic.close()


def test_one_writer_many_readers(broker: MemoryBroker, tmp_path: Path) -> None:
    """While another process writes, questions are answered by reading; an update waits for it, and gives up by name."""
    write(broker, random.Random(2), 40)
    topic = opened(broker, tmp_path / "keys.db")
    topic.update_index()
    write(broker, random.Random(3), 10)
    other = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    plain = Topic(MemoryTransport(broker), NAME)
    for question in questions(random.Random(2)):
        assert answer(topic, question) == answer(plain, question)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "LOCK_TIMEOUT_S", 0.05)
        with pytest.raises(IndexBusy, match="another process"):
            topic.update_index()
    other.execute("ROLLBACK")
    other.close()
    assert topic.update_index().behind == 0
    topic.close()


def test_a_crash_while_it_is_filled_leaves_it_as_it_was(broker: MemoryBroker, tmp_path: Path) -> None:
    write(broker, random.Random(4), 60)
    topic = opened(broker, tmp_path / "keys.db")

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("marshal_py.topics.key_index.KeyIndex.add", fails)
        with pytest.raises(KeyboardInterrupt):
            topic.update_index()
    topic.close()
    again = opened(broker, tmp_path / "keys.db")
    assert again.update_index().behind == 0
    again.close()


# --- wrong files


def test_an_index_that_cannot_be_opened_leaves_the_one_before(broker: MemoryBroker, tmp_path: Path) -> None:
    topic = opened(broker, tmp_path / "keys.db")
    with pytest.raises(FileUnusable):
        topic.key_index(tmp_path / "missing" / "keys.db")
    assert topic.update_index().behind == 0
    topic.close()


def test_the_index_of_another_topic(broker: MemoryBroker, tmp_path: Path) -> None:
    opened(broker, tmp_path / "keys.db").close()
    broker.create_topic("orders", 1)
    with pytest.raises(FileUnusable, match="the index of topic 'users'"):
        Topic(MemoryTransport(broker), "orders").key_index(tmp_path / "keys.db")
    with pytest.raises(TopicMissing):
        Topic(MemoryTransport(broker), "nothing").key_index(tmp_path / "other.db")


@pytest.mark.parametrize("tells_ids", [True, False])
def test_a_topic_that_was_created_again(broker: MemoryBroker, tmp_path: Path, tells_ids: bool) -> None:
    """By its id where the cluster tells it, else by an end below what was indexed."""
    broker.tells_ids = tells_ids
    write(broker, random.Random(5), 30)
    topic = opened(broker, tmp_path / "keys.db")
    topic.update_index()
    broker.delete_topic(NAME)
    broker.create_topic(NAME, 3)
    write(broker, random.Random(6), 3)
    with pytest.raises(FileUnusable, match="created again"):
        topic.update_index() if not tells_ids else opened(broker, tmp_path / "keys.db")
    topic.close()


def test_a_topic_that_was_created_again_and_is_longer(broker: MemoryBroker, tmp_path: Path) -> None:
    """Without topic ids neither id nor end shows it, but the message that the index names has another key."""
    broker.tells_ids = False
    broker.produce(NAME, 0, b"1", b"k", None, T0)
    topic = opened(broker, tmp_path / "keys.db")
    assert topic["k"].value == b"1"
    broker.delete_topic(NAME)
    broker.create_topic(NAME, 3)
    broker.produce(NAME, 0, b"2", b"other", None, T0)
    for question in ({"last_by_key": "k"}, {"next_by_key": "k"}, {"next_by_key": "k", "batch": 2}):
        with pytest.raises(FileUnusable, match=r"another key for users:0@0: .* delete the file"):
            topic.get(**question)
    topic.close()


def test_a_topic_that_is_created_again_while_its_index_is_open(broker: MemoryBroker, tmp_path: Path) -> None:
    """The new topic is as long as what was indexed, so its id alone shows that the index is not of it."""
    broker.produce(NAME, 0, b"1", b"k", None, T0)
    topic = opened(broker, tmp_path / "keys.db")
    assert topic.update_index().messages == 1
    broker.delete_topic(NAME)
    broker.create_topic(NAME, 3)
    broker.produce(NAME, 0, b"2", b"other", None, T0)
    broker.produce(NAME, 0, b"3", b"later", None, T0)
    for question in (lambda: topic["other"], lambda: topic["later"], topic.update_index):
        with pytest.raises(FileUnusable, match="created again since: delete the file"):
            question()
    topic.close()


def test_the_index_of_another_isolation(broker: MemoryBroker, tmp_path: Path) -> None:
    """It holds aborted messages, or lacks them."""
    opened(broker, tmp_path / "keys.db").close()
    with pytest.raises(FileUnusable, match="built for read_committed: give read_uncommitted a file of its own"):
        Topic(MemoryTransport(broker), NAME, isolation="read_uncommitted").key_index(tmp_path / "keys.db")


def test_several_threads_use_one_index(broker: MemoryBroker, tmp_path: Path) -> None:
    """SQLite binds a connection to its thread, unless it is told that calls do not overlap."""
    write(broker, random.Random(7), 40)
    topic, plain = opened(broker, tmp_path / "keys.db"), Topic(MemoryTransport(broker), NAME)
    asked = questions(random.Random(7))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda question: answer(topic, question), asked))
    assert found == [answer(plain, question) for question in asked]
    topic.close()


def test_files_that_are_no_index(broker: MemoryBroker, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, whatever its name is\n" * 100)
    with pytest.raises(FileUnusable, match="no index, or damaged"):
        opened(broker, tmp_path / "text")
    with pytest.raises(FileUnusable, match="folder that exists"):
        opened(broker, tmp_path / "nowhere" / "keys.db")
    topic = opened(broker, tmp_path / "keys.db")
    topic.close()
    with closing(sqlite3.connect(tmp_path / "keys.db")) as database, database:
        database.execute("UPDATE about SET version = 99")
    with pytest.raises(FileUnusable, match="version 99"):
        opened(broker, tmp_path / "keys.db")


def filled(broker: MemoryBroker, path: Path) -> int:
    """An index of some size in one file. Returns its size in bytes."""
    for at in range(2_000):
        broker.produce(NAME, at % 3, b"v", b"key.%d" % at, None, T0 + at)
    topic = opened(broker, path)
    topic.update_index()
    topic.close()  # the write-ahead log becomes part of the file
    return path.stat().st_size


def ask_for_all(topic: Topic, path: Path) -> None:
    topic.key_index(path)
    for at in range(0, 2_000, 500):
        topic.get(multi_last=[f"key.{number}" for number in range(at, at + 500)])


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
def test_a_file_that_is_cut_off(broker: MemoryBroker, tmp_path: Path, share: float) -> None:
    path, topic = tmp_path / "keys.db", Topic(MemoryTransport(broker), NAME)
    size = filled(broker, path)
    os.truncate(path, int(size * share))
    with pytest.raises(FileUnusable, match="delete the file"):
        ask_for_all(topic, path)
    topic.close()
    path.unlink()
    ask_for_all(topic, path)
    topic.close()


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_file_with_damaged_pages(broker: MemoryBroker, tmp_path: Path, share: float) -> None:
    path, topic = tmp_path / "keys.db", Topic(MemoryTransport(broker), NAME)
    size = filled(broker, path)
    with path.open("r+b") as file:
        file.seek(int(size * share) // 4096 * 4096)
        file.write(b"\xa5" * 4096 * 2)
    with pytest.raises(FileUnusable, match="delete the file"):
        ask_for_all(topic, path)
    topic.close()


def test_a_full_disk_leaves_the_index_as_it_was(broker: MemoryBroker, tmp_path: Path) -> None:
    """The error names the way out. When there is room again, the index goes on."""
    write(broker, random.Random(8), 20)
    topic = opened(broker, tmp_path / "keys.db")
    before = topic.update_index()
    for at in range(5_000):
        broker.produce(NAME, at % 3, b"v", b"new.%d" % at, None, T0 + at)
    database = topic._index
    assert database is not None
    [pages] = database._database.execute("PRAGMA page_count").fetchone()
    database._database.execute(f"PRAGMA max_page_count={pages + 2}")  # then SQLite says what it says of a full disk
    for ask in (topic.update_index, lambda: topic["new.4"]):
        with pytest.raises(FileUnusable, match="full: make room"):
            ask()
    assert structs.replace(topic.index_status(), behind=0) == before
    database._database.execute("PRAGMA max_page_count=1000000")
    assert topic.update_index().behind == 0
    assert topic["new.4"].value == b"v"
    topic.close()


def test_a_file_that_may_not_be_written(broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers as long as it is up to date. (The tests may run as root, to whom permissions do not apply.)"""
    broker.produce(NAME, 0, b"1", b"k", None, T0)
    with_index = opened(broker, tmp_path / "keys.db")
    with_index.update_index()
    with_index.close()
    connect = sqlite3.connect

    def read_only(path: Path, **options: Any) -> sqlite3.Connection:
        return connect(f"file:{path}?mode=ro", uri=True, **options)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    topic = opened(broker, tmp_path / "keys.db")
    assert topic["k"].value == b"1"
    broker.produce(NAME, 0, b"2", b"k", None, T0 + 1)
    with pytest.raises(FileUnusable, match="readonly database: give a file that may be written"):
        _ = topic["k"]
    topic.close()


def test_an_update_needs_an_index(broker: MemoryBroker) -> None:
    with pytest.raises(InvalidOption, match="key_index"):
        Topic(MemoryTransport(broker), NAME).update_index()


@pytest.mark.parametrize(
    ("pattern", "prefix"), [("a.b.*", b"a.b."), ("a.>", b"a."), ("*.b", b""), (">", b""), ("a.*.c", b"a."), ("a", b"a")]
)
def test_what_keys_of_a_pattern_begin_with(pattern: str, prefix: bytes) -> None:
    assert prefix_of(pattern, ".", ("*", ">")) == prefix
