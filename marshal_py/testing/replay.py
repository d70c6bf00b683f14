"""Replays what the log of a production group shows to a handler: the same deliveries, to the same owners, in order.

The log says who owned a partition, which messages each heartbeat reports as finished or delivered, and which sessions
ended. So an incident can be run again under a debugger, in the time that the handler needs. What the log does not say
is when a message was delivered between two heartbeats: there deliveries are in the order of the offsets.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from marshal_py.client.messages.answers import GIVEN_BACK, UNANSWERED
from marshal_py.client.messages.message import Message
from marshal_py.client.process.processing import Reject
from marshal_py.errors import FileUnusable, InvalidOption
from marshal_py.history.advisories import Advisories
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import FOLD_VERSION, Group, Partition, World
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    Checkpoint,
    ClaimingMessages,
    Heartbeat,
    MessageRange,
    Note,
)
from marshal_py.testing.messages import RecordedMessage, make_message
from marshal_py.topics.request import GetRequest, StoredMessage
from marshal_py.topics.topic import Topic
from marshal_py.transport.dump import memory_transport

PAGE: Final = 10_000  # messages that are read from a topic at once
JUMP: Final = 1_000_000  # offsets between two records of an owner: none finishes so many, its messages were deleted

# "dead_letter": ended for good without an ack. "given_back": its owner lived on, and did not finish it. "lost": its
# owner's session ended before. "open": the dump ends before.
Mode = Literal["at_least_once", "at_most_once"]
MODES: Final[dict[int, Mode]] = {AT_LEAST_ONCE: "at_least_once", AT_MOST_ONCE: "at_most_once"}
Outcome = Literal["finished", "dead_letter", "given_back", "lost", "open"]
Content = Message[Any, Any] | StoredMessage
Handler = Callable[[RecordedMessage[Any, Any]], object]

ENDING: Final = frozenset({"terminated", "dead_letter"})  # kinds of a Note that a message was ended for good
# The end of the text of a Note of a letter that `max_deliver` has written, and no handler's `term`.
LIMIT: Final = re.compile(rf": (?:{GIVEN_BACK}|{UNANSWERED})".format(r"\d+", r"\d+"))
ANSWERS: Final = frozenset({"ack", "double_ack", "term"})  # the first one decides; a `nak` before or after it does not
DEATHS: Final = frozenset({"evicted", "died", "replaced"})  # kinds of advisories that a session ended unprepared
Place = tuple[str, int, int]  # topic, partition, offset


class Delivery(msgspec.Struct):
    """One delivery that the log shows. `owner`: the client id. `session`, `epoch`: its session, and the claim's epoch.
    `delivery_count`: this one included. `log_offset`, `time_ms`: of the first record that reports it. `outcome`: what
    became of it in production; `replayed`: what the handler did now, "" if it was not called, because the topic no
    longer has the message; `error`: what the handler raised."""

    topic: str
    partition: int
    offset: int
    owner: str
    session: int
    epoch: int
    delivery_count: int
    log_offset: int
    time_ms: int
    outcome: Outcome = "open"
    replayed: str = ""
    error: BaseException | None = None

    @property
    def place(self) -> Place:
        """Returns topic, partition and offset."""
        return self.topic, self.partition, self.offset

    def __str__(self) -> str:
        told = f"{self.topic}:{self.partition}@{self.offset}, delivery {self.delivery_count} to {self.owner}"
        was = self.outcome.replace("_", " ")
        now = "not replayed" if not self.replayed else self.replayed.replace("_", " ")
        return f"{told}: {was} in production, {now}{'' if self.error is None else f' by {self.error!r}'} here"


class Replay(NamedTuple):
    """What a replay showed. `events`: deliveries, and advisories (joins, claims, pauses, ...), in the log's order.
    `digest`: of the group's state at the end, equal for every reader of the log (PROTOCOL.md, F8). `digests`: how many
    digests of members the fold was compared with, and agreed."""

    group: str
    events: list[Delivery | Advisory]
    digest: str
    digests: int

    @property
    def deliveries(self) -> list[Delivery]:
        """Returns the deliveries alone."""
        return [event for event in self.events if isinstance(event, Delivery)]

    @property
    def differences(self) -> list[Delivery]:
        """Returns the deliveries that the handler ended otherwise than production did: finished, given back, a dead
        letter. What a crash cut off has no end to compare with."""
        return [
            one
            for one in self.deliveries
            if one.replayed and one.outcome not in ("lost", "open") and one.replayed != one.outcome
        ]


def replay(
    dump: str | Path,
    handler: Handler | type[Any] | None = None,
    *,
    group: str | None = None,
    topic: Topic | Sequence[Topic] = (),
    messages: str | Path | Iterable[Content] | None = None,
) -> Replay:
    """Calls `handler` with every delivery to a group that a dump shows, in order, and says where it ended otherwise.

    - `dump`: a file that `marshal log dump` or `marshal bundle` wrote. Its log is folded, and members' digests in it
      are compared, unless a bundle has left words out.
    - `handler`: is called with each message. It answers as in a consumer; if it returns without an answer, the message
      counts as finished, and as given back if it raises; if `max_deliver` has made it a dead letter in production,
      giving it back makes it one here. A class is instantiated once per session, like a process:
      what an instance remembers is lost with its session. None only folds.
    - `group`: None is the dump's only one.
    - `topic`: reads the messages from the cluster, by `marshal.topic(name)`. `messages`: has them instead: a file with
      the lines of `marshal consume --json` or `marshal get --json`, or messages as `Topic.get` returns them.
      Without either each message is made, with an empty value. What the topic no longer has is not replayed.

    Raises FileUnusable for a dump that is damaged or whose fold disagrees with its members, InvalidOption for a group
    that it does not show, and what reading the topic raises.
    """
    topics = [topic] if isinstance(topic, Topic) else topic
    for one in topics:
        if not isinstance(one, Topic):
            raise InvalidOption("topic", one, "what marshal.topic(name) returns, or a list of such")
    path = Path(dump)
    header, transport = memory_transport(path)
    with Observer(transport, header.topic) as observer:
        name = group or header.group or _only_group(observer)
        reading = _read(observer, name, "" if header.about.get("left_out") else str(path))
    found = Replay(name, reading.events(), reading.digest, reading.digests)
    contents = None if messages is None and not topics else _contents(found.deliveries, topics, messages)
    if handler is not None:
        _call(found.deliveries, handler, contents, MODES[reading.mode], reading.limited())
    return found


def _call(
    deliveries: Iterable[Delivery],
    handler: Handler | type[Any],
    contents: dict[Place, Content] | None,
    mode: Mode,
    limited: Collection[Place],
) -> None:
    """Calls the handler, or its session's instance, with each delivery that has a message. `limited`: messages that
    `max_deliver` has made dead letters."""
    instances: dict[int, Handler] = {}
    with asyncio.Runner() as runner:
        for one in deliveries:
            _deliver(one, handler, instances, contents, mode, runner)
            if (one.outcome, one.replayed) == ("dead_letter", "given_back") and one.place in limited:
                one.replayed = "dead_letter"


def _deliver(
    one: Delivery,
    handler: Handler | type[Any],
    instances: dict[int, Handler],
    contents: dict[Place, Content] | None,
    mode: Mode,
    runner: asyncio.Runner,
) -> None:
    content = None if contents is None else contents.get(one.place)
    if contents is not None and content is None:
        return
    message = make_message(
        b"" if content is None else content.value,
        key=None if content is None else content.key,
        topic=one.topic,
        partition=one.partition,
        offset=one.offset,
        headers=() if content is None else content.headers,
        timestamp_ms=one.time_ms if content is None else content.timestamp,
        delivery=mode,
        delivery_count=one.delivery_count if mode == "at_least_once" else 1,
        epoch=one.epoch,
    )
    call = handler
    if isinstance(handler, type):
        if one.session not in instances:
            instances[one.session] = handler()
        call = instances[one.session]
    try:
        result = call(message)
        if inspect.iscoroutine(result):
            runner.run(result)
    except Exception as error:
        one.replayed, one.error = "dead_letter" if isinstance(error, Reject) else "given_back", error
    else:
        one.replayed = "given_back" if "nak" in message.verbs else "finished"
    if message.acked:  # otherwise an answer was refused
        first = next(verb for verb in message.verbs if verb in ANSWERS)
        one.replayed = "dead_letter" if first == "term" else "finished"


def _only_group(observer: Observer) -> str:
    observer.fold()
    names = [group.name for _, group in observer.groups()]
    if len(names) != 1:
        raise InvalidOption("group", None, f"the name of one of the dump's groups ({', '.join(names) or 'none'})")
    return names[0]


def _read(observer: Observer, name: str, path: str) -> Reading:
    """Folds the group's log from its beginning, or from the oldest snapshot, and returns what it shows. `path`: for
    errors; "" if words of records were left out, so that digests differ."""
    for log in observer.logs_of(name):
        world, records = observer.history(log)
        reading = Reading(name, world, path)
        for record in records:
            if record.offset >= world.next_offset:  # the snapshot contains earlier ones
                reading.read(record.offset, record.timestamp_ms, record.value)
        if reading.known:
            return reading
    raise InvalidOption("group", name, "a group of the dump: `marshal groups ls --dump FILE` lists them")


class _At(NamedTuple):
    log_offset: int
    time_ms: int


class _Part(msgspec.Struct):
    """What is known of a partition, and of its claim: NONE and "" without one. `finished`: spans above the position.
    `counts`: how often unfinished messages were delivered. `running`: deliveries under this claim that have not ended.
    """

    generation: int
    position: int
    epoch: int = NONE
    session: int = NONE
    owner: str = ""
    seen: tuple[int, int, int, bytes] | None = None
    finished: list[tuple[int, int]] = []
    counts: dict[int, int] = {}
    running: dict[int, Delivery] = {}


class Reading:
    """Folds a log onto `world` and collects the deliveries of a group that it shows, and its advisories."""

    def __init__(self, name: str, world: World, path: str) -> None:
        self.digests, self.mode = 0, AT_LEAST_ONCE
        self._name, self._world, self._path = name, world, path
        self._advisories = Advisories(world)
        self._events: list[Delivery | Advisory] = []
        self._parts: dict[TopicPartition, _Part] = {}
        self._rejected: dict[Place, str] = {}  # messages that were ended for good, and what the log says of it
        self._undelivered: set[int] = set()  # ids of deliveries: what was granted and given back
        world.watched.add(name)
        self.known = name in world.groups
        if self.known:
            self._follow(world.groups[name], _At(world.next_offset, 0), "open")

    def events(self) -> list[Delivery | Advisory]:
        """Returns what was read, in the log's order."""
        for event in self._events:
            if isinstance(event, Delivery) and event.outcome == "finished" and event.place in self._rejected:
                event.outcome = "dead_letter"
        return [event for event in self._events if id(event) not in self._undelivered]

    def limited(self) -> set[Place]:
        """Returns the messages that went to the dead-letter topic because of `max_deliver`."""
        return {place for place, text in self._rejected.items() if LIMIT.search(text)}

    @property
    def digest(self) -> str:
        group = self._world.groups.get(self._name)
        return "" if group is None else f"{group.digest():016x}"

    def read(self, offset: int, time_ms: int, value: bytes | None) -> None:
        """Folds a record, and adds what it shows. Raises FileUnusable if a member's digest differs from the fold's."""
        verdict = rationalizer.apply(self._world, offset, value)
        group = self._world.groups.get(verdict.group)
        told = self._advisories.read(group, verdict, time_ms)
        if verdict.group != self._name or not verdict.accepted:
            return
        self.known, at, record = True, _At(offset, time_ms), verdict.record
        if group is not None:
            self.mode = group.mode or self.mode
            if isinstance(record, Heartbeat):
                self._compare(record.digest, offset)
                for entry in record.claims:
                    self._heartbeat(group, group.claims.get(entry.epoch), at)
            elif isinstance(record, ClaimingMessages):
                for index in verdict.granted:
                    self._grant(group.claims[record.ranges[index].epoch], record.ranges[index], at)
            elif isinstance(record, Note):
                if record.kind in ENDING:
                    self._rejected[record.topic, record.partition, record.from_] = record.text
            else:
                self._follow(group, at, "lost" if any(one.kind in DEATHS for one in told) else "given_back")
        self._events += told

    def _compare(self, digest: Checkpoint | None, offset: int) -> None:
        found = None if digest is None else self._world.digests_at(self._name, digest.at)
        if digest is None or found is None or digest.fold != FOLD_VERSION or not self._path:
            return
        if found != (digest.state, digest.chain):
            raise FileUnusable(
                self._path,
                f"record {self._world.log}:{offset} has another digest of the state at offset {digest.at} than this "
                "library: its records or one of the two are broken, `marshal doctor --dump` tells more",
            )
        self.digests += 1

    def _follow(self, group: Group, at: _At, end: Outcome) -> None:
        """Follows all partitions through a record that may begin or end claims."""
        for part in group.partitions.values():
            if part.tp.partition >= 0:
                self._changed(group, part, at, end)

    def _heartbeat(self, group: Group, part: Partition | None, at: _At) -> None:
        state = None if part is None else self._parts.get(part.tp)
        if part is None or state is None:
            return
        if group.mode == AT_LEAST_ONCE:
            self._take(part, state, at)
        for offset in [offset for offset in state.running if offset < part.floor] if group.mode == AT_MOST_ONCE else ():
            state.running.pop(offset).outcome = "finished"

    def _grant(self, part: Partition, wanted: MessageRange, at: _At) -> None:
        state = self._parts[part.tp]
        for offset in range(wanted.start, wanted.to):
            state.running[offset] = self._deliver(part.tp, state, offset, at)

    def _changed(self, group: Group, part: Partition, at: _At, end: Outcome) -> None:
        """Follows a partition through a record that may begin or end its claim. `end`: what became of messages that
        their owner had not finished."""
        state = self._parts.get(part.tp)
        if state is not None and state.epoch != NONE and (state.epoch, part.owner) != (part.epoch, state.session):
            if group.mode == AT_MOST_ONCE:
                self._settle(part, state, end)
            elif part.owner == NONE and state.generation == part.generation:
                self._take(part, state, at)
            for delivery in state.running.values():
                delivery.outcome = end
            state.running.clear()
            state.epoch, state.session, state.owner = NONE, NONE, ""
        if state is None or state.generation != part.generation:
            state = self._parts[part.tp] = _begun(part)
        if state.epoch == NONE and part.owner != NONE:
            state.epoch, state.session = part.epoch, part.owner
            state.owner = group.sessions[part.owner].join.client_id
            state.position = max(state.position, part.position)

    def _take(self, part: Partition, state: _Part, at: _At) -> None:
        """Takes what a heartbeat or a release says of a partition in at-least-once mode."""
        seen = (part.position, part.attempts, part.in_flight, part.progress)
        if state.seen == seen or part.position == NONE:
            return
        state.seen = seen
        ranges = progress.decode(part.position, part.progress)
        finished = [(start, to) for start, to, times in ranges if not times]
        passed = [(state.position, part.position)] if part.position > state.position else []
        ended = [Range(start, to, 0) for start, to in progress.union([*passed, *finished])]
        for start, to, _ in progress.without(ended, state.finished):
            for offset in range(start, to if to - start <= JUMP else start):
                delivery = state.running.pop(offset, None) or self._deliver(part.tp, state, offset, at)
                delivery.outcome = "finished"
                state.counts.pop(offset, None)
        begun = progress.deliveries(part.position, part.attempts, part.in_flight, ranges) if part.in_flight else []
        for start, to, times in begun:
            for offset in range(start, to):
                if times > state.counts.get(offset, 0):
                    if offset in state.running:
                        state.running[offset].outcome = "given_back"
                    state.running[offset] = self._deliver(part.tp, state, offset, at, times)
        state.position, state.finished = part.position, finished

    def _settle(self, part: Partition, state: _Part, end: Outcome) -> None:
        """Ends a claim in at-most-once mode: what the owner gives back of its grants was not delivered."""
        for offset, delivery in state.running.items():
            if offset >= part.position:
                self._undelivered.add(id(delivery))
            elif end == "given_back":
                delivery.outcome = "finished"
        if end == "given_back":
            state.running.clear()

    def _deliver(self, tp: TopicPartition, state: _Part, offset: int, at: _At, times: int = 1) -> Delivery:
        count = state.counts[offset] = max(state.counts.get(offset, 0) + 1, times)
        delivery = Delivery(*tp, offset, state.owner, state.session, state.epoch, count, *at)
        self._events.append(delivery)
        return delivery


