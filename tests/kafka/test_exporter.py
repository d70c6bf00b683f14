"""`marshal exporter` on Apache Kafka: a consumer is killed, and what Prometheus reads tells the whole story."""

from __future__ import annotations

import json
import re
import secrets
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from confluent_kafka import Producer
from prometheus_client.parser import text_string_to_metric_families

from tests.support.client_fixtures import ConsumerProcess, until
from tests.support.kafka import Cluster, TopicFactory

ROOT = Path(__file__).parents[2]
PARTITIONS, MESSAGES = 4, 10


class Exporter:
    """The command in a process of its own."""

    def __init__(self, servers: str) -> None:
        command = [sys.executable, "-B", "-m", "marshal_py.cli", "exporter", "--port", "0", "--refresh", "0.2"]
        self.process = subprocess.Popen(
            [*command, "--bootstrap-servers", servers], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        found = re.search(r"http://\S+/metrics", self.process.stderr.readline())
        assert found is not None
        self.url = found[0]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url.replace("/metrics", path), timeout=30) as answer:
            return str(answer.read().decode())

    def figures(self, name: str, group: str) -> list[tuple[dict[str, str], float]]:
        families = text_string_to_metric_families(self.get("/metrics"))
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return [(sample.labels, sample.value) for sample in samples if sample.labels["group"] == group]

    def total(self, name: str, group: str) -> float:
        return sum(value for _, value in self.figures(name, group))

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_killed_consumer_as_prometheus_sees_it(kafka: Cluster, topic: TopicFactory) -> None:
    name, group = topic(PARTITIONS), f"exported-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        exporter = stack.enter_context(Exporter(kafka.bootstrap))
        one, two = (
            stack.enter_context(ConsumerProcess(kafka.bootstrap, group, name, "--client-id", client))
            for client in ("one", "two")
        )

        def owners() -> set[str]:
            found = exporter.figures("marshal_partition_owner", group)
            return {labels["client_id"] for labels, _ in found} if len(found) == PARTITIONS else set()

        until(lambda: owners() == {"one", "two"}, "both own some")
        one.process.send_signal(signal.SIGKILL)
        until(lambda: owners() == {"two"}, "the other one owns all")
        assert exporter.total("marshal_group_failover_seconds_count", group) >= 1
        kinds = {labels["kind"]: value for labels, value in exporter.figures("marshal_group_advisories_total", group)}
        assert kinds["evicted"] + kinds["died"] >= 1, "more if this machine has stood still"
        two.process.send_signal(signal.SIGTERM)
        assert two.wait() == 0
        until(lambda: exporter.total("marshal_group_sessions", group) == 0, "nobody is there")
        assert exporter.figures("marshal_group_not_consumed", group) == [], "nothing waits"
        producer = Producer({"bootstrap.servers": kafka.bootstrap})
        for _ in range(MESSAGES):
            producer.produce(name, b"x", partition=1)
        producer.flush()
        until(lambda: exporter.total("marshal_group_lag", group) == MESSAGES, "the lag is seen")
        causes = until(lambda: exporter.figures("marshal_group_not_consumed", group), "nobody consumes them")
        assert [labels["cause"] for labels, _ in causes] == ["no_consumer"]
        found = json.loads(exporter.get(f"/keda/{group}"))
        assert (found["lag"], found["partitions"], found["sessions"]) == (MESSAGES, 1, 0)
        exporter.process.send_signal(signal.SIGTERM)
        assert exporter.process.wait(30) == 0
