"""Where the messages of a new claim begin to be fetched, once it is certain what earlier owners finished (D1).

What they finished above the position counts only if the partition reaches that far: one that was truncated meanwhile
holds other messages there. The end that a data client has noted may be old, of a partition that was fetched ahead and
then held back, so a claim whose end does not reach is opened when the cluster has been asked. Such claims are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from marshal_py.client.delivery_queue import DeliveryQueue
from marshal_py.protocol.claim import Claim
from marshal_py.protocol.delivery import AtLeastOnce
from marshal_py.protocol.identity import TopicPartition

if TYPE_CHECKING:
    from marshal_py.client.consumer_driver import ConsumerDriver


class Inherited:
    """Of one Station; called with the Marshal's lock held, but for the question."""

    def __init__(self, driver: ConsumerDriver) -> None:
        self._driver = driver
        self._asked: dict[TopicPartition, Claim] = {}  # claims that wait for an answer

    def open(self, claims: Sequence[Claim]) -> None:
        """Claims that were read accepted."""
        driver = self._driver
        mismatched = [claim for claim in claims if self._may_be_shorter(claim)]
        self._open([claim for claim in claims if claim not in mismatched])
        self._asked.update((claim.tp, claim) for claim in mismatched)
        driver.cold.difference_update(claim.tp for claim in claims)
        self.look()

    def drop(self, claims: Sequence[Claim]) -> None:
        """Claims that are gone."""
        for claim in claims:
            if self._asked.get(claim.tp) is claim:
                del self._asked[claim.tp]

    def look(self) -> None:
        """Asks, also again what nobody answered."""
        if self._asked:
            self._driver.submit("what earlier owners finished", self._ask)

    def _may_be_shorter(self, claim: Claim) -> bool:
        driver, tracker = self._driver, claim.tracker
        if (
            not isinstance(driver.queue, DeliveryQueue)
            or not isinstance(tracker, AtLeastOnce)
            or not tracker.finished_to()
        ):
            return False
        return driver.source.end_offset(claim.tp) < tracker.finished_to()

    def _open(self, claims: Sequence[Claim]) -> None:
        group = self._driver.member.group
        assert group is not None
        self._driver.queue.open(claims, {claim.tp: group.partitions[claim.tp].position for claim in claims})

    def _ask(self) -> None:
        """On the worker, without the lock. Raises ClusterError: the next look asks again."""
        loop = self._driver.loop
        with loop.lock:
            asked = dict(self._asked)
        bounds = loop.admin.bounds([*asked])
        with loop.outbox, loop.lock:
            for tp, claim in asked.items():
                if self._asked.get(tp) is not claim:
                    continue
                del self._asked[tp]
                if isinstance(claim.tracker, AtLeastOnce) and bounds[tp].end < claim.tracker.finished_to():
                    claim.tracker.discard_inherited()
                self._open([claim])
            loop.changed.notify_all()
