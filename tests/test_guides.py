"""Every Python block of the README and of docs/ is run: here in memory, or on the embedded broker if it has to
connect; by tests/kafka on Apache Kafka.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Final

import pytest

from marshal_py.testing import EmbeddedCluster, MemoryCluster
from tests.support import guide_programs, guide_services
from tests.support.guides import PROGRAM_S, guides_of, started
from tests.support.pages import ROOT, blocks, pages

GUIDES: Final = guides_of(guide_programs, guide_services)
# They use other processes, or confluent-kafka, which cannot connect to a cluster in memory.
_CONNECTING: Final = {
    "first_program",
    "iteration_until_a_signal",
    "each_effect_once",
    "each_effect_once_in_parallel",
    "in_worker_processes",
    "service_in_uvicorn",
    "service_whose_handler_fails",
    "service_whose_handler_hangs",
    "lines_with_a_time",
    "a_key_of_a_subject",
}
CONNECTING: Final = {name: guide for name, guide in GUIDES.items() if name in _CONNECTING}
IN_MEMORY: Final = {name: guide for name, guide in GUIDES.items() if name not in _CONNECTING}
# The tests that run all blocks of a page (None) or one block in Spark, and the block that pytest loads as conftest.py.
ELSEWHERE: Final = {
    ("docs/spark.md", None): "tests/spark/test_docs.py",
    ("docs/spark-reference.md", None): "tests/spark/test_formats_guide.py",
    ("docs/testing.md", 0): "tests/testing/test_plugin.py",
    ("docs/testing.md", 8): "tests/testing/test_plugin.py",
}
PROGRAMS: Final = {("examples/service.py", 0)}  # of docs/consumer.md


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Iterator[dict[str, Future[None]]]:
    with started(CONNECTING, EmbeddedCluster, tmp_path_factory, postgres) as results:
        yield results


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Iterator[dict[str, Future[None]]]:
    with started(IN_MEMORY, MemoryCluster, tmp_path_factory, postgres) as results:
        yield results


@pytest.mark.parametrize("name", CONNECTING)
def test_a_program_on_the_embedded_broker(embedded: dict[str, Future[None]], name: str) -> None:
    embedded[name].result(PROGRAM_S)


@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_program_in_memory(memory: dict[str, Future[None]], name: str) -> None:
    memory[name].result(PROGRAM_S)


def test_every_block_is_run() -> None:
    """For a new block, add a program to tests/support/guide_programs.py or guide_services.py."""
    shown = {(page, number) for page in pages() for number in range(len(blocks(page)))}
    run = set().union(*(guide.blocks for guide in GUIDES.values()))
    run |= {(page, number) for page, number in shown if (page, None) in ELSEWHERE or (page, number) in ELSEWHERE}
    assert shown | PROGRAMS == run
    for (page, _), test in ELSEWHERE.items():
        assert page.removeprefix("docs/") in (ROOT / test).read_text(encoding="utf-8")


def test_every_fence_is_found() -> None:
    """A block in a list is found, too."""
    for page in pages():
        assert len(blocks(page)) == (ROOT / page).read_text(encoding="utf-8").count("```python")
