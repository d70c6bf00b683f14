"""Every error of the library: one tree with three branches. Raises nothing itself and imports nothing of ours.

    MarshalError
    +-- CallerError               the calling program asked for something impossible: fix the call
    |   +-- InvalidName           a group, client id, member or topic name breaks a rule
    |   +-- InvalidOption         a setting is out of bounds or contradicts another
    |   +-- InvalidRecord         a record with values out of bounds was about to be written
    |   +-- MessageTooLarge       a record or message is larger than the cluster takes
    |   +-- ConcurrentUse         two threads, or two iterations, in fetch / next / iteration of one Consumer
    |   +-- ReentrantCall         a method was called inside another call of the same thread and would wait for it
    |   +-- AlreadyConsuming      a Consumer that runs a consume() was asked for messages in another way
    |   +-- UsedAfterFork         an object made before os.fork() was used in the child
    |   +-- ConsumerClosed        a Consumer or Marshal was used after stop / drain / close
    |   +-- BackgroundThreadEnded something ended the background thread; the Marshal cannot be used any more
    |   +-- UnsupportedPlatform   this system lacks what the feature needs
    |   +-- HandleUnknown         an ack handle names no message that this consumer can answer
    |   +-- MessageNotPickled     a message was to be sent to another process
    |   +-- NeedsAtLeastOnce      nak or term was called in an at-most-once group
    |   +-- BatchNotCommitted     the next claimed batch was asked for before the last one was committed
    |   +-- BatchOverdue          a pipeline did not come back within handler_timeout_s; its claims were released
    |   +-- RangeReadTwice        in at-most-once mode, Spark retried a task whose range may have been processed
    |   +-- MissingSpark          a part of Spark is not installed: pyspark, pyarrow, pandas or Java
    |   +-- BadRequest            a request to a topic is empty, contradicts itself or is out of bounds (408)
    |   +-- MessageNotFound       a topic holds no message that a request describes (404)
    |   +-- TopicExists           a topic was to be created that exists
    |   +-- NotCompacted          a key was to be deleted in a topic that keeps the older messages of a key
    |   +-- IndexUnusable         a key index is another topic's, damaged, or of a topic that was created again
    |   +-- TooManyKeys           a request matches more keys than one answer may hold (413)
    |   +-- GroupMissing          an admin named a group, a partition of it or a session that the log does not know
    |   +-- GroupExists           a group cannot be created because it exists
    |   +-- PositionOutOfRange    an admin asked for a position that the partition does not have
    |   +-- DumpDamaged           a dump file was changed or cut off after it was written
    |   +-- DumpUnusable          a dump does not hold what the command needs
    |   +-- LoadRefused           a dump cannot be loaded into this topic
    +-- PeerError                 another participant of the group prevents it
    |   +-- SessionCloned         another process writes with this consumer's session (fork, cloned machine)
    |   +-- DuplicateClientId     another process took over this client id (fast reclaim)
    |   +-- ModeMismatch          the group and the consumer have different delivery modes
    |   +-- GroupDeleted          an admin deleted the group
    |   +-- GroupOpaque           the group holds records that only a newer library can read
    |   +-- KafkaGroupIsLive      ordinary Kafka consumers use the same group id
    |   +-- AdminBusy             another operation has paused the group
    |   +-- PauseOver             the pause in which an operation was to run is over
    |   +-- PauseNotDrained       consumers did not release their partitions in time; the pause was ended
    |   +-- PositionNotMoved      a move of positions failed; nothing moved, and nothing will
    |   +-- PositionUnknown       a move was given up, and its record may still take effect
    |   +-- SettingsChanged       another admin changed the group's settings at the same time
    |   +-- MembersAlive          consumers are alive where there must be none
    |   +-- WriteFenced           a later owner of a partition has already written to the same table
    |   +-- LedgerMoved           another writer added rows for the same partitions (retriable)
    |   +-- OffsetsUnclear        a table no longer knows whether it has messages that come again
    |   +-- ClaimLost             claims were released or lost before a batch was committed or an ack was confirmed
    |   +-- AckNotConfirmed       the log did not accept an ack in time (retriable)
    |   +-- BatchUnclaimed        nobody claims the partitions of a batch that was planned before a restart (retriable)
    |   +-- PartitionsUnread      a job that ends by itself has read its part, and nobody reads the rest (retriable)
    |   +-- NotAloneInGroup       a query with state shares its group with another member
    |   +-- SnapshotNotConfirmed  a snapshot was written and no consumer confirmed it (retriable)
    |   +-- IndexBusy             another process writes the same key index (retriable)
    |   +-- AdminGaveUp           an operation did not complete in time (retriable)
    +-- ClusterError              Kafka or its topics are not as they must be
        +-- ClusterUnreachable    no broker answered in time (retriable)
        +-- AuthenticationFailed  the brokers do not take this client's credentials
        +-- TlsMismatch           client and brokers do not agree on TLS, or on a certificate
        +-- AccessDenied          this client lacks a right
        +-- TopicMissing          a topic to consume does not exist (retriable once it is created)
        +-- PartitionError        Kafka refuses to serve a partition (authorization, for one)
        +-- DeserializationFailed a deserializer raised an error for a message in a batch
        +-- PartitionsParked      a job that ends by itself has read the rest, and partitions are parked
        +-- PartitionParked       nobody may consume a partition until an admin has looked at it
        |   +-- DataTopicRecreated    its topic was deleted and created again
        |   +-- PositionBeyondEnd     the group's position lies beyond the end of the partition
        |   +-- PartitionTruncated    records that were read are gone; others may be at their offsets
        |   +-- PartitionUnreadable   no consumer of the group can read it: a right is missing, or records are damaged
        +-- RangeLost             Kafka deleted the beginning of a range before it was read (retriable)
        +-- TopicRefused          Kafka refuses to create, change or delete a topic
        +-- PurgeRefused          Kafka refuses to delete records of a partition
        +-- EmbeddedLogFull       the embedded broker is about to drop records
        +-- CoordinationError     the coordination topic cannot be trusted or used
            +-- CoordinationTopicMissing   missing, and may not be created
            +-- ForeignTopic               it holds the messages of somebody else
            +-- WrongTopicSetting          a setting of it would lose history
            +-- TopicRecreated             another incarnation than the one known
            +-- LogGap                     offsets are missing: compaction, transactions or lost data
            +-- HistoryTruncated           the beginning of the log was deleted, and no snapshot replaces it
            +-- HistoryRestarted           an operator restarted the log's history
            +-- SnapshotRefused            a snapshot differs from what the log folds to
            +-- Diverged                   this process's state differs from what the log folds to
            +-- EnvelopeUnknown            written by a library of another envelope version
            +-- ProtocolOutdated           the log was created by an older version of this library
            +-- ProtocolUnknown            the root names a hash or a protocol version that is not ours

`retriable`: whether the same call may succeed later although nobody fixes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

CLAIMED_SHOWN: Final = 10  # partitions in the text of ClaimLost


def first_of(words: Iterable[str], most: int, between: str = ", ") -> str:
    """Returns a text that names `most` words and counts the others, such as "orders, payments and 3 more".

    Without words it is "".
    """
    found = list(words)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return between.join(found[:most]) + more


class MarshalError(Exception):
    """Root of the tree. Catch it to catch everything that this library raises on purpose."""

    retriable: ClassVar[bool] = False

    def __reduce__(self) -> tuple[object, ...]:
        # By default an exception is rebuilt from its args. Here they are one finished sentence, which the constructor
        # does not take, so the receiving process (multiprocessing, Spark) sets args and fields itself.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[MarshalError], args: tuple[object, ...], fields: dict[str, object]) -> MarshalError:
    """An error as it was in another process."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class CallerError(MarshalError):
    """The calling program asked for something impossible."""


