"""The fold of a ledger's entries: which folders count, and how far each partition is written. Must not touch files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.spark.guards import Position


class Rewind(NamedTuple):
    """Says that a position was moved back by entry `number`.

    Rows of the partition from offset `to` on, in folders of earlier entries, no longer belong to the tables.
    """

    number: int
    tp: TopicPartition
    to: int
    topic_id: str


class LedgerState:
    """Holds the result of folding the entries 0 to `next` - 1."""

    def __init__(self) -> None:
        self.next: int = 0
        self.positions: dict[TopicPartition, Position] = {}
        self.folders: dict[str, dict[str, int]] = {}  # table -> folder -> number of the entry that added it
        self.rewinds: tuple[Rewind, ...] = ()

    def fold(self, content: Mapping[str, Any]) -> None:
        """Folds the next entry, whose content is given. An entry of an older release may lack newer fields."""
        for name, (token, to, *rest) in content["positions"].items():
            tp = _tp(name)
            old = self.positions.get(tp)
            [topic_id] = rest or [""]
            self.positions[tp] = Position(Token.parse(token), to, topic_id, -1 if old is None else old.rewind)
        for table, replaced in content.get("replaces", {}).items():
            for folder in replaced:
                del self.folders[table][folder]
        for table, folder in content["folders"].items():
            self.folders.setdefault(table, {})[folder] = self.next
        for name, to in content.get("rewinds", {}).items():
            tp = _tp(name)
            old = self.positions[tp]
            self.positions[tp] = old._replace(to=to, rewind=self.next)
            self.rewinds = (*self.rewinds, Rewind(self.next, tp, to, old.topic_id))
        if "replaces" in content:  # the merged folder lacks the rows that were taken out
            oldest = min((number for added in self.folders.values() for number in added.values()), default=self.next)
            self.rewinds = tuple(rewind for rewind in self.rewinds if rewind.number > oldest)
        self.next += 1

    def rewinds_after(self, number: int) -> tuple[Rewind, ...]:
        """Returns the rewinds that came after entry `number`, and so remove rows from its folders."""
        return tuple(rewind for rewind in self.rewinds if rewind.number > number)

    def text(self) -> str:
        """Returns the state as JSON, which `parse` reads."""
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
        """Returns the state from the JSON that `LedgerState.text` returned."""
        found, state = json.loads(text), cls()
        state.next, state.folders = found["next"], found["folders"]
        state.positions = {
            _tp(name): Position(Token.parse(token), *rest) for name, (token, *rest) in found["positions"].items()
        }
        state.rewinds = tuple(
            Rewind(number, _tp(name), to, topic_id) for number, name, to, topic_id in found["rewinds"]
        )
        return state


def _tp(name: str) -> TopicPartition:
    topic, _, number = name.rpartition(":")
    return TopicPartition(topic, int(number))
