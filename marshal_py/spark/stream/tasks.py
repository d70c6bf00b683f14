"""Distributes explicit offset ranges over tasks. Pure functions.

Every task costs Spark some hundredths of a second, and a connection. So ranges of less than TASK_ROWS offsets share
tasks, as long as there are at least TASKS_KEPT tasks. If more tasks are wanted than there are ranges, the longest
ranges are split.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from marshal_py.client.ranges import ClaimedRange

TASK_ROWS: Final = 10_000  # read in about the time that a task costs anyway
# However few rows there are: what the task does with each row may take long. Spark does not tell a Python source how
# many cores there are.
TASKS_KEPT: Final = 8


class Piece(NamedTuple):
    """The offsets [start, to) of one partition with their claim's token. `source`: the column's text (`source_text`),
    of the whole piece also after a split."""

    topic: str
    partition: int
    start: int
    to: int
    token: str
    source: str = ""

    @property
    def rows(self) -> int:
        """Returns the number of offsets. If some of them have no message, there are fewer rows."""
        return self.to - self.start


def pieces_of(ranges: Iterable[ClaimedRange], group: str) -> list[Piece]:
    return [
        Piece(*one[:4], token=str(one.token), source=source_text(one.topic_id, one.start, one.to, group))
        for one in ranges
    ]


def source_text(topic_id: str, start: int, to: int, group: str = "") -> str:
    """Returns the column `source`, for guards.py: the topic's id, the offsets read together, and the group ("" in a
    batch read)."""
    return f"{topic_id} {start} {to} {group}"


def tasks_of(pieces: Iterable[Piece], wanted: int | None = None) -> list[tuple[Piece, ...]]:
    """Returns each task's pieces, without empty ones: `wanted` tasks or more if there are enough offsets; None:
    TASKS_KEPT if there are enough pieces, and none is split. Pieces of different partitions stay so."""
    todo = _split([piece for piece in pieces if piece.rows], wanted or 0)
    alone = [(piece,) for piece in todo if piece.rows >= TASK_ROWS]
    small = [piece for piece in todo if piece.rows < TASK_ROWS]
    by_rows = -(-sum(piece.rows for piece in small) // TASK_ROWS)
    return alone + _share(small, max(by_rows, (wanted or TASKS_KEPT) - len(alone)))


def _split(pieces: Sequence[Piece], wanted: int) -> list[Piece]:
    """Splits the longest pieces into even parts, until there are `wanted` pieces."""
    parts = [1] * len(pieces)
    heap = [(-float(piece.rows), number) for number, piece in enumerate(pieces)]
    heapq.heapify(heap)
    for _ in range(min(wanted, sum(piece.rows for piece in pieces)) - len(pieces)):
        number = heap[0][1]
        parts[number] += 1
        heapq.heapreplace(heap, (-pieces[number].rows / parts[number], number))
    return [
        piece._replace(
            start=piece.start + piece.rows * part // count, to=piece.start + piece.rows * (part + 1) // count
        )
        for piece, count in zip(pieces, parts, strict=True)
        for part in range(count)
    ]


def _share(pieces: Sequence[Piece], count: int) -> list[tuple[Piece, ...]]:
    """Distributes pieces over at most `count` tasks: the longest first, each to the one with the fewest offsets."""
    tasks: list[list[Piece]] = [[] for _ in range(min(max(1, count), len(pieces)))]
    heap = [(0, number) for number in range(len(tasks))]
    for piece in sorted(pieces, key=lambda piece: -piece.rows):
        rows, number = heap[0]
        tasks[number].append(piece)
        heapq.heapreplace(heap, (rows + piece.rows, number))
    return [tuple(task) for task in tasks]