class PeerError(MarshalError):
    """Another participant of the group prevents what was asked."""


class ClusterError(MarshalError):
    """Kafka or its topics are not as they must be."""


# --- the caller


class InvalidName(CallerError):
    """A name breaks a rule. Raised before anything is sent."""

    kind: str
    value: object
    rule: str

    def __init__(self, kind: str, value: object, rule: str) -> None:
        self.kind, self.value, self.rule = kind, value, rule
        super().__init__(f"{kind} {value!r} is not allowed: {rule}")


class InvalidOption(CallerError):
    """A setting is missing, out of bounds or contradicts another. Raised before anything is sent.

    `given`: whether the caller has named it at all.
    """

    option: str
    value: object
    rule: str
    given: bool

    def __init__(self, option: str, value: object, rule: str, *, given: bool = True) -> None:
        self.option, self.value, self.rule, self.given = option, value, rule, given
        found = f"{option}={value!r} is not allowed" if given else f"no {option} given"
        super().__init__(f"{found}: {rule}")


class InvalidRecord(CallerError):
    """A record with values outside PROTOCOL.md 4.2 was about to be written; nothing was."""

    record: str
    reason: str

    def __init__(self, record: str, reason: str) -> None:
        self.record, self.reason = record, reason
        super().__init__(f"a {record} record cannot be written: {reason}")


class MessageTooLarge(CallerError):
    """A message is larger than the client or the broker takes; nothing of it was written."""

    what: str
    size_bytes: int
    reason: str

    def __init__(self, what: str, size_bytes: int, reason: str) -> None:
        self.what, self.size_bytes, self.reason = what, size_bytes, reason
        super().__init__(
            f"{what} of {size_bytes} bytes is too large: {reason}; raise message.max.bytes (client) and "
            f"max.message.bytes (topic), or send less"
        )


class ConcurrentUse(CallerError):
    """Two threads, or tasks, are inside fetch, next or iteration of one Consumer. Any of them may call `ack`.

    Or one of them begins an iteration before its earlier one has ended: `own` is True then.
    """

    verb: str
    caller: str
    own: bool

    def __init__(self, verb: str, caller: str = "thread", *, own: bool = False) -> None:
        """`caller`: what calls the Consumer, "thread" or "task". `own`: whether it has not ended its own iteration."""
        self.verb, self.caller, self.own = verb, caller, own
        super().__init__(
            f"{verb}() was called while an iteration of the same Consumer that this {caller} began has not ended: "
            f"finish it, or let go of its iterator after a break (del the variable that holds it)"
            if own
            else f"{verb}() was called while another {caller} fetches from the same Consumer: use one Consumer per "
            f"{caller}, or hand messages to worker {caller}s and ack there"
        )


class ReentrantCall(CallerError):
    """A method was called inside another call of the same thread or task, and would have to wait for that call.

    This happens in a signal handler, a callback, a logging handler or a `__del__`, and if the handler or the loop of a
    `consume` waits for its end. `Consumer.request_stop` may be called anywhere.
    """

    verb: str
    inside: str
    way_out: str

    def __init__(self, verb: str, inside: str, way_out: str = "") -> None:
        """`way_out`: what to call instead; by default the advice for signal handlers and callbacks."""
        self.verb, self.inside, self.way_out = verb, inside, way_out
        super().__init__(
            f"{verb}() was called inside {inside} and would wait for it: {way_out}"
            if way_out
            else f"{verb}() was called inside {inside} (by a signal handler, a callback, a logging handler or a "
            f"__del__) and would wait for it: call request_stop() there, or set a flag and call {verb}() after "
            f"{inside} has returned"
        )


class AlreadyConsuming(CallerError):
    """A Consumer that runs a `consume` was asked for messages in another way, or for a second one."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        super().__init__(
            f"{verb}() was called while a consume() of the same Consumer runs: stop() or drain() what it returned, or "
            f"make another Consumer"
        )


class EventLoopMisuse(CallerError):
    """A call of the asyncio front came from another event loop than its own, or would block its own."""

    verb: str
    problem: str

    def __init__(self, verb: str, problem: str) -> None:
        self.verb, self.problem = verb, problem
        super().__init__(f"{verb}() {problem}")


class UsedAfterFork(CallerError):
    """An object from before os.fork() was used in the child, where its threads and sockets do not exist."""

    what: str
    made_in_pid: int
    pid: int

    def __init__(self, what: str, made_in_pid: int, pid: int) -> None:
        self.what, self.made_in_pid, self.pid = what, made_in_pid, pid
        super().__init__(
            f"this {what} was made in process {made_in_pid} and cannot be used in its fork {pid}: "
            f"connect again in the child"
        )


class ConsumerClosed(CallerError):
    """A Consumer or Marshal was used after it had stopped."""

    what: str
    reason: str

    def __init__(self, what: str, reason: str) -> None:
        self.what, self.reason = what, reason
        super().__init__(f"the {what} is closed ({reason}): make a new one")


class BackgroundThreadEnded(CallerError):
    """Something ended the background thread of a Marshal, and its consumers with it. Connect again.

    The library handles every error that it knows of, so an exception was injected into the thread or memory ran out.
    """

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(
            f"{cause} ended the background thread of this Marshal, and its consumers with it: close it and "
            f"connect again; the logger 'marshal_py' has the traceback"
        )


class UnsupportedPlatform(CallerError):
    """This system lacks what the feature needs."""

    feature: str
    platform: str
    way_out: str

    def __init__(self, feature: str, platform: str, way_out: str) -> None:
        self.feature, self.platform, self.way_out = feature, platform, way_out
        super().__init__(f"{feature} does not work on {platform}: {way_out}")


class HandleUnknown(CallerError):
    """An ack handle names no message that this consumer can answer."""

    group: str
    reason: str

    def __init__(self, group: str, reason: str) -> None:
        self.group, self.reason = group, reason
        super().__init__(f"group {group!r}: the handle cannot be used: {reason}")


class MessageNotPickled(CallerError):
    """A message was to be sent to another process, where its consumer does not exist."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(
            f"the message {what} cannot go to another process, where its consumer does not exist: send "
            f"message.handle() with the key and the value, and call consumer.complete(handle) here when it is done"
        )


