"""Every error of the library: one tree with three branches. Raises nothing itself and imports nothing of ours.

    MarshalError
    +-- CallerError: the calling program asked for something impossible: fix the call
    |     InvalidOption, InvalidRecord, MessageTooLarge, ConcurrentUse, ReentrantCall, EventLoopMisuse,
    |     UsedAfterFork, ConsumerClosed, BackgroundThreadEnded, UnsupportedPlatform, HandleUnknown,
    |     MessageNotPickled, NeedsAtLeastOnce, BatchRefused, BatchOverdue, BadRequest, MessageNotFound,
    |     GroupMissing, FileUnusable, AlreadyExists, PositionOutOfRange
    +-- PeerError: another participant of the group prevents it
    |     SessionCloned, DuplicateClientId, ModeMismatch, GroupDeleted, GroupOpaque, KeyNeeded, AdminBusy,
    |     AdminFailed, SettingsChanged, MembersAlive, WriteFenced, TableChanged, OffsetsUnclear,
    |     ClaimLost, AckNotConfirmed, PartitionsUnread, SnapshotNotConfirmed, IndexBusy, AdminGaveUp
    +-- ClusterError: Kafka or its topics are not as they must be
          ClusterUnreachable, AuthenticationFailed, TlsMismatch, AccessDenied, TopicMissing, PartitionError,
          DeserializationFailed, PartitionsParked, PartitionParked, RangeLost, TopicRefused
          +-- CoordinationError: the coordination topic cannot be trusted or used
                CoordinationTopicMissing, ForeignTopic, WrongTopicSetting, TopicRecreated, LogGap,
                HistoryTruncated, HistoryRestarted, SnapshotRefused, Diverged, ProtocolUnknown

`retriable`: whether the same call may succeed later although nobody fixes anything. Each class says below when it is
raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import Parameter, Signature, get_annotations
from shlex import quote
from typing import Any, ClassVar, Final, dataclass_transform

CLAIMED_SHOWN: Final = 10  # partitions in the text of ClaimLost

# Why a partition is parked, in `PartitionParked.reason` and in the log (PROTOCOL.md F6.4).
RECREATED: Final = "DataTopicRecreated"  # its topic was deleted and created again, so positions mean nothing (D10)
BEYOND_END: Final = "PositionBeyondEnd"  # data was lost, or the topic was created again in a cluster without ids (D6)
TRUNCATED: Final = "PartitionTruncated"  # it lost its newest records, which the group had read (D6, KIP-320)
UNREADABLE: Final = "PartitionUnreadable"  # Kafka serves it to no consumer of the group (D13)


def first_of(words: Iterable[str], most: int, between: str = ", ") -> str:
    """Returns a text that names `most` words and counts the others, such as "orders, payments and 3 more".

    Without words it is "".
    """
    found = list(words)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return between.join(found[:most]) + more


@dataclass_transform(eq_default=False)
class MarshalError(Exception):
    """Root of the tree. Catch it to catch everything that this library raises on purpose.

    A subclass lists its fields as a dataclass does: they are the parameters of its constructor, in this order, and
    attributes. Its text is _TEXT with the fields put in, or that of a field in _IF which is not empty; where it needs
    more than that, `sentence` returns it. A class without fields takes its text.
    """

    _TEXT: ClassVar[str]
    _IF: ClassVar[Mapping[str, str]] = {}
    retriable: ClassVar[bool] = False
    __signature__: ClassVar[Signature | None] = None  # of the constructor, which inspect and help show

    def __init_subclass__(cls, retriable: bool = False) -> None:
        cls.retriable = retriable or cls.retriable
        own = [
            Parameter(
                name, Parameter.POSITIONAL_OR_KEYWORD, default=vars(cls).get(name, Parameter.empty), annotation=of
            )
            for name, of in get_annotations(cls).items()
            if not of.startswith("ClassVar")
        ]
        if own:
            inherited = cls.__signature__.parameters.values() if cls.__signature__ else ()
            cls.__signature__ = Signature([*inherited, *own])

    def __init__(self, *values: Any, **named: Any) -> None:
        if self.__signature__ is None:
            super().__init__(*values)
            return
        given = self.__signature__.bind(*values, **named)
        given.apply_defaults()
        vars(self).update(given.arguments)
        super().__init__(self.sentence())

    def sentence(self) -> str:
        """Returns the text: the wrong value, the rule, and the way out."""
        shown = {name: ", ".join(of) or "nobody" if isinstance(of, tuple) else of for name, of in vars(self).items()}
        text = next((text for name, text in self._IF.items() if shown[name]), self._TEXT)
        return " ".join(text.split()).format_map(shown)

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


class InvalidOption(CallerError):
    """A setting or a name is missing, breaks a rule or contradicts another. Raised before anything is sent.

    `given`: whether the caller has named it at all.
    """

    option: str
    value: object
    rule: str
    given: bool = True

    def sentence(self) -> str:
        found = f"{self.option}={self.value!r} is not allowed" if self.given else f"no {self.option} given"
        return f"{found}: {self.rule}"


class InvalidRecord(CallerError):
    """A record with values outside PROTOCOL.md 4.2 was about to be written; nothing was."""

    record: str
    reason: str
    _TEXT = "a {record} record cannot be written: {reason}"


class MessageTooLarge(CallerError):
    """A message is larger than the client or the broker takes; nothing of it was written."""

    what: str
    size_bytes: int
    reason: str
    _TEXT = """{what} of {size_bytes} bytes is too large: {reason}; raise message.max.bytes (client) and
    max.message.bytes (topic), or send less"""


class ConcurrentUse(CallerError):
    """A Consumer is asked for messages while it already receives. Any thread or task may call `ack`.

    `busy`: what it does, FETCHES (another thread, or task, is inside fetch, next or iteration), ITERATES (an iteration
    of this thread has not ended) or CONSUMES (a `consume` runs). `caller`: what calls it, "thread" or "task".
    """

    FETCHES: ClassVar[str] = "fetches"
    ITERATES: ClassVar[str] = "iterates"
    CONSUMES: ClassVar[str] = "consumes"

    verb: str
    caller: str = "thread"
    busy: str = FETCHES

    def sentence(self) -> str:
        return f"{self.verb}() was called while {BUSY[self.busy].format_map(vars(self))}"


BUSY: Final = {
    ConcurrentUse.FETCHES: "another {caller} fetches from the same Consumer: use one Consumer per {caller}, or hand "
    "messages to worker {caller}s and ack there",
    ConcurrentUse.ITERATES: "an iteration of the same Consumer that this {caller} began has not ended: finish it, or "
    "let go of its iterator after a break (del the variable that holds it)",
    ConcurrentUse.CONSUMES: "a consume() or process() of the same Consumer runs: stop() or drain() what it returned, "
    "or make another Consumer",
}


class ReentrantCall(CallerError):
    """A method was called inside another call of the same thread or task, and would have to wait for that call.

    This happens in a signal handler, a callback, a logging handler or a `__del__`, and if the handler or the loop of a
    `consume` waits for its end. `way_out`: what to call instead; by default the advice for signal handlers.
    """

    verb: str
    inside: str
    way_out: str = ""
    _IF: ClassVar = {"way_out": "{verb}() was called inside {inside} and would wait for it: {way_out}"}
    _TEXT = """{verb}() was called inside {inside} (by a signal handler, a callback, a logging handler or a __del__)
    and would wait for it: use stop_on_signals(), or set a flag and call {verb}() after {inside} has returned"""


class EventLoopMisuse(CallerError):
    """A call of the asyncio front came from another event loop than its own, or would block its own."""

    verb: str
    problem: str
    _TEXT = "{verb}() {problem}"


class UsedAfterFork(CallerError):
    """An object from before os.fork() was used in the child, where its threads and sockets do not exist."""

    what: str
    made_in_pid: int
    pid: int
    _TEXT = """this {what} was made in process {made_in_pid} and cannot be used in its fork {pid}: connect again in
    the child"""


class ConsumerClosed(CallerError):
    """A Consumer or Marshal was used after it had stopped."""

    what: str
    reason: str
    _TEXT = "the {what} is closed ({reason}): make a new one"


class BackgroundThreadEnded(CallerError):
    """Something ended the background thread of a Marshal, and its consumers with it. Connect again.

    The library handles every error that it knows of, so an exception was injected into the thread or memory ran out.
    """

    cause: str
    _TEXT = """{cause} ended the background thread of this Marshal, and its consumers with it: close it and connect
    again; the logger 'marshal_py' has the traceback"""


class UnsupportedPlatform(CallerError):
    """This system lacks what the feature needs."""

    feature: str
    platform: str
    way_out: str
    _TEXT = "{feature} does not work on {platform}: {way_out}"


class HandleUnknown(CallerError):
    """An ack handle names no message that this consumer can answer."""

    group: str
    reason: str
    _TEXT = "group {group!r}: the handle cannot be used: {reason}"


class MessageNotPickled(CallerError):
    """A message was to be sent to another process, where its consumer does not exist."""

    what: str
    _TEXT = """the message {what} cannot go to another process, where its consumer does not exist: send
    message.handle() with the key and the value, and call consumer.complete(handle) here when it is done"""


class NeedsAtLeastOnce(CallerError):
    """An answer was given that only at-least-once groups have: in at-most-once mode nothing is delivered again."""

    verb: str
    group: str
    _TEXT = """{verb}() needs an at-least-once group, and {group!r} delivers at most once: its messages are done when
    they are delivered; use delivery='at_least_once', or write the message elsewhere"""


class BatchRefused(CallerError):
    """A batch was asked for out of turn: the one before is not committed, or the same one was handed out before.

    `named`: the batch. `attempt`: in at-most-once mode, how often Spark has run the task of the batch before, whose
    first attempt may have processed it; 0 otherwise.
    """

    named: str
    attempt: int = 0
    _IF: ClassVar = {
        "attempt": """{named} may be read only once, and this follows attempt {attempt} of its task: set
        spark.task.maxFailures=1 and spark.speculation=false; these messages count as lost"""
    }
    _TEXT = """{named} was not committed: call batch.commit() once it is written, or batch.give_back() to have it
    planned again"""


class BatchOverdue(CallerError):
    """A pipeline made no call for longer than handler_timeout_s, so its claims were released (PROTOCOL.md D4)."""

    group: str
    timeout_s: float
    _TEXT = """the consumer of group {group!r} was not called for {timeout_s:g} s (handler_timeout_s) and released
    its claims: make batches smaller, call batch.in_progress() between steps, or raise handler_timeout_s; then make a
    new consumer"""


class GroupMissing(CallerError):
    """An admin named a group, or something in it, that the log does not know."""

    group: str
    what: str
    _TEXT = "group {group!r} {what}"


class FileUnusable(CallerError):
    """A dump or a key index is damaged, or does not hold what is needed. It is left as it is.

    `line`: of a dump that was changed or cut off, from 1; 0 otherwise. `log`, `offset`: its record nearest to that.
    """

    path: str
    reason: str
    line: int = 0
    log: int = 0
    offset: int = 0
    _IF: ClassVar = {
        "line": """dump {path!r} is damaged in line {line}, at offset {offset} of log {log}: {reason}; write a new
        one (`marshal log dump`), or find an undamaged copy"""
    }
    _TEXT = "{path!r} cannot be used: {reason}"


class AlreadyExists(CallerError):
    """A topic cannot be created because it exists, or a group because it has other settings. Nothing was changed.

    `kind`: topic or group. `differences`: (what the group has, what was asked for) by setting; None for one that is not
    set.
    """

    kind: str
    name: str
    differences: Mapping[str, tuple[object, object]] = {}

    def sentence(self) -> str:
        words = [
            f"{name} is {'not set' if has is None else repr(has)}, not {asked!r}"
            if asked is not None
            else f"{name} is {has!r}, which was not asked for"
            for name, (has, asked) in self.differences.items()
        ]
        how = f" with other settings: {'; '.join(words)}" if words else ""
        return f"{self.kind} {self.name!r} exists already{how}: update it, delete it first, or choose another name"


class BadRequest(CallerError):
    """A request to a topic is empty, contradicts itself, is out of bounds or not possible with this topic.

    `status`: ADR-31's 408, or 413 if it names or matches too many keys.
    """

    rule: str
    status: int = 408

    _TEXT = "the topic cannot be asked so: {rule}"


class MessageNotFound(CallerError, KeyError):
    """The request is valid, and the topic holds no message that it describes. `status`: ADR-31's 404.

    `tombstone`: the key's last message deletes it. It is a KeyError as well, because `topic[key]` raises it.
    """

    topic: str
    request: str
    tombstone: bool = False
    status: ClassVar[int] = 404
    _TEXT = "topic {topic!r} has no message for {request} (404)"
    _IF: ClassVar = {"tombstone": _TEXT + ": a tombstone deletes it (tombstones=True finds the tombstone)"}

    __str__ = Exception.__str__  # KeyError's own shows the repr of the text


class PositionOutOfRange(CallerError):
    """The requested position is outside the partition. Nothing was moved. A plain number is an offset, never a time."""

    topic: str
    partition: int
    position: int
    first: int
    end: int
    _TEXT = """{topic}:{partition} has no position {position}: valid are {first} to {end}; a plain number is an
    offset, a time is written as 2025-01-31T12:00:00Z, or as 2h ago"""


# --- the peers


class SessionCloned(PeerError):
    """Another process writes with this consumer's session: a fork or a cloned machine (PROTOCOL.md T18)."""

    group: str
    client_id: str
    session: int
    offset: int
    _TEXT = """offset {offset} of the coordination log of group {group!r} was written with session {session} of
    client {client_id!r}, but not by this process: this process was forked or its machine was cloned; call connect()
    in every process"""


