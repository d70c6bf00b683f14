"""The fold of a ledger's entries: which folders count, how far each partition is written. Reads and writes no file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.spark.guards import Position


class Rewind(NamedTuple):
    """Rows of the partition from offset `to` on, in folders of entries before `number`, do not count."""

    number: int
    tp: TopicPartition
    to: int
    topic_id: str


class LedgerState:
    """What entries 0 to `next` - 1 say together."""

    def __init__(self) -> None:
        self.next = 0
        self.positions: dict[TopicPartition, Position] = {}
        self.folders: dict[str, dict[str, int]] = {}  # table -> folder -> number of its entry
        self.rewinds: tuple[Rewind, ...] = ()

    def fold(self, content: Mapping[str, Any]) -> None:
        """The next entry. An entry of an older release may lack what came later."""
        for name, (token, to, *rest) in content["positions"].items():
            tp = _tp(name)
            was = self.positions.get(tp)
            [topic_id] = rest or [""]
            self.positions[tp] = Position(Token.parse(token), to, topic_id, -1 if was is None else was.rewind)
        for table, replaced in content.get("replaces", {}).items():
            for folder in replaced:
                del self.folders[table][folder]
        for table, folder in content["folders"].items():
            self.folders.setdefault(table, {})[folder] = self.next
        for name, to in content.get("rewinds", {}).items():
            tp = _tp(name)
            was = self.positions[tp]
            self.positions[tp] = was._replace(to=to, rewind=self.next)
            self.rewinds = (*self.rewinds, Rewind(self.next, tp, to, was.topic_id))
        if "replaces" in content:  # a compaction took the rows out for good
            oldest = min((number for born in self.folders.values() for number in born.values()), default=self.next)
            self.rewinds = tuple(rewind for rewind in self.rewinds if rewind.number > oldest)
        self.next += 1

    def rewinds_after(self, number: int) -> tuple[Rewind, ...]:
        """Those that concern the folders of that entry."""
        return tuple(rewind for rewind in self.rewinds if rewind.number > number)

    def text(self) -> str:
        """As JSON."""
        return json.dumps(
            {
                "next": self.next,
                "folders": self.folders,
                "positions": {str(tp): [str(at.token), *at[1:]] for tp, at in self.positions.items()},
                "rewinds": [[number, str(tp), to, topic_id] for number, tp, to, topic_id in self.rewinds],
            }
        )

    @classmethod
    def parse(cls, text: str) -> LedgerState:
        """What `text` returned."""
        found, made = json.loads(text), cls()
        made.next, made.folders = found["next"], found["folders"]
        made.positions = {
            _tp(name): Position(Token.parse(token), *rest) for name, (token, *rest) in found["positions"].items()
        }
        made.rewinds = tuple(Rewind(number, _tp(name), to, topic_id) for number, name, to, topic_id in found["rewinds"])
        return made


def _tp(name: str) -> TopicPartition:
    topic, _, number = name.rpartition(":")
    return TopicPartition(topic, int(number))