class NeedsAtLeastOnce(CallerError):
    """An answer was given that only at-least-once groups have: in at-most-once mode nothing is delivered again."""

    verb: str
    group: str

    def __init__(self, verb: str, group: str) -> None:
        self.verb, self.group = verb, group
        super().__init__(
            f"{verb}() needs an at-least-once group, and {group!r} delivers at most once: its messages are done when "
            f"they are delivered; use delivery='at_least_once', or write the message elsewhere"
        )


class BatchNotCommitted(CallerError):
    """The next claimed batch was requested before the last one was committed or given back."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        super().__init__(
            f"the last batch of {rows} offsets was not committed: call batch.commit() once it is written, "
            f"or batch.give_back() to have it planned again"
        )


class BatchOverdue(CallerError):
    """A pipeline made no call for longer than handler_timeout_s, so its claims were released (PROTOCOL.md D4)."""

    group: str
    timeout_s: float

    def __init__(self, group: str, timeout_s: float) -> None:
        self.group, self.timeout_s = group, timeout_s
        super().__init__(
            f"the consumer of group {group!r} was not called for {timeout_s:g} s (handler_timeout_s) and "
            f"released its claims: make batches smaller, call batch.in_progress() between steps, or raise "
            f"handler_timeout_s; then make a new consumer"
        )


class RangeReadTwice(CallerError):
    """In at-most-once mode Spark retried the task of a range, whose first attempt may have processed it."""

    ranges: tuple[tuple[str, int, int, int], ...]
    attempt: int

    def __init__(self, ranges: Sequence[tuple[str, int, int, int]], attempt: int) -> None:
        """`ranges`: topic, partition, first offset and end offset (exclusive) of each range of the task."""
        self.ranges, self.attempt = tuple(ranges), attempt
        named = ", ".join(f"{topic}:{partition} [{start}, {to})" for topic, partition, start, to in ranges)
        super().__init__(
            f"{named} may be read only once, and this is attempt {attempt + 1} of its task: set "
            f"spark.task.maxFailures=1 and spark.speculation=false; these messages count as lost"
        )


class MissingSpark(CallerError):
    """The call needs a part of Spark that is not installed. `way_out`: the command or setting that provides it."""

    what: str
    found: str
    way_out: str

    def __init__(self, what: str, found: str, way_out: str = "pip install 'marshal_py[spark]'") -> None:
        self.what, self.found, self.way_out = what, found, way_out
        super().__init__(f"Spark needs {what}, {found}: {way_out}")


class GroupMissing(CallerError):
    """An admin named a group, or something in it, that the log does not know."""

    group: str
    what: str

    def __init__(self, group: str, what: str) -> None:
        self.group, self.what = group, what
        super().__init__(f"group {group!r} {what}")


class GroupExists(CallerError):
    """A group cannot be created because it exists with other settings, with or without consumers. Nothing was changed.

    `differences`: (what the group has, what was asked for) by setting; None for a setting that is not set.
    """

    group: str
    differences: dict[str, tuple[object, object]]

    def __init__(self, group: str, differences: dict[str, tuple[object, object]]) -> None:
        self.group, self.differences = group, differences
        words = [
            f"{name} is {'not set' if has is None else repr(has)}, not {asked!r}"
            if asked is not None
            else f"{name} is {has!r}, which was not asked for"
            for name, (has, asked) in differences.items()
        ]
        super().__init__(
            f"group {group!r} exists with other settings: {'; '.join(words)}. Update its settings, or delete it first"
        )


class BadRequest(CallerError):
    """A request to a topic is empty, contradicts itself or is out of bounds. `status`: ADR-31's 408."""

    status: ClassVar[int] = 408

    def __init__(self, rule: str) -> None:
        self.rule = rule
        super().__init__(f"bad request (408): {rule}")


class MessageNotFound(CallerError, KeyError):
    """The request is valid, and the topic holds no message that it describes. `status`: ADR-31's 404.

    `tombstone`: the key's last message deletes it. It is a KeyError as well, because `topic[key]` raises it.
    """

    topic: str
    request: str
    tombstone: bool
    status: ClassVar[int] = 404

    def __init__(self, topic: str, request: str, tombstone: bool = False) -> None:
        self.topic, self.request, self.tombstone = topic, request, tombstone
        deleted = ": a tombstone deletes it (tombstones=True finds the tombstone)" if tombstone else ""
        super().__init__(f"topic {topic!r} has no message for {request} (404){deleted}")

    __str__ = Exception.__str__  # KeyError's own shows the repr of the text


class TooManyKeys(CallerError):
    """A multi_last request names or matches too many keys. `status`: ADR-31's 413."""

    keys: int
    most: int
    status: ClassVar[int] = 413

    def __init__(self, keys: int, most: int) -> None:
        self.keys, self.most = keys, most
        super().__init__(
            f"multi_last matches {keys} keys, at most {most} are answered (413): name fewer keys, or read the topic "
            "with a consumer"
        )


class IndexUnusable(CallerError):
    """The file of a key index cannot be used. It is left as it is."""

    path: str
    reason: str

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"the key index {path} cannot be used: {reason}")


