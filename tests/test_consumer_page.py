"""The service of docs/consumer.md in another loop. tests/test_guides.py runs the programs of the page."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import Response

from marshal_py.testing import MemoryCluster
from tests.support.client_fixtures import DEADLINE_S
from tests.support.pages import blocks, run


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
