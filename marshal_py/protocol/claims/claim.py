"""One client's own view of what it owns: each claim from its acceptance to its end (PROTOCOL.md T12, T16, 8).

A claim is OPEN (delivering), DRAINING (delivery has stopped, handlers finish), RELEASING (its Release was sent; it
never delivers again) or GONE. Nothing here reads the world: the parts of the member report what was read. Times are
monotonic ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from marshal_py.protocol.claims.delivery import AtLeastOnce, AtMostOnce
from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, ClaimState, ReleasingPartition, SeekingPartition


class ClaimPhase(IntEnum):
    OPEN = 0
    DRAINING = 1
    RELEASING = 2
    GONE = 3


class Claim:
    """The state of a claim of this client that the fold accepted."""

    __slots__ = (
        "drain_until_ms",
        "end_before",
        "end_offset",
        "epoch",
        "final",
        "generation",
        "offer",
        "one_by_one",
        "out_of_line_ms",
        "parking",
        "phase",
        "pin",
        "reason",
        "release_sent_ms",
        "released_position",
        "revoking_reported",
        "sealed",
        "sealed_ms",
        "seek_sent",
        "seek_to",
        "successor",
        "told",
        "topic_id",
        "tp",
        "tracker",
    )

    def __init__(
        self, tp: TopicPartition, epoch: int, generation: int, tracker: AtLeastOnce | AtMostOnce, topic_id: str = ""
    ) -> None:
        self.tp: TopicPartition = tp
        self.topic_id: str = topic_id  # in the log; it cannot change while a partition of the topic is claimed (F9.10)
        self.epoch: int = epoch
        self.generation: int = generation
        self.tracker: AtLeastOnce | AtMostOnce = tracker
        self.phase: ClaimPhase = ClaimPhase.OPEN
        self.sealed: bool = False  # RELEASING or GONE: acks come too late
        self.reason: str = ""
        self.successor: int = NONE
        self.drain_until_ms: int | None = None  # monotonic; None: until the handlers are done
        self.release_sent_ms: int | None = None
        self.released_position: int = NONE
        # The position and progress that the log had when one of its records ended the claim. None before, and if this
        # client gave the claim up by itself: then nobody knows which of its heartbeats the log still accepts.
        self.final: tuple[int, bytes] | None = None
        self.sealed_ms: int = 0  # monotonic, once sealed
        self.seek_to: int = NONE  # its user moves it there: a SeekingPartition takes the place of its Release
        self.seek_sent: bool = False
        self.parking: str = ""  # why its Release parks the partition (F6.4)
        self.told: bool = False  # whether the user has learned of it
        self.revoking_reported: bool = False  # whether the user knows that it will be released
        self.one_by_one: bool = False  # its messages are handed over singly for a while (claim.py)
        self.offer: tuple[int, int] | None = None  # wanted and not yet granted, in at-most-once mode: [start, to)
        self.out_of_line_ms: int | None = None  # monotonic, since when a restricted policy takes it away (A7)
        self.pin: int = NONE  # epoch of the own pin when it was accepted, under policy `pinned` (A11)
        self.end_offset: int = NONE  # end of the partition as last seen
        self.end_before: int = NONE  # the same as the log had it when the claim began, with lag weights (A14)

    def stop(self, reason: str, drain_until_ms: int | None, successor: int = NONE) -> None:
        """Ends delivery; handlers may finish until `drain_until_ms` (None: as long as they need). Of two calls, the one
        with the earlier deadline gives `reason` (for people) and `successor` (a session, or NONE)."""
        if self.phase is ClaimPhase.OPEN:
            self.phase = ClaimPhase.DRAINING
            self.reason, self.successor, self.drain_until_ms = reason, successor, drain_until_ms
        elif self.phase is ClaimPhase.DRAINING and drain_until_ms is not None:
            if self.drain_until_ms is None or drain_until_ms < self.drain_until_ms:
                self.drain_until_ms = drain_until_ms
                self.reason, self.successor = reason, successor

    def park(self, parking: str, reason: str, drain_until_ms: int) -> None:
        """Ends delivery permanently; the Release will park the partition (F6.4). `parking`: an error's name
        (records.py). It and `reason`, the Release's text, replace what `stop` has set."""
        self.stop(reason, drain_until_ms)
        self.parking, self.reason, self.successor = parking, reason, NONE

    def seal(self, phase: ClaimPhase) -> None:
        """Enters RELEASING or GONE: nothing is delivered any more, and no ack counts (T16). An ack is appended to its
        run without the lock and then looks at `sealed`, so it is noted here or comes too late: ask for the position
        afterwards."""
        before, self.phase, self.sealed = self.sealed, phase, True
        if not before:
            self._settle()

    def settle(self) -> None:
        """Notes the acks that came without the lock, unless the claim is sealed. Never call it between two questions
        whose answers belong together, such as the position and the progress of one heartbeat."""
        if not self.sealed and isinstance(self.tracker, AtLeastOnce):
            self.tracker.settle()

    def _settle(self) -> None:
        if isinstance(self.tracker, AtLeastOnce):
            self.tracker.settle()

    def seek(self, position: int, now_ms: int) -> None:
        """Seals the claim at once, to be replaced by a new one that begins at `position` (F6.6, T20)."""
        self.seal(ClaimPhase.RELEASING)
        self.released_position = self.position()
        self.reason, self.seek_to, self.sealed_ms, self.revoking_reported = "seek", position, now_ms, True

    def give_up_seek(self) -> None:
        """Has the claim released at its old position instead."""
        self.seek_to, self.release_sent_ms = NONE, None

    def reopen(self) -> None:
        """Delivers again, because the reason to release the claim went away before its Release was sent."""
        if self.phase is ClaimPhase.DRAINING:
            self.phase, self.reason, self.successor, self.drain_until_ms = ClaimPhase.OPEN, "", NONE, None
            self.revoking_reported = False

    def drained(self, now_ms: int) -> bool:
        """Returns whether the Release may be sent: no handler has a message, or the deadline is over (T12). A message
        that waits to be delivered again is the next owner's (D14)."""
        if self.drain_until_ms is not None and now_ms >= self.drain_until_ms:
            return True
        if isinstance(self.tracker, AtLeastOnce):
            return self.tracker.held == 0
        return self.tracker.in_flight_since_ms is None

    def position(self) -> int:
        """Returns where the next owner starts; in at-most-once mode after the highest offset that was handed over."""
        return self.tracker.position() if isinstance(self.tracker, AtLeastOnce) else self.tracker.handed_to

    def saw_end(self, end_offset: int) -> None:
        """Notes where the partition ends, as the driver has last seen it; NONE if it does not know."""
        self.end_offset = end_offset
        if isinstance(self.tracker, AtLeastOnce) and end_offset == self.tracker.position():
            self.tracker.nothing_there()

    def lag(self, position: int) -> int:
        end = self.end_before if self.end_offset == NONE else self.end_offset
        return max(0, end - position) if end != NONE else 0

    def handler_since_ms(self) -> int | None:
        """Returns since when the longest silent handler has been silent (D4), None without one; in at-most-once mode,
        since it got its first message."""
        if isinstance(self.tracker, AtLeastOnce):
            oldest = self.tracker.oldest()
            return None if oldest is None else oldest[0]
        return self.tracker.in_flight_since_ms


