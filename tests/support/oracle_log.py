"""A log under the oracle alone, for the oracle's own tests: records built by hand, and its verdict on each."""

import struct
from typing import Any

from marshal_sim.oracle.oracle import Oracle, Partition, Verdict
from tests.support.wire import genesis, record

(
    JOIN,
    HEARTBEAT,
    LEAVE,
    EVICT,
    CLAIM,
    RELEASE,
    GRANT,
    PAUSE,
    MOVE,
    TOPOLOGY,
    CONFIG,
    STEP_DOWN,
    NOTE,
    SNAPSHOT,
    SEEK,
) = range(1, 16)
GROUP = "billing"
NOW = 10**6
INSTANCE = bytes(16)


class Log:
    """A log with one partition, written and folded at once; every record returns what the oracle said."""

    def __init__(self, partitions: int = 1, start: bool = True) -> None:
        self.oracle = Oracle()
        if start:
            assert self.put(genesis(partitions)).outcome == "accepted"

    def put(self, value: bytes | None) -> Verdict:
        return self.oracle.apply(self.oracle.next_offset, value)

    def say(self, number: int, *fields: object, group: str = GROUP) -> str:
        """`accepted`, or the reason why not."""
        verdict = self.put(record(group, number, *fields))
        assert verdict.group == group
        assert (verdict.outcome == "accepted") == (verdict.reason == "")
        return verdict.reason or verdict.outcome

    def must(self, number: int, *fields: object) -> int:
        """Accepted, and the offset of it."""
        assert self.say(number, *fields) == "accepted"
        return self.last

    @property
    def last(self) -> int:
        return self.oracle.next_offset - 1

    @property
    def group(self) -> Any:
        return self.oracle.groups[GROUP]

    def partition(self, number: int = 0, topic: str = "t") -> Partition:
        found = self.group.partitions[topic, number]
        assert isinstance(found, Partition)
        return found

    def join(self, client: str = "c", mode: int = 1, predecessor: int = -1) -> int:
        instance = struct.pack(">QQ", 1, self.oracle.next_offset)
        return self.must(JOIN, client, instance, mode, 1000, ["t"], predecessor)

    def owner(self, mode: int = 1, number: int = 0, start: int = 100) -> tuple[int, int]:
        """A session that owns a partition of a topic with four: (session, epoch)."""
        session = self.join(mode=mode)
        self.must(TOPOLOGY, "t", 4, -1)
        return session, self.must(CLAIM, session, "t", number, -1, start)

    def release(self, session: int, epoch: int, **given: object) -> str:
        """What a Release that names these fields comes to."""
        defaults: dict[str, object] = {
            "position": -1,
            "successor": -1,
            "reason": "",
            "observed": -1,
            "give": -1,
            "attempts": 0,
            "in_flight": 0,
            "progress": b"",
            "parked": "",
        }
        assert given.keys() <= defaults.keys()
        return self.say(RELEASE, session, epoch, *{**defaults, **given}.values())

    def config(self, **given: object) -> str:
        """What a GroupConfig that names these fields, and the last accepted one, comes to."""
        defaults: dict[str, object] = {
            "observed": self.group.config_offset if GROUP in self.oracle.groups else -1,
            "token": -1,
            "mode": 0,
            "deleted": False,
            "policy": "",
            "priority_groups": [],
            "priority_timeout_ms": 0,
            "ack_policy": "",
            "max_members": 0,
            "members": [],
            "mappings": [],
            "max_batch": 0,
            "max_expires_ms": 0,
            "max_bytes": 0,
            "max_deliver": 0,
            "by": "",
            "on_topic_recreated": "",
            "failover_ms": 0,
            "lag_weighted": False,
            "release_behind_ms": 0,
        }
        assert given.keys() <= defaults.keys()
        return self.say(CONFIG, *{**defaults, **given}.values())

    def pause(self) -> int:
        return self.must(PAUSE, self.group.pause_change if GROUP in self.oracle.groups else -1, -1, 5000)