class TopicExists(CallerError):
    """A topic was to be created that exists."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(f"topic {topic!r} exists already: change it, or choose another name")


class NotCompacted(CallerError):
    """A key was to be deleted in a topic that is not compacted. Nothing was written."""

    topic: str
    policy: str

    def __init__(self, topic: str, policy: str) -> None:
        self.topic, self.policy = topic, policy
        super().__init__(
            f"topic {topic!r} has cleanup.policy={policy}, so Kafka would keep the messages that a tombstone deletes: "
            "set it to compact, or delete the beginning of partitions by purge"
        )


class PositionOutOfRange(CallerError):
    """The requested position is outside the partition. Nothing was moved."""

    topic: str
    partition: int
    position: int
    first: int
    end: int

    def __init__(self, topic: str, partition: int, position: int, first: int, end: int) -> None:
        self.topic, self.partition, self.position, self.first, self.end = topic, partition, position, first, end
        super().__init__(f"{topic}:{partition} has no position {position}: valid are {first} to {end}")


class DumpDamaged(CallerError):
    """A dump file was changed or cut off. `log`, `offset`: the nearest record; `line` counts from 1."""

    path: str
    line: int
    log: int
    offset: int
    reason: str

    def __init__(self, path: str, line: int, log: int, offset: int, reason: str) -> None:
        self.path, self.line, self.log, self.offset, self.reason = path, line, log, offset, reason
        super().__init__(
            f"dump {path!r} is damaged in line {line}, at offset {offset} of log {log}: {reason}; write a "
            f"new one (`marshal log dump`), or find an undamaged copy"
        )


class DumpUnusable(CallerError):
    """A dump is undamaged but does not hold what the command needs."""

    path: str
    reason: str

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"nothing can be run from the dump {path!r}: {reason}")


class LoadRefused(CallerError):
    """A dump cannot be loaded into this topic. Nothing was written, unless the reason says so."""

    topic: str
    reason: str

    def __init__(self, topic: str, reason: str) -> None:
        self.topic, self.reason = topic, reason
        super().__init__(f"the dump was not loaded into {topic!r}: {reason}")


# --- the peers


class SessionCloned(PeerError):
    """Another process writes with this consumer's session: a fork or a cloned machine (PROTOCOL.md T18)."""

    group: str
    client_id: str
    session: int
    offset: int

    def __init__(self, group: str, client_id: str, session: int, offset: int) -> None:
        self.group, self.client_id, self.session, self.offset = group, client_id, session, offset
        super().__init__(
            f"offset {offset} of the coordination log of group {group!r} was written with session "
            f"{session} of client {client_id!r}, but not by this process: this process was forked or its machine was "
            f"cloned; call connect() in every process"
        )


class DuplicateClientId(PeerError):
    """Another process of the same client id reclaimed this session (PROTOCOL.md T18)."""

    group: str
    client_id: str
    session: int
    by_session: int

    def __init__(self, group: str, client_id: str, session: int, by_session: int) -> None:
        self.group, self.client_id, self.session, self.by_session = group, client_id, session, by_session
        super().__init__(
            f"client id {client_id!r} of group {group!r} was taken over by session {by_session} "
            f"(fast_reclaim): give every live process its own client_id, or do not use fast_reclaim"
        )


class ModeMismatch(PeerError):
    """The group's mode and the consumer's `delivery` differ (PROTOCOL.md F1.2)."""

    group: str
    group_mode: str
    wanted: str

    def __init__(self, group: str, group_mode: str, wanted: str) -> None:
        self.group, self.group_mode, self.wanted = group, group_mode, wanted
        super().__init__(
            f"group {group!r} is {group_mode}, this consumer asks for {wanted}: use "
            f"delivery={group_mode!r}, another group, or change the group's mode while it is paused"
        )


class GroupDeleted(PeerError):
    """An admin deleted the group (PROTOCOL.md F0, F9.5)."""

    def __init__(self, group: str) -> None:
        self.group = group
        super().__init__(f"group {group!r} is deleted: create it again to revive it")


class GroupOpaque(PeerError):
    """The group's log holds a record that only a newer library can read (PROTOCOL.md E5)."""

    group: str
    offset: int

    def __init__(self, group: str, offset: int) -> None:
        self.group, self.offset = group, offset
        super().__init__(
            f"the coordination log of group {group!r} holds a record at offset {offset} that only a newer "
            f"marshal_py can read: upgrade this process"
        )


class KafkaGroupIsLive(PeerError):
    """Ordinary Kafka consumers of the same group id are alive; both would read every message (PROTOCOL.md D7)."""

    group: str
    members: int

    def __init__(self, group: str, members: int) -> None:
        self.group, self.members = group, members
        super().__init__(
            f"{members} ordinary Kafka consumer(s) are alive in group {group!r}: stop them, use another "
            f"group, or pass join_live_kafka_group=True if both should read"
        )


class AdminBusy(PeerError):
    """Another run has paused the group, and this operation was not given that pause (PROTOCOL.md M2).

    `by`: the run that paused it. `own`: whether that was a run of the same user on the same machine. `left_s`: how long
    that run expects the pause to last; -1 if unknown.
    """

    group: str
    by: str
    reason: str
    left_s: float
    token: int
    own: bool
    retriable: ClassVar[bool] = True

    def __init__(self, group: str, by: str, reason: str, left_s: float, token: int, *, own: bool = False) -> None:
        self.group, self.by, self.reason, self.left_s, self.token, self.own = group, by, reason, left_s, token, own
        why = f" ({reason})" if reason else ""
        left = f", about {left_s:.0f} s left" if left_s >= 0 else ""
        who = f"another run of yours, {by}" if own else by or "an unnamed admin"
        ways = (
            f"work in that pause and leave it in place (--adopt, or --token {token}), take it over if that run is "
            f"dead (--take-over), or end it (marshal resume {group})"
            if own
            else f"wait, name its token (--token {token}), or take the pause over (--take-over)"
        )
        super().__init__(f"group {group!r} is paused by {who}{why}{left}: {ways}")


class PauseOver(PeerError):
    """The group is not, or no longer, in the pause in which the operation was to run (PROTOCOL.md M2).

    `ended_by`: the run that ended the newest pause; "" if there was none. `own`: whether the operation had made it.
    """

    group: str
    ended_by: str
    own: bool

    def __init__(self, group: str, ended_by: str, *, own: bool = False) -> None:
        self.group, self.ended_by, self.own = group, ended_by, own
        if own:
            super().__init__(
                f"group {group!r} continues, because {ended_by or 'somebody'} ended the pause that this operation had "
                f"made; the operation has given up: agree with them before you pause the group again"
            )
            return
        how = f"the last pause was ended by {ended_by}" if ended_by else "nobody has paused it"
        super().__init__(
            f"group {group!r} is not in the pause that --adopt or --token names: {how}; without these options "
            f"the command pauses the group itself"
        )


class PauseNotDrained(PeerError):
    """Live owners did not release their partitions in time, so the pause was ended (PROTOCOL.md M9)."""

    group: str
    holders: tuple[str, ...]
    waited_s: float
    retriable: ClassVar[bool] = True

    def __init__(self, group: str, holders: tuple[str, ...], waited_s: float) -> None:
        self.group, self.holders, self.waited_s = group, holders, waited_s
        who = ", ".join(holders) or "nobody known, because the pause itself was not read in time"
        super().__init__(
            f"group {group!r} did not release its partitions within {waited_s:g} s, held by {who}; the pause was ended"
        )


