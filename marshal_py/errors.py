"""Every error that the library raises: one tree, three branches. Raises nothing itself, imports nothing of ours.

    MarshalError
    +-- CallerError               the calling program asked for something that cannot be: mend the call
    |   +-- InvalidName           a group, client id, member or topic name breaks a rule
    |   +-- InvalidOption         a setting is out of bounds or contradicts another
    |   +-- InvalidRecord         a record with values out of bounds was about to be written
    |   +-- MessageTooLarge       a record or message is larger than the cluster takes
    |   +-- ConcurrentUse         two threads in fetch / next / iteration of one Consumer
    |   +-- ReentrantCall         a verb was called inside another call of the same thread that it would wait for
    |   +-- UsedAfterFork         an object made before os.fork() was used in the child
    |   +-- ConsumerClosed        a Consumer or Marshal was used after stop / drain / close
    |   +-- BackgroundThreadEnded something ended the thread that heartbeats; the Marshal is of no use any more
    |   +-- UnsupportedPlatform   this system lacks what the feature needs
    |   +-- BatchNotCommitted     the next claimed batch was asked for before the last one was committed
    |   +-- BatchOverdue          a pipeline did not come back within handler_timeout_s; its claims were released
    |   +-- RangeReadTwice        in at-most-once mode, Spark retried a task whose range may have been processed
    |   +-- MissingSpark          a part of Spark is not installed: pyspark, pyarrow, pandas, a Java
    |   +-- GroupMissing          an admin named a group, a partition of it or a session that the log does not know
    |   +-- GroupExists           a group was to be created that is there
    |   +-- PositionOutOfRange    an admin wanted a position that the partition does not have
    |   +-- DumpDamaged           a dump file of a log is not as it was written
    |   +-- DumpUnusable          nothing can be judged or simulated from this dump
    |   +-- LoadRefused           a dump cannot be loaded into this topic
    +-- PeerError                 another participant of the group made going on impossible
    |   +-- SessionCloned         somebody else writes with this consumer's session (fork, cloned machine)
    |   +-- DuplicateClientId     another process took this client id over (fast reclaim)
    |   +-- ModeMismatch          the group and the consumer have different delivery modes
    |   +-- GroupDeleted          an admin deleted the group
    |   +-- GroupOpaque           the group holds records that only a newer library can read
    |   +-- KafkaGroupIsLive      ordinary Kafka consumers use the same group id
    |   +-- AdminBusy             the group is in a pause that the admin's operation may not work in
    |   +-- PauseOver             the pause that an admin's operation was to work in is over
    |   +-- PauseNotDrained       consumers did not let go of their partitions in time; the pause was ended
    |   +-- PositionNotMoved      a move of positions was given up; nothing moved, and nothing will
    |   +-- PositionUnknown       a move was given up while its record may still land
    |   +-- SettingsChanged       another admin changed the group's settings while ours were on their way
    |   +-- MembersAlive          consumers are alive where none may be
    |   +-- WriteFenced           a later owner of a partition has already written to the same table
    |   +-- LedgerMoved           another writer added rows of the same partitions meanwhile (retriable)
    |   +-- ClaimLost             claims of a batch were released or lost before it was committed
    |   +-- SnapshotNotConfirmed  a snapshot was written and nobody vouched for it
    |   +-- AdminGaveUp           an operation was not read done in time
    +-- ClusterError              Kafka or its topics are not as they must be
        +-- ClusterUnreachable    no broker answered in time (retriable)
        +-- AuthenticationFailed  the brokers do not take this client's credentials
        +-- TlsMismatch           client and brokers do not agree on TLS, or on a certificate
        +-- AccessDenied          this client lacks a right
        +-- TopicMissing          a topic to consume does not exist (retriable once it is created)
        +-- PartitionError        Kafka refuses to serve a partition (authorization, for one)
        +-- PartitionParked       nobody may consume a partition until an admin has looked at it
        |   +-- DataTopicRecreated    its topic was deleted and made anew
        |   +-- PositionBeyondEnd     the group's position lies beyond the end of the partition
        |   +-- PartitionTruncated    records that were read are gone, and others may stand at their offsets
        |   +-- PartitionUnreadable   nobody of the group can read it: a right is missing, or its records are damaged
        +-- RangeLost             Kafka deleted the beginning of a range before it was read (retriable)
        +-- EmbeddedLogFull       the embedded broker is about to drop records
        +-- CoordinationError     the coordination topic cannot be trusted or used
            +-- CoordinationTopicMissing   missing, and may not be created
            +-- WrongTopicSetting          a setting of it would lose history
            +-- TopicRecreated             another incarnation than the one known
            +-- LogGap                     offsets are missing: compaction, transactions or lost data
            +-- HistoryTruncated           the log does not begin at its beginning, and no snapshot stands in for it
            +-- HistoryRestarted           an operator began the log's history anew
            +-- SnapshotRefused            a snapshot is not what the log's history folds to
            +-- Diverged                   this process holds another state than its history folds to
            +-- EnvelopeUnknown            written by a library of another envelope version
            +-- ProtocolOutdated           the log was begun by an older version of this library
            +-- ProtocolUnknown            the root names a hash or a protocol version that is not ours

`retriable` tells whether the same call may succeed later without anybody mending anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class MarshalError(Exception):
    """Root of the tree. Catch it to catch all that this library raises on purpose."""

    retriable: ClassVar[bool] = False

    def __reduce__(self) -> tuple[object, ...]:
        # An exception is pickled by its args, and those are one sentence here: it could not be made again from it in
        # the process that it was sent to (multiprocessing, Spark).
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[MarshalError], args: tuple[object, ...], fields: dict[str, object]) -> MarshalError:
    """An error as it was in another process, without building its sentence anew."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class CallerError(MarshalError):
    """The calling program asked for something that cannot be."""


