"""Buffers of fetched messages, one per partition, and the objects through which their acks come back.

Called with the Marshal's lock held, but for the acks, which take it. flow.py decides what is taken from which buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from marshal_py.client.message import Message
from marshal_py.protocol.delivery import AtLeastOnce, AtMostOnce, Run
from marshal_py.protocol.holdings import Claim, Stage
from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.transport.ports import RawMessage

if TYPE_CHECKING:
    from marshal_py.client.flow import Flow


class Delivered:
    """Where the acks of messages that were handed over together go."""

    __slots__ = ("_flow", "claim", "run", "token")

    def __init__(self, flow: Flow, claim: Claim, run: Run | None) -> None:
        self._flow, self.claim, self.run = flow, claim, run
        self.token = Token(flow.incarnation, claim.epoch)

    @property
    def reads_raw_values(self) -> bool:
        return self._flow.options.value_deserializer is None

    def read_key(self, raw: RawMessage) -> Any:
        return self._flow.read_key(raw)

    def read_value(self, raw: RawMessage) -> Any:
        return self._flow.read_value(raw)

    def finish(self, index: int) -> bool:
        flow = self._flow
        with flow.lock:
            if self.claim.stage >= Stage.RELEASING:
                return not flow.member.ack_is_late(self.claim)
            if self.run is not None:
                self.run.finish(index)
            elif isinstance(self.claim.tracker, AtMostOnce):
                self.claim.tracker.returned()
            return True

    def finish_range(self, first: int, stop: int) -> bool:
        flow = self._flow
        with flow.lock:
            if self.claim.stage >= Stage.RELEASING:
                return not flow.member.ack_is_late(self.claim)
            if self.run is not None:
                self.run.finish_range(first, stop)
            elif isinstance(self.claim.tracker, AtMostOnce):
                self.claim.tracker.returned()
            return True

    def touch(self) -> None:
        flow = self._flow
        with flow.lock:
            tracker = self.claim.tracker
            if isinstance(tracker, AtLeastOnce):
                tracker.touch(flow.clock_now().mono_ms)
            elif tracker.in_flight_since_ms is not None:
                tracker.in_flight_since_ms = flow.clock_now().mono_ms


class Fetched:
    """One chunk in a buffer: `at` is the first message that was not handed over."""

    __slots__ = ("at", "messages", "run", "size_bytes")

    def __init__(self, messages: Sequence[RawMessage]) -> None:
        self.messages = messages
        self.at = 0
        self.size_bytes = -1  # of the whole chunk, once somebody has asked
        self.run: Run | None = None


class Reserved:
    """Messages of one partition that may be handed over one by one while the gate stays open.

    `hand_over` is gate and delivery in one step, under the lock: the claim's stage says whether anything was read that
    shuts the gate, the boot clock whether the checked time is over.
    """

    __slots__ = ("_buffer", "_claim", "_delivered", "_head", "_left", "_mono_ms", "_until_ms")

    def __init__(self, buffer: Buffer, head: Fetched, delivered: Delivered, count: int, until_ms: int,
                 mono_ms: int) -> None:  # fmt: skip
        self._buffer, self._head, self._delivered, self._claim = buffer, head, delivered, delivered.claim
        self._left, self._until_ms, self._mono_ms = count, until_ms, mono_ms

    def hand_over(self, boot_ms: int) -> Message | None:
        """The next message, or None when the reservation is over."""
        head, claim = self._head, self._claim
        if not self._left or boot_ms >= self._until_ms or claim.stage is not Stage.OPEN:
            return None
        fetched = self._buffer.fetched
        if self._buffer.paused_by_user or not fetched or fetched[0] is not head:
            return None  # the second: a fetch inside the iteration has taken the rest
        at = head.at
        raw = head.messages[at]
        run = head.run
        if run is not None:
            index = run.deliver(1, self._mono_ms)
        else:
            assert isinstance(claim.tracker, AtMostOnce)
            index = 0
            offset = raw.offset() or 0
            if not claim.tracker.holds(offset):
                return None
            claim.tracker.deliver(offset, self._mono_ms)
        head.at = at + 1
        self._left -= 1
        self._buffer.size -= 1
        if head.at == len(head.messages):
            self._buffer.fetched.popleft()
        return Message(raw, self._delivered, index)


class Buffer:
    """Messages of one partition that were fetched and not handed over."""

    __slots__ = ("claim", "fetched", "held_back", "next_offset", "paused_by_user", "size", "tp")

    def __init__(self, tp: TopicPartition, position: int) -> None:
        self.tp = tp
        self.claim: Claim | None = None  # None while warming
        self.fetched: deque[Fetched] = deque()
        self.size = 0
        self.next_offset = position  # where fetching goes on
        self.held_back = False  # the source is told not to fetch it: full, or paused by the user
        self.paused_by_user = False

    def open(self, claim: Claim, position: int) -> None:
        """The partition is ours: what was fetched ahead becomes deliverable from `position` on."""
        self.claim = claim
        for part in self.fetched:
            while part.at < len(part.messages) and (part.messages[part.at].offset() or 0) < position:
                part.at += 1
            part.messages, part.at = part.messages[part.at :], 0
        self.fetched = deque(part for part in self.fetched if part.messages)
        self.size = sum(len(part.messages) for part in self.fetched)
        if isinstance(claim.tracker, AtLeastOnce):
            for part in self.fetched:
                part.run = claim.tracker.add(offsets_of(part.messages))

    def bytes_of(self, count: int, size: Callable[[RawMessage], int]) -> int:
        """Size of the next `count` messages. Whole chunks are measured once: a waiting fetch asks again and again."""
        total = 0
        for part in self.fetched:
            left = len(part.messages) - part.at
            if part.at or left > count:
                total += sum(map(size, part.messages[part.at : part.at + min(left, count)]))
            else:
                if part.size_bytes < 0:
                    part.size_bytes = sum(map(size, part.messages))
                total += part.size_bytes
            count -= min(left, count)
            if not count:
                break
        return total

    def add(self, messages: Sequence[RawMessage]) -> None:
        part = Fetched(messages)
        if self.claim is not None and isinstance(self.claim.tracker, AtLeastOnce):
            part.run = self.claim.tracker.add(offsets_of(messages))
        self.fetched.append(part)
        self.size += len(messages)
        self.next_offset = (messages[-1].offset() or 0) + 1


def offsets_of(messages: Sequence[RawMessage]) -> Sequence[int]:
    """Their offsets, as a range where nothing is missing: that costs no memory per message."""
    first, last = messages[0].offset() or 0, messages[-1].offset() or 0
    if last - first + 1 == len(messages):
        return range(first, last + 1)
    return [message.offset() or 0 for message in messages]
