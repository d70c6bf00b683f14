"""The programs of docs/asyncio.md run; the service runs in uvicorn, is ready, and ends cleanly on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from marshal_py import aio
from marshal_py.testing import LocalCluster
from tests.support.client_fixtures import DEADLINE_S, until
from tests.support.pages import Enough, blocks, page, run

ROOT = Path(__file__).parents[1]
BLOCKS = blocks("asyncio.md")
MESSAGES = 30


def fill(cluster: LocalCluster) -> None:
    cluster.create_topic("orders", 2)
    for partition in range(2):
        cluster.produce_many("orders", [b"%d" % number for number in range(MESSAGES // 2)], partition=partition)


@pytest.mark.parametrize("marshal_broker_kind", ["memory", "embedded"])
def test_the_first_program_receives_every_message(marshal_broker: LocalCluster) -> None:
    fill(marshal_broker)
    seen: list[tuple[int, int]] = []

    async def charge(message: Any) -> None:
        seen.append((message.partition, message.offset))
        if len(seen) == MESSAGES:
            raise Enough

    with pytest.raises(Enough):
        asyncio.run(run(BLOCKS[0], "asyncio.md")["charge_all"](marshal_broker.bootstrap_servers, charge))
    assert len(set(seen)) == MESSAGES


def test_a_handler_in_the_background(marshal_broker: LocalCluster) -> None:
    fill(marshal_broker)
    seen: list[tuple[int, int]] = []

    async def main() -> None:
        async with (
            aio.connect(marshal_broker.bootstrap_servers) as marshal,
            marshal.consumer("g", ["orders"], start="earliest") as consumer,
        ):

            async def charge(message: Any) -> None:
                seen.append((message.partition, message.offset))
                if len(seen) == MESSAGES:
                    consumer.request_stop()

            program = run(BLOCKS[1], "asyncio.md")["charge_in_the_background"]
            await asyncio.wait_for(program(consumer, charge), DEADLINE_S)

    asyncio.run(main())
    assert sorted(seen) == [(partition, offset) for partition in (0, 1) for offset in range(MESSAGES // 2)]


def test_handlers_run_side_by_side(marshal_broker: LocalCluster) -> None:
    """Never more than allowed; one that fails gets its message again."""
    fill(marshal_broker)
    working, most, done = 0, 0, []

    async def main() -> None:
        async with (
            aio.connect(marshal_broker.bootstrap_servers) as marshal,
            marshal.consumer("g", ["orders"], start="earliest") as consumer,
        ):

            async def handle(message: Any) -> None:
                nonlocal working, most
                working += 1
                most = max(most, working)
                await asyncio.sleep(0)
                working -= 1
                if message.offset == 3 and message.delivery_count == 1:
                    raise ValueError("the first time")
                done.append((message.partition, message.offset))
                if len(done) == MESSAGES:
                    consumer.request_stop()

            await asyncio.wait_for(run(BLOCKS[2], "asyncio.md")["side_by_side"](consumer, handle, 4), DEADLINE_S)

    asyncio.run(main())
    assert sorted(done) == [(partition, offset) for partition in (0, 1) for offset in range(MESSAGES // 2)]
    assert 1 < most <= 4


@pytest.mark.parametrize("marshal_broker_kind", ["embedded"])
def test_the_service_runs_in_uvicorn(marshal_broker: LocalCluster, tmp_path: Path) -> None:
    fill(marshal_broker)
    (tmp_path / "service.py").write_text(BLOCKS[3])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "service:app", "--port", str(port), "--log-level", "warning"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KAFKA": marshal_broker.bootstrap_servers}

    def ready() -> Any:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=DEADLINE_S) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            return None

    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as service:
        try:
            until(lambda: (ready() or {}).get("seen") == MESSAGES, "it is ready and has seen all")
            assert ready() == {"claims": 2, "waiting_for": "", "seen": MESSAGES}
            service.send_signal(signal.SIGTERM)
            _, said = service.communicate(timeout=DEADLINE_S)
        finally:
            service.kill()
    assert service.returncode in (0, -signal.SIGTERM), "uvicorn raises the signal again once it has ended"
    assert "Traceback" not in said


def test_the_table_names_every_verb_of_the_front() -> None:
    table = page("asyncio.md").split("## Which front can do what")[1]
    verbs = {name for kind in (aio.AsyncConsumer, aio.AsyncTopic) for name in vars(kind) if not name.startswith("_")}
    said = {"group", "client_id", "closed", "stopping", "name", "close", "get_page", "groups", "delete_group"}
    said |= {"key_index", "update_index", "index_status"}  # "indexes"
    assert {verb for verb in verbs - said if verb not in table} == set()