class PositionNotMoved(PeerError):
    """No position moved, and none will (PROTOCOL.md M7)."""

    group: str
    reason: str

    def __init__(self, group: str, reason: str) -> None:
        self.group, self.reason = group, reason
        super().__init__(f"no position of group {group!r} moved: {reason}")


class PositionUnknown(PeerError):
    """The record was sent and its outcome is unknown: all positions moved, or none did (PROTOCOL.md M8)."""

    group: str
    reason: str
    command: str

    def __init__(self, group: str, reason: str, command: str) -> None:
        self.group, self.reason, self.command = group, reason, command
        super().__init__(
            f"it is unknown whether the positions of group {group!r} moved, all or none ({reason}): {command} finds out"
        )


class SettingsChanged(PeerError):
    """Another admin changed the group first; this change was not made (PROTOCOL.md F9.1, F9.4)."""

    group: str
    what: str
    by: str
    retriable: ClassVar[bool] = True

    def __init__(self, group: str, what: str, by: str) -> None:
        self.group, self.what, self.by = group, what, by
        super().__init__(
            f"{what} of group {group!r} was changed by {by or 'an unnamed admin'} at the same time; this change was "
            f"not made: look at the group, then try again"
        )


class MembersAlive(PeerError):
    """Consumers are alive where there must be none."""

    group: str
    what: str
    members: tuple[str, ...]

    def __init__(self, group: str, what: str, members: tuple[str, ...]) -> None:
        self.group, self.what, self.members = group, what, members
        super().__init__(f"group {group!r}: {what}: {', '.join(members)} gave signs of life")


class WriteFenced(PeerError):
    """A later owner of a partition has already written to the same table (PROTOCOL.md K1). Nothing was written.

    That owner may have had nothing new for it: then the table has only its token.
    """

    path: str
    partition: str
    token: str
    newest: str

    def __init__(self, path: str, partition: str, token: str, newest: str) -> None:
        self.path, self.partition, self.token, self.newest = path, partition, token, newest
        super().__init__(
            f"{path} holds rows of {partition} under token {newest}, and this writer's token is {token}: "
            f"another member owns the partition now; drop the batch, because that member has its messages"
        )


class LedgerMoved(PeerError):
    """Another writer added rows for the same partitions to the table. Nothing was written."""

    retriable: ClassVar[bool] = True

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"another writer added rows for the same partitions to {path}; this batch wrote nothing: retry it, "
            f"some of its rows may already be there"
        )


class OffsetsUnclear(PeerError):
    """A table no longer knows whether it has messages that come again. Nothing was written.

    It keeps a limited number of ranges of offsets per partition. Where there were more holes, it gave up the lowest
    ones: messages that belong there cannot be told from those that are written.
    """

    path: str
    partition: str
    start: int
    to: int
    ranges: int

    def __init__(self, path: str, partition: str, start: int, to: int, ranges: int) -> None:
        self.path, self.partition, self.start, self.to, self.ranges = path, partition, start, to, ranges
        super().__init__(
            f"{path} may or may not have each of the offsets {start} to {to - 1} of {partition}: it keeps {ranges} "
            f"ranges of offsets per partition, and holes in earlier ones are forgotten. Move the group's position "
            f"past them, or rewind the table to {start} or below, which takes their rows out, to write them again"
        )


class ClaimLost(PeerError):
    """Claims were released or lost before their batch was committed, or before the log had accepted the acks.

    Reasons are a pause, a hand-over, an eviction. `seek` raises it for a partition that the consumer does not own:
    `claimed` names those that it owns then, and is None otherwise.
    """

    group: str
    lost: tuple[str, ...]
    claimed: tuple[str, ...] | None

    def __init__(self, group: str, lost: tuple[str, ...], claimed: tuple[str, ...] | None = None) -> None:
        self.group, self.lost, self.claimed = group, lost, claimed
        if claimed is not None:
            shown = first_of(claimed, CLAIMED_SHOWN) or "nothing"
            super().__init__(
                f"group {group!r}: this consumer does not own {', '.join(lost)}, so it cannot move the position "
                f"there; it owns {shown}: Group.set_position moves positions of partitions that others own"
            )
            return
        super().__init__(
            f"group {group!r}: the claims on {', '.join(lost)} were released or lost before the work was "
            f"committed: another member has received their messages or will; roll back, or compare tokens where "
            f"the work was written"
        )


class AckNotConfirmed(PeerError):
    """The log has not accepted an ack in time. The messages count as done here, and the log may still accept it.

    Calling again waits again, unless `over`: then this process will never know, for example because the consumer has
    ended. If the log does not get the ack, the messages are delivered again; if it does, they are not, and a program
    that has rolled back has lost their effect. So keep the effect, under a guard (`marshal_py.sql`) that recognises a
    repeat.
    """

    group: str
    places: tuple[str, ...]
    waited_s: float
    reason: str
    over: bool
    retriable: ClassVar[bool] = True

    def __init__(
        self, group: str, places: tuple[str, ...], waited_s: float, reason: str, *, over: bool = False
    ) -> None:
        self.group, self.places, self.waited_s, self.reason, self.over = group, places, waited_s, reason, over
        if over:
            super().__init__(
                f"group {group!r}: nobody can tell whether the log has all acks of {', '.join(places)}: {reason}; "
                f"their messages may be delivered again, or not: decide when the next owner has received them, or has "
                f"not"
            )
            return
        super().__init__(
            f"group {group!r}: the log has not accepted the acks up to {', '.join(places)} within {waited_s:g} s: "
            f"{reason}; the ack may still reach the log, so do not roll back on this: call again until it is known, or "
            f"keep the effect under a guard (marshal_py.sql), which recognises a repeat"
        )


class BatchUnclaimed(PeerError):
    """A batch that was planned before a restart cannot continue, because nobody claims a partition of it."""

    group: str
    waits: str
    retriable: ClassVar[bool] = True

    def __init__(self, group: str, waits: str) -> None:
        """`waits`: text that names each partition and what it waits for."""
        self.group, self.waits = group, waits
        super().__init__(
            f"group {group!r}: a batch that was planned before the restart waits for claims ({waits}): "
            f"start the query again, let it claim more (max_claims), or start more members; without its "
            f"checkpoint folder the query continues at the group's positions"
        )