class PeerError(MarshalError):
    """Another participant of the group made going on impossible."""


class ClusterError(MarshalError):
    """Kafka or its topics are not as they must be."""


# --- the caller


class InvalidName(CallerError):
    """A name breaks a rule. Raised before anything is sent."""

    def __init__(self, kind: str, value: object, rule: str) -> None:
        self.kind, self.value, self.rule = kind, value, rule
        super().__init__(f"{kind} {value!r} is not allowed: {rule}")


class InvalidOption(CallerError):
    """A setting is out of bounds or contradicts another. Raised before anything is sent."""

    def __init__(self, option: str, value: object, rule: str) -> None:
        self.option, self.value, self.rule = option, value, rule
        super().__init__(f"{option}={value!r} is not allowed: {rule}")


class InvalidRecord(CallerError):
    """A record with values outside PROTOCOL.md 4.2 was about to be written; nothing was."""

    def __init__(self, record: str, reason: str) -> None:
        self.record, self.reason = record, reason
        super().__init__(f"a {record} record cannot be written: {reason}")


class MessageTooLarge(CallerError):
    """A message is larger than the client or the broker takes; nothing of it was written."""

    def __init__(self, what: str, size_bytes: int, reason: str) -> None:
        self.what, self.size_bytes, self.reason = what, size_bytes, reason
        super().__init__(
            f"{what} of {size_bytes} bytes is too large: {reason}; raise message.max.bytes (client) and "
            f"max.message.bytes (topic), or send less"
        )


