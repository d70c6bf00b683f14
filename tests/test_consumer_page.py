"""docs/consumer.md names every verb of asyncio. tests/test_guides.py runs its programs."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import Response

from marshal_py import aio
from marshal_py.testing import MemoryCluster
from tests.support.client_fixtures import DEADLINE_S
from tests.support.pages import blocks, page, run


def test_the_table_names_every_verb_of_the_front() -> None:
    table = page("docs/consumer.md").split("### What is awaited")[1].partition("\n\n## ")[0]
    verbs = {name for kind in (aio.AsyncConsumer, aio.AsyncTopic) for name in vars(kind) if not name.startswith("_")}
    said = {"name", "close", "get_page", "groups", "delete_group"}
    said |= {"key_index", "update_index", "index_status"}  # "indexes"
    assert {verb for verb in verbs - said if verb not in table} == set()


def test_the_service_runs_in_a_loop_of_another_thread_as_under_a_test_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI's TestClient runs the lifespan in a thread of its own, where no signal handler can be installed."""
    [program] = blocks("examples/service.py")

    async def live(service: dict[str, Any]) -> Any:
        app = service["app"]
        async with service["lifespan"](app):
            while not (answer := await service["ready"](Response()))["seen"]:
                await asyncio.sleep(0)
            return answer

    with MemoryCluster() as cluster, ThreadPoolExecutor(1) as threads:
        cluster.create_topic("orders")
        cluster.produce("orders", b"0")
        monkeypatch.setenv("KAFKA", cluster.bootstrap_servers)
        service = run(program, "service")
        answer = threads.submit(lambda: asyncio.run(live(service))).result(DEADLINE_S)
    assert answer == {"claims": 1, "waiting_for": "", "seen": 1}