# --- Builds the records of one claim: its entry in a heartbeat (PROTOCOL.md T11) and its Release (T16, F6).


def claim_state(partition: Partition, claim: Claim) -> ClaimState | None:
    """Returns the heartbeat entry of a claim; None if the world already holds the same values (T11)."""
    tracker = claim.tracker
    if isinstance(tracker, AtMostOnce):
        entry = ClaimState(claim.epoch, tracker.handled_to, claim.lag(tracker.delivered_to), tracker.in_flight)
        held = ClaimState(claim.epoch, partition.floor, partition.lag, partition.in_flight)
        return entry if entry != held else None
    position = tracker.position()
    entry = ClaimState(
        claim.epoch, position, claim.lag(position), tracker.in_flight, tracker.attempts(), tracker.progress()
    )
    held = ClaimState(
        claim.epoch, partition.position, partition.lag, partition.in_flight, partition.attempts, partition.progress
    )
    return entry if entry != held else None


def will_entry(claim: Claim) -> ClaimState | None:
    """Returns what a claim keeps for the witness (T19), None if its will does not release it. The message at the
    position counts as delivered once more: the owner will be dead (F4.5)."""
    tracker = claim.tracker
    if isinstance(tracker, AtMostOnce) or claim.tp.partition < 0:
        return None
    return ClaimState(claim.epoch, tracker.position(), 0, tracker.in_flight, tracker.attempts(), tracker.progress())


