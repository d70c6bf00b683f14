"""The example pipeline, killed and restarted; and its judge, which must detect every fault."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.pipeline.__main__ import HOUR_MS, TOO_SLOW, Run, Seen, judge
from examples.pipeline.orders import PARTITIONS, make, parse
from tests.support.kafka import Cluster

ROOT = Path(__file__).resolve().parents[2]
ORDERS = 2_400


@pytest.mark.timeout(400)
def test_the_pipeline_survives_kills_without_losing_or_doubling(kafka: Cluster, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-B",
        "-m",
        "examples.pipeline",
        "--orders",
        str(ORDERS),
        "--kill",
        "--folder",
        str(tmp_path),
        "--bootstrap-servers",
        kafka.bootstrap,
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=380, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert said.count("kill -9") == 2
    assert "produced = handled + dead-lettered: yes" in said
    assert "lost 0, doubled in output 0" in said
    assert said.split("produced", 2)[1].split()[0] == str(ORDERS + PARTITIONS)


def truth() -> tuple[dict[str, Any], list[Seen], list[Seen]]:
    """A topic, its dead letters and a report that is right."""
    topic, dead, ends = list[Seen](), list[Seen](), Counter[int]()
    for made in make(1_000, 7):
        topic.append(Seen(made.partition, ends[made.partition], made.value, {}))
        ends[made.partition] += 1
    stored, hours = list[list[int]](), Counter[tuple[int, str]]()
    newest_ms = max(parse(seen.value).event_ms for seen in topic)
    for seen in topic:
        order = parse(seen.value)
        if order.problem:
            dead.append(Seen(0, len(dead), seen.value, {"origin": f"{seen.partition}:{seen.offset}".encode()}))
            continue
        stored.append([seen.partition, seen.offset, 1])
        hour = order.event_ms // HOUR_MS * HOUR_MS
        if newest_ms - hour > 2 * HOUR_MS:
            hours[hour, order.product] += 1
    return {"stored": stored, "hours": [[*hour, n] for hour, n in hours.items()], "days": 2}, topic, dead


def test_the_judge_says_yes_to_the_truth() -> None:
    assert judge(*truth())


FAULTS = ["lost", "doubled", "invented", "not buried", "hour lost", "hour twice", "hour wrong"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_judge_says_no_to_each_fault(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    report, topic, dead = truth()
    match fault:
        case "lost":
            report["stored"].pop()
        case "doubled":
            report["stored"][3][2] = 2
        case "invented":
            report["stored"].append([0, 99_999, 1])
        case "not buried":
            dead.pop()
        case "hour lost":
            report["hours"].pop(5)
        case "hour twice":
            report["hours"].append(report["hours"][5])
        case "hour wrong":
            report["hours"][5][2] += 1
    assert not judge(report, topic, dead)
    assert "lost 0, doubled in output 0" not in capsys.readouterr().out or fault.startswith("hour")


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b"\xff",
        b'{"customer": 1, "product": "tea", "cents": 5, "event_ms": 1}',
        b'{"customer": "a", "product": "tea", "cents": true, "event_ms": 1}',
    ],
)
def test_every_value_is_parsed_or_has_a_problem(value: bytes | None) -> None:
    assert parse(value).problem


def test_the_same_seed_makes_the_same_orders() -> None:
    made = list(make(500, 3))
    assert made == list(make(500, 3))
    assert made != list(make(500, 4))
    problems = sum(bool(parse(one.value).problem) for one in made)
    assert 0 < problems < 50


@pytest.mark.parametrize(("said", "starts"), [(TOO_SLOW, 2), ("another error", 1)])
def test_only_a_job_that_spark_had_no_time_for_is_started_again(tmp_path: Path, said: str, starts: int) -> None:
    run, started = object.__new__(Run), list[str]()
    run.folder, run.deadline, run.said, run.processes = tmp_path, math.inf, {"job": 0}, {}

    def start(name: str) -> None:
        started.append(name)
        failing = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
        failing.wait()
        run.said[name] = len((tmp_path / "job.log").read_bytes()) if len(started) > 1 else 0
        run.processes[name] = failing

    run.start = start  # type: ignore[method-assign]
    (tmp_path / "job.log").write_text(said)
    start("job")
    with pytest.raises(SystemExit, match="job ended"):
        run.wait(lambda: False, "nothing")
    assert len(started) == starts
