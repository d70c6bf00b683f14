"""The service examples/calls.py in uvicorn: fifty calls at once, in order per key, through a rolling restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.brokers import free_ports
from tests.support.kafka import Cluster, wait_until
from tests.support.pages import ROOT, blocks

PARTITIONS, KEYS, MESSAGES = 6, 60, 1_800
WORKERS = 50
CALL_S = 0.02  # of the slow service
DEADLINE_S = 60.0


class Gateway(ThreadingHTTPServer):
    """A slow service that notes its calls. Each has a value `key number`."""

    daemon_threads = True
    request_queue_size = 4 * WORKERS

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Call)
        self.lock = threading.Lock()
        self.numbers: dict[str, list[int]] = defaultdict(list)  # by key, as their calls began
        self.names: Counter[str] = Counter()  # idempotency keys
        self.working: Counter[str] = Counter()
        self.at_once = 0
        self.faults: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def finished(self) -> int:
        with self.lock:
            return self.names.total() - self.working.total()

    def begin(self, key: str, number: int, name: str) -> None:
        with self.lock:
            if self.working[key]:
                self.faults.append(f"{key} {number} beside another of its key")
            self.working[key] += 1
            self.numbers[key].append(number)
            self.names[name] += 1
            self.at_once = max(self.at_once, self.working.total())

    def end(self, key: str) -> None:
        with self.lock:
            self.working[key] -= 1


class Call(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_POST(self) -> None:
        key, number = self.rfile.read(int(self.headers["Content-Length"])).decode().split()
        self.server.begin(key, int(number), self.headers["Idempotency-Key"])
        time.sleep(CALL_S)
        self.server.end(key)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


@contextmanager
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Services:
    """Runs the program, several times."""

    def __init__(self, folder: Path, kafka: str, at: Gateway, topic: str) -> None:
        [program] = blocks("examples/calls.py")
        for name in ('"orders"', '"billing"'):
            assert program.count(name) == 1
        program = program.replace('"orders"', f'"{topic}"').replace('"billing"', f'"{topic}"')
        (folder / "service.py").write_text(program, encoding="utf-8")
        self._folder = folder
        path = os.pathsep.join((str(folder), str(ROOT)))
        self._environment = {**os.environ, "PYTHONPATH": path, "KAFKA": kafka, "GATEWAY": at.url}
        self.running: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        [port] = free_ports(1)
        command = [sys.executable, "-m", "uvicorn", "service:app", "--port", str(port), "--log-level", "warning"]
        out = (self._folder / f"{port}.log").open("w", encoding="utf-8")
        self.running.append(
            subprocess.Popen(command, cwd=self._folder, env=self._environment, stdout=out, stderr=out, text=True)
        )
        out.close()

    def restart(self) -> None:
        """Ends the oldest one as Kubernetes does, and starts another one."""
        ending = self.running.pop(0)
        ending.send_signal(signal.SIGTERM)
        assert ending.wait(DEADLINE_S) in (0, -signal.SIGTERM)
        self.start()

    def close(self) -> None:
        for one in self.running:
            one.kill()
            one.wait(DEADLINE_S)


def test_a_rolling_restart_keeps_the_order_of_each_key_and_repeats_no_call(kafka: Cluster, tmp_path: Path) -> None:
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(60)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True})
    for number in range(MESSAGES):
        producer.produce(topic, f"k{number % KEYS} {number // KEYS}".encode(), f"k{number % KEYS}".encode())
    assert producer.flush(60) == 0
    with gateway() as at:
        services = Services(tmp_path, kafka.bootstrap, at, topic)
        try:
            services.start()
            services.start()
            for share in (1, 2):
                wait_until(lambda share=share: at.finished >= share * MESSAGES // 4, DEADLINE_S, "some calls")
                services.restart()
            wait_until(lambda: at.finished >= MESSAGES, DEADLINE_S, "all calls")
        finally:
            services.close()
        said = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("*.log"))
    assert "Traceback" not in said, said
    assert not at.faults
    assert dict(at.numbers) == {f"k{key}": list(range(MESSAGES // KEYS)) for key in range(KEYS)}
    assert set(at.names.values()) == {1}
    assert at.at_once <= 2 * WORKERS
    assert at.at_once > PARTITIONS, "handlers of one partition run at once"
