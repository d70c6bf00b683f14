"""The claims of a consumer that fetches: where their messages begin, given what earlier owners finished (D1).

Offsets above the position that an earlier owner finished count only if the partition reaches that far: one that was
truncated meanwhile holds other messages there. The end that a data client has noted may be old, for example of a
partition that was fetched ahead and then held back. So a claim whose noted end is too low is opened only when the
cluster has been asked. Such claims are few. Called with the Marshal's lock held, except for the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from marshal_py.client.context import Context
from marshal_py.client.delivery_queue import DeliveryQueue
from marshal_py.client.options import ConsumerOptions
from marshal_py.protocol.claim import Claim
from marshal_py.protocol.delivery import AtLeastOnce
from marshal_py.protocol.identity import Instant, TopicPartition
from marshal_py.protocol.member import Member
from marshal_py.transport.ports import DataSource


class FetchedClaims:
    """The claims of one consumer that fetches."""

    def __init__(
        self,
        context: Context,
        member: Member,
        source: DataSource,
        options: ConsumerOptions,
        incarnation: bytes,
        submit: Callable[[str, Callable[[], None]], None],
    ) -> None:
        """`submit`: runs a named task on the consumer's worker thread."""
        self._context, self._member, self._submit = context, member, submit
        self.source = source
        self.queue = DeliveryQueue(member, source, options, context.lock, incarnation, context.clock.now)
        self._unsure: dict[TopicPartition, Claim] = {}  # claims that wait for an answer

    def open(self, claims: Sequence[Claim]) -> None:
        """These claims were accepted."""
        unsure = [claim for claim in claims if self._may_be_shorter(claim)]
        self._open([claim for claim in claims if claim not in unsure])
        self._unsure.update((claim.tp, claim) for claim in unsure)
        self.look()

    def drop(self, claims: Iterable[Claim]) -> None:
        """These claims are gone."""
        for claim in claims:
            if self._unsure.get(claim.tp) is claim:
                del self._unsure[claim.tp]

    def look(self) -> None:
        """Asks for the ends that are unsure, again if there was no answer."""
        if self._unsure:
            self._submit("what earlier owners finished", self._ask)

    def overdue(self, now: Instant) -> bool:
        """Whether the user has been silent for too long. Here the member judges that, by the messages in flight."""
        return False

    def _may_be_shorter(self, claim: Claim) -> bool:
        tracker = claim.tracker
        if not isinstance(tracker, AtLeastOnce) or not tracker.finished_to():
            return False
        return self.source.end_offset(claim.tp) < tracker.finished_to()

    def _open(self, claims: Sequence[Claim]) -> None:
        self.queue.open(claims, positions_of(claims, self._member))

    def _ask(self) -> None:
        """On the worker, without the lock. Raises ClusterError: the next look asks again."""
        context = self._context
        with context.lock:
            asked = dict(self._unsure)
        bounds = context.admin.bounds([*asked])
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
    """The positions that the group has for these claims."""
    group = member.group
    assert group is not None
    return {claim.tp: group.partitions[claim.tp].position for claim in claims}