class ConcurrentUse(CallerError):
    """Two threads are inside fetch / next / iteration of one Consumer. `ack` may be called from any thread."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        super().__init__(
            f"{verb}() was called while another thread is fetching from the same Consumer; use one "
            f"Consumer per thread, or hand messages over to worker threads and ack there"
        )


class ReentrantCall(CallerError):
    """A verb was called where it would wait for itself, or change what the code below it is changing.

    That is in a signal handler, a callback, a logging handler or a `__del__` that runs inside another call of the same
    thread. `Consumer.request_stop` may be called anywhere.
    """

    def __init__(self, verb: str, inside: str) -> None:
        self.verb, self.inside = verb, inside
        super().__init__(
            f"{verb}() was called inside {inside} (by a signal handler, a callback, a logging handler or "
            f"a __del__), for which it would have to wait: call request_stop() there, which may be called "
            f"anywhere, or set a flag, and call {verb}() when that has returned"
        )


class UsedAfterFork(CallerError):
    """An object made before os.fork() was used in the child, where its threads and sockets do not exist."""

    def __init__(self, what: str, made_in_pid: int, pid: int) -> None:
        self.what, self.made_in_pid, self.pid = what, made_in_pid, pid
        super().__init__(
            f"this {what} was made in process {made_in_pid} and cannot be used in its fork {pid}: "
            f"connect again in the child"
        )


class ConsumerClosed(CallerError):
    """A Consumer or Marshal was used after it had stopped."""

    def __init__(self, what: str, reason: str) -> None:
        self.what, self.reason = what, reason
        super().__init__(f"the {what} is closed ({reason}): make a new one")


class BackgroundThreadEnded(CallerError):
    """Something ended the thread of a Marshal that heartbeats, so its consumers have ended. Connect again.

    The library lets nothing do so that it knows of: an exception was planted into the thread, or memory is gone.
    """

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(
            f"the background thread of this Marshal was ended by {cause}, so its consumers have ended: "
            f"close it and connect again; what ended it is in the log of the logger 'marshal_py'"
        )


class UnsupportedPlatform(CallerError):
    """This system lacks what the feature needs."""

    def __init__(self, feature: str, platform: str, way_out: str) -> None:
        self.feature, self.platform, self.way_out = feature, platform, way_out
        super().__init__(f"{feature} does not work on {platform}: {way_out}")


class BatchNotCommitted(CallerError):
    """The next claimed batch was asked for while the last one was neither committed nor given back."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        super().__init__(
            f"the last batch of {rows} offsets was not committed: call batch.commit() when it is written, "
            f"or batch.give_back() to have it planned again"
        )


class BatchOverdue(CallerError):
    """A pipeline made no call for longer than handler_timeout_s: its claims were released (PROTOCOL.md D4)."""

    def __init__(self, group: str, timeout_s: float) -> None:
        self.group, self.timeout_s = group, timeout_s
        super().__init__(
            f"the consumer of group {group!r} was not called for {timeout_s:g} s (handler_timeout_s) and "
            f"released its claims: make batches smaller, call batch.in_progress() between steps, or raise "
            f"handler_timeout_s; then make a new consumer"
        )


class BatchUnclaimed(PeerError):
    """A batch that was planned before a restart cannot go on: nobody claims a partition of it."""

    retriable: ClassVar[bool] = True

    def __init__(self, group: str, waits: str) -> None:
        """`waits`: the partitions, each with what it waits for, in words."""
        self.group, self.waits = group, waits
        super().__init__(
            f"group {group!r}: a batch that was planned before the restart waits for claims ({waits}): "
            f"start the query again, let it claim more (max_claims), or start more members; without its "
            f"checkpoint folder the query goes on at the group's positions"
        )


class RangeReadTwice(CallerError):
    """In at-most-once mode Spark started a task of a range again; the first attempt may have processed it."""

    def __init__(self, ranges: Sequence[tuple[str, int, int, int]], attempt: int) -> None:
        """`ranges`: topic, partition, first offset and the one behind the last, of each range of the task."""
        self.ranges, self.attempt = tuple(ranges), attempt
        named = ", ".join(f"{topic}:{partition} [{start}, {to})" for topic, partition, start, to in ranges)
        super().__init__(
            f"{named} is read at most once, and this is attempt {attempt + 1} of its task: set "
            f"spark.task.maxFailures=1 and spark.speculation=false; what it names counts as lost"
        )


class MissingSpark(CallerError):
    """A part of Spark that the call needs is not there. `way_out` is the command or setting that brings it."""

    def __init__(self, what: str, found: str, way_out: str) -> None:
        self.what, self.found, self.way_out = what, found, way_out
        super().__init__(f"Spark needs {what}, {found}: {way_out}")


class GroupMissing(CallerError):
    """An admin named something that the group's log does not know."""

    def __init__(self, group: str, what: str) -> None:
        self.group, self.what = group, what
        super().__init__(f"group {group!r} {what}")


class GroupExists(CallerError):
    """A group was to be created that is there already, with or without consumers. Nothing was changed."""

    def __init__(self, group: str) -> None:
        self.group = group
        super().__init__(f"group {group!r} exists: update its settings, or delete it first")


