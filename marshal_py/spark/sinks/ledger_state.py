"""The fold of a ledger's entries: which folders count, and what is written of each partition. Must not touch files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from marshal_py.client.values.finished import Finished, Kept, Source
from marshal_py.errors import InvalidOption


class Rewind(NamedTuple):
    """Says that a position was moved back by entry `number`.

    Rows of the partition from offset `to` on, in folders of earlier entries, no longer belong to the tables.
    """

    number: int
    source: Source
    to: int


class LedgerState:
    """Holds the result of folding the entries 0 to `next` - 1."""

    def __init__(self) -> None:
        self.next: int = 0
        self.kept: dict[Source, Kept] = {}
        self.folders: dict[str, dict[str, int]] = {}  # table -> folder -> number of the entry that added it
        self.rewinds: tuple[Rewind, ...] = ()

    def fold(self, content: Mapping[str, Any]) -> None:
        """Folds the next entry, whose content is given. Raises InvalidOption for one of an older version."""
        if "kept" not in content:
            rule = "a folder that this version has written: its entries are an older one's; use a new folder"
            raise InvalidOption("path", f"entry {self.next}", rule)
        for name, text in content["kept"].items():
            self.kept[_source(name)] = _kept(text)
        for table, replaced in content.get("replaces", {}).items():
            for folder in replaced:
                del self.folders[table][folder]
        for table, folder in content["folders"].items():
            self.folders.setdefault(table, {})[folder] = self.next
        for name, to in content.get("rewinds", {}).items():
            source = _source(name)
            self.kept[source] = self.kept[source].back_to(to)
            self.rewinds = (*self.rewinds, Rewind(self.next, source, to))
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
                "kept": texts(self.kept),
                "rewinds": [[number, str(source), to] for number, source, to in self.rewinds],
            }
        )

    @classmethod
    def parse(cls, text: str) -> LedgerState:
        """Returns the state from the JSON that `LedgerState.text` returned."""
        found, state = json.loads(text), cls()
        state.next, state.folders = found["next"], found["folders"]
        state.kept = {_source(name): _kept(one) for name, one in found["kept"].items()}
        state.rewinds = tuple(Rewind(number, _source(name), to) for number, name, to in found["rewinds"])
        return state


def texts(kept: Mapping[Source, Kept]) -> dict[str, list[str]]:
    """Returns what is kept as an entry has it."""
    return {str(source): [str(one.finished), one.token, one.group] for source, one in kept.items()}


def _kept(text: list[str]) -> Kept:
    finished, token, group = text
    return Kept(Finished.parse(finished), token, group)


def _source(name: str) -> Source:
    topic, number, topic_id = name.split(":", 2)
    return Source(topic, int(number), topic_id)
