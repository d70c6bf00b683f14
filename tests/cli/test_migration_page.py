"""The check of docs/operations.md on the way back: where the mirror is up to date, no word of it alarms."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import marshal_py
from marshal_py.testing import EmbeddedCluster
from tests.cli.shell import Shell, wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
PARTITIONS = 3  # the last one is empty


def test_the_check_of_the_mirror_alarms_only_with_cause() -> None:
    back = PAGE.read_text(encoding="utf-8").split("\n## Back to Kafka's consumer groups\n")[1]
    release, check = (
        shlex.split(found)[1:] for found in re.findall(r"^ +(marshal (?:pause|set-position).*)$", back, re.M)
    )
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", PARTITIONS)
        for partition in range(PARTITIONS - 1):
            cluster.produce_many("orders", [b"x"] * 5, partition=partition)
        shell = Shell(cluster.bootstrap_servers)
        with (
            marshal_py.connect(cluster.bootstrap_servers) as marshal,
            marshal.consumer("billing", ["orders"], start="committed|earliest", heartbeat_interval_s=1) as consumer,
        ):
            handled = 0
            while handled < 5 * (PARTITIONS - 1):
                batch = consumer.fetch(10, min_messages=10, expires_s=0.5)
                handled += len(batch)
                batch.ack()
            consumer.flush()
            assert shell.run(*release).exit_code == 0

            def mirrored() -> bool:
                rows = shell.json(*check)["partitions"]
                return len(rows) == PARTITIONS and all(row["target"] == row["position"] for row in rows)

            wait_until(mirrored, "the mirror is up to date")
            looked = shell.run(*check)
            assert looked.exit_code == 0
            assert "refused" not in looked.output
            assert f"0 of {PARTITIONS} positions would move to another offset" in looked.output
            elsewhere = ["earliest" if word == "committed" else word for word in check]
            assert f"2 of {PARTITIONS} positions would move to another offset" in shell.run(*elsewhere).output