class DuplicateClientId(PeerError):
    """Another process of the same client id reclaimed this session (PROTOCOL.md T18)."""

    group: str
    client_id: str
    session: int
    by_session: int
    _TEXT = """client id {client_id!r} of group {group!r} was taken over by session {by_session} (fast_reclaim): give
    every live process its own client_id, or do not use fast_reclaim"""


class ModeMismatch(PeerError):
    """The group's mode and the consumer's `delivery` differ (PROTOCOL.md F1.2)."""

    group: str
    group_mode: str
    wanted: str
    _TEXT = """group {group!r} is {group_mode}, this consumer asks for {wanted}: use delivery={group_mode!r}, another
    group, or change the group's mode while it is paused"""


class GroupDeleted(PeerError):
    """An admin deleted the group (PROTOCOL.md F0, F9.5)."""

    group: str
    _TEXT = "group {group!r} is deleted: create it again to revive it"


class GroupOpaque(PeerError):
    """The group's log holds a record that only a newer library can read (PROTOCOL.md E5)."""

    group: str
    offset: int
    _TEXT = (
        "the coordination log of group {group!r} holds a record at offset {offset} that only a newer "
        "marshal_py can read: upgrade this process; if the group has admin keys, install marshal_py[keys]"
    )


class KeyNeeded(PeerError):
    """The group takes changes only from whom holds one of its admin keys (PROTOCOL.md F11.2). `given`: the public half
    of the key that was given, or ""."""

    group: str
    keys: tuple[str, ...]
    given: str

    def sentence(self) -> str:
        has = f"{self.given[:16]} is none of them" if self.given else "none was given"
        known = ", ".join(key[:16] for key in self.keys)
        return f"group {self.group!r} takes changes only from its admin keys ({known}), and {has}: --sign-with FILE"