def _begun(part: Partition) -> _Part:
    """Returns what the log knows of a partition before the first record that is replayed."""
    ranges = progress.decode(part.position, part.progress)
    finished = [(start, to) for start, to, times in ranges if not times]
    known = progress.deliveries(part.position, part.attempts, part.in_flight, ranges) if part.in_flight else []
    counts = {offset: times for start, to, times in known for offset in range(start, to)}
    return _Part(part.generation, part.position, finished=finished, counts=counts)


class Header(msgspec.Struct):
    """A header of a Line."""

    name: str
    value: Any = None
    value_base64: bytes | None = None


class Line(msgspec.Struct):
    """A line of `marshal consume --json` or `marshal get --json`."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: Any = None
    value: Any = None
    key_base64: bytes | None = None
    value_base64: bytes | None = None
    headers: Sequence[Header] = ()


def _contents(
    deliveries: Iterable[Delivery], topics: Sequence[Topic], messages: str | Path | Iterable[Content] | None
) -> dict[Place, Content]:
    """Returns the messages that were delivered, as far as they are there."""
    wanted: dict[tuple[str, int], set[int]] = {}
    for one in deliveries:
        wanted.setdefault((one.topic, one.partition), set()).add(one.offset)
    found: list[Iterable[Content]] = []
    if messages is not None:
        found.append(_lines(Path(messages)) if isinstance(messages, str | Path) else messages)
    for topic in topics:
        for (name, partition), offsets in wanted.items():
            if name == topic.name:
                request = GetRequest(partition=partition, offset=min(offsets), batch=PAGE, tombstones=True)
                read = chain.from_iterable(topic.pages(request))
                found.append(islice(read, max(offsets) - min(offsets) + 1))  # at most one per offset
    return {
        (one.topic, one.partition, one.offset): one
        for each in found
        for one in each
        if one.offset in wanted.get((one.topic, one.partition), ())
    }


def _lines(path: Path) -> Iterator[Content]:
    decoder = msgspec.json.Decoder(Line)
    try:
        lines = path.open("rb")
    except OSError as error:
        raise FileUnusable(str(path), f"it cannot be read: {error.strerror}") from error
    with lines:
        for number, line in enumerate(lines, 1):
            try:
                read = decoder.decode(line)
                yield make_message(
                    _bytes(read.value, read.value_base64),
                    key=_bytes(read.key, read.key_base64),
                    topic=read.topic,
                    partition=read.partition,
                    offset=read.offset,
                    headers=[(one.name, _bytes(one.value, one.value_base64)) for one in read.headers],
                    timestamp_ms=read.timestamp,
                )
            except (msgspec.DecodeError, ValueError) as error:
                raise FileUnusable(
                    str(path), f"line {number} is no message as `marshal consume --json` prints it ({error})"
                ) from error


def _bytes(text: Any, base64: bytes | None) -> Any:
    """Returns a key or a value: bytes, None, or what a deserializer had made of it."""
    return base64 if base64 is not None else text.encode() if isinstance(text, str) else text