def release(session: int, partition: Partition, claim: Claim) -> ReleasingPartition | SeekingPartition:
    """Returns the Release of a claim, or the SeekingPartition that replaces it (F6.6). In at-least-once mode: where the
    next owner starts (F6.2); in at-most-once mode: gives back what was not handed over (F6.3)."""
    tracker = claim.tracker
    if claim.seek_to != NONE:
        return SeekingPartition(session, claim.epoch, claim.seek_to)
    if isinstance(tracker, AtMostOnce):
        return ReleasingPartition(
            session,
            claim.epoch,
            NONE,
            claim.successor,
            claim.reason,
            observed=partition.position,
            give=claim.released_position,
            in_flight=tracker.in_flight,
            parked=claim.parking,
        )
    return ReleasingPartition(
        session,
        claim.epoch,
        claim.released_position,
        claim.successor,
        claim.reason,
        attempts=tracker.deliveries(),
        in_flight=tracker.in_flight,
        progress=tracker.progress(),
        parked=claim.parking,
    )


# --- Which acks of a claim the log has: spans of finished offsets, compared with what the log says of the partition.
#
# An ack counts once the log has it: below the position, or in the ranges that are finished above it (progress.py). A
# span is the offsets [start, to). All of it is about at-least-once mode; in the other mode the grants have moved the
# position.


Spans = Sequence[tuple[int, int]]


def spans_of(offsets: Sequence[int]) -> Spans:
    """Returns these offsets, which are ascending, as spans."""
    if isinstance(offsets, range) and offsets.step == 1:
        return [(offsets.start, offsets.stop)] if offsets else []
    return progress.union((offset, offset + 1) for offset in offsets)


def finished_spans(tracker: AtLeastOnce) -> Spans:
    """Returns all that the claim has finished, as far as its acks were noted (`Claim.settle`)."""
    position = tracker.position()
    # All below the position: the log may have the last of it as finished above a lower position.
    spans = [(-1, position)]
    for run in tracker.runs:
        spans += [(start, to) for start, to in spans_of(run.offsets[: run.low]) if to > position]
        spans += [(run.offsets[index], run.offsets[index] + 1) for index in run.finished]
    return progress.union(spans)


def log_has(spans: Spans, claim: Claim, group: Group | None) -> bool:
    """Returns whether the log names all of `spans` as finished: when it ended the claim, or now if it has not."""
    state = claim.final
    if state is None:
        if group is None or claim.epoch not in group.claims:
            return False
        partition = group.claims[claim.epoch]
        state = partition.position, partition.progress
    position, known = state
    if spans and spans[-1][1] <= position:
        return True
    finished = [(start, to) for start, to, times in progress.decode(position, known) if not times]
    return not progress.without([Range(max(start, position), to, 0) for start, to in spans if to > position], finished)


# --- Finds a message that kills each process that handles it, by handing messages over one at a time (PROTOCOL.md D11).
#
# The log counts deliveries of the message at the position, also those that may not have happened, because an owner
# that dies at once reports nothing. So the count may go to a message a few before the one that killed it, or to one
# of another partition. When two owners have died like this, the next one is careful for one interval: of all such
# claims it hands over one message at a time, and each only when the log shows that all before it are finished and
# that this one counts as delivered, and no other. Then the deliveries of the message that kills are counted, and
# those of no other.


DELIVERIES: Final = 2  # of the message at the position by earlier owners; fewer may be ordinary crashes


def careful(group: Group, partition: Partition) -> bool:
    """Returns whether the new owner must hand messages over one by one. `partition.attempts` counts its own delivery
    already (F4.5)."""
    return group.mode == AT_LEAST_ONCE and partition.attempts > DELIVERIES


