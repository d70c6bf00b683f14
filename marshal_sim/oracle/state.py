"""The oracle's world state (section 5 of PROTOCOL.md) and its digests (section 6).

Plain containers and sums over them: no rule is decided here. Like the rest of the oracle it was written from
PROTOCOL.md alone and imports nothing of marshal_py but the oracle's own decoder.
"""

from dataclasses import dataclass, field
from typing import Any

import mmh3

from marshal_sim.oracle.wire import Record

# ---------------------------------------------------------------------------------------------------------------------
# State (section 5). -1 is "none" everywhere; figures begin at 0, generations where `Group.partition` says.


@dataclass
class Topic:
    count: int
    first_count: int
    offset: int
    id: str = ""


@dataclass
class Session:
    id: int
    join: dict[str, Any]
    join_body: bytes
    extended: int
    mark: int = -1
    ready: tuple[int, ...] = ()
    idle_ms: int = 0
    sequence: int = 0


@dataclass
class Partition:
    owner: int = -1
    epoch: int = -1
    position: int = -1
    generation: int = 0
    version: int = -1
    last_owner: int = -1
    successor: int = -1
    lag: int = 0
    in_flight: int = 0
    attempts: int = 0
    floor: int = -1
    progress: bytes = b""
    parked: str = ""

    def new_generation(self) -> None:
        self.generation += 1
        self.lag = self.in_flight = self.attempts = 0
        self.floor, self.progress, self.parked = -1, b"", ""


@dataclass
class Group:
    mode: int = 0
    pause_change: int = -1
    pause_duration_ms: int = 0
    config: Record | None = None
    config_body: bytes = b""
    config_offset: int = -1
    opaque_at: int = -1
    deleted_at: int = -1  # the offset of the last deletion
    topics: dict[str, Topic] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    partitions: dict[tuple[str, int], Partition] = field(default_factory=dict)
    # What the verdict on the last accepted ClaimingMessages names (F5.2): the indexes of its ranges. No state.
    granted: tuple[int, ...] = field(default=(), compare=False)
    # What the verdict on the last accepted ClaimingPartition names (F4.5). No state.
    unsettled: tuple[int, int] | None = field(default=None, compare=False)

    @property
    def paused(self) -> bool:
        return self.pause_duration_ms > 0

    @property
    def deleted(self) -> bool:
        return self.config is not None and bool(self.config.fields["deleted"])

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Returns the public keys of those who may administer the group (F11.1)."""
        return tuple(self.config.fields["admin_keys"]) if self.config is not None else ()

    def pause_held_by(self, token: int) -> bool:
        """Returns True if a pause runs and `token` is its token."""
        return self.paused and token == self.pause_change

    def partition(self, topic: str, number: int) -> Partition:
        """Returns the known partition, or a new one. A new one's generation begins after the group's last deletion."""
        return self.partitions.get((topic, number)) or Partition(generation=self.deleted_at + 1)

    def claim(self, session: int, epoch: int) -> tuple[tuple[str, int], Partition] | None:
        """Returns the live claim of this session with this epoch, be it on a partition, a whole topic or the pin."""
        for place, partition in self.partitions.items():
            if partition.owner == session and partition.epoch == epoch:
                return place, partition
        return None

    def below_count(self, topic: str, partition: int) -> bool:
        return topic in self.topics and partition < self.topics[topic].count

    def free(self, partition: Partition, successor: int) -> None:
        partition.last_owner, partition.successor = partition.owner, successor
        partition.owner = partition.epoch = partition.floor = -1

    def end_session(self, session: int) -> None:
        """Ends a session and frees its claims. Positions, generations, versions, figures and progress stay, and so
        do floors in at-most-once mode (F3.3).
        """
        for partition in self.partitions.values():
            if partition.owner == session:
                floor = partition.floor if self.mode == 2 else -1
                self.free(partition, -1)
                partition.floor = floor
        del self.sessions[session]


# ---------------------------------------------------------------------------------------------------------------------
# Digests (section 6)


def word_hash(data: bytes) -> int:
    """Returns the first 64-bit word of MurmurHash3 x64-128 with seed 0, which PROTOCOL.md calls H."""
    # By keyword: mmh3 5.3.1 reads a fourth positional argument of False as True and answers signed.
    return mmh3.hash64(data, seed=0, x64arch=True, signed=False)[0]


def text_hash(text: str) -> int:
    """Returns the hash of a text, which G3 calls `name`."""
    return word_hash(text.encode("utf-8"))


def packed(*numbers: int) -> bytes:
    """Returns every number in 8 bytes, little-endian. Two's complement lets -1 and unsigned hashes share one form."""
    return b"".join((number % 2**64).to_bytes(8, "little") for number in numbers)


def chain_step(chain: int, checkpoint: int, values: list[bytes | None]) -> int:
    """Returns the chain digest of `checkpoint`, from the digest before it (`chain`) and the log's values since (G2).

    A null value has the length FF FF FF FF.
    """
    data = packed(chain, checkpoint)
    for value in values:
        data += b"\xff\xff\xff\xff" if value is None else len(value).to_bytes(4, "little")
    for value in values:
        data += value or b""
    return word_hash(data)


def group_digest(name: str, group: Group) -> int:
    """Returns the state digest of a group. It is a sum, so the order of the entries does not matter (G3)."""
    config = word_hash(group.config_body) if group.config is not None else 0
    pause = (group.pause_change, group.pause_duration_ms)
    rows: list[tuple[int, ...]] = [
        (1, text_hash(name), group.mode, *pause, group.config_offset, config, group.opaque_at, group.deleted_at)
    ]
    if group.keys:
        rows.append((6, text_hash(name), word_hash(b"".join(group.keys))))
    for title, topic in group.topics.items():
        named = text_hash(topic.id) if topic.id else 0
        rows.append((2, text_hash(title), topic.count, topic.first_count, topic.offset, named))
    for live in group.sessions.values():
        ready = word_hash(packed(*live.ready)) if live.ready else 0
        rows.append(
            (3, live.id, word_hash(live.join_body), live.extended, live.mark, ready, live.idle_ms, live.sequence)
        )
    for (title, number), part in group.partitions.items():
        owned = (part.owner, part.epoch, part.position, part.generation, part.version, part.last_owner, part.successor)
        figures = (part.lag, part.in_flight, part.attempts)
        progress = word_hash(part.progress) if part.progress else 0
        parked = text_hash(part.parked) if part.parked else 0
        rows.append((4, text_hash(title), number, *owned, *figures, part.floor, progress, parked))
    return sum(word_hash(packed(*row)) for row in rows) % 2**64
