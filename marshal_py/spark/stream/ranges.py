"""A batch read of format("marshal") with the option `ranges`: explicit offset ranges, which claimed batches have taken.

It turns options into tasks; range_reader.py reads them. A batch read between two points is in backfills.py. Options are
`ranges` (the JSON that `ranges_json` writes), `bootstrap.servers`, `kafka.*` (any librdkafka setting of a consumer),
`columns`, `min_partitions`, `read_timeout_s` and `once` (true: a task that Spark tries again fails).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from marshal_py.errors import InvalidOption
from marshal_py.spark.stream.options import ReadOptions, check_names, flag
from marshal_py.spark.stream.range_reader import partitions_of, read_ranges
from marshal_py.spark.stream.tasks import Piece

if TYPE_CHECKING:
    import pyarrow as pa

OPTIONS: Final = ("ranges", "bootstrap.servers", "columns", "min_partitions", "read_timeout_s", "once")


def ranges_json(pieces: Iterable[Piece]) -> str:
    """Returns the value of the option `ranges`: [[topic, partition, start, to, token, source], ...]."""
    return json.dumps([list(piece) for piece in pieces])


def _pieces(text: str) -> list[Piece]:
    rule = "a JSON list of [topic, partition, start, to, token, source]; ranges_json writes it"
    try:
        pieces = [Piece(*item) for item in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise InvalidOption("ranges", text, rule) from error
    seen: set[tuple[str, int]] = set()
    for piece in pieces:
        kinds = (str, int, int, int, str, str)
        if not all(type(field) is kind for field, kind in zip(piece, kinds, strict=True)):
            raise InvalidOption("ranges", list(piece), rule)
        if not 0 <= piece.start <= piece.to or piece.partition < 0:
            raise InvalidOption("ranges", list(piece), "0 <= start <= to, and a partition from 0 on")
        if (piece.topic, piece.partition) in seen:
            raise InvalidOption("ranges", list(piece), "one range of each partition; others in a read of their own")
        seen.add((piece.topic, piece.partition))
    return pieces


@dataclass(frozen=True)
class RangeOptions(ReadOptions):
    """The checked options of a read of explicit ranges."""

    pieces: tuple[Piece, ...]
    once: bool

    @classmethod
    def of(cls, given: Mapping[str, str]) -> RangeOptions:
        """Parses the options. Raises InvalidOption."""
        check_names(given, OPTIONS)
        pieces = tuple(_pieces(given["ranges"]))
        return cls(pieces=pieces, once=flag(given, "once"), **vars(ReadOptions.parse(given)))


class RangesReader(DataSourceReader):
    """Plans and reads the ranges. Only tasks connect to Kafka."""

    def __init__(self, options: RangeOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return partitions_of(self._options.pieces, self._options, once=self._options.once)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_ranges(partition)
