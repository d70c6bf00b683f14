"""Checks that the settings of the coordination topic lose no history (PROTOCOL.md L1). Sends no request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from marshal_py.errors import WrongTopicSetting

SAFE_BROKERS: Final = 3  # with at least three brokers the coordination topic must be replicated (L1)
SAFE_ISR: Final = 2
COORDINATION_PARTITIONS: Final = 16  # each is a log of its own, so a member folds only the records of some groups
KEEP_FOREVER: Final = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
SAFE_SETTINGS: Final = {"min.insync.replicas": str(SAFE_ISR), "unclean.leader.election.enable": "false"}


def wrong_settings(
    topic: str, found: Mapping[str, str], brokers: int, replicas: int, servers: str, grow_to: int = 0
) -> Iterator[WrongTopicSetting]:
    """Yields an error for every setting that could lose history, with one command for all. `found`: the topic's;
    `brokers`: how many; `replicas`: its factor; `grow_to`: the wanted count of an empty topic with fewer, else 0 (a
    broker that created it gave it its default)."""
    right = KEEP_FOREVER | (SAFE_SETTINGS if brokers >= SAFE_BROKERS else {})
    pairs = ",".join(f"{key}={value}" for key, value in right.items())
    fix = f"kafka-configs.sh --bootstrap-server {servers} --alter --topic {topic} --add-config {pairs}"
    if grow_to:
        fix += f" && {grow_command(topic, grow_to, servers)}"
    for key, wanted in KEEP_FOREVER.items():
        if key in found and found[key] != wanted:
            yield WrongTopicSetting(topic, key, found[key], wanted, fix)
    if brokers < SAFE_BROKERS:
        return
    if replicas < SAFE_BROKERS:
        yield WrongTopicSetting(
            topic,
            "replication factor",
            str(replicas),
            f"{SAFE_BROKERS} on this cluster",
            f"kafka-reassign-partitions.sh --bootstrap-server {servers}, or delete the topic and "
            f"let it be created again",
        )
    if int(found.get("min.insync.replicas", SAFE_ISR)) < SAFE_ISR:
        yield WrongTopicSetting(topic, "min.insync.replicas", found["min.insync.replicas"], str(SAFE_ISR), fix)
    if found.get("unclean.leader.election.enable", "false") != "false":
        yield WrongTopicSetting(topic, "unclean.leader.election.enable", "true", "false", fix)


def initial_settings(replicas: int) -> dict[str, str]:
    """Returns the settings with which to create a coordination topic."""
    return KEEP_FOREVER | (SAFE_SETTINGS if replicas >= SAFE_BROKERS else {"unclean.leader.election.enable": "false"})


def grow_command(topic: str, partitions: int, servers: str) -> str:
    """Returns the command that adds partitions. It is useless once a Genesis record has fixed their number (L3)."""
    return f"kafka-topics.sh --bootstrap-server {servers} --alter --topic {topic} --partitions {partitions}"
