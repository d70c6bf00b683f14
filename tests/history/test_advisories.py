"""The advisories of a log: each kind from its record, the same for every reader and from every start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args
from zlib import crc32

from msgspec.structs import replace

from marshal_py.history.advisories import Advisories, ranges_text, to_lines, to_text
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.member.advisory import KINDS, LOCAL, PROBE, Advisory, AdvisoryKind
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Evict,
    GroupConfig,
    Heartbeat,
    Leave,
    Mapping,
    MessageRange,
    Move,
    Note,
    ReleasingPartition,
    SeekingPartition,
    SetPosition,
    StepDown,
    Topology,
)
from tests.support.differential_log import GROUP, INTERVAL_MS, TOPIC, DifferentialLog

DOCS = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"


def advisories_of(book: DifferentialLog, start: int = 0) -> list[Advisory]:
    """All advisories of a reader that begins with the record at `start`."""
    world = World()
    for offset in range(start):
        rationalizer.apply(world, offset, book.values[offset])
    advisories, found = Advisories(world), []
    for offset in range(start, len(book.values)):
        verdict = rationalizer.apply(world, offset, book.values[offset])
        found += advisories.read(world.groups.get(verdict.group), verdict, 1_000 * offset)
    return found


def lines(book: DifferentialLog, start: int = 0) -> list[str]:
    return [to_text(advisory) for advisory in advisories_of(book, start)]


def full_book() -> DifferentialLog:
    """The life of a group in which nearly every kind of advisory occurs."""
    book = DifferentialLog()
    session, epoch = book.owner()
    book.must(Heartbeat(session, 1, (ClaimState(epoch, 120),)))
    other = book.join("other")
    book.claim(other, 1, 50)
    book.must(Evict(other, book.session(other).extended, 2 * INTERVAL_MS, "c"))
    book.must(StepDown(session, -1, "maintenance", "ops"))
    token = book.pause()
    book.pause()  # a renewal is no advisory
    token = book.group.pause_change
    book.release(session, epoch, 130)
    moves = tuple(Move(TOPIC, number, book.partition(number).version, 7 + number) for number in (0, 1))
    book.must(SetPosition(token, moves, True, "ops"))
    again = book.must(book.new_join("c", predecessor=session))
    book.claim(again, 0)
    book.must(Note(again, "handler_stuck", TOPIC, 0, 7))
    book.must(Note(again, PROBE, text="0123"))
    book.must(Note(again, "offset_lost", TOPIC, 0, 7, 9))
    book.must(Topology(TOPIC, 6, book.group.topics[TOPIC].offset))
    book.must(Leave(again, "bye"))
    book.must(GroupConfig(-1, policy="greedy", by="ops"))
    return book


def test_a_whole_life_as_text() -> None:
    assert lines(full_book()) == [
        "joined (c)",
        "topology t to 4",
        "activated (c)",
        "claimed t:0 from 100 (c)",
        "joined (other)",
        "activated (other)",
        "claimed t:1 from 50 (other)",
        "evicted (other): after 2 s of silence, by c",
        "lost t:1 at 50 (other): the session was evicted",
        "deactivated (other): the session was evicted",
        "stepped_down (c): maintenance, by ops",
        "paused: for 5 s",
        "released t:0 at 130 (c)",
        "deactivated (c)",
        "moved t:0 from 130 to 7: by ops",
        "moved t:1 from 50 to 8: by ops",
        "resumed: positions are moved, by ops",
        "replaced (c): its client joined again as session 13",
        "joined (c)",
        "activated (c)",
        "claimed t:0 from 7 (c)",
        "handler_stuck t:0 at 7 (c)",
        "offset_lost t:0 from 7 to 9 (c)",
        "topology t to 6",
        "left (c): bye",
        "lost t:0 at 7 (c): the session left",
        "deactivated (c): the session left",
        "configured: policy greedy, by ops",
    ]


def test_every_advisory_says_its_record() -> None:
    book = full_book()
    for advisory in advisories_of(book):
        assert advisory.kind in KINDS
        assert (advisory.group, advisory.log) == (GROUP, 0)
        assert advisory.time_ms == 1_000 * advisory.log_offset
        alone = DifferentialLog(start=False)
        for value in book.values[: advisory.log_offset + 1]:
            alone.put(value)
        assert advisories_of(alone)[-1].log_offset == advisory.log_offset


def test_claims_carry_their_epoch_and_session() -> None:
    book = full_book()
    claimed = [one for one in advisories_of(book) if one.kind == "claimed"]
    ended = [one for one in advisories_of(book) if one.kind in ("released", "lost")]
    assert {(one.epoch, one.session, one.partition) for one in claimed} == {
        (one.epoch, one.session, one.partition) for one in ended
    }
    assert all(one.epoch == one.log_offset for one in claimed)
    stuck = next(one for one in advisories_of(book) if one.kind == "handler_stuck")
    assert (stuck.epoch, stuck.client_id) == (claimed[-1].epoch, "c")


def test_a_later_start_gives_the_same_advisories_from_there() -> None:
    book = full_book()
    whole = advisories_of(book)
    for start in range(len(book.values)):
        assert advisories_of(book, start) == [one for one in whole if one.log_offset >= start]


def test_refused_records_are_no_advisories() -> None:
    book = full_book()
    before = advisories_of(book)
    book.refuses(Leave(2, "again"), "session")
    book.refuses(ClaimingPartition(99, TOPIC, 0, -1), "session")
    book.put(b"garbage")
    assert advisories_of(book) == before


def test_skipped_offsets_of_at_most_once() -> None:
    book = DifferentialLog()
    session, epoch = book.owner(AT_MOST_ONCE)
    other = book.claim(session, 1, 0)
    ranges = (MessageRange(epoch, 100, 104, 110), MessageRange(other, 1, 2, 9), MessageRange(other, 0, 3, 9))
    book.must(ClaimingMessages(session, ranges))
    book.must(ClaimingMessages(session, (MessageRange(epoch, 110, 110, 120),)))
    assert [line for line in lines(book) if line.startswith("skipped")] == [
        "skipped t:0 from 100 to 104 (c)",
        "skipped t:1 from 0 to 3 (c)",
    ], "what was refused skips nothing"


def test_a_seek_and_a_parked_partition() -> None:
    book = DifferentialLog()
    session, epoch = book.owner()
    at = book.must(SeekingPartition(session, epoch, 50))
    book.must(ReleasingPartition(session, at, 60, parked="DataTopicRecreated"))
    seek, parking, _ = lines(book)[-3:]
    assert seek == "moved t:0 to 50 (c): by its owner"
    assert parking.startswith("parked t:0 at 60 (c): DataTopicRecreated: topic 't' was deleted and created again")
    moved, parked, ended = advisories_of(book)[-3:]
    assert (ended.kind, ended.session, ended.log_offset) == ("deactivated", session, parked.log_offset)
    assert (moved.epoch, parked.epoch, parked.session) == (at, at, session)


def test_a_standby_becomes_active_and_is_so_until_its_last_partition_goes() -> None:
    """Partitions between the first and the last one, covers and seeks make nobody active or inactive."""
    book = DifferentialLog()
    book.must(GroupConfig(NONE, policy="members", max_members=4, members=("m1",)))
    first = book.must(book.new_join("one", member="m1"))
    standby = book.must(book.new_join("two", member="m1"))
    book.must(Topology(TOPIC, 4, NONE))
    cover, one = book.must(ClaimingPartition(first, TOPIC, NONE, NONE, NONE)), book.claim(first, 0, 7)
    two = book.claim(first, 1, 7)
    one = book.must(SeekingPartition(first, one, 5))
    for epoch, position in ((one, 5), (two, 7)):
        book.must(ReleasingPartition(first, epoch, position, reason="hand-over"))
    book.must(ReleasingPartition(first, cover, NONE, reason="hand-over"))
    book.claim(standby, 0)
    book.must(Leave(standby, "bye"))
    known = [one for one in advisories_of(book) if one.kind in ("activated", "deactivated")]
    assert [(one.kind, one.session, one.client_id, one.text) for one in known] == [
        ("activated", first, "one", "m1"),
        ("deactivated", first, "one", "hand-over"),
        ("activated", standby, "two", "m1"),
        ("deactivated", standby, "two", "the session left"),
    ]
    for start in range(len(book.values)):
        assert advisories_of(book, start) == [one for one in advisories_of(book) if one.log_offset >= start]


def test_a_change_of_settings_says_what_changed() -> None:
    """A list shows who is new and who is gone; what has not changed is not named."""
    book = DifferentialLog()
    blocks = GroupConfig(NONE, policy="blocks", max_members=3, members=("m1", "m2"), by="ops")
    last = book.must(blocks)
    mapped = (Mapping("m1", (0, 1)), Mapping("m2", (2,)))
    for change in (
        {"members": ("m2", "m3")},
        {"members": (), "mappings": mapped},
        {"mappings": (*mapped[:1], Mapping("m2", (3,)))},
        {"mappings": tuple(Mapping(f"m{number}", ()) for number in range(3, 15)), "max_bytes": 5},
        {"by": ""},
    ):
        blocks = replace(blocks, observed=last, **change)
        last = book.must(blocks)
    assert lines(book) == [
        "configured: policy blocks, max_members 3, members +m1 +m2, by ops",
        "configured: members +m3 -m1, by ops",
        "configured: members -m2 -m3, mappings +m1 +m2, by ops",
        "configured: mappings +m2, by ops",
        "configured: mappings +m3 +m4 +m5 +m6 +m7 +m8 +m9 +m10 +m11 +m12 and 4 more, max_bytes 5, by ops",
        "configured",
    ]


def test_the_end_of_sessions_by_a_change_of_mode() -> None:
    book = DifferentialLog()
    book.join("idle")
    token = book.pause()
    book.must(GroupConfig(-1, token, mode=AT_MOST_ONCE, by="ops"))
    assert lines(book)[-2:] == ["ended (idle): the group's mode changed", "configured: delivery at_most_once, by ops"]


def test_the_end_of_sessions_by_a_deletion() -> None:
    book = DifferentialLog()
    book.join("idle")
    token = book.pause()
    book.must(GroupConfig(-1, token, deleted=True, by="ops"))
    assert "ended (idle): the group was deleted" in lines(book)


def test_the_end_of_the_claim_of_a_whole_topic_and_of_the_pin_by_a_deletion() -> None:
    """F9.5: `groups delete --force` waits for partitions alone, and what they belong to is gone with the record."""
    for topic, said in ((TOPIC, "lost t (c): the session ended"), ("", "unpinned (c): admin")):
        book = DifferentialLog()
        session, epoch = book.owner()
        book.claim(session, -1, topic=topic)
        token = book.pause()
        book.release(session, epoch, 110)
        book.must(GroupConfig(-1, token, deleted=True, by="ops"))
        assert lines(book)[-4:-1] == ["ended (c): the group was deleted", said, "deleted: by ops"]


def test_a_move_names_no_position_that_was_forgotten() -> None:
    """F9.5, F9.10: with the group, or with the topic that was created again."""
    book = DifferentialLog()
    session, epoch = book.owner()
    book.release(session, epoch, 130)
    at = book.must(Topology(TOPIC, 4, book.group.topics[TOPIC].offset, topic_id="one"))
    at = book.must(Topology(TOPIC, 4, at, topic_id="two"))
    book.must(SetPosition(book.pause(), (Move(TOPIC, 0, at, 7),), True))
    assert "moved t:0 to 7" in lines(book)
    book.must(Leave(session, ""))
    deletion = book.delete()
    book.must(GroupConfig(deletion))
    book.must(Topology(TOPIC, 4, deletion))
    book.must(SetPosition(book.pause(), (Move(TOPIC, 0, -1, 8),), True))
    assert "moved t:0 to 8" in lines(book)
    for start in range(len(book.values)):
        assert advisories_of(book, start) == [one for one in advisories_of(book) if one.log_offset >= start]


def test_a_deleted_group_is_not_paused_any_more() -> None:
    book = DifferentialLog()
    book.must(Leave(book.join(), ""))
    book.pause()
    book.delete()
    assert lines(book)[-2:] == ["deleted", "resumed: the group is deleted"]


def test_an_opaque_group_says_so_once() -> None:
    book = full_book()
    value = bytearray(book.values[2] or b"")
    at = 12 + value[11]
    value[at] = 9  # a record version of the future
    book.put(sealed(value))
    book.put(sealed(value))
    assert lines(book)[-1] == "opaque: look with a newer release"
    assert lines(book).count("opaque: look with a newer release") == 1


def sealed(value: bytearray) -> bytes:
    """The value with a checksum that fits again."""
    value[7:11] = crc32(bytes(value[11:]), crc32(bytes(value[:7]), crc32(bytes(range(16))))).to_bytes(4, "big")
    return bytes(value)


def test_the_document_names_every_kind_and_every_field() -> None:
    text = DOCS.read_text(encoding="utf-8")
    fields, _, kinds = text.partition("## Advisories")[2].partition("## Log lines")[0].partition("### Kinds")
    assert re.findall(r"^\| `(\w+)` \| .+ \|$", kinds, re.MULTILINE) == list(KINDS)
    local = re.search(r"Of\s+this\s+process\s+alone,[^`]+`([\w\s]+)`", kinds)
    assert local is not None
    assert set(local[1].split()) == LOCAL
    assert all(f"`{name}`" in fields for name in Advisory.__struct_fields__)


def test_what_differs_in_the_partition_alone_is_one_line() -> None:
    """Another reason, client or topic makes another line; an advisory whose offset matters has its own line."""
    together = [Advisory("claimed", "g", "c", "orders", number, offset=number) for number in (0, 1, 2, 7)]
    together.insert(2, Advisory("fenced", "g", "c"))
    together.append(Advisory("claimed", "g", "c", "mails", 0, offset=5))
    together.append(Advisory("released", "g", "c", "orders", 3, text="why"))
    together += [Advisory("offset_lost", "g", "c", "orders", number, offset=0, to=9) for number in (4, 5)]
    lines = list(to_lines(together))
    assert [words for _, words in lines] == [
        "claimed 4 partitions of orders: 0-2, 7 (c)",
        "fenced (c)",
        "claimed mails:0 from 5 (c)",
        "released orders:3 (c): why",
        "offset_lost orders:4 from 0 to 9 (c)",
        "offset_lost orders:5 from 0 to 9 (c)",
    ]
    assert sorted(map(id, (one for alike, _ in lines for one in alike))) == sorted(map(id, together))
    parked = [
        Advisory("parked", "g", "c", "orders", number, offset=9, text=f"{why}: orders:{number} is")
        for number, why in ((0, "Beyond"), (1, "Beyond"), (2, "Gone"), (4, "Beyond"))
    ]
    assert [words for _, words in to_lines(parked)] == [
        "parked 3 partitions of orders: 0-1, 4 (c), for example orders:0: Beyond: orders:0 is",
        "parked orders:2 at 9 (c): Gone: orders:2 is",
    ]
    assert ranges_text([]) == ""


def test_a_message_that_ends_its_owners_is_reported_with_the_claim_of_the_fourth() -> None:
    """D11: earlier owners delivered the message at the position three times, and did not finish it."""
    book = DifferentialLog()
    book.join("onlooker")
    book.topology()
    for client, deliveries in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        session = book.join(client)
        book.claim(session, 0, 100)
        assert book.partition(0).attempts == deliveries
        book.must(Evict(session, book.session(session).extended, 2 * INTERVAL_MS))
    (found,) = [one for one in advisories_of(book) if one.kind == "poison_message"]
    assert (found.client_id, found.topic, found.partition, found.offset) == ("d", TOPIC, 0, 100)
    assert "3 deliveries" in found.text


def test_a_text_never_begins_a_line() -> None:
    text = to_text(Advisory("terminated", "g", "c", "orders", 3, offset=7, text="bad\nnext\x1b[2J é"))
    assert text == "terminated orders:3 at 7 (c): bad\\nnext\\x1b[2J é"


def test_checkers_know_every_kind() -> None:
    assert get_args(AdvisoryKind) == tuple(KINDS)


def test_what_a_session_that_ended_may_have_lost() -> None:
    """F3.3: granted, neither reported as handled nor given back; with the end of the session, also after a restart."""
    book = DifferentialLog()
    session, epoch = book.owner(mode=AT_MOST_ONCE)
    idle = book.claim(session, 1, 50)
    other = book.join("other", AT_MOST_ONCE)
    book.must(ClaimingMessages(session, (MessageRange(epoch, 100, 100, 150), MessageRange(idle, 50, 50, 60))))
    book.must(Heartbeat(session, 1, (ClaimState(epoch, 120), ClaimState(idle, 60))))
    end = book.must(Evict(session, book.session(session).extended, 2 * INTERVAL_MS, "other"))
    book.claim(other)
    for start in (0, end):
        found = [one for one in advisories_of(book, start) if one.kind == "amo_lost"]
        assert [to_text(one) for one in found] == ["amo_lost t:0 from 120 to 150 (c): at most 30 messages"]
        assert [(one.log_offset, one.session, one.epoch) for one in found] == [(end, session, epoch)]
