"""The claims of a consumer that fetches: where their messages begin, given what earlier owners finished (D1).

An earlier owner may have finished offsets above the position. Those are skipped only if the partition reaches that far,
because a partition that was truncated since holds other messages there. The data client may know only an old end of the
partition, for example if fetching was paused. So if the known end is too low, the claim is unsure: it is opened, that
is its messages are fetched and delivered, only after the cluster has been asked for the end. Such claims are few.
Everything is called with the Marshal's lock held, except `_ask`, which waits for the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from marshal_py.client.connection import Ask, Context, TaskSteps
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.messages.answers import DeadLetters, UnackedWatch
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import Instant, TopicPartition
from marshal_py.transport.ports import Bounds, DataSource, MessageWriter


class FetchedClaims:
    """Opens the claims of one consumer that fetches, and forgets those that have ended."""

    def __init__(
        self,
        context: Context,
        member: Member,
        source: DataSource,
        options: ConsumerOptions,
        incarnation: bytes,
        submit: Callable[[str, Callable[[], object]], None],
    ) -> None:
        """Begins without claims. `submit(name, task)` runs a task on the consumer's worker thread."""
        self._context, self._member, self._submit = context, member, submit
        self.source = source
        self.queue: DeliveryQueue = DeliveryQueue(member, source, options, context.lock, incarnation, context.clock.now)
        self._unacked = UnackedWatch(member, options)
        self._letters: DeadLetters | None = None
        self._unsure: dict[TopicPartition, Claim] = {}  # claims whose partition's end the cluster was asked for

    def write_dead_letters(self, topic: str, open_writer: Callable[[], MessageWriter]) -> None:
        """Has messages that are delivered too often, or ended by `term`, written to `topic`. Called once, at first."""
        answers = self.queue.answers
        self._letters = DeadLetters(topic, self._member, self._context, answers.reports, open_writer)
        answers.letters = self._letters

    @property
    def writing(self) -> bool:
        """Returns whether dead letters are on their way."""
        return self._letters is not None and self._letters.pending

    def close(self) -> None:
        """Writes no dead letters any more."""
        if self._letters is not None:
            self._letters.close()

    def open(self, claims: Sequence[Claim]) -> None:
        """Opens these accepted claims: at once, or after the cluster's answer if they are unsure."""
        unsure = [claim for claim in claims if self._may_be_shorter(claim)]
        self._open([claim for claim in claims if claim not in unsure])
        self._unsure.update((claim.tp, claim) for claim in unsure)
        self._ask_soon()

    def drop(self, claims: Sequence[Claim]) -> None:
        """Forgets these claims, which have ended."""
        self.queue.delivery.lost_acks.ended(claims, self._member.group)
        for claim in claims:
            if self._unsure.get(claim.tp) is claim:
                del self._unsure[claim.tp]

    def look(self) -> None:
        """Does what is due every third of a heartbeat interval, at which it is called."""
        self._ask_soon()
        self._unacked.look(self._member.claims.values(), self._context.clock.now())
        self.queue.answers.reports.end_period()

    def _ask_soon(self) -> None:
        """Has the worker ask where the partitions of unsure claims end; repeated until the cluster answers."""
        if self._unsure:
            self._submit("what earlier owners finished", self._ask)

    def overdue(self, now: Instant) -> bool:
        """False: the member itself judges by messages in flight. PlannedClaims judges users who plan ranges."""
        return False

    def _may_be_shorter(self, claim: Claim) -> bool:
        tracker = claim.tracker
        if not isinstance(tracker, AtLeastOnce) or not tracker.finished_to():
            return False
        return self.source.end_offset(claim.tp) < tracker.finished_to()

    def _open(self, claims: Sequence[Claim]) -> None:
        self.queue.open(claims, positions_of(claims, self._member))

    def _ask(self) -> TaskSteps:
        """Asks the cluster for ends, then opens the unsure claims; on the worker, without the lock. Raises ClusterError
        and is asked again."""
        context = self._context
        with context.lock:
            asked = dict(self._unsure)
        bounds: dict[TopicPartition, Bounds] = yield Ask(lambda: context.admin.bounds([*asked]))
        with context.outbox, context.lock:
            for tp, claim in asked.items():
                if self._unsure.get(tp) is not claim:
                    continue
                del self._unsure[tp]
                if isinstance(claim.tracker, AtLeastOnce) and bounds[tp].end < claim.tracker.finished_to():
                    claim.tracker.discard_inherited()
                self._open([claim])
            context.changed.notify_all()


def positions_of(claims: Iterable[Claim], member: Member) -> dict[TopicPartition, int]:
    """Returns the positions that the folded log has for these claims."""
    group = member.group
    assert group is not None
    return {claim.tp: group.partitions[claim.tp].position for claim in claims}
