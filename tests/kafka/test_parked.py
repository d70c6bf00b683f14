"""A partition whose position is after its end, on Apache Kafka: it alone is parked, and an operator sees it.

tests/client/test_parked.py tests the same in memory and on the embedded broker, without the commands.
"""

from __future__ import annotations

from contextlib import ExitStack

from marshal_py import TopicPartition
from tests.kafka.test_recreated import DEADLINE_S, TopicCase
from tests.support.client_fixtures import BackgroundConsumer, joined
from tests.support.kafka import Cluster, TopicFactory, wait_until

PARTITIONS, CONSUMERS, MESSAGES, POSITION = 6, 3, 10, 1_031
REASON = "PositionBeyondEnd"


def test_three_consumers_survive_a_position_after_the_end(kafka: Cluster, topic: TopicFactory) -> None:
    """D6, F6.4: once all consumers ended within 14 s, and `state`, `lag` and `doctor` showed nothing."""
    case = TopicCase(kafka, topic(PARTITIONS))
    written = case.fill(case.topic, PARTITIONS, MESSAGES, "first")
    starts = {TopicPartition(case.topic, number): 0 for number in range(1, PARTITIONS)}
    with ExitStack() as stack:
        marshals = [stack.enter_context(case.connect()) for _ in range(CONSUMERS)]
        marshals[0]._context.admin.commit(case.group, starts | {TopicPartition(case.topic, 0): POSITION})
        consumers = [
            stack.enter_context(joined(marshal, case.group, [case.topic], start="committed")) for marshal in marshals
        ]
        readers = [stack.enter_context(BackgroundConsumer(consumer)) for consumer in consumers]

        def seen() -> set[tuple[int, bytes]]:
            return {place for reader in readers for place in case.seen(reader)}

        def rest(wanted: set[tuple[int, bytes]]) -> set[tuple[int, bytes]]:
            return {place for place in wanted if place[0]}

        wait_until(
            lambda: any("parked" in case.event_kinds(consumer) for consumer in consumers), DEADLINE_S, "it is reported"
        )
        wait_until(lambda: seen() == rest(written), DEADLINE_S, "five partitions are read")
        (parked,) = [event for event in case.events if event.kind == "parked"]
        assert parked.text.startswith(f"{REASON}: ")

        (state,) = case.commands.json("state", case.group)["groups"]
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
        lag = case.commands.json("state", "--lag", case.group)
        assert (lag["unknown"], lag["parked"], lag["notices"]) == (1, 1, [notice])
        checks = {
            check["name"]: check for check in case.commands.json("doctor")["checks"] if case.group in check["found"]
        }
        assert f"1 partitions of '{case.topic}' are parked ({REASON})" in checks["parked partitions"]["found"]
        assert REASON in case.commands.run("advisories", case.group, "--kind", "alarming").stdout
        assert (
            f"position {POSITION}, end {MESSAGES}" in case.commands.run("explain", case.group, f"{case.topic}:0").stdout
        )
        assert {one.parked for marshal in marshals for one in marshal.metrics().consumers} == {1}

        more = case.fill(case.topic, PARTITIONS, POSITION, "second")
        wait_until(lambda: seen() == rest(written | more), DEADLINE_S, "it stays parked when it grows")
        done = case.commands.json("set-position", case.group, f"{case.topic}:0", "--to", "earliest", "--yes")
        assert done["outcome"] == "moved"
        wait_until(lambda: seen() == written | more, DEADLINE_S, "nothing is missing after an admin's command")
        assert [reader.error for reader in readers] == [None] * CONSUMERS
        assert case.commands.json("state", case.group)["groups"][0]["notices"] == []