class NotAloneInGroup(PeerError):
    """A streaming query with state (option `stateful`) has met another live member of its group.

    Its windows, joins or counts need all messages, and the other member gets part of them.
    """

    group: str
    clients: tuple[str, ...]

    def __init__(self, group: str, clients: tuple[str, ...]) -> None:
        """`clients`: the client ids of the other members."""
        self.group, self.clients = group, clients
        super().__init__(
            f"group {group!r} has another member ({', '.join(clients)}), which gets part of the messages, and this "
            f"query has state that needs all of them (stateful=true): give each such query a group of its own, or stop "
            f"the other member and start this query again"
        )


class PartitionsUnread(PeerError):
    """A job that ends by itself has read what it could, and nobody reads the rest of some partitions.

    The group is paused, a topic is gone, or no live member owns the partitions. (Parked ones raise PartitionsParked.)
    """

    group: str
    unread: Mapping[str, str]
    retriable: ClassVar[bool] = True

    def __init__(self, group: str, unread: Mapping[str, str]) -> None:
        """`unread`: by partition (topic:number), why nobody reads it."""
        self.group, self.unread = group, dict(unread)
        alike: dict[str, list[str]] = {}
        for name, reason in self.unread.items():
            alike.setdefault(reason, []).append(name)
        what = "\n".join(f"  {first_of(names, 5)}: {reason}" for reason, names in alike.items())
        super().__init__(
            f"group {group!r}: {len(self.unread)} partitions are not read to the job's end, and nobody reads them now; "
            f"run the job again once that has changed:\n{what}"
        )


class IndexBusy(PeerError):
    """Another process was writing the same key index for too long."""

    path: str
    waited_s: float
    retriable: ClassVar[bool] = True

    def __init__(self, path: str, waited_s: float) -> None:
        self.path, self.waited_s = path, waited_s
        super().__init__(f"another process has been writing the key index {path} for {waited_s:g} s: try again")


class AdminGaveUp(PeerError):
    """An operation did not complete in time. Its record may still take effect; repeating it is safe."""

    group: str
    what: str
    waited_s: float
    pending: bool
    retriable: ClassVar[bool] = True

    def __init__(self, group: str, what: str, waited_s: float, *, pending: bool = False) -> None:
        """`waited_s`: 0 if it was interrupted. `pending`: a record of it was sent and may still be accepted."""
        self.group, self.what, self.waited_s, self.pending = group, what, waited_s, pending
        how = f"did not complete within {waited_s:g} s" if waited_s else "was interrupted"
        after = "it may still take effect; retrying is safe" if pending or waited_s else "it will not take effect"
        super().__init__(f"group {group!r}: {what} {how}; {after}")


class SnapshotNotConfirmed(PeerError):
    """A snapshot was written, and no live consumer of the log confirmed it (PROTOCOL.md N5, N6)."""

    log: int
    at: int
    waited_s: float
    sessions: tuple[str, ...]
    retriable: ClassVar[bool] = True

    def __init__(self, log: int, at: int, waited_s: float, sessions: tuple[str, ...]) -> None:
        self.log, self.at, self.waited_s, self.sessions = log, at, waited_s, sessions
        who = ", ".join(sessions) or "nobody"
        super().__init__(
            f"the snapshot of coordination partition {log} at offset {at} was written, but none of its "
            f"live sessions ({who}) confirmed it within {waited_s:g} s: if they are dead, evict them or wait "
            f"until they are evicted, then try again; the unconfirmed snapshot does no harm"
        )


# --- the cluster


class ClusterUnreachable(ClusterError):
    """No broker answered in time."""

    servers: str
    waiting_for: str
    reason: str
    retriable: ClassVar[bool] = True

    def __init__(self, servers: str, waiting_for: str, reason: str) -> None:
        self.servers, self.waiting_for, self.reason = servers, waiting_for, reason
        super().__init__(f"no answer from {servers} while waiting for {waiting_for}: {reason}")


class AuthenticationFailed(ClusterError):
    """The brokers keep refusing this client's credentials or their mechanism. Waiting does not help."""

    servers: str
    principal: str
    reason: str

    def __init__(self, servers: str, principal: str, reason: str) -> None:
        self.servers, self.principal, self.reason = servers, principal, reason
        super().__init__(
            f"{servers} refuses to authenticate {principal}: {reason}; check sasl.username, sasl.password "
            f"and sasl.mechanism"
        )


class TlsMismatch(ClusterError):
    """Client and brokers disagree on TLS: only one of them uses it, or a certificate is not trusted."""

    servers: str
    protocol: str
    reason: str

    def __init__(self, servers: str, protocol: str, reason: str) -> None:
        """`protocol`: the client's security.protocol."""
        self.servers, self.protocol, self.reason = servers, protocol, reason
        super().__init__(
            f"no connection to {servers} with security.protocol={protocol}: {reason}; check "
            f"security.protocol, the port, and ssl.ca.location"
        )


class AccessDenied(ClusterError):
    """Kafka's authorizer denies this client an operation. `kind`: topic, group or cluster."""

    principal: str
    operation: str
    kind: str
    name: str

    def __init__(self, principal: str, operation: str, kind: str, name: str) -> None:
        self.principal, self.operation, self.kind, self.name = principal, operation, kind, name
        what = kind if kind == "cluster" else f"{kind} {name!r}"
        where = "--cluster" if kind == "cluster" else f"--{kind} {name}"
        super().__init__(
            f"{principal} may not {operation} {what}: kafka-acls.sh --add --allow-principal {principal} "
            f"--operation {operation} {where}"
        )


class TopicMissing(ClusterError):
    """A topic to consume or to write does not exist."""

    retriable: ClassVar[bool] = True

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(f"topic {topic!r} does not exist: create it, or correct its name")


class PartitionError(ClusterError):
    """Kafka refuses to serve a partition."""

    topic: str
    partition: int
    reason: str

    def __init__(self, topic: str, partition: int, reason: str) -> None:
        self.topic, self.partition, self.reason = topic, partition, reason
        super().__init__(f"{topic}:{partition} cannot be read: {reason}")


class DeserializationFailed(ClusterError):
    """A deserializer raised an error for the key or the value of a message of a batch, or that `Topic.get` found.

    `field`: "key" or "value". `__cause__` is the deserializer's error.
    """

    topic: str
    partition: int
    offset: int
    field: str
    reason: str

    def __init__(self, topic: str, partition: int, offset: int, field: str, reason: str) -> None:
        self.topic, self.partition, self.offset, self.field, self.reason = topic, partition, offset, field, reason
        super().__init__(
            f"the {field} of {topic}:{partition}@{offset} cannot be deserialized: {reason}; to read the others, "
            "iterate over the messages of a batch, or ask a topic without deserializers"
        )


