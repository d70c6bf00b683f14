"""Advisories: events of a group that a user may want to know, in one form for the API, the command line and the log.

Most follow from verdicts, so replaying the log gives them again (history/advisories.py). An event that no record
implies is written as a Note of the same kind (PROTOCOL.md F10.1). Those in LOCAL are about one process and its
connection, which may be unable to write at that moment: no log holds them. docs/monitoring.md describes them for users.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal

from msgspec import Struct

from marshal_py.errors import first_of
from marshal_py.protocol import policy
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    MODE_NAMES,
    Evict,
    GroupConfig,
    Join,
    Leave,
    Mapping,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    Topology,
    died,
)

PROBE: Final = "probe"  # kind of the Note whose reading back proves that the log's end was read (T2, T10): no advisory
UNCOMMITTED: Final = "uncommitted"
NAMED_MAX: Final = 10  # members that the text of a `configured` names; the record has all
NO_SETTINGS: Final = GroupConfig(NONE)
NO_SETTING: Final = frozenset({"observed", "token", "deleted", "by"})  # fields of a GroupConfig about the record itself
# Fields of a GroupConfig whose setting has another name.
SETTING_NAMES: Final = {"mode": "delivery"}

AdvisoryKind = Literal[
    "joined", "left", "died", "evicted", "replaced", "ended", "claimed", "revoking", "released", "parked", "lost",
    "paused", "resumed", "moved", "skipped", "topology", "configured", "deleted", "stepped_down", "activated",
    "deactivated", "pinned", "unpinned", "opaque", "unserved", "unacked", "handler_stuck", "terminated", "dead_letter",
    "dead_letter_failed", "poison_message", "held_up", "nak_storm", "unreadable", "offset_lost", "amo_dropped",
    "amo_lost", "uncommitted", "diverged", "mirror_refused", "topic_missing", "topic_found", "began_at_end", "fenced",
    "unfenced", "handler_failed", "heartbeat_missed", "snapshot_refused", "truncation_refused", "last_will_lost",
    "client_id_shared", "state_kept",
]  # fmt: skip

KINDS: Final[dict[AdvisoryKind, str]] = {
    "joined": "a consumer's session began",
    "left": "a consumer ended its session; text: why",
    "died": "a consumer's process died, and its witness ended its session; text: how, if the witness knows",
    "evicted": "a session ended because it was silent; text: for how long, and who evicted it",
    "replaced": "a session ended because its client joined again; text: the new session",
    "ended": "a session ended because the group's delivery mode changed, or the group was deleted",
    "claimed": "a session owns the partition from now on; offset: where it begins",
    "revoking": "this consumer will release the partition; handlers may finish, nothing more is delivered; text: why",
    "released": "the owner gave the partition back; offset: the position, text: why",
    "parked": "the owner gave the partition back, and nobody may claim it; offset: the position, text: what to do",
    "lost": "the claim ended without a release; text: why",
    "paused": "the group pauses; text: for how long, why, by whom",
    "resumed": "the pause is over; text: how, by whom",
    "moved": "an admin moved the position; offset: the old one if known, to: the new one, text: by whom",
    "skipped": "in at-most-once mode, offset to to - 1 were skipped without a delivery",
    "topology": "the topic has another number of partitions, or was recreated; to: how many, text: what is new",
    "configured": "the group's settings changed; text: which ones to what, by whom",
    "deleted": "the group and its positions are deleted; text: by whom",
    "stepped_down": "a session became the last candidate for everything; text: why, by whom",
    "activated": "a session owns its first partition, after it owned none; text: its member name",
    "deactivated": "a session owns no partition any more; text: why it lost the last one",
    "pinned": "a consumer is pinned: it alone consumes; epoch: the pin, text: the priority group",
    "unpinned": "a consumer is pinned no longer; text: why: admin, timeout, left or evicted",
    "opaque": "this installation cannot read the group any more; text: the way out",
    "unserved": "by the group's settings nobody may own partitions of the topic, or a consumer gets none; text: why",
    "unacked": "a message has had no answer for long, or too many are tracked; offset: that message, text: how long",
    "handler_stuck": "a handler worked on a message for too long, so its partition is released; offset: that message",
    "terminated": "a handler ended a message for good, it is never delivered again; offset: that message, text: why",
    "dead_letter": "a message is done because it is in the dead-letter topic; offset: that message, text: where, why",
    "dead_letter_failed": "a dead letter cannot be written, and is tried again; offset: that message, text: why",
    "poison_message": "a message was delivered often and is not finished; offset: that message, text: how often",
    "held_up": "a message is not finished, and others above it are; offset: that message, text: its key, for how long",
    "nak_storm": "so many messages wait to be delivered again that nothing new is delivered; offset: position",
    "unreadable": "Kafka does not serve the partition to its owner, which releases it; offset: position, text: why",
    "offset_lost": "offset to to - 1 were deleted before the group read them",
    "amo_dropped": "in at-most-once mode, offset to to - 1 were granted, and the consumer dropped them",
    "amo_lost": "in at-most-once mode, offset to to - 1 were granted to a session that ended without giving them back",
    UNCOMMITTED: "in at-most-once mode, offset to to - 1 were handed to a query's tasks, and no commit was seen",
    "diverged": "another reader folds the log to another state; offset: first checkpoint that differs, text: which",
    "mirror_refused": "Kafka has refused each copy of the positions for 30 s; text: why, and since when",
    "topic_missing": "the cluster does not have a topic of this consumer; text: what that means",
    "topic_found": "the cluster has that topic again, or a pattern of this consumer has found it",
    "began_at_end": "nothing is committed there, so this consumer reads only what comes from now on; text: the way out",
    "fenced": "no own sign of life was read back within an interval, so nothing is delivered (T8)",
    "unfenced": "the lease is valid again",
    "handler_failed": "the handler of a consume raised an error; offset: its message, text: the error",
    "heartbeat_missed": "a call that waits for messages got no sign of life from the cluster; text: for how long",
    "snapshot_refused": "a snapshot of the log was not written, or is not what this process folded; text: why",
    "truncation_refused": "the log's old records were not deleted; text: why",
    "last_will_lost": "if this process dies, its session waits for an eviction; text: why, and what comes next",
    "client_id_shared": "another live consumer of the group uses this client_id; session: its, text: the way out",
    "state_kept": "this process ended because its state was not what the log says; text: the file with that state",
}
LOCAL: Final[frozenset[AdvisoryKind]] = frozenset({
    "began_at_end", "client_id_shared", "dead_letter_failed", "fenced", "handler_failed", "heartbeat_missed",
    "last_will_lost", "nak_storm", "revoking", "snapshot_refused", "state_kept", "topic_found", "topic_missing",
    "truncation_refused", "unacked", "unfenced",
})  # fmt: skip
# An operator should look at these; the others are part of normal operation.
ALARMING: Final[frozenset[AdvisoryKind]] = frozenset({
    "evicted", "died", "lost", "skipped", "opaque", "unserved", "unacked", "handler_stuck", "dead_letter",
    "dead_letter_failed", "poison_message", "held_up", "nak_storm", "unreadable", "offset_lost", "amo_dropped",
    "amo_lost", UNCOMMITTED, "diverged", "mirror_refused", "fenced", "handler_failed", "heartbeat_missed",
    "last_will_lost", "client_id_shared", "snapshot_refused", "state_kept", "parked", "topic_missing", "began_at_end",
})  # fmt: skip


class Advisory(Struct, frozen=True, gc=False):
    """One event of a group; what it does not have is NONE or "". KINDS says what `offset`, `to` and `text` mean for
    each `kind` (a newer library's may be another). `log` and `log_offset` name the record behind it. `time_ms`: that
    record's timestamp; in `Consumer.events`, when this process learned of it."""

    kind: AdvisoryKind
    group: str
    client_id: str = ""
    topic: str = ""
    partition: int = NONE
    epoch: int = NONE
    offset: int = NONE
    to: int = NONE
    text: str = ""
    session: int = NONE
    log: int = NONE
    log_offset: int = NONE
    time_ms: int = 0


class GroupEvents:
    """Derives the events of a group as a whole; the caller passes the group's accepted records one after the other."""

    def __init__(self, group: Group | None = None) -> None:
        """Begins with the state of `group` before the first record that `read` gets; None if it does not exist yet."""
        self._paused = group is not None and group.paused
        self._topics = {name: (topic.count, topic.id) for name, topic in group.topics.items()} if group else {}
        self._config = group.config if group is not None and not group.deleted and group.config else NO_SETTINGS

    def read(self, record: Record | None) -> Iterator[tuple[AdvisoryKind, TopicPartition | None, int, str]]:
        """Yields what an accepted record did, as the (kind, partition, `to`, text) of an Advisory."""
        match record:
            case ReleaseGroup(duration_ms=0):
                yield from self._resume(_reason(record.reason, record.by))
            case ReleaseGroup():
                if not self._paused:
                    self._paused = True
                    seconds = f"for {record.duration_ms / 1000:g} s"
                    yield "paused", None, NONE, f"{seconds}{_reason(record.reason, record.by, ': ')}"
            case SetPosition():
                for move in record.moves:
                    yield "moved", TopicPartition(move.topic, move.partition), move.position, _reason("", record.by)
                if record.resume:
                    yield from self._resume(_reason("positions are moved", record.by))
            case Topology():
                text = _reason(self._topology(record), record.by)
                yield "topology", TopicPartition(record.topic, NONE), record.partitions, text
            case GroupConfig():
                before, self._config = self._config, NO_SETTINGS if record.deleted else record
                text = "" if record.deleted else ", ".join(_changed(before, record))
                yield "deleted" if record.deleted else "configured", None, NONE, _reason(text, record.by)
                if record.deleted:
                    self._topics.clear()
                    yield from self._resume("the group is deleted")
            case _:
                pass

    def _topology(self, record: Topology) -> str:
        """Returns a sentence if a Topology gives the topic another id or its first known one; else ""."""
        known = self._topics.get(record.topic)
        count, topic_id = known or (0, "")
        self._topics[record.topic] = record.partitions, record.topic_id or topic_id
        if record.topic_id in ("", topic_id) or known is None:
            return ""
        if topic_id:
            return "the topic was recreated: the positions of all its partitions are forgotten"
        return "the topic's id is known now" if count == record.partitions else ""

    def _resume(self, text: str) -> Iterator[tuple[AdvisoryKind, TopicPartition | None, int, str]]:
        if self._paused:
            self._paused = False
            yield "resumed", None, NONE, text


def unpinned_by(record: Record | None) -> str:
    """Returns why the record ended a pin: admin (an unpin, a pause, another mode), timeout, left or evicted."""
    match record:
        case ReleasingPartition(reason=policy.TIMED_OUT):
            return policy.TIMED_OUT
        case Leave() if not died(record):
            return "left"
        case Join():
            return "left"
        case Evict() | Leave():
            return "evicted"
    return policy.UNPINNED


def _changed(before: GroupConfig, after: GroupConfig) -> Iterator[str]:
    """Yields each setting that differs as `policy greedy`; a list as `members +m3 -m1`."""
    for name in GroupConfig.__struct_fields__:
        was, now = getattr(before, name), getattr(after, name)
        if was == now or name in NO_SETTING:
            continue
        if isinstance(now, tuple):
            yield f"{name} {_difference(was, now)}"
        else:
            value = MODE_NAMES[now] if name == "mode" and now else now
            yield f"{SETTING_NAMES.get(name, name)} {value or 'unset'}"


def _difference(was: Iterable[Mapping | str | bytes], now: Iterable[Mapping | str | bytes]) -> str:
    """Returns the names that are new or have another mapping, and those that are gone, as `+m3 -m1`."""
    old, new = ({_name_of(each): each for each in names} for names in (was, now))
    found = [f"+{name}" for name, each in new.items() if old.get(name) != each]
    found += [f"-{name}" for name in old if name not in new]
    return first_of(found, NAMED_MAX, " ")


def _name_of(each: Mapping | str | bytes) -> str:
    """Returns a member's name, or the beginning of an admin key."""
    if isinstance(each, bytes):
        return each.hex()[:16]
    return each if isinstance(each, str) else each.member


def silence(record: Evict) -> str:
    """Returns a text that says for how long an evicted session was silent, and who evicted it."""
    return f"after {record.waited_ms / 1000:g} s of silence{_reason('', record.by, ', ')}"


def _reason(reason: str, by: str, mark: str = "") -> str:
    """Returns a text like `deploy, by ops`, with `mark` before it; "" if `reason` and `by` are empty."""
    text = ", ".join(part for part in (reason, f"by {by}" if by else "") if part)
    return f"{mark}{text}" if text else ""