class PositionOutOfRange(CallerError):
    """A wanted position lies outside what the partition holds. Nothing was moved."""

    def __init__(self, topic: str, partition: int, position: int, first: int, end: int) -> None:
        self.topic, self.partition, self.position, self.first, self.end = topic, partition, position, first, end
        super().__init__(f"{topic}:{partition} has no position {position}: valid are {first} to {end}")


class DumpDamaged(CallerError):
    """A dump file is not as it was written. `log` and `offset`: of the nearest record; `line` counts from 1."""

    def __init__(self, path: str, line: int, log: int, offset: int, reason: str) -> None:
        self.path, self.line, self.log, self.offset, self.reason = path, line, log, offset, reason
        super().__init__(
            f"dump {path!r} is damaged in line {line}, at offset {offset} of log {log}: {reason}; take "
            f"another one (`marshal log dump`), or look for a whole copy of it"
        )


class DumpUnusable(CallerError):
    """A dump is as it was written, and does not hold what was asked of it."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"nothing can be run from the dump {path!r}: {reason}")


class LoadRefused(CallerError):
    """A dump cannot be loaded into this topic. Nothing was written, unless the reason says so."""

    def __init__(self, topic: str, reason: str) -> None:
        self.topic, self.reason = topic, reason
        super().__init__(f"the dump was not loaded into {topic!r}: {reason}")


# --- the peers


class SessionCloned(PeerError):
    """Somebody else writes with this consumer's session: a fork or a cloned machine (PROTOCOL.md T18)."""

    def __init__(self, group: str, client_id: str, session: int, offset: int) -> None:
        self.group, self.client_id, self.session, self.offset = group, client_id, session, offset
        super().__init__(
            f"offset {offset} of the coordination log of group {group!r} was written with session "
            f"{session} of client {client_id!r}, but not by this process: a forked process or a cloned "
            f"machine is running; give every process its own connect()"
        )


class DuplicateClientId(PeerError):
    """Another process of the same client id reclaimed this session (PROTOCOL.md T18)."""

    def __init__(self, group: str, client_id: str, session: int, by_session: int) -> None:
        self.group, self.client_id, self.session, self.by_session = group, client_id, session, by_session
        super().__init__(
            f"client id {client_id!r} of group {group!r} was taken over by session {by_session} "
            f"(fast_reclaim): give every live process its own client_id, or do not use fast_reclaim"
        )


class ModeMismatch(PeerError):
    """The group's mode and the consumer's `delivery` differ (PROTOCOL.md F1.2)."""

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
    """The group's log holds records of a newer library (PROTOCOL.md E5)."""

    def __init__(self, group: str, offset: int) -> None:
        self.group, self.offset = group, offset
        super().__init__(
            f"the coordination log of group {group!r} holds a record at offset {offset} that only a newer "
            f"marshal_py can read: upgrade this process"
        )


class KafkaGroupIsLive(PeerError):
    """Ordinary Kafka consumers of the same group id are alive; both would read every message (PROTOCOL.md D7)."""

    def __init__(self, group: str, members: int) -> None:
        self.group, self.members = group, members
        super().__init__(
            f"{members} ordinary Kafka consumer(s) are alive in group {group!r}: stop them, use another "
            f"group, or pass join_live_kafka_group=True if both shall read"
        )


class AdminBusy(PeerError):
    """The group is paused, and the operation was not told to work in that pause (PROTOCOL.md M2).

    `by`: the run that paused it. `own`: a run of the same person on the same machine. `left_s`: by that run's own
    estimate; -1 if unknown.
    """

    retriable: ClassVar[bool] = True

    def __init__(self, group: str, by: str, reason: str, left_s: float, token: int, *, own: bool = False) -> None:
        self.group, self.by, self.reason, self.left_s, self.token, self.own = group, by, reason, left_s, token, own
        why = f" ({reason})" if reason else ""
        left = f", about {left_s:.0f} s left" if left_s >= 0 else ""
        who = f"another run of yours, {by}" if own else by or "somebody without a name"
        ways = (
            f"work in that pause and leave it in place (--adopt, or --token {token}), take it over if that run is "
            f"dead (--take-over), or end it (marshal resume {group})"
            if own
            else f"wait, name its token (--token {token}), or take the pause over (--take-over)"
        )
        super().__init__(f"group {group!r} is paused by {who}{why}{left}: {ways}")