class PartitionParked(ClusterError):
    """Nobody may consume a partition until an admin has looked at it (PROTOCOL.md F6.4).

    `reason`: the name of the error that parked it, as in the log.
    """

    group: str
    topic: str
    partition: int
    reason: str

    def __init__(self, group: str, topic: str, partition: int, reason: str, sentence: str = "") -> None:
        """`sentence`: the text of a subclass, which knows more about the reason."""
        self.group, self.topic, self.partition, self.reason = group, topic, partition, reason
        where = f"{topic}:{partition}"
        super().__init__(
            sentence
            or f"{where} is parked ({reason}), so nobody consumes it: `marshal explain {group} {where}` shows why, "
            f"`marshal set-position {group} {where} --to POSITION` continues"
        )


class PartitionsParked(ClusterError):
    """A job that ends by itself has read what could be read, and partitions of its topics are parked.

    Nobody may consume them until an admin has looked at them (PROTOCOL.md F6.4).
    """

    group: str
    parked: Mapping[str, str]

    def __init__(self, group: str, parked: Mapping[str, str]) -> None:
        """`parked`: by partition (topic:number), why it is parked and what to do."""
        self.group, self.parked = group, dict(parked)
        what = "\n".join(f"  {name}: {reason}" for name, reason in self.parked.items())
        super().__init__(
            f"group {group!r}: the rest was read, and {len(self.parked)} partitions are parked, so nobody reads them:\n"
            f"{what}"
        )


class DataTopicRecreated(PartitionParked):
    """A data topic was deleted and created again, so positions in it mean nothing (PROTOCOL.md D10).

    `known`: the topic's id in the group's log; `found`: its id in the cluster; "" if unknown.
    """

    known: str
    found: str

    def __init__(self, group: str, topic: str, partition: int, known: str = "", found: str = "") -> None:
        self.known, self.found = known, found
        ids = f" (its id was {known}, now it is {found})" if known and found else ""
        super().__init__(
            group,
            topic,
            partition,
            type(self).__name__,
            f"topic {topic!r} was deleted and created again{ids}, so nobody consumes {topic}:{partition}: the "
            f"positions of group {group!r} belong to the old topic; `marshal set-position {group} {topic} --to "
            f"earliest` continues with the new one",
        )


class PositionBeyondEnd(PartitionParked):
    """The group's position is beyond the end: data was lost or the topic recreated (PROTOCOL.md D6).

    Consumers do not raise it; it says why the partition is parked. `detail`: position and end, as far as known.
    """

    def __init__(self, group: str, topic: str, partition: int, detail: str = "") -> None:
        self.detail = detail
        where = f"{topic}:{partition}"
        super().__init__(
            group,
            topic,
            partition,
            type(self).__name__,
            f"the position of group {group!r} in {where} is beyond the end of the partition"
            f"{_in_brackets(detail)}: records were lost, or the topic was created again. Nobody consumes the "
            f"partition, even once it has grown past the position: look at its records, then `marshal "
            f"set-position {group} {where} --to latest` (or earliest, an offset, a time) continues",
        )


class PartitionTruncated(PartitionParked):
    """A partition lost its newest records, which the group had read (PROTOCOL.md D6, KIP-320).

    Consumers do not raise it; it says why the partition is parked. `detail`: the broker's words, as far as known.
    """

    def __init__(self, group: str, topic: str, partition: int, detail: str = "") -> None:
        self.detail = detail
        where = f"{topic}:{partition}"
        super().__init__(
            group,
            topic,
            partition,
            type(self).__name__,
            f"{where} lost records that group {group!r} had read{_in_brackets(detail)}, as in an unclean leader "
            f"election; other records may be at their offsets. Nobody consumes it: look at its records, then "
            f"`marshal set-position {group} {where} --to POSITION` continues",
        )


class PartitionUnreadable(PartitionParked):
    """Kafka serves a partition to no consumer of the group (PROTOCOL.md D13).

    It says why the partition is parked; a consumer that is refused everything it owns raises PartitionError as well.
    `detail`: the cluster's words, as far as known.
    """

    def __init__(self, group: str, topic: str, partition: int, detail: str = "") -> None:
        self.detail = detail
        where = f"{topic}:{partition}"
        super().__init__(
            group,
            topic,
            partition,
            type(self).__name__,
            f"no consumer of group {group!r} can read {where}{_in_brackets(detail)}, so nobody consumes it: check "
            f"the rights (`marshal doctor {group} --as consumer`) and the broker's log, then `marshal "
            f"set-position {group} {where} --shift-by 0` continues at the same position "
            f"(what was finished above it comes again)",
        )


def _in_brackets(detail: str) -> str:
    return f" ({detail})" if detail else ""


class RangeLost(ClusterError):
    """Kafka deleted the beginning of a range after it was planned. The next plan reports it and starts after it."""

    topic: str
    partition: int
    start: int
    to: int
    reason: str
    retriable: ClassVar[bool] = True

    def __init__(self, topic: str, partition: int, start: int, to: int, reason: str) -> None:
        self.topic, self.partition, self.start, self.to, self.reason = topic, partition, start, to, reason
        super().__init__(
            f"{topic}:{partition} [{start}, {to}) cannot be read any more ({reason}): retention deleted "
            f"records before the job read them; run it again, lengthen retention.ms, or plan smaller "
            f"batches"
        )


class TopicRefused(ClusterError):
    """Kafka refuses to create, change or delete a topic as it was asked to. Nothing was changed."""

    topic: str
    reason: str

    def __init__(self, topic: str, reason: str) -> None:
        self.topic, self.reason = topic, reason
        super().__init__(f"Kafka refuses this for topic {topic!r}: {reason}")


class PurgeRefused(ClusterError):
    """Kafka refuses to delete records of a partition. Partitions that come before it are purged."""

    topic: str
    partition: int
    reason: str

    def __init__(self, topic: str, partition: int, reason: str) -> None:
        self.topic, self.partition, self.reason = topic, partition, reason
        super().__init__(
            f"Kafka deletes no records of {topic}:{partition} ({reason}): the topic's cleanup.policy must contain "
            "delete, and the client needs the right to delete"
        )


class EmbeddedLogFull(ClusterError):
    """A write would exceed the few MB that the embedded broker keeps per partition before it drops old records."""

    topic: str
    partition: int
    size_bytes: int
    limit_bytes: int

    def __init__(self, topic: str, partition: int, size_bytes: int, limit_bytes: int) -> None:
        self.topic, self.partition, self.size_bytes, self.limit_bytes = topic, partition, size_bytes, limit_bytes
        super().__init__(
            f"{topic}:{partition} of the embedded broker would hold {size_bytes} bytes, more than the "
            f"{limit_bytes} that it keeps: produce less, or use a real broker"
        )


