"""The programs of docs/coming-from.md receive every message, and all of its links and names exist."""

from __future__ import annotations

from typing import Any

import pytest

from marshal_py.testing import LocalCluster
from tests.support.pages import Enough, call, names_of

PROGRAMS = ("like_confluent_kafka", "like_aiokafka", "like_a_subscriber")
MESSAGES = 30


@pytest.fixture
def programs() -> dict[str, Any]:
    return names_of("coming-from.md")


def test_every_program_is_run(programs: dict[str, Any]) -> None:
    assert {name for name in programs if name.startswith("like_")} == set(PROGRAMS)


@pytest.mark.parametrize("marshal_broker_kind", ["memory", "embedded"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_receives_every_message(marshal_broker: LocalCluster, programs: dict[str, Any], name: str) -> None:
    marshal_broker.create_topic("orders", 2)
    for partition in range(2):
        values = [b"%d-%d" % (partition, number) for number in range(MESSAGES // 2)]
        marshal_broker.produce_many("orders", values, partition=partition)
    seen: list[bytes] = []

    def handle(value: bytes) -> None:
        seen.append(value)
        if len(seen) == MESSAGES:
            raise Enough

    with pytest.raises(Enough):
        call(programs[name], marshal_broker.bootstrap_servers, handle)
    assert len(set(seen)) == MESSAGES
