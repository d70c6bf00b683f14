"""One partition whose position lies beyond its end, on Apache Kafka: it stands still alone, and an operator sees it.

tests/client/test_parked.py has the same over memory and the embedded broker, without the commands.
"""

from __future__ import annotations

from contextlib import ExitStack

from marshal_py import TopicPartition
from tests.kafka.test_recreated import DEADLINE_S, Scene
from tests.support.client_fixtures import BackgroundConsumer, joined
from tests.support.kafka import Cluster, TopicFactory, wait_until

PARTITIONS, CONSUMERS, MESSAGES, POSITION = 6, 3, 10, 1_031
REASON = "PositionBeyondEnd"


def test_three_consumers_outlive_a_partition_beyond_its_end(kafka: Cluster, topic: TopicFactory) -> None:
    """D6, F6.4: all of them were dead within 14 s, and `state`, `lag` and `doctor` said that all was well."""
    context = Scene(kafka, topic(PARTITIONS))
    written = context.fill(context.topic, PARTITIONS, MESSAGES, "first")
    starts = {TopicPartition(context.topic, number): 0 for number in range(1, PARTITIONS)}
    with ExitStack() as stack:
        marshals = [stack.enter_context(context.connect()) for _ in range(CONSUMERS)]
        marshals[0]._context.admin.commit(context.group, starts | {TopicPartition(context.topic, 0): POSITION})
        consumers = [
            stack.enter_context(joined(marshal, context.group, [context.topic], start="committed"))
            for marshal in marshals
        ]
        keepers = [stack.enter_context(BackgroundConsumer(consumer)) for consumer in consumers]

        def seen() -> set[tuple[int, bytes]]:
            return {place for keeper in keepers for place in context.seen(keeper)}

        def rest(wanted: set[tuple[int, bytes]]) -> set[tuple[int, bytes]]:
            return {place for place in wanted if place[0]}

        wait_until(lambda: any("parked" in context.told(consumer) for consumer in consumers), DEADLINE_S, "it is told")
        wait_until(lambda: seen() == rest(written), DEADLINE_S, "five partitions are read")
        (told,) = [event for event in context.events if event.kind == "parked"]
        assert told.text.startswith(f"{REASON}: ")

        (state,) = context.json("state", context.group)["groups"]
        row = state["partitions"][0]
        assert (row["parked"], row["owner"], row["position"], row["end"], row["lag"]) == (
            REASON,
            None,
            POSITION,
            MESSAGES,
            None,
        )
        (notice,) = state["notices"]
        assert f"position {POSITION}, end {MESSAGES}" in notice
        lag = context.json("lag", context.group)
        assert (lag["unknown"], lag["parked"], lag["notices"]) == (1, 1, [notice])
        checks = {check["name"]: check for check in context.json("doctor")["checks"] if context.group in check["found"]}
        assert f"1 partitions of '{context.topic}' are parked ({REASON})" in checks["parked partitions"]["found"]
        assert REASON in context.run("advisories", context.group, "--kind", "alarming").stdout
        assert (
            f"position {POSITION}, end {MESSAGES}" in context.run("explain", context.group, f"{context.topic}:0").stdout
        )
        assert {one.parked for marshal in marshals for one in marshal.metrics().consumers} == {1}

        more = context.fill(context.topic, PARTITIONS, POSITION, "second")
        wait_until(lambda: seen() == rest(written | more), DEADLINE_S, "it does not come back by growing")
        done = context.json("set-position", context.group, f"{context.topic}:0", "--to", "earliest", "--yes")
        assert done["outcome"] == "moved"
        wait_until(lambda: seen() == written | more, DEADLINE_S, "nothing is missing once an admin has said so")
        assert [keeper.error for keeper in keepers] == [None] * CONSUMERS
        assert context.json("state", context.group)["groups"][0]["notices"] == []