class CoordinationError(ClusterError):
    """The coordination topic cannot be trusted or used. Consumption has stopped."""


class CoordinationTopicMissing(CoordinationError):
    """The coordination topic is missing and may not be created by this client."""

    topic: str
    reason: str
    command: str

    def __init__(self, topic: str, reason: str, command: str) -> None:
        self.topic, self.reason, self.command = topic, reason, command
        super().__init__(
            f"coordination topic {topic!r} is missing and was not created ({reason}); create it: {command}"
        )


class ForeignTopic(CoordinationError):
    """The topic that was named as the coordination topic holds the messages of somebody else. Nothing was changed."""

    topic: str
    partition: str

    def __init__(self, topic: str, partition: str) -> None:
        self.topic, self.partition = topic, partition
        super().__init__(
            f"topic {topic!r} is no coordination topic: {partition} has messages, and the topic does not begin with "
            f"records of this library; name another topic as the coordination topic, one that nobody writes to"
        )


class WrongTopicSetting(CoordinationError):
    """A setting of the coordination topic would lose history (PROTOCOL.md L1)."""

    topic: str
    setting: str
    value: str
    wanted: str
    command: str

    def __init__(self, topic: str, setting: str, value: str, wanted: str, command: str) -> None:
        self.topic, self.setting, self.value, self.wanted, self.command = topic, setting, value, wanted, command
        super().__init__(f"coordination topic {topic!r} has {setting}={value}, it must be {wanted}: {command}")


class TopicRecreated(CoordinationError):
    """The log is another incarnation than the known one, or ends before what was read (PROTOCOL.md L6, L8)."""

    log: int
    known: str
    found: str

    def __init__(self, log: int, known: str, found: str) -> None:
        self.log, self.known, self.found = log, known, found
        super().__init__(
            f"coordination partition {log} was recreated or lost records: known {known}, found {found}; "
            f"restart the consumers once the topic is sound"
        )


class LogGap(CoordinationError):
    """Offsets are missing in a coordination partition (PROTOCOL.md L8)."""

    log: int
    expected_offset: int
    found_offset: int

    def __init__(self, log: int, expected_offset: int, found_offset: int) -> None:
        self.log, self.expected_offset, self.found_offset = log, expected_offset, found_offset
        super().__init__(
            f"coordination partition {log} jumps from offset {expected_offset} to {found_offset}: it was "
            f"compacted, written in transactions, or lost records"
        )


class HistoryTruncated(CoordinationError):
    """The beginning of the log was deleted, and no confirmed snapshot replaces it (PROTOCOL.md N10)."""

    log: int
    first_offset: int

    def __init__(self, log: int, first_offset: int) -> None:
        self.log, self.first_offset = log, first_offset
        super().__init__(
            f"coordination partition {log} begins at offset {first_offset}: its history was deleted, and no "
            f"confirmed snapshot replaces it; check retention and cleanup.policy of the topic; "
            f"`marshal log reset` restarts it without the positions that were there"
        )


class HistoryRestarted(CoordinationError):
    """An operator restarted the log's history at a checkpoint after the one this reader began at (PROTOCOL.md N13)."""

    log: int
    offset: int
    at: int

    def __init__(self, log: int, offset: int, at: int) -> None:
        self.log, self.offset, self.at = log, offset, at
        super().__init__(
            f"offset {offset} of coordination partition {log} restarts its history at offset {at}: what this "
            f"process knows of it is void; restart the process"
        )


class SnapshotRefused(CoordinationError):
    """The confirmed snapshot that this process began with differs from what the log folds to (PROTOCOL.md N9)."""

    log: int
    at: int
    older: int

    def __init__(self, log: int, at: int, older: int) -> None:
        self.log, self.at, self.older = log, at, older
        super().__init__(
            f"the snapshot of coordination partition {log} at offset {at} differs from what the log folds to "
            f"from the snapshot at {older}: a process with a different fold wrote one of them; keep "
            f"`marshal log dump` as evidence"
        )


class Diverged(CoordinationError):
    """This process's state differs from what the log, or every other client, folds to (PROTOCOL.md G7, G8).

    `offset`: the first checkpoint at which the states differ, as far back as this process remembers. `held`: this
    process's state digest there; `again`: the digest after folding again, or that of two other clients. `evidence`: the
    file with the saved state, "" if there is none.
    """

    group: str
    log: int
    offset: int
    held: int
    again: int
    reason: str
    evidence: str
    args: tuple[Any, ...]

    def __init__(self, group: str, log: int, offset: int, held: int, again: int, reason: str) -> None:
        self.group, self.log, self.offset = group, log, offset
        self.held, self.again, self.reason, self.evidence = held, again, reason, ""
        super().__init__(
            f"group {group!r}: this process's state of coordination partition {log} is wrong from offset {offset} on "
            f"({held:016x}, not {again:016x}): {reason}; the consumer has stopped; keep `marshal log dump` for a "
            f"bug report, then restart the process"
        )

    def keep(self, path: str) -> None:
        """Notes the file in which the state was saved."""
        self.evidence = path
        self.args = (f"{self.args[0]}; its state is saved: `marshal diff {self.group} --state {path}`",)


class EnvelopeUnknown(CoordinationError):
    """A record of this incarnation has an unknown envelope version (PROTOCOL.md E3)."""

    log: int
    offset: int
    version: int

    def __init__(self, log: int, offset: int, version: int) -> None:
        self.log, self.offset, self.version = log, offset, version
        super().__init__(
            f"offset {offset} of coordination partition {log} has envelope version {version}: upgrade this process"
        )


class ProtocolOutdated(CoordinationError):
    """The log was created by an older version of this library, whose records this one cannot read (PROTOCOL.md L6)."""

    log: int
    protocol: int
    known: int

    def __init__(self, log: int, protocol: int, known: int) -> None:
        self.log, self.protocol, self.known = log, protocol, known
        super().__init__(
            f"coordination partition {log} is a log of protocol {protocol}; this library reads only protocol "
            f"{known}: keep a `marshal log dump` of the version that wrote it, then use a new coordination topic; "
            f"consumers continue from the offsets mirrored to Kafka (start='committed')"
        )


class ProtocolUnknown(CoordinationError):
    """The root names a hash or a protocol version that this library does not know (PROTOCOL.md L6)."""

    log: int
    what: str
    value: object

    def __init__(self, log: int, what: str, value: object) -> None:
        self.log, self.what, self.value = log, what, value
        super().__init__(
            f"coordination partition {log} was created with {what} {value!r}, which this library does not know: "
            f"upgrade this process"
        )
