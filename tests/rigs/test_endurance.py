"""The rig for long runs: what it compares, its table, and in `make proof` a minute of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path

import pytest

import marshal_py
from tests.rigs import endurance
from tests.rigs.endurance import Half, Outcome, Sample, halves_of, kept, sample, table
from tests.support.judge import TAKE_OVER

MB = 1_024


def outcome(second: Half) -> Outcome:
    counters = {"deliveries": 1_000, "redelivered": 2}
    halves = {"process": [Half(50 * MB, 20, 30, 12.0), second]}
    return Outcome(
        marshal_py.__version__, 1, 3_600, halves, [9.0, 11.0], 4_000_000, 58, counters, {TAKE_OVER: []}, [], ""
    )


def test_a_run_is_halved_after_its_warm_up() -> None:
    """The least of each half, as a peak is no growth; CPU per second from the first to the last sample of a half."""
    samples = [
        Sample(at, 90 * MB - (at == 50.0) * MB, 20, 30 + (at > 60), at / 50) for at in map(float, range(0, 101, 10))
    ]
    samples[0] = Sample(0.0, MB, 1, 1, 0.0)
    first, second = halves_of(samples, 100.0)
    assert (first.rss_kb, first.threads, first.descriptors) == (89 * MB, 20, 30)
    assert (second.rss_kb, second.threads, second.descriptors) == (90 * MB, 20, 30)
    assert first.cpu_ms_per_s == pytest.approx(20.0) == second.cpu_ms_per_s


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (Half(53 * MB, 21, 33, 99.0), []),
        (Half(55 * MB, 20, 30, 12.0), ["process: rss_kb 51200 -> 56320"]),
        (Half(50 * MB, 23, 30, 12.0), ["process: threads 20 -> 23"]),
        (Half(50 * MB, 20, 40, 12.0), ["process: descriptors 30 -> 40"]),
    ],
)
def test_what_has_grown_is_named(second: Half, named: list[str]) -> None:
    assert outcome(second).grown() == named


def test_a_sample_is_what_the_kernel_says_of_a_process() -> None:
    with contextlib.ExitStack() as files:
        for _ in range(20):
            files.enter_context(open(os.devnull, encoding="utf-8"))
        with_files = sample(os.getpid(), 1.0)
    without = sample(os.getpid(), 2.0)
    assert with_files.descriptors - without.descriptors == 20
    assert without.threads >= 1
    assert without.rss_kb > 10 * MB
    assert without.cpu_s > 0.0


def test_the_table_adds_up_the_runs_of_a_version(tmp_path: Path) -> None:
    out = tmp_path / "endurance.jsonl"
    ended = outcome(Half(51 * MB, 20, 30, 14.0))
    older = dataclasses.replace(ended, version="0.1.0")
    out.write_text("".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in (ended, older, ended)))
    assert kept(out) == [ended, ended]
    assert table(kept(out)).splitlines()[1:] == [
        "process            50.0 51.0     20 20        30 30     12.0 14.0",
        "2.00 hours, 116 visitors, 2000 deliveries, 4 of them again, 0 take-overs; the log grew by 4.0 MB/h; "
        "a scrape took 9 11 ms; 0 violations",
    ]


@pytest.mark.proof
def test_two_minutes_without_a_fault(tmp_path: Path) -> None:
    """Too short for a word about memory: caches still fill."""
    out = tmp_path / "endurance.jsonl"
    endurance.main(["--seconds", "120", "--out", str(out), "--keep", str(tmp_path / "kept")])
    [ended] = kept(out)
    assert (ended.violations, ended.void) == ([], "")
    assert set(ended.halves) == {*endurance.STAY, "asyncio", "exporter"}
    assert ended.counters["deliveries"] > 1_000
    assert ended.visits == 2
    assert ended.log_bytes > 0
