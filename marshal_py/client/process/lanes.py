"""Which message may be handled next: of each partition in turn the oldest, and at most one of each lane at a time.

A lane is a queue of messages that must be handled one after the other: those of one key of a partition, of a partition,
or a single message. A message is waiting in its lane, or working (a handler has it), or parked: it was given back, and
what is behind it in its lane waits until the consumer delivers it again. A lane that is ready has messages waiting,
none that works, and none parked before them. A handler of batches has several messages of a lane at once, in a row.
Nothing here waits or reads a clock. Nothing is thread-safe: callers hold a lock.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count
from typing import Any, Final

from msgspec import Struct, field

from marshal_py.client.messages.message import Message, claim_of, weighed
from marshal_py.protocol.claims import Claim
from marshal_py.protocol.wire.identity import TopicPartition

AnyMessage = Message[Any, Any]
DEAD_KEYS_MAX: Final = 100_000  # of one claim: about 20 MB; a topic of which more keys are dead has another problem


def _offset_of(message: AnyMessage) -> int:
    return message.offset


def comes_alone(message: AnyMessage) -> bool:
    """Returns whether no other message may be in its batch: if it fails whatever is with it, it does so once."""
    return message.delivery_count > 1 or claim_of(message).one_by_one


def _among(message: AnyMessage, messages: Sequence[AnyMessage]) -> bool:
    return any(one is message for one in messages)


# Structs of msgspec that the garbage collector passes over, as it does over messages: one lane or more is made per
# message if keys are many, and its passes would take a third of the time.
class LaneKey(Struct, frozen=True, cache_hash=True, gc=False):
    """Names a lane: a partition, a key of it (`key`), or a single message of it (`offset`, else -1)."""

    tp: TopicPartition
    key: Hashable = None
    offset: int = -1


class Lane(Struct, eq=False, gc=False):
    """What is unfinished of one lane."""

    key: LaneKey
    waiting: deque[AnyMessage] = field(default_factory=deque)
    working: AnyMessage | None = None
    beside: Sequence[AnyMessage] = ()  # what the handler of `working` has besides, by offset
    parked: Sequence[AnyMessage] = ()  # by offset
    queued: bool = False  # among those that are ready

    @property
    def blocked(self) -> bool:
        if self.working is not None:
            return True
        return bool(self.parked) and not (self.waiting and self.waiting[0].offset < self.parked[0].offset)


@dataclass(slots=True)
class Held:
    """What the lanes have of a claim: messages, bytes of those that wait, and the offset below which more may come."""

    messages: int = 0
    size_bytes: int = 0
    end: int = 0


# Of a partition, by offset: what came in this order, as nearly all does, and a heap of the others.
_Entries = tuple[deque[tuple[int, Lane]], list[tuple[int, int, Lane]]]


class Ready:
    """Lanes that are ready: of each partition in turn, the one whose first message has the lowest offset, so that the
    positions of all move, whatever came late or was put back."""

    def __init__(self) -> None:
        self._of: dict[TopicPartition, _Entries] = {}
        self._turns: deque[_Entries] = deque()  # those that have a lane
        self._added = count()  # between equal offsets: lanes do not compare
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Lane]:
        return (entry[-1] for entries in self._turns for part in entries for entry in part)

    def add(self, lane: Lane) -> None:
        """Adds a lane, in which a message waits."""
        offset, tp = lane.waiting[0].offset, lane.key.tp
        entries = self._of.get(tp)
        if entries is None:
            entries = self._of[tp] = (deque(), [])
        in_order, others = entries
        if not in_order and not others:
            self._turns.append(entries)
        if not in_order or offset > in_order[-1][0]:
            in_order.append((offset, lane))
        else:
            heappush(others, (offset, next(self._added), lane))
        self._count += 1

    def take(self) -> Lane:
        """Takes away the lane whose turn it is."""
        entries = self._turns.popleft()
        in_order, others = entries
        if others and (not in_order or others[0][0] <= in_order[0][0]):
            lane = heappop(others)[-1]
        else:
            lane = in_order.popleft()[-1]
        if in_order or others:
            self._turns.append(entries)
        self._count -= 1
        return lane

    def take_back(self, lane: Lane) -> None:
        """Gives the partition of a lane that was just taken away, and had nothing, its turn back."""
        if self._turns and self._turns[-1] is self._of[lane.key.tp]:
            self._turns.rotate(1)


class Lanes:
    """All lanes of one `process`."""

    def __init__(self) -> None:
        # By partition, because a claim that ends must not cost a look at the lanes of all others: they may be 100,000s.
        self._lanes: dict[TopicPartition, dict[LaneKey, Lane]] = {}
        self._of_message: dict[int, Lane] = {}  # by id of a message that works or is parked
        self.ready = Ready()
        self.shut: dict[Claim, list[Lane]] = {}  # claims that may not deliver now, and their lanes that were ready
        self.held: dict[Claim, Held] = {}
        self._dead: dict[Claim, dict[LaneKey, None]] = {}  # of which lanes a message became a dead letter, oldest first
        self.working: int = 0
        self.waiting: int = 0
        self.parked: int = 0

    # --- what comes

    def add(self, key: LaneKey, message: AnyMessage) -> None:
        """Puts a message into the lane of `key`: last, or first if it was parked. What waits there of an older claim is
        dropped."""
        claim, offset = claim_of(message), message.offset
        lane = self._lane(key)
        for parked in lane.parked:
            if parked.offset == offset or claim_of(parked) is not claim:
                self._unpark(lane, parked)
        while lane.waiting and claim_of(lane.waiting[0]) is not claim:
            self._forget(lane.waiting.popleft())
        if lane.waiting and lane.waiting[-1].offset > offset:
            insort(lane.waiting, message, key=_offset_of)
        else:
            lane.waiting.append(message)
        self._hold(message)
        self._offer(lane)

    def park_behind(self, key: LaneKey, message: AnyMessage) -> AnyMessage | None:
        """Parks a message that comes into the lane of `key` while one before it is parked, and returns that one; None
        if none is."""
        lane = self._of_partition(key.tp).get(key)
        first = lane.parked[0] if lane is not None and lane.parked else None
        if first is None or first.offset >= message.offset or claim_of(first) is not claim_of(message):
            return None
        assert lane is not None
        for parked in lane.parked:
            if parked.offset == message.offset:
                self._unpark(lane, parked)
        self._park(lane, message)
        return first

    def add_parked(self, key: LaneKey, message: AnyMessage) -> None:
        """Has the lane that `key` names wait for a message that was given back before this `process` began."""
        self._park(self._lane(key), message)

    def _lane(self, key: LaneKey) -> Lane:
        lanes = self._lanes.get(key.tp)
        if lanes is None:
            lanes = self._lanes[key.tp] = {}
        lane = lanes.get(key)
        if lane is None:
            lane = lanes[key] = Lane(key)
        return lane

    # --- what is handled

    def next(self) -> AnyMessage | None:
        """Returns the next message to handle, which works from now on; None if no lane is ready."""
        while self.ready:
            lane = self.ready.take()
            may = lane.waiting and not lane.blocked
            if may and self.shut and (shut := self.shut.get(claim_of(lane.waiting[0]))) is not None:
                shut.append(lane)
                continue
            lane.queued = False
            if may:
                message = lane.waiting.popleft()
                self._forget(message)
                lane.working = message
                self._of_message[id(message)] = lane
                self.working += 1
                return message
            self.ready.take_back(lane)  # all that waited in it was taken away
        return None

    def join(self, message: AnyMessage) -> AnyMessage | None:
        """Returns what waits next behind a message that works, for the same handler; None if nothing may."""
        lane = self._of_message[id(message)]
        if not lane.waiting:
            return None
        joining = lane.waiting[0]
        claim = claim_of(joining)
        if claim is not claim_of(message) or claim in self.shut:
            return None
        if lane.parked and lane.parked[0].offset < joining.offset:
            return None
        lane.waiting.popleft()
        self._forget(joining)
        lane.beside = (*lane.beside, joining)
        self._of_message[id(joining)] = lane
        self.working += 1
        return joining

    def takeable(self, most: int) -> int:
        """Returns how many messages wait for nothing but a handler of batches; at least `most` if there are more, or if
        one comes alone."""
        count = 0
        for lane in self.ready:
            if lane.waiting and not lane.blocked and claim_of(lane.waiting[0]) not in self.shut:
                count += most if comes_alone(lane.waiting[0]) else len(lane.waiting)
                if count >= most:
                    break
        return count

    def put_back(self, message: AnyMessage) -> None:
        """Makes a message that works wait again, as the first of its lane, with all of its claim, until `reopen`."""
        self.shut.setdefault(claim_of(message), [])
        self.wait_again(message)

    def wait_again(self, message: AnyMessage) -> None:
        """Makes a message wait again, as the first of its lane, whose handler has not begun."""
        lane = self._stop_working(message)
        lane.waiting.appendleft(message)
        self._hold(message)
        self._offer(lane)

    def reopen(self, claim: Claim) -> None:
        """Makes the lanes of a claim ready again."""
        for lane in self.shut.pop(claim, ()):
            lane.queued = False
            self._offer(lane)

    def done(self, message: AnyMessage) -> None:
        """Notes that a message that works is finished, or of no concern any more."""
        self._offer(self._stop_working(message))

    def park(self, message: AnyMessage) -> None:
        """Notes that a message that works is given back. Its lane waits for it."""
        self._park(self._stop_working(message), message)

    def unpark(self, message: AnyMessage) -> None:
        """Notes that a parked message will not come."""
        lane = self._of_message.get(id(message))
        if lane is not None and _among(message, lane.parked):
            self._unpark(lane, message)
            self._offer(lane)

    def drop(self, message: AnyMessage) -> None:
        """Notes that a message that works or is parked is of no concern any more."""
        lane = self._of_message.get(id(message))
        if lane is not None and not _among(message, lane.parked):
            self.done(message)
        else:
            self.unpark(message)

    def mark_dead(self, message: AnyMessage) -> None:
        """Notes that a message that works becomes a dead letter, so that the others of its lane follow it."""
        self.mark_dead_lane(claim_of(message), self._of_message[id(message)].key)

    def mark_dead_lane(self, claim: Claim, key: LaneKey) -> None:
        """Notes that a message of a lane became a dead letter, so that the others of the lane follow it."""
        keys = self._dead.setdefault(claim, {})
        keys[key] = None
        if len(keys) > DEAD_KEYS_MAX:
            del keys[next(iter(keys))]

    def key_of(self, message: AnyMessage) -> LaneKey:
        """Returns what names the lane of a message that works."""
        return self._of_message[id(message)].key

    def follows_dead(self, message: AnyMessage) -> bool:
        """Returns whether a message of the lane of this one, which works, became a dead letter under the same claim."""
        return bool(self._dead) and self._of_message[id(message)].key in self._dead.get(claim_of(message), ())

    # --- what is given up

    def in_vain(self) -> list[AnyMessage]:
        """Returns what works for nothing, because its claim is over, and may hold up the lane of the next claim."""
        working = [lane.working for lane in self._busy() if lane.working is not None]
        return [message for message in working if claim_of(message).sealed]

    def working_of(self, claim: Claim) -> list[AnyMessage]:
        """Returns the messages of a claim that work."""
        busy = [lane for lane in self._busy() if lane.working is not None and claim_of(lane.working) is claim]
        return [message for lane in busy for message in (lane.working, *lane.beside) if message is not None]

    def abandon(self, message: AnyMessage) -> None:
        """Has the lane of a message that works go on, as if its handler had returned."""
        old = self._of_message[id(message)]
        for parked in old.parked:
            self._unpark(old, parked)
        lane = self._lanes[old.key.tp][old.key] = Lane(old.key)
        lane.waiting, old.waiting = old.waiting, lane.waiting
        self._offer(lane)

    def behind(self, message: AnyMessage) -> list[AnyMessage]:
        """Takes away what waits behind a parked message in its lane, and returns it. The lane waits for these, too:
        whichever comes first, they are handled in their order."""
        lane = self._of_message.get(id(message))
        if lane is None:
            return []
        taken = self._take(lane, message.offset)
        self._park(lane, *taken)
        return taken

    def take_waiting(self, claim: Claim | None = None) -> list[AnyMessage]:
        """Takes away what waits of a claim (None: of all), and returns it.

        What is parked of it is forgotten if the claim is over. Until then its lane may go on behind it, if the claim is
        not released after all.
        """
        taken = []
        if claim is not None:
            self._dead.pop(claim, None)
        for lane in [*self._all()] if claim is None else [*self._of_partition(claim.tp).values()]:
            for parked in lane.parked:
                if claim is None or (claim.sealed and claim is claim_of(parked)):
                    self._unpark(lane, parked)
            if lane.waiting and claim in (None, claim_of(lane.waiting[0])):
                taken += self._take(lane)
            self._offer(lane)
        return taken

    def forget_claim(self, claim: Claim) -> None:
        """Forgets a claim that is over, of which nothing is held."""
        self.held.pop(claim, None)
        self.reopen(claim)

    def unfinished(self) -> Iterator[Lane]:
        """Yields all lanes with unfinished messages."""
        return (lane for lane in self._all() if lane.blocked or lane.waiting)

    def busy_with(self, tp: TopicPartition, offset: int) -> Lane | None:
        """Returns the lane of a partition in which the message at `offset` works or is parked; None if it waits."""
        busy = (lane for lane in self._busy() if lane.key.tp == tp and lane.blocked)
        return next((lane for lane in busy if first_of(lane).offset == offset), None)

    def waiting_for(self, lists: bool) -> dict[str, int]:
        """Returns how many messages wait for what (ProcessStats). `lists`: a handler takes several of a lane at once,
        so those behind the first one wait for the same."""
        found = dict.fromkeys(("worker", "batch", "lane", "retry", "gate"), 0)
        free = sum(map(len, self._lanes.values()))  # lanes of which the first message waits for nothing before it
        for lane in self._busy():
            if lane.blocked or not lane.waiting:
                free -= 1
                found["lane" if lane.working is not None else "retry"] += len(lane.waiting)
        for claim in self.shut:
            for lane in self._of_partition(claim.tp).values():
                if lane.waiting and not lane.blocked and claim_of(lane.waiting[0]) is claim:
                    free -= 1
                    found["gate"] += len(lane.waiting)
        left = self.waiting - sum(found.values())
        found["worker"] = left if lists else free
        found["lane"] += left - found["worker"]
        return found

    def all_parked(self) -> list[AnyMessage]:
        return [message for lane in self._busy() for message in lane.parked]

    # --- parts

    def _of_partition(self, tp: TopicPartition) -> dict[LaneKey, Lane]:
        return self._lanes.get(tp, {})

    def _all(self) -> Iterable[Lane]:
        return chain.from_iterable(lanes.values() for lanes in self._lanes.values())

    def _is_current(self, lane: Lane) -> bool:
        """Returns whether the lane has its key: not if it was abandoned."""
        return self._of_partition(lane.key.tp).get(lane.key) is lane

    def _busy(self) -> list[Lane]:
        """Returns the lanes of which a message works or is parked: few, though many wait."""
        return [lane for lane in {id(one): one for one in self._of_message.values()}.values() if self._is_current(lane)]

    def _take(self, lane: Lane, after: int = -1) -> list[AnyMessage]:
        taken = [message for message in lane.waiting if message.offset > after]
        lane.waiting = deque(message for message in lane.waiting if message.offset <= after)
        for message in taken:
            self._forget(message)
        return taken

    def _held(self, claim: Claim) -> Held:
        held = self.held.get(claim)
        if held is None:
            held = self.held[claim] = Held()
        return held

    def _hold(self, message: AnyMessage) -> None:
        """Counts a message that waits."""
        self.waiting += 1
        claim, size_bytes = weighed(message)
        held = self._held(claim)
        held.messages += 1
        held.size_bytes += size_bytes

    def _forget(self, message: AnyMessage) -> None:
        """Counts a message that waits no more."""
        self.waiting -= 1
        claim, size_bytes = weighed(message)
        held = self.held[claim]
        held.messages -= 1
        held.size_bytes -= size_bytes

    def _stop_working(self, message: AnyMessage) -> Lane:
        lane = self._of_message.pop(id(message))
        if not lane.beside:
            lane.working = None
        elif lane.working is message:
            lane.working, *lane.beside = lane.beside
        else:
            lane.beside = [one for one in lane.beside if one is not message]
        self.working -= 1
        return lane

    def _park(self, lane: Lane, *messages: AnyMessage) -> None:
        lane.parked = sorted((*lane.parked, *messages), key=_offset_of)
        for message in messages:
            self._of_message[id(message)] = lane
            self._held(claim_of(message)).messages += 1
        self.parked += len(messages)

    def _unpark(self, lane: Lane, message: AnyMessage) -> None:
        del self._of_message[id(message)]
        lane.parked = [one for one in lane.parked if one is not message]
        self.parked -= 1
        self.held[claim_of(message)].messages -= 1

    def _offer(self, lane: Lane) -> None:
        """Puts a lane among those that are ready, or forgets it if it is empty."""
        if lane.blocked:
            return
        if lane.waiting:
            if not lane.queued:
                lane.queued = True
                self.ready.add(lane)
        elif self._is_current(lane):
            del self._lanes[lane.key.tp][lane.key]


def first_of(lane: Lane) -> AnyMessage:
    """Returns the first unfinished message of a lane."""
    return lane.working or (lane.parked[0] if lane.blocked else lane.waiting[0])