class PauseOver(PeerError):
    """The group is not, or not any more, in the pause that the operation was told to work in (PROTOCOL.md M2).

    `ended_by`: the run that ended the newest pause; "" if there was none.
    """

    def __init__(self, group: str, ended_by: str) -> None:
        self.group, self.ended_by = group, ended_by
        how = f"the last pause was ended by {ended_by}" if ended_by else "nobody has paused it"
        super().__init__(
            f"group {group!r} is not in the pause that --adopt or --token means: {how}. Without them the "
            f"command pauses the group itself"
        )


class PauseNotDrained(PeerError):
    """Partitions were not released in time, nor were their owners silent. The pause was ended (PROTOCOL.md M9)."""

    retriable: ClassVar[bool] = True

    def __init__(self, group: str, holders: tuple[str, ...], waited_s: float) -> None:
        self.group, self.holders, self.waited_s = group, holders, waited_s
        who = ", ".join(holders) or "nobody known: the pause itself was not read in time"
        super().__init__(
            f"group {group!r} did not let go within {waited_s:g} s; held by {who}; it is not paused any more"
        )


class PositionNotMoved(PeerError):
    """No position moved, and none will (PROTOCOL.md M7)."""

    def __init__(self, group: str, reason: str) -> None:
        self.group, self.reason = group, reason
        super().__init__(f"no position of group {group!r} moved: {reason}")


class PositionUnknown(PeerError):
    """The record was sent and its fate was not read: everything moved or nothing did (PROTOCOL.md M8)."""

    def __init__(self, group: str, reason: str, command: str) -> None:
        self.group, self.reason, self.command = group, reason, command
        super().__init__(
            f"whether the positions of group {group!r} moved, all or none, is unknown ({reason}): {command} finds out"
        )


class SettingsChanged(PeerError):
    """The group was changed by somebody else after it was looked at; nothing of ours was (PROTOCOL.md F9.1, F9.4)."""

    retriable: ClassVar[bool] = True

    def __init__(self, group: str, what: str, by: str) -> None:
        self.group, self.what, self.by = group, what, by
        super().__init__(
            f"{what} of group {group!r} changed meanwhile, by {by or 'somebody without a name'}; nothing "
            f"of this change was made: look again, then try again"
        )


class MembersAlive(PeerError):
    """Consumers are alive where none may be."""

    def __init__(self, group: str, what: str, members: tuple[str, ...]) -> None:
        self.group, self.what, self.members = group, what, members
        super().__init__(f"group {group!r}: {what}: {', '.join(members)} gave signs of life")


class WriteFenced(PeerError):
    """A later owner of a partition has already written to the same table (PROTOCOL.md K1). Nothing was written."""

    def __init__(self, path: str, partition: str, token: str, newest: str) -> None:
        self.path, self.partition, self.token, self.newest = path, partition, token, newest
        super().__init__(
            f"{path} holds rows of {partition} under token {newest}, and this writer's token is {token}: "
            f"another member owns the partition now; drop the batch, its messages are that member's"
        )


class LedgerMoved(PeerError):
    """Another writer added rows of the same partitions to a table meanwhile. Nothing was written."""

    retriable: ClassVar[bool] = True

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"another writer added rows of the same partitions to {path} meanwhile: begin the batch "
            f"again, some of it is written"
        )


class ClaimLost(PeerError):
    """Claims of a batch were released or lost before it was committed: a pause, a hand-over, an eviction."""

    def __init__(self, group: str, lost: tuple[str, ...]) -> None:
        self.group, self.lost = group, lost
        super().__init__(
            f"group {group!r}: the claims on {', '.join(lost)} were released or lost before the batch was "
            f"committed: their messages will be delivered again, or were by another member; compare "
            f"tokens where the batch was written"
        )


class AdminGaveUp(PeerError):
    """An operation was not read done in time. Its record may still land; doing it again is safe."""

    retriable: ClassVar[bool] = True

    def __init__(self, group: str, what: str, waited_s: float, *, pending: bool = False) -> None:
        """`waited_s`: 0 for an interruption. `pending`: a record of it is on its way and may still be accepted."""
        self.group, self.what, self.waited_s, self.pending = group, what, waited_s, pending
        told = f"was not read done within {waited_s:g} s" if waited_s else "was interrupted"
        after = "it may still happen, and to try again is safe" if pending or waited_s else "nothing of it will happen"
        super().__init__(f"group {group!r}: {what} {told}; {after}")