class AdminBusy(PeerError):
    """Another run has paused the group, and this operation was not given that pause (PROTOCOL.md M2).

    `by`: the run that paused it. `own`: whether that was a run of the same user on the same machine. `left_s`: how long
    that run expects the pause to last; -1 if unknown. `signed`: whether the group has admin keys. `takes`: whether the
    operation can be given a pause. `became`: of this operation.
    """

    group: str
    by: str
    reason: str
    left_s: float
    token: int
    own: bool = False
    signed: bool = False
    takes: bool = True
    became: str = "nothing was changed"

    def sentence(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        left = f", about {self.left_s:.0f} s left" if self.left_s >= 0 else ""
        who = f"another run of yours, {self.by}" if self.own else self.by or "an unnamed admin"
        which, signs = "" if self.own else f" --token {self.token}", " --sign-with FILE" if self.signed else ""
        end = f"end it (marshal resume {quote(self.group)}{which}{signs})"
        if not self.takes:
            ways = f"wait, or {end}"
        elif self.own:
            ways = f"""work in that pause and leave it in place (--adopt, or --token {self.token}), take it over if that
            run is dead (--take-over), or {end}"""
        else:
            ways = f"wait, name its token (--token {self.token}), or take the pause over (--take-over)"
        look = f"marshal explain {quote(self.group)}"
        ways = f"{' '.join(ways.split())}; who did what: {look}"
        return f"group {self.group!r} is paused by {who}{why}{left}; {self.became}: {ways}"


class AdminFailed(PeerError):
    """An operation failed because of the group, or of another admin. `outcome`: what is true now, a key of FAILED.

    NO_PAUSE: the group is not in the pause in which the operation was to run (PROTOCOL.md M2). PAUSE_ENDED: somebody
    ended the pause that the operation had made. PAUSE_BROKEN: a pause that was to be kept was over for a while; now it
    is ended. NOT_MOVED: no position moved, and none will (M7). UNKNOWN: the record
    was sent, and all positions moved or none did (M8); `command` finds out. REFUSED: a dry run found that the fold
    would refuse a record (M12). STILL_PAUSED: an error ended the operation, which could not end its own pause; that
    lasts until `until`, and `command` ends it. `detail`: who, or why.
    """

    NO_PAUSE: ClassVar[str] = "no_pause"
    PAUSE_ENDED: ClassVar[str] = "pause_ended"
    PAUSE_BROKEN: ClassVar[str] = "pause_broken"
    NOT_MOVED: ClassVar[str] = "not_moved"
    UNKNOWN: ClassVar[str] = "unknown"
    REFUSED: ClassVar[str] = "refused"
    STILL_PAUSED: ClassVar[str] = "still_paused"

    group: str
    outcome: str
    detail: str
    command: str = ""
    until: str = ""

    def sentence(self) -> str:
        return FAILED[self.outcome].format_map(vars(self))


FAILED: Final = {
    AdminFailed.NO_PAUSE: "group {group!r} is not in the pause that --adopt or --token names: {detail}; without these "
    "options the command pauses the group itself",
    AdminFailed.PAUSE_ENDED: "group {group!r} continues, because {detail} ended the pause that this operation had "
    "made; the operation has given up: agree with them before you pause the group again",
    AdminFailed.PAUSE_BROKEN: "the pause of group {group!r} did not hold: it was over at {detail}, because nobody "
    "renewed it in time; its consumers continued until it was paused again, so look at what they did",
    AdminFailed.NOT_MOVED: "no position of group {group!r} moved: {detail}",
    AdminFailed.UNKNOWN: "it is unknown whether the positions of group {group!r} moved, all or none ({detail}): "
    "{command} finds out",
    AdminFailed.REFUSED: "group {group!r} would not be changed: {detail}; look at the group, then try again",
    AdminFailed.STILL_PAUSED: "{detail}; group {group!r} stays paused until {until}, because this operation could not "
    "end its own pause: {command} ends it",
}


class SettingsChanged(PeerError, retriable=True):
    """Another admin changed the group first; this change was not made (PROTOCOL.md F9.1, F9.4)."""

    group: str
    what: str
    by: str

    def sentence(self) -> str:
        return (
            f"{self.what} of group {self.group!r} was changed by {self.by or 'an unnamed admin'} at the same time; "
            f"this change was not made: look at the group, then try again"
        )


class MembersAlive(PeerError):
    """Consumers are alive where there must be none. `what`: where, or why."""

    group: str
    what: str
    members: tuple[str, ...]
    _TEXT = "group {group!r}: {what}: {members} gave signs of life"


class WriteFenced(PeerError):
    """A later owner of a partition has already written to the same table (PROTOCOL.md K1). Nothing was written.

    That owner may have had nothing new for it: then the table has only its token.
    """

    path: str
    partition: str
    token: str
    newest: str
    _TEXT = """{path} holds rows of {partition} under token {newest}, and this writer's token is {token}: another
    member owns the partition now; drop the batch, because that member has its messages"""


class TableChanged(PeerError, retriable=True):
    """Another writer added rows for the same partitions to the table. Nothing was written."""

    path: str
    _TEXT = """another writer added rows for the same partitions to {path}; this batch wrote nothing: retry it, some
    of its rows may already be there"""


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
    _TEXT = """{path} may or may not have each of the offsets [{start}, {to}) of {partition}: it keeps {ranges}
    ranges of offsets per partition, and holes in earlier ones are forgotten. Look which of them it has: move the
    group's position past them if none is missing; otherwise take their rows out and rewind the table to {start} or
    below, to write them again"""


class ClaimLost(PeerError):
    """Claims were released or lost before their batch was committed, or before the log had accepted the acks.

    Reasons are a pause, a hand-over, an eviction. `seek` raises it for a partition that the consumer does not own:
    `claimed` names those that it owns then, and is None otherwise.
    """

    group: str
    lost: tuple[str, ...]
    claimed: tuple[str, ...] | None = None

    def sentence(self) -> str:
        lost = ", ".join(self.lost)
        if self.claimed is not None:
            return (
                f"group {self.group!r}: this consumer does not own {lost}, so it cannot move the position there; it "
                f"owns {first_of(self.claimed, CLAIMED_SHOWN) or 'nothing'}: Group.set_position moves positions of "
                f"partitions that others own"
            )
        return (
            f"group {self.group!r}: the claims on {lost} were released or lost before the work was committed: another "
            f"member has received their messages or will; roll back, or compare tokens where the work was written"
        )


class AckNotConfirmed(PeerError, retriable=True):
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
    over: bool = False
    _IF: ClassVar = {
        "over": """group {group!r}: nobody can tell whether the log has all acks of {places}: {reason}; their
        messages may be delivered again, or not: decide when the next owner has received them, or has not"""
    }
    _TEXT = """group {group!r}: the log has not accepted the acks up to {places} within {waited_s:g} s: {reason}; the
    ack may still reach the log, so do not roll back on this: call again until it is known, or keep the effect under
    a guard (marshal_py.sql), which recognises a repeat"""


class PartitionsUnread(PeerError, retriable=True):
    """Nobody reads some partitions that a job or a query needs.

    A job that ends by itself has read what it could; the group is paused, a topic is gone, or no live member owns the
    rest. (Parked ones raise PartitionsParked.) Or a query was restarted, and nobody claims a part of the batch that had
    been `planned` before. `unread`: by partition (topic:number), why nobody reads it.
    """

    group: str
    unread: Mapping[str, str]
    planned: bool = False

    def sentence(self) -> str:
        if self.planned:
            waits = "; ".join(f"{name}: {reason}" for name, reason in self.unread.items())
            return (
                f"group {self.group!r}: a batch that was planned before the restart waits for claims ({waits}): start "
                f"the query again, let it claim more (max_claims), or start more members; without its checkpoint "
                f"folder the query continues at the group's positions"
            )
        alike: dict[str, list[str]] = {}
        for name, reason in self.unread.items():
            alike.setdefault(reason, []).append(name)
        what = "\n".join(f"  {first_of(names, 5)}: {reason}" for reason, names in alike.items())
        return (
            f"group {self.group!r}: {len(self.unread)} partitions are not read to the job's end, and nobody reads them "
            f"now; run the job again once that has changed:\n{what}"
        )


class IndexBusy(PeerError, retriable=True):
    """Another process was writing the same key index for too long."""

    path: str
    waited_s: float
    _TEXT = "another process has been writing the key index {path} for {waited_s:g} s: try again"


class AdminGaveUp(PeerError, retriable=True):
    """An operation did not complete in time. Its record may still take effect; repeating it is safe.

    `waited_s`: 0 if it was interrupted. `pending`: a record of it was sent and may still be accepted. `held_by`: who
    did not release partitions for it in time, so that its pause was ended (PROTOCOL.md M9); None for other reasons.
    """

    group: str
    what: str
    waited_s: float
    pending: bool = False
    held_by: tuple[str, ...] | None = None

    def sentence(self) -> str:
        if self.held_by is not None:
            who = ", ".join(self.held_by) or "nobody known, because the pause itself was not read in time"
            return (
                f"group {self.group!r} did not release its partitions within {self.waited_s:g} s, held by {who}; the "
                f"pause was ended"
            )
        how = f"did not complete within {self.waited_s:g} s" if self.waited_s else "was interrupted"
        may = self.pending or self.waited_s
        after = "it may still take effect; retrying is safe" if may else "it will not take effect"
        return f"group {self.group!r}: {self.what} {how}; {after}"


class SnapshotNotConfirmed(PeerError, retriable=True):
    """A snapshot was written, and no live consumer of the log confirmed it (PROTOCOL.md N5, N6)."""

    log: int
    at: int
    waited_s: float
    sessions: tuple[str, ...]
    _TEXT = """the snapshot of coordination partition {log} at offset {at} was written, but none of its live sessions
    ({sessions}) confirmed it within {waited_s:g} s: if they are dead, evict them or wait until they are evicted,
    then try again; the unconfirmed snapshot does no harm"""


# --- the cluster


class ClusterUnreachable(ClusterError, retriable=True):
    """No broker answered in time."""

    servers: str
    waiting_for: str
    reason: str
    _TEXT = "no answer from {servers} while waiting for {waiting_for}: {reason}"


class AuthenticationFailed(ClusterError):
    """The brokers keep refusing this client's credentials or their mechanism. Waiting does not help."""

    servers: str
    principal: str
    reason: str
    _TEXT = """{servers} refuses to authenticate {principal}: {reason}; check security.protocol (SASL at a port that
    has it), sasl.mechanism, and sasl.username and sasl.password, or what oauth_cb returns"""


class TlsMismatch(ClusterError):
    """Client and brokers disagree on TLS: only one of them uses it, or one does not take the other's certificate."""

    servers: str
    protocol: str
    reason: str
    _TEXT = """no connection to {servers} with security.protocol={protocol}: {reason}; check security.protocol, the
    port, ssl.ca.location, and the certificates of both (who signed them, for whom, their last day)"""


class AccessDenied(ClusterError):
    """Kafka's authorizer denies this client an operation. `kind`: topic, group or cluster."""

    principal: str
    operation: str
    kind: str
    name: str

    def sentence(self) -> str:
        cluster = self.kind == "cluster"
        what = self.kind if cluster else f"{self.kind} {self.name!r}"
        where = "--cluster" if cluster else f"--{self.kind} {quote(self.name)}"
        return (
            f"{self.principal} may not {self.operation} {what}: kafka-acls.sh --add --allow-principal "
            f"{quote(self.principal)} --operation {self.operation} {where}"
        )


class TopicMissing(ClusterError, retriable=True):
    """A topic to consume or to write does not exist."""

    topic: str
    _TEXT = "topic {topic!r} does not exist: create it, or correct its name"


class PartitionError(ClusterError):
    """Kafka refuses to serve a partition."""

    topic: str
    partition: int
    reason: str
    _TEXT = "{topic}:{partition} cannot be used: {reason}"


class DeserializationFailed(ClusterError):
    """A deserializer raised an error for the key or the value of a message of a batch, or that `Topic.get` found.

    `field`: "key" or "value". `__cause__` is the deserializer's error.
    """

    topic: str
    partition: int
    offset: int
    field: str
    reason: str
    _TEXT = """the {field} of {topic}:{partition}@{offset} cannot be deserialized: {reason}; to read the others,
    iterate over the messages of a batch, or ask a topic without deserializers"""


class PartitionParked(ClusterError):
    """Nobody may consume a partition until an admin has looked at it (PROTOCOL.md F6.4).

    Consumers do not raise it: it says why a partition is parked. Admin calls raise it for a topic that was created
    again. A consumer that is refused all that it owns raises PartitionError.

    `reason`: why, as in the log; its sentence is in PARKED. `detail`: the broker's words, position and end, or the
    topic's ids, as far as known.
    """

    group: str
    topic: str
    partition: int
    reason: str
    detail: str = ""

    def sentence(self) -> str:
        where, detail = f"{self.topic}:{self.partition}", f" ({self.detail})" if self.detail else ""
        return PARKED.get(self.reason, PARKED_OTHERWISE).format(
            group=self.group, name=quote(self.group), topic=self.topic, where=where, detail=detail, reason=self.reason
        )


PARKED: Final = {
    RECREATED: "topic {topic!r} was deleted and created again{detail}, so nobody consumes {where}: the positions "
    "of group {group!r} belong to the old topic; `marshal set-position {name} {topic} --to earliest` continues with "
    "the new one",
    BEYOND_END: "the position of group {group!r} in {where} is beyond the end of the partition{detail}: records were "
    "lost, or the topic was created again. Nobody consumes the partition, even once it has grown past the position: "
    "look at its records, then `marshal set-position {name} {where} --to latest` (or earliest, an offset, a time) "
    "continues",
    TRUNCATED: "{where} lost records that group {group!r} had read{detail}, as in an unclean leader election; other "
    "records may be at their offsets. Nobody consumes it: look at its records, then `marshal set-position {name} "
    "{where} --to POSITION` continues",
    UNREADABLE: "no consumer of group {group!r} can read {where}{detail}, so nobody consumes it: check the rights "
    "(`marshal doctor {name} --as consumer`) and the broker's log, then `marshal set-position {name} {where} "
    "--shift-by 0` continues at the same position (what was finished above it comes again)",
}
PARKED_OTHERWISE: Final = (
    "{where} is parked ({reason}), so nobody consumes it: `marshal explain {name} {where}` shows why, `marshal "
    "set-position {name} {where} --to POSITION` continues"
)


class PartitionsParked(ClusterError):
    """A job that ends by itself has read what could be read, and partitions of its topics are parked.

    Nobody may consume them until an admin has looked at them (PROTOCOL.md F6.4). `parked`: by partition (topic:number),
    why it is parked and what to do.
    """

    group: str
    parked: Mapping[str, str]

    def sentence(self) -> str:
        what = "\n".join(f"  {name}: {reason}" for name, reason in self.parked.items())
        return (
            f"group {self.group!r}: the rest was read, and {len(self.parked)} partitions are parked, so nobody reads "
            f"them:\n{what}"
        )


class RangeLost(ClusterError, retriable=True):
    """Kafka deleted the beginning of a range after it was planned. The next plan reports it and starts after it."""

    topic: str
    partition: int
    start: int
    to: int
    reason: str
    _TEXT = """{topic}:{partition} [{start}, {to}) cannot be read any more ({reason}): retention deleted records
    before the job read them; run it again, lengthen retention.ms, or plan smaller batches"""


class TopicRefused(ClusterError):
    """Kafka refuses to create, change or delete a topic as it was asked to. Nothing was changed."""

    topic: str
    reason: str
    _TEXT = "Kafka refuses this for topic {topic!r}: {reason}"


class CoordinationError(ClusterError):
    """The coordination topic cannot be trusted or used. Consumption has stopped."""


class CoordinationTopicMissing(CoordinationError):
    """The coordination topic is missing and may not be created by this client."""

    topic: str
    reason: str
    command: str
    _TEXT = "coordination topic {topic!r} is missing and was not created ({reason}); create it: {command}"


class ForeignTopic(CoordinationError):
    """The topic that was named as the coordination topic holds the messages of somebody else. Nothing was changed."""

    topic: str
    partition: str
    _TEXT = """topic {topic!r} is no coordination topic: {partition} has messages, and the topic does not begin with
    records of this library; name another topic as the coordination topic, one that nobody writes to"""


class WrongTopicSetting(CoordinationError):
    """A setting of the coordination topic would lose history (PROTOCOL.md L1)."""

    topic: str
    setting: str
    value: str
    wanted: str
    command: str
    _TEXT = """coordination topic {topic!r} has {setting}={value}, it must be {wanted}; if it is meant for other
    messages, name another one (coordination_topic=, --coordination-topic), else: {command}"""


class TopicRecreated(CoordinationError):
    """The log is another incarnation than the known one, or ends before what was read (PROTOCOL.md L6, L8)."""

    log: int
    known: str
    found: str
    _TEXT = """coordination partition {log} was recreated or lost records: known {known}, found {found}; restart the
    consumers once the topic is sound"""


class LogGap(CoordinationError):
    """Offsets are missing in a coordination partition (PROTOCOL.md L8)."""

    log: int
    expected_offset: int
    found_offset: int
    _TEXT = """coordination partition {log} jumps from offset {expected_offset} to {found_offset}: it was compacted,
    written in transactions, or lost records"""


class HistoryTruncated(CoordinationError):
    """The beginning of the log was deleted, and no confirmed snapshot replaces it (PROTOCOL.md N10)."""

    log: int
    first_offset: int
    _TEXT = """coordination partition {log} begins at offset {first_offset}: its history was deleted, and no
    confirmed snapshot replaces it; check retention and cleanup.policy of the topic; `marshal log reset` restarts it
    without the positions that were there"""


class HistoryRestarted(CoordinationError):
    """An operator restarted the log's history at a checkpoint after the one this reader began at (PROTOCOL.md N13)."""

    log: int
    offset: int
    at: int
    _TEXT = """offset {offset} of coordination partition {log} restarts its history at offset {at}: what this process
    knows of it is void; restart the process"""


class SnapshotRefused(CoordinationError):
    """The confirmed snapshot that this process began with differs from what the log folds to (PROTOCOL.md N9)."""

    log: int
    at: int
    older: int
    _TEXT = """the snapshot of coordination partition {log} at offset {at} differs from what the log folds to from
    the snapshot at {older}: a process with a different fold wrote one of them; keep `marshal log dump` as evidence"""


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
    evidence: str = ""
    _TEXT = """group {group!r}: this process's state of coordination partition {log} is wrong from offset {offset} on
    ({held:016x}, not {again:016x}): {reason}; the consumer has stopped; keep `marshal log dump` for a bug report,
    then restart the process"""

    def sentence(self) -> str:
        look = f"marshal explain {quote(self.group)} --state {quote(self.evidence)}"
        return super().sentence() + (f"; its state is saved: `{look}`" if self.evidence else "")

    def keep(self, path: str) -> None:
        """Notes the file in which the state was saved."""
        self.evidence = path
        self.args = (self.sentence(),)


class ProtocolUnknown(CoordinationError):
    """A record that every reader must understand has a version, or names a hash, that this library cannot read.

    That is the root (PROTOCOL.md L6), or a record in another envelope (E3). `what`: which of them. `outdated`: an older
    release has created the log.
    """

    log: int
    what: str
    value: object
    offset: int = 0
    outdated: bool = False
    _UNREAD = "offset {offset} of coordination partition {log} has {what} {value!r}, which this library cannot read: "
    _TEXT = _UNREAD + "upgrade this process"
    _IF: ClassVar = {
        "outdated": _UNREAD
        + """keep a `marshal log dump` of the version that wrote it, then use a new coordination topic; consumers
        continue from the offsets mirrored to Kafka (start='committed')"""
    }
