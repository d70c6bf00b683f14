"""Opens and ends the claims of a consumer that plans ranges. It fetches nothing, as other processes read the ranges.

A claim is opened at its position at once; ranges.py holds what is planned. The ends of the partitions are asked from
the cluster, as no fetch reports them. A user who stops calling loses the claims: with no range in flight, nothing but
calls shows that somebody reads. Methods are called with the Marshal's lock held, except for `_ask`, which waits for the
cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import structs

from marshal_py.client.connection.background_worker import Ask, TaskSteps
from marshal_py.client.connection.context import Context
from marshal_py.client.delivery.fetched_claims import positions_of
from marshal_py.client.ranges.ranges import Ranges
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import Instant, TopicPartition
from marshal_py.transport.ports import Bounds, Broken, DataSource, OutOfRange


class UnfetchedSource:
    """Is the data source of a consumer that fetches nothing. `ends`: the end offsets that the cluster was asked for."""

    def __init__(self, fetching: DataSource) -> None:
        """Wraps the consumer's real source, which stays open, without partitions, until the consumer closes."""
        self._inner = fetching
        self.ends: dict[TopicPartition, int] = {}

    def learn_leaders(self, topics: Iterable[str]) -> None:
        self._inner.learn_leaders(topics)

    def end_offset(self, tp: TopicPartition) -> int:
        return self.ends.get(tp, -1)

    def out_of_range(self) -> list[OutOfRange]:
        self._inner.out_of_range()  # left over from fetches, which do not matter any more
        return []

    def broken(self) -> list[Broken]:
        self._inner.broken()
        return []

    def round(self, tp: TopicPartition) -> int:
        return 0  # nothing is assigned

    def carry_out(self) -> None:
        self._inner.carry_out()

    def close(self) -> None:
        self._inner.close()


class PlannedClaims:
    """Holds the claims of one consumer that plans ranges. (FetchedClaims does so for a consumer that fetches.)"""

    def __init__(
        self,
        context: Context,
        member: Member,
        source: DataSource,
        options: ConsumerOptions,
        incarnation: bytes,
        submit: Callable[[str, Callable[[], object]], None],
        absent: Callable[[], Collection[str]],
    ) -> None:
        """Begins without claims. `submit(name, task)` runs a task on the consumer's worker thread.

        `absent` returns the topics that the cluster does not have.
        """
        self._context, self._member, self._submit, self._absent = context, member, submit, absent
        member.asked = None  # its readers ask elsewhere, so nobody here knows whether the user is idle (A11)
        self._timeout_ms = round(1000 * options.handler_timeout_s)
        if options.hand_over_timeout_s is None:  # a range is long work, and its reader elsewhere cannot be stopped
            whole_ms = member.options.handler_timeout_ms
            member.options = structs.replace(member.options, hand_over_timeout_ms=whole_ms)
        self.source: UnfetchedSource = UnfetchedSource(source)
        self.queue: Ranges = Ranges(member, incarnation)
        self._called_ms: int | None = None  # None until the group has this member: a join may take long

    def open(self, claims: Sequence[Claim]) -> None:
        """Begins to plan ranges of these claims, which the log has accepted."""
        self.queue.open(claims, positions_of(claims, self._member))

    writing = False  # it delivers no messages, so it has no dead letters

    def close(self) -> None:
        """Does nothing."""

    def drop(self, claims: Iterable[Claim]) -> None:
        """Does nothing. The driver calls it when claims have ended, and has `Ranges.drop` forget them."""

    def look(self) -> None:
        """Has the worker thread ask the cluster for the partitions' end offsets, if any are needed."""
        if self.queue.ends_wanted():
            self._submit("the ends of partitions", self._ask)

    def _ask(self) -> TaskSteps:
        """Asks the cluster for the end offsets. They give the lag, and show that this member can take over (A3)."""
        with self._context.lock:
            tps = [tp for tp in self.queue.ends_wanted() if tp.topic not in self._absent()]
        bounds: dict[TopicPartition, Bounds] = (yield Ask(lambda: self._context.admin.bounds(tps))) if tps else {}
        ends = {tp: bound.end for tp, bound in bounds.items()}
        with self._context.lock:
            self.source.ends.update(ends)

    def called(self) -> None:
        """Notes that the user has just called, so somebody still reads."""
        self._called_ms = self._context.clock.now().mono_ms

    def overdue(self, now: Instant) -> bool:
        """Tells whether the user's last call is at least `handler_timeout_s` ago (D9)."""
        return self._called_ms is not None and now.mono_ms - self._called_ms >= self._timeout_ms