class SnapshotNotConfirmed(PeerError):
    """A snapshot was written, and no live consumer of the log vouched for it (PROTOCOL.md N5, N6)."""

    retriable: ClassVar[bool] = True

    def __init__(self, log: int, at: int, waited_s: float, sessions: tuple[str, ...]) -> None:
        self.log, self.at, self.waited_s, self.sessions = log, at, waited_s, sessions
        who = ", ".join(sessions) or "nobody"
        super().__init__(
            f"the snapshot of coordination partition {log} at offset {at} was written, but none of its "
            f"live sessions ({who}) vouched for it within {waited_s:g} s: if they are dead, evict them or "
            f"wait until they are evicted, then try again; it does no harm where it stands"
        )


# --- the cluster


class ClusterUnreachable(ClusterError):
    """No broker answered in time."""

    retriable: ClassVar[bool] = True

    def __init__(self, servers: str, waiting_for: str, reason: str) -> None:
        self.servers, self.waiting_for, self.reason = servers, waiting_for, reason
        super().__init__(f"no answer from {servers} while waiting for {waiting_for}: {reason}")


class AuthenticationFailed(ClusterError):
    """The brokers refuse this client's credentials, or their mechanism, again and again. Waiting does not mend it."""

    def __init__(self, servers: str, principal: str, reason: str) -> None:
        self.servers, self.principal, self.reason = servers, principal, reason
        super().__init__(
            f"{servers} refuses to authenticate {principal}: {reason}; check sasl.username, sasl.password "
            f"and sasl.mechanism"
        )


class TlsMismatch(ClusterError):
    """Client and brokers do not agree on TLS: one of them speaks it alone, or a certificate is not trusted."""

    def __init__(self, servers: str, protocol: str, reason: str) -> None:
        """`protocol`: the client's security.protocol."""
        self.servers, self.protocol, self.reason = servers, protocol, reason
        super().__init__(
            f"no connection to {servers} with security.protocol={protocol}: {reason}; check "
            f"security.protocol, the port, and ssl.ca.location"
        )


class AccessDenied(ClusterError):
    """Kafka's authorizer refuses this client something. `kind`: topic, group or cluster."""

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
        super().__init__(f"topic {topic!r} does not exist: create it, or mend its name")


class PartitionError(ClusterError):
    """Kafka refuses to serve a partition."""

    def __init__(self, topic: str, partition: int, reason: str) -> None:
        self.topic, self.partition, self.reason = topic, partition, reason
        super().__init__(f"{topic}:{partition} cannot be read: {reason}")


class PartitionParked(ClusterError):
    """Nobody may consume a partition until somebody has looked at it (PROTOCOL.md F6.4). `reason`: from the log."""

    def __init__(self, group: str, topic: str, partition: int, reason: str, sentence: str = "") -> None:
        """`sentence`: of an error that knows more of its reason."""
        self.group, self.topic, self.partition, self.reason = group, topic, partition, reason
        where = f"{topic}:{partition}"
        super().__init__(
            sentence
            or f"{where} is parked for the reason {reason!r}, so nobody consumes it: `marshal "
            f"explain {group} {where}` shows how that came about, `marshal set-position {group} {where} "
            f"--to POSITION` goes on"
        )


class DataTopicRecreated(PartitionParked):
    """A data topic was deleted and made anew, so positions in it mean nothing (PROTOCOL.md D10).

    `known` is the topic's id in the group's log, `found` that in the cluster; "" where it is not told.
    """

    def __init__(self, group: str, topic: str, partition: int, known: str = "", found: str = "") -> None:
        self.known, self.found = known, found
        ids = f" (its id was {known}, now it is {found})" if known and found else ""
        super().__init__(
            group,
            topic,
            partition,
            type(self).__name__,
            f"topic {topic!r} was deleted and made anew"
            f"{ids}, so nobody consumes {topic}:{partition}: the positions of group {group!r} are those "
            f"of the old topic; `marshal set-position {group} {topic} --to earliest` goes on with the "
            f"new one",
        )


