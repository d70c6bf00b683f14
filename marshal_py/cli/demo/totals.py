"""The sum of all journals so far, for the view while the demo runs and for the judge at its end. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from marshal_py.cli.demo.journal import Claimed, Delivered, Entry, Lost, Written


class Handling(NamedTuple):
    """One delivery: when, to which worker, which offset."""

    at: float
    worker: str
    offset: int


class Ownership(NamedTuple):
    """A claim that a worker has read as accepted. A later claim has a greater epoch."""

    at: float
    epoch: int
    worker: str


class Totals:
    """All journals added up. `handled` counts the deliveries of each message; `handlings` lists the same deliveries."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.acknowledged: set[tuple[int, int]] = set()
        self.handled: Counter[tuple[int, int]] = Counter()
        self.handlings: dict[int, list[Handling]] = defaultdict(list)
        self.claims: dict[int, list[Ownership]] = defaultdict(list)
        self.owners: dict[int, Ownership] = {}
        self.next_offset: dict[int, int] = defaultdict(int)  # one after the highest offset that was handled
        self.end: dict[int, int] = defaultdict(int)  # one after the highest offset that was acknowledged
        self.unsound: int = 0

    def add(self, worker: str, entry: Entry) -> None:
        match entry:
            case Delivered(at=at, partition=partition, offset=offset):
                self.handled[partition, offset] += 1
                self.handlings[partition].append(Handling(at, worker, offset))
                self.next_offset[partition] = max(self.next_offset[partition], offset + 1)
                self.unsound += not entry.checksum_fits
            case Written(partition=partition, offset=offset):
                self.acknowledged.add((partition, offset))
                self.end[partition] = max(self.end[partition], offset + 1)
            case Claimed(at=at, partition=partition, epoch=epoch):
                claim = Ownership(at, epoch, worker)
                self.claims[partition].append(claim)
                if partition not in self.owners or self.owners[partition].epoch < epoch:
                    self.owners[partition] = claim
            case Lost(partition=partition):
                if partition in self.owners and self.owners[partition].worker == worker:
                    del self.owners[partition]
            case _:
                pass

    def owner_at(self, partition: int, at: float) -> str:
        """Returns the worker with the newest claim at that time; "" if nobody had claimed the partition."""
        claims = [claim for claim in self.claims[partition] if claim.at <= at]
        return max(claims, key=lambda claim: claim.epoch).worker if claims else ""

    def lag(self, partition: int) -> int:
        return max(0, self.end[partition] - self.next_offset[partition])
