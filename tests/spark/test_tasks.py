"""How ranges are distributed over tasks: each offset once, small ranges share a task, large ones can be split."""

from __future__ import annotations

import pytest

from marshal_py.spark.stream.range_reader import TASK_ROWS, TASKS_KEPT, Piece, tasks_of


def pieces(*rows: int) -> list[Piece]:
    return [Piece("t", number, 5, 5 + count, f"token-{number}") for number, count in enumerate(rows)]


def offsets(tasks: list[tuple[Piece, ...]]) -> list[tuple[int, str, int]]:
    return sorted((one.partition, one.token, at) for task in tasks for one in task for at in range(one.start, one.to))


@pytest.mark.parametrize("wanted", [None, 1, 3, 7, 64, 1000])
@pytest.mark.parametrize("rows", [(), (0,), (1,), (3, 0, 9), (TASK_ROWS * 3, 1, 1), (100,) * 64, (TASK_ROWS,) * 3])
def test_tasks_hold_every_offset_once_and_a_partition_once(rows: tuple[int, ...], wanted: int | None) -> None:
    tasks = tasks_of(pieces(*rows), wanted)
    assert offsets(tasks) == offsets([(one,) for one in pieces(*rows)])
    assert all(task and len({one.partition for one in task}) == len(task) for task in tasks)
    if wanted:
        assert len(tasks) >= min(wanted, sum(rows))


def test_small_ranges_share_tasks() -> None:
    """64 partitions of 100 messages are eight tasks of the same size, and not 64."""
    tasks = tasks_of(pieces(*(100,) * 64))
    assert len(tasks) == TASKS_KEPT
    assert {sum(one.rows for one in task) for task in tasks} == {800}


def test_a_large_range_has_a_task_to_itself() -> None:
    tasks = tasks_of(pieces(TASK_ROWS, *(1_000,) * 200, TASK_ROWS))
    alone = [task for task in tasks if len(task) == 1]
    assert len(alone) == 2
    assert all(sum(one.rows for one in task) == TASK_ROWS for task in tasks)


def test_few_ranges_are_not_split() -> None:
    assert len(tasks_of(pieces(1, 2, 3))) == 3


def test_more_tasks_than_ranges_split_the_longest() -> None:
    tasks = tasks_of(pieces(10, 1_000), 4)
    assert sorted((one.partition, one.rows) for (one,) in tasks) == [(0, 10), (1, 333), (1, 333), (1, 334)]


def test_min_partitions_never_reduces_the_number_of_tasks() -> None:
    """`min_partitions` is a lower bound."""
    assert len(tasks_of(pieces(TASK_ROWS, TASK_ROWS), 1)) == 2
