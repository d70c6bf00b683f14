"""Says which rights each kind of client needs, and which of them are missing. Pure: the caller asks the cluster.

The rights are minimal: tests/kafka/test_access.py runs each role with exactly these, and with each one left out. In
Kafka, Read, Write and Delete imply `Describe`, so `Describe` is named only where none of these three is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

CONSUMER: Final = "consumer"
ADMIN: Final = "admin"
OBSERVER: Final = "observer"
ROLES: Final = (CONSUMER, ADMIN, OBSERVER)


class Right(NamedTuple):
    """Names operations that a client may do on one topic or group. They have the names that Kafka's ACLs use."""

    kind: str  # topic, group
    name: str
    operations: tuple[str, ...]


def rights_of(role: str, coordination_topic: str, groups: Iterable[str], topics: Iterable[str]) -> list[Right]:
    """Returns the rights that a role (one of ROLES) needs for these groups and the topics that they consume."""
    data, committed = "Describe", ""
    log: tuple[str, ...] = ("Read",)
    if role == CONSUMER:
        log, data, committed = ("Read", "Write", "DescribeConfigs"), "Read", "Read"
    elif role == ADMIN:
        log, committed = ("Read", "Write", "Delete"), "Describe"
    found = [Right("topic", coordination_topic, log)]
    found += [Right("topic", topic, (data,)) for topic in sorted(topics)]
    return found + [Right("group", group, (committed,)) for group in sorted(groups) if committed]


def missing(needed: Sequence[Right], allowed: Callable[[str, str], frozenset[str]]) -> list[Right]:
    """Returns the rights of `needed` with the operations that `allowed(kind, name)` lacks on that topic or group."""
    lacking = [
        Right(one.kind, one.name, tuple(o for o in one.operations if o not in allowed(one.kind, one.name)))
        for one in needed
    ]
    return [one for one in lacking if one.operations]


def grant(right: Right, principal: str, servers: str) -> str:
    """Returns the shell command that gives the right to `principal`. `servers`: the bootstrap servers."""
    operations = " ".join(f"--operation {operation}" for operation in right.operations)
    return (
        f"kafka-acls.sh --bootstrap-server {servers} --add --allow-principal {principal} {operations} "
        f"--{right.kind} {right.name}"
    )