class PositionBeyondEnd(PartitionParked):
    """The group's position lies beyond the end: data was lost or the topic recreated (PROTOCOL.md D6).

    Consumers do not raise it: it names why the partition is parked. `detail`: position and end, as far as known.
    """

    def __init__(self, group: str, topic: str, partition: int, detail: str = "") -> None:
        self.detail = detail
        where = f"{topic}:{partition}"
        super().__init__(
            group,
            topic,
            partition,
            type(self).__name__,
            f"the position of group {group!r} in {where} "
            f"lies beyond the end of the partition{_in_brackets(detail)}: records were lost, or the "
            f"topic was made anew. Nobody consumes it, also when it has grown past the position: look at "
            f"what is there, then `marshal set-position {group} {where} --to latest` (or earliest, an "
            f"offset, a time) goes on",
        )


class PartitionTruncated(PartitionParked):
    """What was read of a partition is not its history any more: its log lost its tail (PROTOCOL.md D6, KIP-320).

    Consumers do not raise it: it names why the partition is parked. `detail`: the broker's words, as far as known.
    """

    def __init__(self, group: str, topic: str, partition: int, detail: str = "") -> None:
        self.detail = detail
        where = f"{topic}:{partition}"
        super().__init__(
            group,
            topic,
            partition,
            type(self).__name__,
            f"{where} lost records that group {group!r} had "
            f"read{_in_brackets(detail)}, as in an unclean leader election; others may stand at their "
            f"offsets. Nobody consumes it: look at what is there, then `marshal set-position {group} "
            f"{where} --to POSITION` goes on",
        )


