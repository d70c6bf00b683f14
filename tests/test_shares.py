"""Who runs which file: nothing is left over, and one process alone starts what is dear while the others are busy."""

from __future__ import annotations

from pathlib import Path

from tests.support.shares import KAFKA, LONG, NEITHER, ROOT, SPARK, SPARK_ELSEWHERE, kind_of, next_file

FILES = sorted(str(path.relative_to(ROOT)) for path in Path(ROOT, "tests").rglob("test_*.py"))


def taken_by(*turns: int) -> list[tuple[int, str]]:
    """Processes take one file after the other, in these turns, until there are no more."""
    left, taken = list(FILES), []
    while left:
        process = turns[len(taken) % len(turns)]
        file = next_file(left, process)
        left.remove(file)
        taken.append((process, file))
    return taken


def test_the_files_that_are_named_are_there() -> None:
    assert {*LONG, *SPARK_ELSEWHERE} <= set(FILES)


def test_each_file_is_taken_once_by_any_number_of_processes() -> None:
    for count in (1, 2, 3, 5):
        assert sorted(file for _, file in taken_by(*range(count))) == FILES


def test_a_process_begins_with_its_own_kind_and_with_what_takes_long() -> None:
    for process, kind in enumerate((SPARK, KAFKA, NEITHER, NEITHER)):
        mine = [file for file in FILES if kind_of(file) == kind]
        first = [file for _, file in taken_by(process)][: len(mine)]
        assert sorted(first) == sorted(mine)
        assert {*first[: len(set(LONG) & set(mine))]} == set(LONG) & set(mine)


def test_who_has_nothing_left_starts_no_spark_while_another_kind_is_there() -> None:
    order = [kind_of(file) for _, file in taken_by(1)]
    assert order == sorted(order, key=(KAFKA, NEITHER, SPARK).index)
