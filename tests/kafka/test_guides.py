"""The programs of the README and of docs/ on a real Kafka. tests/test_guides.py runs them in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Final

import pytest

from tests.support import guide_programs, guide_services
from tests.support.guides import PROGRAM_S, KafkaCluster, guides_of, started
from tests.support.kafka import Cluster

GUIDES: Final = guides_of(guide_programs, guide_services)


@pytest.fixture(scope="module")
def results(
    kafka: Cluster, tmp_path_factory: pytest.TempPathFactory, postgres: str
) -> Iterator[dict[str, Future[None]]]:
    with started(GUIDES, lambda: KafkaCluster(kafka.bootstrap), tmp_path_factory, postgres) as results:
        yield results


@pytest.mark.proof
@pytest.mark.parametrize("name", GUIDES)
def test_a_program(results: dict[str, Future[None]], name: str) -> None:
    results[name].result(PROGRAM_S)