class PartitionUnreadable(PartitionParked):
    """Kafka serves a partition to no consumer of the group (PROTOCOL.md D13).

    It names why the partition is parked; a consumer that is refused all that it owns raises PartitionError besides.
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
            f"no consumer of group {group!r} can read "
            f"{where}{_in_brackets(detail)}, so nobody consumes it: look at its rights (`marshal doctor "
            f"{group} --as consumer`) and at the broker's log, then `marshal set-position {group} {where} "
            f"--shift-by 0` goes on where it stands",
        )


def _in_brackets(detail: str) -> str:
    return f" ({detail})" if detail else ""


class RangeLost(ClusterError):
    """Kafka deleted the beginning of a range after it was planned. The next plan notes it and goes on behind it."""

    retriable: ClassVar[bool] = True

    def __init__(self, topic: str, partition: int, start: int, to: int, reason: str) -> None:
        self.topic, self.partition, self.start, self.to, self.reason = topic, partition, start, to, reason
        super().__init__(
            f"{topic}:{partition} [{start}, {to}) cannot be read any more ({reason}): retention deleted "
            f"records before the job read them; run it again, lengthen retention.ms, or plan smaller "
            f"batches"
        )


class EmbeddedLogFull(ClusterError):
    """The embedded broker keeps a few MB per partition and drops the oldest records silently beyond that."""

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

    def __init__(self, topic: str, reason: str, command: str) -> None:
        self.topic, self.reason, self.command = topic, reason, command
        super().__init__(
            f"coordination topic {topic!r} is missing and was not created ({reason}); create it: {command}"
        )


class WrongTopicSetting(CoordinationError):
    """A setting of the coordination topic would lose history (PROTOCOL.md L1)."""

    def __init__(self, topic: str, setting: str, value: str, wanted: str, command: str) -> None:
        self.topic, self.setting, self.value, self.wanted, self.command = topic, setting, value, wanted, command
        super().__init__(f"coordination topic {topic!r} has {setting}={value}, it must be {wanted}: {command}")


class TopicRecreated(CoordinationError):
    """Another incarnation than the one known, or the log ends below what was read (PROTOCOL.md L6, L8)."""

    def __init__(self, log: int, known: str, found: str) -> None:
        self.log, self.known, self.found = log, known, found
        super().__init__(
            f"coordination partition {log} was recreated or lost records: known {known}, found {found}; "
            f"restart the consumers once the topic is sound"
        )


class LogGap(CoordinationError):
    """Offsets are missing in a coordination partition (PROTOCOL.md L8)."""

    def __init__(self, log: int, expected_offset: int, found_offset: int) -> None:
        self.log, self.expected_offset, self.found_offset = log, expected_offset, found_offset
        super().__init__(
            f"coordination partition {log} jumps from offset {expected_offset} to {found_offset}: it was "
            f"compacted, written in transactions, or lost records"
        )


class HistoryTruncated(CoordinationError):
    """The log does not begin at its beginning, and no confirmed snapshot stands in for it (PROTOCOL.md N10)."""

    def __init__(self, log: int, first_offset: int) -> None:
        self.log, self.first_offset = log, first_offset
        super().__init__(
            f"coordination partition {log} begins at offset {first_offset}: its history was deleted, and "
            f"no confirmed snapshot stands in for it; check retention and cleanup.policy of the topic; "
            f"`marshal bootstrap` begins anew, without the positions that stood there"
        )


class HistoryRestarted(CoordinationError):
    """An operator began the log's history anew at a checkpoint behind this reader's beginning (PROTOCOL.md N13)."""

    def __init__(self, log: int, offset: int, at: int) -> None:
        self.log, self.offset, self.at = log, offset, at
        super().__init__(
            f"offset {offset} of coordination partition {log} begins its history anew at offset {at}: "
            f"what this process knows of it does not count any more; start the process again"
        )


class SnapshotRefused(CoordinationError):
    """A confirmed snapshot that this process began with is not what the log folds to (PROTOCOL.md N9)."""

    def __init__(self, log: int, at: int, older: int) -> None:
        self.log, self.at, self.older = log, at, older
        super().__init__(
            f"the snapshot of coordination partition {log} at offset {at} is not what the log folds to "
            f"from the snapshot at {older}: one of them was written by a process with another fold; "
            f"`marshal log dump` keeps the evidence"
        )


class Diverged(CoordinationError):
    """This process folded the log to another state than the log says, or than others fold it to (PROTOCOL.md G7, G8).

    `offset`: the checkpoint at which the states first differ, as far back as this process remembers. `held` and
    `again`: the state digests there, as held and as folded again, or as two others have it. `evidence`: the file in
    which the consumer kept the state that it held, "" if there is none.
    """

    def __init__(self, group: str, log: int, offset: int, held: int, again: int, reason: str) -> None:
        self.group, self.log, self.offset = group, log, offset
        self.held, self.again, self.reason, self.evidence = held, again, reason, ""
        super().__init__(
            f"group {group!r}: the state of coordination partition {log} that this process holds differs "
            f"from offset {offset} on ({held:016x}, not {again:016x}): {reason}; it has stopped; keep "
            f"`marshal log dump` for a bug report, then start the process again"
        )

    def keep(self, path: str) -> None:
        """The state that was held stands in this file."""
        self.evidence = path
        self.args = (f"{self.args[0]}; what it held is kept: `marshal diff {self.group} --state {path}`",)


class EnvelopeUnknown(CoordinationError):
    """A record of this incarnation has an unknown envelope version (PROTOCOL.md E3)."""

    def __init__(self, log: int, offset: int, version: int) -> None:
        self.log, self.offset, self.version = log, offset, version
        super().__init__(
            f"offset {offset} of coordination partition {log} has envelope version {version}: upgrade this process"
        )


class ProtocolOutdated(CoordinationError):
    """The log was begun by an older version of this library, whose records this one does not read (PROTOCOL.md L6)."""

    def __init__(self, log: int, protocol: int, known: int) -> None:
        self.log, self.protocol, self.known = log, protocol, known
        super().__init__(
            f"coordination partition {log} is a log of protocol {protocol}; this library reads protocol "
            f"{known} only. Keep it with `marshal log dump` of the version that wrote it, then start on a "
            f"fresh coordination topic: consumers go on from the offsets that were mirrored to Kafka "
            f"(start='committed')"
        )


class ProtocolUnknown(CoordinationError):
    """The root names a hash or a protocol version that this library does not know (PROTOCOL.md L6)."""

    def __init__(self, log: int, what: str, value: object) -> None:
        self.log, self.what, self.value = log, what, value
        super().__init__(
            f"coordination partition {log} was begun with {what} {value!r}, which this library does not "
            f"know: upgrade this process"
        )
