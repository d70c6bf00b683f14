"""Every test file runs once, one process starts Spark while the others have work, and `--quick` runs what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.file_scheduler import (
    ALWAYS,
    KAFKA,
    NEITHER,
    QUICK_S,
    ROOT,
    SPARK,
    SPARK_ELSEWHERE,
    cpu_s,
    is_quick,
    kind_of,
    next_file,
    wall_s,
)

FILES = sorted(str(path.relative_to(ROOT)) for path in Path(ROOT, "tests").rglob("test_*.py"))
COLLECT_TIMEOUT_S = 120.0


def taken_by(*turns: int) -> list[tuple[int, str]]:
    """The (process, file) pairs when processes take files in these turns, until none is left."""
    left, taken = list(FILES), []
    while left:
        process = turns[len(taken) % len(turns)]
        file = next_file(left, process)
        left.remove(file)
        taken.append((process, file))
    return taken


def test_the_named_files_exist() -> None:
    assert {*ALWAYS, *SPARK_ELSEWHERE} <= set(FILES)


def test_each_file_is_taken_once_by_any_number_of_processes() -> None:
    for count in (1, 2, 3, 5):
        assert sorted(file for _, file in taken_by(*range(count))) == FILES


def test_a_process_begins_with_its_own_kind_and_with_the_slowest_files() -> None:
    for process, kind in enumerate((SPARK, KAFKA, NEITHER, NEITHER)):
        mine = [file for file in FILES if kind_of(file) == kind]
        first = [file for _, file in taken_by(process)][: len(mine)]
        assert sorted(first) == sorted(mine)
        lengths = {2: cpu_s, 3: lambda file: wall_s(file) - cpu_s(file)}
        length_s = lengths.get(process, wall_s)
        assert [length_s(file) for file in first] == sorted(map(length_s, mine), reverse=True)
    assert len({wall_s(file) for file in FILES}) > 50, "the table is read"


def test_quick_leaves_out_what_takes_long() -> None:
    quick = [file for file in FILES if is_quick(file)]
    assert {file for file in FILES if kind_of(file) == NEITHER and cpu_s(file) > QUICK_S} - set(quick)
    assert all(cpu_s(file) <= QUICK_S for file in quick if file not in ALWAYS)
    assert len(quick) > 100
    assert is_quick("tests/client/test_of_tomorrow.py"), "a new file has no line yet"


def test_a_process_without_files_of_its_kind_starts_spark_last() -> None:
    order = [kind_of(file) for _, file in taken_by(1)]
    assert order == sorted(order, key=(KAFKA, NEITHER, SPARK).index)


def test_quick_collects_every_other_file() -> None:
    """A folder that holds quick and slow files, and those of Kafka and Spark, which are ignored before their import."""
    folders = ("tests/marshal_sim", "tests/kafka", "tests/spark")
    command = [sys.executable, "-B", "-m", "pytest", "--quick", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True, timeout=COLLECT_TIMEOUT_S)
    assert done.returncode == 0, done.stdout
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert collected == {file for file in FILES if file.startswith(folders) and is_quick(file)}