def suspicion(group: Group, partition: Partition) -> str:
    """Returns why the message at a new claim's position is reported, or "": a careful owner delivered it and did not
    finish it. Only those, and owners that ended before they could report, go beyond DELIVERIES."""
    if group.mode != AT_LEAST_ONCE or partition.attempts <= DELIVERIES + 1:
        return ""
    return f"{partition.attempts - 1} deliveries by earlier owners, and none finished it: it may end their processes"


class PoisonGuard:
    """Knows which claims of one member hand their messages over one by one, and which of them may do so now."""

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms = interval_ms
        self._claims: dict[int, tuple[Claim, int]] = {}  # epoch -> the claim; monotonic ms until which it is careful
        self._reported: dict[int, tuple[int, int]] = {}  # epoch -> newest position and attempts that a heartbeat has
        self._chosen: int = NONE  # epoch of the claim whose message counts as delivered
        self._begun_at: int = NONE  # what that claim had handed over when it was chosen: the offset after it
        self._ended: bool = False

    def begin(self, claim: Claim, now: Instant) -> bool:
        """Makes a new claim careful for one interval, if it must be. Returns whether it is: the next heartbeat is then
        due at once."""
        if self._ended:
            return False
        assert isinstance(claim.tracker, AtLeastOnce)
        claim.one_by_one = claim.tracker.counts_exactly = True
        self._claims[claim.epoch] = claim, now.mono_ms + self.interval_ms
        self._reported[claim.epoch] = _figures(claim)
        return True

    def end_all(self) -> None:
        """Has no claim be careful from now on, because ranges are delivered and not messages."""
        self._ended = True
        for claim, _ in [*self._claims.values()]:
            self.end(claim)

    def opens(self, claim: Claim, group: Group, now: Instant, awaits_echo: bool) -> bool:
        """Returns whether a careful claim may hand over its next message: no message of a careful claim is with a
        handler, and the log has what must be known if the process dies of it: those before it are finished, it counts
        as delivered, and those of other careful claims do not. `awaits_echo`: a heartbeat is on its way that may change
        this."""
        tracker, partition = claim.tracker, group.partitions[claim.tp]
        assert isinstance(tracker, AtLeastOnce)
        if now.mono_ms >= self._claims[claim.epoch][1]:
            tracker.counts_exactly = False
            if partition.attempts < tracker.attempts():
                return False
            self.end(claim)
            return True
        if self._chosen != claim.epoch and not self._choose(claim):
            return False
        if awaits_echo or tracker.in_flight or claim.position() > partition.position:
            return False
        return all(group.partitions[one.tp].attempts == _figures(one)[1] for one, _ in self._claims.values())

    def _choose(self, claim: Claim) -> bool:
        """Has the next message of a claim count as delivered, unless that of another one may still be handed over."""
        before = self._claims.get(self._chosen)
        if before is not None:
            tracker = before[0].tracker
            assert isinstance(tracker, AtLeastOnce)
            if tracker.held or tracker.handed_to() == self._begun_at:
                return False
            tracker.counts_exactly = True
        assert isinstance(claim.tracker, AtLeastOnce)
        claim.tracker.counts_exactly = False
        self._chosen, self._begun_at = claim.epoch, claim.tracker.handed_to()
        return True

    def end(self, claim: Claim) -> None:
        claim.one_by_one = False
        if isinstance(claim.tracker, AtLeastOnce):
            claim.tracker.counts_exactly = False
        self._claims.pop(claim.epoch, None)
        self._reported.pop(claim.epoch, None)

    @property
    def watches(self) -> bool:
        """Returns whether any claim is careful."""
        return bool(self._claims)

    def report_due(self, group: Group) -> bool:
        """Returns, once per figures of a claim, whether a careful claim waits for a heartbeat to tell the log."""
        due = False
        for epoch, (claim, _) in self._claims.items():
            figures, partition = _figures(claim), group.partitions[claim.tp]
            if claim.sealed or figures in ((partition.position, partition.attempts), self._reported.get(epoch)):
                continue
            self._reported[epoch] = figures
            due = True
        return due


def _figures(claim: Claim) -> tuple[int, int]:
    """Returns the position of a claim in at-least-once mode, and how often the message there counts as delivered."""
    assert isinstance(claim.tracker, AtLeastOnce)
    return claim.tracker.position(), claim.tracker.attempts()
