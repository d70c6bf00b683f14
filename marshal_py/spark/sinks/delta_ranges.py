"""What a Delta table has of each source, in its app transactions (`txn` actions). Must not read or write rows.

They are in every checkpoint of the table's log, so they survive its clean-up. Each is a name and a whole number, and
can be asked for by its name alone. So a source has several, and all their names begin with marshal/TOPIC:PARTITION:

    /ids N, /id/I/0..4               the topic ids, as numbers of 7 bytes each
    /ID/ranges N, /ID/range/I/start and /to, /ID/unclear/start and /to   the finished offsets
    /ID/token/GROUP/0..3             the newest token of a group: its incarnation in three numbers, its epoch

A commit writes those that have changed, in the same commit as the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from deltalake import DeltaTable, Transaction

from marshal_py.client.values.finished import Finished, Kept, Source, Span
from marshal_py.errors import InvalidOption
from marshal_py.protocol.wire.fencing_token import Token

_BYTES: Final = 7  # of a text or a token in one number, which has 63 bits
_ID_PARTS: Final = 5  # of the longest topic id: 32 characters
_INCARNATION: Final = ((0, 7), (7, 14), (14, 16))  # the bytes of an incarnation in each number


def known_in(table: DeltaTable, spans: Mapping[Source, Span]) -> dict[Source, Kept]:
    """Returns what the table knows of these sources, with the tokens of the spans' groups. Raises InvalidOption for an
    older version's table."""
    found = {}
    for source, span in spans.items():
        if table.transaction_version(f"marshal/{source.tp}/log") is not None:
            rule = "a table written by this version: its positions are an older one's; use a new table"
            raise InvalidOption("uri", table.table_uri, rule)
        ranges = _finished(table, source)
        if ranges is not None:
            token = _token(table, source, span.group) if span.group else ""
            found[source] = Kept(ranges, token, span.group if token else "")
    return found


def sources_in(table: DeltaTable, topic: str, partition: int) -> dict[Source, Kept]:
    """Returns what the table knows of this partition of each topic of the name."""
    sources = [Source(topic, partition, one) for one in _ids(table, f"marshal/{topic}:{partition}")]
    return {source: Kept(_finished(table, source) or Finished()) for source in sources}


def transactions(table: DeltaTable, after: Mapping[Source, Kept]) -> list[Transaction]:
    """Returns what a commit must write so that the table knows `after`."""
    wanted: dict[str, int] = {}
    added: dict[str, list[str]] = {}
    for source, kept in sorted(after.items()):
        known, prefix = f"marshal/{source.tp}", f"marshal/{source.tp}/{source.topic_id}"
        ids = added.setdefault(known, _ids(table, known))
        if source.topic_id not in ids:
            ids.append(source.topic_id)
            text = source.topic_id.encode()
            parts = [text[at : at + _BYTES] for at in range(0, _ID_PARTS * _BYTES, _BYTES)]
            wanted |= {f"{known}/id/{len(ids) - 1}/{n}": int.from_bytes(part, "big") for n, part in enumerate(parts)}
            wanted[f"{known}/ids"] = len(ids)
        ranges, unclear = kept.finished
        wanted[f"{prefix}/ranges"] = len(ranges)
        for at, one in enumerate(ranges):
            wanted |= _pair(f"{prefix}/range/{at}", one)
        wanted |= _pair(f"{prefix}/unclear", unclear)
        if kept.token:
            token = Token.parse(kept.token)
            parts = [token.incarnation[start:to] for start, to in _INCARNATION]
            numbers = [*(int.from_bytes(part, "big") for part in parts), token.epoch]
            wanted |= {f"{prefix}/token/{kept.group}/{at}": number for at, number in enumerate(numbers)}
    return [Transaction(name, number) for name, number in wanted.items() if table.transaction_version(name) != number]


def _pair(name: str, one: tuple[int, int]) -> dict[str, int]:
    return {f"{name}/start": one[0], f"{name}/to": one[1]}


def _numbers(table: DeltaTable, names: Iterable[str]) -> list[int]:
    return [table.transaction_version(name) or 0 for name in names]


def _finished(table: DeltaTable, source: Source) -> Finished | None:
    prefix = f"marshal/{source.tp}/{source.topic_id}"
    count = table.transaction_version(f"{prefix}/ranges")
    if count is None:
        return None
    pairs = [
        tuple(_numbers(table, _pair(name, (0, 0))))
        for name in (*(f"{prefix}/range/{at}" for at in range(count)), f"{prefix}/unclear")
    ]
    ranges = [(start, to) for start, to in pairs]
    return Finished(tuple(ranges[:-1]), ranges[-1])


def _token(table: DeltaTable, source: Source, group: str) -> str:
    prefix = f"marshal/{source.tp}/{source.topic_id}/token/{group}"
    if table.transaction_version(f"{prefix}/3") is None:
        return ""
    *parts, epoch = _numbers(table, (f"{prefix}/{at}" for at in range(4)))
    sizes = (to - start for start, to in _INCARNATION)
    return str(Token(b"".join(part.to_bytes(size, "big") for part, size in zip(parts, sizes, strict=True)), epoch))


def _ids(table: DeltaTable, known: str) -> list[str]:
    found = []
    for at in range(table.transaction_version(f"{known}/ids") or 0):
        parts = _numbers(table, (f"{known}/id/{at}/{part}" for part in range(_ID_PARTS)))
        found.append(b"".join(part.to_bytes(_BYTES, "big").lstrip(b"\0") for part in parts).decode())
    return found
