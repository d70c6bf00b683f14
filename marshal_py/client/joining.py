"""Makes the consumers of one Marshal and has them join their groups: checks, then a driver, then the Join record."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from marshal_py.client.connection.context import Context
from marshal_py.client.consumer import Consumer
from marshal_py.client.delivery.fetched_claims import FetchedClaims
from marshal_py.client.delivery.prefetch import FILLED_SHARE
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.driver.last_wills import LastWills
from marshal_py.client.driver.loop import Loop
from marshal_py.client.driver.watches import check_count, find_topics
from marshal_py.client.planner import Planner
from marshal_py.client.ranges.ranges import PlannedClaims
from marshal_py.client.receive.ending import Ending
from marshal_py.client.receive.membership import Membership
from marshal_py.client.values import position_text
from marshal_py.client.values.options import ConsumerOptions, check_topics
from marshal_py.errors import ConsumerClosed, InvalidOption, MembersAlive, TopicMissing
from marshal_py.protocol.member import topology
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import NONE, check_id, route
from marshal_py.protocol.wire.records import Genesis
from marshal_py.protocol.wire.subscription import EXCEPT, has_patterns, names_of
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.memory import MemoryTransport
from marshal_py.transport.ports import TopicInfo

M = TypeVar("M", bound=Membership)

NO_MESSAGES: Final = "it is the Marshal's own coordination topic, which has no messages; `marshal log tail` shows it"
KAFKA_CONSUMERS: Final = (
    "ordinary Kafka consumers use the same group id, so both would read every message; stop them, or use another "
    "group, which may begin where they are (start='committed:GROUP')"
)
JOIN_STOP_TIMEOUT_S: Final = 3.0  # how long a consumer that could not join waits for the release of what it claimed


class Joining:
    """Makes consumers, unless `closed`. `endings`: of those that have not ended, oldest first; not the consumers, so
    that one that is dropped is noticed (Membership.__del__)."""

    def __init__(
        self,
        transport: KafkaTransport | MemoryTransport,
        context: Context,
        loop: Loop,
        root: Genesis,
        client_id: str,
        library: str,
        timeout_s: float,
        wills: LastWills | None = None,
    ) -> None:
        """`library`: for Joins. `timeout_s`: to join. `wills`: knows the witness for a Join, or None."""
        self._wills = wills
        self.endings: dict[ConsumerDriver, Ending] = {}
        self.closed = False
        self.kept: bool = False  # whether somebody else stops its consumers, so that the program may drop them
        self._transport, self._context, self._loop, self._root = transport, context, loop, root
        self._client_id, self._library, self._timeout_s = client_id, library, timeout_s

    def consumer(self, group: str, topics: Sequence[str], options: ConsumerOptions) -> Consumer[Any, Any]:
        return self._join(Consumer, "consumer", group, topics, options, plans=False)

    def planner(self, group: str, topics: Sequence[str], options: ConsumerOptions) -> Planner:
        return self._join(Planner, "planner", group, topics, options, plans=True)

    def _join(
        self,
        kind: Callable[[Context, ConsumerDriver, Mapping[str, Any], Ending], M],
        verb: str,
        group: str,
        topics: Sequence[str],
        options: ConsumerOptions,
        *,
        plans: bool,
    ) -> M:
        """Returns a consumer of class `kind` once the group has it. `verb`: for errors. `plans`: ranges."""
        context, deadline = self._context, time.monotonic() + self._timeout_s
        context.check_call("Marshal", verb, waits=True)
        if self.closed:
            raise ConsumerClosed("Marshal", "it was closed")
        context.check_alive()
        check_id("group", group)
        driver = self._drive(group, check_topics(topics, patterns=not plans), options, deadline, plans=plans)
        given = self._transport.given if isinstance(self._transport, KafkaTransport) else {}
        ending = Ending(context, driver, lambda: self._end(driver))
        consumer = kind(context, driver, {**given, **options.settings}, ending)
        ending.fronts += self.kept
        self.endings[driver] = ending  # before the next look at `closed`: from then on `close` stops it
        try:
            if self.closed:
                raise ConsumerClosed("Marshal", "it was closed")
            self._loop.add(driver)
            self._await_join(driver, ending, deadline)
            if self._wills is not None:
                self._wills.wait_registered(driver)
        except BaseException:
            consumer.stop(JOIN_STOP_TIMEOUT_S)
            raise
        return consumer

    def _await_join(self, driver: ConsumerDriver, ending: Ending, deadline: float) -> None:
        """Waits until the group has the member. Raises ClusterUnreachable, and the error that ended the consumer."""
        context, member = self._context, driver.member
        until = max(deadline, context.monotonic() + 1.0)
        context.wait_for(lambda: member.session != NONE or driver.ended, "the group to be joined", until, driver.log)
        if driver.ended:
            ending.raise_if_ended()
        if isinstance(driver.claims, PlannedClaims):  # from now on its user has to call
            with context.lock:
                driver.claims.called()

    def _end(self, driver: ConsumerDriver) -> None:
        """Forgets a consumer that has ended."""
        self.endings.pop(driver, None)
        driver.claims.close()

    def _drive(
        self, group: str, topics: tuple[str, ...], options: ConsumerOptions, deadline: float, *, plans: bool
    ) -> ConsumerDriver:
        """Makes the driver of a member that has not joined yet. `deadline`: in seconds of the monotonic clock."""
        context, loop = self._context, self._loop
        letters = options.dead_letter_topic
        if plans:
            options.check_planning()
        if isinstance(options.start, str):
            options = replace(options, start=position_text.read(options.start))  # nobody reads the file again
        position_text.check_topics(options.start, topics)
        if letters is not None and has_patterns(topics):
            topics = (*topics, EXCEPT + letters)
        found = self._check(group, topics, options)
        position_text.check_partitions(options.start, {topic: info.partitions for topic, info in found.items()})
        number = route(group, self._root.partitions)
        world = loop.open_world(number, None if number == 0 else self._root, deadline)
        witness = self._wills.witness if self._wills is not None else ""
        chosen = options.member_options(self._client_id, topics, self._library, witness)
        source = self._transport.source(
            group, self._client_id, options.settings, options.prefetch_bytes // FILLED_SHARE
        )
        source.learn_leaders(tuple(found))
        with context.lock:
            known, later = world.groups.get(group), frozenset[str]()
            options.check_policy(group, None if known is None else known.config)
            if plans:  # as in Spark: what a query reads in addition, it reads from the beginning
                later = topology.new_topics(known, names_of(topics))
            later |= topology.found_later(known, topics, tuple(found))
            member = Member(world, group, chosen, secrets.token_bytes)
            for topic, info in found.items():  # before it can claim anything (D10)
                member.learn_topic(topic, info.partitions, info.topic_id)
        driver = ConsumerDriver(
            context,
            number,
            member,
            source,
            options,
            self._root.incarnation,
            later,
            loop.maintenance.refold,
            lambda: loop.sessions_of(number),
            plans=plans,
        )
        if letters is not None:
            assert isinstance(driver.claims, FetchedClaims)
            driver.claims.write_dead_letters(letters, self._transport.writer)
        return driver

    def _check(self, group: str, topics: tuple[str, ...], options: ConsumerOptions) -> dict[str, TopicInfo]:
        """Returns what the cluster says of the topics, patterns' included; no ordinary Kafka consumer may use the group
        (D7). Raises TopicMissing, MembersAlive, InvalidOption."""
        found: dict[str, TopicInfo] = {}
        if self._context.topic in topics:
            raise InvalidOption("topics", self._context.topic, NO_MESSAGES)
        letters = options.dead_letter_topic
        if letters is not None and letters in (*topics, self._context.topic):
            raise InvalidOption("dead_letter_topic", letters, "another topic than those that the consumer reads")
        names, reads = names_of(topics), find_topics(self._context.admin, topics, self._context.topic)
        check_count(topics, len(reads))
        for topic in (*reads, letters) if letters is not None else reads:
            info = self._context.admin.describe_topic(topic)
            if info is None and (topic in names or topic == letters):
                raise TopicMissing(topic)
            if info is not None and topic != letters:
                found[topic] = info
        live = self._context.admin.live_kafka_members(group)
        if live:
            raise MembersAlive(group, KAFKA_CONSUMERS, (f"{live} ordinary Kafka consumers",))
        return found
